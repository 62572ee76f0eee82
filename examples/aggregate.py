"""Read the trades of several sources, each a hub, and publish one bar per symbol and window to one hub.

    python examples/aggregate.py --source nyse --source lse --target bars --connection-string "Endpoint=..."

A trade is JSON: {"symbol": "ACME", "price": 12.5, "size": 100, "time": 1760000000.25}; the time is in seconds. A window
is published when every partition has passed it or has been silent for a while; trades that arrive even later are
counted and left out. One process reads everything, because a bar needs the trades of all partitions.

It can be killed at any moment. The bars of a window are one message, so the hub of bars shows which windows are
published; checkpoints are written only after trades whose windows are published.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from eventpump import (
    EventData,
    EventPosition,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    EventPumpError,
    PartitionContext,
    PartitionReader,
    PublishOutcomeUnknownError,
    ReceivedEvent,
    SqliteLeaseStore,
    SqlitePublisherStateStore,
)

OUTPUT = "0"
"""The partition of the target hub for all bars, in order of time."""


@dataclass
class Bar:
    """The aggregate of a symbol's trades in a window."""

    trades: int = 0
    volume: int = 0
    low: float = math.inf
    high: float = -math.inf
    first: tuple[float, float] = (math.inf, 0.0)
    last: tuple[float, float] = (-math.inf, 0.0)

    def add(self, time: float, price: float, size: int) -> None:
        self.trades += 1
        self.volume += size
        self.low, self.high = min(self.low, price), max(self.high, price)
        self.first, self.last = (
            min(self.first, (time, price)),
            max(self.last, (time, price)),
        )


@dataclass
class Partition:
    """The reading position in a partition of a source.

    Attributes:
        time: The time of its latest trade.
        heard: When it was received, by the loop's clock.
        open: Trades whose windows are not published yet, and later ones: their window, and the event.
    """

    heard: float
    time: float = -math.inf
    open: deque[tuple[float, ReceivedEvent]] = field(default_factory=deque)


class Windows:
    """The windows that are being filled. Used by all hosts, in one event loop."""

    def __init__(
        self, length: float, quiet: float, partitions: int, published_until: float
    ) -> None:
        self.length, self.quiet, self.expected = length, quiet, partitions
        self.published_until = published_until
        self.partitions: dict[tuple[str, str], Partition] = {}
        self.bars: dict[float, dict[str, Bar]] = defaultdict(lambda: defaultdict(Bar))
        self.left_out = 0

    def add(self, partition: Partition, event: ReceivedEvent) -> None:
        trade = event.body_as_json()
        start = math.floor(trade["time"] / self.length) * self.length
        partition.time = max(partition.time, trade["time"])
        partition.open.append((start, event))
        if start < self.published_until:
            self.left_out += 1
        else:
            self.bars[start][trade["symbol"]].add(
                trade["time"], trade["price"], trade["size"]
            )

    def settled(self, partition: Partition) -> ReceivedEvent | None:
        """Return the last event up to which everything is published."""
        settled = None
        while partition.open and partition.open[0][0] < self.published_until:
            _, settled = partition.open.popleft()
        return settled

    def complete(self, now: float) -> list[float]:
        """Return the windows for which no more trades are expected."""
        if len(self.partitions) < self.expected:
            return []
        talking = (
            each.time
            for each in self.partitions.values()
            if now - each.heard < self.quiet
        )
        until = min(talking, default=math.inf)
        return sorted(start for start in self.bars if start + self.length <= until)


class Trades(EventProcessor):
    """Reads one source."""

    def __init__(self, hub: str, windows: Windows) -> None:
        self.hub, self.windows = hub, windows

    async def open(self, context: PartitionContext) -> None:
        heard = asyncio.get_running_loop().time()
        self.windows.partitions[self.hub, context.partition_id] = Partition(heard)

    async def process_events(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        partition = self.windows.partitions[self.hub, context.partition_id]
        for event in events:
            self.windows.add(partition, event)
        if events:
            partition.heard = asyncio.get_running_loop().time()
        if (settled := self.windows.settled(partition)) is not None:
            await context.checkpoint(settled)


async def publish_bars(
    producer: EventProducer, windows: Windows, count: int | None
) -> None:
    """Publish windows when they are complete, indefinitely or until a number of bars is published."""
    bars = 0
    while count is None or bars < count:
        for start in windows.complete(asyncio.get_running_loop().time()):
            # Trades that arrive for this window from now on are left out.
            window = windows.bars.pop(start)
            closed = start + windows.length
            message = [
                EventData(
                    json.dumps(
                        {
                            "symbol": symbol,
                            "start": start,
                            "until": closed,
                            "open": bar.first[1],
                            "high": bar.high,
                            "low": bar.low,
                            "close": bar.last[1],
                            "volume": bar.volume,
                            "trades": bar.trades,
                        }
                    ),
                    content_type="application/json",
                )
                for symbol, bar in sorted(window.items())
            ]
            await send(producer, message)
            windows.published_until = closed
            bars += len(message)
            print(
                f"window {start:.1f}: {len(message)} bars, {windows.left_out} trades left out",
                flush=True,
            )
        await asyncio.sleep(0.1)


async def send(producer: EventProducer, message: list[EventData]) -> None:
    while True:
        try:
            await producer.send(message, partition_id=OUTPUT)
        except PublishOutcomeUnknownError as error:
            print(
                error, flush=True
            )  # sending the same list again never stores a second copy
        else:
            return


async def published_until(
    connection_string: str, producer: EventProducer, target: str
) -> float:
    """Return when the window of the last published bar ended."""
    # Attaching with a higher level fences out a former process: from here on only this process adds bars.
    await producer.get_partition_publishing_properties(OUTPUT)
    last = (
        await producer.get_partition_properties(OUTPUT)
    ).last_enqueued_sequence_number
    position = EventPosition.at_sequence_number(last, inclusive=True)
    async with PartitionReader(
        connection_string, target, partition_id=OUTPUT, position=position, end="@latest"
    ) as reader:
        async for event in reader:
            return float(event.body_as_json()["until"])
    return -math.inf


async def aggregate(
    connection_string: str,
    sources: list[str],
    target: str,
    state: str,
    length: float,
    quiet: float,
    count: int | None,
) -> None:
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(
            EventProducer(
                connection_string,
                target,
                idempotent=True,
                name="bars",
                state_store=SqlitePublisherStateStore(state),
                # In-flight bars of a former process are read from the hub of bars, after that process is fenced out.
                mode="exclusive",
                on_doubt="accept",
            )
        )
        partitions = 0
        for source in sources:
            async with EventProducer(connection_string, source) as asking:
                partitions += len(await asking.get_partition_ids())
        until = await published_until(connection_string, producer, target)
        windows = Windows(length, quiet, partitions, until)
        hosts = [
            await stack.enter_async_context(
                EventProcessorHost(
                    connection_string,
                    source,
                    processor=Trades(source, windows),
                    # Short, because a process that is restarted after a kill waits for its former leases to expire.
                    lease_store=SqliteLeaseStore(state, lease_duration=6),
                    renew_interval=2,
                    call_when_idle=True,
                )
            )
            for source in sources
        ]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(host.run()) for host in hosts]
            await publish_bars(producer, windows, count)
            for host in hosts:
                host.stop()
            await asyncio.gather(*running)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument(
        "--source",
        action="append",
        required=True,
        help="a hub of trades; may be repeated",
    )
    parser.add_argument(
        "--target", default="bars", help="the hub that bars are published to"
    )
    parser.add_argument(
        "--state",
        default="aggregate.db",
        help="a SQLite file, for leases and the publisher's state",
    )
    parser.add_argument("--window", type=float, default=1.0, help="seconds")
    parser.add_argument(
        "--quiet",
        type=float,
        default=5.0,
        help="seconds of silence after which a partition is not waited for",
    )
    parser.add_argument("--count", type=int, help="stop after this many bars")
    args = parser.parse_args()
    try:
        asyncio.run(
            aggregate(
                args.connection_string,
                args.source,
                args.target,
                args.state,
                args.window,
                args.quiet,
                args.count,
            )
        )
    except (EventPumpError, ExceptionGroup, KeyboardInterrupt) as error:
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        sys.exit(f"{type(first).__name__}: {first}")
