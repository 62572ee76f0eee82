"""The benchmarks: which sides they run, and what they make of the results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import spark_sink, spark_small, spark_source
from benchmarks.certificates import certificate
from benchmarks.comparing import OURS, PEER, Log, shown
from benchmarks.delivery import delivery
from benchmarks.fanout import fanout
from benchmarks.keyed import keyed
from benchmarks.meter import median_run
from benchmarks.paced import paced
from benchmarks.processes import BenchmarkError, EmulatorProcess, Side, run_side, version
from benchmarks.programs import programs
from benchmarks.receiving import receive, stages
from benchmarks.report import Row
from benchmarks.scale import scale
from benchmarks.sending import buffered, idempotent, latency, send
from benchmarks.startup import startup
from benchmarks.telemetry import telemetry
from tests.support.azurite import Azurite

PEER_UAMQP = f"{PEER}, uamqp"
NATIVE = f"{OURS}, native"
IDLE_LIMIT = 1.0
GROWTH_ALLOWED = 4.0
"""MiB that resident memory may move by without being counted as growth: the allocator's own."""

Tell = Callable[[Mapping[str, float]], str]


def transports(quick: bool, log: Log) -> list[Row]:
    """Our transports and azure-eventhub's, all over TLS: receiving, sending, idleness, and how late an event comes."""
    partitions, idle_partitions = 4, 16
    rounds = 1 if quick else 3
    filled, batches, deliveries = (40_000, 16, 40) if quick else (60_000, 60, 60)
    times = {"seconds": 10.0, "settle": 2.0} if quick else {"seconds": 30.0, "settle": 5.0}
    runs: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    with certificate() as made:
        tls = ("--tls-cert", made.chain, "--tls-key", made.key)
        ours, theirs = {"ca_file": made.authority}, {"connection_verify": made.authority}
        sides: dict[str, tuple[str, dict[str, object]]] = {
            NATIVE: ("ours", {**ours}),
            f"{OURS}, uamqp": ("ours", {**ours, "transport": "uamqp"}),
            PEER: ("theirs", {**theirs}),
            PEER_UAMQP: ("theirs", {**theirs, "uamqp_transport": True}),
        }

        def run(kind: str, emulator: EmulatorProcess, told: Tell, **more: object) -> None:
            place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
            for name, (side, options) in sides.items():
                if (kind, name) == ("send", PEER_UAMQP):
                    log(f"{kind}, {name}: its producer names a capability in a list, which uamqp takes for an error")
                    continue
                found = run_side(f"{side}:{kind}", 300, **place, **more, options=options)
                runs.setdefault(kind, {}).setdefault(name, []).append(found)
                log(f"{kind}, {name}: {told(found)}")

        for _ in range(rounds):
            with EmulatorProcess(partitions, *tls) as emulator:
                place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
                run_side("ours:fill", 300, **place, partitions=partitions, events=filled, options=ours)
                # Over uamqp the peer reads one partition to its end before another: so it measures from the first on.
                receiving = {"partitions": 1, "events": filled * 9 // 10, "available": filled}
                run("receive", emulator, shown, **receiving)
                run("send", emulator, shown, partitions=partitions, batches=batches, warm_up=4)
                run("delivery", emulator, _told_delivery, events=deliveries)
        with EmulatorProcess(idle_partitions, *tls) as emulator, tempfile.TemporaryDirectory() as leases:
            place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
            for name, (side, options) in sides.items():
                more = {"sqlite": str(Path(leases, f"{name}.db"))} if side == "ours" else {}
                found = run_side(
                    f"{side}:idle", 240, **place, partitions=idle_partitions, **times, **more, options=options
                )
                runs.setdefault("idle", {})[name] = [found]
                log(f"idle, {name}: {_told_idle(found)}")
    figures = (
        ("receive", "receive", "cost", "µs CPU/event"),
        ("send", "send", "cost", "µs CPU/event"),
        ("delivery", "delivery, p50", "p50", "ms"),
        ("delivery", "delivery, p99", "p99", "ms"),
        ("idle", f"idle, {idle_partitions} partitions", "cpu", "% of a core"),
    )
    return [
        Row(
            name=f"transports: {text}, beside {peer.replace(PEER, 'azure-eventhub')}",
            subject=NATIVE,
            peer=peer,
            subject_value=median_run(runs[kind][NATIVE], value)[value],
            peer_value=median_run(runs[kind][peer], value)[value],
            unit=unit,
        )
        for kind, text, value, unit in figures
        for peer in list(sides)[1:]
        if peer in runs[kind]
    ]


def idle(quick: bool, log: Log) -> list[Row]:
    """64 idle partitions, on SQLite and on blob leases, beside azure-eventhub with as many."""
    partitions = 64
    times = {"seconds": 10.0, "settle": 2.0} if quick else {"seconds": 60.0, "settle": 5.0}
    timeout = 240.0
    with EmulatorProcess(partitions) as emulator, tempfile.TemporaryDirectory() as directory:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB, "partitions": partitions}
        sqlite = run_side("ours:idle", timeout, **place, **times, sqlite=str(Path(directory, "leases.db")))
        log(f"eventpump on SQLite leases: {_told_idle(sqlite)}")
        memory_peer = run_side("theirs:idle", timeout, **place, **times)
        log(f"{PEER} without a store: {_told_idle(memory_peer)}")
        with Azurite() as azurite:
            on_blobs = {"blob": azurite.connection_string, "store_pid": azurite.pid}
            blob = run_side("ours:idle", timeout, **place, **times, **on_blobs)
            log(f"eventpump on blob leases: {_told_idle(blob)}")
        blob_peer: Mapping[str, float] | None = None
        if version("azure-eventhub-checkpointstoreblob-aio") is None:
            log("azure-eventhub-checkpointstoreblob-aio is not installed: blob leases have no peer")
        else:
            with Azurite() as azurite:
                on_blobs = {"blob": azurite.connection_string, "store_pid": azurite.pid}
                blob_peer = run_side("theirs:idle", timeout, **place, **times, **on_blobs)
                log(f"{PEER} on blobs: {_told_idle(blob_peer)}")
    return [
        _idle_row("idle: SQLite leases", "cpu", "% of a core", sqlite, memory_peer, limit=IDLE_LIMIT, note=(
            "64 partitions; the peer keeps its ownership in memory"
        )),
        _idle_row("idle: connections", "connections", "connections", sqlite, memory_peer, limit=1.0),
        _idle_row("idle: resident memory", "resident", "MiB", sqlite, memory_peer),
        Row(
            name="idle: blob leases, store's client apart",
            peer=PEER,
            subject_value=blob["cpu"] - blob["store_client"],
            peer_value=memory_peer["cpu"],
            unit="% of a core",
            subject_busy=blob["cpu"] / 100,
            peer_busy=memory_peer["cpu"] / 100,
            limit=IDLE_LIMIT,
            note=f"the lease store's calls take {blob['store_client']:.2f} % besides; the peer runs without a store",
        ),
        _idle_row(
            "idle: blob leases, whole process", "cpu", "% of a core", blob, blob_peer,
            note="we renew 64 leases every 10 s; the peer writes 64 ownerships every 30 s",
        ),
        _idle_row(
            "idle: Azurite's process", "store_process", "% of a core", blob, blob_peer,
            note="the store itself, a process of its own",
        ),
    ]  # fmt: skip


def _idle_row(
    name: str,
    value: str,
    unit: str,
    subject: Mapping[str, float],
    peer: Mapping[str, float] | None,
    *,
    limit: float | None = None,
    note: str = "",
) -> Row:
    return Row(
        name=name,
        peer=PEER,
        subject_value=subject[value],
        peer_value=None if peer is None else peer[value],
        unit=unit,
        subject_busy=subject["cpu"] / 100,
        peer_busy=None if peer is None else peer["cpu"] / 100,
        limit=limit,
        note=note,
    )


def memory(quick: bool, log: Log) -> list[Row]:
    """Resident memory over many events, and under a slow processor, beside the stated bounds."""
    return [_flat_memory(quick, log), _slow_memory(quick, log), _jumping_memory(quick, log)]


def _flat_memory(quick: bool, log: Log) -> Row:
    partitions = 4
    events = 200_000 if quick else 2_000_000
    with EmulatorProcess(partitions) as emulator, tempfile.TemporaryDirectory() as directory:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB, "partitions": partitions}
        with Side("ours:memory", **place, events=events, sqlite=str(Path(directory, "leases.db"))) as side:
            side.wait_ready(60)
            # Sent while they are received: the hub need not hold all of them.
            with Side("ours:fill", **place, events=events) as filling:
                side.go_on()
                run = side.result(600)
                filling.result(60)
    log(f"eventpump: {run['early']:.1f} MiB early, {run['late']:.1f} MiB late")
    return Row(
        name=f"memory: resident after {events:,} events",
        peer="bound",
        subject_value=run["late"],
        peer_value=run["early"] + GROWTH_ALLOWED,
        unit="MiB",
        subject_busy=run["busy"],
        goal=1.0,
        note=(
            f"highest of the last tenth; highest of the first fifth was {run['early']:.1f} MiB, "
            f"and {GROWTH_ALLOWED:g} MiB are the allocator's"
        ),
    )


PREFETCH_BYTES = 8 * 2**20
PREFETCH_EVENTS = 3000
"""The defaults of `HostSettings`."""
SLOW_BATCH = 10


def _slow_memory(quick: bool, log: Log) -> Row:
    """Events of one size: their estimate is right, so what is outstanding fits the budget."""
    partitions, body_size = 4, 64 * 1024
    run = _run_slow(quick, log, partitions, [(8_000, body_size)])
    bound = partitions * (PREFETCH_BYTES + SLOW_BATCH * body_size) / 2**20 + GROWTH_ALLOWED
    return Row(
        name="memory: slow processor, 64 KiB events",
        peer="bound",
        subject_value=run["grown"],
        peer_value=bound,
        unit="MiB",
        goal=1.0,
        note=(
            f"growth over the idle host; {partitions} partitions × (8 MiB of cache + the batch of {SLOW_BATCH} in the "
            f"handler's hands), and {GROWTH_ALLOWED:g} MiB for reads and the allocator"
        ),
    )


def _jumping_memory(quick: bool, log: Log) -> Row:
    """Small events, then large ones: the credit that was granted for small ones is outstanding at that moment."""
    partitions, large = 4, 256 * 1024
    run = _run_slow(quick, log, partitions, [(2_000 * partitions, 1024), (100 * partitions, large)])
    bound = partitions * (PREFETCH_BYTES + PREFETCH_EVENTS * large + SLOW_BATCH * large) / 2**20 + GROWTH_ALLOWED
    return Row(
        name="memory: slow processor, 1 KiB events, then 256 KiB",
        peer="bound",
        subject_value=run["grown"],
        peer_value=bound,
        unit="MiB",
        goal=1.0,
        note=(
            f"growth over the idle host; {partitions} partitions × (8 MiB of cache + a credit of {PREFETCH_EVENTS} "
            f"× 256 KiB, were none of it withdrawn + the batch of {SLOW_BATCH})"
        ),
    )


def _run_slow(quick: bool, log: Log, partitions: int, fills: list[tuple[int, int]]) -> Mapping[str, float]:
    """Let a slow host receive events: for each fill their number and size in bytes."""
    with EmulatorProcess(partitions) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB, "partitions": partitions}
        options = {
            "seconds": 5.0 if quick else 20.0,
            "prefetch_bytes": PREFETCH_BYTES,
            "prefetch_events": PREFETCH_EVENTS,
            "batch": SLOW_BATCH,
            "delay": 0.1,
        }
        with Side("ours:slow", **place, **options) as side:
            side.wait_ready(60)
            side.go_on()
            for events, body_size in fills:
                run_side("ours:fill", 60, **place, events=events, body_size=body_size)
            run = side.result(120)
    log(f"eventpump: {run['before']:.1f} MiB before the first event, {run['grown']:.1f} MiB more at most")
    return run


BENCHMARKS: Mapping[str, Callable[[bool, Log], list[Row]]] = {
    "receive": receive,
    "programs": programs,
    "paced": paced,
    "delivery": delivery,
    "stages": stages,
    "keyed": keyed,
    "telemetry": telemetry,
    "fanout": fanout,
    "send": send,
    "buffered": buffered,
    "latency": latency,
    "idempotent": idempotent,
    "transports": transports,
    "idle": idle,
    "memory": memory,
    "startup": startup,
    "scale": scale,
    "spark-source": spark_source.source,
    "spark-sink": spark_sink.sink,
    "spark-small": spark_small.small,
}


def _told(run: Mapping[str, float]) -> str:
    return f"{run['cost']:.2f} µs CPU per event, {run['rate']:,.0f} events/s, {run['busy']:.0%} busy"


def _told_delivery(run: Mapping[str, float]) -> str:
    return f"p50 {run['p50']:.2f} ms, p99 {run['p99']:.2f} ms"


def _told_idle(run: Mapping[str, float]) -> str:
    parts = [f"{run['cpu']:.2f} % of a core", f"{run['connections']:.0f} connections", f"{run['resident']:.0f} MiB"]
    if "store_client" in run:
        parts.append(f"of it {run['store_client']:.2f} % in the store's calls")
    if run["store_process"]:
        parts.append(f"the store's process {run['store_process']:.2f} %")
    return ", ".join(parts)


__all__ = ["BENCHMARKS", "BenchmarkError"]
