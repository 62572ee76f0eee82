"""Histories of readers: what a `HubReader` gives, over links that end, hubs that drop events, and ranges.

What must hold: from its start on a reader gives every event once and in order; where retention took some of them it
says so; a range ends in time, whatever happened to its end. In the histories of large events, too: what a feed holds
keeps to the bounds that `CreditWindow` states, at every hand-off.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from eventpump.consumer.link.feed import PartitionFeed
from eventpump.consumer.reader.reader import HubReader
from eventpump.errors import ConnectionLostError, DataLossError, EventPumpError, ServiceError
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ReceiveSink
from eventpump.options.consumer import ReaderSettings
from tests.faults.histories.one_partition import PASSING, OnePartition
from tests.faults.histories.world import LifeTransport, Violation, World

CATCHING_UP = 120.0
"""Seconds after the last fault within which a reader has given everything: one back-off at its longest, and slack."""


@dataclass
class _Reader:
    """A reader, and what it is owed.

    Attributes:
        earliest_start: What it may give first.
        latest_start: What it must give first, where nothing from it on is gone; None before its first link.
        given: The last number it gave.
        reported: The numbers that it reported lost.
        owed: The numbers that it left out unreported, because the service did not answer whether they are lost.
    """

    name: str
    transport: LifeTransport
    reader: HubReader
    is_from_start: bool
    earliest_start: int
    latest_start: int | None = None
    end: int | None = None
    given: int | None = None
    task: asyncio.Task[None] | None = None
    has_failed: bool = False
    reported: set[int] = field(default_factory=set)
    owed: set[int] = field(default_factory=set)


class _Bounds:
    """Passes a feed on what comes, and checks what it then holds."""

    def __init__(self, world: World, name: str, feed: PartitionFeed[bytes], settings: ReaderSettings) -> None:
        self._world = world
        self._name = name
        self._feed = feed
        self._settings = settings
        self._could_come = 0
        self._largest = 0

    def messages(self, batch: list[bytes]) -> None:
        before, could_come = self._feed.bytes_held, self._feed._credit.allowance
        self._feed.messages(batch)
        events, held, room = self._feed.events_held, self._feed.bytes_held, self._settings.prefetch_bytes
        if len(batch) > could_come:
            self._world.violate(f"{self._name} was sent {len(batch)} events, where {could_come} were to come")
        if events > self._settings.prefetch_events:
            self._world.violate(
                f"{self._name} holds {events} events, and has room for {self._settings.prefetch_events}"
            )
        if held < room:
            return
        if before < room:
            self._could_come, self._largest = could_come, 0
            self._world.note("is full", self._name, f"{held} bytes")
        self._largest = max(self._largest, *map(len, batch))
        if held >= room + self._could_come * self._largest:
            text = f"{self._could_come} events of at most {self._largest} bytes could come"
            self._world.violate(f"{self._name} holds {held} bytes, and has room for {room}; {text}")

    def detached(self, error: EventPumpError) -> None:
        self._feed.detached(error)


class ReaderHistory(OnePartition):
    """One history.

    Args:
        is_large: Whether events are of many sizes, caches small, and readers slow.
    """

    def __init__(self, world: World, *, is_large: bool = False) -> None:
        super().__init__(world, (0.05, 0.3) if is_large else (0.0, 0.01, 0.3))
        self.is_large = is_large
        self.readers: list[_Reader] = []
        self.is_refusing = False
        self.is_over = False

    async def run(self, size: int) -> None:
        """Live through `size` steps of trouble, end it, and check.

        Raises:
            Violation: A promise did not hold.
        """
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
        if self.is_large:
            actions |= {"publish": 12.0, "detach": 0.5, "cut": 0.5, "retention": 0.1}
        for _ in range(size):
            await world.sleep(world.rng.expovariate(1.0) * world.rng.choice((0.05, 0.5, 5.0)))
            getattr(self, world.chosen(actions))()
        world.note("the faults end")
        self.accept()
        self.is_over = True
        await world.sleep(CATCHING_UP)
        self.publish(5)
        # A cache may have room for one event, and get one in each `delivery_interval`.
        patience = CATCHING_UP + (3.0 * self.partition.next if self.is_large else 0.0)
        if not await world.until(lambda: all(map(self._is_through, self.readers)), patience):
            late = next(each for each in self.readers if not self._is_through(each))
            text = f"{late.name} gave {late.given} last, and stands there {patience:.0f} s after the last fault"
            world.violate(f"{text}; its range ends at {late.end}, the partition at {self.partition.next - 1}")
        for each in self.readers:
            if each.end is None and not each.has_failed and not each.owed <= each.reported:
                world.violate(f"{each.name} did not report {min(each.owed - each.reported)} lost, and read on")
        if world.violation is not None:
            raise Violation(world.violation)

    def _is_through(self, each: _Reader) -> bool:
        if each.has_failed:
            return True
        if each.end is not None:
            return each.task is not None and each.task.done()
        return each.given == self.partition.next - 1

    async def _read(self, each: _Reader) -> None:
        rng = self.world.stream(f"pace of {each.name}")
        try:
            async with each.reader:
                while events := await each.reader.read(rng.randint(1, 20) if self.is_large else 300):
                    if self.is_large:
                        await asyncio.sleep(0.0 if self.is_over else rng.choice((0.0, 0.1, 1.0)) * rng.random())
                    for event in events:
                        self._gave(each, event.sequence_number)
        except DataLossError as error:
            self.world.note("fails", each.name, error)
            self._lost(each, error)
            each.has_failed = True
        except ServiceError as error:
            # What passes is tried again forever once a reader was attached; these are its start's.
            self.world.note("ends", each.name, repr(error))
            each.has_failed = True
            if each.given is not None:
                self.world.violate(f"{each.name} ended by itself after number {each.given}: {error!r}")
        else:
            self.world.note("is at its end", each.name)

    def _lost(self, each: _Reader, error: DataLossError) -> None:
        """Check a report of lost events, and take it down."""
        assert error.first_missing is not None
        assert error.last_missing is not None
        self.world.note("lost", each.name, error.first_missing, error.last_missing)
        if error.last_missing >= self.partition.first:
            self.world.violate(f"{each.name} reports {error.last_missing} lost, and the hub holds it")
        each.reported.update(range(error.first_missing, error.last_missing + 1))

    def _gave(self, each: _Reader, number: int) -> None:
        expected = each.latest_start if each.given is None else each.given + 1
        assert expected is not None
        if each.given is None:
            # Nothing was given yet: from the start of the stream means from whatever is the oldest.
            latest = max(expected, self.partition.first) if each.is_from_start else expected
            is_right = each.earliest_start <= number <= latest
        else:
            is_right = number == expected
        left_out = range(expected, number)
        if left_out and number <= self.partition.first and not is_right and not each.reported.issuperset(left_out):
            # Asking whether they are lost may have failed: it is asked again with what is read later.
            self.world.note("owes", each.name, expected, number - 1)
            each.owed.update(left_out)
            is_right = True
        is_right = is_right or (bool(left_out) and each.reported.issuperset(left_out))
        if not is_right:
            # Only what the hub holds no more may be left out, and its loss is reported.
            self.world.violate(f"{each.name} gave {number} after {each.given}, where {expected} was next")
        each.given = number

    # -------------------------------------------------------------------------------------------------- actions

    def publish(self, count: int | None = None) -> None:
        rng = self.world.rng
        count = rng.choice((1, 3, 20)) if count is None else count
        self.world.note("publish", f"{count} from {self.partition.next}")
        if self.is_large:
            # Alike for a while, then of another kind.
            usual = rng.choice((1, 100, 3000))
            self.hub.publish("0", *(b"x" * rng.randint(1, usual) for _ in range(3 * count)))
        else:
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
        room: dict[str, Any] = {"prefetch_events": 50}
        if self.is_large:
            room = {"prefetch_events": world.rng.choice((10, 200)), "prefetch_bytes": world.rng.choice((1024, 20_000))}
        settings = ReaderSettings(
            hub=self.hub.name,
            partition_id="0",
            position=position,
            on_data_loss=world.rng.choice((None, "fail")),
            delivery_interval=world.interval(name),
            **room,
            **options,
        )
        reader = HubReader(
            lambda: transport, settings, rng=world.stream(name), on_loss=lambda error: self._lost(joined, error)
        )
        is_from_start = start == "earliest"
        joined = _Reader(
            name, transport, reader, is_from_start, self.partition.first if is_from_start else self.partition.next
        )
        self.readers.append(joined)
        world.note("join", name, start, "to the end" if has_end else "")
        if has_end:
            joined.end = self.partition.next - 1
        transport.on_attached = lambda: self._attached(joined)

        def watched(sink: ReceiveSink) -> ReceiveSink:
            assert isinstance(sink, PartitionFeed)
            return _Bounds(world, name, sink, settings)

        transport.watched = watched
        joined.task = world.spawn(life, self._read(joined), name)

    def _attached(self, each: _Reader) -> None:
        """Take down what a reader is owed at the latest, once it has its first link."""
        if each.latest_start is None:
            each.latest_start = self.partition.first if each.is_from_start else self.partition.next
            self.world.note("reads", each.name, f"from {each.latest_start} at the latest")

    def cut(self) -> None:
        if self.readers:
            each = self.world.rng.choice(self.readers)
            self.world.note("cut", each.name)
            each.transport.lose(ConnectionLostError("cut by the history"))

    def refuse(self) -> None:
        condition = self.world.rng.choice(PASSING)
        self.world.note("refuse", condition)
        self.is_refusing = True
        self.hub.refuse(error_for(condition, "by the history"), times=float("inf"))

    def accept(self) -> None:
        self.is_refusing = False
        self.hub.accept()


async def reader_history(world: World, size: int) -> None:
    """Live one history of readers; of large events, where its kind says so behind "reader:"."""
    await ReaderHistory(world, is_large=world.kind == "reader:large").run(size)
