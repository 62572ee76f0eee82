"""The hub that observations are made on: sending and receiving in the raw, and outcomes as short texts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from eventpump.amqp.message import Data, Message
from eventpump.amqp.types import Int, Short
from eventpump.errors import ConfigurationError, EventPumpError, ServiceError
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.eventhubs.names import (
    BATCH_MESSAGE_FORMAT,
    IDEMPOTENT_PRODUCER,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    PRODUCER_SEQUENCE_NUMBER,
)
from eventpump.interfaces import PartitionProperties, ReceiveLink, ReceiveLinkSpec, SendLink, SendLinkSpec, Transport

READERS: Final = 5
"""How many readers a consumer group takes of a partition."""


class Arrivals:
    """What arrives on a link; implements `ReceiveSink`."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[ReceivedEvent] = asyncio.Queue()
        self.error: EventPumpError | None = None
        self.ended = asyncio.Event()

    def messages(self, batch: list[bytes]) -> None:
        for each in batch:
            self.events.put_nowait(ReceivedEvent(each))

    def detached(self, error: EventPumpError) -> None:
        self.error = error
        self.ended.set()


class Bench:
    """One partition of a hub that was made for the purpose.

    Args:
        timeout: Seconds to wait for what must come; what must not come is waited for half as long.
    """

    def __init__(self, transport: Transport, hub: str, consumer_group: str, timeout: float) -> None:
        self.transport = transport
        self.hub = hub
        self.timeout = timeout
        self._group = consumer_group
        self.partition_id = ""

    async def check(self) -> None:
        """Choose the partition. Raises `ConfigurationError` if the hub holds or held events, or somebody reads it."""
        for partition_id in (await self.transport.get_hub_properties(self.hub)).partition_ids:
            properties = await self.transport.get_partition_properties(self.hub, partition_id)
            if properties.last_enqueued_sequence_number >= 0:
                problem = (
                    f"partition {partition_id} of {self.hub} has had events: make a hub for this, and delete it after"
                )
                raise ConfigurationError("hub", problem)
            self.partition_id = self.partition_id or partition_id
            try:
                async with contextlib.AsyncExitStack() as stack:
                    for _ in range(READERS):
                        await stack.enter_async_context(
                            self.receiving(EventPosition.latest(), partition_id=partition_id)
                        )
            except ServiceError as error:
                problem = f"somebody may read partition {partition_id}: {READERS} readers are not taken: {error}"
                raise ConfigurationError("consumer_group", problem) from error

    async def properties(self) -> PartitionProperties:
        """Read the properties of the partition."""
        return await self.transport.get_partition_properties(self.hub, self.partition_id)

    # --------------------------------------------------------------------------------------------- receiving

    @asynccontextmanager
    async def receiving(
        self,
        position: EventPosition,
        *,
        credit: int = 0,
        tracks: bool = False,
        partition_id: str | None = None,
    ) -> AsyncIterator[tuple[Arrivals, ReceiveLink]]:
        """Attach a receive link for as long as the block runs."""
        arrivals = Arrivals()
        spec = ReceiveLinkSpec(
            self.hub, self._group, partition_id or self.partition_id, position, track_last_enqueued=tracks
        )
        link = await self.transport.open_receive_link(spec, arrivals)
        try:
            if credit:
                link.set_credit(credit)
            yield arrivals, link
        finally:
            await link.aclose()

    async def next_event(self, arrivals: Arrivals) -> ReceivedEvent | None:
        """Return the next event that arrives; None if none does in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout / 2):
                return await arrivals.events.get()
        return None

    async def read_back(self, message: bytes, *, tracks: bool = False) -> ReceivedEvent | None:
        """Send a message to the partition without numbers, and return it as it arrives at a reader."""
        async with self.receiving(EventPosition.latest(), credit=10, tracks=tracks) as (arrivals, _):
            async with self.sending() as link:
                await link.send(message)
            return await self.next_event(arrivals)

    # ----------------------------------------------------------------------------------------------- sending

    @asynccontextmanager
    async def sending(self, properties: Mapping[str, object] | None = None) -> AsyncIterator[SendLink]:
        """Attach a send link during the block, with the properties of an idempotent producer, or without any."""
        spec = SendLinkSpec(self.hub, self.partition_id)
        if properties is not None:
            spec = SendLinkSpec(self.hub, self.partition_id, properties, [IDEMPOTENT_PRODUCER])
        link = await self.transport.open_send_link(spec)
        try:
            yield link
        finally:
            await link.aclose()

    @asynccontextmanager
    async def producing(self) -> AsyncIterator[tuple[SendLink, int, int]]:
        """Attach a new idempotent producer; the link, its id and its level."""
        async with self.sending(numbers(None, None, None)) as link:
            producer_id, level = link.properties[PRODUCER_ID], link.properties[PRODUCER_EPOCH]
            assert isinstance(producer_id, int)
            assert isinstance(level, int)
            yield link, producer_id, level


def numbers(producer_id: int | None, level: int | None, number: int | None) -> dict[str, object]:
    """Return the three properties of a producer, which are the annotations of an event too."""
    return {
        PRODUCER_ID: producer_id,
        PRODUCER_EPOCH: None if level is None else Short(level),
        PRODUCER_SEQUENCE_NUMBER: None if number is None else Int(number),
    }


def batch(producer_id: int, level: int, first: int, count: int = 1) -> bytes:
    """Return an envelope of numbered events, to be sent with `BATCH_MESSAGE_FORMAT`."""
    events = [
        Message(Data((b"probe",)), message_annotations=dict(numbers(producer_id, level, first + at))).encode()
        for at in range(count)
    ]
    return encode_batch(events)


async def outcome_of(link: SendLink, message: bytes, timeout: float) -> str:
    """Send an envelope, and return the outcome."""
    try:
        async with asyncio.timeout(timeout):
            await link.send(message, message_format=BATCH_MESSAGE_FORMAT)
    except TimeoutError:
        return "no outcome"
    except EventPumpError as error:
        return refusal(error)
    return "accepted"


def refusal(error: EventPumpError) -> str:
    """Return how something was refused, without names and numbers."""
    condition = error.condition if isinstance(error, ServiceError) else None
    return f"refused: {condition or type(error).__name__}"


def names(values: Iterable[object]) -> str:
    """Return names in order, or that there are none."""
    return ", ".join(sorted(map(str, values))) or "none"
