"""Process events with an identity of Microsoft Entra in place of keys, on one machine or in a cluster.

    pip install azure-identity
    EVENTPUMP_NAMESPACE=example.servicebus.windows.net EVENTPUMP_HUB=telemetry \
        EVENTPUMP_STORAGE_URL=https://example.blob.core.windows.net EVENTPUMP_CONTAINER=leases \
        python examples/with_identity.py

`DefaultAzureCredential` finds the workload identity of a pod, the managed identity of a machine, or the account of
`az login`. The identity needs the roles Azure Event Hubs Data Receiver on the hub and Storage Blob Data Contributor on
the container. `examples/kubernetes` runs this program: it answers `/livez`, `/readyz` and `/metrics` on PORT, and ends
in order on SIGTERM.

In place of the identity, EVENTPUMP_CONNECTION_STRING and EVENTPUMP_STORAGE_CONNECTION_STRING may hold keys, without
EVENTPUMP_NAMESPACE and EVENTPUMP_STORAGE_URL. Without EVENTPUMP_NAMESPACE and EVENTPUMP_CONNECTION_STRING it starts a
local service, which accepts the tokens of a credential of its own, and ends after some events.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from azure.core.credentials import AccessToken

try:
    from azure.identity.aio import DefaultAzureCredential
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: pip install azure-identity") from None

from eventpump import (
    Emulator,
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    EventPumpError,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
)
from eventpump.emulator.auth import VerifiedToken
from eventpump.health import HealthServer

HUB = "telemetry"
LOCAL_EVENTS = 100


class Printer(EventProcessor):
    """Replace this by what you do with events."""

    def __init__(self) -> None:
        self.events = 0
        self.enough = asyncio.Event()

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        for event in events:
            print(
                context.partition_id,
                event.sequence_number,
                event.body_as_str(),
                flush=True,
            )
        self.events += len(events)
        if self.events >= LOCAL_EVENTS:
            self.enough.set()


class LocalCredential:
    """Issues tokens that the local service accepts: a credential, as those of azure-identity, and a verifier."""

    def __init__(self) -> None:
        self.issued: dict[str, int] = {}

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        expires_at = int(time.time()) + 3600
        token = f"local.{len(self.issued)}.token"
        self.issued[token] = expires_at
        return AccessToken(token, expires_at)

    def verify(self, token: str) -> VerifiedToken | None:
        expires_at = self.issued.get(token)
        return None if expires_at is None else VerifiedToken(expires_at)


async def main() -> None:
    processor, until = Printer(), None
    async with AsyncExitStack() as stack:
        has_namespace = bool(os.environ.get("EVENTPUMP_NAMESPACE"))
        if has_namespace or os.environ.get("EVENTPUMP_CONNECTION_STRING"):
            options: dict[str, Any] = {}
            if has_namespace:
                # It is closed after the host, which uses it to the end.
                identity = await stack.enter_async_context(DefaultAzureCredential())
                options["credential"] = identity
            host = EventProcessorHost.from_env(processor=processor, **options)
        else:
            credential = LocalCredential()
            service = await stack.enter_async_context(
                Emulator({HUB: 4}, token_verifier=credential.verify)
            )
            without_key = f"Endpoint=sb://{service.host}:{service.port};UseDevelopmentEmulator=true"
            async with EventProducer(
                without_key, HUB, credential=credential
            ) as producer:
                for number in range(LOCAL_EVENTS):
                    await producer.send(EventData(f"reading {number}"))
            host = EventProcessorHost(
                without_key,
                HUB,
                processor=processor,
                credential=credential,
                lease_store=MemoryLeaseStore(),
            )
            until = processor.enough.wait()
        port = int(os.environ.get("PORT", "8080"))
        server = HealthServer(host, address="0.0.0.0", port=port)
        await stack.enter_async_context(server)
        print(f"listening on port {server.port}", flush=True)
        async with host:
            await host.run(handle_signals=True, until=until)
    print(f"processed {processor.events} events", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
