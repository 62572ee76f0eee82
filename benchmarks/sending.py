"""The benchmarks `send`, `buffered`, `latency` and `idempotent`: over TLS, and where goals are set for it over TCP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.certificates import certificate
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
    shown_latency,
)
from benchmarks.peers import Configuration, clients, others, try_all
from benchmarks.processes import BenchmarkError, CannedService, is_compiled, run_side
from benchmarks.report import Row

SEND_GOAL = 10.0
BUFFERED_GOAL = 10.0
PLAIN = "eventpump, plain"
FLOOR = "asyncio, prepared bytes"
FLOOR_ON_UVLOOP = f"{FLOOR} on uvloop"
PARTITIONS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent.

    Args:
        name: What the rows call it.
        kind: One of `benchmarks.events.KINDS`.
        body_size: Of uniform events, in bytes.
    """

    name: str
    kind: str
    body_size: int = 1024

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments of a side that say so."""
        return {"kind": self.kind, "body_size": self.body_size}


AIO = Configuration("aio")
"""The client beside which the goals over TCP are set."""

VARIED = Load("varied", "varied")
KIBIBYTE = Load("1 KiB", "uniform")
SMALL = Load("100 B", "uniform", 100)


@dataclass(frozen=True, slots=True)
class TcpGoal:
    """The least ratios to the aio client for uniform events over TCP.

    Args:
        pure: Of the build without the compiled core.
        compiled: Of the other one.
    """

    pure: float
    compiled: float


SEND_OVER_TCP = {KIBIBYTE: TcpGoal(18, 35), SMALL: TcpGoal(30, 100)}
BUFFERED_OVER_TCP = {KIBIBYTE: TcpGoal(13, 16), SMALL: TcpGoal(17, 24)}


@dataclass(frozen=True, slots=True)
class Work:
    """A method of sending, and how much to send.

    Args:
        function: Of the sides.
        ours: How much our side does.
        theirs: How much the peer does.
        tried: How much each of the peer's configurations does when they are tried.
    """

    function: str
    ours: Mapping[str, object]
    theirs: Mapping[str, object]
    tried: Mapping[str, object]
    show: Callable[[Figures], str] = field(default=shown)


def send(quick: bool, log: Log) -> list[Row]:
    """Full batches, beside `EventHubProducerClient.send_batch`."""
    rows = []
    for load in (VARIED, KIBIBYTE, SMALL):
        work = _batches(load, quick)
        rows += _beside_peer(f"send: {load.name}", load, work, quick, log, goal=SEND_GOAL)
    for load, goal in SEND_OVER_TCP.items():
        rows += _over_tcp(f"send: {load.name}", load, _batches(load, quick), quick, log, goal)
    return rows


def _batches(load: Load, quick: bool) -> Work:
    # A batch holds about ten times as many events of 100 B.
    ours, theirs, tried = (60, 16, 8) if quick else (160, 40, 10)
    if load is SMALL:
        ours, theirs, tried = (16, 8, 6) if quick else (40, 12, 6)
    common = {"partitions": PARTITIONS, "warm_up": 4}
    return Work(
        "send",
        {**common, "batches": ours},
        {**common, "batches": theirs},
        {**common, "warm_up": 2, "batches": tried},
    )


def buffered(quick: bool, log: Log) -> list[Row]:
    """Single events through a buffer, beside `EventHubProducerClient(buffered_mode=True)`."""
    rows = []
    for load in (VARIED, KIBIBYTE, SMALL):
        rows += _beside_peer(f"buffered: {load.name}", load, _singly(quick), quick, log, goal=BUFFERED_GOAL)
    for load, goal in BUFFERED_OVER_TCP.items():
        rows += _over_tcp(f"buffered: {load.name}", load, _singly(quick), quick, log, goal)
    return rows


def _singly(quick: bool) -> Work:
    ours, theirs, tried = (40_000, 6_000, 3_000) if quick else (200_000, 30_000, 8_000)
    amounts = [{"events": events, "warm_up": events // 10} for events in (ours, theirs, tried)]
    return Work("buffered", amounts[0], amounts[1], amounts[2])


def latency(quick: bool, log: Log) -> list[Row]:
    """Single events, each sent when the one before is stored, beside `EventHubProducerClient.send_event`."""
    rows = []
    for load in (VARIED, KIBIBYTE):
        rows += _beside_peer(f"latency: {load.name}", load, _one_by_one(quick), quick, log)
    return rows


def _one_by_one(quick: bool) -> Work:
    sends, tried = (300, 100) if quick else (2_000, 500)
    many, few = ({"sends": number, "warm_up": 50} for number in (sends, tried))
    return Work("latency", many, many, few, shown_latency)


def idempotent(quick: bool, log: Log) -> list[Row]:
    """What `idempotent=True` costs: sending full batches, through a buffer, and the time of single sends."""
    rows: list[Row] = []
    works = [(load, _batches(load, quick)) for load in (VARIED, KIBIBYTE, SMALL)]
    works += [(load, _singly(quick)) for load in (VARIED, SMALL)]
    works.append((VARIED, _one_by_one(quick)))
    with certificate() as made, CannedService("uniform", PARTITIONS, 0, made) as service:
        for load, work in works:
            rows += _beside_plain(service, load, work, quick, log)
    return rows


def _beside_plain(service: CannedService, load: Load, work: Work, quick: bool, log: Log) -> list[Row]:
    """Measure our idempotent producer beside our plain one."""
    name = f"idempotent: {work.function}, {load.name}"
    sides: dict[str, Run] = {
        OURS: _ours(service, load, work, idempotent=True),
        PLAIN: _ours(service, load, work),
    }
    rounds = run_rounds(rounds_of(quick), sides, lambda who, run: log(f"{name}, {who}: {work.show(run)}"))
    return [
        compare(
            f"{name}{text}", rounds, OURS, PLAIN,
            value=value, unit=unit, is_headline=load is VARIED and value != "p99",
        )
        for value, text, unit in _values(work)
    ]  # fmt: skip


def _beside_peer(name: str, load: Load, work: Work, quick: bool, log: Log, *, goal: float | None = None) -> list[Row]:
    """Measure beside the best of the peer's configurations."""
    with certificate() as made, CannedService("uniform", PARTITIONS, 0, made) as service:

        def theirs(configuration: Configuration, amount: Mapping[str, object]) -> Figures:
            return _theirs(service, load, work, configuration, amount)

        by = "p50" if work.function == "latency" else "cost"
        tried = try_all(
            clients(), lambda each: theirs(each, work.tried), lambda text: log(f"{name}, {text}"), work.show, by
        )
        best = next(iter(tried))
        sides: dict[str, Run] = {
            OURS: _ours(service, load, work),
            best.peer: lambda: theirs(best, work.theirs),
        }
        if load is VARIED and has_uvloop():
            sides[OURS_ON_UVLOOP] = _ours(service, load, work, loop="uvloop")
        if work.function == "latency":
            sides[FLOOR] = _floor(service, load, work)
            if OURS_ON_UVLOOP in sides:
                sides[FLOOR_ON_UVLOOP] = _floor(service, load, work, loop="uvloop")
        rounds = run_rounds(rounds_of(quick), sides, lambda who, run: log(f"{name}, {who}: {work.show(run)}"))
    rows = []
    for value, text, unit in _values(work):
        is_headline = load is VARIED and value != "p99"
        note = others(tried, by) if value == by else ""
        rows.append(
            compare(
                f"{name}{text}", rounds, OURS, best.peer,
                value=value, unit=unit, is_headline=is_headline, goal=goal, note=note,
            )
        )  # fmt: skip
        if OURS_ON_UVLOOP in sides:
            rows.append(compare(f"{name}{text}, on uvloop", rounds, OURS_ON_UVLOOP, best.peer, value=value, unit=unit))
        for ours, floor, where in ((OURS, FLOOR, ""), (OURS_ON_UVLOOP, FLOOR_ON_UVLOOP, " on uvloop")):
            if floor in sides:
                rows.append(compare(f"{name}{text}, floor{where}", rounds, ours, floor, value=value, unit=unit))
    return rows


def _over_tcp(name: str, load: Load, work: Work, quick: bool, log: Log, goal: TcpGoal) -> list[Row]:
    """Measure both builds over TCP beside the peer's aio client."""
    name = f"{name}, TCP, aio client"
    with CannedService("uniform", PARTITIONS, 0) as service:
        sides: dict[str, Run] = {
            OURS: _ours(service, load, work),
            AIO.peer: lambda: _theirs(service, load, work, AIO, work.theirs),
        }
        if is_compiled():
            sides[OURS_PURE] = _ours(service, load, work, is_pure=True)
        rounds = run_rounds(rounds_of(quick), sides, lambda who, run: log(f"{name}, {who}: {work.show(run)}"))
    rows = [compare(name, rounds, OURS, AIO.peer, goal=goal.compiled if is_compiled() else goal.pure)]
    if OURS_PURE in sides:
        rows.append(compare(f"{name}, in pure Python", rounds, OURS_PURE, AIO.peer, goal=goal.pure))
    return rows


def _theirs(
    service: CannedService, load: Load, work: Work, configuration: Configuration, amount: Mapping[str, object]
) -> Figures:
    """Run the peer's side, and check that the service has every event."""
    arguments = {**service.place("theirs"), **_arguments(load, work), **amount}
    return checked(service, lambda: configuration.run(work.function, **arguments))


def _values(work: Work) -> tuple[tuple[str, str, str], ...]:
    """Return the figures that have a row: each with what it adds to the row's name, and its unit."""
    if work.function == "latency":
        return (("p50", ", p50", "ms"), ("p99", ", p99", "ms"), ("cost", ", CPU per send", "µs CPU/event"))
    return (("cost", "", "µs CPU/event"),)


def _arguments(load: Load, work: Work) -> dict[str, object]:
    if work.function == "latency":
        # Its uniform events are of 1 KiB.
        return {"kind": load.kind}
    return load.arguments


def _ours(
    service: CannedService,
    load: Load,
    work: Work,
    *,
    loop: str = "asyncio",
    idempotent: bool = False,
    is_pure: bool = False,
) -> Run:
    """Return what runs our side, and checks that the service has every event."""
    arguments = {**service.place("ours"), **_arguments(load, work), **work.ours, "idempotent": idempotent}
    return lambda: checked(service, lambda: run_side(f"ours:{work.function}", TIMEOUT, loop, is_pure, **arguments))


def checked(service: CannedService, run: Run) -> Figures:
    """Run a side.

    Raises:
        BenchmarkError: The service did not take as many events as the side sent.
    """
    before = service.counts()["events"]
    figures = run()
    taken = service.counts()["events"] - before
    if taken != figures["sent"]:
        raise BenchmarkError(f"the service took {taken:,} events of {figures['sent']:,} sent")
    return figures


def _floor(service: CannedService, load: Load, work: Work, *, loop: str = "asyncio") -> Run:
    """Return what runs the least that a client on an event loop does for each send."""
    arguments = {**service.place("ours"), "kind": load.kind, **work.ours}
    return lambda: checked(service, lambda: run_side("floors:exchange", TIMEOUT, loop, **arguments))
