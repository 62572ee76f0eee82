"""Accumulating events into batches, and the room for them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eventpump.producer.accumulator import Batch, BatchAccumulator, BufferRoom, Lane, Part


class Accumulator(BatchAccumulator[Any]):
    """An accumulator that takes a partition's id and an event's size.

    Attributes:
        lanes: By partition id.
        newest: The batch that the last event went into; None before the first.
        begun: The batches that were reported as begun.
    """

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits, on_begun=lambda batch: self.begun.append(batch), on_ready=self.ready_lanes)
        self.lanes: defaultdict[str, Lane[Any]] = defaultdict(lambda: Lane("some"))
        self.newest: Batch[Any] | None = None
        self.begun: list[Batch[Any]] = []
        self._is_ready = False

    def ready_lanes(self, lane: Lane[Any]) -> None:
        assert lane.is_ready
        self._is_ready = True

    def put(self, partition_id: str, event: object, size: int, now: float) -> bool:
        """Add an event. Return whether its lane was reported as ready."""
        self._is_ready = False
        self.newest = self.add(self.lanes[partition_id], event, b"x" * (size // 2), b"x" * (size - size // 2), now)
        assert (self.newest is self.begun[-1]) or len(self.newest.events) > 1
        return self._is_ready

    def expired(self, now: float) -> list[str]:
        return [self.id_of(lane) for lane in self.expire(now)]

    def flushed(self) -> list[str]:
        return [self.id_of(lane) for lane in self.flush()]

    def id_of(self, lane: Lane[Any]) -> str:
        return next(partition_id for partition_id, each in self.lanes.items() if each is lane)

    def take(self, partition_id: str) -> Batch[Any] | None:
        return self.lanes[partition_id].take()

    def is_ready(self, partition_id: str) -> bool:
        return self.lanes[partition_id].is_ready


def accumulator(max_events: int = 3, max_bytes: int = 100, max_wait_time: float = 5) -> Accumulator:
    """Make one with small limits."""
    return Accumulator(max_events=max_events, max_bytes=max_bytes, max_wait_time=max_wait_time)


def events(batch: Batch[str] | None) -> str | None:
    """Return the events of a batch in one word."""
    return None if batch is None else "".join(batch.events)


@given(
    sizes=st.lists(st.sampled_from([1, 7, 20, 45, 90, 101]), min_size=1, max_size=40),
    most=st.sampled_from([1, 2, 5, 100]),
    is_due=st.booleans(),
)
def test_join_fills_batches_as_add_does(sizes: list[int], most: int, is_due: bool) -> None:
    """Events that join where they may, and are added where not, make the batches that adding each of them makes."""
    made: list[list[tuple[list[int], int, bytes, bool]]] = []
    for joins in (False, True):
        filling = accumulator(max_events=most)
        lane = filling.lanes["0"]
        for number, size in enumerate(sizes):
            head, rest = b"h" * (size // 2), b"r" * (size - size // 2)
            batch = lane.filling
            index = -1 if batch is None or not joins else batch.join(number, head, rest, size, most)
            if index < 0:
                batch = filling.add(lane, number, head, rest, float(number))
                index = len(batch.events) - 1
            assert batch is not None
            assert batch.events[index] == number
            if is_due and lane.filling is not None and not lane.filling.is_due:
                filling.make_due(lane)
        batches = [*lane.full, *([] if lane.filling is None else [lane.filling])]
        made.append([(each.events, each.size, each.seal().message, each.is_due) for each in batches])
    assert made[0] == made[1]


# ------------------------------------------------------------------------------------------------- by count


def test_add_that_fills_a_batch_by_count_makes_it_ready() -> None:
    """The event that fills it makes it ready, and its timer goes."""
    filling = accumulator(max_events=3)
    assert [filling.put("0", each, 1, 0) for each in "abc"] == [False, False, True]
    assert filling.deadline is None
    batch = filling.take("0")
    assert events(batch) == "abc"
    assert filling.take("0") is None


def test_newest_is_the_batch_of_the_last_event() -> None:
    """It is returned whether the event filled it or began it, and is the one that is taken."""
    filling = accumulator(max_events=2)
    batches = [filling.newest]
    for each in "abc":
        filling.put("0", each, 1, 0)
        batches.append(filling.newest)
    before, *batches = batches
    assert before is None
    assert [batch.events[-1] for batch in batches if batch is not None] == ["b", "b", "c"]
    assert batches[0] is batches[1] is not batches[2]
    assert batches[0] is not None
    assert filling.take("0") is batches[0]


def test_add_after_a_full_batch_begins_one_with_its_own_wait() -> None:
    """The next event begins a batch with a wait of its own."""
    filling = accumulator(max_events=2)
    for now, each in enumerate("abc"):
        filling.put("0", each, 1, now)
    assert filling.deadline == 2 + 5
    assert events(filling.take("0")) == "ab"
    assert filling.take("0") is None


# ------------------------------------------------------------------------------------------------- by bytes


def test_add_that_does_not_fit_makes_the_batch_ready() -> None:
    """A batch never takes more than the limit; the event begins the next one."""
    filling = accumulator(max_events=9, max_bytes=8)
    assert [filling.put("0", each, 3, 0) for each in "abc"] == [False, False, True]
    batch = filling.take("0")
    assert batch is not None
    assert (events(batch), batch.size) == ("ab", 6)
    assert filling.deadline == 5


def test_add_that_fills_a_batch_to_the_byte_makes_it_ready() -> None:
    """Nothing could be added any more."""
    filling = accumulator(max_events=9, max_bytes=10)
    assert [filling.put("0", each, 5, 0) for each in "ab"] == [False, True]
    assert events(filling.take("0")) == "ab"


def test_add_can_make_two_batches_ready() -> None:
    """It does not fit the first, and fills the second."""
    filling = accumulator(max_events=9, max_bytes=10)
    filling.put("0", "a", 3, 0)
    assert filling.put("0", "b", 10, 0)
    assert [events(filling.take("0")) for _ in range(3)] == ["a", "b", None]


# ------------------------------------------------------------------------------------------------- by age


def test_due_batch_is_one_whose_first_event_has_waited() -> None:
    """Later events do not put it off; before that nothing is ready."""
    filling = accumulator()
    filling.put("0", "a", 1, 10)
    filling.put("0", "b", 1, 14)
    assert [filling.deadline] == [15]
    assert filling.expired(14.9) == []
    assert filling.take("0") is None
    assert filling.expired(15) == ["0"]
    assert filling.is_ready("0")
    assert [filling.deadline] == [None]
    assert events(filling.take("0")) == "ab"


def test_due_batch_takes_events_until_it_is_taken() -> None:
    """A partition that is busy sending gets fewer, larger batches; what is taken is fixed."""
    filling = accumulator(max_events=3)
    filling.put("0", "a", 1, 0)
    filling.expired(5)
    assert filling.put("0", "b", 1, 6) is False
    batch = filling.take("0")
    assert events(batch) == "ab"
    filling.put("0", "c", 1, 7)
    assert events(batch) == "ab"
    assert filling.deadline == 7 + 5


def test_due_batch_that_becomes_full_is_ready_once() -> None:
    """It is reported once, and it is there once."""
    filling = accumulator(max_events=2)
    filling.put("0", "a", 1, 0)
    assert filling.expired(5) == ["0"]
    assert filling.put("0", "b", 1, 6) is False
    assert filling.put("0", "c", 1, 6) is False
    assert [events(filling.take("0")) for _ in range(2)] == ["ab", None]
    assert filling.deadline == 11


def test_deadline_is_the_earliest_of_all_partitions() -> None:
    """The earliest; what is due comes in the order of age, and the others go on waiting."""
    filling = accumulator()
    for now, partition_id in enumerate("312"):
        filling.put(partition_id, "a", 1, now)
    assert filling.deadline == 5
    assert filling.expired(6) == ["3", "1"]
    assert filling.deadline == 7
    assert not filling.is_ready("2")


def test_max_wait_time_of_zero_is_due_at_once() -> None:
    """With `max_wait_time` 0 the deadline is now."""
    filling = accumulator(max_wait_time=0)
    filling.put("0", "a", 1, 3)
    assert filling.deadline == 3
    assert filling.expired(3) == ["0"]


# ------------------------------------------------------------------------------------------------- flushing


def test_flush_makes_everything_ready() -> None:
    """Whatever its age; a partition with nothing to flush is not named."""
    filling = accumulator(max_events=2)
    for partition_id in "0112":
        filling.put(partition_id, "a", 1, 0)
    assert filling.flushed() == ["0", "2"]
    assert filling.flushed() == []
    assert filling.deadline is None
    assert [events(filling.take(each)) for each in "012"] == ["a", "aa", "a"]


def test_flush_of_one_partition_leaves_the_others() -> None:
    """Only its batch is ready."""
    filling = accumulator()
    for partition_id in "01":
        filling.put(partition_id, "a", 1, 0)
    filling.make_due(filling.lanes["1"])
    assert not filling.is_ready("0")
    assert filling.is_ready("1")
    assert filling.flushed() == ["0"]


def test_take_from_an_unknown_partition_gives_nothing() -> None:
    """Asking about it is no error."""
    assert accumulator().take("7") is None
    assert not accumulator().is_ready("7")


@pytest.mark.parametrize("limits", [{"max_events": 0}, {"max_bytes": 0}, {"max_wait_time": -1}])
def test_limits_of_an_accumulator_without_room_are_refused(limits: dict[str, int]) -> None:
    """A batch of nothing would never go out."""
    with pytest.raises(ValueError, match="room"):
        accumulator(**limits)


# ------------------------------------------------------------------------------------------------- outcomes


def test_batch_records_the_outcome_of_its_parts() -> None:
    """An event has the outcome of the part it is in, and only the waiters of that part are returned."""
    filling = accumulator()
    for each in "abc":
        filling.put("0", each, 1, 0)
    batch = filling.take("0")
    assert batch is not None
    batch.waiters.update(first=0, last=2)
    part = Part(0, 2, 7, None)
    assert batch.settle(part) == ["first"]
    assert [batch.part(index) for index in range(3)] == [part, part, None]
    batch.forget_events()
    assert (batch.events, batch.count, batch.part(0)) == ([], 0, part)


# ------------------------------------------------------------------------------------------------- a model


@dataclass
class _Group:
    """The events of one batch, as they should be."""

    events: list[int]
    size: int
    due_at: float
    is_due: bool = False
    is_full: bool = False


@dataclass
class _Plan:
    groups: list[_Group] = field(default_factory=list)


class AnyTraffic(RuleBasedStateMachine):
    """Events come out once, in order, in batches that were ready for a reason, and never too late."""

    @initialize(
        max_events=st.integers(1, 5),
        max_bytes=st.integers(10, 40),
        max_wait_time=st.integers(0, 6),
    )
    def begin(self, max_events: int, max_bytes: int, max_wait_time: int) -> None:
        self.limits = (max_events, max_bytes, max_wait_time)
        self.filling = accumulator(max_events, max_bytes, max_wait_time)
        self.now = 0.0
        self.count = 0
        self.plans = {each: _Plan() for each in "012"}

    @rule(partition_id=st.sampled_from("012"), size=st.integers(1, 50), passed=st.integers(0, 3))
    def add(self, partition_id: str, size: int, passed: int) -> None:
        max_events, max_bytes, max_wait_time = self.limits
        self.now += passed
        groups = self.plans[partition_id].groups
        ready_before = sum(each.is_due or each.is_full for each in groups)
        said = self.filling.put(partition_id, self.count, size, self.now)
        if groups and not groups[-1].is_full and groups[-1].size + size > max_bytes:
            groups[-1].is_full = True
        if not groups or groups[-1].is_full:
            groups.append(_Group([], 0, self.now + max_wait_time))
        groups[-1].events.append(self.count)
        groups[-1].size += size
        groups[-1].is_full = len(groups[-1].events) == max_events or groups[-1].size >= max_bytes
        assert said == (sum(each.is_due or each.is_full for each in groups) > ready_before)
        self.count += 1

    @rule(passed=st.integers(0, 5))
    def expire(self, passed: int) -> None:
        self.now += passed
        due = self.filling.expired(self.now)
        expected = []
        for partition_id, plan in self.plans.items():
            for group in plan.groups:
                if not group.is_due and not group.is_full and group.due_at <= self.now:
                    group.is_due = True
                    expected.append(partition_id)
        assert sorted(due) == sorted(expected)

    @rule()
    def flush(self) -> None:
        flushed = self.filling.flushed()
        expected = []
        for each, plan in self.plans.items():
            for group in plan.groups:
                if not group.is_due and not group.is_full:
                    group.is_due = True
                    expected.append(each)
        assert sorted(flushed) == sorted(expected)

    @rule(partition_id=st.sampled_from("012"))
    def take(self, partition_id: str) -> None:
        batch = self.filling.take(partition_id)
        groups = self.plans[partition_id].groups
        if not groups or not (groups[0].is_due or groups[0].is_full):
            assert batch is None
            return
        assert batch is not None
        group = groups.pop(0)
        assert (batch.events, batch.size) == (group.events, group.size)
        max_events, max_bytes, _ = self.limits
        assert len(batch.events) <= max_events
        assert batch.size <= max_bytes or len(batch.events) == 1

    @invariant()
    def the_deadline_is_the_earliest(self) -> None:
        if hasattr(self, "filling"):
            waiting = [
                group.due_at
                for plan in self.plans.values()
                for group in plan.groups
                if not group.is_due and not group.is_full
            ]
            assert self.filling.deadline == min(waiting, default=None)
            for each, plan in self.plans.items():
                assert self.filling.is_ready(each) == any(group.is_due or group.is_full for group in plan.groups)


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(stateful_step_count=40)


# ------------------------------------------------------------------------------------------------- room


def fill(room: BufferRoom, partition_id: str, size: int = 1) -> int:
    """Reserve until there is no room.

    Returns:
        How many events went in.
    """
    count = 0
    while count < 10_000 and room.reserve(partition_id, size):
        count += 1
    return count


def test_room_of_a_partition_ends_at_the_others_own_parts() -> None:
    """Half is common; of the other half each partition has its own share."""
    room = BufferRoom("0123", max_events=80, max_bytes=8000)
    assert fill(room, "0") == 50
    assert [fill(room, each) for each in "123"] == [10, 10, 10]
    assert room.events == 80


def test_room_of_a_partition_is_not_used_by_slow_others() -> None:
    """However many are full, one that holds nothing has its own part."""
    room = BufferRoom("0123", max_events=800, max_bytes=800)
    assert sum(fill(room, each, 10) for each in "012") * 10 == 700
    assert fill(room, "3", 10) == 10


def test_room_of_a_partition_has_a_limit_of_its_own() -> None:
    """In events, and in bytes."""
    room = BufferRoom("01", max_events=100, max_bytes=1000, max_partition_events=7, max_partition_bytes=500)
    assert fill(room, "0") == 7
    assert fill(room, "1", 100) == 5


@given(
    steps=st.lists(st.tuples(st.sampled_from("012"), st.sampled_from([0, 1, 10, 30, 90, 300])), max_size=60),
    partition_bytes=st.sampled_from([None, 10, 40]),
)
def test_room_in_bytes_is_exceeded_by_first_events_only(
    steps: list[tuple[str, int]], partition_bytes: int | None
) -> None:
    """The bytes held exceed the bound at most by what the partitions' first events exceed the partitions' shares by."""
    room = BufferRoom("012", max_events=100, max_bytes=120, max_partition_bytes=partition_bytes)
    share = 20 if partition_bytes is None else min(20, partition_bytes)
    held: dict[str, list[int]] = {each: [] for each in "012"}
    firsts = dict.fromkeys("012", 0)
    for partition_id, size in steps:
        if size and room.reserve(partition_id, size):
            if not held[partition_id]:
                firsts[partition_id] = size
            held[partition_id].append(size)
        elif not size and held[partition_id]:
            room.release(partition_id, 1, held[partition_id].pop(0))
            firsts[partition_id] = 0
        assert room.bytes == sum(map(sum, held.values()))
        assert room.bytes <= 120 + sum(max(0, first - share) for first in firsts.values())


def test_room_at_its_bound_takes_one_large_event_per_partition() -> None:
    """As the documents say for the defaults: 32 partitions and events of 1 MiB take less than 36 MiB."""
    mib, partitions = 1024 * 1024, [str(each) for each in range(32)]
    room = BufferRoom(partitions, max_events=100_000, max_bytes=8 * mib)
    assert [fill(room, each, mib) for each in partitions] == [4] + [1] * 31
    assert room.bytes == 35 * mib
    assert all(room.release(each, 1, mib) for each in partitions[1:])
    room = BufferRoom(partitions, max_events=100_000, max_bytes=8 * mib)
    assert sum(fill(room, each, mib // 8) for each in partitions) == 64


def test_room_takes_an_event_larger_than_itself_alone() -> None:
    """It would wait forever otherwise; while it is there, others have their own parts."""
    room = BufferRoom("01", max_events=100, max_bytes=100)
    assert fill(room, "0", 1000) == 1
    assert fill(room, "1", 5) == 5
    assert room.release("0", 1, 1000)
    assert fill(room, "1", 5) == 10


def test_release_gives_all_room_back() -> None:
    """All of it; and whether others profit is returned."""
    room = BufferRoom("01", max_events=8, max_bytes=800)
    assert fill(room, "0") == 6
    assert room.release("0", 1, 1)
    assert room.release("0", 3, 3)
    assert not room.release("0", 2, 2)
    assert (room.events, room.bytes) == (0, 0)
    assert fill(room, "1") == 6


def test_release_of_more_than_is_held_is_refused() -> None:
    """That would let in more than the bound later."""
    room = BufferRoom("01", max_events=8, max_bytes=800)
    room.reserve("0", 10)
    for events_given, size in ((2, 10), (1, 11)):
        with pytest.raises(ValueError, match="does not hold"):
            room.release("0", events_given, size)


@pytest.mark.parametrize(
    ("partitions", "limits"),
    [
        ("", {}),
        ("012", {"max_events": 2}),
        ("0", {"max_bytes": 0}),
        ("0", {"max_partition_events": 0}),
        ("0", {"max_partition_bytes": 0}),
    ],
)
def test_room_without_space_is_refused(partitions: str, limits: dict[str, int]) -> None:
    """Each partition needs room for an event."""
    with pytest.raises(ValueError, match="room"):
        BufferRoom(partitions, **{"max_events": 10, "max_bytes": 10, **limits})


class AnyHolding(RuleBasedStateMachine):
    """The bounds hold, own parts are there, and room comes back."""

    @initialize(
        max_events=st.integers(3, 20),
        max_bytes=st.integers(6, 100),
        max_partition_events=st.none() | st.integers(1, 20),
        max_partition_bytes=st.none() | st.integers(1, 100),
    )
    def begin(
        self, max_events: int, max_bytes: int, max_partition_events: int | None, max_partition_bytes: int | None
    ) -> None:
        self.room = BufferRoom(
            "012",
            max_events=max_events,
            max_bytes=max_bytes,
            max_partition_events=max_partition_events,
            max_partition_bytes=max_partition_bytes,
        )
        self.bounds = (max_events, max_bytes)
        self.own_bytes = min(max_bytes // 6, max_partition_bytes or max_bytes)
        self.own_events = min(max(1, max_events // 6), max_partition_events or max_events)
        self.limits = (max_partition_events or max_events, max_partition_bytes or max_bytes)
        self.held: dict[str, list[int]] = {each: [] for each in "012"}

    @rule(partition_id=st.sampled_from("012"), size=st.integers(1, 40))
    def reserve(self, partition_id: str, size: int) -> None:
        held = self.held[partition_id]
        before = (self.room.events, self.room.bytes)
        if self.room.reserve(partition_id, size):
            held.append(size)
        else:
            assert held, "an empty partition is let have an event"
            assert len(held) >= self.own_events or sum(held) + size > self.own_bytes, "its own part is there"
            assert (self.room.events, self.room.bytes) == before

    @rule(partition_id=st.sampled_from("012"), count=st.integers(1, 5))
    def release(self, partition_id: str, count: int) -> None:
        held = self.held[partition_id]
        gone, self.held[partition_id] = held[:count], held[count:]
        if gone:
            self.room.release(partition_id, len(gone), sum(gone))

    @invariant()
    def the_bounds_hold(self) -> None:
        if not hasattr(self, "room"):
            return
        max_events, max_bytes = self.bounds
        assert self.room.events == sum(map(len, self.held.values())) <= max_events
        assert self.room.bytes == sum(map(sum, self.held.values()))
        # What came into an empty partition and was larger than its own part is beside the bound.
        beside = sum(max(0, max(held, default=0) - self.own_bytes) for held in self.held.values())
        assert self.room.bytes <= max_bytes + beside
        for held in self.held.values():
            assert len(held) <= self.limits[0]
            assert sum(held) <= self.limits[1] or len(held) == 1 or held[0] > self.limits[1]

    def teardown(self) -> None:
        if hasattr(self, "room"):
            for each, held in self.held.items():
                if held:
                    self.room.release(each, len(held), sum(held))
            fresh = self.room.events, self.room.bytes
            assert fresh == (0, 0)
            assert fill(self.room, "0") == min(
                self.bounds[0] - 2 * self.own_events,
                self.limits[0],
                self.bounds[1] - 2 * self.own_bytes,
                self.limits[1],
            )


TestAnyHolding = AnyHolding.TestCase
TestAnyHolding.settings = settings(stateful_step_count=40)
