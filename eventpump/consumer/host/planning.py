"""A host's balancer, as the manager uses it: what it sees, what it plans, and what is reported of it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Collection, Sequence

from eventpump.cancellation import is_failure
from eventpump.core.balancer import LeasePlan
from eventpump.core.balancers import RingBalancer, StaticAssignment
from eventpump.core.fleet import FleetMemory, FleetView, PartitionBalancer, checked_plan
from eventpump.core.lease import LeaseSnapshot
from eventpump.errors import ConfigurationError
from eventpump.options.consumer import HostSettings
from eventpump.reports import BalancerFailed, Reporter


def check_shared(settings: HostSettings) -> None:
    """Refuse what has no meaning among members of other SDKs, which divide the partitions evenly by their number."""
    kind = type(settings.balancer).__name__
    if isinstance(settings.balancer, RingBalancer | StaticAssignment):
        problem = (
            f"{kind} cannot be used with a lease store that is shared with other SDKs: their members take what it "
            "assigns, and it takes that back, again and again; use FairBalancer or GreedyBalancer"
        )
        raise ConfigurationError("balancer", problem)
    if settings.weight != 1:
        problem = (
            "cannot be used with a lease store that is shared with other SDKs: their members know no weights, and "
            "divide the partitions evenly"
        )
        raise ConfigurationError("weight", problem)


class LeasePlanner:
    """Plans each cycle of a host by its balancer. Whatever that does, only a plan that can be carried out is returned.

    Args:
        reporter: Receives what is wrong with the balancer, once until that changes.
    """

    def __init__(self, balancer: PartitionBalancer, host: str, rng: random.Random, reporter: Reporter) -> None:
        self._balancer = balancer
        self._host = host
        self._rng = rng
        self._reporter = reporter
        self._memory = FleetMemory()
        self._problem: str | None = None

    def plan(
        self,
        leases: Sequence[LeaseSnapshot],
        now: float,
        *,
        known: Collection[str],
        held: Collection[str],
        taking: Collection[str],
        avoid: Collection[str],
    ) -> LeasePlan:
        """Plan a cycle.

        Args:
            known: As `FleetView.partition_ids`; likewise the others.

        Raises:
            ConfigurationError: The balancer cannot work with this hub.
        """
        memory = self._memory
        memory.listed(leases, now)
        view = FleetView(
            self._host,
            tuple(leases),
            frozenset(known),
            frozenset(held),
            frozenset(taking),
            frozenset(avoid),
            memory.ages,
            memory.hosts,
            memory.departed,
            memory.age,
            self._rng,
        )
        try:
            made: object = self._balancer.plan(view)
        except BaseException as error:
            if isinstance(error, ConfigurationError) or not is_failure(error):
                raise
            self._report(f"it raised {type(error).__name__}: {error}")
            return LeasePlan()
        if inspect.iscoroutine(made):
            made.close()
        plan, problems = checked_plan(made, view)
        self._report("; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else ""))
        return plan

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            self._reporter.report(BalancerFailed(self._host, None, problem))
        self._problem = problem
