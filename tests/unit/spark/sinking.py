"""A query that publishes batches through the ledger: driver runs, attempts, store, network and service, simulated.

What decides is the code that production runs: `begin` and `finish`, `PartitionWork`, and the sequencer. Around them
anything may happen at any moment: a driver dies before or after whatever it does outside, or goes on as a zombie beside
the next; attempts are killed, retried and doubled, those that encode too, and each has other rows; what they write
comes after it was deleted; requests and answers are lost, transfers arrive late; others publish to the same partitions;
the service forgets producers.

The service follows protocol.md 8.2 and 8.5, written down here apart from the emulator's ledger.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from eventpump.core.sequencer import (
    AttachRequest,
    Outcome,
    PartitionSequencer,
    ProducerAnswer,
    Publication,
    SequencerState,
    Step,
)
from eventpump.errors import (
    ConfigurationError,
    EventPumpError,
    ProducerDisconnectedError,
    ProducerStateLostError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    StoreError,
)
from eventpump.eventhubs.numbering import NUMBERS
from eventpump.spark.sink.attempt import PartitionWork, WorkStep, may_continue
from eventpump.spark.sink.protocol import (
    RENEW_AT,
    AttachProducers,
    CreateRecord,
    DeleteRecords,
    DeleteRows,
    DriverRun,
    FindRows,
    ListObsoleteRows,
    ListRecords,
    ListRows,
    MicroBatch,
    OnProducerStateLost,
    PartitionTail,
    Procedure,
    ReadPartitions,
    ReadRecord,
    ReadTails,
    Request,
    Together,
    Unplanned,
    WrittenRows,
    finish,
    make_plan,
    overtaken,
    prepare,
)
from eventpump.spark.sink.records import (
    Done,
    KeptRows,
    LossReason,
    PackingLimits,
    PartitionDone,
    PartitionOutcome,
    Plan,
    RunClaim,
    Sink,
    StateLost,
    batch_of,
    batch_of_rows,
    claim_name,
    decode_record,
    done_name,
    encode_record,
    rows_stem,
)

T = TypeVar("T")

Row = tuple[int, int, int]
"""Its batch, the attempt that encoded it, and its index. What others publish has the batch -1."""
Shares = dict[str, list[Row]]
"""Rows by partition."""
Sequencer = PartitionSequencer[tuple[Row, ...]]
Actor = Generator[None, None, T]
"""Takes a step at each `next`; closing it kills it."""

SINK = Sink(sink_id="sink", namespace="example.servicebus.windows.net", hub="hub")
QUERY = "query"
PARTITIONS = ("0", "1")


class FencedError(Exception):
    """The service knows a higher level."""


class UnknownError(Exception):
    """The service does not know the producer."""


@dataclass(frozen=True)
class Transfer:
    """A message on its way."""

    producer_id: int
    level: int
    first: int
    rows: tuple[Row, ...]


@dataclass
class Stored:
    """An object with rows.

    Args:
        shares: None while it is only half written.
        written: When.
    """

    size: int
    shares: list[tuple[str, Shares]] | None
    written: int


@dataclass
class Encoding:
    """An attempt of a task that encodes; it may outlive the run.

    Attributes:
        written: The object that it wrote, and its rows.
    """

    task: int
    actor: Actor[tuple[str, Shares]]
    is_over: bool = False
    written: tuple[str, Shares] | None = None

    def step(self) -> None:
        try:
            next(self.actor)
        except StopIteration as stop:
            self.is_over, self.written = True, stop.value

    def kill(self) -> None:
        self.actor.close()
        self.is_over = True


@dataclass
class Producer:
    """What the service keeps of one."""

    level: int
    last: int
    is_fresh: bool
    recent: deque[tuple[int, int]]


@dataclass
class Partition:
    """One partition of the service.

    Args:
        nothing: The number answered where nothing is published, -1 or 0.
        look_back: How many messages a repeat is recognised among; 0 refuses repeats.
        accept_unknown_producers: Whether a producer it does not know is accepted as a new one, instead of refused.
    """

    nothing: int
    look_back: int
    accept_unknown_producers: bool
    ids: Iterable[int]
    log: list[Row] = field(default_factory=list)
    producers: dict[int, Producer] = field(default_factory=dict)

    def add(self, producer_id: int, level: int) -> Producer:
        made = self.producers[producer_id] = Producer(level, self.nothing, True, deque(maxlen=self.look_back))
        return made

    def find(self, producer_id: int, level: int) -> Producer:
        known = self.producers.get(producer_id)
        if known is None:
            if not self.accept_unknown_producers:
                raise UnknownError
            known = self.add(producer_id, level)
        if level < known.level:
            raise FencedError
        return known

    def attach(self, asked: AttachRequest) -> tuple[int, int, int]:
        """Answer an attach."""
        assert asked.number is None, "the service echoes a number it is given"
        if asked.producer_id is None:
            producer_id = next(iter(self.ids))
            made = self.add(producer_id, 0)
            return producer_id, made.level, made.last
        assert asked.owner_level is not None
        known = self.find(asked.producer_id, asked.owner_level)
        if asked.owner_level > known.level:
            known = self.add(asked.producer_id, asked.owner_level)
        return asked.producer_id, known.level, known.last

    def take(self, transfer: Transfer) -> bool:
        """Store a transfer, or know it as a repeat.

        Returns:
            False where it is out of order.
        """
        known = self.find(transfer.producer_id, transfer.level)
        assert transfer.level == known.level, "a level is raised by an attach only"
        run = (transfer.first, len(transfer.rows))
        if not known.is_fresh and transfer.first != (known.last + 1) % NUMBERS:
            return run in known.recent
        known.is_fresh = False
        known.last = (transfer.first + len(transfer.rows) - 1) % NUMBERS
        known.recent.append(run)
        self.log += transfer.rows
        return True


class Attempt:
    """A task's try at a partition's share, or the driver's own.

    Args:
        owner: The run that it ends with; None for a task's, which may outlive the run.

    Attributes:
        outcome: What it reported.
        error: What it failed with.
    """

    def __init__(self, plan: Plan, partition_id: str, actor: Actor[PartitionOutcome], owner: DriverRun | None) -> None:
        self.owner = owner
        self.plan = plan
        self.partition_id = partition_id
        self.actor = actor
        self.is_over = False
        self.outcome: PartitionOutcome | None = None
        self.error: EventPumpError | None = None

    def step(self) -> None:
        try:
            next(self.actor)
        except StopIteration as stop:
            self.is_over, self.outcome = True, stop.value
        except EventPumpError as error:
            self.is_over, self.error = True, error

    def kill(self) -> None:
        self.actor.close()
        self.is_over = True


class Run:
    """A run of the driver."""

    def __init__(self, driver: DriverRun, actor: Actor[None]) -> None:
        self.driver = driver
        self.actor = actor
        self.is_over = False
        self.error: EventPumpError | None = None

    def step(self) -> None:
        try:
            next(self.actor)
        except StopIteration:
            self.is_over = True
        except EventPumpError as error:
            self.is_over, self.error = True, error

    def kill(self) -> None:
        self.actor.close()
        self.is_over = True


class World:
    """Everything, and what must be true of it whatever happens.

    Args:
        policy: What follows when producers are lost.
        forgets: How often the service may forget a producer.
        accept_unknown_producers: See `Partition`. Such a service forgets only while nothing is on its way and no
            attempt lives: what comes later than its memory reaches is stored again, which cannot be prevented.
        near_wrap: Whether the sink's numbers are near 2^31 from the start.
        renews: Whether producers are renewed there, instead of going across.
        paths: How often the driver publishes a batch by itself, as a small one: 0 for never to 1 for always.
        loses_ledger: Whether the ledger's records may be lost, together with the driver's machine.
        skips: Whether the sink is not called for a batch without rows.
        wavers: Whether a batch may be without rows in one run of the query, and not in another.
        restores: How often an older copy of the ledger may be restored, while nothing of the sink runs.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        policy: OnProducerStateLost = OnProducerStateLost.FAIL,
        forgets: int = 0,
        accept_unknown_producers: bool = False,
        near_wrap: bool = False,
        renews: bool = False,
        paths: float = 0.5,
        loses_ledger: bool = False,
        skips: bool = False,
        wavers: bool = False,
        restores: int = 0,
    ) -> None:
        self.paths = paths
        self.loses_ledger = loses_ledger
        self.is_ledger_lost = False
        self.skips = skips
        self.skipped = 0
        self.restores = restores
        self.copies: list[dict[str, bytes]] = []
        self.is_restored = False
        self.kept_links = 0
        self.superseded = 0
        self.has_ended = False
        self.rng = rng
        self.policy = policy
        self.forgets = forgets
        self.accept_unknown_producers = accept_unknown_producers
        self.has_forgotten = False
        self.takes_over = 0 if policy is OnProducerStateLost.FAIL else rng.choice([0, 0, 1, 2])
        self.is_calm = False
        ids = itertools.count(1)
        nothing, look_back = rng.choice([-1, 0]), rng.choice([0, 1, 5])
        self.partitions = {each: Partition(nothing, look_back, accept_unknown_producers, ids) for each in PARTITIONS}
        self.records: dict[str, bytes] = {}
        self.late: list[tuple[str, Transfer]] = []
        self.runs: list[Run] = []
        self.attempts: list[Attempt] = []
        self.encodings: list[Encoding] = []
        self.objects: dict[str, Stored] = {}
        self.evaluations = itertools.count(1)
        self.written = 0
        self.listed: dict[tuple[str, ...], tuple[int, int]] = {}
        """When objects with these names were listed, and that they were all of batches before one."""
        self.deleted: list[tuple[int, int]] = []
        self.late_rows = 0
        self.repeated = 0
        self.gone = 0
        self.plans: dict[int, bytes] = {}
        self.replaced: set[bytes] = set()
        self.planned: dict[int, Shares] = {}
        """The rows that the newest plan of each batch names."""
        self.run_ids = itertools.count(1)
        self.first_batch = 1 if near_wrap else 0 if skips else rng.choice([0, 0, 7])
        self.first_call = self.first_batch
        self.committed = self.first_batch
        self.end = self.first_batch + rng.randint(4, 7) if skips else self.first_batch + rng.randint(2, 4)
        batches = range(self.first_batch, self.end)
        self.empty = {each for each in batches if skips and rng.random() < 0.5}
        self.wavering = {each for each in batches if wavers and each not in self.empty and rng.random() < 0.7}
        self.has_wavered = False
        self.begun: set[int] = set()
        """The batches of which rows may have been sent."""
        self.checked = dict.fromkeys(PARTITIONS, 0)
        self.renew_at = RENEW_AT if renews or not near_wrap else NUMBERS
        self.may_seem_lost = near_wrap and not renews and nothing == 0
        """Whether the number of a row may be what the service answers where nothing is published."""
        if near_wrap:
            self.records[done_name(0)] = encode_record(self._near_the_wrap())

    def _near_the_wrap(self) -> Done:
        done = []
        for each, partition in self.partitions.items():
            number = NUMBERS - self.rng.randint(1, 8)
            producer_id, level, _ = partition.attach(AttachRequest())
            partition.producers[producer_id] = Producer(
                level, (number - 1) % NUMBERS, False, deque(maxlen=partition.look_back)
            )
            done.append(
                PartitionDone(
                    partition_id=each,
                    producer_id=producer_id,
                    owner_level=level,
                    next_number=number,
                    nothing=partition.nothing,
                    is_fresh=False,
                    tail=-1,
                    count=0,
                    first_number=None,
                )
            )
        return Done(sink=SINK, query_id=QUERY, run_id="first", batch_id=0, partitions=tuple(done), receipts=())

    # ------------------------------------------------------------------------------------------ the driver

    def start_run(self) -> Run:
        """Start the query, again or beside one that is not known to be alive."""
        driver = DriverRun(f"run {next(self.run_ids)}")
        run = Run(driver, self._drive(driver))
        self.runs.append(run)
        return run

    def kill_run(self, run: Run) -> None:
        """Kill a driver: what it publishes by itself ends with it, and tasks go on."""
        run.kill()
        for each in self.living:
            if each.owner is run.driver:
                each.kill()

    def _drive(self, driver: DriverRun) -> Actor[None]:
        batch_id = self.committed
        kept: dict[str, Sequencer] = {}
        may_repeat = True
        while batch_id < self.end:
            is_skipped = batch_id in self.wavering and self.rng.random() < 0.5
            if batch_id in self.empty or is_skipped:
                yield
                self.skipped += 1
                self.has_wavered |= is_skipped
                self.committed = max(self.committed, batch_id + 1)
                batch_id, may_repeat = batch_id + 1, False
                continue
            batch = MicroBatch(
                SINK,
                QUERY,
                driver,
                batch_id,
                PackingLimits(),
                is_stamped=self.policy is OnProducerStateLost.SCAN,
                renew_at=self.renew_at,
                first_batch=self.first_call,
                may_repeat=may_repeat,
            )
            step = yield from self._ruled(driver, prepare(batch))
            links: dict[str, Sequencer] = {}
            is_direct = self.rng.random() < self.paths
            if isinstance(step, Unplanned):
                rows = yield from self._written(driver, batch_id, is_direct=is_direct)
                step = yield from self._carry_out(make_plan(step, rows))
                if is_direct and step.rows == rows.kept:
                    links = kept
            else:
                self.repeated += 1
            while isinstance(step, Plan):
                try:
                    outcomes = yield from self._job(step, driver if is_direct else None, links, kept)
                except StoreError:
                    yield from self._carry_out(overtaken(batch))
                    raise
                links = {}
                step = yield from self._ruled(driver, finish(batch, step, outcomes, self.policy))
            yield
            self.committed = max(self.committed, batch_id + 1)
            batch_id, may_repeat = batch_id + 1, False

    def _written(self, driver: DriverRun, batch_id: int, *, is_direct: bool) -> Actor[WrittenRows]:
        """Encode the rows of a batch, as Spark does in two tasks, and write an object that has them or names theirs."""
        found: list[tuple[str, Shares]] = []
        if is_direct:
            found = [("", self._evaluated(batch_id)) for _ in range(2)]
        waiting = [] if is_direct else [[self._encode(task, batch_id)] for task in range(2)]
        for attempts in waiting:
            while not any(each.written for each in attempts):
                yield
                is_doubled = not self.is_calm and len(attempts) < 3 and self.rng.random() < 0.05
                if is_doubled or all(each.is_over for each in attempts):
                    attempts.append(self._encode(attempts[0].task, batch_id))
            found.append(self.rng.choice([each.written for each in attempts if each.written]))
        counts = {each: sum(len(shares[each]) for _, shares in found) for each in PARTITIONS}
        if not any(counts.values()):
            return WrittenRows(None, {}, {})
        sizes = {name: self.objects[name].size for name, _ in found if name and name in self.objects}
        sizes |= {name: 7 for name, _ in found if name}
        name = yield from self._write(batch_id, found)
        return WrittenRows(KeptRows(name=name, size=7, digest="digest"), sizes | {name: 7}, counts)

    def _evaluated(self, batch_id: int) -> Shares:
        """Return the rows of a task: others in each attempt."""
        attempt, rng = next(self.evaluations), self.rng
        made: Shares = {}
        for each in PARTITIONS:
            count = 0 if batch_id in self.empty else rng.choice([0, 1, 1, 2, 3, 4])
            made[each] = [(batch_id, attempt, row) for row in range(count)]
        return made

    def _encode(self, task: int, batch_id: int) -> Encoding:
        encoding = Encoding(task, self._encoded(batch_id))
        self.encodings.append(encoding)
        return encoding

    def _encoded(self, batch_id: int) -> Actor[tuple[str, Shares]]:
        yield
        shares = self._evaluated(batch_id)
        name = yield from self._write(batch_id, [("", shares)])
        return name, shares

    def _write(self, batch_id: int, shares: list[tuple[str, Shares]]) -> Actor[str]:
        """Write an object, which is seen half written; where its answer is lost, another one too."""
        while True:
            name = f"{rows_stem(batch_id)}.{self.rng.getrandbits(128):032x}"
            self.written += 1
            self.objects[name] = Stored(3, None, self.written)
            yield
            self.written += 1
            self.late_rows += any(done_name(batch_id) == each for each in self.records)
            self.objects[name] = Stored(7, shares, self.written)
            yield
            if self.is_calm or self.rng.random() < 0.9:
                return name

    def _kept(self, plan: Plan, partition_id: str) -> Actor[list[tuple[str, list[Row]]]]:
        """Read where the rows of a partition are: those of the plan's object by themselves, others by its name."""
        yield
        assert plan.rows is not None
        stored = self.objects.get(plan.rows.name)
        if stored is None:
            self.gone += 1
            raise StoreError("read", "the plan's rows are gone")
        assert stored.shares is not None, "a plan names what is only half written"
        return [(name, shares[partition_id]) for name, shares in stored.shares]

    def _ruled(self, driver: DriverRun, procedure: Procedure[T]) -> Actor[T]:
        """Carry out a procedure that must fail if a later run had claimed the sink before it began."""
        claim = driver.claim
        is_superseded = claim is not None and claim_name(claim + 1) in self.records
        self.superseded += is_superseded
        result = yield from self._carry_out(procedure)
        assert not is_superseded or isinstance(result, Done), "a run goes on after a later one has begun"
        return result

    def _carry_out(self, procedure: Procedure[T]) -> Actor[T]:
        try:
            request = next(procedure)
            while True:
                answer = yield from self._answer(request)
                request = procedure.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _answer(self, request: Request) -> Actor[object]:
        yield
        answer: object = None
        match request:
            case ReadRecord(name):
                return self.records.get(name)
            case CreateRecord(name, body):
                # Its answer may be lost, and the request repeated.
                for _ in range(self.rng.choice([1, 1, 1, 2])):
                    if name not in self.records and name.endswith(".0.plan.json"):
                        self._note(body)
                    answer = self.records.setdefault(name, body) == body
                    yield
            case ListRecords():
                return sorted(self.records)
            case DeleteRecords(names):
                for name in names:
                    self.records.pop(name, None)
            case ListRows():
                return {name: each.size for name, each in self.objects.items()}
            case ListObsoleteRows(before):
                return self._obsolete_rows(before)
            case DeleteRows(names):
                yield from self._delete_rows(names)
            case ReadPartitions():
                return PARTITIONS
            case ReadTails(ids):
                answer = {each: PartitionTail(0, len(self.partitions[each].log) - 1) for each in ids}
            case AttachProducers(producers):
                answers: dict[str, ProducerAnswer | None] = {}
                for partition_id, asked in producers.items():
                    for _ in range(self.rng.choice([1, 1, 1, 2])):
                        answers[partition_id] = self._attach(partition_id, asked)
                        yield
                answer = answers
            case FindRows(plan, ranges):
                answer = {each: self._stamps(plan, each, ranges[each]) for each in ranges}
            case Together(requests):
                answer = yield from self._together(requests)
        return answer

    def _together(self, requests: tuple[Request, ...]) -> Actor[list[object]]:
        """Carry out requests in steps that take turns by chance."""
        waiting = {number: self._answer(each) for number, each in enumerate(requests)}
        answers: list[object] = [None] * len(requests)
        while waiting:
            number = self.rng.choice([*waiting])
            try:
                next(waiting[number])
            except StopIteration as stop:
                answers[number] = stop.value
                del waiting[number]
            else:
                yield
        return answers

    def _note(self, body: bytes) -> None:
        """Note which rows a plan names, which are those that must be stored."""
        plan = decode_record(body, Plan)
        shares: Shares = {each: [] for each in PARTITIONS}
        if plan.rows is not None:
            named = self.objects.get(plan.rows.name)
            found = None if named is None else named.shares
            if self.wavering and (found is None or any(name and name not in self.objects for name, _ in found)):
                return  # deleted by a later run that is past this batch: it must not be published
            assert found is not None
            for name, own in found:
                assert not name or self.objects[name].shares is not None, "a plan names what is only half written"
                for each, rows in own.items():
                    shares[each] += rows
        assert {each.partition_id: each.count for each in plan.partitions} == {
            each: len(rows) for each, rows in shares.items()
        }
        self.planned[plan.batch_id] = shares
        if plan.batch_id in self.plans:
            self.replaced.add(self.plans[plan.batch_id])
        self.plans[plan.batch_id] = body

    def _obsolete_rows(self, before: int) -> tuple[str, ...]:
        """List what is to be deleted, unless that fails."""
        if not self.is_calm and self.rng.random() < 0.1:
            return ()
        names = tuple(name for name in sorted(self.objects) if (batch_of_rows(name) or 0) < before)
        self.listed[names] = self.written, before
        if not names:
            self.deleted.append(self.listed[names])
        return names

    def _delete_rows(self, names: tuple[str, ...]) -> Actor[None]:
        """Delete objects, unless that fails."""
        if not self.is_calm and self.rng.random() < 0.1:
            return
        for name in names:
            yield
            self.objects.pop(name, None)
        self.deleted.append(self.listed[names])

    def _attach(self, partition_id: str, asked: AttachRequest) -> ProducerAnswer | None:
        try:
            return ProducerAnswer(*self.partitions[partition_id].attach(asked))
        except UnknownError:
            return None
        except FencedError:
            raise ProducerDisconnectedError("stolen") from None

    def _stamps(self, plan: Plan, partition_id: str, range_: tuple[int, int]) -> list[int]:
        after, through = range_
        events = self.partitions[partition_id].log[after + 1 : through + 1]
        rows = self.planned[plan.batch_id][partition_id]
        return [rows.index(each) for each in events if each[0] == plan.batch_id]

    def _job(
        self, plan: Plan, owner: DriverRun | None, links: dict[str, Sequencer], kept: dict[str, Sequencer]
    ) -> Actor[list[PartitionOutcome]]:
        """Run a task per partition that has rows, each again until one attempt has succeeded.

        Args:
            owner: The driver that publishes by itself; None for tasks.
            links: What it kept from the batch before.
            kept: What it keeps for the next one.
        """
        self.begun.add(plan.batch_id)
        used = [each.partition_id for each in plan.partitions if each.count]
        waiting = {each: [self._start(plan, each, owner, links.pop(each, None), kept)] for each in used}
        outcomes: list[PartitionOutcome] = []
        while waiting:
            yield
            if self.takes_over and self.rng.random() < 0.01:
                # For no reason, and while attempts live: it must be safe whenever it is done.
                self.takes_over -= 1
                return [
                    StateLost(partition_id=each, reason=LossReason.UNKNOWN, stored=0)
                    for each in self.rng.sample(PARTITIONS, self.rng.randint(1, 2))
                ]
            for partition_id, attempts in list(waiting.items()):
                over = [each for each in attempts if each.is_over]
                succeeded = [each.outcome for each in over if each.outcome is not None]
                if succeeded:
                    outcomes += succeeded[:1]
                    del waiting[partition_id]  # what else runs for it goes on, without a waiter
                    continue
                if any(isinstance(each.error, ProducerDisconnectedError) for each in over):
                    raise ProducerDisconnectedError("a task was fenced")
                if len(over) > 30 or (over and isinstance(over[-1].error, StoreError)):
                    raise StoreError("job", f"a task failed again and again: {over[-1].error}")
                is_doubled = owner is None and not self.is_calm and self.rng.random() < 0.02
                if len(over) == len(attempts) or (len(attempts) < 3 and is_doubled):
                    attempts.append(self._start(plan, partition_id, owner, None, kept))
        return outcomes

    # ------------------------------------------------------------------------------------------ an attempt

    def _start(
        self,
        plan: Plan,
        partition_id: str,
        owner: DriverRun | None,
        link: Sequencer | None,
        kept: dict[str, Sequencer],
    ) -> Attempt:
        actor = self._attempt(plan, partition_id, link, {} if owner is None else kept)
        attempt = Attempt(plan, partition_id, actor, owner)
        self.attempts.append(attempt)
        return attempt

    def _attempt(
        self, plan: Plan, partition_id: str, link: Sequencer | None, kept: dict[str, Sequencer]
    ) -> Actor[PartitionOutcome]:
        entry = plan.partition(partition_id)
        segments = yield from self._kept(plan, partition_id)
        rows: list[Row] = []
        partition = self.partitions[partition_id]
        work = PartitionWork(entry, max_tries=5)
        sequencer = PartitionSequencer[tuple[Row, ...]](partition_id)
        if link is not None and may_continue(link, entry):
            self.kept_links += 1
            sequencer = link
            work.continued()
            if self.rng.random() < 0.2:
                link.detached()  # while nothing was sent
        while True:
            yield
            if work.needed is not None and segments and (work.step is WorkStep.REST or self.rng.random() < 0.3):
                yield from self._receive(segments, rows, work)
            if work.step is WorkStep.FAIL:
                raise work.error()
            try:
                match work.step:
                    case WorkStep.LOOK:
                        sequencer = PartitionSequencer[tuple[Row, ...]](
                            partition_id, producer_id=entry.producer_id, owner_level=entry.owner_level
                        )
                        yield from self._attached(partition, sequencer)
                        assert sequencer.last_number is not None
                        yield
                        work.looked(sequencer.last_number)
                    case WorkStep.SCAN:
                        last = len(partition.log)
                        yield
                        work.scanned(is_stored=rows[entry.offset] in partition.log[entry.tail + 1 : last])
                    case WorkStep.SEND:
                        assert work.position is not None
                        count = self.rng.randint(1, min(3, work.rows - work.position))
                        batch = tuple(rows[work.position : work.position + count])
                        yield from self._publish(partition_id, sequencer, batch, work)
                    case WorkStep.END:
                        if sequencer.state is SequencerState.IDLE:
                            kept[partition_id] = sequencer
                        return work.receipt()
                    case WorkStep.LOST:
                        assert work.loss is not None
                        return work.loss
            except UnknownError:
                work.unknown_producer()
            except ProducerDisconnectedError as error:
                work.fenced(error)
            except EventPumpError as error:
                work.troubled(error)

    def _receive(self, segments: list[tuple[str, list[Row]]], rows: list[Row], work: PartitionWork) -> Actor[None]:
        """Read the next rows, unless they are stored."""
        name, share = segments.pop(0)
        assert work.needed is not None
        if len(rows) + len(share) > work.needed and name:
            yield
            if name not in self.objects:
                self.gone += 1
                raise StoreError("read", "rows are gone")
        rows += share
        work.received(len(rows))

    def _attached(self, partition: Partition, sequencer: PartitionSequencer[tuple[Row, ...]]) -> Actor[None]:
        """Attach a link, in as many tries as it takes."""
        while True:
            yield
            asked = sequencer.attach_request
            try:
                answer = partition.attach(asked)
            except FencedError:
                sequencer.fenced("stolen", transfer_refused=False)
                raise sequencer.error() from None
            if self.is_calm or self.rng.random() < 0.9:
                sequencer.attached(*answer)
                return

    def _publish(
        self,
        partition_id: str,
        sequencer: PartitionSequencer[tuple[Row, ...]],
        rows: tuple[Row, ...],
        work: PartitionWork,
    ) -> Actor[None]:
        """Send a message until it is known to be stored; an error leaves it in doubt or says that it is refused."""
        publication = sequencer.offer(rows, len(rows))
        while publication is sequencer.head:
            if sequencer.failure is not None:
                raise sequencer.error()
            if sequencer.step is Step.ATTACH:
                if not self.is_calm and self.rng.random() < 0.1:
                    raise PublishOutcomeUnknownError(partition_id, publication.first, len(rows))
                try:
                    yield from self._attached(self.partitions[partition_id], sequencer)
                except UnknownError:
                    raise RequestRefusedError("unknown") from None
            else:
                yield from self._send(partition_id, sequencer, publication)
        if sequencer.failure is not None:
            raise sequencer.error()
        if publication.outcome is not Outcome.PUBLISHED:
            raise RequestRefusedError("refused")
        assert publication.first is not None
        work.published(publication.first, len(rows))

    def _send(
        self,
        partition_id: str,
        sequencer: PartitionSequencer[tuple[Row, ...]],
        publication: Publication[tuple[Row, ...]],
    ) -> Actor[None]:
        first = sequencer.sending()
        assert sequencer.producer_id is not None
        assert sequencer.owner_level is not None
        transfer = Transfer(sequencer.producer_id, sequencer.owner_level, first, publication.batch)
        chance = 1.0 if self.is_calm else self.rng.random()
        if chance < 0.1:
            self.late.append((partition_id, transfer))  # while a caller waits for an answer that never comes
            yield
            sequencer.outcome_unknown()
            return
        try:
            yield
        except GeneratorExit:  # killed with the message in its socket
            if self.rng.random() < 0.5:
                self.late.append((partition_id, transfer))
            raise
        if chance < 0.15:
            sequencer.detached()
        elif chance < 0.2:
            sequencer.refused_for_now()
        else:
            try:
                is_taken = self.partitions[partition_id].take(transfer)
            except FencedError:
                sequencer.fenced("stolen", transfer_refused=True)
                return
            except UnknownError:
                sequencer.refused()
                return
            yield
            if chance < 0.3:
                sequencer.detached()
            elif is_taken:
                sequencer.accepted()
            else:
                sequencer.refused_out_of_order()

    # ------------------------------------------------------------------------------------------ what else happens

    def deliver(self, which: int) -> None:
        """Let a message of a lost link arrive. Its answer is dropped."""
        partition_id, transfer = self.late.pop(which % len(self.late))
        with contextlib.suppress(FencedError, UnknownError):
            self.partitions[partition_id].take(transfer)

    def publish_others(self) -> None:
        """Let another producer publish."""
        self.partitions[self.rng.choice(PARTITIONS)].log.append((-1, 0, 0))

    @property
    def living(self) -> list[Attempt]:
        return [each for each in self.attempts if not each.is_over]

    @property
    def encoding(self) -> list[Encoding]:
        return [each for each in self.encodings if not each.is_over]

    @property
    def may_forget(self) -> bool:
        if not self.forgets or not any(each.producers for each in self.partitions.values()):
            return False
        return not self.accept_unknown_producers or not (self.late or self.living)

    def forget(self) -> None:
        """Let the service forget every producer of a partition."""
        self.partitions[self.rng.choice(PARTITIONS)].producers.clear()
        self.forgets -= 1
        self.has_forgotten = True

    def lose_ledger(self) -> None:
        """Let the driver's machine be lost, and the ledger with it."""
        for run in self.runs:
            self.kill_run(run)
        self.records.clear()
        self.is_ledger_lost = True

    def restore_ledger(self) -> None:
        """Replace the ledger by an older copy, when all that ran has ended, and all that was sent has arrived.

        An empty one at the first batch of a sink is that of a new sink, which nothing disproves; neither does anything
        disprove a plan in place of which another one was made, after an older copy was restored.
        """
        copy = self.rng.choice(self.copies)
        if not self.replaced.isdisjoint(copy.values()):
            return
        claims = [decode_record(body, RunClaim).batch_id for name, body in copy.items() if "claim" in name]
        if not any("plan" in name for name in copy) and self.committed in (0, self.first_call, *claims[:1]):
            return
        for run in self.runs:
            self.kill_run(run)
        for attempt in self.living:
            attempt.kill()
        for encoding in self.encoding:
            encoding.kill()
        while self.late:
            self.deliver(0)
        self.restores -= 1
        self.is_restored = True
        self.records = dict(copy)

    def step(self) -> None:
        """Let one thing happen."""
        rng = self.rng
        runs = [each for each in self.runs if not each.is_over]
        living = self.living
        chance = rng.random()
        if not runs or (len(runs) == 1 and chance < (0.02 if self.wavering else 0.002)):
            self.start_run()
        elif chance < 0.012:
            self.kill_run(rng.choice(runs))
        elif chance < 0.02 and self.loses_ledger and self.committed > self.first_call and self.has_stored:
            self.lose_ledger()
        elif chance < 0.02 and self.restores and self.copies:
            self.restore_ledger()
        elif chance < 0.03 and living:
            rng.choice(living).kill()
        elif chance < 0.04 and self.encoding:
            rng.choice(self.encoding).kill()
        elif self.encoding and rng.random() < 0.2:
            rng.choice(self.encoding).step()
        elif chance < 0.06 and self.late:
            self.deliver(rng.randrange(9))
        elif chance < 0.07:
            self.publish_others()
        elif chance < 0.09 and self.may_forget:
            self.forget()
        elif chance < 0.3 or not living:
            rng.choice(runs).step()
        else:
            rng.choice(living).step()
        if self.restores and rng.random() < 0.05:
            self.copies.append(dict(self.records))
        self.check()
        for run in runs:
            self.follow_advice(run)

    def follow_advice(self, run: Run) -> None:
        """Name the first batch that the sink is called for, where an error asks for it for no other reason."""
        if isinstance(run.error, ConfigurationError) and not (self.is_ledger_lost or self.is_refused(run.error)):
            if run.error.field == "sink_id" and "but the query at" in str(run.error):
                others = [each for each in self.runs if each is not run and each.driver.claim]
                assert others, "no other run can have gone on meanwhile"
                return
            assert run.error.field == "ledger", run.error
            assert all(batch_of(name) is None for name in self.records), "records are there"
            assert self.skips, "a ledger is refused for nothing"
            self.first_call = self.committed

    def is_done(self, batch_id: int) -> bool:
        """Whether a batch has its last record."""
        return any(
            b'"kind":"done"' in body
            for name, body in self.records.items()
            if batch_of(name) == batch_id and name.endswith(".done.json")
        )

    @property
    def has_stored(self) -> bool:
        """Whether the hub has a row of the sink."""
        return any(row[0] >= 0 for each in self.partitions.values() for row in each.log)

    def expected(self, partition_id: str) -> list[Row]:
        """Return the rows of the batches that are planned, in their order.

        A run that ends before it sends anything may leave a plan of a batch that was without rows in the run after it.
        """
        batches = self.begun if self.has_wavered else self.planned
        return [row for batch in sorted(batches) for row in self.planned[batch][partition_id]]

    def check(self) -> None:
        """No loss, no duplicate, no reorder, at any moment. What was looked at before has not changed."""
        for each, partition in self.partitions.items():
            ours = [row for row in partition.log if row[0] >= 0]
            if len(ours) == self.checked[each]:
                continue
            self.checked[each] = len(ours)
            assert ours == self.expected(each)[: len(ours)], f"partition {each}: {ours}"
        for error in [each.error for each in self.runs]:
            if isinstance(error, ProducerStateLostError):
                assert self.has_forgotten or self.may_seem_lost, f"nothing was forgotten: {error}"
            elif isinstance(error, StoreError) and error.operation == "job":
                assert self.is_restored or "gone" not in error.reason, "rows are gone, but no other run goes on"

    @property
    def is_stopped(self) -> bool:
        """Whether the query has failed for good, as its policy says."""
        return self.is_ledger_lost or any(
            isinstance(each.error, ProducerStateLostError) or self.is_refused(each.error) for each in self.runs
        )

    def is_refused(self, error: EventPumpError | None) -> bool:
        """Whether an error is final: an older copy of the ledger was restored, or a batch that was begun was without
        rows when it was repeated."""
        if isinstance(error, ConfigurationError) and self.has_wavered:
            return (
                error.field == "ledger" or "not finished it" in error.problem or "driver made before" in error.problem
            )
        if self.is_restored and isinstance(error, StoreError):
            return "gone" in error.reason  # they were deleted after the copy was made
        return self.is_restored and isinstance(error, ConfigurationError | ProducerDisconnectedError)

    def finish(self) -> None:
        """Let everything go well from now on: the query gets through, and every row is stored."""
        self.is_calm, self.takes_over = True, 0
        for run in self.runs:
            self.kill_run(run)
        error: EventPumpError | None = None
        for _ in range(6):
            run = self.start_run()
            while not run.is_over:
                for attempt in self.living:
                    attempt.step()
                for encoding in self.encoding:
                    encoding.step()
                run.step()
                self.check()
            error = run.error
            self.follow_advice(run)
            if error is None or isinstance(error, ProducerStateLostError) or self.is_refused(error):
                break
        self.has_ended = error is None
        if self.is_ledger_lost and self.committed < self.end:
            assert isinstance(error, ConfigurationError), f"nothing is said of the lost ledger: {error}"
            assert error.field == "ledger"
            while self.late:
                self.deliver(0)
            self.check()
            return
        if self.is_refused(error):
            return
        if self.policy is OnProducerStateLost.FAIL and isinstance(error, ProducerStateLostError):
            return
        assert error is None, f"the query does not get through: {error}"
        while self.late:
            self.deliver(0)
        self.check()
        if not all(map(self.is_done, self.begun & self.wavering)):
            return  # a run that went on without its rows was not called again, so that nothing could be said
        for each, partition in self.partitions.items():
            ours = [row for row in partition.log if row[0] >= 0]
            assert ours == self.expected(each)
        calls = {each for each in range(self.first_call, self.end) if each not in self.empty | self.wavering}
        assert self.planned.keys() >= calls, "a batch was not published"
        for name, stored in self.objects.items():
            batch_id = batch_of_rows(name)
            assert batch_id is not None
            late = all(stored.written > when or batch_id >= before for when, before in self.deleted)
            assert late, "rows are left of a batch that is done"


def walk(seed: int, steps: int = 1500) -> World:
    """Run a world by chance."""
    rng = random.Random(seed)
    policy = rng.choice([OnProducerStateLost.FAIL, *[OnProducerStateLost.SCAN] * 2])
    near_wrap = rng.random() < 0.3
    forgets = rng.choice([0, 1, 2])
    skips = not near_wrap and rng.random() < 0.3
    restores = 0 if near_wrap or forgets else 2
    wavers = skips and not restores and rng.random() < 0.7
    world = World(
        rng,
        policy=policy,
        forgets=forgets,
        accept_unknown_producers=rng.random() < 0.5,
        near_wrap=near_wrap,
        renews=rng.random() < 0.5,
        paths=rng.choice([0.0, 0.5, 0.5, 1.0]),
        loses_ledger=not wavers and rng.random() < 0.3,
        skips=skips,
        wavers=wavers,
        restores=restores,
    )
    for _ in range(steps):
        if world.committed >= world.end or world.is_stopped:
            break
        world.step()
    world.finish()
    return world
