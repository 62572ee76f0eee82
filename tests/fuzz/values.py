"""The entries that are plain functions: codec, message, scan, stamping, answers, and the tunnel."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any, Final

from eventpump.amqp import codec
from eventpump.amqp.message import AmqpSequence, AmqpValue, Message
from eventpump.amqp.sections import FOOTER, HEADER, EventFields, scan_event, section_spans
from eventpump.amqp.types import Described, ULong
from eventpump.emulator.auth import AccessRule, KeyRing
from eventpump.emulator.ledger import run_of
from eventpump.emulator.stamping import add_delivery_annotations, stamp
from eventpump.eventhubs import cbs, management
from eventpump.eventhubs.addresses import parse_address
from eventpump.eventhubs.envelope import decode_batch, partition_key_of
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.eventhubs.names import (
    BATCH_MESSAGE_FORMAT,
    CBS_NODE,
    ENQUEUED_TIME,
    MANAGEMENT_NODE,
    OFFSET,
    SEQUENCE_NUMBER,
)
from eventpump.eventhubs.requests import check_answer
from eventpump.net.tunnel import TunnelHandshake
from eventpump.options.connection import ProxySettings
from tests.fuzz import captures
from tests.fuzz.entry import BreachError, Entry, attempt, require, same
from tests.fuzz.mutations import mutate, mutate_bytes, pieces
from tests.support.values import plain

_NAMES: Final = SEQUENCE_NUMBER.encode(), OFFSET.encode(), ENQUEUED_TIME.encode()


def _bodies() -> tuple[bytes, ...]:
    """Return the performatives of the captures, with what follows them."""
    return tuple(
        frame[8:]
        for dialogue in captures.plain_dialogues()
        for frame in (*dialogue.to_service, *dialogue.to_client)
        if not frame.startswith(b"AMQP") and len(frame) > 8
    )


class CodecEntry(Entry):
    """`decode`, `skip`, and `encode` of what was decoded."""

    name, gate, long = "codec", 3_000, 200_000

    def __init__(self) -> None:
        self._corpus = (*_bodies(), *captures.messages())

    def make(self, rng: Random) -> bytes:
        """Make a value, and what follows it."""
        return mutate(rng, rng.choice(self._corpus), self._corpus)

    def run(self, string: bytes, rng: Random) -> None:
        """Decode and skip, which must agree; what was decoded is encoded and decoded to the same."""
        decoded = attempt("codec.decode", codec.decode, string)
        skipped = attempt("codec.skip", codec.skip, string, 0, len(string))
        if isinstance(decoded, Exception):
            return
        value, end = decoded
        same(skipped, end, "where skip and where decode end")
        alone = codec.decode(b"\0" + string[:end], 1)
        same(plain(alone[0]), plain(value), "a value at another place")
        encoded = attempt("codec.encode", codec.encode, value)
        if isinstance(encoded, bytes):
            again, after = codec.decode(encoded)
            same(after, len(encoded), "the end and the size of an encoded value")
            same(plain(again), plain(value), "a value and what it is after a round trip")


def _plain_message(message: Message) -> Any:
    body = message.body
    return [
        type(body).__name__,
        plain([body.value] if isinstance(body, AmqpValue) else list(body.parts) if body is not None else []),
        *(
            None if each is None else plain([getattr(each, item.name) for item in dataclasses.fields(each)])
            for each in (message.header, message.properties)
        ),
        *(
            None if each is None else plain(each)
            for each in (
                message.application_properties,
                message.message_annotations,
                message.delivery_annotations,
                message.footer,
            )
        ),
    ]


def _is_run_of_sections(raw: bytes) -> bool:
    """Return whether the general decoder reads sections, one after the other."""
    pos = 0
    while pos < len(raw):
        found = attempt("codec.decode", codec.decode, raw, pos)
        if isinstance(found, Exception):
            return False
        section, pos = found
        if not isinstance(section, Described) or type(section.descriptor) is not ULong:
            return False
        if not HEADER <= section.descriptor <= FOOTER:
            return False
    return True


class MessageEntry(Entry):
    """`Message.decode`, and `Message.encode` of what was decoded."""

    name, gate, long = "message", 2_500, 150_000

    def make(self, rng: Random) -> bytes:
        """Make a message."""
        return mutate(rng, rng.choice(captures.messages()), captures.messages())

    def run(self, string: bytes, rng: Random) -> None:
        """A message that encodes again decodes to what encodes to the same bytes."""
        spans = attempt("message.section_spans", section_spans, string)
        if isinstance(spans, Exception):
            require(holds=not _is_run_of_sections(string), what="a run of sections is refused as none")
        message = attempt("Message.decode", Message.decode, string)
        if not isinstance(message, Message):
            return
        require(holds=not isinstance(spans, Exception), what="a message was decoded that is no run of sections")
        encoded = attempt("Message.encode", message.encode)
        if isinstance(encoded, bytes):
            again = Message.decode(encoded)
            same(again.encode(), encoded, "a message encoded twice")
            if isinstance(message.body, AmqpSequence | AmqpValue):
                same(_plain_message(again)[:2], _plain_message(message)[:2], "a body and what it is after a round trip")


def _fields() -> EventFields:
    return EventFields(*_NAMES)


class _NoLayouts(dict[bytes, Any]):
    """Keeps no layout."""

    def __setitem__(self, key: bytes, value: Any) -> None:
        """Keep nothing."""


class ScanEntry(Entry):
    """The scan of received events: with layouts kept, without, and the general decoder."""

    name, gate, long = "scan", 2_500, 200_000

    def __init__(self) -> None:
        self._corpus = captures.stored()

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make an event, and those that were scanned before it."""
        before = rng.choice(self._corpus)
        others = captures.messages()
        return before, mutate(rng, before if rng.random() < 0.7 else rng.choice(self._corpus), others)

    def run(self, string: tuple[bytes, ...], rng: Random) -> None:
        """What is kept of earlier events changes nothing; what the scan gives, the general decoder gives too."""
        kept = _fields()
        for raw in (*string, *string):
            with_layouts = attempt("message.scan_event", scan_event, raw, kept)
            bare = EventFields(*_NAMES, layouts=_NoLayouts())
            alone = attempt("message.scan_event", scan_event, raw, bare)
            same(_outcome(with_layouts), _outcome(alone), "a scan with layouts and one without")
        check_event(string[-1])


def _outcome(found: Any) -> Any:
    return "refused" if isinstance(found, Exception) else found


def check_event(raw: bytes) -> None:
    """Compare the scan of an event with the general decoder."""
    scan = attempt("message.scan_event", scan_event, raw, _fields())
    message = attempt("Message.decode", Message.decode, raw)
    event = ReceivedEvent(raw)
    for name in ("sequence_number", "offset", "enqueued_time", "body", "value", "properties", "system_properties"):
        attempt("ReceivedEvent", getattr, event, name)
    attempt("ReceivedEvent", event.body_as_str)
    for name in ("partition_key", "message_id", "content_type", "last_enqueued", "body_type"):
        attempt("ReceivedEvent", getattr, event, name)
    if not isinstance(message, Message):
        return
    if isinstance(scan, Exception):
        raise BreachError("the scan refuses an event that the general decoder reads")
    annotations = message.message_annotations or {}
    for found, key in zip(scan[:3], (SEQUENCE_NUMBER, OFFSET, ENQUEUED_TIME), strict=True):
        # A map that has a name twice is none (1.6.23): which of the two is read is not promised.
        if found is not None and raw.count(key.encode()) == 1:
            same(found, annotations.get(key), f"{key} of the scan and of the general decoder")
    if scan[3] is not None:
        parts = getattr(message.body, "parts", None)  # none of data that is null, which the scan reads as empty
        same(scan[3], None if parts is None else b"".join(parts), "the body of the scan and of the general decoder")


# ---------------------------------------------------------------------------------------------- stamping


class StampEntry(Entry):
    """What the emulator stores: the envelope, the key, the producer's numbers, and stamping."""

    name, gate, long = "stamp", 600, 150_000

    def __init__(self) -> None:
        self._events = tuple(
            event
            for each in captures.published()
            for event in (decode_batch(each.payload) if each.message_format == BATCH_MESSAGE_FORMAT else [each.payload])
        )

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make a batch of events, some of them changed, or an envelope that is changed as a whole."""
        if rng.random() < 0.2:
            envelope = mutate(rng, rng.choice(captures.published()).payload, captures.messages())
            events = attempt("decode_batch", decode_batch, envelope)
            if isinstance(events, list):
                return tuple(events)
            return (envelope,)
        events = rng.choices(self._events, k=rng.choice((1, 1, 2, 3)))
        at = rng.randrange(len(events))
        events[at] = mutate(rng, events[at], captures.messages())
        return tuple(events)

    def run(self, string: tuple[bytes, ...], rng: Random) -> None:
        """All or none is stored, together as alone; what is stored can be read, and says what was sent."""
        key = None
        for raw in string:
            key = attempt("partition_key_of", partition_key_of, raw)
            if isinstance(key, str):
                partition_for_key(key, 4)
        attempt("run_of", run_of, list(string))
        batch_key = key if isinstance(key, str) else None
        alone = [attempt("stamp", stamp, [raw], 7, 100, 1234, batch_key) for raw in string]
        together = attempt("stamp", stamp, list(string), 7, 100, 1234, batch_key)
        is_refused = any(isinstance(each, Exception) for each in alone)
        same(isinstance(together, Exception), is_refused, "whether a batch and whether its events are refused")
        if isinstance(together, Exception):
            return
        for number, (raw, stored) in enumerate(zip(string, together.payloads, strict=True)):
            check_stored(raw, stored, 7 + number, batch_key)
        same(together.next_offset, 100 + sum(map(len, together.payloads)), "offsets and sizes")


def check_stored(raw: bytes, stored: bytes, number: int, batch_key: str | None) -> None:
    """Check that a stored event can be read, and says what its sender said."""
    event = ReceivedEvent(stored)
    same(event.sequence_number, number, "the number given and the number read")
    _ = event.offset, event.enqueued_time
    check_event(stored)
    with_more = attempt("add_delivery_annotations", add_delivery_annotations, [stored], {"n": 1})
    assert isinstance(with_more, list)
    same(ReceivedEvent(with_more[0]).sequence_number, number, "the number with delivery annotations and without")
    sent = attempt("Message.decode", Message.decode, raw)
    kept = attempt("Message.decode", Message.decode, stored)
    if isinstance(sent, Message):
        if isinstance(kept, Exception):
            raise BreachError("a message that can be decoded is stored as one that cannot")
        for message in (sent, kept):
            message.message_annotations = message.header = None
        same(_plain_message(kept), _plain_message(sent), "what was sent and what is stored")


# ----------------------------------------------------------------------------------------------- answers


class AnswersEntry(Entry):
    """Requests as the emulator parses them, and answers as the client does."""

    name, gate, long = "answers", 2_500, 100_000

    def make(self, rng: Random) -> bytes:
        """Make a request to a node, or an answer of one."""
        corpus = tuple(
            message
            for node in (CBS_NODE, MANAGEMENT_NODE)
            for message in (*captures.sent_to(node), *captures.answers_of(node))
        )
        return mutate(rng, rng.choice(corpus), corpus)

    def run(self, string: bytes, rng: Random) -> None:
        """Each parser takes it, or says in a documented error why not; what it is answered with can be encoded."""
        message = attempt("Message.decode", Message.decode, string)
        if not isinstance(message, Message):
            return
        put = attempt("cbs.parse_put_token", cbs.parse_put_token, message)
        if isinstance(put, cbs.PutToken):
            keys = KeyRing([AccessRule(captures.KEY_NAME, captures.KEY)])
            attempt("KeyRing.check_token", keys.check_token, put.token, put.token_type, put.audience, 0.0)
        attempt("Message.encode", cbs.response(message, 202, "Accepted").encode)
        read = attempt("management.parse_request", management.parse_request, message)
        if isinstance(read, management.ManagementRequest):
            attempt("parse_address", parse_address, read.hub)
        attempt("check_answer", check_answer, message, entity="e")
        attempt("management.parse_hub_response", management.parse_hub_response, message, hub="h")
        attempt(
            "management.parse_partition_response",
            management.parse_partition_response,
            message,
            hub="h",
            partition_id="0",
        )


# ------------------------------------------------------------------------------------------------ tunnel

_TUNNEL: Final = (
    b"HTTP/1.1 200 Connection established\r\n\r\n",
    b"HTTP/1.0 200 OK\nVia: x\n\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nProxy-Agent: p/1.0\r\n\r\n",
    (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 407 Proxy Authentication Required\r\n"
        b'Proxy-Authenticate: Basic realm="p"\r\nContent-Length: 5\r\n\r\nnope\n'
    ),
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\n\r\n",
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/html\r\n\r\n<html></html>",
)


class ConnectEntry(Entry):
    """The answer of a proxy to CONNECT."""

    name, gate, long = "connect", 3_000, 50_000

    def make(self, rng: Random) -> bytes:
        """Make an answer."""
        made = mutate_bytes(rng, rng.choice(_TUNNEL), _TUNNEL)
        if rng.random() < 0.02:
            made = made[:-2] + b"X-Filler: " + b"x" * 70_000 + b"\r\n\r\n"
        return made

    def run(self, string: bytes, rng: Random) -> None:
        """However it is cut, the tunnel opens or does not; bytes behind an answer are an error where they are seen."""
        whole = self._verdict([string])
        split = self._verdict(pieces(rng, string))
        if whole is True:
            same(split, True, "an answer in pieces and whole")
        if split is not True:
            same(split, whole, "an answer in pieces and whole")

    @staticmethod
    def _verdict(parts: list[bytes]) -> object:
        handshake = TunnelHandshake(ProxySettings(host="proxy", port=3128), "service", 5671)
        for part in parts:
            found = attempt("TunnelHandshake.receive", handshake.receive, part) if part else False
            if found is not False:
                return found if found is True else str(found)
        return str(handshake.receive_eof())
