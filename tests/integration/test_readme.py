"""What the programs of README and of some pages do, beyond that they run (`test_pages.py`)."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.api import public_names
from eventpump import (
    EventData,
    EventProcessor,
    EventProducer,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
)
from eventpump.emulator.server import Emulator
from eventpump.testing.fixtures import eventpump_emulator
from tests.support.forks import run_python, start_python
from tests.support.pages import ROOT, python_blocks

__all__ = ["eventpump_emulator"]

README = ROOT / "README.md"
HUB = "telemetry"
_LIMIT = 60.0


def _block(path: Path, holding: str) -> str:
    """Return the one block of Python of a page that holds a text."""
    (found,) = (block for block in python_blocks(path) if holding in block)
    return found


def _environment(emulator: Emulator) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "EVENTPUMP_CONNECTION_STRING": emulator.connection_string,
    }


async def _run_program(program: str, emulator: Emulator, folder: Path) -> str:
    """Run a program that ends by itself.

    Returns:
        What it printed.
    """
    (folder / "program.py").write_text(program, encoding="utf-8")
    result = await asyncio.to_thread(run_python, "program.py", cwd=folder, env=_environment(emulator), timeout=_LIMIT)
    assert result.returncode == 0, result.stderr
    return result.stdout


async def _run(block: str, names: Mapping[str, object]) -> None:
    """Run a block in which `await` may stand outside of functions."""
    known: dict[str, Any] = {name: each.made for name, each in public_names().items()} | dict(names)
    code = compile(block, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, known)
    if inspect.iscoroutine(result):
        await result


async def _stored(emulator: Emulator, partition_id: str) -> list[str]:
    reader = PartitionReader(emulator.connection_string, HUB, partition_id=partition_id, end="@latest")
    async with reader, asyncio.timeout(_LIMIT):
        return [event.body_as_str() async for event in reader]


async def test_readme_consumer_prints_and_continues_after_a_restart(
    eventpump_emulator: Emulator, tmp_path: Path
) -> None:
    """It prints what was sent, ends on SIGTERM, and started again goes on after what it had processed."""
    program = tmp_path / "consume.py"
    program.write_text(_block(README, "EventProcessorHost("), encoding="utf-8")
    async with EventProducer(eventpump_emulator.connection_string, HUB) as producer, asyncio.timeout(_LIMIT):
        for text in ("one", "two"):
            await producer.send(EventData(text), partition_id="0")
            process = await start_python(
                str(program),
                cwd=tmp_path,
                env=_environment(eventpump_emulator),
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                assert process.stdout is not None
                assert (await process.stdout.readline()).decode().split()[::2] == ["0", text]
                process.send_signal(signal.SIGTERM)
                assert await process.stdout.read() == b""
                assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.kill()


async def test_readme_producers_store_what_they_send(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """What each of them sends is stored once, and the reader of the same page can print all of it."""
    output = await _run_program(_block(README, "BufferedProducer("), eventpump_emulator, tmp_path)
    partition = output.rpartition(" ")[2].strip()
    stored = [await _stored(eventpump_emulator, str(number)) for number in range(4)]
    everything = sorted(body for bodies in stored for body in bodies)
    assert everything == sorted(["one", "two", "stored once, whatever is lost on the way", '{"celsius":21.5}'])
    assert '{"celsius":21.5}' in stored[int(partition)]


async def test_publisher_of_the_guide_publishes_each_order_once(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """Run again, also with more orders, it publishes those that are new, each once and in order."""
    guide = ROOT / "docs/howto/publish-exactly-once.md"
    program = _block(guide, 'mode="replayable"')
    for count in (250, 250, 430):
        await _run_program(program.replace("range(1000)", f"range({count})"), eventpump_emulator, tmp_path)
        assert await _stored(eventpump_emulator, "0") == [f"order {number}" for number in range(count)]


async def test_block_of_the_page_on_subscriptions(
    eventpump_emulator: Emulator, tmp_path: Path, monkeypatch: Any
) -> None:
    """Both of its subscriptions get what is published afterwards, and one of them what was published before."""
    monkeypatch.chdir(tmp_path)
    connection_string = eventpump_emulator.connection_string
    got: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    class Telling(EventProcessor):
        async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
            for event in events:
                got.put_nowait((context.subscription, event.body))

    names = {"connection_string": connection_string, "Alerts": Telling, "Archive": Telling}
    async with EventProducer(connection_string, HUB) as producer, asyncio.timeout(_LIMIT):
        await producer.send([EventData(b"before")], partition_id="0")
        page = ROOT / "docs/subscriptions.md"
        running = asyncio.create_task(_run(_block(page, 'host.subscribe("alerts"'), names))
        try:
            found = [await got.get()]  # the archive's: by then both have subscribed
            await producer.send([EventData(b"after")], partition_id="0")
            found += [await got.get() for _ in range(2)]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert sorted(found) == [("alerts", b"after"), ("archive", b"after"), ("archive", b"before")]
