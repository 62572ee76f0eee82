"""Events whose bodies follow schemas of a registry, by the encoder of azure-schemaregistry.

    pip install azure-schemaregistry-avroencoder azure-identity
    EVENTPUMP_CONNECTION_STRING="Endpoint=..." HUB=telemetry \
        REGISTRY=example.servicebus.windows.net GROUP=readings python examples/schema_registry.py

The encoder makes events to send, and decodes received ones: `EventData` and `ReceivedEvent` have the two methods that
it calls. `JsonSchemaEncoder` is used in the same way. Without EVENTPUMP_CONNECTION_STRING the program starts a local
service, and without REGISTRY it keeps the schemas in memory.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from eventpump import (
    Emulator,
    EventData,
    EventProducer,
    EventPumpError,
    PartitionReader,
)

try:
    from azure.identity.aio import DefaultAzureCredential
    from azure.schemaregistry.aio import SchemaRegistryClient
    from azure.schemaregistry.encoder.avroencoder.aio import AvroEncoder
except ModuleNotFoundError as error:
    packages = "azure-schemaregistry-avroencoder azure-identity"
    raise SystemExit(f"{error}: pip install {packages}") from None

HUB = os.environ.get("HUB", "telemetry")
EVENTS = 10
SCHEMA = """{"type": "record", "name": "Reading", "namespace": "example", "fields": [
    {"name": "sensor", "type": "string"}, {"name": "value", "type": "double"}]}"""


class LocalRegistry:
    """Keeps schemas in memory: what the encoder calls of a `SchemaRegistryClient`."""

    def __init__(self) -> None:
        self.definitions: list[str] = []

    async def register_schema(
        self, group: str, name: str, definition: str, kind: str, **_: Any
    ) -> SimpleNamespace:
        self.definitions.append(definition)
        return SimpleNamespace(id=str(len(self.definitions) - 1))

    async def get_schema_properties(self, *schema: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(id=str(self.definitions.index(schema[2])))

    async def get_schema(self, schema_id: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(definition=self.definitions[int(schema_id)])


async def main() -> None:
    async with AsyncExitStack() as stack:
        connection_string = os.environ.get("EVENTPUMP_CONNECTION_STRING")
        if connection_string is None:
            service = await stack.enter_async_context(Emulator({HUB: 1}))
            connection_string = service.connection_string
        client: Any = LocalRegistry()
        if namespace := os.environ.get("REGISTRY"):
            identity = await stack.enter_async_context(DefaultAzureCredential())
            client = await stack.enter_async_context(
                SchemaRegistryClient(namespace, identity)
            )
        encoder = AvroEncoder(
            client=client,
            group_name=os.environ.get("GROUP", "readings"),
            auto_register=True,
        )

        producer = await stack.enter_async_context(
            EventProducer(connection_string, HUB)
        )
        reader = PartitionReader(
            connection_string, HUB, partition_id="0", position="@latest"
        )
        await stack.enter_async_context(reader)
        for number in range(EVENTS):
            reading = {"sensor": f"sensor-{number % 3}", "value": 20 + number / 2}
            event = await encoder.encode(reading, schema=SCHEMA, message_type=EventData)
            await producer.send(event, partition_id="0")
        found = 0
        while found < EVENTS:
            for received in await reader.read():
                print(
                    received.sequence_number,
                    received.content_type,
                    await encoder.decode(received),
                )
                found += 1


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
