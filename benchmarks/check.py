"""Repeating benchmarks, and comparing them with an earlier run: the guard for a change that must cost nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Report, Row, lay_out, ratio_text, spread

LEAST_ALLOWED = 0.05
"""The part of its ratio that a row may lose, however little the repeated unchanged runs differed."""


def median_rows(runs: Sequence[Sequence[Row]]) -> tuple[list[Row], dict[str, tuple[float, ...]]]:
    """Merge the rows of repeated runs by their names.

    A void row counts only where all of that name are void. The one in the middle is that of the middle ratio (of two
    the lower), or of the middle value where there is no ratio.

    Returns:
        For each name the row in the middle, and the ratios of all that count, in the order of the runs.
    """
    named: dict[str, list[Row]] = {}
    for row in (row for run in runs for row in run):
        named.setdefault(row.name, []).append(row)
    rows: list[Row] = []
    repeats: dict[str, tuple[float, ...]] = {}
    for name, found in named.items():
        counting = [row for row in found if not row.is_void] or found
        ratios = tuple(row.ratio for row in counting if row.ratio is not None)
        if len(ratios) == len(counting):
            ordered = sorted(counting, key=lambda row: row.ratio or 0.0)
        else:
            ordered = sorted(counting, key=lambda row: row.subject_value)
        rows.append(ordered[(len(ordered) - 1) // 2])
        repeats[name] = ratios
    return rows, repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A row beside the row of the same name of an earlier run.

    Args:
        before: None where the earlier run has no such row.
        now: None where this run has none.
        allowed: The part of its ratio that the row may lose.
    """

    name: str
    before: Row | None
    now: Row | None
    allowed: float

    @property
    def change(self) -> float | None:
        """What the ratio gained, as a part of what it was: negative where the row became worse."""
        before, now = (None if row is None else row.ratio for row in (self.before, self.now))
        if before is None or now is None:
            return None
        if not before:  # the peer cost nothing
            return math.inf if now else 0.0
        return now / before - 1

    @property
    def has_other_peer(self) -> bool:
        """Whether the rows stand beside different peers, as where another configuration was the best in this run."""
        return self.before is not None and self.now is not None and self.before.peer != self.now.peer

    @property
    def verdict(self) -> str:
        """What the comparison says.

        * "missing": this run has no such row; "new": the earlier run has none
        * "void": one of the rows is void
        * "no ratio": one of the rows has one and the other has not; "not compared": neither has
        * "worse", "better": the ratio changed by more than is allowed; else "same"
        """
        if self.now is None:
            return "missing"
        if self.before is None:
            return "new"
        if self.now.is_void or self.before.is_void:
            return "void"
        change = self.change
        if change is None:
            return "not compared" if self.now.ratio is None and self.before.ratio is None else "no ratio"
        if abs(change) <= self.allowed:
            return "same"
        return "better" if change > 0 else "worse"

    @property
    def is_failure(self) -> bool:
        """Whether the check fails by this row."""
        return self.verdict not in {"same", "better", "not compared"}


def compare(before: Report, now: Sequence[Row], names: Collection[str]) -> list[Comparison]:
    """Compare the rows of the named benchmarks with those of an earlier run, in the order of the earlier run."""
    pairs: dict[str, tuple[Row | None, Row | None]] = {
        row.name: (row, None) for row in before.rows if row.benchmark in names
    }
    for row in now:
        pairs[row.name] = (pairs.get(row.name, (None, None))[0], row)
    return [
        Comparison(name=name, before=earlier, now=row, allowed=_allowed(before.repeats, name))
        for name, (earlier, row) in pairs.items()
    ]


def _allowed(repeats: Mapping[str, Sequence[float]], name: str) -> float:
    return max(LEAST_ALLOWED, spread(repeats.get(name, ())) or 0.0)


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as plain text, with their results below."""
    lines = [
        (
            each.name,
            ratio_text(None if each.before is None else each.before.ratio),
            ratio_text(None if each.now is None else each.now.ratio),
            "-" if each.change is None else f"{each.change:+.1%}",
            f"{each.allowed:.1%}",
            each.verdict.upper() if each.is_failure else each.verdict,
        )
        for each in comparisons
    ]
    headings = ("row", "ratio before", "now", "change", "allowed", "verdict")
    text = lay_out([headings, *lines], [True, False, False, False, False, True])
    text += [
        f"  {each.name}: the peer was {each.before.peer}, and now is {each.now.peer}"
        for each in comparisons
        if each.has_other_peer and each.before is not None and each.now is not None
    ]
    failed = [each.name for each in comparisons if each.is_failure]
    text.append(f"  failed: {'; '.join(failed)}" if failed else "  passed")
    return "\n".join(text)
