"""Capture's files and the live hub: joined at the very next number, whatever overlaps, is missing or is damaged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventpump.clients.consumers import EventProcessorHost, PartitionReader
from eventpump.consumer.processor import EventProcessor, PartitionContext
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import (
    CaptureFileError,
    CaptureGapError,
    ClosedError,
    ConfigurationError,
    DataLossError,
    EntityNotFoundError,
    RequestRefusedError,
    ServiceError,
)
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import PartitionProperties
from eventpump.reports import HostReport, PartitionFailed
from eventpump.sources.capture import CaptureSource
from eventpump.sources.files import CaptureDirectory
from eventpump.sources.memory import MemorySource
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from eventpump.testing.clock import VirtualTimeLoop
from eventpump.testing.sink import RecordingSink
from tests.unit.sources.capturing import HUB, NAMESPACE, memory_hub, stock, write_capture

_EARLIEST = EventPosition.earliest()


async def _read(source: CaptureSource, count: int | None = None, **options: Any) -> list[int]:
    """Read a number of events, or all to the end of the source."""
    numbers: list[int] = []
    async with asyncio.timeout(100), PartitionReader(source=source, partition_id="0", **options) as reader:
        while count is None or len(numbers) < count:
            events = await reader.read()
            if not events:
                break
            numbers += [event.sequence_number for event in events]
    return numbers


async def test_files_alone_are_read_to_their_end(tmp_path: Path) -> None:
    """In order, with files without events in between, and files that are not of Capture beside them."""
    _, events = memory_hub(30)
    write_capture(tmp_path, [[], events[:10], [], [], events[10:25], events[25:], []])
    (tmp_path / "ns" / HUB / "0" / "notes.txt").write_text("not a Capture file")
    (tmp_path / "ns" / HUB / "0" / "2024").joinpath("other.avro").write_text("nor is this, by its name")
    async with CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source:
        assert await _read(source) == list(range(30))
        facts = await source.partition_properties("0")
        assert (facts.beginning_sequence_number, facts.last_enqueued_sequence_number) == (0, 29)
        assert (await source.partitions()).partition_ids == ("0",)


async def test_events_are_those_of_the_hub(tmp_path: Path) -> None:
    """Body, key, number, offset and time are the same from a file and from the hub."""
    live, events = memory_hub(10)
    write_capture(tmp_path, [events[:5]])
    live.drop("0", 5)
    async with CaptureSource(tmp_path, live=live) as source, PartitionReader(source=source, partition_id="0") as reader:
        found: list[ReceivedEvent] = []
        while len(found) < 10:
            found += await reader.read()
    for event, raw in zip(found, events, strict=True):
        original = ReceivedEvent(raw)
        assert (event.body, event.partition_key, event.offset) == (original.body, "key", original.offset)
        assert event.enqueued_time == original.enqueued_time


@given(
    seed=st.integers(0, 10_000),
    captured=st.integers(0, 60),
    dropped=st.integers(0, 60),
    grows=st.integers(0, 40),
    skip=st.booleans(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_splice_is_exact(seed: int, captured: int, dropped: int, grows: int, skip: bool) -> None:
    """Whatever Capture holds and the hub retains, each event of either comes once and in order, or is named as missing.

    Files and hub overlap, abut or leave a gap; both grow meanwhile, links are lost, and retention goes on.
    """

    async def history(directory: Path) -> None:
        rng = random.Random(seed)
        live, events = memory_hub(60)
        cuts = sorted(rng.randrange(captured + 1) for _ in range(rng.randrange(5)))
        files = [events[a:b] for a, b in zip([0, *cuts], [*cuts, captured], strict=True)]
        write_capture(directory, files)
        live.drop("0", dropped)
        source = CaptureSource(directory, live=live, on_gap="skip" if skip else "fail")
        numbers: list[int] = []
        gap: CaptureGapError | None = None
        is_gap = captured < dropped
        begin = 0 if captured else dropped
        async with (
            source,
            PartitionReader(source=source, partition_id="0", prefetch_events=rng.choice([3, 300])) as reader,
        ):
            while not numbers or numbers[-1] < 59:
                if rng.random() < 0.3:
                    live.lose_links()
                try:
                    numbers += [event.sequence_number for event in await reader.read(rng.randrange(1, 20))]
                except CaptureGapError as error:
                    gap = error
                    break
                if dropped == 60 and is_gap:
                    break
            if gap is not None:
                assert is_gap
                assert captured
                assert not skip
                assert (gap.first_missing, gap.last_missing) == (captured, dropped - 1)
                assert numbers == list(range(captured))
                return
            if grows and numbers and numbers[-1] == 59:
                fresh = stock(live, grows)[-grows:]
                write_capture(directory, [fresh[: grows // 2]], first=50)
                live.lose_links()
                while numbers[-1] < 59 + grows:
                    numbers += [event.sequence_number for event in await reader.read()]
        expected = [*range(begin, captured), *range(max(captured, dropped), 60 + grows)]
        assert skip or not is_gap or not captured
        assert numbers == expected

    with TemporaryDirectory() as directory:
        if captured < dropped == 60:
            return  # nothing lies behind the gap
        loop = VirtualTimeLoop()
        try:
            loop.run_until_complete(asyncio.wait_for(history(Path(directory)), 10_000))
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()


async def test_hub_drops_events_while_files_are_read(tmp_path: Path) -> None:
    """What the hub drops meanwhile is in files written meanwhile: those are looked for again before it is a gap."""
    live, events = memory_hub(100)
    write_capture(tmp_path, [events[:40]])
    source = CaptureSource(tmp_path, live=live)
    async with source, PartitionReader(source=source, partition_id="0", prefetch_events=10) as reader:
        numbers = [event.sequence_number for event in await reader.read()]
        write_capture(tmp_path, [events[40:70]], first=1)
        live.drop("0", 60)
        while len(numbers) < 100:
            numbers += [event.sequence_number for event in await reader.read()]
    assert numbers == list(range(100))


async def test_file_that_appears_while_the_hub_is_asked(tmp_path: Path) -> None:
    """Listed too early, and dropped by the hub before it answers: the files are listed once more."""

    class Racing(MemorySource):
        is_armed = False

        async def partition_properties(self, partition_id: str) -> PartitionProperties:
            if self.is_armed:
                self.is_armed = False
                write_capture(tmp_path, [events[40:70]], first=1)
                self.drop("0", 60)
            return await super().partition_properties(partition_id)

    racing = Racing(hub=HUB)
    events = stock(racing, 100)
    write_capture(tmp_path, [events[:40]])
    source = CaptureSource(tmp_path, live=racing)
    async with source, PartitionReader(source=source, partition_id="0", prefetch_events=10) as reader:
        numbers = await _until(reader, 10)
        racing.is_armed = True
        numbers += await _until(reader, 100 - len(numbers))
    assert numbers == list(range(100))


async def test_files_that_repeat_events(tmp_path: Path) -> None:
    """A file that begins before the end of the one before it: each event is delivered once."""
    _, events = memory_hub(40)
    write_capture(tmp_path, [events[:20], events[15:30], events[16:40]])
    async with CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source:
        assert await _read(source) == list(range(40))


async def test_retention_that_is_faster_than_a_live_reader(tmp_path: Path) -> None:
    """In the hub too: what it drops before it is read is read from files, and without them it is a gap."""
    live, events = memory_hub(100)
    write_capture(tmp_path, [events[:20]])
    source = CaptureSource(tmp_path, live=live)
    async with source, PartitionReader(source=source, partition_id="0", prefetch_events=5) as reader:
        numbers = await _until(reader, 30)
        write_capture(tmp_path, [events[20:60]], first=1)
        live.drop("0", 55)
        numbers += await _until(reader, 70 - len(numbers))
        live.drop("0", 95)
        with pytest.raises(CaptureGapError) as caught:
            await _until(reader, 100)
    assert numbers == list(range(len(numbers)))
    assert caught.value.first_missing is not None
    assert caught.value.first_missing < 95
    assert caught.value.last_missing == 94


def _files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.avro"))


async def _until(reader: PartitionReader, count: int, into: list[int] | None = None) -> list[int]:
    numbers: list[int] = [] if into is None else into
    while len(numbers) < count:
        numbers += [event.sequence_number for event in await reader.read(7)]
    return numbers


async def test_numbers_that_the_hub_never_had_are_no_gap(tmp_path: Path) -> None:
    """In a compacted hub numbers are unused: its live link goes on over them."""

    class Compacted(MemorySource):
        async def open(self, partition_id: str, position: EventPosition, sink: Any, **options: Any) -> Any:
            class Thinned:
                def messages(self, batch: list[bytes]) -> None:
                    for raw in batch:
                        if ReceivedEvent(raw).sequence_number not in (12, 13, 20):
                            sink.messages([raw])

                def detached(self, error: Any) -> None:
                    sink.detached(error)

            return await super().open(partition_id, position, Thinned(), **options)

    compacted = Compacted(hub=HUB)
    write_capture(tmp_path, [stock(compacted, 30)[:10]])
    async with CaptureSource(tmp_path, live=compacted) as source:
        numbers = await _read(source, 27)
    assert numbers == [number for number in range(30) if number not in (12, 13, 20)]


async def test_what_a_live_source_repeats_is_delivered_once(tmp_path: Path) -> None:
    """A source of one's own that begins earlier than it was asked to: the overlap is skipped."""

    class Early(MemorySource):
        async def open(self, partition_id: str, position: EventPosition, sink: Any, **options: Any) -> Any:
            assert position == EventPosition.at_sequence_number(10, inclusive=True)
            return await super().open(partition_id, EventPosition.at_sequence_number(4), sink, **options)

    early = Early(hub=HUB)
    write_capture(tmp_path, [stock(early, 30)[:10]])
    for prefetch in (1, 7, 300):
        source = CaptureSource(tmp_path, live=early)
        assert await _read(source, 30, prefetch_events=prefetch) == list(range(30))


@pytest.mark.parametrize("is_spliced", [True, False])
async def test_gap_between_files(tmp_path: Path, is_spliced: bool) -> None:
    """The hub fills it if it can; otherwise the error has the missing numbers, and "skip" goes on after them."""
    live, events = memory_hub(40)
    write_capture(tmp_path, [events[:10], events[15:30]])
    if is_spliced:
        live.drop("0", 5)
        async with CaptureSource(tmp_path, live=live) as source:
            assert await _read(source, 40) == list(range(40))
        return
    async with CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source:
        with pytest.raises(CaptureGapError, match="sequence numbers 10 to 14") as caught:
            await _read(source)
        assert (caught.value.first_missing, caught.value.last_missing) == (10, 14)
    async with CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE, on_gap="skip") as source:
        assert await _read(source) == [*range(10), *range(15, 30)]


async def test_positions_in_files_and_in_the_hub(tmp_path: Path) -> None:
    """By number, offset and time, in either; "@latest" is the end of the hub."""
    live, events = memory_hub(60)
    write_capture(tmp_path, [[], events[:10], events[10:11], [], events[11:40]])
    live.drop("0", 30)
    for number in (0, 9, 10, 11, 25, 39, 40, 55):
        event = ReceivedEvent(events[number])
        for position in (
            EventPosition.at_sequence_number(number),
            EventPosition.at_offset(event.offset),
            EventPosition.at_enqueued_time(event.enqueued_time),
        ):
            async with CaptureSource(tmp_path, live=MemorySource(hub=HUB)) as source:
                source.live = live
                assert await _first(source, position) == number + 1
                assert await _first(source, replace(position, inclusive=True)) == number
                source.live = None
    async with CaptureSource(tmp_path, live=live) as source:
        sink = RecordingSink()
        link = await source.open("0", EventPosition.latest(), sink)
        link.set_credit(5)
        await asyncio.sleep(1)
        live.append("0", b"new")
        await sink.received(1)
        assert sink.events[0].sequence_number == 60


async def _first(source: CaptureSource, position: EventPosition) -> int:
    sink = RecordingSink()
    link = await source.open("0", position, sink)
    link.set_credit(1)
    await sink.received(1)
    await link.aclose()
    return sink.events[0].sequence_number


async def test_offsets_without_an_order_are_found(tmp_path: Path) -> None:
    """Offsets are opaque text: a checkpoint that is not a number is looked for in all files."""
    events = [
        ReceivedEvent.build(
            b"x", offset=f"a:{number % 7}:{number}", sequence_number=number, enqueued_time=_moment(number)
        ).raw
        for number in range(30)
    ]
    write_capture(tmp_path, [events[:10], events[10:20], events[20:]])
    async with CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source:
        assert await _first(source, EventPosition.at_offset("a:0:14")) == 15
        assert await _first(source, EventPosition.at_offset("a:5:19")) == 20
        with pytest.raises(RequestRefusedError, match="a:9:9"):
            await _read(source, position=EventPosition.at_offset("a:9:9"))


def _moment(number: int) -> Any:
    return ReceivedEvent(memory_hub(number + 1)[1][-1]).enqueued_time


async def test_truncated_file_is_an_error_after_its_events(tmp_path: Path) -> None:
    """What precedes the damage is delivered, and nothing after it: the error names the file and the last event."""
    _, events = memory_hub(3000)
    write_capture(tmp_path, [events[:2000], events[2000:]])
    path = _files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    numbers: list[int] = []
    async with (
        CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source,
        PartitionReader(source=source, partition_id="0") as reader,
    ):
        with pytest.raises(CaptureFileError) as caught:
            await _until(reader, 5000, into=numbers)
    assert numbers == list(range(len(numbers)))
    assert 100 < len(numbers) < 2000
    assert f"after event {numbers[-1]}" in str(caught.value)
    assert caught.value.name in path.as_posix()


@pytest.mark.parametrize("content", [b"", b"Obj\x01", b"no Avro at all" * 100])
async def test_foreign_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    """Under the name of a Capture file: it is not skipped, because events may be missing."""
    _, events = memory_hub(5)
    write_capture(tmp_path, [events])
    _files(tmp_path)[0].with_name("59.avro").write_bytes(content)
    async with CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source:
        with pytest.raises(CaptureFileError, match=r"59\.avro"):
            await _read(source)


async def test_files_out_of_order_are_an_error(tmp_path: Path) -> None:
    """A later file must not begin before an earlier one: events would be taken for repeated ones."""
    _, events = memory_hub(30)
    write_capture(tmp_path, [events[10:20], events[:10], events[20:]])
    async with CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source:
        with pytest.raises(CaptureFileError, match="out of order"):
            await _read(source)
    write_capture(tmp_path, [events[:5] + events[3:8]], "1")
    async with (
        CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source,
        PartitionReader(source=source, partition_id="1") as reader,
    ):
        assert [event.sequence_number for event in await reader.read()] == [0, 1, 2, 3, 4]
        with pytest.raises(CaptureFileError, match="must ascend"):
            await reader.read()


@pytest.mark.parametrize("position", [_EARLIEST, EventPosition.at_sequence_number(3), EventPosition.at_offset("3")])
async def test_what_the_hub_has_from_before_the_first_file_is_read_from_the_hub(
    position: EventPosition, tmp_path: Path
) -> None:
    """Capture was switched on later than the oldest event that the hub still has."""
    live, events = memory_hub(20)
    write_capture(tmp_path, [events[10:15]])
    expected = list(range(0 if position == _EARLIEST else 4, 20))
    async with CaptureSource(tmp_path, live=live) as source:
        assert await _read(source, len(expected), position=position) == expected


async def test_hub_that_ends_before_the_files_is_another_one(tmp_path: Path) -> None:
    """It was recreated, or is not the captured one: its events do not continue the files."""
    _, events = memory_hub(50)
    other, _ = memory_hub(20)
    write_capture(tmp_path, [events])
    async with CaptureSource(tmp_path, live=other) as source:
        with pytest.raises(DataLossError, match="another hub, or was recreated"):
            await _read(source)


async def test_new_files_are_waited_for_without_a_hub(tmp_path: Path) -> None:
    """With `poll_interval` the source does not end with the last file."""
    _, events = memory_hub(30)
    write_capture(tmp_path, [events[:10]])
    source = CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE, poll_interval=60.0)
    async with source, PartitionReader(source=source, partition_id="0") as reader:
        assert await _until(reader, 10) == list(range(10))
        asyncio.get_running_loop().call_later(500, write_capture, tmp_path, [[], events[10:]], "0")
        write_capture(tmp_path, [events[10:]], first=1)
        assert await _until(reader, 20) == list(range(10, 30))


async def test_host_catches_up_and_continues_on_the_hub_alone(tmp_path: Path) -> None:
    """The checkpoints are those of the hub: a host without the source goes on after them."""
    live, events = memory_hub(60)
    write_capture(tmp_path, [events[:40]])
    live.drop("0", 30)
    leases, seen = MemoryLeases(), list[int]()
    processed = asyncio.Event()

    class Seeing(EventProcessor):
        async def process_events(self, context: PartitionContext, batch: Sequence[ReceivedEvent]) -> None:
            seen.extend(event.sequence_number for event in batch)
            if len(seen) in (60, 70):
                processed.set()

    for count in (60, 70):
        source = CaptureSource(tmp_path, live=live) if count == 60 else live
        host = EventProcessorHost(
            source=source,
            processor=Seeing(),
            lease_store=MemoryLeaseStore(leases),
            checkpoint_policy=CheckpointPolicy(every_events=1),
        )
        running = asyncio.create_task(host.run())
        async with asyncio.timeout(1000):
            await processed.wait()
        await host.aclose()
        await running
        processed.clear()
        if count == 60:
            live.append("0", *[b"x"] * 10)
    assert seen == list(range(70))
    await live.aclose()


async def test_host_reports_a_gap_with_its_numbers(tmp_path: Path) -> None:
    """It leaves the partition, and goes on when the file is there."""
    live, events = memory_hub(60)
    write_capture(tmp_path, [events[:20]])
    live.drop("0", 30)
    seen, reports, done = list[int](), list[HostReport](), asyncio.Event()

    class Seeing(EventProcessor):
        async def process_events(self, context: PartitionContext, batch: Sequence[ReceivedEvent]) -> None:
            seen.extend(event.sequence_number for event in batch)
            if seen[-1] == 59:
                done.set()

    def hear(report: HostReport) -> None:
        reports.append(report)
        if isinstance(report, PartitionFailed) and isinstance(report.error, CaptureGapError):
            write_capture(tmp_path, [events[20:30]], first=1)

    async with CaptureSource(tmp_path, live=live) as source:
        host = EventProcessorHost(
            source=source,
            processor=Seeing(),
            lease_store=MemoryLeaseStore(MemoryLeases()),
            checkpoint_policy=CheckpointPolicy(every_events=1),
            hooks=[hear],
        )
        running = asyncio.create_task(host.run())
        async with asyncio.timeout(10_000):
            await done.wait()
        await host.aclose()
        await running
    assert sorted(set(seen)) == list(range(60))
    (failed,) = [each.error for each in reports if isinstance(each, PartitionFailed)]
    assert isinstance(failed, CaptureGapError)
    assert (failed.first_missing, failed.last_missing) == (20, 29)


async def test_closing_in_the_middle_of_a_file_leaves_nothing(tmp_path: Path) -> None:
    """A link closed at any turn calls the sink no more, and leaves no task and no open file."""
    _, events = memory_hub(500)
    write_capture(tmp_path, [events])
    async with CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source:
        for turns in range(12):
            sink = RecordingSink()
            link = await source.open("0", _EARLIEST, sink)
            link.set_credit(400)
            for _ in range(turns):
                await asyncio.sleep(0)
            await link.aclose()
            seen = len(sink.events)
            await asyncio.sleep(1)
            assert len(sink.events) == seen
            assert len(source.tasks) == 0
    with pytest.raises(ClosedError):
        await source.partitions()


async def test_storage_that_fails_is_tried_again(tmp_path: Path) -> None:
    """A failure of the storage is one that passes; a file that vanishes is named."""
    _, events = memory_hub(30)
    write_capture(tmp_path, [events[:10], events[10:]])

    class Failing(CaptureDirectory):
        left = 3

        async def fetch(self, name: str, limit: int | None = None) -> Any:
            if self.left and limit is None:
                self.left -= 1
                raise OSError("disk")
            return await super().fetch(name, limit)

    files = Failing(tmp_path)
    async with CaptureSource(files, hub=HUB, namespace=NAMESPACE) as source:
        assert await _read(source) == list(range(30))
    assert files.left == 0
    with pytest.raises(CaptureFileError, match="is gone"):
        await files.fetch("nothing.avro")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"namespace": NAMESPACE}, "hub"),
        ({"hub": HUB}, "namespace"),
        ({"hub": HUB, "namespace": NAMESPACE, "on_gap": "ignore"}, "on_gap"),
        ({"hub": HUB, "namespace": NAMESPACE, "poll_interval": 0}, "poll_interval"),
        ({"live": MemorySource(), "poll_interval": 5}, "poll_interval"),
        ({"hub": HUB, "namespace": NAMESPACE, "pattern": "{Namespace}/{EventHub}"}, "pattern"),
        ({"live": "Endpoint=sb://ns/;SharedAccessKey=topsecret"}, "live"),
        ({"live": MemorySource}, "live"),
        ({"live": object(), "hub": HUB, "namespace": NAMESPACE}, "live"),
        ({"files": None, "hub": HUB, "namespace": NAMESPACE}, "files"),
        ({"files": CaptureDirectory, "live": MemorySource()}, "files"),
        ({"files": [Path("captured")], "hub": HUB, "namespace": NAMESPACE}, "files"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    """The error names the parameter."""
    with pytest.raises(ConfigurationError) as caught:
        CaptureSource(**{"files": tmp_path, **options})
    assert caught.value.field == field
    assert "topsecret" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="not a directory"):
        CaptureSource(tmp_path / "nothing", hub=HUB, namespace=NAMESPACE)


async def test_checkpoints_of_two_namespaces_are_separate(tmp_path: Path) -> None:
    """Files of two namespaces with one hub name, and one lease store: all events of both are delivered."""
    leases, delivered = MemoryLeases(), list[tuple[str, int]]()

    async def read(namespace: str, count: int) -> None:
        write_capture(tmp_path / namespace, [memory_hub(count)[1]], namespace=namespace)
        done = asyncio.Event()

        async def process(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
            delivered.extend((namespace, event.sequence_number) for event in events)
            await context.checkpoint()
            if events[-1].sequence_number + 1 == count:
                done.set()

        host = EventProcessorHost(
            source=CaptureSource(tmp_path / namespace, hub=HUB, namespace=namespace, poll_interval=60.0),
            processor=process,
            lease_store=MemoryLeaseStore(leases),
        )
        async with asyncio.timeout(100), host:
            await host.run(until=done.wait())

    await read("prod", 48)
    await read("staging", 60)
    assert delivered == [*(("prod", each) for each in range(48)), *(("staging", each) for each in range(60))]


async def test_files_of_two_namespaces_under_a_live_hub_are_refused(tmp_path: Path) -> None:
    """Without a namespace they would be read as one hub's; with it, in any case, the others are ignored."""
    live, events = memory_hub(20)
    write_capture(tmp_path, [events], namespace="prod")
    write_capture(tmp_path, [memory_hub(60)[1]], namespace="staging")
    async with CaptureSource(tmp_path, live=live) as source:
        with pytest.raises(ConfigurationError, match="namespace: is required: there are files of several: prod, stag"):
            await source.open("0", _EARLIEST, RecordingSink())
    async with CaptureSource(tmp_path, live=memory_hub(20)[0], namespace="prod") as source:
        assert await _read(source, 20) == list(range(20))
    async with CaptureSource(tmp_path, hub=HUB.upper(), namespace="STAGING") as source:
        assert await _read(source) == list(range(60))


async def test_partition_without_files(tmp_path: Path) -> None:
    """Alone it does not exist; with a live hub it is read there."""
    live, events = memory_hub(5)
    async with CaptureSource(tmp_path, hub=HUB, namespace=NAMESPACE) as source:
        with pytest.raises(EntityNotFoundError):
            await source.open("0", _EARLIEST, RecordingSink())
    async with CaptureSource(tmp_path, live=live) as source:
        assert await _read(source, 5) == list(range(5))
        with pytest.raises(ServiceError):
            await source.open("9", _EARLIEST, RecordingSink())
    assert len(events) == 5
