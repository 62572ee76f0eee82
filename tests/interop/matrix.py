"""The interop matrix: which client has met which service, noted test by test and printed at the end of a run."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

EMULATOR, RHEA = "emulator", "rhea server"
SERVICES = (EMULATOR, RHEA)
OURS = ("native TCP", "native WebSocket", "uamqp")
PEERS = (
    "azure-eventhub TCP",
    "azure-eventhub WebSocket",
    "azure-eventhub uamqp_transport=True",
    "@azure/event-hubs TCP",
    "@azure/event-hubs WebSocket",
    "uamqp raw",
)
CELLS = frozenset((client, service) for client in OURS for service in SERVICES) | {(peer, EMULATOR) for peer in PEERS}
"""Every cell that has a test. A service of ours is what the peers are for: they do not meet rhea's."""
PROPERTY, NOTE = "interop", "interop note"
"""The properties of a test's report that name its cell, and what its outcome does not include."""


@dataclass
class Matrix:
    """What came of each cell."""

    outcomes: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)

    def take(self, report: pytest.TestReport) -> None:
        """Record the report of a test that fills a cell. A failure anywhere in it stays."""
        properties = dict(report.user_properties)
        named = properties.get(PROPERTY)
        if named is None:
            return
        client, service = str(named).split(" × ")
        cell = client, service
        assert cell in CELLS, named
        if report.when == "call" or not report.passed:
            if self.outcomes.get(cell) != "FAILED":
                self.outcomes[cell] = {"passed": "passed", "failed": "FAILED"}.get(report.outcome, "none")
            if report.skipped and isinstance(report.longrepr, tuple):
                self.notes[cell] = report.longrepr[2].removeprefix("Skipped: ")
            elif NOTE in properties:
                self.notes[cell] = str(properties[NOTE])

    def lines(self) -> Iterator[str]:
        """Return the table, line by line; nothing where no cell was run."""
        if not self.outcomes:
            return
        width = max(map(len, (*OURS, *PEERS))) + 2
        notes: list[str] = []
        yield f"{'':{width}}" + "".join(f"{service:14}" for service in SERVICES)
        for client in (*OURS, *PEERS):
            texts = []
            for service in SERVICES:
                cell = client, service
                text = self.outcomes.get(cell, "not run" if cell in CELLS else "-")
                if (note := self.notes.get(cell)) is not None:
                    notes.append(note)
                    text += f" ({len(notes)})"
                texts.append(f"{text:14}")
            yield f"{client:{width}}" + "".join(texts).rstrip()
        for number, note in enumerate(notes, 1):
            yield f"({number}) {note}"
        yield f"on Python {platform.python_version()}"


def cell_of(client: str, service: str) -> str:
    """Spell a cell, for `record_property`."""
    return f"{client} × {service}"


class MatrixReport:
    """A pytest plugin that prints the matrix at the end of a run; with pytest-xdist, in the process that gets reports.

    That process collects no tests, and so loads no conftest but the uppermost: this is registered there.
    """

    def __init__(self) -> None:
        self._matrix = Matrix()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record what came of a test."""
        self._matrix.take(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table, where a cell was run."""
        if lines := list(self._matrix.lines()):
            terminalreporter.section("interop matrix")
            for line in lines:
                terminalreporter.line(line)
