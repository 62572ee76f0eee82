"""A processor host in a process of its own. One argument: its settings, as JSON.

Prints `batch HOST PARTITION EPOCH LAST` for every batch processed, `report KIND PARTITION TEXT` for every report of
the host, `blocked PARTITION EPOCH` where it was told to block its event loop, and at the end what is left over:
`left TASKS THREADS SOCKETS`. SIGTERM closes it in order.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it comes without types

from eventpump import (
    CheckpointPolicy,
    EventProcessorHost,
    PartitionContext,
    ReceivedEvent,
    RetryOptions,
    SqliteLeaseStore,
)
from eventpump.reports import HostReport
from tests.faults.evidence import Journal
from tests.faults.programs import HUB, JournalProcessor


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - what this program is for


class Processor(JournalProcessor):
    """Tells of every batch, and does harm where it is asked to.

    Args:
        block_at: The batch, counted over all partitions, in which to block the event loop, until a line comes.
    """

    def __init__(self, journal: Journal, host: str, *, checkpoint_every: int, block_at: int | None) -> None:
        super().__init__(journal, checkpoint_every)
        self._host = host
        self._block_at = block_at
        self._count = 0

    async def work(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self._count += 1
        if self._count == self._block_at:
            say("blocked", context.partition_id, context.owner_level)
            sys.stdin.readline()

    def processed(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        say("batch", self._host, context.partition_id, context.owner_level, events[-1].sequence_number)


def reported(report: HostReport) -> None:
    say("report", type(report).__name__, report.partition_id or "-", report.describe())


async def main(settings: dict[str, Any]) -> None:
    journal = Journal(Path(settings["journal"]), settings["host"])
    processor = Processor(
        journal,
        settings["host"],
        checkpoint_every=settings.get("checkpoint_every", 2),
        block_at=settings.get("block_at"),
    )
    host = EventProcessorHost(
        settings["connection_string"],
        HUB,
        processor=processor,
        lease_store=SqliteLeaseStore(settings["leases"], lease_duration=settings["lease_duration"]),
        owner_id=settings["host"],
        hooks=[reported],
        retry=RetryOptions(**settings["retry"]),
        checkpoint_policy=CheckpointPolicy(on_close=settings.get("checkpoint_on_close", False)),
        **settings["options"],
    )
    async with host:
        await host.run(handle_signals=True)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    say("left", len(tasks), len(threads), len(psutil.Process().net_connections("inet")))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
