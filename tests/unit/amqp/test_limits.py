"""How much of what a peer sends is decoded and held, in either role, and that it is dropped when it is not needed."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.codec import MAX_DEPTH, MAX_ITEMS, AmqpDecodeError, count_items, decode, encode
from eventpump.amqp.connection import Closed, Connection, LinkAttached, LinkDetached
from eventpump.amqp.limits import ITEM_COST, LINK_COST, SESSION_COST, ConnectionLimits
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import MAX_ITEMS as MAX_PERFORMATIVE_ITEMS
from eventpump.amqp.performatives import Attach, Begin, Close, Detach, End, Flow, Source, Target, Transfer
from eventpump.amqp.session import Session
from eventpump.amqp.types import Array, Described, UByte
from eventpump.net.stream import ConnectionProtocol
from tests.support.memory import traced_memory
from tests.support.values import values
from tests.unit.amqp.pair import Pair, condition, config, frame, only, opened, payloads
from tests.unit.net.ends import Recorder

MIB = 1024 * 1024
ROLES = pytest.mark.parametrize("is_client", [True, False], ids=["client", "server"])

# --------------------------------------------------------------------------------------------------- values


def number_of(value: Any) -> int:
    """Count a decoded value's objects, as `count_items` says it does."""
    match value:
        case Described():
            return 1 + number_of(value.descriptor) + number_of(value.value)
        case Array():
            # The descriptors stand once, the descriptions belong to every element.
            total, elements = 1, list(value)
            while elements and isinstance(elements[0], Described):
                total += number_of(elements[0].descriptor) + len(elements)
                elements = [each.value for each in elements]
            return total + sum(map(number_of, elements))
        case list():
            return 1 + sum(map(number_of, value))
        case dict():
            return 1 + sum(number_of(key) + number_of(item) for key, item in value.items())
        case _:
            return 1


@given(st.lists(values, max_size=4))
def test_count_of_values_is_that_of_the_decoded_objects(several: list[Any]) -> None:
    """The count is that of the objects that decoding makes; one fewer allowed is refused."""
    raw = b"".join(map(encode, several))
    count = count_items(raw, 0, len(raw), 1 << 40)
    assert count == sum(map(number_of, several))
    if count:
        with pytest.raises(AmqpDecodeError):
            count_items(raw, 0, len(raw), count - 1)


@given(values, st.randoms(use_true_random=False))
def test_count_of_values_covers_all_that_decodes(value: Any, rng: Any) -> None:
    """Damaged bytes that still decode are counted, too, and never at less than they hold; no other error comes."""
    raw = bytearray(encode(value))
    for _ in range(2):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    data = bytes(raw)
    try:
        found, end = decode(data)
    except AmqpDecodeError:
        with contextlib.suppress(AmqpDecodeError):
            count_items(data, 0, len(data), 1000)
        return
    assert number_of(found) <= count_items(data, 0, end, 1 << 40) <= MAX_DEPTH * end


def empty_lists(count: int) -> bytes:
    """Encode a list of so many empty lists, a byte each."""
    return b"\xd0" + (count + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + b"\x45" * count


def described_often(count: int, layers: int) -> bytes:
    """Encode an array of so many bytes, each described so many times over."""
    body = b"\x00\x44" * layers + b"\x50" + bytes(count)
    return b"\xf0" + (len(body) + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + body


@pytest.mark.parametrize(
    "raw",
    [
        empty_lists(MAX_ITEMS + 1),
        b"\x00\x53\x77" + empty_lists(MAX_ITEMS + 1),
        described_often(MAX_ITEMS // 20, 25),
        b"\xd0" + (20 + 2 * (MAX_ITEMS // 2 + 9)).to_bytes(4, "big") + b"\0\0\0\2" + 2 * empty_lists(MAX_ITEMS // 2),
    ],
    ids=["flat", "described", "described often", "nested"],
)
def test_decode_refuses_too_many_values_before_they_are_made(raw: bytes) -> None:
    """A value that would make more objects than one may is refused before they are made."""
    with traced_memory():
        with pytest.raises(AmqpDecodeError):
            decode(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 * MIB


def test_decode_takes_a_large_event_however_it_is_divided() -> None:
    """What fits into an event of 1 MiB is decoded, however it is divided."""
    count = MIB - 20
    assert decode(empty_lists(count))[0] == [[]] * count
    assert decode(encode(b"x" * 30 * MIB))[0] == b"x" * 30 * MIB


@ROLES
@pytest.mark.parametrize("value", [[[]] * MAX_PERFORMATIVE_ITEMS, Array([UByte(1)]) * 1000])
def test_performative_of_too_many_values_closes_the_connection(is_client: bool, value: Any) -> None:
    """A frame of many small values closes the connection."""
    pair = opened()
    pair.session()
    engine = pair.client if is_client else pair.server
    flow = Flow(incoming_window=9, outgoing_window=9, properties={"x": [value] * 10})
    assert condition(engine.receive(frame(0, flow))) == "amqp:decode-error"


# ------------------------------------------------------------------------------------------ unfinished messages


def limited(**limits: Any) -> Any:
    return config(limits=ConnectionLimits(**limits), max_message_size=10_000)


class Receiving:
    """An engine that receives on two links of two sessions each.

    Attributes:
        engine: It.
        links: Its ends of the links, by channel and handle.
    """

    def __init__(self, *, is_client: bool, **limits: Any) -> None:
        settings = limited(**limits)
        self.pair = opened(client=settings) if is_client else opened(server=settings)
        self.engine = self.pair.client if is_client else self.pair.server
        self.links: dict[tuple[int, int], Link] = {}
        for channel in range(2):
            session, _ = self.pair.session()
            for handle in range(2):
                mine, theirs = self.pair.link(session, is_receiver=is_client, name=f"{channel}/{handle}")
                link = mine if is_client else theirs
                link.set_credit(100)
                self.links[channel, handle] = link
        self.pair.run()

    def part(self, channel: int, handle: int, size: int, *, more: bool = True, aborted: bool = False) -> list[Any]:
        transfer = Transfer(handle, 0, b"t", more=more, aborted=aborted)
        return self.engine.receive(frame(channel, transfer, bytes(size)))

    @property
    def held(self) -> int:
        return sum(len(link.incoming.buffer or b"") for link in self.links.values())


@ROLES
def test_unfinished_messages_beyond_the_bound_detach_their_link(is_client: bool) -> None:
    """Over all links and sessions: the link that would exceed the bound is detached, and the others go on."""
    receiving = Receiving(is_client=is_client, unfinished=1000)
    for channel, handle in ((0, 0), (0, 1), (1, 0)):
        assert receiving.part(channel, handle, 300) == []
    events = only(receiving.part(1, 1, 101), LinkDetached)
    assert events.link is receiving.links[1, 1]
    assert events.error is not None
    assert events.error.condition == "amqp:resource-limit-exceeded"
    assert "1000 bytes" in (events.error.description or "")
    assert receiving.held == receiving.engine.unfinished_bytes.count == 900
    assert receiving.part(1, 1, 101) == []  # on its way before the detach arrived
    assert receiving.engine.unfinished_bytes.count == 900
    assert payloads(receiving.part(0, 0, 5000, more=False)) == [bytes(5300)]  # the last piece is not held
    assert receiving.part(1, 0, 400) == []
    assert receiving.engine.unfinished_bytes.count == receiving.held == 1000
    assert receiving.engine.is_open


@ROLES
@pytest.mark.parametrize("how", ["whole", "aborted", "too large", "detached", "detached here", "ended", "ended here"])
def test_unfinished_bytes_are_released_when_a_delivery_ends(is_client: bool, how: str) -> None:
    """However a delivery ends, its bytes count no more, and are held no more."""
    receiving = Receiving(is_client=is_client, unfinished=1000)
    engine, link = receiving.engine, receiving.links[0, 0]
    receiving.part(1, 1, 100)
    receiving.part(0, 0, 800)
    assert engine.unfinished_bytes.count == 900
    match how:
        case "whole":
            receiving.part(0, 0, 10, more=False)
        case "aborted":
            receiving.part(0, 0, 10, aborted=True)
        case "too large":
            receiving.part(0, 0, 9900)
        case "detached":
            engine.receive(frame(0, Detach(0)))
        case "detached here":
            link.detach()
        case "ended":
            engine.receive(frame(0, End()))
        case _:
            link.session.end()
    assert engine.unfinished_bytes.count == receiving.held == 100
    assert link.incoming.buffer is None


def test_unfinished_messages_are_bounded_by_credit_and_size() -> None:
    """Without a bound over all links, a peer can have no more under way than the max-message-sizes and credit allow."""
    pair = opened()
    session, _ = pair.session()
    sizes = [1000, 2000, 4000]
    links = [pair.link(session, is_receiver=True, name=str(size), max_message_size=size)[0] for size in (*sizes, 8000)]
    for link in links[:-1]:
        link.set_credit(1)
    peak = 0
    for _ in range(100):
        for handle in range(4):
            pair.client.receive(frame(0, Transfer(handle, 0, b"t", more=True), bytes(333)))
            peak = max(peak, pair.client.unfinished_bytes.count)
    assert peak <= sum(sizes)
    assert pair.client.unfinished_bytes.count == 0
    assert not any(link.is_attached for link in links)
    assert pair.client.is_open


# ------------------------------------------------------------------------------------------- begins and attaches


def attaching(engine: Connection, start: int = 0) -> Iterator[list[Any]]:
    """Attach link after link, each with 2,000 bytes of properties, on session after session."""
    for number in range(start, 100_000):
        channel, handle = divmod(number, 100)
        if handle == 0:
            engine.receive(frame(channel, Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9)))
        attach = Attach(f"link {number}", handle, source=Source("a"), target=Target("b"), properties={"x": "y" * 2000})
        yield engine.receive(frame(channel, attach))


@pytest.mark.parametrize("detaches", [True, False])
def test_attaches_beyond_the_bound_close_the_connection(detaches: bool) -> None:
    """Links that stay take room until there is none, then the connection is closed; refused ones count as well."""
    server = opened(server=config(limits=ConnectionLimits(kept=MIB))).server
    number, events = 0, list[Any]()
    for events in attaching(server):
        number += 1
        if server.is_closed:
            break
        if detaches:
            only(events, LinkAttached).link.detach()
    assert condition(events) == "amqp:resource-limit-exceeded"
    assert "1048576 bytes" in (only(events, Closed).error.description or "")  # type: ignore[union-attr]  # it was seen
    assert MIB / (LINK_COST + 2000 + 50 * ITEM_COST) < number < MIB / (LINK_COST + 2000)


def test_begins_and_open_count_towards_the_bound() -> None:
    """Begins count as attaches do, and so does the open."""
    server = opened(server=config(limits=ConnectionLimits(kept=20 * SESSION_COST))).server
    events = list[Any]()
    channel = 0
    while server.is_open:
        channel += 1
        events = server.receive(frame(channel, Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9)))
    assert condition(events) == "amqp:resource-limit-exceeded"
    assert 5 < channel <= 20
    pair = Pair(server=config(limits=ConnectionLimits(kept=5 * ITEM_COST)), client=config())
    pair.client.start()
    pair.run()
    assert condition(pair.server_events) == "amqp:resource-limit-exceeded"
    assert pair.client.is_closed


def test_ended_links_and_sessions_do_not_count_towards_the_bound() -> None:
    """A client that attaches and detaches forever, or begins and ends, never meets the bound."""
    server = opened(server=config(limits=ConnectionLimits(kept=100_000))).server
    before = server.kept
    begin = Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9)
    server.receive(frame(0, begin))
    for number in range(300):
        link = only(server.receive(frame(0, Attach("x", 7, source=Source("a"), target=Target("b")))), LinkAttached).link
        if number % 2:
            link.accept()
        else:
            link.detach()
        server.receive(frame(0, Detach(7)))
        server.receive(frame(1, begin) + frame(1, Attach("y", 0, source=Source("a"), target=Target("b"))))
        server.receive(frame(1, End()))
    server.receive(frame(0, End()))
    assert server.is_open
    assert server.kept == before


def test_attaches_of_a_service_beyond_the_bound_end_the_connection() -> None:
    """A service that answers attaches with more than the bound loses the connection."""
    pair = opened(client=config(limits=ConnectionLimits(kept=50_000)))
    session, _ = pair.session()
    mine = session.attach("link", is_receiver=True, source=Source("a"), target=Target("b"), snd_settle_mode=2)
    answer = Attach("link", 0, role=False, source=Source("a"), target=Target("b"), properties={"x": "y" * 60_000})
    assert condition(pair.client.receive(frame(0, answer))) == "amqp:resource-limit-exceeded"
    assert not mine.is_attached


# -------------------------------------------------------------------------------------------------- endings


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The cyclic collector does not run; how much memory is in use can be asked of `tracemalloc`."""
    with traced_memory():
        yield


def in_use() -> int:
    return tracemalloc.get_traced_memory()[0]


def loaded(*, is_client: bool) -> Connection:
    """Return an engine that holds 3 MiB in a message that arrives, 2 MiB that wait for the window, and half a frame."""
    pair = opened()
    mine, theirs = pair.session()
    engine = pair.client if is_client else pair.server
    incoming = pair.link(mine, is_receiver=is_client, name="in")[0 if is_client else 1]
    outgoing = pair.link(mine, is_receiver=not is_client, name="out")[0 if is_client else 1]
    incoming.set_credit(1)
    pair.run()
    engine.receive(frame(0, Transfer(0, 0, b"t", more=True), bytes(900_000)) * 3)
    session = mine if is_client else theirs
    session.remote_incoming_window = 0
    outgoing.credit = 5
    for _ in range(2):
        outgoing.send(bytes(MIB))
    engine.data_to_send()
    engine.receive(frame(0, Transfer(0, 0, b"t", more=True), bytes(900_000))[:-1])
    return engine


ENDINGS: dict[str, Callable[[Connection], object]] = {
    "the stream ended": lambda engine: engine.receive_eof(),
    "closed by the peer": lambda engine: engine.receive(b"\0" + frame(0, Close())),  # completes the half frame
    "a broken rule": lambda engine: engine.receive(b"\0" + bytes(8)),
    "silence": lambda engine: engine.time_out(),
}


@ROLES
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_ended_connection_holds_nothing(
    is_client: bool, ending: Callable[[Connection], object], no_collector: None
) -> None:
    """When a connection ends, what it held goes at once, though connection, session and link refer to each other."""
    before = in_use()
    engine = loaded(is_client=is_client)
    assert in_use() - before > 5 * MIB
    ending(engine)
    assert engine.is_closed
    assert engine.unfinished_bytes.count == 0
    assert not any(session.is_blocked or session.unsettled for session in engine.sessions.values())
    assert in_use() - before < 200_000


@ROLES
def test_closing_connection_drops_what_waited(is_client: bool, no_collector: None) -> None:
    """From our own close on nothing more is sent or taken: what waited goes, and only the peer's close is read."""
    before = in_use()
    engine = loaded(is_client=is_client)
    assert in_use() - before > 5 * MIB
    engine.receive(b"\0")
    engine.close()
    assert in_use() - before < 200_000
    engine.receive(frame(0, Transfer(0, 0, b"t", more=True), bytes(900_000)))
    assert in_use() - before < 200_000


def test_end_of_stream_drops_queued_output() -> None:
    """What was queued when the stream ended is dropped: there is nowhere to send it."""
    pair = opened()
    pair.session()
    assert pair.server.output == []
    pair.server.close()
    assert pair.server.output
    pair.server.receive_eof()
    assert pair.server.output == []


class _Stream(asyncio.Transport):
    """A stream that takes everything and goes nowhere."""

    def write(self, data: Any) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False


@ROLES
async def test_ended_connection_is_freed_without_the_collector(is_client: bool, no_collector: None) -> None:
    """Once the stream is gone and its owner knows, sessions and links are freed, with what their attaches held."""
    pair = opened()
    engine = pair.client if is_client else pair.server
    session, other = pair.session()
    link, their_link = pair.link(session, is_receiver=True)
    found: tuple[Session, Link] = (session, link) if is_client else (other, their_link)
    references: list[weakref.ref[Any]] = [weakref.ref(found[0]), weakref.ref(found[1])]
    protocol = ConnectionProtocol(engine, Recorder(engine))
    protocol.connection_made(cast("asyncio.BaseTransport", _Stream()))
    del pair, session, other, link, their_link, found
    protocol.connection_lost(None)
    assert [reference() for reference in references] == [None, None]
    assert engine.kept == 0
