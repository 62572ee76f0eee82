"""The benchmark of events that come at a pace: who counts as keeping up, and what the service's clock is for."""

from __future__ import annotations

import time
from array import array
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.certificates import certificate
from benchmarks.comparing import OURS, Figures
from benchmarks.events import FIRST_MOMENT, FIRST_SEQUENCE_NUMBER, milliseconds_after_first, samples
from benchmarks.paced import CATCHES_UP, FLOOR, KEEPS_UP, SLOWEST, Offer, _run, rows_of
from benchmarks.sides.common import PacedTally

OFFER = Offer(rate=1000, together=2, work="fields", seconds=3)
PEERS = ("slow", "late", "dear", "cheap")


def figures(cost: float, rate: float = 1000.0, p50: float = 2.0) -> Figures:
    """Make a run's figures."""
    return {
        "cost": cost,
        "rate": rate,
        "p50": p50,
        "p99": 3 * p50,
        "busy": cost * rate / 1e6,
        "faults": 0.0,
        "deliveries": rate / 2,
    }


def found(ours: Figures) -> dict[str, Figures]:
    """Make a round: one peer falls behind, one delivers late, and two keep up."""
    peers = (figures(1.0, rate=900.0), figures(2.0, p50=2 * SLOWEST), figures(300.0), figures(200.0, p50=50.0))
    return {OURS: ours, **dict(zip(PEERS, peers, strict=True)), FLOOR: figures(20.0)}


def test_rows_compare_with_the_cheapest_peer_that_keeps_up() -> None:
    """One that falls behind or collects events has no cost, however little CPU it takes, and the row says so."""
    cost, floor, p50, p99 = rows_of(OFFER, [found(figures(100.0))] * 3, PEERS)
    assert (cost.peer, cost.peer_value, cost.ratio) == ("cheap", 200.0, 2.0)
    assert "slow does not keep up" in cost.note
    assert "late does not keep up" in cost.note
    assert (floor.peer, floor.ratio) == (FLOOR, 0.2)
    assert (p50.subject_value, p50.peer_value, p99.subject_value, p99.peer_value) == (2.0, 50.0, 6.0, 150.0)


def test_peer_that_falls_behind_in_one_round_has_no_cost() -> None:
    """It is not the median that must keep up, but each run."""
    last = {**found(figures(100.0)), "cheap": figures(200.0, rate=KEEPS_UP * 1000 - 1)}
    assert rows_of(OFFER, [found(figures(100.0)), found(figures(100.0)), last], PEERS)[0].peer == "dear"


def test_peer_that_catches_up_at_full_speed_has_no_cost() -> None:
    """It had fallen behind: more events per second than are offered were measured over what had waited."""
    fast = {**found(figures(100.0)), "cheap": figures(40.0, rate=CATCHES_UP * 1000 + 1)}
    assert rows_of(OFFER, [fast] * 3, PEERS)[0].peer == "dear"


def test_row_is_void_where_eventpump_does_not_keep_up() -> None:
    """There is no figure of ours either."""
    (row,) = rows_of(OFFER, [found(figures(1.0, p50=2 * SLOWEST))] * 3, PEERS)
    assert row.is_void
    assert row.ratio is None
    assert f"{OURS} does not keep up" in row.note


def test_tally_takes_the_time_from_write_to_handler(tmp_path: Path) -> None:
    """Of each event of a batch, by the moment that the service stored for it."""
    kind, partitions, each = "telemetry", 2, 500
    tally = PacedTally(partitions, partitions * each, kind, str(tmp_path / "times"))
    made = samples(kind)
    for position in range(0, each, 2):
        for partition in range(partitions):
            first, last = position, position + 1
            tally.arrived = 1_000_000 * (10 * last + 7)
            moment = FIRST_MOMENT + timedelta(milliseconds=milliseconds_after_first(kind, last))
            size = len(made[last % len(made)].body)
            numbers = FIRST_SEQUENCE_NUMBER + first, FIRST_SEQUENCE_NUMBER + last
            tally.add(str(partition), *numbers, 2, size, moment)
    written = array("q", [1_000_000 * 10 * position for position in range(each)] * partitions)
    (tmp_path / "times").write_bytes(written.tobytes())
    result = tally.result()
    # The second event of each pair waited 7 ms, the first 17.
    assert 7 <= result["p50"] <= 17
    assert result["p99"] == 17


@pytest.mark.parametrize(("size", "missing"), [(1, 0), (0, 1)])
def test_tally_finds_what_was_not_sent(tmp_path: Path, size: int, missing: int) -> None:
    """A body of another size, and a number that is missing, though only once the run is over."""
    kind, each = "telemetry", 20
    tally = PacedTally(1, each, kind, str(tmp_path / "times"))
    made = samples(kind)
    for number in range(each):
        moment = FIRST_MOMENT + timedelta(milliseconds=milliseconds_after_first(kind, number))
        first = FIRST_SEQUENCE_NUMBER + number + (missing if number == 9 else 0)
        tally.add("0", first, first, 1, len(made[number % len(made)].body) + (size if number == 9 else 0), moment)
    (tmp_path / "times").write_bytes(array("q", [0] * each).tobytes())
    with pytest.raises(AssertionError, match=r"not what was sent|instead of"):
        tally.result()


def test_paced_service_delivers_every_event_at_its_time(tmp_path: Path) -> None:
    """The host receives as many events per second as are offered, and none before it was written."""
    began = time.perf_counter_ns()
    with certificate() as made:
        run = _run(Offer(rate=400, together=2, work="telemetry", seconds=1), made, tmp_path / "times", None)
    assert run["events"] > 200
    assert 0 < run["p50"] < (time.perf_counter_ns() - began) / 1e6
