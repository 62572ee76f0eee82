"""The benchmark `programs`: typed handlers, CloudEvents, forwarding, a middleware, a checkpoint after each event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.certificates import Certificate, certificate
from benchmarks.comparing import OURS, TIMEOUT, Figures, Log, Run, compare, rounds_of, run_rounds, shown
from benchmarks.meter import median_run
from benchmarks.peers import Configuration, clients, others, try_all
from benchmarks.processes import CannedService, run_side
from benchmarks.report import Row

PARTITIONS = 4


@dataclass(frozen=True, slots=True)
class Program:
    """What is done with each event.

    Args:
        name: What the row calls it.
        side: The function of our side.
        work: Its argument.
        peer: The function of the peer's side; None where there is none.
        kind: Of the events.
        goal: The least ratio that is wanted, if any.
        is_async: Whether of the peer's clients only the aio client can do it.
    """

    name: str
    side: str
    work: str
    peer: str | None = "receive"
    kind: str = "telemetry"
    goal: float | None = None
    is_async: bool = False


PROGRAMS = (
    Program("typed handler of an app, pydantic", "app", "pydantic", goal=3.0),
    Program("typed handler of an app, msgspec", "app", "msgspec", goal=4.0),
    Program("CloudEvents in binary mode", "host", "cloudevents", kind="cloudevents"),
    Program("forwarding through a buffered producer", "host", "forward", "forward", is_async=True),
    Program("typed handler, and a middleware that reads a property", "app", "traceparent", None),
    Program("a checkpoint after each event", "host", "checkpoint", None),
)


def programs(quick: bool, log: Log) -> list[Row]:
    """Telemetry over TLS from 4 partitions, beside azure-eventhub's best client with the same decoder."""
    with certificate() as made:
        return [_row(program, made, quick, log) for program in PROGRAMS]


def _row(program: Program, made: Certificate, quick: bool, log: Log) -> Row:
    available, ours, theirs = (60_000, 40_000, 8_000) if quick else (160_000, 120_000, 4 * 10 * 300 * 2)
    name = f"programs: {program.name}"
    with CannedService(program.kind, PARTITIONS, available, made) as service:
        stated = {"partitions": PARTITIONS, "available": available, "work": program.work}
        place = service.place("ours")
        sides: dict[str, Run] = {
            OURS: partial(run_side, f"programs:{program.side}", TIMEOUT, **place, **stated, events=ours)
        }

        def run(configuration: Configuration) -> Figures:
            assert program.peer is not None
            beside = {**service.place("theirs"), **stated, "kind": program.kind, "events": theirs}
            return configuration.run(program.peer, **beside)

        note, best = "", None
        if program.peer is not None:
            candidates = _receivers(program.is_async)
            tried = try_all(candidates, run, lambda text: log(f"{program.name}, {text}"), shown)
            best, note = next(iter(tried)), others(tried)
            sides[best.peer] = partial(run, best)
        rounds = run_rounds(
            rounds_of(quick), sides, lambda who, figures: log(f"{program.name}, {who}: {shown(figures)}")
        )
    if best is not None:
        return compare(name, rounds, OURS, best.peer, goal=program.goal, note=note)
    found = median_run([each[OURS] for each in rounds])
    return Row(
        name=name,
        peer="",
        subject_value=found["cost"],
        peer_value=None,
        unit="µs CPU/event",
        subject_busy=found["busy"],
        note=f"{found['rate']:,.0f}/s",
    )


def _receivers(is_async: bool) -> Sequence[Configuration]:
    return [
        Configuration(each.client, (("prefetch", 300), ("max_batch_size", 300)))
        for each in clients()
        if not is_async or each.client != "sync"
    ]
