"""Idempotent publishing to one partition: each rule by itself, every transition, and worlds where anything happens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from eventpump.core.sequencer import (
    TRANSITIONS,
    AttachRequest,
    Failure,
    Outcome,
    PartitionSequencer,
    Publication,
    SequencerInput,
    SequencerState,
    Step,
)
from eventpump.errors import InvalidClientStateError, ProducerDisconnectedError, ProducerStateLostError
from eventpump.eventhubs.numbering import NUMBERS, advance, distance
from tests.unit.core.publishing import PRODUCER_ID, World, walk

MAX = NUMBERS - 1
S = SequencerState
I = SequencerInput  # noqa: E741 - a row of the table fits a line


Verb = Callable[[PartitionSequencer[str]], object]


def step(sequencer: PartitionSequencer[str]) -> Step:
    """Read the step again: a checker would think that no call changes it."""
    return sequencer.step


def outcome(publication: Publication[str]) -> Outcome:
    """Read the outcome again."""
    return publication.outcome


def attached(last: int = 0) -> PartitionSequencer[str]:
    """Make a sequencer with a link, which knows that `last` is published."""
    sequencer = PartitionSequencer[str]("0")
    sequencer.attached(PRODUCER_ID, 0, last)
    return sequencer


def doubtful(last: int = 0, count: int = 3) -> tuple[PartitionSequencer[str], Publication[str]]:
    """Make one whose head was sent, and the link lost before an answer."""
    sequencer = attached(last)
    publication = sequencer.offer("a", count)
    sequencer.sending()
    sequencer.detached()
    return sequencer, publication


def again(sequencer: PartitionSequencer[str], number: int) -> None:
    """Attach again; the service answers this number."""
    sequencer.attached(sequencer.producer_id, sequencer.owner_level, number)


# ------------------------------------------------------------------------------------------------- arithmetic


def test_numbers_wrap_to_zero() -> None:
    """After 2147483647 comes 0."""
    assert advance(2147483647) == 0
    assert advance(2147483646, 3) == 1
    assert distance(2147483646, 1) == 3


@pytest.mark.parametrize(("answer", "first"), [(-1, 0), (0, 1), (41, 42), (2147483647, 0)])
def test_attach_answer_plus_one_is_the_next_number(answer: int, first: int) -> None:
    """Both initial answers, -1 and 0, are taken, and the first number is the one after what was answered."""
    sequencer = attached(answer)
    assert sequencer.last_number == answer
    assert sequencer.offer("a", 2).first == first


# ------------------------------------------------------------------------------------------------- attaching


def test_first_attach_carries_what_was_given() -> None:
    """Nothing given: none of the three properties. Something given: that, and null for the rest."""
    assert PartitionSequencer[str]("0").attach_request.is_blank
    given = PartitionSequencer[str]("0", owner_level=4).attach_request
    assert given == AttachRequest(None, 4, None)
    assert not given.is_blank


def test_attach_answer_becomes_the_state() -> None:
    """Values left out are filled by the service."""
    sequencer = PartitionSequencer[str]("0", owner_level=4)
    sequencer.attached(9, 4, 17)
    assert (sequencer.producer_id, sequencer.owner_level, sequencer.last_number) == (9, 4, 17)


def test_second_attach_carries_id_level_and_a_null_number() -> None:
    """The service echoes a number it is given, so only null shows the truth."""
    sequencer = attached(5)
    sequencer.detached()
    assert sequencer.attach_request == AttachRequest(PRODUCER_ID, 0, None)


def test_starting_number_goes_out_on_the_first_attach_only() -> None:
    """Until an attach was answered it is given, then never more."""
    sequencer = PartitionSequencer[str]("0", producer_id=9, owner_level=1, starting_number=41)
    assert sequencer.attach_request == AttachRequest(9, 1, 41)
    sequencer.detached()
    assert sequencer.attach_request == AttachRequest(9, 1, 41)
    sequencer.attached(9, 1, 41)
    assert sequencer.offer("a", 1).first == 42
    sequencer.detached()
    assert sequencer.attach_request == AttachRequest(9, 1, None)


@pytest.mark.parametrize("answer", [4, 6, 0, -1])
def test_attach_answer_to_an_idle_publisher_must_be_the_last_number(answer: int) -> None:
    """Nothing is in doubt: any other answer than the last committed number is an invalid state."""
    sequencer = attached(5)
    sequencer.detached()
    again(sequencer, answer)
    assert sequencer.failure is Failure.INVALID_STATE
    assert step(sequencer) is Step.FAIL


@pytest.mark.parametrize("answer", [(None, 0, 0), (7, None, 0), (7, 0, None), (7, 0, -2), (7, 0, NUMBERS), (-1, 0, 0)])
def test_attach_answer_that_is_no_state_fails(answer: tuple[int | None, int | None, int | None]) -> None:
    """A service that does not answer the three values cannot be published to idempotently."""
    sequencer = PartitionSequencer[str]("0")
    publication = sequencer.offer("a", 1)
    sequencer.attached(*answer)
    assert isinstance(sequencer.error(), InvalidClientStateError)
    assert outcome(publication) is Outcome.REFUSED


@pytest.mark.parametrize(("producer_id", "owner_level"), [(8, 0), (7, 1)])
def test_attach_answer_for_another_id_or_level_fails(producer_id: int, owner_level: int) -> None:
    """An attach with a producer id is answered with that id."""
    sequencer = attached(5)
    sequencer.detached()
    sequencer.attached(producer_id, owner_level, 5)
    assert sequencer.failure is Failure.INVALID_STATE


@pytest.mark.parametrize("name", ["producer_id", "owner_level", "starting_number"])
@pytest.mark.parametrize("value", [-1, 2**63])
def test_start_values_outside_the_range_are_refused(name: str, value: int) -> None:
    """protocol.md 8.1; -1 is an answer, but not to be given."""
    kwargs: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match="between"):
        PartitionSequencer[str]("0", **kwargs)


# ------------------------------------------------------------------------------------------------- numbers


def test_offer_assigns_numbers_once_a_state_is_known() -> None:
    """With a state known they are there at once; before the first attach, with its answer."""
    assert attached(5).offer("a", 3).first == 6
    sequencer = PartitionSequencer[str]("0")
    publication = sequencer.offer("a", 3)
    assert [publication.first, publication.last] == [None, None]
    sequencer.attached(PRODUCER_ID, 0, 5)
    assert [publication.first, publication.last] == [6, 8]


def test_offer_continues_numbers_from_batch_to_batch() -> None:
    """The state moves on with success, by the count, across the wrap."""
    sequencer = attached(MAX - 2)
    firsts = []
    for _ in range(3):
        sequencer.offer("a", 2)
        firsts.append(sequencer.sending())
        sequencer.accepted()
    assert firsts == [MAX - 1, 0, 2]
    assert sequencer.last_number == 3


def test_numbers_of_a_batch_stay_the_same_for_every_transfer() -> None:
    """Throttled, never sent, lost and sent again: the same numbers."""
    sequencer = attached(5)
    publication = sequencer.offer("a", 3)
    firsts = {sequencer.sending()}
    sequencer.refused_for_now()
    firsts.add(sequencer.sending())
    sequencer.refused_for_now()
    sequencer.detached()
    again(sequencer, 5)
    firsts.add(sequencer.sending())
    sequencer.outcome_unknown()
    again(sequencer, 5)
    firsts.add(sequencer.sending())
    sequencer.refused_for_now()
    firsts.add(sequencer.sending())
    sequencer.accepted()
    assert firsts == {6}
    assert outcome(publication) is Outcome.PUBLISHED
    assert (publication.first, sequencer.last_number) == (6, 8)


def test_numbers_of_a_refused_batch_go_to_the_next() -> None:
    """Numbers are free again when the service has refused the batch."""
    sequencer = attached(5)
    refused = sequencer.offer("a", 3)
    sequencer.sending()
    sequencer.refused()
    assert (refused.outcome, refused.first) == (Outcome.REFUSED, None)
    assert sequencer.head is None
    assert sequencer.last_number == 5
    assert sequencer.offer("b", 1).first == 6


def test_numbers_not_stored_yet_stay_with_their_batch() -> None:
    """Not yet stored is not refused: the batch stays at the head, and nothing else is taken."""
    sequencer, publication = doubtful(5)
    again(sequencer, 5)
    assert sequencer.withdraw(publication) is Outcome.UNKNOWN
    assert sequencer.head is publication
    with pytest.raises(KeyError):
        sequencer.offer("b", 1)


def test_refusal_does_not_settle_an_earlier_transfer_in_doubt() -> None:
    """A transfer in doubt is not settled by the refusal of the next one."""
    sequencer, publication = doubtful(5)
    again(sequencer, 5)
    sequencer.sending()
    sequencer.refused()
    assert outcome(publication) is Outcome.UNKNOWN
    assert publication.first == 6
    assert step(sequencer) is Step.ATTACH
    again(sequencer, 8)
    assert outcome(publication) is Outcome.PUBLISHED


def test_offer_of_a_second_batch_is_refused() -> None:
    """A second one waits its turn: offering it is the shell's mistake, whatever the first is at."""
    sequencer = attached()
    sequencer.offer("a", 1)
    with pytest.raises(KeyError):
        sequencer.offer("b", 1)


@pytest.mark.parametrize("count", [0, -1, NUMBERS])
def test_offer_of_an_empty_batch_is_refused(count: int) -> None:
    """An empty batch has no numbers."""
    with pytest.raises(ValueError, match="at least one"):
        attached().offer("a", count)


# ------------------------------------------------------------------------------------------------- withdrawing


def test_withdraw_before_anything_was_sent_refuses_the_batch() -> None:
    """Cancelled before the first byte left: no numbers, and the place is free."""
    sequencer = attached(5)
    publication = sequencer.offer("a", 3)
    assert sequencer.withdraw(publication) is Outcome.REFUSED
    assert publication.first is None
    assert sequencer.offer("b", 1).first == 6


def test_withdraw_without_a_link_refuses_the_batch() -> None:
    """The attach that never came took nothing with it."""
    sequencer = PartitionSequencer[str]("0")
    assert sequencer.withdraw(sequencer.offer("a", 3)) is Outcome.REFUSED
    assert step(sequencer) is Step.ATTACH
    assert sequencer.head is None


def test_withdraw_while_sent_leaves_the_batch_in_doubt() -> None:
    """Cancelled later it stays at the head, and its outcome is read from it."""
    sequencer = attached(5)
    publication = sequencer.offer("a", 3)
    sequencer.sending()
    assert sequencer.withdraw(publication) is Outcome.UNKNOWN
    assert [sequencer.head] == [publication]
    sequencer.accepted()
    assert outcome(publication) is Outcome.PUBLISHED
    assert [sequencer.head] == [None]
    assert sequencer.withdraw(publication) is Outcome.PUBLISHED


def test_withdraw_of_what_was_not_stored_refuses_the_batch() -> None:
    """No caller waits for another try, and nothing is in doubt: it ends."""
    sequencer = attached(5)
    publication = sequencer.offer("a", 3)
    sequencer.sending()
    sequencer.withdraw(publication)
    sequencer.refused_for_now()
    assert outcome(publication) is Outcome.REFUSED
    assert step(sequencer) is Step.REST
    retried = sequencer.offer("b", 1)
    sequencer.sending()
    sequencer.refused_for_now()
    assert outcome(retried) is Outcome.PENDING


# ------------------------------------------------------------------------------------------------- settling


@pytest.mark.parametrize("last", [-1, 0, 5, MAX, MAX - 1, MAX - 3])
def test_attach_answer_of_the_last_number_means_stored(last: int) -> None:
    """An attach that is answered with the batch's last number settles it."""
    sequencer, publication = doubtful(last)
    assert outcome(publication) is Outcome.UNKNOWN
    assert step(sequencer) is Step.ATTACH
    assert sequencer.attach_request.number is None
    again(sequencer, advance(last, 3))
    assert outcome(publication) is Outcome.PUBLISHED
    assert step(sequencer) is Step.REST
    assert sequencer.last_number == advance(last, 3)


@pytest.mark.parametrize("last", [-1, 0, 5, MAX, MAX - 1, MAX - 3])
def test_attach_answer_before_the_first_number_means_not_stored_yet(last: int) -> None:
    """The old transfer may still arrive: the same bytes go out with the same numbers."""
    sequencer, publication = doubtful(last)
    again(sequencer, last)
    assert step(sequencer) is Step.SEND
    assert outcome(publication) is Outcome.UNKNOWN
    assert sequencer.sending() == advance(last)


@pytest.mark.parametrize("answer", [4, 6, 7, 9, 0])
def test_attach_answer_of_neither_number_fails(answer: int) -> None:
    """Neither the last committed number nor the doubtful batch's last one: an invalid state, and still in doubt."""
    sequencer, publication = doubtful(5)
    again(sequencer, answer)
    assert isinstance(sequencer.error(), InvalidClientStateError)
    assert "5 or 8" in str(sequencer.error())
    assert outcome(publication) is Outcome.UNKNOWN
    assert sequencer.head is publication


def test_out_of_order_after_a_repeat_is_compared_once_more() -> None:
    """Stored after we looked, and not recognised as a repeat: the last number settles it."""
    sequencer, publication = doubtful(5)
    again(sequencer, 5)
    sequencer.sending()
    sequencer.refused_out_of_order()
    assert step(sequencer) is Step.ATTACH
    assert sequencer.attach_request == AttachRequest(PRODUCER_ID, 0, None)
    again(sequencer, 8)
    assert outcome(publication) is Outcome.PUBLISHED


@pytest.mark.parametrize("answer", [5, 6])
def test_out_of_order_and_not_stored_fails(answer: int) -> None:
    """A sequencing error that settlement cannot explain is fatal, and the batch stays in doubt."""
    sequencer, publication = doubtful(5)
    again(sequencer, 5)
    sequencer.sending()
    sequencer.refused_out_of_order()
    again(sequencer, answer)
    assert sequencer.failure is Failure.INVALID_STATE
    assert outcome(publication) is Outcome.UNKNOWN


def test_out_of_order_on_the_first_transfer_fails_at_once() -> None:
    """The first transfer of a batch that is refused so cannot be explained: fatal, and the batch is not stored."""
    sequencer = attached(5)
    publication = sequencer.offer("a", 3)
    sequencer.sending()
    sequencer.refused_out_of_order()
    assert isinstance(sequencer.error(), InvalidClientStateError)
    assert outcome(publication) is Outcome.REFUSED
    assert sequencer.head is None


def test_offer_on_a_failed_partition_fails() -> None:
    """Each gets an error of its own."""
    sequencer = attached(5)
    sequencer.detached()
    again(sequencer, 9)
    raised = []
    for _ in range(2):
        with pytest.raises(InvalidClientStateError) as caught:
            sequencer.offer("a", 1)
        raised.append(caught.value)
    assert raised[0] is not raised[1]


# ------------------------------------------------------------------------------------------------- claimed numbers


@pytest.mark.parametrize("answer", [-1, 0, 41])
def test_attach_answer_may_not_know_a_given_number(answer: int) -> None:
    """As long as nothing is published on it, the service may say that nothing is published at all."""
    sequencer = PartitionSequencer[str]("0", producer_id=9, owner_level=1, starting_number=41)
    sequencer.attached(9, 1, 41)
    publication = sequencer.offer("a", 2)
    sequencer.sending()
    sequencer.detached()
    sequencer.attached(9, 1, answer)
    assert step(sequencer) is Step.SEND
    assert publication.first == 42


def test_attach_answer_under_a_given_number_proves_nothing() -> None:
    """It may have been stored by another before: the batch goes out again, and only an accepted transfer counts."""
    sequencer = PartitionSequencer[str]("0", producer_id=9, owner_level=1, starting_number=8)
    sequencer.attached(9, 1, 8)
    publication = sequencer.offer("a", 2)
    sequencer.sending()
    sequencer.detached()
    sequencer.attached(9, 1, 10)
    assert outcome(publication) is Outcome.UNKNOWN
    assert step(sequencer) is Step.SEND
    sequencer.sending()
    sequencer.refused_out_of_order()
    sequencer.attached(9, 1, 10)
    assert sequencer.failure is Failure.INVALID_STATE
    assert outcome(publication) is Outcome.UNKNOWN


def test_given_number_counts_as_read_once_a_batch_is_accepted() -> None:
    """From then on the service knows it, and answers have to fit."""
    sequencer = PartitionSequencer[str]("0", producer_id=9, owner_level=1, starting_number=41)
    sequencer.attached(9, 1, 41)
    sequencer.offer("a", 2)
    sequencer.sending()
    sequencer.accepted()
    sequencer.detached()
    sequencer.attached(9, 1, 0)
    assert sequencer.failure is Failure.INVALID_STATE


# ------------------------------------------------------------------------------------------------- fenced


def test_fenced_transfer_is_final() -> None:
    """A transfer refused for a higher level is not stored; nothing is ever sent again."""
    sequencer = attached(5)
    publication = sequencer.offer("a", 3)
    sequencer.sending()
    sequencer.fenced("a higher epoch", transfer_refused=True)
    assert outcome(publication) is Outcome.REFUSED
    assert step(sequencer) is Step.FAIL
    with pytest.raises(ProducerDisconnectedError, match="a higher epoch"):
        sequencer.offer("b", 1)
    sequencer.detached()
    assert step(sequencer) is Step.FAIL


def test_forgotten_producer_is_final() -> None:
    """What nothing was sent of is refused; what was in doubt stays so."""
    for verbs, outcome in (([_OFFER], Outcome.REFUSED), ([_OFFER, _SEND, _LOSE], Outcome.UNKNOWN)):
        sequencer = attached(5)
        if outcome is Outcome.REFUSED:
            sequencer.detached()
        for verb in verbs:
            verb(sequencer)
        sequencer.state_lost("the service answers -1")
        assert (sequencer.failure, sequencer.step) == (Failure.STATE_LOST, Step.FAIL)
        assert isinstance(sequencer.error(), ProducerStateLostError)
        assert (sequencer.head is None) is (outcome is Outcome.REFUSED)
        assert sequencer.head is None or sequencer.head.outcome is outcome


def test_fenced_in_doubt_stays_in_doubt() -> None:
    """An earlier transfer may have been stored before the level was raised."""
    sequencer, publication = doubtful(5)
    again(sequencer, 5)
    sequencer.sending()
    sequencer.fenced("a higher epoch", transfer_refused=True)
    assert outcome(publication) is Outcome.UNKNOWN
    assert sequencer.head is publication
    assert sequencer.failure is Failure.FENCED


def test_fenced_by_a_detach_leaves_the_transfer_in_doubt() -> None:
    """Only a refusal of the transfer itself says that it is not stored."""
    sequencer = attached(5)
    publication = sequencer.offer("a", 3)
    sequencer.sending()
    sequencer.fenced("a higher epoch", transfer_refused=False)
    assert outcome(publication) is Outcome.UNKNOWN


def test_first_failure_stands() -> None:
    """What comes later changes neither the reason nor its words."""
    sequencer = attached(5)
    sequencer.detached()
    again(sequencer, 9)
    problem = sequencer.problem
    sequencer.fenced("a higher epoch", transfer_refused=False)
    assert (sequencer.failure, sequencer.problem) == (Failure.INVALID_STATE, problem)


# ------------------------------------------------------------------------------------------------- the table

_OFFER: Verb = lambda s: s.offer("a", 3)  # noqa: E731 - a path of the table fits a line
_SEND: Verb = PartitionSequencer.sending
_LOSE: Verb = PartitionSequencer.detached
_LOOK: Verb = lambda s: again(s, 5)  # noqa: E731
_PATHS: dict[S, list[Verb]] = {
    S.DETACHED: [_LOSE],
    S.IDLE: [],
    S.WAITING: [_OFFER, _LOSE],
    S.READY: [_OFFER],
    S.SENDING: [_OFFER, _SEND],
    S.DOUBTFUL: [_OFFER, _SEND, _LOSE],
    S.UNSTORED: [_OFFER, _SEND, _LOSE, _LOOK],
    S.RESENDING: [_OFFER, _SEND, _LOSE, _LOOK, _SEND],
    S.CONTRADICTED: [_OFFER, _SEND, _LOSE, _LOOK, _SEND, PartitionSequencer.refused_out_of_order],
    S.OVERSIZED: [_OFFER, _SEND, _LOSE, _LOOK, _SEND, PartitionSequencer.refused_as_too_large],
}
_VERBS: dict[I, Verb] = {
    I.SENDING: lambda s: s.sending(),
    I.ACCEPTED: lambda s: s.accepted(),
    I.REFUSED: lambda s: s.refused(),
    I.REFUSED_FOR_NOW: lambda s: s.refused_for_now(),
    I.OUT_OF_ORDER: lambda s: s.refused_out_of_order(),
    I.TOO_LARGE: lambda s: s.refused_as_too_large(),
    I.UNKNOWN: lambda s: s.outcome_unknown(),
    I.DETACHED: lambda s: s.detached(),
    I.FENCED: lambda s: s.fenced("x", transfer_refused=False),
    I.OFFERED: lambda s: s.offer("b", 1),
    I.ATTACHED: lambda s: again(s, 5),
    I.STORED: lambda s: again(s, 8),
    I.MISMATCH: lambda s: again(s, 7),
}
_LEGAL: dict[S, dict[I, S]] = {
    S.DETACHED: {I.OFFERED: S.WAITING, I.ATTACHED: S.IDLE, I.STORED: S.FAILED, I.MISMATCH: S.FAILED},
    S.IDLE: {I.OFFERED: S.READY, I.DETACHED: S.DETACHED},
    S.WAITING: {I.ATTACHED: S.READY, I.STORED: S.FAILED, I.MISMATCH: S.FAILED},
    S.READY: {I.SENDING: S.SENDING, I.DETACHED: S.WAITING},
    S.SENDING: {
        I.ACCEPTED: S.IDLE,
        I.REFUSED: S.IDLE,
        I.REFUSED_FOR_NOW: S.READY,
        I.OUT_OF_ORDER: S.FAILED,
        I.TOO_LARGE: S.IDLE,
        I.UNKNOWN: S.DOUBTFUL,
        I.DETACHED: S.DOUBTFUL,
    },
    S.DOUBTFUL: {I.ATTACHED: S.UNSTORED, I.STORED: S.IDLE, I.MISMATCH: S.FAILED},
    S.UNSTORED: {I.SENDING: S.RESENDING, I.DETACHED: S.DOUBTFUL},
    S.RESENDING: {
        I.ACCEPTED: S.IDLE,
        I.REFUSED: S.DOUBTFUL,
        I.REFUSED_FOR_NOW: S.UNSTORED,
        I.OUT_OF_ORDER: S.CONTRADICTED,
        I.TOO_LARGE: S.OVERSIZED,
        I.UNKNOWN: S.DOUBTFUL,
        I.DETACHED: S.DOUBTFUL,
    },
    S.CONTRADICTED: {I.ATTACHED: S.FAILED, I.STORED: S.IDLE, I.MISMATCH: S.FAILED},
    S.OVERSIZED: {I.ATTACHED: S.IDLE, I.STORED: S.IDLE, I.MISMATCH: S.FAILED},
}


@pytest.mark.parametrize(("state", "happened"), list(itertools.product(_PATHS, _VERBS)))
def test_sequencer_takes_each_input_in_each_state(state: S, happened: I) -> None:
    """Each pair leads where it should, or is refused and changes nothing."""
    sequencer = attached(5)
    for verb in _PATHS[state]:
        verb(sequencer)
    assert sequencer.state is state
    head = sequencer.head
    target = _LEGAL[state].get(happened)
    if target is None and happened is I.FENCED:
        target = S.FAILED
    if target is None and happened is I.DETACHED:
        target = state
    if target is None:
        before = None if head is None else (head.first, head.outcome)
        with pytest.raises(KeyError):
            _VERBS[happened](sequencer)
        assert sequencer.state is state
        assert sequencer.head is head
        assert head is None or (head.first, head.outcome) == before
        assert (sequencer.failure, sequencer.problem) == (None, "")
    else:
        _VERBS[happened](sequencer)
        assert sequencer.state is target
        assert (sequencer.failure is not None) == (target is S.FAILED)


# ------------------------------------------------------------------------------------------------- worlds


class AnyInterleaving(RuleBasedStateMachine):
    """Accepted, rejected, lost before and after storing, delivered late, fenced, cancelled, restarted, shared."""

    world: World

    @initialize(
        last=st.sampled_from([None, 5, MAX, MAX - 2]),
        is_claimed=st.booleans(),
        off_by=st.sampled_from([0, 0, 0, -2, 1]),
        is_raised=st.booleans(),
        nothing=st.sampled_from([-1, 0]),
        look_back=st.sampled_from([5, 1, 0]),
        keeps_claims=st.booleans(),
    )
    def begin(
        self,
        last: int | None,
        is_claimed: bool,
        off_by: int,
        is_raised: bool,
        nothing: int,
        look_back: int,
        keeps_claims: bool,
    ) -> None:
        known = last is not None
        self.world = World(
            last=last,
            is_claimed=known and is_claimed and not is_raised,
            off_by=off_by,
            is_raised=known and is_raised,
            nothing=nothing,
            look_back=look_back,
            keeps_claims=keeps_claims,
        )

    @precondition(lambda self: self.world.may_offer)
    @rule(count=st.integers(1, 3))
    def offer(self, count: int) -> None:
        self.world.offer(count)

    @precondition(lambda self: self.world.may_attach)
    @rule()
    def attach(self) -> None:
        self.world.attach()

    @precondition(lambda self: self.world.may_attach)
    @rule(is_heard=st.booleans())
    def attach_unanswered(self, is_heard: bool) -> None:
        self.world.attach(is_answered=False, is_heard=is_heard)

    @precondition(lambda self: self.world.may_send)
    @rule()
    def send(self) -> None:
        self.world.send()

    @precondition(lambda self: self.world.is_out)
    @rule()
    def arrive(self) -> None:
        self.world.arrive()

    @precondition(lambda self: self.world.is_out)
    @rule()
    def hold(self) -> None:
        self.world.hold()

    @precondition(lambda self: self.world.is_out)
    @rule(is_stored=st.booleans())
    def lose(self, is_stored: bool) -> None:
        self.world.lose(is_stored=is_stored)

    @precondition(lambda self: self.world.is_out)
    @rule(for_now=st.booleans())
    def refuse(self, for_now: bool) -> None:
        self.world.refuse(for_now=for_now)

    @precondition(lambda self: self.world.is_out)
    @rule()
    def shrink(self) -> None:
        self.world.shrink()

    @precondition(lambda self: not self.world.is_out)
    @rule()
    def detach(self) -> None:
        self.world.detach()

    @precondition(lambda self: self.world.may_withdraw)
    @rule()
    def withdraw(self) -> None:
        self.world.withdraw()

    @precondition(lambda self: self.world.may_deliver)
    @rule(which=st.integers(0, 3))
    def deliver(self, which: int) -> None:
        self.world.deliver(which)

    @precondition(lambda self: self.world.may_restart)
    @rule(is_raised=st.booleans(), is_stored_late=st.booleans())
    def restart(self, is_raised: bool, is_stored_late: bool) -> None:
        self.world.restart(is_raised=is_raised and self.world.service.keeps_claims, is_stored_late=is_stored_late)

    @precondition(lambda self: self.world.is_published_to)
    @rule()
    def supersede(self) -> None:
        self.world.supersede()

    @precondition(lambda self: self.world.is_superseded)
    @rule()
    def steal_link(self) -> None:
        self.world.steal_link()

    @precondition(lambda self: self.world.is_published_to)
    @rule(count=st.integers(1, 3))
    def share(self, count: int) -> None:
        self.world.share(count)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=40)


def test_sequencer_loses_and_repeats_nothing_in_random_interleavings(request: pytest.FixtureRequest) -> None:
    """No loss, no duplicate, no reorder, no number for two events, in many worlds; and every transition is made."""
    seen = set()
    for seed in range(100_000 if request.config.getoption("--long") else 4_000):
        try:
            seen |= walk(seed, 60)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    assert seen == set(TRANSITIONS)
