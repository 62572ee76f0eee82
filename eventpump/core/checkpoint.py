"""How far a partition is processed, and when that is written down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import Checkpoint


class Positioned(Protocol):
    """What has a place in a partition; a received event."""

    @property
    def offset(self) -> str:
        """Opaque text."""

    @property
    def sequence_number(self) -> int:
        """For comparing."""


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When checkpoints are written without being asked for, always of batches whose `process_events` returned.

    Args:
        every_events: After so many events.
        every_seconds: So long after an event that is not in a checkpoint yet, in seconds.
        on_close: Before the partition is given up.
    """

    every_events: int | None = None
    every_seconds: float | None = None
    on_close: bool = True

    def __post_init__(self) -> None:
        if self.every_events is not None and self.every_events < 1:
            raise ConfigurationError("checkpoint_policy.every_events", "must be at least 1")
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise ConfigurationError("checkpoint_policy.every_seconds", "must be more than 0")

    @classmethod
    def manual(cls) -> CheckpointPolicy:
        """Only `context.checkpoint()` writes."""
        return cls(on_close=False)


class CheckpointTracker:
    """One partition's ledger of what was delivered, handled, wanted and stored.

    One write is in flight at most; of several wishes the latest wins; nothing goes backwards, and nothing beyond what
    was delivered is taken.

    Args:
        stored: The checkpoint the store held at the start.
    """

    __slots__ = (
        "_delivered",
        "_delivered_count",
        "_handled",
        "_in_flight",
        "_partition_id",
        "_policy",
        "_running",
        "_unsaved",
        "_unsaved_since",
        "_wanted",
        "stored",
    )

    def __init__(self, partition_id: str, policy: CheckpointPolicy, stored: Checkpoint | None = None) -> None:
        self._partition_id = partition_id
        self._policy = policy
        self._delivered: Positioned | None = None
        self._running: Positioned | None = None
        self._handled: Positioned | None = None
        self._unsaved = 0
        self._unsaved_since: float | None = None
        self._wanted: Checkpoint | None = None
        self._in_flight: Checkpoint | None = None
        self.stored = stored
        """What the store is known to hold."""

    @property
    def delivered(self) -> Positioned | None:
        """The last event handed to the processor."""
        return self._delivered

    def events_delivered(self, last: Positioned, *, is_again: bool = False) -> None:
        """Record a batch that is being handed over, by its last event.

        Args:
            is_again: Whether it is a part of the batch before, which failed: what was delivered stays delivered.
        """
        self._running = last
        if not is_again:
            self._delivered = last

    def events_failed(self) -> None:
        """Record that the batch handed over last was not processed: it is delivered again, or given up."""
        self._running = None

    def events_handled(self, last: Positioned, count: int, now: float) -> None:
        """Record a batch that was processed, and want it stored where the policy says so.

        Args:
            now: Seconds on any clock that `due` is asked with too.
        """
        self._handled, self._running = last, None
        if not self._unsaved:
            self._unsaved_since = now
        self._unsaved += count
        if self._policy.every_events is not None and self._unsaved >= self._policy.every_events:
            self._want_handled()
        else:
            self.due(now)

    @property
    def deadline(self) -> float | None:
        """When `due` should be asked next; None while time alone changes nothing."""
        if self._policy.every_seconds is None or self._unsaved_since is None:
            return None
        return self._unsaved_since + self._policy.every_seconds

    def due(self, now: float) -> bool:
        """Want what was handled stored, where its time has come. True where that made something to write."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return False
        return self._want_handled()

    def closing(self) -> None:
        """Want what was handled stored, where the policy says so on close."""
        if self._policy.on_close:
            self._want_handled()

    def requested(self, event: Positioned | None, *, is_in_batch: bool = False) -> Checkpoint | None:
        """Want an event stored as processed. None stands for the last event of the running batch where the wish comes
        from its handler, and for the last event that was handled where it does not.

        Args:
            is_in_batch: Whether the wish comes from the call that processes the running batch.

        Returns:
            The checkpoint to wait for; None where it or a later one is stored, or nothing was handled.

        Raises:
            ConfigurationError: The event lies beyond what was delivered.
        """
        if event is None:
            event = self._running if is_in_batch and self._running is not None else self._handled
            if event is None:
                return None
        elif self._delivered is None or event.sequence_number > self._delivered.sequence_number:
            raise ConfigurationError("event", f"sequence number {event.sequence_number} was not delivered here yet")
        checkpoint = Checkpoint(self._partition_id, event.offset, event.sequence_number)
        if self.covers(checkpoint):
            return None
        self._want(checkpoint)
        return checkpoint

    def covers(self, checkpoint: Checkpoint) -> bool:
        """Return whether the store is known to hold a checkpoint, or a later one."""
        return self.stored is not None and self.stored.sequence_number >= checkpoint.sequence_number

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to write and nothing in flight."""
        return self._wanted is None and self._in_flight is None

    @property
    def unwritten(self) -> Checkpoint | None:
        """The latest that is wanted and not known to be stored."""
        return self._wanted or self._in_flight

    def begin_write(self) -> Checkpoint | None:
        """Take what to write now; None where there is nothing, or a write is in flight."""
        if self._in_flight is not None or self._wanted is None:
            return None
        self._in_flight, self._wanted = self._wanted, None
        return self._in_flight

    def write_done(self) -> None:
        """Record that the write in flight is stored."""
        assert self._in_flight is not None
        self.stored, self._in_flight = self._in_flight, None

    def write_failed(self) -> None:
        """Record that the outcome of the write in flight is not known: it is wanted again, unless a later one is."""
        assert self._in_flight is not None
        failed, self._in_flight = self._in_flight, None
        self._want(failed)

    def _want_handled(self) -> bool:
        handled = self._handled
        self._unsaved, self._unsaved_since = 0, None
        if handled is None:
            return False
        checkpoint = Checkpoint(self._partition_id, handled.offset, handled.sequence_number)
        return not self.covers(checkpoint) and self._want(checkpoint)

    def _want(self, checkpoint: Checkpoint) -> bool:
        for other in (self._wanted, self._in_flight):
            if other is not None and other.sequence_number >= checkpoint.sequence_number:
                return False
        self._wanted = checkpoint
        return True
