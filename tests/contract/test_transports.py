"""The contract of transports, over every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("eventpump.testing.conformance.transport")

from eventpump.clients.connection import make_transport  # noqa: E402 - after the registration
from eventpump.emulator.faults import Hold, LinkRole, Performative  # noqa: E402
from eventpump.emulator.server import Emulator  # noqa: E402
from eventpump.options.connection import connection_settings  # noqa: E402
from eventpump.testing.conformance.transport import HUB, TransportContract, TransportHarness  # noqa: E402
from eventpump.testing.transport import FakeHub, FakeTransport  # noqa: E402
from eventpump.transport.native import NativeTransport  # noqa: E402
from tests.authority import Authority  # noqa: E402
from tests.ways import need_uamqp  # noqa: E402

if TYPE_CHECKING:
    from eventpump.interfaces import Transport
    from eventpump.transport.uamqp.transport import UamqpTransport

    def _are_ports(native: NativeTransport, uamqp: UamqpTransport, fake: FakeTransport) -> list[Transport]:
        return [native, uamqp, fake]


class EmulatorHarness:
    """Transports to one emulator."""

    def __init__(self, emulator: Emulator, make: Callable[[], Transport], *, can_probe: bool = True) -> None:
        self.emulator = emulator
        self.can_probe = can_probe
        self.transports: list[Transport] = []
        self._make = make

    def new_transport(self) -> Transport:
        transport = self._make()
        self.transports.append(transport)
        return transport

    async def aclose(self) -> None:
        self.emulator.faults.clear()
        for transport in self.transports:
            await transport.aclose()

    def hold(self, operation: str) -> Callable[[], None]:
        if operation == "delivery":
            return self.emulator.faults.add(Hold(answers_echo=False), role=LinkRole.CONSUMER, count=None).remove
        on = Performative.TRANSFER if operation == "transfer" else Performative.ATTACH
        role = LinkRole.CONSUMER if operation == "receive" else LinkRole.PRODUCER
        return self.emulator.faults.add(Hold(), on=on, role=role, count=None).remove

    def lose_connections(self) -> None:
        self.emulator.drop_connections()


class FakeHarness:
    """Transports in memory to one hub."""

    can_probe = True

    def __init__(self) -> None:
        self.fake_hub = FakeHub(HUB, 4)

    def new_transport(self) -> FakeTransport:
        return FakeTransport(self.fake_hub)

    def hold(self, operation: str) -> Callable[[], None]:
        if operation == "delivery":
            self.fake_hub.stall()
            return self.fake_hub.resume
        self.fake_hub.hang(operation)
        return lambda: self.fake_hub.answer(operation)

    def lose_connections(self) -> None:
        self.fake_hub.lose_connections()


class TestNativeTransport(TransportContract):
    """On sockets, to the emulator."""

    @pytest.fixture
    async def harness(self) -> AsyncIterator[TransportHarness]:
        async with Emulator({HUB: 4}) as emulator:
            settings = connection_settings(emulator.connection_string, HUB)
            harness = EmulatorHarness(emulator, lambda: NativeTransport(settings))
            yield harness
            await harness.aclose()


class TestWebSocketTransport(TransportContract):
    """The native transport in WebSockets, to the emulator."""

    @pytest.fixture
    async def harness(self) -> AsyncIterator[TransportHarness]:
        async with Emulator({HUB: 4}, ws_port=0) as emulator:
            settings = connection_settings(emulator.ws_connection_string, HUB, transport_type="websocket")
            harness = EmulatorHarness(emulator, lambda: NativeTransport(settings))
            yield harness
            await harness.aclose()


class TestUamqpTransport(TransportContract):
    """On TLS, which is all that uamqp speaks, to the emulator."""

    @pytest.fixture
    async def harness(self, authority: Authority) -> AsyncIterator[TransportHarness]:
        need_uamqp()
        async with Emulator({HUB: 4}, tls=authority.server("127.0.0.1")) as emulator:
            settings = connection_settings(emulator.connection_string, HUB, ca_file=authority.file, transport="uamqp")
            harness = EmulatorHarness(emulator, lambda: make_transport(settings), can_probe=False)
            yield harness
            await harness.aclose()


class TestFakeTransport(TransportContract):
    """In memory."""

    @pytest.fixture
    def harness(self) -> TransportHarness:
        return FakeHarness()
