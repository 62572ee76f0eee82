"""When a fault fires, and on what."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.emulator.faults import (
    Action,
    CloseConnection,
    DetachLink,
    DropConnection,
    EndSession,
    Faults,
    FaultTarget,
    Hold,
    LinkRole,
    Performative,
    Refuse,
    Reject,
    StoreLate,
)

READER = FaultTarget(LinkRole.CONSUMER, "hub", "0", "$default")
TRANSFER = Performative.TRANSFER


async def test_until_fired_returns_once_the_fault_has_fired() -> None:
    """Who waits for a fault goes on when it has fired, and at once afterwards."""
    faults = Faults()
    fault = faults.add(DropConnection(), after=1)
    waiting = asyncio.create_task(fault.until_fired())
    faults.fire(TRANSFER, READER)
    await asyncio.sleep(0)
    assert not waiting.done()
    faults.fire(TRANSFER, READER)
    await waiting
    await fault.until_fired()


@given(st.integers(0, 9), st.integers(0, 5) | st.none(), st.lists(st.integers(1, 7), max_size=12))
def test_fault_fires_after_and_as_often_as_set(after: int, count: int | None, runs: list[int]) -> None:
    """However performatives are counted, one by one or in runs, the same ones are hit."""
    faults = Faults()
    fault = faults.add(DropConnection(), after=after, count=count)
    hit: list[int] = []
    position = 0
    for wanted in runs:
        passed, fired = faults.allowance(TRANSFER, READER, wanted)
        assert fired is (None if passed == wanted else fault)
        position += passed
        if fired is not None:
            hit.append(position)
            position += 1
    assert fault.fired == len(hit)
    end = float("inf") if count is None else after + count
    assert hit == [index for index in range(position) if after <= index < end]


@pytest.mark.parametrize(
    ("where", "matches"),
    [
        ({}, True),
        ({"role": LinkRole.CONSUMER}, True),
        ({"role": LinkRole.PRODUCER}, False),
        ({"hub": "HUB"}, True),
        ({"hub": "other"}, False),
        ({"partition": "0"}, True),
        ({"partition": "1"}, False),
        ({"group": "$Default"}, True),
        ({"group": "g"}, False),
        ({"on": Performative.ATTACH}, False),
    ],
)
def test_fault_fires_on_its_links_only(where: dict[str, object], matches: bool) -> None:
    """Role, hub, partition, group and performative each narrow it; names compare without case."""
    faults = Faults()
    fault = faults.add(DetachLink(), **where)  # type: ignore[arg-type]  # the table holds the right ones
    assert (faults.fire(TRANSFER, READER) is fault) is matches


def test_fault_added_first_fires_first() -> None:
    """Of several faults one fires per performative, in the order they were added."""
    faults = Faults()
    first, second = faults.add(DetachLink()), faults.add(DropConnection())
    assert [faults.fire(TRANSFER, READER) for _ in range(3)] == [first, second, None]


@pytest.mark.parametrize(
    ("action", "on"),
    [
        (CloseConnection(), Performative.OPEN),
        (EndSession(answered=True), Performative.OPEN),
        (DetachLink(answered=True), Performative.BEGIN),
        (DropConnection(), Performative.BEGIN),
        (Hold(), Performative.DETACH),
    ],
)
def test_add_where_the_answer_always_goes_first_takes_what_can_follow_it(action: Action, on: Performative) -> None:
    """At an open, a begin and a detach only ends that follow the answer are taken."""
    with pytest.raises(ValueError, match=r"answered=True: CloseConnection"):
        Faults().add(action, on=on)


def test_remove_releases_what_is_held() -> None:
    """What a fault holds is released when it is removed, alone or with all others; later it is released at once."""
    faults = Faults()
    fault = faults.add(Hold())
    assert faults.fire(TRANSFER, READER) is fault
    released: list[int] = []
    fault.when_removed(lambda: released.append(1))
    assert faults.fire(TRANSFER, READER) is None
    assert released == []
    faults.clear()
    assert released == [1]
    fault.when_removed(lambda: released.append(2))
    fault.remove()
    assert released == [1, 2]
    assert not faults.is_any_set


def test_add_of_a_fault_that_does_not_fit_raises() -> None:
    """A fault that could never be committed is refused when it is added."""
    with pytest.raises(ValueError, match="attach"):
        Faults().add(Refuse("amqp:internal-error"))
    with pytest.raises(ValueError, match="role"):
        Faults().add(Reject(), role=LinkRole.CONSUMER)
    with pytest.raises(ValueError, match="role"):
        Faults().add(Reject())
    with pytest.raises(ValueError, match="StoreLate"):
        Faults().add(StoreLate(), role=LinkRole.CONSUMER)
    with pytest.raises(ValueError, match="StoreLate"):
        Faults().add(StoreLate(), role=LinkRole.PRODUCER, on=Performative.ATTACH)
