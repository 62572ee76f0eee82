"""The process's own loop, for threads that are synchronous."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from eventpump.errors import ClosedError, ServiceError, ServiceTimeoutError
from eventpump.interfaces import Transport
from eventpump.spark import worker
from eventpump.spark.connection import SparkConnection
from tests.support.connecting import connection_string_to


@pytest.fixture(autouse=True)
def closed_worker() -> Iterator[None]:
    """Leave no loop behind."""
    yield
    worker.close()


def _connection(hub: str = "telemetry", key: str = "k") -> SparkConnection:
    text = connection_string_to("localhost", 1, key=key, is_plain=True)
    return SparkConnection(hub=hub, connection_string=SecretStr(text))


class _Ending:
    """A coroutine that waits forever, and records when it has begun and how it ended."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.was_cancelled = False

    async def wait(self) -> None:
        """Wait forever."""
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.was_cancelled = True
            raise


def test_run_returns_or_raises_what_the_coroutine_does() -> None:
    """Results and errors come through; every thread is served by one loop."""

    async def where() -> int:
        return threading.get_ident()

    async def fail() -> None:
        raise ClosedError("door")

    found = [worker.run(where())]
    thread = threading.Thread(target=lambda: found.append(worker.run(where())))
    thread.start()
    thread.join()
    assert found[0] == found[1] != threading.get_ident()
    with pytest.raises(ClosedError, match="door"):
        worker.run(fail())


def test_run_beyond_its_time_cancels_the_coroutine() -> None:
    """When the time is up the caller gets an error, after the coroutine's end."""
    ending = _Ending()
    with pytest.raises(ServiceTimeoutError):
        worker.run(ending.wait(), timeout=0.01)
    assert ending.was_cancelled


def test_run_passes_a_time_out_of_the_coroutine_on() -> None:
    """An error of the coroutine is not taken for the caller's time-out."""

    async def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        worker.run(fail(), timeout=60)


def test_run_interrupted_cancels_its_coroutine() -> None:
    """A signal that raises in the waiting thread ends what it waited for."""
    ending = _Ending()

    def interrupt() -> None:
        ending.began.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, raise_interrupt)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.run(ending.wait())
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert ending.was_cancelled


def test_run_on_the_loops_own_thread_is_refused() -> None:
    """A call on the loop's own thread, which would never return, is refused."""

    async def nested() -> None:
        worker.run(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="own thread"):
        worker.run(nested())


def test_hubs_of_one_namespace_share_a_connection() -> None:
    """There is one transport to a namespace per credential, whatever the hub; after `drop` there is another."""
    first = worker.transport(_connection())
    assert worker.transport(_connection("other")) is first
    assert worker.transport(_connection(key="other")) is not first
    worker.drop(_connection("other"))
    assert worker.transport(_connection()) is not first
    with pytest.raises(ClosedError):
        worker.run(first.get_hub_properties("telemetry"))


def test_shared_object_is_the_same_until_the_loop_is_closed() -> None:
    """Every caller gets the same object, until the loop is closed."""
    first = worker.once(_Ending)
    assert worker.once(_Ending) is first
    worker.close()
    assert worker.once(_Ending) is not first


def test_close_twice_is_fine_and_the_next_use_starts_again() -> None:
    """A closed loop is followed by another."""
    thread = worker.run(_thread())
    worker.close()
    worker.close()
    assert not thread.is_alive()
    assert worker.run(_thread()).is_alive()


async def _thread() -> threading.Thread:
    return threading.current_thread()


def test_running_gives_a_result_within_the_block() -> None:
    """A coroutine runs beside its caller, and its result or error is there when it is asked for."""
    with worker.running(_thread()) as found:
        assert found.result().is_alive()

    async def fail() -> None:
        raise ClosedError("door")

    with worker.running(fail()) as failing, pytest.raises(ClosedError, match="door"):
        failing.result()


def test_running_ends_with_its_block() -> None:
    """What is not complete at the end of the block, or when it fails, is cancelled and has ended."""
    endings = [_Ending(), _Ending()]
    with worker.running(endings[0].wait()):
        assert endings[0].began.wait(10)
    with pytest.raises(KeyError), worker.running(endings[1].wait()):  # noqa: PT012 - it is to begin before
        assert endings[1].began.wait(10)
        raise KeyError
    assert [each.was_cancelled for each in endings] == [True, True]


class _Links:
    """What holds links."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.closed: list[bool] = []

    async def aclose(self) -> None:
        """Close them, and record whether their connection may still be used."""
        try:
            await self._transport.get_hub_properties("telemetry")
        except ClosedError:
            self.closed.append(False)
        except ServiceError:
            self.closed.append(True)


def test_close_closes_links_before_their_connections() -> None:
    """What was announced is closed first, if it still exists."""
    transport = worker.transport(_connection())
    links = _Links(transport)
    worker.close_first(links)
    worker.close_first(_Links(transport))
    worker.close()
    assert links.closed == [True]


class _Kept:
    """Something with an owner; closing it records that."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    async def aclose(self) -> None:
        self.is_closed.set()


class _Owner:
    pass


def test_owned_is_closed_when_its_owner_is_no_longer_used() -> None:
    """What an owner leaves is closed on the loop, without a call; it is kept until then."""
    owner, kept = _Owner(), _Kept()
    worker.close_with(owner, kept)
    worker.run(asyncio.sleep(0))
    assert not kept.is_closed.is_set()
    del owner
    assert kept.is_closed.wait(10)


def test_close_closes_the_owned_too() -> None:
    """What still has an owner is closed with the connections; an owner that ends later closes nothing more."""
    owner, kept = _Owner(), _Kept()
    worker.close_with(owner, kept)
    worker.close()
    assert kept.is_closed.is_set()
    kept.is_closed.clear()
    del owner
    worker.run(asyncio.sleep(0))
    assert not kept.is_closed.is_set()


_FREEZING = """
import gc, sys, types
from eventpump.spark import worker
from pyspark.taskcontext import TaskContext

def frozen(name):
    sys.modules[name] = types.ModuleType(name)
    worker.spare_collections()
    return gc.get_freeze_count()

before = gc.get_freeze_count()  # some Pythons freeze what they begin with
outside = frozen("a")
TaskContext._getOrCreate()
first = frozen("b")
worker.spare_collections()
assert gc.get_freeze_count() == first
more = [frozen(name) for name in "cdef"]
assert outside == before < first < more[0] < more[1] == more[2] == more[3], (outside, first, more)
"""


def test_loaded_modules_are_set_aside_in_tasks_three_times_at_most() -> None:
    """In a task of Spark the collector skips what is loaded, and what the next two tasks that load more have loaded."""
    done = subprocess.run([sys.executable, "-c", _FREEZING], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
