"""Who skips what on a shared link, when it is opened again, and who holds the others back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eventpump.core.cache import Cursor, EventCache
from eventpump.core.sharing import Placement, Pressure, PressureState, ShareLedger


class LinkAgainstModel(RuleBasedStateMachine):
    """A log, one link over it and a cache: each member gets every event from its number on, once, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log = 20
        self.sent = 0
        self.is_linked = False
        self.ledger = ShareLedger()
        self.cache: EventCache[bytes] = EventCache(lambda raw: raw)
        self.cursors: dict[str, Cursor[bytes]] = {}
        self.expected: dict[str, int] = {}
        self.made = 0

    @rule(count=st.integers(1, 30))
    def publish(self, count: int) -> None:
        self.log += count

    @precondition(lambda self: self.is_linked)
    @rule(count=st.integers(1, 30))
    def receive(self, count: int) -> None:
        batch = [str(number).encode() for number in range(self.sent, min(self.sent + count, self.log))]
        self.sent += len(batch)
        self.cache.append(batch, sum(map(len, batch)))

    @precondition(lambda self: len(self.cursors) < 5)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        oldest = self.sent if self.cache.oldest is None else int(self.cache.oldest)
        numbers = st.integers(0, self.log) | st.sampled_from((max(0, oldest - 1), min(oldest, self.log)))
        number = data.draw(numbers)
        name = f"member {self.made}"
        self.made += 1
        if self.is_linked:
            self.ledger.freed(self.sent if self.cache.oldest is None else int(self.cache.oldest))
        placement = self.ledger.join(name, number)
        self.cursors[name] = self.cache.cursor()
        self.expected[name] = number
        assert (placement is Placement.OPEN) is not self.is_linked
        if placement is not Placement.IN_CACHE:
            self._open()

    def _open(self) -> None:
        self.cache.clear()
        lowest = self.ledger.lowest
        assert lowest is not None
        self.sent = lowest
        self.ledger.opened(lowest)
        self.is_linked = True

    @precondition(lambda self: self.is_linked)
    @rule()
    def lose_link(self) -> None:
        """The next link begins after the last event received: nothing changes."""

    @precondition(lambda self: self.cursors)
    @rule()
    def end_link(self) -> None:
        """The link is given up, with what is cached, and another opened for those who are there."""
        self.ledger.closed()
        self._open()

    @precondition(lambda self: self.cursors)
    @rule(data=st.data(), limit=st.integers(1, 40))
    def read(self, data: st.DataObject, limit: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.cursors)))
        for message in self.cursors[name].read(limit):
            number = int(message)
            if self.ledger.is_new(name, number):
                assert number == self.expected[name]
                self.ledger.passed(name, number)
                self.expected[name] += 1

    @precondition(lambda self: self.cursors)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.cursors)))
        self.cursors.pop(name).close()
        self.expected.pop(name)
        self.ledger.leave(name)
        self.ledger.leave(name)
        if not self.cursors:
            self.cache.clear()
            self.ledger.closed()
            self.is_linked = False

    @invariant()
    def nobody_is_behind_the_cache(self) -> None:
        assert self.ledger.members == tuple(self.cursors)
        for name, number in self.expected.items():
            assert self.ledger.is_new(name, number)
            assert not self.ledger.is_new(name, number - 1)

    def teardown(self) -> None:
        """In the end all of them have everything."""
        if self.cursors:
            batch = [str(number).encode() for number in range(self.sent, self.log)]
            self.cache.append(batch, sum(map(len, batch)))
        for name, cursor in self.cursors.items():
            for message in cursor.read(10_000):
                if self.ledger.is_new(name, int(message)):
                    assert int(message) == self.expected[name]
                    self.ledger.passed(name, int(message))
                    self.expected[name] += 1
            assert self.expected[name] == self.log


TestLinkAgainstModel = LinkAgainstModel.TestCase
TestLinkAgainstModel.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize("freed", [10, 15])
def test_member_joins_from_the_cache_only_if_that_has_its_first_event(freed: int) -> None:
    """For an event that was never in it, or was just dropped, the link is opened again."""
    ledger = ShareLedger()
    assert ledger.join("first", 10) is Placement.OPEN
    ledger.opened(10)
    ledger.freed(freed)
    assert ledger.join("has it", freed) is Placement.IN_CACHE
    assert ledger.join("misses it", freed - 1) is Placement.REOPEN


def test_ledger_refuses_a_name_twice_and_an_event_twice() -> None:
    """Both would be mistakes of the caller, which must not go by unseen."""
    ledger = ShareLedger()
    ledger.join("a", 5)
    with pytest.raises(ValueError, match="a is a member already"):
        ledger.join("a", 5)
    ledger.passed("a", 7)
    with pytest.raises(ValueError, match="a had number 7 already"):
        ledger.passed("a", 7)


def test_pressure_has_hysteresis() -> None:
    """A member that keeps half of the cache holds others back until it keeps less than a quarter."""
    pressure = Pressure(slow_after=10)
    states = []
    for now, held in enumerate([(49, 0), (10, 500), (100, 0), (26, 0), (25, 0), (49, 0)]):
        assert pressure.observe(held, (100, 1000), now) is None
        states.append((pressure.state, pressure.since))
    assert states == [
        (PressureState.FREE, None),
        (PressureState.SLOWED, 1),
        (PressureState.STOPPED, 1),
        (PressureState.SLOWED, 1),
        (PressureState.FREE, None),
        (PressureState.FREE, None),
    ]


def test_pressure_reports_a_slow_member_and_again_when_the_time_has_doubled() -> None:
    """One report per doubling, and again after the member was free."""
    pressure = Pressure(slow_after=10)
    room, full = (100, 1000), (100, 0)
    reports = [now for now in range(100) if pressure.observe(full, room, now) is not None]
    assert reports == [10, 20, 40, 80]
    assert pressure.next_report == 160
    pressure.observe((0, 0), room, 100)
    assert [pressure.next_report] == [None]
    assert [now for now in range(101, 120) if pressure.observe(full, room, now) is not None] == [111]


@pytest.mark.parametrize("since", [number / 7 for number in range(1, 60)])
def test_report_is_due_at_the_very_time_that_is_promised(since: float) -> None:
    """However the sum is rounded: one who sets a timer by it would be called again and again at that time."""
    pressure = Pressure(slow_after=60.1)
    assert pressure.observe((100, 0), (100, 1000), since) is None
    assert pressure.next_report is not None
    assert pressure.observe((100, 0), (100, 1000), pressure.next_report) is not None
