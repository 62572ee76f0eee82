"""`eventpump doctor`: what is wrong between this machine and a running consumer or producer."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Final

from eventpump.cli.lag import STORAGE_VARIABLE
from eventpump.cli.streams import (
    FAILURE,
    add_connection_options,
    connection_options,
    connection_text,
    keep_quiet,
    say,
    whole_number,
)
from eventpump.doctor.examination import Examination, StorePlace
from eventpump.errors import ConfigurationError
from eventpump.options.connection import ConnectionSettings, connection_settings

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - the only name of this type

_WIDEST: Final = 120
_CLEAR_LINE: Final = "\r\x1b[K"


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand and its options."""
    parser = subparsers.add_parser(
        "doctor",
        help="find out what is wrong between this machine and a running program",
        description="Examine, step by step, everything between this machine and a running consumer or producer, and "
        "print what was found and what to do. The first line is the cause, and the exit code is 1, if a step fails. No "
        "lease is taken, nobody is disturbed, and one blob is written and deleted.",
    )
    add_connection_options(parser)
    parser.add_argument(
        "--consumer-group", default="$Default", metavar="NAME", help="the consumer group (default: %(default)s)"
    )
    store = parser.add_argument_group("where hosts keep leases and checkpoints (one of them)")
    store.add_argument("--container", metavar="NAME", help="the blob container of a BlobLeaseStore")
    store.add_argument("--leases", metavar="FILE", help="the file of a SqliteLeaseStore")
    blobs = parser.add_argument_group("with --container")
    blobs.add_argument(
        "--storage-connection-string",
        metavar="TEXT",
        help=f"the storage account's connection string (default: ${STORAGE_VARIABLE})",
    )
    blobs.add_argument("--account-url", metavar="URL", help="the storage account's URL with a SAS token, instead")
    blobs.add_argument("--prefix", default="", metavar="TEXT", help="what goes before the consumer group in names")
    parser.add_argument("--send", action="store_true", help="send one event to the hub, which all consumers will read")
    parser.add_argument("--seconds", default="5", metavar="S", help="how long to read events (default: %(default)s)")
    parser.add_argument(
        "--timeout", default="10", metavar="S", help="how long a step may wait for an answer (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, and print what was found.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: An option of the command is wrong; what is wrong with a connection is found, and printed.
    """
    timeout = whole_number("--timeout", args.timeout, 1, 300)
    seconds = whole_number("--seconds", args.seconds, 0, 3600)
    place = _place(args)
    keep_quiet()

    def settings() -> ConnectionSettings:
        options = connection_options(args)
        options["operation_timeout"] = options["auth_timeout"] = float(timeout)
        return connection_settings(connection_text(args), args.hub, **options)

    shows = not args.json and sys.stderr is not None and sys.stderr.isatty()

    def progress(step: str) -> None:
        if shows:
            print(f"{_CLEAR_LINE}{step} ...", end="", file=sys.stderr, flush=True)

    examination = Examination(
        settings,
        args.consumer_group,
        place,
        timeout=timeout,
        seconds=seconds,
        sends=args.send,
        progress=progress,
    )
    try:
        diagnosis = asyncio.run(examination.run())
    finally:
        if shows:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)
    if args.json:
        say(json.dumps(diagnosis.document(), ensure_ascii=False))
    else:
        for line in diagnosis.lines(min(shutil.get_terminal_size().columns, _WIDEST)):
            say(line)
    return 0 if diagnosis.cause is None else FAILURE


def _place(args: argparse.Namespace) -> StorePlace | None:
    if args.container is not None and args.leases is not None:
        raise ConfigurationError("--container", "and --leases cannot be given together")
    if args.container is None:
        for name in ("storage_connection_string", "account_url", "prefix"):
            if getattr(args, name):
                raise ConfigurationError(f"--{name.replace('_', '-')}", "goes with --container")
        return None if args.leases is None else StorePlace(file=args.leases)
    text = args.storage_connection_string or (None if args.account_url else os.environ.get(STORAGE_VARIABLE))
    if not text and not args.account_url:
        problem = f"is required, here or in {STORAGE_VARIABLE}, or --account-url"
        raise ConfigurationError("--storage-connection-string", problem)
    return StorePlace(args.container, text, args.account_url, args.prefix)
