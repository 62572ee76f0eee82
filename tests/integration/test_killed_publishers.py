"""Publishers with a state store that are killed with SIGKILL at any moment, in both modes, alone on their partition."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from eventpump import Emulator, PartitionReader
from tests.support.forks import start_python

_LIMIT = 60
_PROGRAM = """
import asyncio, sys
from eventpump import EventData, EventProducer, SqlitePublisherStateStore

async def main(connection_string, path, mode, end):
    store = SqlitePublisherStateStore(path)
    options = dict(idempotent=True, name="feed", state_store=store, mode=mode)
    async with EventProducer(connection_string, "telemetry", **options) as producer:
        known = await producer.get_partition_publishing_properties("0")
        done = known.events_published
        print(done, flush=True)
        while done < end:
            batch = [EventData(str(number)) for number in range(done, min(end, done + 3))]
            await producer.send(batch, partition_id="0")
            done += len(batch)
            print(done, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
"""


async def run(*arguments: str, seconds: float | None, is_forked: bool) -> list[int]:
    """Run the program, for some time after it has started.

    Args:
        is_forked: False for a real interpreter, whose hash seed differs from that of the one before it.

    Returns:
        The counts it printed.
    """
    process = await start_python(
        "-c",
        _PROGRAM,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        is_forked=is_forked,
    )
    assert process.stdout is not None
    first = await process.stdout.readline()
    if seconds is not None and first:
        await asyncio.sleep(seconds)  # so that the kill meets it anywhere
        process.kill()
    out, err = await process.communicate()
    assert process.returncode == (0 if seconds is None else -signal.SIGKILL), err.decode()
    return [int(line) for line in (first + out).splitlines()]


@pytest.mark.parametrize("mode", ["exclusive", "replayable"])
async def test_killed_publisher_continues_with_the_first_event_not_stored(
    tmp_path: Path, mode: str, request: pytest.FixtureRequest
) -> None:
    """Whenever it dies, its next start counts what is stored, is in no doubt, and loses and repeats nothing."""
    kills = 20 if request.config.getoption("--long") else 4
    rng = random.Random(kills)
    is_forked = mode != "exclusive"
    async with Emulator({"telemetry": 1}) as emulator, asyncio.timeout(_LIMIT * kills / 4):
        arguments = (emulator.connection_string, str(tmp_path / "publishers.db"), mode)
        newest = 0
        for _ in range(kills):
            counts = await run(*arguments, str(10**9), seconds=rng.uniform(0, 0.3), is_forked=is_forked)
            assert counts[0] >= newest
            newest = counts[-1]
        end = newest + 20
        assert (await run(*arguments, str(end), seconds=None, is_forked=is_forked))[-1] == end
        reader = PartitionReader(emulator.connection_string, "telemetry", partition_id="0", end="@latest")
        async with reader:
            stored = [int(event.body_as_str()) async for event in reader]
    assert stored == list(range(end))
