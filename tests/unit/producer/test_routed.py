"""Producers with a router: where messages go, plain and idempotent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from eventpump.core.router import ROUTERS, HashRouter, PartitionRouter, RingRouter, RoundRobinRouter
from eventpump.errors import ConfigurationError, LinkDetachedError, PublishOutcomeUnknownError
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.interfaces import HubProperties
from eventpump.options.base import RetryOptions
from eventpump.producer.producer import HubProducer
from eventpump.testing.transport import FakeHub, FakeTransport, SendFault


def _places(hub: FakeHub) -> dict[str, list[str]]:
    return {each: [event.body_as_str() for event in hub.events(each)] for each in hub.partition_ids}


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
async def test_send_by_a_router_keeps_keys_in_order_and_readable(name: str, *, idempotent: bool) -> None:
    """Every event is stored once, with its key, and those of a key that has a place are in order."""
    hub = FakeHub(partitions=5)
    async with HubProducer(FakeTransport(hub), "telemetry", router=ROUTERS[name](), idempotent=idempotent) as producer:
        for number in range(40):
            await producer.send(EventData(f"{number}"), partition_key=f"key{number % 4}")
        await producer.send([EventData("a"), EventData("b")])
        batch = await producer.create_batch(partition_key="key0")
        batch.try_add(EventData("c"))
        await producer.send(batch)
        await producer.send(EventData("d"), partition_id="3")
    stored = [(each, event) for each in hub.partition_ids for event in hub.events(each)]
    assert sorted(event.body_as_str() for _, event in stored) == sorted([*map(str, range(40)), *"abcd"])
    assert ("3", "d") in [(place, event.body_as_str()) for place, event in stored]
    keyed = [(place, event) for place, event in stored if event.body_as_str().isdecimal()]
    assert all(event.partition_key == f"key{int(event.body_as_str()) % 4}" for _, event in keyed)
    assert {event.partition_key for _, event in stored if event.body_as_str() == "c"} == {"key0"}
    if name != "round-robin":
        for key in range(4):
            mine = [(place, int(event.body_as_str())) for place, event in keyed if event.partition_key == f"key{key}"]
            assert len({place for place, _ in mine}) == 1
            assert [number for _, number in mine] == list(range(key, 40, 4))


async def test_send_by_the_hash_router_goes_where_the_service_sends_keys() -> None:
    """A key is in the same place of an event, whichever router chose the partition."""
    hub = FakeHub(partitions=7)
    async with (
        HubProducer(FakeTransport(hub), "telemetry", router=HashRouter()) as routed,
        HubProducer(FakeTransport(hub), "telemetry") as plain,
    ):
        for key in ("key0", "key1", "", "\u00e4"):
            for producer in (routed, plain):
                await producer.send(EventData(key), partition_key=key)
            assert _places(hub)[str(partition_for_key(key, 7))].count(key) == 2


async def test_send_by_the_sticky_router_goes_on_with_every_message() -> None:
    """Each message is a batch of its own: one partition must not get them all."""
    hub = FakeHub(partitions=3)
    async with HubProducer(FakeTransport(hub), "telemetry", router=ROUTERS["sticky"]()) as producer:
        for number in range(6):
            await producer.send([EventData(f"{number}"), EventData("more")])
    assert [len(each) for each in _places(hub).values()] == [4, 4, 4]


async def test_partitions_are_read_once_for_all_sends_and_keep_their_order() -> None:
    """Sends that begin together wait for one answer, and go out in the order of their calls."""
    hub = FakeHub(partitions=1)
    transport = FakeTransport(hub)
    asked = 0
    ask = transport.get_hub_properties

    async def count(hub: str) -> HubProperties:
        nonlocal asked
        asked += 1
        await asyncio.sleep(1)
        return await ask(hub)

    transport.get_hub_properties = count  # type: ignore[method-assign]  # counted, and then as before
    async with HubProducer(transport, "telemetry", router=RoundRobinRouter(), idempotent=True) as producer:
        await asyncio.gather(*(producer.send(EventData(f"{number}")) for number in range(8)))
    assert asked == 1
    assert _places(hub)["0"] == [str(number) for number in range(8)]


@pytest.mark.parametrize("split", [False, True])
async def test_list_in_doubt_is_sent_again_to_its_partition_whatever_the_router_says(*, split: bool) -> None:
    """A plain retry loop is exactly once also where the router would choose another partition now."""
    hub = FakeHub(partitions=3)
    producer = HubProducer(
        FakeTransport(hub),
        "telemetry",
        router=RoundRobinRouter(),
        idempotent=True,
        retry=RetryOptions(max_retries=1, base_delay=0.1, max_delay=0.1),
    )
    listed = [EventData(bytes([97 + number]) * 400_000 if split else f"{number}") for number in range(4)]
    hub.lose(SendFault.LOST_AFTER_STORE, partition_id="0")
    sending = asyncio.ensure_future(producer.send(listed, split=split))
    for _ in range(50):
        await asyncio.sleep(0)
    hub.refuse(LinkDetachedError("away"), operation="send", partition_id="0", times=10_000)
    with pytest.raises(PublishOutcomeUnknownError):
        await sending
    again = asyncio.ensure_future(producer.send(listed, split=split))
    await asyncio.sleep(0)
    hub.accept()
    await again
    assert [len(each) for each in _places(hub).values()] == [4, 0, 0]
    await producer.aclose()


async def test_send_with_a_router_that_is_wrong_is_refused() -> None:
    """A partition that the hub lacks, an error of its own, and something that is no router."""

    class Wrong:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer  # type: ignore[no-any-return]  # wrong on purpose

    hub = FakeHub(partitions=2)
    for answer, match in (("9", "chose '9'"), (None, "chose None"), (0, "chose 0")):
        async with HubProducer(FakeTransport(hub), "telemetry", router=Wrong(answer)) as producer:
            with pytest.raises(ConfigurationError, match=match):
                await producer.send(EventData(b"x"))
            with pytest.raises(ConfigurationError, match=match):
                await producer.create_batch()
    async with HubProducer(FakeTransport(hub), "telemetry", router=Wrong(KeyError("zone"))) as producer:
        with pytest.raises(KeyError, match="zone"):
            await producer.send(EventData(b"x"))
    not_one: Any
    for not_one in (RingRouter, "ring", 7):
        with pytest.raises(ConfigurationError, match="must be a router"):
            HubProducer(FakeTransport(hub), "telemetry", router=not_one)
    assert _places(hub) == {"0": [], "1": []}
    router: PartitionRouter = RingRouter()
    async with HubProducer(FakeTransport(hub), "telemetry", router=router) as producer:
        with pytest.raises(ConfigurationError, match="along with"):
            await producer.send(EventData(b"x"), partition_id="0", partition_key="k")
