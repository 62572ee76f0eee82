"""The foreachBatch producer while drivers, executors and their workers are killed: every row once, in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # it comes without types
import pytest
from pyspark.sql import SparkSession

from eventpump.emulator.faults import Fault, Hold, LinkRole
from tests.spark.cluster import SPECULATIVE, StandaloneCluster
from tests.spark.service import SparkService
from tests.spark.sinks import SinkHub, connected_workers, numbered_stream, run_query
from tests.support.venv import python_with

OLDER_SPARK = ("pyspark==3.5.7", "pandas>=2.2,<3", "pyarrow>=18", "psutil>=6", "setuptools<81")
OURS = ("aiohttp>=3.10", "azure-storage-blob>=12.20", "pydantic>=2.7")
"""What eventpump itself takes."""
ROOT = Path(__file__).parents[2]
ROWS = 60
"""A batch's; with 5 in a message, several messages go to each of three partitions."""
AS_THEY_ARE: dict[str, Any] = {"small_batches": "never", "order_by": ()}
"""The sink's options with which tasks keep rows in the order of the frame, as those of large batches by default."""
ORDERED: dict[str, Any] = {"small_batches": "never", "order_by": "n"}
CLUSTER = {
    "spark.executorEnv.PYTHONPATH": str(ROOT),
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "4",
    "spark.python.unix.domain.socket.enabled": "false",
}


class Drivers:
    """Runs drivers of one query, one after another or side by side. All of them, and their JVMs, end with the test."""

    def __init__(self, sink: SinkHub, directory: Path, checkpoint: str) -> None:
        self.sink = sink
        self.checkpoint = checkpoint
        self._directory = directory
        self._log = directory / "drivers.log"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        *,
        die_at: tuple[str, str] | None = None,
        master: str = "local[2,4]",
        spark: dict[str, str] | None = None,
        python: str = sys.executable,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        settings = {
            "directory": str(self._directory / f"driver-{len(self._started)}"),
            "checkpoint": self.checkpoint,
            "ledger": str(self.sink.ledger),
            "connection_string": self.sink.service.connection_string,
            "hub": self.sink.name,
            "rows": ROWS,
            "die_at": die_at,
            "master": master,
            "spark": spark or {},
            "options": {"max_batch_events": 5, **options},
        }
        with self._log.open("a") as log:
            driver = subprocess.Popen(
                [python, "-m", "tests.spark.sink_program", json.dumps(settings)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(driver)
        return driver

    def run(self, **settings: Any) -> int:
        """Run one to its end.

        Returns:
            Its exit code, negative for a signal.
        """
        return self.await_end(self.start(**settings))

    def await_end(self, driver: subprocess.Popen[bytes]) -> int:
        """Wait for the end of one.

        Returns:
            Its exit code, negative for a signal.
        """
        returncode = driver.wait()
        assert returncode in (0, -signal.SIGKILL), self._log.read_text()
        return returncode

    def batches(self) -> int:
        """Count the batches that Spark has committed."""
        return len([each for each in Path(self.checkpoint, "commits").glob("*") if each.name.isdigit()])

    def end(self) -> None:
        """Kill what is left."""
        for driver in self._started:
            try:
                os.killpg(driver.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            driver.communicate()


@pytest.fixture
def drivers(service: SparkService, tmp_path: Path, checkpoint: str) -> Iterator[Drivers]:
    """Drivers of one query on a hub of four partitions."""
    started = Drivers(SinkHub(service, tmp_path), tmp_path, checkpoint)
    yield started
    started.end()


@contextmanager
def held_midway(sink: SinkHub) -> Iterator[Fault]:
    """Let the first two messages to partition 1 be stored, and hold the third until the end of the block."""
    hold = sink.service.add_fault(Hold(), role=LinkRole.PRODUCER, hub=sink.name, partition="1", after=2)
    yield hold
    sink.service.call(hold.remove)


def test_killed_driver_is_followed_by_another(spark: SparkSession, drivers: Drivers) -> None:
    """*Driver killed between two sends*: its successor finds what is stored, and publishes the rest once."""
    with held_midway(drivers.sink):
        driver = drivers.start(**AS_THEY_ARE)
        drivers.sink.await_events("1", 10)
        driver.kill()
    driver.wait()
    assert drivers.batches() == 0
    run_query(numbered_stream(spark, ROWS), drivers.sink.writer(max_batch_events=5), drivers.checkpoint)
    drivers.sink.require_exactly(range(drivers.batches() * ROWS), is_ordered=False)


# ------------------------------------------------------------------------------------------------------ long


LEDGER_MOMENTS = [(record, moment) for record in ("plan", "done") for moment in ("before", "within", "after")]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("small_batches", ["auto", "never"])
def test_killed_drivers_at_every_write_of_the_ledger_lose_no_row(drivers: Drivers, small_batches: str) -> None:
    """*Driver killed before, within and after each write*: a chain of drivers, each of which dies, loses no row."""
    for die_at in LEDGER_MOMENTS:
        assert drivers.run(die_at=die_at, small_batches=small_batches) == -signal.SIGKILL
    assert drivers.run(small_batches=small_batches) == 0
    assert drivers.batches() > 1
    drivers.sink.require_exactly(range(drivers.batches() * ROWS))
    assert drivers.sink.kept() == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_driver_whose_workers_live_on_adds_nothing(drivers: Drivers) -> None:
    """A driver that is frozen while its successor publishes, and wakes up after, adds and harms nothing."""
    with held_midway(drivers.sink):
        old = drivers.start()
        drivers.sink.await_events("1", 10)
        os.killpg(old.pid, signal.SIGSTOP)
    assert drivers.run() == 0
    os.killpg(old.pid, signal.SIGCONT)
    old.wait()
    assert drivers.run() == 0
    drivers.sink.require_exactly(range(drivers.batches() * ROWS))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [ORDERED, AS_THEY_ARE], ids=["ordered", "as they are"])
def test_killed_executor_is_replaced(drivers: Drivers, options: dict[str, Any]) -> None:
    """*Executor killed*: the task goes to another, and the rows it had published are not published again."""
    with held_midway(drivers.sink):
        driver = drivers.start(master="local-cluster[2,1,1024]", spark=CLUSTER, **options)
        drivers.sink.await_events("1", 10)
        executors = {_executor_of(each).pid for each in connected_workers(drivers.sink.service, driver.pid)}
        assert executors
        assert driver.pid not in executors
        for pid in executors:
            os.kill(pid, signal.SIGKILL)
    assert drivers.await_end(driver) == 0
    drivers.sink.require_exactly(range(ROWS), is_ordered=options is ORDERED)


def _executor_of(worker: psutil.Process) -> psutil.Process:
    """Find the JVM that a Python worker works for."""
    return next(each for each in worker.parents() if each.name() == "java")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [ORDERED, AS_THEY_ARE], ids=["ordered", "as they are"])
def test_speculative_attempts_store_rows_once(drivers: Drivers, tmp_path: Path, options: dict[str, Any]) -> None:
    """*Speculation*: an attempt that hangs is overtaken by another, which goes on where the first one was."""
    # Spark begins the second attempt on another host only, which no local-cluster has. The first attempt would wait for
    # an hour, and nothing releases it: what publishes the rest can only be the second.
    with StandaloneCluster(tmp_path) as cluster, held_midway(drivers.sink) as hold:
        spark = {**CLUSTER, **SPECULATIVE}
        driver = drivers.start(master=cluster.master, spark=spark, operation_timeout=3600.0, **options)
        assert drivers.await_end(driver) == 0
        assert hold.fired
    drivers.sink.require_exactly(range(ROWS), is_ordered=options is ORDERED)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_killed_driver_with_all_processes_is_continued(drivers: Drivers, share: float) -> None:
    """*Power cut* at any point of the sending: driver, JVM and workers end at once."""
    messages = max(1, int(share * ROWS * 3 / 7 / 5))
    hold = drivers.sink.service.add_fault(
        Hold(), role=LinkRole.PRODUCER, hub=drivers.sink.name, partition="3", after=messages
    )
    driver = drivers.start()
    drivers.sink.await_events("3", messages * 5)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    drivers.sink.service.call(hold.remove)
    assert drivers.run() == 0
    drivers.sink.require_exactly(range(drivers.batches() * ROWS))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_spark_3_5_publishes_and_replays_exactly(drivers: Drivers) -> None:
    """Where Spark can only spread rows by a hash, each hub partition is still one task's, and a replay is exact."""
    python = str(python_with(*OLDER_SPARK, *OURS))
    assert drivers.run(python=python, die_at=("done", "before")) == -signal.SIGKILL
    assert drivers.run(python=python) == 0
    assert drivers.batches() == 2
    drivers.sink.require_exactly(range(2 * ROWS))
