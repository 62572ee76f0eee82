"""The benchmarks `receive` and `stages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final

from benchmarks.certificates import Certificate, certificate
from benchmarks.comparing import (
    HELD,
    OURS,
    OURS_HELD,
    OURS_ON_UVLOOP,
    OURS_PURE,
    TIMEOUT,
    Figures,
    Log,
    Rounds,
    Run,
    compare,
    has_uvloop,
    rounds_of,
    run_rounds,
    shown,
)
from benchmarks.events import WORKS
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

GOALS = {"telemetry": 2.0, "properties": 5.0}
"""The least ratio that is wanted, by what is done with each event."""
HOLDING_COSTS = 0.05
"""The part by which a `delivery_interval` may make the reading of what waits anyway dearer."""
ALLOWED = 1.6
"""How many times as much as reading four fields the telemetry consumer may cost, apart from its JSON."""
BUDGET = {"engine": 1.0, "event": 2.5, "pump": 1.5}
"""Microseconds of CPU per 1 KiB event (design, section 4)."""

STAGES = {
    "engine": "engine, from bytes read to messages",
    "event": "event object, four fields read",
    "varied_event": "event object, four fields read, varied events",
    "pump": "cache, cursor and pump",
    "properties_0": "event object, four fields and properties read, of which there are none",
    "properties_2": "event object, four fields and two properties read",
    "properties_8": "event object, four fields and eight properties read",
    "standard": "event object, four fields and content type read",
    "telemetry": "event object, two properties, key, body as text and four fields read",
    "typed": "event object, kind of body and body read, as typed handlers do",
    "forwarded": "event object, copied and encoded to be sent",
    "cloudevent": "event object, made into a CloudEvent",
}
ABOVE: Final = {"properties_0": 0.1, "properties_2": 0.3, "properties_8": 1.0, "standard": None}
"""Stages of which the cost above the four fields is shown, and what it may be when compiled, in microseconds."""
MOST: Final = {"forwarded": 13.0, "cloudevent": 14.0}
"""What other stages may cost with the compiled core."""
MOST_PURE: Final = {"telemetry": 14.0}
"""And in pure Python."""
FLOOR_TLS = "floor: asyncio alone, the same bytes over TLS"
FLOOR_TCP = "floor: asyncio alone, the same bytes over TCP"
FLOOR_FIELDS = "floor: four decoded fields in a loop"
FLOOR_JSON = "floor: json.loads of the bodies in a loop"


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


HEADLINE = Condition("telemetry", True, 4)
"""Of these events all of `WORKS` are measured; of the others reading four fields."""
CONDITIONS = (
    Condition("varied", True, 4),
    Condition("uniform", True, 4),
    Condition("varied", False, 4),
    Condition("uniform", False, 4),
    Condition("varied", True, 1),
    Condition("varied", True, 32),
    Condition("varied", True, 256),
)
QUICK_CONDITIONS = (
    Condition("varied", True, 4),
    Condition("varied", False, 4),
    Condition("uniform", False, 4),
    Condition("varied", True, 32),
)


@dataclass(frozen=True, slots=True)
class _Amounts:
    """How many events the service holds, and how many each side measures over.

    A full run measures the peer over at least ten times what it prefetches from four partitions, and selects its
    configuration by runs of the same length: in a shorter one part of the events is decoded before the meter starts.
    """

    available: int
    ours: int
    theirs: int


_QUICK = _Amounts(80_000, 60_000, 12_000)
_FULL = _Amounts(400_000, 360_000, 4 * 10 * 3000)


def receive(quick: bool, log: Log) -> list[Row]:
    """Events through a host, beside `EventHubConsumerClient.receive_batch` in its best configuration."""
    amounts = _QUICK if quick else _FULL
    with certificate() as made:
        rows, best = _headline(amounts, made, quick, log)
        for condition in QUICK_CONDITIONS if quick else CONDITIONS:
            # More is read before the last of many partitions has had an event, which does not count.
            is_many = condition.partitions > HEADLINE.partitions
            measured = replace(amounts, ours=amounts.available // 4, theirs=amounts.theirs // 2) if is_many else amounts
            rows += _receive(condition, measured, best, made, quick, log)
    return rows


@dataclass(frozen=True, slots=True)
class _Sides:
    """Runs the sides of a condition against one service.

    Args:
        service: Has the events.
        condition: What it serves.
        amounts: How many events.
    """

    service: CannedService
    condition: Condition
    amounts: _Amounts

    def _stated(self, side: str, work: str) -> dict[str, object]:
        return {
            **self.service.place(side),
            "kind": self.condition.kind,
            "partitions": self.condition.partitions,
            "available": self.amounts.available,
            "work": work,
        }

    def ours(self, work: str, loop: str = "asyncio", *, is_pure: bool = False, interval: float = 0.0) -> Figures:
        """Run our side, with a `delivery_interval`."""
        stated = {**self._stated("ours", work), "interval": interval}
        return run_side("ours:receive", TIMEOUT, loop, is_pure, **stated, events=self.amounts.ours)

    def theirs(self, configuration: Configuration, work: str) -> Figures:
        """Run a configuration of the peer."""
        return configuration.run("receive", **self._stated("theirs", work), events=self.amounts.theirs)

    def floor(self) -> Figures:
        """Read the same bytes and discard them."""
        service = self.service
        authority = None if service.certificate is None else service.certificate.authority
        size = service.counts()["size"]
        events = self.amounts.available
        return run_side("floors:stream", TIMEOUT, port=service.raw_port, size=size, events=events, ca_file=authority)


def _headline(amounts: _Amounts, made: Certificate, quick: bool, log: Log) -> tuple[list[Row], list[Configuration]]:
    """Measure all that programs do with telemetry, in the same rounds.

    Returns:
        The rows, and the best configuration of each of the peer's clients at reading four fields.
    """
    name = HEADLINE.name
    log(f"{name}: preparing {amounts.available} events")
    with CannedService(HEADLINE.kind, HEADLINE.partitions, amounts.available, made) as service:
        run = _Sides(service, HEADLINE, amounts)
        candidates = [each for each in receivers() if not quick or is_plain(each)]
        tried = {
            work: try_all(
                candidates,
                partial(run.theirs, work=work),
                partial(_log_tried, log, f"{WORKS[work]}, {name}"),
                shown,
            )
            for work in WORKS
        }
        sides: dict[str, Run] = {}
        busy = []
        for work, found in tried.items():
            sides[_of(OURS, work)] = partial(run.ours, work)
            busy.append(_of(OURS, work))
            best = next(iter(found))
            sides[_of(best.peer, work)] = partial(run.theirs, best, work)
            if has_uvloop():
                sides[_of(OURS_ON_UVLOOP, work)] = partial(run.ours, work, "uvloop")
            if is_compiled():
                sides[_of(OURS_PURE, work)] = partial(run.ours, work, is_pure=True)
        sides[OURS_HELD] = partial(run.ours, "fields", interval=HELD)
        busy.append(OURS_HELD)
        sides[FLOOR_TLS] = run.floor
        sides[FLOOR_FIELDS] = partial(run_side, "floors:fields", TIMEOUT, kind=HEADLINE.kind)
        sides[FLOOR_JSON] = partial(run_side, "floors:json_bodies", TIMEOUT, kind=HEADLINE.kind)
        rounds = run_rounds(
            rounds_of(quick), sides, lambda who, figures: log(f"{name}, {who}: {shown(figures)}"), must_be_busy=busy
        )
    rows: list[Row] = []
    place = name.removeprefix(f"{HEADLINE.kind}, ")
    for work in reversed(WORKS):
        peer = next(iter(tried[work])).peer
        text = f"receive: {WORKS[work]}, {place}"
        beside = partial(compare, rounds=rounds, peer=_of(peer, work), peer_name=peer, must_be_busy=True)
        is_headline = work == "telemetry"
        note = others(tried[work])
        rows.append(beside(text, subject=_of(OURS, work), is_headline=is_headline, goal=GOALS.get(work), note=note))
        if has_uvloop():
            rows.append(beside(f"{text}, on uvloop", subject=_of(OURS_ON_UVLOOP, work)))
        if is_compiled():
            rows.append(beside(f"{text}, in pure Python", subject=_of(OURS_PURE, work)))
        rows += _tried_rows(text, tried[work])
    ours = _of(OURS, "fields")
    rows += [
        compare(f"receive: {name}, beside its {text}", rounds, ours, floor)
        for floor, text in ((FLOOR_TLS, "TLS floor"), (FLOOR_FIELDS, "reading floor"))
    ]
    text, least = f"receive: {name}, delivery_interval={HELD}, beside none", 1 - HOLDING_COSTS
    rows.append(compare(text, rounds, OURS_HELD, ours, must_be_busy=True, goal=least))
    rows.append(_apart_from_json(place, rounds))
    return rows, best_of_each_client(tried["fields"])


def _apart_from_json(place: str, rounds: Rounds) -> Row:
    """Return the row of the telemetry consumer without the cost of its JSON, beside reading four fields."""
    apart = [found[_of(OURS, "telemetry")]["cost"] - found[FLOOR_JSON]["cost"] for found in rounds]
    fields = [found[_of(OURS, "fields")]["cost"] for found in rounds]
    return Row(
        name=f"receive: telemetry consumer - json.loads, beside four fields, {place}",
        peer="four fields, as often as allowed",
        subject_value=median(apart),
        peer_value=ALLOWED * median(fields),
        unit="µs CPU/event",
        goal=1.0,
        ratios=tuple(ALLOWED * four / each for each, four in zip(apart, fields, strict=True)),
        note=f"json.loads of the bodies costs {median(found[FLOOR_JSON]['cost'] for found in rounds):.1f} in a loop",
    )


def _of(side: str, work: str) -> str:
    """Return the name of a side that does this with each event."""
    return f"{WORKS[work]}, {side}"


def _log_tried(log: Log, name: str, text: str) -> None:
    log(f"{name}, {text}")


def _receive(
    condition: Condition,
    amounts: _Amounts,
    candidates: list[Configuration],
    made: Certificate,
    quick: bool,
    log: Log,
) -> list[Row]:
    """Measure reading four fields in one condition. Return its rows."""
    name = f"receive: {condition.name}"
    log(f"{condition.name}: preparing {amounts.available} events")
    tls = made if condition.is_tls else None
    with CannedService(condition.kind, condition.partitions, amounts.available, tls) as service:
        run = _Sides(service, condition, amounts)
        tried = try_all(candidates, partial(run.theirs, work="fields"), partial(_log_tried, log, condition.name), shown)
        best = next(iter(tried))
        sides: dict[str, Run] = {
            OURS: partial(run.ours, "fields"),
            best.peer: partial(run.theirs, best, "fields"),
        }
        has_floor = condition.kind == "varied" and not condition.is_tls and condition.partitions == HEADLINE.partitions
        if has_floor:
            sides[FLOOR_TCP] = run.floor
        before = service.counts()
        rounds = run_rounds(
            rounds_of(quick), sides, lambda who, run: log(f"{condition.name}, {who}: {shown(run)}"), must_be_busy=[OURS]
        )
        after = service.counts()
    cost = (after["cpu"] - before["cpu"]) / (after["delivered"] - before["delivered"]) * 1e6
    log(f"{condition.name}: the service took {cost:.2f} µs of CPU per event delivered")
    note = f"the service took {cost:.2f} µs of CPU per event; {others(tried)}"
    rows = [compare(name, rounds, OURS, best.peer, must_be_busy=True, note=note)]
    if has_floor:
        rows.append(compare(f"{name}, beside its socket floor", rounds, OURS, FLOOR_TCP))
    return rows


def _tried_rows(name: str, tried: Mapping[Configuration, Figures]) -> list[Row]:
    """Return a row for each configuration that was tried."""
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


def _above(stage: str, runs: Sequence[Mapping[str, float]], floor: float, *, is_pure: bool) -> str:
    """Return what a stage costs above reading four fields of the same events, for its row; nothing of other stages."""
    if stage not in ABOVE:
        return ""
    above = median((run[stage] - run[f"{stage}, four fields"]) / run["floor"] for run in runs) * floor
    most = ABOVE[stage]
    return f"{above:.2f} above the four fields" + (f", at most {most}" if most is not None and not is_pure else "")


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
            run = run_side("stages:stages", 300, "asyncio", is_pure, rounds=rounds)
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
                    limit={**BUDGET, **MOST_PURE}.get(stage) if is_pure else MOST.get(stage),
                    note=_above(stage, runs[is_pure], floor, is_pure=is_pure),
                    build=PURE if is_pure else build(),
                    ratios=tuple(ratios),
                )
            )
    return rows
