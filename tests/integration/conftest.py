"""What the tests of the emulator share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from eventpump import Emulator
from tests.support.peer import AmqpPeer, connect


@pytest.fixture
async def peer(emulator: Emulator) -> AsyncIterator[AmqpPeer]:
    """Connect to the test's own emulator, with a token for the hub."""
    async with await connect(emulator) as connected:
        yield connected
