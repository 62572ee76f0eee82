"""@azure/event-hubs for JavaScript against the emulator, and beside our own producer and reader."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from eventpump import Emulator, EventData, EventProducer
from eventpump.amqp.sections import NULL_DATA
from eventpump.emulator.faults import DropConnection, LinkRole, Reject, StoreLate
from tests.interop.peers.javascript import JavaScriptPeer, event
from tests.support.reading import read_partition

HUB = "telemetry"
QUICK = {"retryOptions": {"timeoutInMs": 1500, "retryDelayInMs": 50, "maxRetries": 5}}
"""By default the package waits a minute for an answer lost with its connection, then 30 s before it tries again."""


@pytest.fixture
async def service() -> AsyncIterator[Emulator]:
    """Serve a hub of two partitions."""
    async with Emulator({HUB: 2}) as started:
        yield started


@pytest.fixture
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[JavaScriptPeer]:
    """Run the package; what it wrote to stderr is shown where the test fails."""
    async with JavaScriptPeer() as started:
        yield started
    request.node.add_report_section("teardown", "@azure/event-hubs' stderr", started.stderr)


async def bodies(service: Emulator, partition: str) -> list[str]:
    return [each.body_as_str() for each in await read_partition(service.connection_string, HUB, partition)]


def named(*names: object) -> list[str]:
    return [f"{name}" for name in names]


def events(*names: object) -> list[dict[str, object]]:
    return [event(name.encode()) for name in named(*names)]


async def test_javascript_reads_properties_of_the_hub(service: Emulator, peer: JavaScriptPeer) -> None:
    """Name and partitions are read over $management."""
    producer = await peer.producer(service.connection_string, HUB)
    assert await producer.describe() == {"name": HUB, "partitionIds": ["0", "1"]}
    await producer.close()


async def test_javascript_sends_what_we_read(service: Emulator, peer: JavaScriptPeer) -> None:
    """Lists, batches and keyed events arrive with body, properties, message id, content type and key."""
    producer = await peer.producer(service.connection_string, HUB)
    full = event(
        b"\x00\xff",
        properties={"symbol": "MSFT", "price": 101.5, "live": True},
        messageId="m-1",
        contentType="application/json",
        correlationId="c-1",
    )
    await producer.send([full, *events("second")], partitionId="0")
    answer = await producer.send_in_batch(events("third", "fourth"), partitionId="0")
    assert answer["count"] == 2
    await producer.send(events("keyed", "too"), partitionKey="key1")
    await producer.close()
    found = await read_partition(service.connection_string, HUB, "0")
    keyed = await read_partition(service.connection_string, HUB, "1")  # its hash is 2075: odd
    assert [each.body for each in found] == [b"\x00\xff", b"second", b"third", b"fourth"]
    assert found[0].properties == {"symbol": "MSFT", "price": 101.5, "live": True}
    assert (found[0].message_id, found[0].content_type, found[0].correlation_id) == ("m-1", "application/json", "c-1")
    assert [(each.body, each.partition_key) for each in keyed] == [(b"keyed", "key1"), (b"too", "key1")]


async def test_javascript_sends_events_without_a_body(service: Emulator, peer: JavaScriptPeer) -> None:
    """A body of null, and none, is null data on the wire: stored and given back as sent; ours reads it as empty."""
    producer = await peer.producer(service.connection_string, HUB)
    bare = [event(None), event(None, properties={"kind": "none"})]
    await producer.send([*bare, *events("after")], partitionId="0")
    await producer.send_in_batch([event(None)], partitionId="0")
    await producer.close()
    found = await read_partition(service.connection_string, HUB, "0")
    assert [(each.body, each.value) for each in found] == [(b"", None), (b"", None), (b"after", b"after"), (b"", None)]
    assert found[1].properties == {"kind": "none"}
    assert all(each.raw.endswith(NULL_DATA) for each in found if not each.body)
    consumer = await peer.consumer(service.connection_string, HUB, "0")
    await consumer.receive(4)
    assert [each.body for _, each in consumer.notes.received] == [b"null", b"null", b"after", b"null"]


async def test_javascript_reads_what_we_send(service: Emulator, peer: JavaScriptPeer) -> None:
    """Events of our producer come to its user whole: body, properties, ids, key, and the service's numbers."""
    ours = [
        EventData(
            f"event {number}",
            properties={"symbol": "MSFT", "price": 101.5, "live": True, "n": number},
            message_id=f"m-{number}",
            content_type="text/plain",
            correlation_id="c",
        )
        for number in range(20)
    ]
    async with EventProducer(service.connection_string, HUB) as producer:
        await producer.send(ours, partition_id="0")
        await producer.send(EventData(b"keyed"), partition_key="key1")
    found = await peer.read(service.connection_string, HUB, "0", 20)
    mine = await read_partition(service.connection_string, HUB, "0")
    assert [each.body.decode() for each in found] == named(*(f"event {number}" for number in range(20)))
    assert [each.properties for each in found] == [
        {"symbol": "MSFT", "price": 101.5, "live": True, "n": number} for number in range(20)
    ]
    assert [each.message_id for each in found] == [f"m-{number}" for number in range(20)]
    assert {(each.content_type, each.correlation_id) for each in found} == {("text/plain", "c")}
    assert [(each.sequence_number, each.offset) for each in found] == [(e.sequence_number, e.offset) for e in mine]
    (keyed,) = await peer.read(service.connection_string, HUB, "1", 1)
    assert (keyed.body, keyed.partition_key) == (b"keyed", "key1")


@pytest.mark.parametrize("idempotent", [True, False])
async def test_javascript_buffered_producer_sends_once_in_order(
    service: Emulator, peer: JavaScriptPeer, idempotent: bool
) -> None:
    """By default settings, with and without idempotent retries: everything arrives once and in order."""
    producer = await peer.producer(service.connection_string, HUB, kind="buffered", enableIdempotentRetries=idempotent)
    for start in (0, 100):
        for partition in ("0", "1"):
            await producer.enqueue(events(*range(start, start + 100)), partitionId=partition)
        await producer.flush()
    await producer.close()
    assert peer.failed == []
    assert sum(count for _, count in peer.sent) == 400
    for partition in ("0", "1"):
        assert await bodies(service, partition) == named(*range(200))
        assert not [
            key
            for each in await peer.read(service.connection_string, HUB, partition, 200)
            for key in each.annotations
            if "producer" in key
        ]


async def test_javascript_plain_producer_may_duplicate(service: Emulator, peer: JavaScriptPeer) -> None:
    """Without idempotent retries the same fault as in the next test stores the batch twice: the fault is a real one."""
    producer = await peer.producer(service.connection_string, HUB, kind="buffered", **QUICK)
    service.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER)
    await producer.enqueue(events("a", "b"), partitionId="0")
    await producer.flush()
    await producer.close()
    assert await bodies(service, "0") == ["a", "b", "a", "b"]


@pytest.mark.parametrize("stored", [True, False], ids=["after storing", "before storing"])
async def test_javascript_idempotent_retry_after_a_dropped_connection(
    service: Emulator, peer: JavaScriptPeer, stored: bool
) -> None:
    """Its retry after a connection dropped before or after storing: each event exactly once, in order."""
    producer = await peer.producer(
        service.connection_string, HUB, kind="buffered", enableIdempotentRetries=True, **QUICK
    )
    await producer.enqueue(events("a", "b"), partitionId="0")
    await producer.flush()
    fault = service.faults.add(DropConnection(stored=stored), role=LinkRole.PRODUCER, count=2)
    for name in ("c", "d", "e"):
        await producer.enqueue(events(name, name * 2), partitionId="0")
        await producer.flush()
    await producer.close()
    assert fault.fired == 2
    assert peer.failed == []
    assert await bodies(service, "0") == ["a", "b", "c", "cc", "d", "dd", "e", "ee"]


async def test_javascript_idempotent_retry_with_a_late_transfer(service: Emulator, peer: JavaScriptPeer) -> None:
    """A transfer held over the cut, and stored when its retry has been: still once."""
    producer = await peer.producer(
        service.connection_string, HUB, kind="buffered", enableIdempotentRetries=True, **QUICK
    )
    held = service.faults.add(StoreLate(), role=LinkRole.PRODUCER)
    await producer.enqueue(events("a", "b"), partitionId="0")
    await producer.flush()
    held.remove()
    await producer.enqueue(events("c"), partitionId="0")
    await producer.flush()
    await producer.close()
    assert peer.failed == []
    assert await bodies(service, "0") == ["a", "b", "c"]


async def test_javascript_idempotent_retry_after_throttling(service: Emulator, peer: JavaScriptPeer) -> None:
    """A batch rejected as server-busy is sent again with the numbers it had."""
    producer = await peer.producer(
        service.connection_string, HUB, kind="buffered", enableIdempotentRetries=True, **QUICK
    )
    fault = service.faults.add(Reject(), role=LinkRole.PRODUCER, count=2)
    await producer.enqueue(events("a", "b"), partitionId="0")
    await producer.flush()
    await producer.close()
    assert fault.fired == 2
    assert peer.failed == []
    assert await bodies(service, "0") == ["a", "b"]
