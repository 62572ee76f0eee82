"""Columns of many messages at once are those of the general decoder, on sound, damaged and hostile messages."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

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
from eventpump.errors import EventError
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, PUBLISHER, SEQUENCE_NUMBER
from eventpump.spark.source.rows import COLUMNS, PartitionMessages
from tests.fuzz.entry import seed_of_today
from tests.support.damage import damage, outcome
from tests.support.spark_rows import expected_row, row_encoder, rows_of

pytestmark = [pytest.mark.timeout(4 * 3600)]  # 100,000 batches


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Iterable[int]:
    """The seeds of the cases of one test. The long form has a tenth of those of an event: a case is a whole batch."""
    first = seed_of_today()
    return range(first, first + (100_000 if request.config.getoption("--long") else 300))


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


def columns_of(random: Random) -> list[str]:
    """Return one column, some, or all, in any order."""
    return random.sample(list(COLUMNS), random.choice((1, 1, 3, len(COLUMNS))))


def same_as_one_by_one(messages: Sequence[bytes], columns: Sequence[str], case: object) -> bool:
    """Compare the rows of a batch with those that the general decoder makes of its messages, one at a time.

    Returns:
        Whether there are rows. An error is right only if the general decoder refuses one of the messages; where only
        what no column shows is damaged, a row may be given that it refuses.
    """
    expected: list[dict[str, Any] | None] = []
    for raw in messages:
        try:
            expected.append(expected_row(raw))
        except EventError:
            expected.append(None)
    try:
        found = rows_of(row_encoder(columns), messages)
    except EventError:
        assert None in expected, case
        return False
    for row, whole in zip(found, expected, strict=True):
        assert whole is None or row == {name: whole[name] for name in columns}, case
    return True


def test_columns_are_those_of_the_general_decoder(seeds: Iterable[int]) -> None:
    """Any messages side by side, any columns in any order: the same rows, or an error where one cannot be decoded."""
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
        has_rows = same_as_one_by_one(messages, columns_of(random), seed)
        made += has_rows
        refused += not has_rows
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
    """One sender's names fail no other's event, nor a column that does not show them; of several partitions too."""
    made = 0
    for seed in seeds:
        random = Random(seed)
        messages = [misnamed(random) for _ in range(random.choice((1, 2, 3, 8)))]
        encoder = row_encoder(columns_of(random))
        events = [PartitionMessages(str(random.randrange(2)), [each]) for each in messages]
        alone = [outcome(encoder.encode, [each]) for each in events]
        if all(each[0] is pa.RecordBatch for each in alone):
            made += 1
            expected = pa.Table.from_batches([each[1] for each in alone]).combine_chunks().to_batches()[0]
            together = encoder.encode(events)
            together.validate(full=True)
            assert together.equals(expected), seed
    assert made > 30


@pytest.mark.parametrize(
    ("name", "columns"),
    [(b"annotat", ("systemProperties", "systemPropertyTypes")), (b"propert", ("properties", "propertyTypes"))],
)
def test_name_that_is_no_text_fails_only_the_columns_that_show_it(name: bytes, columns: Sequence[str]) -> None:
    """Each column beside the offset, of such an event alone and beside a sound one."""
    raw = Message(
        message_annotations={SEQUENCE_NUMBER: 5, OFFSET: "7", ENQUEUED_TIME: Timestamp(5), Symbol("annotat"): 1},
        application_properties={"propert": 1},
        body=Data((b"body",)),
    ).encode()
    sound, misnamed = expected_row(raw), raw.replace(name, b"\xd0" * len(name))
    for column in COLUMNS:
        encoder = row_encoder(["offset", column] if column != "offset" else ["offset"])  # which reads other names too
        for messages in ([misnamed], [raw, misnamed]):
            if column in columns:
                with pytest.raises(EventError, match="event 5"):
                    rows_of(encoder, messages)
            else:
                assert rows_of(encoder, messages) == [{"offset": "7", column: sound[column]}] * len(messages)


SMALL = Message(
    message_annotations={
        SEQUENCE_NUMBER: 5, OFFSET: "7", ENQUEUED_TIME: Timestamp(5), PARTITION_KEY: "key", Symbol("x"): 2**40
    },
    properties=Properties(message_id="m", subject="s"),
    application_properties={"a": "text", "b": 1, "c": None},
    body=Data((b"body",)),
).encode()  # fmt: skip


def test_every_cut_and_every_byte_that_is_off_is_as_for_the_general_decoder() -> None:
    """Each size, count and bound is wrong, too large and too small, and bytes that could be read instead are behind."""
    off = [SMALL[:end] for end in range(len(SMALL))]
    for by in (1, 254):  # 254 takes an entry of a map away, which has two items
        off += [SMALL[:at] + bytes(((SMALL[at] + by) % 256,)) + SMALL[at + 1 :] for at in range(len(SMALL))]
    has_rows = [same_as_one_by_one([each, SMALL, each], list(COLUMNS), number) for number, each in enumerate(off)]
    assert 30 < sum(has_rows) < len(off) - 30
