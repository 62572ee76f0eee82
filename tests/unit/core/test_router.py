"""Routing events to partitions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.router import (
    ROUTERS,
    HashRouter,
    PartitionRouter,
    RingRouter,
    RoundRobinRouter,
    StickyRouter,
    check_router,
)
from eventpump.errors import ConfigurationError
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


def test_round_robin_takes_no_heed_of_keys() -> None:
    """Each event goes to the next partition."""
    router = RoundRobinRouter()
    assert "".join(router.route(EVENT, key, "0123") for key in (None, "a", "a", "b", None, "a")) == "012301"


def test_sticky_stays_until_the_batch_ends() -> None:
    """It moves on when its own batch ends, and when the partition is gone; keys go where the service has them."""
    router = StickyRouter()
    assert [router.route(EVENT, None, "012") for _ in range(3)] == ["0"] * 3
    router.batch_ended("2")
    assert router.route(EVENT, None, "012") == "0"
    router.batch_ended("0")
    assert [router.route(EVENT, None, "012") for _ in range(3)] == ["1"] * 3
    assert router.route(EVENT, None, "0") == "0"
    assert all(
        router.route(EVENT, key, "0123456") == "0123456"[partition_for_key(key, 7)] for key in ("key0", "key4", "")
    )


@given(st.integers(1, 31), st.sampled_from([64, 128, 256]))
def test_ring_moves_about_one_key_in_n_when_a_partition_is_added(count: int, virtual_nodes: int) -> None:
    """All that move go to the new partition; of the service's hash, nearly all would move."""
    keys = [f"device-{number}" for number in range(1000)]
    before, after = [str(each) for each in range(count)], [str(each) for each in range(count + 1)]
    router = RingRouter(virtual_nodes)
    places = [router.route(EVENT, key, before) for key in keys]
    moved = [place for old, key in zip(places, keys, strict=True) if (place := router.route(EVENT, key, after)) != old]
    assert set(moved) <= {str(count)}
    assert 0.5 / (count + 1) <= len(moved) / len(keys) <= 1.7 / (count + 1)


@given(st.integers(1, 40))
def test_ring_routes_a_key_to_one_partition_in_every_process(count: int) -> None:
    """Two routers agree, whatever they have routed before; without key it is round robin."""
    ids = [str(each) for each in range(count)]
    one, other = RingRouter(), RingRouter()
    other.route(EVENT, "x", [*ids, "more"])
    for key in ("", "a", "\u00e4", "k" * 128):
        assert one.route(EVENT, key, ids) == other.route(EVENT, key, ids)
    assert Counter(one.route(EVENT, None, ids) for _ in range(2 * count)) == dict.fromkeys(ids, 2)


def test_ring_distributes_keys_evenly() -> None:
    """With the default number of virtual nodes a partition has half as many again as its share at most."""
    router = RingRouter()
    ids = [str(each) for each in range(16)]
    counts = Counter(router.route(EVENT, f"device-{number}", ids) for number in range(16_000))
    assert len(counts) == 16
    assert all(700 <= count <= 1500 for count in counts.values()), counts


def test_routers_refuse_what_cannot_be_one() -> None:
    """A class given for an object is the likely mistake."""
    for wrong in (HashRouter, object(), "hash"):
        with pytest.raises(ConfigurationError, match="must be a router"):
            check_router(wrong)  # type: ignore[arg-type]  # the point of the test
    check_router(None)
    for make in ROUTERS.values():
        check_router(make())
    with pytest.raises(ConfigurationError, match="virtual_nodes"):
        RingRouter(0)
