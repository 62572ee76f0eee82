"""What follows a failure of a partition's processor: carries out the steps that the failure policy decides on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from eventpump.consumer.calls.handler import HandlerRunner, has_place, is_undecodable
from eventpump.consumer.lease.ownership import Ownership
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.core.backoff import Backoff
from eventpump.core.failures import FailureStep, ProcessorFailures
from eventpump.errors import ProcessorFailedError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.options.consumer import Park, failure_step
from eventpump.reports import EventParked, EventRange, EventSkipped, FailureOutcome, ProcessorFailed

_OUTCOMES: Final[dict[FailureStep, FailureOutcome]] = {
    FailureStep.RETRY: "retried",
    FailureStep.NARROW: "retried",
    FailureStep.STOP: "stopped",
    FailureStep.STOP_PARTITION: "stopped",
}


class FailureHandling:
    """Handles the failures of one pump: reports them, calls `process_error`, waits, skips and parks.

    Attributes:
        failures: The failures of the events in hand, where those are one batch.
    """

    def __init__(self, ownership: Ownership, runner: HandlerRunner, context: PartitionContext) -> None:
        self._ownership = ownership
        self._services = ownership.services
        self._settings = ownership.settings
        self._runner = runner
        self._context = context
        self.processor: EventProcessor | None = None
        self.failures = self.new_failures()

    def new_failures(self) -> ProcessorFailures:
        """Return a count of failures, for events that are delivered beside others."""
        settings = self._settings
        return ProcessorFailures(
            failure_step(settings.failure_policy), failure_step(settings.on_retries_exhausted), settings.handler_retry
        )

    async def failed(
        self, failures: ProcessorFailures, operation: str, error: Exception, events: tuple[ReceivedEvent, ...] | None
    ) -> tuple[FailureStep, float | None]:
        """Apply the failure policy: report the failure, and call `process_error`.

        If the policy is to stop, the pump ends.

        Args:
            events: The events that were to be processed; None if it was a method that is called without any.

        Returns:
            What follows, and the seconds to wait before it; None for no wait.
        """
        can_retry = not is_undecodable(error, self._ownership.partition_id, events or ())
        count = None if events is None else len(events)
        step = failures.failed(count, self._services.clock.time(), can_retry=can_retry)
        delay = None
        if step is FailureStep.RETRY and not self._ownership.life.is_ending:
            delay = failures.delay(self._services.rng)
        of = EventRange.of(events) if events else None
        outcome = _OUTCOMES.get(step)
        self._ownership.report(ProcessorFailed, operation, error, failures.in_a_row, delay, of, outcome)
        if outcome == "stopped":
            failure = ProcessorFailedError(self._ownership.partition_id, operation, stops_host=step is FailureStep.STOP)
            failure.__cause__ = error
            # First: a process_error that hangs must not keep the host from stopping.
            self._ownership.fail(failure)
        await self.call_process_error(error)
        return step, delay

    async def pass_over(
        self,
        failures: ProcessorFailures,
        step: FailureStep,
        events: tuple[ReceivedEvent, ...],
        error: Exception,
        *,
        wait: Callable[[float], Awaitable[bool]],
    ) -> bool:
        """Skip an event, or park it.

        Args:
            events: The event; none if the processor failed at an idle call.
            wait: Waits for seconds before it is tried again to park it; returns False if that is not to be.

        Returns:
            False if the pump ends before that is done, or it is not to be tried again.
        """
        if not self._ownership.may_deliver():
            return False
        if not events:
            return True
        (event,) = events
        number = event.sequence_number if has_place(event) else None
        settings = self._settings
        if step is FailureStep.SKIP:
            self._ownership.report(EventSkipped, number, error, failures.attempts)
            return True
        policies = (settings.failure_policy, settings.on_retries_exhausted)
        park = next(each for each in policies if isinstance(each, Park))
        backoff = Backoff.of(settings.handler_retry)
        assert failures.first_failed is not None
        facts = (park, self._context, event, error, failures.attempts, failures.first_failed)
        # Not `retrying`: each failure goes to `process_error`, and the lease must be alive at each attempt.
        while self._ownership.may_deliver():
            try:
                await self._runner.run("park", self._services.parking.park, *facts, events=events)
            except Exception as failure:
                delay = backoff.next(self._services.rng)
                retried_in = None if self._ownership.life.is_ending else delay
                self._ownership.report(
                    ProcessorFailed, "park", failure, backoff.failures, retried_in, EventRange.of(events), "retried"
                )
                await self.call_process_error(failure)
                if not await wait(delay):
                    return False
                continue
            hub = park.to if isinstance(park.to, str) else getattr(park.to, "hub", None)
            self._ownership.report(EventParked, number, error, failures.attempts, hub)
            return True
        return False

    async def call_process_error(self, error: Exception) -> None:
        """Call `process_error`, if there is a processor. What it raises is reported."""
        if self.processor is None:
            return
        try:
            await self._runner.run("process_error", self.processor.process_error, self._context, error)
        except Exception as another:
            self._ownership.report(ProcessorFailed, "process_error", another, 1, None)

    async def end_with(self, error: Exception) -> None:
        """End the pump because of an error that the processor did not raise, and call `process_error` with it."""
        self._ownership.fail(error)
        await self.call_process_error(error)
