"""The ways a test's client can go to the service: over the native transport, or over uamqp."""

from __future__ import annotations

import importlib.util
import ssl
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from eventpump.emulator.faults import Faults
from eventpump.emulator.server import Emulator
from eventpump.eventhubs.events import ReceivedEvent
from tests.authority import Authority
from tests.support.reading import read_partition

WAYS = ("native", "uamqp")


def need_uamqp() -> None:
    """Skip the running test, or the module that is imported, with the reason, where there is no uamqp."""
    if importlib.util.find_spec("uamqp") is None:
        version = ".".join(map(str, sys.version_info[:2]))
        reason = f"uamqp is not installed; for Python {version} there may be no build of it"
        pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class Way:
    """A transport.

    Attributes:
        tls: What the service has to serve with; uamqp speaks TLS only.
        options: Keyword arguments of whatever connects.
    """

    name: str
    tls: ssl.SSLContext | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, authority: Authority) -> Way:
        """Return the configuration for a service on this machine."""
        if name == "native":
            return cls(name)
        need_uamqp()
        options = {"transport": name, "ca_file": str(authority.file)}
        return cls(name, authority.server("127.0.0.1"), options)


def over_both(*, is_long: bool = False) -> pytest.MarkDecorator:
    """Run tests that use the fixture `way` over both transports.

    Args:
        is_long: Over uamqp in the long form only: what is tested is above the transport.
    """
    return pytest.mark.over_both(is_long=is_long)


def ways_of(mark: pytest.Mark | None, *, is_long: bool) -> tuple[str, ...]:
    """Say which ways a test with such a mark goes."""
    if mark is None or (mark.kwargs["is_long"] and not is_long):
        return WAYS[:1]
    return WAYS


@dataclass(frozen=True)
class Served:
    """An emulator, and how to reach it.

    Attributes:
        options: Keyword arguments of whatever connects.
    """

    emulator: Emulator
    options: Mapping[str, Any]

    @property
    def connection_string(self) -> str:
        """Where it is."""
        return self.emulator.connection_string

    async def read(self, hub: str, partition_id: str) -> list[ReceivedEvent]:
        """Read what a partition holds now."""
        return await read_partition(self.connection_string, hub, partition_id, **self.options)

    @property
    def faults(self) -> Faults:
        """What it does wrong."""
        return self.emulator.faults
