"""The network between hosts or producers and the service is cut, goes silent, stalls, or is slow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from eventpump import Emulator, EventData, EventProducer, RetryOptions
from eventpump.emulator.faults import DropConnection, LinkRole
from eventpump.errors import ConnectionLostError, ServiceTimeoutError
from eventpump.reports import LinkFailed
from eventpump.testing.proxy import Direction, FaultProxy
from tests.faults.programs import CONNECTION, HUB, IDLE_TIMEOUT, RECONNECT, Publisher, Stage, run_for
from tests.ways import over_both

pytestmark = over_both()

CUT_RECOVERY = 3.0
"""Seconds within which events flow again after a reset connection, which is noticed at once."""

CLOSING = 3.0
"""Seconds a host may take beyond its deadline without an answer: to cancel, to give up the connection, and slack."""


@pytest.fixture
async def proxy(nothing_left: None, emulator: Emulator) -> AsyncIterator[FaultProxy]:
    """A network that can be broken, between the service and its clients."""
    async with FaultProxy(emulator.port) as started:
        yield started


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(20 if metafunc.config.getoption("--long") else 1))


async def test_host_over_a_cut_connection_loses_and_repeats_nothing(
    stage: Stage, proxy: FaultProxy, seed: int, request: pytest.FixtureRequest
) -> None:
    """*No loss*, *no duplicate and no reorder*, *recovery*: cut anywhere, the host goes on where it was."""
    rng = random.Random(seed)
    processor = stage.processor("alone")
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def cuts() -> None:
            await stage.progress.until_flowing(publisher.partitions, 20.0)
            for number in range(20 if request.config.getoption("--long") else 4):
                accepted = proxy.connections_accepted
                if number == 0:
                    assert proxy.cut() == 1
                else:
                    # In the middle of a frame: of an attach, a transfer, or whatever comes then.
                    proxy.cut_after(rng.randrange(1, 20_000))
                await asyncio.wait_for(proxy.until_accepted(accepted + 1), CUT_RECOVERY)
                await stage.progress.until_flowing(publisher.partitions, CUT_RECOVERY)
            await publisher.stop()
            (await stage.verify(publisher)).check_no_duplicate()

        await run_for(stage.host("alone", processor, custom_endpoint_address=proxy.address), cuts)
    assert stage.count(LinkFailed) >= 4
    assert len(processor.opened) == 4


@pytest.mark.parametrize("directions", [tuple(Direction), (Direction.TO_CLIENT,)], ids=["both ways", "to the client"])
async def test_host_on_a_silent_connection_reconnects(
    stage: Stage, proxy: FaultProxy, directions: tuple[Direction, ...]
) -> None:
    """*Recovery*, *no loss*, *no duplicate*: half-open, a connection is dropped in time, though nothing says so."""
    processor = stage.processor("alone")
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def silence() -> None:
            await stage.progress.until_flowing(publisher.partitions, 20.0)
            proxy.stall(*directions)
            failed = stage.count(LinkFailed)
            await stage.progress.until(lambda: stage.count(LinkFailed) >= failed + 4, IDLE_TIMEOUT + 1.5)
            proxy.restore()
            await stage.progress.until_flowing(publisher.partitions, RECONNECT)
            await publisher.stop()
            (await stage.verify(publisher)).check_no_duplicate()

        await run_for(stage.host("alone", processor, custom_endpoint_address=proxy.address), silence)
    assert len(processor.opened) == 4


async def test_host_without_a_network_keeps_its_leases(stage: Stage, proxy: FaultProxy) -> None:
    """*Recovery*: it keeps its leases while the service cannot be reached, and flows when it can, no duplicate."""
    processor = stage.processor("alone")
    async with Publisher(stage, 4) as publisher:
        publisher.start()

        async def gone() -> None:
            await stage.progress.until_flowing(publisher.partitions, 20.0)
            proxy.refuse()
            accepted = proxy.connections_accepted
            proxy.cut()
            await asyncio.wait_for(proxy.until_accepted(accepted + 5), 10.0)
            proxy.restore()
            await stage.progress.until_flowing(publisher.partitions, CUT_RECOVERY)
            await publisher.stop()
            (await stage.verify(publisher)).check_no_duplicate()

        await run_for(stage.host("alone", processor, custom_endpoint_address=proxy.address), gone)
    assert len(processor.opened) == 4


async def test_host_on_a_silent_connection_closes_in_time(stage: Stage, proxy: FaultProxy) -> None:
    """*Tidy close*: closing waits for no answer that does not come, and the last checkpoint is stored all the same."""
    processor = stage.processor("alone", checkpoint_every=1)
    async with Publisher(stage, 4) as publisher:
        host = stage.host("alone", processor, custom_endpoint_address=proxy.address, idle_timeout=60.0)
        await publisher.publish_everywhere(40)
        async with host, asyncio.TaskGroup() as group:
            group.create_task(host.run())
            await stage.progress.until_reached(await publisher.ends())
            proxy.half_open()
            async with asyncio.timeout(1.0 + CLOSING):
                await host.aclose(1.0)
        assert await stage.held_leases() == {}
        assert await stage.checkpoints(publisher.partitions) == dict.fromkeys(publisher.partitions, 39)


async def test_producer_over_a_cut_connection_sends_again(stage: Stage, proxy: FaultProxy) -> None:
    """*At least once*: a send whose connection is cut is repeated, and what was acknowledged is there."""
    async with Publisher(stage, 1, custom_endpoint_address=proxy.address) as publisher:
        for _ in range(5):
            sending = asyncio.create_task(publisher.publish("0", 400))
            count = len(publisher.acknowledged["0"]) + 100
            await stage.progress.until(lambda count=count: len(publisher.acknowledged["0"]) >= count)  # type: ignore[misc]  # the default is the type
            proxy.cut()
            await asyncio.wait_for(sending, CUT_RECOVERY)
        assert len(publisher.acknowledged["0"]) == 2000
        await stage.read_log(publisher)


async def test_producer_on_a_silent_connection_sends_again(stage: Stage, proxy: FaultProxy) -> None:
    """*At least once*, *recovery*: a send on a half-open connection is repeated on another one, in time."""
    async with Publisher(stage, 1, custom_endpoint_address=proxy.address) as publisher:
        await publisher.publish("0", 40)
        proxy.half_open()
        accepted = proxy.connections_accepted
        sending = asyncio.create_task(publisher.publish("0", 40))
        await asyncio.wait_for(proxy.until_accepted(accepted + 1), IDLE_TIMEOUT + 2.0)
        proxy.restore()
        await asyncio.wait_for(sending, RECONNECT)
        await stage.read_log(publisher)


@over_both(is_long=True)  # uamqp's own code may crash the process when its sender goes: docs/transports.md
async def test_send_without_an_answer_ends_in_time(stage: Stage, proxy: FaultProxy) -> None:
    """*Recovery*: with no answer the sender gets an error in time, for an unknown outcome; later sends work."""
    options = {**CONNECTION, "operation_timeout": 0.5, "idle_timeout": 60.0}
    async with EventProducer(
        stage.connection_string,
        HUB,
        custom_endpoint_address=proxy.address,
        retry=RetryOptions(max_retries=0),
        **{**options, **stage.way},
    ) as producer:
        await producer.send(EventData(b"first"), partition_id="0")
        proxy.stall(Direction.TO_SERVICE)
        with pytest.raises(ServiceTimeoutError):
            await asyncio.wait_for(producer.send(EventData(b"second"), partition_id="0"), 2.0)
        proxy.restore()
        await asyncio.wait_for(producer.send(EventData(b"third"), partition_id="0"), 2.0)


async def test_send_whose_acknowledgement_is_lost_is_stored_twice(stage: Stage, emulator: Emulator) -> None:
    """*At least once*: stored but not acknowledged, a batch is sent again; without retries its sender gets an error."""
    async with Publisher(stage, 1) as publisher:
        emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER, partition="0")
        await publisher.publish("0", 20)
        assert await publisher.ends() == {"0": 40}
        await stage.read_log(publisher)
    async with EventProducer(stage.connection_string, HUB, retry=RetryOptions(max_retries=0), **stage.way) as producer:
        emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER, partition="0")
        with pytest.raises(ConnectionLostError):
            await producer.send(EventData(b"x"), partition_id="0")


async def test_host_on_a_slow_network_loses_nothing(stage: Stage, proxy: FaultProxy) -> None:
    """*No loss*, *no duplicate and no reorder*: every byte comes late, and everything comes."""
    proxy.delay(0.05)
    async with Publisher(stage, 4) as publisher:
        await publisher.publish_everywhere(300)

        async def all_came() -> None:
            (await stage.verify(publisher)).check_no_duplicate()

        await run_for(stage.host("alone", stage.processor("alone"), custom_endpoint_address=proxy.address), all_came)
