"""What a host says that it is doing: what each partition waits for, and the calls of the store."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import PartitionContext
from eventpump.errors import ServiceTimeoutError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import PartitionDescription, WaitsFor
from tests.support.fleet import NO_PROCESSOR, RecordingProcessor, stocked

Events = Sequence[ReceivedEvent]


def described(host: HubHost, partition_id: str = "0", subscription: str = "default") -> PartitionDescription:
    """Return what a host does on a partition."""
    (found,) = (
        each
        for each in host.describe().partitions
        if (each.status.partition_id, each.status.subscription) == (partition_id, subscription)
    )
    return found


async def test_handler_is_described_with_its_events_its_time_and_its_line() -> None:
    """The line is that of the user's code at which it waits."""
    go_on = asyncio.Event()

    async def process(context: PartitionContext, events: Events) -> None:
        await go_on.wait()

    async with stocked(5) as fleet:
        host = await fleet.start("a", RecordingProcessor(fleet.record, on_events=process))
        await asyncio.sleep(20)
        found = described(host)
        assert found.waits_for is WaitsFor.HANDLER
        line = inspect.getsourcelines(process)[1] + 1
        assert f"{__file__}:{line} " in found.text
        assert found.text.startswith("process_events of events 0 to 4 (5), for ")
        seconds = float(found.text.partition(", for ")[2].partition(" s")[0])
        assert 15 < seconds <= 20
        assert found.text in str(host.describe())
        go_on.set()
        await asyncio.sleep(1)
        assert described(host).waits_for is WaitsFor.EVENTS


async def test_wait_for_events_has_the_credit_and_the_next_renewal() -> None:
    """The cache is empty, and the service may send; the lease is renewed before it expires."""
    async with stocked(lease_duration=30) as fleet:
        host = await fleet.start("a")
        await asyncio.sleep(65)
        found = described(host)
        assert found.waits_for is WaitsFor.EVENTS
        assert f"with credit for {fleet.hub.credit('0')[0]}" in found.text
        assert found.renewal_in is not None
        assert found.expires_in is not None
        assert 0 < found.renewal_in <= 10 < found.expires_in <= 30
        assert f"renewed in {found.renewal_in:.1f} s" in str(found)


async def test_link_that_is_refused_is_what_is_waited_for() -> None:
    """While it is opened again, and while its attach is not answered."""
    async with stocked() as fleet:
        host = await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.refuse(ServiceTimeoutError("no answer"), times=float("inf"))
        fleet.hub.detach("0")
        await asyncio.sleep(10)
        found = described(host)
        assert found.waits_for is WaitsFor.LINK
        assert found.text in {"its link (waiting)", "its link (opening)"}
        fleet.hub.accept()


async def test_failed_handler_waits_for_its_next_attempt() -> None:
    """With the number of failures."""

    async def process(context: PartitionContext, events: Events) -> None:
        raise LookupError

    async with stocked(1) as fleet:
        host = await fleet.start("a", RecordingProcessor(fleet.record, on_events=process))
        await asyncio.sleep(20)
        found = described(host)
        assert found.waits_for is WaitsFor.RETRY
        assert found.text.startswith("the next attempt, after ")


async def test_paused_subscription_waits_for_resume() -> None:
    """Beside one that is not paused, on the same link."""
    async with stocked() as fleet:
        host = await fleet.start("a")
        await host.subscribe("audit", RecordingProcessor(fleet.record))
        await asyncio.sleep(20)
        host.pause("audit")
        await asyncio.sleep(1)
        assert described(host, subscription="audit").waits_for is WaitsFor.RESUME
        assert described(host).waits_for is WaitsFor.EVENTS
        assert "partition 0 of audit waits for a call of resume" in str(host.describe())


async def test_batch_that_a_loop_keeps_is_waited_for() -> None:
    """What is received meanwhile is counted."""
    async with stocked(100) as fleet:
        host = fleet.host("a", NO_PROCESSOR)
        batches = host.batches()
        batch = await anext(batches)
        await asyncio.sleep(10)
        found = described(host)
        assert found.waits_for is WaitsFor.HANDLER
        assert batch.events
        assert found.status.buffered_bytes > 0
        await batches.aclose()


async def test_subscription_that_another_one_holds_back_waits_for_credit() -> None:
    """The cache of their link is full of what the other one has not read."""
    go_on = asyncio.Event()

    async def wait(context: PartitionContext, events: Events) -> None:
        await go_on.wait()

    async with stocked() as fleet:
        host = await fleet.start("a", prefetch_events=20, max_batch_size=5)
        await host.subscribe("audit", wait)
        await asyncio.sleep(20)
        fleet.hub.publish("0", count=500)
        await asyncio.sleep(20)
        found = described(host)
        assert found.waits_for is WaitsFor.CREDIT
        assert "credit" in found.text
        assert described(host, subscription="audit").waits_for is WaitsFor.HANDLER
        go_on.set()


async def test_store_calls_under_way_are_described() -> None:
    """Those that were sent, with their partition, for how long; and a renewal that is under way."""
    async with stocked(partitions=2) as fleet:
        host = await fleet.start("a")
        await asyncio.sleep(1)
        assert host.describe().store_calls == ()
        assert "store: no call is under way" in str(host.describe())
        fleet.stores["a"].hang("renew", "1")
        await fleet.until(lambda: bool(host.describe().store_calls), 30)
        await asyncio.sleep(2)
        renewals = [each for each in host.describe().store_calls if each.operation == "renew"]
        (call,) = renewals
        assert (call.partition_id, call.is_sent) == ("1", True)
        assert 2 <= call.seconds < 3
        assert described(host, "1").is_renewing
        assert not described(host, "0").is_renewing
        assert "renew of partition 1, for 2." in str(host.describe())


async def test_start_of_a_partition_is_described() -> None:
    """Its checkpoint is being read."""
    async with stocked() as fleet:
        host = fleet.host("a")
        fleet.stores["a"].hang("read")
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(3)
        assert described(host).waits_for is WaitsFor.START
        fleet.stores["a"].heal()


async def test_host_that_does_not_run_is_described() -> None:
    """Before `run`, and after its end: with what it waits for, and without partitions."""
    async with stocked() as fleet:
        host = fleet.host("a")
        assert "host a waits for the call of run" in str(host.describe())
        assert "no partition is run here" in str(host.describe())
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        await host.aclose()
        assert "closed" in str(host.describe())
        assert host.describe().partitions == ()
