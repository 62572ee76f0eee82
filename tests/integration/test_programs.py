"""The programs that the README shows: the examples and the demo, as a newcomer would run them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from eventpump.emulator.server import Emulator
from eventpump.testing.fixtures import eventpump_emulator
from tests.ways import need_uamqp

__all__ = ["eventpump_emulator"]

ROOT = Path(__file__).parents[2]
_LIMIT = 100


def _run(*arguments: str, without: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in without}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False
    )


async def test_examples_publish_and_consume(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """What `examples/produce.py` publishes, `examples/consume.py` reads, all of it."""
    connection = ["--connection-string", eventpump_emulator.connection_string]
    published = await asyncio.to_thread(_run, "examples/produce.py", *connection, "--events", "500")
    assert published.returncode == 0, published.stderr
    leases = str(tmp_path / "leases.db")
    consumed = await asyncio.to_thread(_run, "examples/consume.py", *connection, "--leases", leases, "--count", "500")
    assert consumed.returncode == 0, consumed.stderr
    assert sum(map(int, re.findall(r"over (\d+) readings", consumed.stdout))) == 500


async def test_the_example_of_subscriptions_continues_where_each_was(
    eventpump_emulator: Emulator, tmp_path: Path
) -> None:
    """The subscriptions get what is published in each of two runs; the archive is not read again."""
    program = ["examples/subscriptions.py", "--connection-string", eventpump_emulator.connection_string]
    for run in (1, 2):
        result = await asyncio.to_thread(_run, *program, "--folder", str(tmp_path), "--count", "1000")
        assert result.returncode == 0, result.stderr
        assert re.search(
            rf"^alerts saw 1000 readings, \d+ of them hot; {run * 1000} are archived$", result.stdout, re.M
        )


def test_the_example_of_subscriptions_brings_its_own_service() -> None:
    """Without a connection string, and without a folder, it leaves nothing behind."""
    result = _run("examples/subscriptions.py", "--count", "600", without=["EVENTPUMP_CONNECTION_STRING"])
    assert result.returncode == 0, result.stderr
    assert "alerts saw 600 readings" in result.stdout
    assert "600 are archived" in result.stdout
    assert "sensor-7 sent 30 of them" in result.stdout
    assert "archive: lag" in result.stdout


def test_the_example_of_routers_shows_what_each_keeps() -> None:
    """Every event is published by each router, and only round robin spreads keys; the ring moves few of them."""
    result = _run("examples/routers.py", "--count", "600")
    assert result.returncode == 0, result.stderr
    for name, keys in (("HashRouter", 41), ("RoundRobinRouter", 0), ("StickyRouter", 41), ("RingRouter", 41)):
        (line,) = re.findall(rf"^{name}: (.*); {keys} keys in one partition$", result.stdout, re.M)
        assert sum(map(int, re.findall(r"(\d+) in \d+", line))) == 600
    by_hash, by_ring = map(int, re.findall(r"(\d+) of 1,000 keys move", result.stdout))
    assert by_ring < 300 < 600 < by_hash


def test_the_example_of_balancing_shows_each_balancer() -> None:
    """Each balancer owns all partitions before and after, and moves what it says."""
    result = _run("examples/balancing.py")
    assert result.returncode == 0, result.stderr
    for line in re.findall(r"^  (?:before|after): (.*)$", result.stdout, re.M):
        assert sorted(map(int, re.findall(r"(?<= )\d+", line))) == list(range(12)), line
    moved = list(map(int, re.findall(r"(\d+) partitions moved", result.stdout)))
    assert moved[:3] == [3, 6, 0]
    assert moved[3] < 8
    assert moved[4:] == [0, 0]


def test_the_example_of_sources_needs_no_service() -> None:
    """It processes synthetic events, the same in each run, and reads on over lost links."""
    results = [_run("examples/sources.py", "--events", "1000", without=["EVENTPUMP_CONNECTION_STRING"]) for _ in "12"]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    assert results[0].stdout == results[1].stdout
    assert "2000 events" in results[0].stdout
    assert "{'sensor-0': 100, 'sensor-1': 100, 'sensor-2': 100}" in results[0].stdout


def test_the_example_of_keys_applies_every_order_once_and_in_order() -> None:
    """It runs by itself: several at a time, what cannot be applied is parked, and every balance is right."""
    result = _run("examples/keyed.py", "--count", "1000", without=["EVENTPUMP_CONNECTION_STRING"])
    assert result.returncode == 0, result.stderr
    assert "applied 998 orders and parked 2" in result.stdout
    assert "199 of 199 balances are as published" in result.stdout


def test_example_test_passes() -> None:
    """The example of a user's own test is one that passes."""
    result = _run("-m", "pytest", "-q", "-p", "no:cacheprovider", "examples")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "carrier", [[], ["--transport", "uamqp"], ["--transport-type", "websocket"]], ids=["native", "uamqp", "websocket"]
)
def test_demo_kills_a_host_and_loses_nothing(request: pytest.FixtureRequest, carrier: list[str]) -> None:
    """The demo publishes, kills, adds, and finds every published event processed, whatever carries them."""
    if "uamqp" in carrier:
        need_uamqp()
    size = ["--events", "200000"] if request.config.getoption("--long") else ["--events", "20000", "--seconds", "8"]
    result = _run("-m", "eventpump.cli.main", "demo", "--plain", *size, *carrier)
    assert result.returncode == 0, result.stdout + result.stderr
    names = "published|processed|archived|lost|shared epochs|time to take over"
    found = dict(re.findall(rf"^({names}): ([\d,.]+)", result.stdout, re.M))
    assert found["published"].replace(",", "") == size[1]
    assert found["processed"] == found["archived"] == found["published"]
    assert found["lost"] == found["shared epochs"] == "0"
    assert "was killed (SIGKILL)" in result.stdout
    assert float(found["time to take over"]) > 0
