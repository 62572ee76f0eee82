"""A processor host in a process of its own. One argument: its settings, as JSON.

Prints `batch HOST PARTITION EPOCH LAST` for every batch processed, with `HOST/NAME` for one of a subscription,
`subscribed NAME` where a subscription is there, `report KIND PARTITION TEXT` for every report of
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
    BlobLeaseStore,
    CheckpointPolicy,
    EventProcessorHost,
    PartitionContext,
    ReceivedEvent,
    RetryOptions,
    SqliteLeaseStore,
    StaticAssignment,
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
        pause: Seconds that each batch takes.
    """

    def __init__(
        self, journal: Journal, host: str, *, checkpoint_every: int, block_at: int | None = None, pause: float = 0.0
    ) -> None:
        super().__init__(journal, checkpoint_every)
        self._host = host
        self._block_at = block_at
        self._pause = pause
        self._count = 0

    async def work(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        if self._pause:
            await asyncio.sleep(self._pause)
        self._count += 1
        if self._count == self._block_at:
            say("blocked", context.partition_id, context.owner_level)
            sys.stdin.readline()

    def processed(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        say("batch", self._host, context.partition_id, context.owner_level, events[-1].sequence_number)


def reported(report: HostReport) -> None:
    say("report", type(report).__name__, report.partition_id or "-", report.describe())


def store_of(settings: dict[str, Any]) -> SqliteLeaseStore | BlobLeaseStore:
    """Make the store: a file, or, where it says "azurite", the container of the name in "leases"."""
    if (azurite := settings.get("azurite")) is None:
        return SqliteLeaseStore(settings["leases"], lease_duration=settings["lease_duration"])
    return BlobLeaseStore(settings["leases"], connection_string=azurite, lease_duration=settings["lease_duration"])


async def main(settings: dict[str, Any]) -> None:
    path = Path(settings["journal"])
    processor = Processor(
        Journal(path, settings["host"]),
        settings["host"],
        checkpoint_every=settings.get("checkpoint_every", 2),
        block_at=settings.get("block_at"),
    )
    options = dict(settings["options"])
    if (static := settings.get("static")) is not None:
        ordinal, of = static
        options["balancer"] = StaticAssignment(ordinal=ordinal, of=of)
    host = EventProcessorHost(
        settings["connection_string"],
        HUB,
        processor=processor if settings.get("has_default", True) else None,
        lease_store=store_of(settings),
        owner_id=settings["host"],
        hooks=[reported],
        retry=RetryOptions(**settings["retry"]),
        checkpoint_policy=CheckpointPolicy(on_close=settings.get("checkpoint_on_close", False)),
        **options,
    )
    async with host:
        for name, given in settings.get("subscriptions", {}).items():
            subscriber = Processor(
                Journal(path.with_suffix(f".{name}.journal"), settings["host"]),
                f"{settings['host']}/{name}",
                checkpoint_every=given["checkpoint_every"],
                pause=given.get("pause", 0.0),
            )
            await host.subscribe(name, subscriber, **given.get("options", {}))
            say("subscribed", name)
        await host.run(handle_signals=True)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    # The loop's own executor, which resolves names for other libraries, ends with the loop.
    threads = [each for each in threading.enumerate() if each.name != "MainThread" and "asyncio_" not in each.name]
    say("left", len(tasks), len(threads), len(psutil.Process().net_connections("inet")))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
