"""A consistent hash ring: few keys change their place when a place is added or removed."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b

from eventpump.errors import ConfigurationError

MAX_VIRTUAL_NODES = 10_000


def check_virtual_nodes(value: object) -> int:
    """Return a number of virtual nodes.
    Raises `ConfigurationError` unless it is whole, from 1 to `MAX_VIRTUAL_NODES`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_VIRTUAL_NODES:
        problem = f"must be a whole number from 1 to {MAX_VIRTUAL_NODES}, and is {value!r:.40}"
        raise ConfigurationError("virtual_nodes", problem)
    return value


@lru_cache(maxsize=16384)
def ring_hash(text: str) -> int:
    """Return the position of a text on the ring: 64 bits, the same in every process and version."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@lru_cache(maxsize=4096)
def _nodes(name: str, count: int) -> tuple[int, ...]:
    """Return the positions of a place's virtual nodes. Remembered, because places come again."""
    return tuple(ring_hash.__wrapped__(f"{name}#{number}") for number in range(count))


class HashRing:
    """Assigns keys to places, each by the first virtual node at or after the key's position.

    A place that is added takes keys from the others, about its share of all, and no other key changes its place. One
    that is removed leaves its keys to the others, and no other key changes its place.

    Args:
        places: The virtual nodes of each place, by its name: the more, the more even. At least one place with one.
    """

    __slots__ = ("_count", "_names", "_points")

    def __init__(self, places: Mapping[str, int]) -> None:
        nodes = sorted((point, name) for name, count in places.items() for point in _nodes(name, count))
        if not nodes:
            raise ValueError("a ring needs a place with a virtual node")
        self._points = [point for point, _ in nodes]
        self._names = [name for _, name in nodes]
        self._count = len(places)

    def place_of(self, key: str) -> str:
        """Return the place of a key."""
        return self._names[bisect(self._points, ring_hash(key)) % len(self._names)]

    def places_of(self, key: str) -> Iterator[str]:
        """Yield the places in the order in which a key comes to them: the second has it if the first is removed."""
        names, first = self._names, bisect(self._points, ring_hash(key))
        seen: set[str] = set()
        for step in range(len(names)):
            name = names[(first + step) % len(names)]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == self._count:
                    return
