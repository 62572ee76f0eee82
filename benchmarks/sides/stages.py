"""The stages of receiving, one by one in one process, without a socket."""

from __future__ import annotations

import asyncio
import ctypes
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from benchmarks.canned import CannedPartition
from benchmarks.sides.common import BODY_SIZE
from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import Connection, Event, LinkAttached, Messages, Role, SaslRequested
from eventpump.amqp.performatives import Source, Target
from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.emulator.connection import service_config
from eventpump.eventhubs.cloudevents import CloudEvent
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.sealing import pieces_of
from eventpump.interfaces import (
    HubProperties,
    PartitionProperties,
    ReceiveLinkSpec,
    ReceiveSink,
    SendLink,
    SendLinkSpec,
)
from eventpump.options.consumer import HostSettings
from eventpump.storage.leases.memory import MemoryLeaseStore

READ_SIZE = 256 * 1024
"""What asyncio reads from a socket at once, at most."""

WINDOW = 3000
"""The credit of a link, and the prefetch of the peer."""

CHUNK = 230
"""How many 1 KiB events one read holds."""


def make_messages(count: int, body_size: int = BODY_SIZE) -> list[bytes]:
    """Return events as the service sends them."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    body = b"x" * body_size
    return [
        ReceivedEvent.build(
            body, offset=str((1 << 33) + number * 1120), sequence_number=100_000 + number, enqueued_time=moment
        ).raw
        for number in range(count)
    ]


def stages(rounds: int) -> dict[str, float]:
    """Measure each stage, and the floor beside them: all take turns, so that a slow spell of the machine meets all.

    Args:
        rounds: Of `WINDOW` events each, of every stage.

    Returns:
        Microseconds of CPU per event. The floor is the median of its rounds; a stage is the median of what it cost in
        terms of the floor of the same round, times the floor. So the machine's speed is not in their ratio.
    """
    _keep_freed_memory()
    messages = make_messages(WINDOW)
    parts = {name: (read, make_parts(name)) for name, read in PARTS.items()}
    varied = CannedPartition("0", "varied", WINDOW).events
    engine = _Engine(messages)
    reads = [b"".join(messages[start : start + CHUNK]) for start in range(0, WINDOW, CHUNK)]
    work: dict[str, Callable[[], float]] = {
        "floor": lambda: _timed(_take_apart, reads, len(messages[0])),
        "engine": engine.round,
        "event": lambda: _timed(_read, messages),
        "varied_event": lambda: _timed(_read, varied),
        "making": lambda: _timed(_make, messages),
        **{name: partial(_part, read, events) for name, (read, events) in parts.items()},
        **{f"{name}, four fields": partial(_part, _four, events) for name, (_, events) in parts.items()},
    }
    costs: dict[str, list[float]] = {name: [] for name in work}

    def others() -> None:
        for name, each in work.items():
            costs[name].append(each())

    costs["pump"] = asyncio.run(_pump(messages, rounds, others))
    # The pump creates the event objects, which are measured in the row of the event.
    costs["pump"] = [pump - making for pump, making in zip(costs["pump"], costs["making"], strict=True)]
    floors = costs.pop("floor")
    floor = statistics.median(floors) / WINDOW * 1e6
    times = {name: [cost / least for cost, least in zip(each, floors, strict=True)] for name, each in costs.items()}
    return {"floor": floor, **{name: statistics.median(each) * floor for name, each in times.items()}}


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory, on systems with glibc.

    Else it is a matter of chance, for a whole process, whether the reads of the engine fit between what is in use or
    their memory is given back and asked for each time: 185 page faults per round, or none, and 13 % of the engine.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for option, value in ((_TRIM_THRESHOLD, 1 << 28), (_TOP_PAD, 1 << 24), (_MMAP_THRESHOLD, 1 << 25)):
        mallopt(option, value)


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Of glibc's `malloc.h`."""


def _timed(work: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of CPU of one call."""
    began = time.process_time()
    work(*arguments)
    return time.process_time() - began


_FLOOR_FIELDS = struct.Struct(">3Q")


def _take_apart(reads: list[bytes], size: int) -> None:
    """The least that pure Python can do with as many messages: cut, unpack three numbers, keep four values."""
    unpack = _FLOOR_FIELDS.unpack_from
    for data in reads:
        found = []
        for start in range(0, len(data), size):
            offset, number, moment = unpack(data, start)
            found.append((data[start + size - BODY_SIZE : start + size], str(offset), number, moment))


def _make(messages: list[bytes]) -> None:
    for start in range(0, WINDOW, CHUNK):
        tuple(map(ReceivedEvent, messages[start : start + CHUNK]))


def _read(messages: list[bytes]) -> None:
    for start in range(0, WINDOW, CHUNK):
        for event in tuple(map(ReceivedEvent, messages[start : start + CHUNK])):
            _ = event.body, event.offset, event.sequence_number, event.enqueued_time


# ---------------------------------------------------------------------------------------- what programs read of events


def _four(event: ReceivedEvent) -> object:
    return event.body, event.offset, event.sequence_number, event.enqueued_time


def _with_properties(event: ReceivedEvent) -> object:
    return event.body, event.offset, event.sequence_number, event.enqueued_time, event.properties


def _with_content_type(event: ReceivedEvent) -> object:
    return event.body, event.offset, event.sequence_number, event.enqueued_time, event.content_type


def _telemetry(event: ReceivedEvent) -> object:
    properties = event.properties
    return properties["type"], properties["firmware"], event.partition_key, event.body_as_str(), _four(event)


def _typed(event: ReceivedEvent) -> object:
    """Do what a typed handler does, without the decoder of the type."""
    return event.body_type == "data" and event.body


def _forwarded(event: ReceivedEvent) -> object:
    return pieces_of(event.to_event_data())


PARTS: dict[str, Callable[[ReceivedEvent], object]] = {
    "properties_0": _with_properties,
    "properties_2": _with_properties,
    "properties_8": _with_properties,
    "standard": _with_content_type,
    "telemetry": _telemetry,
    "typed": _typed,
    "forwarded": _forwarded,
    "cloudevent": CloudEvent.from_event,
}
"""What is read of an event, by the name of the stage."""

PARTS_WINDOW = WINDOW // 6
"""How many events are read so in a round."""


def make_parts(name: str) -> list[bytes]:
    """Return events as a stage reads them, with a key and a body of 1 KiB."""
    body = b'{"celsius":21.5,"note":"%s"}' % (b"x" * 996)
    properties: dict[str, str | int] = {"type": "reading", "firmware": 417}
    standard: dict[str, Any] = {}
    if name == "properties_0":
        properties = {}
    elif name == "properties_8":
        properties |= {f"property-{place}": f"value {place}" if place % 2 else place * 1000 for place in range(6)}
    elif name == "standard":
        standard = {"message_id": "3f1c8a52", "content_type": "application/json"}
    elif name == "cloudevent":
        attributes = {"specversion": "1.0", "id": "3f1c8a52", "source": "/sensors/7", "type": "reading"}
        properties = {f"cloudEvents:{name}": value for name, value in attributes.items()}
        properties["cloudEvents:time"] = "2026-01-01T12:00:00Z"
        standard = {"content_type": "application/json"}
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        ReceivedEvent.build(
            body,
            offset=str((1 << 33) + number * 1400),
            sequence_number=100_000 + number,
            enqueued_time=moment,
            partition_key=f"device-{number % 997}",
            properties=properties,
            **standard,
        ).raw
        for number in range(PARTS_WINDOW)
    ]


def _part(read: Callable[[ReceivedEvent], object], messages: list[bytes]) -> float:
    """Return the seconds of CPU of reading so many events as the other stages read."""
    return _timed(_read_each, read, messages) * WINDOW / PARTS_WINDOW


def _read_each(read: Callable[[ReceivedEvent], object], messages: list[bytes]) -> None:
    for event in tuple(map(ReceivedEvent, messages)):
        read(event)


# ------------------------------------------------------------------------------------------------------ engine


class _Engine:
    """`Connection.receive` over reads of a socket's size, split wherever they end."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages
        self._client = Connection(ConnectionConfig(container_id="client", hostname="localhost"), Role.CLIENT)
        self._service = Connection(service_config(1 << 20), Role.SERVER)
        self._client.start()
        _exchange(self._client, self._service)
        session = self._client.begin()
        _exchange(self._client, self._service)
        self._link = session.attach(
            "link",
            is_receiver=True,
            source=Source("a"),
            target=Target("b"),
            snd_settle_mode=1,
            max_message_size=20 << 20,
        )
        told = _exchange(self._client, self._service)
        self._sender = next(event.link for event in told if isinstance(event, LinkAttached))
        self._sender.accept(max_message_size=1 << 20)
        _exchange(self._client, self._service)

    def round(self) -> float:
        """Receive `WINDOW` messages.

        Returns:
            The seconds of CPU that it took.
        """
        self._link.set_credit(WINDOW)
        _exchange(self._client, self._service)
        sent = 0
        while sent < WINDOW:
            sent += self._sender.send_run(self._messages, sent, 1 << 62)
        data = self._service.data_to_send()
        reads = [data[start : start + READ_SIZE] for start in range(0, len(data), READ_SIZE)]
        came = 0
        began = time.process_time()
        for read in reads:
            for event in self._client.receive(read):
                assert isinstance(event, Messages)
                came += len(event.payloads)
        used = time.process_time() - began
        assert came == WINDOW
        return used


def _exchange(client: Connection, service: Connection) -> list[Event]:
    """Carry bytes both ways until both are silent.

    Returns:
        The events that the service has received.
    """
    told: list[Event] = []
    while True:
        asked, answered = client.data_to_send(), service.data_to_send()
        if not asked and not answered:
            return told
        client.receive(answered)
        events = service.receive(asked)
        if any(isinstance(event, SaslRequested) for event in events):
            service.sasl_outcome(ok=True)
            events = service.receive(b"")
        told += events


# -------------------------------------------------------------------------------------------------------- pump


class _CannedLink:
    """Hands the same messages over again and again, a read's worth per turn of the loop, as credit allows."""

    max_message_size = 1 << 20

    def __init__(self, messages: list[bytes], sink: ReceiveSink) -> None:
        self._messages = messages
        self._sink = sink
        self._credit = 0
        self._next = 0
        self._is_due = False
        self._is_closed = False

    def set_credit(self, credit: int) -> None:
        """See the port."""
        self._credit = credit
        self._go_on()

    async def probe(self, timeout: float) -> bool | None:
        """See the port."""
        return None

    def drop_connection(self, reason: str) -> None:
        """See the port."""

    def _go_on(self) -> None:
        if self._credit > 0 and not self._is_due and not self._is_closed:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_due = False
        if self._is_closed or self._credit <= 0:
            return
        # None is left out, as in a partition: the host would ask whether it is lost.
        chunk = self._messages[self._next : self._next + min(CHUNK, self._credit)]
        self._next = (self._next + len(chunk)) % len(self._messages)
        self._credit -= len(chunk)
        self._sink.messages(chunk)
        self._go_on()

    async def aclose(self) -> None:
        """See the port."""
        self._is_closed = True


class _CannedTransport:
    """A hub of one partition without end."""

    fully_qualified_namespace = "canned"

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages

    async def get_hub_properties(self, hub: str) -> HubProperties:
        """See the port."""
        return HubProperties(hub, datetime(2026, 1, 1, tzinfo=UTC), ("0",))

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        """See the port."""
        raise NotImplementedError

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> _CannedLink:
        """See the port."""
        return _CannedLink(self._messages, sink)

    async def open_send_link(self, spec: SendLinkSpec) -> SendLink:
        """See the port."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """See the port."""


class _TakingTurns(EventProcessor):
    """Times the pump over `WINDOW` events at a time, and lets others work between."""

    def __init__(self, rounds: int, others: Callable[[], None], stop: Callable[[], None]) -> None:
        self._rounds = rounds
        self._others = others
        self._stop = stop
        self._count = 0
        self._began: float | None = None
        self.costs: list[float] = []

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self._count += len(events)
        if self._count < WINDOW or len(self.costs) >= self._rounds:
            return
        if self._began is not None:  # the first round holds the start of the host
            self.costs.append((time.process_time() - self._began) * WINDOW / self._count)
        if len(self.costs) >= self._rounds:
            self._stop()
            return
        self._others()
        self._count = 0
        self._began = time.process_time()


async def _pump(messages: list[bytes], rounds: int, others: Callable[[], None]) -> list[float]:
    """Let a host pump.

    Returns:
        The seconds of CPU of each round of `WINDOW` events.
    """
    turns = _TakingTurns(rounds, others, lambda: host.stop())
    host = HubHost(lambda: _CannedTransport(messages), MemoryLeaseStore(), HostSettings(hub="canned"), turns)
    await host.run()
    return turns.costs
