"""The local service's own certificate: for its names, kept where asked, by an authority that signs no other."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from eventpump.emulator import certificates
from eventpump.emulator.certificates import OwnCertificate
from eventpump.errors import ConfigurationError

NAMES = {"localhost", "127.0.0.1", "::1", "emulator"}


def handshake(own: OwnCertificate, name: str) -> None:
    """Do a TLS handshake in memory with a client that trusts the authority, and checks all that OpenSSL can check."""
    trusting = ssl.create_default_context(cafile=str(own.authority))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    buffers = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(buffers[0], buffers[1], server_hostname=name)
    server = own.context.wrap_bio(buffers[1], buffers[0], server_side=True)
    is_done = {client: False, server: False}
    while not all(is_done.values()):
        for side in is_done:
            try:
                side.do_handshake()
                is_done[side] = True
            except ssl.SSLWantReadError:
                pass


def test_certificate_is_trusted_for_its_names_alone(tmp_path: Path) -> None:
    """Clients that trust the authority's file accept each name, by the strict rules too, and no other."""
    own = OwnCertificate.open(NAMES, tmp_path / "tls")
    for name in NAMES:
        handshake(own, name)
    with pytest.raises(ssl.SSLCertVerificationError, match="elsewhere"):
        handshake(own, "elsewhere")


def test_certificate_in_a_directory_is_kept_until_names_or_time_require_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same authority over starts; another one for another name, or where the certificate ends soon."""
    authority = OwnCertificate.open(NAMES, tmp_path).authority
    first = authority.read_bytes()
    assert OwnCertificate.open({"localhost"}, tmp_path).authority.read_bytes() == first
    authority.unlink()
    assert OwnCertificate.open(NAMES, tmp_path).authority.read_bytes() == first
    second = OwnCertificate.open({*NAMES, "another"}, tmp_path).authority.read_bytes()
    assert second != first
    monkeypatch.setattr(certificates, "RENEWED", certificates.LIFE)
    assert OwnCertificate.open(NAMES, tmp_path).authority.read_bytes() != second


def test_key_of_the_authority_is_nowhere(tmp_path: Path) -> None:
    """The only key stored is that of the server, which only its user reads: nothing else can be signed."""
    OwnCertificate.open(NAMES, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"authority.pem", "server.pem"}
    stored = (tmp_path / "server.pem").read_bytes()
    leaf, authority = x509.load_pem_x509_certificates(stored)
    assert stored.count(b"PRIVATE KEY") == 2  # one key's begin and end
    assert load_pem_private_key(stored, None).public_key() == leaf.public_key()
    assert b"PRIVATE" not in (tmp_path / "authority.pem").read_bytes()
    assert leaf.issuer == authority.subject
    assert (tmp_path / "server.pem").stat().st_mode & 0o777 == 0o600


def test_temporary_certificate_leaves_no_key_and_no_directory() -> None:
    """Without a directory the authority's certificate alone is on disk, until the service stops."""
    own = OwnCertificate.open(NAMES, None)
    assert [file.name for file in own.authority.parent.iterdir()] == ["authority.pem"]
    handshake(own, "localhost")
    own.discard()
    assert not own.authority.parent.exists()


def test_damaged_certificate_is_replaced_and_an_unusable_directory_is_a_clear_error(tmp_path: Path) -> None:
    """A file that is not ours to read as a certificate is written anew; a directory that cannot be is named."""
    (tmp_path / "server.pem").write_bytes(b"not a certificate")
    handshake(OwnCertificate.open(NAMES, tmp_path), "localhost")
    with pytest.raises(ConfigurationError, match=r"tls_directory: .*server\.pem cannot be used"):
        OwnCertificate.open(NAMES, tmp_path / "server.pem")
    with pytest.raises(ConfigurationError, match="names: 'é' cannot be a name"):
        OwnCertificate.open({"é"}, tmp_path)
