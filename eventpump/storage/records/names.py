"""The names and bodies that a `RecordStore` accepts."""

from __future__ import annotations

import functools
from typing import Final

MAX_BODY: Final = 1 << 22
"""Bytes of the largest body."""

_MAX_NAME: Final = 1024
_REFUSED: Final = frozenset("\\?#")


@functools.lru_cache(4096)
def check_name(name: str) -> str:
    """Check a record's name. Raises `ValueError` if it cannot be one."""
    is_name = 0 < len(name) <= _MAX_NAME and name.isprintable() and _REFUSED.isdisjoint(name)
    if not is_name or not all(part and not part.endswith(".") for part in name.split("/")):
        raise ValueError(f"{name!r} is not a record name")
    return name


def check_prefix(prefix: str) -> str:
    """Check the prefix of a listing. Raises `ValueError` if it does not end with "/", or no name begins with it."""
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"{prefix!r} is not a prefix of record names: it must end with /")
    if prefix:
        check_name(prefix[:-1])
    return prefix


def check_body(body: bytes) -> bytes:
    """Check a record's body. Raises `ValueError` if it is empty or too large."""
    if not 0 < len(body) <= MAX_BODY:
        raise ValueError(f"a record has 1 to {MAX_BODY} bytes, and this one {len(body)}")
    return body
