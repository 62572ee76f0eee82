"""The benchmark `spark-source`: the Spark source beside rows that are in memory already, and beside the obvious one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.meter import median_run
from benchmarks.processes import EmulatorProcess, LimitedEmulator, Side, run_side, version
from benchmarks.report import Row, sized

Log = Callable[[str], None]

MEMORY = "Spark, rows in memory"
OBVIOUS = f"azure-eventhub {version('azure-eventhub') or ''}, tuples".replace(" ,", ",")
CEILING_GOAL = 0.5
OBVIOUS_GOAL = 10.0
IDLE_LIMIT = 2.0
GROWTH_ALLOWED = 64.0
"""MiB by which a worker's highest resident memory may move: pieces of 16 MiB come and go, in the allocator's order."""
HUB = "bench"
PARTITIONS, BODY_SIZE = 4, 1024
"""The hub's partitions, and the bytes of a body, unless a row says otherwise."""
FURTHER = ((4, 100), (32, 1024), (32, 100), (128, 1024), (128, 100))
"""What one round of rates is measured with too."""
TIMEOUT = 900.0


def source(quick: bool, log: Log) -> list[Row]:
    """Rows per second and CPU per row, the cost of a trigger and of an idle query, memory, the use of kept links."""
    rows = _rates(PARTITIONS, BODY_SIZE, ("ours", "memory", "obvious"), quick, log, rounds=1 if quick else 3)
    rows += _fixed_costs(quick, log)
    rows.append(_memory(quick, log))
    for partitions, body_size in () if quick else FURTHER:
        rows += _rates(partitions, body_size, ("ours", "memory"), quick, log, rounds=1)
    return rows


def _rates(partitions: int, body_size: int, kinds: Sequence[str], quick: bool, log: Log, *, rounds: int) -> list[Row]:
    # The emulator keeps 1 GiB, so what is read has to fit.
    events, per_batch = (240_000, 40_000) if quick else (640_000, 80_000)
    few, few_per_batch = (24_000, 4_000) if quick else (64_000, 8_000)
    runs: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in kinds}
    what = f"{partitions} partitions, events of {sized(body_size)}"
    with LimitedEmulator({HUB: partitions}) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": HUB}
        log(f"filling {events} events: {what}")
        run_side("ours:fill", TIMEOUT, **place, partitions=partitions, events=events, body_size=body_size)
        for _ in range(rounds):
            for kind, found in runs.items():
                options = {"kind": kind, "service": emulator.pid, "body_size": body_size}
                # Rows in memory come from as many tasks in every row.
                options["partitions"] = PARTITIONS if kind == "memory" else partitions
                options["events"], options["per_batch"] = (few, few_per_batch) if kind == "obvious" else (
                    events, per_batch,
                )  # fmt: skip
                found.append(run_side("spark_source:rate", TIMEOUT, **place, **options))
                log(f"{what}, {kind}: {_told(found[-1])}")
    ours, memory = (median_run(runs[kind], "wall") for kind in ("ours", "memory"))
    limited = (
        f"rounds: {rounds}; the emulator took {ours['service']:.2f} µs of CPU per row besides, "
        f"and the cores were {ours['busy']:.0%} busy"
    )
    note = f"{ours['rate']:,.0f} rows/s, peer {{:,.0f}}"
    rows = [
        _row(
            f"spark-source: time, {what}",
            MEMORY,
            ours["wall"],
            memory["wall"],
            "µs/row",
            CEILING_GOAL,
            f"{note.format(memory['rate'])}; {limited}",
        ),
        _row(f"spark-source: CPU of Spark, {what}", MEMORY, ours["cost"], memory["cost"], "µs CPU/row", None, ""),
    ]
    if "obvious" not in runs:
        return rows
    obvious = median_run(runs["obvious"], "wall")
    return [
        *rows,
        _row(
            "spark-source: time, beside tuples",
            OBVIOUS,
            ours["wall"],
            obvious["wall"],
            "µs/row",
            OBVIOUS_GOAL,
            note.format(obvious["rate"]),
        ),
        _row(
            "spark-source: CPU of Spark, beside tuples", OBVIOUS, ours["cost"], obvious["cost"], "µs CPU/row", None, ""
        ),
    ]


def _row(name: str, peer: str, value: float, other: float | None, unit: str, goal: float | None, note: str) -> Row:
    return Row(name=name, peer=peer, subject_value=value, peer_value=other, unit=unit, goal=goal, note=note)


def _fixed_costs(quick: bool, log: Log) -> list[Row]:
    events, batches = 8_000, 20
    with EmulatorProcess(PARTITIONS) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
        # As many as are read: a row per partition and batch.
        warm_up = 5
        few = PARTITIONS * (batches + warm_up)
        run_side("ours:fill", TIMEOUT, **place, partitions=PARTITIONS, events=few)
        options = {"partitions": PARTITIONS, "batches": batches, "warm_up": warm_up}
        ours, memory = (
            run_side("spark_source:trigger", TIMEOUT, kind=kind, **place, **options)["median"]
            for kind in ("ours", "memory")
        )
        log(f"a trigger of {PARTITIONS} rows: {ours:.0f} ms, rows in memory {memory:.0f} ms")
        idle = run_side("spark_source:idle", TIMEOUT, **place, seconds=10 if quick else 60, settle=5)
        log(
            f"idle: {idle['default_ours']:.2f} % of a core in our process, {idle['default_all']:.2f} % in all of "
            f"Spark; at a trigger of 1 s {idle['second_ours']:.2f} % and {idle['second_all']:.2f} %"
        )
        run_side("ours:fill", TIMEOUT, **place, partitions=PARTITIONS, events=events)
        hits = run_side("spark_source:hits", TIMEOUT, **place, events=events + few, per_batch=events // 20)
        log(f"of {hits['ranges']:.0f} ranges, {hits['links']:.0%} on a kept link")
    return [
        _row("spark-source: a trigger of 4 rows", MEMORY, ours, memory, "ms", None, "in the median"),
        Row(
            name="spark-source: an idle query, all of Spark",
            peer="limit",
            subject_value=idle["default_all"],
            peer_value=None,
            unit="% of a core",
            limit=IDLE_LIMIT,
            note=(
                f"at the default trigger, which asks without a pause; our process {idle['default_ours']:.2f} %. "
                f"At a trigger of one second: {idle['second_all']:.2f} %, and {idle['second_ours']:.2f} %"
            ),
        ),
        _row("spark-source: ranges on a kept link", "all", hits["links"] * 100, None, "%", None, "two slots"),
    ]


def _memory(quick: bool, log: Log) -> Row:
    fills, fill = (6, 200_000) if quick else (20, 500_000)
    with EmulatorProcess(PARTITIONS) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
        with Side("spark_source:memory", **place, fills=fills, fill=fill, per_batch=100_000) as side:
            for _ in range(fills):
                side.wait_ready(TIMEOUT)
                run_side("ours:fill", TIMEOUT, **place, partitions=PARTITIONS, events=fill, body_size=100)
                side.go_on()
            run = side.result(TIMEOUT)
    log(f"workers: {run['early']:.0f} MiB early, {run['late']:.0f} MiB late")
    return Row(
        name=f"spark-source: resident memory of a worker after {fills * fill:,} rows",
        peer="bound",
        subject_value=run["late"],
        peer_value=run["early"] + GROWTH_ALLOWED,
        unit="MiB",
        goal=1.0,
        note=f"highest of the last third; highest of the first was {run['early']:.0f} MiB",
    )


def _told(run: Mapping[str, float]) -> str:
    return (
        f"{run['rate']:,.0f} rows/s, {run['cost']:.1f} µs CPU of Spark per row, {run['service']:.1f} µs of the emulator"
    )
