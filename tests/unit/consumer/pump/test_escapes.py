"""What leaves user code, hooks or stores and is no `Exception`, and tasks that a stranger cancels."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import pytest

from eventpump.aio.tasks import TaskSet
from eventpump.consumer.processor import CloseReason, EventProcessor, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import ProcessorFailedError, StoreError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import (
    HostReport,
    LeaseLost,
    LeaseReleased,
    PartitionFailed,
    ProcessorFailed,
    PumpClosed,
    PumpStarted,
    StoreFailed,
    UnexpectedFailure,
)
from eventpump.testing.clock import VirtualTimeLoop
from tests.support.fleet import Fleet, RecordingProcessor, stocked
from tests.support.seeds import seeds

Events = Sequence[ReceivedEvent]


class _Odd(BaseException):
    """What some library or user made without much thought."""


async def _nothing(context: PartitionContext, events: Events) -> None:
    pass


def _cancelled_future() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    return future


def _cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def _pump_task(partition_id: str = "0") -> asyncio.Task[Any]:
    (task,) = [each for each in asyncio.all_tasks() if each.get_name() == f"eventpump pump of partition {partition_id}"]
    return task


# What user code may do, once. Each leaves it with something that is no Exception.


async def _raise_odd() -> None:
    raise _Odd("odd")


async def _raise_generator_exit() -> None:
    await asyncio.sleep(1)
    raise GeneratorExit


async def _read_a_cancelled_future() -> None:
    _cancelled_future().result()


async def _await_a_cancelled_future() -> None:
    await _cancelled_future()


async def _cancel_itself() -> None:
    _cancel_this_task()
    await asyncio.sleep(1)


async def _cancel_itself_and_raise() -> None:
    _cancel_this_task()
    raise _Odd("odd")


async def _swallow_a_cancellation_and_read_a_cancelled_future() -> None:
    _cancel_this_task()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(1)
    _cancelled_future().result()


async def _be_cancelled_by_a_stranger() -> None:
    task = _pump_task()
    asyncio.get_running_loop().call_later(1, task.cancel)
    await asyncio.sleep(100)


ESCAPES = [
    _raise_odd,
    _raise_generator_exit,
    _read_a_cancelled_future,
    _await_a_cancelled_future,
    _cancel_itself,
    _cancel_itself_and_raise,
    _swallow_a_cancellation_and_read_a_cancelled_future,
    _be_cancelled_by_a_stranger,
]
_escapes = pytest.mark.parametrize("escape", ESCAPES, ids=lambda escape: escape.__name__.strip("_"))


def _once(escape: Callable[[], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    left = [escape]

    async def step(*_: object) -> None:
        if left:
            await left.pop()()

    return step


def _nothing_is_kept_without_a_pump(fleet: Fleet) -> None:
    """Check that every lease the host holds has a running pump."""
    assert {status.partition_id for status in fleet.hosts["a"].partitions} == set(fleet.hub.partition_ids)
    assert all(status.epoch is not None for status in fleet.hosts["a"].partitions)


@_escapes
async def test_base_exception_from_process_events_follows_the_failure_policy(
    escape: Callable[[], Awaitable[None]],
) -> None:
    """What leaves `process_events` and is no Exception is reported, goes to `process_error`, and is tried again."""
    async with stocked(3) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=_once(escape)))
        await asyncio.sleep(60)
        assert [delivery.numbers for delivery in fleet.record.deliveries] == [(0, 1, 2)] * 2
        assert [(reported.operation, reported.failures) for reported in fleet.reported("a", ProcessorFailed)] == [
            ("process_events", 1)
        ]
        assert len(fleet.record.errors) == 1
        fleet.hub.publish("0", "later")
        await asyncio.sleep(10)
        assert fleet.record.numbers("0")[-1] == 3
        _nothing_is_kept_without_a_pump(fleet)


@_escapes
async def test_base_exception_under_policy_stop_ends_the_host(escape: Callable[[], Awaitable[None]]) -> None:
    """With the policy `stop`, it ends the host with a `ProcessorFailedError`, and the lease is free."""
    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=_once(escape))
        host = fleet.host("a", processor, failure_policy="stop")
        async with asyncio.timeout(300):
            with pytest.raises(ProcessorFailedError, match="process_events"):
                await host.run()
        assert fleet.owner("0") is None
        assert fleet.record.reasons("a", "0") == [CloseReason.FAILED]


@_escapes
async def test_base_exception_from_open_is_tried_again(escape: Callable[[], Awaitable[None]]) -> None:
    """What leaves `open` and is no Exception is reported, and `open` is called again."""
    async with stocked(3) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_open=_once(escape)))
        await asyncio.sleep(60)
        assert len(fleet.record.opened) == 2
        assert fleet.checkpoint("0") == 2
        assert [reported.operation for reported in fleet.reported("a", ProcessorFailed)] == ["open"]
        _nothing_is_kept_without_a_pump(fleet)


@_escapes
async def test_base_exception_from_process_error_is_reported_only(escape: Callable[[], Awaitable[None]]) -> None:
    """What leaves `process_error` and is no Exception is reported, and the batch comes again all the same."""

    async def poison() -> None:
        raise ValueError("poison")

    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=_once(poison), on_error=_once(escape))
        await fleet.start("a", processor)
        await asyncio.sleep(60)
        assert [reported.operation for reported in fleet.reported("a", ProcessorFailed)] == [
            "process_events",
            "process_error",
        ]
        assert [delivery.numbers for delivery in fleet.record.deliveries] == [(0, 1, 2)] * 2
        _nothing_is_kept_without_a_pump(fleet)


@_escapes
async def test_base_exception_from_close_keeps_no_lease(escape: Callable[[], Awaitable[None]]) -> None:
    """What leaves `close` and is no Exception is reported; the last checkpoint is written and the lease released."""
    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=_nothing, on_close=_once(escape))
        await fleet.start("a", processor, checkpoint_policy=CheckpointPolicy())
        await asyncio.sleep(5)
        await fleet.hosts["a"].aclose()
        assert [reported.operation for reported in fleet.reported("a", ProcessorFailed)] == ["close"]
        assert len(fleet.reported("a", PumpClosed)) == 1
        assert fleet.checkpoint("0") == 2
        assert fleet.owner("0") is None


async def test_handler_that_cancels_itself_and_returns_has_processed_its_batch() -> None:
    """A request to cancel its task that the handler did not wait for ends with the handler, and hits nothing else."""

    async def careless(context: PartitionContext, events: Events) -> None:
        _cancel_this_task()

    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=careless)
        await fleet.start("a", processor, checkpoint_policy=CheckpointPolicy(1), max_batch_size=1)
        await asyncio.sleep(60)
        assert fleet.record.numbers("0") == [0, 1, 2]
        assert fleet.checkpoint("0") == 2
        assert fleet.reported("a", ProcessorFailed) == []
        assert fleet.reported("a", PartitionFailed) == []
        _nothing_is_kept_without_a_pump(fleet)


async def test_base_exception_from_the_factory_is_tried_again() -> None:
    """What a processor's factory raises and is no Exception goes by the failure policy as well."""
    failing = [1]

    async with stocked(3) as fleet:

        def make() -> EventProcessor:
            if failing:
                failing.pop()
                raise asyncio.CancelledError
            return RecordingProcessor(fleet.record)

        await fleet.start("a", make)
        await asyncio.sleep(60)
        assert [reported.operation for reported in fleet.reported("a", ProcessorFailed)] == ["open"]
        assert fleet.checkpoint("0") == 2


async def test_idle_pump_cancelled_from_outside_is_reported_and_released() -> None:
    """A pump cancelled while it waits for events closes, reports, gives its lease to others, and comes back later."""
    async with stocked(3) as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        _pump_task().cancel()
        await asyncio.sleep(5)
        (failed,) = fleet.reported("a", PartitionFailed, "0")
        assert failed.avoided_for == 30
        assert fleet.record.reasons("a", "0") == [CloseReason.FAILED]
        assert len(fleet.reported("a", LeaseReleased)) == len(fleet.reported("a", PumpClosed)) == 1
        assert fleet.owner("0") is None
        await asyncio.sleep(60)
        fleet.hub.publish("0", "later")
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == [0, 1, 2, 3]
        _nothing_is_kept_without_a_pump(fleet)


async def test_closing_pump_cancelled_from_outside_releases_its_lease() -> None:
    """A pump cancelled while it writes its last checkpoint is reported, and its lease is released."""
    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=_nothing)
        await fleet.start("a", processor, checkpoint_policy=CheckpointPolicy())
        await asyncio.sleep(5)
        fleet.stores["a"].hang("write")
        fleet.hosts["a"].stop()
        await asyncio.sleep(1)
        _pump_task().cancel()
        await asyncio.sleep(12)
        (failed,) = fleet.reported("a", UnexpectedFailure, "0")
        assert isinstance(failed.error, asyncio.CancelledError)
        assert fleet.owner("0") is None


# ----------------------------------------------------------------------------------------------------- store and hooks


@pytest.mark.parametrize("error", [asyncio.CancelledError(), _Odd("odd")], ids=["cancelled", "odd"])
@pytest.mark.parametrize(
    ("operation", "partition_id"),
    [
        ("open", None),
        ("ensure", None),
        ("list", None),
        ("acquire", "0"),
        ("read", "0"),
        ("write", "0"),
        ("renew", "0"),
        ("release", "0"),
        ("close", None),
    ],
)
async def test_base_exception_from_the_store_is_tried_again(
    operation: str, partition_id: str | None, error: BaseException
) -> None:
    """Whatever call of the store raises `CancelledError` or the like by itself: it is reported, and repeated."""
    async with stocked(3) as fleet:
        host = fleet.host("a")
        fleet.stores["a"].fail(operation, error=error)
        running = asyncio.create_task(host.run())
        await asyncio.sleep(60)
        assert not running.done()
        assert fleet.checkpoint("0") == 2
        assert fleet.reported("a", LeaseLost) == []
        _nothing_is_kept_without_a_pump(fleet)
        await host.aclose()
        await running
        if operation != "close":
            assert len(fleet.reported("a", StoreFailed)) == 1
        assert (fleet.owner("0") is None) == (operation != "release")


@pytest.mark.parametrize("error", [asyncio.CancelledError(), _Odd("odd")], ids=["cancelled", "odd"])
async def test_checkpoint_raises_after_several_failures_of_any_kind(error: BaseException) -> None:
    """`checkpoint()` raises after several failures of any kind, and the events come again."""
    async with stocked(3) as fleet:
        host = fleet.host("a")
        fleet.stores["a"].fail("write", times=5, error=error)
        running = asyncio.create_task(host.run())
        await asyncio.sleep(120)
        assert {type(raised) for _, _, raised in fleet.record.errors} == {StoreError}
        assert fleet.checkpoint("0") == 2
        await host.aclose()
        await running


async def test_checkpoint_writer_cancelled_from_outside_still_writes() -> None:
    """A checkpoint whose write was cancelled by a stranger is written again, and who waits for it goes on."""
    async with stocked(3) as fleet:
        await fleet.start("a")
        fleet.stores["a"].delay(2, "write")
        await asyncio.sleep(1)
        (writer,) = [each for each in asyncio.all_tasks() if each.get_name() == "eventpump checkpoint writer"]
        writer.cancel()
        await asyncio.sleep(5)
        assert fleet.checkpoint("0") == 2
        assert [reported.operation for reported in fleet.reported("a", UnexpectedFailure)] == [
            "eventpump checkpoint writer"
        ]


@pytest.mark.parametrize("moment", ["before its first step", "while it has nothing to write"])
async def test_checkpoint_writer_cancelled_at_rest_still_writes(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger that cancels the writer before it begins, or while nothing is to be written, keeps no checkpoint."""
    spawn, writers = TaskSet.spawn, list[asyncio.Task[Any]]()

    def spawned(self: TaskSet, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = spawn(self, work, name)
        if name == "eventpump checkpoint writer":
            writers.append(task)
            if moment == "before its first step" and len(writers) == 1:
                task.cancel()
        return task

    monkeypatch.setattr(TaskSet, "spawn", spawned)
    async with stocked(3) as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        assert fleet.checkpoint("0") == 2
        if moment != "before its first step":
            writers[0].cancel()
            await asyncio.sleep(1)
        fleet.hub.publish("0", "new")
        await asyncio.sleep(5)
        assert fleet.checkpoint("0") == 3
        assert len(fleet.reported("a", UnexpectedFailure)) == 1
        assert len(writers) == 2


@seeds(15, of=1000)
async def test_checkpoint_writer_cancelled_at_any_moment_loses_nothing(seed: int) -> None:
    """A stranger cancels the writer at random, again and again: the last event is stored, and no caller waits on."""
    rng, count = random.Random(seed), 3

    async def handle(context: PartitionContext, events: Events) -> None:
        if rng.random() < 0.5:
            await context.checkpoint(events[-1])
        if rng.random() < 0.2:
            await asyncio.sleep(rng.choice((0, 0.1)))

    policy = rng.choice((CheckpointPolicy(every_events=1), CheckpointPolicy(every_seconds=0.5)))
    async with stocked(count) as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=handle), checkpoint_policy=policy)
        await asyncio.sleep(5)
        for _ in range(60):
            match rng.randrange(5):
                case 0 | 1:
                    fleet.hub.publish("0", *["new"] * (more := rng.choice((1, 3))))
                    count += more
                case 2:
                    for task in asyncio.all_tasks():
                        if task.get_name() == "eventpump checkpoint writer":
                            task.cancel()
                case 3:
                    fleet.stores["a"].delay(rng.choice((0, 0.01, 0.05)), "write")
                case _:
                    for _ in range(rng.randrange(6)):
                        await asyncio.sleep(0)
                    await asyncio.sleep(rng.choice((0, 0, 0.01, 1)))
        await asyncio.sleep(30)
        fleet.hub.publish("0", "last")
        await asyncio.sleep(30)
        assert fleet.checkpoint("0") == count
        assert fleet.record.errors == []


async def test_close_does_not_wait_for_a_checkpoint_that_is_refused() -> None:
    """A host that closes while its last checkpoint is refused, as the lease is lost, has closed with that answer."""
    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=_nothing)
        host = await fleet.start("a", processor, checkpoint_policy=CheckpointPolicy())
        await asyncio.sleep(5)
        fleet.leases.leases(fleet.scope)["0"].token = "another host's"
        fleet.stores["a"].delay(1, "write")
        began = asyncio.get_running_loop().time()
        await host.aclose()
        assert asyncio.get_running_loop().time() - began < 2


async def test_base_exception_from_the_service_is_reported() -> None:
    """A read of the hub that ends in a cancellation of its own is reported, and repeated."""
    async with stocked(3) as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        transport = fleet.transports["a"]
        real, failing = transport.get_hub_properties, [1]

        async def odd(hub: str) -> Any:
            if failing:
                failing.pop()
                raise asyncio.CancelledError
            return await real(hub)

        transport.get_hub_properties = odd  # type: ignore[method-assign]  # the fault
        await asyncio.sleep(20)
        assert [reported.operation for reported in fleet.reported("a", UnexpectedFailure)] == ["eventpump discovery"]


async def test_base_exception_from_a_link_ends_its_feed() -> None:
    """A transport whose call ends in a cancellation of its own makes the partition fail, not wait forever."""
    async with stocked(3) as fleet:
        host = fleet.host("a")
        transport = fleet.transports["a"]
        real, failing = transport.open_receive_link, [1]

        async def odd(*args: Any) -> Any:
            if failing:
                failing.pop()
                raise asyncio.CancelledError
            return await real(*args)

        transport.open_receive_link = odd  # type: ignore[method-assign, assignment]  # the fault
        running = asyncio.create_task(host.run())
        await asyncio.sleep(60)
        assert len(fleet.reported("a", PartitionFailed)) == len(fleet.reported("a", PumpStarted)) == 1
        assert fleet.checkpoint("0") == 2
        await host.aclose()
        await running


@pytest.mark.parametrize("error", [asyncio.CancelledError(), _Odd("odd"), GeneratorExit()], ids=repr)
async def test_base_exception_from_a_hook_is_logged_only(error: BaseException) -> None:
    """What a hook raises goes no further, of whatever kind it is."""

    def broken(report: HostReport) -> None:
        raise error

    async with stocked(3) as fleet:
        host = fleet.host("a", hooks=[broken])
        running = asyncio.create_task(host.run())
        await asyncio.sleep(30)
        assert fleet.checkpoint("0") == 2
        _nothing_is_kept_without_a_pump(fleet)
        await host.aclose()
        await running
        assert fleet.owner("0") is None


# --------------------------------------------------------------------------------------------- the interpreter's end


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_system_exit_in_a_handler_ends_the_loop_with_leases_released(error: type[BaseException]) -> None:
    """`SystemExit` and `KeyboardInterrupt` in a handler end `asyncio.run`, with every lease released."""
    kept: list[Fleet] = []

    async def leave(context: PartitionContext, events: Events) -> None:
        if context.partition_id == "0":
            await asyncio.sleep(5)
            raise error

    async def main() -> None:
        fleet = stocked(3, 3)
        kept.append(fleet)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=leave))
        await fleet.runs["a"]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.raises(error):
        runner.run(main())
    (fleet,) = kept
    assert [fleet.owner(partition_id) for partition_id in "012"] == [None] * 3


def test_loop_run_on_after_system_exit_keeps_no_lease_without_a_pump() -> None:
    """Where the loop is run on after a handler's `SystemExit`, the lease runs out, and the partition goes on."""
    loop = VirtualTimeLoop()
    leaving = [1]

    async def leave(context: PartitionContext, events: Events) -> None:
        if leaving:
            leaving.pop()
            raise SystemExit

    async def begin() -> Fleet:
        fleet = stocked(3)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=leave))
        return fleet

    async def end(fleet: Fleet) -> None:
        await asyncio.sleep(90)
        assert len(fleet.reported("a", LeaseLost)) == 1
        assert fleet.record.numbers("0") == [0, 1, 2, 0, 1, 2]
        await fleet.hosts["a"].aclose()
        await fleet.runs["a"]

    asyncio.set_event_loop(loop)
    try:
        fleet = loop.run_until_complete(begin())
        with pytest.raises(SystemExit):
            loop.run_until_complete(asyncio.sleep(60))
        loop.run_until_complete(end(fleet))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


@pytest.mark.parametrize("kind", ["pump", "taking", "renewal"])
async def test_task_cancelled_before_its_first_step_keeps_no_lease(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever task of a partition a stranger cancels as soon as it is made: no lease is kept without a pump."""
    spawn, cancelled = TaskSet.spawn, [1]

    def spawned(self: TaskSet, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = spawn(self, work, name)
        if name.startswith(f"eventpump {kind} of partition") and cancelled:
            cancelled.pop()
            task.cancel()
        return task

    monkeypatch.setattr(TaskSet, "spawn", spawned)
    async with stocked(3) as fleet:
        await fleet.start("a")
        await asyncio.sleep(120)
        assert not cancelled
        assert len(fleet.reported("a", UnexpectedFailure)) == 1
        fleet.hub.publish("0", "new")
        await asyncio.sleep(60)
        assert fleet.record.numbers("0")[-1] == 3
        _nothing_is_kept_without_a_pump(fleet)


async def test_task_set_reports_a_task_cancelled_from_outside() -> None:
    """A set reports a task that it did not cancel itself, and no other."""
    failed: list[tuple[str, BaseException]] = []
    tasks = TaskSet(lambda name, error: failed.append((name, error)))
    tasks.spawn(asyncio.sleep(100), "stranger's").cancel()
    tasks.drop(tasks.spawn(asyncio.sleep(100), "dropped"))
    tasks.spawn(asyncio.sleep(100), "ended")
    await asyncio.sleep(1)
    assert await tasks.cancel(1)
    assert [(name, type(error)) for name, error in failed] == [("stranger's", asyncio.CancelledError)]
