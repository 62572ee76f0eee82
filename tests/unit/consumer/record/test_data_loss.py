"""Events that are gone before they were read: by retention, with their hub, or beyond a partition's end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import pytest

from eventpump.consumer.reader.reader import HubReader
from eventpump.consumer.record.starts import GroupStart, _HubChangedError
from eventpump.core.lease import LeaseSnapshot
from eventpump.core.starts import LossKind
from eventpump.errors import DataLossError, ServiceTimeoutError, StoreError
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.interfaces import ConsumerScope, PartitionProperties, ReceiveLinkSpec, ReceiveSink
from eventpump.options.consumer import HostSettings, ReaderSettings
from eventpump.reports import DataLost, PartitionFailed, PumpStarted, ServiceFailed
from eventpump.storage.groups import GroupRecords
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from eventpump.storage.scope_form import ScopeRecord
from eventpump.testing.transport import FakeHub, FakeReceiveLink, FakeTransport
from tests.support.fleet import Fleet, stocked


def _record(fleet: Fleet) -> ScopeRecord:
    return fleet.leases.scope_record(fleet.scope)


def _stored(fleet: Fleet, partition_id: str = "0") -> Checkpoint | None:
    return fleet.leases.checkpoints(fleet.scope).get((partition_id, "default"))


async def _read_all(fleet: Fleet, count: int = 20) -> None:
    """Have a first host process and checkpoint so many events of each partition, and end."""
    for partition_id in fleet.hub.partition_ids:
        fleet.hub.publish(partition_id, count=count)
    await fleet.start("first")
    await asyncio.sleep(20)
    await fleet.hosts["first"].aclose()
    for partition_id in fleet.hub.partition_ids:
        assert fleet.checkpoint(partition_id) == count - 1


def _losses(fleet: Fleet, name: str = "a") -> list[tuple[str | None, LossKind, int, int | None, str]]:
    return [
        (each.partition_id, each.loss.kind, each.loss.first_missing, each.loss.last_missing, each.action)
        for each in fleet.reported(name, DataLost)
    ]


# -------------------------------------------------------------------------------------------------- retention, away


@pytest.mark.parametrize(
    ("policy", "numbers"), [(None, [50, 51]), ("earliest", [50, 51]), ("latest", []), ("fail", [])]
)
async def test_data_loss_past_the_checkpoint_is_reported(policy: Any, numbers: list[int]) -> None:
    """The numbers that are gone are named, and what follows goes by `on_data_loss`; by default reading goes on."""
    async with stocked() as fleet:
        await _read_all(fleet)
        fleet.hub.publish("0", count=32)
        fleet.hub.truncate("0", 50)
        await fleet.start("a", on_data_loss=policy)
        await asyncio.sleep(5)
        fleet.hub.publish("0", "new")
        await asyncio.sleep(70)
        action = policy or "earliest"
        losses = _losses(fleet)
        assert set(losses) == {("0", LossKind.RETENTION, 20, 49, action)}
        assert fleet.record.numbers("0", "a") == (numbers if policy == "fail" else [*numbers, 52])
        if policy == "fail":
            assert len(losses) > 1  # it is tried again
            assert fleet.checkpoint("0") == 19
            (error, *_) = [error for _, _, error in fleet.record.errors]
            assert isinstance(error, DataLossError)
            assert (error.first_missing, error.last_missing) == (20, 49)
            assert "on_data_loss" in str(error)
            assert isinstance(fleet.reported("a", PartitionFailed)[0].error, DataLossError)
        else:
            assert len(losses) == 1
            assert fleet.checkpoint("0") == 52
            assert not fleet.reported("a", PartitionFailed)


async def test_data_loss_of_a_whole_partition_is_reported() -> None:
    """A partition that holds nothing any more has lost what was not read."""
    async with stocked() as fleet:
        await _read_all(fleet)
        fleet.hub.publish("0", count=5)
        fleet.hub.truncate("0", 25)
        await fleet.start("a")
        await asyncio.sleep(5)
        assert _losses(fleet) == [("0", LossKind.RETENTION, 20, 24, "earliest")]


async def test_data_loss_after_a_start_at_latest_is_reported() -> None:
    """What came after a start at "@latest" was to be read, also where nothing was ever processed."""
    async with stocked() as fleet:
        await fleet.start("first", initial_position="@latest")
        await asyncio.sleep(5)
        await fleet.hosts["first"].aclose()
        fleet.hub.publish("0", count=10)
        fleet.hub.truncate("0", 4)
        await fleet.start("a")
        await asyncio.sleep(5)
        assert _losses(fleet) == [("0", LossKind.RETENTION, 0, 3, "earliest")]
        assert fleet.record.numbers("0") == list(range(4, 10))


async def test_data_loss_is_not_reported_at_the_start_of_the_stream() -> None:
    """Who begins at the oldest event kept has asked for no older one."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=10)
        fleet.hub.truncate("0", 4)
        await fleet.start("a", on_data_loss="fail")
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == list(range(4, 10))
        assert not _losses(fleet)


# ------------------------------------------------------------------------------------------------ retention, reading


async def _overtake(fleet: Fleet) -> None:
    """Let retention pass a link that is open: of 20 to 39 only 35 to 39 stay."""
    fleet.hub.stall("0")
    fleet.hub.publish("0", count=20)
    fleet.hub.truncate("0", 35)
    fleet.hub.resume("0")


@pytest.mark.parametrize("policy", [None, "earliest", "latest", "fail"])
async def test_data_loss_while_reading_is_reported(policy: Any) -> None:
    """A jump in the numbers is judged before the events after it are delivered."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=20)
        await fleet.start("a", on_data_loss=policy)
        await asyncio.sleep(5)
        await _overtake(fleet)
        await asyncio.sleep(5)
        fleet.hub.publish("0", "new")
        await asyncio.sleep(5)
        assert set(_losses(fleet)) == {("0", LossKind.RETENTION, 20, 34, policy or "earliest")}
        delivered = fleet.record.numbers("0")[20:]
        if policy == "fail":
            assert delivered == []
            assert fleet.checkpoint("0") == 19
            assert isinstance(fleet.record.errors[0][2], DataLossError)
        else:
            assert delivered == ([40] if policy == "latest" else [*range(35, 40), 40])
            assert fleet.checkpoint("0") == 40
            assert not fleet.reported("a", PartitionFailed)


async def test_data_loss_while_a_link_is_gone_is_reported() -> None:
    """The first batch of a link that was opened again shows what went meanwhile."""
    async with stocked(latency=0.1) as fleet:
        fleet.hub.publish("0", count=20)
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.detach()
        fleet.hub.publish("0", count=20)
        fleet.hub.truncate("0", 35)
        await asyncio.sleep(5)
        assert _losses(fleet) == [("0", LossKind.RETENTION, 20, 34, "earliest")]
        assert fleet.record.numbers("0") == [*range(20), *range(35, 40)]


async def test_data_loss_is_not_reported_on_a_compacted_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that compaction left out are no loss, and management is asked about few of them."""
    asked = 0
    ask = FakeHub.partition_properties

    def count(hub: FakeHub, partition_id: str) -> PartitionProperties:
        nonlocal asked
        asked += 1
        return ask(hub, partition_id)

    monkeypatch.setattr(FakeHub, "partition_properties", count)
    async with stocked() as fleet:
        await fleet.start("a", on_data_loss="fail")
        await asyncio.sleep(5)
        for number in range(0, 6000, 3):
            fleet.hub.compact("0", [number, number + 1])
            fleet.hub.publish("0", count=3)
            await asyncio.sleep(0.2)
        assert fleet.record.numbers("0") == list(range(2, 6000, 3))
        assert not _losses(fleet)
        assert asked < 20


async def test_gap_is_judged_when_management_answers() -> None:
    """A service that does not answer holds nothing up by default, and the gap is judged with a later batch."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=20)
        await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.refuse(ServiceTimeoutError("away"), operation="partition", times=1)
        await _overtake(fleet)
        await asyncio.sleep(5)
        assert fleet.record.numbers("0") == [*range(20), *range(35, 40)]
        assert len(fleet.reported("a", ServiceFailed)) == 1
        fleet.hub.publish("0", "new")
        await asyncio.sleep(5)
        assert _losses(fleet) == [("0", LossKind.RETENTION, 20, 34, "earliest")]
        assert fleet.record.numbers("0")[-1] == 40


@pytest.mark.parametrize("answers", [True, False])
async def test_gap_not_judged_yet_is_judged_at_close(answers: bool) -> None:
    """Numbers missing in the last batch are reported before the partition is closed, for no later owner misses them."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=20)
        host = await fleet.start("a")
        await asyncio.sleep(5)
        fleet.hub.refuse(ServiceTimeoutError("away"), operation="partition", times=1 if answers else 2)
        await _overtake(fleet)
        await asyncio.sleep(5)
        assert not _losses(fleet)
        await host.aclose()
        if answers:
            assert _losses(fleet) == [("0", LossKind.RETENTION, 20, 34, "earliest")]
        else:
            assert "missing numbers 20 to 34" in fleet.reported("a", ServiceFailed)[-1].describe()
        assert fleet.checkpoint("0") == 39


# --------------------------------------------------------------------------------------------------- hub made again


@pytest.mark.parametrize("count", [5, 50], ids=["fewer events", "more events"])
@pytest.mark.parametrize("policy", [None, "earliest", "latest", "fail"])
async def test_recreated_hub_is_not_read_at_an_old_position(policy: Any, count: int) -> None:
    """However many events it has: its partitions are left, or reset, as `on_data_loss` says; by default left."""
    async with stocked(partitions=2) as fleet:
        await _read_all(fleet)
        old = fleet.hub.created_at
        fleet.hub.recreate()
        fleet.hub.publish("0", count=count)
        fleet.hub.publish("1", count=count)
        await fleet.start("a", on_data_loss=policy)
        await asyncio.sleep(60)
        for partition_id in "01":
            fleet.hub.publish(partition_id, "new")
        await asyncio.sleep(60)
        action = policy or "fail"
        assert set(_losses(fleet)) == {(each, LossKind.RECREATED, 20, None, action) for each in "01"}
        for partition_id in "01":
            first = {"earliest": 0, "latest": count, "fail": count + 1}[action]
            assert fleet.record.numbers(partition_id, "a") == list(range(first, count + 1))
            assert fleet.checkpoint(partition_id) == (19 if action == "fail" else count)
        record = _record(fleet)
        if action == "fail":
            assert record.hub_created_at == old
            errors = [each.error for each in fleet.reported("a", PartitionFailed, "1")]
            assert len(errors) > 1
            assert all("on_data_loss" in str(error) for error in errors)
        else:
            assert record == ScopeRecord(fleet.hub.created_at, 2, record.starts)
            assert len(_losses(fleet)) == 2


@pytest.mark.parametrize("policy", ["earliest", "latest", "fail"])
async def test_recreated_hub_is_noticed_while_it_is_read(policy: Any) -> None:
    """A link that is opened again asks first whether it is the same hub; the pump goes on in the new one, or fails."""
    async with stocked() as fleet:
        fleet.hub.publish("0", count=20)
        await fleet.start("a", on_data_loss=policy)
        await asyncio.sleep(5)
        fleet.hub.recreate()
        fleet.hub.publish("0", count=30)
        await asyncio.sleep(5)
        fleet.hub.publish("0", "new")
        await asyncio.sleep(5)
        first = {"earliest": 0, "latest": 30, "fail": 31}[policy]
        assert fleet.record.numbers("0") == [*range(20), *range(first, 31)]
        assert _losses(fleet) == [("0", LossKind.RECREATED, 20, None, policy)]
        assert bool(fleet.reported("a", PartitionFailed)) == (policy == "fail")
        assert fleet.checkpoint("0") == (19 if policy == "fail" else 30)


@pytest.mark.parametrize("attach", [1, 2], ids=["first link", "later link"])
async def test_recreated_hub_is_noticed_between_check_and_attach(attach: int) -> None:
    """The link is then one to the new hub, at a position of the old one: it is found out within an interval."""
    async with stocked() as fleet:
        await _read_all(fleet)
        host = fleet.host("a", on_data_loss="earliest")
        transport = fleet.transports["a"]
        opened, open_link = 0, transport.open_receive_link

        async def open_receive_link(spec: ReceiveLinkSpec, sink: ReceiveSink) -> FakeReceiveLink:
            nonlocal opened
            opened += 1
            if opened == attach:
                fleet.hub.recreate()
                fleet.hub.publish("0", count=30)
            return await open_link(spec, sink)

        transport.open_receive_link = open_receive_link  # type: ignore[method-assign]  # the hub acts in between
        fleet.runs["a"] = asyncio.create_task(host.run())
        await asyncio.sleep(30)
        if attach == 2:
            fleet.hub.detach()
        await asyncio.sleep(60)
        assert set(fleet.record.numbers("0", "a")) >= set(range(30))
        assert [kind for _, kind, *_ in _losses(fleet)] == [LossKind.RECREATED]
        assert _record(fleet).hub_created_at == fleet.hub.created_at
        assert fleet.checkpoint("0") == 29


async def test_gap_before_the_hub_was_recreated_is_reported() -> None:
    """Retention passes, and the hub is recreated before its properties are read: what was not processed is reported."""
    async with stocked(latency=0.5) as fleet:
        fleet.hub.publish("0", count=20)
        await fleet.start("a", on_data_loss="earliest")
        await asyncio.sleep(20)
        await _overtake(fleet)
        await asyncio.sleep(0.7)  # the events after the gap have come, and management is being asked
        fleet.hub.recreate()
        fleet.hub.publish("0", count=3)
        await asyncio.sleep(30)
        assert _losses(fleet) == [("0", LossKind.RECREATED, 20, None, "earliest")]
        assert fleet.record.numbers("0") == [*range(20), 0, 1, 2]


async def test_recreated_hub_begins_unread_partitions_as_recorded() -> None:
    """Only what was checkpointed is left: a partition that was never read begins as recorded."""
    async with stocked(partitions=2) as fleet:
        fleet.hub.publish("0", count=20)
        await fleet.start("first")
        await asyncio.sleep(20)
        await fleet.hosts["first"].aclose()
        fleet.hub.recreate()
        fleet.hub.publish("1", count=3)
        await fleet.start("a")
        await asyncio.sleep(10)
        fleet.hub.publish("1", count=3)
        await asyncio.sleep(10)
        assert fleet.record.numbers("1", "a") == list(range(6))
        assert _record(fleet).reset_partitions == {"1"}
        await fleet.hosts["a"].aclose()
        fleet.hub.publish("1", count=3)
        await fleet.start("b")
        await asyncio.sleep(10)
        assert fleet.record.numbers("1", "b") == [6, 7, 8]


@pytest.mark.parametrize("policy", ["earliest", "latest"])
@pytest.mark.parametrize("operation", ["reset", "scope", "record", "list"])
@pytest.mark.parametrize("is_after", [True, False], ids=["answer lost", "not done"])
async def test_host_killed_during_a_reset_loses_and_repeats_nothing(
    policy: Any, operation: str, is_after: bool
) -> None:
    """Wherever it dies, the next host finds the reset noted, or resets again; no new checkpoint is taken back."""
    async with stocked(partitions=2, latency=0.05) as fleet:
        await _read_all(fleet)
        fleet.hub.recreate()
        host = fleet.host("a", on_data_loss=policy)
        # The record is read once at the start, before the partitions are opened; the hub takes its time to answer.
        fleet.runs["a"] = asyncio.create_task(host.run())
        await fleet.until(lambda: ("ensure", None) in fleet.stores["a"].calls, 5, step=0.0001)
        fleet.stores["a"].fail(operation, times=float("inf"), is_after=is_after)
        await asyncio.sleep(30)
        assert fleet.hub.attached[-1].position != EventPosition.at_offset("fake:19")
        assert fleet.record.numbers("0", "a") == []
        fleet.runs["a"].cancel()
        await asyncio.wait({fleet.runs["a"]})
        await fleet.start("b", on_data_loss=policy)
        await asyncio.sleep(60)
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await asyncio.sleep(10)
        await fleet.hosts["b"].aclose()
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=10)
        await fleet.start("c", on_data_loss=policy)
        await asyncio.sleep(60)
        for partition_id in "01":
            assert fleet.record.numbers(partition_id, "b") == list(range(10))
            assert fleet.record.numbers(partition_id, "c") == list(range(10, 20))
        assert _record(fleet).hub_created_at == fleet.hub.created_at
        assert not _losses(fleet, "c")


@pytest.mark.parametrize("operation", ["reset", "scope", "record", "list"])
@pytest.mark.parametrize("is_after", [True, False], ids=["answer lost", "not done"])
async def test_reset_while_the_store_fails_is_reported_once(operation: str, is_after: bool) -> None:
    """It is reported once, with what was lost first, and reading begins at the reset checkpoint."""
    async with stocked(latency=0.05) as fleet:
        await _read_all(fleet)
        fleet.hub.recreate()
        fleet.hub.publish("0", count=30)
        host = fleet.host("a", on_data_loss="earliest")
        fleet.runs["a"] = asyncio.create_task(host.run())
        await fleet.until(lambda: ("ensure", None) in fleet.stores["a"].calls, 5, step=0.0001)
        fleet.stores["a"].fail(operation, times=3, is_after=is_after)
        await asyncio.sleep(60)
        assert fleet.record.numbers("0", "a") == list(range(30))
        assert _losses(fleet) == [("0", LossKind.RECREATED, 20, None, "earliest")]


async def test_reset_by_several_hosts_resets_each_partition_once() -> None:
    """Each partition is reset once, by its owner, and the record takes the new hub at the end."""
    async with stocked(partitions=8) as fleet:
        await _read_all(fleet)
        fleet.hub.recreate()
        for partition_id in fleet.hub.partition_ids:
            fleet.hub.publish(partition_id, count=5)
        for name in "abc":
            await fleet.start(name, on_data_loss="earliest")
        await asyncio.sleep(120)
        resets = [each for name in "abc" for each in _losses(fleet, name)]
        assert sorted(resets, key=str) == [
            (each, LossKind.RECREATED, 20, None, "earliest") for each in fleet.hub.partition_ids
        ]
        assert _record(fleet).hub_created_at == fleet.hub.created_at
        assert _record(fleet).reset_partitions == frozenset()
        for partition_id in fleet.hub.partition_ids:
            assert set(fleet.record.numbers(partition_id)[20:]) == set(range(5))


async def test_hub_recreated_twice_is_reset_twice() -> None:
    """What was reset for the second hub is of no use in the third, although the second reset never ended."""
    async with stocked(partitions=2) as fleet:
        await _read_all(fleet)
        fleet.hub.recreate()
        fleet.hub.publish("0", count=30)
        fleet.host("a", on_data_loss="earliest")
        fleet.stores["a"].fail("reset", "1", times=float("inf"))
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await asyncio.sleep(30)
        assert fleet.record.numbers("0", "a") == list(range(30))
        assert _record(fleet).reset_partitions == {"0"}
        await fleet.hosts["a"].aclose()
        fleet.hub.recreate()
        for partition_id in "01":
            fleet.hub.publish(partition_id, count=40)
        await fleet.start("b", on_data_loss="earliest")
        await asyncio.sleep(60)
        assert _losses(fleet, "b").count(("0", LossKind.RECREATED, 30, None, "earliest")) == 1
        assert _losses(fleet, "b").count(("1", LossKind.RECREATED, 20, None, "earliest")) == 1
        assert [fleet.record.numbers(each, "b") for each in "01"] == [list(range(40))] * 2
        assert _record(fleet).hub_created_at == fleet.hub.created_at


async def test_recreated_hub_with_fewer_partitions_resets_all_checkpoints() -> None:
    """Checkpoints of partitions that are not there are reset too: one that is added later begins at its beginning."""
    async with stocked(partitions=3) as fleet:
        await _read_all(fleet)
        fleet.hub.recreate(partitions=1)
        await fleet.start("a", on_data_loss="latest", initial_position="@latest")
        await asyncio.sleep(120)
        assert _record(fleet).hub_created_at == fleet.hub.created_at
        assert _record(fleet).partition_count == 1
        fleet.hub.add_partitions(1)
        fleet.hub.publish("1", count=30)
        await asyncio.sleep(120)
        assert fleet.record.numbers("1", "a") == list(range(30))


# --------------------------------------------------------------------------------------------------- beyond the end


@pytest.mark.parametrize("policy", [None, "earliest", "latest", "fail"])
async def test_checkpoint_beyond_the_end_is_kept_or_reset_once(policy: Any) -> None:
    """It is left as it is by default, for that partition alone; else it is reset, once."""
    async with stocked(partitions=2) as fleet:
        fleet.hub.publish("0", count=5)
        fleet.hub.publish("1", count=5)
        fleet.leases.checkpoints(fleet.scope)["0", "default"] = Checkpoint("0", "fake:19", 19)
        await fleet.start("a", on_data_loss=policy)
        await asyncio.sleep(5)
        fleet.hub.publish("0", "new")
        await asyncio.sleep(40)
        action = policy or "fail"
        assert fleet.record.numbers("1") == list(range(5))
        assert fleet.record.numbers("0") == {"earliest": list(range(6)), "latest": [5], "fail": []}[action]
        assert fleet.checkpoint("0") == (19 if action == "fail" else 5)
        assert _losses(fleet)[0] == ("0", LossKind.BEYOND_END, 5, 19, action)
        assert (len(_losses(fleet)) == 1) == (action != "fail")


async def test_checkpoint_beyond_an_outdated_answer_is_asked_about_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint just written is not taken for one beyond the end by an older answer."""
    async with stocked() as fleet:
        await _read_all(fleet)
        ask, stale = FakeHub.partition_properties, [True]

        def old(hub: FakeHub, partition_id: str) -> PartitionProperties:
            now = ask(hub, partition_id)
            if not stale:
                return now
            stale.clear()
            return PartitionProperties(now.hub, "0", 0, 11, "fake:11", datetime.min, is_empty=False)

        monkeypatch.setattr(FakeHub, "partition_properties", old)
        await fleet.start("a", on_data_loss="earliest")
        await asyncio.sleep(5)
        assert not stale
        assert not _losses(fleet)
        assert fleet.reported("a", PumpStarted)[0].position == "offset fake:19"


async def test_reset_that_the_store_refuses_writes_nothing() -> None:
    """A host whose lease is gone by then has not reset anything."""
    async with stocked() as fleet:
        fleet.leases.checkpoints(fleet.scope)["0", "default"] = Checkpoint("0", "fake:19", 19)
        fleet.host("a", on_data_loss="earliest")
        fleet.stores["a"].fail("reset", times=1, error=StoreError("reset", "503"))
        fleet.runs["a"] = asyncio.create_task(fleet.hosts["a"].run())
        await fleet.until(lambda: ("reset", "0") in fleet.stores["a"].calls, 10, step=0.001)
        fleet.leases.leases(fleet.scope)["0"].token = "another's"
        await asyncio.sleep(3)
        assert fleet.checkpoint("0") == 19
        assert fleet.hub.attached == []


async def test_reset_record_of_a_newer_hub_survives_an_outdated_update() -> None:
    """A hub recreated while a partition is entered: what others entered for the newer one since stays entered."""
    hub, leases = FakeHub(partitions=3), MemoryLeases()
    settings = HostSettings(hub=hub.name)

    class Store(MemoryLeaseStore):
        between: Callable[[], Awaitable[object]] | None = None

        async def list(self) -> list[LeaseSnapshot]:
            listed, between = await super().list(), self.between
            self.between = None
            if between is not None:
                await between()
            return listed

    async def group(store: MemoryLeaseStore) -> GroupStart:
        scope = ConsumerScope("ns", hub.name, "$Default")
        await store.open(scope)
        await store.ensure(hub.partition_ids)
        made = GroupStart(store, GroupRecords(store, scope), FakeTransport(hub), settings, store_timeout=9.0)
        await made.agree(hub.properties())
        return made

    store = Store(leases)
    one, other = await group(store), await group(MemoryLeaseStore(leases))
    hub.recreate()
    second = hub.created_at

    async def between() -> None:
        hub.recreate()
        await other.enter("1", hub.created_at)
        await one.current()

    store.between = between
    with pytest.raises(_HubChangedError):
        await one.enter("0", second)
    record = (await one.current())[0]
    assert (record.reset_for, record.reset_partitions) == (hub.created_at, frozenset("1"))


# ----------------------------------------------------------------------------------------------------------- reader


def _reader(hub: FakeHub, /, **options: Any) -> HubReader:
    settings = ReaderSettings(**{"hub": hub.name, "partition_id": "0", **options})
    return HubReader(lambda: FakeTransport(hub), settings, rng=random.Random(1))


@pytest.mark.parametrize("policy", [None, "earliest", "latest", "fail"])
async def test_reader_that_retention_passes_warns_or_raises(policy: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It warns and goes on, or raises, and then at every later read too; what it gave before stays given."""
    caplog.set_level(logging.WARNING, "eventpump.consumer")
    hub = FakeHub(partitions=1)
    hub.publish("0", count=20)
    got: list[int] = []
    async with _reader(hub, on_data_loss=policy) as reader:
        while len(got) < 20:
            got += [event.sequence_number for event in await reader.read(7)]
        hub.stall("0")
        hub.publish("0", count=20)
        hub.truncate("0", 35)
        hub.resume("0")
        if policy == "fail":
            for _ in range(2):
                with pytest.raises(DataLossError) as caught:
                    await reader.read(max_wait_time=5)
                assert (caught.value.first_missing, caught.value.last_missing) == (20, 34)
            assert reader.position == EventPosition.at_offset("fake:19")
            return
        expected = [*range(35, 40), 40] if policy != "latest" else [40]
        reading = asyncio.create_task(reader.read(2, max_wait_time=20))
        await asyncio.sleep(1)
        hub.publish("0", "new")
        more = [event.sequence_number for event in await reading]
        while len(more) < len(expected):
            more += [event.sequence_number for event in await reader.read(2, max_wait_time=20)]
        assert more == expected
        assert "sequence numbers 20 to 34 are gone" in caplog.text


async def test_read_cancelled_while_a_gap_is_judged_loses_nothing() -> None:
    """The events behind the gap are given by the next read."""
    hub = FakeHub(partitions=1)
    hub.publish("0", count=5)
    hub.compact("0", [1, 2])
    async with _reader(hub, on_data_loss="fail") as reader:
        hub.hang("partition")
        reading = asyncio.create_task(reader.read())
        await asyncio.sleep(1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await reader.read(max_wait_time=3) == []
        hub.answer("partition")
        assert [event.sequence_number for event in await reader.read()] == [0, 3, 4]


async def test_read_of_a_range_whose_rest_is_lost_fails_every_time() -> None:
    """With "fail", no later read takes the end of what is kept for the end of the range."""
    hub = FakeHub(partitions=1)
    hub.publish("0", count=20)
    async with _reader(hub, end=19, on_data_loss="fail", prefetch_events=10) as reader:
        got = [event.sequence_number for event in await reader.read(5)]
        hub.stall("0")
        while len(got) < 10:
            got += [event.sequence_number for event in await reader.read(5)]
        hub.truncate("0", 20)
        for _ in range(2):
            with pytest.raises(DataLossError) as caught:
                await reader.read()
            assert (caught.value.first_missing, caught.value.last_missing) == (10, 19)


async def test_short_reads_pass_a_gap_that_is_not_judged_yet(caplog: pytest.LogCaptureFixture) -> None:
    """Where management takes longer than a read may, events are given, and the gap is judged by a later answer."""
    caplog.set_level(logging.WARNING, "eventpump.consumer")
    hub = FakeHub(partitions=1)
    hub.publish("0", count=5)
    async with _reader(hub) as reader:
        assert len(await reader.read()) == 5
        hub.stall("0")
        hub.publish("0", count=5)
        hub.truncate("0", 8)
        hub.resume("0")
        hub.hang("partition")
        got = [event.sequence_number for _ in range(50) for event in await reader.read(max_wait_time=0.1)]
        assert got == [8, 9]
        hub.answer("partition")
        hub.publish("0", "new")
        assert [event.sequence_number for event in await reader.read(max_wait_time=5)] == [10]
        assert "sequence numbers 5 to 7 are gone" in caplog.text


@pytest.mark.parametrize("policy", [None, "earliest", "latest", "fail"])
async def test_reader_of_a_recreated_hub_raises_or_restarts(policy: Any) -> None:
    """It does not go on at an old position: it raises, or starts over, as configured."""
    hub = FakeHub(partitions=1)
    hub.publish("0", count=20)
    async with _reader(hub, on_data_loss=policy) as reader:
        assert len(await reader.read()) == 20
        hub.recreate()
        hub.publish("0", count=30)
        if policy in {None, "fail"}:
            with pytest.raises(DataLossError, match="recreated"):
                await reader.read(max_wait_time=20)
            return
        await asyncio.sleep(2)
        hub.publish("0", "new")
        got = [event.sequence_number for event in await reader.read(max_wait_time=20)]
        while got[-1] < 30:
            got += [event.sequence_number for event in await reader.read(max_wait_time=20)]
        assert got == (list(range(31)) if policy == "earliest" else [30])
