"""A connected socket to a name, whichever of its addresses answers first (Happy Eyeballs, RFC 8305).

asyncio has the same behind `happy_eyeballs_delay`. It is not used: in the Python versions that this package supports it
raises `AssertionError` where two addresses answer in one turn of the loop, leaves the socket of the second one open
(python/cpython 86296, 124309).
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from eventpump.wire.stream import reason_of

STAGGER = 0.25
"""Seconds an address has for itself before the next one is tried beside it (RFC 8305, section 5)."""

_Address = tuple[int, int, int, str, Any]
"""What `getaddrinfo` gives: family, type, protocol, canonical name, address."""


async def connect(host: str, port: int) -> socket.socket:
    """Connect to the first address of a name that answers; the sockets of the others are closed.

    The next address is tried when the one before has failed, and beside it after `STAGGER` seconds. Cancelled, and when
    one was found, the other attempts end within the next turns of the loop.

    :raises OSError: the name has no address, or none that can be connected to; where they failed for different reasons
        it gives each.
    """
    loop = asyncio.get_running_loop()
    waiting = deque(_by_turns(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    attempts: list[asyncio.Task[socket.socket]] = []
    try:
        while waiting or not all(each.done() for each in attempts):
            if waiting:
                name = f"connect to {host}:{port}"
                attempts.append(loop.create_task(_connect(waiting.popleft()), name=name))
            await asyncio.wait(
                [each for each in attempts if not each.done()],
                timeout=STAGGER if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            winner = next((each for each in attempts if each.done() and each.exception() is None), None)
            if winner is not None:
                attempts.remove(winner)
                return winner.result()
        raise _joined([each.exception() for each in attempts])
    finally:
        for attempt in attempts:
            attempt.cancel()
            attempt.add_done_callback(_close)


async def _connect(address: _Address) -> socket.socket:
    family, kind, protocol, _, place = address
    connecting = socket.socket(family, kind, protocol)
    try:
        connecting.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connecting, place)
    except BaseException:
        connecting.close()
        raise
    return connecting


def _close(attempt: asyncio.Task[socket.socket]) -> None:
    """Close what an attempt that did not win may have connected all the same."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()


def _by_turns(addresses: Iterable[_Address]) -> list[_Address]:
    """Order addresses so that families take turns, each in the order given (RFC 8305, section 4)."""
    families: dict[int, list[_Address]] = {}
    for address in addresses:
        families.setdefault(address[0], []).append(address)
    return [each for turn in zip_longest(*families.values()) for each in turn if each is not None]


def _joined(errors: list[BaseException | None]) -> OSError:
    """Make one error of those that the addresses of a name failed with."""
    found = [error for error in errors if isinstance(error, OSError)]
    if not found:
        return OSError("the name has no address")
    reasons = dict.fromkeys(map(reason_of, found))
    return found[0] if len(reasons) == 1 else OSError(", ".join(reasons))
