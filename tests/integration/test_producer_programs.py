"""The examples that publish, as processes: killed in the middle, and started again."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from eventpump import Emulator, EventData, EventProducer, PartitionReader
from tests.support.forks import start_python

ROOT = Path(__file__).parents[2]
_LIMIT = 60


@pytest.fixture
async def service() -> AsyncIterator[Emulator]:
    """An emulator with a hub to publish to, two sources of trades, and a hub for bars."""
    async with Emulator({"telemetry": 2, "nyse": 2, "lse": 1, "bars": 1}) as emulator:
        yield emulator


async def start(program: str, *arguments: str) -> asyncio.subprocess.Process:
    return await start_python(
        f"examples/{program}",
        *arguments,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def finish(process: asyncio.subprocess.Process) -> str:
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def kill_after(process: asyncio.subprocess.Process, lines: int) -> None:
    """Kill it with SIGKILL once it has said so many lines."""
    assert process.stdout is not None
    for _ in range(lines):
        said = await process.stdout.readline()
        if not said:
            raise AssertionError((await process.communicate())[1].decode())
    process.kill()
    await process.communicate()
    assert process.returncode == -signal.SIGKILL


async def bodies(emulator: Emulator, hub: str, partition_id: str = "0") -> list[str]:
    async with PartitionReader(emulator.connection_string, hub, partition_id=partition_id, end="@latest") as reader:
        return [event.body_as_str() async for event in reader]


@pytest.mark.parametrize("seed", range(2))
async def test_publisher_killed_midway_publishes_every_line_once_in_order(
    service: Emulator, tmp_path: Path, seed: int
) -> None:
    """Killed with SIGKILL several times and started again: every event exactly once, in order."""
    rng = random.Random(seed)
    lines = [f"order {number}" for number in range(2_000)]
    source = tmp_path / "orders.txt"
    source.write_text("\n".join(lines) + "\n")
    arguments = [
        str(source), "--connection-string", service.connection_string, "--state", str(tmp_path / "publishers.db"),
        "--batch-lines", "10",
    ]  # fmt: skip
    async with asyncio.timeout(_LIMIT):
        for _ in range(3):
            # No pause: the kill meets it with a batch on its way.
            await kill_after(await start("idempotent_publisher.py", *arguments), rng.randrange(2, 30))
        before = len(await bodies(service, "telemetry"))
        assert 0 < before < len(lines)
        said = await finish(await start("idempotent_publisher.py", *arguments))
    resumed = re.match(r".*: (\d+) lines are published", said)
    assert resumed is not None
    assert int(resumed[1]) >= before
    assert await bodies(service, "telemetry") == lines


async def test_publisher_without_new_lines_sends_nothing(service: Emulator, tmp_path: Path) -> None:
    """Started again after it is done, it says so; lines added since are published behind the others."""
    source = tmp_path / "orders.txt"
    source.write_text("one\ntwo\n")
    arguments = [str(source), "--connection-string", service.connection_string, "--state", str(tmp_path / "p.db")]
    async with asyncio.timeout(_LIMIT):
        for _ in range(2):
            assert "2 lines are published" in await finish(await start("idempotent_publisher.py", *arguments))
        with source.open("a") as file:
            file.write("three\n")
        await finish(await start("idempotent_publisher.py", *arguments))
    assert await bodies(service, "telemetry") == ["one", "two", "three"]


def make_trades(rng: random.Random, seconds: int) -> list[dict[str, Any]]:
    return [
        {
            "symbol": rng.choice(["ACME", "INIT"]),
            "price": round(rng.uniform(10, 20), 2),
            "size": rng.randrange(1, 100),
            "time": 1_760_000_000 + number / 50,
        }
        for number in range(seconds * 50)
    ]


def bars_of(trades: list[dict[str, Any]]) -> dict[tuple[float, str], tuple[float, float, float, float, int, int]]:
    """Work out every bar the plain way: open, high, low, close, volume, number of trades."""
    grouped: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for trade in trades:
        grouped.setdefault((float(math.floor(trade["time"])), trade["symbol"]), []).append(trade)
    bars = {}
    for key, group in grouped.items():
        prices = [trade["price"] for trade in group]
        volume = sum(trade["size"] for trade in group)
        bars[key] = (prices[0], max(prices), min(prices), prices[-1], volume, len(group))
    return bars


async def spread(emulator: Emulator, trades: list[dict[str, Any]], rng: random.Random) -> None:
    """Send trades to the partitions of both sources, at random."""
    sent: dict[tuple[str, str], list[EventData]] = {}
    for trade in trades:
        place = rng.choice([("nyse", "0"), ("nyse", "1"), ("lse", "0")])
        sent.setdefault(place, []).append(EventData(json.dumps(trade)))
    for (hub, partition_id), events in sent.items():
        async with EventProducer(emulator.connection_string, hub) as producer:
            await producer.send(events, partition_id=partition_id)


async def test_aggregator_killed_midway_publishes_every_bar_once(service: Emulator, tmp_path: Path) -> None:
    """Trades of two hubs become the bars of their windows, each once and in order, across a SIGKILL."""
    rng = random.Random(7)
    trades = make_trades(rng, seconds=6)
    expected = bars_of(trades)
    arguments = [
        "--connection-string", service.connection_string, "--source", "nyse", "--source", "lse",
        "--state", str(tmp_path / "aggregate.db"), "--quiet", "1",
    ]  # fmt: skip
    half = len(trades) // 2
    async with asyncio.timeout(_LIMIT):
        await spread(service, trades[:half], rng)
        await kill_after(await start("aggregate.py", *arguments), 2)
        published = len(await bodies(service, "bars"))
        assert 0 < published < len(expected)
        await spread(service, trades[half:], rng)
        said = await finish(await start("aggregate.py", *arguments, "--count", str(len(expected) - published)))
    # No checkpoint was written: it has read the first half again, and known it for published.
    assert int(re.findall(r"(\d+) trades left out", said)[-1]) > 0
    bars = [json.loads(body) for body in await bodies(service, "bars")]
    found = [(bar["start"], bar["symbol"]) for bar in bars]
    assert found == sorted(expected)
    for bar in bars:
        values = (bar["open"], bar["high"], bar["low"], bar["close"], bar["volume"], bar["trades"])
        assert values == expected[bar["start"], bar["symbol"]]
