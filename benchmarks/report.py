"""The rows: how they are compared, printed and written."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

LEAST_BUSY = 0.9
"""A client that was busy for less of the time measured waiting, not work (`Row.must_be_busy`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cost of ours beside the same cost of a peer, or beside a stated bound.

    :param name: the same in every run, and of no other row: by it runs are compared.
    :param peer: what it is compared with; "budget" or "bound" for a number of the design.
    :param peer_value: None where there is nothing to compare with.
    :param goal: the least ratio that is wanted; None where none is stated.
    :param limit: the most `subject_value` may be; None where none is stated.
    :param must_be_busy: whether the row is void unless our process was busy (`LEAST_BUSY`).
    :param note: what else was seen, for the table.
    :param benchmark: the name in `BENCHMARKS` of the benchmark that measured it; filled in by the command.
    :param is_headline: whether the pictures show it.
    :param subject_faults: minor page faults per event of our process; None where they were not counted.
    :param peer_faults: the same of the peer's process.
    :param build: what of our package was compiled.
    :param loop: the event loop of our process.
    :param python: the version of Python that both sides ran on.
    :param ratios: the ratio of each round of the run, in the order of the rounds.
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
    benchmark: str = ""
    is_headline: bool = False
    subject_faults: float | None = None
    peer_faults: float | None = None
    build: str = "pure Python"
    loop: str = "asyncio"
    python: str = platform.python_version()
    ratios: tuple[float, ...] = ()

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
        """Return the row as a JSON object, with its ratio and its verdict."""
        row = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**row, "ratios": list(self.ratios), "ratio": self.ratio, "verdict": self.verdict}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the row of a JSON object; what the object lacks has its default, what is no field is left out.

        :raises TypeError: a field without a default is missing.
        """
        names = {field.name for field in fields(cls)}
        row = {name: each for name, each in value.items() if name in names}
        return cls(**{**row, "ratios": tuple(row.get("ratios", ()))})


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
