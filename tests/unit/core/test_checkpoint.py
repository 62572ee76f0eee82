"""The checkpoint ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eventpump.core.checkpoint import CheckpointPolicy, CheckpointTracker
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import Checkpoint


@dataclass(frozen=True)
class _Event:
    sequence_number: int

    @property
    def offset(self) -> str:
        return f"at-{self.sequence_number}"


def _checkpoint(number: int) -> Checkpoint:
    return Checkpoint("0", f"at-{number}", number)


def _tracker(policy: CheckpointPolicy | None = None, stored: int | None = None) -> CheckpointTracker:
    policy = CheckpointPolicy.manual() if policy is None else policy
    return CheckpointTracker("0", policy, None if stored is None else _checkpoint(stored))


class TrackerAgainstModel(RuleBasedStateMachine):
    """Whatever is delivered, asked for and answered: one write at a time, forwards only, and the latest gets there."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = _tracker(CheckpointPolicy(every_events=7, every_seconds=10))
        self.now = 0.0
        self.delivered = -1
        self.handled = -1
        self.running = -1
        self.in_flight: int | None = None
        self.stored = -1
        self.asked = -1

    @rule(count=st.integers(1, 5), is_handled=st.booleans(), passes=st.floats(0, 20))
    def deliver(self, count: int, is_handled: bool, passes: float) -> None:
        self.now += passes
        self.delivered += count
        event = _Event(self.delivered)
        self.tracker.events_delivered(event)
        self.running = self.delivered
        if is_handled:
            self.tracker.events_handled(event, count, self.now)
            self.handled, self.running = self.delivered, -1

    @rule()
    def fail(self) -> None:
        self.tracker.events_failed()
        self.running = -1

    @rule(is_in_batch=st.booleans())
    def ask_for_none(self, is_in_batch: bool) -> None:
        number = self.running if is_in_batch and self.running >= 0 else self.handled
        wanted = self.tracker.requested(None, is_in_batch=is_in_batch)
        assert (wanted is None) == (number <= self.stored)
        assert wanted is None or wanted.sequence_number == number
        self.asked = max(self.asked, number)

    @precondition(lambda self: self.delivered >= 0)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.delivered))
        wanted = self.tracker.requested(_Event(number))
        assert (wanted is None) == (number <= self.stored)
        self.asked = max(self.asked, number)

    @rule(beyond=st.integers(1, 3))
    def ask_beyond(self, beyond: int) -> None:
        with pytest.raises(ConfigurationError):
            self.tracker.requested(_Event(self.delivered + beyond))

    @rule()
    def begin(self) -> None:
        written = self.tracker.begin_write()
        if self.in_flight is not None:
            assert written is None
        elif written is not None:
            assert self.stored < written.sequence_number <= self.delivered
            assert written.offset == f"at-{written.sequence_number}"
            self.in_flight = written.sequence_number

    @precondition(lambda self: self.in_flight is not None)
    @rule(is_stored=st.booleans())
    def answer(self, is_stored: bool) -> None:
        if is_stored:
            assert self.in_flight is not None
            self.stored = self.in_flight
            self.tracker.write_done()
        else:
            self.tracker.write_failed()
        self.in_flight = None

    @invariant()
    def what_was_asked_for_is_stored_or_on_its_way(self) -> None:
        unwritten = self.tracker.unwritten
        latest = max(self.stored, -1 if unwritten is None else unwritten.sequence_number)
        assert latest >= self.asked
        assert self.tracker.is_settled == (unwritten is None)
        known = self.tracker.stored
        assert (-1 if known is None else known.sequence_number) == self.stored


TestTrackerAgainstModel = TrackerAgainstModel.TestCase
TestTrackerAgainstModel.settings = settings(stateful_step_count=40)


def _handle(tracker: CheckpointTracker, number: int, count: int, now: float) -> None:
    tracker.events_delivered(_Event(number))
    tracker.events_handled(_Event(number), count, now)


def test_policy_manual_wants_nothing_by_itself() -> None:
    """Without a policy, handled events, time and closing want nothing stored."""
    tracker = _tracker()
    _handle(tracker, 1000, 1000, 0)
    assert tracker.deadline is None
    assert not tracker.due(1e9)
    tracker.closing()
    assert tracker.is_settled


def test_policy_by_count_wants_the_last_of_n_handled_events() -> None:
    """After N handled events, and not before, their last is wanted."""
    tracker = _tracker(CheckpointPolicy(every_events=10))
    _handle(tracker, 8, 9, 0)
    assert tracker.begin_write() is None
    _handle(tracker, 9, 1, 0)
    assert tracker.begin_write() == _checkpoint(9)


def test_policy_by_time_wants_the_last_handled_event_after_t_seconds() -> None:
    """T seconds after the first event that is in no checkpoint, the last handled one is wanted."""
    tracker = _tracker(CheckpointPolicy(every_seconds=5))
    _handle(tracker, 1, 1, 100)
    _handle(tracker, 2, 1, 103)
    assert tracker.deadline == 105
    assert not tracker.due(104.9)
    assert tracker.due(105)
    assert tracker.begin_write() == _checkpoint(2)
    assert tracker.deadline is None


def test_policy_by_time_counts_from_the_first_event_at_any_time_and_of_any_count() -> None:
    """A clock that begins at 0, and what counts for no event of a stream, do not put the checkpoint off."""
    tracker = _tracker(CheckpointPolicy(every_seconds=5))
    _handle(tracker, 1, 0, 0.0)
    _handle(tracker, 2, 1, 4.0)
    assert tracker.deadline == 5.0
    _handle(tracker, 3, 1, 6.0)
    assert tracker.begin_write() == _checkpoint(3)


def test_policy_on_close_wants_the_last_handled_event() -> None:
    """Closing wants the last handled event, not the last delivered."""
    tracker = _tracker(CheckpointPolicy())
    _handle(tracker, 4, 5, 0)
    tracker.events_delivered(_Event(9))
    tracker.closing()
    assert tracker.begin_write() == _checkpoint(4)


def test_policy_never_wants_a_batch_that_failed() -> None:
    """What was delivered and failed is in no automatic checkpoint."""
    tracker = _tracker(CheckpointPolicy(every_events=1, every_seconds=1))
    tracker.events_delivered(_Event(5))
    assert not tracker.due(1e9)
    tracker.closing()
    assert tracker.is_settled


def test_requested_during_a_write_makes_one_more() -> None:
    """A hundred wishes while a write is in flight make one further write, of the latest."""
    tracker = _tracker()
    tracker.events_delivered(_Event(100))
    tracker.requested(_Event(0))
    assert tracker.begin_write() == _checkpoint(0)
    for number in range(1, 101):
        tracker.requested(_Event(number))
        assert tracker.begin_write() is None
    tracker.write_done()
    assert tracker.begin_write() == _checkpoint(100)
    tracker.write_done()
    assert tracker.is_settled


def test_requested_never_goes_backwards() -> None:
    """An event at or before what is stored, or wanted already, changes nothing."""
    tracker = _tracker(stored=10)
    tracker.events_delivered(_Event(20))
    assert tracker.requested(_Event(10)) is None
    tracker.requested(_Event(15))
    tracker.requested(_Event(12))
    assert tracker.begin_write() == _checkpoint(15)


def test_write_failed_makes_the_write_again() -> None:
    """A write whose outcome is not known is repeated, unless a later one is wanted by then."""
    tracker = _tracker()
    tracker.events_delivered(_Event(9))
    tracker.requested(_Event(3))
    tracker.begin_write()
    tracker.write_failed()
    assert tracker.begin_write() == _checkpoint(3)
    tracker.requested(_Event(5))
    tracker.write_failed()
    assert tracker.begin_write() == _checkpoint(5)


def test_requested_without_an_event_means_the_last_handled() -> None:
    """Asked without an event from outside the handler, the last event handled is meant; before any, nothing."""
    tracker = _tracker()
    tracker.events_delivered(_Event(3))
    assert tracker.requested(None) is None
    tracker.events_handled(_Event(3), 1, 0)
    tracker.events_delivered(_Event(7))
    assert tracker.requested(None) == _checkpoint(3)


def test_requested_without_an_event_in_a_batch_means_its_last() -> None:
    """Asked without an event by the handler, the running batch is meant, until it has failed."""
    tracker = _tracker()
    _handle(tracker, 3, 1, 0)
    tracker.events_delivered(_Event(7))
    tracker.events_failed()
    assert tracker.requested(None, is_in_batch=True) == _checkpoint(3)
    tracker.events_delivered(_Event(7))
    assert tracker.requested(None, is_in_batch=True) == _checkpoint(7)


@pytest.mark.parametrize(
    "options",
    [
        *({"every_events": 0}, {"every_events": 2.5}, {"every_events": "5"}, {"every_events": True}),
        *({"every_seconds": 0}, {"every_seconds": -1.0}, {"every_seconds": "5"}, {"every_seconds": True}),
    ],
)
def test_policy_that_cannot_be_kept_is_refused(options: dict[str, Any]) -> None:
    """A policy that could not be kept is refused by name."""
    with pytest.raises(ConfigurationError, match=r"checkpoint_policy\.every_"):
        CheckpointPolicy(**options)


def test_what_has_passed_without_being_delivered_is_covered_by_the_policy() -> None:
    """Events that need no processing count as handled ones, and may be stored by name; never backwards."""
    tracker = _tracker(CheckpointPolicy(every_events=5), stored=3)
    tracker.events_passed(_Event(3), 3, 0)
    assert tracker.handled is None
    assert tracker.events_until_due == 5
    tracker.events_passed(_Event(6), 3, 0)
    assert tracker.events_until_due == 2
    assert tracker.requested(_Event(6)) == _checkpoint(6)
    tracker.events_passed(_Event(5), 9, 0)
    assert tracker.events_until_due == 2
    tracker.events_passed(_Event(8), 2, 0)
    assert tracker.begin_write() == _checkpoint(8)
    assert tracker.events_until_due == 5


def test_policy_by_time_wants_the_first_event_after_a_checkpoint() -> None:
    """From it on the time counts; by the manual policy no event matters."""
    tracker = _tracker(CheckpointPolicy(every_seconds=10, every_events=100))
    assert tracker.events_until_due == 1
    tracker.events_passed(_Event(6), 3, 5)
    assert (tracker.events_until_due, tracker.deadline) == (97, 15)
    assert _tracker(CheckpointPolicy.manual()).events_until_due is None


def test_event_that_was_passed_over_may_be_stored() -> None:
    """It was handled without having been delivered, as one whose filter failed and that was skipped."""
    tracker = _tracker()
    tracker.events_handled(_Event(4), 1, 0)
    assert tracker.requested(None) == _checkpoint(4)
