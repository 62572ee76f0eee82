"""What nothing in this Python can be cheaper than: reading the bytes, and reading fields that are decoded already."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from datetime import datetime

from benchmarks.canned import CannedPartition
from benchmarks.meter import Meter
from eventpump.eventhubs.events import ReceivedEvent

CHUNK = 230
"""How many events come with one read, about."""


async def stream(port: int, size: int, events: int, ca_file: str | None = None) -> dict[str, float]:
    """Read the canned service's bytes and do nothing with them.

    Args:
        size: How many bytes there are.
        events: How many events they are.
        ca_file: The authority to trust, over TLS; None is plain TCP.
    """
    meter = Meter(size // 20, size - size // 20)
    over = asyncio.get_running_loop().create_future()

    class Reading(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            meter.add(len(data))

        def connection_lost(self, exc: Exception | None) -> None:
            over.set_result(None)

    tls = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    await asyncio.get_running_loop().create_connection(Reading, "127.0.0.1", port, ssl=tls)
    await over
    if meter.count != size:
        raise AssertionError(f"{meter.count} bytes came instead of {size}")
    result = meter.result()
    per_event = size / events
    return {
        "cost": result["cost"] * per_event,
        "busy": result["busy"],
        "rate": result["rate"] / per_event,
        "faults": result["faults"] * per_event,
    }


@dataclass(slots=True)
class Decoded:
    """An event whose fields are there already."""

    body: bytes
    offset: str
    sequence_number: int
    enqueued_time: datetime


def decoded(kind: str, count: int) -> list[Decoded]:
    """Return decoded events."""
    events = map(ReceivedEvent, CannedPartition("0", kind, count).events)
    return [Decoded(each.body, each.offset, each.sequence_number, each.enqueued_time) for each in events]


def read_fields(events: list[Decoded]) -> None:
    """Read four fields of each event, a batch at a time."""
    for start in range(0, len(events), CHUNK):
        for event in events[start : start + CHUNK]:
            _ = event.body, event.offset, event.sequence_number, event.enqueued_time


def fields(kind: str, count: int = 3000, rounds: int = 300) -> dict[str, float]:
    """Read four decoded fields of so many events, over and over again."""
    events = decoded(kind, count)
    meter = Meter(count * rounds // 20, count * rounds)
    for _ in range(rounds):
        read_fields(events)
        meter.add(count)
    return meter.result()
