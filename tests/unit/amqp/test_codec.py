"""The type system: every type there and back, compact forms at their limits, and bad bytes."""

from __future__ import annotations

import datetime
import tracemalloc
import uuid
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventpump.amqp.codec import (
    MAX_DEPTH,
    MAX_DESCRIPTIONS,
    MAX_WEAK_KEYS,
    AmqpDecodeError,
    EncodeError,
    decode,
    encode,
    skip,
)
from eventpump.amqp.types import (
    Array,
    Char,
    Decimal32,
    Described,
    Float,
    Int,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
)
from tests.support.memory import traced_memory
from tests.support.values import SCALARS, arrays, arrays_of, plain, values


def assert_round_trip(value: Any) -> None:
    """Encode, decode and skip a value."""
    raw = encode(value)
    found, end = decode(raw)
    assert end == len(raw) == skip(raw, 0, len(raw))
    assert plain(found) == plain(value)


@given(st.data())
@pytest.mark.parametrize("name", sorted(SCALARS))
def test_decode_returns_every_scalar_that_was_encoded(name: str, data: st.DataObject) -> None:
    """Every primitive type decodes to what was encoded, type included."""
    assert_round_trip(data.draw(SCALARS[name]))


@given(st.data())
@pytest.mark.parametrize("name", sorted(SCALARS))
def test_decode_returns_arrays_of_every_primitive_type(name: str, data: st.DataObject) -> None:
    """An array of every primitive type decodes to what was encoded."""
    assert_round_trip(data.draw(arrays_of(SCALARS[name])))


@given(arrays)
def test_decode_returns_arrays_of_described_and_compound_values(value: Array) -> None:
    """Arrays of described values, arrays, lists and maps decode to what was encoded."""
    assert_round_trip(value)


@given(values)
def test_decode_returns_nested_compounds(value: Any) -> None:
    """Compounds nest in each other, described or not."""
    assert_round_trip(value)


@given(values, st.binary(max_size=5), st.binary(max_size=5))
def test_decode_finds_a_value_between_other_bytes(value: Any, before: bytes, behind: bytes) -> None:
    """A value is found where it stands, whatever is around it."""
    raw = before + encode(value) + behind
    found, end = decode(raw, len(before))
    assert plain(found) == plain(value)
    assert end == len(raw) - len(behind) == skip(raw, len(before), len(raw))


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        (None, "40"),
        (True, "41"),
        (False, "42"),
        (UInt(0), "43"),
        (UInt(255), "52ff"),
        (UInt(256), "7000000100"),
        (ULong(0), "44"),
        (ULong(255), "53ff"),
        (ULong(256), "800000000000000100"),
        (Int(-128), "5480"),
        (Int(-129), "71ffffff7f"),
        (127, "557f"),
        (128, "810000000000000080"),
        (-128, "5580"),
        (UByte(255), "50ff"),
        ([], "45"),
        ([None], "c0020140"),
        ({}, "c10100"),
        ("", "a100"),
        (b"x" * 255, "a0ff" + "78" * 255),
        (b"x" * 256, "b000000100" + "78" * 256),
        ([None] * 254, "c0fffe" + "40" * 254),
        ([None] * 255, "d000000103000000ff" + "40" * 255),
        (Symbol("a"), "a30161"),
        (Described(ULong(0x75), b""), "005375a000"),
        (Array([Symbol("a"), Symbol("b")]), "e00c02b30000000161" + "0000000162"),
        (Array(of=Symbol), "e00200b3"),
        (uuid.UUID(int=1), "98" + "00" * 15 + "01"),
    ],
)
def test_encode_chooses_the_most_compact_form(value: Any, wire: str) -> None:
    """The most compact form is chosen, up to its very limit."""
    assert encode(value).hex() == wire
    assert plain(decode(bytes.fromhex(wire))[0]) == plain(value)


@pytest.mark.parametrize(
    ("wire", "value"),
    [
        ("5601", True),
        ("5600", False),
        ("7000000001", UInt(1)),
        ("800000000000000001", ULong(1)),
        ("7100000001", Int(1)),
        ("810000000000000001", 1),
        ("b100000000", ""),
        ("d00000000400000000", []),
        ("d10000000400000000", {}),
        ("e004025401ff", Array([Int(1), Int(-1)])),
        ("e0020241", Array([True, True])),
        ("0080" + "0000000000000075" + "a000", Described(ULong(0x75), b"")),
    ],
)
def test_decode_takes_wider_forms_of_other_peers(wire: str, value: Any) -> None:
    """What other peers may write in a wider or odder form is understood."""
    assert plain(decode(bytes.fromhex(wire))[0]) == plain(value)


def test_encode_and_decode_timestamps_in_milliseconds() -> None:
    """An aware datetime goes as a timestamp in milliseconds; moments that no datetime holds still decode."""
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9, 123_999, tzinfo=datetime.UTC)
    found = decode(encode(moment))[0]
    assert isinstance(found, Timestamp)
    assert found.to_datetime() == moment.replace(microsecond=123_000)
    assert Timestamp(2**63 - 1).to_datetime().year == 9999
    assert Timestamp(-(2**63)).to_datetime().year == 1
    assert Timestamp.from_datetime(Timestamp(-1).to_datetime()) == -1


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63) - 1,
        Float(1e300),
        "\ud800",
        Symbol("ä"),
        datetime.datetime(2024, 1, 1),  # naive
        object(),
        {1, 2},
        Array([1, "a"]),
        Array([UInt(1), 1]),
        Array([None] * 17),
        [object()],
    ],
)
def test_encode_refuses_a_value_without_an_amqp_form(value: Any) -> None:
    """A value without an AMQP form is refused by `EncodeError`."""
    with pytest.raises(EncodeError):
        encode(value)


@pytest.mark.parametrize(
    ("kind", "value"), [(UByte, 256), (UByte, -1), (UInt, 2**32), (Int, 2**31), (ULong, -1), (Timestamp, 2**63)]
)
def test_sized_number_too_large_for_its_type_is_refused(kind: Any, value: int) -> None:
    """A number too large for its type is refused when it is made."""
    with pytest.raises(ValueError, match="does not fit"):
        kind(value)


def test_char_and_decimal_of_a_wrong_width_are_refused() -> None:
    """Chars hold one scalar value, decimals their exact width."""
    for bad in ("", "ab", "\ud800"):
        with pytest.raises(ValueError, match="scalar"):
            Char(bad)
    with pytest.raises(ValueError, match="4 bytes"):
        Decimal32(b"123")


@given(st.binary(max_size=200))
@example(b"\x00" * 100)
@example(b"\xf0\x00\x00\x00\x05\xff\xff\xff\xff\x40")
@example(b"\xe0\x04\x01\x00\x45\x45")
def test_decode_of_random_bytes_raises_only_decode_error(raw: bytes) -> None:
    """Random bytes decode, or raise `AmqpDecodeError`; nothing else."""
    for call in (lambda: decode(raw), lambda: skip(raw, 0, len(raw))):
        try:
            call()
        except AmqpDecodeError as error:
            assert error.condition == "amqp:decode-error"  # noqa: PT017 - either way is fine


@given(values, st.data())
def test_decode_of_a_truncated_value_raises_decode_error(value: Any, data: st.DataObject) -> None:
    """A value that is cut short is never taken for whole."""
    raw = encode(value)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    with pytest.raises(AmqpDecodeError):
        decode(cut)
    with pytest.raises(AmqpDecodeError):
        skip(cut, 0, len(cut))


@given(values, st.data())
def test_decode_of_mutated_bytes_raises_only_decode_error(value: Any, data: st.DataObject) -> None:
    """A value with bytes changed decodes, or raises `AmqpDecodeError`; what decodes can be encoded again."""
    raw = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from([0, 0x40, 0x45, 0xF0, 0xFF, 0xC1]))
    try:
        found = decode(bytes(raw))[0]
    except AmqpDecodeError:
        return
    encode(found)


@pytest.mark.parametrize(
    "wire",
    [
        "d0ffffffffffffffff",
        "d00000000affffffff4040404040",
        "f00000000effffffff40",
        "e005ff40404040",
        "f0000000050000001140",
        "b0ffffffff00",
        "b1ffffffff61",
        "f00000000affffffff8100000000",
    ],
)
def test_decode_checks_counts_and_sizes_before_it_allocates(wire: str) -> None:
    """A count or size beyond the bytes that are there is refused before anything is made."""
    with traced_memory():
        with pytest.raises(AmqpDecodeError):
            decode(bytes.fromhex(wire))
        assert tracemalloc.get_traced_memory()[1] < 100_000


@pytest.mark.parametrize("opening", [b"\xc0\xff\x01", b"\xe0\xff\x01", b"\x00", b"\xd0\0\0\x40\0\0\0\0\x01"])
def test_decode_and_encode_bound_the_depth_of_nesting(opening: bytes) -> None:
    """Nesting is bounded in decoding and encoding alike."""
    with pytest.raises(AmqpDecodeError):
        decode(opening * 1000)
    nested: Any = None
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    assert plain(decode(encode(nested))[0]) == plain(nested)
    with pytest.raises(EncodeError, match="deep"):
        encode([nested])


def test_decode_refuses_a_map_whose_keys_collide() -> None:
    """A map whose keys could all be made to collide is refused; such maps of a fair size are not."""
    few = {uuid.UUID(int=number): None for number in range(MAX_WEAK_KEYS)}
    assert plain(decode(encode(few))[0]) == plain(few)
    with pytest.raises(AmqpDecodeError, match="keys"):
        decode(encode({uuid.UUID(int=number): None for number in range(MAX_WEAK_KEYS + 1)}))


@pytest.mark.parametrize(
    "wire",
    [
        "c1020140",
        "c103024540",
        "c10402c1010040",
        "5602",
        "730000d800",
        "7300110000",
        "a101ff",
        "a301ff",
        "3f",
        "c0024040",
        "00454040",
        "c003014040",
    ],
)
def test_decode_refuses_values_that_break_a_rule_of_their_type(wire: str) -> None:
    """Values that break a rule of their type are refused."""
    with pytest.raises(AmqpDecodeError):
        decode(bytes.fromhex(wire))


def _described(*descriptors: bytes, value: bytes = b"\x45") -> bytes:
    return b"".join(b"\x00" + each for each in descriptors) + value


@pytest.mark.parametrize(
    "raw",
    [
        bytes.fromhex("00 00a30161 5401 5403"),
        bytes.fromhex("00 00 00a30161 5401 5402 5403"),
        _described(b"\x00" * 10 + b"\xa3\x01a" + b"\x54\x01" * 10, value=b"\x54\x03"),
    ],
)
def test_decode_and_skip_agree_on_a_described_descriptor(raw: bytes) -> None:
    """Of a described descriptor (1.2) decoding and skipping agree on where the value ends."""
    value, end = decode(raw)
    assert end == len(raw) == skip(raw, 0, len(raw))
    assert encode(value) == raw


@given(st.lists(st.sampled_from([b"\x00", b"\xa3\x01a", b"\x54\x03", b"\x45"]), max_size=80).map(b"".join))
def test_decode_and_skip_agree_on_nested_descriptions(raw: bytes) -> None:
    """However descriptions nest, what can be decoded is skipped to the same end, and what is too deep is neither."""
    try:
        _, end = decode(raw)
    except AmqpDecodeError as error:
        if "nest" in error.description:
            with pytest.raises(AmqpDecodeError):
                skip(raw, 0, len(raw))
        return
    assert skip(raw, 0, len(raw)) == end


def test_decode_bounds_the_descriptors_of_an_arrays_values() -> None:
    """A byte of an array does not make an object per descriptor of its constructor, of which there may be thirty."""
    value: Any = 1
    for _ in range(MAX_DESCRIPTIONS):
        value = Described(Symbol("d"), value)
    assert decode(encode(Array([value, value])))[0] == [value, value]
    with pytest.raises(EncodeError):
        encode(Array([Described(Symbol("d"), value)]))
    head = b"\x00\x40" * (MAX_DESCRIPTIONS + 1) + b"\x50"
    with pytest.raises(AmqpDecodeError, match="described more than"):
        decode(b"\xe0" + bytes((len(head) + 3, 2)) + head + b"\x01\x02")
