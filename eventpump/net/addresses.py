"""Connects a socket to a host name, by the first of its addresses that answers (Happy Eyeballs, RFC 8305).

`aiohappyeyeballs` does it, and not asyncio's `happy_eyeballs_delay`, which in the Python versions that this package
supports raises `AssertionError` where two addresses answer in one turn of the loop, and leaves the socket of the second
one open (python/cpython 86296, 124309).
"""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address
from typing import Any

from aiohappyeyeballs import start_connection

STAGGER = 0.25
"""Seconds an address has for itself before the next one is tried beside it (RFC 8305, section 5)."""

_Address = tuple[Any, Any, int, str, Any]
"""What `getaddrinfo` returns: family, type, protocol, canonical name, address."""


async def connect(host: str, port: int) -> socket.socket:
    """Connect to the first address of a name that answers; the sockets of the others are closed.

    The next address is tried when the one before has failed, and beside it after `STAGGER` seconds. Families
    take turns. Cancelled, no socket stays open.

    Raises:
        OSError: The name has no address, or none that can be connected to; where they failed for different reasons its
            text has each.
    """
    addresses = await _resolve(host, port)
    if not addresses:
        raise OSError("the host name has no address")
    return await start_connection(addresses, happy_eyeballs_delay=STAGGER)


async def _resolve(host: str, port: int) -> list[_Address]:
    try:
        ip_address(host)
    except ValueError:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # An address is not looked up, so it needs no thread.
    return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
