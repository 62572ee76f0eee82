"""What a command says on SIGUSR1 that it is doing."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import threading

import pytest

from eventpump import EventProcessorHost, GeneratorSource, MemoryLeaseStore
from eventpump.aio.doing import answering_signal, now, shown

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this platform has no SIGUSR1")


async def test_signal_shows_hosts_and_the_line_of_each_task() -> None:
    """In one piece; afterwards the signal has its effect from before."""
    said: list[str] = []
    handled, before = asyncio.Event(), signal.getsignal(signal.SIGUSR1)

    async def process(context: object, events: object) -> None:
        handled.set()
        await asyncio.Event().wait()

    async with GeneratorSource(partitions=1, events=1) as source:
        host = shown(EventProcessorHost(source=source, processor=process, lease_store=MemoryLeaseStore()))
        running = asyncio.create_task(host.run())
        await handled.wait()
        with answering_signal(said.append):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is before
        await host.aclose(0)
        await running
    (text,) = said
    assert "partition 0 waits for process_events" in text
    assert f"{__file__}:" in text
    assert "task eventpump host waits at " in text


def test_signal_is_answered_while_the_loop_is_blocked() -> None:
    """With the line at which it is: that is when it is needed most."""

    said: list[str] = []

    async def block() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # no step of the loop follows before it is answered
        sum(range(1000))
        assert "task blocking runs at" in said.pop()

    async def work() -> None:
        await asyncio.create_task(block(), name="blocking")

    with answering_signal(said.append):
        asyncio.run(work())
        os.kill(os.getpid(), signal.SIGUSR1)
    assert said.pop().startswith("no event loop runs; it is at ")


def test_library_handles_no_signal() -> None:
    """A host leaves SIGUSR1 alone."""
    before = signal.getsignal(signal.SIGUSR1)
    seen = []

    async def work() -> None:
        handled = asyncio.Event()

        async def process(context: object, events: object) -> None:
            seen.append(signal.getsignal(signal.SIGUSR1))
            handled.set()

        async with GeneratorSource(partitions=1, events=1) as source:
            host = EventProcessorHost(source=source, processor=process, lease_store=MemoryLeaseStore())
            await host.run(handle_signals=True, until=handled.wait())

    asyncio.run(work())
    assert set(seen) == {before}


def test_other_threads_change_no_signal() -> None:
    """Only the main thread may handle signals."""
    before, seen = signal.getsignal(signal.SIGUSR1), []

    def work() -> None:
        with answering_signal(print):
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


async def test_many_tasks_are_counted_and_what_cannot_be_described_is_left_out() -> None:
    """The rest is shown."""

    class Broken:
        def describe(self) -> object:
            raise RuntimeError

    broken = shown(Broken())

    async def wait() -> None:
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(wait(), name=f"number {number}") for number in range(250)]
    asyncio_only = asyncio.create_task(asyncio.Event().wait(), name="a first one")
    await asyncio.sleep(0)
    text = now(None)
    assert "Broken: it cannot be described now (RuntimeError)" in text
    assert "and 51 tasks more" in text
    line = inspect.getsourcelines(wait)[1] + 1
    assert re.search(rf"^task number 0 waits at {re.escape(__file__)}:{line} .*wait$", text, re.M)
    assert "task a first one waits at ?" in text
    for task in [*tasks, asyncio_only]:
        task.cancel()
    await asyncio.gather(*tasks, asyncio_only, return_exceptions=True)
    del broken
