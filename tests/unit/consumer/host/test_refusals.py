"""What a refused partition does to its host and to the others: as a rule, nothing."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import pytest

from eventpump.errors import (
    AuthenticationError,
    EntityNotFoundError,
    EventPumpError,
    QuotaExceededError,
    Recovery,
)
from eventpump.eventhubs.conditions import CONDITIONS, LINK_STOLEN, PRODUCER_EPOCH_STOLEN, error_for
from eventpump.reports import PartitionFailed
from eventpump.testing.clock import VirtualClock
from eventpump.testing.transport import FakeHub
from tests.support.fleet import Fleet, RecordingProcessor

REFUSALS = sorted(
    condition
    for condition, (_, recovery) in CONDITIONS.items()
    if recovery is Recovery.GIVE_UP and condition not in {LINK_STOLEN, PRODUCER_EPOCH_STOLEN}
)
GONE = "The messaging entity 'telemetry' could not be found."


def _refusal(condition: str) -> EventPumpError:
    return error_for(condition, GONE, lost=Recovery.RELINK)


@pytest.mark.parametrize("condition", REFUSALS)
async def test_refused_idle_partition_does_not_end_the_host(condition: str) -> None:
    """A partition without a checkpoint that is refused once the start is over is reported and tried again."""
    async with Fleet(FakeHub(partitions=4)) as fleet:
        for name in "ab":
            await fleet.start(name)
        await asyncio.sleep(61)
        for partition_id in "012":
            fleet.hub.publish(partition_id, count=5)
        fleet.hub.refuse(_refusal(condition), partition_id="3", times=inf)
        fleet.hub.detach("3")
        await asyncio.sleep(100)
        assert not any(run.done() for run in fleet.runs.values())
        failed = [report for name in "ab" for report in fleet.reported(name, PartitionFailed)]
        assert {report.partition_id for report in failed} == {"3"}
        assert {report.avoided_for for report in failed} == {30.0}
        for partition_id in "012":
            fleet.hub.publish(partition_id, "more")
        fleet.hub.accept()
        fleet.hub.publish("3", "at last")
        await asyncio.sleep(80)
        for partition_id in "012":
            assert fleet.record.numbers(partition_id) == list(range(6))
        assert fleet.record.numbers("3") == [0]


@pytest.mark.parametrize(
    "error",
    [
        AuthenticationError("refused for a minute", condition="amqp:unauthorized-access"),
        EntityNotFoundError("not there for a minute", condition="amqp:not-found"),
        QuotaExceededError("too many for a minute", condition="amqp:resource-limit-exceeded"),
    ],
    ids=["credential", "hub", "quota"],
)
async def test_refusals_at_its_first_takeover_do_not_end_a_standby_host(error: EventPumpError) -> None:
    """A host that owned nothing for two hours does not end over the refusals at its first takeover."""
    async with Fleet(FakeHub(partitions=1)) as fleet:
        await fleet.start("active")
        await asyncio.sleep(1)
        await fleet.start("standby")
        await asyncio.sleep(7_200)
        assert fleet.owned("standby") == set()
        fleet.hub.publish("0", "a")
        await asyncio.sleep(1)
        for operation in ("renew", "list", "write", "acquire", "steal", "release"):
            fleet.stores["active"].hang(operation)
        fleet.hub.refuse(error, times=inf)
        await asyncio.sleep(100)
        assert not fleet.runs["standby"].done()
        assert fleet.reported("standby", PartitionFailed)
        fleet.hub.accept()
        fleet.hub.publish("0", "b")
        await fleet.until(lambda: fleet.record.numbers("0", "standby") == [1], 80)


async def test_refusal_of_one_partition_at_the_start_does_not_end_the_host() -> None:
    """A host one of whose partitions is refused from the beginning, as if there were no right, runs the others."""
    async with Fleet(FakeHub(partitions=4)) as fleet:
        fleet.hub.publish("0", count=3)
        fleet.hub.refuse(AuthenticationError("not this one"), partition_id="2", times=inf)
        await fleet.start("a")
        await asyncio.sleep(200)
        assert not fleet.runs["a"].done()
        assert fleet.record.numbers("0") == [0, 1, 2]
        assert {report.partition_id for report in fleet.reported("a", PartitionFailed)} == {"2"}
        assert len(fleet.reported("a", PartitionFailed)) >= 4


@pytest.mark.parametrize(
    ("options", "error"),
    [({"consumer_group": "nobody"}, EntityNotFoundError), ({}, AuthenticationError)],
    ids=["group", "right"],
)
async def test_refusal_of_all_partitions_at_the_start_ends_every_host(
    options: dict[str, Any], error: type[EventPumpError], clock: VirtualClock
) -> None:
    """Refused on all partitions from the start for the group or the right: `run` raises that, within the time-out."""
    async with Fleet(FakeHub(partitions=50, latency=0.05)) as fleet:
        if not options:
            fleet.hub.refuse(AuthenticationError("no right"), times=inf)
        began = clock.monotonic()
        with pytest.raises(error):
            await fleet.host("a", **options).run()
        assert clock.monotonic() - began < 10
        assert fleet.reported("a", PartitionFailed) == []


async def test_refusals_held_back_at_the_start_are_reported_at_stop() -> None:
    """A refusal held back, while another attempt could show that all is well, is reported when the host stops."""
    opened = asyncio.Event()

    async def hang(context: Any) -> None:
        if context.partition_id == "1":
            await opened.wait()

    async with Fleet(FakeHub(partitions=2)) as fleet:
        fleet.hub.refuse(AuthenticationError("no right"), times=inf)
        await fleet.start("a", RecordingProcessor(fleet.record, on_open=hang))
        await asyncio.sleep(5)
        assert not fleet.runs["a"].done()
        await fleet.hosts["a"].aclose()
        assert [report.partition_id for report in fleet.reported("a", PartitionFailed)] == ["0"]


async def test_refusal_of_a_position_is_reported_for_each_partition() -> None:
    """An offset no partition has is reported for each, with where it came from; one that has it is read."""
    async with Fleet(FakeHub(partitions=2)) as fleet:
        fleet.hub.publish("0", count=3)
        await fleet.start("a", initial_position={"0": "-1", "1": "4711"})
        await asyncio.sleep(200)
        assert not fleet.runs["a"].done()
        assert fleet.record.numbers("0") == [0, 1, 2]
        failed = fleet.reported("a", PartitionFailed)
        assert {report.partition_id for report in failed} == {"1"}
        assert "offset 4711, the host's initial_position" in str(failed[0].error)
        errors = [error for _, partition_id, error in fleet.record.errors if partition_id == "1"]
        assert errors[0] is failed[0].error
