"""`eventpump info` as a process: what a hub holds."""

from __future__ import annotations

import pytest

from eventpump import Emulator, EventData, EventProducer
from eventpump.testing.fixtures import eventpump_emulator
from tests.integration.test_cli_send_tail import run

__all__ = ["eventpump_emulator"]


async def fill(emulator: Emulator) -> None:
    """Store 10 events in partition 0, and 20 in partition 2."""
    async with EventProducer(emulator.connection_string, "telemetry") as producer:
        for partition_id, count in (("0", 10), ("2", 20)):
            await producer.send([EventData(b"x") for _ in range(count)], partition_id=partition_id)


async def test_info_shows_numbers_of_every_partition(eventpump_emulator: Emulator) -> None:
    """A line for each partition, with its oldest and newest number; an empty one has none."""
    await fill(eventpump_emulator)
    code, out, err = await run("info", "--hub", "telemetry", emulator=eventpump_emulator)
    assert (code, err) == (0, "")
    lines = out.decode().splitlines()
    assert lines[0].startswith("hub telemetry: 4 partitions, 30 events, created 20")
    assert [line.split()[:4] for line in lines[3:]] == [
        ["0", "0", "9", "10"],
        ["1", "0"],
        ["2", "0", "19", "20"],
        ["3", "0"],
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--hub", "nothing"), "nothing"),
        ((), "hub"),
    ],
)
async def test_info_of_what_cannot_be_read_exits_with_2(
    eventpump_emulator: Emulator, arguments: tuple[str, ...], says: str
) -> None:
    """One line that names it, and exit code 2."""
    code, out, err = await run("info", *arguments, emulator=eventpump_emulator)
    assert (code, out, err.count("\n")) == (2, b"", 1)
    assert says in err
