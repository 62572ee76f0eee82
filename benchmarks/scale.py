"""The benchmark `scale`: what a host of many partitions costs, and how that grows with their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.comparing import Log
from benchmarks.processes import EmulatorProcess, build, run_side
from benchmarks.report import Row

PARTITIONS = (1, 32, 256, 1024)
QUICK_PARTITIONS = (1, 32, 256)
HOSTS = (1, 2, 4, 8, 16)
QUICK_HOSTS = (1, 4, 16)
SHARED = 256
"""Partitions that several hosts share."""
EVENTS = 100_000
IDLE = 20.0
"""Seconds: two renewals of each lease."""
TIMEOUT = 400.0

FIGURES = {
    "start": ("start to an event from each partition", "s"),
    "start_cpu": ("CPU of that", "s CPU"),
    "idle": ("idle", "% of a core"),
    "memory": ("resident memory", "MiB"),
}
"""What grows with the number of partitions."""


def scale(quick: bool, log: Log) -> list[Row]:
    """Hosts in one process with a source in memory, then one host and an emulator; each beside its law."""
    numbers, idle = (QUICK_PARTITIONS, IDLE / 2) if quick else (PARTITIONS, IDLE)
    events = EVENTS // 5 if quick else EVENTS
    rows: list[Row] = []
    runs: dict[int, Mapping[str, float]] = {}
    for partitions in numbers:
        found = run_side("scale:scale", TIMEOUT, partitions=partitions, hosts=1, events=events, idle=idle)
        runs[partitions] = found
        log(f"{partitions} partitions: {_told(found)}")
    rows += _rows("in memory", runs)
    rows += [
        Row(
            name=f"scale: in memory, {partitions} partitions, cost per event",
            peer="",
            subject_value=found["cost"],
            peer_value=None,
            unit="µs CPU/event",
            build=build(),
        )
        for partitions, found in runs.items()
    ]
    for hosts in QUICK_HOSTS if quick else HOSTS:
        found = run_side("scale:scale", TIMEOUT, partitions=SHARED, hosts=hosts, events=events, idle=0.0)
        log(f"{SHARED} partitions on {hosts} hosts: {_told(found)}")
        rows += [
            Row(
                name=f"scale: {SHARED} partitions on {hosts} hosts, {FIGURES[figure][0]}",
                peer="",
                subject_value=found[figure],
                peer_value=None,
                unit=FIGURES[figure][1],
                build=build(),
            )
            for figure in ("start", "start_cpu", "memory")
        ]
    over_amqp: dict[int, Mapping[str, float]] = {}
    for partitions in numbers:
        with EmulatorProcess(partitions) as emulator:
            place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
            run_side("ours:fill", TIMEOUT, **place, partitions=partitions, events=partitions)
            found = run_side("scale:scale", TIMEOUT, partitions=partitions, hosts=1, events=0, idle=idle, **place)
            over_amqp[partitions] = found
            log(f"{partitions} partitions of the emulator: {_told(found)}")
    rows += _rows("over AMQP", over_amqp)
    return rows


def law(values: Mapping[int, float]) -> tuple[float, float]:
    """Return the fixed part and the part per partition of a cost, by least squares of the relative errors.

    Args:
        values: The cost by the number of partitions, of two numbers at least.
    """
    # A thousand partitions must not outweigh one: each is weighted by the inverse of its square.
    weights = {number: 1 / max(value, 1e-9) ** 2 for number, value in values.items()}
    total = sum(weights.values())
    mean = sum(weights[number] * number for number in values) / total
    middle = sum(weights[number] * value for number, value in values.items()) / total
    spread = sum(weights[number] * (number - mean) ** 2 for number in values)
    slope = sum(weights[number] * (number - mean) * (value - middle) for number, value in values.items()) / spread
    return middle - slope * mean, slope


def _rows(where: str, runs: Mapping[int, Mapping[str, float]]) -> list[Row]:
    """Return the figures of runs with several numbers of partitions, each beside what its law says."""
    rows: list[Row] = []
    for figure, (text, unit) in FIGURES.items():
        fixed, each = law({number: found[figure] for number, found in runs.items()})
        rows += [
            Row(
                name=f"scale: {where}, {_count(number)}, {text}",
                peer="law",
                subject_value=found[figure],
                peer_value=max(0.0, fixed + each * number),
                unit=unit,
                is_headline=where == "in memory" and figure in ("start_cpu", "idle", "memory"),
                build=build(),
                note=f"law: {fixed:.3g} + {each:.3g} per partition" if number == max(runs) else "",
            )
            for number, found in runs.items()
        ]
    return rows


def _count(partitions: int) -> str:
    return "1 partition" if partitions == 1 else f"{partitions} partitions"


def _told(found: Mapping[str, float]) -> str:
    names: Sequence[str] = [figure for figure in (*FIGURES, "cost") if figure in found]
    return ", ".join(f"{figure} {found[figure]:.3g}" for figure in names)
