"""The cache of the last ranges."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from eventpump.spark.connection import SparkConnection
from eventpump.spark.source.offsets import SequenceRange
from eventpump.spark.source.rangecache import RangeCache, RangeKey
from eventpump.spark.source.rows import PackedEvents
from tests.support.connecting import connection_string_to

_CONNECTION = SparkConnection(
    hub="telemetry",
    connection_string=SecretStr(connection_string_to("localhost")),
)


def _key(start: int, end: int, partition: str = "0") -> RangeKey:
    return RangeKey(_CONNECTION, SequenceRange(partition, start, end))


def _piece(fill: int, size: int = 1000, count: int = 10) -> PackedEvents:
    return PackedEvents.pack([bytes([fill]) * (size // count)] * count)


def _same(found: list[PackedEvents], expected: list[PackedEvents]) -> bool:
    return [(bytes(each.data), each.lengths.tolist()) for each in found] == [
        (each.data, each.lengths.tolist()) for each in expected
    ]


def _record(cache: RangeCache, key: RangeKey, pieces: list[PackedEvents], *, memory: int, disk: int) -> None:
    recording = cache.record(key, memory=memory, disk=disk)
    for piece in pieces:
        recording.add(piece)
    recording.complete()


def test_find_returns_a_range_once_it_is_complete() -> None:
    """A range is served as it was recorded, and not before all of it was."""
    cache = RangeCache()
    recording = cache.record(_key(0, 20), memory=10**6, disk=0)
    recording.add(_piece(1))
    assert cache.find(_key(0, 20)) is None
    recording.add(_piece(2))
    recording.complete()
    found = cache.find(_key(0, 20))
    assert found is not None
    assert _same(list(found), [_piece(1), _piece(2)])
    assert cache.find(_key(0, 19)) is None
    assert cache.find(_key(0, 20, "1")) is None


def test_abandoned_recording_leaves_nothing() -> None:
    """What was received in part is not served, and takes no room."""
    cache = RangeCache()
    recording = cache.record(_key(0, 20), memory=10**6, disk=0)
    recording.add(_piece(1))
    recording.abandon()
    recording.abandon()
    assert (cache.find(_key(0, 20)), cache.in_memory, cache.on_disk) == (None, 0, 0)


def test_range_beyond_memory_is_kept_on_disk() -> None:
    """Ranges beyond the room in memory are served from disk, whole and in order."""
    cache = RangeCache()
    ranges = {_key(0, 10, str(number)): [_piece(number), _piece(number + 100)] for number in range(6)}
    for key, pieces in ranges.items():
        _record(cache, key, pieces, memory=4000, disk=10**6)
    assert 0 < cache.in_memory <= 4000
    assert cache.on_disk > 0
    for key, pieces in ranges.items():
        found = cache.find(key)
        assert found is not None
        assert _same(list(found), pieces)


def test_range_larger_than_memory_is_kept_in_parts() -> None:
    """One range may exceed the room in memory; one that exceeds both is not kept."""
    cache = RangeCache()
    pieces = [_piece(number) for number in range(9)]
    _record(cache, _key(0, 10), pieces, memory=3000, disk=20_000)
    found = cache.find(_key(0, 10))
    assert found is not None
    assert _same(list(found), pieces)
    _record(cache, _key(0, 10, "1"), pieces, memory=3000, disk=4000)
    assert cache.find(_key(0, 10, "1")) is None


def test_recording_a_later_range_drops_earlier_ones() -> None:
    """Recording a later range of a partition drops its earlier ones, and no others."""
    cache = RangeCache()
    for key in (_key(0, 10), _key(5, 10), _key(0, 10, "1")):
        _record(cache, key, [_piece(1)], memory=10**6, disk=0)
    _record(cache, _key(10, 20), [_piece(2)], memory=10**6, disk=0)
    held = [key for key in (_key(0, 10), _key(5, 10), _key(0, 10, "1"), _key(10, 20)) if cache.find(key) is not None]
    assert held == [_key(0, 10, "1"), _key(10, 20)]


def test_reading_that_began_outlives_its_range() -> None:
    """A reading that was begun ends with all of the range, though its range is dropped meanwhile."""
    cache = RangeCache()
    pieces = [_piece(number) for number in range(5)]
    _record(cache, _key(0, 10), pieces, memory=1, disk=10**6)
    found = cache.find(_key(0, 10))
    assert found is not None
    first = next(found)
    _record(cache, _key(10, 20), [_piece(9)], memory=1, disk=10**6)
    assert cache.find(_key(0, 10)) is None
    assert _same([first, *found], pieces)


def test_full_disk_disables_only_the_disk_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no file can be written, ranges beyond memory are not kept, and nothing fails."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    cache = RangeCache()
    _record(cache, _key(0, 10), [_piece(1)], memory=3000, disk=10**6)
    _record(cache, _key(0, 10, "1"), [_piece(2), _piece(3)], memory=3000, disk=10**6)
    assert cache.find(_key(0, 10)) is None
    found = cache.find(_key(0, 10, "1"))
    assert found is not None
    assert _same(list(found), [_piece(2), _piece(3)])


@given(
    steps=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.booleans()), max_size=40),
    memory=st.integers(1, 6000),
    disk=st.integers(0, 9000),
)
def test_cache_keeps_its_bounds_in_any_history(steps: list[tuple[str, int, bool]], memory: int, disk: int) -> None:
    """Whatever is recorded, to its end or not: both bounds hold after every step, and what is found is what came."""
    cache = RangeCache()
    truth: dict[RangeKey, list[PackedEvents]] = {}
    for number, (partition, count, is_completed) in enumerate(steps):
        key = _key(number % 3, 3, partition)
        pieces = truth.setdefault(key, [_piece(number % 256, size=500 + 200 * index) for index in range(count)])
        recording = cache.record(key, memory=memory, disk=disk)
        for piece in pieces:
            recording.add(piece)
            assert cache.in_memory <= memory
            assert cache.on_disk <= disk
        if is_completed:
            recording.complete()
        else:
            recording.abandon()
        for each, expected in truth.items():
            found = cache.find(each)
            assert found is None or _same(list(found), expected)
