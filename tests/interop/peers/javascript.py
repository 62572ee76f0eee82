"""Runs @azure/event-hubs in a process of its own, and talks to it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eventpump.testing.node import install_npm_package, node_binary
from eventpump.testing.processes import ChildProcess

VERSION = "6.0.4"
PATIENCE = 30.0
"""Seconds to wait for what must come."""

_PROGRAM = Path(__file__).with_name("azure_peer.mjs")


class JavaScriptError(Exception):
    """The package threw. :param kind: its error's code or name. :param text: what it said."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


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
        """Send a list of events. :raises JavaScriptError: the package threw."""
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


class JavaScriptPeer:
    """The process of the package. An async context manager.

    :ivar sent: partition and count of each batch a buffered producer reported as sent.
    :ivar failed: the same of those it gave up, with the error.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.failed: list[tuple[str, int, JavaScriptError]] = []
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._child: ChildProcess | None = None

    async def __aenter__(self) -> Self:
        package = await asyncio.to_thread(install_npm_package, "@azure/event-hubs", VERSION)
        self._child = ChildProcess(str(node_binary()), str(_PROGRAM), str(package), on_line=self._take)
        await self._child.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child is not None
        await self._child.kill()

    @property
    def stderr(self) -> str:
        """What it wrote to stderr."""
        return "" if self._child is None else self._child.stderr

    async def call(self, verb: str, **arguments: Any) -> Any:
        """Have something done. :raises JavaScriptError: the package threw. :raises TimeoutError: no answer."""
        assert self._child is not None
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._child.tell(json.dumps({"id": number, "do": verb, **arguments}))
        return await asyncio.wait_for(answer, PATIENCE)

    async def producer(
        self, connection_string: str, hub: str, *, kind: str = "plain", **options: Any
    ) -> JavaScriptProducer:
        """Open a producer, "plain" or "buffered", with options as the package spells them."""
        name = f"producer-{next(self._numbers)}"
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

    def _take(self, text: str) -> None:
        line = json.loads(text)
        if "note" in line:
            if line["note"] == "sent":
                self.sent.append((line["partition"], line["count"]))
            else:
                self.failed.append((line["partition"], line["count"], JavaScriptError(*line["error"])))
            return
        answer = self._answers.pop(line["id"])
        if answer.done():
            return
        if "error" in line:
            answer.set_exception(JavaScriptError(*line["error"]))
        else:
            answer.set_result(line["result"])


def event(body: bytes, **fields: Any) -> dict[str, Any]:
    """Describe an EventData, with fields as the package spells them."""
    return {"body": base64.b64encode(body).decode(), **fields}
