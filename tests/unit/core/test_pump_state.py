"""The life of a pump."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from eventpump.core.pump_state import TRANSITIONS, CloseReason, PumpInput, PumpLife, PumpState

_LEGAL = {
    PumpState.OPENING: {PumpInput.OPENED: PumpState.STARTING, PumpInput.ENDING: PumpState.ABORTING},
    PumpState.STARTING: {PumpInput.STARTED: PumpState.RUNNING, PumpInput.ENDING: PumpState.DRAINING},
    PumpState.RUNNING: {PumpInput.STOLEN: PumpState.SUSPENDED, PumpInput.ENDING: PumpState.DRAINING},
    PumpState.SUSPENDED: {PumpInput.STOLEN: PumpState.SUSPENDED, PumpInput.ENDING: PumpState.DRAINING},
    PumpState.ABORTING: {
        PumpInput.OPENED: PumpState.DRAINING,
        PumpInput.ENDING: PumpState.ABORTING,
        PumpInput.DRAINED: PumpState.CLOSING,
    },
    PumpState.DRAINING: {PumpInput.ENDING: PumpState.DRAINING, PumpInput.DRAINED: PumpState.CLOSING},
    PumpState.CLOSING: {PumpInput.ENDING: PumpState.CLOSING, PumpInput.CLOSED: PumpState.CLOSED},
    PumpState.CLOSED: {},
}

_VERBS: dict[PumpInput, Callable[[PumpLife], object]] = {
    PumpInput.OPENED: PumpLife.opened,
    PumpInput.STARTED: PumpLife.started,
    PumpInput.STOLEN: PumpLife.stolen,
    PumpInput.ENDING: lambda life: life.ending(CloseReason.SHUTDOWN, 0),
    PumpInput.DRAINED: PumpLife.drained,
    PumpInput.CLOSED: PumpLife.closed,
    PumpInput.TERMINATED: PumpLife.terminated,
}


def _life(ownership_lost_grace: float = 5, close_timeout: float = 20) -> PumpLife:
    return PumpLife(ownership_lost_grace=ownership_lost_grace, close_timeout=close_timeout)


@pytest.mark.parametrize(("state", "happened"), list(itertools.product(PumpState, PumpInput)))
def test_pump_takes_each_input_in_each_state(state: PumpState, happened: PumpInput) -> None:
    """Each pair leads where the table says, or is refused and changes nothing."""
    life = _life()
    life.state = state
    legal = {**_LEGAL[state], PumpInput.TERMINATED: PumpState.CLOSED}
    target = legal.get(happened)
    assert TRANSITIONS.get((state, happened)) is target
    if target is None:
        with pytest.raises(KeyError):
            _VERBS[happened](life)
        assert life.state is state
    else:
        _VERBS[happened](life)
        assert life.state is target


@pytest.mark.parametrize(
    ("inputs", "was_opened"),
    [
        ([PumpInput.ENDING], False),
        ([PumpInput.ENDING, PumpInput.OPENED], True),
        ([PumpInput.OPENED, PumpInput.ENDING], True),
        ([PumpInput.OPENED, PumpInput.STARTED, PumpInput.STOLEN, PumpInput.ENDING], True),
    ],
)
def test_drained_returns_whether_open_had_returned(inputs: list[PumpInput], was_opened: bool) -> None:
    """`close` is due if `open` returned before the last call ended, be that before or after the end began."""
    life = _life()
    for happened in inputs:
        _VERBS[happened](life)
    assert life.drained() is was_opened


def test_stolen_link_alone_suspends_the_pump() -> None:
    """A pump is suspended from the theft until it ends; only when its task has ended it is over."""
    life = _life()
    seen = []
    for happened in (
        PumpInput.OPENED,
        PumpInput.STARTED,
        PumpInput.STOLEN,
        PumpInput.ENDING,
        PumpInput.DRAINED,
        PumpInput.CLOSED,
    ):
        _VERBS[happened](life)
        seen.append((life.is_suspended, life.is_ending, life.is_over))
    no = (False, False, False)
    ending = (False, True, False)
    assert seen == [no, no, (True, False, False), ending, ending, (False, True, True)]


def test_close_reason_is_the_first_one() -> None:
    """The first reason stands, whatever happens afterwards; that ownership was lost is known all the same."""
    life = _life()
    life.ending(CloseReason.SHUTDOWN, 0)
    life.ownership_lost(1)
    life.ending(CloseReason.FAILED, 2)
    assert life.reason is CloseReason.SHUTDOWN
    assert life.ending_since == 0
    assert life.is_lost


def test_deadlines_leave_time_for_close_and_the_last_write() -> None:
    """The handler's time ends before that of close, that before the last write's, and all within the given time."""
    life = _life()
    life.ending(CloseReason.SHUTDOWN, 100, within=8)
    assert 100 < life.handler_until < life.close_until < life.write_until < life.overdue_at == 108


def test_deadline_of_a_handler_after_loss_is_the_grace() -> None:
    """Once ownership is lost, the handler is cancelled after the grace, not after the close time-out."""
    life = _life(ownership_lost_grace=3)
    life.ownership_lost(50)
    assert life.handler_until == 53
    assert life.overdue_at == 70


def test_deadlines_only_come_nearer() -> None:
    """A second, more generous end does not give back time; a shorter one takes it."""
    life = _life()
    life.ending(CloseReason.SHUTDOWN, 0, within=10)
    until = life.overdue_at
    life.ending(CloseReason.SHUTDOWN, 5, within=100)
    assert life.overdue_at == until
    life.ending(CloseReason.SHUTDOWN, 5, within=1)
    assert life.overdue_at == 6
    assert life.handler_until < 6
