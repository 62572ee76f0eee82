"""Run benchmarks from the checkout: `python -m benchmarks [NAME ...]`. See `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.check import compare, comparison_table, median_rows
from benchmarks.processes import BenchmarkError, machine, versions
from benchmarks.report import Report, Row, table
from benchmarks.suite import BENCHMARKS

CHECK_REPEAT = 3
"""How often each benchmark runs for `--check`: the middle one is compared."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is named, or read it from a file; show, write, draw and compare it.

    Returns:
        0; 1 where a run failed, a row is void or the comparison fails. A missed goal is only shown.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if options.source is not None and (options.repeat is not None or options.json is not None or options.quick):
        parser.error("--from runs nothing: --repeat, --json and --quick have no place beside it")
    # What a run would fail by afterwards, it fails by before.
    plot = None if options.plot is None else _plotter(parser, options.plot)
    before = None if options.check is None else _read(parser, options.check)
    source = None if options.source is None else _read(parser, options.source)
    if before is not None and before.is_quick is not (options.quick if source is None else source.is_quick):
        parser.error(f"{options.check}: short runs (--quick) and full ones are not compared")
    if options.json is not None:
        try:
            options.json.open("a").close()
        except OSError as error:
            parser.error(f"--json: {error}")
    names: Sequence[str] = options.names
    missing = [name for name in names if source is not None and all(row.benchmark != name for row in source.rows)]
    if missing:
        parser.error(f"{options.source}: it has no rows of {missing[0]}")
    if not names and before is not None:
        names = [name for name in BENCHMARKS if any(row.benchmark == name for row in before.rows)]
    failed = False
    if source is None:
        repeat = options.repeat or (1 if before is None else CHECK_REPEAT)
        report, failed = _run(names or list(BENCHMARKS), repeat, quick=options.quick)
    else:
        report = replace(source, rows=[row for row in source.rows if not names or row.benchmark in names])
        print(_headline(report))
    print(table(report.rows, report.repeats))
    if options.json is not None:
        report.write(options.json)
    if plot is not None:
        drawn = plot(report, options.plot)
        for path in drawn:
            print(f"drew {path}")
        if not drawn:
            print("drew nothing: none of these rows is a headline that is not void and has a peer")
    failed = failed or any(row.is_void for row in report.rows)
    if before is not None:
        comparisons = compare(before, report.rows, names)
        print(f"\nbeside {options.check}: {_headline(before)}\n{comparison_table(comparisons)}")
        failed = failed or not comparisons or any(each.is_failure for each in comparisons)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON too")
    parser.add_argument("--quick", action="store_true", help="short runs: to see that it works, not to quote")
    parser.add_argument(
        "--repeat",
        type=_positive,
        metavar="N",
        help="run each N times and show the run in the middle; the file keeps the ratios of all of them",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="compare the ratios with those of an earlier run's JSON, by default of the benchmarks in it and in the "
        f"middle of {CHECK_REPEAT} runs; end with 1 where one is worse by more than 5 %% and than the earlier spread",
    )
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the headline rows of each benchmark as SVG")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="take the rows from an earlier run's JSON; run nothing"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _read(parser: argparse.ArgumentParser, path: Path) -> Report:
    try:
        report = Report.read(path)
    except (OSError, ValueError) as error:
        parser.error(f"{path}: {error}")
    if not report.rows:
        parser.error(f"{path}: it holds no rows")
    return report


def _plotter(parser: argparse.ArgumentParser, directory: Path) -> Callable[[Report, Path], list[Path]]:
    try:
        from benchmarks.plot import plot
    except ImportError as error:
        parser.error(f"--plot needs matplotlib, which the extra bench brings: {error}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--plot: {error}")
    return plot


def _headline(report: Report) -> str:
    return ", ".join([report.machine, *(f"{name} {number}" for name, number in report.versions.items())])


def _run(names: Sequence[str], repeat: int, *, quick: bool) -> tuple[Report, bool]:
    """Run benchmarks, each once before the first is repeated.

    Returns:
        The report, and whether one failed.
    """
    report = Report(machine=machine(), versions=versions(), rows=[], is_quick=quick)
    print(_headline(report), flush=True)
    runs: list[list[Row]] = []
    failed = False
    for turn in range(repeat):
        rows: list[Row] = []
        for name in names:
            print(f"{name}{f', {turn + 1} of {repeat}' if repeat > 1 else ''} ...", file=sys.stderr, flush=True)
            try:
                found = BENCHMARKS[name](quick, lambda text: print(f"  {text}", file=sys.stderr, flush=True))
                if len({row.name for row in found}) < len(found):
                    raise BenchmarkError("two of its rows have the same name")
                rows += [replace(row, benchmark=name) for row in found]
            except BenchmarkError as error:
                failed = True
                print(f"{name} failed: {error}", file=sys.stderr)
        runs.append(rows)
    rows, repeats = median_rows(runs)
    return replace(report, rows=rows, repeats=repeats if repeat > 1 else {}), failed


if __name__ == "__main__":
    sys.exit(main())
