"""How sides are run in turn, and how the best of the peer's configurations is found. No process is started."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from benchmarks.comparing import ATTEMPTS, OURS, OURS_ON_UVLOOP, Figures, compare, run_rounds, shown
from benchmarks.peers import Configuration, best_of_each_client, others, receivers, try_all
from benchmarks.processes import BenchmarkError
from benchmarks.receiving import CONDITIONS, HEADLINE, QUICK_CONDITIONS
from eventpump.reports import build_info

PEER = "another"


def figures(cost: float, busy: float = 1.0, faults: float = 0.0) -> Figures:
    """Make a run's figures."""
    return {"cost": cost, "busy": busy, "rate": 1e6 / cost, "faults": faults}


class Script:
    """Runs of a side, one after the other; their order over all sides is kept in a list."""

    def __init__(self, name: str, runs: Iterable[Figures], order: list[str]) -> None:
        self._name = name
        self._runs = iter(runs)
        self._order = order

    def __call__(self) -> Figures:
        self._order.append(self._name)
        return next(self._runs)


def ignore(_: str, __: Figures) -> None:
    """Log nothing."""


def test_compare_runs_the_sides_in_turns() -> None:
    """In each round every side runs once, so that a slow spell meets all."""
    order: list[str] = []
    sides = {name: Script(name, [figures(1.0)] * 3, order) for name in (OURS, PEER)}
    assert len(run_rounds(3, sides, ignore)) == 3
    assert order == [OURS, PEER] * 3


def test_compare_repeats_a_void_run_at_once() -> None:
    """A side that must be busy and was not runs again before the other; the run that counts is kept."""
    order: list[str] = []
    ours = Script(OURS, [figures(9.0, 0.5), figures(8.0, 0.89), figures(2.0, 0.9), figures(3.0)], order)
    theirs = Script(PEER, [figures(20.0, 0.1)] * 2, order)
    rounds = run_rounds(2, {OURS: ours, PEER: theirs}, ignore, must_be_busy=[OURS])
    assert order == [OURS] * 3 + [PEER, OURS, PEER]
    assert [found[OURS]["cost"] for found in rounds] == [2.0, 3.0]


def test_compare_leaves_out_a_void_round_unless_all_are() -> None:
    """One void round does not spoil a row; where all are void, the row says so."""
    void = [figures(9.0, 0.2 + number / 10) for number in range(ATTEMPTS)]

    def run(runs: list[Figures]) -> list[float]:
        rounds = run_rounds(2, {OURS: Script(OURS, runs, []), PEER: lambda: figures(20.0)}, ignore, must_be_busy=[OURS])
        row = compare("a row", rounds, OURS, PEER, must_be_busy=True)
        assert row.is_void is (len(runs) == 2 * ATTEMPTS)
        return [found[OURS]["busy"] for found in rounds]

    assert run([*void, figures(2.0)]) == [1.0]
    assert run([*void, *void]) == [pytest.approx(0.5)] * 2


def test_compare_gives_medians_and_the_ratio_of_each_round() -> None:
    """The ratios pair runs of the same round; the values are each side's middle run."""
    rounds = [
        {OURS: figures(2.0, 0.95, 0.1), PEER: figures(30.0, 0.5, 0.4)},
        {OURS: figures(4.0, 0.93, 0.3), PEER: figures(40.0, 0.6, 0.5)},
        {OURS: figures(3.0, 0.94, 0.2), PEER: figures(60.0, 0.7, 0.6)},
    ]
    row = compare("a row", rounds, OURS, PEER, note="seen")
    assert row.ratios == (15.0, 10.0, 20.0)
    assert (row.subject_value, row.peer_value) == (3.0, 40.0)
    assert (row.subject_busy, row.subject_faults, row.peer_faults) == (0.94, 0.2, 0.5)
    assert (row.loop, row.build) == ("asyncio", str(build_info()))
    assert row.note == "333,333/s, peer 25,000/s; seen"


def test_compare_names_uvloop_in_the_row() -> None:
    """The loop is that of our side."""
    rounds = [{OURS_ON_UVLOOP: figures(2.0), PEER: figures(30.0)}]
    assert compare("a row", rounds, OURS_ON_UVLOOP, PEER).loop == "uvloop"


COSTS: Mapping[Configuration, float | None] = {
    Configuration("sync", (("prefetch", 300),)): 41.0,
    Configuration("sync", (("prefetch", 3000),)): 39.0,
    Configuration("aio", (("prefetch", 300),)): 70.0,
    Configuration("aio on uvloop", (("prefetch", 300),)): None,
}


def run_cost(configuration: Configuration) -> Figures:
    """Return a configuration's figures, or fail where it has none."""
    cost = COSTS[configuration]
    if cost is None:
        raise BenchmarkError("it is broken")
    return figures(cost)


def test_best_configuration_is_the_cheapest_that_runs() -> None:
    """What is compared with is the cheapest; one that does not run is logged, and does not end the benchmark."""
    lines: list[str] = []
    tried = try_all(COSTS, run_cost, lines.append, shown)
    assert [each.name for each in tried] == ["sync, prefetch 3000", "sync, prefetch 300", "aio, prefetch 300"]
    assert [each.name for each in best_of_each_client(tried)] == ["sync, prefetch 3000", "aio, prefetch 300"]
    assert "left out: it is broken" in lines[-1]
    assert others(tried).startswith("of 3 configurations tried")
    assert "in µs of CPU per event: sync, prefetch 3000 " in others(tried)


def test_others_shows_the_figure_that_decided() -> None:
    """A benchmark of latency compares by the median, and says that and not what the CPU took."""
    found = {Configuration("sync"): {"cost": 300.0, "p50": 1.25}, Configuration("aio"): {"cost": 200.0, "p50": 2.5}}
    assert others(found, "p50").endswith("in ms at the median: sync 1.2, aio 2.5")


def test_best_configuration_raises_where_none_runs() -> None:
    """Without a peer there is no row."""
    broken = [configuration for configuration, cost in COSTS.items() if cost is None]
    with pytest.raises(BenchmarkError, match="it is broken"):
        try_all(broken, run_cost, lambda _: None, shown)


def test_receive_benchmark_tries_every_client_and_option() -> None:
    """Sync and aio, each with both prefetches and both batch sizes."""
    names = [each.name for each in receivers()]
    assert len(names) == len(set(names))
    for client in ("sync", "aio"):
        for prefetch in (300, 3000):
            for batch in (300, 3000):
                assert f"{client}, prefetch {prefetch}, max_batch_size {batch}" in names


def test_receive_benchmark_varies_the_headline_over_tls() -> None:
    """Later conditions try the best of each client as the headline found them."""
    assert (HEADLINE.kind, HEADLINE.is_tls, HEADLINE.partitions) == ("telemetry", True, 4)
    assert set(QUICK_CONDITIONS) <= set(CONDITIONS)
    assert HEADLINE not in CONDITIONS
    assert len({each.name for each in CONDITIONS}) == len(CONDITIONS)
    assert {each.partitions for each in CONDITIONS} == {1, 4, 32, 256}
