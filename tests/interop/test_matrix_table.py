"""The table that a run ends with."""

from __future__ import annotations

import pytest

from tests.interop.matrix import CELLS, EMULATOR, NOTE, OURS, PEERS, PROPERTY, RHEA, Matrix, cell_of


def report_of(
    client: str, service: str, outcome: str, *, reason: str | None = None, note: str | None = None
) -> pytest.TestReport:
    properties = [(PROPERTY, cell_of(client, service)), *([] if note is None else [(NOTE, note)])]
    return pytest.TestReport(
        "test",
        ("file", 1, "test"),
        {},
        outcome,  # type: ignore[arg-type]  # a literal
        None if reason is None else ("file", 1, f"Skipped: {reason}"),
        "call",
        user_properties=properties,
    )


def test_matrix_table_shows_each_outcome() -> None:
    """Each cell shows what came of it, a failure outlasting all else; a cell left empty says why below, a note too."""
    matrix = Matrix()
    assert list(matrix.lines()) == []
    matrix.take(report_of(OURS[0], RHEA, "failed"))
    matrix.take(report_of(OURS[0], RHEA, "passed"))
    matrix.take(report_of(OURS[1], EMULATOR, "passed", note="half of it"))
    matrix.take(report_of(PEERS[5], EMULATOR, "skipped", reason="no build of it"))
    lines = list(matrix.lines())
    assert lines[0].split() == ["emulator", "rhea", "server"]
    rows = {line[:37].strip(): line[37:].split() for line in lines[1:10]}
    assert list(rows) == [*OURS, *PEERS]
    assert rows[OURS[0]] == ["not", "run", "FAILED"]
    assert rows[OURS[1]] == ["passed", "(1)", "not", "run"]
    assert rows[PEERS[0]] == ["not", "run", "-"]
    assert rows[PEERS[5]] == ["none", "(2)", "-"]
    assert lines[10:12] == ["(1) half of it", "(2) no build of it"]
    assert len(CELLS) == 12
