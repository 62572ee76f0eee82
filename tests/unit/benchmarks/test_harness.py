"""The harness of the benchmarks: its arithmetic, its verdicts, and what it writes. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.meter import Meter, median_run
from benchmarks.report import Row, table, write_json

ASKED = {
    "name",
    "subject",
    "peer",
    "subject_value",
    "peer_value",
    "unit",
    "ratio",
    "subject_busy",
    "peer_busy",
}


def make_row(
    *,
    value: float = 2.0,
    peer: float | None = 30.0,
    busy: float | None = 0.95,
    goal: float | None = 10.0,
    limit: float | None = None,
) -> Row:
    """Make a row that must be busy."""
    return Row(
        name="receive",
        peer="another",
        subject_value=value,
        peer_value=peer,
        unit="µs CPU/event",
        subject_busy=busy,
        peer_busy=0.5,
        goal=goal,
        limit=limit,
        must_be_busy=True,
    )


def test_meter_measures_the_steady_part_only() -> None:
    """Cost, busy share and rate are those between the two counts, whatever came before and after."""
    moments = iter([(100.0, 1000.0), (103.0, 1004.0)])
    now: list[tuple[float, float]] = []

    def cpu() -> float:
        now.append(next(moments))
        return now[-1][0]

    meter = Meter(300, 1000, cpu=cpu, wall=lambda: now[-1][1])
    for _ in range(8):
        meter.add(250)
    assert meter.count == 2000
    assert meter.is_done
    # From 500 to 1000: 500 events, 3 s of CPU in 4 s.
    assert meter.result() == {"cost": 6000.0, "busy": 0.75, "rate": 125.0, "events": 500.0}


def test_one_count_cannot_be_begin_and_end() -> None:
    """A batch that jumps over the whole steady part measures nothing, and is not taken for a measurement."""
    meter = Meter(10, 20)
    meter.add(100)
    assert not meter.is_done
    with pytest.raises(AssertionError, match="never ended"):
        meter.result()
    with pytest.raises(ValueError, match="steady part"):
        Meter(20, 20)


def test_median_run_is_the_middle_one() -> None:
    """Of several runs the one with the middle cost is told whole; of two the lower."""
    runs = [{"cost": cost, "busy": cost / 10} for cost in (5.0, 1.0, 3.0)]
    assert median_run(list(runs)) == {"cost": 3.0, "busy": 0.3}
    assert median_run([{"cost": 4.0}, {"cost": 2.0}]) == {"cost": 2.0}


def test_ratio_says_how_much_cheaper_we_are() -> None:
    """The ratio is the peer's cost over ours; there is none without a peer or a cost."""
    assert make_row(value=2.0, peer=30.0).ratio == 15.0
    assert make_row(peer=None).ratio is None
    assert make_row(value=0.0).ratio is None


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (make_row(value=3.0, peer=30.0), "met"),
        (make_row(value=3.1, peer=30.0), "missed"),
        (make_row(value=3.1, peer=30.0, goal=None), ""),
        (make_row(value=0.9, peer=None, goal=None, limit=1.0), "met"),
        (make_row(value=1.1, peer=90.0, limit=1.0), "missed"),
        (make_row(value=0.0, goal=1.0), "met"),
        (make_row(busy=0.89), "void"),
        (make_row(busy=None), "void"),
        (make_row(busy=0.90), "met"),
    ],
)
def test_verdicts(row: Row, verdict: str) -> None:
    """A row is void where our process waited, and else met or missed where it has a goal."""
    assert row.verdict == verdict
    assert row.is_void is (verdict == "void")


def test_json_is_the_list_that_was_asked_for(tmp_path: Path) -> None:
    """The file is a list of objects, one per row, with all the names asked for."""
    path = tmp_path / "rows.json"
    write_json(path, [make_row(), make_row(peer=None)])
    first, second = json.loads(path.read_text(encoding="utf-8"))
    assert first.keys() >= ASKED
    assert (first["subject"], first["peer"], first["ratio"], first["peer_busy"]) == ("eventpump", "another", 15.0, 0.5)
    assert second.keys() >= ASKED
    assert second["ratio"] is None


@pytest.mark.parametrize(
    "row",
    [
        make_row(busy=0.5),
        make_row(peer=None, goal=None),
        Row(
            name="send: 1 KiB",
            peer="another",
            subject_value=2.0,
            peer_value=20.0,
            unit="µs CPU/event",
            note="on a busy machine",
            benchmark="send",
            is_headline=True,
            subject_faults=0.5,
            peer_faults=3.0,
            build="compiled",
            loop="uvloop",
            python="3.14.0",
            ratios=(9.5, 10.0, 11.0),
        ),
    ],
)
def test_row_comes_back_from_json(row: Row) -> None:
    """A row that was written as JSON is read back as it was, and its verdict with it."""
    value = json.loads(json.dumps(row.to_json()))
    assert Row.from_json(value) == row
    assert Row.from_json(value).verdict == row.verdict == value["verdict"]


def test_table_shows_every_row_and_says_what_void_means() -> None:
    """The table names each row and its verdict, and explains a void one."""
    text = table([make_row(), make_row(busy=0.5)])
    assert [line.split()[-1] for line in text.splitlines()[2:4]] == ["met", "void"]
    assert "measured waiting" in text
    assert "measured waiting" not in table([make_row()])


def test_quick_run_of_a_cheap_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run starts its side in a process of its own, prints the table, and writes a row per stage."""
    path = tmp_path / "rows.json"
    assert main(["stages", "--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text(encoding="utf-8"))
    shown = capsys.readouterr().out
    assert [row["peer_value"] for row in rows] == [1.0, 2.5, 1.5]
    for row in rows:
        assert row.keys() >= ASKED
        assert row["peer"] == "budget"
        assert row["subject_value"] > 0
        assert row["ratio"] == pytest.approx(row["peer_value"] / row["subject_value"])
        assert row["name"] in shown


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no benchmark ends the command at once, and the names there are are told."""
    with pytest.raises(SystemExit) as caught:
        main(["recieve"])
    assert caught.value.code == 2
    assert "'recieve'" in capsys.readouterr().err
