"""A driver: rows of one hub to another, or to files. One argument: its settings, as JSON.

It is started by spark-submit, or, as the client of a Connect server in a JVM of its own, by Python. It uses nothing but
Spark and the package, as a user's program does, and prints `done` at the end.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession


def sink(options: dict[str, Any]) -> Any:
    """Make the sink, which with `small_batches` "switching" publishes each batch in one way or the other, by chance."""
    import eventpump.spark

    if options.get("small_batches") != "switching":
        return eventpump.spark.foreach_batch_producer(**options)
    make = eventpump.spark.foreach_batch_producer

    def switching(frame: DataFrame, batch_id: int) -> None:
        make(**{**options, "small_batches": random.choice(("auto", "never"))})(frame, batch_id)

    return switching


def main(settings: dict[str, Any]) -> None:
    artifact = settings.get("artifact")
    builder = SparkSession.builder if artifact is None else SparkSession.builder.remote("local[2]")
    spark = builder.getOrCreate()
    if artifact is not None:
        spark.addArtifact(artifact, pyfile=True)
    import eventpump.spark

    if settings.get("register"):
        eventpump.spark.register(spark)
    rows = spark.readStream.format("eventpump").options(**settings["source"]).load()
    events = rows.selectExpr(
        "body", "CAST(CAST(body AS STRING) AS BIGINT) AS n", "CAST(CAST(body AS STRING) % 28 AS STRING) AS partitionKey"
    )
    files = settings.get("files")
    if files is not None:
        writing = events.writeStream.format("parquet").option("path", files)
    else:
        writing = events.writeStream.foreachBatch(sink({"order_by": "n", **settings["sink"]}))
    writing.option("checkpointLocation", settings["checkpoint"]).trigger(availableNow=True).start().awaitTermination()
    if files is not None:
        print("rows", spark.read.parquet(files).distinct().count())  # noqa: T201 - what this program is for
    spark.stop()
    print("done", flush=True)  # noqa: T201 - what this program is for


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
