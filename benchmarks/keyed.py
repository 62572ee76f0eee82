"""The benchmark `keyed`: what a keyed processor costs over a plain one with the same handler."""

from __future__ import annotations

from benchmarks.comparing import Log
from benchmarks.processes import run_side
from benchmarks.report import Row

ALLOWED = 3.0
"""Microseconds of CPU per event that a keyed processor may cost over the plain one."""
KEYS = 100


def keyed(quick: bool, log: Log) -> list[Row]:
    """Both processors in turn in one process, over the same events; the middle of the differences counts."""
    rows = []
    for waits, text in ((False, "handler returns at once"), (True, "handler waits a turn of the loop")):
        amounts = {"events": 5_000, "rounds": 7} if quick else {"events": 20_000, "rounds": 31}
        run = run_side("keyed:keyed", 300, **amounts, keys=KEYS, waits=waits)
        log(f"{text}: plain {run['plain']:.2f}, keyed {run['keyed']:.2f}, over it {run['over']:.2f} µs of CPU")
        rows.append(
            Row(
                name=f"keyed: over a plain processor, {text}",
                peer="",
                subject="keyed - plain",
                subject_value=run["over"],
                peer_value=None,
                unit="µs CPU/event",
                subject_busy=1.0,
                limit=None if waits else ALLOWED,
                note=f"plain {run['plain']:.2f}, keyed {run['keyed']:.2f}; the least difference was {run['best']:.2f}",
            )
        )
    return rows
