"""The variables of the environment that commands read in place of options."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator

import pytest

from eventpump.cli.main import main, parser
from eventpump.cli.streams import connection_text, hub_name
from eventpump.errors import ConfigurationError
from tests.unit.test_environment import CONNECTION, KEY


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("EVENTPUMP_") and name != "EVENTPUMP_PURE":
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _level_of_the_log() -> Iterator[None]:
    """Restore the level of the log, which commands set for their process."""
    logger = logging.getLogger("eventpump")
    level = logger.level
    yield
    logger.setLevel(level)


def parsed(*arguments: str) -> argparse.Namespace:
    return parser(arguments).parse_args(arguments)


COMMANDS = [["info"], ["send"], ["tail"], ["lag", "--container", "leases"], ["parked", "list"], ["doctor"], ["probe"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_hub_and_connection_are_those_of_the_environment(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are given; the hub of a connection string that is given counts before the variable."""
    monkeypatch.setenv("EVENTPUMP_CONNECTION_STRING", CONNECTION)
    monkeypatch.setenv("EVENTPUMP_HUB", "telemetry")
    args = parsed(*command)
    assert (connection_text(args), hub_name(args)) == (CONNECTION, "telemetry")
    assert hub_name(parsed(*command, "--hub", "other")) == "other"
    given = f"{CONNECTION};EntityPath=orders"
    args = parsed(*command, "--connection-string", given)
    assert (connection_text(args), hub_name(args)) == (given, None)
    monkeypatch.setenv("EVENTPUMP_CONNECTION_STRING", given)
    with pytest.raises(ConfigurationError, match=r"^EVENTPUMP_HUB: is not the hub that EntityPath"):
        hub_name(parsed(*command))


READING = [["tail"], ["lag"], ["parked", "list"], ["parked", "replay", "--to", "b"], ["doctor"], ["probe"]]


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_consumer_group_is_that_of_the_environment(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is given."""
    assert parsed(*command).consumer_group == "$Default"
    monkeypatch.setenv("EVENTPUMP_CONSUMER_GROUP", "second")
    assert parsed(*command).consumer_group == "second"
    assert parsed(*command, "--consumer-group", "third").consumer_group == "third"


@pytest.mark.parametrize(
    ("variables", "begin"),
    [
        ({}, "eventpump: --connection-string: is required, here or in EVENTPUMP_CONNECTION_STRING\n"),
        ({"EVENTPUMP_CONNECTION_STRING": KEY}, "eventpump: EVENTPUMP_CONNECTION_STRING: "),
        ({"EVENTPUMP_CONNECTION_STRING": CONNECTION, "EVENTPUMP_HUB": "a b"}, "eventpump: EVENTPUMP_HUB: "),
        (
            {"EVENTPUMP_NAMESPACE": "a.example"},
            "eventpump: --connection-string: is required, here or in EVENTPUMP_CONNECTION_STRING: the command signs in",
        ),
    ],
)
@pytest.mark.parametrize("command", [each for each in COMMANDS if each != ["doctor"]], ids=" ".join)
def test_errors_name_the_variable_and_hold_no_secret(
    command: list[str],
    variables: dict[str, str],
    begin: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line, with exit code 2."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(command) == 2
    line = capsys.readouterr().err
    assert line.startswith(begin)
    assert line.count("\n") == 1
    assert KEY not in line


def test_lag_takes_the_lease_container_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no other place is given; of the account either variable, but not both."""
    monkeypatch.setenv("EVENTPUMP_CONNECTION_STRING", f"{CONNECTION};EntityPath=telemetry")
    assert main(["lag"]) == 2
    assert "--container: --leases or --spark is required" in capsys.readouterr().err
    monkeypatch.setenv("EVENTPUMP_CONTAINER", "leases")
    assert main(["lag"]) == 2
    assert "EVENTPUMP_STORAGE_CONNECTION_STRING" in capsys.readouterr().err
    monkeypatch.setenv("EVENTPUMP_STORAGE_CONNECTION_STRING", "x")
    monkeypatch.setenv("EVENTPUMP_STORAGE_URL", "https://a.example")
    assert main(["lag"]) == 2
    assert "EVENTPUMP_STORAGE_URL: is set along with" in capsys.readouterr().err
    assert main(["lag", "--leases", "nowhere.db"]) == 2
    assert "nowhere.db: there is no such file" in capsys.readouterr().err
