"""What a host holds of events, measured in its process, against the bound that the documentation states."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from eventpump import EventData, EventProducer
from eventpump.emulator.server import Emulator
from tests.support.forks import start_python

ROOT = Path(__file__).parents[2]
HUB = "telemetry"
PARTITIONS = 12
SMALL, LARGE = 300, 6
SIZE = 1_000_000
BUDGET = 4 * 1024 * 1024
OTHER = 8 * 1024 * 1024
"""What is allocated beside events: code that is imported late, objects, and what the stream has read."""


async def test_host_whose_handlers_stand_still_holds_what_is_stated() -> None:
    """Events grow from 100 bytes to 1 MB, ten thousandfold, and no handler goes on: the bound holds in real memory."""
    async with asyncio.timeout(200), Emulator({HUB: PARTITIONS}) as emulator:
        async with EventProducer(emulator.connection_string, HUB) as producer:
            for partition_id in map(str, range(PARTITIONS)):
                await producer.send([EventData(b"x" * 100)] * SMALL, partition_id=partition_id)
                for _ in range(LARGE):
                    await producer.send(EventData(b"x" * SIZE), partition_id=partition_id)
        count = PARTITIONS * (SMALL + LARGE)
        arguments = [emulator.connection_string, HUB, *map(str, (PARTITIONS, BUDGET, count))]
        program = await start_python(
            *("-m", "tests.integration.buffering_program", *arguments),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await program.communicate()
    assert program.returncode == 0
    found = json.loads(output)
    largest = SIZE + 1000
    # One event more for each link, and one that is partly received.
    assert BUDGET / 2 < found["counted"] <= BUDGET + PARTITIONS * largest
    assert found["allocated"] <= BUDGET + 2 * PARTITIONS * largest + OTHER < PARTITIONS * LARGE * SIZE
    assert found["left"] == 0
