"""The compiled core does what its references do, value or error, on sound, damaged and hostile bytes.

One seed is one case: the seeds begin at the day's number, as those of `tests/fuzz` do. The long form has a million.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from eventpump import EventBatch, EventData, EventError, EventTooLargeError, ReceivedEvent, compiled
from eventpump.amqp import receiver
from eventpump.amqp.message import AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.performatives import Transfer, decode_performative
from eventpump.amqp.receiver import Form, form_of
from eventpump.amqp.sections import section_spans
from eventpump.amqp.types import Symbol, Timestamp
from eventpump.eventhubs import events as module
from eventpump.eventhubs import sealing
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import NUMBERS
from eventpump.eventhubs.sealing import SealedBatch, number_events_in_python, pieces_of_in_python
from eventpump.producer.batch import BatchState
from eventpump.producer.packing import BatchPacker
from tests.fuzz.entry import seed_of_today

core: Any = compiled.core
pytestmark = [
    pytest.mark.skipif(core is None, reason="this is the build without the compiled core"),
    pytest.mark.timeout(4 * 3600),  # a million cases
]


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Iterator[int]:
    """The seeds of the cases of one test."""
    first = seed_of_today()
    return iter(range(first, first + (1_000_000 if request.config.getoption("--long") else 3_000)))


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns with its type, or the type and text of its error."""
    try:
        found = call(*arguments)
    except Exception as error:
        return type(error), str(error)
    return type(found), found


def damage(random: Random, raw: bytes, reach: int) -> bytes:
    """Change, remove, insert or cut bytes of the first `reach`; return the bytes as they are a quarter of the time."""
    damaged = bytearray(raw)
    for _ in range(random.choice((0, 1, 1, 3))):
        at = random.randrange(min(len(damaged), reach) + 1)
        match random.randrange(5):
            case 0 if at < len(damaged):
                damaged[at] = random.choice((0, 1, 0x53, 0x72, 0x7F, 0x80, 0xA0, 0xB0, 0xC1, 0xD1, 0xFF))
            case 1 if at < len(damaged):
                damaged[at] ^= 1 << random.randrange(8)
            case 2:
                del damaged[at : at + random.choice((1, 1, 2, 4, 30))]
            case 3:
                damaged[at:at] = random.randbytes(random.choice((1, 2, 4)))
            case _:
                del damaged[random.randrange(len(damaged) + 1) :]
    return bytes(damaged)


def counted(seeds: Iterator[int]) -> Iterator[tuple[int, Random]]:
    """Return each seed with its random numbers."""
    return ((seed, Random(seed)) for seed in seeds)


# --------------------------------------------------------------------------------------------------------- take_run


def frame(transfer: Transfer, payload: bytes) -> bytes:
    """Return a transfer as a frame on channel 0."""
    body = transfer.encode() + payload
    return (len(body) + 8).to_bytes(4, "big") + b"\x02\x00\x00\x00" + body


def form_of_frame(data: bytes) -> Form | None:
    """Return the form of the first frame."""
    size = int.from_bytes(data[:4], "big")
    transfer, payload = decode_performative(data, 8, size)
    return form_of(transfer, data, 0, payload, 0)


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


def test_run_is_that_of_the_reference(seeds: Iterator[int]) -> None:
    """The same payloads, and the same end, from wherever the run begins and however little may be taken."""
    taken = 0
    for seed, random in counted(seeds):
        sound = stream(random)
        form = form_of_frame(sound)
        data = damage(random, sound, len(sound))
        if form is None:
            continue
        pos = random.choice((0, 0, 0, random.randrange(len(data) + 5)))
        largest = random.choice((2**20, 2**20, 2**62, 300, form.payload_at, 0))
        room = random.choice((5, 2048, 1, 0, -1))
        found, expected = [b"before"], [b"before"]
        end = core.take_run(form, data, pos, largest, room, found)
        assert end == receiver.take_run_in_python(form, data, pos, largest, room, expected), seed
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
    "value": lambda event: event.value,
    "properties": lambda event: event.properties,
    "raw": lambda event: event.raw,
    "origin": lambda event: event.origin,
    "repr": repr,
}


def partition_key(event: ReceivedEvent) -> str | None:
    """Read the key."""
    return event.partition_key


def message(random: Random) -> bytes:
    """Return an event as services and their senders may write it."""
    annotations: dict[Any, Any] = {
        SEQUENCE_NUMBER: random.choice((0, 5, -1, 128, 2**40, -(2**63), 2**63 - 1, "text")),
        OFFSET: random.choice(("0", "4294967296", "é", "x" * 200, "x" * 300, 5)),
        ENQUEUED_TIME: Timestamp(random.choice((0, 1_700_000_000_123, random.randrange(-(2**62), 2**62)))),
        PARTITION_KEY: random.choice(("k", "key", "é" * 100, None, b"b", [1, 2], True, Symbol("s"))),
        Symbol("x-opt-other"): random.choice((1, None, "text", {"a": [1, 2.0]}, b"", Timestamp(5))),
    }
    for key in random.sample(list(annotations), random.choice((0, 1, 2, 2, 2, 5))):
        if key is PARTITION_KEY or random.random() < 0.3:
            del annotations[key]
    if random.random() < 0.1:  # written twice, which no dictionary can be
        annotations[Symbol(random.choice(("x-opt-offseu", "x-opt-partition-kez")))] = random.choice(("9", 9))
    entries = list(annotations.items())
    random.shuffle(entries)
    made = Message(message_annotations=dict(entries))
    parts = tuple(random.choice((b"", b"a", "é".encode() * 200, random.randbytes(9))) for _ in range(3))
    made.body = random.choice((Data(parts[:1]), Data(parts[:1]), Data(parts[:1]), Data(parts), AmqpValue("text"), None))
    made.header = random.choice((None, None, Header(durable=True)))
    made.properties = random.choice((None, Properties(message_id="m", subject="s" * 300)))
    made.application_properties = random.choice((None, {"a": 1, "b": "two"}))
    made.footer = random.choice((None, None, None, {Symbol("f"): 1}))
    raw = made.encode().replace(b"x-opt-offseu", b"x-opt-offset").replace(b"partition-kez", b"partition-key")
    if random.random() < 0.1:
        _, start, end = random.choice(section_spans(raw) or [(0, 0, 0)])
        raw = random.choice((raw[:start] + raw[end:] + raw[start:end], raw + raw[start:end], raw[start:end] + raw))
    return raw


def test_event_is_that_of_the_reference(seeds: Iterator[int]) -> None:
    """Every attribute has the same value or error, in whatever order they are read."""
    found = refused = keys = 0
    for seed, random in counted(seeds):
        sound = message(random)
        raw = damage(random, sound, random.choice((12, 200, len(sound))))
        ours, theirs = ReceivedEvent(raw, "origin"), reference(raw, "origin")
        for name in random.sample(list(READS), 6):
            value = outcome(READS[name], ours)
            assert value == outcome(READS[name], theirs), (seed, name)
            found += name == "offset" and value[0] is str
            refused += value[0] is EventError
        # The reference refuses a message whose annotations are sound and whose properties are not, until it has read
        # one of its layout: then it reads the key alone, as the core always does.
        key, expected = outcome(partition_key, ours), outcome(partition_key, theirs)
        assert key == expected or (expected[0] is EventError and key[0] in (str, type(None))), seed
        assert outcome(partition_key, ReceivedEvent(raw)) == key, seed
        keys += key[0] is str
    assert min(found, refused, keys) > 200


def test_key_that_a_message_has_twice_is_left_to_the_reference() -> None:
    """A map may be written so; the general decoder decides which of them counts."""
    message = Message.decode(SOUND)
    assert message.message_annotations is not None
    message.message_annotations[Symbol("x-opt-partition-kez")] = "other"
    raw = message.encode().replace(b"kez", b"key")
    assert ReceivedEvent(raw).partition_key == reference(raw).partition_key == "other"


def test_time_is_that_of_the_reference(seeds: Iterator[int]) -> None:
    """Random and outermost milliseconds."""
    edges = [*range(-3, 4), 4_000_000_000_000, 3_999_999_999_999, 951_782_400_000, 951_868_799_999, 2**63 - 1, -(2**63)]
    days = range(0, 4_000_000_000_000, 86_400_000)
    for milliseconds in [*edges, *days, *(random.randrange(4_100_000_000_000) for _, random in counted(seeds))]:
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
    assert len(names) == 8
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
        assert outcome(partition_key, event)[1] in (None, "k") or raw is None
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
    for read in (*READS.values(), partition_key):
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
    match random.randrange(12):
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
            event.published_sequence_number = 5
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


def batch_in_python(batch: EventBatch, **options: Any) -> EventBatch:
    """Return a batch like a new one, of the references."""
    made: EventBatch = core.references["PlainBatch"](batch.max_size_in_bytes, **options)
    made._packer = core.references["PlainPacker"](
        batch.max_size_in_bytes,
        partition_key=batch.partition_key if batch.partition_id is None else None,
        idempotent=batch.is_idempotent,
        stamped=batch.is_stamped,
    )
    made._add = made._packer.add
    return made


def test_batch_is_that_of_the_reference(seeds: Iterator[int]) -> None:
    """The same events are added or refused, with the same sizes, and make the same message."""
    added = refused = full = 0
    for seed, random in counted(seeds):
        if seed % 3:
            continue
        options: dict[str, Any] = {"is_idempotent": random.random() < 0.5, "is_stamped": random.random() < 0.2}
        if random.random() < 0.2:
            options |= {"partition_key": "key", "partition_id": random.choice(("0", None))}
            options["is_idempotent"] = options["is_idempotent"] and options["partition_id"] is not None
        ours = EventBatch(random.choice((0, 300, 1000, 10_000, 10**6)), **options)
        theirs = batch_in_python(ours, **options)
        for _ in range(random.randrange(9)):
            event = event_to_send(random)
            ours.state = theirs.state = random.choice((BatchState.OPEN,) * 9 + tuple(BatchState))
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


def test_numbers_are_those_of_the_reference(seeds: Iterator[int]) -> None:
    """Also in pieces that are damaged, too short for the room, or no bytes."""
    same = 0
    for seed, random in counted(seeds):
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
    event.published_sequence_number = 7
    for made in (event, EventData(b"x"), Numbered(5)):
        found = pickle.loads(pickle.dumps(made, protocol))
        assert type(found) is type(made)
        assert found.encode() == made.encode()
        assert found.published_sequence_number == made.published_sequence_number
        assert getattr(found, "number", None) == getattr(made, "number", None)
        assert copy.deepcopy(made).encode() == made.encode()
    theirs = core.references["PlainEventData"]("text", properties={"a": 1}, subject="s")
    theirs.published_sequence_number = 7
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
    for name, value in [("_packer", None), ("_packer", BatchPacker), ("is_idempotent", "x"), ("state", None)]:
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
        core.seal_events(object, None, None, {}, {}, b"", 0, 1)
