"""Writers of checkpoints in each form, on Azurite and in files, over a hub whose truth is known."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from azure.storage.blob.aio import ContainerClient

from eventpump import Emulator, EventData, EventProcessorHost, EventProducer, PartitionContext, ReceivedEvent
from eventpump.checkpoints import (
    BlobCheckpointWriter,
    ChangeAction,
    CheckpointEditor,
    CheckpointExport,
    CheckpointOutcome,
    CheckpointPlan,
    CheckpointTarget,
    SqliteCheckpointWriter,
)
from eventpump.checkpoints.plan import Start
from eventpump.core.lease import PartitionLease
from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope, HubProperties, LeaseStore
from eventpump.lag import BlobCheckpointReader, CheckpointReader, SparkCheckpointReader, StoredCheckpoint
from eventpump.reports import DataLost, HostReport
from eventpump.storage.groups import GroupRecords
from eventpump.storage.leases.blob import BlobLeaseStore
from eventpump.storage.leases.ownership import BlobOwnershipStore
from eventpump.storage.leases.sqlite import SqliteLeaseStore
from eventpump.storage.scope_form import ScopeRecord, SubscriptionRecord
from eventpump.testing.fixtures import eventpump_emulator, eventpump_emulators
from tests.support.azurite import Azurite
from tests.support.leases import unheld
from tests.support.reading import read_partition

__all__ = ["eventpump_emulator", "eventpump_emulators"]

SENT = {"0": 9, "1": 0, "2": 6, "3": 4}
FORMS = ("v5", "event-processor-host", "sqlite")
LOWER = "127.0.0.1/telemetry/$default"
PRESERVED = "127.0.0.1/telemetry/$Default"

Position = tuple[int | None, str | None]


@dataclass
class Stage:
    """A hub with events, and stores that do not exist yet or are empty.

    Attributes:
        offsets: By partition, the offset of each event.
    """

    emulator: Emulator
    azurite: Azurite
    directory: Path
    offsets: Mapping[str, list[str]]
    stack: AsyncExitStack
    numbers: Callable[[], int] = field(default_factory=lambda: itertools.count().__next__)

    @property
    def scope(self) -> ConsumerScope:
        return ConsumerScope("127.0.0.1", "telemetry", "$Default")

    async def hub(self) -> HubProperties:
        """Return what the service says of the hub."""
        async with EventProducer(self.emulator.connection_string, "telemetry") as producer:
            return await producer.get_properties()

    def container(self, name: str) -> ContainerClient:
        return ContainerClient.from_connection_string(self.azurite.connection_string, name)

    async def new_place(self, form: str) -> str:
        """Create a place for a store: an empty container, or a path without a file."""
        if form == "sqlite":
            return str(self.directory / f"leases-{self.numbers()}.db")
        name = f"checkpoints-{uuid.uuid4().hex}"
        async with self.container(name) as client:
            await client.create_container()
        return name

    def target(self, form: str, place: str, *, preserve_case: bool | None = None) -> CheckpointTarget:
        """Return a writer of a place."""
        match form:
            case "sqlite":
                return SqliteCheckpointWriter(place)
            case "v5":
                storage = self.azurite.connection_string
                return BlobCheckpointWriter(place, connection_string=storage, preserve_case=preserve_case)
            case _:
                return BlobCheckpointWriter(
                    place, connection_string=self.azurite.connection_string, format="event-processor-host"
                )

    def store(self, form: str, place: str) -> SqliteLeaseStore | BlobLeaseStore | BlobOwnershipStore:
        """Return the store of a host in a place."""
        match form:
            case "sqlite":
                return SqliteLeaseStore(place)
            case "v5":
                return BlobOwnershipStore(place, connection_string=self.azurite.connection_string)
            case _:
                return BlobLeaseStore(place, connection_string=self.azurite.connection_string)

    async def editor(self, target: CheckpointTarget) -> CheckpointEditor:
        """Return an editor, which is closed at the end."""
        editor = CheckpointEditor(self.emulator.connection_string, "telemetry", checkpoints=target)
        return await self.stack.enter_async_context(editor)

    async def owner(self, form: str, place: str, partition_id: str) -> tuple[LeaseStore, PartitionLease]:
        """Have a host own a partition under its lease, until the end."""
        made = self.store(form, place)
        self.stack.push_async_callback(made.aclose)
        await made.open(self.scope)
        await made.ensure(list(SENT))
        lease = await made.acquire(unheld(partition_id), "host-a")
        assert lease is not None
        return made, lease

    async def own_v5(self, place: str, partition_id: str) -> None:
        """Have a processor of another SDK own a partition."""
        async with self.container(place) as client:
            await client.upload_blob(f"{LOWER}/ownership/{partition_id}", b"", metadata={"ownerid": "host-a"})

    def file(self) -> Path:
        """Return the name of a new file."""
        return self.directory / f"before-{self.numbers()}.json"

    def at(self, partition_id: str, number: int) -> Position:
        """Return the position of an event."""
        return number, self.offsets[partition_id][number]


@pytest_asyncio.fixture
async def stage(eventpump_emulator: Emulator, azurite: Azurite, tmp_path: Path) -> AsyncIterator[Stage]:
    """A hub of four partitions, one of them empty."""
    emulator = eventpump_emulator
    async with EventProducer(emulator.connection_string, "telemetry") as producer:
        for partition_id, count in SENT.items():
            for number in range(count):
                await producer.send(EventData(b"x" * (number + 1)), partition_id=partition_id)
    offsets = {
        each: [event.offset for event in await read_partition(emulator.connection_string, "telemetry", each)]
        for each in SENT
    }
    async with AsyncExitStack() as stack:
        yield Stage(emulator, azurite, tmp_path, offsets, stack)


async def found(editor: CheckpointEditor) -> dict[str, Position]:
    """Return what a store has."""
    _, stored = await editor.read()
    return {each: (got.sequence_number, got.offset) for each, got in stored.partitions.items() if got.is_usable}


async def reset(stage: Stage, editor: CheckpointEditor, numbers: Mapping[str, int]) -> None:
    """Have events be the last ones that are processed, by partition."""
    for partition_id, number in numbers.items():
        plan = await editor.plan_reset(number + 1, partitions=[partition_id], is_new=True)
        outcome = await editor.apply(plan, export_to=stage.file())
        assert outcome.written == [partition_id]


def refused(plan: CheckpointPlan) -> dict[str, str | None]:
    """Return why partitions are refused."""
    return {each.partition_id: each.reason for each in plan.having(ChangeAction.REFUSE)}


# ----------------------------------------------------------------------------------------------- from form to form


async def test_copy_through_all_forms_keeps_number_and_offset(stage: Stage) -> None:
    """From azure-eventhub's form to SQLite, to an EventProcessorHost's leases, and back: each position is the same."""
    order = ("v5", "sqlite", "event-processor-host", "v5")
    targets = [stage.target(form, await stage.new_place(form)) for form in order]
    editors = [await stage.editor(target) for target in targets]
    await reset(stage, editors[0], {"0": 4, "2": 5, "3": 0})
    for source, editor in zip(targets, editors[1:], strict=False):
        plan = await editor.plan_copy(source)
        outcome = await editor.apply(plan, export_to=stage.file())
        assert (outcome.is_complete, outcome.written) == (True, ["0", "2", "3"])
        assert plan.notes[0] == "the source has no checkpoint of partition 1"
    assert await found(editors[-1]) == {"0": stage.at("0", 4), "2": stage.at("2", 5), "3": stage.at("3", 0)}
    again = await editors[-1].plan_copy(targets[0])
    assert {each.action for each in again.changes} == {ChangeAction.KEEP}
    assert await editors[-1].apply(again, export_to="/no/such/file") == CheckpointOutcome(None, ())


@pytest.mark.parametrize("form", FORMS)
async def test_copy_keeps_what_is_further_on(stage: Stage, form: str) -> None:
    """Unless it is asked to go back."""
    source = stage.target("sqlite", await stage.new_place("sqlite"))
    await reset(stage, await stage.editor(source), {"0": 3, "2": 3})
    target = await stage.editor(stage.target(form, await stage.new_place(form)))
    await reset(stage, target, {"0": 7, "2": 1})
    plan = await target.plan_copy(source)
    assert refused(plan) == {"0": "it is further on already, at 7"}
    outcome = await target.apply(plan, export_to=stage.file())
    assert (outcome.is_complete, outcome.written) == (False, ["2"])
    assert await found(target) == {"0": stage.at("0", 7), "2": stage.at("2", 3)}
    plan = await target.plan_copy(source, backwards=True)
    assert (await target.apply(plan, export_to=stage.file())).written == ["0"]
    assert await found(target) == {"0": stage.at("0", 3), "2": stage.at("2", 3)}


async def test_copy_completes_positions_of_other_writers(stage: Stage) -> None:
    """A number without an offset, and an offset without a number, become both; what is no position is refused."""
    place = await stage.new_place("v5")
    async with stage.container(place) as client:
        for partition_id, metadata in {
            "0": {"offset": "no offset", "sequencenumber": "4"},
            "1": {"sequencenumber": "9"},
            "2": {"Offset": stage.offsets["2"][3], "SequenceNumber": ""},
            "3": {"offset": "", "sequencenumber": "four"},
        }.items():
            await client.upload_blob(f"{LOWER}/checkpoint/{partition_id}", b"", metadata=metadata)
    source = stage.target("v5", place)
    stage.stack.push_async_callback(source.aclose)
    target = await stage.editor(stage.target("sqlite", await stage.new_place("sqlite")))
    plan = await target.plan_copy(source)
    assert refused(plan) == {
        "1": "9 is beyond its end, -1: the hub was recreated, or it is another hub's",
        "3": f"{LOWER}/checkpoint/3: its sequence number is 'four'",
    }
    assert (await target.apply(plan, export_to=stage.file())).written == ["0", "2"]
    assert await found(target) == {"0": stage.at("0", 4), "2": stage.at("2", 3)}


@pytest.mark.parametrize("form", ["event-processor-host-python", "functions", "Spark"])
async def test_copy_reads_the_forms_that_cannot_be_written(stage: Stage, form: str) -> None:
    """Leases of azure-eventhub 1, both forms of Azure Functions, and a query of Spark, which has no offsets."""
    offsets = stage.offsets
    source: CheckpointReader
    if form == "Spark":
        source = SparkCheckpointReader(spark_log(stage.directory / "query", {"0": 5, "2": 2}))
    else:
        place = await stage.new_place("v5")
        async with stage.container(place) as client:
            if form == "functions":
                metadata = {"offset": offsets["0"][4], "sequencenumber": "4"}
                await client.upload_blob(f"{LOWER}/checkpoint/0", b"", metadata=metadata)
                body = {"Offset": offsets["2"][1], "SequenceNumber": 1, "PartitionId": "2", "Owner": "", "Token": ""}
                await client.upload_blob(f"{PRESERVED}/2", json.dumps(body).encode())
            else:
                for partition_id, number in (("0", 4), ("2", 1)):
                    body = {"partition_id": partition_id, "owner": None, "token": None, "epoch": 3}
                    body |= {"offset": offsets[partition_id][number], "sequence_number": number}
                    await client.upload_blob(partition_id, json.dumps(body).encode())
        storage = stage.azurite.connection_string
        source = BlobCheckpointReader(
            place,
            connection_string=storage,
            format="functions" if form == "functions" else "event-processor-host-python",
        )
    stage.stack.push_async_callback(source.aclose)
    target = await stage.editor(stage.target("sqlite", await stage.new_place("sqlite")))
    assert (await target.apply(await target.plan_copy(source), export_to=stage.file())).is_complete
    assert await found(target) == {"0": stage.at("0", 4), "2": stage.at("2", 1)}


def spark_log(directory: Path, following: Mapping[str, int]) -> Path:
    """Write the log of a query that has committed one batch, as Spark does."""
    for name in ("offsets", "commits"):
        (directory / name).mkdir(parents=True)
    offset = {"telemetry": following, "(created)": {"telemetry": "2030-01-01T00:00:00+00:00"}}
    lines = ["v1", json.dumps({"batchWatermarkMs": 0}), json.dumps(offset)]
    (directory / "offsets" / "0").write_text("\n".join(lines), encoding="utf-8")
    (directory / "commits" / "0").write_text('v1\n{"nextBatchWatermarkMs":0}', encoding="utf-8")
    return directory


# ------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("form", FORMS)
async def test_import_undoes_what_was_written(stage: Stage, form: str) -> None:
    """Also that a partition had no checkpoint; a second import writes nothing, and makes no file."""
    editor = await stage.editor(stage.target(form, await stage.new_place(form)))
    await reset(stage, editor, {"0": 4, "2": 5})
    before, file = await found(editor), stage.file()
    outcome = await editor.apply(await editor.plan_reset("earliest"), export_to=file)
    assert (outcome.export, outcome.written) == (str(file), list(SENT))
    assert await found(editor) == dict.fromkeys(SENT, (-1, "-1"))
    export = CheckpointExport.decode(file.read_bytes(), "file")
    undone = await editor.apply(await editor.plan_import(export), export_to=stage.file())
    assert undone.is_complete
    assert await found(editor) == before
    again, unused = await editor.plan_import(export), stage.file()
    assert (await editor.apply(again, export_to=unused)).written == ()
    assert not unused.exists()


@pytest.mark.parametrize("form", FORMS)
async def test_plan_writes_nothing(stage: Stage, form: str) -> None:
    """Neither checkpoints, nor leases, nor a file."""
    place = await stage.new_place(form)
    editor = await stage.editor(stage.target(form, place))
    plan = await editor.plan_reset("latest", is_new=True)
    assert len(plan.having(ChangeAction.WRITE)) == len(SENT)
    if form == "sqlite":
        assert list(stage.directory.iterdir()) == []
        return
    async with stage.container(place) as client:
        assert [name async for name in client.list_blob_names()] == []


async def test_export_is_of_all_partitions_or_of_some(stage: Stage) -> None:
    """An import changes the partitions in the file alone."""
    editor = await stage.editor(stage.target("v5", await stage.new_place("v5")))
    await reset(stage, editor, {"0": 4, "2": 5})
    assert list((await editor.export()).partitions) == list(SENT)
    one = await editor.export(["2"])
    await reset(stage, editor, {"0": 1, "2": 1})
    await editor.apply(await editor.plan_import(one), export_to=stage.file())
    assert await found(editor) == {"0": stage.at("0", 1), "2": stage.at("2", 5)}


async def test_reset_stores_the_event_before_with_its_offset(stage: Stage) -> None:
    """By a number and by a time; the SDKs of Azure go by the offset alone."""
    editor = await stage.editor(stage.target("v5", await stage.new_place("v5")))
    events = await read_partition(stage.emulator.connection_string, "telemetry", "0")
    await editor.apply(
        await editor.plan_reset(events[6].enqueued_time, partitions=["0"], is_new=True), export_to=stage.file()
    )
    # Several events may have one time.
    first = next(number for number, event in enumerate(events) if event.enqueued_time >= events[6].enqueued_time)
    expected = {"0": stage.at("0", first - 1) if first else (-1, "-1")}
    assert await found(editor) == expected
    await editor.apply(await editor.plan_reset("latest", partitions=["1", "2"]), export_to=stage.file())
    assert await found(editor) == {**expected, "1": (-1, "-1"), "2": stage.at("2", 5)}
    plan = await editor.plan_reset(7)
    assert refused(plan) == {
        "1": "7 is beyond its end: the next event will be 0",
        "2": "7 is beyond its end: the next event will be 6",
        "3": "7 is beyond its end: the next event will be 4",
    }


@pytest.mark.parametrize("form", FORMS)
async def test_host_begins_where_it_was_reset_to(stage: Stage, form: str) -> None:
    """At the start, and at a number; a partition without a checkpoint where the group begins. No loss is reported.

    No host has had the store before: its records are made by this one.
    """
    place = await stage.new_place(form)
    editor = await stage.editor(stage.target(form, place))
    starts: list[tuple[Start, str]] = [("earliest", "0"), (4, "2")]
    for to, partition_id in starts:
        plan = await editor.plan_reset(to, partitions=[partition_id], is_new=True)
        assert (await editor.apply(plan, export_to=stage.file())).is_complete
    received: dict[str, list[int]] = {}
    done = asyncio.Event()
    reports: list[HostReport] = []

    async def process(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        received.setdefault(context.partition_id, []).extend(event.sequence_number for event in events)
        if sum(map(len, received.values())) == SENT["0"] + 2:
            done.set()

    host = EventProcessorHost(
        stage.emulator.connection_string,
        "telemetry",
        processor=process,
        lease_store=stage.store(form, place),
        initial_position="@latest",
        hooks=[reports.append],
    )
    async with asyncio.timeout(30), host:
        running = asyncio.create_task(host.run())
        await done.wait()
        host.stop()
        await running
    assert received == {"0": list(range(SENT["0"])), "2": [4, 5]}
    assert [report for report in reports if isinstance(report, DataLost)] == []


async def test_checkpoints_of_a_subscription_are_its_own(stage: Stage) -> None:
    """Those of the default one stay; a file takes back that there was none; a name that there is not is refused."""
    place = await stage.new_place("sqlite")
    await reset(stage, await stage.editor(stage.target("sqlite", place)), {"0": 4})
    host = stage.store("sqlite", place)
    stage.stack.push_async_callback(host.aclose)
    await host.open(stage.scope)
    records = GroupRecords(host, stage.scope)
    created = (await stage.hub()).created_at
    for name, hub_created_at in (("audit", created), ("earlier", created - timedelta(days=1))):
        assert await records.write_subscription(SubscriptionRecord(name, "1", hub_created_at, len(SENT)), None)
    editor = await stage.editor(SqliteCheckpointWriter(place, "audit"))
    file = stage.file()
    outcome = await editor.apply(await editor.plan_reset(3, partitions=["0", "2"]), export_to=file)
    assert (outcome.is_complete, outcome.written) == (True, ["0", "2"])
    assert await found(editor) == {"0": stage.at("0", 2), "2": stage.at("2", 2)}
    assert await host.read_checkpoint("0") == Checkpoint("0", stage.offsets["0"][4], 4)
    export = CheckpointExport.decode(file.read_bytes(), "file")
    with pytest.raises(ConfigurationError, match="in the form eventpump, subscription audit, and the store has"):
        await (await stage.editor(stage.target("sqlite", place))).plan_import(export)
    assert (await editor.apply(await editor.plan_import(export), export_to=stage.file())).is_complete
    assert await found(editor) == {}
    earlier = await stage.editor(SqliteCheckpointWriter(place, "earlier"))
    assert set(refused(await earlier.plan_reset("latest"))) == set(SENT)
    missing = await stage.editor(SqliteCheckpointWriter(place, "missing"))
    with pytest.raises(ConfigurationError, match="has no subscription 'missing'"):
        await missing.plan_reset("latest")


# ------------------------------------------------------------------------------------------------------- the owner


@pytest.mark.parametrize("form", FORMS)
async def test_partition_that_a_consumer_owns_is_refused(stage: Stage, form: str) -> None:
    """The others are written; what the owner has stays."""
    place = await stage.new_place(form)
    editor = await stage.editor(stage.target(form, place))
    await reset(stage, editor, {"0": 4, "2": 5})
    await (stage.own_v5(place, "0") if form == "v5" else stage.owner(form, place, "0"))
    plan = await editor.plan_reset("earliest", partitions=["0", "2"])
    assert refused(plan) == {"0": "host-a owns it"}
    outcome = await editor.apply(plan, export_to=stage.file())
    assert (outcome.written, outcome.refused) == (["2"], {"0": "host-a owns it"})
    assert await found(editor) == {"0": stage.at("0", 4), "2": (-1, "-1")}


@pytest.mark.parametrize("form", FORMS)
async def test_owner_that_comes_after_the_plan_is_noticed(stage: Stage, form: str) -> None:
    """Nothing is written then, and no file is made."""
    place = await stage.new_place(form)
    editor = await stage.editor(stage.target(form, place))
    await reset(stage, editor, {"0": 4})
    plan = await editor.plan_reset("earliest", partitions=["0"])
    await (stage.own_v5(place, "0") if form == "v5" else stage.owner(form, place, "0"))
    unused = stage.file()
    outcome = await editor.apply(plan, export_to=unused)
    assert (outcome.written, outcome.refused) == ((), {"0": "host-a owns it"})
    assert not unused.exists()
    assert await found(editor) == {"0": stage.at("0", 4)}


@pytest.mark.parametrize("form", ["event-processor-host", "sqlite"])
async def test_lease_that_is_held_at_the_write_is_not_taken(stage: Stage, form: str) -> None:
    """Also of an owner that came after the last look; it goes on storing checkpoints."""
    place = await stage.new_place(form)
    await reset(stage, await stage.editor(stage.target(form, place)), {"0": 4})
    target = stage.target(form, place)
    stage.stack.push_async_callback(target.aclose)
    seen = (await target.read(stage.scope, ["0"])).partitions["0"]
    host, lease = await stage.owner(form, place, "0")
    await target.begin(stage.scope, ["0"])
    assert await target.write("0", seen, Checkpoint("0", "-1", -1), from_owner=False) == "host-a owns it"
    assert await host.write_checkpoint(lease, Checkpoint("0", stage.offsets["0"][5], 5))


@pytest.mark.parametrize("form", ["event-processor-host", "sqlite"])
async def test_force_takes_the_lease_from_its_owner(stage: Stage, form: str) -> None:
    """What the owner stores from then on is refused, so that the new checkpoint stays."""
    place = await stage.new_place(form)
    editor = await stage.editor(stage.target(form, place))
    await reset(stage, editor, {"0": 4})
    host, lease = await stage.owner(form, place, "0")
    plan = await editor.plan_reset("earliest", partitions=["0"], force=True)
    assert plan.notes == ("consumers own partition 0: writing will take their leases",)
    assert (await editor.apply(plan, export_to=stage.file())).written == ["0"]
    assert not await host.write_checkpoint(lease, Checkpoint("0", stage.offsets["0"][8], 8))
    assert await found(editor) == {"0": (-1, "-1")}
    (snapshot,) = [each for each in await host.list() if each.partition_id == "0"]
    assert not snapshot.is_held


async def test_owner_of_another_sdk_that_came_since_the_listing_is_noticed(stage: Stage) -> None:
    """Directly before the write; there is no lease that would keep it out."""
    place = await stage.new_place("v5")
    await reset(stage, await stage.editor(stage.target("v5", place)), {"0": 4})
    target = stage.target("v5", place)
    stage.stack.push_async_callback(target.aclose)
    seen = (await target.read(stage.scope, ["0"])).partitions["0"]
    await target.begin(stage.scope, ["0"])
    await stage.own_v5(place, "0")
    assert await target.write("0", seen, Checkpoint("0", "-1", -1), from_owner=False) == "host-a owns it"
    assert await target.write("0", seen, Checkpoint("0", "-1", -1), from_owner=True) is None


async def test_force_writes_beside_an_owner_of_another_sdk(stage: Stage) -> None:
    """It has no fence."""
    place = await stage.new_place("v5")
    await stage.own_v5(place, "0")
    editor = await stage.editor(stage.target("v5", place))
    plan = await editor.plan_reset("latest", partitions=["0"], force=True)
    assert plan.notes == ("consumers own partition 0: writing will not keep them from overwriting the new checkpoint",)
    assert (await editor.apply(plan, export_to=stage.file())).written == ["0"]
    assert await found(editor) == {"0": stage.at("0", 8)}


# --------------------------------------------------------------------------------------------------- the condition


@pytest.mark.parametrize("form", FORMS)
async def test_checkpoint_that_has_changed_is_not_replaced(stage: Stage, form: str) -> None:
    """Not since the plan, nor between the last look and the write: a consumer may have stored it."""
    place = await stage.new_place(form)
    editor = await stage.editor(stage.target(form, place))
    await reset(stage, editor, {"0": 4})
    plan = await editor.plan_reset("latest", partitions=["0"])
    other = stage.target(form, place)
    stage.stack.push_async_callback(other.aclose)
    seen = (await other.read(stage.scope, ["0"])).partitions.get("0")
    await reset(stage, editor, {"0": 6})
    outcome = await editor.apply(plan, export_to=stage.file())
    assert outcome.refused == {"0": "its checkpoint has changed since the plan was made"}
    await other.begin(stage.scope, ["0"])
    for after in (Checkpoint("0", stage.offsets["0"][1], 1), None):
        assert await other.write("0", seen, after, from_owner=True) == "its checkpoint has changed since it was read"
    assert await other.write("0", None, Checkpoint("0", "0", 0), from_owner=True) is not None
    assert await found(editor) == {"0": stage.at("0", 6)}


class Failing(SqliteCheckpointWriter):
    """A file system that goes away before the second write."""

    writes = 0
    file: Path | None = None
    existed: bool | None = None

    async def begin(self, scope: ConsumerScope, partition_ids: object) -> None:
        assert self.file is not None
        self.existed = self.file.exists()
        await super().begin(scope, list(SENT))

    async def write(
        self, partition_id: str, before: StoredCheckpoint | None, after: Checkpoint | None, *, from_owner: bool
    ) -> str | None:
        self.writes += 1
        if self.writes == 2:
            raise StoreError("write checkpoint", "it is away", partition_id=partition_id)
        return await super().write(partition_id, before, after, from_owner=from_owner)


async def test_write_that_fails_leaves_the_file_from_which_it_is_undone(stage: Stage) -> None:
    """The export is there before anything is written; the same plan made again goes on."""
    place = await stage.new_place("sqlite")
    target = Failing(place)
    target.file = stage.file()
    editor = await stage.editor(target)
    await reset(stage, await stage.editor(stage.target("sqlite", place)), {"0": 4, "2": 5})
    before = await found(editor)
    outcome = await editor.apply(await editor.plan_reset("earliest"), export_to=target.file)
    assert target.existed
    assert not outcome.is_complete
    assert len(outcome.failed) == 1
    assert "it is away" in next(iter(outcome.failed.values()))
    assert {*outcome.written, *outcome.failed, *outcome.left} == set(SENT)
    rest = await editor.apply(await editor.plan_reset("earliest"), export_to=stage.file())
    assert rest.is_complete
    assert {*rest.written, *outcome.written} == set(SENT)
    export = CheckpointExport.decode(target.file.read_bytes(), "file")
    assert (await editor.apply(await editor.plan_import(export), export_to=stage.file())).is_complete
    assert await found(editor) == before


async def test_file_that_exists_is_not_replaced(stage: Stage) -> None:
    """And nothing is written: it may be the only copy of earlier checkpoints."""
    editor = await stage.editor(stage.target("v5", await stage.new_place("v5")))
    file = stage.file()
    file.write_text("earlier")
    with pytest.raises(ConfigurationError, match="exists already; give the name of a new file"):
        await editor.apply(await editor.plan_reset("latest", is_new=True), export_to=file)
    assert (await found(editor), file.read_text()) == ({}, "earlier")


# ------------------------------------------------------------------------------------------------------- bad input


async def test_two_spellings_at_once_are_refused_until_one_is_chosen(stage: Stage) -> None:
    """And so is the other one alone: no consumer would find the new checkpoints."""
    place = await stage.new_place("v5")
    async with stage.container(place) as client:
        metadata = {"offset": stage.offsets["0"][4], "sequencenumber": "4"}
        await client.upload_blob(f"{PRESERVED}/checkpoint/0", b"", metadata=metadata)
        editor = await stage.editor(stage.target("v5", place))
        with pytest.raises(ConfigurationError, match=f"nothing lies under {LOWER}/.*True".replace("$", "[$]")):
            await editor.plan_reset("latest")
        await client.upload_blob(f"{LOWER}/ownership/3", b"", metadata={"ownerid": "a"})
        for refusing in (editor.plan_reset("latest"), editor.export()):
            with pytest.raises(ConfigurationError, match="in two spellings"):
                await refusing
        chosen = await stage.editor(stage.target("v5", place, preserve_case=True))
        outcome = await chosen.apply(await chosen.plan_reset("latest", partitions=["0"]), export_to=stage.file())
        assert outcome.written == ["0"]
        written = await client.get_blob_client(f"{PRESERVED}/checkpoint/0").get_blob_properties()
        assert written.metadata == {
            "offset": stage.offsets["0"][8],
            "sequencenumber": "8",
            "clientidentifier": "eventpump-checkpoints",
        }


@pytest.mark.parametrize("form", FORMS)
async def test_store_without_the_group_is_reset_only_if_it_is_meant(stage: Stage, form: str) -> None:
    """It is more often the wrong one."""
    editor = await stage.editor(stage.target(form, await stage.new_place(form)))
    with pytest.raises(ConfigurationError, match="check store, namespace, hub and group"):
        await editor.plan_reset("latest")


async def test_container_that_does_not_exist_is_not_created(stage: Stage) -> None:
    """For either form."""
    for form in ("v5", "event-processor-host"):
        editor = await stage.editor(stage.target(form, "checkpoints-that-are-not-there"))
        with pytest.raises(ConfigurationError, match="there is no container checkpoints-that-are-not-there"):
            await editor.plan_reset("latest", is_new=True)


async def test_leases_of_another_hub_are_not_written(stage: Stage) -> None:
    """Two hubs in one container would overwrite each other: the names of leases do not have the hub."""
    place = await stage.new_place("event-processor-host")
    other = BlobLeaseStore(place, connection_string=stage.azurite.connection_string)
    stage.stack.push_async_callback(other.aclose)
    await other.open(ConsumerScope("127.0.0.1", "other", "$Default"))
    await other.ensure(list(SENT))
    editor = await stage.editor(stage.target("event-processor-host", place))
    with pytest.raises(ConfigurationError, match="are those of hub other"):
        await editor.plan_reset("latest")


@pytest.mark.parametrize("form", FORMS)
async def test_checkpoints_that_hosts_would_reset_are_not_written(stage: Stage, form: str) -> None:
    """A host that starts after its hub was recreated resets what it finds: also what was just written."""
    place = await stage.new_place(form)
    editor = await stage.editor(stage.target(form, place))
    await reset(stage, editor, {"0": 4})
    store = stage.store(form, place)
    stage.stack.push_async_callback(store.aclose)
    await store.open(stage.scope)
    earlier = ScopeRecord(datetime(2020, 1, 1, tzinfo=UTC), 4)
    assert await GroupRecords(store, stage.scope).write_scope_record(earlier, None) is not None
    plan = await editor.plan_reset("latest", partitions=["0", "3"])
    reason = "the store's record is of an earlier hub of this name, for which hosts reset it: start them once"
    assert refused(plan) == {"0": reason, "3": reason}


async def test_lease_that_is_none_is_refused_by_its_name(stage: Stage) -> None:
    """And the other partitions are written."""
    place = await stage.new_place("event-processor-host")
    good = json.dumps({"Offset": stage.offsets["2"][1], "SequenceNumber": 1, "PartitionId": "2"}).encode()
    async with stage.container(place) as client:
        await client.upload_blob("$Default/0", b"{")
        await client.upload_blob("$Default/2", good)
    editor = await stage.editor(stage.target("event-processor-host", place))
    plan = await editor.plan_reset("latest", partitions=["0", "2"])
    assert refused(plan) == {"0": "$Default/0: the lease is not JSON; delete it if no consumer needs it"}
    assert (await editor.apply(plan, export_to=stage.file())).written == ["2"]
    assert await found(editor) == {"2": stage.at("2", 5)}
    with pytest.raises(ConfigurationError, match=r"[$]Default/0: the lease is not JSON; export the other partitions"):
        await editor.export()


@pytest.mark.parametrize("form", ["v5", "event-processor-host"])
async def test_signature_that_may_only_read_says_which_rights_are_missing(stage: Stage, form: str) -> None:
    """Without itself being shown; nothing is written."""
    place = await stage.new_place(form)
    await reset(stage, await stage.editor(stage.target(form, place)), {"0": 4})
    signature = generate_container_sas(
        "devstoreaccount1",
        place,
        account_key=stage.azurite.account_key,
        permission=ContainerSasPermissions(read=True, list=True),
        expiry=datetime.now(UTC) + timedelta(hours=1),
    )
    target = BlobCheckpointWriter(
        place,
        account_url=stage.azurite.blob_endpoint,
        credential=signature,
        format="v5" if form == "v5" else "event-processor-host",
    )
    editor = await stage.editor(target)
    plan = await editor.plan_reset("latest", partitions=["0"])
    try:
        said = "".join((await editor.apply(plan, export_to=stage.file())).failed.values())
    except StoreError as error:
        said = str(error)
    assert f"in container {place} (HTTP status 403" in said
    assert "(r, l, c, w and d of a signature; the role Storage Blob Data Contributor)" in said
    assert signature not in said
    assert await found(editor) == {"0": stage.at("0", 4)}
