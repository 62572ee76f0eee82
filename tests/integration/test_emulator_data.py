"""The emulator with a data directory: what was acknowledged or seen survives a killed process."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eventpump import EventData, EventProducer
from eventpump.amqp.message import AmqpValue, Data, Message
from eventpump.amqp.performatives import Accepted, Source
from eventpump.emulator.config import HubSpec
from eventpump.emulator.log import Retention
from eventpump.emulator.server import Emulator
from eventpump.eventhubs import management
from eventpump.eventhubs.events import ReceivedEvent
from tests.support.forks import COMMAND, start_python
from tests.support.peer import connect
from tests.support.reading import read_partition


@dataclass
class ServiceProcess:
    """An emulator in a process of its own."""

    process: asyncio.subprocess.Process
    connection_string: str
    host: str = "127.0.0.1"

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.connection_string.split(";")[0].rpartition(":")[2])


async def launch(*arguments: str) -> asyncio.subprocess.Process:
    return await start_python(
        *COMMAND, "emulator", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


@asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[ServiceProcess]:
    process = await launch(*arguments)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode().strip()
        assert line.startswith("Endpoint="), line
        yield ServiceProcess(process, line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def event(number: int) -> bytes:
    return Message(body=Data((b"%d" % number,))).encode()


async def read_all(service: ServiceProcess | Emulator, partition: str = "0") -> dict[int, tuple[str, bytes]]:
    async with await connect(service) as peer:
        answer = await peer.request("$management", management.partition_request("telemetry", partition, message_id="m"))
        assert isinstance(answer.body, AmqpValue)
        count = answer.body.value["last_enqueued_sequence_number"] + 1
        link = await peer.attach(
            await peer.begin(), source=Source(address=f"telemetry/ConsumerGroups/$Default/Partitions/{partition}")
        )
        link.set_credit(count + 10)
        peer.flush()
        await peer.until(lambda: len(peer.received[link]) >= count)
        return seen_by(peer.received[link])


def seen_by(payloads: list[bytes]) -> dict[int, tuple[str, bytes]]:
    events = [ReceivedEvent(raw) for raw in payloads]
    return {each.sequence_number: (each.offset, each.body) for each in events}


async def publish_until_killed(service: ServiceProcess, first: int) -> tuple[set[bytes], dict[int, tuple[str, bytes]]]:
    """Send and read, and kill the service in the middle. Give what it acknowledged, and what it delivered."""
    peer = await connect(service)
    session = await peer.begin()
    reader = await peer.attach(session, source=Source(address="telemetry/ConsumerGroups/$Default/Partitions/0"))
    sender = await peer.attach(session, target="telemetry/Partitions/0")
    reader.set_credit(100_000)
    bodies = {sender.send(event(number)): b"%d" % number for number in range(first, first + 4000)}
    peer.flush()
    await peer.until(lambda: len(peer.outcomes[sender]) > 500)
    service.process.kill()
    await peer.until(lambda: peer.is_gone)
    assert all(isinstance(each, Accepted) for each in peer.outcomes[sender].values())
    await peer.aclose()
    return {bodies[each] for each in peer.outcomes[sender]}, seen_by(peer.received[reader])


async def test_killed_emulator_keeps_what_it_acknowledged_or_showed(tmp_path: Path) -> None:
    """Killed in the middle of sends, it comes back with all it acknowledged and all a reader saw, numbers included."""
    arguments = ("--hub", "telemetry:1", "--port", "0", "--data", str(tmp_path))
    acknowledged: set[bytes] = set()
    seen: dict[int, tuple[str, bytes]] = {}
    for life in range(3):
        async with running(*arguments) as service:
            answered, found = await publish_until_killed(service, life * 10_000)
        assert all(found[number] == seen[number] for number in found.keys() & seen.keys())
        acknowledged |= answered
        seen |= found
    async with running(*arguments) as service:
        stored = await read_all(service)
    assert sorted(stored) == list(range(len(stored)))
    assert {number: stored[number] for number in seen} == seen
    assert acknowledged <= {body for _, body in stored.values()}
    offsets = [int(stored[number][0]) for number in sorted(stored)]
    assert offsets == sorted(set(offsets))


async def test_restart_after_a_stop_keeps_hubs_and_numbers(tmp_path: Path) -> None:
    """After an orderly stop the same hub is there, with its group; numbers go on."""
    async with Emulator([HubSpec("telemetry", 2, ("readers",))], data=tmp_path) as emulator:
        async with await connect(emulator) as peer:
            sender = await peer.attach(await peer.begin(), target="telemetry/Partitions/0")
            for number in range(3):
                assert isinstance(await peer.send(sender, event(number)), Accepted)
        before = await read_all(emulator)
    async with Emulator({}, data=tmp_path) as emulator:
        assert await read_all(emulator) == before
        async with await connect(emulator) as peer:
            session = await peer.begin()
            await peer.attach(session, source=Source(address="telemetry/ConsumerGroups/readers/Partitions/1"))
            sender = await peer.attach(session, target="telemetry/Partitions/0")
            await peer.send(sender, event(3))
        assert sorted(await read_all(emulator)) == [0, 1, 2, 3]


OLDER_EVENTS = (
    bytes.fromhex(
        "005372c15006a315782d6f70742d73657175656e63652d6e756d626572810000000000000000a30c782d6f70742d6f6666736574a10130"
        "a313782d6f70742d656e7175657565642d74696d6583000001a20d7a9d74005374c10602a1016e5501005375a0056669727374"
    ),
    bytes.fromhex(
        "005370c0080556015003404040005372c15a08a315782d6f70742d73657175656e63652d6e756d626572810000000000000001"
        "a30c782d6f70742d6f6666736574a103313036a313782d6f70742d656e7175657565642d74696d6583000001a20d7aa325"
        "a3036f776ea10178005375a009616e6e6f7461746564005378c10702a30166a10167"
    ),
)
"""Two events as a version stored them that kept the sender's header, wrote numbers in eight bytes and no epoch."""


def write_older(directory: Path) -> None:
    """Put them into a directory, as that version wrote it."""
    sizes = [len(each) for each in OLDER_EVENTS]
    with contextlib.closing(sqlite3.connect(directory / "hubs.sqlite")) as database, database:
        database.execute(
            "INSERT INTO batches VALUES (1, 0, 0, 1795522469236, ?, ?)",
            (array("I", sizes).tobytes(), b"".join(OLDER_EVENTS)),
        )
        database.execute(
            "UPDATE partitions SET next_sequence_number = 2, next_offset = ?, last_offset = ?,"
            " last_enqueued_ms = 1795522469236 WHERE id = 1",
            (sum(sizes), sizes[0]),
        )


@pytest.mark.parametrize("has_metrics", [False, True])
async def test_directory_of_an_older_version_is_served(tmp_path: Path, has_metrics: bool) -> None:
    """Its events are read with all that they had, and new ones follow them."""
    async with Emulator({"telemetry": 1}, data=tmp_path):
        pass
    write_older(tmp_path)
    forever = Retention(seconds=1e12)
    async with Emulator({}, data=tmp_path, retention=forever) as emulator:
        async with EventProducer(emulator.connection_string, "telemetry") as producer:
            await producer.send(EventData("new"))
        events = await read_partition(emulator.connection_string, "telemetry", "0", track_last_enqueued=has_metrics)
    first, second, new = events
    assert [(each.sequence_number, each.offset, each.body) for each in events] == [
        (0, "0", b"first"), (1, "106", b"annotated"), (2, str(sum(map(len, OLDER_EVENTS))), b"new"),
    ]  # fmt: skip
    assert first.properties == {"n": 1}
    assert first.enqueued_time == datetime(2026, 11, 24, 12, 14, 29, 236_000, tzinfo=UTC)
    assert (second.system_properties["own"], second.footer) == ("x", {"f": "g"})
    assert [each.last_enqueued is not None for each in events] == [has_metrics] * 3
    assert new.enqueued_time > second.enqueued_time


async def test_sends_of_many_connections_keep_their_order(tmp_path: Path) -> None:
    """Concurrent sends over several connections are all acknowledged, each in its own order."""
    async with Emulator({"telemetry": 1}, data=tmp_path, fsync=True) as emulator:

        async def publish(start: int) -> None:
            async with await connect(emulator) as peer:
                sender = await peer.attach(await peer.begin(), target="telemetry/Partitions/0")
                ids = [sender.send(event(start + number)) for number in range(200)]
                peer.flush()
                await peer.until(lambda: len(peer.outcomes[sender]) == len(ids))
                assert all(isinstance(each, Accepted) for each in peer.outcomes[sender].values())

        async with asyncio.TaskGroup() as group:
            for start in (0, 1000, 2000):
                group.create_task(publish(start))
        bodies = [int(body) for _, body in (await read_all(emulator)).values()]
        assert len(bodies) == 600
        for start in (0, 1000, 2000):
            own = [body for body in bodies if start <= body < start + 1000]
            assert own == list(range(start, start + 200))
