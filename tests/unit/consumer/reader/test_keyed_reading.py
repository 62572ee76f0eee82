"""`HubReader.run`: a keyed processor without leases; its position is the watermark."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import CloseReason, EventProcessor, PartitionContext
from eventpump.consumer.reader.reader import HubReader
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    DataLossError,
    DecodeError,
    EntityNotFoundError,
    EventError,
)
from eventpump.eventhubs.codecs import PayloadCodec
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import ReaderSettings
from eventpump.producer.producer import HubProducer
from eventpump.sources.memory import MemorySource
from eventpump.sources.transport import SourceTransport
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.inside import number_at

Events = Sequence[ReceivedEvent]
Step = Callable[[ReceivedEvent], Awaitable[None]]
KEYS = 10
TWICE = RetryOptions(max_retries=1, base_delay=0.1, max_delay=0.1)


class _Oddity(BaseException):
    """Not an `Exception`."""


def _key(event: ReceivedEvent) -> int:
    return event.sequence_number % KEYS


class _Book(KeyedProcessor):
    """Writes down what it is called with, and checks that calls of a key neither overlap nor go back."""

    def __init__(self, step: Step | None = None, **options: Any) -> None:
        super().__init__(self._handle, **{"key": _key, **options})
        self.step = step
        self.begun: list[int] = []
        self.ok: list[int] = []
        self.errors: list[Exception] = []
        self.calls: list[object] = []
        self.running = self.most = 0
        self.context: PartitionContext | None = None
        self._busy: set[int] = set()

    async def open(self, context: PartitionContext) -> None:
        self.context = context
        self.calls.append("open")

    async def process_error(self, context: PartitionContext, error: Exception) -> None:
        self.errors.append(error)

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        assert not self.running
        self.calls.append(reason)

    async def _handle(self, context: PartitionContext, events: Events) -> None:
        (key,) = {_key(event) for event in events}
        assert key not in self._busy
        self._busy.add(key)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for event in events:
                self.begun.append(event.sequence_number)
                if self.step is not None:
                    await self.step(event)
                self.ok.append(event.sequence_number)
        finally:
            self.running -= 1
            self._busy.discard(key)

    def of_key(self, key: int) -> list[int]:
        return [number for number in self.ok if number % KEYS == key]


def _hub(count: int = 0) -> FakeHub:
    hub = FakeHub()
    hub.publish("0", count=count)
    return hub


def _reader(hub: FakeHub, /, **options: Any) -> HubReader:
    settings = ReaderSettings(**{"hub": hub.name, "partition_id": "0", **options})
    return HubReader(lambda: FakeTransport(hub), settings, rng=random.Random(1))


def _number_at(hub: FakeHub, reader: HubReader) -> int:
    """Return the number of the event that a new reader at the position of another one would get first."""
    return number_at(hub, "0", reader.position)


async def _brief(event: ReceivedEvent) -> None:
    await asyncio.sleep(0.01)


async def test_range_is_processed_to_its_end_with_keys_at_the_same_time() -> None:
    """Each key in order, several at a time; `run` returns when all is processed, and the processor is closed."""
    rng = random.Random(1)

    async def step(event: ReceivedEvent) -> None:
        await asyncio.sleep(rng.choice((0.0, 0.01, 1.0)))

    hub, book = _hub(500), _Book(step, concurrency=6)
    async with _reader(hub, end="@latest") as reader:
        await reader.run(book)
        assert [book.of_key(key) for key in range(KEYS)] == [list(range(key, 500, KEYS)) for key in range(KEYS)]
        assert book.most == 6
        assert book.calls == ["open", CloseReason.SHUTDOWN]
        assert reader.is_at_end
        assert _number_at(hub, reader) == 500
        assert await reader.read() == []


async def test_position_is_the_watermark_while_it_runs() -> None:
    """It never passes an event that is not processed, and passes all that are below it."""
    gate = asyncio.Event()

    async def step(event: ReceivedEvent) -> None:
        if event.sequence_number == 13:
            await gate.wait()

    hub, book = _hub(100), _Book(step)
    async with _reader(hub) as reader:
        running = asyncio.create_task(reader.run(book))
        await asyncio.sleep(5)
        assert len(book.ok) == 100 - len(range(13, 100, KEYS))
        assert _number_at(hub, reader) == 13
        gate.set()
        await asyncio.sleep(1)
        assert _number_at(hub, reader) == 100
        hub.publish("0", count=5)
        await asyncio.sleep(1)
        assert _number_at(hub, reader) == 105
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert book.calls[-1] is CloseReason.SHUTDOWN


@pytest.mark.parametrize("error", [ValueError("poison"), _Oddity("odd"), asyncio.CancelledError("own")])
async def test_error_of_the_handler_ends_it_and_nothing_is_lost(error: BaseException) -> None:
    """Running calls end, none begins; the next `run` goes on with what is not processed, each once and in order."""
    fails = [error]

    async def step(event: ReceivedEvent) -> None:
        await asyncio.sleep(0.5 if event.sequence_number % 2 else 1)
        if event.sequence_number == 13 and fails:
            raise fails.pop()

    hub, book = _hub(100), _Book(step, concurrency=4)
    async with _reader(hub, end="@latest") as reader:
        with pytest.raises(ValueError if isinstance(error, ValueError) else RuntimeError) as caught:
            await reader.run(book)
        assert caught.value is error or caught.value.__cause__ is error
        assert book.errors == [caught.value]
        assert book.calls[-1] is CloseReason.FAILED
        assert sorted(book.begun) == sorted([*book.ok, 13])
        end = next(number for number in range(101) if number not in book.ok)
        assert _number_at(hub, reader) == end
        assert not reader.is_at_end
        await reader.run(book)
        assert sorted(book.ok) == list(range(100))
        assert [book.of_key(key) for key in range(KEYS)] == [list(range(key, 100, KEYS)) for key in range(KEYS)]
        assert _number_at(hub, reader) == 100
        assert reader.is_at_end


async def test_reading_goes_on_with_what_a_failed_run_has_left() -> None:
    """`read` returns it first, as many as asked for, and then what follows; the position goes along."""

    async def step(event: ReceivedEvent) -> None:
        if event.sequence_number in (3, 5):
            await asyncio.sleep(1e6)
        if event.sequence_number == 49:
            raise ValueError("poison")

    hub, book = _hub(60), _Book(step, max_events_in_flight=50)
    async with _reader(hub) as reader:
        with pytest.raises(ValueError, match="poison"):
            await reader.run(book, close_timeout=2)
        left = [number for number in range(60) if number not in book.ok]
        assert left[:2] == [3, 5]
        assert _number_at(hub, reader) == 3
        assert [event.sequence_number for event in await reader.read(1)] == [3]
        assert _number_at(hub, reader) == 4
        got = [event.sequence_number for event in await reader.read(1000)]
        while got[-1] < 59:
            got += [event.sequence_number for event in await reader.read(1000)]
        assert got == left[1:]
        assert _number_at(hub, reader) == 60


async def test_retries_hold_up_no_other_key_and_end_at_their_limit() -> None:
    """Later events of the key wait; what succeeds in time fails nothing."""
    fails = {13: 2, 24: 9}

    async def step(event: ReceivedEvent) -> None:
        if fails.get(event.sequence_number, 0) and (event.sequence_number == 13 or not fails[13]):
            fails[event.sequence_number] -= 1
            raise ValueError(f"{event.sequence_number} is poison")

    hub, book = _hub(100), _Book(step, concurrency=2)
    async with _reader(hub, end="@latest") as reader:
        retry = RetryOptions(max_retries=2, base_delay=100, max_delay=100)
        running = asyncio.create_task(reader.run(book, handler_retry=retry))
        await asyncio.sleep(1)
        assert sorted(book.ok) == [number for number in range(100) if number not in range(13, 100, KEYS)]
        await running
        assert book.of_key(3) == list(range(3, 100, KEYS))
        assert len(book.errors) == 2

    hub, again = _hub(100), _Book(step, concurrency=2)
    async with _reader(hub, end="@latest") as reader:
        with pytest.raises(ValueError, match="24 is poison"):
            await reader.run(again, handler_retry=retry)
        assert again.begun.count(24) == 3
        assert _number_at(hub, reader) == 24


async def test_retries_after_a_fixed_delay() -> None:
    """`mode="fixed"`: each delay is `base_delay`, also where that is above `max_delay`."""
    loop, begun = asyncio.get_running_loop(), []

    async def step(event: ReceivedEvent) -> None:
        begun.append(loop.time())
        raise ValueError("no")

    hub = _hub(1)
    async with _reader(hub, end="@latest") as reader:
        retry = RetryOptions(max_retries=3, base_delay=100, max_delay=60, mode="fixed")
        with pytest.raises(ValueError, match="no"):
            await reader.run(_Book(step), handler_retry=retry)
    assert [round(later - before) for before, later in itertools.pairwise(begun)] == [100, 100, 100]


@pytest.mark.parametrize("is_by_key", [False, True])
async def test_what_cannot_be_decoded_is_not_retried(is_by_key: bool) -> None:
    """As by a host: another attempt cannot help. The event is not lost."""
    codec = PayloadCodec("deflate", zlib.compress, zlib.decompress)
    hub = _hub()
    async with HubProducer(FakeTransport(hub), hub.name) as producer:
        await producer.send(EventData(b"broken", content_encoding="deflate"), partition_id="0")

    async def step(event: ReceivedEvent) -> None:
        _ = event.body

    book = _Book(step, **({"key": lambda event: event.body} if is_by_key else {}))
    async with _reader(hub, end="@latest", decode=codec) as reader:
        with pytest.raises(DecodeError):
            await reader.run(book, handler_retry=TWICE)
        (left,) = await reader.read(1)
    assert len(book.errors) == 1
    assert left.sequence_number == 0


async def test_key_that_cannot_be_had_is_a_failure_of_its_event() -> None:
    """The handler is not called with it, nor with what follows, which may be of the same key; those before end."""
    fails = [7]

    def key(event: ReceivedEvent) -> Any:
        if event.sequence_number in fails:
            raise _Oddity("no key")
        return _key(event)

    hub, book = _hub(20), _Book(_brief, key=key)
    async with _reader(hub, end="@latest") as reader:
        with pytest.raises(RuntimeError, match="no key"):
            await reader.run(book, handler_retry=TWICE)
        assert sorted(book.ok) == list(range(7))
        assert len(book.errors) == 2
        assert _number_at(hub, reader) == 7
        fails.clear()
        await reader.run(book)
        assert sorted(book.ok) == list(range(20))


async def test_key_that_is_found_by_a_retry_keeps_the_order() -> None:
    """Its event comes behind those before it, and before those after it; what the handler raises counts from zero."""
    fails = [17]

    def key(event: ReceivedEvent) -> Any:
        if event.sequence_number in fails:
            fails.pop()
            raise _Oddity("not now")
        return _key(event)

    async def step(event: ReceivedEvent) -> None:
        await asyncio.sleep(60 if event.sequence_number == 7 else 0.01)
        if event.sequence_number == 17 and book.begun.count(17) < 2:
            raise ValueError("not now")

    hub, book = _hub(40), _Book(step, key=key)
    async with _reader(hub, end="@latest") as reader:
        await reader.run(book, handler_retry=TWICE)
    assert [number for number in book.begun if number % 10 == 7] == [7, 17, 17, 27, 37]
    assert sorted(book.ok) == list(range(40))


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_cancellation_cancels_what_runs_and_waits_for_it(is_deaf: bool) -> None:
    """A handler that swallows it is waited for, and its event counts as processed; nothing is lost or repeated."""

    async def step(event: ReceivedEvent) -> None:
        if event.sequence_number == 13 and 13 not in book.begun[:-1]:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                if not is_deaf:
                    raise
                await asyncio.sleep(5)

    hub, book = _hub(50), _Book(step)
    async with _reader(hub, end="@latest") as reader:
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await reader.run(book)
        assert asyncio.get_running_loop().time() - began == pytest.approx(8 if is_deaf else 3, abs=0.1)
        assert not book.running
        assert _number_at(hub, reader) == (23 if is_deaf else 13)
        await reader.run(book)
        assert sorted(book.ok) == list(range(50))


async def test_second_cancellation_leaves_a_deaf_handler_to_itself() -> None:
    """Its event is not processed as far as is known: the next `run` gets it."""
    is_deaf = asyncio.Event()

    async def step(event: ReceivedEvent) -> None:
        while event.sequence_number == 3 and not is_deaf.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await is_deaf.wait()

    hub = _hub(20)
    processor = KeyedProcessor(lambda context, events: step(events[0]), key=_key)
    async with _reader(hub, end="@latest") as reader:
        running = asyncio.create_task(reader.run(processor))
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.sleep(1)
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert _number_at(hub, reader) == 3
        is_deaf.set()
        await reader.run(processor)
        assert _number_at(hub, reader) == 20


async def test_link_that_fails_for_good_ends_it_when_the_rest_is_processed() -> None:
    """What came before is processed first; then the error is raised."""
    hub, book = _hub(50), _Book(_brief, concurrency=2)
    async with _reader(hub, link_retry=RetryOptions(max_retries=0)) as reader:
        running = asyncio.create_task(reader.run(book))
        await asyncio.sleep(0.05)
        hub.refuse(EntityNotFoundError("gone"), times=float("inf"))
        hub.detach("0", EntityNotFoundError("gone"))
        with pytest.raises(EntityNotFoundError):
            await running
        assert sorted(book.ok) == list(range(50))
        assert book.calls[-1] is CloseReason.FAILED
        assert _number_at(hub, reader) == 50


async def test_lost_events_are_reported_after_what_came_before_them() -> None:
    """With `on_data_loss="fail"` the error comes when that is processed; its position is before the gap."""
    hub, book = _hub(100), _Book(_brief, concurrency=1, max_events_in_flight=10)
    async with _reader(hub, on_data_loss="fail", prefetch_events=10) as reader:
        running = asyncio.create_task(reader.run(book))
        await asyncio.sleep(0.055)
        hub.truncate("0", 80)
        hub.detach("0")
        with pytest.raises(DataLossError) as caught:
            await running
        first = caught.value.first_missing
        assert first is not None
        assert sorted(book.ok) == list(range(first))


async def test_bounds_hold_and_a_slow_key_holds_up_others_only_at_max_ahead() -> None:
    """Events, bytes and `max_ahead`, as of a host."""
    gate = asyncio.Event()

    async def step(event: ReceivedEvent) -> None:
        if event.sequence_number == 3:
            await gate.wait()

    hub, book = _hub(500), _Book(step, concurrency=4, max_ahead=100, max_events_in_flight=50, max_bytes_in_flight=900)
    async with _reader(hub, end="@latest") as reader:
        running = asyncio.create_task(reader.run(book))
        await asyncio.sleep(5)
        assert _number_at(hub, reader) == 3
        assert 20 < len(book.ok) <= 100
        assert max(book.ok) <= 102
        gate.set()
        await running
        assert sorted(book.ok) == list(range(500))


async def test_bytes_in_flight_are_bounded() -> None:
    """As many events as fit are processed at a time; one that is larger by itself is processed alone."""
    hub, book = _hub(), _Book(_brief, max_bytes_in_flight=4000)
    hub.publish("0", *(b"x" * 1000 for _ in range(20)), b"y" * 10_000, *(b"x" * 1000 for _ in range(20)))
    async with _reader(hub, end="@latest") as reader:
        await reader.run(book)
        assert sorted(book.ok) == list(range(41))
        assert book.most == 3


async def test_what_two_failed_runs_have_left_comes_in_order() -> None:
    """Also if the second one had not read all that the first one had left."""
    fails = {3, 27}

    async def step(event: ReceivedEvent) -> None:
        await asyncio.sleep(0.01)
        if event.sequence_number in fails:
            fails.discard(event.sequence_number)
            raise ValueError("poison")

    hub = _hub(100)
    books = _Book(step, concurrency=2), _Book(step, concurrency=2, max_events_in_flight=2), _Book(step)
    async with _reader(hub, end="@latest") as reader:
        for book in books[:2]:
            with pytest.raises(ValueError, match="poison"):
                await reader.run(book)
        assert _number_at(hub, reader) == 27
        await reader.run(books[2])
    ok = [number for book in books for number in book.ok]
    assert sorted(ok) == list(range(100))
    for key in range(KEYS):
        assert [number for number in ok if number % KEYS == key] == list(range(key, 100, KEYS))


async def test_source_is_processed_to_its_end() -> None:
    """As a hub, with the number and the place of each event."""
    source = MemorySource()
    source.append("0", *(str(number) for number in range(100)))
    source.end()
    settings = ReaderSettings(hub=source.hub, partition_id="0")
    book = _Book(_brief)
    async with HubReader(lambda: SourceTransport(source, keeps_ended=False), settings) as reader:
        await reader.run(book)
        assert sorted(book.ok) == list(range(100))
        assert reader.is_at_end


async def test_context_is_of_the_partition_and_refuses_what_a_reader_has_not() -> None:
    """Names and lag are right; checkpoints and seeks raise, with what to do."""
    hub, book = _hub(10), _Book(_brief)
    async with _reader(hub, end="@latest", receiver_name="me", track_last_enqueued=True) as reader:
        await reader.run(book)
        context = book.context
        assert context is not None
        names = context.hub, context.consumer_group, context.partition_id, context.owner_id, context.owner_level
        assert names == (hub.name, "$Default", "0", "me", 0)
        assert context.fully_qualified_namespace == hub.fully_qualified_namespace
        assert context.lag == 0
        assert context.last_delivered is not None
        with pytest.raises(ConfigurationError, match=r"reader\.position"):
            await context.checkpoint()
        with pytest.raises(ConfigurationError, match="cannot seek"):
            context.seek("earliest")


async def test_events_that_cannot_be_decoded_are_processed_as_any_other() -> None:
    """By default they have no key."""
    hub = _hub(7)
    hub.partition("0").raw[3] = b"\x00\x53\x75\xa1\x01x"
    seen: list[object] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        (event,) = events
        try:
            seen.append(event.body_as_str() and event.sequence_number)
        except EventError:
            seen.append("undecodable")

    async with _reader(hub, end="@latest") as reader:
        await reader.run(KeyedProcessor(handle))
    assert sorted(map(str, seen)) == ["0", "1", "2", "4", "5", "6", "undecodable"]


async def test_misuse_is_refused_with_a_clear_error() -> None:
    """And changes nothing."""

    class Plain(EventProcessor):
        async def process_events(self, context: PartitionContext, events: Events) -> None:
            pass

    hub, book = _hub(10), _Book()
    reader = _reader(hub)
    with pytest.raises(ClosedError):
        await reader.run(book)
    async with reader:
        given: Any
        for given in (Plain(), Plain, _Book, None):
            with pytest.raises(ConfigurationError, match=r"must be a KeyedProcessor.*async for"):
                await reader.run(given)
        with pytest.raises(ConfigurationError, match=r"handler_retry.*must have a limit"):
            await reader.run(book, handler_retry=RetryOptions(max_retries=None))
        with pytest.raises(ConfigurationError, match="close_timeout"):
            await reader.run(book, close_timeout=-1)
        running = asyncio.create_task(reader.run(book))
        await asyncio.sleep(1)
        for work in (reader.read(), reader.run(book)):
            with pytest.raises(ConfigurationError, match="is reading this reader"):
                await work
        assert sorted(book.ok) == list(range(10))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_open_and_close_that_raise_lose_nothing() -> None:
    """Their error is raised; what is not processed comes with the next `run`."""

    class Moody(_Book):
        async def open(self, context: PartitionContext) -> None:
            await super().open(context)
            if len(self.calls) == 1:
                raise ValueError("open")

        async def close(self, context: PartitionContext, reason: CloseReason) -> None:
            await super().close(context, reason)
            if len(self.calls) == 3:
                raise ValueError("close")

    hub, book = _hub(10), Moody(_brief)
    async with _reader(hub, end="@latest") as reader:
        with pytest.raises(ValueError, match="open"):
            await reader.run(book)
        with pytest.raises(ValueError, match="close"):
            await reader.run(book)
        await reader.run(book)
        assert sorted(book.ok) == list(range(10))
