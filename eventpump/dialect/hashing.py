"""The gateway's partition-key hash: Jenkins lookup3 over UTF-8 (wire reference 14)."""

from __future__ import annotations

import struct
from functools import lru_cache

_MASK = 0xFFFFFFFF
_START = 0xDEADBEEF
_THREE_WORDS = struct.Struct("<3I")


@lru_cache(maxsize=16384)
def hash_key(key: str | None) -> int:
    """Hash a partition key as the service does.

    :param key: the partition key; None hashes to 0.
    :returns: a signed 16-bit number.
    """
    if key is None:
        return 0
    c, b = _hashlittle2(key.encode())
    low = (c ^ b) & 0xFFFF
    return low - 0x10000 if low & 0x8000 else low


def partition_for_key(key: str | None, count: int) -> int:
    """Find the partition the gateway routes a key to.

    :param key: the partition key.
    :param count: how many partitions the hub has, at least 1.
    :returns: the partition's index, from 0.
    """
    # The service takes the truncating remainder and drops its sign, which is not Python's floored modulo.
    return abs(hash_key(key)) % count


def _rot(value: int, by: int) -> int:
    return ((value << by) | (value >> (32 - by))) & _MASK


def _hashlittle2(data: bytes) -> tuple[int, int]:
    """Compute lookup3's `hashlittle2` with both seeds 0. :returns: (c, b)."""
    a = b = c = (_START + len(data)) & _MASK
    if not data:
        return c, b
    # Blocks of 12 bytes are mixed; the last one, full or not, is not mixed but finalised.
    last = (len(data) - 1) // 12 * 12
    for at in range(0, last, 12):
        x, y, z = _THREE_WORDS.unpack_from(data, at)
        a = (a + x) & _MASK
        b = (b + y) & _MASK
        c = (c + z) & _MASK
        a = (a - c) & _MASK ^ _rot(c, 4)
        c = (c + b) & _MASK
        b = (b - a) & _MASK ^ _rot(a, 6)
        a = (a + c) & _MASK
        c = (c - b) & _MASK ^ _rot(b, 8)
        b = (b + a) & _MASK
        a = (a - c) & _MASK ^ _rot(c, 16)
        c = (c + b) & _MASK
        b = (b - a) & _MASK ^ _rot(a, 19)
        a = (a + c) & _MASK
        c = (c - b) & _MASK ^ _rot(b, 4)
        b = (b + a) & _MASK
    x, y, z = _THREE_WORDS.unpack(data[last:].ljust(12, b"\0"))
    a = (a + x) & _MASK
    b = (b + y) & _MASK
    c = (c + z) & _MASK
    c = ((c ^ b) - _rot(b, 14)) & _MASK
    a = ((a ^ c) - _rot(c, 11)) & _MASK
    b = ((b ^ a) - _rot(a, 25)) & _MASK
    c = ((c ^ b) - _rot(b, 16)) & _MASK
    a = ((a ^ c) - _rot(c, 4)) & _MASK
    b = ((b ^ a) - _rot(a, 14)) & _MASK
    c = ((c ^ b) - _rot(b, 24)) & _MASK
    return c, b
