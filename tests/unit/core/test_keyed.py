"""The queue of keyed events: order per key, bounds, and the watermark, whatever is finished when."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eventpump.core.keyed import KeyedBounds, KeyedEntry, KeyedQueue


class _Event:
    def __init__(self, number: int) -> None:
        self.sequence_number = number
        self.offset = f"at-{number}"


def _add(queue: KeyedQueue[_Event], number: int, key: object, size: int = 1) -> KeyedEntry[_Event]:
    """Add one event. Return its entry."""
    assert queue.accept([_Event(number)], [size], lambda _: key) == []
    return queue.newest


class QueueAgainstModel(RuleBasedStateMachine):
    """Events are added and taken, and finished in any order: per key in order, one batch at a time, within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = KeyedBounds(events=5, size=60, ahead=6, batch=2)
        self.queue: KeyedQueue[_Event] = KeyedQueue(self.bounds)
        self.keys: list[Hashable] = []
        self.sizes: list[int] = []
        self.waiting: list[int] = []
        self.running: list[list[KeyedEntry[_Event]]] = []
        self.finished: set[int] = set()

    def _numbers(self) -> set[int]:
        return set(range(len(self.keys))) - self.finished

    @rule(key=st.one_of(st.none(), st.integers(0, 2)), size=st.integers(1, 50))
    def add(self, key: int | None, size: int) -> None:
        open_ = self._numbers()
        end = next(each for each in range(len(self.keys) + 1) if each not in self.finished)
        total = sum(self.sizes[each] for each in open_)
        bounds = self.bounds
        fits = len(open_) < bounds.events and total + size <= bounds.size and len(self.keys) - end < bounds.ahead
        has_room = self.queue.room > 0 and self.queue.fitting([size]) == [size]
        assert has_room == (not open_ or fits)
        if has_room:
            number = len(self.keys)
            _add(self.queue, number, key, size)
            self.keys.append(key)
            self.sizes.append(size)
            self.waiting.append(number)

    def _ready(self) -> set[Hashable]:
        busy = {self.keys[each.position.sequence_number] for batch in self.running for each in batch if each.position}
        return {("alone", each) if self.keys[each] is None else self.keys[each] for each in self.waiting} - busy

    @precondition(lambda self: self.queue.ready)
    @rule()
    def take(self) -> None:
        batch = self.queue.take()
        numbers = [each.position.sequence_number for each in batch if each.position]
        key = self.keys[numbers[0]]
        of_key = numbers[:1] if key is None else [each for each in self.waiting if self.keys[each] == key]
        assert numbers == of_key[: self.bounds.batch]
        assert key is None or all(each.key != key for other in self.running for each in other)
        self.running.append(batch)
        self.waiting = [each for each in self.waiting if each not in numbers]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.finished |= {entry.event.sequence_number for entry in batch}
        if len(batch) == 1 and data.draw(st.booleans()):
            self.queue.finish_alone(batch[0])
            return
        for entry in batch:
            self.queue.finish(entry)
        self.queue.release(batch[-1])

    @invariant()
    def every_key_that_waits_and_is_not_busy_is_ready(self) -> None:
        assert len(self.queue.ready) == len(self._ready())

    @invariant()
    def counts_agree(self) -> None:
        open_ = self._numbers()
        assert self.queue.events == len(open_)
        assert self.queue.size == sum(self.sizes[each] for each in open_)

    @invariant()
    def watermark_is_the_end_of_what_is_finished(self) -> None:
        end = next(each for each in range(len(self.keys) + 1) if each not in self.finished)
        watermark = self.queue.watermark
        watermark.advance()
        assert watermark.count == end
        assert (watermark.position is None) == (end == 0)
        assert watermark.position is None or watermark.position.sequence_number == end - 1


TestQueueAgainstModel: Any = QueueAgainstModel.TestCase
TestQueueAgainstModel.settings = settings(stateful_step_count=50)


def _queue(**bounds: int) -> KeyedQueue[_Event]:
    return KeyedQueue(KeyedBounds(**{"events": 100, "size": 10_000, "ahead": 100, "batch": 1, **bounds}))


def test_keys_take_turns() -> None:
    """A key with many events does not keep another one waiting."""
    queue = _queue()
    for number in range(6):
        _add(queue, number, "busy" if number < 5 else "other")
    taken = []
    while queue.ready:
        (entry,) = queue.take()
        taken.append(entry.key)
        queue.finish(entry)
        queue.release(entry)
    assert taken == ["busy", "other", "busy", "busy", "busy", "busy"]


class _Moody:
    """A key that is not equal to itself for long, and cannot be hashed at times."""

    def __init__(self) -> None:
        self.is_hashable = True

    def __hash__(self) -> int:
        if not self.is_hashable:
            raise RuntimeError("not now")
        return 1


def test_events_whose_keys_are_not_known_are_independent_of_all_others() -> None:
    """What the function raised, or its result when it was hashed, is returned; all others are as they would be."""
    queue = _queue()

    def key_of(event: _Event) -> object:
        if event.sequence_number == 1:
            raise ValueError("no key")
        return [] if event.sequence_number == 2 else "key"

    unkeyed = queue.accept([_Event(number) for number in range(5)], [1, 2, 3, 4, 5], key_of)
    assert [(entry.event.sequence_number, type(error)) for entry, error in unkeyed] == [(1, ValueError), (2, TypeError)]
    assert [entry.event.sequence_number for entry in queue.ready] == [0, 1, 2]
    assert (queue.events, queue.size) == (5, 15)


def test_sizes_that_fit() -> None:
    """As many as there is room for; a single larger one if nothing is in hand, and no other beside it."""
    queue = _queue(size=10)
    assert queue.fitting([3, 3, 3]) == [3, 3, 3]
    assert queue.fitting([3, 3, 3, 3]) == [3, 3, 3]
    assert queue.fitting([11, 1]) == [11]
    assert queue.has_room
    _add(queue, 0, "key", 10)
    assert queue.fitting([1]) == []
    assert not queue.has_room


def test_a_key_that_changes_pins_nothing() -> None:
    """A key that cannot be found again when its event is finished keeps no later event waiting."""
    queue, key = _queue(), _Moody()
    _add(queue, 0, key)
    (entry,) = queue.take()
    key.is_hashable = False
    queue.finish(entry)
    queue.release(entry)
    key.is_hashable = True
    _add(queue, 1, key)
    assert len(queue.ready) == 1


def test_an_entry_that_is_to_be_alone_is_in_no_batch() -> None:
    """Those before and after it are taken without it, in the order of their key."""
    queue = _queue(batch=3)
    entries = [_add(queue, number, "key") for number in range(5)]
    assert queue.newest is entries[-1]
    queue.alone.add(entries[2])
    taken = []
    while queue.ready:
        batch = queue.take()
        taken.append([entry.event.sequence_number for entry in batch])
        for entry in batch:
            queue.finish(entry)
        queue.release(batch[-1])
    assert taken == [[0, 1], [2], [3, 4]]
