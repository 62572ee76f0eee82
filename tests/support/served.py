"""The emulator's ends of its connections, for tests that look into them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

import pytest

from eventpump.emulator.connection import ServiceConnection
from eventpump.emulator.durable import DurableStore
from eventpump.emulator.server import Emulator
from eventpump.emulator.service import Service


def service_of(emulator: Emulator) -> Service:
    """Return the service that runs in an emulator."""
    return emulator._running()


def break_disk(
    store: DurableStore | Emulator, monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None
) -> None:
    """Let the next write to disk fail.

    Args:
        before: Called in the thread that writes, before it fails.
    """
    durable = service_of(store)._durable if isinstance(store, Emulator) else store
    assert durable is not None
    commit = durable._commit

    def break_down(*_: object) -> None:
        monkeypatch.setattr(durable, "_commit", commit)
        before()
        raise sqlite3.OperationalError("disk full")

    monkeypatch.setattr(durable, "_commit", break_down)


def served_connections(emulator: Emulator | Service) -> list[ServiceConnection]:
    """Return the open connections of an emulator, or of its service."""
    service = emulator if isinstance(emulator, Service) else service_of(emulator)
    return [each for each in service.connections if isinstance(each, ServiceConnection)]
