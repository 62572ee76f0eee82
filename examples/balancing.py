"""Watch how each balancer shares twelve partitions among three hosts, and what it moves when a fourth joins.

    python examples/balancing.py

The hosts run in this process, with leases in memory and a local service, which ends with the program. For each balancer
it prints the partitions of each host, before and after the fourth has joined, and how many moved. `Zones` is a balancer
of the program's own.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from eventpump import (
    Emulator,
    EventProcessor,
    EventProcessorHost,
    EventPumpError,
    FairBalancer,
    GreedyBalancer,
    MemoryLeases,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
    RingBalancer,
    StaticAssignment,
)
from eventpump.interfaces import FleetView, LeasePlan, PartitionBalancer

PARTITIONS = 12
SETTLE = 1.5
"""Seconds without a change after which the hosts count as at rest."""


class Zones:
    """A balancer of one's own: even partitions for hosts whose name begins with "even", odd ones for the others.

    It takes free partitions only, one per cycle, so that the hosts of a zone share it.
    """

    def plan(self, view: FleetView) -> LeasePlan:
        mine = 0 if view.host.startswith("even") else 1
        free = [
            lease.partition_id
            for lease in view.leases
            if not lease.is_held
            and int(lease.partition_id) % 2 == mine
            and lease.partition_id not in view.taking | view.avoid
        ]
        return LeasePlan(acquire=(view.rng.choice(free),) if free else ())


class Idle(EventProcessor):
    """Does nothing: this program is about the leases."""

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        pass


class Fleet:
    """Hosts on one hub."""

    def __init__(self, connection_string: str, stack: AsyncExitStack) -> None:
        self.leases = MemoryLeases()
        self.connection_string = connection_string
        self.stack = stack
        self.hosts: dict[str, EventProcessorHost] = {}
        self.runs: list[asyncio.Task[None]] = []

    async def join(
        self, name: str, balancer: PartitionBalancer, weight: float = 1.0
    ) -> None:
        host = EventProcessorHost(
            self.connection_string,
            "telemetry",
            processor=Idle,
            lease_store=MemoryLeaseStore(self.leases, lease_duration=3.0),
            owner_id=name,
            balancer=balancer,
            weight=weight,
            renew_interval=0.4,
        )
        self.hosts[name] = await self.stack.enter_async_context(host)
        self.runs.append(asyncio.create_task(host.run()))

    def owners(self) -> dict[str, str]:
        return {
            each.partition_id: name
            for name, host in self.hosts.items()
            for each in host.partitions
        }

    async def rest(self) -> dict[str, str]:
        """Wait until all partitions have an owner and none has moved for a while; return the owners."""
        loop, owners = asyncio.get_running_loop(), self.owners()
        since = loop.time()
        while loop.time() - since < SETTLE:
            await asyncio.sleep(0.1)
            if (now := self.owners()) != owners or len(now) < PARTITIONS:
                owners, since = now, loop.time()
        return owners


def shown(title: str, hosts: Sequence[str], owners: dict[str, str]) -> str:
    shares = {
        name: sorted((int(each) for each, owner in owners.items() if owner == name))
        for name in hosts
    }
    return f"  {title}: " + "; ".join(
        f"{name} {' '.join(map(str, share)) or '-'}" for name, share in shares.items()
    )


async def watch(
    title: str,
    names: Sequence[str],
    make: Callable[[int], PartitionBalancer],
    weight: float = 1.0,
) -> None:
    """Start all hosts but the last, then the last, which has the weight."""
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(Emulator({"telemetry": PARTITIONS}))
        fleet = Fleet(service.connection_string, stack)
        for number, name in enumerate(names[:-1]):
            await fleet.join(name, make(number))
        before = await fleet.rest()
        await fleet.join(names[-1], make(len(names) - 1), weight)
        after = await fleet.rest()
    # Leaving the stack has closed the hosts, which ends their runs.
    await asyncio.gather(*fleet.runs)
    print(
        title,
        shown("before", names[:-1], before),
        shown("after", names, after),
        sep="\n",
    )
    print(
        f"  {sum(after[each] != before[each] for each in after)} partitions moved",
        flush=True,
    )


async def main() -> None:
    abcd = ("a", "b", "c", "d")
    static = "StaticAssignment(ordinal=n, of=3), d stands by for n=0"
    await watch("FairBalancer(), the default", abcd, lambda _: FairBalancer())
    await watch(
        "FairBalancer(), d has weight=3", abcd, lambda _: FairBalancer(), weight=3.0
    )
    await watch("GreedyBalancer(limit=5)", abcd, lambda _: GreedyBalancer(limit=5))
    await watch("RingBalancer()", abcd, lambda _: RingBalancer())
    await watch(static, abcd, lambda number: StaticAssignment(ordinal=number % 3, of=3))
    await watch(
        "Zones(), one's own", ("even-1", "odd-1", "even-2", "odd-2"), lambda _: Zones()
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    try:
        asyncio.run(main())
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
