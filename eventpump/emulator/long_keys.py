"""Partition keys that take long to hash, hashed a little per turn of the loop.

A key of a message's largest size takes 0.2 s. The service's hash cannot be had faster in Python, and in a thread it
would hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from eventpump.eventhubs.hashing import KeyHash

LONG = 4096
"""Characters above which a key is not hashed at once."""
_STEP = 8192
"""Bytes hashed per turn of the loop, of all keys together: a millisecond or two."""


class LongKeys:
    """Hashes long keys for all connections, in turn. Used from one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[KeyHash, Callable[[int], None]]] = deque()

    @property
    def count(self) -> int:
        """How many keys are being hashed."""
        return len(self._waiting)

    def hash(self, key: str, done: Callable[[int], None]) -> None:
        """Begin to hash a key.

        Args:
            done: Is called with the hash, in a later turn.
        """
        self._waiting.append((KeyHash(key), done))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._step)

    def clear(self) -> None:
        """Forget the keys that are not hashed yet: their `done` is not called."""
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
