"""The pictures: which rows they show, what stands in them, and that they are the same each time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.plot import MEASURED, plot
from benchmarks.report import Report, Row
from benchmarks.suite import BENCHMARKS

ROW = Row(
    name="receive: TLS, varied events",
    benchmark="receive",
    peer="azure-eventhub 5.15.1, sync",
    subject_value=6.5,
    peer_value=41.6,
    unit="µs CPU/event",
    subject_busy=0.97,
    must_be_busy=True,
    is_headline=True,
    build="pure Python",
    python="3.11.7",
)
"""A headline row."""


def make_report(*rows: Row) -> Report:
    """Make a report of a machine that there is not."""
    return Report(machine="1 × Abacus, Linux", versions={"CPython": "3.11.7", "uvloop": "not installed"}, rows=rows)


def texts(path: Path) -> list[str]:
    """Return the texts of a picture."""
    return [element.text or "" for element in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def widths(path: Path) -> list[float]:
    """Return the lengths of the bars of a picture, in their order."""
    bars = re.findall(
        r"M ([\d.]+) [\d.]+ \nL ([\d.]+) [\d.]+ \n[^\"]*z\n\" clip-path", path.read_text(encoding="utf-8")
    )
    return [float(end) - float(start) for start, end in bars]


def test_picture_states_what_it_shows(tmp_path: Path) -> None:
    """Both names, both values, the ratio, the unit, what is measured, machine, versions and build stand as text."""
    report = make_report(ROW, replace(ROW, name="receive: TCP", subject_value=4.0, peer_value=80.0))
    light, dark = plot(report, tmp_path / "new" / "folder")
    assert (light.name, dark.name) == ("receive-light.svg", "receive-dark.svg")
    for path in (light, dark):
        shown = texts(path)
        assert {"receive", "TLS, varied events", "TCP", "eventpump", "azure-eventhub 5.15.1, sync"} <= set(shown)
        assert {"6.5 (6.4× less)", "41.6", "4 (20× less)", "80"} <= set(shown)
        assert f"{MEASURED['receive']}, in µs CPU/event, shorter is better" in shown
        assert "1 × Abacus, Linux; CPython 3.11.7; pure Python, asyncio" in shown
    assert light.read_bytes() != dark.read_bytes()


def test_picture_bars_are_as_long_as_their_values(tmp_path: Path) -> None:
    """Bars of one unit share their axis, which begins at zero."""
    second = replace(ROW, name="receive: TCP", subject_value=4.0, peer_value=80.0)
    light, _ = plot(make_report(ROW, second), tmp_path)
    lengths = widths(light)
    assert [length / lengths[-1] * 80.0 for length in lengths] == pytest.approx([6.5, 41.6, 4.0, 80.0], rel=1e-3)


def test_picture_of_the_same_rows_has_the_same_bytes(tmp_path: Path) -> None:
    """Nothing in a picture is of the moment at which it was drawn, nor by chance."""
    first, second = (plot(make_report(ROW), tmp_path / name) for name in ("first", "second"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert b"date" not in first[0].read_bytes()


def test_picture_draws_headline_rows_that_count_only(tmp_path: Path) -> None:
    """Others, void ones, and those without a peer are left out, and a benchmark of which none is left."""
    left_out = [
        replace(ROW, name="receive: other", is_headline=False),
        replace(ROW, name="receive: void", subject_busy=0.1),
        replace(ROW, name="receive: alone", peer_value=None),
        replace(ROW, name="send", benchmark="send", is_headline=False),
    ]
    paths = plot(make_report(ROW, *left_out), tmp_path)
    assert [path.name for path in paths] == ["receive-light.svg", "receive-dark.svg"]
    assert not {"other", "void", "alone"} & set(texts(paths[0]))


def test_picture_repeats_what_rows_do_not_share(tmp_path: Path) -> None:
    """Units, and what the rows ran on, stand above the bars where they differ; more is called more."""
    other = replace(ROW, name="receive", unit="ms", subject_value=2.0, peer_value=1.0, loop="uvloop")
    light, _ = plot(make_report(ROW, other), tmp_path)
    shown = texts(light)
    assert "TLS, varied events, µs CPU/event (asyncio, pure Python, Python 3.11.7)" in shown
    assert "receive, ms (uvloop, pure Python, Python 3.11.7)" in shown
    assert "2 (2.0× more)" in shown


def test_picture_calls_a_difference_below_five_per_cent_none(tmp_path: Path) -> None:
    """Neither side is said to need less where the ratio is near one."""
    for ours in (40.0, 43.0):
        light, _ = plot(make_report(replace(ROW, subject_value=ours)), tmp_path)
        assert f"{ours:g} (about the same)" in texts(light)


def test_picture_of_a_quick_run_says_so(tmp_path: Path) -> None:
    """What --quick measured cannot be taken for a measurement."""
    light, _ = plot(replace(make_report(ROW), is_quick=True), tmp_path)
    assert any("not to be quoted" in text for text in texts(light))
    light, _ = plot(make_report(ROW), tmp_path)
    assert not any("not to be quoted" in text for text in texts(light))


def test_picture_of_curves_has_a_panel_for_each_quantity_and_a_colour_for_each_curve(tmp_path: Path) -> None:
    """Points are where they were measured on logarithmic axes, and the law is a line between them."""
    point = replace(ROW, name="", benchmark="scale", must_be_busy=False, over="partitions")
    rows = [
        replace(
            point,
            name=f"scale: {curve}, {at}, {panel}",
            panel=panel,
            curve=curve,
            at=at,
            subject_value=at * 2.0,
            peer_value=None if panel == "cost" else at * 2.0,
            unit="s",
        )
        for panel in ("start", "idle", "cost")
        for curve in ("in memory", "over AMQP")
        for at in (1, 4, 16)
    ]
    light, dark = plot(make_report(*rows), tmp_path)
    shown = texts(light)
    assert {"start, s", "idle, s", "cost, s", "1", "4", "16"} <= set(shown)
    assert {"\u25cf in memory, over partitions", "\u25cf over AMQP, over partitions"} <= set(shown)
    points = re.findall(
        r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill: #0969da', light.read_text(encoding="utf-8")
    )
    first = [(float(x), float(y)) for x, y in points[:3]]
    assert first[1][0] - first[0][0] == pytest.approx(first[2][0] - first[1][0], abs=0.01)
    assert first[0][1] - first[1][1] == pytest.approx(first[1][1] - first[2][1], abs=0.01)
    assert first[0][1] > first[2][1]
    before = light.read_bytes(), dark.read_bytes()
    plot(make_report(*rows), tmp_path)
    assert (light.read_bytes(), dark.read_bytes()) == before


def test_picture_has_a_description_for_every_benchmark() -> None:
    """The line below the title exists for each benchmark that there is."""
    assert MEASURED.keys() == BENCHMARKS.keys()


def test_plot_with_from_draws_from_a_file_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --from the pictures are of the rows of the file; the command names what it drew."""
    source, directory = tmp_path / "rows.json", tmp_path / "pictures"
    make_report(ROW, replace(ROW, name="send: 1 KiB", benchmark="send")).write(source)
    assert main(["receive", "--from", str(source), "--plot", str(directory)]) == 0
    assert sorted(path.name for path in directory.iterdir()) == ["receive-dark.svg", "receive-light.svg"]
    shown = capsys.readouterr().out
    assert str(directory / "receive-dark.svg") in shown
    assert "1 × Abacus" in shown
