"""The service is killed with SIGKILL and started again on its data."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from eventpump import PartitionReader
from eventpump.options.base import RetryOptions
from tests.faults.evidence import Fact, digest_of
from tests.faults.programs import CONNECTION, HUB, RECONNECT, RETRY, Publisher, Stage, write_config
from tests.support.processes import EmulatorProcess


@pytest.fixture
async def service(nothing_left: None, tmp_path: Path) -> AsyncIterator[EmulatorProcess]:
    """`eventpump emulator` on a data directory, in a process of its own."""
    config = write_config(tmp_path / "Config.json", 2)
    async with EmulatorProcess(data=tmp_path / "data", arguments=["--config", str(config)]) as started:
        yield started


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(20 if metafunc.config.getoption("--long") else 1))


async def _watch(stage: Stage, partition_id: str, seen: set[Fact]) -> None:
    """Read a partition forever, and note what was seen the moment it is."""
    reader = PartitionReader(
        stage.connection_string,
        HUB,
        partition_id=partition_id,
        link_retry=RetryOptions(base_delay=0.05, max_delay=0.5),
        retry=RETRY,
        **CONNECTION,
    )
    async with reader:
        async for event in reader:
            seen.add(Fact(partition_id, event.sequence_number, digest_of(event.body)))
            stage.progress.processed("watch", partition_id, 0, event.sequence_number)


async def test_killed_emulator_keeps_what_was_acknowledged_or_seen(
    bare_stage: Stage, service: EmulatorProcess, seed: int, request: pytest.FixtureRequest
) -> None:
    """*No loss*: no acknowledged event is gone, none that a reader saw is taken back, no number is given twice."""
    stage, rng = bare_stage, random.Random(seed)
    stage.connection_string = service.connection_string
    seen: set[Fact] = set()
    kills = 5 if request.config.getoption("--long") else 3
    # Batches take their time to the disk, so that many are on their way there when it is killed.
    async with Publisher(stage, 2, ahead=500, size=20_000, pace=0.0) as publisher, asyncio.TaskGroup() as group:
        watches = [group.create_task(_watch(stage, each, seen)) for each in publisher.partitions]
        publisher.start(lanes=4)
        for _ in range(kills):
            count = sum(map(len, publisher.acknowledged.values())) + rng.randrange(1, 300)
            await stage.progress.until(lambda count=count: sum(map(len, publisher.acknowledged.values())) >= count)  # type: ignore[misc]
            await service.kill()
            await service.start()
            await stage.progress.until_flowing(publisher.partitions, RECONNECT)
        await publisher.stop()
        log = await stage.read_log(publisher)
        await stage.progress.until_reached(await publisher.ends())
        for watch in watches:
            watch.cancel()
    assert seen == log


async def test_hosts_go_on_after_the_emulator_was_killed(bare_stage: Stage, service: EmulatorProcess) -> None:
    """*No loss*, *no duplicate*, *recovery*: hosts find the service again, and go on where they were."""
    stage = bare_stage
    stage.connection_string = service.connection_string
    await stage.witness_checkpoints()
    async with Publisher(stage, 2) as publisher:
        publisher.start()
        await stage.start_child("alone")
        await stage.progress.until_flowing(publisher.partitions, 20.0)
        await service.kill()
        await service.start()
        await stage.progress.until_flowing(publisher.partitions, RECONNECT)
        await publisher.stop()
        evidence = await stage.verify(publisher)
        await stage.stop_child("alone")
    evidence.check_no_duplicate()
