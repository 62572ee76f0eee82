"""The queue of keyed events: order per key, bounds, and the watermark, whatever is finished when."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eventpump.core.keyed import KeyedBounds, KeyedEntry, KeyedQueue


class _Event:
    def __init__(self, number: int) -> None:
        self.sequence_number = number
        self.offset = f"at-{number}"


def _add(queue: KeyedQueue[_Event], number: int, key: object, size: int = 1) -> KeyedEntry[_Event]:
    """Add one event, and sort it. Return its entry."""
    queue.accept([_Event(number)], [size])
    queue.sort(lambda _: key)
    entry = queue.watermark.entries[-1]
    assert isinstance(entry, KeyedEntry)
    return entry


class QueueAgainstModel(RuleBasedStateMachine):
    """Events are added, sorted and taken, and finished in any order: per key in order, one batch at a time, in bounds.

    While nothing else is in hand, they are processed in order as well, without being sorted. Some keys are not known at
    once: then nothing is sorted that follows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Hashable] = []
        self.sizes: list[int] = []
        self.fresh: list[int] = []
        self.waiting: list[int] = []
        self.running: list[list[KeyedEntry[_Event]]] = []
        self.finished: set[int] = set()
        self.unknown: set[int] = set()
        self.unkeyed: int | None = None

    @initialize(batch=st.sampled_from([1, 2]))
    def begin(self, batch: int) -> None:
        self.bounds = KeyedBounds(events=5, size=60, ahead=6, batch=batch)
        self.queue: KeyedQueue[_Event] = KeyedQueue(self.bounds)

    def _numbers(self) -> set[int]:
        return set(range(len(self.keys))) - self.finished

    def _key_of(self, event: _Event) -> Hashable:
        if event.sequence_number in self.unknown:
            raise ValueError("not now")
        return self.keys[event.sequence_number]

    @rule(key=st.one_of(st.none(), st.integers(0, 2)), size=st.integers(1, 50), is_unknown=st.integers(0, 4))
    def add(self, key: int | None, size: int, is_unknown: int) -> None:
        open_ = self._numbers()
        end = next(each for each in range(len(self.keys) + 1) if each not in self.finished)
        total = sum(self.sizes[each] for each in open_)
        bounds = self.bounds
        fits = len(open_) < bounds.events and total + size <= bounds.size and len(self.keys) - end < bounds.ahead
        has_room = self.queue.room > 0 and self.queue.fitting([size]) == [size]
        assert has_room == (not open_ or fits)
        if has_room:
            number = len(self.keys)
            self.queue.accept([_Event(number)], [size])
            self.keys.append(key)
            self.sizes.append(size)
            self.fresh.append(number)
            if not is_unknown:
                self.unknown.add(number)

    @rule()
    def sort(self) -> None:
        self.queue.sort(self._key_of)
        while self.fresh and self.unkeyed is None:
            number = self.fresh.pop(0)
            self.waiting.append(number)
            if number in self.unknown:
                self.unkeyed = number
        assert self.queue.can_sort is False

    @precondition(lambda self: self.fresh)
    @rule(data=st.data())
    def process_in_order(self, data: st.DataObject) -> None:
        is_alone = self._numbers() == set(self.fresh) and self.bounds.batch == 1
        if not self.queue.is_in_order:
            assert not is_alone
            return
        # Those above the watermark are finished, too: nothing but what is fresh is in hand.
        assert is_alone
        number = self.fresh.pop(0)
        event = self.queue.fresh[self.queue.done]
        assert event.sequence_number == number
        if number in self.unknown:
            self.queue.enter_unkeyed(ValueError("not now"))
            self.unkeyed = number
            self.waiting.append(number)
        elif data.draw(st.booleans()):
            self.queue.done += 1
            self.finished.add(number)
        else:
            entry = self.queue.enter(self.keys[number])
            assert entry.event is event
            self.running.append([entry])

    def _ready(self) -> set[Hashable]:
        busy = {self._line(each.position.sequence_number) for batch in self.running for each in batch if each.position}
        return {self._line(each) for each in self.waiting} - busy

    def _line(self, number: int) -> Hashable:
        key = None if number == self.unkeyed else self.keys[number]
        return ("alone", number) if key is None else key

    @precondition(lambda self: self.queue.ready)
    @rule()
    def take(self) -> None:
        batch = self.queue.take()
        numbers = [each.position.sequence_number for each in batch if each.position]
        line = self._line(numbers[0])
        of_line = [each for each in sorted(self.waiting) if self._line(each) == line]
        assert numbers == of_line[: self.bounds.batch]
        assert all(self._line(each.event.sequence_number) != line for other in self.running for each in other)
        self.running.append(batch)
        self.waiting = [each for each in self.waiting if each not in numbers]

    @precondition(lambda self: self.unkeyed is not None and self.unkeyed not in self.waiting)
    @rule()
    def find_key(self) -> None:
        assert self.unkeyed is not None
        assert self.queue.unkeyed is not None
        assert type(self.queue.key_error) is ValueError
        self.running.remove([self.queue.unkeyed])
        self.unknown.remove(self.unkeyed)
        self.queue.resolve(self.keys[self.unkeyed])
        self.waiting.append(self.unkeyed)
        self.unkeyed = None

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        numbers = {entry.event.sequence_number for entry in batch}
        self.finished |= numbers
        is_unready = self.unkeyed in numbers
        if is_unready:
            self.unkeyed = None
        elif len(batch) == 1 and data.draw(st.booleans()):
            self.queue.finish_alone(batch[0])
            return
        for entry in batch:
            self.queue.finish(entry)
        self.queue.release(batch[-1])

    @invariant()
    def every_key_that_waits_and_is_not_busy_is_ready(self) -> None:
        assert len(self.queue.ready) == len(self._ready())

    @invariant()
    def an_event_whose_key_is_not_known_is_not_ready_for_the_handler(self) -> None:
        numbers = {entry.event.sequence_number for entry in self.queue.unready}
        assert numbers == (set() if self.unkeyed is None else {self.unkeyed})
        assert (self.queue.unkeyed is None) == (self.unkeyed is None)

    @invariant()
    def counts_agree(self) -> None:
        open_ = self._numbers()
        assert self.queue.events == len(open_)
        assert self.queue.size == sum(self.sizes[each] for each in open_)
        assert [event.sequence_number for event in self.queue.unfinished] == sorted(open_)

    @invariant()
    def watermark_is_the_end_of_what_is_finished(self) -> None:
        end = next(each for each in range(len(self.keys) + 1) if each not in self.finished)
        watermark = self.queue.watermark
        self.queue.advance()
        assert watermark.count == end
        assert (watermark.position is None) == (end == 0)
        assert watermark.position is None or watermark.position.sequence_number == end - 1


TestQueueAgainstModel: Any = QueueAgainstModel.TestCase
TestQueueAgainstModel.settings = settings(stateful_step_count=50)


def _queue(**bounds: int) -> KeyedQueue[_Event]:
    return KeyedQueue(KeyedBounds(**{"events": 100, "size": 10_000, "ahead": 100, "batch": 1, **bounds}))


def test_room_ends_at_max_ahead() -> None:
    """However few events are in hand: those above one that is not finished count, finished or not."""
    queue = _queue(events=5, ahead=6)
    assert queue.room == 5
    first = _add(queue, 0, 0)
    assert queue.take() == [first]
    for number in range(1, 6):
        assert queue.room == min(4, 6 - number)
        entry = _add(queue, number, number)
        assert queue.take() == [entry]
        queue.finish(entry)
        queue.release(entry)
    assert (queue.room, queue.events) == (0, 1)
    queue.finish(first)
    queue.release(first)
    assert (queue.room, queue.events) == (5, 0)


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


def _error(queue: KeyedQueue[_Event]) -> BaseException | None:
    return queue.key_error


def test_what_follows_an_event_whose_key_is_not_known_waits() -> None:
    """Until its key is known, then it has its place behind those before it; or until it is finished."""
    queue, fails = _queue(), {1: ValueError("no key"), 3: None}

    def key_of(event: _Event) -> object:
        if error := fails.get(event.sequence_number):
            raise error
        return [] if event.sequence_number in fails else "key"

    queue.accept([_Event(number) for number in range(6)], [1, 2, 3, 4, 5, 6])
    queue.sort(key_of)
    assert [entry.event.sequence_number for entry in queue.ready] == [0, 1]
    assert queue.key_error is fails[1]
    first, unkeyed = queue.take() + queue.take()
    assert unkeyed is queue.unkeyed
    queue.sort(key_of)
    assert not queue.ready
    queue.resolve("key")
    queue.sort(key_of)
    assert [entry.event.sequence_number for entry in queue.ready] == [3]  # its key cannot be hashed
    queue.finish(first)
    queue.release(first)
    assert [entry.event.sequence_number for entry in queue.ready] == [3, 1]
    (unkeyed,) = queue.take()
    assert unkeyed is queue.unkeyed
    assert isinstance(_error(queue), TypeError)
    with pytest.raises(TypeError):
        queue.resolve([])
    assert unkeyed is queue.unkeyed
    queue.finish(unkeyed)
    queue.release(unkeyed)
    queue.sort(key_of)
    for number in (1, 2, 4, 5):
        (entry,) = queue.take()
        assert entry.event.sequence_number == number
        queue.finish_alone(entry)
    assert (queue.events, queue.size) == (0, 0)


def test_event_whose_key_is_found_is_taken_next() -> None:
    """If its key has no other: it has waited longer than those that are ready."""
    queue = _queue()
    _add(queue, 0, "other")
    queue.accept([_Event(1)], [1])
    queue.sort(lambda _: [])
    queue.ready.rotate(1)
    (unkeyed,) = queue.take()
    queue.resolve("key")
    assert queue.take() == [unkeyed]


def test_key_function_that_causes_a_sort_sorts_nothing_twice() -> None:
    """Such as one that wakes a host that was paused."""
    queue = _queue()

    def key_of(event: _Event) -> object:
        queue.sort(key_of)
        return event.sequence_number

    queue.accept([_Event(number) for number in range(3)], [1, 1, 1])
    queue.sort(key_of)
    assert [entry.event.sequence_number for entry in queue.ready] == [0, 1, 2]
    assert queue.events == 3


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


def test_key_that_changes_pins_nothing() -> None:
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


def test_event_in_doubt_is_in_no_batch() -> None:
    """Those before and after it are taken without it, in the order of their key."""
    queue = _queue(batch=3)
    events = [_Event(number) for number in range(5)]
    queue.doubtful.add(events[2])
    queue.accept(events, [1] * 5)
    assert not queue.is_in_order
    queue.sort(lambda _: "key")
    assert {entry.event for entry in queue.unready} == {events[2]}
    taken = []
    while queue.ready:
        batch = queue.take()
        taken.append([entry.event.sequence_number for entry in batch])
        for entry in batch:
            queue.finish(entry)
        queue.release(batch[-1])
    assert taken == [[0, 1], [2], [3, 4]]
    assert not queue.doubtful | queue.unready
