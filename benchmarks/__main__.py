"""Run benchmarks from the checkout: `python -m benchmarks [NAME ...] [--json FILE] [--quick]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.processes import BenchmarkError, machine
from benchmarks.report import Row, table, write_json
from benchmarks.suite import BENCHMARKS


def main(arguments: list[str] | None = None) -> int:
    """Run what is named. :returns: 0; 1 where a run failed or is void. A missed goal is only shown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as a JSON list too")
    parser.add_argument("--quick", action="store_true", help="short runs: to see that it works, not to quote")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    print(machine())
    rows: list[Row] = []
    failed = False
    for name in options.names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            rows += BENCHMARKS[name](options.quick, lambda text: print(f"  {text}", file=sys.stderr, flush=True))
        except BenchmarkError as error:
            failed = True
            print(f"{name} failed: {error}", file=sys.stderr)
    print(table(rows))
    if options.json is not None:
        write_json(options.json, rows)
    return 1 if failed or any(row.is_void for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
