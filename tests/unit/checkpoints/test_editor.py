"""Plans and writes over a hub in memory and a store of the user's own, while a fleet works and the store fails."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from eventpump.checkpoints import ChangeAction, CheckpointEditor, CheckpointExport
from eventpump.checkpoints.plan import Start, position_of
from eventpump.errors import ConfigurationError, ConsumerDisconnectedError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.lag import GroupCheckpoints, StoredCheckpoint
from eventpump.testing.clock import VirtualClock
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.seeds import seeds

PARTITIONS = tuple(map(str, range(12)))


@dataclass
class Table:
    """Checkpoints and owners in a table, as a user's own store may have them.

    Attributes:
        writes: What was there before each write, by partition, since it was emptied.
        failures: By partition, what the next write raises.
        delay: Seconds that a write takes.
        file: What has to be there before a write.
    """

    rows: dict[str, StoredCheckpoint] = field(default_factory=dict)
    writes: dict[str, StoredCheckpoint | None] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    delay: float = 0.0
    file: Path | None = None
    format: str = "table"

    async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
        await asyncio.sleep(self.delay)
        return GroupCheckpoints(dict(self.rows))

    async def check(
        self, scope: ConsumerScope, partition_ids: Sequence[str], hub_created_at: datetime
    ) -> Mapping[str, str]:
        return {}

    async def begin(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> None:
        assert self.file is None or self.file.exists()

    async def write(
        self, partition_id: str, before: StoredCheckpoint | None, after: Checkpoint | None, *, from_owner: bool
    ) -> str | None:
        await asyncio.sleep(self.delay)
        if partition_id in self.failures:
            raise self.failures.pop(partition_id)
        now = self.rows.get(partition_id)
        if now != before:
            return "it has changed"
        self.writes[partition_id] = now
        self.put(partition_id, after, None if now is None else now.owner, is_owned=bool(now and now.is_owned))
        return None

    def put(
        self, partition_id: str, place: Checkpoint | None, owner: str | None = None, *, is_owned: bool = False
    ) -> None:
        """Store a row."""
        row = StoredCheckpoint(partition_id, self.format, "row", owner=owner, is_owned=is_owned)
        if place is not None:
            row = replace(row, sequence_number=place.sequence_number, offset=place.offset)
        self.rows[partition_id] = row

    async def aclose(self) -> None:
        pass

    def positions(self) -> dict[str, tuple[int | None, str | None]]:
        """Return the checkpoints that there are."""
        return {each: (row.sequence_number, row.offset) for each, row in self.rows.items() if row.is_usable}


@asynccontextmanager
async def editing(hub: FakeHub, table: Table, clock: VirtualClock) -> AsyncIterator[CheckpointEditor]:
    editor = CheckpointEditor(
        hub="telemetry", transport=FakeTransport(hub), checkpoints=table, clock=clock, rate=1000.0
    )
    async with editor:
        yield editor


def saved(file: Path) -> CheckpointExport:
    """Read a file that was written before."""
    return CheckpointExport.decode(file.read_bytes(), file.name)


def filled(count: int = 5) -> FakeHub:
    """Return a hub with events in each partition."""
    hub = FakeHub(partitions=len(PARTITIONS))
    for partition_id in PARTITIONS:
        hub.publish(partition_id, count=count)
    return hub


@seeds(20, of=500)
async def test_history_of_plans_beside_a_fleet_loses_nothing(seed: int, clock: VirtualClock, tmp_path: Path) -> None:
    """No partition is written that is owned, or that moved since the plan; what is written is in the file before.

    Once the fleet has stopped, the files take each of the writes back, the last one first.
    """
    rng, hub, table = random.Random(seed), filled(), Table(delay=0.01)
    table.put("0", None)

    def work() -> None:
        """Let an owner come or go, a checkpoint be stored, or an event arrive."""
        partition_id = rng.choice(PARTITIONS)
        row = table.rows.get(partition_id)
        place = None
        if row is not None and row.sequence_number is not None and row.offset is not None:
            place = Checkpoint(partition_id, row.offset, row.sequence_number)
        match rng.randrange(5):
            case 0:
                table.put(partition_id, place, "host-a", is_owned=True)
            case 1 | 2:
                table.put(partition_id, place)
            case 3:
                number = rng.randint(0, hub.partition_properties(partition_id).last_enqueued_sequence_number)
                table.put(partition_id, Checkpoint(partition_id, f"of the fleet {number}", number))
            case 4:
                hub.publish(partition_id, count=1)

    async with editing(hub, table, clock) as editor:
        for turn in range(rng.randint(2, 6)):
            for _ in range(rng.randrange(8)):
                work()
            to: Start = rng.choice(["earliest", "latest", rng.randrange(8)])
            selected = None if rng.random() < 0.5 else rng.sample(PARTITIONS, 5)
            plan = await editor.plan_reset(to, partitions=selected)
            for _ in range(rng.randrange(4)):
                work()
            for each in rng.sample(PARTITIONS, rng.randrange(3)):
                table.failures[each] = rng.choice([KeyError("a bug"), StoreError("write", "away")])
            table.writes.clear()
            table.file = tmp_path / f"{turn}.json"
            outcome = await editor.apply(plan, export_to=table.file)
            table.failures.clear()
            assert {*outcome.written, *outcome.refused, *outcome.failed, *outcome.left} == {
                each.partition_id for each in plan.changes if each.action is not ChangeAction.KEEP
            }
            assert set(outcome.written) == set(table.writes)
            assert not any(row is not None and row.is_owned for row in table.writes.values())
            planned = {each.partition_id: position_of(each.before) for each in plan.changes}
            assert {each: position_of(row) for each, row in table.writes.items()} == {
                each: planned[each] for each in outcome.written
            }
            assert outcome.export is not None or not outcome.written
            if outcome.export is not None:
                await _check_undo(editor, table, outcome.written, table.file)
                again = await editor.apply(plan, export_to=tmp_path / f"{turn}-again.json")
                assert set(again.written) <= set(outcome.written) | set(outcome.failed) | set(outcome.left)


async def _check_undo(editor: CheckpointEditor, table: Table, written: Sequence[str], file: Path) -> None:
    """Check that a file takes back what was written, and nothing else."""
    export = saved(file)
    former = {each: (row.sequence_number, row.offset) for each, row in table.writes.items() if row and row.is_usable}
    after = table.positions()
    undone = await editor.apply(await editor.plan_import(export), export_to=file.with_suffix(".undo"))
    assert set(undone.written) <= set(written)
    assert table.positions() == {
        **{each: place for each, place in after.items() if each not in written},
        **former,
    }


async def test_no_write_begins_after_a_failure(clock: VirtualClock, tmp_path: Path) -> None:
    """Those that were begun before are completed; the others are named."""
    table = Table(delay=1.0, failures={"3": StoreError("write checkpoint", "it is away")})
    async with editing(filled(), table, clock) as editor:
        plan = await editor.plan_reset("latest", is_new=True)
        outcome = await editor.apply(plan, export_to=tmp_path / "before.json")
    assert outcome.written == ["0", "1", "2", "4", "5", "6", "7"]
    assert list(outcome.failed) == ["3"]
    assert outcome.left == ("8", "9", "10", "11")


async def test_cancelled_in_the_middle_the_file_is_there(clock: VirtualClock, tmp_path: Path) -> None:
    """And it has what was there before."""
    table, file = Table(delay=1.0), tmp_path / "before.json"
    async with editing(filled(), table, clock) as editor:
        plan = await editor.plan_reset("latest", is_new=True)
        table.file = file
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await editor.apply(plan, export_to=file)
        assert len(table.writes) == 8
        undone = await editor.apply(await editor.plan_import(saved(file)), export_to=tmp_path / "undo.json")
        assert undone.is_complete
    assert table.positions() == {}


async def test_recreated_hub_is_not_written_by_an_old_plan(clock: VirtualClock, tmp_path: Path) -> None:
    """Its numbers mean other events."""
    hub, table = filled(), Table()
    async with editing(hub, table, clock) as editor:
        plan = await editor.plan_reset("latest", is_new=True)
        hub.created_at += timedelta(days=1)
        with pytest.raises(ConfigurationError, match="was recreated since the plan was made"):
            await editor.apply(plan, export_to=tmp_path / "before.json")
    assert table.writes == {}


async def test_plan_of_another_store_is_refused(clock: VirtualClock, tmp_path: Path) -> None:
    """What it found there is not what is here."""
    hub, table = filled(), Table()
    async with editing(hub, table, clock) as editor, editing(hub, Table(format="other"), clock) as other:
        plan = await other.plan_reset("latest", is_new=True)
        for wrong in (plan, replace(plan, format="table", scope=replace(plan.scope, consumer_group="second"))):
            with pytest.raises(ConfigurationError, match="plan: is of another group or store"):
                await editor.apply(wrong, export_to=tmp_path / "before.json")
    assert table.writes == {}


async def test_event_that_cannot_be_read_refuses_its_partition(clock: VirtualClock) -> None:
    """As where a consumer of the group keeps other readers out; the others are planned."""
    hub, table = filled(), Table()
    hub.refuse(ConsumerDisconnectedError("an owner reads it"), partition_id="3", times=math.inf)
    async with editing(hub, table, clock) as editor:
        plan = await editor.plan_reset(2, partitions=["2", "3"], is_new=True)
    assert [each.action for each in plan.changes] == [ChangeAction.WRITE, ChangeAction.REFUSE]
    assert "could not be read in consumer group $Default: " in (plan.changes[1].reason or "")


@pytest.mark.parametrize("to", ["first", -1, True, datetime(2030, 1, 1), datetime(2999, 1, 1, tzinfo=UTC)])
async def test_start_that_is_none_is_refused(clock: VirtualClock, to: Start) -> None:
    """Before anything is read."""
    async with editing(filled(), Table(), clock) as editor:
        with pytest.raises(ConfigurationError, match=r"^to: "):
            await editor.plan_reset(to)


async def test_reader_cannot_be_written(clock: VirtualClock) -> None:
    """What only reads is refused when a plan is made, and can be exported."""

    class Reading:
        async def read(self, scope: ConsumerScope, partition_ids: Sequence[str]) -> GroupCheckpoints:
            return GroupCheckpoints({"0": StoredCheckpoint("0", "own", "row", 4)})

        async def aclose(self) -> None:
            pass

    editor = CheckpointEditor(hub="telemetry", transport=FakeTransport(filled()), checkpoints=Reading(), clock=clock)
    async with editor:
        with pytest.raises(ConfigurationError, match="can only read"):
            await editor.plan_reset("latest")
        assert (await editor.export(["0"])).format == "own"
