"""Exclusive and shared readers: azure-eventhub's and ours take a partition from each other (protocol.md 5.4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from eventpump import Emulator, EventData, EventProducer, PartitionReader
from eventpump.emulator.faults import Delay, LinkRole, Performative
from eventpump.errors import ConsumerDisconnectedError, QuotaExceededError
from eventpump.options.consumer import ReaderOptions
from tests.interop.peers.driver import PATIENCE, AzurePeer, PeerConsumer

pytestmark = pytest.mark.asyncio(loop_scope="session")


@asynccontextmanager
async def ours(emulator: Emulator, hub: str, level: int | None, partition: str = "0") -> AsyncIterator[PartitionReader]:
    """Read a partition with our reader."""
    options: ReaderOptions = {} if level is None else {"owner_level": level}
    async with PartitionReader(emulator.connection_string, hub, partition_id=partition, **options) as reader:
        yield reader


async def theirs(
    azure: AzurePeer,
    emulator: Emulator,
    hub: str,
    level: int | None,
    partition: str = "0",
    group: str = "$Default",
) -> PeerConsumer:
    """Read a partition with its consumer."""
    return await azure.consumer(
        emulator.connection_string,
        hub,
        group=group,
        partition_id=partition,
        starting_position="-1",
        owner_level=level,
    )


async def first(reader: PartitionReader) -> bytes:
    """Wait for an event, which proves that the reader is attached."""
    events = await reader.read(1, PATIENCE)
    return events[0].body if events else b"nothing"


async def send(emulator: Emulator, hub: str, body: str, partition: str = "0") -> None:
    async with EventProducer(emulator.connection_string, hub) as producer:
        await producer.send(EventData(body), partition_id=partition)


async def test_azure_reader_of_a_higher_level_takes_over_from_ours(
    emulator: Emulator, azure: AzurePeer, hub: str
) -> None:
    """Its reader of a higher or equal level, or of any where ours has none, takes the partition; ours is notified."""

    async def take_over(partition: str, old: int | None, new: int) -> None:
        await send(emulator, hub, "before", partition)
        async with ours(emulator, hub, old, partition) as reader:
            assert await first(reader) == b"before"
            consumer = await theirs(azure, emulator, hub, new, partition)
            with pytest.raises(ConsumerDisconnectedError) as stolen:
                await reader.read(max_wait_time=PATIENCE)
        assert stolen.value.condition == "amqp:link:stolen"
        await send(emulator, hub, "after", partition)
        assert [each.data for each in await consumer.receive(2)] == [b"before", b"after"]
        assert consumer.notes.errors == []

    await asyncio.gather(take_over("0", None, 0), take_over("1", 1, 2), take_over("2", 3, 3), take_over("3", 0, 0))


async def test_our_reader_of_a_higher_level_takes_over_from_azures(
    emulator: Emulator, azure: AzurePeer, hub: str
) -> None:
    """Our reader of a higher or equal level takes the partition; its user gets ConnectionLostError, and no more."""

    async def take_over(partition: str, old: int | None, new: int) -> None:
        await send(emulator, hub, "before", partition)
        consumer = await theirs(azure, emulator, hub, old, partition)
        await consumer.receive(1)
        async with ours(emulator, hub, new, partition) as reader:
            assert await first(reader) == b"before"
            error = await consumer.error()
            assert error.kind == "ConnectionLostError"
            assert "amqp:link:stolen" in error.text
            await send(emulator, hub, "after", partition)
            assert await first(reader) == b"after"
            await consumer.until(lambda notes: bool(notes.closed))
        assert [each.data for each in consumer.notes.received] == [b"before"]
        assert consumer.notes.closed == [(partition, "OWNERSHIP_LOST")]

    await asyncio.gather(take_over("0", None, 0), take_over("1", 1, 2), take_over("2", 3, 3), take_over("3", 0, 0))


async def test_azure_reader_of_a_lower_level_is_refused(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """While ours holds a level, its reader of a lower one, or of none, is refused, and ours reads on."""

    async def refuse(partition: str, held: int, level: int | None) -> None:
        await send(emulator, hub, "before", partition)
        async with ours(emulator, hub, held, partition) as reader:
            assert await first(reader) == b"before"
            consumer = await theirs(azure, emulator, hub, level, partition)
            error = await consumer.error()
            assert error.kind == "ConnectionLostError"
            assert "amqp:link:stolen" in error.text
            await send(emulator, hub, "after", partition)
            assert await first(reader) == b"after"
        assert consumer.notes.received == []

    await asyncio.gather(refuse("0", 5, 4), refuse("1", 5, None), refuse("2", 0, None))


async def test_our_reader_of_a_lower_level_is_refused(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """While its reader holds a level, ours of a lower one, or of none, is refused, and its reads on."""

    async def refuse(partition: str, held: int, level: int | None) -> None:
        await send(emulator, hub, "before", partition)
        consumer = await theirs(azure, emulator, hub, held, partition)
        await consumer.receive(1)
        async with ours(emulator, hub, level, partition) as reader:
            with pytest.raises(ConsumerDisconnectedError) as refused:
                await reader.read(max_wait_time=PATIENCE)
        assert refused.value.condition == "amqp:link:stolen"
        await send(emulator, hub, "after", partition)
        assert [each.data for each in await consumer.receive(2)] == [b"before", b"after"]
        assert consumer.notes.errors == []

    await asyncio.gather(refuse("0", 5, 4), refuse("1", 5, None), refuse("2", 0, None))


async def test_owner_levels_count_within_a_group_only(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """A reader of another consumer group is left alone, whatever its level."""
    await send(emulator, hub, "before")
    consumer = await theirs(azure, emulator, hub, 1, group="second")
    await consumer.receive(1)
    async with ours(emulator, hub, 9) as reader:
        assert await first(reader) == b"before"
        await send(emulator, hub, "after")
        assert await first(reader) == b"after"
    assert [each.data for each in await consumer.receive(2)] == [b"before", b"after"]
    assert consumer.notes.errors == []


async def test_five_shared_readers_of_both_kinds_exclude_a_sixth(
    emulator: Emulator, azure: AzurePeer, hub: str
) -> None:
    """Three of its readers and two of ours share a partition; a sixth of either is refused until one leaves.

    Its sixth does not report the refusal: the SDK reports a stolen link only, and tries the rest again.
    """
    await send(emulator, hub, "before")
    consumers = await asyncio.gather(*(theirs(azure, emulator, hub, None) for _ in range(3)))
    await asyncio.gather(*(consumer.receive(1) for consumer in consumers))
    async with ours(emulator, hub, None) as one:
        async with ours(emulator, hub, None) as two:
            assert [await first(one), await first(two)] == [b"before", b"before"]
            async with ours(emulator, hub, None) as sixth:
                with pytest.raises(QuotaExceededError) as refused:
                    await sixth.read(max_wait_time=PATIENCE)
            assert refused.value.condition == "amqp:resource-limit-exceeded"
            attaches = emulator.faults.add(
                Delay(0), on=Performative.ATTACH, role=LinkRole.CONSUMER, hub=hub, count=None
            )
            waiting = await theirs(azure, emulator, hub, None)
            async with asyncio.timeout(PATIENCE):
                while attaches.fired < 2:  # one that comes again was refused
                    await waiting.pause(0.05)
            attaches.remove()
            assert waiting.notes.received == []
            await send(emulator, hub, "after")
            assert [await first(one), await first(two)] == [b"after", b"after"]
        assert [each.data for each in await waiting.receive(2)] == [b"before", b"after"]
    await asyncio.gather(*(consumer.receive(2) for consumer in consumers))
    assert [consumer.notes.errors for consumer in [*consumers, waiting]] == [[], [], [], []]


async def test_exclusive_reader_detaches_shared_ones_of_both_kinds(
    emulator: Emulator, azure: AzurePeer, hub: str
) -> None:
    """The first reader with a level detaches every shared one, of either kind."""
    await send(emulator, hub, "before")
    consumers = await asyncio.gather(*(theirs(azure, emulator, hub, None) for _ in range(2)))
    await asyncio.gather(*(consumer.receive(1) for consumer in consumers))
    async with ours(emulator, hub, None) as shared:
        await first(shared)
        await theirs(azure, emulator, hub, 0)
        with pytest.raises(ConsumerDisconnectedError):
            await shared.read(max_wait_time=PATIENCE)
    errors = await asyncio.gather(*(consumer.error() for consumer in consumers))
    assert ["amqp:link:stolen" in error.text for error in errors] == [True, True]
