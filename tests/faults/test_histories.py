"""Random histories: seeds of each kind by the run and by date; with `--long`, hundreds."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.faults.histories.kinds import KINDS, run_history
from tests.faults.histories.world import World, live
from tests.support.seeds import sample, seeds

SMALL = {"consumer:compute": 8}
"""Steps of trouble where the usual number takes too long."""
SHORT, LONG = 1, 60
"""Seeds per kind, of those from 1 on and as many by date: in the gate, and with `--long`."""
MIXED = sorted(kind for kind in KINDS if kind.startswith("mixed:"))
"""The kinds of mixed fleets, which have a test of their own."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A history's trace says all; a log line per report is half of the time it takes."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@seeds(20, of=1000)
def test_histories_of_mixed_fleets_keep_every_promise(seed: int) -> None:
    """Beside members of other SDKs no event is lost, shares become even, and no link is stolen without end."""
    run_history(MIXED[seed % len(MIXED)], seed).require()


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - MIXED))
def test_histories_at_random_keep_every_promise(kind: str, request: pytest.FixtureRequest) -> None:
    """No history made from a seed breaks a promise."""
    today = datetime.date.today().toordinal() * 1000
    is_long = request.config.getoption("--long")
    count = LONG if is_long else SHORT
    chosen = [*sample(range(1, 1 + LONG), count, kind), *range(today, today + count)]
    print(f"{kind}: seeds {chosen}")  # noqa: T201 - shown where it fails, with the date's
    verdicts = [run_history(kind, seed, *([SMALL[kind]] if kind in SMALL else [])) for seed in chosen]
    broken = {verdict.seed: verdict.violation for verdict in verdicts if verdict.violation is not None}
    print(f"{kind}: {broken}")  # noqa: T201 - as above
    for verdict in verdicts:
        verdict.require()


def test_what_a_dead_process_would_have_begun_ends_with_its_history() -> None:
    """No task is left that never began, where a timer of a process came due after its death."""
    begun: list[asyncio.Task[None]] = []

    async def history(world: World, size: int) -> None:
        life = world.life("killed")
        life.context.run(world.loop.call_later, 1.0, lambda: begun.append(world.spawn(life, asyncio.sleep(0), "due")))
        life.kill()
        await world.sleep(2.0)

    live("none", 1, 1, history).require()
    assert [task.done() for task in begun] == [True]


@pytest.mark.parametrize(
    "kind",
    ["consumer:store", "keyed:rewinds-fleet", "mixed:store", "producer:exclusive", "subscribers:all"],
)
def test_history_of_a_seed_is_the_same_in_every_process(kind: str) -> None:
    """A seed that failed somewhere can be lived through again: nothing depends on hashes or addresses."""
    command = [sys.executable, "-m", "tests.faults.histories", kind, "3"]
    traces = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False, timeout=60
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(traces[0]) > 1000
    assert traces[0] == traces[1]
