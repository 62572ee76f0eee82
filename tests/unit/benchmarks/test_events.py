"""The events of the benchmarks, and what checks them when they are read."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from benchmarks.canned import CannedPartition
from benchmarks.events import (
    BURST,
    FIRST_MOMENT,
    FIRST_SEQUENCE_NUMBER,
    KINDS,
    LARGEST,
    SMALLEST,
    Gaps,
    checker,
    mean_body_size,
    samples,
)
from eventpump.eventhubs.events import ReceivedEvent


def test_varied_events_are_what_the_readme_says() -> None:
    """They are of all sizes between the two; most, and not all, have a partition key and properties."""
    made = samples("varied")
    sizes = sorted(len(each.body) for each in made)
    assert SMALLEST <= sizes[0] < SMALLEST * 1.1
    assert LARGEST * 0.9 < sizes[-1] <= LARGEST
    with_key = sum(each.partition_key is not None for each in made) / len(made)
    with_properties = sum(each.properties is not None for each in made) / len(made)
    assert 0.7 < with_key < 0.8
    assert 0.75 < with_properties < 0.85
    assert mean_body_size("varied") == pytest.approx(sum(sizes) / len(sizes))
    assert len({each.body for each in made}) == len(made)


def test_telemetry_events_are_what_the_readme_says() -> None:
    """They are JSON of 15 to 20 fields and of all sizes between the two, with properties and key as in the body."""
    made = samples("telemetry")
    sizes = sorted(len(each.body) for each in made)
    assert SMALLEST <= sizes[0] < SMALLEST * 1.1
    assert LARGEST * 0.9 < sizes[-1] <= LARGEST
    reports = [json.loads(each.body) for each in made]
    assert {len(report) for report in reports} <= set(range(15, 21))
    assert max(len(value) for report in reports for value in report.values() if isinstance(value, str)) < LARGEST / 6
    for each, report in zip(made, reports, strict=True):
        assert each.properties is not None
        assert len(each.properties) in (2, 3)
        assert (each.properties["type"], each.properties["firmware"]) == (report["type"], report["fw"])
        assert each.partition_key in (None, report["dev"])
    assert 0.7 < sum(each.partition_key is not None for each in made) / len(made) < 0.8
    assert len({each.body for each in made}) == len(made)


def test_uniform_events_are_of_the_size_asked_for() -> None:
    """There is one of them, without a key or properties."""
    (sample,) = samples("uniform", 100)
    assert (len(sample.body), sample.properties, sample.partition_key) == (100, None, None)


def test_events_of_an_unknown_kind_are_refused() -> None:
    """A kind that is misspelt does not become another."""
    with pytest.raises(ValueError, match="'various'"):
        samples("various")


@pytest.mark.parametrize("kind", KINDS)
def test_canned_events_are_those_of_a_service(kind: str) -> None:
    """Each event has the next number, a larger offset, its sample's body, key and properties, and passes the check."""
    count = 2 * len(samples("varied")) + 3
    check = checker(kind)
    made = samples(kind)
    offsets = []
    for position, raw in enumerate(CannedPartition("0", kind, count).events):
        event = ReceivedEvent(raw)
        sample = made[position % len(made)]
        assert event.sequence_number == FIRST_SEQUENCE_NUMBER + position
        assert (event.body, event.partition_key) == (sample.body, sample.partition_key)
        assert event.properties == (sample.properties or {})
        check(event.sequence_number, len(event.body), event.enqueued_time)
        offsets.append(int(event.offset))
    assert len(offsets) == count
    assert offsets == sorted(set(offsets))


def test_varied_events_have_a_millisecond_each_and_uniform_ones_share() -> None:
    """So the headline measures making a datetime per event, and the row beside it does not."""
    varied, uniform = (
        [ReceivedEvent(raw).enqueued_time for raw in CannedPartition("0", kind, BURST + 1).events]
        for kind in ("varied", "uniform")
    )
    assert varied == [FIRST_MOMENT + timedelta(milliseconds=number) for number in range(BURST + 1)]
    assert uniform == [FIRST_MOMENT] * BURST + [FIRST_MOMENT + timedelta(milliseconds=1)]


@pytest.mark.parametrize(("number", "size", "late"), [(0, 1023, 0), (0, 1024, 1), (-1, 1024, 0), (BURST, 1024, 0)])
def test_check_of_events_fails_for_another_event(number: int, size: int, late: int) -> None:
    """A wrong size, a wrong time, and a number from before the first are each found."""
    check = checker("uniform")
    check(FIRST_SEQUENCE_NUMBER, 1024, FIRST_MOMENT)
    with pytest.raises(AssertionError, match="not what was sent"):
        check(FIRST_SEQUENCE_NUMBER + number, size, FIRST_MOMENT + timedelta(milliseconds=late))


@pytest.mark.parametrize("batch", [(14, 16, 3), (12, 14, 3), (13, 16, 3), (13, 14, 3)])
def test_check_of_events_finds_gaps(batch: tuple[int, int, int]) -> None:
    """A missing, repeated or extra event is found, in its own partition only."""
    gaps = Gaps(10)
    gaps.check("0", 10, 12, 3)
    gaps.check("1", 10, 10, 1)
    assert gaps.partitions == 2
    with pytest.raises(AssertionError, match="partition 0"):
        gaps.check("0", *batch)
    with pytest.raises(AssertionError, match="partition 2"):
        gaps.check("2", 11, 11, 1)
