"""What the user writes, and what it is handed."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from eventpump.core.pump_state import CloseReason as CloseReason
from eventpump.errors import ConfigurationError, EventError
from eventpump.eventhubs.events import LastEnqueued, ReceivedEvent

if TYPE_CHECKING:
    from eventpump.interfaces import ConsumerScope


class EventProcessor(ABC):
    """Processes the events of partitions. Subclass it.

    For one partition all four methods are called from one task, one after the other. Given as an instance, one object
    serves all partitions; given as a class or factory, every ownership of a partition gets an object of its own.

    All partitions of a host share its event loop, and so do the renewals of its leases. Code that computes for long, or
    calls something that blocks, stops them all for that time. Run it elsewhere, and wait for it:

    * what blocks, or releases the interpreter's lock: `await asyncio.to_thread(work, events)`;
    * what computes in Python: `await loop.run_in_executor(pool, work, [event.body for event in events])`, with a
      `concurrent.futures.ProcessPoolExecutor` made once.

    A host whose turns of the loop take more than 50 ms starts no delivery while a renewal is due or a call of the store
    might run out of its time. So it keeps its leases as long as what its handlers compute for the batches in their
    hands, all steps of all of them, stays below half of the lease duration; or every turn below a sixtieth of it.
    `LoopBlocked` reports a standstill of a tenth of the lease duration; several shorter ones are not reported.
    """

    async def open(self, context: PartitionContext) -> None:  # noqa: B027 - doing nothing is the common case
        """Prepare for a partition. Raising goes by the failure policy."""

    @abstractmethod
    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Process a batch. Returning says it is processed; raising goes to `process_error`, then by the failure policy.

        Cancelled only when ownership was lost, the host's time to close has run out, or it has not returned for
        `handler_timeout` and `on_handler_timeout` is "cancel". Leaving with anything else than
        an `Exception` counts as raising, save `SystemExit` and `KeyboardInterrupt`, which end the program.

        A message that cannot be decoded is an event like others, of which `offset`, `sequence_number`, `enqueued_time`
        and `raw` can be read, and what else is asked for raises `EventError`. Catch that error where such events are to
        be passed: a checkpoint past them is stored as past others. Raised from here, the batch comes again.

        Args:
            events: One event or more, in order; none only with `call_when_idle`.
        """

    async def process_error(self, context: PartitionContext, error: Exception) -> None:  # noqa: B027 - as above
        """Learn of an error: what the other methods raised, or why the partition cannot be read any more.

        It is in the log already.
        """

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:  # noqa: B027 - as above
        """Clean up after a partition. Called once where `open` returned.

        With `CloseReason.SHUTDOWN` and `CloseReason.FAILED` the partition is still owned, and `context.checkpoint()`
        works until this returns: without an event it stores the last batch whose `process_events` returned, never one
        that raised or was cancelled. With `CloseReason.OWNERSHIP_LOST` it raises `OwnershipLostError`
        where the lease is gone.
        """


class PartitionContext:
    """One partition during one ownership, as its processor sees it.

    Made by the pump. Everything may be read at any time from the event loop's thread.
    """

    def __init__(
        self,
        scope: ConsumerScope,
        partition_id: str,
        owner_id: str,
        owner_level: int,
        *,
        checkpoint: Callable[[ReceivedEvent | None], asyncio.Future[None] | None],
        newest: Callable[[], bytes | None],
        lag: Callable[[], int | None],
    ) -> None:
        self._scope = scope
        self._partition_id = partition_id
        self._owner_id = owner_id
        self._owner_level = owner_level
        self._checkpoint = checkpoint
        self._newest = newest
        self._lag = lag
        self._read_from: bytes | None = None
        self._last_enqueued: LastEnqueued | None = None
        self.ownership_lost = asyncio.Event()
        """Set once the partition is not ours any more. A handler should end soon then: it will be cancelled."""
        self.last_delivered: ReceivedEvent | None = None
        """The last event handed to `process_events`."""

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
        """The epoch of the lease, which is the owner level of the link."""
        return self._owner_level

    @property
    def last_enqueued(self) -> LastEnqueued | None:
        """The partition's newest event, as told with the last one received. None without `track_last_enqueued`."""
        newest = self._newest()
        if newest is not None and newest is not self._read_from:
            self._read_from = newest
            with suppress(EventError):  # of a message that cannot be decoded, the one before it counts
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
        """When the service looked; see `last_enqueued`."""
        return None if self.last_enqueued is None else self.last_enqueued.retrieval_time

    @property
    def lag(self) -> int | None:
        """How many events the partition's newest one is ahead of the last delivered; None where that is not known.

        The newest event is the one named by the last event received (`track_last_enqueued`), or by management since.
        It is not known, and lag is None: while the link is not attached; and when nothing was received for
        `max_wait_time` (1 s at the least) though the link has credit and all that was received is delivered, unless
        management was asked since, within twice that time. A host asks management for its silent partitions in turn,
        one a second: of many silent ones, some are unknown. Where nothing was delivered yet, lag is 0 if management
        confirmed that there is nothing to deliver, and else None.
        """
        return self._lag()

    async def checkpoint(self, event: ReceivedEvent | None = None) -> None:
        """Store that everything up to an event is processed, and wait until that is stored.

        Without an event, what is meant depends on where the call comes from:

        * from the call of `process_events` that is running, or from a task or thread that this call started
          (`asyncio.create_task`, `asyncio.to_thread`) and while it runs: all of the batch in its hands. The caller says
          that the batch is processed; so call it last, and not in a `finally`;
        * from everywhere else (`close`, `process_error`, a timer, a task of the program, a task that an earlier batch
          left behind, a handler that has returned or raised): the last batch whose `process_events` returned. Before
          any has, nothing is stored.

        Calls while a write is in flight become one further write, of the latest. An event at or before what is stored
        changes nothing. Cancelled, the checkpoint is still written.

        Args:
            event: One that this partition delivered here, processed or not; None as said above.

        Raises:
            OwnershipLostError: The partition is not ours any more; the next owner gets the events again.
            ConfigurationError: The event was not delivered by this partition: it came from another partition, hub or
                consumer group, was not received by a host, or lies beyond what was delivered since `open`.
            StoreError: The store failed several times; it is tried again behind the scenes.
        """
        stored = self._checkpoint(event)
        if stored is not None:
            await stored

    def __repr__(self) -> str:
        return f"PartitionContext(partition {self._partition_id}, owner level {self._owner_level})"


@dataclass(frozen=True, slots=True)
class ProcessorSource:
    """Where the processor of an ownership comes from.

    Args:
        make: Gives it.
    """

    make: Callable[[], EventProcessor]

    @classmethod
    def of(cls, processor: object) -> ProcessorSource:
        """Take an instance, a class or a factory.

        Raises:
            ConfigurationError: It is none of these.
        """
        if isinstance(processor, EventProcessor):
            return cls(lambda: processor)
        if isinstance(processor, type):
            if not issubclass(processor, EventProcessor):
                raise ConfigurationError("processor", f"the class {processor.__name__} is no EventProcessor")
            if inspect.isabstract(processor):
                raise ConfigurationError("processor", f"the class {processor.__name__} has no process_events")
        elif not callable(processor):
            raise ConfigurationError("processor", "must be an EventProcessor, a subclass of it, or a factory of such")
        factory = processor

        def make() -> EventProcessor:
            made = factory()
            if not isinstance(made, EventProcessor):
                raise ConfigurationError("processor", f"the factory gave a {type(made).__name__}, no EventProcessor")
            return made

        return cls(make)
