"""Random messages as services and their senders may write them, whole or damaged."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any
from uuid import UUID

from eventpump.amqp.message import AmqpSequence, AmqpValue, Body, Data, Header, Message, Properties
from eventpump.amqp.sections import NULL_DATA, section_spans
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
from eventpump.eventhubs.names import (
    ENQUEUED_TIME,
    LAST_ENQUEUED_OFFSET,
    LAST_ENQUEUED_SEQUENCE_NUMBER,
    LAST_ENQUEUED_TIME,
    OFFSET,
    PARTITION_KEY,
    SEQUENCE_NUMBER,
)

_TEXTS = ("", "x", "text", "é", "\U0001f600", "\x00", "x" * 255, "é" * 128, "x" * 256, "x" * 5000)
_NAMES = ("", "a", "type", "é", "x" * 300, "cloudEvents:id", "Diagnostic-Id", "name")
SIMPLE: tuple[Callable[[Random], Any], ...] = (
    lambda random: random.choice(_TEXTS),
    lambda random: random.choice((None, True, False)),
    lambda random: random.choice((0, 1, -1, 127, 128, -128, -129, 2**31, 2**63 - 1, -(2**63))),
    lambda random: random.choice((0.0, -0.0, math.inf, math.nan, 5e-324, random.random())),
    lambda random: random.choice((b"", b"x", random.randbytes(9), bytes(256))),
    lambda random: UUID(int=random.choice((0, 2**128 - 1, random.getrandbits(128)))),
    lambda random: Timestamp(random.choice((0, -1, 2**63 - 1, -(2**63), random.randrange(2**41)))),
    lambda random: random.choice((UByte(0), UByte(255), UShort(65535), Byte(-128), Short(-(2**15)), Byte(127))),
    lambda random: random.choice((UInt(0), UInt(1), UInt(255), UInt(256), UInt(2**32 - 1))),
    lambda random: random.choice((ULong(0), ULong(1), ULong(255), ULong(256), ULong(2**64 - 1))),
    lambda random: random.choice((Int(0), Int(-128), Int(127), Int(128), Int(-(2**31)))),
    lambda random: Float(struct.unpack(">f", random.choice((b"\0\0\0\0", b"\x7f\x80\0\0", random.randbytes(4))))[0]),
    lambda random: random.choice((Char("x"), Char("\x00"), Char("\U0010ffff"), Symbol(""), Symbol("s" * 300))),
    lambda random: random.choice((Decimal32(b"1234"), Decimal64(b"12345678"), Decimal128(bytes(16)))),
)
"""Values that are not made of others."""


DEEPEST = 29
"""What `nested` may be called with for a property: as deeply as values may nest."""


def value(random: Random, depth: int = 3) -> Any:
    """Return a value of any AMQP type."""
    if depth and random.random() < 0.15:
        match random.randrange(5):
            case 0:
                return [value(random, depth - 1) for _ in range(random.choice((0, 1, 3)))]
            case 1:
                return {value(random, 0): value(random, depth - 1) for _ in range(random.choice((0, 1, 3)))}
            case 2:
                return Described(random.choice((Symbol("d"), ULong(5), "t", None)), value(random, depth - 1))
            case 3:
                return Array(random.choice(([], [1, 2], ["a"], [Symbol("s")], [UInt(1)], [True])))
            case _:
                return nested(random.choice((1, 5, 20)))
    return random.choice(SIMPLE)(random)


def nested(depth: int) -> Any:
    """Return a list in a list, and so on."""
    return [nested(depth - 1)] if depth else []


def message(random: Random) -> bytes:
    """Return an event as services and their senders may write it; its sections may be in any order, or twice there."""
    made = Message(message_annotations=_annotations(random), body=_body(random))
    made.header = random.choice((None, None, Header(durable=True), Header()))
    made.properties = None if random.random() < 0.4 else _properties(random)
    if random.random() < 0.7:
        # One or few usual types, or any.
        some: Callable[[Random], Any] = value if random.random() < 0.5 else random.choice(SIMPLE)
        names = _NAMES if random.random() < 0.9 else tuple(value(random, 0) for _ in range(5))
        count = random.choice((0, 1, 2, 2, 8) * 12 + (130, 600))
        extra = (str(place) for place in range(count - 8))
        made.application_properties = {name: some(random) for name in (*random.sample(names, min(count, 5)), *extra)}
        if random.random() < 0.05:
            made.application_properties["deep"] = nested(DEEPEST)
    if random.random() < 0.1:
        made.footer = {Symbol("f"): value(random)}
    if random.random() < 0.1:
        made.delivery_annotations = {
            LAST_ENQUEUED_SEQUENCE_NUMBER: random.choice((5, None, "text")),
            LAST_ENQUEUED_OFFSET: random.choice(("7", None, 5)),
            LAST_ENQUEUED_TIME: random.choice((Timestamp(5), None, 5)),
        }
    raw = made.encode().replace(b"x-opt-offseu", b"x-opt-offset").replace(b"partition-kez", b"partition-key")
    if random.random() < 0.1:
        _, start, end = random.choice(section_spans(raw) or [(0, 0, 0)])
        raw = random.choice((raw[:start] + raw[end:] + raw[start:end], raw + raw[start:end], raw[start:end] + raw))
    if random.random() < 0.05:
        raw = random.choice((raw + NULL_DATA, NULL_DATA + raw, NULL_DATA))
    return raw


def _annotations(random: Random) -> dict[Any, Any]:
    annotations: dict[Any, Any] = {
        SEQUENCE_NUMBER: random.choice((0, 5, -1, 128, 2**40, -(2**63), 2**63 - 1, "text")),
        OFFSET: random.choice(("0", "4294967296", "é", "x" * 200, "x" * 300, 5)),
        ENQUEUED_TIME: Timestamp(random.choice((0, 1_700_000_000_123, random.randrange(-(2**62), 2**62)))),
        PARTITION_KEY: random.choice(("k", "key", "é" * 100, None, b"b", [1, 2], True, Symbol("s"))),
        Symbol("x-opt-other"): random.choice((1, None, "text", {"a": [1, 2.0]}, b"", Timestamp(5))),
    }
    for key in random.sample(list(annotations), random.choice((0, 1, 2, 2, 2, 5))):
        if key is PARTITION_KEY or random.random() < 0.3:
            del annotations[key]
    if random.random() < 0.1:  # written twice, which no dictionary can be
        annotations[Symbol(random.choice(("x-opt-offseu", "x-opt-partition-kez")))] = random.choice(("9", 9))
    if random.random() < 0.1:
        annotations[random.choice(("name", "x-opt-partition-kez", 5, "x" * 300))] = value(random)
    entries = list(annotations.items())
    random.shuffle(entries)
    return dict(entries)


def _body(random: Random) -> Body | None:
    parts = tuple(random.choice((b"", b"a", "é".encode() * 200, random.randbytes(9))) for _ in range(3))
    usual = Data(parts[:1])
    return random.choice(
        (
            usual,
            usual,
            usual,
            Data(parts),
            AmqpValue("text"),
            AmqpValue(value(random)),
            AmqpSequence(([1], ["é"])),
            None,
        )
    )


def _properties(random: Random) -> Properties:
    usual: dict[str, Callable[[], Any]] = {
        "message_id": lambda: random.choice(("m", 0, 300, 2**64 - 1, UUID(int=5), b"id")),
        "user_id": lambda: random.choice((b"", b"user")),
        "to": lambda: value(random),
        "subject": lambda: "s" * 300,
        "correlation_id": lambda: random.choice(("c", 5, UUID(int=6))),
        "content_type": lambda: random.choice(("application/json", "", Symbol("text/plain"))),
        "content_encoding": lambda: "gzip",
        "absolute_expiry_time": lambda: Timestamp(5),
        "creation_time": lambda: Timestamp(random.randrange(2**41)),
        "group_id": lambda: "é",
        "group_sequence": lambda: random.choice((0, 5, 2**32 - 1)),
        "reply_to_group_id": lambda: "g",
    }
    names = random.sample(list(usual), random.choice((0, 1, 2, 2, 5, 12)))
    return Properties(**{name: usual[name]() for name in names})
