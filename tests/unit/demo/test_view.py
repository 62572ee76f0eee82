"""The demos fit small terminals, and what happens is always among what they show."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from eventpump.demo.bars import Bar
from eventpump.demo.fleet import Fleet, HostProcess
from eventpump.demo.pipeline import PipelineScene, SparkJob
from eventpump.demo.scene import FleetScene
from eventpump.demo.view import LiveView, Scene
from eventpump.eventhubs.hashing import partition_for_key

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


def drawn(scene: Scene, happened: Sequence[str], width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Return the lines that a terminal of that size shows."""
    console = pytest.importorskip("rich.console").Console(
        width=width, height=height, record=True, file=io.StringIO(), force_terminal=True
    )
    view = LiveView(scene, console)
    view._log.extend(happened)
    console.print(view)
    lines: list[str] = console.export_text().splitlines()
    return lines


@pytest.mark.parametrize("killed", [None, 1])
def test_live_table_fits(tmp_path: Any, killed: int | None) -> None:
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


def test_lag_of_the_archive_is_that_of_running_hosts(tmp_path: Any) -> None:
    """What a killed host said last does not count."""
    assert make_scene(tmp_path).archive_lag == 8 * 234_567
    assert "archive behind 1,407,402" in make_scene(tmp_path, killed=1).line()


def make_pipeline(total: int = 50_000_000) -> PipelineScene:
    """Make what is seen late in the demo of Spark, with large figures."""
    scene = PipelineScene(8, total)
    for number, state in ((1, "killed"), (2, "running")):
        job = SparkJob(number, cast("Any", _Process()), Path("job.log"))
        job.is_started, job.is_killed = True, state == "killed"
        job.finished, job.rate, job.watermark = 1_234, 123_456.0, "2024-05-06T07:08:09.123Z"
        job.lag = {str(each): (1_234_567, 0, 0.0) for each in range(8)}
        scene.jobs.append(job)
    bar = Bar("AVGO", 1_700_000_000_000, 1166.67, 1167.09, 1166.65, 1166.72, 1_218_365, 12, 1)
    scene.latest.extend([("5", bar)] * 6)
    return scene


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24), (60, 20), (60, 16)])
@pytest.mark.parametrize("make", [lambda: make_scene(Path(), 1), make_pipeline], ids=["hosts", "spark"])
def test_story_is_seen_in_small_terminals(make: Callable[[], Scene], width: int, height: int) -> None:
    """The last lines of what happened are there, each column is whole, and nothing lies outside."""
    lines = drawn(make(), [f"  {index}.0 s  something happened" for index in range(6)], width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    shown = [line for line in lines if line.endswith("something happened")]
    assert shown == lines[-len(shown) :]
    assert len(shown) >= (4 if height >= 20 else 3)
    # A cell that was cut has this mark at its end; the mark of rows that are left out stands alone.
    assert not any(re.search(r"\S…", line) for line in lines)


def test_figures_of_the_comparison_fit_one_line() -> None:
    """While the hub is read again too, what is counted then is seen whole."""
    scene = make_scene(Path())
    scene.total = scene.published = 200_000
    for host in scene.fleet.hosts:
        host.processed = 53_000
    scene.compared = 199_999
    assert drawn(scene, [])[0].endswith("published 200,000   processed 212,000   compared 199,999")


def test_figures_of_spark_fit_one_line() -> None:
    """At the demo's size, where the title is shortened before anything is wrapped."""
    scene = make_pipeline(200_000)
    scene.published, scene.stored, scene.ends = 200_000, 1_600, {**scene.ends, "3": 200_000}
    for job in scene.jobs:
        job.lag = {}
    head = drawn(scene, [])[0]
    assert head.startswith("demo --spark   ")
    assert head.endswith("trades 200,000 of 200,000   bars 1,600   behind 200,000")


def test_live_table_of_spark_counts_what_is_published_and_not_read() -> None:
    """Behind are the trades that are in no finished batch, also while Spark has not looked at them."""
    scene = make_pipeline()
    symbol = next(name for name in map(str, range(100)) if partition_for_key(name, 8) == 3)
    scene.jobs[-1].lag = {}
    scene.jobs[0].lag = {"3": (4, 0, 0.0)}
    scene.add({symbol: 10})
    assert scene.published == 10
    assert scene.behind("3")[0] == 6
    assert scene.behind("2") == (0, 0.0)
    assert ("behind", "6") in scene.head()
    scene.jobs[-1].lag = {"3": (10, 0, 0.0)}
    assert scene.behind("3") == (0, 0.0)


def test_failed_job_is_described_by_the_exception_below_a_traceback() -> None:
    """Spark shows the exception of a function in Python as the text of its own, with the whole traceback."""
    job = make_pipeline().jobs[0]
    job.failure = "the first line\nanother"
    assert job.complaint() == "the first line"
    job.failure = (
        "py4j.Py4JException: An exception was raised by the Python Proxy. Return Message: "
        'Traceback (most recent call last):\n  File "job.py", line 1, in run\n    publish()\n\n'
        "eventpump.ServiceError: the hub is gone\n\tat org.apache.Spark\n"
    )
    assert job.complaint() == "eventpump.ServiceError: the hub is gone"
