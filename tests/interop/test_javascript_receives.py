"""@azure/event-hubs for JavaScript: positions, epochs, balancing, checkpoints, errors; over TCP and WebSockets."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from azure.storage.blob.aio import ContainerClient

from eventpump import Emulator, EventData, EventProducer
from eventpump.emulator.config import HubSpec
from eventpump.emulator.faults import DetachLink, DropConnection, LinkRole
from tests.authority import Authority
from tests.interop.peers.javascript import JavaScriptPeer, Notes, event
from tests.interop.peers.lines import PeerError
from tests.interop.reading import read_hub
from tests.support.azurite import Azurite
from tests.support.reading import read_bodies, read_partition

pytestmark = pytest.mark.asyncio(loop_scope="session")

HUB = "telemetry"
PARTITIONS = ["0", "1", "2", "3"]
QUICK = {"retryOptions": {"timeoutInMs": 5000, "retryDelayInMs": 50, "maxRetries": 5}}
"""By default the package waits 30 s before it tries again."""
FAST = {"loadBalancingOptions": {"strategy": "greedy", "updateIntervalInMs": 500}}
"""By default it balances every 10 s, by one partition at a time."""


@pytest_asyncio.fixture(loop_scope="session")
async def service() -> AsyncIterator[Emulator]:
    """Serve a hub of four partitions, with two consumer groups: $Default and second."""
    async with Emulator([HubSpec(HUB, 4, ("second",))]) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def process(authority: Authority) -> AsyncIterator[JavaScriptPeer]:
    """Run the package, for all tests of this module."""
    async with JavaScriptPeer(authority.file) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def peer(process: JavaScriptPeer, request: pytest.FixtureRequest) -> AsyncIterator[JavaScriptPeer]:
    """Return the package; its clients are closed with the test, and its stderr is shown where that fails."""
    since = len(process.stderr)
    yield process
    await process.call("closeAll")
    request.node.add_report_section("teardown", "@azure/event-hubs' stderr", process.stderr[since:])


async def publish(service: Emulator, partition: str, *bodies: object) -> None:
    async with EventProducer(service.connection_string, HUB) as producer:
        await producer.send([EventData(f"{body}") for body in bodies], partition_id=partition)


def named(*names: object) -> list[bytes]:
    return [f"{name}".encode() for name in names]


# ------------------------------------------------------------------------------------------------------ receiving


async def test_javascript_reads_from_every_position(service: Emulator, peer: JavaScriptPeer) -> None:
    """It begins where it is asked to: by offset, sequence number, time, inclusively or not, or at the end."""
    for number in range(10):
        await publish(service, "0", number)
    events = await read_partition(service.connection_string, HUB, "0")
    fifth = events[5]
    cases: list[tuple[dict[str, Any], int]] = [
        ({"offset": "-1"}, 0),
        ({"offset": fifth.offset}, 6),
        ({"offset": fifth.offset, "isInclusive": True}, 5),
        ({"sequenceNumber": 5}, 6),
        ({"sequenceNumber": 5, "isInclusive": True}, 5),
        ({"enqueuedOn": fifth.enqueued_time.timestamp() * 1000 - 1}, 5),
    ]
    for position, first in cases:
        consumer = await peer.consumer(service.connection_string, HUB, "0", startPosition=position)
        found = await consumer.receive(10 - first)
        if "enqueuedOn" in position:  # several events may bear one millisecond
            assert fifth.body in found
        else:
            assert found == named(*range(first, 10)), position
        await consumer.close()
    latest = await peer.consumer(
        service.connection_string, HUB, "0", startPosition={"offset": "@latest"}, maxWaitTimeInSeconds=1
    )
    await latest.until(lambda notes: "0" in notes.newest)  # an empty batch: it is attached
    await publish(service, "0", "new")
    assert await latest.receive(1) == named("new")


async def test_javascript_reads_every_partition_and_group(service: Emulator, peer: JavaScriptPeer) -> None:
    """Without a store one consumer reads all partitions; another group reads the same for itself."""
    for partition in PARTITIONS:
        await publish(service, partition, f"{partition}-a", f"{partition}-b")
    for group in ("$Default", "second"):
        consumer = await peer.consumer(service.connection_string, HUB, group=group, client=FAST)
        await consumer.receive(8)
        assert Counter(partition for partition, _ in consumer.notes.received) == dict.fromkeys(PARTITIONS, 2)
        for partition in PARTITIONS:
            found = [each.body for owner, each in consumer.notes.received if owner == partition]
            assert found == named(f"{partition}-a", f"{partition}-b")
        await consumer.close()


async def test_javascript_reads_large_events_and_many(service: Emulator, peer: JavaScriptPeer) -> None:
    """Events of a mebibyte, of many frames each, and thousands of small ones come whole and in order."""
    large = [bytes([number]) * 1_000_000 for number in range(3)]
    async with EventProducer(service.connection_string, HUB) as producer:
        for body in large:
            await producer.send(EventData(body), partition_id="0")
        for start in range(0, 4000, 1000):
            await producer.send([EventData(f"{number}") for number in range(start, start + 1000)], partition_id="1")
    consumer = await peer.consumer(service.connection_string, HUB, "0")
    assert await consumer.receive(3) == large
    many = await peer.consumer(service.connection_string, HUB, "1", maxBatchSize=100)
    assert await many.receive(4000) == named(*range(4000))


async def test_javascript_reads_last_enqueued_event_properties(service: Emulator, peer: JavaScriptPeer) -> None:
    """Asked for, what the service says of the partition's newest event comes with each batch."""
    await publish(service, "0", "a", "b", "c")
    (*_, last) = await read_partition(service.connection_string, HUB, "0")
    consumer = await peer.consumer(
        service.connection_string, HUB, "0", trackLastEnqueuedEventProperties=True, maxBatchSize=1
    )
    await consumer.receive(3)
    newest = consumer.notes.newest["0"]
    assert newest is not None
    assert (newest["sequenceNumber"], newest["offset"]) == (last.sequence_number, last.offset)


async def test_javascript_reads_properties_of_partitions(service: Emulator, peer: JavaScriptPeer) -> None:
    """A partition's first and last numbers, offset and emptiness are read over $management."""
    await publish(service, "1", "a", "b", "c")
    (*_, last) = await read_partition(service.connection_string, HUB, "1")
    consumer = await peer.consumer(service.connection_string, HUB, "0")
    answer = await consumer.describe_partition("1")
    assert (answer["beginningSequenceNumber"], answer["lastEnqueuedSequenceNumber"]) == (0, 2)
    assert (answer["lastEnqueuedOffset"], answer["isEmpty"]) == (last.offset, False)
    assert (await consumer.describe_partition("2"))["isEmpty"] is True
    with pytest.raises(PeerError):
        await consumer.describe_partition("9")


async def test_javascript_owner_levels_decide_who_reads(service: Emulator, peer: JavaScriptPeer) -> None:
    """A higher owner level takes the partition from it, and it is refused below the one in force, saying so."""
    low = await peer.consumer(service.connection_string, HUB, "0", ownerLevel=1, client=QUICK)
    await publish(service, "0", "a")
    assert await low.receive(1) == named("a")
    high = await peer.consumer(service.connection_string, HUB, "0", ownerLevel=2, client=QUICK)
    assert (await low.error()).kind == "ReceiverDisconnectedError"
    assert await high.receive(1) == named("a")
    again = await peer.consumer(service.connection_string, HUB, "0", ownerLevel=1, client=QUICK)
    assert (await again.error()).kind == "ReceiverDisconnectedError"
    await publish(service, "0", "b")
    assert await high.receive(2) == named("a", "b")
    assert high.notes.errors == []


@pytest.mark.parametrize("fault", [DropConnection(), DetachLink()], ids=["dropped", "detached"])
async def test_javascript_reads_on_after_a_lost_link(service: Emulator, peer: JavaScriptPeer, fault: Any) -> None:
    """When its connection is dropped or its link detached amid reading, it goes on after the last event it has."""
    await publish(service, "0", *range(100))
    # It notices a dropped connection with its next batch, an empty one too: by default after a minute.
    consumer = await peer.consumer(
        service.connection_string, HUB, "0", client=QUICK, maxBatchSize=10, maxWaitTimeInSeconds=1
    )
    await consumer.receive(100)
    planted = service.faults.add(fault, role=LinkRole.CONSUMER)
    await publish(service, "0", *range(100, 200))
    await consumer.receive(200)
    await publish(service, "0", *range(200, 300))
    assert await consumer.receive(300) == named(*range(300))
    assert planted.fired == 1


# ------------------------------------------------------------------------------------------------------ balancing


@pytest_asyncio.fixture(loop_scope="session")
async def store(azurite: Azurite) -> AsyncIterator[tuple[str, str]]:
    """A container of a real Azurite, as the package's checkpoint store wants it."""
    name = f"javascript-{uuid.uuid4().hex}"
    async with ContainerClient.from_connection_string(azurite.connection_string, name) as container:
        await container.create_container()
    yield azurite.connection_string, name


def owned(notes: Notes) -> set[str]:
    return set((Counter(notes.initialized) - Counter(partition for partition, _ in notes.closed)).elements())


async def test_javascript_processors_share_and_resume(
    service: Emulator, peer: JavaScriptPeer, store: tuple[str, str]
) -> None:
    """Two consumers with a store share the partitions; when one closes the other goes on from its checkpoints."""
    options: dict[str, Any] = {"client": {**QUICK, **FAST}, "store": store, "maxWaitTimeInSeconds": 1}
    one = await peer.consumer(service.connection_string, HUB, **options)
    await one.until(lambda notes: owned(notes) == set(PARTITIONS))
    two = await peer.consumer(service.connection_string, HUB, **options)
    await two.until(lambda notes: len(owned(notes)) == 2)
    await one.until(lambda notes: owned(notes) == set(PARTITIONS) - owned(two.notes))
    for partition in PARTITIONS:
        await publish(service, partition, f"{partition}-first")
    await peer.until(
        lambda: set(one.notes.bodies + two.notes.bodies) == set(named(*(f"{each}-first" for each in PARTITIONS))),
        lambda: f"{one.notes} {two.notes}"[:2000],
    )
    await two.close()
    await one.until(lambda notes: owned(notes) == set(PARTITIONS))
    for partition in PARTITIONS:
        await publish(service, partition, f"{partition}-second")
    await one.until(lambda notes: sum(body.endswith(b"second") for body in notes.bodies) == 4)
    counts = Counter(one.notes.bodies + two.notes.bodies)
    assert counts == Counter(named(*(f"{each}-{turn}" for each in PARTITIONS for turn in ("first", "second"))))


# ---------------------------------------------------------------------------------------------- sending and errors


async def test_javascript_send_of_a_full_batch_is_stored_whole(service: Emulator, peer: JavaScriptPeer) -> None:
    """A batch filled to what the link allows is stored whole, and an event above it is refused by the package."""
    producer = await peer.producer(service.connection_string, HUB)
    answer = await producer.fill_batch(event(b"x" * 10_000), partitionId="0")
    assert answer["maxSize"] == 1024 * 1024
    assert answer["maxSize"] - 10_100 < answer["size"] <= answer["maxSize"]
    assert await read_bodies(service.connection_string, HUB, "0") == [b"x" * 10_000] * answer["count"]
    with pytest.raises(PeerError, match=r"[Ss]ize|large|exceed"):
        await producer.send([event(b"x" * 1_100_000)], partitionId="0")
    await producer.send([event(b"after")], partitionId="0")


async def test_javascript_send_of_values_is_json(service: Emulator, peer: JavaScriptPeer) -> None:
    """Text, numbers and objects arrive as the JSON the package makes of them, and come back to its own user."""
    values: list[Any] = ["text", 17, 1.5, {"a": [1, None, True]}, [1, "two"]]
    producer = await peer.producer(service.connection_string, HUB)
    await producer.send([event(value) for value in values], partitionId="0")
    assert [each.body_as_json() for each in await read_partition(service.connection_string, HUB, "0")] == values
    consumer = await peer.consumer(service.connection_string, HUB, "0", skipParsingBodyAsJson=False)
    assert len(await consumer.receive(5)) == 5


async def test_javascript_send_without_a_partition_is_spread(service: Emulator, peer: JavaScriptPeer) -> None:
    """Without a partition its batches go to partitions in turn, and every one arrives."""
    producer = await peer.producer(service.connection_string, HUB)
    for number in range(8):
        await producer.send([event(f"{number}".encode())])
    found = await read_hub(service, HUB)
    assert sorted(each.body for events in found.values() for each in events) == named(*range(8))
    assert {len(events) for events in found.values()} == {2}


WRONG: list[tuple[Callable[[Emulator], str], str, str, str]] = [
    (lambda service: service.connection_string, "elsewhere", "0", "MessagingEntityNotFoundError"),
    (lambda service: service.connection_string, HUB, "9", "ArgumentOutOfRangeError"),
    (
        lambda service: service.connection_string_for("RootManageSharedAccessKey", "a wrong key"),
        HUB,
        "0",
        "UnauthorizedError",
    ),
]


@pytest.mark.parametrize(("string", "hub", "partition", "kind"), WRONG, ids=["hub", "partition", "key"])
async def test_javascript_errors_for_unknown_names_and_wrong_keys(
    service: Emulator,
    peer: JavaScriptPeer,
    string: Callable[[Emulator], str],
    hub: str,
    partition: str,
    kind: str,
) -> None:
    """An unknown hub or partition and a wrong key are the errors the package has for them, without a retry."""
    once: dict[str, Any] = {"retryOptions": {"maxRetries": 0, "timeoutInMs": 5000}}
    producer = await peer.producer(string(service), hub, **once)
    with pytest.raises(PeerError) as caught:
        await producer.send([event(b"x")], partitionId=partition)
    assert caught.value.kind == kind
    consumer = await peer.consumer(string(service), hub, partition, client=once)
    assert (await consumer.error()).kind == kind


# ----------------------------------------------------------------------------------------------------- WebSockets


async def test_javascript_works_over_websockets(peer: JavaScriptPeer, authority: Authority) -> None:
    """Over TLS and a WebSocket, a consumer and both producers do as over TCP, large events and losses included."""
    tls = authority.server("localhost", "127.0.0.1")
    async with Emulator({HUB: 4}, tls=tls, ws_port=0) as service:
        string = service.ws_connection_string
        options: dict[str, Any] = {**QUICK, "webSocket": True}
        producer = await peer.producer(string, HUB, **options)
        assert (await producer.describe())["partitionIds"] == PARTITIONS
        consumer = await peer.consumer(string, HUB, "0", client=options)
        large = b"x" * 1_000_000
        await producer.send([event(b"small")], partitionId="0")
        await producer.send([event(large)], partitionId="0")
        assert await consumer.receive(2) == [b"small", large]
        buffered = await peer.producer(string, HUB, kind="buffered", enableIdempotentRetries=True, **options)
        service.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER)
        await buffered.enqueue([event(b"%d" % number) for number in range(100)], partitionId="0")
        await buffered.flush()
        assert await consumer.receive(102) == [b"small", large, *named(*range(100))]
        assert peer.failed == []
