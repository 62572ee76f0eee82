"""What a host remembers of its fleet, and the check of plans."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.balancer import LeasePlan
from eventpump.core.fleet import MEMORY, FleetMemory, FleetView, checked_plan
from eventpump.core.lease import LeaseSnapshot


def lease(partition_id: str, owner: str | None, epoch: int = 1, *, is_held: bool = True) -> LeaseSnapshot:
    return LeaseSnapshot(partition_id, owner, is_held=is_held and owner is not None, epoch=epoch)


VIEW = FleetView(
    "me",
    (lease("0", "me"), lease("1", "a"), lease("2", None), lease("3", "a", is_held=False)),
    held=frozenset("0"),
)
A = VIEW.leases[1]


def test_memory_ages_leases_and_hosts_by_what_was_listed() -> None:
    """A lease ages from the listing that first showed it so; the hosts of the first listing are of unknown age."""
    memory = FleetMemory()
    assert memory.age == 0.0
    memory.listed([lease("0", "a"), lease("1", None)], 100.0)
    memory.listed([lease("0", "a"), lease("1", "b")], 110.0)
    memory.listed([lease("0", "a", epoch=2), lease("1", "b")], 125.0)
    assert memory.age == 25.0
    assert memory.ages == {"0": 0.0, "1": 15.0}
    assert memory.hosts == {"a": math.inf, "b": 15.0}
    assert memory.departed == {}
    memory.listed([lease("0", "a", is_held=False), lease("1", "b")], 130.0)
    memory.listed([lease("0", "a", is_held=False), lease("1", "b")], 140.0)
    assert memory.departed == {"a": 15.0}
    assert memory.ages == {"0": 10.0, "1": 30.0}
    memory.listed([lease("0", "a", epoch=3), lease("1", "b")], 150.0)
    assert memory.departed == {}
    assert memory.hosts == {"a": 0.0, "b": 40.0}
    memory.listed([lease("1", "b")], 160.0)
    memory.listed([lease("1", "b")], 151.0 + MEMORY)
    assert memory.departed == {}
    assert memory.ages == {"1": 41.0 + MEMORY}


def test_checked_plan_keeps_a_good_plan_as_it_is() -> None:
    """Every part of it."""
    plan = LeasePlan(acquire=("2", "3"), steal=(A,), release=("0",), again=True)
    assert checked_plan(plan, VIEW) == (plan, [])
    assert checked_plan(LeasePlan(spare=(A,)), VIEW) == (LeasePlan(spare=(A,)), [])


def test_checked_plan_names_what_is_wrong() -> None:
    """And keeps the rest."""
    stale = lease("1", "b")
    cases: list[tuple[object, LeasePlan, str]] = [
        (None, LeasePlan(), "returned NoneType"),
        (LeasePlan(acquire=("9", "2")), LeasePlan(acquire=("2",)), "no lease of a partition '9'"),
        (LeasePlan(acquire=(["2"],)), LeasePlan(), "no lease of a partition"),  # type: ignore[arg-type]
        (LeasePlan(acquire=("2", "2")), LeasePlan(acquire=("2",)), "more than once"),
        (LeasePlan(acquire=("1",)), LeasePlan(), "belongs to a; only `steal`"),
        (LeasePlan(acquire=("0",)), LeasePlan(), "holds partition 0 already"),
        (LeasePlan(acquire="23"), LeasePlan(), "`acquire` is str"),  # type: ignore[arg-type]
        (LeasePlan(acquire=None), LeasePlan(), "`acquire` is NoneType"),  # type: ignore[arg-type]
        (LeasePlan(steal=("1",)), LeasePlan(), "is not a lease of the view"),  # type: ignore[arg-type]
        (LeasePlan(steal=(stale,)), LeasePlan(), "is not a lease of the view"),
        (LeasePlan(steal=(VIEW.leases[0],)), LeasePlan(), "holds partition 0 already"),
        (LeasePlan(steal=(VIEW.leases[2],)), LeasePlan(), "no live owner; `acquire`"),
        (LeasePlan(steal=(A,), spare=(A,)), LeasePlan(steal=(A,)), "more than once"),
        (LeasePlan(release=("1",)), LeasePlan(), "does not hold partition 1"),
        (LeasePlan(again=7), LeasePlan(), ""),  # type: ignore[arg-type]
    ]
    for plan, kept, problem in cases:
        found, problems = checked_plan(plan, VIEW)
        assert found == kept, plan
        assert len(problems) == bool(problem), problems
        assert problem in "".join(problems), problems


anything = st.one_of(st.none(), st.integers(), st.sampled_from(["0", "1", "2", "3", "4"]), st.sampled_from(VIEW.leases))
part = st.one_of(anything, st.lists(anything, max_size=5).map(tuple), st.lists(anything, max_size=3))


@given(part, part, part, part)
def test_checked_plan_lets_only_what_can_be_done_pass(
    acquire: object, steal: object, spare: object, release: object
) -> None:
    """Whatever a balancer returns, the checked plan takes what is not held, steals live leases, releases its own."""
    made = LeasePlan(acquire, steal, spare, release)  # type: ignore[arg-type]  # nonsense on purpose
    plan, _ = checked_plan(made, VIEW)
    assert set(plan.acquire) <= {"2", "3"}
    assert set(plan.steal) <= {A}
    assert set(plan.spare) <= {A}
    assert set(plan.release) <= {"0"}
    named = [*plan.acquire, *plan.steal, *plan.spare, *plan.release]
    assert len(set(named)) == len(named)
    assert checked_plan(plan, VIEW) == (plan, [])
