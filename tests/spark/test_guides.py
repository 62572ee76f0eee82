"""The guides to Spark: their programs run as they stand, one block after the other, and do what the text says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from eventpump import EventData, EventProducer, PartitionReader
from eventpump.emulator.config import HubSpec
from eventpump.spark.connection import CONNECTION_OPTIONS
from eventpump.spark.sink.columns import EventColumns
from eventpump.spark.sink.data_source_writer import WRITER_OPTIONS
from eventpump.spark.sink.foreach_batch import SinkSettings
from eventpump.spark.source.options import SOURCE_OPTIONS, WITHOUT_EFFECT
from eventpump.spark.source.schema import ALL_TYPES
from eventpump.testing.threaded import EmulatorThread
from tests.support.pages import ROOT, python_blocks

DOCS = ROOT / "docs"


@pytest.fixture
def hubs() -> Iterator[EmulatorThread]:
    """The service that the guides speak of; one for each, as they count what is in its hubs."""
    specs = [HubSpec("orders", 2, ("notebook",)), *(HubSpec(name, 2) for name in ("totals", "refunds", "copy"))]
    with EmulatorThread(specs) as service:
        yield service


def _publish(service: EmulatorThread, hub: str, bodies: list[str]) -> None:
    async def go() -> None:
        async with EventProducer(service.connection_string, hub) as producer:
            await producer.send([EventData(body, properties={"n": 5}) for body in bodies], partition_key="k")

    service.run(go())


def _read(service: EmulatorThread, hub: str) -> list[tuple[bytes, str | None, dict[str, Any]]]:
    async def go() -> list[tuple[bytes, str | None, dict[str, Any]]]:
        found = []
        for partition_id in ("0", "1"):
            reader = PartitionReader(service.connection_string, hub, partition_id=partition_id, end="@latest")
            async with reader:
                found += [(event.body, event.partition_key, event.properties) async for event in reader]
        return sorted(found, key=repr)

    return service.run(go())


def _run(page: str, spark: SparkSession, service: EmulatorThread, directory: Path, **more: str) -> dict[str, Any]:
    """Run the blocks of a page, and return what they define.

    Args:
        more: What else the page takes as given.
    """
    known: dict[str, Any] = {
        "spark": spark,
        "connection_string": service.connection_string,
        "ledger": str(directory / "ledger"),
        "checkpoint": str(directory / "checkpoint"),
        **more,
    }
    for number, block in enumerate(python_blocks(DOCS / page), 1):
        exec(compile(block, f"{page} {number}", "exec"), known)
    return known


def test_guide_from_kafka_reads_and_publishes(spark: SparkSession, hubs: EmulatorThread, tmp_path: Path) -> None:
    """Its query has the rows in upper case, and its function divides a batch between two hubs."""
    _publish(hubs, "orders", ["order 1", "refund 2"])
    before = len(_read(hubs, "totals"))
    known = _run("from-kafka-in-spark.md", spark, hubs, tmp_path)
    assert (b"ORDER 1", "k", {}) in _read(hubs, "totals")
    assert known["query"].exception() is None
    rows = [("a", "order 9", 1), ("b", "refund 9", 2)]
    known["divide"](spark.createDataFrame(rows, "partitionKey string, body string, sequenceNumber long"), 0)
    assert (b"order 9", "a", {}) in _read(hubs, "totals")
    assert _read(hubs, "refunds") == [(b"refund 9", "b", {})]
    assert len(_read(hubs, "totals")) == before + 3


def test_guide_to_exactly_once_publishes_and_copies(spark: SparkSession, hubs: EmulatorThread, tmp_path: Path) -> None:
    """Its query publishes each row once, also when it is started again; its copy keeps keys and types, and is the same
    when it is repeated after more events have come."""
    _publish(hubs, "orders", ["a", "b"])
    orders, before = _read(hubs, "orders"), len(_read(hubs, "totals"))
    until = datetime.now(UTC).isoformat()
    _run("spark-exactly-once.md", spark, hubs, tmp_path, until=until)
    assert len(_read(hubs, "totals")) == before + len(orders)
    assert _read(hubs, "copy") == orders
    assert {type(value) for _, _, properties in orders for value in properties.values()} == {int}
    _publish(hubs, "orders", ["c"])
    _run("spark-exactly-once.md", spark, hubs, tmp_path, until=until)
    assert len(_read(hubs, "totals")) == before + len(orders) + 1
    assert _read(hubs, "copy") == orders


def test_guide_to_notebooks_looks_runs_and_stops(
    spark: SparkSession, hubs: EmulatorThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells can be run twice; the group that it looks with exists."""
    _publish(hubs, "orders", ["look"])
    _run("spark-notebooks.md", spark, hubs, tmp_path)
    known = _run("spark-notebooks.md", spark, hubs, tmp_path)
    assert "look" in capsys.readouterr().out
    assert not known["query"].isActive
    assert (b"LOOK", "k", {}) in _read(hubs, "totals")


_OPTIONS = {name.lower() for name in (*SOURCE_OPTIONS, *CONNECTION_OPTIONS, *WITHOUT_EFFECT, *WRITER_OPTIONS)}
_SINK = {*SinkSettings.model_fields, "on_receipt"}
_COLUMNS = {*ALL_TYPES, "partitionId", "messageId", "correlationId", "contentType"}


@pytest.mark.parametrize("page", ["from-kafka-in-spark.md", "spark-tuning.md"])
def test_names_that_guides_promise_exist(page: str) -> None:
    """What stands in the column of eventpump, or of settings, is an option or a column, or an expression of Spark."""
    text = (DOCS / page).read_text(encoding="utf-8")
    column = 1 if "kafka" in page else 0
    checked = 0
    for row in re.findall(r"^\| (?!-)(.*) \|$", text, re.M):
        cell = row.split(" | ")[column]
        for name in re.findall(r"`([a-zA-Z_]+)`", cell):
            checked += 1
            is_known = name.lower() in _OPTIONS or name in _SINK or name in _COLUMNS
            assert is_known or name in {"trigger", "addBatch", "latestOffset"}, f"{page}: {name}"
    assert checked > 15


def test_columns_of_the_sink_are_documented() -> None:
    """Each column that the sink takes is on the page of options and columns."""
    text = (DOCS / "from-the-scala-connector.md").read_text(encoding="utf-8")
    documented = inspect.getdoc(EventColumns) or ""
    names = {"body", *re.findall(r"^    [a-z_]+: `(\w+)`", documented, re.M)}
    assert len(names) > 10
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
