"""`eventpump tail` on a hub in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from eventpump.cli.streams import Output
from eventpump.cli.tail import _Tail
from eventpump.eventhubs.events import EventPosition
from eventpump.testing.transport import FakeHub, FakeTransport


class _Lines(Output):
    """An output that keeps what is written."""

    def __init__(self) -> None:
        self.is_terminal = False
        self.written = b""

    async def write(self, data: bytes) -> None:
        self.written += data

    def watched(self, closed: Callable[[], None]) -> Any:
        return nullcontext()


async def test_tail_from_the_end_shows_what_is_sent_while_its_first_link_is_cut() -> None:
    """What is sent while its first link is being opened again, before the first event, is shown."""
    hub, lines = FakeHub(partitions=2), _Lines()
    hub.publish("0", "old")
    tail = _Tail(hub.name, lines, EventPosition.latest(), 3, group="$Default", is_json=False)
    running = asyncio.create_task(tail.run(FakeTransport(hub), None))
    await asyncio.sleep(1)
    assert len(hub.attached) == 2
    hub.lose_connections()
    hub.publish("0", "one", "two")
    hub.publish("1", "three")
    assert await running == 0
    assert sorted(lines.written.split()) == [b"one", b"three", b"two"]


async def test_tail_reports_the_numbers_that_retention_removed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the numbers that retention took while it followed, and it goes on."""
    hub, lines = FakeHub(partitions=1), _Lines()
    tail = _Tail(hub.name, lines, EventPosition.latest(), 1, group="$Default", is_json=False)
    running = asyncio.create_task(tail.run(FakeTransport(hub), None))
    await asyncio.sleep(1)
    hub.stall("0")
    hub.publish("0", *"abc")
    hub.truncate("0", 2)
    hub.resume("0")
    assert await running == 0
    assert lines.written == b"c\n"
    assert "sequence numbers 0 to 1 are gone" in capsys.readouterr().err
