"""A host by itself: what its processor is promised."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import CloseReason, EventProcessor, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.pump_state import PumpState
from eventpump.errors import (
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    EntityNotFoundError,
    EventPumpError,
    OwnershipLostError,
    ProcessorFailedError,
    ServiceTimeoutError,
    StoreError,
)
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import HostSettings
from eventpump.reports import (
    CheckpointDropped,
    HostReport,
    LoopBlocked,
    PartitionFailed,
    ProcessorFailed,
    PumpOverdue,
    ServiceFailed,
    StoreFailed,
    UnexpectedFailure,
)
from eventpump.storage.leases.memory import MemoryLeaseStore
from eventpump.testing.clock import VirtualClock
from eventpump.testing.transport import FakeTransport
from tests.support.fleet import Fleet, RecordingProcessor, stocked

Events = Sequence[ReceivedEvent]


async def _nothing(context: PartitionContext, events: Events) -> None:
    pass


# ------------------------------------------------------------------------------------------------------ delivering


async def test_run_delivers_every_event_once_in_order() -> None:
    """A host alone delivers every event of every partition, in order, each once."""
    async with stocked(partitions=4) as fleet:
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, count=700)
        await fleet.start("a")
        await asyncio.sleep(30)
        for partition_id in fleet.hub.partition_ids:
            assert fleet.record.numbers(partition_id) == list(range(700))
            assert fleet.checkpoint(partition_id) == 699


async def test_process_events_gets_bounded_batches_at_once(clock: VirtualClock) -> None:
    """A batch holds one event or more, at most `max_batch_size`, and what is there is delivered at once."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=100)
        await fleet.start("a", max_batch_size=30, max_wait_time=600)
        await asyncio.sleep(60)
        sizes = [len(delivery.numbers) for delivery in fleet.record.deliveries]
        assert sum(sizes) == 100
        assert max(sizes) == 30
        assert min(sizes) >= 1
        began = clock.monotonic()
        fleet.hub.publish("0", "late")
        await asyncio.sleep(0.001)
        assert fleet.record.deliveries[-1].numbers == (100,)
        assert fleet.record.deliveries[-1].at == began


@pytest.mark.parametrize("is_asked", [True, False])
async def test_process_events_is_called_empty_only_with_max_wait_time(is_asked: bool) -> None:
    """An idle partition's processor is called without events every `max_wait_time`, if and only if that is wanted."""
    async with stocked() as fleet:
        await fleet.start("a", call_when_idle=is_asked, max_wait_time=10)
        await asyncio.sleep(65)
        assert [delivery.numbers for delivery in fleet.record.deliveries] == ([()] * 6 if is_asked else [])


async def test_context_has_names_last_event_newest_event_and_lag() -> None:
    """The context names hub, group, partition and host, and knows last event, newest event, and lag."""
    seen: list[PartitionContext] = []

    async def look(context: PartitionContext, events: Events) -> None:
        if not seen:
            assert context.last_delivered is events[-1]
            assert context.last_sequence_number == 9
            assert context.last_offset == "fake:9"
            assert context.last_enqueued_time == events[-1].enqueued_time
            assert context.retrieval_time is not None
            assert context.lag == 9 - events[-1].sequence_number == 5
            seen.append(context)

    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        await fleet.start(
            "a", RecordingProcessor(fleet.record, on_events=look), max_batch_size=5, track_last_enqueued=True
        )
        await asyncio.sleep(5)
        (context,) = seen
        assert (context.hub, context.consumer_group, context.partition_id) == ("telemetry", "$Default", "0")
        assert (context.owner_id, context.owner_level) == ("a", 1)
        assert context.fully_qualified_namespace == "fake.servicebus.windows.net"
        assert context.lag == 0


async def test_context_lag_is_unknown_without_tracking() -> None:
    """Without runtime metrics the context knows of no newest event, and says so."""
    lags: list[int | None] = []

    async def look(context: PartitionContext, events: Events) -> None:
        lags.append(context.lag)

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=look))
        await asyncio.sleep(5)
    assert lags == [None]


async def test_processor_of_one_partition_is_called_from_one_task() -> None:
    """All four methods of an ownership run in one task, one after the other."""
    tasks: dict[str, set[Any]] = {}
    running: set[str] = set()

    async def step(context: PartitionContext, *_: object) -> None:
        assert context.partition_id not in running
        running.add(context.partition_id)
        tasks.setdefault(context.partition_id, set()).add(asyncio.current_task())
        await asyncio.sleep(0.5)
        running.discard(context.partition_id)

    fails = [True]

    async def events(context: PartitionContext, batch: Events) -> None:
        await step(context)
        if fails:
            fails.clear()
            raise ValueError("once")

    async with stocked(partitions=2) as fleet:
        fleet.hub.publish("0", count=500)
        fleet.hub.publish("1", count=500)
        processor = RecordingProcessor(fleet.record, on_events=events, on_open=step, on_error=step, on_close=step)
        await fleet.start("a", processor)
        await asyncio.sleep(60)
    assert len(fleet.record.errors) == 1
    assert len(fleet.record.closed) == 2
    assert {partition: len(of) for partition, of in tasks.items()} == {"0": 1, "1": 1}


async def test_processor_class_gives_each_ownership_an_instance() -> None:
    """A processor given as a class is made once per ownership."""
    made: list[EventProcessor] = []

    class Own(EventProcessor):
        def __init__(self) -> None:
            made.append(self)
            self.partitions: set[str] = set()

        async def process_events(self, context: PartitionContext, events: Events) -> None:
            self.partitions.add(context.partition_id)

    async with stocked(partitions=3) as fleet:
        for partition_id in "012":
            fleet.hub.publish(partition_id, "a")
        await fleet.start("a", Own)
        await asyncio.sleep(5)
    assert len(made) == 3
    assert sorted(map(len, (each.partitions for each in made if isinstance(each, Own)))) == [1, 1, 1]


async def test_process_events_of_a_slow_partition_delays_no_other() -> None:
    """While one partition's handler takes forever, the others flow."""

    async def slow(context: PartitionContext, events: Events) -> None:
        if context.partition_id == "0":
            await asyncio.sleep(1e6)

    async with stocked(partitions=3) as fleet:
        for partition_id in "012":
            fleet.hub.publish(partition_id, count=1000)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=slow))
        await asyncio.sleep(120)
        assert len(fleet.record.numbers("1")) == len(fleet.record.numbers("2")) == 1000
        assert len(fleet.record.numbers("0")) < 1000
        assert fleet.owned("a") == {"0", "1", "2"}


async def test_process_events_that_never_waits_lets_the_loop_turn() -> None:
    """A backlog processed by code that never suspends does not keep renewals and other partitions waiting."""
    clock = VirtualClock()
    turns: list[float] = []

    async def busy(context: PartitionContext, events: Events) -> None:
        clock.block(1.0)

    async def tick() -> None:
        while True:
            turns.append(clock.monotonic())
            await asyncio.sleep(0.1)

    async with stocked() as fleet:
        fleet.hub.publish("0", count=200)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=busy), max_batch_size=1)
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(150)
        ticking.cancel()
        assert max(later - sooner for sooner, later in pairwise(turns)) < 5
        assert fleet.owned("a") == {"0"}


# -------------------------------------------------------------------------------------------------- where it begins


async def test_run_begins_after_the_checkpoint() -> None:
    """A later host begins after the checkpoint, whatever the initial position."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)

        async def five(context: PartitionContext, events: Events) -> None:
            await context.checkpoint(events[4])

        await fleet.start("a", RecordingProcessor(fleet.record, on_events=five))
        await asyncio.sleep(5)
        await fleet.hosts["a"].aclose()
        await fleet.start("b", initial_position="@latest")
        await asyncio.sleep(40)
        assert fleet.record.numbers("0", "b") == [5, 6, 7, 8, 9]
        assert fleet.hub.attached[-1].position == EventPosition.at_offset("fake:4")


@pytest.mark.parametrize(
    ("position", "first"),
    [
        ("-1", {"0": 0, "1": 0}),
        ("@latest", {"0": 10, "1": 10}),
        ("fake:3", {"0": 4, "1": 4}),
        (7, {"0": 8, "1": 8}),
        (EventPosition.at_sequence_number(7, inclusive=True), {"0": 7, "1": 7}),
        (datetime(2024, 1, 1, tzinfo=UTC) + timedelta(days=1), {"0": 10, "1": 10}),
        ({"1": "@latest"}, {"0": 0, "1": 10}),
        ({"0": 4, "1": EventPosition.earliest()}, {"0": 5, "1": 0}),
    ],
)
async def test_run_without_a_checkpoint_begins_at_the_initial_position(position: Any, first: dict[str, int]) -> None:
    """Text is an offset, a number a sequence number, a datetime an enqueued time, a mapping goes by partition."""
    async with stocked(partitions=2) as fleet:
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await fleet.start("a", initial_position=position)
        await asyncio.sleep(5)
        for partition_id in "01":
            fleet.hub.publish(partition_id, "new")
        await asyncio.sleep(5)
        for partition_id in "01":
            assert fleet.record.numbers(partition_id) == list(range(first[partition_id], 11))


async def test_run_by_default_begins_at_the_start_of_the_stream() -> None:
    """Nothing that the hub keeps is passed over."""
    assert HostSettings(hub="h").initial_position == EventPosition.earliest()


# ----------------------------------------------------------------------------------------------------- checkpoints


async def test_checkpoint_while_a_write_is_in_flight_makes_one_more() -> None:
    """However many are asked for while a write is in flight: one further write, of the latest, and one at a time."""

    async def each(context: PartitionContext, events: Events) -> None:
        first = asyncio.create_task(context.checkpoint(events[0]))
        await asyncio.sleep(0.1)
        await asyncio.gather(first, *(context.checkpoint(event) for event in events[1:]))

    async with stocked() as fleet:
        fleet.hub.publish("0", count=32)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=each))
        fleet.stores["a"].delay(1.0, "write")
        await asyncio.sleep(20)
        assert [checkpoint.sequence_number for checkpoint in fleet.stores["a"].written] == [0, 31]
        assert fleet.stores["a"].peak_in_flight["write", "0"] == 1


@pytest.mark.parametrize("begun", ["together", "one after the other", "by the program"])
async def test_host_does_not_close_a_store_that_other_code_has_opened(begun: str) -> None:
    """It is refused, by name, and the host that has opened the store goes on with it."""
    async with stocked(10) as fleet:
        first = fleet.host("a")
        store = fleet.stores["a"]
        store.turns = 3
        settings = HostSettings(hub=fleet.hub.name, owner_id="b")
        second = HubHost(lambda: FakeTransport(fleet.hub), store, settings, _nothing)
        if begun == "by the program":
            await store.open(fleet.scope)
            with pytest.raises(ConfigurationError, match="open already"):
                await first.run()
            assert ("close", None) not in store.calls
            return
        fleet.runs["a"] = asyncio.create_task(first.run())
        await asyncio.sleep(0 if begun == "together" else 5)
        with pytest.raises(ConfigurationError, match="lease_store: another host uses this store"):
            await second.run()
        await second.aclose()
        assert ("close", None) not in store.calls
        await asyncio.sleep(60)
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(60)
        assert fleet.record.numbers("0", "a") == list(range(20))
        await first.aclose()
        assert store.calls.count(("close", None)) == 1


@pytest.mark.parametrize("operation", ["acquire", "renew", "list"])
async def test_setting_that_the_store_refuses_ends_a_host_without_a_link(operation: str) -> None:
    """As a name that it cannot store: before the first link no retry could help."""
    async with stocked(partitions=2) as fleet:
        host = fleet.host("a", startup_timeout=20)
        fleet.hub.hang("receive")
        refusal = ConfigurationError("owner", "must be printable ASCII")
        fleet.stores["a"].fail(operation, times=float("inf"), error=refusal)
        async with asyncio.timeout(60):
            with pytest.raises(ConfigurationError, match="owner: must be printable"):
                await host.run()
        assert not fleet.reported("a", StoreFailed)
        fleet.hub.answer("receive")


async def test_setting_that_the_store_refuses_later_is_reported() -> None:
    """A host that had a link goes on, and tries again."""
    async with stocked(partitions=2) as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.stores["a"].fail("renew", times=3, error=ConfigurationError("owner", "must be printable ASCII"))
        await asyncio.sleep(60)
        assert len(fleet.reported("a", StoreFailed)) == 3
        assert fleet.owned("a") == {"0", "1"}


async def test_checkpoint_returns_when_it_is_stored() -> None:
    """When `checkpoint` returns the store has it."""
    stored: list[tuple[int, int | None]] = []

    async with stocked() as fleet:

        async def ask(context: PartitionContext, events: Events) -> None:
            await context.checkpoint()
            stored.append((events[-1].sequence_number, fleet.checkpoint("0")))

        fleet.hub.publish("0", count=100)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=ask), max_batch_size=7)
        fleet.stores["a"].delay(0.3, "write")
        await asyncio.sleep(30)
    assert stored
    assert all(asked == found for asked, found in stored)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (CheckpointPolicy(every_events=10, on_close=False), [9, 19, 29, 39]),
        (CheckpointPolicy(every_seconds=9.5, on_close=False), [9, 19, 29, 39]),
        (CheckpointPolicy(), [44]),
        (CheckpointPolicy(every_events=20), [19, 39, 44]),
        (CheckpointPolicy.manual(), []),
    ],
    ids=["events", "seconds", "close", "both", "manual"],
)
async def test_checkpoint_policies_by_count_time_and_close(policy: CheckpointPolicy, expected: list[int]) -> None:
    """By count, by time and on close, as declared and not otherwise; one event a second for 45 seconds."""
    async with stocked() as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=_nothing), checkpoint_policy=policy)
        await asyncio.sleep(0.5)
        for _ in range(45):
            fleet.hub.publish("0", "a")
            await asyncio.sleep(1)
        await fleet.hosts["a"].aclose()
        assert [checkpoint.sequence_number for checkpoint in fleet.stores["a"].written] == expected


async def test_checkpoint_by_time_is_made_in_a_quiet_partition() -> None:
    """After the last event of a burst, the time alone makes the checkpoint."""
    async with stocked() as fleet:
        processor = RecordingProcessor(fleet.record, on_events=_nothing)
        await fleet.start("a", processor, checkpoint_policy=CheckpointPolicy(every_seconds=5))
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(4)
        assert fleet.checkpoint("0") is None
        await asyncio.sleep(2)
        assert fleet.checkpoint("0") == 2


async def test_checkpoint_write_that_fails_is_reported_and_repeated() -> None:
    """A checkpoint the store fails to take is reported and tried again until it is stored."""
    async with stocked() as fleet:
        fleet.hub.publish("0", "a", "b")
        await fleet.start(
            "a", RecordingProcessor(fleet.record, on_events=_nothing), checkpoint_policy=CheckpointPolicy(1)
        )
        fleet.stores["a"].fail("write", times=4)
        await asyncio.sleep(60)
        assert fleet.checkpoint("0") == 1
        assert len(fleet.reported("a", StoreFailed, "0")) == 4


async def test_checkpoint_raises_where_the_store_keeps_failing() -> None:
    """`checkpoint()` raises after several failures rather than wait forever; the events come again, none is lost."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=3)
        await fleet.start("a")
        fleet.stores["a"].fail("write", times=5)
        await asyncio.sleep(120)
        # How many of the later failures meet a handler that was called again meanwhile is left to chance.
        assert {type(error) for _, _, error in fleet.record.errors} == {StoreError}
        assert len(fleet.record.errors) <= 3
        assert fleet.checkpoint("0") == 2


async def test_checkpoint_write_without_an_answer_is_repeated() -> None:
    """A write that hangs is cut off before the lease could run out, reported, and repeated."""
    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start(
            "a", RecordingProcessor(fleet.record, on_events=_nothing), checkpoint_policy=CheckpointPolicy(1)
        )
        fleet.stores["a"].hang("write")
        await asyncio.sleep(19)
        failed = fleet.reported("a", StoreFailed, "0")
        assert failed
        assert "no answer" in str(failed[0].error)
        fleet.stores["a"].heal()
        await asyncio.sleep(10)
        assert fleet.checkpoint("0") == 0


async def test_checkpoint_of_an_event_not_delivered_is_refused() -> None:
    """What was not delivered cannot be checkpointed, which would lose events."""
    errors: list[Exception] = []

    async def beyond(context: PartitionContext, events: Events) -> None:
        ahead = ReceivedEvent.build(b"", offset="fake:99", sequence_number=99, enqueued_time=datetime.now(UTC))
        try:
            await context.checkpoint(ahead)
        except ConfigurationError as error:
            errors.append(error)

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=beyond))
        await asyncio.sleep(5)
        assert len(errors) == 1
        assert fleet.checkpoint("0") is None


async def test_checkpoint_whose_call_is_cancelled_is_still_written() -> None:
    """Breaking off `checkpoint` does not take the wish back."""

    async def hurried(context: PartitionContext, events: Events) -> None:
        try:
            async with asyncio.timeout(0.5):
                await context.checkpoint()
        except TimeoutError:
            pass

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=hurried))
        fleet.stores["a"].delay(2, "write")
        await asyncio.sleep(10)
        assert fleet.checkpoint("0") == 0


async def test_checkpoint_in_close_is_written_before_the_release() -> None:
    """On shutdown `close` may still checkpoint, and the next owner begins there."""

    async def last(context: PartitionContext, reason: CloseReason) -> None:
        await context.checkpoint()

    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=_nothing, on_close=last))
        await asyncio.sleep(5)
        fleet.stores["a"].delay(1, "write")
        await fleet.hosts["a"].aclose()
        operations = [operation for operation, _ in fleet.stores["a"].calls]
        assert fleet.checkpoint("0") == 9
        assert operations.index("write") < operations.index("release")
        assert fleet.owner("0") is None


async def test_checkpoint_that_cannot_be_stored_at_close_is_reported() -> None:
    """Where the last checkpoint does not get through in time, that is said, and closing still ends in time."""
    clock = VirtualClock()
    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        await fleet.start(
            "a", RecordingProcessor(fleet.record, on_events=_nothing), checkpoint_policy=CheckpointPolicy()
        )
        await asyncio.sleep(5)
        fleet.stores["a"].hang("write")
        began = clock.monotonic()
        await fleet.hosts["a"].aclose(deadline=8)
        assert clock.monotonic() - began < 10
        assert [reported.checkpoint.sequence_number for reported in fleet.reported("a", CheckpointDropped)] == [9]


# --------------------------------------------------------------------------------------------------------- failures


async def test_process_events_that_raises_gets_the_same_events_again() -> None:
    """A batch whose handler raised comes again, the same events and nothing else, until it is processed."""
    batches: list[list[int]] = []

    async def third_time(context: PartitionContext, events: Events) -> None:
        batches.append([event.sequence_number for event in events])
        if len(batches) < 3:
            raise ValueError("not yet")

    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        await fleet.start(
            "a",
            RecordingProcessor(fleet.record, on_events=third_time),
            checkpoint_policy=CheckpointPolicy(every_events=1),
        )
        await asyncio.sleep(0.2)
        fleet.hub.publish("0", count=5)
        await asyncio.sleep(60)
        assert batches[0] == batches[1] == batches[2] == list(range(10))
        assert [number for batch in batches[3:] for number in batch] == list(range(10, 15))
        assert [str(error) for _, _, error in fleet.record.errors] == ["not yet"] * 2
        assert [report.failures for report in fleet.reported("a", ProcessorFailed)] == [1, 2]


async def test_process_events_cannot_change_the_batch_that_is_retried() -> None:
    """The batch a handler gets cannot be changed, so that a retry gives all of it."""
    kinds: list[type] = []

    async def look(context: PartitionContext, events: Events) -> None:
        kinds.append(type(events))

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=look))
        await asyncio.sleep(2)
    assert kinds == [tuple]


async def test_checkpoint_does_not_pass_a_batch_that_fails() -> None:
    """While a batch fails, no automatic checkpoint passes it, not even on close."""

    async def poison(context: PartitionContext, events: Events) -> None:
        if events[-1].sequence_number >= 5:
            raise ValueError("poison")

    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        await fleet.start(
            "a",
            RecordingProcessor(fleet.record, on_events=poison),
            checkpoint_policy=CheckpointPolicy(every_events=1, every_seconds=1),
            max_batch_size=5,
        )
        await asyncio.sleep(100)
        await fleet.hosts["a"].aclose()
        assert fleet.checkpoint("0") == 4


async def test_close_ends_the_delay_of_a_retry(clock: VirtualClock) -> None:
    """A host that closes does not wait for the next try of a failed batch."""

    async def poison(context: PartitionContext, events: Events) -> None:
        raise ValueError("poison")

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start(
            "a",
            RecordingProcessor(fleet.record, on_events=poison),
            handler_retry=RetryOptions(base_delay=5000, max_delay=5000),
        )
        await asyncio.sleep(5)
        assert len(fleet.record.deliveries) == 1
        began = clock.monotonic()
        await fleet.hosts["a"].aclose()
        assert clock.monotonic() - began < 1
        assert fleet.record.reasons("a", "0") == [CloseReason.SHUTDOWN]


async def test_handler_retry_with_a_limit_stops_the_host() -> None:
    """A batch that fails once more than the limit allows ends the host, as the policy `stop` does at the first time."""

    async def poison(context: PartitionContext, events: Events) -> None:
        raise KeyError("poison")

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        processor = RecordingProcessor(fleet.record, on_events=poison)
        host = fleet.host("a", processor, handler_retry=RetryOptions(max_retries=2))
        with pytest.raises(ProcessorFailedError, match="partition 0: process_events"):
            await host.run()
        assert len(fleet.record.deliveries) == 3
        assert [report.delay is None for report in fleet.reported("a", ProcessorFailed)] == [False, False, True]


async def test_policy_stop_raises_the_handlers_failure_from_run() -> None:
    """With the policy `stop`, `run` raises the failure with its cause, after every partition is closed and released."""

    async def poison(context: PartitionContext, events: Events) -> None:
        if context.partition_id == "1":
            raise KeyError("poison")
        await context.checkpoint()

    async with stocked(partitions=3) as fleet:
        host = fleet.host("a", RecordingProcessor(fleet.record, on_events=poison), failure_policy="stop")
        for partition_id in "012":
            fleet.hub.publish(partition_id, count=5)
        with pytest.raises(ProcessorFailedError, match="partition 1: process_events") as caught:
            await host.run()
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.value.partition_id == "1"
        assert [type(error) for _, _, error in fleet.record.errors] == [KeyError]
        assert sorted(partition_id for _, partition_id, _ in fleet.record.closed) == ["0", "1", "2"]
        assert [fleet.owner(partition_id) for partition_id in "012"] == [None] * 3
        assert fleet.checkpoint("1") is None


async def test_policy_stop_does_not_wait_for_process_error() -> None:
    """A `process_error` that hangs does not keep a failed host alive."""

    async def poison(context: PartitionContext, events: Events) -> None:
        raise KeyError("poison")

    async def hang(context: PartitionContext, error: Exception) -> None:
        await asyncio.sleep(1e6)

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        host = fleet.host("a", RecordingProcessor(fleet.record, on_events=poison, on_error=hang), failure_policy="stop")
        async with asyncio.timeout(60):
            with pytest.raises(ProcessorFailedError):
                await host.run()


async def test_process_error_that_raises_is_reported_only() -> None:
    """What `process_error` raises is reported; the batch is tried again all the same."""
    failing = [1, 1]

    async def twice(context: PartitionContext, events: Events) -> None:
        if failing:
            failing.pop()
            raise ValueError("poison")

    async def worse(context: PartitionContext, error: Exception) -> None:
        raise RuntimeError("worse")

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=twice, on_error=worse))
        await asyncio.sleep(30)
        assert [report.operation for report in fleet.reported("a", ProcessorFailed)] == [
            "process_events",
            "process_error",
        ] * 2
        assert len(fleet.record.deliveries) == 3


@pytest.mark.parametrize("policy", ["retry", "stop"])
async def test_open_that_raises_follows_the_failure_policy(policy: str) -> None:
    """An `open` that raises is tried again, or ends the host; `close` follows only an `open` that returned."""
    failing = [1, 1]

    async def twice(context: PartitionContext) -> None:
        if failing:
            failing.pop()
            raise OSError("no database")

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        host = fleet.host("a", RecordingProcessor(fleet.record, on_open=twice), failure_policy=policy)
        if policy == "stop":
            with pytest.raises(ProcessorFailedError, match="open failed"):
                await host.run()
            assert fleet.record.closed == []
        else:
            running = asyncio.create_task(host.run())
            await asyncio.sleep(30)
            assert fleet.record.numbers("0") == [0]
            await host.aclose()
            await running
            assert fleet.record.reasons("a", "0") == [CloseReason.SHUTDOWN]
            assert [type(error) for _, _, error in fleet.record.errors] == [OSError] * 2


async def test_handler_that_raises_cancelled_error_is_retried() -> None:
    """A handler that ends with a cancellation of its own making is retried, and does not take the pump with it."""
    failing = [1]

    async def once(context: PartitionContext, events: Events) -> None:
        if failing:
            failing.pop()
            inner = asyncio.create_task(asyncio.sleep(100))
            inner.cancel()
            await inner

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=once))
        await asyncio.sleep(30)
        assert [delivery.numbers for delivery in fleet.record.deliveries] == [(0,), (0,)]


async def test_process_events_without_async_is_named_in_the_error() -> None:
    """A `process_events` without `async` is named in the error."""

    class Plain(EventProcessor):
        def process_events(self, context: PartitionContext, events: Events) -> None:  # type: ignore[override]  # the slip
            return None

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        host = fleet.host("a", Plain, failure_policy="stop")
        with pytest.raises(ProcessorFailedError) as caught:
            await host.run()
        assert "coroutine function" in str(caught.value.__cause__)


async def test_close_of_a_processor_that_raises_is_reported() -> None:
    """What `close` raises is reported, and the lease is released all the same."""

    async def fail(context: PartitionContext, reason: CloseReason) -> None:
        raise ValueError("in close")

    async with stocked() as fleet:
        await fleet.start("a", RecordingProcessor(fleet.record, on_close=fail))
        await asyncio.sleep(5)
        await fleet.hosts["a"].aclose()
        assert [report.operation for report in fleet.reported("a", ProcessorFailed)] == ["close"]
        assert fleet.owner("0") is None


async def test_hook_that_raises_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    """What a hook raises is logged and goes no further."""

    def broken(report: HostReport) -> None:
        raise RuntimeError("hook")

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        host = HubHost(
            lambda: FakeTransport(fleet.hub),
            MemoryLeaseStore(fleet.leases),
            HostSettings(hub="telemetry", owner_id="h"),
            RecordingProcessor(fleet.record),
            hooks=[broken],
        )
        running = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        await host.aclose()
        await running
        assert fleet.record.numbers("0") == [0]
    assert "a hook failed" in caplog.text


# --------------------------------------------------------------------------------------------------------- blocking


async def test_blocked_loop_is_reported_with_its_partition() -> None:
    """A processor that keeps the loop from turning for longer than the renew interval is named."""
    clock = VirtualClock()

    async def block(context: PartitionContext, events: Events) -> None:
        if context.partition_id == "1":
            await asyncio.sleep(0.1)
            clock.block(12)

    async with stocked(partitions=3) as fleet:
        for partition_id in "012":
            fleet.hub.publish(partition_id, "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=block))
        await asyncio.sleep(30)
        blocked = fleet.reported("a", LoopBlocked)
        assert [(report.partition_id, report.operation) for report in blocked] == [("1", "process_events")]
        assert blocked[0].duration == pytest.approx(12)


async def test_blocked_loop_outside_a_processor_is_reported() -> None:
    """Where no processor ran, the standstill is still reported, without a name."""
    clock = VirtualClock()
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        clock.block(25)
        await asyncio.sleep(5)
        assert [report.partition_id for report in fleet.reported("a", LoopBlocked)] == [None]


# -------------------------------------------------------------------------------------------------------- beginning


@pytest.mark.parametrize(
    ("break_it", "options", "error"),
    [
        (lambda fleet: None, {"hub": "another"}, EntityNotFoundError),
        (lambda fleet: None, {"consumer_group": "nobody"}, EntityNotFoundError),
        (lambda fleet: None, {"initial_position": {"0": "-1", "77": "-1"}}, ConfigurationError),
        (
            lambda fleet: fleet.hub.refuse(AuthenticationError("bad key"), operation="hub", times=9),
            {},
            AuthenticationError,
        ),
        (
            lambda fleet: fleet.hub.refuse(AuthenticationError("no right"), operation="receive", times=9),
            {},
            AuthenticationError,
        ),
    ],
    ids=["hub", "group", "position of no partition", "key", "right"],
)
async def test_run_with_a_wrong_hub_key_or_group_raises_one_error(
    break_it: Callable[[Fleet], None],
    options: dict[str, Any],
    error: type[EventPumpError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong hub, key or group ends `run` with its error, soon, without further ado in the log."""
    async with Fleet() as fleet:
        host = fleet.host("a", **options)
        break_it(fleet)
        async with asyncio.timeout(10):
            with pytest.raises(error):
                await host.run()
        assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []
        assert fleet.transports["a"].is_closed
        assert ("close", None) in fleet.stores["a"].calls


@pytest.mark.parametrize("what", ["service", "store"])
async def test_start_that_keeps_failing_is_reported_ever_less_often(what: str) -> None:
    """Each line says for how long it is tried again, and none comes twice; another failure is reported at once."""
    async with stocked() as fleet:
        host = fleet.host("a", startup_timeout=60)
        if what == "service":
            fleet.hub.refuse(ConnectionLostError("connection refused"), operation="hub", times=1e9)
        else:
            fleet.stores["a"].fail("open", times=1e9)
        run = asyncio.create_task(host.run())
        kind = ServiceFailed if what == "service" else StoreFailed
        await asyncio.sleep(40)
        lines = [each.describe() for each in fleet.reported("a", kind)]
        assert 4 <= len(lines) <= 7
        assert len(set(lines)) == len(lines)
        assert all("trying again for " in line for line in lines)
        if what == "service":
            fleet.hub.accept()
            fleet.hub.refuse(ConnectionLostError("no route"), operation="hub", times=1e9)
            await fleet.until(lambda: "no route" in fleet.reported("a", kind)[-1].describe(), within=15)
        with pytest.raises(EventPumpError):
            await run


async def test_run_retries_a_start_that_fails_for_a_moment() -> None:
    """A service or store that is away for a moment delays the start, is reported, and does not end it."""
    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        fleet.hub.refuse(ConnectionLostError("not up yet"), operation="hub", times=3)
        host = fleet.host("a")
        fleet.stores["a"].fail("open", times=2)
        fleet.stores["a"].fail("ensure", times=2)
        running = asyncio.create_task(host.run())
        await asyncio.sleep(50)
        assert fleet.record.numbers("0") == [0]
        assert len(fleet.reported("a", ServiceFailed)) in {1, 2, 3}
        assert len(fleet.reported("a", StoreFailed)) in {2, 3, 4}
        await host.aclose()
        await running


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        (lambda fleet: fleet.hub.refuse(ConnectionLostError("no"), operation="hub", times=1e9), ConnectionLostError),
        (lambda fleet: fleet.hub.hang("hub"), ServiceTimeoutError),
        (lambda fleet: fleet.stores["a"].fail("open", times=1e9), StoreError),
        (lambda fleet: fleet.stores["a"].hang("list"), None),
    ],
    ids=["refused", "silent", "store", "listing"],
)
async def test_run_raises_where_the_start_up_time_out_passes(
    break_it: Callable[[Fleet], None], error: type[EventPumpError] | None, clock: VirtualClock
) -> None:
    """Who cannot be reached within the start-up time-out ends `run`; a listing that hangs does not, it may pass."""
    async with stocked() as fleet:
        host = fleet.host("a", startup_timeout=30)
        break_it(fleet)
        began = clock.monotonic()
        if error is None:
            running = asyncio.create_task(host.run())
            await asyncio.sleep(100)
            assert not running.done()
            fleet.stores["a"].heal()
            await asyncio.sleep(30)
            assert fleet.owned("a") == {"0"}
            await host.aclose()
            await running
        else:
            with pytest.raises(error):
                await host.run()
            assert 20 < clock.monotonic() - began < 35


async def test_close_ends_a_start_at_once(clock: VirtualClock) -> None:
    """A host that is still trying to reach the service closes without waiting for it."""
    async with stocked() as fleet:
        fleet.hub.hang("hub")
        await fleet.start("a")
        await asyncio.sleep(5)
        began = clock.monotonic()
        await fleet.hosts["a"].aclose()
        await fleet.runs["a"]
        assert clock.monotonic() - began < 2
        fleet.hub.answer("hub")


@pytest.mark.parametrize("interval", [30, 31])
def test_renew_interval_not_below_the_lease_is_refused(interval: float) -> None:
    """Leases that run out between renewals would wander forever: such settings are refused, by name."""
    with pytest.raises(ConfigurationError, match="renew_interval"):
        Fleet().host("a", renew_interval=interval)


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 0},
        {"max_wait_time": 0},
        {"failure_policy": "hope"},
        {"on_retries_exhausted": "retry"},
        {"initial_position": 2.5},
        {"on_data_loss": "skip"},
        {"initial_position": {"0": None}},
        {"close_timeout": -1},
        {"ownership_lost_grace": -1},
        {"prefetch_events": 0},
        {"prefetch_bytes": 1},
        {"owner_id": ""},
        {"handler_retry": {"max_delay": 0.001}},
        {"link_retry": {"max_delay": 0.001}},
        {"checkpoint_policy": "often"},
        {"prefetch": 300},
    ],
    ids=lambda options: next(iter(options)),
)
def test_host_options_that_cannot_work_are_refused_by_name(options: dict[str, Any]) -> None:
    """An option that cannot work is refused by its name, before anything is opened."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Fleet().host("a", **options)


# ---------------------------------------------------------------------------------------------------------- closing


async def test_close_drains_checkpoints_and_releases() -> None:
    """The handler finishes its batch, no other follows, the checkpoint is written, then the lease is free."""

    async def slow(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(4)

    async with stocked() as fleet:
        fleet.hub.publish("0", count=1000)
        await fleet.start(
            "a",
            RecordingProcessor(fleet.record, on_events=slow),
            checkpoint_policy=CheckpointPolicy(),
            max_batch_size=10,
        )
        await asyncio.sleep(10)
        delivered = fleet.record.numbers("0")
        await fleet.hosts["a"].aclose(deadline=10)
        await fleet.runs["a"]
        assert fleet.record.numbers("0") == delivered
        assert fleet.checkpoint("0") == delivered[-1]
        assert fleet.record.reasons("a", "0") == [CloseReason.SHUTDOWN]
        assert fleet.owner("0") is None
        assert fleet.hub.owner_levels("0") == []


async def test_close_renews_while_a_handler_runs() -> None:
    """A handler that needs longer than a lease to drain keeps it, given the time."""

    async def slow(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(70)
        await context.checkpoint()

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=slow))
        await asyncio.sleep(2)
        await fleet.hosts["a"].aclose(deadline=200)
        assert fleet.checkpoint("0") == 0


@pytest.mark.parametrize("where", ["open", "process_events", "close", "process_error"])
@pytest.mark.parametrize("is_stubborn", [False, True], ids=["obedient", "stubborn"])
async def test_close_is_bounded_whatever_hangs(where: str, is_stubborn: bool, clock: VirtualClock) -> None:
    """Whatever hangs, closing ends in time and the lease is free; what defies cancellation is reported, once."""
    freed = asyncio.Event()

    async def hang(*_: object) -> None:
        while not freed.is_set():
            try:
                await freed.wait()
            except asyncio.CancelledError:
                if not is_stubborn:
                    raise

    async def fail(context: PartitionContext, events: Events) -> None:
        raise ValueError("to get to process_error")

    parts: dict[str, Any] = {
        "open": {"on_open": hang},
        "process_events": {"on_events": hang},
        "close": {"on_close": hang},
        "process_error": {"on_events": fail, "on_error": hang},
    }
    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, **parts[where]))
        await asyncio.sleep(5)
        began = clock.monotonic()
        await fleet.hosts["a"].aclose(deadline=12)
        await fleet.runs["a"]
        assert clock.monotonic() - began <= 16
        overdue = fleet.reported("a", PumpOverdue)
        assert [report.operation for report in overdue] == ([where] if is_stubborn else [])
        assert fleet.owner("0") is None
        freed.set()
        await asyncio.sleep(1)


async def test_run_cancelled_drains_checkpoints_and_releases() -> None:
    """A cancelled `run` drains, checkpoints and releases, then raises the cancellation."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        await fleet.start(
            "a", RecordingProcessor(fleet.record, on_events=_nothing), checkpoint_policy=CheckpointPolicy()
        )
        await asyncio.sleep(5)
        fleet.runs["a"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await fleet.runs["a"]
        assert fleet.checkpoint("0") == 9
        assert fleet.owner("0") is None
        assert fleet.transports["a"].is_closed


async def test_run_cancelled_twice_cuts_off_the_handlers(clock: VirtualClock) -> None:
    """A second cancellation cuts the handlers off at once instead of waiting out the close time-out."""

    async def hang(context: PartitionContext, events: Events) -> None:
        await asyncio.sleep(1e6)

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=hang), close_timeout=1000)
        await asyncio.sleep(5)
        began = clock.monotonic()
        fleet.runs["a"].cancel()
        await asyncio.sleep(3)
        assert not fleet.runs["a"].done()
        fleet.runs["a"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await fleet.runs["a"]
        assert clock.monotonic() - began < 6
        assert fleet.owner("0") is None


async def test_close_twice_is_fine_and_run_after_it_is_refused() -> None:
    """Closing again changes nothing, before, during and after a run; running again is refused."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        await asyncio.gather(fleet.hosts["a"].aclose(), fleet.hosts["a"].aclose())
        await fleet.hosts["a"].aclose()
        with pytest.raises(ClosedError):
            await fleet.hosts["a"].run()
        unused = fleet.host("b")
        await unused.aclose()
        with pytest.raises(ClosedError):
            await unused.run()


async def test_run_while_running_is_refused() -> None:
    """A second `run` of a running host is refused and harms nothing."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        with pytest.raises(ConfigurationError, match="run"):
            await fleet.hosts["a"].run()
        assert fleet.owned("a") == {"0"}


async def test_stop_from_a_handler_ends_run_in_order() -> None:
    """`stop` from within a handler ends `run` in order, with that handler's work done."""
    async with stocked() as fleet:
        hosts: list[HubHost] = []

        async def enough(context: PartitionContext, events: Events) -> None:
            await context.checkpoint()
            hosts[0].stop()

        fleet.hub.publish("0", count=10)
        hosts.append(fleet.host("a", RecordingProcessor(fleet.record, on_events=enough)))
        async with asyncio.timeout(10):
            await hosts[0].run()
        assert fleet.checkpoint("0") == 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_signal_with_handle_signals_ends_run_in_order(number: signal.Signals) -> None:
    """With `handle_signals`, a signal ends `run` in order, and afterwards the signal has its own effect again."""
    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        before = signal.getsignal(number)
        host = fleet.host("a")
        running = asyncio.create_task(host.run(handle_signals=True))
        await asyncio.sleep(5)
        assert signal.getsignal(number) is not before
        os.kill(os.getpid(), number)
        async with asyncio.timeout(10):
            await running
        assert fleet.owner("0") is None
        assert signal.getsignal(number) == before


async def test_signal_handlers_are_not_installed_by_default() -> None:
    """A host that was not asked to installs no signal handler."""
    before = signal.getsignal(signal.SIGTERM)
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        assert signal.getsignal(signal.SIGTERM) is before


async def test_checkpoint_after_close_is_refused() -> None:
    """A context kept beyond its ownership refuses checkpoints."""
    kept: list[PartitionContext] = []

    async def keep(context: PartitionContext, events: Events) -> None:
        kept.append(context)

    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=keep))
        await asyncio.sleep(5)
        await fleet.hosts["a"].aclose()
        with pytest.raises(OwnershipLostError):
            await kept[0].checkpoint()
        assert kept[0].ownership_lost.is_set()


async def test_close_is_bounded_where_transport_or_store_hang(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing is bounded, whatever the transport and the store do."""
    async with stocked() as fleet:
        await fleet.start("a")
        await asyncio.sleep(5)
        transport, store, asked = fleet.transports["a"], fleet.stores["a"], []

        async def hang() -> None:
            asked.append("transport")
            await asyncio.sleep(600)

        monkeypatch.setattr(transport, "aclose", hang)
        store.hang("close")
        store.hang("release")
        began = clock.monotonic()
        async with asyncio.timeout(60):
            await fleet.hosts["a"].aclose(deadline=5)
        # The deadline goes by with the release; of the seconds beyond it, the transport and the store get one each.
        assert clock.monotonic() - began <= 5 + 4
        assert asked == ["transport"]
        assert ("close", None) in store.calls


# ------------------------------------------------------------------------------------------- one partition in trouble


async def test_partition_refused_by_the_service_does_not_end_the_others() -> None:
    """A partition with a refused checkpoint is reported and left alone for a lease duration; the rest flows."""
    async with stocked(partitions=3) as fleet:
        for partition_id in "012":
            fleet.hub.publish(partition_id, count=5)
        await fleet.start("a")
        await asyncio.sleep(5)
        await fleet.hosts["a"].aclose()
        checkpoints = fleet.leases.checkpoints(fleet.scope)
        checkpoints["1", "default"] = type(checkpoints["1", "default"])("1", "of a hub that was", 4)
        await fleet.start("b")
        await asyncio.sleep(25)
        for partition_id in "012":
            fleet.hub.publish(partition_id, "new")
        await asyncio.sleep(20)
        failed = fleet.reported("b", PartitionFailed)
        assert {report.partition_id for report in failed} == {"1"}
        assert all(report.avoided_for == 30 for report in failed)
        assert fleet.record.numbers("0", "b") == fleet.record.numbers("2", "b") == [5]
        assert not fleet.runs["b"].done()
        checkpoints["1", "default"] = type(checkpoints["1", "default"])("1", "fake:4", 4)
        await asyncio.sleep(60)
        assert fleet.record.numbers("1", "b") == [5]


async def test_status_lists_partitions_with_epoch_state_position_and_lag() -> None:
    """A host lists its partitions with epoch, state, position and lag."""
    async with stocked(partitions=2) as fleet:
        fleet.hub.publish("0", count=5)
        host = await fleet.start("a", track_last_enqueued=True)
        assert host.partitions == []
        await asyncio.sleep(5)
        first, second = host.partitions
        assert (first.partition_id, first.epoch, first.state) == ("0", 1, PumpState.RUNNING)
        assert (first.last_sequence_number, first.lag) == (4, 0)
        assert (second.partition_id, second.last_sequence_number, second.lag) == ("1", None, None)


async def test_log_of_a_plain_run_has_one_line_per_change_of_state(caplog: pytest.LogCaptureFixture) -> None:
    """A run without trouble logs nothing above information, and one line per change of state, not per event."""
    async with stocked(partitions=2) as fleet:
        with caplog.at_level("INFO", "eventpump"):
            await fleet.start("a")
            await asyncio.sleep(5)
            lines = len(caplog.records)
            assert lines >= 2
            for _ in range(50):
                fleet.hub.publish("0", count=10)
                await asyncio.sleep(1)
            assert len(caplog.records) == lines
            await fleet.hosts["a"].aclose()
            assert len(caplog.records) >= lines + 2
        assert all(record.levelname == "INFO" for record in caplog.records)
        assert fleet.record.numbers("0") == list(range(500))
        assert fleet.reported("a", UnexpectedFailure) == []
