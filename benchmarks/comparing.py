"""How the sides of a benchmark are run, in turn, and what rows come of their runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from benchmarks.meter import median_run
from benchmarks.processes import PURE, build, version
from benchmarks.report import LEAST_BUSY, Row

PEER = f"azure-eventhub {version('azure-eventhub') or ''}".rstrip()
OURS = "eventpump"
OURS_ON_UVLOOP = f"{OURS} on uvloop"
OURS_PURE = f"{OURS} in pure Python"
"""Beside the compiled build."""
ATTEMPTS = 4
"""How often a side that must be busy is run in a round, at most, until it was."""
HELD = 0.02
"""A `delivery_interval`, in seconds."""
OURS_HELD = f"{OURS} with delivery_interval={HELD}"
TIMEOUT = 300.0
"""Seconds that a side's run may take."""

Log = Callable[[str], None]
Figures = Mapping[str, float]
Run = Callable[[], Figures]
Rounds = Sequence[Mapping[str, Figures]]
"""For each round the figures of every side."""


def has_uvloop() -> bool:
    """Return whether uvloop is installed."""
    return version("uvloop") is not None


def rounds_of(quick: bool) -> int:
    """Return how many rounds are run."""
    return 1 if quick else 3


def run_rounds(
    rounds: int,
    sides: Mapping[str, Run],
    log: Callable[[str, Figures], None],
    *,
    must_be_busy: Collection[str] = (),
) -> Rounds:
    """Run all sides in turn, round by round, so that a slow spell of the machine meets all of them.

    Args:
        sides: By name, in the order they are run in.
        log: Takes the name of a side and its figures after each run.
        must_be_busy: Sides whose run is void where they were busy for less than `LEAST_BUSY`. Such a run is repeated at
            once; a round in which it stays void counts only where every round has one.
    """
    done: list[dict[str, Figures]] = []
    for _ in range(rounds):
        found: dict[str, Figures] = {}
        for name, run in sides.items():
            for attempt in range(ATTEMPTS if name in must_be_busy else 1):
                figures = run()
                log(f"{name}, once more" if attempt else name, figures)
                if name not in found or figures["busy"] > found[name]["busy"]:
                    found[name] = figures
                if figures["busy"] >= LEAST_BUSY:
                    break
        done.append(found)
    valid = [found for found in done if all(found[name]["busy"] >= LEAST_BUSY for name in must_be_busy)]
    return valid or done


def compare(
    name: str,
    rounds: Rounds,
    subject: str,
    peer: str,
    *,
    value: str = "cost",
    unit: str = "µs CPU/event",
    peer_name: str | None = None,
    note: str = "",
    **more: Any,
) -> Row:
    """Return the row of two sides: the medians of both, and the ratio of each round.

    Args:
        subject: The name of our side in the rounds.
        peer: The name of the other.
        value: Which of the figures.
        peer_name: What the row calls the peer; None where that is its name in the rounds.
        note: What else was seen, besides the rates.
        more: Further fields of the row.
    """
    ours, theirs = (median_run([found[each] for found in rounds], value) for each in (subject, peer))
    rates = f"{ours['rate']:,.0f}/s, peer {theirs['rate']:,.0f}/s" if "rate" in ours and "rate" in theirs else ""
    return Row(
        name=name,
        subject=subject,
        peer=peer_name or peer,
        subject_value=ours[value],
        peer_value=theirs[value],
        unit=unit,
        subject_busy=ours.get("busy"),
        peer_busy=theirs.get("busy"),
        subject_faults=ours.get("faults"),
        peer_faults=theirs.get("faults"),
        build=PURE if subject == OURS_PURE else build(),
        loop="uvloop" if subject.endswith(OURS_ON_UVLOOP) else "asyncio",
        ratios=tuple(found[peer][value] / found[subject][value] for found in rounds),
        note="; ".join(filter(None, (rates, note))),
        **more,
    )


def shown(run: Figures) -> str:
    """Return a run's figures as text."""
    return (
        f"{run['cost']:.2f} µs CPU per event, {run['rate']:,.0f} events/s, {run['busy']:.0%} busy, "
        f"{run['faults']:.3f} page faults per event"
    )


def shown_latency(run: Figures) -> str:
    """Return a latency run's figures as text."""
    return (
        f"p50 {run['p50']:.2f} ms, p99 {run['p99']:.2f} ms, {run['cost']:.0f} µs CPU per send, "
        f"{run['faults']:.3f} page faults per send"
    )
