from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.errors import ConfigurationError
from eventpump.eventhubs import hashing
from eventpump.eventhubs.hashing import KeyHash, check_key_length, hash_key, partition_for_key

VECTORS = {
    "": 0,
    "a": -16220,
    "7": -15263,
    "131": 30562,
    "key1": 2075,
    "key0": -8570,
    "alphabet": -23478,
    "é": -24812,
}


@pytest.mark.parametrize(("key", "expected"), VECTORS.items())
def test_hash_of_the_reference_vectors(key: str, expected: int) -> None:
    """The hash is the service's, on the vectors of the official clients."""
    assert hash_key(key) == expected


def test_hash_of_more_than_one_block() -> None:
    """Keys longer than 12 bytes hash as in the vector published with lookup3: c 17770551, b ce7226e6."""
    low = (0x17770551 ^ 0xCE7226E6) & 0xFFFF
    assert hash_key("Four score and seven years ago") == (low - 0x10000 if low >= 0x8000 else low)


def test_hash_of_whole_blocks() -> None:
    """Keys of exactly one and two blocks hash as the official Python client hashes them."""
    assert hash_key("abcdefghijkl") == -2373
    assert hash_key("abcdefghijklmnopqrstuvwx") == 26788


@pytest.mark.parametrize(("key", "index"), [("key0", 2), ("key1", 3), ("key2", 0), ("key3", 0), ("key4", 3)])
def test_partition_of_a_negative_hash_truncates(key: str, index: int) -> None:
    """The remainder truncates: a negative hash goes where the service sends it."""
    assert partition_for_key(key, 7) == index


def test_hash_of_no_key_is_zero() -> None:
    """An absent key hashes to 0."""
    assert hash_key(None) == 0
    assert partition_for_key(None, 5) == 0


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 1024))
def test_hash_and_partition_are_in_range(key: str, count: int) -> None:
    """Every key has a 16-bit hash and a partition that exists."""
    assert -(2**15) <= hash_key(key) < 2**15
    assert 0 <= partition_for_key(key, count) < count


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=400), st.integers(1, 200))
def test_hash_in_steps_equals_hash_at_once(key: str, step: int) -> None:
    """A key hashed in steps of any size has the hash of the key hashed at once."""
    hashing = KeyHash(key)
    while not hashing.advance(step):
        pass
    assert hashing.value == hash_key(key)


def test_hash_cache_leaves_out_long_keys() -> None:
    """What is remembered of keys is bounded in bytes: keys that are too long to be sent are not kept."""
    remembered = hashing._remembered
    before = remembered.cache_info()
    for size in (129, 5000):
        hash_key("k" * size)
        partition_for_key("k" * size, 4)
    assert remembered.cache_info() == before
    hash_key("k" * 128)
    assert remembered.cache_info() != before


def test_hash_of_the_longest_key() -> None:
    """A key may have 128 characters, whatever they take in UTF-8."""
    for key in (None, "", "k" * 128, "\U0001f600" * 128):
        check_key_length(key)
    with pytest.raises(ConfigurationError, match="partition_key: it has 129 characters"):
        check_key_length("k" * 129)
