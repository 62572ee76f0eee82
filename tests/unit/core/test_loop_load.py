"""When deliveries wait for the store."""

from __future__ import annotations

from eventpump.core.loop_load import CALL_TURNS, FRESH, SLOW_TURN, LoopLoad


def _turn(ledger: LoopLoad, began: float, length: float) -> float:
    """Let a turn pass.

    Returns:
        Its end.
    """
    assert ledger.stepped(began)
    assert not ledger.stepped(began + length / 2)
    ledger.turned(began + length)
    return began + length


def test_is_closed_is_false_with_quick_turns() -> None:
    """Whatever is due or under way, a host whose turns are quick delivers, and is not even asked."""
    ledger = LoopLoad()
    ledger.lease_held("0", 10.0)
    ledger.call_begun(20.0)
    assert not ledger.is_watching
    now = _turn(ledger, 19.9, SLOW_TURN * 0.9)
    assert not ledger.is_watching
    assert not ledger.is_closed(now)


def test_is_closed_with_a_slow_turn_and_a_due_renewal() -> None:
    """After a slow turn deliveries wait from the moment a renewal is due until it is done, or the lease is gone."""
    ledger = LoopLoad()
    ledger.lease_held("0", 10.0)
    ledger.lease_held("1", 10.0)
    now = _turn(ledger, 5.0, 4.9)
    assert ledger.is_watching
    assert not ledger.is_closed(now)
    assert ledger.is_closed(10.0)
    ledger.lease_held("0", 20.0)
    assert ledger.is_closed(10.5)
    ledger.lease_gone("1")
    assert not ledger.is_closed(10.6)


def test_is_closed_counts_the_turn_under_way() -> None:
    """Within a turn that is slow already no further delivery starts while a renewal is due."""
    ledger = LoopLoad()
    ledger.lease_held("0", 10.0)
    ledger.stepped(10.0)
    assert not ledger.is_closed(10.0 + SLOW_TURN * 0.9)
    assert ledger.is_closed(10.0 + SLOW_TURN * 1.1)


def test_is_closed_for_a_call_that_slow_turns_could_end() -> None:
    """A call of the store closes it only where as many such turns as it may take do not fit into its time."""
    ledger = LoopLoad()
    key = ledger.call_begun(109.0)
    now = _turn(ledger, 108.9 - 0.1 * (CALL_TURNS + 1), 0.1)
    assert not ledger.is_closed(now)
    assert ledger.is_closed(now + 0.2)
    ledger.call_ended(key)
    assert not ledger.is_closed(now + 0.2)
    key = ledger.call_begun(119.0)
    now = _turn(ledger, 110.0, 2.0)
    assert ledger.is_closed(now)
    ledger.call_ended(key)
    assert not ledger.is_closed(now)


def test_is_closed_forgets_a_slow_turn_soon() -> None:
    """A slow turn of a while ago says nothing about the next delivery."""
    ledger = LoopLoad()
    now = _turn(ledger, 5.0, 1.0)
    ledger.lease_held("0", now)
    assert not ledger.is_closed(now + FRESH)


def test_is_closed_until_what_it_waits_for_is_done() -> None:
    """The quick turns while deliveries wait do not open it."""
    ledger = LoopLoad()
    ledger.lease_held("0", 6.0)
    ledger.lease_held("1", 6.0)
    now = _turn(ledger, 5.0, 1.0)
    assert ledger.is_closed(now)
    ledger.lease_held("0", 16.0)
    assert ledger.is_closed(now + 3 * FRESH)
    ledger.lease_held("1", 16.0)
    assert not ledger.is_closed(now + 3 * FRESH)
