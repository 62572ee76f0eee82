"""Unit tests run on virtual time; `@pytest.mark.real_time` asks for an ordinary loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping

import pytest

from eventpump.testing.clock import VirtualClock, VirtualTimeLoop


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_time: run on an ordinary event loop instead of virtual time")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("real_time") is not None:
        return {"real": asyncio.new_event_loop}
    return {"virtual": VirtualTimeLoop}


@pytest.fixture
def clock() -> VirtualClock:
    """The time of the loop that runs the test."""
    return VirtualClock()


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@pytest.fixture(autouse=True)
def no_unhandled_errors() -> Iterator[None]:
    """Fail a test whose loop saw an unhandled error: a failed task or callback, a future never asked."""
    errors, logger = _Errors(), logging.getLogger("asyncio")
    logger.addHandler(errors)
    try:
        yield
    finally:
        logger.removeHandler(errors)
    assert not errors.messages, f"the event loop saw an unhandled error: {errors.messages[0]}"
