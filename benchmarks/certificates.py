"""Certificates for services on this machine. In a module of its own, so that no side imports what makes them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files in PEM: a certificate's chain, its private key, and the authority to trust."""

    chain: str
    key: str
    authority: str


@contextmanager
def certificate() -> Iterator[Certificate]:
    """Create a certificate for this machine; its files are gone afterwards."""
    authority = trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        chain, key, trusted = (str(Path(folder, f"{name}.pem")) for name in ("chain", "key", "authority"))
        made.cert_chain_pems[0].write_to_path(chain)
        made.private_key_pem.write_to_path(key)
        authority.cert_pem.write_to_path(trusted)
        yield Certificate(chain, key, trusted)
