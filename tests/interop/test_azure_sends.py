"""What azure-eventhub sends, the emulator takes and our reader reads (protocol.md 6.2, 7)."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from eventpump import Emulator, EventProcessor, EventProcessorHost, MemoryLeaseStore, PartitionContext, ReceivedEvent
from eventpump.amqp.message import AmqpSequence, AmqpValue, Data
from eventpump.amqp.types import Float, Int, Symbol, Timestamp, UInt, ULong
from eventpump.emulator.faults import LinkRole, Reject
from tests.interop.peers.driver import AzurePeer, annotated, event
from tests.interop.peers.lines import PeerError
from tests.interop.reading import PARTITIONS, exact, read_hub
from tests.support.reading import read_partition

pytestmark = pytest.mark.asyncio(loop_scope="session")

MOMENT = datetime(2024, 5, 17, 12, 30, 15, 123_000, tzinfo=UTC)
IDENTITY = uuid.UUID("6f1c7bd8-2e0f-4f5b-9a52-0d5d7a3b1c11")

# How an AMQP type is named to azure-eventhub where Python has none for it.
LONG = {"TYPE": "LONG", "VALUE": 2**40}
SYMBOL = {"TYPE": "SYMBOL", "VALUE": b"market-data"}
FLOAT = {"TYPE": "FLOAT", "VALUE": 0.5}

BODIES: list[tuple[dict[str, Any], object]] = [
    (event(b"\x00\xff binary"), Data((b"\x00\xff binary",))),
    (event("text, é and 你好"), Data(("text, é and 你好".encode(),))),
    (event(b""), Data((b"",))),
    (event([b"one", b"two", "three"]), Data((b"one", b"two", b"three"))),
    (event(b"x" * 300_000), Data((b"x" * 300_000,))),
    (annotated(data_body=b"annotated"), Data((b"annotated",))),
    (annotated(value_body="a text"), AmqpValue("a text")),
    (annotated(value_body=b"bytes"), AmqpValue(b"bytes")),
    (annotated(value_body=-70_000), AmqpValue(Int(-70_000))),
    (annotated(value_body=[LONG]), AmqpValue([2**40])),
    (annotated(value_body=True), AmqpValue(True)),
    (annotated(value_body=2.5), AmqpValue(2.5)),
    (annotated(value_body=MOMENT), AmqpValue(Timestamp.from_datetime(MOMENT))),
    (annotated(value_body=IDENTITY), AmqpValue(IDENTITY)),
    (annotated(value_body=[1, "two", [b"three", None]]), AmqpValue([Int(1), "two", [b"three", None]])),
    (
        annotated(value_body={"symbol": "MSFT", "levels": [{"price": 101.5, "size": 200}]}),
        AmqpValue({"symbol": "MSFT", "levels": [{"price": 101.5, "size": Int(200)}]}),
    ),
    (annotated(sequence_body=[1, "two", b"three"]), AmqpSequence(([Int(1), "two", b"three"],))),
    (annotated(sequence_body=[[1, True], ["two"]]), AmqpSequence(([Int(1), True], ["two"]))),
    # A value that is false has no body section at all in azure-eventhub.
    (annotated(value_body=0, application_properties={"only": "this"}), None),
]

PROPERTIES: dict[str, tuple[Any, Any]] = {
    "str": ("text, é", "text, é"),
    "long str": ("x" * 300, "x" * 300),
    "int": (-5, Int(-5)),
    "wide int": (2**31 - 1, Int(2**31 - 1)),
    "long": (LONG, 2**40),
    "float": (1.25, 1.25),
    "narrow float": (FLOAT, Float(0.5)),
    "bool": (True, True),
    "bytes": (b"\x00\x01", b"\x00\x01"),
    "datetime": (MOMENT, Timestamp.from_datetime(MOMENT)),
    "uuid": (IDENTITY, IDENTITY),
    "symbol": (SYMBOL, Symbol("market-data")),
    "none": (None, None),
    # AMQP 1.0 3.2.5 wants simple values here; azure-eventhub sends others all the same.
    "list": ([1, ["two"]], [Int(1), ["two"]]),
    "map": ({"a": {"b": 2}}, {"a": {"b": Int(2)}}),
}

STANDARD: dict[str, tuple[Any, Any]] = {
    "message_id": ("message-1", "message-1"),
    "user_id": (b"user", b"user"),
    "to": ("there", "there"),
    "subject": ("trades", "trades"),
    "reply_to": ("here", "here"),
    "correlation_id": ("correlation-1", "correlation-1"),
    "content_type": ("application/json", Symbol("application/json")),
    "content_encoding": ("utf-8", Symbol("utf-8")),
    "absolute_expiry_time": (1_900_000_000_123, Timestamp(1_900_000_000_123)),
    "creation_time": (1_700_000_000_456, Timestamp(1_700_000_000_456)),
    "group_id": ("group", "group"),
    "group_sequence": (7, UInt(7)),
    "reply_to_group_id": ("other group", "other group"),
}


def standard_of(received: ReceivedEvent) -> dict[str, Any]:
    properties = received.raw_message.properties
    assert properties is not None
    return {name: getattr(properties, name) for name in STANDARD}


def assert_bodies(events: list[ReceivedEvent]) -> None:
    assert len(events) == len(BODIES)
    for received, (_, body) in zip(events, BODIES, strict=True):
        found = received.raw_message.body
        assert type(found) is type(body)
        match found, body:
            case (Data(), Data()):
                assert found == body
                assert received.body == b"".join(found.parts)
            case (AmqpSequence(parts=parts), AmqpSequence(parts=expected)):
                assert exact(list(parts)) == exact(list(expected))
            case (AmqpValue(value=value), AmqpValue(value=expected_value)):
                assert exact(value) == exact(expected_value)


async def test_azure_send_of_every_body_arrives_as_it_was_sent(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Data in one section or several, values and sequences: sent alone, in a list or in a batch, we read them equal."""
    producer = await azure.producer(emulator.connection_string, hub)
    bodies = [spec for spec, _ in BODIES]
    ways = {"0": "event", "1": "list", "2": "batch"}
    await asyncio.gather(*(producer.send(bodies, how, partition_id=partition) for partition, how in ways.items()))
    for partition in ways:
        assert_bodies(await read_partition(emulator.connection_string, hub, partition))


async def test_azure_send_of_every_property_arrives_as_it_was_sent(
    emulator: Emulator, azure: AzurePeer, hub: str
) -> None:
    """Application properties of every type keep their AMQP type and value."""
    producer = await azure.producer(emulator.connection_string, hub)
    sent = {name: value for name, (value, _) in PROPERTIES.items()}
    await producer.send([event(b"1", sent)], "event", partition_id="0")
    await producer.send([event(b"2", sent), event(b"3")], "batch", partition_id="0")
    alone, batched, without = await read_partition(emulator.connection_string, hub, "0")
    expected = {name: value for name, (_, value) in PROPERTIES.items()}
    assert exact(alone.properties) == exact(expected)
    assert exact(batched.properties) == exact(expected)
    assert without.properties == {}


async def test_azure_send_of_standard_properties_arrives_as_they_were_sent(
    emulator: Emulator, azure: AzurePeer, hub: str
) -> None:
    """All thirteen standard properties keep their AMQP type and value, and ids of every type are taken."""
    producer = await azure.producer(emulator.connection_string, hub)
    sent = {name: value for name, (value, _) in STANDARD.items()}
    ids: list[Any] = ["text", 2**40, IDENTITY, b"\x00id"]
    await producer.send([event(b"1", **sent)], "event", partition_id="0")
    await producer.send([event(b"2", message_id=each, correlation_id=each) for each in ids], "list", partition_id="0")
    first, *others = await read_partition(emulator.connection_string, hub, "0")
    assert exact(standard_of(first)) == exact({name: value for name, (_, value) in STANDARD.items()})
    assert first.message_id == "message-1"
    assert first.content_type == "application/json"
    expected = ["text", ULong(2**40), IDENTITY, b"\x00id"]
    assert [exact(received.message_id) for received in others] == [exact(each) for each in expected]
    assert [exact(received.correlation_id) for received in others] == [exact(each) for each in expected]


async def test_azure_send_of_every_section_arrives_as_it_was_sent(
    emulator: Emulator, azure: AzurePeer, hub: str
) -> None:
    """Annotations of both kinds and the footer of an annotated message arrive; the header does not (6.2)."""
    producer = await azure.producer(emulator.connection_string, hub)
    sent = annotated(
        data_body=b"x",
        header={"durable": True, "priority": 7, "time_to_live": 60_000, "first_acquirer": True, "delivery_count": 3},
        annotations={"x-opt-own": "mine", "x-opt-nested": {"a": [1, 2]}},
        delivery_annotations={"hop": "this"},
        footer={"checksum": "abc"},
    )
    await producer.send([sent], "event", partition_id="0")
    (received,) = await read_partition(emulator.connection_string, hub, "0")
    message = received.raw_message
    assert message.header is None
    annotations = message.message_annotations
    assert annotations is not None
    assert annotations["x-opt-own"] == "mine"
    assert annotations["x-opt-nested"] == {"a": [1, 2]}
    assert (received.delivery_annotations, received.footer) == ({"hop": "this"}, {"checksum": "abc"})
    assert received.sequence_number == 0


async def test_azure_send_to_a_partition_is_stored_in_order(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Events sent to a partition are stored there, in order, numbered from 0, at rising offsets and times."""
    producer = await azure.producer(emulator.connection_string, hub)
    before = datetime.now(UTC).replace(microsecond=0)

    async def send(partition: str) -> None:
        await producer.send([event(f"{partition}-{n}") for n in range(5)], "event", partition_id=partition)
        await producer.send([event(f"{partition}-{n}") for n in range(5, 10)], "batch", partition_id=partition)

    await asyncio.gather(*map(send, PARTITIONS))
    for partition, events in (await read_hub(emulator, hub)).items():
        assert [received.body_as_str() for received in events] == [f"{partition}-{n}" for n in range(10)]
        assert [received.sequence_number for received in events] == list(range(10))
        offsets = [int(received.offset) for received in events]
        assert offsets == sorted(set(offsets))
        times = [received.enqueued_time for received in events]
        assert times == sorted(times)
        assert times[0] >= before
        assert {received.partition_key for received in events} == {None}


async def test_azure_send_without_a_target_is_spread(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Without a target each message goes to a partition of the service's choice, each in turn; a batch goes to one."""
    producer = await azure.producer(emulator.connection_string, hub)
    for n in range(4):
        await producer.send([event(f"{n}-a"), event(f"{n}-b")], "list")
    stored = [[received.body_as_str() for received in events] for events in (await read_hub(emulator, hub)).values()]
    assert sorted(stored) == [[f"{n}-a", f"{n}-b"] for n in range(4)]


async def test_azure_send_by_key_keeps_events_together(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Events of one key, however they are sent, land in one partition, in order, and carry the key."""
    producer = await azure.producer(emulator.connection_string, hub)
    keys = ["MSFT", "AAPL", "key1", "schlüssel"]
    for how in ("event", "list", "batch"):
        for key in keys:
            await producer.send([event(f"{key}-{how}-a"), event(f"{key}-{how}-b")], how, partition_key=key)
    stored = await read_hub(emulator, hub)
    for key in keys:
        holding = [events for events in stored.values() if any(received.partition_key == key for received in events)]
        assert len(holding) == 1
        own = [received.body_as_str() for received in holding[0] if received.partition_key == key]
        assert own == [f"{key}-{how}-{which}" for how in ("event", "list", "batch") for which in "ab"]


async def test_azure_send_of_full_batches_is_stored_whole(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Batches filled up to the link's limit are stored with every event in them, for every target."""
    producer = await azure.producer(emulator.connection_string, hub)
    body = bytes(range(256)) * 4
    filled = await asyncio.gather(
        producer.fill_batch(body, partition_id="2"),
        producer.fill_batch(b"small", partition_key="key"),
        producer.fill_batch(body),
    )
    for batch in filled:
        assert batch["max_size_in_bytes"] == 1024 * 1024
        assert 0.99 * batch["max_size_in_bytes"] < batch["size"] <= batch["max_size_in_bytes"]
    stored = [received for events in (await read_hub(emulator, hub)).values() for received in events]
    digests = [hashlib.sha256(received.body).digest() for received in stored]
    assert digests.count(hashlib.sha256(b"small").digest()) == filled[1]["count"]
    assert digests.count(hashlib.sha256(body).digest()) == filled[0]["count"] + filled[2]["count"]
    assert len(digests) == sum(batch["count"] for batch in filled)


async def test_azure_send_of_too_large_an_event_is_refused(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """An event over the limit raises what the SDK raises for it, nothing is stored, and the next send works."""
    producer = await azure.producer(emulator.connection_string, hub)
    with pytest.raises(PeerError, match="LinkMessageSizeExceeded") as refused:
        await producer.send([event(b"x" * (1024 * 1024 + 1))], "event", partition_id="0")
    assert refused.value.kind == "EventDataSendError"
    with pytest.raises(PeerError, match="exceeds"):
        await producer.send([event(b"x" * 600_000)] * 2, "list", partition_id="0")
    await producer.send([event(b"after")], "event", partition_id="0")
    assert [received.body for received in await read_partition(emulator.connection_string, hub, "0")] == [b"after"]


async def test_azure_send_rejected_as_busy_raises(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """A send the service rejects as busy raises at once with the condition, and stores nothing; the next one works."""
    producer = await azure.producer(emulator.connection_string, hub)
    emulator.faults.add(Reject(), role=LinkRole.PRODUCER, hub=hub)
    with pytest.raises(PeerError, match=r"com\.microsoft:server-busy") as refused:
        await producer.send([event(b"refused")], "event", partition_id="0")
    assert refused.value.kind == "EventDataSendError"
    await producer.send([event(b"taken")], "event", partition_id="0")
    assert [received.body for received in await read_partition(emulator.connection_string, hub, "0")] == [b"taken"]


async def test_azure_buffered_producer_sends_everything(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Every event enqueued to a partition, a key or nowhere is stored once, and reported to `on_success`."""
    producer = await azure.producer(emulator.connection_string, hub, buffered=True)
    await producer.send([event(f"p{n}") for n in range(50)], "event", partition_id="3")
    await producer.send([event(f"k{n}") for n in range(50)], "event", partition_key="key1")
    await producer.send([event(f"g{n}") for n in range(50)], "event")
    await producer.flush()
    await producer.until(lambda notes: sum(count for _, count in notes.sent) == 150)
    assert producer.notes.errors == []
    stored = await read_hub(emulator, hub)
    assert {partition: len(events) for partition, events in stored.items() if events} == {
        partition: sum(count for each, count in producer.notes.sent if each == partition) for partition in PARTITIONS
    }
    bodies = sorted(received.body_as_str() for events in stored.values() for received in events)
    assert bodies == sorted(f"{kind}{n}" for kind in "pkg" for n in range(50))
    assert [body for body in (received.body_as_str() for received in stored["3"]) if body[0] == "p"] == [
        f"p{n}" for n in range(50)
    ]


async def test_our_host_processes_what_azure_publishes(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Events the official SDK published to all partitions reach our processor, each once, in order per partition."""
    producer = await azure.producer(emulator.connection_string, hub)
    seen: dict[str, list[str]] = {partition: [] for partition in PARTITIONS}

    class Recorder(EventProcessor):
        async def process_events(self, context: PartitionContext, events: Any) -> None:
            seen[context.partition_id] += [received.body_as_str() for received in events]
            await context.checkpoint()
            if sum(map(len, seen.values())) == 400:
                host.stop()

    host = EventProcessorHost(emulator.connection_string, hub, processor=Recorder(), lease_store=MemoryLeaseStore())
    await asyncio.gather(
        *(
            producer.send([event(f"{partition}-{n}") for n in range(100)], "list", partition_id=partition)
            for partition in PARTITIONS
        )
    )
    async with host:
        await host.run()
    assert seen == {partition: [f"{partition}-{n}" for n in range(100)] for partition in PARTITIONS}
