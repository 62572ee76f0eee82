"""`eventpump probe`: what the service does where docs/protocol.md does not know."""

from __future__ import annotations

import argparse
import asyncio
import json
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from eventpump.cli.main import FAILURE
from eventpump.cli.streams import (
    add_connection_options,
    add_group_option,
    complain,
    connection_options,
    connection_text,
    hub_name,
    keep_quiet,
    say,
    whole_number,
)
from eventpump.clients.connection import make_transport
from eventpump.emulator.server import Emulator
from eventpump.errors import ConfigurationError
from eventpump.options.connection import ConnectionSettings, connection_settings
from eventpump.probe.bench import Bench
from eventpump.probe.observations import NOT_OBSERVED, OBSERVATIONS, Observation, observe
from eventpump.texts import without_secrets

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - the only name of this type

_COST: Final = "about 150 requests and 60 events of less than 2 KiB each"


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "probe",
        help=summary,
        description="Make the observations that docs/protocol.md lacks, compare each with what the emulator does, and "
        "write a report to send in. The hub must be new, and nobody may use it; it is not deleted. This takes "
        f"{_COST}.",
    )
    add_connection_options(parser)
    add_group_option(parser, "the consumer group")
    parser.add_argument("--yes", action="store_true", help="do it; without this, only what would be done is printed")
    parser.add_argument("--long", action="store_true", help="make the observation that takes five minutes too")
    parser.add_argument("--report", metavar="FILE", help="write the report, as JSON, without names of the namespace")
    parser.add_argument(
        "--timeout", default="10", metavar="S", help="seconds to wait for what must come (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print each observation beside the emulator's; return 0 if all are as those. Raises `EventPumpError`."""
    timeout = whole_number("--timeout", args.timeout, 1, 300)
    settings = connection_settings(connection_text(args), hub_name(args), **connection_options(args))
    chosen = [each for each in OBSERVATIONS if args.long or not each.is_long]
    if not args.yes:
        say(f"{len(chosen)} observations on hub {settings.hub}, with {_COST};")
        say("nothing is deleted. Give --yes to make them:")
        for each in chosen:
            say(f"  {each.name}: {each.question} (protocol.md {each.section})")
        return 0
    if args.report is not None:
        _check_report(Path(args.report))
    keep_quiet()
    rows: list[dict[str, Any]] = []
    is_written = True
    try:
        asyncio.run(_probe(settings, args.consumer_group, chosen, timeout, rows))
    finally:
        # After Ctrl-C too: the hub serves for no second run.
        if args.report is not None and rows:
            is_written = _write(args.report, rows)
    return FAILURE if not is_written or any(row["observed"] != row["emulator"] for row in rows) else 0


def _check_report(path: Path) -> None:
    if path.is_dir():
        raise ConfigurationError("--report", f"{path} is a directory")
    if not path.absolute().parent.is_dir():
        raise ConfigurationError("--report", f"the directory of {path} does not exist")


def _write(path: str, rows: list[dict[str, Any]]) -> bool:
    """Write the report; on the standard output if the file cannot be written. Return whether it is in the file."""
    text = json.dumps(_report(rows), indent=2, ensure_ascii=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        complain(f"{path}: {error.strerror}: the report is on the standard output")
        say(text)
        return False
    say(f"the report is in {without_secrets(path)}")
    return True


async def _probe(
    settings: ConnectionSettings, group: str, chosen: list[Observation], timeout: float, rows: list[dict[str, Any]]
) -> None:
    """Observe, and add what was observed to `rows`."""
    async with Emulator({settings.hub: 1}) as emulator:
        local = connection_settings(emulator.connection_string, settings.hub)
        transports = [make_transport(settings), make_transport(local)]
        benches = [
            Bench(transport, settings.hub, each_group, timeout)
            for transport, each_group in zip(transports, (group, "$Default"), strict=True)
        ]
        try:
            for bench in benches:
                await bench.check()
            for each in chosen:
                observed, expected = await asyncio.gather(*(observe(bench, each) for bench in benches))
                rows.append(
                    {
                        "name": each.name,
                        "section": each.section,
                        "question": each.question,
                        "observed": observed,
                        "emulator": expected,
                    }
                )
                say(f"{'same' if observed == expected else 'DIFFERS'}  {each.name}: {observed}")
                if observed != expected:
                    say(f"         the emulator: {expected}")
        finally:
            for transport in transports:
                await transport.aclose()


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "eventpump": metadata.version("eventpump"),
        "date": datetime.now(UTC).date().isoformat(),
        "observations": rows,
        "not_observed": NOT_OBSERVED,
    }
