"""The emulator with the service's limit of management requests per second and connection."""

from __future__ import annotations

import asyncio
import sys

from eventpump import Emulator
from eventpump.amqp.message import Message
from eventpump.emulator import nodes
from eventpump.emulator.config import HubSpec

REQUESTS_PER_SECOND = 50.0
"""Management requests that a connection of the service answers."""


def _limit_requests() -> None:
    """Have every connection of the emulators in this process answer no more requests than the service's would."""
    answer = nodes.RequestEnd._answer  # noqa: SLF001 - nothing else needs an emulator that is so slow
    due: dict[int, float] = {}

    def later(end: nodes.RequestEnd, request: Message, response: Message) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        at = max(now, due.get(id(end.connection), now))
        due[id(end.connection)] = at + 1 / REQUESTS_PER_SECOND
        loop.call_at(at, say, end, request, response)

    def say(end: nodes.RequestEnd, request: Message, response: Message) -> None:
        answer(end, request, response)
        end.connection.flush()

    setattr(nodes.RequestEnd, "_answer", later)  # noqa: B010 - a checker would refuse the assignment


async def service(hubs: dict[str, int], consumer_groups: list[str]) -> dict[str, float]:
    """Run the emulator until a line comes. It first prints its connection string.

    Args:
        hubs: How many partitions each hub has, by name.
        consumer_groups: Those that each hub has, besides `$Default`.
    """
    _limit_requests()
    groups = tuple(consumer_groups)
    async with Emulator([HubSpec(name, partitions, groups) for name, partitions in hubs.items()]) as emulator:
        print(emulator.connection_string, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    return {}
