"""A processor that keeps a journal, hosts in this process and in others, and a publisher that knows what was taken."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from eventpump import (
    CloseReason,
    Emulator,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    PartitionContext,
    ReceivedEvent,
    RetryOptions,
    ServiceError,
    SqliteLeaseStore,
)
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.emulator.config import HubSpec
from eventpump.interfaces import ConsumerScope
from eventpump.options.connection import connection_settings
from eventpump.reports import HostReport
from tests.faults.evidence import Evidence, Fact, Journal, Witnessed, digest_of, read_log
from tests.support.processes import ChildProcess
from tests.support.reading import read_partition

HUB = "telemetry"
AUDIT = "audit"
"""The consumer group that reads the log beside the hosts."""
LEASE_DURATION = 3.0
RENEW_INTERVAL = LEASE_DURATION / 3
IDLE_TIMEOUT = 2.0

TAKE_OVER = LEASE_DURATION + 2 * RENEW_INTERVAL + 2.0
"""Seconds within which partitions of a dead host flow again: its leases run out, another host's next cycle, and slack
for a busy machine."""
RECONNECT = 2 * IDLE_TIMEOUT + 3.0
"""Seconds within which events flow again after the network does, noticed as late as a dead peer is."""

RETRY = RetryOptions(max_retries=30, base_delay=0.05, max_delay=0.5)
CONNECTION: dict[str, Any] = {"idle_timeout": IDLE_TIMEOUT, "operation_timeout": 5.0, "auth_timeout": 5.0}
HOST: dict[str, Any] = {
    **CONNECTION,
    "link_retry": {"base_delay": 0.05, "max_delay": 0.5},
    "handler_retry": {"base_delay": 0.05, "max_delay": 0.2},
    "ownership_lost_grace": 0.5,
    "close_timeout": 4.0,
    "max_batch_size": 20,
    "prefetch_events": 400,
    "max_wait_time": 1.0,
    "startup_timeout": 20.0,
    "checkpoint_policy": CheckpointPolicy.manual(),  # what is stored is compared with what the processors asked for
}


class JournalProcessor(EventProcessor):
    """Writes down what it is handed, what it has checkpointed, and the outcome of every call."""

    def __init__(self, journal: Journal, checkpoint_every: int = 2) -> None:
        self._journal = journal
        self._every = checkpoint_every
        self._batches: defaultdict[str, int] = defaultdict(int)

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        place = (context.partition_id, context.owner_level)
        self._journal.begun(*place, events)
        try:
            await self.work(context, events)
            self._batches[context.partition_id] += 1
            if self._every and self._batches[context.partition_id] % self._every == 0:
                self._journal.claimed(*place, events)
                await context.checkpoint()
                self._journal.stored(*place, events[-1].sequence_number)
        except BaseException:
            self._journal.failed(*place, events)
            raise
        self._journal.ok(*place, events)
        self.processed(context, events)

    async def work(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Stand for the user's work."""

    def processed(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Notify the waiters."""


class Progress:
    """How far each partition was processed, by whom and under which epoch; something to wait for."""

    def __init__(self) -> None:
        self.reached: defaultdict[str, int] = defaultdict(int)
        """By partition: the number after the last one processed."""
        self.reached_by: defaultdict[tuple[str, str], int] = defaultdict(int)
        """The same by host and partition."""
        self.batches: defaultdict[str, int] = defaultdict(int)
        """By partition: how many batches were processed, by any host."""
        self.owner: dict[str, tuple[str, int]] = {}
        """By partition: the host of the last batch, and its epoch."""
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def processed(self, host: str, partition_id: str, epoch: int, last: int) -> None:
        self.reached[partition_id] = max(self.reached[partition_id], last + 1)
        self.reached_by[host, partition_id] = last + 1
        self.batches[partition_id] += 1
        self.owner[partition_id] = (host, epoch)
        self.changed()

    def changed(self) -> None:
        for is_so, waiter in self._waiters:
            if not waiter.done() and is_so():
                waiter.set_result(None)

    async def until(self, is_so: Callable[[], bool], within: float = 30.0) -> None:
        """Wait until something holds.

        Raises:
            TimeoutError: It does not in time, in seconds.
        """
        if is_so():
            return
        waiter = (is_so, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(within):
                await waiter[1]
        finally:
            self._waiters.remove(waiter)

    async def until_reached(self, ends: Mapping[str, int], within: float = 30.0) -> None:
        """Wait until every partition was processed to its end."""
        await self.until(lambda: all(self.reached[partition] >= end for partition, end in ends.items()), within)

    async def until_flowing(self, partitions: Iterable[str], within: float) -> None:
        """Wait until every partition has made progress from now on: *recovery* within a stated time."""
        before = {partition: self.reached[partition] for partition in partitions}
        await self.until(lambda: all(self.reached[each] > at for each, at in before.items()), within)


class ReportingProcessor(JournalProcessor):
    """A journal processor of a host in this process."""

    def __init__(self, journal: Journal, progress: Progress, host: str, checkpoint_every: int = 2) -> None:
        super().__init__(journal, checkpoint_every)
        self._progress = progress
        self._host = host
        self.opened: list[str] = []
        self.closed: list[tuple[str, CloseReason]] = []
        self.errors: list[tuple[str, Exception]] = []

    async def open(self, context: PartitionContext) -> None:
        self.opened.append(context.partition_id)
        self._progress.changed()

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        self.closed.append((context.partition_id, reason))
        self._progress.changed()

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        self.errors.append((context.partition_id, error))
        self._progress.changed()

    def processed(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self._progress.processed(self._host, context.partition_id, context.owner_level, events[-1].sequence_number)


class GatedProcessor(ReportingProcessor):
    """Stops inside its work for some partitions, until it is released; then, or if cancelled, it goes on."""

    def __init__(self, *args: Any, hold: Iterable[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.hold = set(hold)
        self.gate = asyncio.Event()
        self.inside: dict[str, PartitionContext] = {}
        """The partitions whose work has begun and not ended."""
        self.cancelled: list[str] = []

    async def work(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self.inside[context.partition_id] = context
        self._progress.changed()
        try:
            if context.partition_id in self.hold:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(context.partition_id)
            raise
        finally:
            del self.inside[context.partition_id]
            self._progress.changed()


@dataclass
class Stage:
    """One test's hub, leases, journals and hosts. Made by the `stage` fixture.

    Args:
        directory: The test's own.
        connection_string: Of the service, reached directly.
        way: Further options of whatever connects; see `tests/ways.py`.
    """

    directory: Path
    connection_string: str = ""
    way: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    progress_of: defaultdict[str, Progress] = field(default_factory=lambda: defaultdict(Progress))
    """The same of each subscription, on hosts in other processes."""
    children: dict[str, ChildProcess] = field(default_factory=dict)
    reports: list[HostReport] = field(default_factory=list)
    journals: list[Journal] = field(default_factory=list)
    is_forked: bool = True
    """False where hosts in processes of their own are real interpreters, each with a hash seed of its own."""

    @property
    def leases(self) -> Path:
        return self.directory / "leases.db"

    def store(self, lease_duration: float = LEASE_DURATION) -> SqliteLeaseStore:
        return SqliteLeaseStore(self.leases, lease_duration=lease_duration)

    def journal(self, host: str) -> Journal:
        journal = Journal(self.directory / f"{host}.journal", host)
        self.journals.append(journal)
        return journal

    def processor(self, host: str, checkpoint_every: int = 2) -> ReportingProcessor:
        return ReportingProcessor(self.journal(host), self.progress, host, checkpoint_every)

    def gated(self, host: str, *, hold: Iterable[str], checkpoint_every: int = 2) -> GatedProcessor:
        return GatedProcessor(self.journal(host), self.progress, host, checkpoint_every, hold=hold)

    def host(self, host: str, processor: EventProcessor, **options: Any) -> EventProcessorHost:
        """Make a host in this process; it reports here."""
        leases = options.pop("leases", None) or self.store()
        return EventProcessorHost(
            self.connection_string,
            HUB,
            processor=processor,
            lease_store=leases,
            owner_id=host,
            hooks=[self.reported],
            retry=RETRY,
            **{**HOST, **self.way, **options},
        )

    def reported(self, report: HostReport) -> None:
        self.reports.append(report)
        self.progress.changed()

    def count(self, kind: type[HostReport], partition_id: str | None = None) -> int:
        """How many reports of a kind there were, from hosts in this process."""
        return sum(isinstance(report, kind) and partition_id in (None, report.partition_id) for report in self.reports)

    async def start_child(self, host: str, **settings: Any) -> ChildProcess:
        """Start a host in a process of its own; see `tests/faults/host_program.py` for its settings."""
        given = {
            "connection_string": self.connection_string,
            "leases": str(self.leases),
            "lease_duration": LEASE_DURATION,
            "host": host,
            "journal": str(self.directory / f"{host}.journal"),
            "retry": RETRY.model_dump(),
            **settings,
            "options": {**HOST, **self.way, **settings.get("options", {})},
        }
        del given["options"]["checkpoint_policy"]  # of the settings by which the program makes one
        command = (sys.executable, "-m", "tests.faults.host_program", json.dumps(given))
        child = ChildProcess(*command, on_line=self._said, is_forked=self.is_forked)
        self.children[host] = child
        await child.start()
        return child

    async def freeze(self, host: str) -> None:
        """Freeze a host, but not within a transaction: its lock would stop the others too, for as long as it lasts."""
        child = self.children[host]
        while True:
            child.freeze()
            try:
                with closing(sqlite3.connect(self.leases, isolation_level=None, timeout=0.1)) as database:
                    database.execute("BEGIN IMMEDIATE")
                    database.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                # Or it was another one's transaction, and all the same.
                child.wake()

    async def stop_child(self, host: str) -> None:
        """Close a host in order, once it listens to signals, and check that nothing is left over in its process."""
        child = self.children[host]
        await child.line("report ")
        assert await child.stop() == 0, child.stderr
        assert child.lines[-1] == "left 0 0 0"

    def _said(self, line: str) -> None:
        match line.split():
            case ["batch", host, partition_id, epoch, last]:
                host, _, name = host.partition("/")
                progress = self.progress_of[name] if name else self.progress
                progress.processed(host, partition_id, int(epoch), int(last))
            case _:
                self.progress.changed()

    def evidence(self, subscription: str = "") -> Evidence:
        """Read what every host has written down, of the hosts' own processors or of a subscription."""
        journals = sorted(self.directory.glob("*.journal"))
        return Evidence.of(path for path in journals if path.stem.partition(".")[2] == subscription)

    async def opened_store(self) -> SqliteLeaseStore:
        """Open the leases, as another host does. The caller closes it."""
        store = self.store()
        namespace = connection_settings(self.connection_string, HUB).fully_qualified_namespace
        await store.open(ConsumerScope(namespace, HUB, "$Default"))
        return store

    async def witness_checkpoints(self) -> None:
        """Have the database itself keep every checkpoint it is given, from any host. Call it before hosts start."""
        await (await self.opened_store()).aclose()
        with closing(sqlite3.connect(self.leases, isolation_level=None)) as database:
            database.execute(
                "CREATE TABLE witness (at INTEGER PRIMARY KEY, partition_id TEXT, subscription TEXT,"
                " sequence_number INTEGER, wall REAL)"
            )
            keep = (
                "INSERT INTO witness (partition_id, subscription, sequence_number, wall)"
                " VALUES ({}, (julianday('now') - 2440587.5) * 86400.0)"
            )
            own = keep.format("new.partition_id, 'default', new.sequence_number")
            database.execute(
                "CREATE TRIGGER witness_lease AFTER UPDATE OF sequence_number ON lease"
                f" WHEN new.sequence_number IS NOT NULL BEGIN {own}; END"
            )
            # A claim leaves the position as it is. The record's name ends with the subscription and the partition.
            member = "json_extract(CAST({}.body AS TEXT), '$.{}')"
            place, number = (
                "substr(new.name, instr(new.name, '/checkpoints/') + 13)",
                member.format("new", "sequencenumber"),
            )
            partition = f"substr({place}, instr({place}, '/') + 1)"
            others = keep.format(f"{partition}, substr({place}, 1, instr({place}, '/') - 1), CAST({number} AS INTEGER)")
            database.execute(
                "CREATE TRIGGER witness_record AFTER UPDATE ON record WHEN new.name GLOB 'groups/*/checkpoints/*'"
                f" AND {member.format('new', 'claim')} IS {member.format('old', 'claim')} BEGIN {others}; END"
            )

    def witnessed(self, subscription: str = "default") -> list[Witnessed]:
        """Return every checkpoint of a subscription that the store took, in its order; none where nothing witnesses it.

        Args:
            subscription: Its name; those of all its makings are given.
        """
        if not self.leases.exists():
            return []
        with closing(sqlite3.connect(self.leases)) as database:
            if not database.execute("SELECT name FROM sqlite_master WHERE name = 'witness'").fetchone():
                return []
            found = database.execute(
                "SELECT partition_id, sequence_number, wall FROM witness"
                " WHERE subscription = ? OR subscription GLOB ? ORDER BY at",
                (subscription, f"{subscription}.*"),
            )
            return [Witnessed(*row) for row in found]

    async def held_leases(self) -> dict[str, str | None]:
        """Return the owner of every lease that is held."""
        store = await self.opened_store()
        try:
            return {lease.partition_id: lease.owner for lease in await store.list() if lease.is_held}
        finally:
            await store.aclose()

    async def checkpoints(self, partitions: Iterable[str]) -> dict[str, int]:
        """Return what is stored by partition: the number of the last processed event, -1 for none."""
        store = await self.opened_store()
        try:
            found = {partition_id: await store.read_checkpoint(partition_id) for partition_id in partitions}
        finally:
            await store.aclose()
        return {each: -1 if checkpoint is None else checkpoint.sequence_number for each, checkpoint in found.items()}

    async def read_log(self, published: Publisher) -> set[Fact]:
        """Read everything the service holds, and check that all it has acknowledged is there."""
        log = await read_log(self.connection_string, HUB, AUDIT, await published.ends(), **self.way)
        published.check_kept(log)
        return log

    async def verify(self, published: Publisher, within: float = 30.0) -> Evidence:
        """Wait until everything in the log was processed, then check every promise that holds whatever happened."""
        await self.progress.until_reached(await published.ends(), within)
        log = await self.read_log(published)
        evidence = self.evidence()
        evidence.check(log, self.witnessed())
        return evidence

    async def aclose(self) -> None:
        for name, child in self.children.items():
            # Shown where the test fails.
            reports = [line for line in child.lines if not line.startswith("batch")]
            print(f"{name} ({child.returncode}):", *reports[-20:], child.stderr[-2000:], sep="\n  ")  # noqa: T201
            await child.kill()
        for journal in self.journals:
            journal.close()


class Publisher:
    """Publishes to every partition, a bounded number of events ahead of what is processed, and knows what was taken.

    Args:
        ahead: How many events, by partition.
        size: Bytes of a body.
        pace: Seconds between two batches to one partition. Neither hosts nor service are to be pushed to their limits
            where that is not the point: others have tests to run.
    """

    def __init__(
        self,
        stage: Stage,
        partitions: int,
        *,
        ahead: int = 200,
        size: int = 200,
        pace: float = 0.02,
        **options: Any,
    ) -> None:
        self._stage = stage
        self._ahead = ahead
        self._size = size
        self._pace = pace
        self._producer = EventProducer(
            stage.connection_string, HUB, **{**CONNECTION, **stage.way, "retry": RETRY, **options}
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self.partitions = [str(number) for number in range(partitions)]
        self.acknowledged: defaultdict[str, set[str]] = defaultdict(set)
        """By partition: digests of what the service has taken."""
        self._numbers: defaultdict[str, int] = defaultdict(int)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._producer.aclose()

    async def publish(self, partition_id: str, count: int, *, batch: int = 20) -> None:
        """Send so many events, in batches, and note each batch once it is acknowledged.

        Raises:
            ServiceError: It was not, within the retries.
        """
        while count > 0:
            bodies = [self._body(partition_id) for _ in range(min(batch, count))]
            await self._producer.send([EventData(body) for body in bodies], partition_id=partition_id)
            self.acknowledged[partition_id].update(map(digest_of, bodies))
            count -= len(bodies)
            self._stage.progress.changed()

    async def publish_everywhere(self, count: int) -> None:
        """The same to every partition."""
        for partition_id in self.partitions:
            await self.publish(partition_id, count)

    def _body(self, partition_id: str) -> bytes:
        self._numbers[partition_id] += 1
        return f"{partition_id}:{self._numbers[partition_id]}:".encode().ljust(self._size, b".")

    def start(self, lanes: int = 1) -> None:
        """Publish without end, to all partitions at once, with so many batches to each under way."""
        for partition_id in self.partitions * lanes:
            self._tasks.append(asyncio.get_running_loop().create_task(self._publish_on(partition_id), name="publisher"))

    async def _publish_on(self, partition_id: str) -> None:
        progress = self._stage.progress

        def is_due() -> bool:
            # Unacknowledged events that were stored all the same make this wait longer, never shorter.
            is_wanted = len(self.acknowledged[partition_id]) < progress.reached[partition_id] + self._ahead
            return is_wanted or self._is_stopping

        while True:
            await progress.until(is_due, 60.0)
            if self._is_stopping:
                return
            await asyncio.sleep(self._pace)
            try:
                await self.publish(partition_id, 20)
            except ServiceError:
                # It may have been stored, or not; the log knows.
                continue

    async def stop(self) -> None:
        """End what `start` began. What is on its way is waited for: nothing is stored after this."""
        self._is_stopping = True
        self._stage.progress.changed()
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks)
        self._is_stopping = False

    async def ends(self) -> dict[str, int]:
        """Ask the service for the end of every partition: the number after its last event."""
        found = [await self._producer.get_partition_properties(partition_id) for partition_id in self.partitions]
        return {each.partition_id: each.last_enqueued_sequence_number + 1 for each in found}

    def check_kept(self, log: set[Fact]) -> None:
        """Check *no loss* on the service's side: whatever it has acknowledged is in the log."""
        kept: defaultdict[str, set[str]] = defaultdict(set)
        for fact in log:
            kept[fact.partition_id].add(fact.digest)
        for partition_id, digests in self.acknowledged.items():
            missing = digests - kept[partition_id]
            assert not missing, f"{len(missing)} acknowledged events of partition {partition_id} are not in the log"


async def run_for(host: EventProcessorHost, until: Callable[[], Any]) -> None:
    """Run a host in this process until an awaitable made by `until` is done; then close it in order."""
    async with host:
        running = asyncio.get_running_loop().create_task(host.run(), name="host")
        waiting = asyncio.ensure_future(until())
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                raise AssertionError("the host ended by itself")
            waiting.result()
        finally:
            waiting.cancel()
            await host.aclose()
            await asyncio.gather(running, return_exceptions=True)


async def stored(connection_string: str, partition_id: str, **options: Any) -> list[str]:
    """Read the bodies of everything that a partition of the suite's hub holds, as text."""
    found = await read_partition(connection_string, HUB, partition_id, retry=RETRY, **CONNECTION, **options)
    return [event.body_as_str() for event in found]


def emulator_of(partitions: int, **options: Any) -> Emulator:
    """Make an emulator with the suite's hub."""
    return Emulator([HubSpec(HUB, partitions, (AUDIT,))], **options)


def write_config(path: Path, partitions: int) -> Path:
    """Write the same as a `Config.json` of the official emulator."""
    entity = {"Name": HUB, "PartitionCount": partitions, "ConsumerGroups": [{"Name": AUDIT}]}
    namespace = {"Type": "EventHub", "Name": "emulatorns1", "Entities": [entity]}
    path.write_text(json.dumps({"UserConfig": {"NamespaceConfig": [namespace], "LoggingConfig": {"Type": "File"}}}))
    return path
