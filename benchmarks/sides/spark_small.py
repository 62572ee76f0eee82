"""The side of `spark-small`: a query from hub to hub on a Spark of two slots."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it comes without types

from benchmarks.processes import READY
from benchmarks.sides.spark_sink import ledger_of
from eventpump.spark import BatchReceipt, foreach_batch_producer
from eventpump.spark.data_source import register
from eventpump.spark.local import local_session


def _cpu() -> float:
    """Return the seconds of CPU of Spark and all its workers."""
    total = 0.0
    for each in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return float(total)


def query(connection_string: str, watch: str, small_batches: str, warm_up: int, blob: str = "") -> dict[str, float]:
    """Count the source's events by their body, and publish each change, until a line comes.

    Prints a line with the number of rows after each batch.

    Args:
        watch: The consumer group in which the query watches its source.
        warm_up: The rows after which CPU and batches are counted.
        blob: As of `spark_sink.ledger_of`.

    Returns:
        `cpu` in seconds, and `batches`.
    """
    os.environ["PYTHONPATH"] = os.getcwd()
    rows_seen = batches = 0
    cpu: float | None = None

    def told(receipt: BatchReceipt) -> None:
        nonlocal rows_seen, batches, cpu
        if not receipt.count:
            return
        rows_seen += receipt.count
        if cpu is not None:
            batches += 1
        elif rows_seen >= warm_up:
            cpu = _cpu()
        print(receipt.count, flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        settings = {
            "spark.python.authenticate.socketTimeout": "120s",
            # As the guide on tuning advises for a checkpoint on a local disk.
            "spark.sql.streaming.checkpointFileManagerClass": (
                "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
            ),
        }
        spark = local_session(Path(directory), master="local[2]", is_short=False, settings=settings)
        register(spark)
        events = spark.readStream.format("eventpump").option("connectionString", connection_string)
        options = {"hub": "source", "startingPosition": "earliest", "watchConsumerGroup": watch}
        counts = events.options(**options).load().groupBy("body").count()
        rows = counts.selectExpr(
            "concat(CAST(body AS STRING), ' ', CAST(count AS STRING)) AS body", "CAST(body AS STRING) AS partitionKey"
        )
        sink = foreach_batch_producer(
            connection_string,
            "target",
            sink_id="bench",
            ledger=ledger_of(blob, f"{directory}/ledger"),
            on_receipt=told,
            small_batches=small_batches,  # type: ignore[arg-type]  # the argument came as JSON
        )
        writing = rows.writeStream.outputMode("update").foreachBatch(sink)
        running = writing.option("checkpointLocation", f"{directory}/checkpoint").start()
        print(READY, flush=True)
        sys.stdin.readline()
        assert cpu is not None
        spent = _cpu() - cpu
        running.stop()
        spark.stop()
    return {"cpu": spent, "batches": batches}
