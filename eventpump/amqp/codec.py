"""Encodes and decodes the AMQP 1.0 type system (AMQP 1.0, part 1).

Values are encoded in their compact forms. Decoding is strict: every length and count is checked against the bytes that
are there before an object is made. Nesting is bounded, and so is the number of values that one value holds, as few
bytes can make many objects. Bad data raises `AmqpDecodeError` only.
"""

from __future__ import annotations

import datetime
import struct
import uuid
from collections.abc import Callable
from typing import Any

from eventpump.amqp.types import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
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
from eventpump.compiled import core
from eventpump.errors import EventError, ProtocolError

MAX_DEPTH = 32
"""How deeply lists, maps, arrays and descriptions may nest."""
MAX_WEAK_KEYS = 256
"""How many keys of a map may be of a type whose hash a peer can foresee, and so make collide."""
MAX_ZERO_WIDTH = 16
"""How long an array of values without bytes (nulls, say) may be: its count is not covered by its size."""
MAX_DESCRIPTIONS = 4
"""How many descriptors the constructor of an array may have: each value gets its own objects for them, so that one byte
of it would create as many objects as there are descriptors."""
MAX_ITEMS = 1 << 20
"""How many values one value may hold, all levels together: as many as the largest event of a service that takes 1 MiB
can hold. The object of a value that takes one byte takes 64 bytes and more, and about a microsecond."""
_NEVER_COUNTED = MAX_ITEMS // (MAX_DESCRIPTIONS + 1)
"""Bytes in which there is no room for `MAX_ITEMS`: one byte makes `MAX_DESCRIPTIONS` objects and one more at most, in
an array whose constructor describes its values again and again."""


class AmqpDecodeError(ProtocolError):
    """The bytes are not an AMQP value."""

    def __init__(self, description: str) -> None:
        super().__init__("amqp:decode-error", description)


class EncodeError(EventError):
    """The Python value has no AMQP form."""


_pack_i16 = struct.Struct(">h").pack
_pack_u16 = struct.Struct(">H").pack
_pack_i32 = struct.Struct(">i").pack
_pack_u32 = struct.Struct(">I").pack
_pack_i64 = struct.Struct(">q").pack
_pack_u64 = struct.Struct(">Q").pack
_pack_f32 = struct.Struct(">f").pack
_pack_f64 = struct.Struct(">d").pack
_unpack_f = struct.Struct(">f").unpack_from
_unpack_d = struct.Struct(">d").unpack_from

# ---------------------------------------------------------------------------------------------- encoding


def _null(_value: Any, _depth: int) -> bytes:
    return b"\x40"


def _bool(value: Any, _depth: int) -> bytes:
    return b"\x41" if value else b"\x42"


def _ubyte(value: Any, _depth: int) -> bytes:
    return bytes((0x50, value))


def _ushort(value: Any, _depth: int) -> bytes:
    return b"\x60" + _pack_u16(value)


def _uint(value: Any, _depth: int) -> bytes:
    if value == 0:
        return b"\x43"
    return bytes((0x52, value)) if value < 256 else b"\x70" + _pack_u32(value)


def _ulong(value: Any, _depth: int) -> bytes:
    if value == 0:
        return b"\x44"
    return bytes((0x53, value)) if value < 256 else b"\x80" + _pack_u64(value)


def _byte(value: Any, _depth: int) -> bytes:
    return bytes((0x51, value & 0xFF))


def _short(value: Any, _depth: int) -> bytes:
    return b"\x61" + _pack_i16(value)


def _int(value: Any, _depth: int) -> bytes:
    return bytes((0x54, value & 0xFF)) if -128 <= value < 128 else b"\x71" + _pack_i32(value)


_SMALL_LONGS = tuple(bytes((0x55, byte)) for byte in range(256))
"""By the number from 0 to 127, and from -128 to -1 counted from the end."""


def _long(value: Any, _depth: int) -> bytes:
    if -128 <= value < 128:
        small: bytes = _SMALL_LONGS[value]
        return small
    try:
        return b"\x81" + _pack_i64(value)
    except struct.error:
        raise EncodeError(f"the integer {value} does not fit an AMQP long") from None


def _float(value: Any, _depth: int) -> bytes:
    try:
        return b"\x72" + _pack_f32(value)
    except OverflowError:
        raise EncodeError(f"{value!r} does not fit an AMQP float") from None


def _double(value: Any, _depth: int) -> bytes:
    return b"\x82" + _pack_f64(value)


def _char(value: Any, _depth: int) -> bytes:
    return b"\x73" + _pack_u32(ord(value))


def _timestamp(value: Any, _depth: int) -> bytes:
    return b"\x83" + _pack_i64(value)


def _datetime(value: Any, _depth: int) -> bytes:
    try:
        return b"\x83" + _pack_i64(Timestamp.from_datetime(value))
    except ValueError as error:
        raise EncodeError(str(error)) from None


def _uuid(value: Any, _depth: int) -> bytes:
    return b"\x98" + bytes(value.bytes)


def _sized(short: int, payload: bytes) -> bytes:
    size = len(payload)
    return bytes((short, size)) + payload if size < 256 else bytes((short + 0x10,)) + _pack_u32(size) + payload


def _binary(value: Any, _depth: int) -> bytes:
    return _sized(0xA0, bytes(value))


_SHORT_STRINGS = tuple(bytes((0xA1, size)) for size in range(256))


def _string(value: Any, _depth: int) -> bytes:
    try:
        encoded: bytes = value.encode()
    except UnicodeEncodeError:
        raise EncodeError("a string holds a lone surrogate, which UTF-8 cannot carry") from None
    size = len(encoded)
    return _SHORT_STRINGS[size] + encoded if size < 256 else _sized(0xA1, encoded)


def _symbol(value: Any, _depth: int) -> bytes:
    try:
        return _sized(0xA3, value.encode("ascii"))
    except UnicodeEncodeError:
        raise EncodeError(f"the symbol {str(value)!r} is not ASCII") from None


def _decimal(code: int) -> Callable[[Any, int], bytes]:
    prefix = bytes((code,))
    return lambda value, _depth: prefix + bytes(value)


def _compound(short: int, parts: list[bytes]) -> bytes:
    payload = b"".join(parts)
    size, count = len(payload), len(parts)
    if size < 255 and count < 256:
        return bytes((short, size + 1, count)) + payload
    return bytes((short + 0x10,)) + _pack_u32(size + 4) + _pack_u32(count) + payload


def _list(value: Any, depth: int) -> bytes:
    if not value:
        return b"\x45"
    return _compound(0xC0, [_encode(item, depth - 1) for item in value])


def _map(value: Any, depth: int) -> bytes:
    parts: list[bytes] = []
    for key, item in value.items():
        parts.append(_encode(key, depth - 1))
        parts.append(_encode(item, depth - 1))
    return _compound(0xC1, parts)


def _described(value: Any, depth: int) -> bytes:
    return b"\x00" + _encode(value.descriptor, depth - 1) + _encode(value.value, depth - 1)


def _element(value: Any, depth: int) -> tuple[bytes, bytes]:
    """Encode an array's element in its widest form: the constructor, and the bytes after it."""
    kind = type(value)
    if kind is bool:
        return b"\x56", b"\x01" if value else b"\x00"
    if kind is UInt:
        return b"\x70", _pack_u32(value)
    if kind is ULong:
        return b"\x80", _pack_u64(value)
    if kind is Int:
        return b"\x71", _pack_i32(value)
    if kind is int:
        encoded = _long(value, depth)
        return b"\x81", _pack_i64(value) if len(encoded) == 2 else encoded[1:]
    if kind is Described:
        constructor, payload = _element(value.value, depth - 1)
        return b"\x00" + _encode(value.descriptor, depth - 1) + constructor, payload
    encoded = _encode(value, depth)
    code = encoded[0]
    if code in (0xA0, 0xA1, 0xA3):
        return bytes((code + 0x10,)), _pack_u32(encoded[1]) + encoded[2:]
    if code in (0xC0, 0xC1):
        return bytes((code + 0x10,)), _pack_u32(encoded[1] + 3) + _pack_u32(encoded[2]) + encoded[3:]
    if code == 0x45:
        return b"\xd0", _pack_u32(4) + _pack_u32(0)
    if code == 0xE0:
        return b"\xf0", _pack_u32(encoded[1] + 3) + _pack_u32(encoded[2]) + encoded[3:]
    return encoded[:1], encoded[1:]


def _descriptions(value: Any) -> int:
    """Return how many times over a value is described."""
    layers = 0
    while type(value) is Described:
        layers, value = layers + 1, value.value
    return layers


_EMPTY_ELEMENTS: dict[type, bytes] = {
    Symbol: b"\xb3",
    str: b"\xb1",
    bytes: b"\xb0",
    int: b"\x81",
    UInt: b"\x70",
    ULong: b"\x80",
    Int: b"\x71",
    bool: b"\x56",
}


def _array(value: Any, depth: int) -> bytes:
    if value:
        elements = [_element(item, depth - 1) for item in value]
        constructor = elements[0][0]
        if any(other != constructor for other, _ in elements):
            raise EncodeError("the elements of an array must all be of one AMQP type")
        if type(value[0]) is Described and _descriptions(value[0]) > MAX_DESCRIPTIONS:
            raise EncodeError(f"the values of an array are described more than {MAX_DESCRIPTIONS} times over")
        if constructor == b"\x40" and len(value) > MAX_ZERO_WIDTH:
            raise EncodeError(f"an array of nulls may have {MAX_ZERO_WIDTH} elements")
    else:
        elements = []
        constructor = _EMPTY_ELEMENTS.get(value.of, b"\x40")
    payload = constructor + b"".join([body for _, body in elements])
    size, count = len(payload), len(elements)
    if size < 255 and count < 256:
        return bytes((0xE0, size + 1, count)) + payload
    return b"\xf0" + _pack_u32(size + 4) + _pack_u32(count) + payload


_ENCODERS: dict[type, Callable[[Any, int], bytes]] = {
    type(None): _null,
    bool: _bool,
    UByte: _ubyte,
    UShort: _ushort,
    UInt: _uint,
    ULong: _ulong,
    Byte: _byte,
    Short: _short,
    Int: _int,
    int: _long,
    Float: _float,
    float: _double,
    Char: _char,
    Timestamp: _timestamp,
    datetime.datetime: _datetime,
    uuid.UUID: _uuid,
    bytes: _binary,
    bytearray: _binary,
    memoryview: _binary,
    str: _string,
    Symbol: _symbol,
    Decimal32: _decimal(0x74),
    Decimal64: _decimal(0x84),
    Decimal128: _decimal(0x94),
    list: _list,
    tuple: _list,
    dict: _map,
    Described: _described,
    Array: _array,
}


def _encode(value: Any, depth: int) -> bytes:
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        for base in type(value).__mro__[1:]:
            encoder = _ENCODERS.get(base)
            if encoder is not None:
                break
        else:
            raise EncodeError(f"a value of type {type(value).__name__} has no AMQP form")
    if depth <= 0:
        raise EncodeError(f"values nest more than {MAX_DEPTH} deep")
    return encoder(value, depth)


def encode(value: Any, depth: int = MAX_DEPTH) -> bytes:
    """Encode one value, constructor included.

    Raises:
        EncodeError: It has no AMQP form.
    """
    return _encode(value, depth)


# ---------------------------------------------------------------------------------------------- decoding

_Decoder = Callable[[bytes, int, int, int], tuple[Any, int]]
"""(data, position after the constructor, end, depth left) -> (value, position after it)."""


def _short_of_bytes() -> AmqpDecodeError:
    return AmqpDecodeError("a value runs past the end of what holds it")


def _constant(value: Any) -> _Decoder:
    return lambda _data, pos, _end, _depth: (value, pos)


def _empty_list(_data: bytes, pos: int, _end: int, _depth: int) -> tuple[Any, int]:
    return [], pos


def _bool_byte(data: bytes, pos: int, end: int, _depth: int) -> tuple[Any, int]:
    if pos >= end:
        raise _short_of_bytes()
    if data[pos] > 1:
        raise AmqpDecodeError("a boolean byte is neither 0 nor 1")
    return data[pos] == 1, pos + 1


def _integer(width: int, make: Callable[[int], Any], *, signed: bool) -> _Decoder:
    def decode_integer(data: bytes, pos: int, end: int, _depth: int) -> tuple[Any, int]:
        after = pos + width
        if after > end:
            raise _short_of_bytes()
        return make(int.from_bytes(data[pos:after], "big", signed=signed)), after

    return decode_integer


def _decode_float(data: bytes, pos: int, end: int, _depth: int) -> tuple[Any, int]:
    if pos + 4 > end:
        raise _short_of_bytes()
    return Float(_unpack_f(data, pos)[0]), pos + 4


def _decode_double(data: bytes, pos: int, end: int, _depth: int) -> tuple[Any, int]:
    if pos + 8 > end:
        raise _short_of_bytes()
    return _unpack_d(data, pos)[0], pos + 8


def _decode_char(data: bytes, pos: int, end: int, _depth: int) -> tuple[Any, int]:
    if pos + 4 > end:
        raise _short_of_bytes()
    point = int.from_bytes(data[pos : pos + 4], "big")
    if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
        raise AmqpDecodeError("a char is not a Unicode scalar value")
    return Char(chr(point)), pos + 4


def _fixed(width: int, make: Callable[[bytes], Any]) -> _Decoder:
    def decode_fixed(data: bytes, pos: int, end: int, _depth: int) -> tuple[Any, int]:
        after = pos + width
        if after > end:
            raise _short_of_bytes()
        return make(data[pos:after]), after

    return decode_fixed


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise AmqpDecodeError("a string is not UTF-8") from None


def _ascii(raw: bytes) -> Symbol:
    try:
        return Symbol(raw.decode("ascii"))
    except UnicodeDecodeError:
        raise AmqpDecodeError("a symbol is not ASCII") from None


def _variable(width: int, make: Callable[[bytes], Any]) -> _Decoder:
    def decode_variable(data: bytes, pos: int, end: int, _depth: int) -> tuple[Any, int]:
        start = pos + width
        if start > end:
            raise _short_of_bytes()
        after = start + int.from_bytes(data[pos:start], "big")
        if after > end:
            raise _short_of_bytes()
        return make(data[start:after]), after

    return decode_variable


def _frame(data: bytes, pos: int, end: int, width: int) -> tuple[int, int, int]:
    """Read the size and count of a compound: its count, where its content starts, and where it ends."""
    start = pos + 2 * width
    if start > end:
        raise _short_of_bytes()
    after = pos + width + int.from_bytes(data[pos : pos + width], "big")
    if after > end or after < start:
        raise _short_of_bytes()
    return int.from_bytes(data[pos + width : start], "big"), start, after


def _decode_items(data: bytes, pos: int, end: int, depth: int, count: int) -> list[Any]:
    if count > end - pos:
        raise AmqpDecodeError("a list or map counts more items than it has bytes")
    if count and depth <= 0:
        raise AmqpDecodeError(f"values nest more than {MAX_DEPTH} deep")
    items: list[Any] = []
    for _ in range(count):
        if pos + 1 < end and data[pos] == 0xA1:
            # Most are short texts.
            start = pos + 2
            pos = start + data[pos + 1]
            if pos > end:
                raise _short_of_bytes()
            items.append(_text(data[start:pos]))
            continue
        item, pos = _decode(data, pos, end, depth)
        items.append(item)
    if pos != end:
        raise AmqpDecodeError("a list or map is larger than its items")
    return items


def _decode_list(width: int) -> _Decoder:
    def decode_list(data: bytes, pos: int, end: int, depth: int) -> tuple[Any, int]:
        count, start, after = _frame(data, pos, end, width)
        return _decode_items(data, start, after, depth - 1, count), after

    return decode_list


def _decode_map(width: int) -> _Decoder:
    def decode_map(data: bytes, pos: int, end: int, depth: int) -> tuple[Any, int]:
        count, start, after = _frame(data, pos, end, width)
        if count % 2:
            raise AmqpDecodeError("a map has a key without a value")
        items = _decode_items(data, start, after, depth - 1, count)
        if count > 2 * MAX_WEAK_KEYS and sum(isinstance(key, (uuid.UUID, Described)) for key in items[::2]) > (
            MAX_WEAK_KEYS
        ):
            raise AmqpDecodeError(f"a map has more than {MAX_WEAK_KEYS} keys that are UUIDs or described")
        try:
            return dict(zip(items[::2], items[1::2], strict=True)), after
        except TypeError:
            raise AmqpDecodeError("a map has a list or map as a key") from None

    return decode_map


_OF: dict[int, type] = {
    0x56: bool,
    0x70: UInt,
    0x71: Int,
    0x80: ULong,
    0x81: int,
    0xA0: bytes,
    0xA1: str,
    0xA3: Symbol,
    0xB0: bytes,
    0xB1: str,
    0xB3: Symbol,
}


def _decode_array(width: int) -> _Decoder:
    def decode_array(data: bytes, pos: int, end: int, depth: int) -> tuple[Any, int]:
        count, pos, after = _frame(data, pos, end, width)
        depth -= 1
        descriptors: list[Any] = []
        while pos < after and data[pos] == 0:
            descriptor, pos = _decode(data, pos + 1, after, depth)
            depth -= 1
            descriptors.append(descriptor)
            if len(descriptors) > MAX_DESCRIPTIONS:
                raise _too_often_described()
        if pos >= after:
            raise _short_of_bytes()
        if depth <= 0:
            raise AmqpDecodeError(f"values nest more than {MAX_DEPTH} deep")
        code = data[pos]
        decoder = _DECODERS[code]
        pos += 1
        if count > (MAX_ZERO_WIDTH if code >> 4 == 4 else after - pos):
            raise AmqpDecodeError("an array counts more items than it has bytes")
        values = Array(of=_OF.get(code) if count == 0 else None)
        for _ in range(count):
            value, pos = decoder(data, pos, after, depth)
            for descriptor in reversed(descriptors):
                value = Described(descriptor, value)
            values.append(value)
        if pos != after:
            raise AmqpDecodeError("an array is larger than its items")
        return values, after

    return decode_array


def _too_often_described() -> AmqpDecodeError:
    return AmqpDecodeError(f"the values of an array are described more than {MAX_DESCRIPTIONS} times over")


def _unknown(data: bytes, pos: int, _end: int, _depth: int) -> tuple[Any, int]:
    raise AmqpDecodeError("an unknown AMQP type code")


def _decode_described(data: bytes, pos: int, end: int, depth: int) -> tuple[Any, int]:
    descriptor, pos = _decode(data, pos, end, depth - 1)
    value, pos = _decode(data, pos, end, depth - 1)
    try:
        hash(descriptor)
    except TypeError:
        raise AmqpDecodeError("a descriptor is a list, map or array") from None
    return Described(descriptor, value), pos


_DECODERS: list[_Decoder] = [_unknown] * 256
for _code, _decoder in {
    0x00: _decode_described,
    0x40: _constant(None),
    0x41: _constant(True),
    0x42: _constant(False),
    0x43: _constant(UInt(0)),
    0x44: _constant(ULong(0)),
    0x45: _empty_list,
    0x50: _integer(1, UByte, signed=False),
    0x51: _integer(1, Byte, signed=True),
    0x52: _integer(1, UInt, signed=False),
    0x53: _integer(1, ULong, signed=False),
    0x54: _integer(1, Int, signed=True),
    0x55: _integer(1, int, signed=True),
    0x56: _bool_byte,
    0x60: _integer(2, UShort, signed=False),
    0x61: _integer(2, Short, signed=True),
    0x70: _integer(4, UInt, signed=False),
    0x71: _integer(4, Int, signed=True),
    0x72: _decode_float,
    0x73: _decode_char,
    0x74: _fixed(4, Decimal32),
    0x80: _integer(8, ULong, signed=False),
    0x81: _integer(8, int, signed=True),
    0x82: _decode_double,
    0x83: _integer(8, Timestamp, signed=True),
    0x84: _fixed(8, Decimal64),
    0x94: _fixed(16, Decimal128),
    0x98: _fixed(16, lambda raw: uuid.UUID(bytes=raw)),
    0xA0: _variable(1, bytes),
    0xA1: _variable(1, _text),
    0xA3: _variable(1, _ascii),
    0xB0: _variable(4, bytes),
    0xB1: _variable(4, _text),
    0xB3: _variable(4, _ascii),
    0xC0: _decode_list(1),
    0xC1: _decode_map(1),
    0xD0: _decode_list(4),
    0xD1: _decode_map(4),
    0xE0: _decode_array(1),
    0xF0: _decode_array(4),
}.items():
    _DECODERS[_code] = _decoder


def _decode(data: bytes, pos: int, end: int, depth: int) -> tuple[Any, int]:
    if pos >= end:
        raise _short_of_bytes()
    if depth <= 0:
        raise AmqpDecodeError(f"values nest more than {MAX_DEPTH} deep")
    return _DECODERS[data[pos]](data, pos + 1, end, depth)


def decode(data: bytes, offset: int = 0, end: int | None = None) -> tuple[Any, int]:
    """Decode one value.

    Returns:
        The value, and the position after it. Nothing in it aliases `data`.

    Raises:
        AmqpDecodeError: The bytes are not an AMQP value, or it holds more than `MAX_ITEMS` values.
    """
    if end is None:
        end = len(data)
    if end - offset > _NEVER_COUNTED:
        _count_value(data, offset, end, MAX_ITEMS - 1, MAX_DEPTH)
    return _decode(data, offset, end, MAX_DEPTH)


def decode_described(data: bytes, pos: int, end: int, depth: int = 1) -> Any:
    """Decode a value that is described by what stands before it, which is not read: the value of a section, say.

    Args:
        depth: How deeply it lies in what `decode` would be called with. Default: 1, a description.
    """
    if end - pos > _NEVER_COUNTED:
        _count_value(data, pos, end, MAX_ITEMS - 3, MAX_DEPTH - depth)  # itself and its descriptor
    return _decode(data, pos, end, MAX_DEPTH - depth)[0]


def items_at(data: bytes, pos: int, end: int) -> list[int]:
    """Find the items of a list, without decoding them.

    Returns:
        Where each begins, and the end of the last one.

    Raises:
        AmqpDecodeError: They do not fill the list.
    """
    code = data[pos]
    if code == 0x45:
        return [end]
    count, pos, after = _frame(data, pos + 1, end, 4 if code & 0x10 else 1)
    if count > after - pos:
        raise AmqpDecodeError("a list or map counts more items than it has bytes")
    found = [pos]
    for _ in range(count):
        if pos + 1 < after:
            # Most are null or short.
            code = data[pos]
            if code == 0x40:
                pos += 1
                found.append(pos)
                continue
            if 0xA0 <= code < 0xB0:
                pos += 2 + data[pos + 1]
                found.append(pos)
                continue
        pos = skip(data, pos, after)
        found.append(pos)
    if pos != after:
        raise AmqpDecodeError("a list or map is larger than its items")
    return found


def count_items(data: bytes, pos: int, end: int, limit: int) -> int:
    """Count the values in a run of encoded values, those inside lists, maps, arrays and descriptions included.

    Call it before `decode` where `MAX_ITEMS` is too many. It makes no objects, does not look into strings or
    binaries, and stops at the first count that is over the limit. It does not check that the values can be decoded.

    Raises:
        AmqpDecodeError: There are more, or a value runs past `end`.
    """
    left = limit
    while pos < end:
        pos, left = _count_value(data, pos, end, left - 1, MAX_DEPTH)
    return limit - left


def _count_value(data: bytes, pos: int, end: int, left: int, depth: int) -> tuple[int, int]:
    """Count what the value at `pos` holds, itself too; return the position after it, and how many are left."""
    if left < 0:
        raise _too_many()
    if depth <= 0:
        raise AmqpDecodeError(f"values nest more than {MAX_DEPTH} deep")
    if pos >= end:
        raise _short_of_bytes()
    code = data[pos]
    if code == 0:
        pos, left = _count_value(data, pos + 1, end, left - 2, depth - 1)
        return _count_value(data, pos, end, left, depth - 1)
    if code < 0xC0:
        return skip_plain(data, pos, end), left
    return _count_compound(data, code, pos + 1, end, left, depth - 1)


def _count_compound(data: bytes, code: int, pos: int, end: int, left: int, depth: int) -> tuple[int, int]:
    """Count the values in a list, map or array whose size is at `pos`."""
    if depth < 0:
        raise AmqpDecodeError(f"values nest more than {MAX_DEPTH} deep")
    count, pos, after = _frame(data, pos, end, 4 if code & 0x10 else 1)
    layers = 1
    if code >= 0xE0:
        while pos < after and data[pos] == 0:
            pos, left = _count_value(data, pos + 1, after, left - 1, depth - layers + 1)
            layers += 1
        if pos >= after:
            raise _short_of_bytes()
    left -= count * layers  # every value of an array gets its own described objects
    if left < 0:
        raise _too_many()
    if code < 0xE0:
        widths = _WIDTHS
        for _ in range(count):
            if pos + 1 < after:
                # Most values are plain, and short: their end is found here.
                code = data[pos]
                if 0x40 <= code < 0xA0:
                    pos += 1 + widths[code >> 4]
                    continue
                if 0xA0 <= code < 0xB0:
                    pos += 2 + data[pos + 1]
                    continue
            pos, left = _count_value(data, pos, after, left, depth)
    elif data[pos] >= 0xC0:
        code = data[pos]
        pos += 1
        for _ in range(count):
            pos, left = _count_compound(data, code, pos, after, left, depth - layers)
    return after, left


def _too_many() -> AmqpDecodeError:
    return AmqpDecodeError("a value holds more values than are accepted")


def skip(data: bytes, pos: int, end: int, depth: int = MAX_DEPTH) -> int:
    """Return the position after the value at `pos`, without decoding it.

    A descriptor may be any value, a described one too (1.2).

    Raises:
        AmqpDecodeError: It runs past `end`, or its type is unknown.
    """
    while True:
        if pos >= end:
            raise _short_of_bytes()
        if depth <= 0:
            raise AmqpDecodeError(f"values nest more than {MAX_DEPTH} deep")
        if data[pos]:
            return skip_plain(data, pos, end)
        depth -= 1
        pos = skip(data, pos + 1, end, depth)


def skip_plain(data: bytes, pos: int, end: int) -> int:
    """Skip a value that is not described. Raises `AmqpDecodeError` as `skip`, and where it is described."""
    if pos >= end:
        raise _short_of_bytes()
    kind = data[pos] >> 4
    pos += 1
    # Part 1.2.1: the upper half of a constructor determines the width of what follows.
    if kind <= 9:
        if kind < 4:
            raise AmqpDecodeError("an unknown AMQP type code")
        pos += _WIDTHS[kind]
    elif kind & 1 == 0:
        if pos >= end:
            raise _short_of_bytes()
        pos += 1 + data[pos]
    else:
        if pos + 4 > end:
            raise _short_of_bytes()
        pos += 4 + int.from_bytes(data[pos : pos + 4], "big")
    if pos > end:
        raise _short_of_bytes()
    return pos


_WIDTHS = (0, 0, 0, 0, 0, 1, 2, 4, 8, 16)

if core is not None:
    core.decode_values(
        (UByte, UShort, UInt, ULong, Byte, Short, Int, Timestamp),
        (Char, Symbol),
        (Decimal32, Decimal64, Decimal128),
        Float,
        Described,
        uuid.UUID,
        MAX_DEPTH - 1,  # a section is a described value
        MAX_WEAK_KEYS,
        _NEVER_COUNTED,
    )
