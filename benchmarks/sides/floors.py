"""What nothing in this Python can be cheaper than.

Reading the bytes; reading fields that are decoded already; writing prepared bytes and waiting for the answer.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from dataclasses import dataclass
from datetime import datetime
from itertools import count, cycle
from typing import cast

from benchmarks.canned import CannedPartition
from benchmarks.events import samples
from benchmarks.meter import Meter
from benchmarks.sides.common import measure_latency, port_of
from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import Connection, CreditChanged, Event, LinkAttached, Opened, Role, SessionBegun
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import Source, Target
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT
from eventpump.eventhubs.sealing import SealedBatch, pieces_of

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


def json_bodies(kind: str, rounds: int = 100) -> dict[str, float]:
    """Parse the body of each event that there is, over and over again."""
    bodies = [each.body for each in samples(kind)]
    meter = Meter(len(bodies) * rounds // 20, len(bodies) * rounds)
    for _ in range(rounds):
        for body in bodies:
            json.loads(body)
        meter.add(len(bodies))
    return meter.result()


class _Exchange(asyncio.BufferedProtocol):
    """Opens a send link with our engine, and from then on only looks for dispositions.

    Args:
        hub: Whose partition 0 the link sends to.
    """

    def __init__(self, hub: str) -> None:
        self.transport: asyncio.Transport | None = None
        self.link: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self.answer: asyncio.Future[None] | None = None
        self._target = f"{hub}/Partitions/0"
        self._buffer = bytearray(1 << 17)
        self._engine = Connection(ConnectionConfig(container_id="floor", hostname="localhost"), Role.CLIENT)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._engine.start()
        self.transport.write(self._engine.data_to_send())

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.answer is not None:
            if self._buffer.find(b"\x00\x53\x15", 0, nbytes) >= 0:
                self.answer.set_result(None)
            return
        assert self.transport is not None
        for event in self._engine.receive(bytes(self._buffer[:nbytes])):
            self._on_event(event)
        self.transport.write(self._engine.data_to_send())

    def _on_event(self, event: Event) -> None:
        match event:
            case Opened():
                self._engine.begin()
            case SessionBegun(session):
                session.attach("floor", is_receiver=False, source=Source(), target=Target(address=self._target))
            case LinkAttached(link) | CreditChanged(link) if link.credit > 0 and not self.link.done():
                self.link.set_result(link)
            case _:
                pass

    def prepared(self, link: Link, kind: str) -> list[tuple[bytearray, int]]:
        """Return the transfer of each event that there is, and where in it the delivery id is.

        They may be more than the link has credit for now: they are sent one by one, and the service renews its credit.
        """
        frames = []
        link.session.outgoing_delivery_id = _FIRST_ID
        for sample in samples(kind):
            event = EventData(sample.body, properties=sample.properties)
            delivery_id = link.session.outgoing_delivery_id
            link.send(SealedBatch(list(pieces_of(event))).message, message_format=BATCH_MESSAGE_FORMAT)
            frame = bytearray(self._engine.data_to_send())
            frames.append((frame, frame.index(_IDENTITY.pack(0x70, delivery_id, b"\xa0\x04", delivery_id)) + 1))
        return frames


_FIRST_ID = 256
"""The first delivery id: from it on each takes as many bytes."""
_IDENTITY = struct.Struct(">BI2sI")
_IDS = struct.Struct(">I2sI")


async def exchange(
    connection_string: str, hub: str, sends: int, warm_up: int, kind: str, options: dict[str, str]
) -> dict[str, float]:
    """Write a prepared transfer, and wait for its disposition, so many times.

    Args:
        options: `ca_file` is the authority to trust.
    """
    loop = asyncio.get_running_loop()
    tls = ssl.create_default_context(cafile=options["ca_file"])
    protocol = _Exchange(hub)
    transport, _ = await loop.create_connection(lambda: protocol, "127.0.0.1", port_of(connection_string), ssl=tls)
    link = await protocol.link
    frames = cycle(protocol.prepared(link, kind))
    delivery_ids = count(_FIRST_ID)

    async def send_next() -> None:
        frame, place = next(frames)
        delivery_id = next(delivery_ids)
        _IDS.pack_into(frame, place, delivery_id, b"\xa0\x04", delivery_id)
        answer = protocol.answer = loop.create_future()
        transport.write(frame)
        await answer

    result = await measure_latency(send_next, sends, warm_up)
    transport.abort()
    return {**result, "sent": warm_up + sends}
