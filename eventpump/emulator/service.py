"""The state shared by all connections: the hubs, access control, the faults, and the hubs' store."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, cast

from eventpump.amqp.performatives import AmqpError
from eventpump.emulator.auth import KeyRing
from eventpump.emulator.capture import CaptureSettings, CaptureWriter
from eventpump.emulator.config import MAX_PARTITIONS, HubSpec
from eventpump.emulator.durable import Append, DurableStore, Entry, LedgerEntry
from eventpump.emulator.faults import Faults
from eventpump.emulator.ledger import NOTHING_PUBLISHED, Claim, ProducerRetention, ProducerState, Repeat, Run
from eventpump.emulator.log import Hub, PartitionLog, Retention, enforce_retention, entity_not_found, group_names
from eventpump.emulator.long_keys import LongKeys
from eventpump.emulator.readers import ReaderTable, Refusal
from eventpump.emulator.tracking import Tracking
from eventpump.errors import ConfigurationError
from eventpump.texts import excerpt

_P = ParamSpec("_P")

_VISIT = "https://aka.ms/sbResourceMgrExceptions"
_MANY = 10
"""Names of hubs that an error lists."""

_logger = logging.getLogger("eventpump.emulator")


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The time limits of idle connections and links, in seconds (protocol.md 2.4); None for no limit.

    Args:
        no_token: A connection without a valid token is dropped; so is one to the WebSocket port that has not become a
            WebSocket by then.
        no_link: A connection that never had a link is closed.
        idle_connection: A connection whose links are all gone is closed.
        idle_producer: A producer's link without a transfer is detached.
        asked: After a client has sent no frame but empty ones, its sessions are asked for their state.
        unsettled_answer: An answer of `$cbs` or `$management` that a client has not settled is settled by the service.
        stolen: A reader whose partition another one took is detached so long after that one was attached. The service
            waits 5 s; here it is at once, so that tests and local fleets need not wait.
    """

    no_token: float | None = 20.0
    no_link: float | None = 60.0
    idle_connection: float | None = 300.0
    idle_producer: float | None = 600.0
    asked: float | None = 180.0
    unsettled_answer: float | None = 60.0
    stolen: float = 0.0


class ServedConnection(Protocol):
    """What the service calls of an open connection; see `ServiceConnection`."""

    @property
    def closed(self) -> asyncio.Future[None]:
        """Completes when it has ended."""

    def guard(self, call: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Make a call on behalf of this connection only."""

    def flush(self) -> None:
        """Send what the engine has queued."""

    def close(self, error: AmqpError) -> None:
        """Close the connection with an error."""

    def abort(self) -> None:
        """Drop the connection."""

    def detach_hub(self, hub: str) -> None:
        """End the links to a hub that was recreated."""


class AnsweringEnd(Protocol):
    """What the service calls of a link whose message it stores; see `ProducerEnd`."""

    @property
    def connection(self) -> ServedConnection:
        """Its connection."""

    def worked(self) -> None:
        """Complete the work of the last messages."""


class Ticket(Protocol):
    """Answers the client once the store has, or has not, stored something."""

    @property
    def end(self) -> AnsweringEnd:
        """The link that is answered."""

    def stored(self) -> None:
        """Answer that it is stored."""

    def failed(self, reason: str) -> None:
        """Answer that it could not be stored."""


class Service:
    """The state of one emulator, apart from its sockets. Used only from its event loop."""

    def __init__(
        self,
        *,
        keys: KeyRing,
        retention: Retention,
        deadlines: Deadlines,
        max_message_size: int,
        now: Callable[[], float] = time.time,
        nothing_published: int = NOTHING_PUBLISHED,
        refuses_long_keys: bool = False,
        producer_retention: ProducerRetention | None = None,
        capture: CaptureSettings | None = None,
    ) -> None:
        self.keys = keys
        self._capture = None if capture is None else CaptureWriter(capture, now)
        self._producer_retention = producer_retention or ProducerRetention()
        self.refuses_long_keys = refuses_long_keys
        self.long_keys = LongKeys()
        self.faults = Faults()
        self.deadlines = deadlines
        self.max_message_size = max_message_size
        self.now = now
        self.authority = ""
        self.connections: set[ServedConnection] = set()
        self._nothing_published = nothing_published
        self._rng = random.Random()
        self._retention = retention
        self._hubs: dict[str, Hub] = {}
        self._partitions: list[PartitionLog] = []
        self._readers: dict[tuple[str, str, str], ReaderTable] = {}
        self._durable: DurableStore | None = None
        self._size = 0
        self._age_check: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def open(self, specs: Sequence[HubSpec], *, data: Path | None, fsync: bool) -> None:
        """Create the hubs, or load them. Raises `ConfigurationError` if the data directory cannot be used."""
        if data is None:
            hubs = [
                Hub(
                    spec.name,
                    self.now_ms(),
                    group_names(spec.consumer_groups),
                    [PartitionLog(spec.name, str(number)) for number in range(spec.partitions)],
                )
                for spec in specs
            ]
        else:
            self._durable = DurableStore(
                data,
                fsync=fsync,
                on_committed=self._committed,
                on_failed=self._not_written,
                take_back=self._take_back,
            )
            hubs = await self._durable.open(specs, self.now_ms())
            if not hubs:
                await self._durable.aclose()
                raise ConfigurationError("hub", f"no hubs configured, and {data} holds none")
        self._hubs = {hub.name.lower(): hub for hub in hubs}
        self._partitions = [partition for hub in hubs for partition in hub.partitions]
        self._keep_producers(self._partitions)
        self._size = sum(partition.size for partition in self._partitions)
        if self._capture is not None:
            try:
                await self._capture.start(self._partitions)
            except BaseException:
                await self.aclose()
                raise
        self._check_age()

    async def aclose(self) -> None:
        """Write pending events, and end what `open` started. May be called twice."""
        self.long_keys.clear()
        if self._durable is not None:
            await self._durable.aclose()
        if self._capture is not None:
            await self._capture.aclose()
        self._is_closed = True
        if self._age_check is not None:
            self._age_check.cancel()
            self._age_check = None

    # --------------------------------------------------------------------------------------------- questions

    def now_ms(self) -> int:
        """Return the time in milliseconds since the Unix epoch."""
        return int(self.now() * 1000)

    @property
    def hubs(self) -> list[Hub]:
        """All hubs, in the order in which they were declared."""
        return list(self._hubs.values())

    def hub(self, name: str) -> Hub | None:
        """Return a hub by name, not case-sensitive, or None."""
        return self._hubs.get(name.lower())

    def readers_of(self, hub: Hub, group: str, partition: PartitionLog) -> ReaderTable:
        """Return the readers of a partition in one consumer group."""
        key = (hub.name, group.lower(), partition.partition_id)
        table = self._readers.get(key)
        if table is None:
            table = self._readers[key] = ReaderTable()
        return table

    def address_of(self, entity: str) -> str:
        """Return an entity's address as in the service's texts."""
        return f"sb://{self.authority}/{excerpt(entity)}"

    def tracking(self) -> Tracking:
        """Return the endings of texts that are sent now."""
        return Tracking(self.authority, self.now())

    def no_such_hub(self, entity: str) -> str:
        """Return the text for an `entity` that does not exist: the service's words, then the names of the hubs."""
        visit = f"To know more visit {_VISIT}. {self.tracking().of_entity(excerpt(entity))}."
        names = [hub.name for hub in self._hubs.values()]
        more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
        return (
            f"{entity_not_found(self.address_of(entity))} {visit} The hubs here are: {', '.join(names[:_MANY])}{more}."
        )

    # ----------------------------------------------------------------------------------------------- storing

    def store(
        self,
        partition: PartitionLog,
        events: list[bytes],
        batch_key: str | None,
        ticket: Ticket,
        *,
        run: Run | None = None,
    ) -> Refusal | None:
        """Store events, all or none, and answer with the ticket: at once, or when they are on disk.

        Args:
            run: The numbering of an idempotent producer's events. Events that are already stored are answered as if
                they were stored now, but not before they are durable.

        Returns:
            The reason why the partition's ledger does not accept them, or None.

        Raises:
            AmqpDecodeError: One of them is not an AMQP message; nothing is stored.
        """
        producer: ProducerState | None = None
        if run is not None:
            judgement = partition.publishing.judge(run, now=self.now())
            self._forget_expired(partition)
            if isinstance(judgement, Refusal):
                return judgement
            if isinstance(judgement, Repeat):
                self._remember(partition, None, ticket)
                return None
            producer = judgement
        batch = partition.number(events, self.now_ms(), batch_key, producer)
        if self._durable is not None:
            self._durable.append(Append(batch, ticket))
            return None
        partition.publish(batch)
        ticket.stored()
        self._grown(batch.size)
        return None

    def attach_publisher(
        self, partition: PartitionLog, claim: Claim, ticket_for: Callable[[ProducerState, int], Ticket]
    ) -> Refusal | None:
        """Accept an idempotent producer's link, with the ticket, once the answered state is durable.

        Args:
            ticket_for: Creates the ticket from the producer's state and the number to answer.

        Returns:
            The reason for a refusal, or None.
        """
        admission = partition.publishing.attach(claim, self._rng, self._nothing_published, now=self.now())
        self._forget_expired(partition)
        if isinstance(admission, Refusal):
            return admission
        self._remember(partition, admission.state, ticket_for(*admission))
        return None

    def _remember(self, partition: PartitionLog, producer: ProducerState | None, ticket: Ticket) -> None:
        if self._durable is not None:
            self._durable.append(LedgerEntry(partition, producer, ticket))
            return
        if producer is not None:
            partition.publishing.committed(producer)
        ticket.stored()

    async def add_partitions(self, name: str, count: int) -> None:
        """See `Emulator.add_partitions`."""
        hub = self._existing(name)
        first = len(hub.partitions)
        if count < 1 or first + count > MAX_PARTITIONS:
            raise ConfigurationError("hub", f"{name} has {first} partitions; the limit is {MAX_PARTITIONS}")
        added = [PartitionLog(hub.name, str(number)) for number in range(first, first + count)]
        if self._durable is not None:
            await self._durable.add_partitions(hub, added)
        self._keep_producers(added)
        hub.partitions += added
        self._partitions += added
        if self._capture is not None:
            for partition in added:
                await self._capture.add(partition)

    def drop_events(self, name: str, partition_id: str, before: int) -> None:
        """See `Emulator.drop_events`."""
        partition = self._existing(name).partition(partition_id)
        if partition is None:
            raise ConfigurationError("partition_id", f"hub {name!r} has no partition {partition_id!r}")
        self._size -= partition.drop_oldest(max(0, before - partition.beginning))
        if self._durable is not None:
            self._durable.drop(partition)

    def recreate_hub(self, name: str, partitions: int | None) -> None:
        """See `Emulator.recreate_hub`."""
        old = self._existing(name)
        if self._durable is not None:
            raise ConfigurationError("hub", f"{name} is stored on disk; only a hub in memory can be recreated")
        if self._capture is not None:
            raise ConfigurationError("hub", f"{name} is captured: the files of the new hub would be mixed with its own")
        spec = HubSpec(old.name, len(old.partitions) if partitions is None else partitions)
        logs = [PartitionLog(old.name, str(number)) for number in range(spec.partitions)]
        self._keep_producers(logs)
        # At least a millisecond later, so that the two can be distinguished.
        self._hubs[name.lower()] = Hub(old.name, max(self.now_ms(), old.created_ms + 1), dict(old.groups), logs)
        gone = {id(partition) for partition in old.partitions}
        self._partitions = [each for each in self._partitions if id(each) not in gone] + logs
        self._size -= sum(partition.size for partition in old.partitions)
        for connection in list(self.connections):
            connection.detach_hub(old.name)

    def forget_producers(self, name: str, *, accept_unknown_producers: bool) -> None:
        """See `Emulator.forget_producers`."""
        hub = self._existing(name)
        if self._durable is not None:
            raise ConfigurationError("hub", f"{name} is stored on disk; only a hub in memory can forget producers")
        for partition in hub.partitions:
            partition.publishing.forget(accept_unknown_producers=accept_unknown_producers)

    def _keep_producers(self, partitions: Sequence[PartitionLog]) -> None:
        for partition in partitions:
            partition.publishing.retention = self._producer_retention

    def _forget_expired(self, partition: PartitionLog) -> None:
        ledger = partition.publishing
        if ledger.expired:
            expired, ledger.expired = ledger.expired, []
            if self._durable is not None:
                self._durable.forget(partition, expired)

    def _existing(self, name: str) -> Hub:
        hub = self.hub(name)
        if hub is None:
            raise ConfigurationError("hub", f"there is no hub {name!r}")
        return hub

    def _committed(self, entries: list[Entry]) -> None:
        ends: dict[AnsweringEnd, None] = {}
        for entry in entries:
            ticket = cast("Ticket", entry.ticket)
            if isinstance(entry, Append):
                entry.batch.partition.publish(entry.batch)
                self._grown(entry.batch.size)
            elif entry.producer is not None:
                entry.partition.publishing.committed(entry.producer)
            ticket.end.connection.guard(ticket.stored)
            ends[ticket.end] = None
        self._answer(ends)

    def _not_written(self, entries: list[Entry], reason: str) -> None:
        _logger.error("events could not be written: %s", reason)
        ends: dict[AnsweringEnd, None] = {}
        for entry in entries:
            ticket = cast("Ticket", entry.ticket)
            ticket.end.connection.guard(ticket.failed, reason)
            ends[ticket.end] = None
        self._answer(ends)

    def _answer(self, ends: dict[AnsweringEnd, None]) -> None:
        for end in ends:
            end.connection.guard(end.worked)
        for connection in {end.connection: None for end in ends}:
            connection.flush()

    def _take_back(self) -> None:
        for partition in self._partitions:
            partition.take_back()

    # --------------------------------------------------------------------------------------------- retention

    def _grown(self, size: int) -> None:
        self._size += size
        if self._size > self._retention.size:
            self._drop()
        if self._age_check is None and not self._is_closed:
            self._check_age()

    def _drop(self) -> None:
        dropped = enforce_retention(self._partitions, self._retention, self.now_ms())
        self._size = sum(partition.size for partition in self._partitions)
        for partition in dropped:
            if self._durable is not None:
                self._durable.drop(partition)
            if not partition.dropping_reported:
                partition.dropping_reported = True
                _logger.warning(
                    "hub %s, partition %s: events older than the retention (%g s, %d bytes over all partitions) are "
                    "dropped from here on; sequence numbers now begin at %d",
                    partition.hub,
                    partition.partition_id,
                    self._retention.seconds,
                    self._retention.size,
                    partition.beginning,
                )

    def _check_age(self) -> None:
        """Drop events that are too old, and schedule the next check for when the next one will be."""
        self._age_check = None
        self._drop()
        oldest = min(
            (first for each in self._partitions if (first := each.first_enqueued_ms) is not None), default=None
        )
        if oldest is not None and self._retention.seconds != float("inf"):
            due = oldest / 1000 + self._retention.seconds - self.now()
            # Events may become too old one by one: they are dropped in groups.
            wait = max(due, min(self._retention.seconds / 60, 60.0)) + 0.001
            self._age_check = asyncio.get_running_loop().call_later(min(wait, 86_400.0), self._check_age)
