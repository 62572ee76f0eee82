"""The benchmark `spark-sink`: publishing a DataFrame, beside `foreachPartition` with azure-eventhub."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.comparing import PEER
from benchmarks.meter import median_run
from benchmarks.processes import LimitedEmulator, run_side
from benchmarks.report import Row, sized
from benchmarks.slow_store import slow_blobs

Log = Callable[[str], None]
Runs = dict[str, list[Mapping[str, float]]]

HUB = "bench"
PARTITIONS, BODY_SIZE = 4, 1024
"""The hub's partitions, and the bytes of a body, unless a row says otherwise."""
FURTHER = ((4, 100), (32, 1024), (32, 100), (128, 1024), (128, 100))
"""What one round of rates is measured with too."""
TRIGGER_PARTITIONS = (4, 32)
"""Those of the hub that a batch of eight rows goes to."""
TRIGGER_LIMIT = 350.0
"""Milliseconds of a batch of eight rows, with a store at a distance."""
LOOP = f"{PEER}, foreachPartition"
KINDS = {"ours": "exactly once", "far": "exactly once, store at 10 ms", "plain": "at least once"}


def sink(quick: bool, log: Log) -> list[Row]:
    """CPU and time per row by partitions and size of the rows, and a batch of eight rows."""
    with slow_blobs() as blob:
        rows = _rates(PARTITIONS, BODY_SIZE, quick, log, blob, rounds=1 if quick else 3)
        for partitions in TRIGGER_PARTITIONS:
            rows += _triggers(partitions, quick, log, blob)
        for partitions, body_size in () if quick else FURTHER:
            rows += _rates(partitions, body_size, quick, log, blob, rounds=1)
    return rows


def _options(kind: str, blob: str) -> dict[str, object]:
    """Return the arguments of a side by which it is of a kind."""
    return {"kind": "ours", "blob": blob} if kind == "far" else {"kind": kind}


def _rates(partitions: int, body_size: int, quick: bool, log: Log, blob: str, *, rounds: int) -> list[Row]:
    count, batches, peer_batches = (20_000, 2, 1) if quick else (200_000, 4, 1)
    found: Runs = {kind: [] for kind in (*KINDS, "theirs")}
    what = f"{partitions} partitions, rows of {sized(body_size)}"
    with LimitedEmulator({HUB: partitions}) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": HUB}
        for _ in range(rounds):
            for kind, runs in found.items():
                of_kind = peer_batches if kind == "theirs" else batches
                options = {"rows": count, "batches": of_kind, "body_size": body_size, "warm_up": 2}
                run = run_side("spark_sink:rate", 900, **place, **options, **_options(kind, blob))
                runs.append(run)
                log(f"{what}, {kind}: {run['cost']:.2f} µs CPU, {run['wall']:.2f} µs, {run['busy']:.0%} busy")
    return [
        row
        for kind, promise in KINDS.items()
        for row in _rate_rows(f"spark-sink: {promise}, {what}", found[kind], found["theirs"])
    ]


def _rate_rows(name: str, ours: list[Mapping[str, float]], theirs: list[Mapping[str, float]]) -> list[Row]:
    subject, peer = median_run(ours), median_run(theirs)
    return [
        Row(
            name=name,
            peer=LOOP,
            subject_value=subject["cost"],
            peer_value=peer["cost"],
            unit="µs CPU/row",
            note=f"all of Spark, rounds: {len(ours)}; {subject['rate']:,.0f} rows/s, peer {peer['rate']:,.0f}",
            subject_busy=subject["busy"],
            peer_busy=peer["busy"],
        ),
        Row(
            name=f"{name}, time",
            peer=LOOP,
            subject_value=subject["wall"],
            peer_value=peer["wall"],
            unit="µs/row",
            subject_busy=subject["busy"],
            peer_busy=peer["busy"],
        ),
    ]


def _triggers(partitions: int, quick: bool, log: Log, blob: str) -> list[Row]:
    options = {"batches": 5 if quick else 30, "warm_up": 5}
    found: dict[str, float] = {}
    with LimitedEmulator({HUB: partitions}) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": HUB}
        for kind in (*KINDS, "theirs"):
            found[kind] = run_side("spark_sink:trigger", 300, **place, **options, **_options(kind, blob))["median"]
            log(f"{partitions} partitions, {kind}: {found[kind]:.0f} ms for a batch of eight rows")
    return [
        Row(
            name=f"spark-sink: {promise}, {partitions} partitions, a batch of eight rows",
            peer=LOOP,
            subject_value=found[kind],
            peer_value=found["theirs"],
            unit="ms",
            limit=TRIGGER_LIMIT if kind == "far" else None,
        )
        for kind, promise in KINDS.items()
    ]
