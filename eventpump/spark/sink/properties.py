"""Encodes the properties of rows: application properties and AMQP's standard ones, from columns and from their text."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from itertools import repeat
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import pyarrow as pa

from eventpump.amqp.codec import decode, encode
from eventpump.amqp.message import Properties
from eventpump.amqp.sections import APPLICATION_PROPERTIES, section
from eventpump.amqp.types import (
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Float,
    Int,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)
from eventpump.errors import EventError

K = TypeVar("K")

Pairs: TypeAlias = tuple[tuple[str, str | None], ...]

_NULL: Final = encode(None)

_AMQP: Final[Mapping[pa.DataType, Callable[[Any], Any]]] = MappingProxyType(
    {
        pa.bool_(): bool,
        pa.int8(): Byte,
        pa.int16(): Short,
        pa.int32(): Int,
        pa.int64(): int,
        pa.float32(): Float,
        pa.float64(): float,
        pa.string(): str,
        pa.large_string(): str,
        pa.binary(): bytes,
        pa.large_binary(): bytes,
    }
)
"""The AMQP type of a value, by its type in Arrow."""


def _encoded_values(array: pa.Array) -> list[bytes]:
    """Encode values of a simple type."""
    if pa.types.is_timestamp(array.type):
        micros = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64()).to_pylist()
        return [_NULL if each is None else encode(Timestamp(each // 1000)) for each in micros]
    typed = _AMQP[array.type]
    return [_NULL if each is None else encode(typed(each)) for each in array.to_pylist()]


def _spans(array: pa.MapArray) -> Iterator[tuple[int, int]]:
    """Return where the entries of each row begin and end; nothing is between them for a null."""
    ends = array.offsets.to_pylist()
    for is_there, start, end in zip(array.is_valid().to_pylist(), ends, ends[1:], strict=False):
        yield (start, end) if is_there else (start, start)


def pairs_of(array: pa.MapArray) -> Iterator[Pairs]:
    """Return the entries of each row, sorted by name."""
    names, values = array.keys.to_pylist(), array.items.to_pylist()
    for start, end in _spans(array):
        yield tuple(sorted(zip(names[start:end], values[start:end], strict=True), key=itemgetter(0)))


def sections_of_texts(array: pa.MapArray) -> Iterator[bytes]:
    """Return the application properties of each row, of texts; empty if it has none."""
    ends = array.offsets.to_pylist()  # not by `pairs_of`: these are most properties
    names, values = array.keys.to_pylist(), array.items.to_pylist()
    for is_there, start, end in zip(array.is_valid().to_pylist(), ends, ends[1:], strict=False):
        if is_there and start < end:
            yield SECTIONS[tuple(sorted(zip(names[start:end], values[start:end], strict=True), key=itemgetter(0)))]
        else:
            yield b""


def sections_of_maps(array: pa.MapArray) -> Iterator[bytes]:
    """Return the application properties of each row, of values of one simple type; empty if it has none."""
    names, values = array.keys.to_pylist(), _encoded_values(array.items)
    for start, end in _spans(array):
        pairs = sorted(zip(names[start:end], values[start:end], strict=True), key=itemgetter(0))
        yield _SECTIONS_OF_ENCODED[tuple(pairs)] if pairs else b""


def sections_of_structs(array: pa.StructArray) -> Iterator[bytes]:
    """Return the application properties of each row, a field each, nulls left out; empty if it has none."""
    names = [field.name for field in array.type]
    columns = dict(zip(names, map(_encoded_values, array.flatten()), strict=True))
    if not columns:
        yield from repeat(b"", len(array))
        return
    ordered = sorted(columns)
    for row in zip(*(columns[name] for name in ordered), strict=True):
        pairs = tuple((name, value) for name, value in zip(ordered, row, strict=True) if value != _NULL)
        yield _SECTIONS_OF_ENCODED[pairs] if pairs else b""


class _Sections(dict[K, bytes]):
    """Encoded application properties by what they are made of, because events of one kind have the same.

    Large ones are not kept, nor more than 4,096, so that they never take more than a few MiB.

    Args:
        make: Encodes properties.
        size: Returns the size of what they are made of, where it may be larger than what is made.
    """

    _MOST: Final = 4096
    _LARGEST: Final = 1024

    def __init__(self, make: Callable[[K], bytes], size: Callable[[K], int] | None = None) -> None:
        super().__init__()
        self._make = make
        self._size = size

    def __missing__(self, properties: K) -> bytes:
        made = self._make(properties)
        if len(made) <= self._LARGEST and (self._size is None or self._size(properties) <= self._LARGEST):
            if len(self) >= self._MOST:
                self.clear()
            self[properties] = made
        return made


def _size(part: Any) -> int:
    """Return the length of all texts and bytes in tuples."""
    if part is None:
        return 0
    return sum(map(_size, part)) if isinstance(part, tuple) else len(part)


def _section(pairs: Pairs) -> bytes:
    return section(APPLICATION_PROPERTIES, dict(pairs))


def _section_of_encoded(pairs: tuple[tuple[str, bytes], ...]) -> bytes:
    return section(APPLICATION_PROPERTIES, {name: decode(value)[0] for name, value in pairs})


def _typed_section(given: tuple[Pairs, Pairs]) -> bytes:
    texts, types = given[0], dict(given[1])
    return section(APPLICATION_PROPERTIES, {name: value_of(name, text, types.get(name)) for name, text in texts})


SECTIONS: Final = _Sections(_section)
_SECTIONS_OF_ENCODED: Final = _Sections(_section_of_encoded)
"""By encoded values: as objects, 1 and True would be the same key."""
TYPED_SECTIONS: Final = _Sections(_typed_section, _size)
"""By texts and their types; a text that is not of its type raises `EventError`."""


# ------------------------------------------------------------------------------------------ values from their text


def _number(text: str) -> int:
    if not re.fullmatch("-?[0-9]{1,20}", text):
        raise ValueError("not a number")
    return int(text)


def _unquoted(text: str) -> str:
    """Return a text that may be in JSON, as the source writes values that are no text."""
    found = json.loads(text) if text.startswith('"') else text
    if not isinstance(found, str):
        raise ValueError("not a text")
    return found


def _bytes(text: str) -> bytes:
    return base64.b64decode(_unquoted(text), validate=True)


def _moment(text: str) -> Timestamp:
    found = datetime.fromisoformat(_unquoted(text))
    return Timestamp.from_datetime(found if found.tzinfo is not None else found.replace(tzinfo=UTC))


_OF_TEXT: Final[Mapping[str, Callable[[str], Any]]] = MappingProxyType(
    {
        "string": str,
        "symbol": Symbol,
        "char": Char,
        "boolean": lambda text: {"true": True, "false": False}[text],
        "ubyte": lambda text: UByte(_number(text)),
        "ushort": lambda text: UShort(_number(text)),
        "uint": lambda text: UInt(_number(text)),
        "ulong": lambda text: ULong(_number(text)),
        "byte": lambda text: Byte(_number(text)),
        "short": lambda text: Short(_number(text)),
        "int": lambda text: Int(_number(text)),
        "long": _number,
        "float": lambda text: Float(_unquoted(text)),
        "double": lambda text: float(_unquoted(text)),
        "timestamp": _moment,
        "uuid": lambda text: uuid.UUID(_unquoted(text)),
        "binary": _bytes,
        "decimal32": lambda text: Decimal32(_bytes(text)),
        "decimal64": lambda text: Decimal64(_bytes(text)),
        "decimal128": lambda text: Decimal128(_bytes(text)),
    }
)
"""What makes a value of its text, by the AMQP type. The text is that of the source's columns."""


def value_of(name: str, text: str | None, kind: str | None) -> Any:
    """Return the value that a text stands for.

    Args:
        text: As the source writes it: see `eventpump.spark.source.rows.text_of`. None for null.

    Raises:
        EventError: The text is not of this type, or values of the type cannot be made of a text.
    """
    if text is None or kind is None:
        return text
    make = _OF_TEXT.get(kind)
    if make is None:
        raise EventError(f"{name!r:.40} is of the type {kind:.40}; it must be one of {', '.join(_OF_TEXT)}")
    try:
        made = make(text)
        encode(made)
    except (ValueError, KeyError, TypeError, OverflowError, EventError):
        raise EventError(f"the value of {name!r:.40} is not the text of AMQP's type {kind}") from None
    return made


# --------------------------------------------------------------------------------------------- standard properties

_FIELDS: Final = MappingProxyType({each.name.replace("_", "-"): each.name for each in fields(Properties)})
"""The fields of the properties section, by their names in AMQP, which the source's rows have."""
_NUMBERS: Final = MappingProxyType({each.name: number for number, each in enumerate(fields(Properties), 1)})
"""How many items the list of fields has up to each of them."""
_OF_FIELD: Final = MappingProxyType(
    {
        "subject": "string",
        "group_id": "string",
        "reply_to_group_id": "string",
        "user_id": "binary",
        "absolute_expiry_time": "timestamp",
        "creation_time": "timestamp",
        "group_sequence": "uint",
        "content_type": "symbol",
        "content_encoding": "symbol",
    }
)
"""The types of the fields that always have the same type: all but the ids and addresses."""


def standard_values(texts: Pairs, types: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the standard properties among the source's system properties.
    Raises `EventError` if a text is not of its type."""
    return {
        field: value_of(name, text, _OF_FIELD.get(field) or types.get(name))
        for name, text in texts
        if text is not None and (field := _FIELDS.get(name)) is not None
    }


def listed_fields(values: Mapping[str, Any]) -> list[Any]:
    """Return the list that is the properties section of fields (3.2.4)."""
    items: list[Any] = [None] * max(map(_NUMBERS.__getitem__, values))
    for field, value in values.items():
        items[_NUMBERS[field] - 1] = value
    return items


def id_of(value: str | bytes | int) -> str | bytes | ULong:
    if not isinstance(value, int):
        return value
    try:
        return ULong(value)
    except ValueError:
        raise EventError(f"the id {value} is negative; as a number, an id is unsigned") from None
