"""A processor host in a process of its own. One argument: its settings, as JSON.

Prints `batch HOST PARTITION EPOCH LAST` for every batch processed, with `HOST/NAME` for one of a subscription,
`subscribed NAME` where a subscription is there, `report KIND PARTITION TEXT` for every report of
the host, `blocked PARTITION EPOCH` where it was asked to block its event loop, and at the end what is left over:
`left TASKS THREADS SOCKETS`. SIGTERM closes it in order.

With `commands` in its settings it carries out lines of its standard input, each in a task: `NUMBER seek NAME PARTITION
AT`, `NUMBER replay NAME PARTITION FIRST LAST`, and `NUMBER CALL NAME` for `pause`, `resume` and `drain`. It prints
`done NUMBER BEGAN ENDED PARTITIONS`, in seconds since the Unix epoch, or `refused NUMBER ERROR`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it comes without types

from eventpump import (
    BlobLeaseStore,
    CheckpointPolicy,
    EventPosition,
    EventProcessorHost,
    EventPumpError,
    Park,
    PartitionContext,
    ReceivedEvent,
    RetryOptions,
    SqliteLeaseStore,
    StaticAssignment,
)
from eventpump.reports import EventSkipped, HostReport
from tests.faults.evidence import Journal
from tests.faults.programs import HUB, JournalProcessor


def say(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201 - what this program is for


class Processor(JournalProcessor):
    """Reports every batch, and misbehaves on request.

    Args:
        block_at: The batch, counted over all partitions, in which to block the event loop, until a line comes.
        pause: Seconds that each batch takes.
        fails: It cannot process any event whose number divided by 20 leaves this.
    """

    def __init__(
        self,
        journal: Journal,
        host: str,
        *,
        checkpoint_every: int,
        block_at: int | None = None,
        pause: float = 0.0,
        fails: int | None = None,
    ) -> None:
        super().__init__(journal, checkpoint_every)
        self._host = host
        self._block_at = block_at
        self._pause = pause
        self._fails = fails
        self._count = 0

    async def work(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        if self._pause:
            await asyncio.sleep(self._pause)
        if any(event.sequence_number % 20 == self._fails for event in events):
            raise ValueError("an event that cannot be processed")
        self._count += 1
        if self._count == self._block_at:
            say("blocked", context.partition_id, context.owner_level)
            sys.stdin.readline()

    def processed(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        say("batch", self._host, context.partition_id, context.owner_level, events[-1].sequence_number)


def reported(report: HostReport) -> None:
    say("report", type(report).__name__, report.partition_id or "-", report.describe())


class Commands:
    """Carries out the lines of the standard input."""

    def __init__(self, host: EventProcessorHost) -> None:
        self._host = host
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Read lines until this is cancelled, or there are no more."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        try:
            while line := await reader.readline():
                task = asyncio.create_task(self._carry_out(*line.decode().split()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            transport.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry_out(self, number: str, call: str, name: str, *given: str) -> None:
        host, began = self._host, time.time()
        try:
            match call, given:
                case "seek", [partition_id, at]:
                    done = await host.seek(
                        name, EventPosition.at_sequence_number(int(at), inclusive=True), [partition_id]
                    )
                case "replay", [partition_id, first, last]:
                    done = await host.replay(name, from_=int(first), to=int(last), partition_ids=[partition_id])
                case "drain", []:
                    done = await host.drain(name)
                case "pause", []:
                    done = host.pause(name)
                case "resume", []:
                    host.resume(name)
                    done = ()
                case _:
                    raise ValueError(f"{call} {given}")
        except EventPumpError as error:
            say("refused", number, repr(error)[:200])
        else:
            say("done", number, began, time.time(), *done)


def store_of(settings: dict[str, Any]) -> SqliteLeaseStore | BlobLeaseStore:
    """Make the store: a file, or, where it says "azurite", the container of the name in "leases"."""
    if (azurite := settings.get("azurite")) is None:
        return SqliteLeaseStore(settings["leases"], lease_duration=settings["lease_duration"])
    duration = settings["lease_duration"]
    return BlobLeaseStore(settings["leases"], connection_string=azurite, lease_duration=duration, create=True)


def parking(journal: Journal) -> Callable[[PartitionContext, ReceivedEvent, Exception], Awaitable[None]]:
    """Return what parks events in a journal."""

    async def park(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        await asyncio.sleep(0)
        journal.passed(context.partition_id, event.sequence_number)

    return park


async def main(settings: dict[str, Any]) -> None:
    path = Path(settings["journal"])
    journals: dict[str | None, Journal] = {}

    def noted(report: HostReport) -> None:
        if isinstance(report, EventSkipped) and (journal := journals.get(report.subscription)) is not None:
            assert report.partition_id is not None
            assert report.sequence_number is not None
            journal.passed(report.partition_id, report.sequence_number)
        reported(report)

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
        hooks=[noted],
        retry=RetryOptions(**settings["retry"]),
        checkpoint_policy=CheckpointPolicy(on_close=settings.get("checkpoint_on_close", False)),
        **options,
    )
    async with host:
        for name, given in settings.get("subscriptions", {}).items():
            journal = journals[name] = Journal(path.with_suffix(f".{name}.journal"), settings["host"])
            subscriber = Processor(
                journal,
                f"{settings['host']}/{name}",
                checkpoint_every=given["checkpoint_every"],
                pause=given.get("pause", 0.0),
                fails=given.get("fails"),
            )
            options = given.get("options", {})
            if options.get("failure_policy") == "park":
                options["failure_policy"] = Park(parking(journal))
            await host.subscribe(name, subscriber, **options)
            say("subscribed", name)
        commands = asyncio.create_task(Commands(host).run()) if settings.get("commands") else None
        await host.run(handle_signals=True)
        if commands is not None:
            commands.cancel()
            await asyncio.wait([commands])
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    # The loop's own executor, which resolves names for other libraries, ends with the loop.
    threads = [each for each in threading.enumerate() if each.name != "MainThread" and "asyncio_" not in each.name]
    say("left", len(tasks), len(threads), len(psutil.Process().net_connections("inet")))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
