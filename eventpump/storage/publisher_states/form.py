"""The stored form of a publisher's state, and the checks that all its stores share."""

from __future__ import annotations

import dataclasses
import json
from typing import Final

from eventpump.core.claim import PublisherIntent, PublisherState
from eventpump.errors import ConfigurationError

Key = tuple[str, str]
"""A publisher's name and a partition id."""

KIND: Final = "publisher state store"
"""What such a store is, in errors."""

MAX_NAME: Final = 256

_MAX_CLAIM: Final = 64
_LIMITS: Final = {
    "producer_id": (0, 2**63 - 1),
    "owner_level": (0, 2**15 - 1),
    "start": (-1, 2**31 - 1),
    "published": (0, 2**63 - 1),
    "tail": (-1, 2**63 - 1),
    "number": (-1, 2**31 - 1),
}
"""protocol.md 8.1; a publisher that published nothing yet may count from -1 (8.2)."""
_FLAGS: Final = ("has_published", "is_clean", "is_stamped")


def check_key(name: str, partition_id: str) -> Key:
    """Check a publisher's name and a partition id. Raises `ConfigurationError` if one of them is not valid."""
    for field, text in (("name", name), ("partition_id", partition_id)):
        if not 0 < len(text) <= MAX_NAME or not text.isprintable():
            raise ConfigurationError(field, f"must be printable text of 1 to {MAX_NAME} characters")
    return name, partition_id


def check_writable(state: PublisherState) -> PublisherState:
    """Check a state that is to be stored. Raises `ConfigurationError` if it could not be read again."""
    try:
        return decode_state(encode_state(state))
    except (ValueError, TypeError) as error:
        raise ConfigurationError("state", str(error)) from None


def encode_state(state: PublisherState) -> bytes:
    """Encode a state as a JSON object."""
    return json.dumps({"version": 2, **dataclasses.asdict(state)}).encode()


def decode_state(raw: bytes) -> PublisherState:
    """Decode a state, except unknown members. Raises `ValueError` if this version does not know it."""
    try:
        decoded = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise ValueError("the state is not JSON") from None
    if not isinstance(decoded, dict):
        raise ValueError("the state is not a JSON object")
    version = decoded.get("version")
    if version not in (1, 2) or isinstance(version, bool):
        raise ValueError("the state's version is not known to this version of eventpump, which knows 1 and 2")
    first = (_number(decoded, "producer_id"), _number(decoded, "owner_level"), _number(decoded, "start"))
    if version == 1:
        return PublisherState(*first)
    has_published, is_clean, is_stamped = (decoded.get(each) for each in _FLAGS)
    claim, intent = decoded.get("claim"), decoded.get("intent")
    if not (isinstance(has_published, bool) and isinstance(is_clean, bool) and isinstance(is_stamped, bool)):
        raise ValueError(f"one of {', '.join(_FLAGS)} is neither true nor false")
    if not isinstance(claim, str) or len(claim) > _MAX_CLAIM or not (claim.isascii() and claim.isprintable()):
        raise ValueError(f"claim is not printable ASCII text of at most {_MAX_CLAIM} characters")
    if not isinstance(intent, dict | None):
        raise ValueError("the intent is not a JSON object")
    return PublisherState(
        *first,
        published=_number(decoded, "published"),
        has_published=has_published,
        is_clean=is_clean,
        is_stamped=is_stamped,
        claim=claim,
        intent=None if intent is None else _intent(intent),
    )


def _intent(decoded: dict[str, object]) -> PublisherIntent:
    return PublisherIntent(
        _number(decoded, "owner_level"),
        tail=None if decoded.get("tail") is None else _number(decoded, "tail"),
        number=None if decoded.get("number") is None else _number(decoded, "number"),
    )


def _number(decoded: dict[str, object], field: str) -> int:
    value = decoded.get(field)
    low, high = _LIMITS[field]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{field} is not an integer from {low} to {high}")
    return value
