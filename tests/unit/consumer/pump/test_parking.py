"""Failure policies: events that fail by themselves are skipped or parked, or the partition is left; nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from eventpump.consumer.processor import CloseReason, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import ConfigurationError, ConnectionLostError, ProcessorFailedError, ServiceBusyError
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.eventhubs.parked import Parked, parked_facts
from eventpump.interfaces import EventSender, Transport
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import Park
from eventpump.producer.producer import HubProducer
from eventpump.reports import (
    CheckpointWritten,
    EventParked,
    EventSkipped,
    HandlerSlow,
    LeaseReleased,
    PartitionFailed,
    ProcessorFailed,
)
from eventpump.storage.leases.memory import MemoryLeaseStore
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.fleet import NO_PROCESSOR, Fleet, Record, RecordingProcessor, stocked

Events = Sequence[ReceivedEvent]
Step = Callable[[PartitionContext, Events], Awaitable[None]]

EACH = CheckpointPolicy(every_events=1)
TWICE = RetryOptions(max_retries=1, base_delay=0.1, max_delay=0.1)


class _Oddity(BaseException):
    """Not an `Exception`."""


def _fails_on(*poison: int, raises: BaseException | None = None) -> Step:
    async def handle(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(0)
        if any(event.sequence_number in poison for event in events):
            raise raises or ValueError("poison")

    return handle


async def _start(fleet: Fleet, on_events: Step, name: str = "a", **options: Any) -> None:
    options = {"checkpoint_policy": EACH, "max_batch_size": 10, **options}
    await fleet.start(name, RecordingProcessor(fleet.record, on_events=on_events), **options)


def _batches(fleet: Fleet) -> list[tuple[int, ...]]:
    return [delivery.numbers for delivery in fleet.record.deliveries]


def _failures(fleet: Fleet, operation: str = "process_events") -> list[ProcessorFailed]:
    return [each for each in fleet.reported("a", ProcessorFailed) if each.operation == operation]


class _Other:
    """Another hub of the namespace, and what opens a sender to it."""

    def __init__(self) -> None:
        self.hub = FakeHub("parked", 1)
        self.opened: list[HubProducer] = []

    def open_sender(self, transport: Transport, hub: str) -> EventSender:
        producer = HubProducer(FakeTransport(self.hub), hub, retry=RetryOptions(max_retries=0), owns_transport=False)
        self.opened.append(producer)
        return producer

    @property
    def events(self) -> list[ReceivedEvent]:
        return self.hub.events("0")

    @property
    def facts(self) -> list[Parked]:
        found = [parked_facts(event) for event in self.events]
        assert None not in found
        return [each for each in found if each is not None]


# -------------------------------------------------------------------------------------------------------------- skip


async def test_only_events_that_fail_by_themselves_are_skipped() -> None:
    """The others of their batch are processed, in order, and the checkpoint passes all."""
    async with stocked(20) as fleet:
        await _start(fleet, _fails_on(3, 7), failure_policy="skip")
        await asyncio.sleep(5)
        assert _batches(fleet) == [tuple(range(10)), *((number,) for number in range(10)), tuple(range(10, 20))]
        assert [(each.sequence_number, each.attempts) for each in fleet.reported("a", EventSkipped)] == [(3, 2), (7, 2)]
        assert {type(each.error) for each in fleet.reported("a", EventSkipped)} == {ValueError}
        assert len(fleet.record.errors) == len(_failures(fleet)) == 3
        assert fleet.checkpoint("0") == 19


async def test_with_retries_before_it_each_event_has_its_own() -> None:
    """What passes by itself skips nothing, however many events there are."""
    left = [3]

    async def handle(context: PartitionContext, events: Events) -> None:
        if any(event.sequence_number == 5 for event in events):
            raise ValueError("poison")
        if left[0] and len(events) == 1:
            left[0] -= 1
            raise OSError("no database")

    async with stocked(10) as fleet:
        retry = RetryOptions(max_retries=3, base_delay=0.1, max_delay=0.1)
        await _start(fleet, handle, on_retries_exhausted="skip", handler_retry=retry)
        await asyncio.sleep(10)
        assert [(each.sequence_number, each.attempts) for each in fleet.reported("a", EventSkipped)] == [(5, 8)]
        assert _batches(fleet)[:4] == [tuple(range(10))] * 4
        singles = [(0,)] * 4 + [(number,) for number in range(1, 5)] + [(5,)] * 4 + [(6,), (7,), (8,), (9,)]
        assert _batches(fleet)[4:] == singles
        assert fleet.checkpoint("0") == 9


@pytest.mark.parametrize("raises", [_Oddity("odd"), asyncio.CancelledError("of its own")], ids=["base", "cancelled"])
async def test_process_events_raising_a_base_exception_is_a_failure(raises: BaseException) -> None:
    """It is skipped by the same policy, and takes nothing else with it."""
    async with stocked(5) as fleet:
        await _start(fleet, _fails_on(2, raises=raises), failure_policy="skip")
        await asyncio.sleep(5)
        assert [each.sequence_number for each in fleet.reported("a", EventSkipped)] == [2]
        assert fleet.checkpoint("0") == 4


async def test_event_that_hangs_is_skipped_after_its_time() -> None:
    """With `on_handler_timeout="cancel"` the time-out is a failure as any other."""

    async def handle(context: PartitionContext, events: Events) -> None:
        if any(event.sequence_number == 2 for event in events):
            await asyncio.sleep(1e6)

    async with stocked(5) as fleet:
        await _start(fleet, handle, failure_policy="skip", handler_timeout=5, on_handler_timeout="cancel")
        await asyncio.sleep(30)
        (skipped,) = fleet.reported("a", EventSkipped)
        assert (skipped.sequence_number, type(skipped.error)) == (2, TimeoutError)
        assert fleet.checkpoint("0") == 4


async def test_what_is_in_the_hands_of_a_narrowed_handler_is_one_event() -> None:
    """`context.checkpoint()` covers that event, and an event of the batch that failed may be named."""
    stored: list[int | None] = []

    async def handle(context: PartitionContext, events: Events) -> None:
        if len(events) > 1:
            raise ValueError("poison")
        await context.checkpoint()
        stored.append(fleet.checkpoint("0"))
        if events[0].sequence_number == 1:
            await context.checkpoint(batch[3])
            stored.append(fleet.checkpoint("0"))

    batch: list[ReceivedEvent] = []

    async def keep(context: PartitionContext, events: Events) -> None:
        if len(events) > 1:
            batch[:] = events
        await handle(context, events)

    async with stocked(5) as fleet:
        await _start(fleet, keep, failure_policy="skip", checkpoint_policy=CheckpointPolicy.manual())
        await asyncio.sleep(5)
        assert stored == [0, 1, 3, 3, 3, 4]
        assert fleet.reported("a", EventSkipped) == []


async def test_message_that_cannot_be_decoded_is_skipped() -> None:
    """Though it has no number: the checkpoint of a later event covers it."""
    async with stocked(3) as fleet:
        fleet.hub.partition("0").raw[1] = b"\x00\x53\x75\xa1\x01x"

        async def read(context: PartitionContext, events: Events) -> None:
            for event in events:
                event.body  # noqa: B018 - raises

        processor = RecordingProcessor(Record(), on_events=read)
        processor.process_events = read  # type: ignore[method-assign]  # the recording one reads numbers
        await fleet.start("a", processor, failure_policy="skip", checkpoint_policy=EACH)
        await asyncio.sleep(5)
        assert [each.sequence_number for each in fleet.reported("a", EventSkipped)] == [None]
        assert fleet.checkpoint("0") == 2


async def test_call_without_events_that_fails_is_not_repeated_at_once() -> None:
    """There is nothing to skip or to park; the next call is due after `max_wait_time`."""

    async def handle(context: PartitionContext, events: Events) -> None:
        raise ValueError("idle")

    async with stocked() as fleet:
        await _start(fleet, handle, failure_policy=Park("parked"), call_when_idle=True, max_wait_time=2)
        await asyncio.sleep(9)
        assert _batches(fleet) == [()] * 4
        assert len(fleet.record.errors) == 4
        assert [*fleet.reported("a", EventParked), *fleet.reported("a", EventSkipped)] == []


async def test_open_that_fails_passes_over_nothing() -> None:
    """It is tried again, as with "retry"."""
    failing = [1, 1]

    async def fail_twice(context: PartitionContext) -> None:
        if failing:
            failing.pop()
            raise OSError("no database")

    async with stocked(3) as fleet:
        processor = RecordingProcessor(fleet.record, on_open=fail_twice)
        await fleet.start("a", processor, failure_policy="skip", handler_retry=RetryOptions(max_retries=2))
        await asyncio.sleep(30)
        assert fleet.record.numbers("0") == [0, 1, 2]
        assert fleet.reported("a", EventSkipped) == []


async def test_nothing_is_skipped_once_the_lease_is_lost() -> None:
    """It is the new owner's to decide."""

    async def late(context: PartitionContext, events: Events) -> None:
        await context.ownership_lost.wait()
        raise ValueError("poison")

    async with stocked(1) as fleet:
        await _start(fleet, late, failure_policy="skip")
        await asyncio.sleep(5)
        await _steal(fleet)
        await asyncio.sleep(15)
        assert len(_failures(fleet)) == 1
        assert fleet.reported("a", EventSkipped) == []
        assert fleet.checkpoint("0") is None


async def _steal(fleet: Fleet) -> None:
    """Take the lease of partition 0, by a host that does nothing with it."""
    store = MemoryLeaseStore(fleet.leases)
    await store.open(fleet.scope)
    (snapshot,) = await store.list()
    assert await store.acquire(snapshot, "thief", held=True) is not None


# -------------------------------------------------------------------------------------------------------------- park


async def test_event_is_parked_in_another_hub() -> None:
    """As it was, with where it came from and why; the rest of its batch is processed."""
    other = _Other()
    async with stocked(5) as fleet:
        producer = HubProducer(FakeTransport(fleet.hub), fleet.hub.name)
        await producer.send(EventData(b"six", properties={"unit": "W"}, message_id="m"), partition_key="sensor-7")
        await producer.aclose()
        (number,) = (each.sequence_number for each in fleet.hub.events("0") if each.partition_key == "sensor-7")
        began = datetime.now(UTC)
        await _start(fleet, _fails_on(number), failure_policy=Park("parked"), open_sender=other.open_sender)
        await asyncio.sleep(5)
        (event,), (facts,) = other.events, other.facts
        assert (event.body, event.partition_key, event.message_id) == (b"six", "sensor-7", "m")
        assert event.properties["unit"] == "W"
        assert (facts.hub, facts.partition, facts.sequence_number) == ("telemetry", "0", number)
        assert (facts.consumer_group, facts.attempts, facts.host) == ("$Default", 2, "a")
        assert (facts.error, facts.message) == ("ValueError", "poison")
        assert facts.offset == next(each.offset for each in fleet.hub.events("0") if each.sequence_number == number)
        assert began <= facts.first_failed
        assert [(each.sequence_number, each.hub, each.attempts) for each in fleet.reported("a", EventParked)] == [
            (number, "parked", 2)
        ]
        assert fleet.checkpoint("0") == 5
        assert [each.is_closed for each in other.opened] == [False]
    assert [each.is_closed for each in other.opened] == [True]


@pytest.mark.parametrize("kind", ["function", "producer", "buffered"])
async def test_event_is_parked_where_the_program_says(kind: str) -> None:
    """By a function of its own, a producer of its own, or one that returns a receipt first."""
    seen: list[tuple[str, int, str]] = []

    async def keep(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        await asyncio.sleep(1)
        seen.append((context.partition_id, event.sequence_number, str(error)))

    class Producer:
        hub = "elsewhere"

        async def send(self, event: EventData, *, partition_key: str | None = None) -> Awaitable[object] | None:
            async def stored() -> None:
                await asyncio.sleep(1)
                seen.append(("0", event.properties["eventpump.parked.sequence_number"], "poison"))

            if kind == "buffered":
                return stored()
            await stored()
            return None

        async def aclose(self, deadline: float | None = None) -> None:
            raise AssertionError("it is the program's own")

    async with stocked(5) as fleet:
        await _start(fleet, _fails_on(1, 2), failure_policy=Park(keep if kind == "function" else Producer()))
        await fleet.until(lambda: fleet.checkpoint("0") == 0, 2, step=0.01)
        assert seen == []
        await asyncio.sleep(5)
        assert seen == [("0", 1, "poison"), ("0", 2, "poison")]
        hub = None if kind == "function" else "elsewhere"
        assert [(each.sequence_number, each.hub) for each in fleet.reported("a", EventParked)] == [(1, hub), (2, hub)]
        assert fleet.checkpoint("0") == 4


async def test_nothing_passes_an_event_that_cannot_be_parked() -> None:
    """It is tried again with growing delays, each time reported and passed to `process_error`, until it is stored."""
    other = _Other()
    other.hub.refuse(ServiceBusyError("throttled"), operation="send", times=float("inf"))
    async with stocked(5) as fleet:
        await _start(
            fleet,
            _fails_on(2),
            failure_policy=Park("parked"),
            open_sender=other.open_sender,
            handler_retry=RetryOptions(base_delay=1, max_delay=100),
        )
        await asyncio.sleep(200)
        failed = _failures(fleet, "park")
        assert 4 <= len(failed) <= 40
        assert [each.failures for each in failed] == list(range(1, len(failed) + 1))
        assert all(each.delay is not None for each in failed)
        assert [error for _, _, error in fleet.record.errors][2:] == [each.error for each in failed]
        assert fleet.record.deliveries[-1].numbers == (2,)
        assert fleet.checkpoint("0") == 1
        other.hub.accept()
        await fleet.until(lambda: fleet.checkpoint("0") == 4, 200)
        assert [facts.sequence_number for facts in other.facts] == [2]
        assert len(fleet.reported("a", EventParked)) == 1


@pytest.mark.parametrize("misbehaves", ["raises", "odd", "cancels", "hangs", "not async"])
async def test_function_that_misbehaves_is_called_again(misbehaves: str) -> None:
    """Whatever it does, the event is parked only once it has returned."""
    calls: list[int] = []

    async def park(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        calls.append(event.sequence_number)
        if len(calls) > 2:
            return
        if misbehaves == "raises":
            raise OSError("no disk")
        if misbehaves == "odd":
            raise _Oddity("odd")
        if misbehaves == "hangs":
            await asyncio.sleep(1e6)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    def plain(context: PartitionContext, event: ReceivedEvent, error: Exception) -> Any:
        if len(calls) > 1:
            return park(context, event, error)
        calls.append(event.sequence_number)
        return None

    async with stocked(5) as fleet:
        await _start(
            fleet,
            _fails_on(2),
            failure_policy=Park(plain if misbehaves == "not async" else park),
            handler_timeout=5,
            on_handler_timeout="cancel",
            handler_retry=RetryOptions(base_delay=0.1, max_delay=0.1),
        )
        await asyncio.sleep(30)
        assert set(calls) == {2}
        assert len(_failures(fleet, "park")) == 2
        assert [report.operation for report in fleet.reported("a", HandlerSlow)] == ["park"] * 2 * (
            misbehaves == "hangs"
        )
        assert len(fleet.reported("a", EventParked)) == 1
        assert fleet.checkpoint("0") == 4


async def test_host_that_closes_while_it_cannot_park_closes_at_once() -> None:
    """The event stays before the checkpoint, and the next host parks it."""
    other = _Other()
    other.hub.refuse(ConnectionLostError("gone"), operation="send", times=float("inf"))
    slow = RetryOptions(base_delay=5000, max_delay=5000)
    options: dict[str, Any] = {"failure_policy": Park("parked"), "open_sender": other.open_sender}
    async with stocked(5) as fleet:
        await _start(fleet, _fails_on(2), handler_retry=slow, **options)
        await asyncio.sleep(10)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await fleet.hosts["a"].aclose()
        assert loop.time() - began < 1
        assert fleet.record.reasons("a", "0") == [CloseReason.SHUTDOWN]
        assert fleet.checkpoint("0") == 1
        other.hub.accept()
        await _start(fleet, _fails_on(2), "b", **options)
        await asyncio.sleep(10)
        assert [(facts.sequence_number, facts.host) for facts in other.facts] == [(2, "b")]
        assert fleet.checkpoint("0") == 4


async def test_lease_that_is_lost_while_parking_moves_no_checkpoint() -> None:
    """The function has its grace and is cancelled; the next owner parks the event, maybe for the second time."""
    calls: list[str] = []

    async def park(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        calls.append(f"{context.owner_id} begins")
        if context.owner_id == "a":
            try:
                await asyncio.sleep(1e6)
            finally:
                calls.append("cancelled")
        calls.append(f"{context.owner_id} parked {event.sequence_number}")

    async with stocked(5) as fleet:
        await _start(fleet, _fails_on(2), failure_policy=Park(park), ownership_lost_grace=3)
        await asyncio.sleep(5)
        await _steal(fleet)
        await fleet.until(lambda: "cancelled" in calls, 20)
        assert fleet.record.reasons("a", "0") == [CloseReason.OWNERSHIP_LOST]
        assert fleet.reported("a", EventParked) == []
        assert fleet.checkpoint("0") == 1
        await fleet.hosts["a"].aclose()
        await _start(fleet, _fails_on(2), "b", failure_policy=Park(park))
        await asyncio.sleep(60)
        assert calls == ["a begins", "cancelled", "b begins", "b parked 2"]
        assert fleet.checkpoint("0") == 4


async def test_event_parked_right_before_a_crash_is_parked_again() -> None:
    """With the same hub, partition and number, by which a reader knows it."""
    other = _Other()
    options: dict[str, Any] = {"failure_policy": Park("parked"), "open_sender": other.open_sender}
    async with stocked(5) as fleet:
        host = fleet.host(
            "a", RecordingProcessor(fleet.record, on_events=_fails_on(2)), checkpoint_policy=EACH, **options
        )
        for operation in ("write", "release"):
            fleet.stores["a"].hang(operation)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        assert len(fleet.reported("a", EventParked)) == 1
        assert fleet.reported("a", CheckpointWritten) == []
        for operation in ("renew", "acquire", "steal"):
            fleet.stores["a"].hang(operation)
        await asyncio.sleep(40)
        await _start(fleet, _fails_on(2), "b", **options)
        await asyncio.sleep(60)
        assert [(facts.hub, facts.partition, facts.sequence_number) for facts in other.facts] == [
            ("telemetry", "0", 2)
        ] * 2
        assert [facts.host for facts in other.facts] == ["a", "b"]
        assert fleet.checkpoint("0") == 4


async def test_pause_amid_a_narrowed_batch_repeats_no_event_of_it() -> None:
    """What was processed, skipped or parked of it before the pause is not delivered, or parked, again."""
    parked, failing = list[int](), [True]

    async def park(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        if event.sequence_number == 3 and failing[0]:
            raise OSError("no disk")
        parked.append(event.sequence_number)

    async with stocked(6) as fleet:
        retry = RetryOptions(base_delay=0.1, max_delay=0.1)
        await _start(fleet, _fails_on(1, 3), failure_policy=Park(park), handler_retry=retry)
        await fleet.until(lambda: bool(_failures(fleet, "park")), 5)
        fleet.hosts["a"].pause("default")
        await asyncio.sleep(5)
        failing.clear()
        failing.append(False)
        before = len(fleet.record.deliveries)
        assert (parked, fleet.checkpoint("0")) == ([1], 2)
        fleet.hosts["a"].resume("default")
        await asyncio.sleep(5)
        assert _batches(fleet)[before:] == [(3, 4, 5), (3,), (4,), (5,)]
        assert (parked, fleet.checkpoint("0")) == ([1, 3], 5)


async def test_each_subscription_has_its_own_policy() -> None:
    """One parks what it fails on, another skips it, and the host's own is tried again; none holds another's events."""
    other = _Other()
    records = {name: Record() for name in ("parks", "skips")}
    async with stocked() as fleet:
        host = fleet.host(
            "a",
            RecordingProcessor(fleet.record, on_events=_fails_on(2)),
            open_sender=other.open_sender,
            handler_retry=RetryOptions(base_delay=5000, max_delay=5000),
        )
        for name, policy in (("parks", Park("parked")), ("skips", "skip")):
            processor = RecordingProcessor(records[name], on_events=_fails_on(2))
            await host.subscribe(name, processor, failure_policy=policy, checkpoint_policy=EACH)  # type: ignore[arg-type]  # the type of the tuple
        fleet.hub.publish("0", count=5)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(10)
        assert [each.subscription for each in fleet.reported("a", EventParked)] == ["parks"]
        assert [each.subscription for each in fleet.reported("a", EventSkipped)] == ["skips"]
        assert _batches(fleet) == [(0, 1, 2, 3, 4)]
        for record in records.values():
            assert record.deliveries[-1].numbers == (4,)


async def test_each_subscription_has_its_own_time_for_a_handler() -> None:
    """One whose handler hangs is cancelled and skips; the host's own, with more time, is not."""
    slow = Record()

    async def hang(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(20)

    async with stocked() as fleet:
        host = fleet.host("a", RecordingProcessor(fleet.record, on_events=hang), checkpoint_policy=EACH)
        await host.subscribe(
            "slow",
            RecordingProcessor(slow, on_events=hang),
            handler_timeout=5,
            on_handler_timeout="cancel",
            failure_policy="skip",
            checkpoint_policy=EACH,
        )
        fleet.hub.publish("0", count=1)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(30)
        assert [(each.subscription, each.is_cancelled) for each in fleet.reported("a", HandlerSlow)] == [("slow", True)]
        assert [each.subscription for each in fleet.reported("a", EventSkipped)] == ["slow"]
        assert fleet.checkpoint("0") == 0


# --------------------------------------------------------------------------------------------------- stop_partition


@pytest.mark.parametrize("retries", [0, 2])
async def test_stop_partition_leaves_the_partition_and_no_other(retries: int) -> None:
    """Reported, with the lease released; it is tried again after a lease's time. The host goes on."""

    async def handle(context: PartitionContext, events: Events) -> None:
        if context.partition_id == "1":
            raise KeyError("poison")

    options: dict[str, Any] = {"failure_policy": "stop_partition"}
    if retries:
        retry = RetryOptions(max_retries=retries, base_delay=0.1, max_delay=0.1)
        options = {"on_retries_exhausted": "stop_partition", "handler_retry": retry}
    async with stocked(5, 2) as fleet:
        await _start(fleet, handle, **options)
        await asyncio.sleep(10)
        assert fleet.owned("a") == {"0"}
        (failed,) = fleet.reported("a", PartitionFailed)
        assert isinstance(failed.error, ProcessorFailedError)
        assert (failed.partition_id, failed.avoided_for) == ("1", 30)
        assert isinstance(failed.error.__cause__, KeyError)
        assert [each.partition_id for each in fleet.reported("a", LeaseReleased)] == ["1"]
        assert fleet.record.reasons("a", "1") == [CloseReason.FAILED]
        assert len(fleet.record.errors) == retries + 1
        assert fleet.checkpoint("0") == 4
        await asyncio.sleep(60)
        assert len(fleet.record.errors) >= 2 * (retries + 1)
        assert not fleet.runs["a"].done()
        assert fleet.checkpoint("1") is None


async def test_stop_partition_of_one_subscription_leaves_the_others_theirs() -> None:
    """They share the partition's link, which goes on."""
    failing = Record()
    async with stocked() as fleet:
        host = await fleet.start("a")
        processor = RecordingProcessor(failing, on_events=_fails_on(1))
        await host.subscribe("fails", processor, failure_policy="stop_partition", max_batch_size=1)
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == list(range(6))
        assert failing.numbers("0") == [0, 1]
        assert [each.subscription for each in fleet.reported("a", PartitionFailed)] == ["fails"]
        assert fleet.reported("a", LeaseReleased) == []
        await asyncio.sleep(60)
        assert len(failing.numbers("0")) > 2


async def test_open_that_fails_for_good_leaves_the_partition() -> None:
    """Where the policy after the last retry would pass over events, of which there are none."""

    async def fail(context: PartitionContext) -> None:
        raise OSError("no database")

    async with stocked() as fleet:
        processor = RecordingProcessor(fleet.record, on_open=fail)
        await fleet.start("a", processor, on_retries_exhausted="skip", handler_retry=TWICE)
        await asyncio.sleep(10)
        assert len(fleet.reported("a", PartitionFailed)) == 1
        assert not fleet.runs["a"].done()


async def test_after_the_last_retry_an_event_is_parked() -> None:
    """What follows the retries may be parking too."""
    other = _Other()
    async with stocked(3) as fleet:
        await _start(
            fleet, _fails_on(1), on_retries_exhausted=Park("parked"), handler_retry=TWICE, open_sender=other.open_sender
        )
        await asyncio.sleep(10)
        assert _batches(fleet) == [(0, 1, 2), (0, 1, 2), (0,), (1,), (1,), (2,)]
        assert [facts.attempts for facts in other.facts] == [4]
        assert fleet.checkpoint("0") == 2


# ----------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("name", ["failure_policy", "on_retries_exhausted"])
async def test_parking_in_the_hub_that_is_read_is_refused(name: str) -> None:
    """Its events would come back, and fail again."""
    options: dict[str, Any] = {name: Park("Telemetry")}
    with pytest.raises(ConfigurationError, match=f"{name}: events of hub telemetry cannot be parked there"):
        Fleet().host("a", **options)
    async with stocked() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        with pytest.raises(ConfigurationError, match=name):
            await host.subscribe("x", RecordingProcessor(Record()), **options)


@pytest.mark.parametrize("to", [5, "a hub?", RecordingProcessor, None])
def test_what_nothing_can_be_parked_to_is_refused(to: Any) -> None:
    """At once, by the name of the argument."""
    with pytest.raises(ConfigurationError, match="to: "):
        Park(to)


def test_idempotent_producer_cannot_park() -> None:
    """It sends to partitions only, and a parked event keeps its key."""
    transport = FakeTransport(FakeHub("parked"))
    with pytest.raises(ConfigurationError, match="idempotent"):
        Park(HubProducer(transport, "parked", idempotent=True))
    assert repr(Park("parked")) == "Park('parked')"
