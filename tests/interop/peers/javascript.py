"""Runs @azure/event-hubs in a process of its own, and talks to it."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventpump.testing.node import install_npm_package, node_binary
from tests.interop.peers.lines import LinePeer, PeerError

VERSION = "6.0.4"
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


class JavaScriptProducer:
    """An EventHubProducerClient or EventHubBufferedProducerClient."""

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
        """Send a list of events. :raises PeerError: the package threw."""
        await self._do("send", events=list(events), target=target)

    async def send_in_batch(self, events: Sequence[dict[str, Any]], **target: str) -> dict[str, int]:
        """Send a batch made by `createBatch`. :returns: its count and size."""
        return dict(await self._do("sendInBatch", events=list(events), target=target))

    async def describe(self) -> dict[str, Any]:
        """Read about the hub."""
        return dict(await self._do("describe"))

    async def close(self) -> None:
        """Close it."""
        await self._do("close")


class JavaScriptPeer(LinePeer):
    """The process of the package.

    :ivar sent: partition and count of each batch a buffered producer reported as sent.
    :ivar failed: the same of those it gave up, with the error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.failed: list[tuple[str, int, PeerError]] = []
        self._names = itertools.count(1)

    async def command(self) -> tuple[str, ...]:
        """See the base."""
        package = await asyncio.to_thread(install_npm_package, "@azure/event-hubs", VERSION)
        return str(node_binary()), str(_PROGRAM), str(package)

    def take(self, note: dict[str, Any]) -> None:
        """See the base."""
        if note["note"] == "sent":
            self.sent.append((note["partition"], note["count"]))
        else:
            self.failed.append((note["partition"], note["count"], PeerError(*note["error"])))

    async def producer(
        self, connection_string: str, hub: str, *, kind: str = "plain", **options: Any
    ) -> JavaScriptProducer:
        """Open a producer, "plain" or "buffered", with options as the package spells them."""
        name = f"producer-{next(self._names)}"
        await self.call("open", name=name, kind=kind, connectionString=connection_string, hub=hub, options=options)
        return JavaScriptProducer(self, name)

    async def read(
        self, connection_string: str, hub: str, partition: str, count: int, *, group: str = "$Default"
    ) -> list[JavaScriptEvent]:
        """Read a partition from its beginning, until there are so many events."""
        found = await self.call(
            "read", connectionString=connection_string, hub=hub, group=group, partition=partition, count=count
        )
        return [
            JavaScriptEvent(
                base64.b64decode(each["body"]),
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
            for each in found
        ]


def event(body: bytes, **fields: Any) -> dict[str, Any]:
    """Describe an EventData, with fields as the package spells them."""
    return {"body": base64.b64encode(body).decode(), **fields}
