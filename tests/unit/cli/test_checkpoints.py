"""What `eventpump checkpoints` shows of a plan and of its outcome."""

from __future__ import annotations

import argparse
import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eventpump.checkpoints import ChangeAction, CheckpointChange, CheckpointOutcome, CheckpointPlan
from eventpump.cli.checkpoints import carry_out, failures, lines, outcome_lines, plan_lines
from eventpump.errors import StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.lag import GroupCheckpoints, StoredCheckpoint
from eventpump.testing.clock import VirtualClock
from tests.unit.checkpoints.test_editor import PARTITIONS, Table, editing, filled, saved

SCOPE = ConsumerScope("a.servicebus.windows.net", "telemetry", "$Default")
CREATED = datetime(2030, 1, 1, tzinfo=UTC)
LONG = "a.servicebus.windows.net/telemetry/$default/checkpoint/3: its number is 'x'; delete it if no consumer needs it"


def stored(partition_id: str, number: int | None, offset: str | None) -> StoredCheckpoint:
    """Return a checkpoint that an owner has."""
    return StoredCheckpoint(partition_id, "v5", "blob", number, offset, owner="host-a", is_owned=True)


def change(
    partition_id: str, before: StoredCheckpoint | None, after: Checkpoint | None, reason: str | None = None
) -> CheckpointChange:
    """Return a change that is written, or refused for a reason."""
    action = ChangeAction.WRITE if reason is None else ChangeAction.REFUSE
    return CheckpointChange(partition_id, before, after, action, reason)


OWNED = [
    change(str(each), stored(str(each), 5, "5"), Checkpoint(str(each), "9", 9), "host-a owns it")
    for each in range(4, 12)
]
PLAN = CheckpointPlan(
    SCOPE,
    CREATED,
    "v5",
    [
        change("0", stored("0", 1_204, "88"), Checkpoint("0", "-1", -1)),
        change("1", None, Checkpoint("1", "99", 1_500)),
        change("2", stored("2", None, "4711"), None),
        change("3", None, None, LONG),
        *OWNED,
    ],
    ("AccountKey=c2VjcmV0",),
)


def test_plan_is_a_table_with_a_line_for_each_reason() -> None:
    """Positions without a number, the start of a partition and no checkpoint are words; no secret is shown."""
    shown = plan_lines(PLAN, None)
    assert shown[0] == "hub telemetry, consumer group $Default: 3 to write, 9 refused"
    assert [line.split() for line in shown[2:7]] == [
        ["partition", "from", "to", "events", "result"],
        ["0", "1,204", "start", "1,205", "again", "write"],
        ["1", "none", "1,500", "write"],
        ["2", "offset", "4711", "none", "write"],
        ["3", "none", "?", "refused"],
    ]
    assert shown[-4:] == [
        f"partition 3 refused: {LONG}",
        "partitions 4 to 11 refused: host-a owns it",
        "AccountKey=***",
        "Nothing is written without --yes.",
    ]


def test_notes_fit_the_terminal() -> None:
    """They are broken between words, and indented."""
    shown = plan_lines(PLAN, 80)
    assert max(map(len, shown)) <= 80
    assert f"partition 3 refused: {LONG}" in " ".join(line.strip() for line in shown)


def test_outcome_names_the_file_and_what_was_refused_since() -> None:
    """What the plan had refused already is not shown again."""
    refused = {each.partition_id: each.reason or "" for each in PLAN.having(ChangeAction.REFUSE)}
    outcome = CheckpointOutcome("before.json", ("0", "1"), {**refused, "2": "host-b owns it"})
    assert outcome_lines(PLAN, outcome, None) == [
        "",
        "partition 2 refused: host-b owns it",
        "2 checkpoints written. What was there before is in before.json.",
    ]
    assert outcome_lines(PLAN, CheckpointOutcome(None, (), refused), None) == []
    assert "c2VjcmV0" not in str(outcome_lines(PLAN, CheckpointOutcome("AccountKey=c2VjcmV0", ("0",)), None))


def test_failure_says_how_to_go_on() -> None:
    """The file, and what to do with it."""
    problem = str(StoreError("write checkpoint", "it is away", partition_id="1"))
    first, second = failures(CheckpointOutcome("before.json", ("0",), {}, {"1": problem}, ("2", "3")))
    assert first == problem
    assert second == (
        "it may be written or not, and partitions 2, 3 not tried; the same command again writes the rest, and "
        "`eventpump checkpoints import before.json --yes` with the same store and group restores what was there before"
    )
    assert failures(CheckpointOutcome("before.json", ("0",))) == []


def test_list_has_a_line_for_each_partition() -> None:
    """Of a checkpoint that cannot be used the notes say why."""
    broken = StoredCheckpoint("2", "v5", "a/checkpoint/2", problem="its sequence number is 'x'")
    found = GroupCheckpoints({"0": stored("0", 7, "88"), "2": broken}, ("a note",))
    shown = lines(SCOPE, ["0", "1", "2"], found, CREATED)
    assert shown[0] == "hub telemetry, consumer group $Default: 1 checkpoint for 3 partitions"
    assert [line.split() for line in shown[3:6]] == [["0", "7", "88", "host-a"], ["1", "none"], ["2", "none"]]
    assert shown[-2:] == ["a note", "partition 2: a/checkpoint/2: its sequence number is 'x'"]


async def test_interrupted_in_the_middle_it_says_how_to_go_on(
    clock: VirtualClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was there before is in the file that it names."""
    file, table = tmp_path / "before.json", Table(delay=1.0)
    async with editing(filled(), table, clock) as editor:
        plan = await editor.plan_reset("latest", is_new=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await carry_out(argparse.Namespace(yes=True, export=str(file)), editor, plan)
    assert len(table.writes) == 8
    assert saved(file).partitions == dict.fromkeys(PARTITIONS)
    said = capsys.readouterr().err
    assert said.startswith("eventpump: stopped: some checkpoints may be written; the same command again")
    assert f"`eventpump checkpoints import {file} --yes`" in said


async def test_failure_in_the_middle_is_exit_code_1(
    clock: VirtualClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --yes nothing is written, and it is 0."""
    file, table = tmp_path / "before.json", Table(failures={"3": StoreError("write checkpoint", "it is away")})
    async with editing(filled(), table, clock) as editor:
        plan = await editor.plan_reset("latest", is_new=True)
        assert await carry_out(argparse.Namespace(yes=False, export=str(file)), editor, plan) == 0
        assert (table.writes, file.exists()) == ({}, False)
        assert await carry_out(argparse.Namespace(yes=True, export=str(file)), editor, plan) == 1
    out, err = capsys.readouterr()
    assert "Nothing is written without --yes." in out
    assert "eventpump: write checkpoint: it is away\n" in err
    assert f"`eventpump checkpoints import {file} --yes`" in err
