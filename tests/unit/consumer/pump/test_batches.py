"""Loops over the batches of a host: what is acknowledged, and what is delivered again."""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from contextlib import aclosing, suppress
from typing import Any

import pytest

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.pump.batches import BatchIterator, ReceivedBatch
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import AuthenticationError, ClosedError, ConfigurationError, OwnershipLostError, StoreError
from eventpump.options.consumer import Park
from eventpump.reports import BatchNotTaken, HandlerSlow, ProcessorFailed, UnexpectedFailure
from tests.support.fleet import NO_PROCESSOR, Fleet, stocked
from tests.support.seeds import seeds

EACH = CheckpointPolicy(every_events=1)


def _host(fleet: Fleet, name: str = "a", **options: Any) -> HubHost:
    return fleet.host(name, NO_PROCESSOR, **{"checkpoint_policy": EACH, "max_batch_size": 10, **options})


def _numbers(batch: ReceivedBatch) -> list[int]:
    return [event.sequence_number for event in batch.events]


async def _take(batches: BatchIterator, count: int) -> list[list[int]]:
    async with asyncio.timeout(300):  # a batch that never comes is a failure, and no wait forever
        return [_numbers(await anext(batches)) for _ in range(count)]


# ----------------------------------------------------------------------------------------------------------- a loop


async def test_loop_gets_every_batch_in_order_and_starts_the_host() -> None:
    """Nothing but the loop is needed; asking for the next batch acknowledges the one before."""
    async with stocked(35) as fleet:
        host = _host(fleet)
        seen: list[int] = []
        async for batch in host.batches():
            assert batch.context.partition_id == "0"
            assert batch.context.last_delivered is batch.events[-1]
            assert fleet.checkpoint("0") in {None, len(seen) - 1, len(seen) - 11}
            seen += _numbers(batch)
            if len(seen) == 35:
                host.stop()
        assert seen == list(range(35))
        assert fleet.checkpoint("0") == 34
        assert host.is_closed
        assert not fleet.reported("a", ProcessorFailed)


async def test_partition_waits_until_the_loop_asks_for_its_next_batch() -> None:
    """No second batch, and no checkpoint, while the first one is in hand; `checkpoint` stores, and releases nothing."""
    async with stocked(30) as fleet:
        host = _host(fleet)
        first, other = host.batches(), host.batches()
        batch = await anext(first)
        waiting = asyncio.create_task(_take(other, 1))
        await asyncio.sleep(5)
        assert fleet.checkpoint("0") is None
        await batch.checkpoint()
        assert fleet.checkpoint("0") == 9
        await asyncio.sleep(5)
        assert not waiting.done()
        await first.aclose()
        assert await waiting == [list(range(10, 20))]


async def test_default_policy_applies_to_what_is_acknowledged() -> None:
    """Five seconds after the acknowledgement the checkpoint is written, and not for the batch in hand."""
    async with stocked(20) as fleet:
        batches = _host(fleet, checkpoint_policy=CheckpointPolicy.automatic()).batches()
        await _take(batches, 2)
        await asyncio.sleep(4.9)
        assert fleet.checkpoint("0") is None
        await asyncio.sleep(0.2)
        assert fleet.checkpoint("0") == 9
        await batches.aclose()


async def test_slow_loop_is_reported_from_when_it_has_the_batch() -> None:
    """`handler_timeout` does not count while a batch waits for a loop."""
    async with stocked(20, partitions=2) as fleet:
        batches = _host(fleet, handler_timeout=60).batches()
        batch = await anext(batches)
        await asyncio.sleep(59)
        assert not fleet.reported("a", HandlerSlow)
        await asyncio.sleep(2)
        assert [each.partition_id for each in fleet.reported("a", HandlerSlow)] == [batch.context.partition_id]
        await anext(batches)  # the other one, which has waited for a minute
        await asyncio.sleep(59)
        assert len(fleet.reported("a", HandlerSlow)) == 1
        await batches.aclose()


# -------------------------------------------------------------------------------------------------- left, in any way


async def test_break_gives_the_batch_to_the_next_loop() -> None:
    """What was acknowledged before is not delivered again, and the batch in hand is."""
    async with stocked(30) as fleet:
        host = _host(fleet)
        async for batch in host.batches():
            if _numbers(batch)[0] == 10:
                break
        assert _numbers(batch) == list(range(10, 20))
        again = host.batches()
        assert await _take(again, 2) == [list(range(10, 20)), list(range(20, 30))]
        await asyncio.sleep(1)
        assert fleet.checkpoint("0") == 19
        await again.aclose()


class _Oddity(BaseException):
    """Not an `Exception`."""


@pytest.mark.parametrize("raised", [ValueError("body"), _Oddity("body"), asyncio.CancelledError()])
async def test_exception_in_the_body_ends_the_loop_only(raised: BaseException) -> None:
    """It is the program's own: no failure is reported, and the events come again."""
    async with stocked(10) as fleet:
        host = _host(fleet)

        async def loop() -> None:
            async for _ in host.batches():
                raise raised

        with pytest.raises(type(raised)):
            await loop()
        again = host.batches()
        assert await _take(again, 1) == [list(range(10))]
        assert not fleet.reported("a", ProcessorFailed)
        await again.aclose()


async def test_cancelled_loop_gives_its_batch_back() -> None:
    """In its body, and while it waits; the other loop gets the events."""
    async with stocked(10) as fleet:
        host = _host(fleet)
        has = asyncio.Event()

        async def loop() -> None:
            async for _ in host.batches():
                has.set()
                await asyncio.sleep(1000)

        task = asyncio.create_task(loop())
        await has.wait()
        idle = asyncio.create_task(loop())
        await asyncio.sleep(1)
        for each in (task, idle):
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each
        again = host.batches()
        assert await _take(again, 1) == [list(range(10))]
        await again.aclose()


async def test_loop_cancelled_in_the_turn_of_its_batch_loses_none() -> None:
    """It is cancelled at any turn of the event loop, the one in which it is woken too: another loop gets the batch."""
    cancelled = []
    for turns in range(60):
        async with stocked() as fleet:
            host = _host(fleet)
            both = [asyncio.create_task(_take(host.batches(), 1)) for _ in range(2)]
            await asyncio.sleep(1)
            fleet.hub.publish("0", count=1)
            for _ in range(turns):
                await asyncio.sleep(0)
            both[0].cancel()
            await asyncio.wait(both[:1])
            if both[0].cancelled():
                assert await both[1] == [[0]]
            else:
                both[1].cancel()
                await asyncio.wait(both[1:])
            cancelled.append(both[0].cancelled())
    assert cancelled[0]
    assert not cancelled[-1]


async def test_failed_task_gives_its_batch_back_though_it_keeps_the_iterator() -> None:
    """Its exception refers to its frame, and so to the iterator, for as long as the task is kept."""
    async with stocked(10) as fleet:
        host = _host(fleet)

        async def loop() -> None:
            batches = host.batches()
            async for _ in batches:
                raise ValueError("body")

        task = asyncio.create_task(loop())
        await asyncio.wait({task})
        again = host.batches()
        assert await _take(again, 1) == [list(range(10))]
        assert isinstance(task.exception(), ValueError)
        await again.aclose()


async def test_second_loop_over_one_object_begins_with_the_batch_that_was_left() -> None:
    """Entering a loop acknowledges nothing."""
    async with stocked(20) as fleet:
        batches = _host(fleet).batches()
        async for _ in batches:
            break
        async for batch in batches:
            assert _numbers(batch) == list(range(10))
            break
        await batches.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(batches)


async def test_what_a_checkpoint_covers_is_not_delivered_again() -> None:
    """Neither after `break` nor in part of a batch."""
    async with stocked(20) as fleet:
        host = _host(fleet)
        async for batch in host.batches():
            await batch.checkpoint(batch.events[3])
            break
        async for batch in host.batches():
            assert _numbers(batch) == list(range(4, 10))
            await batch.checkpoint()
            break
        assert fleet.checkpoint("0") == 9
        again = host.batches()
        assert await _take(again, 1) == [list(range(10, 20))]
        await again.aclose()


async def test_what_was_left_is_not_in_the_last_checkpoint() -> None:
    """Closing after `break` stores what was acknowledged, at once, and the next host begins there."""
    async with stocked(30) as fleet:
        host = _host(fleet, checkpoint_policy=CheckpointPolicy.automatic())
        async for batch in host.batches():
            if _numbers(batch)[0] == 10:
                break
        began = asyncio.get_running_loop().time()
        await host.aclose()
        assert asyncio.get_running_loop().time() - began < 1
        assert fleet.checkpoint("0") == 9
        other = _host(fleet, "b").batches()
        assert await _take(other, 1) == [list(range(10, 20))]
        await other.aclose()


async def test_closing_does_not_wait_for_loops_that_there_are_not() -> None:
    """Batches that wait for a loop are withdrawn at once."""
    async with stocked(10, partitions=2) as fleet:
        host = _host(fleet)
        async for _ in host.batches():
            break
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        await host.aclose()
        assert asyncio.get_running_loop().time() - began < 1
        assert not fleet.reported("a", ProcessorFailed)


@pytest.mark.parametrize("waits", ["wait_for", "task", "timeout", "default"])
async def test_closing_in_the_body_does_not_wait_for_the_body(waits: str) -> None:
    """However the batch was waited for: `asyncio.wait_for` has a task of its own before Python 3.12."""
    async with stocked(30) as fleet:
        host = _host(fleet)
        batches = host.batches()
        match waits:
            case "wait_for":
                batch = await asyncio.wait_for(anext(batches), 60)
            case "task":
                batch = await asyncio.create_task(anext(batches))
            case "timeout":
                async with asyncio.timeout(60):
                    batch = await anext(batches)
            case _:
                batch = await asyncio.wait_for(anext(batches, None), 60)  # type: ignore[arg-type]  # any awaitable
        assert _numbers(batch) == list(range(10))
        began = asyncio.get_running_loop().time()
        await host.aclose()
        assert asyncio.get_running_loop().time() - began < 1
        other = _host(fleet, "b").batches()
        assert await _take(other, 1) == [list(range(10))]
        await other.aclose()


async def test_closing_elsewhere_waits_for_a_loop_whose_batches_come_by_wait_for() -> None:
    """It has its time to acknowledge the batch in hand, though the task that took it has ended."""
    async with stocked(20) as fleet:
        host = _host(fleet)
        has = asyncio.Event()

        async def follow() -> None:
            batches = host.batches()
            with suppress(StopAsyncIteration):
                while True:
                    await asyncio.wait_for(anext(batches), 60)
                    has.set()
                    await asyncio.sleep(5)

        following = asyncio.create_task(follow())
        await has.wait()
        began = asyncio.get_running_loop().time()
        await host.aclose()
        assert 4 < asyncio.get_running_loop().time() - began < 6
        await following
        assert fleet.checkpoint("0") == 9


async def test_loop_that_fails_gives_its_batch_back_though_another_task_took_it() -> None:
    """As any that fails; and a wait that times out takes none."""
    async with stocked(10) as fleet:
        host = _host(fleet)

        async def fail(batches: BatchIterator) -> None:
            await asyncio.wait_for(anext(batches), 60)
            raise ValueError("the body's")

        kept = host.batches()
        with pytest.raises(ValueError, match="the body's"):
            await asyncio.create_task(fail(kept))
        again = host.batches()
        assert await _take(again, 1) == [list(range(10))]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(again), 5)
        await again.aclose()
        assert fleet.checkpoint("0") == 9


@pytest.mark.parametrize("is_handed_on", [True, False])
async def test_task_that_asked_has_the_batch(is_handed_on: bool) -> None:
    """Cancelled, it gives the batch back, though another task processes it; one that only waited for it does not."""
    async with stocked(20) as fleet:
        host = _host(fleet)
        batches = host.batches()
        passed: asyncio.Queue[ReceivedBatch] = asyncio.Queue()

        async def ask() -> None:
            passed.put_nowait(await asyncio.create_task(anext(batches)))
            await asyncio.sleep(math.inf)

        async def wait(asked: asyncio.Task[ReceivedBatch]) -> None:
            passed.put_nowait(await asked)
            await asyncio.sleep(math.inf)

        first = asyncio.create_task(ask() if is_handed_on else wait(asyncio.create_task(anext(batches))))
        batch = await passed.get()
        assert _numbers(batch) == list(range(10))
        other = asyncio.create_task(_take(host.batches(), 1))
        await asyncio.sleep(1)
        assert not other.done()
        first.cancel()
        await asyncio.sleep(1)
        assert other.done() is is_handed_on
        following = asyncio.create_task(_take(batches, 1))  # acknowledges the first batch, where that still counts
        assert await other == [list(range(10) if is_handed_on else range(10, 20))]
        following.cancel()
        await host.aclose()
        assert fleet.checkpoint("0") == (None if is_handed_on else 9)


# -------------------------------------------------------------------------------------------------------- its end


async def test_closing_waits_for_the_batch_in_hand() -> None:
    """The loop ends after its body; the batch is stored, and batches that no loop has are left."""
    async with stocked(20, partitions=2) as fleet:
        host = _host(fleet)
        seen = 0
        async for _ in host.batches():
            seen += 1
            host.stop()
            await asyncio.sleep(3)
        assert seen == 1
        assert sorted([fleet.checkpoint("0") or -1, fleet.checkpoint("1") or -1]) == [-1, 9]
        assert not fleet.reported("a", ProcessorFailed)


async def test_closing_from_the_body_gives_the_batch_back() -> None:
    """It does not wait for itself until the close time-out."""
    async with stocked(10) as fleet:
        host = _host(fleet)
        began = asyncio.get_running_loop().time()
        async for _ in host.batches():
            await host.aclose()
        assert asyncio.get_running_loop().time() - began < 5
        assert fleet.checkpoint("0") is None


async def test_body_that_never_ends_is_given_up_at_the_close_timeout() -> None:
    """Then the host closes without it; asking for the next batch ends the loop, and acknowledges nothing."""
    async with stocked(10) as fleet:
        host = _host(fleet, close_timeout=20)
        batches = host.batches()
        batch = await anext(batches)
        closing = asyncio.create_task(host.aclose())
        await asyncio.sleep(30)
        assert closing.done()
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        with pytest.raises(OwnershipLostError):
            await batch.checkpoint()
        assert fleet.checkpoint("0") is None


async def test_error_of_the_host_is_raised_to_every_loop(caplog: pytest.LogCaptureFixture) -> None:
    """Those that wait, and those that ask later. If none does, it is logged."""
    async with stocked() as fleet:
        host = _host(fleet)
        fleet.hub.refuse(AuthenticationError("no"), operation="hub", times=math.inf)
        loops = [asyncio.create_task(_take(host.batches(), 1)) for _ in range(2)]
        for loop in loops:
            with pytest.raises(AuthenticationError):
                await loop
        assert not caplog.records or all("failed: Auth" not in each.message for each in caplog.records)


async def test_moved_partition_refuses_the_checkpoint_of_its_batch() -> None:
    """As in a handler; the next owner has the events, and the loop goes on."""
    async with stocked(20) as fleet:
        host = _host(fleet)
        batches = host.batches()
        batch = await anext(batches)
        fleet.stores["a"].fail("renew", times=math.inf)
        other = _host(fleet, "b").batches()
        assert await _take(other, 1) == [list(range(10))]
        assert batch.context.ownership_lost.is_set()
        with pytest.raises(OwnershipLostError):
            await batch.checkpoint()
        waiting = asyncio.create_task(_take(batches, 1))  # not an acknowledgement any more
        await asyncio.sleep(1)
        assert fleet.checkpoint("0") is None
        waiting.cancel()
        await other.aclose()


async def test_batch_that_no_loop_takes_is_reported() -> None:
    """After `handler_timeout`, by its numbers, and whenever that has doubled; not once a loop has it."""
    async with stocked(20) as fleet:
        host = _host(fleet, handler_timeout=5.0)
        async for _ in host.batches():
            break
        await asyncio.sleep(22)
        waits = fleet.reported("a", BatchNotTaken)
        assert [round(each.waited) for each in waits] == [5, 10, 20]
        assert waits[0].describe() == "no loop over batches() has taken events 0 to 9 (10) for 5.0 s"
        batches = host.batches()
        await anext(batches)
        await asyncio.sleep(4)
        await anext(batches)
        await asyncio.sleep(100)
        assert fleet.reported("a", BatchNotTaken) == waits
        await host.aclose()


# ----------------------------------------------------------------------------------------------------- what is refused


async def test_what_cannot_work_is_refused_at_the_call() -> None:
    """A processor, options that would have to reach into a body, and a host that was used in another way."""
    async with stocked() as fleet:
        with pytest.raises(ConfigurationError, match="together with batches"):
            fleet.host("a").batches()
        for option in ({"failure_policy": "skip"}, {"failure_policy": Park("other")}, {"on_handler_timeout": "cancel"}):
            with pytest.raises(ConfigurationError, match="batches"):
                _host(fleet, **option).batches()
        host = _host(fleet)
        await host.subscribe("other", _nothing)
        with pytest.raises(ConfigurationError, match="before `subscribe`"):
            host.batches()
        await host.aclose()
        with pytest.raises(ClosedError):
            host.batches()


async def _nothing(context: object, events: object) -> None:
    pass


async def test_one_object_is_one_loop() -> None:
    """Two tasks that share it are refused, instead of acknowledging each other's batches."""
    async with stocked() as fleet:
        batches = _host(fleet).batches()
        waiting = asyncio.create_task(_take(batches, 1))
        await asyncio.sleep(1)
        with pytest.raises(ConfigurationError, match="once for each task"):
            await anext(batches)
        waiting.cancel()


async def test_loops_beside_a_run_of_the_program() -> None:
    """`run` may be called by the program; the loops end with it."""
    async with stocked(10) as fleet:
        host = _host(fleet)
        batches = host.batches()
        running = asyncio.create_task(host.run())
        await asyncio.sleep(0)
        async for batch in batches:
            assert _numbers(batch) == list(range(10))
            host.stop()
        await running
        assert fleet.checkpoint("0") == 9


async def test_pause_and_seek_withdraw_a_batch_that_no_loop_has() -> None:
    """A seek takes effect at once then, and a paused subscription offers nothing."""
    async with stocked(30) as fleet:
        host = _host(fleet)
        batches = host.batches()
        assert await _take(batches, 1) == [list(range(10))]
        await batches.aclose()
        await asyncio.sleep(1)
        assert await host.seek("default", 19) == ("0",)
        host.pause("default")
        await asyncio.sleep(1)
        waiting = asyncio.create_task(_take(host.batches(), 1))
        await asyncio.sleep(10)
        assert not waiting.done()
        host.resume("default")
        assert await waiting == [list(range(20, 30))]


async def test_idle_calls_are_batches_without_events() -> None:
    """Only with `call_when_idle`; one that was left is not offered again."""
    async with stocked() as fleet:
        host = _host(fleet, call_when_idle=True, max_wait_time=10)
        async for batch in host.batches():
            assert list(batch.events) == []
            await batch.checkpoint()
            break
        fleet.hub.publish("0", count=1)
        batches = host.batches()
        assert await _take(batches, 1) == [[0]]
        await batches.aclose()


# ----------------------------------------------------------------------------------------------------- random histories


class _Left(Exception):  # noqa: N818 - not an error of the library
    """A loop that its body leaves."""


class _World:
    """Loops with bodies that misbehave, on hosts that come and go, and a model of what they have acknowledged."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self.fleet = fleet
        self.rng = rng
        self.is_calm = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.acknowledged: defaultdict[str, set[int]] = defaultdict(set)
        """By partition: all that loops have acknowledged, or asked a checkpoint for."""
        self.next: dict[tuple[str, str, int], int] = {}
        """By ownership: where its next batch begins."""
        self.in_hand: dict[tuple[str, str, int], object] = {}
        self.failures: list[BaseException] = []

    def loop(self, host: HubHost) -> None:
        task = asyncio.create_task(self._loop(host))
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, StoreError):
            self.failures.append(error)

    async def _loop(self, host: HubHost) -> None:
        """Loop again and again, until the host is closed."""
        while True:
            try:
                batches = host.batches()
            except ClosedError:
                return
            try:
                if self.rng.random() < 0.5:
                    await self._leave_somehow(batches)
                else:
                    async with aclosing(batches):
                        await self._leave_somehow(batches)
            except (_Left, _Oddity):
                continue
            except asyncio.CancelledError:
                if self.is_calm:
                    raise
                continue
            except ClosedError:
                return

    async def _leave_somehow(self, batches: BatchIterator) -> None:
        async for batch in batches:
            key, numbers = _key(batch), _numbers(batch)
            self._taken(key, batch)
            try:
                await self._body(key, batch)
                if not self.is_calm and self.rng.random() < 0.1:
                    break
            finally:
                if self.in_hand.get(key) is batch:
                    del self.in_hand[key]
            # What follows is that the loop asks for its next batch.
            self.next[key] = numbers[-1] + 1
            self.acknowledged[key[1]].update(numbers)

    def _taken(self, key: tuple[str, str, int], batch: ReceivedBatch) -> None:
        numbers = _numbers(batch)
        assert key not in self.in_hand, f"two loops have a batch of {key}"
        self.in_hand[key] = batch
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        if key in self.next:
            assert numbers[0] == self.next[key], f"{key}: {numbers} after {self.next[key]}"
        else:
            assert numbers[0] <= _prefix(self.acknowledged[key[1]]), f"{key} skips to {numbers[0]}"
        self.next[key] = numbers[0]
        self.check()

    async def _body(self, key: tuple[str, str, int], batch: ReceivedBatch) -> None:
        rng = self.rng
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.5, 0.5, 0.0 if self.is_calm else 40.0)))
        if rng.random() < 0.3:
            event = rng.choice((None, rng.choice(batch.events)))
            last = batch.events[-1] if event is None else event
            covered = [number for number in _numbers(batch) if number <= last.sequence_number]
            self.acknowledged[key[1]].update(covered)
            with suppress(OwnershipLostError):
                await batch.checkpoint(event)
                self.next[key] = max(self.next[key], covered[-1] + 1)
        if self.is_calm:
            return
        match rng.randrange(12):
            case 0:
                raise _Left
            case 1:
                raise _Oddity
            case 2:
                with suppress(asyncio.CancelledError):  # swallows it
                    await asyncio.sleep(10)
            case 3:
                await asyncio.sleep(rng.choice((1.0, 100.0)))

    def check(self) -> None:
        """No stored checkpoint passes what is not acknowledged."""
        for partition_id in self.fleet.hub.partition_ids:
            stored = self.fleet.checkpoint(partition_id)
            assert stored is None or stored < _prefix(self.acknowledged[partition_id]), f"{partition_id}: {stored}"


def _key(batch: ReceivedBatch) -> tuple[str, str, int]:
    """Return the ownership that a batch belongs to."""
    return batch.context.owner_id, batch.context.partition_id, batch.context.owner_level


def _prefix(numbers: set[int]) -> int:
    """Return the first number that is not among them."""
    return next(number for number in range(len(numbers) + 1) if number not in numbers)


@seeds(6, of=400)
async def test_random_histories(seed: int) -> None:
    """Loops are left in every way, partitions move, links and stores fail: nothing is lost, or passed over.

    Of one ownership each batch begins after what was acknowledged of the one before, and one loop at a time has one.
    """
    rng = random.Random(seed)
    options = {
        "checkpoint_policy": rng.choice((EACH, CheckpointPolicy.automatic(), CheckpointPolicy.manual())),
        "max_batch_size": rng.choice((1, 7, 50)),
    }
    async with stocked(rng.randrange(60), partitions=rng.choice((1, 3)), seed=seed) as fleet:
        world = _World(fleet, rng)
        names = iter(f"host-{number}" for number in range(1000))
        published = dict.fromkeys(fleet.hub.partition_ids, fleet.hub.partition("0").next)

        def join() -> None:
            host = _host(fleet, next(names), **options)
            for _ in range(rng.choice((1, 1, 3))):
                world.loop(host)

        join()
        for _ in range(rng.choice((10, 40))):
            await asyncio.sleep(rng.choice((0.0, 0.3, 3.0, 20.0)))
            match rng.randrange(10):
                case 0 | 1 | 2:
                    partition_id = rng.choice(fleet.hub.partition_ids)
                    count = rng.randrange(1, 40)
                    fleet.hub.publish(partition_id, count=count)
                    published[partition_id] += count
                case 3 | 4 | 5 if world.tasks:
                    rng.choice(sorted(world.tasks, key=lambda task: task.get_name())).cancel()
                case 6 if len(open_ := [host for host in fleet.hosts.values() if not host.is_closed]) < 3:
                    join()
                case 7 if len(open_ := [host for host in fleet.hosts.values() if not host.is_closed]) > 1:
                    rng.choice(open_).stop(rng.choice((None, 0.0, 3.0)))
                case 8:
                    name = rng.choice(list(fleet.stores))
                    fleet.stores[name].fail(rng.choice(("renew", "write", "release")), times=rng.choice((1, 5, 40)))
                case 9:
                    fleet.hub.detach(rng.choice(fleet.hub.partition_ids))
            world.check()
            assert not world.failures
        world.is_calm = True
        for task in list(world.tasks):
            task.cancel()
        await asyncio.wait(world.tasks, timeout=1000) if world.tasks else None
        for store in fleet.stores.values():
            store.heal()
        for host in fleet.hosts.values():
            if not host.is_closed:
                world.loop(host)
        if all(host.is_closed for host in fleet.hosts.values()):
            join()
        await fleet.until(
            lambda: all(_prefix(world.acknowledged[each]) == published[each] for each in published), 3000, step=1
        )
        world.check()
        for name, host in fleet.hosts.items():
            assert not fleet.reported(name, UnexpectedFailure)
            host.stop()
        if world.tasks:
            await asyncio.wait(world.tasks)
        world.check()
        assert not world.failures
