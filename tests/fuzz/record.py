"""Record the captures again: `python -m tests.fuzz.record [NAME ...]`.

Each conversation runs against the emulator (or, of `rhea`, our client against rhea) through a proxy that keeps every
byte. Sizes are small, keys are made up. What cannot be had here (uamqp, rhea) is left as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from eventpump import (
    BufferedProducer,
    Emulator,
    EventData,
    EventPosition,
    EventProducer,
    MemoryPublisherStateStore,
    PartitionReader,
)
from eventpump.emulator.config import HubSpec
from tests.authority import Authority
from tests.fuzz.captures import HUBS, KEY, KEY_NAME, Flight, save

_CHUNK = 1 << 20
_PATIENCE = 30.0


class RecordingProxy:
    """Forwards connections, and keeps what went through each.

    Args:
        port: Where to forward to.
        tls: To end TLS with, so that what is kept is AMQP.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target = port
        self._tls = tls
        self._server: asyncio.Server
        self._serving: set[asyncio.Task[None]] = set()
        self.connections: list[list[Flight]] = []
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_PATIENCE)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        flights: list[Flight] = []
        self.connections.append(flights)
        there, here = await asyncio.open_connection("127.0.0.1", self._target)
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._carry(reader, here, flights, is_to_service=True),
                self._carry(there, writer, flights, is_to_service=False),
            )
        writer.close()
        here.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flights: list[Flight], *, is_to_service: bool
    ) -> None:
        while data := await reader.read(_CHUNK):
            if flights and flights[-1].is_to_service is is_to_service:
                data_before = flights.pop().data
                flights.append(Flight(is_to_service, data_before + data))
            else:
                flights.append(Flight(is_to_service, data))
            writer.write(data)
        with contextlib.suppress(OSError):
            writer.write_eof() if writer.can_write_eof() else writer.close()


def _emulator(**options: Any) -> Emulator:
    specs = [HubSpec(name, partitions, ("second",)) for name, partitions in HUBS.items()]
    return Emulator(specs, key=KEY, key_name=KEY_NAME, **options)


def _string(port: int) -> str:
    return (
        f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY};"
        "UseDevelopmentEmulator=true"
    )


async def _native(string: str, **options: Any) -> None:
    """Live through what a client of ours does: send in every way, ask, read from every kind of position."""
    async with EventProducer(string, "telemetry", **options) as producer:
        await producer.send([EventData(b"one"), EventData(b"two" * 100)], partition_id="0")
        await producer.send(
            EventData(
                "text", properties={"kind": "trade", "n": 5, "ok": True, "x": 1.5, "none": None}, message_id="m-1"
            ),
            partition_key="sensor-7",
        )
        await producer.send(EventData(value={"list": [1, "a", b"b"], "map": {"k": None}}), partition_id="0")
        await producer.send(EventData(sequence=[1, "two", [3.5, True]]), partition_id="0")
        await producer.send([EventData(bytes(20), properties={"p": str(n)}) for n in range(8)], partition_id="0")
        await producer.get_properties()
        await producer.get_partition_properties("0")
    for position in (EventPosition.earliest(), EventPosition.at_sequence_number(1)):
        async with PartitionReader(string, "telemetry", partition_id="0", position=position, **options) as reader:
            await asyncio.wait_for(reader.read(), _PATIENCE)


async def _idempotent(string: str, **options: Any) -> None:
    async with EventProducer(
        string, "other", idempotent=True, state_store=MemoryPublisherStateStore(), name="capture", **options
    ) as producer:
        for number in range(3):
            await producer.send([EventData(f"{number}-{each}".encode()) for each in range(3)], partition_id="0")
    async with BufferedProducer(string, "other", **options) as buffered:
        for number in range(20):
            await buffered.send(EventData(bytes(number)), partition_key=f"key-{number % 3}")


def _azure(string: str) -> None:
    from azure.eventhub import EventData as AzureEvent
    from azure.eventhub import EventHubConsumerClient, EventHubProducerClient
    from azure.eventhub.amqp import AmqpAnnotatedMessage

    with EventHubProducerClient.from_connection_string(string, eventhub_name="telemetry") as producer:
        producer.get_eventhub_properties()
        producer.get_partition_properties("1")
        batch = producer.create_batch(partition_key="azure")
        for number in range(5):
            event = AzureEvent(f"event {number}")
            event.properties = {"number": number, "text": "é", "bytes": b"\x00", "flag": True}
            event.message_id = f"id-{number}"
            batch.add(event)
        producer.send_batch(batch)
        producer.send_batch([AzureEvent(b"x" * 10)], partition_id="1")
        producer.send_event(
            AmqpAnnotatedMessage(value_body={"a": [1, 2.5, None]}, annotations={"x-opt-mine": 5}), partition_id="1"
        )
        producer.send_event(AmqpAnnotatedMessage(sequence_body=[[1, "two"]], footer={"f": 1}), partition_id="1")
    consumer = EventHubConsumerClient.from_connection_string(
        string, consumer_group="$Default", eventhub_name="telemetry"
    )
    seen = 0

    def take(_context: Any, _event: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            consumer.close()

    with contextlib.suppress(Exception):
        consumer.receive(
            take, partition_id="1", starting_position="-1", track_last_enqueued_event_properties=True, owner_level=1
        )
    consumer.close()


@contextlib.asynccontextmanager
async def _through(port: int, name: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[RecordingProxy]:
    recorded_at = float(int(time.time()))
    async with RecordingProxy(port, tls) as proxy:
        yield proxy
    connections = [flights for flights in proxy.connections if flights]
    path = save(name, recorded_at, connections)
    total = sum(len(flight.data) for flights in connections for flight in flights)
    sys.stdout.write(f"{name}: {len(connections)} connections, {total} bytes, {path.stat().st_size} in the file\n")


async def record_native() -> None:
    """Record our client over TCP."""
    async with _emulator() as emulator, _through(emulator.port, "native") as proxy:
        await _native(_string(proxy.port))


async def record_idempotent() -> None:
    """Record our idempotent and buffered producers."""
    async with _emulator() as emulator, _through(emulator.port, "idempotent") as proxy:
        await _idempotent(_string(proxy.port))


async def record_websocket() -> None:
    """Record our client over a WebSocket."""
    async with _emulator(ws_port=0) as emulator:
        assert emulator.ws_port is not None
        async with _through(emulator.ws_port, "websocket") as proxy:
            await _native(_string(proxy.port), transport_type="websocket")


async def record_azure() -> None:
    """Record azure-eventhub."""
    async with _emulator() as emulator, _through(emulator.port, "azure") as proxy:
        await asyncio.to_thread(_azure, _string(proxy.port))


async def record_uamqp() -> None:
    """Record uamqp, which speaks TLS only: it ends at the proxy."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.new(Path(folder))
        async with _emulator() as emulator, _through(emulator.port, "uamqp", authority.server("127.0.0.1")) as proxy:
            string = _string(proxy.port).replace(";UseDevelopmentEmulator=true", "")
            await _native(string, transport="uamqp", ca_file=str(authority.file))


async def record_rhea() -> None:
    """Record our client against a service on rhea."""
    from tests.interop.peers.rhea import RheaOptions, RheaServer

    async with RheaServer(RheaOptions()) as rhea, _through(rhea.port, "rhea") as proxy:
        async with EventProducer(_string(proxy.port), "telemetry") as producer:
            await producer.send([EventData(b"one"), EventData(b"two")], partition_id="0")
            await producer.send(EventData(b"three", properties={"a": 1}), partition_id="0")
        async with PartitionReader(
            _string(proxy.port), "telemetry", partition_id="0", position=EventPosition.earliest()
        ) as reader:
            await asyncio.wait_for(reader.read(), _PATIENCE)


RECORDERS: dict[str, Callable[[], Awaitable[None]]] = {
    "native": record_native,
    "idempotent": record_idempotent,
    "websocket": record_websocket,
    "azure": record_azure,
    "uamqp": record_uamqp,
    "rhea": record_rhea,
}


async def main() -> None:
    """Record what is named, or all."""
    for name in sys.argv[1:] or RECORDERS:
        await RECORDERS[name]()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main())
