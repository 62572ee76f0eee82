"""Where a host begins to read: the consumer group's record, and each partition's start position."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol, TypeVar

from eventpump.aio.retry import retrying
from eventpump.cancellation import is_failure
from eventpump.consumer.lease.ownership import Ownership
from eventpump.consumer.record.checkpoints import call_store, store_error
from eventpump.core.backoff import UNLIMITED
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.starts import (
    NO_NUMBER,
    Loss,
    LossKind,
    OnDataLoss,
    at_beginning,
    at_end,
    entered,
    find_loss,
    hub_of,
    pinned_number,
    retained_from,
    start_of,
    starts_text,
)
from eventpump.errors import DataLossError, StoreError
from eventpump.eventhubs.events import LATEST_OFFSET, Checkpoint, EventPosition
from eventpump.interfaces import HubDirectory, HubProperties, LeaseStore, PartitionProperties
from eventpump.options.consumer import HostSettings
from eventpump.reports import DataLost, ServiceFailed, StoreFailed
from eventpump.storage.groups import GroupRecords, StoredScopeRecord
from eventpump.storage.scope_form import ScopeRecord

_T = TypeVar("_T")

BEYOND_END_PAUSE = 1.0
"""Seconds after which a partition's end is read once more if a checkpoint seems to lie beyond it."""


class HubRecreatedError(DataLossError):
    """The hub was deleted and recreated while it was being read."""


class RecordChangedError(Exception):
    """A subscription's record is of an earlier hub: it has to be read again, or replaced."""


class BeginningRecord(Protocol):
    """Where the partitions of a subscription begin, as it was recorded."""

    @property
    def key(self) -> str:
        """The name under which the store keeps the checkpoints."""

    def start_of(self, partition_id: str) -> EventPosition:
        """Return where a partition without a checkpoint begins."""

    async def hub(self) -> HubProperties:
        """Return the hub's properties, read after this call."""

    async def current(self) -> tuple[ScopeRecord, HubProperties]:
        """Return the record, and the hub's properties, read after this call."""

    async def enter(self, partition_id: str, created_at: datetime) -> None:
        """Record that a partition's state belongs to the hub that was created then."""

    async def give_way(self, partition_id: str, refused: EventPosition) -> bool:
        """Replace a recorded start position that the service refuses, if there is another one."""


class _HubChangedError(Exception):
    """The hub was recreated while the start of a partition was being found: it has to be found again."""


def loss_error(hub: str, partition_id: str, loss: Loss) -> DataLossError:
    """Return the error for a loss, with what to do about it."""
    if loss.kind is LossKind.RETENTION:
        advice = 'on_data_loss="earliest" continues at the oldest event kept, "latest" at the end'
    else:
        advice = (
            "the checkpoint is kept; to continue: "
            'on_data_loss="earliest" reads the present hub from its beginning, "latest" from its end'
        )
    return data_loss(hub, partition_id, loss, advice)


def data_loss(hub: str, partition_id: str, loss: Loss, advice: str = "") -> DataLossError:
    """Return the error for a loss, with advice on what to do about it, or how it came about."""
    first, last = loss.first_missing, loss.last_missing
    problem = f"{loss.describe()}; {advice}" if advice else loss.describe()
    return DataLossError(hub, partition_id, problem, first_missing=first, last_missing=last)


class SharedRead:
    """Reads a hub's properties for concurrent callers, who share a read that began after each of them had called."""

    def __init__(self, directory: HubDirectory, hub: str) -> None:
        self._directory = directory
        self._hub = hub
        self._lock = asyncio.Lock()
        self._begun = 0
        self._answered = 0
        self._answer: HubProperties | BaseException | None = None

    async def read(self) -> HubProperties:
        """See `HubDirectory.get_hub_properties`; what is returned was read after this call."""
        asked = self._begun
        async with self._lock:
            if self._answered <= asked or self._answer is None:
                self._begun += 1
                number = self._begun
                try:
                    self._answer = await self._directory.get_hub_properties(self._hub)
                except BaseException as error:
                    if not is_failure(error):
                        raise
                    self._answer = error
                self._answered = number
            if isinstance(self._answer, BaseException):
                raise self._answer
            return self._answer


class GroupStart:
    """The consumer group's record, as one host knows it.

    Args:
        leases: Lists the group's leases. Its calls have a time-out.

    Attributes:
        starts: The start positions in this host's settings, in the form of the record.
    """

    def __init__(
        self,
        leases: LeaseStore,
        store: GroupRecords,
        directory: HubDirectory,
        settings: HostSettings,
        *,
        store_timeout: float,
    ) -> None:
        self._leases = leases
        self._store = store
        self._hub = SharedRead(directory, settings.hub)
        self._store_timeout = store_timeout
        self._stored: StoredScopeRecord | None = None
        self._pending: set[tuple[str, datetime]] = set()
        self._entering = asyncio.Lock()
        self.starts = starts_text(settings.initial_position)
        self.is_first = False
        self._is_unanswered = False
        """Whether a write of the group's first record failed, or was cancelled."""

    @property
    def key(self) -> str:
        """The name under which the store keeps the checkpoints."""
        return DEFAULT_SUBSCRIPTION

    @property
    def record(self) -> ScopeRecord:
        """The record as last read or written. Only after `agree` has returned."""
        assert self._stored is not None
        return self._stored.record

    async def agree(self, properties: HubProperties) -> ScopeRecord:
        """Read the group's record, or write the first one. Of several hosts at once, the first one's is used by all.

        A group from before there were records adopts the present hub.
        """
        stored = None
        if not self._is_unanswered:
            stored = await call_store("read scope record", self._store.read_scope_record(), self._store_timeout)
        while stored is None:
            first = ScopeRecord(properties.created_at, len(properties.partition_ids), self.starts)
            self._is_unanswered = True  # one that fails may have stored it, and is repeated to find that out
            stored = await call_store(
                "write scope record", self._store.write_scope_record(first, None), self._store_timeout
            )
            self._is_unanswered, self.is_first = False, stored is not None
            if stored is None:
                stored = await call_store("read scope record", self._store.read_scope_record(), self._store_timeout)
        for text in stored.record.starts.values():
            self._parsed(text)
        self._stored = stored
        return stored.record

    def start_of(self, partition_id: str) -> EventPosition:
        """Return the start position of a partition without a checkpoint."""
        try:
            return start_of(self.record, partition_id)
        except ValueError as error:
            raise StoreError("read scope record", str(error)) from None

    async def hub(self) -> HubProperties:
        """Return the hub's properties, read after this call."""
        return await self._hub.read()

    async def current(self) -> tuple[ScopeRecord, HubProperties]:
        """Return the record, and the hub to compare it with; the hub is read after the record.

        The record is read again only if it may have changed: every change of it follows a change of the hub.
        """
        properties, record = await self.hub(), self.record
        if record.reset_for is None and record.hub_created_at == properties.created_at:
            return record, properties
        record = await self.agree(properties)
        return record, await self.hub()

    async def enter(self, partition_id: str, created_at: datetime) -> None:
        """Enter a partition in the record: its checkpoint belongs to the hub that was created at a time.

        If the caller is cancelled, the partition may still be entered.

        Raises:
            _HubChangedError: The hub was recreated since.
        """
        entry = (partition_id, created_at)
        self._pending.add(entry)
        async with self._entering:
            while entry in self._pending:
                stored, properties = await self._refreshed()
                if properties.created_at != created_at:
                    self._pending.discard(entry)
                    raise _HubChangedError
                batch = frozenset(each for each in self._pending if each[1] == created_at)
                leases = await call_store("list leases", self._leases.list(), self._store_timeout)
                known = {lease.partition_id for lease in leases} | set(properties.partition_ids)
                names = [each for each, _ in batch]
                # Not `self.record`: it may be newer than the properties of the hub.
                change = entered(stored.record, names, created_at, known, len(properties.partition_ids))
                if change is None or await self._swap(
                    replace(
                        stored.record,
                        hub_created_at=change.hub_created_at,
                        partition_count=change.partition_count,
                        reset_for=change.reset_for,
                        reset_partitions=change.reset_partitions,
                    ),
                    stored,
                ):
                    self._pending -= batch

    async def give_way(self, partition_id: str, refused: EventPosition) -> bool:
        """Replace a recorded start position that the service refuses by the one in this host's settings.

        Without this, a mistake in the settings of the first host could not be corrected in the settings.
        """
        own = self.starts.get(partition_id, self.starts[""])
        if own == str(refused):
            return False
        while self.start_of(partition_id) == refused:
            starts = {**self.record.starts, partition_id: own}
            if await self._swap(replace(self.record, starts=starts), self._stored):
                break
            await self._refreshed()
        return True

    async def _refreshed(self) -> tuple[StoredScopeRecord, HubProperties]:
        """Return the record as it is stored now, and the hub's properties, read after it."""
        stored = await call_store("read scope record", self._store.read_scope_record(), self._store_timeout)
        if stored is None:
            await self.agree(await self.hub())
            stored = self._stored
            assert stored is not None
        else:
            self._stored = stored
        return stored, await self.hub()

    async def _swap(self, record: ScopeRecord, replaces: StoredScopeRecord | None) -> bool:
        stored = await call_store(
            "write scope record", self._store.write_scope_record(record, replaces), self._store_timeout
        )
        if stored is None:
            return False
        self._stored = stored
        return True

    @staticmethod
    def _parsed(text: str) -> EventPosition:
        try:
            return EventPosition.parse(text)
        except ValueError as error:
            raise StoreError("read scope record", str(error)) from None


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where reading a partition begins.

    Args:
        expected: The sequence number of the first event; None if that is not known.
        hub_created_at: The creation time of the hub that all this belongs to.
    """

    position: EventPosition
    checkpoint: Checkpoint | None
    expected: int | None
    hub_created_at: datetime


class StartFinder:
    """Finds the start position of one partition, under its lease."""

    def __init__(self, ownership: Ownership, group: BeginningRecord) -> None:
        services = ownership.services
        self._ownership = ownership
        self._group = group
        self._store = services.group
        self._directory = services.directory
        self._settings = ownership.settings
        self._partition_id = ownership.partition_id
        self._rng = services.rng
        self._step = ownership.unless_ending
        self._pause = ownership.pause
        self._report = ownership.report
        self._stored: Checkpoint | None = None
        self.key = DEFAULT_SUBSCRIPTION

    async def find(self, stored: Checkpoint | None) -> Beginning:
        """Find the start position, and store it if it could not be found again. Retried until it succeeds.

        Raises:
            DataLossError: Events are lost, and `on_data_loss` is "fail".
            ServiceError: The service refused to answer.
        """
        self._stored = stored
        while True:
            with suppress(_HubChangedError):
                return await self.until_done(self._find)

    async def skip_to_end(self, loss: Loss) -> None:
        """Store the partition's end as its checkpoint, after a loss, and report the loss."""
        await self.store(at_end(self._partition_id, await self.facts()), is_reset=True)
        self._report(DataLost, loss, "latest")

    async def facts(self) -> PartitionProperties:
        """Return the partition's properties. Retried until it succeeds, or the service refuses."""
        return await self.until_done(self._facts)

    async def until_done(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat until it succeeds, and report each failure of store or service.
        Raises a `ServiceError` that is final."""

        def report(error: Exception, _: float) -> None:
            if isinstance(error, StoreError):
                self._report(StoreFailed, error.operation, error)
            else:
                self._report(ServiceFailed, f"reading the properties of hub {self._settings.hub}", error)

        return await retrying(attempt, UNLIMITED, self._rng, on_retry=report, sleep=self._pause)

    async def store(self, checkpoint: Checkpoint, *, is_reset: bool) -> None:
        """Store a checkpoint under the lease. Retried until it is stored, or the pump ends."""
        operation = "reset checkpoint" if is_reset else "write checkpoint"

        def report(error: Exception, _: float) -> None:
            failure = store_error(error, operation, self._partition_id, self._ownership.services.store_timeout)
            self._report(StoreFailed, operation, failure)

        is_stored = await retrying(
            lambda: self._step(self._store_once(checkpoint, is_reset)),
            UNLIMITED,
            self._rng,
            is_final=lambda _: False,
            on_retry=report,
            sleep=self._pause,
        )
        if not is_stored:
            self._ownership.refused()
        self._stored = checkpoint

    async def _find(self) -> Beginning:
        # `self._stored`, because an earlier attempt may have reset the checkpoint.
        group, partition_id, stored = self._group, self._partition_id, self._stored
        record, hub = await self._step(group.current())
        if group.key != self.key:
            raise RecordChangedError  # replaced since the checkpoint was read
        is_of_this_hub = hub_of(record, partition_id) == hub.created_at
        if stored is None:
            if not is_of_this_hub:
                # First: otherwise the checkpoint that follows would look like one of the previous hub.
                await self._enter(hub)
            start = group.start_of(partition_id)
            if start.offset != LATEST_OFFSET:
                # The start of a subscription is pinned by its number: what is missing there is lost.
                expected = None if group.key == DEFAULT_SUBSCRIPTION else pinned_number(start)
                return Beginning(start, None, expected, hub.created_at)
            pinned = at_end(partition_id, await self.facts())
            await self.store(pinned, is_reset=False)
            return _after(pinned, pinned.sequence_number + 1, hub)
        facts = await self.facts() if is_of_this_hub else None
        loss = find_loss(stored, facts, is_of_this_hub=is_of_this_hub)
        if loss is not None and loss.kind is LossKind.BEYOND_END:
            # The properties may lag a little behind the events received.
            await self._pause(BEYOND_END_PAUSE)
            facts = await self.facts()
            loss = find_loss(stored, facts, is_of_this_hub=True)
        if loss is None:
            number = stored.sequence_number
            return _after(stored, None if number == NO_NUMBER else number + 1, hub)
        action = loss.action(self._settings.on_data_loss)
        if action == "fail":
            self._report(DataLost, loss, action)
            raise loss_error(self._settings.hub, partition_id, loss)
        if action == "earliest" and loss.kind is LossKind.RETENTION:
            assert facts is not None
            self._report(DataLost, loss, action)
            return _after(stored, retained_from(facts), hub)
        return await self._reset(loss, action, hub, facts)

    async def _reset(
        self, loss: Loss, action: OnDataLoss, hub: HubProperties, facts: PartitionProperties | None
    ) -> Beginning:
        """Replace a checkpoint that is not valid any more."""
        partition_id = self._partition_id
        if facts is None and partition_id in hub.partition_ids:
            facts = await self.facts()
        if action == "latest" and facts is not None:
            target = at_end(partition_id, facts)
            expected: int | None = target.sequence_number + 1
        else:
            target = at_beginning(partition_id)
            expected = None if facts is None else retained_from(facts)
        await self.store(target, is_reset=True)
        self._report(DataLost, loss, action)
        if loss.kind is LossKind.RECREATED:
            # Only now: if it were entered first, a crash in between would make the old checkpoint one of the new hub.
            await self._enter(hub)
        return _after(target, expected, hub)

    async def _enter(self, hub: HubProperties) -> None:
        await self.until_done(lambda: self._step(self._group.enter(self._partition_id, hub.created_at)))

    async def _facts(self) -> PartitionProperties:
        return await self._step(self._directory.get_partition_properties(self._settings.hub, self._partition_id))

    async def _store_once(self, checkpoint: Checkpoint, is_reset: bool) -> bool:
        return await self._store.write_checkpoint(self._ownership.lease, checkpoint, self.key, backwards=is_reset)


def _after(checkpoint: Checkpoint, expected: int | None, hub: HubProperties) -> Beginning:
    # Another library may have stored the number alone.
    position = (
        EventPosition.at_offset(checkpoint.offset)
        if checkpoint.offset
        else EventPosition.at_sequence_number(checkpoint.sequence_number)
    )
    return Beginning(position, checkpoint, expected, hub.created_at)
