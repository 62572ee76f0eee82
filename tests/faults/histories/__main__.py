"""Live one history again, or a row of them: `python -m tests.faults.histories <kind> <seed> [--size n] [--count n]`.

Exits with 1 where a promise did not hold.
"""

from __future__ import annotations

import argparse
import logging
import sys

from tests.faults.histories.kinds import KINDS, SIZE, run_history


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.histories", description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("seed", type=int)
    parser.add_argument("--size", type=int, default=SIZE, help="steps of trouble")
    parser.add_argument("--count", type=int, default=1, help="seeds to try, from this one on; prints violations only")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        verdict = run_history(options.kind, seed, options.size)
        if options.count == 1:
            _say(verdict.describe())
        elif verdict.violation is not None:
            _say(f"{seed} {verdict.violation}")
        failed += verdict.violation is not None
    if options.count > 1:
        _say(f"{options.kind}: {failed} of {options.count} seeds broke a promise")
    return int(failed > 0)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
