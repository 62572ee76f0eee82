"""Runs uamqp, without our transport around it, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from eventpump import Emulator
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME
from tests.authority import Authority
from tests.interop.peers.lines import ROOT
from tests.support.processes import ChildProcess

PATIENCE = 40.0
"""Seconds to wait for its end."""


async def converse_by_uamqp(
    service: Emulator, authority: Authority, hub: str, bodies: Sequence[bytes], count: int, **more: Any
) -> list[dict[str, Any]]:
    """Publish events to partition 0, and read it from its beginning until there are so many.

    Args:
        service: Speaks TLS.
        more: See `uamqp_peer.py`.

    Returns:
        What was read of each event.
    """
    async with ChildProcess(sys.executable, "-m", "tests.interop.peers.uamqp_peer", directory=ROOT) as child:
        given = {
            "host": "127.0.0.1",
            "port": service.port,
            "ca_file": str(authority.file),
            "key_name": DEFAULT_KEY_NAME,
            "key": DEFAULT_KEY,
            "hub": hub,
            "partition": "0",
            "bodies": [body.hex() for body in bodies],
            "count": count,
            **more,
        }
        await child.tell(json.dumps(given))
        async with asyncio.timeout(PATIENCE):
            assert await child.wait() == 0, child.stderr
        found: list[dict[str, Any]] = json.loads(child.lines[-1])
        return found
