"""Apply orders to accounts: the orders of an account in order, many accounts at the same time.

    python examples/keyed.py --count 2000

Each order waits for a database, here for 10 ms. A plain processor would apply 100 orders per second and partition; this
one applies `--concurrency` times as many. An order that cannot be applied is parked after two retries, and holds up
nothing but its account meanwhile. Without a connection string the orders go to a local service, which ends with the
program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from eventpump import (
    BufferedProducer,
    CheckpointPolicy,
    Emulator,
    EventData,
    EventProcessorHost,
    EventPumpError,
    KeyedProcessor,
    Park,
    PartitionContext,
    ReceivedEvent,
    RetryOptions,
    SqliteLeaseStore,
)


class Accounts:
    """The balances, and how far each account is."""

    def __init__(self) -> None:
        self.balance: dict[str, int] = defaultdict(int)
        self.last: dict[str, int] = defaultdict(lambda: -1)
        self.done = self.parked = self.running = self.most = 0

    async def apply(
        self, context: PartitionContext, events: Sequence[ReceivedEvent]
    ) -> None:
        """Apply the next order of an account."""
        (event,) = events
        order = event.body_as_json()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.01)
            if order["amount"] is None:
                raise ValueError(f"order {order['number']} has no amount")
        finally:
            self.running -= 1
        account = order["account"]
        if (
            order["number"] > self.last[account]
        ):  # one that is delivered again is applied once
            self.last[account] = order["number"]
            self.balance[account] += order["amount"]
        self.done += 1

    async def park(
        self, context: PartitionContext, event: ReceivedEvent, error: Exception
    ) -> None:
        """Keep an order that cannot be applied, for inspection."""
        self.parked += 1
        print(f"parked order {event.body_as_json()['number']}: {error}", flush=True)


async def publish(connection_string: str, hub: str, count: int) -> dict[str, int]:
    """Publish orders, and return the balances that they make."""
    chance, expected = random.Random(1), defaultdict[str, int](int)
    async with BufferedProducer(connection_string, hub) as producer:
        for number in range(count):
            account = f"account-{chance.randrange(200)}"
            amount = None if number % 500 == 499 else chance.randrange(1, 100)
            expected[account] += amount or 0
            order = {"account": account, "number": number, "amount": amount}
            await producer.send(EventData(json.dumps(order)), partition_key=account)
    return dict(expected)


async def process(
    connection_string: str, hub: str, folder: Path, count: int, concurrency: int
) -> None:
    accounts = Accounts()
    expected = await publish(connection_string, hub, count)
    host = EventProcessorHost(
        connection_string,
        hub,
        lease_store=SqliteLeaseStore(folder / "leases.db"),
        processor=KeyedProcessor(accounts.apply, concurrency=concurrency),
        handler_retry=RetryOptions(max_retries=2, base_delay=0.1, max_delay=0.2),
        on_retries_exhausted=Park(accounts.park),
        checkpoint_policy=CheckpointPolicy(every_seconds=1),
    )
    began = time.monotonic()
    async with host, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(host.run(handle_signals=True))
        while not running.done() and accounts.done + accounts.parked < count:
            await asyncio.wait({running}, timeout=0.05)
        host.stop()
    seconds = time.monotonic() - began
    counts = f"applied {accounts.done} orders and parked {accounts.parked}"
    print(f"{counts} in {seconds:.1f} s, up to {accounts.most} at a time")
    differing = [
        account
        for account, balance in expected.items()
        if accounts.balance[account] != balance
    ]
    print(
        f"{len(expected) - len(differing)} of {len(expected)} balances are as published"
    )


async def main(
    connection_string: str | None,
    hub: str,
    folder: Path | None,
    count: int,
    concurrency: int,
) -> None:
    async with AsyncExitStack() as stack:
        if connection_string is None:
            service = await stack.enter_async_context(Emulator({hub: 2}))
            connection_string, folder = service.connection_string, None
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        await process(connection_string, hub, folder, count, concurrency)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument("--hub", default="orders")
    parser.add_argument(
        "--folder", type=Path, help="for the leases (default: one that is removed)"
    )
    parser.add_argument(
        "--count", type=int, default=2000, help="publish and apply so many orders"
    )
    parser.add_argument(
        "--concurrency", type=int, default=32, help="orders at a time, per partition"
    )
    args = parser.parse_args()
    try:
        asyncio.run(
            main(
                args.connection_string,
                args.hub,
                args.folder,
                args.count,
                args.concurrency,
            )
        )
    except (EventPumpError, ExceptionGroup, KeyboardInterrupt) as error:
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        sys.exit(f"{type(first).__name__}: {first}")
