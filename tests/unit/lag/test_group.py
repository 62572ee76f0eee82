"""The lag of a consumer group, computed from a checkpoint and from what a partition holds."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.interfaces import ConsumerScope, PartitionProperties
from eventpump.lag.exposition import metrics
from eventpump.lag.group import GroupLag, LagState, PartitionRead, progress_of
from eventpump.storage.checkpoints.stored import StoredCheckpoint

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def partition(
    first: int,
    last: int,
    checkpoint: StoredCheckpoint | None = None,
    *,
    quiet: float = 0.0,
    unread_since: datetime | None = None,
    unchanged_since: datetime | None = None,
    error: str | None = None,
) -> PartitionRead:
    """Return what is known of a partition with the events from `first` to `last`; empty if `first` is above."""
    properties = PartitionProperties(
        "telemetry", "0", first, last, f"offset-{last}", NOW - timedelta(seconds=quiet), first > last
    )
    return PartitionRead(properties, NOW, checkpoint, unchanged_since, unread_since, error)


def stored(
    number: int | None, *, age: float = 0.0, owned: bool | None = True, offset: str | None = None
) -> StoredCheckpoint:
    """Return a checkpoint."""
    written = NOW - timedelta(seconds=age)
    return StoredCheckpoint("0", "v5", "blob", number, offset, written, "host" if owned else None, owned)


@given(st.integers(0, 50), st.integers(0, 50), st.none() | st.integers(-1, 120), st.booleans())
def test_lag_is_the_number_of_retained_events_after_the_checkpoint(
    first: int, count: int, number: int | None, is_owned: bool
) -> None:
    """Counted one by one; and what was removed between the checkpoint and the oldest event is lost, not behind."""
    last = first + count - 1
    checkpoint = None if number is None else stored(number, owned=is_owned)
    found = progress_of("0", partition(first, last, checkpoint), NOW, 300.0)
    retained = range(first, last + 1)
    if number is not None and number > last:
        assert (found.lag, found.lost, found.state) == (None, 0, LagState.BEYOND_END)
        return
    done = -1 if number is None else number
    assert found.lag == sum(1 for each in retained if number is None or each > number)
    assert found.lost == (0 if number is None else sum(1 for each in range(first) if each > done))
    if number is None:
        expected = LagState.NO_CHECKPOINT
    elif found.lost:
        expected = LagState.EXPIRED
    elif not is_owned:
        expected = LagState.UNOWNED
    else:
        expected = LagState.BEHIND if found.lag else LagState.OK
    assert found.state is expected


@pytest.mark.parametrize(
    ("lag", "age", "quiet", "unread_for", "state"),
    [
        (5, 301, 0, None, LagState.STALLED),
        (5, 299, 400, None, LagState.BEHIND),
        (1, 301, 0, None, LagState.BEHIND),  # the first event after a silence
        (1, 301, 301, None, LagState.STALLED),
        (5, 301, 0, 10, LagState.BEHIND),  # the first events after a silence, seen
        (5, 301, 0, 301, LagState.STALLED),
        (0, 10_000, 10_000, None, LagState.OK),
    ],
)
def test_group_has_stalled_if_events_wait_and_no_checkpoint_is_written(
    lag: int, age: float, quiet: float, unread_for: float | None, state: LagState
) -> None:
    """The first events after a silence find an old checkpoint, and do not make a stalled group."""
    since = None if unread_for is None else NOW - timedelta(seconds=unread_for)
    checkpoint = stored(99 - lag, age=age)
    found = progress_of("0", partition(0, 99, checkpoint, quiet=quiet, unread_since=since), NOW, 300.0)
    assert found.state is state


@pytest.mark.parametrize(("seen_for", "state"), [(299, LagState.BEHIND), (301, LagState.STALLED)])
def test_group_of_a_store_without_times_has_stalled_if_its_checkpoint_was_seen_for_that_long(
    seen_for: float, state: LagState
) -> None:
    """SQLite and others do not say when a checkpoint was stored."""
    checkpoint = replace(stored(50), written_at=None)
    read = partition(0, 99, checkpoint, unchanged_since=NOW - timedelta(seconds=seen_for))
    found = progress_of("0", read, NOW, 300.0)
    assert (found.state, found.checkpoint_age) == (state, None)


def test_checkpoint_with_an_offset_alone_is_at_the_end_or_of_unknown_lag() -> None:
    """Offsets have no order: only that of the newest event says something."""
    at_end = progress_of("0", partition(0, 9, stored(None, offset="offset-9")), NOW, 300.0)
    assert (at_end.lag, at_end.state) == (0, LagState.OK)
    before = progress_of("0", partition(0, 9, stored(None, offset="offset-7")), NOW, 300.0)
    assert (before.lag, before.state) == (None, LagState.BEHIND)


def test_partition_that_was_not_read_is_unknown_and_not_in_the_sum() -> None:
    """It counts for nothing, and is named."""
    unread = progress_of("1", PartitionRead(checkpoint=stored(3), error="no answer"), NOW, 300.0)
    assert (unread.state, unread.lag, unread.error) == (LagState.UNKNOWN, None, "no answer")
    known = progress_of("0", partition(0, 9, stored(3)), NOW, 300.0)
    group = GroupLag(ConsumerScope("n", "h", "g"), NOW, [known, unread])
    assert (group.total, group.unknown) == (6, ("1",))


def test_partition_whose_last_reading_failed_keeps_what_was_read() -> None:
    """With the time of that reading, and the error."""
    earlier = NOW - timedelta(minutes=1)
    read = replace(partition(0, 9, stored(3), error="no answer"), read_at=earlier)
    found = progress_of("0", read, NOW, 300.0)
    assert (found.lag, found.read_at, found.error) == (6, earlier, "no answer")


def test_served_metrics_are_those_of_the_page() -> None:
    """Each has a row under "Lag from outside", and none other is there."""
    lag = GroupLag(ConsumerScope("localhost", "telemetry", "$Default"), NOW, (), ())
    page = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    section = page.partition("## Lag from outside")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", section, re.M) == [each.name for each in metrics(lag, NOW)]
