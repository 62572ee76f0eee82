"""The command itself: without arguments, as a module, and interrupted while it is imported."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import eventpump
from eventpump.cli.main import COMMANDS, parser

_INTERRUPTED = """
import os, signal, sys
from eventpump.cli.main import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
main(["emulator", "--hub", "a:1", "--port", "0"])
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_command_alone_prints_its_usage() -> None:
    """On stderr, with the exit code of a usage error; `python -m eventpump` is the command."""
    result = _run("-m", "eventpump")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("usage: eventpump ")
    assert all(f"\n    {command} " in result.stderr for command in ("demo", "emulator", "info", "send", "tail"))


def test_version_is_that_of_the_distribution() -> None:
    """The command and the module say the same, and which build runs."""
    assert eventpump.__version__ == metadata.version("eventpump")
    expected = f"eventpump {eventpump.__version__} ({eventpump.reports.build_info()})\n"
    assert _run("-m", "eventpump", "--version").stdout == expected


@pytest.mark.parametrize("module", ["eventpump.cli.emulator", "eventpump.emulator.server", "pydantic"])
def test_interrupt_while_modules_are_imported_is_no_traceback(module: str) -> None:
    """Ctrl-C in the first moments ends the command with the code of an interrupt, and nothing else."""
    result = _run("-c", _INTERRUPTED.format(module=module))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_parser_for_one_subcommand_is_the_one_for_all(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A subcommand's help is the same where the other subcommands were not loaded."""
    shown = []
    for made in (parser([command]), parser()):
        with pytest.raises(SystemExit, match="0"):
            made.parse_args([command, "--help"])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].startswith(f"usage: eventpump {command} ")


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("no-such-command",), ()])
def test_call_without_a_subcommand_loads_none(arguments: tuple[str, ...]) -> None:
    """The version, the list of subcommands and what is wrong with the first word need none of their modules."""
    result = _run("-X", "importtime", "-m", "eventpump", *arguments)
    assert "eventpump.compiled" in result.stderr
    assert "pydantic" not in result.stderr


def test_help_lists_every_subcommand_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    """The list is the same whether the subcommands were loaded or not."""
    shown = []
    for made in (parser([]), parser()):
        made.print_help()
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    lines = [line.split() for line in shown[0].splitlines()]
    assert COMMANDS.keys() <= {line[0] for line in lines if line}


@pytest.mark.parametrize(
    "arguments",
    [("info",), ("parked", "list"), ("probe", "--yes", "--timeout", "1"), ("tail", "--retry-for", "0")],
    ids=lambda arguments: arguments[0],
)
def test_service_out_of_reach_is_one_line_and_exit_code_1(arguments: tuple[str, ...]) -> None:
    """Of every command: the same one may do its work later, which invalid input, 2, never does."""
    nobody = "Endpoint=sb://127.0.0.1:1;SharedAccessKeyName=k;SharedAccessKey=a;UseDevelopmentEmulator=true"
    result = _run("-m", "eventpump", *arguments, "--connection-string", nobody, "--hub", "h")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("eventpump: ")
