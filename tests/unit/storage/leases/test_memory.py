"""What is particular to leases in memory; the rest is the contract suite's."""

from __future__ import annotations

import asyncio

import pytest

from eventpump.errors import ConfigurationError
from eventpump.interfaces import ConsumerScope
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from tests.support.leases import unheld

SCOPE = ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default")


async def test_expiry_follows_the_running_loops_time() -> None:
    """Without a clock of its own a store follows the loop, so that a test on virtual time can let leases expire."""
    store = MemoryLeaseStore(lease_duration=20)
    await store.open(SCOPE)
    await store.ensure(["0"])
    lease = await store.acquire(unheld("0"), "a")
    assert lease is not None
    assert lease.expires_at == asyncio.get_running_loop().time() + 20
    await asyncio.sleep(19.9)
    assert await store.acquire(unheld("0"), "b") is None
    await asyncio.sleep(0.1)
    assert await store.acquire(unheld("0"), "b") is not None


async def test_renewal_counts_from_itself() -> None:
    """A renewed lease outlives the moment at which it would have expired, by what has passed since."""
    store = MemoryLeaseStore(lease_duration=20)
    await store.open(SCOPE)
    await store.ensure(["0"])
    lease = await store.acquire(unheld("0"), "a")
    assert lease is not None
    await asyncio.sleep(15)
    assert await store.renew(lease) is not None
    await asyncio.sleep(15)
    assert await store.acquire(unheld("0"), "b") is None


async def test_names_are_the_same_in_any_case() -> None:
    """Event Hubs names have no case: hosts that spell them differently share their leases."""
    shared = MemoryLeases()
    one, other = MemoryLeaseStore(shared), MemoryLeaseStore(shared)
    await one.open(SCOPE)
    await other.open(ConsumerScope("EXAMPLE.servicebus.windows.net", "Telemetry", "$default"))
    await one.ensure(["0"])
    assert [snapshot.partition_id for snapshot in await other.list()] == ["0"]


def test_lease_duration_that_is_not_positive_is_refused() -> None:
    """A lease duration that cannot work is refused by name."""
    with pytest.raises(ConfigurationError, match="lease_duration"):
        MemoryLeaseStore(lease_duration=0)
