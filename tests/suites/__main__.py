"""Run another project's test suite against the emulator, and compare its outcome with what is recorded.

`python -m tests.suites azure-eventhub` runs all of it, in 11 minutes; `python -m tests.suites azure-eventhub
livetest/synctests/test_auth.py` a part. Exits with 1 where an outcome is not the recorded one.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from tests.suites import Record, azure_eventhub, summary


def main() -> int:
    """Run it, print, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("suite", choices=["azure-eventhub"])
    parser.add_argument("tests", nargs="*", help="files or ids below the suite's tests; none for all")
    parser.add_argument("--workers", type=int, default=azure_eventhub.WORKERS, help="processes of pytest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it ends the suite's processes too
    record = Record.read(options.suite)
    results = asyncio.run(azure_eventhub.run(options.tests, workers=options.workers))
    _say(f"\n{options.suite} {azure_eventhub.version()}")
    for line in summary(results, record):
        _say(line)
    differences = list(record.differences(results, is_whole=not options.tests))
    for line in differences:
        _say(f"NOT AS RECORDED: {line}")
    return int(bool(differences) or not results)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
