"""The emulator in this process, and third-party peers in others."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from eventpump import Emulator
from eventpump.emulator.config import HubSpec
from tests.authority import Authority
from tests.interop.peers.driver import AzurePeer
from tests.support.azurite import Azurite

_HUBS = 200
_numbers = itertools.count()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def emulator() -> AsyncIterator[Emulator]:
    """Serve more hubs than there are tests, as the peer's clients are closed while the next test runs."""
    async with Emulator(HubSpec(f"hub-{number}", 4, ("second",)) for number in range(_HUBS)) as started:
        yield started


@pytest.fixture
def hub() -> str:
    """A hub of four partitions of its own, with two consumer groups: $Default and second."""
    return f"hub-{next(_numbers)}"


@pytest_asyncio.fixture(loop_scope="session")
async def own_emulator() -> AsyncIterator[Emulator]:
    """Serve one hub, `telemetry`, for a test that does harm."""
    async with Emulator({"telemetry": 4}) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def azure_process() -> AsyncIterator[AzurePeer]:
    """azure-eventhub, in a process of its own."""
    async with AzurePeer() as peer:
        yield peer


@pytest_asyncio.fixture(loop_scope="session")
async def azure(azure_process: AzurePeer, request: pytest.FixtureRequest) -> AsyncIterator[AzurePeer]:
    """azure-eventhub, for one test; what it wrote to stderr is shown where the test fails."""
    since = len(azure_process.stderr)
    yield azure_process
    await azure_process.forget()
    request.node.add_report_section("teardown", "azure-eventhub's stderr", azure_process.stderr[since:])


@pytest.fixture(scope="session")
def server_certificate(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key of a server on loopback, for a program that reads them from a file."""
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    issued = authority.ca.issue_cert("localhost", "127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(file))
    return file


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """A real Azurite, one for the whole run."""
    with Azurite() as server:
        yield server
