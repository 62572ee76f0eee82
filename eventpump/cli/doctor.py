"""`eventpump doctor`: what is wrong between this machine and a running consumer or producer."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from typing import TYPE_CHECKING, Final

from eventpump.cli.main import FAILURE
from eventpump.cli.stores import ENVIRONMENT, add_store_options, blob_options, check_place
from eventpump.cli.streams import (
    add_connection_options,
    add_group_option,
    connection_options,
    connection_text,
    hub_name,
    keep_quiet,
    say,
    whole_number,
)
from eventpump.doctor.examination import Examination, StorePlace
from eventpump.options.connection import ConnectionSettings, connection_settings
from eventpump.options.environment import CONTAINER

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - the only name of this type

_WIDEST: Final = 120
_CLEAR_LINE: Final = "\r\x1b[K"


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "doctor",
        help=summary,
        description="Examine, step by step, everything between this machine and a running consumer or producer, and "
        "print what was found and what to do. The first line is the cause, and the exit code is 1, if a step fails. No "
        "lease is taken, nobody is disturbed, and one blob is written and deleted.",
    )
    add_connection_options(parser)
    add_group_option(parser, "the consumer group")
    add_store_options(parser, is_written=True)
    parser.add_argument("--send", action="store_true", help="send one event to the hub, which all consumers will read")
    parser.add_argument("--seconds", default="5", metavar="S", help="how long to read events (default: %(default)s)")
    parser.add_argument(
        "--timeout", default="10", metavar="S", help="how long a step may wait for an answer (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, and print what was found; a wrong connection is found, too, and not raised. Return the exit code."""
    timeout = whole_number("--timeout", args.timeout, 1, 300)
    seconds = whole_number("--seconds", args.seconds, 0, 3600)
    place = _place(args)
    keep_quiet()

    def settings() -> ConnectionSettings:
        options = connection_options(args)
        options["operation_timeout"] = options["auth_timeout"] = float(timeout)
        return connection_settings(connection_text(args), hub_name(args), **options)

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
    names = ("container", "leases", "storage_connection_string", "account_url", "prefix", "namespace", "preserve_case")
    if not any(getattr(args, name) for name in names) and ENVIRONMENT.get(CONTAINER) is None:
        return None
    check_place(args, "", may_be_new=True)
    if args.leases is not None:
        return StorePlace(file=args.leases)
    return StorePlace(
        container=args.container, form=args.format, preserve_case=args.preserve_case, **blob_options(args, "")
    )
