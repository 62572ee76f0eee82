"""When a silent link is judged dead, and what is known of lag meanwhile."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.silence import DROP_INTERVAL, HubAnswer, Patience, Peer, SilenceCheck, SilenceStep, is_ahead, lag
from eventpump.eventhubs.events import EventPosition

ANSWERS = st.sampled_from([True, False, None])


def _answering() -> Peer:
    peer = Peer()
    peer.answers_echo = True
    return peer


def _go(check: SilenceCheck, *outcomes: Any) -> list[SilenceStep]:
    """Go through a check.

    Returns:
        Its steps, the first and the last included.
    """
    steps = [check.step]
    for outcome in outcomes:
        {SilenceStep.PROBE: check.probed, SilenceStep.ASK: check.looked, SilenceStep.REOPEN: check.reopened}[
            check.step
        ](outcome)
        steps.append(check.step)
    return steps


P, A, R, D, REST = SilenceStep.PROBE, SilenceStep.ASK, SilenceStep.REOPEN, SilenceStep.DROP, SilenceStep.REST


@pytest.mark.parametrize(
    ("answers", "outcomes", "steps"),
    [
        (False, [True, False], [P, A, REST]),
        (False, [True, None], [P, A, REST]),
        (False, [False, False], [P, A, REST]),
        (False, [None, True, None, False], [P, A, P, A, REST]),
        (False, [None, True, None, True, True], [P, A, P, A, R, REST]),
        (False, [True, True, False, True, False], [P, A, P, R, P, D]),
        (True, [False, True, True], [P, R, P, REST]),
        (True, [False, True, False], [P, R, P, D]),
        (True, [False, False], [P, R, D]),
        (True, [False, None], [P, R, REST]),
        (True, [False, True, None], [P, R, P, REST]),
    ],
)
def test_check_of_a_link_follows_the_table(answers: bool, outcomes: list[Any], steps: list[SilenceStep]) -> None:
    """A check goes as the module's table has it."""
    check = SilenceCheck(_answering() if answers else Peer(), was_reopened=False, may_drop=True)
    assert _go(check, *outcomes) == steps


@pytest.mark.parametrize(
    ("answers", "may_drop", "outcomes", "steps"),
    [
        (False, True, [True, True, True, True], [P, A, P, A, D]),
        (False, False, [True, True, True, True, True], [P, A, P, A, R, REST]),
        (False, True, [True, True, True, False], [P, A, P, A, REST]),
        (True, True, [False, True, True], [P, R, P, REST]),
        (True, True, [False, True, False], [P, R, P, D]),
        (True, False, [False, True, False], [P, R, P, REST]),
        (True, False, [False, False], [P, R, REST]),
    ],
)
def test_check_of_a_reopened_link_follows_the_table(
    answers: bool, may_drop: bool, outcomes: list[Any], steps: list[SilenceStep]
) -> None:
    """A second silent link has its connection dropped, unless that was done too recently."""
    check = SilenceCheck(_answering() if answers else Peer(), was_reopened=True, may_drop=may_drop)
    assert _go(check, *outcomes) == steps


@given(
    answers=st.booleans(),
    was_reopened=st.booleans(),
    may_drop=st.booleans(),
    outcomes=st.lists(ANSWERS, min_size=10, max_size=10),
)
def test_check_gives_up_nothing_without_evidence(
    answers: bool, was_reopened: bool, may_drop: bool, outcomes: list[bool | None]
) -> None:
    """A link is given up for an unanswered probe of a peer that answers, or a hub twice ahead; the connection only for
    two links without an answer, or for a second link with the hub twice ahead, and only where it may be dropped. Every
    check ends, after eight steps at most."""
    peer = _answering() if answers else Peer()
    check = SilenceCheck(peer, was_reopened=was_reopened, may_drop=may_drop)
    aheads, unanswered = 0, 0
    for number, outcome in enumerate(outcomes):
        step = check.step
        if step in {SilenceStep.REST, SilenceStep.DROP}:
            break
        assert number < 8
        if step is SilenceStep.PROBE:
            was_known = peer.answers_echo or bool(outcome)
            check.probed(outcome)
            unanswered += outcome is False and was_known
            assert peer.answers_echo is was_known
        elif step is SilenceStep.ASK:
            check.looked(outcome)
            aheads += bool(outcome)
        else:
            assert unanswered == 1 or aheads == 2
            check.reopened(outcome)
            unanswered += outcome is False and not check.is_ahead
        if check.step is SilenceStep.DROP:
            assert may_drop
            assert unanswered == 2 or (was_reopened and aheads == 2)
    else:
        assert check.step in {SilenceStep.REST, SilenceStep.DROP}


def test_patience_grows_with_each_vain_attempt() -> None:
    """Trying again for nothing gets rarer, to a bound; what helped makes it as at first."""
    patience = Patience(30.0)
    waits = []
    for number in range(9):
        assert patience.was_in_vain is (number > 0)
        waits.append(patience.seconds)
        patience.tried()
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 1920.0, 1920.0]
    patience.helped()
    assert patience.seconds == 30.0
    assert not patience.was_in_vain


DROPS = st.tuples(st.floats(0.0, 10_000.0), st.booleans(), st.sampled_from([None, "event", "answer"]))


@given(st.lists(DROPS, max_size=60))
def test_may_drop_spaces_out_drops_that_do_not_help(moments: list[tuple[float, bool, str | None]]) -> None:
    """Between two drops lies the shortest interval, or twice the last one allowed, to a bound, where none helped; and a
    drop is never forbidden for longer than that bound."""
    peer = Peer()
    now, last, least = 0.0, -math.inf, 0.0
    longest = Patience(DROP_INTERVAL).longest
    for passed, was_mute, then in moments:
        now += passed
        assert peer.may_drop(now) is (now - last >= least)
        if peer.may_drop(now):
            is_forgotten = now - last > 2 * longest
            peer.dropped(now, was_mute=was_mute)
            least = 2 * DROP_INTERVAL if is_forgotten else min(2 * max(least, DROP_INTERVAL), longest)
            last = now
            if then == "event":
                peer.drop_helped()
            elif then == "answer":
                peer.answered()
            if then == "event" or (then == "answer" and was_mute):
                least = DROP_INTERVAL
    assert peer.may_drop(now + longest)


MOMENT = datetime(2024, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"received": 4}, True),
        ({"received": 5}, False),
        ({"received": 9}, False),
        ({"received": 4, "is_empty": True}, False),
        ({"position": EventPosition.earliest()}, True),
        ({"position": EventPosition.earliest(), "is_empty": True}, False),
        ({"position": EventPosition.at_offset("five")}, False),
        ({"position": EventPosition.at_offset("five", inclusive=True)}, True),
        ({"position": EventPosition.at_offset("four")}, True),
        ({"position": EventPosition.at_sequence_number(5)}, False),
        ({"position": EventPosition.at_sequence_number(5, inclusive=True)}, True),
        ({"position": EventPosition.at_sequence_number(4)}, True),
        ({"position": EventPosition.at_enqueued_time(MOMENT)}, False),
        ({"position": EventPosition.at_enqueued_time(MOMENT, inclusive=True)}, True),
        ({"position": EventPosition.at_enqueued_time(MOMENT.replace(year=2023))}, True),
        ({"position": EventPosition.at_enqueued_time(MOMENT.replace(year=2025))}, False),
    ],
)
def test_is_ahead_compares_the_hub_with_what_was_received(facts: dict[str, Any], expected: bool | None) -> None:
    """A hub is ahead where it holds an event after what was received, or after where the link began."""
    known: dict[str, Any] = {
        "received": None,
        "position": EventPosition.earliest(),
        "last": 5,
        "last_offset": "five",
        "last_time": MOMENT.timestamp(),
        "is_empty": False,
    }
    assert is_ahead(**{**known, **facts}) is expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, 3),
        ({"is_attached": False}, None),
        ({"stated": None}, None),
        ({"delivered": 9}, 0),
        ({"silent_for": 30.0}, 3),
        ({"silent_for": 30.1}, None),
        ({"silent_for": 99.0, "answer": HubAnswer(40.0, 12, is_ahead=True)}, 10),
        ({"silent_for": 99.0, "answer": HubAnswer(40.0, 12, is_ahead=True), "stated": None}, 10),
        ({"silent_for": 99.0, "answer": HubAnswer(39.9, 12, is_ahead=True)}, None),
        ({"answer": HubAnswer(40.0, 12, is_ahead=True), "is_attached": False}, None),
        ({"delivered": None}, None),
        ({"delivered": None, "answer": HubAnswer(99.0, 5, is_ahead=False)}, 0),
        ({"delivered": None, "answer": HubAnswer(99.0, 5, is_ahead=True)}, None),
    ],
)
def test_lag_is_a_number_only_where_known(facts: dict[str, Any], expected: int | None) -> None:
    """Lag is a number only where it is known, and never 0 for want of knowledge."""
    known: dict[str, Any] = {
        "delivered": 2,
        "stated": 5,
        "answer": None,
        "is_attached": True,
        "silent_for": None,
        "now": 100.0,
        "patience": 30.0,
    }
    assert lag(**{**known, **facts}) == expected
