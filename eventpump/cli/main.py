"""The `eventpump` command."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import argparse

# Nothing of the library is imported at the top: until `main` runs, Ctrl-C would be answered with a traceback.

CONNECTION_VARIABLE: Final = "EVENTPUMP_CONNECTION_STRING"
"""The environment variable with the connection string."""
FAILED: Final = 2
"""The exit code for invalid input, or a service that refuses it."""
FAILURE: Final = 1
"""The exit code if the work was begun and failed, or the service or the store cannot be reached."""
HUBS = "The hubs here are"
"""What the emulator says of its hubs, where there is no such hub."""
INTERRUPTED = 130
"""The exit code after Ctrl-C."""

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - the only name of this type
"""What `add_parser` of a subcommand's module adds to."""

COMMANDS: Final = {
    "bench-processor": "eventpump.cli.bench_processor",
    "checkpoints": "eventpump.cli.checkpoints",
    "demo": "eventpump.demo.command",
    "doctor": "eventpump.cli.doctor",
    "emulator": "eventpump.cli.emulator",
    "info": "eventpump.cli.info",
    "lag": "eventpump.cli.lag",
    "parked": "eventpump.cli.parked",
    "probe": "eventpump.cli.probe",
    "send": "eventpump.cli.send",
    "tail": "eventpump.cli.tail",
}
"""The module of each subcommand."""
HELP: Final = {
    "bench-processor": "measure a processor without any service",
    "checkpoints": "show, save, copy, restore or move checkpoints",
    "demo": "watch hosts share a stream, or Spark aggregate it, kill one, and verify that nothing is lost",
    "doctor": "find out what is wrong between this machine and a running program",
    "emulator": "run a local Event Hubs service",
    "info": "show the partitions of a hub",
    "lag": "show how far a consumer group is behind",
    "parked": "show parked events, or send them again",
    "probe": "observe what is not known of the service, on a hub made for it",
    "send": "send the lines of a file or of the standard input",
    "tail": "follow the events of a hub",
}
"""What the list of subcommands shows of each."""


def parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command and its subcommands.

    Args:
        arguments: Those of the command line: only the subcommand that they name is complete, and the others, whose
            imports take most of a second, are in the list alone. None for all of them. Default: None.
    """
    import argparse
    from importlib import import_module, metadata
    from typing import NoReturn

    from eventpump.cli.logs import add_log_option
    from eventpump.compiled import build_info

    class OneLineParser(argparse.ArgumentParser):
        """A parser that prints errors in one line, without the usage."""

        def error(self, message: str) -> NoReturn:
            """Print the error, and exit with code 2."""
            from eventpump.texts import without_secrets

            self.exit(FAILED, f"{self.prog}: {without_secrets(message)}\n")

    made: argparse.ArgumentParser = OneLineParser(
        prog="eventpump", description="Stream through Azure Event Hubs, or through a local service like it."
    )
    version = f"eventpump {metadata.version('eventpump')} ({build_info()})"
    made.add_argument("--version", action="version", version=version)
    subparsers = made.add_subparsers(metavar="COMMAND", required=True)
    named = next((each for each in arguments or () if each in COMMANDS), None)
    for name, module in COMMANDS.items():
        if arguments is None or name == named:
            import_module(module).add_parser(subparsers, HELP[name])
        else:
            subparsers.add_parser(name, help=HELP[name])
    for each in subparsers.choices.values():
        add_log_option(each)
    return made


@contextmanager
def _quitting_on_interrupt() -> Iterator[None]:
    """End the process on SIGINT, while modules are imported: no exception, which would be printed, or be taken for an
    import that failed. Nothing has been begun that would have to be ended in order. An ignored SIGINT stays ignored."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _describe(error: Exception) -> str:
    """Return the text of an error in terms of the command line."""
    from eventpump.errors import ConfigurationError, EntityNotFoundError

    if isinstance(error, ConfigurationError) and error.field in ("hub", "connection_string"):
        problem = error.problem.replace(
            "either as an argument or as EntityPath of the connection string",
            "unless the connection string has an EntityPath",
        )
        return f"--{error.field.replace('_', '-')}: {problem}"
    if isinstance(error, EntityNotFoundError) and HUBS not in str(error):
        return f"{error}; the portal, or `az eventhubs eventhub list`, shows which hubs and consumer groups exist"
    return str(error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Those of the command line; None for the ones of this process.

    Returns:
        The exit code; with one line on stderr 1 for an error that may pass, and 2 for any other, such as invalid input.
        Without arguments, 2 with the usage.
    """
    given = sys.argv[1:] if arguments is None else arguments
    with _quitting_on_interrupt():
        made = parser(given)
        from eventpump.aio.doing import answering_signal
        from eventpump.cli.logs import complain, write_state, writing_logs
        from eventpump.errors import EventPumpError
    try:
        if not given:
            made.print_help(sys.stderr)
            return FAILED
        args = made.parse_args(given)
        with writing_logs(args.log_format), answering_signal(write_state):
            try:
                return int(args.run(args))
            except EventPumpError as error:
                # The text may quote what was given in place of a file or a name, such as a connection string.
                complain(_describe(error))
                return FAILURE if error.is_retryable else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
