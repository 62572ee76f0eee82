"""Spark's demo: trades into bars, Spark is killed in the middle of a batch, and each bar is verified to be there
once."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import util
from pathlib import Path
from typing import Any

from eventpump import EventProducer, PartitionReader
from eventpump.demo.bars import Bar, BarsVerdict, ExpectedBars, KilledBatch, judge_bars
from eventpump.demo.exchange import TRADES, publish, send
from eventpump.demo.fleet import DemoError, LocalService, ended, start
from eventpump.demo.market import Trade
from eventpump.demo.view import Board, Column, Row, View
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.options.connection_string import ConnectionString
from eventpump.testing.proxy import FaultProxy

BARS = "bars"
"""The hub of bars."""
_KILL_AT = 0.4
"""Part of the stream after which Spark is killed, as soon as it is in the middle of publishing a batch."""
_MARKET_PACE = 0.2
"""Milliseconds of the market's time from one trade to the next, about."""
_WINDOWS = 40
_PATIENCE = 240.0
_AROUND = 40.0
"""Seconds that the demo takes besides publishing, about: Spark starts twice, the first time meanwhile."""
_DISTANCE = 0.05
"""Seconds from Spark to the hub of bars and back, each, when Spark is to be killed. A partition's next message follows
the answer to the one before, so what is stored of a batch is seen before the rest of it is sent."""
_STATES = {"starting": "yellow", "running": "green", "killed": "bold red", "ended": "dim"}


@dataclass(slots=True)
class SparkJob:
    """One run of the Spark job, and its last status."""

    number: int
    process: asyncio.subprocess.Process
    log: Path
    reader: asyncio.Task[None] | None = None
    is_started: bool = False
    is_killed: bool = False
    is_over: bool = False
    is_done: bool = False
    failure: str = ""
    begun: int | None = None
    """The batch that is being published."""
    finished: int | None = None
    """The last batch that ended."""
    rate: float = 0.0
    watermark: str = ""
    noise: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """What else was printed."""
    lag: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    """Per partition: position, events and seconds behind."""

    @property
    def state(self) -> str:
        """The state in one word."""
        if self.is_killed:
            return "killed"
        if self.is_over:
            return "ended"
        return "running" if self.is_started else "starting"

    async def read(self, said: Callable[[dict[str, Any]], None]) -> None:
        """Read its lines, and pass on each, until its processes have ended (the JVM holds the same pipe);
        then nothing."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if not line.startswith(b"{"):  # the JVM has something to say
                self.noise.append(line.decode(errors="replace").strip())
                continue
            facts = json.loads(line)
            self._take(facts)
            said(facts)
        await self.process.wait()
        self.is_over = True
        said({})

    def _take(self, facts: dict[str, Any]) -> None:
        self.is_started = self.is_started or "started" in facts
        self.is_done = self.is_done or "done" in facts
        self.failure = facts.get("failed", self.failure)
        if "began" in facts:
            self.begun = facts["began"]
        if "ended" in facts:
            self.finished = facts["ended"]
            # Spark reports the end of a batch from another thread: the next one may have begun by then.
            self.begun = None if self.begun == self.finished else self.begun
            self.rate = facts["rate"]
            # Before the first trade it is the beginning of 1970.
            self.watermark = "" if (facts["watermark"] or "").startswith("1970") else facts["watermark"] or ""
        if "lag" in facts:
            self.lag = {key: (position, events, age) for key, (position, events, age) in facts["lag"].items()}

    def kill(self) -> None:
        """Kill driver and JVM, without cleanup."""
        if not self.is_over:
            self.is_killed = True
            os.killpg(self.process.pid, signal.SIGKILL)

    def complaint(self) -> str:
        """The cause of its failure, in one line."""
        if self.failure:
            first, *others = self.failure.strip().splitlines()
            if "Traceback (most recent call last):" not in first:
                return first
            # An exception of the function that publishes: its text is the first line below the traceback.
            return next((line for line in others if not line[:1].isspace() and line), first)
        lines = self.log.read_text(errors="replace").strip().splitlines()[-1:] + list(self.noise)[-1:]
        return "; ".join(lines) or f"exit code {self.process.returncode}"


class PipelineScene:
    """The state of the job, and the latest bars."""

    title = "eventpump demo --spark"

    def __init__(self, partitions: int, total: int) -> None:
        self._partitions = [str(each) for each in range(partitions)]
        self._total = total
        self.published = 0
        self.ends = dict.fromkeys(self._partitions, 0)
        """The number of trades in each partition."""
        self._growth: dict[str, deque[tuple[float, int]]] = {each: deque() for each in self._partitions}
        self._partition_of: dict[str, str] = {}
        self.jobs: list[SparkJob] = []
        self.stored = 0
        """Bars in the hub."""
        self.latest: deque[tuple[str, Bar]] = deque(maxlen=6)
        """Partition and bar."""

    def add(self, symbols: Mapping[str, int]) -> None:
        """Count published trades, how many each symbol has, by the partitions of the symbols."""
        for symbol, count in symbols.items():
            partition_id = self._partition_of.get(symbol)
            if partition_id is None:
                partition_id = str(partition_for_key(symbol, len(self._partitions)))
                self._partition_of[symbol] = partition_id
            self.ends[partition_id] += count
            self.published += count
        now = time.monotonic()
        for partition_id, end in self.ends.items():
            growth = self._growth[partition_id]
            if not growth or growth[-1][1] != end:
                growth.append((now, end))

    def head(self) -> list[tuple[str, str]]:
        return [
            ("trades", f"{self.published:,} of {self._total:,}"),
            ("bars", f"{self.stored:,}"),
            ("behind", f"{self._behind:,}"),
        ]

    @property
    def _lag(self) -> dict[str, tuple[int, int, float]]:
        """What a job said last: one that was just started has nothing to say yet."""
        return next((job.lag for job in reversed(self.jobs) if job.lag), {})

    def behind(self, partition_id: str) -> tuple[int, float]:
        """Return how many published trades of a partition are in no finished batch, and for how many seconds the oldest
        of them has been there."""
        position = self._lag.get(partition_id, (0, 0, 0.0))[0]
        growth = self._growth[partition_id]
        while growth and growth[0][1] <= position:
            growth.popleft()
        return max(0, self.ends[partition_id] - position), time.monotonic() - growth[0][0] if growth else 0.0

    @property
    def _behind(self) -> int:
        return sum(self.behind(each)[0] for each in self._partitions)

    def boards(self) -> list[Board]:
        read: list[Row] = []
        for partition_id in self._partitions:
            position = self._lag.get(partition_id, (0, 0, 0.0))[0]
            count, seconds = self.behind(partition_id)
            read.append((partition_id, f"{position:,}", f"{count:,}", f"{seconds:.1f} s"))
        jobs: list[Row] = [
            (
                f"run {job.number}",
                str(job.process.pid),
                (job.state, _STATES[job.state]),
                "" if job.finished is None else f"{job.finished:,}",
                f"{job.rate:,.0f}" if job.state == "running" else "",
                job.watermark[11:23],
            )
            for job in self.jobs
        ]
        bars: list[Row] = [
            (
                bar.symbol,
                _time(bar.start),
                *(f"{price:,.2f}" for price in (bar.open, bar.high, bar.low, bar.close)),
                f"{bar.volume:,}",
                partition_id,
            )
            for partition_id, bar in self.latest
        ]
        return [
            Board([Column("partition"), *map(Column, ("read up to", "behind", "for"))], read),
            Board(
                [
                    Column("Spark", is_number=False),
                    Column("process", rank=2),
                    Column("state", is_number=False),
                    Column("batch"),
                    Column("trades/s", rank=1),
                    Column("watermark", width=12),
                ],
                jobs,
            ),
            Board(
                [
                    Column("bar", is_number=False),
                    Column("window", width=12),
                    Column("open", rank=1),
                    Column("high", rank=2),
                    Column("low", rank=2),
                    *map(Column, ("close", "volume")),
                    Column("in", width=2, rank=3),
                ],
                bars,
                least=2,
            ),
        ]

    def line(self) -> str:
        jobs = " ".join(
            f"run-{job.number}:{job.state}{'' if job.finished is None else f':batch-{job.finished}'}"
            for job in self.jobs
        )
        return f"trades {self.published:,} bars {self.stored:,} behind {self._behind:,}  {jobs}"


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%H:%M:%S.%f")[:12]


class Pipeline:
    """The play. Raises `ConfigurationError` if pyspark, or a Java for it, is not installed."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        if util.find_spec("pyspark") is None or util.find_spec("pyarrow") is None:
            raise ConfigurationError("--spark", "there is no pyspark: pip install 'eventpump[spark,java]'")
        from eventpump.spark.java import use_java

        use_java()
        self._args = args
        self._folder = folder
        self._service = LocalService()
        self._way: FaultProxy | None = None
        """From Spark to the hub of bars."""
        self._window = max(20, round(args.events * _MARKET_PACE / _WINDOWS))
        # All partitions are published in step, so that no trade is later than this.
        self._delay = 4 * self._window
        self._expected = ExpectedBars(self._window)
        self._changed = asyncio.Event()
        self._is_kill_due = False
        self._killed_at: float | None = None
        self._recovery: float | None = None
        self._cut = KilledBatch()
        self.scene = PipelineScene(args.partitions, args.events)
        """What there is to see."""

    @property
    def _job(self) -> SparkJob:
        return self.scene.jobs[-1]

    @property
    def announcement(self) -> str:
        """How long it takes."""
        return f"this takes about {self._args.seconds + _AROUND:.0f} s, longer on a busy machine; Ctrl-C ends it"

    async def play(self, view: View) -> BarsVerdict:
        """See `Play`."""
        partitions = self._args.partitions
        await self._service.start({TRADES: partitions, BARS: partitions})
        view.happened(f"a local service with two hubs of {partitions} partitions is up")
        port = ConnectionString.parse(self._service.connection_string).port
        assert port is not None
        self._way = FaultProxy(port)
        await self._way.start()
        view.happened("Spark starts; trades are published meanwhile")
        tasks = [asyncio.create_task(self._watch(str(each)), name=f"bars {each}") for each in range(partitions)]
        try:
            await self._start_job()
            revival = asyncio.create_task(self._revive(view), name="revival")
            tasks.append(revival)
            async with EventProducer(self._service.connection_string, TRADES) as producer:
                async for sent in publish(producer, self._args.seed, self._args.events, self._args.seconds):
                    self.scene.add(self._expected.add(sent))
                    if self.scene.published >= self._args.events * _KILL_AT:
                        self._kill_soon()
                view.happened("everything is published; a late trade closes the windows")
                await send(producer, [self._closing_trade()])
                ends = {
                    each: (await producer.get_partition_properties(each)).last_enqueued_sequence_number + 1
                    for each in await producer.get_partition_ids()
                }
            await revival
            await self._finish(ends)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        view.happened("Spark has ended; comparing the bars with the trades")
        stored = {str(each): await self._stored(str(each)) for each in range(partitions)}
        return judge_bars(
            self.scene.published, self._expected.bars, stored, cut=self._cut.bars(), recovery=self._recovery
        )

    async def stop(self) -> None:
        """End all its processes."""
        try:
            for job in self.scene.jobs:
                with suppress(ProcessLookupError):
                    job.kill()
                await ended(job.process)
                if job.reader is not None:
                    await job.reader
        finally:
            if self._way is not None:
                await self._way.aclose()
            await self._service.stop()

    def kill(self) -> None:
        """Kill all its processes."""
        for job in self.scene.jobs:
            with suppress(ProcessLookupError):
                job.kill()
        self._service.kill()

    # ------------------------------------------------------------------------------------------------- the job

    async def _start_job(self) -> None:
        assert self._way is not None
        number = len(self.scene.jobs) + 1
        directory = self._folder / f"run-{number}"
        directory.mkdir()
        log = directory / "job.log"
        process = await start(
            "eventpump.demo.job",
            *("--source", TRADES, "--target", BARS, "--endpoint", self._way.address),
            *("--state", str(self._folder), "--directory", str(directory)),
            *("--window", str(self._window), "--delay", str(self._delay)),
            log=log,
            connection_string=self._service.connection_string,
        )
        job = SparkJob(number, process, log)
        job.reader = asyncio.create_task(job.read(self._heard), name=f"run {number}")
        self.scene.jobs.append(job)

    def _heard(self, facts: dict[str, Any]) -> None:
        if "began" in facts:
            self._cut.batch_began(facts["began"], self.scene.stored)
        if "ended" in facts:
            self._cut.batch_ended(facts["ended"], self.scene.stored)
        self._tell()

    async def _revive(self, view: View) -> None:
        """Follow the job until it was killed, and restart it."""
        killed = self._job
        await self._until("Spark runs", lambda: killed.is_started)
        view.happened("Spark runs: trades become a bar per symbol and window")
        await self._until("Spark is killed", lambda: killed.is_killed)
        await self._until("the killed Spark has ended", lambda: killed.is_over)
        self._cut.killed_spark_ended(self.scene.stored)
        before, _ = self._cut.bars() or (0, 0)
        view.happened(f"Spark was killed (SIGKILL) within batch {self._cut.number}: {before:,} of its bars stored")
        await self._start_job()
        await self._until("Spark runs again", lambda: self._job.is_started)
        view.happened("Spark runs again, from its checkpoint and ledger")

    async def _finish(self, ends: dict[str, int]) -> None:
        stdin = self._job.process.stdin
        assert stdin is not None
        stdin.write(json.dumps(ends).encode() + b"\n")
        await stdin.drain()
        await self._until(
            "every trade is read, and every bar published", lambda: self._job.is_done and self._job.is_over
        )

    async def _until(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises `DemoError` if the job failed, or it takes too long."""
        try:
            async with asyncio.timeout(_PATIENCE):
                while not is_so():
                    if self._job.failure or (self._job.is_over and not self._job.is_killed):
                        raise DemoError(f"the Spark job failed: {self._job.complaint()}")
                    await self._changed.wait()
        except TimeoutError:
            raise DemoError(f"not within {_PATIENCE:.0f} s: {what}") from None

    # ------------------------------------------------------------------------------------------------ the bars

    def _closing_trade(self) -> Trade:
        time = self._expected.last_time + timedelta(milliseconds=self._delay + 2 * self._window)
        return Trade(self._args.events + 1, "CLOSE", 0.0, 0, "buy", "XNAS", time)

    async def _watch(self, partition_id: str) -> None:
        """Follow the bars of a partition, and kill Spark at the right time."""
        reader = PartitionReader(self._service.connection_string, BARS, partition_id=partition_id)
        async with reader:
            while events := await reader.read():
                self._arrived(partition_id, [Bar.decode(event.body) for event in events])

    def _arrived(self, partition_id: str, bars: list[Bar]) -> None:
        self.scene.stored += len(bars)
        self.scene.latest.extend((partition_id, bar) for bar in bars[-2:])
        now = asyncio.get_running_loop().time()
        if self._killed_at is None:
            if self._is_kill_due and self._job.begun is not None:
                self._killed_at = now
                self._kill()
        elif self._recovery is None and not self._job.is_killed:
            self._recovery = now - self._killed_at
        self._tell()

    def _kill_soon(self) -> None:
        """Have Spark be killed when the next bars are stored."""
        if not self._is_kill_due:
            assert self._way is not None
            self._is_kill_due = True
            self._way.delay(_DISTANCE)

    def _kill(self) -> None:
        """Kill Spark within the batch that it is publishing. What it has on its way to the hub does not arrive."""
        assert self._way is not None
        assert self._job.begun is not None
        self._cut.killed(self._job.begun)
        self._way.cut()
        self._job.kill()
        self._way.restore()

    def _tell(self) -> None:
        """Wake all tasks that wait for a condition."""
        self._changed.set()
        self._changed.clear()

    async def _stored(self, partition_id: str) -> list[Bar]:
        reader = PartitionReader(self._service.connection_string, BARS, partition_id=partition_id, end="@latest")
        async with reader:
            return [Bar.decode(event.body) async for event in reader]
