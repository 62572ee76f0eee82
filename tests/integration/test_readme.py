"""README's blocks of Python, run as they stand against the emulator, but for the connection string."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import eventpump
from eventpump import (
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    MemoryLeaseStore,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
)
from eventpump.emulator.server import Emulator
from eventpump.testing.fixtures import eventpump_emulator

__all__ = ["eventpump_emulator"]

README = Path(__file__).parents[2] / "README.md"
HUB = "telemetry"
_LIMIT = 60.0


def _block(holding: str) -> str:
    """Return the one block of Python that holds a text."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)
    (found,) = (block for block in blocks if holding in block)
    return str(found)


async def _run(block: str, names: Mapping[str, object]) -> dict[str, Any]:
    """Run a block in which `await` may stand outside of functions.

    Returns:
        Its names.
    """
    known: dict[str, Any] = {name: getattr(eventpump, name) for name in eventpump.__all__} | dict(names)
    code = compile(block, str(README), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    async with asyncio.timeout(_LIMIT):
        result = eval(code, known)
        if inspect.iscoroutine(result):
            await result
    return known


async def _stored(connection_string: str, partition_id: str) -> list[bytes]:
    reader = PartitionReader(connection_string, HUB, partition_id=partition_id, end="@latest")
    async with reader, asyncio.timeout(_LIMIT):
        return [event.body async for event in reader]


async def test_readme_consumer_prints_and_continues_after_a_restart(
    eventpump_emulator: Emulator, tmp_path: Path
) -> None:
    """It prints what was sent, ends on SIGTERM, and started again goes on after what it had processed."""
    connection_string = eventpump_emulator.connection_string
    program = tmp_path / "consume.py"
    block = _block("class Printer")
    assert "Endpoint=sb://..." in block
    program.write_text(block.replace("Endpoint=sb://...", connection_string), encoding="utf-8")
    async with EventProducer(connection_string, HUB) as producer, asyncio.timeout(_LIMIT):
        for text in ("one", "two"):
            await producer.send(EventData(text), partition_id="0")
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                program,
                cwd=tmp_path,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
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


async def test_the_block_that_subscribes(eventpump_emulator: Emulator) -> None:
    """Both of its subscriptions get what is published afterwards."""
    connection_string = eventpump_emulator.connection_string
    got: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    class Telling(EventProcessor):
        async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
            for event in events:
                got.put_nowait((context.subscription, event.body))

    async with (
        EventProcessorHost(connection_string, HUB, lease_store=MemoryLeaseStore()) as host,
        EventProducer(connection_string, HUB) as producer,
        asyncio.timeout(_LIMIT),
    ):
        await producer.send([EventData(b"before")], partition_id="0")
        await _run(_block("host.subscribe"), {"host": host, "Alerts": Telling, "Archive": Telling})
        await producer.send([EventData(b"after")], partition_id="0")
        running = asyncio.create_task(host.run())
        found = sorted([await got.get() for _ in range(3)])
        host.stop()
        await running
    assert found == [("alerts", b"after"), ("archive", b"after"), ("archive", b"before")]


async def test_readme_reader_prints_a_partition_and_ends(
    eventpump_emulator: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints what a partition holds, and ends."""
    async with EventProducer(eventpump_emulator.connection_string, HUB) as producer:
        await producer.send(EventData(b'{"celsius": 21}'), partition_id="0")
    await _run(_block("PartitionReader("), {"connection_string": eventpump_emulator.connection_string})
    assert "{'celsius': 21}" in capsys.readouterr().out


async def test_readme_producers_store_what_they_send(eventpump_emulator: Emulator) -> None:
    """What they send is stored."""
    connection_string = eventpump_emulator.connection_string
    names = {"connection_string": connection_string, "report": lambda *failure: pytest.fail(repr(failure))}
    # Filled to what the service takes, the batch would be of 1 MiB.
    await _run(_block("batch.try_add").replace("create_batch(", "create_batch(max_size_in_bytes=1000, "), names)
    await _run(_block("BufferedProducer("), names)
    sent = [body for number in range(4) for body in await _stored(connection_string, str(number))]
    assert sent.count(b"three") > 10
    assert sorted(body for body in sent if body != b"three") == [b"21.5", b"one", b"two"]


async def test_readme_idempotent_producer_publishes_each_order_once(
    eventpump_emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run again with more orders, it publishes those that are new, and each once."""
    monkeypatch.chdir(tmp_path)
    connection_string = eventpump_emulator.connection_string
    orders: list[str] = []
    for more in (["a", "b"], [], ["c"]):
        orders += more
        known = await _run(_block('mode="replayable"'), {"connection_string": connection_string, "orders": orders})
        assert known["known"].events_published == len(orders) - len(more)
    assert await _stored(connection_string, "0") == [b"a", b"b", b"c"]
