"""Sending events to a hub: plain, at least once; or idempotent, each exactly once and in order per partition."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Self, TypeVar, Unpack, cast
from weakref import WeakValueDictionary

from eventpump.aio.closing import AsyncResource
from eventpump.aio.home import HomeLoop
from eventpump.aio.retry import retrying
from eventpump.aio.tasks import SingleFlight
from eventpump.core.monitoring import Health, Metric
from eventpump.core.router import PartitionRouter, check_router
from eventpump.core.status import ProducerStats
from eventpump.errors import ConfigurationError, UnsettledBatch
from eventpump.eventhubs.events import EventData, no_event
from eventpump.eventhubs.hashing import check_key_length
from eventpump.eventhubs.sealing import SealedBatch
from eventpump.interfaces import HubDirectory, HubProperties, PartitionProperties, Transport
from eventpump.logs import retry_logger
from eventpump.options.base import RetryOptions
from eventpump.options.predecessor import PRODUCER, answers
from eventpump.options.producer import (
    PartitionPublishingOptions,
    PartitionPublishingProperties,
    ProducerSettings,
    PublishingOptions,
)
from eventpump.producer.batch import EventBatch, fill, seal_alone
from eventpump.producer.claiming import PublisherStates
from eventpump.producer.stats import health_of, metrics_of
from eventpump.producer.targets import (
    IdempotentTarget,
    PlainTarget,
    SendTarget,
    TargetContext,
)
from eventpump.telemetry.interface import Encode, ProducerTelemetry, Send

MAX_BATCH_SIZE = 1024 * 1024
"""Bytes; what a batch is filled to where the service states no limit."""
CLOSE_TIMEOUT = 20.0
"""Default of the seconds that closing waits for batches in doubt."""
MARK_TIMEOUT = 5.0
"""Seconds that closing waits for the last marks to be stored."""
LAST_SECOND = 1.0
"""Seconds that each part of closing has, where the deadline has come."""

_NO_LIMIT = 2**62

_P = TypeVar("_P", HubProperties, PartitionProperties)

_log = logging.getLogger("eventpump.producer")


@answers(PRODUCER)
class HubProducer(AsyncResource):
    """Sends events to one hub over a transport. One send link per target, attached on first use.

    Plain sends to one target overlap, so a retry may reorder them; `max_in_flight=1` keeps them in order. Idempotent
    sends go to a partition, one at a time per partition; partitions do not wait for each other.

    Args:
        transport: The connection to the namespace.
        hub: The event hub's name.
        retry: The number of retries and the delays of sends; None for the defaults of :class:`RetryOptions`.
        rng: Draws the delays between retries; None for an unseeded generator. For tests.
        owns_transport: Whether the transport is closed with the producer. If not, only the producer's links are.
        max_in_flight: The most plain sends to one target at a time; None for no limit.
        router: Chooses the partition of every message that is sent without one, by its first event and its key; the
            partitions are read once. None to leave the choice to the service, which an idempotent producer cannot.
        options: See `PublishingOptions`.

    Raises:
        ConfigurationError: Options cannot be combined.
    """

    def __init__(
        self,
        transport: Transport,
        hub: str,
        *,
        retry: RetryOptions | None = None,
        rng: random.Random | None = None,
        owns_transport: bool = True,
        max_in_flight: int | None = None,
        router: PartitionRouter | None = None,
        **options: Unpack[PublishingOptions],
    ) -> None:
        check_router(router)
        settings = ProducerSettings(max_in_flight=max_in_flight, **options)
        self._transport = transport
        self._hub = hub
        self._is_idempotent = settings.idempotent
        self._encode: Callable[[EventData], EventData] | None = settings.encode
        self._options: dict[str, PartitionPublishingOptions] = settings.partition_options or {}
        self._states: PublisherStates | None = None
        if (store := settings.state_store) is not None:
            scan = settings.scan_consumer_group or ""
            self._states = PublisherStates(store, settings.name or "", settings.start_policy, scan)
        self.is_stamping = self._states is not None and self._states.policy.is_stamping
        """Whether every event it sends has a stamp."""
        self._max_in_flight = max_in_flight
        self._directory: HubDirectory = transport
        self.telemetry: ProducerTelemetry | None = None
        """Records what is sent; None if nothing is recorded."""
        if settings.telemetry is not None:
            self.telemetry = recorder = settings.telemetry.of_producer(hub, settings.name, transport, self._in_doubt)
            self._directory = recorder.directory(transport)
        self._context = TargetContext(
            transport,
            hub,
            retry=retry or RetryOptions(),
            rng=rng or random.Random(),
            owns_transport=owns_transport,
        )
        if self._options:
            self._context.check_partitions = self._check_partitions
        # An unused target is kept only if it has something to keep: its name may be any text.
        self._targets: WeakValueDictionary[str | None, SendTarget] = WeakValueDictionary()
        self.home = HomeLoop(type(self).__name__)
        """The event loop that it belongs to: that of its first use."""
        self._closing: asyncio.Task[None] | None = None
        self._router = router
        self._partition_ids: tuple[str, ...] = ()
        self._listing: SingleFlight[tuple[str, ...]] = SingleFlight("list a hub's partitions", of="producer")

    async def __aenter__(self) -> Self:
        self.home.enter()
        return self

    @property
    def hub(self) -> str:
        """The event hub's name."""
        return self._hub

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name."""
        return self._transport.fully_qualified_namespace

    @property
    def is_closed(self) -> bool:
        """Whether `aclose` was called: nothing can be sent."""
        return self._context.closed.is_set()

    @property
    def is_idempotent(self) -> bool:
        """Whether each event is published exactly once."""
        return self._is_idempotent

    @property
    def encode(self) -> Callable[[EventData], EventData] | None:
        """Returns the event to send in place of one that is given; None if events are sent as they are."""
        return self._encode

    @property
    def stats(self) -> ProducerStats:
        """What was sent, failed and was retried since the producer was created, as numbers at this moment."""
        return self._context.counters.stats

    def health(self) -> Health:
        """Return how the producer is, for a `HealthServer`: ready until it is closed."""
        return health_of(f"the producer of hub {self.hub}", is_closed=self.is_closed)

    def metrics(self) -> Iterable[Metric]:
        """Return what was counted as metrics, for a `HealthServer`; `docs/reference/metrics.md` has all of them."""
        return metrics_of(self.fully_qualified_namespace, self.hub, self.stats)

    def behind(self) -> None:
        """Return None: a producer has no lag."""

    @property
    def waits_for_store_since(self) -> float | None:
        """Since when a send waits for one answer of the state store, on the loop's clock; None where none does."""
        return None if self._states is None else self._states.waits.since

    def _in_doubt(self) -> dict[str, int]:
        """Return how many events are in doubt, by partition."""
        doubts = [error for each in self._context.kept if (error := each.doubt) is not None]
        return {error.partition_id: error.count for error in doubts}

    # ------------------------------------------------------------------------------------------ batches

    async def create_batch(
        self, *, partition_id: str | None = None, partition_key: str | None = None, max_size_in_bytes: int | None = None
    ) -> EventBatch:
        """Make an empty batch, bound to its target, of what the service takes in one message.

        Args:
            partition_id: For this partition. None for one that the router chooses, or, without a router, the service.
            partition_key: Of at most 128 characters, as the JavaScript client has it; None for no key. What the service
                does with a longer one is not known.
            max_size_in_bytes: A lower limit, in bytes; None for that of the service.

        Raises:
            ConfigurationError: A target that an idempotent producer does not send to, or a key that is too long.
            ServiceError: The link that knows the limit cannot be attached.
        """
        self.home.enter()
        self._check_target(partition_id, partition_key)
        if partition_id is None and self._router is not None:
            partition_id = await self._routed(self._router, EventData(b""), partition_key)
        limit = await self.message_limit(partition_id)
        if max_size_in_bytes is not None:
            if not 0 < max_size_in_bytes <= limit:
                raise ConfigurationError("max_size_in_bytes", f"must lie between 1 and the service's limit of {limit}")
            limit = max_size_in_bytes
        encode = self._encode if self.telemetry is None else self.telemetry.writer(self._encode)
        return self._new_batch(limit, partition_id, partition_key, encode)

    def _new_batch(
        self, limit: int, partition_id: str | None, partition_key: str | None, encode: Encode | None
    ) -> EventBatch:
        return EventBatch(
            limit,
            partition_id=partition_id,
            partition_key=partition_key,
            is_idempotent=self._is_idempotent,
            is_stamped=self.is_stamping,
            encode=encode,
        )

    async def message_limit(self, partition_id: str | None) -> int:
        """Return the largest message that the service accepts, in bytes.

        Raises:
            ServiceError: It could not be read from a link.
        """
        self.home.enter()
        limit = await self._target(partition_id).limit()
        return MAX_BATCH_SIZE if limit >= _NO_LIMIT else limit

    # ------------------------------------------------------------------------------------------ sending

    async def send(
        self,
        events: EventData | Sequence[EventData] | EventBatch | UnsettledBatch,
        *,
        partition_id: str | None = None,
        partition_key: str | None = None,
        split: bool = False,
    ) -> None:
        """Send events as one message, and wait until the service has stored them.

        Idempotent: what was cancelled or ran out of retries with its outcome unknown stays in doubt, and nothing else
        is sent to its partition until that is settled, which goes on by itself. Sending the `batch` of the error, the
        same batch object, or a list of the same events again waits for it, so a plain retry loop is exactly once.

        Args:
            events: An event, several, or a batch, which knows its target by itself.
            partition_id: Send to this partition. None for one that the router chooses, or, without a router, the
                service.
            partition_key: Send where events of this key go; None for no key. At most 128 characters, the JavaScript
                client's limit; what the service does with a longer one is not known.
            split: Whether to send as many messages as it takes, one after another; the first failure leaves the rest
                unsent. Default: False.

        Raises:
            ConfigurationError: A target that it does not send to, or a key that is too long; nothing is sent.
            EventTooLargeError: They do not fit one message, and nothing is sent; or, with `limit` None, the service
                refused the message as too large.
            EventError: Events or a batch that are published, being sent or, in another set, in doubt.
            ServiceError: Refused, or no success within the retries. Plain: after a lost connection or a time-out the
                events may have been stored; cancelled, they may have been too. Idempotent: they are not stored.
            PublishOutcomeUnknownError: Idempotent: no success within the retries, and they may be stored; send its
                `batch` to wait for the outcome. Or, with `is_settling` False: with a state store, the start is in doubt
                (`on_doubt`), and nothing is sent. Final.
            ProducerStateLostError: The service has forgotten the producer. They are not stored, unless they were in
                doubt before; `batch.state` says so. Final.
            StoreError: The state store failed, or was cancelled, when this partition was started. The events are not
                stored; sending them again starts the partition again.
            ProducerDisconnectedError: Another producer with a higher owner level took over the partition. Final.
            InvalidClientStateError: The numbers do not agree with the service's. Final for the partition.
        """
        self.home.enter()
        telemetry = self.telemetry
        record = None if telemetry is None else telemetry.record(self._encode, partition_id)
        if telemetry is None or record is None:
            await self._send(events, partition_id, partition_key, self._encode, split=split)
            return
        batch, each = None, None
        if isinstance(events, EventBatch):
            batch, record.partition_id = events, events.partition_id
        elif isinstance(events, EventData):
            each = [events]
        else:
            each = events = events_of(cast("Sequence[EventData]", events))
        work = self._send(events, partition_id, partition_key, record.writer, record, split=split)
        count = batch.count if batch is not None else len(each or ())
        if not count:
            await work
            return
        await telemetry.sending(work, record, each, count, None if batch is None else batch.encode)

    async def _send(
        self,
        events: EventData | Sequence[EventData] | EventBatch | UnsettledBatch,
        partition_id: str | None,
        partition_key: str | None,
        encode: Encode | None,
        record: Send | None = None,
        *,
        split: bool,
    ) -> None:
        """Send as `send` says, once the producer has entered its loop;
        `record` gets the partition, once it is known."""
        if isinstance(events, EventBatch):
            if partition_id is not None or partition_key is not None:
                raise ConfigurationError("partition_id", "a batch knows its target; give it to create_batch")
            if (events.is_idempotent, events.is_stamped) != (self._is_idempotent, self.is_stamping):
                raise ConfigurationError("events", "the batch was made by a producer of the other kind")
            if events.count == 0:
                return
            await self._target(events.partition_id).send_batch(events)
            return
        self._check_target(partition_id, partition_key)
        if isinstance(events, EventData) and self._router is None and not (split or self._is_idempotent):
            await self._target(partition_id).send(seal_alone(events, partition_key=partition_key, encode=encode))
            return
        each = [events] if isinstance(events, EventData) else events_of(events)
        if not each:
            return
        if partition_id is None and self._router is not None:
            partition_id = self._known_at(each) or await self._routed(self._router, each[0], partition_key)
            if record is not None:
                record.partition_id = partition_id
        limit = await self.message_limit(partition_id) if split else _NO_LIMIT
        new_batch = partial(self._new_batch, limit, partition_id, partition_key, encode)
        await self._target(partition_id).send_events(each, partial(fill, each, new_batch))

    async def send_sealed(self, sealed: SealedBatch, *, partition_id: str | None) -> int | None:
        """Send a sealed batch.

        Returns:
            The number of its first event, None without numbers. Raises as `send`.
        """
        return await self._target(partition_id).send(sealed)

    # ------------------------------------------------------------------------------------------ knowing

    async def get_properties(self) -> HubProperties:
        """Read about the hub, again under `retry` where that can help.

        Raises:
            ServiceError: The last attempt failed.
        """
        return await self._read("the hub's properties", lambda: self._directory.get_hub_properties(self._hub))

    async def get_partition_ids(self) -> tuple[str, ...]:
        """List the hub's partitions. Raises as `get_properties`."""
        return (await self.get_properties()).partition_ids

    async def get_partition_properties(self, partition_id: str) -> PartitionProperties:
        """Read about a partition. Raises as `get_properties`."""
        return await self._read(
            f"the properties of partition {partition_id}",
            lambda: self._directory.get_partition_properties(self._hub, partition_id),
        )

    async def _read(self, what: str, read: Callable[[], Awaitable[_P]]) -> _P:
        self.home.enter()
        context = self._context
        return await retrying(
            read,
            context.retry,
            context.rng,
            was_attached=lambda: False,
            stop=context.closed,
            on_retry=retry_logger(_log, f"reading {what}", hub=self._hub),
        )

    async def get_partition_publishing_properties(self, partition_id: str) -> PartitionPublishingProperties:
        """Return the publishing properties of a partition; attaches first if they are not known yet.

        Raises:
            EventPumpError: It cannot be attached, or the partition has failed.
        """
        self.home.enter()
        return await self._target(partition_id).properties()

    async def settle(self, partition_id: str) -> None:
        """Wait until nothing is in doubt on a partition.

        Raises:
            EventPumpError: The partition has failed.
        """
        self.home.enter()
        target = self._targets.get(partition_id)
        if target is not None:
            await target.settle()

    async def aclose(self, deadline: float | None = None) -> None:
        """Wait for what is under way and settle what is in doubt, then close the links and the connection.

        What was not sent yet fails with `ClosedError`. Closing twice is fine; cancelled, it still closes, at once.

        Args:
            deadline: Seconds it may take, and where these do not suffice a second more each to store the last marks, to
                end what publishes, and to close the connection and the state store; None for 20.

        Raises:
            PublishOutcomeUnknownError: Something stayed in doubt; everything is closed nevertheless.
        """
        self.home.enter()
        context = self._context
        context.closed.set()
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        targets = list(context.kept)
        deadline = CLOSE_TIMEOUT if deadline is None else deadline
        until = asyncio.get_running_loop().time() + deadline
        try:
            await self._drain(targets, deadline)
            await self._mark_closed(targets, until)
        finally:
            if self._closing is None:
                self._closing = asyncio.create_task(self._close(until), name="close a producer")
            await asyncio.shield(self._closing)
        unknown = [error for error in (each.doubt for each in targets) if error is not None]
        if unknown:
            for other in unknown[1:]:
                unknown[0].add_note(str(other))
            raise unknown[0]

    @staticmethod
    async def _drain(targets: Sequence[SendTarget], deadline: float) -> None:
        drains = [asyncio.ensure_future(each.drain()) for each in targets]
        if drains:
            try:
                await asyncio.wait(drains, timeout=deadline)
            finally:
                for drain in drains:
                    drain.cancel()
                await asyncio.gather(*drains, return_exceptions=True)

    async def _mark_closed(self, targets: Sequence[SendTarget], until: float) -> None:
        """Store how far each partition is, and that nothing is in doubt; not if the store is slow."""
        if self._states is None:
            return
        marking = asyncio.create_task(self._mark_each(targets), name="store the last marks of a producer")
        try:
            left = until - asyncio.get_running_loop().time()
            await asyncio.wait({marking}, timeout=max(LAST_SECOND, min(MARK_TIMEOUT, left)))
        finally:
            if not marking.done():
                marking.cancel()
                self._context.own(marking)

    @staticmethod
    async def _mark_each(targets: Sequence[SendTarget]) -> None:
        await asyncio.gather(*(each.store_last_mark() for each in targets), return_exceptions=True)

    async def _end_targets(self) -> None:
        await asyncio.gather(*(each.aclose() for each in list(self._context.kept)))

    async def _close(self, until: float) -> None:
        """Close everything, each in its time, whatever of it fails; then raise the first failure."""
        parts: list[tuple[str, Callable[[], Awaitable[object]]]] = [
            ("end publishers", self._end_targets),
        ]
        if self._context.owns_transport:
            parts.append(("close the connection", self._transport.aclose))
        if self._states is not None:
            parts.append(("close the state store", self._states.aclose))
        # With the connection and the store gone, these have nothing to wait for.
        parts.append(("end what was left behind", self._context.end_left))
        first: BaseException | None = None
        for what, close in parts:
            try:
                failure = await self._within(until, what, close())
            except asyncio.CancelledError as cancelled:
                failure, until = cancelled, 0.0
            first = first or failure
        self.home.close()
        if self.telemetry is not None:
            self.telemetry.close()
        if first is not None:
            raise first

    async def _within(self, until: float, what: str, work: Awaitable[object]) -> BaseException | None:
        """Let a part of closing take its time, and cancel it then, which is logged; return what it failed with."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({task}, timeout=max(LAST_SECOND, until - asyncio.get_running_loop().time()))
        if not task.done():
            _log.warning("closing a producer: could not %s in time", what)
            task.cancel()
            await asyncio.wait({task}, timeout=LAST_SECOND)
            return None
        return None if task.cancelled() else task.exception()

    # ------------------------------------------------------------------------------------------ targets

    def _target(self, partition_id: str | None) -> SendTarget:
        target = self._targets.get(partition_id)
        if target is None:
            if self._is_idempotent:
                assert partition_id is not None
                options = self._options.get(partition_id, PartitionPublishingOptions())
                target = IdempotentTarget(self._context, partition_id, options, self._states)
            else:
                target = PlainTarget(self._context, partition_id, max_in_flight=self._max_in_flight)
            self._targets[partition_id] = target
        return target

    def _known_at(self, events: Sequence[EventData]) -> str | None:
        """Return the partition that a list was sent to before and not to the end: a router could choose another now."""
        for partition_id, target in self._targets.items():
            if isinstance(target, IdempotentTarget) and target.knows(events):
                return partition_id
        return None

    async def _routed(self, router: PartitionRouter, event: EventData, partition_key: str | None) -> str:
        """Return the partition that the router chooses. Raises `ConfigurationError` if the hub does not have it."""
        if not self._partition_ids:
            self._context.require_open()
            self._partition_ids = await self._listing.run(self.get_partition_ids)
        partition_id = router.route(event, partition_key, self._partition_ids)
        if partition_id not in self._partition_ids:
            raise ConfigurationError("router", f"chose {partition_id!r:.40}, and the hub has no such partition")
        if (batch_ended := getattr(router, "batch_ended", None)) is not None:
            batch_ended(partition_id)  # each message is a batch of its own
        return partition_id

    async def _check_partitions(self) -> None:
        """Check, once, that the hub has the partitions that `partition_options` names: else a `ConfigurationError`."""
        found = await self._listing.run(self.get_partition_ids)
        unknown = sorted(self._options.keys() - set(found), key=int)
        if unknown:
            problem = f"the hub has no partition {unknown[0]}: its partitions are {', '.join(found[:3])}"
            raise ConfigurationError("partition_options", problem + (f" to {found[-1]}" if len(found) > 3 else ""))
        self._context.check_partitions = None

    def _check_target(self, partition_id: str | None, partition_key: str | None) -> None:
        for field, value in (("partition_id", partition_id), ("partition_key", partition_key)):
            # A key of another type would be routed by nothing at all.
            if value is not None and not isinstance(value, str):
                raise ConfigurationError(field, f"must be text, not {type(value).__name__}")
        if partition_id is not None and partition_key is not None:
            raise ConfigurationError("partition_key", "cannot be given along with partition_id")
        if partition_key is not None:
            check_key_length(partition_key)
        if self._is_idempotent and partition_id is None and self._router is None:
            problem = "an idempotent producer without router sends to a partition only, not by a key or by the gateway"
            raise ConfigurationError("partition_id", problem)


def events_of(given: object) -> list[EventData]:
    """Take a list of events. Raises `EventError` for anything else."""
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | dict):
        events = list(given)
        wrong = next((each for each in events if not isinstance(each, EventData)), None)
        if wrong is None:
            return events
        given = wrong
    raise no_event(given)
