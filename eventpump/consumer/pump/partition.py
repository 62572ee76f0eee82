"""An open partition: what exists only while it is being read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from eventpump.consumer.link.member import MemberFeed
from eventpump.consumer.processor import EventProcessor
from eventpump.consumer.record.checkpoints import CheckpointWriter
from eventpump.consumer.record.continuity import PumpContinuity
from eventpump.consumer.record.starts import Beginning
from eventpump.core.checkpoint import CheckpointTracker, Positioned
from eventpump.core.pump_state import PumpLife
from eventpump.core.rewind import ReplayedRanges
from eventpump.core.silence import lag
from eventpump.core.starts import first_number
from eventpump.errors import ConfigurationError, LinkDetachedError, RequestRefusedError
from eventpump.eventhubs.conditions import ARGUMENT_ERROR
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import PartitionProperties


@dataclass(slots=True, eq=False)
class OpenPartition:
    """One partition from the moment its start position is found until the pump ends or the position is found again.

    Attributes:
        origin: Marks the events received here, before the number of their link. Plain values, so that an event keeps
            its origin in a process pool.
        replayed: Which events no checkpoint is stored for.
        in_hand: How many events were taken and are not processed yet.
        is_replaying: Whether `feed` is that of a replay.
        doubts: Events in hand for which the function of the stream failed, so that it is not known whether they belong
            to it: with what it failed with, or None after that was handled.
        left_at: Of a stream, what `feed.passed` was when reading was left for a pause or a replay.
    """

    partition_id: str
    processor: EventProcessor
    feed: MemberFeed
    tracker: CheckpointTracker
    writer: CheckpointWriter
    continuity: PumpContinuity
    beginning: Beginning
    origin: tuple[object, ...]
    life: PumpLife
    replayed: ReplayedRanges
    in_hand: int = 0
    is_replaying: bool = False
    doubts: dict[ReceivedEvent, BaseException | None] = field(default_factory=dict)
    left_at: ReceivedEvent | None = None
    _due_timer: asyncio.TimerHandle | None = None

    @property
    def recorded_start(self) -> EventPosition | None:
        """Where reading began by the consumer group's record; None if it began after a checkpoint."""
        return self.beginning.position if self.beginning.checkpoint is None else None

    def next_number(self, facts: PartitionProperties) -> int:
        """Return the sequence number of the first event that is not processed, or a lower one if that is not known."""
        if (handled := self.tracker.handled) is not None:
            return handled.sequence_number + 1
        number = self.beginning.expected
        if number is None:
            number = first_number(self.beginning.position, facts)
        return 0 if number is None else number

    def explained(self, error: Exception) -> Exception:
        """Return the error with which a feed ended that never had a link, or one that adds the start position if that
        was refused."""
        if not isinstance(error, RequestRefusedError) or error.condition != ARGUMENT_ERROR:
            return error
        source = _FROM_SETTINGS if self.beginning.checkpoint is None else _FROM_CHECKPOINT
        return RequestRefusedError(
            f"{error.description}; reading was to begin at {describe_position(self.beginning.position)}, {source}",
            condition=error.condition,
            entity=error.entity,
            tracking_id=error.tracking_id,
        )

    def hub_found(self, created_at: datetime) -> None:
        """Open the link again if the hub is a newer one than the hub that is being read.

        The hub is checked before each link as well; but it may be created again between that check and the attach.
        """
        if created_at > self.beginning.hub_created_at:
            self.feed.reopen(LinkDetachedError("the hub was recreated"))

    def checkpoint(self, event: ReceivedEvent | None, *, is_in_batch: bool) -> asyncio.Future[None] | None:
        """Request a checkpoint (`PartitionContext.checkpoint`);
        return what completes when it is stored, None for nothing to store."""
        if event is None:
            if is_in_batch and self.replayed.is_running:
                return None
            self.note_passed()
        else:
            origin = event.origin
            if not isinstance(origin, tuple) or origin[:-1] != self.origin:
                raise not_delivered(self.partition_id)
            if self.replayed.is_before_seek(origin[-1], event.sequence_number):
                raise delivered_before_seek()
            if self.replayed.has(origin[-1], event.sequence_number):
                return None
        wanted = self.tracker.requested(event, is_in_batch=is_in_batch)
        return None if wanted is None else self.writer.stored(wanted)

    def took(self, events: tuple[ReceivedEvent, ...]) -> None:
        """Record that events of a stream were taken. One that may not belong to it is taken alone."""
        if (doubt := self.feed.take_doubt()) is not None:
            self.doubts[events[0]] = doubt

    def processed(
        self, last: Positioned | None, count: int, *, is_newest_taken: bool = True, now: float | None = None
    ) -> None:
        """Record that events in hand were processed, or passed over, and write the checkpoint that is due.

        Args:
            last: The last of them whose place can be read.
            count: How many they are.
            is_newest_taken: Whether these are all that were taken; otherwise later ones are in hand.
        """
        self.in_hand -= count
        if last is not None:
            feed = self.feed
            passed = None if feed.selection is None else feed.count_passed(is_to_end=False)
            if passed is not None and not is_newest_taken:
                # It is counted up to the newest event taken: of a stream, what lies between two events counts, too.
                before = self.tracker.handled
                passed = count if before is None else max(count, last.sequence_number - before.sequence_number)
            now = asyncio.get_running_loop().time() if now is None else now
            is_due = self.tracker.events_handled(last, count if passed is None else passed, now)
            if is_due or self._due_timer is None:
                self.save_due_checkpoint()

    def note_passed(self, *, is_drained: bool = False) -> None:
        """Of a stream, record that what does not belong to it needs no processing, up to what it has to process next.

        Args:
            is_drained: Whether to be woken by the next event; otherwise when the checkpoint policy needs it.
        """
        if self.feed.selection is None or self.is_replaying:
            return
        feed = self.feed
        if not self.in_hand and (passed := feed.passed or self.left_at) is not None:
            count = feed.count_passed(is_to_end=True) or 0
            if feed.passed is None and self.tracker.handled is not None:
                # What was passed before reading was left, and could not be recorded then.
                count = passed.sequence_number - self.tracker.handled.sequence_number
            self.tracker.events_passed(passed, count, asyncio.get_running_loop().time())
            self.save_due_checkpoint()
        count_until = 1 if is_drained else self.tracker.events_until_due
        if count_until is not None:
            feed.wake_after(count_until)

    @property
    def position(self) -> int | None:
        """The sequence number up to which everything was delivered, or need not be; None if it is not known."""
        known = (self.tracker.delivered, None if self.is_replaying else self.feed.passed)
        return max((each.sequence_number for each in known if each is not None), default=None)

    def save_due_checkpoint(self) -> None:
        """Write the checkpoint that the policy wants now, and set a timer for the one it wants later."""
        if not self.tracker.is_settled:
            self.writer.kick()
        if self._due_timer is None and self.life.reason is None and (deadline := self.tracker.deadline) is not None:
            self._due_timer = asyncio.get_running_loop().call_at(deadline, self._due)

    def _due(self) -> None:
        self._due_timer = None
        self.note_passed()
        self.tracker.due(asyncio.get_running_loop().time())
        self.save_due_checkpoint()

    def lag(self, last_enqueued: Callable[[], int | None], max_silence: float) -> int | None:
        """Return how many events were enqueued after the last one delivered; see `PartitionContext.lag`.

        Args:
            max_silence: Seconds; a link that was silent for longer says nothing about the newest event.
        """
        feed, facts, now = self.feed, self.feed.facts, asyncio.get_running_loop().time()
        # Not the context's last event: it may be of a hub that was created again since.
        return lag(
            delivered=self.position,
            stated=None if facts.newest is None else last_enqueued(),
            answer=facts.hub_answer,
            is_attached=feed.is_attached,
            silent_for=now - facts.received_at if feed.is_silent else None,
            now=now,
            patience=max_silence,
        )

    def stop(self) -> None:
        """Receive no more, and end a wait for events. No checkpoint becomes due any more."""
        self.feed.stop()
        self.feed.wake()
        self.cancel_timer()

    def cancel_timer(self) -> None:
        """Write no checkpoint because of the time any more."""
        if self._due_timer is not None:
            self._due_timer.cancel()
            self._due_timer = None


def not_delivered(partition_id: str) -> ConfigurationError:
    """Return the error for a checkpoint of an event that a partition did not deliver."""
    return ConfigurationError("event", f"it was not delivered by partition {partition_id} here")


def delivered_before_seek() -> ConfigurationError:
    """Return the error for a checkpoint that would undo a seek."""
    return ConfigurationError("event", "it was delivered before a seek; pass one that was delivered after it")


def describe_position(position: EventPosition) -> str:
    """Return a position in words, for logs and errors."""
    if position.sequence_number is not None:
        place = f"sequence number {position.sequence_number}"
    elif position.enqueued_time is not None:
        place = f"enqueued time {position.enqueued_time.isoformat()}"
    else:
        place = f"offset {position.offset}"
    return f"{place}{', inclusive' if position.inclusive else ''}"


_FROM_SETTINGS = "the host's initial_position, or the subscription's start; set one that the partition has"
_FROM_CHECKPOINT = "the partition's checkpoint, which may be of another hub or of the hub before it was recreated"
