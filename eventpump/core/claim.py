"""The start of an idempotent publisher that has a stored state: under which level it publishes, and what is published.

:func:`start` is written as a generator: it yields what it needs from outside (a `Request`) and is sent the answer, so
that a simulation runs the very code that production runs.

*Exclusive*: one process at a time publishes under a name, each start under a level of its own. A level is claimed in
the store before it is shown to the service::

    intent   swap the state for one with the intent to take the next level
    tail     read T0, the sequence number of the partition's last event
    number   attach with the level stored last, to read N, the last number published under it; swap T0 and N in
    raise    attach with the claimed level and N: from now on the service refuses the former level
    tail     read T1
    done     swap the intent for the new level. Nothing is sent before this

What the former process had on its way may have been stored between the reading of N and the raise, and N does not count
it. Nothing was, where T1 is T0, or where the former process had closed with nothing in doubt (*clean*). Otherwise the
start is in doubt, and says so.

A start that finds an intent takes one level more, and keeps what is known of the level below: clean, T0 and N. N is
stored before any level is raised, so that without it the former level still attaches. A start whose swap fails has been
superseded, and stops: no two of them ever publish under one level.

*Replayable*: overlapping processes share id and level, because each sends the same events under the same numbers.

A state is also a *mark*: `published` events were published when the last number was `start`. A service that answers a
number below it has forgotten the publisher.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

from eventpump.core.sequencer import AttachRequest
from eventpump.errors import (
    InvalidClientStateError,
    ProducerDisconnectedError,
    ProducerStateLostError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
)
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, NUMBERS, advance, distance

T = TypeVar("T")

_NOTHING_PUBLISHED: Final = (-1, 0)
"""What the service answers for an id and level under which nothing is published: sources disagree (8.2)."""


class PublisherMode(enum.StrEnum):
    """How the processes with one publisher's name go together."""

    EXCLUSIVE = "exclusive"
    """One at a time: each start shuts the former process out."""
    REPLAYABLE = "replayable"
    """They may overlap: what has a certain number is the same event in each."""


class OnDoubt(enum.StrEnum):
    """What follows where events of the former process may have been stored that the service's answer does not count."""

    FAIL = "fail"
    """`PublishOutcomeUnknownError`, at this start and at each after it, until one has another policy."""
    SCAN = "scan"
    """Their stamps are read from the partition's tail. Takes events that were all sent with stamps."""
    ACCEPT = "accept"
    """They are left out of the count: the application may publish them again."""


class OnStateLost(enum.StrEnum):
    """What follows where the service has forgotten a publisher."""

    FAIL = "fail"
    """`ProducerStateLostError`, at this start and at each after it."""
    NEW = "new"
    """The publisher takes a new id, and counts from the newest stored mark."""


# ---------------------------------------------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class PublisherIntent:
    """A level that is being taken.

    Args:
        owner_level: The level.
        tail: The sequence number of the partition's last event, before `number` was read; None where it is not read or
            not needed.
        number: The last number published under the state's own level; None as long as it is not read. No level was
            raised before it is stored.
    """

    owner_level: int
    tail: int | None = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class PublisherState:
    """What an idempotent publisher of one partition needs to go on after its process ended.

    Args:
        producer_id: The id the service knows it by.
        owner_level: Its epoch; of two publishers with one id the higher level keeps the other out.
        start: The published number up to which `published` counts.
        published: How many events the application had published under its name by then, under former ids and levels
            too.
        has_published: Whether the service has accepted something under this id and level.
        is_clean: Whether the process of this level has closed with nothing in doubt.
        is_stamped: Whether every event of this level was sent with a stamp.
        claim: Random text of the start that took this level, by which it knows its own writes.
        intent: The level that a later start is taking; None where none is.
    """

    producer_id: int
    owner_level: int
    start: int
    published: int = 0
    has_published: bool = False
    is_clean: bool = False
    is_stamped: bool = False
    claim: str = ""
    intent: PublisherIntent | None = None


@dataclass(frozen=True, slots=True)
class StoredPublisherState:
    """A publisher's state as it was read or written.

    Args:
        version: Identifies this state to its store; opaque.
    """

    state: PublisherState
    version: str


def published_since(state: PublisherState, number: int) -> int | None:
    """Count the events published since a state's mark, by the number the service answers; None where it lies below.

    Numbers are compared modulo 2^31: of the two ways round, the shorter.
    """
    if not state.has_published and number in _NOTHING_PUBLISHED and not (state.start == -1 and number == 0):
        return 0
    ahead = distance(state.start, number)
    return ahead if ahead < NUMBERS // 2 else None


def is_below(number: int, known: int, *, has_published: bool) -> bool:
    """Whether a number that the service answers lies below one that is known to be published.

    Args:
        has_published: Whether something was accepted under this id and level; otherwise it may answer for nothing.
    """
    return published_since(PublisherState(0, 0, known, has_published=has_published), number) is None


# ---------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read the stored state. Answered with a `StoredPublisherState`, or None where there is none."""


@dataclass(frozen=True, slots=True)
class SwapState:
    """Store a state in place of the one given. Answered with what is stored, or None where that one is not there."""

    state: PublisherState
    replaces: StoredPublisherState | None


@dataclass(frozen=True, slots=True)
class ReadTail:
    """Read the sequence number of the partition's last event, -1 for none."""


@dataclass(frozen=True, slots=True)
class AttachProducer:
    """Attach a link. Answered with a `ProducerAnswer` or an `AttachRefused`."""

    request: AttachRequest


@dataclass(frozen=True, slots=True)
class ReadStamps:
    """Read the events after one sequence number up to another, for the stamps of an id and level.

    Answered with the numbers in these stamps; None where some of the events are gone.
    """

    after: int
    through: int
    producer_id: int
    owner_level: int


@dataclass(frozen=True, slots=True)
class ProducerAnswer:
    """What the service answered to an attach; None for what it left out."""

    producer_id: int | None
    owner_level: int | None
    number: int | None


@dataclass(frozen=True, slots=True)
class AttachRefused:
    """The service refused an attach.

    Args:
        is_stolen: For a higher level; otherwise, because it does not know the producer.
    """

    is_stolen: bool
    description: str


Request: TypeAlias = ReadState | SwapState | ReadTail | AttachProducer | ReadStamps
Procedure: TypeAlias = Generator[Request, object, T]


@dataclass(frozen=True, slots=True)
class Started:
    """A start that may publish.

    Args:
        stored: The state it publishes under.
        number: The last number published, as the service answered it to the last attach.
        published: How many events of the application are published.
        is_claimed: Whether the last attach gave the number. The service may then answer that nothing is published.
    """

    stored: StoredPublisherState
    number: int
    published: int
    is_claimed: bool


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """How a publisher starts."""

    mode: PublisherMode = PublisherMode.EXCLUSIVE
    on_doubt: OnDoubt = OnDoubt.FAIL
    on_state_lost: OnStateLost = OnStateLost.FAIL

    @property
    def is_stamping(self) -> bool:
        """Whether every event is sent with a stamp."""
        return self.on_doubt is OnDoubt.SCAN


# ---------------------------------------------------------------------------------------------------- the start


def start(partition_id: str, policy: StartPolicy, claim: str, first: AttachRequest) -> Procedure[Started]:
    """Start a publisher.

    Args:
        claim: Random text, different for every start.
        first: What to attach with where no state is stored.

    Raises:
        ProducerDisconnectedError: Another start has superseded this one.
        PublishOutcomeUnknownError: The start is in doubt, and the policy does not settle it.
        ProducerStateLostError: The service has forgotten the publisher, and the policy is to fail.
        InvalidClientStateError: The service answered what cannot be.
        RequestRefusedError: The service does not know the producer of `first`.
    """
    return (yield from _Start(partition_id, policy, claim, first).run())


class _Start:
    """One start of a publisher."""

    def __init__(self, partition_id: str, policy: StartPolicy, claim: str, first: AttachRequest) -> None:
        self._partition_id = partition_id
        self._policy = policy
        self._claim = claim
        self._first = first

    def run(self) -> Procedure[Started]:
        while True:
            found = yield ReadState()
            if found is None:
                started = yield from self._begin()
            else:
                assert isinstance(found, StoredPublisherState)
                if self._policy.mode is PublisherMode.REPLAYABLE and found.state.intent is None:
                    started = yield from self._join(found)
                else:
                    started = yield from self._take_over(found)
            if started is not None:
                return started

    # Each gives None where another process changed the state before this one had a part in it: look again.

    def _begin(self) -> Procedure[Started | None]:
        """Begin the publisher."""
        answer = yield from self._attach(self._first)
        if isinstance(answer, AttachRefused):
            if answer.is_stolen:
                raise self._stolen(answer)
            raise RequestRefusedError(answer.description, entity=f"partition {self._partition_id}")
        return (yield from self._done(answer, None, published=0, is_claimed=self._first.number is not None))

    def _join(self, found: StoredPublisherState) -> Procedure[Started | None]:
        """Publish under the stored level, along with others."""
        state = found.state
        mine = replace(state, is_clean=False, is_stamped=state.is_stamped and self._policy.is_stamping)
        if mine != state:
            swapped = yield from self._swap(mine, found)
            if swapped is None:
                return None
            found = swapped
        answer = yield from self._attach(AttachRequest(state.producer_id, state.owner_level))
        if isinstance(answer, AttachRefused) and answer.is_stolen:
            raise self._stolen(answer)
        ahead = None if isinstance(answer, AttachRefused) else published_since(state, _known(answer.number))
        if isinstance(answer, AttachRefused) or ahead is None:
            return (yield from self._renew(found, answer))
        return Started(found, _known(answer.number), state.published + ahead, is_claimed=False)

    def _take_over(self, found: StoredPublisherState) -> Procedure[Started | None]:
        """Take a level of one's own, shutting out who publishes under the stored one."""
        state = found.state
        intent = state.intent or PublisherIntent(state.owner_level)
        # Nobody publishes under the highest level: it is there to shut out the one below, and may be claimed twice.
        intent = replace(intent, owner_level=min(intent.owner_level + 1, MAX_OWNER_LEVEL))
        held = yield from self._swap(replace(state, claim=self._claim, intent=intent), found)
        if held is None:
            return None
        if intent.number is None:
            tail = None if state.is_clean else (yield from self._tail())
            answer = yield from self._attach(AttachRequest(state.producer_id, state.owner_level))
            if isinstance(answer, AttachRefused) and answer.is_stolen:
                raise self._stolen(
                    answer,
                    "; the store knows of no such level: another process has this producer id, or had it with another "
                    "store or version of eventpump. Where it has ended, reset_state of the store begins anew",
                )
            ahead = None if isinstance(answer, AttachRefused) else published_since(state, _known(answer.number))
            if ahead is None:
                return (yield from self._renew(held, answer))
            number = advance(state.start, ahead) if ahead else state.start
            intent = replace(intent, tail=tail, number=number)
            held = yield from self._swap(replace(held.state, intent=intent), held)
            if held is None:
                raise self._superseded()
        assert intent.number is not None
        raised = AttachRequest(
            state.producer_id, intent.owner_level, None if intent.number < 0 else intent.number
        )  # a number below 0 is refused (8.2)
        answer = yield from self._attach(raised)
        if isinstance(answer, AttachRefused):
            if answer.is_stolen:
                raise self._stolen(answer)
            return (yield from self._renew(held, answer))
        ahead = published_since(state, intent.number)
        assert ahead is not None
        published = state.published + ahead
        if not state.is_clean:
            assert intent.tail is not None
            last = yield from self._tail()
            if last != intent.tail:
                published += yield from self._settle(state, intent, last)
        is_claimed = raised.number is not None
        if intent.owner_level == MAX_OWNER_LEVEL:
            answer = yield from self._attach(AttachRequest())
            if isinstance(answer, AttachRefused):
                raise self._invalid(answer.description)
            is_claimed = False
        return (yield from self._done(answer, held, published=published, is_claimed=is_claimed))

    def _settle(self, state: PublisherState, intent: PublisherIntent, last: int) -> Procedure[int]:
        """Count what the former process has had stored after the number was read. :raises PublishOutcomeUnknownError"""
        assert intent.tail is not None
        assert intent.number is not None
        if self._policy.on_doubt is OnDoubt.ACCEPT:
            return 0
        reason = "on_doubt='scan' counts them where every event was sent with it, on_doubt='accept' leaves them out"
        if self._policy.on_doubt is OnDoubt.SCAN:
            reason = "the former process sent without stamps, so that they cannot be counted"
            if state.is_stamped:
                found = yield ReadStamps(intent.tail, last, state.producer_id, state.owner_level)
                assert found is None or isinstance(found, tuple)
                count = None if found is None else count_after(intent.number, found)
                if count is not None:
                    return count
                reason = "the tail does not show them all: some of it is gone"
        raise PublishOutcomeUnknownError(
            self._partition_id,
            advance(intent.number),
            max(0, last - intent.tail),
            problem="up to so many events of the former process with this name may have been stored as its level was "
            f"taken over: the partition's last event was {intent.tail} before and is {last} after; {reason}",
        )

    def _renew(self, held: StoredPublisherState, answer: ProducerAnswer | AttachRefused) -> Procedure[Started | None]:
        """Go on under a new id, where the policy says so. :raises ProducerStateLostError"""
        state = held.state
        if isinstance(answer, AttachRefused):
            problem = answer.description
        else:
            problem = f"number {state.start} was published, and the service answers {answer.number}"
        if self._policy.on_state_lost is OnStateLost.FAIL:
            raise self._lost(problem)
        if isinstance(answer, ProducerAnswer) and state.intent is not None:
            # The service takes the id for a new one: shut out who may still publish under it. Whether it is refused
            # does not matter.
            yield AttachProducer(AttachRequest(state.producer_id, state.intent.owner_level))
        fresh = yield from self._attach(AttachRequest())
        if isinstance(fresh, AttachRefused):
            raise self._invalid(fresh.description)
        return (yield from self._done(fresh, held, published=state.published, is_claimed=False))

    def _done(
        self,
        answer: ProducerAnswer,
        replaces: StoredPublisherState | None,
        *,
        published: int,
        is_claimed: bool,
    ) -> Procedure[Started | None]:
        assert answer.producer_id is not None
        assert answer.owner_level is not None
        number = _known(answer.number)
        state = PublisherState(
            answer.producer_id,
            answer.owner_level,
            number,
            published=published,
            is_stamped=self._policy.is_stamping,
            claim=self._claim,
        )
        stored = yield from self._swap(state, replaces)
        if stored is None:
            if replaces is None or replaces.state.intent is None:
                return None
            raise self._superseded()
        return Started(stored, number, published, is_claimed)

    # ---- asking

    def _attach(self, request: AttachRequest) -> Procedure[ProducerAnswer | AttachRefused]:
        answer = yield AttachProducer(request)
        assert isinstance(answer, ProducerAnswer | AttachRefused)
        if isinstance(answer, ProducerAnswer):
            fits = (
                answer.producer_id is not None
                and answer.owner_level is not None
                and answer.number is not None
                and request.producer_id in (None, answer.producer_id)
                and request.owner_level in (None, answer.owner_level)
                and -1 <= answer.number < NUMBERS
            )
            if not fits:
                raise self._invalid(f"attached with {request}, the service answered {answer}")
        return answer

    def _swap(
        self, state: PublisherState, replaces: StoredPublisherState | None
    ) -> Procedure[StoredPublisherState | None]:
        swapped = yield SwapState(state, replaces)
        assert swapped is None or isinstance(swapped, StoredPublisherState)
        return swapped

    def _tail(self) -> Procedure[int]:
        last = yield ReadTail()
        assert isinstance(last, int)
        return last

    # ---- errors

    def _stolen(self, answer: AttachRefused, advice: str = "") -> ProducerDisconnectedError:
        return ProducerDisconnectedError(f"{answer.description}{advice}", entity=f"partition {self._partition_id}")

    def _superseded(self) -> ProducerDisconnectedError:
        return ProducerDisconnectedError(
            "another process with this publisher's name has started since", entity=f"partition {self._partition_id}"
        )

    def _lost(self, problem: str) -> ProducerStateLostError:
        return ProducerStateLostError(
            (self._partition_id,),
            f"{problem}; on_state_lost='new' goes on under a new id, and reset_state of the store begins anew",
        )

    def _invalid(self, problem: str) -> InvalidClientStateError:
        return InvalidClientStateError(self._partition_id, problem)


def count_after(number: int, found: Iterable[int]) -> int | None:
    """Count the numbers that follow one, from those that were found. None where there is a hole in them."""
    after = {distance(number, each) for each in found}
    after = {each for each in after if 0 < each < NUMBERS // 2}
    return len(after) if max(after, default=0) == len(after) else None


def _known(number: int | None) -> int:
    assert number is not None
    return number
