"""What we send, and the emulator delivers, azure-eventhub reads (protocol.md 5, 6)."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from eventpump import Emulator, EventData, EventProducer, PartitionReader
from eventpump.amqp.types import Array, Byte, Float, Int, Short, Symbol, Timestamp, UByte, UInt, ULong, UShort
from eventpump.emulator.config import HubSpec
from tests.interop.peers.driver import AzurePeer, PeerEvent, event
from tests.interop.reading import exact
from tests.support.reading import read_partition

pytestmark = pytest.mark.asyncio(loop_scope="session")

MOMENT = datetime(2024, 5, 17, 12, 30, 15, 123_000, tzinfo=UTC)
STAMP = Timestamp.from_datetime(MOMENT)
IDENTITY = uuid.UUID("6f1c7bd8-2e0f-4f5b-9a52-0d5d7a3b1c11")

# What we send, and what azure-eventhub gives its user for it: its stack reads all text as bytes.
VALUES: list[tuple[Any, Any]] = [
    ("text, é", "text, é".encode()),
    (Symbol("symbol"), b"symbol"),
    (b"\x00\xff", b"\x00\xff"),
    (b"x" * 300, b"x" * 300),
    (0, 0),
    (-1, -1),
    (2**63 - 1, 2**63 - 1),
    (-(2**63), -(2**63)),
    (Int(-(2**31)), -(2**31)),
    (Short(-30_000), -30_000),
    (Byte(-128), -128),
    (ULong(2**64 - 1), 2**64 - 1),
    (UInt(2**32 - 1), 2**32 - 1),
    (UShort(65_535), 65_535),
    (UByte(255), 255),
    (1.25, 1.25),
    (Float(0.5), 0.5),
    (True, True),
    (False, False),
    (STAMP, int(STAMP)),
    (MOMENT, int(STAMP)),
    (IDENTITY, IDENTITY),
]
NESTED: list[tuple[Any, Any]] = [
    ([1, "two", [b"three", None]], [1, b"two", [b"three", None]]),
    ({"symbol": "MSFT", "levels": [{"size": 2}]}, {b"symbol": b"MSFT", b"levels": [{b"size": 2}]}),
    (Array([Symbol("a"), Symbol("b")]), [b"a", b"b"]),
    ([], []),
    (list(range(300)), list(range(300))),
]

STANDARD: dict[str, tuple[Any, Any]] = {
    "message_id": ("message-1", b"message-1"),
    "user_id": (b"user", b"user"),
    "to": ("there", b"there"),
    "subject": ("trades", b"trades"),
    "reply_to": ("here", b"here"),
    "correlation_id": (IDENTITY, IDENTITY),
    "content_type": ("application/json", b"application/json"),
    "content_encoding": ("utf-8", b"utf-8"),
    "absolute_expiry_time": (MOMENT + timedelta(days=1), int(STAMP) + 86_400_000),
    "creation_time": (MOMENT, int(STAMP)),
    "group_id": ("group", b"group"),
    "group_sequence": (7, 7),
    "reply_to_group_id": ("other group", b"other group"),
}


def bodies(events: list[PeerEvent]) -> list[str]:
    return [received.data.decode() for received in events]


async def test_azure_reads_every_body_as_we_sent_it(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Data, values and sequences that we send, alone or together, it reads equal."""
    data: list[bytes | str] = [b"\x00\xff", "text, é", b"", b"x" * 300_000]
    async with EventProducer(emulator.connection_string, hub) as producer:
        await producer.send([EventData(each) for each in data], partition_id="0")
        for value, _ in VALUES + NESTED:
            await producer.send(EventData(value=value), partition_id="0")
        await producer.send(EventData(sequence=[1, "two", [True]]), partition_id="0")
    consumer = await azure.consumer(emulator.connection_string, hub, partition_id="0", starting_position="-1")
    received = await consumer.receive(len(data) + len(VALUES) + len(NESTED) + 1)
    assert [each.body for each in received[: len(data)]] == [
        [each.encode() if isinstance(each, str) else each] for each in data
    ]
    values = received[len(data) : -1]
    assert {each.kind for each in values} == {"value"}
    assert [exact(each.body) for each in values] == [exact(expected) for _, expected in VALUES + NESTED]
    assert (received[-1].kind, received[-1].body) == ("sequence", [[1, b"two", [True]]])


async def test_azure_reads_every_property_as_we_sent_it(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Application properties of every type and all standard properties that we send, it reads equal."""
    sent = {f"{type(value).__name__}-{n}": value for n, (value, _) in enumerate(VALUES)}
    standard = {name: value for name, (value, _) in STANDARD.items()}
    ids: list[Any] = ["text", ULong(2**40), IDENTITY, b"\x00id"]
    async with EventProducer(emulator.connection_string, hub) as producer:
        await producer.send(EventData(b"x", properties=sent, **standard), partition_id="0")
        await producer.send([EventData(b"x", message_id=each) for each in ids], partition_id="0")
    consumer = await azure.consumer(emulator.connection_string, hub, partition_id="0", starting_position="-1")
    first, *others = await consumer.receive(1 + len(ids))
    assert exact(first.properties) == exact(
        {name.encode(): expected for name, (_, expected) in zip(sent, VALUES, strict=True)}
    )
    assert exact(first.standard) == exact({name: expected for name, (_, expected) in STANDARD.items()})
    assert [exact(each.standard["message_id"]) for each in others] == [
        exact(each) for each in (b"text", 2**40, IDENTITY, b"\x00id")
    ]
    assert [each.properties for each in others] == [{}] * len(ids)


async def test_azure_and_ours_read_the_same_facts_of_an_event(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Partition key, sequence number, offset and enqueued time are the same to its reader and to ours."""
    async with EventProducer(emulator.connection_string, hub) as producer:
        for key in ("MSFT", "AAPL", "key1", "schlüssel"):
            batch = await producer.create_batch(partition_key=key)
            for n in range(10):
                assert batch.try_add(EventData(f"{key}-{n}"))
            await producer.send(batch)
        await producer.send(EventData("no key"), partition_id="0")
    consumer = await azure.consumer(emulator.connection_string, hub, starting_position="-1")
    theirs = await consumer.receive(41)
    for partition in "0123":
        ours = await read_partition(emulator.connection_string, hub, partition)
        assert [
            (each.data, each.partition_key, each.sequence_number, each.offset, each.enqueued_time)
            for each in theirs
            if each.partition == partition
        ] == [
            (
                each.body,
                None if each.partition_key is None else each.partition_key.encode(),
                each.sequence_number,
                each.offset,
                each.enqueued_time,
            )
            for each in ours
        ]


@pytest.fixture
def ticking() -> Callable[[], float]:
    """A clock that a millisecond passes on whenever it is looked at."""
    ticks = itertools.count(int(time.time() * 1000))
    return lambda: next(ticks) / 1000


async def test_azure_reads_from_every_position(azure: AzurePeer, ticking: Callable[[], float]) -> None:
    """Start, offset, sequence number and enqueued time, exclusive and inclusive, give exactly what lies after."""
    async with (
        Emulator([HubSpec("telemetry", 1, ("second",))], now=ticking) as emulator,
        EventProducer(emulator.connection_string, "telemetry") as producer,
    ):
        for n in range(6):
            await producer.send(EventData(f"{n}"), partition_id="0")
        stored = await read_partition(emulator.connection_string, "telemetry", "0")
        assert len({received.enqueued_time for received in stored}) == 6
        third = stored[3]
        positions: list[tuple[Any, bool, int]] = [
            ("-1", False, 0),
            ("-1", True, 0),
            (third.offset, False, 4),
            (third.offset, True, 3),
            (third.sequence_number, False, 4),
            (third.sequence_number, True, 3),
            (third.enqueued_time, False, 4),
            (third.enqueued_time, True, 3),
            (stored[0].enqueued_time - timedelta(hours=1), False, 0),
        ]
        # Five readers of one partition is what the service allows a group.
        consumers = await asyncio.gather(
            *(
                azure.consumer(
                    emulator.connection_string,
                    "telemetry",
                    group="$Default" if number < 5 else "second",
                    partition_id="0",
                    starting_position=position,
                    starting_position_inclusive=inclusive,
                )
                for number, (position, inclusive, _) in enumerate(positions)
            )
        )
        await asyncio.gather(
            *(consumer.receive(6 - first) for consumer, (_, _, first) in zip(consumers, positions, strict=True))
        )
        await producer.send(EventData("6"), partition_id="0")
        for consumer, (position, inclusive, first) in zip(consumers, positions, strict=True):
            received = await consumer.receive(7 - first)
            assert bodies(received) == [str(n) for n in range(first, 7)], (position, inclusive)


async def test_azure_reads_from_the_latest(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """From "@latest", its default, it gets nothing that was there before, and everything after its first event."""
    async with EventProducer(emulator.connection_string, hub) as producer:
        await producer.send([EventData("old")] * 5, partition_id="0")
        consumer = await azure.consumer(emulator.connection_string, hub, partition_id="0")
        sent = 0
        # Nothing outside shows when its link is attached.
        while not consumer.notes.received:
            await producer.send(EventData(f"{sent}"), partition_id="0")
            sent += 1
            await consumer.pause(0.05)
        await producer.send(EventData("last"), partition_id="0")
    await consumer.until(lambda notes: notes.received[-1].data == b"last")
    received = bodies(consumer.notes.received)
    expected = [*map(str, range(sent)), "last"]
    assert received == expected[-len(received) :]


async def test_azure_reads_all_in_order_at_any_prefetch(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """More events than its credit arrive, each once, in order and unharmed; large ones in several frames too."""
    sent: list[bytes] = []
    async with EventProducer(emulator.connection_string, hub) as producer:
        for n in range(9):
            run = [f"{n}-{m}-".encode() + b"x" * (m % 100) for m in range(400)] + [bytes([n]) * 150_000] * 2
            await producer.send([EventData(body) for body in run], partition_id="0")
            sent += run
    for prefetch in (300, 3000):
        consumer = await azure.consumer(
            emulator.connection_string, hub, partition_id="0", starting_position="-1", prefetch=prefetch
        )
        received = await consumer.receive(len(sent))
        assert [each.sequence_number for each in received] == list(range(len(sent))), prefetch
        assert [hashlib.sha256(each.data).digest() for each in received] == [
            hashlib.sha256(body).digest() for body in sent
        ], prefetch


async def test_azure_reads_last_enqueued_event_properties(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """With `track_last_enqueued_event_properties` every event brings facts of the partition's newest; without, none."""
    async with EventProducer(emulator.connection_string, hub) as producer:
        await producer.send([EventData("x")] * 5, partition_id="0")
        newest = (await read_partition(emulator.connection_string, hub, "0"))[-1]
        tracking = await azure.consumer(
            emulator.connection_string,
            hub,
            partition_id="0",
            starting_position="-1",
            track_last_enqueued_event_properties=True,
        )
        plain = await azure.consumer(emulator.connection_string, hub, partition_id="0", starting_position="-1")
        await asyncio.gather(tracking.receive(5), plain.receive(5))
    found = tracking.notes.newest["0"]
    assert found["sequence_number"] == 4
    assert found["offset"] == newest.offset
    assert found["enqueued_time"] == newest.enqueued_time
    assert abs(found["retrieval_time"] - datetime.now(UTC)) < timedelta(minutes=1)
    assert not plain.notes.newest["0"]


async def test_azure_reads_properties_of_hub_and_partitions(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """`get_eventhub_properties` and `get_partition_properties` say what is true, of empty partitions too."""
    producer = await azure.producer(emulator.connection_string, hub)
    async with EventProducer(emulator.connection_string, hub) as ours:
        await ours.send([EventData(b"x")] * 3, partition_id="1")
    (*_, newest) = await read_partition(emulator.connection_string, hub, "1")
    found, filled, empty = await asyncio.gather(
        producer.hub_properties(), producer.partition_properties("1"), producer.partition_properties("2")
    )
    assert found["eventhub_name"] == hub
    assert found["partition_ids"] == ["0", "1", "2", "3"]
    assert abs(found["created_at"] - datetime.now(UTC)) < timedelta(hours=1)
    assert filled == {
        "eventhub_name": hub,
        "id": "1",
        "beginning_sequence_number": 0,
        "last_enqueued_sequence_number": 2,
        "last_enqueued_offset": newest.offset,
        "last_enqueued_time_utc": newest.enqueued_time,
        "is_empty": False,
    }
    assert empty["is_empty"] is True
    assert empty["last_enqueued_sequence_number"] == -1
    assert empty["last_enqueued_offset"] == "-1"


async def test_azure_close_leaves_nothing_attached(own_emulator: Emulator, azure: AzurePeer) -> None:
    """A consumer and a producer of it that are closed take their connections with them, and free the reader's place."""
    string = own_emulator.connection_string
    producer = await azure.producer(string, "telemetry")
    await producer.send([event(b"x")], partition_id="0")
    consumers = [await azure.consumer(string, "telemetry", partition_id="0", starting_position="-1") for _ in range(5)]
    await asyncio.gather(*(consumer.receive(1) for consumer in consumers))
    assert own_emulator.connection_count >= 6
    await asyncio.gather(producer.close(), *(consumer.close() for consumer in consumers))
    async with PartitionReader(string, "telemetry", partition_id="0") as reader:
        assert [received.body for received in await reader.read()] == [b"x"]
        assert own_emulator.connection_count == 1
