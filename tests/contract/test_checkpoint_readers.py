"""Readers of checkpoints, over what each program writes, on Azurite and in files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from azure.storage.blob.aio import ContainerClient

from eventpump.errors import ConfigurationError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope, LeaseStore
from eventpump.lag import BlobCheckpointReader, SparkCheckpointReader, SqliteCheckpointReader, StoredCheckpoint
from eventpump.storage.checkpoints.blobs import CheckpointFormat
from eventpump.storage.leases.blob import BlobLeaseStore
from eventpump.storage.leases.sqlite import SqliteLeaseStore
from tests.support import golden
from tests.support.azurite import Azurite
from tests.support.leases import unheld

SCOPE = ConsumerScope("Fleet.servicebus.windows.net", "Telemetry", "$Default")
LOWER = "fleet.servicebus.windows.net/telemetry/$default"
PRESERVED = "Fleet.servicebus.windows.net/Telemetry/$Default"
PARTITIONS = ("0", "1", "2", "10")


async def read(
    azurite: Azurite,
    container: str,
    format_: CheckpointFormat = "v5",
    *,
    prefix: str = "",
    preserve_case: bool = False,
    scope: ConsumerScope = SCOPE,
    partition_ids: Sequence[str] = PARTITIONS,
) -> tuple[Mapping[str, StoredCheckpoint], tuple[str, ...]]:
    """Return what a reader of the container finds, and its notes."""
    reader = BlobCheckpointReader(
        container,
        connection_string=azurite.connection_string,
        format=format_,
        prefix=prefix,
        preserve_case=preserve_case,
    )
    try:
        found = await reader.read(scope, partition_ids)
    finally:
        await reader.aclose()
    return found.partitions, tuple(found.notes)


async def write(azurite: Azurite, container: str, blobs: Mapping[str, Mapping[str, str] | bytes]) -> None:
    """Create a container with blobs: metadata of an empty one, or a body."""
    async with ContainerClient.from_connection_string(azurite.connection_string, container) as client:
        await client.create_container()
        for name, content in blobs.items():
            if isinstance(content, bytes):
                await client.upload_blob(name, content)
            else:
                await client.upload_blob(name, b"", metadata=dict(content))


async def test_v5_checkpoints_and_owners_are_read_by_one_listing(azurite: Azurite, container_name: str) -> None:
    """A partition with an owner alone has no checkpoint; a released one no owner; blobs of others do not count."""
    await write(
        azurite,
        container_name,
        {
            f"{LOWER}/checkpoint/0": {"offset": "100", "sequencenumber": "7"},
            f"{LOWER}/ownership/0": {"ownerid": "consumer-a"},
            f"{LOWER}/checkpoint/1": {"Offset": "200", "SequenceNumber": "8"},
            f"{LOWER}/ownership/1": {"ownerid": ""},
            f"{LOWER}/ownership/2": {"ownerid": "consumer-b"},
            f"{LOWER}/checkpoint/77": {"offset": "1", "sequencenumber": "1"},
            f"{LOWER}2/checkpoint/10": {"offset": "1", "sequencenumber": "1"},
        },
    )
    found, notes = await read(azurite, container_name)
    assert {each: (got.sequence_number, got.offset, got.owner, got.is_owned) for each, got in found.items()} == {
        "0": (7, "100", "consumer-a", True),
        "1": (8, "200", None, False),
        "2": (None, None, "consumer-b", True),
    }
    assert found["0"].written_at is not None
    assert notes == ()


@pytest.mark.parametrize("sdk", ["python", "javascript"])
@pytest.mark.parametrize(("state", "owner"), [("running", golden.OWNER), ("closed", None)])
async def test_recorded_blobs_of_an_official_sdk_are_read(
    azurite: Azurite, container_name: str, sdk: str, state: str, owner: str | None
) -> None:
    """While its processor runs, and once that has released what it owned; `tests/interop` has them written."""
    await write(azurite, container_name, golden.GOLDEN[sdk][state])
    async with ContainerClient.from_connection_string(azurite.connection_string, container_name) as client:
        assert await golden.list_metadata(client) == golden.GOLDEN[sdk][state]
    found, notes = await read(azurite, container_name, scope=golden.SCOPE)
    assert notes == ()
    assert {each: (got.sequence_number, got.offset, got.owner, got.is_owned) for each, got in found.items()} == {
        "0": (golden.COUNT - 1, "232", owner, owner is not None),
        "1": (None, None, owner, owner is not None),
    }


FORMS = {
    "net-offset-alone": ({"offset": "100", "sequencenumber": ""}, ("100", None)),
    "net-no-offset": ({"offset": "no offset", "sequencenumber": "7", "clientidentifier": "a"}, (None, 7)),
    "net-no-offset-capitals": ({"offset": "No Offset", "sequencenumber": "7"}, (None, 7)),
    "net-empty-offset": ({"sequencenumber": "7", "offset": "", "clientidentifier": ""}, (None, 7)),
    "net-least-number": ({"offset": "", "sequencenumber": str(-(2**63))}, None),
    "net-neither": ({"offset": "no offset", "sequencenumber": ""}, None),
    "net-geo": ({"offset": "3:8589935296:0", "sequencenumber": "7"}, ("3:8589935296:0", 7)),
    "java-old": ({"Offset": "100", "SequenceNumber": "7"}, ("100", 7)),
    "java-number-alone": ({"sequencenumber": "7"}, (None, 7)),
    "java-offset-alone": ({"offset": "100"}, ("100", None)),
    "go": ({"Offset": "100", "Sequencenumber": "7"}, ("100", 7)),  # HTTP's canonical form of a header
    "begin": ({"offset": "-1", "sequencenumber": "-1"}, ("-1", -1)),
    "first-event": ({"offset": "0", "sequencenumber": "0"}, ("0", 0)),
    "unknown-keys": ({"offset": "100", "sequencenumber": "7", "hdi_isfolder": "x"}, ("100", 7)),
    "words": ({"offset": "", "sequencenumber": "seven"}, None),
    "nothing": ({}, None),
}
"""Metadata that an SDK may have written, with offset and number where its readers begin; None if they find neither."""


@pytest.mark.parametrize("preserved", [False, True], ids=["lower", "preserved"])
async def test_v5_checkpoints_in_every_form_are_read(azurite: Azurite, container_name: str, *, preserved: bool) -> None:
    """Those of .NET, Java and Go, old and new, under names of either case; one without a position has the reason."""
    directory = PRESERVED if preserved else LOWER
    partitions = [str(number) for number in range(len(FORMS))]
    blobs = {f"{directory}/checkpoint/{at}": FORMS[form][0] for at, form in zip(partitions, FORMS, strict=True)}
    await write(azurite, container_name, blobs)
    found, notes = await read(azurite, container_name, preserve_case=preserved, partition_ids=partitions)
    assert notes == ()
    for at, (form, (_, position)) in zip(partitions, FORMS.items(), strict=True):
        got = found[at]
        if position is None:
            assert (got.is_usable, got.problem is None) == (False, False), form
        else:
            assert ((got.offset, got.sequence_number), got.problem) == (position, None), form


@pytest.mark.parametrize(
    ("metadata", "owner"),
    [({"ownerid": "a"}, "a"), ({"OwnerId": "a"}, "a"), ({"Ownerid": "a"}, "a"), ({"ownerid": ""}, None), ({}, None)],
    ids=["current", "java-old", "go", "released", "without"],
)
async def test_v5_owners_in_every_form_are_read(
    azurite: Azurite, container_name: str, metadata: dict[str, str], owner: str | None
) -> None:
    """A blob that names no owner is one that was released."""
    await write(azurite, container_name, {f"{LOWER}/ownership/0": metadata})
    found, _ = await read(azurite, container_name)
    assert (found["0"].owner, found["0"].is_owned) == (owner, owner is not None)


@pytest.mark.parametrize(("lies", "asked"), [(PRESERVED, False), (LOWER, True)])
async def test_v5_names_in_the_other_case_are_read_with_a_note(
    azurite: Azurite, container_name: str, lies: str, *, asked: bool
) -> None:
    """If nothing lies under the names that were asked for."""
    await write(azurite, container_name, {f"{lies}/checkpoint/0": {"offset": "100", "sequencenumber": "7"}})
    found, notes = await read(azurite, container_name, preserve_case=asked)
    assert found["0"].sequence_number == 7
    assert len(notes) == 1
    assert lies in notes[0]


async def test_v5_container_without_the_group_says_which_it_has(azurite: Azurite, container_name: str) -> None:
    """A name that is spelled otherwise, or an empty container, is not taken for a group without checkpoints alone."""
    await write(azurite, container_name, {f"{LOWER}-2/checkpoint/0": {"offset": "1", "sequencenumber": "1"}})
    found, notes = await read(azurite, container_name)
    assert (dict(found), len(notes)) == ({}, 1)
    assert f"it has checkpoints of {LOWER}-2" in notes[0]


@pytest.mark.parametrize(
    "body",
    [
        {"Offset": "100", "SequenceNumber": 7, "PartitionId": "0", "Owner": "a", "Token": "", "Epoch": 3},  # .NET
        {"offset": "100", "sequenceNumber": 7, "partitionId": "0", "owner": "a", "epoch": 3},  # Java
    ],
    ids=["net", "java"],
)
async def test_leases_of_an_event_processor_host_are_read(
    azurite: Azurite, container_name: str, body: dict[str, object]
) -> None:
    """In the spellings of .NET and Java; a lease without a checkpoint is none."""
    empty = {**body, "Offset" if "Offset" in body else "offset": None}
    blobs = {"app/$Default/0": json.dumps(body).encode(), "app/$Default/1": json.dumps(empty).encode()}
    await write(azurite, container_name, blobs)
    found, _ = await read(azurite, container_name, "event-processor-host", prefix="app/")
    assert (found["0"].sequence_number, found["0"].offset, found["0"].owner, found["0"].is_owned) == (
        7,
        "100",
        "a",
        False,
    )
    assert not found["1"].is_usable


async def test_leases_of_azure_eventhub_1_lie_at_the_top_of_the_container(
    azurite: Azurite, container_name: str
) -> None:
    """Named by the partition alone."""
    body = {"partition_id": "10", "owner": "a", "token": None, "epoch": 1, "offset": "9", "sequence_number": 4}
    await write(azurite, container_name, {"10": json.dumps(body).encode(), "notes.txt": b"no lease"})
    found, _ = await read(azurite, container_name, "event-processor-host-python")
    assert {each: got.sequence_number for each, got in found.items()} == {"10": 4}


@pytest.mark.long
@pytest.mark.parametrize(("format_", "limit"), [("v5", 3.0), ("event-processor-host", 10.0)])
async def test_1024_partitions_are_read_within_seconds(
    azurite: Azurite, container_name: str, format_: CheckpointFormat, limit: float
) -> None:
    """One listing of v5, and a request per lease elsewhere."""
    partition_ids = [str(number) for number in range(1024)]
    blobs: dict[str, Mapping[str, str] | bytes] = {}
    for each in partition_ids:
        if format_ == "v5":
            blobs[f"{LOWER}/checkpoint/{each}"] = {"offset": "100", "sequencenumber": each}
            blobs[f"{LOWER}/ownership/{each}"] = {"ownerid": "consumer-a"}
        else:
            blobs[f"$Default/{each}"] = f'{{"Offset":"100","SequenceNumber":{each},"PartitionId":"{each}"}}'.encode()
    await write(azurite, container_name, blobs)
    began = time.monotonic()
    found, _ = await read(azurite, container_name, format_, partition_ids=partition_ids)
    assert time.monotonic() - began < limit
    assert [found[each].sequence_number for each in partition_ids] == list(range(1024))


async def test_functions_fall_back_to_the_leases_of_an_earlier_extension(azurite: Azurite, container_name: str) -> None:
    """For partitions without a checkpoint of the current form, under names as that extension escaped them, or not."""
    old = json.dumps({"Offset": "5", "SequenceNumber": 2, "PartitionId": "1"}).encode()
    await write(
        azurite,
        container_name,
        {
            f"{LOWER}/checkpoint/0": {"offset": "100", "sequencenumber": "7"},
            f"{LOWER}/ownership/1": {"ownerid": "a"},
            "fleet.servicebus.windows.net/telemetry/$Default/1": old,
            f"{PRESERVED}/2": old,
        },
    )
    found, _ = await read(azurite, container_name, "functions")
    assert {each: got.sequence_number for each, got in found.items()} == {"0": 7, "1": 2, "2": 2}


async def test_body_that_is_no_lease_is_the_problem_of_its_partition(azurite: Azurite, container_name: str) -> None:
    """It has no checkpoint, and the reason; the other partitions are read."""
    good = json.dumps({"Offset": "5", "SequenceNumber": 2, "PartitionId": "1"}).encode()
    await write(azurite, container_name, {"$Default/0": b"{", "$Default/1": good})
    found, _ = await read(azurite, container_name, "event-processor-host")
    assert (found["0"].is_usable, found["0"].problem) == (False, "the lease is not JSON")
    assert found["1"].sequence_number == 2


async def test_container_that_does_not_exist_is_a_configuration_error(azurite: Azurite, container_name: str) -> None:
    """And none is created."""
    with pytest.raises(ConfigurationError, match=container_name):
        await read(azurite, container_name)
    with pytest.raises(ConfigurationError, match=container_name):
        await read(azurite, container_name)


async def checkpoint(store: LeaseStore) -> None:
    """Store a checkpoint of partition 1 as a host does, which still owns it."""
    await store.open(SCOPE)
    await store.ensure(PARTITIONS)
    lease = await store.acquire(unheld("1"), "host-a")
    assert lease is not None
    assert await store.write_checkpoint(lease, Checkpoint("1", "100", 7))


async def test_leases_of_this_library_are_read_from_blobs_and_from_a_file(
    azurite: Azurite, container_name: str, tmp_path: Path
) -> None:
    """With the owner, while a host has them; a partition without a checkpoint has none."""
    blobs = BlobLeaseStore(container_name, connection_string=azurite.connection_string, create=True)
    sqlite = SqliteLeaseStore(tmp_path / "leases.db")
    try:
        await checkpoint(blobs)
        await checkpoint(sqlite)
        of_blobs, _ = await read(azurite, container_name, "event-processor-host")
        of_file = (await SqliteCheckpointReader(tmp_path / "leases.db").read(SCOPE, PARTITIONS)).partitions
        for found in (of_blobs, of_file):
            assert (found["1"].sequence_number, found["1"].owner, found["1"].is_owned) == (7, "host-a", True)
            assert (found["0"].sequence_number, found["0"].is_usable, found["0"].is_owned) == (None, False, False)
    finally:
        await blobs.aclose()
        await sqlite.aclose()


async def test_reader_of_a_file_makes_none(tmp_path: Path) -> None:
    """A path without a file is an error, and stays without one."""
    path = tmp_path / "leases.db"
    with pytest.raises((ConfigurationError, StoreError), match=r"leases\.db"):
        await SqliteCheckpointReader(path).read(SCOPE, PARTITIONS)
    assert not path.exists()


def spark_log(directory: Path, batches: int, committed: int) -> Path:
    """Write a query's log as Spark does: a version, its own line, and the offset of each source."""
    for name in ("offsets", "commits"):
        (directory / name).mkdir(parents=True)
    for batch in range(batches):
        offset: dict[str, Mapping[str, object]] = {
            "Telemetry": {"0": 10 * (batch + 1), "1": 5},
            "(created)": {"Telemetry": "2030-01-01T00:00:00+00:00"},
        }
        if batch == 0:
            offset["(start)"] = {"0": 4, "1": 5}
        source = {**offset, "Telemetry": {"0": 10 * (batch + 1) + 3, "1": 5}}
        lines = ["v1", json.dumps({"batchWatermarkMs": 0}), json.dumps(source), json.dumps(offset), "-"]
        (directory / "offsets" / str(batch)).write_text("\n".join(lines), encoding="utf-8")
    for batch in range(committed):
        (directory / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}', encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("committed", "numbers"), [(2, {"0": 19, "1": 4}), (1, {"0": 9, "1": 4}), (0, {"0": 3, "1": 4})]
)
async def test_spark_query_stands_at_its_last_committed_batch(
    tmp_path: Path, committed: int, numbers: dict[str, int]
) -> None:
    """Before the first one it stands at its start; of two sources of a hub the one that is furthest behind counts."""
    reader = SparkCheckpointReader(spark_log(tmp_path / "query", 3, committed))
    found = await reader.read(SCOPE, PARTITIONS)
    assert {each: got.sequence_number for each, got in found.partitions.items()} == numbers


async def test_directory_that_is_no_query_is_an_error(tmp_path: Path) -> None:
    """And a query that reads another hub has a note."""
    with pytest.raises(ConfigurationError, match="is not the checkpointLocation of a query"):
        await SparkCheckpointReader(tmp_path).read(SCOPE, PARTITIONS)
    other = ConsumerScope(SCOPE.fully_qualified_namespace, "other", "$Default")
    found = await SparkCheckpointReader(spark_log(tmp_path / "query", 1, 1)).read(other, PARTITIONS)
    assert (dict(found.partitions), len(found.notes)) == ({}, 1)
