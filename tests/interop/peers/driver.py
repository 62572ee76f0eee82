"""Runs azure-eventhub in a process of its own, and talks to it."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.interop.peers.lines import LinePeer, PeerError
from tests.interop.peers.values import pack, unpack

PATIENCE = 20.0
"""Seconds to wait for what must come."""


@dataclass
class PeerEvent:
    """An event as the peer's SDK gave it to its user. Text comes as bytes there, in the pure-Python stack."""

    partition: str
    sequence_number: int
    offset: str
    enqueued_time: datetime
    partition_key: bytes | None
    kind: str
    body: Any
    properties: dict[Any, Any]
    standard: dict[str, Any]
    annotations: dict[Any, Any]
    header: dict[str, Any]
    footer: dict[Any, Any] | None
    delivery_annotations: dict[Any, Any] | None

    @property
    def data(self) -> bytes:
        """The data sections, joined."""
        assert self.kind == "data"
        return b"".join(self.body)


@dataclass
class Notes:
    """What a client of the peer reported so far, in order."""

    name: str
    received: list[PeerEvent] = field(default_factory=list)
    newest: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[PeerError] = field(default_factory=list)
    initialized: list[str] = field(default_factory=list)
    closed: list[tuple[str, str]] = field(default_factory=list)
    sent: list[tuple[str, int]] = field(default_factory=list)

    def take(self, line: dict[str, Any]) -> None:
        """Record what a line says."""
        partition = line["partition"]
        match line["note"]:
            case "received":
                for each in line["events"]:
                    unpacked = {
                        key: value if key in ("sequence_number", "offset", "kind") else unpack(value)
                        for key, value in each.items()
                    }
                    self.received.append(PeerEvent(partition, **unpacked))
                self.newest[partition] = unpack(line["newest"])
            case "error" | "failed":
                self.errors.append(PeerError(*line["error"]))
            case "initialized":
                self.initialized.append(partition)
            case "closed":
                self.closed.append((partition, line["reason"]))
            case "sent":
                self.sent.append((partition, line["count"]))

    @property
    def owned(self) -> set[str]:
        """The partitions opened and not closed again."""
        owned = list(self.initialized)
        for partition, _ in self.closed:
            owned.remove(partition)
        return set(owned)


class PeerClient:
    """A client in the peer's process."""

    def __init__(self, peer: AzurePeer, name: str) -> None:
        self._peer = peer
        self.name = name
        self.notes = peer.notes(name)

    async def until(self, condition: Callable[[Notes], bool], patience: float = PATIENCE) -> None:
        """Wait for the notes to meet a condition.

        Raises:
            AssertionError: They do not in time.
        """
        await self._peer.until(lambda: condition(self.notes), lambda: repr(self.notes)[:2000], patience)

    async def pause(self, seconds: float) -> None:
        """Wait for its next note, or some time."""
        known = len(self.notes.received) + len(self.notes.errors)
        with contextlib.suppress(AssertionError):
            await self.until(lambda notes: len(notes.received) + len(notes.errors) > known, seconds)

    async def close(self) -> None:
        """Close it, and wait until it is."""
        await self._peer.call("close", name=self.name)

    async def hub_properties(self) -> dict[str, Any]:
        """Read about the hub."""
        return dict(unpack(await self._peer.call("hub_properties", name=self.name)))

    async def partition_properties(self, partition: str) -> dict[str, Any]:
        """Read about a partition."""
        return dict(unpack(await self._peer.call("partition_properties", name=self.name, partition=partition)))


class PeerProducer(PeerClient):
    """An EventHubProducerClient."""

    async def send(
        self, events: Sequence[dict[str, Any]], how: str = "list", patience: float = PATIENCE, **target: str
    ) -> None:
        """Send: "event" one by one, "list" as a list, "batch" in a batch made for it.

        Raises:
            PeerError: It raised.
        """
        await self._peer.call("send", patience, name=self.name, events=list(events), how=how, target=target)

    async def fill_batch(self, body: bytes, **target: str) -> dict[str, int]:
        """Fill a batch with one body and send it.

        Returns:
            Its count, its size, and the size it may have.
        """
        return dict(await self._peer.call("fill_batch", name=self.name, body=pack(body), target=target))

    async def flush(self) -> None:
        """Send what is buffered."""
        await self._peer.call("flush", name=self.name)


class PeerConsumer(PeerClient):
    """An EventHubConsumerClient that receives."""

    async def receive(self, count: int, patience: float = PATIENCE) -> list[PeerEvent]:
        """Wait until it has received a number of events, since it began."""
        await self.until(lambda notes: len(notes.received) >= count, patience)
        return self.notes.received

    async def error(self) -> PeerError:
        """Wait for its first error."""
        await self.until(lambda notes: bool(notes.errors))
        return self.notes.errors[0]


class AzurePeer(LinePeer):
    """The process of the official SDK."""

    def __init__(self) -> None:
        super().__init__()
        self._notes: dict[str, Notes] = {}
        self._names = itertools.count(1)

    async def command(self) -> tuple[str, ...]:
        """See the base."""
        return sys.executable, "-m", "tests.interop.peers.azure_peer"

    def take(self, note: dict[str, Any]) -> None:
        """See the base."""
        self.notes(note["name"]).take(note)

    def notes(self, name: str) -> Notes:
        """Return the notes of a client."""
        return self._notes.setdefault(name, Notes(name))

    async def producer(
        self, connection_string: str, hub: str, *, buffered: bool = False, **options: Any
    ) -> PeerProducer:
        """Open a producer."""
        name = f"producer-{next(self._names)}"
        await self.call(
            "open_producer",
            name=name,
            connection_string=connection_string,
            hub=hub,
            buffered=buffered,
            options=options,
        )
        return PeerProducer(self, name)

    async def consumer(
        self,
        connection_string: str,
        hub: str,
        *,
        group: str = "$Default",
        store: tuple[str, str] | None = None,
        client: dict[str, Any] | None = None,
        **options: Any,
    ) -> PeerConsumer:
        """Open a consumer and have it receive.

        Args:
            store: An Azure Storage connection string and a container, for a checkpoint store.
            client: Options of the client.
            options: Options of `receive_batch`.
        """
        name = f"consumer-{next(self._names)}"
        await self.call(
            "open_consumer",
            name=name,
            connection_string=connection_string,
            hub=hub,
            group=group,
            store=store,
            options=client or {},
            receive_options={key: pack(value) for key, value in options.items()},
        )
        return PeerConsumer(self, name)

    async def hash_keys(self, keys: Sequence[str]) -> list[int]:
        """Have partition keys hashed."""
        return list(await self.call("hash_keys", keys=list(keys)))

    async def forget(self) -> None:
        """Have every client closed, later."""
        await self.call("forget")


def event(body: Any = b"", properties: dict[str, Any] | None = None, **standard: Any) -> dict[str, Any]:
    """Describe an EventData for the peer to send."""
    return {
        "body": pack(body),
        "properties": pack(properties or {}),
        "standard": {key: pack(value) for key, value in standard.items()},
    }


def annotated(**sections: Any) -> dict[str, Any]:
    """Describe an AmqpAnnotatedMessage for the peer to send, by its constructor's arguments."""
    return {"annotated": {key: pack(value) for key, value in sections.items()}}
