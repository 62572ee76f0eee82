"""`eventpump info`: what a hub holds."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Final

from eventpump.cli.main import Subparsers
from eventpump.cli.streams import (
    add_connection_options,
    connection_options,
    connection_text,
    hub_name,
    keep_quiet,
    say,
)
from eventpump.cli.tables import table
from eventpump.clients.connection import make_transport
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    HubProperties,
    PartitionProperties,
    Transport,
)
from eventpump.options.connection import connection_settings
from eventpump.texts import excerpt

_AT_ONCE: Final = 8
"""Partitions that are asked for at a time."""


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "info",
        help=summary,
        description="Print a line for each partition of a hub: the numbers of its oldest and newest event, how many it "
        "holds, and when the newest was stored.",
    )
    add_connection_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it; return the exit code. Raises `EventPumpError` if the hub cannot be read."""
    settings = connection_settings(connection_text(args), hub_name(args), **connection_options(args))
    keep_quiet()
    hub, partitions = asyncio.run(_read(make_transport(settings), settings.hub))
    if args.json:
        say(json.dumps(_document(hub, partitions), ensure_ascii=False))
        return 0
    for line in _hub_lines(hub, partitions):
        say(line)
    return 0


async def _read(transport: Transport, hub: str) -> tuple[HubProperties, list[PartitionProperties]]:
    try:
        properties = await transport.get_hub_properties(hub)
        room = asyncio.Semaphore(_AT_ONCE)

        async def read(partition_id: str) -> PartitionProperties:
            async with room:
                return await transport.get_partition_properties(hub, partition_id)

        return properties, list(await asyncio.gather(*map(read, properties.partition_ids)))
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await transport.aclose()


def _count(partition: PartitionProperties) -> int:
    if partition.is_empty:
        return 0
    return partition.last_enqueued_sequence_number - partition.beginning_sequence_number + 1


def _hub_lines(hub: HubProperties, partitions: Sequence[PartitionProperties]) -> list[str]:
    created = hub.created_at.astimezone().isoformat(sep=" ", timespec="seconds")
    rows = [
        (
            each.partition_id,
            "" if each.is_empty else f"{each.beginning_sequence_number:,}",
            "" if each.is_empty else f"{each.last_enqueued_sequence_number:,}",
            f"{_count(each):,}",
            "" if each.is_empty else each.last_enqueued_time.astimezone().isoformat(sep=" ", timespec="milliseconds"),
        )
        for each in partitions
    ]
    title = f"hub {excerpt(hub.name)}: {len(partitions)} partitions, {sum(map(_count, partitions)):,} events, "
    return [f"{title}created {created}", "", *table(("partition", "oldest", "newest", "events", "stored last"), rows)]


def _document(hub: HubProperties, partitions: Sequence[PartitionProperties]) -> dict[str, object]:
    return {
        "hub": hub.name,
        "created_at": hub.created_at.isoformat(),
        "partitions": [
            {
                "partition": each.partition_id,
                "beginning_sequence_number": each.beginning_sequence_number,
                "last_enqueued_sequence_number": each.last_enqueued_sequence_number,
                "last_enqueued_time": None if each.is_empty else each.last_enqueued_time.isoformat(),
                "events": _count(each),
            }
            for each in partitions
        ],
    }
