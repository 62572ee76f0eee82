"""The hub in memory: where it must be as the service is."""

from __future__ import annotations

import asyncio

import pytest

from eventpump.errors import (
    ClosedError,
    ConnectionLostError,
    ConsumerDisconnectedError,
    EntityNotFoundError,
    EventPumpError,
    EventTooLargeError,
    LinkDetachedError,
    QuotaExceededError,
    RequestRefusedError,
    ServiceBusyError,
)
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT
from eventpump.interfaces import ReceiveLinkSpec, SendLinkSpec
from eventpump.testing.transport import FakeHub, FakeReceiveLink, FakeTransport


class _Sink:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.error: EventPumpError | None = None

    def messages(self, batch: list[bytes]) -> None:
        assert self.error is None
        self.numbers += [ReceivedEvent(raw).sequence_number for raw in batch]

    def detached(self, error: EventPumpError) -> None:
        assert self.error is None
        self.error = error


async def _open(
    hub: FakeHub, owner_level: int | None = None, position: EventPosition | None = None
) -> tuple[FakeReceiveLink, _Sink]:
    sink = _Sink()
    spec = ReceiveLinkSpec(hub.name, "$Default", "0", position or EventPosition.earliest(), owner_level=owner_level)
    return await FakeTransport(hub).open_receive_link(spec, sink), sink


async def test_link_starts_without_credit_and_keeps_to_it() -> None:
    """Nothing comes before credit is given, and no more than it."""
    hub = FakeHub()
    hub.publish("0", count=10)
    link, sink = await _open(hub)
    await asyncio.sleep(1)
    assert sink.numbers == []
    link.set_credit(4)
    await asyncio.sleep(1)
    assert sink.numbers == [0, 1, 2, 3]


async def test_credit_counts_from_what_has_arrived() -> None:
    """Setting credit twice while messages are on their way does not add up (AMQP 2.6.7)."""
    hub = FakeHub(latency=1.0)
    hub.publish("0", count=100)
    link, sink = await _open(hub)
    for _ in range(4):
        link.set_credit(10)
        await asyncio.sleep(0.3)
    await asyncio.sleep(10)
    assert sink.numbers == list(range(10))
    link.set_credit(0)
    await asyncio.sleep(10)
    assert len(sink.numbers) == 10


async def test_attach_with_a_higher_epoch_takes_the_partition() -> None:
    """An equal or higher owner level takes the partition; a lower one, and none, is refused."""
    hub = FakeHub()
    _, first = await _open(hub)
    _, second = await _open(hub, 3)
    assert isinstance(first.error, ConsumerDisconnectedError)
    for level in (None, 2):
        with pytest.raises(ConsumerDisconnectedError):
            await _open(hub, level)
    await _open(hub, 3)
    assert isinstance(second.error, ConsumerDisconnectedError)
    assert hub.owner_levels("0") == [3]


async def test_attach_of_a_sixth_shared_reader_is_refused() -> None:
    """A sixth reader without an owner level is refused."""
    hub = FakeHub()
    links = [(await _open(hub))[0] for _ in range(5)]
    with pytest.raises(QuotaExceededError):
        await _open(hub)
    await links[0].aclose()
    await _open(hub)


async def test_sink_gets_nothing_after_a_close_or_detach() -> None:
    """What is on its way when a link ends never reaches the sink."""
    hub = FakeHub(latency=1.0)
    hub.publish("0", count=4)
    link, closed = await _open(hub)
    other, cut = await _open(hub)
    link.set_credit(4)
    other.set_credit(4)
    await asyncio.sleep(1.5)
    await link.aclose()
    await link.aclose()
    assert hub.detach("0") == 1
    await asyncio.sleep(5)
    assert closed.numbers == cut.numbers == []
    assert closed.error is None
    assert isinstance(cut.error, LinkDetachedError)


async def test_stalled_partition_is_silent_until_resumed() -> None:
    """A stall looks like an idle link; resumed, everything comes."""
    hub = FakeHub()
    link, sink = await _open(hub)
    link.set_credit(10)
    hub.stall("0")
    hub.publish("0", "a", "b")
    await asyncio.sleep(100)
    assert sink.numbers == []
    hub.resume("0")
    await asyncio.sleep(1)
    assert sink.numbers == [0, 1]


async def test_send_stores_events_with_the_services_annotations() -> None:
    """Events sent to a partition, by key and in a batch come out with what the service adds."""
    hub = FakeHub()
    transport = FakeTransport(hub)
    to_partition = await transport.open_send_link(SendLinkSpec(hub.name, "2"))
    await to_partition.send(EventData("one", properties={"k": 1}).encode())
    batch = encode_batch([EventData("two").encode(), EventData("three").encode()])
    await to_partition.send(batch, message_format=BATCH_MESSAGE_FORMAT)
    stored = hub.events("2")
    assert [event.body_as_str() for event in stored] == ["one", "two", "three"]
    assert [event.sequence_number for event in stored] == [0, 1, 2]
    assert stored[0].properties == {"k": 1}
    to_gateway = await transport.open_send_link(SendLinkSpec(hub.name))
    for _ in range(5):
        await to_gateway.send(EventData("keyed").encode(partition_key="k"))
    filled = [pid for pid in hub.partition_ids if any(event.partition_key == "k" for event in hub.events(pid))]
    assert len(filled) == 1
    assert (await transport.get_partition_properties(hub.name, "2")).last_enqueued_sequence_number >= 2


async def test_refusal_is_used_up_and_concerns_what_it_names() -> None:
    """A scripted refusal is used up, and concerns what it names."""
    hub = FakeHub()
    hub.refuse(ServiceBusyError("busy"), times=2)
    hub.refuse(ServiceBusyError("busy"), operation="transfer")
    for _ in range(2):
        with pytest.raises(ServiceBusyError):
            await _open(hub)
    await _open(hub)
    link = await FakeTransport(hub).open_send_link(SendLinkSpec(hub.name, "0"))
    with pytest.raises(ServiceBusyError):
        await link.send(EventData("x").encode())
    await link.send(EventData("x").encode())


async def test_call_for_what_does_not_exist_is_refused() -> None:
    """Hub, partition, size and a closed transport are refused as the service and the port say."""
    hub = FakeHub(max_message_size=1000)
    transport = FakeTransport(hub)
    with pytest.raises(EntityNotFoundError):
        await transport.get_hub_properties("another")
    with pytest.raises(RequestRefusedError):
        await transport.get_partition_properties(hub.name, "9")
    with pytest.raises(RequestRefusedError):
        await transport.open_send_link(SendLinkSpec(hub.name, "9"))
    link = await transport.open_send_link(SendLinkSpec(hub.name, "0"))
    with pytest.raises(EventTooLargeError):
        await link.send(EventData("x" * 2000).encode())
    await transport.aclose()
    await transport.aclose()
    with pytest.raises(ConnectionLostError):
        await link.send(EventData("x").encode())
    with pytest.raises(ClosedError):
        await transport.get_hub_properties(hub.name)


async def test_fake_link_with_an_interval_reads_what_comes_together() -> None:
    """As the real one: the first at once, what follows after the interval, and all of it at a probe."""
    hub, sink = FakeHub(), _Sink()
    spec = ReceiveLinkSpec(hub.name, "$Default", "0", EventPosition.earliest(), delivery_interval=5.0)
    link = await FakeTransport(hub).open_receive_link(spec, sink)
    link.set_credit(100)
    found = []
    for pause in (1.0, 1.0, 1.0, 3.0):
        hub.publish("0", count=1)
        await asyncio.sleep(pause)
        found.append(len(sink.numbers))
    assert found == [1, 1, 1, 4]
    hub.publish("0", count=1)
    await asyncio.sleep(0.1)
    assert len(sink.numbers) == 4
    assert await link.probe(1)
    assert sink.numbers == [0, 1, 2, 3, 4]
    await link.aclose()
