"""Keyed processors: order per key, keys at the same time, and a watermark that never passes what is not processed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import pytest

from eventpump.amqp.message import Data, Message
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import CloseReason, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import ConfigurationError, ProcessorFailedError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.names import PARTITION_KEY
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import Park
from eventpump.reports import (
    DataLost,
    EventParked,
    EventSkipped,
    HandlerSlow,
    PartitionFailed,
    ProcessorFailed,
    UnexpectedFailure,
)
from eventpump.testing.clock import VirtualTimeLoop
from tests.support.fleet import NO_PROCESSOR, Fleet, stocked

Events = Sequence[ReceivedEvent]
Step = Callable[[PartitionContext, Events], Awaitable[None]]

EACH = CheckpointPolicy(every_events=1)
TWICE = RetryOptions(max_retries=1, base_delay=0.1, max_delay=0.1)
KEYS = 10


class _Oddity(BaseException):
    """Not an `Exception`."""


class _Book:
    """Writes down the calls of a handler, and checks those of each key as they come."""

    def __init__(self, step: Step | None = None) -> None:
        self.step = step
        self.calls: list[tuple[int, ...]] = []
        self.ok: list[int] = []
        self.errors: list[Exception] = []
        self.closed: list[CloseReason] = []
        self.running = self.most = 0
        self._busy: set[object] = set()

    async def handle(self, context: PartitionContext, events: Events) -> None:
        (key,) = {(context.owner_id, context.partition_id, _key(event)) for event in events}
        assert key not in self._busy, f"two calls of one key: {key}"
        numbers = tuple(event.sequence_number for event in events)
        self.calls.append(numbers)
        self._busy.add(key)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.step is not None:
                await self.step(context, events)
            self.ok.extend(numbers)
        finally:
            self.running -= 1
            self._busy.discard(key)

    @property
    def numbers(self) -> list[int]:
        return [number for call in self.calls for number in call]

    def of_key(self, key: int) -> list[int]:
        return [number for number in self.numbers if number % KEYS == key]


class _Keyed(KeyedProcessor):
    def __init__(self, book: _Book, **options: Any) -> None:
        super().__init__(book.handle, **{"key": _key, **options})
        self._book = book

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        self._book.errors.append(error)

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        self._book.closed.append(reason)


def _key(event: ReceivedEvent) -> int:
    return event.sequence_number % KEYS


async def _start(fleet: Fleet, processor: object, name: str = "a", **options: Any) -> Any:
    defaults = {"checkpoint_policy": EACH, "handler_retry": TWICE, "on_retries_exhausted": "skip"}
    return await fleet.start(name, processor, **{**defaults, **options})


async def _brief(context: PartitionContext, events: Events) -> None:
    await asyncio.sleep(0.01)


def _fails_on(*poison: int, raises: BaseException | None = None) -> Step:
    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(0.01)
        if any(event.sequence_number in poison for event in events):
            raise raises or ValueError("poison")

    return handle


# ------------------------------------------------------------------------------------------------- order and pace


@pytest.mark.parametrize("concurrency", [1, 8, 32])
async def test_as_many_calls_run_as_are_allowed(concurrency: int) -> None:
    """With handlers of 10 ms, within 10 % of `concurrency` / 10 ms, and never more at a time."""
    count, finished = 3000, []

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(0.01)
        finished.append(asyncio.get_running_loop().time())

    async with stocked(count) as fleet:
        await _start(fleet, KeyedProcessor(handle, key=lambda _: None, concurrency=concurrency))
        await fleet.until(lambda: len(finished) == count, 60)
        took, least = finished[-1] - finished[0] + 0.01, math.ceil(count / concurrency) * 0.01
        assert least * 0.999 <= took <= least * 1.1


async def test_events_of_a_key_come_in_order_and_others_meanwhile() -> None:
    """Handlers of random length: each key in order, one call at a time, all of them, several keys at a time."""
    rng = random.Random(1)

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.05, 1.0)))

    book = _Book(handle)
    async with stocked(500) as fleet:
        await _start(fleet, _Keyed(book, concurrency=6))
        await fleet.until(lambda: len(book.ok) == 500, 300)
        assert [book.of_key(key) for key in range(KEYS)] == [list(range(key, 500, KEYS)) for key in range(KEYS)]
        assert book.most == 6
        await fleet.until(lambda: fleet.checkpoint("0") == 499, 5)


async def test_events_without_a_key_are_independent() -> None:
    """Events sent without a partition key, as those whose key is None, keep nothing waiting, not even each other."""
    running, most = 0, 0

    async def handle(context: PartitionContext, events: Events) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1)
        running -= 1

    async with stocked(20) as fleet:
        await _start(fleet, KeyedProcessor(handle, concurrency=8))
        await asyncio.sleep(10)
        assert most == 8
        assert fleet.checkpoint("0") == 19


async def test_partition_key_is_the_key() -> None:
    """Without `key=`, events sent with one partition key are processed one after the other."""
    order: list[str] = []
    running: defaultdict[str | None, int] = defaultdict(int)

    async def handle(context: PartitionContext, events: Events) -> None:
        (event,) = events
        running[event.partition_key] += 1
        assert running[event.partition_key] == 1
        await asyncio.sleep(1 if event.body == b"0" else 0.1)
        running[event.partition_key] -= 1
        order.append(event.body_as_str())

    async with stocked(0) as fleet:
        for number, key in enumerate(["a", "a", "b", "a", "b"]):
            body = Data((str(number).encode(),))
            fleet.hub.store(Message(message_annotations={PARTITION_KEY: key}, body=body).encode(), 0, "0")
        await _start(fleet, KeyedProcessor(handle))
        await asyncio.sleep(5)
        assert [each for each in order if each in "013"] == ["0", "1", "3"]
        assert [each for each in order if each in "24"] == ["2", "4"]
        assert order.index("4") < order.index("0")


async def test_batches_of_a_key_hold_its_next_events() -> None:
    """With `max_batch_per_key` the handler gets what waits of the key, in order, up to so many."""
    book = _Book(_brief)
    async with stocked(200) as fleet:
        await _start(fleet, _Keyed(book, concurrency=2, max_batch_per_key=4))
        await asyncio.sleep(10)
        assert [book.of_key(key) for key in range(KEYS)] == [list(range(key, 200, KEYS)) for key in range(KEYS)]
        assert max(map(len, book.calls)) == 4
        assert fleet.checkpoint("0") == 199


async def test_handler_that_never_waits_leaves_the_loop_to_others() -> None:
    """Other tasks have a turn after at most a hundred calls; all is processed."""
    turns, seen = 0, []

    async def handle(context: PartitionContext, events: Events) -> None:
        seen.append((events[0].sequence_number, turns))

    async with stocked(1000) as fleet:
        await _start(fleet, KeyedProcessor(handle, key=_key))
        while len(seen) < 1000:
            await asyncio.sleep(0)
            turns += 1
        per_turn: defaultdict[int, int] = defaultdict(int)
        for _, turn in seen:
            per_turn[turn] += 1
        assert max(per_turn.values()) <= 100


async def test_what_a_handler_sets_in_its_context_is_not_seen_by_one_that_runs_beside_it() -> None:
    """Such as a span of a tracer, which must not become the parent of another event's."""
    name: ContextVar[str] = ContextVar("name", default="")
    seen: list[str] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        seen.append(name.get())
        name.set("set by a handler")
        await asyncio.sleep(1)

    async with stocked(8) as fleet:
        await _start(fleet, KeyedProcessor(handle, key=_key, concurrency=8))
        await asyncio.sleep(5)
        assert seen == [""] * 8


# ------------------------------------------------------------------------------------------------------- bounds


async def test_bytes_in_flight_are_bounded() -> None:
    """No further event is taken beyond the bound; one that is larger by itself is processed alone."""
    book = _Book(_brief)
    async with stocked(0) as fleet:
        fleet.hub.publish("0", *(b"x" * 1000 for _ in range(20)), b"y" * 10_000, *(b"x" * 1000 for _ in range(20)))
        sizes: list[int] = []

        async def handle(context: PartitionContext, events: Events) -> None:
            sizes.append(len(events[0].raw))
            if len(events[0].raw) > 4000:
                assert book.running == 0
            await book.handle(context, events)
            sizes.pop()
            assert sum(sizes) <= 4000 or len(sizes) == 1

        await _start(fleet, KeyedProcessor(handle, key=lambda e: e.sequence_number % KEYS, max_bytes_in_flight=4000))
        await asyncio.sleep(10)
        assert sorted(book.ok) == list(range(41))
        assert book.most == 3


async def test_key_that_hangs_holds_up_others_only_at_max_ahead() -> None:
    """All other keys go on until so many events are above the first one that is not processed."""
    gate = asyncio.Event()

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number == 3:
            await gate.wait()

    book = _Book(handle)
    async with stocked(500) as fleet:
        await _start(fleet, _Keyed(book, concurrency=4, max_ahead=100, max_events_in_flight=50))
        await asyncio.sleep(5)
        assert fleet.checkpoint("0") == 2
        # 3 to 102 are taken; of key 3 only the first has begun.
        assert sorted(book.numbers) == [number for number in range(103) if number == 3 or number % KEYS != 3]
        gate.set()
        await fleet.until(lambda: fleet.checkpoint("0") == 499, 30)
        assert sorted(book.ok) == list(range(500))


# ----------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "raises",
    [None, _Oddity("odd"), asyncio.CancelledError("own"), GeneratorExit()],
    ids=["error", "base", "cancel", "exit"],
)
async def test_key_that_is_retried_holds_up_no_other(raises: BaseException | None) -> None:
    """Its later events wait, in order; those of others are processed meanwhile; then it is skipped, and reported."""
    book = _Book(_fails_on(13, raises=raises))
    async with stocked(100) as fleet:
        retry = RetryOptions(max_retries=3, base_delay=10, max_delay=10)
        await _start(fleet, _Keyed(book), handler_retry=retry)
        await asyncio.sleep(1)
        others = [number for number in range(100) if number % KEYS != 3]
        assert sorted(number for number in book.ok if number % KEYS != 3) == others
        assert [number for number in book.ok if number % KEYS == 3] == [3]
        assert fleet.checkpoint("0") == 12
        await asyncio.sleep(100)
        assert book.of_key(3) == [3, 13, 13, 13, 13, *range(23, 100, KEYS)]
        assert [(each.sequence_number, each.attempts) for each in fleet.reported("a", EventSkipped)] == [(13, 4)]
        assert len(book.errors) == len(fleet.reported("a", ProcessorFailed)) == 4
        assert fleet.checkpoint("0") == 99


async def test_keys_that_are_retried_take_no_place_from_others() -> None:
    """More of them than `concurrency`: while they wait, others are processed, and never more at a time than allowed."""
    book = _Book(_fails_on(3, 4, 5))
    async with stocked(100) as fleet:
        retry = RetryOptions(max_retries=3, base_delay=100, max_delay=100)
        await _start(fleet, _Keyed(book, concurrency=2), handler_retry=retry)
        await asyncio.sleep(1.5)
        assert sorted(book.ok) == [number for number in range(100) if number % KEYS not in (3, 4, 5)]
        await asyncio.sleep(2000)
        assert sorted({*book.ok, 3, 4, 5}) == list(range(100))
        assert book.numbers.count(3) == book.numbers.count(4) == 4
        assert book.most <= 2


async def test_key_that_has_rested_has_a_place_before_keys_that_have_not_begun() -> None:
    """Or it would come to its turn only when nothing else is left."""
    slow = 0.1

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(slow)
        if events[0].sequence_number == 3 and book.numbers.count(3) == 1:
            raise ValueError("not now")

    book = _Book(handle)
    async with stocked(500) as fleet:
        retry = RetryOptions(max_retries=3, base_delay=1, max_delay=1)
        await _start(fleet, _Keyed(book, concurrency=1), handler_retry=retry)
        await fleet.until(lambda: 3 in book.ok, 100)
        assert len(book.ok) < 20
        assert book.most == 1
        await fleet.until(lambda: len(book.ok) == 500, 100)


async def test_batch_of_a_key_is_narrowed_before_it_is_skipped() -> None:
    """Only the events that fail by themselves are; the watermark passes each of the others as it is processed."""
    book = _Book(_fails_on(13))
    async with stocked(50) as fleet:
        await _start(fleet, _Keyed(book, concurrency=1, max_batch_per_key=5), failure_policy="skip")
        await asyncio.sleep(10)
        assert [each.sequence_number for each in fleet.reported("a", EventSkipped)] == [13]
        assert [call for call in book.calls if call[0] % KEYS == 3] == [
            (3, 13, 23, 33, 43), (3,), (13,), (23,), (33,), (43,)
        ]  # fmt: skip
        assert sorted({*book.ok, 13}) == list(range(50))
        assert fleet.checkpoint("0") == 49


async def test_event_is_parked_before_the_watermark_passes_it() -> None:
    """While it cannot be parked its key waits, and no other."""
    parked: list[int] = []
    is_open = asyncio.Event()

    async def park(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        if not is_open.is_set():
            raise OSError("no room")
        parked.append(event.sequence_number)

    book = _Book(_fails_on(13, 14))
    async with stocked(100) as fleet:
        await _start(fleet, _Keyed(book), failure_policy=Park(park))
        await asyncio.sleep(20)
        assert len(book.ok) == 100 - len(range(13, 100, KEYS)) - len(range(14, 100, KEYS))
        assert fleet.checkpoint("0") == 12
        is_open.set()
        await asyncio.sleep(40)
        assert sorted(parked) == [13, 14]
        assert len(fleet.reported("a", EventParked)) == 2
        assert fleet.checkpoint("0") == 99


async def test_stop_partition_leaves_it_with_the_watermark_stored() -> None:
    """What runs beside the event that fails is finished; the next attempt begins after the watermark."""
    is_bad = True

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(0.1 if events[0].sequence_number % 2 else 0.5)
        if is_bad and events[0].sequence_number == 13:
            raise ValueError("poison")

    book = _Book(handle)
    async with stocked(100) as fleet:
        await _start(fleet, _Keyed(book, concurrency=5), failure_policy="stop_partition")
        await asyncio.sleep(5)
        assert len(fleet.reported("a", PartitionFailed)) == 1
        assert book.closed == [CloseReason.FAILED]
        assert sorted(set(book.numbers) - set(book.ok)) == [13]
        end = min(set(range(100)) - set(book.ok))
        assert fleet.checkpoint("0") == end - 1
        is_bad, first = False, len(book.calls)
        await asyncio.sleep(60)
        assert book.calls[first] == (end,)
        assert fleet.checkpoint("0") == 99
        assert set(book.ok) == set(range(100))


async def test_stop_ends_the_host_with_the_error() -> None:
    """As of any processor."""
    book = _Book(_fails_on(5))
    async with stocked(20) as fleet:
        await _start(fleet, _Keyed(book), failure_policy="stop")
        with pytest.raises(ProcessorFailedError) as caught:
            await fleet.runs["a"]
        assert isinstance(caught.value.__cause__, ValueError)
        assert fleet.checkpoint("0") == 4


async def test_handler_that_takes_too_long_is_cancelled_alone() -> None:
    """`handler_timeout` is for each call; a call that swallows its cancellation and returns has processed its event."""
    cancelled: list[int] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        number = events[0].sequence_number
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling(), "the cancellation of a call before is not this one's"
        try:
            await asyncio.sleep({3: 1e6, 4: 1e6, 5: 7}.get(number, 4))
        except asyncio.CancelledError:
            cancelled.append(number)
            if number == 3:
                raise

    book = _Book(handle)
    async with stocked(30) as fleet:
        await _start(fleet, _Keyed(book), failure_policy="skip", handler_timeout=5, on_handler_timeout="cancel")
        await asyncio.sleep(60)
        assert sorted(cancelled) == [3, 4, 5]
        assert [each.sequence_number for each in fleet.reported("a", EventSkipped)] == [3]
        assert len(fleet.reported("a", HandlerSlow)) == 3
        assert sorted({*book.ok, 3}) == list(range(30))
        assert fleet.checkpoint("0") == 29


async def test_key_function_that_raises_is_a_failure_of_its_event() -> None:
    """Whatever it raises, also a key that cannot be hashed; the others are processed, and the handler not called."""

    def key(event: ReceivedEvent) -> Any:
        match event.sequence_number:
            case 3:
                raise ValueError("no key")
            case 5:
                raise _Oddity("odd")
            case 7:
                return ["not", "hashable"]
        return 1

    seen: list[int] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        seen.extend(event.sequence_number for event in events)

    async with stocked(10) as fleet:
        await _start(fleet, KeyedProcessor(handle, key=key))
        await asyncio.sleep(10)
        assert seen == [0, 1, 2, 4, 6, 8, 9]
        assert sorted(each.sequence_number or 0 for each in fleet.reported("a", EventSkipped)) == [3, 5, 7]
        assert fleet.checkpoint("0") == 9


async def test_what_follows_an_event_whose_key_is_not_known_waits_for_it() -> None:
    """A retry asks for the key again. Then the event has its place in the order of its key; those before go on."""
    unknown, gate = {13, 16}, asyncio.Event()

    def key(event: ReceivedEvent) -> int:
        if event.sequence_number in unknown:
            raise _Oddity("not now")
        return _key(event)

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(0.01)
        if events[0].sequence_number == 3:
            await gate.wait()

    book = _Book(handle)
    async with stocked(100) as fleet:
        retry = RetryOptions(max_retries=20, base_delay=10, max_delay=10)
        await _start(fleet, _Keyed(book, key=key), handler_retry=retry)
        await fleet.until(lambda: len(book.errors) == 3, 60)
        assert sorted(book.numbers) == list(range(13))
        unknown.remove(13)
        await fleet.until(lambda: 15 in book.ok, 30)
        await asyncio.sleep(10)
        # 13 waits for 3, and all that follows waits for 16.
        assert sorted(book.numbers) == [*range(13), 14, 15]
        await fleet.until(lambda: bool(fleet.reported("a", EventSkipped)), 300)
        await asyncio.sleep(1)
        assert [each.sequence_number for each in fleet.reported("a", EventSkipped)] == [16]
        assert sorted(book.ok) == [number for number in range(100) if number % KEYS != 3 and number != 16]
        gate.set()
        await asyncio.sleep(1)
        assert book.of_key(3) == list(range(3, 100, KEYS))
        assert book.of_key(6) == [number for number in range(6, 100, KEYS) if number != 16]
        assert fleet.checkpoint("0") == 99


@pytest.mark.parametrize("count", [1, 7, 250])
async def test_handlers_that_wait_now_and_then_keep_the_order_and_the_watermark(count: int) -> None:
    """What is called without a wait is not sorted; as soon as a handler waits, it is, and others run meanwhile."""
    rng = random.Random(count)
    slow = set(rng.sample(range(1000), count))

    async def handle(context: PartitionContext, events: Events) -> None:
        (number,) = (event.sequence_number for event in events)
        if number in slow:
            await asyncio.sleep(rng.choice((0, 0.1, 5)))
        if number % 97 == 0 and book.numbers.count(number) < 2:
            raise ValueError("not now")
        with contextlib.suppress(ConfigurationError):  # it is above the watermark
            await context.checkpoint(events[-1])
        finished = {*book.ok}
        stored = fleet.checkpoint("0")
        assert stored is None or finished.issuperset(range(stored + 1))

    book = _Book(handle)
    async with stocked(1000) as fleet:
        await _start(fleet, _Keyed(book, concurrency=8))
        await fleet.until(lambda: len(book.ok) == 1000, 2000)
        for key in range(KEYS):
            assert [number for number in book.ok if number % KEYS == key] == list(range(key, 1000, KEYS))
        assert len(book.calls) == 1000 + math.ceil(1000 / 97)
        await fleet.until(lambda: fleet.checkpoint("0") == 999, 5)


async def test_worker_that_other_code_cancels_between_calls_ends_the_pump_and_no_more() -> None:
    """As for the task of a pump: it is reported, the partition is tried again, and nothing is lost."""
    book = _Book(_fails_on(13))
    async with stocked(50) as fleet:
        retry = RetryOptions(max_retries=1, base_delay=30, max_delay=30)
        await _start(fleet, _Keyed(book), handler_retry=retry)
        await fleet.until(lambda: len(book.ok) > 40, 5, step=0.01)
        assert fleet.checkpoint("0") == 12
        for task in asyncio.all_tasks():
            if task.get_name() == "eventpump worker":
                task.cancel()
        await asyncio.sleep(1)
        assert len(fleet.reported("a", PartitionFailed)) == 1
        assert fleet.reported("a", UnexpectedFailure) == []
        assert fleet.checkpoint("0") == 12
        await asyncio.sleep(150)
        assert fleet.checkpoint("0") == 49


# --------------------------------------------------------------------------------------------------- checkpoints


async def test_checkpoint_in_a_handler_stores_the_watermark() -> None:
    """Without an event the watermark, also after calls of the same step; an event above it is refused by name."""
    refused: list[str] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        (event,) = events
        if event.sequence_number == 0:
            await asyncio.sleep(100)
        if event.sequence_number == 20:
            await context.checkpoint()
            with pytest.raises(ConfigurationError) as caught:
                await context.checkpoint(event)
            refused.append(str(caught.value))

    async with stocked(21) as fleet:
        await _start(
            fleet, KeyedProcessor(handle, key=_key), checkpoint_policy=CheckpointPolicy.manual(), max_batch_size=7
        )
        await asyncio.sleep(200)
        (text,) = refused
        assert "KeyedProcessor" in text
        assert fleet.checkpoint("0") == 19


async def test_close_finishes_what_runs_and_stores_the_watermark() -> None:
    """What has not begun is left to the next owner, which begins after the watermark."""

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(1 + events[0].sequence_number % 3)

    book = _Book(handle)
    async with stocked(100) as fleet:
        host = await _start(fleet, _Keyed(book, concurrency=4), checkpoint_policy=CheckpointPolicy())
        await asyncio.sleep(10.5)
        await host.aclose()
        assert book.running == 0
        assert sorted(book.numbers) == sorted(book.ok)
        done = set(book.ok)
        end = next(number for number in range(101) if number not in done)
        assert fleet.checkpoint("0") == end - 1
        begun = len(book.calls)
        await _start(fleet, _Keyed(book, concurrency=4), "b")
        await fleet.until(lambda: set(book.ok) == set(range(100)), 300)
        assert min(min(call) for call in book.calls[begun:]) == end


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_close_cancels_what_does_not_return(is_deaf: bool) -> None:
    """Within the close time-out, as with any processor; the watermark stays before it."""

    async def handle(context: PartitionContext, events: Events) -> None:
        until = asyncio.get_running_loop().time() + (40 if is_deaf else 1e6)
        while events[0].sequence_number == 13 and asyncio.get_running_loop().time() < until:
            try:
                await asyncio.sleep(1e6 if not is_deaf else 1)
            except asyncio.CancelledError:
                if not is_deaf:
                    raise

    book = _Book(handle)
    async with stocked(100) as fleet:
        host = await _start(fleet, _Keyed(book), checkpoint_policy=CheckpointPolicy(), close_timeout=8)
        await asyncio.sleep(5)
        began = asyncio.get_running_loop().time()
        await host.aclose()
        assert asyncio.get_running_loop().time() - began <= 8 + 4
        assert fleet.checkpoint("0") == (None if is_deaf else 12)
        await asyncio.sleep(60)


async def test_steal_stops_calls_and_the_new_owner_begins_after_the_watermark() -> None:
    """Nothing is lost, and what comes again lies above the checkpoint."""
    books = {"a": _Book(_brief), "b": _Book(_brief)}
    async with stocked(400, partitions=4) as fleet:
        await _start(fleet, KeyedProcessor(books["a"].handle, key=_key, concurrency=2))
        await asyncio.sleep(0.3)
        await _start(fleet, KeyedProcessor(books["b"].handle, key=_key, concurrency=2), "b")
        await asyncio.sleep(60)
        assert books["b"].calls
        for each in fleet.hub.partition_ids:
            assert fleet.checkpoint(each) == 399


async def test_no_call_begins_after_the_lease_has_run_out() -> None:
    """Not even in the step of the loop in which it did, before any timer of the manager."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)

    levels: defaultdict[int, list[int]] = defaultdict(list)

    async def handle(context: PartitionContext, events: Events) -> None:
        levels[context.owner_level].append(events[0].sequence_number)
        if events[0].sequence_number == 5 and len(levels) == 1:
            loop.advance(40)

    async with stocked(50) as fleet:
        await _start(fleet, KeyedProcessor(handle, key=_key))
        await fleet.until(lambda: fleet.checkpoint("0") == 49, 120)
        assert levels[1] == list(range(6))


async def test_what_was_received_before_a_gap_is_processed_before_the_end_is_sought() -> None:
    """With `on_data_loss="latest"` the checkpoint is set to the end: what is in hand would never come again."""

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(1)

    book = _Book(handle)
    async with stocked(100) as fleet:
        processor = _Keyed(book, concurrency=2, max_events_in_flight=10)
        await _start(fleet, processor, on_data_loss="latest", prefetch_events=10, max_batch_size=5)
        await asyncio.sleep(2.5)
        fleet.hub.truncate("0", 80)
        fleet.hub.detach("0")
        await fleet.until(lambda: bool(fleet.reported("a", DataLost)), 120)
        (lost,) = fleet.reported("a", DataLost)
        assert lost.loss.first_missing > 10
        assert set(book.ok) == set(range(lost.loss.first_missing))


# ------------------------------------------------------------------------------------- seek, replay, pause, drain


async def test_seek_lets_what_runs_end_and_drops_the_rest() -> None:
    """A key that is being retried is left at once; from the new position everything comes, in order per key."""
    book = _Book(_fails_on(13))
    async with stocked(100) as fleet:
        retry = RetryOptions(max_retries=5, base_delay=100, max_delay=100)
        host = await _start(fleet, _Keyed(book), handler_retry=retry)
        await asyncio.sleep(5)
        assert fleet.checkpoint("0") == 12
        begun = len(book.calls)
        assert await host.seek("default", 49) == ("0",)
        await asyncio.sleep(5)
        assert sorted(number for call in book.calls[begun:] for number in call) == list(range(50, 100))
        assert fleet.checkpoint("0") == 99


async def test_context_seek_of_a_handler_begins_no_further_call_before_it() -> None:
    """After the calls that run, the next one is of the new position."""
    book = _Book()

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number == 10 and len(book.calls) < 50:
            context.seek(89)

    book.step = handle
    async with stocked(100) as fleet:
        await _start(fleet, _Keyed(book))
        await asyncio.sleep(5)
        assert sorted(book.numbers) == [*range(11), *range(90, 100)]


async def test_replay_waits_for_what_is_in_hand_and_changes_no_checkpoint() -> None:
    """Exactly the range comes again, and it returns when all of it is processed."""
    book = _Book(_brief)
    async with stocked(100) as fleet:
        host = await _start(fleet, _Keyed(book, concurrency=2))
        assert await host.replay("default", from_=20, to=59) == ()
        await asyncio.sleep(0.2)
        replaying = asyncio.create_task(host.replay("default", from_=20, to=59))
        await asyncio.sleep(0)
        assert await replaying == ("0",)
        assert sorted(book.ok) == sorted([*range(100), *range(20, 60)])
        await asyncio.sleep(1)
        assert fleet.checkpoint("0") == 99


async def test_replay_that_has_no_room_goes_on_while_others_wait_for_its_end() -> None:
    """A second replay and a drain wait for the first one, and neither keeps the event loop busy meanwhile."""
    book = _Book(_brief)
    async with stocked(100) as fleet:
        host = await _start(fleet, _Keyed(book, concurrency=2, max_events_in_flight=2))
        await asyncio.sleep(60)
        assert fleet.checkpoint("0") == 99
        begun = len(book.ok)
        first, second = (asyncio.create_task(host.replay("default", from_=low, to=low + 30)) for low in (10, 50))
        draining = asyncio.create_task(host.drain("default"))
        assert [await each for each in (first, second, draining)] == [("0",)] * 3
        assert sorted(book.ok[begun : begun + 31]) == list(range(10, 41))
        assert sorted(book.ok[begun + 31 :]) == list(range(50, 81))


async def test_pause_begins_no_call_and_resume_goes_on_with_what_is_in_hand() -> None:
    """Also for keys that are being retried or parked; nothing is lost or repeated."""
    book = _Book(_fails_on(13, 14))
    async with stocked(200) as fleet:
        retry = RetryOptions(max_retries=2, base_delay=1, max_delay=1)
        host = await _start(fleet, _Keyed(book, concurrency=3), handler_retry=retry)
        await asyncio.sleep(0.1)
        host.pause("default")
        await asyncio.sleep(1)
        begun = len(book.calls)
        assert 0 < begun < 200
        await asyncio.sleep(50)
        assert len(book.calls) == begun
        host.resume("default")
        await asyncio.sleep(50)
        assert book.of_key(3) == [3, 13, 13, 13, *range(23, 200, KEYS)]
        assert sorted(book.ok) == [number for number in range(200) if number not in (13, 14)]
        assert fleet.checkpoint("0") == 199


async def test_drain_waits_for_the_watermark() -> None:
    """Not for the newest event alone."""

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(20 if events[0].sequence_number == 3 else 0)

    book = _Book(handle)
    async with stocked(50) as fleet:
        host = await _start(fleet, _Keyed(book))
        await asyncio.sleep(1)
        assert 49 in book.ok
        assert await host.drain("default") == ("0",)
        assert sorted(book.ok) == list(range(50))


# ------------------------------------------------------------------------------------------------------- options


async def _nothing(context: PartitionContext, events: Events) -> None:
    pass


def _check_refused(make: Callable[[], object], option: str, *parts: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert caught.value.field == option
    for part in parts:
        assert part in str(caught.value)


async def test_retries_without_a_limit_are_refused() -> None:
    """Of an instance and a class when the host or the subscription is made; of a factory when it is called."""

    class Endless(KeyedProcessor):
        def __init__(self) -> None:
            super().__init__(_nothing)

    async with stocked(0) as fleet:
        for processor in (KeyedProcessor(_nothing), Endless):
            _check_refused(lambda: fleet.host("a", processor), "handler_retry", "max_retries", "failure_policy")  # noqa: B023 - called at once
        host = fleet.host("a", NO_PROCESSOR)
        with pytest.raises(ConfigurationError, match="handler_retry"):
            await host.subscribe("orders", KeyedProcessor(_nothing))
        await host.subscribe("orders", KeyedProcessor(_nothing), failure_policy="skip")
        fleet.host("b", KeyedProcessor(_nothing), handler_retry=TWICE)
        await fleet.start("c", lambda: KeyedProcessor(_nothing))
        with pytest.raises(ConfigurationError, match="handler_retry"):
            await fleet.runs["c"]


async def test_bad_options_are_refused() -> None:
    """With the name of the option."""
    _check_refused(lambda: KeyedProcessor(None), "handler")  # type: ignore[arg-type]  # on purpose
    _check_refused(lambda: KeyedProcessor(_nothing, key="name"), "key")  # type: ignore[arg-type]  # on purpose
    _check_refused(lambda: KeyedProcessor(_nothing, concurrency=0), "concurrency")
    _check_refused(lambda: KeyedProcessor(_nothing, max_batch_per_key=0), "max_batch_per_key")
    _check_refused(lambda: KeyedProcessor(_nothing, max_bytes_in_flight=0), "max_bytes_in_flight")
    _check_refused(lambda: KeyedProcessor(_nothing, max_events_in_flight=31), "max_events_in_flight", "32")
    _check_refused(lambda: KeyedProcessor(_nothing, concurrency=9, max_ahead=8), "max_ahead", "9")
    async with stocked(0) as fleet:
        _check_refused(
            lambda: fleet.host("a", KeyedProcessor(_nothing), handler_retry=TWICE, call_when_idle=True),
            "call_when_idle",
        )


async def test_subscriptions_of_both_kinds_share_a_link() -> None:
    """Each with its own checkpoints."""
    book = _Book(_brief)
    async with stocked(100) as fleet:
        host = fleet.host("a", handler_retry=TWICE, checkpoint_policy=EACH)
        await host.subscribe("keyed", _Keyed(book), start="earliest", catch_up="shared")
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(10)
        assert sorted(book.ok) == list(range(100))
        assert fleet.record.numbers("0") == list(range(100))
        stored = fleet.leases.checkpoints(fleet.scope)
        assert {key[1].split(".")[0]: each.sequence_number for key, each in stored.items()} == {
            "default": 99,
            "keyed": 99,
        }


# ------------------------------------------------------------------------------------------------------ streams


EVEN: dict[str, Any] = {"filter": lambda event: event.sequence_number % 2 == 0, "start": "earliest"}


async def _stream(fleet: Fleet, processor: KeyedProcessor, **options: Any) -> Any:
    """Start a host with a subscription to a part of the events."""
    host = fleet.host("a", NO_PROCESSOR, handler_retry=TWICE, on_retries_exhausted="skip")
    await host.subscribe("part", processor, **{"catch_up": "shared", "checkpoint_policy": EACH, **EVEN, **options})
    fleet.runs["a"] = asyncio.create_task(host.run())
    return host


def _stored(fleet: Fleet) -> int | None:
    """Return the checkpoint of the subscription."""
    return next((each.sequence_number for each in fleet.leases.checkpoints(fleet.scope).values()), None)


async def test_checkpoint_of_a_stream_passes_what_does_not_match_once_what_does_is_finished() -> None:
    """Also what came while the last event was being processed, and without any event that matches after it."""
    gate = asyncio.Event()

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number == 40:
            await gate.wait()

    book = _Book(handle)
    async with stocked(60) as fleet:
        await _stream(fleet, _Keyed(book), filter=lambda event: event.sequence_number in {0, 10, 40, 42})
        await asyncio.sleep(5)
        assert sorted(book.ok) == [0, 10, 42]
        assert _stored(fleet) == 10
        fleet.hub.publish("0", count=20)
        await asyncio.sleep(5)
        assert _stored(fleet) == 10
        gate.set()
        await asyncio.sleep(1)
        assert _stored(fleet) == 79
        fleet.hub.publish("0", count=20)
        await asyncio.sleep(1)
        assert _stored(fleet) == 99


async def test_checkpoints_of_a_stream_are_due_by_the_events_that_the_watermark_passes() -> None:
    """Of `every_events`: what lies between those that match counts, and what was only taken does not."""

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(1)

    async with stocked(100) as fleet:
        written: list[int] = []
        policy = CheckpointPolicy(every_events=20)
        await _stream(fleet, KeyedProcessor(handle, key=lambda _: 1), checkpoint_policy=policy)
        while len(written) < 4:
            await asyncio.sleep(0.1)
            stored = _stored(fleet)
            if stored is not None and stored not in written:
                written.append(stored)
        assert written == [20, 40, 60, 80]


async def test_drain_of_a_stream_waits_for_the_watermark() -> None:
    """And returns although the newest event does not match; an event that is taken later does not end it."""

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(20 if events[0].sequence_number == 4 else 0)

    book = _Book(handle)
    async with stocked(50) as fleet:
        host = await _stream(fleet, _Keyed(book))
        await asyncio.sleep(1)
        draining = asyncio.create_task(host.drain("part"))
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(5)
        assert 52 in book.ok
        assert not draining.done()
        assert await draining == ("0",)
        assert sorted(book.ok) == list(range(0, 53, 2))
        await host.drain("part")
        assert _stored(fleet) == 52


async def test_event_whose_filter_failed_is_asked_again_and_holds_up_its_key_alone() -> None:
    """It is delivered in the order of its key, by itself; one that then does not match is passed over."""
    fails = {13: 2, 24: 1, 26: 9}

    def matches(event: ReceivedEvent) -> bool:
        if fails.get(event.sequence_number, 0):
            fails[event.sequence_number] -= 1
            raise _Oddity("not now")
        return event.sequence_number % 2 == 0

    book = _Book(_brief)
    async with stocked(100) as fleet:
        await _stream(
            fleet,
            _Keyed(book, max_batch_per_key=4, concurrency=2),
            filter=matches,
            handler_retry=RetryOptions(max_retries=2, base_delay=100, max_delay=100),
        )
        await asyncio.sleep(1)
        assert sorted(number for number in book.ok if number % KEYS not in (4, 6)) == [
            number for number in range(0, 100, 2) if number % KEYS not in (4, 6)
        ]
        assert book.of_key(4) == [4, 14]
        assert _stored(fleet) == 12
        await asyncio.sleep(600)
        assert book.of_key(4) == list(range(4, 100, KEYS))
        assert book.of_key(6) == [number for number in range(6, 100, KEYS) if number != 26]
        assert (24,) in book.calls
        assert [each.sequence_number for each in fleet.reported("a", EventSkipped)] == [26]
        assert {each.operation for each in fleet.reported("a", ProcessorFailed)} == {"filter"}
        assert _stored(fleet) == 99


async def test_key_that_fails_for_an_event_in_doubt_fails_after_its_filter() -> None:
    """Both failures are those of the event alone."""
    fails = [24]

    def matches(event: ReceivedEvent) -> bool:
        if event.sequence_number in fails:
            fails.clear()
            raise ValueError("not now")
        return event.sequence_number % 2 == 0

    def key(event: ReceivedEvent) -> int:
        if event.sequence_number in (24, 36):
            raise ValueError("no key")
        return _key(event)

    book = _Book()
    async with stocked(50) as fleet:
        await _stream(fleet, _Keyed(book, key=key), filter=matches)
        await asyncio.sleep(20)
        assert sorted(book.ok) == [number for number in range(0, 50, 2) if number not in (24, 36)]
        assert {each.sequence_number for each in fleet.reported("a", EventSkipped)} == {24, 36}
        assert [each.operation for each in fleet.reported("a", ProcessorFailed)].count("filter") == 1
        assert _stored(fleet) == 49


async def test_replay_and_pause_of_a_stream() -> None:
    """A replay delivers what matches of its range once more, and returns when all of it is processed."""
    book = _Book(_brief)
    async with stocked(100) as fleet:
        host = await _stream(fleet, _Keyed(book, concurrency=2))
        await asyncio.sleep(0.05)
        host.pause("part")
        await asyncio.sleep(1)
        begun = len(book.calls)
        await asyncio.sleep(10)
        assert 0 < len(book.calls) == begun < 50
        assert _stored(fleet) == max(book.ok)
        host.resume("part")
        assert await host.replay("part", from_=20, to=59) == ("0",)
        assert sorted(book.ok) == sorted([*range(0, 100, 2), *range(20, 60, 2)])
        await asyncio.sleep(1)
        assert _stored(fleet) == 99


async def test_seek_of_a_stream_drops_what_has_not_begun() -> None:
    """From the new position comes what matches, and the checkpoint follows."""
    book = _Book(_fails_on(14))
    async with stocked(100) as fleet:
        retry = RetryOptions(max_retries=5, base_delay=100, max_delay=100)
        host = await _stream(fleet, _Keyed(book), handler_retry=retry)
        await asyncio.sleep(5)
        assert _stored(fleet) == 12
        begun = len(book.calls)
        assert await host.seek("part", 49) == ("0",)
        await asyncio.sleep(5)
        assert sorted(number for call in book.calls[begun:] for number in call) == list(range(50, 100, 2))
        assert _stored(fleet) == 99
