"""What `eventpump lag` shows and serves of a reading."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from eventpump.cli.lag import Monitor, lines
from eventpump.interfaces import ConsumerScope
from eventpump.lag import GroupLag, LagState, PartitionProgress, StoredCheckpoint

SCOPE = ConsumerScope("a.servicebus.windows.net", "telemetry", "$Default")


def reading(age: float = 0.0, *partitions: PartitionProgress) -> GroupLag:
    """Return a reading of some seconds ago."""
    return GroupLag(SCOPE, datetime.now(UTC) - timedelta(seconds=age), partitions, ("the store is away",))


def test_server_is_not_ready_before_the_first_reading_and_long_after_the_last() -> None:
    """A scaler that asks it then gets no number of the past; the notes say why."""
    monitor = Monitor(120.0)
    assert (monitor.health().ready, monitor.behind()) == (False, None)
    monitor.newest = reading(10)
    assert (monitor.health().live, monitor.health().ready) == (True, True)
    monitor.newest = reading(130)
    assert monitor.health().ready is False
    assert monitor.health().reasons == ("the lag was last read 130 s ago", "the store is away")


def test_table_has_a_column_for_waiting_events_only_if_that_was_read() -> None:
    """A partition that could not be read says why, and one that has lost events how many."""
    stored = StoredCheckpoint("0", "v5", "blob", sequence_number=4, owner="a", is_owned=True)
    lost = PartitionProgress("0", LagState.EXPIRED, 1_200, 3, 8, 1_207, None, None, stored, 7_300.0)
    unread = PartitionProgress("1", LagState.UNKNOWN, None, 0, None, None, None, None, None, None, error="no answer")
    shown = lines(reading(0, lost, unread))
    assert shown[0] == "hub telemetry, consumer group $Default: 1,200 events behind, and unknown in partitions 1"
    assert [line.split() for line in shown[2:4]] == [
        ["partition", "first", "last", "checkpoint", "lag", "state", "age", "owner"],
        ["0", "8", "1,207", "4", "1,200", "expired", "(3", "lost)", "2", "h", "a"],
    ]
    assert "unknown (not read: no answer)" in shown[4]
    assert shown[-1] == "the store is away"
