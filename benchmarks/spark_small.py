"""The benchmark `spark-small`: how long a small batch takes from hub to hub, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from statistics import median

from benchmarks.processes import BenchmarkError, LimitedEmulator, Side
from benchmarks.report import Row
from benchmarks.slow_store import slow_blobs
from eventpump import EventData, EventProducer, PartitionReader

Log = Callable[[str], None]

GOALS = {4: (300.0, 0.25), 32: (400.0, 0.4), 128: (700.0, 0.8)}
"""Milliseconds in the median, and seconds of CPU of Spark per batch, by the target's partitions."""
SOURCE_PARTITIONS = 4
EVENTS = 8
WATCH = "watch"
"""The consumer group in which the query watches its source."""
TIMEOUT = 600.0


def small(quick: bool, log: Log) -> list[Row]:
    """Eight events at a time, counted by Spark: until each count is accepted by the target, and the CPU per batch."""
    # What a running query takes: a JVM still compiles for 40 % of its CPU after 60 batches, and for more than half of
    # it in the first 20.
    rounds, warm_up = (15, 60) if quick else (40, 200)
    with slow_blobs() as blob:
        return [row for each in GOALS for row in _rows(each, rounds, warm_up, log, blob)]


def _rows(partitions: int, rounds: int, warm_up: int, log: Log, blob: str) -> list[Row]:
    tasks = _run("never", partitions, rounds, warm_up)
    log(f"{partitions} partitions, by tasks: {tasks[0]:.0f} ms and {tasks[1]:.2f} s of CPU a batch")
    rows = []
    for where, store, goals in (("", "", GOALS[partitions]), (", store at 10 ms", blob, (None, None))):
        ours = _run("auto", partitions, rounds, warm_up, store)
        log(f"{partitions} partitions{where}: {ours[0]:.0f} ms and {ours[1]:.2f} s of CPU a batch")
        names = (f"from hub to hub{where}", f"CPU of Spark per batch{where}")
        for name, unit, value, other, limit in zip(names, ("ms", "s"), ours, tasks, goals, strict=True):
            rows.append(
                Row(
                    name=f"spark-small: {partitions} partitions, {name}",
                    peer="published by tasks",
                    subject_value=value,
                    peer_value=other,
                    unit=unit,
                    limit=limit,
                    note=f"{EVENTS} events at a time; 50 management requests per second and connection",
                )
            )
    return rows


def _run(small_batches: str, partitions: int, rounds: int, warm_up: int, blob: str = "") -> tuple[float, float]:
    """Return milliseconds from acceptance to acceptance in the median, and seconds of CPU per batch."""
    with LimitedEmulator({"source": SOURCE_PARTITIONS, "target": partitions}, [WATCH]) as service:
        text = service.connection_string
        settings = {
            "connection_string": text,
            "watch": WATCH,
            "small_batches": small_batches,
            "warm_up": EVENTS * warm_up,
            "blob": blob,
        }
        with Side("spark_small:query", **settings) as query:
            query.wait_ready(TIMEOUT)
            asyncio.run(_drive(text, query, rounds + warm_up))
            query.go_on()
            found = query.result(TIMEOUT)
        times = asyncio.run(_times(text, partitions, warm_up))
    if len(times) != EVENTS * rounds:
        raise BenchmarkError(f"{len(times)} counts came of {EVENTS * rounds}")
    return median(times) * 1e3, found["cpu"] / found["batches"]


async def _drive(connection_string: str, query: Side, rounds: int) -> None:
    async with EventProducer(connection_string, "source") as producer:
        for _ in range(rounds):
            for each in range(EVENTS):
                await producer.send([EventData(f"key {each}")], partition_id=str(each % SOURCE_PARTITIONS))
            published = 0
            while published < EVENTS:
                published += int(await asyncio.to_thread(query.line, TIMEOUT))


async def _times(connection_string: str, partitions: int, warm_up: int) -> list[float]:
    """Return the seconds between each event and the count that includes it."""
    accepted: dict[str, float] = {}
    counts: dict[str, int] = {}
    for number in range(SOURCE_PARTITIONS):
        async for body, at in _events(connection_string, "source", number):
            counts[body] = counts.get(body, 0) + 1
            accepted[f"{body} {counts[body]}"] = at
    times = []
    for number in range(partitions):
        async for body, at in _events(connection_string, "target", number):
            if int(body.rpartition(" ")[2]) > warm_up:
                times.append(at - accepted[body])
    return times


async def _events(connection_string: str, hub: str, partition: int) -> AsyncIterator[tuple[str, float]]:
    reader = PartitionReader(connection_string, hub, partition_id=str(partition), end="@latest")
    async with reader:
        async for event in reader:
            yield event.body_as_str(), event.enqueued_time.timestamp()
