"""A server that answers any client with the frames of a recording.

Link names, handles, channels, the numbers of deliveries and transfers, and the id of a request are replaced by those of
the connected client. All other fields are as recorded, payloads byte for byte. An answer is sent when the frame that it
answers has arrived; a frame that the service sent by itself, when the exchange's other frames have been sent.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from eventpump.amqp.codec import encode
from eventpump.amqp.connection import AMQP_HEADER, SASL_HEADER
from eventpump.amqp.message import Message
from eventpump.amqp.performatives import (
    Attach,
    Begin,
    Close,
    Composite,
    Detach,
    End,
    Flow,
    Open,
    SaslInit,
    Transfer,
)
from tests.recorded import Exchange, Frame, exchanges, payload_bytes
from tests.recorded.frames import HOST, HUB, NAMESPACE, Came, decoded, frame_bytes, performative_of

_DEFAULTS: Final = (
    "sasl-anonymous",
    "open-producer",
    "begin",
    "attach-cbs-sender",
    "attach-cbs-receiver",
    "put-token-sas",
    "attach-sender-hub",
    "flow-sender-hub",
    "send-plain",
    "attach-receiver-start",
    "attach-management-sender",
    "attach-management-receiver",
    "read-hub",
)
"""What answers a frame that an exchange does not answer."""

_CORRELATED: Final = re.compile(r"005373c0[0-9a-f]{2}0d404040404098 <message-id:16> 40404040404040")
_SENDS_BY_ITSELF: Final = "by itself"
_TEXTS: Final = {
    "app-id": "6f1c7bd8-2e0f-4f5b-9a52-0d5d7a3b1c11",
    "broker": "B31",
    "client": "6f1c7bd82e0f4f5b9a520d5d7a3b1c11",
    "client-ip": "192.0.2.1",
    "container": "6f1c7bd82e0f4f5b9a520d5d7a3b1c11_G1",
    "gateway": "G5",
    "host": HOST,
    "hub": HUB,
    "link-tracking-id": "6F1C7BD82E0F4F5B9A520D5D7A3B1C11_G5",
    "namespace": NAMESPACE,
    "time-text": "2025-05-01T12:00:00",
    "tracking-id": "6f1c7bd8-2e0f-4f5b-9a52-0d5d7a3b1c11",
}
TIME_MS: Final = 1_746_100_800_000
"""The time in all payloads, in milliseconds since the Unix epoch."""


def payload_of(template: str) -> bytes:
    """Return a recorded payload with our names in it."""
    values = {}
    for name, size in re.findall(r"<([a-z-]+):(\d+)>", template):
        text = _TEXTS.get(name, "").encode()
        values[name] = TIME_MS.to_bytes(8, "big") if name == "time" else text.ljust(int(size), b"0")[: int(size)]
    return payload_bytes(template, values)


def _kind(address: Any, *, is_sender: bool) -> str:
    """Name a link by its node and by the client's role."""
    side = "sender" if is_sender else "receiver"
    return f"{str(address).removeprefix('$')}-{side}" if str(address).startswith("$") else side


def answers_of(exchange: Exchange) -> dict[str, list[Frame]]:
    """Sort the service's frames of an exchange by what they answer."""
    answers: dict[str, list[Frame]] = {}
    text = repr([frame.payload for frame in exchange.frames])
    links = {0: "cbs-receiver", 1: "cbs-sender", 2: "sender", 3: "management-sender"}
    if "'READ'" in text:
        links[2] = "management-receiver"
    refused: set[int] = set()
    for frame in exchange.frames:
        if frame.by == "client":
            continue
        fields = frame.fields or {}
        match frame.name:
            case "attach":
                kind = str(fields["name"]).strip("<>")
                links[fields["handle"]] = kind
                key = f"attach {kind}"
                if "source" not in fields:
                    refused.add(fields["handle"])
            case "flow":
                key = _SENDS_BY_ITSELF if "handle" not in fields else f"attach {links[fields['handle']]}"
            case "disposition" if fields["role"]:
                key = "send" if "'READ'" not in text and fields["first"] else "request"
            case "transfer":
                key = "credit"
                if "'status-code" in (frame.payload or ""):
                    key = "read" if "'READ'" in (frame.payload or "") else "put-token"
            case "detach" if fields["handle"] in refused:
                key = "attach receiver"
            case "detach" | "end" | "close" if "error" not in fields:
                key = frame.name
            case "disposition" | "detach" | "end" | "close" | "empty":
                key = _SENDS_BY_ITSELF
            case _:
                key = frame.name
        answers.setdefault(key, []).append(frame)
    return answers


def whole(frames: list[Frame]) -> list[Frame]:
    """Complete the frames of a large message: the middle ones, and the first or last where another exchange has it."""
    if not any("<rest:" in (frame.payload or "") for frame in frames):
        return frames
    by_name = {each.name: each for each in exchanges()}
    first, last = (by_name[f"delivery-large-{place}-frame"].frames[0] for place in ("first", "last"))
    assert first.payload is not None
    assert last.payload is not None
    size = int(re.findall(r"b0([0-9a-f]{8})", first.payload)[0], 16)
    left = size - sum(int(re.findall(r"<rest:(\d+)>", each.payload or "")[0]) for each in (first, last))
    middle = replace(last, fields={**(last.fields or {}), "more": True}, payload=f"<rest:{left // 2}>")
    return [first, middle, middle, last]


@dataclass(slots=True)
class _Link:
    """A link of the client.

    Args:
        handle: The service's own.
    """

    kind: str
    attach: Attach
    handle: int


@dataclass(slots=True)
class _Session:
    """A session of the client."""

    channel: int
    links: dict[int, _Link] = field(default_factory=dict)
    incoming: int = 0
    outgoing: int = 1
    deliveries: int = 0


class RecordedService:
    """Serves the frames of one exchange.

    Attributes:
        left: The service's frames of the exchange that were not sent yet, without those that end the connection.
        port: Where it listens.
        problems: What went wrong in it.
    """

    def __init__(self, exchange: Exchange) -> None:
        by_name = {each.name: each for each in exchanges()}
        self._answers: dict[str, list[Frame]] = {}
        for name in _DEFAULTS:
            self._answers |= answers_of(by_name[name])
        self._answers["attach sender"] = [
            frame
            for name in ("attach-sender-hub", "flow-sender-hub")
            for frame in answers_of(by_name[name])["attach sender"]
        ]
        own = answers_of(exchange)
        if "credit" in own:
            own["credit"] = whole(own["credit"])
        for key, frames in own.items():
            known = self._answers.get(key, [])
            # An exchange may have the attach or the credit behind it; the other is that of another exchange.
            names = {frame.name for frame in frames}
            self._answers[key] = sorted(
                [*frames, *(frame for frame in known if key.startswith("attach") and frame.name not in names)]
                if not any(frame.name == "detach" for frame in frames)
                else frames,
                key=lambda frame: frame.name != "attach",
            )
        self.left = [
            frame
            for key, frames in own.items()
            if key not in ("detach", "end", "close") and key in self._answers
            for frame in frames
        ]
        self._by_itself = self._answers.get(_SENDS_BY_ITSELF, [])
        self.port = 0
        self.problems: list[Exception] = []
        self._writers: list[asyncio.StreamWriter] = []

    @classmethod
    @asynccontextmanager
    async def serve(cls, exchange: Exchange, tls: ssl.SSLContext | None = None) -> AsyncIterator[RecordedService]:
        """Listen on a port of this machine."""
        service = cls(exchange)
        server = await asyncio.start_server(service.connected, "127.0.0.1", 0, ssl=tls)
        service.port = server.sockets[0].getsockname()[1]
        try:
            yield service
        finally:
            server.close()
            service.abort()
            await server.wait_closed()

    def abort(self) -> None:
        """Drop all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""
        self._writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            try:
                await _Conversation(self, writer).run(reader)
            except (AssertionError, KeyError, ValueError) as error:
                self.problems.append(error)
        writer.close()

    def take(self, key: str) -> list[Frame]:
        """Return the answer to something; recorded dispositions one by one, the last of them for all further sends."""
        frames = self._answers[key]
        if key == "send" and len(frames) > 1:
            self._answers[key] = frames[1:]
        return frames[:1] if key == "send" else frames

    def take_events(self) -> list[Frame]:
        """Return what is delivered for the first credit."""
        return self._answers.pop("credit", [])

    def take_own(self) -> list[Frame]:
        """Return what the service sends by itself."""
        frames, self._by_itself = self._by_itself, []
        return frames

    def sent(self, frame: Frame) -> None:
        """Called when a recorded frame went out."""
        self.left = [each for each in self.left if each is not frame]

    @property
    def has_events(self) -> bool:
        """Whether events are left to deliver."""
        return "credit" in self._answers


class _Conversation:
    """One connection to the service."""

    def __init__(self, service: RecordedService, writer: asyncio.StreamWriter) -> None:
        self._service = service
        self._writer = writer
        self._sessions: dict[int, _Session] = {}
        self._ended: set[type[Composite]] = set()

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Answer until the client closes."""
        while True:
            head = await reader.readexactly(4)
            if head == b"AMQP":
                is_sasl = (await reader.readexactly(4))[0] == 3
                self._writer.write(SASL_HEADER if is_sasl else AMQP_HEADER)
                if is_sasl:
                    self._answer("sasl-mechanisms")
                continue
            came = decoded(head + await reader.readexactly(int.from_bytes(head, "big") - 4))
            if self._take(came):
                return

    def _take(self, came: Came) -> bool:
        """Answer a frame, and return whether it was the last."""
        made = came.performative
        if self._ended and not isinstance(made, Close | End):
            return False  # a client sends on until it has read of the end
        match made:
            case SaslInit():
                self._answer("sasl-outcome")
            case Open():
                self._answer("open")
            case Begin():
                session = self._sessions[came.channel] = _Session(len(self._sessions))
                self._answer("begin", session, remote_channel=came.channel)
            case Attach():
                self._attach(self._sessions[came.channel], made)
            case Transfer():
                self._message(self._sessions[came.channel], made, came.payload)
            case Flow():
                self._credit(self._sessions[came.channel], made)
            case Detach():
                session = self._sessions[came.channel]
                link = session.links.pop(made.handle, None)
                if link is not None:
                    self._write(session.channel, Detach(link.handle, made.closed))
            case End():
                if End not in self._ended:
                    self._write(self._sessions[came.channel].channel, End())
            case Close():
                if Close not in self._ended:
                    self._write(0, Close())
                return True
        return False

    def _attach(self, session: _Session, made: Attach) -> None:
        node = made.source if made.role else made.target
        kind = _kind(None if node is None else node.address, is_sender=not made.role)
        link = session.links[made.handle] = _Link(kind, made, len(session.links))
        self._answer(f"attach {kind}", session, link)
        if kind == "sender":
            self._by_itself(session)

    def _message(self, session: _Session, made: Transfer, payload: bytes) -> None:
        session.incoming += 1
        link = session.links.get(made.handle)
        if made.more or link is None:  # the service has detached it meanwhile
            return
        node = link.kind.removesuffix("-sender")
        if node == link.kind:
            self._answer("send", session, link, first=made.delivery_id)
            return
        request = Message.decode(payload)
        assert request.properties is not None
        self._answer("request", session, link, first=made.delivery_id)
        answer = "put-token" if node == "cbs" else "read"
        # uamqp has the two links on sessions of their own.
        home, way = next(
            (each, link)
            for each in (session, *self._sessions.values())
            for link in each.links.values()
            if link.kind == f"{node}-receiver"
        )
        for frame in self._service.take(answer):
            template = frame.payload or ""
            assert _CORRELATED.search(template)
            name = encode(request.properties.message_id)
            listed = b"\x0d" + b"\x40" * 5 + name + b"\x40" * 7
            correlated = b"\x00\x53\x73\xc0" + bytes((len(listed),)) + listed
            self._send(frame, home, way, correlated + payload_of(_CORRELATED.sub("", template).strip()))

    def _credit(self, session: _Session, made: Flow) -> None:
        link = None if made.handle is None else session.links.get(made.handle)
        if made.echo:
            state = Flow(session.incoming, 5000, session.outgoing, 65_535)
            if link is not None:
                state.handle, state.delivery_count, state.link_credit = (
                    link.handle,
                    made.delivery_count,
                    made.link_credit,
                )
            self._write(session.channel, state)
        if link is None or link.kind != "receiver" or not made.link_credit:
            return
        for frame in self._service.take_events():
            self._send(frame, session, link, payload_of(frame.payload or ""))
        self._by_itself(session)

    def _by_itself(self, session: _Session) -> None:
        for frame in self._service.take_own():
            if frame.name == "empty":
                self._writer.write(frame_bytes(None, channel=0))
                self._service.sent(frame)
                continue
            fields = frame.fields or {}
            # A client may have its links of $cbs on sessions of their own; the recorded one had one session.
            homes = [(each, handle, link) for each in self._sessions.values() for handle, link in each.links.items()]
            if frame.name == "detach":
                kinds = (("cbs-receiver",), ("cbs-sender",), ("sender", "receiver"))[min(fields["handle"], 2)]
                for home, handle, link in homes:
                    if link.kind in kinds:
                        self._send(frame, home, link)
                        del home.links[handle]
            elif frame.name == "disposition":
                self._send(frame, next(home for home, _, link in homes if link.kind == "cbs-receiver"))
            elif frame.name == "end":
                for each in self._sessions.values():
                    self._send(frame, each)
            else:
                self._send(frame, session)

    # ------------------------------------------------------------------------------------------------- frames

    def _answer(self, key: str, session: _Session | None = None, link: _Link | None = None, **fields: Any) -> None:
        for frame in self._service.take(key):
            self._send(frame, session, link, **fields)

    def _send(
        self,
        frame: Frame,
        session: _Session | None = None,
        link: _Link | None = None,
        payload: bytes = b"",
        **fields: Any,
    ) -> None:
        """Send a recorded frame with what is the client's own in it."""
        made: Any = performative_of(frame, _TEXTS)
        for name, value in fields.items():
            setattr(made, name, value)
        channel = 0 if session is None or isinstance(made, Close) else session.channel
        if link is not None and hasattr(made, "handle"):
            made.handle = link.handle
        if session is not None:
            if isinstance(made, Attach) and link is not None:
                made.name = link.attach.name
                for end in ("source", "target"):
                    own, theirs = getattr(made, end), getattr(link.attach, end)
                    if own is not None and theirs is not None:
                        own.address = theirs.address
            elif isinstance(made, Flow):
                made.next_incoming_id, made.next_outgoing_id = session.incoming, session.outgoing
            elif isinstance(made, Transfer):
                if made.delivery_id is not None:
                    made.delivery_id = session.deliveries = max(session.deliveries, made.delivery_id)
                    session.deliveries += 1
                session.outgoing += 1
        if isinstance(made, End | Close):
            self._ended.add(type(made))
        self._write(channel, made, payload, is_sasl=frame.name.startswith("sasl"))
        self._service.sent(frame)

    def _write(self, channel: int, made: Any, payload: bytes = b"", *, is_sasl: bool = False) -> None:
        if not self._writer.is_closing():
            self._writer.write(frame_bytes(made, channel=channel, payload=payload, is_sasl=is_sasl))
