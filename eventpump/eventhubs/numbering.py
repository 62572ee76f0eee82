"""The arithmetic of published sequence numbers, producer ids and owner levels (protocol.md 8)."""

from __future__ import annotations

NUMBERS = 2**31
"""How many sequence numbers there are: after 2147483647 comes 0 (protocol.md 8.4)."""
MAX_PRODUCER_ID = 2**63 - 1
MAX_OWNER_LEVEL = 2**15 - 1


def advance(number: int, by: int = 1) -> int:
    """Return the number `by` places (at least 1) after another; -1, for nothing, lies before 0."""
    return (number + by) % NUMBERS


def distance(start: int, end: int) -> int:
    """Count the numbers from one (exclusive) to another (inclusive), across the wrap."""
    return (end - start) % NUMBERS
