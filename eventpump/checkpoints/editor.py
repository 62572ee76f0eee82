"""Reads, moves and restores the checkpoints of a consumer group."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import Unpack

from eventpump.aio.tasks import gather
from eventpump.checkpoints.export import CheckpointExport
from eventpump.checkpoints.plan import (
    ChangeAction,
    CheckpointChange,
    CheckpointOutcome,
    CheckpointPlan,
    Refused,
    Start,
    Wanted,
    at_time,
    before_event,
    completed,
    of_event,
    plan_changes,
    still,
)
from eventpump.clients.connection import split_options, takes_options
from eventpump.clients.group import AT_ONCE, EVENT_TIMEOUT, GroupClient
from eventpump.errors import ConfigurationError, EventPumpError
from eventpump.eventhubs.events import Checkpoint, ReceivedEvent
from eventpump.eventhubs.partitions import named_partitions, partition_order
from eventpump.interfaces import Clock, HubProperties
from eventpump.options.connection import ClientOptions
from eventpump.storage.checkpoints.stored import CheckpointReader, GroupCheckpoints
from eventpump.storage.checkpoints.writing import CheckpointTarget
from eventpump.texts import excerpt

_Found = Checkpoint | Wanted | Refused


@takes_options(ClientOptions)
class CheckpointEditor(GroupClient):
    """Reads the checkpoints of a consumer group, and moves, copies or restores them.

    ::

        checkpoints = BlobCheckpointWriter("checkpoints", connection_string=storage)
        editor = CheckpointEditor(connection_string, "telemetry", checkpoints=checkpoints)
        async with editor:
            plan = await editor.plan_reset("earliest")
            for change in plan.changes:
                print(change.partition_id, change.action, change.after, change.reason)
            outcome = await editor.apply(plan, export_to="before.json")

    A plan writes nothing. A partition that a consumer owns is refused, as its owner would write its own checkpoint over
    the new one. All times are in seconds.

    Args:
        connection_string: The namespace's or the hub's connection string, as the portal shows it; None to give
            `fully_qualified_namespace` and `credential`, or a transport object.
        hub: The event hub's name; None if the connection string has an `EntityPath`.
        checkpoints: Reads the group's checkpoints, and writes them if it is a `CheckpointTarget`. Closed with this.
        consumer_group: The consumer group. Default: "$Default".
        reader_group: The consumer group in which an event is read where its number or its offset is needed. None for
            `consumer_group`, where the owner of a partition keeps other readers out. Default: None.
        rate: The most requests per second to the hub. A namespace answers 50 in all. Default: 25.0.
        clock: None for the machine's time.
        options: See `ClientOptions`.

    Raises:
        ConfigurationError: There is no such option, or a value cannot work.
    """

    def __init__(
        self,
        connection_string: str | None = None,
        hub: str | None = None,
        *,
        checkpoints: CheckpointReader,
        consumer_group: str = "$Default",
        reader_group: str | None = None,
        rate: float = 25.0,
        clock: Clock | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        connection, _ = split_options(CheckpointEditor, ClientOptions, connection_string, hub, options)
        super().__init__(connection, consumer_group, checkpoints, rate, clock)
        self._reader_group = consumer_group if reader_group is None else reader_group

    # ---- reading

    async def read(self, partitions: Collection[str] | None = None) -> tuple[Sequence[str], GroupCheckpoints]:
        """Return the partitions of the hub, and what the store has of them.

        Args:
            partitions: Of which partitions; None for all. Default: None.

        Raises:
            StoreError: The checkpoints cannot be read.
            ServiceError: The hub cannot be read.
            ConfigurationError: There is no such store or partition.
        """
        hub = await self._hub()
        partition_ids = self._selected(hub, partitions)
        stored = await self._stored(self._checkpoints, hub)
        found = {each: stored.partitions[each] for each in partition_ids if each in stored.partitions}
        return partition_ids, GroupCheckpoints(found, stored.notes)

    async def export(self, partitions: Collection[str] | None = None) -> CheckpointExport:
        """Return the checkpoints as a document, from which `plan_import` restores them.

        Args:
            partitions: Of which partitions; None for all. Default: None.

        Raises:
            StoreError: The checkpoints cannot be read.
            ServiceError: The hub cannot be read.
            ConfigurationError: There is no such store or partition, the store has nothing of the group, or a checkpoint
                is none.
        """
        hub = await self._hub()
        partition_ids = self._selected(hub, partitions)
        stored = await self._stored(self._checkpoints, hub)
        self._check_any(stored)
        for each in stored.partitions.values():
            if each.problem is not None and each.partition_id in partition_ids:
                raise ConfigurationError("checkpoints", f"{each.place}: {each.problem}; export the other partitions")
        target = self._checkpoints
        # Functions may have two, of which the first one is that of an earlier version.
        formats = {each.format for each in stored.partitions.values()}
        form = target.format if isinstance(target, CheckpointTarget) else max(formats, default="")
        pairs = [(each, stored.partitions.get(each)) for each in partition_ids]
        return CheckpointExport.of(self._scope, hub.created_at, self._now(), form, pairs)

    # ---- plans

    async def plan_reset(
        self, to: Start, *, partitions: Collection[str] | None = None, force: bool = False, is_new: bool = False
    ) -> CheckpointPlan:
        """Plan that the group begins somewhere else.

        Args:
            to: "earliest", "latest", the sequence number of the event that is processed next, or a time with a time
                zone: then it is the first event that was enqueued at that time or later.
            partitions: Which partitions; None for all. Default: None.
            force: Whether partitions are written that consumers own. Default: False.
            is_new: Whether the store may have nothing of the group yet. Default: False.

        Raises:
            StoreError: The checkpoints cannot be read.
            ServiceError: The hub cannot be read.
            ConfigurationError: The store can only be read, or has nothing of the group, or `to` is no position.
        """
        self._check_start(to)
        hub = await self._hub()
        partition_ids = self._selected(hub, partitions)

        async def find(partition_id: str) -> Checkpoint | Refused:
            facts = await self._facts(partition_id)
            start = to
            if isinstance(start, datetime):
                wanted = at_time(start, facts)
                event = None if isinstance(wanted, str) else await self._event(partition_id, wanted)
                if isinstance(event, Refused):
                    return event
                start = "latest" if event is None else event.sequence_number
            return await self._resolved(partition_id, before_event(partition_id, start, facts))

        return await self._plan(hub, partition_ids, find, force=force, may_be_empty=is_new)

    async def plan_import(
        self, export: CheckpointExport, *, name: str = "the export", force: bool = False
    ) -> CheckpointPlan:
        """Plan to restore what was exported: also that there was no checkpoint. Other partitions stay as they are.

        Args:
            export: The document.
            name: Its name, for errors. Default: "the export".
            force: Whether partitions are written that consumers own. Default: False.

        Raises:
            StoreError: The checkpoints cannot be read.
            ServiceError: The hub cannot be read.
            ConfigurationError: The store can only be read; or the document is of another group, of an earlier hub, or
                of a store of another form.
        """
        writer, hub = self._writer(), await self._hub()
        export.check(self._scope, hub.created_at, writer.format, name)
        unknown = sorted(set(export.partitions) - set(hub.partition_ids), key=partition_order)
        if unknown:
            problem = (
                f"{name}: has {excerpt(named_partitions(unknown))}, which the hub does not have; nothing was written"
            )
            raise ConfigurationError("FILE", problem)
        partition_ids = sorted(export.partitions, key=partition_order)

        async def find(partition_id: str) -> Checkpoint | Refused | None:
            each = export.partitions[partition_id]
            return None if each is None else await self._completed(partition_id, each.sequence_number, each.offset)

        return await self._plan(hub, partition_ids, find, force=force)

    async def plan_copy(
        self,
        source: CheckpointReader,
        *,
        partitions: Collection[str] | None = None,
        force: bool = False,
        backwards: bool = False,
    ) -> CheckpointPlan:
        """Plan to store what another store has. Partitions of which it has no checkpoint stay as they are.

        Args:
            source: Reads the checkpoints of the same group in another store, which stays open.
            partitions: Which partitions; None for all. Default: None.
            force: Whether partitions are written that consumers own. Default: False.
            backwards: Whether a checkpoint that is further on is replaced. Default: False.

        Raises:
            StoreError: The checkpoints cannot be read.
            ServiceError: The hub cannot be read.
            ConfigurationError: The store can only be read, or the source has nothing of the group.
        """
        self._writer()
        hub = await self._hub()
        partition_ids = self._selected(hub, partitions)
        read = await self._stored(source, hub)
        self._check_any(read)
        found = {each: got for each, got in read.partitions.items() if got.is_usable or got.problem is not None}
        notes = list(read.notes)
        owned = [each for each in partition_ids if each in found and found[each].is_owned]
        if owned:
            which = named_partitions(owned)
            notes.append(f"consumers own {which} in the source: what they process from now on is processed again")
        missing = [each for each in partition_ids if each not in found]
        if missing:
            notes.append(f"the source has no checkpoint of {named_partitions(missing)}")

        async def find(partition_id: str) -> Checkpoint | Refused:
            each = found[partition_id]
            if each.problem is not None:
                return Refused(f"{each.place}: {each.problem}")
            return await self._completed(partition_id, each.sequence_number, each.offset)

        chosen = [each for each in partition_ids if each in found]
        return await self._plan(hub, chosen, find, force=force, forward_only=not backwards, notes=notes)

    async def _plan(
        self,
        hub: HubProperties,
        partition_ids: Sequence[str],
        find: Callable[[str], Awaitable[Checkpoint | Refused | None]],
        *,
        force: bool,
        forward_only: bool = False,
        may_be_empty: bool = True,
        notes: Sequence[str] = (),
    ) -> CheckpointPlan:
        writer = self._writer()
        unwritable = await self._calling(writer.check(self._scope, partition_ids, hub.created_at))
        stored = await self._stored(writer, hub)
        if not may_be_empty:
            self._check_any(stored)

        async def wanted(partition_id: str) -> tuple[str, Checkpoint | Refused | None]:
            return partition_id, await find(partition_id)

        found = dict(await gather((wanted(each) for each in partition_ids), at_once=AT_ONCE))
        changes = plan_changes(found, stored.partitions, unwritable, force=force, forward_only=forward_only)
        forced = [each.partition_id for each in changes if each.is_forced]
        if forced:
            then = "take their leases" if writer.format != "v5" else "not keep them from overwriting the new checkpoint"
            notes = (*notes, f"consumers own {named_partitions(forced)}: writing will {then}")
        all_notes = (*notes, *stored.notes)
        return CheckpointPlan(self._scope, hub.created_at, writer.format, changes, all_notes, force)

    # ---- writing

    async def apply(self, plan: CheckpointPlan, *, export_to: str | os.PathLike[str]) -> CheckpointOutcome:
        """Write what is planned, where it is still as the plan found it.

        Before, what the store has of the partitions that will be written is exported to a new file, from which
        `plan_import` undoes it. After a failure no other partition is begun: plan again and apply that, to go on.
        If it is cancelled, a checkpoint may be stored or not; the file is there.

        Args:
            plan: The plan, of this editor.
            export_to: The file, which must not exist. It is not created where there is nothing to write.

        Raises:
            StoreError: The store cannot be read, or be prepared; no checkpoint was written.
            ServiceError: The hub cannot be read; nothing was written.
            ConfigurationError: The file exists or cannot be created, the hub was recreated, or the plan is another
                editor's; no checkpoint was written.
        """
        writer = self._writer()
        if plan.scope != self._scope or plan.format != writer.format:
            raise ConfigurationError("plan", "is of another group or store than this editor's")
        refused = {each.partition_id: each.reason or "" for each in plan.having(ChangeAction.REFUSE)}
        if not plan.having(ChangeAction.WRITE):
            return CheckpointOutcome(None, (), refused)
        hub = await self._hub()
        if hub.created_at != plan.hub_created_at:
            raise ConfigurationError("hub", "was recreated since the plan was made: plan again")
        changes = still(plan, (await self._stored(writer, hub)).partitions)
        refused |= {each.partition_id: each.reason for each in changes if each.reason is not None}
        writes = [each for each in changes if each.action is ChangeAction.WRITE]
        if not writes:
            return CheckpointOutcome(None, (), refused)
        export = CheckpointExport.of(
            self._scope,
            plan.hub_created_at,
            self._now(),
            plan.format,
            [(each.partition_id, each.before) for each in writes],
        )
        path = os.fspath(export_to)
        await asyncio.to_thread(write_new_file, path, export.encode())
        await self._calling(writer.begin(self._scope, [each.partition_id for each in writes]))
        written, more_refused, failed = await self._write(writer, writes, from_owner=plan.force)
        refused |= more_refused
        tried = {*written, *more_refused, *failed}
        left = tuple(each.partition_id for each in writes if each.partition_id not in tried)
        return CheckpointOutcome(path, written, refused, failed, left)

    async def _write(
        self, writer: CheckpointTarget, writes: Sequence[CheckpointChange], *, from_owner: bool
    ) -> tuple[list[str], dict[str, str], dict[str, str]]:
        written: list[str] = []
        refused: dict[str, str] = {}
        failed: dict[str, str] = {}

        async def write(change: CheckpointChange) -> None:
            if failed:
                return
            partition_id = change.partition_id
            try:
                reason = await self._calling(
                    writer.write(partition_id, change.before, change.after, from_owner=from_owner)
                )
            except EventPumpError as error:
                failed[partition_id] = str(error)
                return
            if reason is None:
                written.append(partition_id)
            else:
                refused[partition_id] = reason

        await gather(map(write, writes), at_once=AT_ONCE)
        return sorted(written, key=partition_order), refused, failed

    # ---- the hub

    async def _completed(self, partition_id: str, number: int | None, offset: str | None) -> Checkpoint | Refused:
        return await self._resolved(
            partition_id, completed(partition_id, number, offset, await self._facts(partition_id))
        )

    async def _resolved(self, partition_id: str, found: _Found) -> Checkpoint | Refused:
        if not isinstance(found, Wanted):
            return found
        event = await self._event(partition_id, found)
        if isinstance(event, Refused):
            return event
        return of_event(partition_id, found, event.sequence_number, event.offset)

    async def _event(self, partition_id: str, wanted: Wanted) -> ReceivedEvent | Refused:
        group = self._reader_group
        try:
            event = await self._first_event(partition_id, wanted.position, group)
        except EventPumpError as error:
            return Refused(f"the event at {wanted.position} could not be read in consumer group {group}: {error}")
        if event is None:
            return Refused(f"the event at {wanted.position} did not arrive within {EVENT_TIMEOUT:g} s")
        return event

    # ---- what was given

    def _writer(self) -> CheckpointTarget:
        writer = self._checkpoints
        if not isinstance(writer, CheckpointTarget):
            raise ConfigurationError("checkpoints", f"{writer!r} can only read: give a CheckpointTarget")
        return writer

    def _check_start(self, to: Start) -> None:
        self._writer()
        if isinstance(to, datetime):
            if to.tzinfo is None:
                raise ConfigurationError("to", f"{to.isoformat()} has no time zone: add one, such as Z or +01:00")
            if to > self._now():
                raise ConfigurationError("to", f"{to.isoformat()} is in the future: use latest")
        elif isinstance(to, bool) or not (to in ("earliest", "latest") or (isinstance(to, int) and to >= 0)):
            raise ConfigurationError("to", f"must be earliest, latest, a sequence number or a time, not {to!r}")

    def _check_any(self, stored: GroupCheckpoints) -> None:
        if stored.partitions:
            return
        found = "; ".join(stored.notes) or f"the store has nothing of consumer group {self._scope.consumer_group}"
        raise ConfigurationError("checkpoints", f"{found}: check store, namespace, hub and group")

    def _selected(self, hub: HubProperties, partitions: Collection[str] | None) -> list[str]:
        known = sorted(hub.partition_ids, key=partition_order)
        if partitions is None:
            return known
        unknown = sorted(set(partitions) - set(known))
        if unknown:
            problem = f"hub {self._scope.hub} has no partition {unknown[0]}: it has {known[0]} to {known[-1]}"
            raise ConfigurationError("partitions", problem)
        return [each for each in known if each in partitions]


def write_new_file(path: str, text: str) -> None:
    """Write a file that does not exist yet, durably. Raises `ConfigurationError` if it exists, or cannot be written."""
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise ConfigurationError("export_to", f"{path}: exists already; give the name of a new file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigurationError("export_to", f"{path}: {reason}") from None
