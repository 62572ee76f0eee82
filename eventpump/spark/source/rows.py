"""Converts received events to Spark's rows: encoded messages to Arrow, column by column."""

from __future__ import annotations

import base64
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eventpump.amqp.codec import AmqpDecodeError, decode
from eventpump.amqp.message import AmqpSequence, AmqpValue, Data, Properties
from eventpump.amqp.sections import APPLICATION_PROPERTIES, DATA, MESSAGE_ANNOTATIONS, PROPERTIES
from eventpump.amqp.types import Described, Symbol, Timestamp, UByte, UInt, ULong, UShort
from eventpump.errors import DecodeError, EventError
from eventpump.eventhubs.codecs import PayloadCodec, event_maker
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, PUBLISHER, SEQUENCE_NUMBER
from eventpump.spark.source.columnar import PADDING, TEXT_KINDS, Bools, Entries, Ints, Values, Walk
from eventpump.spark.source.schema import ALL_TYPES

_ARROW: Final = {
    "BINARY": pa.binary(),
    "STRING": pa.string(),
    "BIGINT": pa.int64(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
    "MAP<STRING, STRING>": pa.map_(pa.string(), pa.string()),
}

COLUMNS: Final[Mapping[str, pa.DataType]] = MappingProxyType({name: _ARROW[kind] for name, kind in ALL_TYPES.items()})
"""The columns of :data:`eventpump.spark.source.schema.ALL_TYPES` in Arrow."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CALENDAR: Final = (-62_135_596_800_000, 253_402_300_799_999)
"""The range of milliseconds that `datetime` supports, as for `ReceivedEvent.enqueued_time`."""

_NULL, _SMALL_LONG, _LONG, _TIMESTAMP = 0x40, 0x55, 0x81, 0x83
_SEQUENCE_NUMBER, _ENQUEUED_TIME = SEQUENCE_NUMBER.encode(), ENQUEUED_TIME.encode()
_OWN_NAMES: Final = (_SEQUENCE_NUMBER, OFFSET.encode(), _ENQUEUED_TIME)
_STANDARD_NAMES: Final = tuple(field.name.replace("_", "-").encode() for field in fields(Properties))
_CONTENT_ENCODING: Final = b"content-encoding"
_TEXTS: Final = {"publisher": PUBLISHER, "partitionKey": PARTITION_KEY}
"""The columns of an annotation that is text, or null."""

_NO_ITEMS: Final = pa.nulls(0, pa.string())  # pa.array would load pandas, and the driver's workers import this too


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of some of the columns, in the order given; equal to Spark's own conversion of its
    schema."""
    return pa.schema([(column, COLUMNS[column]) for column in columns])


class PartitionMessages(NamedTuple):
    """Encoded messages of one hub partition, in order."""

    partition_id: str
    messages: Sequence[bytes]


class RowEncoder:
    """Converts a hub's events to Arrow batches. Columns that are not requested are not decoded.

    Args:
        codecs: Decode the bodies of events that name them. Default: none.
    """

    def __init__(self, columns: Sequence[str], codecs: Sequence[PayloadCodec] = (), hub: str = "") -> None:
        self._hub = hub
        self._codecs = codecs
        self.schema = arrow_schema(columns)

    def encode(self, events: Sequence[PartitionMessages]) -> pa.RecordBatch:
        """Return a batch with one row per event, in the order given. Their total size must be less than 2 GiB.

        Raises:
            EventError: An event cannot be decoded: its partition and number are in the text.
        """
        made = _Batch(events, self._codecs, self._hub)
        return pa.RecordBatch.from_arrays([made.column(name) for name in self.schema.names], schema=self.schema)


class _Batch:
    """The columns of one batch, from the values that the walk finds, and from the general decoder's for odd
    messages."""

    def __init__(self, events: Sequence[PartitionMessages], codecs: Sequence[PayloadCodec], hub: str) -> None:
        messages = list(chain.from_iterable(each.messages for each in events))
        self._data = b"".join((*messages, bytes(PADDING)))
        self._lengths = np.fromiter(map(len, messages), np.int64, len(messages))
        self._partition_ids = [each.partition_id for each in events]
        # For each row, the index of its partition.
        self._partitions = np.repeat(np.arange(len(events)), [len(each.messages) for each in events])
        self._hub = hub
        self._codecs = codecs
        self._decoded: dict[int, ReceivedEvent] = {}

    @cached_property
    def _walk(self) -> Walk:
        return Walk(self._data, self._lengths)

    def column(self, name: str) -> pa.Array:
        """Return a column."""
        match name:
            case "partition":
                return pa.array(self._partition_ids, pa.string()).take(pa.array(self._partitions))
            case "hub":
                return pa.array([self._hub], pa.string()).take(pa.array(np.zeros(len(self._lengths), np.int32)))
            case "body":
                return self._body()
            case "sequenceNumber":
                return pa.array(self._sequence_numbers(), pa.int64())
            case "enqueuedTime":
                return pa.array(self._enqueued_times(), pa.int64()).cast(COLUMNS[name])
            case "offset":
                return self._text(name, OFFSET, is_required=True)
            case _ if name in _TEXTS:
                return self._text(name, _TEXTS[name])
            case "properties":
                return self._map(name, self._properties, self._walked_map)
            case "propertyTypes":
                return self._map(name, self._properties, self._walked_types)
            case "systemPropertyTypes":
                return self._map(name, self._system_properties, self._walked_types)
            case _:
                return self._map(name, self._system_properties, self._walked_map)

    # -------------------------------------------------------------------------------------- what walks give

    @cached_property
    def _annotations(self) -> Entries:
        return self._map_section(MESSAGE_ANNOTATIONS)

    @cached_property
    def _properties(self) -> Entries:
        return self._map_section(APPLICATION_PROPERTIES)

    def _map_section(self, code: int) -> Entries:
        section = self._walk.section(code)
        return Entries([], []) if section is None else self._walk.map_entries(section)

    @cached_property
    def _system_properties(self) -> Entries:
        section = self._walk.section(PROPERTIES)
        found = self._annotations
        # The last one is for -1, which is no entry.
        kept = np.array([*(-1 if name in _OWN_NAMES else index for index, name in enumerate(self._walk.names)), -1])
        names = [kept[each] for each in found.names]
        values = list(found.values)
        if section is not None:
            standard = self._walk.list_entries(section, _STANDARD_NAMES)
            if self._codecs:  # what is decoded is no longer named
                self._walk.odd |= self._walk.entry(standard, _CONTENT_ENCODING).kind != 0
            names += standard.names
            values += standard.values
        entries = Entries(names, values)
        self._walk.refuse_repeated(entries)
        return entries

    # -------------------------------------------------------------------------------------- kinds of columns

    def _sequence_numbers(self) -> Ints:
        found = self._walk.entry(self._annotations, _SEQUENCE_NUMBER)
        numbers = self._walk.longs(found.begin)
        small = found.kind == _SMALL_LONG
        if small.any():
            numbers = np.where(small, self._walk.small_longs(found.begin), numbers)
        return self._with_odd("sequenceNumber", numbers, (found.kind != _LONG) & ~small)

    def _enqueued_times(self) -> Ints:
        found = self._walk.entry(self._annotations, _ENQUEUED_TIME)
        moments = self._walk.longs(found.begin)
        micros = np.clip(moments, *_CALENDAR) * 1000
        micros[moments > _CALENDAR[1]] += 999
        return self._with_odd("enqueuedTime", micros, found.kind != _TIMESTAMP)

    def _with_odd(self, column: str, values: Ints, odd: Bools) -> Ints:
        """Insert the general decoder's values of the rows that are odd for this column."""
        rows = np.flatnonzero(odd | self._walk.odd)
        if len(rows):
            read = _READERS[column]
            values[rows] = [self._read(row, read) for row in rows.tolist()]
        return values

    def _body(self) -> pa.Array:
        found = self._walk.section(DATA)
        if found is None:
            found = self._walk.no_values()
        odd = found.kind == 0
        if self._codecs and (section := self._walk.section(PROPERTIES)) is not None:
            encoding = self._walk.entry(self._walk.list_entries(section, _STANDARD_NAMES), _CONTENT_ENCODING).kind
            odd |= (encoding != 0) & (encoding != _NULL)
        return self._copied("body", found, odd, np.zeros(self._walk.count, np.bool_))

    def _text(self, column: str, name: Symbol, *, is_required: bool = False) -> pa.Array:
        found = self._walk.entry(self._annotations, name.encode())
        is_null = (found.kind == 0) | (found.kind == _NULL)
        odd = ~TEXT_KINDS[found.kind] if is_required else ~(TEXT_KINDS[found.kind] | is_null)
        return self._copied(column, found, odd, is_null)

    def _copied(self, column: str, found: Values, odd: Bools, is_null: Bools) -> pa.Array:
        odd = odd | self._walk.odd
        made = self._cut(self._walk.starts, found.begin, found.end, is_null | odd, COLUMNS[column])
        if odd.any():
            read = _READERS[column]
            values = [self._read(row, read) for row in np.flatnonzero(odd).tolist()]
            made = pc.replace_with_mask(made, pa.array(odd), pa.array(values, made.type))
        return made

    def _map(self, column: str, entries: Entries, walked: Callable[[Entries], pa.Array]) -> pa.Array:
        odd = self._walk.odd
        made = walked(entries)
        if not odd.any():
            return made
        read = _READERS[column]
        rows = np.flatnonzero(odd)
        others = pa.array([self._read(row, read) for row in rows.tolist()], made.type)
        places = np.arange(self._walk.count)
        places[rows] = self._walk.count + np.arange(len(rows))
        return pa.concat_arrays([made, others]).take(pa.array(places))

    def _walked_map(self, entries: Entries) -> pa.Array:
        """Return the maps of the messages that are not odd; those of the others are empty."""
        count = self._walk.count
        if not entries.names:
            return pa.MapArray.from_arrays(np.zeros(count + 1, np.int32), pa.array([], pa.string()), _NO_ITEMS)
        # One row of each of these is one message: row by row, they are the entries in order.
        names = np.stack(entries.names, axis=1)
        present = (names >= 0) & ~self._walk.odd[:, np.newaxis]
        kind, at, begin, end = (
            np.stack([getattr(each, part) for each in entries.values], axis=1)[present]
            for part in ("kind", "at", "begin", "end")
        )
        is_text = TEXT_KINDS[kind]
        items = self._cut(at, begin, end, ~is_text, pa.string())
        other = ~is_text
        if other.any():
            texts = self._other_texts(at[other].tolist(), end[other].tolist())
            items = pc.replace_with_mask(items, pa.array(other), pa.array(texts, pa.string()))
        return self._maps(names, present, items)

    def _walked_types(self, entries: Entries) -> pa.Array:
        """Return the types of what is not text; as :meth:`_walked_map`."""
        if not entries.names:
            return self._walked_map(entries)
        names = np.stack(entries.names, axis=1)
        kinds = _TYPE_INDEX[np.stack([each.kind for each in entries.values], axis=1)]
        present = (names >= 0) & ~self._walk.odd[:, np.newaxis] & (kinds > 0)
        return self._maps(names, present, pa.array(_TYPE_NAMES, pa.string()).take(pa.array(kinds[present])))

    def _maps(self, names: Ints, present: Bools, items: pa.Array) -> pa.Array:
        """Return one map per message.

        Args:
            names: For every message and round, the index of the entry's name.
            present: Which of them are entries.
        """
        found = names[present]
        # The walk has the names of other sections, too: those need not be UTF-8 for this column.
        uses = np.bincount(found, minlength=len(self._walk.names)).tolist()
        try:
            known = [name.decode() if count else "" for name, count in zip(self._walk.names, uses, strict=True)]
        except UnicodeDecodeError:
            raise self._undecodable() from None
        keys = pa.array(known, pa.string()).take(pa.array(found))
        offsets = np.zeros(self._walk.count + 1, np.int32)
        np.cumsum(present.sum(axis=1), out=offsets[1:])
        return pa.MapArray.from_arrays(offsets, keys, items)

    def _other_texts(self, starts: list[int], ends: list[int]) -> list[str | None]:
        """Return the texts of values that are not text. Equal values, such as flags, are converted once."""
        known: dict[bytes, str | None] = {}
        texts: list[str | None] = []
        for start, end in zip(starts, ends, strict=True):
            raw = self._data[start:end]
            if raw not in known:
                try:
                    known[raw] = text_of(decode(raw)[0])
                except AmqpDecodeError:
                    raise self._undecodable() from None
            texts.append(known[raw])
        return texts

    def _cut(self, places: Ints, begin: Ints, end: Ints, is_null: Bools, kind: pa.DataType) -> pa.Array:
        """Copy pieces of the buffer, one per place (among them the positions of nulls), in increasing order."""
        count = len(places)
        if is_null.all():
            return pa.nulls(count, kind)
        cuts = np.empty(2 * count + 1, np.int32)
        cuts[0:-1:2] = np.where(is_null, places, begin)
        cuts[1::2] = np.where(is_null, places, end)
        cuts[-1] = len(self._data)
        pieces = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(cuts), pa.py_buffer(self._data)])
        made = pieces.take(pa.array(np.arange(0, 2 * count, 2), mask=is_null if is_null.any() else None))
        if kind == pa.binary():
            return made
        try:
            return made.cast(kind)
        except pa.ArrowInvalid:
            raise self._undecodable() from None

    # -------------------------------------------------------------------------------------- one at a time

    def _event(self, row: int) -> ReceivedEvent:
        event = self._decoded.get(row)
        if event is None:
            start, end = int(self._walk.starts[row]), int(self._walk.ends[row])
            make = event_maker(self._codecs, self._partition_of(row))
            event = self._decoded[row] = make(self._data[start:end], None)
        return event

    def _read(self, row: int, read: Callable[[ReceivedEvent], Any]) -> Any:
        try:
            return read(self._event(row))
        except DecodeError:
            raise  # it names the event
        except EventError as error:
            raise EventError(f"{self._where(row)}: {error}") from error

    def _where(self, row: int) -> str:
        try:
            return f"partition {self._partition_of(row)}, event {self._event(row).sequence_number}"
        except EventError:
            return f"partition {self._partition_of(row)}, an event without a number"

    def _partition_of(self, row: int) -> str:
        return self._partition_ids[int(self._partitions[row])]

    def _undecodable(self) -> EventError:
        """Return the error for the event whose text is not UTF-8."""
        for row in range(self._walk.count):
            try:
                _ = self._event(row).raw_message
            except EventError as error:
                return EventError(f"{self._where(row)}: {error}")
        partitions = ", ".join(dict.fromkeys(self._partition_ids))
        return EventError(f"partition {partitions}: an event holds text that is not UTF-8")


# ------------------------------------------------------------------------------------------ one event's values


def body_of(event: ReceivedEvent) -> bytes | None:
    """Return a body's bytes: the joined data sections, or the text (see `text_of`) of a value or sequence in UTF-8."""
    match event.raw_message.body:
        case None:
            return None
        case Data():
            return event.body
        case AmqpValue(bytes() as value):
            return bytes(value)
        case AmqpValue() | AmqpSequence():
            text = text_of(event.value)
            return None if text is None else text.encode()


def text_of(value: Any) -> str | None:
    """Return a value's text: text and unsigned integers unchanged, every other value as JSON.

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
            return {_key_of(key): _jsonable(item) for key, item in value.items()}
        case Described():
            return {"descriptor": _jsonable(value.descriptor), "value": _jsonable(value.value)}
        case _:
            raise AssertionError(f"the decoder never returns {type(value).__name__}")


_CONSTRUCTORS: Final[Mapping[str, Sequence[int]]] = {
    "boolean": (0x41, 0x42, 0x56),
    "ubyte": (0x50,),
    "ushort": (0x60,),
    "uint": (0x43, 0x52, 0x70),
    "ulong": (0x44, 0x53, 0x80),
    "byte": (0x51,),
    "short": (0x61,),
    "int": (0x54, 0x71),
    "long": (0x55, 0x81),
    "float": (0x72,),
    "double": (0x82,),
    "char": (0x73,),
    "timestamp": (0x83,),
    "uuid": (0x98,),
    "binary": (0xA0, 0xB0),
    "symbol": (0xA3, 0xB3),
    "decimal32": (0x74,),
    "decimal64": (0x84,),
    "decimal128": (0x94,),
    "list": (0x45, 0xC0, 0xD0),
    "map": (0xC1, 0xD1),
    "array": (0xE0, 0xF0),
}
"""The constructors of AMQP's types (1.6) but null, string and described types, by their names."""
_TYPE_NAMES: Final = ["", *_CONSTRUCTORS]
_TYPE_INDEX: Final = np.zeros(256, np.int32)
"""The index of a type's name, by constructor; 0 for null and string."""
for _index, _codes in enumerate(_CONSTRUCTORS.values(), 1):
    _TYPE_INDEX[list(_codes)] = _index
_PYTHON_TYPES: Final = {bool: "boolean", int: "long", float: "double", bytes: "binary", uuid.UUID: "uuid", dict: "map"}


def type_of(value: Any) -> str | None:
    """Return the name of a decoded value's AMQP type; None for null and text, whose column of values is enough."""
    kind = type(value)
    return None if value is None or kind is str else _PYTHON_TYPES.get(kind) or kind.__name__.lower()


def _types_of(values: Mapping[Any, Any]) -> list[tuple[str, str]]:
    found = {_key_of(name): type_of(value) for name, value in values.items()}
    return [(name, kind) for name, kind in found.items() if kind is not None]


def _annotation(name: Symbol) -> Callable[[ReceivedEvent], str | None]:
    return lambda event: text_of((event.raw_message.message_annotations or {}).get(name))


def _key_of(value: Any) -> str:
    text = text_of(value)
    return "null" if text is None else text


def _map_of(values: Mapping[Any, Any]) -> list[tuple[str, str | None]]:
    # Through a dictionary: two names may have the same text, and keys in Spark's maps are unique.
    return list({_key_of(name): text_of(value) for name, value in values.items()}.items())


_OWN_COLUMNS: Final = frozenset({SEQUENCE_NUMBER, OFFSET, ENQUEUED_TIME})


def _system_values(event: ReceivedEvent) -> dict[Any, Any]:
    """Return the system properties that no other column has, with a content encoding without what is decoded."""
    found = {name: value for name, value in event.system_properties.items() if name not in _OWN_COLUMNS}
    encoding = _CONTENT_ENCODING.decode()
    if encoding in found and type(event) is not ReceivedEvent:  # decoded by codecs
        rest = (event.to_event_data().standard or {}).get("content_encoding")
        if rest is None:
            del found[encoding]
        elif rest != found[encoding]:
            found[encoding] = Symbol(rest)
    return found


def _micros(event: ReceivedEvent) -> int:
    return (event.enqueued_time - _EPOCH) // timedelta(microseconds=1)


_READERS: Final[Mapping[str, Callable[[ReceivedEvent], Any]]] = {
    "body": body_of,
    "offset": lambda event: event.offset,
    "sequenceNumber": lambda event: event.sequence_number,
    "enqueuedTime": _micros,
    **{column: _annotation(name) for column, name in _TEXTS.items()},
    "properties": lambda event: _map_of(event.properties),
    "systemProperties": lambda event: _map_of(_system_values(event)),
    "propertyTypes": lambda event: _types_of(event.properties),
    "systemPropertyTypes": lambda event: _types_of(_system_values(event)),
}
