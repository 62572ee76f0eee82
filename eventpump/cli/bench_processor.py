"""`eventpump bench-processor`: what a user's processor costs per event, measured without any service."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import pkgutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eventpump.aio.doing import shown
from eventpump.cli.main import FAILURE, Subparsers
from eventpump.cli.streams import complain, say, whole_number
from eventpump.clients.consumers import EventProcessorHost
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import CloseReason, EventProcessor, PartitionContext, ProcessorSource
from eventpump.errors import ConfigurationError, EventPumpError, ProcessorFailedError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.options.callables import check_import_name
from eventpump.reports import HostReport, PartitionFailed
from eventpump.sources.generator import MAX_EVENTS, MAX_KEYS, MAX_PARTITIONS, MAX_SIZE, GeneratorSource
from eventpump.storage.leases.memory import MemoryLeaseStore


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "bench-processor",
        help=summary,
        description="Run a processor over synthetic events, in one process and without any service, and print its CPU "
        "time per event and its events per second; beside it those of a processor that does nothing. Exit code 1 if "
        "the processor raises.",
    )
    add = parser.add_argument
    add("processor", metavar="MODULE:CLASS", help="an EventProcessor, its class, or a function that returns one")
    add("--events", default="100000", metavar="N", help="events, over all partitions (default: %(default)s)")
    add("--partitions", default="4", metavar="N", help="partitions (default: %(default)s)")
    add("--size", default="256", metavar="N[-M]", help="bytes of a body, or from N to M (default: %(default)s)")
    add("--keys", default="0", metavar="N", help="partition keys per partition; 0 for none (default: %(default)s)")
    add("--skew", default="0", metavar="S", help="use the n-th key in proportion to 1/n**S (default: %(default)s)")
    add(
        "--body",
        metavar="MODULE:FUNCTION",
        help="makes the bodies: a function of partition id, number and random.Random",
    )
    add("--batch", default="300", metavar="N", help="the most events per call (default: %(default)s)")
    add("--seed", default="0", metavar="N", help="of the events (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run took.

    Args:
        events: How many events were processed.
        cpu: The CPU time of the process, in seconds.
        wall: The time, in seconds.
    """

    events: int
    cpu: float
    wall: float

    @property
    def cost(self) -> float:
        """Microseconds of CPU time per event."""
        return self.cpu / self.events * 1e6

    @property
    def rate(self) -> float:
        """Events per second."""
        return self.events / max(self.wall, 1e-9)


def run(args: argparse.Namespace) -> int:
    """Measure, and return the exit code. Raises `ConfigurationError` for an option that cannot work."""
    events = whole_number("--events", args.events, 1, MAX_EVENTS)
    partitions = whole_number("--partitions", args.partitions, 1, MAX_PARTITIONS)
    if events < partitions:
        raise ConfigurationError("--events", f"must be at least the number of partitions, {partitions}")
    options: dict[str, Any] = {
        "seed": whole_number("--seed", args.seed, 0, 2**63 - 1),
        "partitions": partitions,
        "events": events // partitions,
        "rate": None,
        "size": _size(args.size),
        "keys": whole_number("--keys", args.keys, 0, MAX_KEYS),
        "skew": _skew(args.skew),
        "body": None if args.body is None else _imported("--body", args.body),
    }
    batch = whole_number("--batch", args.batch, 1, 1_000_000)
    source = ProcessorSource.of(_imported("processor", args.processor))
    logging.getLogger("eventpump").setLevel(logging.CRITICAL)  # an error ends the command, in one line
    try:
        # The first of them also pays for what is made once, such as caches.
        asyncio.run(measure(ProcessorSource.of(Idle), {**options, "events": min(options["events"], 1000)}, batch))
        without = asyncio.run(measure(ProcessorSource.of(Idle), options, batch))
        whole = asyncio.run(measure(source, options, batch))
    except ProcessorFailedError as error:
        cause = error.__cause__
        what = "" if cause is None else f": {type(cause).__name__}: {cause}"
        complain(f"bench-processor: the processor failed in {error.operation}{what}")
        return FAILURE
    _print(whole, without, args.size, partitions, batch, is_json=args.json)
    return 0


class Idle(EventProcessor):
    """Does nothing."""

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Do nothing."""


async def measure(source: ProcessorSource, options: dict[str, Any], batch: int) -> Measurement:
    """Run a processor over all events of a generator, and measure from the first batch to the end of the last.

    Args:
        options: Of the `GeneratorSource`; with `events`.

    Raises:
        EventPumpError: The processor raised, or cannot be made.
    """
    meter = _Meter(options["events"] * options["partitions"])
    async with GeneratorSource(**options) as generator:
        host = shown(
            EventProcessorHost(
                source=generator,
                processor=lambda: _Metered(source.make(), meter),
                lease_store=MemoryLeaseStore(),
                max_batch_size=batch,
                failure_policy="stop",
                hooks=[meter.reported],
            )
        )
        running = asyncio.create_task(host.run())
        finished = asyncio.create_task(meter.finished.wait())
        try:
            await asyncio.wait({running, finished}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            finished.cancel()
            await host.aclose()
        await running
    if meter.failure is not None:
        raise meter.failure
    return Measurement(meter.events, meter.cpu, meter.wall)


class _Meter:
    """Counts what is processed, over all partitions, until there are as many events as expected."""

    def __init__(self, expected: int) -> None:
        self.events = 0
        self.cpu = 0.0
        self.wall = 0.0
        self.failure: BaseException | None = None
        self.finished = asyncio.Event()
        self._expected = expected
        self._began: tuple[float, float] | None = None

    def begin(self) -> None:
        if self._began is None:
            self._began = time.process_time(), time.perf_counter()

    def processed(self, count: int) -> None:
        assert self._began is not None
        self.events += count
        if self.events == self._expected:
            self.cpu, self.wall = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
            self.finished.set()

    def reported(self, report: HostReport) -> None:
        """Called with each report: a partition that fails would be tried again forever."""
        if isinstance(report, PartitionFailed) and self.failure is None:
            self.failure = report.error
            self.finished.set()


class _Metered(EventProcessor):
    """Passes every call on to a user's processor."""

    def __init__(self, inner: EventProcessor, meter: _Meter) -> None:
        if isinstance(inner, KeyedProcessor):
            problem = "must not be a KeyedProcessor: what is measured is calls with whole batches, one after the other"
            raise ConfigurationError("processor", problem)
        self._inner = inner
        self._meter = meter

    async def open(self, context: PartitionContext) -> None:
        await self._inner.open(context)

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self._meter.begin()
        await self._inner.process_events(context, events)
        self._meter.processed(len(events))

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        await self._inner.process_error(context, error)

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        await self._inner.close(context, reason)


def _print(whole: Measurement, without: Measurement, size: str, partitions: int, batch: int, *, is_json: bool) -> None:
    own = max(0.0, whole.cost - without.cost)
    if is_json:
        found = {
            "events": whole.events,
            "partitions": partitions,
            "cpu_us_per_event": round(whole.cost, 3),
            "cpu_us_per_event_without": round(without.cost, 3),
            "cpu_us_per_event_of_processor": round(own, 3),
            "events_per_second": round(whole.rate),
            "events_per_second_without": round(without.rate),
        }
        say(json.dumps(found))
        return
    say(f"{whole.events:,} events of {size} bytes in {partitions} partitions, batches of up to {batch}")
    say(f"whole      {whole.cost:8.1f} µs of CPU per event, {whole.rate:10,.0f} events/s")
    say(f"without    {without.cost:8.1f} µs of CPU per event, {without.rate:10,.0f} events/s   (does nothing)")
    say(f"processor  {own:8.1f} µs of CPU per event")


def _size(text: str) -> int | tuple[int, int]:
    least, dash, most = text.partition("-")
    sizes = whole_number("--size", least, 0, MAX_SIZE), whole_number("--size", most if dash else least, 0, MAX_SIZE)
    if sizes[0] > sizes[1]:
        raise ConfigurationError("--size", f"the smallest must not be above the largest: {text}")
    return sizes


def _skew(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError("--skew", f"must be a number, not {text[:40]!r}") from None


def _imported(field: str, name: str) -> Any:
    """Import what a user names, also from the working directory. Raises `ConfigurationError` if that fails."""
    try:
        check_import_name(name)
    except ValueError:
        raise ConfigurationError(field, f'must be "module:name", not {name[:80]!r}') from None
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return pkgutil.resolve_name(name)
    except EventPumpError:
        raise
    except Exception as error:
        raise ConfigurationError(field, f"{name} cannot be imported: {type(error).__name__}: {error}") from error
