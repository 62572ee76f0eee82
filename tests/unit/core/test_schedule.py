"""The schedule: everything is due once, at the time set last."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.schedule import Schedule


@given(st.integers(0, 2**32))
def test_take_gives_each_name_once_at_its_last_setting(seed: int) -> None:
    """After any sequence of settings and removals, each name is due once, in the order of time, at its last setting."""
    rng, schedule = random.Random(seed), Schedule()
    expected: dict[str, float] = {}
    now = 0.0
    for _ in range(100):
        name = str(rng.randrange(8))
        match rng.randrange(4):
            case 0 | 1:
                due = now + rng.randrange(10)
                schedule.set(name, due)
                expected[name] = due
            case 2:
                schedule.remove(name)
                expected.pop(name, None)
            case _:
                now += rng.randrange(5)
                taken = schedule.take(now)
                assert sorted(taken) == sorted(each for each, due in expected.items() if due <= now)
                assert [expected[each] for each in taken] == sorted(expected[each] for each in taken)
                for each in taken:
                    del expected[each]
        assert len(schedule) == len(expected)
        assert schedule.first == min(expected.values(), default=None)
        assert {each: schedule.due_at(each) for each in map(str, range(8))} == {
            each: expected.get(each) for each in map(str, range(8))
        }
