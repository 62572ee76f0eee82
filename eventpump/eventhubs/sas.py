"""Shared access signatures (protocol.md 3.4)."""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, unquote_plus

_PREFIX = "SharedAccessSignature"


class TokenVerdict(enum.Enum):
    """The result of checking a token. Only `VALID` is true."""

    VALID = "valid"
    BAD_SIGNATURE = "the signature does not match the key"
    EXPIRED = "the token has expired"

    def __bool__(self) -> bool:
        return self is TokenVerdict.VALID


@dataclass(frozen=True, slots=True)
class SasToken:
    """A parsed shared access signature.

    Args:
        resource: The URI it is for.
        signature: base64 text.
        signed_text: What is signed: resource and expiry exactly as they are in the token.
    """

    resource: str
    signature: str = field(repr=False)
    expires_at: int
    key_name: str
    signed_text: str = field(repr=False)


def generate(uri: str, key_name: str, key: str, expires_at: int) -> str:
    """Sign a token for a resource. The UTF-8 bytes of the key's text sign: it is not base64-decoded."""
    resource = quote(uri, safe="")
    signature = quote(_sign(f"{resource}\n{expires_at}", key), safe="")
    return f"{_PREFIX} sr={resource}&sig={signature}&se={expires_at}&skn={quote(key_name, safe='')}"


def is_signature(token: str) -> bool:
    """Return whether a token's text says that it is a shared access signature, sound or not."""
    return token.lstrip()[: len(_PREFIX) + 1].lower() == f"{_PREFIX.lower()} "


def parse(token: str) -> SasToken:
    """Parse a token; its parts may be in any order."""
    prefix, _, text = token.strip().partition(" ")
    if prefix.lower() != _PREFIX.lower():
        raise ValueError(f"a shared access signature begins with {_PREFIX!r} and a space")
    parts: dict[str, str] = {}
    for pair in text.strip().split("&"):
        name, separator, value = pair.partition("=")
        if not separator:
            continue
        if name in parts:
            raise ValueError("a part of the shared access signature appears twice")
        parts[name] = value
    for name in ("sr", "sig", "se", "skn"):
        if not parts.get(name):
            raise ValueError(f"the shared access signature has no {name!r}")
    expiry = parts["se"]
    if not (expiry.isascii() and expiry.isdigit() and len(expiry) < 16):
        raise ValueError("'se' of the shared access signature must be a number of seconds since 1970")
    return SasToken(
        resource=unquote_plus(parts["sr"]),
        # A plus sign left unescaped is base64, not a space.
        signature=unquote(parts["sig"]),
        expires_at=int(expiry),
        key_name=unquote_plus(parts["skn"]),
        # Clients differ in how they escape, so the text is signed and checked as it was sent.
        signed_text=f"{parts['sr']}\n{expiry}",
    )


def verify(token: SasToken, key: str, now: float) -> TokenVerdict:
    """Check a token's signature, in constant time, and its expiry."""
    expected = _sign(token.signed_text, key).encode()
    if not hmac.compare_digest(expected, token.signature.encode(errors="replace")):
        return TokenVerdict.BAD_SIGNATURE
    return TokenVerdict.VALID if now < token.expires_at else TokenVerdict.EXPIRED


def _sign(text: str, key: str) -> str:
    digest = hmac.digest(key.encode(), text.encode(errors="replace"), hashlib.sha256)
    return base64.b64encode(digest).decode()
