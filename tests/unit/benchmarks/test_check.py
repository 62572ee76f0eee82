"""Repeated runs and their median, the comparison with an earlier run, and the command around them. Nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks.__main__ as command
from benchmarks.check import Comparison, compare, comparison_table, median_rows
from benchmarks.processes import BenchmarkError
from benchmarks.report import Report, Row


def make_row(ratio: float | None, *, name: str = "send: 1 KiB", busy: float = 1.0, value: float = 2.0) -> Row:
    """Make a row of `send` with a ratio."""
    return Row(
        name=name,
        benchmark="send",
        peer="another",
        subject_value=value,
        peer_value=None if ratio is None else value * ratio,
        unit="µs CPU/event",
        subject_busy=busy,
        must_be_busy=True,
    )


def make_report(*rows: Row, repeats: dict[str, tuple[float, ...]] | None = None, is_quick: bool = False) -> Report:
    """Make a report of an earlier run."""
    return Report(machine="1 × Abacus", versions={}, rows=list(rows), repeats=repeats or {}, is_quick=is_quick)


# --------------------------------------------------------------------------------------------------- repeated runs


def test_merge_of_repeated_runs_takes_the_middle_row() -> None:
    """Each row is that of the middle ratio, whole; the ratios of all runs are kept in their order."""
    runs = [[make_row(12.0, value=1.0)], [make_row(10.0, value=3.0)], [make_row(11.0, value=2.0)]]
    rows, repeats = median_rows(runs)
    assert rows == [make_row(11.0, value=2.0)]
    assert repeats == {"send: 1 KiB": (12.0, 10.0, 11.0)}


def test_merge_of_repeated_runs_matches_rows_by_name() -> None:
    """Every name has one row, in the order of its first appearance, though a run lacks it."""
    small = [make_row(ratio, name="send: 100 B") for ratio in (1.0, 2.0)]
    rows, repeats = median_rows([[make_row(5.0), small[0]], [small[1]], [make_row(7.0)]])
    assert [(row.name, row.ratio) for row in rows] == [("send: 1 KiB", 5.0), ("send: 100 B", 1.0)]
    assert repeats == {"send: 1 KiB": (5.0, 7.0), "send: 100 B": (1.0, 2.0)}


def test_merge_ignores_void_runs_unless_all_are_void() -> None:
    """A void run is neither in the middle nor in the spread; where all are void, so is the row."""
    void = make_row(99.0, busy=0.1)
    rows, repeats = median_rows([[void], [make_row(10.0)], [void]])
    assert (rows[0].ratio, repeats) == (10.0, {"send: 1 KiB": (10.0,)})
    rows, _ = median_rows([[void], [void], [void]])
    assert rows[0].is_void


def test_merge_of_rows_without_a_ratio_takes_the_middle_value() -> None:
    """Where there is nothing to compare with, the row in the middle is that of the middle value."""
    rows, repeats = median_rows([[make_row(None, value=value)] for value in (5.0, 1.0, 3.0)])
    assert (rows[0].subject_value, repeats) == (3.0, {"send: 1 KiB": ()})


# ------------------------------------------------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    ("before", "now", "allowed", "verdict", "is_failure"),
    [
        (make_row(10.0), make_row(10.0), 0.05, "same", False),
        (make_row(10.0), make_row(9.51), 0.05, "same", False),
        (make_row(10.0), make_row(9.49), 0.05, "worse", True),
        (make_row(10.0), make_row(9.49), 0.06, "same", False),
        (make_row(10.0), make_row(11.0), 0.05, "better", False),
        (make_row(10.0), make_row(11.0), 0.2, "same", False),
        (make_row(0.0), make_row(0.0), 0.05, "same", False),
        (make_row(0.0), make_row(0.1), 0.05, "better", False),
        (make_row(0.1), make_row(0.0), 0.05, "worse", True),
        (make_row(10.0), make_row(10.0, busy=0.5), 0.05, "void", True),
        (make_row(10.0, busy=0.5), make_row(10.0), 0.05, "void", True),
        (make_row(10.0), None, 0.05, "missing", True),
        (None, make_row(10.0), 0.05, "new", True),
        (make_row(10.0), make_row(None), 0.05, "no ratio", True),
        (make_row(None), make_row(10.0), 0.05, "no ratio", True),
        (make_row(None), make_row(None), 0.05, "not compared", False),
    ],
)
def test_verdict_of_a_row_by_ratio_and_counterpart(
    before: Row | None, now: Row | None, allowed: float, verdict: str, is_failure: bool
) -> None:
    """A row fails where its ratio lost more than is allowed, where it is void, and where it has no counterpart."""
    comparison = Comparison(name="send: 1 KiB", before=before, now=now, allowed=allowed)
    assert (comparison.verdict, comparison.is_failure) == (verdict, is_failure)


@pytest.mark.parametrize(
    ("repeats", "allowed"),
    [((), 0.05), ((10.0,), 0.05), ((9.9, 10.0, 10.1), 0.05), ((9.0, 10.0, 11.0), 0.2)],
)
def test_allowance_is_five_per_cent_or_the_earlier_spread(repeats: tuple[float, ...], allowed: float) -> None:
    """The larger of both counts; a file without repeated runs allows 5 %."""
    before = make_report(make_row(10.0), repeats={"send: 1 KiB": repeats})
    (comparison,) = compare(before, [make_row(10.0)], ["send"])
    assert comparison.allowed == pytest.approx(allowed)


def test_comparison_names_rows_without_a_counterpart() -> None:
    """A row that only one of the runs has is shown; of benchmarks that were not named the file's rows do not count."""
    gone, fresh = make_row(3.0, name="send: 100 B"), make_row(4.0, name="send: 10 B")
    other = replace(make_row(3.0, name="receive"), benchmark="receive")
    comparisons = compare(make_report(make_row(10.0), gone, other), [fresh, make_row(10.0)], ["send"])
    assert [(each.name, each.verdict) for each in comparisons] == [
        ("send: 1 KiB", "same"),
        ("send: 100 B", "missing"),
        ("send: 10 B", "new"),
    ]


def test_comparison_table_shows_what_failed() -> None:
    """A line per row with both ratios, the change, what is allowed and the verdict; below it what failed."""
    before = make_report(make_row(10.0), make_row(3.0, name="send: 100 B"))
    failing = compare(before, [make_row(9.0), make_row(3.3, name="send: 100 B")], ["send"])
    _, _, first, second, result = comparison_table(failing).splitlines()
    assert first.split()[-5:] == ["10.0", "9.0", "-10.0%", "5.0%", "WORSE"]
    assert second.split()[-5:] == ["3.0", "3.3", "+10.0%", "5.0%", "better"]
    assert result.strip() == "failed: send: 1 KiB"
    passing = compare(before, before.rows, ["send"])
    assert comparison_table(passing).splitlines()[-1].strip() == "passed"


def test_comparison_table_names_a_peer_that_changed() -> None:
    """Where another configuration of the peer was the best, the ratio may have changed by that: a line says so."""
    before = make_report(make_row(10.0), make_row(3.0, name="send: 100 B"))
    comparisons = compare(before, [replace(make_row(9.0), peer="the third"), before.rows[1]], ["send"])
    assert [each.has_other_peer for each in comparisons] == [True, False]
    text = comparison_table(comparisons)
    assert "  send: 1 KiB: the peer was another, and now is the third" in text.splitlines()
    assert text.count("the peer was") == 1


# ------------------------------------------------------------------------------------------------------ the command

Benches = Callable[..., list[str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Benches:
    """Put benchmarks in the place of the real ones that give prepared rows; what ran is in the list returned."""

    def replace_all(**runs: Sequence[list[Row] | BenchmarkError]) -> list[str]:
        ran: list[str] = []
        left = {name: iter(each) for name, each in runs.items()}

        def make(name: str) -> Callable[[bool, Callable[[str], None]], list[Row]]:
            def run(quick: bool, log: Callable[[str], None]) -> list[Row]:
                ran.append(name)
                found = next(left[name])
                if isinstance(found, BenchmarkError):
                    raise found
                return found

            return run

        monkeypatch.setattr(command, "BENCHMARKS", {name: make(name) for name in runs})
        return ran

    return replace_all


def written(path: Path, *rows: Row, repeats: dict[str, tuple[float, ...]] | None = None, is_quick: bool = False) -> str:
    """Write an earlier run.

    Returns:
        The path, as an argument.
    """
    make_report(*rows, repeats=repeats, is_quick=is_quick).write(path)
    return str(path)


def test_repeat_runs_each_benchmark_and_stores_every_ratio(bench: Benches, tmp_path: Path) -> None:
    """The rows of the file are those in the middle, and its repeats hold the ratios of every run."""
    receive = [[replace(make_row(ratio, name="receive"), benchmark="")] for ratio in (1.0, 2.0, 3.0)]
    ran = bench(send=[[make_row(ratio)] for ratio in (10.0, 12.0, 11.0)], receive=receive)
    path = tmp_path / "rows.json"
    assert command.main(["--repeat", "3", "--json", str(path)]) == 0
    assert ran == ["send", "receive"] * 3
    report = Report.read(path)
    assert [(row.name, row.benchmark, row.ratio) for row in report.rows] == [
        ("send: 1 KiB", "send", 11.0),
        ("receive", "receive", 2.0),
    ]
    assert report.repeats == {"send: 1 KiB": (10.0, 12.0, 11.0), "receive": (1.0, 2.0, 3.0)}


def test_run_without_repeat_stores_no_spread(bench: Benches, tmp_path: Path) -> None:
    """Without --repeat each runs once, and the file knows no spread."""
    ran = bench(send=[[make_row(10.0)]])
    path = tmp_path / "rows.json"
    assert command.main(["--json", str(path)]) == 0
    assert ran == ["send"]
    assert Report.read(path).repeats == {}


def test_check_passes_where_the_middle_of_three_is_the_same(
    bench: Benches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One slow run of three does not fail; the benchmarks are those of the file."""
    ran = bench(receive=[], send=[[make_row(ratio)] for ratio in (10.0, 5.0, 9.8)])
    assert command.main(["--check", written(tmp_path / "before.json", make_row(10.0))]) == 0
    assert ran == ["send"] * 3
    assert capsys.readouterr().out.rstrip().endswith("passed")


@pytest.mark.parametrize("name", ["receive", "stages", "send", "buffered", "idempotent", "latency"])
def test_check_of_a_benchmark_of_the_event_path_fails_where_one_row_is_worse(
    bench: Benches, tmp_path: Path, name: str
) -> None:
    """The median of three decides, row by row: 4 % less than in the file pass, 6 % fail."""
    first, second = (replace(make_row(10.0, name=f"{name}: {each}"), benchmark=name) for each in "ab")
    before = written(tmp_path / "before.json", first, second)
    for ratios, code in (((9.0, 9.6, 10.0), 0), ((9.4, 9.3, 10.0), 1)):
        bench(**{name: [[first, replace(second, peer_value=second.subject_value * ratio)] for ratio in ratios]})
        assert command.main([name, "--check", before]) == code


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ([make_row(9.0)], "WORSE"),
        ([make_row(10.0, busy=0.1)], "VOID"),
        ([make_row(10.0, name="send: 2 KiB")], "MISSING"),
        ([make_row(10.0), make_row(10.0, name="send: 2 KiB")], "NEW"),
        ([], "MISSING"),
    ],
)
def test_check_fails_where_a_row_is_worse_void_or_missing(
    bench: Benches, tmp_path: Path, capsys: pytest.CaptureFixture[str], now: list[Row], verdict: str
) -> None:
    """The command ends with 1 where a row is worse, void, or only in one of the runs; the table shows which."""
    bench(send=[now])
    arguments = ["send", "--repeat", "1", "--check", written(tmp_path / "before.json", make_row(10.0))]
    assert command.main(arguments) == 1
    shown = capsys.readouterr().out
    assert verdict in shown.split()
    assert "failed: " in shown


def test_check_allows_the_spread_of_the_file(bench: Benches, tmp_path: Path) -> None:
    """What repeated unchanged runs differed by does not fail; what goes beyond does."""
    before = written(tmp_path / "before.json", make_row(10.0), repeats={"send: 1 KiB": (9.0, 10.0, 10.5)})
    bench(send=[[make_row(8.6)], [make_row(8.4)]])
    assert command.main(["--repeat", "1", "--check", before]) == 0
    assert command.main(["--repeat", "1", "--check", before]) == 1


def test_check_with_from_compares_two_files_and_runs_nothing(bench: Benches, tmp_path: Path) -> None:
    """With --from the rows come from a file; those of benchmarks that are not named are left out."""
    ran = bench(send=[], receive=[])
    other = replace(make_row(1.0, name="receive"), benchmark="receive")
    before = written(tmp_path / "before.json", make_row(10.0), replace(other, peer_value=9.0))
    now = written(tmp_path / "now.json", make_row(10.1), other)
    assert command.main(["send", "--from", now, "--check", before]) == 0
    assert command.main(["--from", now, "--check", before]) == 1
    assert ran == []


def test_repeat_fails_where_one_of_its_runs_fails(bench: Benches) -> None:
    """The command ends with 1 though two of three runs came to their end."""
    bench(send=[[make_row(10.0)], BenchmarkError("gone"), [make_row(10.0)]])
    assert command.main(["--repeat", "3"]) == 1


def test_check_refuses_two_rows_of_one_name(bench: Benches, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are compared by their names, so a benchmark that gives a name twice failed."""
    bench(send=[[make_row(10.0), make_row(11.0)]])
    assert command.main([]) == 1
    assert "same name" in capsys.readouterr().err


def test_check_refuses_to_compare_quick_runs_with_full_ones(
    bench: Benches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of --quick is compared with --quick only; that is found out before anything runs."""
    ran = bench(send=[[make_row(10.0)]])
    before = written(tmp_path / "before.json", make_row(10.0), is_quick=True)
    with pytest.raises(SystemExit) as caught:
        command.main(["--check", before])
    assert (caught.value.code, ran) == (2, [])
    assert "--quick" in capsys.readouterr().err
    assert command.main(["--check", before, "--quick", "--repeat", "1"]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--repeat", "x"], "'x' is not a whole number of at least 1"),
        (["--check", "EMPTY"], "it holds no rows"),
        (["--from", "EMPTY"], "it holds no rows"),
        (["send", "--from", "RECEIVE"], "it has no rows of send"),
        (["--json", "DIRECTORY"], "--json"),
    ],
)
def test_main_with_a_file_that_cannot_serve_says_why(
    bench: Benches, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    """The error names the file and what it lacks, and nothing is run: not even what would be written at the end."""
    ran = bench(send=[[make_row(10.0)]])
    files = {
        "EMPTY": written(tmp_path / "empty.json"),
        "RECEIVE": written(tmp_path / "receive.json", replace(make_row(1.0, name="receive"), benchmark="receive")),
        "DIRECTORY": str(tmp_path),
    }
    with pytest.raises(SystemExit) as caught:
        command.main([files.get(each, each) for each in arguments])
    assert (caught.value.code, ran) == (2, [])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--repeat", "0"],
        ["--repeat", "-1"],
        ["--repeat", "x"],
        ["--check", "/nowhere/rows.json"],
        ["--from", "/nowhere/rows.json"],
        ["--from", "/nowhere/rows.json", "--repeat", "2"],
        ["--plot", "/dev/null/pictures"],
    ],
)
def test_check_with_wrong_arguments_runs_nothing(bench: Benches, arguments: list[str]) -> None:
    """What cannot work ends the command at once with 2."""
    ran = bench(send=[[make_row(10.0)]])
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert (caught.value.code, ran) == (2, [])
