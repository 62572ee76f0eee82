"""Lease blobs while there are subscriptions: a host of the .NET or Java family reads `default` there at any time."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob.aio import BlobClient, BlobLeaseClient, ContainerClient

from eventpump import EventProcessor, PartitionContext, ReceivedEvent
from eventpump.consumer.host.host import HubHost
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.options.consumer import HostSettings
from eventpump.storage.leases.blob import BlobLeaseStore
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.azurite import Azurite
from tests.support.waiting import Changes

NAMES = ("default", "alerts", "archive")
_DOTNET = re.compile(
    rb'\{"Offset":(?:null|"[^"\\]+"),"SequenceNumber":-?\d+,"PartitionId":"\d+","Owner":"[^"\\]*","Token":"[^"\\]*",'
    rb'"Epoch":\d+\}'
)
"""A body as .NET's serializer writes it: names, order, no spaces, nothing else."""
_WITHIN = 60.0


class _Watched(AioHttpTransport):  # type: ignore[misc]  # azure.core has no types for it
    """The SDK's own transport, which has the lease blobs read after every request of a store."""

    def __init__(self, reader: _Reader) -> None:
        super().__init__()
        self._reader = reader

    async def send(self, request: Any, **config: Any) -> Any:
        answer = await super().send(request, **config)
        if request.method != "GET" and self._reader.is_looking:
            await self._reader.look()
        return answer


class _Reader:
    """Reads the lease blobs as a host of the former libraries does: it knows nothing of subscriptions."""

    def __init__(self, container: ContainerClient, partition_ids: Sequence[str]) -> None:
        self._container = container
        self._partition_ids = sorted(partition_ids)
        self.asked: defaultdict[str, set[int]] = defaultdict(set)
        """By partition: what the processor of `default` asked to be stored."""
        self.looks = 0
        self.is_looking = True
        """Whether what it reads is written by us only."""
        self.seen: dict[str, int] = {}
        """By partition: the number of the checkpoint last read."""
        self.problems: list[str] = []

    async def look(self) -> None:
        """Read every blob in the directory of the leases."""
        names = [blob.name async for blob in self._container.list_blobs("$Default/")]
        if len(names) < len(self._partition_ids):
            return  # they are being made
        self._require(names == [f"$Default/{each}" for each in self._partition_ids], f"the leases are {names}")
        for partition_id in self._partition_ids:
            stream = await self._container.get_blob_client(f"$Default/{partition_id}").download_blob()
            raw = await stream.readall()
            self._require(_DOTNET.fullmatch(raw) is not None, f"not .NET's form: {raw!r}")
            self._require(set(stream.properties.metadata) <= {"OWNINGHOST"}, f"{stream.properties.metadata}")
            body = json.loads(raw)
            number = body["SequenceNumber"] if body["Offset"] else -1
            is_asked = number == self.seen.get(partition_id, -1) or number in self.asked[partition_id]
            self._require(is_asked, f"{number} of partition {partition_id} is no checkpoint of default")
            self._require(number >= self.seen.get(partition_id, -1), f"{number} comes after {self.seen}")
            self.seen[partition_id] = number
        self.looks += 1

    def _require(self, holds: bool, problem: str) -> None:
        # Raised within a store's request, it would be taken for a failure of the store.
        if not holds:
            self.problems.append(problem)


class _Processor(EventProcessor):
    """Asks for a checkpoint at another event of each batch than the others do."""

    def __init__(self, scene: _Scene, name: str) -> None:
        self._scene = scene
        self._name = name

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        scene, partition_id = self._scene, context.partition_id
        event = events[0] if self._name == "default" else events[-1]
        if self._name == "default":
            scene.reader.asked[partition_id].add(event.sequence_number)
        # Before the checkpoint: if the partition is lost meanwhile, it may be stored though the call raises.
        scene.got[self._name, partition_id] += [each.sequence_number for each in events]
        scene.changes.happened()
        await context.checkpoint(event)


class _Scene:
    """A hub, a container, and hosts."""

    def __init__(self, azurite: Azurite, container: str, stack: AsyncExitStack) -> None:
        self._azurite = azurite
        self._name = container
        self._stack = stack
        self.hub = FakeHub(partitions=2)
        self.raw = ContainerClient.from_connection_string(azurite.connection_string, container)
        self.reader = _Reader(self.raw, self.hub.partition_ids)
        self.got: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        """By subscription and partition: the numbers that were processed."""
        self.changes = Changes()

    def blob(self, partition_id: str) -> BlobClient:
        return self.raw.get_blob_client(f"$Default/{partition_id}")

    @asynccontextmanager
    async def host(self, name: str) -> AsyncIterator[HubHost]:
        """Run a host with all subscriptions; closed in order at the end."""
        client = ContainerClient.from_connection_string(
            self._azurite.connection_string, self._name, transport=_Watched(self.reader)
        )
        self._stack.push_async_callback(client.close)
        settings = HostSettings(
            hub=self.hub.name,
            owner_id=name,
            max_batch_size=5,
            renew_interval=1.0,
            checkpoint_policy=CheckpointPolicy.manual(),
        )
        host = HubHost(
            lambda: FakeTransport(self.hub),
            BlobLeaseStore(client, lease_duration=15, create=True),
            settings,
            _Processor(self, "default"),
        )
        await host.subscribe("alerts", _Processor(self, "alerts"), start="earliest", catch_up="shared")
        running = asyncio.get_running_loop().create_task(host.run(), name=f"host {name}")
        await host.subscribe("archive", _Processor(self, "archive"), start="earliest", catch_up="shared")
        try:
            yield host
        finally:
            await host.aclose()
            await running

    async def until(self, ends: dict[str, int], names: Sequence[str] = NAMES) -> None:
        """Wait until subscriptions have processed every partition to an end."""
        await self.changes.until(
            lambda: all(end - 1 in self.got[name, each] for name in names for each, end in ends.items()), _WITHIN
        )


@pytest.fixture
async def scene(azurite: Azurite, container_name: str) -> AsyncIterator[_Scene]:
    """A container of this test's own."""
    async with AsyncExitStack() as stack:
        scene = _Scene(azurite, container_name, stack)
        stack.push_async_callback(scene.raw.close)
        yield scene


async def test_default_is_read_at_any_time_while_there_are_subscriptions(scene: _Scene) -> None:
    """After every request of two hosts the leases are those of a .NET host, with the checkpoints of `default`."""
    async with scene.host("a") as host:
        for partition_id in scene.hub.partition_ids:
            scene.hub.publish(partition_id, count=23)
        await scene.until({"0": 23, "1": 23})
        async with scene.host("b"):
            for partition_id in scene.hub.partition_ids:
                scene.hub.publish(partition_id, count=20)
            await scene.until({"0": 43, "1": 43})
        await host.unsubscribe("archive")
        await host.unsubscribe("alerts", keep_checkpoint=True)
    await scene.reader.look()
    assert scene.reader.problems == []
    assert scene.reader.looks > 20
    assert all(number >= 20 for number in scene.reader.seen.values())
    for partition_id in scene.hub.partition_ids:
        for name in NAMES:
            assert set(scene.got[name, partition_id]) == set(range(43)), (name, partition_id)


@pytest.mark.parametrize("form", ["dotnet", "java"])
async def test_former_host_in_between_leaves_the_subscriptions_alone(scene: _Scene, form: str) -> None:
    """It takes the leases, writes checkpoints in its own form, and leaves: each goes on where it was."""
    async with scene.host("a"):
        for partition_id in scene.hub.partition_ids:
            scene.hub.publish(partition_id, count=10)
        await scene.until({"0": 10, "1": 10})
    scene.reader.is_looking = False
    for partition_id in scene.hub.partition_ids:
        scene.hub.publish(partition_id, count=10)
        await _process_as(form, scene.blob(partition_id), partition_id, 14)
    assert scene.reader.problems == []
    before = dict(scene.got)
    scene.got.clear()
    async with scene.host("a"):
        await scene.until({"0": 20, "1": 20})
    for partition_id in scene.hub.partition_ids:
        assert set(before["alerts", partition_id]) == set(range(10))
        assert scene.got["default", partition_id] == list(range(15, 20))
        for name in ("alerts", "archive"):
            assert scene.got[name, partition_id] == list(range(10, 20)), name


async def _process_as(form: str, blob: BlobClient, partition_id: str, number: int) -> None:
    """Take a lease as a host of the former libraries does, store a checkpoint, and release it."""
    body = json.loads(await (await blob.download_blob()).readall())
    lease = BlobLeaseClient(blob)
    await lease.acquire(15)
    values = {"Offset": f"fake:{number}", "SequenceNumber": number, "PartitionId": partition_id}
    for owner, token in (("former", lease.id), ("", "")):
        content = {**values, "Owner": owner, "Token": token, "Epoch": body["Epoch"] + 1}
        if form == "java":
            content = {f"{name[0].lower()}{name[1:]}": value for name, value in content.items()}
        metadata = {"OWNINGHOST": owner} if owner else {}
        await blob.upload_blob(json.dumps(content), overwrite=True, lease=lease, metadata=metadata)
    await lease.release()
