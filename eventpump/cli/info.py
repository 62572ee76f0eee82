"""`eventpump info`: what a hub holds, and how far the hosts of a lease store have come."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from eventpump.aio.tasks import gather
from eventpump.cli.streams import (
    FAILURE,
    add_connection_options,
    complain,
    connection_options,
    connection_text,
    keep_quiet,
    say,
)
from eventpump.clients.connection import make_transport
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.errors import ConfigurationError, Recovery, ServiceError, StoreError
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    ConsumerScope,
    HubProperties,
    LeaseStore,
    PartitionProperties,
    Transport,
)
from eventpump.options.connection import connection_settings
from eventpump.storage.groups import GroupRecords
from eventpump.storage.leases.sqlite import SqliteLeaseStore
from eventpump.storage.scope_form import HubNames
from eventpump.texts import excerpt

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - the only name of this type

_AT_ONCE: Final = 8
"""Partitions that are asked for at a time."""
_READS_AT_ONCE: Final = 32


class Progress(NamedTuple):
    """A checkpoint that was found in a lease store."""

    consumer_group: str
    subscription: str
    partition_id: str
    sequence_number: int


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand and its options."""
    parser = subparsers.add_parser(
        "info",
        help="show the partitions of a hub, and the lag of its consumer groups",
        description="Print a line for each partition of a hub: the numbers of its oldest and newest event, how many it "
        "holds, and when the newest was stored. With --leases: also the consumer groups of that lease store, and how "
        "many events each is behind, by its checkpoints.",
    )
    add_connection_options(parser)
    parser.add_argument("--leases", metavar="FILE", help="the file of a SqliteLeaseStore")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it.

    Returns:
        The exit code.

    Raises:
        EventPumpError: The hub cannot be read, or the file of leases.
    """
    settings = connection_settings(connection_text(args), args.hub, **connection_options(args))
    found: list[Progress] | None = None
    if args.leases is not None:
        if not os.path.isfile(args.leases):
            raise ConfigurationError("--leases", f"{args.leases}: there is no such file")
        found = asyncio.run(progress(Path(args.leases), settings.fully_qualified_namespace, settings.hub))
    keep_quiet()
    try:
        hub, partitions = asyncio.run(_read(make_transport(settings), settings.hub))
    except ServiceError as error:
        if error.recovery is Recovery.GIVE_UP:
            raise
        complain(str(error))
        return FAILURE
    if args.json:
        say(json.dumps(_document(hub, partitions, found), ensure_ascii=False))
        return 0
    for line in (*_hub_lines(hub, partitions), *(() if found is None else _group_lines(partitions, found))):
        say(line)
    return 0


async def progress(path: Path, namespace: str, hub: str) -> list[Progress]:
    """Read the checkpoints of a hub from the file of a `SqliteLeaseStore`. Nothing is written.

    Args:
        path: The file.
        namespace: The namespace's host name.
        hub: The hub's name.

    Raises:
        ConfigurationError: The file cannot be read, or is another one.
    """
    try:
        scopes = await SqliteLeaseStore(path).scopes()
        names = HubNames(namespace, hub)
        found = [await _progress(SqliteLeaseStore(path), each) for each in scopes if HubNames.of(each).is_same(names)]
    except (ConfigurationError, StoreError) as error:
        problem = error.problem if isinstance(error, ConfigurationError) else str(error)
        raise ConfigurationError("--leases", f"not the file of a lease store: {problem}") from None
    return [each for group in found for each in group]


async def _progress(store: LeaseStore, scope: ConsumerScope) -> list[Progress]:
    """Read the checkpoints of one consumer group from any store."""
    await store.open(scope, read_only=True)
    try:
        records = GroupRecords(store, scope)
        partitions = [lease.partition_id for lease in await store.list()]
        made = [stored.record for stored in await records.list_subscriptions()]
        names = {DEFAULT_SUBSCRIPTION: DEFAULT_SUBSCRIPTION} | {record.key: record.name for record in made}
        places = [(key, partition_id) for key in names for partition_id in partitions]
        reads = (records.read_checkpoint(partition_id, key) for key, partition_id in places)
        checkpoints = await gather(reads, at_once=_READS_AT_ONCE)
        return [
            Progress(scope.consumer_group, names[key], partition_id, checkpoint.sequence_number)
            for (key, partition_id), checkpoint in zip(places, checkpoints, strict=True)
            if checkpoint is not None
        ]
    finally:
        await store.aclose()


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
    return [f"{title}created {created}", "", *_table(("partition", "oldest", "newest", "events", "stored last"), rows)]


def lag_of(partition: PartitionProperties, sequence_number: int | None) -> int:
    """Return how many events of a partition lie after a checkpoint; all of them without one."""
    if partition.is_empty:
        return 0
    oldest = partition.beginning_sequence_number
    first = oldest if sequence_number is None else max(oldest, sequence_number + 1)
    return max(0, partition.last_enqueued_sequence_number - first + 1)


def _by_group(
    partitions: Sequence[PartitionProperties], found: Sequence[Progress]
) -> dict[tuple[str, str], dict[str, tuple[int | None, int]]]:
    """Return, by consumer group and subscription, the checkpoint and the lag of each partition."""
    groups: dict[tuple[str, str], dict[str, int]] = {}
    for each in found:
        groups.setdefault((each.consumer_group, each.subscription), {})[each.partition_id] = each.sequence_number
    return {
        group: {
            each.partition_id: (numbers.get(each.partition_id), lag_of(each, numbers.get(each.partition_id)))
            for each in partitions
        }
        for group, numbers in sorted(groups.items())
    }


def _group_lines(partitions: Sequence[PartitionProperties], found: Sequence[Progress]) -> list[str]:
    lines = [] if found else ["", "the lease store has no checkpoint of this hub"]
    for (group, subscription), places in _by_group(partitions, found).items():
        name = excerpt(group) if subscription == DEFAULT_SUBSCRIPTION else f"{excerpt(group)}, {excerpt(subscription)}"
        behind = sum(lag for _, lag in places.values())
        rows = [
            (partition_id, "" if number is None else f"{number:,}", f"{lag:,}")
            for partition_id, (number, lag) in places.items()
        ]
        lines += ["", f"consumer group {name}: {behind:,} events behind", ""]
        lines += _table(("partition", "checkpoint", "behind"), rows)
        ahead = [
            each.partition_id
            for each in partitions
            if (places[each.partition_id][0] or 0) > max(each.last_enqueued_sequence_number, 0)
        ]
        if ahead:
            lines.append(
                f"checkpoints of partitions {', '.join(ahead)} lie beyond the newest event: they are of a former hub; "
                'remove the file, or give the host on_data_loss="earliest"'
            )
    return lines


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    ]


def _document(
    hub: HubProperties, partitions: Sequence[PartitionProperties], found: Sequence[Progress] | None
) -> dict[str, object]:
    document: dict[str, object] = {
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
    if found is not None:
        document["consumer_groups"] = [
            {
                "consumer_group": group,
                "subscription": subscription,
                "lag": sum(lag for _, lag in places.values()),
                "partitions": [
                    {"partition": partition_id, "checkpoint": number, "lag": lag}
                    for partition_id, (number, lag) in places.items()
                ],
            }
            for (group, subscription), places in _by_group(partitions, found).items()
        ]
    return document
