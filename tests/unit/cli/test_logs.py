"""Errors and the log of commands as JSON, and what they say on SIGUSR1."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from eventpump.aio.doing import answering_signal
from eventpump.cli.logs import JsonLines, complain, write_state, writing_logs
from eventpump.cli.main import COMMANDS, main, parser

KEY = "c2VjcmV0LWtleS1vZi10aGUtdGVzdC1zdWl0ZQ=="
CONNECTION = f"Endpoint=sb://a.example/;SharedAccessKeyName=k;SharedAccessKey={KEY}"

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this platform has no SIGUSR1")


@pytest.fixture(autouse=True)
def _level_of_the_log() -> Iterator[None]:
    """Restore the level of the log, which commands set for their process."""
    logger = logging.getLogger("eventpump")
    level = logger.level
    yield
    logger.setLevel(level)


def lines(capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


def test_every_command_takes_the_format() -> None:
    """Also `parked list`, before and after its action."""
    positional = {"emulator": [], "bench-processor": ["m:p"], "parked": ["list"], "checkpoints": ["list"]}
    for name in COMMANDS:
        arguments = [name, *positional.get(name, []), "--log-format", "json"]
        assert parser(arguments).parse_args(arguments).log_format == "json"
        assert parser(arguments).parse_args(arguments[:-2]).log_format == "text"
    arguments = ["parked", "--log-format", "json", "list"]
    assert parser(arguments).parse_args(arguments).log_format == "json"


def test_error_of_a_command_is_a_line_of_json(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if it is asked for; the format does not outlast the command."""
    monkeypatch.delenv("EVENTPUMP_CONNECTION_STRING", raising=False)
    assert main(["info", "--log-format", "json"]) == 2
    (line,) = lines(capfd)
    assert line.keys() == {"time", "level", "logger", "message"}
    assert line["message"].startswith("--connection-string: is required")
    assert (line["level"], line["logger"]) == ("error", "eventpump.cli")
    assert main(["info"]) == 2
    assert capfd.readouterr().err.startswith("eventpump: --connection-string: is required")


def test_log_has_the_fields_of_its_records(capfd: pytest.CaptureFixture[str]) -> None:
    """And a traceback as the field `error`; what is not of JSON is text. Afterwards it is as before."""
    logger = logging.getLogger("eventpump")
    before = (list(logger.handlers), logger.propagate)
    with writing_logs("json"):
        of_consumer = logging.getLogger("eventpump.consumer")
        of_consumer.warning("%d events", 3, extra={"hub": "telemetry", "partition_id": "3", "what": {1}})
        try:
            raise LookupError("no such sensor")
        except LookupError:
            of_consumer.exception("failed", extra={"level": "mine"})
    first, second = lines(capfd)
    assert (first["hub"], first["partition_id"], first["what"], first["level"]) == ("telemetry", "3", "{1}", "warning")
    assert (first["logger"], first["message"]) == ("eventpump.consumer", "3 events")
    assert (second["level"], second["message"]) == ("error", "failed")
    assert second["error"].endswith("LookupError: no such sensor")
    assert (list(logger.handlers), logger.propagate) == before


def test_lines_of_json_hold_no_secret(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither in the message nor in fields or errors."""
    record = logging.makeLogRecord(
        {
            "msg": CONNECTION,
            "levelname": "ERROR",
            "name": "eventpump",
            "text": CONNECTION,
            "made": LookupError(CONNECTION),
            "exc_info": (LookupError, LookupError(CONNECTION), None),
        }
    )
    line = JsonLines().format(record)
    assert json.loads(line).keys() >= {"text", "made", "error"}
    assert KEY not in line
    with writing_logs("json"):
        complain(CONNECTION)
        write_state(CONNECTION)
    assert KEY not in json.dumps(lines(capfd))


def test_signal_is_answered_with_a_line_of_json(capfd: pytest.CaptureFixture[str]) -> None:
    """If that is the format of the log."""
    with writing_logs("json"), answering_signal(write_state):
        os.kill(os.getpid(), signal.SIGUSR1)
    (line,) = lines(capfd)
    assert line["message"].startswith("no event loop runs; it is at ")
