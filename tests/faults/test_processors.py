"""The user's processor raises, hangs, does not let itself be cancelled, or is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from eventpump import CheckpointPolicy, CloseReason, Emulator, PartitionContext, ReceivedEvent
from eventpump.errors import ProcessorFailedError
from eventpump.reports import LeaseLost, LeaseTaken, ProcessorFailed, PumpOverdue
from eventpump.testing.proxy import Direction, FaultProxy
from tests.faults.programs import (
    LEASE_DURATION,
    RENEW_INTERVAL,
    GatedProcessor,
    Publisher,
    ReportingProcessor,
    Stage,
    run_for,
)
from tests.ways import over_both

pytestmark = over_both(is_long=True)

OTHERS = ["1", "2", "3"]
HAND_OVER = 2 * RENEW_INTERVAL + 1.0
"""Seconds within which a released lease is taken and its partition flows."""


class Failing(ReportingProcessor):
    """Raises at the third batch of a partition, a number of times; a batch tried again is another try."""

    failures = 3
    failed = 0
    tries = 0

    async def work(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        if context.partition_id != "0":
            return
        self.tries += 1
        if self.tries > 2 and self.failed < self.failures:
            self.failed += 1
            raise ValueError("the processor does not like this batch")


class HangingInOpen(GatedProcessor):
    """Does not return from `open` of a partition."""

    async def open(self, context: PartitionContext) -> None:
        await super().open(context)
        if context.partition_id == "0":
            await self.gate.wait()


class HangingInClose(GatedProcessor):
    """Does not return from `close` of a partition."""

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        await super().close(context, reason)
        if context.partition_id == "0":
            await self.gate.wait()


class Deaf(GatedProcessor):
    """Does not let itself be cancelled."""

    async def work(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        while context.partition_id in self.hold and not self.gate.is_set():
            try:
                await super().work(context, events)
            except asyncio.CancelledError:
                continue


async def test_batch_that_fails_is_delivered_again_until_processed(stage: Stage) -> None:
    """*At least once*, *no reorder*: no event is skipped, no checkpoint passes it, and no other partition waits."""
    processor = Failing(stage.journal("host"), stage.progress, "host", checkpoint_every=1)
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def fails() -> None:
            await stage.progress.until(lambda: processor.failed == 1, 20.0)
            reached = stage.progress.reached["0"]
            assert (await stage.checkpoints(["0"]))["0"] <= reached - 1
            await stage.progress.until(lambda: stage.count(ProcessorFailed, "0") == 3)
            await stage.progress.until_flowing(publisher.partitions, 3.0)
            await publisher.stop()
            evidence = await stage.verify(publisher)
            # Nothing but the batches that failed came twice.
            assert 0 < evidence.duplicates <= 3 * 20

        await run_for(stage.host("host", processor), fails)
    assert [str(error) for _, error in processor.errors] == ["the processor does not like this batch"] * 3
    assert processor.opened.count("0") == 1


class Backwards(ReportingProcessor):
    """Checkpoints the last event of every batch, and then the first one."""

    async def work(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self._journal.claimed(context.partition_id, context.owner_level, events)
        await context.checkpoint()
        await context.checkpoint(events[0])


async def test_checkpoint_never_goes_backwards(stage: Stage) -> None:
    """*Monotonic checkpoints*: an earlier event than what is stored changes nothing, in the store least of all."""
    processor = Backwards(stage.journal("host"), stage.progress, "host", checkpoint_every=0)
    async with Publisher(stage, 4) as publisher:
        await publisher.publish_everywhere(60)

        async def all_came() -> None:
            await stage.verify(publisher)

        await run_for(stage.host("host", processor), all_came)
    assert len(stage.witnessed()) >= 4
    assert await stage.checkpoints(publisher.partitions) == dict.fromkeys(publisher.partitions, 59)


async def test_checkpoint_never_covers_a_batch_in_a_handler(stage: Stage) -> None:
    """*No loss*: neither a policy nor the end of a host stores a batch whose handler has not returned."""
    processor = stage.gated("first", hold=["0"], checkpoint_every=0)
    policy = CheckpointPolicy(every_events=1, on_close=True)
    async with Publisher(stage, 4) as publisher:
        await publisher.publish_everywhere(60)

        async def held() -> None:
            await stage.progress.until_reached({"1": 60, "2": 60, "3": 60})
            await stage.progress.until(lambda: "0" in processor.inside)

        await run_for(stage.host("first", processor, checkpoint_policy=policy, close_timeout=1.0), held)
        assert processor.cancelled == ["0"]
        assert await stage.checkpoints(publisher.partitions) == {"0": -1, "1": 59, "2": 59, "3": 59}

        async def next_host() -> None:
            await stage.verify(publisher)

        await run_for(stage.host("second", stage.processor("second")), next_host)


async def test_policy_stop_leaves_the_failed_batch_to_the_next_host(stage: Stage) -> None:
    """*No loss*, *tidy close*: the host ends with the cause, nothing passes the failed batch, the next host gets it."""
    processor = Failing(stage.journal("first"), stage.progress, "first", checkpoint_every=1)
    async with Publisher(stage, 4) as publisher:
        await publisher.publish_everywhere(100)
        async with stage.host("first", processor, failure_policy="stop") as host:
            with pytest.raises(ProcessorFailedError, match="partition 0: process_events") as raised:
                await asyncio.wait_for(host.run(), 20.0)
        assert isinstance(raised.value.__cause__, ValueError)
        assert (await stage.checkpoints(["0"]))["0"] == stage.progress.reached["0"] - 1
        assert await stage.held_leases() == {}

        async def next_host() -> None:
            await stage.verify(publisher)

        await run_for(stage.host("second", stage.processor("second")), next_host)


async def test_process_events_that_hangs_delays_no_other_partition(stage: Stage) -> None:
    """*Recovery*, *tidy close*, *no loss*: others flow, leases are kept, closing keeps its time, another takes over."""
    # Partition 0 hangs in `open`, partition 1 in `process_events`.
    processor = HangingInOpen(stage.journal("first"), stage.progress, "first", 1, hold=["1"])
    async with Publisher(stage, 4) as publisher:
        publisher.start()
        loop = asyncio.get_running_loop()

        async def hangs() -> None:
            await stage.progress.until_flowing(["2", "3"], 20.0)
            await stage.progress.until(lambda: "1" in processor.inside)
            until = loop.time() + LEASE_DURATION + 0.2
            await stage.progress.until(lambda: loop.time() > until)
            await stage.progress.until_flowing(["2", "3"], 1.0)
            assert stage.count(LeaseLost) == 0
            assert set(await stage.held_leases()) == set(publisher.partitions)

        await run_for(stage.host("first", processor, close_timeout=1.0), hangs)
        assert stage.progress.reached["0"] == stage.progress.reached["1"] == 0
        assert sorted(processor.opened) == publisher.partitions
        assert processor.cancelled == ["1"]
        # Where `open` did not return, there is nothing to close.
        assert sorted(each for each, _ in processor.closed) == ["1", "2", "3"]
        assert await stage.held_leases() == {}
        assert await stage.checkpoints(["0", "1"]) == {"0": -1, "1": -1}

        async def next_host() -> None:
            await stage.progress.until_flowing(publisher.partitions, HAND_OVER)
            await publisher.stop()
            await stage.verify(publisher)

        await run_for(stage.host("second", stage.processor("second")), next_host)


async def test_close_of_a_processor_that_hangs_keeps_no_lease(stage: Stage) -> None:
    """*Tidy close*: closing keeps its time, every lease is released, and what was checkpointed is stored."""
    processor = HangingInClose(stage.journal("host"), stage.progress, "host", 1, hold=[])
    async with Publisher(stage, 4) as publisher:
        await publisher.publish_everywhere(60)
        loop = asyncio.get_running_loop()
        async with stage.host("host", processor) as host, asyncio.TaskGroup() as group:
            group.create_task(host.run())
            await stage.progress.until_reached(await publisher.ends())
            began = loop.time()
            await host.aclose(1.0)
            assert loop.time() - began < 1.0 + 1.5
        assert sorted(each for each, _ in processor.closed) == publisher.partitions
        assert await stage.held_leases() == {}
        assert await stage.checkpoints(publisher.partitions) == dict.fromkeys(publisher.partitions, 59)
        (await stage.verify(publisher)).check_no_duplicate()


async def test_handler_that_cannot_be_cancelled_is_reported_and_replaced(stage: Stage) -> None:
    """*One reader*, *recovery*: its partition goes to another host, and is not started here while it runs."""
    processor = Deaf(stage.journal("deaf"), stage.progress, "deaf", 1, hold=["0"])
    async with Publisher(stage, 4) as publisher:
        publisher.start()
        thief = await stage.opened_store()
        try:

            async def deaf() -> None:
                await stage.progress.until(lambda: "0" in processor.inside, 20.0)
                lease = await thief.acquire((await thief.list())[0], "thief", held=True)
                assert lease is not None
                await stage.progress.until(lambda: stage.count(PumpOverdue, "0") == 1, 4.0)
                assert await thief.release(lease)
                # The lease is free for two cycles, and still not taken here.
                until = asyncio.get_running_loop().time() + 2 * RENEW_INTERVAL
                await stage.progress.until(lambda: asyncio.get_running_loop().time() > until)
                assert processor.opened.count("0") == 1
                assert "0" not in await stage.held_leases()

                async def other_host() -> None:
                    await stage.progress.until_flowing(["0"], HAND_OVER)
                    await stage.progress.until_flowing(OTHERS, HAND_OVER)

                await run_for(stage.host("other", stage.processor("other")), other_host)
                assert stage.progress.owner["0"][0] == "other"
                assert processor.opened.count("0") == 1
                processor.hold.clear()
                processor.gate.set()
                await stage.progress.until(lambda: processor.opened.count("0") == 2, HAND_OVER)
                await publisher.stop()
                await stage.verify(publisher)

            await run_for(stage.host("deaf", processor, close_timeout=1.0), deaf)
        finally:
            processor.gate.set()
            await thief.aclose()


async def test_slow_process_events_keeps_its_lease_and_bounds_prefetch(stage: Stage, emulator: Emulator) -> None:
    """*No duplicate*: work longer than a lease loses nothing, and meanwhile no more is read than the cache may hold."""
    processor = stage.gated("slow", hold=["0"])
    cache, size = 64 * 1024, 1024
    async with FaultProxy(emulator.port) as proxy, Publisher(stage, 4, size=size) as publisher:
        await publisher.publish("0", 2000)

        async def slow() -> None:
            loop = asyncio.get_running_loop()
            await stage.progress.until(lambda: "0" in processor.inside, 20.0)
            until, others = loop.time() + LEASE_DURATION + 0.2, 0
            while loop.time() < until:
                # It shares the connection: what comes now comes after all that partition 0 had credit for.
                await publisher.publish("1", 1)
                others += 1
                await stage.progress.until_reached({"1": others})
                await asyncio.sleep(0.1)
            received = proxy.bytes_forwarded(Direction.TO_CLIENT)
            # Before the sizes are known credit is for 32 events, and what it was for still comes.
            assert received < 2 * others * size + cache + 2 * 32 * size + 16 * 1024
            processor.gate.set()
            (await stage.verify(publisher)).check_no_duplicate()

        host = stage.host(
            "slow", processor, custom_endpoint_address=proxy.address, prefetch_bytes=cache, prefetch_events=3000
        )
        await run_for(host, slow)
    assert stage.count(LeaseTaken) == 4
    assert stage.count(LeaseLost) == 0
