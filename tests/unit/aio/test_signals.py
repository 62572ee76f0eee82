"""Handlers of signals on a loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from eventpump.aio.signals import SIGNALS, handling_first_signal, handling_signals


@pytest.mark.real_time
@pytest.mark.parametrize("has_handlers", [True, False], ids=["unix", "windows"])
async def test_signals_are_handed_over_and_then_handled_as_before(
    has_handlers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each SIGINT and SIGTERM arrives on the loop, also where loops have no handlers of signals."""
    loop = asyncio.get_running_loop()
    if not has_handlers:

        def refuse(*_: object) -> None:
            raise NotImplementedError

        monkeypatch.setattr(loop, "add_signal_handler", refuse)
        monkeypatch.setattr(loop, "remove_signal_handler", refuse)
    before = [signal.getsignal(number) for number in SIGNALS]
    arrived: asyncio.Queue[signal.Signals] = asyncio.Queue()
    with handling_signals(arrived.put_nowait):
        for number in (*SIGNALS, *SIGNALS):
            os.kill(os.getpid(), number)
            assert await arrived.get() is number
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.real_time
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
async def test_first_signal_is_handed_over_and_the_next_is_handled_as_before(number: signal.Signals) -> None:
    """Once the first signal has arrived, both have the handlers that the program had installed."""
    arrived, second = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    installed = signal.signal(number, lambda *_: loop.call_soon_threadsafe(second.set))
    before = [signal.getsignal(each) for each in SIGNALS]
    try:
        with handling_first_signal(arrived.set):
            os.kill(os.getpid(), number)
            await arrived.wait()
            assert [signal.getsignal(each) for each in SIGNALS] == before
            os.kill(os.getpid(), number)
            await second.wait()
    finally:
        signal.signal(number, installed)


async def test_first_signal_that_never_comes_is_handled_as_before_afterwards() -> None:
    """Without a signal, the end of the block gives both back."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with handling_first_signal(lambda: None):
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in SIGNALS] == before


async def test_first_signal_is_not_handled_where_loops_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows nothing is changed: Ctrl-C has its own effect."""

    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", refuse)
    before = [signal.getsignal(number) for number in SIGNALS]
    with handling_first_signal(lambda: None):
        assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.real_time
@pytest.mark.parametrize("ignored", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("is_first", [False, True], ids=["each", "first"])
async def test_signal_that_is_ignored_stays_ignored(ignored: signal.Signals, *, is_first: bool) -> None:
    """A job in the background, started with SIGINT ignored, is not ended by Ctrl-C; the other signal arrives."""
    arrived = asyncio.Event()
    installed = signal.signal(ignored, signal.SIG_IGN)
    try:
        handling = handling_first_signal(arrived.set) if is_first else handling_signals(lambda _: arrived.set())
        with handling:
            assert signal.getsignal(ignored) is signal.SIG_IGN
            (other,) = set(SIGNALS) - {ignored}
            os.kill(os.getpid(), ignored)
            await asyncio.sleep(0)
            assert not arrived.is_set()
            os.kill(os.getpid(), other)
            await arrived.wait()
        assert signal.getsignal(ignored) is signal.SIG_IGN
    finally:
        signal.signal(ignored, installed)


@pytest.mark.real_time
async def test_another_thread_handles_no_signals() -> None:
    """Outside of the main thread nothing is changed, and nothing is raised."""
    before = [signal.getsignal(number) for number in SIGNALS]

    async def work() -> None:
        with handling_signals(lambda _: None), handling_first_signal(lambda: None):
            assert [signal.getsignal(number) for number in SIGNALS] == before

    thread = threading.Thread(target=asyncio.run, args=(work(),))
    thread.start()
    await asyncio.to_thread(thread.join)
