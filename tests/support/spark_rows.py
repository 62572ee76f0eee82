"""Spark's rows as plain values: those that the encoder makes, and those of the general decoder, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa

from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, PUBLISHER, SEQUENCE_NUMBER
from eventpump.spark.source.rows import COLUMNS, PartitionMessages, RowEncoder, body_of, text_of

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
PARTITION: Final = "7"
HUB: Final = "telemetry"
_OWN: Final = frozenset({SEQUENCE_NUMBER, OFFSET, ENQUEUED_TIME})
_KINDS: Final = {bool: "boolean", int: "long", float: "double", bytes: "binary", dict: "map"}
_MAPS: Final = ("properties", "systemProperties", "propertyTypes", "systemPropertyTypes")


def row_encoder(columns: Sequence[str]) -> RowEncoder:
    """Return an encoder of the columns of one partition and hub."""
    return RowEncoder(columns, hub=HUB)


def rows_of(encoder: RowEncoder, messages: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the rows that an encoder makes of messages side by side. The batch is checked too.

    Raises:
        EventError: A message cannot be decoded.
    """
    batch = encoder.encode([PartitionMessages(PARTITION, messages)])
    batch.validate(full=True)
    names = batch.schema.names
    assert batch.schema.equals(pa.schema([(name, COLUMNS[name]) for name in names]))
    plain = {}
    for name in names:
        column = batch.column(name)
        plain[name] = (column.cast(pa.int64()) if name == "enqueuedTime" else column).to_pylist()
        if name in _MAPS:
            assert all(len(dict(entries)) == len(entries) for entries in plain[name]), "a map has a key twice"
            plain[name] = [dict(entries) for entries in plain[name]]
    return [{name: plain[name][row] for name in names} for row in range(len(messages))]


def expected_row(raw: bytes) -> dict[str, Any]:
    """Return the row of all columns that the general decoder makes of one event.

    Raises:
        EventError: It cannot be decoded.
    """
    event = ReceivedEvent(raw)
    annotations = event.raw_message.message_annotations or {}
    properties = {_key(name): value for name, value in event.properties.items()}
    system = {_key(name): value for name, value in event.system_properties.items() if name not in _OWN}
    return {
        "body": body_of(event),
        "partition": PARTITION,
        "hub": HUB,
        "offset": event.offset,
        "sequenceNumber": event.sequence_number,
        "enqueuedTime": (event.enqueued_time - EPOCH) // timedelta(microseconds=1),
        "publisher": text_of(annotations.get(PUBLISHER)),
        "partitionKey": text_of(annotations.get(PARTITION_KEY)),
        "properties": {name: text_of(value) for name, value in properties.items()},
        "systemProperties": {name: text_of(value) for name, value in system.items()},
        "propertyTypes": _types(properties),
        "systemPropertyTypes": _types(system),
    }


def _key(name: Any) -> str:
    return "null" if name is None else str(text_of(name))


def _types(values: dict[str, Any]) -> dict[str, str]:
    return {
        name: _KINDS.get(type(value), type(value).__name__.lower())
        for name, value in values.items()
        if value is not None and type(value) is not str
    }
