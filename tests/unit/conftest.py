"""Unit tests run on virtual time; `@pytest.mark.real_time` asks for an ordinary loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

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
