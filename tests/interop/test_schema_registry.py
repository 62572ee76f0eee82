"""The encoders of azure-schemaregistry, as published, with our events: over HTTPS to a registry on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any, Self, TypeAlias

import azure.eventhub
import pytest
from aiohttp import web
from azure.core.credentials import AccessToken
from azure.schemaregistry import SchemaRegistryClient
from azure.schemaregistry.aio import SchemaRegistryClient as AioSchemaRegistryClient
from azure.schemaregistry.encoder.avroencoder import AvroEncoder, InvalidContentError
from azure.schemaregistry.encoder.avroencoder.aio import AvroEncoder as AioAvroEncoder
from azure.schemaregistry.encoder.jsonencoder import InvalidContentError as JsonInvalidContentError
from azure.schemaregistry.encoder.jsonencoder import JsonSchemaEncoder
from azure.schemaregistry.encoder.jsonencoder.aio import JsonSchemaEncoder as AioJsonSchemaEncoder

from eventpump import Emulator, EventData, EventError, EventProducer, PayloadCodec, ReceivedEvent
from tests.authority import Authority
from tests.support.reading import read_partition

GROUP = "readings"
READING = {"sensor": "s-1", "value": 21.5}
AVRO_SCHEMA = """{"type": "record", "name": "Reading", "namespace": "example", "fields": [
  {"name": "sensor", "type": "string"}, {"name": "value", "type": "double"}]}"""
JSON_SCHEMA = """{"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Reading", "type": "object",
  "properties": {"sensor": {"type": "string"}, "value": {"type": "number"}}, "required": ["sensor", "value"]}"""
DRAFT = "https://json-schema.org/draft/2020-12/schema"
PLACE: dict[str, Any] = {"offset": "0", "sequence_number": 0, "enqueued_time": datetime(2026, 1, 1, tzinfo=UTC)}

Blocking: TypeAlias = AvroEncoder | JsonSchemaEncoder
Aio: TypeAlias = AioAvroEncoder | AioJsonSchemaEncoder


class Token:
    """A credential for both kinds of clients."""

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        return AccessToken("token", 2**32)


class AioToken:
    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        return AccessToken("token", 2**32)

    async def close(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


class Registry:
    """A schema registry: the three requests of the encoders' clients."""

    def __init__(self) -> None:
        self.schemas: dict[str, tuple[str, str]] = {}

    async def register(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        schema_id = f"{len(self.schemas):032x}"
        self.schemas[schema_id] = (name, await request.text())
        return self._answer(schema_id, 204)

    async def find(self, request: web.Request) -> web.Response:
        wanted = (request.match_info["name"], await request.text())
        return self._answer(next(key for key, kept in self.schemas.items() if kept == wanted), 204)

    async def get(self, request: web.Request) -> web.Response:
        return self._answer(request.match_info["id"], 200)

    def _answer(self, schema_id: str, status: int) -> web.Response:
        name, definition = self.schemas[schema_id]
        headers = {
            "Schema-Id": schema_id,
            "Schema-Group-Name": GROUP,
            "Schema-Name": name,
            "Schema-Version": "1",
            "Content-Type": f"application/json; serialization={'Json' if 'title' in definition else 'Avro'}",
        }
        return web.Response(status=status, body=definition.encode() if status == 200 else None, headers=headers)


@pytest.fixture
async def registry(authority: Authority) -> AsyncIterator[str]:
    """Serve a registry that has the schema in JSON; clients register that of Avro. Its host and port."""
    stub = Registry()
    stub.schemas["f" * 32] = ("Reading", JSON_SCHEMA)
    app = web.Application()
    app.router.add_put("/$schemaGroups/{group}/schemas/{name}", stub.register)
    app.router.add_post("/$schemaGroups/{group}/schemas/{name}:get-id", stub.find)
    app.router.add_get("/$schemaGroups/$schemas/{id}", stub.get)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=authority.server("localhost"))
    await site.start()
    yield f"localhost:{site.port}"
    await runner.cleanup()


class Codec:
    """An encoder of either kind: the call that the kind documents, in a thread where it blocks."""

    def __init__(self, encoder: Blocking | Aio, schema: str) -> None:
        self.encoder = encoder
        self.schema = schema

    async def encode(self, message_type: type[Any], **options: Any) -> Any:
        given: dict[str, Any] = {"schema": self.schema, "message_type": message_type, **options}
        if isinstance(self.encoder, AvroEncoder | JsonSchemaEncoder):
            encode: Callable[..., Any] = self.encoder.encode
            return await asyncio.to_thread(encode, READING, **given)
        return await self.encoder.encode(READING, **given)

    async def decode(self, event: EventData | ReceivedEvent | azure.eventhub.EventData) -> dict[str, Any]:
        if isinstance(self.encoder, AvroEncoder | JsonSchemaEncoder):
            return await asyncio.to_thread(self.encoder.decode, event)
        return dict(await self.encoder.decode(event))


def _avro(stack: AsyncExitStack, at: str, trust: str) -> Codec:
    client = SchemaRegistryClient(at, Token(), connection_verify=trust)
    return Codec(stack.enter_context(AvroEncoder(client=client, group_name=GROUP, auto_register=True)), AVRO_SCHEMA)


def _json(stack: AsyncExitStack, at: str, trust: str) -> Codec:
    client = SchemaRegistryClient(at, Token(), connection_verify=trust)
    return Codec(stack.enter_context(JsonSchemaEncoder(client=client, group_name=GROUP, validate=DRAFT)), JSON_SCHEMA)


def _aio_avro(stack: AsyncExitStack, at: str, trust: str) -> Codec:
    client = AioSchemaRegistryClient(at, AioToken(), connection_verify=trust)
    encoder = AioAvroEncoder(client=client, group_name=GROUP, auto_register=True)
    stack.push_async_exit(encoder)
    return Codec(encoder, AVRO_SCHEMA)


def _aio_json(stack: AsyncExitStack, at: str, trust: str) -> Codec:
    client = AioSchemaRegistryClient(at, AioToken(), connection_verify=trust)
    encoder = AioJsonSchemaEncoder(client=client, group_name=GROUP, validate=DRAFT)
    stack.push_async_exit(encoder)
    return Codec(encoder, JSON_SCHEMA)


KINDS = {"Avro": _avro, "JSON": _json, "Avro, asyncio": _aio_avro, "JSON, asyncio": _aio_json}


@pytest.fixture(params=KINDS.values(), ids=list(KINDS))
async def codec(request: pytest.FixtureRequest, registry: str, authority: Authority) -> AsyncIterator[Codec]:
    """One of the published encoders."""
    make: Callable[[AsyncExitStack, str, str], Codec] = request.param
    async with AsyncExitStack() as stack:
        yield make(stack, registry, str(authority.file))


async def test_encoders_take_our_events(codec: Codec) -> None:
    """What an encoder makes as an `EventData` is sent as it is, with the options given; it decodes what is received."""
    event: EventData = await codec.encode(EventData, properties={"unit": "C"}, message_id="m-1")
    assert type(event) is EventData
    assert await codec.decode(event) == READING
    zipped = PayloadCodec("reversed", lambda body: body[::-1], lambda body: body[::-1])
    async with Emulator({"telemetry": 1}) as emulator:
        async with EventProducer(emulator.connection_string, "telemetry", encode=zipped) as producer:
            await producer.send(event, partition_id="0")
        (found,) = await read_partition(emulator.connection_string, "telemetry", "0", decode=zipped)
    assert await codec.decode(found) == READING
    assert (found.properties, found.message_id) == ({"unit": "C"}, "m-1")


async def test_encoders_make_received_events_for_tests(codec: Codec) -> None:
    """A processor's test gets an event with a place of its own choice."""
    event: ReceivedEvent = await codec.encode(ReceivedEvent, partition_key="s-1", **PLACE)
    assert (type(event), event.offset, event.partition_key) == (ReceivedEvent, "0", "s-1")
    assert await codec.decode(event) == READING


async def test_events_of_azure_eventhub_and_ours_are_encoded_alike(codec: Codec) -> None:
    """The official SDK's event has the same content and content type."""
    ours: EventData = await codec.encode(EventData)
    theirs: azure.eventhub.EventData = await codec.encode(azure.eventhub.EventData)
    assert ours.__message_content__() == theirs.__message_content__()


async def test_encoders_refuse_what_they_did_not_encode(codec: Codec) -> None:
    """An event without a content type is the encoder's error, and one whose body is not data is an `EventError`."""
    for plain in (EventData(b"{}"), ReceivedEvent.build(b"{}", **PLACE)):
        with pytest.raises((InvalidContentError, JsonInvalidContentError), match="not in the expected format"):
            await codec.decode(plain)
    for value in (EventData(value=1), ReceivedEvent.build(value=1, **PLACE)):
        with pytest.raises(EventError, match="the body is not data"):
            await codec.decode(value)
