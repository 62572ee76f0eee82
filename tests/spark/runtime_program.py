"""What works on one Spark: a program that tries each feature on the pyspark of its interpreter, beside one service.

Prints a JSON object: by feature "yes", or the text of what stopped it. It runs in environments without this checkout's
test dependencies, and imports eventpump and pyspark only.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eventpump
from eventpump.spark import foreach_batch_producer
from eventpump.spark.local import local_session

EVENTS = 60
"""How many events each partition of a hub gets, of two."""


class Trial:
    """One session, and the hubs that the features are tried on.

    Args:
        connection_string: That of the service, which has the hubs `in-0` to `in-9` and `out-0` to `out-9`.
        directory: For all files.
    """

    def __init__(self, connection_string: str, directory: Path) -> None:
        self.connection_string = connection_string
        self.directory = directory
        self.spark: Any = local_session(
            directory,
            settings={
                "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
                "spark.connect.grpc.binding.address": "127.0.0.1",
                "spark.connect.grpc.binding.port": "0",
            }
            if _has_connect()
            else None,
        )
        self._hubs = iter(range(10))

    def filled(self) -> str:
        """Return a hub with `EVENTS` events in each of its two partitions."""
        hub = f"in-{next(self._hubs)}"
        self.publish(hub, EVENTS)
        return hub

    def publish(self, hub: str, count: int) -> None:
        async def go() -> None:
            async with eventpump.EventProducer(self.connection_string, hub) as producer:
                for partition_id in ("0", "1"):
                    events = [eventpump.EventData(str(number)) for number in range(count)]
                    await producer.send(events, partition_id=partition_id)

        asyncio.run(go())

    def stored(self, hub: str) -> list[str]:
        """Return the bodies of all events of a hub, in text order."""

        async def go() -> list[str]:
            found = []
            for partition_id in ("0", "1"):
                reader = eventpump.PartitionReader(
                    self.connection_string, hub, partition_id=partition_id, end="@latest"
                )
                async with reader:
                    found += [event.body_as_str() async for event in reader]
            return sorted(found)

        return asyncio.run(go())

    def options(self, hub: str, **more: str) -> dict[str, str]:
        return {"connectionString": self.connection_string, "hub": hub, **more}

    def checkpoint(self) -> str:
        return tempfile.mkdtemp(dir=self.directory)

    # ------------------------------------------------------------------------------------------------- features

    def batch(self) -> None:
        """A batch reads all rows."""
        self._register(self.spark)
        frame = self.spark.read.format("eventpump").options(**self.options(self.filled())).load()
        _equal(frame.selectExpr("string(body)").count(), 2 * EVENTS)

    def query(self) -> None:
        """A query reads all rows, those that come while it runs too, and continues at its checkpoint."""
        hub, checkpoint, rows = self.filled(), self.checkpoint(), set[tuple[str, int]]()

        def take(frame: Any, _: int) -> None:
            # A batch that was not committed when the query was stopped is repeated.
            rows.update((row[0], row[1]) for row in frame.select("partition", "sequenceNumber").collect())

        def run(until: int) -> None:
            writer = self._stream(hub).writeStream.foreachBatch(take)
            query = writer.option("checkpointLocation", checkpoint).start()
            _wait_for(query, lambda: len(rows) >= until)
            query.stop()

        run(2 * EVENTS)
        self.publish(hub, 5)
        run(2 * EVENTS + 10)
        _equal(len(rows), 2 * EVENTS + 10)

    def available_now(self) -> None:
        """A query with `availableNow` ends after several limited batches, without what came after its start."""
        hub, sizes = self.filled(), list[int]()

        def take(frame: Any, _: int) -> None:
            sizes.append(len(_bodies(frame)))
            if len(sizes) == 1:
                self.publish(hub, 5)

        frame = self._stream(hub, maxEventsPerTrigger="40")
        query = frame.writeStream.foreachBatch(take).option("checkpointLocation", self.checkpoint())
        started = query.trigger(availableNow=True).start()
        assert started.awaitTermination(90), "it does not end"
        _equal(sizes, [40, 40, 40])

    def limit(self) -> None:
        """No batch has more than `maxEventsPerTrigger` rows."""
        hub, sizes = self.filled(), list[int]()
        frame = self._stream(hub, maxEventsPerTrigger="40")
        writer = frame.writeStream.foreachBatch(lambda df, _: sizes.append(len(_bodies(df))))
        query = writer.option("checkpointLocation", self.checkpoint()).start()
        _wait_for(query, lambda: sum(sizes) >= 2 * EVENTS)
        query.stop()
        assert max(sizes) <= 40, f"the batches have {sizes} rows"

    def exactly_once(self) -> None:
        """`foreach_batch_producer` publishes the rows of a query, each once, also over a restart."""
        checkpoint = self.checkpoint()
        files = self.directory / "rows"
        publish = foreach_batch_producer(
            self.connection_string, "out-0", sink_id="trial", ledger=str(self.directory / "ledger")
        )
        for number in range(2):
            files.mkdir(exist_ok=True)
            (files / f"{number}.txt").write_text("".join(f"{number}-{line}\n" for line in range(50)))
            frame = self.spark.readStream.text(str(files)).selectExpr("value AS body", "value AS partitionKey")
            query = frame.writeStream.foreachBatch(publish).option("checkpointLocation", checkpoint)
            assert query.trigger(availableNow=True).start().awaitTermination(90), "it does not end"
        _equal(self.stored("out-0"), sorted(f"{number}-{line}" for number in range(2) for line in range(50)))

    def batch_writer(self) -> None:
        """`format("eventpump")` writes a batch."""
        frame = self.spark.range(50).selectExpr("string(id) AS body")
        frame.write.format("eventpump").options(**self.options("out-1")).mode("append").save()
        _equal(self.stored("out-1"), sorted(map(str, range(50))))

    def stream_writer(self) -> None:
        """`format("eventpump")` writes a query."""
        files = self.directory / "more-rows"
        files.mkdir()
        (files / "0.txt").write_text("".join(f"{line}\n" for line in range(50)))
        frame = self.spark.readStream.text(str(files)).selectExpr("value AS body")
        writer = frame.writeStream.format("eventpump").options(**self.options("out-2"))
        query = writer.option("checkpointLocation", self.checkpoint()).trigger(availableNow=True).start()
        assert query.awaitTermination(90), "it does not end"
        _equal(self.stored("out-2"), sorted(map(str, range(50))))

    def connect(self) -> None:
        """A Connect client reads a batch."""
        from pyspark.sql.connect.session import SparkSession

        package = self.spark._jvm.org.apache.spark.sql.connect.service
        port = getattr(getattr(package, "SparkConnectService$"), "MODULE$").localPort()
        client: Any = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").create()
        self._register(client)
        _equal(client.read.format("eventpump").options(**self.options(self.filled())).load().count(), 2 * EVENTS)
        client.stop()

    def _register(self, spark: Any) -> None:
        from eventpump.spark import register  # Spark 3.5 has none of it

        register(spark)

    def _stream(self, hub: str, **more: str) -> Any:
        self._register(self.spark)
        options = self.options(hub, startingPosition="earliest", **more)
        return self.spark.readStream.format("eventpump").options(**options).load()


FEATURES: dict[str, Callable[[Trial], None]] = {
    "batch": Trial.batch,
    "query": Trial.query,
    "limit": Trial.limit,
    "availableNow": Trial.available_now,
    "connect": Trial.connect,
    "exactly once": Trial.exactly_once,
    "batch writer": Trial.batch_writer,
    "stream writer": Trial.stream_writer,
}
"""How each feature is tried: it returns, or raises what stops it."""


def _has_connect() -> bool:
    try:
        import grpc  # type: ignore[import-untyped, unused-ignore] # noqa: F401 - in some environments
        import pyspark

        return any((Path(pyspark.__file__).parent / "jars").glob("spark-connect_*.jar"))
    except ImportError:
        return False


def _bodies(frame: Any) -> list[str]:
    return [row[0] for row in frame.selectExpr("string(body)").collect()]


def _equal(found: object, expected: object) -> None:
    assert found == expected, f"{found}, and not {expected}"


def _wait_for(query: Any, is_done: Callable[[], bool]) -> None:
    """Wait until a running query has done something; a minute and a half at most."""
    until = time.monotonic() + 90
    while not is_done():
        assert time.monotonic() < until, "nothing more came for 90 s"
        if query.awaitTermination(0.2):
            raise AssertionError("the query ended by itself")


def main() -> None:
    """Try all features with the connection string from the standard input, and print what came of each."""
    import pyspark

    found = {"pyspark": pyspark.__version__}
    with tempfile.TemporaryDirectory() as directory:
        trial = Trial(sys.stdin.readline().strip(), Path(directory))
        for name, attempt in FEATURES.items():
            try:
                attempt(trial)
                found[name] = "yes"
            except Exception as error:
                lines = [line for line in str(error).splitlines() if line.strip()]
                found[name] = f"{type(error).__name__}: {' / '.join([*lines[:1], *lines[-1:]])[:600]}"
        trial.spark.stop()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
