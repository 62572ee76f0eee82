"""The producer over a hub in memory: retries as the error says, links shared and replaced, and closing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from eventpump.errors import (
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    EventError,
    EventPumpError,
    EventTooLargeError,
    LinkDetachedError,
    QuotaExceededError,
    Recovery,
    RequestRefusedError,
    ServiceBusyError,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.events import EventData
from eventpump.interfaces import SendLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.producer.producer import HubProducer
from eventpump.testing.transport import FakeHub, FakeSendLink, FakeTransport


class Highest(random.Random):
    """Chance at its worst: delays are as long as they may be."""

    def uniform(self, a: float, b: float) -> float:
        return b


class CountingTransport(FakeTransport):
    """Counts the send links opened."""

    def __init__(self, hub: FakeHub) -> None:
        super().__init__(hub)
        self.opened: list[FakeSendLink] = []

    async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
        link = await super().open_send_link(spec)
        self.opened.append(link)
        return link


@pytest.fixture
def hub() -> FakeHub:
    return FakeHub(partitions=4)


@pytest.fixture
def transport(hub: FakeHub) -> CountingTransport:
    return CountingTransport(hub)


@pytest.fixture
async def producer(transport: CountingTransport) -> AsyncIterator[HubProducer]:
    retry = RetryOptions(max_retries=3, base_delay=1.0, max_delay=2.0)
    async with HubProducer(transport, "telemetry", retry=retry, rng=Highest()) as made:
        yield made


def now() -> float:
    return asyncio.get_running_loop().time()


def bodies(hub: FakeHub, partition_id: str = "0") -> list[bytes]:
    return [event.body for event in hub.events(partition_id)]


X = EventData(b"x")


async def test_send_waits_as_a_busy_service_asks(
    hub: FakeHub, producer: HubProducer, transport: CountingTransport
) -> None:
    """A service that is busy is left alone for the 4 s it asks for, and the back-off on top; then the send goes on."""
    hub.refuse(error_for("com.microsoft:server-busy", "wait 4 seconds"), operation="transfer", times=2)
    before = now()
    await producer.send(X, partition_id="0")
    assert now() - before == (4 + 1) + (4 + 2)
    assert bodies(hub) == [b"x"]
    assert len(transport.opened) == 1


@pytest.mark.parametrize(
    ("error", "links"),
    [
        (ServiceTimeoutError("slow"), 1),
        (ServiceError("internal", condition="amqp:internal-error"), 1),
        (LinkDetachedError("detached"), 2),
        (ConnectionLostError("lost"), 2),
        (ServiceTimeoutError("stuck", recovery=Recovery.RELINK), 2),
    ],
    ids=["retry", "internal", "relink", "reconnect", "stuck"],
)
async def test_send_retry_opens_a_new_link_where_the_error_says_so(
    hub: FakeHub, producer: HubProducer, transport: CountingTransport, error: ServiceError, links: int
) -> None:
    """Before the next try a new link is opened where the error says so, and only there."""
    hub.refuse(error, operation="transfer")
    await producer.send(X, partition_id="0")
    assert bodies(hub) == [b"x"]
    assert len(transport.opened) == links


@pytest.mark.parametrize("operation", ["transfer", "send"])
async def test_send_retries_are_bounded(hub: FakeHub, producer: HubProducer, operation: str) -> None:
    """After as many retries as the options say the last error is raised, after the delays they say."""
    hub.refuse(LinkDetachedError("detached"), operation=operation, times=4)
    before = now()
    with pytest.raises(LinkDetachedError):
        await producer.send(X, partition_id="0")
    assert now() - before == 1 + 2 + 2
    assert bodies(hub) == []
    hub.refuse(LinkDetachedError("detached"), operation=operation, times=3)
    await producer.send(X, partition_id="0")
    assert bodies(hub) == [b"x"]


@pytest.mark.parametrize(
    "error",
    [
        RequestRefusedError("no"),
        AuthenticationError("no"),
        QuotaExceededError("no"),
        ConnectionLostError("certificate", recovery=Recovery.GIVE_UP),
    ],
    ids=["refused", "unauthorised", "quota", "certificate"],
)
async def test_send_does_not_retry_an_error_that_gives_up(
    hub: FakeHub, producer: HubProducer, error: ServiceError
) -> None:
    """An error to give up on is raised as it is, at once."""
    hub.refuse(error, operation="transfer", times=10)
    before = now()
    with pytest.raises(type(error)):
        await producer.send(X, partition_id="0")
    assert now() == before


async def test_sends_to_one_target_share_the_opening_of_its_link(
    producer: HubProducer, transport: CountingTransport
) -> None:
    """Sends that begin together to one target share the opening of its link."""
    await asyncio.gather(*(producer.send(X, partition_id=str(number % 2)) for number in range(20)))
    await asyncio.gather(*(producer.send(X) for _ in range(20)))
    assert len(transport.opened) == 3


async def test_sends_replace_a_failed_link_once(
    hub: FakeHub, producer: HubProducer, transport: CountingTransport
) -> None:
    """Many sends whose link fails replace it once, and none closes the link another has opened meanwhile."""
    await producer.send(X, partition_id="0")
    hub.hang("transfer")
    sends = [asyncio.ensure_future(producer.send(X, partition_id="0")) for _ in range(10)]
    await asyncio.sleep(0.1)
    hub.lose_connections()
    hub.answer("transfer")
    await asyncio.gather(*sends)
    assert len(transport.opened) == 2
    assert len(bodies(hub)) == 11


@pytest.mark.parametrize("is_used", [True, False], ids=["while sending", "while idle"])
async def test_send_after_a_final_detach_opens_a_new_link(
    hub: FakeHub, producer: HubProducer, transport: CountingTransport, is_used: bool
) -> None:
    """A send whose link was detached with an error to give up on raises it; the next send opens a new link."""
    await producer.send(X, partition_id="0")
    disabled = error_for("com.microsoft:entity-disabled", "the hub is disabled")
    assert disabled.recovery is Recovery.GIVE_UP
    if is_used:
        hub.hang("transfer")
        send = asyncio.ensure_future(producer.send(X, partition_id="0"))
        await asyncio.sleep(0.1)
        transport.opened[0].end(disabled)
        with pytest.raises(ServiceError, match="disabled"):
            await send
        hub.answer("transfer")
    else:
        transport.opened[0].end(disabled)
    hub.refuse(disabled, operation="send")
    with pytest.raises(ServiceError, match="disabled"):
        await producer.create_batch(partition_id="0")
    await producer.send(X, partition_id="0")
    assert bodies(hub) == [b"x", b"x"]
    assert len(transport.opened) == 2


async def test_send_of_too_many_events_is_refused_before_sending(hub: FakeHub, producer: HubProducer) -> None:
    """Events that do not fit one message are an error without a retry, and none of them is stored."""
    before = now()
    with pytest.raises(EventTooLargeError):
        await producer.send([EventData(bytes(600_000)), EventData(bytes(600_000))], partition_id="0")
    assert (now(), bodies(hub)) == (before, [])


async def test_send_of_a_batch_with_another_target_is_refused(hub: FakeHub, producer: HubProducer) -> None:
    """A batch goes where it was made for; to name a target beside it, or two at once, is a mistake."""
    batch = await producer.create_batch(partition_id="3")
    batch.try_add(X)
    await producer.send(batch)
    assert bodies(hub, "3") == [b"x"]
    with pytest.raises(ConfigurationError):
        await producer.send(batch, partition_id="3")
    with pytest.raises(ConfigurationError):
        await producer.send(X, partition_id="0", partition_key="key")
    with pytest.raises(ConfigurationError):
        await producer.create_batch(partition_id="0", partition_key="key")
    for size in (0, -1, 2 * 1024 * 1024):
        with pytest.raises(ConfigurationError, match="max_size_in_bytes"):
            await producer.create_batch(max_size_in_bytes=size)


@pytest.mark.parametrize("target", [{"partition_id": 0}, {"partition_key": 5}])
async def test_send_to_a_target_that_is_no_text_is_refused(
    hub: FakeHub, producer: HubProducer, target: dict[str, Any]
) -> None:
    """A number is refused by name; as a key it would be sent, and order nothing."""
    with pytest.raises(ConfigurationError, match=f"{next(iter(target))}: must be text, not int"):
        await producer.send(X, **target)
    with pytest.raises(ConfigurationError, match="must be text"):
        await producer.create_batch(**target)


@pytest.mark.parametrize("events", ["text", b"bytes", ["text"], [{"a": 1}]])
async def test_send_of_what_is_no_event_data_is_refused(producer: HubProducer, events: Any) -> None:
    """A caller that forgets to wrap a body gets an error that says so."""
    with pytest.raises(EventError, match="an event to send is an EventData, not "):
        await producer.send(events)


async def test_create_batch_without_a_stated_limit_holds_1_mib() -> None:
    """Where the service states no limit, a batch is filled to 1 MiB."""
    transport = FakeTransport(FakeHub(max_message_size=2**63))
    async with HubProducer(transport, "telemetry") as producer:
        assert (await producer.create_batch()).max_size_in_bytes == 1024 * 1024


async def test_send_cancelled_while_opening_leaves_the_link_to_others(hub: FakeHub, producer: HubProducer) -> None:
    """Cancelled while it opens the link, a send leaves that to the next."""
    hub.hang("send")
    first = asyncio.ensure_future(producer.send(EventData(b"first"), partition_id="0"))
    await asyncio.sleep(0.1)
    second = asyncio.ensure_future(producer.send(EventData(b"second"), partition_id="0"))
    await asyncio.sleep(0.1)
    first.cancel()
    hub.answer("send")
    await second
    assert bodies(hub) == [b"second"]


@pytest.mark.parametrize("moment", ["opening", "sending", "retrying"])
async def test_close_fails_waiting_sends_at_once(hub: FakeHub, producer: HubProducer, moment: str) -> None:
    """`aclose` ends a send at once wherever it waits, and no retry follows; later use says that it is closed."""
    match moment:
        case "opening":
            hub.hang("send")
        case "sending":
            hub.hang("transfer")
        case "retrying":
            hub.refuse(ServiceBusyError("wait"), operation="transfer", times=1)
    send = asyncio.ensure_future(producer.send(X, partition_id="0"))
    await asyncio.sleep(0.1)
    before = now()
    await producer.aclose()
    with pytest.raises(EventPumpError):
        await send
    assert (now(), bodies(hub)) == (before, [])
    for use in (producer.send(X), producer.create_batch(), producer.get_properties()):
        with pytest.raises(ClosedError):
            await use
    await producer.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_properties_describe_hub_and_partitions(producer: HubProducer) -> None:
    """A producer returns the properties of its hub and partitions, and closes its transport when its context ends."""
    async with producer:
        assert await producer.get_partition_ids() == ("0", "1", "2", "3")
        assert (await producer.get_partition_properties("1")).is_empty
    with pytest.raises(ClosedError):
        await producer.get_properties()


@pytest.mark.parametrize("operation", ["hub", "partition"])
async def test_read_of_properties_that_fails_is_repeated(hub: FakeHub, operation: str) -> None:
    """Reads are repeated as sends are: `retry.max_retries` times, and not after an error that is final."""

    async def read() -> object:
        async with HubProducer(FakeTransport(hub), "telemetry", retry=RetryOptions(max_retries=2)) as producer:
            return await (producer.get_properties() if operation == "hub" else producer.get_partition_properties("1"))

    failure = ServiceError("not now")
    hub.refuse(failure, operation=operation, times=2)
    await read()
    hub.refuse(failure, operation=operation, times=3)
    with pytest.raises(ServiceError, match="not now"):
        await read()
    hub.refuse(RequestRefusedError("no"), operation=operation)
    with pytest.raises(RequestRefusedError):
        await read()


async def test_send_with_too_long_a_key_is_refused(producer: HubProducer, transport: CountingTransport) -> None:
    """A key of 129 characters is refused where it is given, before anything is opened; one of 128 is sent."""
    for call in (producer.send(X, partition_key="k" * 129), producer.create_batch(partition_key="k" * 129)):
        with pytest.raises(ConfigurationError, match="partition_key"):
            await call
    assert transport.opened == []
    await producer.send(X, partition_key="k" * 128)
    await producer.aclose()


async def test_send_does_not_overtake_those_that_wait_for_the_link(hub: FakeHub) -> None:
    """Also where it begins in the moment in which the link is there, and before they have run again."""
    sends: list[asyncio.Task[None]] = []

    class Opening(FakeTransport):
        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            link = await super().open_send_link(spec)
            send("late")  # its task runs before those that wait for this one
            return link

    producer = HubProducer(Opening(hub), "telemetry")

    def send(body: str) -> None:
        sends.append(asyncio.create_task(producer.send(EventData(body), partition_id="0")))

    for body in ("first", "second", "third"):
        send(body)
    await asyncio.sleep(10)
    send("last")
    await asyncio.gather(*sends)
    assert [event.body_as_str() for event in hub.events("0")] == ["first", "second", "third", "late", "last"]
    assert producer.stats.sent.batches == 5
    await producer.aclose()


@pytest.mark.parametrize("try_timeout", [None, 30.0])
async def test_first_attempt_on_an_open_link_counts_as_one(hub: FakeHub, try_timeout: float | None) -> None:
    """Made at once or with a time-out: it is retried as often, its link is replaced, and the counts are the same."""
    transport = CountingTransport(hub)
    retry = RetryOptions(max_retries=2, base_delay=1.0, max_delay=1.0, try_timeout=try_timeout)
    producer = HubProducer(transport, "telemetry", retry=retry, rng=Highest())
    await producer.send(EventData(b"0"), partition_id="0")
    hub.refuse(LinkDetachedError("gone"), operation="transfer", times=2)
    began = now()
    await producer.send(EventData(b"1"), partition_id="0")
    assert now() - began == pytest.approx(2.0)
    assert len(transport.opened) == 3
    hub.refuse(LinkDetachedError("gone"), operation="transfer", times=3)
    with pytest.raises(LinkDetachedError):
        await producer.send(EventData(b"2"), partition_id="0")
    stats = producer.stats
    assert (stats.sent.batches, stats.failed.batches, stats.retried.batches) == (2, 1, 4)
    await producer.aclose()


async def test_send_cancelled_on_an_open_link_is_counted_and_not_retried(hub: FakeHub) -> None:
    """A cancellation of the caller ends it, and no other attempt follows."""
    producer = HubProducer(FakeTransport(hub), "telemetry", rng=Highest())
    await producer.send(EventData(b"0"), partition_id="0")
    hub.latency = 5.0
    sending = asyncio.create_task(producer.send(EventData(b"1"), partition_id="0"))
    await asyncio.sleep(1)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert producer.stats.failed.batches == 1
    assert producer.stats.retried.batches == 0
    await producer.aclose()
