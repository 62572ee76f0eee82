"""What a joiner takes before others see it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.balancer import first_step, plan_leases
from eventpump.core.lease import LeaseSnapshot

ME = "me"
names = st.sampled_from([None, "a", "b", "c", ME])


def _leases(owners: list[str | None]) -> list[LeaseSnapshot]:
    return [
        LeaseSnapshot(str(number), owner, is_held=owner is not None, token=f"t{number}")
        for number, owner in enumerate(owners)
    ]


@given(st.lists(names, min_size=1, max_size=40), st.integers(0, 100))
def test_first_step_is_one_steal_at_most(owners: list[str | None], seed: int) -> None:
    """A host that is not seen steals one lease, none where it acquires any; a seen one has no first step."""
    listing = _leases(owners)
    held = {lease.partition_id for lease in listing if lease.owner == ME}
    plan = plan_leases(listing, host=ME, held=held, rng=random.Random(seed))
    step = first_step(plan, listing, host=ME)
    if held or not plan.steal:
        assert step is None
        return
    assert step is not None
    assert step.acquire == plan.acquire
    assert len(step.steal) == (0 if plan.acquire else 1)
    assert step.steal == plan.steal[: len(step.steal)]
    assert set(step.spare) <= {*plan.steal, *plan.spare}
    assert not set(step.spare).intersection(step.steal)


def test_first_step_with_a_steal_under_way_steals_nothing() -> None:
    """A store that is slow to answer makes a joiner no thief of more than one lease."""
    listing = _leases(["a"] * 20)
    plan = plan_leases(listing, host=ME, held=(), rng=random.Random(1), taking=["3"])
    assert plan.steal
    step = first_step(plan, listing, host=ME, taking=["3"])
    assert step is not None
    assert (step.steal, step.spare) == ((), ())
