"""The start of a publisher with a stored state: step by step, and in worlds where everything goes wrong by chance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from eventpump.core.claim import (
    AttachProducer,
    AttachRefused,
    OnDoubt,
    OnStateLost,
    Procedure,
    PublisherIntent,
    PublisherMode,
    PublisherState,
    ReadStamps,
    ReadState,
    ReadTail,
    Request,
    Started,
    StartPolicy,
    StoredPublisherState,
    SwapState,
    count_after,
    is_below,
    published_since,
    start,
)
from eventpump.core.sequencer import AttachRequest, ProducerAnswer
from eventpump.errors import (
    InvalidClientStateError,
    ProducerDisconnectedError,
    ProducerStateLostError,
    PublishOutcomeUnknownError,
)
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, NUMBERS
from tests.unit.core.claiming import walk

EXCLUSIVE, REPLAYABLE = PublisherMode.EXCLUSIVE, PublisherMode.REPLAYABLE
STATE = PublisherState(9, 4, 41, published=42, has_published=True, claim="former")
TAIL = 100


def stored(state: PublisherState, version: str = "v") -> StoredPublisherState:
    return StoredPublisherState(state, version)


def begin(
    mode: PublisherMode = EXCLUSIVE,
    on_doubt: OnDoubt = OnDoubt.FAIL,
    on_state_lost: OnStateLost = OnStateLost.FAIL,
    first: AttachRequest = AttachRequest(),  # noqa: B008 - frozen
    claim: str = "mine",
) -> Procedure[Started]:
    return start("0", StartPolicy(mode, on_doubt, on_state_lost), claim, first)


class Script:
    """Runs a start against answers that a test gives, and notes what it asked for."""

    def __init__(self, procedure: Procedure[Started]) -> None:
        self.procedure = procedure
        self.asked: list[Request] = [next(procedure)]
        self.started: Started | None = None

    def answer(self, answer: object) -> Request | None:
        try:
            self.asked.append(self.procedure.send(answer))
        except StopIteration as stop:
            self.started = stop.value
            return None
        return self.asked[-1]

    def swapped(self) -> Request | None:
        """Let the swap that is asked for succeed."""
        asked = self.asked[-1]
        assert isinstance(asked, SwapState)
        return self.answer(stored(asked.state, f"v{len(self.asked)}"))


def claimed(procedure: Procedure[Started], state: PublisherState = STATE, *, last: int = 45) -> Script:
    """Run an exclusive start up to its raise, which is asked for."""
    script = Script(procedure)
    script.answer(stored(state))
    script.swapped()
    if not state.is_clean:
        script.answer(TAIL)
    script.answer(ProducerAnswer(state.producer_id, state.owner_level, last))
    script.swapped()
    return script


# ----------------------------------------------------------------------------------------------- step by step


def test_replayable_first_start_stores_the_given_state_before_sending() -> None:
    """A blank attach; then the state, only where none is; a start that lost that race looks again."""
    script = Script(begin())
    assert script.asked == [ReadState()]
    assert script.answer(None) == AttachProducer(AttachRequest())
    swap = script.answer(ProducerAnswer(9, 0, -1))
    assert swap == SwapState(PublisherState(9, 0, -1, claim="mine"), None)
    assert script.answer(None) == ReadState()
    script.answer(None)
    script.answer(ProducerAnswer(10, 0, 0))
    script.swapped()
    assert script.started is not None
    assert (script.started.number, script.started.published, script.started.is_claimed) == (0, 0, False)


def test_exclusive_start_stores_its_level_before_it_attaches() -> None:
    """Intent, tail, number under the former level, both stored, raise, tail, done: in this order and no other."""
    script = Script(begin())
    script.answer(stored(STATE))
    intent = replace(STATE, claim="mine", intent=PublisherIntent(5))
    assert script.asked[-1] == SwapState(intent, stored(STATE))
    assert script.swapped() == ReadTail()
    assert script.answer(TAIL) == AttachProducer(AttachRequest(9, 4))
    script.answer(ProducerAnswer(9, 4, 45))
    numbered = replace(intent, intent=PublisherIntent(5, TAIL, 45))
    assert script.asked[-1] == SwapState(numbered, stored(intent, "v2"))
    assert script.swapped() == AttachProducer(AttachRequest(9, 5, 45))
    assert script.answer(ProducerAnswer(9, 5, 45)) == ReadTail()
    done = PublisherState(9, 5, 45, published=46, claim="mine")
    assert script.answer(TAIL) == SwapState(done, stored(numbered, "v5"))
    script.swapped()
    started = script.started
    assert started == Started(stored(done, "v8"), 45, 46, is_claimed=True)


def test_exclusive_start_is_in_doubt_where_the_partition_grew() -> None:
    """The numbers are in the error; the intent stays as it is, so that the next start is in doubt too."""
    script = claimed(begin())
    script.answer(ProducerAnswer(9, 5, 45))
    with pytest.raises(PublishOutcomeUnknownError, match="on_doubt") as caught:
        script.answer(TAIL + 3)
    assert (caught.value.partition_id, caught.value.first, caught.value.count) == ("0", 46, 3)
    assert not caught.value.is_settling
    left = script.asked[-3]
    assert isinstance(left, SwapState)
    again = Script(begin(claim="next"))
    again.answer(stored(left.state))
    intent = PublisherIntent(6, TAIL, 45)
    assert again.asked[-1] == SwapState(replace(left.state, claim="next", intent=intent), stored(left.state))
    assert again.swapped() == AttachProducer(AttachRequest(9, 6, 45))
    assert again.answer(ProducerAnswer(9, 6, 45)) == ReadTail()
    with pytest.raises(PublishOutcomeUnknownError):
        again.answer(TAIL + 3)


def test_exclusive_start_after_a_clean_close_is_settled() -> None:
    """Where the former process closed with nothing in doubt, the tail is not asked for; the next state is not clean."""
    script = claimed(begin(), replace(STATE, is_clean=True))
    assert not any(isinstance(each, ReadTail) for each in script.asked)
    swap = script.answer(ProducerAnswer(9, 5, 45))
    assert isinstance(swap, SwapState)
    assert not swap.state.is_clean


def test_start_that_finds_an_intent_claims_one_level_more() -> None:
    """Level below, clean mark, T0 and N stay; without N it is read under the level below."""
    for intent in (PublisherIntent(7), PublisherIntent(7, TAIL, 45)):
        state = replace(STATE, claim="other", intent=intent)
        script = Script(begin())
        swap = script.answer(stored(state))
        assert swap == SwapState(replace(state, claim="mine", intent=replace(intent, owner_level=8)), stored(state))
        following = script.swapped()
        assert following == (ReadTail() if intent.number is None else AttachProducer(AttachRequest(9, 8, 45)))
    clean = replace(STATE, is_clean=True, intent=PublisherIntent(7, None, 45))
    script = Script(begin())
    script.answer(stored(clean))
    script.swapped()
    done = script.answer(ProducerAnswer(9, 8, 45))
    assert isinstance(done, SwapState)
    assert done.state.owner_level == 8


def test_start_looks_again_only_where_its_first_swap_fails() -> None:
    """Before its claim a start has no part in the state; afterwards a change means that another start came later."""
    script = Script(begin())
    script.answer(stored(STATE))
    assert script.answer(None) == ReadState()
    script.answer(stored(STATE))
    script.swapped()
    script.answer(TAIL)
    script.answer(ProducerAnswer(9, 4, 45))
    with pytest.raises(ProducerDisconnectedError, match="started since"):
        script.answer(None)
    script = claimed(begin())
    script.answer(ProducerAnswer(9, 5, 45))
    script.answer(TAIL)
    with pytest.raises(ProducerDisconnectedError, match="started since"):
        script.answer(None)


def test_start_refused_for_a_higher_level_stops() -> None:
    """At the reading, and at the raise."""
    for answers in ([TAIL], [TAIL, ProducerAnswer(9, 4, 45), None]):
        script = Script(begin())
        script.answer(stored(STATE))
        script.swapped()
        for answer in answers:
            script.swapped() if answer is None else script.answer(answer)
        with pytest.raises(ProducerDisconnectedError, match="too low"):
            script.answer(AttachRefused(is_stolen=True, description="too low"))


@pytest.mark.parametrize("nothing", [-1, 0])
def test_raise_of_a_number_below_zero_sends_null(nothing: int) -> None:
    """The service refuses a negative number; what it answers then is what the next numbers follow."""
    script = claimed(begin(), PublisherState(9, 0, nothing), last=nothing)
    assert script.asked[-1] == AttachProducer(AttachRequest(9, 1, None if nothing < 0 else 0))
    script.answer(ProducerAnswer(9, 1, nothing))
    script.answer(TAIL)
    script.swapped()
    assert script.started is not None
    assert (script.started.number, script.started.published) == (nothing, 0)
    assert script.started.is_claimed is (nothing == 0)


def test_start_under_the_highest_level_takes_a_new_id() -> None:
    """It shuts out the level below; then a new id is taken, and what is published goes on counting."""
    state = replace(STATE, owner_level=MAX_OWNER_LEVEL - 1)
    script = claimed(begin(), state)
    assert script.asked[-1] == AttachProducer(AttachRequest(9, MAX_OWNER_LEVEL, 45))
    script.answer(ProducerAnswer(9, MAX_OWNER_LEVEL, 45))
    assert script.answer(TAIL) == AttachProducer(AttachRequest())
    swap = script.answer(ProducerAnswer(77, 0, 0))
    assert isinstance(swap, SwapState)
    assert swap.state == PublisherState(77, 0, 0, published=46, claim="mine")
    # Two starts may both shut out that way: only the one whose swap succeeds publishes.
    found = replace(state, intent=PublisherIntent(MAX_OWNER_LEVEL, TAIL, 45))
    other = Script(begin())
    other.answer(stored(found))
    assert other.swapped() == AttachProducer(AttachRequest(9, MAX_OWNER_LEVEL, 45))


def test_accept_of_a_doubt_counts_what_the_service_answered() -> None:
    """The events in doubt are left out."""
    script = claimed(begin(on_doubt=OnDoubt.ACCEPT))
    script.answer(ProducerAnswer(9, 5, 45))
    swap = script.answer(TAIL + 3)
    assert isinstance(swap, SwapState)
    assert (swap.state.start, swap.state.published) == (45, 46)


def test_scan_counts_what_was_stored_by_its_stamps() -> None:
    """Between the tails, under the former level, the numbers after the one read; the new level is stamped too."""
    script = claimed(begin(on_doubt=OnDoubt.SCAN), replace(STATE, is_stamped=True))
    script.answer(ProducerAnswer(9, 5, 45))
    assert script.answer(TAIL + 5) == ReadStamps(TAIL, TAIL + 5, 9, 4)
    swap = script.answer((44, 45, 46, 47))
    assert isinstance(swap, SwapState)
    assert (swap.state.start, swap.state.published, swap.state.is_stamped) == (45, 48, True)


@pytest.mark.parametrize(("is_stamped", "found"), [(False, ()), (True, None), (True, (47,))])
def test_scan_that_cannot_count_leaves_the_doubt(is_stamped: bool, found: tuple[int, ...] | None) -> None:
    """Events without stamps, events that are gone, or a hole in the numbers."""
    script = claimed(begin(on_doubt=OnDoubt.SCAN), replace(STATE, is_stamped=is_stamped))
    script.answer(ProducerAnswer(9, 5, 45))
    with pytest.raises(PublishOutcomeUnknownError):  # noqa: PT012 - either may raise
        script.answer(TAIL + 5)
        script.answer(found)


def test_start_with_an_impossible_answer_ends() -> None:
    """Another id or level, or none."""
    for answer in (ProducerAnswer(8, 4, 45), ProducerAnswer(9, 5, 45), (9, 4, None)):
        script = Script(begin())
        script.answer(stored(STATE))
        script.swapped()
        script.answer(TAIL)
        with pytest.raises(InvalidClientStateError):
            script.answer(answer)


# ------------------------------------------------------------------------------------------------- replayable


def test_replayable_start_shares_the_stored_level() -> None:
    """One attach with a null number, and no write."""
    script = Script(begin(REPLAYABLE))
    assert script.answer(stored(STATE)) == AttachProducer(AttachRequest(9, 4))
    assert script.answer(ProducerAnswer(9, 4, 45)) is None
    assert script.started == Started(stored(STATE), 45, 46, is_claimed=False)


def test_replayable_start_withdraws_clean_and_stamped_marks() -> None:
    """A clean mark, and that every event is stamped: both before it may send."""
    script = Script(begin(REPLAYABLE))
    found = replace(STATE, is_clean=True, is_stamped=True)
    assert script.answer(stored(found)) == SwapState(STATE, stored(found))
    assert script.answer(None) == ReadState()


def test_replayable_start_that_finds_an_intent_carries_it_out() -> None:
    """The level below may be shut out already: it takes one more, as an exclusive start does."""
    script = Script(begin(REPLAYABLE))
    state = replace(STATE, intent=PublisherIntent(5, TAIL, 45))
    script.answer(stored(state))
    assert script.swapped() == AttachProducer(AttachRequest(9, 6, 45))


# ------------------------------------------------------------------------------------------------- forgotten


LOST: Mapping[str, object] = {
    "refused": AttachRefused(is_stolen=False, description="not known"),
    "nothing": ProducerAnswer(9, 4, 0),
    "below": ProducerAnswer(9, 4, 40),
}


@pytest.mark.parametrize("mode", [EXCLUSIVE, REPLAYABLE])
@pytest.mark.parametrize("answer", LOST.values(), ids=LOST)
def test_start_at_a_service_that_has_forgotten_ends(mode: PublisherMode, answer: object) -> None:
    """Refused, or a number below the mark."""
    script = Script(begin(mode))
    script.answer(stored(STATE))
    if mode is EXCLUSIVE:
        script.swapped()
        script.answer(TAIL)
    with pytest.raises(ProducerStateLostError, match="reset_state"):
        script.answer(answer)


@pytest.mark.parametrize("mode", [EXCLUSIVE, REPLAYABLE])
@pytest.mark.parametrize("answer", LOST.values(), ids=LOST)
def test_start_with_a_new_id_counts_from_the_newest_mark(mode: PublisherMode, answer: object) -> None:
    """A blank attach; the state has its id, and what the mark says is published."""
    script = Script(begin(mode, on_state_lost=OnStateLost.NEW))
    script.answer(stored(STATE))
    if mode is EXCLUSIVE:
        script.swapped()
        script.answer(TAIL)
    asked = script.answer(answer)
    if mode is EXCLUSIVE and isinstance(answer, ProducerAnswer):
        assert asked == AttachProducer(AttachRequest(9, 5))
        asked = script.answer(ProducerAnswer(9, 5, 0))
    assert asked == AttachProducer(AttachRequest())
    swap = script.answer(ProducerAnswer(77, 0, 0))
    assert isinstance(swap, SwapState)
    assert swap.state == PublisherState(77, 0, 0, published=42, claim="mine")
    script.swapped()
    assert script.started is not None
    assert script.started.published == 42


def test_start_forgotten_before_the_raise_ends() -> None:
    """The number was read, and the raise is refused."""
    script = claimed(begin())
    with pytest.raises(ProducerStateLostError):
        script.answer(AttachRefused(is_stolen=False, description="not known"))


@pytest.mark.parametrize(
    ("mark", "has_published", "number", "ahead"),
    [
        (41, True, 41, 0),
        (41, True, 45, 4),
        (41, True, 40, None),
        (41, True, 0, None),
        (41, True, -1, None),
        (0, True, -1, None),
        (NUMBERS - 2, True, 3, 5),
        (3, True, NUMBERS - 2, None),
        (41, False, 41, 0),
        (41, False, 0, 0),
        (41, False, -1, 0),
        (41, False, 44, 3),
        (41, False, 40, None),
        (0, False, 0, 0),
        (0, False, 5, 5),
        (-1, False, -1, 0),
        (-1, False, 0, 1),
        (-1, False, 4, 5),
    ],
)
def test_published_since_a_mark_is_counted_modulo_2_31(
    mark: int, has_published: bool, number: int, ahead: int | None
) -> None:
    """Modulo 2^31; before anything is accepted under an id and level, the service may also answer for nothing."""
    assert published_since(PublisherState(9, 4, mark, has_published=has_published), number) == ahead
    assert is_below(number, mark, has_published=has_published) is (ahead is None)


def test_numbers_are_counted_up_to_a_hole() -> None:
    """The numbers after one, across the wrap; None where one is missing."""
    assert count_after(5, [4, 6, 7, 7, 5]) == 2
    assert count_after(5, []) == 0
    assert count_after(5, [7]) is None
    assert count_after(NUMBERS - 1, [0, 1]) == 2
    assert count_after(-1, [0, 1]) == 2


# --------------------------------------------------------------------------------------------------- by chance


def seeds(request: pytest.FixtureRequest) -> range:
    return range(20_000 if request.config.getoption("--long") else 200)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("others", [0.0, 0.2], ids=["alone", "other writers"])
def test_exclusive_processes_never_store_twice_in_random_histories(
    request: pytest.FixtureRequest, others: float
) -> None:
    """Processes that overlap, freeze and die at every step, late transfers: exact, or in doubt."""
    doubts = superseded = 0
    for seed in seeds(request):
        world = walk(seed, 400, on_doubt=OnDoubt.FAIL, others=others, is_high=seed % 5 == 0)
        try:
            world.check()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        doubts += world.doubts
        superseded += world.superseded
    assert doubts, "no start was ever in doubt"
    assert superseded, "no start was ever superseded"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("others", [0.0, 0.2], ids=["alone", "other writers"])
def test_exclusive_processes_with_stamps_are_never_in_doubt(request: pytest.FixtureRequest, others: float) -> None:
    """With stamps on every event no start is in doubt, and the log is exact."""
    for seed in seeds(request):
        world = walk(seed, 400, on_doubt=OnDoubt.SCAN, others=others, is_high=seed % 5 == 0)
        try:
            world.check()
            assert not world.doubts
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.timeout(900)
def test_exclusive_processes_that_accept_doubts_lose_nothing(request: pytest.FixtureRequest) -> None:
    """What was acknowledged is stored once; what was not may be published again; nothing is missing."""
    for seed in seeds(request):
        world = walk(seed, 400, on_doubt=OnDoubt.ACCEPT, others=0.1, is_high=seed % 5 == 0)
        try:
            world.check(is_exact=False)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.timeout(900)
@pytest.mark.parametrize("others", [0.0, 0.2], ids=["alone", "other writers"])
def test_replayable_processes_may_overlap(request: pytest.FixtureRequest, others: float) -> None:
    """The same events under the same numbers, from however many processes: the log is exact, and nothing in doubt."""
    for seed in seeds(request):
        world = walk(seed, 400, mode=REPLAYABLE, on_doubt=OnDoubt.FAIL, others=others)
        try:
            world.check()
            assert not world.doubts
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
