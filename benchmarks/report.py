"""The rows: how they are compared, printed and written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_BUSY = 0.9
"""A client that was busy for less of the time measured waiting, not work (`Row.must_be_busy`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cost of ours beside the same cost of a peer, or beside a stated bound.

    :param peer: what it is compared with; "budget" or "bound" for a number of the design.
    :param peer_value: None where there is nothing to compare with.
    :param goal: the least ratio that is wanted; None where none is stated.
    :param limit: the most `subject_value` may be; None where none is stated.
    :param must_be_busy: whether the row is void unless our process was busy (`LEAST_BUSY`).
    :param note: what else was seen, for the table.
    """

    name: str
    peer: str
    subject_value: float
    peer_value: float | None
    unit: str
    subject: str = "eventpump"
    subject_busy: float | None = None
    peer_busy: float | None = None
    goal: float | None = None
    limit: float | None = None
    must_be_busy: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The peer's cost, or the bound, over our cost: bigger is better. None where there is nothing to compare."""
        if self.peer_value is None or self.subject_value <= 0:
            return None
        return self.peer_value / self.subject_value

    @property
    def is_void(self) -> bool:
        """Whether the run measured waiting."""
        return self.must_be_busy and (self.subject_busy is None or self.subject_busy < LEAST_BUSY)

    @property
    def verdict(self) -> str:
        """What came of the goal: "met", "missed", "void", or nothing where there is none."""
        if self.is_void:
            return "void"
        if self.goal is None and self.limit is None:
            return ""
        is_met = self.limit is None or self.subject_value <= self.limit
        if self.goal is not None:
            # A cost of nothing at all is below every bound.
            is_met = is_met and (self.subject_value <= 0 or (self.ratio is not None and self.ratio >= self.goal))
        return "met" if is_met else "missed"

    def to_json(self) -> dict[str, Any]:
        """Give the row as a JSON object."""
        return {
            "name": self.name,
            "subject": self.subject,
            "peer": self.peer,
            "subject_value": self.subject_value,
            "peer_value": self.peer_value,
            "unit": self.unit,
            "ratio": self.ratio,
            "subject_busy": self.subject_busy,
            "peer_busy": self.peer_busy,
            "goal": self.goal,
            "limit": self.limit,
            "verdict": self.verdict,
        }


HEADINGS = ("benchmark", "eventpump", "peer", "", "unit", "ratio", "busy", "peer busy", "goal", "")
_LEFT = {0, 3, 4, 9}


def cells(row: Row) -> tuple[str, ...]:
    """Give a row's cells, in the order of `HEADINGS`."""
    goals = [] if row.goal is None else [f"ratio >= {row.goal:g}"]
    if row.limit is not None:
        goals.append(f"<= {row.limit:g}")
    return (
        row.name,
        _number(row.subject_value),
        _number(row.peer_value),
        row.peer,
        row.unit,
        "-" if row.ratio is None else f"{row.ratio:.1f}",
        _percent(row.subject_busy),
        _percent(row.peer_busy),
        ", ".join(goals),
        row.verdict,
    )


def table(rows: Sequence[Row]) -> str:
    """Lay the rows out as plain text, their notes below."""
    lines = [HEADINGS, *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = [
        "  ".join(
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    text += [f"  {row.name}: {row.note}" for row in rows if row.note]
    if any(row.is_void for row in rows):
        text.append(f"  void: our process was busy for less than {LEAST_BUSY:.0%} of the time, so it measured waiting")
    return "\n".join(text)


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as a list of objects."""
    path.write_text(json.dumps([row.to_json() for row in rows], indent=2) + "\n", encoding="utf-8")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
