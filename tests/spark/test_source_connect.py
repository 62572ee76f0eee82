"""The source under Spark Connect: the same rows, from a client that has nothing but the wire to the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import Row, SparkSession
from pyspark.sql.connect.session import SparkSession as ConnectSession

import eventpump.spark
from tests.spark.reading import BODIES, Key, key_of
from tests.spark.service import SparkService
from tests.spark.test_source_batch import warnings_of_registration


@pytest.fixture
def hub(connect: ConnectSession, service: SparkService) -> str:
    """A hub of two partitions, with three events."""
    eventpump.spark.register(connect)  # type: ignore[arg-type] # a Connect session is no classic one, and does the same
    name = service.new_hub(2)
    service.publish_all(name, {"0": [b"a", b"b"], "1": [b"c"]})
    return name


def options(service: SparkService, hub: str, **more: Any) -> dict[str, str]:
    return {"connectionString": service.connection_string, "hub": hub, **more}


def keys(rows: list[Row]) -> list[Key]:
    return sorted(map(key_of, rows))


EVENTS = [("0", 0, b"a"), ("0", 1, b"b"), ("1", 0, b"c")]


def test_connect_batch_reads_what_is_there(connect: ConnectSession, service: SparkService, hub: str) -> None:
    """A batch reads what is there; a wrong option is an error of the client, without secrets."""
    frame = connect.read.format("eventpump").schema(BODIES).options(**options(service, hub)).load()
    assert keys(frame.collect()) == EVENTS
    with pytest.raises(AnalysisException, match="did you mean failOnDataLoss") as caught:
        connect.read.format("eventpump").options(**options(service, hub, failOnDataLos="x")).load().collect()
    assert "SharedAccessKey" not in str(caught.value)


def test_connect_query_goes_on_from_its_checkpoint(
    connect: ConnectSession, service: SparkService, hub: str, checkpoint: str, tmp_path: Path
) -> None:
    """A query reads on from its checkpoint, run by run, in limited batches."""
    table = str(tmp_path / "table")

    def run() -> list[Key]:
        reader = connect.readStream.format("eventpump").schema(BODIES)
        frame = reader.options(**options(service, hub, startingPosition="earliest", maxEventsPerTrigger="2")).load()
        writer = frame.writeStream.format("parquet").option("path", table).option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(60)
        return keys(connect.read.parquet(table).collect())

    assert run() == EVENTS
    service.publish(hub, [b"d"], "1")
    assert run() == [*EVENTS, ("1", 1, b"d")]


def test_connect_register_twice_is_one_registration(connect: ConnectSession, spark: SparkSession, hub: str) -> None:
    """A second call sends nothing to the server, which would log a warning."""
    before = warnings_of_registration(spark)
    eventpump.spark.register(connect)  # type: ignore[arg-type] # as above
    assert warnings_of_registration(spark) == before
