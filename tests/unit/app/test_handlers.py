"""Functions as processors: what is called with what, and what is called again after a failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from eventpump.app.handlers import Handler, ResultDestination, RoutedFunction, RouteProcessor
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import ConfigurationError, DecodeError
from eventpump.eventhubs.decoding import PAYLOADS
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import Park
from eventpump.reports import EventSkipped, HandlerSlow, ProcessorFailed
from eventpump.testing.transport import FakeHub
from tests.support.fleet import Fleet
from tests.support.seeds import seeds

EACH = CheckpointPolicy(every_events=1)


class Reading(BaseModel):
    device: str


async def _any(value: Any) -> None:
    pass


async def _unannotated(value) -> None:  # type: ignore[no-untyped-def]  # that is the point
    pass


async def _two(first: bytes, second: str) -> None:
    pass


async def _many(*values: bytes) -> None:
    pass


async def _named(**values: bytes) -> None:
    pass


async def _nothing(context: PartitionContext) -> None:
    pass


async def _unknown(value: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821 - that is the point
    pass


async def _undecodable(value: asyncio.Task) -> None:  # type: ignore[type-arg]  # that is the point
    pass


def _plain(value: bytes) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (_plain, "must be a coroutine function"),
        (_unannotated, "parameter value without an annotation"),
        (_two, "two parameters for the payload, first and second"),
        (_many, "name each parameter"),
        (_named, "name each parameter"),
        (_nothing, "takes no event"),
        (_unknown, "cannot be resolved"),
        (_undecodable, "no event can be decoded as Task"),
    ],
)
def test_signatures_that_cannot_be_called_are_refused(function: Any, problem: str) -> None:
    """When the function is decorated, with its name."""
    with pytest.raises(ConfigurationError, match=problem):
        Handler(function, PAYLOADS)


def _event(body: bytes, number: int = 0) -> ReceivedEvent:
    from datetime import UTC, datetime

    return ReceivedEvent.build(
        body, offset=str(number), sequence_number=number, enqueued_time=datetime(2026, 1, 1, tzinfo=UTC)
    )


async def test_parameters_are_filled_by_their_types() -> None:
    """In any order, by position and by name; one with a default and no annotation keeps its default."""
    context: Any = object()
    event = _event(b'{"device": "a"}')

    async def all_kinds(one: PartitionContext, /, two: Reading, three=5, *, four: ReceivedEvent) -> Any:  # type: ignore[no-untyped-def]  # that is the point
        return one, two.device, three, four

    assert await Handler(all_kinds, PAYLOADS)(context, event) == (context, "a", 5, event)

    async def only_the_event(event: ReceivedEvent) -> Any:
        return event

    assert await Handler(only_the_event, PAYLOADS)(context, event) is event


class _Producer:
    """Stores what is sent, or refuses it; each is known only later."""

    def __init__(self, refuses: Callable[[bytes], bool] = lambda body: False, *, seconds: float = 0.1) -> None:
        self._seconds = seconds
        self.stored: list[bytes] = []
        self._refuses = refuses

    async def send(self, event: EventData, *, partition_key: str | None = None) -> asyncio.Future[None]:
        return asyncio.ensure_future(self._store(event.body))

    async def _store(self, body: bytes) -> None:
        await asyncio.sleep(self._seconds)
        if self._refuses(body):
            raise ConnectionError("refused")
        self.stored.append(body)


def _fleet(count: int) -> Fleet:
    fleet = Fleet(FakeHub(partitions=1))
    fleet.hub.publish("0", *(str(number) for number in range(count)))
    return fleet


def _route(function: Any, producer: _Producer | None = None) -> RoutedFunction:
    return RoutedFunction(
        Handler(function, PAYLOADS), [] if producer is None else [ResultDestination("out", producer=producer)]
    )


async def test_event_is_processed_when_what_it_led_to_is_stored() -> None:
    """The checkpoint is written after that."""
    producer = _Producer()

    async def double(number: int) -> int:
        return number * 2

    async with _fleet(3) as fleet:
        await fleet.start("a", partial(RouteProcessor, _route(double, producer)), checkpoint_policy=EACH)
        await asyncio.sleep(0.09)
        assert (producer.stored, fleet.checkpoint("0")) == ([], None)
        await asyncio.sleep(1)
        assert (sorted(producer.stored), fleet.checkpoint("0")) == ([b"0", b"2", b"4"], 2)


@pytest.mark.parametrize("is_keyed", [False, True])
async def test_event_is_not_processed_before_its_result_is_stored(is_keyed: bool) -> None:
    """A policy, a checkpoint in the function, and one of its event move nothing while its result is open."""
    producer, asked = _Producer(lambda body: body == b"2", seconds=1.0), 0

    async def ask(event: ReceivedEvent, context: PartitionContext) -> bytes:
        nonlocal asked
        await context.checkpoint()
        with pytest.raises(ConfigurationError, match="not every event up to"):
            await context.checkpoint(event)
        asked += 1
        return event.body

    route = _route(ask, producer)
    async with _fleet(4) as fleet:
        await fleet.start(
            "a",
            KeyedProcessor(route.handle_keyed, key=lambda event: None) if is_keyed else partial(RouteProcessor, route),
            checkpoint_policy=EACH,
            handler_retry=RetryOptions(max_retries=100, base_delay=0.1, max_delay=0.1),
        )
        await fleet.until(lambda: asked == 4, 1)
        assert (producer.stored, fleet.checkpoint("0")) == ([], None)
        # The result of event 2 is refused: no checkpoint passes it.
        await asyncio.sleep(5)
        assert (sorted(producer.stored), fleet.checkpoint("0")) == ([b"0", b"1", b"3"], 1)


async def test_checkpoint_in_a_function_covers_results_that_are_stored() -> None:
    """Of the events before it in its batch, also when asked for by a task; what fails then is not handled again."""
    producer, calls = _Producer(seconds=0.5), list[int]()
    covered: dict[int, int | None] = {}

    async def handle(number: int, context: PartitionContext) -> str:
        calls.append(number)
        await asyncio.sleep(1.0)
        await asyncio.create_task(context.checkpoint())
        covered[number] = fleet.checkpoint("0")
        if number == 3 and calls.count(3) == 1:
            raise ValueError("once")
        return str(number)

    async with _fleet(6) as fleet:
        await fleet.start(
            "a",
            partial(RouteProcessor, _route(handle, producer)),
            checkpoint_policy=CheckpointPolicy.manual(),
            handler_retry=RetryOptions(max_retries=None, base_delay=0.1, max_delay=0.1),
        )
        await fleet.until(lambda: len(covered) == 6 and len(producer.stored) == 6, 20)
    assert calls == [0, 1, 2, 3, 3, 4, 5]
    assert covered == {0: None, 1: 0, 2: 1, 3: 2, 4: 3, 5: 4}


@pytest.mark.parametrize("reason", ["a time-out", "a park", "a close"])
async def test_what_is_stored_of_a_batch_counts_though_the_batch_ends_otherwise(reason: str) -> None:
    """After a time-out, in the function that parks, and after a close that cancels: never what is not stored."""
    producer, parked = _Producer(seconds=0.1), list[tuple[int, int | None]]()

    async def handle(number: int) -> str:
        await asyncio.sleep(0.2 if number < 3 or parked else 1000)
        return str(number)

    async def park(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        await context.checkpoint()
        with pytest.raises(ConfigurationError):
            await context.checkpoint(event)
        parked.append((event.sequence_number, fleet.checkpoint("0")))

    async with _fleet(6) as fleet:
        host = await fleet.start(
            "a",
            partial(RouteProcessor, _route(handle, producer)),
            checkpoint_policy=CheckpointPolicy(on_close=True),
            handler_timeout=1000.0 if reason == "a close" else 5.0,
            on_handler_timeout="cancel",
            failure_policy=Park(park) if reason == "a park" else "retry",
            close_timeout=2.0,
        )
        await asyncio.sleep(20)
        assert len(producer.stored) == (5 if reason == "a park" else 3)
        assert parked == ([(3, 2)] if reason == "a park" else [])
        await host.aclose()
    assert fleet.checkpoint("0") == (5 if reason == "a park" else 2)


async def test_result_that_fails_meanwhile_holds_the_checkpoint() -> None:
    """Its outcome is known, and it is not stored: nothing passes its event until it is handled again."""
    refusals = [b"1"]
    producer = _Producer(lambda body: body in refusals, seconds=0.5)
    covered: dict[int, int | None] = {}

    async def handle(number: int, context: PartitionContext) -> str:
        await asyncio.sleep(1.0)
        await context.checkpoint()
        covered[number] = fleet.checkpoint("0")
        if number == 4:
            refusals.clear()
        return str(number)

    async with _fleet(5) as fleet:
        await fleet.start("a", partial(RouteProcessor, _route(handle, producer)), checkpoint_policy=EACH)
        await fleet.until(lambda: covered.get(4) is not None, 10)
        assert covered == {0: None, 1: 0, 2: 0, 3: 0, 4: 0}
        await fleet.until(lambda: fleet.checkpoint("0") == 4, 10)
    assert sorted(producer.stored) == [b"0", b"1", b"2", b"3", b"4"]


async def test_replay_ahead_of_a_function_moves_no_checkpoint() -> None:
    """Though a part of its batch is finished, and asked for."""
    handled, covered, begun = list[int](), list[int | None](), asyncio.Event()

    async def handle(number: int, context: PartitionContext) -> None:
        if not handled:
            begun.set()
            await asyncio.sleep(1)
        await context.checkpoint()
        handled.append(number)
        covered.append(fleet.checkpoint("0"))

    async with _fleet(10) as fleet:
        policy = CheckpointPolicy.manual()
        host = await fleet.start(
            "a", partial(RouteProcessor, _route(handle)), checkpoint_policy=policy, max_batch_size=5
        )
        await begun.wait()
        await host.replay("default", from_=6, to=9)
        await fleet.until(lambda: len(handled) == 14, 20)
        assert handled == [0, 1, 2, 3, 4, 6, 7, 8, 9, 5, 6, 7, 8, 9]
        assert covered == [None, 0, 1, 2, 3, 3, 3, 3, 3, 4, 5, 6, 7, 8]


async def test_decode_error_is_not_retried() -> None:
    """Though retries have no limit: `on_retries_exhausted` applies at once, to that event only."""
    seen: list[int] = []

    async def take(number: int) -> None:
        seen.append(number)

    async with Fleet(FakeHub(partitions=1)) as fleet:
        fleet.hub.publish("0", "0", "x", "2")
        await fleet.start(
            "a", partial(RouteProcessor, _route(take)), on_retries_exhausted="skip", checkpoint_policy=EACH
        )
        await asyncio.sleep(1)
        assert seen == [0, 2]
        (skipped,) = fleet.reported("a", EventSkipped)
        assert isinstance(skipped.error, DecodeError)
        assert len(fleet.reported("a", ProcessorFailed)) == 2  # in its batch, and alone
        assert fleet.checkpoint("0") == 2


@pytest.mark.parametrize("publishes", [False, True])
@pytest.mark.parametrize("policy", ["report", "cancel"])
async def test_time_of_a_call_is_that_of_each_event(policy: str, publishes: bool) -> None:
    """However many there are in a batch; and of the wait until what they have published is stored."""
    handled: list[int] = []

    async def handle(number: int) -> str | None:
        await asyncio.sleep(0.9)
        handled.append(number)
        return str(number) if publishes else None

    producer = _Producer(seconds=0.9)
    async with _fleet(20) as fleet:
        await fleet.start(
            "a",
            partial(RouteProcessor, _route(handle, producer)),
            checkpoint_policy=EACH,
            handler_timeout=1.0,
            on_handler_timeout=policy,
        )
        await fleet.until(lambda: fleet.checkpoint("0") == 19, 60)
        assert not fleet.reported("a", HandlerSlow)
        assert not fleet.reported("a", ProcessorFailed)
    assert handled == list(range(20))
    assert sorted(map(int, producer.stored)) == (handled if publishes else [])


@pytest.mark.parametrize("publishes", [False, True])
async def test_event_that_takes_longer_than_a_call_may_is_cancelled(publishes: bool) -> None:
    """`on_handler_timeout="cancel"`: what was handled before is not handled again, nor published again."""
    handled: list[int] = []
    begun: list[tuple[int, float]] = []

    async def handle(number: int) -> str | None:
        begun.append((number, asyncio.get_running_loop().time()))
        await asyncio.sleep(5 if number == 7 and len(begun) < 9 else 0.6)
        handled.append(number)
        return str(number) if publishes else None

    producer = _Producer()
    async with _fleet(20) as fleet:
        await fleet.start(
            "a",
            partial(RouteProcessor, _route(handle, producer)),
            checkpoint_policy=EACH,
            handler_timeout=1.0,
            on_handler_timeout="cancel",
            handler_retry=RetryOptions(max_retries=None, base_delay=0.1, max_delay=0.1),
        )
        await fleet.until(lambda: fleet.checkpoint("0") == 19, 60)
        assert len(fleet.reported("a", ProcessorFailed)) == 1
    assert handled == list(range(20))
    assert [number for number, _ in begun] == [*range(8), *range(7, 20)]
    assert 1.0 <= begun[8][1] - begun[7][1] < 1.3
    assert sorted(map(int, producer.stored)) == (handled if publishes else [])


@seeds(4, of=12)
async def test_random_failures_lose_nothing_and_repeat_little(seed: int) -> None:
    """Functions and the service fail now and then: all is published in order, and no event twice without a failure.

    An event that was handled, and published, is not handled again because another one of its batch fails.
    """
    rng = random.Random(seed)
    handled: list[int] = []
    done: set[int] = set()

    async def handle(number: int) -> str:
        assert number not in done, f"{number} is handled again"
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random())
        match rng.randrange(30):
            case 0:
                raise ValueError("sometimes")
            case 1:
                raise KeyError("now and then")
        handled.append(number)
        return str(number)

    class Recording(_Producer):
        async def _store(self, body: bytes) -> None:
            await super()._store(body)
            done.add(int(body))

    producer = Recording(lambda body: rng.random() < 0.03)
    async with _fleet(200) as fleet:
        await fleet.start(
            "a",
            partial(RouteProcessor, _route(handle, producer)),
            checkpoint_policy=EACH,
            max_batch_size=rng.choice((1, 7, 300)),
            handler_retry=RetryOptions(max_retries=None, base_delay=0.1, max_delay=0.2),
        )
        await fleet.until(lambda: fleet.checkpoint("0") == 199, 3000)
        assert sorted(map(int, producer.stored)) == list(range(200))
