"""A scripted service for every test, and the check that nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.unit.transport.service import Service, settle


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """A service. When the test is over no task is left; it closes its transports itself."""
    service = Service()
    yield service
    await settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert all(each.stream.peer.is_lost for each in service.connections)
