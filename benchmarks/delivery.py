"""The benchmark `delivery`: what delivering one event that comes by itself takes, and sending one, counted."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
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
    """Count calls, allocations, callbacks, timers and context switches, over TLS, in each build.

    Per delivery of an event that comes by itself, and per send of an event, plain and idempotent.
    """
    deliveries = 500 if quick else 2_000
    rows: list[Row] = []
    with certificate() as made, tempfile.TemporaryDirectory() as directory:
        for is_pure in (False, True) if is_compiled() else (True,):
            pace = {"rate": RATE, "together": 1, "times": str(Path(directory, "times"))}
            # More than needed: on a busy machine some come together.
            with CannedService("telemetry", 1, 20 * deliveries, made, pace) as service:
                place = service.place("ours")
                found = run_side("delivery:delivery", TIMEOUT, "asyncio", is_pure, **place, deliveries=deliveries)
            rows += _counted("delivery", found, is_pure, log)
            with CannedService("uniform", 1, 0, made) as service:
                place = {**service.place("ours"), "deliveries": deliveries}
                for name, idempotent in (("send", False), ("idempotent send", True)):
                    found = run_side("delivery:send", TIMEOUT, "asyncio", is_pure, **place, idempotent=idempotent)
                    rows += _counted(name, found, is_pure, log)
    return rows


def _counted(what: str, found: Mapping[str, float], is_pure: bool, log: Log) -> list[Row]:
    """Return the rows of one work in one build: each has one of the counts."""
    name = PURE if is_pure else build()
    places = {key.removeprefix("in "): number for key, number in found.items() if key.startswith("in ")}
    shown = sorted(((number, key) for key, number in places.items() if number >= LEAST), reverse=True)
    note = ", ".join(f"{key} {number:.1f}" for number, key in shown)
    log(f"{what}, {name}: {note}")
    return [
        Row(
            name=f"{what}: {text}{'' if is_pure else f', {name}'}",
            peer="",
            subject_value=found.get(key, 0.0),
            peer_value=None,
            unit=f"per {what.rpartition(' ')[2]}",
            build=name,
            note=f"by place: {note}" if key == "calls" else "",
        )
        for key, text in COUNTS.items()
    ]
