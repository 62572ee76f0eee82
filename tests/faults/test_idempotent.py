"""Idempotent producers over sockets, while links and connections end before and after storing, and the service dies."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from eventpump import Emulator, EventData, EventProducer, PublishOutcomeUnknownError, RetryOptions, ServiceError
from eventpump.core.status import BatchState
from eventpump.emulator.faults import (
    Action,
    CloseConnection,
    DetachLink,
    DropConnection,
    EndSession,
    Fault,
    LinkRole,
    Performative,
    Refuse,
    Reject,
    StoreLate,
)
from eventpump.errors import ProducerStateLostError
from eventpump.interfaces import PublisherIntent
from eventpump.storage.publisher_states.sqlite import SqlitePublisherStateStore
from tests.faults.programs import CONNECTION, HUB, Progress, emulator_of, stored, write_config
from tests.support.processes import EmulatorProcess
from tests.ways import Way, over_both

pytestmark = over_both()

PARTITIONS = ("0", "1", "2", "3")
QUICK = RetryOptions(max_retries=2, base_delay=0.005, max_delay=0.05)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(8 if metafunc.config.getoption("--long") else 1))


@pytest.fixture
def batches(request: pytest.FixtureRequest, way: Way) -> int:
    """How many batches a test sends, over four partitions. A twelfth of them costs a connection."""
    count = 8000 if request.config.getoption("--long") else 1000
    return count if way.name == "native" else count // 8


def producer_to(connection_string: str, **options: Any) -> EventProducer:
    """Make an idempotent producer."""
    every: dict[str, Any] = {"idempotent": True, "retry": QUICK, **CONNECTION, **options}
    return EventProducer(connection_string, HUB, **every)


def rows(count: int) -> dict[str, list[list[str]]]:
    """Make the bodies of so many batches of one to nine events, by partition."""
    rng = random.Random(count)
    return {
        partition_id: [
            [f"{partition_id}:{number}:{index}" for index in range(rng.randrange(1, 10))]
            for number in range(count // len(PARTITIONS))
        ]
        for partition_id in PARTITIONS
    }


def flat(batches: Iterable[list[str]]) -> list[str]:
    """Return the events of batches."""
    return [body for batch in batches for body in batch]


async def publish(
    producer: EventProducer, partition_id: str, batches: list[list[str]], progress: Progress | None = None
) -> None:
    """Send batches one after another, each again until it is known to be published."""
    for bodies in batches:
        batch = None
        while batch is None:
            try:
                batch = await producer.create_batch(partition_id=partition_id)
            except ServiceError:
                continue  # the link was cut as often as it was tried
        for body in bodies:
            assert batch.try_add(EventData(body))
        while batch.starting_published_sequence_number is None:
            try:
                await producer.send(batch)
            except (PublishOutcomeUnknownError, ServiceError) as error:
                is_known = "not stored" in str(error)
                if batch.starting_published_sequence_number is None:  # else it was settled meanwhile
                    assert batch.state is (BatchState.REFUSED if is_known else BatchState.IN_DOUBT)
        if progress is not None:
            progress.processed("publisher", partition_id, 0, progress.batches[partition_id])


async def disturb(emulator: Emulator, rng: random.Random, late: list[Fault], longest: float) -> None:
    """Cut connections while nothing is on its way too, end links as they are attached, and let come what is late.

    Args:
        longest: Seconds from one to the next.
    """
    while True:
        await asyncio.sleep(rng.uniform(0.0, longest))
        what = rng.randrange(5)
        if what == 0:
            emulator.drop_connections()
        elif what == 1:
            emulator.faults.add(DetachLink(), on=Performative.ATTACH, role=LinkRole.PRODUCER)
        elif what == 2:
            end = CloseConnection if rng.random() < 0.5 else EndSession
            emulator.faults.add(end(answered=True), on=rng.choice([Performative.BEGIN, Performative.ATTACH]))
        elif held := [fault for fault in late if fault.holds_something]:
            rng.choice(held).remove()


async def while_disturbed(
    emulator: Emulator,
    way: Way,
    rng: random.Random,
    batches: int,
    work: Awaitable[object],
    *,
    may_be_late: bool = False,
) -> None:
    """Do something while about every twelfth message, or its answer, is lost, and others come late."""
    actions: list[Action] = [
        DropConnection(),
        DropConnection(stored=True),
        DropConnection(stored=True),
        DetachLink(),
        CloseConnection(answered=True),
        EndSession(answered=True),
        DetachLink(answered=True),
    ]
    if may_be_late:
        actions += [StoreLate(), StoreLate()]
    faults = [
        emulator.faults.add(rng.choice(actions), role=LinkRole.PRODUCER, after=start + rng.randrange(12))
        for start in range(0, batches * 7 // 8, 12)  # a message that one fires on is not counted by the others
    ]
    late = [fault for fault in faults if isinstance(fault.action, StoreLate)]
    # A connection over TLS takes several times as long to make; it must live long enough to be of use.
    longest = 0.03 if way.name == "native" else 0.3
    disturbing = asyncio.get_running_loop().create_task(disturb(emulator, rng, late, longest))
    try:
        await work
    finally:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        emulator.faults.clear()
    assert all(fault.fired for fault in faults)


@pytest.mark.timeout(120)
async def test_send_under_random_faults_stores_every_event_once_in_order(
    emulator: Emulator, way: Way, seed: int, batches: int
) -> None:
    """*No duplicate and no reorder*: with links and connections lost before, after and until later, at random."""
    expected = rows(batches)
    async with producer_to(emulator.connection_string, **way.options) as producer:
        sends = asyncio.gather(*(publish(producer, each, expected[each]) for each in PARTITIONS))
        await while_disturbed(emulator, way, random.Random(seed), batches, sends, may_be_late=True)
        for partition_id in PARTITIONS:
            await producer.settle(partition_id)
    for partition_id in PARTITIONS:
        assert await stored(emulator.connection_string, partition_id, **way.options) == flat(expected[partition_id])


@pytest.mark.timeout(120)
async def test_send_plain_under_random_faults_repeats_events(
    emulator: Emulator, way: Way, seed: int, batches: int
) -> None:
    """*At least once*: under the same faults the plain producer loses nothing, and stores some events twice."""
    expected = rows(batches)

    async def publish_plainly(producer: EventProducer, partition_id: str) -> None:
        for bodies in expected[partition_id]:
            while True:
                try:
                    await producer.send([EventData(body) for body in bodies], partition_id=partition_id)
                    break
                except ServiceError:
                    continue

    async with producer_to(emulator.connection_string, **way.options, idempotent=False) as producer:
        sends = asyncio.gather(*(publish_plainly(producer, each) for each in PARTITIONS))
        await while_disturbed(emulator, way, random.Random(seed), batches, sends)
    found = {each: await stored(emulator.connection_string, each, **way.options) for each in PARTITIONS}
    assert all(set(found[each]) == set(flat(expected[each])) for each in PARTITIONS)
    assert sum(map(len, found.values())) > sum(len(flat(each)) for each in expected.values())


async def test_send_cancelled_at_random_stores_every_event_once(emulator: Emulator, way: Way, seed: int) -> None:
    """*No duplicate and no reorder*: callers that time out and try again, with the same batch, publish it once."""
    rng = random.Random(seed)
    expected: list[str] = []
    async with producer_to(emulator.connection_string, **way.options) as producer:
        for number in range(150 if way.name == "native" else 40):
            events = [EventData(f"{number}.{index}") for index in range(rng.randrange(1, 5))]
            expected += [f"{number}.{index}" for index in range(len(events))]
            if rng.random() < 0.2:
                emulator.faults.add(DropConnection(stored=rng.random() < 0.5), role=LinkRole.PRODUCER)
            while events[0].published_sequence_number is None:
                try:
                    async with asyncio.timeout(rng.choice([0.0, 0.0005, 0.001, 0.002, 0.05])):
                        await producer.send(events, partition_id="0")
                except (TimeoutError, PublishOutcomeUnknownError, ServiceError):
                    continue
    assert await stored(emulator.connection_string, "0", **way.options) == expected


@pytest.mark.parametrize("is_resent_first", [False, True])
async def test_send_stored_late_is_stored_once(emulator: Emulator, way: Way, is_resent_first: bool) -> None:
    """*No duplicate*: a transfer of a lost connection that arrives before or after its repeat is stored once."""
    async with producer_to(emulator.connection_string, **way.options) as producer:
        await producer.send(EventData("a"), partition_id="0")
        late = emulator.faults.add(StoreLate(), role=LinkRole.PRODUCER)
        attaching = emulator.faults.add(
            Refuse("amqp:link:detach-forced"), on=Performative.ATTACH, role=LinkRole.PRODUCER, count=None
        )
        events = [EventData("b"), EventData("c")]
        with pytest.raises(PublishOutcomeUnknownError):
            await producer.send(events, partition_id="0")
        if not is_resent_first:
            late.remove()
        attaching.remove()
        await producer.send(events, partition_id="0")
        late.remove()
        await producer.send(EventData("d"), partition_id="0")
        assert [event.published_sequence_number for event in events] == [2, 3]
    assert await stored(emulator.connection_string, "0", **way.options) == list("abcd")


async def test_send_settles_a_doubt_while_connections_are_closed_for_a_frame(emulator: Emulator, way: Way) -> None:
    """*No loss*: a close with the condition by which attaches of unknown producers are refused is a lost connection."""
    async with producer_to(emulator.connection_string, **way.options) as producer:
        await producer.send(EventData("a"), partition_id="0")
        emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER)
        close = CloseConnection("amqp:not-allowed")
        closes = emulator.faults.add(close, on=Performative.ATTACH, role=LinkRole.PRODUCER)
        events = [EventData("b")]
        while events[0].published_sequence_number is None:
            try:
                await producer.send(events, partition_id="0")
            except (PublishOutcomeUnknownError, ServiceError):
                continue
        assert closes.fired == 1
    assert await stored(emulator.connection_string, "0", **way.options) == ["a", "b"]


async def test_send_to_a_busy_service_waits_and_is_stored_once(emulator: Emulator, way: Way) -> None:
    """*Recovery*: a throttled batch is waited for as long as the service asks, on the same link, and stored once."""
    async with producer_to(emulator.connection_string, **way.options) as producer:
        await producer.send(EventData("a"), partition_id="0")
        busy = emulator.faults.add(Reject(), role=LinkRole.PRODUCER)
        attaches = emulator.faults.add(Refuse("amqp:not-allowed"), on=Performative.ATTACH, role=LinkRole.PRODUCER)
        started = time.monotonic()
        await producer.send(EventData("b"), partition_id="0")
        assert time.monotonic() - started >= 4.0
        assert (busy.fired, attaches.fired) == (1, 0)
        attaches.remove()
    assert await stored(emulator.connection_string, "0", **way.options) == ["a", "b"]


async def test_close_raises_what_stayed_in_doubt(emulator: Emulator, way: Way) -> None:
    """*Tidy close*: with a service that takes no link any more, the deadline holds and the doubt is raised."""
    producer = producer_to(emulator.connection_string, **way.options)
    await producer.send(EventData("a"), partition_id="0")
    emulator.faults.add(Refuse("amqp:link:detach-forced"), on=Performative.ATTACH, role=LinkRole.PRODUCER, count=None)
    emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER)
    for use in (producer.send(EventData("b"), partition_id="0"), producer.aclose(0.5)):
        with pytest.raises(PublishOutcomeUnknownError):
            await use
    emulator.faults.clear()
    assert await stored(emulator.connection_string, "0", **way.options) == ["a", "b"]


# ------------------------------------------------------------------------------------------------- the service dies


@pytest.fixture
async def service(nothing_left: None, tmp_path: Path) -> AsyncIterator[EmulatorProcess]:
    """`eventpump emulator` on a data directory, in a process of its own."""
    config = write_config(tmp_path / "Config.json", len(PARTITIONS))
    async with EmulatorProcess(data=tmp_path / "data", arguments=["--config", str(config)]) as started:
        yield started


@pytest.mark.timeout(120)
async def test_send_while_the_service_is_killed_stores_every_event_once(
    service: EmulatorProcess, seed: int, request: pytest.FixtureRequest
) -> None:
    """*No loss, no duplicate and no reorder*: killed and started on its data while batches are on their way."""
    kills = 6 if request.config.getoption("--long") else 2
    expected = rows(400 * (kills + 1))
    rng, progress = random.Random(seed), Progress()
    async with producer_to(service.connection_string) as producer, asyncio.TaskGroup() as group:
        sends = [group.create_task(publish(producer, each, expected[each], progress)) for each in PARTITIONS]
        for kill in range(kills):
            count = 400 * kill + rng.randrange(1, 400)
            await progress.until(lambda count=count: sum(progress.batches.values()) >= count)  # type: ignore[misc]
            assert not all(each.done() for each in sends)
            await service.kill()
            await service.start()
    for partition_id in PARTITIONS:
        assert await stored(service.connection_string, partition_id) == flat(expected[partition_id])


@pytest.mark.parametrize("mode", ["replayable", "exclusive"])
async def test_killed_publisher_continues_at_what_is_published(
    emulator: Emulator, way: Way, tmp_path: Path, mode: Literal["replayable", "exclusive"]
) -> None:
    """*No duplicate*: every life asks how many of its events are published, and goes on from there."""
    bodies = [f"{number}" for number in range(60)]
    published = 0
    for life in range(6):
        store = SqlitePublisherStateStore(tmp_path / "states.db")
        producer = producer_to(emulator.connection_string, **way.options, name="feed", state_store=store, mode=mode)
        found = await producer.get_partition_publishing_properties("0")
        assert (found.events_published, found.owner_level) == (published, life if mode == "exclusive" else 0)
        emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER, after=4)
        for body in bodies[published : published + 9]:
            await producer.send(EventData(body), partition_id="0")
        # It dies with a batch on its way: stored, or lost forever.
        is_stored = life % 2 == 0
        emulator.faults.add(DropConnection(stored=is_stored), role=LinkRole.PRODUCER)
        emulator.faults.add(
            Refuse("amqp:link:detach-forced"), on=Performative.ATTACH, role=LinkRole.PRODUCER, count=None
        )
        with pytest.raises(PublishOutcomeUnknownError):
            await producer.send(EventData(bodies[published + 9]), partition_id="0")
        with pytest.raises(PublishOutcomeUnknownError):
            await producer.aclose(0.0)
        emulator.faults.clear()
        published += 9 + is_stored
    assert await stored(emulator.connection_string, "0", **way.options) == bodies[:published]


async def test_start_counts_the_end_of_the_partition_by_stamps(emulator: Emulator, way: Way, tmp_path: Path) -> None:
    """*No duplicate*: what was stored after the number was read is counted by its stamps, beside other writers."""
    scan: dict[str, Any] = {"name": "feed", "on_doubt": "scan", "scan_consumer_group": "$Default", **way.options}
    async with (
        EventProducer(emulator.connection_string, HUB, **CONNECTION, **way.options) as other,
        producer_to(
            emulator.connection_string, state_store=SqlitePublisherStateStore(tmp_path / "states.db"), **scan
        ) as former,
    ):
        for number in range(0, 700, 2):
            await former.send([EventData(f"{number}"), EventData(f"{number + 1}")], partition_id="0")
            await other.send(EventData("somebody else's"), partition_id="0")
        last = (await former.get_partition_properties("0")).last_enqueued_sequence_number
    store = SqlitePublisherStateStore(tmp_path / "states.db")
    await store.open()
    found = await store.read_state("feed", "0")
    assert found is not None
    assert found.state.is_clean
    # As it is where a start was cut off after it had read the number, 600 events before the end.
    unclean = replace(found.state, is_clean=False, start=100, published=100, intent=PublisherIntent(1, last - 900, 100))
    assert await store.write_state("feed", "0", unclean, found) is not None
    async with producer_to(emulator.connection_string, state_store=store, **scan) as producer:
        assert (await producer.get_partition_publishing_properties("0")).events_published == 700
        await producer.send(EventData("700"), partition_id="0")
    bodies = [body for body in await stored(emulator.connection_string, "0", **way.options) if body.isdecimal()]
    assert bodies == [f"{number}" for number in range(701)]


async def test_start_at_a_service_that_has_forgotten_is_refused(nothing_left: None, way: Way) -> None:
    """A service that has forgotten its producers refuses the id: said at once, with what is known."""
    async with (
        emulator_of(1, tls=way.tls) as emulator,
        producer_to(emulator.connection_string, **way.options) as producer,
    ):
        await producer.send(EventData("a"), partition_id="0")
        await emulator.restart()
        with pytest.raises(ProducerStateLostError, match="not known"):
            await producer.send(EventData("b"), partition_id="0")
