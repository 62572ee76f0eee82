"""Damaged bytes, and what a call makes of them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns with its type, or the type and text of its error."""
    try:
        found = call(*arguments)
    except Exception as error:
        return type(error), str(error)
    return type(found), found


def damage(random: Random, raw: bytes, reach: int) -> bytes:
    """Change, remove, insert or cut bytes of the first `reach`; return the bytes as they are a quarter of the time."""
    damaged = bytearray(raw)
    for _ in range(random.choice((0, 1, 1, 3))):
        at = random.randrange(min(len(damaged), reach) + 1)
        match random.randrange(5):
            case 0 if at < len(damaged):
                damaged[at] = random.choice((0, 1, 0x53, 0x72, 0x7F, 0x80, 0xA0, 0xB0, 0xC1, 0xD1, 0xFF))
            case 1 if at < len(damaged):
                damaged[at] ^= 1 << random.randrange(8)
            case 2:
                del damaged[at : at + random.choice((1, 1, 2, 4, 30))]
            case 3:
                damaged[at:at] = random.randbytes(random.choice((1, 2, 4)))
            case _:
                del damaged[random.randrange(len(damaged) + 1) :]
    return bytes(damaged)
