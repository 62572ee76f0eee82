"""The consistent hash ring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.ring import HashRing, check_virtual_nodes, ring_hash
from eventpump.errors import ConfigurationError

KEYS = [f"key-{number}" for number in range(500)]
names = st.sets(st.text(min_size=1, max_size=6), min_size=1, max_size=8)


@given(names, st.text(min_size=1, max_size=6), st.integers(1, 40))
def test_added_place_takes_keys_and_moves_no_other(places: set[str], added: str, nodes: int) -> None:
    """A key stays where it is, or goes to the new place; so also the other way round, when it is removed."""
    before = HashRing(dict.fromkeys(places, nodes))
    after = HashRing(dict.fromkeys({*places, added}, nodes))
    for key in KEYS[:100]:
        assert after.place_of(key) in (before.place_of(key), added)


@given(names, st.integers(1, 40))
def test_places_of_a_key_are_its_places_as_places_are_removed(places: set[str], nodes: int) -> None:
    """All places, each once, in the order in which the key would come to them."""
    left = set(places)
    for place in HashRing(dict.fromkeys(places, nodes)).places_of("key"):
        assert place == HashRing(dict.fromkeys(left, nodes)).place_of("key")
        left.discard(place)
    assert not left


def test_ring_is_the_same_in_every_process() -> None:
    """Keys stay where they are across versions: these positions must never change."""
    assert ring_hash("key-0") == 0x8655DB8F4C7D5137
    assert ring_hash("\ud800") > 0


def test_ring_refuses_nothing_to_choose_from() -> None:
    """No place, or no virtual node."""
    with pytest.raises(ValueError, match="needs a place"):
        HashRing({})
    for wrong in (0, -1, 10_001, 1.0, True, "8"):
        with pytest.raises(ConfigurationError, match="whole number"):
            check_virtual_nodes(wrong)
