"""The harness of the benchmarks: its arithmetic, its verdicts, and what it writes. No time is asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.meter import Meter, median_run
from benchmarks.report import Report, Row, spread, table
from eventpump.reports import build_info

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
        build="pure Python",
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

    faults = iter([7000, 7250])
    meter = Meter(300, 1000, cpu=cpu, wall=lambda: now[-1][1], faults=lambda: next(faults))
    for _ in range(8):
        meter.add(250)
    assert meter.count == 2000
    assert meter.is_done
    # From 500 to 1000: 500 events, 3 s of CPU in 4 s, 250 page faults.
    assert meter.result() == {"cost": 6000.0, "busy": 0.75, "rate": 125.0, "faults": 0.5, "events": 500.0}


def test_meter_refuses_one_count_as_begin_and_end() -> None:
    """A batch that jumps over the whole steady part measures nothing, and is not taken for a measurement."""
    meter = Meter(10, 20)
    meter.add(100)
    assert not meter.is_done
    with pytest.raises(AssertionError, match="never ended"):
        meter.result()
    with pytest.raises(ValueError, match="steady part"):
        Meter(20, 20)


def test_median_run_is_the_middle_one() -> None:
    """Of several runs the one with the middle cost is reported whole; of two the lower."""
    runs = [{"cost": cost, "busy": cost / 10} for cost in (5.0, 1.0, 3.0)]
    assert median_run(list(runs)) == {"cost": 3.0, "busy": 0.3}
    assert median_run([{"cost": 4.0}, {"cost": 2.0}]) == {"cost": 2.0}


def test_ratio_is_the_peers_cost_over_ours() -> None:
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
def test_verdict_is_void_met_or_missed(row: Row, verdict: str) -> None:
    """A row is void where our process waited, and else met or missed where it has a goal."""
    assert row.verdict == verdict
    assert row.is_void is (verdict == "void")


def make_report(*rows: Row, repeats: dict[str, tuple[float, ...]] | None = None) -> Report:
    """Make a report of a machine that there is not."""
    return Report(machine="1 × Abacus", versions={"CPython": "3.11.7"}, rows=list(rows), repeats=repeats or {})


def test_json_report_has_the_names_asked_for(tmp_path: Path) -> None:
    """The file is an object: the machine, the versions, an object per row with all the names asked for, the repeats."""
    path = tmp_path / "rows.json"
    make_report(make_row(), make_row(peer=None), repeats={"receive": (14.0, 15.0)}).write(path)
    value = json.loads(path.read_text(encoding="utf-8"))
    assert (value["machine"], value["versions"]) == ("1 × Abacus", {"CPython": "3.11.7"})
    assert value["repeats"] == {"receive": [14.0, 15.0]}
    first, second = value["rows"]
    assert first.keys() >= ASKED
    assert (first["subject"], first["peer"], first["ratio"], first["peer_busy"]) == ("eventpump", "another", 15.0, 0.5)
    assert second.keys() >= ASKED
    assert second["ratio"] is None


def test_report_read_from_its_file_is_the_same(tmp_path: Path) -> None:
    """A report that was written is read back as it was."""
    path = tmp_path / "rows.json"
    row = replace(make_row(), benchmark="receive", ratios=(14.0, 15.0, 16.0))
    report = replace(make_report(row, repeats={"receive": (14.5, 15.0)}), is_quick=True)
    report.write(path)
    assert Report.read(path) == report


def test_report_reads_a_bare_list_of_rows(tmp_path: Path) -> None:
    """The files of earlier versions held the rows only; the benchmark is the first part of a row's name."""
    path = tmp_path / "rows.json"
    old = {name: each for name, each in make_row().to_json().items() if name in ASKED}
    path.write_text(json.dumps([{**old, "name": "send: 1 KiB"}]), encoding="utf-8")
    report = Report.read(path)
    assert [(row.benchmark, row.ratio) for row in report.rows] == [("send", 15.0)]
    assert (report.machine, report.repeats) == ("", {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        "{}",
        "[7]",
        '[{"name": 7}]',
        '{"rows": [{"name": "a"}], "machine": "", "versions": {}}',
        '{"rows": [], "repeats": 7, "machine": "", "versions": {}}',
    ],
)
def test_report_of_a_file_without_rows_raises_value_error(tmp_path: Path, text: str) -> None:
    """A file that holds no rows raises ValueError, whatever it holds."""
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"."):
        Report.read(path)


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
def test_row_read_from_json_is_the_same(row: Row) -> None:
    """A row that was written as JSON is read back as it was, and its verdict with it."""
    value = json.loads(json.dumps(row.to_json()))
    assert Row.from_json(value) == row
    assert Row.from_json(value).verdict == row.verdict == value["verdict"]


def test_table_shows_every_row_and_explains_void() -> None:
    """The table names each row and its verdict, and explains a void one."""
    text = table([make_row(), make_row(busy=0.5)])
    assert [line.split()[-1] for line in text.splitlines()[2:4]] == ["met", "void"]
    assert "measured waiting" in text
    assert "measured waiting" not in table([make_row()])


def test_table_shows_what_the_rows_ran_on() -> None:
    """Loop, build and Python stand below the table where they are those of all rows, and else in a column."""
    one = replace(make_row(), python="3.14.0")
    assert table([one, one]).count("  all on asyncio, pure Python, Python 3.14.0") == 1
    heading, _, first, second, footer = table([one, replace(one, loop="uvloop")]).splitlines()
    assert " on " in heading
    assert (" asyncio " in first, " uvloop " in second) == (True, True)
    assert footer == "  all on pure Python, Python 3.14.0"
    _, _, first, second, *rest = table([one, replace(one, loop="uvloop", build="compiled")]).splitlines()
    assert "asyncio, pure Python, Python 3.14.0" in first
    assert "uvloop, compiled, Python 3.14.0" in second
    assert rest == []


def test_table_shows_faults_and_spread_where_there_are_any() -> None:
    """Page faults, and the spread of the repeats, or else of the rounds, are columns only where they were measured."""
    assert not {"spread", "faults"} & set(table([make_row()]).split())
    row = replace(make_row(), subject_faults=0.25, peer_faults=7.5, ratios=(10.0, 12.0, 11.0))
    heading, _, line, *_ = table([row]).splitlines()
    assert heading.split().count("faults") == 2
    assert {"0.25", "7.5", "18%"} <= set(line.split())
    assert "20%" in table([row], {"receive": (9.0, 10.0, 11.0)}).splitlines()[2].split()


def test_spread_is_range_over_median() -> None:
    """(max - min) / median; there is none of fewer than two runs."""
    assert spread((8.0, 10.0, 11.0)) == pytest.approx(0.3)
    assert spread((8.0, 12.0)) == pytest.approx(0.4)
    assert spread((8.0,)) is None
    assert spread(()) is None
    assert spread((0.0, 0.0)) is None


def test_quick_run_prints_the_table_and_writes_a_row_per_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quick run starts its side in a process of its own, prints the table, and writes a row per stage and build.

    The builds of a stage stand side by side, in terms of one floor.
    """
    path = tmp_path / "rows.json"
    assert main(["stages", "--quick", "--json", str(path)]) == 0
    value = json.loads(path.read_text(encoding="utf-8"))
    rows = value["rows"]
    assert value["quick"] is True
    shown = capsys.readouterr().out
    builds = ["pure Python", "compiled core"] if build_info().is_compiled else ["pure Python"]
    floor, stages = rows[0], rows[1:]
    assert [row["limit"] for row in stages if row["build"] == "pure Python"] == [
        *(1.0, 2.5, None, 1.5, None, None, None, None),
        *(14.0, None, None, None),
    ]
    assert [row["build"] for row in stages] == 12 * builds
    assert ["above the four fields" in row["note"] for row in stages[:: len(builds)]].count(True) == 4
    for row in rows:
        assert row.keys() >= ASKED
        assert row["benchmark"] == "stages"
        assert row["subject_value"] > 0
        assert row["name"] in shown
    assert [floor[name] for name in ("subject", "peer_value", "ratio", "build")] == ["floor", None, None, "pure Python"]
    for row in stages:
        assert (row["peer"], row["peer_value"]) == ("floor", floor["subject_value"])
        assert row["ratio"] == pytest.approx(row["peer_value"] / row["subject_value"])


def test_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no benchmark ends the command at once, and the existing names are listed."""
    with pytest.raises(SystemExit) as caught:
        main(["recieve"])
    assert caught.value.code == 2
    assert "'recieve'" in capsys.readouterr().err
