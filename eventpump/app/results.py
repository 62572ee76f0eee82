"""Publishes what functions return: one producer per hub, which is replaced after an error that is final for it."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from eventpump.aio.tasks import SingleFlight
from eventpump.app.handlers import Receipt
from eventpump.clients.producers import BufferedProducer
from eventpump.errors import (
    ClosedError,
    EntityNotFoundError,
    EventPumpError,
    InvalidClientStateError,
    ProducerDisconnectedError,
    ProducerStateLostError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
)
from eventpump.eventhubs.events import EventData
from eventpump.interfaces import CLOSE_TIMEOUT
from eventpump.options.producer import OnError

_log = logging.getLogger("eventpump.app")


class Finality(enum.Enum):
    """What an error of a producer means for what it is given next."""

    PASSING = enum.auto()
    """Nothing: it may be sent."""
    MAYBE_GONE = enum.auto()
    """It fails again if the hub has lost the partition."""
    REPLACE = enum.auto()
    """It fails again; a new producer publishes it."""
    END = enum.auto()
    """It fails again, with a new producer too, or one would act against the options."""


def finality_of(error: Exception, *, keeps_state: bool) -> Finality:
    """Return what follows an error with which events were not published.

    Args:
        keeps_state: Whether the producer has a state store, which cannot be opened twice.
    """
    match error:
        case ProducerDisconnectedError():
            # Another process has taken over, and is not to be fenced out in turn.
            return Finality.END
        case ProducerStateLostError() | InvalidClientStateError():
            return Finality.END if keeps_state else Finality.REPLACE
        case PublishOutcomeUnknownError(is_settling=False):
            return Finality.END  # a start in doubt; `on_doubt` decides
        case EntityNotFoundError() | RequestRefusedError():
            return Finality.MAYBE_GONE
    return Finality.PASSING


class ResultPublisher:
    """Sends the results for one hub; an `EventPublisher`.

    A producer publishes nothing more to a partition after an error that is final there, and goes by the partitions that
    the hub had when it was opened. It is replaced then, at the next result: what it has accepted is sent first, so that
    the order of results is kept where nothing fails.

    Args:
        keeps_state: Whether its producer has a state store: it is not replaced then, and the error is final.
        make: Returns a new producer that calls the function it is given with the events of each failure.
        on_opened: Called with every producer that was opened.
        on_final: Called with an error after which nothing is published any more.
    """

    def __init__(
        self,
        hub: str,
        make: Callable[[OnError], BufferedProducer],
        *,
        keeps_state: bool,
        on_opened: Callable[[BufferedProducer], None],
        on_final: Callable[[Exception], None],
    ) -> None:
        self._hub = hub
        self._make = make
        self._keeps_state = keeps_state
        self._on_opened = on_opened
        self._on_final = on_final
        self._producer: BufferedProducer | None = None
        self._is_spent = True
        self._suspect: tuple[str, Exception] | None = None
        """A partition that the hub may have lost, and the error that says so."""
        self._renewal: SingleFlight[None] = SingleFlight("replace a producer of results", of="application")
        self._is_closed = False
        self._generation = 0

    async def open(self) -> None:
        """Open a producer. Raises a `ServiceError` if it cannot be; it may be tried again."""
        self._generation += 1
        producer = self._make(partial(self._failed, self._generation))
        try:
            await producer.open()
        except BaseException:
            await producer.aclose(flush=False, deadline=0.0)
            raise
        self._producer, self._is_spent, self._suspect = producer, False, None
        self._on_opened(producer)

    async def send(self, event: EventData, *, partition_key: str | None = None) -> Receipt:
        """Accept a result, by a new producer if one is due. Raises what a new producer cannot be opened for."""
        while True:
            if self._is_closed:
                raise ClosedError("application")
            if self._is_spent or self._suspect is not None:
                await self._renewal.run(self._renew)
            producer = self._producer
            assert producer is not None
            try:
                return await producer.send(event, partition_key=partition_key)
            except ClosedError:
                if producer is self._producer and not self._is_spent:
                    raise
                # It was waiting for room in the one that is being replaced.

    async def aclose(self) -> None:
        """Send what was accepted, and close."""
        self._is_closed = True
        self._renewal.cancel()
        if self._producer is not None:
            await self._producer.aclose()

    def _failed(self, generation: int, events: Sequence[EventData], partition_id: str, error: Exception) -> None:
        """Decide what follows a failure. The events' functions are called again: their receipts have the error."""
        if generation != self._generation or self._is_closed:
            return
        match finality_of(error, keeps_state=self._keeps_state):
            case Finality.END:
                self._on_final(error)
            case Finality.REPLACE if not self._is_spent:
                self._is_spent = True
                _log.warning("hub %s: its producer is replaced, because of %s", self._hub, error)
            case Finality.MAYBE_GONE:
                self._suspect = partition_id, error

    async def _renew(self) -> None:
        """Replace the producer, if it can publish nothing more to a partition."""
        producer, suspect = self._producer, self._suspect
        if not self._is_spent and producer is not None and suspect is not None:
            partition_id, error = suspect
            self._suspect = None
            try:
                is_gone = partition_id not in await producer.get_partition_ids()
            except EventPumpError as another:
                _log.warning("hub %s: its partitions cannot be read: %s", self._hub, another)
                return
            if is_gone and self._keeps_state:
                self._on_final(error)
            if not is_gone or self._keeps_state:
                return
            self._is_spent = True
            _log.warning("hub %s: its producer is replaced, because partition %s is gone", self._hub, partition_id)
        if producer is not None:
            with suppress(EventPumpError):  # of events whose receipts have it
                await producer.aclose(deadline=CLOSE_TIMEOUT)
        await self.open()
