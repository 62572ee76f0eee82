"""Strategies for every AMQP type, and comparison that distinguishes types."""

from __future__ import annotations

import datetime
import struct
import uuid
from typing import Any

from hypothesis import strategies as st

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

_EDGES = [0, 1, 127, 128, 255, 256, 2**15 - 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]


def _integers(kind: type[Any], low: int, high: int) -> st.SearchStrategy[Any]:
    edges = (*_EDGES, *(-each for each in _EDGES), *(-each - 1 for each in _EDGES))
    fitting = [edge for edge in edges if low <= edge <= high]
    return (st.sampled_from(fitting) | st.integers(low, high)).map(kind)


texts = st.text(max_size=20) | st.sampled_from(["", "x" * 255, "x" * 256, "ä" * 127, "ä" * 128])
binaries = st.binary(max_size=20) | st.sampled_from([b"", b"x" * 255, b"x" * 256])
symbols = (st.text(st.characters(max_codepoint=127), max_size=20) | st.just("s" * 256)).map(Symbol)

SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "ubyte": _integers(UByte, 0, 0xFF),
    "ushort": _integers(UShort, 0, 0xFFFF),
    "uint": _integers(UInt, 0, 0xFFFF_FFFF),
    "ulong": _integers(ULong, 0, 2**64 - 1),
    "byte": _integers(Byte, -0x80, 0x7F),
    "short": _integers(Short, -0x8000, 0x7FFF),
    "int": _integers(Int, -(2**31), 2**31 - 1),
    "long": _integers(int, -(2**63), 2**63 - 1),
    "float": st.floats(width=32).map(Float),
    "double": st.floats(),
    "char": st.characters(exclude_categories=["Cs"]).map(Char),
    "timestamp": _integers(Timestamp, -(2**63), 2**63 - 1),
    "uuid": st.uuids(),
    "binary": binaries,
    "string": texts,
    "symbol": symbols,
    "decimal32": st.binary(min_size=4, max_size=4).map(Decimal32),
    "decimal64": st.binary(min_size=8, max_size=8).map(Decimal64),
    "decimal128": st.binary(min_size=16, max_size=16).map(Decimal128),
}

scalars = st.one_of(*SCALARS.values())
keys = st.one_of(*(SCALARS[name] for name in ("symbol", "string", "ulong", "long", "binary", "uuid", "boolean")))
descriptors = SCALARS["symbol"] | SCALARS["ulong"]


def arrays_of(elements: st.SearchStrategy[Any]) -> st.SearchStrategy[Array]:
    """Make arrays; the elements are all of one type."""
    return st.lists(elements, min_size=1, max_size=5).map(Array)


@st.composite
def described_arrays(draw: st.DrawFn) -> Array:
    """Make arrays of described elements, which share their descriptor."""
    descriptor = draw(descriptors)
    elements = SCALARS[draw(st.sampled_from(sorted(SCALARS)))]
    return Array([Described(descriptor, each) for each in draw(st.lists(elements, min_size=1, max_size=4))])


scalar_arrays = st.sampled_from(sorted(SCALARS)).flatmap(lambda name: arrays_of(SCALARS[name]))
arrays = st.one_of(
    scalar_arrays,
    described_arrays(),
    arrays_of(scalar_arrays),
    arrays_of(st.lists(scalars, max_size=3)),
    arrays_of(st.dictionaries(keys, scalars, max_size=3)),
    st.sampled_from([Array(), *(Array(of=kind) for kind in (Symbol, str, bytes, int, UInt, ULong, Int, bool))]),
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.builds(Described, descriptors, inner),
    ),
    max_leaves=12,
)
symbol_maps = st.dictionaries(symbols, scalars, max_size=4)


def plain(value: Any) -> Any:
    """Return a form of a value whose equality distinguishes types, floats' bits and the order of a map."""
    match value:
        case Described():
            return ("described", plain(value.descriptor), plain(value.value))
        case Array():
            return ("array", None if value else value.of, [plain(each) for each in value])
        case list() | tuple():
            return ("list", [plain(each) for each in value])
        case dict():
            return ("map", [(plain(key), plain(each)) for key, each in value.items()])
        case float():
            return (type(value).__name__, struct.pack(">d", value))
        case datetime.datetime():
            return ("Timestamp", int(Timestamp.from_datetime(value)))
        case uuid.UUID():
            return ("uuid", value.bytes)
        case _:
            return (type(value).__name__, value)
