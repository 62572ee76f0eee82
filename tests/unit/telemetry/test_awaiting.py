"""Work that is awaited in a span."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import types
import weakref

import pytest
from opentelemetry import context as contexts

from eventpump.telemetry import otel


@types.coroutine
def _pause() -> object:
    yield


async def _paused() -> None:
    await _pause()


def test_closing_in_another_context_gives_no_token_back(caplog: pytest.LogCaptureFixture) -> None:
    """A coroutine that is collected is closed in whatever context that happens in: nothing is logged of the span."""
    recorder, ended = otel.Recorder(None, None), list[BaseException | None]()
    token = contexts.attach(otel.Context())
    work = recorder.awaiting(_paused(), token, ended.append)
    try:
        work.send(None)
        contextvars.Context().run(work.close)
    finally:
        contexts.detach(token)
    assert [type(each) for each in ended] == [GeneratorExit]
    assert caplog.records == []


async def test_error_does_not_keep_the_frame_it_was_raised_in() -> None:
    """Without the garbage collector, a failed call's error goes as soon as its caller drops it."""

    class FailedError(Exception):
        pass

    async def fail() -> None:
        await asyncio.sleep(0)
        raise FailedError

    gone = None
    gc.disable()
    try:
        try:
            await otel.Recorder(None, None).awaiting(fail(), None, lambda _: None)
        except FailedError as error:
            gone = weakref.ref(error)
        assert gone is not None
        assert gone() is None
    finally:
        gc.enable()
