"""What hubs on disk promise, without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from eventpump.amqp.message import Data, Message
from eventpump.emulator.config import HubSpec
from eventpump.emulator.durable import Append, DurableStore, Entry, LedgerEntry
from eventpump.emulator.ledger import Admission, Claim, ProducerState, PublishingLedger, Run
from eventpump.emulator.log import Hub, PartitionLog
from eventpump.emulator.readers import Refusal
from eventpump.errors import ConfigurationError
from tests.support.served import break_disk


def event(body: bytes = b"x") -> bytes:
    return Message(body=Data((body,))).encode()


class Disk:
    """A store with its answers, as the service would use it."""

    def __init__(self, directory: Path) -> None:
        self.committed: list[object] = []
        self.failed: list[object] = []
        self.hubs: list[Hub] = []
        self.then: Callable[[], None] = lambda: None
        """Called after each commit."""
        self._answered = asyncio.Event()
        self.store = DurableStore(
            directory, fsync=False, on_committed=self._commit, on_failed=self._fail, take_back=self._take_back
        )

    async def open(self, *specs: HubSpec) -> list[Hub]:
        self.hubs = await self.store.open(specs, 5)
        return self.hubs

    def put(self, partition: PartitionLog, *bodies: bytes, ticket: object = None, time_ms: int = 7) -> None:
        self.store.append(Append(partition.number([event(body) for body in bodies], time_ms), ticket))

    async def answers(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.committed) + len(self.failed) < count:
                self._answered.clear()
                await self._answered.wait()

    def _commit(self, entries: list[Entry]) -> None:
        for entry in entries:
            if isinstance(entry, Append):
                entry.batch.partition.publish(entry.batch)
            self.committed.append(entry.ticket)
        self._answered.set()
        self.then()

    def _fail(self, entries: list[Entry], reason: str) -> None:
        assert reason
        self.failed += [entry.ticket for entry in entries]
        self._answered.set()

    def _take_back(self) -> None:
        for hub in self.hubs:
            for partition in hub.partitions:
                partition.take_back()


async def test_restart_restores_hubs_groups_events_and_numbers(tmp_path: Path) -> None:
    """Hubs, groups, events, numbers and times come back as they were, and numbering goes on."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("Telemetry", 2, ("readers",)))
    disk.put(hub.partitions[1], b"a", b"b", time_ms=70)
    disk.put(hub.partitions[1], b"c", time_ms=80)
    await disk.store.aclose()
    await disk.store.aclose()
    assert len(disk.committed) == 2
    again = Disk(tmp_path)
    (loaded,) = await again.open(HubSpec("telemetry", 1))
    assert (loaded.name, loaded.created_ms, loaded.groups) == (hub.name, hub.created_ms, hub.groups)
    for before, after in zip(hub.partitions, loaded.partitions, strict=True):
        assert after.payloads == before.payloads
        assert after.facts() == before.facts()
        assert after.last_offset == before.last_offset
        assert after.size == before.size
        expected = before.number([event()], 90)
        actual = after.number([event()], 90)
        assert (actual.sequence_number, actual.offsets) == (expected.sequence_number, expected.offsets)
    await again.store.aclose()


async def test_restart_with_a_clock_set_back_keeps_times_growing(tmp_path: Path) -> None:
    """Enqueued times go on from the stored ones."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("h", 1))
    disk.put(hub.partitions[0], b"a", time_ms=1000)
    await disk.store.aclose()
    again = Disk(tmp_path)
    (loaded,) = await again.open()
    assert loaded.partitions[0].number([event()], 10).time_ms == 1000
    await again.store.aclose()


async def test_restart_with_more_declared_partitions_adds_them(tmp_path: Path) -> None:
    """More partitions declared are added; fewer take nothing away; added ones stay."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("h", 1))
    added = [PartitionLog("h", "1")]
    await disk.store.add_partitions(hub, added)
    disk.put(added[0], b"a")
    await disk.store.aclose()
    again = Disk(tmp_path)
    (loaded,) = await again.open(HubSpec("h", 3))
    assert [each.partition_id for each in loaded.partitions] == ["0", "1", "2"]
    assert len(loaded.partitions[1].payloads) == 1
    await again.store.aclose()


@pytest.mark.parametrize("dropped", [1, 2, 3, 5])
async def test_restart_keeps_what_retention_dropped_away(tmp_path: Path, dropped: int) -> None:
    """After retention the beginning is the same on disk, also in the middle of a batch, and no number comes again."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("h", 1))
    log = hub.partitions[0]
    disk.put(log, b"a", b"b")
    disk.put(log, b"c", b"d", b"e")
    await disk.answers(2)
    log.drop_oldest(dropped)
    disk.store.drop(log)
    await disk.store.aclose()
    again = Disk(tmp_path)
    (loaded,) = await again.open()
    assert loaded.partitions[0].payloads == log.payloads
    assert loaded.partitions[0].facts() == log.facts()
    batch = loaded.partitions[0].number([event()], 9)
    assert batch.sequence_number == 5
    assert batch.offsets[0] > log.last_offset
    await again.store.aclose()


async def test_write_that_fails_is_refused_and_leaves_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written fails, with all that was numbered after it; then numbering goes on without a gap."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("h", 1))
    log = hub.partitions[0]
    disk.put(log, b"a", ticket="a")
    await disk.answers(1)
    break_disk(disk.store, monkeypatch)
    for ticket in range(20):
        disk.put(log, b"lost", ticket=ticket)
    await disk.answers(21)
    assert disk.failed == list(range(20))
    disk.put(log, b"b", ticket="b")
    await disk.answers(22)
    assert disk.committed == ["a", "b"]
    assert log.end == 2
    await disk.store.aclose()
    again = Disk(tmp_path)
    (loaded,) = await again.open()
    assert loaded.partitions[0].payloads == log.payloads
    await again.store.aclose()


async def test_open_of_a_directory_in_use_raises(tmp_path: Path) -> None:
    """A second store over the same directory is a clear error."""
    disk = Disk(tmp_path)
    await disk.open(HubSpec("h", 1))
    with pytest.raises(ConfigurationError, match="in use by another emulator"):
        await Disk(tmp_path).open(HubSpec("h", 1))
    await disk.store.aclose()


@pytest.mark.parametrize("content", [b"this is no database, however long it may be" * 100, None])
async def test_open_of_a_directory_that_cannot_be_used_raises(tmp_path: Path, content: bytes | None) -> None:
    """A broken file, or a file where the directory should be, is a clear error."""
    directory = tmp_path / "data"
    if content is None:
        directory.write_text("a file")
    else:
        directory.mkdir()
        (directory / "hubs.sqlite").write_bytes(content)
    with pytest.raises(ConfigurationError, match="data: "):
        await Disk(directory).open(HubSpec("h", 1))


async def test_open_of_a_later_version_raises(tmp_path: Path) -> None:
    """A file of another version is refused, not rewritten."""
    database = sqlite3.connect(tmp_path / "hubs.sqlite")
    database.execute("PRAGMA user_version=9")
    database.close()
    with pytest.raises(ConfigurationError, match="another version"):
        await Disk(tmp_path).open(HubSpec("h", 1))


def known(ledger: PublishingLedger, producer_id: int) -> ProducerState:
    admission = ledger.attach(Claim(producer_id, None, None), random.Random(1))
    assert isinstance(admission, Admission)
    return admission.state


async def test_restart_restores_idempotent_producers(tmp_path: Path) -> None:
    """Where idempotent producers stood comes back whole: with their events, and without any."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("h", 2))
    states: list[ProducerState] = []
    for epoch, log in enumerate(hub.partitions):
        for number in (None, 2**31 - 3):
            admission = log.publishing.attach(Claim(None, epoch, number), random.Random(epoch))
            assert isinstance(admission, Admission)
            disk.store.append(LedgerEntry(log, admission.state, None))
            state = admission.state
            for _ in range(3 * epoch):
                judged = log.publishing.judge(Run(state.producer_id, epoch, (state.last + 1) % 2**31, 2))
                assert isinstance(judged, ProducerState)
                state = judged
                disk.store.append(Append(log.number([event(), event()], 5, None, state), None))
            states.append(state)
    disk.store.append(LedgerEntry(hub.partitions[0], None, "turn"))
    await disk.store.aclose()
    assert disk.committed[-1] == "turn"
    again = Disk(tmp_path)
    (loaded,) = await again.open()
    found = [known(loaded.partitions[index // 2].publishing, state.producer_id) for index, state in enumerate(states)]
    assert found == states
    await again.store.aclose()


async def test_restart_does_not_restore_forgotten_producers(tmp_path: Path) -> None:
    """A producer that was forgotten after its last batch was handed over is not there again."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("h", 1))
    (log,) = hub.partitions
    states = []
    for seed in range(2):
        admission = log.publishing.attach(Claim(None, None, None), random.Random(seed))
        assert isinstance(admission, Admission)
        disk.store.append(LedgerEntry(log, admission.state, None))
        states.append(admission.state)
    disk.store.forget(log, [states[0].producer_id])
    await disk.store.aclose()
    again = Disk(tmp_path)
    (loaded,) = await again.open()
    ledger = loaded.partitions[0].publishing
    assert isinstance(ledger.attach(Claim(states[0].producer_id, None, None), random.Random(1)), Refusal)
    assert known(ledger, states[1].producer_id) == states[1]
    await again.store.aclose()


async def test_open_of_a_version_without_producers_succeeds(tmp_path: Path) -> None:
    """A directory of the version before is taken over as it is."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("h", 1))
    disk.put(hub.partitions[0], b"a")
    await disk.store.aclose()
    with contextlib.closing(sqlite3.connect(tmp_path / "hubs.sqlite")) as database:
        database.execute("DROP TABLE producers")
        database.execute("PRAGMA user_version=1")
    again = Disk(tmp_path)
    (loaded,) = await again.open()
    assert loaded.partitions[0].payloads == hub.partitions[0].payloads
    again.store.append(LedgerEntry(loaded.partitions[0], ProducerState(5, 1, 7), None))
    await again.store.aclose()
    last = Disk(tmp_path)
    (loaded,) = await last.open()
    assert known(loaded.partitions[0].publishing, 5) == ProducerState(5, 1, 7)
    await last.store.aclose()


async def test_aclose_under_a_sender_that_goes_on(tmp_path: Path) -> None:
    """What was handed over before is on disk; not waited for is a sender that sends at every commit."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("h", 1))
    (log,) = hub.partitions

    disk.then = lambda: disk.put(log, b"more")
    for _ in range(3):
        disk.put(log, b"a")
    async with asyncio.timeout(10):
        await disk.store.aclose()
    assert len(disk.committed) >= 3
    again = Disk(tmp_path)
    (loaded,) = await again.open()
    assert loaded.partitions[0].payloads == log.payloads
    await again.store.aclose()


async def test_failed_write_takes_what_was_numbered_after_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch numbered while the one before it fails is not written: its number is free, and is given again."""
    disk = Disk(tmp_path)
    (hub,) = await disk.open(HubSpec("h", 1))
    (log,) = hub.partitions
    is_writing, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        is_writing.set()
        goes_on.wait(30)

    break_disk(disk.store, monkeypatch, stand)
    disk.put(log, b"lost", ticket="first")
    await asyncio.to_thread(is_writing.wait, 30)
    disk.put(log, b"lost", ticket="second")
    goes_on.set()
    await disk.answers(2)
    assert disk.failed == ["first", "second"]
    disk.put(log, b"kept", ticket="third")
    await disk.store.aclose()
    assert disk.committed == ["third"]
    again = Disk(tmp_path)
    (loaded,) = await again.open()
    (payload,) = loaded.partitions[0].payloads
    assert payload.endswith(b"kept")
    assert loaded.partitions[0].beginning == 0
    await again.store.aclose()
