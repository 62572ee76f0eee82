"""A client and a server engine back to back, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import (
    Closed,
    Connection,
    Event,
    LinkAttached,
    Messages,
    Role,
    SaslRequested,
    SessionBegun,
)
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import Composite, Source, Target, decode_performative
from eventpump.amqp.session import Session

_T = TypeVar("_T")


def config(**changes: Any) -> ConnectionConfig:
    """Return a config with some fields set."""
    return ConnectionConfig(**{"container_id": "test", "hostname": "host", **changes})


def frame(channel: int, performative: Composite, payload: bytes = b"", *, kind: int = 0) -> bytes:
    """Write a frame by hand."""
    body = performative.encode() + payload
    return (len(body) + 8).to_bytes(4, "big") + bytes([2, kind]) + channel.to_bytes(2, "big") + body


def frames(data: bytes) -> list[tuple[Any, int]]:
    """Return the performatives of a flight of whole frames, with the sizes of their frames; headers are left out."""
    found = []
    pos = 0
    while pos < len(data):
        if data[pos : pos + 4] == b"AMQP":
            pos += 8
            continue
        size = int.from_bytes(data[pos : pos + 4], "big")
        if size > 8:
            found.append((decode_performative(data, pos + 8, pos + size)[0], size))
        pos += size
    return found


def sent(data: bytes, kind: type[_T]) -> list[_T]:
    """Return the performatives of one kind in a flight of whole frames."""
    return [each for each, _ in frames(data) if isinstance(each, kind)]


class Pair:
    """Both ends of one connection; `run` carries bytes until both are quiet.

    Attributes:
        to_server: Every flight of the client's bytes; likewise `to_client`.
        client_events: All events of the client; likewise `server_events`.
    """

    def __init__(
        self, client: ConnectionConfig | None = None, server: ConnectionConfig | None = None, *, is_welcome: bool = True
    ) -> None:
        self.client = Connection(client or config(), Role.CLIENT)
        self.server = Connection(server or config(), Role.SERVER)
        self.is_welcome = is_welcome
        self.to_server: list[bytes] = []
        self.to_client: list[bytes] = []
        self.client_events: list[Event] = []
        self.server_events: list[Event] = []

    def run(self) -> tuple[list[Event], list[Event]]:
        """Exchange bytes until there are none.

        Returns:
            The events of the client and of the server.
        """
        events: tuple[list[Event], list[Event]] = ([], [])
        while True:
            up, down = self.client.data_to_send(), self.server.data_to_send()
            if not up and not down:
                break
            if up:
                self.to_server.append(up)
                events[1].extend(self._serve(up))
            if down:
                self.to_client.append(down)
                events[0].extend(self.client.receive(down))
        self.client_events += events[0]
        self.server_events += events[1]
        return events

    def _serve(self, data: bytes) -> list[Event]:
        events = self.server.receive(data)
        if any(isinstance(event, SaslRequested) for event in events):
            self.server.sasl_outcome(ok=self.is_welcome)
            events += self.server.receive(b"")
        return events

    def engine_of(self, link: Link) -> Connection:
        """Return the engine that a link belongs to."""
        return self.client if link.session.frames.output is self.client.output else self.server

    def open(self) -> Pair:
        """Open the connection."""
        self.client.start()
        self.run()
        assert self.client.is_open
        assert self.server.is_open
        return self

    def session(self) -> tuple[Session, Session]:
        """Begin a session.

        Returns:
            The client's and the server's end.
        """
        mine = self.client.begin()
        _, events = self.run()
        return mine, only(events, SessionBegun).session

    def link(
        self,
        session: Session,
        *,
        is_receiver: bool,
        name: str = "link",
        max_message_size: int | None = None,
        server_max_message_size: int | None = None,
    ) -> tuple[Link, Link]:
        """Attach a link from the client.

        Returns:
            The client's and the server's end.
        """
        mine = session.attach(
            name,
            is_receiver=is_receiver,
            snd_settle_mode=2,
            source=Source("here"),
            target=Target("there"),
            max_message_size=max_message_size,
        )
        _, events = self.run()
        theirs = only(events, LinkAttached).link
        theirs.accept(max_message_size=server_max_message_size)
        self.run()
        assert mine.is_attached
        assert theirs.is_attached
        return mine, theirs


def opened(client: ConnectionConfig | None = None, server: ConnectionConfig | None = None) -> Pair:
    """Return an open pair."""
    return Pair(client, server).open()


def only(events: Sequence[Event], kind: type[_T]) -> _T:
    """Return the one event of a kind."""
    found = [event for event in events if isinstance(event, kind)]
    assert len(found) == 1, events
    return found[0]


def payloads(events: Sequence[Event]) -> list[bytes]:
    """Return what arrived."""
    return [payload for event in events if isinstance(event, Messages) for payload in event.payloads]


def condition(events: Sequence[Event]) -> str | None:
    """Return the condition the connection was closed with."""
    error = only(events, Closed).error
    return None if error is None else str(error.condition)


def story(events: list[Event]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return what happened in a form that does not depend on how bytes came: messages by link, the rest in order."""
    rest: list[str] = []
    messages: dict[str, list[Any]] = {}
    for event in events:
        if isinstance(event, Messages):
            assert not event.delivery_ids or len(event.delivery_ids) == len(event.payloads)
            assert event.formats is None or len(event.formats) == len(event.payloads)
            ids: list[int | None] = list(event.delivery_ids) or [None] * len(event.payloads)
            formats = event.formats or [0] * len(event.payloads)
            messages.setdefault(_name(event.link), []).extend(zip(event.payloads, ids, formats, strict=True))
        else:
            rest.append(_text(event))
    return rest, messages


def _name(link: Link) -> str:
    return f"{link.name}/{link.session.channel}"


def _text(event: Event) -> str:
    parts = []
    for name in type(event).__slots__:
        value: Any = getattr(event, name)
        show: Callable[[Any], str] = repr
        if isinstance(value, Link):
            show = _name
        elif isinstance(value, Session):
            value = value.channel
        elif name == "links":
            value = [_name(link) for link in value]
        parts.append(f"{name}={show(value)}")
    return f"{type(event).__name__}({', '.join(parts)})"
