"""What the sides share."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any

import psutil  # type: ignore[import-untyped]  # it comes without types

from benchmarks.events import FIRST_SEQUENCE_NUMBER, Gaps, checker
from benchmarks.meter import Meter, page_faults
from benchmarks.processes import READY

BODY_SIZE = 1024
_COUNTED = 100
"""How many events of `EventTally` are counted at a time."""


class Tally:
    """Checks and counts what a reader gets, and measures from the moment on when enough partitions have had an event.

    Args:
        partitions: How many that are.
        events: How many to measure over; the first and last 20th of them are left out.
        available: How many were asked for, over all partitions; each has the same number, so that a rest is not there.
        kind: Of the canned service's events; None for those of `ours:fill`.
    """

    def __init__(self, partitions: int, events: int, available: int, kind: str | None) -> None:
        self.meter = Meter(events // 20, events - events // 20)
        self._partitions = partitions
        self._available = available // partitions * partitions
        self._check = None if kind is None else checker(kind)
        self._gaps = Gaps(None if kind is None else FIRST_SEQUENCE_NUMBER)
        self._events = events
        self._total = 0

    def add(self, partition_id: str, first: int, last: int, count: int, size: int, enqueued: datetime | None) -> bool:
        """Record a batch: its first and last sequence number, and its last event's body size and enqueued time.

        Returns:
            Whether that was enough.

        Raises:
            AssertionError: An event is missing or not what was sent, or there are not enough.
        """
        is_steady = self._gaps.partitions >= self._partitions
        self._gaps.check(partition_id, first, last, count)
        if self._check is not None:
            self._check(last, size, enqueued)
        elif size != BODY_SIZE or enqueued is None:
            raise AssertionError(f"event {last} of partition {partition_id} is not what was sent")
        self._total += count
        if is_steady:
            self.meter.add(count)
        if self.meter.count >= self._events:
            return True
        if self._total >= self._available:
            raise AssertionError(f"of {self._total} events {self.meter.count} came after every partition had one")
        return False


class EventTally:
    """As `Tally`, for handlers that get one event at a time, and with less to check of each.

    Args:
        partitions: How many partitions there are.
        events: How many events to measure over; the first and last 20th of them are left out.
        available: How many were asked for, over all partitions; each has the same number, so that a rest is not there.
    """

    def __init__(self, partitions: int, events: int, available: int) -> None:
        self.stop: Callable[[], None] | None = None
        """Called when that was enough."""
        self.meter = Meter(events // 20, events - events // 20)
        self._partitions = partitions
        self._events = events
        self._available = available // partitions * partitions
        self._next: dict[str, int] = {}
        self._uncounted = self._total = 0

    def add(self, partition_id: str, number: int) -> bool:
        """Record an event.

        Returns:
            Whether that was enough.

        Raises:
            AssertionError: An event is missing, or there are not enough.
        """
        if self._next.get(partition_id, FIRST_SEQUENCE_NUMBER) != number:
            raise AssertionError(f"partition {partition_id}: {number} came instead of {self._next.get(partition_id)}")
        self._next[partition_id] = number + 1
        self._uncounted += 1
        return self._uncounted >= _COUNTED and self._count()

    def _count(self) -> bool:
        self._total += self._uncounted
        if len(self._next) >= self._partitions:
            self.meter.add(self._uncounted)
        self._uncounted = 0
        if self.meter.count < self._events:
            if self._total + _COUNTED > self._available:
                raise AssertionError(f"of {self._total} events {self.meter.count} came after every partition had one")
            return False
        if self.stop is not None:
            self.stop()
        return True


class PacedTally:
    """Checks, counts and times what a reader gets of events that come at a pace.

    Args:
        partitions: How many there are.
        events: How many events there are, over all partitions. The first fifth and the last 20th are left out.
        kind: Of the canned service's events.
        times: The file of the moments when they were written; see `benchmarks.canned.Pace`.
    """

    def __init__(self, partitions: int, events: int, kind: str, times: str) -> None:
        self._meter = Meter(events // 5, events - events // 20)
        self._events = events
        self._each = events // partitions
        self._times = times
        self._kind = kind
        self._deliveries: list[tuple[str, int, int, int, int, datetime | None, int]] = []
        self.arrived = 0
        """The moment in which the batch that is added next came to the handler, of `time.perf_counter_ns`."""

    def add(self, partition_id: str, first: int, last: int, count: int, size: int, enqueued: datetime | None) -> bool:
        """Record a batch, as `Tally.add` does. `result` checks it: what is done here counts as the reader's."""
        self._deliveries.append((partition_id, first, last, count, size, enqueued, self.arrived))
        self._meter.add(count)
        return self._meter.count >= self._events

    def result(self) -> dict[str, float]:
        """Return the figures of `Meter.result`, `deliveries` per second, `p50` and `p99` in ms from write to handler.

        The file of the moments must be complete.

        Raises:
            AssertionError: An event was missing or not what was sent.
        """
        check, gaps = checker(self._kind), Gaps(FIRST_SEQUENCE_NUMBER)
        for partition_id, first, last, count, size, enqueued, _ in self._deliveries:
            gaps.check(partition_id, first, last, count)
            check(last, size, enqueued)
        written = array("q")
        with open(self._times, "rb") as file:
            written.frombytes(file.read())
        waits = [
            (arrived - written[int(partition_id) * self._each + number - FIRST_SEQUENCE_NUMBER]) / 1e6
            for partition_id, first, last, _, _, _, arrived in self._deliveries[len(self._deliveries) // 5 :]
            for number in range(first, last + 1)
        ]
        hundredths = statistics.quantiles(waits, n=100)
        found = self._meter.result()
        deliveries = found["rate"] * len(self._deliveries) / self._events
        return {**found, "deliveries": deliveries, "p50": hundredths[49], "p99": hundredths[98]}


class Fleet:
    """What a consumer of telemetry keeps of what it reads, so that nothing is read in vain."""

    __slots__ = ("firmware", "newest", "temperatures", "types")

    def __init__(self) -> None:
        self.temperatures: dict[str, float] = {}
        """The newest of each device."""
        self.types: dict[str, int] = {}
        """How many events of each type."""
        self.firmware: dict[int, int] = {}
        """How many events of each version."""
        self.newest: dict[str | None, int] = {}
        """The newest sequence number of each partition key."""

    def report(self, kind: str, firmware: int, key: str | None, number: int, report: dict[str, Any]) -> None:
        """Keep what the two properties, the key, the number and the body of an event say.

        Raises:
            AssertionError: The body says something else than the properties and the key.
        """
        device = report["dev"]
        if report["type"] != kind or report["fw"] != firmware or (key is not None and key != device):
            raise AssertionError(f"event {number} is not what was sent")
        self.temperatures[device] = report["temp"]
        self.note(kind, firmware, key, number)

    def note(self, kind: str, firmware: int, key: str | None, number: int) -> None:
        """Keep what the two properties, the key and the number of an event say."""
        self.types[kind] = self.types.get(kind, 0) + 1
        self.firmware[firmware] = self.firmware.get(firmware, 0) + 1
        self.newest[key] = number


class FanTally:
    """The same for several consumers that each get every event, in this process: it measures the cost of all of them.

    Args:
        consumers: How many there are.
        partitions: How many partitions there are.
        events: How many events, each counted once, to measure over; the first and last 20th of them are left out.
        available: How many were asked for, over all partitions; each has the same number, so that a rest is not there.
        kind: Of the canned service's events.
        begins_anywhere: Whether the first event of a partition may be any of them.
    """

    def __init__(
        self,
        consumers: int,
        partitions: int,
        events: int,
        available: int,
        kind: str,
        *,
        begins_anywhere: bool = False,
    ) -> None:
        deliveries = events * consumers
        self._meter = Meter(deliveries // 20, deliveries - deliveries // 20)
        self._consumers = consumers
        self._partitions = partitions
        self._deliveries = deliveries
        self._left = available * consumers
        self._check = checker(kind)
        self._gaps = [Gaps(None if begins_anywhere else FIRST_SEQUENCE_NUMBER) for _ in range(consumers)]
        self._is_steady = False

    def add(
        self, consumer: int, partition_id: str, first: int, last: int, count: int, size: int, enqueued: datetime | None
    ) -> bool:
        """Take in a batch that a consumer got and read; see `Tally.add`."""
        self._check(last, size, enqueued)
        return self.add_unread(consumer, partition_id, first, last, count)

    def add_unread(self, consumer: int, partition_id: str, first: int, last: int, count: int) -> bool:
        """Take in a batch of which only the first and the last number were read.

        Returns:
            Whether that was enough.

        Raises:
            AssertionError: An event is missing, or there are not enough.
        """
        self._gaps[consumer].check(partition_id, first, last, count)
        self._left -= count
        if self._is_steady:
            self._meter.add(count)
        else:
            self._is_steady = all(each.partitions == self._partitions for each in self._gaps)
        if self._meter.count >= self._deliveries:
            return True
        if self._left <= 0:
            raise AssertionError(f"only {self._meter.count} deliveries came after each consumer had all partitions")
        return False

    def result(self) -> dict[str, float]:
        """Return the figures of `Meter.result`, for an event that is counted once, however many consumers get it."""
        found, times = self._meter.result(), self._consumers
        return {
            **found,
            "cost": found["cost"] * times,
            "faults": found["faults"] * times,
            "rate": found["rate"] / times,
            "events": found["events"] / times,
        }


async def rest_until_told() -> None:
    """Do as `rest` does, in a thread."""
    await asyncio.to_thread(rest)


def rest() -> None:
    """Report that this side is ready, and wait until the benchmark starts it."""
    print(READY, flush=True)
    sys.stdin.readline()


def resident() -> float:
    """Return the resident memory of this process, in MiB."""
    return float(psutil.Process().memory_info().rss) / 2**20


def connections_to(port: int) -> int:
    """Count this process's connections to a port."""
    found = psutil.Process().net_connections(kind="tcp")
    return sum(1 for each in found if each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED)


def port_of(connection_string: str) -> int:
    """Find the port in the emulator's connection string."""
    endpoint = connection_string.partition("Endpoint=sb://")[2].partition(";")[0]
    return int(endpoint.rstrip("/").rpartition(":")[2])


async def measure_latency(send: Callable[[], Awaitable[object]], sends: int, warm_up: int) -> dict[str, float]:
    """Send one after the other, and time each.

    Returns:
        See `latency_of`.
    """
    for _ in range(warm_up):
        await send()
    times = []
    began, cpu, faults = time.perf_counter(), time.process_time(), page_faults()
    for _ in range(sends):
        before = time.perf_counter()
        await send()
        times.append(time.perf_counter() - before)
    used, wall = time.process_time() - cpu, time.perf_counter() - began
    return latency_of(times, used, wall, page_faults() - faults)


def latency_of(times: Sequence[float], cpu: float, wall: float, faults: int) -> dict[str, float]:
    """Return the figures of sends that took so many seconds each, and CPU, wall time and page faults together."""
    sends = len(times)
    hundredths = statistics.quantiles(times, n=100)
    return {
        "p50": hundredths[49] * 1e3,
        "p99": hundredths[98] * 1e3,
        "cost": cpu / sends * 1e6,
        "busy": cpu / wall,
        "rate": sends / wall,
        "faults": faults / sends,
    }


async def measure_delivery(
    send: Callable[[bytes], Awaitable[object]], arrived: asyncio.Queue[bytes], events: int
) -> dict[str, float]:
    """Send events one at a time, with pauses in which everything comes to rest, and time each until it arrived.

    Args:
        arrived: Bodies, in the moment the reader has them.

    Returns:
        `p50` and `p99` in milliseconds.
    """
    # The reader may attach at the end of the stream later than this begins.
    reached = asyncio.create_task(arrived.get())
    while not reached.done():
        await send(b"warm-up")
        await asyncio.wait({reached}, timeout=1.0)
    times = []
    chance = random.Random(1)
    for number in range(events):
        await asyncio.sleep(chance.uniform(0.2, 0.3))
        body = b"%d" % number
        before = time.perf_counter()
        await send(body)
        while await arrived.get() != body:
            pass
        times.append(time.perf_counter() - before)
    hundredths = statistics.quantiles(times, n=100)
    return {"p50": hundredths[49] * 1e3, "p99": hundredths[98] * 1e3}


async def measure_idle(seconds: float, *, port: int, store_pid: int | None) -> dict[str, float]:
    """Measure what this process costs while nothing happens, and the store's process beside it.

    Returns:
        `cpu` and `store_process` in per cent of a core, `connections`, `resident` in MiB.
    """
    store = None if store_pid is None else psutil.Process(store_pid)
    began, cpu, store_cpu = time.perf_counter(), time.process_time(), _cpu_of(store)
    await asyncio.sleep(seconds)
    wall = time.perf_counter() - began
    return {
        "cpu": (time.process_time() - cpu) / wall * 100,
        "store_process": (_cpu_of(store) - store_cpu) / wall * 100,
        "connections": float(connections_to(port)),
        "resident": resident(),
    }


def _cpu_of(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)
