"""The programs of README and the pages, run as they stand against the emulator, by the variable that they read."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from eventpump import EventData, EventProducer
from eventpump.emulator.server import Emulator
from eventpump.testing.fixtures import eventpump_emulator
from tests.support.forks import start_python
from tests.support.pages import ROOT, is_program, python_blocks, runs_until_stopped

__all__ = ["eventpump_emulator"]

HUB = "telemetry"
_LIMIT = 60.0
_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_ELSEWHERE = "azure.identity"  # it signs in at Microsoft Entra: `test_identity.py` does that with a local authority
PROGRAMS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}")
    for path in _PAGES
    for number, block in enumerate(python_blocks(path), 1)
    if is_program(block) and _ELSEWHERE not in block
]


@pytest.mark.parametrize("program", PROGRAMS)
async def test_program_of_the_pages_does_what_it_says(
    program: str, eventpump_emulator: Emulator, tmp_path: Path
) -> None:
    """It prints something and ends by itself, or prints what was sent to the hub, and ends on SIGTERM."""
    connection_string = eventpump_emulator.connection_string
    is_consumer = runs_until_stopped(program)
    if is_consumer:
        async with EventProducer(connection_string, HUB) as producer:
            for partition in range(4):
                await producer.send([EventData(f"{partition}-{n}") for n in range(2)], partition_id=str(partition))
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    process = await start_python(
        "program.py",
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "PORT": "0",
            "EVENTPUMP_CONNECTION_STRING": connection_string,
            "EVENTPUMP_HUB": HUB,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_LIMIT):
            first = b"" if not is_consumer else await process.stdout.readline()
            if is_consumer:
                process.send_signal(signal.SIGTERM)
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    # A consumer's store is empty here, and the hub is not, which it reports.
    noted = [line for line in errors.splitlines() if b"no checkpoint anywhere: reading from the beginning" not in line]
    assert (process.returncode, noted) == (0, []), errors.decode()
    assert not is_consumer or first


def test_pages_have_programs() -> None:
    """The pattern finds them."""
    assert len(PROGRAMS) >= 8
