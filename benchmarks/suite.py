"""The benchmarks: which sides they run, and what they make of the results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.meter import median_run
from benchmarks.processes import BenchmarkError, EmulatorProcess, Side, run_side, version
from benchmarks.report import LEAST_BUSY, Row
from eventpump.testing.azurite import Azurite

PEER = f"azure-eventhub {version('azure-eventhub') or ''}".rstrip()
RECEIVE_GOAL = 10.0
SEND_GOAL = 5.0
IDLE_LIMIT = 1.0
BUDGET = {"engine": 1.0, "event": 2.5, "pump": 1.5}
"""Microseconds of CPU per 1 KiB event (design, section 4)."""

STAGES = {
    "engine": "engine, from bytes read to messages",
    "event": "event object, four fields read",
    "pump": "cache, cursor and pump",
}
ATTEMPTS = 4
"""How many void runs are put up with for each that counts."""
GROWTH_ALLOWED = 4.0
"""MiB that resident memory may move by without being counted as growth: the allocator's own."""

Log = Callable[[str], None]


def receive(quick: bool, log: Log) -> list[Row]:
    """1 KiB events through a host, beside `EventHubConsumerClient.receive_batch`."""
    partitions = 4
    filled = 200_000 if quick else 640_000
    theirs_events = 20_000 if quick else 100_000
    rounds = 1 if quick else 3
    with EmulatorProcess(partitions) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
        log(f"filling {filled} events")
        run_side("ours:fill", 300, **place, partitions=partitions, events=filled)
        ours: list[Mapping[str, float]] = []
        theirs: list[Mapping[str, float]] = []
        void: list[Mapping[str, float]] = []
        while len(ours) < rounds and len(void) < ATTEMPTS * rounds:
            run = run_side("ours:receive", 300, **place, **_steady(filled))
            is_void = run["busy"] < LEAST_BUSY
            log(f"eventpump: {_told(run)}{': void, once more' if is_void else ''}")
            if is_void:
                void.append(run)
                continue
            ours.append(run)
            # Side by side in time, so that a slow spell of the machine meets both.
            theirs.append(run_side("theirs:receive", 300, **place, **_steady(theirs_events)))
            log(f"{PEER}: {_told(theirs[-1])}")
        if not ours:
            ours = void
            theirs.append(run_side("theirs:receive", 300, **place, **_steady(theirs_events)))
    subject, peer = median_run(ours), median_run(theirs)
    return [
        Row(
            name="receive",
            peer=PEER,
            subject_value=subject["cost"],
            peer_value=peer["cost"],
            unit="µs CPU/event",
            subject_busy=subject["busy"],
            peer_busy=peer["busy"],
            goal=RECEIVE_GOAL,
            must_be_busy=True,
            note=f"{subject['rate']:,.0f} events/s, peer {peer['rate']:,.0f}",
        )
    ]


def _steady(events: int) -> dict[str, int]:
    return {"events": events, "first": events // 20, "last": events - events // 20}


def send(quick: bool, log: Log) -> list[Row]:
    """Full batches of 1 KiB events, beside `EventHubProducerClient.send_batch`."""
    partitions = 4
    rounds = 1 if quick else 3
    ours: list[Mapping[str, float]] = []
    theirs: list[Mapping[str, float]] = []
    with EmulatorProcess(partitions) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB, "partitions": partitions}
        for _ in range(rounds):
            ours.append(run_side("ours:send", 300, **place, batches=60 if quick else 160, warm_up=4))
            log(f"eventpump: {_told(ours[-1])}")
            theirs.append(run_side("theirs:send", 300, **place, batches=16 if quick else 40, warm_up=4))
            log(f"{PEER}: {_told(theirs[-1])}")
    subject, peer = median_run(ours), median_run(theirs)
    return [
        Row(
            name="send",
            peer=PEER,
            subject_value=subject["cost"],
            peer_value=peer["cost"],
            unit="µs CPU/event",
            subject_busy=subject["busy"],
            peer_busy=peer["busy"],
            goal=SEND_GOAL,
            note=f"{subject['rate']:,.0f} events/s, peer {peer['rate']:,.0f}",
        )
    ]


def stages(quick: bool, log: Log) -> list[Row]:
    """The stages of receiving beside their budget, each alone and without a socket."""
    result = run_side("stages:stages", 120, rounds=40 if quick else 200)
    log(f"making an event object costs {result['making']:.2f} µs, counted with the event and not with the pump")
    return [
        Row(
            name=f"stages: {STAGES[stage]}",
            peer="budget",
            subject_value=result[stage],
            peer_value=budget,
            unit="µs CPU/event",
            subject_busy=1.0,
            goal=1.0,
        )
        for stage, budget in BUDGET.items()
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


CACHE_BYTES = 8 * 2**20
CACHE_EVENTS = 3000
"""The defaults of `HostSettings`."""
SLOW_BATCH = 10


def _slow_memory(quick: bool, log: Log) -> Row:
    """Events of one size: their estimate is right, so what is outstanding fits the budget."""
    partitions, body_size = 4, 64 * 1024
    run = _run_slow(quick, log, partitions, [(8_000, body_size)])
    bound = partitions * (CACHE_BYTES + SLOW_BATCH * body_size) / 2**20 + GROWTH_ALLOWED
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
    bound = partitions * (CACHE_BYTES + CACHE_EVENTS * large + SLOW_BATCH * large) / 2**20 + GROWTH_ALLOWED
    return Row(
        name="memory: slow processor, 1 KiB events, then 256 KiB",
        peer="bound",
        subject_value=run["grown"],
        peer_value=bound,
        unit="MiB",
        goal=1.0,
        note=(
            f"growth over the idle host; {partitions} partitions × (8 MiB of cache + a credit of {CACHE_EVENTS} "
            f"× 256 KiB, were none of it withdrawn + the batch of {SLOW_BATCH})"
        ),
    )


def _run_slow(quick: bool, log: Log, partitions: int, fills: list[tuple[int, int]]) -> Mapping[str, float]:
    """Let a slow host receive events: for each fill their number and size in bytes."""
    with EmulatorProcess(partitions) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB, "partitions": partitions}
        options = {
            "seconds": 5.0 if quick else 20.0,
            "cache_bytes": CACHE_BYTES,
            "cache_events": CACHE_EVENTS,
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
    "stages": stages,
    "send": send,
    "idle": idle,
    "memory": memory,
}


def _told(run: Mapping[str, float]) -> str:
    return f"{run['cost']:.2f} µs CPU per event, {run['rate']:,.0f} events/s, {run['busy']:.0%} busy"


def _told_idle(run: Mapping[str, float]) -> str:
    parts = [f"{run['cpu']:.2f} % of a core", f"{run['connections']:.0f} connections", f"{run['resident']:.0f} MiB"]
    if "store_client" in run:
        parts.append(f"of it {run['store_client']:.2f} % in the store's calls")
    if run["store_process"]:
        parts.append(f"the store's process {run['store_process']:.2f} %")
    return ", ".join(parts)


__all__ = ["BENCHMARKS", "BenchmarkError"]
