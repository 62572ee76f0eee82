"""The `eventpump` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from eventpump.cli import bench_processor, emulator, parked, send, tail
from eventpump.demo import command as demo
from eventpump.errors import EventPumpError

FAILED = 2
"""The exit code for invalid input, or a service that refuses it."""


class OneLineParser(argparse.ArgumentParser):
    """A parser that prints errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with code 2."""
        self.exit(FAILED, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command and its subcommands."""
    made: argparse.ArgumentParser = OneLineParser(
        prog="eventpump", description="Stream through Azure Event Hubs, or through a local service like it."
    )
    made.add_argument("--version", action="version", version=f"eventpump {metadata.version('eventpump')}")
    subparsers = made.add_subparsers(metavar="COMMAND", required=True)
    bench_processor.add_parser(subparsers)
    demo.add_parser(subparsers)
    emulator.add_parser(subparsers)
    parked.add_parser(subparsers)
    send.add_parser(subparsers)
    tail.add_parser(subparsers)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code; 2 with one line on stderr if the input is invalid.
    """
    args = parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except EventPumpError as error:
        print(f"eventpump: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
