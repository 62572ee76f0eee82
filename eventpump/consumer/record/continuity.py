"""Checks that the events of a partition follow on without a gap, and that they are still those of the same hub."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime
from operator import attrgetter
from typing import Generic, TypeVar

from eventpump.consumer.lease.ownership import Ownership
from eventpump.consumer.record.starts import Beginning, BeginningRecord, HubRecreatedError, StartFinder
from eventpump.core.starts import Loss, NumberWatch
from eventpump.errors import EventError, EventPumpError, ServiceError, ServiceTimeoutError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.interfaces import HubProperties, PartitionProperties
from eventpump.reports import DataLost, ServiceFailed

_T = TypeVar("_T")


def check_hub(found: HubProperties, created_at: datetime | None, partition_id: str) -> None:
    """Check that the hub is the one read so far, if any. Raises `HubRecreatedError` for another of the same name."""
    if created_at not in (None, found.created_at):
        raise HubRecreatedError(found.name, partition_id, "the hub was deleted and recreated while it was being read")


class ContinuityCheck(Generic[_T]):
    """Finds the events of a partition that are missing, and asks the service whether they are lost.

    What follows a loss is up to the caller.

    Args:
        ask: Reads the partition's properties; None if the service did not answer, and is to be asked later.
        time: Returns the time between two requests, in seconds.

    Attributes:
        facts: The partition's properties, as they were read last; None before.
    """

    def __init__(
        self,
        numbers: NumberWatch,
        number_of: Callable[[_T], int],
        ask: Callable[[], Awaitable[PartitionProperties | None]],
        time: Callable[[], float],
    ) -> None:
        self.numbers = numbers
        self.facts: PartitionProperties | None = None
        self._number_of = number_of
        self._ask = ask
        self._time = time

    def follows(self, events: Sequence[_T]) -> bool:
        """Return whether no sequence number is missing before or in a batch. Reads only its first and last event."""
        numbers, count = self.numbers, len(events)
        try:
            first = self._number_of(events[0])
            last = first if count == 1 else self._number_of(events[-1])
        except EventError:
            # The reader of the event finds that out as well. Which number should follow is not known.
            numbers.expected = None
            return True
        if first == numbers.expected and last - first + 1 == count and numbers.first_missing is None:
            # As nearly always, without a call for each batch.
            numbers.expected = last + 1
            return True
        return numbers.passed(first, last, count)

    def misses(self, missing: Collection[tuple[int, int]]) -> bool:
        """Record the numbers missing of a stream, the first and last each;
        return whether any are, now or from before."""
        for first, last in missing:
            self.numbers.missed(first, last)
        return self.numbers.first_missing is not None

    async def find_loss(self, events: Sequence[_T] = ()) -> Loss | None:
        """Ask the service, if it is time to, whether missing sequence numbers are lost.

        Args:
            events: The batch for which `follows` was false; empty where `misses` was true.
        """
        numbers, now = self.numbers, self._time()
        with suppress(EventError):
            numbers.look_into(list(map(self._number_of, events)))
        if not numbers.is_due(now):
            return None
        facts = await self._ask()
        if facts is None:
            numbers.not_answered(now)
            return None
        self.facts = facts
        return numbers.judge(facts, now)


class PumpContinuity(ContinuityCheck[ReceivedEvent]):
    """Checks what one pump reads, from the position where reading began.

    `find_loss` raises `HubRecreatedError` where the hub was deleted and created again.
    """

    def __init__(self, ownership: Ownership, beginning: Beginning, starts: StartFinder, group: BeginningRecord) -> None:
        super().__init__(
            NumberWatch(beginning.expected),
            attrgetter("sequence_number"),
            self._properties_if_known,
            ownership.services.clock.monotonic,
        )
        self._ownership = ownership
        self._hub_created_at = beginning.hub_created_at
        self._starts = starts
        self._group = group

    async def _properties_if_known(self) -> PartitionProperties | None:
        """Read the partition's properties, until that succeeds if delivery must not go on without them."""
        ownership, settings = self._ownership, self._ownership.settings
        try:
            return await ownership.unless_ending(self._properties())
        except ServiceError as error:
            ownership.report(ServiceFailed, f"reading the properties of hub {settings.hub}", error)
        if settings.on_data_loss != "fail":
            return None
        return await self._starts.until_done(lambda: ownership.unless_ending(self._properties()))

    async def report_last_gap(self, timeout: float) -> None:
        """Report whether missing numbers not judged yet are lost: a later owner cannot see them.
        Waits so long at most."""
        numbers, now = self.numbers, self._time()
        first, last = numbers.first_missing, numbers.last_missing
        if first is None:
            return
        try:
            async with asyncio.timeout(timeout):
                loss = numbers.judge(await self._properties(), now)
        except HubRecreatedError:
            return  # the next owner reports everything of that hub that was not processed
        except (EventPumpError, TimeoutError) as error:
            question = f"asking whether the missing numbers {first} to {last} are lost"
            failure = error if isinstance(error, EventPumpError) else ServiceTimeoutError("no answer in time")
            self._ownership.report(ServiceFailed, question, failure)
        else:
            if loss is not None:
                self._ownership.report(DataLost, loss, "earliest")

    async def _properties(self) -> PartitionProperties:
        """Read the partition's properties. Raises `HubRecreatedError` if they may be those of another hub."""
        ownership = self._ownership
        directory, partition_id = ownership.services.directory, ownership.partition_id
        facts = await directory.get_partition_properties(ownership.settings.hub, partition_id)
        check_hub(await self._group.hub(), self._hub_created_at, partition_id)
        return facts
