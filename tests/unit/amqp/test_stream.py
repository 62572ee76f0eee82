"""The byte stream: however it is split, and however it is read, it means the same; and hostile streams."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import (
    Closed,
    Connection,
    ConnectionState,
    CreditChanged,
    Event,
    LinkAttached,
    Messages,
    Role,
    SaslRequested,
)
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import (
    Accepted,
    AmqpError,
    Composite,
    Detach,
    End,
    Rejected,
    Source,
    Target,
    Transfer,
)
from tests.support.inside import forms_of, unread_by
from tests.support.memory import traced_memory
from tests.unit.amqp.pair import Pair, config, frame, payloads, story

SMALL: dict[str, Any] = {"max_frame_size": 4096, "incoming_window": 40, "max_message_size": 30_000}
Step = Callable[[Connection], None] | bytes


class General(Connection):
    """Reads every frame by the general decoder."""

    def _learn_form(self, *_: Any) -> None:
        return


class InTurns(Connection):
    """Reads in turns of one frame."""

    def receive(self, data: bytes, turn: int = 1) -> list[Event]:
        events = super().receive(data, turn)
        while self.is_behind and self.state is not ConnectionState.SASL_ANSWER:
            events += super().receive(b"", turn)
        return events


def react(engine: Connection, events: list[Event]) -> list[Event]:
    """Do what a simple shell does at once.

    Returns:
        All events, with those that a SASL answer let through.
    """
    happened = list(events)
    for event in events:
        match event:
            case SaslRequested():
                engine.sasl_outcome(ok=True)
                happened += react(engine, engine.receive(b""))
            case LinkAttached(link) if link.is_remote_initiated:
                if link.name.startswith("refused"):
                    link.refuse(AmqpError("amqp:not-found", "no such hub"))
                else:
                    link.accept(max_message_size=20_000)
                    if link.is_receiver:
                        link.set_credit(200)
            case LinkAttached(link) if link.is_receiver:
                link.set_credit(200)
            case CreditChanged(link) if link.drain:
                link.drained()
            case Messages(link, _, ids, _) if ids:
                for each in ids:
                    link.settle(each, each, Accepted() if each % 3 else Rejected(AmqpError("amqp:x", "y")))
    return happened


@dataclass
class Recording:
    """What one end did and received, in order, so that another engine can live it again."""

    config: ConnectionConfig
    role: Role
    steps: list[Step] = field(default_factory=list)

    def replay(
        self, split: Callable[[bytes], Iterator[bytes]], make: type[Connection] = Connection
    ) -> tuple[Connection, list[Event]]:
        """Let a new engine do and receive the same.

        Args:
            split: Cuts a flight of bytes into pieces.
        """
        engine = make(self.config, self.role)
        events: list[Event] = []
        for step in self.steps:
            if isinstance(step, bytes):
                for piece in split(step):
                    events += react(engine, engine.receive(piece))
                    engine.data_to_send()
            elif not engine.is_closed:
                step(engine)
        return engine, events


def whole(data: bytes) -> Iterator[bytes]:
    """Do not split."""
    yield data


def find(engine: Connection, name: str) -> Link:
    """Find a link by its name."""
    return next(link for session in engine.sessions.values() for link in session.links.values() if link.name == name)


def record() -> tuple[Recording, Recording]:
    """Let a client and a server do a bit of everything.

    Returns:
        What the server received, and the client.
    """
    generator = random.Random(7)
    mine, theirs = config(container_id="me", **SMALL), config(container_id="you", **SMALL)
    pair = Pair(mine, theirs)
    recordings = Recording(theirs, Role.SERVER), Recording(mine, Role.CLIENT)

    def run() -> None:
        while (up := pair.client.data_to_send()) or (down := pair.server.data_to_send()):
            if up:
                recordings[0].steps.append(up)
                react(pair.server, pair.server.receive(up))
            else:
                recordings[1].steps.append(down)
                react(pair.client, pair.client.receive(down))

    def do(end: int, step: Callable[[Connection], None]) -> None:
        step((pair.server, pair.client)[end])
        recordings[end].steps.append(step)
        run()

    def attach(name: str, session: int, *, is_receiver: bool) -> None:
        do(
            1,
            lambda engine: void(
                engine.sessions[session].attach(
                    name,
                    is_receiver=is_receiver,
                    source=Source(f"source of {name}"),
                    target=Target(f"target of {name}"),
                    max_message_size=20_000,
                    snd_settle_mode=2,
                )
            ),
        )

    def burst(end: int, name: str, sizes: list[int], way: str) -> None:
        def send(engine: Connection) -> None:
            link = find(engine, name)
            messages = [bytes([size % 256]) * size for size in sizes]
            if way == "run":
                at = 0
                while at < len(messages) and (sent := link.send_run(messages, at)):
                    at += sent
            else:
                for message in messages:
                    link.send(message, settled=way == "settled", message_format=len(message) % 2)

        do(end, send)

    do(1, lambda engine: engine.start())
    for _ in range(2):
        do(1, lambda engine: void(engine.begin()))
    attach("down", 0, is_receiver=True)
    attach("down 2", 1, is_receiver=True)
    attach("up", 0, is_receiver=False)
    attach("up 2", 1, is_receiver=False)
    attach("refused", 1, is_receiver=True)
    for turn in range(12):
        end = turn % 2
        names = ("up", "up 2") if end else ("down", "down 2")
        sizes = [generator.choice([0, 1, 10, 200, 300, 1000, 5000]) for _ in range(generator.randint(1, 12))]
        burst(end, generator.choice(names), sizes, generator.choice(["run", "run", "settled", "unsettled"]))
        if turn == 5:
            do(1, lambda engine: find(engine, "down").set_credit(9, drain=True))
        if turn == 7:
            do(0, lambda engine: engine.heartbeat())
    do(0, lambda engine: find(engine, "up 2").detach(AmqpError("amqp:link:stolen", "higher")))
    do(1, lambda engine: engine.sessions[1].end())
    do(1, lambda engine: engine.close(AmqpError("amqp:connection:forced", "done")))
    return recordings


def void(_: object) -> None:
    """Drop a result."""


RECORDINGS = record()
BOTH = pytest.mark.parametrize("recording", RECORDINGS, ids=["server", "client"])


@BOTH
def test_recording_has_every_kind_of_message(recording: Recording) -> None:
    """The recording is long, ends in order, and has settled, unsettled and large messages."""
    data = [step for step in recording.steps if isinstance(step, bytes)]
    assert sum(map(len, data)) > 20_000
    _, events = recording.replay(whole)
    assert isinstance(events[-1], Closed)
    assert not events[-1].is_local
    found = [each for messages in story(events)[1].values() for each in messages]
    assert any(len(payload) == 5000 for payload, _, _ in found)
    assert any(delivery_id is None for _, delivery_id, _ in found)
    assert any(delivery_id is not None for _, delivery_id, _ in found)


@BOTH
@given(seed=st.integers(0, 2**32), longest=st.sampled_from([3, 30, 300, 3000]))
def test_receive_of_split_bytes_gives_the_same_events(recording: Recording, seed: int, longest: int) -> None:
    """However the bytes are split, the events are the same."""
    generator = random.Random(seed)

    def split(flight: bytes) -> Iterator[bytes]:
        while flight:
            size = generator.randint(1, longest)
            yield flight[:size]
            flight = flight[size:]

    _, events = recording.replay(split)
    assert story(events) == story(recording.replay(whole)[1])


@BOTH
def test_receive_of_single_bytes_gives_the_same_events(recording: Recording) -> None:
    """Single bytes mean the same as all at once."""
    _, events = recording.replay(lambda flight: (flight[at : at + 1] for at in range(len(flight))))
    assert story(events) == story(recording.replay(whole)[1])


@BOTH
def test_receive_in_turns_gives_the_same_events(recording: Recording) -> None:
    """However little is read in one turn, the events are the same, and what is left behind is too."""
    whole_turn, expected = recording.replay(whole)
    in_turns, events = recording.replay(whole, InTurns)
    assert story(events) == story(expected)
    assert len(events) > len(expected)
    assert forms_of(whole_turn).keys() == forms_of(in_turns).keys()


@BOTH
def test_receive_of_runs_equals_the_general_decoder(recording: Recording) -> None:
    """The way for runs and the general one give the same events, and leave the same behind."""
    fast, events = recording.replay(whole)
    general, expected = recording.replay(whole, General)
    assert story(events) == story(expected)
    assert forms_of(fast)
    assert not forms_of(general)


# ----------------------------------------------------------------------------------- hand-written transfers


def mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Return the usual most of the time."""
    return st.sampled_from([usual] * 7 + list(others))


@st.composite
def transfers(draw: st.DrawFn) -> bytes:
    """Write transfers as no engine here would: other widths, tags, fields left out, counts and sizes that lie."""
    number = draw(st.sampled_from([0, 7, 300, 2**32 - 1]))
    wide_id = b"\x70" + number.to_bytes(4, "big")
    parts = [
        draw(mostly(b"\x43", b"\x52\x01", b"\x52\x05", b"\x70\0\0\0\0")),
        draw(mostly(wide_id, bytes([0x52, number % 256]), b"\x43", b"\x40")),
        draw(mostly(b"\xa0\x01t", b"\xa0\x04tagg", b"\xa0\x00", b"\xb0\0\0\0\x01t", b"\x40")),
        draw(mostly(b"\x43", b"\x40", b"\x52\x05")),
        draw(mostly(b"\x41", b"\x42", b"\x56\x01")),
        draw(mostly(b"\x42", b"\x40", b"\x41")),
        b"\x40\x40\x42",
        draw(mostly(b"\x42", b"\x41")),
        draw(mostly(b"\x42", b"\x40")),
    ]
    body = b"".join(parts[: draw(mostly(9, 6, 5, 3))])
    count = draw(mostly(11, 10, 12, 6, 5, 3))
    lies = draw(mostly(0, 1, -1))
    head = draw(
        mostly(
            bytes([0xC0, len(body) + 1 + lies, count]),
            b"\xd0" + (len(body) + 4 + lies).to_bytes(4, "big") + count.to_bytes(4, "big"),
        )
    )
    payload = draw(st.sampled_from([b"", b"x" * 10, b"y" * 30, b"z" * 100]))
    content: bytes = b"\x00\x53\x14" + head + body + payload
    start = draw(mostly(b"\x02\x00\x00\x00", b"\x02\x00\x00\x01", b"\x03\x00\x00\x00", b"\x02\x01\x00\x00"))
    size = len(content) + 8
    return size.to_bytes(4, "big") + bytes(start) + content


def read(
    make: type[Connection],
    *reads: bytes,
    enforce: bool = True,
    largest: int = 80,
    then: Callable[[Connection, Link], None] = lambda engine, link: None,
) -> Any:
    """Let an engine with two links, whose counters are about to wrap, read a stream.

    Args:
        then: Called before the last read.

    Returns:
        All that came of it, and if all reads are alike what it has sent, too: the windows are opened after a run.
    """
    pair = Pair(server=config(enforce_credit=enforce, incoming_window=8, max_frame_size=600))
    pair.server = make(pair.server.config, Role.SERVER)
    pair.open()
    session, _ = pair.session()
    for name in ("a", "b"):
        _, theirs = pair.link(session, is_receiver=False, name=name, server_max_message_size=largest)
        theirs.set_credit(12)
    pair.server.data_to_send()
    links = [link for each in pair.server.sessions.values() for link in each.links.values()]
    for link in links:
        link.delivery_count = link.session.next_incoming_id = (1 << 32) - 3
    events: list[Event] = []
    for number, each in enumerate(reads, 1):
        if number == len(reads):
            then(pair.server, links[0])
        events += pair.server.receive(each)
    counts = [(link.credit, link.allowance, link.delivery_count, link.incoming.buffer) for link in links]
    ids = [each.next_incoming_id for each in pair.server.sessions.values()]
    return (
        story(events),
        counts,
        ids,
        pair.server.state,
        pair.server.data_to_send() if len(reads) > len(set(reads)) == 1 else None,
    )


@given(
    st.lists(transfers(), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), max_size=20),
    st.booleans(),
    st.sets(st.integers(1, 19)),
)
def test_receive_of_odd_transfers_equals_the_general_decoder(
    kinds: list[bytes], order: list[int], enforce: bool, cuts: set[int]
) -> None:
    """Whatever transfers a peer writes, and however it cuts them, runs are read as by the general decoder."""
    stream = [kinds[at % len(kinds)] for at in order]
    places = [0, *sorted(cuts), len(stream)]
    reads = [b"".join(stream[first:last]) for first, last in pairwise(places)]
    assert read(Connection, *reads, enforce=enforce) == read(General, *reads, enforce=enforce)


PLAIN = frame(0, Transfer(0, 70_000, b"tag", 0, True), b"payload")


@pytest.mark.parametrize("at", range(len(PLAIN)))
def test_receive_of_a_changed_byte_equals_the_general_decoder(at: int) -> None:
    """A transfer that differs from those before it in any one byte is read as the general decoder reads it."""
    plain = PLAIN
    for value in {0, 1, 2, 4, 10, 0x40, 0x41, 0x42, 0x43, 0x52, 0x70, 0xA0, 0xB0, 0xFF, plain[at] ^ 1, plain[at] + 1}:
        stream = plain * 2 + plain[:at] + bytes([value & 0xFF]) + plain[at + 1 :] + plain
        assert read(Connection, plain + stream) == read(General, plain + stream)
        assert read(Connection, plain, stream) == read(General, plain, stream)


@pytest.mark.parametrize("enforce", [False, True])
def test_receive_of_reads_of_one_transfer_equals_the_general_decoder(enforce: bool) -> None:
    """The windows are opened again at the same transfers, and the credit ends at the same one."""
    fast, general = (read(make, *[PLAIN] * 20, enforce=enforce) for make in (Connection, General))
    assert fast == general
    assert fast[-1]


def test_receive_message_too_large_in_known_form() -> None:
    """A message that is too large detaches its link, though transfers of that form need no decoding."""
    stream = [PLAIN, PLAIN + frame(0, Transfer(0, 70_000, b"tag", 0, True), b"z" * 100) + PLAIN]
    found = read(Connection, *stream)
    assert found == read(General, *stream)
    assert any("message-size-exceeded" in text for text in found[0][0])


def test_receive_frame_too_large_in_known_form() -> None:
    """A frame that is too large closes the connection, though it is of a known form, and its link takes the message."""
    stream = [PLAIN, PLAIN + frame(0, Transfer(0, 70_000, b"tag", 0, True), b"z" * 600) + PLAIN]
    found = read(Connection, *stream, largest=1000)
    assert found == read(General, *stream, largest=1000)
    assert any("framing-error" in text for text in found[0][0])


BEGINNING = frame(0, Transfer(0, 70_000, b"tag", 0, True, more=True), b"begin")


@pytest.mark.parametrize(
    "then",
    [
        lambda engine, link: link.detach(),
        lambda engine, link: link.session.end(),
        lambda engine, link: engine.close(),
        lambda engine, link: engine.receive(BEGINNING),
        lambda engine, link: link.limit_messages(3),
        lambda engine, link: link.set_credit(0),
        lambda engine, link: engine.receive(frame(0, Detach(link.remote_handle, closed=True))),
        lambda engine, link: engine.receive(frame(0, End())),
        lambda engine, link: engine.receive(PLAIN[:9]),
    ],
    ids=["detached", "ended", "closed", "unfinished", "limited", "no credit", "peer detached", "peer ended", "cut"],
)
def test_receive_in_a_known_form_equals_the_general_decoder_whatever_has_happened(
    then: Callable[[Connection, Link], None],
) -> None:
    """A form is known for as long as the link that it is of, and every state is looked at for each read."""
    reads = [PLAIN, PLAIN * 3, PLAIN * 14]
    assert read(Connection, *reads, then=then) == read(General, *reads, then=then)


@pytest.mark.parametrize("ending", [Detach(0, closed=True), End()])
def test_form_of_a_link_is_kept_until_the_link_ends(ending: Composite) -> None:
    """What is kept of a link that has ended would keep the link."""
    kept: list[int] = []

    def end(engine: Connection, _: Link) -> None:
        kept.append(len(forms_of(engine)))
        engine.receive(frame(0, ending))
        kept.append(len(forms_of(engine)))

    read(Connection, PLAIN, frame(0, Transfer(1, 7, b"tag", 0, True), b"x"), b"", then=end)
    assert kept == [2, 1 if isinstance(ending, Detach) else 0]


# ------------------------------------------------------------------------------------------------- hostility


def bounded(engine: Connection) -> bool:
    """Return whether what the engine retains of the stream is within its limits."""
    links = [link for session in engine.sessions.values() for link in session.links.values()]
    return (
        len(unread_by(engine)) <= engine.config.max_frame_size
        and all(len(link.incoming.buffer or b"") <= link.largest_message for link in links)
        and len(links) <= 256 * (engine.config.handle_max + 1)
        and len(forms_of(engine)) <= 1024
        and not engine._inboxes
        and not engine._events
    )


def survive(engine: Connection, data: bytes) -> list[Event]:
    """Feed bytes and check what must hold whatever they are."""
    events = react(engine, engine.receive(data))
    assert bounded(engine)
    ends = [event for event in events if isinstance(event, Closed)]
    assert len(ends) <= 1
    assert bool(ends) is engine.is_closed
    if ends:
        assert events[-1] is ends[0]
        if ends[0].is_local:
            assert ends[0].error is not None
            assert ends[0].error.condition.startswith("amqp:")
        engine.data_to_send()
        assert engine.receive(data) == []
        assert engine.data_to_send() == b""
    return events


def mutate(raw: bytearray, generator: random.Random) -> None:
    """Damage a stream: flip, cut, insert, or make a length as large as it goes."""
    if not raw:
        return
    at = generator.randrange(len(raw))
    match generator.randrange(6):
        case 0:
            raw[at] ^= 1 << generator.randrange(8)
        case 1:
            raw[at] = generator.choice([0, 0x40, 0x45, 0x53, 0xA0, 0xC0, 0xD0, 0xF0, 0xFF])
        case 2:
            del raw[at : at + generator.randint(1, 9)]
        case 3:
            raw[at:at] = generator.randbytes(generator.randint(1, 9))
        case 4:
            raw[at : at + 4] = b"\xff\xff\xff\xff"
        case 5:
            other = generator.randrange(len(raw))
            raw[at:at] = raw[other : other + 40]


@BOTH
@given(seed=st.integers(0, 2**32), data=st.data())
def test_receive_of_a_mutated_stream_gives_events_or_closes(
    recording: Recording, seed: int, data: st.DataObject
) -> None:
    """A damaged stream gives events, or closes the connection with a condition; at any point of its life."""
    generator = random.Random(seed)
    flights = [at for at, step in enumerate(recording.steps) if isinstance(step, bytes)]
    until = data.draw(st.sampled_from(flights))
    engine, _ = Recording(recording.config, recording.role, recording.steps[:until]).replay(whole)
    damaged = bytearray(recording.steps[until])  # type: ignore[arg-type]  # a flight, as chosen
    for _ in range(generator.randint(1, 4)):
        mutate(damaged, generator)
    closed = any(isinstance(event, Closed) for event in survive(engine, bytes(damaged)))
    for step in recording.steps[until + 1 :]:
        if isinstance(step, bytes) and not closed:
            closed = any(isinstance(event, Closed) for event in survive(engine, step))
    assert len(engine.receive_eof()) == (0 if closed else 1)


@BOTH
@given(data=st.data())
def test_receive_of_random_bytes_gives_events_or_closes(recording: Recording, data: st.DataObject) -> None:
    """Random bytes in any state give events or a close; so do random bytes in sound frames."""
    until = data.draw(st.integers(0, len(recording.steps)))
    engine, events = Recording(recording.config, recording.role, recording.steps[:until]).replay(whole)
    if any(isinstance(event, Closed) for event in events):
        return
    noise = data.draw(st.binary(max_size=100))
    if data.draw(st.booleans()):
        code = data.draw(st.integers(0x10, 0x18) | st.integers(0x40, 0x44))
        kind = 1 if code >= 0x40 else 0
        noise = bytes([0, 0x53, code, 0xC0, len(noise) + 1, data.draw(st.integers(0, 14))]) + noise
        noise = (len(noise) + 8).to_bytes(4, "big") + bytes([2, kind, 0, 0]) + noise
    if engine.role is Role.CLIENT and not engine.output and until == 0:
        engine.start()
    survive(engine, noise)


@BOTH
@pytest.mark.parametrize("size", [b"\xff\xff\xff\xff", b"\x00\x00\x10\x01", b"\x00\x00\x00\x07"])
def test_frame_of_a_wrong_size_is_refused_at_its_header(recording: Recording, size: bytes) -> None:
    """A frame of a size that is not allowed is refused as soon as its header is there, not waited for."""
    flights = [at for at, step in enumerate(recording.steps) if isinstance(step, bytes)]
    engine, _ = Recording(recording.config, recording.role, recording.steps[: flights[8]]).replay(whole)
    for byte in size + b"\x02\x00\x00":
        assert survive(engine, bytes([byte])) == []
    (event,) = survive(engine, b"\x00")
    assert isinstance(event, Closed)
    assert event.error is not None
    assert event.error.condition == "amqp:connection:framing-error"


def test_receive_of_hostile_frames_takes_bounded_memory() -> None:
    """However long a stream of hostile frames is, it costs the same."""
    pair = Pair(server=config(max_frame_size=1 << 16)).open()
    session, _ = pair.session()
    _, theirs = pair.link(session, is_receiver=False, server_max_message_size=100_000)
    theirs.set_credit(1_000_000)
    pair.run()
    hostile = [
        frame(0, Transfer(0, 5, b"t", more=True)) * 50,
        frame(0, Transfer(0, 5, b"t", aborted=True)),
        b"".join(frame(0, Transfer(0, 6, bytes([tag]), 0, True), b"") for tag in range(256)),
        b"\x00\x00\x00\x08\x02\x00\x00\x00" * 1000,
    ]

    def feed(turns: int) -> None:
        for turn in range(turns):
            pair.server.receive(hostile[turn % 4])
            pair.server.data_to_send()

    feed(8)
    with traced_memory():
        feed(120)
        kept, peak = tracemalloc.get_traced_memory()
    assert pair.server.is_open
    assert kept < 20_000
    assert peak < 200_000


def test_received_messages_do_not_alias_the_buffer() -> None:
    """A message handed up keeps no receive buffer alive: each is a copy of its own bytes."""
    pair = Pair().open()
    session, _ = pair.session()
    sender, receiver = pair.link(session, is_receiver=False)
    receiver.set_credit(9)
    pair.run()
    sender.send_run([b"a" * 100, b"b" * 100])
    found = payloads(pair.run()[1])
    assert [type(each) for each in found] == [bytes, bytes]
    assert [len(each) for each in found] == [100, 100]
