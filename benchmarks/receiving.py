"""The benchmarks `receive` and `stages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.certificates import Certificate, certificate
from benchmarks.comparing import (
    OURS,
    OURS_ON_UVLOOP,
    OURS_PURE,
    TIMEOUT,
    Figures,
    Log,
    Run,
    compare,
    has_uvloop,
    rounds_of,
    run_rounds,
    shown,
)
from benchmarks.meter import median_run
from benchmarks.peers import (
    Configuration,
    best_of_each_client,
    is_plain,
    others,
    receivers,
    try_all,
)
from benchmarks.processes import PURE, CannedService, build, is_compiled, run_side
from benchmarks.report import Row

GOAL = 10.0
BUDGET = {"engine": 1.0, "event": 2.5, "pump": 1.5}
"""Microseconds of CPU per 1 KiB event (design, section 4)."""

STAGES = {
    "engine": "engine, from bytes read to messages",
    "event": "event object, four fields read",
    "varied_event": "event object, four fields read, varied events",
    "pump": "cache, cursor and pump",
}
FLOOR_TLS = "floor: asyncio alone, the same bytes over TLS"
FLOOR_TCP = "floor: asyncio alone, the same bytes over TCP"
FLOOR_FIELDS = "floor: four decoded fields in a loop"


@dataclass(frozen=True, slots=True)
class Condition:
    """What is received, and how."""

    kind: str
    is_tls: bool
    partitions: int

    @property
    def name(self) -> str:
        """What the rows call it."""
        count = "1 partition" if self.partitions == 1 else f"{self.partitions} partitions"
        return f"{self.kind}, {'TLS' if self.is_tls else 'TCP'}, {count}"


HEADLINE = Condition("varied", True, 4)
CONDITIONS = (
    HEADLINE,
    Condition("uniform", True, 4),
    Condition("varied", False, 4),
    Condition("uniform", False, 4),
    Condition("varied", True, 1),
    Condition("varied", True, 32),
    Condition("varied", True, 256),
)
QUICK_CONDITIONS = (
    HEADLINE,
    Condition("varied", False, 4),
    Condition("uniform", False, 4),
    Condition("varied", True, 32),
)


@dataclass(frozen=True, slots=True)
class _Amounts:
    """How many events the service holds, and how many each side measures over."""

    available: int
    ours: int
    theirs: int
    tried: int


def receive(quick: bool, log: Log) -> list[Row]:
    """Events through a host, beside `EventHubConsumerClient.receive_batch` in its best configuration."""
    rows: list[Row] = []
    candidates: list[Configuration] = []
    with certificate() as made:
        for condition in QUICK_CONDITIONS if quick else CONDITIONS:
            amounts = _Amounts(80_000, 60_000, 4_000, 2_000) if quick else _Amounts(400_000, 360_000, 60_000, 12_000)
            if condition.partitions > HEADLINE.partitions:
                # More is read before the last partition has had an event, which does not count.
                amounts = replace(amounts, ours=amounts.available // 2)
            if condition.partitions == HEADLINE.partitions:
                # A short run of each is cheap there; elsewhere only the best of each client is tried.
                candidates = [each for each in receivers() if not quick or is_plain(each)]
            found, best = _receive(condition, amounts, candidates, made, quick, log)
            rows += found
            if condition == HEADLINE:
                candidates = best
    return rows


def _receive(
    condition: Condition,
    amounts: _Amounts,
    candidates: list[Configuration],
    made: Certificate,
    quick: bool,
    log: Log,
) -> tuple[list[Row], list[Configuration]]:
    """Measure one condition.

    Returns:
        Its rows, and the best configuration of each of the peer's clients.
    """
    is_headline = condition == HEADLINE
    name = f"receive: {condition.name}"
    log(f"{condition.name}: preparing {amounts.available} events")
    tls = made if condition.is_tls else None
    with CannedService(condition.kind, condition.partitions, amounts.available, tls) as service:
        stated: dict[str, object] = {
            "kind": condition.kind,
            "partitions": condition.partitions,
            "available": amounts.available,
        }
        ours, theirs = ({**service.place(side), **stated} for side in ("ours", "theirs"))
        tried = try_all(
            candidates,
            lambda each: each.run("receive", **theirs, events=amounts.tried),
            lambda text: log(f"{condition.name}, {text}"),
            shown,
        )
        best = next(iter(tried))
        sides: dict[str, Run] = {
            OURS: lambda: run_side("ours:receive", TIMEOUT, **ours, events=amounts.ours),
            best.peer: lambda: best.run("receive", **theirs, events=amounts.theirs),
        }
        busy = [OURS]
        if is_headline and has_uvloop():
            sides[OURS_ON_UVLOOP] = lambda: run_side("ours:receive", TIMEOUT, "uvloop", **ours, events=amounts.ours)
            busy.append(OURS_ON_UVLOOP)
        if is_headline and is_compiled():
            sides[OURS_PURE] = lambda: run_side("ours:receive", TIMEOUT, "asyncio", True, **ours, events=amounts.ours)
            busy.append(OURS_PURE)
        if condition.kind == "varied" and condition.partitions == HEADLINE.partitions:
            sides[FLOOR_TLS if condition.is_tls else FLOOR_TCP] = lambda: _read_raw(service, amounts.available)
        if is_headline:
            sides[FLOOR_FIELDS] = lambda: run_side("floors:fields", TIMEOUT, kind=condition.kind)
        before = service.counts()
        rounds = run_rounds(
            rounds_of(quick), sides, lambda who, run: log(f"{condition.name}, {who}: {shown(run)}"), must_be_busy=busy
        )
        after = service.counts()
    cost = (after["cpu"] - before["cpu"]) / (after["delivered"] - before["delivered"]) * 1e6
    log(f"{condition.name}: the service took {cost:.2f} µs of CPU per event delivered")
    goal = GOAL if is_headline else None
    note = f"the service took {cost:.2f} µs of CPU per event; {others(tried)}"
    rows = [compare(name, rounds, OURS, best.peer, is_headline=is_headline, goal=goal, must_be_busy=True, note=note)]
    if OURS_ON_UVLOOP in sides:
        rows.append(compare(f"{name}, on uvloop", rounds, OURS_ON_UVLOOP, best.peer, must_be_busy=True))
    if OURS_PURE in sides:
        rows.append(compare(f"{name}, in pure Python", rounds, OURS_PURE, best.peer, must_be_busy=True))
    rows += [
        compare(f"{name}, beside its {text}", rounds, OURS, floor)
        for floor, text in ((FLOOR_TLS, "TLS floor"), (FLOOR_TCP, "socket floor"), (FLOOR_FIELDS, "reading floor"))
        if floor in sides
    ]
    if is_headline:
        rows += _tried_rows(name, tried)
    return rows, best_of_each_client(tried)


def _read_raw(service: CannedService, events: int) -> Figures:
    authority = None if service.certificate is None else service.certificate.authority
    size = service.counts()["size"]
    return run_side("floors:stream", TIMEOUT, port=service.raw_port, size=size, events=events, ca_file=authority)


def _tried_rows(name: str, tried: Mapping[Configuration, Figures]) -> list[Row]:
    """Return a row for each configuration that was tried. It has no ratio: a short run is not compared with."""
    return [
        Row(
            name=f"{name}, azure-eventhub {configuration.name}",
            subject=configuration.peer,
            peer="",
            subject_value=figures["cost"],
            peer_value=None,
            unit="µs CPU/event",
            subject_busy=figures["busy"],
            subject_faults=figures["faults"],
            loop="uvloop" if configuration.client.endswith("uvloop") else "asyncio",
            build="pure Python",
        )
        for configuration, figures in tried.items()
    ]


def stages(quick: bool, log: Log) -> list[Row]:
    """The stages of receiving, each alone and without a socket, beside a floor that does the least in the same turn.

    Each in pure Python, and below that with the compiled core if there is one. The floor is Python code that does not
    use the library, the same in both builds: all rows are in terms of one, so that their microseconds can be compared.
    """
    builds = (True, False) if is_compiled() else (True,)
    rounds = 20 if quick else 150
    runs: dict[bool, list[Mapping[str, float]]] = {is_pure: [] for is_pure in builds}
    # In several processes: where their memory lies is a matter of chance, and costs or saves some per cent.
    for _ in range(1 if quick else 3):
        for is_pure in builds:
            run = run_side("stages:stages", 120, "asyncio", is_pure, rounds=rounds)
            runs[is_pure].append(run)
            name = PURE if is_pure else build()
            log(f"{name}: making an event costs {run['making']:.2f} µs, counted with the event, not with the pump")
    floor = median_run([run for each in runs.values() for run in each], "floor")["floor"]
    rows = [
        Row(
            name="stages: floor, 1 KiB cut out and three numbers unpacked, in Python code",
            peer="",
            subject="floor",
            subject_value=floor,
            peer_value=None,
            unit="µs CPU/event",
            subject_busy=1.0,
            build=PURE,
        )
    ]
    for stage, text in STAGES.items():
        for is_pure in builds:
            ratios = [run["floor"] / run[stage] for run in runs[is_pure]]
            ratio = sorted(ratios)[(len(ratios) - 1) // 2]
            rows.append(
                Row(
                    name=f"stages: {text}{'' if is_pure else f', {build()}'}",
                    peer="floor",
                    subject_value=floor / ratio,
                    peer_value=floor,
                    unit="µs CPU/event",
                    subject_busy=1.0,
                    limit=BUDGET.get(stage) if is_pure else None,
                    build=PURE if is_pure else build(),
                    ratios=tuple(ratios),
                )
            )
    return rows
