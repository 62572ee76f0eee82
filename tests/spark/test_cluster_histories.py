"""Random histories of the sink on a standalone cluster: whatever dies, differs, is late or is repeated, each row of the
first evaluation of a batch is stored once, in order per key; or the query stops, and says why.

Each thirteen seeds that follow one another have all troubles, and each six all shapes of the query's function.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]  # it comes without types
import pytest

from eventpump import EventData, EventProducer
from eventpump.emulator.faults import DropConnection, Fault, Hold, LinkRole, StoreLate
from eventpump.spark.source.offsets import SourceOffset
from tests.spark.cluster import SPECULATIVE, Driver, StandaloneCluster
from tests.spark.history_program import LEFT_OUT, Orders
from tests.spark.service import SparkService
from tests.spark.test_cluster import IN_THIS_CHECKOUT, TOO_SLOW
from tests.support.seeds import seeds

PROGRAM = Path(__file__).with_name("history_program.py")
PARTITIONS = 32
ROWS = 20
"""Of a chunk, in each partition of the source."""
CHUNK = PARTITIONS * ROWS
MESSAGE = 5
"""Events of a message, at most."""
PATIENCE = 240.0
"""Seconds for each answer of a driver, on a busy machine."""
CONNECT = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
}
TWO_AT_A_TIME = {"spark.cores.max": "2", "spark.executor.cores": "1"}
"""Two drivers have executors at the same time, each one on either worker."""
SHAPES: Final = ("plain", "parts", "threads", "empty", "now and then", "connect")


class DriverDiedError(Exception):
    """A driver has died before it answered."""


class Conversation:
    """A driver, and the socket by which it gets commands."""

    def __init__(self, driver: Driver, listening: socket.socket) -> None:
        self.driver = driver
        self._socket, _ = listening.accept()
        self._socket.settimeout(PATIENCE)
        self._lines = self._socket.makefile("rw")
        self.application = self._answer().strip()
        """Spark's id of it."""

    def tell(self, *command: object) -> None:
        """Send a command, without waiting for the answer."""
        self._lines.write(f"{json.dumps(command)}\n")
        self._lines.flush()

    def answer(self) -> str | None:
        """Return the error of the last command, or None.

        Raises:
            DriverDiedError: It has died.
        """
        answered: str | None = json.loads(self._answer())
        return answered

    def _answer(self) -> str:
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            line = ""
        if not line:
            raise DriverDiedError
        return line

    def kill(self) -> None:
        """Kill it."""
        self.driver.kill()
        self._lines.close()
        self._socket.close()


class History:
    """A query from hub to hub, its drivers, and the troubles that it meets.

    Args:
        shape: How the query's function calls the sink.
        configuration: More of Spark's.
        options: The sink's, where they are not random at first.
    """

    def __init__(
        self,
        cluster: StandaloneCluster,
        service: SparkService,
        directory: Path,
        rng: random.Random,
        shape: str,
        configuration: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.cluster = cluster
        self.service = service
        self.rng = rng
        self.shape = shape
        self.source, self.target = service.new_hub(PARTITIONS), service.new_hub(PARTITIONS)
        self.checkpoint, self.ledger = directory / "checkpoint", directory / "ledger"
        self.late, self._copy = directory / "late", directory / "copy"
        self.orders = Orders(directory / "orders")
        for each in ("late", "orders"):
            (directory / each).mkdir()
        self.empty = (
            [each for each in range(1, 100) if rng.random() < 0.4] if shape in ("empty", "now and then") else []
        )
        self.evaluation = self.chunks = 0
        self.stopped: list[str] = []
        """Why the query has stopped, where it could not go on."""
        self.options: dict[str, Any] = {"max_batch_events": MESSAGE, "operation_timeout": 3600.0}
        self.deploy()
        self.options |= options
        self._configuration = {
            **SPECULATIVE,
            **TWO_AT_A_TIME,
            **(CONNECT if shape == "connect" else {}),
            **(configuration or {}),
        }
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(PATIENCE)
        self.driver = self.start()

    # ----------------------------------------------------------------------------------------- what is done

    def deploy(self, small_batches: str | None = None) -> None:
        """Change the sink's options, for the drivers that start from now on."""
        self.options |= {
            "small_batches": small_batches or self.rng.choice(("auto", "never")),
            "order_by": self.rng.choice(("n", ())),
            "stamp": self.rng.random() < 0.5,
            "max_tasks": self.rng.choice((2, 5)),
        }
        self.is_remote = self.rng.random() < 0.5

    def start(self) -> Conversation:
        """Start a driver and its query, whose rows differ from those of all others."""
        connection_string = self.service.connection_string
        settings = {
            "shape": self.shape,
            "port": self._listening.getsockname()[1],
            "orders": str(self.checkpoint.with_name("orders")),
            "late": str(self.late),
            "is_remote": self.is_remote,
            "empty": self.empty,
            "chunk": CHUNK,
            "checkpoint": str(self.checkpoint),
            "source": {
                "connectionString": connection_string,
                "hub": self.source,
                "startingPosition": "earliest",
                "partitionsPerTask": "8",
                # Two attempts at a task would take an exclusive link from each other.
                "useExclusiveReceiver": "false",
            },
            "sink": {
                "connection_string": connection_string,
                "hub": self.target,
                "sink_id": "sink",
                "ledger": str(self.ledger),
                **self.options,
            },
        }
        started = Conversation(
            self.cluster.submit(settings, configuration=self._configuration, app=PROGRAM), self._listening
        )
        self.tell_start(started)
        return started

    def tell_start(self, driver: Conversation) -> None:
        """Have a driver start its query."""
        self.evaluation += 1
        driver.tell("start", self.evaluation)
        assert driver.answer() is None, driver.driver.log

    def restart(self) -> None:
        """Kill the driver, and start another."""
        self.driver.kill()
        self.driver = self.start()

    def feed(self, *, settle_empty: bool = True) -> None:
        """Publish rows to the first hub, of which some are for the second: before them, chunks of which none is."""
        while True:
            self._publish(chunk := self.chunks)
            self.chunks += 1
            if chunk not in self.empty:
                return
            if settle_empty:
                self.settle()

    def _publish(self, chunk: int) -> None:
        async def publish() -> None:
            async with EventProducer(self.service.connection_string, self.source) as producer:
                for partition in range(PARTITIONS):
                    numbers = (PARTITIONS * each + partition for each in range(chunk * ROWS, (chunk + 1) * ROWS))
                    await producer.send([EventData(str(each)) for each in numbers], partition_id=str(partition))

        self.service.run(publish())

    def settle(self) -> None:
        """Wait until all that was fed is stored, with another driver if this one has died as it was ordered to."""
        while (problem := self.try_to_settle()) is not None:
            assert TOO_SLOW in problem, f"{problem}\n{self.driver.driver.log}"
            self.restart()

    def try_to_settle(self) -> str | None:
        """Wait until all that was fed is stored, or until it cannot be.

        Returns:
            The query's error, or None.
        """
        self.driver.tell("settle")
        try:
            return self.driver.answer()
        except DriverDiedError:
            return TOO_SLOW

    def hold(self, role: LinkRole, most: int, **where: Any) -> Fault:
        """Have the query come to a halt: nothing more is read, or nothing more is stored.

        Args:
            most: The most events, or messages, that pass before.
        """
        hub = self.source if role is LinkRole.CONSUMER else self.target
        where.setdefault("count", None)
        return self.service.add_fault(Hold(), role=role, hub=hub, after=self.rng.randrange(most), **where)

    def hold_sending(self) -> Fault:
        """Have the query come to a halt after some of a chunk's messages."""
        return self.hold(LinkRole.PRODUCER, CHUNK // MESSAGE // 2)

    def hold_reading(self) -> Fault:
        """Have the query come to a halt after some of a chunk's rows."""
        return self.hold(LinkRole.CONSUMER, CHUNK // 2)

    def await_halt(self, hold: Fault) -> None:
        """Wait until the query has come to a halt, with another driver if this one's query did not come to run."""
        while True:
            try:
                self.service.run(asyncio.wait_for(hold.until_fired(), PATIENCE))
            except TimeoutError:
                assert TOO_SLOW in self.driver.driver.log, self.driver.driver.log
                self.restart()
            else:
                return

    def release(self, hold: Fault) -> None:
        """Let the query go on."""
        self.service.call(hold.remove)

    def executors(self) -> list[int]:
        """Find the executors of the driver."""
        processes = map(psutil.Process, self.cluster.executors())
        return [each.pid for each in processes if self.driver.application in each.cmdline()]

    def kill_an_executor(self) -> None:
        """Kill one of the driver's executors."""
        os.kill(self.rng.choice(self.executors()), signal.SIGKILL)

    def with_tasks(self) -> None:
        """See to it that tasks write and publish, and not the driver."""
        if self.options["small_batches"] != "never":
            self.deploy("never")
            self.restart()

    def kept(self) -> list[str]:
        """Return the objects with rows that are kept."""
        return sorted(each.name for each in (self.ledger / "rows~").glob("sink*/0*"))

    def end(self) -> None:
        """End the driver."""
        self.driver.kill()
        self._listening.close()

    # ----------------------------------------------------------------------------------------- troubles

    def driver_dies_at_a_write(self) -> None:
        """Before, within or after a claim, the rows of a batch, a plan or its end."""
        record = self.rng.choice(("claim", "batch", "plan", "done"))
        moments = ("within", "after") if record == "batch" else ("before", "within", "after")
        self.orders.give(f"{self.rng.choice(moments)} {record}")
        self.feed(settle_empty=False)
        if record == "claim":
            self.driver.kill()
            self.evaluation += 1
            self.driver = self.start()
        self.settle()

    def driver_is_killed_half_way(self) -> None:
        """While some of a batch is stored: what follows has other rows."""
        hold = self.hold_sending()
        self.feed(settle_empty=False)
        self.await_halt(hold)
        self.driver.kill()
        self.release(hold)
        self.driver = self.start()

    def sink_is_deployed_in_mid_batch(self) -> None:
        """What follows has other rows, and another order, size of messages, way and number of tasks."""
        self.options["max_batch_events"] = self.rng.choice((3, 7))
        self.deploy()
        self.driver_is_killed_half_way()

    def ledger_is_restored(self) -> None:
        """An older copy: the query stops before it stores anything, and goes on with the newest."""
        self.feed()
        self.settle()
        self._copy.mkdir()
        copies = [self._copy / name for name in ("older", "newest")]
        shutil.copytree(self.ledger, copies[0])
        self.feed()
        self.settle()
        self.driver.kill()
        self.ledger.rename(copies[1])
        copies[0].rename(self.ledger)
        before = self.service.ends(self.target)
        self.feed(settle_empty=False)
        self.driver = self.start()
        while TOO_SLOW in (problem := self.try_to_settle() or "it went on"):
            self.restart()
        assert "is behind the hub" in problem, problem
        self.stopped.append(problem)
        self.driver.kill()
        assert self.service.ends(self.target) == before
        shutil.rmtree(self.ledger)
        copies[1].rename(self.ledger)
        shutil.rmtree(self._copy)
        self.driver = self.start()

    def rows_are_written_late(self) -> None:
        """After the batch is done and its rows are deleted: by a request that was not answered."""
        self.with_tasks()
        self.orders.give("late rows")
        self.feed()
        self.settle()
        (written,) = self.late.iterdir()
        written.rename(self.rng.choice(list((self.ledger / "rows~").glob("sink*"))) / written.name)
        assert written.name in self.kept()

    def kept_rows_are_damaged(self) -> None:
        """Or gone, when some are stored: the query stops, and goes on when they are there again."""
        hold = self.hold_sending()
        self.feed(settle_empty=False)
        self.await_halt(hold)
        self.driver.kill()
        self.release(hold)
        is_gone = self.rng.random() < 0.3
        copies = self.checkpoint.with_name("rows")
        shutil.copytree(self.ledger / "rows~", copies)
        for file in (self.ledger / "rows~").glob("sink*/0*"):
            raw = file.read_bytes()
            middle = len(raw) // 2
            if is_gone:
                file.unlink()
            else:
                file.write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])
        before = self.service.ends(self.target)
        self.driver = self.start()
        while TOO_SLOW in (problem := self.try_to_settle() or "it went on"):
            self.restart()
        assert re.search("is gone|are not the .* that were written|is damaged", problem), problem
        assert self.service.ends(self.target) == before
        self.stopped.append(problem)
        self.driver.kill()
        shutil.copytree(copies, self.ledger / "rows~", dirs_exist_ok=True)
        shutil.rmtree(copies)
        self.driver = self.start()

    def answers_are_lost(self) -> None:
        """Of messages, which are stored, one of them when it was repeated already; and of the ledger."""
        stored = self.service.add_fault(
            DropConnection(stored=True),
            role=LinkRole.PRODUCER,
            hub=self.target,
            after=self.rng.randrange(CHUNK // MESSAGE // 2),
            count=2,
        )
        late = self.service.add_fault(
            StoreLate(), role=LinkRole.PRODUCER, hub=self.target, after=self.rng.randrange(CHUNK // MESSAGE // 2)
        )
        self.orders.give(f"no answer {self.rng.choice(('plan', 'done'))}")
        self.feed()
        self.settle()
        assert stored.fired
        assert late.fired
        self.release(late)

    def two_drivers_run(self) -> None:
        """One is suspended half way, or before its plan, and wakes up when the other has published its batch: it
        stops."""
        if self.shape != "connect" and self.rng.random() < 0.5:
            self.orders.give("suspended plan")
            self.feed(settle_empty=False)
            former = self.driver
            process = former.driver.process.pid
            os.waitid(os.P_PID, process, os.WSTOPPED | os.WNOWAIT)
        else:
            hold = self.hold_sending()
            self.feed(settle_empty=False)
            self.await_halt(hold)
            former = self.driver
            process = former.driver.process.pid
            os.killpg(process, signal.SIGSTOP)
            self.release(hold)
        self.driver = self.start()
        self.settle()
        os.killpg(process, signal.SIGCONT)
        former.tell("settle")
        problem = former.answer()
        assert problem is not None
        assert "a later run of this query has begun" in problem, problem
        self.stopped.append(problem)
        former.kill()

    def executor_dies_while_it_encodes(self) -> None:
        """It reads, or has written its rows, or a part of them, and has not reported it."""
        if self.rng.random() < 0.5:
            self.with_tasks()
            self.orders.give(self.rng.choice(("within rows", "after rows")))
            self.feed()
        else:
            hold = self.hold_reading()
            self.feed(settle_empty=False)
            self.await_halt(hold)
            self.kill_an_executor()
            self.release(hold)
        self.settle()

    def executor_dies_while_it_publishes(self) -> None:
        """Another task goes on where it was."""
        self.with_tasks()
        hold = self.hold_sending()
        self.feed(settle_empty=False)
        self.await_halt(hold)
        self.kill_an_executor()
        self.release(hold)

    def worker_dies(self) -> None:
        """While rows are read or published; another one comes."""
        hold = self.rng.choice((self.hold_reading, self.hold_sending))()
        self.feed(settle_empty=False)
        self.await_halt(hold)
        self.rng.choice(self.cluster.workers).kill()
        self.cluster.start_worker()
        self.release(hold)

    def query_is_started_again_in_one_process(self) -> None:
        """After its function failed, or it was stopped in mid-batch: with the same sink, and other rows."""
        how = self.rng.choice(("fail before", "fail between", "fail after", "stop"))
        if how == "fail between" and self.shape != "parts":
            how = "fail after"
        if how == "stop":
            hold = self.hold_sending()
            self.feed(settle_empty=False)
            self.await_halt(hold)
            self.driver.tell("stop")
            self.release(hold)
            self.driver.answer()
        else:
            self.orders.give(how)
            self.feed(settle_empty=False)
            problem = self.try_to_settle()
            assert problem is not None
        if not self.driver.driver.ended.done():
            self.tell_start(self.driver)

    def task_hangs_for_ever(self) -> None:
        """A second attempt at it reads, or publishes, what is left."""
        self.with_tasks()
        role = self.rng.choice((LinkRole.CONSUMER, LinkRole.PRODUCER))
        most = CHUNK // 2 if role is LinkRole.CONSUMER else CHUNK // MESSAGE // 2
        hold = self.hold(role, most, count=1)
        self.feed()
        self.settle()
        assert hold.fired
        self.release(hold)

    # ----------------------------------------------------------------------------------------- what must be true

    def require_exact(self) -> None:
        """Check that of each batch, or part of one, the rows of one evaluation are stored, each once, and in order."""
        found: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        parts = 2 if self.shape in ("parts", "threads") else 1
        for events in self.service.read(self.target).values():
            last: dict[str, int] = {}
            for event in events:
                number, evaluation, batch_id = map(int, event.body.split())
                assert event.partition_key is not None
                assert last.get(event.partition_key, -1) < number, f"{number} of batch {batch_id} is not in order"
                last[event.partition_key] = number
                found[batch_id, number % parts].append((evaluation, number))
        batches = self._batches()
        for batch_id, numbers in enumerate(batches):
            for part in range(parts):
                rows = found.pop((batch_id, part), [])
                evaluations = {evaluation for evaluation, _ in rows} or set(range(1, self.evaluation + 1))
                wanted = [
                    sorted(n for n in numbers if n % parts == part and self._is_row(n, each)) for each in evaluations
                ]
                assert rows == [] or len(evaluations) == 1, f"batch {batch_id} has rows of evaluations {evaluations}"
                assert sorted(number for _, number in rows) in wanted, f"batch {batch_id} is not exact"
        assert found == {}, "batches that Spark does not know were published"
        assert sorted(number for numbers in batches for number in numbers) == list(range(self.chunks * CHUNK))
        # An attempt that lost to a speculative one may write until Spark has killed it: the next batch deletes that.
        assert {int(each.partition(".")[0]) for each in self.kept()} <= {len(batches) - 1}
        assert self.orders.left == []

    def _is_row(self, number: int, evaluation: int) -> bool:
        return number // CHUNK not in self.empty and (number + evaluation) % LEFT_OUT != 0

    def _batches(self) -> list[list[int]]:
        """Return the numbers that each batch has, by Spark's checkpoint."""
        following = [dict.fromkeys(map(str, range(PARTITIONS)), 0)]
        files = {int(each.name): each for each in (self.checkpoint / "offsets").iterdir() if each.name.isdecimal()}
        assert sorted(files) == list(range(len(files)))
        for _, file in sorted(files.items()):
            offset = SourceOffset.from_json(json.loads(file.read_text().splitlines()[-1]))
            following.append(dict(offset.hubs[self.source].following))
        return [
            [
                PARTITIONS * sequence + int(partition)
                for partition, start in before.items()
                for sequence in range(start, after[partition])
            ]
            for before, after in pairwise(following)
        ]


TROUBLES: Final[tuple[Callable[[History], None], ...]] = (
    History.driver_dies_at_a_write,
    History.driver_is_killed_half_way,
    History.sink_is_deployed_in_mid_batch,
    History.ledger_is_restored,
    History.rows_are_written_late,
    History.answers_are_lost,
    History.two_drivers_run,
    History.executor_dies_while_it_encodes,
    History.executor_dies_while_it_publishes,
    History.worker_dies,
    History.query_is_started_again_in_one_process,
    History.task_hangs_for_ever,
    History.kept_rows_are_damaged,
)


@pytest.fixture(scope="module")
def wide_service() -> Iterator[SparkService]:
    """A service whose hubs have 32 partitions."""
    with SparkService({PARTITIONS: 130}) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A master and two workers, whose Python imports the package of this checkout."""
    with StandaloneCluster(tmp_path_factory.mktemp("cluster"), environment=IN_THIS_CHECKOUT) as started:
        yield started


@pytest.mark.timeout(1800)
@seeds(1, of=60)
def test_query_on_a_cluster_stores_every_row_once_in_random_histories(
    cluster: StandaloneCluster,
    wide_service: SparkService,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    seed: int,
) -> None:
    """32 partitions to 32: one trouble of each kind in thirteen seeds, with `--long` followed by another one."""
    rng = random.Random(seed)
    rounds, trouble = divmod(seed, len(TROUBLES))
    history = History(cluster, wide_service, tmp_path, rng, SHAPES[(trouble + rounds) % len(SHAPES)])
    troubles = [TROUBLES[trouble], *([rng.choice(TROUBLES)] if request.config.getoption("--long") else [])]
    try:
        for each in troubles:
            each(history)
            history.settle()
        history.feed()
        history.settle()
        history.require_exact()
    finally:
        history.end()
        wide_service.clear_faults()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_rows_that_differ_between_two_evaluations_within_a_job_stop_the_query(
    cluster: StandaloneCluster, wide_service: SparkService, tmp_path: Path
) -> None:
    """With `order_by`, an executor dies whose rows some tasks have read and others have not, where Spark does not
    compare what it evaluates again: the query stops before it sends anything, and publishes the batch when it is
    repeated."""
    configuration = {"spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "false"}
    options = {"order_by": "n", "small_batches": "never", "max_tasks": 4}
    history = History(cluster, wide_service, tmp_path, random.Random(0), "plain", configuration, **options)
    try:
        history.orders.give("after rows 3")
        history.feed()
        while TOO_SLOW in (problem := history.try_to_settle() or "it went on"):
            history.restart()
        assert "order_by: rows of batch 0 were others when Spark evaluated them again" in problem, problem
        assert set(wide_service.ends(history.target).values()) == {0}
        history.tell_start(history.driver)
        history.settle()
        history.feed()
        history.settle()
        history.require_exact()
    finally:
        history.end()
