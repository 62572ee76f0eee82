"""A real Prometheus (Debian's package) and the examples for it: rules, dashboard, and a fleet that is scraped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import yaml  # type: ignore[import-untyped]  # it comes without types
from aiohttp import web

from eventpump import BufferedProducer, Emulator, EventData
from tests.support.forks import start_python

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples/prometheus"
HUB: Final = "telemetry"
PARTITIONS: Final = 4
LIMIT: Final = 100.0


def program(name: str) -> str:
    """Return the path of a program of the package; the test is left out where it is missing, and fails in the gate."""
    found = shutil.which(name)
    if found is None:
        problem = f"there is no {name} (Debian: apt-get install prometheus)"
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    return found


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *arguments]
    return subprocess.run(command, cwd=EXAMPLES, input=text, capture_output=True, text=True, check=False)


def series_of(expression: str) -> set[str]:
    """Return the names of metrics in an expression, without the suffixes of a histogram."""
    names = re.findall(r"\b(?:eventpump|messaging_client)_\w+(?=[\[{)\s]|$)", expression)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def documented() -> set[str]:
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `(\w+)`", page.partition("\n## ")[0], re.M))


def alerts() -> list[dict[str, Any]]:
    found = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text(encoding="utf-8"))
    return [rule for group in found["groups"] for rule in group["rules"]]


def test_each_alert_fires_and_is_silent_before() -> None:
    """Promtool evaluates the rules over series of the examples; each alert has a test of its own there."""
    result = promtool("test", "rules", "alerts_test.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    tests = yaml.safe_load((EXAMPLES / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    for test, alert in zip(tests, alerts(), strict=True):
        assert test["name"] == alert["alert"]
        silent, firing = test["promql_expr_test"]
        assert {each["expr"] for each in (silent, firing)} == {
            f'count(ALERTS{{alertname="{alert["alert"]}",alertstate="firing"}})'
        }
        assert (silent["exp_samples"], [each["value"] for each in firing["exp_samples"]]) == ([], [1])


def test_rules_and_dashboard_name_metrics_that_there_are() -> None:
    """All of the page are in the dashboard, and no other names."""
    dashboard = json.loads((EXAMPLES / "dashboard.json").read_text(encoding="utf-8"))
    shown = {name for panel in dashboard["panels"] for each in panel["targets"] for name in series_of(each["expr"])}
    assert shown | {"eventpump_partition_sequence_number"} == documented()
    assert set().union(*(series_of(each["expr"]) for each in alerts())) <= documented()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


class Watching:
    """A Prometheus that scrapes, and what it knows.

    Args:
        url: Where its API is.
        scraped: Is set each time that it scrapes the test itself, once per interval.
    """

    def __init__(self, url: str, scraped: asyncio.Event) -> None:
        self.url = url
        self.scraped = scraped

    async def ask(self, expression: str) -> dict[tuple[str, ...], float]:
        """Return the values of an expression, by the values of their labels in the order of their names."""
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"{self.url}/api/v1/query", params={"query": expression}) as response,
        ):
            answer = await response.json()
        assert answer["status"] == "success", answer
        found = answer["data"]["result"]
        return {tuple(text for _, text in sorted(each["metric"].items())): float(each["value"][1]) for each in found}

    async def until(self, expression: str, wanted: Mapping[tuple[str, ...], float]) -> None:
        """Wait until an expression has some values, looking after each scrape."""
        while (found := await self.ask(expression)) != wanted:
            self.scraped.clear()
            try:
                await self.scraped.wait()
            except asyncio.CancelledError:
                raise AssertionError(f"{expression} is {found}, not {wanted}") from None


@asynccontextmanager
async def prometheus(folder: Path, ports: Mapping[str, int]) -> AsyncIterator[Watching]:
    """Run Prometheus on some servers, with the rules of the examples."""
    scraped = asyncio.Event()

    async def metrics(_: web.Request) -> web.Response:
        scraped.set()
        return web.Response(text="")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    jobs = [
        {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        for name, port in {**ports, "test": runner.addresses[0][1]}.items()
    ]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(EXAMPLES / "alerts.yaml")],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    lines: list[str] = []
    port: re.Match[str] | None = None
    try:
        while port is None or "Server is ready" not in lines[-1]:
            line = (await process.stderr.readline()).decode()
            assert line, "".join(lines)
            lines.append(line)
            port = port or re.search(r"Listening on\"? address=127\.0\.0\.1:(\d+)", line)
        draining = asyncio.create_task(process.stderr.read())
        yield Watching(f"http://127.0.0.1:{port[1]}", scraped)
    finally:
        process.terminate()
        await process.wait()
        await runner.cleanup()
    await draining


async def test_prometheus_scrapes_a_fleet_through_a_kill(tmp_path: Path) -> None:
    """What it is served is clean by `promtool check metrics`. It sees the partitions of three hosts, and when one is
    killed that this one is gone and the others run its partitions; the lag is 0 before and after."""
    program("prometheus")
    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT):
        emulator = await stack.enter_async_context(Emulator({HUB: PARTITIONS}))
        leases, processes, ports = str(tmp_path / "leases.db"), {}, {}
        for name in ("a", "b", "c"):
            process = processes[name] = await start_python(
                str(ROOT / "tests/integration/scraped_program.py"),
                *(emulator.connection_string, HUB, leases, name),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            stack.push_async_callback(process.wait)
            stack.callback(_kill, process)
            assert process.stdout is not None
            ports[name] = int(await process.stdout.readline())
        producer = await stack.enter_async_context(BufferedProducer(emulator.connection_string, HUB))

        async def publish() -> None:
            for number in range(100):
                await producer.send(EventData("reading"), partition_id=str(number % PARTITIONS))
            await producer.flush()

        await publish()
        watching = await stack.enter_async_context(prometheus(tmp_path, ports))
        await watching.until("sum by (job) (eventpump_ready)", dict.fromkeys([("a",), ("b",), ("c",)], 1.0))
        await watching.until(
            'sum(eventpump_partition_sequence_number{position="checkpointed"})', {(): 24.0 * PARTITIONS}
        )
        await watching.until("count(eventpump_partition_owned)", {(): PARTITIONS})
        await watching.until("count(count by (job) (eventpump_partition_owned))", {(): 3})
        await watching.until('sum(eventpump_partition_lag{position="delivered"})', {(): 0.0})
        async with aiohttp.ClientSession() as client:
            for port in ports.values():
                async with client.get(f"http://127.0.0.1:{port}/metrics") as response:
                    checked = await asyncio.to_thread(promtool, "check", "metrics", text=await response.text())
                    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")

        _kill(processes["a"])
        await watching.until('up{job="a"}', {("up", f"127.0.0.1:{ports['a']}", "a"): 0.0})
        await watching.until("count by (state) (eventpump_partition_owned)", {("running",): PARTITIONS})
        await publish()
        await watching.until(
            "sum(max by (messaging_destination_partition_id) ("
            'eventpump_partition_sequence_number{position="checkpointed"}))',
            {(): 49.0 * PARTITIONS},
        )
        await watching.until('sum(eventpump_partition_lag{position="checkpointed"})', {(): 0.0})
        assert set(await watching.ask("sum by (job) (eventpump_ready)")) == {("b",), ("c",)}
        moved = await watching.ask('sum by (job) (eventpump_partition_moves_total{reason=~"acquired|stolen"})')
        assert sum(moved.values()) >= 3
        rules = await watching.ask("count(ALERTS)")
        assert rules.keys() <= {()}


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            return
