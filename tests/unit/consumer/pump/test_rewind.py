"""Seek, replay, pause and drain: stored before anything is delivered, exact, and undone by nothing that came before."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.pump.requests import Requests, Seek
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.sharing import LinkState
from eventpump.errors import ClosedError, ConfigurationError, ConnectionLostError, OwnershipLostError
from eventpump.eventhubs.events import Checkpoint, EventPosition, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.reports import DataLost, EventSkipped, LinkStateChanged, PositionSought, RangeReplayed
from eventpump.testing.transport import FakeHub
from tests.support.fleet import NO_PROCESSOR, Fleet, Record, RecordingProcessor, stocked
from tests.support.inside import owned, partition_read
from tests.support.seeds import seeds

Events = Sequence[ReceivedEvent]


def _recording(record: Record, on_events: Callable[[PartitionContext, Events], Awaitable[None]] | None = None) -> Any:
    return RecordingProcessor(record, on_events=on_events)


async def _nothing(context: PartitionContext, events: Events) -> None:
    pass


def _stored(fleet: Fleet, partition_id: str, name: str = "default") -> Checkpoint | None:
    for (partition, key), checkpoint in fleet.leases.checkpoints(fleet.scope).items():
        if partition == partition_id and key.split(".")[0] == name:
            return checkpoint
    return None


# -------------------------------------------------------------------------------------------------------------- seek


@pytest.mark.parametrize("name", ["default", "alerts"])
async def test_seek_back_delivers_everything_from_there_again(name: str) -> None:
    """From the position on, once; the others on the link get neither a gap nor a repeat."""
    records = {"default": Record(), "alerts": Record()}
    async with stocked(partitions=2) as fleet:
        host = fleet.host("a", _recording(records["default"]))
        await host.subscribe("alerts", _recording(records["alerts"]))
        fleet.runs["a"] = asyncio.create_task(host.run())
        for each in "01":
            fleet.hub.publish(each, count=100)
        await asyncio.sleep(5)
        assert await host.seek(name, 9) == ("0", "1")
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(5)
        other = "alerts" if name == "default" else "default"
        assert records[name].numbers("0") == [*range(100), *range(10, 110)]
        assert records[name].numbers("1") == [*range(100), *range(10, 100)]
        assert records[other].numbers("0") == list(range(110))
        assert records[other].numbers("1") == list(range(100))
        assert [each.checkpoint.sequence_number for each in fleet.reported("a", PositionSought)] == [9, 9]
        assert {each.subscription for each in fleet.reported("a", PositionSought)} == {name}


async def test_seek_is_stored_before_anything_after_it_is_delivered() -> None:
    """The first delivery from the new position finds it in the store; so every later owner begins there."""
    seen: list[Checkpoint | None] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        seen.append(_stored(fleet, "0"))
        if seen[1:]:
            return
        await context.checkpoint()

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a", _recording(fleet.record, handle))
        await asyncio.sleep(5)
        assert fleet.checkpoint("0") is not None
        before = len(seen)
        await host.seek("default", 9)
        await asyncio.sleep(5)
        event = fleet.hub.events("0")[9]
        assert seen[before:] == [Checkpoint("0", event.offset, 9)] * (len(seen) - before)
        assert seen[before:]
        await host.aclose()
        await fleet.start("b")
        await asyncio.sleep(40)
        assert fleet.record.numbers("0", "b") == list(range(10, 100))


async def test_seek_forward_leaves_out_what_lies_between() -> None:
    """What is skipped is not delivered, and a link that others share is not opened again for it."""
    other = Record()
    gate = asyncio.Event()

    async def slow(context: PartitionContext, events: Events) -> None:
        await gate.wait()

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = fleet.host("a", _recording(fleet.record, slow), max_batch_size=10)
        await host.subscribe("alerts", _recording(other), start="earliest", catch_up="shared")
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        seeking = asyncio.create_task(host.seek("default", "latest"))
        await asyncio.sleep(1)
        assert not seeking.done()
        gate.set()
        assert await seeking == ("0",)
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == [*range(10), *range(100, 110)]
        assert other.numbers("0") == list(range(110))
        assert len(fleet.hub.attached) == 1


async def test_positions_of_every_kind() -> None:
    """Each is found, as its next event and as the checkpoint of the event before it, also where numbers are missing."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(1000)
        fleet.hub.publish("0", count=100)
        events = fleet.hub.events("0")
        fleet.hub.truncate("0", 20)
        fleet.hub.compact("0", [*range(41, 60), *range(20, 30)])
        host = await fleet.start("a", _recording(fleet.record, _nothing))
        await asyncio.sleep(5)
        moment = events[100].enqueued_time
        places: list[tuple[Any, int, int]] = [
            ("earliest", 19, 30),
            (EventPosition.at_sequence_number(5), 19, 30),
            (30, 30, 31),
            (EventPosition.at_sequence_number(30, inclusive=True), 29, 30),
            (59, 40, 60),
            (EventPosition.at_sequence_number(60, inclusive=True), 40, 60),
            (EventPosition.at_sequence_number(50, inclusive=True), 40, 60),
            (moment - timedelta(seconds=1), 99, 100),
            (EventPosition.at_enqueued_time(moment, inclusive=True), 99, 100),
            (events[150].offset, 150, 151),
            (EventPosition.at_offset(events[150].offset, inclusive=True), 149, 150),
            (EventPosition.at_offset(events[50].offset), 40, 60),
            (198, 198, 199),
        ]
        for position, before, first in places:
            fleet.record.deliveries.clear()
            assert await host.seek("default", position) == ("0",)
            stored = _stored(fleet, "0")
            assert stored is not None
            is_kept = before >= 30
            assert stored.offset == (events[before].offset if is_kept else "-1"), position
            assert first - 1 == stored.sequence_number or not is_kept or before == stored.sequence_number, position
            await asyncio.sleep(5)
            wanted = [each for each in range(first, 200) if each not in range(41, 60)]
            assert fleet.record.numbers("0") == wanted, position
        for position in ("latest", 199, moment + timedelta(days=1), events[199].offset):
            fleet.record.deliveries.clear()
            await host.seek("default", position)
            await asyncio.sleep(5)
            assert (fleet.checkpoint("0"), fleet.record.numbers("0")) == (199, []), position
        assert fleet.reported("a", DataLost) == []


@pytest.mark.parametrize(
    ("position", "partition_ids", "what"),
    [
        (101, None, "beyond the end"),
        (EventPosition.at_offset("fake:100", inclusive=True), None, "invalid"),
        ("nonsense", None, 'must be "earliest"'),
        ("nonsense 7", None, "invalid"),
        (3.5, None, "position"),
        (9, ["0", "7"], "no partition 7"),
        (9, "0", "several"),
    ],
    ids=str,
)
async def test_bad_input_changes_nothing(position: Any, partition_ids: Any, what: str) -> None:
    """A position that one partition does not have moves none of them; all read on from where they were."""
    other = Record()
    async with stocked(partitions=2) as fleet:
        host = await fleet.start("a")
        await host.subscribe("alerts", _recording(other))
        fleet.hub.publish("0", count=150 if position == 101 else 100)
        fleet.hub.publish("1", count=100)
        await asyncio.sleep(5)
        with pytest.raises(ConfigurationError, match=what):
            await host.seek("default", position, partition_ids)
        with pytest.raises(ConfigurationError, match=what.replace("position", "from_")):
            await host.replay("default", from_=position, to="latest", partition_ids=partition_ids)
        for each in "01":
            fleet.hub.publish(each, count=10)
        await asyncio.sleep(5)
        assert fleet.reported("a", PositionSought) == []
        for record in (fleet.record, other):
            assert record.numbers("0") == list(range(len(fleet.hub.events("0"))))
            assert record.numbers("1") == list(range(110))


async def test_unknown_subscriptions_are_refused() -> None:
    """Every call names a subscription that this host has a processor for."""
    async with stocked() as fleet:
        host = await fleet.start("a", NO_PROCESSOR)
        for name in ("default", "alerts"):
            for call in (host.pause, host.resume):
                with pytest.raises(ConfigurationError, match=name):
                    call(name)
            for waiting in (host.seek(name, 1), host.replay(name, from_=1, to=2), host.drain(name)):
                with pytest.raises(ConfigurationError, match=name):
                    await waiting
        await host.subscribe("alerts", _recording(Record()))
        await asyncio.sleep(5)
        assert (host.pause("alerts"), host.resume("alerts"), host.resume("alerts")) == (("0",), ("0",), ())
        await host.aclose()
        with pytest.raises(ClosedError):
            await host.drain("alerts")


async def test_only_the_partitions_owned_are_sought() -> None:
    """Each call returns where it had its effect; a host that owns nothing changes nothing."""
    async with stocked(partitions=2) as fleet:
        a = fleet.host("a")
        assert (await a.seek("default", 9), a.pause("default"), await a.drain("default")) == ((), (), ())
        fleet.runs["a"] = asyncio.create_task(a.run())
        b = await fleet.start("b")
        await asyncio.sleep(60)
        for each in "01":
            fleet.hub.publish(each, count=100)
        await asyncio.sleep(5)
        (owned,) = fleet.owned("a")
        (others,) = fleet.owned("b")
        assert await a.seek("default", 49, ["0", "1"]) == (owned,)
        assert await a.seek("default", 49, [others]) == ()
        await asyncio.sleep(5)
        assert fleet.record.numbers(owned) == [*range(100), *range(50, 100)]
        assert fleet.record.numbers(others) == list(range(100))
        assert await b.replay("default", from_=0, to=9) == (others,)


# ------------------------------------------------------------------------------------------------- by the processor


@pytest.mark.parametrize("policy", [None, "retry", "skip"])
async def test_processor_seeks_after_its_batch(policy: str | None) -> None:
    """Of several positions the last counts; if the batch raises, it is not tried again for that."""
    sought = False
    stored: list[int | None] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        nonlocal sought
        if events[-1].sequence_number >= 49 and not sought:
            sought = True
            context.seek(5)
            context.seek(29)
            await asyncio.sleep(1)
            await context.checkpoint()
            stored.append(fleet.checkpoint("0"))
            if policy:
                raise ValueError("poison")

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        await fleet.start("a", _recording(fleet.record, handle), max_batch_size=10, failure_policy=policy or "retry")
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == [*range(50), *range(30, 100)]
        assert (stored, fleet.checkpoint("0")) == ([49], 29)
        assert len(fleet.record.errors) == (policy is not None)


async def test_seek_away_from_a_batch_that_fails_does_not_wait_for_its_next_attempt() -> None:
    """It takes effect during the back-off."""

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number == 0:
            raise ValueError("poison")

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        retry = RetryOptions(base_delay=5000, max_delay=5000, max_retries=None)
        host = await fleet.start("a", _recording(fleet.record, handle), max_batch_size=10, handler_retry=retry)
        await asyncio.sleep(5)
        async with asyncio.timeout(5):
            assert await host.seek("default", 49) == ("0",)
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == [*range(10), *range(50, 100)]


@pytest.mark.parametrize("by", ["host", "processor"])
async def test_seek_away_from_a_failing_batch_leaves_its_failures_there(by: str) -> None:
    """An event at the new position has all its attempts before it is skipped."""
    failed: list[int] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        number = events[0].sequence_number
        if number == 0 or (number == 50 and 50 not in failed):
            failed.append(number)
            if by == "processor" and failed == [0, 0, 0]:
                context.seek(49)
            raise ValueError("poison")

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        retry = RetryOptions(base_delay=10, max_delay=10, max_retries=3)
        options = {"max_batch_size": 1, "handler_retry": retry, "on_retries_exhausted": "skip"}
        host = await fleet.start("a", _recording(fleet.record, handle), **options)
        await fleet.until(lambda: len(failed) >= 3, within=60)
        if by == "host":
            assert await host.seek("default", 49) == ("0",)
        await asyncio.sleep(60)
        assert failed == [0, 0, 0, 50]
        assert fleet.record.numbers("0") == [0, 0, 0, 50, *range(50, 100)]
        assert fleet.reported("a", EventSkipped) == []


_WAITING: dict[str, Callable[[HubHost], Awaitable[object]]] = {
    "seek": lambda host: host.seek("default", 0),
    "replay": lambda host: host.replay("default", from_=0, to="latest"),
    "drain": lambda host: host.drain("default"),
}


async def _by_task(call: Callable[[], Awaitable[object]]) -> object:
    async def called() -> object:
        return await call()

    return await asyncio.create_task(called())


async def _by_thread(call: Callable[[], Awaitable[object]]) -> object:
    async def called() -> object:
        return await call()

    # As a thread of `asyncio.to_thread` calls: in the context of the code that has started it.
    asked: asyncio.Future[asyncio.Task[object]] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon_threadsafe(lambda: asked.set_result(asyncio.ensure_future(called())))
    return await (await asked)


_BY: dict[str, Callable[[Callable[[], Awaitable[object]]], Awaitable[object]]] = {
    "itself": lambda call: call(),
    "a task": _by_task,
    "a task of a task": lambda call: _by_task(lambda: _by_task(call)),
    "wait_for": lambda call: asyncio.wait_for(call(), 1000),
    "gather": lambda call: asyncio.gather(call()),
    "a thread": _by_thread,
}


@pytest.mark.parametrize("operation", _WAITING)
@pytest.mark.parametrize("by", _BY)
@pytest.mark.parametrize("kind", ["plain", "keyed", "loop"])
async def test_what_waits_for_the_batch_in_hand_is_refused(operation: str, by: str, kind: str) -> None:
    """The code that has the batch would wait for itself, through what it starts, too; not once it has returned."""
    raised: list[str] = []
    asked: list[asyncio.Task[object]] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        if asked:
            return
        call = _WAITING[operation]
        with pytest.raises(ConfigurationError) as caught:
            await _BY[by](lambda: call(host))
        raised.append(str(caught.value))
        asked.append(asyncio.ensure_future(call(host)))

    async def loop() -> None:
        async for batch in host.batches():
            await handle(batch.context, batch.events)

    processor = {"plain": handle, "keyed": KeyedProcessor(handle, concurrency=1), "loop": NO_PROCESSOR}[kind]
    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        host = fleet.host("a", processor, handler_retry=RetryOptions(max_retries=3))
        work = asyncio.create_task(loop() if kind == "loop" else host.run())
        await asyncio.sleep(5)
        assert await asked[0] == ("0",)
        (text,) = raised
        assert text.startswith(
            f"{operation}: waits until the code that calls it is done with its batch of partition 0: "
        )
        await host.aclose()
        await work


@pytest.mark.parametrize("kind", ["plain", "keyed", "loop"])
async def test_task_of_code_that_has_returned_may_wait(kind: str) -> None:
    """Also while the code that started it, which has returned at once, is called with other events."""
    asked: list[asyncio.Task[tuple[str, ...]]] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        if not asked:
            asked.append(asyncio.create_task(host.drain("default")))
        elif len(asked) == 1:
            asked.append(asked[0])
            await asyncio.sleep(10)

    async def loop() -> None:
        async for batch in host.batches():
            await handle(batch.context, batch.events)

    processor = {"plain": handle, "keyed": KeyedProcessor(handle, concurrency=1), "loop": NO_PROCESSOR}[kind]
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = fleet.host("a", processor, max_batch_size=10, handler_retry=RetryOptions(max_retries=3))
        work = asyncio.create_task(loop() if kind == "loop" else host.run())
        await asyncio.sleep(60)
        assert await asked[0] == ("0",)
        await host.aclose()
        await work


@pytest.mark.parametrize("operation", _WAITING)
@pytest.mark.parametrize("error", [None, KeyError])
async def test_loop_that_was_left_may_wait(operation: str, error: type[Exception] | None) -> None:
    """Code behind a loop that ended with `break` or an exception has no batch."""
    found: list[object] = []

    async def loop() -> None:
        with contextlib.suppress(KeyError):
            async for _ in host.batches():
                if error is not None:
                    raise error
                break
        again = asyncio.create_task(others())
        found.append(await _WAITING[operation](host))
        again.cancel()

    async def others() -> None:
        async for _ in host.batches():
            pass

    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        host = fleet.host("a", NO_PROCESSOR)
        work = asyncio.create_task(loop())
        await asyncio.sleep(60)
        assert found == [("0",)]
        await host.aclose()
        await work


async def test_seek_to_a_missing_position_calls_process_error() -> None:
    """`process_error` is called with the error, and delivery goes on where it was."""

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number == 0:
            with pytest.raises(ConfigurationError):
                context.seek(object())  # type: ignore[arg-type]  # what is tested
            context.seek(1000)

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        await fleet.start("a", _recording(fleet.record, handle), max_batch_size=10)
        await asyncio.sleep(10)
        assert fleet.record.numbers("0") == list(range(100))
        ((_, _, error),) = fleet.record.errors
        assert isinstance(error, ConfigurationError)


async def test_processor_that_is_given_up_cannot_seek() -> None:
    """After the ownership has ended a seek is refused, because it would be forgotten."""
    contexts: list[PartitionContext] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        contexts.append(context)

    async with stocked() as fleet:
        fleet.hub.publish("0", count=1)
        host = await fleet.start("a", _recording(fleet.record, handle))
        await asyncio.sleep(5)
        await host.aclose()
        with pytest.raises(OwnershipLostError):
            contexts[0].seek(0)


# -------------------------------------------------------------------------------------------- what came before it


async def test_checkpoint_of_what_came_before_does_not_undo_a_seek() -> None:
    """By the event or by the batch of before, at any time after the seek; also where another cursor keeps the event."""
    kept: list[ReceivedEvent] = []
    contexts: list[PartitionContext] = []
    gate = asyncio.Event()

    async def handle(context: PartitionContext, events: Events) -> None:
        contexts.append(context)
        if len(kept) >= 100:
            kept.extend(events)
            await gate.wait()
        else:
            kept.extend(events)

    async def stuck(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(1e6)

    async with stocked() as fleet:
        host = fleet.host("a", _recording(fleet.record, handle), checkpoint_policy=CheckpointPolicy.manual())
        await host.subscribe("stuck", _recording(Record(), stuck), start="earliest", catch_up="shared")
        fleet.hub.publish("0", count=100)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        await host.seek("default", 9)
        await asyncio.sleep(5)
        # Some of them are delivered again, and that batch is not processed.
        assert [each.sequence_number for each in kept[100:102]] == [10, 11]
        for event in (kept[90], kept[50], kept[11], kept[10]):
            with pytest.raises(ConfigurationError, match="before a seek"):
                await contexts[0].checkpoint(event)
        await contexts[0].checkpoint()
        await asyncio.sleep(5)
        assert fleet.checkpoint("0") == 9
        gate.set()
        await asyncio.sleep(5)
        await contexts[0].checkpoint(kept[110])
        assert fleet.checkpoint("0") == 20
        await contexts[0].checkpoint()
        assert fleet.checkpoint("0") == 99
        # Forward: what lies before it changes nothing.
        await host.seek("default", 50)
        await host.seek("default", 80)
        await contexts[0].checkpoint(kept[110])
        assert fleet.checkpoint("0") == 80


async def test_writes_under_way_do_not_undo_a_seek() -> None:
    """A checkpoint that is being written, or tried again, is over before the seek is stored, and does not follow it."""
    gate = asyncio.Event()

    async def handle(context: PartitionContext, events: Events) -> None:
        if len(fleet.record.numbers("0")) > 100:
            await gate.wait()

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        policy = CheckpointPolicy(every_events=1)
        host = await fleet.start("a", _recording(fleet.record, handle), checkpoint_policy=policy)
        await asyncio.sleep(0)
        fleet.stores["a"].delay(3, "write")
        await fleet.until(lambda: len(fleet.record.numbers("0")) == 100, 10)
        fleet.stores["a"].fail("reset", times=3)
        fleet.stores["a"].fail("write", times=1, is_after=True)
        assert fleet.stores["a"].in_flight["write", "0"] == 1
        assert await host.seek("default", 9) == ("0",)
        assert fleet.checkpoint("0") == 9
        await asyncio.sleep(25)
        assert fleet.checkpoint("0") == 9
        gate.set()
        await asyncio.sleep(25)
        assert fleet.checkpoint("0") == 99


# ------------------------------------------------------------------------------------------------------- moves, kills


async def test_move_in_the_middle_of_a_seek() -> None:
    """It is stored or not: what was not stored is not returned, and the next owner begins at the checkpoint."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a")
        await asyncio.sleep(5)
        fleet.stores["a"].hang("reset")
        seeking = asyncio.create_task(host.seek("default", 9))
        await asyncio.sleep(5)
        assert not seeking.done()
        await host.aclose()
        assert await seeking == ()
        await fleet.start("b")
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(60)
        assert fleet.record.numbers("0", "b") == list(range(100, 110))


async def test_move_in_the_middle_of_a_replay() -> None:
    """The replay is forgotten; the next owner goes on after the checkpoint."""
    gate = asyncio.Event()

    async def handle(context: PartitionContext, events: Events) -> None:
        if events[0].sequence_number == 10 and len(fleet.record.deliveries) > 10:
            await gate.wait()
        await context.checkpoint()

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a", _recording(fleet.record, handle), max_batch_size=10)
        await asyncio.sleep(5)
        replaying = asyncio.create_task(host.replay("default", from_=0, to=50))
        await asyncio.sleep(5)
        closing = asyncio.create_task(host.aclose())
        await asyncio.sleep(1)
        gate.set()
        await closing
        assert await replaying == ()
        assert fleet.record.numbers("0")[100:] == list(range(20))
        await fleet.start("b")
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(60)
        assert fleet.record.numbers("0", "b") == list(range(100, 110))
        assert fleet.reported("a", RangeReplayed) == []


# ------------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("name", ["default", "alerts"])
async def test_replay_delivers_exactly_the_range(name: str) -> None:
    """The range once, then on from where it was; the checkpoint is not touched; the others notice nothing."""
    records = {"default": Record(), "alerts": Record()}
    stored: set[int | None] = set()

    async def handle(context: PartitionContext, events: Events) -> None:
        await context.checkpoint()
        await context.checkpoint(events[0])
        if records[name].numbers("0")[100:]:
            checkpoint = _stored(fleet, "0", name)
            stored.add(None if checkpoint is None else checkpoint.sequence_number)

    async with stocked() as fleet:
        host = fleet.host("a", _recording(records["default"], handle if name == "default" else None), max_batch_size=7)
        await host.subscribe("alerts", _recording(records["alerts"], handle if name == "alerts" else None))
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(5)
        assert await host.replay(name, from_=10, to=29) == ("0",)
        assert stored == {99}
        assert await host.replay(name, from_="earliest", to="latest") == ("0",)
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(5)
        assert records[name].numbers("0") == [*range(100), *range(10, 30), *range(100), *range(100, 110)]
        assert records["alerts" if name == "default" else "default"].numbers("0") == list(range(110))
        assert [(each.first, each.last) for each in fleet.reported("a", RangeReplayed)] == [(10, 29), (0, 99)]
        checkpoint = _stored(fleet, "0", name)
        assert checkpoint is not None
        assert checkpoint.sequence_number == 109


@pytest.mark.parametrize("kind", ["plain", "keyed"])
async def test_replay_ahead_of_the_position_moves_no_checkpoint(kind: str) -> None:
    """What lies between is delivered afterwards, and by the next owner if this one dies before."""
    gate = asyncio.Event()
    seen: list[int] = []
    lives = {"a": True}

    async def handle(context: PartitionContext, events: Events) -> None:
        await gate.wait()
        await asyncio.sleep(0.5 * len(events) if lives["a"] else 0)
        seen.extend(event.sequence_number for event in events)

    def processor() -> Any:
        if kind == "plain":
            return handle
        return KeyedProcessor(handle, concurrency=2, max_events_in_flight=10, max_ahead=10)

    options: dict[str, Any] = {
        "max_batch_size": 10,
        "checkpoint_policy": CheckpointPolicy(every_events=1),
        "handler_retry": RetryOptions(max_retries=3),
    }
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a", processor(), **options)
        await asyncio.sleep(5)
        replaying = asyncio.create_task(host.replay("default", from_=50, to=59))
        await asyncio.sleep(1)
        gate.set()
        assert await replaying == ("0",)
        assert set(seen[-10:]) == set(range(50, 60))
        processed = len(seen) - 10
        assert 0 < processed < 50
        await asyncio.sleep(0.3)
        checkpoint = fleet.checkpoint("0")
        assert checkpoint is not None
        assert checkpoint < processed
        lives["a"] = False
        await host.aclose(0)
        seen[processed:] = []
        await fleet.start("b", processor(), **options)
        await fleet.until(lambda: len(seen) >= 100, within=60)
        assert set(range(100)) == set(seen)


async def test_checkpoint_stays_though_it_lies_before_the_range() -> None:
    """Events of a replay are processed again without a checkpoint; those delivered before it can still be stored."""
    kept: list[ReceivedEvent] = []
    contexts: list[PartitionContext] = []
    stored: set[int | None] = set()

    async def handle(context: PartitionContext, events: Events) -> None:
        kept.extend(events)
        contexts.append(context)
        if len(kept) > 100:
            await context.checkpoint()
            await context.checkpoint(events[-1])
            stored.add(fleet.checkpoint("0"))

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a", _recording(fleet.record, handle), max_batch_size=10)
        await asyncio.sleep(5)
        await contexts[0].checkpoint(kept[10])
        assert await host.replay("default", from_=20, to=59) == ("0",)
        await contexts[0].checkpoint(kept[-1])
        assert stored == {10} == {fleet.checkpoint("0")}
        assert [each.sequence_number for each in kept[100:]] == list(range(20, 60))
        await contexts[0].checkpoint(kept[30])
        assert fleet.checkpoint("0") == 30
        await contexts[0].checkpoint()
        assert fleet.checkpoint("0") == 99
        assert fleet.record.errors == []


@pytest.mark.parametrize(
    ("begin", "end", "numbers"),
    [
        (EventPosition.at_sequence_number(5), EventPosition.at_sequence_number(9), range(6, 9)),
        (EventPosition.at_sequence_number(5, inclusive=True), EventPosition.at_sequence_number(9, inclusive=True),
         range(5, 10)),
        (7, 7, range(7, 8)),
        (9, 5, range(0)),
        ("latest", "latest", range(0)),
        ("earliest", 3, range(4)),
    ],
    ids=str,
)  # fmt: skip
async def test_both_ends_of_a_range(begin: Any, end: Any, numbers: range) -> None:
    """Numbers as such are included; an `EventPosition` says so itself; an empty range delivers nothing."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a")
        await asyncio.sleep(5)
        assert await host.replay("default", from_=begin, to=end) == (("0",) if numbers else ())
        assert fleet.record.numbers("0")[100:] == list(numbers)


async def test_range_that_is_dropped_while_it_is_replayed() -> None:
    """What the hub has dropped is reported, and the replay ends."""

    async def handle(context: PartitionContext, events: Events) -> None:
        if len(fleet.record.deliveries) == 101:
            fleet.hub.truncate("0", 40)
            fleet.hub.detach("0")
            await asyncio.sleep(5)

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start(
            "a", _recording(fleet.record, handle), max_batch_size=1, prefetch_events=5, max_wait_time=10
        )
        await asyncio.sleep(5)
        assert await host.replay("default", from_=0, to=50) == ("0",)
        replayed = fleet.record.numbers("0")[100:]
        assert replayed == [*range(len(replayed) - 11), *range(40, 51)]
        (lost,) = fleet.reported("a", DataLost)
        assert (lost.loss.last_missing, lost.action) == (39, "earliest")
        fleet.hub.truncate("0", 100)
        assert await host.replay("default", from_=60, to="latest") == ()


async def test_seek_ends_a_replay() -> None:
    """Asked for during it, by the host or by the processor; the replay is not taken up again."""

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(1)

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a", _recording(fleet.record, handle), max_batch_size=10)
        await asyncio.sleep(15)
        replays = [asyncio.create_task(host.replay("default", from_=0, to=79)) for _ in range(2)]
        await asyncio.sleep(2.5)
        assert await host.seek("default", 89) == ("0",)
        assert [await each for each in replays] == [(), ()]
        await asyncio.sleep(10)
        assert fleet.record.numbers("0")[100:] == [*range(30), *range(90, 100)]


@pytest.mark.parametrize("replays", [False, True])
async def test_with_a_link_of_its_own_the_others_do_not_wait(replays: bool) -> None:
    """A subscription with a `catch_up_group` is rewound over a link there, and the others' link stays as it is."""
    got = Record()

    async def handle(context: PartitionContext, events: Events) -> None:
        await context.checkpoint(events[-1])

    hub = FakeHub(partitions=1, consumer_groups=("$Default", "behind"))
    async with Fleet(hub) as fleet:
        host = fleet.host("a", prefetch_events=20, max_batch_size=5)
        await host.subscribe("alerts", _recording(got, handle), catch_up_group="behind")
        fleet.runs["a"] = asyncio.create_task(host.run())
        hub.publish("0", count=200)
        await asyncio.sleep(5)
        if replays:
            assert await host.replay("alerts", from_="earliest", to="latest") == ("0",)
        else:
            assert await host.seek("alerts", "earliest") == ("0",)
        await asyncio.sleep(5)
        for _ in range(20):
            hub.publish("0", count=2)
            await asyncio.sleep(1)
        assert got.numbers("0") == [*range(200), *range(240)]
        assert fleet.record.numbers("0") == list(range(240))
        assert got.errors == []
        assert [each.consumer_group for each in hub.attached] == ["$Default", "behind"]
        assert {each.link_state for each in host.partitions} == {LinkState.SHARED}
        stored = _stored(fleet, "0", "alerts")
        assert stored is not None
        assert stored.sequence_number == 239


# ---------------------------------------------------------------------------------------------------- pause and drain


async def test_paused_subscription_keeps_its_place_and_holds_no_one_back() -> None:
    """Nothing is delivered to it, the lease stays, the others go on; resumed, it gets everything once and in order."""
    other = Record()
    async with stocked() as fleet:
        host = await fleet.start("a", prefetch_events=50, max_batch_size=10)
        await host.subscribe("alerts", _recording(other))
        fleet.hub.publish("0", count=20)
        await asyncio.sleep(5)
        assert host.pause("alerts") == ("0",)
        fleet.hub.publish("0", count=500)
        await asyncio.sleep(100)
        assert fleet.record.numbers("0") == list(range(520))
        assert other.numbers("0") == list(range(20))
        assert [each.link_state for each in host.partitions] == [LinkState.SHARED, LinkState.PAUSED]
        assert host.pause("default") == ("0",)
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(100)
        assert (fleet.owned("a"), fleet.hub.owner_levels("0")) == ({"0"}, [])
        assert (host.resume("alerts"), host.resume("default")) == (("0",), ("0",))
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == other.numbers("0") == list(range(530))
        changes: dict[str | None, list[LinkState]] = {"alerts": [], "default": []}
        for each in fleet.reported("a", LinkStateChanged):
            changes[each.subscription].append(each.state)
        paused, shared = LinkState.PAUSED, LinkState.SHARED
        # The link begins at what the other one has not had yet.
        assert changes == {"alerts": [paused, shared], "default": [paused, LinkState.WAITING, shared]}


async def test_pause_holds_back_the_rest_of_a_batch_delivered_one_by_one() -> None:
    """The event in hand ends; those after it are delivered after the resume, once and in order."""
    singles: list[int] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        if len(events) > 1:
            raise ValueError("one of them")
        await asyncio.sleep(10)
        singles.append(events[0].sequence_number)

    async with stocked() as fleet:
        fleet.hub.publish("0", count=5)
        host = await fleet.start("a", _recording(fleet.record, handle), failure_policy="skip")
        await asyncio.sleep(25)
        host.pause("default")
        await asyncio.sleep(100)
        paused_after = list(singles)
        host.resume("default")
        await asyncio.sleep(100)
        assert paused_after == list(range(len(paused_after)))
        assert 1 <= len(paused_after) <= 3
        assert singles == list(range(5))


async def test_paused_subscription_can_be_sought_and_then_resumed() -> None:
    """The seek is stored at once; a replay and a drain wait for the resume; a batch that failed comes again."""
    fails = True

    async def handle(context: PartitionContext, events: Events) -> None:
        if fails:
            raise ValueError("not yet")

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a", _recording(fleet.record, handle), max_batch_size=10)
        await asyncio.sleep(5)
        host.pause("default")
        await asyncio.sleep(100)
        fleet.record.deliveries.clear()
        await asyncio.sleep(100)
        fails = False
        host.resume("default")
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == list(range(100))
        host.pause("default")
        assert await host.seek("default", 49) == ("0",)
        assert fleet.checkpoint("0") == 49
        replaying = asyncio.create_task(host.replay("default", from_=0, to=5))
        draining = asyncio.create_task(host.drain("default"))
        await asyncio.sleep(100)
        assert len(fleet.record.numbers("0")) == 100
        assert not replaying.done()
        assert not draining.done()
        host.resume("default")
        assert (await replaying, await draining) == (("0",), ("0",))
        assert fleet.record.numbers("0")[100:] == [*range(6), *range(50, 100)]


async def test_drain_waits_for_the_end_seen_at_the_call() -> None:
    """It ends when what was there is processed, whatever comes later; not while a batch runs or fails."""

    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(1)

    async with stocked(partitions=2) as fleet:
        host = await fleet.start("a", _recording(fleet.record, handle), max_batch_size=10)
        await asyncio.sleep(5)
        assert await host.drain("default") == ("0", "1")
        fleet.hub.publish("0", count=50)
        await asyncio.sleep(0)
        draining = asyncio.create_task(host.drain("default"))
        for _ in range(10):
            await asyncio.sleep(0.45)
            fleet.hub.publish("0", count=10)
            assert not draining.done()
        assert await draining == ("0", "1")
        assert len(fleet.record.numbers("0")) in {50, 60}
        fleet.hub.publish("1", count=10)
        await asyncio.sleep(0.5)
        draining = asyncio.create_task(host.drain("default"))
        await asyncio.sleep(0)
        await host.aclose()
        assert await draining == ()


async def test_drain_does_not_wait_for_what_the_hub_dropped() -> None:
    """Where the rest is gone nothing arrives that would show it: the hub is asked when the link is silent."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        fleet.hub.truncate("0", 100)
        host = await fleet.start("a", max_wait_time=10)
        assert await asyncio.wait_for(host.drain("default"), 1) == ()
        await asyncio.sleep(5)
        assert await asyncio.wait_for(host.drain("default"), 30) == ("0",)


# -------------------------------------------------------------------------------------------------- random histories


@dataclass(slots=True)
class _Call:
    """One call of `process_events`, with what was there when it began."""

    host: str
    partition_id: str
    epoch: int
    numbers: list[int]
    reported: int
    stored: Checkpoint | None
    replay: int | None
    """Identifies the replay that it belongs to."""
    has_failed: bool = False


@dataclass(slots=True)
class _History:
    """What the processors of one subscription were called with, in order."""

    fleet: Fleet
    name: str
    rng: random.Random
    fails: bool
    calls: list[_Call] = field(default_factory=list)

    async def handle(self, context: PartitionContext, events: Events) -> None:
        fleet, rng = self.fleet, self.rng
        call = _Call(
            context.owner_id,
            context.partition_id,
            context.owner_level,
            [event.sequence_number for event in events],
            len(fleet.reports[context.owner_id]),
            _stored(fleet, context.partition_id, self.name),
            self._replay(context),
        )
        self.calls.append(call)
        await asyncio.sleep(rng.choice([0, 0, 0, 0.1, 1, 4]))
        if rng.random() < 0.05:
            where: list[Any] = [rng.randrange(call.numbers[-1] + 1), "earliest", "latest"]
            context.seek(rng.choice(where))
        if rng.random() < 0.4:
            await context.checkpoint(rng.choice([None, events[0], events[-1]]))
        if self.fails and rng.random() < 0.1:
            call.has_failed = True
            raise ValueError("sometimes")

    def _replay(self, context: PartitionContext) -> int | None:
        owning = owned(self.fleet.hosts[context.owner_id], context.partition_id)
        assert owning is not None
        partition = partition_read(owning.pumps[self.name])
        assert partition is not None
        return partition.replayed._running

    def check(self) -> None:
        """Within an ownership: each generation from its place on, every number once, replays exactly as reported."""
        owners = {(each.host, each.partition_id, each.epoch) for each in self.calls}
        for host, partition_id, epoch in owners:
            reported = [
                (index, each)
                for index, each in enumerate(self.fleet.reports[host])
                if isinstance(each, PositionSought | RangeReplayed)
                and (each.partition_id, each.subscription) == (partition_id, self.name)
            ]
            calls = [
                each for each in self.calls if (each.host, each.partition_id, each.epoch) == (host, partition_id, epoch)
            ]
            self._check_owner(calls, reported)

    def _check_owner(self, calls: list[_Call], reported: list[tuple[int, Any]]) -> None:
        where = f"{self.name} {calls[0].host} {calls[0].partition_id}"
        position = 0
        while position < len(reported) and reported[position][0] < calls[0].reported:
            position += 1
        expected = 0 if calls[0].stored is None else calls[0].stored.sequence_number + 1
        replay: list[int] = []
        running: int | None = None
        for call in calls:
            while position < len(reported) and reported[position][0] < call.reported:
                report = reported[position][1]
                position += 1
                is_last = position == len(reported) or reported[position][0] >= call.reported
                if isinstance(report, PositionSought):
                    expected, replay = report.checkpoint.sequence_number + 1, []
                    assert not is_last or call.stored == report.checkpoint, f"{where}: {call} before it was stored"
                else:
                    assert replay == list(range(report.first, report.last + 1)), f"{where}: {report}, not {replay}"
                    replay = []
            numbers = call.numbers
            assert numbers == list(range(numbers[0], numbers[-1] + 1)), where
            if call.replay is None:
                assert numbers[0] == expected, f"{where}: {call}, not {expected}"
            elif replay and call.replay == running:
                assert numbers[0] == replay[-1] + 1, f"{where}: {call} after {replay[-3:]}"
            else:
                replay = []
            running = call.replay
            if call.has_failed:
                continue
            if call.replay is None:
                expected = numbers[-1] + 1
            else:
                replay += numbers


# 48: a replay between a seek back and the place before it, beside a link that is older than the seek.
@seeds(3, of=200, always=[48])
@pytest.mark.parametrize("with_failures", [False, True])
async def test_seek_and_replay_at_random_deliver_each_range_once(seed: int, with_failures: bool) -> None:
    """Seeks, replays, pauses, running and failing handlers, cut links and moves in any order.

    In each generation every number comes once and in order, from the place that is stored when the first one comes. A
    batch that failed comes again, and a new owner begins at the stored checkpoint. In the end everything is drained.
    """
    rng = random.Random(f"{seed} {with_failures}")
    hub = FakeHub(partitions=2, latency=rng.choice([0.0, 0.05]), consumer_groups=("$Default", "behind"))
    async with Fleet(hub, seed=seed) as fleet:
        histories = {name: _History(fleet, name, rng, with_failures) for name in ("default", "alerts", "audit")}
        asked: list[asyncio.Task[Any]] = []
        running: list[str] = []

        async def start(name: str) -> None:
            host = fleet.host(
                name,
                RecordingProcessor(Record(), on_events=histories["default"].handle),
                max_batch_size=rng.choice([1, 7, 300]),
                prefetch_events=rng.choice([20, 3000]),
            )
            for each in ("alerts", "audit"):
                processor = RecordingProcessor(Record(), on_events=histories[each].handle)
                catching_up: Any = {"catch_up": "shared"} if each == "alerts" else {"catch_up_group": "behind"}
                await host.subscribe(each, processor, start="earliest", **catching_up)
            fleet.runs[name] = asyncio.create_task(host.run())
            running.append(name)

        def ask(name: str) -> None:
            host = fleet.hosts[rng.choice(running)]
            events = fleet.hub.events(rng.choice("01"))
            some = [rng.choice(events) for _ in range(2)] if events else []
            positions: list[Any] = ["earliest", "latest", *(each.sequence_number for each in some)]
            positions += [each.offset for each in some] + [each.enqueued_time for each in some]
            match rng.randrange(6):
                case 0 | 1:
                    asked.append(asyncio.create_task(host.seek(name, rng.choice(positions))))
                case 2 | 3:
                    begin, end = rng.choice(positions), rng.choice(positions)
                    asked.append(asyncio.create_task(host.replay(name, from_=begin, to=end)))
                case 4:
                    host.pause(name)
                case 5:
                    asked.append(asyncio.create_task(host.drain(name)))

        await start("first")
        await asyncio.sleep(5)
        for turn in range(50):
            match rng.randrange(10):
                case 0 | 1 | 2 | 3:
                    ask(rng.choice(list(histories)))
                case 4:
                    fleet.hub.detach(rng.choice("01"), ConnectionLostError("cut"))
                case 5 if with_failures and len(running) < 3:
                    await start(f"host-{turn}")
                case 6 if len(running) > 1:
                    await fleet.hosts[running.pop(rng.randrange(len(running)))].aclose(deadline=rng.choice([1, 10]))
                case 7:
                    for host in running:
                        for name in histories:
                            fleet.hosts[host].resume(name)
                case _:
                    fleet.hub.publish(rng.choice("01"), count=rng.randrange(60))
            await asyncio.sleep(rng.choice([0, 0.001, 0.1, 1, 8]))
        for host in running:
            for name in histories:
                fleet.hosts[host].resume(name)
        async with asyncio.timeout(7200):
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                # A number of one partition may lie beyond the end of the other; a host may be closing.
                assert isinstance(outcome, tuple | ConfigurationError | ClosedError | ConnectionLostError), outcome
            await asyncio.sleep(60)
            for host in running:
                for name in histories:
                    await fleet.hosts[host].drain(name)
        for history in histories.values():
            history.check()


# ---------------------------------------------------------------------------------------------------------- requests


async def test_closed_pump_refuses_what_it_is_asked() -> None:
    """What comes too late is answered with no, so that no caller waits indefinitely."""
    requests = Requests()
    requests.close()
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    requests.seek(Seek(Checkpoint("0", "1", 1), done))
    assert await done is False
    assert requests.take() is None


async def test_replay_of_a_failing_batch_keeps_its_delays_when_a_drain_waits() -> None:
    """What is asked for meanwhile does not make the attempts follow each other at once."""
    calls: list[float] = []
    is_failing = False

    async def handle(context: PartitionContext, events: Events) -> None:
        if is_failing and events:
            calls.append(asyncio.get_running_loop().time())
            if len(calls) < 2000:
                raise ValueError("no")

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        host = await fleet.start("a", _recording(fleet.record, handle))
        await asyncio.sleep(5)
        is_failing = True
        replaying = asyncio.create_task(host.replay("default", from_=0, to=50))
        await asyncio.sleep(5)
        draining = asyncio.create_task(host.drain("default"))
        await asyncio.sleep(10)
        assert len(calls) < 20
        is_failing = False
        assert await replaying == await draining == ("0",)


async def test_drain_after_a_loss_that_goes_on_at_the_end_returns() -> None:
    """Events that `on_data_loss="latest"` has passed over are waited for no more, though nothing follows them."""
    gate = asyncio.Event()

    async def handle(context: PartitionContext, events: Events) -> None:
        await gate.wait()
        await context.checkpoint()

    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        options: dict[str, Any] = {"max_batch_size": 1, "prefetch_events": 5, "max_wait_time": 10}
        host = await fleet.start("a", _recording(fleet.record, handle), on_data_loss="latest", **options)
        await asyncio.sleep(5)
        draining = asyncio.create_task(host.drain("default"))
        await asyncio.sleep(1)
        fleet.hub.truncate("0", 40)
        fleet.hub.detach("0")
        gate.set()
        async with asyncio.timeout(60):
            assert await draining == ("0",)
        assert fleet.reported("a", DataLost) != []
