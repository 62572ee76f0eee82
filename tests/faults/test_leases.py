"""A lease or a link is lost while the partition is processed."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing

import pytest

from eventpump import CloseReason, Emulator, PartitionReader
from eventpump.errors import OwnershipLostError
from eventpump.interfaces import Checkpoint
from eventpump.reports import LeaseLost, LeaseReleased, OutsideReader
from eventpump.testing.proxy import FaultProxy
from tests.faults.evidence import Evidence
from tests.faults.programs import CONNECTION, HOST, HUB, LEASE_DURATION, RENEW_INTERVAL, Publisher, Stage, run_for
from tests.support.leases import unheld
from tests.ways import over_both

pytestmark = over_both(is_long=True)

NOTICED = RENEW_INTERVAL + 0.5
"""Seconds after which a host knows, by its next renewal, that its lease is another's."""
AVOIDED = LEASE_DURATION + 2 * RENEW_INTERVAL + 1.0
"""Seconds within which a partition left to a reader outside the fleet is taken again."""


async def test_lease_lost_while_processing_ends_the_handler(stage: Stage) -> None:
    """*One reader*: the handler is notified, given its grace, cancelled; no batch and no checkpoint follows."""
    processor = stage.gated("victim", hold=["0"], checkpoint_every=1)
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def lost() -> None:
            await stage.progress.until(lambda: "0" in processor.inside)
            context = processor.inside["0"]
            thief = await stage.opened_store()
            try:
                snapshot = (await thief.list())[0]
                lease = await thief.acquire(snapshot, "thief", held=True)
                assert lease is not None
                assert lease.epoch == context.owner_level + 1
                await asyncio.wait_for(context.ownership_lost.wait(), NOTICED)
                since = time.monotonic()
                with pytest.raises(OwnershipLostError):
                    await context.checkpoint()
                await stage.progress.until(lambda: "0" in processor.cancelled, HOST["ownership_lost_grace"] + 0.5)
                await stage.progress.until(lambda: ("0", CloseReason.OWNERSHIP_LOST) in processor.closed, 0.5)
                await stage.progress.until_flowing(["1", "2", "3"], 2.0)
                assert await stage.checkpoints(["0"]) == {"0": -1}
                processor.hold.clear()
                assert await thief.release(lease)
            finally:
                await thief.aclose()
            await stage.progress.until_flowing(["0"], 2 * RENEW_INTERVAL + 1.0)
            await publisher.stop()
            evidence = await stage.verify(publisher)
            evidence.check_silent("victim", "0", context.owner_level, since)

        await run_for(stage.host("victim", processor), lost)


async def test_checkpoint_of_a_former_owner_is_refused(stage: Stage) -> None:
    """*Monotonic checkpoints*: the store refuses one who does not know yet that the lease is another's."""
    processor = stage.gated("former", hold=["0"], checkpoint_every=1)
    async with Publisher(stage, 4) as publisher:
        await publisher.publish_everywhere(20)

        async def refused() -> None:
            await stage.progress.until(lambda: "0" in processor.inside)
            thief = await stage.opened_store()
            try:
                lease = await thief.acquire((await thief.list())[0], "thief", held=True)
                assert lease is not None
                processor.gate.set()
                await stage.progress.until(lambda: stage.count(LeaseLost, "0") == 1, 2.0)
                assert await stage.checkpoints(["0"]) == {"0": -1}
                await stage.progress.until(lambda: bool(processor.errors), 2.0)
            finally:
                await thief.aclose()

        # A renewal would take ten seconds to detect it.
        await run_for(stage.host("former", processor, leases=stage.store(30.0)), refused)
    assert [(each, type(error)) for each, error in processor.errors] == [("0", OwnershipLostError)]


async def test_checkpoint_that_comes_late_does_not_go_backwards(stage: Stage) -> None:
    """*Monotonic checkpoints*: the store keeps the later one, under one lease too, whatever order writes arrive in."""
    store = await stage.opened_store()
    try:
        await store.ensure(["0"])
        lease = await store.acquire(unheld("0"), "host")
        assert lease is not None
        for number in (10, 5, 11, 7):
            assert await store.write_checkpoint(lease, Checkpoint("0", str(number), number))
    finally:
        await store.aclose()
    Evidence(()).check_stored(set(), stage.witnessed())
    assert await stage.checkpoints(["0"]) == {"0": 11}


async def test_attach_of_a_former_owner_is_refused_by_the_service(stage: Stage, emulator: Emulator) -> None:
    """*One reader*: the lease's epoch on the link keeps a former owner out, which is notified at once."""
    former, heir = stage.processor("former"), stage.processor("heir")
    async with FaultProxy(emulator.port) as proxy, Publisher(stage, 4) as publisher:
        await publisher.publish_everywhere(40)

        async def comes_back() -> None:
            await stage.progress.until_reached(await publisher.ends())
            proxy.refuse()
            proxy.cut()

            async def takes_over() -> None:
                await publisher.publish_everywhere(40)
                await stage.progress.until(lambda: len(heir.opened) == 2, 3.0)
                ends = {
                    partition: end for partition, end in (await publisher.ends()).items() if partition in heir.opened
                }
                await stage.progress.until_reached(ends, 3.0)
                since = time.monotonic()
                assert stage.count(LeaseLost) == 0
                proxy.restore()
                await stage.progress.until(lambda: stage.count(LeaseLost) == 2, 3.0)
                await publisher.publish_everywhere(40)
                evidence = await stage.verify(publisher, 5.0)
                for partition in heir.opened:
                    evidence.check_silent("former", partition, 1, since)

            # A lease of 30 s, and ten between renewals: no host reads the store meanwhile.
            await run_for(stage.host("heir", heir, leases=stage.store(30.0)), takes_over)

        host = stage.host("former", former, leases=stage.store(30.0), custom_endpoint_address=proxy.address)
        await run_for(host, comes_back)


async def test_lease_that_runs_out_under_a_silent_store_ends_the_handler(stage: Stage) -> None:
    """*One reader*, *recovery*: by its own clock a host stops in time when no renewal is answered, and comes back."""
    processor = stage.gated("alone", hold=[])
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def silence() -> None:
            await stage.progress.until_flowing(publisher.partitions, 20.0)
            processor.hold.add("0")
            await stage.progress.until(lambda: "0" in processor.inside)
            first = {partition: epoch for partition, (_, epoch) in stage.progress.owner.items()}
            with closing(sqlite3.connect(stage.leases, isolation_level=None)) as other:
                other.execute("BEGIN EXCLUSIVE")
                over = time.monotonic() + LEASE_DURATION
                await stage.progress.until(
                    lambda: len(processor.closed) == 4, LEASE_DURATION + HOST["ownership_lost_grace"] + 1.0
                )
                other.execute("COMMIT")
            # The handler that ran was notified, and cancelled after its grace; the others got nothing more.
            assert processor.cancelled == ["0"]
            processor.hold.clear()
            assert set(processor.closed) == {(each, CloseReason.OWNERSHIP_LOST) for each in publisher.partitions}
            assert stage.count(LeaseLost) == 4
            await stage.progress.until_flowing(publisher.partitions, 2 * RENEW_INTERVAL + 2.0)
            await publisher.stop()
            evidence = await stage.verify(publisher)
            for partition, epoch in first.items():
                evidence.check_silent("alone", partition, epoch, over)

        await run_for(stage.host("alone", processor), silence)


async def test_stolen_link_is_left_to_a_reader_outside_the_fleet(stage: Stage, request: pytest.FixtureRequest) -> None:
    """*One reader*, *recovery*: a reader outside the fleet keeps the partition, which flows once that is gone."""
    processor = stage.processor("host")
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def stolen() -> None:
            await stage.progress.until_flowing(publisher.partitions, 20.0)
            outsider = PartitionReader(
                stage.connection_string, HUB, partition_id="0", owner_level=1000, **CONNECTION, **stage.way
            )
            async with outsider:
                assert await outsider.read(max_wait_time=5.0)
                await stage.progress.until(lambda: stage.count(OutsideReader, "0") == 1, 2.0)
                await stage.progress.until(lambda: ("0", CloseReason.OWNERSHIP_LOST) in processor.closed, 1.0)
                since, epoch = time.monotonic(), stage.progress.owner["0"][1]
                # A lease is released after its processor is closed, when the pump has ended.
                await stage.progress.until(lambda: stage.count(LeaseReleased, "0") == 1, 1.0)
                assert "0" not in await stage.held_leases()
                # Its lease is free for two cycles, and still not taken; the rest flows.
                until = asyncio.get_running_loop().time() + 2 * RENEW_INTERVAL
                await stage.progress.until(lambda: asyncio.get_running_loop().time() > until)
                assert stage.count(OutsideReader, "0") == 1
                # In the end it is taken again; the link is refused, and the partition left alone again.
                if request.config.getoption("--long"):
                    await stage.progress.until(lambda: stage.count(OutsideReader, "0") == 2, AVOIDED)
                await stage.progress.until_flowing(["1", "2", "3"], 2.0)
                assert stage.progress.owner["0"][1] == epoch
            await stage.progress.until_flowing(["0"], AVOIDED)
            await publisher.stop()
            evidence = await stage.verify(publisher)
            evidence.check_silent("host", "0", epoch, since)

        await run_for(stage.host("host", processor), stolen)
    assert [partition for partition, _ in processor.closed].count("1") == 1
