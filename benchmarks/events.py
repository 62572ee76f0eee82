"""The events of the benchmarks: *varied*, as a fleet of devices sends them, *telemetry*, in JSON, and *uniform* ones.

All kinds are the same in every run and process, so that a reader can check what it reads by the sequence number alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

KINDS = ("varied", "uniform", "telemetry", "cloudevents")
WORKS = {
    "fields": "four fields read",
    "properties": "telemetry without its JSON",
    "telemetry": "telemetry consumer",
}
"""What a handler does with each event, and what the rows call it.

It reads body, offset, sequence number and enqueued time; or two application properties, partition key, offset, number
and enqueued time; or these and the body's JSON. It uses what it reads (`benchmarks.sides.common.Fleet`).
"""

UNIFORM_SIZE = 1024
SMALLEST, LARGEST = 200, 4096
"""Bytes of the body of a varied event, and of a telemetry event."""

FIRST_SEQUENCE_NUMBER = 100_000
FIRST_OFFSET = 1 << 33
FIRST_MOMENT = datetime(2026, 1, 1, tzinfo=UTC)

BURST = 400
"""How many uniform events share a millisecond, as where they were sent in full batches."""

_CYCLE = 997
"""How many different varied events there are, and telemetry events. A prime, so that no batch size divides it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An event to send.

    Args:
        partition_key: None where it has none; used where the events of a batch may differ in it.
        content_type: None where it has none.
    """

    body: bytes
    properties: dict[str, str | int] | None = None
    partition_key: str | None = None
    content_type: str | None = None


@cache
def samples(kind: str, body_size: int = UNIFORM_SIZE) -> tuple[Sample, ...]:
    """Return the events that are sent over and over again.

    Of the varied ones three in four have a partition key, and four in five two application properties; the sizes of
    their bodies lie evenly on a logarithmic scale. Telemetry events have JSON bodies of such sizes, with 15 to 20
    fields, some of them nested; two or three application properties; and three in four a partition key, the device.
    CloudEvents are the same bodies in binary mode, with five attributes.

    Args:
        body_size: Of uniform events, in bytes.
    """
    if kind == "uniform":
        return (Sample(b"x" * body_size),)
    chance = random.Random(20_260_101)
    if kind in ("telemetry", "cloudevents"):
        telemetry = [_telemetry(number, chance) for number in range(_CYCLE)]
        return tuple(telemetry if kind == "telemetry" else map(_cloudevent, range(_CYCLE), telemetry))
    if kind != "varied":
        raise ValueError(f"there are no {kind!r} events")
    made = []
    for _ in range(_CYCLE):
        size = _size(chance)
        properties: dict[str, str | int] | None = None
        if chance.random() < 0.8:
            properties = {"type": chance.choice(("reading", "alarm", "heartbeat")), "firmware": chance.randrange(1000)}
        key = f"device-{chance.randrange(500):04}" if chance.random() < 0.75 else None
        made.append(Sample(chance.randbytes(size), properties, key))
    return tuple(made)


def _size(chance: random.Random) -> int:
    return round(SMALLEST * float((LARGEST / SMALLEST) ** chance.random()))


def _telemetry(number: int, chance: random.Random) -> Sample:
    """Return a telemetry event: what a device reports, as JSON."""
    device = f"d-{chance.randrange(500):03}"
    kind = chance.choice(("reading", "alarm", "heartbeat"))
    firmware = chance.randrange(1000)
    report: dict[str, Any] = {
        "dev": device,
        "seq": number,
        "ts": 1_767_225_600_000 + number * 250,
        "type": kind,
        "site": chance.randrange(40),
        "fw": firmware,
        "bat": chance.randrange(101),
        "rssi": -chance.randrange(40, 110),
        "temp": round(chance.uniform(-20, 60), 2),
        "hum": round(chance.uniform(5, 95), 1),
        "pres": round(chance.uniform(950, 1050), 1),
        "ok": chance.random() < 0.9,
        "err": None,
        "pos": {"lat": round(chance.uniform(-60, 60), 4), "lon": round(chance.uniform(-180, 180), 4)},
        "tags": ["a", "b"],
    }
    size = _size(chance)
    more: list[tuple[str, Any]] = [
        ("vib", {axis: round(chance.random(), 3) for axis in "xyz"}),
        ("operator", f"shift {chance.randrange(3)}"),
    ]
    for name, value in more[: chance.randrange(3)]:
        if len(_json({**report, name: value})) <= size:
            report[name] = value
    # Several texts bring it to its size, none of them long.
    left = size - len(_json({**report, "note": "", "log": dict.fromkeys(_LOG, ""), "config": ""}))
    if left > 0:
        texts = [_text(left // (len(_LOG) + 2), chance) for _ in range(len(_LOG) + 2)]
        report |= {"note": texts[0], "log": dict(zip(_LOG, texts[1:], strict=False)), "config": texts[-1]}
    properties: dict[str, str | int] = {"type": kind, "firmware": firmware}
    if chance.random() < 0.5:
        properties["traceparent"] = f"00-{chance.getrandbits(128):032x}-{chance.getrandbits(64):016x}-01"
    return Sample(_json(report), properties, device if chance.random() < 0.75 else None)


def _cloudevent(number: int, telemetry: Sample) -> Sample:
    attributes: dict[str, str | int] = {
        "cloudEvents:specversion": "1.0",
        "cloudEvents:id": f"{number:06}",
        "cloudEvents:source": f"/devices/{telemetry.partition_key or 'all'}",
        "cloudEvents:type": "com.example.report",
        "cloudEvents:time": f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}Z",
    }
    return Sample(telemetry.body, attributes, telemetry.partition_key, "application/json")


def _text(size: int, chance: random.Random) -> str:
    """Return a text of so many characters, in words."""
    return "".join(chance.choice("etaoinshrdlu     ") for _ in range(size))


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def mean_body_size(kind: str, body_size: int = UNIFORM_SIZE) -> float:
    """Return the mean of the bodies' sizes, in bytes."""
    made = samples(kind, body_size)
    return sum(len(each.body) for each in made) / len(made)


def milliseconds_after_first(kind: str, position: int) -> int:
    """Return how much later than the first event of its partition an event was enqueued."""
    return position // BURST if kind == "uniform" else position


_LOG = ("source", "thread", "message", "detail", "hint", "request")
"""The texts of a telemetry event's log entry."""

Check = Callable[[int, int, datetime | None], None]


def checker(kind: str) -> Check:
    """Return a function that checks what was read of one event of the canned service.

    It takes the sequence number, the body's size and the enqueued time.

    Raises:
        AssertionError: (the function) the event is not the one with this number.
    """
    sizes = [len(each.body) for each in samples(kind)]

    def check(sequence_number: int, size: int, enqueued: datetime | None) -> None:
        position = sequence_number - FIRST_SEQUENCE_NUMBER
        moment = FIRST_MOMENT + timedelta(milliseconds=milliseconds_after_first(kind, position))
        if position < 0 or size != sizes[position % len(sizes)] or enqueued != moment:
            raise AssertionError(f"event {sequence_number} is not what was sent: {size} bytes, enqueued {enqueued}")

    return check


class Gaps:
    """Checks that no sequence number of a partition is missing, repeated or out of turn.

    Args:
        first: The number every partition begins with; None where any will do.
    """

    def __init__(self, first: int | None = None) -> None:
        self._first = first
        self._next: dict[str, int] = {}

    @property
    def partitions(self) -> int:
        """How many partitions have had an event."""
        return len(self._next)

    def check(self, partition_id: str, first: int, last: int, count: int) -> None:
        """Check a batch.

        Raises:
            AssertionError: It does not follow the one before.
        """
        wanted = self._next.get(partition_id, first if self._first is None else self._first)
        if first != wanted or last != first + count - 1:
            raise AssertionError(f"partition {partition_id}: {first}..{last}, {count} events, instead of {wanted}..")
        self._next[partition_id] = last + 1
