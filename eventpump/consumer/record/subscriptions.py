"""The subscriptions of a consumer group: their records in the store, and those that one host has processors for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from eventpump.aio.tasks import gather
from eventpump.consumer.processor import ProcessorSource
from eventpump.consumer.record.checkpoints import call_store
from eventpump.consumer.record.starts import BeginningRecord, RecordChangedError
from eventpump.core.starts import OnDataLoss, first_number, start_of
from eventpump.core.streams import Selection
from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import LATEST_OFFSET, START_OFFSET, EventPosition, ReceivedEvent
from eventpump.interfaces import HubDirectory, HubProperties
from eventpump.options.consumer import HostSettings, SubscriptionSettings
from eventpump.reports import HostReport, StartIgnored
from eventpump.storage.groups import GroupRecords, StoredSubscription
from eventpump.storage.scope_form import ScopeRecord, SubscriptionRecord

_READS_AT_ONCE = 16


class SubscriptionEndedError(Exception):
    """A subscription was ended: its record is gone, or not active."""


@dataclass(frozen=True, slots=True, eq=False)
class Subscription:
    """A name, and what processes its events on this host.

    Attributes:
        settings: The options of the host, with those of the subscription in their place.
        slow_after: Seconds after which it is reported if it holds other subscriptions back.
        suspends: Whether it is suspended then.
        catch_up_group: The consumer group in which it has a link of its own while it is behind; None for none.
        selection: Which events it is given; None for all. Only this host knows: the record does not have it.
    """

    name: str
    settings: HostSettings
    source: ProcessorSource
    start: BeginningRecord
    slow_after: float = 60.0
    suspends: bool = False
    catch_up_group: str | None = None
    selection: Selection[ReceivedEvent] | None = None


class SubscriptionStart:
    """The record of one subscription, as one host knows it, and where its partitions begin."""

    def __init__(self, stored: StoredSubscription, records: SubscriptionRecords) -> None:
        self._records = records
        self.stored = stored
        """The record as last read or written."""

    @property
    def key(self) -> str:
        """The name under which the store keeps the checkpoints."""
        return self.stored.record.key

    def start_of(self, partition_id: str) -> EventPosition:
        """Return where a partition without a checkpoint begins."""
        try:
            return start_of(_as_scope_record(self.stored.record), partition_id)
        except ValueError as error:
            raise StoreError("read subscription", str(error)) from None

    async def hub(self) -> HubProperties:
        """Return the hub's properties, read after this call."""
        return await self._records.hub()

    async def current(self) -> tuple[ScopeRecord, HubProperties]:
        """Return the record, and the hub's properties, read after this call."""
        hub, record = await self.hub(), self.stored.record
        if record.hub_created_at != hub.created_at:
            raise RecordChangedError
        return _as_scope_record(record), hub

    async def enter(self, partition_id: str, created_at: object) -> None:
        """Do nothing: a record is replaced as a whole when its hub is."""

    async def give_way(self, partition_id: str, refused: EventPosition) -> bool:
        """Return False: the starts of a subscription are never changed."""
        return False

    async def refresh(self) -> HubProperties | None:
        """Read the record again, and after it the hub's properties.

        Returns:
            Those properties if the record is still of an earlier hub; otherwise None.
        """
        stored = await self._records.read(self.stored.record.name)
        if stored is None or not stored.record.is_active:
            raise SubscriptionEndedError
        self.stored = stored
        hub = await self.hub()
        return None if stored.record.hub_created_at == hub.created_at else hub

    async def anew(self, hub: HubProperties, action: OnDataLoss) -> SubscriptionRecord:
        """Return a record of the present hub in place of one of an earlier hub, to begin at its beginning or its
        end."""
        position = EventPosition.latest() if action == "latest" else EventPosition.earliest()
        return self._records.new(self.stored.record.name, hub, await self._records.starts(position, hub))

    async def begin_anew(self, record: SubscriptionRecord) -> bool:
        """Replace the record of an earlier hub, without its checkpoints. May be called again after it failed."""
        replaced = self.stored
        if replaced.record.hub_created_at != record.hub_created_at:
            # Refused, it may be there from an earlier call whose answer was lost.
            stored = await self._records.write(record, replaced) or await self._records.read(record.name)
            if stored is None or stored.record.incarnation != record.incarnation:
                return False
            self.stored = stored
        return self.stored.record.incarnation == record.incarnation


class SubscriptionRecords:
    """Reads and writes the records of a consumer group's subscriptions."""

    def __init__(
        self,
        store: GroupRecords,
        directory: HubDirectory,
        hub: Callable[[], Awaitable[HubProperties]],
        name: str,
        *,
        store_timeout: float,
    ) -> None:
        self._store = store
        self._directory = directory
        self._name = name
        self._store_timeout = store_timeout
        self.hub = hub
        """Returns the hub's properties, read after the call."""

    def new(self, name: str, hub: HubProperties, starts: Mapping[str, str]) -> SubscriptionRecord:
        """Return a record with an incarnation of its own."""
        return SubscriptionRecord(name, secrets.token_hex(8), hub.created_at, len(hub.partition_ids), starts)

    async def starts(self, start: EventPosition | Mapping[str, EventPosition], hub: HubProperties) -> dict[str, str]:
        """Return where each partition of the hub begins, in the form of the record.

        The end of a partition is recorded as the number of its newest event: what is published later is beyond it.
        """
        default = EventPosition.earliest()
        positions = {
            each: start if isinstance(start, EventPosition) else start.get(each, default) for each in hub.partition_ids
        }
        texts = await gather((self._start(*each) for each in positions.items()), at_once=_READS_AT_ONCE)
        return dict(zip(positions, texts, strict=True))

    async def _start(self, partition_id: str, start: EventPosition) -> str:
        if start.offset == START_OFFSET or start.sequence_number is not None:
            return str(start)
        facts = await self._directory.get_partition_properties(self._name, partition_id)
        number = first_number(start, facts)
        if number is None:
            return str(start)
        return str(EventPosition.at_sequence_number(number - 1) if number else EventPosition.earliest())

    async def all(self) -> list[StoredSubscription]:
        return await call_store("list subscriptions", self._store.list_subscriptions(), self._store_timeout)

    async def read(self, name: str) -> StoredSubscription | None:
        """Return a record; None if there is none."""
        stored = await call_store("read subscription", self._store.read_subscription(name), self._store_timeout)
        if stored is not None:
            for text in stored.record.starts.values():
                try:
                    EventPosition.parse(text)
                except ValueError as error:
                    raise StoreError("read subscription", str(error)) from None
        return stored

    async def write(self, record: SubscriptionRecord, replaces: StoredSubscription | None) -> StoredSubscription | None:
        """Store a record in place of another; None if that one is not there any more."""
        return await call_store(
            "write subscription", self._store.write_subscription(record, replaces), self._store_timeout
        )

    async def delete(self, stored: StoredSubscription) -> bool:
        """Delete a record; False if it is not there any more."""
        return await call_store("delete subscription", self._store.delete_subscription(stored), self._store_timeout)


class Subscriptions:
    """The subscriptions that one host has processors for."""

    def __init__(
        self,
        records: SubscriptionRecords,
        settings: HostSettings,
        host: str,
        report: Callable[[HostReport], None],
    ) -> None:
        self._records = records
        self._settings = settings
        self._host = host
        self._report = report
        self._own: dict[str, tuple[Subscription, SubscriptionStart]] = {}
        self._default: Subscription | None = None
        self._active: dict[str, StoredSubscription] = {}
        self._changing = asyncio.Lock()

    def set_default(self, subscription: Subscription) -> None:
        """Add the subscription whose processor was given to the host itself."""
        self._default = subscription

    @property
    def runnable(self) -> list[Subscription]:
        """The active subscriptions that have a processor here."""
        own = [each for name, (each, _) in self._own.items() if name in self._active]
        return own if self._default is None else [self._default, *own]

    @property
    def has_own(self) -> bool:
        """Whether this host has a processor for any, beside the one that was given to the host itself."""
        return bool(self._own)

    @property
    def unserved(self) -> list[StoredSubscription]:
        """The active subscriptions that have no processor here."""
        return [stored for name, stored in self._active.items() if name not in self._own]

    async def refresh(self) -> None:
        """Read all records. Raises `StoreError`."""
        async with self._changing:
            found = await self._records.all()
            self._active = {each.record.name: each for each in found if each.record.is_active}
            for name, (_, start) in self._own.items():
                if name in self._active:
                    start.stored = self._active[name]

    async def subscribe(self, settings: SubscriptionSettings, source: ProcessorSource) -> None:
        """Store the record of a subscription unless there is one, and add its processor.

        Raises:
            ConfigurationError: This host has a processor for it already, or a partition is unknown.
            EventPumpError: The service or the store failed.
        """
        name = settings.name
        async with self._changing:
            # One that another host has ended since may be subscribed to again here.
            if name in self._own and (known := await self._records.read(name)) and known.record.is_active:
                raise ConfigurationError("name", f"this host has subscribed to {name} already")
            own = settings.applied_to(self._settings)
            source.check(own)
            stored = await self._agree(settings)
            start = SubscriptionStart(stored, self._records)
            subscription = Subscription(
                name,
                own,
                source,
                start,
                settings.slow_after,
                settings.on_slow == "suspend",
                settings.catch_up_group,
                settings.selection,
            )
            self._own[name] = subscription, start
            self._active[name] = stored

    async def _agree(self, settings: SubscriptionSettings) -> StoredSubscription:
        """Return the stored record of a subscription, which the first host to subscribe to it has made."""
        name, records = settings.name, self._records
        while True:
            stored = await records.read(name)
            if stored is None:
                hub = await records.hub()
                settings.check_partitions(hub.partition_ids)
                starts = await records.starts(settings.start, hub)
                stored = await records.write(records.new(name, hub, starts), None)
            elif not stored.record.is_active:
                stored = await records.write(replace(stored.record, is_active=True), stored)
            else:
                self._compare(settings, stored.record)
            if stored is not None:
                return stored

    def _compare(self, settings: SubscriptionSettings, record: SubscriptionRecord) -> None:
        """Report if the recorded starts are not those that were asked for, as far as that can be told."""
        asked = {
            each: settings.start if isinstance(settings.start, EventPosition) else settings.start.get(each)
            for each in record.starts
        }
        configured = {
            each: str(position)
            for each, position in asked.items()
            # What an end or a time was recorded as depends on when that was.
            if position is not None and position.offset != LATEST_OFFSET and position.enqueued_time is None
        }
        configured = {each: text for each, text in configured.items() if record.starts[each] != text}
        if configured:
            recorded = {each: record.starts[each] for each in configured}
            self._report(StartIgnored(self._host, None, recorded, configured, subscription=settings.name))

    async def unsubscribe(self, name: str, *, keep_checkpoint: bool) -> None:
        """End a subscription: delete its record, or mark it as inactive, and remove its processor.

        Args:
            keep_checkpoint: Whether its checkpoints are kept, for when it is subscribed to again.
        """
        async with self._changing:
            while (stored := await self._records.read(name)) is not None:
                if not keep_checkpoint:
                    if await self._records.delete(stored):
                        break
                elif not stored.record.is_active or await self._records.write(
                    replace(stored.record, is_active=False), stored
                ):
                    break
            self._own.pop(name, None)
            self._active.pop(name, None)


def _as_scope_record(record: SubscriptionRecord) -> ScopeRecord:
    return ScopeRecord(record.hub_created_at, record.partition_count, record.starts)
