"""Histories of readers: what a `PartitionReader` gives, over links that end, hubs that drop events, and ranges.

What must hold: from its start on a reader gives every event once and in order; where retention took some of them it
says so; a range ends in time, whatever became of its end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from eventpump.consumer.reader import PartitionReader
from eventpump.dialect.conditions import error_for
from eventpump.errors import ConnectionLostError, DataLossError, ServiceError
from eventpump.events import EventPosition
from eventpump.settings import ReaderSettings
from eventpump.testing.transport import FakeHub
from tests.faults.histories.world import LifeTransport, Violation, World

CATCHING_UP = 120.0
"""Seconds after the last fault within which a reader has given everything: one back-off at its longest, and slack."""
_PASSING = ["amqp:link:detach-forced", "amqp:internal-error", "com.microsoft:timeout", "com.microsoft:server-busy"]


@dataclass
class _Reader:
    """A reader, and what it is owed.

    :ivar earliest_start: what it may give first.
    :ivar latest_start: what it must give first, where nothing from it on is gone; None before its first link.
    :ivar given: the last number it gave.
    """

    name: str
    transport: LifeTransport
    reader: PartitionReader
    is_from_start: bool
    earliest_start: int
    latest_start: int | None = None
    end: int | None = None
    given: int | None = None
    task: asyncio.Task[None] | None = None
    has_failed: bool = False


class ReaderHistory:
    """One history."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hub = FakeHub(partitions=1, latency=world.rng.choice((0.0, 0.01, 0.3)))
        self.partition = self.hub.partition("0")
        self.readers: list[_Reader] = []
        self.is_refusing = False

    async def run(self, size: int) -> None:
        """Live through `size` steps of trouble, end it, and check. :raises Violation: a promise did not hold."""
        world = self.world
        self.publish(world.rng.randint(0, 30))
        actions = {
            "publish": 4.0,
            "join": 1.5,
            "detach": 3.0,
            "cut": 2.0,
            "refuse": 0.7,
            "accept": 2.0,
            "retention": 0.5,
        }
        for _ in range(size):
            await world.sleep(world.rng.expovariate(1.0) * world.rng.choice((0.05, 0.5, 5.0)))
            getattr(self, world.chosen(actions))()
        world.note("the faults end")
        self.accept()
        await world.sleep(CATCHING_UP)
        self.publish(5)
        if not await world.until(lambda: all(map(self._is_through, self.readers)), CATCHING_UP):
            late = next(each for each in self.readers if not self._is_through(each))
            text = f"{late.name} gave {late.given} last, and stands there {CATCHING_UP:.0f} s after the last fault"
            world.violate(f"{text}; its range ends at {late.end}, the partition at {self.partition.next - 1}")
        if world.violation is not None:
            raise Violation(world.violation)

    def _is_through(self, each: _Reader) -> bool:
        if each.has_failed:
            return True
        if each.end is not None:
            return each.task is not None and each.task.done()
        return each.given == self.partition.next - 1

    async def _read(self, each: _Reader) -> None:
        try:
            async with each.reader:
                while events := await each.reader.read():
                    for event in events:
                        self._gave(each, event.sequence_number)
        except DataLossError as error:
            self.world.note("fails", each.name, error)
            if each.given is not None and self.partition.first <= each.given + 1:
                self.world.violate(f"{each.name} tells of a loss, and number {each.given + 1} is there")
            each.has_failed = True
        except ServiceError as error:
            # What passes is tried again for ever once a reader was attached; these are its start's.
            self.world.note("ends", each.name, repr(error))
            each.has_failed = True
            if each.given is not None:
                self.world.violate(f"{each.name} ended by itself after number {each.given}: {error!r}")
        else:
            self.world.note("is at its end", each.name)

    def _gave(self, each: _Reader, number: int) -> None:
        expected = each.latest_start if each.given is None else each.given + 1
        assert expected is not None
        if each.given is None:
            # Nothing was given yet: from the start of the stream means from whatever is the oldest.
            latest = max(expected, self.partition.first) if each.is_from_start else expected
            is_right = each.earliest_start <= number <= latest
        else:
            is_right = number == expected
        if not is_right:
            # Only what the hub holds no more may be left out, and a default reader says so by failing.
            self.world.violate(f"{each.name} gave {number} after {each.given}, where {expected} was next")
        each.given = number

    # -------------------------------------------------------------------------------------------------- actions

    def publish(self, count: int | None = None) -> None:
        count = self.world.rng.choice((1, 3, 20)) if count is None else count
        self.world.note("publish", f"{count} from {self.partition.next}")
        self.hub.publish("0", count=count)

    def join(self) -> None:
        if len(self.readers) >= 5:
            return
        world = self.world
        name = f"r{len(self.readers) + 1}"
        life = world.life(name)
        transport = LifeTransport(self.hub, life)
        start = world.rng.choice(("earliest", "latest"))
        has_end = start == "earliest" and world.rng.random() < 0.3 and not self.is_refusing
        options: dict[str, Any] = {"end": "@latest"} if has_end else {}
        position = EventPosition.earliest() if start == "earliest" else EventPosition.latest()
        settings = ReaderSettings(hub=self.hub.name, partition_id="0", position=position, cache_events=50, **options)
        reader = PartitionReader(lambda: transport, settings, rng=world.stream(name))
        is_from_start = start == "earliest"
        joined = _Reader(
            name, transport, reader, is_from_start, self.partition.first if is_from_start else self.partition.next
        )
        self.readers.append(joined)
        world.note("join", name, start, "to the end" if has_end else "")
        if has_end:
            joined.end = self.partition.next - 1
        transport.on_attached = lambda: self._attached(joined)
        joined.task = world.spawn(life, self._read(joined), name)

    def _attached(self, each: _Reader) -> None:
        """Take down what a reader is owed at the latest, once it has its first link."""
        if each.latest_start is None:
            each.latest_start = self.partition.first if each.is_from_start else self.partition.next
            self.world.note("reads", each.name, f"from {each.latest_start} at the latest")

    def detach(self) -> None:
        condition = self.world.rng.choice(_PASSING)
        self.world.note("detach", condition)
        self.hub.detach(None, error_for(condition, "by the history"))

    def cut(self) -> None:
        if self.readers:
            each = self.world.rng.choice(self.readers)
            self.world.note("cut", each.name)
            each.transport.lose(ConnectionLostError("cut by the history"))

    def refuse(self) -> None:
        condition = self.world.rng.choice(_PASSING)
        self.world.note("refuse", condition)
        self.is_refusing = True
        self.hub.refuse(error_for(condition, "by the history"), times=float("inf"))

    def accept(self) -> None:
        self.is_refusing = False
        self.hub.accept()

    def retention(self) -> None:
        if self.partition.next > self.partition.first:
            before = self.world.rng.randint(self.partition.first + 1, self.partition.next)
            self.world.note("retention", f"takes what is before {before}")
            self.hub.truncate("0", before)


async def reader_history(world: World, size: int) -> None:
    """Live one history of readers."""
    await ReaderHistory(world).run(size)
