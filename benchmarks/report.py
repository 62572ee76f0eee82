"""The rows: how they are compared, printed, written and read."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from benchmarks.processes import build as build_of_package

LEAST_BUSY = 0.9
"""A client that was busy for less of the time measured waiting, not work (`Row.must_be_busy`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cost of ours beside the same cost of a peer, or beside a stated bound.

    Args:
        name: The same in every run, and of no other row: by it runs are compared.
        peer: What it is compared with; "budget" or "bound" for a number of the design.
        peer_value: None where there is nothing to compare with.
        goal: The least ratio that is wanted; None where none is stated.
        limit: The most `subject_value` may be; None where none is stated.
        must_be_busy: Whether the row is void unless our process was busy (`LEAST_BUSY`).
        note: What else was seen, for the table.
        benchmark: The name in `BENCHMARKS` of the benchmark that measured it; filled in by the command.
        is_headline: Whether the pictures show it.
        subject_faults: Minor page faults per event of our process; None where they were not counted.
        peer_faults: The same of the peer's process.
        build: What of our package was compiled; that of this process unless stated otherwise.
        loop: The event loop of our process.
        python: The version of Python that both sides ran on.
        ratios: The ratio of each round of the run, in the order of the rounds.
        panel: In a picture of curves, the heading of the panel that shows the row; otherwise it has bars.
        curve: The curve that the row is a point of.
        at: Where on that curve, such as 32.
        over: What `at` counts, such as partitions.
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
    build: str = field(default_factory=build_of_package)
    loop: str = "asyncio"
    python: str = platform.python_version()
    ratios: tuple[float, ...] = ()
    panel: str = ""
    curve: str = ""
    at: float | None = None
    over: str = ""

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
        """The result of the goal: "met", "missed", "void", or empty if there is none."""
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
        row = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**row, "ratio": self.ratio, "verdict": self.verdict}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the row of a JSON object; missing fields get their defaults, unknown members are ignored.

        Raises:
            TypeError: A field without a default is missing.
        """
        names = {each.name for each in fields(cls)}
        row = {name: each for name, each in value.items() if name in names}
        return cls(**{**row, "ratios": tuple(row.get("ratios", ()))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The rows of a run of the command, and what they were measured on.

    Args:
        machine: Processors and system.
        versions: By the name of what they are versions of.
        repeats: The ratios that each row had when the benchmarks were repeated unchanged, by the row's name.
        is_quick: Whether the runs were short ones (`--quick`).
    """

    machine: str
    versions: Mapping[str, str]
    rows: Sequence[Row]
    repeats: Mapping[str, Sequence[float]] = field(default_factory=dict)
    is_quick: bool = False

    def write(self, path: Path) -> None:
        """Write the report as a JSON object."""
        value = {
            "machine": self.machine,
            "versions": dict(self.versions),
            "quick": self.is_quick,
            "rows": [row.to_json() for row in self.rows],
            "repeats": {name: list(ratios) for name, ratios in self.repeats.items()},
        }
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote, or the bare list of rows that earlier versions wrote.

        Raises:
            OSError: The file cannot be read.
            ValueError: It holds something else.
        """
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, list):
            value = {"machine": "", "versions": {}, "rows": value}
        try:
            rows = [Row.from_json({"benchmark": row["name"].partition(":")[0], **row}) for row in value["rows"]]
            repeats = {name: tuple(map(float, ratios)) for name, ratios in value.get("repeats", {}).items()}
            return cls(
                machine=value["machine"],
                versions=value["versions"],
                rows=rows,
                repeats=repeats,
                is_quick=value.get("quick", False),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it holds no rows of benchmarks: {error!r}") from error


def spread(ratios: Sequence[float]) -> float | None:
    """Return how far apart the ratios of unchanged runs lie, as a part of their median.

    Returns:
        None for fewer than two, and where the median is nothing.
    """
    if len(ratios) < 2 or not (middle := statistics.median(ratios)):
        return None
    return (max(ratios) - min(ratios)) / middle


_COLUMNS: Mapping[str, bool] = {
    "benchmark": True,
    "eventpump": False,
    "peer": False,
    "": True,
    "unit": True,
    "ratio": False,
    "spread": False,
    "busy": False,
    "peer busy": False,
    "faults": False,
    "peer faults": False,
    "on": True,
    "goal": False,
    "verdict": True,
}
"""The headings, and whether what stands below is aligned to the left."""

_OPTIONAL = {"spread", "faults", "peer faults", "on", "goal", "verdict"}
"""The columns that are left out where they would be empty."""


def _cells(row: Row, ratios: Sequence[float], on: str) -> dict[str, str]:
    goals = [] if row.goal is None else [f"ratio >= {row.goal:g}"]
    if row.limit is not None:
        goals.append(f"<= {row.limit:g}")
    return {
        "benchmark": row.name,
        "eventpump": number(row.subject_value),
        "peer": number(row.peer_value),
        "": row.peer,
        "unit": row.unit,
        "ratio": ratio_text(row.ratio),
        "spread": percent(spread(ratios), ""),
        "busy": percent(row.subject_busy),
        "peer busy": percent(row.peer_busy),
        "faults": number(row.subject_faults, ""),
        "peer faults": number(row.peer_faults, ""),
        "on": on,
        "goal": ", ".join(goals),
        "verdict": row.verdict,
    }


def environment(row: Row) -> str:
    """Return what our side of a row ran on."""
    return f"{row.loop}, {_build(row)}"


def _build(row: Row) -> str:
    return f"{row.build}, Python {row.python}"


def sized(count: int) -> str:
    """Return a number of bytes as a person writes it."""
    return f"{count // 1024} KiB" if count % 1024 == 0 else f"{count} B"


def table(rows: Sequence[Row], repeats: Mapping[str, Sequence[float]] | None = None) -> str:
    """Lay the rows out as plain text, their notes below.

    Args:
        repeats: See `Report`; a row that is not in it shows the spread of its rounds.
    """
    loops, builds = {row.loop for row in rows}, {_build(row) for row in rows}

    def ran_on(row: Row) -> str:
        return ", ".join([row.loop] * (len(loops) > 1) + [_build(row)] * (len(builds) > 1))

    lines = [_cells(row, (repeats or {}).get(row.name) or row.ratios, ran_on(row)) for row in rows]
    shown = [name for name in _COLUMNS if name not in _OPTIONAL or any(line[name] for line in lines)]
    text = lay_out([shown, *([line[name] for name in shown] for line in lines)], [_COLUMNS[name] for name in shown])
    common = [*(loops if len(loops) == 1 else ()), *(builds if len(builds) == 1 else ())]
    if common:
        text.append(f"  all on {', '.join(common)}")
    text += [f"  {row.name}: {row.note}" for row in rows if row.note]
    if any(row.is_void for row in rows):
        text.append(f"  void: our process was busy for less than {LEAST_BUSY:.0%} of the time, so it measured waiting")
    return "\n".join(text)


def lay_out(lines: Sequence[Sequence[str]], is_left: Sequence[bool]) -> list[str]:
    """Lay cells out in columns, the first line as a heading.

    Args:
        is_left: For each column whether it is aligned to the left.
    """
    widths = [max(len(line[column]) for line in lines) for column in range(len(is_left))]
    text = [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_left, strict=True)
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    return text


def number(value: float | None, missing: str = "-") -> str:
    """Return a measured value with three digits."""
    if value is None:
        return missing
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ratio_text(value: float | None) -> str:
    """Return a ratio: two digits behind the point where it is small."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def percent(value: float | None, missing: str = "-") -> str:
    """Return a part of one in per cent."""
    return missing if value is None else f"{value:.0%}"
