"""The emulator's ends of its connections, for tests that look into them."""

from __future__ import annotations

from eventpump.emulator.connection import ServiceConnection
from eventpump.emulator.server import Emulator
from eventpump.emulator.service import Service


def served_connections(emulator: Emulator | Service) -> list[ServiceConnection]:
    """Return the open connections of an emulator, or of its service."""
    service = emulator if isinstance(emulator, Service) else emulator._running()
    return [each for each in service.connections if isinstance(each, ServiceConnection)]
