"""The hosts' demo: hosts share a stream, one of them is killed, and the demo verifies that nothing was lost."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from pathlib import Path

from eventpump import EventProducer, PartitionReader
from eventpump.demo.exchange import TRADES, publish
from eventpump.demo.fleet import Fleet
from eventpump.demo.record import ProcessedEvent, digest, read_records
from eventpump.demo.scene import FleetScene
from eventpump.demo.verify import Event, Verdict, judge
from eventpump.demo.view import View
from eventpump.options.connection import ClientOptions

LEASE_DURATION = 5.0
"""Seconds; the original's is 30, too long to watch."""
_KILL_AT, _JOIN_AT = 0.4, 0.65
"""Parts of the stream after which a host is killed, and another joins."""
_SETTLE_TIMEOUT = 60.0
_STARTING, _COMPARING = 6.0, 10.0
"""How long the demo takes besides publishing, in times that its modules take to be imported: to start its processes,
and to compare 200,000 events. So a slow or busy machine has its own estimate."""


class Processing:
    """The play.

    Args:
        imports: Seconds that its modules took to be imported.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, imports: float) -> None:
        self._args = args
        self._imports = imports
        options: ClientOptions = {"transport_type": args.transport_type, "transport": args.transport}
        self._fleet = Fleet(folder, TRADES, args.partitions, LEASE_DURATION, options)
        self.scene = FleetScene(self._fleet, args.events)
        """What there is to see."""
        self._published: list[str] = []
        self._killed: str | None = None
        self._killed_at: float | None = None
        self._orphans: list[str] = []
        self._is_joined = False

    @property
    def announcement(self) -> str:
        """How long it takes."""
        around = self._imports * (_STARTING + _COMPARING * self._args.events / 200_000)
        return f"this takes about {self._args.seconds + around:.0f} s here; Ctrl-C ends it"

    async def play(self, view: View) -> Verdict:
        """See `Play`."""
        fleet = self._fleet
        await fleet.start_service()
        view.happened(f"a local service with {fleet.partitions} partitions is up")
        for _ in range(3):
            await fleet.start_host()
        everything = [str(each) for each in range(fleet.partitions)]
        await fleet.wait(
            "every partition has an owner", lambda: all(map(fleet.owner, everything)), timeout=_SETTLE_TIMEOUT
        )
        view.happened("three hosts share the partitions")
        async with EventProducer(fleet.connection_string, TRADES, **fleet.options) as producer:
            async for sent in publish(producer, self._args.seed, self._args.events, self._args.seconds):
                await self._act(sent, view)
            view.happened("everything is published")
            ends = {
                each: (await producer.get_partition_properties(each)).last_enqueued_sequence_number
                for each in everything
            }

        left = {"processed": set(everything), "archived": set(everything)}

        def is_all(what: str) -> bool:
            # A new owner that has nothing left to process has no position: what its predecessor said counts.
            for each in everything:
                if (owner := fleet.owner(each)) is not None:
                    for name, statuses in (("processed", owner.partitions), ("archived", owner.archived)):
                        position = statuses.get(each, {}).get("position")
                        if ends[each] <= (-1 if position is None else position):
                            left[name].discard(each)
            return not left[what]

        for what in left:
            await fleet.wait(f"every event is {what}", partial(is_all, what), timeout=_SETTLE_TIMEOUT)
            view.happened(f"everything is {what}")
        self.scene.freeze()
        await fleet.stop_hosts()
        view.happened("the hosts have stopped; reading the hub again")
        self.scene.compared = 0
        stored = [event for each in everything for event in await self._stored(each)]
        view.happened("comparing it with the records of the hosts")
        # In a thread, so that the view goes on.
        return await asyncio.to_thread(self._judge, stored)

    def _judge(self, stored: list[Event]) -> Verdict:
        hosts = self._fleet.hosts
        records: dict[str, list[ProcessedEvent]] = {host.name: list(read_records(host.records)) for host in hosts}
        return judge(
            self._published,
            stored,
            records,
            killed=self._killed,
            killed_at=self._killed_at,
            orphans=self._orphans,
            archived=[record.event for host in hosts for record in read_records(host.archive)],
        )

    async def stop(self) -> None:
        """End all its processes."""
        await self._fleet.stop()

    def kill(self) -> None:
        self._fleet.kill()

    async def _act(self, sent: list[bytes], view: View) -> None:
        self._published += map(digest, sent)
        total, published = self._args.events, len(self._published)
        self.scene.published = published
        if self._killed is None and published >= total * _KILL_AT:
            self._kill(view)
        if not self._is_joined and published >= total * _JOIN_AT:
            self._is_joined = True
            host = await self._fleet.start_host()
            view.happened(f"{host.name} joins")

    def _kill(self, view: View) -> None:
        victim = self._fleet.hosts[1]
        self._orphans = sorted(victim.partitions, key=int)
        self._killed = victim.name
        victim.kill()
        self._killed_at = victim.killed_at
        view.happened(f"{victim.name} was killed (SIGKILL); it had {', '.join(self._orphans) or 'no partition'}")

    async def _stored(self, partition_id: str) -> list[Event]:
        fleet = self._fleet
        reader = PartitionReader(
            fleet.connection_string, TRADES, partition_id=partition_id, end="@latest", **fleet.options
        )
        stored: list[Event] = []
        async with reader:
            async for event in reader:
                stored.append((partition_id, event.sequence_number, digest(event.body)))
                self.scene.compared = (self.scene.compared or 0) + 1
        return stored
