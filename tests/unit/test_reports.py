"""Reports to the log and to hooks."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest

from eventpump import reports as hooks
from eventpump.core.pump_state import CloseReason
from eventpump.core.sharing import LinkState
from eventpump.core.starts import Loss, LossKind
from eventpump.errors import LinkDetachedError
from eventpump.eventhubs.events import Checkpoint
from eventpump.reports import EventRange, HostReport, LeaseTaken, LoopBlocked, ProcessorFailed, Reporter

_VALUES: dict[str, Any] = {
    "failed_for": 12.0,
    "problem": "it raised ValueError: x",
    "host": "a",
    "partition_id": "3",
    "subscription": "default",
    "epoch": 7,
    "stolen_from": "b",
    "why": "it ran out",
    "position": "offset -1",
    "reason": CloseReason.SHUTDOWN,
    "operation": "process_events",
    "waited": 2.5,
    "error": LinkDetachedError("detached"),
    "delay": 0.5,
    "avoided_for": 30.0,
    "failures": 2,
    "checkpoint": Checkpoint("3", "100", 9),
    "consumer_group": "$Default",
    "partition_ids": ("0", "1"),
    "duration": 12.0,
    "loss": Loss(LossKind.RECREATED, 5, None),
    "action": "fail",
    "recorded": {"": "offset>-1", "3": "number>7"},
    "configured": {"": "offset>@latest"},
    "evidence": "it does not answer a probe",
    "silent_for": 30.0,
    "first": 5,
    "last": 9,
    "drops_connection": False,
    "running_for": 60.0,
    "is_cancelled": True,
    "attempts": 3,
    "hub": "parked",
    "sequence_number": 7,
    "left": 57.0,
    "share": 0.9,
    "lags": {"0": 7, "1": None},
    "before": LinkState.SHARED,
    "state": LinkState.PAUSED,
    "slow_for": 60.0,
    "is_suspended": True,
    "events": EventRange(61, 360, 300),
    "outcome": "retried",
    "waits_at": "app.py:7 handle, for asyncio.locks.Lock.acquire",
}

_KINDS = [
    kind
    for kind in vars(hooks).values()
    if isinstance(kind, type) and issubclass(kind, HostReport) and kind is not HostReport
]


def _make(kind: type[HostReport]) -> HostReport:
    return kind(**{name: _VALUES[name] for name in kind.__dataclass_fields__ if name != "level"})


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_report_of_each_kind_is_one_line_and_reaches_every_hook(
    kind: type[HostReport], caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind of report makes one line of the log, with host and partition, at its level, and reaches every hook."""
    seen: list[HostReport] = []
    report = _make(kind)
    with caplog.at_level(logging.DEBUG):
        Reporter(logging.getLogger("test"), [seen.append, seen.append]).report(report)
    assert seen == [report, report]
    (record,) = caplog.records
    assert record.levelno == report.level
    assert record.message.startswith("host a: partition 3: ")
    assert "\n" not in record.message
    assert "None" not in record.message


def test_report_names_its_subscription(caplog: pytest.LogCaptureFixture) -> None:
    """Another subscription than the default one stands in the line, and each in the fields of the record."""
    with caplog.at_level(logging.DEBUG):
        for name in ("default", "alerts"):
            report = LeaseTaken("a", "3", 7, subscription=name)
            Reporter(logging.getLogger("test")).report(report)
    first, second = caplog.records
    assert first.message.startswith("host a: partition 3: owns")
    assert second.message.startswith("host a: partition 3: alerts: owns")
    assert [vars(record)["subscription"] for record in caplog.records] == ["default", "alerts"]


def test_report_of_the_users_failure_alone_has_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A failed link says all in its line; a failed processor shows where."""
    reporter = Reporter(logging.getLogger("test"))
    reporter.report(_make(ProcessorFailed))
    reporter.report(_make(hooks.LinkFailed))
    first, second = caplog.records
    assert first.exc_info is not None
    assert second.exc_info is None


def _raised(function: Any) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(("level", "is_whole"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_traceback_of_a_processor_begins_with_the_users_frames(level: int, *, is_whole: bool) -> None:
    """What the library did before is there at DEBUG; the error keeps its own traceback in any case."""
    ours: dict[str, Any] = {"__name__": "eventpump.consumer.calls.handler"}
    exec("def call(function):\n    function()", ours)

    def handler() -> None:
        deeper()

    def deeper() -> None:
        raise ValueError("no such column")

    error = _raised(lambda: ours["call"](handler))
    # As in the host: the first frames are the library's.
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_name != "call":
        error.__traceback__ = error.__traceback__.tb_next

    class Leveled(logging.Logger):
        """Its level counts, though the tests look at what is logged at every level."""

        def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - as in the base
            return level >= self.level

    logger = Leveled("leveled", level)
    records: list[logging.LogRecord] = []
    logger.addFilter(lambda record: bool(records.append(record)))  # type: ignore[func-returns-value]  # it drops all
    Reporter(logger).report(ProcessorFailed("a", "3", "process_events", error, 1, 0.5))
    (record,) = records
    assert record.exc_info is not None
    names = [each.name for each in traceback.extract_tb(record.exc_info[2])]
    assert names == (["call", "handler", "deeper"] if is_whole else ["handler", "deeper"])
    assert [each.name for each in traceback.extract_tb(error.__traceback__)] == ["call", "handler", "deeper"]


def test_hook_that_raises_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """What a hook raises is logged; the hooks after it are called."""

    def broken(report: HostReport) -> None:
        raise RuntimeError("hook")

    seen: list[HostReport] = []
    Reporter(logging.getLogger("test"), [broken, seen.append]).report(_make(LeaseTaken))
    assert len(seen) == 1
    assert "a hook failed" in caplog.text


def test_reports_are_counted_by_kind() -> None:
    """The reporter knows how many reports of a kind there were."""
    reporter = Reporter(logging.getLogger("test"))
    reporter.report(_make(LeaseTaken))
    reporter.report(_make(LeaseTaken))
    assert (reporter.count(LeaseTaken), reporter.count(LoopBlocked)) == (2, 0)
