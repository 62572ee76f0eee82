"""Tasks that have an owner, attempts that are shared, and waits that end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from eventpump.cancellation import is_failure
from eventpump.errors import ClosedError

_T = TypeVar("_T")


class StoppedError(Exception):
    """Work was abandoned because its stop event was set. See `TaskSet.unless`."""


class TaskSet:
    """The tasks of one owner, which ends them all. Unlike a `TaskGroup`, one that fails does not end the others.

    Args:
        failed: Called with the name and the unhandled error of a task; with a `CancelledError` if something other than
            this set cancelled it, or if a call in it raised one.
    """

    def __init__(self, failed: Callable[[str, BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task."""
        # Not by the loop's task factory: an eager one would run a part of the work here, within its caller.
        task = asyncio.Task(work, loop=asyncio.get_running_loop(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        is_ours = task in self._cancelled
        self._cancelled.discard(task)
        if task.cancelled():
            if not is_ours:
                self._failed(task.get_name(), asyncio.CancelledError("cancelled, and not by eventpump"))
        elif (error := task.exception()) is not None:
            self._failed(task.get_name(), error)

    def drop(self, task: asyncio.Task[Any]) -> None:
        """Cancel one of them, without waiting for its end."""
        if task in self._tasks:
            self._cancelled.add(task)
            task.cancel()

    async def wait(self, timeout: float) -> bool:
        """Wait for all of them, for a time in seconds. Return whether all have ended. If this is cancelled, they
        continue."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._tasks:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return False
            await asyncio.wait(self._tasks, timeout=remaining)
        return True

    async def cancel(self, timeout: float) -> bool:
        """Cancel all of them, and wait for their end, for a time in seconds. Return whether all have ended."""
        for task in self._tasks:
            self.drop(task)
        return await self.wait(timeout)

    async def unless(self, stop: asyncio.Event, work: Coroutine[Any, Any, _T], name: str) -> _T:
        """Run something unless an event is set, and return its result. It runs in a task of this set.

        Its exceptions are raised here, and are not failures of the set; this includes a `CancelledError` that was not
        caused by a cancellation of its task (see `cancellation.is_failure`).
        """
        task = self.spawn(_outcome(work), name)
        stopping = self.spawn(stop.wait(), f"{name}: stop")
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StoppedError
            result, error = task.result()
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]  # the set forgets the types of its tasks
        finally:
            self.drop(task)
            self.drop(stopping)


async def _outcome(work: Coroutine[Any, Any, _T]) -> tuple[_T | None, BaseException | None]:
    """Return its result and its exception, so that an expected error is not an unhandled one of its task."""
    try:
        return await work, None
    except BaseException as error:
        if not is_failure(error):
            raise
        return None, error


class SingleFlight(Generic[_T]):
    """An operation with at most one attempt in progress; callers that arrive meanwhile share its outcome."""

    __slots__ = ("_is_cancelled", "_name", "_of", "_task")

    def __init__(self, name: str, *, of: str) -> None:
        self._name = name
        self._of = of
        self._task: asyncio.Task[_T] | None = None
        self._is_cancelled = False

    async def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Start an attempt, or join the one in progress; return its outcome.
        If cancelled, it goes on for other callers."""
        task = self._task
        if task is None:
            self._is_cancelled = False
            task = self._task = asyncio.create_task(work(), name=self._name)
            task.add_done_callback(self._ended)
        await asyncio.wait({task})  # no shield: closing cancels the task, which must not cancel the caller
        if task.cancelled():
            raise ClosedError(self._of)
        return task.result()

    def _ended(self, task: asyncio.Task[_T]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # raised to the callers, if there still are any

    def cancel(self) -> None:
        """Cancel the attempt in progress, once, without waiting for its end."""
        # Not `Task.cancelling()`: it also counts a time-out within the work, after which the work may continue.
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    async def aclose(self) -> None:
        """Cancel the attempt in progress, and wait for its end."""
        self.cancel()
        if self._task is not None:
            await asyncio.wait({self._task})


async def gather(work: Iterable[Coroutine[Any, Any, _T]], *, at_once: int | None = None) -> list[_T]:
    """Run coroutines at the same time, and return their results in their order.

    Unlike `asyncio.gather`, it cancels the others after the first error, waits for their end, and raises that error.
    Of several errors in one turn of the loop it raises that of the first coroutine in order.

    Args:
        at_once: How many run at a time; None for all of them.

    Raises:
        CancelledError: The caller was cancelled, whatever the coroutines raise when they end.
    """
    coroutines = list(work)
    room = asyncio.Semaphore(len(coroutines) if at_once is None else at_once)

    async def one(each: Coroutine[Any, Any, _T]) -> _T:
        async with room:
            return await each

    # Not a TaskGroup: before Python 3.13 it raises the errors of coroutines to a caller that was cancelled.
    tasks = [asyncio.create_task(one(each)) for each in coroutines]
    pending = set(tasks)
    failure: BaseException | None = None
    is_ending = False
    while pending:
        try:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            failure = error
        else:
            errors = [
                raised
                for task in tasks
                if task in done and not task.cancelled() and (raised := task.exception()) is not None
            ]
            if errors and failure is None:
                failure = errors[0]
        if failure is not None and not is_ending:
            is_ending = True
            for task in pending:
                task.cancel()
    for each in coroutines:
        each.close()  # those that never began
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame
    return [task.result() for task in tasks]


async def wait_for_event(event: asyncio.Event, timeout: float) -> bool:
    """Wait until an event is set, for a time in seconds. Return whether it is set."""
    try:
        async with asyncio.timeout(timeout):
            return await event.wait()
    except TimeoutError:
        return False


def resolve(future: asyncio.Future[_T], result: _T) -> None:
    """Set a future's result, unless it is done: its waiter may have been cancelled."""
    if not future.done():
        future.set_result(result)


def reject(future: asyncio.Future[Any], error: BaseException) -> None:
    """Set a future's exception, unless it is done: its waiter may have been cancelled."""
    if not future.done():
        future.set_exception(error)
