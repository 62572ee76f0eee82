"""The credit window."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventpump.amqp.connection import Messages
from eventpump.core.credit import START, CreditWindow
from tests.unit.amqp.pair import config, opened

LARGEST = 4000


_MESSAGES = [b"x" * size for size in range(LARGEST + 1)]


@dataclass
class _Service:
    """A sender at the far end of a link with a delay, by the rules of AMQP 2.6.7, and the cache it fills.

    Attributes:
        granted: The most that any flow of this link lets come, counted from its beginning.
    """

    window: CreditWindow
    sizes: Iterator[int]
    flows: deque[int] = field(default_factory=deque)
    in_flight: deque[bytes] = field(default_factory=deque)
    sent: int = 0
    received: int = 0
    limit: int = 0
    granted: int = 0
    held: deque[int] = field(default_factory=deque)
    bytes_held: int = 0
    revoked: int = 0

    def _flow(self, credit: int | None) -> None:
        if credit is not None:
            self.revoked += credit == 0
            self.flows.append(self.received + credit)
            self.granted = max(self.granted, self.received + credit)

    def adjust(self) -> None:
        self._flow(self.window.grant(len(self.held), self.bytes_held))

    def withdraws(self) -> None:
        self._flow(self.window.withdraw())

    def reopens(self) -> None:
        """The link ends, with what is on its way, and another is opened, which begins after what came."""
        self.window.link_ended()
        self.flows.clear()
        self.in_flight.clear()
        self.sent = self.received = self.limit = self.granted = 0
        self.window.link_opened(LARGEST)
        self.adjust()

    def flow_arrives(self) -> None:
        if self.flows:
            self.limit = self.flows.popleft()

    def sends(self, count: int) -> None:
        while count and self.sent < self.limit:
            size = next(self.sizes, None)
            if size is None:
                return
            self.in_flight.append(_MESSAGES[size])
            self.sent += 1
            count -= 1

    def arrives(self, count: int) -> None:
        batch = [self.in_flight.popleft() for _ in range(min(count, len(self.in_flight)))]
        if batch:
            self.received += len(batch)
            self.bytes_held += self.window.received(batch)
            self.held.extend(map(len, batch))
            self.adjust()

    def reads(self, count: int) -> int:
        taken = min(count, len(self.held))
        for _ in range(taken):
            self.bytes_held -= self.held.popleft()
        self.adjust()
        return taken

    @property
    def may_still_come(self) -> int:
        """What is on its way, and what the flows under way, in whatever order they take effect, still let come."""
        return max(self.sent, self.limit, *self.flows) - self.received


def _stream(rng: random.Random) -> Iterator[int]:
    """Return sizes as streams have them: alike for a while, then of another kind, with a giant now and then."""
    while True:
        usual = rng.choice([1, 10, 100, 1000, LARGEST])
        for _ in range(rng.randrange(1, 120)):
            yield LARGEST if rng.random() < 0.02 else 1 + int(rng.random() * usual)


def _sizes(rng: random.Random, count: int) -> Iterator[int]:
    return islice(_stream(rng), count)


def _check_bounds(seed: int, max_events: int, max_bytes: int, *, is_strict: bool, steps: int) -> None:
    """Play an adversary on both ends of a link, and check in each step what the class says of its bounds."""
    rng = random.Random(seed)
    window = CreditWindow(max_events, max_bytes, strict=is_strict)
    service = _Service(window, _stream(rng))
    service.window.link_opened(LARGEST)
    service.adjust()
    exposed = 0
    events_read = 3 if rng.random() < 0.5 else 300
    rare = rng.choice([0.0, 0.05])
    for _ in range(steps):
        before, could_come = service.bytes_held, window.allowance
        case = rng.random()
        if case < rare:
            service.withdraws() if case < rare / 2 else service.reopens()
        elif case < 0.25:
            service.flow_arrives()
        elif case < 0.5:
            service.sends(1 + int(rng.random() * 300))
        elif case < 0.75:
            service.arrives(1 + int(rng.random() * 300))
        else:
            service.reads(int(rng.random() * (events_read + 1)))
        held = service.bytes_held
        if before < max_bytes <= held:
            exposed = could_come
        where = (seed, max_events, max_bytes, is_strict)
        assert service.may_still_come <= window.allowance == service.granted - service.received, where
        assert len(service.held) <= max_events, where
        if is_strict:
            assert held <= max(max_bytes, LARGEST), where
        elif held >= max_bytes:
            assert held < max_bytes + exposed * LARGEST, where


EVENTS, BYTES = (1, 5, 40, 200, 2000), (1000, 10_000, 60_000, 400_000)


@given(
    seed=st.integers(0, 2**32),
    max_events=st.sampled_from(EVENTS),
    max_bytes=st.sampled_from(BYTES),
    is_strict=st.booleans(),
)
@example(seed=394, max_events=200, max_bytes=1000, is_strict=False)
def test_window_keeps_the_stated_bounds_in_random_histories(
    seed: int, max_events: int, max_bytes: int, is_strict: bool
) -> None:
    """Whatever comes: events stay in their budget, bytes in theirs plus what could come as it was reached."""
    _check_bounds(seed, max_events, max_bytes, is_strict=is_strict, steps=600)


@pytest.mark.timeout(3600)
def test_window_keeps_the_stated_bounds_for_many_seeds(pytestconfig: pytest.Config) -> None:
    """The same for seed after seed: 2,000, or 100,000 in the long form."""
    seeds = range(100_000 if pytestconfig.getoption("--long") else 2000)
    for seed in (*seeds, 13_419):
        _check_bounds(
            seed, EVENTS[seed % 5], BYTES[seed // 5 % 4], is_strict=seed // 20 % 4 == 0, steps=50 + seed % 7 * 50
        )


@given(seed=st.integers(0, 2**32), max_events=st.sampled_from([5, 60]), max_bytes=st.sampled_from([200, 6000, 10**6]))
def test_window_allowance_equals_that_of_the_link(seed: int, max_events: int, max_bytes: int) -> None:
    """However messages and flows cross, the window and the engine's link agree on what may still come.

    So the engine takes what the window reckons with, and would end the link of a peer that sends more.
    """
    rng = random.Random(seed)
    pair = opened(config(enforce_credit=True))
    session, _ = pair.session()
    receiver, sender = pair.link(session, is_receiver=True)
    window = CreditWindow(max_events, max_bytes)
    window.link_opened(0)
    held: deque[int] = deque()
    for _ in range(60):
        match rng.choice(["send", "arrive", "read", "flow"]):
            case "send":
                for _ in range(min(sender.credit, rng.randint(1, 50))):
                    sender.send(_MESSAGES[rng.choice([1, 50, 400])], settled=True)
            case "arrive":
                for events in pair.client.receive(pair.server.data_to_send()):
                    assert isinstance(events, Messages), events
                    window.received(events.payloads)
                    held.extend(map(len, events.payloads))
            case "read":
                for _ in range(min(len(held), rng.randint(1, 50))):
                    held.popleft()
            case "flow":
                pair.server.receive(pair.client.data_to_send())
        credit = window.withdraw() if rng.random() < 0.1 else window.grant(len(held), sum(held))
        if credit is not None:
            receiver.set_credit(credit)
        assert (window.allowance, window.credit) == (receiver.allowance, receiver.credit)


@given(
    seed=st.integers(0, 2**32),
    max_events=st.sampled_from([1, 5, 40, 200]),
    max_bytes=st.sampled_from([1, 1000, 20_000]),
    is_strict=st.booleans(),
    batch=st.sampled_from([1, 7, 50]),
)
def test_window_never_runs_dry_for_a_reader_that_reads_on(
    seed: int, max_events: int, max_bytes: int, is_strict: bool, batch: int
) -> None:
    """A reader that reads on gets every message, however small the window: credit never runs dry for good."""
    count = 600
    service = _Service(CreditWindow(max_events, max_bytes, strict=is_strict), _sizes(random.Random(seed), count))
    service.window.link_opened(LARGEST)
    service.adjust()
    got = 0
    for _ in range(3 * count + 10):
        while service.flows:
            service.flow_arrives()
        service.sends(1000)
        service.arrives(1000)
        got += service.reads(batch)
    assert got == count


@given(
    seed=st.integers(0, 2**32),
    max_events=st.sampled_from([1, 5, 40, 200]),
    max_bytes=st.sampled_from([1, 1000, 20_000]),
    left=st.integers(0, 400),
    more=st.integers(1, 300),
)
def test_window_with_a_wanted_number_grants_exactly_that(
    seed: int, max_events: int, max_bytes: int, left: int, more: int
) -> None:
    """With a number of messages wanted, exactly so many come, whatever the window; and as many again as asked then."""
    rng = random.Random(seed)
    service = _Service(CreditWindow(max_events, max_bytes, left=left), _sizes(rng, 1000))
    service.window.link_opened(LARGEST)
    got = 0
    for wanted in (left, left + more):
        service.window.left = wanted - got
        service.adjust()
        for _ in range(3 * wanted + 10):
            while service.flows:
                service.flow_arrives()
            service.sends(1000)
            service.arrives(rng.randint(1, 1000))
            got += service.reads(rng.randint(1, 50))
        assert got == service.sent == wanted


def test_window_with_known_sizes_keeps_within_the_byte_budget() -> None:
    """Once sizes are known and steady, the bytes held never exceed the budget at all."""
    service = _Service(CreditWindow(3000, 50_000), iter([1000] * 5000))
    service.window.link_opened(LARGEST)
    service.adjust()
    for turn in range(400):
        service.flow_arrives()
        service.sends(100)
        service.arrives(100)
        if turn > 3:
            assert sum(service.held) <= 50_000
        if turn % 3 == 0:
            service.reads(17)
    assert service.revoked == 0


def _steady(window: CreditWindow, size: int, rounds: int) -> None:
    """Let the service use up all credit, and read it all, several times."""
    window.grant(0, 0)
    for _ in range(rounds):
        window.received([b"x" * size] * max(1, window.credit))
        window.grant(0, 0)


def test_window_starts_small_and_grows() -> None:
    """The first grant is 32, and the window doubles with what arrives, up to the room in events."""
    window = CreditWindow(3000, 100_000_000)
    assert window.grant(0, 0) == START
    seen = []
    for _ in range(9):
        window.received([b"x" * 100] * window.credit)
        seen.append(window.grant(0, 0))
    assert seen[:3] == [64, 128, 256]
    assert seen[-1] == 3000


def test_window_limits_credit_by_the_size_seen() -> None:
    """With messages of 1000 bytes and room for 50 000, no more than 50 are let come."""
    window = CreditWindow(3000, 50_000)
    _steady(window, 1000, 12)
    assert window.credit == 50


def test_window_remembers_a_recent_large_message() -> None:
    """A recent large message counts, not the mean: credit follows the larger of the two."""
    window = CreditWindow(3000, 50_000)
    _steady(window, 10, 12)
    window.received([b"x" * 5000])
    window.received([b"x" * 10] * window.credit)
    assert window.grant(0, 0) == 10


def test_window_forgets_a_large_message_in_time() -> None:
    """After some thousand small messages a large one counts no more."""
    window = CreditWindow(100, 50_000)
    window.grant(0, 0)
    window.received([b"x" * 50_000])
    for _ in range(30):
        window.received([b"x" * 10] * 100)
    _steady(window, 10, 3)
    assert window.credit == 100


def test_window_overshot_sets_credit_to_zero_once() -> None:
    """Where larger messages than estimated fill the budget, credit is set to 0 once."""
    window = CreditWindow(1000, 10_000)
    window.grant(0, 0)
    window.received([b"x" * 6000] * 2)
    assert window.grant(2, 12_000) == 0
    assert window.grant(2, 12_000) is None


def test_window_tops_up_at_half() -> None:
    """Reading message by message out of a full cache asks for a flow every half window, not every message."""
    window = CreditWindow(1000, 1_000_000_000)
    _steady(window, 10, 12)
    window.received([b"x" * 10] * 1000)
    grants = [held for held in range(999, -1, -1) if window.grant(held, held * 10) is not None]
    assert grants == [500, 0]


def test_window_strict_grants_by_the_links_largest_message() -> None:
    """Strictly, only as many messages are let come as fit if each is as large as the link allows."""
    window = CreditWindow(1000, 10_000, strict=True)
    window.link_opened(1000)
    assert window.grant(0, 0) == 10
    window.received([b"x"] * 10)
    assert window.grant(10, 10) == 9


def test_window_on_a_new_link_grants_again() -> None:
    """What was granted on a link that ended is granted again on the next."""
    window = CreditWindow(100, 10_000)
    assert window.grant(0, 0) == START
    window.link_ended()
    window.link_opened(1000)
    assert window.grant(0, 0) == START


def test_withdraw_sets_credit_to_zero_once() -> None:
    """To stop, credit is set to 0, and not again where there is none."""
    window = CreditWindow(100, 10_000)
    window.grant(0, 0)
    assert window.withdraw() == 0
    assert window.withdraw() is None


@pytest.mark.parametrize(("events", "size"), [(0, 10), (10, 0)])
def test_window_without_room_is_refused(events: int, size: int) -> None:
    """A budget of nothing would never let anything come."""
    with pytest.raises(ValueError, match="room"):
        CreditWindow(events, size)
