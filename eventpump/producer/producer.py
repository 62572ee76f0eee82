"""Sending events to a hub: plain, at least once; or idempotent, each exactly once and in order per partition."""

from __future__ import annotations

import asyncio
import enum
import logging
import operator
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypeVar
from weakref import WeakValueDictionary

from eventpump.cancellation import is_cancelled
from eventpump.core.backoff import TryPace, is_used_up
from eventpump.core.claim import OnDoubt, OnStateLost, PublisherMode, StartPolicy
from eventpump.core.sequencer import AttachRequest, PartitionSequencer
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    EventError,
    PublishOutcomeUnknownError,
    Recovery,
    ServiceBusyError,
    ServiceError,
    StoreError,
)
from eventpump.eventhubs.conditions import SERVER_BUSY_WAIT
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import check_key_length
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS, advance
from eventpump.eventhubs.sealing import SealedBatch
from eventpump.interfaces import (
    HubProperties,
    PartitionProperties,
    PublisherStateStore,
    SendLink,
    SendLinkSpec,
    Transport,
)
from eventpump.options.base import RetryOptions
from eventpump.producer.batch import BatchState, EventBatch
from eventpump.producer.claiming import PublisherLinks, PublisherStart
from eventpump.producer.marks import StoreWaits
from eventpump.producer.publisher import PartitionPublisher

MAX_BATCH_SIZE = 1024 * 1024
"""Bytes; what a batch is filled to where the service states no limit."""
CLOSE_TIMEOUT = 20.0
"""Seconds that closing waits for what is in doubt, unless told otherwise."""
MARK_TIMEOUT = 5.0
"""Seconds that closing waits for the last marks to be stored."""
LAST_SECOND = 1.0
"""Seconds that each part of closing has, where the deadline has come."""

_NO_LIMIT = 2**62

_log = logging.getLogger("eventpump.producer")

_T = TypeVar("_T")
_Parts = list[tuple[list[EventData], EventBatch]]
"""The messages that a list takes."""


class _Split:
    """A list that takes several messages.

    :ivar senders: how many calls send it.
    """

    __slots__ = ("events", "parts", "senders")

    def __init__(self, events: list[EventData], parts: _Parts) -> None:
        self.events = events
        self.parts = parts
        self.senders = 0

    @property
    def is_under_way(self) -> bool:
        """Whether it is being sent, or the outcome of a message is not known."""
        return self.senders > 0 or any(batch.is_under_way for _, batch in self.parts)


@dataclass(frozen=True, slots=True)
class PartitionPublishingOptions:
    """How to publish to a partition, as far as it is not left to the service. None leaves it.

    :param producer_group_id: 0 to 2**63 - 1; must be one the service gave out.
    :param owner_level: 0 to 32767. Of two producers with one `producer_group_id` the service refuses the one with the
        lower level, from its next attach or send on. It keeps nobody out who has another id, such as a producer that
        was given none.
    :param starting_sequence_number: 0 to 2**31 - 1: the number before the first to use; sent with the first attach.
    :raises ConfigurationError: a value outside its range.
    """

    producer_group_id: int | None = None
    owner_level: int | None = None
    starting_sequence_number: int | None = None

    def __post_init__(self) -> None:
        for name, highest in (
            ("producer_group_id", MAX_PRODUCER_ID),
            ("owner_level", MAX_OWNER_LEVEL),
            ("starting_sequence_number", NUMBERS - 1),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value <= highest):
                raise ConfigurationError(f"partition_options.{name}", f"must be a number from 0 to {highest}")


@dataclass(frozen=True, slots=True)
class PartitionPublishingProperties:
    """How a partition is published to now. A plain producer has False and Nones.

    :param last_published_sequence_number: -1 or 0 where nothing is published.
    :param events_published: with a state store: how many events the application has published under this name.
    """

    partition_id: str
    is_idempotent_publishing_enabled: bool
    producer_group_id: int | None
    owner_level: int | None
    last_published_sequence_number: int | None
    events_published: int | None = None


class HubProducer:
    """Sends events to one hub over a transport. One send link per target, attached when first used.

    Plain sends to one target overlap, so that a retry may reorder them; `max_in_flight=1` keeps them in order.
    Idempotent ones go to a partition only, one at a time there; other partitions go on.

    :param transport: closed with the producer.
    :param idempotent: whether every event is published exactly once. Without a `state_store`, this holds as long as the
        producer lives and its `producer_group_id` and `owner_level`, if given, are nobody else's: the service takes two
        producers of one id and level for the same one, and accepts the second of two batches with equal numbers without
        storing it. Without options each producer is given an id of its own.
    :param partition_options: by partition id. Where `state_store` knows a partition already, it is right instead.
    :param name: the application's name for this publisher, under which `state_store` keeps who it is to the service.
    :param state_store: see :class:`eventpump.interfaces.PublisherStateStore`; opened and closed with the producer.
    :param mode: how processes with one `name` go together, the same in all of them. Needs a `state_store`, and is
        "exclusive" with one unless given.

        "exclusive": one at a time. Each start takes a level of its own, and from then on the service refuses the
        process before it, which gets `ProducerDisconnectedError`. Of what that process had on its way nothing is stored
        after the start; what may have been stored in the midst of it is subject to `on_doubt`.

        "replayable": they share one level and may overlap, on one condition: the events follow from the numbers. Each
        process goes on with the event that `events_published` names, and all of them send the same events, in batches
        that are divided alike, as a loop over `orders[known.events_published :]` does. Where they do not, events are
        lost: the service takes the second event with a number for a repeat of the first. One that another has overtaken
        by more than the service remembers, or while a batch of its own is in doubt, gets `InvalidClientStateError`; it
        may be started again, and counts anew.
    :param on_doubt: what follows where a start finds that the process before it did not close with nothing in doubt,
        and that the partition has grown while its level was taken over. Events of that process may have been stored
        without being counted by `events_published`. On a partition with other writers this is so after nearly every
        crash, because theirs make it grow as well. It rests on the last sequence number that `$management` states.

        "fail": `PublishOutcomeUnknownError`, with the number of the first such event and how many there may be; at this
        start and at every later one, until one has another `on_doubt` or the state is reset. "scan": those that were
        stored are counted by their stamps, which are read from the end of the partition; this takes a
        `scan_consumer_group` and the right to listen. From then on every event is sent with a stamp, the application
        property `eventpump:stamp`; where the process before this one did not, it is as "fail". "accept": they are not
        counted, and may be published again.
    :param scan_consumer_group: the consumer group that the end of a partition is read over.
    :param on_state_lost: what follows where a start finds that the service has forgotten the publisher: it refuses its
        id, or states a last number below one that it had accepted. "fail": `ProducerStateLostError`, at this start and
        at every later one, until one has "new" or the state is reset. "new": a new id is taken, and `events_published`
        goes on from the newest mark in the store. A mark is stored after the first batch of a start, every 30 seconds
        while it publishes, and when it closes; what was published since may be published again. In either case a
        producer that is running raises `ProducerStateLostError`, and takes no new id by itself.
    :param max_in_flight: plain sends to one target at a time; None for no bound.
    :raises ConfigurationError: options that do not go together.
    """

    def __init__(
        self,
        transport: Transport,
        hub: str,
        *,
        retry: RetryOptions | None = None,
        rng: random.Random | None = None,
        idempotent: bool = False,
        partition_options: Mapping[str, PartitionPublishingOptions] | None = None,
        name: str | None = None,
        state_store: PublisherStateStore | None = None,
        mode: Literal["exclusive", "replayable"] | None = None,
        on_doubt: Literal["fail", "scan", "accept"] = "fail",
        scan_consumer_group: str | None = None,
        on_state_lost: Literal["fail", "new"] = "fail",
        max_in_flight: int | None = None,
    ) -> None:
        _check_options(
            idempotent=idempotent,
            needs_idempotent={"partition_options": partition_options, "state_store": state_store, "mode": mode},
            max_in_flight=max_in_flight,
        )
        if (name is None) is not (state_store is None):
            raise ConfigurationError("name", "goes together with state_store")
        self._policy = _policy(mode, on_doubt, on_state_lost, scan_consumer_group, is_stateful=state_store is not None)
        self._transport = transport
        self._hub = hub
        self._retry = retry or RetryOptions()
        self._rng = rng or random.Random()
        self._is_idempotent = idempotent
        self._options = dict(partition_options or {})
        self._name = name or ""
        self._state_store = state_store
        self._scan_consumer_group = scan_consumer_group or ""
        self._max_in_flight = max_in_flight
        # A lock lives as long as somebody holds it or waits for it: targets may be any text.
        self._turns: WeakValueDictionary[str | None, asyncio.Semaphore] = WeakValueDictionary()
        self._opening: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()
        self._links: dict[str | None, SendLink] = {}
        self._left: set[asyncio.Task[Any]] = set()
        self._publishers: dict[str, PartitionPublisher] = {}
        self._starts: dict[str, PublisherStart] = {}
        self._is_store_open = False
        self._waits = StoreWaits()
        self._under_way: dict[SealedBatch, tuple[EventBatch, Sequence[EventData]]] = {}
        self._held: dict[int, EventBatch] = {}  # the batch that holds an event, by the event's identity
        self._unlisted: set[EventBatch] = set()  # those whose events are not listed there yet
        self._splits: dict[str, list[_Split]] = {}
        self._closed = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def is_idempotent(self) -> bool:
        """Whether it publishes with numbers."""
        return self._is_idempotent

    @property
    def waits_for_store_since(self) -> float | None:
        """Since when a send waits for one answer of the state store, on the loop's clock; None where none does."""
        return self._waits.since

    @property
    def is_stamping(self) -> bool:
        """Whether every event it sends has a stamp."""
        return self._policy.is_stamping

    # ------------------------------------------------------------------------------------------ batches

    async def create_batch(
        self, *, partition_id: str | None = None, partition_key: str | None = None, max_size_in_bytes: int | None = None
    ) -> EventBatch:
        """Make an empty batch, bound to its target, of what the service takes in one message.

        :param partition_key: of at most 128 characters, as the JavaScript client has it. What the service does with a
            longer one is not known.
        :param max_size_in_bytes: a lower limit, in bytes.
        :raises ConfigurationError: a target that an idempotent producer does not send to, or a key that is too long.
        :raises ServiceError: the link that knows the limit cannot be attached.
        """
        self._check_target(partition_id, partition_key)
        limit = await self.message_limit(partition_id)
        if max_size_in_bytes is not None:
            if not 0 < max_size_in_bytes <= limit:
                raise ConfigurationError("max_size_in_bytes", f"must lie between 1 and the service's limit of {limit}")
            limit = max_size_in_bytes
        return self._new_batch(limit, partition_id, partition_key)

    def _new_batch(self, limit: int, partition_id: str | None, partition_key: str | None) -> EventBatch:
        return EventBatch(
            limit,
            partition_id=partition_id,
            partition_key=partition_key,
            is_idempotent=self._is_idempotent,
            is_stamped=self.is_stamping,
        )

    async def message_limit(self, partition_id: str | None) -> int:
        """Tell what the service takes in one message, in bytes. :raises ServiceError: no link tells it."""
        if self._is_idempotent and partition_id is not None:
            publisher = await self._publisher(partition_id)
            await publisher.attached()
            limit = publisher.max_message_size
        else:
            limit = (await self._with_retries(partition_id, _itself)).max_message_size
        return MAX_BATCH_SIZE if limit >= _NO_LIMIT else limit

    # ------------------------------------------------------------------------------------------ sending

    async def send(
        self,
        events: EventData | Sequence[EventData] | EventBatch,
        *,
        partition_id: str | None = None,
        partition_key: str | None = None,
        split: bool = False,
    ) -> None:
        """Send events as one message, and wait until the service has stored them.

        Idempotent: what was cancelled or ran out of retries with its outcome unknown stays in doubt, and nothing else
        is sent to its partition until that is settled, which goes on by itself. Sending the same batch object, or a
        list of the same events, again waits for it, so a plain retry loop is exactly once.

        :param events: an event, several, or a batch, which knows its target by itself.
        :param partition_id: send to this partition.
        :param partition_key: send where events of this key go. At most 128 characters, the JavaScript client's limit;
            what the service does with a longer one is not known.
        :param split: send as many messages as it takes, one after another; the first failure leaves the rest unsent.
        :raises ConfigurationError: a target that it does not send to, or a key that is too long; nothing is sent.
        :raises EventTooLargeError: they do not fit one message; nothing is sent.
        :raises EventError: events or a batch that are published, being sent or, in another set, in doubt.
        :raises ServiceError: refused, or no success within the retries. Plain: after a lost connection or a time-out
            the events may have been stored; cancelled, they may have been too. Idempotent: they are not stored.
        :raises PublishOutcomeUnknownError: idempotent: no success within the retries, and they may be stored. Or, with
            `is_settling` False: with a state store, the start is in doubt (`on_doubt`), and nothing is sent. Final.
        :raises ProducerStateLostError: the service has forgotten the producer. They are not stored, unless they were in
            doubt before; `batch.state` says so. Final.
        :raises StoreError: with a state store, which failed at the start; they are not stored.
        :raises ProducerDisconnectedError: another producer with a higher owner level took over the partition. Final.
        :raises InvalidClientStateError: the numbers do not agree with the service's. Final for the partition.
        """
        if isinstance(events, EventBatch):
            if partition_id is not None or partition_key is not None:
                raise ConfigurationError("partition_id", "a batch knows its target; give it to create_batch")
            if (events.is_idempotent, events.is_stamped) != (self._is_idempotent, self.is_stamping):
                raise ConfigurationError("events", "the batch was made by a producer of the other kind")
            if events.count == 0:
                return
            if self._is_idempotent:
                assert events.partition_id is not None
                await self._send_batch(await self._publisher(events.partition_id), events)
            else:
                await self.send_sealed(events.seal(), partition_id=events.partition_id)
            return
        self._check_target(partition_id, partition_key)
        each = [events] if isinstance(events, EventData) else _events(events)
        if not each:
            return
        if self._is_idempotent:
            assert partition_id is not None
            await self._send_list(each, partition_id, split=split)
        else:
            limit = await self.message_limit(partition_id) if split else _NO_LIMIT
            for _, batch in self._fill(each, partition_id, partition_key, limit):
                await self.send_sealed(batch.seal(), partition_id=partition_id)

    def _fill(
        self, events: Sequence[EventData], partition_id: str | None, partition_key: str | None, limit: int
    ) -> _Parts:
        """Put events into as few messages as they take."""
        filled: _Parts = []
        for event in events:
            if not filled or not filled[-1][1].try_add(event):
                batch = self._new_batch(limit, partition_id, partition_key)
                batch.try_add(event)
                filled.append(([], batch))
            filled[-1][0].append(event)
        return filled

    async def _send_list(self, events: list[EventData], partition_id: str, *, split: bool) -> None:
        """Send a list as one batch, or several. The same list again joins what is under way of it."""
        limit = await self.message_limit(partition_id) if split else _NO_LIMIT
        publisher = await self._publisher(partition_id)
        # Nothing is awaited from here on until the batch is with its publisher: of two callers the second finds it.
        for batch, others in self._under_way.values():
            if batch.partition_id == partition_id and _are_same(others, events):
                await self._send_batch(publisher, batch, others)
                return
        known = self._splits.get(partition_id, ())
        split_up = next((each for each in known if _are_same(each.events, events)), None)
        if split_up is None:
            self._check_free(events)
            parts = self._fill(events, partition_id, None, limit)
            if len(parts) == 1:
                await self._send_batch(publisher, parts[0][1], events)
                return
            split_up = _Split(events, parts)
            self._splits[partition_id] = [*(each for each in known if each.is_under_way), split_up]
        await self._send_split(publisher, split_up)
        self._splits[partition_id] = [each for each in self._splits[partition_id] if each is not split_up]

    async def _send_split(self, publisher: PartitionPublisher, split_up: _Split) -> None:
        """Send what is not published of a list that takes several messages, and hold its events meanwhile."""
        unsent = [
            batch for _, batch in split_up.parts if not (batch.is_under_way or batch.state is BatchState.PUBLISHED)
        ]
        for batch in unsent:
            self._check_free(batch.events, batch)
            if any(event.published_sequence_number is not None for event in batch.events):
                raise EventError("an event of the list was published since, in another batch or list")
        for batch in unsent:
            self._hold(batch)
        split_up.senders += 1
        try:
            for part, batch in split_up.parts:
                if batch.state is not BatchState.PUBLISHED:
                    await self._send_batch(publisher, batch, part)
        finally:
            split_up.senders -= 1
            if not split_up.senders:
                for _, batch in split_up.parts:
                    if not batch.is_under_way:
                        self._free(batch)

    async def _send_batch(
        self, publisher: PartitionPublisher, batch: EventBatch, events: Sequence[EventData] = ()
    ) -> None:
        """Publish a batch; made of a list, its events learn their numbers with it."""
        if batch.state is BatchState.PUBLISHED:
            raise EventError("the batch is published; it is not sent again as new")
        sealed = batch.seal()
        if sealed not in self._under_way:
            if batch.is_under_way:
                raise EventError(f"the batch is {batch.state.value} at another producer")
            self._check_free(batch.events, batch)
            self._under_way[sealed] = (batch, events)
            self._hold(batch)
        batch.state = BatchState.IN_FLIGHT
        try:
            await publisher.send(sealed)
            await self._marked(publisher.sequencer.partition_id)
        finally:
            if sealed in self._under_way and not publisher.is_awaited(sealed):
                if publisher.doubtful is sealed:
                    batch.state = BatchState.IN_DOUBT
                else:
                    self._concluded(sealed, None)

    def _hold(self, batch: EventBatch) -> None:
        """Keep the events of a batch from being sent in another."""
        self._unlisted.add(batch)

    def _free(self, batch: EventBatch) -> None:
        self._unlisted.discard(batch)
        for event in batch.events if self._held else ():
            if self._held.get(id(event)) is batch:
                del self._held[id(event)]

    def _check_free(self, events: Sequence[EventData], batch: EventBatch | None = None) -> None:
        """Check that no other batch than the one given holds any of these events. :raises EventError: one does."""
        # Listed when somebody asks: a producer that sends one batch after the other has nothing to ask about.
        for each in self._unlisted:
            self._held.update(dict.fromkeys(map(id, each.events), each))
        self._unlisted.clear()
        if not self._held or self._held.keys().isdisjoint(map(id, events)):
            return
        for event in events:
            holder = self._held.get(id(event))
            if holder is None or holder is batch:
                continue
            if holder.state is BatchState.IN_DOUBT:
                raise EventError("an event is in doubt; send the very same batch or list again to wait for its outcome")
            raise EventError("an event is being sent already, in another batch or list")

    async def _marked(self, partition_id: str) -> None:
        """Wait until the store knows that something is published, where this is the first."""
        start = self._starts.get(partition_id)
        if start is not None and start.marks is not None:
            with self._waits.call():
                await start.marks.confirmed()

    def _concluded(self, sealed: SealedBatch, first: int | None) -> None:
        """Take down what became of a batch, whether or not anybody still waits for it."""
        batch, events = self._under_way.pop(sealed, (None, ()))
        if batch is None:
            return
        self._free(batch)
        batch.starting_published_sequence_number = first
        batch.state = BatchState.REFUSED if first is None else BatchState.PUBLISHED
        if first is not None:
            for index, event in enumerate(events):
                event.published_sequence_number = (first + index) % NUMBERS

    async def send_sealed(self, sealed: SealedBatch, *, partition_id: str | None) -> int | None:
        """Send a sealed batch. :returns: the number of its first event, None without numbers. Raises as `send`."""
        if self._is_idempotent:
            assert partition_id is not None
            first = await (await self._publisher(partition_id)).send(sealed)
            await self._marked(partition_id)
            return first

        async def attempt(link: SendLink) -> None:
            await link.send(sealed.message, message_format=BATCH_MESSAGE_FORMAT)

        if self._max_in_flight is None:
            await self._with_retries(partition_id, attempt)
        else:
            async with self._turns.setdefault(partition_id, asyncio.Semaphore(self._max_in_flight)):
                await self._with_retries(partition_id, attempt)
        return None

    # ------------------------------------------------------------------------------------------ knowing

    async def get_properties(self) -> HubProperties:
        """Read about the hub. :raises ServiceError: as of the transport."""
        return await self._transport.get_hub_properties(self._hub)

    async def get_partition_ids(self) -> tuple[str, ...]:
        """List the hub's partitions. :raises ServiceError: as of the transport."""
        return (await self.get_properties()).partition_ids

    async def get_partition_properties(self, partition_id: str) -> PartitionProperties:
        """Read about a partition. :raises ServiceError: as of the transport."""
        return await self._transport.get_partition_properties(self._hub, partition_id)

    async def get_partition_publishing_properties(self, partition_id: str) -> PartitionPublishingProperties:
        """Tell how a partition is published to; attaches first where that is not known yet.

        :raises EventPumpError: it cannot be attached, or the partition has failed.
        """
        if not self._is_idempotent:
            return PartitionPublishingProperties(partition_id, False, None, None, None)
        publisher = await self._publisher(partition_id)
        await publisher.attached()
        sequencer = publisher.sequencer
        start, last = self._starts.get(partition_id), sequencer.last_number
        assert last is not None
        marks = None if start is None else start.marks
        return PartitionPublishingProperties(
            partition_id,
            True,
            sequencer.producer_id,
            sequencer.owner_level,
            last,
            None if marks is None else marks.count(last),
        )

    async def settle(self, partition_id: str) -> None:
        """Wait until nothing is in doubt on a partition. :raises EventPumpError: the partition has failed."""
        if partition_id in self._publishers:
            await self._publishers[partition_id].settled()

    async def aclose(self, deadline: float | None = None) -> None:
        """Wait for what is under way and settle what is in doubt, then close the links and the connection.

        What was not sent yet fails with `ClosedError`. Closing twice is fine; cancelled, it still closes, at once.

        :param deadline: seconds it may take, and where these do not suffice a second more each to store the last
            marks, to end what publishes, and to close the connection and the state store; None for 20.
        :raises PublishOutcomeUnknownError: something stayed in doubt; everything is closed nevertheless.
        """
        self._closed.set()
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        publishers = list(self._publishers.values())
        deadline = CLOSE_TIMEOUT if deadline is None else deadline
        until = asyncio.get_running_loop().time() + deadline
        try:
            await self._drain(publishers, deadline)
            await self._mark_closed(publishers, until)
        finally:
            if self._closing is None:
                self._closing = asyncio.create_task(self._close(publishers, until), name="close a producer")
            await asyncio.shield(self._closing)
        unknown = [_unknown(each) for each in publishers if each.doubtful is not None]
        if unknown:
            for other in unknown[1:]:
                unknown[0].add_note(str(other))
            raise unknown[0]

    @staticmethod
    async def _drain(publishers: Sequence[PartitionPublisher], deadline: float) -> None:
        drains = [asyncio.ensure_future(each.drained()) for each in publishers]
        if drains:
            try:
                await asyncio.wait(drains, timeout=deadline)
            finally:
                for drain in drains:
                    drain.cancel()
                await asyncio.gather(*drains, return_exceptions=True)

    async def _mark_closed(self, publishers: Sequence[PartitionPublisher], until: float) -> None:
        """Store how far each partition is, and that nothing is in doubt; where the store is slow, not."""
        if not self._starts:
            return
        marking = asyncio.create_task(self._mark_each(publishers), name="store the last marks of a producer")
        try:
            left = until - asyncio.get_running_loop().time()
            await asyncio.wait({marking}, timeout=max(LAST_SECOND, min(MARK_TIMEOUT, left)))
        finally:
            if not marking.done():
                marking.cancel()
                self._leave_behind(marking)

    async def _mark_each(self, publishers: Sequence[PartitionPublisher]) -> None:
        marks = []
        for each in publishers:
            start = self._starts.get(each.sequencer.partition_id)
            if start is not None and start.marks is not None:
                is_clean = each.doubtful is None and each.sequencer.failure is None
                marks.append(start.marks.close(is_clean=is_clean))
        await asyncio.gather(*marks, return_exceptions=True)

    async def _end_publishers(self, publishers: Sequence[PartitionPublisher]) -> None:
        await asyncio.gather(*(each.aclose() for each in self._starts.values()))
        await asyncio.gather(*(each.aclose() for each in publishers))

    async def _close(self, publishers: Sequence[PartitionPublisher], until: float) -> None:
        """Close everything, each in its time, whatever of it fails. :raises Exception: the first failure."""
        parts: list[tuple[str, Callable[[], Awaitable[object]]]] = [
            ("end publishers", lambda: self._end_publishers(publishers)),
            ("close the connection", self._transport.aclose),
        ]
        if self._state_store is not None and self._is_store_open:
            parts.append(("close the state store", self._state_store.aclose))
        # With the connection and the store gone, these have nothing to wait for.
        parts.append(("end what was left behind", self._end_left))
        first: BaseException | None = None
        for what, close in parts:
            try:
                failure = await self._within(until, what, close())
            except asyncio.CancelledError as cancelled:
                failure, until = cancelled, 0.0
            first = first or failure
        self._links.clear()
        if first is not None:
            raise first

    async def _end_left(self) -> None:
        if self._left:
            await asyncio.wait(self._left)

    async def _within(self, until: float, what: str, work: Awaitable[object]) -> BaseException | None:
        """Let a part of closing take its time, and cancel it then.

        :returns: what it failed with; None too where it did not end in time, which is logged.
        """
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({task}, timeout=max(LAST_SECOND, until - asyncio.get_running_loop().time()))
        if not task.done():
            _log.warning("closing a producer: could not %s in time", what)
            task.cancel()
            await asyncio.wait({task}, timeout=LAST_SECOND)
            return None
        return None if task.cancelled() else task.exception()

    # ------------------------------------------------------------------------------------------ publishers

    async def _publisher(self, partition_id: str) -> PartitionPublisher:
        async with self._opening.setdefault(partition_id, asyncio.Lock()):
            if self._closed.is_set():
                raise ClosedError("producer")
            publisher = self._publishers.get(partition_id)
            if publisher is None:
                publisher = await self._unless_closed(self._make_publisher(partition_id))
                publisher.on_unknown = partial(self._forget, partition_id)
                self._publishers[partition_id] = publisher
            return publisher

    def _forget(self, partition_id: str) -> None:
        """Keep nothing of a partition that the service does not know: its id is a mistake of the caller's."""
        del self._publishers[partition_id]
        start = self._starts.pop(partition_id, None)
        if start is not None:
            self._leave_behind(asyncio.create_task(start.aclose(), name="end the start of a publisher"))

    async def _unless_closed(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run work that awaits what the user gave, such as the state store. Closing the producer ends it.

        :raises ClosedError: the producer was closed meanwhile.
        :raises StoreError: what it awaits was cancelled by others.
        """
        task = asyncio.create_task(work, name="prepare a publisher")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at, so that it is not logged
        closed = asyncio.create_task(self._closed.wait(), name="wait for the end of a producer")
        try:
            try:
                await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                # Not before it has ended: the next caller would begin the same beside it.
                task.cancel()
                await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
                raise
        finally:
            closed.cancel()
            if not task.done():
                task.cancel()
                self._leave_behind(task)
        if self._closed.is_set():
            raise ClosedError("producer")
        if task.cancelled():
            raise StoreError("read state", "the store's call was cancelled")
        return task.result()

    def _leave_behind(self, task: asyncio.Task[Any]) -> None:
        """Keep a task that nobody waits for until it has ended; closing waits for it."""
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def _make_publisher(self, partition_id: str) -> PartitionPublisher:
        options = self._options.get(partition_id, PartitionPublishingOptions())
        first = AttachRequest(options.producer_group_id, options.owner_level, options.starting_sequence_number)
        if self._state_store is None:
            start, links = None, PublisherLinks(self._transport, partition_id)
            sequencer: PartitionSequencer[SealedBatch] = PartitionSequencer(
                partition_id,
                producer_id=first.producer_id,
                owner_level=first.owner_level,
                starting_number=first.number,
            )
        else:
            start = await self._start(partition_id, first, self._state_store)
            links = start.links
            try:
                sequencer = await start.started()
            except BaseException:
                if start.is_untouched:
                    await start.aclose()
                    self._starts.pop(partition_id, None)
                raise

        def concluded(sealed: SealedBatch, first: int | None) -> None:
            if first is not None:
                last = advance(first, sealed.count - 1)
                links.published(last)
                if start is not None and start.marks is not None:
                    start.marks.published(last)
            self._concluded(sealed, first)

        return PartitionPublisher(links, self._hub, sequencer, retry=self._retry, rng=self._rng, on_concluded=concluded)

    async def _start(self, partition_id: str, first: AttachRequest, store: PublisherStateStore) -> PublisherStart:
        if not self._is_store_open:
            with self._waits.call():
                await store.open()
            self._is_store_open = True
        start = self._starts.get(partition_id)
        if start is None:
            start = self._starts[partition_id] = PublisherStart(
                self._transport,
                self._hub,
                partition_id,
                store,
                self._name,
                self._policy,
                first=first,
                scan_consumer_group=self._scan_consumer_group,
                retry=self._retry,
                rng=self._rng,
                waits=self._waits,
            )
        return start

    # ------------------------------------------------------------------------------------------ plain links

    def _check_target(self, partition_id: str | None, partition_key: str | None) -> None:
        for field, value in (("partition_id", partition_id), ("partition_key", partition_key)):
            # A key of another type would be routed by nothing at all.
            if value is not None and not isinstance(value, str):
                raise ConfigurationError(field, f"must be text, not {type(value).__name__}")
        if partition_id is not None and partition_key is not None:
            raise ConfigurationError("partition_key", "cannot be given along with partition_id")
        check_key_length(partition_key)
        if self._is_idempotent and partition_id is None:
            raise ConfigurationError(
                "partition_id", "an idempotent producer sends to a partition only, not by a key or through the gateway"
            )

    async def _with_retries(self, partition_id: str | None, attempt: Callable[[SendLink], Awaitable[_T]]) -> _T:
        """Run an attempt on the target's link, again under the retry policy where that can help."""
        pace = TryPace(self._retry.base_delay, self._retry.max_delay)
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            link: SendLink | None = None
            try:
                link = await self._link(partition_id)
                return await attempt(link)
            except (ServiceError, asyncio.CancelledError) as failure:
                error = _as_failure(failure)
                if link is not None and error.recovery in (Recovery.RELINK, Recovery.RECONNECT):
                    self._drop(partition_id, link)
                is_last = pace.counts(began) and is_used_up(self._retry, pace.failures)
                if error.recovery is Recovery.GIVE_UP or is_last:
                    raise error from error.__cause__
                wait = pace.next(
                    self._rng,
                    began=began,
                    now=loop.time(),
                    is_connection_lost=error.recovery is Recovery.RECONNECT,
                    was_attached=link is not None,
                    at_least=SERVER_BUSY_WAIT if isinstance(error, ServiceBusyError) else 0.0,
                )
                await self._pause(wait, error)

    async def _pause(self, seconds: float, error: ServiceError) -> None:
        """Wait before the next try. :raises ServiceError: the one given, where the producer is closed meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        except TimeoutError:
            return
        raise error

    async def _link(self, partition_id: str | None) -> SendLink:
        async with self._opening.setdefault(partition_id, asyncio.Lock()):
            if self._closed.is_set():
                raise ClosedError("producer")
            link = self._links.get(partition_id)
            if link is not None and not link.is_attached:
                # It has ended, whatever the reason: its error belongs to those who used it then.
                self._drop(partition_id, link)
                link = None
            if link is None:
                link = await self._transport.open_send_link(SendLinkSpec(self._hub, partition_id))
                self._links[partition_id] = link
            return link

    def _drop(self, partition_id: str | None, link: SendLink) -> None:
        """Close a link that failed; another send may have put a new one in its place.

        A service that does not answer the detach holds up nobody.
        """
        if self._links.get(partition_id) is link:
            del self._links[partition_id]
            self._leave_behind(asyncio.create_task(link.aclose(), name="close a failed send link"))


def _as_failure(failure: ServiceError | asyncio.CancelledError) -> ServiceError:
    """Return the error of a failed attempt. :raises CancelledError: it is the caller who was cancelled."""
    if isinstance(failure, ServiceError):
        return failure
    if is_cancelled():
        raise failure
    error = ServiceError("the attempt was cancelled by what it waited for")
    error.__cause__ = failure
    return error


async def _itself(link: SendLink) -> SendLink:
    return link


def _events(given: object) -> list[EventData]:
    """Take a list of events. :raises EventError: it is none."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | dict):
        events = list(given)
        wrong = next((each for each in events if not isinstance(each, EventData)), None)
        if wrong is None:
            return events
        given = wrong
    raise EventError(f"an event to send is an EventData, not {type(given).__name__}")


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Tell whether two lists are of the very same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _unknown(publisher: PartitionPublisher) -> PublishOutcomeUnknownError:
    """Make the error that tells of a batch left in doubt."""
    sequencer = publisher.sequencer
    head = sequencer.head
    assert head is not None
    error = PublishOutcomeUnknownError(sequencer.partition_id, head.first, head.count)
    error.__cause__ = None if sequencer.failure is None else sequencer.error()
    return error


def _policy(
    mode: str | None, on_doubt: str, on_state_lost: str, scan_consumer_group: str | None, *, is_stateful: bool
) -> StartPolicy:
    """Check how a publisher starts. :raises ConfigurationError: values that cannot work."""
    policy = StartPolicy(
        _choice("mode", mode or PublisherMode.EXCLUSIVE, PublisherMode),
        _choice("on_doubt", on_doubt, OnDoubt),
        _choice("on_state_lost", on_state_lost, OnStateLost),
    )
    for name, is_given in {
        "mode": mode is not None,
        "on_doubt": policy.on_doubt is not OnDoubt.FAIL,
        "on_state_lost": policy.on_state_lost is not OnStateLost.FAIL,
    }.items():
        if is_given and not is_stateful:
            raise ConfigurationError(name, "needs a state_store")
    if (policy.on_doubt is OnDoubt.SCAN) is not bool(scan_consumer_group):
        raise ConfigurationError("scan_consumer_group", "goes together with on_doubt='scan'")
    return policy


_C = TypeVar("_C", bound=enum.StrEnum)


def _choice(field: str, value: str, choices: type[_C]) -> _C:
    try:
        return choices(value)
    except ValueError:
        raise ConfigurationError(field, f"must be one of {', '.join(choices)}") from None


def _check_options(*, idempotent: bool, needs_idempotent: Mapping[str, object], max_in_flight: int | None) -> None:
    for name, value in needs_idempotent.items():
        if value and not idempotent:
            raise ConfigurationError(name, "needs idempotent=True")
    if max_in_flight is not None and (idempotent or max_in_flight < 1):
        raise ConfigurationError("max_in_flight", "is at least 1, and of plain producers only")
