"""What the producer of `foreachBatch` does before it needs Spark."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr
from pyspark.sql.types import DataType, LongType, StringType, StructField, StructType

from eventpump.credentials import SharedKey
from eventpump.errors import ConfigurationError
from eventpump.spark import foreach_batch_producer
from eventpump.spark.sink import foreach_batch
from tests.support.memory_rows import MemoryRowStore
from tests.support.telemetry import Recording

CONNECTION = "Endpoint=sb://localhost;SharedAccessKeyName=a;SharedAccessKey=eA==;UseDevelopmentEmulator=true"


def frame(body: DataType) -> Any:
    return SimpleNamespace(schema=StructType([StructField("body", body)]), sparkSession=SimpleNamespace())


def test_query_that_connect_does_not_name_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That another query uses the sink cannot be found out then. A call by hand is not of such a query."""
    publish = foreach_batch_producer(CONNECTION, "telemetry", sink_id="sought", ledger=tmp_path)
    for server in (None, "sc://localhost", "sc://localhost"):
        if server is not None:
            monkeypatch.setenv("SPARK_CONNECT_LOCAL_URL", server)
        with pytest.raises(ConfigurationError, match="must be string or binary"):
            publish(frame(LongType()), 1)
        warned = [each for each in caplog.messages if "the sink 'sought': Spark Connect does not say which" in each]
        assert len(warned) == (server is not None)


def test_row_store_that_does_not_say_whether_it_is_remote_is_refused(tmp_path: Path) -> None:
    """Where the producer is created: tasks ask it only in a batch of many rows, which may come much later."""

    class Store(MemoryRowStore):
        is_remote = property()  # which nothing reads: as if it were not there

    with pytest.raises(ConfigurationError, match="rows: is a row store without `is_remote`"):
        foreach_batch_producer(CONNECTION, "telemetry", sink_id="alerts", ledger=tmp_path, rows=Store())
    foreach_batch_producer(CONNECTION, "telemetry", sink_id="alerts", ledger=tmp_path, rows=MemoryRowStore())


refused: list[str] = []
"""A text, for as long as the credential is refused."""


def credential() -> SharedKey:
    """Return the credential of a connection by import name."""
    if refused:
        raise OSError(refused[0])
    return SharedKey("a", SecretStr("eA=="))


@pytest.mark.parametrize("recording", [None, Recording()])
def test_batch_for_which_no_credential_is_there_is_missing(tmp_path: Path, recording: Recording | None) -> None:
    """*No loss*: likewise, where the credential cannot be had when the sink is called. Both calls are recorded."""
    publish = foreach_batch_producer(
        None,
        "telemetry",
        sink_id=f"credentials {recording}",
        ledger=tmp_path,
        fully_qualified_namespace="example.test",
        credential=f"{__name__}:credential",
        retry_timeout=0.1,
        telemetry=None if recording is None else recording.telemetry,
    )
    refused.append("no token")
    with pytest.raises(OSError, match="no token"):
        publish(frame(StringType()), 1)
    refused.clear()
    with pytest.raises(ConfigurationError, match="a call for batch 1 has failed"):
        publish(frame(StringType()), 2)
    if recording is not None:
        attributes = [dict(each.attributes or {}) for each in recording.spans("send")]
        assert [each["error.type"] for each in attributes] == ["OSError", "ConfigurationError"]
        assert {(each["server.address"], each["server.port"]) for each in attributes} == {("example.test", 5671)}


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
