"""The connection engine in both roles: whole against cut, by forms against without."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final

from eventpump.amqp.codec import AmqpDecodeError
from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import (
    Closed,
    Connection,
    CreditChanged,
    Event,
    LinkAttached,
    Messages,
    Opened,
    Role,
    SaslRequested,
    SessionBegun,
)
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import Accepted, Attach, Begin, SaslInit, Source, Target
from eventpump.amqp.session import Session
from eventpump.net.trace import FrameLog
from tests.fuzz import captures
from tests.fuzz.captures import Dialogue, performative_of, split_frames
from tests.fuzz.entry import BreachError, Entry, attempt, require, same, size_of
from tests.fuzz.mutations import mutate_frames, pieces
from tests.support.inside import unread_by
from tests.unit.amqp.pair import story

_STEPS: Final = b"\x10\x11\x12\x16\x17\x18\x40\x41\x44"
"""Descriptors of performatives that a shell answers: open, begin, attach, detach, end, close, SASL."""
_MESSAGE_LIMIT: Final = 1024 * 1024


def phases_of(rng: Random, frames: Sequence[bytes]) -> tuple[bytes, ...]:
    """Put frames into runs that are read before the shell acts. A run ends behind what a shell answers, mostly."""
    made: list[bytes] = [b""]
    for frame in frames:
        made[-1] += frame
        is_step = frame.startswith(b"AMQP") or (frame[8:10] == b"\0\x53" and frame[10:11] in _STEPS)
        if rng.random() < (0.95 if is_step else 0.1):
            made.append(b"")
    return tuple(phase for phase in made if phase)


class _NoForms(dict[bytes, Any]):
    """Keeps no form, so that the general decoder reads every transfer."""

    def __setitem__(self, key: bytes, value: Any) -> None:
        """Keep nothing."""


class _Shell:
    """Drives an engine: acts between phases, on what the last one reported."""

    def __init__(self, engine: Connection) -> None:
        self.engine = engine
        self.rest: list[str] = []
        self.messages: dict[str, list[Any]] = {}
        self.output: list[bytes] = []

    def read(self, parts: Sequence[bytes]) -> None:
        """Read a phase, in these parts, and act on it."""
        events: list[Event] = []
        for part in parts:
            events += self.engine.receive(part)
        while events:
            self._note(events)
            for event in _in_order(events):
                self.act(event)
            if not any(isinstance(event, SaslRequested) for event in events):
                break
            events = self.engine.receive(b"")
        self.output.append(self.engine.data_to_send())

    def _note(self, events: list[Event]) -> None:
        rest, messages = story(events)
        # This text is about what had arrived of a header.
        self.rest += ["Closed(header)" if "the server speaks another" in text else text for text in rest]
        for link, found in messages.items():
            self.messages.setdefault(link, []).extend(found)

    def act(self, event: Event) -> None:
        """Do what a shell does."""
        raise NotImplementedError

    def picture(self) -> Any:
        """Return everything that must not depend on how bytes came."""
        engine = self.engine
        sessions = [_session(session) for _, session in sorted(engine.sessions.items())]
        pending = unread_by(engine)
        return [
            ("events", self.rest),
            ("messages", self.messages),
            ("state", engine.state, repr(engine.remote), engine._frames.max_frame_size),
            ("sessions", sessions),
            ("pending", pending),
            ("output", b"".join(self.output)),
        ]


def _in_order(events: list[Event]) -> list[Event]:
    """Put messages last, by their links: what came together is reported together, and what came in pieces is not."""
    links: dict[Link, int] = {}
    for event in events:
        if isinstance(event, Messages):
            links.setdefault(event.link, len(links))
    return sorted(events, key=lambda event: 1 + links[event.link] if isinstance(event, Messages) else 0)


def _session(session: Session) -> Any:
    return (
        session.channel,
        session.remote_channel,
        session.state,
        session.next_incoming_id,
        session.next_outgoing_id,
        session.incoming_window,
        session.remote_incoming_window,
        sorted(session.unsettled),
        session.is_blocked,
        [_link(link) for _, link in sorted(session.links.items())],
    )


def _link(link: Link) -> Any:
    return (
        link.name,
        link.handle,
        link.remote_handle,
        link.is_receiver,
        link.state,
        link.credit,
        link.allowance,
        link.delivery_count,
        link.drain,
        link.incoming.buffer,
        None
        if link.incoming.buffer is None
        else (link.incoming.delivery_id, link.incoming.message_format, link.incoming.is_settled),
    )


class _ServiceShell(_Shell):
    """Accepts whatever is asked for, and settles whatever comes."""

    def __init__(self) -> None:
        config = ConnectionConfig(
            container_id="service",
            max_frame_size=65_536,
            channel_max=4_999,
            handle_max=255,
            incoming_window=5_000,
            outgoing_window=5_000,
            idle_timeout=480.0,
            max_message_size=_MESSAGE_LIMIT,
            enforce_credit=False,
        )
        super().__init__(Connection(config, Role.SERVER))

    def act(self, event: Event) -> None:
        """Accept, and settle."""
        match event:
            case SaslRequested():
                self.engine.sasl_outcome(ok=True)
            case LinkAttached(link) if link.is_remote_initiated:
                link.accept()
                if link.is_receiver:
                    link.set_credit(300)
            case CreditChanged(link) if link.is_attached and not link.is_receiver:
                for _ in range(min(link.credit, 2)):
                    attempt("Link.send", link.send, b"\0\x53\x75\xa0\x01x", settled=link.snd_settle_mode != 0)
                if link.drain:
                    link.drained()
            case Messages(link, _, delivery_ids) if delivery_ids:
                for delivery_id in delivery_ids:
                    link.settle(delivery_id, delivery_id, Accepted())
            case _:
                pass


class _ClientShell(_Shell):
    """Begins and attaches what the client of a conversation did, and takes what comes."""

    def __init__(self, dialogue: Dialogue) -> None:
        init = "ANONYMOUS"
        self._begins = 0
        self._attaches: dict[int, list[Attach]] = {}
        for frame in dialogue.to_service:
            match performative_of(frame):
                case (SaslInit(mechanism), _):
                    init = str(mechanism)
                case (Begin(), _):
                    self._begins += 1
                case (Attach() as attach, _):
                    self._attaches.setdefault(int.from_bytes(frame[6:8], "big"), []).append(attach)
                case _:
                    pass
        config = ConnectionConfig(
            container_id="client", hostname="localhost", mechanism=init, max_message_size=_MESSAGE_LIMIT
        )
        super().__init__(Connection(config, Role.CLIENT))
        self.engine.start()

    def act(self, event: Event) -> None:
        """Begin, attach, send a little."""
        match event:
            case Opened():
                for _ in range(self._begins):
                    attempt("Connection.begin", self.engine.begin)
            case SessionBegun(session) if not session.is_remote_initiated and session.is_open:
                for attach in self._attaches.get(session.channel, ()):
                    if session.free_handles > 0:
                        self._attach(session, attach)
            case LinkAttached(link) if link.is_receiver and link.is_attached:
                link.set_credit(1000)
            case CreditChanged(link) if link.is_attached and not link.is_receiver:
                for _ in range(min(link.credit, 2)):
                    attempt("Link.send", link.send, b"\0\x53\x75\xa0\x01x")
            case _:
                pass

    @staticmethod
    def _attach(session: Session, attach: Attach) -> None:
        attempt(
            "Session.attach",
            session.attach,
            attach.name,
            is_receiver=attach.role,
            source=attach.source or Source(),
            target=attach.target or Target(),
            max_message_size=attach.max_message_size,
        )


def check_output(shell: _Shell) -> None:
    """Check that what an engine sent is whole frames, none of them larger than its peer takes."""
    remote = shell.engine.remote
    largest = 512 if remote is None else remote.max_frame_size
    sent = b"".join(shell.output)
    for frame in split_frames(sent):
        if frame.startswith(b"AMQP"):
            continue
        require(holds=len(frame) == int.from_bytes(frame[:4], "big"), what="a frame that was sent is not whole")
        require(
            holds=len(frame) <= max(largest, 512),
            what=f"a frame of {len(frame)} bytes was sent to a peer that takes {largest}",
        )
        try:
            performative_of(frame)
        except AmqpDecodeError as error:
            raise BreachError("a frame was sent that cannot be decoded") from error


def kept_by(engine: Connection) -> int:
    """Return the bytes that an engine keeps."""
    kept = len(unread_by(engine)) + sum(map(len, engine.output))
    for session in engine.sessions.values():
        kept += sum(len(header) + len(payload) for _, header, payload in session._blocked)
        kept += sum(len(link.incoming.buffer or b"") for link in session.links.values())
    return kept


class _EngineEntry(Entry):
    """One role of the engine. A string is what it reads, in phases."""

    overhead = 1024 * 1024

    def __init__(self) -> None:
        self._dialogues = captures.plain_dialogues()
        self._others = tuple(
            frame for dialogue in self._dialogues for frame in (*dialogue.to_service, *dialogue.to_client)
        )

    def frames_of(self, dialogue: Dialogue) -> tuple[bytes, ...]:
        """Return what this role reads of a conversation."""
        raise NotImplementedError

    def shell_for(self, string: tuple[bytes, ...]) -> _Shell:
        """Make a shell for a string."""
        raise NotImplementedError

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make a conversation: its number, and the phases."""
        number = rng.randrange(len(self._dialogues))
        frames = mutate_frames(rng, self.frames_of(self._dialogues[number]), self._others)
        return bytes((number,)), *phases_of(rng, frames)

    def run(self, string: tuple[bytes, ...], rng: Random) -> None:
        """However the bytes are cut, with forms and without, traced or not: the same events, states and output."""
        whole, split, plain = (self.shell_for(string) for _ in range(3))
        plain.engine._forms = _NoForms()
        plain.engine.trace = FrameLog(plain.engine.role)
        read = 0
        for phase in string[1:]:
            read += len(phase)
            parts = pieces(rng, phase)
            whole.read([phase])
            split.read(parts)
            plain.read([phase])
            kept = kept_by(whole.engine)
            require(holds=kept <= read + 65_536, what=f"an engine keeps {kept} bytes of {read}")
        picture = whole.picture()
        for mine, cut, formless in zip(picture, split.picture(), plain.picture(), strict=True):
            same(cut, mine, f"cut and whole, {mine[0]}")
            same(formless, mine, f"without forms and with, {mine[0]}")
        check_output(whole)
        closed = sum(text.startswith("Closed(") for text in whole.rest)
        require(holds=closed <= 1, what="the end of a connection is reported twice")
        require(
            holds=whole.engine.is_closed is bool(closed), what="a connection is closed without its end being reported"
        )
        ended = whole.engine.receive_eof()
        require(
            holds=bool(closed) is not any(isinstance(event, Closed) for event in ended),
            what="the end of the stream is not reported, or reported twice",
        )
        sent = size_of(tuple(whole.output))
        require(holds=sent <= 16 * read + 65_536, what=f"{sent} bytes were sent in answer to {read}")


class ServiceEngineEntry(_EngineEntry):
    """The engine as the service's end."""

    name, gate, long = "connection-service", 400, 60_000

    def frames_of(self, dialogue: Dialogue) -> tuple[bytes, ...]:
        """Return what the client sent."""
        return dialogue.to_service

    def shell_for(self, string: tuple[bytes, ...]) -> _Shell:
        """Make a service."""
        return _ServiceShell()


class ClientEngineEntry(_EngineEntry):
    """The engine as the client's end."""

    name, gate, long = "connection-client", 400, 60_000

    def frames_of(self, dialogue: Dialogue) -> tuple[bytes, ...]:
        """Return what the service sent."""
        return dialogue.to_client

    def shell_for(self, string: tuple[bytes, ...]) -> _Shell:
        """Make the client of the conversation."""
        return _ClientShell(self._dialogues[string[0][0]])


class SaslServiceEntry(ServiceEngineEntry):
    """The SASL exchange and the open, as the service reads them."""

    name, gate, long = "sasl-service", 500, 20_000

    def frames_of(self, dialogue: Dialogue) -> tuple[bytes, ...]:
        """Return what the client sent first."""
        return dialogue.to_service[:5]


class SaslClientEntry(ClientEngineEntry):
    """The SASL exchange and the open, as the client reads them."""

    name, gate, long = "sasl-client", 500, 20_000

    def frames_of(self, dialogue: Dialogue) -> tuple[bytes, ...]:
        """Return what the service sent first."""
        return dialogue.to_client[:5]
