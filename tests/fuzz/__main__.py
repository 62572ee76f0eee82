"""Make the string of a seed again and run it, or a row of them: `python -m tests.fuzz ENTRY SEED [--count N]`.

Exits with 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from random import Random

from tests.fuzz.entries import ENTRIES
from tests.fuzz.entry import BreachError, run_seed, size_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("entry", choices=sorted(ENTRIES))
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="seeds to run, from this one on; prints breaches only")
    parser.add_argument("--most", type=int, default=20, help="breaches after which to stop")
    parser.add_argument("--show", action="store_true", help="print the string, in hexadecimal")
    options = parser.parse_args()
    logging.disable(logging.NOTSET)
    entry = ENTRIES[options.entry]()
    breaches = 0
    try:
        for seed in range(options.seed, options.seed + options.count):
            if options.show:
                string = entry.make(Random(f"{entry.name} {seed}"))
                parts = [string] if isinstance(string, bytes) else string
                sys.stdout.write(f"{size_of(string)} bytes\n" + "".join(f"{part.hex()}\n" for part in parts))
            try:
                run_seed(entry, seed)
            except BreachError as breach:
                breaches += 1
                sys.stdout.write(f"{seed}: {breach}\n")
                if breach.__cause__ is not None and options.count == 1:
                    sys.stdout.write("".join(traceback.format_exception(breach.__cause__)))
                if breaches >= options.most:
                    break
    finally:
        entry.close()
    sys.stdout.write(f"{options.entry}: {breaches} breaches\n")
    return int(breaches > 0)


if __name__ == "__main__":
    sys.exit(main())
