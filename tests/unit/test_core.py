"""The compiled core does what its references do, value or error, on sound, damaged and hostile bytes.

The seeds begin at the day's number, as those of `tests/fuzz` do. The long form of each comparison has a million cases,
each of them one run, event or call; several are made of a seed where they share what takes longest to make.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import re
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from io import BytesIO
from math import inf, nan
from random import Random
from time import monotonic
from types import FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any, cast
from uuid import UUID

import psutil  # type: ignore[import-untyped]  # it comes without types
import pytest

from eventpump import EventBatch, EventData, EventError, EventTooLargeError, ReceivedEvent, compiled
from eventpump.amqp import forms
from eventpump.amqp.connection import Connection, Messages
from eventpump.amqp.forms import Form, form_of
from eventpump.amqp.link import Link
from eventpump.amqp.message import Data, Message
from eventpump.amqp.performatives import Transfer, decode_performative
from eventpump.amqp.receiver import Reassembly
from eventpump.amqp.session import Session
from eventpump.amqp.types import Char, Decimal32, Float, Int, Symbol, Timestamp, UByte, UInt, ULong
from eventpump.consumer.link.feed import FeedCursor, PartitionFeed
from eventpump.consumer.link.member import MemberFeed
from eventpump.core.budget import Account, BufferBudget
from eventpump.core.cache import Cursor, EventCache
from eventpump.core.router import HashRouter, RingRouter, RoundRobinRouter
from eventpump.core.status import BatchState
from eventpump.eventhubs import events as module
from eventpump.eventhubs import sealing
from eventpump.eventhubs.envelope import envelope_head
from eventpump.eventhubs.events import EventPosition, received_events, received_events_in_python
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import NUMBERS
from eventpump.eventhubs.sealing import SealedBatch, number_events_in_python, pieces_of_in_python
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.options.consumer import FeedSettings
from eventpump.producer.accumulator import Batch, BatchAccumulator, BufferRoom, Lane
from eventpump.producer.intake import DeliveryReceipt, Intake
from eventpump.producer.packing import BatchPacker
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.fuzz.entry import seed_of_today
from tests.support import messages
from tests.support.damage import damage, outcome
from tests.support.inside import forms_of, published
from tests.support.messages import message
from tests.unit.amqp.pair import Pair

core: Any = compiled.core
pytestmark = [
    pytest.mark.skipif(core is None, reason="this is the build without the compiled core"),
    pytest.mark.timeout(4 * 3600),  # a million cases
]


class Cases:
    """The cases of one test.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self._first = seed_of_today()
        self._count = count

    def seeded(self, per_seed: int = 1) -> Iterator[tuple[int, Random]]:
        """Return seeds with their random numbers.

        Args:
            per_seed: How many cases are made of a seed.
        """
        return ((seed, Random(seed)) for seed in range(self._first, self._first + self._count // per_seed))

    def varied(self, make: Callable[[Random], bytes]) -> Iterator[tuple[int, Random, bytes]]:
        """Return each seed with its random numbers and sound bytes, which eight seeds share: making them costs most."""
        made: dict[int, bytes] = {}
        for seed, random in self.seeded():
            if (base := seed // 8) not in made:
                made = {base: make(Random(base))}
            yield seed, random, made[base]


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Cases:
    """The cases of one test, in the short form or the long one."""
    return Cases(1_000_000 if request.config.getoption("--long") else 3_000)


# --------------------------------------------------------------------------------------------------------- take_run


def frame(transfer: Transfer, payload: bytes) -> bytes:
    """Return a transfer as a frame on channel 0."""
    body = transfer.encode() + payload
    return (len(body) + 8).to_bytes(4, "big") + b"\x02\x00\x00\x00" + body


def form_of_frame(data: bytes) -> Form | None:
    """Return the form of the first frame."""
    size = int.from_bytes(data[:4], "big")
    transfer, payload = decode_performative(data, 8, size)
    return form_of(transfer, data, 0, payload, cast("Link", None))


def stream(random: Random) -> bytes:
    """Return transfers as a peer may write them, of one form or of several."""
    tag = bytes(random.choice((0, 1, 4, 32)))
    first = random.choice((0, 5, 250, 2**32 - 3))
    frames = []
    for number in range(random.randrange(1, 9)):
        is_other = random.random() < 0.1
        transfer = Transfer(
            handle=1 if is_other else 0,
            delivery_id=(first + number) % 2**32,
            delivery_tag=tag,
            message_format=0,
            settled=True,
            more=random.random() < 0.05,
        )
        frames.append(frame(transfer, random.randbytes(random.choice((0, 1, 7, 300)))))
    return b"".join(frames)


def test_run_is_that_of_the_reference(cases: Cases) -> None:
    """The same payloads, and the same end, from wherever the run begins and however little may be taken."""
    taken = 0
    for seed, random, sound in cases.varied(stream):
        form = form_of_frame(sound)
        data = damage(random, sound, len(sound))
        if form is None:
            continue
        pos = random.choice((0, 0, 0, random.randrange(len(data) + 5)))
        largest = random.choice((2**20, 2**20, 2**62, 300, form.payload_at, 0))
        room = random.choice((5, 2048, 1, 0, -1))
        found, expected = [b"before"], [b"before"]
        end = core.take_run(form, data, pos, largest, room, found)
        assert end == forms.take_run_in_python(form, data, pos, largest, room, expected), seed
        assert found == expected, seed
        taken += len(found) - 1
    assert taken > 300


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": b"\x02" * 5000},
        {"rest": b"x" * 5000},
        {"tag_mark": b"x" * 5000},
        {"id_at": -1},
        {"tag_at": -9},
        {"tag_at": 2**40},
        {"rest_at": 2**62},
        {"payload_at": 0},
        {"payload_at": 2**62},
    ],
)
def test_form_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    """No place is taken from a form that does not agree with its bytes."""
    data = frame(Transfer(handle=0, delivery_id=0, delivery_tag=b"1234", message_format=0, settled=True), b"x")
    form = form_of_frame(data)
    assert form is not None
    with pytest.raises(ValueError, match="form"):
        core.take_run(form._replace(**change), data, 0, 2**20, 5, [])


@pytest.mark.parametrize(("place", "given"), [(0, None), (1, None), (1, bytearray(90)), (2, -1), (2, 2**80), (5, None)])
def test_run_of_wrong_arguments_is_refused(place: int, given: Any) -> None:
    """An error, and nothing is read."""
    data = frame(Transfer(handle=0, delivery_id=0, delivery_tag=b"1234", message_format=0, settled=True), b"x")
    arguments: list[Any] = [form_of_frame(data), data, 0, 2**20, 5, []]
    arguments[place] = given
    with pytest.raises((TypeError, ValueError, OverflowError)):
        core.take_run(*arguments)


# ----------------------------------------------------------------------------------------------------- ReceivedEvent

reference: type[ReceivedEvent] = core.references["EncodedEvent"] if core else ReceivedEvent

READS: dict[str, Callable[[ReceivedEvent], Any]] = {
    "offset": lambda event: event.offset,
    "sequence_number": lambda event: event.sequence_number,
    "enqueued_time": lambda event: event.enqueued_time,
    "body": lambda event: event.body,
    "body_as_str": lambda event: event.body_as_str(),
    "body_as_str in Latin-1": lambda event: event.body_as_str("latin-1"),
    "body_as_str in no encoding": lambda event: event.body_as_str("none"),
    "body_type": lambda event: event.body_type,
    "value": lambda event: event.value,
    "partition_key": lambda event: event.partition_key,
    "properties": lambda event: event.properties,
    "system_properties": lambda event: event.system_properties,
    "message_id": lambda event: event.message_id,
    "correlation_id": lambda event: event.correlation_id,
    "content_type": lambda event: event.content_type,
    "last_enqueued": lambda event: event.last_enqueued,
    "to_event_data": lambda event: shown_event(event.to_event_data()),
    "raw": lambda event: event.raw,
    "origin": lambda event: event.origin,
    "repr": repr,
}


def shown_event(event: EventData) -> Any:
    """Return what an event to send has, with its types."""
    return type(event), event.section, event.properties, event.standard, event.published_sequence_number


def test_event_is_that_of_the_reference(cases: Cases) -> None:
    """Every attribute has the same value or error, in whatever order they are read."""
    found = refused = keys = 0
    for seed, random, sound in cases.varied(message):
        raw = damage(random, sound, random.choice((12, 200, len(sound))))
        ours, theirs = ReceivedEvent(raw, "origin"), reference(raw, "origin")
        for name in random.sample(list(READS), random.choice((1, 2, 4))):
            value = outcome(READS[name], ours)
            assert repr(value) == repr(outcome(READS[name], theirs)), (seed, name)
            found += name in ("offset", "body") and value[0] in (str, bytes)
            refused += value[0] is EventError
            keys += name == "partition_key" and value[0] is str
    assert min(found, refused, keys) > 30


def calls_of(work: Callable[[], object]) -> list[str]:
    """Return the names of the functions in Python that something calls.

    Without those that the garbage collector calls (hypothesis registers one), wherever it happens to start.
    """
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_qualname)

    was_enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()
    return [each for each in found if "<lambda>" not in each]


@pytest.mark.parametrize("empty", [b"", b"\x00\x53\x73\x45", b"\x00\x53\x73\xc0\x01\x00"])
def test_event_without_standard_properties_is_read_without_the_reference(empty: bytes) -> None:
    """Whether their section is missing, or is an empty list in either form, as some clients send it."""
    place: dict[str, Any] = {"offset": "7", "sequence_number": 7, "enqueued_time": datetime(2026, 1, 1, tzinfo=UTC)}
    raw = ReceivedEvent.build(b"body", **place, properties={"unit": "C"}).raw
    at = raw.index(b"\x00\x53\x74")
    event = ReceivedEvent(raw[:at] + empty + raw[at:])
    names = ("sequence_number", "offset", "enqueued_time", "body", "partition_key", "properties", "content_type")
    assert calls_of(lambda: [getattr(event, name) for name in names]) == []
    assert (event.sequence_number, event.body, event.properties, event.content_type) == (
        7,
        b"body",
        {"unit": "C"},
        None,
    )


def test_usual_event_is_read_and_forwarded_without_the_reference(cases: Cases) -> None:
    """Values of every simple type and the standard properties are decoded, and encoded again, by the core alone."""
    for seed, random in cases.seeded(per_seed=30):
        values = {str(place): make(random) for place, make in enumerate(messages.SIMPLE)}
        if any(isinstance(each, Float) and not -inf < each < inf for each in values.values()):
            continue  # left to the reference
        values |= {"list": [1, ["two", None]], "map": {"a": {Symbol("b"): 1.5}}}
        standard: dict[str, Any] = {
            "message_id": UUID(int=5),
            "content_type": "text/plain",
            "creation_time": Timestamp(5),
        }
        event = ReceivedEvent(
            ReceivedEvent.build(
                b"body",
                offset="7",
                sequence_number=5,
                enqueued_time=datetime(2026, 1, 1, tzinfo=UTC),
                partition_key="key",
                properties=values,
                **standard,
                group_sequence=5,
            ).raw
        )
        for name in ("properties", "message_id", "correlation_id", "content_type", "system_properties"):
            assert calls_of(partial(READS[name], event)) == [], (seed, name)
        assert calls_of(event.to_event_data) == ["ReceivedEvent.to_event_data"], seed
        copy = event.to_event_data()
        for name in ("list", "map"):
            del copy.properties[name]
        sealing.pieces_of(copy)  # the head for events of this size is kept
        assert calls_of(copy.encode) == calls_of(partial(sealing.pieces_of, copy)) == [], seed


def test_key_that_a_message_has_twice_is_left_to_the_reference() -> None:
    """A map may be written so; the general decoder decides which of them counts."""
    message = Message.decode(SOUND)
    assert message.message_annotations is not None
    message.message_annotations[Symbol("x-opt-partition-kez")] = "other"
    raw = message.encode().replace(b"kez", b"key")
    assert ReceivedEvent(raw).partition_key == reference(raw).partition_key == "other"


@pytest.mark.parametrize(("first", "second"), [(b"\xff", b"9"), (b"9", b"\xff"), (b"8", b"9")])
def test_offset_that_a_message_has_twice_is_left_to_the_reference(first: bytes, second: bytes) -> None:
    """Each of them is checked."""
    other = Message(
        message_annotations={SEQUENCE_NUMBER: 5, OFFSET: "1", Symbol("x-opt-offseu"): "2", ENQUEUED_TIME: Timestamp(0)},
        body=Data((b"body",)),
    ).encode()
    raw = other.replace(b"offseu", b"offset").replace(b"\xa1\x011", b"\xa1\x01" + first)
    raw = raw.replace(b"\xa1\x012", b"\xa1\x01" + second)
    for name in ("offset", "body", "enqueued_time"):
        assert outcome(READS[name], ReceivedEvent(raw)) == outcome(READS[name], reference(raw)), name
    assert outcome(READS["offset"], ReceivedEvent(raw))[1] == "9" or b"\xff" in raw


def test_time_is_that_of_the_reference(cases: Cases) -> None:
    """Random and outermost milliseconds."""
    edges = [*range(-3, 4), 4_000_000_000_000, 3_999_999_999_999, 951_782_400_000, 951_868_799_999, 2**63 - 1, -(2**63)]
    days = range(0, 4_000_000_000_000, 86_400_000)
    for milliseconds in [*edges, *days, *(random.randrange(4_100_000_000_000) for _, random in cases.seeded())]:
        ours, theirs = core.moment(milliseconds), module._moment(milliseconds)
        assert ours == theirs, milliseconds
        assert ours.tzinfo is theirs.tzinfo


def test_number_and_time_out_of_range_of_the_wire_are_refused() -> None:
    """A number of more than 64 bits cannot be one of a message."""
    with pytest.raises(OverflowError):
        core.moment(2**63)


def test_documentation_is_that_of_the_reference() -> None:
    """`help` says the same in both builds."""
    names = [name for name in vars(core.EncodedEvent) if not name.startswith("_")]
    assert len(names) == 13
    for name in names:
        assert getattr(ReceivedEvent, name).__doc__.split() == getattr(reference, name).__doc__.split()
    assert ReceivedEvent.__doc__ == reference.__doc__
    assert (ReceivedEvent.__name__, ReceivedEvent.__qualname__) == ("ReceivedEvent", "ReceivedEvent")


SOUND = Message(
    message_annotations={SEQUENCE_NUMBER: 5, OFFSET: "7", ENQUEUED_TIME: Timestamp(0), PARTITION_KEY: "k"},
    body=Data((b"body",)),
).encode()


class Derived(ReceivedEvent):
    """A user's subclass: other arguments, attributes of its own."""

    def __init__(self, raw: bytes, *, note: str) -> None:
        super().__init__(raw)
        self.note = note

    @property
    def sequence_number(self) -> int:
        """Twice the number."""
        return 2 * super().sequence_number


def test_subclass_may_have_arguments_and_attributes() -> None:
    """As a class in Python."""
    event = Derived(SOUND, note="note")
    assert (event.sequence_number, event.offset, event.note) == (10, "7", "note")
    assert weakref.ref(event)() is event


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_event_is_pickled(protocol: int) -> None:
    """What was read does not matter, and a subclass keeps what it has."""
    for event in (ReceivedEvent(SOUND, ("a", 1)), Derived(SOUND, note="note")):
        for _ in range(2):
            found = pickle.loads(pickle.dumps(event, protocol))
            assert type(found) is type(event)
            assert (found.raw, found.origin, found.offset, found.body) == (SOUND, event.origin, "7", b"body")
            assert getattr(found, "note", None) == getattr(event, "note", None)
            for made in (copy.copy(event), copy.deepcopy(event)):
                assert (made.raw, made.offset) == (SOUND, "7")


def test_pickle_of_one_build_is_read_in_the_other() -> None:
    """The state has one form."""
    ours, theirs = ReceivedEvent(SOUND, "origin"), reference(SOUND, "origin")
    assert ours.offset == theirs.offset
    assert ours.__getstate__() == theirs.__getstate__()


def test_event_in_a_cycle_is_collected() -> None:
    """A user's attribute, and an origin, that refer to the event do not keep it forever."""
    event = Derived(SOUND, note="note")
    event.__dict__["self"] = event
    holder: list[Any] = []
    holder.append(ReceivedEvent(SOUND, holder))
    found = [weakref.ref(event)]
    assert gc.is_tracked(holder[0])
    del event, holder
    gc.collect()
    assert found[0]() is None


def test_event_that_is_given_another_message_reads_nothing_outside_of_it() -> None:
    """Private attributes can be set: places that were found before are compared with the message at each read."""
    for raw in (b"", SOUND[:-4], None, bytearray(SOUND)):
        event: Any = ReceivedEvent(SOUND)
        assert event.offset == "7"
        event._raw = raw
        for name in ("body", "body_as_str"):
            found = outcome(READS[name], event)
            assert issubclass(found[0], Exception) or (type(raw) is bytearray and found[1] in (b"body", "body"))
        assert issubclass((found := outcome(READS["partition_key"], event))[0], Exception) or found[1] in (None, "k")
    event = ReceivedEvent.__new__(ReceivedEvent)
    for name in ("body", "offset", "partition_key", "enqueued_time"):
        with pytest.raises((AttributeError, TypeError, EventError)):
            getattr(event, name)


def test_reference_counts_do_not_change() -> None:
    """Neither of the message nor of what is shared between events."""
    raw = bytes(bytearray(SOUND))
    bad = raw[:-1]
    origin = object()
    watched = (raw, bad, origin, None, True, b"", "")
    gc.collect()  # what other tests left
    before = [sys.getrefcount(each) for each in watched]
    for _ in range(500):
        for encoded in (raw, bad):
            _read_all(ReceivedEvent(encoded, origin))
    gc.collect()
    after = [sys.getrefcount(each) for each in watched]
    assert all(abs(now - then) < 50 for now, then in zip(after, before, strict=True)), (before, after)


def _read_all(event: ReceivedEvent) -> None:
    for read in READS.values():
        outcome(read, event)


# ------------------------------------------------------------------------------- EventData, EventBatch, number_events


class Encoding(EventData):
    """A user's event that encodes itself."""

    def encode(self, partition_key: str | None = None) -> bytes:
        """Return the same for every event."""
        return EventData(b"its own", properties={"a": 1}).encode(partition_key)


def event_to_send(random: Random) -> Any:
    """Return an event as users make them, or what is none."""
    body = bytes(random.choice((0, 1, 100, 250, 255, 256, 300, 9000)))
    match random.randrange(14):
        case 8:
            return EventData(body, properties={"type": "reading", "firmware": random.randrange(1000)}, message_id=5)
        case 9:
            return EventData(body, properties={"a": random.choice((Text("t"), 2**70, "é", None, "\ud800"))})
        case 0:
            return EventData(body, properties={"a": random.choice((1, "two", object()))})
        case 1:
            return Encoding(body)
        case 2:
            return EventData("text", content_type="text/plain")
        case 3:
            return EventData(value=random.choice((None, 5, "text")))
        case 4:
            event = EventData(body)
            published(event, 5)
            return event
        case 5:
            event = EventData(body)
            event.properties = random.choice(({}, {"a": 1}))
            return event
        case 6:
            event = EventData(bytearray(body))
            event.standard = random.choice(({}, None, {"subject": "s"}))
            return event
        case 7:
            return random.choice((None, body, 5, ReceivedEvent(SOUND)))
    return EventData(body)


class Text(str):
    """A user's text."""

    __slots__ = ()

    def encode(self, *_: Any) -> bytes:
        """Return what the characters are not."""
        return b"its own"


class Odd(dict[Any, Any]):
    """A user's dictionary: it holds more than it has."""

    def items(self) -> Any:
        """Return one entry more."""
        return [*super().items(), ("more", 1)]


class Changing(str):
    """A text that changes the properties it is one of while they are encoded."""

    event: EventData | None = None

    def encode(self, *_: Any) -> bytes:
        """Add, remove or replace properties."""
        assert self.event is not None
        match len(self) % 3:
            case 0:
                self.event.properties["added"] = "x" * 1000
            case 1:
                self.event.properties.clear()
            case _:
                self.event.properties = {"other": 1}
        return str.encode(self)


class Failing(int):
    """A number that raises what is no `Exception` when it is compared."""

    def __le__(self, _: object) -> bool:
        raise KeyboardInterrupt

    __ge__ = __lt__ = __gt__ = __le__


def _broken_uuid(number: Any) -> UUID:
    made = UUID(int=0)
    object.__setattr__(made, "int", number)
    return made


def nested(depth: int) -> Any:
    """Return a list in a list, and so on."""
    return [nested(depth - 1)] if depth else []


_EDGES = (0, 1, 127, 128, 255, 256, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**80)
_LENGTHS = (0, 1, 100, 127, 128, 200, 253, 254, 255, 256, 257, 600) * 4 + (70_000,)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _number(random: Random) -> int:
    number = random.choice(_EDGES)
    return random.choice((number, -number, -number - 1, number - 1, random.randrange(-129, 129)))


def _moment(random: Random) -> datetime:
    return _EPOCH + timedelta(microseconds=random.randrange(-(6 * 10**16), 25 * 10**16))


_VALUES: tuple[Callable[[Random], Any], ...] = (
    lambda random: random.choice((None, True, False)),
    _number,
    lambda random: random.choice((0.0, -0.0, inf, -inf, nan, 5e-324, random.random())),
    lambda random: (
        random.choice(("x", "é", "\x00", "\U0001f600", "\ud800", "\udfff", "\x7f")) * (random.choice(_LENGTHS) // 2 + 1)
    ),
    lambda random: "x" * random.choice(_LENGTHS),
    lambda random: bytes(random.choice(_LENGTHS)),
    lambda random: UUID(int=random.choice((0, 2**128 - 1, random.getrandbits(128)))),
    _moment,
    lambda random: random.choice((datetime.min, datetime.max)).replace(tzinfo=UTC),
    messages.value,
)
"""What properties usually are."""

_ODD_VALUES: tuple[Callable[[Random], Any], ...] = (
    lambda random: random.choice(
        (datetime(2026, 1, 1), _moment(random).astimezone(timezone(timedelta(hours=5, seconds=3))))
    ),
    lambda random: random.choice(
        (Text("x"), Changing("x" * random.randrange(7)), Odd(a=1), Symbol("s"), Symbol("é"), Float(1.5))
    ),
    lambda random: random.choice(
        (
            Int(5),
            ULong(2**63),
            Timestamp(-5),
            UByte(3),
            int.__new__(random.choice((UByte, Int, UInt)), _number(random)),
            Failing(5),
        )
    ),
    lambda random: random.choice((str.__new__(Char, "xy"), bytes.__new__(Decimal32, b"x"), Float(1e300), Float(inf))),
    lambda random: random.choice(
        (bytearray(b"x"), memoryview(b"xy"), [1, "a"], {"a": 1}, (), {}, object(), 1j, date.max)
    ),
    lambda random: _broken_uuid(random.choice((-1, 2**128, "x", None, 1.5, Failing(2**70)))),
    lambda random: nested(random.choice((29, 30, 31, 32))),
)
"""What they may be as well, possible or not."""


def hostile_value(random: Random) -> Any:
    """Return what a user may give as a property, possible or not."""
    return random.choice(_VALUES if random.random() < 0.85 else _ODD_VALUES)(random)


def as_data(event: Any) -> Any:
    """Return an event with the attributes of one of the reference, which the reference then encodes too."""
    if type(event) is EventData:
        return event
    made = EventData.__new__(EventData)
    for name in core.references["PlainEventData"].__slots__:
        if hasattr(event, name):  # only telemetry sets each
            setattr(made, name, getattr(event, name))
    return made


def hostile_event(random: Random, kind: Any) -> Any:
    """Return an event with any properties, given or set later.

    Args:
        kind: Its class, of one build or the other.
    """
    names = ("a", "name", "é", "x" * 254, "x" * 255, "x" * 256, "x" * 300, "", "\ud800")
    keys: Any = [
        random.choice(names if random.random() < 0.2 else names[:3]) + str(each)
        for each in range(random.choice((0, 1, 2, 2, 5) * 10 + (130,)))
    ]
    properties: Any = {key: hostile_value(random) for key in keys}
    if random.random() < 0.05:
        properties[random.choice((Text("t"), Symbol("s"), 5, None, b"b", Changing("xy")))] = 1
    if random.random() < 0.05:
        properties = random.choice(
            (Odd(properties), None, OrderedDict(properties), MappingProxyType(properties), [("a", 1)])
        )
    nothing: tuple[Any, ...] = (None, {})
    fields = random.sample(module.STANDARD_PROPERTIES, random.choice((0, 0, 1, 3, 13)))
    standard = {name: usual_field(name, random) if random.random() < 0.9 else hostile_value(random) for name in fields}
    if random.random() < 0.02:
        standard[random.choice(("unknown", "value", "sequence", "body"))] = random.choice((None, [5]))
    body: Any = random.choice(
        (b"", bytes(255), bytes(256), bytes(9000), "text", "é", bytearray(b"x"), b"x", b"y", b"z")
    )
    body = random.choice((Text("x"), "\ud800", None, 5)) if random.random() < 0.05 else body
    if random.random() < 0.5:
        event = as_data(kind(body, properties=properties, **standard))
    else:
        event = as_data(kind(body if type(body) is bytes else b"x"))
        event._properties, event.standard = properties, standard or random.choice(nothing)
        if random.random() < 0.05:
            event.standard = random.choice(
                ([], Odd(standard), {Text("subject"): 1}, {5: 1}, OrderedDict(standard), "x")
            )
    for value in properties.values() if isinstance(properties, dict) else ():
        if isinstance(value, Changing):
            value.event = event
    for key in properties if isinstance(properties, dict) else ():
        if isinstance(key, Changing):
            key.event = event
    return event


def usual_field(name: str, random: Random) -> Any:
    """Return what a standard property may be."""
    if name in ("message_id", "correlation_id", "to", "reply_to"):
        return random.choice(
            (None, "id", 0, 1, 255, 256, 2**64 - 1, 2**64, -1, UUID(int=5), b"id", True, ULong(2**64 - 1))
        )
    if name.endswith("time"):
        return random.choice(
            (None, Timestamp(2**63 - 1), datetime(2026, 1, 1, 1, 2, 3, 4567, tzinfo=UTC), Timestamp(5), 5, True, "x")
        )
    if name == "group_sequence":
        return random.choice((None, 0, 1, 255, 256, 2**32 - 1, 2**32, -1, True, UInt(5)))
    if name == "user_id":
        return random.choice((None, b"", b"user", bytearray(b"x"), "x", 5))
    return random.choice((None, "", "text", "x" * 300, "é", "\ud800", Symbol("s"), 5))


_WAYS: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    {"idempotent": True},
    {"before": envelope_head("key")},
    {"before": envelope_head("key"), "idempotent": True},
)
"""How an event is encoded: as it is, or in pieces for a batch."""


def encoded(random: Random, kind: Any, to_pieces: Callable[..., Any]) -> list[Any]:
    """Return how a hostile event is encoded in each way, or the error; and what it has then.

    Args:
        kind: The class that makes and encodes it.
        to_pieces: `pieces_of` of the same build.
    """
    try:
        event = hostile_event(random, kind)
    except (Exception, KeyboardInterrupt) as error:
        return [(type(error), str(error))]
    made: list[Any] = [(type(event._payload), event._body is None, event.published_sequence_number)]
    for way in random.sample(_WAYS, len(_WAYS)):  # in any order, as an event may change while it is encoded
        try:
            found = kind.encode(event) if way is None else to_pieces(event, **way)
        except (Exception, KeyboardInterrupt) as error:
            found = type(error), str(error)
        made.append((way, found, len(event._properties or ()), event.standard and len(event.standard)))
    return made


def test_encoded_event_is_that_of_the_reference(cases: Cases) -> None:
    """The same bytes or error, whatever the properties are: values that do not fit, users' classes, what changes."""
    same = refused = whole = 0
    for seed, random in cases.seeded(per_seed=len(_WAYS)):
        found = encoded(random, EventData, sealing.pieces_of)
        assert found == encoded(Random(seed), core.references["PlainEventData"], pieces_of_in_python), seed
        by_way = {str(way): made for way, made, *_ in found[1:]}
        same += sum(isinstance(made[0], bytes) for made in by_way.values())
        refused += not by_way or isinstance(found[1][1][0], type)
        raw, parts = by_way.get("None"), by_way.get("{}", ())
        if (
            isinstance(raw, bytes) and parts and isinstance(parts[0], bytes)
        ):  # equal if the event did not change between
            whole += b"".join(parts) == sealing.pieces(raw)[0] + raw
    assert min(same, refused, whole) > 100


@pytest.mark.parametrize("count", [0, 1, 126, 127, 128, 129, 30_000])
@pytest.mark.parametrize("size", [0, 1, 200, *range(243, 257), 3 * 2**20])
def test_properties_of_every_size_are_those_of_the_reference(count: int, size: int) -> None:
    """Around where sizes and counts take four bytes, and far more than a frame or a message holds."""
    if count > 1000 and size > 1:
        return
    properties: dict[str, Any] = {str(place): None for place in range(count - 1)}
    if count:
        properties["a"] = "x" * size
    event = EventData(b"body", properties=properties, subject="x" * size)
    raw = event.encode()
    assert raw == core.references["PlainEventData"].encode(event)
    assert Message.decode(raw).application_properties == (properties or None) if count < 1000 else raw
    assert sealing.pieces_of(event) == pieces_of_in_python(event)


def test_numbers_and_times_at_their_bounds_are_those_of_the_reference() -> None:
    """Around each number where the form changes or ends, and on every day of four centuries."""
    edges = [0, *(sign * 2**bits for bits in (7, 8, 15, 16, 31, 32, 62, 63, 64) for sign in (1, -1))]
    values: list[Any] = [edge + by for edge in edges for by in range(-2, 3)]
    first = datetime(1799, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    values += [first + timedelta(days=day) for day in range(400 * 366)][::7]
    whole = core.references["PlainEventData"]
    for value in values:
        given: list[dict[str, Any]] = [{"properties": {"a": value}}]
        if not isinstance(value, datetime):
            given += [
                {"message_id": value},
                {"group_sequence": value, "creation_time": value},
                {"absolute_expiry_time": value},
            ]
        for event in (EventData(b"", **each) for each in given):
            assert outcome(event.encode) == outcome(whole.encode, event), value


def test_batch_of_events_with_properties_copies_no_body() -> None:
    """Their bytes are a piece of the batch as they are, with and without a key."""
    body = bytes(bytearray(b"x" * 300))
    event = EventData(body, properties={"a": 1}, subject="s")
    for before in (b"", envelope_head("key")):
        for of in (sealing.pieces_of, pieces_of_in_python):
            assert of(event, before=before)[1] is body


def test_memory_of_what_is_encoded_is_freed() -> None:
    """Also where a property that comes late is refused."""
    large = {"a": "x" * 5000, "b": 1}
    refused = {"a": "x" * 5000, "b": object()}
    event, other = EventData(b"x", properties=large), EventData(b"x", properties=refused)

    def encode_all() -> int:
        for _ in range(100):
            for each in (event, other):
                outcome(each.encode)
                outcome(sealing.pieces_of, each)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        encode_all()
        before = encode_all()
        assert encode_all() - before < 50_000
    finally:
        tracemalloc.stop()


def test_event_has_properties_of_its_own() -> None:
    """What was given may be changed afterwards."""
    given: dict[str, Any] = {"a": 1}
    for kind in (EventData, core.references["PlainEventData"]):
        event = kind(b"x", properties=given, subject="s")
        other = kind(b"x", properties=given)
        given["b"] = 2
        event.properties["c"] = 3
        assert (event.properties, other.properties) == ({"a": 1, "c": 3}, {"a": 1})
        del given["b"]


def keyed_batch(key: str) -> EventBatch:
    """Return a small batch of a partition, whose events take a key along."""
    return EventBatch(900, partition_key=key, partition_id="0")


def test_encoding_does_not_change_reference_counts() -> None:
    """Neither of values that are encoded nor of those that are refused."""
    values = [
        object(),
        "\ud800" * 3,
        "é" * 9,
        2**70,
        10**6,
        1.5,
        b"bytes" * 3,
        UUID(int=2**100),
        datetime.now(UTC),
        Text("x"),
    ]
    name, body = "name" * 3, bytes(bytearray(b"x" * 99))
    gc.collect()  # what other tests left
    before = [sys.getrefcount(each) for each in (*values, name, body, None)]
    odd: Any
    for _ in range(200):
        for odd in values:
            outcome(lambda value: EventData(body, properties={name: value}).encode(), odd)
            outcome(lambda value: EventData(body, message_id=value, subject=value).encode(), odd)
            outcome(lambda value: EventData(name, properties={value: name}), odd)
            outcome(lambda value: sealing.pieces_of(EventData(body, properties={name: "x" * 600, "b": value})), odd)
            outcome(lambda value: keyed_batch(name).try_add(EventData(body, subject=value)), odd)
    del odd
    gc.collect()
    after = [sys.getrefcount(each) for each in (*values, name, body, None)]
    assert all(abs(now - then) < 20 for now, then in zip(after, before, strict=True)), (before, after)


def batch_in_python(batch: EventBatch, **options: Any) -> EventBatch:
    """Return a batch like a new one, of the references."""
    made: EventBatch = core.references["PlainBatch"](batch.max_size_in_bytes, **options)
    packer = core.references["PlainPacker"](
        batch.max_size_in_bytes,
        partition_key=batch.partition_key if batch.partition_id is None else None,
        idempotent=batch.is_idempotent,
        stamped=batch.is_stamped,
    )
    made._packer, made._add = packer, packer.add
    return made


def test_batch_is_that_of_the_reference(cases: Cases) -> None:
    """The same events are added or refused, with the same sizes, and make the same message."""
    added = refused = full = 0
    for seed, random in cases.seeded(per_seed=4):
        options: dict[str, Any] = {"is_idempotent": random.random() < 0.5, "is_stamped": random.random() < 0.2}
        if random.random() < 0.2:
            options |= {"partition_key": "key", "partition_id": random.choice(("0", None))}
            options["is_idempotent"] = options["is_idempotent"] and options["partition_id"] is not None
        ours = EventBatch(random.choice((0, 300, 1000, 10_000, 10**6)), **options)
        theirs = batch_in_python(ours, **options)
        for _ in range(random.randrange(9)):
            event = event_to_send(random)
            state = random.choice((BatchState.OPEN,) * 9 + tuple(BatchState))
            for batch in (ours, theirs):
                batch._state = state
            found = outcome(ours.try_add, event)
            assert found == outcome(theirs.try_add, event), seed
            assert (ours.size, ours.count, ours.events) == (theirs.size, theirs.count, theirs.events), seed
            added += found == (bool, True)
            full += found == (bool, False) or found[0] is EventTooLargeError
            refused += found[0] is EventError
            if type(event) is EventData:
                arguments = {"idempotent": options["is_idempotent"], "stamped": options["is_stamped"]}
                pieces = outcome(lambda of: of(event, **arguments), sealing.pieces_of)  # noqa: B023 - called at once
                assert pieces == outcome(lambda of: of(event, **arguments), pieces_of_in_python), seed  # noqa: B023
        if not ours.count:
            continue
        if not ours.is_idempotent:
            assert ours.seal().message == theirs.seal().message, seed
            continue
        first = random.choice((0, 7, NUMBERS - 1, NUMBERS - 3, NUMBERS, -1))
        numbers = (random.choice((0, 2**63 - 1)), random.choice((0, 2**15 - 1)), first)
        assert outcome(ours.seal().numbered, *numbers) == outcome(theirs.seal().numbered, *numbers), seed
    assert min(added, refused, full) > 100


@pytest.mark.parametrize("is_idempotent", [False, True])
def test_batch_takes_what_fits_to_the_byte(*, is_idempotent: bool) -> None:
    """Around each size that a batch goes through, the core and the reference add the same events."""
    events = [EventData(bytes(size)) for size in (0, 100, 250, 251, 256, 9000)]
    whole = EventBatch(10**6, is_idempotent=is_idempotent)
    for event in events:
        assert whole.try_add(event)
        for limit in range(whole.size - 2, whole.size + 3):
            ours = EventBatch(limit, is_idempotent=is_idempotent)
            theirs = batch_in_python(ours, is_idempotent=is_idempotent)
            found = [outcome(batch.try_add, each) for batch in (ours, theirs) for each in events]
            assert found[: len(events)] == found[len(events) :]
            assert ours.size == theirs.size <= limit


def test_numbers_are_those_of_the_reference(cases: Cases) -> None:
    """Also in pieces that are damaged, too short for the room, or no bytes."""
    same = 0
    for seed, random in cases.seeded():
        pieces: list[Any] = []
        for _ in range(random.randrange(5)):
            made = EventData(bytes(random.choice((0, 3, 300))), properties=random.choice((None, None, {"a": 1})))
            pieces += pieces_of_in_python(made, idempotent=True)
        stamp = bytes(random.choice((len(STAMP), len(STAMP), 0, 5000)))
        for _ in range(random.choice((0, 0, 1))):
            if pieces:
                at = random.randrange(len(pieces))
                pieces[at] = random.choice(
                    (damage(random, pieces[at], 200), pieces[at], bytearray(pieces[at]), b"", None, pieces[at][:60])
                )
        if random.random() < 0.1 and pieces:
            pieces.pop()
        first = random.choice((0, 1, NUMBERS - 2, NUMBERS - 1, NUMBERS, -1, 2**40))
        given = random.choice((pieces, tuple(pieces)))
        found = outcome(core.number_events, given, stamp, first)
        assert found == outcome(number_events_in_python, given, stamp, first), seed
        same += found[0] is bytes
    assert same > 300


def test_packer_is_that_of_the_reference(cases: Cases) -> None:
    """The same pieces fit, to the byte; the others are left or refused, and so is what is not bytes."""
    added = full = refused = 0
    for seed, random in cases.seeded(per_seed=20):
        options: dict[str, Any] = {"partition_key": random.choice((None, "key")), "oversized": random.random() < 0.3}
        limit = random.choice((0, 1, 50, 255, 700, -1, 2**62, 2**63 - 1))
        ours, theirs = BatchPacker(limit, **options), core.references["PlainPacker"](limit, **options)
        for _ in range(20):
            if (at := random.randrange(60)) < 2:
                ours.size = theirs.size = random.choice((0, -5, 2**62, -(2**63)))
            elif at == 3 and ours.count:
                assert ours.take().message == theirs.take().message, seed
            left = theirs.limit - theirs.size
            sizes = (0, 1, 9, 100, max(0, min(left + random.randrange(-2, 3), 5000)))
            head: Any
            rest: Any
            head, rest = bytes(random.choice(sizes)), bytes(random.choice((0, 0, *sizes)))
            if at == 4:
                head, rest = random.choice(((bytearray(head), rest), (head, memoryview(rest)), (Bytes(head), rest)))
            found = outcome(ours.add, head, rest)
            assert found == outcome(theirs.add, head, rest), seed
            assert (ours.size, ours.count) == (theirs.size, theirs.count), seed
            added += found == (bool, True)
            full += found == (bool, False)
            refused += found[0] is EventTooLargeError
        assert ours.count == theirs.count == 0 or ours.take().message == theirs.take().message, seed
    assert min(added, full, refused) > 100


class Bytes(bytes):
    """A user's bytes."""

    def __len__(self) -> int:
        return 1


STAMP = SealedBatch([*pieces_of_in_python(EventData(b"x"), idempotent=True)], idempotent=True).numbered(1, 2, 3)
STAMP = STAMP[STAMP.index(sealing._FIRST_KEY) + sealing._ID_AT :][: 8 + len(sealing._BEFORE_EPOCH) + 2]
STAMP += sealing._BEFORE_NUMBER


class Numbered(EventData):
    """A user's subclass: other arguments, attributes of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(str(number).encode())
        self.number = number


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_event_to_send_is_pickled(protocol: int) -> None:
    """With what it has, a subclass with its own too; the state has one form in both builds."""
    event = EventData("text", properties={"a": 1}, subject="s")
    published(event, 7)
    for made in (event, EventData(b"x"), Numbered(5)):
        found = pickle.loads(pickle.dumps(made, protocol))
        assert type(found) is type(made)
        assert found.encode() == made.encode()
        assert found.published_sequence_number == made.published_sequence_number
        assert getattr(found, "number", None) == getattr(made, "number", None)
        assert copy.deepcopy(made).encode() == made.encode()
    theirs = core.references["PlainEventData"]("text", properties={"a": 1}, subject="s")
    published(theirs, 7)
    assert theirs.__getstate__() == event.__getstate__()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), {}),
        ((b"x",), {}),
        ((b"x", b"y"), {}),
        ((5,), {}),
        (("\ud800",), {}),
        ((b"x",), {"value": 5}),
        ((b"x",), {"body": b"y"}),
        ((), {"body": b"y"}),
        ((b"x",), {"unknown": 5}),
        ((b"x",), {"properties": {5: 5}}),
        ((b"x",), {"properties": {"a": 5}, "subject": "s"}),
    ],
)
def test_event_to_send_is_that_of_the_reference(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """The same event, or the same error."""

    def shown(kind: type[EventData]) -> tuple[Any, ...]:
        event = kind(*given, **named)
        return event.encode(), event.data, event.properties, event.standard, repr(event)

    assert outcome(shown, EventData) == outcome(shown, core.references["PlainEventData"])


def test_batch_whose_parts_are_replaced_reads_nothing_else() -> None:
    """Private attributes can be set: what they are is looked at before each use."""
    for name, value in [("_packer", None), ("_packer", BatchPacker), ("is_idempotent", "x"), ("_state", None)]:
        batch: Any = EventBatch(1000)
        setattr(batch, name, value)
        outcome(batch.try_add, EventData(b"x"))
    packer: Any = BatchPacker(1000)
    with pytest.raises(TypeError):
        packer._pieces = ()
    event: Any = EventData(b"x")
    for attribute, odd in [("_payload", None), ("_payload", "text"), ("_properties", 5), ("standard", 5)]:
        setattr(event, attribute, odd)
        outcome(EventBatch(1000).try_add, event)
    with pytest.raises(TypeError):
        core.seal_events(object, None, None, b"", 0, 1)


# -------------------------------------------------------------------------------------- Intake, BufferRoom, receipts

PARTITIONS = ("0", "1", "2")
HERE = SimpleNamespace(_thread_id=threading.get_ident())
SMALL = sum(map(len, pieces_of_in_python(EventData(bytes(1)))))
"""The size of one of the events that are sent, in bytes: some batches are full to the byte."""


class Buffer:
    """A buffer for events that are accepted at once, and what it has in every part.

    Args:
        intake_class: Accepts the events; likewise the room.
        random: Chooses how much fits, and how events are encoded; the same for both builds.
    """

    def __init__(self, intake_class: Any, room_class: Any, random: Random) -> None:
        options: dict[str, Any] = {"idempotent": random.random() < 0.3}
        most = random.choice((1, 3, 10, 1000))
        self.reports: list[Any] = []
        self.batches: BatchAccumulator[Any] = BatchAccumulator(
            max_events=most,
            max_bytes=(batch_bytes := random.choice((50, 400, 2 * SMALL, 3 * SMALL, 2**80))),
            max_wait_time=random.choice((0, 1, inf)),
            on_begun=lambda batch: self.reports.append((batch.partition_id, len(batch.events))),
            on_ready=lambda lane: self.reports.append(lane.partition_id),
            stamped=(stamping := random.random() < 0.1),
            **options,
        )
        self.lanes: dict[str | None, Lane[Any]] = {each: Lane(each) for each in PARTITIONS}
        self.outbox: Any = SimpleNamespace(add=self.batches.add, lanes=self.lanes, yield_at=inf)
        self.queue: Any = SimpleNamespace(wanting=0)
        kind = random.choice((HashRouter, HashRouter, RoundRobinRouter, RingRouter, Nowhere))
        hook = random.choice((None, None, None, lambda event: EventData(event.body, properties={"hook": 1})))
        self.intake = intake_class(kind(), self.outbox, encode=hook, max_events=most, stamping=stamping, **options)
        self.room = room_class(
            PARTITIONS,
            max_events=(events := random.choice((6, 50, 2**80))),
            max_bytes=(held_bytes := random.choice((500, 20_000, 2**80))),
            max_partition_events=(partition_events := random.choice((None, None, 1, 3))),
            max_partition_bytes=(partition_bytes := random.choice((None, None, 200, 2**80))),
        )
        bounds = (batch_bytes, events, held_bytes, partition_events, partition_bytes)
        self.is_wide = (kind, hook, stamping, most) == (HashRouter, None, False, 1000) and {*bounds} <= {None, 2**80}
        """Whether it takes a round of plain events as they are."""
        self.now = 0.0
        self.intake.begin(PARTITIONS, self.room, self.queue, lambda: self.now, HERE)

    def do(self, random: Random) -> Any:
        """Do one thing, and return what came of it."""
        self.now += random.choice((0, 0.5))
        self.queue.wanting = random.random() < 0.05
        self.outbox.yield_at = random.choice((inf,) * 9 + (self.now, self.now + 0.1))
        self.intake.blocked = random.random() < 0.05
        match random.randrange(12):
            case 0:
                lane = self.lanes[random.choice(PARTITIONS)]
                if (batch := lane.take()) is not None:
                    self.room.release(lane.partition_id, len(batch.events), batch.size)
                    self.intake.free(batch.events)
                return None
            case 1:
                return len(self.batches.expire(self.now))
            case 2:
                return outcome(
                    self.room.reserve, random.choice((*PARTITIONS, "3", [])), random.choice((0, 1, 9, 2**50))
                )[1]
        event = random.choice((EventData(bytes(1)), event_to_send(random)))
        partition_id: Any = random.choice((None, None, "0", "2", "3", "", 5, []))
        partition_key: Any = random.choice((None, None, None, "key", "", "k" * 200, 5))
        encoded = random.choice((None, None, None, (b"head", b"rest"), (b"", b""), (bytearray(b"x"), b"y")))
        kind, found = outcome(self.intake.accept, event, partition_id, partition_key, encoded)
        if kind is DeliveryReceipt:
            batch, index = found._batch, found._index
            return batch.events[index] is event, index, repr(found), found.done()
        return kind, str(found), repr(self.intake.take_refused()).partition("<")[0]

    @property
    def state(self) -> Any:
        """What it holds."""
        batches = [[*lane.full, *([lane.filling] if lane.filling else [])] for lane in self.lanes.values()]
        held = [[(batch._pieces, batch.size) for batch in each] for each in batches]
        filling = [lane.filling is not None for lane in self.lanes.values()]
        room = [getattr(self.room, name) for name in ("_held", "_free_bytes", "_free_events", "bytes", "events")]
        return filling, held, room, self.reports, self.batches.deadline


class Nowhere:
    """A user's router that errs."""

    def __init__(self) -> None:
        self.calls = 0

    def route(self, event: EventData, partition_key: str | None, partition_ids: Any) -> Any:
        """Return a partition, or something else."""
        self.calls += 1
        if self.calls % 7 == 0:
            raise RuntimeError("no route")
        return ("0", "1", "7", None)[self.calls % 4]


def test_what_is_accepted_is_that_of_the_reference(cases: Cases) -> None:
    """The same events are accepted, wait or are refused, and lanes, batches and room are the same after each."""
    accepted = waiting = refused = 0
    for seed, ours_random in cases.seeded(per_seed=20):
        ours = Buffer(Intake, BufferRoom, ours_random)
        theirs = Buffer(core.references["PlainIntake"], core.references["PlainRoom"], theirs_random := Random(seed))
        for _ in range(20):
            found = ours.do(ours_random)
            assert found == theirs.do(theirs_random), seed
            assert ours.state == theirs.state, seed
            if isinstance(found, tuple):
                accepted += found[0] is True
                waiting += found[0] is type(None)
                refused += isinstance(found[0], type) and issubclass(found[0], Exception)
    assert min(accepted, waiting, refused) > 100


def test_room_is_that_of_the_reference(cases: Cases) -> None:
    """The same room is reserved and released within the same bounds, for partitions that share it and for others."""
    reserved = full = refused = 0
    for seed, random in cases.seeded(per_seed=50):
        options: dict[str, Any] = {
            "max_events": random.choice((3, 6, 50, 2**80)),
            "max_bytes": random.choice((1, 500, 20_000, 2**80)),
            "max_partition_events": random.choice((None, None, 1, 3)),
            "max_partition_bytes": random.choice((None, None, 200, 2**80)),
        }
        ours, theirs = BufferRoom(PARTITIONS, **options), core.references["PlainRoom"](PARTITIONS, **options)
        held: list[tuple[str, int]] = []
        for _ in range(50):
            if held and random.random() < 0.3:
                partition_id, size = held.pop(random.randrange(len(held)))
                assert ours.release(partition_id, 1, size) == theirs.release(partition_id, 1, size), seed
                continue
            chosen: Any = random.choice((*PARTITIONS * 5, "3", None, [], 0))
            size = random.choice((0, 1, 80, 99, 100, 101, 250, 6000, 2**40, random.randrange(300)))
            found = outcome(ours.reserve, chosen, size)
            assert found == outcome(theirs.reserve, chosen, size), (seed, found, options, chosen, size)
            state = [[getattr(room, name) for name in type(theirs).__slots__] for room in (ours, theirs)]
            assert state[0] == state[1], seed
            if found == (bool, True):
                held.append((chosen, size))
            reserved += found == (bool, True)
            full += found == (bool, False)
            refused += found[0] in (KeyError, TypeError)
    assert min(reserved, full, refused) > 100


def test_intake_whose_parts_are_replaced_reads_nothing_else() -> None:
    """Private attributes can be set: what they are is looked at before each use."""
    for name, value in [
        ("_lanes", None), ("_partition_ids", ()), ("_partition_ids", None), ("_room", None), ("_queue", None),
        ("_outbox", None), ("_router", HashRouter), ("_add", None), ("_most", 0),
    ]:  # fmt: skip
        buffer = Buffer(Intake, BufferRoom, Random(1))
        try:
            setattr(buffer.intake, name, value)
        except TypeError:
            continue
        outcome(buffer.intake.accept, EventData(b"x"), None, None)
    odd: tuple[Any, ...] = ([], [1], [1, 2, 3], None, {}, [None, None])
    for held in odd:
        room: Any = BufferRoom(PARTITIONS, max_events=6, max_bytes=500)
        room._held["0"] = held
        with pytest.raises((TypeError, ValueError)):
            room.reserve("0", 5)
    for size in (-1, 2**63 - 1, 2**70, None):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            BufferRoom(PARTITIONS, max_events=6, max_bytes=500).reserve("0", size)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        core.accept_events(HashRouter, object, envelope_head)


# ------------------------------------------------------------------ copies, pickles, texts and subclasses of each class


def _batch(kind: Any) -> Any:
    batch = kind(1000, is_idempotent=True)
    assert batch.try_add(EventData(b"x", properties={"a": 1}))
    return batch


def _packer(kind: Any) -> Any:
    packer = kind(1000, partition_key="key")
    assert packer.add(b"head", b"rest")
    return packer


def _room(kind: Any) -> Any:
    room = kind(PARTITIONS, max_events=10, max_bytes=1000, max_partition_events=5)
    assert room.reserve("0", 300)
    return room


def _intake(kind: Any) -> Any:
    outbox = SimpleNamespace(add=max, lanes={}, yield_at=inf)
    intake = kind(HashRouter(), outbox, encode=None, max_events=5, stamping=False, idempotent=False)
    intake.begin(PARTITIONS, _room(BufferRoom), SimpleNamespace(wanting=0), monotonic, HERE)
    return intake


INSTANCES: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "EncodedEvent": (ReceivedEvent, lambda kind: kind(SOUND, ("origin", 1))),
    "PlainEventData": (EventData, lambda kind: kind("text", properties={"a": 1}, subject="s")),
    "PlainBatch": (EventBatch, _batch),
    "PlainPacker": (BatchPacker, _packer),
    "PlainRoom": (BufferRoom, _room),
    "PlainReceipt": (DeliveryReceipt, lambda kind: kind(Batch("0", 900, idempotent=False, stamped=False), 0)),
    "PlainIntake": (Intake, _intake),
}
"""Of what users may copy or pickle, by the name of the compiled part: the whole class, and what makes an instance of it
or of its reference."""


class _Pickler(pickle.Pickler):
    """Pickles instances of a class, and of its reference, by the same names."""

    def __init__(self, file: BytesIO, protocol: int, kinds: dict[str, type]) -> None:
        super().__init__(file, protocol)
        self._names = {kind: name for name, kind in kinds.items()}

    def persistent_id(self, found: Any) -> str | None:
        return self._names.get(found) if isinstance(found, type) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, kinds: dict[str, type]) -> None:
        super().__init__(file)
        self.persistent_load = kinds.__getitem__  # type: ignore[method-assign]  # the builds differ in it


def kinds_of(kind: type) -> dict[str, type]:
    """Return a class and subclasses as users write them."""
    return {
        "itself": kind,
        "open": type("Open", (kind,), {}),
        "slotted": type("Slotted", (kind,), {"__slots__": ("more", "unset")}),
        "closed": type("Closed", (kind,), {"__slots__": (), "__repr__": lambda _: "its own"}),
        "mixed": type("Mixed", (kind, Mixin), {}),
    }


class Mixin:
    """A second base class of a user's."""

    def mixed(self) -> str:
        """Return what the class does not."""
        return "mixed"


def shown(found: Any, kinds: dict[str, type]) -> Any:
    """Return something as what it says of itself, without what differs between equal things."""
    if type(found) in kinds.values():
        name = next(name for name, kind in kinds.items() if kind is type(found))
        return name, shown(found.__getstate__(), kinds)
    if isinstance(found, tuple | list):
        return [shown(each, kinds) for each in found]
    if isinstance(found, dict):
        return {key: shown(value, kinds) for key, value in found.items()}
    if isinstance(found, MethodType):
        return found.__name__, shown(found.__self__, kinds)
    if isinstance(found, BatchPacker | Batch | BufferRoom | EventData):
        return type(found), shown(found.__getstate__(), kinds)
    return re.sub(" at 0x[0-9a-f]+", "", repr(found))


def pickled(instance: Any, protocol: int, kinds: dict[str, type], others: dict[str, type]) -> Any:
    """Return an instance of the other build that was pickled in one."""
    file = BytesIO()
    _Pickler(file, protocol, kinds).dump(instance)
    file.seek(0)
    return shown(_Unpickler(file, others).load(), others)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "state": lambda instance: instance.__getstate__(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "reduce": lambda instance: [instance.__reduce_ex__(protocol)[2:] for protocol in range(6)],
    "repr": lambda instance: re.sub("<.*>", "", repr(instance)),  # that of `object` has the name of the class's module
    "str": lambda instance: str(instance) == repr(instance) == format(instance),
    "equal": lambda instance: (instance == instance, instance == copy.copy(instance), instance != None),  # noqa: E711 - it is what users' code may do
    "hash": lambda instance: hash(instance) == hash(instance),
    "less": lambda instance: instance < instance,
    "bool": bool,
    "len": len,
    "iter": iter,
    "call": lambda instance: instance(),
    "weak reference": lambda instance: weakref.ref(instance)() is instance,
    "new attribute": lambda instance: setattr(instance, "unknown", 5),
    "attribute": lambda instance: instance.unknown,
    "own attributes": lambda instance: vars(instance),
    "names": lambda instance: [name for name in dir(instance) if not name.startswith("_")],
    "is tracked": gc.is_tracked,
}
"""What any object can be asked for."""


@pytest.mark.parametrize("name", INSTANCES if core else [])
def test_object_is_copied_pickled_and_shown_as_the_reference(name: str) -> None:
    """An instance of each class and of users' subclasses: the same result or error, and pickles cross the builds."""
    whole, make = INSTANCES[name]
    ours, theirs = kinds_of(whole), kinds_of(core.references[name])
    for each in ours:
        found, expected = make(ours[each]), make(theirs[each])
        for instance in (found, expected):
            if each in ("open", "slotted"):
                instance.more = [5]
        for what, operation in OPERATIONS.items():
            results = [outcome(operation, instance) for instance in (found, expected)]
            results = [
                (kind.__name__, re.sub("'[A-Za-z.]*Error'|at 0x[0-9a-f]+", "", result))
                if isinstance(kind, type) and issubclass(kind, Exception)
                else shown(result, kinds)
                for (kind, result), kinds in zip(results, (ours, theirs), strict=True)
            ]
            assert results[0] == results[1], (each, what)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            ways = [(found, ours, theirs), (expected, theirs, ours), (found, ours, ours), (expected, theirs, theirs)]
            made = [outcome(pickled, instance, protocol, of, to) for instance, of, to in ways]
            assert made[1:] == made[:-1], (each, protocol)


def test_changed_copy_of_a_batch_leaves_the_batch() -> None:
    """Both kinds of deep copy have a message of their own."""
    batch = _batch(EventBatch)
    size = batch.size
    for made in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert made.try_add(EventData(b"another", properties={"b": 2}))
        assert (made.count, batch.count, batch.size, len(batch.events)) == (2, 1, size, 1)
        assert made.seal().numbered(1, 2, 3).startswith(batch.seal().numbered(1, 2, 3)[:9])


# ------------------------------------------------------------------------------------------------------------- memory

ROUND = 500


def _receive(data: bytes, form: Form) -> list[bytes]:
    """Receive and read events; return their messages."""
    payloads: list[bytes] = []
    core.take_run(form, data, 0, 2**20, ROUND, payloads)
    for payload in payloads:
        event = ReceivedEvent(payload, "origin")
        _ = (
            event.body,
            event.offset,
            event.sequence_number,
            event.enqueued_time,
            event.partition_key,
            event.body_as_str(),
        )
    return payloads


def _send(payloads: list[bytes], buffer: Buffer, body: bytes) -> None:
    """Make as many events, and batch, number and buffer them."""
    batch = EventBatch(10**6, is_idempotent=True)
    for _ in payloads:
        batch.try_add(EventData(body))
    batch.seal().numbered(1, 2, NUMBERS - 5)
    for _ in payloads:
        assert type(buffer.intake.accept(EventData(body), None, None)) is DeliveryReceipt
    for lane in buffer.lanes.values():
        buffer.batches.flush()
        while (taken := lane.take()) is not None:
            buffer.room.release(lane.partition_id, len(taken.events), taken.size)
    buffer.reports.clear()


@pytest.mark.long
def test_memory_is_flat() -> None:
    """Over a hundred million events: no block, no reference and no page more than after the first ones.

    A tenth of them is sent too, twice each.
    """
    frames = [
        frame(
            Transfer(handle=0, delivery_id=2**20 + number, delivery_tag=b"1234", message_format=0, settled=True), SOUND
        )
        for number in range(ROUND)
    ]  # fmt: skip
    data = b"".join(frames)
    form = form_of_frame(data)
    assert form is not None
    body = bytes(bytearray(b"x" * 100))
    buffer = next(each for seed in range(10_000) if (each := Buffer(Intake, BufferRoom, Random(seed))).is_wide)
    watched = (data, body, form, form.rest, SOUND, EventData, ReceivedEvent, DeliveryReceipt, None, b"", "", 0, 1)
    process = psutil.Process()
    measured: list[tuple[int, int, list[int]]] = []
    payloads: list[bytes] = []
    for rounds in (1_000, 100_000_000 // ROUND):
        for number in range(rounds):
            payloads = _receive(data, form)
            assert len(payloads) == ROUND
            if number % 10 == 0:
                _send(payloads, buffer, body)
        payloads.clear()
        gc.collect()
        counts = [sys.getrefcount(each) for each in watched]
        measured.append((process.memory_info().rss, sys.getallocatedblocks(), counts))
    (first_rss, first_blocks, first_counts), (rss, blocks, counts) = measured
    assert rss - first_rss < 4 * 2**20
    assert blocks - first_blocks < 1_000
    assert all(abs(now - then) < 50 for now, then in zip(counts, first_counts, strict=True)), measured


@pytest.mark.parametrize("kind", [EventData, ReceivedEvent, EventBatch, DeliveryReceipt])
def test_signatures_are_those_of_the_reference(kind: type) -> None:
    """`inspect.signature` of the class and of its public methods, for `help` and editors; a subclass has its own."""
    references = {} if compiled.core is None else compiled.core.references
    reference = next((each for each in references.values() if each.__name__ == kind.__name__), kind)
    assert inspect.signature(kind) == inspect.signature(reference)
    for name, method in vars(reference).items():
        if isinstance(method, FunctionType) and not name.startswith("_"):
            assert inspect.signature(getattr(kind, name)) == inspect.signature(method), name

    class Plain(kind):  # type: ignore[misc]  # a parameter
        __slots__ = ()

    class Other(Plain):
        def __init__(self, other: int) -> None:
            raise AssertionError

    assert inspect.signature(Plain) == inspect.signature(reference)
    assert list(inspect.signature(Other).parameters) == ["other"]


# ------------------------------------------------------------------------------- EventCache, CreditWindow, BufferBudget


@pytest.mark.timeout(1800)
def test_cache_credit_and_accounts_are_those_of_the_reference(pytestconfig: pytest.Config) -> None:
    """What cursors, streams, the credit and the accounts return and hold is the same in random histories."""
    count = 20_000 if pytestconfig.getoption("--long") else 1_000
    arguments = [sys.executable, "-m", "tests.unit.held_histories", str(seed_of_today()), str(count)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENTPUMP_")}
    ours = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    theirs = subprocess.run(
        arguments, env=environment | {compiled.PURE: "1"}, capture_output=True, text=True, check=True
    )
    lines = ours.stdout.splitlines()
    assert len(lines) == count
    for line, expected in zip(lines, theirs.stdout.splitlines(), strict=True):
        assert line == expected


def test_events_received_are_those_of_the_reference() -> None:
    """They are of the same class, have the same message and origin, and are read alike."""
    raw = ReceivedEvent.build(b"x", offset="7", sequence_number=5, enqueued_time=datetime(2026, 1, 1, tzinfo=UTC)).raw
    (found,), (expected,) = received_events(("a", 1), [raw]), received_events_in_python(("a", 1), [raw])
    assert type(found) is type(expected) is ReceivedEvent
    assert (found.raw, found.origin, found.sequence_number) == (expected.raw, expected.origin, expected.sequence_number)
    assert received_events(None, []) == []
    for unsound in (None, (raw,)):
        with pytest.raises(TypeError):
            received_events(None, cast("list[bytes]", unsound))


@pytest.mark.parametrize("value", [None, [], {}, (), 0.5], ids=repr)
def test_cache_whose_parts_are_replaced_reads_nothing_else(value: object) -> None:
    """Private attributes can be set: what they are is looked at before each use."""
    parts: list[tuple[Any, tuple[str, ...]]] = [
        (EventCache, ("_ahead", "_chunks", "_cursors", "_found", "_hands", "_index", "_wrap")),
        (Cursor, ("_cache", "hand")),
        (Account, ("_budget",)),
        (FeedCursor, ("_cache", "_cursor", "_feed", "_timer", "_waiter")),
    ]
    for kind, names in parts:
        for name in names:
            cache: EventCache[bytes] = EventCache(list)
            cursor, account = cache.cursor(), BufferBudget(100, 10).open(lambda: None)
            feed: PartitionFeed[bytes] = PartitionFeed.__new__(PartitionFeed)
            reader: FeedCursor[bytes] = FeedCursor(feed, cursor, cache)
            for each in (cache, cursor, account, reader):
                if type(each) is kind:
                    with suppress(TypeError):
                        setattr(each, name, value)
            calls: list[Callable[[], object]] = [
                lambda: cache.append([b"x"], 1),  # noqa: B023 - called below
                lambda: cursor.available,  # noqa: B023
                lambda: cursor.read(1),  # noqa: B023
                lambda: reader.take(1),  # noqa: B023
                lambda: cursor.settle(),  # noqa: B023
                lambda: reader.settle(),  # noqa: B023
                lambda: reader.wait(None),  # noqa: B023
                lambda: reader.arrived(),  # noqa: B023
                lambda: account.received(1),  # noqa: B023
                lambda: account.holds(1),  # noqa: B023
            ]
            for call in calls:
                with suppress(AttributeError, TypeError, IndexError, KeyError):
                    call()


@pytest.mark.parametrize("value", [None, [], {}, (), 0.5, 2**62, -1], ids=repr)
def test_connection_whose_parts_are_replaced_receives_nothing_else(value: object) -> None:
    """Likewise: transfers of a known form are received, or there is an error."""
    transfer = frame(Transfer(handle=0, delivery_id=0, delivery_tag=b"1234", message_format=0, settled=True), b"x")
    parts: list[tuple[type, tuple[str, ...]]] = [
        (Connection, ("_events", "_forms", "_inboxes", "_is_plain", "_max_frame_size", "_turn", "pending", "state")),
        (Link, ("allowance", "credit", "delivery_count", "incoming", "is_receiver", "largest_message", "session")),
        (Link, ("state",)),
        (Session, ("incoming_window", "next_incoming_id", "reopens_at", "state")),
        (Reassembly, ("buffer",)),
    ]
    for kind, names in parts:
        for name in names:
            pair = Pair().open()
            _, link = pair.link(pair.session()[0], is_receiver=False)
            link.set_credit(100)
            (found,) = pair.server.receive(transfer)
            assert isinstance(found, Messages)
            for each in (pair.server, link, link.session, link.incoming):
                if type(each) is kind:
                    with suppress(TypeError, OverflowError):
                        setattr(each, name, value)
            with suppress(AttributeError, TypeError, ValueError, OverflowError, AssertionError):
                assert type(pair.server.receive(transfer * 2)) is list
    pair = Pair().open()
    _, link = pair.link(pair.session()[0], is_receiver=False)
    link.set_credit(100)
    pair.server.receive(transfer)
    for form in ((), None, (b"",) * 8, (None,) * 8):
        forms_of(pair.server)[transfer[4:16]] = form
        with suppress(AttributeError, TypeError, ValueError):
            pair.server.receive(transfer)


def _member(shared: object) -> tuple[MemberFeed, PartitionFeed[ReceivedEvent]]:
    """Return what a subscription reads, and the feed that it reads from."""
    hub = FakeHub(partitions=1)
    spec = ReceiveLinkSpec(hub.name, "$Default", "0", EventPosition.earliest())
    settings, budget, wrap = FeedSettings(hub=hub.name), BufferBudget(4000, 4000), partial(received_events, None)
    feed = PartitionFeed(FakeTransport(hub), spec, settings, wrap=wrap, rng=Random(1), budget=budget)
    member: MemberFeed = MemberFeed.__new__(MemberFeed)
    parts = {"_cursor": feed.cursor(), "_feed": feed, "_shared": shared, "has_own_link": False}
    for name, value in (parts | dict.fromkeys(("_unprocessed", "_skip_below", "_taken", "selection"))).items():
        setattr(member, name, value)
    return member, feed


@pytest.mark.parametrize("value", [None, [], {}, (), 0.5], ids=repr)
async def test_member_whose_parts_are_replaced_takes_nothing_else(value: object) -> None:
    """Likewise: of what a subscription reads, and of the feed that it reads."""
    names = ("_cursor", "_feed", "_shared", "_skip_below", "_taken", "_unprocessed", "selection", "has_own_link")
    for name in (*names, "facts", "account", "_cache", "_credit", "_cursors", "_kept", "_plain", "_streams", "now"):
        member, feed = _member(SimpleNamespace(is_shared=False, is_watching=False))
        with suppress(TypeError, AttributeError):
            setattr(member if name in names else feed, name, value)
        for call in (lambda: feed.messages([b"x"]), lambda: member.take(5), lambda: member.processed()):  # noqa: B023
            with suppress(AttributeError, TypeError, IndexError, KeyError, AssertionError):
                call()


@pytest.mark.parametrize("how", ["take", "_take"])
async def test_member_that_gets_a_link_of_its_own_as_it_reads_looks_for_the_others_at_once(how: str) -> None:
    """It is found to hold them back by what it has read just now."""
    called: list[str] = []

    def observe() -> None:
        called.append("observe")
        member.has_own_link = True

    shared = SimpleNamespace(
        is_shared=True, is_watching=True, observe=observe, rejoin=lambda _: called.append("rejoin")
    )
    member, feed = _member(shared)
    feed.messages([SOUND])
    assert [each.raw for each in getattr(member, how)(5)] == [SOUND]
    assert called == ["observe", "rejoin"]


async def test_member_whose_cursor_is_replaced_while_it_takes_has_taken() -> None:
    """What is called within the call may do so: the cursor lives as long as it is read."""
    member, feed = _member(SimpleNamespace(is_shared=False))

    class Limit(int):
        def __index__(self) -> int:
            for owner, name, value in ((member, "_cursor", None), (feed, "_cursors", ()), (feed, "_plain", ())):
                setattr(owner, name, value)
            return 5

    for limit in (Limit(5), 5):
        feed.messages([SOUND])
        with suppress(TypeError):
            member.take(limit)
    gc.collect()


def test_link_is_copied() -> None:
    """As every other object: a slot for weak references is no state."""
    pair = Pair().open()
    link, _ = pair.link(pair.session()[0], is_receiver=True)
    assert copy.copy(link).name == link.name
