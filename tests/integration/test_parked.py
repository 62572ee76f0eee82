"""Parking in another hub of the emulator, and `eventpump parked`, which shows such events and sends them again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from eventpump import (
    CheckpointPolicy,
    Emulator,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    MemoryLeases,
    MemoryLeaseStore,
    Park,
    PartitionContext,
    ReceivedEvent,
)
from eventpump.emulator.faults import LinkRole, Reject
from eventpump.eventhubs.parked import parked_facts
from eventpump.reports import EventParked, HostReport
from tests.integration.test_cli_send_tail import run
from tests.support.reading import read_partition

HUBS = {"telemetry": 2, "parked": 2, "again": 2}


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Emulator]:
    """The local service with a hub to read, one to park in, and one to replay to."""
    async with Emulator(HUBS) as emulator:
        yield emulator


class Readings(EventProcessor):
    """Takes numbers only."""

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        for event in events:
            float(event.body_as_str())


async def _everything(service: Emulator, hub: str) -> list[ReceivedEvent]:
    return [event for number in "01" for event in await read_partition(service.connection_string, hub, number)]


async def _park(service: Emulator, to: Any, *, bad: int = 5, good: int = 20) -> list[EventParked]:
    """Publish readings of which some are no numbers, and run a host until those are parked."""
    async with EventProducer(service.connection_string, "telemetry") as producer:
        for number in range(good):
            await producer.send(EventData(f"{number}"), partition_key="good")
        for number in range(bad):
            text = EventData(f"bad {number}", properties={"unit": "W"}, message_id=f"m{number}")
            await producer.send(text, partition_key=f"bad-{number % 2}")
    parked: list[EventParked] = []
    done = asyncio.Event()

    def hook(report: HostReport) -> None:
        if isinstance(report, EventParked):
            parked.append(report)
            if len(parked) == bad:
                done.set()

    host = EventProcessorHost(
        service.connection_string,
        "telemetry",
        processor=Readings,
        lease_store=MemoryLeaseStore(MemoryLeases()),
        failure_policy=Park(to),
        checkpoint_policy=CheckpointPolicy(every_events=1),
        owner_id="a",
        hooks=[hook],
    )
    async with asyncio.timeout(30):
        running = asyncio.create_task(host.run())
        await done.wait()
        await host.aclose()
        await running
    return parked


async def test_events_that_cannot_be_processed_are_in_the_other_hub(service: Emulator) -> None:
    """Over the host's own connection: as they were sent, with where they came from, those of a key in order."""
    reports = await _park(service, "parked")
    assert {each.hub for each in reports} == {"parked"}
    events = await _everything(service, "parked")
    assert sorted(event.body for event in events) == [b"bad %d" % number for number in range(5)]
    sources = {(each.partition_id, each.sequence_number) for each in reports}
    for event in events:
        facts = parked_facts(event)
        assert facts is not None
        number = int(event.body_as_str()[4:])
        assert (event.partition_key, event.message_id, event.properties["unit"]) == (
            f"bad-{number % 2}",
            f"m{number}",
            "W",
        )
        assert (facts.hub, facts.consumer_group, facts.host, facts.error) == (
            "telemetry",
            "$Default",
            "a",
            "ValueError",
        )
        assert "could not convert" in facts.message
        sources.remove((facts.partition, facts.sequence_number))
    for key in ("bad-0", "bad-1"):
        bodies = [event.body for event in events if event.partition_key == key]
        assert bodies == sorted(bodies)


async def test_producer_of_the_program_s_own_parks_and_stays_open(service: Emulator) -> None:
    """The host does not close what it did not open."""
    async with EventProducer(service.connection_string, "parked") as producer:
        await _park(service, producer, bad=1)
        await producer.send(EventData(b"still open"))
    assert {event.body for event in await _everything(service, "parked")} == {b"bad 0", b"still open"}


async def test_hub_that_refuses_for_a_while_loses_nothing(service: Emulator) -> None:
    """The host tries again until the event is stored."""
    refused = service.faults.add(
        Reject("com.microsoft:server-busy", "busy"), role=LinkRole.PRODUCER, hub="parked", count=2
    )
    await _park(service, "parked", bad=2)
    assert refused.fired == 2
    assert {event.body for event in await _everything(service, "parked")} == {b"bad 0", b"bad 1"}


async def test_list_shows_where_each_event_came_from(service: Emulator) -> None:
    """One line each, and their number; other events of the hub are only counted."""
    await _park(service, "parked", bad=3)
    async with EventProducer(service.connection_string, "parked") as producer:
        await producer.send(EventData(b"of somebody else"))
    code, out, err = await run("parked", "list", "parked", emulator=service)
    assert (code, err) == (0, "eventpump: 1 events of parked were not parked by a host, and are left out\n")
    *lines, last = out.decode().splitlines()
    assert last == "3 parked events"
    line = re.compile(
        r"[01]:\d+  telemetry/[01]/\d+  \$Default  \d{4}-\d\d-\d\dT[\d:.]+Z  \d attempts  "
        r"ValueError: could not convert string to float: 'bad \d'"
    )
    assert [each for each in lines if not line.fullmatch(each)] == []
    assert len(lines) == 3
    code, out, _ = await run("parked", "list", "--hub", "again", emulator=service)
    assert (code, out) == (0, b"0 parked events\n")


async def test_replay_sends_them_to_another_hub(service: Emulator) -> None:
    """With their keys, in order per key; it warns who receives them, and says how many there were."""
    await _park(service, "parked", bad=20)
    async with EventProducer(service.connection_string, "parked") as producer:
        await producer.send(EventData(b"of somebody else"))
    code, out, err = await run("parked", "replay", "parked", "--to", "again", emulator=service)
    assert (code, out) == (0, b"20 events sent to again\n")
    assert err.splitlines()[0] == (
        "eventpump: every consumer group of again receives these events, not only those that parked them"
    )
    before, after = await _everything(service, "parked"), await _everything(service, "again")
    assert len(after) == 20
    for key in ("bad-0", "bad-1"):
        first, second = (
            [(each.body, each.message_id, each.properties) for each in events if each.partition_key == key]
            for events in (before, after)
        )
        assert first == second
        assert len(first) == 10


async def test_replay_can_begin_later_and_take_one_partition(service: Emulator) -> None:
    """To go on after a failure."""
    await _park(service, "parked", bad=20)
    wanted = (await read_partition(service.connection_string, "parked", "1"))[2:]
    arguments = ("parked", "replay", "parked", "--to", "again", "--partition", "1")
    code, out, _ = await run(*arguments, "--from", str(wanted[0].sequence_number), emulator=service)
    assert (code, out) == (0, f"{len(wanted)} events sent to again\n".encode())
    assert sorted(each.body for each in await _everything(service, "again")) == sorted(each.body for each in wanted)


async def test_replay_that_fails_says_where(service: Emulator) -> None:
    """Exit code 2 for a hub that is not there, and nothing is lost: the events stay where they are."""
    await _park(service, "parked", bad=3)
    code, out, err = await run("parked", "replay", "parked", "--to", "nowhere", emulator=service)
    assert (code, out) == (2, b"")
    assert re.search(r"stopped after 0 events; those from partition \d, sequence number 0 on may not be sent", err)
    assert len(await _everything(service, "parked")) == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("parked",), "ACTION"),
        (("parked", "list"), "hub: is required"),
        (("parked", "list", "parked", "--hub", "parked"), "--hub: gives the hub that was given as HUB already"),
        (("parked", "replay", "parked"), "--to"),
        (("parked", "replay", "parked", "--to", "Parked"), "--to: must be another hub"),
        (("parked", "list", "a hub"), "hub"),
        (("parked", "list", "parked", "--from", "yesterday"), "--from"),
        (("parked", "list", "parked", "--partition", "9"), "9"),
        (("parked", "list", "nowhere"), "nowhere"),
    ],
)
async def test_what_cannot_work_is_refused_in_one_line(
    service: Emulator, arguments: tuple[str, ...], problem: str
) -> None:
    """Exit code 2."""
    code, out, err = await run(*arguments, emulator=service)
    assert (code, out) == (2, b"")
    assert problem in err
    assert err.count("\n") == 1
