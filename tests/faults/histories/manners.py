"""User code that misbehaves, as its history says."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from eventpump import CloseReason, EventProcessor, PartitionContext, ReceivedEvent
from eventpump.errors import EventPumpError
from tests.faults.histories.ledger import Call, Ledger
from tests.faults.histories.world import Life, World, choose


class Oddity(BaseException):
    """What user code should not raise."""


@dataclass
class Manners:
    """How a history's user code behaves.

    Args:
        works: Weights of what a call of `process_events` does: quick, slow, raise, raise late, hang, stuck, deaf,
            cancelled future, cancel own task, base, generator exit, compute.
        checkpoints: Weights of how a call asks for a checkpoint: none, end, middle, begin, left over.
        asks_in_close: Whether `close` asks for a checkpoint; `asks_in_error`: whether `process_error` does;
            `asks_by_timer`: whether a task of the partition does every few seconds.
        compute: Seconds that a computing call blocks the loop for, at most.
    """

    works: Mapping[str, float] = field(default_factory=lambda: {"quick": 1.0})
    checkpoints: Mapping[str, float] = field(default_factory=lambda: {"end": 1.0})
    asks_in_close: bool = False
    asks_in_error: bool = False
    asks_by_timer: bool = False
    compute: float = 1.0
    is_good: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set once the faults are over: calls that hang return, and later ones only work."""


_GOOD = ("quick", "slow", "compute")


class UnrulyProcessor(EventProcessor):
    """A host's processor."""

    def __init__(self, world: World, life: Life, ledger: Ledger, manners: Manners) -> None:
        self._world = world
        self._life = life
        self._ledger = ledger
        self._manners = manners
        self._rng = world.stream(f"user code of {life.name}")
        self._timers: dict[str, asyncio.Task[None]] = {}
        self._left_over: set[asyncio.Task[None]] = set()

    async def open(self, context: PartitionContext) -> None:
        if self._manners.asks_by_timer:
            timer = asyncio.get_running_loop().create_task(self._ask_now_and_then(context), name="user's timer")
            self._timers[context.partition_id] = timer

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        call = self._ledger.begin(context.owner_id, context.partition_id, context.owner_level, tuple(events))
        try:
            await self._process(context, events, call)
        except BaseException as error:
            self._ledger.failed(call, error)
            raise
        self._ledger.ok(call)

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        if self._manners.asks_in_error:
            self._world.note("ask in process_error", context.owner_id, context.partition_id)
            await context.checkpoint()

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        timer = self._timers.pop(context.partition_id, None)
        if timer is not None:
            timer.cancel()
        if self._manners.asks_in_close:
            self._world.note("ask in close", context.owner_id, context.partition_id, reason.value)
            await context.checkpoint()

    # ----------------------------------------------------------------------------------------------- one call

    async def _process(self, context: PartitionContext, events: Sequence[ReceivedEvent], call: Call) -> None:
        manners, rng = self._manners, self._rng
        work, asks = choose(rng, manners.works), choose(rng, manners.checkpoints)
        if manners.is_good.is_set() and work not in _GOOD:
            work = "quick"
        if asks == "begin":
            await self._claim(context, events[-1], call, is_named=False)
        elif asks == "middle":
            await self._claim(context, events[rng.randrange(len(events))], call)
        elif asks == "left over":
            task = asyncio.get_running_loop().create_task(self._ask_later(context, call, rng.uniform(0.0, 5.0)))
            self._left_over.add(task)
            task.add_done_callback(self._left_over.discard)
        if work != "quick":
            self._world.note(work, self._life.name, context.partition_id)
        await self._work(work, rng)
        if asks == "end":
            await self._claim(context, events[-1], call, is_named=rng.random() < 0.5)

    async def _claim(
        self, context: PartitionContext, event: ReceivedEvent, call: Call, *, is_named: bool = True
    ) -> None:
        self._ledger.claim(call, event.sequence_number)
        await context.checkpoint(event if is_named else None)

    async def _work(self, work: str, rng: random.Random) -> None:
        match work:
            case "slow":
                await asyncio.sleep(rng.uniform(0.05, 3.0))
            case "raise":
                raise RuntimeError("the user's")
            case "raise late":
                await asyncio.sleep(rng.uniform(0.05, 3.0))
                raise RuntimeError("the user's, late")
            case "hang":
                await self._manners.is_good.wait()
            case "stuck":
                await asyncio.Event().wait()  # until it is cancelled, whether the faults are over or not
            case "deaf":
                await self._be_deaf(rng.uniform(1.0, 30.0))
            case "cancelled future":
                waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                waited.cancel()
                await waited
            case "cancel own task":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0.0)
            case "base":
                raise Oddity("the user's")
            case "generator exit":
                raise GeneratorExit
            case "compute":
                self._world.loop.advance(rng.uniform(0.2, 1.0) * self._manners.compute)

    async def _be_deaf(self, seconds: float) -> None:
        """Take no cancellation for a time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until and not self._manners.is_good.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(until - loop.time())

    # ------------------------------------------------------------------------------------- from outside a call

    async def _ask_later(self, context: PartitionContext, call: Call, delay: float) -> None:
        """Ask from a task that a call has left over, or that runs beside it."""
        await asyncio.sleep(delay)
        self._ledger.claim(call, call.numbers[-1])
        self._world.note("ask from a task left over", context.owner_id, context.partition_id)
        await self._ask(context)

    async def _ask_now_and_then(self, context: PartitionContext) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 10.0))
            self._world.note("ask by timer", context.owner_id, context.partition_id)
            await self._ask(context)

    @staticmethod
    async def _ask(context: PartitionContext) -> None:
        with contextlib.suppress(EventPumpError):
            await context.checkpoint()
