"""An EventProcessorHost on a BlobOwnershipStore in a process of its own. One argument: its settings, as JSON.

It prints a JSON object a line, as every member of a fleet does; see `tests/interop/members/fleet.py`. At SIGTERM it
closes in order.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from eventpump import (
    BlobOwnershipStore,
    CheckpointPolicy,
    CloseReason,
    EventProcessor,
    EventProcessorHost,
    PartitionContext,
    ReceivedEvent,
)
from eventpump.core.lease import LeaseSnapshot, PartitionLease


def say(kind: str, **facts: Any) -> None:
    sys.stdout.write(json.dumps({"is": kind, **facts}) + "\n")
    sys.stdout.flush()


class Watched(BlobOwnershipStore):
    """Prints what it lists, with which each cycle begins, and what was claimed."""

    async def list(self) -> list[LeaseSnapshot]:
        """Return the ownerships."""
        found = await super().list()
        say("cycle", view={each.partition_id: [each.owner if each.is_held else "", None] for each in found})
        return found

    async def acquire(self, snapshot: LeaseSnapshot, owner: str, *, held: bool = False) -> PartitionLease | None:
        """Claim a partition."""
        lease = await super().acquire(snapshot, owner, held=held)
        if lease is not None:
            say("claimed", owner=owner, partitions=[lease.partition_id])
        return lease


class Processor(EventProcessor):
    """Prints what it is called with, and stores a checkpoint for each batch."""

    async def open(self, context: PartitionContext) -> None:
        say("opened", partition=context.partition_id)

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        say("processed", partition=context.partition_id, numbers=[event.sequence_number for event in events])
        await context.checkpoint()
        say("stored", partition=context.partition_id, number=events[-1].sequence_number)

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        say("error", partition=context.partition_id, text=f"{type(error).__name__}: {error}"[:300])

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        say("closed", partition=context.partition_id, reason=reason.value)


async def main(settings: dict[str, Any]) -> None:
    host = EventProcessorHost(
        settings["connection_string"],
        settings["hub"],
        processor=Processor(),
        lease_store=Watched(settings["container"], connection_string=settings["storage"], **settings["store"]),
        owner_id=settings["name"],
        checkpoint_policy=CheckpointPolicy.manual(),
        **settings["options"],
    )
    async with host:
        await host.run(handle_signals=True)
    say("stopped")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
