"""Where hosts and readers begin: once, and for all who come later."""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta
from typing import Any

import pytest

from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.reader.reader import HubReader
from eventpump.errors import ConfigurationError, ConnectionLostError, RequestRefusedError, ServiceTimeoutError
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.options.consumer import HostSettings, ReaderSettings
from eventpump.reports import (
    LeaseStoreEmpty,
    PartitionFailed,
    PumpStarted,
    ServiceFailed,
    StartIgnored,
    StoreFailed,
)
from eventpump.storage.groups import Stored
from eventpump.storage.leases.memory import MemoryLeaseStore
from eventpump.storage.scope_form import ScopeRecord
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.fleet import Fleet, RecordingProcessor, stocked


async def _nothing(context: PartitionContext, events: object) -> None:
    pass


def _reader(hub: FakeHub, /, **options: Any) -> HubReader:
    settings = ReaderSettings(**{"hub": hub.name, "partition_id": "0", **options})
    return HubReader(lambda: FakeTransport(hub), settings, rng=random.Random(1))


def _record(fleet: Fleet) -> ScopeRecord:
    return fleet.leases.scope_record(fleet.scope)


def _stored(fleet: Fleet, partition_id: str = "0") -> Checkpoint | None:
    return fleet.leases.checkpoints(fleet.scope).get((partition_id, "default"))


# ------------------------------------------------------------------------------------------------- "@latest", pinned


async def test_link_cut_before_the_first_event_loses_nothing() -> None:
    """What is sent after "@latest" was begun at, while the link is being opened again, is delivered."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        await fleet.start("a", initial_position="@latest")
        await fleet.until(lambda: bool(fleet.reported("a", PumpStarted)), 5)
        for _ in range(3):
            fleet.hub.lose_connections()
            fleet.hub.publish("0", count=10)
            await asyncio.sleep(0.001)
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == list(range(10, 40))


async def test_reader_whose_link_is_cut_before_the_first_event_loses_nothing() -> None:
    """The end that a reader begins at is that of its entering, on whichever link the first event comes."""
    hub = FakeHub()
    hub.publish("0", count=10)
    async with _reader(hub, position="@latest") as reader:
        hub.publish("0", count=10)
        assert reader.position == EventPosition.at_offset("fake:9")
        await asyncio.sleep(1)
        hub.lose_connections()
        hub.publish("0", count=10)
        got: list[int] = []
        while len(got) < 20:
            got += [event.sequence_number for event in await reader.read(max_wait_time=10)]
        assert got == list(range(10, 30))


async def test_reader_at_latest_pins_the_end_of_an_empty_partition() -> None:
    """An unused partition is begun at its start, one that retention emptied after its last event."""
    hub = FakeHub(partitions=2)
    hub.publish("1", count=10)
    hub.truncate("1", 10)
    for partition_id, place, first in (("0", "-1", 0), ("1", "fake:9", 10)):
        async with _reader(hub, position="@latest", partition_id=partition_id) as reader:
            assert reader.position == EventPosition.at_offset(place)
            hub.detach()
            hub.publish(partition_id, "new")
            assert [event.sequence_number for event in await reader.read(max_wait_time=10)] == [first]


async def test_reader_at_latest_retries_to_find_its_end() -> None:
    """A service that is away for a moment delays the start of a reader; one that stays away ends it in time."""
    hub = FakeHub()
    hub.publish("0", count=3)
    hub.refuse(ConnectionLostError("not up yet"), operation="partition", times=2)
    async with _reader(hub, position="@latest") as reader:
        assert reader.position == EventPosition.at_offset("fake:2")
    hub.refuse(ServiceTimeoutError("away"), operation="partition", times=float("inf"))
    began = asyncio.get_running_loop().time()
    with pytest.raises(ServiceTimeoutError):
        await _reader(hub, position="@latest", startup_timeout=30).__aenter__()
    assert asyncio.get_running_loop().time() - began <= 30


async def test_partition_that_moves_before_its_first_event_loses_nothing() -> None:
    """A later owner goes on where the first one began, although nothing was processed."""
    async with stocked() as fleet:
        await fleet.start("a", initial_position="@latest")
        await fleet.until(lambda: bool(fleet.reported("a", PumpStarted)), 5)
        await fleet.hosts["a"].aclose()
        fleet.hub.publish("0", count=10)
        await fleet.start("b", initial_position="@latest")
        await asyncio.sleep(5)
        assert fleet.record.numbers("0", "b") == list(range(10))


async def test_restart_before_the_first_checkpoint_loses_nothing() -> None:
    """What was delivered and not checkpointed comes again, whatever the start."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=5)
        await fleet.start("a", RecordingProcessor(fleet.record, on_events=_nothing), initial_position="@latest")
        await asyncio.sleep(5)
        fleet.hub.publish("0", count=5)
        await asyncio.sleep(5)
        await fleet.hosts["a"].aclose()
        fleet.hub.publish("0", count=5)
        await fleet.start("b", initial_position="@latest")
        await asyncio.sleep(5)
        assert fleet.record.numbers("0", "a") == list(range(5, 10))
        assert fleet.record.numbers("0", "b") == list(range(5, 15))


async def test_attach_never_asks_for_latest() -> None:
    """No link of a host or reader is attached at "@latest", whatever happens to it."""
    async with stocked(partitions=2) as fleet:
        await fleet.start("a", initial_position={"1": "@latest"})
        async with _reader(fleet.hub, position="@latest", consumer_group="$default"):
            for _ in range(4):
                await asyncio.sleep(3)
                fleet.hub.detach()
        assert len(fleet.hub.attached) > 6
        assert all(spec.position.offset != "@latest" for spec in fleet.hub.attached)


@pytest.mark.parametrize("kept", ["all", "nothing", "unused"])
async def test_first_checkpoint_holds_the_newest_event_of_the_partition(kept: str) -> None:
    """It holds number and offset of the newest event there ever was; before the first, -1 and "-1"."""
    async with stocked() as fleet:
        if kept != "unused":
            fleet.hub.publish("0", count=7)
        if kept == "nothing":
            fleet.hub.truncate("0", 7)
        await fleet.start("a", initial_position="@latest")
        await asyncio.sleep(1)
        assert _stored(fleet) == (Checkpoint("0", "-1", -1) if kept == "unused" else Checkpoint("0", "fake:6", 6))
        fleet.hub.publish("0", "next")
        await asyncio.sleep(1)
        assert fleet.record.numbers("0") == [0 if kept == "unused" else 7]


@pytest.mark.parametrize("is_after", [True, False], ids=["answer lost", "not stored"])
async def test_attach_waits_until_the_first_checkpoint_is_stored(is_after: bool) -> None:
    """A store that fails delays the first link, and the place that was pinned first is the one that is stored."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=3)
        fleet.host("a", initial_position="@latest")
        fleet.stores["a"].fail("write", times=3, is_after=is_after)
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await fleet.until(lambda: bool(fleet.reported("a", StoreFailed)), 10, step=0.001)
        assert fleet.hub.attached == []
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(20)
        assert fleet.record.numbers("0") == [3, 4, 5]


async def test_end_of_a_partition_without_an_answer_is_asked_for_again() -> None:
    """A partition whose end cannot be read yet is not begun at another one."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=3)
        fleet.hub.refuse(ServiceTimeoutError("away"), operation="partition", times=3)
        await fleet.start("a", initial_position="@latest")
        await asyncio.sleep(20)
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(1)
        assert fleet.record.numbers("0") == [3, 4, 5]
        assert len(fleet.reported("a", ServiceFailed)) == 3


async def test_lease_lost_before_the_first_checkpoint_ends_the_pump() -> None:
    """Where the store refuses the first checkpoint, nothing is read under that lease."""
    async with stocked() as fleet:
        fleet.host("a", initial_position="@latest")
        fleet.stores["a"].delay(2.0, "write")
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await fleet.until(lambda: ("write", "0") in fleet.stores["a"].calls, 5, step=0.001)
        fleet.leases.leases(fleet.scope)["0"].token = "another's"
        await asyncio.sleep(3)
        assert fleet.hub.attached == []
        assert _stored(fleet) is None


def test_inclusive_latest_is_refused() -> None:
    """A host pins its start by a checkpoint, and none says "the newest event too"."""
    with pytest.raises(ConfigurationError, match="inclusive"):
        HostSettings(hub="h", initial_position=EventPosition.at_offset("@latest", inclusive=True))


# -------------------------------------------------------------------------------------------------------- the record


async def test_first_host_records_the_start() -> None:
    """The record holds the hub, its partitions and the start asked for, before there is a lease."""
    async with stocked(partitions=3) as fleet:
        fleet.host("a", initial_position={"1": "@latest", "2": 7})
        fleet.stores["a"].hang("ensure")
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(1)
        starts = {"": "offset>-1", "1": "offset>@latest", "2": "number>7"}
        assert _record(fleet) == ScopeRecord(fleet.hub.created_at, 3, starts)
        assert fleet.leases.leases(fleet.scope) == {}


async def test_partition_added_while_running_begins_at_its_beginning() -> None:
    """Whatever the start: what was sent to a new partition before a host found it is delivered."""
    async with stocked() as fleet:
        await fleet.start("a", initial_position="@latest")
        await asyncio.sleep(5)
        fleet.hub.add_partitions(2)
        fleet.hub.publish("1", count=10)
        await asyncio.sleep(40)
        assert fleet.record.numbers("1") == list(range(10))
        await fleet.hosts["a"].aclose()
        fleet.hub.add_partitions(1)
        fleet.hub.publish("3", count=10)
        await fleet.start("b", initial_position="@latest")
        await asyncio.sleep(40)
        assert fleet.record.numbers("3") == list(range(10))


async def test_start_after_a_crash_before_there_were_leases_is_no_first_one() -> None:
    """A partition that is added after a host died amid its start is a later one for the next host."""
    async with stocked(partitions=2) as fleet:
        fleet.host("a", initial_position="@latest")
        fleet.stores["a"].hang("ensure")
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(1)
        fleet.runs["a"].cancel()
        await asyncio.wait({fleet.runs["a"]})
        fleet.hub.add_partitions(1)
        for partition_id in "012":
            fleet.hub.publish(partition_id, count=4)
        await fleet.start("b", initial_position="@latest")
        await asyncio.sleep(40)
        assert _record(fleet).partition_count == 2
        assert [fleet.record.numbers(each) for each in "012"] == [[], [], [0, 1, 2, 3]]


async def test_start_of_two_hosts_at_once_is_decided_by_one_record() -> None:
    """Both found no record: the first to write it decides, and the other reports that its own start does not count."""
    async with stocked(partitions=4) as fleet:
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, count=5)
        fleet.host("a", initial_position="@latest")
        fleet.host("b", initial_position="-1")
        fleet.stores["a"].delay(1.0, "record")
        for name in "ab":
            fleet.runs[name] = asyncio.create_task(fleet.hosts[name].run())
        await asyncio.sleep(90)
        assert _record(fleet).starts == {"": "offset>-1"}
        for partition_id in fleet.hub.partition_ids:
            assert set(fleet.record.numbers(partition_id)) == set(range(5))
        (report,) = fleet.reported("a", StartIgnored)
        assert (report.recorded, report.configured) == ({"": "offset>-1"}, {"": "offset>@latest"})
        assert not fleet.reported("b", StartIgnored)


@pytest.mark.parametrize("is_after", [True, False], ids=["answer lost", "not stored"])
async def test_start_waits_while_the_store_fails_over_the_record(is_after: bool) -> None:
    """A record that cannot be read or written is tried again, and reported; no lease is made meanwhile."""
    async with stocked() as fleet:
        fleet.hub.publish("0", "a")
        fleet.host("a")
        fleet.stores["a"].fail("scope", times=2, is_after=is_after)
        fleet.stores["a"].fail("record", times=2, is_after=is_after)
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(50)
        assert fleet.record.numbers("0") == [0]
        operations = [operation for operation, _ in fleet.stores["a"].calls]
        assert operations.index("record") < operations.index("ensure")
        assert len({str(report.error) for report in fleet.reported("a", StoreFailed)}) == 2


async def test_start_of_a_group_without_a_record_goes_on_and_writes_one() -> None:
    """Checkpoints of an older version count, and the record is written with the hub there is."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        fleet.leases.checkpoints(fleet.scope)["0", "default"] = Checkpoint("0", "fake:4", 4)
        await fleet.start("a", initial_position="@latest")
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == [5, 6, 7, 8, 9]
        assert _record(fleet).hub_created_at == fleet.hub.created_at


async def test_start_at_a_time_is_asked_for_until_there_is_a_checkpoint() -> None:
    """Until there is a checkpoint, every link and every owner begins at that time."""
    async with stocked() as fleet:
        fleet.hub.publish("0", "before")
        moment = fleet.hub.now() + timedelta(seconds=10)
        await fleet.start("a", initial_position=moment)
        await asyncio.sleep(5)
        fleet.hub.publish("0", "before too")
        await asyncio.sleep(10)
        await fleet.hosts["a"].aclose()
        fleet.hub.publish("0", "after")
        await fleet.start("b", initial_position=moment)
        await asyncio.sleep(5)
        assert fleet.record.numbers("0", "b") == [2]
        assert _stored(fleet) == Checkpoint("0", "fake:2", 2)


async def test_recorded_start_that_is_refused_is_replaced() -> None:
    """A slip in the first host's start does not outlive its correction; one that works is kept."""
    async with stocked(partitions=2) as fleet:
        fleet.hub.publish("0", count=5)
        fleet.hub.publish("1", count=9)
        await fleet.start("a", initial_position="fake:7")
        await asyncio.sleep(5)
        assert isinstance(fleet.reported("a", PartitionFailed, "0")[0].error, RequestRefusedError)
        await fleet.hosts["a"].aclose()
        await fleet.start("b", initial_position="fake:2")
        await asyncio.sleep(70)
        assert fleet.record.numbers("0", "b") == [3, 4]
        assert fleet.record.numbers("1") == [8]
        assert _record(fleet).starts == {"": "offset>fake:7", "0": "offset>fake:2"}


# ------------------------------------------------------------------------------------------------------ an empty store


async def test_start_with_an_empty_store_is_reported_once_per_group() -> None:
    """By the host that writes the record, if the hub has events; neither by others nor by the next start."""
    async with stocked(partitions=3) as fleet:
        fleet.hub.publish("2", count=3)
        for name in "abc":
            fleet.host(name)
            fleet.runs[name] = asyncio.create_task(fleet.hosts[name].run())
        await asyncio.sleep(60)
        (report,) = [each for name in "abc" for each in fleet.reported(name, LeaseStoreEmpty)]
        assert report.level == logging.WARNING
        assert report.describe() == (
            "no checkpoint anywhere: reading from the beginning (hub telemetry, consumer group $Default); "
            "if it has been read before, this is not its lease store"
        )
        for name in "abc":
            await fleet.hosts[name].aclose()
        await fleet.start("d")
        await asyncio.sleep(60)
        assert fleet.reported("d", LeaseStoreEmpty) == []


@pytest.mark.parametrize(("is_after", "first"), [(True, "a"), (False, "b")], ids=["answer lost", "not stored"])
async def test_start_with_an_empty_store_is_reported_by_the_writer_of_the_record(is_after: bool, first: str) -> None:
    """Of two hosts with equal starts only one is the first: the one whose record it is, also if its write failed."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=3)
        for name in "ab":
            fleet.host(name)
            fleet.stores[name].hang("write")  # where there is a checkpoint nothing is reported
        fleet.stores["a"].fail("record", is_after=is_after)
        fleet.stores["b"].delay(0.01, "record")
        for name in "ab":
            fleet.runs[name] = asyncio.create_task(fleet.hosts[name].run())
        await asyncio.sleep(60)
        assert [name for name in "ab" for _ in fleet.reported(name, LeaseStoreEmpty)] == [first]


@pytest.mark.parametrize("case", ["no events", "explicit start", "leases of another library", "record"])
async def test_start_that_reads_nothing_again_is_not_reported(case: str) -> None:
    """A hub without events, a start that was asked for, checkpoints of a .NET host, and a group that has a record."""
    async with stocked(partitions=2) as fleet:
        if case != "no events":
            fleet.hub.publish("0", count=3)
            fleet.hub.publish("1", count=3)
        if case == "leases of another library":
            store = MemoryLeaseStore(fleet.leases)
            await store.open(fleet.scope)
            await store.ensure(["0", "1"])
            fleet.leases.checkpoints(fleet.scope)["1", "default"] = Checkpoint("1", "fake:1", 1)
        if case == "record":
            fleet.leases.put_scope_record(fleet.scope, Stored(ScopeRecord(fleet.hub.created_at, 2, {}), "1"))
        await fleet.start("a", **({"initial_position": "earliest"} if case == "explicit start" else {}))
        await asyncio.sleep(30)
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(30)
        assert fleet.record.numbers("0") == list(range(3 if case == "no events" else 6))
        assert fleet.reported("a", LeaseStoreEmpty) == []


@pytest.mark.parametrize("operation", ["record", "scope", "list", "ensure"])
async def test_start_with_an_empty_store_is_reported_although_the_store_fails(operation: str) -> None:
    """An answer that was lost does not lose the report, nor do properties that cannot be read at first."""
    async with stocked(partitions=2) as fleet:
        fleet.hub.publish("1", count=3)
        fleet.host("a")
        fleet.stores["a"].fail(operation, times=2, is_after=True)
        fleet.hub.refuse(ServiceTimeoutError("away"), operation="partition", times=2)
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(60)
        assert len(fleet.reported("a", LeaseStoreEmpty)) == 1
