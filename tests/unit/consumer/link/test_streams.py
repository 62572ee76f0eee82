"""Subscriptions to a part of the events: each gets all that match, and nothing else; checkpoints pass what does not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from eventpump.consumer.processor import CloseReason, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.sharing import LinkState
from eventpump.errors import ConfigurationError, DataLossError, LinkDetachedError, ProcessorFailedError
from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import Park
from eventpump.reports import (
    CheckpointWritten,
    DataLost,
    EventParked,
    EventSkipped,
    LinkRewound,
    LinkStalled,
    LinkStateChanged,
    PartitionFailed,
    ProcessorFailed,
    SubscriptionSlow,
)
from eventpump.testing.transport import FakeHub
from tests.support.fleet import NO_PROCESSOR, Fleet, Record, RecordingProcessor
from tests.support.leases import group

Events = Sequence[ReceivedEvent]
Handle = Callable[[PartitionContext, Events], Awaitable[None]]

EACH = CheckpointPolicy(every_events=1)
EACH_10_S = CheckpointPolicy(every_seconds=10)


class OddError(BaseException):
    """What user code raises that is no `Exception`."""


def _fleet(partitions: int = 1) -> Fleet:
    return Fleet(FakeHub(partitions=partitions, consumer_groups=("$Default", "behind")))


def _recording(record: Record, on_events: Handle | None = None) -> Any:
    return RecordingProcessor(record, on_events=on_events or _nothing)


async def _nothing(context: PartitionContext, events: Events) -> None:
    pass


def by_ten(event: ReceivedEvent) -> int:
    """Return the last digit of an event's number."""
    return int(event.body) % 10


def _tens(first: int, end: int, digit: int = 0) -> list[int]:
    return [number for number in range(first, end) if number % 10 == digit]


def _stored(fleet: Fleet, name: str, partition_id: str = "0") -> int | None:
    """Return the number in a subscription's stored checkpoint."""
    for (partition, key), checkpoint in fleet.leases.checkpoints(fleet.scope).items():
        if partition == partition_id and key.startswith(f"{name}."):
            return checkpoint.sequence_number
    return None


# ------------------------------------------------------------------------------------------------------------ options


async def test_impossible_streams_are_refused_with_a_clear_error() -> None:
    """Before anything is stored."""

    async def later(event: ReceivedEvent) -> bool:
        return True

    refused: list[tuple[dict[str, Any], str]] = [
        ({"key": by_ten}, "key: needs keys"),
        ({"keys": "sensor-7"}, "keys: must be a collection of keys"),
        ({"keys": b"sensor-7"}, "keys: must be a collection of keys"),
        ({"keys": 7}, "keys: must be a collection of keys"),
        ({"keys": set()}, "keys: must have at least one key"),
        ({"keys": [[1]]}, "keys: must have keys that can be hashed"),
        ({"keys": {1}, "key": later}, "key: must be a plain function"),
        ({"keys": {1}, "key": "name"}, "key: must be a plain function"),
        ({"filter": later}, "filter: must be a plain function"),
        ({"filter": lambda: True}, r"filter: must take one argument, the event; its parameters are \(\)"),
        ({"filter": lambda event, limit: True}, r"filter: must take one argument.*\(event, limit\)"),
        ({"keys": {1}, "key": lambda event, *, part: 1}, r"key: must take one argument.*\(event, \*, part\)"),
        ({"filter": by_ten, "keys": {1}}, "filter: cannot be combined"),
        ({"filter": by_ten, "key": by_ten, "keys": {1}}, "filter: cannot be combined"),
    ]
    async with _fleet() as fleet:
        host = fleet.host("a")
        for options, problem in refused:
            with pytest.raises(ConfigurationError, match=problem):
                await host.subscribe("part", _recording(Record()), **options)
        await host.subscribe("part", _recording(Record()))
        assert len(await group(fleet.stores["a"]).list_subscriptions()) == 1


async def test_partition_key_is_the_key_where_no_function_is_given() -> None:
    """Events without a key have None."""
    got, keyless = Record(), Record()
    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        await host.subscribe("seven", _recording(got), keys={"sensor-7", "sensor-8"})
        await host.subscribe("none", _recording(keyless), keys=[None])
        fleet.runs["a"] = asyncio.create_task(host.run())
        for key in ("sensor-7", "sensor-1", None, "sensor-8"):
            fleet.hub.store(EventData(b"x").encode(key), 0, "0")
        await asyncio.sleep(5)
        assert got.numbers("0") == [0, 3]
        assert keyless.numbers("0") == [2]


# ----------------------------------------------------------------------------------------------------------- delivery


async def test_each_stream_gets_its_events_over_one_link_in_batches_of_its_own() -> None:
    """By key, by filter, and all of them: the same objects, up to `max_batch_size` matching events at once."""
    records = {name: Record() for name in ("zero", "odd", "small")}
    objects: dict[int, set[int]] = {}
    batches: list[int] = []
    calls: list[int] = []

    def counted(event: ReceivedEvent) -> int:
        calls.append(event.sequence_number)
        return by_ten(event)

    async def note(context: PartitionContext, events: Events) -> None:
        kept.extend(events)
        for event in events:
            objects.setdefault(event.sequence_number, set()).add(id(event))
        if context.subscription == "zero":
            batches.append(len(events))

    kept: list[ReceivedEvent] = []
    async with _fleet() as fleet:
        host = fleet.host("a", RecordingProcessor(fleet.record, on_events=note))
        await host.subscribe("zero", _recording(records["zero"], note), key=counted, keys={0}, max_batch_size=7)
        await host.subscribe("small", _recording(records["small"], note), key=counted, keys=[1, 2])
        await host.subscribe("odd", _recording(records["odd"], note), filter=lambda event: by_ten(event) % 2 == 1)
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=1000)
        await asyncio.sleep(30)
        assert fleet.record.numbers("0") == list(range(1000))
        assert records["zero"].numbers("0") == _tens(0, 1000)
        assert records["small"].numbers("0") == sorted(_tens(0, 1000, 1) + _tens(0, 1000, 2))
        assert records["odd"].numbers("0") == [number for number in range(1000) if number % 2]
        assert max(batches) == 7
        assert {len(each) for each in objects.values()} == {1}
        assert sorted(calls) == list(range(1000))
        assert len(fleet.hub.attached) == 1


async def test_what_does_not_match_is_not_held_back_and_does_not_stop_the_others() -> None:
    """A stream whose handler hangs holds its matching events alone: the others lose nothing of their pace."""
    going = asyncio.Event()

    async def hang(context: PartitionContext, events: Events) -> None:
        await going.wait()

    slow, fast = Record(), Record()
    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR, prefetch_events=200)
        await host.subscribe("slow", _recording(slow, hang), key=by_ten, keys={0}, max_batch_size=1, slow_after=5)
        await host.subscribe("fast", _recording(fast), key=by_ten, keys={1, 2})
        fleet.runs["a"] = asyncio.create_task(host.run())
        for _ in range(8):
            fleet.hub.publish("0", count=100)
            await asyncio.sleep(10)
        assert fast.numbers("0") == sorted(_tens(0, 800, 1) + _tens(0, 800, 2))
        held = {each.subscription: each.held_events for each in host.partitions}
        assert held == {"slow": 79, "fast": 0}
        assert fleet.reported("a", SubscriptionSlow) == []
        fleet.hub.publish("0", count=2000)
        await asyncio.sleep(100)
        # Now its matches fill the cache.
        assert max(fast.numbers("0")) < 2100
        assert {each.subscription for each in fleet.reported("a", SubscriptionSlow)} == {"slow"}
        going.set()
        await asyncio.sleep(30)
        assert slow.numbers("0") == _tens(0, 2800)
        assert fast.numbers("0") == sorted(_tens(0, 2800, 1) + _tens(0, 2800, 2))


async def test_stream_that_comes_and_goes_neither_misses_nor_repeats() -> None:
    """One that joins while others read, one that reads the past, and one that is ended."""
    records = {name: Record() for name in ("early", "late", "past")}
    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR, prefetch_events=50)
        await host.subscribe("early", _recording(records["early"]), key=by_ten, keys={3})
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=200)
        await asyncio.sleep(5)
        await host.subscribe("late", _recording(records["late"]), key=by_ten, keys={3, 4})
        fleet.hub.publish("0", count=200)
        await asyncio.sleep(5)
        await host.subscribe("past", _recording(records["past"]), key=by_ten, keys={4}, start=99, catch_up="shared")
        fleet.hub.publish("0", count=200)
        await asyncio.sleep(5)
        await host.unsubscribe("late")
        fleet.hub.publish("0", count=200)
        await asyncio.sleep(20)
        assert records["early"].numbers("0") == _tens(0, 800, 3)
        assert records["late"].numbers("0") == sorted(_tens(200, 600, 3) + _tens(200, 600, 4))
        assert records["past"].numbers("0") == _tens(100, 800, 4)
        assert [each.subscription for each in fleet.reported("a", LinkRewound)][-1] == "past"


async def test_links_that_fail_lose_nothing_and_repeat_nothing() -> None:
    """The link is cut while streams read."""
    got = Record()
    async with _fleet() as fleet:
        host = await fleet.start("a")
        await host.subscribe("part", _recording(got), key=by_ten, keys={5})
        for _ in range(10):
            fleet.hub.publish("0", count=50)
            await asyncio.sleep(0.3)
            fleet.hub.detach("0")
        await asyncio.sleep(60)
        assert got.numbers("0") == _tens(0, 500, 5)
        assert fleet.reported("a", LinkStalled) == []


# -------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("policy", [EACH, CheckpointPolicy(every_events=50), EACH_10_S, CheckpointPolicy()])
async def test_checkpoint_passes_what_does_not_match_and_another_host_goes_on_there(
    policy: CheckpointPolicy,
) -> None:
    """Nothing ever matches: by the pace of the policy, and at the close; the next owner does not read it again."""
    got: list[int] = []

    def never(event: ReceivedEvent) -> bool:
        got.append(event.sequence_number)
        return False

    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR, track_last_enqueued=True)
        await host.subscribe("part", _recording(Record()), filter=never, checkpoint_policy=policy)
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        for _ in range(6):
            fleet.hub.publish("0", count=20)
            await asyncio.sleep(0.1)
        await asyncio.sleep(8)
        assert _stored(fleet, "part") == (None if policy.every_events is None else 119)
        await asyncio.sleep(2)
        if policy.every_events is None:
            assert _stored(fleet, "part") == (None if policy.every_seconds is None else 119)
        (status,) = host.partitions
        assert (status.last_sequence_number, status.lag, status.held_events) == (119, 0, 0)
        fleet.hub.publish("0", count=30)
        await asyncio.sleep(11)
        if policy in (EACH, EACH_10_S):
            assert _stored(fleet, "part") == 149
        await host.aclose()
        assert _stored(fleet, "part") == 149
        other = fleet.host("b", NO_PROCESSOR)
        await other.subscribe("part", _recording(Record()), filter=never, checkpoint_policy=policy)
        fleet.runs["b"] = asyncio.create_task(other.run())
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(5)
        assert got == list(range(160))


async def test_checkpoint_never_passes_a_match_that_is_not_processed() -> None:
    """While a match is in hand, or waits, nothing after it is covered, whatever the policy is; nor at the close."""
    going = asyncio.Event()

    async def hang(context: PartitionContext, events: Events) -> None:
        await going.wait()

    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR, close_timeout=5.0)
        policy = CheckpointPolicy(every_events=1, every_seconds=1)
        await host.subscribe(
            "part", _recording(Record(), hang), key=by_ten, keys={5}, max_batch_size=1, checkpoint_policy=policy
        )
        fleet.runs["a"] = asyncio.create_task(host.run())
        for count in (3, 30, 300):
            fleet.hub.publish("0", count=count)
            await asyncio.sleep(10)
            assert _stored(fleet, "part") == 2
        going.set()
        await asyncio.sleep(1)
        assert _stored(fleet, "part") == 332
        going.clear()
        fleet.hub.publish("0", count=30)
        await asyncio.sleep(10)
        assert _stored(fleet, "part") == 332
        await host.aclose()
        assert _stored(fleet, "part") == 332


async def test_processor_stores_what_has_passed_when_it_asks_outside_of_a_batch() -> None:
    """By the manual policy nothing is stored until then; in `close`, and in an idle call, all that has passed is."""

    async def at_idle(context: PartitionContext, events: Events) -> None:
        if not events:
            await context.checkpoint()

    async def at_close(context: PartitionContext, reason: CloseReason) -> None:
        await context.checkpoint()

    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR, max_wait_time=20.0)
        processor = RecordingProcessor(Record(), on_events=at_idle, on_close=at_close)
        await host.subscribe("part", processor, key=by_ten, keys={5}, call_when_idle=True)
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=18)
        await asyncio.sleep(15)
        assert _stored(fleet, "part") is None
        await asyncio.sleep(15)
        assert _stored(fleet, "part") == 17
        fleet.hub.publish("0", count=2)
        await asyncio.sleep(1)
        await host.aclose()
        assert _stored(fleet, "part") == 19


async def test_what_the_service_has_lost_is_found_out_although_nothing_matched() -> None:
    """Lost numbers may have matched: they are reported, and with "fail" no checkpoint passes them."""
    for on_loss in ("earliest", "fail"):
        got = Record()
        async with _fleet() as fleet:
            host = fleet.host("a", NO_PROCESSOR)
            await host.subscribe(
                "part", _recording(got), key=by_ten, keys={5}, checkpoint_policy=EACH, on_data_loss=on_loss
            )
            fleet.hub.publish("0", count=100)
            fleet.hub.truncate("0", 40)
            fleet.runs["a"] = asyncio.create_task(host.run())
            await asyncio.sleep(10)
            (loss, *_) = fleet.reported("a", DataLost)
            assert (loss.loss.first_missing, loss.loss.last_missing) == (0, 39)
            if on_loss == "earliest":
                assert got.numbers("0") == _tens(40, 100, 5)
                assert _stored(fleet, "part") == 99
            else:
                assert got.numbers("0") == []
                assert _stored(fleet, "part") is None
                assert isinstance(fleet.reported("a", PartitionFailed)[0].error, DataLossError)


async def test_loss_in_the_stream_is_found_out_and_normal_gaps_are_not_losses() -> None:
    """Numbers that vanish while the link is away are a loss; those of a compacted hub are none."""
    got = Record()
    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        await host.subscribe("part", _recording(got), key=by_ten, keys={5}, checkpoint_policy=EACH)
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=50)
        fleet.hub.compact("0", [57, 58])
        fleet.hub.publish("0", count=50)
        await asyncio.sleep(5)
        assert fleet.reported("a", DataLost) == []
        fleet.hub.refuse(LinkDetachedError("away"), times=3)
        fleet.hub.detach("0")
        fleet.hub.publish("0", count=50)
        fleet.hub.truncate("0", 120)
        await asyncio.sleep(120)
        (loss,) = fleet.reported("a", DataLost)
        assert (loss.loss.first_missing, loss.loss.last_missing) == (100, 119)
        assert got.numbers("0") == _tens(0, 100, 5) + _tens(120, 150, 5)
        assert _stored(fleet, "part") == 149


# ------------------------------------------------------------------------------------- elsewhere, and links of its own


async def test_drain_ends_although_the_last_events_do_not_match() -> None:
    """And not before the last match is processed."""
    going = asyncio.Event()

    async def hang(context: PartitionContext, events: Events) -> None:
        await going.wait()

    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        await host.subscribe("part", _recording(Record(), hang), key=by_ten, keys={5})
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=4)
        async with asyncio.timeout(5):
            assert await host.drain("part") == ("0",)
        fleet.hub.publish("0", count=100)
        draining = asyncio.create_task(host.drain("part"))
        await asyncio.sleep(10)
        assert not draining.done()
        going.set()
        async with asyncio.timeout(5):
            assert await draining == ("0",)
        # Which what comes later does not hold up.
        going.clear()
        host.pause("part")
        fleet.hub.publish("0", count=1)
        draining = asyncio.create_task(host.drain("part"))
        await asyncio.sleep(5)
        assert not draining.done()
        fleet.hub.publish("0", count=50)
        host.resume("part")
        async with asyncio.timeout(5):
            assert await draining == ("0",)


async def test_replay_delivers_the_matches_of_a_range_and_ends_where_nothing_matches() -> None:
    """The checkpoint stays, and delivery goes on as before."""
    got = Record()
    async with _fleet() as fleet:
        host = fleet.host("a")
        await host.subscribe("part", _recording(got), key=by_ten, keys={5}, checkpoint_policy=EACH)
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(5)
        got.deliveries.clear()
        for from_, to, expected in ((10, 28, [15, 25]), (36, 38, []), (45, 45, [45]), (90, 99, [95])):
            async with asyncio.timeout(60):
                assert await host.replay("part", from_=from_, to=to) == ("0",)
            assert got.numbers("0") == expected
            got.deliveries.clear()
            assert _stored(fleet, "part") == 99
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(5)
        assert got.numbers("0") == _tens(100, 200, 5)
        assert fleet.record.numbers("0") == list(range(200))
        assert _stored(fleet, "part") == 199


async def test_replay_that_the_close_ends_leaves_the_checkpoint() -> None:
    """What the link of a replay has received beyond the range counts for nothing."""
    going = asyncio.Event()
    going.set()

    async def hang(context: PartitionContext, events: Events) -> None:
        await going.wait()

    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR, close_timeout=5.0)
        await host.subscribe(
            "part", _recording(Record(), hang), key=by_ten, keys={5}, checkpoint_policy=CheckpointPolicy()
        )
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=18)
        await asyncio.sleep(5)
        await host.drain("part")
        going.clear()
        host.pause("part")
        await asyncio.sleep(1)
        fleet.hub.publish("0", count=10)
        replaying = asyncio.create_task(host.replay("part", from_=0, to=10))
        await asyncio.sleep(1)
        # Its link brings the matches of the range, and one that is new.
        host.resume("part")
        await asyncio.sleep(5)
        closing = asyncio.create_task(host.aclose())
        await asyncio.sleep(1)
        going.set()
        await closing
        assert await replaying == ()
        assert _stored(fleet, "part") == 17


async def test_seek_goes_on_with_the_matches_from_there() -> None:
    """Back and forth, from outside and by the processor."""
    got = Record()
    async with _fleet() as fleet:
        host = fleet.host("a")
        await host.subscribe("part", _recording(got), key=by_ten, keys={5}, checkpoint_policy=EACH)
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=58)
        await asyncio.sleep(5)
        assert await host.seek("part", 29) == ("0",)
        await asyncio.sleep(5)
        assert await host.seek("part", "latest") == ("0",)
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(5)
        assert got.numbers("0") == [5, 15, 25, 35, 45, 55, 35, 45, 55, 65]
        assert fleet.record.numbers("0") == list(range(68))
        assert _stored(fleet, "part") == 67


async def test_pause_keeps_the_place_and_resume_goes_on_without_reading_again() -> None:
    """A paused stream holds nothing; where nothing matched meanwhile, its place is where it stopped."""
    got, calls = Record(), list[int]()

    def counted(event: ReceivedEvent) -> int:
        calls.append(event.sequence_number)
        return by_ten(event)

    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        await host.subscribe("part", _recording(got), key=counted, keys={5}, checkpoint_policy=CheckpointPolicy())
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=39)
        await asyncio.sleep(5)
        host.pause("part")
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=31)
        host.resume("part")
        await asyncio.sleep(5)
        assert got.numbers("0") == [5, 15, 25, 35, 45, 55, 65]
        assert calls == list(range(70))
        host.pause("part")
        await asyncio.sleep(5)
        await host.aclose()
        assert _stored(fleet, "part") == 69


async def test_stream_that_is_behind_catches_up_over_a_link_of_its_own() -> None:
    """With a catch-up group: the matches of the past, and then those of the shared link, each once and in order."""
    got = Record()
    async with _fleet() as fleet:
        fleet.hub.publish("0", count=5000)
        host = await fleet.start("a", prefetch_events=200)
        await asyncio.sleep(10)
        await host.subscribe("part", _recording(got), key=by_ten, keys={5}, start="earliest", catch_up_group="behind")
        for _ in range(20):
            fleet.hub.publish("0", count=33)
            await asyncio.sleep(0.5)
        await asyncio.sleep(20)
        assert got.numbers("0") == _tens(0, 5660, 5)
        assert fleet.record.numbers("0") == list(range(5660))
        assert [each.state for each in fleet.reported("a", LinkStateChanged)] == [LinkState.OWN, LinkState.SHARED]


async def test_idle_stream_that_is_behind_comes_back_to_the_shared_link() -> None:
    """Nothing of the past matches: its own link ends nevertheless."""
    got = Record()
    async with _fleet() as fleet:
        fleet.hub.publish("0", count=5000)
        host = await fleet.start("a", prefetch_events=200)
        await asyncio.sleep(10)
        await host.subscribe(
            "part", _recording(got), filter=lambda event: int(event.body) >= 5100, start="earliest",
            catch_up_group="behind",
        )  # fmt: skip
        fleet.hub.publish("0", count=50)
        await asyncio.sleep(20)
        assert [each.state for each in fleet.reported("a", LinkStateChanged)] == [LinkState.OWN, LinkState.SHARED]
        fleet.hub.publish("0", count=100)
        await asyncio.sleep(5)
        assert got.numbers("0") == list(range(5100, 5150))


# ------------------------------------------------------------------------------------------------ functions that fail


class _Flaky:
    """A key function that fails for one event.

    Args:
        number: The event.
        times: How often it fails; None forever.
        failure: What it does then.
    """

    def __init__(self, number: int, times: int | None, failure: Callable[[], Any]) -> None:
        self.number = number
        self.left = times
        self.failure = failure
        self.calls = 0

    def key(self, event: ReceivedEvent) -> Any:
        """Return the key, or fail."""
        if event.sequence_number == self.number:
            self.calls += 1
            if self.left is None or self.left > 0:
                self.left = None if self.left is None else self.left - 1
                return self.failure()
        return by_ten(event)


def _raising() -> Any:
    raise ValueError("bad event")


def _raising_oddly() -> Any:
    raise OddError("bad event")


async def _later() -> int:
    return 5


FAILURES: list[Callable[[], Any]] = [_raising, _raising_oddly, lambda: [5], lambda: _later()]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("number", [15, 16])
async def test_function_that_fails_is_called_again_until_it_succeeds(failure: Callable[[], Any], number: int) -> None:
    """By the policy "retry": `process_error` is called each time; then the event is delivered, or does not match."""
    got, flaky = Record(), _Flaky(number, 3, failure)
    async with _fleet() as fleet:
        host = await fleet.start("a")
        await host.subscribe("part", _recording(got), key=flaky.key, keys={5}, checkpoint_policy=EACH)
        fleet.hub.publish("0", count=30)
        await asyncio.sleep(60)
        assert got.numbers("0") == [5, 15, 25]
        assert len(got.errors) == 3
        assert flaky.calls == 4
        assert _stored(fleet, "part") == 29
        assert fleet.record.numbers("0") == list(range(30))
        assert {(each.operation, each.subscription) for each in fleet.reported("a", ProcessorFailed)} == {
            ("filter", "part")
        }


@pytest.mark.parametrize("number", [15, 16])
async def test_function_that_fails_within_a_replay_is_called_again_too(number: int) -> None:
    """An event that may not match is delivered, or left out, once the function has returned."""
    got, flaky = Record(), _Flaky(number, 0, _raising)
    async with _fleet() as fleet:
        host = await fleet.start("a", NO_PROCESSOR)
        await host.subscribe("part", _recording(got), key=flaky.key, keys={5}, checkpoint_policy=EACH)
        fleet.hub.publish("0", count=30)
        await asyncio.sleep(5)
        got.deliveries.clear()
        flaky.left = 3
        async with asyncio.timeout(60):
            assert await host.replay("part", from_=10, to=28) == ("0",)
        assert got.numbers("0") == [15, 25]
        assert len(got.errors) == 3


async def test_failure_of_a_shared_function_is_one_of_each_subscription() -> None:
    """It may be an event of any of them. A checkpoint never passes it before that is settled."""
    first, second = Record(), Record()
    flaky = _Flaky(15, None, _raising)
    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        await host.subscribe("first", _recording(first), key=flaky.key, keys={5}, checkpoint_policy=EACH)
        await host.subscribe(
            "second", _recording(second), key=flaky.key, keys={6}, checkpoint_policy=EACH, failure_policy="skip"
        )
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=30)
        await asyncio.sleep(60)
        assert first.numbers("0") == [5]
        assert len(first.errors) > 3
        assert _stored(fleet, "first") == 5
        assert second.numbers("0") == [6, 16, 26]
        assert _stored(fleet, "second") == 29
        flaky.left = 0
        await asyncio.sleep(120)
        assert first.numbers("0") == [5, 15, 25]
        assert _stored(fleet, "first") == 29


@pytest.mark.parametrize("failure", FAILURES)
async def test_failed_event_is_skipped_or_parked(failure: Callable[[], Any]) -> None:
    """It alone: the events around it are delivered."""
    parked: list[tuple[int, str]] = []

    async def park(context: PartitionContext, event: ReceivedEvent, error: Exception) -> None:
        parked.append((event.sequence_number, str(error)))

    records = {name: Record() for name in ("skip", "park")}
    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        await host.subscribe(
            "skip", _recording(records["skip"]), filter=_Flaky(15, None, failure).key, failure_policy="skip"
        )
        await host.subscribe(
            "park", _recording(records["park"]), key=_Flaky(15, None, failure).key, keys={5},
            handler_retry=RetryOptions(max_retries=2), on_retries_exhausted=Park(park), checkpoint_policy=EACH,
        )  # fmt: skip
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=30)
        await asyncio.sleep(60)
        if failure is not FAILURES[2]:  # a filter may return a list
            assert records["skip"].numbers("0") == [number for number in range(30) if number % 10 and number != 15]
            assert [each.sequence_number for each in fleet.reported("a", EventSkipped)] == [15]
        assert records["park"].numbers("0") == [5, 25]
        assert [number for number, _ in parked] == [15]
        assert len(fleet.reported("a", EventParked)) == 1
        assert len(records["park"].errors) == 3
        assert _stored(fleet, "park") == 29


async def test_failed_event_stops_the_host_where_that_is_the_policy() -> None:
    """And the next host begins at the last event before it."""
    got = Record()
    async with _fleet() as fleet:
        host = await fleet.start("a", NO_PROCESSOR)
        await host.subscribe(
            "part", _recording(got), key=_Flaky(15, None, _raising).key, keys={5}, failure_policy="stop",
            checkpoint_policy=CheckpointPolicy(),
        )  # fmt: skip
        fleet.hub.publish("0", count=30)
        with pytest.raises(ProcessorFailedError) as caught:
            await fleet.runs["a"]
        assert "bad event" in str(caught.value.__cause__)
        assert got.numbers("0") == [5]
        assert _stored(fleet, "part") == 5


async def test_events_of_a_failing_batch_are_narrowed_as_others_are() -> None:
    """A processor that fails for one matching event: that one is skipped, and the checkpoint comes to the end."""
    async with _fleet() as fleet:

        async def fail(context: PartitionContext, events: Events) -> None:
            if any(event.sequence_number == 25 for event in events):
                raise ValueError("no")

        got = Record()
        host = await fleet.start("a")
        await host.subscribe(
            "part", _recording(got, fail), key=by_ten, keys={5}, failure_policy="skip", checkpoint_policy=EACH
        )
        fleet.hub.publish("0", count=58)
        await asyncio.sleep(10)
        assert set(got.numbers("0")) == set(_tens(0, 58, 5))
        assert [each.sequence_number for each in fleet.reported("a", EventSkipped)] == [25]
        assert _stored(fleet, "part") == 57


async def test_seek_leaves_an_event_whose_function_fails() -> None:
    """It need not wait for the next attempt; a replay of other events goes on beside it."""
    got = Record()
    flaky = _Flaky(15, None, _raising)
    async with _fleet() as fleet:
        host = await fleet.start("a", NO_PROCESSOR, handler_retry=RetryOptions(base_delay=50, max_delay=50))
        await host.subscribe("part", _recording(got), key=flaky.key, keys={5}, checkpoint_policy=EACH)
        fleet.hub.publish("0", count=40)
        await asyncio.sleep(5)
        assert got.numbers("0") == [5]
        async with asyncio.timeout(10):
            assert await host.replay("part", from_=0, to=9) == ("0",)
        assert got.numbers("0") == [5, 5]
        assert _stored(fleet, "part") == 5
        async with asyncio.timeout(10):
            assert await host.seek("part", 20) == ("0",)
        await asyncio.sleep(5)
        assert got.numbers("0") == [5, 5, 25, 35]
        assert _stored(fleet, "part") == 39


async def test_many_streams_write_no_more_checkpoints_than_their_policy_says() -> None:
    """A hundred idle streams with a pace in seconds: one write each per period, whatever is published."""
    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        for number in range(100):
            await host.subscribe(
                f"part-{number}", _recording(Record()), key=by_ten, keys={number + 10}, checkpoint_policy=EACH_10_S
            )
        fleet.runs["a"] = asyncio.create_task(host.run())
        for _ in range(25):
            fleet.hub.publish("0", count=10)
            await asyncio.sleep(1)
        await asyncio.sleep(11)
        written = fleet.reported("a", CheckpointWritten)
        assert all(_stored(fleet, f"part-{number}") == 249 for number in range(100))
        assert len(written) <= 400


async def test_drain_ends_when_events_come_later_that_do_not_match() -> None:
    """What the partition held at the call is received after it, and nothing of it belongs to the stream."""
    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR, max_wait_time=10_000)
        await host.subscribe("part", _recording(Record()), key=by_ten, keys={5})
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        fleet.hub.refuse(LinkDetachedError("away"), times=3)
        fleet.hub.detach("0")
        fleet.hub.publish("0", count=4)
        draining = asyncio.create_task(host.drain("part"))
        await asyncio.sleep(0.01)
        assert not draining.done()
        async with asyncio.timeout(200):
            assert await draining == ("0",)


async def test_link_that_is_opened_again_does_not_go_back_for_what_did_not_match() -> None:
    """Another one needs the past: the link begins there, and not at the last event that an idle stream took."""
    calls = list[int]()

    def counted(event: ReceivedEvent) -> bool:
        calls.append(event.sequence_number)
        return False

    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        await host.subscribe("idle", _recording(Record()), filter=counted)
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=200)
        await asyncio.sleep(5)
        got = Record()
        await host.subscribe("past", _recording(got), start=149, catch_up="shared")
        await asyncio.sleep(5)
        assert got.numbers("0") == list(range(150, 200))
        assert calls == [*range(200), *range(150, 200)]


async def test_loss_that_a_paused_stream_has_before_it_is_reported() -> None:
    """What is missing before the next match is looked into also where the stream leaves the link in between."""
    got, goes_on = Record(), asyncio.Event()

    async def wait(context: PartitionContext, events: Events) -> None:
        await goes_on.wait()

    async with _fleet() as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        await host.subscribe("part", _recording(got, wait), key=by_ten, keys={5}, max_batch_size=1)
        fleet.runs["a"] = asyncio.create_task(host.run())
        fleet.hub.publish("0", count=10)
        await asyncio.sleep(5)
        fleet.hub.refuse(LinkDetachedError("away"), times=3)
        fleet.hub.detach("0")
        fleet.hub.publish("0", count=30)
        fleet.hub.truncate("0", 20)
        await asyncio.sleep(120)
        host.pause("part")
        goes_on.set()
        await asyncio.sleep(5)
        host.resume("part")
        await asyncio.sleep(5)
        (loss,) = fleet.reported("a", DataLost)
        assert loss.loss.last_missing == 19
        assert got.numbers("0") == _tens(0, 10, 5) + _tens(20, 40, 5)
