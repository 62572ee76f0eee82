"""Reading the newest events of a partition, from one sequence number to another, without a consumer's machinery."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from eventpump.aio.retry import retrying
from eventpump.core.backoff import RetryPolicy
from eventpump.core.credit import CreditWindow
from eventpump.errors import EventPumpError, ServiceTimeoutError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import ReceiveLink, ReceiveLinkSpec, Transport
from eventpump.options.base import RetryOptions

_MAX_EVENTS = 3000
_MAX_BYTES = 8 * 1024 * 1024
"""How much is received ahead."""
_NO_RETRY = RetryOptions(max_retries=0)


class _Tail:
    """Receives over one link at a time."""

    def __init__(self, transport: Transport, spec: ReceiveLinkSpec) -> None:
        self._transport = transport
        self._spec = spec
        self._window = CreditWindow(_MAX_EVENTS, _MAX_BYTES)
        self._link: ReceiveLink | None = None
        self._received: list[bytes] = []
        self._size = 0
        self._error: EventPumpError | None = None
        self._changed = asyncio.Event()

    def messages(self, batch: list[bytes]) -> None:
        """Called with what has arrived."""
        self._size += self._window.received(batch)
        self._received += batch
        self._grant()
        self._changed.set()

    def detached(self, error: EventPumpError) -> None:
        """Called when the link ended."""
        self._error = error
        self._changed.set()

    async def take(self, after: int) -> list[bytes]:
        """Return what has arrived, at least one message, from a link that begins after this number if there is none.
        Raises its end."""
        if self._link is None:
            self._error = None
            position = EventPosition.at_sequence_number(after) if after >= 0 else EventPosition.earliest()
            link = self._link = await self._transport.open_receive_link(replace(self._spec, position=position), self)
            self._window.link_opened(link.max_message_size)
            self._grant()
        while not self._received:
            if self._error is not None:
                await self.aclose()
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        received, self._received, self._size = self._received, [], 0
        self._grant()
        return received

    def _grant(self) -> None:
        if self._link is not None and (credit := self._window.grant(len(self._received), self._size)) is not None:
            self._link.set_credit(credit)

    async def aclose(self) -> None:
        """Close the link."""
        link, self._link = self._link, None
        if link is not None:
            await link.aclose()


async def read_tail(
    transport: Transport,
    hub: str,
    consumer_group: str,
    partition_id: str,
    after: int,
    through: int,
    *,
    timeout: float = 60.0,
    retry: RetryPolicy = _NO_RETRY,
) -> AsyncGenerator[ReceivedEvent, None]:
    """Read the events of a partition after one sequence number, up to and with another, which is there.

    It takes one of the five readers that the consumer group may have on a partition, and the right to listen.

    Args:
        after: The number after which reading begins; below 0 for the beginning of the partition.
        timeout: Seconds to wait for the next event, whatever fails meanwhile. Default: 60.0.
        retry: The delays before a link that failed is opened again, after the last event. Default: no retry.

    Raises:
        ServiceError: They could not be read, or did not come in time. It may be begun again.
    """
    loop, rng = asyncio.get_running_loop(), random.Random()
    tail = _Tail(transport, ReceiveLinkSpec(hub, consumer_group, partition_id, EventPosition.earliest()))
    try:
        while after < through:
            until = loop.time() + timeout
            try:
                take = partial(tail.take, after)
                received = await retrying(take, retry, rng, was_attached=lambda: False, until=until)
            except TimeoutError:
                problem = f"no event of the tail came within {timeout:g} s"
                raise ServiceTimeoutError(problem, entity=f"partition {partition_id}") from None
            for event in map(ReceivedEvent, received):
                after = event.sequence_number
                if after <= through:
                    yield event
                if after >= through:
                    return
    finally:
        await tail.aclose()
