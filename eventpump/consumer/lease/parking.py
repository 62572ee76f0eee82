"""Stores events that cannot be processed where the user wants them: `Park`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from eventpump.consumer.processor import PartitionContext
from eventpump.errors import EventError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.parked import Parked
from eventpump.interfaces import CLOSE_TIMEOUT, EventSender
from eventpump.options.consumer import Park


class Parking:
    """Parks the events of all partitions of a host, by senders to hubs of the same namespace."""

    def __init__(self, open_sender: Callable[[str], EventSender]) -> None:
        self._open_sender = open_sender
        self._senders: dict[str, EventSender] = {}

    async def park(
        self,
        park: Park,
        context: PartitionContext,
        event: ReceivedEvent,
        error: Exception,
        attempts: int,
        first_failed: float,
    ) -> None:
        """Store an event, and return when it is stored.

        Raises:
            EventPumpError: It could not be sent.
            Exception: What the user's function raised.
        """
        if callable(park.to):
            await park.to(context, event, error)
            return
        facts = Parked.of(
            event,
            error,
            hub=context.hub,
            partition=context.partition_id,
            consumer_group=context.consumer_group,
            attempts=attempts,
            first_failed=datetime.fromtimestamp(first_failed, UTC),
            host=context.owner_id,
        )
        partition_key = None
        with suppress(EventError):
            partition_key = event.partition_key
        sender = self._sender(park.to) if isinstance(park.to, str) else park.to
        receipt = await sender.send(facts.added_to(event), partition_key=partition_key)
        if receipt is not None:
            await receipt

    def _sender(self, hub: str) -> EventSender:
        sender = self._senders.get(hub)
        if sender is None:
            sender = self._senders[hub] = self._open_sender(hub)
        return sender

    async def aclose(self) -> None:
        """Close what sends to hubs. Nothing may be parked any more."""
        for sender in self._senders.values():
            await sender.aclose(deadline=CLOSE_TIMEOUT)
