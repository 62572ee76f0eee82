"""Writes a partition's checkpoints: one write in flight at a time, always of the latest one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import Context, copy_context
from typing import Final, TypeVar

from eventpump.aio.steps import InContext
from eventpump.aio.tasks import TaskSet, reject, resolve
from eventpump.cancellation import is_failure
from eventpump.consumer.lease.ownership import Ownership
from eventpump.core.backoff import UNLIMITED, Backoff, least_delay
from eventpump.core.checkpoint import CheckpointTracker
from eventpump.errors import EventPumpError, OwnershipLostError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.reports import CheckpointWritten, StoreFailed

_T = TypeVar("_T")

FAILURES_REPORTED = 3
"""Failed writes in a row after which the waiters fail. The write is retried nevertheless."""

_WRITE: Final = "write checkpoint"
"""The name of the operation in errors and reports."""


class CheckpointWriter:
    """Writes the checkpoints that a tracker asks for.

    Args:
        ownership: The pump's lease and services. A write that reaches the time-out of the store has an unknown outcome,
            and is repeated.
        subscription: The name under which the store keeps the checkpoints.
    """

    def __init__(self, ownership: Ownership, tracker: CheckpointTracker, subscription: str) -> None:
        self._ownership = ownership
        self._services = ownership.services
        self._tracker = tracker
        self._subscription = subscription
        self._backoff = Backoff(UNLIMITED.base_delay, UNLIMITED.max_delay)
        self._tasks = TaskSet(ownership.unexpected)
        self._waiters: list[tuple[Checkpoint, asyncio.Future[None]]] = []
        self._is_writing = False
        self._context: Context | None = None
        self._woken: asyncio.Future[None] | None = None
        self._written: asyncio.Future[None] | None = None
        self._is_closed = False

    def kick(self) -> None:
        """Start a write if one is pending and none is in flight."""
        if self._is_closed or self._is_writing or self._tracker.is_settled:
            return
        self._is_writing = True
        # The write belongs to the code that asked for it, as spans show; the task, which outlives it, to none.
        self._context = copy_context()
        if self._woken is None:
            context = Context()
            task = context.run(self._tasks.spawn, self._write(), "eventpump checkpoint writer")
            task.add_done_callback(self._ended, context=context)
        else:
            resolve(self._woken, None)

    def stored(self, checkpoint: Checkpoint) -> asyncio.Future[None]:
        """Return a future that completes when a requested checkpoint, or a later one, is stored, or fails."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((checkpoint, waiter))
        self.kick()
        return waiter

    async def flush(self, timeout: float) -> bool:
        """Wait until every pending checkpoint is stored, for a time in seconds. Return whether it is."""
        self.kick()
        if self._is_writing:
            if self._written is None:
                self._written = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._written}, timeout=max(0.0, timeout))
        return self._tracker.is_settled

    async def aclose(self) -> None:
        """Write no more. Waiters fail with `OwnershipLostError`. Closing twice is fine."""
        self.stop()
        await self._tasks.cancel(self._services.store_timeout)

    def stop(self) -> None:
        """Begin to close, without waiting for the write in flight."""
        self._is_closed = True
        self._fail_waiters(None)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._context is not None and await InContext(self._write_wanted(), self._context):
            # One task for all writes.
            self._context, self._woken = None, loop.create_future()
            self._rests()
            await self._woken

    def _ended(self, task: asyncio.Task[None]) -> None:
        context, self._context, self._woken = self._context, None, None
        self._is_writing = False
        if task.cancelled():
            if context is not None:
                # Unless the writer is closed, other code cancelled the task, and the checkpoint is still pending.
                context.run(self.kick)
        elif (error := task.exception()) is not None:
            self._fail_waiters(StoreError(_WRITE, f"the writer failed: {type(error).__name__}"))
        if not self._is_writing:
            self._rests()

    async def _write_wanted(self) -> bool:
        """Write until nothing is pending. Return False if the writer is closed, or the lease lost."""
        # Not `retrying`: each attempt writes the checkpoint that is the latest by then, and the count of failures
        # continues if other code cancels the task and it is started again.
        tracker, ownership, services = self._tracker, self._ownership, self._services
        while not self._is_closed and (checkpoint := tracker.begin_write()) is not None:
            try:
                is_stored = await services.group.write_checkpoint(ownership.lease, checkpoint, self._subscription)
            except BaseException as error:
                tracker.write_failed()
                if not is_failure(error):
                    raise
                failure = store_error(error, _WRITE, checkpoint.partition_id, services.store_timeout)
                delay = self._backoff.next(services.rng, at_least=least_delay(error))
                ownership.report(StoreFailed, _WRITE, failure)
                if self._backoff.failures >= FAILURES_REPORTED:
                    self._fail_waiters(failure)
                await asyncio.sleep(delay)
            else:
                if not is_stored:
                    tracker.write_failed()
                    ownership.lost("a checkpoint was refused")
                    return False
                self._backoff.reset()
                tracker.write_done()
                ownership.report(CheckpointWritten, checkpoint)
                self._settle_waiters()
        return not self._is_closed

    def _rests(self) -> None:
        """Nothing is being written now: end the waits of `flush`."""
        self._is_writing = False
        if self._written is not None:
            resolve(self._written, None)
            self._written = None

    def _settle_waiters(self) -> None:
        waiting: list[tuple[Checkpoint, asyncio.Future[None]]] = []
        for checkpoint, waiter in self._waiters:
            if not self._tracker.covers(checkpoint):
                waiting.append((checkpoint, waiter))
            else:
                resolve(waiter, None)
        self._waiters = waiting

    def _fail_waiters(self, error: EventPumpError | None) -> None:
        """Fail the waiters with an error; None for lost ownership."""
        for checkpoint, waiter in self._waiters:
            reject(waiter, error or OwnershipLostError(checkpoint.partition_id))
        self._waiters.clear()


def store_error(error: BaseException, operation: str, partition_id: str | None, timeout: float) -> EventPumpError:
    """Return the error for what a store's call raised: a store with a defect is handled as one that fails."""
    if isinstance(error, EventPumpError):
        return error
    if isinstance(error, TimeoutError):
        ours = StoreError(operation, f"no answer within {timeout:.1f} s", partition_id=partition_id)
    else:
        ours = StoreError(operation, f"{type(error).__name__}: {error}", partition_id=partition_id)
    ours.__cause__ = error
    return ours


async def call_store(operation: str, call: Awaitable[_T], timeout: float) -> _T:
    """Return what a store's call returns. Raises the store's own error, or a `StoreError` naming operation and
    time-out."""
    try:
        return await call
    except BaseException as error:
        if not is_failure(error):
            raise
        raise store_error(error, operation, None, timeout) from error
