"""Runs @azure/event-hubs in a process of its own, and talks to it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.interop.peers.lines import WS_VERSION, LinePeer, PeerError
from tests.support.node import install_npm_package, node_binary

PACKAGES = (("@azure/event-hubs", "6.0.4"), ("@azure/eventhubs-checkpointstore-blob", "2.0.0"), ("ws", WS_VERSION))
_PROGRAM = Path(__file__).with_name("azure_peer.mjs")


@dataclass(frozen=True)
class JavaScriptEvent:
    """An event as the package gave it to its user. `body` are the bytes of its data section."""

    body: bytes
    sequence_number: int
    offset: str
    enqueued_ms: int
    partition_key: str | None
    properties: dict[str, Any]
    message_id: Any
    content_type: str | None
    correlation_id: Any
    annotations: list[str]


@dataclass
class Notes:
    """What a consumer reported so far, in order.

    Attributes:
        newest: A partition's newest event, where that is tracked.
    """

    received: list[tuple[str, JavaScriptEvent]] = field(default_factory=list)
    newest: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    errors: list[PeerError] = field(default_factory=list)
    initialized: list[str] = field(default_factory=list)
    closed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bodies(self) -> list[bytes]:
        """The bodies received."""
        return [event.body for _, event in self.received]


class JavaScriptConsumer:
    """An EventHubConsumerClient with one subscription."""

    def __init__(self, peer: JavaScriptPeer, name: str) -> None:
        self._peer = peer
        self._name = name
        self.notes = peer.notes(name)

    async def until(self, is_so: Callable[[Notes], bool]) -> Notes:
        """Wait for the notes to meet a condition.

        Raises:
            AssertionError: They do not in time.
        """
        await self._peer.until(lambda: is_so(self.notes), lambda: repr(self.notes)[:2000])
        return self.notes

    async def receive(self, count: int) -> list[bytes]:
        """Wait until it has received a number of events.

        Returns:
            The bodies of all.
        """
        return (await self.until(lambda notes: len(notes.received) >= count)).bodies

    async def error(self) -> PeerError:
        """Wait for its first error."""
        return (await self.until(lambda notes: bool(notes.errors))).errors[0]

    async def describe_partition(self, partition: str) -> dict[str, Any]:
        """Read about a partition."""
        return dict(await self._peer.call("describePartition", name=self._name, partition=partition))

    async def close(self) -> None:
        """Close it, and wait until it is."""
        await self._peer.call("close", name=self._name)


class JavaScriptProducer:
    """An EventHubProducerClient or EventHubBufferedProducerClient, or a consumer that only reads about the hub."""

    def __init__(self, peer: JavaScriptPeer, name: str) -> None:
        self._peer = peer
        self._name = name

    async def _do(self, verb: str, **arguments: Any) -> Any:
        return await self._peer.call(verb, name=self._name, **arguments)

    async def enqueue(self, events: Sequence[dict[str, Any]], **target: str) -> None:
        """Give events to a buffered producer."""
        await self._do("enqueue", events=list(events), target=target)

    async def flush(self) -> None:
        """Wait until a buffered producer has sent, or failed, everything."""
        await self._do("flush")

    async def send(self, events: Sequence[dict[str, Any]], **target: str) -> None:
        """Send a list of events.

        Raises:
            PeerError: The package threw.
        """
        await self._do("send", events=list(events), target=target)

    async def send_in_batch(self, events: Sequence[dict[str, Any]], **target: str) -> dict[str, int]:
        """Send a batch made by `createBatch`.

        Returns:
            Its count and size.
        """
        return dict(await self._do("sendInBatch", events=list(events), target=target))

    async def fill_batch(self, event: dict[str, Any], **target: str) -> dict[str, int]:
        """Fill a batch with one event and send it.

        Returns:
            Its count, its size, and the size it may have.
        """
        return dict(await self._do("fillBatch", event=event, target=target))

    async def describe(self) -> dict[str, Any]:
        """Read about the hub."""
        return dict(await self._do("describe"))

    async def rotate(self, *credential: str) -> None:
        """Give its credential other values: name and key, or a signature."""
        await self._do("rotate", credential=credential)

    async def close(self) -> None:
        """Close it."""
        await self._do("close")


class JavaScriptPeer(LinePeer):
    """The process of the package.

    Args:
        ca_file: CA certificates (PEM) it trusts beside Node's own.

    Attributes:
        sent: Partition and count of each batch a buffered producer reported as sent.
        failed: The same of those it gave up, with the error.
    """

    def __init__(self, ca_file: Path | None = None) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.failed: list[tuple[str, int, PeerError]] = []
        self._ca_file = ca_file
        self._names = itertools.count(1)
        self._notes: dict[str, Notes] = {}

    async def command(self) -> tuple[str, ...]:
        """See the base."""
        packages = [await asyncio.to_thread(install_npm_package, *package) for package in PACKAGES]
        return str(node_binary()), str(_PROGRAM), *map(str, packages)

    @property
    def environment(self) -> Mapping[str, str]:
        """See the base."""
        return {} if self._ca_file is None else {"NODE_EXTRA_CA_CERTS": str(self._ca_file)}

    def notes(self, name: str) -> Notes:
        """Return the notes of a consumer."""
        return self._notes.setdefault(name, Notes())

    def take(self, note: dict[str, Any]) -> None:
        """See the base."""
        partition = note["partition"]
        match note["note"]:
            case "sent":
                self.sent.append((partition, note["count"]))
            case "failed":
                self.failed.append((partition, note["count"], PeerError(*note["error"])))
            case "received":
                notes = self.notes(note["name"])
                notes.received += ((partition, _event(each)) for each in note["events"])
                notes.newest[partition] = note["newest"]
            case "error":
                self.notes(note["name"]).errors.append(PeerError(*note["error"]))
            case "initialized":
                self.notes(note["name"]).initialized.append(partition)
            case "closed":
                self.notes(note["name"]).closed.append((partition, note["reason"]))

    async def producer(
        self, connection_string: str, hub: str, *, kind: str = "plain", **options: Any
    ) -> JavaScriptProducer:
        """Open a producer, "plain" or "buffered", with options as the package spells them."""
        name = f"producer-{next(self._names)}"
        await self.call("open", name=name, kind=kind, connectionString=connection_string, hub=hub, options=options)
        return JavaScriptProducer(self, name)

    async def describer(
        self, hub: str, *credential: str, connection_string: str | None = None, **options: Any
    ) -> JavaScriptProducer:
        """Open a consumer that only reads about the hub.

        Args:
            credential: Name and key, or a signature, where no connection string is given.
            options: As the package spells them; with a credential `customEndpointAddress`, a URL.
        """
        name = f"describer-{next(self._names)}"
        await self.call(
            "openConsumer",
            name=name,
            connectionString=connection_string,
            credential=None if connection_string else credential,
            hub=hub,
            options=options,
        )
        return JavaScriptProducer(self, name)

    async def consumer(
        self,
        connection_string: str,
        hub: str,
        partition: str | None = None,
        *,
        group: str = "$Default",
        store: tuple[str, str] | None = None,
        client: dict[str, Any] | None = None,
        **options: Any,
    ) -> JavaScriptConsumer:
        """Open a consumer and have it receive: one partition, or (None) those that balancing gives it.

        Args:
            store: An Azure Storage connection string and a container, for a checkpoint store.
            client: Options of the client, as the package spells them, and `webSocket`.
            options: Options of the subscription. It starts at the beginning unless they say otherwise.
        """
        name = f"consumer-{next(self._names)}"
        await self.call(
            "subscribe",
            name=name,
            connectionString=connection_string,
            hub=hub,
            group=group,
            partition=partition,
            store=store,
            client=client or {},
            options=options,
        )
        return JavaScriptConsumer(self, name)

    async def list_stored(self, store: tuple[str, str], *scope: str) -> dict[str, list[dict[str, Any]]]:
        """Have its checkpoint store list the `ownerships` and `checkpoints` of a consumer group.

        Args:
            store: An Azure Storage connection string and a container.
            scope: Namespace, hub and consumer group.
        """
        return dict(await self.call("listStored", store=store, scope=scope))

    async def read(
        self, connection_string: str, hub: str, partition: str, count: int, *, group: str = "$Default"
    ) -> list[JavaScriptEvent]:
        """Read a partition from its beginning, until there are so many events."""
        consumer = await self.consumer(connection_string, hub, partition, group=group)
        await consumer.receive(count)
        await consumer.close()
        assert consumer.notes.errors == []
        return [event for _, event in consumer.notes.received]


def _event(each: dict[str, Any]) -> JavaScriptEvent:
    body = each["body"]
    return JavaScriptEvent(
        base64.b64decode(body) if isinstance(body, str) else json.dumps(body["value"]).encode(),
        each["sequenceNumber"],
        each["offset"],
        each["enqueuedTime"],
        each["partitionKey"],
        each["properties"],
        each["messageId"],
        each["contentType"],
        each["correlationId"],
        each["annotations"],
    )


def event(body: Any, **fields: Any) -> dict[str, Any]:
    """Describe an EventData, with fields as the package spells them. A body that is not bytes is a JavaScript value."""
    return {"body": base64.b64encode(body).decode() if isinstance(body, bytes) else {"value": body}, **fields}
