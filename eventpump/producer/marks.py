"""The stored state of a publisher while it publishes: how far it is, and that it closed with nothing in doubt."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from eventpump.aio.retry import retrying
from eventpump.cancellation import is_cancelled
from eventpump.core.claim import PublisherState, Started, StoredPublisherState
from eventpump.errors import EventPumpError, StoreError
from eventpump.eventhubs.numbering import distance
from eventpump.interfaces import PublisherStateStore
from eventpump.logs import retry_logger
from eventpump.options.base import RetryOptions

MARK_INTERVAL = 30.0
"""Seconds between two marks of one partition, while it publishes."""
MARK_RETRIES = 3
"""How often a mark is tried again where sends have no last try: a send that waits for its mark has to end."""

_log = logging.getLogger("eventpump.producer")
_T = TypeVar("_T")


async def ask_store(operation: str, partition_id: str, call: Callable[[], Awaitable[_T]]) -> _T:
    """Call a state store. Raises `StoreError` if it failed, or was cancelled while this task was not."""
    try:
        return await call()
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise StoreError(operation, "the store's call was cancelled", partition_id=partition_id) from None


class StoreWaits:
    """The calls of a state store that sends wait for. Belongs to one event loop."""

    def __init__(self) -> None:
        self._since: dict[object, float] = {}

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call of the store for as long as the `with` block runs."""
        key = object()
        self._since[key] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._since[key]

    @property
    def since(self) -> float | None:
        """When the oldest call under way began, on the loop's clock; None where there is none."""
        return min(self._since.values(), default=None)


class StateMarks:
    """Writes the marks of one partition's publisher. Belongs to one event loop.

    The first mark under an id and level is waited for before its send returns. Later ones are written by a task of its
    own, every `MARK_INTERVAL` at most. A mark that cannot be written is logged: publishing goes on. It is tried
    as often as `retry` says, or `MARK_RETRIES` times more where that sets no limit.

    Args:
        is_shared: Whether other processes write under the same id and level.
    """

    def __init__(
        self,
        store: PublisherStateStore,
        name: str,
        partition_id: str,
        started: Started,
        *,
        is_shared: bool,
        retry: RetryOptions,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._name = name
        self._partition_id = partition_id
        self._stored: StoredPublisherState | None = started.stored
        self._published = started.published
        self._last = started.number
        self._has_published = started.stored.state.has_published
        self._is_shared = is_shared
        self._retry = retry if retry.max_retries is not None else retry.model_copy(update={"max_retries": MARK_RETRIES})
        self._rng = rng
        self._turn = asyncio.Lock()
        self._first: asyncio.Task[None] | None = None
        self._later: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def count(self, last: int) -> int:
        """Count the events that the application has published, by the last number."""
        return self._published + distance(self._last, last)

    def published(self, last: int) -> None:
        """Record the number of the last event that the service has accepted."""
        self._published = self.count(last)  # each time, or the numbers would wrap around within a long life
        self._last = last
        self._has_published = True
        stored = self._stored
        if stored is not None and stored.state.has_published and self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(MARK_INTERVAL, self._due)

    @property
    def is_confirmed(self) -> bool:
        """Whether it is stored that something is published under this id and level, or is not to be stored here."""
        stored = self._stored
        return stored is None or stored.state.has_published or self._is_closed

    async def confirmed(self) -> None:
        """Wait until it is stored that something is published under this id and level, or until that has failed.

        Cancelled, it is written all the same.
        """
        if self.is_confirmed:
            return
        if self._first is None:
            self._first = self._task()
            self._first.add_done_callback(self._first_done)
        await asyncio.wait({self._first})

    async def close(self, *, is_clean: bool) -> None:
        """Write the last mark, clean if nothing is in doubt or being sent any more. Cancelled, it is written or not."""
        await self._write(is_clean=is_clean and not self._is_shared)

    async def aclose(self) -> None:
        """End what is being written. Closing twice is fine."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = {task for task in (self._first, self._later) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------------------------------------ inside

    def _task(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._write(), name=f"eventpump mark of partition {self._partition_id}")

    def _first_done(self, task: asyncio.Task[None]) -> None:
        self._first = None  # where it failed, the next send tries again
        self._look(task)

    def _due(self) -> None:
        self._timer = None
        if self._later is None:
            self._later = self._task()
            self._later.add_done_callback(self._later_done)

    def _later_done(self, task: asyncio.Task[None]) -> None:
        self._later = None
        self._look(task)

    def _look(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("partition %s: a mark was not written", self._partition_id, exc_info=error)

    async def _write(self, *, is_clean: bool = False) -> None:
        """Store how far it is, unless another start has taken the state over since."""
        what = f"partition {self._partition_id}: storing a mark"
        async with self._turn:
            try:
                while await retrying(
                    partial(self._write_once, is_clean=is_clean),
                    self._retry,
                    self._rng,
                    is_final=lambda error: not isinstance(error, StoreError),
                    on_retry=retry_logger(_log, what, partition_id=self._partition_id),
                ):
                    pass
            except EventPumpError as error:
                _log.warning("partition %s: a mark was not written: %s", self._partition_id, error)

    async def _write_once(self, *, is_clean: bool) -> bool:
        """Store how far it is now. Return whether there may be more to store, because it went on meanwhile."""
        stored = self._stored
        if stored is None:
            return False
        mark = self._mark(stored.state, is_clean=is_clean)
        if mark == stored.state:
            return False
        self._stored = await self._swap(mark, stored)
        outcome = "belongs to another publisher now" if self._stored is None else f"is stored: {mark.published}"
        _log.debug("partition %s: the mark %s", self._partition_id, outcome, extra={"partition_id": self._partition_id})
        return True

    def _mark(self, stored: PublisherState, *, is_clean: bool) -> PublisherState:
        if not self._has_published or self._published < stored.published:
            # Nothing to store; of several processes that share a level, another is ahead.
            return replace(stored, is_clean=is_clean)
        return replace(stored, start=self._last, published=self._published, has_published=True, is_clean=is_clean)

    async def _swap(self, mark: PublisherState, stored: StoredPublisherState) -> StoredPublisherState | None:
        """Store a mark; return what is stored of this id and level now: None where another level is taken."""
        name, partition_id = self._name, self._partition_id
        written = await ask_store(
            "write state", partition_id, lambda: self._store.write_state(name, partition_id, mark, stored)
        )
        if written is not None:
            return written
        found = await ask_store("read state", partition_id, lambda: self._store.read_state(name, partition_id))
        mine = stored.state
        if (
            self._is_shared
            and found is not None
            and found.state.intent is None
            and (found.state.producer_id, found.state.owner_level) == (mine.producer_id, mine.owner_level)
            and found.state.claim == mine.claim
        ):
            return found
        return None
