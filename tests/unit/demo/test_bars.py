"""The verdict of Spark's demo: each promise it speaks of can be seen broken."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from eventpump.demo.bars import Bar, BarsVerdict, ExpectedBars, KilledBatch, judge_bars
from eventpump.demo.market import trades

BARS = [Bar("A", start, 1.0, 2.0, 0.5, 1.5, 10, 2, 1500) for start in (0, 1000, 2000)]
EXPECTED = {bar.key: bar for bar in BARS}


def judged(*bars: Bar, more: tuple[Bar, ...] = ()) -> BarsVerdict:
    return judge_bars(6, EXPECTED, {"0": bars, "1": more})


def test_verdict_holds_with_every_bar_once_in_order() -> None:
    """Every bar once, in order per partition; partitions have no order among them."""
    verdict = judged(BARS[0], BARS[2], more=(BARS[1],))
    assert verdict.holds
    assert (verdict.expected, verdict.stored) == (3, 3)
    assert "exactly once, in order" in verdict.judgement()


@pytest.mark.parametrize(
    ("stored", "broken"),
    [
        ((BARS[0], BARS[2]), "lost"),
        ((BARS[0], BARS[0], BARS[1], BARS[2]), "duplicates"),
        ((BARS[1], BARS[0], BARS[2]), "disorder"),
        ((BARS[0], replace(BARS[1], volume=9), BARS[2]), "wrong"),
        ((*BARS, replace(BARS[2], start=3000)), "wrong"),
    ],
)
def test_verdict_fails_for_each_broken_promise(stored: tuple[Bar, ...], broken: str) -> None:
    """One figure shows it, the others stay at nothing, and the verdict does not hold."""
    verdict = judged(*stored)
    figures = {name: getattr(verdict, name) for name in ("lost", "duplicates", "disorder", "wrong")}
    assert figures == {name: int(name == broken) for name in figures}
    assert not verdict.holds
    assert verdict.judgement().startswith("1 bars ")


def test_duplicate_bar_in_another_partition_is_counted() -> None:
    """Bars are counted over the whole hub."""
    assert judged(*BARS, more=(BARS[1],)).duplicates == 1


def test_lost_bar_is_counted_beside_a_duplicate() -> None:
    """The totals may be right while the bars are not."""
    verdict = judged(BARS[0], BARS[1], BARS[1])
    assert (verdict.stored, verdict.lost, verdict.duplicates) == (3, 1, 1)


def test_expected_bars_do_not_depend_on_the_order_of_trades() -> None:
    """First and last trade of a window are known by their numbers."""
    bodies = [trade.encode() for trade in itertools.islice(trades(7), 2000)]
    in_order, shuffled = ExpectedBars(50), ExpectedBars(50)
    in_order.add(bodies)
    random.Random(3).shuffle(bodies)
    shuffled.add(bodies)
    assert in_order.bars == shuffled.bars
    assert in_order.last_time == shuffled.last_time
    assert sum(bar.trades for bar in in_order.bars.values()) == 2000
    assert all(bar.start % 50 == 0 and bar.low <= bar.open <= bar.high for bar in in_order.bars.values())


def test_bar_of_another_shape_raises_value_error() -> None:
    """A body of another shape is an error of value."""
    with pytest.raises(ValueError, match="no bar"):
        Bar.decode(b'{"symbol": "A"}')


@pytest.mark.parametrize("end_comes_first", [True, False])
def test_killed_batch_is_counted_whatever_is_reported_first(end_comes_first: bool) -> None:
    """Spark reports that a batch ended before or after it reports that the next one began."""
    cut = KilledBatch()
    cut.batch_began(0, 0)
    cut.batch_began(1, 10)
    cut.killed(1)
    assert cut.bars() is None
    cut.batch_began(2, 12)  # read from the pipe after the kill
    cut.killed_spark_ended(14)
    assert (cut.number, cut.bars()) == (1, (4, 0))
    cut.batch_began(1, 14)
    reports: list[Callable[[], None]] = [lambda: cut.batch_ended(1, 17), lambda: cut.batch_began(2, 17)]
    for report in reports if end_comes_first else reversed(reports):
        report()
    assert cut.bars() == (4, 3)
    cut.batch_ended(2, 30)
    assert cut.bars() == (4, 3)
