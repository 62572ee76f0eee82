"""The demo fits a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, cast

import pytest

from eventpump.demo.fleet import Fleet, HostProcess
from eventpump.demo.scene import FleetScene
from eventpump.demo.view import LiveView

HEIGHT, WIDTH = 24, 80


class _Process:
    """Stands in for a host's process."""

    pid = 1234567
    returncode: int | None = None


def make_scene(folder: Any, killed: int | None = None) -> FleetScene:
    """Make what is seen late in the demo: four hosts with two partitions each, with large figures.

    Args:
        killed: The index of a host that was killed, whose partitions have no owner.
    """
    fleet = Fleet(folder, "trades", 8, 5.0, {})
    scene = FleetScene(fleet, 50_000_000)
    for index in range(4):
        host = HostProcess(f"host-{index + 1}", cast("Any", _Process()), folder, folder, folder)
        mine = [str(each) for each in range(8) if each % 4 == index]
        host.partitions = {each: {"epoch": 12, "position": 1_234_567, "lag": 1_234} for each in mine}
        host.archived = {each: {"position": 1_000_000, "lag": 234_567} for each in mine}
        fleet.hosts.append(host)
    scene.boards()  # it remembers owners
    if killed is not None:
        fleet.hosts[killed].killed_at = 1.0
        fleet.hosts[killed].partitions = {}
    return scene


def drawn(scene: FleetScene, happened: Sequence[str]) -> list[str]:
    """Return the lines that a terminal of that size shows."""
    console = pytest.importorskip("rich.console").Console(
        width=WIDTH, height=HEIGHT, record=True, file=io.StringIO(), force_terminal=True
    )
    view = LiveView(scene)
    view._console = console
    view._log.extend(happened)
    console.print(view._draw())
    lines: list[str] = console.export_text().splitlines()
    return lines


@pytest.mark.parametrize("killed", [None, 1])
def test_the_live_table_fits(tmp_path: Any, killed: int | None) -> None:
    """Every partition and host has a line, with the lag of the slow subscription too, and the end of the log."""
    happened = [f"{index} s  something happened" for index in range(6)]
    lines = drawn(make_scene(tmp_path, killed), [*happened, "the last line"])
    assert len(lines) < HEIGHT
    assert max(map(len, lines)) <= WIDTH
    text = "\n".join(lines)
    assert "archive lag" in text
    assert text.count("234,567 ") + text.count("234,567\n") >= (8 if killed is None else 6)
    assert text.count("(was host-2)") == (0 if killed is None else 2)
    assert all(f"host-{index}" in text for index in (1, 2, 3, 4))
    assert "the last line" in lines[-1]
    assert "0 s  something" not in text


def test_the_lag_of_the_archive_is_that_of_running_hosts(tmp_path: Any) -> None:
    """What a killed host said last does not count."""
    assert make_scene(tmp_path).archive_lag == 8 * 234_567
    assert "archive behind 1,407,402" in make_scene(tmp_path, killed=1).line()
