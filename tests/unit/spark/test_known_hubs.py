"""What the driver reads next, and how often: within the service's rate, and every partition in its turn."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eventpump.eventhubs.events import LastEnqueued
from eventpump.interfaces import HubProperties, PartitionProperties
from eventpump.spark.source.known_hubs import (
    REQUESTS_PER_SECOND,
    SETTLE_SECONDS,
    USUAL_SIZE,
    Item,
    KnownHubs,
    RequestBudget,
)

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


def hub(partitions: int) -> HubProperties:
    return HubProperties("telemetry", NOON, tuple(str(number) for number in range(partitions)))


def partition(partition_id: str, last: int = -1, first: int = 0) -> PartitionProperties:
    return PartitionProperties("telemetry", partition_id, first, last, str(last), NOON, last < first)


def known_hubs(partitions: int, last: int = -1, *, hubs: int = 1) -> KnownHubs:
    """Make what is known of hubs that were read at 0."""
    made = KnownHubs(hubs)
    for index in range(hubs):
        made.chosen(index, hub(partitions), hub(partitions).partition_ids, 0.0, 0.0)
        for each in hub(partitions).partition_ids:
            made.answered(index, partition(each, last), 0.0, 0.0)
    return made


@given(st.lists(st.tuples(st.floats(0, 0.6), st.integers(1, 30), st.booleans()), max_size=60))
def test_budget_allows_no_more_than_its_rate_in_any_second(steps: list[tuple[float, int, bool]]) -> None:
    """However requests come, in bursts or one by one, and whatever the service refuses."""
    budget, now, made = RequestBudget(), 0.0, []
    for wait, count, is_refused in steps:
        now += wait
        made += [now + budget.turn(now) for _ in range(count)]
        if is_refused:
            budget.refused(now)
    assert all(before <= after + 1e-6 for before, after in itertools.pairwise(made))
    for index, at in enumerate(made):
        assert sum(at <= other < at + 1.0 - 1e-6 for other in made[index:]) <= REQUESTS_PER_SECOND


def test_budget_is_halved_while_the_service_is_busy() -> None:
    """A refusal halves the rate for a minute, down to a least one."""
    budget = RequestBudget()
    budget.refused(0.0)
    assert (budget.rate(0.0), budget.rate(59.9), budget.rate(60.0)) == (20, 20, 40)
    for _ in range(9):
        budget.refused(100.0)
    assert budget.free(100.0) == 5


def test_wait_returns_the_delay_until_a_round_fits() -> None:
    """As soon as so many requests have left the second before."""
    budget = RequestBudget()
    assert budget.wait(33, 0.0) == 0.0
    for _ in range(33):
        assert budget.turn(0.0) == 0.0
    assert (budget.free(0.5), budget.wait(7, 0.5), budget.wait(33, 0.5)) == (7, 0.0, 0.5)
    assert budget.wait(1000, 0.5) == 0.5
    assert (budget.free(1.0), budget.wait(33, 1.0)) == (40, 0.0)


@given(st.integers(1, 150), st.integers(1, 3), st.integers(0, 150))
@example(150, 1, 60)
def test_rounds_read_everything_and_active_partitions_more_often(partitions: int, hubs: int, active: int) -> None:
    """No partition waits for longer than half as many rounds again as reading all of them in turn would take, however
    many others have events all the time."""
    known = known_hubs(partitions, hubs=hubs)
    count = REQUESTS_PER_SECOND
    read: list[list[Item]] = []
    rounds = -(-len(known) // (count - count // 3)) + 1
    for grown in range(1, 3 * rounds + 1):
        now = float(grown)
        found = known.next(count, now, active=count // 3)
        assert len(found) == len(set(found)) == min(count, len(known))
        read.append(found)
        for each in found:
            if each.partition_id is None:
                known.chosen(each.hub, hub(partitions), hub(partitions).partition_ids, now, now)
            else:
                is_active = int(each.partition_id) < active
                known.answered(each.hub, partition(each.partition_id, grown if is_active else -1), now, now)
    everything = {Item(index, None) for index in range(hubs)}
    everything |= {Item(index, str(each)) for index in range(hubs) for each in range(partitions)}
    for begin in range(len(read) - rounds + 1):
        assert set(itertools.chain(*read[begin : begin + rounds])) == everything


def test_rounds_read_a_few_active_partitions_each_time() -> None:
    """Of 128 partitions the three that get events are in every round."""
    known = known_hubs(128)
    for now in range(1, 9):
        for each in known.next(40, float(now), active=13):
            if each.partition_id is not None:
                busy = each.partition_id in {"5", "77", "120"}
                known.answered(0, partition(each.partition_id, now if busy else -1), float(now), float(now))
            else:
                known.chosen(0, hub(128), hub(128).partition_ids, float(now), float(now))
    assert {Item(0, "5"), Item(0, "77"), Item(0, "120")} <= set(known.next(40, 9.0, active=13))


def test_what_need_not_be_read_takes_no_place_of_another() -> None:
    """Neither by its turn, nor because it lately had events."""
    known = known_hubs(8)
    known.answered(0, partition("1", 5), 1.0, 1.0)
    shown = {Item(0, None), *(Item(0, str(number)) for number in range(1, 5))}
    assert known.next(3, 2.0, active=1, without=shown) == [Item(0, "0"), Item(0, "5"), Item(0, "6")]
    assert known.next(9, 2.0, active=3, without=shown) == [Item(0, each) for each in "0567"]


def test_event_that_a_link_has_shown_is_known_before_the_next_answer() -> None:
    """Its number, or that of the newest event if the service states it; an event that was known is no news."""
    known = known_hubs(1, last=4)
    assert not known.shown(0, "0", 4, None, 1.0)
    assert known.shown(0, "0", 5, None, 1.0)
    assert known.shown(0, "0", 6, LastEnqueued(9, "900", NOON, NOON), 1.0)
    assert not known.shown(0, "0", 8, LastEnqueued(9, "900", NOON, NOON), 1.0)
    (found,) = known.facts(0).partitions
    assert (found.last_enqueued_sequence_number, found.last_enqueued_offset) == (9, "900")
    assert not known.shown(0, "3", 8, None, 1.0)


def test_event_in_an_empty_partition_is_its_first() -> None:
    """A partition that retention has emptied begins with the event that was shown."""
    known = KnownHubs(1)
    known.chosen(0, hub(1), ["0"], 0.0, 0.0)
    known.answered(0, partition("0", last=6, first=7), 0.0, 0.0)
    assert known.shown(0, "0", 7, None, 1.0)
    assert known.facts(0).partitions == (PartitionProperties("telemetry", "0", 7, 7, "6", NOON, is_empty=False),)


@pytest.mark.parametrize(("asked_at", "last"), [(0.5, 9), (1.0 + SETTLE_SECONDS - 0.1, 9), (1.0 + SETTLE_SECONDS, 4)])
def test_answer_that_does_not_know_a_shown_event_is_not_a_loss(asked_at: float, last: int) -> None:
    """An answer from before the event, or one that lags, is ignored; one that says so later is a recreated hub."""
    known = known_hubs(1, last=4)
    known.shown(0, "0", 9, None, 1.0)
    known.answered(0, partition("0", 4), asked_at, asked_at + 0.1)
    assert known.facts(0).partitions[0].last_enqueued_sequence_number == last


def test_partitions_that_are_gone_are_forgotten_and_new_ones_are_read_next() -> None:
    """What a hub's properties no longer name is not asked for, and a late answer for it is dropped."""
    known = known_hubs(3)
    known.chosen(0, hub(5), ["0", "4"], 1.0, 1.0)
    assert known.unknown(float("-inf")) == []
    assert Item(0, "4") in known.unknown(0.0)
    known.answered(0, partition("1", 5), 1.0, 1.0)
    known.answered(0, partition("4", 5), 1.0, 1.0)
    assert [each.partition_id for each in known.facts(0).partitions] == ["0", "4"]
    assert known.unknown(1.0) == [Item(0, "0")]
    known.answered(0, partition("0", 5), 1.0, 1.0)
    assert known.unknown(1.0) == []
    assert known.ends(0) == {"0": 6, "4": 6}


def test_nothing_is_known_of_a_hub_that_was_recreated() -> None:
    """All its partitions are read anew, and an answer to a question from before may be of the former hub."""
    known = known_hubs(2, last=9)
    known.chosen(0, replace(hub(2), created_at=NOON + timedelta(days=1)), ["0", "1"], 1.0, 2.0)
    known.answered(0, partition("0", 9), 1.5, 2.5)
    assert known.facts(0).partitions == ()
    assert known.unknown(1.0) == [Item(0, "0"), Item(0, "1")]
    known.answered(0, partition("0", 3), 2.0, 2.5)
    known.answered(0, partition("1", 12), 2.5, 2.5)
    assert [each.last_enqueued_sequence_number for each in known.facts(0).partitions] == [3, 12]


@pytest.mark.parametrize(("first", "last", "is_asked"), [(2, 9, False), (4, 7, False), (2, 5, True), (1, 9, True)])
def test_hub_is_read_again_where_numbers_went_back(first: int, last: int, is_asked: bool) -> None:
    """It was probably recreated, which the creation time shows for all partitions."""
    known = known_hubs(1)
    known.answered(0, partition("0", 7, 2), 1.0, 1.0)
    known.answered(0, partition("0", last, first), 2.0, 2.0)
    assert known.unknown(0.0) == ([Item(0, None)] if is_asked else [])


def offset(partition_id: str, last: int, at: str) -> PartitionProperties:
    return replace(partition(partition_id, last), last_enqueued_offset=at)


def test_size_of_events_is_estimated_from_offsets() -> None:
    """First the mean over the partition's life, then what it was lately; without any, that of the hub's others."""
    known = KnownHubs(1)
    known.chosen(0, hub(3), ["0", "1", "2"], 0.0, 0.0)
    known.answered(0, offset("0", 10, "1000"), 0.0, 0.0)
    known.answered(0, offset("1", -1, "-1"), 0.0, 0.0)
    known.answered(0, offset("2", -1, "-1"), 0.0, 0.0)
    assert known.facts(0).sizes == {"0": 100.0, "1": 100.0, "2": 100.0}
    known.answered(0, offset("0", 20, "4000"), 1.0, 1.0)
    assert known.facts(0).sizes["0"] == 200.0
    known.answered(0, offset("1", 4, "2000"), 1.0, 1.0)
    assert known.facts(0).sizes == {"0": 200.0, "1": 500.0, "2": 350.0}
    known.answered(0, offset("2", 0, "0"), 1.0, 1.0)
    assert known.facts(0).sizes["2"] == 350.0
    assert known_hubs(1).facts(0).sizes == {"0": USUAL_SIZE}


def test_size_of_events_is_unknown_where_offsets_are_no_positions() -> None:
    """As in namespaces with geo-replication."""
    known = KnownHubs(1)
    known.chosen(0, hub(1), ["0"], 0.0, 0.0)
    known.answered(0, offset("0", 10, "1:77:1000"), 0.0, 0.0)
    assert known.facts(0).sizes == {}
    assert known.facts(0).snapshot("telemetry").bounds["0"].mean_size is None


def test_answer_to_an_earlier_request_changes_nothing() -> None:
    """Two requests for the same may be under way: a batch that the later one's answer has planned would seem lost."""
    known = known_hubs(1, last=4)
    known.answered(0, partition("0", last=9), 2.0, 3.0)
    known.answered(0, partition("0", last=8), 1.0, 3.5)
    assert known.ends(0) == {"0": 10}
    assert not known.unknown(0.0)
    created_at = NOON + timedelta(seconds=5)
    known.chosen(0, replace(hub(1), created_at=created_at), ["0"], 5.0, 6.0)
    known.chosen(0, hub(1), ["0"], 4.0, 6.5)
    assert known.created_at(0) == created_at
