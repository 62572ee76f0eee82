"""One processor host of the demo, in its own process: `python -m eventpump.demo.host`.

The connection string is in the environment variable EVENTPUMP_CONNECTION_STRING.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eventpump import (
    CheckpointPolicy,
    CloseReason,
    EventProcessor,
    EventProcessorHost,
    EventPumpError,
    PartitionContext,
    ReceivedEvent,
    SqliteLeaseStore,
)
from eventpump.aio.doing import answering_signal, shown
from eventpump.demo.record import ProcessedEvent, RecordFile, digest

STATUS_INTERVAL = 0.25
"""Seconds between two lines of status."""

ARCHIVE = "archive"
"""The name of the second subscription."""
ARCHIVE_PAUSE = 0.5
"""Seconds that the archive takes for a batch, besides writing it."""
ARCHIVE_BATCH = 1500
"""The most events in a batch of the archive: so it falls behind, but keeps up with the stream in the long run."""


class TradeProcessor(EventProcessor):
    """Keeps the volume-weighted price of every symbol, and records what it processed."""

    def __init__(self, records: RecordFile) -> None:
        self._records = records
        self._turnover: dict[str, float] = {}
        self._volume: dict[str, int] = {}
        self.processed = 0
        self.partitions: dict[str, dict[str, Any]] = {}

    async def open(self, context: PartitionContext) -> None:
        self.partitions[context.partition_id] = {"epoch": context.owner_level, "position": None, "lag": None}

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        now = time.time()
        epoch = context.owner_level
        records = []
        for event in events:
            trade = json.loads(event.body)
            symbol, size = trade["symbol"], trade["size"]
            self._turnover[symbol] = self._turnover.get(symbol, 0.0) + trade["price"] * size
            self._volume[symbol] = self._volume.get(symbol, 0) + size
            records.append(ProcessedEvent(context.partition_id, event.sequence_number, digest(event.body), epoch, now))
        self._records.write(records)
        self.processed += len(events)
        status = self.partitions[context.partition_id]
        status["position"] = events[-1].sequence_number
        status["lag"] = context.lag

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        self.partitions.pop(context.partition_id, None)


class Archive(EventProcessor):
    """The second subscription, a slow one: it writes down what it processed, and takes its time."""

    def __init__(self, records: RecordFile) -> None:
        self._records = records

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        now, epoch = time.time(), context.owner_level
        self._records.write(
            ProcessedEvent(context.partition_id, event.sequence_number, digest(event.body), epoch, now)
            for event in events
        )
        await asyncio.sleep(ARCHIVE_PAUSE)


def _say(processor: TradeProcessor, host: EventProcessorHost) -> None:
    archive = {
        status.partition_id: {"position": status.last_sequence_number, "lag": status.lag}
        for status in host.partitions
        if status.subscription == ARCHIVE
    }
    status = {"processed": processor.processed, "partitions": processor.partitions, "archive": archive}
    print(json.dumps({"host": host.owner_id, **status}), flush=True)


async def _report(processor: TradeProcessor, host: EventProcessorHost) -> None:
    while True:
        _say(processor, host)
        await asyncio.sleep(STATUS_INTERVAL)


def _stop_with_stdin(loop: asyncio.AbstractEventLoop, host: EventProcessorHost) -> None:
    """Stop the host when the demo has ended, however it ended."""
    with suppress(OSError):
        while os.read(0, 1024):
            pass
    with suppress(RuntimeError):  # the loop is closed: the host has stopped already
        loop.call_soon_threadsafe(host.stop)


async def _run(args: argparse.Namespace) -> None:
    records, archived = RecordFile(Path(args.records)), RecordFile(Path(args.archive))
    processor = TradeProcessor(records)
    host = EventProcessorHost(
        os.environ["EVENTPUMP_CONNECTION_STRING"],
        args.hub,
        processor=processor,
        lease_store=SqliteLeaseStore(args.leases, lease_duration=args.lease_duration),
        owner_id=args.name,
        checkpoint_policy=CheckpointPolicy(every_seconds=1.0),
        track_last_enqueued=True,
        **args.options,
    )
    async with shown(host):
        await host.subscribe(
            ARCHIVE, Archive(archived), start="earliest", catch_up="shared", max_batch_size=ARCHIVE_BATCH
        )
        report = asyncio.create_task(_report(processor, host))
        loop = asyncio.get_running_loop()
        threading.Thread(target=_stop_with_stdin, args=(loop, host), name="stdin", daemon=True).start()
        try:
            await host.run(handle_signals=True)
        finally:
            report.cancel()
    _say(processor, host)
    records.close()
    archived.close()


def main() -> int:
    """Run one host until SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser(prog="eventpump.demo.host", description="One processor host of the demo.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--hub", required=True)
    parser.add_argument("--leases", required=True, help="the SQLite file of the leases")
    parser.add_argument("--lease-duration", type=float, required=True, help="seconds")
    parser.add_argument("--records", required=True, help="the file to write processed events to")
    parser.add_argument("--archive", required=True, help="the file to write archived events to")
    parser.add_argument("--options", required=True, type=json.loads, help="the connection options (JSON)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    try:
        with answering_signal(lambda text: print(f"{args.name}: {text}", file=sys.stderr, flush=True)):
            asyncio.run(_run(args))
    except EventPumpError as error:
        print(f"{args.name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
