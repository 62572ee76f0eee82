"""What a history happens in: virtual time, processes that freeze and die, a trace, and the verdict.

A process is a `Life`: every callback and task that begins in its context belongs to it. Frozen, none of them runs;
killed, none ever runs again, so that not even a `finally` of it does anything. The same seed gives the same history, in
any process: nothing here, and nothing that it runs, depends on addresses of objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple, Unpack

from eventpump.consumer.bounds import limits
from eventpump.errors import EventPumpError
from eventpump.interfaces import ReceiveLinkSpec, ReceiveSink
from eventpump.testing.clock import VirtualTimeLoop
from eventpump.testing.transport import FakeHub, FakeReceiveLink, FakeTransport

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_LIFE: ContextVar[Life | None] = ContextVar("life", default=None)
_NUMBERS = itertools.count()
_WALL = 50_000.0
"""Virtual seconds that no history lasts."""


class Violation(AssertionError):  # noqa: N818 - it is what was found, not an error of the finder
    """A promise that did not hold."""


@dataclass(frozen=True)
class Verdict:
    """What a history came to.

    Args:
        violation: The first promise that did not hold; None where all did.
        trace: What happened, a line each, with virtual seconds.
        counts: How often each thing happened.
    """

    kind: str
    seed: int
    size: int
    violation: str | None
    trace: Sequence[str]
    counts: Mapping[str, int]

    def require(self) -> None:
        """Check that every promise held.

        Raises:
            Violation: The first that did not, with the end of the trace.
        """
        if self.violation is not None:
            raise Violation(self.describe(60))

    def describe(self, lines: int | None = None) -> str:
        """Return the seed, the end of the trace, and the violation."""
        shown = self.trace if lines is None else self.trace[-lines:]
        head = f"history {self.kind} {self.seed} --size {self.size}"
        return "\n".join([head, *shown, self.violation or "every promise held"])


class Life:
    """One process, as far as a history needs it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.context = copy_context()
        self.context.run(_LIFE.set, self)
        self.is_frozen = False
        self.is_dead = False
        self._deferred: list[events.Handle] = []

    @property
    def is_running(self) -> bool:
        """Whether its code runs now."""
        return not self.is_frozen and not self.is_dead

    def defer(self, handle: events.Handle) -> None:
        """Keep what should have run."""
        self._deferred.append(handle)

    def freeze(self) -> None:
        """Run nothing until `wake`, as SIGSTOP does."""
        self.is_frozen = True

    def kill(self) -> None:
        """Run nothing any more, as SIGKILL does."""
        self.is_dead = True

    def wake(self, loop: HistoryLoop) -> None:
        """Go on; what was due runs first."""
        self.is_frozen = self.is_dead = False
        deferred, self._deferred = self._deferred, []
        loop.resume(deferred)

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return the tasks of this process that have not ended, the oldest first."""
        tasks = (task for task in asyncio.all_tasks() if isinstance(task, _OrderedTask) and task.life is self)
        return sorted(tasks, key=hash)

    def call(self, loop: HistoryLoop, work: Callable[..., object], *args: object) -> None:
        """Run something in this process: now, or when it wakes."""
        if self.is_running:
            self.context.copy().run(work, *args)
        else:
            self.defer(events.Handle(work, args, loop, self.context.copy()))


class _PacesOfLives(dict[Any, dict[str, Any]]):
    """The pace at which the hosts of one event loop read properties: here of one process."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return super().setdefault(_LIFE.get(), default)


@contextlib.contextmanager
def own_paces() -> Iterator[None]:
    """Have every process read properties at a pace of its own: one that is killed must not keep others waiting."""
    real = limits._PACES
    limits._PACES = _PacesOfLives()  # type: ignore[assignment]  # the part that is used
    try:
        yield
    finally:
        limits._PACES = real


class _Handle(events.Handle):
    def _run(self) -> None:
        _run_in_life(self, super()._run)


class _TimerHandle(events.TimerHandle):
    def _run(self) -> None:
        _run_in_life(self, super()._run)


def _run_in_life(handle: Any, run: Callable[[], object]) -> None:
    life = handle._context.get(_LIFE)
    if life is None or life.is_running:
        run()
    else:
        life.defer(handle)


class _OrderedTask(asyncio.Task[Any]):
    """A task whose place in a set follows from when it was made, not from its address."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(_NUMBERS)
        context: Context | None = options.get("context")
        self.life = _LIFE.get() if context is None else context.get(_LIFE)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class _OrderedFuture(asyncio.Future[Any]):
    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(_NUMBERS)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number


class HistoryLoop(VirtualTimeLoop):
    """Virtual time whose callbacks belong to lives."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(lambda loop, work, **options: _OrderedTask(work, loop=loop, **options))
        self.problems: list[str] = []
        self.set_exception_handler(lambda _, context: self.problems.append(_describe(context)))

    def create_future(self) -> asyncio.Future[Any]:
        return _OrderedFuture(loop=self)

    def resume(self, handles: Sequence[events.Handle]) -> None:
        """Run what was deferred, but for what was cancelled since."""
        inner: Any = self
        inner._ready.extend(handle for handle in handles if not handle.cancelled())

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> events.Handle:
        inner: Any = self
        handle = _Handle(callback, args, self, context)
        inner._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> events.TimerHandle:
        inner: Any = self
        timer: Any = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(inner._scheduled, timer)
        timer._scheduled = True
        handle: events.TimerHandle = timer
        return handle


def _describe(context: Mapping[str, Any]) -> str:
    error = context.get("exception")
    return f"{context.get('message')}: {error!r}" if error is not None else str(context.get("message"))


class _LifeSink:
    """A sink in a life: what comes while it is frozen waits."""

    def __init__(self, life: Life, loop: HistoryLoop, sink: ReceiveSink) -> None:
        self._life = life
        self._loop = loop
        self._sink = sink
        self.link: FakeReceiveLink | None = None

    def messages(self, batch: list[bytes]) -> None:
        self._life.call(self._loop, self._take, batch)

    def _take(self, batch: list[bytes]) -> None:
        # After a freeze the link may have been closed from here already: then nothing comes any more.
        if self.link is None or self.link._is_open:
            self._sink.messages(batch)

    def detached(self, error: EventPumpError) -> None:
        self._life.call(self._loop, self._sink.detached, error)


class LifeTransport(FakeTransport):
    """A transport of a life: what comes while that is frozen waits."""

    def __init__(self, hub: FakeHub, life: Life) -> None:
        super().__init__(hub)
        self._life = life
        self.on_attached: Callable[[], None] | None = None
        """Is called with every receive link, as it is attached."""
        self.watched: Callable[[ReceiveSink], ReceiveSink] | None = None
        """Wraps the sink of every receive link, to see what comes."""

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> FakeReceiveLink:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HistoryLoop)
        if self.watched is not None:
            sink = self.watched(sink)
        wrapped = _LifeSink(self._life, loop, sink)
        link = wrapped.link = await super().open_receive_link(spec, wrapped)
        if self.on_attached is not None:
            self.on_attached()
        return link

    @property
    def links(self) -> Sequence[object]:
        """The links that were opened, for the service's side to end."""
        return list(self._links)


@dataclass
class World:
    """One history's time, chance and trace.

    Args:
        rng: Of what happens; user code has streams of its own, so that an action more does not change them all.
    """

    loop: HistoryLoop
    kind: str
    seed: int
    rng: random.Random
    lines: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    violation: str | None = None
    violated: asyncio.Event = field(default_factory=asyncio.Event)
    lives: list[Life] = field(default_factory=list)

    def note(self, what: str, *details: object) -> None:
        """Write a line of the trace, and count it by its first word or words."""
        self.counts[what] = self.counts.get(what, 0) + 1
        text = " ".join(map(str, (what, *details)))
        self.lines.append(f"{self.loop.time() - 1000.0:10.3f} {text}")

    def violate(self, text: str) -> None:
        """Take a violation down; the first one counts, and ends the history."""
        self.note("VIOLATION", text)
        if self.violation is None:
            self.violation = text
            self.violated.set()

    def stream(self, name: str) -> random.Random:
        """Return a stream of chance of its own."""
        return random.Random(f"{self.kind} {self.seed} {name}")

    def interval(self, name: str = "") -> float:
        """Choose a `delivery_interval`, in seconds, by a stream of chance of its own: none in half of the cases."""
        return self.stream(f"delivery interval {name}").choice((0.0, 0.0, 0.05, 2.0))

    def life(self, name: str) -> Life:
        """Begin a process."""
        life = Life(name)
        self.lives.append(life)
        return life

    def spawn(self, life: Life, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Start a task in a process."""
        return self.loop.create_task(work, name=name, context=life.context.copy())

    async def sleep(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            Violation: A promise was broken meanwhile.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.violated.wait()
        except TimeoutError:
            return
        raise Violation(self.violation)

    async def until(self, holds: Callable[[], bool], within: float, step: float = 0.5) -> bool:
        """Let time pass until something holds. False where it does not in time."""
        for _ in range(int(within / step) + 1):
            if holds():
                return True
            await self.sleep(step)
        return holds()

    def chosen(self, weights: Mapping[str, float]) -> str:
        """Choose by weights."""
        return choose(self.rng, weights)


def choose(rng: random.Random, weights: Mapping[str, float]) -> str:
    """Choose by weights."""
    return rng.choices(list(weights), list(weights.values()))[0]


def live(kind: str, seed: int, size: int, history: Callable[[World, int], Coroutine[Any, Any, None]]) -> Verdict:
    """Run a history to its end, or to its first violation."""
    loop = HistoryLoop()
    try:
        asyncio.set_event_loop(loop)

        async def run() -> Verdict:
            world = World(loop, kind, seed, random.Random(f"{kind} {seed}"))
            try:
                async with asyncio.timeout(_WALL):
                    await history(world, size)
            except Violation as violation:
                if world.violation is None:
                    world.violate(str(violation))
            except TimeoutError:
                world.violate("the history does not end")
            if world.violation is None and loop.problems:
                world.violate(f"the event loop saw an unhandled error: {loop.problems[0]}")
            verdict = Verdict(kind, seed, size, world.violation, list(world.lines), dict(world.counts))
            await _bury(world)
            return verdict

        return loop.run_until_complete(run())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _bury(world: World) -> None:
    """End what is left of every process, so that nothing of a history runs in the next one."""
    me = asyncio.current_task()
    for _ in range(50):
        for life in world.lives:
            life.wake(world.loop)
        await asyncio.sleep(0)  # a timer that came due in a process after its death may begin a task now
        left = sorted((task for task in asyncio.all_tasks() if task is not me), key=hash)
        if not left:
            return
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=30.0)
