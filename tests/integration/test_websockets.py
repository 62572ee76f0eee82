"""AMQP over WebSockets from end to end: the emulator's port, its command, and the clients that use it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from eventpump import ConfigurationError, Emulator, EventData, EventProducer, PartitionReader, RetryOptions
from eventpump.amqp.connection import Opened
from eventpump.amqp.performatives import AmqpError
from eventpump.emulator.service import Deadlines
from eventpump.errors import ConnectionLostError
from eventpump.net import stream
from eventpump.net.dialing import dial
from eventpump.net.route import Route
from eventpump.net.websocket import WebSocketTransport
from tests.authority import Authority
from tests.support.peer import AmqpPeer
from tests.support.processes import ChildProcess, EmulatorProcess
from tests.support.served import served_connections
from tests.support.sockets import open_sockets

HUB = "telemetry"
OVER: dict[str, Any] = {"transport_type": "websocket"}
NO_RETRY = RetryOptions(max_retries=0)


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    """A service with both ports. When the test is over, neither a task nor a socket is left."""
    sockets = open_sockets()
    async with Emulator({HUB: 2}, ws_port=0) as started:
        yield started
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not open_sockets() - sockets


async def bodies(connection_string: str, **options: Any) -> list[bytes]:
    """Read all of partition 0."""
    async with PartitionReader(connection_string, HUB, partition_id="0", end="@latest", **options) as reader:
        return [event.body async for event in reader]


async def test_both_ports_serve_the_same_events(emulator: Emulator) -> None:
    """What is sent over one port is read over the other, messages of any size, and the ports differ."""
    assert emulator.ws_port not in (None, 0, emulator.port)
    large = os.urandom(900_000)
    async with (
        EventProducer(emulator.connection_string, HUB) as tcp,
        EventProducer(emulator.ws_connection_string, HUB, **OVER) as websocket,
    ):
        await tcp.send(EventData(b"tcp"), partition_id="0")
        await websocket.send(EventData(large), partition_id="0")
        assert await websocket.get_partition_ids() == ("0", "1")
        assert emulator.connection_count == 2
    assert await bodies(emulator.connection_string) == [b"tcp", large]
    assert await bodies(emulator.ws_connection_string, **OVER) == [b"tcp", large]


async def test_websocket_over_tls_has_the_same_certificate(authority: Authority) -> None:
    """With TLS on the one port there is TLS on the other, with the same certificate."""
    async with Emulator({HUB: 1}, ws_port=0, tls=authority.server("127.0.0.1")) as emulator:
        options: dict[str, Any] = {**OVER, "ca_file": authority.file}
        async with EventProducer(emulator.ws_connection_string, HUB, **options) as producer:
            await producer.send(EventData(b"x"), partition_id="0")
        assert await bodies(emulator.ws_connection_string, **options) == [b"x"]
        plain: dict[str, Any] = {**OVER, "retry": NO_RETRY}
        async with EventProducer(
            f"{emulator.ws_connection_string};UseDevelopmentEmulator=true", HUB, **plain
        ) as producer:
            with pytest.raises(ConnectionLostError):
                await producer.send(EventData(b"x"), partition_id="0")


async def test_connect_to_the_wrong_port_says_what_is_there(emulator: Emulator) -> None:
    """A client at the other kind of port gets one error, quickly, that names what it met."""
    async with EventProducer(emulator.ws_connection_string, HUB, retry=NO_RETRY) as producer:
        with pytest.raises(ConnectionLostError, match="another protocol"):
            await asyncio.wait_for(producer.send(EventData(b"x")), 10.0)
    async with EventProducer(emulator.connection_string, HUB, retry=NO_RETRY, **OVER) as producer:
        with pytest.raises(ConnectionLostError, match="WebSocket"):
            await asyncio.wait_for(producer.send(EventData(b"x")), 10.0)


async def test_restart_keeps_both_ports() -> None:
    """A restart keeps both ports, and a client over WebSockets goes on by itself."""
    async with Emulator({HUB: 1}, ws_port=0) as emulator:
        ports = emulator.port, emulator.ws_port
        options: dict[str, Any] = {**OVER, "retry": RetryOptions(max_retries=20, base_delay=0.01, max_delay=0.1)}
        async with EventProducer(emulator.ws_connection_string, HUB, **options) as producer:
            await producer.send(EventData(b"before"), partition_id="0")
            await emulator.restart()
            assert (emulator.port, emulator.ws_port) == ports
            await producer.send(EventData(b"after"), partition_id="0")
            emulator.drop_connections()
            await producer.send(EventData(b"dropped"), partition_id="0")
        assert await bodies(emulator.ws_connection_string, **OVER) == [b"after", b"dropped"]


async def test_stop_closes_clients_on_websockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping notifies clients on WebSockets as it does others, and waits for none that does not listen."""
    monkeypatch.setattr(stream, "CLOSE_TIMEOUT", 60.0)  # which ends a stream that stands, where `STOP_TIMEOUT` does not
    emulator = Emulator({HUB: 1}, ws_port=0)
    await emulator.start()

    async def join(port: int | None) -> AmqpPeer:
        assert port is not None
        peer = AmqpPeer()
        peer.engine.start()
        route = Route(emulator.host, port, is_websocket=port == emulator.ws_port)
        peer.protocol = await dial(peer.engine, peer, route)
        await peer.until(lambda: any(isinstance(event, Opened) for event in peer.events))
        assert await peer.put_token(f"sb://{emulator.host}/{HUB}") == 202
        return peer

    tcp, websocket, deaf = [await join(port) for port in (emulator.port, emulator.ws_port, emulator.ws_port)]
    link = await deaf.attach(await deaf.begin(), source=f"{HUB}/ConsumerGroups/$Default/Partitions/0")
    link.set_credit(100)
    deaf.flush()
    unread = deaf.protocol and deaf.protocol._transport
    assert isinstance(unread, WebSocketTransport)
    tcp_stream = unread._stream
    tcp_stream.pause_reading()
    options: dict[str, Any] = {**OVER, "retry": NO_RETRY}
    async with EventProducer(emulator.ws_connection_string, HUB, **options) as producer:
        for _ in range(16):
            await producer.send(EventData(bytes(900_000)), partition_id="0")
        # What is sent to the deaf one stands, and the close would have to follow it.
        shells = [connection._protocol for connection in served_connections(emulator)]
        assert [shell is not None and shell.is_paused for shell in shells].count(True) == 1
        began = time.monotonic()
        async with asyncio.timeout(30.0):
            await emulator.aclose()
        assert time.monotonic() - began < 10.0
        with pytest.raises(ConnectionLostError):
            await producer.send(EventData(b"y"), partition_id="0")
    for peer in (tcp, websocket):
        assert peer.closed is not None
        assert peer.closed.error == AmqpError("amqp:connection:forced", "The service is stopping.")
    tcp_stream.resume_reading()
    for peer in (tcp, websocket, deaf):
        await peer.aclose()


async def test_websocket_port_is_served_only_on_request() -> None:
    """Without a port for WebSockets there is none, and a port that is taken is named."""
    async with Emulator({HUB: 1}) as emulator:
        assert emulator.ws_port is None
        with pytest.raises(RuntimeError, match="does not serve WebSockets"):
            _ = emulator.ws_connection_string
        taken = Emulator({HUB: 1}, ws_port=emulator.port)
        with pytest.raises(ConfigurationError, match=f"^ws_port: cannot listen on 127.0.0.1:{emulator.port}: "):
            await taken.start()
    with pytest.raises(ConfigurationError, match=r"^ws_port: must be between 0 and 65535, not 65536"):
        Emulator({HUB: 1}, ws_port=65_536)


# ------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def certificate(authority: Authority, tmp_path: Path) -> list[str]:
    """The emulator's options for TLS."""
    made: trustme.LeafCert = authority.ca.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    made.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    return ["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")]


async def test_commands_work_over_websockets(authority: Authority, certificate: list[str]) -> None:
    """The emulator's command prints a second connection string, which `send` and `tail` use over WebSockets."""
    async with EmulatorProcess(f"{HUB}:1", arguments=["--ws-port", "0", *certificate]) as service:
        await service.child.line("Endpoint=", after=1)
        tcp, websocket = service.child.lines
        assert re.sub(r":\d+;", ":0;", tcp) == re.sub(r":\d+;", ":0;", websocket)
        assert tcp != websocket
        options = ["--transport-type", "websocket", "--ca-file", str(authority.file), "--hub", HUB]
        environment = {"EVENTPUMP_CONNECTION_STRING": websocket}

        def command(*arguments: str) -> ChildProcess:
            return ChildProcess(
                sys.executable, "-m", "eventpump.cli.main", *arguments, *options, environment=environment
            )

        async with asyncio.timeout(60), command("send") as send:
            await send.tell("one")
            await send.tell("two")
            send.end_input()
            assert await send.wait() == 0, send.stderr
        async with asyncio.timeout(60), command("tail", "--count", "2", "--json") as tail:
            assert await tail.wait() == 0, tail.stderr
            assert sorted(json.loads(line)["body"] for line in tail.lines) == ["one", "two"]


async def test_connection_that_is_no_websocket_in_time_is_cut() -> None:
    """Connections that say nothing, or ask for something else, are cut; a WebSocket with a token goes on."""

    async def until_cut(emulator: Emulator, sent: bytes) -> None:
        reader, writer = await asyncio.open_connection(emulator.host, emulator.ws_port)
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()

    async with (
        asyncio.timeout(30),
        Emulator({HUB: 1}, ws_port=0, deadlines=Deadlines(no_token=2.0)) as emulator,
        EventProducer(emulator.ws_connection_string, HUB, **OVER) as producer,
    ):
        await producer.send(EventData("before"), partition_id="0")
        (connection,) = served_connections(emulator)
        started = b"GET / HTTP/1.1\r\nHost: x\r\n"
        await asyncio.gather(*(until_cut(emulator, sent) for sent in (b"", started, started + b"\r\n")))
        await producer.send(EventData("after"), partition_id="0")
        assert set(served_connections(emulator)) == {connection}
