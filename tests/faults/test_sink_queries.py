"""A query with three idempotent sinks, over sockets, without Spark: what its function and its operators do wrong.

Each run of the query may return other rows for the batch that it repeats, as after a deploy or without determinism, and
its rows may end in an error. The function skips batches without rows, ends anywhere, calls a sink twice for a batch,
one after the other or by two threads, calls it for the batch before, or goes on without the error of a call; an older
copy of the ledger is restored.

Whatever follows, no row is stored twice, and a batch has the rows of the run that planned it, all of them where it is
done; what cannot go on is an error.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from eventpump import ConfigurationError, Emulator, StoreError
from eventpump.spark.sink.calls import BatchCalls
from eventpump.spark.sink.protocol import DriverRun
from eventpump.spark.sink.records import Plan
from tests.faults.programs import stored
from tests.faults.sinking import PARTITIONS, KilledError, Query, query_of

SINKS = {"a": ("a", None), "b": ("b", None), "c": ("a", "part")}
"""The sinks' ids and parts."""
BATCHES = 4


class FrameError(Exception):
    """The rows of a frame ended in an error."""


def _share_of(shares: dict[str, list[str]], broken_at: str | None, _: int, partition_id: str) -> list[str]:
    if partition_id == broken_at:
        raise FrameError
    return shares[partition_id]


class History:
    """One query, its two sinks, and what they must have stored.

    Args:
        place: Where the ledger is.

    Attributes:
        planned: The rows of batches that have a plan, by sink and batch; of those that are skipped, none.
        done: The batches that are done.
        refused: What was refused, and why.
        swallowed: The calls whose errors were not raised.
        missing: The batch of the newest of these in this run, by sink.
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
        self.threads = {batch for batch in range(BATCHES) if rng.random() < 0.1}
        self.before = {batch for batch in range(1, BATCHES) if rng.random() < 0.1}
        self.broken = {(sink, batch) for sink in SINKS for batch in range(BATCHES) if rng.random() < 0.1}
        self.swallows = rng.random() < 0.4
        self.swallowed: set[tuple[str, int]] = set()
        self.missing: dict[str, int] = {}
        self.is_begun_without_rows = False

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
        self.missing = {}
        self.version += rng.random() < 0.4
        async with AsyncExitStack() as stack:
            for sink in SINKS:
                opened = query_of(
                    self.emulator.connection_string,
                    self.place / "ledger",
                    sink_id=SINKS[sink][0],
                    part=SINKS[sink][1],
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
                    try:
                        is_called = await self.call(query, sink, batch_id)
                    except (ConfigurationError, StoreError, FrameError) as error:
                        if not self.swallows or rng.random() < 0.5:
                            raise
                        self.refused.append(f"swallowed: {error}")
                        self.swallowed.add((sink, batch_id))
                        self.missing[sink] = batch_id
                    else:
                        assert not (is_called and sink in self.missing), "rows are missing, and a call is not refused"
                    if rng.random() < 0.1:
                        raise KilledError
                self.committed += 1
                may_repeat = False
                if rng.random() < 0.4:
                    self.copy()

    def frame(self, query: Query, sink: str, batch_id: int, half: int | None) -> Query:
        """Return the query of a call, with the rows that it publishes."""
        shares = {each: self.rows(sink, batch_id, each, half) for each in PARTITIONS}
        is_broken = (sink, batch_id) in self.broken
        self.broken.discard((sink, batch_id))
        broken_at = self.rng.choice(PARTITIONS) if is_broken else None
        on_plan = partial(self.planned.__setitem__, (sink, batch_id), shares)
        return replace(query, shares=partial(_share_of, shares, broken_at), on_plan=on_plan)

    async def call(self, query: Query, sink: str, batch_id: int) -> bool:
        """Call a sink with a batch, unless it has no rows, as the function of a user does.

        Returns:
            Whether it was called.
        """
        if not any(self.rows(sink, batch_id, each) for each in PARTITIONS):
            self.is_begun_without_rows |= (sink, batch_id) in self.planned.keys() - self.done
            return False
        if batch_id in self.threads:
            self.threads.discard(batch_id)  # the function is mended
            both = [self.frame(query, sink, batch_id, half).run(batch_id) for half in (0, 1)]
            found = await asyncio.gather(*both, return_exceptions=True)
            errors = [each for each in found if isinstance(each, BaseException)]
            assert errors, "rows of a second call would be lost"
            raise errors[0]
        if batch_id in self.before:
            self.before.discard(batch_id)
            shares = {each: [f"{row} before" for row in self.rows(sink, batch_id, each)] for each in PARTITIONS}
            on_plan = partial(self.planned.__setitem__, (sink, batch_id - 1), shares)
            await replace(query, shares=partial(_share_of, shares, None), on_plan=on_plan).run(batch_id - 1)
            if self.missing.get(sink) == batch_id - 1:
                del self.missing[sink]  # that was the call again
        for half in [0, 1] if batch_id in self.twice else [None]:
            query = self.frame(query, sink, batch_id, half)
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
        return True

    async def a_part(self, query: Query, batch_id: int) -> None:
        """Publish a part of the batch and die."""
        with query.calls.call(query.sink, query.driver.run_id, batch_id):
            step = await query.begin(batch_id, is_small=self.rng.random() < 0.5)
            if isinstance(step, Plan):
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

    def is_final(self, error: str) -> bool:
        """Whether an error says that rows may be missing, because the function did not raise an error, or did not call
        again for a batch that was begun and is without rows now."""
        is_missing = bool(self.swallowed) or self.is_begun_without_rows
        return is_missing and ("not finished it" in error or "has no record of batch" in error)

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


@pytest.mark.timeout(900)
async def test_sinks_of_a_query_lose_mix_and_double_no_rows_in_random_histories(
    emulator: Emulator, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """*No loss and no duplicate*: rows of two runs are not mixed, and what would lose or double them is refused."""
    is_long = request.config.getoption("--long")
    refused: list[str] = []
    swallowed = 0
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
            except FrameError:
                pass
            except (ConfigurationError, StoreError) as error:
                history.refused.append(str(error))
                if history.is_restored or history.is_final(str(error)):
                    break
            await history.check()
            if history.committed == BATCHES:
                break
            if history.copies and rng.random() < 0.2:
                history.restore()
        await history.check()
        is_stopped = history.is_restored or (bool(history.refused) and history.is_final(history.refused[-1]))
        assert history.committed == BATCHES or is_stopped, (seed, history.refused[-3:])
        swallowed += len(history.swallowed)
        refused += history.refused
    reasons = ["a second time", "is behind the hub", "and its error was not raised: rows of that batch"]
    assert all(any(each in error for error in refused) for each in reasons if is_long), refused
    assert swallowed or not is_long
