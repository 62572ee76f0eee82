"""Static hosts go from five to six while both configurations run: the real service protocol, one SQLite file."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from eventpump import (
    Emulator,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    PartitionContext,
    ReceivedEvent,
    RoundRobinRouter,
    SqliteLeaseStore,
    StaticAssignment,
)
from eventpump.reports import HostReport, LeaseTaken
from tests.faults.programs import TAKE_OVER, Publisher, Stage
from tests.support.waiting import Changes

PARTITIONS = 12
LEASE_DURATION = 3.0
START = 45.0
"""Seconds within which processes run: many start at once."""


class _Fleet:
    """Hosts in this process, and what they have processed."""

    def __init__(self, connection_string: str, leases: Path) -> None:
        self.changes = Changes()
        self.seen: defaultdict[str, set[int]] = defaultdict(set)
        self.readers: defaultdict[tuple[str, int | None], set[str]] = defaultdict(set)
        self.stolen: list[HostReport] = []
        self.hosts: dict[str, EventProcessorHost] = {}
        self._connection_string = connection_string
        self._leases = leases
        self._runs: list[asyncio.Task[None]] = []

    def start(self, name: str, balancer: StaticAssignment) -> None:
        fleet = self

        class Processor(EventProcessor):
            async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
                fleet.readers[context.partition_id, context.owner_level].add(context.owner_id)
                fleet.seen[context.partition_id].update(event.sequence_number for event in events)
                await context.checkpoint()
                fleet.changes.happened()

        host = self.hosts[name] = EventProcessorHost(
            self._connection_string,
            "telemetry",
            processor=Processor(),
            lease_store=SqliteLeaseStore(self._leases, lease_duration=LEASE_DURATION),
            owner_id=name,
            balancer=balancer,
            renew_interval=0.3,
            hooks=[self._reported],
        )
        self._runs.append(asyncio.create_task(host.run(), name=f"host {name}"))

    def _reported(self, report: HostReport) -> None:
        if isinstance(report, LeaseTaken) and report.stolen_from is not None:
            self.stolen.append(report)
        self.changes.happened()

    def owned(self, name: str) -> set[int]:
        return {int(each.partition_id) for each in self.hosts[name].partitions if each.epoch is not None}

    async def aclose(self) -> None:
        await asyncio.gather(*(host.aclose() for host in self.hosts.values()))
        await asyncio.gather(*self._runs)


@pytest.mark.timeout(120)
async def test_static_hosts_go_from_five_to_six_without_a_second_reader(tmp_path: Path) -> None:
    """Each event is processed, each epoch has one reader, nothing is stolen, and each partition ends with its owner."""
    rng = random.Random(7)
    async with Emulator({"telemetry": PARTITIONS}) as service:
        fleet = _Fleet(service.connection_string, tmp_path / "leases.db")
        published = 0

        async def publish(producer: EventProducer) -> None:
            nonlocal published
            for _ in range(PARTITIONS):
                await producer.send(EventData(b"x"))
            published += 1

        async with EventProducer(service.connection_string, "telemetry", router=RoundRobinRouter()) as producer:
            for ordinal in range(5):
                fleet.start(f"old-{ordinal}", StaticAssignment(ordinal=ordinal, of=5))
            await publish(producer)
            await fleet.changes.until(lambda: len(fleet.seen) == PARTITIONS, 60)
            steps = [("end", each) for each in range(5)] + [("start", each) for each in range(6)]
            rng.shuffle(steps)
            for kind, ordinal in steps:
                await publish(producer)
                if kind == "start":
                    fleet.start(f"new-{ordinal}", StaticAssignment(ordinal=ordinal, of=6))
                else:
                    await fleet.hosts[f"old-{ordinal}"].aclose()
            await publish(producer)
            everything = set(range(published))
            await fleet.changes.until(lambda: all(seen == everything for seen in fleet.seen.values()), 60)
            for ordinal in range(6):
                expected = {ordinal, ordinal + 6}
                await fleet.changes.until(lambda n=ordinal, e=expected: fleet.owned(f"new-{n}") == e, 30)  # type: ignore[misc]  # the defaults are the types
        await fleet.aclose()
    assert all(len(hosts) == 1 for hosts in fleet.readers.values()), fleet.readers
    assert fleet.stolen == []
    assert {host for hosts in fleet.readers.values() for host in hosts} >= {f"new-{each}" for each in range(6)}


async def test_static_processes_get_one_more_without_a_second_reader(
    stage: Stage, request: pytest.FixtureRequest
) -> None:
    """The same with a process per host, 2 of which become 3 (5 become 6 with `--long`), while events are published."""
    before = 5 if request.config.getoption("--long") else 2
    async with Publisher(stage, 4) as publisher:
        publisher.start()
        for ordinal in range(before):
            await stage.start_child(f"old-{ordinal}", static=[ordinal, before])
        await stage.progress.until_flowing(publisher.partitions, START)
        for ordinal in range(before + 1):
            await stage.start_child(f"new-{ordinal}", static=[ordinal, before + 1])
            if ordinal < before:
                old = stage.children[f"old-{ordinal}"]
                assert await old.stop() == 0, old.stderr
        wanted = {each: f"new-{int(each) % (before + 1)}" for each in publisher.partitions}
        owner = stage.progress.owner
        await stage.progress.until(
            lambda: all(each in owner and owner[each][0] == host for each, host in wanted.items()), START + TAKE_OVER
        )
        await publisher.stop()
        await stage.verify(publisher)
        for ordinal in range(before + 1):
            child = stage.children[f"new-{ordinal}"]
            assert await child.stop() == 0, child.stderr
    assert await stage.held_leases() == {}
