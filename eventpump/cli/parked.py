"""`eventpump parked`: show the events of a hub that hosts parked there, and send them again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import groupby

from eventpump.cli.logs import add_log_option
from eventpump.cli.main import Subparsers
from eventpump.cli.streams import (
    add_connection_options,
    add_group_option,
    complain,
    connection_options,
    connection_text,
    hub_name,
    keep_quiet,
    say,
)
from eventpump.cli.tail import position
from eventpump.clients.connection import make_transport
from eventpump.clients.consumers import PartitionReader
from eventpump.clients.producers import EventProducer
from eventpump.errors import ConfigurationError, EventError, EventPumpError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent, copy_of
from eventpump.eventhubs.parked import Parked, parked_facts
from eventpump.interfaces import CLOSE_TIMEOUT, Transport
from eventpump.options.connection import ConnectionSettings, connection_settings
from eventpump.texts import excerpt


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "parked",
        help=summary,
        description="Show the events that hosts parked in a hub because they could not be processed, or send them "
        "again.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list",
        help="show the parked events of a hub",
        description="Print one line for each parked event: its place in HUB, where it came from (hub/partition/number "
        "and consumer group), when it failed first, how often it was tried, and its error.",
    )
    replay = actions.add_parser(
        "replay",
        help="send the parked events of a hub to another hub",
        description="Send the parked events of HUB to another hub, with their bodies, properties and keys, those of a "
        "key in order. All consumer groups of that hub receive them. They stay in HUB; run again, all are sent again. "
        "Exit code 1 if not all could be sent: each was sent at least once up to the place that is then named.",
    )
    for each in (listing, replay):
        each.add_argument("place", nargs="?", metavar="HUB", help="the hub with the parked events, in place of --hub")
        add_connection_options(each)
        each.add_argument("--partition", metavar="ID", help="only this partition of HUB (default: all)")
        each.add_argument(
            "--from",
            dest="start",
            default="start",
            metavar="POSITION",
            help="begin here in HUB: start, a sequence number, a time (ISO 8601; local without a zone), or offset:TEXT "
            "for what follows an offset (default: %(default)s)",
        )
        add_group_option(each, "read HUB as this group")
        add_log_option(each, default=argparse.SUPPRESS)
    replay.add_argument("--to", required=True, metavar="HUB2", help="the hub to send them to, in the same namespace")
    listing.set_defaults(run=run, to=None)
    replay.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List or replay; return the exit code. Raises `EventPumpError` if it could not be begun, or was refused."""
    start = position(args.start)
    if args.place is not None and args.hub is not None:
        raise ConfigurationError("--hub", "gives the hub that was given as HUB already")
    settings = connection_settings(connection_text(args), args.place or hub_name(args), **connection_options(args))
    if args.to is not None and args.to.lower() == settings.hub.lower():
        raise ConfigurationError("--to", "must be another hub than the one with the parked events")
    keep_quiet()
    return asyncio.run(_Work(settings, args.partition, start, args.consumer_group).run(args.to))


class _Work:
    """Reads the parked events of a hub, one partition after the other, up to the ends that they have at the start."""

    def __init__(
        self, settings: ConnectionSettings, partition_id: str | None, start: EventPosition, consumer_group: str
    ) -> None:
        self._settings = settings
        self._partition_id = partition_id
        self._start = start
        self._consumer_group = consumer_group
        self._place = ""

    async def run(self, to: str | None) -> int:
        transport = make_transport(self._settings)
        try:
            if to is None:
                await self._list(transport)
            else:
                await self._replay(transport, to)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await transport.aclose()
        return 0

    async def _list(self, transport: Transport) -> None:
        count = 0
        async for partition_id, found in self._parked(transport):
            for event, facts in found:
                say(_line(partition_id, event, facts))
            count += len(found)
        say(f"{count:,} parked events")

    async def _replay(self, transport: Transport, to: str) -> None:
        complain(f"every consumer group of {to} receives these events, not only those that parked them")
        count = 0
        producer = EventProducer(hub=to, transport=transport, owns_transport=False, retry=self._settings.retry)
        try:
            async for partition_id, found in self._parked(transport):
                for key, events in groupby((event for event, _ in found), key=lambda event: event.partition_key):
                    together = list(events)
                    self._place = f"from partition {partition_id}, sequence number {together[0].sequence_number} on"
                    await producer.send([copy_of(event) for event in together], partition_key=key, split=True)
                    count += len(together)
        except BaseException:
            where = f"; those {self._place} may not be sent" if self._place else ""
            complain(f"stopped after {count:,} events{where}")
            raise
        finally:
            with contextlib.suppress(EventPumpError):
                await producer.aclose(CLOSE_TIMEOUT)
        say(f"{count:,} events sent to {to}")

    async def _parked(self, transport: Transport) -> AsyncIterator[tuple[str, list[tuple[ReceivedEvent, Parked]]]]:
        """Yield parked events in order, several of a partition at a time. Others, and broken ones, are counted."""
        others = 0
        if self._partition_id is None:
            partition_ids = (await transport.get_hub_properties(self._settings.hub)).partition_ids
        else:
            partition_ids = (self._partition_id,)
        for partition_id in partition_ids:
            reader = PartitionReader(
                hub=self._settings.hub,
                partition_id=partition_id,
                position=self._start,
                end="@latest",
                consumer_group=self._consumer_group,
                transport=transport,
                owns_transport=False,
            )
            async with reader:
                while events := await reader.read():
                    found = [(event, facts) for event in events if (facts := _facts(event)) is not None]
                    others += len(events) - len(found)
                    yield partition_id, found
        if others:
            complain(f"{others:,} events of {self._settings.hub} were not parked by a host, and are left out")


def _facts(event: ReceivedEvent) -> Parked | None:
    with contextlib.suppress(EventError):
        return parked_facts(event)
    return None


def _line(partition_id: str, event: ReceivedEvent, facts: Parked) -> str:
    """Return what is known of a parked event; nothing in it can move the cursor or end the line."""
    number = "?" if facts.sequence_number is None else facts.sequence_number
    first_failed = facts.first_failed.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return "  ".join(
        (
            f"{partition_id}:{event.sequence_number}",
            f"{excerpt(facts.hub)}/{excerpt(facts.partition)}/{number}",
            excerpt(facts.consumer_group),
            first_failed,
            f"{facts.attempts} attempts",
            f"{excerpt(facts.error)}: {excerpt(facts.message)}",
        )
    )
