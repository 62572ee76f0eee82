"""Processes of one publisher's name that overlap, die and are forgotten, through `HubProducer`, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from eventpump.core.claim import PublisherIntent, PublisherState, Started, StoredPublisherState
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    EventPumpError,
    LinkDetachedError,
    ProducerDisconnectedError,
    ProducerStateLostError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    ServiceError,
    StoreError,
)
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, NUMBERS
from eventpump.eventhubs.stamps import STAMP, read_stamp, spell_stamp
from eventpump.interfaces import SendLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.options.producer import PartitionPublishingOptions
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.marks import MARK_INTERVAL, StateMarks
from eventpump.producer.producer import HubProducer
from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore
from eventpump.testing.transport import FakeHub, FakeSendLink, FakeTransport, SendFault
from tests.support.inside import publishers_of
from tests.support.states import SharedStates
from tests.unit.producer.awaiting import error_of, idle

RETRY = RetryOptions(max_retries=2, base_delay=1.0, max_delay=8.0)
AWAY = LinkDetachedError("away")
NAME = "feed"
KEY = (NAME, "0")


class Scene:
    """A hub, a store's truth, and processes with one publisher's name."""

    def __init__(self) -> None:
        self.hub = FakeHub(partitions=2, consumer_groups=("$Default", "tail"))
        self.states = SharedStates()
        self.producers: list[HubProducer] = []

    def process(
        self, *, transport: FakeTransport | None = None, store: MemoryPublisherStateStore | None = None, **options: Any
    ) -> HubProducer:
        producer = HubProducer(
            transport or FakeTransport(self.hub),
            self.hub.name,
            idempotent=True,
            rng=random.Random(1),
            name=NAME,
            state_store=store or MemoryPublisherStateStore(self.states),
            **{"retry": RETRY, **options},
        )
        self.producers.append(producer)
        return producer

    @property
    def state(self) -> PublisherState:
        return self.states.state(KEY).state

    @property
    def bodies(self) -> list[str]:
        return [event.body_as_str() for event in self.hub.events("0")]

    def forget(self, *, accept_unknown_producers: bool) -> None:
        self.hub.partition("0").publishing.forget(accept_unknown_producers=accept_unknown_producers)

    async def crash(self, producer: HubProducer) -> None:
        """End a process without its last marks."""
        await asyncio.gather(*(each.aclose() for each in publishers_of(producer)))


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """A test's scene. Afterwards, nothing of it runs."""
    scene = Scene()
    yield scene
    scene.hub.accept()
    for producer in scene.producers:
        with contextlib.suppress(EventPumpError):
            await producer.aclose(1.0)
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, "a producer left a task behind"


async def send(producer: HubProducer, *bodies: str) -> None:
    await producer.send([EventData(body) for body in bodies], partition_id="0")


async def count(producer: HubProducer) -> int:
    found = (await producer.get_partition_publishing_properties("0")).events_published
    assert found is not None
    return found


async def late(scene: Scene, producer: HubProducer, body: str) -> None:
    """Let a process die with an event on its way that arrives when the test says so."""
    scene.hub.lose(SendFault.STORED_LATE, partition_id="0")
    sending = asyncio.ensure_future(send(producer, body))
    await idle()
    await scene.crash(producer)
    await error_of(sending)


class GrowsAtTheRaise(FakeTransport):
    """Lets what is late arrive as a level is raised: after its number was read."""

    async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
        """Attach a send link."""
        if spec.properties.get(PRODUCER_SEQUENCE_NUMBER) is not None:
            self.hub.deliver_late()
        return await super().open_send_link(spec)


# ------------------------------------------------------------------------------------------------- exclusive


async def test_start_of_a_second_process_shuts_out_the_first(scene: Scene) -> None:
    """The later start shuts the former out, which gets an error; what was acknowledged to either is stored."""
    former, later = scene.process(), scene.process()
    await send(former, "a", "b")
    assert await count(later) == 2
    assert isinstance(await error_of(send(former, "lost?")), ProducerDisconnectedError)
    await send(later, "c")
    assert scene.bodies == ["a", "b", "c"]
    assert (scene.state.owner_level, scene.state.published) == (1, 3)


async def test_start_after_a_clean_close_is_not_in_doubt(scene: Scene) -> None:
    """Its clean mark settles the next start, though other writers publish at the time."""
    for life in range(3):
        producer = scene.process()
        assert await count(producer) == life
        await send(producer, f"{life}")
        await producer.aclose()
        assert scene.state.is_clean
        scene.hub.publish("0", "somebody else's")
    assert scene.state.owner_level == 2


async def test_start_with_a_transfer_between_reading_and_raising_is_in_doubt(scene: Scene) -> None:
    """Read number, late transfer, raise: the start is in doubt, with the numbers, and so is each after it."""
    former = scene.process()
    await send(former, "0")
    await late(scene, former, "1")
    transport: FakeTransport = GrowsAtTheRaise(scene.hub)
    for _ in range(2):
        starting = scene.process(transport=transport)
        for use in (send(starting, "1"), starting.get_partition_publishing_properties("0")):
            error = await error_of(use)
            assert isinstance(error, PublishOutcomeUnknownError)
            assert (error.partition_id, error.first, error.count) == ("0", 2, 1)
            assert not error.is_settling
            assert error.batch is None
        transport = FakeTransport(scene.hub)
    assert scene.bodies == ["0", "1"]
    accepting = scene.process(on_doubt="accept")
    assert await count(accepting) == 1
    await send(accepting, "1")
    assert scene.bodies == ["0", "1", "1"]


async def test_start_in_doubt_ends_the_events_of_a_buffer(scene: Scene) -> None:
    """Its events end with the error: asking again settles nothing."""
    former = scene.process()
    await send(former, "0")
    await late(scene, former, "1")
    buffered = HubBufferedProducer(scene.process(transport=GrowsAtTheRaise(scene.hub)))
    receipt = await buffered.send(EventData("1"), partition_id="0")
    async with asyncio.timeout(60):
        assert isinstance(await error_of(receipt), PublishOutcomeUnknownError)
    await buffered.aclose()


async def test_scan_counts_what_arrived(scene: Scene) -> None:
    """Stamps distinguish the former process's events; readers see them; an unstamped past stays in doubt."""
    scan: dict[str, Any] = {"on_doubt": "scan", "scan_consumer_group": "tail"}
    former = scene.process(**scan)
    await former.send([EventData("0", properties={"unit": "C"})], partition_id="0")
    first = scene.hub.events("0")[0]
    stamp = read_stamp(first.properties[STAMP])
    assert stamp == (scene.state.producer_id, 0, 1)
    assert (first.body_as_str(), first.properties["unit"]) == ("0", "C")
    await late(scene, former, "1")
    scene.hub.publish("0", "somebody else's")
    going_on = scene.process(transport=GrowsAtTheRaise(scene.hub), **scan)
    assert await count(going_on) == 2
    await send(going_on, "2")
    assert scene.bodies == ["0", "somebody else's", "1", "2"]
    assert read_stamp(scene.hub.events("0")[-1].properties[STAMP]) == (scene.state.producer_id, 1, 2)
    await scene.crash(going_on)
    unstamped = scene.process(on_doubt="accept")
    await send(unstamped, "3")
    await late(scene, unstamped, "4")
    assert isinstance(
        await error_of(count(scene.process(transport=GrowsAtTheRaise(scene.hub), **scan))), PublishOutcomeUnknownError
    )


@pytest.mark.parametrize(("producer_id", "owner_level"), [(0, 1), (1, 0), (1, 1)])
async def test_scan_counts_only_stamps_of_the_level_that_it_replaces(
    scene: Scene, producer_id: int, owner_level: int
) -> None:
    """An event with the stamp of another level or id, as of a copy, is not one of the former process."""
    scan: dict[str, Any] = {"on_doubt": "scan", "scan_consumer_group": "tail"}
    former = scene.process(**scan)
    await send(former, "0")
    state = scene.state
    await scene.crash(former)
    stamp = spell_stamp(state.producer_id + producer_id, state.owner_level + owner_level, 2)
    copies = HubProducer(FakeTransport(scene.hub), scene.hub.name, rng=random.Random(1))

    class CopiedAtTheRaise(FakeTransport):
        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            if spec.properties.get(PRODUCER_SEQUENCE_NUMBER) is not None:
                await copies.send([EventData("copy", properties={STAMP: stamp})], partition_id="0")
            return await super().open_send_link(spec)

    assert await count(scene.process(transport=CopiedAtTheRaise(scene.hub), **scan)) == 1
    assert scene.bodies == ["0", "copy"]
    await copies.aclose()


async def test_scan_that_fails_is_repeated(scene: Scene) -> None:
    """A link that is refused or lost in the midst of the tail is opened again, and nothing is counted twice."""
    scan: dict[str, Any] = {"on_doubt": "scan", "scan_consumer_group": "tail"}
    former = scene.process(**scan)
    await send(former, "0")
    await late(scene, former, "1")
    scene.hub.refuse(AWAY, operation="receive")
    starting = asyncio.ensure_future(count(scene.process(transport=GrowsAtTheRaise(scene.hub), **scan)))
    scene.hub.stall("0")
    await asyncio.sleep(20)
    scene.hub.detach("0")
    scene.hub.resume("0")
    assert await starting == 2
    assert [spec.consumer_group for spec in scene.hub.attached] == ["tail", "tail"]


async def test_scan_of_a_removed_tail_leaves_the_doubt(scene: Scene) -> None:
    """What is gone cannot be counted."""
    scan: dict[str, Any] = {"on_doubt": "scan", "scan_consumer_group": "tail"}
    former = scene.process(**scan)
    await send(former, "0")
    await late(scene, former, "1")

    class Passing(GrowsAtTheRaise):
        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            link = await super().open_send_link(spec)
            self.hub.truncate("0", 2)
            return link

    error = await error_of(count(scene.process(transport=Passing(scene.hub), **scan)))
    assert isinstance(error, PublishOutcomeUnknownError)
    assert "no longer holds all of them" in str(error)


async def test_scan_of_a_tail_removed_meanwhile_leaves_the_doubt(scene: Scene) -> None:
    """What went between the look at the partition's beginning and the reading is not taken for never stored."""
    scan: dict[str, Any] = {"on_doubt": "scan", "scan_consumer_group": "tail"}
    former = scene.process(**scan)
    await send(former, "0")
    await late(scene, former, "1")

    class Passing(GrowsAtTheRaise):
        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            link = await super().open_send_link(spec)
            self.hub.publish("0", "somebody else's")
            return link

        async def open_receive_link(self, *args: Any) -> Any:
            self.hub.truncate("0", 3)
            return await super().open_receive_link(*args)

    error = await error_of(count(scene.process(transport=Passing(scene.hub), **scan)))
    assert isinstance(error, PublishOutcomeUnknownError)
    assert "no longer holds all of them" in str(error)


async def test_published_count_of_a_buffer_is_that_of_lists(scene: Scene) -> None:
    """An application that sends through a buffer counts its events as one that sends lists does."""
    for before in (0, 2):
        async with HubBufferedProducer(scene.process()) as buffered:
            assert (await buffered.get_partition_publishing_properties("0")).events_published == before
            for body in "ab":
                await buffered.send(EventData(body), partition_id="0")


async def test_stamps_are_added_by_a_buffer(scene: Scene) -> None:
    """Every event, with a key and without, and its size counts it."""
    producer = scene.process(on_doubt="scan", scan_consumer_group="tail")
    async with HubBufferedProducer(producer) as buffered:
        await buffered.send(EventData("a" * 400), partition_id="0")
        await buffered.send(EventData("b", properties={"x": 1}, message_id="m"), partition_id="0")
        await buffered.flush()
    found = [read_stamp(event.properties[STAMP]) for event in scene.hub.events("0")]
    assert [each and each.number for each in found] == [1, 2]
    assert scene.hub.events("0")[1].message_id == "m"


async def test_start_that_failed_goes_on_with_the_same_claim(scene: Scene) -> None:
    """An outage of the service or the store uses up no levels: the next call goes on with the same claim."""
    first = scene.process()
    await send(first, "a")
    await first.aclose()
    second = scene.process()
    scene.hub.refuse(AWAY, operation="send", times=3)
    assert isinstance(await error_of(send(second, "b")), LinkDetachedError)
    assert scene.state.intent == PublisherIntent(1)
    await send(second, "b")
    assert (scene.state.owner_level, scene.bodies) == (1, ["a", "b"])


async def test_start_refused_after_a_reset_raises_the_same_error(scene: Scene) -> None:
    """Its state was reset as it began, and the service does not know the id it was given: the same error each time."""

    class Reset(MemoryPublisherStateStore):
        async def write_state(self, name: str, partition_id: str, *args: Any) -> StoredPublisherState | None:
            await self.reset_state(name, partition_id)
            return None

    first = scene.process()
    await send(first, "a")
    await first.aclose()
    options = {"0": PartitionPublishingOptions(producer_group_id=77)}
    second = scene.process(store=Reset(scene.states), partition_options=options)
    for _ in range(2):
        assert isinstance(await error_of(send(second, "b")), RequestRefusedError)


async def test_start_whose_caller_is_cancelled_goes_on(scene: Scene) -> None:
    """The next call joins it, and no level is used up."""
    first = scene.process()
    await send(first, "a")
    await first.aclose()
    second = scene.process()
    scene.hub.hang("send")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await send(second, "b")
    scene.hub.answer("send")
    await asyncio.sleep(1)
    assert scene.state.intent is None
    await send(second, "b")
    assert scene.state.owner_level == 1


async def test_start_cancelled_from_outside_goes_on_at_the_next_call(scene: Scene) -> None:
    """Those who wait get an error that does not say the producer is closed, and no level is used up."""
    first = scene.process()
    await send(first, "a")
    await first.aclose()
    second = scene.process()
    scene.hub.hang("send")
    sending = asyncio.ensure_future(send(second, "b"))
    await idle()
    [task] = [each for each in asyncio.all_tasks() if each.get_name().startswith("eventpump start")]
    task.cancel()
    assert isinstance(await error_of(sending), ServiceError)
    scene.hub.answer("send")
    await send(second, "b")
    assert (scene.state.owner_level, scene.bodies) == (1, ["a", "b"])


async def test_close_during_a_start_leaves_the_intent(scene: Scene) -> None:
    """The waiters get `ClosedError`; the next start takes one level more."""
    first = scene.process()
    await send(first, "a")
    await scene.crash(first)
    second = scene.process()
    scene.hub.hang("send")
    sending = asyncio.ensure_future(send(second, "b"))
    await idle()
    await second.aclose()
    assert isinstance(await error_of(sending), ClosedError)
    scene.hub.answer("send")
    third = scene.process()
    await send(third, "c")
    assert (scene.state.owner_level, scene.bodies) == (2, ["a", "c"])


async def test_start_that_was_superseded_does_not_claim_again(scene: Scene) -> None:
    """Its next swap fails, and it does not claim again at the next call."""
    first = scene.process()
    await send(first, "a")
    slow, fast = scene.process(), scene.process()
    scene.hub.hang("partition")
    sending = asyncio.ensure_future(send(slow, "b"))
    await idle()
    winning = asyncio.ensure_future(send(fast, "c"))
    await idle()
    scene.hub.answer("partition")
    await winning
    for use in (sending, send(slow, "b")):
        assert isinstance(await error_of(use), ProducerDisconnectedError)
    assert (scene.state.owner_level, scene.bodies) == (2, ["a", "c"])


async def test_start_at_the_highest_level_takes_a_new_id(scene: Scene) -> None:
    """The former process is shut out, and what is published goes on counting, over two such starts."""
    former = scene.process()
    await send(former, "0", "1")
    await former.aclose()
    stored = scene.states.state(KEY)
    high = replace(stored.state, owner_level=MAX_OWNER_LEVEL - 2, has_published=False)
    scene.states.put(KEY, replace(stored, state=high))
    ids = {stored.state.producer_id}
    for life, level in ((1, MAX_OWNER_LEVEL - 1), (2, 0), (3, 1)):
        producer = scene.process()
        assert await count(producer) == life + 1
        await send(producer, f"{life + 1}")
        assert await count(producer) == life + 2
        await producer.aclose()
        assert (scene.state.owner_level, scene.state.published) == (level, life + 2)
        ids.add(scene.state.producer_id)
    assert len(ids) == 2
    assert scene.bodies == [f"{number}" for number in range(5)]


async def test_state_of_the_first_version_is_read(scene: Scene) -> None:
    """What was published is the service's number less the stored start."""
    former = scene.process()
    await send(former, "a", "b")
    await former.aclose()
    scene.states.put(KEY, StoredPublisherState(PublisherState(scene.state.producer_id, 0, 0), "old"))
    assert await count(scene.process()) == 2


async def test_replayable_processes_that_overlap_store_each_event_once(scene: Scene) -> None:
    """Two that send the same events at once: every send returns, and each event is stored once."""
    orders = [f"{number}" for number in range(40)]

    async def publish(producer: HubProducer) -> None:
        for order in orders[await count(producer) :]:
            await send(producer, order)

    await asyncio.gather(*(publish(scene.process(mode="replayable")) for _ in range(2)))
    assert scene.bodies == orders


# ------------------------------------------------------------------------------------------------- forgotten


@pytest.mark.parametrize("mode", ["exclusive", "replayable"])
@pytest.mark.parametrize("accept_unknown_producers", [False, True], ids=["refused", "as new"])
async def test_start_of_a_forgotten_publisher_raises_until_new_id_is_allowed(
    scene: Scene, mode: str, accept_unknown_producers: bool
) -> None:
    """A start fails until it is asked to take a new id; then it counts from the newest mark."""
    former = scene.process(mode=mode)
    await send(former, "0", "1")
    await former.aclose()
    scene.forget(accept_unknown_producers=accept_unknown_producers)
    for _ in range(2):
        for use in (send, lambda each, _: count(each)):
            assert isinstance(await error_of(use(scene.process(mode=mode), "x")), ProducerStateLostError)
    fresh = scene.process(mode=mode, on_state_lost="new")
    assert await count(fresh) == 2
    await send(fresh, "2")
    assert await count(fresh) == 3
    await fresh.aclose()
    assert await count(scene.process(mode=mode)) == 3
    assert scene.bodies == ["0", "1", "2"]


@pytest.mark.parametrize("accept_unknown_producers", [False, True], ids=["refused", "as new"])
async def test_send_of_a_forgotten_publisher_raises_at_its_next_attach(
    scene: Scene, accept_unknown_producers: bool
) -> None:
    """At its next attach; nothing of what it is given then is stored."""
    producer = scene.process()
    await send(producer, "0")
    scene.forget(accept_unknown_producers=accept_unknown_producers)
    scene.hub.lose_connections()
    for _ in range(2):
        assert isinstance(await error_of(send(producer, "1")), ProducerStateLostError)
    assert scene.bodies == ["0"]


@pytest.mark.parametrize("accept_unknown_producers", [False, True], ids=["refused", "as new"])
async def test_start_with_a_new_id_counts_what_was_accepted(scene: Scene, accept_unknown_producers: bool) -> None:
    """A start with a new id counts what was accepted until then, not what the last mark in passing said."""
    producer = scene.process()
    await send(producer, "0")
    await send(producer, "1")
    scene.forget(accept_unknown_producers=accept_unknown_producers)
    scene.hub.lose_connections()
    assert isinstance(await error_of(send(producer, "2")), ProducerStateLostError)
    assert scene.state.published == 1
    await producer.aclose()
    assert (scene.state.published, scene.state.is_clean) == (2, False)
    assert await count(scene.process(on_state_lost="new")) == 2


class ForgettingTransport(FakeTransport):
    """One whose service has forgotten its producers at the second attach to partition 0."""

    def __init__(self, hub: FakeHub, *, accept_unknown_producers: bool) -> None:
        super().__init__(hub)
        self._accept_unknown_producers = accept_unknown_producers
        self._attaches = 0

    async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
        self._attaches += 1
        if self._attaches > 1:
            self.hub.partition("0").publishing.forget(accept_unknown_producers=self._accept_unknown_producers)
        return await super().open_send_link(spec)


@pytest.mark.parametrize("accept_unknown_producers", [False, True], ids=["refused", "as new"])
@pytest.mark.parametrize("fault", [SendFault.LOST_BEFORE_STORE, SendFault.LOST_AFTER_STORE], ids=lambda each: each.name)
async def test_doubt_that_the_service_has_forgotten_raises(
    scene: Scene, accept_unknown_producers: bool, fault: SendFault
) -> None:
    """No task can settle it any more: the waiters get the error, and so does every later send."""
    producer = scene.process(
        transport=ForgettingTransport(scene.hub, accept_unknown_producers=accept_unknown_producers)
    )
    failed: list[tuple[int, type[Exception]]] = []
    buffered = HubBufferedProducer(
        producer, on_error=lambda events, partition_id, error: failed.append((len(events), type(error)))
    )
    first = await buffered.send(EventData("0"), partition_id="0")
    await first
    scene.hub.lose(fault)
    async with asyncio.timeout(300):
        for text in ("1", "2"):
            await buffered.send(EventData(text), partition_id="0")
            await buffered.flush()
        assert failed == [(1, ProducerStateLostError)] * 2
        assert isinstance(await error_of(send(producer, "3")), ProducerStateLostError)
        with pytest.raises(EventPumpError):
            await buffered.aclose()
    assert "2" not in scene.bodies


async def test_send_refused_as_not_allowed_attaches_again(scene: Scene) -> None:
    """A transfer that is refused as not allowed is followed by an attach, which shows what is the matter."""
    producer = scene.process()
    await send(producer, "0")
    scene.forget(accept_unknown_producers=False)
    assert isinstance(await error_of(send(producer, "1")), RequestRefusedError)
    assert isinstance(await error_of(send(producer, "1")), ProducerStateLostError)


async def test_start_after_reset_state_is_the_first(scene: Scene) -> None:
    """After `reset_state` the next start is the first."""
    former = scene.process()
    await send(former, "0")
    await former.aclose()
    scene.forget(accept_unknown_producers=False)
    store = MemoryPublisherStateStore(scene.states)
    await store.open()
    await store.reset_state(*KEY)
    assert await count(scene.process()) == 0


async def test_first_send_stores_the_published_mark(scene: Scene) -> None:
    """One write per start, however many sends; where it fails, the send succeeds and the next one tries again."""

    class Failing(MemoryPublisherStateStore):
        fails = True

        async def write_state(self, name: str, partition_id: str, state: PublisherState, replaces: Any) -> Any:
            if state.has_published and self.fails:
                raise StoreError("write state", "the disk is full")
            return await super().write_state(name, partition_id, state, replaces)

    store = Failing(scene.states)
    producer = scene.process(store=store)
    await send(producer, "a")
    before = scene.state
    assert not before.has_published
    store.fails = False
    await asyncio.gather(send(producer, "b"), send(producer, "c"))
    assert scene.state.has_published
    version = scene.states.state(KEY).version
    await send(producer, "d")
    assert scene.states.state(KEY).version == version


async def test_published_count_continues_beyond_2_31() -> None:
    """A process that publishes more than 2^31 events (25 days at 1,000 a second) loses none of its count."""
    states = SharedStates()
    store = MemoryPublisherStateStore(states)
    await store.open()
    first = await store.write_state(*KEY, PublisherState(1, 0, 5, published=7, has_published=True), None)
    assert first is not None
    marks = StateMarks(
        store, *KEY, Started(first, 5, 7, is_claimed=False), is_shared=False, retry=RETRY, rng=random.Random(1)
    )
    for number in (NUMBERS - 1, 4, NUMBERS - 1, 4):
        marks.published(number)
    assert marks.count(6) == 7 + 2 * NUMBERS + 1
    await marks.close(is_clean=True)
    await marks.aclose()
    assert (states.state(KEY).state.start, states.state(KEY).state.published) == (4, 7 + 2 * NUMBERS - 1)


async def test_marks_are_written_at_intervals_and_at_close(scene: Scene) -> None:
    """Off the way of the sends, at most once per interval; a slow or failing store delays no send."""
    writes: list[int] = []

    class Slow(MemoryPublisherStateStore):
        async def write_state(self, name: str, partition_id: str, state: PublisherState, replaces: Any) -> Any:
            writes.append(state.published)
            if state.published > 1:
                await asyncio.sleep(20)
            return await super().write_state(name, partition_id, state, replaces)

    producer = scene.process(store=Slow(scene.states))
    started = asyncio.get_running_loop().time()
    for body in "abc":
        await send(producer, body)
    assert asyncio.get_running_loop().time() == started
    assert writes == [0, 1]
    await asyncio.sleep(MARK_INTERVAL + 1)
    await send(producer, "d")
    assert writes == [0, 1, 3]
    await producer.aclose()
    assert asyncio.get_running_loop().time() - started < MARK_INTERVAL + 30
    assert scene.state.published == 1


@pytest.mark.parametrize("retries", [3, None])
async def test_first_mark_that_cannot_be_written_delays_no_send(
    scene: Scene, caplog: pytest.LogCaptureFixture, retries: int | None
) -> None:
    """The send returns and the mark's failure is logged, also where sends themselves are tried without end."""

    class Refusing(MemoryPublisherStateStore):
        async def write_state(self, name: str, partition_id: str, state: PublisherState, replaces: Any) -> Any:
            if state.has_published:
                raise StoreError("write state", partition_id)
            return await super().write_state(name, partition_id, state, replaces)

    retry = RetryOptions(max_retries=retries, base_delay=0.1, max_delay=1.0)
    producer = scene.process(store=Refusing(scene.states), retry=retry)
    async with asyncio.timeout(60):
        await send(producer, "a")
    assert scene.bodies == ["a"]
    assert "a mark was not written" in caplog.text


async def test_store_that_raises_cancelled_error_is_retried(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """No task was cancelled: the call is tried again, and then it is a `StoreError`."""

    class Cancelling(MemoryPublisherStateStore):
        left = 1

        async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
            if self.left:
                self.left -= 1
                raise asyncio.CancelledError
            return await super().read_state(name, partition_id)

    store = Cancelling(scene.states)
    producer = scene.process(store=store)
    with caplog.at_level(logging.CRITICAL, "eventpump.producer"):
        await send(producer, "a")
        store.left = 1000
        assert isinstance(await error_of(send(scene.process(store=store), "b")), StoreError)


async def test_producers_with_one_store_close_it_with_the_last_of_them(scene: Scene) -> None:
    """One that closes, or that never published, takes the store from no other one."""
    store = MemoryPublisherStateStore(scene.states)
    first = scene.process(store=store)
    second = scene.process(store=store, transport=FakeTransport(scene.hub))
    unused = scene.process(store=store)
    await send(first, "a")
    await second.send([EventData("b")], partition_id="1")
    await unused.aclose()
    await first.aclose()
    await second.send([EventData("c")], partition_id="1")
    await second.aclose()
    assert scene.states.state((NAME, "1")).state.is_clean
    with pytest.raises(ClosedError):
        await store.open()


async def test_store_that_cannot_be_opened_is_closed_with_the_producer(scene: Scene) -> None:
    """A blob store has a connection by then. Another producer that uses it keeps it."""

    class Missing(MemoryPublisherStateStore):
        is_missing, closed = True, 0

        async def open(self) -> None:
            if self.is_missing:
                raise ConfigurationError("container", "there is no container")
            await super().open()

        async def aclose(self) -> None:
            self.closed += 1
            await super().aclose()

    lonely, store = Missing(scene.states), Missing(scene.states)
    only = scene.process(store=lonely)
    with pytest.raises(ConfigurationError, match="container"):
        await send(only, "a")
    await only.aclose()
    assert lonely.closed == 1
    first, second = scene.process(store=store), scene.process(store=store)
    for each in (first, second):
        with pytest.raises(ConfigurationError, match="container"):
            await send(each, "a")
    await first.aclose()
    assert store.closed == 0
    store.is_missing = False
    await send(second, "a")
    await second.aclose()
    assert store.closed == 1


@pytest.mark.parametrize("mode", ["exclusive", "replayable"])
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
async def test_start_with_a_store_that_answers_wrongly_is_an_error(
    scene: Scene, mode: str, *, stores: bool, is_first: bool
) -> None:
    """None for what it has stored, or always: the start ends with the error of a store, and the loop is not blocked."""
    writes = 0

    class Wrong(MemoryPublisherStateStore):
        async def write_state(self, *args: Any) -> StoredPublisherState | None:
            nonlocal writes
            writes += 1
            assert writes < 1000
            if stores:
                await super().write_state(*args)
            return None

    if not is_first:
        former = scene.process(mode=mode)
        await send(former, "a")
        if mode == "replayable":
            await scene.crash(former)
            scene.states.put(KEY, replace(scene.states.state(KEY), state=replace(scene.state, is_clean=True)))
    producer = scene.process(store=Wrong(scene.states), mode=mode)
    if stores and mode == "replayable" and not is_first:
        await send(producer, "b")  # the state that it found is the one that it was to write
        return
    with pytest.raises(StoreError, match="write state of partition 0: the store answered"):
        await send(producer, "b")


async def test_start_on_an_unknown_partition_stores_nothing(scene: Scene) -> None:
    """Nothing is kept of a partition that the service refuses before anything is stored."""
    producer = scene.process()
    with pytest.raises(RequestRefusedError):
        await producer.send([EventData("a")], partition_id="99")
    assert not publishers_of(producer)


async def test_options_hold_for_the_first_start_only(scene: Scene) -> None:
    """A state that is stored is right instead."""
    options = {"0": PartitionPublishingOptions(starting_sequence_number=100)}
    first = scene.process(partition_options=options)
    await send(first, "a")
    assert await count(first) == 1
    await first.aclose()
    second = scene.process(partition_options=options)
    found = await second.get_partition_publishing_properties("0")
    assert (found.events_published, found.last_published_sequence_number) == (1, 101)
