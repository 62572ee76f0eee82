"""A pump whose reading starts over, or ends, because what it read is gone: its checkpoints and its checks."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from eventpump.consumer.processor import CloseReason, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import OwnershipLostError
from eventpump.reports import CheckpointDropped, DataLost, PumpOverdue, UnexpectedFailure
from eventpump.testing.transport import FakeHub
from tests.support.fleet import Fleet, RecordingProcessor


async def _nothing(context: PartitionContext, events: Any) -> None:
    """Process a batch without a checkpoint."""


async def _store_on_close(context: PartitionContext, reason: CloseReason) -> None:
    await context.checkpoint()


async def _store_on_error(context: PartitionContext, error: Exception) -> None:
    await context.checkpoint()


@pytest.mark.parametrize("by", ["policy", "close", "process_error"])
async def test_pump_that_leaves_after_data_loss_checkpoints_what_was_processed(by: str) -> None:
    """Events processed before those that are gone are checkpointed as at every end under a lease."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        fleet.hub.publish("0", count=20)
        processor = RecordingProcessor(
            fleet.record,
            on_events=_nothing,
            on_error=_store_on_error if by == "process_error" else None,
            on_close=_store_on_close if by == "close" else None,
        )
        policy = CheckpointPolicy() if by == "policy" else CheckpointPolicy.manual()
        await fleet.start("a", processor, on_data_loss="fail", checkpoint_policy=policy)
        await asyncio.sleep(5)
        fleet.hub.stall("0")
        fleet.hub.publish("0", count=20)
        fleet.hub.truncate("0", 35)
        fleet.hub.resume("0")
        await asyncio.sleep(5)
        assert len(fleet.reported("a", DataLost)) == 1
        assert fleet.record.reasons("a", "0") == [CloseReason.FAILED]
        assert fleet.checkpoint("0") == 19
        assert not fleet.reported("a", CheckpointDropped)


@pytest.mark.parametrize("policy", [None, "earliest", "latest"])
async def test_checkpoint_of_a_recreated_hub_does_not_hang(policy: Any) -> None:
    """The events of a hub that was recreated need no checkpoint any more, and no call of `checkpoint` hangs."""
    async with Fleet(FakeHub(partitions=1, latency=0.05)) as fleet:
        fleet.hub.publish("0", count=20)
        contexts: list[PartitionContext] = []

        async def keep(context: PartitionContext) -> None:
            contexts.append(context)

        processor = RecordingProcessor(
            fleet.record, on_events=_nothing, on_open=keep, on_error=_store_on_error, on_close=_store_on_close
        )
        await fleet.start("a", processor, on_data_loss=policy, checkpoint_policy=CheckpointPolicy())
        await asyncio.sleep(5)
        await contexts[0].checkpoint()
        fleet.hub.publish("0", count=20)
        await asyncio.sleep(5)
        fleet.hub.recreate()
        await fleet.until(lambda: fleet.reported("a", DataLost) != [], 10, step=0.001)
        assert fleet.reported("a", DataLost)[0].loss.first_missing == 40
        async with asyncio.timeout(3):
            with suppress(OwnershipLostError):  # where the partition was left
                await contexts[0].checkpoint()
        await asyncio.sleep(20)
        assert fleet.checkpoint("0") == (39 if policy is None else -1)
        assert not fleet.reported("a", CheckpointDropped)
        assert not fleet.reported("a", PumpOverdue)


async def test_lag_of_a_recreated_hub_is_unknown_until_its_first_event() -> None:
    """Until an event of the new hub came, its lag is unknown, and not what the old one's was."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        fleet.hub.publish("0", count=20)
        host = await fleet.start("a", on_data_loss="earliest", track_last_enqueued=True)
        await asyncio.sleep(5)
        assert [each.lag for each in host.partitions] == [0]
        fleet.hub.recreate()
        fleet.hub.stall("0")
        fleet.hub.publish("0", count=5)
        await asyncio.sleep(5)
        assert [(each.is_attached, each.lag) for each in host.partitions] == [(True, None)]
        fleet.hub.resume("0")
        await asyncio.sleep(5)
        assert [each.lag for each in host.partitions] == [0]


async def test_silence_check_that_ends_with_its_feed_is_not_reported() -> None:
    """A partition may be lost while management is asked about its silent link: nothing unexpected is reported."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        fleet.hub.answers_echo = False
        fleet.hub.publish("0", count=20)
        await fleet.start("a", max_wait_time=5.0, renew_interval=1.0)
        await asyncio.sleep(3)
        fleet.hub.hang("partition")
        looks = len(fleet.hub.looks)
        await fleet.until(lambda: len(fleet.hub.looks) > looks, 30)
        fleet.leases.leases(fleet.scope)["0"].token = "another"
        await asyncio.sleep(20)
        assert fleet.record.reasons("a", "0")[0] == CloseReason.OWNERSHIP_LOST
        assert not fleet.reported("a", UnexpectedFailure)
        fleet.hub.answer("partition")
