"""The state machine of one partition's idempotent publishing: numbers, batches in doubt, and the next step.

One batch at a time is at the *head*: `offer` puts it there, and it leaves when it is published or refused. The
publisher reports everything that happens to the link and its transfers, and `step` is the next step::

    publication = sequencer.offer(batch, count)
    while publication is sequencer.head:
        match sequencer.step:
            case Step.ATTACH:  a new link (closing the old one) with `attach_request`; then `attached(...)`
            case Step.SEND:    first = `sending()`; transfer the batch, numbered from `first`; then one of `accepted`,
                               `refused`, `refused_for_now`, `refused_out_of_order`, `refused_as_too_large`, `fenced`,
                               `outcome_unknown`
            case Step.WAIT:    another task's transfer is out: wait for it
            case Step.FAIL:    raise `error()`

The states, the state of the head in each, and the transitions:

============  ====================================  =================================================================
state         means                                 leads to
============  ====================================  =================================================================
DETACHED      no link, no head                      attached: IDLE
IDLE          a link, no head                       offered: READY; detached: DETACHED
WAITING       no link; no transfer may be stored    attached: READY; withdrawn: DETACHED
READY         a link; no transfer may be stored     sending: SENDING; detached: WAITING; withdrawn: IDLE
SENDING       the first transfer that counts is     accepted, refused, too large: IDLE; refused for now: READY; out of
              out                                   order: FAILED; unknown, detached: DOUBTFUL
DOUBTFUL      no link; a transfer may be stored     attached, and the answer is the head's last number: IDLE; attached,
                                                    and it is the number before its first: UNSTORED
UNSTORED      a link; not stored when we looked     sending: RESENDING; detached: DOUBTFUL
RESENDING     the same bytes, same numbers, again   accepted: IDLE; refused for now: UNSTORED; out of order:
                                                    CONTRADICTED; too large: OVERSIZED; refused, unknown, detached:
                                                    DOUBTFUL
CONTRADICTED  no link; was refused out of order     attached, and the answer is the head's last number: IDLE; else
              though it seemed unstored             FAILED
OVERSIZED     no link; was refused as too large       attached, published or not as the answer says: IDLE
              though it seemed unstored
FAILED        final                                 an answer that is neither number, or being fenced or
                                                    forgotten, leads here from anywhere
============  ====================================  =================================================================

The rules behind it:

* Numbers are assigned when a batch is offered (at the first attach, where none is known yet), and stay the same for all
  its transfers. An attach whose answer shows them unused frees nothing: the old transfer may still arrive. They are
  free again when the service has refused *every* transfer of the batch; a batch in doubt keeps them permanently. The
  exception is a batch that is refused as too large: all its transfers are of one size, so that an old one that arrives
  later is refused too, and what arrived before is in the answer to an attach that follows the refusal.
* A link is attached again with a null number, because the service echoes a given number.
* A number given at attach (a starting number, or one that a level is raised with) is a claim until a batch is accepted
  on it: meanwhile the service may answer that nothing is published (-1 or 0), and an answer that equals the head's last
  number proves nothing, since it may have been true before. The head is then sent again, which is always safe.
* Limits of numbers: another publisher with the same id *and* level shares our numbers, and its batch that begins and
  ends at the same numbers as ours cannot be distinguished from ours. Neither can, after a restart under the same level,
  a late transfer of the former process: a restart sends the same events from the number the service answered, or raises
  the level first (`core/claim.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from eventpump.errors import (
    EventPumpError,
    InvalidClientStateError,
    ProducerDisconnectedError,
    ProducerStateLostError,
)
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS, advance

_NOTHING_PUBLISHED = (-1, 0)
"""What the service answers for an id and level under which nothing is published: sources disagree (8.2)."""

B = TypeVar("B")


class Outcome(enum.Enum):
    """The known outcome of a batch."""

    PENDING = "pending"
    """Not known yet: it waits, or its first transfer is in flight."""
    PUBLISHED = "published"
    """It is stored, once."""
    REFUSED = "refused"
    """It is not stored and never will be. It has no numbers, and may be offered again as new."""
    UNKNOWN = "unknown"
    """It may be stored, now or later. It keeps its numbers and its place."""


class Step(enum.Enum):
    """The publisher's next step."""

    ATTACH = "attach"
    """Attach a link with `attach_request`. Without a head it may wait until the link is needed."""
    SEND = "send"
    """Transfer the head."""
    WAIT = "wait"
    """Wait for the outcome of the transfer in flight."""
    REST = "rest"
    """Nothing."""
    FAIL = "fail"
    """Raise `error()`, now and always."""


class Failure(enum.Enum):
    """Why publishing to a partition has failed permanently."""

    INVALID_STATE = "invalid state"
    FENCED = "fenced"
    STATE_LOST = "state lost"


class SequencerState(enum.Enum):
    """The state of a partition's publishing; see the module."""

    __hash__ = object.__hash__  # in C, which that of `Enum` is not: each batch takes three steps

    DETACHED = "detached"
    IDLE = "idle"
    WAITING = "waiting"
    READY = "ready"
    SENDING = "sending"
    DOUBTFUL = "doubtful"
    UNSTORED = "unstored"
    RESENDING = "resending"
    CONTRADICTED = "contradicted"
    OVERSIZED = "oversized"
    FAILED = "failed"


class SequencerInput(enum.Enum):
    """The inputs. The last three are answers to an attach, which `_judge` classifies."""

    __hash__ = object.__hash__  # as above

    OFFERED = "offered"
    WITHDRAWN = "withdrawn"
    SENDING = "sending"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    REFUSED_FOR_NOW = "refused for now"
    OUT_OF_ORDER = "out of order"
    TOO_LARGE = "too large"
    UNKNOWN = "unknown"
    DETACHED = "detached"
    FENCED = "fenced"
    ATTACHED = "attached"
    """Nothing of the head is stored, according to the answer."""
    STORED = "stored"
    """The head is stored."""
    MISMATCH = "mismatch"
    """Neither."""


_S = SequencerState
_I = SequencerInput

TRANSITIONS: Mapping[tuple[SequencerState, SequencerInput], SequencerState] = MappingProxyType(
    {
        (_S.DETACHED, _I.OFFERED): _S.WAITING,
        (_S.DETACHED, _I.ATTACHED): _S.IDLE,
        (_S.DETACHED, _I.MISMATCH): _S.FAILED,
        (_S.DETACHED, _I.FENCED): _S.FAILED,
        (_S.DETACHED, _I.DETACHED): _S.DETACHED,
        (_S.IDLE, _I.OFFERED): _S.READY,
        (_S.IDLE, _I.FENCED): _S.FAILED,
        (_S.IDLE, _I.DETACHED): _S.DETACHED,
        (_S.WAITING, _I.ATTACHED): _S.READY,
        (_S.WAITING, _I.MISMATCH): _S.FAILED,
        (_S.WAITING, _I.FENCED): _S.FAILED,
        (_S.WAITING, _I.DETACHED): _S.WAITING,
        (_S.WAITING, _I.WITHDRAWN): _S.DETACHED,
        (_S.READY, _I.SENDING): _S.SENDING,
        (_S.READY, _I.FENCED): _S.FAILED,
        (_S.READY, _I.DETACHED): _S.WAITING,
        (_S.READY, _I.WITHDRAWN): _S.IDLE,
        (_S.SENDING, _I.ACCEPTED): _S.IDLE,
        (_S.SENDING, _I.REFUSED): _S.IDLE,
        (_S.SENDING, _I.REFUSED_FOR_NOW): _S.READY,
        (_S.SENDING, _I.OUT_OF_ORDER): _S.FAILED,
        (_S.SENDING, _I.TOO_LARGE): _S.IDLE,
        (_S.SENDING, _I.FENCED): _S.FAILED,
        (_S.SENDING, _I.UNKNOWN): _S.DOUBTFUL,
        (_S.SENDING, _I.DETACHED): _S.DOUBTFUL,
        (_S.SENDING, _I.WITHDRAWN): _S.SENDING,
        (_S.DOUBTFUL, _I.ATTACHED): _S.UNSTORED,
        (_S.DOUBTFUL, _I.STORED): _S.IDLE,
        (_S.DOUBTFUL, _I.MISMATCH): _S.FAILED,
        (_S.DOUBTFUL, _I.FENCED): _S.FAILED,
        (_S.DOUBTFUL, _I.DETACHED): _S.DOUBTFUL,
        (_S.DOUBTFUL, _I.WITHDRAWN): _S.DOUBTFUL,
        (_S.UNSTORED, _I.SENDING): _S.RESENDING,
        (_S.UNSTORED, _I.FENCED): _S.FAILED,
        (_S.UNSTORED, _I.DETACHED): _S.DOUBTFUL,
        (_S.UNSTORED, _I.WITHDRAWN): _S.UNSTORED,
        (_S.RESENDING, _I.ACCEPTED): _S.IDLE,
        (_S.RESENDING, _I.REFUSED): _S.DOUBTFUL,
        (_S.RESENDING, _I.REFUSED_FOR_NOW): _S.UNSTORED,
        (_S.RESENDING, _I.OUT_OF_ORDER): _S.CONTRADICTED,
        (_S.RESENDING, _I.TOO_LARGE): _S.OVERSIZED,
        (_S.RESENDING, _I.FENCED): _S.FAILED,
        (_S.RESENDING, _I.UNKNOWN): _S.DOUBTFUL,
        (_S.RESENDING, _I.DETACHED): _S.DOUBTFUL,
        (_S.RESENDING, _I.WITHDRAWN): _S.RESENDING,
        (_S.CONTRADICTED, _I.ATTACHED): _S.FAILED,
        (_S.CONTRADICTED, _I.STORED): _S.IDLE,
        (_S.CONTRADICTED, _I.MISMATCH): _S.FAILED,
        (_S.CONTRADICTED, _I.FENCED): _S.FAILED,
        (_S.CONTRADICTED, _I.DETACHED): _S.CONTRADICTED,
        (_S.CONTRADICTED, _I.WITHDRAWN): _S.CONTRADICTED,
        (_S.OVERSIZED, _I.ATTACHED): _S.IDLE,
        (_S.OVERSIZED, _I.STORED): _S.IDLE,
        (_S.OVERSIZED, _I.MISMATCH): _S.FAILED,
        (_S.OVERSIZED, _I.FENCED): _S.FAILED,
        (_S.OVERSIZED, _I.DETACHED): _S.OVERSIZED,
        (_S.OVERSIZED, _I.WITHDRAWN): _S.OVERSIZED,
        (_S.FAILED, _I.FENCED): _S.FAILED,
        (_S.FAILED, _I.DETACHED): _S.FAILED,
        (_S.FAILED, _I.WITHDRAWN): _S.FAILED,
    }
)
"""Every legal transition. Any other pair is a bug of the shell, and raises `KeyError`."""

_STEPS: Mapping[SequencerState, Step] = MappingProxyType(
    {
        _S.DETACHED: Step.ATTACH,
        _S.IDLE: Step.REST,
        _S.WAITING: Step.ATTACH,
        _S.READY: Step.SEND,
        _S.SENDING: Step.WAIT,
        _S.DOUBTFUL: Step.ATTACH,
        _S.UNSTORED: Step.SEND,
        _S.RESENDING: Step.WAIT,
        _S.CONTRADICTED: Step.ATTACH,
        _S.OVERSIZED: Step.ATTACH,
        _S.FAILED: Step.FAIL,
    }
)

_MAY_BE_STORED = frozenset({_S.DOUBTFUL, _S.UNSTORED, _S.RESENDING, _S.CONTRADICTED, _S.OVERSIZED})
"""The states in which an earlier transfer of the head is in doubt, whatever the outcome of a later one."""


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """The producer state to attach with: none of the three properties, or all three, null where None (8.2)."""

    producer_id: int | None = None
    owner_level: int | None = None
    number: int | None = None

    @property
    def is_blank(self) -> bool:
        """Whether none of the properties is sent."""
        return self.producer_id is None and self.owner_level is None and self.number is None


class ProducerAnswer(NamedTuple):
    """The service's answer to an attach, with all its fields."""

    producer_id: int
    owner_level: int
    last_number: int


class Publication(Generic[B]):
    """A batch, from its offer on. Only its sequencer writes to it.

    Attributes:
        first: The number of its first event; None while it has none.
    """

    __slots__ = ("batch", "count", "first", "outcome")

    def __init__(self, batch: B, count: int) -> None:
        self.batch = batch
        self.count = count
        self.first: int | None = None
        self.outcome = Outcome.PENDING

    @property
    def last(self) -> int | None:
        """The number of its last event."""
        return None if self.first is None else advance(self.first, self.count - 1)

    def __repr__(self) -> str:
        return f"Publication({self.count} events from {self.first}, {self.outcome.value})"


class PartitionSequencer(Generic[B]):
    """Assigns numbers to a partition's batches, and determines unknown outcomes.

    Args:
        partition_id: Used only in messages.
        starting_number: The number before the first to use, sent to the service at the first attach instead of asking
            for it.

    Attributes:
        state: See the module.
        head: The batch at the head; None if there is none. A failed sequencer keeps one that is in doubt.
        last_number: The last number known to be published (-1 or 0 if there is none), None before the first attach.
        problem: A description of the failure.

    Raises:
        ValueError: A value is outside the service's range.
    """

    __slots__ = (
        "_is_claimed",
        "_is_withdrawn",
        "_starting_number",
        "failure",
        "head",
        "last_number",
        "owner_level",
        "partition_id",
        "problem",
        "producer_id",
        "state",
    )

    def __init__(
        self,
        partition_id: str,
        *,
        producer_id: int | None = None,
        owner_level: int | None = None,
        starting_number: int | None = None,
    ) -> None:
        _check("producer id", producer_id, MAX_PRODUCER_ID)
        _check("owner level", owner_level, MAX_OWNER_LEVEL)
        _check("starting number", starting_number, NUMBERS - 1)
        self.partition_id = partition_id
        self.state = SequencerState.DETACHED
        self.head: Publication[B] | None = None
        self.producer_id = producer_id
        self.owner_level = owner_level
        self.last_number: int | None = None
        self.failure: Failure | None = None
        self.problem = ""
        self._starting_number = starting_number
        self._is_claimed = starting_number is not None
        self._is_withdrawn = False

    # ------------------------------------------------------------------------------------------ what to do

    @property
    def step(self) -> Step:
        """The next step."""
        return _STEPS[self.state]

    @property
    def attach_request(self) -> AttachRequest:
        """The producer state to attach with, if the step is to attach."""
        if self.last_number is None:
            return AttachRequest(self.producer_id, self.owner_level, self._starting_number)
        return AttachRequest(self.producer_id, self.owner_level)

    def error(self) -> EventPumpError:
        """Return the error of a failed partition, a new one for each caller."""
        if self.failure is Failure.FENCED:
            return ProducerDisconnectedError(self.problem, entity=f"partition {self.partition_id}")
        if self.failure is Failure.STATE_LOST:
            return ProducerStateLostError((self.partition_id,), self.problem)
        assert self.failure is Failure.INVALID_STATE
        return InvalidClientStateError(self.partition_id, self.problem)

    # ------------------------------------------------------------------------------------------ the head

    def offer(self, batch: B, count: int) -> Publication[B]:
        """Put a batch at the head, which must be free. It gets its numbers now, or at the first attach."""
        if self.failure is not None:
            raise self.error()
        if not 0 < count < NUMBERS:
            raise ValueError("a batch has at least one event")
        self._move(SequencerInput.OFFERED)
        head = self.head = Publication(batch, count)
        self._is_withdrawn = False
        if self.last_number is not None:
            head.first = advance(self.last_number)
        return head

    def withdraw(self, publication: Publication[B]) -> Outcome:
        """Record that its caller stops trying: cancelled, or out of retries. Always allowed.

        Returns:
            REFUSED if nothing of it can be stored: it is not at the head any more. UNKNOWN otherwise: it stays there
            until its outcome is known. Its outcome, if that is already known.
        """
        if publication is not self.head:
            return publication.outcome
        untouched = self.state in (SequencerState.WAITING, SequencerState.READY)
        self._move(SequencerInput.WITHDRAWN)
        if untouched:
            self._free()
            return Outcome.REFUSED
        self._is_withdrawn = True
        publication.outcome = Outcome.UNKNOWN
        return Outcome.UNKNOWN

    def sending(self) -> int:
        """Record that the head is being sent on the link; return the number of its first event."""
        self._move(SequencerInput.SENDING)
        assert self.head is not None
        assert self.head.first is not None
        return self.head.first

    # ------------------------------------------------------------------------------------------------ its outcome

    def accepted(self) -> None:
        """Record that the service has stored it, now or before."""
        self._move(SequencerInput.ACCEPTED)
        self._published()

    def refused(self) -> None:
        """Record that the service refused this transfer, and would refuse another. An earlier one may still be open."""
        self._move(SequencerInput.REFUSED)
        if self.state is SequencerState.IDLE:
            self._free()

    def refused_for_now(self) -> None:
        """Record that the service has refused this transfer, but may take the next (throttling)."""
        self._not_stored()

    def refused_out_of_order(self) -> None:
        """Record that the service has refused this transfer as out of order. Final if no earlier transfer is in
        doubt."""
        self._move(SequencerInput.OUT_OF_ORDER)
        if self.state is SequencerState.FAILED:
            assert self.head is not None
            self._fail(
                Failure.INVALID_STATE,
                f"the service refused number {self.head.first} as out of order, after {self.last_number}, and no "
                "earlier transfer explains it; another publisher may have the same id, or the starting number is wrong",
            )
            self._free()

    def refused_as_too_large(self) -> None:
        """Record that the service has refused this transfer as too large: it is stored only if the next attach answers
        that an earlier transfer was."""
        # The answer to a claim proves nothing: an earlier transfer stays in doubt.
        self._move(SequencerInput.REFUSED if self._is_claimed else SequencerInput.TOO_LARGE)
        if self.state is SequencerState.IDLE:
            self._free()

    def outcome_unknown(self) -> None:
        """Record that the outcome of the transfer is unknown: any error that is not a refusal."""
        self._move(SequencerInput.UNKNOWN)
        self._in_doubt()

    # ------------------------------------------------------------------------------------------ the link

    def attached(self, producer_id: int | None, owner_level: int | None, number: int | None) -> None:
        """Record the service's answer to an attach with `attach_request`; None for omitted fields."""
        happened, problem = self._judge(producer_id, owner_level, number)
        before = self.state
        self._move(happened)
        if happened is SequencerInput.MISMATCH or self.state is SequencerState.FAILED:
            self._fail(Failure.INVALID_STATE, problem)
            if before is SequencerState.WAITING:
                self._free()
            return
        if happened is SequencerInput.STORED:
            self._published()
            return
        if before is SequencerState.OVERSIZED:
            self._free()
            return
        if self.last_number is None:
            assert number is not None  # as `_judge` has found
            self.producer_id, self.owner_level, self.last_number = producer_id, owner_level, number
            if self.head is not None:
                self.head.first = advance(number)

    def detached(self) -> None:
        """Record that the link is lost. A transfer in flight is then in doubt."""
        self._move(SequencerInput.DETACHED)
        if self.state is SequencerState.DOUBTFUL:
            self._in_doubt()

    def fenced(self, description: str, *, transfer_refused: bool) -> None:
        """Record that a publisher with a higher level took over: final.

        Args:
            transfer_refused: Whether the transfer in flight was refused for it; False if an attach was refused, or the
                link ended.
        """
        self._shut_out(Failure.FENCED, description, transfer_refused=transfer_refused)

    def state_lost(self, problem: str) -> None:
        """Record that an attach showed that the service has forgotten the publisher: final. A batch in doubt stays
        so."""
        self._shut_out(Failure.STATE_LOST, problem, transfer_refused=False)

    # ------------------------------------------------------------------------------------------ inside

    def _shut_out(self, failure: Failure, problem: str, *, transfer_refused: bool) -> None:
        before = self.state
        self._move(SequencerInput.FENCED)
        if before is SequencerState.FAILED:
            return
        self._fail(failure, problem)
        untouched = before in (SequencerState.WAITING, SequencerState.READY)
        if untouched or (before is SequencerState.SENDING and transfer_refused):
            self._free()
        elif self.head is not None:
            self._in_doubt()

    def _judge(
        self, producer_id: int | None, owner_level: int | None, number: int | None
    ) -> tuple[SequencerInput, str]:
        asked = self.attach_request
        if producer_id is None or owner_level is None or number is None:
            return SequencerInput.MISMATCH, "the service answered without a producer id, owner level or number"
        if producer_id < 0 or owner_level < 0 or not -1 <= number < NUMBERS:
            return SequencerInput.MISMATCH, f"the service answered ({producer_id}, {owner_level}, {number})"
        if asked.producer_id not in (None, producer_id) or asked.owner_level not in (None, owner_level):
            return SequencerInput.MISMATCH, (
                f"attached as producer {asked.producer_id} of level {asked.owner_level}, "
                f"the service answered {producer_id} of level {owner_level}"
            )
        if self.last_number is None:
            return SequencerInput.ATTACHED, ""
        if number == self.last_number or (self._is_claimed and number in _NOTHING_PUBLISHED):
            return SequencerInput.ATTACHED, (
                f"the service refused the numbers after {number} as out of order, and then answered that they come next"
            )
        head = self.head
        if head is not None and number == head.last and self.state in _MAY_BE_STORED:
            if not self._is_claimed:
                return SequencerInput.STORED, ""
            return SequencerInput.ATTACHED, (
                f"the service refused the numbers up to {number} as out of order, and nothing shows whose they are"
            )
        doubt = "" if head is None or self.state not in _MAY_BE_STORED else f" or {head.last}"
        return SequencerInput.MISMATCH, f"the last number is {self.last_number}{doubt}, the service answered {number}"

    def _not_stored(self) -> None:
        # A batch without waiting callers that is not in doubt ends with its refusal.
        if self._is_withdrawn and self.state is SequencerState.SENDING:
            self.refused()
        else:
            self._move(SequencerInput.REFUSED_FOR_NOW)

    def _published(self) -> None:
        head = self.head
        assert head is not None
        head.outcome = Outcome.PUBLISHED
        self.last_number = head.last
        self._is_claimed = False
        self.head = None

    def _free(self) -> None:
        head = self.head
        assert head is not None
        head.outcome = Outcome.REFUSED
        head.first = None
        self.head = None

    def _in_doubt(self) -> None:
        assert self.head is not None
        self.head.outcome = Outcome.UNKNOWN

    def _fail(self, failure: Failure, problem: str) -> None:
        self.failure = failure
        self.problem = problem

    def _move(self, happened: SequencerInput) -> None:
        self.state = TRANSITIONS[self.state, happened]


def _check(name: str, value: int | None, maximum: int) -> None:
    if value is not None and not 0 <= value <= maximum:
        raise ValueError(f"the {name} must be between 0 and {maximum}, not {value}")
