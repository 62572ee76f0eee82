"""Checks that the events of a partition follow on without a gap, and that they are still those of the same hub."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from datetime import datetime
from typing import Any

from eventpump.consumer.record.starts import Beginning, BeginningRecord, HubRecreatedError
from eventpump.core.starts import Loss, NumberWatch
from eventpump.errors import EventError, EventPumpError, ServiceError, ServiceTimeoutError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.interfaces import Clock, HubDirectory, PartitionProperties
from eventpump.options.consumer import HostSettings
from eventpump.reports import DataLost, ServiceFailed


class ContinuityCheck:
    """Checks one partition from the position where reading began.

    Args:
        beginning: Where reading began, and in which hub.
        partition_id: The partition.
        settings: The options of the host.
        directory: Reads the partition's properties.
        group: Reads the hub's properties.
        clock: The time between two questions to the service.
        step: Runs a step of the pump, and raises if the pump ends first.
        until_done: Repeats a call until it succeeds, and raises if the service refuses it.
        report: Called with the class of a report and its fields.
    """

    def __init__(
        self,
        beginning: Beginning,
        partition_id: str,
        settings: HostSettings,
        *,
        directory: HubDirectory,
        group: BeginningRecord,
        clock: Clock,
        step: Callable[[Coroutine[Any, Any, PartitionProperties]], Awaitable[PartitionProperties]],
        until_done: Callable[[Callable[[], Awaitable[PartitionProperties]]], Awaitable[PartitionProperties]],
        report: Callable[..., None],
    ) -> None:
        self._numbers = NumberWatch(beginning.expected)
        self._hub_created_at: datetime = beginning.hub_created_at
        self._partition_id = partition_id
        self._settings = settings
        self._directory = directory
        self._group = group
        self._clock = clock
        self._step = step
        self._until_done = until_done
        self._report = report

    def follows(self, events: tuple[ReceivedEvent, ...]) -> bool:
        """Return whether no sequence number is missing before or in a batch. Reads only its first and last event."""
        try:
            return self._numbers.passed(events[0].sequence_number, events[-1].sequence_number, len(events))
        except EventError:
            # The processor finds that out as well. Which number should follow is not known.
            self._numbers.expected = None
            return True

    def misses(self, missing: Collection[tuple[int, int]]) -> bool:
        """Record the sequence numbers that are missing in a partition of which only a stream is read.

        Args:
            missing: The first and the last number, each.

        Returns:
            Whether any are missing, now or from before.
        """
        for first, last in missing:
            self._numbers.missed(first, last)
        return self._numbers.first_missing is not None

    async def find_loss(self, events: tuple[ReceivedEvent, ...]) -> Loss | None:
        """Ask the service, if it is time to, whether missing sequence numbers are lost.

        Args:
            events: The batch for which `follows` was false; empty where `misses` was true.

        Returns:
            What is lost; None if nothing is, or if that is not known yet.

        Raises:
            HubRecreatedError: The hub was deleted and created again.
        """
        numbers, now = self._numbers, self._clock.monotonic()
        try:
            if events and events[-1].sequence_number - events[0].sequence_number + 1 != len(events):
                numbers.look_into([event.sequence_number for event in events])
        except EventError:
            numbers.expected = None
        if not numbers.is_due(now):
            return None
        try:
            facts = await self._step(self._properties())
        except ServiceError as error:
            self._report(ServiceFailed, f"reading the properties of hub {self._settings.hub}", error)
            numbers.not_answered(now)
            if self._settings.on_data_loss != "fail":
                return None
            facts = await self._until_done(lambda: self._step(self._properties()))
        return numbers.judge(facts, now)

    async def report_last_gap(self, timeout: float) -> None:
        """Report whether sequence numbers are lost that are missing and not judged yet: a later owner cannot see them.

        Args:
            timeout: Seconds to wait for the service.
        """
        numbers, now = self._numbers, self._clock.monotonic()
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
            self._report(ServiceFailed, question, failure)
        else:
            if loss is not None:
                self._report(DataLost, loss, "earliest")

    async def _properties(self) -> PartitionProperties:
        """Read the partition's properties. Raises `HubRecreatedError` if they may be those of another hub."""
        facts = await self._directory.get_partition_properties(self._settings.hub, self._partition_id)
        await self._check_hub()
        return facts

    async def _check_hub(self) -> None:
        if (await self._group.hub()).created_at != self._hub_created_at:
            problem = "the hub was deleted and recreated while it was being read"
            raise HubRecreatedError(self._settings.hub, self._partition_id, problem)
