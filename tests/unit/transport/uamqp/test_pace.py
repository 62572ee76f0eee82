"""How long to wait between looks."""

from __future__ import annotations

import pytest

from eventpump.transport.uamqp.pace import Pace


def test_delay_doubles_to_the_longest_and_starts_over() -> None:
    """While nothing happens waits double and end at the longest; what happens makes the next one the shortest."""
    pace = Pace(1.0, 5.0)
    waits = []
    for found in (False, False, False, False, True, False, True, True):
        waits.append(pace.wait)
        pace.looked(found=found)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("longest", [0.05, 1.0])
def test_delay_while_idle_bounds_the_looks_per_second(longest: float) -> None:
    """Idle, the looks of a long time are as many as the longest wait fits into it, and few more."""
    pace, passed, looks = Pace(0.0002, longest), 0.0, 0
    while passed < 100.0:
        passed += pace.wait
        looks += 1
        pace.looked(found=False)
    assert 100.0 / longest <= looks <= 100.0 / longest + 15
