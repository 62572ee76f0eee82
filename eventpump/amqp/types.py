"""The AMQP 1.0 types that have no counterpart in Python (AMQP 1.0, part 1.6).

A plain `int` stands for long, `float` for double, `str` for string, `bytes` for binary, `bool`, `None`, `list`,
`dict` (map) and `uuid.UUID` for themselves. What these classes wrap compares and computes as the plain value does.
"""

from __future__ import annotations

import datetime
from typing import Any, ClassVar, Self

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class _BoundedInt(int):
    """An integer of a fixed width. One that is out of range raises `ValueError`."""

    __slots__ = ()
    low: ClassVar[int]
    high: ClassVar[int]

    def __new__(cls, value: int = 0) -> Self:
        if not cls.low <= value <= cls.high:
            raise ValueError(f"{value} does not fit the AMQP type {cls.__name__.lower()}")
        return int.__new__(cls, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({int(self)})"


class UByte(_BoundedInt):
    """ubyte."""

    __slots__ = ()
    low, high = 0, 0xFF


class UShort(_BoundedInt):
    """ushort."""

    __slots__ = ()
    low, high = 0, 0xFFFF


class UInt(_BoundedInt):
    """uint."""

    __slots__ = ()
    low, high = 0, 0xFFFF_FFFF


class ULong(_BoundedInt):
    """ulong."""

    __slots__ = ()
    low, high = 0, 0xFFFF_FFFF_FFFF_FFFF


class Byte(_BoundedInt):
    """byte, signed."""

    __slots__ = ()
    low, high = -0x80, 0x7F


class Short(_BoundedInt):
    """short."""

    __slots__ = ()
    low, high = -0x8000, 0x7FFF


class Int(_BoundedInt):
    """int."""

    __slots__ = ()
    low, high = -0x8000_0000, 0x7FFF_FFFF


class Timestamp(_BoundedInt):
    """timestamp: milliseconds since the Unix epoch, which may lie outside the range of `datetime`."""

    __slots__ = ()
    low, high = -0x8000_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF

    @classmethod
    def from_datetime(cls, moment: datetime.datetime) -> Timestamp:
        """Make one from an aware datetime, cut to milliseconds. Raises `ValueError` for a naive one."""
        if moment.tzinfo is None:
            raise ValueError("a timestamp needs a datetime with a time zone")
        value = cls.__new__(cls, (moment - _EPOCH) // datetime.timedelta(milliseconds=1))
        assert isinstance(value, Timestamp)
        return value

    def to_datetime(self) -> datetime.datetime:
        """Return the moment in UTC; moments outside the range of `datetime` give its nearest end."""
        try:
            return _EPOCH + datetime.timedelta(milliseconds=int(self))
        except OverflowError:
            end = datetime.datetime.min if self < 0 else datetime.datetime.max
            return end.replace(tzinfo=datetime.UTC)


class Float(float):
    """float, 32 bits."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Float({float(self)})"


class Char(str):
    """char: one Unicode scalar value."""

    __slots__ = ()

    def __new__(cls, value: str) -> Self:
        if len(value) != 1 or 0xD800 <= ord(value) <= 0xDFFF:
            raise ValueError("a char is one Unicode scalar value")
        return str.__new__(cls, value)

    def __repr__(self) -> str:
        return f"Char({str(self)!r})"


class Symbol(str):
    """symbol: ASCII text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Symbol({str(self)!r})"


class _Decimal(bytes):
    """An IEEE 754 decimal in its encoded form; eventpump carries it and does not compute with it."""

    __slots__ = ()
    width: ClassVar[int]

    def __new__(cls, value: bytes) -> Self:
        if len(value) != cls.width:
            raise ValueError(f"a {cls.__name__.lower()} takes {cls.width} bytes")
        return bytes.__new__(cls, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({bytes(self)!r})"


class Decimal32(_Decimal):
    """decimal32."""

    __slots__ = ()
    width = 4


class Decimal64(_Decimal):
    """decimal64."""

    __slots__ = ()
    width = 8


class Decimal128(_Decimal):
    """decimal128."""

    __slots__ = ()
    width = 16


class Described:
    """A described value (part 1.3): a descriptor, usually a symbol or a ulong, and the value it describes."""

    __slots__ = ("descriptor", "value")

    def __init__(self, descriptor: Any, value: Any) -> None:
        self.descriptor = descriptor
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Described):
            return NotImplemented
        return bool(self.descriptor == other.descriptor and self.value == other.value)

    def __hash__(self) -> int:
        return hash((self.descriptor, self.value))

    def __repr__(self) -> str:
        return f"Described({self.descriptor!r}, {self.value!r})"


class Array(list[Any]):
    """An array (part 1.6.24): all elements of one AMQP type, the type of the first.

    An empty array of symbols is `Array([], of=Symbol)`; without `of`, an empty array is one of nulls.
    """

    __slots__ = ("of",)

    def __init__(self, values: Any = (), *, of: type | None = None) -> None:
        super().__init__(values)
        self.of = of

    def __repr__(self) -> str:
        return f"Array({list.__repr__(self)})"
