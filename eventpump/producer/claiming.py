"""The start of a publisher with a stored state: carries out what `core/claim.py` decides.

The start runs in a task of its own. Callers that are cancelled leave it; where the service or the store fails, it goes
on at the next call from where it was, so that a long outage uses up no levels.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import secrets
from contextlib import aclosing
from typing import Final

from eventpump.aio.retry import retrying
from eventpump.aio.users import Users
from eventpump.core.claim import (
    AttachProducer,
    AttachRefused,
    PublisherMode,
    ReadStamps,
    ReadState,
    ReadTail,
    Request,
    Started,
    StartPolicy,
    SwapState,
    is_below,
    start,
)
from eventpump.core.sequencer import AttachRequest, PartitionSequencer
from eventpump.errors import (
    ClosedError,
    EventPumpError,
    InvalidClientStateError,
    ProducerDisconnectedError,
    ProducerStateLostError,
    PublishOutcomeUnknownError,
    ServiceError,
)
from eventpump.eventhubs.conditions import NOT_ALLOWED, PRODUCER_EPOCH_STOLEN
from eventpump.eventhubs.names import PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.sealing import SealedBatch
from eventpump.eventhubs.stamps import STAMP, read_stamp
from eventpump.interfaces import PublisherStateStore, SendLink, SendLinkSpec, Transport
from eventpump.logs import retry_logger
from eventpump.options.base import RetryOptions
from eventpump.producer.marks import StateMarks, StoreWaits, ask_store
from eventpump.producer.publisher import attach_answer, attach_spec
from eventpump.producer.tail import read_tail

_log = logging.getLogger("eventpump.producer")

_FINAL = (
    ProducerDisconnectedError,
    PublishOutcomeUnknownError,
    ProducerStateLostError,
    InvalidClientStateError,
)
"""The errors that end a start permanently, whatever its stored state."""


def is_unknown_producer(error: ServiceError) -> bool:
    """Return whether a refused attach shows that the service does not know the producer (protocol.md 8.5).

    The same condition on a connection's close, which has no entity, is about a frame of any of its users.
    """
    return error.condition == NOT_ALLOWED and error.entity is not None


class PublisherLinks:
    """Attaches the links of one partition's idempotent publisher, and notices that the service has forgotten it."""

    def __init__(self, transport: Transport, partition_id: str) -> None:
        self._transport = transport
        self._partition_id = partition_id
        self._adopted: SendLink | None = None
        self._is_attached = False  # the service has known the producer
        self._known: int | None = None
        self._has_published = False

    def adopt(self, link: SendLink | None, number: int, *, has_published: bool) -> None:
        """Take a link over for the first attach, and note the last number known."""
        self._adopted = link
        self._is_attached = True
        self._known = number
        self._has_published = has_published

    def published(self, last: int) -> None:
        """Record the number of the last event that the service has accepted."""
        self._known = last
        self._has_published = True

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        """Attach a link.

        Raises:
            ServiceError: Refused, or no answer.
            ProducerStateLostError: The service does not know the producer, or not what it had accepted of it.
        """
        link, self._adopted = self._adopted, None
        if link is None or not link.is_attached:
            try:
                link = await self._transport.open_send_link(spec)
            except ServiceError as error:
                is_ours = self._is_attached and spec.properties.get(PRODUCER_ID) is not None
                if is_ours and is_unknown_producer(error):
                    raise self._lost(error.description) from error
                raise
        self._is_attached = True
        number = link.properties.get(PRODUCER_SEQUENCE_NUMBER)
        known = self._known
        if known is not None and isinstance(number, int) and is_below(number, known, has_published=self._has_published):
            await link.aclose()
            raise self._lost(f"number {known} was published, and the service answers {number}")
        return link

    def _lost(self, problem: str) -> ProducerStateLostError:
        return ProducerStateLostError((self._partition_id,), f"{problem}; it takes a new producer to publish there")

    async def aclose(self) -> None:
        """Detach the links that were not taken over."""
        link, self._adopted = self._adopted, None
        if link is not None:
            await link.aclose()


_STORES: Final = Users()
"""The producers that have opened each state store."""


class PublisherStates:
    """The stored states of an application's publisher, one per partition, and how to start from them.

    Args:
        store: Opened by the first start, and closed with the last producer that uses it.
        policy: What a start does about the process before it.
        scan_consumer_group: The consumer group to read the end of a partition with, if the policy is to scan.

    Attributes:
        waits: The calls of the store that a send waits for.
    """

    def __init__(self, store: PublisherStateStore, name: str, policy: StartPolicy, scan_consumer_group: str) -> None:
        self.store = store
        self.name = name
        self.policy = policy
        self.scan_consumer_group = scan_consumer_group
        self.waits = StoreWaits()
        self.is_open = False

    async def open(self) -> None:
        """Open the store, unless it is open. Raises `StoreError` if that fails."""
        if not self.is_open:
            # Also while it cannot be opened: what an attempt has connected is closed with the producer.
            _STORES.enter(self.store, self)
            with self.waits.call():
                await self.store.open()
            self.is_open = True

    async def aclose(self) -> None:
        """Close the store, unless this producer never asked for it, or another one uses it."""
        if _STORES.leave(self.store, self):
            await self.store.aclose()


class PublisherStart:
    """The start of one partition's publisher; `first` is what to attach with where no state is stored."""

    def __init__(
        self,
        transport: Transport,
        hub: str,
        partition_id: str,
        states: PublisherStates,
        *,
        first: AttachRequest,
        retry: RetryOptions,
        rng: random.Random,
    ) -> None:
        self._transport = transport
        self._hub = hub
        self._partition_id = partition_id
        self._states = states
        self._retry = retry
        self._rng = rng
        self._procedure = start(partition_id, states.policy, secrets.token_hex(16), first)
        self._request: Request | None = None
        self._link: SendLink | None = None
        self._started: Started | None = None
        self._failure: EventPumpError | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_swapped = False
        self._is_closed = False
        self.links = PublisherLinks(transport, partition_id)
        self.marks: StateMarks | None = None

    @property
    def is_untouched(self) -> bool:
        """Whether nothing is stored of it, so that it may be dropped."""
        return not self._has_swapped and not isinstance(self._failure, _FINAL)

    async def started(self) -> PartitionSequencer[SealedBatch]:
        """Start, or go on starting, and wait for it. Cancelled, it goes on.

        Raises:
            ProducerDisconnectedError: Another process with this name started later. Final, as the next three.
            PublishOutcomeUnknownError: What the former process had on its way may be stored, and is not counted.
            ProducerStateLostError: The service has forgotten the publisher.
            InvalidClientStateError: The service answered what cannot be.
            ServiceError: No success within the retries, or refused; it may be called again. So after the next.
            StoreError: Likewise.
            ClosedError: Closed meanwhile.
        """
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._started is None:
            if self._is_closed:
                raise ClosedError("producer")
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name=f"eventpump start of partition {self._partition_id}")
                self._task.add_done_callback(self._done)
            task = self._task
            await asyncio.wait({task})
            if task.cancelled():
                if self._is_closed:
                    raise ClosedError("producer")
                raise ServiceError("starting was cancelled", entity=f"partition {self._partition_id}")
            task.result()
        assert self._started is not None
        state, number = self._started.stored.state, self._started.number
        return PartitionSequencer(
            self._partition_id,
            producer_id=state.producer_id,
            owner_level=state.owner_level,
            starting_number=number if self._started.is_claimed and number >= 0 else None,
        )

    async def aclose(self) -> None:
        """End it, and what it has not handed over. Closing twice is fine."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self.marks is not None:
            await self.marks.aclose()
        await self._drop_link()
        await self.links.aclose()

    # ------------------------------------------------------------------------------------------ inside

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # retrieved, also if every caller was cancelled

    async def _run(self) -> None:
        try:
            if self._request is None:
                self._request = next(self._procedure)
            while True:
                answer = await self._answer(self._request)
                self._request = self._procedure.send(answer)
        except StopIteration as stop:
            started: Started = stop.value
            state = started.stored.state
            self.links.adopt(self._link, started.number, has_published=state.has_published)
            self._link = None
            self.marks = StateMarks(
                self._states.store,
                self._states.name,
                self._partition_id,
                started,
                is_shared=self._states.policy.mode is PublisherMode.REPLAYABLE,
                retry=self._retry,
                rng=self._rng,
            )
            self._started = started
            _log.debug(
                "partition %s: publisher %s has claimed: id %s, owner level %s, published up to %s",
                *(self._partition_id, self._states.name, state.producer_id, state.owner_level, started.number),
                extra={"hub": self._hub, "partition_id": self._partition_id},
            )
        except EventPumpError as error:
            if inspect.getgeneratorstate(self._procedure) == inspect.GEN_CLOSED:
                self._failure = error  # raised by the start itself, and not by one of its steps
                await self._drop_link()
            raise

    async def _answer(self, request: Request) -> object:
        """Carry out the steps of the start, with retries."""
        what = f"partition {self._partition_id}: claiming"
        on_retry = retry_logger(_log, what, hub=self._hub, partition_id=self._partition_id)
        return await retrying(
            lambda: self._do(request), self._retry, self._rng, was_attached=lambda: False, on_retry=on_retry
        )

    async def _do(self, request: Request) -> object:
        name, partition_id, store = self._states.name, self._partition_id, self._states.store
        match request:
            case ReadState():
                with self._states.waits.call():
                    return await ask_store("read state", partition_id, lambda: store.read_state(name, partition_id))
            case SwapState(state, replaces):
                self._has_swapped = True  # a write that fails may be stored too
                with self._states.waits.call():
                    return await ask_store(
                        "write state", partition_id, lambda: store.write_state(name, partition_id, state, replaces)
                    )
            case ReadTail():
                found = await self._transport.get_partition_properties(self._hub, partition_id)
                return found.last_enqueued_sequence_number
            case AttachProducer(asked):
                return await self._attach(asked)
            case ReadStamps():
                return await self._stamps(request)

    async def _attach(self, asked: AttachRequest) -> tuple[int | None, int | None, int | None] | AttachRefused:
        await self._drop_link()
        spec = attach_spec(self._hub, self._partition_id, asked)
        try:
            link = self._link = await self._transport.open_send_link(spec)
        except ServiceError as error:
            if error.condition == PRODUCER_EPOCH_STOLEN:
                return AttachRefused(is_stolen=True, description=error.description)
            if asked.producer_id is not None and is_unknown_producer(error):
                return AttachRefused(is_stolen=False, description=error.description)
            raise
        return attach_answer(link)

    async def _stamps(self, asked: ReadStamps) -> tuple[int, ...] | None:
        if asked.through < asked.after or not await self._reaches_back(asked.after):
            return None
        numbers: list[int] = []
        events = read_tail(
            self._transport, self._hub, self._states.scan_consumer_group, self._partition_id, asked.after, asked.through
        )
        async with aclosing(events):
            async for event in events:
                stamp = read_stamp(event.properties.get(STAMP))
                if stamp is not None and stamp[:2] == (asked.producer_id, asked.owner_level):
                    numbers.append(stamp.number)
        # Asked again: what retention took before it was read left no gap to see.
        return tuple(numbers) if await self._reaches_back(asked.after) else None

    async def _reaches_back(self, after: int) -> bool:
        """Whether the partition still has every event after a sequence number."""
        found = await self._transport.get_partition_properties(self._hub, self._partition_id)
        return found.beginning_sequence_number <= after + 1

    async def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.aclose()
