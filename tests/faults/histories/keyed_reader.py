"""Histories of readers with a keyed processor: `HubReader.run`, canceled, failing, gone on with, and killed.

A follower processes a partition with one reader after the other: its position is stored now and then, and when its
process is killed, or ends by itself, the next reader begins at the stored one. What must hold, whatever handlers, links
and retention do: within one process the events of a key come in order, one call at a time, and none that was processed
comes again; no more calls run than were allowed; the position never passes an event that is not processed or reported
lost; a process gets nothing from before the position that it began at, and in the end everything is processed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from eventpump import KeyedProcessor, PartitionContext, ReceivedEvent, RetryOptions
from eventpump.consumer.reader.reader import HubReader
from eventpump.errors import ConnectionLostError, DataLossError, ServiceError
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.events import EventPosition
from eventpump.options.consumer import ReaderSettings
from tests.faults.histories.manners import Oddity
from tests.faults.histories.one_partition import PASSING, OnePartition
from tests.faults.histories.world import Life, LifeTransport, Violation, World, choose
from tests.support.inside import number_at

KEYS = 5
FOLLOWERS = 2
CATCHING_UP = 400.0
"""Seconds after the last fault within which everything is processed."""
_WORKS = {
    "quick": 20.0, "slow": 8.0, "raise": 0.7, "base": 0.3, "generator exit": 0.2, "cancelled future": 0.3,
    "cancel own task": 0.3, "deaf": 0.3,
}  # fmt: skip


@dataclass(eq=False)
class _Process:
    """One process of a follower."""

    life: Life
    transport: LifeTransport
    reader: HubReader
    start: int
    task: asyncio.Task[None] | None = None
    ok: set[int] = field(default_factory=set)
    running: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By key: the events of the call that runs."""
    alone: int = 0
    """How many calls run of events without a key."""
    reached: dict[int, int] = field(default_factory=dict)


class _Follower(KeyedProcessor):
    """What a partition is processed by, and what it is judged by."""

    def __init__(self, history: KeyedReaderHistory, name: str) -> None:
        world, rng = history.world, history.world.rng
        concurrency = rng.choice((1, 3, 10))
        super().__init__(
            self._handle,
            key=self._key_of,
            concurrency=concurrency,
            max_batch_per_key=rng.choice((1, 1, 4)),
            max_events_in_flight=concurrency + rng.choice((0, 5, 100)),
            max_bytes_in_flight=rng.choice((300, 1 << 20)),
            max_ahead=concurrency + rng.choice((0, 10, 100)),
        )
        self.retry = rng.choice((None, RetryOptions(max_retries=rng.choice((1, 4)), base_delay=0.2, max_delay=3.0)))
        self.close_timeout = rng.choice((0.0, 2.0, 20.0))
        self.name = name
        self.stored = 0
        """The number at which the next process begins."""
        self.processed: set[int] = set()
        self.reported: set[int] = set()
        self.process: _Process | None = None
        self._history = history
        self._world = world
        self._rng = world.stream(f"user code of {name}")
        world.note("follower", name, self.settings, self.retry, self.close_timeout)

    def _key_of(self, event: ReceivedEvent) -> int | None:
        if not self._history.is_over and self._rng.random() < 0.01:
            raise Oddity("the key's")
        return _kind(event.sequence_number) if _kind(event.sequence_number) < KEYS else None

    async def _handle(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        process = self._history.process_of(context)
        numbers = tuple(event.sequence_number for event in events)
        self._begin(process, numbers)
        kind = _kind(numbers[0])
        try:
            await self._work("quick" if self._history.is_over else choose(self._rng, _WORKS))
            self.processed.update(numbers)
            process.ok.update(numbers)
            self._world.note("ok", process.life.name, numbers)
        finally:
            if kind < KEYS:
                process.running.pop(kind, None)
            else:
                process.alone -= 1

    def _begin(self, process: _Process, numbers: tuple[int, ...]) -> None:
        violate, kinds = self._world.violate, {_kind(number) for number in numbers}
        what = f"{process.life.name}: {numbers}"
        self._world.note("begin", what)
        (kind,) = {KEYS} if len(kinds) > 1 else kinds
        if len(kinds) > 1 or (kind == KEYS and len(numbers) > 1) or len(numbers) > self.settings.max_batch_per_key:
            violate(f"{what} are of the keys {kinds}")
        if len(process.running) + process.alone >= self.settings.concurrency:
            violate(f"{what} is one call more than {self.settings.concurrency}")
        if again := process.ok & set(numbers):
            violate(f"{what} comes again, and {sorted(again)} were processed")
        if numbers[0] < process.start:
            violate(f"{what} comes, and reading began at {process.start}")
        if kind == KEYS:
            process.alone += 1
            return
        if kind in process.running:
            violate(f"{what} runs beside {process.running[kind]}")
        process.running[kind] = numbers
        before = process.reached.get(kind)
        for number in numbers:
            if before is not None and number > before:
                missing = set(range(before + KEYS + 1, number, KEYS + 1)) - self.reported - process.ok
                if missing := {each for each in missing if each >= self._history.partition.first}:
                    violate(f"{what} came without {sorted(missing)} of its key")
            before = number if before is None else max(before, number)
        assert before is not None
        process.reached[kind] = before

    async def _work(self, work: str) -> None:
        match work:
            case "slow":
                await asyncio.sleep(self._rng.uniform(0.05, 3.0))
            case "raise":
                raise RuntimeError("the user's")
            case "base":
                raise Oddity("the user's")
            case "generator exit":
                raise GeneratorExit
            case "cancelled future":
                waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                waited.cancel()
                await waited
            case "cancel own task":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0.0)
            case "deaf":
                until = asyncio.get_running_loop().time() + self._rng.uniform(1.0, 10.0)
                while (left := until - asyncio.get_running_loop().time()) > 0:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(left)

    def check_position(self) -> int:
        """Check the position of the present reader. Return the number that a reader there would get first."""
        process = self.process
        assert process is not None
        partition = self._history.partition
        number = number_at(self._history.hub, partition.partition_id, process.reader.position)
        missing = set(range(partition.next)) - self.processed - self.reported
        if passed := {each for each in missing if each < number}:
            self._world.violate(f"{process.life.name}: the position is {number}, and {sorted(passed)} not processed")
        return number

    def lost(self, error: DataLossError) -> None:
        """Record a report of lost events."""
        assert error.first_missing is not None
        assert error.last_missing is not None
        self._world.note("lost", self.name, error.first_missing, error.last_missing)
        self.reported.update(range(error.first_missing, error.last_missing + 1))


def _kind(number: int) -> int:
    """Return the key of an event; `KEYS` if it has none."""
    return number % (KEYS + 1)


class KeyedReaderHistory(OnePartition):
    """One history."""

    def __init__(self, world: World) -> None:
        super().__init__(world, (0.0, 0.01, 0.3))
        self.is_over = False
        self.publish(world.rng.randint(20, 100))
        self.followers = [_Follower(self, f"f{number}") for number in range(FOLLOWERS)]
        self._names = 0

    async def run(self, size: int) -> None:
        """Live through `size` steps of trouble, end it, and check.

        Raises:
            Violation: A promise did not hold.
        """
        world = self.world
        actions = {
            "publish": 4.0, "detach": 2.0, "cut": 1.5, "refuse": 0.5, "accept": 2.0, "retention": 0.3, "kill": 1.5,
            "store": 3.0,
        }  # fmt: skip
        for follower in self.followers:
            self._begin(follower)
        for _ in range(size):
            await world.sleep(world.rng.expovariate(1.0) * world.rng.choice((0.05, 0.5, 5.0)))
            getattr(self, world.chosen(actions))()
        world.note("the faults end")
        self.accept()
        self.is_over = True
        self.publish(5)
        if not await world.until(lambda: not any(map(self._unprocessed, self.followers)), CATCHING_UP):
            late = next(each for each in self.followers if self._unprocessed(each))
            world.violate(f"{late.name} has not processed {sorted(self._unprocessed(late))}")
        # A reader that began again processes what its former process had, and its position stands before it until then.
        await world.until(lambda: all(map(self._is_stored, self.followers)), CATCHING_UP)
        for follower in self.followers:
            if not self._is_stored(follower) and world.violation is None:
                world.violate(f"{follower.name} is at {follower.stored}, and all is processed")
        if world.violation is not None:
            raise Violation(world.violation)

    def _unprocessed(self, follower: _Follower) -> set[int]:
        return set(range(self.partition.first, self.partition.next)) - follower.processed

    def process_of(self, context: PartitionContext) -> _Process:
        """Return the process that a context is of."""
        return next(
            each.process for each in self.followers if each.process and each.process.life.name == context.owner_id
        )

    def _begin(self, follower: _Follower) -> None:
        """Begin a process at the stored position."""
        self._names += 1
        world, name = self.world, f"{follower.name}-{self._names}"
        life = world.life(name)
        transport = LifeTransport(self.hub, life)
        settings = ReaderSettings(
            hub=self.hub.name,
            partition_id="0",
            position=EventPosition.at_sequence_number(follower.stored, inclusive=True),
            prefetch_events=world.rng.choice((10, 50, 1000)),
            receiver_name=name,
            delivery_interval=world.interval(name),
        )
        reader = HubReader(lambda: transport, settings, rng=world.stream(name), on_loss=follower.lost)
        process = follower.process = _Process(life, transport, reader, follower.stored)
        world.note("begin", name, "at", follower.stored)
        process.task = world.spawn(life, self._follow(follower, process), name)

    async def _follow(self, follower: _Follower, process: _Process) -> None:
        rng = self.world.stream(f"driver of {process.life.name}")
        try:
            async with process.reader as reader:
                while True:
                    try:
                        patience = rng.choice((None, rng.uniform(0.1, 20.0)))
                        async with asyncio.timeout(None if self.is_over else patience):
                            await reader.run(
                                follower, handler_retry=follower.retry, close_timeout=follower.close_timeout
                            )
                        self.world.violate(f"{process.life.name}: run returned, and there is no end")
                    except (RuntimeError, TimeoutError) as error:
                        self.world.note("run ended", process.life.name, repr(error)[:80])
                    if process.running or process.alone:
                        self.world.violate(f"{process.life.name}: run ended, and {process.running} runs")
                    follower.check_position()
                    if rng.random() < 0.2:
                        self._read(follower, process, await reader.read(rng.randint(1, 5), 0.1))
                        follower.check_position()
        except ServiceError as error:
            self.world.note("ends", process.life.name, repr(error)[:80])
            await asyncio.sleep(1.0)
            self._begin(follower)

    def _read(self, follower: _Follower, process: _Process, events: list[ReceivedEvent]) -> None:
        """Process events that a call of `read` has returned."""
        for event in events:
            number = event.sequence_number
            self.world.note("read", process.life.name, number)
            if number in process.ok:
                self.world.violate(f"{process.life.name}: read returned {number}, which was processed")
            process.ok.add(number)
            follower.processed.add(number)
            if (kind := _kind(number)) < KEYS:
                process.reached[kind] = max(number, process.reached.get(kind, -1))

    # -------------------------------------------------------------------------------------------------- actions

    def publish(self, count: int | None = None) -> None:
        count = self.world.rng.choice((1, 3, 40)) if count is None else count
        self.world.note("publish", f"{count} from {self.partition.next}")
        self.hub.publish("0", count=count)

    def store(self) -> None:
        """Store the positions, as user code would."""
        for follower in self.followers:
            number = follower.check_position()
            self.world.note("store", follower.name, number)
            if number < follower.stored:
                self.world.violate(f"{follower.name}: the position went back from {follower.stored} to {number}")
            follower.stored = number

    def _is_stored(self, follower: _Follower) -> bool:
        self.store()
        return follower.stored == self.partition.next

    def kill(self) -> None:
        follower = self.world.rng.choice(self.followers)
        assert follower.process is not None
        self.world.note("kill", follower.process.life.name)
        follower.process.life.kill()
        follower.process.transport.lose(ConnectionLostError("the process was killed"))
        self._begin(follower)

    def cut(self) -> None:
        process = self.world.rng.choice(self.followers).process
        assert process is not None
        self.world.note("cut", process.life.name)
        process.transport.lose(ConnectionLostError("cut by the history"))

    def refuse(self) -> None:
        condition = self.world.rng.choice(PASSING)
        self.world.note("refuse", condition)
        self.hub.refuse(error_for(condition, "by the history"), times=float("inf"))

    def accept(self) -> None:
        self.hub.accept()


async def keyed_reader_history(world: World, size: int) -> None:
    """Live one history of readers with a keyed processor."""
    await KeyedReaderHistory(world).run(size)
