"""The figures that README.md and docs/comparison.md state: `python -m benchmarks.figures` writes them from `results/`.

In a row of a table whose first cell is in `FIGURES` the next two cells are of the newest two full runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.report import Report, Row

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
DOCUMENTS: Final = (ROOT / "README.md", ROOT / "docs" / "comparison.md")
NEWEST: Final = 2
"""How many results are stated together: one alone is what one machine did on one day."""

FIGURES: Final[Mapping[str, str]] = {
    "telemetry consumer: JSON, two properties, key, three fields": "receive: telemetry consumer, TLS, 4 partitions",
    "the same without the JSON": "receive: telemetry without its JSON, TLS, 4 partitions",
    "four fields read": "receive: four fields read, TLS, 4 partitions",
    "typed handler of an app, pydantic": "programs: typed handler of an app, pydantic",
    "typed handler of an app, msgspec": "programs: typed handler of an app, msgspec",
    "CloudEvents": "programs: CloudEvents in binary mode",
    "each event forwarded": "programs: forwarding through a buffered producer",
    "telemetry consumer, 100 events/s, one by one": "paced: telemetry consumer, 100 events/s, one by one",
    "telemetry consumer, 1,000 events/s, one by one": "paced: telemetry consumer, 1,000 events/s, one by one",
    "telemetry consumer, 5,000 events/s, one by one": "paced: telemetry consumer, 5,000 events/s, one by one",
    "telemetry consumer, 5,000 events/s, 20 at once": "paced: telemetry consumer, 5,000 events/s, 20 at once",
    "from the service to the handler, p50": "paced: telemetry consumer, 1,000 events/s, one by one, p50",
    "eight consumers of the same events, four fields read": "fanout: 8 subscriptions, four fields read",
    "full batches sent, varied events": "send: varied",
    "single events sent through the buffer": "buffered: varied",
}
"""The name of a benchmark's row by what the documents call it."""


def newest(directory: Path = RESULTS) -> list[Report]:
    """Read the newest result files; their names begin with their dates.

    Raises:
        ValueError: There are fewer than `NEWEST`, or one of them is of `--quick`.
    """
    reports = [Report.read(path) for path in sorted(directory.glob("*.json"))[-NEWEST:]]
    if len(reports) < NEWEST or any(report.is_quick for report in reports):
        raise ValueError(f"{directory} needs the results of {NEWEST} full runs")
    return reports


def cells(rows: Sequence[Row]) -> tuple[str, str]:
    """Return our cost, and the peer's with its ratio, as ranges over the same row of several runs."""
    unit = rows[0].unit.removesuffix(" CPU/event")
    ours = f"{_range([row.subject_value for row in rows])} {unit}"
    peers = [row.peer_value for row in rows if row.peer_value is not None]
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if len(ratios) < len(rows):
        return ours, "none keeps up"
    verdict = " (better)" if min(ratios) < 1 else ""
    return ours, f"{_range(peers)} {unit}: **{_range(ratios)} times** as much{verdict}"


def _range(values: Sequence[float]) -> str:
    least, most = _short(min(values)), _short(max(values))
    return least if least == most else f"{least} to {most}"


def _short(value: float) -> str:
    """Return a number with two digits, or as a whole one."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def stated(text: str, reports: Sequence[Report]) -> str:
    """Return a document with the figures of these results.

    Raises:
        KeyError: A result lacks a row.
    """
    found = [{row.name: row for row in report.rows} for report in reports]
    lines = text.split("\n")
    for number, line in enumerate(lines):
        label, *others = [cell.strip() for cell in line.strip("|").split(" | ")]
        if label in FIGURES and len(others) > 1:
            shown = cells([rows[FIGURES[label]] for rows in found])
            lines[number] = f"| {' | '.join([label, *shown, *others[2:]])} |"
    return "\n".join(lines)


def main() -> int:
    """Write the figures into the documents."""
    reports = newest()
    for path in DOCUMENTS:
        path.write_text(stated(path.read_text(encoding="utf-8"), reports), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
