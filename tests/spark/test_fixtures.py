"""What Spark's tests stand on is as they take it to be."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.connect.session import SparkSession as ConnectSession

from eventpump.emulator.faults import DetachLink, LinkRole
from tests.spark.service import SparkService


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


def test_spark_runs_python_and_streams(spark: SparkSession, checkpoint: str) -> None:
    """Python workers run this interpreter, and a foreachBatch callback runs in this process."""
    assert spark.range(10).mapInArrow(_same, "id long").count() == 10
    seen: list[tuple[int, int]] = []

    def note(frame: DataFrame, batch_id: int) -> None:
        seen.append((batch_id, frame.count()))

    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    writer = rows.writeStream.foreachBatch(note).option("checkpointLocation", checkpoint)
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    assert seen == [(0, 5)]


def test_connect_reaches_the_same_spark(connect: ConnectSession) -> None:
    """The Connect client's queries run in the JVM of the session."""
    assert connect.range(10).mapInArrow(_same, "id long").count() == 10


def test_service_fixture_serves_synchronous_code(service: SparkService) -> None:
    """What is published is read back, by partition, with a link lost in between and a partition more."""
    hub = service.new_hub(2)
    fault = service.add_fault(DetachLink(), role=LinkRole.PRODUCER, hub=hub)
    service.publish_all(hub, {"0": [b"a", b"b"], "1": [b"c"]})
    service.add_partitions(hub, 1)
    service.publish(hub, [b"d"], "2")
    assert fault.fired == 1
    assert service.bodies(hub) == {"0": [b"a", b"b"], "1": [b"c"], "2": [b"d"]}
    assert service.ends(hub) == {"0": 2, "1": 1, "2": 1}
