"""`HomeLoop`: an object belongs to the event loop of its first use."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from eventpump.aio.home import HomeLoop
from eventpump.errors import ClosedError


async def _enter(home: HomeLoop) -> None:
    home.enter()


def _run_in_thread(work: Callable[[], None]) -> BaseException | None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_enter_outside_of_loops_binds_nothing() -> None:
    """An object that is made and looked at without a loop is bound by the first loop that uses it."""
    home = HomeLoop("Client", warns=False)
    home.enter()
    asyncio.run(_enter(home))
    with pytest.raises(ClosedError, match=r"^the Client belongs to another event loop, which has ended; create one"):
        asyncio.run(_enter(home))


def test_enter_on_another_loop_is_refused_while_the_first_rests_or_runs() -> None:
    """In the same thread with the first loop at rest, in another thread while it runs, and where no loop runs."""
    home = HomeLoop("Client", warns=False)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        first.run_until_complete(_enter(home))
        with pytest.raises(ClosedError, match="belongs to another event loop; create one") as refused:
            second.run_until_complete(_enter(home))
        assert refused.value.what == "Client"
        with pytest.raises(ClosedError, match="belongs to another event loop; create one"):
            home.enter()

        async def from_a_thread() -> BaseException | None:
            return await asyncio.to_thread(_run_in_thread, lambda: asyncio.run(_enter(home)))

        assert isinstance(first.run_until_complete(from_a_thread()), ClosedError)
        first.run_until_complete(_enter(home))
    finally:
        first.close()
        second.close()


def test_enter_in_two_threads_at_once_binds_one_loop() -> None:
    """Of several loops that use it first at the same time, one has it, and the others are refused."""
    home = HomeLoop("Client", warns=False)
    barrier = threading.Barrier(8)
    refused: list[ClosedError] = []

    async def use() -> None:
        barrier.wait()
        try:
            home.enter()
        except ClosedError as error:
            refused.append(error)
        barrier.wait()

    threads = [threading.Thread(target=asyncio.run, args=(use(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7


def thread_of(runner: Any) -> int | None:
    """Return the thread that callers from other threads compare with their own."""
    found: int | None = runner._thread_id
    return found


def test_runner_is_that_of_the_loop_that_runs() -> None:
    """Its thread is this one while the loop runs, and no thread afterwards; also for a loop that does not have it."""
    home = HomeLoop("Client")
    other = HomeLoop("Other", warns=False)

    async def look() -> None:
        home.enter()
        other.enter()
        assert thread_of(home.runner) == thread_of(other.runner) == threading.get_ident()
        home.close()
        assert thread_of(home.runner) is None

    asyncio.run(look())
    assert thread_of(other.runner) is None


def test_end_of_the_loop_warns_of_what_is_open() -> None:
    """The warning has the class and what is lost; `on_end` is called on the loop before, and a later use says it."""
    events = 3
    ended: list[asyncio.AbstractEventLoop] = []

    async def end() -> None:
        nonlocal events
        ended.append(asyncio.get_running_loop())
        events = 0

    home = HomeLoop("Client", lost=lambda: f"{events} events", on_end=end)
    with pytest.warns(ResourceWarning, match=r"Client was not closed before the end of .*, which lost 3 events: use"):
        asyncio.run(_enter(home))
    assert len(ended) == 1
    with pytest.raises(ClosedError, match="another event loop, which has ended and lost 3 events; create"):
        asyncio.run(_enter(home))


def test_end_of_a_loop_that_was_only_closed_is_noticed_at_the_next_use() -> None:
    """`loop.close()` alone calls nothing: there is no warning, and the error says what is lost."""
    home = HomeLoop("Client", lost=lambda: "3 events")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(_enter(home))
    loop.close()
    with pytest.raises(ClosedError, match="another event loop, which has ended and lost 3 events; create"):
        asyncio.run(_enter(home))


def test_close_ends_the_binding() -> None:
    """What is closed is not warned of, and belongs to no loop: closing it twice is fine on any."""
    home = HomeLoop("Client")

    async def use() -> None:
        home.enter()
        home.close()
        home.enter()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(use())
        asyncio.run(use())
        asyncio.run(_enter(home))


def test_release_lets_another_loop_have_it() -> None:
    """What may be opened again belongs to the loop that opens it."""
    home = HomeLoop("Client")

    async def use() -> None:
        home.enter()
        home.release()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(use())
        asyncio.run(use())


async def test_object_that_is_dropped_without_a_close_is_warned_of() -> None:
    """Also while the loop goes on."""

    async def use() -> None:
        HomeLoop("Client").enter()
        gc.collect()
        for _ in range(3):  # the loop closes what watches it
            await asyncio.sleep(0)

    with pytest.warns(ResourceWarning, match="Client was not closed"):
        await use()


def test_what_on_end_raises_does_not_hide_the_warning() -> None:
    """It is reported by the loop's handler, and the warning is issued."""

    async def use() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context["exception"]))
        home.enter()

    async def fail() -> None:
        raise KeyError("x")

    seen: list[BaseException] = []
    home = HomeLoop("Client", on_end=fail)
    with pytest.warns(ResourceWarning, match="Client was not closed"):
        asyncio.run(use())
    assert [type(each) for each in seen] == [KeyError]
