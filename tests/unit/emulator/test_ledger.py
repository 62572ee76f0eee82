"""What a partition takes from idempotent producers (protocol.md 8.2, 8.4, 8.5)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eventpump.amqp.codec import AmqpDecodeError
from eventpump.amqp.message import Data, Header, Message
from eventpump.amqp.types import Int, Short, Symbol
from eventpump.emulator.ledger import (
    LOOK_BACK,
    REPEAT,
    Admission,
    Claim,
    ProducerRetention,
    ProducerState,
    PublishingLedger,
    Run,
    claim_of,
    run_of,
)
from eventpump.emulator.readers import Refusal
from eventpump.emulator.stamping import stamp
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.conditions import OUT_OF_ORDER_SEQUENCE, PRODUCER_EPOCH_STOLEN
from eventpump.eventhubs.names import PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import NUMBERS

LAST = NUMBERS - 1
NOTHING = Claim(None, None, None)


def attach(ledger: PublishingLedger, claim: Claim = NOTHING, **options: Any) -> Admission:
    admission = ledger.attach(claim, random.Random(1), **options)
    assert isinstance(admission, Admission), admission
    return admission


def refused(ledger: PublishingLedger, claim: Claim) -> Refusal:
    refusal = ledger.attach(claim, random.Random(1))
    assert isinstance(refusal, Refusal), refusal
    return refusal


def publish(ledger: PublishingLedger, run: Run) -> str:
    """Judge a run as the service does. Give "stored", "repeat", or the condition."""
    judgement = ledger.judge(run)
    if isinstance(judgement, Refusal):
        return judgement.condition
    if judgement is REPEAT:
        return "repeat"
    assert isinstance(judgement, ProducerState)
    ledger.advance(judgement)
    return "stored"


def text(ledger: PublishingLedger, run: Run) -> str:
    refusal = ledger.judge(run)
    assert isinstance(refusal, Refusal)
    return refusal.description


def started(last: int = 10, epoch: int = 3) -> tuple[PublishingLedger, int]:
    """A producer of an epoch whose last number is given."""
    ledger = PublishingLedger()
    producer_id = attach(ledger, Claim(None, epoch, None)).state.producer_id
    assert publish(ledger, Run(producer_id, epoch, last, 1)) == "stored"
    return ledger, producer_id


# ---------------------------------------------------------------------------------------------- attach (8.2)


@pytest.mark.parametrize("nothing_published", [0, -1])
def test_attach_without_a_claim_gets_a_new_id(nothing_published: int) -> None:
    """A new id, epoch 0, and the number that says nothing was published; every id is another."""
    ledger = PublishingLedger()
    rng = random.Random(3)
    found = [ledger.attach(NOTHING, rng, nothing_published) for _ in range(20)]
    admissions = [each for each in found if isinstance(each, Admission)]
    assert {(each.state.epoch, each.number) for each in admissions} == {(0, nothing_published)}
    ids = {each.state.producer_id for each in admissions}
    assert len(ids) == 20
    assert all(0 <= each < 2**53 for each in ids)


def test_new_id_is_never_one_in_use() -> None:
    """An id that is in use is not given again, whatever chance says."""
    ledger = PublishingLedger()
    ids = [attach(ledger).state.producer_id for _ in range(3)]  # each time by the same seed
    assert len(set(ids)) == 3


def test_attach_with_an_epoch_only_gets_a_new_id() -> None:
    """A new id, with the epoch given."""
    admission = attach(PublishingLedger(), Claim(None, 7, None))
    assert (admission.state.epoch, admission.number) == (7, 0)


def test_attach_with_a_number_only_gets_a_new_id_at_it() -> None:
    """A new id at the number given, which a later attach without one gets."""
    ledger = PublishingLedger()
    admission = attach(ledger, Claim(None, None, 41))
    assert (admission.state.epoch, admission.number) == (0, 41)
    assert attach(ledger, Claim(admission.state.producer_id, 0, None)).number == 41


def test_attach_with_id_and_epoch_is_answered_the_last_number() -> None:
    """The same id and epoch without a number: the last published, and the next is taken."""
    ledger, producer_id = started(10, 3)
    admission = attach(ledger, Claim(producer_id, 3, None))
    assert (admission.state.producer_id, admission.state.epoch, admission.number) == (producer_id, 3, 10)
    assert publish(ledger, Run(producer_id, 3, 11, 1)) == "stored"


def test_attach_with_an_id_only_keeps_its_epoch() -> None:
    """An id without an epoch goes on with the current one."""
    ledger, producer_id = started(10, 3)
    assert attach(ledger, Claim(producer_id, None, None)).state.epoch == 3


@pytest.mark.parametrize("step", [1, 5])
def test_attach_with_a_higher_epoch_starts_over(step: int) -> None:
    """A higher epoch without a number starts over: the id stays, nothing is published, any number may come."""
    ledger, producer_id = started(10, 3)
    admission = attach(ledger, Claim(producer_id, 3 + step, None))
    assert (admission.state.producer_id, admission.state.epoch, admission.number) == (producer_id, 3 + step, 0)
    assert publish(ledger, Run(producer_id, 3 + step, 1, 1)) == "stored"


def test_attach_with_a_higher_epoch_and_the_last_number_goes_on() -> None:
    """A higher epoch with the last number: accepted, and the next number is taken."""
    ledger, producer_id = started(10, 3)
    assert attach(ledger, Claim(producer_id, 4, 10)).number == 10
    assert attach(ledger, Claim(producer_id, 4, None)).number == 10
    assert publish(ledger, Run(producer_id, 4, 11, 1)) == "stored"


def test_attach_with_the_last_number_goes_on() -> None:
    """The same id and epoch with the last number: accepted, goes on."""
    ledger, producer_id = started(10, 3)
    assert attach(ledger, Claim(producer_id, 3, 10)).number == 10
    assert publish(ledger, Run(producer_id, 3, 11, 1)) == "stored"


@pytest.mark.parametrize(("epoch", "number"), [(None, 6), (3, 5), (3, 12)])
def test_attach_with_a_wrong_number_is_echoed(epoch: int | None, number: int) -> None:
    """A wrong number is given back as it came; the first send with it is what fails, and the epoch was kept."""
    ledger, producer_id = started(10, 3)
    admission = attach(ledger, Claim(producer_id, epoch, number))
    assert (admission.state.epoch, admission.number) == (3, number)
    assert publish(ledger, Run(producer_id, 3, number + 1, 1)) == OUT_OF_ORDER_SEQUENCE
    assert attach(ledger, Claim(producer_id, 3, None)).number == 10


def test_attach_with_an_unknown_id_is_refused() -> None:
    """What is all invented is refused, and so is an id of another partition."""
    ledger, producer_id = started()
    assert refused(ledger, Claim(100, 100, 100)).condition == "amqp:not-allowed"
    assert refused(PublishingLedger(), Claim(producer_id, None, None)).condition == "amqp:not-allowed"


@pytest.mark.parametrize(
    "claim", [Claim(-1, None, None), Claim(None, -1, None), Claim(None, None, -1), Claim(-1, -1, -1)]
)
def test_attach_with_a_negative_value_is_refused(claim: Claim) -> None:
    """Negative values are out of range, in the service's words (JavaScript's live tests)."""
    refusal = refused(PublishingLedger(), claim)
    assert refusal.condition == "com.microsoft:argument-out-of-range"
    assert refusal.description == (
        "Invalid range for idempotent producer state. Producer Id, Epoch, and Sequence Number must be zero or positive."
    )


def test_attach_with_a_lower_epoch_is_refused() -> None:
    """A lower epoch than the current one is refused as stolen, and changes nothing."""
    ledger, producer_id = started(10, 3)
    refusal = refused(ledger, Claim(producer_id, 2, None))
    assert refusal.condition == PRODUCER_EPOCH_STOLEN
    assert "Received:2 Current:3" in refusal.description
    assert attach(ledger, Claim(producer_id, None, None)).state.epoch == 3


def test_attach_with_an_unused_number_is_remembered() -> None:
    """As long as nothing was published, the number the producer says it stands at is the one it gets."""
    ledger = PublishingLedger()
    producer_id = attach(ledger).state.producer_id
    assert attach(ledger, Claim(producer_id, 0, 70)).number == 70
    assert attach(ledger, Claim(producer_id, 0, None)).number == 70
    assert publish(ledger, Run(producer_id, 0, 5, 1)) == "stored"
    attach(ledger, Claim(producer_id, 0, 70))
    assert attach(ledger, Claim(producer_id, 0, None)).number == 5


# -------------------------------------------------------------------------------------------- messages (8.5)


@pytest.mark.parametrize("first", [0, 1, 2, 1000, LAST])
def test_publish_of_the_first_event_takes_any_number(first: int) -> None:
    """The first event of a new id and epoch may have any number."""
    ledger = PublishingLedger()
    producer_id = attach(ledger).state.producer_id
    assert publish(ledger, Run(producer_id, 0, first, 1)) == "stored"
    assert publish(ledger, Run(producer_id, 0, (first + 1) % NUMBERS, 1)) == "stored"


def test_publish_continues_after_the_last_number() -> None:
    """Each batch begins after the last one; the last number moves by the count."""
    ledger, producer_id = started(10)
    assert publish(ledger, Run(producer_id, 3, 11, 5)) == "stored"
    assert publish(ledger, Run(producer_id, 3, 16, 1)) == "stored"
    assert attach(ledger, Claim(producer_id, 3, None)).number == 16


def test_publish_wraps_numbers_to_zero() -> None:
    """After 2147483647 comes 0, between batches and inside one; repeats and old numbers are recognized across it."""
    ledger, producer_id = started(LAST - 2)
    across = Run(producer_id, 3, LAST - 1, 4)
    assert across.last == 1
    assert publish(ledger, across) == "stored"
    assert publish(ledger, Run(producer_id, 3, 2, 1)) == "stored"
    assert publish(ledger, across) == "repeat"
    assert "old sequence" in text(ledger, Run(producer_id, 3, LAST, 1))
    assert "old sequence" not in text(ledger, Run(producer_id, 3, 4, 1))
    ledger, producer_id = started(LAST)
    assert "old sequence" not in text(ledger, Run(producer_id, 3, 1, 1))
    assert text(ledger, Run(producer_id, 3, 1, 1)).endswith("Received:1 Expected:0")
    assert publish(ledger, Run(producer_id, 3, 0, 1)) == "stored"


@pytest.mark.parametrize("back", range(1, LOOK_BACK + 1))
def test_publish_of_a_recent_batch_is_a_repeat(back: int) -> None:
    """A batch sent again is known as long as it is among the newest, and moves nothing."""
    ledger, producer_id = started(0)
    runs = [Run(producer_id, 3, 1 + 10 * step, 10) for step in range(10)]
    assert [publish(ledger, run) for run in runs] == ["stored"] * 10
    assert publish(ledger, runs[-back]) == "repeat"
    assert attach(ledger, Claim(producer_id, 3, None)).number == 100


def test_publish_of_an_older_batch_is_refused() -> None:
    """A repeat beyond the look-back is refused as any other old number."""
    ledger, producer_id = started(0)
    for step in range(LOOK_BACK + 1):
        publish(ledger, Run(producer_id, 3, 1 + step, 1))
    assert publish(ledger, Run(producer_id, 3, 1, 1)) == OUT_OF_ORDER_SEQUENCE


@pytest.mark.parametrize(("first", "count"), [(11, 1), (11, 4), (11, 6), (15, 1), (12, 5), (1, 1)])
def test_publish_of_used_numbers_in_another_batch_is_refused(first: int, count: int) -> None:
    """Numbers of a stored batch on other events are refused, and the text says old sequence."""
    ledger, producer_id = started(10)
    publish(ledger, Run(producer_id, 3, 11, 5))
    run = Run(producer_id, 3, first, count)
    assert publish(ledger, run) == OUT_OF_ORDER_SEQUENCE
    assert "old sequence" in text(ledger, run)


@pytest.mark.parametrize("first", [12, 13, 1000])
def test_publish_with_a_gap_is_refused(first: int) -> None:
    """A number that skips some is out of order, and not old."""
    ledger, producer_id = started(10)
    run = Run(producer_id, 3, first, 1)
    assert publish(ledger, run) == OUT_OF_ORDER_SEQUENCE
    assert "old sequence" not in text(ledger, run)
    assert publish(ledger, Run(producer_id, 3, 11, 1)) == "stored"


def test_publish_under_a_lower_epoch_is_refused() -> None:
    """Once the epoch was raised, the former one publishes nothing, repeats included; the text names both."""
    ledger, producer_id = started(10, 0)
    attach(ledger, Claim(producer_id, 1, None))
    for first in (11, 10):
        run = Run(producer_id, 0, first, 1)
        assert publish(ledger, run) == PRODUCER_EPOCH_STOLEN
        assert "Received:0 Current:1" in text(ledger, run)


def test_publish_under_an_epoch_not_attached_is_refused() -> None:
    """A message of an epoch without an attach is refused."""
    ledger, producer_id = started(10, 3)
    assert publish(ledger, Run(producer_id, 4, 11, 1)) == "amqp:not-allowed"
    assert publish(ledger, Run(producer_id, 3, 11, 1)) == "stored"


def test_publish_of_an_unknown_producer_is_refused() -> None:
    """A message of an id that was never assigned is refused."""
    ledger, producer_id = started()
    assert publish(ledger, Run(producer_id + 1, 0, 1, 1)) == "amqp:not-allowed"


@pytest.mark.parametrize("accept_unknown_producers", [False, True])
def test_publish_of_a_forgotten_producer_is_refused_or_new(accept_unknown_producers: bool) -> None:
    """One that was forgotten is refused, links and events; or it counts as new, from any number on."""
    ledger = PublishingLedger()
    producer_id = attach(ledger).state.producer_id
    assert publish(ledger, Run(producer_id, 0, 1, 5)) == "stored"
    ledger.forget(accept_unknown_producers=accept_unknown_producers)
    ledger.take_back()
    again = Claim(producer_id, 0, None)
    if not accept_unknown_producers:
        assert publish(ledger, Run(producer_id, 0, 6, 1)) == "amqp:not-allowed"
        assert refused(ledger, again).condition == "amqp:not-allowed"
        return
    assert attach(ledger, again).number == 0
    assert publish(ledger, Run(producer_id, 0, 6, 1)) == "stored"
    ledger.forget(accept_unknown_producers=True)
    assert publish(ledger, Run(producer_id, 0, 3, 2)) == "stored"
    assert attach(ledger, again).number == 4


def test_publish_of_equal_epochs_shares_the_numbers() -> None:
    """Two links of one id and epoch publish in turn, and collide only by their numbers."""
    ledger, producer_id = started(10)
    attach(ledger, Claim(producer_id, 3, None))
    assert publish(ledger, Run(producer_id, 3, 11, 2)) == "stored"
    assert publish(ledger, Run(producer_id, 3, 11, 1)) == OUT_OF_ORDER_SEQUENCE
    assert publish(ledger, Run(producer_id, 3, 13, 1)) == "stored"


def test_publish_of_each_id_has_numbers_of_its_own() -> None:
    """Each id has numbers of its own."""
    ledger, first = started(10)
    second = attach(ledger, Claim(None, 3, None)).state.producer_id
    assert publish(ledger, Run(second, 3, 500, 1)) == "stored"
    assert publish(ledger, Run(first, 3, 11, 1)) == "stored"


# ------------------------------------------------------------------------------------------------- durability


def test_take_back_restores_what_was_committed() -> None:
    """After a failed write the ledger stands where the disk does: numbers, epochs and ids alike."""
    ledger, producer_id = started(10)
    kept = attach(ledger, Claim(producer_id, 3, None)).state
    ledger.committed(kept)
    publish(ledger, Run(producer_id, 3, 11, 1))
    attach(ledger, Claim(producer_id, 9, None))
    lost = attach(ledger).state.producer_id
    ledger.take_back()
    assert attach(ledger, Claim(producer_id, None, None)) == Admission(kept, 10)
    assert refused(ledger, Claim(lost, None, None)).condition == "amqp:not-allowed"


def test_restore_brings_back_a_whole_state() -> None:
    """Restored, a producer's repeats, numbers and epoch are answered as before."""
    ledger, producer_id = started(10)
    publish(ledger, Run(producer_id, 3, 11, 5))
    again = PublishingLedger()
    again.restore(attach(ledger, Claim(producer_id, 3, None)).state)
    again.take_back()
    assert publish(again, Run(producer_id, 3, 11, 5)) == "repeat"
    assert publish(again, Run(producer_id, 3, 16, 1)) == "stored"
    assert publish(again, Run(producer_id, 2, 17, 1)) == PRODUCER_EPOCH_STOLEN


# ------------------------------------------------------------------------------------- the wire (8.1, 8.2, 8.4)


SHORT, INT = Short(1), Int(9)


def three(producer_id: Any = 5, epoch: Any = SHORT, number: Any = INT) -> dict[Any, Any]:
    return {PRODUCER_ID: producer_id, PRODUCER_EPOCH: epoch, PRODUCER_SEQUENCE_NUMBER: number}


def numbered(
    first: int, count: int, *, wide: bool = True, header: bool = False, body: bytes = b"x", **others: Any
) -> list[bytes]:
    """Events of producer 5, epoch 1."""
    events = []
    for step in range(count):
        number = (first + step) % NUMBERS
        found = three(number=Int(number)) | {Symbol(key): value for key, value in others.items()}
        message = Message(
            header=Header(durable=True) if header else None, message_annotations=found, body=Data((body,))
        )
        raw = message.encode()
        small = PRODUCER_SEQUENCE_NUMBER.encode() + b"\x54" + bytes((number & 0xFF,))
        if wide and small in raw:
            at = raw.index(small)
            raw = raw[:at] + small[:-2] + b"\x71" + number.to_bytes(4, "big") + raw[at + len(small) :]
            start = raw.index(b"\x00\x53\x72") + 4
            assert raw[start - 1] == 0xC1
            raw = raw[:start] + bytes((raw[start] + 3,)) + raw[start + 1 :]
        events.append(raw)
    return events


def test_claim_of_a_link_is_read() -> None:
    """All three properties, some of them null, or none of them."""
    assert claim_of(None) == claim_of({}) == claim_of({Symbol("other"): 1}) == NOTHING
    claim = claim_of(three())
    assert claim == Claim(5, 1, 9)
    assert "Short" not in repr(claim)  # texts show it
    assert claim_of(three(None, Short(1), None)) == Claim(None, 1, None)


@pytest.mark.parametrize(
    "properties",
    [
        {PRODUCER_ID: 5},
        {PRODUCER_ID: 5, PRODUCER_EPOCH: Short(0)},
        three(producer_id=Int(5)),
        three(epoch=Int(5)),
        three(number=5),
        three(number="5"),
        three(producer_id=True),
    ],
)
def test_claim_of_another_form_is_refused(properties: dict[Any, Any]) -> None:
    """Some of the three only, or of other types than long, short and int: an argument error."""
    refusal = claim_of(properties)
    assert isinstance(refusal, Refusal)
    assert refusal.condition == "com.microsoft:argument-error"


@given(
    first=st.integers(0, 300) | st.integers(LAST - 300, LAST),
    count=st.integers(1, 300),
    wide=st.booleans(),
    header=st.booleans(),
    others=st.dictionaries(st.sampled_from(["mine", "yours"]), st.text(max_size=5) | st.integers(-5, 5)),
)
@settings(max_examples=60, deadline=None)
def test_run_of_numbers_is_read_from_every_event(
    first: int, count: int, wide: bool, header: bool, others: dict[str, Any]
) -> None:
    """However the events are laid out, the run is the same, and what is stored is what it is without numbers."""
    events = numbered(first, count, wide=wide, header=header, **others)
    found = run_of(events)
    assert not isinstance(found, Refusal)
    run, stripped = found
    assert run == Run(5, 1, first, count)
    assert type(run.epoch) is type(run.first) is int
    assert stamp(stripped, 3, 0, 1, "key").payloads == stamp(events, 3, 0, 1, "key").payloads


@given(
    first=st.integers(0, 300) | st.integers(LAST - 10, LAST),
    count=st.integers(2, 10),
    data=st.data(),
    wide=st.booleans(),
    shift=st.sampled_from([-2, -1, 1, 2, 256]),
)
def test_run_of_numbers_with_a_hole_is_refused(
    first: int, count: int, data: st.DataObject, wide: bool, shift: int
) -> None:
    """An event of a batch whose number is not the next one is seen, wherever it is."""
    events = numbered(first, count, wide=wide)
    index = data.draw(st.integers(1, count - 1))
    events[index] = numbered((first + index + shift) % NUMBERS, 1, wide=wide)[0]
    refusal = run_of(events)
    assert isinstance(refusal, Refusal)
    assert refusal.condition == OUT_OF_ORDER_SEQUENCE


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    ("found", "condition"),
    [
        ({}, "amqp:not-allowed"),
        (three(producer_id=Int(5)), "amqp:not-allowed"),
        (three(epoch=1), "amqp:not-allowed"),
        (three(number=9), "amqp:not-allowed"),
        (three(number=None), "amqp:not-allowed"),
        (three(producer_id=-5), "com.microsoft:argument-out-of-range"),
        (three(epoch=Short(-1)), "com.microsoft:argument-out-of-range"),
        (three(number=Int(-9)), "com.microsoft:argument-out-of-range"),
        (three(producer_id=6), "com.microsoft:argument-error"),
        (three(epoch=Short(2)), "com.microsoft:argument-error"),
    ],
)
def test_run_of_numbers_with_an_unnumbered_event_is_refused(index: int, found: dict[Any, Any], condition: str) -> None:
    """No annotations, others types, negative values, or another producer in the middle: the whole batch is refused."""
    events = numbered(9 - index, 3)
    found = dict(found)
    events[index] = Message(message_annotations=found or None, body=Data((b"x",))).encode()
    refusal = run_of(events)
    assert isinstance(refusal, Refusal)
    assert refusal.condition == condition


def test_run_of_numbers_ignores_a_number_inside_another_value() -> None:
    """Bytes that look like a numbered annotation, in a user's own annotation, are not taken for one."""
    forged = b"\xa3\x26" + PRODUCER_SEQUENCE_NUMBER.encode() + b"\x71" + (7).to_bytes(4, "big")
    events = [
        Message(message_annotations={Symbol("mine"): forged} | three(number=Int(7)), body=Data((b"x",))).encode(),
        Message(
            message_annotations={Symbol("mine"): forged[:-1] + b"\x08"} | three(number=Int(7)),
            body=Data((b"x",)),
        ).encode(),
    ]
    for order in (events, events[::-1], [events[0]] * 2):
        refusal = run_of(order)
        assert isinstance(refusal, Refusal)
        assert refusal.condition == OUT_OF_ORDER_SEQUENCE


@given(st.binary(max_size=40) | st.builds(lambda cut: numbered(9, 1)[0][:cut], st.integers(1, 110)))
def test_run_of_numbers_of_any_bytes_raises_only_known_errors(raw: bytes) -> None:
    """Bytes that are no event give a refusal or a decode error."""
    try:
        found = run_of([raw])
    except AmqpDecodeError:
        return
    assert isinstance(found, Refusal) or found[0] == Run(5, 1, 9, 1)


# -------------------------------------------------------------------------------------------------- the model


class Publishing(RuleBasedStateMachine):
    """Producers that send, repeat, lose track, restart and fence each other, against a list of what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PublishingLedger()
        self.rng = random.Random(0)
        self.states: list[ProducerState] = []
        self.producer_id = -1
        self.epoch = 0
        self.next = 0
        self.sent: list[tuple[Run, int]] = []
        self.stored: list[tuple[int, int]] = []

    def publish(self, run: Run) -> str:
        answer = publish(self.ledger, run)
        if answer == "stored":
            self.stored += [(run.epoch, (run.first + step) % NUMBERS) for step in range(run.count)]
        return answer

    @initialize(start=st.sampled_from([0, 1, LAST - 20, LAST]))
    def begin(self, start: int) -> None:
        admission = attach(self.ledger, Claim(None, None, start))
        self.producer_id = admission.state.producer_id
        self.next = (start + 1) % NUMBERS

    @rule(count=st.integers(1, 9))
    def send(self, count: int) -> None:
        run = Run(self.producer_id, self.epoch, self.next, count)
        assert self.publish(run) == "stored"
        self.sent.append((run, len(self.stored)))
        self.next = (self.next + count) % NUMBERS

    @precondition(lambda self: self.sent)
    @rule(back=st.integers(1, LOOK_BACK + 3))
    def repeat(self, back: int) -> None:
        if back > len(self.sent):
            return
        answer = self.publish(self.sent[-back][0])
        assert answer == ("repeat" if back <= LOOK_BACK else OUT_OF_ORDER_SEQUENCE)

    @precondition(lambda self: self.sent)
    @rule(skip=st.integers(1, 5), count=st.integers(1, 5))
    def skip_some(self, skip: int, count: int) -> None:
        first = (self.next + skip) % NUMBERS
        assert self.publish(Run(self.producer_id, self.epoch, first, count)) == OUT_OF_ORDER_SEQUENCE

    @precondition(lambda self: self.sent)
    @rule()
    def resplit(self) -> None:
        run = self.sent[-1][0]
        assert self.publish(Run(run.producer_id, run.epoch, run.first, run.count + 1)) == OUT_OF_ORDER_SEQUENCE

    @rule()
    def attach_again(self) -> None:
        admission = attach(self.ledger, Claim(self.producer_id, self.epoch, None))
        assert admission.number == (self.next - 1) % NUMBERS

    @rule(with_number=st.booleans())
    def fence(self, with_number: bool) -> None:
        former = Run(self.producer_id, self.epoch, self.next, 1)
        self.epoch += 1
        last = (self.next - 1) % NUMBERS
        attach(self.ledger, Claim(self.producer_id, self.epoch, last if with_number else None))
        if not with_number:
            self.next = 1
        self.sent.clear()
        assert self.publish(former) == PRODUCER_EPOCH_STOLEN

    @rule()
    def restart(self) -> None:
        state = attach(self.ledger, Claim(self.producer_id, None, None)).state
        self.ledger = PublishingLedger()
        self.ledger.restore(state)

    @invariant()
    def nothing_is_stored_twice(self) -> None:
        assert len(set(self.stored)) == len(self.stored)


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def knows(ledger: PublishingLedger, producer_id: int, now: float = 0.0) -> bool:
    return isinstance(ledger.attach(Claim(producer_id, None, None), random.Random(1), now=now), Admission)


def test_state_not_used_for_the_retention_expires() -> None:
    """A producer that neither attached nor published for the time of the retention is unknown, and no earlier."""
    ledger = PublishingLedger()
    ledger.retention = ProducerRetention(seconds=100)
    unused = attach(ledger, now=0.0).state.producer_id
    used = ledger.attach(NOTHING, random.Random(2), now=0.0)
    assert isinstance(used, Admission)
    run = Run(used.state.producer_id, 0, 1, 3)
    judged = ledger.judge(run, now=90.0)
    assert isinstance(judged, ProducerState)
    ledger.advance(judged)
    ledger.committed(judged)
    assert isinstance(ledger.judge(Run(unused, 0, 1, 1), now=100.5), Refusal)
    assert ledger.expired == [unused]
    assert not knows(ledger, unused, 100.5)
    assert ledger.judge(run, now=190.0) is not None
    assert knows(ledger, used.state.producer_id, 290.0)
    assert not knows(ledger, used.state.producer_id, 390.5)
    ledger.take_back()
    assert not knows(ledger, used.state.producer_id, 390.5)


def test_states_beyond_their_bound_forget_the_oldest() -> None:
    """One producer more than there may be, and the one whose use is longest ago is forgotten, for good."""
    ledger = PublishingLedger()
    ledger.retention = ProducerRetention(count=3)
    ids = []
    for seed in range(3):
        admission = ledger.attach(NOTHING, random.Random(seed))
        assert isinstance(admission, Admission)
        ledger.committed(admission.state)
        ids.append(admission.state.producer_id)
    assert knows(ledger, ids[0])
    newest = ledger.attach(NOTHING, random.Random(9))
    assert isinstance(newest, Admission)
    assert ledger.expired == [ids[1]]
    late = ProducerState(ids[1], 0, 5)
    ledger.committed(late)  # what was on its way to the disk does not bring it back
    ledger.take_back()
    assert [knows(ledger, each) for each in ids] == [True, False, True]


@pytest.mark.parametrize("options", [{"seconds": 0}, {"seconds": float("nan")}, {"count": 0}])
def test_retention_that_keeps_nothing_is_refused(options: dict[str, Any]) -> None:
    """A producer has to be remembered for some time."""
    with pytest.raises(ConfigurationError):
        ProducerRetention(**options)
