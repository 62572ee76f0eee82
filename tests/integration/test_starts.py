"""Starts and losses over the protocol: hosts with SQLite, readers and `eventpump tail`, on the emulator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from eventpump import (
    DataLossError,
    Emulator,
    EventData,
    EventPosition,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
    SqliteLeaseStore,
)
from eventpump.core.starts import LossKind
from eventpump.errors import RequestRefusedError
from eventpump.options.base import RetryOptions
from eventpump.reports import DataLost, HostReport, PartitionFailed, PumpStarted
from tests.support.waiting import Changes

HUB = "telemetry"
LIMIT = 30.0
OPTIONS: dict[str, Any] = {"link_retry": RetryOptions(base_delay=0.05, max_delay=0.5)}


class _Seen(EventProcessor):
    """Notes the bodies, and checkpoints."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.reports: list[HostReport] = []
        self._changes = Changes()

    def hook(self, report: HostReport) -> None:
        self.reports.append(report)
        self._changes.happened()

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self.bodies += [event.body_as_str() for event in events]
        await context.checkpoint()
        self._changes.happened()

    async def until(self, holds: Callable[[], bool]) -> None:
        await self._changes.until(holds, LIMIT)

    def reported(self, kind: type[HostReport]) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]


@asynccontextmanager
async def _host(emulator: Emulator, leases: Path, **options: Any) -> AsyncIterator[_Seen]:
    seen = _Seen()
    store = SqliteLeaseStore(leases, lease_duration=2.0)
    host = EventProcessorHost(
        emulator.connection_string, HUB, processor=seen, lease_store=store, hooks=[seen.hook], **OPTIONS, **options
    )
    running = asyncio.create_task(host.run())
    try:
        yield seen
    finally:
        await host.aclose()
        with suppress(asyncio.CancelledError):
            await running


async def _send(emulator: Emulator, *bodies: str) -> None:
    async with EventProducer(emulator.connection_string, HUB) as producer:
        await producer.send([EventData(body) for body in bodies], partition_id="0")


async def test_host_at_latest_loses_nothing_while_its_first_link_is_cut(tmp_path: Path) -> None:
    """Begun at "@latest", cut off, stopped and started again before the first event: everything sent since comes."""
    async with Emulator({HUB: 1}) as emulator:
        await _send(emulator, "before")
        leases = tmp_path / "leases.db"
        async with _host(emulator, leases, initial_position="@latest") as first:
            await first.until(lambda: bool(first.reported(PumpStarted)))
            emulator.drop_connections()
        await _send(emulator, "one", "two")
        async with _host(emulator, leases, initial_position="@latest") as second:
            await second.until(lambda: len(second.bodies) == 2)
            emulator.drop_connections()
            await _send(emulator, "three")
            await second.until(lambda: len(second.bodies) == 3)
        assert first.bodies == []
        assert second.bodies == ["one", "two", "three"]


async def test_reader_at_latest_loses_nothing_while_its_first_link_is_cut() -> None:
    """What is sent after a reader was entered at "@latest" is read, over whichever link."""
    async with Emulator({HUB: 1}) as emulator:
        await _send(emulator, "before")
        options: dict[str, Any] = {"partition_id": "0", "position": "@latest", **OPTIONS}
        async with PartitionReader(emulator.connection_string, HUB, **options) as reader:
            assert reader.position != EventPosition.latest()
            await _send(emulator, "one")
            emulator.drop_connections()
            await _send(emulator, "two")
            got: list[str] = []
            async with asyncio.timeout(LIMIT):
                while len(got) < 2:
                    got += [event.body_as_str() for event in await reader.read()]
            assert got == ["one", "two"]


@pytest.mark.parametrize("stored", [0, 3])
async def test_start_at_the_number_of_the_next_event(tmp_path: Path, stored: int) -> None:
    """Readers and hosts that begin at the next event's number wait for it, though the service refuses that number."""
    async with Emulator({HUB: 1}) as emulator:
        if stored:
            await _send(emulator, *["before"] * stored)
        options: dict[str, Any] = {"partition_id": "0", **OPTIONS}
        options["position"] = EventPosition.at_sequence_number(stored, inclusive=True)
        async with asyncio.timeout(LIMIT), PartitionReader(emulator.connection_string, HUB, **options) as reader:
            assert await reader.read(max_wait_time=0) == []
            await _send(emulator, "one")
            assert [event.sequence_number for event in await reader.read()] == [stored]
        start = EventPosition.at_sequence_number(stored + 1, inclusive=True)
        async with _host(emulator, tmp_path / "leases.db", initial_position={"0": start}) as seen:
            await seen.until(lambda: bool(seen.reported(PumpStarted) or seen.reported(PartitionFailed)))
            await _send(emulator, "two")
            await seen.until(lambda: bool(seen.bodies or seen.reported(PartitionFailed)))
            assert seen.bodies == ["two"]


async def test_start_at_a_number_beyond_the_next_event_fails(tmp_path: Path) -> None:
    """Readers and hosts fail with both numbers; the host's error also says where the start is configured."""
    async with Emulator({HUB: 1}) as emulator:
        await _send(emulator, "before")
        start = EventPosition.at_sequence_number(2, inclusive=True)
        reader = PartitionReader(emulator.connection_string, HUB, partition_id="0", position=start, **OPTIONS)
        async with asyncio.timeout(LIMIT):
            with pytest.raises(RequestRefusedError, match="The last sequence number in the system is '0'"):
                async with reader:
                    await reader.read()
        async with _host(emulator, tmp_path / "leases.db", initial_position={"0": start}) as seen:
            await seen.until(lambda: bool(seen.reported(PartitionFailed)))
        error = str(seen.reported(PartitionFailed)[0].error)
        assert "The last sequence number in the system is '0'" in error
        assert "reading was to begin at sequence number 2, inclusive, the host's initial_position" in error


async def test_emulator_in_memory_restarted_under_old_leases_is_reported(tmp_path: Path) -> None:
    """A second run of both reports that the hub is another one, and what to do; done so, the host reads the new hub."""
    leases = tmp_path / "leases.db"
    async with Emulator({HUB: 1}) as emulator:
        port = emulator.port
        await _send(emulator, *map(str, range(20)))
        async with _host(emulator, leases) as seen:
            await seen.until(lambda: len(seen.bodies) == 20)
    async with Emulator({HUB: 1}, port=port) as emulator:
        await _send(emulator, "a", "b")
        async with _host(emulator, leases) as seen:
            await seen.until(lambda: bool(seen.reported(PartitionFailed)))
            (loss, *_) = seen.reported(DataLost)
            assert (loss.loss.kind, loss.loss.first_missing, loss.action) == (LossKind.RECREATED, 20, "fail")
            assert 'on_data_loss="earliest"' in str(seen.reported(PartitionFailed)[0].error)
            assert seen.bodies == []
        async with _host(emulator, leases, on_data_loss="earliest") as seen:
            await seen.until(lambda: len(seen.bodies) == 2)
            assert [each.action for each in seen.reported(DataLost)] == ["earliest"]
        await _send(emulator, "c")
        async with _host(emulator, leases) as seen:
            await seen.until(lambda: seen.bodies == ["c"])
            assert not seen.reported(DataLost)


async def test_host_of_a_recreated_hub_goes_on_at_its_beginning(tmp_path: Path) -> None:
    """The host goes on in the new hub at once, and at its beginning, as its settings say."""
    async with Emulator({HUB: 1}) as emulator:
        await _send(emulator, "a", "b", "c")
        async with _host(emulator, tmp_path / "leases.db", on_data_loss="earliest") as seen:
            await seen.until(lambda: len(seen.bodies) == 3)
            emulator.recreate_hub(HUB)
            await _send(emulator, "d", "e", "f", "g")
            await seen.until(lambda: len(seen.bodies) == 7)
            assert seen.bodies == list("abcdefg")
            assert len(seen.reported(DataLost)) == 1
            assert not seen.reported(PartitionFailed)


async def test_reader_of_a_recreated_hub_raises() -> None:
    """The reader says so, and reads no event of the new hub at a position of the old one."""
    async with Emulator({HUB: 1}) as emulator:
        await _send(emulator, "a", "b", "c")
        async with (
            asyncio.timeout(LIMIT),
            PartitionReader(emulator.connection_string, HUB, partition_id="0", **OPTIONS) as reader,
        ):
            got = 0
            while got < 3:
                got += len(await reader.read())
            emulator.recreate_hub(HUB)
            await _send(emulator, *"defgh")
            with pytest.raises(DataLossError, match="recreated"):
                await reader.read()


async def test_retention_past_the_checkpoint_is_reported(tmp_path: Path) -> None:
    """The numbers that are gone are reported, and the host goes on with what is kept."""
    async with Emulator({HUB: 1}) as emulator:
        await _send(emulator, *map(str, range(5)))
        async with _host(emulator, tmp_path / "leases.db") as seen:
            await seen.until(lambda: len(seen.bodies) == 5)
        await _send(emulator, *map(str, range(5, 10)))
        emulator.drop_events(HUB, "0", 8)
        async with _host(emulator, tmp_path / "leases.db") as seen:
            await seen.until(lambda: len(seen.bodies) == 2)
            assert seen.bodies == ["8", "9"]
            (loss,) = seen.reported(DataLost)
            assert (loss.loss.kind, loss.loss.first_missing, loss.loss.last_missing) == (LossKind.RETENTION, 5, 7)
