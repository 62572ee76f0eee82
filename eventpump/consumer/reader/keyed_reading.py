"""Calls a `KeyedProcessor` with what a reader reads: one `PartitionReader.run`, from its first read to its end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from eventpump.aio.tasks import TaskSet
from eventpump.consumer.calls.handler import HandlerRunner, HandlerTimeout, as_exception, is_undecodable
from eventpump.consumer.calls.keyed_driver import KeyedDriver
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import PartitionContext
from eventpump.core.failures import FailureStep, ProcessorFailures
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.reports import HostReport
from eventpump.telemetry.interface import PartitionTelemetry

HANDLER_TIMEOUT = HandlerTimeout()
READ = 300
"""The most events that are read at a time."""
BLOCKED_AFTER, BLOCKED_PAUSE = 1.0, 10.0
"""Seconds after which a standstill of the event loop is logged, and between two such lines."""

_log = logging.getLogger("eventpump.consumer")


class KeyedReading(KeyedDriver):
    """Has a keyed processor called with the events of a partition, until they end or one cannot be processed.

    Args:
        read: Called with the most messages to return; returns the next ones, none at the end. Canceling it is safe.
        begins_at: Where a reader would begin that gets what is read here.
        retry: The delays before events that failed are given to the handler again; None for no retry.
        close_timeout: Seconds that running calls of the handler have after another one failed, before they are
            cancelled.
    """

    def __init__(
        self,
        processor: KeyedProcessor,
        context: PartitionContext,
        read: Callable[[int], Awaitable[list[bytes]]],
        *,
        make: Callable[[bytes], ReceivedEvent],
        begins_at: EventPosition,
        retry: RetryOptions | None,
        close_timeout: float,
        rng: random.Random,
        telemetry: PartitionTelemetry | None,
    ) -> None:
        self._read = read
        self._make = make
        self._begins_at = begins_at
        self._close_timeout = close_timeout
        self._rng = rng
        self._waiting: list[ReceivedEvent] = []
        self._is_read = False
        self._failure: Exception | None = None
        self._read_error: Exception | None = None
        self._is_cancelled = False
        self._tasks = TaskSet(self._unexpected)
        runner = HandlerRunner(
            context.partition_id,
            HANDLER_TIMEOUT,
            blocked_after=BLOCKED_AFTER,
            blocked_pause=BLOCKED_PAUSE,
            stepped=lambda _: None,
            report=self._report,
        )
        limit = RetryOptions(max_retries=0) if retry is None else retry
        failures = partial(ProcessorFailures, FailureStep.RETRY, FailureStep.STOP, limit)
        super().__init__(processor, context, runner, self._tasks, failures, telemetry)

    @property
    def place(self) -> EventPosition | None:
        """Where a reader would begin that gets every event that is not processed; None if all that was read is."""
        if not self._queue.events and not self._waiting:
            return None
        self._queue.advance()
        last = self._queue.watermark.position
        return self._begins_at if last is None else EventPosition.at_offset(last.offset)

    @property
    def unprocessed(self) -> list[bytes]:
        """The messages that were read and are not processed, in order."""
        return [event.raw for event in (*self._queue.unfinished, *self._waiting)]

    async def run(self) -> None:
        """Process what is read, to its end. Cancelled, or if an event cannot be processed, running calls end first.

        Raises:
            Exception: What the handler, or the key of an event, raised; or `read`, once what it had returned before is
                processed.
        """
        receiving = self._tasks.spawn(self._receive(), "eventpump keyed reader")
        receiving.add_done_callback(lambda _: self._changed())
        try:
            while self._failure is None and (self._queue.events or not self._is_read):
                await self._change()
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise
        finally:
            self._tasks.drop(receiving)
            await self._end()
        if self._failure is not None:
            raise self._failure
        if self._read_error is not None:
            raise self._read_error

    async def _end(self) -> None:
        """Begin no further call, and wait for those that run, which are cancelled when they have had their time."""
        self._dropped.set()
        self._workers.check_again()
        within = 0.0 if self._is_cancelled else self._close_timeout
        self._runner.set_deadlines(within, within)
        cancelled: asyncio.CancelledError | None = None
        try:
            while self._tasks:
                try:
                    await self._change()
                except asyncio.CancelledError as error:
                    if self._is_cancelled:
                        # For the second time: handlers that do not end are left to themselves.
                        self._runner.abandon()
                        await self._tasks.cancel(0.0)
                        raise
                    self._is_cancelled, cancelled = True, error
                    self._runner.set_deadlines(0.0, 0.0)
        finally:
            self._runner.stop()
        if cancelled is not None:
            raise cancelled

    async def _receive(self) -> None:
        """Read and accept events as there is room for them."""
        queue = self._queue
        try:
            while True:
                while not queue.has_room:
                    await self._change()
                messages = await self._read(min(queue.room, READ))
                if not messages:
                    return
                self._waiting.extend(map(self._make, messages))
                self._accept_waiting()
                while self._waiting:
                    await self._change()
                    self._accept_waiting()
        except Exception as error:
            self._read_error = error
        finally:
            self._is_read = True

    def _accept_waiting(self) -> None:
        """Accept the events that wait, as there is room for them."""
        if count := self._accept(self._waiting):
            self._context.last_delivered = self._waiting[count - 1]
            del self._waiting[:count]
        self._workers.look(self._queue)

    # ------------------------------------------------------------------------------------------ called by the workers

    def _may_start(self) -> bool:
        return not self._dropped.is_set()

    def _goes_on(self) -> bool:
        return self._may_start()

    def _advance(self) -> None:
        self._queue.advance()

    async def _belongs(self, event: ReceivedEvent) -> bool:
        return True

    async def _pass_over(self, *_: object) -> bool:
        raise AssertionError("a reader passes nothing over")

    async def _failed(
        self, failures: ProcessorFailures, error: Exception, events: tuple[ReceivedEvent, ...]
    ) -> tuple[FailureStep, float | None]:
        """Report a failure: the events are delivered again as often as is allowed, and then reading ends."""
        where = self._context.partition_id
        if self._dropped.is_set():
            _log.warning("partition %s: process_events failed, too: %r", where, error)
            return FailureStep.STOP, None
        can_retry = not is_undecodable(error, where, events)  # as by a host
        # When it failed is of no use: nothing is parked.
        step = failures.failed(len(events), 0.0, can_retry=can_retry)
        delay = failures.delay(self._rng) if step is FailureStep.RETRY else None
        if delay is None:
            self._fail(error)
        else:
            _log.warning("partition %s: process_events failed, trying again in %.1f s: %r", where, delay, error)
        await self._call_process_error(error)
        return step, delay

    async def _call_process_error(self, error: Exception) -> None:
        """Call `process_error`. What it raises is logged."""
        try:
            await self._runner.run("process_error", self._processor.process_error, self._context, error)
        except Exception:
            _log.exception("partition %s: process_error failed", self._context.partition_id)

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        self._dropped.set()
        self._workers.check_again()
        self._changed()

    def _unexpected(self, operation: str, error: BaseException) -> None:
        self._fail(as_exception(operation, error))

    def _report(self, kind: Callable[..., HostReport], *facts: Any) -> None:
        report = kind(self._context.owner_id, self._context.partition_id, *facts)
        # The caller that cancels handlers does not need to know that they end late.
        level = logging.DEBUG if self._is_cancelled else report.level
        _log.log(level, "partition %s: %s", self._context.partition_id, report.describe())
