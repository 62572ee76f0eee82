"""The benchmarks of many partitions and of keyed processors: their sides measure, and the law is found."""

from __future__ import annotations

import math

import pytest

from benchmarks.processes import EmulatorProcess, run_side
from benchmarks.scale import FLEET, FLEET_PARTITIONS, law, requests, rows_of
from benchmarks.suite import BENCHMARKS
from benchmarks.telemetry import telemetry

TIMEOUT = 60.0


def test_law_of_a_straight_line_is_its_parts() -> None:
    """A fixed part and one per partition; where the values are no line, both small and large ones count."""
    assert law({number: 2 + 0.5 * number for number in (1, 32, 1024)}) == pytest.approx((2, 0.5))
    fixed, each = law({1: 1.0, 32: 33.0, 256: 250.0, 1024: 1100.0})
    assert 0.9 <= fixed + each <= 1.1
    assert fixed + each * 1024 == pytest.approx(1100, rel=0.15)


def test_hosts_of_several_partitions_have_every_figure() -> None:
    """Each partition has its events, whichever host takes it."""
    found = run_side("scale:scale", TIMEOUT, partitions=6, hosts=2, each=10, idle=0.0)
    assert found.keys() == {"start", "start_cpu", "memory", "cost"}
    assert found["start"] > 0
    assert found["cost"] > 0


def test_host_of_a_service_has_every_figure() -> None:
    """Another process sends the events that come while it runs."""
    with EmulatorProcess(3) as emulator:
        place = {"connection_string": emulator.connection_string, "hub": emulator.HUB}
        run_side("ours:fill", TIMEOUT, **place, partitions=3, events=3)
        found = run_side("scale:scale", TIMEOUT, partitions=3, hosts=1, each=20, idle=0.0, **place)
    assert found.keys() == {"start", "start_cpu", "memory", "cost"}
    assert found["cost"] > 0


@pytest.mark.long  # fleets settle for a minute
@pytest.mark.timeout(300)
def test_idle_fleet_asks_its_store_no_more_than_that_of_azure_eventhub() -> None:
    """In a cycle each host lists once and renews what it owns, as the peer's does."""
    logged: list[str] = []
    cycle, minute = requests(10.0, logged.append)
    fair = 1 + FLEET_PARTITIONS / FLEET
    # The first and the last of the intervals are cut; and every thirtieth cycle of a host looks for subscriptions.
    assert cycle.subject_value == pytest.approx(fair, rel=0.08), logged
    assert cycle.peer_value == pytest.approx(fair, rel=0.08), logged
    assert minute.peer_value is not None


def test_rows_are_points_of_curves_beside_their_law() -> None:
    """The cost per event grows by no law."""
    figures = {"start": 1.0, "start_cpu": 1.0, "idle": 1.0, "memory": 1.0, "cost": 2.0}
    rows = rows_of("in memory", dict.fromkeys((1, 32), figures), "partitions", lambda number: f"{number} of them")
    assert len({row.name for row in rows}) == len(rows) == 10
    assert {(row.panel, row.at) for row in rows if row.peer_value is None} == {
        ("cost per event", 1),
        ("cost per event", 32),
    }
    assert all(row.peer_value == pytest.approx(1.0) for row in rows if row.peer_value is not None)
    assert {row.note for row in rows} == {"", "law: 1 + 0 × partitions"}


def test_each_case_of_telemetry_is_measured() -> None:
    """Each row has a figure of one run, and each limit stands beside one."""
    rows = telemetry(True, lambda _: None)
    assert {row.limit for row in rows} == {2.0, 80.0, 86.0, 680.0, None}
    assert all(math.isfinite(row.subject_value) for row in rows)


def test_keyed_and_plain_processors_take_turns_over_the_same_events() -> None:
    """And the difference is that of both."""
    found = run_side("keyed:keyed", TIMEOUT, events=300, rounds=1, keys=7, waits=True)
    assert found["over"] == pytest.approx(found["keyed"] - found["plain"])


def test_both_can_be_run_by_name() -> None:
    """As the other benchmarks."""
    assert {"scale", "keyed"} <= BENCHMARKS.keys()
