"""Source and sink on a standalone cluster, whose processes are killed; and the ways in which it gets the package."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark import cloudpickle

from eventpump.emulator.faults import Fault, Hold, LinkRole
from eventpump.spark import data_source
from eventpump.spark.data_source import EventPumpDataSource
from tests.spark.cluster import APP, SPECULATIVE, Driver, StandaloneCluster, environment_of
from tests.spark.service import SparkService
from tests.support.venv import python_with

ROOT = Path(__file__).parents[2]
OURS = ("aiohappyeyeballs>=2.4.4", "aiohttp>=3.10", "azure-storage-blob>=12.20", "pydantic>=2.7")
"""What the package needs."""
CONNECT = ("googleapis-common-protos>=1.71", "grpcio>=1.76", "grpcio-status>=1.76", "zstandard>=0.25")
"""What Spark Connect needs."""
PARTITIONS = 4
KEYS = 28
"""The rows of a key are of one partition of the source, as this is a multiple of four."""


class HubToHub:
    """A query from one hub to another, which several drivers may run, and what the second hub has to hold at the end.

    Args:
        rows: How many numbers the first hub holds.
    """

    def __init__(self, directory: Path, service: SparkService, rows: int, **sink: Any) -> None:
        self._service = service
        self._rows = rows
        self._source, self._target = service.new_hub(PARTITIONS), service.new_hub(PARTITIONS)
        self._sink = sink
        self._is_ordered = bool(sink.get("order_by", "n"))
        self._state = directory / self._target
        service.publish_all(
            self._source,
            {str(each): [b"%d" % number for number in range(each, rows, PARTITIONS)] for each in range(PARTITIONS)},
        )

    def settings(self, **source: str) -> dict[str, Any]:
        """Return what the application needs to know.

        Args:
            source: More options of the source.
        """
        connection_string = self._service.connection_string
        options = {"connectionString": connection_string, "hub": self._source, "startingPosition": "earliest"}
        sink = {"connection_string": connection_string, "hub": self._target, "sink_id": "sink"}
        return {
            "source": {**options, **source},
            "sink": {**sink, "ledger": str(self._state / "ledger"), **self._sink},
            "checkpoint": str(self._state / "checkpoint"),
        }

    def hold(self, place: LinkRole, after: int) -> Fault:
        """Have the query come to a halt: from then on nothing is read, or nothing is published.

        Args:
            place: CONSUMER for the first hub's events, which tasks read; PRODUCER for messages to the second hub.
            after: How many events, or messages, pass before.
        """
        hub = self._source if place is LinkRole.CONSUMER else self._target
        return self._service.add_fault(Hold(), role=place, hub=hub, after=after, count=None)

    def await_halt(self, hold: Fault, driver: Driver) -> bool:
        """Wait until the query has come to a halt.

        Returns:
            False if its driver has ended before.
        """

        async def halt() -> None:
            halted = asyncio.create_task(hold.until_fired())
            try:
                await asyncio.wait((halted, asyncio.wrap_future(driver.ended)), return_when=asyncio.FIRST_COMPLETED)
            finally:
                halted.cancel()

        self._service.run(halt())
        return hold.fired > 0

    def release(self, hold: Fault) -> None:
        """Let the query go on."""
        self._service.call(hold.remove)

    def require_exact(self) -> None:
        """Check that the second hub holds each row once, and with `order_by` those of a key in their order."""
        stored = self._service.bodies(self._target)
        numbers = [int(body) for bodies in stored.values() for body in bodies]
        assert len(numbers) == len(set(numbers)), "rows were published twice"
        assert sorted(numbers) == list(range(self._rows))
        by_key: defaultdict[int, list[int]] = defaultdict(list)
        for number in numbers:
            by_key[number % KEYS].append(number)
        assert not self._is_ordered or all(each == sorted(each) for each in by_key.values())


IN_THIS_CHECKOUT = {"PYTHONPATH": str(ROOT)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandaloneCluster]:
    """A master and two workers, whose Python imports the package of this checkout."""
    with StandaloneCluster(tmp_path, environment=IN_THIS_CHECKOUT) as started:
        yield started


BATCH = 1000
"""Rows of a batch, where everything is killed."""
MESSAGE = 20
"""Rows of a message there, at most."""
TOO_SLOW = "terminated with exception: Python worker failed to connect back"
"""Spark fails a query whose source does not start within ten seconds, as on a busy machine. No setting changes that."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("order_by", ["n", ()], ids=["ordered", "as they are"])
@pytest.mark.parametrize("small_batches", ["never", "auto", "switching"])
def test_killed_executors_workers_and_drivers_lose_and_repeat_no_row(
    cluster: StandaloneCluster, service: SparkService, small_batches: str, order_by: str | tuple[()]
) -> None:
    """*Everything killed*: six executors, a worker and three drivers, in any order, with speculation: each row once.

    Whether tasks publish, or the driver, or now these and now that. The query is held wherever it is when something is
    killed, so that it cannot end before.
    """
    rng = random.Random(f"{small_batches} {order_by}")
    victims = ["executor"] * 6 + ["worker"] + ["driver"] * 3
    rng.shuffle(victims)
    options = {"small_batches": small_batches, "order_by": order_by, "max_batch_events": MESSAGE}
    # From one halt to the next at most one batch is done.
    query = HubToHub(cluster.directory, service, (len(victims) + 2) * BATCH, **options)

    def start() -> Driver:
        # Two attempts at a task would take an exclusive link from each other.
        settings = query.settings(maxEventsPerTrigger=str(BATCH), useExclusiveReceiver="false")
        return cluster.submit(settings, configuration=SPECULATIVE)

    def hold_for(victim: str) -> Fault:
        # What reads is surely an executor; what publishes may be the driver.
        places = [LinkRole.CONSUMER] if victim == "executor" else [LinkRole.CONSUMER, LinkRole.PRODUCER]
        if small_batches == "never":
            places = [LinkRole.CONSUMER, LinkRole.PRODUCER]
        place = rng.choice(places)
        return query.hold(place, rng.randrange(BATCH if place is LinkRole.CONSUMER else BATCH // MESSAGE) * 4 // 5)

    driver = start()

    def await_halt(hold: Fault) -> None:
        nonlocal driver
        while not query.await_halt(hold, driver):
            assert TOO_SLOW in driver.log, driver.log
            driver = start()

    held = hold_for(victims[0])
    for following, victim in enumerate(victims, 1):
        await_halt(held)
        if victim == "driver":
            driver.kill()
            driver = start()
        elif victim == "worker":
            rng.choice(cluster.workers).kill()
            cluster.start_worker()
        else:
            # What an executor leaves behind reads for a moment after it was killed: wait for another one's reading.
            while not (running := cluster.executors()):
                another = query.hold(LinkRole.CONSUMER, 0)
                query.release(held)
                held = another
                await_halt(held)
            os.kill(rng.choice(running), signal.SIGKILL)
        before = held
        if following < len(victims):
            held = hold_for(victims[following])
        query.release(before)
    while driver.finish(1200.0) != 0:
        assert TOO_SLOW in driver.log, driver.log
        driver = start()
    query.require_exact()


# ------------------------------------------------------------------------------------- how the package gets there


class Shipment:
    """The package and what it needs, in the forms in which users give them to a cluster that has Spark alone.

    Attributes:
        python: An interpreter with Spark and nothing of ours.
        needed: A directory of what the package needs.
        everything: A directory of that and the package.
        wheel: The package, built for every platform.
    """

    def __init__(self, directory: Path) -> None:
        self.python = python_with(f"pyspark=={pyspark.__version__}", "pandas>=2.2,<3", "pyarrow>=18")
        self.needed, self.everything = directory / "needed", directory / "everything"
        self._directory = directory
        source = directory / "source"
        for name in ("eventpump", "pyspark_eventpump"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        self._pip("wheel", "--no-deps", "-w", directory, source)
        self.wheel = next(directory.glob("*.whl"))
        self._pip("install", "--target", self.needed, *OURS, *CONNECT)
        shutil.copytree(self.needed, self.everything)
        with zipfile.ZipFile(self.wheel) as zipped:
            zipped.extractall(self.everything)

    def _pip(self, command: str, *arguments: str | Path) -> None:
        done = subprocess.run(
            [self.python, "-m", "pip", command, "--quiet", "--no-input", *arguments],
            env={**os.environ, "EVENTPUMP_PURE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def zip_file(self) -> Path:
        """The wheel under a name that Spark takes for a zip file."""
        return Path(shutil.copy(self.wheel, self._directory / "eventpump.zip"))

    def archive(self) -> Path:
        """All of it in one file."""
        return Path(shutil.make_archive(str(self._directory / "packages"), "gztar", self.everything))


@pytest.fixture(scope="module")
def shipment(tmp_path_factory: pytest.TempPathFactory) -> Shipment:
    """The package, in all its forms."""
    return Shipment(tmp_path_factory.mktemp("shipment"))


@pytest.fixture(scope="module")
def bare_cluster(shipment: Shipment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A cluster whose Python has Spark alone."""
    with StandaloneCluster(tmp_path_factory.mktemp("cluster"), python=str(shipment.python), slots=1) as started:
        yield started


def test_data_source_is_loaded_where_the_package_is_not_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the reader process of a query, which Spark starts without the files of `--py-files`."""
    pickled = cloudpickle.dumps(EventPumpDataSource({"hub": "telemetry"}))  # type: ignore[no-untyped-call]  # it has no types
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    assert pickle.loads(pickled).options == {"hub": "telemetry"}
    assert sys.path == ["elsewhere", str(ROOT)]


def test_data_source_without_the_package_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the path is of another machine: one line with the interpreter, and what to do."""
    monkeypatch.setattr(data_source, "__file__", str(tmp_path / "gone.zip" / "eventpump" / "spark" / "data_source.py"))
    pickled = cloudpickle.dumps(EventPumpDataSource({}))  # type: ignore[no-untyped-call]  # it has no types
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"is not installed for .*python.*gone\.zip is not on this machine: install"):
        pickle.loads(pickled)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", ["path", "archive", "zip"])
def test_package_is_shipped_to_a_cluster(
    bare_cluster: StandaloneCluster, shipment: Shipment, service: SparkService, form: str
) -> None:
    """By a path on every machine, in an archive, and as a zip file, the last of which needs `register`."""
    arguments: list[str] = []
    if form == "path":
        driver_path = executor_path = f"{shipment.needed}{os.pathsep}{shipment.wheel}"
    elif form == "archive":
        arguments = ["--archives", f"{shipment.archive()}#packages"]
        driver_path, executor_path = str(shipment.everything), "./packages"
    else:
        arguments = ["--py-files", str(shipment.zip_file())]
        driver_path = executor_path = str(shipment.needed)
    query = HubToHub(bare_cluster.directory, service, 100)
    driver = bare_cluster.submit(
        {**query.settings(), "register": form == "zip"},
        *arguments,
        environment={"PYTHONPATH": driver_path},
        configuration={"spark.executorEnv.PYTHONPATH": executor_path},
    )
    assert driver.finish() == 0, driver.log
    query.require_exact()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_wheel_in_py_files_is_refused_with_what_to_do(
    bare_cluster: StandaloneCluster, shipment: Shipment, service: SparkService
) -> None:
    """Spark gives it to the driver alone: `register` says so, in one line."""
    driver = bare_cluster.submit(
        {**HubToHub(bare_cluster.directory, service, 4).settings(), "register": True},
        *("--py-files", str(shipment.wheel)),
        environment={"PYTHONPATH": str(shipment.needed)},
    )
    assert driver.finish() == 1
    assert f"no wheels: rename {shipment.wheel.name} to *.zip" in driver.log


@pytest.mark.long
@pytest.mark.timeout(900)
def test_package_is_an_artifact_of_a_connect_session(shipment: Shipment, service: SparkService, tmp_path: Path) -> None:
    """`addArtifact` of the zip file brings the source to a server whose Python has what it needs, and no package."""
    query = HubToHub(tmp_path, service, 100)
    settings = {**query.settings(), "artifact": str(shipment.zip_file()), "register": True}
    settings["files"] = str(tmp_path / "files")
    environment = environment_of(str(shipment.python), tmp_path)
    done = subprocess.run(
        [shipment.python, APP, json.dumps(settings)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(shipment.needed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows 100\n" in done.stdout
