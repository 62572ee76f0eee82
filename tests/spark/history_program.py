"""A driver of a random history: rows of one hub to another, by commands from a socket. One argument: its settings, as
JSON.

It answers each command with an error, or null. What its stores and its function do wrong, files order: see `Orders`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]  # it comes without types
from pyspark import InheritableThread, TaskContext
from pyspark.sql import DataFrame, SparkSession

from eventpump.errors import StoreError
from eventpump.spark import foreach_batch_producer
from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.rows.directory import DirectoryRowStore

KEYS = 96
"""Of the rows of one evaluation. The rows of a key are of one partition of the source, as it is a multiple of 32."""
LEFT_OUT = 7
"""Of so many rows each evaluation leaves out another one."""


class StumbleError(Exception):
    """The function of the query failed where a test wants it to."""


class Orders:
    """What processes shall do wrong: files, each of which is carried out once, by the process that deletes it.

    Args:
        group: The process group of the driver.
    """

    def __init__(self, directory: Path, group: int = 0) -> None:
        self._directory = directory
        self._group = group

    def give(self, order: str) -> None:
        """Create the file of an order."""
        (self._directory / order).touch()

    @property
    def left(self) -> list[str]:
        """Those that nobody has carried out."""
        return [each.name for each in self._directory.iterdir() if each.is_file()]

    def is_due(self, order: str) -> bool:
        """Take an order, if there is one."""
        try:
            (self._directory / order).unlink()
        except FileNotFoundError:
            return False
        return True

    def kill_driver(self) -> NoReturn:
        """Kill the driver, whose function this process runs."""
        os.killpg(self._group, signal.SIGKILL)
        self._kill_this()

    def suspend_driver(self) -> None:
        """Stop the driver, until a test lets it go on."""
        os.killpg(self._group, signal.SIGSTOP)
        if os.getpgrp() != self._group:  # under Connect
            os.kill(os.getpid(), signal.SIGSTOP)

    def kill_executor(self) -> NoReturn:
        """Kill the executor that this worker works for."""
        next(each for each in psutil.Process().parents() if each.name() == "java").kill()
        self._kill_this()

    def _kill_this(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives")


class OrderedLedger(DirectoryLedger):
    """A ledger in a directory, which fails as it is ordered to: `MOMENT RECORD`, such as `within plan`."""

    def __init__(self, path: Path, orders: Orders) -> None:
        super().__init__(path)
        self._orders = orders

    async def create(self, name: str, body: bytes) -> bool:
        record = next(each for each in ("claim", "plan", "done") if each in name)
        if self._orders.is_due(f"before {record}"):
            self._orders.kill_driver()
        if self._orders.is_due(f"suspended {record}"):
            self._orders.suspend_driver()
        if self._orders.is_due(f"within {record}"):
            os.link = lambda *_: self._orders.kill_driver()
        created = await super().create(name, body)
        if self._orders.is_due(f"after {record}"):
            self._orders.kill_driver()
        if self._orders.is_due(f"no answer {record}"):
            raise StoreError("create", "the answer was lost")
        return created


class OrderedRows(DirectoryRowStore):
    """A row store in a directory, which fails as it is ordered to: `MOMENT rows` in tasks, `MOMENT batch` in drivers.

    Args:
        late: Where requests are kept that were not answered, and whose objects a test writes later.
        is_remote: Whether what it keeps is compressed, as where objects go over a network.
    """

    def __init__(self, path: Path, orders: Orders, late: Path, *, is_remote: bool) -> None:
        super().__init__(path)
        self.is_remote = is_remote
        self._orders = orders
        self._late = late

    async def write(self, stem: str, parts: Sequence[bytes | memoryview]) -> str:
        in_task = TaskContext.get() is not None
        kind, kill = ("rows", self._orders.kill_executor) if in_task else ("batch", self._orders.kill_driver)
        if self._orders.is_due(f"within {kind}"):
            await super().write(stem, [b"".join(parts)[:-1]])
            kill()
        if self._orders.is_due(f"late {kind}"):
            (self._late / f"{stem.rpartition('/')[2]}.{uuid.uuid4().hex}").write_bytes(b"".join(parts))
            raise StoreError("write", "the answer was lost")
        name = await super().write(stem, parts)
        task = TaskContext.get()
        if self._orders.is_due(f"after {kind}") or (task and self._orders.is_due(f"after rows {task.partitionId()}")):
            kill()
        return name


def rows_of(frame: DataFrame, batch_id: int, evaluation: int, empty: Sequence[int], chunk: int) -> DataFrame:
    """Return the rows of a batch: others, and with other keys, in each evaluation."""
    numbers = frame.selectExpr("CAST(CAST(body AS STRING) AS BIGINT) AS n")
    chunks = ", ".join(map(str, (-1, *empty)))
    random = "CAST(pmod(hash(reflect('java.util.UUID', 'randomUUID')), 3) AS STRING)"
    return numbers.where(f"n DIV {chunk} NOT IN ({chunks}) AND (n + {evaluation}) % {LEFT_OUT} != 0").selectExpr(
        "n",
        f"CONCAT(CAST(n AS STRING), ' {evaluation} {batch_id}') AS body",
        f"CONCAT(CAST(n % {KEYS} AS STRING), ' {evaluation} ', {random}) AS partitionKey",
    )


def in_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Call functions at the same time."""
    errors: list[Exception] = []

    def call(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # it is raised below
            errors.append(error)

    threads = [InheritableThread(target=call, args=(each,)) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def main(settings: dict[str, Any]) -> None:
    shape, group = settings["shape"], os.getpgrp()
    orders = Orders(Path(settings["orders"]), group)
    with socket.create_connection(("127.0.0.1", settings["port"])) as connection, connection.makefile("rw") as lines:
        spark: Any = SparkSession.builder.getOrCreate()
        context = spark.sparkContext
        if shape == "connect":
            from pyspark.sql.connect.session import SparkSession as ConnectSession

            package = context._jvm.org.apache.spark.sql.connect.service
            port = getattr(getattr(package, "SparkConnectService$"), "MODULE$").localPort()
            spark = ConnectSession.builder.remote(f"sc://127.0.0.1:{port}").create()

        ledger = Path(settings["sink"]["ledger"])
        stores = {
            "ledger": OrderedLedger(ledger, orders),
            "rows": OrderedRows(ledger / "rows~", orders, Path(settings["late"]), is_remote=settings["is_remote"]),
        }
        publish = foreach_batch_producer(**{**settings["sink"], **stores})

        def each_batch(frame: DataFrame, batch_id: int, evaluation: int) -> None:
            rows = rows_of(frame, batch_id, evaluation, settings["empty"], settings["chunk"])
            if orders.is_due("fail before"):
                raise StumbleError
            if shape == "now and then":
                if not rows.isEmpty():
                    publish(rows, batch_id)
            elif shape in ("parts", "threads"):
                calls = [
                    partial(publish, rows.where(f"n % 2 = {rest}"), batch_id, part=part)
                    for rest, part in enumerate(("even", "odd"))
                ]
                if shape == "threads":
                    in_threads(calls)
                else:
                    calls[0]()
                    if orders.is_due("fail between"):
                        raise StumbleError
                    calls[1]()
            else:
                publish(rows, batch_id)
            if orders.is_due("fail after"):
                raise StumbleError

        query: Any = None

        def carry_out(command: str, evaluation: int = 0) -> None:
            nonlocal query
            if command == "start":
                source = spark.readStream.format("eventpump").options(**settings["source"]).load()
                writing = source.writeStream.foreachBatch(partial(each_batch, evaluation=evaluation))
                query = writing.option("checkpointLocation", settings["checkpoint"]).start()
            elif command == "settle":
                query.processAllAvailable()
            else:
                query.stop()

        lines.write(f"{context.applicationId}\n")
        lines.flush()
        while line := lines.readline():
            problem = None
            try:
                carry_out(*json.loads(line))
            except Exception as error:  # it is the answer
                problem = str(error)
            lines.write(f"{json.dumps(problem)}\n")
            lines.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
