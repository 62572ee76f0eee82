"""Verification of Spark's demo: compares the bars of the published trades with those in the hub of bars. Pure."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)

BarKey = tuple[int, str]
"""Start of the window in milliseconds since the Unix epoch, and symbol: a bar's place in the order of its partition."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The aggregate of a symbol's trades in one window.

    Args:
        start: The start of the window, in milliseconds since the Unix epoch.
        volume: In shares.
        turnover: In cents.
    """

    symbol: str
    start: int
    open: float
    high: float
    low: float
    close: float
    volume: int
    trades: int
    turnover: int

    @property
    def key(self) -> BarKey:
        """The key that identifies it."""
        return self.start, self.symbol

    @classmethod
    def decode(cls, body: bytes) -> Bar:
        """Parse a bar from JSON. Raises `ValueError` if the text is none."""
        try:
            return cls(**json.loads(body))
        except TypeError as error:
            raise ValueError(f"no bar: {error}") from None


class ExpectedBars:
    """The bars of published trades in windows of so many milliseconds, made without Spark."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._bars: dict[BarKey, Bar] = {}
        # Trades arrive symbol by symbol: the first and the last of a window are found by their numbers.
        self._ends: dict[BarKey, tuple[int, int]] = {}
        self.last_time = _EPOCH
        """Of the latest trade."""

    def add(self, bodies: Iterable[bytes]) -> Counter[str]:
        """Add published trades, in any order; return how many trades each symbol has of these."""
        symbols: Counter[str] = Counter()
        for body in bodies:
            trade = json.loads(body)
            symbols[trade["symbol"]] += 1
            time = datetime.fromisoformat(trade["time"])
            self.last_time = max(self.last_time, time)
            since = (time - _EPOCH) // _MILLISECOND
            number, price, size = trade["id"], trade["price"], trade["size"]
            one = Bar(
                trade["symbol"],
                since - since % self._window,
                *(price, price, price, price),
                volume=size,
                trades=1,
                turnover=round(price * 100) * size,
            )
            bar = self._bars.get(one.key)
            if bar is None:
                self._bars[one.key] = one
                self._ends[one.key] = number, number
                continue
            first, last = self._ends[one.key]
            self._ends[one.key] = min(first, number), max(last, number)
            self._bars[one.key] = replace(
                bar,
                open=price if number < first else bar.open,
                high=max(bar.high, price),
                low=min(bar.low, price),
                close=price if number > last else bar.close,
                volume=bar.volume + size,
                trades=bar.trades + 1,
                turnover=bar.turnover + one.turnover,
            )
        return symbols

    @property
    def bars(self) -> Mapping[BarKey, Bar]:
        """All of them, by their keys."""
        return self._bars


class KilledBatch:
    """Counts the bars of the batch in which Spark is killed: those stored before, and those stored after the restart.

    Spark reports the end of a batch from another thread than the beginning of the next one, so they come in any order.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The batch; None before the kill."""
        self._stored_before = 0
        self._stored_at_kill: int | None = None
        self._stored_after: int | None = None

    def bars(self) -> tuple[int, int] | None:
        """Return its bars stored before the kill and after the restart; None before the killed Spark has ended."""
        if self._stored_at_kill is None:
            return None
        after = 0 if self._stored_after is None else self._stored_after - self._stored_at_kill
        return self._stored_at_kill - self._stored_before, after

    def batch_began(self, number: int, stored: int) -> None:
        """Record that a batch began, with so many bars in the hub."""
        if self.number is None:
            self._stored_before = stored
        elif number != self.number:
            self._end(stored)

    def batch_ended(self, number: int, stored: int) -> None:
        """Record that a batch ended, with so many bars in the hub."""
        if number == self.number:
            self._end(stored)

    def killed(self, number: int) -> None:
        """Record that Spark is killed in a batch."""
        self.number = number

    def killed_spark_ended(self, stored: int) -> None:
        """Record that the killed processes have ended, with so many bars in the hub."""
        self._stored_at_kill = stored

    def _end(self, stored: int) -> None:
        if self._stored_at_kill is not None and self._stored_after is None:
            self._stored_after = stored


@dataclass(frozen=True, slots=True)
class BarsVerdict:
    """The result of a run. All counts except `trades` are of bars.

    Args:
        stored: The bars found in the hub at the end.
        lost: Expected, but not found.
        duplicates: Found more than once, counting each repetition.
        wrong: Found with wrong figures, or not expected.
        disorder: Found after a later one of their partition.
        cut: The bars of the batch that the kill interrupted: stored before it, and after the restart; None if none was
            interrupted.
        recovery: Seconds from the kill to the next bar.
    """

    trades: int
    expected: int
    stored: int
    lost: int
    duplicates: int
    wrong: int
    disorder: int
    cut: tuple[int, int] | None = None
    recovery: float | None = None

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return not (self.lost or self.duplicates or self.wrong or self.disorder)

    def figures(self) -> list[tuple[str, str]]:
        """The counts: name and value."""
        return [
            ("trades published", f"{self.trades:,}"),
            ("bars expected", f"{self.expected:,}"),
            ("bars in the hub", f"{self.stored:,}"),
            ("lost", f"{self.lost:,}"),
            ("duplicates", f"{self.duplicates:,}"),
            ("wrong", f"{self.wrong:,}"),
            ("out of order", f"{self.disorder:,}"),
            ("of the killed batch", "-" if self.cut is None else f"{self.cut[0]:,} before, {self.cut[1]:,} after"),
            ("time to recover", "-" if self.recovery is None else f"{self.recovery:.1f} s"),
        ]

    def judgement(self) -> str:
        """Return the conclusion in one sentence."""
        if self.holds:
            return "every bar is in the hub exactly once, in order per partition"
        found = {
            "are lost": self.lost,
            "are there twice": self.duplicates,
            "are wrong": self.wrong,
            "are out of order": self.disorder,
        }
        return "; ".join(f"{count:,} bars {what}" for what, count in found.items() if count)


def judge_bars(
    trades: int,
    expected: Mapping[BarKey, Bar],
    stored: Mapping[str, Sequence[Bar]],
    *,
    cut: tuple[int, int] | None = None,
    recovery: float | None = None,
) -> BarsVerdict:
    """Compare expected and stored bars.

    Args:
        stored: The bars of each partition of the hub, in order.
    """
    found = [bar for bars in stored.values() for bar in bars]
    counted = Counter(bar.key for bar in found)
    return BarsVerdict(
        trades=trades,
        expected=len(expected),
        stored=len(found),
        lost=len(expected.keys() - counted.keys()),
        duplicates=len(found) - len(counted),
        wrong=sum(expected.get(bar.key) != bar for bar in found),
        disorder=sum(
            later.key < earlier.key for bars in stored.values() for earlier, later in itertools.pairwise(bars)
        ),
        cut=cut,
        recovery=recovery,
    )
