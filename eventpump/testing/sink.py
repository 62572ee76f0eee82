"""A sink that records the calls of a receive link, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eventpump.errors import EventPumpError, ServiceError
from eventpump.eventhubs.events import ReceivedEvent

PATIENCE = 10.0
"""Seconds to wait for expected events."""


class RecordingSink:
    """A `ReceiveSink` that records its calls.

    Attributes:
        batches: The received batches.
        errors: The errors with which the link ended.
        late: Calls after the end.
    """

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.errors: list[EventPumpError] = []
        self.late = 0
        self._changed = asyncio.Event()

    def messages(self, batch: list[bytes]) -> None:
        """Record a batch."""
        self.late += bool(self.errors)
        self.batches.append(batch)
        self._changed.set()

    def detached(self, error: EventPumpError) -> None:
        """Record the end."""
        self.late += bool(self.errors)
        self.errors.append(error)
        self._changed.set()

    @property
    def events(self) -> list[ReceivedEvent]:
        """The received events."""
        return [ReceivedEvent(raw) for batch in self.batches for raw in batch]

    @property
    def bodies(self) -> list[bytes]:
        """The bodies of the received events."""
        return [event.body for event in self.events]

    async def until(self, found: Callable[[], bool]) -> None:
        """Wait until a condition on the recorded calls holds."""
        async with asyncio.timeout(PATIENCE):
            while not found():
                self._changed.clear()
                await self._changed.wait()

    async def received(self, count: int) -> list[bytes]:
        """Wait for this many events.

        Returns:
            All bodies so far.
        """
        await self.until(lambda: len(self.events) >= count)
        return self.bodies

    async def ended(self) -> ServiceError:
        """Wait for the end.

        Returns:
            The error.
        """
        await self.until(lambda: bool(self.errors))
        (error,) = self.errors
        assert isinstance(error, ServiceError)
        return error
