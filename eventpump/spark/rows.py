"""Received events as Spark's rows: encoded messages to Arrow, column by column."""

from __future__ import annotations

import base64
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpump.amqp.message import AmqpSequence, AmqpValue, Data
from eventpump.amqp.types import Described, Symbol, Timestamp, UByte, UInt, ULong, UShort
from eventpump.dialect.names import PUBLISHER
from eventpump.events import ENQUEUED_TIME, OFFSET, PARTITION_KEY, SEQUENCE_NUMBER, ReceivedEvent

_MAP: Final = pa.map_(pa.string(), pa.string())

COLUMNS: Final[Mapping[str, pa.DataType]] = MappingProxyType(
    {
        "body": pa.binary(),
        "partition": pa.string(),
        "offset": pa.string(),
        "sequenceNumber": pa.int64(),
        "enqueuedTime": pa.timestamp("us", tz="UTC"),
        "publisher": pa.string(),
        "partitionKey": pa.string(),
        "properties": _MAP,
        "systemProperties": _MAP,
    }
)
"""The source's columns in their order, all nullable, as Microsoft's Scala connector has them; see `DDL`."""

DDL: Final = (
    "body BINARY, partition STRING, offset STRING, sequenceNumber BIGINT, enqueuedTime TIMESTAMP, publisher STRING, "
    "partitionKey STRING, properties MAP<STRING, STRING>, systemProperties MAP<STRING, STRING>"
)
"""The same as Spark writes it."""


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Give the Arrow schema of some of the columns, in the order given; equal to what Spark makes of its own."""
    return pa.schema([(column, COLUMNS[column]) for column in columns])


@dataclass(frozen=True, slots=True, eq=False)
class PackedEvents:
    """Encoded messages end to end: one object however many they are.

    :param data: the messages, joined.
    :param lengths: of each, in bytes.
    """

    data: bytes
    lengths: npt.NDArray[np.int64]

    @classmethod
    def pack(cls, messages: Sequence[bytes]) -> PackedEvents:
        """Join messages. They must come to less than 2 GiB."""
        return cls(b"".join(messages), np.fromiter(map(len, messages), np.int64, len(messages)))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def size(self) -> int:
        """The bytes it takes."""
        return len(self.data) + self.lengths.nbytes


class RowEncoder:
    """Makes Arrow batches of one hub partition's events. Columns that are not asked for are not decoded.

    :param partition_id: the hub partition.
    :param columns: some of `COLUMNS`, in any order.
    """

    def __init__(self, partition_id: str, columns: Sequence[str]) -> None:
        self._partition_id = partition_id
        self.schema = arrow_schema(columns)

    def encode(self, events: PackedEvents) -> pa.RecordBatch:
        """Make a batch with a row per event.

        :raises EventError: a message cannot be decoded; it names the partition.
        """
        ends = np.cumsum(events.lengths)
        found = [
            ReceivedEvent(events.data[start:end])
            for start, end in zip((ends - events.lengths).tolist(), ends.tolist(), strict=True)
        ]
        arrays = []
        for field in self.schema:
            if field.name == "partition":
                values = [self._partition_id] * len(found)
            else:
                values = [_READERS[field.name](event) for event in found]
            arrays.append(pa.array(values, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


# ------------------------------------------------------------------------------------------ one event's values


def body_of(event: ReceivedEvent) -> bytes | None:
    """Give a body's bytes: of data its sections joined, of a value or sequence its text (see `text_of`) in UTF-8."""
    match event.raw_message.body:
        case None:
            return None
        case Data(parts):
            return b"".join(parts)
        case AmqpValue(bytes() as value):
            return bytes(value)
        case AmqpValue() | AmqpSequence():
            text = text_of(event.value)
            return None if text is None else text.encode()


def text_of(value: Any) -> str | None:
    """Give a value's text: of text and unsigned integers itself, of everything else JSON.

    In JSON, binary is base64, a timestamp ISO 8601 in UTC, a UUID its text, a described value an object of two members.
    """
    match value:
        case None:
            return None
        case str():
            return str(value)
        case UByte() | UShort() | UInt() | ULong():
            return str(int(value))
        case _:
            return json.dumps(_jsonable(value), ensure_ascii=False, separators=(",", ":"))


def _jsonable(value: Any) -> Any:
    match value:
        case None | bool():
            return value
        case str():
            return str(value)
        case Timestamp():
            return value.to_datetime().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        case int():
            return int(value)
        case float():
            number = float(value)
            return number if math.isfinite(number) else str(number)
        case bytes():
            return base64.b64encode(value).decode()
        case uuid.UUID():
            return str(value)
        case list():
            return [_jsonable(item) for item in value]
        case dict():
            return {text_of(key) or "null": _jsonable(item) for key, item in value.items()}
        case Described():
            return {"descriptor": _jsonable(value.descriptor), "value": _jsonable(value.value)}
        case _:
            raise AssertionError(f"the decoder makes no {type(value).__name__}")


def _annotation(name: Symbol) -> Callable[[ReceivedEvent], str | None]:
    return lambda event: text_of((event.raw_message.message_annotations or {}).get(name))


def _map_of(values: Mapping[Any, Any]) -> list[tuple[str, str | None]]:
    return [(text_of(key) or "null", text_of(value)) for key, value in values.items()]


_OWN_COLUMNS: Final = frozenset({SEQUENCE_NUMBER, OFFSET, ENQUEUED_TIME})


def _system_properties(event: ReceivedEvent) -> list[tuple[str, str | None]]:
    return _map_of({name: value for name, value in event.system_properties.items() if name not in _OWN_COLUMNS})


_READERS: Final[Mapping[str, Callable[[ReceivedEvent], Any]]] = {
    "body": body_of,
    "offset": lambda event: event.offset,
    "sequenceNumber": lambda event: event.sequence_number,
    "enqueuedTime": lambda event: event.enqueued_time,
    "publisher": _annotation(PUBLISHER),
    "partitionKey": _annotation(PARTITION_KEY),
    "properties": lambda event: _map_of(event.properties),
    "systemProperties": _system_properties,
}
