"""The producer's side of idempotent publishing: batches, lists, options, names; on virtual time, without a network."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from eventpump.core.claim import StoredPublisherState
from eventpump.core.status import BatchState
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    EventError,
    EventTooLargeError,
    InvalidClientStateError,
    LinkDetachedError,
    ProducerDisconnectedError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    ServiceBusyError,
    ServiceError,
)
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import PRODUCER_ID
from eventpump.options.base import RetryOptions
from eventpump.options.producer import PartitionPublishingOptions
from eventpump.producer.batch import EventBatch
from eventpump.producer.producer import HubProducer
from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore
from eventpump.storage.publisher_states.sqlite import SqlitePublisherStateStore
from eventpump.testing.transport import FakeHub, FakeTransport, SendFault
from tests.support.states import SharedStates
from tests.unit.producer.awaiting import error_of, idle

AFTER, BEFORE = SendFault.LOST_AFTER_STORE, SendFault.LOST_BEFORE_STORE
RETRY = RetryOptions(max_retries=2, base_delay=1.0, max_delay=8.0)
AWAY = LinkDetachedError("away")


class Scene:
    """A hub, and producers to it."""

    def __init__(self) -> None:
        self.hub = FakeHub(partitions=2)
        self.producers: list[HubProducer] = []

    def producer(self, **options: Any) -> HubProducer:
        every: dict[str, Any] = {"idempotent": True, "retry": RETRY, "rng": random.Random(1), **options}
        producer = HubProducer(FakeTransport(self.hub), self.hub.name, **every)
        self.producers.append(producer)
        return producer

    def bodies(self, partition_id: str = "0") -> list[str]:
        return [event.body_as_str() for event in self.hub.events(partition_id)]

    async def in_doubt(self, producer: HubProducer, events: EventBatch | list[EventData], tries: int = 3) -> None:
        """Send to partition 0, and lose the answer and the way there, until the call gives up; `hub.accept` ends it."""
        self.hub.lose(AFTER, partition_id="0")
        to: dict[str, Any] = {} if isinstance(events, EventBatch) else {"partition_id": "0"}
        sending = asyncio.ensure_future(producer.send(events, **to))
        await idle()
        self.hub.refuse(AWAY, operation="send", partition_id="0", times=10_000)
        assert isinstance(await error_of(sending), PublishOutcomeUnknownError)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """A test's scene. Afterwards, nothing of it runs."""
    scene = Scene()
    yield scene
    for producer in scene.producers:
        try:
            await producer.aclose(1.0)
        except PublishOutcomeUnknownError:
            continue
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, "a producer left a task behind"


def events(*bodies: str) -> list[EventData]:
    return list(map(EventData, bodies))


async def batch_of(producer: HubProducer, *bodies: str, partition_id: str = "0") -> EventBatch:
    batch = await producer.create_batch(partition_id=partition_id)
    for body in bodies:
        assert batch.try_add(EventData(body))
    return batch


# ----------------------------------------------------------------------------------------------------- options


async def test_sends_during_the_first_attach_keep_the_order_of_the_calls(scene: Scene) -> None:
    """A send that is called in whatever turn of the loop while others wait for the first one overtakes none of them."""
    producer = scene.producer()
    sends: list[asyncio.Future[None]] = []
    while not sends or not sends[0].done():
        sends.append(asyncio.ensure_future(producer.send(EventData(f"{len(sends)}"), partition_id="0")))
        await asyncio.sleep(0)
    await asyncio.gather(*sends)
    assert len(sends) > 3
    assert scene.bodies() == [f"{number}" for number in range(len(sends))]


async def test_send_by_gateway_or_key_is_refused(scene: Scene) -> None:
    """The gateway and partition keys are refused, for events and for batches."""
    producer = scene.producer()
    targets: list[dict[str, Any]] = [{}, {"partition_key": "k"}, {"partition_key": "k", "partition_id": "0"}]
    for target in targets:
        for use in (producer.send(events("a"), **target), producer.create_batch(**target)):
            error = await error_of(use)
            assert isinstance(error, ConfigurationError)
            assert "partition" in str(error)
    assert scene.hub.send_links == []


async def test_options_that_need_idempotence_are_refused_without(scene: Scene) -> None:
    """Options that need idempotence are refused without; values lie in the service's range; nothing changes later."""
    options = {"0": PartitionPublishingOptions(owner_level=3)}
    for wrong in (
        {"idempotent": False, "partition_options": options},
        {"idempotent": False, "mode": "exclusive"},
        {"idempotent": False, "name": "n", "state_store": MemoryPublisherStateStore()},
        {"name": "n"},
        {"state_store": MemoryPublisherStateStore()},
        {"mode": "replayable"},
        {"mode": "other", "name": "n", "state_store": MemoryPublisherStateStore()},
        {"on_doubt": "accept"},
        {"on_doubt": "scan", "name": "n", "state_store": MemoryPublisherStateStore()},
        {"scan_consumer_group": "tail", "name": "n", "state_store": MemoryPublisherStateStore()},
        {"on_state_lost": "new"},
        {"max_in_flight": 2},
    ):
        with pytest.raises(ConfigurationError):
            scene.producer(**wrong)
    for value in ({"producer_group_id": -1}, {"owner_level": 2**15}, {"starting_sequence_number": 2**31}):
        with pytest.raises(ConfigurationError):
            PartitionPublishingOptions(**value)
    producer = scene.producer(partition_options=options)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options["0"].owner_level = 4  # type: ignore[misc]  # it is what must not work
    options["0"] = PartitionPublishingOptions(owner_level=9)
    assert (await producer.get_partition_publishing_properties("0")).owner_level == 3
    with pytest.raises(AttributeError):
        producer.is_idempotent = False  # type: ignore[misc]  # it is what must not work


async def test_options_are_sent_and_the_rest_is_filled(scene: Scene) -> None:
    """Given values override the service's; those left out are the service's; each partition has its own."""
    options = {"0": PartitionPublishingOptions(owner_level=3, starting_sequence_number=41)}
    producer = scene.producer(partition_options=options)
    batches = [await batch_of(producer, "a", "b", partition_id=partition_id) for partition_id in "01"]
    for batch in batches:
        await producer.send(batch)
    assert [batch.starting_published_sequence_number for batch in batches] == [42, 1]
    zero, one = [await producer.get_partition_publishing_properties(each) for each in "01"]
    assert (zero.owner_level, zero.last_published_sequence_number) == (3, 43)
    assert (one.owner_level, one.last_published_sequence_number) == (0, 2)
    assert zero.producer_group_id != one.producer_group_id


async def test_publishing_properties_open_the_link(scene: Scene) -> None:
    """They are read from the service where nothing was sent yet; a plain producer has False and Nones."""
    producer = scene.producer()
    found = await producer.get_partition_publishing_properties("1")
    assert found.is_idempotent_publishing_enabled
    assert (found.owner_level, found.last_published_sequence_number, found.events_published) == (0, 0, None)
    assert found.producer_group_id is not None
    assert len(scene.hub.send_links) == 1
    plain = await scene.producer(idempotent=False).get_partition_publishing_properties("1")
    assert dataclasses.astuple(plain) == ("1", False, None, None, None, None)


async def test_send_with_an_invented_id_or_unknown_partition_is_refused(scene: Scene) -> None:
    """The service's refusal is raised, from a send and from the properties alike."""
    options = {"0": PartitionPublishingOptions(100, 100, 100)}
    producer = scene.producer(partition_options=options)
    for partition_id in ("0", "9"):
        assert isinstance(await error_of(producer.send(events("a"), partition_id=partition_id)), RequestRefusedError)
        assert isinstance(
            await error_of(producer.get_partition_publishing_properties(partition_id)), RequestRefusedError
        )


# ----------------------------------------------------------------------------------------- batches and their states


async def test_send_assigns_numbers(scene: Scene) -> None:
    """Batches are sent in any order; a list gets a number on each event, a batch that of its first."""
    producer = scene.producer()
    first, second = await batch_of(producer, "a", "b"), await batch_of(producer, "c")
    assert [batch.starting_published_sequence_number for batch in (first, second)] == [None, None]
    await producer.send(second)
    await producer.send(listed := events("d", "e"), partition_id="0")
    await producer.send(first)
    assert second.starting_published_sequence_number == 1
    assert [event.published_sequence_number for event in listed] == [2, 3]
    assert first.starting_published_sequence_number == 4
    assert scene.bodies() == list("cdeab")


async def test_send_of_a_published_batch_is_refused(scene: Scene) -> None:
    """A published batch takes no events and is not sent again; nor are events that carry numbers, in any set."""
    producer = scene.producer()
    batch = await batch_of(producer, "a")
    await producer.send(batch)
    assert batch.state is BatchState.PUBLISHED
    listed = events("b", "c")
    await producer.send(listed, partition_id="0")
    other = await producer.create_batch(partition_id="1")
    with pytest.raises(EventError):
        batch.try_add(EventData("x"))
    with pytest.raises(EventError):
        other.try_add(listed[0])
    for use in (
        producer.send(batch),
        producer.send(listed, partition_id="0"),
        producer.send(listed[0], partition_id="1"),
        producer.send([EventData("x"), listed[1]], partition_id="0", split=True),
    ):
        assert isinstance(await error_of(use), EventError)
    assert (scene.bodies(), scene.bodies("1")) == (list("abc"), [])


async def test_send_of_a_batch_in_flight_joins(scene: Scene) -> None:
    """On its way it takes no events; sending it again joins: one success, once."""
    producer = scene.producer()
    batch = await batch_of(producer, "a")
    scene.hub.hang("transfer")
    sends = [asyncio.ensure_future(producer.send(batch)) for _ in range(3)]
    await idle()
    assert batch.state is BatchState.IN_FLIGHT
    with pytest.raises(EventError):
        batch.try_add(EventData("x"))
    sends[0].cancel()
    await idle()
    assert batch.state is BatchState.IN_FLIGHT
    scene.hub.answer("transfer")
    await asyncio.gather(*sends[1:])
    assert (batch.state, scene.bodies()) == (BatchState.PUBLISHED, ["a"])


async def test_batch_that_was_refused_is_unlocked(scene: Scene) -> None:
    """Refused: no numbers, it takes events, and is sent as new."""
    producer = scene.producer()
    batch = await batch_of(producer, "a")
    scene.hub.refuse(error_for("amqp:not-allowed", "no"), operation="transfer")
    assert isinstance(await error_of(producer.send(batch)), RequestRefusedError)
    assert (batch.state, batch.starting_published_sequence_number) == (BatchState.REFUSED, None)
    assert batch.try_add(EventData("b"))
    await producer.send(batch)
    assert (batch.starting_published_sequence_number, scene.bodies()) == (1, ["a", "b"])


@pytest.mark.parametrize("operation", ["send", "credit"], ids=["attaching", "waiting for credit"])
async def test_batch_cancelled_before_it_was_sent_is_unlocked(scene: Scene, operation: str) -> None:
    """Cancelled before its first byte left: no numbers, unlocked, and sent as new; a list likewise."""
    producer = scene.producer()
    batch = EventBatch(1000, partition_id="0", is_idempotent=True)
    batch.try_add(EventData("a"))
    listed = events("b")
    scene.hub.hang(operation)
    for send in (producer.send(batch), producer.send(listed, partition_id="0")):
        sending = asyncio.ensure_future(send)
        await idle()
        sending.cancel()
        assert isinstance(await error_of(sending), asyncio.CancelledError)
    assert batch.state is BatchState.REFUSED
    scene.hub.answer(operation)
    await producer.send(listed, partition_id="0")
    await producer.send(batch)
    assert scene.bodies() == ["b", "a"]


async def test_batch_cancelled_while_sent_is_in_doubt_until_settled(scene: Scene) -> None:
    """Cancelled on its way: `CancelledError`, in doubt and locked; what happened is read from the batch."""
    producer = scene.producer()
    batch = await batch_of(producer, "a")
    scene.hub.hang("transfer")
    sending = asyncio.ensure_future(producer.send(batch))
    await idle()
    sending.cancel()
    assert isinstance(await error_of(sending), asyncio.CancelledError)
    assert batch.state is BatchState.IN_DOUBT
    with pytest.raises(EventError):
        batch.try_add(EventData("x"))
    settling = asyncio.ensure_future(producer.settle("0"))
    await producer.settle("1")
    await idle()
    assert not settling.done()
    scene.hub.answer("transfer")
    await settling
    assert (batch.state, batch.starting_published_sequence_number) == (BatchState.PUBLISHED, 1)


async def test_send_repeated_until_it_succeeds_is_exactly_once(scene: Scene) -> None:
    """Sending the same batch, list or split list again until it succeeds publishes it once."""
    producer = scene.producer()
    sets: list[tuple[Any, dict[str, Any]]] = [
        (await batch_of(producer, "a", "b"), {}),
        (events("c", "d"), {"partition_id": "0"}),
        (events("e" * 400_000, "f" * 400_000, "g" * 400_000), {"partition_id": "0", "split": True}),
    ]
    for what, how in sets:
        for after in (0, 1):
            scene.hub.lose(AFTER, after=after)
        scene.hub.refuse(AWAY, operation="send", times=7)
        scene.hub.detach()
        while True:
            try:
                await producer.send(what if isinstance(what, EventBatch) else list(what), **how)
                break
            except (PublishOutcomeUnknownError, ServiceError):
                continue
        scene.hub.accept()
    assert [body[0] for body in scene.bodies()] == list("abcdefg")


async def test_send_the_batch_of_the_error_waits_for_a_list(scene: Scene) -> None:
    """The error has the batch that was made of the list; sent again it is settled once, and the events get numbers."""
    producer = scene.producer()
    listed = events("a", "b")
    scene.hub.lose(AFTER, partition_id="0")
    sending = asyncio.ensure_future(producer.send(listed, partition_id="0"))
    await idle()
    scene.hub.refuse(AWAY, operation="send", partition_id="0", times=10_000)
    error = await error_of(sending)
    assert isinstance(error, PublishOutcomeUnknownError)
    assert error.batch is not None
    assert (list(error.batch.events), error.batch.state) == (listed, BatchState.IN_DOUBT)
    again = asyncio.ensure_future(producer.send(error.batch))
    await idle()
    assert not again.done()
    scene.hub.accept()
    await again
    assert [event.published_sequence_number for event in listed] == [1, 2]
    assert scene.bodies() == ["a", "b"]


@pytest.mark.parametrize("fault", [AFTER, BEFORE])
async def test_send_the_batch_of_the_error_after_it_was_settled(scene: Scene, fault: SendFault) -> None:
    """It returns, as often as it is called, and sends nothing; a batch that was never in doubt is still refused."""
    producer = scene.producer()
    batch = await batch_of(producer, "a")
    scene.hub.lose(fault, partition_id="0")
    sending = asyncio.ensure_future(producer.send(batch))
    await idle()
    scene.hub.refuse(AWAY, operation="send", partition_id="0", times=10_000)
    error = await error_of(sending)
    assert isinstance(error, PublishOutcomeUnknownError)
    assert error.batch is batch
    scene.hub.accept()
    await producer.settle("0")
    for _ in range(2):
        await producer.send(batch)
    assert (batch.state, scene.bodies()) == (BatchState.PUBLISHED, ["a"])
    certain = await batch_of(producer, "b")
    await producer.send(certain)
    assert isinstance(await error_of(producer.send(certain)), EventError)


async def test_batch_of_the_error_is_the_message_of_a_split_list(scene: Scene) -> None:
    """It is waited for by itself; the list, sent again, goes on with the next message."""
    producer = scene.producer()
    listed = [EventData(bytes([97 + number]) * 400_000) for number in range(5)]
    scene.hub.lose(AFTER, after=1)
    sending = asyncio.ensure_future(producer.send(listed, partition_id="0", split=True))
    await idle()
    scene.hub.refuse(AWAY, operation="send", partition_id="0", times=10_000)
    error = await error_of(sending)
    assert isinstance(error, PublishOutcomeUnknownError)
    assert error.batch is not None
    assert list(error.batch.events) == listed[2:4]
    scene.hub.accept()
    await producer.send(error.batch)
    await producer.send(listed, partition_id="0", split=True)
    assert [body[0] for body in scene.bodies()] == list("abcde")
    assert [event.published_sequence_number for event in listed] == [1, 2, 3, 4, 5]


async def test_send_of_an_event_in_doubt_in_another_set_is_refused(scene: Scene) -> None:
    """Alone, in another list or batch, on any partition; the identical list joins; settled, they carry numbers."""
    producer = scene.producer()
    listed = events("a", "b")
    await scene.in_doubt(producer, listed)
    other = await producer.create_batch(partition_id="1")
    assert other.try_add(listed[0])
    for use in (
        producer.send(listed[0], partition_id="0"),
        producer.send(listed[::-1], partition_id="0"),
        producer.send([*listed, EventData("c")], partition_id="0"),
        producer.send(listed, partition_id="1"),
        producer.send([EventData("x" * 1_000_000), EventData("y" * 100_000), listed[1]], partition_id="1", split=True),
        producer.send(other),
    ):
        error = await error_of(use)
        assert isinstance(error, EventError)
        assert "in doubt" in str(error)
    scene.hub.accept()
    await producer.send(list(listed), partition_id="0")
    assert [event.published_sequence_number for event in listed] == [1, 2]
    assert (scene.bodies(), scene.bodies("1")) == (["a", "b"], [])


async def test_send_of_an_event_of_a_batch_in_doubt_is_refused(scene: Scene) -> None:
    """A batch's events are in doubt with it, and free when it is refused or published."""
    producer = scene.producer()
    batch = await producer.create_batch(partition_id="0")
    event = EventData("a")
    batch.try_add(event)
    await scene.in_doubt(producer, batch)
    assert isinstance(await error_of(producer.send(event, partition_id="1")), EventError)
    scene.hub.accept()
    await producer.settle("0")
    await producer.send(event, partition_id="1")
    assert (scene.bodies(), scene.bodies("1")) == (["a"], ["a"])


async def test_send_of_a_batch_of_another_producer_is_refused(scene: Scene) -> None:
    """What one producer has in doubt, another does not send as new; nor does a plain one send it at all."""
    producer = scene.producer()
    batch = await batch_of(producer, "a")
    await scene.in_doubt(producer, batch)
    assert isinstance(await error_of(scene.producer().send(batch)), EventError)
    assert isinstance(await error_of(scene.producer(idempotent=False).send(batch)), ConfigurationError)


async def test_send_of_one_list_by_two_callers_at_first_use_joins(scene: Scene) -> None:
    """They join, though both have to wait for the partition's state to be read."""

    class Slow(MemoryPublisherStateStore):
        async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
            await asyncio.sleep(1)
            return await super().read_state(name, partition_id)

    producer = scene.producer(name="n", state_store=Slow())
    listed = events("a", "b")
    await asyncio.gather(*(producer.send(listed, partition_id="0") for _ in range(3)))
    large = events(*("x" * 400_000 for _ in range(4)))
    await asyncio.gather(*(producer.send(large, partition_id="1", split=True) for _ in range(3)))
    assert (scene.bodies(), len(scene.bodies("1"))) == (["a", "b"], 4)


async def test_send_of_too_large_a_list_is_refused_with_sizes(scene: Scene) -> None:
    """More than fits one message is refused with the sizes, nothing is stored, and the next send is the first."""
    producer = scene.producer()
    scene.hub.max_message_size = 2000
    listed = events(*("x" * 300 for _ in range(10)))
    error = await error_of(producer.send(listed, partition_id="0"))
    assert isinstance(error, EventTooLargeError)
    assert error.limit == 2000 < error.size
    assert isinstance(
        await error_of(producer.send(EventData("x" * 2000), partition_id="0", split=True)), EventTooLargeError
    )
    await producer.send(listed, partition_id="0", split=True)
    assert [event.published_sequence_number for event in listed] == list(range(1, 11))
    batch = await producer.create_batch(partition_id="0")
    while batch.try_add(EventData("y")):
        continue
    assert batch.size <= 2000
    assert len(batch.seal().numbered(2**63 - 1, 2**15 - 1, 2**31 - 1)) == batch.size
    await producer.send(batch)


# ---------------------------------------------------------------------------------------------- partitions, failure


async def test_send_to_one_partition_never_waits_for_another(scene: Scene) -> None:
    """One hangs at its attach, at its transfer, or is in doubt: the other goes on."""
    producer = scene.producer()
    await scene.in_doubt(producer, events("a"))
    waiting = asyncio.ensure_future(producer.send(events("b"), partition_id="0"))
    for number in range(3):
        await producer.send(events(f"{number}"), partition_id="1")
    assert (scene.bodies("0"), scene.bodies("1")) == (["a"], ["0", "1", "2"])
    scene.hub.accept()
    await waiting


async def test_send_after_a_final_error_fails_until_a_new_producer(scene: Scene) -> None:
    """Fenced or disagreeing: every later send to that partition fails, the other goes on, and a new producer works."""
    producer = scene.producer()
    await producer.send(events("a", "b"), partition_id="0")
    known = (await producer.get_partition_publishing_properties("0")).producer_group_id
    stale = scene.producer(partition_options={"0": PartitionPublishingOptions(known, 0, 1)})
    fencing = scene.producer(partition_options={"0": PartitionPublishingOptions(known, 1, 2)})
    for _ in range(2):
        assert isinstance(await error_of(stale.send(events("x"), partition_id="0")), InvalidClientStateError)
    await fencing.send(events("c"), partition_id="0")
    for _ in range(2):
        assert isinstance(await error_of(producer.send(events("x"), partition_id="0")), ProducerDisconnectedError)
    await producer.send(events("y"), partition_id="1")
    await stale.send(events("z"), partition_id="1")
    await scene.producer().send(events("d"), partition_id="0")
    assert (scene.bodies(), scene.bodies("1")) == (list("abcd"), ["y", "z"])


# ------------------------------------------------------------------------------------------------------- closing


async def test_close_settles_within_its_deadline(scene: Scene) -> None:
    """What is in doubt is settled, what is out has its answer, what was not sent fails; then all is closed."""
    producer = scene.producer()
    batch = await batch_of(producer, "a")
    await scene.in_doubt(producer, batch)
    scene.hub.hang("transfer")
    other = asyncio.ensure_future(producer.send(events("b"), partition_id="1"))
    waiting = asyncio.ensure_future(producer.send(events("c"), partition_id="1"))
    await idle()
    asyncio.get_running_loop().call_later(3, scene.hub.accept)
    asyncio.get_running_loop().call_later(3, scene.hub.answer, "transfer")
    await producer.aclose(60)
    await other
    assert isinstance(await error_of(waiting), ClosedError)
    assert batch.state is BatchState.PUBLISHED
    for use in (producer.send(events("x"), partition_id="0"), producer.create_batch(partition_id="0")):
        assert isinstance(await error_of(use), ClosedError)
    await producer.aclose()


async def test_close_raises_what_stayed_in_doubt(scene: Scene) -> None:
    """After the deadline, on time, with the numbers; the batch says so too; closing again is fine."""
    producer = scene.producer()
    batch = await batch_of(producer, "a", "b")
    await scene.in_doubt(producer, batch)
    started = asyncio.get_running_loop().time()
    error = await error_of(producer.aclose(5))
    assert isinstance(error, PublishOutcomeUnknownError)
    assert (error.partition_id, error.first, error.count, error.batch) == ("0", 1, 2, batch)
    assert asyncio.get_running_loop().time() - started == 5
    assert batch.state is BatchState.IN_DOUBT
    await producer.aclose()


@pytest.mark.parametrize("turns", range(6))
async def test_close_that_is_cancelled_closes(scene: Scene, turns: int) -> None:
    """Cancelled while it settles, and again while it closes: everything is closed nevertheless."""

    class Slow(MemoryPublisherStateStore):
        is_closed = False

        async def aclose(self) -> None:
            await asyncio.sleep(1)
            self.is_closed = True

    store = Slow()
    producer = scene.producer(name="n", state_store=store)
    await scene.in_doubt(producer, events("a"))
    closing = asyncio.ensure_future(producer.aclose(1000))
    await asyncio.sleep(1)
    closing.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    assert isinstance(await error_of(closing), asyncio.CancelledError)
    await producer.aclose()
    assert store.is_closed
    assert isinstance(await error_of(producer.get_partition_ids()), ClosedError)


async def test_close_while_a_state_is_read_leaves_no_publisher(scene: Scene) -> None:
    """A publisher that is being made when the producer is closed is not left running."""
    reading = asyncio.Event()

    class Slow(MemoryPublisherStateStore):
        async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
            reading.set()
            await asyncio.sleep(1)
            return None

    producer = scene.producer(name="n", state_store=Slow())
    sending = asyncio.ensure_future(producer.send(events("a"), partition_id="0"))
    await reading.wait()
    await producer.aclose()
    assert isinstance(await error_of(sending), ClosedError)
    assert scene.hub.send_links == []


# --------------------------------------------------------------------------------------------------------- states


async def test_restart_replayable_continues_at_the_services_number(scene: Scene, tmp_path: Path) -> None:
    """Restored from the store: same id and level, null number; the answer has the number of published events."""
    for restart in range(3):
        store = SqlitePublisherStateStore(tmp_path / "states.db")
        producer = scene.producer(name="feed", state_store=store, mode="replayable")
        found = await producer.get_partition_publishing_properties("0")
        assert found.events_published == 3 * restart
        await producer.send(events(*(f"{3 * restart + index}" for index in range(3))), partition_id="0")
        assert (await producer.get_partition_publishing_properties("0")).events_published == 3 * restart + 3
        await producer.aclose()
    assert scene.bodies() == [f"{number}" for number in range(9)]
    known = scene.hub.send_links[1].properties[PRODUCER_ID]
    assert [tuple(spec.properties.values()) for spec in scene.hub.send_links] == [
        (),
        (known, 0, None),
        (known, 0, None),
    ]


async def test_restart_after_a_doubt_counts_what_is_stored(scene: Scene) -> None:
    """Killed with a batch in doubt, the next life reads whether it is stored, across the wrap."""
    states = SharedStates()
    options = {"0": PartitionPublishingOptions(starting_sequence_number=2**31 - 3)}

    def life() -> HubProducer:
        return scene.producer(
            name="feed", state_store=MemoryPublisherStateStore(states), partition_options=options, mode="replayable"
        )

    first = life()
    await first.send(events("a", "b"), partition_id="0")
    await scene.in_doubt(first, events("c", "d", "e"))
    scene.hub.accept()
    second = life()
    found = await second.get_partition_publishing_properties("0")
    assert (found.events_published, found.last_published_sequence_number) == (5, 2)
    await second.send(events("f"), partition_id="0")
    assert scene.bodies() == list("abcdef")


async def test_restart_without_a_store_counts_from_the_services_number(scene: Scene) -> None:
    """State reset: a new producer is given a new id and counts from the service's number."""
    first, second = scene.producer(), scene.producer()
    await first.send(events("a", "b"), partition_id="0")
    await second.send(listed := events("c"), partition_id="0")
    assert listed[0].published_sequence_number == 1
    found = [await each.get_partition_publishing_properties("0") for each in (first, second)]
    assert found[0].producer_group_id != found[1].producer_group_id
    assert found[0].events_published is None


async def test_send_of_an_event_in_flight_elsewhere_is_refused(scene: Scene) -> None:
    """While it is on its way, in another list or batch; afterwards it is published, and refused for that."""
    producer = scene.producer()
    await producer.send(events("first"), partition_id="0")
    shared = EventData("a")
    batch = await producer.create_batch(partition_id="1")
    batch.try_add(shared)
    scene.hub.hang("transfer")
    sending = asyncio.ensure_future(producer.send([shared, EventData("b")], partition_id="0"))
    await idle()
    for use in (
        producer.send(shared, partition_id="1"),
        producer.send([EventData("c"), shared], partition_id="0"),
        producer.send(batch),
    ):
        error = await error_of(use)
        assert isinstance(error, EventError)
        assert "being sent already" in str(error)
    scene.hub.answer("transfer")
    await sending
    assert isinstance(await error_of(producer.send(shared, partition_id="1")), EventError)
    assert (scene.bodies("0"), scene.bodies("1")) == (["first", "a", "b"], [])


async def test_send_of_a_list_in_several_messages_sends_each_event_once(scene: Scene) -> None:
    """It waits for its message, or its message failed: in another send it is refused, or the list is."""
    producer = scene.producer()
    listed = [EventData(bytes([97 + number]) * 400_000) for number in range(4)]
    scene.hub.hang("transfer")
    sending = asyncio.ensure_future(producer.send(listed, partition_id="0", split=True))
    await idle()
    for use in (producer.send(listed[3], partition_id="1"), producer.send(listed[2:], partition_id="0", split=True)):
        error = await error_of(use)
        assert isinstance(error, EventError)
        assert "being sent already" in str(error)
    scene.hub.answer("transfer")
    await sending
    assert (len(scene.bodies("0")), len(scene.bodies("1"))) == (4, 0)

    again = [EventData(bytes([107 + number]) * 400_000) for number in range(4)]
    scene.hub.refuse(error_for("com.microsoft:argument-error", "no"), operation="transfer")
    assert isinstance(await error_of(producer.send(again, partition_id="0", split=True)), ServiceError)
    await producer.send(again[3], partition_id="1")
    assert isinstance(await error_of(producer.send(again, partition_id="0", split=True)), EventError)
    await producer.send(again[:3], partition_id="0", split=True)
    assert (len(scene.bodies("0")), len(scene.bodies("1"))) == (7, 1)


async def test_send_of_an_event_that_was_refused_succeeds(scene: Scene) -> None:
    """Nothing of a refused batch is held against its events."""
    producer = scene.producer()
    scene.hub.refuse(error_for("com.microsoft:argument-error", "no"), operation="transfer")
    listed = events("a", "b")
    assert isinstance(await error_of(producer.send(listed, partition_id="0")), ServiceError)
    await producer.send(listed[::-1], partition_id="0")
    assert scene.bodies() == ["b", "a"]


async def test_options_for_a_partition_that_the_hub_lacks_are_refused_at_the_first_send() -> None:
    """Whichever partition that is for; a number is as good as its text, and the question is retried."""
    hub = FakeHub(partitions=2)
    options: Any = {1: PartitionPublishingOptions(owner_level=3), 9: PartitionPublishingOptions()}
    async with HubProducer(FakeTransport(hub), hub.name, idempotent=True, partition_options=options) as producer:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="the hub has no partition 9: its partitions are 0, 1"):
                await producer.send(EventData("x"), partition_id="0")
    assert hub.events("0") == []
    options = {1: PartitionPublishingOptions(owner_level=3)}
    async with HubProducer(FakeTransport(hub), hub.name, idempotent=True, partition_options=options) as producer:
        hub.refuse(ServiceBusyError("busy"), operation="hub")
        await producer.send(EventData("x"), partition_id="1")
        assert (await producer.get_partition_publishing_properties("1")).owner_level == 3
    assert len(hub.events("1")) == 1
