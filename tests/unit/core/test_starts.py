"""Where partitions begin, and what of them is gone: the decisions alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.starts import (
    ASK_PAUSE_MAX,
    Loss,
    LossKind,
    NumberWatch,
    at_end,
    end_position,
    entered,
    find_loss,
    hub_of,
    retained_from,
    start_of,
    starts_text,
)
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.interfaces import PartitionProperties
from eventpump.storage.scope_form import ScopeRecord

FIRST = datetime(2024, 1, 1, tzinfo=UTC)

_offsets = st.text(st.characters(exclude_characters="'", exclude_categories=["Cs"]), min_size=1)
_times = st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-3, minutes=-30))]))
_positions = st.one_of(
    st.builds(EventPosition.at_offset, _offsets, inclusive=st.booleans()),
    st.builds(EventPosition.at_sequence_number, st.integers(-1, 2**63 - 1), inclusive=st.booleans()),
    st.builds(EventPosition.at_enqueued_time, _times, inclusive=st.booleans()),
    st.sampled_from([EventPosition.earliest(), EventPosition.latest()]),
)


def _facts(begin: int, last: int, *, is_empty: bool | None = None) -> PartitionProperties:
    empty = begin > last if is_empty is None else is_empty
    offset = f"o{last}" if last >= 0 else "-1"
    return PartitionProperties("hub", "0", begin, last, offset, FIRST, empty)


# -------------------------------------------------------------------------------------------------------- as text


@given(_positions)
def test_start_text_reads_back_as_its_position(position: EventPosition) -> None:
    """Every position has one text, and that text is read as this position."""
    text = str(position)
    assert EventPosition.parse(text) == position
    assert str(EventPosition.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", ">", "-1", "@latest", "offset", "offset>", "offset>a'b", "Offset>1", "other>1"),
        *("number>", "number>=", "number>1.5", "number> 1", "number>+1", "number>01"),
        *("time>", "time>2024-01-01", "time>2024-01-01T00:00:00"),
    ],
)
def test_start_text_of_another_form_is_refused(text: str) -> None:
    """A text that this version did not write is no start; a guess could skip events."""
    with pytest.raises(ValueError, match=r"."):
        EventPosition.parse(text)


def test_start_of_a_setting_covers_every_partition() -> None:
    """One start is for all partitions; a mapping leaves those it does not name at the start of the stream."""
    assert starts_text(EventPosition.latest()) == {"": "offset>@latest"}
    assert starts_text({"1": EventPosition.at_sequence_number(7)}) == {"": "offset>-1", "1": "number>7"}


@given(st.integers(0, 40), st.integers(1, 40))
def test_start_of_a_partition_added_later_is_its_beginning(number: int, count: int) -> None:
    """Whatever start is recorded, it is for the partitions that were there then."""
    record = ScopeRecord(FIRST, count, {"": "offset>@latest", "3": "number>7"})
    start = start_of(record, str(number))
    if number >= count:
        assert start == EventPosition.earliest()
    elif number == 3:
        assert start == EventPosition.at_sequence_number(7)
    else:
        assert start == EventPosition.latest()


# ------------------------------------------------------------------------------------------------ hub made again


@given(st.data())
def test_reset_is_recorded_for_the_hub_it_was_made_for(data: st.DataObject) -> None:
    """However hubs, hosts and partitions follow each other: what the record says to be of a hub was reset for it."""
    partitions = [str(number) for number in range(data.draw(st.integers(1, 4), "partitions"))]
    hub = FIRST
    record = ScopeRecord(FIRST, len(partitions), {})
    truth = dict.fromkeys(partitions, FIRST)
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        if data.draw(st.booleans(), "made again"):
            hub += timedelta(seconds=1)
        partition = data.draw(st.sampled_from(partitions), "partition")
        if hub_of(record, partition) == hub:
            assert entered(record, [partition], hub, partitions, len(partitions)) is None
            continue
        truth[partition] = hub  # its reset is stored
        if data.draw(st.booleans(), "crashed"):
            continue
        change = entered(record, [partition], hub, partitions, len(partitions))
        assert change is not None
        record = replace(
            record,
            hub_created_at=change.hub_created_at,
            partition_count=change.partition_count,
            reset_for=change.reset_for,
            reset_partitions=change.reset_partitions,
        )
        assert all(hub_of(record, each) != hub or truth[each] == hub for each in truth)
        assert record.reset_for is None or record.reset_for == hub


def test_reset_record_takes_the_new_hub_once_all_are_listed() -> None:
    """With the last partition the reset is over, and partitions that one of the hubs lacks begin at their beginning."""
    record = ScopeRecord(FIRST, 4, {"": "offset>@latest"})
    later = FIRST + timedelta(days=1)
    change = entered(record, ["0", "1", "2"], later, ["0", "1", "2", "3"], 2)
    assert change is not None
    assert (change.hub_created_at, change.reset_for) == (FIRST, later)
    record = replace(record, reset_for=change.reset_for, reset_partitions=change.reset_partitions)
    change = entered(record, ["3"], later, ["0", "1", "2", "3"], 2)
    assert change is not None
    assert (change.hub_created_at, change.partition_count, change.reset_for) == (later, 2, None)
    assert change.reset_partitions == frozenset()


# ---------------------------------------------------------------------------------------------------- what is gone


@given(st.integers(-1, 60), st.integers(0, 60), st.integers(-1, 60))
def test_find_loss_after_a_checkpoint_gives_the_numbers_not_kept(stored: int, begin: int, last: int) -> None:
    """A loss names exactly the numbers after the checkpoint that cannot be read any more, or are not there."""
    facts = _facts(min(begin, last + 1), last)
    kept = set(range(facts.beginning_sequence_number, last + 1))
    loss = find_loss(Checkpoint("0", "o", stored), facts, is_of_this_hub=True)
    if stored > last:
        assert loss == Loss(LossKind.BEYOND_END, last + 1, stored)
        return
    gone = set(range(stored + 1, last + 1)) - kept
    named = (
        set() if loss is None or loss.last_missing is None else set(range(loss.first_missing, loss.last_missing + 1))
    )
    assert named == gone
    assert loss is None or loss.kind is LossKind.RETENTION


@given(st.integers(-1, 60), st.integers(-1, 60))
def test_find_loss_in_an_empty_partition_goes_to_its_last_number(stored: int, last: int) -> None:
    """Whatever a service gives as the beginning of an empty partition, all up to its last number is gone."""
    if stored > last:
        return
    for begin in (-1, 0, last, last + 1):
        loss = find_loss(Checkpoint("0", "o", stored), _facts(begin, last, is_empty=True), is_of_this_hub=True)
        assert loss == (None if stored == last else Loss(LossKind.RETENTION, stored + 1, last))


def test_action_by_default_continues_after_retention_only() -> None:
    """Retention is gone on after; a checkpoint that means nothing any more is left to a person."""
    actions = {kind: Loss(kind, 0, 1).action(None) for kind in LossKind}
    assert actions == {LossKind.RETENTION: "earliest", LossKind.RECREATED: "fail", LossKind.BEYOND_END: "fail"}
    assert Loss(LossKind.RETENTION, 0, 1).action("fail") == "fail"
    assert Loss(LossKind.RECREATED, 0, None).action("latest") == "latest"


@pytest.mark.parametrize(
    ("facts", "pinned"),
    [
        (_facts(0, 41), Checkpoint("0", "o41", 41)),
        (_facts(42, 41), Checkpoint("0", "o41", 41)),
        (_facts(0, -1, is_empty=True), Checkpoint("0", "-1", -1)),
        (_facts(-1, -1, is_empty=True), Checkpoint("0", "-1", -1)),
    ],
    ids=["in use", "emptied by retention", "never used", "never used, as others report it"],
)
def test_pinned_end_is_the_last_events_place(facts: PartitionProperties, pinned: Checkpoint) -> None:
    """By offset and number of the newest event there ever was; "-1" and -1 before the first: never by 0."""
    assert at_end("0", facts) == pinned
    assert end_position(EventPosition.latest(), facts) == EventPosition.at_offset(pinned.offset)
    assert find_loss(pinned, facts, is_of_this_hub=True) is None


# --------------------------------------------------------------------------------------------------- while reading


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=30), st.integers(0, 200), st.booleans())
def test_judge_reports_missing_numbers_only_below_what_is_kept(
    steps: list[tuple[int, int]], begin: int, has_start: bool
) -> None:
    """Every number that is missing before what the service keeps is reported; none is where it keeps it."""
    watch = NumberWatch(0 if has_start else None)
    number, missing = 0, set[int]()
    for step, (gap, count) in enumerate(steps):
        if step or has_start:
            missing.update(range(number, number + gap))
        numbers = list(range(number + gap, number + gap + count))
        number = numbers[-1] + 1
        fits = watch.passed(numbers[0], numbers[-1], len(numbers))
        assert fits == (not missing)
    if not missing:
        assert watch.first_missing is None
        return
    assert watch.is_due(0.0)
    loss = watch.judge(_facts(begin, max(begin, number)), 0.0)
    if min(missing) >= begin:
        assert loss is None
    else:
        assert loss is not None
        assert (loss.first_missing, loss.last_missing) == (min(missing), min(max(missing), begin - 1))
    assert watch.passed(number, number, 1)


def test_look_into_finds_gaps_within_a_batch() -> None:
    """A batch that spans two links may lack numbers in its middle."""
    watch = NumberWatch(3)
    assert not watch.passed(3, 9, 5)
    watch.look_into([3, 4, 7, 8, 9])
    assert (watch.first_missing, watch.last_missing) == (5, 6)


def test_is_due_is_ever_rarer_for_a_compacted_partition() -> None:
    """Where gaps are no losses, the pause between two questions doubles up to a minute; no gap is forgotten."""
    watch, now, asked = NumberWatch(0), 0.0, 0
    for number in range(0, 7200, 2):
        watch.passed(number + 1, number + 1, 1)
        if watch.is_due(now):
            asked += 1
            assert watch.judge(_facts(0, 10_000), now) is None
        now += 1.0
    assert asked <= 3600 / ASK_PAUSE_MAX + 7
    watch.passed(8000, 8000, 1)
    loss = watch.judge(_facts(7900, 10_000), now + 60)
    assert loss is not None
    assert loss.last_missing == 7899


def test_retained_from_is_the_oldest_event_or_the_next_one() -> None:
    """What can still be read begins with the oldest event kept, or with the next one of an empty partition."""
    assert (retained_from(_facts(5, 9)), retained_from(_facts(0, 9, is_empty=True))) == (5, 10)
