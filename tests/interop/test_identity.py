"""The official SDKs with a credential of Entra's kind and TLS by the emulator's own authority, as docs/howto shows."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

import pytest

from eventpump import Emulator
from tests.interop.peers.lines import WS_VERSION
from tests.support.node import install_npm_package, node_binary

PEERS = Path(__file__).with_name("peers")
ROOT = Path(__file__).parents[2]
SECRET = "a secret of the tests"
RESOURCE = "https://eventhubs.azure.net"
PATIENCE = 60.0


def signed(secret: str = SECRET, **claims: object) -> str:
    """Return a token as a user's stub of Entra signs it."""
    made = {"aud": RESOURCE, "exp": int(time.time()) + 3600} | claims
    head, body = (_part(json.dumps(each).encode()) for each in ({"alg": "HS256", "typ": "JWT"}, made))
    return f"{head}.{body}.{_part(hmac.digest(secret.encode(), f'{head}.{body}'.encode(), hashlib.sha256))}"


def _part(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def javascript(emulator: Emulator, token: str, *, web_socket: bool) -> list[str]:
    packages = [
        install_npm_package(name, version) for name, version in (("@azure/event-hubs", "6.0.4"), ("ws", WS_VERSION))
    ]
    address = f"https://localhost:{emulator.ws_port if web_socket else emulator.port}"
    given = {"address": address, "hub": "telemetry", "token": token, "webSocket": web_socket}
    return [str(node_binary()), str(PEERS / "identity.mjs"), json.dumps(given), *map(str, packages)]


def python(emulator: Emulator, token: str, *, web_socket: bool) -> list[str]:
    given = {
        "address": f"sb://localhost:{emulator.ws_port if web_socket else emulator.port}",
        "hub": "telemetry",
        "token": token,
        "authority": str(emulator.authority_file),
        "web_socket": web_socket,
    }
    return [sys.executable, str(PEERS / "identity.py"), json.dumps(given)]


Program = Callable[..., list[str]]


async def says(program: Program, emulator: Emulator, token: str, *, web_socket: bool = False) -> str:
    """Run a program of a user of the SDK, and return what it printed last."""
    command = await asyncio.to_thread(program, emulator, token, web_socket=web_socket)
    environment = os.environ | {"NODE_EXTRA_CA_CERTS": str(emulator.authority_file)}
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()
    return out.decode().strip()


BOTH = pytest.mark.parametrize("program", [javascript, python])


@BOTH
@pytest.mark.parametrize("web_socket", [False, True], ids=["AMQP", "WebSocket"])
async def test_sdks_use_any_token_over_the_own_certificate(program: Program, web_socket: bool) -> None:
    """An unsigned token, the custom endpoint's address, and trust in the authority's file: an event goes through."""
    async with Emulator({"telemetry": 1}, tls="auto", ws_port=0, accept_jwt="any") as emulator:
        assert await says(program, emulator, "stub", web_socket=web_socket) == "hello"


@pytest.mark.parametrize(
    ("program", "bad_signature", "bad_audience"),
    [
        (javascript, "InvalidSignature: The token has an invalid", "InvalidAudience: Invalid authorization token"),
        # azure-eventhub shows the words only where the answer has no error condition.
        (python, "AuthenticationError: ", "AuthenticationError: "),
    ],
)
async def test_sdks_use_a_signed_token_and_are_refused_without(
    program: Program, bad_signature: str, bad_audience: str
) -> None:
    """With a secret a token signed by it is accepted; the SDK's error for another is that of a refused identity."""
    async with Emulator({"telemetry": 1}, tls="auto", accept_jwt=SECRET) as emulator:
        assert await says(program, emulator, signed()) == "hello"
        assert bad_signature in await says(program, emulator, signed("another secret"))
        assert bad_audience in await says(program, emulator, signed(aud="https://storage.azure.com"))
