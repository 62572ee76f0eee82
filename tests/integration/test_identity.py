"""Identities against a service that checks them: tokens that live seconds, keys and signatures that change in use."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from azure.core.credentials import AccessToken, AzureNamedKey, AzureNamedKeyCredential, AzureSasCredential
from azure.identity.aio import ManagedIdentityCredential

from eventpump import EventData, EventProducer, PartitionReader
from eventpump.clients.connection import make_transport
from eventpump.emulator.auth import DEFAULT_KEY_NAME, VerifiedToken
from eventpump.emulator.server import Emulator
from eventpump.errors import AuthenticationError, Recovery
from eventpump.eventhubs import sas
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ReceiveLinkSpec, SendLink, SendLinkSpec
from eventpump.options.connection import connection_settings
from eventpump.options.credentials import Credential
from eventpump.testing.sink import RecordingSink
from tests.ways import Way, over_both

HUB = "telemetry"
NATIVE = Way("native")
LIFE = 3
"""Seconds a token of the tests lives. Its end is stated in whole seconds, so some live for two and a bit."""
PATIENCE = 20.0


class Reported:
    """Counts something that happens, and lets others wait for it.

    Attributes:
        at: When it last did, in seconds since the Unix epoch.
    """

    def __init__(self) -> None:
        self.count = 0
        self.at = 0.0
        self._changed = asyncio.Event()

    def happened(self) -> None:
        """Count it."""
        self.count += 1
        self.at = time.time()
        self._changed.set()

    async def next(self) -> None:
        """Wait until it happens again."""
        async with asyncio.timeout(PATIENCE):
            self._changed.clear()
            await self._changed.wait()


class Directory:
    """Issues web tokens that live seconds, and the service which are valid: a credential and a verifier."""

    def __init__(self) -> None:
        self.issued = Reported()
        self.is_open = True
        self._ends: dict[str, int] = {}

    async def get_token(self, *scopes: str, **_options: Any) -> AccessToken:
        """Issue one, as `AsyncTokenCredential` does."""
        assert scopes == ("https://eventhubs.azure.net//.default",)
        if not self.is_open:
            raise ConnectionError("the directory is away")
        ends = int(time.time()) + LIFE
        text = web_token(number=self.issued.count, exp=ends)
        self._ends[text] = ends
        self.issued.happened()
        return AccessToken(text, ends)

    def verify(self, text: str) -> VerifiedToken | None:
        """Know one's own."""
        ends = self._ends.get(text)
        return None if ends is None else VerifiedToken(ends)


def web_token(**claims: object) -> str:
    parts = ({"alg": "RS256", "typ": "JWT"}, claims, "the signature of a test")
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)


class WatchedKey(AzureNamedKeyCredential):
    """The package's own, telling when it is looked at."""

    def __init__(self, name: str, key: str) -> None:
        super().__init__(name, key)
        self.read = Reported()

    @property
    def named_key(self) -> AzureNamedKey:
        self.read.happened()
        return super().named_key


class WatchedSignature(AzureSasCredential):
    """The package's own, telling when it is looked at."""

    def __init__(self, signature: str) -> None:
        super().__init__(signature)
        self.read = Reported()

    @property
    def signature(self) -> str:
        self.read.happened()
        return super().signature


class Client:
    """A reader and a sender of partition 0, on one connection."""

    def __init__(self, sender: SendLink, sink: RecordingSink) -> None:
        self.sender = sender
        self.sink = sink
        self.sent: list[bytes] = []

    async def pass_through(self, count: int = 20) -> None:
        """Send some events, and have them delivered."""
        for _ in range(count):
            self.sent.append(b"%d" % len(self.sent))
            await self.sender.send(EventData(self.sent[-1]).encode())
        await self.sink.received(len(self.sent))

    def check(self) -> None:
        """Everything came once, in order, over links that never ended."""
        assert self.sink.bodies == self.sent
        assert self.sink.errors == []
        assert self.sender.is_attached


def keyless(emulator: Emulator, way: Way = NATIVE) -> str:
    plain = ";UseDevelopmentEmulator=true" if way.tls is None else ""
    return f"Endpoint=sb://{emulator.host}:{emulator.port}{plain}"


@asynccontextmanager
async def client_of(
    emulator: Emulator, credential: Credential, way: Way = NATIVE, **options: Any
) -> AsyncIterator[Client]:
    """Connect to a hub of one partition."""
    settings = connection_settings(keyless(emulator, way), HUB, credential=credential, **way.options, **options)
    transport = make_transport(settings)
    try:
        sink = RecordingSink()
        spec = ReceiveLinkSpec(HUB, "$Default", "0", EventPosition.earliest())
        (await transport.open_receive_link(spec, sink)).set_credit(100_000)
        yield Client(await transport.open_send_link(SendLinkSpec(HUB, "0")), sink)
    finally:
        await transport.aclose()


# ------------------------------------------------------------------------------------------------- tokens


@over_both(is_long=True)
async def test_links_outlive_their_tokens_while_they_are_refreshed(way: Way, request: pytest.FixtureRequest) -> None:
    """Through many refreshes of tokens that live seconds, one connection's links deliver everything once, in order."""
    directory = Directory()
    refreshes = 60 if request.config.getoption("--long") else 5
    async with (
        Emulator({HUB: 1}, token_verifier=directory.verify, tls=way.tls) as emulator,
        client_of(emulator, directory, way) as client,
    ):
        for _ in range(refreshes):
            await directory.issued.next()
            await client.pass_through()
            assert emulator.connection_count == 1
        client.check()


async def test_links_end_with_a_token_that_is_not_refreshed() -> None:
    """The service holds the expiry: where the directory is away until the token ends, so do the links, saying why."""
    directory = Directory()
    async with (
        Emulator({HUB: 1}, token_verifier=directory.verify) as emulator,
        client_of(emulator, directory) as client,
    ):
        await client.pass_through()
        directory.is_open = False
        error = await client.sink.ended()
        assert isinstance(error, AuthenticationError)
        assert "ExpiredToken" in str(error)

        async def send_on() -> None:
            async with asyncio.timeout(PATIENCE):
                while True:  # the token of the sender may live a second longer
                    await client.sender.send(EventData(b"x").encode())

        with pytest.raises(AuthenticationError, match="ExpiredToken"):
            await send_on()
        assert not client.sender.is_attached


async def test_token_of_another_directory_is_refused_and_not_shown() -> None:
    """A token of another directory is an authentication error to give up on, which does not show it."""
    async with Emulator({HUB: 1}, token_verifier=Directory().verify) as emulator:
        with pytest.raises(AuthenticationError) as caught:
            async with client_of(emulator, Directory()):
                pass
        assert caught.value.recovery is Recovery.GIVE_UP
        assert "eyJ" not in str(caught.value)


# ----------------------------------------------------------------------------------------- keys and signatures


@over_both(is_long=True)
async def test_key_rotated_by_update_signs_the_next_refresh(way: Way) -> None:
    """Once `update` was called the next refresh signs with the new key, the only one the service still takes."""
    async with Emulator({HUB: 1}, key="the first key", tls=way.tls) as emulator:
        credential = WatchedKey(DEFAULT_KEY_NAME, "the first key")
        async with client_of(emulator, credential, way, sas_lifetime=2) as client:
            await client.pass_through()
            emulator.replace_key("the second key")
            credential.update(DEFAULT_KEY_NAME, "the second key")
            old_ends = time.time() + 3
            while credential.read.at <= old_ends:
                await credential.read.next()
            await client.pass_through()
            client.check()
            assert emulator.connection_count == 1


async def test_key_not_rotated_ends_the_links() -> None:
    """Without `update` the refresh is refused, the last token runs out, and the links end."""
    async with Emulator({HUB: 1}, key="the first key") as emulator:
        credential = AzureNamedKeyCredential(DEFAULT_KEY_NAME, "the first key")
        async with client_of(emulator, credential, sas_lifetime=2) as client:
            await client.pass_through()
            emulator.replace_key("the second key")
            assert isinstance(await client.sink.ended(), AuthenticationError)


async def test_signatures_exchanged_by_update_keep_the_links() -> None:
    """Signatures of an AzureSasCredential that live seconds are put in turn, as `update` brings them."""
    async with Emulator({HUB: 1}, key="the key") as emulator:

        def signature() -> str:
            uri = f"sb://{emulator.host}/{HUB}"
            return sas.generate(uri, DEFAULT_KEY_NAME, "the key", int(time.time()) + LIFE)

        credential = WatchedSignature(signature())
        async with client_of(emulator, credential) as client:
            first_ends = time.time() + LIFE
            while credential.read.at <= first_ends:
                credential.update(signature())
                await credential.read.next()
                await client.pass_through()
            client.check()


# ------------------------------------------------------------------------------------------------ azure-identity


@dataclass
class Metadata:
    """The endpoint from which a managed identity of azure-identity gets its tokens, on loopback."""

    directory: Directory
    answers: int = 200

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["X-IDENTITY-HEADER"] == "s3cret-header-of-the-endpoint"
        assert request.query["resource"] == "https://eventhubs.azure.net/"
        if self.answers != 200:
            return web.json_response({"statusCode": self.answers, "message": "no identity"}, status=self.answers)
        given = await self.directory.get_token(f"{request.query['resource']}/.default")
        return web.json_response(
            {"access_token": given.token, "expires_on": given.expires_on, "resource": "r", "token_type": "Bearer"}
        )


@asynccontextmanager
async def served(handler: Metadata) -> AsyncIterator[str]:
    """Serve an endpoint. Gives its address."""
    application = web.Application()
    application.router.add_get("/token", handler.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/token"
    finally:
        await runner.cleanup()


async def test_credential_of_azure_identity_opens_producer_and_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A managed identity of azure-identity opens producer and reader, and one that it is refused is given up on."""
    directory = Directory()
    metadata = Metadata(directory)
    async with Emulator({HUB: 1}, token_verifier=directory.verify) as emulator, served(metadata) as url:
        monkeypatch.setenv("IDENTITY_ENDPOINT", url)
        monkeypatch.setenv("IDENTITY_HEADER", "s3cret-header-of-the-endpoint")
        async with ManagedIdentityCredential() as credential:
            options: Any = {"credential": credential}
            async with EventProducer(keyless(emulator), HUB, **options) as producer:
                await producer.send(EventData(b"known"))
            async with PartitionReader(keyless(emulator), HUB, partition_id="0", end="@latest", **options) as reader:
                assert [event.body async for event in reader] == [b"known"]
        metadata.answers = 400
        async with ManagedIdentityCredential() as credential:
            with pytest.raises(AuthenticationError, match="ClientAuthenticationError") as caught:
                async with EventProducer(keyless(emulator), HUB, credential=credential) as producer:
                    await producer.send(EventData(b"unknown"))
        assert caught.value.recovery is Recovery.GIVE_UP
