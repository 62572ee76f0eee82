"""The composite types of the transport, messaging and security layers (AMQP 1.0, parts 2.7, 2.8, 3.5, 5.3).

Every field is always encoded, nulls included, and descriptors take their one-byte form: some peers index the fields
by position without padding. Decoding pads and checks each field's type and range; a null where a default is defined
gives the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from eventpump.amqp.codec import AmqpDecodeError, count_items, decode, encode, skip
from eventpump.amqp.types import Array, Described, Symbol, UByte, UInt, ULong, UShort
from eventpump.texts import excerpt

# ------------------------------------------------------------------------------------------------ fields


_Kind = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""How a field's value is made ready to encode, and checked when decoded."""


def _check(kind: type | tuple[type, ...], what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise AmqpDecodeError(f"a {what} was expected")
        return value

    return check


_whole = _check(int, "number")
_text = _check(str, "text")
_flag = _check(bool, "boolean")
_bytes = _check(bytes, "binary")
_map = _check(dict, "map")


def _number(kind: type[UByte | UShort | UInt | ULong]) -> Callable[[Any], int]:
    """Read a number of any width that fits the field. One that does not fit could not be sent back."""

    def number(value: Any) -> int:
        whole = int(_whole(value))
        if not 0 <= whole <= kind.high:
            raise AmqpDecodeError(f"a {kind.__name__.lower()} was expected")
        return whole

    return number


def _symbol(value: Any) -> str:
    if not _text(value).isascii():
        raise AmqpDecodeError("a symbol was expected")
    return str(value) if type(value) is str else Symbol(value)


def _symbol_keys(value: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = _map(value)
    for key in found:
        if isinstance(key, str) and not key.isascii():
            raise AmqpDecodeError("symbols as keys were expected")
    return found


def _symbols(value: Any) -> list[Symbol]:
    """Read a field that may hold several symbols: one, or an array (part 1.4, `multiple`)."""
    if isinstance(value, Array) and all(isinstance(item, Symbol) for item in value):
        return list(value)
    if isinstance(value, Symbol):
        return [value]
    raise AmqpDecodeError("symbols were expected")


def _encode_symbols(value: Sequence[str]) -> Any:
    return Array([Symbol(item) for item in value], of=Symbol) if value else None


def _symbol_map(value: Mapping[Any, Any]) -> Any:
    return {Symbol(key) if isinstance(key, str) else key: item for key, item in value.items()}


def _nested(*names: str) -> _Kind:
    """Return the kind of a field that holds one of these composites, by name as they are defined further down."""

    def nested(value: Any) -> Any:
        if isinstance(value, Described):
            found = composite(value)
            if type(found).__name__ in names:
                return found
        raise AmqpDecodeError(f"{' or '.join(names).lower()} was expected")

    return (lambda value: value.described()), nested


def _any(value: Any) -> Any:
    return value


_BOOL: _Kind = (bool, _flag)
_UBYTE: _Kind = (UByte, _number(UByte))
_USHORT: _Kind = (UShort, _number(UShort))
_UINT: _Kind = (UInt, _number(UInt))
_ULONG: _Kind = (ULong, _number(ULong))
_STRING: _Kind = (str, _text)
_SYMBOL: _Kind = (Symbol, _symbol)
_BINARY: _Kind = (bytes, _bytes)
_SYMBOLS: _Kind = (_encode_symbols, _symbols)
_SYMBOL_MAP: _Kind = (_symbol_map, _symbol_keys)
_PLAIN_MAP: _Kind = (dict, _map)
_ERROR = _nested("AmqpError")
_SOURCE = _nested("Source")
_TARGET = _nested("Target")
_STATE = _nested("Accepted", "Rejected", "Released", "Modified", "Received")
_ANY: _Kind = (_any, _any)


def _of(kind: _Kind, default: Any = None, *, mandatory: bool = False) -> Any:
    metadata = {"kind": kind, "mandatory": mandatory}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


class Composite:
    """A described list with named fields."""

    __slots__ = ()
    CODE: ClassVar[int]
    _kinds: ClassVar[tuple[tuple[str, _Kind], ...]]
    _mandatory: ClassVar[tuple[tuple[int, str], ...]]

    def described(self) -> Described:
        """Return the described list, every field present."""
        values: list[Any] = []
        for name, (prepare, _) in self._kinds:
            value = getattr(self, name)
            values.append(None if value is None else prepare(value))
        return Described(ULong(self.CODE), values)

    def encode(self) -> bytes:
        """Encode. A composite without fields becomes a list without items, which all tested peers accept."""
        return encode(self.described())


_CLASSES: dict[int, type[Composite]] = {}
_NAMES: dict[str, type[Composite]] = {}


def _register(symbol: str) -> Callable[[type[Any]], type[Any]]:
    def register(cls: type[Any]) -> type[Any]:
        cls._kinds = tuple((each.name, each.metadata["kind"]) for each in fields(cls))
        cls._mandatory = tuple((at, each.name) for at, each in enumerate(fields(cls)) if each.metadata["mandatory"])
        _CLASSES[cls.CODE] = cls
        _NAMES[symbol] = cls
        return cls

    return register


def composite(value: Described) -> Any:
    """Make the object of a described list."""
    descriptor = value.descriptor
    cls = _NAMES.get(descriptor) if isinstance(descriptor, Symbol) else _CLASSES.get(descriptor)
    if cls is None or isinstance(descriptor, (str, float)) != isinstance(descriptor, Symbol):
        raise AmqpDecodeError(f"{excerpt(str(descriptor), 80)} is not a known descriptor")
    items = value.value
    if type(items) is not list or len(items) > len(cls._kinds):
        raise AmqpDecodeError(f"{cls.__name__.lower()} is not a list, or has too many fields")
    for at, name in cls._mandatory:
        if at >= len(items) or items[at] is None:
            raise AmqpDecodeError(f"{cls.__name__.lower()}.{name} is missing")
    made = cls()
    for (name, (_, check)), item in zip(cls._kinds, items, strict=False):
        if item is not None:
            try:
                setattr(made, name, check(item))
            except AmqpDecodeError as error:
                raise AmqpDecodeError(f"{cls.__name__.lower()}.{name}: {error.description}") from None
    return made


MAX_ITEMS = 8192
"""How many values a performative may hold: no list of the small form (255 bytes) can hold more."""


def decode_performative(data: bytes, offset: int, end: int) -> tuple[Any, int]:
    """Decode the performative that opens a frame's body;
    return the position after it, too, or raise `AmqpDecodeError`."""
    head = data[offset : offset + 5]
    if head[:2] == b"\x00\x53" and head[3:4] == b"\xc0":
        own_end = min(offset + 5 + head[-1], end)
        if head[2] == Disposition.CODE and own_end == offset + 5 + head[-1]:
            accepted = _accepted(data, offset, own_end)
            if accepted is not None:
                return accepted, own_end
    else:
        own_end = skip(data, offset, end)
        count_items(data, offset, own_end, MAX_ITEMS)
    value, pos = decode(data, offset, own_end)
    if not isinstance(value, Described):
        raise AmqpDecodeError("a frame's body does not begin with a described list")
    return composite(value), pos


_ACCEPTED = re.compile(
    rb"\x00\x53\x15\xc0.([\x05\x06])\x41(\x43|\x52.|\x70.{4})(\x40|\x43|\x52.|\x70.{4})"
    rb"\x41\x00\x53\x24(?:\x45|\xc0\x01\x00)([\x40-\x42]?)",
    re.DOTALL,
)
"""A receiver's disposition that settles with `Accepted`: the number of fields, first, last, and `batchable`."""


def _accepted(data: bytes, offset: int, end: int) -> Disposition | None:
    """Decode the disposition that a send waits for, in its usual form, at a fifth of the cost; None for any other."""
    found = _ACCEPTED.fullmatch(data, offset, end)
    if found is None:
        return None
    count, first, last, batchable = found.groups()
    if count[0] != 5 + len(batchable):
        return None
    return Disposition(
        True,
        int.from_bytes(first[1:], "big"),
        None if last == b"\x40" else int.from_bytes(last[1:], "big"),
        True,
        Accepted(),
        batchable == b"\x41",
    )


# ------------------------------------------------------------------------------- definitions (part 2.8)


@_register("amqp:error:list")
@dataclass(slots=True)
class AmqpError(Composite):
    """2.8.14"""

    CODE = 0x1D
    condition: str = _of(_SYMBOL, "amqp:internal-error")
    description: str | None = _of(_STRING)
    info: dict[Any, Any] | None = _of(_SYMBOL_MAP)


@_register("amqp:source:list")
@dataclass(slots=True)
class Source(Composite):
    """3.5.3"""

    CODE = 0x28
    address: Any = _of(_ANY)
    durable: int | None = _of(_UINT)
    expiry_policy: str | None = _of(_SYMBOL)
    timeout: int | None = _of(_UINT)
    dynamic: bool | None = _of(_BOOL)
    dynamic_node_properties: dict[Any, Any] | None = _of(_SYMBOL_MAP)
    distribution_mode: str | None = _of(_SYMBOL)
    filter: dict[Any, Any] | None = _of(_SYMBOL_MAP)
    default_outcome: Any = _of(_ANY)
    outcomes: list[Symbol] | None = _of(_SYMBOLS)
    capabilities: list[Symbol] | None = _of(_SYMBOLS)


@_register("amqp:target:list")
@dataclass(slots=True)
class Target(Composite):
    """3.5.4"""

    CODE = 0x29
    address: Any = _of(_ANY)
    durable: int | None = _of(_UINT)
    expiry_policy: str | None = _of(_SYMBOL)
    timeout: int | None = _of(_UINT)
    dynamic: bool | None = _of(_BOOL)
    dynamic_node_properties: dict[Any, Any] | None = _of(_SYMBOL_MAP)
    capabilities: list[Symbol] | None = _of(_SYMBOLS)


# ------------------------------------------------------------------------------ delivery states (3.4)


@_register("amqp:received:list")
@dataclass(slots=True)
class Received(Composite):
    """3.4.1"""

    CODE = 0x23
    section_number: int = _of(_UINT, 0, mandatory=True)
    section_offset: int = _of(_ULONG, 0, mandatory=True)


@_register("amqp:accepted:list")
@dataclass(slots=True)
class Accepted(Composite):
    """3.4.2"""

    CODE = 0x24


@_register("amqp:rejected:list")
@dataclass(slots=True)
class Rejected(Composite):
    """3.4.3"""

    CODE = 0x25
    error: AmqpError | None = _of(_ERROR)


@_register("amqp:released:list")
@dataclass(slots=True)
class Released(Composite):
    """3.4.4"""

    CODE = 0x26


@_register("amqp:modified:list")
@dataclass(slots=True)
class Modified(Composite):
    """3.4.5"""

    CODE = 0x27
    delivery_failed: bool | None = _of(_BOOL)
    undeliverable_here: bool | None = _of(_BOOL)
    message_annotations: dict[Any, Any] | None = _of(_SYMBOL_MAP)


Outcome = Accepted | Rejected | Released | Modified

# ------------------------------------------------------------------------------- performatives (2.7)


@_register("amqp:open:list")
@dataclass(slots=True)
class Open(Composite):
    """2.7.1"""

    CODE = 0x10
    container_id: str = _of(_STRING, "", mandatory=True)
    hostname: str | None = _of(_STRING)
    max_frame_size: int = _of(_UINT, 0xFFFF_FFFF)
    channel_max: int = _of(_USHORT, 0xFFFF)
    idle_time_out: int | None = _of(_UINT)
    outgoing_locales: list[Symbol] | None = _of(_SYMBOLS)
    incoming_locales: list[Symbol] | None = _of(_SYMBOLS)
    offered_capabilities: list[Symbol] | None = _of(_SYMBOLS)
    desired_capabilities: list[Symbol] | None = _of(_SYMBOLS)
    properties: dict[Any, Any] | None = _of(_SYMBOL_MAP)


@_register("amqp:begin:list")
@dataclass(slots=True)
class Begin(Composite):
    """2.7.2"""

    CODE = 0x11
    remote_channel: int | None = _of(_USHORT)
    next_outgoing_id: int = _of(_UINT, 0, mandatory=True)
    incoming_window: int = _of(_UINT, 0, mandatory=True)
    outgoing_window: int = _of(_UINT, 0, mandatory=True)
    handle_max: int = _of(_UINT, 0xFFFF_FFFF)
    offered_capabilities: list[Symbol] | None = _of(_SYMBOLS)
    desired_capabilities: list[Symbol] | None = _of(_SYMBOLS)
    properties: dict[Any, Any] | None = _of(_SYMBOL_MAP)


@_register("amqp:attach:list")
@dataclass(slots=True)
class Attach(Composite):
    """2.7.3. `role` is True for a receiver."""

    CODE = 0x12
    name: str = _of(_STRING, "", mandatory=True)
    handle: int = _of(_UINT, 0, mandatory=True)
    role: bool = _of(_BOOL, False, mandatory=True)
    snd_settle_mode: int = _of(_UBYTE, 2)
    rcv_settle_mode: int = _of(_UBYTE, 0)
    source: Source | None = _of(_SOURCE)
    target: Target | None = _of(_TARGET)
    unsettled: dict[Any, Any] | None = _of(_PLAIN_MAP)
    incomplete_unsettled: bool | None = _of(_BOOL)
    initial_delivery_count: int | None = _of(_UINT)
    max_message_size: int | None = _of(_ULONG)
    offered_capabilities: list[Symbol] | None = _of(_SYMBOLS)
    desired_capabilities: list[Symbol] | None = _of(_SYMBOLS)
    properties: dict[Any, Any] | None = _of(_SYMBOL_MAP)


@_register("amqp:flow:list")
@dataclass(slots=True)
class Flow(Composite):
    """2.7.4"""

    CODE = 0x13
    next_incoming_id: int | None = _of(_UINT)
    incoming_window: int = _of(_UINT, 0, mandatory=True)
    next_outgoing_id: int = _of(_UINT, 0, mandatory=True)
    outgoing_window: int = _of(_UINT, 0, mandatory=True)
    handle: int | None = _of(_UINT)
    delivery_count: int | None = _of(_UINT)
    link_credit: int | None = _of(_UINT)
    available: int | None = _of(_UINT)
    drain: bool = _of(_BOOL, False)
    echo: bool = _of(_BOOL, False)
    properties: dict[Any, Any] | None = _of(_SYMBOL_MAP)


@_register("amqp:transfer:list")
@dataclass(slots=True)
class Transfer(Composite):
    """2.7.5"""

    CODE = 0x14
    handle: int = _of(_UINT, 0, mandatory=True)
    delivery_id: int | None = _of(_UINT)
    delivery_tag: bytes | None = _of(_BINARY)
    message_format: int | None = _of(_UINT)
    settled: bool | None = _of(_BOOL)
    more: bool = _of(_BOOL, False)
    rcv_settle_mode: int | None = _of(_UBYTE)
    state: Any = _of(_STATE)
    resume: bool = _of(_BOOL, False)
    aborted: bool = _of(_BOOL, False)
    batchable: bool = _of(_BOOL, False)


@_register("amqp:disposition:list")
@dataclass(slots=True)
class Disposition(Composite):
    """2.7.6. `role` is True when sent by a receiver."""

    CODE = 0x15
    role: bool = _of(_BOOL, False, mandatory=True)
    first: int = _of(_UINT, 0, mandatory=True)
    last: int | None = _of(_UINT)
    settled: bool = _of(_BOOL, False)
    state: Any = _of(_STATE)
    batchable: bool = _of(_BOOL, False)


@_register("amqp:detach:list")
@dataclass(slots=True)
class Detach(Composite):
    """2.7.7"""

    CODE = 0x16
    handle: int = _of(_UINT, 0, mandatory=True)
    closed: bool = _of(_BOOL, False)
    error: AmqpError | None = _of(_ERROR)


@_register("amqp:end:list")
@dataclass(slots=True)
class End(Composite):
    """2.7.8"""

    CODE = 0x17
    error: AmqpError | None = _of(_ERROR)


@_register("amqp:close:list")
@dataclass(slots=True)
class Close(Composite):
    """2.7.9"""

    CODE = 0x18
    error: AmqpError | None = _of(_ERROR)


# ----------------------------------------------------------------------------------------- SASL (5.3.3)


@_register("amqp:sasl-mechanisms:list")
@dataclass(slots=True)
class SaslMechanisms(Composite):
    """5.3.3.1"""

    CODE = 0x40
    sasl_server_mechanisms: list[Symbol] = _of(_SYMBOLS, list, mandatory=True)


@_register("amqp:sasl-init:list")
@dataclass(slots=True, repr=False)
class SaslInit(Composite):
    """5.3.3.2. Not shown by `repr`, as its response may hold a key."""

    CODE = 0x41
    mechanism: str = _of(_SYMBOL, "", mandatory=True)
    initial_response: bytes | None = _of(_BINARY)
    hostname: str | None = _of(_STRING)


# No mechanism in use has these two. Registered, a peer's is an unexpected SASL frame, not one that cannot be decoded.
@_register("amqp:sasl-challenge:list")
@dataclass(slots=True, repr=False)
class SaslChallenge(Composite):
    """5.3.3.3"""

    CODE = 0x42
    challenge: bytes = _of(_BINARY, b"", mandatory=True)


@_register("amqp:sasl-response:list")
@dataclass(slots=True, repr=False)
class SaslResponse(Composite):
    """5.3.3.4"""

    CODE = 0x43
    response: bytes = _of(_BINARY, b"", mandatory=True)


@_register("amqp:sasl-outcome:list")
@dataclass(slots=True)
class SaslOutcome(Composite):
    """5.3.3.6. Code 0 is success."""

    CODE = 0x44
    code: int = _of(_UBYTE, 1, mandatory=True)
    additional_data: bytes | None = _of(_BINARY)
