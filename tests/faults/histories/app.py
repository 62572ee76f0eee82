"""Histories of decorated functions: no checkpoint covers an event whose result is not stored, whatever they ask for.

Functions ask for checkpoints everywhere, also through tasks and `wait_for`, seek, raise and hang; the hub of the
results takes its time, and refuses some. An event counts as processed when its result is stored, and when it is skipped
or parked. Hosts are killed meanwhile, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import Any

from eventpump import KeyedProcessor, Park, PartitionContext, ReceivedEvent, RetryOptions
from eventpump.app.handlers import Handler, ResultDestination, RoutedFunction, RouteProcessor
from eventpump.errors import ConfigurationError, EventPumpError
from eventpump.eventhubs.decoding import PAYLOADS
from eventpump.eventhubs.events import Checkpoint, EventData
from eventpump.reports import EventParked, EventSkipped, HostReport
from tests.faults.histories.consumer import ConsumerHistory, HistoryHost, Profile, on_file
from tests.faults.histories.keyed import key_of
from tests.faults.histories.ledger import Call, Ledger, Place
from tests.faults.histories.manners import UnrulyProcessor
from tests.faults.histories.world import Life, World, choose, own_paces

_WORKS = {"quick": 8.0, "slow": 3.0, "raise": 0.7, "raise late": 0.5, "hang": 0.1, "deaf": 0.1, "base": 0.2,
          "cancelled future": 0.1, "cancel own task": 0.1, "generator exit": 0.1}  # fmt: skip
_ASKS = {"none": 5.0, "all": 3.0, "event": 1.0, "before": 1.0, "task": 1.0, "wait_for": 1.0, "left over": 1.0}

PROFILES: dict[str, Profile] = {
    name: Profile(
        {"join": 2.0, "leave": 1.0, "crash": 1.5, "detach": 0.5, "seek": 0.5},
        _WORKS,
        _ASKS,
        is_asking=True,
        backlog=(0, 60),
    )
    for name in ("plain", "keyed")
}


class AppLedger(Ledger):
    """What decorated functions are judged by."""

    def __init__(self, *args: Any, is_keyed: bool) -> None:
        super().__init__(*args)
        self._is_keyed = is_keyed

    def begin(self, host: str, partition_id: str, epoch: int, events: tuple[ReceivedEvent, ...]) -> Call:
        """Record a call of the function."""
        if self._is_keyed:
            self._running.clear()  # several run at a time
        return super().begin(host, partition_id, epoch, events)

    def _check_order(self, call: Call) -> None:
        """Check nothing: what fails to be stored is handled again by itself."""

    def ok(self, call: Call) -> None:
        """Record that the function has returned: that is not enough."""
        call.is_running = False

    def claim(self, call: Call, last: int) -> None:
        """Record nothing: any request for a checkpoint stores events whose results are stored only."""

    def result_stored(self, result: EventData) -> None:
        """Record that the result of an event is stored: its body names the event."""
        making, partition_id, number = result.body.decode().split("/")
        self._shores[int(making), partition_id].processed.add(int(number))

    def was_passed_over(self, partition_id: str, number: int) -> None:
        """Record that an event was skipped or parked."""
        self._shores[self.making, partition_id].processed.add(number)

    def passed_over(self, place: Place) -> set[int]:
        """Return nothing: it counts as processed."""
        return set()

    def took(
        self, partition_id: str, epoch: int, asked: Checkpoint, held: Checkpoint | None, *, is_reset: bool
    ) -> None:
        """Check what the store holds; a seek is the user's statement about all before its position."""
        if is_reset and held is not None:
            self._shores[self.making, partition_id].exempt.update(range(held.sequence_number + 1))
        super().took(partition_id, epoch, asked, held, is_reset=is_reset)


class _Results:
    """The producer of a host's results, as `BufferedProducer` but for the events, which lead nowhere."""

    def __init__(self, history: AppHistory, life: Life) -> None:
        self._history = history
        self._rng = history.world.stream(f"results of {life.name}")

    async def send(self, event: EventData, *, partition_key: str | None = None) -> _Receipt:
        """Accept a result."""
        if self._rng.random() < 0.1:
            await asyncio.sleep(self._rng.uniform(0.0, 1.0))  # no room
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(self._rng.choice((0.0, 0.1, 0.5, 3.0)), self._end, event, stored)
        return _Receipt(stored)

    def _end(self, event: EventData, stored: asyncio.Future[None]) -> None:
        history, chance = self._history, self._rng.random()
        if chance < 0.02 and not history.manners.is_good.is_set():
            asyncio.get_running_loop().call_later(5.0, self._end, event, stored)
        elif chance < 0.08 and not history.manners.is_good.is_set():
            stored.set_exception(ConnectionError("refused"))
            stored.exception()
        else:
            history.ledger.result_stored(event)
            stored.set_result(None)


class _Receipt:
    """The outcome of a result; a wait that is cancelled ends alone."""

    def __init__(self, stored: asyncio.Future[None]) -> None:
        self._stored = stored
        self.done = stored.done

    def __await__(self) -> Any:
        if self._stored.done():
            return self._stored.__await__()
        return asyncio.shield(self._stored).__await__()


class UnrulyFunction(UnrulyProcessor):
    """A decorated function: what it does with an event, and what it asks for."""

    async def handle(self, event: ReceivedEvent, context: PartitionContext) -> bytes:
        """Handle an event: its result is its body."""
        call = self._ledger.begin(self._life.name, context.partition_id, context.owner_level, (event,))
        try:
            await self._process(context, (event,), call)
        except BaseException as error:
            self._ledger.failed(call, error)
            raise
        self._ledger.ok(call)
        return event.body

    async def _process(self, context: PartitionContext, events: Any, call: Call) -> None:
        rng, (event,) = self._rng, events
        work, asks = choose(rng, self._manners.works), choose(rng, self._manners.checkpoints)
        if self._manners.is_good.is_set() and work not in ("quick", "slow"):
            work = "quick"
        if rng.random() < 0.5:
            await self._work(work, rng)
            work = "quick"
        if asks == "left over":
            task = asyncio.get_running_loop().create_task(self._ask_later(context, call, rng.uniform(0.0, 5.0)))
            self._left_over.add(task)
            task.add_done_callback(self._left_over.discard)
        elif asks != "none":
            with contextlib.suppress(EventPumpError):
                await self._asked(asks, event, context)
        if rng.random() < 0.01 and not self._manners.is_good.is_set():
            with contextlib.suppress(EventPumpError):
                context.seek(max(0, event.sequence_number - rng.randrange(5)))
        await self._work(work, rng)

    async def _asked(self, asks: str, event: ReceivedEvent, context: PartitionContext) -> None:
        """Ask for a checkpoint."""
        match asks:
            case "all":
                await context.checkpoint()
            case "event":
                await self._refused(context, event)
            case "before":
                if self._last is not None:
                    await context.checkpoint(self._last)
            case "task":
                await asyncio.create_task(context.checkpoint())
            case "wait_for":
                await asyncio.wait_for(context.checkpoint(), 60.0)
        self._last = event

    _last: ReceivedEvent | None = None

    async def _refused(self, context: PartitionContext, event: ReceivedEvent) -> None:
        """Ask for a checkpoint of an event that is being handled; it is there already after a seek back only."""
        try:
            await context.checkpoint(event)
        except ConfigurationError:
            return
        self._world.note("taken", context.partition_id, event.sequence_number)


class AppHistory(ConsumerHistory):
    """One history of an application's functions."""

    ledger: AppLedger

    def __init__(self, world: World, profile: Profile, directory: Path | None, *, is_keyed: bool) -> None:
        super().__init__(world, profile, directory)
        self.is_keyed = is_keyed
        self.ledger = AppLedger(world, self.hub, self.start, is_keyed=is_keyed)
        rng = self._parking = world.stream("policies")
        passes: Any = rng.choice(("skip", Park(self._park), "stop_partition"))
        self.options |= {
            "failure_policy": rng.choice(("retry", "retry", passes)),
            "handler_retry": RetryOptions(max_retries=rng.choice((1, 4)), base_delay=0.2, max_delay=3.0),
            "on_retries_exhausted": passes,
            "handler_timeout": 10.0,
            "on_handler_timeout": rng.choice(("report", "cancel", "cancel")),
        }
        world.note("app", self.options["failure_policy"], passes, self.options["on_handler_timeout"])

    async def _park(self, context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        with contextlib.suppress(EventPumpError):
            await context.checkpoint(event if self._parking.random() < 0.5 else None)
        if self._parking.random() < 0.3 and not self.manners.is_good.is_set():
            raise OSError("no room to park")

    def processor(self, life: Life) -> Any:
        function = UnrulyFunction(self.world, life, self.ledger, self.manners)
        results = ResultDestination("results", partition_key=lambda value: None, producer=_Results(self, life))
        route = RoutedFunction(Handler(function.handle, PAYLOADS), [results])
        if self.is_keyed:
            return KeyedProcessor(route.handle_keyed, key=key_of, concurrency=self._parking.choice((1, 3, 10)))
        return partial(RouteProcessor, route)

    def _reported(self, host: HistoryHost, report: HostReport) -> None:
        super()._reported(host, report)
        if isinstance(report, EventSkipped | EventParked):
            assert report.partition_id is not None
            assert report.sequence_number is not None
            self.ledger.was_passed_over(report.partition_id, report.sequence_number)

    async def seek(self) -> None:
        if self._living:
            host, rng = self.world.rng.choice(self._living), self.world.rng
            partition_id = rng.choice(self.hub.partition_ids)
            number = rng.randint(0, max(0, self.ledger.end(partition_id)))
            self.world.note("seek", host.life.name, partition_id, number)
            self.world.spawn(host.life, self._seek(host, partition_id, number), "seek")

    async def _seek(self, host: HistoryHost, partition_id: str, number: int) -> None:
        with contextlib.suppress(EventPumpError):
            await host.host.seek("default", number, [partition_id])


async def app_history(world: World, size: int) -> None:
    """Live one history of decorated functions, plain or with keys, as the part of its kind behind "app:" says."""
    name = world.kind.partition(":")[2]
    with on_file(world, is_wanted=False) as directory, own_paces():
        await AppHistory(world, PROFILES[name], directory, is_keyed=name == "keyed").run(size)
