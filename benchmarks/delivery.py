"""The benchmark `delivery`: what delivering one event that comes by itself takes, counted."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.certificates import certificate
from benchmarks.comparing import TIMEOUT, Log
from benchmarks.processes import PURE, CannedService, build, is_compiled, run_side
from benchmarks.report import Row

RATE = 500
"""Events per second: each has a delivery of its own."""
LEAST = 0.5
"""Of how many calls per delivery a place is named."""

COUNTS = {
    "calls": "calls of Python functions",
    "calls of C functions": "calls of C functions",
    "allocations": "allocations",
    "callbacks": "callbacks of the event loop",
    "timers made": "timers made",
    "timers cancelled": "timers cancelled",
    "switches": "voluntary context switches",
}


def delivery(quick: bool, log: Log) -> list[Row]:
    """Count calls, allocations, callbacks, timers and context switches per delivery, over TLS, in each build."""
    deliveries = 500 if quick else 2_000
    rows: list[Row] = []
    with certificate() as made, tempfile.TemporaryDirectory() as directory:
        for is_pure in (False, True) if is_compiled() else (True,):
            pace = {"rate": RATE, "together": 1, "times": str(Path(directory, "times"))}
            # More than needed: on a busy machine some come together.
            with CannedService("telemetry", 1, 20 * deliveries, made, pace) as service:
                place = service.place("ours")
                found = run_side("delivery:delivery", TIMEOUT, "asyncio", is_pure, **place, deliveries=deliveries)
            name = PURE if is_pure else build()
            places = {key.removeprefix("in "): number for key, number in found.items() if key.startswith("in ")}
            shown = sorted(((number, key) for key, number in places.items() if number >= LEAST), reverse=True)
            note = ", ".join(f"{key} {number:.1f}" for number, key in shown)
            log(f"{name}: {note}")
            rows += [
                Row(
                    name=f"delivery: {text}{'' if is_pure else f', {name}'}",
                    peer="",
                    subject_value=found.get(key, 0.0),
                    peer_value=None,
                    unit="per delivery",
                    build=name,
                    note=f"by place: {note}" if key == "calls" else "",
                )
                for key, text in COUNTS.items()
            ]
    return rows
