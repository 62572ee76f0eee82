"""Hashing of long partition keys in steps, a little per iteration of the event loop.

A key of the largest message size takes 0.2 s. The service's hash cannot be computed faster in Python, and in a thread
it would hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from eventpump.eventhubs.hashing import KeyHash

LONG = 4096
"""The number of characters above which a key is hashed in steps."""
_STEP = 8192
"""Bytes hashed per iteration of the loop, of all keys together: one or two milliseconds."""


class LongKeys:
    """Hashes long keys for all connections, one after the other. Used from one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[KeyHash, Callable[[int], None]]] = deque()

    @property
    def count(self) -> int:
        """How many keys are being hashed."""
        return len(self._waiting)

    def hash(self, key: str, done: Callable[[int], None]) -> None:
        """Start hashing a key; `done` is called with the hash in a later iteration of the loop."""
        self._waiting.append((KeyHash(key), done))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._step)

    def clear(self) -> None:
        """Drop the keys that are not hashed yet: their `done` is not called."""
        self._waiting.clear()

    def _step(self) -> None:
        if not self._waiting:
            return
        hashing, done = self._waiting[0]
        is_complete = hashing.advance(_STEP)
        self._waiting.popleft()
        if not is_complete:
            self._waiting.append((hashing, done))
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._step)
        if is_complete:
            done(hashing.value)
