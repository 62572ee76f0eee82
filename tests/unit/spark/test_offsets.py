"""What a query and its batches cover: decided from numbers alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import PartitionProperties
from eventpump.spark.source.offsets import (
    CREATED,
    FIRST_START,
    MAX_READERS,
    ROWS_PER_TASK,
    HubOffset,
    HubSnapshot,
    PartitionBounds,
    QueryLoss,
    SequenceRange,
    SourceOffset,
    StreamPlanner,
    TriggerLimits,
    batch_ranges,
    group_ranges,
    keep_links_for,
    lookup_of,
    number_of,
    plan_tasks,
    share,
    source_ranges,
    split_ranges,
)

BORN = datetime(2030, 1, 1, tzinfo=UTC)
NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)
OTHER = BORN + timedelta(days=1)


def snapshot(*, created_at: datetime = BORN, **bounds: tuple[int, int] | int) -> HubSnapshot:
    """Make a snapshot: p0=7 is a partition with the numbers below 7, p0=(3, 7) one whose oldest is 3."""
    pairs = {key[1:]: (0, each) if isinstance(each, int) else each for key, each in bounds.items()}
    return HubSnapshot("hub", created_at, {key: PartitionBounds(*pair) for key, pair in pairs.items()})


def offset(*, created_at: datetime | None = BORN, **following: int) -> HubOffset:
    return HubOffset("hub", {key[1:]: number for key, number in following.items()}, created_at=created_at)


def properties(
    *, first: int = 0, last: int = -1, is_empty: bool = False, moment: datetime = NOON
) -> PartitionProperties:
    return PartitionProperties("hub", "0", first, last, f"o{last}", moment, is_empty or last < first)


def restored(made: HubOffset) -> HubOffset:
    """Take an offset through Spark's checkpoint."""
    return SourceOffset.from_json(json.loads(json.dumps(SourceOffset.of([made]).to_json()))).hubs["hub"]


class End(NamedTuple):
    """The end of a batch in the only hub; the offset is the start itself where there is no batch."""

    offset: HubOffset
    losses: tuple[QueryLoss, ...]


def end_of(
    planner: StreamPlanner, start: HubOffset, found: HubSnapshot, *, is_limited: bool = True, now: float = 0.0
) -> End:
    begin = SourceOffset.of([start])
    end = planner.end(begin, {"hub": found}, is_limited=is_limited, now=now)
    return End(start if end.offset is begin else end.offset.hubs["hub"], end.losses)


def next_batch(
    planner: StreamPlanner, start: HubOffset, found: HubSnapshot, *, is_limited: bool = True, now: float = 0.0
) -> HubOffset:
    end = end_of(planner, start, found, is_limited=is_limited, now=now)
    assert end.losses == ()
    return restored(end.offset)


# ---------------------------------------------------------------------------------------------------------- offsets


def test_offset_is_written_as_the_connectors_text() -> None:
    """Partitions are in numeric order, keys are text and numbers plain: the same offset is the same text."""
    made = HubOffset("hub", {"10": 5, "9": 4, "0": 3})
    assert json.dumps(SourceOffset.of([made]).to_json()) == '{"hub": {"0": 3, "9": 4, "10": 5}}'
    assert restored(made) == made
    begun = replace(made, first_start={"0": 1})
    assert SourceOffset.of([begun]).to_json()[FIRST_START] == {"0": 1}
    assert restored(begun) == begun
    elsewhere = replace(begun, created_at=BORN.astimezone(timezone(timedelta(hours=2))))
    assert SourceOffset.of([elsewhere]).to_json()[CREATED] == {"hub": "2030-01-01T00:00:00+00:00"}
    assert restored(elsewhere) == replace(begun, created_at=BORN)


@pytest.mark.parametrize(
    "document",
    [None, [], {}, {"hub": 3}, {"hub": {"0": -1}}, {"hub": {"0": True}}, {"hub": {"0": "3"}}, {"hub": {}, "HUB": {}},
     {FIRST_START: {"0": 1}}, {"hub": {"0": 1}, FIRST_START: 4}, {"hub": {"0": 1}, FIRST_START: {"0": "x"}},
     {"hub": {"0": 1}, "other": {"0": 1}, FIRST_START: {"0": 1}}, {CREATED: {"hub": "2030-01-01T00:00:00+00:00"}},
     {"hub": {"0": 1}, CREATED: "2030-01-01T00:00:00+00:00"}, {"hub": {"0": 1}, CREATED: {"hub": 3}},
     {"hub": {"0": 1}, CREATED: {"hub": "2030-01-01T00:00:00"}}, {"hub": {"0": 1}, CREATED: {"hub": "then"}},
     {"hub": {"0": 1}, CREATED: {"other": "2030-01-01T00:00:00+00:00"}}],
)  # fmt: skip
def test_offset_of_another_source_is_refused(document: object) -> None:
    """A checkpoint of another source is an error, and not taken for an offset."""
    with pytest.raises(ConfigurationError, match=r"^checkpoint: an offset"):
        SourceOffset.from_json(document)


def test_offset_of_several_hubs_is_written_in_one_way() -> None:
    """Hubs are in alphabetical order, whatever the user's; starts are by hub; each form is read again as it was."""
    one, other = HubOffset("telemetry", {"1": 4, "0": 3}), HubOffset("Alerts", {"0": 7}, {"0": 2})
    both = SourceOffset.of([one, other])
    assert json.dumps(both.to_json()) == (
        '{"Alerts": {"0": 7}, "telemetry": {"0": 3, "1": 4}, "(start)": {"Alerts": {"0": 2}}}'
    )
    assert SourceOffset.of([other, one]).to_json() == both.to_json()
    assert SourceOffset.from_json(json.loads(json.dumps(both.to_json()))) == both
    created = SourceOffset.of([replace(one, created_at=OTHER), other])
    assert created.to_json()[CREATED] == {"telemetry": "2030-01-02T00:00:00+00:00"}
    assert SourceOffset.from_json(json.loads(json.dumps(created.to_json()))) == created


# -------------------------------------------------------------------------------------------------------- positions

FULL = properties(first=3, last=9)
EMPTIED = properties(first=0, last=9, is_empty=True)


@pytest.mark.parametrize(
    ("position", "found", "number"),
    [
        (EventPosition.earliest(), FULL, 3),
        (EventPosition.latest(), FULL, 10),
        (EventPosition.earliest(), EMPTIED, 10),
        (EventPosition.latest(), EMPTIED, 10),
        (EventPosition.earliest(), properties(), 0),
        (EventPosition.at_offset("@latest", inclusive=True), FULL, 10),
        (EventPosition.at_sequence_number(5, inclusive=True), FULL, 5),
        (EventPosition.at_sequence_number(5), FULL, 6),
        (EventPosition.at_sequence_number(9), FULL, 10),
        (EventPosition.at_sequence_number(1, inclusive=True), FULL, 1),
        (EventPosition.at_offset("o9"), FULL, 10),
        (EventPosition.at_offset("o9", inclusive=True), FULL, None),
        (EventPosition.at_offset("o5"), FULL, None),
        (EventPosition.at_offset("o9", inclusive=True), EMPTIED, 10),
        (EventPosition.at_enqueued_time(NOON, inclusive=True), FULL, None),
        (EventPosition.at_enqueued_time(NOON), FULL, 10),
        (EventPosition.at_enqueued_time(NOON + timedelta(seconds=1), inclusive=True), FULL, 10),
        (EventPosition.at_enqueued_time(NOON - timedelta(seconds=1)), FULL, None),
        (EventPosition.at_enqueued_time(NOON - timedelta(seconds=1)), EMPTIED, 10),
    ],
)
def test_start_is_looked_up_only_if_properties_are_not_enough(
    position: EventPosition, found: PartitionProperties, number: int | None
) -> None:
    """A start that follows from the properties is not looked up, and one that cannot never waits for an event."""
    assert number_of(position, found, option="startingPosition") == number


@pytest.mark.parametrize(
    ("position", "number"),
    [
        (EventPosition.latest(), 10),
        (EventPosition.earliest(), 3),
        (EventPosition.at_sequence_number(5, inclusive=True), 6),
        (EventPosition.at_sequence_number(5), 5),
        (EventPosition.at_enqueued_time(NOON, inclusive=True), 10),
        (EventPosition.at_enqueued_time(NOON), None),
        (EventPosition.at_offset("o9", inclusive=True), 10),
    ],
)
def test_end_that_is_inclusive_is_read_too(position: EventPosition, number: int | None) -> None:
    """An end is the first number not to be read: behind the event itself where it is inclusive."""
    assert number_of(position, FULL, option="endingPosition", is_end=True) == number


def test_end_is_looked_up_behind_what_it_includes() -> None:
    """The first event after an inclusive end, or at an exclusive one, has the end's number."""
    assert lookup_of(EventPosition.at_enqueued_time(NOON, inclusive=True), is_end=True).inclusive is False
    assert lookup_of(EventPosition.at_enqueued_time(NOON), is_end=True).inclusive is True
    assert lookup_of(EventPosition.at_enqueued_time(NOON)).inclusive is False


def test_position_beyond_the_end_is_refused() -> None:
    """A sequence number that the partition has not reached is an error, and no wait forever."""
    with pytest.raises(ConfigurationError, match="startingPosition: partition 0 ends at sequence number 9, before 12"):
        number_of(EventPosition.at_sequence_number(12, inclusive=True), FULL, option="startingPosition")


@pytest.mark.parametrize("is_end", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_position_beyond_the_end_is_the_end_unless_it_must_exist(is_end: bool, inclusive: bool) -> None:
    """A number that uneven partitions need not have reached is the end of those that have not."""
    for number in (10, 11, 12, 99):
        position = EventPosition.at_sequence_number(number, inclusive=inclusive)
        assert number_of(position, FULL, option="startingPosition", is_end=is_end, must_exist=False) == 10


# ----------------------------------------------------------------------------------------------------------- limits


@given(
    st.dictionaries(st.integers(0, 40).map(str), st.integers(0, 10**9), max_size=20),
    st.integers(1, 10**9),
)
def test_shares_follow_backlog(backlog: dict[str, int], limit: int) -> None:
    """Shares add up to the limit or the backlog, none is more than its backlog, and each partition behind gets some."""
    shares = share(backlog, limit)
    lagging = sum(events > 0 for events in backlog.values())
    assert shares.keys() == backlog.keys()
    assert all(min(1, backlog[each]) <= events <= backlog[each] for each, events in shares.items())
    assert sum(shares.values()) == min(sum(backlog.values()), max(limit, lagging))


@given(st.dictionaries(st.integers(0, 40).map(str), st.integers(0, 10**6), max_size=20), st.integers(1, 10**6))
@example({"0": 828246, "6": 966201, "40": 0, "5": 1, "1": 1, "2": 83}, 13)
def test_share_of_a_larger_backlog_is_not_smaller(backlog: dict[str, int], limit: int) -> None:
    """Proportion holds to one event."""
    shares = share(backlog, limit)
    ordered = sorted(backlog, key=lambda each: backlog[each])
    assert all(shares[low] <= shares[high] + 1 for low, high in pairwise(ordered))


def test_share_is_proportional_to_the_backlog() -> None:
    """A partition with three times the backlog gets three times as much."""
    assert share({"0": 300, "1": 100, "2": 0}, 40) == {"0": 30, "1": 10, "2": 0}


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 9).map(str)),
        st.tuples(st.integers(0, 10**5), st.floats(1.0, 10**5)),
        min_size=1,
    ),
    st.integers(1, 10**8),
    st.integers(1, 10**6) | st.none(),
)
def test_limit_in_bytes_is_kept_by_mean_sizes(
    found: dict[tuple[str, str], tuple[int, float]], most: int, events: int | None
) -> None:
    """By the mean sizes a batch has no more bytes than the limit, besides one event per partition, and at least half of
    what it could have; both limits hold together, over all hubs."""
    snapshots = {
        hub: HubSnapshot(
            hub, BORN, {each[1]: PartitionBounds(0, n, size) for each, (n, size) in found.items() if each[0] == hub}
        )
        for hub in ("a", "b")
    }
    start = SourceOffset.of([HubOffset("a", {}), HubOffset("b", {})])
    planner = StreamPlanner(TriggerLimits(max_bytes=most, max_events=events))
    end = planner.end(start, snapshots, is_limited=True, now=0.0).offset
    read = {(hub, each): number for hub, offset in end.hubs.items() for each, number in offset.following.items()}
    lagging = {place for place, (backlog, _) in found.items() if backlog}
    assert read.keys() == lagging
    assert all(1 <= number <= found[place][0] for place, number in read.items())
    size = sum(number * found[place][1] for place, number in read.items())
    one_each = sum(found[place][1] for place in lagging)
    assert size <= most + one_each
    if events is not None:
        assert sum(read.values()) <= max(events, len(lagging))
    elif sum(backlog * each for backlog, each in found.values()) > most:
        assert size >= most - 2 * one_each - len(found)


@given(st.lists(st.tuples(st.integers(0, 10**5), st.floats(1.0, 10**5)), min_size=1, max_size=9), st.integers(0, 10))
def test_limit_in_bytes_above_the_backlog_leaves_nothing_unread(found: list[tuple[int, float]], room: int) -> None:
    """However the sizes are rounded: events that are left would wait for `minEventsPerTrigger`."""
    bounds = {str(each): PartitionBounds(0, events, size) for each, (events, size) in enumerate(found)}
    most = math.ceil(sum(events * size for events, size in found)) + 1 + room
    planner = StreamPlanner(TriggerLimits(max_bytes=most))
    end = end_of(planner, HubOffset("hub", dict.fromkeys(bounds, 0)), HubSnapshot("hub", BORN, bounds))
    assert end.offset.following == {each: found.latest for each, found in bounds.items()}


def test_limit_in_bytes_needs_known_sizes() -> None:
    """Where offsets are no positions in bytes, the error names the option that works."""
    planner = StreamPlanner(TriggerLimits(max_bytes=1))
    with pytest.raises(ConfigurationError, match=r"maxBytesPerTrigger: .*partition 0 of hub hub.*maxEventsPerTrigger"):
        end_of(planner, offset(p0=0), snapshot(p0=5))
    assert end_of(planner, offset(p0=5), snapshot(p0=5)).offset == offset(p0=5)
    assert end_of(planner, offset(p0=0), snapshot(p0=5), is_limited=False).offset == offset(p0=5)


# --------------------------------------------------------------------------------------------------------- triggers


def test_next_batch_without_a_limit_ends_at_the_newest_event() -> None:
    """Without a limit a batch ends at the newest event; a trigger that asks for all passes the limit over."""
    start = offset(p0=1, p1=2)
    assert next_batch(StreamPlanner(TriggerLimits()), start, snapshot(p0=5, p1=2)) == offset(p0=5, p1=2)
    limited = StreamPlanner(TriggerLimits(max_events=2))
    assert next_batch(limited, start, snapshot(p0=5, p1=2)) == offset(p0=3, p1=2)
    assert next_batch(limited, start, snapshot(p0=5, p1=2), is_limited=False) == offset(p0=5, p1=2)


def test_batch_is_full_if_the_limits_leave_events_for_later() -> None:
    """By events, by bytes and up to the target; never where a loss, another hub or a new one is to be decided first."""
    start, found = SourceOffset.of([offset(p0=1, p1=2)]), {"hub": snapshot(p0=5, p1=4)}
    for limits, is_full in (
        (TriggerLimits(), False),
        (TriggerLimits(max_events=5), True),
        (TriggerLimits(max_events=6), False),
        (TriggerLimits(max_events=5, min_events=7, max_delay=60), True),
    ):
        assert StreamPlanner(limits).is_full(start, found) is is_full
    sized = {"hub": HubSnapshot("hub", BORN, {"0": PartitionBounds(0, 5, 100.0), "1": PartitionBounds(0, 4, 10.0)})}
    for most, is_full in ((419, True), (420, False)):
        assert StreamPlanner(TriggerLimits(max_bytes=most)).is_full(start, sized) is is_full
    planner = StreamPlanner(TriggerLimits(max_events=5))
    assert not planner.is_full(start, {"hub": snapshot(created_at=OTHER, p0=50)})
    assert not planner.is_full(start, {"hub": snapshot(p0=(3, 50), p1=50)})
    assert not planner.is_full(start, {"hub": snapshot(p0=50)})
    assert not planner.is_full(start, {"hub": snapshot(p0=50, p1=50), "other": snapshot(p0=1)})
    assert not planner.is_full(SourceOffset.of([offset(p0=1, p1=2), HubOffset("gone", {})]), found)
    assert not planner.is_full(SourceOffset.of([offset(created_at=None, p0=1, p1=2)]), found)
    planner.aim({"hub": snapshot(p0=3, p1=4)})
    assert not planner.is_full(start, {"hub": snapshot(p0=50, p1=50)})


def test_next_batch_without_new_events_is_the_start() -> None:
    """Where there is nothing to read the answer is the start, so that Spark runs no batch."""
    start = offset(p0=5)
    assert end_of(StreamPlanner(TriggerLimits()), start, snapshot(p0=5), is_limited=True, now=0).offset is start
    grown = snapshot(p0=5, p1=0)
    assert end_of(StreamPlanner(TriggerLimits()), start, grown, is_limited=True, now=0).offset is start


def test_next_batch_begins_a_new_partition_at_its_beginning() -> None:
    """What a partition got before it was discovered is read."""
    end = next_batch(StreamPlanner(TriggerLimits()), offset(p0=5), snapshot(p0=5, p1=3))
    assert end == offset(p0=5, p1=3)
    ranges, losses = batch_ranges(offset(p0=5), end, snapshot(p0=5, p1=3))
    assert (ranges, losses) == ([SequenceRange("1", 0, 3)], [])


def test_next_batch_begins_a_new_partition_at_the_first_event_that_there_is() -> None:
    """What retention removed before is no loss. The start is written with the batch, even one without events, so that
    the same batch is planned again later, and what retention removes after that is a loss."""
    planner, start = StreamPlanner(TriggerLimits(min_events=5)), offset(p0=5)
    empty = end_of(planner, start, snapshot(p0=5, p1=(3, 6)))
    assert (restored(empty.offset), empty.losses) == (HubOffset("hub", {"0": 5, "1": 3}, {"0": 5, "1": 3}, BORN), ())
    assert batch_ranges(start, empty.offset, snapshot(p0=5, p1=(3, 6))) == ([], [])
    end = end_of(StreamPlanner(TriggerLimits()), start, snapshot(p0=7, p1=(3, 6)))
    assert (restored(end.offset), end.losses) == (HubOffset("hub", {"0": 7, "1": 6}, {"0": 5, "1": 3}, BORN), ())
    ranges, losses = batch_ranges(start, end.offset, snapshot(p0=7, p1=(3, 8)))
    assert (ranges, losses) == ([SequenceRange("0", 5, 7), SequenceRange("1", 3, 6)], [])
    _, losses = batch_ranges(start, end.offset, snapshot(p0=7, p1=(4, 8)))
    assert [each.partition_id for each in losses] == ["1"]
    assert next_batch(StreamPlanner(TriggerLimits()), end.offset, snapshot(p0=7, p1=(3, 8))) == offset(p0=7, p1=8)


def test_next_batch_waits_for_min_events_or_the_delay() -> None:
    """`min_events` holds a batch back until there are so many or the delay has passed, and then it counts from zero."""
    planner = StreamPlanner(TriggerLimits(min_events=10, max_delay=60))
    start = offset(p0=0)
    assert next_batch(planner, start, snapshot(p0=3), now=100) == start
    assert next_batch(planner, start, snapshot(p0=9), now=159) == start
    assert next_batch(planner, start, snapshot(p0=9), now=160) == offset(p0=9)
    assert next_batch(planner, offset(p0=9), snapshot(p0=18), now=219) == offset(p0=9)
    assert next_batch(planner, offset(p0=9), snapshot(p0=19), now=219) == offset(p0=19)


def test_available_now_ends_at_its_snapshot() -> None:
    """What comes after the snapshot is left alone, new partitions too, and the least number does not hold it up."""
    planner = StreamPlanner(TriggerLimits(max_events=2, min_events=2))
    planner.aim({"hub": snapshot(p0=3)})
    later = snapshot(p0=9, p1=4)
    first = next_batch(planner, offset(p0=0), later)
    second = next_batch(planner, first, later)
    assert (first, second) == (offset(p0=2), offset(p0=3))
    assert end_of(planner, second, later, is_limited=True, now=0).offset is second
    beyond = offset(p0=5)
    assert end_of(planner, beyond, later, is_limited=True, now=0).offset is beyond


def test_first_batch_is_written_with_its_start() -> None:
    """A new query's start is in the checkpoint with the first batch, be it empty, and no later one repeats it."""
    planner = StreamPlanner(TriggerLimits())
    planner.begin(offset(p0=4))
    first = next_batch(planner, offset(p0=4), snapshot(p0=4))
    assert first == HubOffset("hub", {"0": 4}, first_start={"0": 4}, created_at=BORN)
    assert next_batch(planner, first, snapshot(p0=4)) == first
    assert next_batch(planner, first, snapshot(p0=6)) == offset(p0=6)


def test_first_batch_repeated_is_the_same() -> None:
    """Spark asks again where a first batch began when it repeats it; the batch keeps to what was decided before."""
    first = HubOffset("hub", {"0": 7, "1": 2}, first_start={"0": 3, "1": 2})
    asked_later = offset(p0=20, p1=20)
    ranges, losses = batch_ranges(asked_later, first, snapshot(p0=20, p1=20))
    assert (ranges, losses) == ([SequenceRange("0", 3, 7)], [])


# ----------------------------------------------------------------------------------------------------------- losses


def losses_of(start: HubOffset, found: HubSnapshot) -> list[tuple[str, str]]:
    end = end_of(StreamPlanner(TriggerLimits()), start, found, is_limited=True, now=0)
    return [(each.partition_id, each.problem) for each in end.losses]


def test_data_loss_is_found_where_retention_passed_the_start() -> None:
    """Events before the oldest kept are gone; a query that may go on reads from there."""
    ((partition_id, problem),) = losses_of(offset(p0=2), snapshot(p0=(5, 9)))
    assert partition_id == "0"
    assert "has sequence number 2" in problem
    assert "begins at 5" in problem
    end = end_of(StreamPlanner(TriggerLimits()), offset(p0=2), snapshot(p0=(5, 9)), is_limited=True, now=0).offset
    assert end == offset(p0=9)
    ranges, losses = batch_ranges(offset(p0=2), end, snapshot(p0=(5, 9)))
    assert ranges == [SequenceRange("0", 5, 9)]
    assert len(losses) == 1


@pytest.mark.parametrize("emptied", [(9, 9), (5, 9)])
def test_data_loss_is_reported_once(emptied: tuple[int, int]) -> None:
    """A query that goes on does not find the same loss again, where everything is gone neither."""
    planner = StreamPlanner(TriggerLimits())
    found = snapshot(p0=emptied)
    end = end_of(planner, offset(p0=2), found, is_limited=True, now=0)
    assert len(end.losses) == 1
    again = end_of(planner, end.offset, found, is_limited=True, now=0)
    assert (again.losses, again.offset) == ((), end.offset)


@pytest.mark.parametrize("new", [0, 1, 6])
def test_data_loss_is_found_where_numbers_run_backwards(new: int) -> None:
    """A recreated hub shows by lower numbers, if an offset has no creation time; a query that may go on reads it from
    its beginning."""
    start = offset(created_at=None, p0=7)
    ((partition_id, problem),) = losses_of(start, snapshot(p0=new))
    assert partition_id == "0"
    assert "the hub was recreated" in problem
    planner = StreamPlanner(TriggerLimits(max_events=4))
    end = end_of(planner, start, snapshot(p0=new), is_limited=True, now=0).offset
    assert restored(end) == HubOffset("hub", {"0": min(new, 4)}, {"0": 0}, BORN)
    ranges, losses = batch_ranges(start, end, snapshot(p0=new))
    assert (ranges, losses) == ([SequenceRange("0", 0, min(new, 4))] if new else [], [])


@pytest.mark.parametrize("found", [snapshot(p0=2, p1=9), snapshot(p1=9)])
def test_hub_recreated_while_the_query_was_stopped_is_read_from_its_beginning(found: HubSnapshot) -> None:
    """If an offset has no creation time, one partition shows it, by lower numbers or by not being there: the others
    have other events too."""
    start = offset(created_at=None, p0=7, p1=3)
    end = end_of(StreamPlanner(TriggerLimits()), start, found)
    assert [each.partition_id for each in end.losses] == ["0"]
    ranges, losses = batch_ranges(start, restored(end.offset), found)
    assert (ranges, losses) == ([SequenceRange(each, 0, at.latest) for each, at in found.bounds.items()], [])


def test_partition_whose_numbers_run_backwards_in_the_same_hub_is_read_alone() -> None:
    """The creation time is the same: the events of the other partitions are the same."""
    planner = StreamPlanner(TriggerLimits())
    end_of(planner, offset(p0=7, p1=3), snapshot(p0=7, p1=3))
    end = end_of(planner, offset(p0=7, p1=3), snapshot(p0=2, p1=5))
    assert [each.partition_id for each in end.losses] == ["0"]
    ranges, _ = batch_ranges(offset(p0=7, p1=3), restored(end.offset), snapshot(p0=2, p1=5))
    assert ranges == [SequenceRange("0", 0, 2), SequenceRange("1", 3, 5)]


def test_data_loss_is_found_where_a_partition_is_missing() -> None:
    """A partition that the hub no longer has shows; a query that may go on forgets it."""
    start = offset(created_at=None, p0=7, p1=3)
    ((partition_id, problem),) = losses_of(start, snapshot(p0=7))
    assert (partition_id, problem) == ("1", "the hub no longer has it: the hub was recreated")
    end = end_of(StreamPlanner(TriggerLimits()), start, snapshot(p0=7), is_limited=True, now=0).offset
    assert end == HubOffset("hub", {"0": 7}, {"0": 0}, BORN)
    ranges, losses = batch_ranges(offset(p0=7, p1=1), start, snapshot(p0=7))
    assert (ranges, [each.partition_id for each in losses]) == ([], ["1"])


def test_recreated_hub_is_found_by_a_run_whose_offset_has_no_creation_time() -> None:
    """Offsets of the Scala connector have none: a new time in a later snapshot of the run is reported, once."""
    planner = StreamPlanner(TriggerLimits())
    at = offset(created_at=None, p0=3)
    assert end_of(planner, at, snapshot(p0=3)).losses == ()
    other = snapshot(created_at=BORN + timedelta(days=1), p0=30)
    (loss,) = end_of(planner, at, other).losses
    assert "2030-01-02" in loss.problem
    assert "the hub was recreated" in str(loss.error())
    assert end_of(planner, at, other).losses == ()


@pytest.mark.parametrize("new", [0, 20, 49, 50, 51, 60])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("was_running", [False, True])
def test_recreated_hub_is_read_from_its_first_event(new: int, is_first: bool, was_running: bool) -> None:
    """With fewer events than were read, as many, or more: all of them, also if the batch is repeated after a restart,
    and whether the hub was recreated while the query ran or was stopped."""
    at = replace(offset(p0=50, p1=3), first_start={"0": 0, "1": 0} if is_first else None)
    found = snapshot(created_at=OTHER, p0=new, p1=3)
    planner = StreamPlanner(TriggerLimits())
    for asked in (StreamPlanner(TriggerLimits()), planner, planner):  # a query that fails does so each time
        losses = end_of(asked, at, found).losses
        assert "the hub was recreated: its creation time is now 2030-01-02" in losses[0].problem
    planner = StreamPlanner(TriggerLimits())
    if was_running:
        assert end_of(planner, at, snapshot(p0=50, p1=3)).offset is at
    log = [at]
    for _ in range(2):
        end = end_of(planner, log[-1], found).offset
        if end != log[-1]:
            log.append(restored(end))
    read: list[SequenceRange] = []
    for start, end in pairwise(log):
        ranges, gone = batch_ranges(start, end, found)
        assert gone == []
        read += ranges
    numbers = [(each.partition_id, number) for each in read for number in range(each.start, each.end)]
    assert sorted(numbers) == [("0", number) for number in range(new)] + [("1", number) for number in range(3)]
    assert end_of(planner, log[-1], found).offset == log[-1]


def test_recreated_hub_is_read_from_the_first_event_that_there_is() -> None:
    """What its retention has removed is no loss of the query; an added partition is read like the others."""
    planner = StreamPlanner(TriggerLimits())
    end_of(planner, offset(p0=5), snapshot(p0=5))
    found = snapshot(created_at=OTHER, p0=(3, 9), p1=(2, 4), p2=0)
    end = end_of(planner, offset(p0=5), found)
    assert [each.is_other_hub for each in end.losses] == [True]
    assert restored(end.offset) == HubOffset("hub", {"0": 9, "1": 4}, {"0": 3, "1": 2}, OTHER)
    ranges, losses = batch_ranges(offset(p0=5), end.offset, found)
    assert (ranges, losses) == ([SequenceRange("0", 3, 9), SequenceRange("1", 2, 4)], [])


def test_recreated_hub_is_read_without_a_wait_for_more_events() -> None:
    """`min_events` holds nothing back that reports a loss: Spark stores the new start only with a batch."""
    planner = StreamPlanner(TriggerLimits(min_events=100))
    at = offset(p0=5)
    end_of(planner, at, snapshot(p0=5))
    end = end_of(planner, at, snapshot(created_at=OTHER, p0=5)).offset
    assert restored(end) == HubOffset("hub", {"0": 5}, {"0": 0}, OTHER)


def test_recreated_hub_of_several_is_read_alone_from_its_beginning() -> None:
    """The others go on where they were, and keep no start."""
    planner = StreamPlanner(TriggerLimits())
    start = SourceOffset.of([HubOffset("a", {"0": 5}), HubOffset("b", {"0": 5})])

    def found(**created_at: datetime) -> dict[str, HubSnapshot]:
        return {hub: HubSnapshot(hub, at, {"0": PartitionBounds(0, 6)}) for hub, at in created_at.items()}

    planner.end(start, found(a=BORN, b=BORN), is_limited=True, now=0.0)
    end = planner.end(start, found(a=BORN, b=OTHER), is_limited=True, now=0.0)
    assert [each.hub for each in end.losses] == ["b"]
    logged = SourceOffset.from_json(json.loads(json.dumps(end.offset.to_json())))
    created = {"a": BORN.isoformat(), "b": OTHER.isoformat()}
    assert logged.to_json() == {"a": {"0": 6}, "b": {"0": 6}, FIRST_START: {"b": {"0": 0}}, CREATED: created}
    ranges, losses = source_ranges(start, logged, found(a=BORN, b=OTHER))
    assert (ranges, losses) == ({"a": [SequenceRange("0", 5, 6)], "b": [SequenceRange("0", 0, 6)]}, [])


@pytest.mark.parametrize("new", [0, 8, 9, 30])
def test_batch_of_a_hub_that_was_recreated_since_reads_nothing(new: int) -> None:
    """Its numbers are other events in the new hub: they are gone, and the next batch begins at the new hub's first
    event. A batch without events loses none."""
    found = snapshot(created_at=OTHER, p0=new)
    ranges, (loss,) = batch_ranges(offset(p0=2), offset(p0=9), found)
    assert ranges == []
    assert "the hub was recreated: its creation time is now 2030-01-02" in loss.problem
    first = replace(offset(p0=9), first_start={"0": 4})
    assert batch_ranges(offset(created_at=OTHER, p0=new), first, found) == ([], [loss])
    assert batch_ranges(offset(p0=9), offset(p0=9), found) == ([], [])
    end = end_of(StreamPlanner(TriggerLimits()), offset(p0=9), found).offset
    assert batch_ranges(offset(p0=9), restored(end), found)[0] == ([SequenceRange("0", 0, new)] if new else [])


def test_hub_recreated_after_the_query_began_is_read_from_its_first_event() -> None:
    """Before the first batch: wherever the query would have begun in the former hub."""
    planner = StreamPlanner(TriggerLimits())
    planner.begin(offset(p0=7))
    found = snapshot(created_at=OTHER, p0=9)
    end = end_of(planner, offset(p0=7), found)
    assert [each.is_other_hub for each in end.losses] == [True]
    assert restored(end.offset) == HubOffset("hub", {"0": 9}, {"0": 0}, OTHER)


def test_available_now_reads_what_a_recreated_hub_has() -> None:
    """The end that was available is one of the former hub: the run ends at the first known end of the new one."""
    planner = StreamPlanner(TriggerLimits())
    planner.aim({"hub": snapshot(p0=3)})
    end = end_of(planner, offset(p0=3), snapshot(created_at=OTHER, p0=8)).offset
    assert restored(end) == HubOffset("hub", {"0": 8}, {"0": 0}, OTHER)
    assert end_of(planner, end, snapshot(created_at=OTHER, p0=20)).offset is end


def test_data_loss_is_found_where_a_batch_lies_beyond_the_end() -> None:
    """A logged batch that a recreated hub cannot have is not waited for."""
    ranges, (loss,) = batch_ranges(offset(p0=2), offset(p0=9), snapshot(p0=4))
    assert ranges == [SequenceRange("0", 2, 4)]
    assert "ends at 3" in loss.problem


def test_data_loss_error_names_the_option_to_go_on() -> None:
    """The error of a loss names the option that lets the query go on."""
    (loss,) = end_of(StreamPlanner(TriggerLimits()), offset(p0=2), snapshot(p0=1), is_limited=True, now=0).losses
    assert str(loss.error()).startswith("hub hub, partition 0: sequence number 1 was reached before")
    assert "failOnDataLoss" in str(loss.error())


def test_error_of_a_recreated_hub_says_how_to_go_on() -> None:
    """It comes again at each restart, until the user decides."""
    (loss,) = end_of(StreamPlanner(TriggerLimits()), offset(p0=2), snapshot(created_at=OTHER, p0=2)).losses
    assert "failOnDataLoss is true, and will stop again when it is restarted; set it to false to continue" in str(
        loss.error()
    )
    assert "or begin another query with a new checkpoint" in str(loss.error())


# ------------------------------------------------------------------------------------------------------------ a run


class _Run:
    """A hub that grows, and a query that is stopped and started, with Spark's log between its runs."""

    def __init__(self, limits: TriggerLimits, begun: Mapping[str, int]) -> None:
        self.limits = limits
        self.latest = dict(begun)
        self.earliest: dict[str, int] = {}
        self.planner = StreamPlanner(limits)
        self.log: list[HubOffset] = []
        self.committed = 0
        self.read: Counter[tuple[str, int]] = Counter()
        self.start = self.initial()

    def initial(self) -> HubOffset:
        start = HubOffset("hub", dict(self.latest), created_at=self.snapshot.created_at)
        self.planner.begin(start)
        return start

    @property
    def snapshot(self) -> HubSnapshot:
        bounds = {each: PartitionBounds(self.earliest.get(each, 0), end) for each, end in self.latest.items()}
        return HubSnapshot("hub", BORN, bounds)

    def trigger(self, now: float) -> None:
        """Log a batch where there is one."""
        if self.committed == len(self.log):
            start = self.log[-1] if self.log else self.start
            end = next_batch(self.planner, start, self.snapshot, now=now)
            if end != start:
                self.log.append(end)

    def run(self, *, is_committed: bool) -> None:
        """Run the batch that was logged last."""
        if self.committed < len(self.log):
            start = self.log[-2] if len(self.log) > 1 else self.start
            ranges, losses = batch_ranges(start, self.log[-1], self.snapshot)
            assert losses == []
            if is_committed:
                self.committed += 1
                for each in ranges:
                    self.read.update((each.partition_id, number) for number in range(each.start, each.end))

    def restart(self) -> None:
        """Lose everything but the log. A query that has none yet starts over."""
        self.planner = StreamPlanner(self.limits)
        if self.committed == 0:
            self.start = self.initial()  # Spark asks again, logged batch or not


_STEPS = st.tuples(
    st.sampled_from(["publish", "add a partition", "choose a partition", "trigger", "commit", "crash", "restart"]),
    st.integers(0, 5).map(str),
    st.integers(0, 30),
)


@given(st.integers(1, 20) | st.none(), st.integers(1, 20) | st.none(), st.lists(_STEPS, max_size=60))
def test_query_reads_every_event_after_its_start_once_in_any_history(
    most: int | None, least: int | None, steps: list[tuple[str, str, int]]
) -> None:
    """Whatever is published, limited, crashed and repeated: what follows the logged start is read, each number once."""
    run = _Run(TriggerLimits(most, least, 50.0), {"0": 4, "1": 0, "2": 9})
    now = 0.0
    for step, partition_id, count in steps:
        if step == "publish" and partition_id in run.latest:
            run.latest[partition_id] += count
        elif step == "add a partition":
            run.latest.setdefault(partition_id, count)
        elif step == "choose a partition" and partition_id not in run.latest:
            run.latest[partition_id], run.earliest[partition_id] = count, count // 2  # retention has removed events
        elif step == "trigger":
            now += 3 * count
            run.trigger(now)
        elif step in {"commit", "crash"}:
            run.run(is_committed=step == "commit")
        elif step == "restart":
            run.restart()
    for _ in range(400):
        now += 100.0
        run.trigger(now)
        run.run(is_committed=True)
    began = run.log[0].first_start
    assert began is not None
    first = run.earliest | dict(began)
    expected = {(each, number) for each, end in run.latest.items() for number in range(first.get(each, 0), end)}
    assert run.read == Counter(expected)


class _RecreatedRun(_Run):
    """The same with a hub that is deleted and made again at any moment; the query goes on with what there is.

    The query does not notice it at once: until then it knows the bounds of the former hub, or has new bounds with the
    former creation time, and its tasks read what the new hub has under the numbers of a batch.
    """

    def __init__(self, limits: TriggerLimits, begun: Mapping[str, int]) -> None:
        self.hubs = 0
        self.stale: HubSnapshot | None = None
        self.read_of: Counter[tuple[int, str, int]] = Counter()
        super().__init__(limits, begun)

    @property
    def snapshot(self) -> HubSnapshot:
        """What the query knows of the hub."""
        return self.stale or self.actual

    @property
    def actual(self) -> HubSnapshot:
        return replace(super().snapshot, created_at=BORN + timedelta(days=self.hubs))

    @property
    def position(self) -> HubOffset:
        return self.log[-1] if self.log else self.start

    def recreate(self, first: str, delta: int, earliest: int, noticed: str) -> None:
        """Make another hub: in a partition with as many events more or fewer than were read, in others with as many."""
        before = self.snapshot
        following = self.position.following
        ends = {each: following.get(each, 0) + (delta if each == first else 0) for each in self.latest}
        self.hubs += 1
        self.latest = {each: max(0, end) for each, end in ends.items()}
        self.earliest = {each: min(earliest, end) for each, end in self.latest.items()}
        if noticed == "at once":
            self.stale = None
        elif noticed == "by its numbers":
            self.stale = replace(self.actual, created_at=before.created_at)
        else:
            self.stale = before

    def trigger(self, now: float) -> None:
        if self.committed < len(self.log):
            return
        start, found = self.position, self.snapshot
        end = end_of(self.planner, start, found, now=now)
        if start.created_at != found.created_at:
            again = end_of(StreamPlanner(self.limits), start, found, now=now)
            for losses in (end.losses, again.losses):
                assert losses[0].is_other_hub
            assert end.offset.created_at == found.created_at
        elif self.stale is None:
            assert end.losses == ()
        if end.offset != start:
            self.log.append(restored(end.offset))

    def run(self, *, is_committed: bool) -> None:
        if self.committed == len(self.log):
            return
        found, end = self.snapshot, self.log[-1]
        start = self.log[-2] if len(self.log) > 1 else self.start
        ranges, losses = batch_ranges(start, end, found)
        if end.created_at != found.created_at:
            begun = start.following if end.first_start is None else end.first_start
            assert ranges == []
            assert bool(losses) == any(begun.get(each, 0) != stop for each, stop in end.following.items())
        elif self.stale is None:
            assert losses == []
        if is_committed:
            self.committed += 1
            if self.stale is None:
                for each in ranges:
                    self.read_of.update((self.hubs, each.partition_id, at) for at in range(each.start, each.end))

    def restart(self) -> None:
        self.stale = None
        super().restart()


@given(
    st.integers(1, 20) | st.none(),
    st.integers(1, 20) | st.none(),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["publish", "recreate", "trigger", "trigger", "commit", "commit", "crash", "restart", "notice", "aim"]
            ),
            st.sampled_from("012"),
            st.integers(-9, 9),
            st.integers(0, 3),
            st.sampled_from(["at once", "by its numbers", "later"]),
        ),
        max_size=60,
    ),
)
@example(None, None, [(each, "0", 3, 0, "at once") for each in ("publish", "trigger", "commit", "recreate")])
@example(None, None, [(each, "0", 0, 0, "later") for each in ("publish", "trigger", "recreate", "restart", "commit")])
@example(
    None,
    None,
    [(each, "0", 3, 0, "at once") for each in ("trigger", "commit", "publish", "trigger", "recreate", "commit")],
)
@example(None, None, [(each, "0", 0, 0, "later") for each in ("recreate", "restart", "trigger", "recreate", "aim")])
def test_query_reads_every_event_of_a_recreated_hub_once_in_any_history(
    most: int | None, least: int | None, steps: list[tuple[str, str, int, int, str]]
) -> None:
    """With fewer events than were read, as many, or more; limited, crashed and repeated; recreated before the first
    batch, before a batch is read or repeated, and while the query is stopped. What was unread of the hub before is
    gone, but nothing of it was left out before what was read. What is read before the change is noticed does not
    count: it is read again."""
    run = _RecreatedRun(TriggerLimits(most, least, 50.0), {"0": 4, "1": 0, "2": 9})
    firsts: dict[int, dict[str, int]] = {}
    now = 0.0
    for step, partition_id, count, earliest, noticed in steps:
        if step == "publish":
            run.latest[partition_id] += abs(count)
        elif step == "recreate":
            run.recreate(partition_id, count, earliest, noticed)
            firsts[run.hubs] = dict(run.earliest)
        elif step == "trigger":
            now += 3 * abs(count)
            run.trigger(now)
        elif step in {"commit", "crash"}:
            run.run(is_committed=step == "commit")
        elif step == "notice":
            run.stale = None
        elif step == "aim":
            run.planner.aim({"hub": run.snapshot})
        else:
            run.restart()
    run.restart()
    for _ in range(400):
        now += 100.0
        run.trigger(now)
        run.run(is_committed=True)
    first = run.log[0]
    assert first.first_start is not None
    assert first.created_at is not None
    firsts[(first.created_at - BORN).days] = dict(first.first_start)
    assert set(run.read_of.values()) <= {1}
    for number in {each for each, _, _ in run.read_of} | {run.hubs}:
        for partition_id in run.latest:
            read = sorted(at for hub, each, at in run.read_of if (hub, each) == (number, partition_id))
            begin = firsts[number][partition_id]
            assert read == list(range(begin, begin + len(read)))
            if number == run.hubs:
                assert begin + len(read) == run.latest[partition_id]


class _HubsRun:
    """Hubs that grow, and a query to which hubs are added, stopped and started with Spark's log between its runs."""

    def __init__(self, limits: TriggerLimits) -> None:
        self.limits = limits
        self.ends = {hub: {"0": 2, "1": 0} for hub in ("a", "b", "c")}
        self.log: list[SourceOffset] = []
        self.committed = 0
        self.read: Counter[tuple[str, str, int]] = Counter()
        self.named = ["b"]
        self.restart()

    @property
    def snapshots(self) -> dict[str, HubSnapshot]:
        return {
            hub: HubSnapshot(hub, BORN, {each: PartitionBounds(0, end) for each, end in self.ends[hub].items()})
            for hub in self.named
        }

    def restart(self) -> None:
        self.planner = StreamPlanner(self.limits)

    def begin(self, known: SourceOffset) -> None:
        for hub in self.named:
            if hub not in known.hubs and hub not in self.planner.begun:
                self.planner.begin(HubOffset(hub, dict(self.ends[hub])))

    def start(self) -> SourceOffset:
        if self.log:
            return self.log[-1]
        self.begin(SourceOffset({}))
        return SourceOffset.of(self.planner.begun[hub] for hub in self.named)

    def trigger(self) -> None:
        if self.committed < len(self.log):
            return
        start = self.start()
        self.begin(start)
        end = self.planner.end(start, self.snapshots, is_limited=True, now=0.0)
        assert end.losses == ()
        if end.offset is not start:
            assert end.offset.to_json() != start.to_json()
            self.log.append(SourceOffset.from_json(json.loads(json.dumps(end.offset.to_json()))))

    def run(self, *, is_committed: bool) -> None:
        if self.committed == len(self.log):
            return
        # Spark asks for the start of its first batch again.
        start = (
            self.log[-2] if len(self.log) > 1 else SourceOffset.of(HubOffset(hub, self.ends[hub]) for hub in self.named)
        )
        ranges, losses = source_ranges(start, self.log[-1], self.snapshots)
        assert losses == []
        if is_committed:
            self.committed += 1
            for hub, found in ranges.items():
                for each in found:
                    self.read.update((hub, each.partition_id, number) for number in range(each.start, each.end))


@given(
    st.integers(1, 9) | st.none(),
    st.lists(
        st.tuples(
            st.sampled_from(["publish", "trigger", "trigger", "commit", "crash", "restart", "add"]),
            st.sampled_from("abc"),
            st.sampled_from("01"),
            st.integers(1, 9),
        ),
        max_size=60,
    ),
)
def test_query_of_several_hubs_reads_every_event_once_in_any_history(
    most: int | None, steps: list[tuple[str, str, str, int]]
) -> None:
    """Hubs are added, batches crash and are repeated, runs end: of each hub, what follows its logged start is read,
    each number once."""
    run = _HubsRun(TriggerLimits(most))
    for step, hub, partition_id, count in steps:
        if step == "publish":
            run.ends[hub][partition_id] += count
        elif step == "trigger":
            run.trigger()
        elif step in {"commit", "crash"}:
            run.run(is_committed=step == "commit")
            if step == "crash":
                run.restart()
        else:
            run.restart()
            if step == "add" and hub not in run.named and run.log:
                run.named.append(hub)
    for _ in range(200):
        run.trigger()
        run.run(is_committed=True)
    begun: dict[str, Mapping[str, int]] = {}
    for logged in run.log:
        for name, offset in logged.hubs.items():
            if offset.first_start is not None:
                assert name not in begun
                begun[name] = offset.first_start
    assert begun.keys() == set(run.named)
    assert run.read == Counter(
        (hub, each, number)
        for hub in run.named
        for each, end in run.ends[hub].items()
        for number in range(begun[hub][each], end)
    )


# ------------------------------------------------------------------------------------------------------------ tasks

_RANGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5)), max_size=40).map(
    lambda pairs: [SequenceRange(str(index), start, start + size) for index, (start, size) in enumerate(pairs)]
)


@given(_RANGES, st.integers(1, 60) | st.none(), st.integers(1, 7) | st.none(), st.integers(1, 20) | st.none())
def test_tasks_cover_every_number_once(
    ranges: list[SequenceRange], at_least: int | None, per_task: int | None, max_tasks: int | None
) -> None:
    """Split or grouped, the tasks' ranges are the batch's, none twice and none empty, within the limits: where their
    number is chosen, at most so many as there is use for, and none with few events beside another."""
    tasks = plan_tasks(
        "hub",
        ranges,
        min_partitions=at_least,
        partitions_per_task=None if at_least else per_task,
        max_tasks=max_tasks,
    )
    parts = sorted(
        (each for task in tasks for each in task.ranges), key=lambda each: (int(each.partition_id), each.start)
    )
    joined: list[SequenceRange] = []
    for part in parts:
        assert part.size > 0
        if joined and joined[-1].partition_id == part.partition_id:
            assert joined[-1].end == part.start
            joined[-1] = SequenceRange(part.partition_id, joined[-1].start, part.end)
        else:
            joined.append(part)
    assert joined == ranges
    readers = Counter(each.partition_id for each in parts)
    assert all(count <= MAX_READERS for count in readers.values())
    if at_least is None and per_task is None:
        assert bool(tasks) == bool(ranges)
        assert len(tasks) <= min(len(ranges), max_tasks or len(ranges))
        assert len(tasks) <= 1 or all(sum(each.size for each in task.ranges) >= ROWS_PER_TASK for task in tasks)
    elif at_least is None:
        assert per_task is not None
        assert len(tasks) == -(-len(ranges) // per_task)
    else:
        possible = sum(min(MAX_READERS, each.size) for each in ranges)
        assert len(tasks) == min(max(at_least, len(ranges)), possible)


def test_min_partitions_splits_the_largest_ranges() -> None:
    """`min_partitions` splits where most is to be read."""
    parts = split_ranges([SequenceRange("0", 0, 10), SequenceRange("1", 100, 1000)], 4)
    assert parts == [
        SequenceRange("0", 0, 10),
        SequenceRange("1", 100, 400),
        SequenceRange("1", 400, 700),
        SequenceRange("1", 700, 1000),
    ]


def test_tasks_are_about_equally_large() -> None:
    """A large range shares its task with small ones."""
    sizes = {"0": 100, "1": 10, "2": 90, "3": 20}
    groups = group_ranges([SequenceRange(each, 0, size) for each, size in sizes.items()], 2, 2)
    assert sorted(sorted(each.partition_id for each in group) for group in groups) == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize(
    ("sizes", "tasks"),
    [
        ([], 0),
        ([1], 1),
        ([2] * 4, 1),
        ([10] * 32, 1),
        ([10] * 128, 1),
        ([80_000 // 128] * 128, 4),
        ([15_000] * 4, 2),
        ([ROWS_PER_TASK] * 128, 128),
        ([10**6] * 128, 128),
        ([10**6] + [10] * 20, 1),
        ([10**6, 10**6] + [10] * 20, 2),
    ],
)
def test_tasks_are_as_many_as_the_events_need(sizes: list[int], tasks: int) -> None:
    """A batch with few events has few tasks, however many partitions the hub has; and not more than have a slot."""
    ranges = [SequenceRange(str(index), 0, size) for index, size in enumerate(sizes)]
    assert len(plan_tasks("hub", ranges)) == tasks
    assert len(plan_tasks("hub", ranges, max_tasks=6)) == min(tasks, 6)


@pytest.mark.parametrize(("interval", "seconds"), [(None, 10.0), (0.1, 1.0), (2.0, 4.0), (5.0, 10.0), (900.0, 10.0)])
def test_links_are_kept_for_two_triggers_within_limits(interval: float | None, seconds: float) -> None:
    """Two triggers, but at least a second and at most ten; every task is given it."""
    assert keep_links_for(interval) == seconds
    (task,) = plan_tasks("hub", [SequenceRange("0", 0, 5)], keep_links=seconds)
    assert task.keep_links == seconds


def test_tasks_of_each_hub_begin_with_different_partitions() -> None:
    """The order of tasks turns with the hub's name, is the same each time, and keeps partitions in sequence."""
    ranges = [SequenceRange(str(each), 0, 10) for each in range(8)]

    def order_of(hub: str) -> list[str]:
        return [task.ranges[0].partition_id for task in plan_tasks(hub, ranges, partitions_per_task=1)]

    orders = {hub: order_of(hub) for hub in ("a", "b", "c", "d", "e", "f")}
    assert len({tuple(order) for order in orders.values()}) > 1
    for hub, order in orders.items():
        assert order == order_of(hub.upper())
        first = int(order[0])
        assert [int(each) for each in order] == [(first + step) % 8 for step in range(8)]
