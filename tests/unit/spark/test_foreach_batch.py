"""What the producer of `foreachBatch` does before it needs Spark."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from eventpump.errors import ConfigurationError
from eventpump.spark import foreach_batch_producer
from eventpump.spark.sink import foreach_batch

CONNECTION = "Endpoint=sb://localhost;SharedAccessKeyName=a;SharedAccessKey=eA==;UseDevelopmentEmulator=true"


def frame(body: DataType) -> Any:
    return SimpleNamespace(schema=StructType([StructField("body", body)]), sparkSession=SimpleNamespace())


def test_batch_whose_columns_are_refused_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """*No loss*: where the function goes on without that error, later batches fail; the batch can be called again."""
    published: list[int] = []

    class Publication:
        def __init__(self, *given: Any) -> None:
            self._batch = given[3]

        def publish(self) -> Any:
            published.append(self._batch.batch_id)
            return SimpleNamespace(sink=self._batch.sink, batch_id=self._batch.batch_id, receipts=(), bad_rows=0)

    monkeypatch.setattr(foreach_batch, "_Publication", Publication)
    publish = foreach_batch_producer(CONNECTION, "telemetry", sink_id="alerts", ledger=tmp_path)
    publish(frame(StringType()), 0)
    with pytest.raises(ConfigurationError, match="must be string or binary"):
        publish(frame(LongType()), 1)
    with pytest.raises(ConfigurationError, match="a call for batch 1 has failed"):
        publish(frame(StringType()), 2)
    publish(frame(StringType()), 1)
    publish(frame(StringType()), 2)
    assert published == [0, 1, 2]
