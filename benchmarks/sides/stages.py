"""The stages of receiving, one by one in one process, without a socket."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import accumulate, pairwise

from benchmarks.canned import CannedPartition
from benchmarks.meter import Meter
from benchmarks.sides.common import BODY_SIZE
from benchmarks.sides.floors import decoded, read_fields
from eventpump.amqp.connection import Connection, ConnectionConfig, Event, LinkAttached, Messages, Role, SaslRequested
from eventpump.amqp.performatives import Source, Target
from eventpump.consumer.host import PartitionHost
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.emulator.connection import service_config
from eventpump.events import ReceivedEvent
from eventpump.ports import HubProperties, PartitionProperties, ReceiveLinkSpec, ReceiveSink, SendLink, SendLinkSpec
from eventpump.settings import HostSettings
from eventpump.storage.memory import MemoryLeaseStore

READ_SIZE = 256 * 1024
"""What asyncio reads from a socket at once, at most."""

WINDOW = 3000
"""The credit of a link, and the prefetch of the peer."""

CHUNK = 230
"""How many 1 KiB events one read holds."""


def make_messages(count: int) -> list[bytes]:
    """Make events as the service sends them."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    body = b"x" * BODY_SIZE
    return [
        ReceivedEvent.build(
            body, offset=str((1 << 33) + number * 1120), sequence_number=100_000 + number, enqueued_time=moment
        ).raw
        for number in range(count)
    ]


def stages(rounds: int) -> dict[str, float]:
    """Measure each stage, and the floors. :returns: microseconds of CPU per event."""
    messages = make_messages(WINDOW)
    varied = CannedPartition("0", "varied", WINDOW).events
    events = decoded("uniform", WINDOW)
    making = _per_event(rounds, lambda: _make(messages))
    pumping = asyncio.run(_pump(messages, WINDOW * rounds))
    return {
        "engine": _engine(messages, rounds),
        "event": _per_event(rounds, lambda: _read(messages)),
        "varied_event": _per_event(rounds, lambda: _read(varied)),
        # The pump makes the event objects, which stand in the row above.
        "pump": pumping - making,
        "making": making,
        "slices": _per_event(rounds, _slicer(messages)),
        "fields": _per_event(rounds, lambda: read_fields(events)),
    }


def _slicer(messages: list[bytes]) -> Callable[[], None]:
    """Return what copies each message out of a read in which it lies."""
    reads = []
    for start in range(0, WINDOW, CHUNK):
        chunk = messages[start : start + CHUNK]
        reads.append((b"".join(chunk), list(pairwise(accumulate(map(len, chunk), initial=0)))))

    def work() -> None:
        for read, spans in reads:
            _ = [read[begin:end] for begin, end in spans]

    return work


def _per_event(rounds: int, work: Callable[[], None]) -> float:
    """Give the median cost of a round over `WINDOW` events."""
    costs = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        costs.append(time.process_time() - began)
    return statistics.median(costs) / WINDOW * 1e6


def _make(messages: list[bytes]) -> None:
    for start in range(0, WINDOW, CHUNK):
        tuple(map(ReceivedEvent, messages[start : start + CHUNK]))


def _read(messages: list[bytes]) -> None:
    for start in range(0, WINDOW, CHUNK):
        for event in tuple(map(ReceivedEvent, messages[start : start + CHUNK])):
            _ = event.body, event.offset, event.sequence_number, event.enqueued_time


# ------------------------------------------------------------------------------------------------------ engine


def _engine(messages: list[bytes], rounds: int) -> float:
    """Measure `Connection.receive` over reads of a socket's size, split wherever they end."""
    client = Connection(ConnectionConfig(container_id="client", hostname="localhost"), Role.CLIENT)
    service = Connection(service_config(1 << 20), Role.SERVER)
    client.start()
    _exchange(client, service)
    session = client.begin()
    _exchange(client, service)
    link = session.attach("link", is_receiver=True, source=Source("a"), target=Target("b"), max_message_size=20 << 20)
    told = _exchange(client, service)
    sender = next(event.link for event in told if isinstance(event, LinkAttached))
    sender.accept(max_message_size=1 << 20)
    _exchange(client, service)
    costs = []
    for _ in range(rounds):
        link.set_credit(WINDOW)
        _exchange(client, service)
        sent = 0
        while sent < WINDOW:
            sent += sender.send_run(messages, sent, 1 << 62)
        data = service.data_to_send()
        reads = [data[start : start + READ_SIZE] for start in range(0, len(data), READ_SIZE)]
        came = 0
        began = time.process_time()
        for read in reads:
            for event in client.receive(read):
                assert isinstance(event, Messages)
                came += len(event.payloads)
        costs.append(time.process_time() - began)
        assert came == WINDOW
    return statistics.median(costs) / WINDOW * 1e6


def _exchange(client: Connection, service: Connection) -> list[Event]:
    """Carry bytes both ways until both are silent. :returns: what the service was told."""
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


class _Counting(EventProcessor):
    def __init__(self, meter: Meter, stop: Callable[[], None]) -> None:
        self._meter = meter
        self._stop = stop

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self._meter.add(len(events))
        if self._meter.is_done:
            self._stop()


async def _pump(messages: list[bytes], events: int) -> float:
    meter = Meter(events // 10, events)
    host = PartitionHost(
        lambda: _CannedTransport(messages),
        MemoryLeaseStore(),
        HostSettings(hub="canned"),
        _Counting(meter, lambda: host.stop()),
    )
    await host.run()
    return meter.result()["cost"]
