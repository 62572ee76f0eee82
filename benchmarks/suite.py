"""The benchmarks: which sides they run, and what they make of the results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import trustme

from benchmarks import spark_source
from benchmarks.meter import median_run
from benchmarks.processes import BenchmarkError, EmulatorProcess, Side, run_side, version
from benchmarks.report import LEAST_BUSY, Row
from eventpump.testing.azurite import Azurite

PEER = f"azure-eventhub {version('azure-eventhub') or ''}".rstrip()
PEER_UAMQP = f"{PEER}, uamqp"
OURS = "eventpump"
NATIVE = f"{OURS}, native"
RECEIVE_GOAL = 10.0
SEND_GOAL = 10.0
BUFFERED_GOAL = 10.0
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
Tell = Callable[[Mapping[str, float]], str]


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


SIZES = (1024, 100)
"""Bytes of an event's body."""


def send(quick: bool, log: Log) -> list[Row]:
    """Full batches, beside `EventHubProducerClient.send_batch`."""
    partitions = 4
    sizes = {1024: (60, 16) if quick else (160, 40), 100: (16, 8) if quick else (40, 12)}
    rows = []
    with EmulatorProcess(partitions) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB, "partitions": partitions}
        for body_size, (batches, peer_batches) in sizes.items():
            options = {**place, "body_size": body_size, "warm_up": 4}
            ours = partial(run_side, "ours:send", 300, **options, batches=batches)
            theirs = partial(run_side, "theirs:send", 300, **options, batches=peer_batches)
            rows.append(_beside(f"send: {_size(body_size)}", quick, log, ours, theirs, goal=SEND_GOAL))
    return rows


def buffered(quick: bool, log: Log) -> list[Row]:
    """Single events through a buffer, beside `EventHubProducerClient(buffered_mode=True)`."""
    events, peer_events = (40_000, 6_000) if quick else (200_000, 30_000)
    rows = []
    with EmulatorProcess(4) as emulator:
        for body_size in SIZES:
            options = {"connection_string": emulator.connection_string, "hub": emulator.HUB, "body_size": body_size}
            ours = partial(run_side, "ours:buffered", 300, **options, events=events, warm_up=events // 10)
            theirs = partial(run_side, "theirs:buffered", 300, **options, events=peer_events, warm_up=peer_events // 10)
            rows.append(_beside(f"buffered: {_size(body_size)}", quick, log, ours, theirs, goal=BUFFERED_GOAL))
    return rows


def latency(quick: bool, log: Log) -> list[Row]:
    """Single 1 KiB events, each sent when the one before is stored, beside `EventHubProducerClient.send_event`."""
    options = {"sends": 300 if quick else 2_000, "warm_up": 50}
    with EmulatorProcess(1) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
        ours, theirs = _in_turn(
            quick,
            lambda: run_side("ours:latency", 300, **place, **options),
            lambda: run_side("theirs:latency", 300, **place, **options),
            lambda name, run: log(f"{name}: {_told_latency(run)}"),
            PEER,
        )
    subject, peer = median_run(ours, "p50"), median_run(theirs, "p50")
    return [*_latency_rows("latency", PEER, subject, peer), _row("latency: CPU per send", PEER, subject, peer)]


PLAIN = "eventpump, plain"


def idempotent(quick: bool, log: Log) -> list[Row]:
    """What `idempotent=True` costs: sending full batches, through a buffer, and the time of single sends."""
    partitions = 4
    rows = []
    with EmulatorProcess(partitions) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
        kinds: list[tuple[str, str, dict[str, object]]] = [
            (
                f"idempotent: send, {_size(body_size)}",
                "ours:send",
                {"partitions": partitions, "body_size": body_size, "warm_up": 4, "batches": batches},
            )
            for body_size, batches in ((1024, 60 if quick else 160), (100, 16 if quick else 40))
        ]
        events = 40_000 if quick else 200_000
        kinds.append(
            (
                "idempotent: buffered, 100 B",
                "ours:buffered",
                {"body_size": 100, "events": events, "warm_up": events // 10},
            )
        )
        for name, side, options in kinds:
            run = partial(run_side, side, 300, **place, **options)
            rows.append(_beside(name, quick, log, partial(run, idempotent=True), run, peer=PLAIN))
        sends = {"sends": 300 if quick else 2_000, "warm_up": 50}
        ours, theirs = _in_turn(
            quick,
            lambda: run_side("ours:latency", 300, **place, **sends, idempotent=True),
            lambda: run_side("ours:latency", 300, **place, **sends),
            lambda name, run: log(f"{name}: {_told_latency(run)}"),
            PLAIN,
        )
    subject, peer = median_run(ours, "p50"), median_run(theirs, "p50")
    return [*rows, *_latency_rows("idempotent: latency", PLAIN, subject, peer)]


def transports(quick: bool, log: Log) -> list[Row]:
    """Our transports and azure-eventhub's, all over TLS: receiving, sending, idleness, and how late an event comes."""
    partitions, idle_partitions = 4, 16
    rounds = 1 if quick else 3
    filled, batches, deliveries = (40_000, 16, 40) if quick else (60_000, 60, 60)
    times = {"seconds": 10.0, "settle": 2.0} if quick else {"seconds": 30.0, "settle": 5.0}
    runs: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tls, ca_file = _certify(Path(folder))
        ours, theirs = {"ca_file": ca_file}, {"connection_verify": ca_file}
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
                run("receive", emulator, _told, **_steady(filled))
                run("send", emulator, _told, partitions=partitions, batches=batches, warm_up=4)
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
    shown = (
        ("receive", "receive", "cost", "µs CPU/event"),
        ("send", "send", "cost", "µs CPU/event"),
        ("delivery", "delivery, p50", "p50", "ms"),
        ("delivery", "delivery, p99", "p99", "ms"),
        ("idle", f"idle, {idle_partitions} partitions", "cpu", "% of a core"),
    )
    return [
        Row(
            name=f"transports: {text}, beside {_without_version(peer)}",
            subject=NATIVE,
            peer=peer,
            subject_value=median_run(runs[kind][NATIVE], value)[value],
            peer_value=median_run(runs[kind][peer], value)[value],
            unit=unit,
        )
        for kind, text, value, unit in shown
        for peer in list(sides)[1:]
        if peer in runs[kind]
    ]


def _certify(folder: Path) -> tuple[list[str], str]:
    """Make a certificate for this machine. :returns: the emulator's arguments, and whom to trust."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    files = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    certificate.cert_chain_pems[0].write_to_path(str(files["cert"]))
    certificate.private_key_pem.write_to_path(str(files["key"]))
    return ["--tls-cert", str(files["cert"]), "--tls-key", str(files["key"])], str(files["ca"])


def _without_version(peer: str) -> str:
    """Return what a peer is called in a row's name, which is the same whatever version runs."""
    return peer.replace(PEER, "azure-eventhub")


Run = Callable[[], Mapping[str, float]]


def _in_turn(
    quick: bool, ours: Run, theirs: Run, log: Callable[[str, Mapping[str, float]], None], peer: str
) -> tuple[list[Mapping[str, float]], list[Mapping[str, float]]]:
    """Run both sides, side by side in time, so that a slow spell of the machine meets both."""
    runs: tuple[list[Mapping[str, float]], list[Mapping[str, float]]] = ([], [])
    for _ in range(1 if quick else 3):
        for side, name, mine in ((ours, "eventpump", runs[0]), (theirs, peer, runs[1])):
            mine.append(side())
            log(name, mine[-1])
    return runs


def _beside(
    name: str, quick: bool, log: Log, ours: Run, theirs: Run, *, peer: str = PEER, goal: float | None = None
) -> Row:
    runs = _in_turn(quick, ours, theirs, lambda who, run: log(f"{name}, {who}: {_told(run)}"), peer)
    subject, other = map(median_run, runs)
    note = f"{subject['rate']:,.0f} events/s, peer {other['rate']:,.0f}"
    return _row(name, peer, subject, other, goal=goal, note=note)


def _row(
    name: str,
    peer: str,
    subject: Mapping[str, float],
    other: Mapping[str, float],
    *,
    goal: float | None = None,
    note: str = "",
) -> Row:
    return Row(
        name=name,
        peer=peer,
        subject_value=subject["cost"],
        peer_value=other["cost"],
        unit="µs CPU/event",
        subject_busy=subject["busy"],
        peer_busy=other["busy"],
        goal=goal,
        note=note,
    )


def _latency_rows(name: str, peer: str, subject: Mapping[str, float], other: Mapping[str, float]) -> list[Row]:
    return [
        Row(
            name=f"{name}, {part}",
            peer=peer,
            subject_value=subject[part],
            peer_value=other[part],
            unit="ms",
            subject_busy=subject["busy"],
            peer_busy=other["busy"],
        )
        for part in ("p50", "p99")
    ]


def _size(body_size: int) -> str:
    return f"{body_size // 1024} KiB" if body_size % 1024 == 0 else f"{body_size} B"


def stages(quick: bool, log: Log) -> list[Row]:
    """The stages of receiving, each alone and without a socket, beside a floor that does the least in the same turn."""
    # In several processes: where their memory lies is a matter of chance, and costs or saves some per cent.
    runs = [run_side("stages:stages", 120, rounds=20 if quick else 150) for _ in range(1 if quick else 3)]
    for run in runs:
        log(f"making an event object costs {run['making']:.2f} µs, counted with the event and not with the pump")
    floor = median_run(runs, "floor")["floor"]
    rows = [
        Row(
            name="stages: floor, 1 KiB cut out and three numbers unpacked",
            peer="",
            subject="floor",
            subject_value=floor,
            peer_value=None,
            unit="µs CPU/event",
            subject_busy=1.0,
        )
    ]
    for stage, budget in BUDGET.items():
        ratios = [run["floor"] / run[stage] for run in runs]
        ratio = sorted(ratios)[(len(ratios) - 1) // 2]
        rows.append(
            Row(
                name=f"stages: {STAGES[stage]}",
                peer="floor",
                subject_value=floor / ratio,
                peer_value=floor,
                unit="µs CPU/event",
                subject_busy=1.0,
                limit=budget,
                ratios=tuple(ratios),
            )
        )
    return rows


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


def spark_sink(quick: bool, log: Log) -> list[Row]:
    """Publishing a DataFrame of 1 KiB rows, beside `foreachPartition` with `EventHubProducerClient.send_batch`."""
    rows, batches, peer_batches = (20_000, 2, 1) if quick else (200_000, 4, 1)
    triggers = {"batches": 5 if quick else 30, "warm_up": 5}
    found: dict[str, list[Mapping[str, float]]] = {"ours": [], "plain": [], "theirs": []}
    small: dict[str, list[Mapping[str, float]]] = {"ours": [], "plain": [], "theirs": []}
    with EmulatorProcess(4) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
        for _ in range(1 if quick else 3):
            for kind, runs in found.items():
                count = peer_batches if kind == "theirs" else batches
                options = {"kind": kind, "rows": rows, "batches": count, "body_size": 1024, "warm_up": 2}
                runs.append(run_side("spark_sink:rate", 900, **place, **options))
                log(f"{kind}: {runs[-1]['wall']:.2f} µs and {_told(runs[-1])}")
        for kind, runs in small.items():
            runs.append(run_side("spark_sink:trigger", 300, **place, kind=kind, **triggers))
            log(f"{kind}: {runs[-1]['median']:.0f} ms for a batch of eight rows")
    return [
        row
        for kind, name in (("ours", "exactly once"), ("plain", "at least once"))
        for row in _spark_sink_rows(name, found[kind], found["theirs"], small[kind][0], small["theirs"][0])
    ]


def _spark_sink_rows(
    name: str,
    ours: list[Mapping[str, float]],
    theirs: list[Mapping[str, float]],
    small: Mapping[str, float],
    other_small: Mapping[str, float],
) -> list[Row]:
    subject, peer = median_run(ours), median_run(theirs)
    loop = f"{PEER}, foreachPartition"
    note = f"all of Spark; {subject['rate']:,.0f} rows/s, peer {peer['rate']:,.0f}"
    return [
        _row(f"spark-sink: {name}", loop, subject, peer, note=note),
        Row(
            name=f"spark-sink: {name}, time per row",
            peer=loop,
            subject_value=subject["wall"],
            peer_value=peer["wall"],
            unit="µs",
            subject_busy=subject["busy"],
            peer_busy=peer["busy"],
        ),
        Row(
            name=f"spark-sink: {name}, a batch of eight rows",
            peer=loop,
            subject_value=small["median"],
            peer_value=other_small["median"],
            unit="ms",
        ),
    ]


BENCHMARKS: Mapping[str, Callable[[bool, Log], list[Row]]] = {
    "receive": receive,
    "stages": stages,
    "send": send,
    "buffered": buffered,
    "latency": latency,
    "idempotent": idempotent,
    "transports": transports,
    "idle": idle,
    "memory": memory,
    "spark-source": spark_source.source,
    "spark-sink": spark_sink,
}


def _told(run: Mapping[str, float]) -> str:
    return f"{run['cost']:.2f} µs CPU per event, {run['rate']:,.0f} events/s, {run['busy']:.0%} busy"


def _told_latency(run: Mapping[str, float]) -> str:
    return f"p50 {run['p50']:.2f} ms, p99 {run['p99']:.2f} ms, {run['cost']:.0f} µs CPU per send"


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
