"""Sections are found and read one by one as the whole message is decoded, however it is written or damaged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.codec import AmqpDecodeError, encode
from eventpump.amqp.message import AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.sections import (
    DATA,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    check_rest,
    check_sections,
    find_key,
    prefix_end,
    salvage_annotations,
    section,
    section_spans,
    section_value,
    values_at,
)
from eventpump.amqp.types import Described, Symbol, Timestamp, ULong
from tests.unit.amqp.test_event_scan import ENQUEUED, KEY, OFFSET, SEQUENCE, make_fields, messages

PREFIX = {HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS}


def pieces(raw: bytes) -> list[bytes]:
    """Return the sections of a message."""
    return [raw[start:end] for _, start, end in section_spans(raw)]


def long_form(piece: bytes) -> bytes:
    """Return a section whose descriptor is written with eight bytes, as some libraries do."""
    return b"\x00\x80" + bytes(7) + piece[2:]


@st.composite
def unusual(draw: st.DrawFn) -> bytes:
    """Make messages whose sections stand in any order, some with a descriptor in the long form."""
    parts = draw(st.permutations(pieces(draw(messages()))))
    return b"".join(long_form(part) if draw(st.booleans()) else part for part in parts)


def outcome(call: Any, *args: Any) -> Any:
    """Return what a function returns, or that it refuses the message."""
    try:
        return call(*args)
    except AmqpDecodeError:
        return "refused"


@given(st.one_of(messages(), unusual()), st.sampled_from([HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, FOOTER]))
def test_one_section_is_decoded_as_in_the_whole(raw: bytes, code: int) -> None:
    """Or both refuse the message."""
    whole = outcome(Message.decode, raw)
    value = outcome(section_value, raw, code)
    if whole == "refused":
        return
    of_map = {DELIVERY_ANNOTATIONS: whole.delivery_annotations, MESSAGE_ANNOTATIONS: whole.message_annotations}
    if code in of_map:
        assert value == of_map[code]
    elif code == FOOTER:
        assert value == whole.footer
    else:
        assert (value is None) == (whole.header is None)


@given(st.one_of(messages(), unusual()), st.integers(0, 12), st.data())
def test_damaged_messages_are_refused_alike(raw: bytes, cut: int, data: st.DataObject) -> None:
    """By a search for one section, as by the check of all of them; what is found is where the check has it."""
    at = data.draw(st.integers(0, len(raw) - 1))
    damaged = raw[: len(raw) - cut] if cut else raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :]
    checked = outcome(check_sections, damaged)
    for first, last in ((HEADER, HEADER), (MESSAGE_ANNOTATIONS, MESSAGE_ANNOTATIONS), (HEADER, FOOTER)):
        found = outcome(values_at, damaged, first, last)
        if checked != "refused":
            assert found == [(code, value, end) for code, _, value, end in checked if first <= code <= last]


@given(messages())
def test_prefix_of_a_message_ends_where_its_annotations_do(raw: bytes) -> None:
    """And the rest of it is sections; with a prefix in the long form too."""
    spans = section_spans(raw)
    end = max((after for code, _, after in spans if code in PREFIX), default=0)
    assert prefix_end(raw) == end
    assert check_rest(raw, end)
    parts = pieces(raw)
    longer = [long_form(part) for part in parts]
    of_prefix = [len(part) for (code, _, _), part in zip(spans, longer, strict=True) if code in PREFIX]
    assert prefix_end(b"".join(longer)) == sum(of_prefix)


def test_rest_with_annotations_is_not_all_of_them() -> None:
    """As of Python's clients, which write delivery annotations behind the body; a cut rest is refused."""
    start = Message(Data((b"x",)), message_annotations={SEQUENCE: 1}).encode()
    raw = start + section(DELIVERY_ANNOTATIONS, {Symbol("d"): 1})
    end = prefix_end(raw)
    assert not check_rest(raw, end)
    assert check_rest(start, end)
    for bad in (start[:-1], b"", raw[:-1]):
        with pytest.raises(AmqpDecodeError):
            check_rest(bad, min(end, len(bad)))


@given(st.one_of(messages(), unusual()))
def test_key_of_any_layout_is_that_of_the_annotations(raw: bytes) -> None:
    """Or both refuse the message."""
    whole, key = outcome(Message.decode, raw), outcome(find_key, raw, make_fields())
    if whole != "refused" and key != "refused":
        assert key == (whole.message_annotations or {}).get(KEY)


@given(
    st.dictionaries(
        st.sampled_from([SEQUENCE, OFFSET, ENQUEUED, KEY, Symbol("other")]),
        st.sampled_from([1, True, "7", Timestamp(9), None]),
    ),
    st.binary(max_size=8),
)
def test_known_annotations_are_read_of_what_is_no_message(annotations: dict[Symbol, Any], rest: bytes) -> None:
    """Each of its own type, whatever follows; nothing is raised where the message ends anywhere."""
    raw = Message(message_annotations=annotations, header=Header(durable=True)).encode() + b"\x00" + rest
    number, offset, enqueued = (annotations.get(name) for name in (SEQUENCE, OFFSET, ENQUEUED))
    assert salvage_annotations(raw, make_fields()) == (
        number if isinstance(number, int) and not isinstance(number, bool) else None,
        offset if isinstance(offset, str) else None,
        int(enqueued) if isinstance(enqueued, Timestamp) else None,
    )
    for end in range(len(raw)):
        salvage_annotations(raw[:end], make_fields())


def test_what_a_section_may_not_hold_is_refused() -> None:
    """A body of two kinds, a section twice, and a value of another type; of data several are one body."""
    body, value = Message(Data((b"x",))).encode(), Message(AmqpValue(1)).encode()
    properties = Message(properties=Properties(message_id="m")).encode()
    for raw in (
        body + value,
        properties + properties,
        encode(Described(ULong(MESSAGE_ANNOTATIONS), 5)),
        encode(Described(ULong(0x99), {})),
        b"\x01",
    ):
        with pytest.raises(AmqpDecodeError):
            check_sections(raw)
    assert [code for code, *_ in check_sections(body + body)] == [DATA, DATA]
    assert section_value(body + properties, PROPERTIES) is not None
