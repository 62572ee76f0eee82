"""Finds the event at a position by receiving events, while no other link of the partition is open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from eventpump.aio.tasks import reject, resolve
from eventpump.consumer.calls.handler import PumpEndedError
from eventpump.consumer.link.feeds import FeedMaker
from eventpump.core.rewind import PositionSearch
from eventpump.errors import ConsumerDisconnectedError, EventError, OwnershipLostError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import PartitionProperties

FIRST_EVENT_TIME = 10.0
"""Seconds to wait for the first event behind a position that has one, before the partition is looked at again."""


@dataclass(frozen=True, slots=True, eq=False)
class PositionRequest:
    """A search for the event at a position, of a hub, for which the link is closed;
    completes with the checkpoint before it."""

    search: PositionSearch
    hub_created_at: datetime
    facts: Callable[[], Awaitable[PartitionProperties]]
    found: asyncio.Future[Checkpoint]


async def search_position(request: PositionRequest, feeds: FeedMaker, partition_id: str) -> None:
    """Receive what a search asks for until it has found its checkpoint, or its future is done."""
    search = request.search
    try:
        while search.found is None and not request.found.done():
            await _receive(request, feeds)
    except (PumpEndedError, ConsumerDisconnectedError):
        # The next link of the partition finds out who took it.
        reject(request.found, OwnershipLostError(partition_id))
    except Exception as error:
        reject(request.found, error)
    else:
        if search.found is not None:
            resolve(request.found, search.found)


async def _receive(request: PositionRequest, feeds: FeedMaker) -> None:
    """Receive the events of one probe."""
    search, probe = request.search, request.search.probe
    feed = feeds.make(probe.position, request.hub_created_at, limit=probe.limit, checks_hub=True, on_trouble=_ignore)
    cursor = feed.cursor()
    try:
        feed.start()
        while search.found is None and search.probe is probe and not request.found.done():
            if not await cursor.wait(FIRST_EVENT_TIME):
                search.silent(await request.facts())
                return
            for event in cursor.take(probe.limit):
                with suppress(EventError):
                    if search.received(event.sequence_number, event.offset):
                        return
            if feed.error is not None:
                raise feed.error
    finally:
        cursor.processed()
        await feed.aclose()


def _ignore(error: Exception, delay: float | None) -> None:
    """Do nothing: who asked for the place gets the error, and a link that fails now is opened again."""
