"""The benchmark `fanout`: several consumers of the same events, beside as many clients of azure-eventhub."""

from __future__ import annotations

from functools import partial

from benchmarks.certificates import certificate
from benchmarks.comparing import OURS, TIMEOUT, Figures, Log, Rounds, Run, compare, rounds_of, run_rounds, shown
from benchmarks.peers import is_plain, others, receivers, try_all
from benchmarks.processes import CannedService, run_side
from benchmarks.report import Row

CONSUMERS = (1, 2, 4, 8)
PARTITIONS = 4
ALLOWED = 1.5
"""How many times the cost of one subscription eight may cost, before the handlers."""

READING = {False: "nothing read", True: "four fields read"}
"""What the handlers do."""


def fanout(quick: bool, log: Log) -> list[Row]:
    """Subscriptions of one host on one link, beside clients of azure-eventhub, each with a consumer group of its own.

    The cost is that of an event published: what all its deliveries cost together.
    """
    # Of theirs far more than a client prefetches: what it decoded before the first event counts would cost nothing.
    available, ours_events, theirs_events, tried_events = (
        (80_000, 40_000, 4_000, 2_000) if quick else (400_000, 240_000, 30_000, 30_000)
    )
    rows: list[Row] = []
    with certificate() as made, CannedService("varied", PARTITIONS, available, made) as service:
        stated = {"kind": "varied", "partitions": PARTITIONS, "available": available}
        ours, theirs = ({**service.place(side), **stated} for side in ("ours", "theirs"))
        candidates = [each for each in receivers() if not quick or is_plain(each)]
        tried = try_all(
            candidates,
            lambda each: each.run("fanout", **theirs, consumers=1, reads=True, events=tried_events),
            log,
            shown,
        )
        best = next(iter(tried))
        for reads, reading in READING.items():
            sides: dict[str, Run] = {}
            for consumers in CONSUMERS:
                arguments = {"consumers": consumers, "reads": reads}
                sides[_name(OURS, consumers)] = partial(
                    run_side, "ours:fanout", TIMEOUT, **ours, **arguments, events=ours_events
                )
                sides[_name(best.peer, consumers)] = partial(
                    best.run, "fanout", **theirs, **arguments, events=theirs_events
                )
            rounds = run_rounds(rounds_of(quick), sides, partial(_show, log, reading))
            rows += [
                compare(
                    f"fanout: {_count(consumers)}, {reading}",
                    rounds,
                    _name(OURS, consumers),
                    _name(best.peer, consumers),
                    is_headline=reads,
                    note=others(tried) if consumers == 1 else "",
                )
                for consumers in CONSUMERS
            ]
            rows.append(_beside_one(rounds, reading, goal=None if reads else 1.0))
    return rows


def _beside_one(rounds: Rounds, reading: str, goal: float | None) -> Row:
    """Make the row of the most subscriptions beside what they may cost: so many times the cost of one."""
    one, most = _name(OURS, 1), _name(OURS, CONSUMERS[-1])
    bounded = [{**found, "bound": {"cost": found[one]["cost"] * ALLOWED}} for found in rounds]
    times = sorted(found[most]["cost"] / found[one]["cost"] for found in rounds)
    return compare(
        f"fanout: {_count(CONSUMERS[-1])} beside one, {reading}",
        bounded,
        most,
        "bound",
        goal=goal,
        note=f"{', '.join(f'{each:.2f}' for each in times)} times the cost of one; allowed are {ALLOWED:g}",
    )


def _show(log: Log, reading: str, side: str, run: Figures) -> None:
    log(f"{reading}, {side}: {shown(run)}")


def _name(side: str, consumers: int) -> str:
    return f"{side} × {consumers}"


def _count(consumers: int) -> str:
    return "1 subscription" if consumers == 1 else f"{consumers} subscriptions"
