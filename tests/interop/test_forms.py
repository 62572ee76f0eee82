"""Events of every form that clients of the service send, as four readers see them: host, reader, Spark, azure-eventhub.

Where the form was recorded, the bytes are those of the recording.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from eventpump import Emulator, EventProcessor, EventProcessorHost, MemoryLeaseStore, PartitionContext, ReceivedEvent
from eventpump.amqp.message import Data, Message
from eventpump.amqp.sections import NULL_DATA
from eventpump.clients.connection import make_transport
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT
from eventpump.interfaces import SendLinkSpec
from eventpump.options.connection import connection_settings
from eventpump.spark.source.options import SourceOptions
from eventpump.spark.source.readers import BatchReader
from eventpump.spark.source.rows import text_of
from eventpump.spark.source.schema import COLUMN_TYPES
from tests.interop.peers.driver import AzurePeer, PeerEvent
from tests.recorded import exchanges, payload_bytes, sections
from tests.support.reading import read_partition

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(frozen=True)
class Seen:
    """An event as a reader sees it. Binary in maps is text here, since azure-eventhub has bytes for both.

    Attributes:
        kind: Of the body: data, value, sequence or none.
        annotations: Those of the sender.
    """

    kind: str
    body: Any
    properties: dict[str, Any] = field(default_factory=dict)
    message_id: Any = None
    correlation_id: Any = None
    content_type: str | None = None
    subject: str | None = None
    partition_key: str | None = None
    annotations: dict[str, Any] = field(default_factory=dict)
    delivery_annotations: dict[str, Any] = field(default_factory=dict)
    footer: dict[str, Any] = field(default_factory=dict)


def recorded(name: str) -> bytes:
    """Return the payload of the first event or batch that a client sends in a recorded exchange."""
    (exchange,) = (each for each in exchanges() if each.name == name)
    payload = next(frame.payload for frame in exchange.frames if frame.payload is not None and frame.by == "client")
    return payload_bytes(payload)


DATA = Seen("data", b"aabbcc", {"body_type": "data"}, delivery_annotations={"delann_key": "delann_value"})
VALUE = Seen("value", {"key": [-123, "data", False]}, {"body_type": "value"}, annotations={"ann_key": "ann_value"})
SEQUENCE = Seen(
    "sequence",
    ["message", 123.456, True],
    {"body_type": "sequence"},
    subject="sequence",
    footer={"footer_key": "footer_value"},
)
JSON = Seen("data", b'{"json_key": "json_val"}', {}, "mess_id", "corr_id", "text/plain")


@dataclass(frozen=True)
class Form:
    """What is sent, and what is read of it.

    Attributes:
        payload: The encoded event, or batch of one or several.
        seen: The events.
        spark: Their bodies as Spark has them: bytes, which for a value or a sequence are those of its text.
    """

    name: str
    payload: bytes
    seen: tuple[Seen, ...]
    spark: tuple[bytes | None, ...]
    is_batch: bool = False


DATA_SECTION = 0x75
SPARK_VALUE = rb'{"\"a2V5\"":[-123,"ZGF0YQ==",false]}'
SPARK_SEQUENCE = b'["bWVzc2FnZQ==",123.456,true]'
FORMS = (
    Form(
        "data behind a header, delivery annotations last",
        recorded("send-data-in-three-with-delivery-annotations"),
        (DATA,),
        (b"aabbcc",),
    ),
    Form("value with an annotation", recorded("send-value-with-annotation"), (VALUE,), (SPARK_VALUE,)),
    Form("sequence with a footer", recorded("send-sequence-with-footer"), (SEQUENCE,), (SPARK_SEQUENCE,)),
    Form("properties", recorded("send-properties"), (JSON,), (JSON.body,)),
    Form(
        "partition key",
        recorded("send-partition-key"),
        (Seen("data", b"117", {"is_single": True}, partition_key="test_partition_f"),),
        (b"117",),
    ),
    Form(
        "batch of every kind",
        recorded("send-batch-of-every-kind"),
        (DATA, VALUE, SEQUENCE, JSON),
        (b"aabbcc", SPARK_VALUE, SPARK_SEQUENCE, JSON.body),
        is_batch=True,
    ),
    Form(
        "batch of one with a header and a key",
        recorded("send-batch-with-key"),
        (Seen("data", b"0", partition_key="test_partition_a"),),
        (b"0",),
        is_batch=True,
    ),
    Form("batch of two", recorded("send-batch-of-two"), (Seen("data", b"Data"),) * 2, (b"Data",) * 2, is_batch=True),
    Form(
        "batch of one with application properties",
        recorded("send-batch-with-application-properties"),
        (Seen("data", b"Message 0", {"raw_prop": "raw_value"}),),
        (b"Message 0",),
        is_batch=True,
    ),
    Form(
        "application properties",
        recorded("send-application-properties"),
        (Seen("data", b"Message 0", {"raw_prop": "raw_value"}),),
        (b"Message 0",),
    ),
    Form("plain", recorded("send-plain"), (Seen("data", b"Event Number 0"),), (b"Event Number 0",)),
    Form("empty data", Message(body=Data((b"",))).encode(), (Seen("data", b""),), (b"",)),
    Form("null data", NULL_DATA, (Seen("data", b""),), (b"",)),
    Form(
        "no body",
        Message(application_properties={"only": "this"}).encode(),
        (Seen("none", None, {"only": "this"}),),
        (None,),
    ),
)


def plain(value: Any) -> Any:
    """Return a value with text in place of bytes and symbols."""
    match value:
        case bytes():
            return value.decode()
        case str():
            return str(value)
        case list() | tuple():
            return [plain(each) for each in value]
        case dict():
            return {plain(key): plain(each) for key, each in value.items()}
        case _:
            return value


def own(annotations: dict[str, Any]) -> dict[str, Any]:
    """Return the sender's own annotations."""
    return {name: value for name, value in annotations.items() if not name.startswith("x-opt-")}


def seen_by_us(event: ReceivedEvent) -> Seen:
    message = event.raw_message
    return Seen(
        event.body_type,
        event.body if event.body_type == "data" else plain(event.value),
        plain(event.properties),
        event.message_id,
        event.correlation_id,
        event.content_type,
        message.properties.subject if message.properties else None,
        event.partition_key,
        own(plain(message.message_annotations or {})),
        plain(event.delivery_annotations),
        plain(event.footer),
    )


def seen_by_azure(event: PeerEvent) -> Seen:
    kind, body = event.kind, plain(event.body)
    match kind:
        case "data":  # null data is one section of None there
            body = b"".join(each or b"" for each in event.body)
        case "sequence":
            body = [value for each in body for value in each]
        case "value" if body is None:  # it has no other kind for a message without a body
            kind = "none"
    return Seen(
        kind,
        body,
        plain(event.properties),
        plain(event.standard.get("message_id")),
        plain(event.standard.get("correlation_id")),
        plain(event.standard.get("content_type")),
        plain(event.standard.get("subject")),
        plain(event.partition_key),
        own(plain(event.annotations)),
        plain(event.delivery_annotations or {}),
        plain(event.footer or {}),
    )


def shapes_of(payload: bytes) -> set[tuple[int, ...]]:
    """Return the descriptors of the sections of what is sent, and of each event in it where it is a batch."""
    found = sections(payload)
    events = (value for code, value in found if code == DATA_SECTION and value is not None)
    inner = {shape for event in events if event.startswith(b"\x00S") for shape in shapes_of(event)}
    return {tuple(code for code, _ in found), *inner}


def seen_by_spark(row: dict[str, Any]) -> tuple[Any, ...]:
    system = dict(row["systemProperties"] or {})
    own_annotations = own(system)
    known = [own_annotations.pop(name, None) for name in ("message-id", "correlation-id", "content-type", "subject")]
    return (row["body"], dict(row["properties"] or {}), *known, row["partitionKey"], own_annotations)


def shown_by_spark(seen: Seen, body: bytes | None) -> tuple[Any, ...]:
    """Return the part of an event that Spark's columns have, in its form: every value as text."""
    properties = {name: text_of(value) for name, value in seen.properties.items()}
    known = seen.message_id, seen.correlation_id, seen.content_type, seen.subject
    return (body, properties, *known, seen.partition_key, seen.annotations)


async def hosted(connection_string: str, hub: str, count: int) -> list[ReceivedEvent]:
    """Read by a host, until there are so many events."""
    found: list[ReceivedEvent] = []

    class Recorder(EventProcessor):
        async def process_events(self, context: PartitionContext, events: Any) -> None:
            found.extend(events)
            if len(found) >= count:
                host.stop()

    host = EventProcessorHost(
        connection_string, hub, processor=Recorder(), lease_store=MemoryLeaseStore(), initial_position="-1"
    )
    async with host:
        await host.run()
    return found


def columns(connection_string: str, hub: str) -> list[dict[str, Any]]:
    """Read a partition's rows by the source of Spark, without a Spark around it."""
    options = SourceOptions.each_hub({"connectionString": connection_string, "hub": hub})
    reader = BatchReader([each.for_batch() for each in options], tuple(COLUMN_TYPES))
    rows = [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: int(row["sequenceNumber"]))


async def test_forms_are_those_of_the_recordings() -> None:
    """Every sequence of sections that a recorded client sends, singly or in a batch, is in the table."""
    sent = {
        shape
        for exchange in exchanges()
        for frame in exchange.frames
        if frame.by == "client" and frame.name == "transfer" and frame.payload is not None
        for shape in shapes_of(payload_bytes(frame.payload))
    }
    assert len(sent) > 6
    assert sent <= {shape for form in FORMS for shape in shapes_of(form.payload)}


async def test_forms_are_read_alike(emulator: Emulator, hub: str, azure: AzurePeer) -> None:
    """Every form is stored, and host, reader, Spark's source and azure-eventhub read the same of it."""
    string = emulator.connection_string
    transport = make_transport(connection_settings(string, hub))
    try:
        link = await transport.open_send_link(SendLinkSpec(hub, "0"))
        for form in FORMS:
            await link.send(form.payload, message_format=BATCH_MESSAGE_FORMAT if form.is_batch else 0)
    finally:
        await transport.aclose()
    expected = [(form.name, seen) for form in FORMS for seen in form.seen]
    names = [name for name, _ in expected]

    ours = await read_partition(string, hub, "0")
    assert list(zip(names, map(seen_by_us, ours), strict=True)) == expected
    by_host = await hosted(string, hub, len(expected))
    assert [event.raw for event in by_host] == [event.raw for event in ours]
    assert list(zip(names, map(seen_by_us, by_host), strict=True)) == expected

    consumer = await azure.consumer(string, hub, partition_id="0", starting_position="-1")
    theirs = await consumer.receive(len(expected))
    assert list(zip(names, map(seen_by_azure, theirs), strict=True)) == expected

    rows = await asyncio.to_thread(columns, string, hub)
    bodies = [body for form in FORMS for body in form.spark]
    shown = [shown_by_spark(seen, body) for (_, seen), body in zip(expected, bodies, strict=True)]
    assert list(zip(names, map(seen_by_spark, rows), strict=True)) == list(zip(names, shown, strict=True))

    places = [(event.sequence_number, event.offset, event.enqueued_time) for event in ours]
    assert [(event.sequence_number, event.offset, event.enqueued_time) for event in theirs] == places
    assert [(row["sequenceNumber"], row["offset"], row["enqueuedTime"]) for row in rows] == places
