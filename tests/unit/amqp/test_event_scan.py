"""The scan of received events: what it remembers of earlier ones must not change what it reads."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp import sections as module
from eventpump.amqp.codec import AmqpDecodeError
from eventpump.amqp.message import Data, Header, Message, Properties
from eventpump.amqp.sections import EventFields, Scan, scan_event, scan_key
from eventpump.amqp.types import Symbol, Timestamp

SEQUENCE, OFFSET, ENQUEUED, KEY = map(
    Symbol, ("x-opt-sequence-number", "x-opt-offset", "x-opt-enqueued-time", "x-opt-partition-key")
)


def make_fields() -> EventFields:
    """Make the names, with nothing remembered."""
    return EventFields(SEQUENCE.encode(), OFFSET.encode(), ENQUEUED.encode(), KEY.encode())


def outcome(raw: bytes, fields: EventFields) -> Scan | str:
    """Scan, and give the result or the refusal."""
    try:
        return scan_event(raw, fields)
    except AmqpDecodeError:
        return "refused"


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Make events as services and their senders may: any order, further annotations, other sections, other types."""
    entries = [
        (SEQUENCE, draw(st.sampled_from([0, 5, 127, 128, 2**40, -1, "text"]))),
        (OFFSET, draw(st.sampled_from(["0", "4294967296", "4294967297", "x" * 200, "é", 5]))),
        (ENQUEUED, draw(st.sampled_from([Timestamp(0), Timestamp(1_700_000_000_000), 7]))),
        (KEY, draw(st.sampled_from(["k", "key1", "key2", None, b"b", [1, 2], True]))),
    ]
    chosen = draw(st.permutations(entries))[: draw(st.sampled_from([4, 4, 4, 3]))]
    message = Message(message_annotations=dict(chosen))
    message.body = Data(
        tuple(draw(st.lists(st.sampled_from([b"", b"a", b"b" * 300, b"c" * 300]), min_size=1, max_size=2)))
    )
    message.header = draw(st.sampled_from([None, Header(durable=True), Header(priority=3)]))
    message.properties = draw(st.sampled_from([None, Properties(message_id="m")]))
    message.delivery_annotations = draw(st.sampled_from([None, None, {Symbol("d"): 1}]))
    message.footer = draw(st.sampled_from([None, None, {Symbol("f"): 1}]))
    return message.encode()


@given(st.lists(messages(), min_size=2, max_size=8), st.data())
def test_scan_with_memory_equals_scan_without(events: list[bytes], data: st.DataObject) -> None:
    """Whatever was scanned before, a message, sound or damaged, is read as by a scan that remembers nothing."""
    remembering = make_fields()
    for raw in [*events, *events]:
        assert outcome(raw, remembering) == outcome(raw, make_fields())
    damaged = bytearray(data.draw(st.sampled_from(events)))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, min(len(damaged), 140) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for raw in (bytes(damaged), cut):
        assert outcome(raw, remembering) == outcome(raw, make_fields())


@given(st.lists(messages(), min_size=1, max_size=8), st.data())
def test_scan_of_a_key_equals_the_general_decoder(events: list[bytes], data: st.DataObject) -> None:
    """Whatever was scanned before, a key that is read fast is that of the general decoder, and so is the rest."""
    fields = make_fields()
    for raw in events:
        outcome(raw, fields)
    damaged = bytearray(data.draw(st.sampled_from(events)))
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, min(len(damaged), 140) - 1))] = data.draw(st.integers(0, 255))
    for raw in (*events, bytes(damaged)):
        found = scan_key(raw, fields)
        if found is not None:
            assert found[0] == outcome(raw, make_fields())
            try:
                annotations = Message.decode(raw).message_annotations
            except AmqpDecodeError:
                continue  # its sections are in order, and what is in one of them is not
            assert found[1] == (annotations or {}).get(KEY)


@pytest.mark.parametrize("key", [None, "k", "a longer key"])
def test_scan_of_a_key_of_a_known_layout_needs_no_walk(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second event of a layout gives its key, and what `scan_event` reads, in one step."""
    fields = make_fields()
    assert scan_key(event(1, key=key), fields) is None
    scan_event(event(1, key=key), fields)
    monkeypatch.setattr(module, "_walk_event", None)
    found = scan_key(event(2, key=None if key is None else key[::-1]), fields)
    assert found == ((1002, "4294967296", 1_700_000_000_002, b"b" * 300), None if key is None else key[::-1])


def event(number: int, offset: str = "4294967296", body: bytes = b"b" * 300, key: str | None = None) -> bytes:
    """Make an event of the usual layout."""
    annotations = {SEQUENCE: 1000 + number, OFFSET: offset, ENQUEUED: Timestamp(1_700_000_000_000 + number)}
    if key is not None:
        annotations[KEY] = key
    return Message(message_annotations=annotations, body=Data((body,))).encode()


@pytest.mark.parametrize("key", [None, "symbol"])
def test_scan_of_a_known_layout_needs_no_walk(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second event of a layout is read without a walk, whatever its values are."""
    fields = make_fields()
    scan_event(event(1, key=key), fields)
    monkeypatch.setattr(module, "_walk_event", None)
    found = scan_event(event(2, "4294969999", b"c" * 500, None if key is None else "tobmys"), fields)
    assert found == (1002, "4294969999", 1_700_000_000_002, b"c" * 500)


@pytest.mark.parametrize(
    ("rest", "body"),
    [
        (Message(body=Data((b"b" * 300, b"c" * 300))), None),
        (Message(body=Data((b"b" * 300,)), footer={Symbol("f"): 1}), None),
        (Message(body=Data((b"b" * 300,)), properties=Properties(message_id="m")), b"b" * 300),
        (Message(body=Data((b"small",))), b"small"),
    ],
)
def test_scan_of_a_known_layout_reads_other_sections_after_annotations(rest: Message, body: bytes | None) -> None:
    """A message whose annotations are of a known layout, but not the rest, is read for what it is."""
    fields = make_fields()
    scan_event(event(1), fields)
    rest.message_annotations = Message.decode(event(2)).message_annotations
    assert scan_event(rest.encode(), fields) == scan_event(rest.encode(), make_fields())
    assert scan_event(rest.encode(), fields)[:2] == (1002, "4294967296")
    if body is not None:
        assert scan_event(rest.encode(), fields)[3] == body


def test_scan_checks_the_text_of_an_offset_that_is_there_twice() -> None:
    """Whether an event of the same layout was scanned before or not."""
    other = Symbol("x-opt-offseu")
    annotations = {SEQUENCE: 1, OFFSET: "1", other: "2", ENQUEUED: Timestamp(1)}
    raw = Message(message_annotations=annotations, body=Data((b"b" * 300,))).encode().replace(b"offseu", b"offset")
    fields = make_fields()
    assert outcome(raw, fields) == (1, "2", 1, b"b" * 300)
    damaged = raw.replace(b"\xa1\x011", b"\xa1\x01\xff")
    assert outcome(damaged, make_fields()) == outcome(damaged, fields) == "refused"


def test_scan_memory_is_bounded() -> None:
    """However many layouts a peer writes, few are kept, and later ones are read all the same."""
    fields = make_fields()
    for size in range(700):
        header = b"\x00\x53\x70\xc0\x04\x01\x71" + struct.pack(">H", size)
        raw = header + event(size)
        assert scan_event(raw, fields)[0] == 1000 + size
        scan_event(event(size, key="k" * (size % 150)), fields)
    assert sum(map(len, fields.layouts.values())) <= 4 * 256
    assert len(fields.layouts) <= 256
