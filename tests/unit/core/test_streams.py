"""Streams over one cache: each reads the items that match, once and in order; what nothing needs is not kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eventpump.core.cache import Cursor, EventCache
from eventpump.core.streams import Selection, StreamCursor, is_plain_function, takes_one_argument


class Item:
    """What cursors read: a sequence number, and a letter that is its key."""

    def __init__(self, raw: bytes) -> None:
        number, self.letter, self.manner = raw.decode().split()
        self.number = int(number)
        self.asked = 0
        """How often a key function was called with it."""


class OddError(BaseException):
    """What user code raises that is no `Exception`."""


class Hostile:
    """A key that cannot be looked up."""

    def __hash__(self) -> int:
        raise OddError("no hash")


async def _later() -> str:
    return "a"


def _key(item: Item) -> Any:
    item.asked += 1
    return _result(item, item.letter)


def _result(item: Item, result: object) -> Any:
    match item.manner:
        case "raise":
            raise OddError("no key")
        case "list":
            return [result]
        case "hostile":
            return Hostile()
        case "later":
            return _later()
    return result


def _size(item: Item) -> int:
    return len(f"{item.number} {item.letter} {item.manner}")


def _another_key(item: Item) -> Any:
    return item.letter.upper()


def _number(item: Item) -> int | None:
    return None if item.manner == "unreadable" else item.number


def _as_set(item: Item) -> Any:
    return {item.letter}


def _vowels(item: Item) -> Any:
    return _result(item, item.letter in "ae")


def _truthy(item: Item) -> Any:
    return [item] if item.letter == "b" else 0


_KINDS: dict[str, tuple[Callable[[], Selection[Item]], Callable[[Item], bool]]] = {
    "a": (lambda: Selection(_key, {"a"}), lambda item: item.letter == "a"),
    "a again": (lambda: Selection(_key, {"a"}), lambda item: item.letter == "a"),
    "b and c": (lambda: Selection(_key, {"b", "c"}), lambda item: item.letter in "bc"),
    "never": (lambda: Selection(_key, {"z"}), lambda item: False),
    "upper": (lambda: Selection(_another_key, {"C", "D"}), lambda item: item.letter in "cd"),
    "vowels": (lambda: Selection(_vowels), lambda item: item.letter in "ae"),
    "truthy": (lambda: Selection(_truthy), lambda item: item.letter == "b"),
}
_BAD = ("raise", "list", "hostile", "later")


class Reader:
    """A stream of the model, and what it is to read."""

    def __init__(self, kind: str, cursor: StreamCursor[Item], expected: list[Item], since: int | None) -> None:
        self.kind = kind
        self.cursor = cursor
        self.expected = expected
        self.since = since
        self.has_batch = False
        """Whether anything was received since it is there."""

    def is_for(self, item: Item) -> bool:
        """Return whether an item is one to read, or one that may be."""
        if self.since is not None and item.number < self.since:
            return False
        # What a filter returns is true or false, whatever it is.
        is_truthy = self.kind == "vowels" and item.manner in {"list", "hostile"}
        return self.fails_for(item) or is_truthy or _KINDS[self.kind][1](item)

    def fails_for(self, item: Item) -> bool:
        """Return whether the function fails for an item."""
        if self.kind == "vowels":
            return item.manner in {"raise", "later"}
        return item.manner in _BAD and _KINDS[self.kind][0]().function is _key


class StreamsAgainstModel(RuleBasedStateMachine):
    """Plain cursors and streams over one cache, against lists of what each is to read."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: EventCache[Item] = EventCache(lambda raw: [Item(each) for each in raw], _number)
        self.made: dict[int, Item] = {}
        self.items: list[Item] = []
        self.next = 0
        self.missing: list[tuple[int, int]] = []
        self.plain: dict[int, tuple[Cursor[Item], int]] = {}
        self.streams: dict[int, Reader] = {}
        self.count = 0
        self.hands: dict[int, Sequence[Item]] = {}
        """What each cursor has read last and not processed, of closed ones, too."""
        self.left: dict[int, Cursor[Item] | StreamCursor[Item]] = {}
        """Closed cursors that may have something in hand."""
        self.kept_from = 0
        """The index of the first item that is held for all: of those before, only what streams have not read."""

    @rule(
        letters=st.lists(
            st.tuples(st.sampled_from("abcdexy"), st.sampled_from(("ok",) * 12 + _BAD + ("unreadable",))), max_size=80
        ),
        gap=st.sampled_from((0, 0, 0, 0, 3)),
    )
    def append(self, letters: list[tuple[str, str]], gap: int) -> None:
        """Receive a batch, perhaps after numbers that are missing."""
        if not letters:
            return
        if not self.items:
            # What comes before the first number that can be read may be anything.
            letters[0] = letters[0][0], "ok"
        if gap:
            letters[0] = letters[0][0], "ok"
            if self.items:
                # Where the number before it cannot be read, a gap is not seen.
                gap = gap if self.items[-1].manner != "unreadable" else 0
        first = self.next + gap
        raw = [f"{number} {letter} {manner}".encode() for number, (letter, manner) in enumerate(letters, first)]
        before = len(self.items)
        empty = {key for key, each in self.streams.items() if not each.expected}
        self.items += [Item(each) for each in raw]
        self.next = first + len(raw)
        woken = set(self.cache.append(list(raw), sum(map(len, raw))))
        new = self.items[before:]
        for key, reader in self.streams.items():
            found = [item for item in new if reader.is_for(item)]
            reader.expected += found
            assert found == [] or key not in empty or reader.cursor in woken
            # It does not know what came before its first batch, unless it was given the number where it begins.
            if gap and reader.has_batch and not (reader.since is not None and first <= reader.since):
                assert reader.cursor in woken
            reader.has_batch = True
        if not self.plain and self.streams:
            self.kept_from = len(self.items)

    @precondition(lambda self: len(self.plain) < 3)
    @rule(at_end=st.booleans())
    def add_plain(self, at_end: bool) -> None:
        """Add a cursor that reads everything."""
        self.plain[self.count] = self.cache.cursor(at_end=at_end), len(self.items) if at_end else self.kept_from
        self.count += 1
        self._forget()

    @precondition(lambda self: len(self.streams) < 6)
    @rule(kind=st.sampled_from(sorted(_KINDS)), at_end=st.booleans(), data=st.data())
    def add_stream(self, kind: str, at_end: bool, data: st.DataObject) -> None:
        """Add a stream that begins at the end, with what is held for all, or somewhere from there on."""
        begin = len(self.items) if at_end else self.kept_from
        since: int | None = None
        if not at_end and data.draw(st.booleans()):
            least = self.items[begin].number if begin < len(self.items) else self.next
            since = data.draw(st.integers(least, self.next + 20))
        cursor = self.cache.stream(_KINDS[kind][0](), since=since, at_end=at_end)
        reader = self.streams[self.count] = Reader(kind, cursor, [], since)
        reader.expected = [item for item in self.items[begin:] if reader.is_for(item)]
        self.count += 1
        self._forget()

    @precondition(lambda self: self.plain)
    @rule(data=st.data(), limit=st.integers(1, 120))
    def read_plain(self, data: st.DataObject, limit: int) -> None:
        """Read everything with one of the plain cursors."""
        key = data.draw(st.sampled_from(sorted(self.plain)))
        cursor, place = self.plain[key]
        found = cursor.read(limit)
        assert [each.number for each in found] == [each.number for each in self.items[place : place + limit]]
        self.plain[key] = cursor, place + len(found)
        self.hands[key] = found
        self._check_shared(found)
        self._forget()

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), limit=st.integers(1, 60))
    def read_stream(self, data: st.DataObject, limit: int) -> None:
        """Read what matches."""
        key = data.draw(st.sampled_from(sorted(self.streams)))
        reader = self.streams[key]
        cursor = reader.cursor
        assert cursor.available == len(reader.expected)
        cursor.take_missing()
        found = cursor.read(limit)
        assert [each.number for each in found] == [each.number for each in reader.expected[: len(found)]]
        assert found or not reader.expected
        assert len(found) <= limit
        doubtful = [each for each in found if reader.fails_for(each)]
        assert (cursor.doubt is not None) == (len(doubtful) == 1)
        assert not doubtful or list(found) == doubtful
        if doubtful:
            with pytest.raises((OddError, TypeError)):
                cursor.selection.matches(found[0])
        del reader.expected[: len(found)]
        self.hands[key] = found
        self._check_shared(found)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def read_to_the_end(self, data: st.DataObject) -> None:
        """Read all that matches, whatever fails: then the stream has come to the end, which a checkpoint may cover."""
        key = data.draw(st.sampled_from(sorted(self.streams)))
        reader = self.streams[key]
        cursor = reader.cursor
        while cursor.take_missing() or cursor.available:
            found = self.hands[key] = cursor.read(100)
            del reader.expected[: len(found)]
        assert reader.expected == []
        readable = [each.number for each in self.items if each.manner != "unreadable"]
        newest = max(readable, default=-1)
        passed = cursor.passed
        if passed is not None:
            assert passed.number == newest
            assert newest + 1 >= (reader.since or 0)
        cursor.wake_after(1)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def close_stream(self, data: st.DataObject) -> None:
        """Close a stream: what only it needed is free."""
        key = data.draw(st.sampled_from(sorted(self.streams)))
        reader = self.streams.pop(key)
        self.left[key] = reader.cursor
        held, before = reader.cursor.held, (self.cache.count, self.cache.size)
        is_last = not self.streams and not self.plain
        reader.cursor.close()
        reader.cursor.close()
        assert reader.cursor.read(5) == []
        assert reader.cursor.passed is None
        assert (self.cache.count, self.cache.size) == (before[0] - held[0], before[1] - held[1])
        if is_last:
            assert self.cache.count == 0

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def close_plain(self, data: st.DataObject) -> None:
        """Close a plain cursor."""
        key = data.draw(st.sampled_from(sorted(self.plain)))
        cursor, _ = self.plain.pop(key)
        self.left[key] = cursor
        held, before = cursor.held, (self.cache.count, self.cache.size)
        is_last = not self.plain and not self.streams
        cursor.close()
        if not is_last:
            assert (self.cache.count, self.cache.size) == (before[0] - held[0], before[1] - held[1])
        self._forget()

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def process(self, data: st.DataObject) -> None:
        """Process what a cursor has in hand. One that was closed can do it once, too."""
        key = data.draw(st.sampled_from(sorted(self.hands)))
        cursor = self.left.pop(key, None) or (self.streams[key].cursor if key in self.streams else self.plain[key][0])
        found = bool(self.hands.pop(key))
        assert [cursor.has_in_hand, cursor.processed(), cursor.processed()] == [found, found, False]

    @precondition(lambda self: self.plain or self.streams)
    @rule()
    def clear(self) -> None:
        """Drop everything, as when the link is closed. What is in hand stays there."""
        self.cache.clear()
        self.kept_from = len(self.items)
        self.plain = {key: (cursor, len(self.items)) for key, (cursor, _) in self.plain.items()}
        for reader in self.streams.values():
            reader.expected = []

    def _check_shared(self, found: Sequence[Item]) -> None:
        """Check that all cursors get the same object of an item, while a stream may read it too."""
        if not self.streams or len(self.plain) + len(self.streams) < 2:
            return
        for item in found:
            if self.made.setdefault(item.number, item) is not item:
                # One that was made for a sole cursor, before there was a stream.
                assert item.asked == 0 or self.made[item.number].asked == 0
                self.made[item.number] = item

    def _forget(self) -> None:
        if self.plain:
            self.kept_from = max(self.kept_from, min(place for _, place in self.plain.values()))
        elif self.streams:
            self.kept_from = len(self.items)

    def _held(self) -> list[Item]:
        behind = self.items[: self.kept_from]
        unread = {item.number for each in self.streams.values() for item in each.expected}
        return [item for item in behind if item.number in unread] + self.items[self.kept_from :]

    @invariant()
    def only_what_is_needed_is_held(self) -> None:
        """Of what is before the slowest plain cursor, only items are held that a stream has not read."""
        held = self._held()
        assert self.cache.count == len(held)
        assert self.cache.size == sum(map(_size, held))
        assert self.cache.end == len(self.items)
        assert self.cache.start == (self.kept_from if self.plain or self.streams else self.cache.start)

    @invariant()
    def what_is_in_hand_is_counted_once(self) -> None:
        """Whatever cursor has it, and however many; and not what is held for another one."""
        in_hand = {item.number: _size(item) for hand in self.hands.values() for item in hand}
        for item in self._held():
            in_hand.pop(item.number, None)
        assert self.cache.in_hand == sum(in_hand.values())

    @invariant()
    def pressure_counts_what_only_one_needs(self) -> None:
        """A stream holds the matching items that neither a plain cursor nor another stream needs."""
        places = {item.number: place for place, item in enumerate(self.items)}
        needs = {key: {places[item.number] for item in each.expected} for key, each in self.streams.items()} | {
            key: set(range(place, len(self.items))) for key, (_, place) in self.plain.items()
        }
        for key, cursor in [(key, each.cursor) for key, each in self.streams.items()] + [
            (key, each) for key, (each, _) in self.plain.items()
        ]:
            others: set[int] = set().union(*(each for other, each in needs.items() if other != key))
            alone = needs[key] - others
            if key in self.plain and len(self.plain) > 1:
                # Of a plain one that is not the last: nothing, as what it needs is held for the last one too.
                assert cursor.held[0] == len(alone)
            elif key in self.streams:
                assert cursor.held[0] == len(alone), (key, cursor.held, alone)
            else:
                assert cursor.held[0] == len(alone)


TestStreamsAgainstModel = StreamsAgainstModel.TestCase
TestStreamsAgainstModel.settings = settings(stateful_step_count=30)


def _raw(*letters: str, first: int = 0, manner: str = "ok") -> list[bytes]:
    return [f"{number} {letter} {manner}".encode() for number, letter in enumerate(letters, first)]


def _cache() -> EventCache[Item]:
    return EventCache(lambda raw: [Item(each) for each in raw], _number)


def _passed(stream: StreamCursor[Item]) -> int | None:
    return None if (item := stream.passed) is None else item.number


def _append(cache: EventCache[Item], raw: list[bytes]) -> list[StreamCursor[Item]]:
    return list(cache.append(raw, sum(map(len, raw))))


def test_key_is_computed_once_however_many_streams_there_are() -> None:
    """A hundred streams by one function: one call per item; a second function is called once as well."""
    cache = _cache()
    streams = [cache.stream(Selection(_key, {letter})) for letter in "abcdefghij" * 10]
    calls: list[Item] = []

    class Keys:
        def key(self, item: Item) -> str:
            calls.append(item)
            return item.letter

    keys = Keys()
    others = [cache.stream(Selection(keys.key, {letter})) for letter in "ab"]
    _append(cache, _raw(*"abcabc"))
    (first, second) = streams[0].read(9)
    assert [first.asked, second.asked] == [1, 1]
    assert streams[10].read(9) == [first, second]
    assert others[0].read(9) == [first, second]
    assert len(calls) == 6


def test_filter_is_asked_for_its_own_stream() -> None:
    """Two streams with the same filter: each asks it, and what nothing matches is not kept."""
    cache = _cache()
    asked: list[str] = []

    def is_a(item: Item) -> bool:
        asked.append(item.letter)
        return item.letter == "a"

    first, second = cache.stream(Selection(is_a)), cache.stream(Selection(is_a))
    assert _append(cache, _raw("a", "b")) == [first, second]
    assert sorted(asked) == ["a", "a", "b", "b"]
    assert cache.count == 1
    assert first.read(9) == second.read(9)
    assert cache.count == 0


def test_what_matches_nothing_wakes_nothing_unless_that_was_asked_for() -> None:
    """A stream is woken for a match, or when as many items have come as it asked for."""
    cache = _cache()
    stream = cache.stream(Selection(_key, {"a"}))
    assert _append(cache, _raw("b")) == []
    stream.wake_after(2)
    stream.wake_after(5)
    assert _append(cache, _raw("b", first=1)) == []
    assert _append(cache, _raw("b", first=2)) == [stream]
    assert _append(cache, _raw(*"bbbbbb", first=3)) == []
    assert stream.count_passed(is_to_end=False) == 0
    assert stream.count_passed(is_to_end=True) == 9
    assert stream.count_passed(is_to_end=True) == 0
    assert _passed(stream) == 8
    assert _append(cache, _raw("b", "a", "b", first=9)) == [stream]
    assert _passed(stream) is None
    assert stream.count_passed(is_to_end=True) == 0
    stream.read(1)
    assert stream.count_passed(is_to_end=False) == 2
    assert stream.count_passed(is_to_end=True) == 1


def test_missing_numbers_stop_a_stream_until_they_are_taken() -> None:
    """A gap is taken after what lies before it and before what lies behind it, by each stream for itself."""
    cache = _cache()
    stream, later = cache.stream(Selection(_key, {"a"}), since=3), cache.stream(Selection(_key, {"a"}), since=30)
    _append(cache, _raw("b", "a", first=5))
    assert _append(cache, _raw("a", first=10)) == [stream]
    assert _passed(stream) is None
    assert stream.take_missing() == [(3, 4)]
    assert [each.number for each in stream.read(9)] == [6]
    assert stream.read(9) == []
    assert stream.take_missing() == [(7, 9)]
    assert [each.number for each in stream.read(9)] == [10]
    assert _passed(stream) == 10
    assert later.available == 0
    assert _passed(later) is None
    _append(cache, _raw("a", first=31))
    assert stream.take_missing() == [(11, 30)]
    assert later.take_missing() == [(30, 30)]


def test_stream_that_joins_from_the_cache_finds_the_gaps_there() -> None:
    """Before and between the items that are held, as one that was there when they were received."""
    cache = _cache()
    cache.cursor()
    _append(cache, _raw("b", "a", first=5))
    _append(cache, _raw("b", "a", first=10))
    stream, later = cache.stream(Selection(_key, {"a"}), since=3), cache.stream(Selection(_key, {"a"}), since=8)
    assert stream.take_missing() == [(3, 4)]
    assert [each.number for each in stream.read(9)] == [6]
    assert stream.take_missing() == [(7, 9)]
    assert [each.number for each in stream.read(9)] == [11]
    assert later.take_missing() == [(8, 9)]
    assert [each.number for each in later.read(9)] == [11]


def test_items_below_its_beginning_are_not_asked_for_or_kept() -> None:
    """One that begins later than the link passes over what is before; what cannot be read counts as the next one."""
    cache = _cache()
    stream = cache.stream(Selection(_key, {"a"}), since=3)
    _append(cache, _raw(*"aa"))
    _append(cache, _raw("a", first=2, manner="unreadable"))
    assert cache.count == 0
    assert _passed(stream) is None
    _append(cache, _raw("a", first=3))
    assert [each.number for each in stream.read(9)] == [3]


@pytest.mark.parametrize(
    ("before", "batch", "read"),
    [
        (["0 a ok"], ["1 b unreadable"], [1]),
        (["0 a ok"], ["1 a ok", "2 b unreadable", "3 b ok"], [2, 3]),
        (["0 a ok", "1 a ok"], ["2 b unreadable"], [2]),
        ([], ["7 b unreadable", "8 b ok"], [8]),
        ([], ["8 b unreadable", "9 a ok"], [8]),
        ([], ["8 b unreadable"], [8]),
    ],
)
@pytest.mark.parametrize("is_held", [False, True])
def test_stream_gets_items_without_a_number_that_its_beginning_does_not_exclude(
    before: list[str], batch: list[str], read: list[int], is_held: bool
) -> None:
    """*No loss*: one whose number cannot be read counts as the one after the item before it, or may be any."""
    cache = EventCache(lambda raw: [Item(each) for each in raw], _number)
    plain = cache.cursor()
    if before:
        cache.append([each.encode() for each in before], 10)
    since = len(before) or 8
    if is_held:
        cache.append([each.encode() for each in batch], 10)
    stream = cache.stream(Selection(_key, {"b"}), since=since)
    if not is_held:
        cache.append([each.encode() for each in batch], 10)
    assert [each.number for each in stream.read(9)] == read
    assert len(plain.read(9)) == len(before) + len(batch)


def test_pinned_stream_goes_on_at_a_number() -> None:
    """What it had over another link is dropped, with its failures and gaps."""
    cache = _cache()
    stream = cache.stream(Selection(_key, {"a"}), at_end=True)
    _append(cache, _raw("a", "a"))
    _append(cache, _raw("a", first=2, manner="raise"))
    _append(cache, _raw("a", first=9))
    stream.skip(7)
    assert stream.take_missing() == [(7, 8)]
    assert [each.number for each in stream.read(9)] == [9]
    assert stream.doubt is None
    assert cache.count == 0


@pytest.mark.parametrize("since", [None, 0])
def test_pinned_stream_gets_nothing_below_its_number_from_later_batches(since: int | None) -> None:
    """*Once*: what comes below the number is skipped in every batch, as where a link was opened again further back."""
    cache = _cache()
    stream = cache.stream(Selection(_key, {"a"}), since=since, at_end=True)
    stream.skip(5)
    for first in (0, 2, 4):
        _append(cache, _raw("a", "a", first=first))
    assert [each.number for each in stream.read(9)] == [5]
    assert stream.take_missing() == []


def test_error_is_kept_without_the_batch_and_names_its_line() -> None:
    """A traceback would keep all items of the batch alive."""
    cache = _cache()
    stream = cache.stream(Selection(_key, {"a"}))
    _append(cache, _raw("b", manner="raise"))
    stream.read(1)
    assert isinstance(stream.doubt, OddError)
    assert stream.doubt.__traceback__ is None
    assert any("_result" in note and __file__ in note for note in stream.doubt.__notes__)


def test_function_may_close_cursors() -> None:
    """As one that stops its host: nothing breaks, and nothing is kept for what is closed."""
    cache = _cache()
    streams: list[StreamCursor[Item]] = []

    def closing(item: Item) -> str:
        for stream in streams:
            stream.close()
        return item.letter

    streams += [cache.stream(Selection(closing, {"a"})), cache.stream(Selection(_vowels))]
    rest = cache.stream(Selection(_truthy))
    assert _append(cache, _raw("a", "b")) == [rest]
    assert cache.count == 1


def test_only_plain_functions_are_accepted() -> None:
    """What returns a coroutine or a generator can never be right."""

    async def later(item: Item) -> bool:
        return True

    def many(item: Item) -> Generator[bool]:
        yield True

    class Later:
        async def __call__(self, item: Item) -> bool:
            return True

    refused = (later, many, Later(), Later().__call__, functools.partial(later, Item(b"0 a ok")), 3, None)
    assert not any(map(is_plain_function, refused))
    assert all(map(is_plain_function, (_key, len, functools.partial(_key), str, "x".startswith, lambda _: True)))


@pytest.mark.parametrize("manner", _BAD)
def test_retry_asks_again(manner: str) -> None:
    """`matches` fails as often as the function does, also for what cannot be a key."""
    item = Item(_raw("a", manner=manner)[0])
    selection = Selection(_key, {"a"})
    with pytest.raises((OddError, TypeError)):
        selection.matches(item)
    item.manner = "ok"
    assert selection.matches(item)
    assert not Selection(_key, {"b"}).matches(item)
    with pytest.raises(TypeError):
        Selection(_as_set, {"b"}).matches(item)  # a set, which could be looked up in a set


def test_checkpoint_does_not_pass_missing_numbers_before_they_are_taken() -> None:
    """What is missing may be lost, and then nothing may be stored that comes after it."""
    cache = _cache()
    stream = cache.stream(Selection(_key, {"a"}))
    _append(cache, _raw("b", "b"))
    assert _passed(stream) == 1
    assert _append(cache, _raw("b", first=5)) == [stream]
    assert _passed(stream) is None
    assert stream.take_missing() == [(2, 4)]
    assert _passed(stream) == 5


def test_takes_one_argument_accepts_only_such_functions() -> None:
    """Those that cannot be called with an event are found without a call; what has no signature passes."""
    taking: list[Callable[..., Any]] = [_key, lambda event, limit=3: True, lambda *events: True, str, len, "x".count]
    assert all(map(takes_one_argument, taking))
    refused: list[Callable[..., Any]] = [lambda: True, lambda event, limit: True, lambda event, *, limit: True]
    assert not any(map(takes_one_argument, refused))
