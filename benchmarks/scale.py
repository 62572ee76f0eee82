"""The benchmark `scale`: what hosts of many partitions cost, how that grows, and how often a fleet asks its store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from benchmarks.comparing import HELD, OURS, OURS_HELD, PEER, Log
from benchmarks.processes import EmulatorProcess, run_side, version
from benchmarks.report import Row
from tests.support.azurite import Azurite

PARTITIONS = (1, 32, 256, 1024)
QUICK_PARTITIONS = (1, 32, 256)
HOSTS = (1, 2, 4, 8, 16)
QUICK_HOSTS = (1, 16)
SHARED = 256
"""Partitions that several hosts share."""
HOLDING = (64, 256)
"""Partitions of idle hosts with a `delivery_interval` and without."""
EVENTS = 100_000
LEAST_EACH = 100
"""Events of each partition at least, so that it is not the first batch that is measured."""
IDLE = 20.0
"""Seconds: two renewals of each lease."""
FLEET, FLEET_PARTITIONS = 10, 16
"""Hosts that own idle partitions by blobs, each in the form of azure-eventhub."""
INTERVAL, PEER_INTERVAL = 20.0, 30.0
"""Seconds between two renewals by default, of ours and of azure-eventhub."""
FASTER = 20.0
"""By how much shorter the intervals are when requests are counted."""
CYCLES, QUICK_CYCLES = 20.0, 10.0
TIMEOUT = 600.0
IN_MEMORY, OVER_AMQP = "in memory", "over AMQP"

FIGURES = {
    "start": ("start to an event from each partition", "s"),
    "start_cpu": ("CPU of that", "s CPU"),
    "idle": ("idle", "% of a core"),
    "memory": ("resident memory", "MiB"),
}
"""What grows with the number of partitions, or of hosts."""
COST = ("cost per event", "µs CPU/event")


def scale(quick: bool, log: Log) -> list[Row]:
    """Hosts in one process with a source in memory, then one host and an emulator; each beside its law."""
    numbers, idle = (QUICK_PARTITIONS, IDLE / 2) if quick else (PARTITIONS, IDLE)
    events = EVENTS // 5 if quick else EVENTS

    def run(partitions: int, hosts: int, place: Mapping[str, object] = MappingProxyType({})) -> Mapping[str, float]:
        each = max(LEAST_EACH, events // partitions)
        found = run_side("scale:scale", TIMEOUT, partitions=partitions, hosts=hosts, each=each, idle=idle, **place)
        log(f"{_count(partitions)}, {_hosts(hosts)}, {OVER_AMQP if place else IN_MEMORY}: {_told(found)}")
        return found

    rows = rows_of(IN_MEMORY, {partitions: run(partitions, 1) for partitions in numbers}, "partitions", _count)
    several = {hosts: run(SHARED, hosts) for hosts in (QUICK_HOSTS if quick else HOSTS)}
    rows += rows_of(f"{SHARED} partitions", several, "hosts", _hosts)

    def over(partitions: int, **options: float) -> Mapping[str, float]:
        with EmulatorProcess(partitions) as emulator:
            place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
            run_side("ours:fill", TIMEOUT, **place, partitions=partitions, events=partitions)
            return run(partitions, 1, {**place, **options})

    over_amqp = {partitions: over(partitions) for partitions in numbers}
    rows += rows_of(OVER_AMQP, over_amqp, "partitions", _count)
    for partitions in HOLDING[:1] if quick else HOLDING:
        plain = over_amqp[partitions] if partitions in over_amqp else over(partitions)
        rows.append(held_row(partitions, over(partitions, interval=HELD), plain))
    return rows + requests(QUICK_CYCLES if quick else CYCLES, log)


def held_row(partitions: int, held: Mapping[str, float], plain: Mapping[str, float]) -> Row:
    """Return the row of an idle host with a `delivery_interval`, beside one without."""
    return Row(
        name=f"scale: {OVER_AMQP}, {_count(partitions)}, delivery_interval={HELD}, idle",
        subject=OURS_HELD,
        peer=OURS,
        subject_value=held["idle"],
        peer_value=plain["idle"],
        unit="% of a core",
    )


def requests(cycles: float, log: Log) -> list[Row]:
    """Count the requests to the store of an idle fleet, ours on a `BlobOwnershipStore` beside azure-eventhub's.

    Args:
        cycles: For how many intervals.
        log: Called with what is measured.
    """

    def run(side: str, interval: float) -> Mapping[str, float]:
        with EmulatorProcess(FLEET_PARTITIONS) as emulator, Azurite() as azurite:
            found = run_side(
                f"requests:{side}",
                TIMEOUT,
                connection_string=emulator.connection_string,
                hub=emulator.HUB,
                blob=azurite.connection_string,
                hosts=FLEET,
                partitions=FLEET_PARTITIONS,
                interval=interval / FASTER,
                cycles=cycles,
            )
        log(f"{side}: {found['per_interval']:.1f} requests per interval, {found['per_cycle']:.2f} per host's cycle")
        return found

    ours = run("ours", INTERVAL)
    has_peer = version("azure-eventhub-checkpointstoreblob-aio") is not None
    theirs = run("theirs", PEER_INTERVAL) if has_peer else None
    where = f"scale: {FLEET} idle hosts, {FLEET_PARTITIONS} partitions"
    return [
        Row(
            name=f"{where}, requests to a blob store in a cycle",
            peer=PEER,
            subject_value=ours["per_cycle"],
            peer_value=None if theirs is None else theirs["per_cycle"],
            unit="requests per host",
            note="one listing, and a renewal per partition",
        ),
        Row(
            name=f"{where}, requests to a blob store",
            peer=PEER,
            subject_value=ours["per_interval"] * 60 / INTERVAL,
            peer_value=None if theirs is None else theirs["per_interval"] * 60 / PEER_INTERVAL,
            unit="requests/min",
            note=f"at the defaults: we renew within {INTERVAL:.0f} s, and the peer after {PEER_INTERVAL:.0f} s to 36 s",
        ),
    ]


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


def rows_of(where: str, runs: Mapping[int, Mapping[str, float]], over: str, text_of: Callable[[int], str]) -> list[Row]:
    """Return the figures of runs, each that grows with their number beside what its law says.

    Args:
        where: What is common to the runs.
        runs: The figures, by the number.
        over: What the number counts.
        text_of: Returns the text of a number.
    """
    rows: list[Row] = []
    for figure, (text, unit) in {**FIGURES, "cost": COST}.items():
        fixed, each = law({number: found[figure] for number, found in runs.items()})
        has_law = figure in FIGURES
        rows += [
            Row(
                name=f"scale: {where}, {text_of(number)}, {text}",
                peer="law" if has_law else "",
                subject_value=found[figure],
                peer_value=max(0.0, fixed + each * number) if has_law else None,
                unit=unit,
                is_headline=True,
                note=f"law: {fixed:.3g} + {each:.3g} × {over}" if has_law and number == max(runs) else "",
                panel=text,
                curve=where,
                at=number,
                over=over,
            )
            for number, found in runs.items()
        ]
    return rows


def _count(partitions: int) -> str:
    return "1 partition" if partitions == 1 else f"{partitions} partitions"


def _hosts(hosts: int) -> str:
    return "1 host" if hosts == 1 else f"{hosts} hosts"


def _told(found: Mapping[str, float]) -> str:
    names: Sequence[str] = [figure for figure in (*FIGURES, "cost") if figure in found]
    return ", ".join(f"{figure} {found[figure]:.3g}" for figure in names)
