"""Writes a partition's checkpoints: one write in flight at a time, always of the latest one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

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
        tracker: Decides which checkpoints to write.
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
        self._is_closed = False

    def kick(self) -> None:
        """Start a write if one is pending and none is in flight."""
        if not self._is_closed and not self._is_writing and not self._tracker.is_settled:
            self._is_writing = True
            self._tasks.spawn(self._write(), "eventpump checkpoint writer")

    def stored(self, checkpoint: Checkpoint) -> asyncio.Future[None]:
        """Return a future that completes when a requested checkpoint, or a later one, is stored, or fails."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((checkpoint, waiter))
        self.kick()
        return waiter

    async def flush(self, timeout: float) -> bool:
        """Wait until every pending checkpoint is stored, for a time in seconds. Return whether it is."""
        self.kick()
        await self._tasks.wait(max(0.0, timeout))
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
        is_cancelled = False
        try:
            await self._write_wanted()
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        except BaseException as error:
            self._fail_waiters(StoreError(_WRITE, f"the writer failed: {type(error).__name__}"))
            raise
        finally:
            self._is_writing = False
            if is_cancelled:
                # Unless the writer is closed, other code cancelled the task, and the checkpoint is still pending.
                self.kick()

    async def _write_wanted(self) -> None:
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
                    return
                self._backoff.reset()
                tracker.write_done()
                ownership.report(CheckpointWritten, checkpoint)
                self._settle_waiters()

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
    """Return what a store's call returns.

    Args:
        operation: The name of the operation, for the error.
        call: The call.
        timeout: The time-out that the store has for it, in seconds, for the error.

    Raises:
        EventPumpError: The store failed: its own error, or a `StoreError`.
    """
    try:
        return await call
    except BaseException as error:
        if not is_failure(error):
            raise
        raise store_error(error, operation, None, timeout) from error
