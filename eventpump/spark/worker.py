"""The process's own event loop and connections, for Spark's threads, which are synchronous.

A process that Spark runs Python in (an executor's worker, the driver's reader process, the driver itself) has at most
one loop, on a daemon thread, and one authorised connection per namespace and credential. Both are made when first
needed and live across tasks. A forked child inherits neither: it makes its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar, cast

from eventpump.clients import make_transport
from eventpump.errors import ServiceTimeoutError
from eventpump.interfaces import CLOSE_TIMEOUT, Transport
from eventpump.spark.connection import SparkConnection

_T = TypeVar("_T")


class _Worker:
    """A loop on a thread of its own, and what lives on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.transports: dict[SparkConnection, Transport] = {}
        self.kept: dict[Callable[[], Any], Any] = {}
        self.closing: set[asyncio.Task[None]] = set()
        self.thread = threading.Thread(target=self._serve, name="eventpump", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Coroutine[Any, Any, _T], timeout: float | None) -> _T:
        call = _Call(work, timeout)
        try:
            # Whatever interrupts this thread may do so anywhere in here: the call is known before anything begins.
            self.loop.call_soon_threadsafe(call.start)
            return call.outcome.result()
        except BaseException:
            if not call.outcome.done():
                self.loop.call_soon_threadsafe(call.cancel)
                call.ended.wait(CLOSE_TIMEOUT)
            raise

    def close_soon(self, transport: Transport) -> None:
        """Close a transport without waiting. On the loop's thread."""
        task = self.loop.create_task(transport.aclose(), name="close transport")
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)

    async def aclose(self) -> None:
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
        """Begin. On the loop."""
        if not self.ended.is_set():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """End it, be it before it began. On the loop."""
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
                error = ServiceTimeoutError(f"not done within {self._timeout} s")
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(result)
        finally:
            self.ended.set()


_lock = threading.Lock()
_worker: _Worker | None = None
_inherited: list[_Worker] = []
"""The parent's, in a forked child. Kept as it is: closing any part of it would reach into the parent's selector."""


def _current() -> _Worker:
    global _worker
    with _lock:
        if _worker is None:
            _worker = _Worker()
        return _worker


def _after_fork() -> None:
    global _lock, _worker
    _lock = threading.Lock()  # the parent's may have been held by a thread that does not exist here
    if _worker is not None:
        _inherited.append(_worker)
        _worker = None


os.register_at_fork(after_in_child=_after_fork)


def run(work: Coroutine[Any, Any, _T], timeout: float | None = None) -> _T:
    """Run a coroutine on the process's loop, from any other thread, and wait for its result.

    A caller that is interrupted (KeyboardInterrupt, an exception from a signal handler) cancels it and waits for its
    end, within :data:`eventpump.interfaces.CLOSE_TIMEOUT`.

    Args:
        timeout: Seconds; None for as long as it takes.

    Raises:
        ServiceTimeoutError: The time ran out; the coroutine was cancelled and has ended.
    """
    worker = _current()
    if threading.current_thread() is worker.thread:
        work.close()
        raise RuntimeError("worker.run was called on the loop's own thread: await the coroutine there")
    return worker.run(work, timeout)


def transport(connection: SparkConnection) -> Transport:
    """Return the process's way to a namespace; from any thread. Its methods are for coroutines that `run` carries out.

    One per namespace and credential, whatever the hub. It connects when first used, and again after a connection was
    lost. Nobody who gets it closes it.

    Raises:
        ConfigurationError: A value of the connection cannot work.
    """
    worker = _current()
    key = connection.without_hub()
    with _lock:
        found = worker.transports.get(key)
        if found is None:
            found = worker.transports[key] = make_transport(connection.settings())
        return found


def drop(connection: SparkConnection) -> None:
    """Close the way to a namespace after a failure; from any thread. The next `transport` makes another.

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
    """Return the process's one object of a kind, such as a cache: made by the first call with this `make`.

    A forked child makes its own. From any thread; `make` must not call into this module.
    """
    worker = _current()
    with _lock:
        if make not in worker.kept:
            worker.kept[make] = make()
        return cast(_T, worker.kept[make])


def close() -> None:
    """Close the connections in order and end the loop, where there is one. The next use makes another.

    Runs at the interpreter's exit too; Spark's own workers end without it, and their peers see a closed socket.
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
