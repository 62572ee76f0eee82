"""Checkpoint tracking: which position may be stored, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import Checkpoint

DEFAULT_SUBSCRIPTION: Final = "default"
"""The subscription whose checkpoints lie where other programs read and write them."""


class Positioned(Protocol):
    """An object with a position in a partition, such as a received event."""

    @property
    def offset(self) -> str:
        """Opaque text."""

    @property
    def sequence_number(self) -> int:
        """For comparing."""


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When checkpoints are written automatically, always of batches whose `process_events` returned, and events that
    were skipped or parked.

    Args:
        every_events: After this many events; None for no such limit.
        every_seconds: This many seconds after an event that is not in a checkpoint yet; None for no such limit.
        on_close: Whether also before the partition is released. Default: True.
    """

    every_events: int | None = None
    every_seconds: float | None = None
    on_close: bool = True

    def __post_init__(self) -> None:
        events, seconds = self.every_events, self.every_seconds
        if events is not None and (type(events) is not int or events < 1):
            raise ConfigurationError("checkpoint_policy.every_events", "must be a whole number of 1 or more")
        if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):
            raise ConfigurationError("checkpoint_policy.every_seconds", "must be a number of seconds above 0")

    @classmethod
    def automatic(cls) -> CheckpointPolicy:
        """After batches, at most every 5 seconds, and before the partition is released: the default of hosts."""
        return cls(every_seconds=5.0)

    @classmethod
    def manual(cls) -> CheckpointPolicy:
        """Only `context.checkpoint()` writes: for processors that keep events beyond the return of `process_events`."""
        return cls(on_close=False)


class CheckpointTracker:
    """Tracks which events of a partition were delivered, handled, requested for a checkpoint, and stored.

    At most one write is in flight; of several requests the latest wins; checkpoints never go backwards, and events that
    were not delivered are refused.

    Args:
        is_in_order: Whether batches are processed one after the other, and each as a whole, so that a request for an
            event that was delivered states that all before it are processed. Otherwise only what is handled may be
            requested.
    """

    __slots__ = (
        "_delivered",
        "_delivered_count",
        "_handled",
        "_in_flight",
        "_is_in_order",
        "_partition_id",
        "_policy",
        "_running",
        "_unsaved",
        "_unsaved_since",
        "_wanted",
        "stored",
    )

    def __init__(
        self,
        partition_id: str,
        policy: CheckpointPolicy,
        stored: Checkpoint | None = None,
        *,
        is_in_order: bool = True,
    ) -> None:
        self._partition_id = partition_id
        self._policy = policy
        self._is_in_order = is_in_order
        self._delivered: Positioned | None = None
        self._running: Positioned | None = None
        self._handled: Positioned | None = None
        self._unsaved = 0
        self._unsaved_since: float | None = None
        self._wanted: Checkpoint | None = None
        self._in_flight: Checkpoint | None = None
        self.stored = stored
        """The checkpoint that the store is known to hold."""

    @property
    def delivered(self) -> Positioned | None:
        """The last event passed to the processor."""
        return self._delivered

    @property
    def handled(self) -> Positioned | None:
        """The last event of the last batch that was processed."""
        return self._handled

    def events_delivered(self, last: Positioned, *, is_again: bool = False) -> None:
        """Record the delivery of a batch, by its last event; of a part of the batch before, which failed, again."""
        self._running = last
        if not is_again:
            self._delivered = last

    def events_failed(self) -> None:
        """Record that the last delivered batch was not processed: it is delivered again, or the partition is
        released."""
        self._running = None

    def events_handled(self, last: Positioned, count: int, now: float) -> bool:
        """Record a processed batch, and request its checkpoint if that is due; return whether there is one to write."""
        self._handled, self._running = last, None
        delivered = self._delivered
        if delivered is not last and (delivered is None or delivered.sequence_number < last.sequence_number):
            # It was passed over without having been delivered.
            self._delivered = last
        if self._unsaved_since is None:
            self._unsaved_since = now
        self._unsaved += count
        policy = self._policy
        is_due = policy.every_events is not None and self._unsaved >= policy.every_events
        if is_due or (policy.every_seconds is not None and now >= self._unsaved_since + policy.every_seconds):
            self._want_handled()
        return self._wanted is not None

    def events_passed(self, last: Positioned, count: int, now: float) -> None:
        """Record that all events up to one are processed, or need no processing as they belong to another stream."""
        number = last.sequence_number
        known = (self._handled, self.stored)
        if any(each is not None and each.sequence_number >= number for each in known):
            return
        self.events_handled(last, count, now)

    @property
    def events_until_due(self) -> int | None:
        """After how many further events a checkpoint is due, or a `deadline` is set; None if events alone change
        nothing."""
        policy = self._policy
        if policy.every_seconds is not None and self._unsaved_since is None:
            return 1
        return None if policy.every_events is None else max(1, policy.every_events - self._unsaved)

    @property
    def deadline(self) -> float | None:
        """When `due` should be called next; None while time alone changes nothing."""
        if self._policy.every_seconds is None or self._unsaved_since is None:
            return None
        return self._unsaved_since + self._policy.every_seconds

    def due(self, now: float) -> bool:
        """Request a checkpoint of the handled events if it is due. Return whether there is something new to write."""
        since, after = self._unsaved_since, self._policy.every_seconds
        if since is None or after is None or now < since + after:
            return False
        return self._want_handled()

    def closing(self) -> None:
        """Request a checkpoint of the handled events if the policy requires it on close."""
        if self._policy.on_close:
            self._want_handled()

    def requested(self, event: Positioned | None, *, is_in_batch: bool = False) -> Checkpoint | None:
        """Request a checkpoint at an event. None means the last event of the current batch if the request comes from
        its handler and batches are processed in order, and otherwise the last handled event.

        Returns:
            The checkpoint to wait for; None if it or a later one is stored, or nothing was handled.

        Raises:
            ConfigurationError: The event was not delivered yet, or not everything up to it is known to be handled.
        """
        if event is None:
            is_all = is_in_batch and self._is_in_order and self._running is not None
            event = self._running if is_all else self._handled
            if event is None:
                return None
        checkpoint = Checkpoint(self._partition_id, event.offset, event.sequence_number)
        if self.covers(checkpoint):
            return None
        if self._delivered is None or event.sequence_number > self._delivered.sequence_number:
            raise ConfigurationError("event", f"sequence number {event.sequence_number} was not delivered here yet")
        if not self._is_in_order and (self._handled is None or event.sequence_number > self._handled.sequence_number):
            raise ConfigurationError(
                "event",
                f"not every event up to sequence number {event.sequence_number} is processed: with a KeyedProcessor or "
                "a decorated function, call checkpoint() without an event, which stores the end of what is processed",
            )
        self._want(checkpoint)
        return checkpoint

    def covers(self, checkpoint: Checkpoint) -> bool:
        """Return whether the store is known to hold a checkpoint, or a later one."""
        return self.stored is not None and self.stored.sequence_number >= checkpoint.sequence_number

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to write and no write is in flight."""
        return self._wanted is None and self._in_flight is None

    @property
    def unwritten(self) -> Checkpoint | None:
        """The latest requested checkpoint that is not known to be stored."""
        return self._wanted or self._in_flight

    def begin_write(self) -> Checkpoint | None:
        """Return the checkpoint to write now; None if there is none, or a write is in flight."""
        if self._in_flight is not None or self._wanted is None:
            return None
        self._in_flight, self._wanted = self._wanted, None
        return self._in_flight

    def write_done(self) -> None:
        """Record that the write in flight is stored."""
        assert self._in_flight is not None
        self.stored, self._in_flight = self._in_flight, None

    def write_failed(self) -> None:
        """Record that the outcome of the write in flight is unknown: it is requested again, unless a later one is."""
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
