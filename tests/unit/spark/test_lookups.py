"""The driver's requests: outages are waited for, and what ends them says why."""

from __future__ import annotations

import asyncio

import pytest

from eventpump.errors import (
    ConfigurationError,
    ConnectionLostError,
    ConsumerDisconnectedError,
    EntityNotFoundError,
    EventPumpError,
    LinkDetachedError,
    ServiceTimeoutError,
)
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ReceiveLink, ReceiveLinkSpec
from eventpump.spark.connection import RETRY_TIMEOUT
from eventpump.spark.source.lookups import find_numbers, read_facts, require_consumer_group
from eventpump.spark.source.offsets import REFUSED_PATIENCE
from eventpump.spark.source.options import SourceOptions
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.connecting import connection_string_to

STRING = connection_string_to("ns.servicebus.windows.net", hub="telemetry")


def options(**given: str) -> SourceOptions:
    return SourceOptions.from_options({"connectionString": STRING, **given}).for_batch()


class _Reader:
    """An exclusive reader of a query."""

    def messages(self, batch: list[bytes]) -> None:
        """Events come."""

    def detached(self, error: EventPumpError) -> None:
        """The link ended."""


async def _read_exclusively(hub: FakeHub) -> ReceiveLink:
    spec = ReceiveLinkSpec(hub.name, "$Default", "0", EventPosition.earliest(), owner_level=0)
    return await FakeTransport(hub).open_receive_link(spec, _Reader())


async def test_outage_shorter_than_the_retry_timeout_is_waited_for() -> None:
    """A service that comes back after 100 s is read as if it had never been away."""
    hub = FakeHub()
    hub.refuse(ConnectionLostError("cannot connect: refused"), operation="hub", times=float("inf"))
    reading = asyncio.create_task(read_facts(FakeTransport(hub), options()))
    await asyncio.sleep(100)
    assert not reading.done()
    hub.accept()
    assert len((await reading).partitions) == 4


@pytest.mark.parametrize("operation", ["hub", "partition"])
async def test_outage_longer_than_the_retry_timeout_ends_with_its_cause(operation: str) -> None:
    """The error names the option, and the last failure: a wrong host does not look like a slow service."""
    for given, seconds in (({}, RETRY_TIMEOUT), ({"retryTimeout": "7"}, 7.0)):
        hub = FakeHub()
        hub.refuse(ConnectionLostError("cannot connect: refused"), operation=operation, times=float("inf"))
        loop = asyncio.get_running_loop()
        began = loop.time()
        says = rf"within {seconds:g} s \(retryTimeout\); the last failure: cannot connect: refused"
        with pytest.raises(ServiceTimeoutError, match=says) as caught:
            await read_facts(FakeTransport(hub), options(**given))
        assert isinstance(caught.value.__cause__, ConnectionLostError)
        assert seconds - 5 <= loop.time() - began <= seconds


async def test_service_that_never_answers_ends_with_the_retry_timeout() -> None:
    """A first attempt without any answer has no cause, and ends in time all the same."""
    hub = FakeHub()
    hub.hang("hub")
    with pytest.raises(ServiceTimeoutError, match="within 120 s"):
        await read_facts(FakeTransport(hub), options())


async def test_failure_that_is_permanent_is_not_repeated() -> None:
    """It is raised as it is, at once."""
    hub = FakeHub()
    hub.refuse(EntityNotFoundError("no such hub"), operation="hub", times=float("inf"))
    began = asyncio.get_running_loop().time()
    with pytest.raises(EntityNotFoundError, match=r"^no such hub$"):
        await read_facts(FakeTransport(hub), options())
    assert asyncio.get_running_loop().time() == began


async def test_position_is_looked_up_once_a_kept_link_is_closed() -> None:
    """A batch that begins at a time, right after a query, waits for the query's link."""
    hub = FakeHub(partitions=1)
    hub.publish("0", count=3)
    link = await _read_exclusively(hub)
    transport = FakeTransport(hub)
    wanted = options(startingPosition="2001-01-01T00:00:00Z")
    finding = asyncio.create_task(find_numbers(transport, wanted, await read_facts(transport, wanted)))
    await asyncio.sleep(10)
    assert not finding.done()
    await link.aclose()
    assert await finding == {"0": 0}


async def test_position_in_a_partition_that_stays_exclusive_is_refused() -> None:
    """The error says whose reader it probably is, and what to do."""
    hub = FakeHub(partitions=1)
    hub.publish("0", count=3)
    await _read_exclusively(hub)
    transport = FakeTransport(hub)
    wanted = options(startingPosition="2001-01-01T00:00:00Z")
    facts = await read_facts(transport, wanted)
    began = asyncio.get_running_loop().time()
    with pytest.raises(ConsumerDisconnectedError, match=r"query of your own.*consumerGroup"):
        await find_numbers(transport, wanted, facts)
    assert REFUSED_PATIENCE <= asyncio.get_running_loop().time() - began <= REFUSED_PATIENCE + 5
    assert hub.owner_levels("0") == [0]


async def test_consumer_group_is_checked_without_disturbing_its_readers() -> None:
    """One that exists passes, read exclusively or not; one that does not is named."""
    hub = FakeHub(consumer_groups=("$Default", "readers"))
    transport = FakeTransport(hub)
    await require_consumer_group(transport, options(consumerGroup="readers"))
    assert hub.owner_levels("0") == []
    await _read_exclusively(hub)
    await require_consumer_group(transport, options())
    assert hub.owner_levels("0") == [0]
    with pytest.raises(ConfigurationError, match="consumerGroup: hub telemetry has no consumer group others"):
        await require_consumer_group(transport, options(consumerGroup="others"))
    hub.refuse(LinkDetachedError("away"))
    with pytest.raises(LinkDetachedError):
        await require_consumer_group(transport, options(consumerGroup="readers"))
