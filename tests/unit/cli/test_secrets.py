"""No command shows a secret that it was given in the wrong place."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from eventpump.cli.main import main, parser
from eventpump.texts import without_secrets

KEY = "c2VjcmV0LWtleS1vZi10aGUtdGVzdA+/=="
SECRETS = [
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={KEY};EndpointSuffix=core.windows.net",
    f"Endpoint=sb://x.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey={KEY}",
    f"Endpoint=sb://x/;SharedAccessSignature=SharedAccessSignature sr=x&sig={KEY}&se=1&skn=k",
    f"https://a.blob.core.windows.net/c?sv=1&sig={KEY}&se=1",
    f"http://me:{KEY.replace('/', '')}@proxy.test:3128",
]
BASES: dict[str, list[str]] = {"emulator": ["--tls-cert", "missing"], "demo": ["--no-such-option"]}
"""Options with which a command fails before it does anything; by default a connection string that is none."""


def _options(made: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Yield each option of each command that takes a value; None for a positional one."""
    for action in made._actions:
        if isinstance(action.choices, dict):
            for name, each in action.choices.items():
                yield from _options(each, (*path, name))
        elif action.nargs != 0:
            yield path, action.option_strings[-1] if action.option_strings else None


OPTIONS = sorted(set(_options(parser())), key=str)


def _said(capfd: pytest.CaptureFixture[str]) -> str:
    out, err = capfd.readouterr()
    return out + err


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """Restore the level of the log, which commands set for their process."""
    logger = logging.getLogger("eventpump")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("secret", SECRETS, ids=["storage", "hub", "signature", "url", "proxy"])
@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_command_shows_no_secret_that_an_option_holds(
    command: tuple[str, ...],
    option: str | None,
    secret: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever option of whatever command it was given to: the one line that says what is wrong does not have it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENTPUMP_CONNECTION_STRING", "none")
    given = [*command, *BASES.get(command[0], []), *([secret] if option is None else [f"{option}={secret}"])]
    with suppress(SystemExit):
        assert main(given) != 0
    said = _said(capfd)
    assert said
    assert KEY not in said
    assert KEY.replace("/", "") not in said


@pytest.mark.parametrize("secret", SECRETS)
def test_lag_shows_no_secret_in_place_of_a_file(secret: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A storage connection string given as the file of leases is an error that does not have its key."""
    service = "Endpoint=sb://localhost;SharedAccessKeyName=k;SharedAccessKey=x;UseDevelopmentEmulator=true"
    assert main(["lag", "--connection-string", service, "--hub", "h", "--leases", secret]) != 0
    said = _said(capfd)
    assert "--leases" in said
    assert KEY not in said
    assert KEY.replace("/", "") not in said


def test_without_secrets_leaves_the_rest() -> None:
    """Names, hosts and what follows stay readable."""
    assert without_secrets(SECRETS[0]).endswith("AccountKey=***;EndpointSuffix=core.windows.net")
    assert without_secrets("https://a.test/b: no such file") == "https://a.test/b: no such file"
