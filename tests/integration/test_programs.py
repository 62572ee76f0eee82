"""The programs that the README shows: the examples and the demo, as a newcomer would run them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil  # type: ignore[import-untyped]  # it comes without types
import pytest

from eventpump import BufferedProducer, EventData
from eventpump.emulator.server import Emulator
from eventpump.testing.fixtures import eventpump_emulator
from tests.support.forks import run_python
from tests.ways import need_uamqp

__all__ = ["eventpump_emulator"]

ROOT = Path(__file__).parents[2]
_LIMIT = 100


def _run(*arguments: str, without: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return run_python(*arguments, env=environment, timeout=_LIMIT)


async def test_examples_publish_and_consume(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """What `examples/produce.py` publishes, `examples/consume.py` reads, all of it."""
    connection = ["--connection-string", eventpump_emulator.connection_string]
    published = await asyncio.to_thread(_run, "examples/produce.py", *connection, "--events", "500")
    assert published.returncode == 0, published.stderr
    leases = str(tmp_path / "leases.db")
    consumed = await asyncio.to_thread(_run, "examples/consume.py", *connection, "--leases", leases, "--count", "500")
    assert consumed.returncode == 0, consumed.stderr
    assert sum(map(int, re.findall(r"over (\d+) readings", consumed.stdout))) == 500


@pytest.mark.parametrize("example", ["produce", "consume", "subscriptions", "forward"])
async def test_examples_end_in_one_line_for_a_mistake_of_the_user(example: str, eventpump_emulator: Emulator) -> None:
    """A wrong hub, as any error that the library raises, is one line on stderr and no traceback."""
    text = f"{eventpump_emulator.connection_string};EntityPath=telemetri"
    more = ["--source", "telemetry", "--target", "telemetry"] if example == "forward" else []
    ended = await asyncio.to_thread(_run, f"examples/{example}.py", "--connection-string", text, *more)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "hub: is not the hub that EntityPath of the connection string names" in line


async def test_example_of_subscriptions_continues_where_each_was(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """The subscriptions get what is published in each of two runs; the archive is not read again."""
    program = ["examples/subscriptions.py", "--connection-string", eventpump_emulator.connection_string]
    for run in (1, 2):
        result = await asyncio.to_thread(_run, *program, "--folder", str(tmp_path), "--count", "1000")
        assert result.returncode == 0, result.stderr
        assert re.search(
            rf"^alerts saw 1000 readings, \d+ of them hot; {run * 1000} are archived$", result.stdout, re.M
        )


def test_example_of_subscriptions_brings_its_own_service() -> None:
    """Without a connection string, and without a folder, it leaves nothing behind."""
    result = _run("examples/subscriptions.py", "--count", "600", without=["EVENTPUMP_CONNECTION_STRING"])
    assert result.returncode == 0, result.stderr
    assert "alerts saw 600 readings" in result.stdout
    assert "600 are archived" in result.stdout
    assert "sensor-7 sent 30 of them" in result.stdout
    assert "archive: lag" in result.stdout


def test_example_of_routers_shows_what_each_keeps() -> None:
    """Every event is published by each router, and only round robin spreads keys; the ring moves few of them."""
    result = _run("examples/routers.py", "--count", "600")
    assert result.returncode == 0, result.stderr
    for name, keys in (("HashRouter", 41), ("RoundRobinRouter", 0), ("StickyRouter", 41), ("RingRouter", 41)):
        (line,) = re.findall(rf"^{name}: (.*); {keys} keys in one partition$", result.stdout, re.M)
        assert sum(map(int, re.findall(r"(\d+) in \d+", line))) == 600
    by_hash, by_ring = map(int, re.findall(r"(\d+) of 1,000 keys move", result.stdout))
    assert by_ring < 300 < 600 < by_hash


def test_example_of_telemetry_shows_linked_spans() -> None:
    """The span of the batch is linked to the one in which its events were sent, and that of the copies to it."""
    result = _run("examples/telemetry.py")
    assert result.returncode == 0, result.stderr
    spans = dict(re.findall(r"^([0-9a-f]{16}) (\S+(?: \S+)?)", result.stdout, re.M))
    ids = {name.strip(","): number for number, name in spans.items()}
    assert f"{ids['process telemetry']} process telemetry, linked to {ids['measure']}" in result.stdout
    assert f"{ids['send copy']} send copy, linked to {ids['process telemetry']}" in result.stdout
    assert "messaging.process.duration" in result.stdout


def test_example_of_balancing_shows_each_balancer() -> None:
    """Each balancer owns all partitions before and after, and moves what it says."""
    result = _run("examples/balancing.py")
    assert result.returncode == 0, result.stderr
    for line in re.findall(r"^  (?:before|after): (.*)$", result.stdout, re.M):
        assert sorted(map(int, re.findall(r"(?<= )\d+", line))) == list(range(12)), line
    moved = list(map(int, re.findall(r"(\d+) partitions moved", result.stdout)))
    assert moved[:3] == [3, 6, 0]
    assert moved[3] < 8
    assert moved[4:] == [0, 0]


def test_example_of_sources_needs_no_service() -> None:
    """It processes synthetic events, the same in each run, and reads on over lost links."""
    results = [_run("examples/sources.py", "--events", "1000", without=["EVENTPUMP_CONNECTION_STRING"]) for _ in "12"]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    assert results[0].stdout == results[1].stdout
    assert "2000 events" in results[0].stdout
    assert "{'sensor-0': 100, 'sensor-1': 100, 'sensor-2': 100}" in results[0].stdout


def test_example_of_the_schema_registry_decodes_what_it_encoded() -> None:
    """It runs by itself: the published encoder makes the events that are sent, and decodes those that are received."""
    result = _run("examples/schema_registry.py", without=["EVENTPUMP_CONNECTION_STRING", "REGISTRY"])
    assert result.returncode == 0, result.stderr
    values = re.findall(r"^\d+ avro/binary\+0 \{'sensor': 'sensor-\d', 'value': ([\d.]+)\}$", result.stdout, re.M)
    assert list(map(float, values)) == [20 + number / 2 for number in range(10)]


def test_example_of_keys_applies_every_order_once_and_in_order() -> None:
    """It runs by itself: several at a time, what cannot be applied is parked, and every balance is right."""
    result = _run("examples/keyed.py", "--count", "1000", without=["EVENTPUMP_CONNECTION_STRING"])
    assert result.returncode == 0, result.stderr
    assert "applied 998 orders and parked 2" in result.stdout
    assert "199 of 199 balances are as published" in result.stdout


def test_example_test_passes() -> None:
    """The example of a user's own test is one that passes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "examples"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "carrier",
    [
        pytest.param([], id="native"),
        pytest.param(["--transport", "uamqp"], id="uamqp", marks=pytest.mark.long),
        pytest.param(["--transport-type", "websocket"], id="websocket", marks=pytest.mark.long),
    ],
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


def test_example_of_exactly_once_brings_its_own_service() -> None:
    """It counts each event once, and the total is that of what was published."""
    result = _run("examples/exactly_once.py", "--count", "2000", without=["EVENTPUMP_CONNECTION_STRING"])
    assert result.returncode == 0, result.stderr
    (published,) = re.findall(r"^published: total (\d+)$", result.stdout, re.M)
    assert f"2000 readings, total {published}" in result.stdout


@pytest.mark.parametrize("form", [[], ["--keyed"]], ids=["plain", "keyed"])
async def test_example_of_exactly_once_counts_once_over_kills_and_moves(
    eventpump_emulator: Emulator, tmp_path: Path, form: list[str]
) -> None:
    """Processes that share its folder join, move partitions and are killed while events come; the sums stay exact."""
    connection_string, count, rng = eventpump_emulator.connection_string, 4000, random.Random(14)
    arguments = ["--connection-string", connection_string, "--folder", str(tmp_path), "--lease-duration", "2"]
    command = [sys.executable, "examples/exactly_once.py", *arguments, "--count", str(count), *form]
    total = 0
    running: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    try:
        async with BufferedProducer(connection_string, "telemetry") as producer:
            for part in range(4):
                newest = start()
                for number in range(count // 4):
                    value = rng.randrange(100)
                    body = json.dumps({"sensor": f"sensor-{number % 7}", "value": value})
                    await producer.send(EventData(body), partition_key=f"sensor-{number % 7}")
                    total += value
                await producer.flush()
                assert newest.stdout is not None
                await asyncio.to_thread(newest.stdout.readline)  # it has counted for a second, or is waiting for leases
                if part:
                    killed = running.pop(rng.randrange(len(running)))
                    killed.kill()
                    killed.communicate()
        for process in running:
            output, _ = await asyncio.to_thread(process.communicate, timeout=_LIMIT)
            assert f"{count} readings, total {total}\n" in output
    finally:
        for process in running:
            process.kill()
            process.communicate()


async def test_example_of_exactly_once_counts_keys_that_finish_in_any_order(tmp_path: Path) -> None:
    """Per partition and key: a lower number of another key counts, a repeat does not, and a former owner is refused."""
    summing = cast(Any, runpy.run_path(str(ROOT / "examples/exactly_once.py")))["KeyedSums"](tmp_path / "sums.db")
    summing.count("0", 3, "b", [(7, {"sensor": "b", "value": 5})])
    summing.count("0", 3, "a", [(4, {"sensor": "a", "value": 5})])
    summing.count("0", 4, "b", [(7, {"sensor": "b", "value": 5}), (8, {"sensor": "b", "value": 5})])
    assert summing.result() == (3, 15)
    with pytest.raises(Exception, match="epoch 3 is older than 4"):
        summing.count("0", 3, "a", [(9, {"sensor": "a", "value": 5})])
    assert summing.result() == (3, 15)


async def test_example_of_exactly_once_refuses_a_former_owner(tmp_path: Path) -> None:
    """An owner whose epoch is older than the stored one changes nothing, whatever it counts; nor does a repeat."""
    sums = cast(Any, runpy.run_path(str(ROOT / "examples/exactly_once.py")))["Sums"](tmp_path / "sums.db")
    reading = {"sensor": "a", "value": 5}
    sums.count("0", 3, [(0, reading), (1, reading)])
    sums.count("0", 3, [(1, reading), (2, reading)])
    assert sums.result() == (3, 15)
    sums.count("0", 4, [])
    with pytest.raises(Exception, match="epoch 3 is older than 4"):
        sums.count("0", 3, [(3, reading)])
    assert sums.result() == (3, 15)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL]
)
async def test_demo_leaves_no_process_behind(number: signal.Signals, tmp_path: Path) -> None:
    """However it is ended, its service and its hosts end too; unless it is killed, its files go with it.

    There are no others: neither the demo nor its hosts start a process to connect.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "eventpump", "demo", "--plain", "--seconds", "600"),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    children: list[psutil.Process] = []
    try:
        async with asyncio.timeout(_LIMIT):
            lines = [(await process.stdout.readline()).decode()]
            while "three hosts share the partitions" not in lines[-1]:
                lines.append((await process.stdout.readline()).decode())
                assert lines[-1], "".join(lines)
            assert lines[0].startswith("eventpump demo: a local service")  # before its modules are imported
            estimate = re.search(r"this takes about (\d+) s here; Ctrl-C ends it", lines[1])
            assert estimate is not None
            assert int(estimate[1]) > 600
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) == 4, [child.cmdline() for child in children]
            process.send_signal(number)
            _, err = await process.communicate()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=60)
        assert alive == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    if number is not signal.SIGKILL:
        assert (process.returncode, err) == (128 + number, b"")
        assert os.listdir(tmp_path) == []
