"""The benchmark `telemetry`: what recording costs per batch, above the same batch without."""

from __future__ import annotations

from typing import Final

from benchmarks.comparing import Log
from benchmarks.processes import run_side
from benchmarks.report import Row

ABSENT: Final = 2.0
"""Microseconds of CPU that a batch may cost more with a telemetry object, where no SDK is set up."""
RECORDED: Final = 80.0
"""The same where spans and metrics are recorded, of events without contexts."""
LINKED: Final = 6.0
"""Microseconds of CPU that each linked event may cost beyond that."""
LINKS: Final = 100
"""Events with a context each, in one batch."""

_CASES: Final = (
    ("absent_1", "no SDK, a delivery of one event", "µs CPU/batch", ABSENT),
    ("absent_300", "no SDK, 300 events", "µs CPU/batch", ABSENT),
    ("recorded_1", "recorded, a delivery of one event", "µs CPU/batch", RECORDED),
    ("recorded_300", "recorded, 300 events", "µs CPU/batch", RECORDED),
    ("sdk", "the SDK alone, a span with 11 attributes and three measurements", "µs CPU/batch", None),
    ("linked_1", "recorded, a delivery of one linked event", "µs CPU/batch", RECORDED + LINKED),
    ("linked_100", f"recorded, {LINKS} linked events", "µs CPU/batch", RECORDED + LINKS * LINKED),
    ("shared_300", "recorded, 300 events with one context", "µs CPU/batch", None),
    ("absent_send", "no SDK, a send of one event", "µs CPU/batch", ABSENT),
    ("recorded_send", "recorded, a send of one event that carries the context", "µs CPU/batch", RECORDED),
)


def telemetry(quick: bool, log: Log) -> list[Row]:
    """Batches with and without telemetry in turn in one process, without a host around them; medians of differences."""
    run = run_side("telemetry:telemetry", 300, rounds=5 if quick else 41)
    rows = []
    for key, text, unit, limit in _CASES:
        log(f"{text}: {run[key]:.2f} {unit}")
        rows.append(
            Row(
                name=f"telemetry: {text}",
                peer="",
                subject="the SDK" if key == "sdk" else "with telemetry - without",
                subject_value=run[key],
                peer_value=None,
                unit=unit,
                subject_busy=1.0,
                limit=limit,
            )
        )
    return rows
