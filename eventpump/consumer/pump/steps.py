"""Processors that finish the events of a batch one by one, and how many of a running batch are finished."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from eventpump.consumer.calls.handler import has_place
from eventpump.consumer.processor import EventProcessor
from eventpump.consumer.pump.partition import OpenPartition
from eventpump.eventhubs.events import ReceivedEvent


class StepwiseProcessor(EventProcessor):
    """Processes a batch event by event, for code that is called with one event at a time: decorated functions.

    A checkpoint covers only events before which every event is finished: `context.checkpoint()` stores that, wherever
    it is called, and `context.checkpoint(event)` refuses an event above it.
    """

    @abstractmethod
    def take_finished(self, events: Sequence[ReceivedEvent]) -> int:
        """Return how many events of the batch in hand are finished, without a gap, from the first one on.

        They are not delivered again, and need not be remembered.

        Args:
            events: Events of the batch that were not finished by the last call.
        """


class Steps:
    """How much of a running batch is finished. The last event of a batch is finished with its batch."""

    def __init__(self, processor: StepwiseProcessor) -> None:
        self._processor = processor
        self._partition: OpenPartition | None = None
        self._left: tuple[ReceivedEvent, ...] = ()

    def begin(self, partition: OpenPartition, events: tuple[ReceivedEvent, ...]) -> None:
        """Record that a batch of a partition is delivered."""
        self._partition, self._left = partition, events

    def record(self) -> None:
        """Let the tracker know what is finished of the running batch, if one runs."""
        left = self._left
        if len(left) < 2 or not (count := self._processor.take_finished(left[:-1])):
            return
        assert self._partition is not None
        self._left = left[count:]
        last = next(filter(has_place, reversed(left[:count])), None)
        self._partition.processed(last, count, is_newest_taken=False)

    def end(self) -> tuple[ReceivedEvent, ...]:
        """Record that the batch does not run any more. Return its events that are not recorded."""
        left, self._left = self._left, ()
        return left
