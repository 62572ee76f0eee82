"""The demo's verdict: each promise it speaks of can be seen broken."""

from __future__ import annotations

from pathlib import Path

from eventpump.demo.record import ProcessedEvent, RecordFile, read_records
from eventpump.demo.verify import judge

STORED = [("0", 0, "a"), ("0", 1, "b"), ("1", 0, "c")]
FIRST = [ProcessedEvent("0", 0, "a", 1, 10.0), ProcessedEvent("0", 1, "b", 1, 11.0)]
SECOND = [ProcessedEvent("1", 0, "c", 1, 10.5)]


def test_verdict_holds_with_every_event_once() -> None:
    """Every event processed once, by one owner each: the verdict holds."""
    verdict = judge("abc", STORED, {"one": FIRST, "two": SECOND})
    assert verdict.holds
    assert (verdict.published, verdict.processed, verdict.lost, verdict.duplicates) == (3, 3, 0, 0)
    assert verdict.take_over is None


def test_event_that_was_not_processed_is_lost() -> None:
    """A duplicate elsewhere makes the totals right, and does not hide it."""
    verdict = judge("abc", STORED, {"one": FIRST, "two": FIRST[:1]})
    assert not verdict.holds
    assert (verdict.lost, verdict.duplicates) == (1, 1)


def test_event_acknowledged_but_not_in_the_hub_is_lost() -> None:
    """What was published is compared too, not only what can be read back."""
    assert judge("abcd", STORED, {"one": FIRST, "two": SECOND}).lost == 1


def test_event_with_another_body_is_lost_and_unknown() -> None:
    """The right place with a wrong body is a loss, and something unknown."""
    verdict = judge("abc", STORED, {"one": FIRST, "two": [ProcessedEvent("1", 0, "x", 1, 10.5)]})
    assert (verdict.holds, verdict.lost, verdict.unknown) == (False, 1, 1)


def test_verdict_fails_for_two_hosts_under_one_epoch() -> None:
    """One deliverer per partition and epoch; an event come again under the next epoch is but a duplicate."""
    again = [*SECOND, ProcessedEvent("0", 1, "b", 1, 12.0)]
    assert judge("abc", STORED, {"one": FIRST, "two": again}).shared == 1
    later = [*SECOND, ProcessedEvent("0", 1, "b", 2, 10.9)]
    verdict = judge("abc", STORED, {"one": FIRST, "two": later})
    assert (verdict.holds, verdict.shared, verdict.duplicates) == (True, 0, 1)


def test_take_over_time_ends_with_the_last_orphan() -> None:
    """It counts from the kill to the last partition's first event under another host."""
    records = {"killed": FIRST, "two": [ProcessedEvent("0", 1, "b", 2, 16.0), ProcessedEvent("1", 0, "c", 2, 17.5)]}
    verdict = judge("abc", STORED, records, killed="killed", killed_at=12.0, orphans=["0", "1"])
    assert verdict.take_over == 5.5


def test_event_that_never_reached_the_archive_is_counted() -> None:
    """The second subscription is judged by itself: what the first processed is not archived by that."""
    records = {"one": FIRST, "two": SECOND}
    assert judge("abc", STORED, records, archived=STORED).holds
    verdict = judge("abc", STORED, records, archived=[*STORED[:2], STORED[0]])
    assert (verdict.holds, verdict.lost, verdict.archived, verdict.unarchived) == (False, 0, 2, 1)
    assert "archive" in verdict.judgement()


def test_records_are_read_up_to_a_line_cut_off(tmp_path: Path) -> None:
    """A kill in the middle of a write loses that line only."""
    path = tmp_path / "records"
    file = RecordFile(path)
    file.write(FIRST)
    file.write(SECOND)
    file.close()
    assert list(read_records(path)) == [*FIRST, *SECOND]
    path.write_bytes(path.read_bytes()[:-3])
    assert list(read_records(path)) == FIRST


def test_host_that_joined_too_late_has_no_records(tmp_path: Path) -> None:
    """On a slow machine the demo ends before its last host has opened its file; that host processed nothing."""
    assert list(read_records(tmp_path / "records")) == []
