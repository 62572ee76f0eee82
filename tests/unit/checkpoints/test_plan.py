"""Which checkpoints are written, and which are refused: the decisions alone."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.checkpoints import ChangeAction, CheckpointChange, CheckpointPlan
from eventpump.checkpoints.plan import (
    Refused,
    Wanted,
    at_time,
    before_event,
    completed,
    of_event,
    plan_changes,
    position_of,
    still,
)
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope, PartitionProperties
from eventpump.lag import StoredCheckpoint

BEGUN = datetime(2030, 1, 1, tzinfo=UTC)
SCOPE = ConsumerScope("a.servicebus.windows.net", "telemetry", "$Default")


@dataclass(frozen=True)
class Partition:
    """A partition whose events are of one second each; retention has removed those before the first one."""

    first: int
    last: int

    @property
    def facts(self) -> PartitionProperties:
        offset = f"o{self.last}" if self.last >= 0 else "-1"
        is_empty = self.first > self.last
        return PartitionProperties("hub", "0", self.first, self.last, offset, self.time(self.last), is_empty)

    def time(self, number: int) -> datetime:
        return BEGUN + timedelta(seconds=number)

    def find(self, wanted: Wanted) -> int:
        """Return the number of the event that a reader of a wanted position receives."""
        position = wanted.position
        assert position.inclusive
        if position.sequence_number is not None:
            return max(self.first, position.sequence_number)
        if position.offset is not None:
            return max(self.first, int(position.offset.removeprefix("o")))
        assert position.enqueued_time is not None
        seconds = (position.enqueued_time - BEGUN).total_seconds()
        return max(self.first, -int(-seconds // 1))

    def resolved(self, found: Checkpoint | Wanted | Refused) -> Checkpoint | Refused:
        if not isinstance(found, Wanted):
            return found
        number = self.find(found)
        assert self.first <= number <= self.last
        return of_event("0", found, number, f"o{number}")

    def by_offset(self, checkpoint: Checkpoint) -> int:
        """Return the event at which the SDKs of Azure begin, which look at the offset alone."""
        if checkpoint.offset == "-1":
            return self.first
        return max(self.first, int(checkpoint.offset.removeprefix("o")) + 1)

    def by_number(self, checkpoint: Checkpoint) -> int:
        """Return the event from which lag is counted."""
        return max(self.first, checkpoint.sequence_number + 1)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    first = draw(st.integers(0, 30))
    return Partition(first, draw(st.integers(first - 1, first + 30)))


# ------------------------------------------------------------------------------------------------- where it begins


@given(partitions(), st.one_of(st.integers(0, 70), st.sampled_from(["earliest", "latest"])))
def test_reset_begins_at_the_event_by_offset_and_by_number(
    partition: Partition, start: Literal["earliest", "latest"] | int
) -> None:
    """Offset and number mean the same event; one that the partition does not have is refused."""
    made = partition.resolved(before_event("0", start, partition.facts))
    match start:
        case "earliest":
            expected = partition.first
        case "latest":
            expected = partition.last + 1
        case _:
            expected = start
    if not partition.first <= expected <= partition.last + 1:
        assert isinstance(made, Refused)
        assert f"{expected:,}" in made.reason
        return
    assert isinstance(made, Checkpoint)
    assert (partition.by_offset(made), partition.by_number(made)) == (expected, expected)


@given(partitions())
def test_earliest_is_the_start_of_the_partition_for_good(partition: Partition) -> None:
    """Whatever retention removes until it is read, an SDK begins with the oldest event, and no loss is counted."""
    made = before_event("0", "earliest", partition.facts)
    assert made == Checkpoint("0", "-1", partition.first - 1)


@given(partitions(), st.integers(-10, 80), st.sampled_from([0.0, 0.4]))
def test_time_begins_at_the_first_event_of_then_or_later(partition: Partition, seconds: int, rest: float) -> None:
    """If there is none, at the end."""
    moment = BEGUN + timedelta(seconds=seconds + rest)
    wanted = at_time(moment, partition.facts)
    later = [number for number in range(partition.first, partition.last + 1) if partition.time(number) >= moment]
    if not later:
        assert wanted == "latest"
        return
    assert isinstance(wanted, Wanted)
    assert partition.find(wanted) == later[0]


@given(partitions(), st.integers(-1, 70), st.sampled_from(["both", "number", "offset"]))
def test_stored_position_is_completed_without_moving(partition: Partition, number: int, has: str) -> None:
    """A number without an offset, and the reverse, begin where they did; a number beyond the end is refused."""
    offset = f"o{number}" if number >= 0 else "-1"
    if has == "offset" and number > partition.last:
        return  # the service refuses to read there
    found = completed("0", None if has == "offset" else number, None if has == "number" else offset, partition.facts)
    if number > partition.last:
        assert isinstance(found, Refused)
        assert "beyond its end" in found.reason
        return
    made = partition.resolved(found)
    assert isinstance(made, Checkpoint)
    expected = max(partition.first, number + 1)
    assert (partition.by_offset(made), partition.by_number(made)) == (expected, expected)


def test_event_that_retention_removed_meanwhile_is_refused() -> None:
    """Its offset is not known any more, and that of the next one would skip it."""
    wanted = before_event("0", 5, Partition(0, 9).facts)
    assert isinstance(wanted, Wanted)
    assert wanted.number == 4
    assert of_event("0", wanted, 7, "o7") == Refused("the event 4 is gone: the next one is 7")


# -------------------------------------------------------------------------------------------------- what is written


positions = st.one_of(
    st.none(),
    st.builds(lambda number: (number, f"o{number}"), st.integers(0, 5)),
    st.just((3, None)),
    st.just((None, "o3")),
)


@st.composite
def stored(draw: st.DrawFn) -> StoredCheckpoint | None:
    if draw(st.integers(0, 4)) == 0:
        return None
    position = draw(positions)
    number, offset = (None, None) if position is None else position
    problem = draw(st.sampled_from([None, "it is broken"])) if position is None else None
    return StoredCheckpoint(
        "0", "v5", "blob", number, offset, owner="host-a", is_owned=draw(st.booleans()), problem=problem
    )


wanted_checkpoints = st.one_of(
    st.none(),
    st.builds(lambda number: Checkpoint("0", f"o{number}", number), st.integers(0, 5)),
    st.just(Refused("it cannot be")),
)


@given(wanted_checkpoints, stored(), st.booleans(), st.booleans(), st.booleans())
def test_partition_is_written_only_if_nothing_speaks_against_it(
    wanted: Checkpoint | Refused | None, before: StoredCheckpoint | None, takes: bool, force: bool, forward_only: bool
) -> None:
    """An owner, a broken checkpoint, a store that does not take it: each refuses it, with a reason, and keeps it."""
    unwritable = {} if takes else {"0": "another hub's"}
    found = {} if before is None else {"0": before}
    (change,) = plan_changes({"0": wanted}, found, unwritable, force=force, forward_only=forward_only)
    assert (change.action is ChangeAction.REFUSE) == (change.reason is not None)
    is_owned = before is not None and bool(before.is_owned)
    is_broken = before is not None and before.problem is not None
    if isinstance(wanted, Refused) or is_broken or not takes:
        assert change.action is ChangeAction.REFUSE
        return
    position = None if wanted is None else (wanted.sequence_number, wanted.offset)
    if position_of(before) == position:
        assert change.action is ChangeAction.KEEP
        return
    number = None if before is None else before.sequence_number
    is_back = number is not None and (wanted is None or wanted.sequence_number < number)
    is_refused = (is_owned and not force) or (forward_only and is_back)
    assert change.action is (ChangeAction.REFUSE if is_refused else ChangeAction.WRITE)
    assert change.after == wanted


@given(wanted_checkpoints, stored(), stored(), st.booleans())
def test_plan_is_carried_out_only_on_what_it_was_made_for(
    wanted: Checkpoint | Refused | None, before: StoredCheckpoint | None, now: StoredCheckpoint | None, force: bool
) -> None:
    """A checkpoint that moved since, or an owner that came, refuses it."""
    changes = plan_changes({"0": wanted}, {} if before is None else {"0": before}, force=force)
    plan = CheckpointPlan(SCOPE, BEGUN, "v5", changes, force=force)
    later = still(plan, {} if now is None else {"0": now})
    if changes[0].action is not ChangeAction.WRITE:
        assert later == []
        return
    is_same = position_of(now) == position_of(before)
    is_free = force or now is None or not now.is_owned
    assert [each.action for each in later] == [
        ChangeAction.WRITE if is_same and is_free else ChangeAction.REFUSE,
    ]
    # What is written is conditioned on the newest version, and exported.
    assert later[0].before == now


@pytest.mark.parametrize(("number", "moved"), [(9, -4), (5, 0), (2, 3), (None, None)])
def test_change_says_how_many_events_it_moves_over(number: int | None, moved: int | None) -> None:
    """Below 0 they are processed again, above 0 skipped; without a number that is not known."""
    before = StoredCheckpoint("0", "v5", "blob", number, "o")
    assert CheckpointChange("0", before, Checkpoint("0", "o5", 5), ChangeAction.WRITE).moved == moved
