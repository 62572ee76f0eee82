"""The start of an idempotent publisher with a stored state: which owner level it uses, and what is published.

:func:`start` is a generator: it yields requests (`Request`) and is sent the answers, so that a simulation runs the same
code as production.

*Exclusive*: one process at a time publishes under a name, and each start uses a new level. A level is claimed in the
store before it is sent to the service::

    intent   swap the state for one with the intent to take the next level
    tail     read T0, the sequence number of the partition's last event
    number   attach with the level stored last, to read N, the last number published under it; swap T0 and N in
    raise    attach with the claimed level and N: from now on the service refuses the former level
    tail     read T1
    done     swap the intent for the new level. Nothing is sent before this

In-flight events of the former process may have been stored between the reading of N and the raise, and N does not count
them. There are none if T1 equals T0, or if the former process closed with all outcomes known (*clean*). Otherwise the
start is in doubt, and raises.

A start that finds an intent takes the next higher level, and keeps the stored facts about the level below: clean, T0
and N. N is stored before any level is raised, so without it the former level can still attach. A start whose swap fails
has been superseded, and stops: no two starts ever publish under one level.

*Replayable*: overlapping processes share id and level, because each sends the same events under the same numbers.

A state is also a *mark*: `published` events were published when the last number was `start`. If the service answers
with a number below it, it has forgotten the publisher.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

from eventpump.core.sequencer import AttachRequest, ProducerAnswer
from eventpump.errors import (
    InvalidClientStateError,
    ProducerDisconnectedError,
    ProducerStateLostError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    StoreError,
)
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, NUMBERS, advance, distance

T = TypeVar("T")

_NOTHING_PUBLISHED: Final = (-1, 0)
"""The service's answers for an id and level under which nothing is published: sources disagree (8.2)."""


_MOST_RACES: Final = 100
"""How many times in a row a start begins again because another process has changed the state."""


class PublisherMode(enum.StrEnum):
    """How processes with the same publisher name coexist."""

    EXCLUSIVE = "exclusive"
    """One at a time: each start fences out the former process."""
    REPLAYABLE = "replayable"
    """They may overlap: a number stands for the same event in each process."""


class OnDoubt(enum.StrEnum):
    """What happens if events of the former process may have been stored that the service's answer does not count."""

    FAIL = "fail"
    """`PublishOutcomeUnknownError`, at this start and at each after it, until one has another policy."""
    SCAN = "scan"
    """Their stamps are read from the partition's tail. Requires that all events were sent with stamps."""
    ACCEPT = "accept"
    """They are not counted: the application may publish them again."""


class OnStateLost(enum.StrEnum):
    """What happens if the service has forgotten a publisher."""

    FAIL = "fail"
    """`ProducerStateLostError`, at this start and at each after it."""
    NEW = "new"
    """The publisher gets a new id, and counts from the newest stored mark."""


# ---------------------------------------------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class PublisherIntent:
    """A level that is being claimed.

    Args:
        owner_level: The level.
        tail: The sequence number of the partition's last event, before `number` was read; None if it was not read or is
            not needed.
        number: The last number published under the state's own level; None until it was read. No level is raised before
            it is stored.
    """

    owner_level: int
    tail: int | None = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class PublisherState:
    """The state from which an idempotent publisher of one partition continues after its process ended.

    Args:
        producer_id: Its id at the service.
        owner_level: Its epoch; of two publishers with the same id, the one with the higher level fences out the other.
        start: The published number up to which `published` counts.
        published: How many events the application had published under its name up to `start`, including former ids and
            levels. Default: 0.
        has_published: Whether the service has accepted an event under this id and level. Default: False.
        is_clean: Whether the process of this level has closed with all outcomes known. Default: False.
        is_stamped: Whether every event of this level was sent with a stamp. Default: False.
        claim: Random text of the start that claimed this level, by which it recognizes its own writes. Default: "".
        intent: The level that a later start is claiming; None if there is none.
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
    """Count the events published since a state's mark, by the number that the service answers; None if it is below the
    mark.

    Numbers are compared modulo 2^31, by the shorter distance.
    """
    if not state.has_published and number in _NOTHING_PUBLISHED and not (state.start == -1 and number == 0):
        return 0
    ahead = distance(state.start, number)
    return ahead if ahead < NUMBERS // 2 else None


def is_below(number: int, known: int, *, has_published: bool) -> bool:
    """Return whether a number that the service answers is below one known to be published under this id and level."""
    return published_since(PublisherState(0, 0, known, has_published=has_published), number) is None


# ---------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read the stored state. Answered with a `StoredPublisherState`, or None if there is none."""


@dataclass(frozen=True, slots=True)
class SwapState:
    """Replace a state by another. Answered with the stored state, or None if the replaced one is not stored any
    more."""

    state: PublisherState
    replaces: StoredPublisherState | None


@dataclass(frozen=True, slots=True)
class ReadTail:
    """Read the sequence number of the partition's last event, -1 for none."""


@dataclass(frozen=True, slots=True)
class AttachProducer:
    """Attach a link. Answered with the fields of a `ProducerAnswer`, None for an omitted one, or an `AttachRefused`."""

    request: AttachRequest


@dataclass(frozen=True, slots=True)
class ReadStamps:
    """Read the numbers in the stamps of an id and level, after one event up to another; None if some are gone."""

    after: int
    through: int
    producer_id: int
    owner_level: int


@dataclass(frozen=True, slots=True)
class AttachRefused:
    """The service refused an attach."""

    is_stolen: bool
    description: str


Request: TypeAlias = ReadState | SwapState | ReadTail | AttachProducer | ReadStamps
Procedure: TypeAlias = Generator[Request, object, T]


@dataclass(frozen=True, slots=True)
class Started:
    """The result of a successful start.

    Args:
        published: How many events of the application are published.
        is_claimed: Whether the last attach gave the number. The service may then answer that nothing is published.
    """

    stored: StoredPublisherState
    number: int
    published: int
    is_claimed: bool


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """The options of a publisher's start."""

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
        first: The producer state to attach with if no state is stored.
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
        for _ in range(_MOST_RACES):
            found = yield ReadState()
            if found is None:
                started = yield from self._begin()
            else:
                assert isinstance(found, StoredPublisherState)
                if found.state.claim == self._claim:
                    raise self._defect("answered that another state is stored, and stores this one")
                if self._policy.mode is PublisherMode.REPLAYABLE and found.state.intent is None:
                    started = yield from self._join(found)
                else:
                    started = yield from self._take_over(found)
            if started is not None:
                return started
        raise self._defect(f"answered {_MOST_RACES} times in a row that another state is stored")

    # Each returns None if another process changed the state before this one wrote to it: read it again.

    def _begin(self) -> Procedure[Started | None]:
        """Start a new publisher."""
        answer = yield from self._attach(self._first)
        if isinstance(answer, AttachRefused):
            if answer.is_stolen:
                raise self._stolen(answer)
            raise RequestRefusedError(answer.description, entity=f"partition {self._partition_id}")
        return (yield from self._done(answer, None, published=0, is_claimed=self._first.number is not None))

    def _join(self, found: StoredPublisherState) -> Procedure[Started | None]:
        """Publish under the stored level, together with other processes."""
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
        ahead = None if isinstance(answer, AttachRefused) else published_since(state, answer.last_number)
        if isinstance(answer, AttachRefused) or ahead is None:
            return (yield from self._renew(found, answer))
        return Started(found, answer.last_number, state.published + ahead, is_claimed=False)

    def _take_over(self, found: StoredPublisherState) -> Procedure[Started | None]:
        """Claim a new level, and fence out the process that publishes under the stored one."""
        state = found.state
        intent = state.intent or PublisherIntent(state.owner_level)
        # No process publishes under the highest level: it only fences out the one below, and may be claimed twice.
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
                    "; the state store does not have this level: another process has this producer id, or had it with "
                    "another store or version of eventpump. If it has ended, reset_state of the store starts over",
                )
            ahead = None if isinstance(answer, AttachRefused) else published_since(state, answer.last_number)
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
        """Count the former process's events stored after the number was read. Raises `PublishOutcomeUnknownError` in
        doubt."""
        assert intent.tail is not None
        assert intent.number is not None
        if self._policy.on_doubt is OnDoubt.ACCEPT:
            return 0
        reason = "on_doubt='scan' counts them if every event was sent with it, on_doubt='accept' does not count them"
        if self._policy.on_doubt is OnDoubt.SCAN:
            reason = "the former process sent without stamps, so they cannot be counted"
            if state.is_stamped:
                found = yield ReadStamps(intent.tail, last, state.producer_id, state.owner_level)
                assert found is None or isinstance(found, tuple)
                count = None if found is None else count_after(intent.number, found)
                if count is not None:
                    return count
                reason = "the partition's tail no longer holds all of them"
        raise PublishOutcomeUnknownError(
            self._partition_id,
            advance(intent.number),
            max(0, last - intent.tail),
            problem="up to this many events of the former process with this name may have been stored while its level "
            f"was taken over: the partition's last event was {intent.tail} before and is {last} after; {reason}",
        )

    def _renew(self, held: StoredPublisherState, answer: ProducerAnswer | AttachRefused) -> Procedure[Started | None]:
        """Continue under a new id, if the policy allows it; otherwise `ProducerStateLostError`."""
        state = held.state
        if isinstance(answer, AttachRefused):
            problem = answer.description
        else:
            problem = f"number {state.start} was published, but the service answers {answer.last_number}"
        if self._policy.on_state_lost is OnStateLost.FAIL:
            raise self._lost(problem)
        if isinstance(answer, ProducerAnswer) and state.intent is not None:
            # The service treats the id as a new one: fence out a process that may still publish under it. It does not
            # matter whether this is refused.
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
        state = PublisherState(
            *answer,
            published=published,
            is_stamped=self._policy.is_stamping,
            claim=self._claim,
        )
        stored = yield from self._swap(state, replaces)
        if stored is None:
            if replaces is None or replaces.state.intent is None:
                return None
            raise self._superseded()
        return Started(stored, answer.last_number, published, is_claimed)

    # ---- asking

    def _attach(self, request: AttachRequest) -> Procedure[ProducerAnswer | AttachRefused]:
        answer = yield AttachProducer(request)
        if isinstance(answer, AttachRefused):
            return answer
        assert isinstance(answer, tuple)
        producer_id, owner_level, number = answer
        fits = (
            None not in answer
            and request.producer_id in (None, producer_id)
            and request.owner_level in (None, owner_level)
            and -1 <= number < NUMBERS
        )
        if not fits:
            raise self._invalid(f"attached with {request}, the service answered {answer}")
        return ProducerAnswer(producer_id, owner_level, number)

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
            f"{problem}; on_state_lost='new' continues under a new id, and reset_state of the store starts over",
        )

    def _defect(self, problem: str) -> StoreError:
        return StoreError("write state", f"the store {problem}", partition_id=self._partition_id)

    def _invalid(self, problem: str) -> InvalidClientStateError:
        return InvalidClientStateError(self._partition_id, problem)


def count_after(number: int, found: Iterable[int]) -> int | None:
    """Count the found numbers that follow a number. None if one is missing among them."""
    after = {distance(number, each) for each in found}
    after = {each for each in after if 0 < each < NUMBERS // 2}
    return len(after) if max(after, default=0) == len(after) else None
