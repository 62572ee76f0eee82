"""The events of the benchmarks: *varied*, as a fleet of devices sends them, and *uniform*, all alike.

Both kinds are the same in every run and process, so that a reader can check what it reads by the sequence number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

KINDS = ("varied", "uniform")
UNIFORM_SIZE = 1024
SMALLEST, LARGEST = 200, 4096
"""Bytes of a varied event's body."""

FIRST_SEQUENCE_NUMBER = 100_000
FIRST_OFFSET = 1 << 33
FIRST_MOMENT = datetime(2026, 1, 1, tzinfo=UTC)

BURST = 400
"""How many uniform events share a millisecond, as where they were sent in full batches."""

_CYCLE = 997
"""How many different varied events there are. A prime, so that no batch size divides it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An event to send.

    Args:
        partition_key: None where it has none; used where the events of a batch may differ in it.
    """

    body: bytes
    properties: dict[str, str | int] | None = None
    partition_key: str | None = None


@cache
def samples(kind: str, body_size: int = UNIFORM_SIZE) -> tuple[Sample, ...]:
    """Return the events that are sent over and over again.

    Of the varied ones three in four have a partition key, and four in five two application properties; the sizes of
    their bodies lie evenly on a logarithmic scale.

    Args:
        body_size: Of uniform events, in bytes.
    """
    if kind == "uniform":
        return (Sample(b"x" * body_size),)
    if kind != "varied":
        raise ValueError(f"there are no {kind!r} events")
    chance = random.Random(20_260_101)
    made = []
    for _ in range(_CYCLE):
        size = round(SMALLEST * (LARGEST / SMALLEST) ** chance.random())
        properties: dict[str, str | int] | None = None
        if chance.random() < 0.8:
            properties = {"type": chance.choice(("reading", "alarm", "heartbeat")), "firmware": chance.randrange(1000)}
        key = f"device-{chance.randrange(500):04}" if chance.random() < 0.75 else None
        made.append(Sample(chance.randbytes(size), properties, key))
    return tuple(made)


def mean_body_size(kind: str, body_size: int = UNIFORM_SIZE) -> float:
    """Return the mean of the bodies' sizes, in bytes."""
    made = samples(kind, body_size)
    return sum(len(each.body) for each in made) / len(made)


def milliseconds_after_first(kind: str, position: int) -> int:
    """Return how much later than the first event of its partition an event was enqueued."""
    return position if kind == "varied" else position // BURST


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
