"""A standalone cluster on this machine: a master, workers and drivers, each a process of its own that can be killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import util
from pathlib import Path
from typing import Any, Self

import psutil  # type: ignore[import-untyped]  # it comes without types

from eventpump.spark.java import java_home
from eventpump.spark.local import SHORT_LIVED

APP = Path(__file__).with_name("cluster_app.py")
SPECULATIVE = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.task.duration.threshold": "2s",
}
"""A second attempt at a task as soon as it takes a little longer than the others; without others, after 2 s."""
_START = 90.0
_PACKAGE = "org.apache.spark.deploy"
_HOSTS = ("127.0.0.1", "localhost")
"""This machine, under the names of two."""


class Daemon:
    """A master or a worker."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: Path, host: str, started: str
    ) -> None:
        self.host = host
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.said = ""
        self._lines: list[str] = []
        self._has_started = threading.Event()
        self._reading = threading.Thread(target=self._read, args=(re.compile(started),), daemon=True)
        self._reading.start()

    def _read(self, started: re.Pattern[str]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if not self.said and (found := started.search(line)):
                self.said = found.group()
                self._has_started.set()
        self._has_started.set()

    def await_start(self) -> str:
        """Wait until it runs.

        Returns:
            What it printed then.
        """
        assert self._has_started.wait(_START), "".join(self._lines)
        assert self.said, "".join(self._lines)
        return self.said

    def executors(self) -> list[int]:
        """Find the process ids of a worker's executors."""
        try:
            children = psutil.Process(self.process.pid).children()
            return [each.pid for each in children if each.name() == "java" and each.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """Kill it, without the processes that it has started."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Kill it with all its processes, and wait for their end."""
        if self.process.returncode is None or self.executors():
            _kill_group(self.process)
        self._reading.join(_START)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Driver:
    """A driver, as spark-submit runs it in client mode.

    Attributes:
        ended: Its exit code, once it has one; negative for a signal.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.ended: Future[int] = Future()
        self._log = log
        threading.Thread(target=lambda: self.ended.set_result(process.wait()), daemon=True).start()

    @property
    def log(self) -> str:
        """What it and Spark have printed."""
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill it, and its JVM."""
        _kill_group(self.process)

    def finish(self, timeout: float = 240.0) -> int:
        """Wait for its end.

        Returns:
            Its exit code, negative for a signal.
        """
        return self.ended.result(timeout)


class StandaloneCluster:
    """A master and two workers, and the drivers that were submitted to it. All of them end with the block.

    Args:
        directory: For the files of all of them.
        python: The interpreter of driver and executors, with a pyspark of its own.
        environment: More of the environment of master, workers and drivers.
        slots: How many tasks a worker runs at the same time, in one executor.
    """

    def __init__(
        self,
        directory: Path,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        slots: int = 2,
    ) -> None:
        self.directory = directory
        self._environment = {**environment_of(python, directory), **(environment or {})}
        self._home = Path(self._environment["SPARK_HOME"])
        self._drivers: list[Driver] = []
        self._daemons: list[Daemon] = []
        self._slots = slots
        self.master = ""

    def __enter__(self) -> Self:
        try:
            self.master = self._start("master.Master", started=r"spark://127\.0\.0\.1:\d+").await_start()
            for worker in [self._start_worker() for _ in _HOSTS]:
                worker.await_start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def workers(self) -> list[Daemon]:
        """The workers that run."""
        return [each for each in self._daemons[1:] if each.process.poll() is None]

    def executors(self) -> list[int]:
        """Find the process ids of all executors."""
        return [pid for worker in self.workers for pid in worker.executors()]

    def start_worker(self) -> Daemon:
        """Add a worker."""
        worker = self._start_worker()
        worker.await_start()
        return worker

    def submit(
        self,
        settings: Mapping[str, Any],
        *arguments: str,
        configuration: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        app: Path = APP,
    ) -> Driver:
        """Start a driver.

        Args:
            settings: Of the application.
            arguments: More of spark-submit.
            configuration: More of Spark's.
            environment: More of the driver's.
        """
        configured = {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": SHORT_LIVED,
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "4",
            "spark.task.maxFailures": "10",
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
            **(configuration or {}),
        }
        log = self.directory / f"driver-{len(self._drivers)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    str(self._home / "bin" / "spark-submit"),
                    *("--master", self.master, "--driver-java-options", SHORT_LIVED),
                    *(part for name, value in configured.items() for part in ("--conf", f"{name}={value}")),
                    *arguments,
                    str(app),
                    json.dumps(settings),
                ],
                cwd=self.directory,
                env={**self._environment, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        driver = Driver(process, log)
        self._drivers.append(driver)
        return driver

    def _start_worker(self) -> Daemon:
        work = self.directory / f"worker-{len(self._daemons)}"
        work.mkdir()
        options = ["--cores", str(self._slots), "--memory", "1g", "--work-dir", str(work), self.master]
        # Spark begins no speculative attempt on the host of the first one, and compares hosts by their names.
        hosts = [each.host for each in self.workers]
        host = min(_HOSTS, key=hosts.count)
        return self._start("worker.Worker", *options, host=host, started="Successfully registered with master")

    def _start(self, name: str, *options: str, host: str = _HOSTS[0], started: str) -> Daemon:
        command = [str(self._home / "bin" / "spark-class"), f"{_PACKAGE}.{name}", "--host", host]
        command += ["--port", "0", "--webui-port", "0", *options]
        daemon = Daemon(command, self._environment, self.directory, host, started)
        self._daemons.append(daemon)
        return daemon

    def _end(self) -> None:
        for driver in self._drivers:
            _kill_group(driver.process)
        for daemon in reversed(self._daemons):
            daemon.end()


def environment_of(python: str, directory: Path) -> dict[str, str]:
    """Return the environment of Spark's processes: without this one's settings of Python and Spark.

    Args:
        python: The interpreter of driver and executors.
        directory: For temporary files.
    """
    temporary = directory / "tmp"
    temporary.mkdir()
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SPARK_"))}
    return {
        **outer,
        "JAVA_HOME": str(java_home()),
        "SPARK_HOME": str(_spark_home(python)),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(temporary),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED,
        "SPARK_LAUNCHER_OPTS": SHORT_LIVED,
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
    }


def _spark_home(python: str) -> Path:
    """Find the Spark of an interpreter."""
    if python == sys.executable:
        found = util.find_spec("pyspark")
        assert found is not None
        assert found.origin is not None
        return Path(found.origin).parent
    command = [python, "-c", "import os, pyspark; print(os.path.dirname(pyspark.__file__))"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def _kill_group(process: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
