"""Subscriptions that a host has no processor for: they are reported with their lag on its partitions."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime
from typing import Any

import pytest

from eventpump.core.starts import lag_after
from eventpump.errors import ServiceBusyError
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.interfaces import PartitionProperties
from eventpump.reports import ServiceFailed, StoreFailed, SubscriptionWithoutProcessor
from eventpump.testing.transport import FakeHub
from tests.support.fleet import NO_PROCESSOR, Fleet, Record, RecordingProcessor


async def _leave_behind(fleet: Fleet, **options: Any) -> None:
    """Have a subscription with 10 events processed on each partition, and no host that delivers to it."""
    host = fleet.host("a", NO_PROCESSOR)
    await host.subscribe("alerts", RecordingProcessor(Record()), **options)
    for partition_id in fleet.hub.partition_ids:
        fleet.hub.publish(partition_id, count=10)
    fleet.runs["a"] = asyncio.create_task(host.run())
    await asyncio.sleep(5)
    await host.aclose()


async def test_its_lag_on_each_partition_is_in_the_report() -> None:
    """By its checkpoint, or by its start where there is none, and the partition's end; once, and not each interval."""
    async with Fleet(FakeHub(partitions=2)) as fleet:
        await _leave_behind(fleet)
        other = fleet.host("a2", NO_PROCESSOR)
        await other.subscribe("fresh", RecordingProcessor(Record()))
        await other.aclose()
        fleet.hub.publish("0", count=5)
        fleet.hub.publish("1", count=7)
        await fleet.start("b")
        await asyncio.sleep(300)
        last = {each.subscription: each for each in fleet.reported("b", SubscriptionWithoutProcessor)}
        assert {name: each.lags for name, each in last.items()} == {
            "alerts": {"0": 5, "1": 7},
            "fresh": {"0": 5, "1": 7},
        }
        assert "on its 2 partitions, 12 events wait" in last["alerts"].describe()
        # At most one for each partition acquired.
        assert len(fleet.reported("b", SubscriptionWithoutProcessor)) <= 4


async def test_host_that_owns_nothing_reports_it_without_lag() -> None:
    """It would not deliver to it if it got a partition."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        host = fleet.host("a")
        await host.subscribe("alerts", RecordingProcessor(Record()))
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        await fleet.start("b")
        await asyncio.sleep(60)
        assert fleet.owned("b") == set()
        assert [each.lags for each in fleet.reported("b", SubscriptionWithoutProcessor)] == [{}]
        await host.aclose()
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(60)
        assert [each.lags for each in fleet.reported("b", SubscriptionWithoutProcessor)] == [{}, {"0": 3}]
        fleet.runs["b"].cancel()


async def test_host_without_subscriptions_lists_them_rarely() -> None:
    """They cost no request per cycle where there are none; one of another host's is found all the same."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        await fleet.start("b")
        await asyncio.sleep(60)
        calls = fleet.stores["b"].calls
        calls.clear()
        await asyncio.sleep(100)
        assert calls.count(("list", None)) >= 10
        assert calls.count(("subscriptions", None)) <= 1
        await fleet.host("a").subscribe("alerts", RecordingProcessor(Record()))
        await asyncio.sleep(300)
        assert len(fleet.reported("b", SubscriptionWithoutProcessor)) == 1


@pytest.mark.parametrize("fails", ["service", "store", "another hub", "time"])
async def test_lag_that_cannot_be_found_out_is_unknown(fails: str) -> None:
    """It is None, never 0; what failed is reported, and the host goes on."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        fleet.hub.publish("0", count=5)
        if fails == "time":
            host = fleet.host("a", NO_PROCESSOR)
            start = datetime.now(UTC).replace(year=2000)
            await host.subscribe("alerts", RecordingProcessor(Record()), start=start, catch_up="shared")
            await host.aclose()
        else:
            await _leave_behind(fleet)
        if fails == "another hub":
            fleet.hub.recreate()
        if fails == "service":
            fleet.hub.refuse(ServiceBusyError("busy"), operation="partition", times=math.inf)
        await fleet.start("b", on_data_loss="earliest")
        if fails == "store":
            fleet.stores["b"].fail("read", times=math.inf)
        await asyncio.sleep(60)
        assert fleet.reported("b", SubscriptionWithoutProcessor)[-1].lags == {"0": None}
        assert "unknown on 1" in fleet.reported("b", SubscriptionWithoutProcessor)[-1].describe()
        failed = {"service": ServiceFailed, "store": StoreFailed}.get(fails)
        assert failed is None or any(each.subscription == "alerts" for each in fleet.reported("b", failed))


@pytest.mark.parametrize(
    ("stored", "start", "first", "last", "lag"),
    [
        (9, "earliest", 0, 9, 0),
        (9, "earliest", 0, 29, 20),
        (9, "earliest", 20, 29, 10),
        (29, "earliest", 0, 9, 0),
        (None, "earliest", 0, 29, 30),
        (None, "earliest", 20, 29, 10),
        (None, 9, 0, 29, 20),
        (None, "offset", 0, 29, None),
        (None, "earliest", 0, -1, 0),
    ],
)
def test_lag_by_what_is_stored(stored: int | None, start: str | int, first: int, last: int, lag: int | None) -> None:
    """What retention has removed does not wait; what only reading can show is unknown."""
    positions = {"earliest": EventPosition.earliest(), "offset": EventPosition.at_offset("4096")}
    position = EventPosition.at_sequence_number(start) if isinstance(start, int) else positions[start]
    now = datetime.now(UTC)
    facts = PartitionProperties("hub", "0", first, last, str(last * 100), now, last < 0)
    checkpoint = None if stored is None else Checkpoint("0", str(stored * 100), stored)
    assert lag_after(checkpoint, position, facts) == lag
