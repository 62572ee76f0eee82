"""The process-wide event loop and connections, for Spark's threads, which are synchronous.

Each Python process of Spark (an executor's worker, the driver's reader process, the driver itself) has at most one
loop, on a daemon thread, and one authorized connection per namespace and credential. Both are created when first needed
and outlive tasks. A forked child inherits neither: it creates its own.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

from eventpump.clients.connection import make_transport
from eventpump.errors import ServiceTimeoutError
from eventpump.interfaces import CLOSE_TIMEOUT, Transport
from eventpump.spark.connection import SparkConnection

_T = TypeVar("_T")


class Closable(Protocol):
    """What holds links."""

    async def aclose(self) -> None:
        """Close them."""


class _Worker:
    """A loop on its own thread, and the objects that belong to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.transports: dict[SparkConnection, Transport] = {}
        self.kept: dict[Callable[[], Any], Any] = {}
        self.closing: set[asyncio.Task[None]] = set()
        self.closed_first: weakref.WeakSet[Closable] = weakref.WeakSet()
        self.thread = threading.Thread(target=self._serve, name="eventpump", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, _T], timeout: float | None) -> _T:
        call = _Call(work, timeout)
        try:
            # An interrupt of this thread can occur anywhere in here, so the call is registered before it starts.
            self.loop.call_soon_threadsafe(call.start)
            return call.outcome.result()
        except BaseException:
            self.end(call)
            raise

    def end(self, call: _Call[Any]) -> None:
        """Cancel a call that is not complete, and wait for its end."""
        if not call.outcome.done():
            self.loop.call_soon_threadsafe(call.cancel)
            call.ended.wait(CLOSE_TIMEOUT)

    def close_soon(self, each: Closable) -> None:
        """Close something without waiting. Called on the loop's thread."""
        task = self.loop.create_task(each.aclose(), name=f"close {type(each).__name__}")
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)

    async def aclose(self) -> None:
        for each in list(self.closed_first):
            await each.aclose()
        transports, self.transports = list(self.transports.values()), {}
        for transport in transports:
            self.close_soon(transport)
        if self.closing:
            await asyncio.wait(self.closing, timeout=CLOSE_TIMEOUT)


class _Call(Generic[_T]):
    """One coroutine that a thread waits for."""

    def __init__(self, work: Coroutine[Any, Any, _T], timeout: float | None) -> None:
        self._work = work
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None
        self.outcome: Future[_T] = Future()
        self.ended = threading.Event()

    def start(self) -> None:
        """Start the coroutine. Called on the loop."""
        if not self.ended.is_set():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """Cancel the coroutine, even if it has not started. Called on the loop."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._work.close()
            self.ended.set()

    async def _run(self) -> None:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                result = await self._work
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                error = ServiceTimeoutError(f"not completed within {self._timeout} s")
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(result)
        finally:
            self.ended.set()


_lock = threading.Lock()
_worker: _Worker | None = None
_inherited: list[_Worker] = []
"""In a forked child, the parent's worker, kept unchanged: closing part of it would affect the parent's selector."""


def _current() -> _Worker:
    global _worker
    with _lock:
        if _worker is None:
            _worker = _Worker()
        return _worker


def _after_fork() -> None:
    global _lock, _worker
    _lock = threading.Lock()  # the parent's lock may be held by a thread that does not exist here
    if _worker is not None:
        _inherited.append(_worker)
        _worker = None


os.register_at_fork(after_in_child=_after_fork)


def run(work: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
    """Run a coroutine on the process's loop, from any other thread, and wait for its result.

    A caller that is interrupted (KeyboardInterrupt, an exception from a signal handler) cancels it and waits for its
    end, within :data:`eventpump.interfaces.CLOSE_TIMEOUT`.

    Raises:
        ServiceTimeoutError: The time is over; the coroutine was cancelled and has ended.
    """
    worker = _current()
    if threading.current_thread() is worker.thread:
        work.close()
        raise RuntimeError("worker.run was called on the loop's own thread: await the coroutine there")
    return worker.run(work, timeout)


@contextmanager
def running(work: Coroutine[Any, Any, _T]) -> Iterator[Future[_T]]:
    """Run a coroutine on the process's loop during the block; what it has not completed at the end is cancelled.

    The block gets the future result.
    """
    worker = _current()
    call = _Call(work, None)
    worker.loop.call_soon_threadsafe(call.start)
    try:
        yield call.outcome
    finally:
        worker.end(call)


def close_first(each: Closable) -> None:
    """Have something closed before the connections, by `close`. It is not kept alive for that."""
    _current().closed_first.add(each)


def close_with(owner: object, each: Closable) -> None:
    """Have something, which does not refer to its owner, closed when that is no longer used; or by `close`, first."""
    worker = _current()
    worker.closed_first.add(each)
    # At the interpreter's exit it is `close` that closes it.
    weakref.finalize(owner, _close_soon, worker, each).atexit = False


def _close_soon(worker: _Worker, each: Closable) -> None:
    # A forked child must leave the parent's loop alone.
    if worker is _worker:
        worker.loop.call_soon_threadsafe(worker.close_soon, each)


def transport(connection: SparkConnection) -> Transport:
    """Return the process's transport to a namespace; from any thread. Use it in coroutines that `run` executes.

    There is one per namespace and credential, for all hubs. It connects when first used, and reconnects after a
    connection was lost. Callers must not close it.
    """
    worker = _current()
    key = connection.without_hub()
    with _lock:
        found = worker.transports.get(key)
        if found is None:
            found = worker.transports[key] = make_transport(connection.settings())
        return found


def drop(connection: SparkConnection) -> None:
    """Close the transport to a namespace after a failure; from any thread. The next `transport` creates another.

    Links that are open on it end with an error.
    """
    worker = _worker
    if worker is None:
        return
    with _lock:
        found = worker.transports.pop(connection.without_hub(), None)
    if found is not None:
        worker.loop.call_soon_threadsafe(worker.close_soon, found)


def once(make: Callable[[], _T]) -> _T:
    """Return the process-wide instance of an object, such as a cache: created by the first call with this `make`.

    A forked child creates its own. From any thread; `make` must not call into this module.
    """
    worker = _current()
    with _lock:
        if make not in worker.kept:
            worker.kept[make] = make()
        return cast(_T, worker.kept[make])


_MOST_FREEZES = 3
_freezes, _modules_frozen = 0, 0


def spare_collections() -> None:
    """Have the garbage collector skip what a Python worker of Spark has loaded. Called by each of our tasks, first.

    Spark has a worker collect garbage after each task. That takes 40 ms of CPU where pyspark, pyarrow and this package
    are loaded, and a task of few rows less than 10. What is loaded stays until the process ends. What a user's function
    has at such a moment stays, too, where it refers to itself: so it is done once, and at most twice again, as later
    tasks load more.
    """
    global _freezes, _modules_frozen
    tasks = sys.modules.get("pyspark.taskcontext")
    is_done = _freezes == _MOST_FREEZES or len(sys.modules) <= _modules_frozen
    if is_done or tasks is None or tasks.TaskContext.get() is None:
        return
    gc.collect()  # what is garbage already must not stay
    gc.freeze()
    _freezes, _modules_frozen = _freezes + 1, len(sys.modules)


def close() -> None:
    """Close the connections cleanly and end the loop, if there is one. The next use creates another.

    Also runs at the interpreter's exit; Spark's own workers end without it, and their peers see a closed socket.
    """
    global _worker
    with _lock:
        worker, _worker = _worker, None
    if worker is None:
        return
    worker.run(worker.aclose(), None)
    worker.loop.call_soon_threadsafe(worker.loop.stop)
    worker.thread.join(CLOSE_TIMEOUT)
    if not worker.thread.is_alive():
        worker.loop.close()


atexit.register(close)
