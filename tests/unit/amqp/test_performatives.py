"""The composites: every field there and back, always all of them, and what a bad peer may put in them."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventpump.amqp import performatives as module
from eventpump.amqp.codec import AmqpDecodeError, decode, encode
from eventpump.amqp.performatives import (
    Accepted,
    AmqpError,
    Attach,
    Begin,
    Close,
    Composite,
    Detach,
    Disposition,
    End,
    Flow,
    Modified,
    Open,
    Received,
    Rejected,
    Released,
    SaslChallenge,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
    Source,
    Target,
    Transfer,
    composite,
    decode_performative,
)
from eventpump.amqp.types import Array, Described, Symbol, ULong
from tests.support.values import SCALARS, scalars, symbol_maps, symbols, texts

CLASSES: list[type[Composite]] = [
    *(Open, Begin, Attach, Flow, Transfer, Disposition, Detach, End, Close),
    *(SaslMechanisms, SaslInit, SaslChallenge, SaslResponse, SaslOutcome),
    *(Source, Target, AmqpError, Received, Accepted, Rejected, Released, Modified),
]


def kind_of(cls: type[Any], name: str) -> Any:
    """Return the kind of one field of a class."""
    return next(each.metadata["kind"] for each in fields(cls) if each.name == name)


_KINDS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (kind_of(Open, "container_id"), texts),
    (kind_of(Open, "max_frame_size"), SCALARS["uint"]),
    (kind_of(Open, "channel_max"), SCALARS["ushort"]),
    (kind_of(Open, "offered_capabilities"), st.lists(symbols, min_size=1, max_size=3)),
    (kind_of(Open, "properties"), symbol_maps),
    (kind_of(Attach, "role"), st.booleans()),
    (kind_of(Attach, "snd_settle_mode"), SCALARS["ubyte"]),
    (kind_of(Attach, "max_message_size"), SCALARS["ulong"]),
    (kind_of(Attach, "unsettled"), st.dictionaries(SCALARS["binary"], scalars, max_size=3)),
    (kind_of(Attach, "source"), st.deferred(lambda: instances(Source))),
    (kind_of(Attach, "target"), st.deferred(lambda: instances(Target))),
    (kind_of(Transfer, "delivery_tag"), SCALARS["binary"]),
    (
        kind_of(Transfer, "state"),
        st.deferred(lambda: st.one_of(*map(instances, (Accepted, Rejected, Released, Modified, Received)))),
    ),
    (kind_of(Close, "error"), st.deferred(lambda: instances(AmqpError))),
    (kind_of(Source, "address"), texts),
    (kind_of(AmqpError, "condition"), symbols),
]


def instances(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Make objects of a class with any mix of fields set; the mandatory ones always."""
    made: dict[str, st.SearchStrategy[Any]] = {}
    for each in fields(cls):
        values = next(values for kind, values in _KINDS if kind is each.metadata["kind"])
        made[each.name] = values if each.metadata["mandatory"] or each.default is not None else values | st.none()
    return st.builds(cls, **made)


INSTANCES = {cls: instances(cls) for cls in CLASSES}


@given(st.data())
@pytest.mark.parametrize("cls", CLASSES)
def test_performative_decodes_to_what_was_encoded(cls: type[Any], data: st.DataObject) -> None:
    """Every composite decodes to what was encoded.

    All its fields are on the wire, nulls included, under a one-byte descriptor (protocol.md 13); a peer may leave
    out what is null at the end, and use the descriptor's symbol.
    """
    value = data.draw(INSTANCES[cls])
    raw = value.encode()
    assert raw[:3] == bytes([0, 0x53, cls.CODE])
    items = decode(raw)[0].value
    assert len(items) == len(fields(cls))
    found, end = decode_performative(raw, 0, len(raw))
    assert end == len(raw)
    # By their text: NaN equals itself there.
    expected = repr(value.described())
    assert repr(found.described()) == expected
    while items and items[-1] is None:
        items.pop()
    name = re.sub(r"\B(?=[A-Z])", "-", cls.__name__).lower().removeprefix("amqp-")
    assert repr(composite(Described(Symbol(f"amqp:{name}:list"), items)).described()) == expected


_IDS = st.sampled_from([b"\x43", b"\x40", b"\x52\x07", b"\x52", b"\x70\x01\x02\x03\x04", b"\x70\x01\x02", b"\x41"])
_FLAGS = st.sampled_from([b"\x41", b"\x42", b"\x40", b"\x56\x01", b"\x56\x00", b""])
_OUTCOMES = st.sampled_from([b"\x00\x53\x24\x45", b"\x00\x53\x24\xc0\x01\x00", b"\x00\x53\x26\x45", b"\x40", b""])


@given(
    st.tuples(_FLAGS, _IDS, _IDS, _FLAGS, _OUTCOMES, _FLAGS),
    st.integers(4, 7),
    st.integers(-2, 2),
    st.binary(max_size=3),
)
@settings(max_examples=2_000)
def test_disposition_that_accepts_is_decoded_as_any_other(
    items: tuple[bytes, ...], count: int, wrong: int, after: bytes
) -> None:
    """The usual disposition has a decoder of its own, which returns what the general one does, or leaves it to that."""
    body = b"".join(items)
    raw = b"\x00\x53\x15\xc0" + bytes((max(0, len(body) + 1 + wrong), count)) + body + after

    def outcome() -> tuple[str, str]:
        try:
            return "value", repr(decode_performative(b"12345" + raw, 5, 5 + len(raw)))
        except AmqpDecodeError as error:
            return "error", str(error)

    found = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_accepted", lambda *_: None)
        assert found == outcome()


def test_disposition_that_accepts_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this package, Azure's service and pyamqp write is decoded without the general decoder."""
    ours = Disposition(role=True, first=300, last=301, settled=True, state=Accepted()).encode()
    monkeypatch.delattr(module, "decode")  # the general decoder
    for last, state, more in (
        (b"\x52\x05", b"\x45", b""),
        (b"\x40", b"\xc0\x01\x00", b"\x42"),
        (b"\x43", b"\x45", b"\x40"),
    ):
        body = b"\x41\x52\x05" + last + b"\x41\x00\x53\x24" + state + more
        raw = b"\x00\x53\x15\xc0" + bytes((len(body) + 1, 5 + len(more))) + body
        assert decode_performative(raw, 0, len(raw))[1] == len(raw)
    assert decode_performative(ours, 0, len(ours))[0] == Disposition(True, 300, 301, True, Accepted())


@pytest.mark.parametrize(
    ("cls", "count"),
    [(Open, 10), (Begin, 8), (Attach, 14), (Flow, 11), (Transfer, 11), (Disposition, 6), (Detach, 3), (AmqpError, 3)],
)
def test_performative_field_counts_are_those_of_the_official_client(cls: type[Composite], count: int) -> None:
    """The counts are those the official client indexes by position."""
    assert len(cls().described().value) == count


@pytest.mark.parametrize("cls", [End, Close])
def test_close_and_end_are_never_encoded_as_list0(cls: type[Composite]) -> None:
    """Close and end hold an explicit null."""
    assert cls().encode() == bytes([0, 0x53, cls.CODE, 0xC0, 2, 1, 0x40])


@pytest.mark.parametrize("cls", CLASSES)
def test_decode_without_a_mandatory_field_is_refused(cls: type[Any]) -> None:
    """A mandatory field that is missing is refused."""
    mandatory = [each.name for each in fields(cls) if each.metadata["mandatory"]]
    if mandatory:
        with pytest.raises(AmqpDecodeError, match=mandatory[0]):
            composite(Described(ULong(cls.CODE), []))
    else:
        assert composite(Described(ULong(cls.CODE), [])) == cls()


@pytest.mark.parametrize(
    ("cls", "at", "value"),
    [
        (Transfer, 0, -1),
        (Transfer, 0, 2**32),
        (Transfer, 0, True),
        (Transfer, 2, "tag"),
        (Transfer, 7, Described(ULong(0x1D), [Symbol("a")])),
        (Attach, 0, b"name"),
        (Attach, 5, Described(ULong(0x29), [])),
        (Attach, 6, Described(ULong(0x28), [])),
        (Attach, 6, Described(ULong(0x30), [])),
        (Attach, 5, []),
        (Attach, 13, {"ä": 1}),
        (Attach, 13, []),
        (Detach, 2, Described(ULong(0x10), ["x"])),
        (Detach, 1, 1),
        (Open, 2, 2**40),
        (Open, 5, Array([1])),
        (Open, 5, "text"),
        (AmqpError, 0, "ä"),
    ],
)
def test_decode_with_a_field_of_a_wrong_type_or_range_is_refused(cls: type[Any], at: int, value: Any) -> None:
    """A field of another type or out of its range is refused: it could be neither used nor sent back."""
    items = cls(**{each.name: "x" for each in fields(cls) if each.name in ("name", "container_id")}).described().value
    items[at] = value
    raw = encode(Described(ULong(cls.CODE), items))
    with pytest.raises(AmqpDecodeError):
        decode_performative(raw, 0, len(raw))


@pytest.mark.parametrize(
    "value", [Described(ULong(0x99), []), Described(16.0, ["x"]), Described("amqp:open:list", ["x"]), [], None]
)
def test_decode_of_an_unknown_performative_is_refused(value: Any) -> None:
    """What is described by nothing known is refused."""
    raw = encode(value)
    with pytest.raises(AmqpDecodeError):
        decode_performative(raw, 0, len(raw))


def test_decode_with_too_many_fields_is_refused() -> None:
    """More fields than the specification knows are refused."""
    with pytest.raises(AmqpDecodeError, match="too many"):
        composite(Described(ULong(0x16), [None] * 4))


def test_decode_takes_one_symbol_for_an_array_of_them() -> None:
    """A field of several symbols may hold one without an array (1.4)."""
    assert composite(Described(ULong(0x40), [Symbol("PLAIN")])) == SaslMechanisms([Symbol("PLAIN")])


def test_repr_of_sasl_performatives_shows_no_secret() -> None:
    """The text of a SASL response shows no key."""
    assert "secret" not in repr(SaslInit("PLAIN", b"\0name\0secret")) + repr(SaslResponse(b"secret"))
