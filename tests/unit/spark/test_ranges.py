"""How far a range is read."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.starts import Loss, LossKind
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.interfaces import PartitionProperties
from eventpump.spark.source.offsets import SequenceRange
from eventpump.spark.source.ranges import RangeProgress, number_of

_NOW = datetime(2026, 1, 1, tzinfo=UTC)


def _messages(numbers: list[int]) -> list[bytes]:
    return [
        ReceivedEvent.build(b"", offset=str(number), sequence_number=number, enqueued_time=_NOW).raw
        for number in numbers
    ]


def _properties(first: int, last: int, *, is_empty: bool = False) -> PartitionProperties:
    return PartitionProperties("telemetry", "0", first, last, str(last), _NOW, is_empty)


def _progress(start: int, end: int) -> RangeProgress:
    return RangeProgress(SequenceRange("0", start, end))


_runs = st.tuples(st.integers(0, 30), st.integers(1, 30)).map(lambda run: list(range(run[0], run[0] + run[1])))
_gappy = st.sets(st.integers(0, 60), min_size=1).map(sorted)


@given(
    numbers=_runs | _gappy,
    bounds=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    sizes=st.lists(st.integers(1, 9), min_size=70, max_size=70),
)
def test_range_gives_its_events_and_no_others(numbers: list[int], bounds: tuple[int, int], sizes: list[int]) -> None:
    """However events are handed over and whatever numbers are missing: what is given is what lies in the range."""
    start, end = min(bounds), max(bounds)
    progress = _progress(start, end)
    coming = [number for number in numbers if number >= start]
    given_out: list[int] = []
    for size in sizes:
        if progress.is_done or not coming:
            break
        batch, coming = coming[:size], coming[size:]
        given_out += map(number_of, progress.received(_messages(batch)))
    assert given_out == [number for number in numbers if start <= number < end]
    if given_out and given_out[-1] == end - 1:
        assert progress.is_done


def test_range_ends_at_the_first_event_at_or_past_its_end() -> None:
    """Where the last event of a range is missing, the next one ends it; then nothing goes on at its end."""
    progress = _progress(3, 10)
    assert list(map(number_of, progress.received(_messages([3, 4, 12])))) == [3, 4]
    assert (progress.is_done, progress.is_at_end) == (True, False)
    assert (progress.numbers.first_missing, progress.numbers.last_missing) == (5, 9)


def test_range_given_exactly_leaves_its_link_at_the_end() -> None:
    """Only where nothing behind the end was taken off a link can it serve the range that follows."""
    progress = _progress(3, 6)
    progress.received(_messages([3, 5]))
    assert (progress.numbers.first_missing, progress.numbers.last_missing) == (4, 4)
    assert (progress.is_done, progress.is_at_end) == (True, True)


def test_range_with_numbers_that_run_backwards_raises() -> None:
    """An event with a number that was passed is none of this partition's."""
    progress = _progress(3, 10)
    progress.received(_messages([3, 4, 5]))
    with pytest.raises(ValueError, match="received event 5, but expected 6 or a later one"):
        progress.received(_messages([5, 6]))


@pytest.mark.parametrize(
    ("properties", "lost"),
    [
        (_properties(0, 9), None),
        (_properties(4, 9), None),
        (_properties(4, 100), None),
        (_properties(7, 100), Loss(LossKind.RETENTION, 4, 6)),
        (_properties(50, 100), Loss(LossKind.RETENTION, 4, 9)),
        (_properties(0, 20, is_empty=True), Loss(LossKind.RETENTION, 4, 9)),
        (_properties(0, 8), Loss(LossKind.BEYOND_END, 9, 9)),
        (_properties(0, -1, is_empty=True), Loss(LossKind.BEYOND_END, 0, 9)),
    ],
)
def test_range_with_missing_events_is_slow_or_lost(properties: PartitionProperties, lost: Loss | None) -> None:
    """Missing events are gone where the partition begins behind them or ends before them; else they are slow."""
    progress = _progress(4, 10)
    progress.overdue()
    assert progress.numbers.is_due(0.0)
    assert progress.numbers.judge(properties, 0.0) == lost


def test_range_judges_each_gap_at_once() -> None:
    """A range has an end, after which no later question would find what was lost."""
    progress = _progress(0, 100)
    for numbers in ([0, 2], [3, 7], [9, 10]):
        progress.received(_messages(numbers))
        assert progress.numbers.is_due(0.0)
        assert progress.numbers.judge(_properties(0, 200), 0.0) is None


@pytest.mark.parametrize(
    ("properties", "expected"),
    [(_properties(7, 100), (7, 10)), (_properties(50, 100), (10, 10)), (_properties(0, 6), (4, 7)),
     (_properties(0, 1), (4, 4)), (_properties(0, 20, is_empty=True), (10, 10))],
)  # fmt: skip
def test_range_without_fail_on_data_loss_waits_for_what_can_come(
    properties: PartitionProperties, expected: tuple[int, int]
) -> None:
    """A reader that puts up with losses waits for what can still come, and for nothing else."""
    progress = _progress(4, 10)
    progress.give_up_missing(properties)
    assert (progress.next, progress.end) == expected
