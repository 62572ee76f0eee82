"""What README.md and docs/comparison.md state of speed is what the newest results say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.figures import DOCUMENTS, FIGURES, cells, newest, stated
from benchmarks.report import Report, Row

ROW = Row(name="receive: a", peer="theirs", subject_value=2.04, peer_value=31.0, unit="µs CPU/event", build="")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_state_the_newest_results(path: Path) -> None:
    """Each figure is the range of the newest two full runs; `python -m benchmarks.figures` writes them."""
    text = path.read_text(encoding="utf-8")
    assert stated(text, newest()) == text


def test_every_figure_is_stated() -> None:
    """Each figure has a row in one of the documents."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert [label for label in FIGURES if f"\n| {label} | " not in text] == []


def test_cells_are_ranges_over_runs() -> None:
    """Costs and ratios are shown from the lowest to the highest of the runs, once where they are the same."""
    other = replace(ROW, subject_value=3.0, peer_value=31.2)
    assert cells([ROW, other]) == ("2.0 to 3.0 µs", "31 µs: **10 to 15 times** as much")


def test_cells_say_where_the_peer_is_better() -> None:
    """A ratio below 1 is called what it is."""
    assert cells([ROW, replace(ROW, subject_value=62.0)])[1] == "31 µs: **0.5 to 15 times** as much (better)"


def test_cells_say_where_no_peer_keeps_up() -> None:
    """Where no peer keeps up in one of the runs, there is no figure of it."""
    assert cells([ROW, replace(ROW, peer_value=None)]) == ("2.0 µs", "none keeps up")


def test_newest_refuses_short_runs(tmp_path: Path) -> None:
    """Two results of full runs are needed; `--quick` is not one, and a third, older one is not read."""
    report = Report(machine="", versions={}, rows=[ROW])
    (tmp_path / "2026-01-01.json").write_text("no longer readable")
    report.write(tmp_path / "2026-01-02.json")
    with pytest.raises(ValueError, match="Expecting value"):
        newest(tmp_path)
    report.write(tmp_path / "2026-01-03.json")
    assert len(newest(tmp_path)) == 2
    replace(report, is_quick=True).write(tmp_path / "2026-01-04.json")
    with pytest.raises(ValueError, match="full runs"):
        newest(tmp_path)
