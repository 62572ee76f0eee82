"""Accepting an event at once, as a buffered producer does when nothing has to wait; and the receipt of the event."""

from __future__ import annotations

import asyncio
import time
from asyncio import base_events
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from threading import get_ident
from typing import Any, NamedTuple, NoReturn

from eventpump.compiled import based_on_core, core
from eventpump.core.router import HashRouter, PartitionRouter
from eventpump.errors import ConfigurationError, EventError
from eventpump.eventhubs.envelope import DATA_HEADS, envelope_head
from eventpump.eventhubs.events import EventData, no_event
from eventpump.eventhubs.hashing import check_key_length
from eventpump.eventhubs.numbering import NUMBERS
from eventpump.eventhubs.sealing import pieces_of
from eventpump.producer.accumulator import Batch, BufferRoom, Lane, Part
from eventpump.producer.outbox import Outbox, RoomQueue


class SendResult(NamedTuple):
    """Where an event was stored.

    Args:
        partition_id: The partition.
        published_sequence_number: Its number at an idempotent producer; None at a plain one.
    """

    partition_id: str
    published_sequence_number: int | None


@based_on_core("PlainReceipt")
class DeliveryReceipt:
    """The outcome of an accepted event. It may be awaited any number of times, also by several tasks, or ignored.

    Awaiting returns a :class:`SendResult`, or raises what the event failed with. Cancelled, or ended by a time-out,
    only that one wait ends: the event is sent all the same.

    A copy is the receipt itself, because an event has one outcome. A receipt cannot be pickled; what it returns can.
    """

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch[EventData], index: int) -> None:
        self._batch = batch
        self._index = index

    def __await__(self) -> Generator[Any, None, SendResult]:
        batch, index = self._batch, self._index
        part = batch.part(index)
        if part is None:
            # A future of this wait alone: cancelling a task cancels the future it waits for.
            if batch.home is not None:
                batch.home.enter()
            waiter: asyncio.Future[Part] = asyncio.get_running_loop().create_future()
            batch.waiters[waiter] = index
            try:
                part = yield from waiter
            finally:
                batch.waiters.pop(waiter, None)
        if part.error is not None:
            raise part.error.with_traceback(None)
        number = None if part.first is None else (part.first + index - part.start) % NUMBERS
        return SendResult(self.partition_id, number)

    @property
    def partition_id(self) -> str:
        """The partition that the event goes to."""
        assert self._batch.partition_id is not None
        return self._batch.partition_id

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._batch.part(self._index) is not None

    def __copy__(self) -> DeliveryReceipt:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeliveryReceipt:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DeliveryReceipt cannot be pickled: only the producer that returned it receives the outcome; "
            "await the receipt, and pickle the SendResult"
        )

    def __repr__(self) -> str:
        part = self._batch.part(self._index)
        state = "pending" if part is None else "published" if part.error is None else "failed"
        return f"DeliveryReceipt(partition {self.partition_id}, {state})"


_new = DeliveryReceipt.__new__


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the clock of a loop, which is read for every event.

    Where the loop has asyncio's own method, that is what the method calls: half the cost.
    """
    clock = loop.time
    is_own = getattr(clock, "__func__", None) is base_events.BaseEventLoop.time
    return time.monotonic if is_own else clock


@based_on_core("PlainIntake")
class Intake:
    """Accepts an event in one call, where nothing has to wait: encodes it, chooses its lane, reserves room, adds it.

    Until `begin` it accepts nothing.

    Attributes:
        blocked: For how many reasons every event has to wait its turn: not begun, closed, calls that let the loop run.
        refused: The event for which there was no room: its two pieces and the lane that was chosen for it.
    """

    __slots__ = (
        "_add",
        "_encode",
        "_held",
        "_is_idempotent",
        "_is_plain",
        "_is_stamping",
        "_lanes",
        "_most",
        "_outbox",
        "_partition_ids",
        "_queue",
        "_room",
        "_router",
        "_runner",
        "_time",
        "blocked",
        "refused",
    )

    def __init__(
        self,
        router: PartitionRouter,
        outbox: Outbox[EventData],
        *,
        encode: Callable[[EventData], EventData] | None,
        max_events: int,
        idempotent: bool,
        stamping: bool,
    ) -> None:
        self.blocked = 1
        self.refused: tuple[bytes, bytes, Lane[EventData]] | None = None
        self._router = router
        self._outbox = outbox
        self._encode = encode
        self._is_idempotent = idempotent
        self._held: set[int] | None = set() if idempotent else None
        self._is_stamping = stamping
        self._is_plain = encode is None and not idempotent and not stamping
        self._add = outbox.add
        self._lanes: dict[Any, Lane[EventData]] = outbox.lanes
        self._most = max_events
        self._partition_ids: tuple[str, ...] = ()
        self._room: BufferRoom
        self._queue: RoomQueue
        self._time: Callable[[], float]
        self._runner: Any = None

    def begin(
        self,
        partition_ids: tuple[str, ...],
        room: BufferRoom,
        queue: RoomQueue,
        clock: Callable[[], float],
        runner: Any,
    ) -> None:
        """Accept events from now on, in the thread that `_thread_id` of `runner` is (`HomeLoop.runner`)."""
        self._partition_ids = partition_ids
        self._room = room
        self._queue = queue
        self._time = clock
        self._runner = runner
        self.blocked -= 1

    def is_home(self) -> bool:
        """Return whether the loop runs in this thread, as far as that is known without `HomeLoop.enter`."""
        return self._runner is not None and bool(self._runner._thread_id == get_ident())  # noqa: SLF001 - as begin says

    def accept(
        self,
        event: EventData,
        partition_id: str | None,
        partition_key: str | None,
        encoded: tuple[bytes, bytes] | None = None,
    ) -> DeliveryReceipt | None:
        """Accept an event at once.

        Returns:
            Its receipt. None where it has to wait, or is no event: then nothing was done; or there is no room, and
            `refused` has what was done for it.

        Raises:
            EventError: It cannot be encoded, or its outcome is open.
            ConfigurationError: The key is too long, or there is no such partition.
        """
        is_exact = type(event) is EventData  # another kind may encode itself otherwise
        if self.blocked or self._queue.wanting or not (is_exact or isinstance(event, EventData)):
            return None
        if self._runner._thread_id != get_ident():  # noqa: SLF001 - as begin says
            return None  # another thread or loop: the caller will see
        now = self._time()
        if now >= self._outbox.yield_at:
            return None
        held = None if encoded is not None else self._held  # what is encoded is held already
        if held is not None and id(event) in held:
            self.require_free(event)
        if encoded is not None:
            head, rest = encoded
        elif is_exact and partition_key is None and self._is_plain and (data := event.data) is not None:
            head, rest = DATA_HEADS[len(data)], data  # as `pieces_of` does, without a call of it
        else:
            head, rest = self.encode(event, partition_key)
        if partition_id is None:
            lane = self._lanes.get(self._router.route(event, partition_key, self._partition_ids))
            if lane is None:
                raise _no_lane()
        else:
            lane = self.route(event, partition_id, partition_key)
        size = len(head) + len(rest)
        if not self._room.reserve(lane.partition_id, size):
            self.refused = head, rest, lane
            return None
        batch = lane.filling
        if batch is None or (index := batch.join(event, head, rest, size, self._most)) < 0:
            # It begins or ends a batch.
            batch = self._add(lane, event, head, rest, now)
            index = len(batch.events) - 1
        if held is not None:
            held.add(id(event))
        receipt = _new(DeliveryReceipt)
        receipt._batch = batch  # noqa: SLF001 - without a call of `__init__`, which costs as much again
        receipt._index = index  # noqa: SLF001 - likewise
        return receipt

    def require_free(self, event: EventData) -> None:
        """Check that no call has given the event whose outcome is open: else an `EventError`, of an idempotent producer
        only."""
        if self._held is not None and id(event) in self._held:
            raise EventError("an event is being sent already: its outcome is open")

    def hold(self, event: EventData) -> None:
        """Refuse the event in further calls, until `free`. Raises as `require_free`."""
        self.require_free(event)
        if self._held is not None:
            self._held.add(id(event))

    def free(self, events: Iterable[EventData]) -> None:
        """End what `hold` and `accept` began."""
        if self._held is not None:
            self._held.difference_update(map(id, events))

    def encode(self, event: EventData, partition_key: str | None) -> tuple[bytes, bytes]:
        """Encode an event, in two pieces. The sum of their lengths is what it adds to a message, in bytes."""
        if not isinstance(event, EventData):
            raise no_event(event)
        if self._is_idempotent and event.published_sequence_number is not None:
            raise EventError("the event is published already, with a number")
        if self._encode is not None:
            event = self._encode(event)
        before = b"" if partition_key is None else _keyed_head(partition_key)
        return pieces_of(event, idempotent=self._is_idempotent, stamped=self._is_stamping, before=before)

    def route(self, event: EventData, partition_id: str | None, partition_key: str | None) -> Lane[EventData]:
        """Choose the lane of an event.
        Raises `ConfigurationError` if there is none, or both partition and key are given."""
        if partition_id is None:
            lane = self._lanes.get(self._router.route(event, partition_key, self._partition_ids))
            if lane is None:
                raise _no_lane()
            return lane
        if partition_key is not None:
            raise ConfigurationError("partition_key", "cannot be given along with partition_id")
        lane = self._lanes.get(partition_id)
        if lane is None:
            raise ConfigurationError("partition_id", f"the hub has no partition {partition_id!r}")
        return lane

    def take_refused(self) -> tuple[bytes, bytes, Lane[EventData]] | None:
        """Return what `accept` had done for the event that it refused last; None where it refused none."""
        refused, self.refused = self.refused, None
        return refused


def _no_lane() -> ConfigurationError:
    return ConfigurationError("router", "chose a partition that the hub does not have")


@lru_cache(maxsize=16384)
def _keyed_head(partition_key: str) -> bytes:
    """Encode the bytes before an event that has a key. Cached, because keys recur."""
    if not isinstance(partition_key, str):
        raise EventError("a partition key is text")
    check_key_length(partition_key)
    return envelope_head(partition_key)


if core is not None:
    core.accept_events(HashRouter, DeliveryReceipt, _keyed_head)
