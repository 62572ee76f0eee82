"""What azure-eventhub's sides share, aio and sync."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from typing import Any

import msgspec
from azure.eventhub import EventData, TransportType
from cloudevents.core.bindings.amqp import AMQPMessage, from_amqp_event

from benchmarks.events import Sample
from benchmarks.sides.common import FanTally, Fleet, port_of
from benchmarks.sides.models import PlainReport, Report


def client_options(connection_string: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Return a client's options: over TLS it takes a port other than 5671 only as a custom endpoint."""
    if not options:
        return {}
    endpoint = f"sb://127.0.0.1:{port_of(connection_string)}"
    return {**options, "custom_endpoint_address": endpoint, "transport_type": TransportType.Amqp}


def event_of(sample: Sample) -> EventData:
    """Return an event."""
    event = EventData(sample.body)
    if sample.properties is not None:
        event.properties = sample.properties  # type: ignore[assignment]  # its keys may be bytes too
    return event


Read = Callable[[list[EventData]], tuple[int, int, int, int, datetime | None]]
"""Reads a batch, and returns what `Tally.add` takes after the partition."""


def reading(work: str) -> Read:
    """Return what reads a batch as a program of this kind does; see `benchmarks.events.WORKS`."""
    if work == "fields":
        return read
    fleet = Fleet()
    if work == "cloudevents":
        return partial(_read_cloudevents, fleet)
    if work in ("pydantic", "msgspec"):
        return partial(_read_model, fleet, Report.model_validate_json if work == "pydantic" else _PLAIN.decode)
    return partial(_read_telemetry if work == "telemetry" else _read_properties, fleet)


def read(batch: list[EventData]) -> tuple[int, int, int, int, datetime | None]:
    """Read four fields of each event.

    Returns:
        What `Tally.add` takes after the partition.
    """
    body, offset, number, enqueued = b"", None, -1, None
    for event in batch:
        body, offset, number, enqueued = (
            b"".join(event.body),  # type: ignore[arg-type]  # the body of a data message is an iterable of bytes
            event.offset,
            event.sequence_number or 0,
            event.enqueued_time,
        )
    if not offset:
        raise AssertionError("an event has no offset")
    return batch[0].sequence_number or 0, number, len(batch), len(body), enqueued


def _read_telemetry(fleet: Fleet, batch: list[EventData]) -> tuple[int, int, int, int, datetime | None]:
    offset, number, enqueued = None, -1, None
    for event in batch:
        report = event.body_as_json()
        # This client gives text of properties and keys as bytes.
        properties: Any = event.properties
        key = event.partition_key
        offset, number, enqueued = event.offset, event.sequence_number or 0, event.enqueued_time
        kind, firmware = properties[b"type"].decode(), properties[b"firmware"]
        fleet.report(kind, firmware, None if key is None else key.decode(), number, report)
    return _found(batch, offset, number, enqueued)


def _read_properties(fleet: Fleet, batch: list[EventData]) -> tuple[int, int, int, int, datetime | None]:
    offset, number, enqueued = None, -1, None
    for event in batch:
        properties: Any = event.properties
        key = event.partition_key
        offset, number, enqueued = event.offset, event.sequence_number or 0, event.enqueued_time
        kind, firmware = properties[b"type"].decode(), properties[b"firmware"]
        fleet.note(kind, firmware, None if key is None else key.decode(), number)
    return _found(batch, offset, number, enqueued)


_PLAIN = msgspec.json.Decoder(PlainReport)


def _read_model(
    fleet: Fleet, decode: Callable[[bytes], Report | PlainReport], batch: list[EventData]
) -> tuple[int, int, int, int, datetime | None]:
    for event in batch:
        report = decode(b"".join(event.body))  # type: ignore[arg-type]  # see `read`
        fleet.temperatures[report.dev] = report.temp
    return _found(batch, batch[-1].offset, batch[-1].sequence_number or 0, batch[-1].enqueued_time)


def _read_cloudevents(fleet: Fleet, batch: list[EventData]) -> tuple[int, int, int, int, datetime | None]:
    for event in batch:
        properties: Any = event.properties
        attributes = {
            name.decode(): value.decode() if isinstance(value, bytes) else value for name, value in properties.items()
        }
        body = b"".join(event.body)  # type: ignore[arg-type]  # see `read`
        found = from_amqp_event(AMQPMessage({"content-type": event.content_type}, attributes, body))
        report: Any = found.get_data()
        fleet.temperatures[report["dev"]] = report["temp"]
    return _found(batch, batch[-1].offset, batch[-1].sequence_number or 0, batch[-1].enqueued_time)


def _found(
    batch: list[EventData], offset: str | None, number: int, enqueued: datetime | None
) -> tuple[int, int, int, int, datetime | None]:
    if not offset:
        raise AssertionError("an event has no offset")
    size = len(b"".join(batch[-1].body))  # type: ignore[arg-type]  # see `read`
    return batch[0].sequence_number or 0, number, len(batch), size, enqueued


def taken(
    tally: FanTally,
    consumer: int,
    partition_id: str | None,
    batch: list[EventData],
    reads: bool,
    lock: AbstractContextManager[Any] | None = None,
) -> bool:
    """Count a batch of one of several consumers in.

    Args:
        reads: Whether to read four fields of every event, and not only the first and the last number.
        lock: Held while it is counted, but not while it is read. Default: None.

    Returns:
        Whether that was enough; see `FanTally`.
    """
    assert partition_id is not None
    if reads:
        found = read(batch)
        with lock or nullcontext():
            return tally.add(consumer, partition_id, *found)
    numbers = batch[0].sequence_number or 0, batch[-1].sequence_number or 0
    with lock or nullcontext():
        return tally.add_unread(consumer, partition_id, *numbers, len(batch))
