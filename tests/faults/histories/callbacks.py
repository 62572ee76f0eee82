"""User code that calls back into its own host: directly, through tasks, threads and `wait_for`, or later.

What must hold: a call that would wait for the batch which its caller has in hand is refused within `AT_ONCE`, whatever
way it comes; any other call has returned or raised when the faults have ended and time enough has passed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from asyncio import futures
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from eventpump import PartitionContext
from eventpump.consumer.host.host import HubHost
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.errors import ConfigurationError, EventPumpError
from tests.faults.histories.world import Life, World

_T = TypeVar("_T")

AT_ONCE = 5.0
"""Seconds within which a call from a batch is refused. Only positions that are looked up take any."""
WAYS = ("directly", "task", "wait_for", "thread", "later")
CALLS = ("seek", "replay", "drain")

Call = Callable[[], Awaitable[tuple[str, ...]]]


class Callbacks:
    """The calls that a history's user code makes of its hosts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[object, tuple[str, Life]] = {}
        self._left_over: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> Sequence[str]:
        """The calls of living processes that have neither returned nor raised."""
        return [name for name, life in self._open.values() if life.is_running]

    async def ask(
        self, life: Life, host: HubHost, context: PartitionContext, rng: random.Random, *, number: int
    ) -> None:
        """Call the host from within a batch.

        Args:
            number: Of the batch: what is sought and replayed lies around it.
        """
        what, way = rng.choice(CALLS), rng.choice(WAYS)
        name = f"{life.name} {what} {way} from {context.partition_id} [{number}]"
        where = None if rng.random() < 0.3 else [context.partition_id]
        low = max(0, number + rng.randint(-20, 5))
        calls: dict[str, Call] = {
            "seek": lambda: host.seek(DEFAULT_SUBSCRIPTION, low, where),
            "replay": lambda: host.replay(
                DEFAULT_SUBSCRIPTION, from_=low, to=low + rng.randrange(20), partition_ids=where
            ),
            "drain": lambda: host.drain(DEFAULT_SUBSCRIPTION),
        }
        # A late seek is none of the ledger's; see `Rewound` for those.
        call = calls["drain" if way == "later" else what]
        self._world.note("calls back", name)
        if way == "later":
            task = asyncio.get_running_loop().create_task(self._later(name, life, call, rng.uniform(0.0, 5.0)))
            self._left_over.add(task)
            task.add_done_callback(self._left_over.discard)
            return
        loop = asyncio.get_running_loop()
        watch = loop.call_later(AT_ONCE, self._is_stuck, name)
        try:
            done = await self._tracked(name, life, in_way(way, call))
        except ConfigurationError:
            return
        except EventPumpError as error:
            self._world.note("refused", name, repr(error)[:120])
            return
        finally:
            watch.cancel()
        if context.partition_id in done:
            # Without it where the partition is another host's by now.
            self._world.violate(f"{name} returned {done}, and its batch was in hand")

    async def tracked(self, name: str, life: Life, work: Awaitable[object]) -> None:
        """Wait for a call that may take as long as the faults do."""
        with suppress(EventPumpError, TimeoutError):
            await self._tracked(name, life, work)

    def _is_stuck(self, name: str) -> None:
        self._world.violate(f"{name} neither returned nor raised within {AT_ONCE} s")

    async def _tracked(self, name: str, life: Life, work: Awaitable[_T]) -> _T:
        token = object()
        self._open[token] = name, life
        try:
            return await work
        finally:
            self._open.pop(token, None)

    async def _later(self, name: str, life: Life, call: Call, delay: float) -> None:
        await asyncio.sleep(delay)
        await self.tracked(name, life, _run(call))


async def in_way(way: str, call: Call) -> tuple[str, ...]:
    """Make a call of a host in one of `WAYS` but "later"."""
    match way:
        case "task":
            return await asyncio.create_task(_run(call))
        case "wait_for":
            return await asyncio.wait_for(_run(call), 1000.0)
        case "thread":
            return await _as_from_a_thread(call)
    return await call()


async def _run(call: Call) -> tuple[str, ...]:
    return await call()


def _as_from_a_thread(call: Call) -> asyncio.Future[tuple[str, ...]]:
    """Have a call made as `asyncio.to_thread` and `run_coroutine_threadsafe` do: by a callback, in a copied context.

    Without the thread, whose time would not be the history's.
    """
    loop = asyncio.get_running_loop()
    outcome: concurrent.futures.Future[tuple[str, ...]] = concurrent.futures.Future()

    def begin() -> None:
        inner: Any = futures
        inner._chain_future(asyncio.ensure_future(_run(call), loop=loop), outcome)  # as `run_coroutine_threadsafe`

    loop.call_soon(begin, context=copy_context())
    return asyncio.wrap_future(outcome)
