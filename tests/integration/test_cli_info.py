"""`eventpump info` as a process: what a hub holds, and how far the groups of a lease store are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventpump import Emulator, EventData, EventProducer, SqliteLeaseStore
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.testing.fixtures import eventpump_emulator
from tests.integration.test_cli_send_tail import run
from tests.support.leases import unheld

__all__ = ["eventpump_emulator"]


async def fill(emulator: Emulator) -> None:
    """Store 10 events in partition 0, and 20 in partition 2."""
    async with EventProducer(emulator.connection_string, "telemetry") as producer:
        for partition_id, count in (("0", 10), ("2", 20)):
            await producer.send([EventData(b"x") for _ in range(count)], partition_id=partition_id)


async def checkpoint(path: Path, group: str, partition_id: str, number: int) -> None:
    """Store a checkpoint as a host does, and leave the file open in its journal mode."""
    store = SqliteLeaseStore(path)
    await store.open(ConsumerScope("127.0.0.1", "telemetry", group))
    await store.ensure(["0", "1", "2", "3"])
    lease = await store.acquire(unheld(partition_id), "host")
    assert lease is not None
    await store.write_checkpoint(lease, Checkpoint(partition_id, str(number), number))
    await store.aclose()


async def test_info_shows_numbers_of_every_partition(eventpump_emulator: Emulator) -> None:
    """A line for each partition, with its oldest and newest number; an empty one has none."""
    await fill(eventpump_emulator)
    code, out, err = await run("info", "--hub", "telemetry", emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    lines = out.decode().splitlines()
    assert lines[0].startswith("hub telemetry: 4 partitions, 30 events, created 20")
    assert [line.split()[:4] for line in lines[3:]] == [
        ["0", "0", "9", "10"],
        ["1", "0"],
        ["2", "0", "19", "20"],
        ["3", "0"],
    ]


async def test_info_shows_the_lag_of_each_group_in_the_lease_store(
    eventpump_emulator: Emulator, tmp_path: Path
) -> None:
    """By its checkpoints; partitions without one are wholly behind, and a former hub's checkpoint is called that."""
    await fill(eventpump_emulator)
    leases = tmp_path / "leases.db"
    await checkpoint(leases, "$Default", "2", 14)
    await checkpoint(leases, "archive", "0", 70)
    arguments = ("info", "--hub", "telemetry", "--leases", str(leases))
    code, out, err = await run(*arguments, emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    text = out.decode()
    assert "consumer group $Default: 15 events behind" in text
    assert "consumer group archive: 20 events behind" in text
    assert "checkpoints of partitions 0 lie beyond the newest event: they are of a former hub" in text
    code, out, err = await run(*arguments, "--json", emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [each["events"] for each in document["partitions"]] == [10, 0, 20, 0]
    first = document["consumer_groups"][0]
    assert (first["consumer_group"], first["subscription"], first["lag"]) == ("$Default", "default", 15)
    assert first["partitions"][2] == {"partition": "2", "checkpoint": 14, "lag": 5}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--hub", "nothing"), "nothing"),
        (("--hub", "telemetry", "--leases", "/no/such/file"), "/no/such/file"),
        (("--hub", "telemetry", "--leases", __file__), "not the file of a lease store"),
        ((), "hub"),
    ],
)
async def test_info_of_what_cannot_be_read_exits_with_2(
    eventpump_emulator: Emulator, arguments: tuple[str, ...], says: str
) -> None:
    """One line that names it, and exit code 2."""
    code, out, err = await run("info", *arguments, emulator=eventpump_emulator)
    assert (code, out, err.count("\n")) == (2, b"", 1)
    assert says in err
