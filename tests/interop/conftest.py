"""The emulator in this process, and peers that nobody here wrote in others."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import trustme

from eventpump import Emulator
from eventpump.emulator.config import HubSpec
from eventpump.testing.azurite import Azurite
from tests.interop.peers.driver import AzurePeer

_HUBS = 200
_numbers = itertools.count()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def emulator() -> AsyncIterator[Emulator]:
    """Serve more hubs than there are tests, as the peer's clients are closed while the next test runs."""
    async with Emulator(HubSpec(f"hub-{number}", 4, ("second",)) for number in range(_HUBS)) as started:
        yield started


@pytest.fixture
def hub() -> str:
    """A hub of four partitions nobody else uses, with two consumer groups: $Default and second."""
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


@dataclass(frozen=True)
class Authority:
    """A certificate authority of the tests.

    :param file: its own certificate.
    :param server_file: certificate and key of a server on loopback.
    """

    file: Path
    server_file: Path

    @property
    def server(self) -> ssl.SSLContext:
        """The TLS settings of such a server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.server_file)
        return context


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that nobody trusts unless told to."""
    directory = tmp_path_factory.mktemp("tls")
    made, ca = Authority(directory / "ca.pem", directory / "server.pem"), trustme.CA()
    ca.cert_pem.write_to_path(str(made.file))
    ca.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(made.server_file))
    return made


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    """A real Azurite, one for the whole run."""
    with Azurite() as server:
        yield server
