"""A user's source that misbehaves: the host or reader over it neither ends, nor loses or repeats an event."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from eventpump.clients.consumers import EventProcessorHost, PartitionReader
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.errors import ClosedError, ConnectionLostError, RequestRefusedError, ServiceError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import HubProperties, PartitionProperties, ReceiveLinkSpec, ReceiveSink, SendLinkSpec
from eventpump.sources.hub import HubSource
from eventpump.sources.memory import MemorySource
from eventpump.sources.transport import SourceTransport
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from eventpump.testing.sink import RecordingSink
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.seeds import seeds

_EARLIEST = EventPosition.earliest()


class Strange(BaseException):
    """Derives from no class that is caught."""


class Unruly(MemorySource):
    """Now and then raises what it may not, returns nonsense, is slow to fail, or calls its sink after the end."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.calm = False
        self.mischief = 0

    async def _misbehave(self) -> Any:
        if self.calm or self.rng.random() < 0.5:
            return False
        self.mischief += 1
        match self.rng.randrange(5):
            case 0:
                raise KeyError("surprise")
            case 1:
                raise Strange("surprise")
            case 2:
                raise asyncio.CancelledError("of something else")
            case 3:
                await asyncio.sleep(3)
                raise ServiceError("late")
            case _:
                return True

    async def partitions(self) -> HubProperties:
        return "nonsense" if await self._misbehave() else await super().partitions()  # type: ignore[return-value]  # likewise

    async def partition_properties(self, partition_id: str) -> PartitionProperties:
        if await self._misbehave():
            return None  # type: ignore[return-value]  # that is the test
        return await super().partition_properties(partition_id)

    async def open(self, partition_id: str, position: EventPosition, sink: ReceiveSink, **options: Any) -> Any:
        if await self._misbehave():
            return 17
        link = await super().open(partition_id, position, sink, **options)
        if not self.calm and self.rng.random() < 0.5:
            self.mischief += 1
            loop, error, close = asyncio.get_running_loop(), ValueError("no error of ours"), link._close

            def detach() -> None:
                close()
                sink.messages([])
                sink.detached(error)  # type: ignore[arg-type]  # that is the test
                sink.detached(ConnectionLostError("again"))
                sink.messages([b"after the end"])

            loop.call_later(self.rng.random(), detach)
        elif not self.calm and self.rng.random() < 0.3:

            def broken(credit: int) -> None:
                link._close()
                raise ZeroDivisionError("set_credit")

            link.set_credit = broken  # type: ignore[method-assign]  # likewise
        return link


@seeds(4, of=12)
async def test_read_from_a_faulty_source_returns_each_event_once_in_order(seed: int) -> None:
    """Until it behaves again nothing is lost, and what it did is an error that is retried."""
    source = Unruly(seed)
    source.append("0", *[b"x"] * 300)
    async with PartitionReader(source=source, partition_id="0", prefetch_events=20) as reader:
        asyncio.get_running_loop().call_later(40, setattr, source, "calm", True)
        seen: list[int] = []
        while len(seen) < 300:
            seen += [event.sequence_number for event in await reader.read(17)]
            if len(seen) < 200:
                source.lose_links()
    assert seen == list(range(300))


@seeds(2, of=6)
async def test_host_of_a_faulty_source_processes_everything(seed: int) -> None:
    """Its partition is processed completely, in order, at least once."""
    source, seen, done = Unruly(seed), list[int](), asyncio.Event()
    source.append("0", *[b"x"] * 300)

    class Seeing(EventProcessor):
        async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
            seen.extend(event.sequence_number for event in events)
            if seen[-1] == 299:
                done.set()

    store = MemoryLeaseStore(MemoryLeases())
    host = EventProcessorHost(
        source=source, processor=Seeing(), lease_store=store, prefetch_events=20, max_batch_size=7, startup_timeout=1000
    )
    running = asyncio.create_task(host.run())
    asyncio.get_running_loop().call_later(40, setattr, source, "calm", True)
    async with asyncio.timeout(1000):
        while not done.is_set():
            await asyncio.sleep(0.5)
            source.lose_links() if not source.calm else None
    await host.aclose()
    await running
    assert set(seen) == set(range(300))
    assert source.mischief


async def test_close_ends_links_and_not_the_source() -> None:
    """Links of the transport end with an error, and are closed in the source; the source answers still."""
    source, sink = MemorySource(), RecordingSink()
    transport = SourceTransport(source, keeps_ended=False)
    link = await transport.open_receive_link(_spec(), sink)
    link.set_credit(10)
    await transport.aclose()
    assert isinstance(sink.errors[0], ConnectionLostError)
    assert source.credit("0") == []
    source.append("0", b"x")
    await asyncio.sleep(1)
    assert sink.batches == []
    with pytest.raises(ClosedError):
        await transport.get_hub_properties("memory")
    assert (await source.partitions()).partition_ids == ("0",)


async def test_open_that_is_cancelled_calls_the_sink_no_more() -> None:
    """Even if the source goes on."""
    kept: list[ReceiveSink] = []

    class Slow(MemorySource):
        async def open(self, partition_id: str, position: EventPosition, sink: ReceiveSink, **options: Any) -> Any:
            kept.append(sink)
            await asyncio.Event().wait()

    sink = RecordingSink()
    transport = SourceTransport(Slow(), keeps_ended=False)
    opening = asyncio.create_task(transport.open_receive_link(_spec(), sink))
    await asyncio.sleep(1)
    opening.cancel()
    await asyncio.wait({opening})
    assert opening.cancelled()
    kept[0].messages([b"late"])
    kept[0].detached(ConnectionLostError("late"))
    assert (sink.batches, sink.errors) == ([], [])
    await transport.aclose()


async def test_link_without_a_connection_is_dropped_alone() -> None:
    """It cannot be probed; dropping its connection ends it, and no other."""
    source, one, two = MemorySource(), RecordingSink(), RecordingSink()
    transport = SourceTransport(source, keeps_ended=False)
    first, second = [await transport.open_receive_link(_spec(), sink) for sink in (one, two)]
    assert await first.probe(1.0) is None
    first.drop_connection("silent")
    assert [str(error) for error in one.errors] == ["silent"]
    second.set_credit(1)
    source.append("0", b"x")
    assert await two.received(1) == [b"x"]
    await transport.aclose()


async def test_hub_as_a_source_is_probed_through() -> None:
    """Under another source's link, and directly, a hub's link is checked as ever."""
    hub = FakeHub()
    source = HubSource(FakeTransport(hub), hub.name)
    transport = SourceTransport(source, keeps_ended=False)
    link = await transport.open_receive_link(_spec(), RecordingSink())
    assert await link.probe(1.0) is True
    link.drop_connection("dead")
    await transport.aclose()
    async with PartitionReader(source=source, partition_id="0") as reader:
        service = reader._service
        assert service is not None
        assert service.transport is source.transport
    assert not source.transport.is_closed  # type: ignore[attr-defined]  # of the fake
    await source.aclose()
    assert source.transport.is_closed  # type: ignore[attr-defined]  # likewise


async def test_source_cannot_be_sent_to() -> None:
    """The error says so."""
    with pytest.raises(RequestRefusedError, match="cannot be sent to"):
        await SourceTransport(MemorySource(), keeps_ended=True).open_send_link(SendLinkSpec("memory"))


def _spec() -> ReceiveLinkSpec:
    return ReceiveLinkSpec("memory", "$Default", "0", _EARLIEST)
