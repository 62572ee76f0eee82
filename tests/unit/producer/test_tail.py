"""Reading the end of a partition from one sequence number to another, on virtual time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from eventpump.errors import LinkDetachedError, ServiceTimeoutError
from eventpump.options.base import RetryOptions
from eventpump.producer.tail import read_tail
from eventpump.testing.transport import FakeHub, FakeTransport

AWAY = LinkDetachedError("away")
RETRY = RetryOptions(max_retries=2, base_delay=1.0, max_delay=8.0)


async def numbers(hub: FakeHub, after: int, through: int, **options: Any) -> list[int]:
    """Read a tail; return the sequence numbers of its events."""
    async with aclosing(read_tail(FakeTransport(hub), hub.name, "$Default", "0", after, through, **options)) as events:
        return [event.sequence_number async for event in events]


@pytest.fixture
def hub() -> FakeHub:
    """Return a hub of one partition with ten events."""
    hub = FakeHub(partitions=1)
    hub.publish("0", count=10)
    return hub


@pytest.mark.parametrize(
    ("after", "through", "found"),
    [(-1, 9, range(10)), (3, 6, range(4, 7)), (6, 6, ()), (7, 3, ()), (8, 9, (9,))],
    ids=["all", "within", "none", "backwards", "last"],
)
async def test_read_tail_returns_the_events_between(hub: FakeHub, after: int, through: int, found: range) -> None:
    """The first number is exclusive, the last inclusive; what no event can be in opens no link."""
    assert await numbers(hub, after, through) == list(found)
    assert len(hub.attached) == (1 if found else 0)
    assert hub.credit("0") == []


async def test_read_tail_of_a_compacted_end_stops_at_the_first_event_beyond(hub: FakeHub) -> None:
    """The last number may be missing by now: an event after it shows that it does not come any more."""
    hub.compact("0", [5, 6])
    assert await numbers(hub, 3, 6) == [4]


async def test_read_tail_after_a_lost_link_goes_on_after_the_last_event(hub: FakeHub) -> None:
    """With retries a link is opened again where the last one ended; without them, its error is raised."""
    for options in ({"retry": RETRY}, {}):
        hub.attached.clear()
        last = hub.publish("0", count=1)[0]
        reading = asyncio.ensure_future(numbers(hub, -1, last + 2, **options))
        await asyncio.sleep(20)
        hub.detach("0", AWAY)
        hub.publish("0", count=2)
        if options:
            assert await reading == list(range(last + 3))
            assert [spec.position.sequence_number for spec in hub.attached[1:]] == [last]
        else:
            with pytest.raises(LinkDetachedError):
                await reading


async def test_read_tail_whose_events_do_not_come_times_out(hub: FakeHub) -> None:
    """A link that stays open and brings nothing is waited for as long as is allowed."""
    hub.stall("0")
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(ServiceTimeoutError, match="within 30 s"):
        await numbers(hub, -1, 9, timeout=30.0, retry=RETRY)
    assert loop.time() - began == pytest.approx(30.0, abs=1.0)
    assert hub.credit("0") == []


async def test_read_tail_of_large_events_bounds_what_is_received_ahead(hub: FakeHub) -> None:
    """What a slow caller has not taken stays at the service, beyond some megabytes."""
    hub.publish("0", *(b"x" * 1_000_000 for _ in range(60)))
    transport = FakeTransport(hub)
    most = 0
    async with aclosing(read_tail(transport, hub.name, "$Default", "0", 9, 69)) as events:
        async for _ in events:
            await asyncio.sleep(1)
            most = max(most, *hub.credit("0"), 0)
    assert most < 40
