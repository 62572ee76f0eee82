"""A certificate for the local service, by an authority of its own whose key is not kept."""

from __future__ import annotations

import ipaddress
import os
import shutil
import ssl
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from eventpump.errors import ConfigurationError

AUTHORITY = "authority.pem"
SERVER = "server.pem"
LIFE = timedelta(days=397)
"""The longest that browsers and systems accept of a server."""
RENEWED = timedelta(days=30)
"""A stored certificate that ends sooner is replaced at the start."""


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """TLS with a certificate of one's own.

    Attributes:
        context: For the server.
        authority: The authority's certificate in PEM, for clients to trust.
    """

    context: ssl.SSLContext
    authority: Path
    _temporary: Path | None

    @classmethod
    def open(cls, names: Iterable[str], directory: Path | None) -> OwnCertificate:
        """Read the certificate that a directory holds, or create one.

        Args:
            names: Host names and addresses of the server.
            directory: Where it is stored, with its key, so that clients need to trust it once. None for a temporary
                directory with the authority alone.

        Raises:
            ConfigurationError: The directory cannot be used.
        """
        wanted = {_general_name(name) for name in names}
        temporary = None
        try:
            if directory is None:
                directory = temporary = Path(tempfile.mkdtemp(prefix="eventpump-emulator-"))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            server, authority = directory / SERVER, directory / AUTHORITY
            chain = _stored(server, wanted)
            if chain is None:
                _replace(server, chain := _created(wanted))
            _replace(authority, x509.load_pem_x509_certificates(chain)[1].public_bytes(Encoding.PEM))
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(server)
            if temporary is not None:
                server.unlink()
        except OSError as error:
            raise ConfigurationError("tls_directory", f"{directory} cannot be used: {error.strerror}") from None
        return cls(context, authority, temporary)

    def discard(self) -> None:
        """Remove the temporary directory, if it is in one."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError:
        raise ConfigurationError("names", f"{name[:80]!r} cannot be a name of a certificate") from None


def _replace(file: Path, content: bytes) -> None:
    """Write a file that only this user reads, unless it has this content."""
    if file.is_file() and file.read_bytes() == content:
        return
    handle, name = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
    with os.fdopen(handle, "wb") as opened:
        opened.write(content)
    Path(name).replace(file)


def _stored(server: Path, wanted: set[x509.GeneralName]) -> bytes | None:
    """Return key and chain as stored; None if there are none, or not for these names, or not for long enough."""
    if not server.is_file():
        return None
    chain = server.read_bytes()
    try:
        leaf, _ = x509.load_pem_x509_certificates(chain)
        named = set(leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (ValueError, x509.ExtensionNotFound):
        return None
    return chain if wanted <= named and leaf.not_valid_after_utc > datetime.now(UTC) + RENEWED else None


def _created(names: Iterable[x509.GeneralName]) -> bytes:
    """Return the key, the certificate, and that of its authority, in PEM."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    # A name of its own: trust stores find authorities by name, and each start of a service may add one.
    number = x509.random_serial_number()
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"eventpump emulator {number % 16**8:08x}")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "eventpump emulator")])
    authority_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())

    def signed(
        subject: x509.Name, key: ec.EllipticCurvePublicKey, *extensions: tuple[x509.ExtensionType, bool]
    ) -> bytes:
        start = datetime.now(UTC) - timedelta(hours=1)  # clocks of clients differ
        builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), start, start + LIFE)
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, is_critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(Encoding.PEM)

    leaf = signed(
        subject,
        key.public_key(),
        (x509.SubjectAlternativeName(sorted(names, key=repr)), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority_id), False),
    )
    authority = signed(
        issuer,
        authority_key.public_key(),
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_key_usage(signs_certificates=True), True),
        (authority_id, False),
    )
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + leaf + authority


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
