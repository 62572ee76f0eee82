"""What a host shows of itself: health, metrics and lag."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from eventpump.consumer.host.host import HubHost
from eventpump.consumer.host.monitoring import ReportTally
from eventpump.consumer.processor import PartitionContext
from eventpump.core.monitoring import Health, Sample
from eventpump.errors import ServiceTimeoutError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import HostReport, LoopBlocked
from tests.support.fleet import NO_PROCESSOR, RecordingProcessor, stocked

HOUR = 3600.0
WELL = Health(live=True, ready=True)


def samples(host: HubHost, name: str) -> list[Sample]:
    """Return the samples of one metric, without the labels of the host."""
    (metric,) = (each for each in host.metrics() if each.name == name)
    shared = {"messaging_system", "server_address", "messaging_destination_name", "messaging_consumer_group_name"}
    return [
        Sample({label: text for label, text in each.labels.items() if label not in shared}, each.value, each.suffix)
        for each in metric.samples
    ]


def value(host: HubHost, name: str, **labels: str) -> float | None:
    """Return the one value that has some labels; None if there is none."""
    found = [each.value for each in samples(host, name) if labels.items() <= each.labels.items()]
    assert len(found) <= 1, found
    return found[0] if found else None


async def test_host_is_ready_after_its_first_round_of_leases_and_until_it_closes() -> None:
    """Not before `run`, while the store or the hub has not answered, or leases are being taken; with the reason."""
    async with stocked(partitions=2) as fleet:
        host = fleet.host("a")
        assert host.health() == Health(live=True, ready=False, reasons=("host a waits for the call of run",))
        assert list(host.metrics()) == []
        assert host.behind() is None
        fleet.stores["a"].hang("open")
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(5)
        assert host.health().reasons == ("host a waits for open the lease store",)
        fleet.hub.hang("hub")
        fleet.stores["a"].heal()
        await asyncio.sleep(5)
        assert host.health().reasons == (f"host a waits for reading the properties of hub {fleet.hub.name}",)
        fleet.stores["a"].hang("acquire")
        fleet.hub.answer("hub")
        await asyncio.sleep(5)
        assert host.health().reasons == ("host a waits for the first round of leases",)
        assert value(host, "eventpump_ready") == 0
        fleet.stores["a"].heal()
        await asyncio.sleep(1)
        assert host.health() == WELL
        assert value(host, "eventpump_ready") == 1
        host.stop()
        assert host.health() == Health(
            live=True, ready=False, reasons=("host a waits for its end: it is closing, or closed",)
        )


async def test_reason_of_a_start_names_what_failed() -> None:
    """A store that fails at the start is in the reason, with its error."""
    async with stocked() as fleet:
        host = fleet.host("a")
        fleet.stores["a"].fail("open", times=float("inf"))
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(3)
        (reason,) = host.health().reasons
        assert reason.startswith("host a waits for open the lease store: ")
        assert "503 server busy" in reason


async def test_host_without_a_partition_is_ready() -> None:
    """A replica beyond the number of partitions owns nothing; if it were not ready, a roll-out would not end."""
    async with stocked(partitions=1) as fleet:
        await fleet.start("a")
        await asyncio.sleep(10)
        spare = await fleet.start("b")
        await asyncio.sleep(10)
        assert fleet.owned("b") == set()
        assert spare.health() == WELL


async def test_host_without_a_processor_is_ready() -> None:
    """Its subscriptions may come later."""
    async with stocked() as fleet:
        host = await fleet.start("a", NO_PROCESSOR)
        await asyncio.sleep(5)
        assert host.health() == WELL


async def test_host_whose_store_is_down_for_an_hour_is_live_and_ready() -> None:
    """A restart would not bring the store back. Likewise for a hub that is out of reach, and one without events."""
    async with stocked(partitions=2) as fleet:
        host = await fleet.start("a")
        await asyncio.sleep(60)
        for operation in ("list", "renew", "acquire", "steal", "write", "read", "release", "subscriptions"):
            fleet.stores["a"].fail(operation, times=float("inf"))
        for _ in range(60):
            await asyncio.sleep(HOUR / 60)
            assert host.health() == WELL
        assert fleet.owned("a") == set()
        assert (value(host, "eventpump_store_failures_total", operation="list leases") or 0) > 100
        fleet.stores["a"].heal()
        await asyncio.sleep(60)
        assert fleet.owned("a") == {"0", "1"}
        assert host.health() == WELL


async def test_metrics_have_lag_state_and_numbers_of_each_partition() -> None:
    """By the event delivered and by the checkpoint; of a partition that is detached likewise, without a lag."""

    async def process(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        if events[0].sequence_number == 5:
            await context.checkpoint()
        if events[0].sequence_number == 10:
            await asyncio.sleep(HOUR)

    async with stocked(partitions=1) as fleet:
        fleet.hub.publish("0", count=100)
        processor = RecordingProcessor(fleet.record, on_events=process)
        host = await fleet.start("a", processor, max_batch_size=5, track_last_enqueued=True)
        await asyncio.sleep(20)
        partition = {"messaging_destination_partition_id": "0"}
        assert value(host, "eventpump_partition_lag", **partition, position="delivered") == 99 - 14
        assert value(host, "eventpump_partition_lag", **partition, position="checkpointed") == 99 - 9
        assert value(host, "eventpump_partition_sequence_number", position="delivered") == 14
        assert value(host, "eventpump_partition_sequence_number", position="checkpointed") == 9
        assert samples(host, "eventpump_partition_owned") == [Sample({**partition, "state": "running"}, 1)]
        assert (value(host, "eventpump_handler_running_seconds", **partition) or 0) > 10
        assert (value(host, "eventpump_cache_size_bytes", **partition) or 0) > 0
        lag = host.behind()
        assert lag is not None
        assert (lag["lag"], lag["unknown"]) == (85, [])
        assert lag["partitions"][0]["checkpointed_lag"] == 90
        fleet.hub.refuse(ServiceTimeoutError("no answer"), times=float("inf"))
        fleet.hub.detach("0")
        await asyncio.sleep(1)
        assert samples(host, "eventpump_partition_owned") == [Sample({**partition, "state": "detached"}, 1)]
        assert samples(host, "eventpump_partition_lag") == []
        kinds = {each.labels["error_type"] for each in samples(host, "eventpump_link_reopens_total")}
        assert "ServiceTimeoutError" in kinds
        fleet.hub.accept()


async def test_metrics_count_moves_of_leases() -> None:
    """Acquired, stolen, lost and released, each once per report; every class of report has a value from the start."""
    async with stocked(partitions=2) as fleet:
        first = await fleet.start("a")
        await asyncio.sleep(10)
        second = await fleet.start("b")
        await asyncio.sleep(60)
        reasons = [dict(each.labels)["reason"] for each in samples(first, "eventpump_partition_moves_total")]
        assert sorted(reasons) == ["acquired", "acquired", "lost"]
        assert [each.labels["reason"] for each in samples(second, "eventpump_partition_moves_total")] == ["stolen"]
        assert value(second, "eventpump_reports_total", report="LeaseTaken") == 1
        assert value(second, "eventpump_reports_total", report="DataLost") == 0
        names = {each.labels["report"] for each in samples(first, "eventpump_reports_total")}
        assert names == {kind.__name__ for kind in HostReport.__subclasses__()}


@pytest.mark.parametrize(
    ("policy", "outcome"), [("retry", "retried"), ("skip", "skipped"), ("stop_partition", "stopped")]
)
async def test_metrics_count_failures_of_the_processor_by_what_followed(policy: str, outcome: str) -> None:
    """With the class of what it raised."""

    async def process(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        raise LookupError("no such sensor")

    async with stocked(1) as fleet:
        processor = RecordingProcessor(fleet.record, on_events=process)
        host = await fleet.start("a", processor, failure_policy=policy)
        await asyncio.sleep(20)
        found = samples(host, "eventpump_handler_failures_total")
        assert {(each.labels["outcome"], each.labels["error_type"]) for each in found} == {(outcome, "LookupError")}


def test_metrics_have_the_time_for_which_the_loop_was_blocked() -> None:
    """As a histogram, whose buckets count what is at most their limit."""
    tally = ReportTally()

    def found() -> list[Sample]:
        (metric,) = (each for each in tally.metrics({}) if each.name == "eventpump_loop_blocked_seconds")
        return list(metric.samples)

    assert found() == []
    for seconds in (3.0, 0.5, 60.0):
        tally.count(LoopBlocked("a", "0", seconds, "process_events"))
    limits = {each.labels["le"]: each.value for each in found() if each.suffix == "_bucket"}
    assert (limits["0.25"], limits["0.5"], limits["2.5"], limits["5.0"], limits["+Inf"]) == (0, 1, 1, 2, 3)
    rest = {each.suffix: each.value for each in found()}
    assert (rest["_sum"], rest["_count"]) == (63.5, 3)
