"""`KeyedProcessor`: the events of a partition at the same time, those of one key in order."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, TypeAlias

from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.core.failures import FailureStep
from eventpump.core.keyed import KeyedBounds
from eventpump.errors import ConfigurationError, EventError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.options.consumer import HostSettings, KeyedSettings, failure_step

Handler: TypeAlias = Callable[[PartitionContext, Sequence[ReceivedEvent]], Coroutine[Any, Any, None]]
"""A coroutine function that processes the next events of a key."""

KeyOf: TypeAlias = Callable[[ReceivedEvent], Hashable]
"""Returns the key of an event; None if it is independent of all others."""


class KeyedProcessor(EventProcessor):
    """Processes the events of different keys of a partition at the same time, and those of one key in order.

    For a host's `processor=` and for `subscribe`, as any `EventProcessor`, and for `PartitionReader.run`; an instance
    may be used for any number of partitions. docs/keyed.md describes when to use it and what holds.

    A checkpoint covers only events before which every event is processed, skipped or parked (the watermark):
    `context.checkpoint()` stores the watermark, and `context.checkpoint(event)` refuses an event above it.

    A failure is that of a key: the failure policy applies to its events, and the events of other keys are processed
    meanwhile. Retries must have a limit, because a key that is retried forever would hold the watermark back. `open`
    and `close` are called as of any processor, `process_error` also at the same time for several keys; override them in
    a subclass.

    Args:
        handler: A coroutine function that is called with the `PartitionContext` and the next events of one key: at
            least one, in order, and at most `max_batch_per_key`. All that is said of `process_events` applies to it.
        key: Returns the key of an event, which must be hashable; None if the event is independent of all others. If it
            raises, that is a failure of the event, and all later events of the partition wait until a retry finds the
            key, or the event is skipped or parked. Default: the event's partition key.
        concurrency: The most calls of the handler at a time, per partition. There is no bound for all partitions of a
            host together; for one, use an `asyncio.Semaphore` in the handler. Default: 32.
        max_batch_per_key: The most events that the handler is called with. Default: 1.
        max_events_in_flight: The most events that are taken from the cache and not processed yet, per partition; at
            least `concurrency`. Default: 1000.
        max_bytes_in_flight: The most bytes of them. A single larger event is processed alone. Default: 8 MiB.
        max_ahead: The most events that are taken above the first one that is not processed, per partition; at least
            `concurrency`. A key that is retried or parked holds up no other one until there are so many.
            Default: 10,000.

    Raises:
        ConfigurationError: An option cannot work.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        key: KeyOf | None = None,
        concurrency: int = 32,
        max_batch_per_key: int = 1,
        max_events_in_flight: int = 1000,
        max_bytes_in_flight: int = 8 * 1024 * 1024,
        max_ahead: int = 10_000,
    ) -> None:
        self._handler: Handler = checked_callable("handler", handler)
        self.key: KeyOf = partition_key if key is None else checked_callable("key", key)
        """Returns the key of an event."""
        self.settings = KeyedSettings(
            concurrency=concurrency,
            max_batch_per_key=max_batch_per_key,
            max_events_in_flight=max_events_in_flight,
            max_bytes_in_flight=max_bytes_in_flight,
            max_ahead=max_ahead,
        )
        """Its bounds."""

    @classmethod
    def check_settings(cls, settings: HostSettings) -> None:
        """Refuse retries without a limit, and idle calls, which belong to no key."""
        is_retrying = failure_step(settings.failure_policy) is FailureStep.RETRY
        if is_retrying and settings.handler_retry.max_retries is None:
            problem = (
                "must have a limit for a KeyedProcessor, because a key that is retried forever would hold back the "
                "checkpoint of its partition: set handler_retry=RetryOptions(max_retries=...), and "
                "on_retries_exhausted; or another failure_policy"
            )
            raise ConfigurationError("handler_retry", problem)
        if settings.call_when_idle:
            problem = "must be False for a KeyedProcessor: an idle partition has no key to call it for"
            raise ConfigurationError("call_when_idle", problem)

    @property
    def first_call(self) -> Handler:
        """What is called with events for the first time: the handler itself, unless a subclass has its own method."""
        return self._handler if type(self).process_events is KeyedProcessor.process_events else self.process_events

    def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> Coroutine[Any, Any, None]:
        """Process the next events of a key: call the handler."""
        return self._handler(context, events)


def partition_key(event: ReceivedEvent) -> str | None:
    """Return the partition key of an event; None if it has none, or cannot be decoded."""
    try:  # not `suppress`, which costs more than the key
        return event.partition_key
    except EventError:
        return None


def bounds_of(settings: KeyedSettings) -> KeyedBounds:
    """Return the bounds of a queue."""
    return KeyedBounds(
        events=settings.max_events_in_flight,
        size=settings.max_bytes_in_flight,
        ahead=settings.max_ahead,
        batch=settings.max_batch_per_key,
    )


def checked_callable(option: str, value: Any) -> Any:
    """Return a value that can be called. Raises `ConfigurationError` for any other."""
    if not callable(value) or isinstance(value, type):
        kind = "a coroutine function" if option == "handler" else "a function of an event"
        raise ConfigurationError(option, f"must be {kind}, and is {value!r:.100}")
    return value
