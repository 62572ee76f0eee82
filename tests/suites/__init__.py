"""Test suites of other projects, run against the emulator, and what is recorded of them.

`recorded.toml` has for each suite how many of its tests run and pass, and each one that is skipped or fails, with the
cause. A run is compared with it: a failure that is not recorded is an error, and a recorded one that passes as well.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded.toml")


class Outcome(Enum):
    """The outcome of a test, by the word in a table."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Result:
    """A test's outcome, and what its runner said of it."""

    outcome: Outcome
    text: str = ""


@dataclass(frozen=True)
class Record:
    """What is recorded of a suite.

    Attributes:
        run: The number of its tests.
        skipped: The tests that the suite skips by itself, with the cause.
        failed: The tests that fail, with the cause.
    """

    run: int
    skipped: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, suite: str, file: Path = RECORDED) -> Record:
        """Read it from the table.

        Raises:
            KeyError: There is no such suite.
        """
        found = tomllib.loads(file.read_text())[suite]
        return cls(found["run"], _causes(found.get("skipped", [])), _causes(found.get("failed", [])))

    @property
    def passed(self) -> int:
        """How many tests pass."""
        return self.run - len(self.skipped) - len(self.failed)

    def expected(self, test: str) -> Outcome:
        """Return the recorded outcome of a test."""
        if test in self.failed:
            return Outcome.FAILED
        return Outcome.SKIPPED if test in self.skipped else Outcome.PASSED

    def cause(self, test: str) -> str | None:
        """Return why a test does not pass; None where nothing is recorded."""
        return self.failed.get(test, self.skipped.get(test))

    def differences(self, results: Mapping[str, Result], *, is_whole: bool) -> Iterator[str]:
        """Compare a run with what is recorded.

        Args:
            is_whole: Whether all tests of the suite were run.

        Yields:
            A line for each difference.
        """
        for test, result in sorted(results.items()):
            if result.outcome is not (expected := self.expected(test)):
                yield f"{test} {result.outcome.value}, recorded as {expected.value}: {result.text or self.cause(test)}"
        if is_whole:
            for test in sorted({*self.skipped, *self.failed} - results.keys()):
                yield f"{test} is recorded, and was not run"
            if len(results) != self.run:
                yield f"{len(results)} tests were run, {self.run} are recorded"


def _causes(rows: list[Any]) -> dict[str, str]:
    return {row["test"]: row["cause"] for row in rows}


def summary(results: Mapping[str, Result], record: Record) -> Iterator[str]:
    """Yield the lines of a run: the counts, then each test that did not pass, with its recorded cause."""
    count = {outcome: [t for t, r in results.items() if r.outcome is outcome] for outcome in Outcome}
    passed, skipped, failed = (count[outcome] for outcome in Outcome)
    yield f"{len(passed)} passed of {len(results)}, {len(skipped)} skipped by the suite, {len(failed)} failed"
    for outcome in (Outcome.SKIPPED, Outcome.FAILED):
        for test in sorted(count[outcome]):
            yield f"{outcome.value} {test}: {record.cause(test) or results[test].text}"
