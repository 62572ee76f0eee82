"""The benchmark of importing and constructing a client."""

from __future__ import annotations

import pytest

import benchmarks.startup as measuring
from benchmarks.processes import BenchmarkError
from benchmarks.suite import BENCHMARKS


def test_startup_counts_the_whole_process() -> None:
    """The CPU and the modules of what a program imports count, in a process that had not imported it."""
    empty, more = measuring.run_program(""), measuring.run_program("import asyncio, urllib.request")
    assert more["modules"] > empty["modules"] + 50
    assert more["cost"] > empty["cost"] > 0


def test_startup_of_a_program_that_fails_raises() -> None:
    """A client that cannot be constructed is not a cheap one."""
    with pytest.raises(BenchmarkError, match="ZeroDivisionError"):
        measuring.run_program("1 / 0")


def test_startup_has_a_row_per_client() -> None:
    """Both sides run as they are written, and the row has the ratio of each round."""
    rows = BENCHMARKS["startup"](True, lambda _: None)
    assert [row.name for row in rows] == [f"startup: importing and constructing {what}" for what in measuring.PROGRAMS]
    assert all(len(row.ratios) == 3 and row.unit == "ms CPU" for row in rows)
    assert all("modules, peer" in row.note for row in rows)
