"""The table of branch coverage, module by module, at the end of a run."""

from __future__ import annotations

import json

import pytest

PROPERTY = "coverage"
"""The property of a test's report: percent per module, as JSON."""


class CoverageReport:
    """A pytest plugin that prints the table; with pytest-xdist, in the process that gets the reports."""

    def __init__(self) -> None:
        self._modules: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the modules that a test has measured."""
        for name, value in report.user_properties:
            if name == PROPERTY:
                self._modules |= json.loads(str(value))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line per module, where any was measured."""
        if self._modules:
            terminalreporter.section("branch coverage by the package's own unit tests, in percent")
            width = max(map(len, self._modules)) + 2
            for name, share in sorted(self._modules.items()):
                terminalreporter.line(f"{name:{width}}{share:5.1f}")
