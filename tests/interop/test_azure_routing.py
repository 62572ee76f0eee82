"""Partition keys: the gateway sends a key where the official SDKs' hash does (protocol.md 14)."""

from __future__ import annotations

import asyncio
import math

import pytest

from eventpump import Emulator, EventData, EventProducer
from tests.interop.peers.driver import AzurePeer, event
from tests.interop.reading import read_hub

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEYS = ["a", "7", "131", "alphabet", *(f"key{n}" for n in range(60)), *("x" * n for n in range(2, 40))]


async def routed(emulator: Emulator, hub: str) -> dict[str, str]:
    """Where each key's events lie: one partition for each."""
    found: dict[str, str] = {}
    for partition, events in (await read_hub(emulator, hub)).items():
        for received in events:
            assert received.partition_key is not None
            assert found.setdefault(received.partition_key, partition) == partition
    return found


async def test_azure_send_by_key_goes_by_the_hash(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """A key lands in the partition that its hash, reduced with the service's truncating remainder, names."""
    async with EventProducer(emulator.connection_string, hub) as producer:
        await asyncio.gather(*(producer.send(EventData(key), partition_key=key) for key in KEYS))
    hashes = await azure.hash_keys(KEYS)
    assert min(hashes) < 0 < max(hashes)
    expected = {key: str(int(abs(math.fmod(found, 4)))) for key, found in zip(KEYS, hashes, strict=True)}
    assert await routed(emulator, hub) == expected


async def test_azure_buffered_producer_agrees_where_it_is_right(emulator: Emulator, azure: AzurePeer, hub: str) -> None:
    """Events that its buffered producer sends to the partition of their key join those the gateway put there.

    Only for keys of no negative hash: for others it picks wrong partitions, having floored the remainder.
    """
    keys = [key for key, found in zip(KEYS, await azure.hash_keys(KEYS), strict=True) if found >= 0]
    assert len(keys) > len(KEYS) / 4
    async with EventProducer(emulator.connection_string, hub) as gateway:
        await asyncio.gather(*(gateway.send(EventData("gateway"), partition_key=key) for key in keys))
    producer = await azure.producer(emulator.connection_string, hub, buffered=True)
    for key in keys:
        await producer.send([event("buffered")], "event", partition_key=key)
    await producer.flush()
    assert set(await routed(emulator, hub)) == set(keys)
    assert sum(map(len, (await read_hub(emulator, hub)).values())) == 2 * len(keys)
