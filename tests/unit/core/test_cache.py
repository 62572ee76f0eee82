"""The event cache and its cursors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eventpump.core.cache import Cursor, EventCache


def _messages(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


class Item:
    """What a cursor reads of a message."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


def _items(raw: list[bytes]) -> list[Item]:
    return [Item(each) for each in raw]


def _plain() -> EventCache[bytes]:
    return EventCache(lambda raw: raw)


def _append(cache: EventCache[Any], batch: list[bytes]) -> None:
    cache.append(batch, sum(map(len, batch)))


class CacheAgainstModel(RuleBasedStateMachine):
    """The cache behaves like one endless list of which every cursor reads on from its place."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EventCache(_items)
        self.everything: list[bytes] = []
        self.dropped = 0
        self.cursors: dict[int, tuple[Cursor[Item], int]] = {}
        self.made = 0
        self.seen: dict[int, set[Item]] = {}

    @rule(lengths=st.lists(st.integers(0, 9), max_size=400))
    def append(self, lengths: list[int]) -> None:
        batch = [b"x" * length for length in lengths]
        self.everything += [bytes(each) for each in batch]
        _append(self.cache, batch)

    @precondition(lambda self: len(self.cursors) < 4)
    @rule()
    def add_cursor(self) -> None:
        self.cursors[self.made] = (self.cache.cursor(), self.dropped)
        self.made += 1

    @precondition(lambda self: len(self.cursors) < 4)
    @rule()
    def add_cursor_at_the_end(self) -> None:
        self.cursors[self.made] = (self.cache.cursor(at_end=True), len(self.everything))
        self.made += 1
        self._drop_passed()

    @precondition(lambda self: self.cursors)
    @rule(data=st.data(), limit=st.integers(1, 120))
    def read(self, data: st.DataObject, limit: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.cursors)))
        cursor, place = self.cursors[key]
        expected = self.everything[place : place + limit]
        assert cursor.available == len(self.everything) - place
        found = cursor.read(limit)
        assert [item.raw for item in found] == expected
        if len(self.cursors) > 1:
            self._remember(place, found)
        self.cursors[key] = (cursor, place + len(expected))
        self._drop_passed()

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def close_cursor(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.cursors)))
        cursor, _ = self.cursors.pop(key)
        cursor.close()
        cursor.close()
        assert not cursor.read(5)
        assert cursor.held == (0, 0)
        self._drop_passed()

    def _remember(self, place: int, found: Sequence[Item]) -> None:
        """Check that every cursor gets the same item of a message, while there are several."""
        for position, item in enumerate(found, place):
            assert self.seen.setdefault(position, {item}) == {item}

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.dropped = len(self.everything)
        self.cursors = {key: (cursor, self.dropped) for key, (cursor, _) in self.cursors.items()}

    def _drop_passed(self) -> None:
        if self.cursors:
            self.dropped = min(place for _, place in self.cursors.values())

    @invariant()
    def what_everybody_passed_is_purged_and_nothing_else(self) -> None:
        held = self.everything[self.dropped :]
        assert self.cache.count == len(held)
        assert self.cache.size == sum(map(len, held))
        assert self.cache.end == len(self.everything)
        assert self.cache.oldest == (held[0] if held else None)
        assert self.cache.start == (self.dropped if self.cursors else self.cache.start)

    @invariant()
    def a_cursor_holds_what_it_alone_has_not_read(self) -> None:
        for key, (cursor, place) in self.cursors.items():
            others = [each for other, (_, each) in self.cursors.items() if other != key]
            alone = self.everything[place : max(place, min(others, default=len(self.everything)))]
            assert cursor.held == (len(alone), sum(map(len, alone)))


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(stateful_step_count=30)


def test_read_of_a_whole_batch_returns_the_very_list() -> None:
    """A sole subscriber that takes a whole large batch gets the very list that came in."""
    cache = _plain()
    cursor = cache.cursor()
    batch = [b"m"] * 200
    _append(cache, batch)
    assert cursor.read(300) is batch


def test_read_takes_a_limit_of_any_size() -> None:
    """One that 64 bits do not hold is no limit; a negative one reads nothing."""
    cache = _plain()
    cursor = cache.cursor()
    _append(cache, _messages("a", "b"))
    assert not cursor.read(-(2**70))
    assert list(cursor.read(2**70)) == _messages("a", "b")
    other = cache.cursor()
    _append(cache, _messages("c"))
    assert list(cursor.read(2**70)) == list(other.read(2**70)) == _messages("c")


def test_read_joins_batches_up_to_its_limit() -> None:
    """One read joins small batches up to its limit, in order."""
    cache = _plain()
    cursor = cache.cursor()
    _append(cache, _messages("a"))
    _append(cache, _messages("b", "c"))
    assert cursor.read(2) == _messages("a", "b")
    assert cursor.read(9) == _messages("c")
    assert not cursor.read(9)


def test_subscribers_that_keep_pace_get_the_same_tuple() -> None:
    """What several subscribers read as it came is copied for none of them."""
    cache = _plain()
    cursors = [cache.cursor() for _ in range(3)]
    _append(cache, _messages("a", "b"))
    first, *others = (cursor.read(9) for cursor in cursors)
    assert first == tuple(_messages("a", "b"))
    assert all(each is first for each in others)


def test_what_all_subscribers_have_read_is_not_kept() -> None:
    """Once the last subscriber has read, or the others have left, the cache keeps no item of what was read last."""
    cache: EventCache[Item] = EventCache(lambda raws: [Item(raw) for raw in raws])
    first, second = cache.cursor(), cache.cursor()
    _append(cache, _messages("a"))
    kept = [weakref.ref(cursor.read(9)[0]) for cursor in (first, second)]
    _append(cache, _messages("b", "c"))
    kept.append(weakref.ref(first.read(9)[0]))
    second.close()
    first.settle()
    gc.collect()
    assert [each() for each in kept] == [None, None, None]


def test_settle_processes_only_where_nothing_is_to_be_read() -> None:
    """What was read stays in hand while more is there, and `settle` returns whether it was processed."""
    cache = _plain()
    cursor = cache.cursor()
    _append(cache, _messages("a"))
    cursor.read(9)
    _append(cache, _messages("b"))
    assert (cursor.settle(), cursor.has_in_hand) == (False, True)
    cursor.read(9)
    assert (cursor.settle(), cursor.has_in_hand, cache.in_hand) == (True, False, 0)


def test_read_of_a_slow_subscriber_returns_what_the_other_has_passed() -> None:
    """What one of two subscribers has passed stays until the other has too."""
    cache = _plain()
    slow, fast = cache.cursor(), cache.cursor()
    _append(cache, _messages("a", "b"))
    assert fast.read(9) == tuple(_messages("a", "b"))
    assert cache.count == 2
    assert slow.read(1) == tuple(_messages("a"))
    assert cache.count == 1
    slow.close()
    assert cache.count == 0
