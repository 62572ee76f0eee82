"""The compiled columns are those of the reference, value or error, on sound, damaged and hostile messages."""

from __future__ import annotations

import gc
import sys
import uuid
from collections.abc import Iterable
from datetime import UTC, datetime
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from eventpump.amqp.message import AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.sections import section_spans
from eventpump.amqp.types import (
    Byte,
    Char,
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
from eventpump.compiled import compiled_part
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, PUBLISHER, SEQUENCE_NUMBER
from eventpump.reports import build_info
from eventpump.spark.source import rows
from eventpump.spark.source.rows import PackedEvents, RowEncoder
from eventpump.spark.source.schema import COLUMN_TYPES, HUB_COLUMN
from tests.fuzz.entry import seed_of_today
from tests.support.damage import damage, outcome

compiled: Any = compiled_part("eventpump.spark.source._columns")
_NAMES = rows._FILLED_NAMES
_COMPILED = [*COLUMN_TYPES, HUB_COLUMN]
pytestmark = [pytest.mark.timeout(4 * 3600)]  # a million messages
NOW = datetime(2026, 1, 1, tzinfo=UTC)
needs_core = pytest.mark.skipif(compiled is None, reason="this is the build without the compiled core")


def test_columns_are_compiled_where_the_core_is() -> None:
    """Both or none: a build is one of two."""
    assert (compiled is not None) == build_info().is_compiled


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Iterable[int]:
    """The seeds of the cases of one test. The long form has a tenth of those of an event: a case is a whole batch."""
    first = seed_of_today()
    return range(first, first + (100_000 if request.config.getoption("--long") else 300))


def in_python(encoder: RowEncoder, events: PackedEvents) -> pa.RecordBatch:
    """Make rows by the reference alone."""
    rows._compiled = None  # type: ignore[misc]  # it is final for others
    try:
        return encoder.encode(events)
    finally:
        rows._compiled = compiled  # type: ignore[misc]  # likewise


_TEXTS = ("", "a", "größe", "x" * 300, "\U0001f600", "message-id", "to", "\0", "1234567", "12345678")
_NUMBERS = (0, 1, -1, 127, 128, -128, -129, 255, 2**31, -(2**31), 2**63 - 1, -(2**63))


def value(random: Random) -> Any:
    """Return a value of a property or annotation."""
    number = random.choice(_NUMBERS)
    match random.randrange(16):
        case 0:
            return None
        case 1:
            return number
        case 2:
            return random.choice((UByte(200), UShort(60_000), UInt(2**32 - 1), UInt(0), ULong(2**64 - 1), ULong(0)))
        case 3:
            return random.choice((Byte(-128), Short(-30_000), Int(-(2**31)), Int(5), UInt(5), ULong(5)))
        case 4:
            return random.choice((True, False, 1.5, Float(0.5), float("nan"), Char("é")))
        case 5:
            return random.choice((Timestamp(0), Timestamp(number), uuid.UUID(int=5), b"", b"\xff", b"x" * 300))
        case 6:
            return random.choice(([], [1, "a"], {"a": 1}, [[1]], Described(Symbol("d"), 5)))
        case 7:
            return Symbol(random.choice(("", "s", "s" * 256)))
    return random.choice(_TEXTS)


def message(random: Random) -> bytes:
    """Return an event as services and their senders may write it."""
    annotations: dict[Any, Any] = {
        SEQUENCE_NUMBER: random.choice((*_NUMBERS, *_NUMBERS, "text", None)),
        OFFSET: random.choice((*_TEXTS, Symbol("7"), 5)),
        ENQUEUED_TIME: Timestamp(random.choice((0, 1_700_000_000_123, random.randrange(-(2**62), 2**62)))),
    }
    if random.random() < 0.1:
        del annotations[random.choice(list(annotations))]
    for name in (PARTITION_KEY, PUBLISHER, Symbol("x-opt-other"), "text", 5, Symbol("message-id"), Symbol("")):
        if random.random() < (0.3 if isinstance(name, Symbol) else 0.05):
            annotations[name] = value(random)
    entries = list(annotations.items())
    random.shuffle(entries)
    made = Message(message_annotations=dict(entries))
    made.body = Data((random.choice((b"", b"a", random.randbytes(300))),))
    if random.random() < 0.1:
        made.body = random.choice((None, AmqpValue("text"), Data((b"a", b"b")), Data(())))
    made.header = random.choice((None, None, Header(durable=True)))
    made.delivery_annotations = random.choice((None, None, {Symbol("d"): 1}))
    made.footer = random.choice((None, None, None, {Symbol("f"): 1}))
    if random.random() < 0.5:
        count = random.choice((0, 1, 2, 5, 5, 32, 33))
        texts = [str(random.randrange(90)) if count > 5 else random.choice(_TEXTS) for _ in range(count)]
        made.application_properties = {text: value(random) for text in texts}
    if random.random() < 0.5:
        made.properties = Properties(
            message_id=random.choice((None, "m", ULong(7), uuid.UUID(int=1), b"x")),
            subject=random.choice((None, "s" * 300, "")),
            creation_time=random.choice((None, Timestamp(5))),
            group_sequence=random.choice((None, 5)),
            reply_to_group_id=random.choice((None, "g")),
        )
    raw = made.encode()
    if random.random() < 0.1:
        _, start, end = random.choice(section_spans(raw) or [(0, 0, 0)])
        raw = random.choice((raw[:start] + raw[end:] + raw[start:end], raw + raw[start:end], raw[start:end] + raw))
    if random.random() < 0.05:  # a name twice, which no dictionary can have
        raw = raw.replace(b"12345678", b"\xa1\x0712345").replace(b"x-opt-other", b"x-opt-offse")
    return raw


def same(ours: Any, theirs: Any, seed: int) -> None:
    """Compare two batches, or two errors."""
    assert ours[0] == theirs[0], (seed, ours, theirs)
    if ours[0] is not pa.RecordBatch:
        assert ours[1] == theirs[1], seed
        return
    ours[1].validate(full=True)
    assert ours[1].equals(theirs[1]), seed


@needs_core
def test_columns_are_those_of_the_reference(seeds: Iterable[int]) -> None:
    """Any messages side by side, any columns in any order: the same rows, or the same error."""
    made = refused = 0
    sound: dict[int, list[bytes]] = {}
    for seed in seeds:
        random = Random(seed)
        if (base := seed // 8) not in sound:  # making them costs as much as what is compared
            sound = {base: [message(random) for _ in range(20)]}
        messages = []
        for raw in random.sample(sound[base], random.choice((0, 1, 2, 3, 20))):
            is_damaged = random.random() < 0.2
            messages.append(damage(random, raw, random.choice((12, 200, len(raw)))) if is_damaged else raw)
        columns = random.sample(_COMPILED, random.choice((1, 1, 3, len(_COMPILED))))
        encoder, events = RowEncoder("7", columns), PackedEvents.pack(messages)
        ours = outcome(encoder.encode, events)
        same(ours, outcome(in_python, encoder, events), seed)
        made += ours[0] is pa.RecordBatch
        refused += ours[0] is not pa.RecordBatch
    assert min(made, refused) > 30


def misnamed(random: Random) -> bytes:
    """Return a small event, some of whose names are not ASCII, or not UTF-8 either."""
    names = ["abcd", "abce", "text"]
    raw = Message(
        message_annotations={
            SEQUENCE_NUMBER: 5,
            OFFSET: "7",
            ENQUEUED_TIME: Timestamp(5),
            **{Symbol(each): value(random) for each in random.sample(names, random.randrange(3))},
        },
        application_properties=random.choice((None, {random.choice(names): "text"})),
        body=Data((b"body",)),
    ).encode()
    changed = random.choice((b"abc\xd0", "abü".encode(), b"abce", b"abcd"))
    return raw.replace(b"abcd", changed, random.choice((1, 2)))


def test_events_that_are_rows_alone_are_rows_together(seeds: Iterable[int]) -> None:
    """One sender's names fail no other's event, nor a column that does not show them; the same in both builds."""
    made = 0
    for seed in seeds:
        random = Random(seed)
        messages = [misnamed(random) for _ in range(random.choice((1, 2, 3, 8)))]
        encoder = RowEncoder("7", random.sample(_COMPILED, random.choice((1, 1, 3, len(_COMPILED)))))
        alone = [outcome(in_python, encoder, PackedEvents.pack([each])) for each in messages]
        together = PackedEvents.pack(messages)
        found = outcome(in_python, encoder, together)
        same(outcome(encoder.encode, together), found, seed)
        if all(each[0] is pa.RecordBatch for each in alone):
            made += 1
            expected = pa.Table.from_batches([each[1] for each in alone]).combine_chunks().to_batches()[0]
            same(found, (pa.RecordBatch, expected), seed)
    assert made > 30


SMALL = Message(
    message_annotations={
        SEQUENCE_NUMBER: 5, OFFSET: "7", ENQUEUED_TIME: Timestamp(5), PARTITION_KEY: "key", Symbol("x"): 2**40
    },
    properties=Properties(message_id="m", subject="s"),
    application_properties={"a": "text", "b": 1, "c": None},
    body=Data((b"body",)),
).encode()  # fmt: skip


@needs_core
def test_every_cut_and_every_byte_that_is_off_is_as_in_the_reference() -> None:
    """Each size, count and bound is wrong, too large and too small, and bytes that could be read instead are behind."""
    encoder = RowEncoder("7", _COMPILED)
    odd = [SMALL[:end] for end in range(len(SMALL))]
    for by in (1, 254):  # 254 takes an entry of a map away, which has two items
        odd += [SMALL[:at] + bytes(((SMALL[at] + by) % 256,)) + SMALL[at + 1 :] for at in range(len(SMALL))]
    for number, each in enumerate(odd):
        events = PackedEvents.pack([each, SMALL, each])
        same(outcome(encoder.encode, events), outcome(in_python, encoder, events), number)


@needs_core
def test_usual_messages_are_not_left_to_the_reference() -> None:
    """What is fast stays fast: no message of this kind is odd."""
    messages = [
        ReceivedEvent.build(
            b"x" * number, offset=str(number), sequence_number=number, enqueued_time=NOW,
            partition_key="k" if number % 2 else None,
            properties={"type": "reading", "count": number, "ok": True, "at": Timestamp(number), "none": None},
            content_type="a/b", message_id=str(number),
        ).raw
        for number in range(300)
    ]  # fmt: skip
    events = PackedEvents.pack(messages)
    odd, found = compiled.fill(events.data, events.lengths.tobytes(), compiled.NAMES, _NAMES, lambda raw: "text")
    assert odd == []
    assert found["body"][0] == 300
    encoder = RowEncoder("7", _COMPILED)
    same(outcome(encoder.encode, events), outcome(in_python, encoder, events), 0)


@needs_core
@pytest.mark.parametrize("lengths", [[-1], [2**62], [5, 2**62], [10**6], [2**63 - 1, 2**63 - 1]])
def test_lengths_that_are_not_those_of_the_data_are_refused(lengths: list[int]) -> None:
    """Nothing outside of the data is read."""
    with pytest.raises(ValueError, match="lengths"):
        compiled.fill(bytes(300), np.array(lengths).tobytes(), compiled.NAMES, _NAMES, str)


@needs_core
def test_wrong_arguments_are_refused() -> None:
    """An error, and nothing is read."""
    names = _NAMES
    for arguments in (
        (bytearray(5), b"", (), names, str),
        (b"", np.zeros(1), (), names, str),
        (b"", b"", (), names[1:], str),
        (b"", b"", (), (*names[1:], None), str),
        (b"", b"", 5, names, str),
    ):
        with pytest.raises((TypeError, ValueError)):
            compiled.fill(*arguments)
    assert compiled.fill(b"", b"x" * 7, (), names, str)[0] == []


@needs_core
def test_value_whose_text_fails_is_left_to_the_reference() -> None:
    """Whatever making the text raises, or returns."""
    raw = ReceivedEvent.build(b"x", offset="0", sequence_number=0, enqueued_time=NOW, properties={"a": 1.5}).raw
    events = PackedEvents.pack([raw])

    def failing(_: bytes) -> str:
        raise RuntimeError

    for to_text, odd in ((failing, [0]), (lambda _: "\ud800", [0]), (lambda _: 5, [0]), (lambda _: None, [])):
        arguments = (events.data, events.lengths.tobytes(), ["properties"], _NAMES, to_text)
        assert compiled.fill(*arguments)[0] == odd


@needs_core
def test_reference_counts_do_not_change() -> None:
    """Neither of what is given nor of what is shared; and the memory of a batch lives as long as the batch."""
    random = Random(7)
    messages = [message(random) for _ in range(50)]
    events = PackedEvents.pack(messages)
    lengths = events.lengths.tobytes()
    texts: dict[bytes, str] = {}

    def to_text(raw: bytes) -> str | None:
        return texts.setdefault(raw, "text")

    watched = (events.data, lengths, _NAMES, to_text, None, *_NAMES)
    gc.collect()
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(200):
        compiled.fill(events.data, lengths, compiled.NAMES, _NAMES, to_text)
    gc.collect()
    after = [sys.getrefcount(each) for each in watched]
    assert all(abs(now - then) < 50 for now, then in zip(after, before, strict=True)), (before, after)
    found = compiled.fill(events.data, lengths, compiled.NAMES, _NAMES, to_text)[1]["body"]
    column = rows._filled_texts(pa.binary(), found)
    text = column.to_pylist()
    del found
    gc.collect()
    assert column.to_pylist() == text
