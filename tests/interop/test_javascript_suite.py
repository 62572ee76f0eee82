"""What @azure/event-hubs' own tests demand of the service, where the emulator once failed them.

The package from npm has no tests, so each of its ten tests that failed is repeated here: nine below, and the one of a
body of null in `test_javascript.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from eventpump import Emulator
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME
from eventpump.eventhubs import sas
from tests.authority import Authority
from tests.interop.peers.javascript import JavaScriptPeer, event
from tests.interop.peers.lines import PeerError

pytestmark = pytest.mark.asyncio(loop_scope="session")

HUB = "telemetry"
ONCE: dict[str, Any] = {"retryOptions": {"maxRetries": 0, "timeoutInMs": 10_000}}
KEY = (DEFAULT_KEY_NAME, DEFAULT_KEY)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def service() -> AsyncIterator[Emulator]:
    """Serve a hub of two partitions."""
    async with Emulator({HUB: 2}) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def peer(authority: Authority) -> AsyncIterator[JavaScriptPeer]:
    """Run the package, for all tests of this module."""
    async with JavaScriptPeer(authority.file) as started:
        yield started


def signature(port: int) -> str:
    """Sign for the hub, for an hour."""
    return sas.generate(f"sb://127.0.0.1:{port}/{HUB}", *KEY, int(time.time()) + 3600)


@pytest.mark.parametrize("partition", ["XYZ", "-1", "1000", "-"])
async def test_javascript_send_to_an_invalid_partition(service: Emulator, peer: JavaScriptPeer, partition: str) -> None:
    """The send fails with the service's text, which programs look for."""
    producer = await peer.producer(service.connection_string, HUB, **ONCE)
    with pytest.raises(PeerError) as caught:
        await producer.send([event(b"x")], partitionId=partition)
    await producer.close()
    assert caught.value.kind == "ArgumentOutOfRangeError"
    expected = "The specified partition is invalid for an EventHub partition sender or receiver."
    assert expected in caught.value.text


async def test_javascript_idempotent_send_with_a_negative_owner_level(service: Emulator, peer: JavaScriptPeer) -> None:
    """An idempotent producer's state of negative numbers is refused with the service's text."""
    producer = await peer.producer(service.connection_string, HUB, partitionOptions={"0": {"ownerLevel": -1}}, **ONCE)
    with pytest.raises(PeerError) as caught:
        await producer.send([event(b"x")], partitionId="0")
    await producer.close()
    assert caught.value.kind == "ArgumentOutOfRangeError"
    assert (
        "Invalid range for idempotent producer state. Producer Id, Epoch, and Sequence Number must be zero or positive."
    ) in caught.value.text


@pytest.mark.parametrize("kind", ["key", "signature"])
async def test_javascript_management_after_a_rotated_credential(
    peer: JavaScriptPeer, authority: Authority, kind: str
) -> None:
    """A read over $management is refused once its own token is of a wrong key, though the link stays open."""
    async with Emulator({HUB: 2}, tls=authority.server("127.0.0.1")) as service:
        right = KEY if kind == "key" else (signature(service.port),)
        wrong = (
            ("foo", "bar") if kind == "key" else (f"SharedAccessSignature sr=fake&sig=foo&se={time.time()}&skn=foo",)
        )
        endpoint = f"https://127.0.0.1:{service.port}"
        client = await peer.describer(HUB, *right, customEndpointAddress=endpoint, **ONCE)
        assert (await client.describe())["partitionIds"] == ["0", "1"]
        await client.rotate(*wrong)
        with pytest.raises(PeerError) as caught:
            await client.describe()
        assert caught.value.kind == "UnauthorizedError"
        await client.rotate(*right)
        assert (await client.describe())["partitionIds"] == ["0", "1"]
        await client.close()


@pytest.mark.parametrize("kind", ["producer", "consumer"])
async def test_javascript_connection_string_with_a_signature(
    service: Emulator, peer: JavaScriptPeer, kind: str
) -> None:
    """With a SharedAccessSignature in its connection string a client connects, without SASL, and is served."""
    string = (
        f"Endpoint=sb://127.0.0.1:{service.port};SharedAccessSignature={signature(service.port)}"
        ";UseDevelopmentEmulator=true"
    )
    if kind == "producer":
        client = await peer.producer(string, HUB, **ONCE)
    else:
        client = await peer.describer(HUB, connection_string=string, **ONCE)
    assert await client.describe() == {"name": HUB, "partitionIds": ["0", "1"]}
    await client.close()
