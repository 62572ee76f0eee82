"""Holds deliveries back while handlers compute on the event loop and the store needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from eventpump.aio.tasks import resolve
from eventpump.core.loop_load import LoopLoad
from eventpump.interfaces import Clock


class LoopGate:
    """Holds the deliveries of a host back when `LoopLoad` decides so. Costs nothing while handlers do not compute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ledger = LoopLoad()
        self._waiters: set[asyncio.Future[None]] = set()

    def stepped(self, seconds: float) -> None:
        """Record a step of a handler that has just ended, of more than `NOTED_STEP` seconds."""
        if self.ledger.stepped(self._clock.monotonic() - seconds):
            asyncio.get_running_loop().call_soon(self._turned)

    @contextmanager
    def call(self, timeout: float) -> Iterator[None]:
        """Record a call of the store for as long as it runs, for so many seconds at most."""
        key = self.ledger.call_begun(self._clock.monotonic() + timeout)
        try:
            yield
        finally:
            self.ledger.call_ended(key)
            self._look()

    def lease_held(self, partition_id: str, due_at: float) -> None:
        """Record a lease that was taken or renewed, and the time of its next renewal."""
        self.ledger.lease_held(partition_id, due_at)
        self._look()

    def lease_gone(self, partition_id: str) -> None:
        """Record that a lease is not held any more."""
        self.ledger.lease_gone(partition_id)
        self._look()

    def hold(self) -> asyncio.Future[None] | None:
        """Return a future that completes when a delivery may be tried again; None if one may start now.

        Call it only while `ledger.is_watching`. The caller may complete the future before, and must call `release`.
        """
        if not self.ledger.is_closed(self._clock.monotonic()):
            return None
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        return waiter

    def release(self, waiter: asyncio.Future[None]) -> None:
        """Forget a waiter."""
        self._waiters.discard(waiter)

    def _turned(self) -> None:
        self.ledger.turned(self._clock.monotonic())

    def _look(self) -> None:
        if self._waiters and not self.ledger.is_closed(self._clock.monotonic()):
            for waiter in self._waiters:
                resolve(waiter, None)
