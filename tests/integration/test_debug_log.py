"""The log of whole conversations: each kind of line, its fields, and nothing that is secret or a user's data."""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest

from eventpump import (
    Emulator,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    MemoryPublisherStateStore,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
)
from eventpump.core.lease import PartitionLease
from eventpump.emulator.auth import DEFAULT_KEY
from eventpump.storage.leases.memory import MemoryLeaseStore
from tests.authority import Authority
from tests.faults.connect_proxy import ConnectProxy

HUB = "telemetry"
WHO = "me:pass-word-17"
USERS = ("a body to keep private", "a-property", "a value to keep private")


class Seen(EventProcessor):
    """Stores a checkpoint of every batch."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = asyncio.Event()

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await context.checkpoint()
        self.count += len(events)
        self.changed.set()

    async def until(self, count: int) -> None:
        while self.count < count:
            self.changed.clear()
            await self.changed.wait()


class Renewed(MemoryLeaseStore):
    """A lease store that reports when a lease was renewed."""

    def __init__(self) -> None:
        super().__init__(lease_duration=1.0)
        self.renewals = asyncio.Event()

    async def renew(self, lease: PartitionLease) -> PartitionLease | None:
        self.renewals.set()
        return await super().renew(lease)


def event() -> EventData:
    return EventData(USERS[0], properties={USERS[1]: USERS[2]})


def check_private(caplog: pytest.LogCaptureFixture) -> None:
    """Check that no line holds a key, a signature, a token or anything of an event; that there are lines is known."""
    text = caplog.text
    secrets = [*USERS, DEFAULT_KEY, base64.b64encode(DEFAULT_KEY.encode()).decode(), "SharedAccessSignature", "sig="]
    assert [secret for secret in secrets if secret in text] == []


def find(caplog: pytest.LogCaptureFixture, logger: str, level: int, pattern: str) -> list[logging.LogRecord]:
    """Return the records of a logger and level whose message matches; at least one has to."""
    found = [
        record
        for record in caplog.records
        if (record.name, record.levelno) == (logger, level) and re.search(pattern, record.getMessage())
    ]
    assert found, pattern
    return found


async def test_log_of_a_host(caplog: pytest.LogCaptureFixture) -> None:
    """A host's start, leases, checkpoints, links, a lost connection and its end are in the log, with their fields."""
    caplog.set_level(logging.DEBUG, "eventpump")
    seen, store = Seen(), Renewed()
    async with asyncio.timeout(30), Emulator({HUB: 1}) as emulator:
        host = EventProcessorHost(emulator.connection_string, HUB, processor=seen, lease_store=store, owner_id="host-a")
        running = asyncio.create_task(host.run())
        async with EventProducer(emulator.connection_string, HUB) as producer:
            await producer.send([event()], partition_id="0")
            await seen.until(1)
            emulator.drop_connections()
            await producer.send([event()], partition_id="0")
            await seen.until(2)
        await store.renewals.wait()
        await host.aclose()
        await running
    check_private(caplog)
    consumer, transport, info, debug = "eventpump.consumer", "eventpump.transport", logging.INFO, logging.DEBUG
    for level, pattern in (
        (info, "^host host-a: started on hub telemetry"),
        (info, "^host host-a: partition 0: owns the partition with epoch 1"),
        (info, "^host host-a: partition 0: reads from"),
        (info, "^host host-a: partition 0: closed"),
        (info, "^host host-a: partition 0: released the lease"),
        (info, "^host host-a: closed"),
        (debug, "^host host-a: partition 0: checkpoint at sequence number 1"),
        (debug, "^partition 0: lease renewed for"),
        (debug, "^partition 0: checkpoint read: none"),
        (debug, "^1 leases listed, 0 of them held"),
    ):
        record = find(caplog, consumer, level, pattern)[0]
        assert record.__dict__["hub"] == HUB
        assert record.__dict__["consumer_group"] == "$Default"
        if "partition 0" in pattern:
            assert record.__dict__["partition_id"] == "0"
        if "host-a" in pattern:
            assert record.__dict__["owner_id"] == "host-a"
    find(caplog, transport, info, r"^the connection to 127\.0\.0\.1 was lost: ")
    find(caplog, transport, info, r"^the connection to 127\.0\.0\.1 is restored \(eventpump-")
    address = f"{HUB}/ConsumerGroups/\\$Default/Partitions/0"
    for step in ("attaching a receiver", "attached", "detaching", "detached: "):
        record = find(caplog, transport, debug, f"^link to {address}: {step}")[0]
        fields = {name: record.__dict__[name] for name in ("hub", "consumer_group", "partition_id")}
        assert fields == {"hub": HUB, "consumer_group": "$Default", "partition_id": "0"}
        assert record.__dict__["link"].startswith("eventpump-")
    attempts = [record.__dict__["attempt"] for record in find(caplog, transport, debug, "^connecting to 127")]
    assert attempts[0] == 1
    assert max(attempts) >= 1
    find(caplog, transport, debug, f"^put a token for sb://127.0.0.1/{HUB}; renewed after")


async def test_log_of_an_idempotent_producer(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """A claim, an attach, the mark of a publisher, and each step of connecting by TLS are in the log."""
    caplog.set_level(logging.DEBUG, "eventpump")
    tls = authority.server("127.0.0.1")
    options: dict[str, Any] = {"idempotent": True, "name": "orders", "state_store": MemoryPublisherStateStore()}
    options["ca_file"] = str(authority.file)
    async with (
        asyncio.timeout(30),
        Emulator({HUB: 1}, tls=tls) as emulator,
        EventProducer(emulator.connection_string, HUB, **options) as producer,
    ):
        await producer.send([event()], partition_id="0")
    check_private(caplog)
    port = emulator.port
    for pattern in (
        rf"^connecting to 127\.0\.0\.1:{port}$",
        rf"^connected to 127\.0\.0\.1:{port} at 127\.0\.0\.1$",
        rf"^TLS established with 127\.0\.0\.1:{port}: TLSv1\.3, \w+$",
    ):
        find(caplog, "eventpump.net", logging.DEBUG, pattern)
    find(caplog, "eventpump.producer", logging.DEBUG, "^partition 0: publisher orders has claimed: id [0-9]+, owner")
    (attached,) = find(caplog, "eventpump.producer", logging.DEBUG, "^partition 0: the producer is attached: id [0-9]+")
    assert (attached.__dict__["hub"], attached.__dict__["partition_id"]) == (HUB, "0")
    find(caplog, "eventpump.producer", logging.DEBUG, "^partition 0: the mark is stored: [0-9]+$")


async def test_log_of_frames(caplog: pytest.LogCaptureFixture) -> None:
    """Each performative of a conversation is a line of both ends; payloads and credentials are shown by their size."""
    caplog.set_level(logging.DEBUG, "eventpump.amqp")
    async with asyncio.timeout(30), Emulator({HUB: 1}) as emulator:
        async with EventProducer(emulator.connection_string, HUB) as producer:
            await producer.send([event()] * 3, partition_id="0")
        async with PartitionReader(emulator.connection_string, HUB, partition_id="0", end="@latest") as reader:
            assert len([each async for each in reader]) == 3
    check_private(caplog)
    lines = [record.getMessage() for record in caplog.records]
    kinds = "saslmechanisms saslinit sasloutcome open begin attach flow transfer detach close"
    for kind in kinds.split():
        for end in ("client", "server"):
            assert any(re.match(rf"{end} connection [0-9]+ [<>] channel=[0-9]+ {kind}\b", line) for line in lines), kind
    assert any(re.search(r"< channel=0 disposition role=receiver first=[0-9]+ .*=accepted$", line) for line in lines)
    assert {record.name for record in caplog.records} == {"eventpump.amqp"}


async def test_log_of_a_websocket_by_a_proxy(caplog: pytest.LogCaptureFixture) -> None:
    """The tunnel and the WebSocket are steps in the log; the proxy's password is not."""
    caplog.set_level(logging.DEBUG, "eventpump.net")

    options: dict[str, Any] = {"transport_type": "websocket"}
    async with asyncio.timeout(30), Emulator({HUB: 1}, ws_port=0) as emulator, ConnectProxy(credentials=WHO) as proxy:
        options["proxy"] = f"http://{WHO}@127.0.0.1:{proxy.port}"
        async with EventProducer(emulator.ws_connection_string, HUB, **options) as producer:
            await producer.get_properties()
    port = proxy.port
    text = caplog.text
    there = f"127.0.0.1:{emulator.ws_port}"
    assert f"connected to 127.0.0.1:{port} at 127.0.0.1" in text
    assert f"the proxy 127.0.0.1:{port} opened a tunnel to {there}" in text
    assert f"WebSocket to {there} through the proxy 127.0.0.1:{port} is open: AMQPWSB10" in text
    assert "the WebSocket has ended: " in text
    assert WHO.partition(":")[2] not in text
