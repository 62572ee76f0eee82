"""`EventProcessor`, which users implement, and `PartitionContext`, with which its methods are called."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from eventpump.core.pump_state import CloseReason as CloseReason
from eventpump.errors import ConfigurationError, EventError
from eventpump.eventhubs.events import EventPosition, LastEnqueued, ReceivedEvent
from eventpump.options.consumer import HostSettings, SubscriptionPosition, sought_position
from eventpump.options.predecessor import CONTEXT, answers

if TYPE_CHECKING:
    from eventpump.interfaces import ConsumerScope


class EventProcessor(ABC):
    """Processes the events of partitions. Subclass it, or give a host a coroutine function of the arguments of
    `process_events`.

    For one partition all four methods are called from one task, one after the other. A host that is given an instance
    uses it for all partitions; a host that is given a class or factory creates an object for each ownership of a
    partition.

    All partitions of a host share its event loop, and so do the renewals of its leases. Code that computes for long, or
    that blocks, stops them all for that time. Run it elsewhere, and await it:

    * code that blocks, or that releases the interpreter's lock: `await asyncio.to_thread(work, events)`;
    * code that computes in Python: `await loop.run_in_executor(pool, work, [event.body for event in events])`, with a
      `concurrent.futures.ProcessPoolExecutor` that is created once.

    A host whose turns of the loop take more than 50 ms starts no delivery while a renewal is due or a call of the store
    is close to its time-out. So it keeps its leases as long as the computing time of all batches that are being
    processed stays below half of the lease duration, or each turn of the loop below a sixtieth of it. `LoopBlocked`
    reports a standstill of a tenth of the lease duration; several shorter ones are not reported.
    """

    @classmethod  # noqa: B027 - any can, unless its class refuses some
    def check_settings(cls, settings: HostSettings) -> None:
        """Raise `ConfigurationError` if a processor of this class cannot work with the options of its subscription.

        Args:
            settings: The options.
        """

    async def open(self, context: PartitionContext) -> None:  # noqa: B027 - doing nothing is the common case
        """Prepare for a partition. If it raises, the failure policy applies."""

    @abstractmethod
    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Process a batch.

        If it returns, the batch is processed. If it raises, `process_error` is called, and the failure policy applies.

        It is cancelled only if ownership was lost, the host's time to close has run out, or it has not returned for
        `handler_timeout` and `on_handler_timeout` is "cancel". Any `BaseException` counts as a failure, except
        `SystemExit` and `KeyboardInterrupt`, which end the program.

        A message that cannot be decoded is an event, too: `offset`, `sequence_number`, `enqueued_time` and `raw` can be
        read, and other attributes raise `EventError`. Catch that error to skip such events; a checkpoint covers them as
        any other event. If it is raised from here, the failure policy applies.

        Args:
            events: At least one event, in order; an empty sequence only with `call_when_idle`.
        """

    async def process_error(self, context: PartitionContext, error: Exception) -> None:  # noqa: B027 - as above
        """Called with an error that another method raised, with which an event could not be parked, or that ended the
        reading of the partition.

        The error was logged already.
        """

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:  # noqa: B027 - as above
        """Clean up after a partition. Called once, if `open` has returned.

        With `CloseReason.SHUTDOWN` and `CloseReason.FAILED` the partition is still owned, and `context.checkpoint()`
        works until this returns: without an event it stores the last batch whose `process_events` returned, or the last
        event that was skipped or parked, never a batch that raised or was cancelled. With `CloseReason.OWNERSHIP_LOST`
        it raises `OwnershipLostError` if the lease is lost.
        """


@answers(CONTEXT)
class PartitionContext:
    """One partition during one ownership, for its processor.

    All attributes may be read at any time from the event loop's thread.
    """

    def __init__(
        self,
        scope: ConsumerScope,
        partition_id: str,
        owner_id: str,
        owner_level: int,
        subscription: str,
        *,
        checkpoint: Callable[[ReceivedEvent | None], asyncio.Future[None] | None],
        seek: Callable[[EventPosition], None],
        newest: Callable[[], bytes | None],
        lag: Callable[[], int | None],
    ) -> None:
        self._scope = scope
        self._partition_id = partition_id
        self._owner_id = owner_id
        self._owner_level = owner_level
        self._subscription = subscription
        self._checkpoint = checkpoint
        self._seek = seek
        self._newest = newest
        self._lag = lag
        self._read_from: bytes | None = None
        self._last_enqueued: LastEnqueued | None = None
        self.ownership_lost = asyncio.Event()
        """Set when this host no longer owns the partition. A handler should return soon then: it will be cancelled."""
        self.last_delivered: ReceivedEvent | None = None
        """The last event that `process_events` was called with."""

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name."""
        return self._scope.fully_qualified_namespace

    @property
    def hub(self) -> str:
        """The hub's name."""
        return self._scope.hub

    @property
    def consumer_group(self) -> str:
        """The consumer group."""
        return self._scope.consumer_group

    @property
    def partition_id(self) -> str:
        """The partition."""
        return self._partition_id

    @property
    def owner_id(self) -> str:
        """The name of the owning host."""
        return self._owner_id

    @property
    def owner_level(self) -> int:
        """The epoch of the lease, which is the owner level of the link. Always 0 with `BlobOwnershipStore`."""
        return self._owner_level

    @property
    def subscription(self) -> str:
        """The subscription that the processor belongs to: "default" for the one given to the host itself."""
        return self._subscription

    @property
    def last_enqueued(self) -> LastEnqueued | None:
        """The partition's newest event, as named by the last event received. None without `track_last_enqueued`."""
        newest = self._newest()
        if newest is not None and newest is not self._read_from:
            self._read_from = newest
            with suppress(EventError):  # a message that cannot be decoded leaves the value as it was
                self._last_enqueued = ReceivedEvent(newest).last_enqueued or self._last_enqueued
        return self._last_enqueued

    @property
    def last_sequence_number(self) -> int | None:
        """The sequence number of the partition's newest event; see `last_enqueued`."""
        return None if self.last_enqueued is None else self.last_enqueued.sequence_number

    @property
    def last_offset(self) -> str | None:
        """The offset of the partition's newest event; see `last_enqueued`."""
        return None if self.last_enqueued is None else self.last_enqueued.offset

    @property
    def last_enqueued_time(self) -> datetime | None:
        """When the partition's newest event was enqueued; see `last_enqueued`."""
        return None if self.last_enqueued is None else self.last_enqueued.enqueued_time

    @property
    def retrieval_time(self) -> datetime | None:
        """When the service determined this; see `last_enqueued`."""
        return None if self.last_enqueued is None else self.last_enqueued.retrieval_time

    @property
    def lag(self) -> int | None:
        """How many events the partition's newest event is ahead of the last one delivered; None if that is not known.

        The newest event is the one named by the last event received (`track_last_enqueued`), or by management since
        then. It is not known, and lag is None, while the link is not attached; and when nothing was received for
        `max_wait_time` (at least 1 s) although the link has credit and everything received is delivered, unless
        management has answered since, within twice that time. A host asks management about its silent partitions in
        turn, one per second: if many are silent, the lag of some is not known. Before the first delivery, lag is 0 if
        management confirmed that there is nothing to deliver, and otherwise None. Of a subscription that takes a part
        of the events, those that were received and do not match count as delivered.
        """
        return self._lag()

    async def checkpoint(self, event: ReceivedEvent | None = None) -> None:
        """Store that everything up to an event is processed, and wait until that is stored.

        Without an event, the checkpoint covers, depending on the caller:

        * the running call of `process_events`, or a task or thread that it started (`asyncio.create_task`,
          `asyncio.to_thread`), while it runs: its whole batch. The call means that the batch is processed; so make it
          last, and not in a `finally`;
        * any other caller (`close`, `process_error`, a timer, a task of the program, a task that an earlier batch
          left behind, a handler that has returned or raised): the last batch whose `process_events` returned, or event
          that was skipped or parked. If there is none, nothing is stored.

        Of a `KeyedProcessor` and of a decorated function it always covers the events before which every event is
        processed, skipped or parked, without the one in hand; an event above these is refused.

        Of a subscription that takes a part of the events, the checkpoint of the second kind also covers what came after
        that and does not match, if no event that does is waiting or being processed.

        Calls while a write is in flight lead to one further write, of the latest checkpoint. An event at or before the
        stored checkpoint changes nothing, and neither does one that a replay delivers. If the caller is cancelled, the
        checkpoint is written nevertheless.

        Args:
            event: An event that this partition delivered here, processed or not; None as described above.

        Raises:
            OwnershipLostError: This host no longer owns the partition; the next owner receives the events again.
            ConfigurationError: The event was not delivered by this partition: it came from another partition, hub or
                consumer group, was not received by a host, lies beyond what was delivered since `open`, or was
                delivered before a seek to an earlier position. Or not every event up to it is processed, for a
                `KeyedProcessor` or a decorated function.
            StoreError: The store failed several times; the write is retried in the background.
        """
        stored = self._checkpoint(event)
        if stored is not None:
            await stored

    def seek(self, position: SubscriptionPosition) -> None:
        """Continue at another position of this partition, after the running call of `process_events`.

        It takes effect also if that call raises: the batch is then not delivered again for that reason. The position is
        stored as the checkpoint, also if it lies before the present one, and then events are delivered from there on.
        Of several calls during one batch the last one counts. A replay that is running ends. If the partition is given
        up first, the seek is forgotten.

        Args:
            position: As `start` of `EventProcessorHost.subscribe`: "earliest", "latest", a sequence number, a time, a
                timedelta, an offset, or an `EventPosition`. Below the oldest event kept, that one is the next. If the
                partition has no such position, as beyond its end, `process_error` is called with a
                `ConfigurationError`, and delivery continues where it was.

        Raises:
            ConfigurationError: It is not a position.
            OwnershipLostError: This host no longer owns the partition, or is giving it up.
        """
        self._seek(sought_position("position", position))

    def __repr__(self) -> str:
        return f"PartitionContext(partition {self._partition_id}, owner level {self._owner_level})"


ProcessFunction: TypeAlias = Callable[[PartitionContext, Sequence[ReceivedEvent]], Coroutine[Any, Any, object]]
"""A coroutine function that does what `EventProcessor.process_events` does."""
Processor: TypeAlias = EventProcessor | Callable[[], EventProcessor] | ProcessFunction
"""A coroutine function, an `EventProcessor`, a subclass of it, or a function that returns one."""


class FunctionProcessor(EventProcessor):
    """A processor that only has a `process_events`, given as a coroutine function."""

    def __init__(self, function: ProcessFunction) -> None:
        self._function = function

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Process a batch."""
        await self._function(context, events)

    def __repr__(self) -> str:
        return f"FunctionProcessor({self._function!r})"


def _is_coroutine_function(given: object) -> bool:
    call = getattr(given, "__call__", None)  # noqa: B004 - not whether it is callable, but what is called
    return inspect.iscoroutinefunction(given) or (not isinstance(given, type) and inspect.iscoroutinefunction(call))


def _takes(function: Callable[..., object], *arguments: object) -> bool:
    """Return whether a function can be called with these arguments, as far as that is known."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


@dataclass(frozen=True, slots=True)
class ProcessorSource:
    """Creates the processor of an ownership; its class may be known before one is made."""

    make: Callable[[], EventProcessor]
    kind: type[EventProcessor] | None = None

    def check(self, settings: HostSettings) -> None:
        """Raise `ConfigurationError` if it is known that its processors cannot work with some options."""
        if self.kind is not None:
            self.kind.check_settings(settings)

    @classmethod
    def of(cls, processor: object) -> ProcessorSource:
        """Return the source for a `Processor`. Raises `ConfigurationError` if the argument is none."""
        if isinstance(processor, EventProcessor):
            return cls(lambda: processor, type(processor))
        if isinstance(processor, type):
            if not issubclass(processor, EventProcessor):
                raise ConfigurationError("processor", f"{processor.__name__} is not a subclass of EventProcessor")
            if inspect.isabstract(processor):
                raise ConfigurationError("processor", f"the class {processor.__name__} has no process_events")
        elif not callable(processor):
            raise ConfigurationError("processor", f"must be {_EXPECTED}, not {type(processor).__name__}")
        elif _is_coroutine_function(processor):
            if not _takes(processor, None, ()):
                problem = "a coroutine function must take the context and the events: async def f(context, events)"
                raise ConfigurationError("processor", problem)
            made = FunctionProcessor(processor)
            return cls(lambda: made)
        factory = processor
        if not _takes(factory):
            if not isinstance(factory, type) and _takes(factory, None, ()):
                problem = "a function of context and events must be a coroutine function: async def f(context, events)"
                raise ConfigurationError("processor", problem)
            name = getattr(factory, "__name__", type(factory).__name__)
            problem = f"{name} is called without arguments to make a processor, and cannot be; give functools.partial"
            raise ConfigurationError("processor", f"{problem}({name}, ...), or an object")

        def make() -> EventProcessor:
            made = factory()
            if not isinstance(made, EventProcessor):
                problem = f"the factory must return an EventProcessor, and returned {type(made).__name__}"
                raise ConfigurationError("processor", problem)
            return made

        return cls(make, factory if isinstance(factory, type) else None)


_EXPECTED: Final = (
    "a coroutine function of context and events, an EventProcessor, a subclass of it, or a function that returns one"
)
