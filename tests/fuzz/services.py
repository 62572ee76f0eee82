"""The emulator on streams in memory: whole conversations, attaches, requests to its nodes, and what producers send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from eventpump.amqp.connection import AMQP_HEADER, SASL_HEADER, ConnectionState
from eventpump.amqp.performatives import (
    Accepted,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    Flow,
    Open,
    Rejected,
    SaslInit,
    Source,
    Target,
    Transfer,
)
from eventpump.emulator.auth import AccessRule, KeyRing
from eventpump.emulator.config import HubSpec
from eventpump.emulator.connection import ServiceConnection
from eventpump.emulator.log import Retention
from eventpump.emulator.server import _ServedProtocol
from eventpump.emulator.service import Deadlines, Service
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.names import CBS_NODE, MANAGEMENT_NODE
from tests.fuzz import captures
from tests.fuzz.captures import HUBS, KEY, KEY_NAME, performative_of, split_frames
from tests.fuzz.engines import kept_by, phases_of
from tests.fuzz.entry import Entry, attempt, require
from tests.fuzz.memory import MemoryTransport, Unhandled, settle
from tests.fuzz.mutations import mutate, mutate_frames
from tests.unit.amqp.pair import frame

_PAYLOAD: Final = 60_000
_PLAIN: Final = b"\0" + KEY_NAME.encode() + b"\0" + KEY.encode()
_GOOD: Final = b"\0\x53\x75\xa0\x04good"


class Emulated:
    """One emulator's state, and one connection to it after another."""

    def __init__(self, now: float) -> None:
        self.service = Service(
            keys=KeyRing([AccessRule(KEY_NAME, KEY)]),
            retention=Retention(size=64 << 20),
            deadlines=Deadlines(),
            max_message_size=1024 * 1024,
            now=lambda: now,
        )
        self.service.authority = "127.0.0.1:5671"

    async def open(self) -> None:
        """Make the hubs."""
        specs = [HubSpec(name, partitions, ("second",)) for name, partitions in HUBS.items()]
        await self.service.open(specs, data=None, fsync=False)

    async def converse(self, phases: Sequence[bytes]) -> Answer:
        """Connect a client that sends these bytes and ends the stream."""
        served = ServiceConnection(self.service)
        protocol = _ServedProtocol(served)
        transport = MemoryTransport(protocol)
        read = 0
        for phase in phases:
            if transport.is_closing():
                break
            read += len(phase)
            protocol.data_received(phase)
            await settle(1)
            kept = kept_by(served.engine)
            require(holds=kept <= read + 65_536, what=f"the engine keeps {kept} bytes of {read}")
        await settle()
        is_over = transport.is_closing()
        transport.close()
        await settle()
        require(holds=served.closed.done(), what="a connection is not over when its stream is")
        require(holds=not self.service.connections, what="the service keeps a connection that is gone")
        return Answer(bytes(transport.written), is_over, transport.was_aborted, served.engine.state)


class Answer:
    """What a client got.

    Attributes:
        frames: The performatives with their payloads, in order.
        is_over: Whether the service ended the stream.
    """

    def __init__(self, written: bytes, is_over: bool, was_aborted: bool, state: ConnectionState) -> None:
        self.size = len(written)
        self.is_over = is_over
        self.state = state
        self.was_aborted = was_aborted
        parts = [performative_of(each) for each in split_frames(written)]
        self.frames: list[tuple[Any, bytes]] = [part for part in parts if part is not None]

    def of(self, kind: type[Any]) -> list[tuple[Any, bytes]]:
        """Return the frames of a performative."""
        return [each for each in self.frames if isinstance(each[0], kind)]


def opening(mechanism: str, response: bytes) -> bytes:
    """Make what a client opens a connection and a session with."""
    return b"".join(
        (
            SASL_HEADER,
            frame(0, SaslInit(mechanism, response, "localhost"), kind=1),
            AMQP_HEADER,
            frame(0, Open(container_id="c", hostname="localhost", max_frame_size=65_536)),
            frame(0, Begin(next_outgoing_id=0, incoming_window=5_000, outgoing_window=5_000)),
        )
    )


def attaching(node: str, handle: int, *, is_receiver: bool) -> bytes:
    """Make an attach, with credit where it receives."""
    attach = Attach(
        name=f"link-{handle}",
        handle=handle,
        role=is_receiver,
        source=Source(address=node if is_receiver else "here"),
        target=Target(address="here" if is_receiver else node),
        initial_delivery_count=None if is_receiver else 0,
    )
    flow = Flow(
        next_incoming_id=0,
        incoming_window=5_000,
        next_outgoing_id=0,
        outgoing_window=5_000,
        handle=handle,
        delivery_count=0,
        link_credit=100,
    )
    return frame(0, attach) + (frame(0, flow) if is_receiver else b"")


def transferring(delivery_id: int, payload: bytes, message_format: int = 0) -> bytes:
    """Make the transfers of a message on handle 0."""
    made = b""
    tag = delivery_id.to_bytes(4, "big")
    while len(payload) > _PAYLOAD:
        transfer = Transfer(0, delivery_id, tag, message_format, settled=False, more=True)
        made += frame(0, transfer, payload[:_PAYLOAD])
        payload = payload[_PAYLOAD:]
    return made + frame(0, Transfer(0, delivery_id, tag, message_format, settled=False), payload)


class _EmulatorEntry(Entry):
    """The emulator, created for each string."""

    overhead = 3 * 1024 * 1024

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._unhandled = Unhandled(self._runner.get_loop(), "asyncio", "eventpump")
        self._dialogues = captures.plain_dialogues()
        self._now = {dialogue.name: dialogue.recorded_at for dialogue in self._dialogues if "rhea" not in dialogue.name}
        self._recorded_at = min(self._now.values())
        self._runner.run(self._check(Emulated(self._recorded_at), (opening("PLAIN", _PLAIN),)))

    def close(self) -> None:
        """Close the loop."""
        self._unhandled.close()
        self._runner.close()

    def run(self, string: tuple[bytes, ...], rng: Random) -> None:
        """Nothing is unhandled, every connection ends in order, what is stored can be read, others are served."""
        self._runner.run(self._run(string, is_followed=rng.random() < 0.2))

    async def _run(self, string: tuple[bytes, ...], *, is_followed: bool) -> None:
        emulated = Emulated(self._recorded_at)
        await self._check(emulated, string)
        if is_followed:
            answer = await emulated.converse(
                [
                    opening("PLAIN", _PLAIN) + attaching("telemetry/Partitions/3", 0, is_receiver=False),
                    transferring(0, _GOOD),
                ]
            )
            outcomes = [each.state for each, _ in answer.of(Disposition)]
            require(holds=outcomes == [Accepted()], what="another client is not served afterwards")
        await emulated.service.aclose()

    async def _check(self, emulated: Emulated, string: tuple[bytes, ...]) -> None:
        await emulated.open()
        phases = self.phases(string)
        answer = await emulated.converse(phases)
        self._unhandled.check()
        if answer.is_over:
            is_reported = bool(answer.of(Close)) or answer.state is not ConnectionState.OPENED
            require(holds=is_reported or answer.was_aborted, what="a connection was cut without an answer")
        read = sum(map(len, phases))
        require(holds=answer.size <= 16 * read + 65_536, what=f"{answer.size} bytes were sent in answer to {read}")
        for hub in HUBS:
            found = emulated.service.hub(hub)
            assert found is not None
            for partition in found.partitions:
                for raw in partition.payloads:
                    event = ReceivedEvent(raw)
                    _ = event.sequence_number, event.offset, event.enqueued_time
                    attempt("ReceivedEvent", getattr, event, "body")
        self.judge(string, answer)

    def phases(self, string: tuple[bytes, ...]) -> Sequence[bytes]:
        """Return what the client sends."""
        return string

    def judge(self, string: tuple[bytes, ...], answer: Answer) -> None:
        """Check what is the entry's own."""


class ConversationEntry(_EmulatorEntry):
    """Everything a client sent in a conversation."""

    name, gate, long = "emulator", 200, 20_000

    def __init__(self) -> None:
        super().__init__()
        self._clients = [dialogue.to_service for dialogue in self._dialogues if dialogue.name in self._now]
        self._others = tuple(each for frames in self._clients for each in frames)

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make a conversation."""
        return phases_of(rng, mutate_frames(rng, rng.choice(self._clients), self._others))


class AttachEntry(_EmulatorEntry):
    """Attaches: addresses, filters, properties."""

    name, gate, long = "attach", 250, 20_000

    def __init__(self) -> None:
        super().__init__()
        frames = [each for dialogue in self._dialogues for each in dialogue.to_service]
        # Links to partitions more often than to nodes.
        nodes = (b"$cbs", b"$management")
        attaches = [each for each in frames if each[8:11] == b"\0\x53\x12"]
        self._attaches = tuple(each[8:] for each in attaches if not any(node in each for node in nodes))
        self._others = tuple(each[8:] for each in attaches)

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make attaches."""
        return tuple(
            mutate(rng, rng.choice(self._attaches if rng.random() < 0.8 else self._others), self._others)
            for _ in range(rng.choice((1, 1, 2)))
        )

    def phases(self, string: tuple[bytes, ...]) -> Sequence[bytes]:
        """Return the opening, and each attach in a frame of the right size."""
        head = b"\x02\x00\x00\x00"
        return opening("PLAIN", _PLAIN), *((len(each) + 8).to_bytes(4, "big") + head + each for each in string)

    def judge(self, string: tuple[bytes, ...], answer: Answer) -> None:
        """Every attach is answered, or ends the connection with its reason."""
        if not answer.is_over:
            count, asked = len(answer.of(Attach)), sum(map(bool, string))  # an empty frame is a heartbeat
            require(holds=count == asked, what=f"{asked} attaches have {count} answers")


class _RequestEntry(_EmulatorEntry):
    """Requests to a node."""

    node = ""
    mechanism = "PLAIN"

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make requests."""
        corpus = captures.sent_to(self.node)
        return tuple(
            mutate(rng, rng.choice(corpus), captures.messages()) if number == 0 else rng.choice(corpus)
            for number in range(rng.choice((1, 1, 2)))
        )

    def phases(self, string: tuple[bytes, ...]) -> Sequence[bytes]:
        """Return the opening, the links, and the requests."""
        links = attaching(self.node, 0, is_receiver=False) + attaching(self.node, 1, is_receiver=True)
        response = _PLAIN if self.mechanism == "PLAIN" else b""
        return (
            opening(self.mechanism, response) + links,
            *(transferring(number, each) for number, each in enumerate(string)),
        )

    def judge(self, string: tuple[bytes, ...], answer: Answer) -> None:
        """Every request is settled, and answered where it is accepted; or the link or connection ends with a reason."""
        _check_settled(string, answer)
        if not answer.is_over and not answer.of(Detach):
            accepted = sum(isinstance(each.state, Accepted) for each, _ in answer.of(Disposition))
            answers = sum(not each.more for each, _ in answer.of(Transfer))
            require(holds=accepted == answers, what=f"{accepted} requests were taken, {answers} answered")


def _check_settled(string: tuple[bytes, ...], answer: Answer) -> None:
    if answer.is_over or answer.of(Detach):
        return
    settled: list[int] = []
    for disposition, _ in answer.of(Disposition):
        last = disposition.first if disposition.last is None else disposition.last
        settled.extend(range(disposition.first, last + 1))
        is_outcome = isinstance(disposition.state, Accepted | Rejected) and disposition.settled
        require(holds=is_outcome, what="a delivery is settled without an outcome")
    require(
        holds=sorted(settled) == list(range(len(string))), what=f"of {len(string)} deliveries {settled} are settled"
    )


class CbsEntry(_RequestEntry):
    """Requests to `$cbs`, by a client that has no rights yet."""

    name, gate, long = "cbs", 200, 20_000
    node, mechanism = CBS_NODE, "ANONYMOUS"


class ManagementEntry(_RequestEntry):
    """Requests to `$management`."""

    name, gate, long = "management", 200, 20_000
    node = MANAGEMENT_NODE


class PublishEntry(_EmulatorEntry):
    """What producers send: events and envelopes."""

    name, gate, long = "publish", 250, 20_000

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make messages; the first byte of each says whether it is an envelope."""
        made: list[bytes] = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            sent = rng.choice(captures.published())
            flag = bool(sent.message_format) is not (rng.random() < 0.05)
            made.append(bytes((flag,)) + mutate(rng, sent.payload, captures.messages()))
        return tuple(made)

    def phases(self, string: tuple[bytes, ...]) -> Sequence[bytes]:
        """Return the opening, the link, and the messages."""
        return (
            opening("PLAIN", _PLAIN) + attaching("telemetry", 0, is_receiver=False),
            *(transferring(number, each[1:], 0x80013700 if each[0] else 0) for number, each in enumerate(string)),
        )

    def judge(self, string: tuple[bytes, ...], answer: Answer) -> None:
        """Every message is settled; none costs the connection."""
        require(holds=not answer.is_over, what="a message cost the connection")
        _check_settled(string, answer)
