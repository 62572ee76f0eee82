"""The benchmark `paced`: events that come one by one or a few at a time, and not as fast as they can be read."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.certificates import Certificate, certificate
from benchmarks.comparing import HELD, OURS, OURS_HELD, TIMEOUT, Figures, Log, Rounds, Run, rounds_of, run_rounds
from benchmarks.events import WORKS
from benchmarks.meter import median_run
from benchmarks.peers import Configuration, clients
from benchmarks.processes import CannedService, Side, run_side
from benchmarks.report import Row

KIND = "telemetry"
PARTITIONS = 4
RATES = (100, 1_000, 5_000)
TOGETHER = (1, 2, 20)
READING = ("telemetry", "fields")
QUICK = ((1_000, 1), (1_000, 20))
HOLDING = (1_000, 1)
"""The rate, and how many at once, that are received with a `delivery_interval` too."""
SAVED = 1 / 0.45
"""By which factor that is to be cheaper."""
SECONDS = {True: 5, False: 12}
"""How long the events of a run come, of a quick one and otherwise."""

KEEPS_UP = 0.97
"""The part of the offered rate below which a side has no cost: it measured falling behind."""
CATCHES_UP = 1.03
"""And the part of it above which it has none: it had fallen behind, and received what waited at full speed."""
SLOWEST = 100.0
"""Milliseconds of p50 above which a side has no cost: it collects events instead of delivering them."""

FLOOR = "floor: asyncio alone, the same bytes over TLS at the same pace"


@dataclass(frozen=True, slots=True)
class Offer:
    """What comes, and what is done with it.

    Args:
        rate: Events per second.
        together: How many come at once, in one partition.
        work: One of `benchmarks.events.WORKS`.
        seconds: For how long.
    """

    rate: int
    together: int
    work: str
    seconds: int

    @property
    def events(self) -> int:
        """How many events come: the same number of full groups in each partition."""
        group = PARTITIONS * self.together
        return self.rate * self.seconds // group * group

    @property
    def name(self) -> str:
        """What the rows call it."""
        at_once = "one by one" if self.together == 1 else f"{self.together} at once"
        return f"{WORKS[self.work]}, {self.rate:,} events/s, {at_once}"

    def keeps_up(self, figures: Figures) -> bool:
        """Return whether a side has received them as they came."""
        is_as_offered = KEEPS_UP <= figures["rate"] / self.rate <= CATCHES_UP
        return is_as_offered and figures["p50"] <= SLOWEST


def paced(quick: bool, log: Log) -> list[Row]:
    """Telemetry over TLS from 4 partitions at a pace, beside azure-eventhub's clients and a bare reader."""
    offered = QUICK if quick else [(rate, together) for rate in RATES for together in TOGETHER]
    rows: list[Row] = []
    with certificate() as made, tempfile.TemporaryDirectory() as directory:
        for rate, together in offered:
            for work in READING[:1] if quick else READING:
                offer = Offer(rate, together, work, SECONDS[quick])
                rows += _offer(offer, made, Path(directory, "times"), quick, log)
    return rows


def _offer(offer: Offer, made: Certificate, times: Path, quick: bool, log: Log) -> list[Row]:
    peers = {each.peer: each for each in clients()}
    sides: dict[str, Run] = {OURS: partial(_run, offer, made, times, None)}
    sides |= {name: partial(_run, offer, made, times, each) for name, each in peers.items()}
    if is_held := (offer.rate, offer.together) == HOLDING:
        sides[OURS_HELD] = partial(_run, offer, made, times, None, HELD)
    sides[FLOOR] = partial(_floor, offer, made, times)
    rounds = run_rounds(rounds_of(quick), sides, lambda who, run: log(f"{offer.name}, {who}: {shown(run)}"))
    rows = rows_of(offer, rounds, list(peers))
    if is_held and not rows[0].is_void:
        rows.append(held_row(offer, rounds))
    return rows


def held_row(offer: Offer, rounds: Rounds) -> Row:
    """Return the row of what a `delivery_interval` saves: the cost with it, beside that without."""
    ratios = tuple(each[OURS]["cost"] / each[OURS_HELD]["cost"] for each in rounds)
    held, plain = (median_run([each[side] for each in rounds]) for side in (OURS_HELD, OURS))
    return Row(
        name=f"paced: {offer.name}, delivery_interval={HELD}",
        subject=OURS_HELD,
        peer=OURS,
        subject_value=held["cost"],
        peer_value=plain["cost"],
        unit="µs CPU/event",
        subject_busy=held["busy"],
        peer_busy=plain["busy"],
        goal=SAVED,
        ratios=ratios,
        note=shown(held),
    )


def _service(offer: Offer, made: Certificate, times: Path) -> CannedService:
    pace = {"rate": offer.rate, "together": offer.together, "times": str(times)}
    return CannedService(KIND, PARTITIONS, offer.events, made, pace)


def _run(
    offer: Offer, made: Certificate, times: Path, configuration: Configuration | None, interval: float | None = None
) -> Figures:
    """Run a side against a service of its own, whose events come once.

    Args:
        interval: Our `delivery_interval`, in seconds.
    """
    function, loop = ("ours:paced", "asyncio") if configuration is None else configuration.side("paced")
    with _service(offer, made, times) as service:
        stated: dict[str, object] = {"kind": KIND, "partitions": PARTITIONS, "events": offer.events, "work": offer.work}
        if interval is not None:
            stated["interval"] = interval
        with Side(function, loop, **service.place(function), **stated, times=str(times)) as side:
            side.wait_ready(TIMEOUT)
            service.counts()  # which completes the file of the moments
            side.go_on()
            return side.result(TIMEOUT)


def _floor(offer: Offer, made: Certificate, times: Path) -> Figures:
    with _service(offer, made, times) as service:
        size = service.counts()["size"]
        port, authority = service.raw_port, made.authority
        return run_side("floors:stream", TIMEOUT, port=port, size=size, events=offer.events, ca_file=authority)


def rows_of(offer: Offer, rounds: Rounds, peers: Sequence[str]) -> list[Row]:
    """Return the rows of an offer: cost beside the cheapest peer that keeps up, and beside the floor; p50 and p99.

    Args:
        rounds: Their figures; each round has ours, all peers' and the floor's.
        peers: The names of the peers.
    """
    found = {name: median_run([each[name] for each in rounds]) for name in (OURS, *peers, FLOOR)}
    name = f"paced: {offer.name}"
    valid = [peer for peer in peers if all(offer.keeps_up(each[peer]) for each in rounds)]
    best = min(valid, key=lambda peer: found[peer]["cost"], default=None)
    behind = [f"{peer} does not keep up ({shown(found[peer])})" for peer in peers if peer not in valid]
    if not all(offer.keeps_up(each[OURS]) for each in rounds):
        behind.append(f"{OURS} does not keep up ({shown(found[OURS])})")
        return [Row(name=name, peer=best or "", subject_value=0.0, peer_value=None, unit="µs CPU/event",
                    must_be_busy=True, note="; ".join(behind))]  # fmt: skip
    notes = [f"{each}: {shown(found[each])}" for each in (OURS, *([best] if best else []))]
    rows = [
        _row(name, "cost", "µs CPU/event", rounds, found, best, "; ".join([*notes, *behind])),
        _row(f"{name}, beside its floor", "cost", "µs CPU/event", rounds, found, FLOOR, ""),
    ]
    rows += [_row(f"{name}, {value}", value, "ms", rounds, found, best, "") for value in ("p50", "p99")]
    return rows


def _row(
    name: str, value: str, unit: str, rounds: Rounds, found: Mapping[str, Figures], peer: str | None, note: str
) -> Row:
    ratios = () if peer is None else tuple(each[peer][value] / each[OURS][value] for each in rounds)
    return Row(
        name=name,
        peer=peer or "no peer keeps up",
        subject_value=found[OURS][value],
        peer_value=None if peer is None else found[peer][value],
        unit=unit,
        subject_busy=found[OURS]["busy"],
        peer_busy=None if peer is None else found[peer]["busy"],
        ratios=ratios,
        note=note,
    )


def shown(run: Figures) -> str:
    """Return a run's figures as text."""
    text = f"{run['cost']:.0f} µs CPU per event, {run['rate']:,.0f} events/s, {run['busy']:.1%} of a core"
    if "p50" not in run:
        return text
    per_delivery = run["cost"] * run["rate"] / run["deliveries"]
    waits = f"p50 {run['p50']:.2f} ms, p99 {run['p99']:.2f} ms"
    return f"{text}, {run['deliveries']:,.0f} deliveries/s of {per_delivery:.0f} µs, {waits}"
