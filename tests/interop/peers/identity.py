"""A user's program of azure-eventhub with a credential of Entra's kind: sends an event, reads it, prints its body.

Run with a JSON object: address, hub, token, authority, web_socket. It prints the text of the error, if there is one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, Self

from azure.core.credentials import AccessToken
from azure.eventhub import EventData, TransportType
from azure.eventhub.aio import EventHubConsumerClient, EventHubProducerClient

GIVEN = json.loads(sys.argv[1])


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


class StubCredential:
    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        return AccessToken(GIVEN["token"], int(time.time()) + 3600)

    async def close(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


async def main() -> None:
    options: dict[str, Any] = {
        "custom_endpoint_address": GIVEN["address"],
        "transport_type": TransportType.AmqpOverWebsocket if GIVEN["web_socket"] else TransportType.Amqp,
        "connection_verify": GIVEN["authority"],
        "retry_total": 0,
    }
    credential = StubCredential()
    async with EventHubProducerClient("localhost", GIVEN["hub"], credential, **options) as producer:
        await producer.send_batch([EventData("hello")], partition_id="0")

    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def on_event(context: Any, event: Any) -> None:
        if not found.done():
            found.set_result(event.body_as_str())

    async def on_error(context: Any, error: Exception) -> None:
        if not found.done():
            found.set_exception(error)

    async with EventHubConsumerClient("localhost", GIVEN["hub"], "$Default", credential, **options) as consumer:
        receiving = asyncio.create_task(
            consumer.receive(on_event, on_error=on_error, partition_id="0", starting_position="-1")
        )
        say(await found)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)


try:
    asyncio.run(main())
except Exception as error:
    say(f"{type(error).__name__}: {error}")
