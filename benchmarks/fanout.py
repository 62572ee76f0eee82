"""The benchmark `fanout`: several consumers of the same events, beside as many clients of azure-eventhub."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.certificates import certificate
from benchmarks.comparing import OURS, TIMEOUT, Figures, Log, Run, compare, rounds_of, run_rounds, shown
from benchmarks.peers import is_plain, others, receivers, try_all
from benchmarks.processes import CannedService, run_side
from benchmarks.report import Row

CONSUMERS = (1, 2, 4, 8)
PARTITIONS = 4
ALLOWED = 1.5
"""How many times the cost of one subscription eight may cost, before the handlers: see `fanout`."""

PAIRS = {True: 5, False: 15}
"""How many times one and the most subscriptions are run one after the other, each time the other one first: in a quick
run, and otherwise."""

READING = {False: "nothing read", True: "four fields read"}
"""What the handlers do."""


def fanout(quick: bool, log: Log) -> list[Row]:
    """Subscriptions of one host on one link, beside clients of azure-eventhub, each with a consumer group of its own.

    The cost is that of an event published: what all its deliveries cost together.

    What eight subscriptions cost beside one is measured *before the handlers*: what the handlers cost by themselves is
    subtracted from the CPU time of the process. That is measured by calling a handler with the newest batches again, in
    a loop. What is left is receiving, decoding (once for all subscriptions) and delivering.
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
            pairs = [_pair(number, {**ours, "reads": reads, "events": ours_events}) for number in range(PAIRS[quick])]
            rows.append(_beside_one(pairs, reading))
            log(f"{reading}, {rows[-1].name}: {rows[-1].note}")
    return rows


def _pair(number: int, arguments: Mapping[str, object]) -> Figures:
    """Run one subscription and the most of them, one after the other in one process."""
    first, second = (1, CONSUMERS[-1]) if number % 2 else (CONSUMERS[-1], 1)
    return run_side("ours:fanout_pair", TIMEOUT, first=first, second=second, **arguments)


def _beside_one(pairs: Sequence[Figures], reading: str) -> Row:
    """Make the row of the most subscriptions beside one: how many times as much they cost before the handlers."""
    one, most = "1", f"{CONSUMERS[-1]}"
    times = sorted(found[most] / found[one] for found in pairs)
    costs = {each: statistics.median(found[each] for found in pairs) for each in pairs[0]}
    return Row(
        name=f"fanout: {_count(CONSUMERS[-1])} beside one, {reading}",
        peer="bound",
        subject_value=statistics.median(times),
        peer_value=ALLOWED,
        unit="times one",
        goal=1.0,
        ratios=tuple(ALLOWED / each for each in times),
        note=(
            f"medians of {len(pairs)} pairs: {costs[most]:.2f} µs CPU/event beside {costs[one]:.2f}, without the "
            f"handlers, which cost {costs[f'{most} handlers']:.2f} and {costs[f'{one} handlers']:.2f}; pairs of "
            f"{times[0]:.2f} to {times[-1]:.2f}"
        ),
    )


def _show(log: Log, reading: str, side: str, run: Figures) -> None:
    log(f"{reading}, {side}: {shown(run)}")


def _name(side: str, consumers: int) -> str:
    return f"{side} × {consumers}"


def _count(consumers: int) -> str:
    return "1 subscription" if consumers == 1 else f"{consumers} subscriptions"
