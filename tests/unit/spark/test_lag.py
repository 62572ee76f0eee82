"""How far a query is behind: events from its offsets, seconds from how its partitions were seen to grow."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.spark.source.lag import LagLedger, Offsets, PartitionLag, QueryLag, parse_offsets
from eventpump.spark.source.offsets import HubOffset, SourceOffset


def offsets(hub: str = "hub", *, year: int | None = None, **numbers: int) -> str:
    """Make an offset; of a hub that was created in a year, if one is given."""
    created = None if year is None else datetime(year, 1, 1, tzinfo=UTC)
    following = {name.removeprefix("p"): number for name, number in numbers.items()}
    return json.dumps(SourceOffset.of([HubOffset(hub, following, created_at=created)]).to_json())


def behind(ledger: LagLedger, time: float, position: int, latest: int) -> PartitionLag:
    (lag,) = ledger.progressed("run", time, [(offsets(p0=position), offsets(p0=latest))])
    return lag


def test_lag_in_events_is_the_difference_of_the_offsets() -> None:
    """Per hub and partition, in the order of their numbers."""
    source = (offsets(p0=5, p10=7, p2=1), offsets(p0=9, p10=7, p2=4))
    found = LagLedger().progressed("run", 0.0, [source, (offsets("a", p0=1), offsets("a", p0=2))])
    assert [(each.hub, each.partition_id, each.events) for each in found] == [
        ("a", "0", 1),
        ("hub", "0", 4),
        ("hub", "2", 3),
        ("hub", "10", 0),
    ]


def test_lag_of_a_hub_that_the_option_spells_in_another_case() -> None:
    """A query's latest offsets have the option's spelling, and its positions the checkpoint's: names have no case."""
    ledger = LagLedger()
    for time, hub in ((100.0, "telemetry"), (110.0, "Telemetry")):
        (lag,) = ledger.progressed("run", time, [(offsets(hub, p0=5), offsets("TELEMETRY", p0=9))])
        rates = (None, None) if time == 100.0 else (0.0, 0.0)
        assert lag == PartitionLag(hub, "0", 5, 4, time - 100.0, True, *rates)


def test_lag_in_seconds_is_the_age_of_the_first_unread_event() -> None:
    """It came between two looks, evenly with those beside it."""
    ledger = LagLedger()
    behind(ledger, 100.0, 10, 10)
    behind(ledger, 110.0, 10, 20)
    assert behind(ledger, 120.0, 14, 30).seconds == pytest.approx(120.0 - 105.0)


def test_lag_of_a_backlog_before_the_first_look_is_a_lower_bound() -> None:
    """How long it has been there is not known, and is not made up."""
    ledger = LagLedger()
    assert behind(ledger, 100.0, 0, 50) == PartitionLag("hub", "0", 0, 50, 0.0, is_lower_bound=True)
    assert behind(ledger, 130.0, 49, 60) == PartitionLag("hub", "0", 49, 11, 30.0, True, 10 / 30, 49 / 30)
    assert not behind(ledger, 131.0, 50, 60).is_lower_bound


def test_lag_does_not_count_an_idle_time() -> None:
    """What comes after a quiet hour came when the query last looked, and not in the middle of that hour."""
    ledger = LagLedger()
    behind(ledger, 0.0, 10, 10)
    ledger.idled("run", 3600.0)
    assert behind(ledger, 3602.0, 10, 12).seconds <= 2.0


def test_lag_of_a_recreated_hub_starts_over() -> None:
    """Ends that run backwards forget what was seen before."""
    ledger = LagLedger()
    behind(ledger, 0.0, 100, 120)
    assert behind(ledger, 10.0, 0, 5) == PartitionLag("hub", "0", 0, 5, 0.0, is_lower_bound=True)


@pytest.mark.parametrize("new", [40, 50, 60])
def test_lag_and_rates_of_a_recreated_hub_start_over_at_any_size(new: int) -> None:
    """With fewer events than before, as many or more: its creation time shows it. What came and was read of the former
    hub is no rate of the new one, and the lag is of its events."""
    ledger = LagLedger()

    def lag(time: float, position: int, latest: int, *, year: int, ends: int) -> PartitionLag:
        (found,) = ledger.progressed(
            "run", time, [(offsets(year=year, p0=position), offsets("HUB", year=ends, p0=latest))]
        )
        return found

    lag(0.0, 30, 50, year=2030, ends=2030)
    assert rates(lag(10.0, 50, 50, year=2030, ends=2030)) == (0.0, 2.0)
    assert lag(20.0, 10, new, year=2031, ends=2031) == PartitionLag("hub", "0", 10, new - 10, 0.0, is_lower_bound=True)
    after = lag(30.0, new, new + 5, year=2031, ends=2031)
    assert after == PartitionLag("hub", "0", new, 5, 8.0, False, 0.5, (new - 10) / 10)


@pytest.mark.parametrize("new", [40, 50, 60])
def test_lag_of_a_hub_that_is_recreated_after_a_batch_is_all_its_events(new: int) -> None:
    """The query goes on at the first of them; what it had read before is of the former hub."""
    ledger = LagLedger()
    both = offsets(year=2030, p0=50)
    ledger.progressed("run", 0.0, [(both, both)])
    (found,) = ledger.progressed("run", 10.0, [(both, offsets(year=2031, p0=new))])
    assert found == PartitionLag("hub", "0", 0, new, 0.0, is_lower_bound=True)
    (found,) = ledger.progressed("run", 20.0, [(offsets(year=2031, p0=20), offsets(year=2031, p0=new))])
    assert (found.events, found.seconds, rates(found)) == (new - 20, 10.0, (0.0, 2.0))


def test_lag_of_runs_and_sources_is_kept_apart() -> None:
    """The same hub in two sources, or in another run, has a growth of its own; an ended run is forgotten."""
    ledger = LagLedger()
    two = [(offsets(p0=0), offsets(p0=10)), (offsets(p0=10), offsets(p0=10))]
    ledger.progressed("run", 0.0, two)
    first, second = ledger.progressed("run", 5.0, [two[0], (offsets(p0=10), offsets(p0=20))])
    assert (first.seconds, first.is_lower_bound) == (5.0, True)
    assert not second.is_lower_bound
    assert second.seconds == pytest.approx(4.5)
    ledger.ended("run")
    assert behind(ledger, 6.0, 0, 10).seconds == 0.0


@pytest.mark.parametrize(
    "text", [None, "", "null", "None", "7", "[]", '"x"', '{"hub": 3}', '{"hub": {"x": 1}}', '{"hub": {"0": "1"}}']
)
def test_lag_leaves_out_offsets_of_other_sources(text: str | None) -> None:
    """Only the shape that our source writes is read; a query of other sources has no lag."""
    assert parse_offsets(text) is None
    assert LagLedger().progressed("run", 0.0, [(text, text)]) == ()


def test_lag_leaves_out_the_start_in_a_first_batch() -> None:
    """The first batch's offset keeps the batch's start too, which is nothing to be behind of."""
    first = SourceOffset.of([HubOffset("Hub", {"0": 7}, {"0": 3}, datetime(2030, 1, 1, tzinfo=UTC))]).to_json()
    assert parse_offsets(json.dumps(first)) == Offsets({("Hub", "0"): 7}, {"hub": "2030-01-01T00:00:00+00:00"})


def rates(lag: PartitionLag) -> tuple[float | None, float | None]:
    return lag.arrival_rate, lag.read_rate


def test_rates_are_events_per_second_since_the_batch_before() -> None:
    """Of the partition's growth and of what was read; a time without events counts, and what came in it too."""
    ledger = LagLedger()
    assert rates(behind(ledger, 100.0, 10, 40)) == (None, None)
    assert rates(behind(ledger, 110.0, 30, 45)) == (0.5, 2.0)
    assert rates(behind(ledger, 112.0, 45, 45)) == (0.0, 7.5)
    for time in (120.0, 130.0, 140.0):
        ledger.idled("run", time)
    assert rates(behind(ledger, 152.0, 65, 65)) == (0.5, 0.5)


def test_rates_without_two_figures_are_unknown() -> None:
    """At first, after a restart, for a partition that is added, in a hub that was recreated, and in no time."""
    ledger = LagLedger()
    behind(ledger, 0.0, 5, 5)
    lags = ledger.progressed("run", 2.0, [(offsets(p0=7, p1=4), offsets(p0=7, p1=9))])
    assert list(map(rates, lags)) == [(1.0, 1.0), (None, None)]
    assert rates(behind(ledger, 4.0, 3, 3)) == (None, None)
    assert rates(behind(ledger, 6.0, 3, 5)) == (1.0, 0.0)
    assert rates(behind(ledger, 6.0, 5, 5)) == (None, None)
    assert rates(behind(ledger, 5.0, 5, 5)) == (None, None)
    assert rates(behind(ledger, 9.0, 0, 7)) == (None, None)
    ledger.ended("run")
    assert rates(behind(ledger, 11.0, 9, 9)) == (None, None)


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 50), st.integers(0, 60)), min_size=2, max_size=700))
def test_rates_add_up_to_what_arrived_and_what_was_read(steps: list[tuple[float, int, int]]) -> None:
    """Over the time of each, however coarse the memory of the growth becomes; and their difference is that of the
    lag."""
    ledger, time, position, latest = LagLedger(), 0.0, 0, 0
    arrived = read = 0.0
    before = behind(ledger, time, position, latest)
    for wait, grown, taken in steps:
        time += wait
        latest += grown
        position = min(latest, position + taken)
        lag = behind(ledger, time, position, latest)
        assert lag.arrival_rate is not None
        assert lag.read_rate is not None
        arrived += lag.arrival_rate * wait
        read += lag.read_rate * wait
        assert (lag.arrival_rate - lag.read_rate) * wait == pytest.approx(lag.events - before.events, abs=1e-6)
        before = lag
    assert arrived == pytest.approx(latest, abs=1e-3)
    assert read == pytest.approx(position, abs=1e-3)


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=700))
def test_lag_is_never_negative_nor_older_than_the_first_look(steps: list[tuple[float, int, int]]) -> None:
    """Whatever the growth and the reading: zero events are zero seconds."""
    ledger, time, position, latest = LagLedger(), 0.0, 0, 0
    for wait, grown, read in steps:
        time += wait
        latest += grown
        position = min(latest, position + read)
        lag = behind(ledger, time, position, latest)
        assert lag.events == latest - position
        assert 0.0 <= lag.seconds <= time - steps[0][0] + 1e-6
        assert lag.seconds == 0.0 or lag.events > 0


def test_lag_of_a_query_that_falls_behind_takes_bounded_memory() -> None:
    """What is remembered of the growth gets coarser, and the age of the first unread event stays about right."""
    ledger = LagLedger()
    for moment in range(4999):
        behind(ledger, float(moment), moment // 10, moment)
    lag = behind(ledger, 4999.0, 499, 4999)
    assert len(ledger._runs["run"][0, "hub", "0"].ends) <= 512
    assert lag.seconds == pytest.approx(4999 - 499, rel=0.05)


def test_lag_of_a_query_is_described_in_one_line() -> None:
    """Totals, and the spread over partitions, with a mark where a figure is a lower bound."""
    partitions = (PartitionLag("hub", "0", 0, 10, 4.0, is_lower_bound=True), PartitionLag("hub", "1", 5, 0, 0.0, False))
    lag = QueryLag("id", "run", "bars", 3, 0.0, partitions)
    assert (lag.total, lag.events.max, lag.events.avg, lag.seconds.min) == (10, 10, 5, 0.0)
    assert lag.describe() == (
        "query bars, batch 3: 10 events behind; per partition min 0, avg 5, max 10; seconds min 0.0, avg 2.0, max >=4.0"
    )
    assert (lag.arrival_rate, lag.read_rate) == (None, None)
    known = replace(lag, partitions=(partitions[0], replace(partitions[1], arrival_rate=3.25, read_rate=0.0)))
    assert (known.arrival_rate, known.read_rate) == (3.25, 0.0)
    first = replace(partitions[0], arrival_rate=1.0, read_rate=2.0)
    both = replace(known, partitions=(first, known.partitions[1]))
    assert both.describe().startswith(
        "query bars, batch 3: 10 events behind, 4.2 arrive and 2.0 are read per second; per partition min 0"
    )
