"""Random histories of hosts that claim and write one subscription's checkpoint in a real store, die, and are late.

Every call of a host within a claim or a write is done, fails, is done with its answer lost, is done later, waits until
another host has acted, or is the host's last one. Hosts share names. What the store accepted is judged by the lease
under which it was written.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from eventpump.core.lease import PartitionLease
from eventpump.errors import StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.storage.groups import GroupRecords
from tests.support.leases import SCOPE, unheld
from tests.support.seeds import seeds

if TYPE_CHECKING:
    from eventpump.interfaces import LeaseStore, ListedRecord, RecordStore, StoredRecord
    from tests.contract.conftest import Harness

SUBSCRIPTION = "audit.0f3a"
FATES = ("done", "fails", "lost", "late", "overtaken", "dies", "dies after")


class DiedError(Exception):
    """The host's process is gone."""


@dataclass
class Accepted:
    """What the store holds from a swap on: by a lease's epoch, a claim or not, with a position and a generation."""

    epoch: int
    is_claim: bool
    number: int | None
    generation: int


class History:
    """One history: its hosts, and what the store accepted, in order."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.rng = random.Random(seed)
        self.harness = harness
        self.accepted: list[Accepted] = []
        self.late: list[Callable[[], Awaitable[object]]] = []
        self.claimed_by = 0
        """The epoch of the newest claim that was answered."""
        self.claims: dict[str, int] = {}
        self.hosts: list[Host] = []
        self.acting: list[Host] = []

    async def host(self) -> Host:
        store = self.harness.new_store()
        await store.open(SCOPE)
        await store.ensure(["0"])
        return Host(self, store, self.rng.choice("aab"))

    async def step(self) -> None:
        """Let one of the hosts act that are not acting. One that dies is replaced."""
        idle = [at for at, host in enumerate(self.hosts) if host not in self.acting]
        if not idle:
            return
        at = self.rng.choice(idle)
        self.acting.append(self.hosts[at])
        try:
            await self.hosts[at].act()
        except StoreError:
            pass
        except DiedError:
            # Its store stays open: what is late still arrives.
            self.hosts[at] = await self.host()
        finally:
            self.acting.pop()

    async def swap(self, records: RecordStore, epoch: int, name: str, body: bytes, replaces: str | None) -> str | None:
        """Do a swap, and judge it."""
        before = await records.read(name)
        version = await records.swap(name, body, replaces)
        if version is None or (before is not None and before.version == version):
            return version
        found = json.loads(body)
        number = int(found["sequencenumber"]) if "offset" in found else None
        was = self.accepted[-1] if self.accepted else None
        now = Accepted(epoch, found["claim"] not in self.claims, number, int(found["generation"]))
        self.claims.setdefault(found["claim"], epoch)
        assert self.claims[found["claim"]] == epoch, "two owners have one claim"
        assert epoch >= self.claimed_by, f"epoch {epoch} writes after {self.claimed_by} has claimed"
        if was is not None and was.number is not None:
            assert number is not None
            assert number >= was.number or now.generation > was.generation, "went back"
            assert not now.is_claim or number == was.number, "a claim changed the position"
        self.accepted.append(now)
        return version


class Host:
    """A host, whose record calls meet fates. It is a `LeaseStore` to its own `GroupRecords`."""

    def __init__(self, history: History, store: LeaseStore, name: str) -> None:
        self.history, self.store, self.name = history, store, name
        self.lease: PartitionLease | None = None
        self.group = GroupRecords(self, SCOPE)  # type: ignore[arg-type]  # it calls nothing else
        self.records = self

    async def take(self) -> None:
        """Acquire the lease, or steal it."""
        (seen,) = await self.store.list()
        lease = await self.store.acquire(seen if seen.is_held else unheld("0"), self.name, held=seen.is_held)
        self.lease = lease or self.lease

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        renewed: PartitionLease | None = await self._meet(lambda: self.store.renew(lease), may_be_late=False)
        return renewed

    async def read(self, name: str) -> StoredRecord | None:
        found: StoredRecord | None = await self._meet(lambda: self.store.records.read(name), may_be_late=False)
        return found

    async def swap(self, name: str, body: bytes, replaces: str | None) -> str | None:
        assert self.lease is not None
        epoch = self.lease.epoch
        swap = lambda: self.history.swap(self.store.records, epoch, name, body, replaces)  # noqa: E731
        version: str | None = await self._meet(swap, may_be_late=True)
        return version

    async def list(self, prefix: str) -> dict[str, ListedRecord]:
        raise NotImplementedError

    async def _meet(self, call: Callable[[], Awaitable[Any]], *, may_be_late: bool) -> Any:
        match self.history.rng.choices(FATES, (60, 8, 8, 8, 8, 3, 3))[0]:
            case "fails":
                raise StoreError("call", "503 server busy")
            case "lost":
                await call()
                raise StoreError("call", "the answer was lost")
            case "late" if may_be_late:
                self.history.late.append(call)
                raise StoreError("call", "no answer yet")
            case "overtaken":
                await self.history.step()
            case "dies":
                raise DiedError
            case "dies after":
                await call()
                raise DiedError
        return await call()

    async def act(self) -> None:
        """Take the lease, claim, write or reset."""
        rng = self.history.rng
        if self.lease is None or rng.random() < 0.15:
            await self.take()
        if self.lease is None:
            return
        number = rng.randrange(100)
        checkpoint = Checkpoint("0", str(number), number)
        match rng.choice(("claim", "write", "write", "write", "reset")):
            case "claim":
                claim = await self.group.claim_checkpoint(self.lease, SUBSCRIPTION)
                if claim is not None:
                    last = self.history.accepted[-1]
                    stored = None if claim.checkpoint is None else claim.checkpoint.sequence_number
                    assert (last.epoch, last.number) == (self.lease.epoch, stored), "it claimed another position"
                    self.history.claimed_by = max(self.history.claimed_by, self.lease.epoch)
            case "write":
                if await self.group.write_checkpoint(self.lease, checkpoint, SUBSCRIPTION):
                    stored_number = self.history.accepted[-1].number
                    assert stored_number is not None
                    assert stored_number >= number
            case "reset":
                await self.group.write_checkpoint(self.lease, checkpoint, SUBSCRIPTION, backwards=True)


async def run(harness: Harness, seed: int, steps: int) -> None:
    history = History(harness, seed)
    history.hosts = [await history.host() for _ in range(3)]
    for _ in range(steps):
        if history.late and history.rng.random() < 0.3:
            call = history.late.pop(history.rng.randrange(len(history.late)))
            await call()
            continue
        await history.step()
    assert history.accepted


@seeds(40, of=4000)
async def test_claims_fence_the_writes_of_former_owners_in_memory(memory_harness: Harness, seed: int) -> None:
    """No former owner writes after a claim, no position goes back but by a reset, and a claim is the newest one's."""
    await run(memory_harness, seed, 150)


@seeds(10, of=1000)
async def test_claims_fence_the_writes_of_former_owners_in_sqlite(sqlite_harness: Harness, seed: int) -> None:
    """The same in a file."""
    await run(sqlite_harness, seed, 100)


@seeds(4, of=200)
async def test_claims_fence_the_writes_of_former_owners_in_blobs(blob_harness: Harness, seed: int) -> None:
    """The same in the metadata of blobs."""
    await run(blob_harness, seed, 60)


@pytest.mark.parametrize("seed", range(10))
async def test_claims_fence_the_writes_of_former_owners_in_ones_own_store(own_harness: Harness, seed: int) -> None:
    """The same in a store of one's own."""
    await run(own_harness, seed, 150)
