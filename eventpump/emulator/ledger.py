"""A partition's state of its idempotent producers, and the checks based on it. Pure.

The rules are those of protocol.md 8.2 (attach) and 8.5 (messages). Where the service's behavior is unknown, the choice
that reveals a client's mistake was made; comments mark these places.

A ledger has two steps, like the log: `attach` and `advance` change the state that later checks use, `committed` records
that a change is as durable as the hub, and `take_back` reverts changes that are not.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from eventpump.amqp import codec
from eventpump.amqp.sections import MESSAGE_ANNOTATIONS, section_spans
from eventpump.amqp.types import Int, Short
from eventpump.emulator import bounds
from eventpump.emulator.readers import Refusal
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.conditions import (
    ARGUMENT_ERROR,
    ARGUMENT_OUT_OF_RANGE,
    NOT_ALLOWED,
    OUT_OF_ORDER_SEQUENCE,
    PRODUCER_EPOCH_STOLEN,
)
from eventpump.eventhubs.names import PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import NUMBERS

LOOK_BACK = 5
"""How many of the last batches are recognized as repeats. The service's number is unknown; Kafka's is five."""
NOTHING_PUBLISHED = 0
"""The answer to an attach before the first event. According to an older source it is -1 (protocol.md 8.2)."""

_KEYS = (PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQUENCE_NUMBER)
_TYPES = (int, Short, Int)
_ID_BITS = 52
"""Ids must be exact integers in JavaScript too."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The producer that a link claims to be; the service fills in fields that are None."""

    producer_id: int | None
    epoch: int | None
    number: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """The events of one message, by their annotations: the first one's number; the others follow, with the wrap."""

    producer_id: int
    epoch: int
    first: int
    count: int

    @property
    def last(self) -> int:
        """The last event's number."""
        return (self.first + self.count - 1) % NUMBERS


@dataclass(frozen=True, slots=True)
class ProducerState:
    """One producer in one partition.

    Args:
        last: The last published number, or the one that the producer stated, or `NOTHING_PUBLISHED`.
        is_fresh: Nothing was published in this epoch, so any number may be the first.
        recent: First number and count of the newest batches, oldest first.
    """

    producer_id: int
    epoch: int
    last: int
    is_fresh: bool = True
    recent: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ProducerRetention:
    """How long a partition keeps the states of unused idempotent producers.

    The service's retention is unknown (protocol.md 8.5). Kafka's is a day.

    Args:
        seconds: The time since a producer last attached or published. A restart counts as a use.
        count: The most producers; beyond it, the least recently used is forgotten.
    """

    seconds: float = 86_400.0
    count: int = 10_000

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigurationError("producer_retention.seconds", "must be more than 0")
        if self.count < 1:
            raise ConfigurationError("producer_retention.count", "must be at least 1")


class Admission(NamedTuple):
    """An accepted attach.

    Args:
        number: The number to answer: the producer's own if it stated one (8.2), else the last published.
    """

    state: ProducerState
    number: int


class Repeat:
    """The run is already stored."""


REPEAT = Repeat()


class PublishingLedger:
    """The idempotent producers of one partition. One task mutates it.

    An unused state expires, or is forgotten on request; its producer is then refused like an unknown one.
    """

    __slots__ = ("_accept_unknown_producers", "_committed", "_now", "_states", "_used", "expired", "retention")

    def __init__(self) -> None:
        self.retention = ProducerRetention()
        self.expired: list[int] = []
        self._states: dict[int, ProducerState] = {}
        self._committed: dict[int, ProducerState] = {}
        self._used: OrderedDict[int, float] = OrderedDict()  # when each was last used, least recently used first
        self._now = 0.0
        self._accept_unknown_producers = False

    def attach(
        self,
        claim: Claim,
        rng: random.Random,
        nothing_published: int = NOTHING_PUBLISHED,
        *,
        now: float = 0.0,
    ) -> Admission | Refusal:
        """Decide on a publishing link's attach, and record the epoch that it raises or the producer that it creates.

        Args:
            now: Seconds on any clock, the same for all calls.
        """
        self._now = now
        self._expire()
        if any(value is not None and value < 0 for value in (claim.producer_id, claim.epoch, claim.number)):
            return Refusal(
                ARGUMENT_OUT_OF_RANGE,
                "Invalid range for idempotent producer state. Producer Id, Epoch, and Sequence Number must be zero or "
                "positive.",
            )
        standing = nothing_published if claim.number is None else claim.number
        if claim.producer_id is None:
            state = ProducerState(self._new_id(rng), claim.epoch or 0, standing)
        else:
            known = self._states.get(claim.producer_id)
            if known is None:
                if not self._accept_unknown_producers:
                    return _unknown(claim.producer_id)
                known = ProducerState(claim.producer_id, claim.epoch or 0, standing)
            if claim.epoch is None or claim.epoch == known.epoch:
                # A stale number is refused at the first send, not here.
                state = replace(known, last=claim.number) if known.is_fresh and claim.number is not None else known
            elif claim.epoch < known.epoch:
                # The service's behavior is unknown; Kafka fences here as well.
                return _stolen(claim.producer_id, claim.epoch, known.epoch)
            else:
                state = ProducerState(known.producer_id, claim.epoch, standing)
        self._states[state.producer_id] = state
        self._use(state.producer_id)
        return Admission(state, state.last if claim.number is None else claim.number)

    def judge(self, run: Run, *, now: float = 0.0) -> ProducerState | Repeat | Refusal:
        """Return the state after storing a run, for `advance`; or the reason not to store it."""
        self._now = now
        self._expire()
        state = self._states.get(run.producer_id)
        if state is None:
            if not self._accept_unknown_producers:
                return _unknown(run.producer_id)
            state = ProducerState(run.producer_id, run.epoch, NOTHING_PUBLISHED)
        else:
            self._use(run.producer_id)
        if run.epoch < state.epoch:
            return _stolen(run.producer_id, run.epoch, state.epoch)
        if run.epoch > state.epoch:
            # The service's behavior is unknown: all known clients raise their epoch by attaching.
            return Refusal(
                NOT_ALLOWED,
                f"Producer {run.producer_id} has no link of epoch {run.epoch}: the current one is {state.epoch}.",
            )
        batch = (run.first, run.count)
        if not state.is_fresh:
            expected = (state.last + 1) % NUMBERS
            ahead = (run.first - expected) % NUMBERS
            if ahead and batch in state.recent:
                return REPEAT
            if ahead:
                kind = "an old" if ahead >= NUMBERS // 2 else "an out of order"
                return Refusal(
                    OUT_OF_ORDER_SEQUENCE,
                    f"The supplied sequence number is {kind} sequence number. Producer:{run.producer_id} "
                    f"Received:{run.first} Expected:{expected}",
                )
        recent = (*state.recent, batch)[-LOOK_BACK:]
        return ProducerState(run.producer_id, run.epoch, run.last, is_fresh=False, recent=recent)

    def advance(self, state: ProducerState) -> None:
        """Use a state for later checks."""
        self._states[state.producer_id] = state
        self._use(state.producer_id)

    def committed(self, state: ProducerState) -> None:
        """Record that a state, and the events that it covers, are durable."""
        if state.producer_id in self._states:
            self._committed[state.producer_id] = state

    def take_back(self) -> None:
        """Revert everything that was not committed."""
        self._states = dict(self._committed)

    def forget(self, *, accept_unknown_producers: bool) -> None:
        """Forget every producer;
        an unknown one is refused from now on, or accepted as new with its own id and epoch."""
        self._states.clear()
        self._committed.clear()
        self._used.clear()
        self._accept_unknown_producers = accept_unknown_producers

    def restore(self, state: ProducerState, *, now: float = 0.0) -> None:
        """Restore a stored state. It counts as used now."""
        self._now = now
        self._states[state.producer_id] = self._committed[state.producer_id] = state
        self._use(state.producer_id)

    def _use(self, producer_id: int) -> None:
        used = self._used
        used[producer_id] = self._now
        used.move_to_end(producer_id)
        if len(used) > self.retention.count:
            self._drop_oldest()

    def _expire(self) -> None:
        used, horizon = self._used, self._now - self.retention.seconds
        while used and next(iter(used.values())) < horizon:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        producer_id, _ = self._used.popitem(last=False)
        self._states.pop(producer_id, None)
        self._committed.pop(producer_id, None)
        self.expired.append(producer_id)

    def _new_id(self, rng: random.Random) -> int:
        while True:
            producer_id = rng.getrandbits(_ID_BITS)
            if producer_id not in self._states:
                return producer_id


def claim_of(properties: Mapping[Any, Any] | None) -> Claim | Refusal:
    """Return the claim in a link's properties: all three, some of them null, or none."""
    given = properties or {}
    values = tuple(given.get(key) for key in _KEYS)
    if not all(key in given for key in _KEYS) and any(key in given for key in _KEYS):
        # A rule stated by clients; the service's behavior is unknown.
        return Refusal(ARGUMENT_ERROR, "A producer gives its id, epoch and sequence number together, or none of them.")
    if not all(value is None or type(value) is kind for value, kind in zip(values, _TYPES, strict=True)):
        return Refusal(ARGUMENT_ERROR, "A producer's id is a long, its epoch a short, its sequence number an int.")
    return Claim(*(None if value is None else int(value) for value in values))


def run_of(events: list[bytes]) -> tuple[Run, list[bytes]] | Refusal:
    """Read the annotations of a message's events.

    Events without them are refused, because the service's behavior on such a link is unknown.

    Returns:
        The run, and the events; their annotations are removed if they are only the run's.

    Raises:
        AmqpDecodeError: One of them is not an AMQP message, or they have too many annotations.
    """
    left = bounds.ANNOTATION_ITEMS
    first, left = _annotations_of(events[0], left)
    if isinstance(first, Refusal):
        return first
    producer_id, epoch, number = first
    expected = number
    layout = _layout_of(events[0])
    is_uniform = layout.split > 0
    for index, raw in enumerate(events):
        split = layout.split
        if split > 0 and raw.startswith(layout.head) and raw.startswith(layout.tail, split + 4):
            # The bytes are the same except for the number: nothing else needs to be read.
            number = int.from_bytes(raw[split : split + 4], "big", signed=True)
        elif index:
            found, left = _annotations_of(raw, left)
            if isinstance(found, Refusal):
                return found
            if found[:2] != (producer_id, epoch):
                return Refusal(ARGUMENT_ERROR, "The events of a batch are of several producers or epochs.")
            number = found[2]
            layout = _layout_of(raw)
            is_uniform = False
        if number != expected:
            return Refusal(
                OUT_OF_ORDER_SEQUENCE,
                f"The sequence numbers of a batch do not follow each other. Producer:{producer_id} "
                f"Received:{number} Expected:{expected}",
            )
        expected = (expected + 1) % NUMBERS
    run = Run(producer_id, int(epoch), int(first[2]), len(events))
    # Readers never get them, and without them storing an event costs the same as a plain one.
    end = layout.end
    if is_uniform and layout.is_bare and min(map(len, events)) > end:
        return run, [raw[end:] for raw in events]
    return run, events


def _annotations_of(raw: bytes, left: int) -> tuple[tuple[int, int, int] | Refusal, int]:
    """Read the id, epoch and sequence number of one event.

    Returns:
        The three, or the reason for the refusal; and how many values are left for the message's other events.
    """
    annotations: Mapping[Any, Any] = {}
    for code, start, end in section_spans(raw):
        if code == MESSAGE_ANNOTATIONS:
            left -= codec.count_items(raw, start, end, left)
            section, _ = codec.decode(raw, start, end)
            annotations = section.value if isinstance(section.value, dict) else {}
        elif code > MESSAGE_ANNOTATIONS:
            break
    producer_id, epoch, number = (annotations.get(key) for key in _KEYS)
    if type(producer_id) is not int or type(epoch) is not Short or type(number) is not Int:
        refusal = Refusal(
            NOT_ALLOWED,
            "An event on an idempotent producer's link is annotated with its id (long), epoch (short) and sequence "
            "number (int).",
        )
        return refusal, left
    if producer_id < 0 or epoch < 0 or number < 0:
        refusal = Refusal(
            ARGUMENT_OUT_OF_RANGE, "An event's producer id, epoch and sequence number must be zero or positive."
        )
        return refusal, left
    return (producer_id, epoch, number), left


class _Layout(NamedTuple):
    """The position of an event's number.

    Args:
        split: Where its four bytes begin; 0 if it is not encoded in four.
        head: The bytes before them.
        tail: The bytes after them, up to `end`.
        end: Where the annotations end.
        is_bare: The annotations come first and hold the producer's three only.
    """

    split: int
    head: bytes
    tail: bytes
    end: int
    is_bare: bool


def _layout_of(raw: bytes) -> _Layout:
    """Return the layout of an event that was already read."""
    spans = [span for span in section_spans(raw) if span[0] <= MESSAGE_ANNOTATIONS]
    end = spans[-1][2]
    starts = [start for code, start, _ in spans if code == MESSAGE_ANNOTATIONS]
    if len(starts) > 1:
        return _Layout(0, b"", b"", end, is_bare=False)
    pos = codec.skip(raw, starts[0] + 1, end)
    if raw[pos] == 0xC1:
        count, pos = raw[pos + 2], pos + 3
    else:
        count, pos = int.from_bytes(raw[pos + 5 : pos + 9], "big"), pos + 9
    split = 0
    for _ in range(count // 2):
        name, value = codec.decode(raw, pos, end)
        pos = codec.skip(raw, value, end)
        if name == PRODUCER_SEQUENCE_NUMBER and raw[value] == 0x71:
            split = value + 1
    is_bare = len(spans) == 1 and count == 2 * len(_KEYS)
    return _Layout(split, raw[:split], raw[split + 4 : end], end, is_bare)


def _unknown(producer_id: int) -> Refusal:
    return Refusal(NOT_ALLOWED, f"The producer {producer_id} is not known to this partition.")


def _stolen(producer_id: int, received: int, current: int) -> Refusal:
    return Refusal(
        PRODUCER_EPOCH_STOLEN,
        f"At least one producer exists with the same id and a higher epoch. Producer:{producer_id} "
        f"Received:{received} Current:{current}",
    )
