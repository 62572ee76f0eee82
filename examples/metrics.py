"""Metrics of a host and a buffered producer for Prometheus, without another dependency.

    python examples/metrics.py --port 9108
    curl http://localhost:9108/metrics

Counters come from the processor and from the reports of the host, gauges are read when the page is asked for: nothing
is computed per event, and nothing runs between two scrapes. Without a connection string it processes some events of a
local service, prints its metrics once, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack

from aiohttp import web

from eventpump import (
    BufferedProducer,
    Emulator,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventPumpError,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
    SqliteLeaseStore,
)
from eventpump.reports import HostReport

LOCAL_EVENTS = 500
PARTITION = "messaging_destination_partition_id"  # as `eventpump lag --serve` has it


class Measured(EventProcessor):
    """Counts what a processor gets, and the seconds that it takes. Replace `print` by your work."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.enough = asyncio.Event()

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        begun = time.perf_counter()
        try:
            print(f"partition {context.partition_id}: {len(events)} events", flush=True)
        finally:
            self.events[context.partition_id] += len(events)
            self.calls[context.partition_id] += 1
            self.seconds[context.partition_id] += time.perf_counter() - begun
        if sum(self.events.values()) >= LOCAL_EVENTS:
            self.enough.set()


class Metrics:
    """What is exported, in Prometheus' text format.

    Args:
        producer: None for a program that only consumes.
    """

    def __init__(
        self, processor: Measured, producer: BufferedProducer | None = None
    ) -> None:
        self.processor = processor
        self.producer = producer
        self.host: EventProcessorHost | None = None
        self.reports: Counter[str] = Counter()

    def count(self, report: HostReport) -> None:
        """Count a report of the host, by its class: leases taken and lost, links failed, checkpoints, lost data."""
        self.reports[type(report).__name__] += 1

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        measured = self.processor
        yield from _family(
            "eventpump_events_total", "counter", PARTITION, measured.events
        )
        yield from _family(
            "eventpump_process_calls_total", "counter", PARTITION, measured.calls
        )
        yield from _family(
            "eventpump_process_seconds_total", "counter", PARTITION, measured.seconds
        )
        yield from _family("eventpump_reports_total", "counter", "report", self.reports)
        # With several subscriptions there is a row for each of a partition: make `each.subscription` a label too.
        status = (
            {each.partition_id: each for each in self.host.partitions}
            if self.host is not None
            else {}
        )
        lags = {
            partition_id: each.lag
            for partition_id, each in status.items()
            if each.lag is not None
        }
        attached = {
            partition_id: int(each.is_attached) for partition_id, each in status.items()
        }
        buffered = {
            partition_id: each.buffered_bytes for partition_id, each in status.items()
        }
        # Behind what was delivered here; `eventpump lag` has what is behind the checkpoint.
        more = ',position="delivered"'
        yield from _family("eventpump_partition_lag", "gauge", PARTITION, lags, more)
        yield from _family("eventpump_partition_attached", "gauge", PARTITION, attached)
        yield from _family(
            "eventpump_partition_buffered_bytes", "gauge", PARTITION, buffered
        )
        checkpoints = {
            partition_id: each.checkpoint.sequence_number
            for partition_id, each in status.items()
            if each.checkpoint is not None
        }
        yield from _family(
            "eventpump_partition_checkpoint", "gauge", PARTITION, checkpoints
        )
        if self.producer is not None:
            yield "# TYPE eventpump_producer_buffered_bytes gauge"
            yield f"eventpump_producer_buffered_bytes {self.producer.buffered_bytes}"
            stats = self.producer.stats
            counts = {
                "sent": stats.sent.events,
                "failed": stats.failed.events,
                "retried": stats.retried.events,
            }
            yield from _family(
                "eventpump_producer_events_total", "counter", "outcome", counts
            )

    async def get(self, request: web.Request) -> web.Response:
        return web.Response(
            text=self.text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _family(
    name: str, kind: str, label: str, values: Mapping[str, float], more: str = ""
) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    for key, value in sorted(values.items()):
        yield f'{name}{{{label}="{key}"{more}}} {value}'


async def main(args: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        connection_string, is_local = (
            args.connection_string,
            args.connection_string is None,
        )
        processor = Measured()
        if connection_string is None:
            service = await stack.enter_async_context(Emulator({args.hub: 4}))
            connection_string = service.connection_string
        producer = await stack.enter_async_context(
            BufferedProducer(connection_string, args.hub)
        )
        metrics = Metrics(processor, producer)
        host = metrics.host = EventProcessorHost(
            connection_string,
            args.hub,
            processor=processor,
            lease_store=MemoryLeaseStore()
            if is_local
            else SqliteLeaseStore(args.leases),
            track_last_enqueued=True,  # the lag is known with every event
            hooks=[metrics.count],
        )
        app = web.Application()
        app.router.add_get("/metrics", metrics.get)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=5)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "0.0.0.0", args.port)
        await site.start()
        print(f"listening on port {site.port}", flush=True)

        async def show_once() -> None:
            await processor.enough.wait()
            print(metrics.text(), end="", flush=True)

        if is_local:
            for number in range(LOCAL_EVENTS):
                await producer.send(
                    EventData(f"reading {number}"),
                    partition_key=f"sensor-{number % 20}",
                )
        async with host:
            await host.run(handle_signals=True, until=show_once() if is_local else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument(
        "--leases",
        default="leases.db",
        help="a SQLite file; hosts that share it share the partitions",
    )
    parser.add_argument("--port", type=int, default=9108, help="0 for a free one")
    try:
        asyncio.run(main(parser.parse_args()))
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
