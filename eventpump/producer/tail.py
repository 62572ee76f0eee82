"""Reading the newest events of a partition, from one sequence number to another, without a consumer's machinery."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from eventpump.errors import EventPumpError, ServiceTimeoutError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import ReceiveLinkSpec, Transport

_CREDIT = 300
_TIMEOUT = 60.0
"""Seconds to wait for the next event."""


class _Tail:
    """Holds what a link has received."""

    def __init__(self) -> None:
        self.received: deque[bytes] = deque()
        self.error: EventPumpError | None = None
        self.changed = asyncio.Event()

    def messages(self, payloads: Sequence[bytes]) -> None:
        self.received.extend(payloads)
        self.changed.set()

    def detached(self, error: EventPumpError) -> None:
        self.error = error
        self.changed.set()


async def read_tail(
    transport: Transport, hub: str, consumer_group: str, partition_id: str, after: int, through: int
) -> AsyncGenerator[ReceivedEvent, None]:
    """Read the events of a partition after one sequence number, up to and with another, which is there.

    It takes one of the five readers that the consumer group may have on a partition, and the right to listen.

    Raises:
        ServiceError: They could not be read, or did not come in time. It may be begun again.
    """
    if through <= after:
        return
    position = EventPosition.at_sequence_number(after) if after >= 0 else EventPosition.earliest()
    tail = _Tail()
    link = await transport.open_receive_link(ReceiveLinkSpec(hub, consumer_group, partition_id, position), tail)
    try:
        while True:
            link.set_credit(_CREDIT)
            while tail.received:
                event = ReceivedEvent(tail.received.popleft())
                if event.sequence_number <= through:
                    yield event
                if event.sequence_number >= through:
                    return
            if tail.error is not None:
                raise tail.error
            tail.changed.clear()
            try:
                async with asyncio.timeout(_TIMEOUT):
                    await tail.changed.wait()
            except TimeoutError:
                raise ServiceTimeoutError(
                    f"no event of the tail came within {_TIMEOUT:g} s", entity=f"partition {partition_id}"
                ) from None
    finally:
        await link.aclose()
