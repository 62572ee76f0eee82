"""Routing events to partitions."""

from __future__ import annotations

from collections import Counter

import pytest

from eventpump.core.router import HashRouter, PartitionRouter
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import partition_for_key

EVENT = EventData(b"x")


@pytest.mark.parametrize(("key", "index"), [("key0", 2), ("key1", 3), ("key2", 0), ("key3", 0), ("key4", 3), ("", 0)])
def test_route_of_a_key_is_the_services_hash(key: str, index: int) -> None:
    """The vectors of protocol.md 14; ids are taken in the service's order, whatever they are called."""
    router: PartitionRouter = HashRouter(partition_for_key)
    ids = [f"p{9 - each}" for each in range(7)]
    router.route(EVENT, None, ids)
    assert router.route(EVENT, key, ids) == ids[index]


def test_route_without_a_key_is_round_robin() -> None:
    """Each partition gets its turn, whatever keyed events come between."""
    router = HashRouter(partition_for_key)
    chosen = []
    for _ in range(8):
        chosen.append(router.route(EVENT, None, "0123"))
        router.route(EVENT, "key", "0123")
    assert "".join(chosen) == "01230123"


def test_route_round_robin_uses_added_partitions() -> None:
    """A hub that grew is used whole; one that is listed shorter is no error."""
    router = HashRouter(partition_for_key)
    for _ in range(3):
        router.route(EVENT, None, "0123")
    assert Counter(router.route(EVENT, None, "012345") for _ in range(12)) == Counter("012345" * 2)
    assert router.route(EVENT, None, "0") == "0"
