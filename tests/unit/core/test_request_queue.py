"""Turns: never more at a time than allowed, the urgent ones first, and none is forgotten."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.request_queue import RequestQueue


def _begun(queue: RequestQueue) -> list[int]:
    begun: list[int] = []
    while (request := queue.begin()) is not None:
        begun.append(request)
    return begun


def test_ask_begins_the_urgent_first_then_the_earlier() -> None:
    """Priority, then order, then arrival decide."""
    queue = RequestQueue(10, (10, 10))
    late, early, first, second = queue.ask(1, 5.0), queue.ask(1, 4.0), queue.ask(0, 9.0), queue.ask(0, 9.0)
    assert _begun(queue) == [first, second, early, late]


def test_ask_passes_over_a_priority_at_its_share() -> None:
    """What may not begin for its share delays none of another priority."""
    queue = RequestQueue(4, (4, 1))
    low = [queue.ask(1), queue.ask(1)]
    assert _begun(queue) == low[:1]
    high = [queue.ask(0) for _ in range(5)]
    assert _begun(queue) == high[:3]
    queue.leave(low[0])
    assert _begun(queue) == high[3:4]
    queue.leave(high[0])
    assert _begun(queue) == high[4:]
    queue.leave(high[1])
    assert _begun(queue) == low[1:]


def test_leave_of_a_waiting_request_gives_it_no_turn() -> None:
    """A request that was given up while it waited takes no room."""
    queue = RequestQueue(1, (1,))
    running, given_up, last = queue.ask(0), queue.ask(0), queue.ask(0)
    assert _begun(queue) == [running]
    queue.leave(given_up)
    assert queue.waiting_of(0) == [last]
    queue.leave(running)
    assert _begun(queue) == [last]


def test_begin_now_passes_none_that_waits_and_no_bound() -> None:
    """A new request runs at once only if none waits, its priority has room, and there is room at all."""
    queue = RequestQueue(3, (3, 1))
    low = queue.begin_now(1)
    assert low is not None
    assert queue.begin_now(1) is None
    assert (queue.running, queue.waiting) == (1, 0)
    waits = queue.ask(1)
    assert queue.begin_now(0) is None
    queue.leave(low)
    assert queue.begin_now(1) is None
    assert _begun(queue) == [waits]
    assert queue.begin_now(0) is not None
    assert queue.begin_now(0) is not None
    assert queue.begin_now(0) is None
    assert (queue.running, queue.waiting) == (3, 0)


@given(st.integers(0, 2**32), st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_queue_keeps_bounds_and_fairness_in_every_history(seed: int, limit: int, shares: list[int]) -> None:
    """At any moment no bound is passed, no request waits that could run, and in the end all requests have run."""
    rng = random.Random(seed)
    queue = RequestQueue(limit, shares)
    priority: dict[int, int] = {}
    waiting: set[int] = set()
    running: set[int] = set()
    for _ in range(60):
        match rng.randrange(4):
            case 3:
                level = rng.randrange(len(shares))
                if (begun := queue.begin_now(level)) is not None:
                    assert not waiting
                    priority[begun] = level
                    running.add(begun)
            case 0:
                request = queue.ask(rng.randrange(len(shares)), rng.random())
                priority[request] = queue_priority = _priority(queue, request, len(shares))
                assert queue_priority >= 0
                waiting.add(request)
            case 1 if running:
                request = rng.choice(sorted(running))
                running.discard(request)
                queue.leave(request)
            case 2 if waiting and rng.random() < 0.3:
                request = rng.choice(sorted(waiting))
                waiting.discard(request)
                queue.leave(request)
        for request in _begun(queue):
            assert request in waiting
            waiting.discard(request)
            running.add(request)
        counts = [sum(priority[each] == level for each in running) for level in range(len(shares))]
        assert queue.running == len(running) <= limit
        assert queue.waiting == len(waiting)
        assert all(count <= share for count, share in zip(counts, shares, strict=True))
        if len(running) < limit:
            assert all(counts[priority[each]] >= shares[priority[each]] for each in waiting)
    while running or waiting:
        assert running
        queue.leave(running.pop())
        for request in _begun(queue):
            waiting.discard(request)
            running.add(request)


def _priority(queue: RequestQueue, request: int, levels: int) -> int:
    return next((level for level in range(levels) if request in queue.waiting_of(level)), -1)
