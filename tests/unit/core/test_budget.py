"""The budget of bytes that the links of a host share."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from eventpump.core.budget import Account, BufferBudget
from eventpump.core.cache import Cursor, EventCache
from eventpump.core.credit import CreditWindow
from eventpump.core.streams import Selection, StreamCursor

LARGEST = 4000

_MESSAGES = [b"x" * size for size in range(LARGEST + 1)]


class _OddError(BaseException):
    """What user code raises that is no `Exception`."""


def _key(message: bytes) -> int:
    if len(message) % 7 == 0:
        raise _OddError("no key")
    return len(message) % 3


_SELECTIONS = [
    (Selection(_key, {0}), lambda size: size % 7 == 0 or size % 3 == 0),
    (Selection(_key, {1, 2}), lambda size: size % 7 == 0 or size % 3 > 0),
    (Selection(lambda message: len(message) > 900), lambda size: size > 900),
    (Selection(lambda _: False), lambda _: False),
]
"""Parts of the messages, and whether a message of a size is in it, or may be."""


@dataclass(eq=False)
class _Reader:
    """A subscription: what it is to read, and the batch that it has in hand.

    Attributes:
        takes: Returns whether a message of that size is for it, or may be; None if all are.
        place: The number of the message that it reads next; of a stream not used.
        unread: The numbers of the messages that a stream has not read yet.
        hand: The numbers of the messages of the batch in hand.
    """

    cursor: Cursor[bytes] | StreamCursor[bytes]
    takes: Callable[[int], bool] | None = None
    place: int = 0
    unread: list[int] = field(default_factory=list)
    hand: Sequence[int] = ()


@dataclass(eq=False)
class _Link:
    """A link of a host and the service at its far end, by the rules of AMQP 2.6.7; the glue is that of a feed."""

    host: _Host
    sizes: list[int]
    window: CreditWindow
    cache: EventCache[bytes] = field(default_factory=lambda: EventCache(lambda raw: raw))
    account: Account = field(init=False)
    readers: list[_Reader] = field(default_factory=list)
    leaving: list[_Reader] = field(default_factory=list)
    flows: deque[int] = field(default_factory=deque)
    in_flight: deque[int] = field(default_factory=deque)
    kept: int = 0
    held_from: int = 0
    received: int = 0
    sent: int = 0
    limit: int = 0
    reopened: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.account = self.host.budget.open(self.grant)
        self.window.link_opened(LARGEST)
        self.adjust()

    def adjust(self) -> None:
        is_due = self.account.holds(self.cache.size + self.cache.in_hand)
        self.grant()
        if is_due:
            for account in self.host.budget.settle():
                account.adjust()

    def grant(self) -> None:
        if self.is_closed:
            return
        cache, account = self.cache, self.account
        if self.host.budget.is_ample:
            credit = self.window.grant(cache.count, cache.size)
        else:
            room, is_alone, recalls = account.room - cache.in_hand, not account.held, account.recalls
            credit = self.window.grant(cache.count, cache.size, room, is_alone=is_alone, recalls=recalls)
            if not (self.window.credit or cache.count):
                account.waits()
            account.expects(self.window.expected)
        if credit is not None:
            assert credit >= 0
            self.flows.append(self.received + credit)

    def flow_arrives(self) -> None:
        if self.flows:
            self.limit = self.flows.popleft()

    def sends(self, count: int) -> None:
        first = self.kept + len(self.in_flight)
        new = self.sizes[first : first + max(0, min(count, self.limit - self.sent))]
        self.in_flight += new
        self.sent += len(new)

    def arrives(self, count: int) -> None:
        batch = [_MESSAGES[self.in_flight.popleft()] for _ in range(min(count, len(self.in_flight)))]
        if not batch:
            return
        self.received += len(batch)
        size = self.window.received(batch)
        if not self.account.received(size):
            fitting = self.account.fitting(list(map(len, batch)))
            if fitting < len(batch):
                self.window.refused(len(batch) - fitting)
                self.keeps(batch[:fitting])
                self.reopened += 1
                self.lost()
                return
        self.keeps(batch)

    def keeps(self, batch: list[bytes]) -> None:
        self.cache.append(list(batch), sum(map(len, batch)))
        first, self.kept = self.kept, self.kept + len(batch)
        for reader in self.readers:
            reader.unread += self.for_stream(reader, first)
        self.passes()
        self.adjust()

    def for_stream(self, reader: _Reader, first: int) -> list[int]:
        """Return the numbers of the messages that came from one on, and that a stream takes."""
        takes = reader.takes
        return [] if takes is None else [each for each in range(first, self.kept) if takes(self.sizes[each])]

    def passes(self) -> None:
        """Hold for all readers what the last one that reads everything has not read: without one, nothing."""
        places = [each.place for each in self.readers if each.takes is None]
        if self.readers:
            self.held_from = max(self.held_from, min(places, default=self.kept))

    def lost(self) -> None:
        """The link ends, with what is on its way, and another one begins after what was kept."""
        self.window.link_ended()
        self.account.expects(0)
        self.flows.clear()
        self.in_flight.clear()
        self.received = self.sent = self.limit = 0
        self.window.link_opened(LARGEST)
        self.adjust()

    def joins(self, *, at_end: bool, part: int | None = None) -> None:
        """Begin to read all messages, or a part of them."""
        first = self.kept if at_end else self.held_from
        if part is None:
            reader = _Reader(self.cache.cursor(at_end=at_end), place=first)
        else:
            selection, takes = _SELECTIONS[part]
            reader = _Reader(self.cache.stream(selection, at_end=at_end), takes)
            reader.unread = self.for_stream(reader, first)
        self.readers.append(reader)
        self.passes()
        self.adjust()

    def reads(self, reader: _Reader, limit: int) -> int:
        held, in_hand = self.cache.count, self.cache.in_hand
        taken = len(reader.cursor.read(limit))
        if reader.takes is None:
            reader.hand = range(reader.place, reader.place + taken)
            reader.place += taken
        else:
            reader.hand, reader.unread = reader.unread[:taken], reader.unread[taken:]
        self.passes()
        if self.cache.count < held or self.cache.in_hand != in_hand:
            self.adjust()
        return taken

    def leaves(self, reader: _Reader) -> None:
        """A subscription ends, and goes on with the batch that it has in hand."""
        self.readers.remove(reader)
        self.leaving.append(reader)
        reader.cursor.close()
        reader.unread = []
        self.passes()
        self.adjust()

    def ends(self, reader: _Reader) -> None:
        """The last batch of a subscription that has left is processed."""
        self.leaving.remove(reader)
        reader.cursor.processed()
        self.adjust()

    def closes(self) -> None:
        """The partition is given up."""
        for reader in list(self.readers):
            self.leaves(reader)
        self.is_closed = True
        self.cache.clear()
        self.held_from = self.kept
        self.account.close()
        self.adjust()

    @property
    def in_memory(self) -> int:
        """The bytes of all messages that are in the cache or in a hand, each counted once."""
        found = set(range(self.held_from, self.kept))
        for reader in (*self.readers, *self.leaving):
            found.update(reader.unread, reader.hand)
        return sum(self.sizes[number] for number in found)


@dataclass
class _Host:
    """The links of a host."""

    max_bytes: int
    link_bytes: int
    max_events: int = 200
    budget: BufferBudget = field(init=False)
    links: list[_Link] = field(default_factory=list)
    closed: list[_Link] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = BufferBudget(self.max_bytes, self.link_bytes)

    def opens(self, sizes: list[int], readers: int = 1) -> _Link:
        link = _Link(self, sizes, CreditWindow(self.max_events, self.link_bytes))
        for _ in range(readers):
            link.joins(at_end=False)
        self.links.append(link)
        return link

    def check(self) -> None:
        """The stated bound holds, and what is counted is what is in memory."""
        everything = [*self.links, *self.closed]
        held = [link.account.held for link in everything]
        assert self.budget.held == sum(held)
        for link, counted in zip(everything, held, strict=True):
            assert counted == link.in_memory
        assert self.budget.held - self.budget.beyond <= self.max_bytes
        assert self.budget.beyond == sum(link.account.beyond for link in everything)
        assert self.budget.held <= self.max_bytes + LARGEST * sum(each > 0 for each in held)

    def turn(self, *, limit: int, at_once: int = 10_000) -> int:
        """Let everything move once on every link: flows, messages, then each reader takes a batch."""
        for link in self.links:
            while link.flows:
                link.flow_arrives()
            link.sends(at_once)
        for link in self.links:
            link.arrives(at_once)
            self.check()
        return sum(link.reads(reader, limit) for link in self.links for reader in link.readers)


def _stream(rng: random.Random, count: int) -> list[int]:
    """Return sizes as streams have them: alike for a while, then of another kind, with a giant now and then."""
    sizes: list[int] = []
    while len(sizes) < count:
        usual = rng.choice([1, 10, 100, 1000, LARGEST])
        sizes += [
            LARGEST if rng.random() < 0.02 else 1 + int(rng.random() * usual) for _ in range(rng.randrange(1, 120))
        ]
    return sizes[:count]


class BudgetInAnyHistory(RuleBasedStateMachine):
    """Whatever links, services and readers do: the bound holds, nothing is counted that is not there, all come on."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)
        self.host = _Host(20_000, 10_000)

    @rule(seed=st.integers(0, 2**32), max_bytes=st.sampled_from([1, 3000, 20_000, 100_000]))
    @precondition(lambda self: not self.host.links and not self.host.closed)
    def begin(self, seed: int, max_bytes: int) -> None:
        self.rng = random.Random(seed)
        self.host = _Host(max_bytes, self.rng.choice([1000, 10_000]), self.rng.choice([5, 200]))

    @precondition(lambda self: len(self.host.links) < 6)
    @rule(readers=st.integers(1, 3))
    def open(self, readers: int) -> None:
        self.host.opens(_stream(self.rng, 400), readers)

    def _link(self) -> _Link:
        return self.rng.choice(self.host.links)

    @precondition(lambda self: self.host.links)
    @rule(steps=st.integers(1, 30))
    def moves(self, steps: int) -> None:
        for _ in range(steps):
            link = self._link()
            count = self.rng.choice([1, 5, 300])
            match self.rng.randrange(4):
                case 0:
                    link.flow_arrives()
                case 1:
                    link.sends(count)
                case 2:
                    link.arrives(count)
                case _ if link.readers:
                    link.reads(self.rng.choice(link.readers), self.rng.choice([1, 7, 300]))
            self.host.check()

    @precondition(lambda self: self.host.links)
    @rule()
    def loses_link(self) -> None:
        self._link().lost()

    @precondition(lambda self: self.host.links)
    @rule(at_end=st.booleans(), part=st.sampled_from([None, 0, 1, 2, 3]))
    def joins(self, at_end: bool, part: int | None) -> None:
        self._link().joins(at_end=at_end, part=part)

    @precondition(lambda self: any(link.readers for link in self.host.links))
    @rule()
    def leaves(self) -> None:
        link = self.rng.choice([each for each in self.host.links if each.readers])
        link.leaves(self.rng.choice(link.readers))

    @precondition(lambda self: any(link.leaving for link in [*self.host.links, *self.host.closed]))
    @rule()
    def last_batch_is_processed(self) -> None:
        link = self.rng.choice([each for each in [*self.host.links, *self.host.closed] if each.leaving])
        link.ends(self.rng.choice(link.leaving))

    @precondition(lambda self: self.host.links)
    @rule()
    def moves_away(self) -> None:
        link = self._link()
        link.closes()
        self.host.links.remove(link)
        self.host.closed.append(link)

    @invariant()
    def bound_holds(self) -> None:
        self.host.check()

    def teardown(self) -> None:
        """All readers get everything once readers read on, and nothing is counted in the end."""
        for link in [*self.host.links, *self.host.closed]:
            while link.leaving:
                link.ends(link.leaving[0])
            if not link.readers and not link.is_closed:
                link.joins(at_end=False)
        for _ in range(3000):
            if not self.host.turn(limit=1000) and all(link.kept == len(link.sizes) for link in self.host.links):
                break
        assert [len(link.sizes) - link.kept for link in self.host.links] == [0] * len(self.host.links)
        assert self.host.budget.held == 0
        for link in self.host.links:
            link.closes()
        assert self.host.budget.links == 0


def test_budget_keeps_its_bound_in_any_history() -> None:
    """See `BudgetInAnyHistory`."""
    run_state_machine_as_test(BudgetInAnyHistory)


@pytest.mark.parametrize(("max_bytes", "link_bytes"), [(0, 1), (1, 0)])
def test_budget_without_room_is_refused(max_bytes: int, link_bytes: int) -> None:
    """A budget of nothing would be exceeded by whatever comes."""
    with pytest.raises(ValueError, match="room"):
        BufferBudget(max_bytes, link_bytes)


def test_links_that_have_all_they_may_use_are_not_bounded() -> None:
    """While the budget has room for what every link may hold, none is asked; one link more, and all are adjusted."""
    budget = BufferBudget(4000, 1000)
    accounts = [budget.open(lambda: None) for _ in range(3)]
    ample = [budget.is_ample]
    assert not accounts[0].holds(1000)
    accounts.append(budget.open(lambda: None))
    ample.append(budget.is_ample)
    assert accounts[0].holds(900)
    assert list(budget.settle()) == accounts
    assert budget.settle() == []
    accounts.pop().close()
    ample.append(budget.is_ample)
    assert ample == [True, False, True]


def test_brake_goes_on_at_seven_eighths_and_off_at_three_quarters() -> None:
    """In between each link has its minimum only, and credit beyond it is taken back."""
    budget = BufferBudget(8000, 8000)
    one, other = budget.open(lambda: None), budget.open(lambda: None)
    budget.settle()
    assert one.holds(7000)
    assert list(budget.settle()) == [one, other]
    assert (budget.is_braked, other.recalls, other.room) == (True, True, 500)
    braked = []
    for held in (6000, 5999):
        one.holds(held)
        budget.settle()
        braked.append(budget.is_braked)
    assert braked == [True, False]


def test_link_that_waits_is_adjusted_when_bytes_become_free() -> None:
    """One that has neither credit nor messages has nothing else that would make it ask again."""
    budget = BufferBudget(8000, 8000)
    one, other = budget.open(lambda: None), budget.open(lambda: None)
    budget.settle()
    other.waits()
    one.holds(100)
    assert list(budget.settle()) == [other]
    other.waits()
    other.close()
    assert budget.settle() == []
