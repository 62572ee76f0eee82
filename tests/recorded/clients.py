"""What our client makes of an exchange that a `RecordedService` plays, and azure-eventhub of its payloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from azure.eventhub import EventData as AzureEventData
from azure.eventhub._pyamqp._decode import decode_payload
from azure.eventhub._utils import get_last_enqueued_event_properties

from eventpump.errors import ServiceError
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent
from eventpump.eventhubs.filters import parse_selector
from eventpump.interfaces import ReceiveLinkSpec, SendLinkSpec, Transport
from eventpump.testing.sink import RecordingSink
from tests.recorded import Exchange, Frame
from tests.recorded.frames import HUB
from tests.recorded.service import answers_of, payload_of, whole

_BATCH: Final = 0x80013700


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client makes of an exchange.

    Args:
        error: The class of the error and its text; None where there was none.
        events: The fields of each event.
        facts: What was read of the hub or the partition.
    """

    error: tuple[str, str] | None = None
    events: tuple[Mapping[str, Any], ...] = ()
    facts: Mapping[str, Any] | None = None


def _payloads(exchange: Exchange) -> list[str]:
    return [frame.payload or "" for frame in exchange.frames if frame.by == "service"]


def deliveries(exchange: Exchange) -> list[Frame]:
    """Return the transfers of events."""
    return whole(answers_of(exchange).get("credit", []))


def _position(exchange: Exchange) -> EventPosition:
    """Return where the recorded reader began; the start where its attach is not in the exchange."""
    for frame in exchange.frames:
        for each in ((frame.fields or {}).get("source") or {}).get("filter", {}).values():
            return parse_selector(each["value"].replace("<time-ms>", "1746100800000"))
    return EventPosition.earliest()


def _is_of_reader(exchange: Exchange) -> bool:
    texts = " ".join(str(frame.fields) for frame in exchange.frames)
    is_named = exchange.kind in ("position", "delivery", "stolen") or "-receiver-" in exchange.name
    return (
        is_named
        or bool(deliveries(exchange))
        or any(each in texts for each in ("<receiver>", "The supplied", "New receiver"))
    )


async def made_of(exchange: Exchange, transport: Transport) -> Outcome:
    """Do over a transport what the recorded client did, and return what comes of it."""
    try:
        if any("'READ'" in payload for payload in _payloads(exchange)) or "management" in exchange.name:
            return Outcome(facts=await _facts(exchange, transport))
        if _is_of_reader(exchange):
            return await _read(exchange, transport)
        return await _sent(exchange, transport)
    except ServiceError as error:
        return Outcome((type(error).__name__, error.description))


async def _facts(exchange: Exchange, transport: Transport) -> Mapping[str, Any]:
    if any("begin_sequence_number" in payload for payload in _payloads(exchange)):
        part = await transport.get_partition_properties(HUB, "0")
        return {name: getattr(part, name) for name in part.__slots__}
    hub = await transport.get_hub_properties(HUB)
    return {name: getattr(hub, name) for name in hub.__slots__}


async def _read(exchange: Exchange, transport: Transport) -> Outcome:
    sink = RecordingSink()
    spec = ReceiveLinkSpec(HUB, "$Default", "0", _position(exchange), track_last_enqueued=True)
    link = await transport.open_receive_link(spec, sink)
    count = sum(1 for frame in deliveries(exchange) if (frame.fields or {}).get("delivery_id") is not None)
    link.set_credit(300)
    await sink.until(lambda: len(sink.events) >= count)
    error = None
    if any("error" in (frame.fields or {}) for frame in exchange.frames if frame.by == "service"):
        found = await sink.ended()
        error = (type(found).__name__, found.description)
    return Outcome(error, tuple(fields_of(event) for event in sink.events))


async def _sent(exchange: Exchange, transport: Transport) -> Outcome:
    link = await transport.open_send_link(SendLinkSpec(HUB, "0" if "partition" in exchange.name else None))
    sends = [
        (payload_of(frame.payload), frame.fields["message_format"])
        for frame in exchange.frames
        if frame.by == "client" and frame.payload is not None and frame.fields is not None
    ]
    for payload, message_format in sends or [(EventData(b"x").encode(), 0)]:
        await link.send(payload, message_format=message_format)
    return Outcome(facts={"max_message_size": link.max_message_size})


# ------------------------------------------------------------------------------------------------- events


def fields_of(event: ReceivedEvent) -> Mapping[str, Any]:
    """Return the fields of an event that azure-eventhub has as well, as it names and types them."""
    last = event.last_enqueued
    return {
        "sequence_number": event.sequence_number,
        "offset": event.offset,
        "enqueued_time": event.enqueued_time,
        "partition_key": event.partition_key,
        "properties": dict(event.properties),
        "body_type": event.body_type,
        "body": event.body if event.body_type == "data" else _text(event.value),
        "message_id": event.message_id,
        "correlation_id": event.correlation_id,
        "content_type": event.content_type,
        "last_enqueued": None
        if last is None
        else (last.sequence_number, last.offset, last.enqueued_time, last.retrieval_time),
    }


def reported(exchange: Exchange) -> tuple[Mapping[str, Any], ...]:
    """Return what azure-eventhub makes of the exchange's deliveries, in the same form."""
    found: list[Mapping[str, Any]] = []
    raw = b""
    for frame in deliveries(exchange):
        raw += payload_of(frame.payload or "")
        if not (frame.fields or {}).get("more"):
            found.append(_fields_for_azure(AzureEventData._from_message(decode_payload(memoryview(raw)))))
            raw = b""
    return tuple(found)


def _fields_for_azure(event: AzureEventData) -> Mapping[str, Any]:
    kind = event.body_type.value
    body: Any = event.body
    if kind == "data":
        body = b"".join(body)
    elif kind == "sequence":
        (body,) = body  # sections; those of the recordings have one
    properties = event.raw_amqp_message.properties
    last = get_last_enqueued_event_properties(event)
    return {
        "sequence_number": event.sequence_number,
        "offset": _text(event.offset),
        "enqueued_time": event.enqueued_time,
        "partition_key": _text(event.partition_key),
        "properties": _text(event.properties or {}),
        "body_type": kind,
        "body": body if kind == "data" else _text(body),
        "message_id": _text(properties.message_id) if properties else None,
        "correlation_id": _text(properties.correlation_id) if properties else None,
        "content_type": _text(properties.content_type) if properties else None,
        "last_enqueued": None
        if last is None or last["sequence_number"] is None
        else (
            last["sequence_number"],
            _text(last["offset"]),
            _moment(last["enqueued_time"]),
            _moment(last["retrieval_time"]),
        ),
    }


def _text(value: Any) -> Any:
    """Return a value of azure-eventhub with its bytes as the text that they are on the wire."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Mapping):
        return {_text(key): _text(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_text(each) for each in value]
    return value


def _moment(value: Any) -> datetime | None:
    return value if value is None or isinstance(value, datetime) else datetime.fromtimestamp(value / 1000, UTC)
