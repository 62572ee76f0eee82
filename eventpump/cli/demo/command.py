"""`eventpump demo`: the main job on a laptop, one host killed on the way, and the proof that nothing was lost."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from eventpump import EventData, EventProducer, PartitionReader
from eventpump.assembly import ConnectionOptions
from eventpump.cli.demo.fleet import Fleet
from eventpump.cli.demo.market import Trade, trades
from eventpump.cli.demo.record import Record, digest, read_records
from eventpump.cli.demo.verify import Event, Verdict, judge
from eventpump.cli.demo.view import LiveView, PlainView, Scene, View
from eventpump.errors import ConfigurationError
from eventpump.settings import TransportName, TransportType

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - the only name of this type

HUB = "trades"
LEASE_DURATION = 5.0
"""Seconds; the original's is 30, too long to watch."""
_TICK = 0.05
_KILL_AT, _JOIN_AT = 0.4, 0.65
"""Parts of the stream after which a host is killed, and another joins."""
_SETTLE_TIMEOUT = 60.0


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand and its options."""
    parser = subparsers.add_parser(
        "demo",
        help="watch hosts share a stream, lose one, and lose nothing",
        description="Start a local service, publish market data, process it on three hosts in processes of their own, "
        "kill one, add another, and verify that every event was processed. Exit code 1 if any was lost.",
    )
    add = parser.add_argument
    add("--events", type=int, default=200_000, metavar="N", help="events to publish (default: %(default)s)")
    add("--partitions", type=int, default=8, metavar="N", help="partitions of the hub (default: %(default)s)")
    add("--seconds", type=float, default=24.0, metavar="S", help="time to publish them in (default: %(default)s)")
    add("--seed", type=int, default=7, help="of the made-up market (default: %(default)s)")
    add("--transport-type", choices=get_args(TransportType), default="tcp", help="what carries AMQP")
    add("--transport", choices=get_args(TransportName), default="native", help="the AMQP implementation of the hosts")
    add("--plain", action="store_true", help="lines instead of the live table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo. :returns: 0 where nothing was lost, else 1. :raises EventPumpError: it could not be run."""
    for name, low, high in (("events", 100, 50_000_000), ("partitions", 1, 32), ("seconds", 1, 3600)):
        if not low <= getattr(args, name) <= high:
            raise ConfigurationError(f"--{name}", f"must lie between {low} and {high}")
    plain = args.plain or not sys.stdout.isatty()
    if not plain and util.find_spec("rich") is None:
        raise ConfigurationError("demo", "the live table needs: pip install 'eventpump[cli]'; or use --plain")
    if args.transport == "uamqp":
        if args.transport_type == "websocket":
            raise ConfigurationError("--transport", "uamqp is not carried by a WebSocket here")
        if util.find_spec("trustme") is None:
            raise ConfigurationError(
                "--transport", "uamqp speaks TLS only, and a certificate needs: pip install trustme"
            )
    with tempfile.TemporaryDirectory(prefix="eventpump-demo-") as folder:
        return 0 if asyncio.run(_Demo(args, Path(folder), plain=plain).run()).holds else 1


class _Demo:
    def __init__(self, args: argparse.Namespace, folder: Path, *, plain: bool) -> None:
        self._total: int = args.events
        self._seconds: float = args.seconds
        self._seed: int = args.seed
        options: ConnectionOptions = {"transport_type": args.transport_type, "transport": args.transport}
        self._fleet = Fleet(folder, HUB, args.partitions, LEASE_DURATION, options)
        self._scene = Scene(self._fleet, args.events)
        self._is_plain = plain
        self._published: list[str] = []
        self._killed: str | None = None
        self._killed_at: float | None = None
        self._orphans: list[str] = []

    async def run(self) -> Verdict:
        view: View
        screen: AbstractContextManager[object]
        if self._is_plain:
            view, screen = PlainView(self._scene), nullcontext()
        else:
            view = screen = LiveView(self._scene)
        try:
            with screen:
                refresh = asyncio.create_task(self._refresh(view), name="view")
                try:
                    verdict = await self._play(view)
                finally:
                    refresh.cancel()
                view.refresh()
                view.end(verdict)
        finally:
            await self._fleet.stop()
        return verdict

    async def _refresh(self, view: View) -> None:
        while True:
            view.refresh()
            await asyncio.sleep(0.25)

    async def _play(self, view: View) -> Verdict:
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
        async with EventProducer(fleet.connection_string, HUB, **fleet.options) as producer:
            await self._publish(producer, view)
            view.happened("everything is published")
            ends = {
                each: (await producer.get_partition_properties(each)).last_enqueued_sequence_number
                for each in everything
            }

        def is_processed(partition_id: str) -> bool:
            owner = fleet.owner(partition_id)
            position = None if owner is None else owner.partitions[partition_id]["position"]
            # A new owner that has nothing left to process has no position.
            return ends[partition_id] < 0 or (position is not None and position >= ends[partition_id])

        done: set[str] = set()

        def all_processed() -> bool:
            done.update(each for each in everything if is_processed(each))
            return len(done) == len(everything)

        await fleet.wait("every event is processed", all_processed, timeout=_SETTLE_TIMEOUT)
        self._scene.freeze()
        await fleet.stop_hosts()
        view.happened("the hosts have stopped; comparing what was published with what each wrote down")
        stored = [event for each in everything for event in await self._stored(each)]
        records: dict[str, list[Record]] = {host.name: list(read_records(host.records)) for host in fleet.hosts}
        return judge(
            self._published,
            stored,
            records,
            killed=self._killed,
            killed_at=self._killed_at,
            orphans=self._orphans,
        )

    async def _publish(self, producer: EventProducer, view: View) -> None:
        loop = asyncio.get_running_loop()
        stream = itertools.islice(trades(self._seed), self._total)
        began = loop.time()
        sent, is_killed, is_joined = 0, False, False
        while sent < self._total:
            due = min(self._total, int(self._total * (loop.time() - began + _TICK) / self._seconds))
            batch = list(itertools.islice(stream, max(0, due - sent)))
            sent += len(batch)
            await self._send(producer, batch)
            self._scene.published = sent
            if not is_killed and sent >= self._total * _KILL_AT:
                is_killed = True
                self._kill(view)
            if not is_joined and sent >= self._total * _JOIN_AT:
                is_joined = True
                host = await self._fleet.start_host()
                view.happened(f"{host.name} joins")
            await asyncio.sleep(_TICK)

    async def _send(self, producer: EventProducer, batch: list[Trade]) -> None:
        by_symbol: dict[str, list[bytes]] = {}
        for trade in batch:
            by_symbol.setdefault(trade.symbol, []).append(trade.encode())
        async with asyncio.TaskGroup() as sends:
            for symbol, bodies in by_symbol.items():
                events = [EventData(body, content_type="application/json") for body in bodies]
                sends.create_task(producer.send(events, partition_key=symbol))
        self._published.extend(digest(body) for bodies in by_symbol.values() for body in bodies)

    def _kill(self, view: View) -> None:
        victim = self._fleet.hosts[1]
        self._orphans = sorted(victim.partitions, key=int)
        self._killed = victim.name
        victim.kill()
        self._killed_at = victim.killed_at
        view.happened(f"{victim.name} was killed (SIGKILL); it had partitions {', '.join(self._orphans) or 'none'}")

    async def _stored(self, partition_id: str) -> list[Event]:
        fleet = self._fleet
        reader = PartitionReader(
            fleet.connection_string, HUB, partition_id=partition_id, end="@latest", **fleet.options
        )
        async with reader:
            return [(partition_id, event.sequence_number, digest(event.body)) async for event in reader]
