"""The exchange of the demos: publishes the trades of a simulated market, evenly over some seconds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from eventpump import EventData, EventProducer
from eventpump.demo.market import Trade, trades

TRADES = "trades"
"""The hub of trades."""
_TICK = 0.05


async def publish(producer: EventProducer, seed: int, total: int, seconds: float) -> AsyncIterator[list[bytes]]:
    """Publish trades, each by the key of its symbol.

    All trades of one step are stored before the next begins, and no step has more than a fortieth of all trades: no
    partition gets further ahead of another.
    """
    loop = asyncio.get_running_loop()
    stream = itertools.islice(trades(seed), total)
    began = loop.time()
    sent = 0
    while sent < total:
        due = min(total, int(total * (loop.time() - began + _TICK) / seconds), sent + max(1, total // 40))
        step = list(itertools.islice(stream, max(0, due - sent)))
        sent += len(step)
        yield await send(producer, step)
        await asyncio.sleep(_TICK)


async def send(producer: EventProducer, step: list[Trade]) -> list[bytes]:
    """Publish trades, and wait until all are stored; return their bodies."""
    by_symbol: dict[str, list[bytes]] = {}
    for trade in step:
        by_symbol.setdefault(trade.symbol, []).append(trade.encode())
    async with asyncio.TaskGroup() as sends:
        for symbol, bodies in by_symbol.items():
            events = [EventData(body, content_type="application/json") for body in bodies]
            sends.create_task(producer.send(events, partition_key=symbol))
    return [body for bodies in by_symbol.values() for body in bodies]
