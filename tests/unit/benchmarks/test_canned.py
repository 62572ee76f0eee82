"""The service of prepared bytes: clients take it for a service, and it counts what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from benchmarks.canned import CannedPartition, transfer_head
from benchmarks.certificates import certificate
from benchmarks.events import samples
from benchmarks.processes import BenchmarkError, CannedService, run_side
from benchmarks.sending import checked
from benchmarks.sides.floors import _Exchange
from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import Connection, Event, LinkAttached, Role, SaslRequested
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import Source, Target
from eventpump.emulator.connection import service_config

PARTITIONS, EVENTS = 3, 6000
TIMEOUT = 60.0
MEASURED = 4000
RECEIVED: Mapping[str, object] = {"kind": "varied", "partitions": PARTITIONS, "available": EVENTS}


def exchange(client: Connection, service: Connection) -> list[Event]:
    """Carry bytes both ways until both are silent.

    Returns:
        The service's events.
    """
    events: list[Event] = []
    while True:
        asked, answered = client.data_to_send(), service.data_to_send()
        if not asked and not answered:
            return events
        client.receive(answered)
        came = service.receive(asked)
        if any(isinstance(event, SaslRequested) for event in came):
            service.sasl_outcome(ok=True)
            came = service.receive(b"")
        events += came


def attach_sender(number: int, credit: int) -> tuple[Connection, Link]:
    """Attach so many links in one session.

    Returns:
        The service's engine, and its end of the last of them.
    """
    client = Connection(ConnectionConfig(container_id="client", hostname="localhost"), Role.CLIENT)
    service = Connection(service_config(1 << 20), Role.SERVER)
    client.start()
    exchange(client, service)
    session = client.begin()
    exchange(client, service)
    links = [
        session.attach(str(each), is_receiver=True, source=Source("a"), target=Target("b")) for each in range(number)
    ]
    senders = [event.link for event in exchange(client, service) if isinstance(event, LinkAttached)]
    for sender in senders:
        sender.accept(snd_settle_mode=1)
    exchange(client, service)
    links[-1].set_credit(credit)
    exchange(client, service)
    return service, senders[-1]


@pytest.mark.parametrize("links", [1, 3])
def test_canned_frames_equal_those_of_send_run(links: int) -> None:
    """Prepared transfers are byte for byte what `Link.send_run` writes, on the first handle and on others."""
    partition = CannedPartition("0", "varied", 300)
    service, sender = attach_sender(links, credit=300)
    head = transfer_head(sender.session.channel, sender.handle)
    written = b""
    for start, number in ((0, 100), (100, 200)):
        delivery_id = sender.session.outgoing_delivery_id
        assert sender.send_run(partition.events[: start + number], start, 1 << 62) == number
        wanted = service.data_to_send()
        assert partition.frames(start, number, head, delivery_id) == wanted
        written += wanted
    assert partition.size_with(head) == len(written)


async def test_floor_of_single_sends_prepares_every_sample() -> None:
    """All 997 varied events, as the sides send them, though the service grants credit for fewer at once."""
    floor = _Exchange("hub")
    service = Connection(service_config(1 << 20), Role.SERVER)
    floor._engine.start()
    while not floor.link.done():
        for event in service.receive(floor._engine.data_to_send()):
            if isinstance(event, SaslRequested):
                service.sasl_outcome(ok=True)
            elif isinstance(event, LinkAttached):
                event.link.accept()
                event.link.set_credit(300)
        for event in floor._engine.receive(service.data_to_send()):
            floor._on_event(event)
    frames = floor.prepared(floor.link.result(), "varied")
    assert len(frames) == 997
    assert all(each.body in frame for each, (frame, _) in zip(samples("varied"), frames, strict=True))


@pytest.fixture(scope="module")
def service() -> Iterator[CannedService]:
    """Serve varied events over TLS."""
    with certificate() as made, CannedService("varied", PARTITIONS, EVENTS, made) as served:
        yield served


@pytest.mark.parametrize(
    ("side", "work"),
    [
        ("programs:app", "pydantic"),
        pytest.param("programs:app", "msgspec", marks=pytest.mark.long),
        pytest.param("programs:app", "traceparent", marks=pytest.mark.long),
        ("programs:host", "forward"),
        pytest.param("programs:host", "checkpoint", marks=pytest.mark.long),
        pytest.param("ours:receive", "telemetry", marks=pytest.mark.long),
        pytest.param("theirs:receive", "telemetry", marks=pytest.mark.long),
        pytest.param("theirs:receive", "pydantic", marks=pytest.mark.long),
        pytest.param("theirs:forward", "forward", marks=pytest.mark.long),
    ],
)
def test_programs_of_both_sides_read_telemetry_over_tls(side: str, work: str) -> None:
    """Each does its work with every event, and finds in the body what the properties and the key say."""
    with certificate() as made, CannedService("telemetry", PARTITIONS, EVENTS, made) as served:
        stated = {**RECEIVED, "kind": "telemetry", "work": work}
        if side.startswith("programs:"):
            del stated["kind"]
            place = served.place("ours")
        else:
            place = served.place(side)
        result = run_side(side, TIMEOUT, **place, **stated, events=MEASURED)
    assert result["cost"] > 0


@pytest.mark.parametrize(
    "side", ["ours:receive", "theirs:receive", pytest.param("theirs_sync:receive", marks=pytest.mark.long)]
)
def test_canned_service_is_read_by_every_client_over_tls(service: CannedService, side: str) -> None:
    """Ours and both of azure-eventhub's receive from it; each checks numbers, sizes and times."""
    before = service.counts()["delivered"]
    result = run_side(side, TIMEOUT, **service.place(side), **RECEIVED, events=MEASURED)
    assert result["events"] >= MEASURED * 0.9 - 600
    assert result["cost"] > 0
    assert result["faults"] >= 0
    assert service.counts()["delivered"] - before >= MEASURED


SENDS: Mapping[str, Mapping[str, object]] = {
    "send": {"partitions": PARTITIONS, "batches": 3, "warm_up": 1},
    "buffered": {"events": 900, "warm_up": 100},
    "latency": {"sends": 100, "warm_up": 10},
    "exchange": {"sends": 100, "warm_up": 10},
}


@pytest.mark.parametrize(
    ("side", "more"),
    [
        ("ours:buffered", {}),
        ("ours:send", {"idempotent": True}),
        ("theirs:send", {}),
        ("theirs_sync:latency", {}),
        ("floors:exchange", {}),
    ],
)
def test_canned_service_takes_what_every_client_sends(
    service: CannedService, side: str, more: Mapping[str, object]
) -> None:
    """Batches, buffered events, single ones and numbered ones are accepted, and both ends count the same."""
    arguments = {**service.place(side), **SENDS[side.partition(":")[2]], "kind": "varied", **more}
    result = checked(service, lambda: run_side(side, TIMEOUT, **arguments))
    assert result["sent"] > 0


def test_side_that_claims_more_than_was_taken_fails(service: CannedService) -> None:
    """A producer that sends less than it says cannot look cheap."""
    with pytest.raises(BenchmarkError, match="took 0 events of 5 sent"):
        checked(service, lambda: {"sent": 5})


def test_floor_reads_all_bytes(service: CannedService) -> None:
    """The bytes that come without being asked for are as many as stated: the floor's run fails else."""
    assert service.certificate is not None
    place = {"port": service.raw_port, "ca_file": service.certificate.authority}
    size = service.counts()["size"]
    assert run_side("floors:stream", TIMEOUT, **place, size=size, events=EVENTS)["cost"] > 0


def test_reading_too_few_events_fails_without_waiting(service: CannedService) -> None:
    """A side that cannot measure over as many events as it should says so, and does not wait forever."""
    with pytest.raises(BenchmarkError, match="came after every partition had one"):
        run_side("theirs:receive", TIMEOUT, **service.place("theirs"), **RECEIVED, events=EVENTS)
