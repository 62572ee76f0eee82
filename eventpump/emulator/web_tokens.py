"""JSON web tokens in the place of Microsoft Entra's: any is accepted, or those that are signed with a secret. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from eventpump.emulator.auth import Denial, TokenVerifier, VerifiedToken

ANY = "any"
"""Accepts every token, in place of a secret."""
AUDIENCES = frozenset({"https://eventhubs.azure.net", "https://servicebus.azure.net"})
"""The resources that SDKs ask Entra for a token for."""
UNSTATED_LIFE = 3600.0
"""Seconds that a token without a readable expiration time lives, where any is accepted."""
_LATEST = 1 << 36  # seconds; in the year 4147


def accepting(accepted: str, *, hosts: Collection[str] | None, now: Callable[[], float]) -> TokenVerifier:
    """Return a verifier of tokens, which refuses in the service's words.

    Args:
        accepted: "any", or the secret of the signature (HS256). Such a token must also state when it expires, and be
            for Event Hubs or a host of the service.
    """

    def verify_any(token: str) -> VerifiedToken | Denial:
        parts = token.split(".")
        expires_at = _expiry(_object(parts[1])) if len(parts) == 3 else None
        return _unless_expired(now() + UNSTATED_LIFE if expires_at is None else expires_at, now())

    def verify_signed(token: str) -> VerifiedToken | Denial:
        parts = token.split(".")
        header, claims = (_object(parts[0]), _object(parts[1])) if len(parts) == 3 else ({}, {})
        if not header or not claims:
            return Denial(401, "MalformedToken: Failed to read the token as a JSON web token.")
        made = hmac.digest(accepted.encode(), f"{parts[0]}.{parts[1]}".encode(), hashlib.sha256)
        if header.get("alg") != "HS256" or not hmac.compare_digest(made, _bytes(parts[2]) or b""):
            return Denial(401, "InvalidSignature: The token has an invalid signature.")
        expires_at = _expiry(claims)
        if expires_at is None:
            return Denial(401, "MalformedToken: The token has no expiration time.")
        named = claims.get("aud")
        if not any(_is_ours(each, hosts or ()) for each in (named if isinstance(named, list) else [named])):
            return Denial(401, "InvalidAudience: Invalid authorization token audience.")
        return _unless_expired(expires_at, now())

    return verify_any if accepted == ANY else verify_signed


def _unless_expired(expires_at: float, now: float) -> VerifiedToken | Denial:
    if expires_at > now:
        return VerifiedToken(expires_at)
    ended = datetime.fromtimestamp(int(expires_at), UTC).replace(tzinfo=None)
    return Denial(401, f"ExpiredToken: The token is expired. Expiration time: '{ended}Z'")


def _expiry(claims: dict[str, Any]) -> float | None:
    found = claims.get("exp")
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found < _LATEST:
        return None
    return float(found)


def _is_ours(audience: object, hosts: Collection[str]) -> bool:
    if not isinstance(audience, str):
        return False
    try:
        host = urlsplit(audience).hostname
    except ValueError:
        return False
    return audience.rstrip("/") in AUDIENCES or host in hosts


def _bytes(part: str) -> bytes | None:
    try:
        return base64.b64decode(part.encode() + b"=" * (-len(part) % 4), b"-_", validate=True)
    except ValueError:
        return None


def _object(part: str) -> dict[str, Any]:
    """Decode a part of a token; empty if it is not an object of JSON."""
    try:
        found = json.loads(_bytes(part) or b"")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
