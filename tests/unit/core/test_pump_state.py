"""The life of a pump."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from eventpump.core.pump_state import TRANSITIONS, CloseReason, PumpInput, PumpLife, PumpState

_LEGAL = {
    PumpState.OPENING: {PumpInput.OPENED: PumpState.RUNNING, PumpInput.ENDING: PumpState.DRAINING},
    PumpState.RUNNING: {PumpInput.ENDING: PumpState.DRAINING},
    PumpState.DRAINING: {PumpInput.ENDING: PumpState.DRAINING, PumpInput.DRAINED: PumpState.CLOSING},
    PumpState.CLOSING: {PumpInput.ENDING: PumpState.CLOSING, PumpInput.CLOSED: PumpState.CLOSED},
    PumpState.CLOSED: {PumpInput.ENDING: PumpState.CLOSED},
}

_VERBS: dict[PumpInput, Callable[[PumpLife], None]] = {
    PumpInput.OPENED: PumpLife.opened,
    PumpInput.ENDING: lambda life: life.ending(CloseReason.SHUTDOWN, 0),
    PumpInput.DRAINED: PumpLife.drained,
    PumpInput.CLOSED: PumpLife.closed,
}


def _life(ownership_lost_grace: float = 5, close_timeout: float = 20) -> PumpLife:
    return PumpLife(ownership_lost_grace=ownership_lost_grace, close_timeout=close_timeout)


@pytest.mark.parametrize(("state", "happened"), list(itertools.product(PumpState, PumpInput)))
def test_every_state_meets_every_input(state: PumpState, happened: PumpInput) -> None:
    """Each pair leads where the table says, or is refused and changes nothing."""
    life = _life()
    life.state = state
    target = _LEGAL[state].get(happened)
    assert TRANSITIONS.get((state, happened)) is target
    if target is None:
        with pytest.raises(KeyError):
            _VERBS[happened](life)
        assert life.state is state
    else:
        _VERBS[happened](life)
        assert life.state is target


def test_the_reason_is_decided_once() -> None:
    """The first reason stands, whatever happens afterwards; that ownership was lost is known all the same."""
    life = _life()
    life.ending(CloseReason.SHUTDOWN, 0)
    life.ownership_lost(1)
    life.ending(CloseReason.FAILED, 2)
    assert life.reason is CloseReason.SHUTDOWN
    assert life.is_lost


def test_an_end_leaves_time_for_what_follows() -> None:
    """The handler's time ends before that of close, that before the last write's, and all within the given time."""
    life = _life()
    life.ending(CloseReason.SHUTDOWN, 100, within=8)
    assert 100 < life.handler_until < life.close_until < life.write_until < life.overdue_at == 108


def test_loss_gives_the_handler_its_grace() -> None:
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
