"""The client of a recording, played against the emulator through sockets and on virtual time.

Each frame is sent when those before it have come. Time passes only where the emulator waits for it.
"""

from __future__ import annotations

import asyncio
import socket
import tomllib
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from eventpump.amqp.connection import AMQP_HEADER, SASL_HEADER
from eventpump.amqp.message import AmqpValue, Message, Properties
from eventpump.amqp.performatives import Close, Detach, End, Flow, Open, SaslOutcome, Transfer
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME, AccessRule, KeyRing, VerifiedToken
from eventpump.emulator.config import HubSpec
from eventpump.emulator.connection import ServiceConnection
from eventpump.emulator.log import Retention
from eventpump.emulator.server import _ServedProtocol
from eventpump.emulator.service import Deadlines, Service
from eventpump.eventhubs import sas
from eventpump.net.stream import ConnectionProtocol
from eventpump.testing.clock import VirtualClock, VirtualTimeLoop
from tests.recorded import FOLDER, Exchange, Frame, exchanges, payload_bytes
from tests.recorded.frames import (
    HOST,
    HUB,
    NAMESPACE,
    Came,
    Difference,
    decoded,
    differences,
    frame_bytes,
    performative_of,
)
from tests.recorded.payloads import as_sent, pieces
from tests.support.peer import AmqpPeer

PATIENCE: Final = 1000.0
"""Virtual seconds to wait for a frame: longer than any that a recording waits for."""

SOON: Final = 5000
"""Milliseconds up to which an answer is taken to come at once."""

TOLERANCE: Final = 2.0
"""Seconds by which a time may differ from the recorded one: the network's part in it."""

_FILLER: Final = b"\x00\x53\x75\xa0\x01-"
_CHANNEL: Final = 1
_JWT: Final = "made-up"


@dataclass(frozen=True, slots=True)
class Scene:
    """What comes before an exchange; scenes.toml explains the fields."""

    after: tuple[Frame, ...] = ()
    first: tuple[Frame, ...] = ()
    then: tuple[Frame, ...] = ()
    stored: tuple[Frame, ...] = ()
    live: bool = False
    signed: str = "well"
    host: str = HOST
    idle: int = 0
    skips: int = 0
    timed: bool = False


@cache
def scenes() -> Mapping[str, Scene]:
    """Return the scene of each exchange that can be played, by its name."""
    document = tomllib.loads((FOLDER / "scenes.toml").read_text(encoding="utf-8"))
    stages: Mapping[str, list[str]] = document["stages"]
    by_name = {each.name: each for each in exchanges()}

    def frames(names: Iterable[str]) -> Iterator[Frame]:
        for name in names:
            if name.startswith("@"):
                yield from frames(stages[name[1:]])
            else:
                exchange, _, count = name.partition(":")
                yield from by_name[exchange].frames[: int(count) if count else None]

    def scene(row: Mapping[str, Any]) -> Scene:
        lists = {key: tuple(frames(row[key])) for key in ("after", "first", "then", "stored") if key in row}
        return Scene(**{**row, **lists})

    return {name: scene(row) for name, row in document["scenes"].items()}


class NothingCameError(Exception):
    """The frame that comes next, before an exchange, did not come."""


@dataclass(slots=True)
class Wire:
    """A client's end of a connection.

    Attributes:
        texts: Our names for placeholders of fields.
        values: Our bytes for placeholders of payloads.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    scene: Scene
    texts: dict[str, str]
    values: dict[str, bytes]
    deliveries: int = 0
    requests: set[str] = field(default_factory=set)

    def send(self, frame: Frame) -> None:
        """Send a recorded frame."""
        if frame.name == "empty":
            data = frame_bytes(None, channel=0)
        elif frame.fields is None:
            assert frame.message is not None
            data = self._request(frame.message)
        else:
            made = performative_of(frame, self.texts)
            if isinstance(made, Open):
                self.texts["client"] = made.container_id
                made.idle_time_out = self.scene.idle or made.idle_time_out
            if isinstance(made, Transfer):
                self.deliveries = (made.delivery_id or 0) + 1
            payload = b"" if frame.payload is None else payload_bytes(frame.payload, self.values)
            if frame.payload is not None and _is_envelope(frame):
                assert isinstance(made, Transfer)
                made.message_format = 0x80013700  # README.md: the recording says 0
            channel = 0 if isinstance(made, Open | Close) else _CHANNEL
            data = frame_bytes(
                made, channel=0 if frame.name == "sasl-init" else channel, payload=payload, is_sasl="sasl" in frame.name
            )
        with suppress(ConnectionError):
            self.writer.write(data)

    def _request(self, message: Mapping[str, Any]) -> bytes:
        fields = {
            key: value.replace("<host>", self.scene.host).replace("<hub>", HUB)
            for key, value in message["application_properties"].items()
        }
        token = self._token(fields)
        if "security_token" in fields:
            fields["security_token"] = token
        is_token = fields["operation"] == "put-token"
        name = uuid.uuid4()
        self.values["message-id"] = name.bytes
        payload = Message(
            properties=Properties(message_id=name),
            application_properties={key: value for key, value in fields.items() if key != "expiration"},
            body=AmqpValue(token if is_token else ""),
        ).encode()
        number = self.deliveries
        self.deliveries += 1
        transfer = Transfer(1 if is_token else 3, number, number.to_bytes(4, "big"), 0, False)
        return frame_bytes(transfer, channel=_CHANNEL, payload=payload)

    def _token(self, fields: Mapping[str, str]) -> str:
        if fields.get("type") != "servicebus.windows.net:sastoken":
            return _JWT
        key_name = "nobody" if self.scene.signed == "nobody" else DEFAULT_KEY_NAME
        key = DEFAULT_KEY if self.scene.signed == "well" else "another key"
        return sas.generate(fields["name"], key_name, key, int(VirtualClock().time()) + 3600)

    async def receive(self) -> Came | None:
        """Return the next frame; None where none comes any more."""
        try:
            async with asyncio.timeout(PATIENCE):
                head = await self.reader.readexactly(4)
                if head == b"AMQP":
                    await self.reader.readexactly(4)
                    head = await self.reader.readexactly(4)
                came = decoded(head + await self.reader.readexactly(int.from_bytes(head, "big") - 4))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            return None
        if isinstance(came.performative, SaslOutcome):
            self.writer.write(AMQP_HEADER)
        return came

    async def play(self, frames: Iterable[Frame]) -> None:
        """Play frames without a comparison."""
        for frame in frames:
            if frame.by == "client":
                self.send(frame)
            else:
                came = await self.receive()
                if came is None or came.name != frame.name:
                    raise NothingCameError


def _is_envelope(frame: Frame) -> bool:
    """Whether data sections hold events: the format of one such send was recorded wrongly."""
    assert frame.payload is not None
    return "005375a03f005370" in frame.payload


class Stage:
    """An emulator with the recorded names, whose connections are pairs of sockets."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._writers: list[asyncio.StreamWriter] = []

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Stage]:
        """Start it."""
        clock = VirtualClock()
        service = Service(
            keys=KeyRing(
                [AccessRule(DEFAULT_KEY_NAME, DEFAULT_KEY)],
                lambda _: VerifiedToken(clock.time() + 3600),
                hosts={HOST},
            ),
            retention=Retention(),
            deadlines=Deadlines(),
            max_message_size=1 << 20,
            now=clock.time,
        )
        await service.open([HubSpec(HUB, 2)], data=None, fsync=False)
        service.authority = HOST
        stage = cls(service)
        try:
            yield stage
        finally:
            await stage.aclose()

    async def aclose(self) -> None:
        """Drop all connections, and stop."""
        for connection in list(self.service.connections):
            connection.abort()
        for writer in self._writers:
            writer.close()
        await self.service.aclose()
        await asyncio.sleep(0)

    async def _accepted(self) -> socket.socket:
        here, there = socket.socketpair()
        served = ServiceConnection(self.service)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: _ServedProtocol(served), there)
        served.peer_address = "192.0.2.1"  # a pair has none
        return here

    async def connect(self, scene: Scene) -> Wire:
        """Connect a client."""
        reader, writer = await asyncio.open_connection(sock=await self._accepted(), limit=1 << 20)
        self._writers.append(writer)
        links = ("cbs-receiver", "cbs-sender", "management-receiver", "management-sender", "receiver", "sender", "uuid")
        partition = self.service.hubs[0].partitions[0]
        texts = {name: str(uuid.uuid4()) for name in links}
        texts |= {"host": HOST, "hub": HUB, "namespace": NAMESPACE, "framework": "", "platform": "", "user-agent": ""}
        texts["time-ms"] = str(partition.first_enqueued_ms or self.service.now_ms())
        writer.write(SASL_HEADER)
        return Wire(reader, writer, scene, texts, {"hub": HUB.encode(), "host": HOST.encode()})

    async def store(self, messages: Iterable[tuple[bytes, int]]) -> None:
        """Send messages to the first partition, one second after the other."""
        wanted = list(messages)
        if not wanted:
            return
        peer = AmqpPeer()
        peer.engine.start()
        sock = await self._accepted()
        _, peer.protocol = await asyncio.get_running_loop().create_connection(
            lambda: ConnectionProtocol(peer.engine, peer), sock=sock
        )
        await peer.until(lambda: peer.engine.is_open)
        assert await peer.put_token(f"sb://{HOST}/{HUB}") == 202
        link = await peer.attach(await peer.begin(), target=f"{HUB}/Partitions/0")
        for payload, message_format in wanted:
            await peer.send(link, payload, message_format=message_format)
            await asyncio.sleep(1)
        await peer.aclose()


def _events(frames: Iterable[Frame], known: int) -> list[tuple[bytes, int]]:
    """Return what must be stored for deliveries to come, after as many that are stored."""
    found: dict[int, bytes] = {}
    for frame in frames:
        if frame.by == "service" and frame.payload is not None and "x-opt-sequence-number" in frame.payload:
            number = next(
                piece
                for piece in pieces(payload_bytes(frame.payload))
                if piece.path == "message-annotations[x-opt-sequence-number]"
            )
            found[int.from_bytes(number.raw, "big")] = as_sent(
                frame.payload, {"tracking-id": uuid.uuid4().hex.encode()}
            )
    return [(found.get(number, _FILLER), 0) for number in range(known, max(found, default=-1) + 1)]


def _sends(frames: Iterable[Frame]) -> list[tuple[bytes, int]]:
    return [
        (payload_bytes(frame.payload), frame.fields["message_format"])
        for frame in frames
        if frame.by == "client" and frame.payload is not None and frame.fields is not None
    ]


async def play(exchange: Exchange, scene: Scene) -> list[Difference]:
    """Play an exchange against the emulator, and return in what the emulator differs."""
    async with Stage.open() as stage:
        earlier = _sends(scene.stored) or _events([*scene.after, *(() if scene.live else exchange.frames)], 0)
        await stage.store(earlier)
        if scene.first:
            await (await stage.connect(scene)).play(scene.first)
        wire = await stage.connect(scene)
        try:
            await wire.play(scene.after)
            if scene.then:
                await (await stage.connect(scene)).play(scene.then)
            for _ in range(scene.skips):
                if await wire.receive() is None:
                    raise NothingCameError
        except NothingCameError:
            return [Difference(exchange.name, 0, exchange.frames[0].name, "the frame", "what comes before", None)]
        later = _events(exchange.frames, len(earlier)) if scene.live else []
        return await _compared(exchange, scene, stage, wire, later)


async def _compared(
    exchange: Exchange, scene: Scene, stage: Stage, wire: Wire, later: list[tuple[bytes, int]]
) -> list[Difference]:
    found: list[Difference] = []
    loop = asyncio.get_running_loop()
    began: float | None = None
    elapsed = 0
    for at, frame in enumerate(exchange.frames):
        elapsed += frame.after or 0
        if frame.by == "client":
            wire.send(frame)
            began = loop.time() if began is None else began
            continue
        if later and frame.name == "transfer":
            await stage.store(later)
            later = []
        came = await wire.receive()
        if came is None or came.name != frame.name:
            other = None if came is None else (came.name, came.performative)
            return [*found, Difference(exchange.name, at, frame.name, "the frame", frame.fields, other)]
        found += [
            Difference(exchange.name, at, frame.name, *each, (frame.size, came.size))
            for each in differences(frame, came, wire.texts, wire.values)
        ]
        began = loop.time() if began is None else began
        seconds = loop.time() - began
        if scene.timed and (frame.after or 0) > SOON and abs(seconds - elapsed / 1000) > TOLERANCE:
            found.append(Difference(exchange.name, at, frame.name, "time", elapsed / 1000, seconds))
    rest = await _rest(exchange, wire)
    return [*found, *(Difference(exchange.name, len(exchange.frames), *each) for each in rest)]


async def _rest(exchange: Exchange, wire: Wire) -> list[tuple[str, str, object, object]]:
    """Look at what comes behind the last recorded frame: nothing but answers that the client did not wait for."""
    names = [frame.name for frame in exchange.frames if frame.by == "client"]
    if exchange.frames[-1].by == "client" and names[-1] in ("flow", "empty"):
        asked = Flow(0, 65_535, 1, 65_535, echo=True)
        wire.writer.write(frame_bytes(asked, channel=_CHANNEL))
        came = await wire.receive()
        if came is None or not isinstance(came.performative, Flow) or came.performative.handle is not None:
            return [("flow", "silence", None, came)]
    if "close" not in names:
        return []
    found: list[tuple[str, str, object, object]] = []
    while (came := await wire.receive()) is not None:
        if not isinstance(came.performative, Detach | End | Close) or came.performative.error is not None:
            found.append((came.name, "the rest", None, came.performative))
    return found


@cache
def replayed() -> Mapping[str, tuple[Difference, ...]]:
    """Play all exchanges that have a scene, and return the differences of each."""

    async def all_of_them() -> Mapping[str, tuple[Difference, ...]]:
        known = scenes()
        return {each.name: tuple(await play(each, known[each.name])) for each in exchanges() if each.name in known}

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(all_of_them())
