"""`examples/spark_pipeline.py`, on the session that all tests share."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.service import SparkService

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_pipeline.py"


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("spark_pipeline", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_example_publishes_each_bar_of_trades_once(
    spark: SparkSession, service: SparkService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run twice with --once, it publishes a bar per symbol and window exactly once, by symbol and in order."""
    example = _example()
    source, target = service.new_hub(2), service.new_hub(2)
    args = argparse.Namespace(
        connection_string=service.connection_string,
        source=source,
        target=target,
        state=tmp_path,
        window="5 seconds",
        late="10 seconds",
        once=True,
    )
    asyncio.run(example.make_trades(service.connection_string, source, 300))
    trades = [json.loads(body) for bodies in service.bodies(source).values() for body in bodies]
    for _ in range(2):
        example.run(spark, args)
    published = service.read(target)
    bars = [json.loads(event.body) for events in published.values() for event in events]
    # The last trade closes the windows of the others, and not its own.
    assert sum(bar["volume"] for bar in bars) == sum(trade["size"] for trade in trades) - 1
    places = [(bar["window"]["start"], bar["symbol"]) for bar in bars]
    assert len(places) == len(set(places))
    for events in published.values():
        starts = [json.loads(event.body)["window"]["start"] for event in events]
        assert starts == sorted(starts)
        assert all(event.partition_key == json.loads(event.body)["symbol"] for event in events)
    assert f"{len(bars)} bars published" in capsys.readouterr().out


def test_example_without_a_connection_string_has_a_service_of_its_own(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends when all trades are processed, and keeps no state where another run would find it."""
    example = _example()
    args = argparse.Namespace(
        connection_string=None,
        source="trades",
        target="bars",
        state=tmp_path / "elsewhere",
        window="5 seconds",
        late="10 seconds",
        once=False,
        make_trades=None,
    )
    with ExitStack() as stack:
        example.use_local_service(stack, args, tmp_path / "own")
        asyncio.run(example.make_trades(args.connection_string, args.source, 300))
        example.run(spark, args)
    assert (args.once, args.make_trades) == (True, 5000)
    assert not (tmp_path / "elsewhere").exists()
    assert "bars published" in capsys.readouterr().out
