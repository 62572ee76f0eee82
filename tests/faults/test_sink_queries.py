"""A query with two idempotent sinks, over sockets, without Spark: what its function and its operators do wrong.

Each run of the query may return other rows for the batch that it repeats, as after a deploy or without determinism. The
function skips batches without rows, ends anywhere, or calls a sink twice for a batch; an older copy of the ledger is
restored. Whatever follows, no row is stored twice, and a batch has the rows of the run that planned it, all of them
where it is done; what cannot go on is an error.
"""

from __future__ import annotations

import random
import shutil
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest

from eventpump import ConfigurationError, Emulator
from eventpump.spark.sink.calls import BatchCalls
from eventpump.spark.sink.protocol import DriverRun
from eventpump.spark.sink.records import Done, Plan
from tests.faults.programs import stored
from tests.faults.sinking import PARTITIONS, KilledError, Query, query_of

SINKS = ("a", "b")
BATCHES = 4


def _share_of(shares: dict[str, list[str]], _: int, partition_id: str) -> list[str]:
    return shares[partition_id]


class History:
    """One query, its two sinks, and what they must have stored.

    Args:
        place: Where the ledger is.

    Attributes:
        planned: The rows of batches that have a plan, by sink and batch; of those that are skipped, none.
        done: The batches that are done.
        refused: What was refused, and why.
        is_stopped: Whether the query cannot go on, because an older ledger was restored.
    """

    def __init__(self, emulator: Emulator, place: Path, rng: random.Random) -> None:
        self.emulator = emulator
        self.place = place
        self.rng = rng
        self.committed = 0
        self.version = 0
        self.versions: dict[int, int] = {}
        self.planned: dict[tuple[str, int], dict[str, list[str]]] = {}
        self.done: set[tuple[str, int]] = set()
        self.refused: list[str] = []
        self.first = dict.fromkeys(SINKS, 0)
        self.copies: list[tuple[int, Path]] = []
        self.is_restored = self.is_stopped = False
        self.empty = {(sink, batch) for sink in SINKS for batch in range(BATCHES) if rng.random() < 0.3}
        self.twice = {batch for batch in range(BATCHES) if rng.random() < 0.2}

    def rows(self, sink: str, batch_id: int, partition_id: str, half: int | None = None) -> list[str]:
        """Return the rows that the query has for a batch now: all, or those of one call of two."""
        version = self.versions[batch_id]
        rng = random.Random(f"{sink} {batch_id} {partition_id} {version}")
        count = 0 if (sink, batch_id) in self.empty else rng.choice([0, 3, 20])
        name = f"{self.place.name} {sink} {batch_id} {partition_id} {version}"
        return [f"{name} {row}" for row in range(count) if half is None or row % 2 == half]

    async def run(self) -> None:
        """Run the query until it ends or fails."""
        rng = self.rng
        calls = BatchCalls()
        queries: dict[str, Query] = {}
        self.version += rng.random() < 0.4
        async with AsyncExitStack() as stack:
            for sink in SINKS:
                opened = query_of(
                    self.emulator.connection_string,
                    self.place / "ledger",
                    sink_id=sink,
                    calls=calls,
                    driver=DriverRun(f"run {rng.random()}"),
                    paths=lambda: rng.random() < 0.5,
                    first_batch=self.first[sink],
                )
                queries[sink] = await stack.enter_async_context(opened)
            may_repeat = True
            while self.committed < BATCHES:
                batch_id = self.committed
                self.versions[batch_id] = self.version
                for sink, query in queries.items():
                    query.may_repeat = may_repeat
                    await self.call(query, sink, batch_id)
                    if rng.random() < 0.1:
                        raise KilledError
                self.committed += 1
                may_repeat = False
                if rng.random() < 0.4:
                    self.copy()

    async def call(self, query: Query, sink: str, batch_id: int) -> None:
        """Call a sink with a batch, unless it has no rows, as the function of a user does."""
        halves = [0, 1] if batch_id in self.twice else [None]
        if not any(self.rows(sink, batch_id, each) for each in PARTITIONS):
            self.done.add((sink, batch_id))
            return
        for half in halves:
            shares = {each: self.rows(sink, batch_id, each, half) for each in PARTITIONS}
            query.shares = partial(_share_of, shares)
            query.on_plan = partial(self.planned.__setitem__, (sink, batch_id), shares)
            try:
                if self.rng.random() < 0.3:
                    await self.a_part(query, batch_id)
                done = await query.run(batch_id)
            except ConfigurationError as error:
                if "set first_batch" in str(error) and not self.is_restored:
                    assert not any(
                        (sink, each) in self.done for each in range(batch_id) if (sink, each) not in self.empty
                    )
                    self.first[sink] = batch_id  # as it says
                if "a second time" in str(error):
                    self.twice.discard(batch_id)  # the function is mended
                raise
            assert half != 1, "rows of a second call would be lost"
            self.done.add((sink, batch_id))
            assert {each.partition_id: each.count for each in done.receipts} == {
                each: len(rows) for each, rows in self.planned[sink, batch_id].items() if rows
            }

    async def a_part(self, query: Query, batch_id: int) -> None:
        """Publish a part of the batch and die."""
        step = await query.begin(batch_id, is_small=self.rng.random() < 0.5)
        if isinstance(step, Done):
            return
        assert isinstance(step, Plan)
        await query.tasks(step, only=self.rng.sample(PARTITIONS, self.rng.randrange(4)))
        raise KilledError

    def copy(self) -> None:
        """Copy the ledger, as a backup does."""
        target = self.place / f"copy {len(self.copies)}"
        shutil.copytree(self.place / "ledger", target)
        self.copies.append((self.committed, target))

    def restore(self) -> None:
        """Restore an older copy of the ledger, while the query does not run."""
        _, source = self.rng.choice(self.copies)
        shutil.rmtree(self.place / "ledger")
        shutil.copytree(source, self.place / "ledger")
        self.is_restored = True

    async def check(self) -> None:
        """Check that batches that are done have the rows that were planned, and others nothing else."""
        for each in PARTITIONS:
            every = await stored(self.emulator.connection_string, each)
            found = [row for row in every if row.startswith(f"{self.place.name} ")]
            assert len(found) == len(set(found)), "a row is stored twice"
            for sink in SINKS:
                ours = [row for row in found if row.split()[1] == sink]
                shares = [self.planned.get((sink, batch), {}).get(each, []) for batch in range(BATCHES)]
                assert ours == [row for share in shares for row in share][: len(ours)]
                assert len(ours) >= sum(len(shares[batch]) for batch in range(BATCHES) if (sink, batch) in self.done)


@pytest.mark.timeout(300)
async def test_two_sinks_of_a_query_lose_mix_and_double_no_rows_in_random_histories(
    emulator: Emulator, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """*No loss and no duplicate*: rows of two runs are not mixed, and what would lose or double them is refused."""
    is_long = request.config.getoption("--long")
    refused: list[str] = []
    for seed in range(150 if is_long else 5):
        rng = random.Random(seed)
        place = tmp_path / f"q{seed}"
        place.mkdir()
        history = History(emulator, place, rng)
        for _ in range(60):
            try:
                await history.run()
            except KilledError:
                pass
            except ConfigurationError as error:
                history.refused.append(str(error))
                if history.is_restored:
                    break
            await history.check()
            if history.committed == BATCHES:
                break
            if history.copies and rng.random() < 0.2:
                history.restore()
        await history.check()
        assert history.committed == BATCHES or history.is_restored, (seed, history.refused[-3:])
        refused += history.refused
    reasons = ["a second time", "is behind the hub"]
    assert all(any(each in error for error in refused) for each in reasons if is_long), refused
