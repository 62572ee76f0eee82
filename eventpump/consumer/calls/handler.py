"""Runs the user's code of one partition: measures it, cancels it at its deadlines, and decides what its errors mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, Final, Protocol, Self, TypeVar

from eventpump.aio.frames import waits_at
from eventpump.aio.watch import ESCAPED, Watched
from eventpump.clock import clock_of
from eventpump.core.loop_load import NOTED_STEP
from eventpump.errors import DecodeError, EventError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import EventRange, HandlerSlow, LoopBlocked, ProcessorFailed

_T = TypeVar("_T")

_DONE: Final = object()
"""What the first step of a call has returned where the call has ended with it."""

IN_HAND: ContextVar[InHand | None] = ContextVar("eventpump_in_hand", default=None)
"""The call that the current code belongs to; tasks, and threads of `asyncio.to_thread`, that it starts inherit it."""


class PumpEndedError(BaseException):
    """The user's code, or a step of the pump, was interrupted because the pump ends.

    Not an `Exception`, so that no `except Exception` can catch it.
    """


class TimeoutOptions(Protocol):
    """How long a call may take: `HostSettings`, and `HandlerTimeout`."""

    @property
    def handler_timeout(self) -> float:
        """Seconds after which a call that has not returned is reported."""

    @property
    def on_handler_timeout(self) -> str:
        """What to do beyond that: nothing ("report"), or "cancel" it."""


@dataclass(frozen=True, slots=True)
class HandlerTimeout:
    """How long a call may take, with the defaults of a host."""

    handler_timeout: float = 60.0
    on_handler_timeout: str = "report"


def next_event() -> None:
    """Restart the timer of the running call of `process_events`: it has reached another event of its batch."""
    hand = IN_HAND.get()
    if hand is not None and hand.runner is not None and hand.call is not None:
        hand.runner.renew(hand.call)


@dataclass(slots=True, eq=False)
class Call:
    """A call of a method of the processor, or one after the other in the same task.

    Attributes:
        began: When it began, on the loop's clock.
        slow_at: When it is reported next as slow.
        ended: When it returned last without an error, on the same clock.
        is_late: Whether it was cancelled because the pump ends.
        is_timed_out: Whether it was cancelled because of `handler_timeout`.
        events: The events that it was called with.
        work: What the method returned, to be awaited.
        worker: The task that `work` runs in, if that is not `task`.
    """

    operation: str
    task: asyncio.Task[object]
    began: float
    slow_at: float
    ended: float = 0.0
    is_late: bool = False
    is_timed_out: bool = False
    events: Sequence[ReceivedEvent] = ()
    work: object = None
    worker: asyncio.Task[Any] | None = None

    @property
    def range(self) -> EventRange | None:
        """The range of its events; None if it has none."""
        return EventRange.of(self.events) if self.events else None


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call of the processor that has not returned.

    Attributes:
        events: The range of its events; None if it has none.
        waits_at: The line of the user's code at which it waits; None if that is not known.
    """

    operation: str
    seconds: float
    events: EventRange | None
    waits_at: str | None
    others: int

    def __str__(self) -> str:
        of = "" if self.events is None else f" of {self.events}"
        where = "" if self.waits_at is None else f", at {self.waits_at}"
        others = f", and {self.others} other calls" if self.others else ""
        return f"{self.operation}{of}, for {self.seconds:.1f} s{where}{others}"


class InHand:
    """One call of user code, or one batch that a loop has: what its pump waits for.

    Whoever makes one sets its attributes: with an `__init__` there would be a call for each batch.

    Attributes:
        runner: That of the pump, as long as it waits; None before and after. What the code has started may keep its
            context, and this object with it, for as long as the process.
        call: The call, where its timer can be restarted; else None.
    """

    __slots__ = ("call", "runner")
    runner: HandlerRunner | None
    call: Call | None

    def begin(self) -> Self:
        """Let the code that follows in this context belong to it. Return it."""
        IN_HAND.set(self)
        return self

    def ended(self) -> None:
        """Refer to nothing any more: the pump does not wait for it now."""
        self.runner = self.call = None


@dataclass(slots=True, eq=False)
class BegunCall:
    """A call of which the first step is made, and which has not ended well with it.

    Attributes:
        steps: The rest of its steps; None where it has none.
        waits_for: What it waits for.
        error: What it has raised.
    """

    hand: InHand
    steps: Generator[Any, Any, Any] | None = None
    waits_for: object = None
    error: BaseException | None = None


class HandlerRunner:
    """Runs the methods of a partition's processor, each in the task that calls `run`; several tasks may do so.

    Args:
        blocked_after: Seconds; a longer standstill of the event loop is reported.
        blocked_pause: Seconds between two such reports.
        stepped: Called with the seconds of each step of user code that is not short.
    """

    def __init__(
        self,
        partition_id: str,
        settings: TimeoutOptions,
        *,
        blocked_after: float,
        blocked_pause: float,
        stepped: Callable[[float], None],
        report: Callable[..., None],
    ) -> None:
        self._partition_id = partition_id
        self._timeout = settings.handler_timeout
        self._cancels_slow = settings.on_handler_timeout == "cancel"
        self._blocked_after = blocked_after
        self._blocked_pause = blocked_pause
        self.stepped = stepped
        self._report = report
        # What only this process measures goes by the loop's clock: it costs less to read than the one that leases go
        # by, and stands still while the machine is suspended, as timers and handlers do.
        self._loop = asyncio.get_running_loop()
        self._now = clock_of(self._loop)
        # In their order, which the order in which they are cancelled follows.
        self._calls: dict[Call, None] = {}
        self._batch: InHand | None = None
        self._slow_timer: asyncio.TimerHandle | None = None
        # One for all calls of `run_call`, of several tasks, too: of the work it has nothing once that has begun.
        self._watched = Watched[None](None, self._now, blocked_after, self._blocked, stepped)
        self._deadlines: list[asyncio.TimerHandle] = []
        self._blocked_again_after = 0.0
        self._is_abandoned = False

    @property
    def operation(self) -> str | None:
        """A method of the processor that runs now: of several the one that began first."""
        return next((call.operation for call in self._calls), None)

    @property
    def oldest(self) -> tuple[float, EventRange | None] | None:
        """For how many seconds the call runs that began first, and its events; None if none runs."""
        call = min(self._calls, key=lambda each: each.began, default=None)
        return None if call is None else (self._now() - call.began, call.range)

    @property
    def running(self) -> RunningCall | None:
        """The call that began first; None if none runs."""
        call = min(self._calls, key=lambda each: each.began, default=None)
        if call is None:
            return None
        return RunningCall(call.operation, self._now() - call.began, call.range, _line_of(call), len(self._calls) - 1)

    @property
    def is_waited_for(self) -> bool:
        """Whether the pump waits for the current code, or for code that has started it."""
        hand = IN_HAND.get()
        return hand is not None and hand.runner is self

    @property
    def is_in_batch(self) -> bool:
        """Whether the current code belongs to the call of `process_events` that is running."""
        hand = IN_HAND.get()
        return hand is not None and hand is self._batch

    @property
    def is_abandoned(self) -> bool:
        """Whether `abandon` was called."""
        return self._is_abandoned

    def abandon(self) -> None:
        """Let the next cancellation of the task end it at once.

        Any other cancellation comes from the user's code or from code that the library does not know, and is handled
        as a failure of the call.
        """
        self._is_abandoned = True

    def set_deadlines(self, handler_in: float, close_in: float) -> None:
        """Set the seconds after which calls are cancelled, those but of `close` and then any, in place of others."""
        self._clear_deadlines()
        later = self._loop.call_later
        self._deadlines = [later(handler_in, self._cancel_handlers), later(close_in, self._cancel_all)]

    def stop(self) -> None:
        """Cancel all timers. No call follows."""
        self._clear_deadlines()
        if self._slow_timer is not None:
            self._slow_timer.cancel()

    async def run(
        self,
        operation: str,
        method: Callable[..., Awaitable[None]],
        *args: object,
        events: Sequence[ReceivedEvent] = (),
        worker: asyncio.Task[Any] | None = None,
    ) -> None:
        """Run a method of the processor in the current task.

        Args:
            worker: The task of the user's that it waits for; None if the user's code is the method itself.

        Raises:
            PumpEndedError: A deadline cancelled it.
            Exception: What it raised. Another `BaseException`, and a cancellation by other code, is wrapped in a
                `RuntimeError`, so that the failure policy applies to it.
            KeyboardInterrupt, SystemExit: As raised.
        """
        call = self.call(operation)
        call.worker = worker
        await self.run_call(call, method, args, events)

    async def run_call(
        self,
        call: Call,
        method: Callable[..., Awaitable[None]],
        args: tuple[object, ...],
        events: Sequence[ReceivedEvent],
        *,
        is_batch: bool = False,
    ) -> None:
        """Run a method of the processor, as `run` does. The arguments are those of `begin`."""
        begun = self.begin(call, method, args, events, is_batch=is_batch)
        if begun is not None:
            await self.finish(call, begun)

    def begin(
        self,
        call: Call,
        method: Callable[..., Awaitable[None]],
        args: tuple[object, ...],
        events: Sequence[ReceivedEvent],
        *,
        is_batch: bool = False,
    ) -> BegunCall | None:
        """Call a method of the processor, and make the first step of what it returns.

        Args:
            call: A call of the current task that does not run. One is enough for all batches that follow each other.
            is_batch: Whether it is `process_events`, so that `is_in_batch` is true in it.

        Returns:
            None where the method has ended with that step, as most do; `Call.ended` is when. Otherwise what `finish`
            has to be awaited with at once: it waits, or has failed.
        """
        call.events = events
        # As `began`, without a call for each batch.
        now = self._now
        began = call.began = now()
        call.slow_at = began + self._timeout
        call.is_late = call.is_timed_out = False
        self._calls[call] = None
        if self._slow_timer is None:
            self._set_slow_timer(call.slow_at)
        # A new object for each try: what an earlier try left running is not part of this one.
        hand = InHand()
        hand.runner, hand.call = self, call
        IN_HAND.set(hand)
        if is_batch:
            self._batch = hand
        try:
            work = method(*args)
            if type(work) is not CoroutineType and not isinstance(work, Awaitable):
                raise TypeError(
                    f"{call.operation} gave a {type(work).__name__} to await: it must be a coroutine function"
                )
            call.work = work
            steps = work.__await__()
            # As `Watched.step`, without a call for each batch.
            try:
                waits_for = next(steps, _DONE)
            except GeneratorExit as escaped:
                raise RuntimeError(ESCAPED) from escaped
            finally:
                ended = call.ended = now()
                if ended - began > NOTED_STEP:
                    self._watched.noted(ended - began)
        except BaseException as error:
            return BegunCall(hand, error=error)
        if waits_for is not _DONE:
            return BegunCall(hand, steps, waits_for)
        if call.task.cancelling():
            return BegunCall(hand)
        hand.runner = hand.call = None  # as `InHand.ended`
        call.work, call.events = None, ()
        if is_batch:
            self._batch = None
        del self._calls[call]
        return None

    async def finish(self, call: Call, begun: BegunCall) -> None:
        """Run the rest of a call of `begin`. Raises as `run`."""
        raised, begun.error = begun.error, None
        try:
            if begun.steps is not None:
                watched = self._watched
                await watched.rest(begun.steps, begun.waits_for)
                call.ended = watched.ended
        except GeneratorExit:
            # This coroutine is being closed, and must not wait any more.
            raise
        except BaseException as error:
            raised = error
        finally:
            if self._batch is begun.hand:
                self._batch = None
            begun.hand.ended()
            call.work = None
        self._calls.pop(call, None)
        if call.is_late or call.task.cancelling():
            await self.take_cancellation_back()
        if raised is None:
            call.events = ()
            return
        try:
            raise self.error_of(call, raised)
        finally:
            call.events = ()
            # The traceback refers to this frame: a reference back to the error would be a cycle.
            raised = None

    # ------------------------------------------------------------- for a task that makes many short calls by itself

    @property
    def timeout(self) -> float:
        """Seconds after which a call is slow."""
        return self._timeout

    def call(self, operation: str) -> Call:
        """Return a call of the current task that has not begun, of a method of this name."""
        task = asyncio.current_task()
        assert task is not None
        return Call(operation, task, 0.0, 0.0)

    def renew(self, call: Call) -> None:
        """Restart the timer of the running call of `process_events`."""
        if not call.is_timed_out:
            call.began = self._now()
            call.slow_at = call.began + self._timeout

    def began(self, call: Call) -> float:
        """Watch a call from now on: it is cancelled at the deadlines, and reported or cancelled when it is slow."""
        began = call.began = self._now()
        call.slow_at = began + self._timeout
        call.is_late = call.is_timed_out = False
        self._calls[call] = None
        if self._slow_timer is None:
            self._set_slow_timer(call.slow_at)
        return began

    def ended(self, call: Call) -> None:
        """Watch a call no longer: its task does not run user code now."""
        self._calls.pop(call, None)

    def watched(self, work: Awaitable[_T], waits: Callable[[], None] | None = None) -> Watched[_T]:
        """Return something to await that does the work, and measures its steps;
        `waits` is called when it begins to wait."""
        return Watched(work, self._now, self._blocked_after, self._blocked, self.stepped, waits)

    async def take_cancellation_back(self) -> None:
        """Remove all requests to cancel the current task: they were for code that has ended. Raises `CancelledError` if
        not."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_abandoned:
            raise asyncio.CancelledError
        while task.cancelling():
            task.uncancel()
        try:
            # Before Python 3.13 a request that was not raised yet is raised at the next wait even if taken back.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self._is_abandoned:
                raise

    def error_of(self, call: Call, raised: BaseException) -> BaseException:
        """Return the error to raise for what a call raised, once a cancellation is taken back."""
        operation = call.operation
        if isinstance(raised, asyncio.CancelledError):
            if call.is_late:
                late = TimeoutError(f"{operation} had not returned in time, and was cancelled")
                self._report(ProcessorFailed, operation, late, 1, None, call.range)
                return PumpEndedError()
            if call.is_timed_out:
                return TimeoutError(f"{operation} had not returned after {self._timeout:g} s, and was cancelled")
            # The processor waited for something that was cancelled, or other code cancelled this task.
            failure = RuntimeError(f"{operation} was cancelled, and not by eventpump")
            failure.__cause__ = raised
            return failure
        return raised if isinstance(raised, KeyboardInterrupt | SystemExit) else as_exception(operation, raised)

    def _clear_deadlines(self) -> None:
        for timer in self._deadlines:
            timer.cancel()

    def _cancel_handlers(self) -> None:
        for call in list(self._calls):
            if call.operation != "close":
                self._cancel(call)

    def _cancel_all(self) -> None:
        for call in list(self._calls):
            self._cancel(call)

    def _cancel(self, call: Call) -> None:
        """Cancel the user's code and nothing else: the task waits inside that code now."""
        call.is_late = True
        call.task.cancel(f"partition {self._partition_id} is given up")

    def _set_slow_timer(self, at: float) -> None:
        # Calls that return in time do not touch the timer: it checks at its time which calls run, and since when.
        self._slow_timer = self._loop.call_at(at, self._call_may_be_slow)

    def _call_may_be_slow(self) -> None:
        self._slow_timer = None
        now = self._loop.time()
        for call in list(self._calls):
            if now >= call.slow_at:
                took = now - call.began
                # The same call is reported again when it has taken twice as long.
                call.slow_at = now + took
                self._report(HandlerSlow, call.operation, took, self._cancels_slow, call.range, _line_of(call))
                if self._cancels_slow:
                    call.is_timed_out = True
                    call.task.cancel(f"{call.operation} of partition {self._partition_id} takes too long")
        if self._calls:
            # One that begins later does not touch the timer, and is slow one time-out from now at the earliest.
            self._set_slow_timer(min(now + self._timeout, *(call.slow_at for call in self._calls)))

    def _blocked(self, duration: float) -> None:
        now = self._loop.time()
        if now >= self._blocked_again_after:
            self._blocked_again_after = now + self._blocked_pause
            self._report(LoopBlocked, duration, self.operation)


def _line_of(call: Call) -> str | None:
    """Return the line of the user's code at which a call waits."""
    worker = call.worker
    return waits_at(call.work, call.task) if worker is None else waits_at(worker.get_coro(), worker)


def as_exception(operation: str, error: BaseException) -> Exception:
    """Return an error if it is an `Exception`, and else a `RuntimeError` caused by it."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"{operation} raised {type(error).__name__}, which is not an Exception: {error}")
    failure.__cause__ = error
    return failure


def is_undecodable(error: Exception, partition_id: str, events: Iterable[ReceivedEvent]) -> bool:
    """Return whether processing failed because one of the events cannot be decoded: no retry can help then.

    A `DecodeError` of another event, such as one that the processor reads elsewhere, is an error as any other.
    """
    if not isinstance(error, DecodeError) or error.partition_id not in (None, partition_id):
        return False
    numbers = [event.sequence_number if has_place(event) else None for event in events]
    return error.sequence_number in numbers


def has_place(event: ReceivedEvent) -> bool:
    """Return whether an event's offset and sequence number can be read."""
    try:
        event.sequence_number  # noqa: B018 - whether it can be read is the question
    except EventError:
        return False
    return True
