"""A certificate authority for servers on this machine."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme


@dataclass(frozen=True)
class Authority:
    """A certificate authority that is trusted only if configured, and the path of its own certificate."""

    ca: trustme.CA
    file: Path

    @classmethod
    def new(cls, directory: Path) -> Authority:
        """Make one, and put its certificate into a directory."""
        ca = trustme.CA()
        file = directory / "ca.pem"
        ca.cert_pem.write_to_path(str(file))
        return cls(ca, file)

    def server(self, *names: str, **options: Any) -> ssl.SSLContext:
        """Make the TLS settings of a server with a certificate for these names."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(*names, **options).configure_cert(context)
        return context
