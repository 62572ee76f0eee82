"""The official SDK in a process of its own, controlled by JSON lines: one command a line, one answer a line.

A command is `{"id": n, "do": name, ...}`, its answer `{"id": n, "result": ...}` or `{"id": n, "error": [type, text]}`.
What happens by itself comes as `{"note": kind, "name": client, ...}`. azure-eventhub is used as it is: unpatched, and
with its default settings but where a command gives others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from azure.eventhub import EventData, TransportType
from azure.eventhub._buffered_producer._partition_resolver import generate_hash_code
from azure.eventhub.aio import EventHubConsumerClient, EventHubProducerClient
from azure.eventhub.amqp import AmqpAnnotatedMessage, AmqpMessageProperties
from azure.eventhub.extensions.checkpointstoreblobaio import BlobCheckpointStore

from tests.interop.peers.values import pack, unpack

LINE_LIMIT = 64 * 1024 * 1024

STANDARD = (
    "message_id",
    "user_id",
    "to",
    "subject",
    "reply_to",
    "correlation_id",
    "content_type",
    "content_encoding",
    "absolute_expiry_time",
    "creation_time",
    "group_id",
    "group_sequence",
    "reply_to_group_id",
)


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def client_options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: TransportType[value] if key == "transport_type" else value for key, value in options.items()}


def described(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)]


def outgoing(spec: dict[str, Any]) -> EventData | AmqpAnnotatedMessage:
    """Make an event as a user would: an EventData where that can carry it, else an annotated message."""
    if "annotated" in spec:
        return AmqpAnnotatedMessage(**{key: unpack(value) for key, value in spec["annotated"].items()})
    event = EventData(unpack(spec["body"]))
    event.properties = unpack(spec["properties"])
    standard = {key: unpack(value) for key, value in spec["standard"].items()}
    for key in ("message_id", "correlation_id", "content_type"):
        if key in standard:
            setattr(event, key, standard[key])
    properties = event.raw_amqp_message.properties
    assert isinstance(properties, AmqpMessageProperties)
    for key, value in standard.items():
        setattr(properties, key, value)
    return event


def received(event: EventData) -> dict[str, Any]:
    message = event.raw_amqp_message
    kind = message.body_type.value
    properties, header = message.properties, message.header
    return {
        "sequence_number": event.sequence_number,
        "offset": event.offset,
        "enqueued_time": pack(event.enqueued_time),
        "partition_key": pack(event.partition_key),
        "kind": kind,
        "body": pack(message.body if kind == "value" else list(message.body)),
        "properties": pack(event.properties),
        "standard": pack({name: getattr(properties, name) for name in STANDARD} if properties else {}),
        "annotations": pack(message.annotations),
        "header": pack(dict(header.items()) if header else {}),
        "footer": pack(message.footer),
        "delivery_annotations": pack(message.delivery_annotations),
    }


class Peer:
    """The clients that were asked for, by name."""

    def __init__(self) -> None:
        self.producers: dict[str, EventHubProducerClient] = {}
        self.consumers: dict[str, EventHubConsumerClient] = {}
        self.receiving: dict[str, asyncio.Task[None]] = {}
        self.background: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------------------------------------- producers

    async def open_producer(
        self, name: str, connection_string: str, hub: str, options: dict[str, Any], *, buffered: bool
    ) -> None:
        if buffered:

            async def on_success(events: Any, partition_id: str | None) -> None:
                say({"note": "sent", "name": name, "partition": partition_id, "count": len(events)})

            async def on_error(events: Any, partition_id: str | None, error: Exception) -> None:
                say({"note": "failed", "name": name, "partition": partition_id, "error": described(error)})

            options = {**options, "buffered_mode": True, "on_success": on_success, "on_error": on_error}
        self.producers[name] = EventHubProducerClient.from_connection_string(
            connection_string, eventhub_name=hub, **client_options(options)
        )

    async def send(self, name: str, events: list[dict[str, Any]], how: str, target: dict[str, Any]) -> None:
        producer = self.producers[name]
        made = [outgoing(spec) for spec in events]
        match how:
            case "event":
                for event in made:
                    await producer.send_event(event, **target)
            case "list":
                await producer.send_batch(made, **target)
            case _:
                batch = await producer.create_batch(**target)
                for event in made:
                    batch.add(event)
                await producer.send_batch(batch)

    async def fill_batch(self, name: str, body: Any, target: dict[str, Any]) -> dict[str, int]:
        """Add events until the batch takes no more, and send it."""
        batch = await self.producers[name].create_batch(**target)
        try:
            while True:
                batch.add(EventData(unpack(body)))
        except ValueError:
            pass
        await self.producers[name].send_batch(batch)
        return {"count": len(batch), "size": batch.size_in_bytes, "max_size_in_bytes": batch.max_size_in_bytes}

    async def flush(self, name: str) -> None:
        await self.producers[name].flush()

    async def hub_properties(self, name: str) -> Any:
        client = self.producers.get(name) or self.consumers[name]
        return pack(await client.get_eventhub_properties())

    async def partition_properties(self, name: str, partition: str) -> Any:
        client = self.producers.get(name) or self.consumers[name]
        return pack(await client.get_partition_properties(partition))

    async def hash_keys(self, keys: list[str]) -> list[int]:
        return [generate_hash_code(key) for key in keys]  # type: ignore[no-untyped-call]  # private, without types

    # ---------------------------------------------------------------------------------------------- consumers

    async def open_consumer(
        self,
        name: str,
        connection_string: str,
        hub: str,
        group: str,
        options: dict[str, Any],
        receive_options: dict[str, Any],
        store: list[str] | None,
    ) -> None:
        if store is not None:
            options = {**options, "checkpoint_store": BlobCheckpointStore.from_connection_string(store[0], store[1])}
        client = EventHubConsumerClient.from_connection_string(
            connection_string, group, eventhub_name=hub, **client_options(options)
        )
        self.consumers[name] = client

        async def on_event_batch(context: Any, events: list[EventData]) -> None:
            newest = context.last_enqueued_event_properties
            say(
                {
                    "note": "received",
                    "name": name,
                    "partition": context.partition_id,
                    "events": [received(event) for event in events],
                    "newest": pack(newest),
                }
            )
            if store is not None and events:
                await context.update_checkpoint(events[-1])

        async def on_error(context: Any, error: Exception) -> None:
            partition = None if context is None else context.partition_id
            say({"note": "error", "name": name, "partition": partition, "error": described(error)})

        async def on_partition_initialize(context: Any) -> None:
            say({"note": "initialized", "name": name, "partition": context.partition_id})

        async def on_partition_close(context: Any, reason: Any) -> None:
            say({"note": "closed", "name": name, "partition": context.partition_id, "reason": reason.name})

        async def receive() -> None:
            await client.receive_batch(
                on_event_batch,
                on_error=on_error,
                on_partition_initialize=on_partition_initialize,
                on_partition_close=on_partition_close,
                **{key: unpack(value) for key, value in receive_options.items()},
            )

        self.receiving[name] = asyncio.create_task(receive())

    # -------------------------------------------------------------------------------------------------- the end

    async def close(self, name: str) -> None:
        """Close a client, and wait until it is."""
        producer = self.producers.pop(name, None)
        if producer is not None:
            await producer.close()
            return
        await self.consumers.pop(name).close()
        # What is left of it sleeps to the end of its balancing interval.
        task = self.receiving.pop(name)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def forget(self) -> None:
        """Close every client, and do not wait: a consumer's close sleeps for a second at least."""
        for name in [*self.producers, *self.consumers]:
            task = asyncio.create_task(self.close(name))
            self.background.add(task)
            task.add_done_callback(self.background.discard)

    async def answer(self, command: dict[str, Any]) -> None:
        number, name = command.pop("id"), command.pop("do")
        verb: Callable[..., Awaitable[Any]] = getattr(self, name)
        try:
            say({"id": number, "result": await verb(**command)})
        except Exception as error:
            say({"id": number, "error": described(error)})


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    peer = Peer()
    answering: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(peer.answer(json.loads(line)))
        answering.add(task)
        task.add_done_callback(answering.discard)
    await peer.forget()
    if peer.background:
        await asyncio.wait(peer.background, timeout=5)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(main())
