"""Publish the lines of a file, each exactly once and in order, whatever happens to this process: kill it with SIGKILL
at any moment, restart it, and it continues with the first line that the service does not have.

    python examples/idempotent_publisher.py orders.txt --connection-string "Endpoint=..." --hub telemetry

The state store persists this publisher's identity, under a name, before the first line is sent. The service reports how
many lines are published. `replayable`: every run sends the same lines under the same numbers, so a former run that is
still alive, or one of its lines that arrives late, does no harm.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from itertools import islice
from pathlib import Path

from eventpump import (
    EventData,
    EventProducer,
    EventPumpError,
    PublishOutcomeUnknownError,
    SqlitePublisherStateStore,
)


async def publish(
    connection_string: str,
    hub: str,
    partition_id: str,
    source: Path,
    state: str,
    batch_lines: int,
    pause: float,
) -> None:
    producer = EventProducer(
        connection_string,
        hub,
        idempotent=True,
        name=source.name,
        state_store=SqlitePublisherStateStore(state),
        mode="replayable",
    )
    async with producer:
        known = await producer.get_partition_publishing_properties(partition_id)
        done = known.events_published or 0
        print(f"{source}: {done} lines are published", flush=True)
        with source.open(encoding="utf-8") as lines:
            for _ in islice(lines, done):
                pass
            # The same lines form the same batch in every run: the last batch of a killed process may still be in
            # flight, and the service recognizes it by its numbers as a repeat.
            while batch := [
                EventData(line.rstrip("\n")) for line in islice(lines, batch_lines)
            ]:
                await send(producer, batch, partition_id)
                done += len(batch)
                print(f"{source}: {done} lines are published", flush=True)
                await asyncio.sleep(pause)


async def send(
    producer: EventProducer, batch: list[EventData], partition_id: str
) -> None:
    """Send a batch until it is known to be stored: sending the same list again never stores a second copy."""
    while True:
        try:
            await producer.send(batch, partition_id=partition_id)
        except PublishOutcomeUnknownError as error:
            print(error, flush=True)
        else:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument(
        "source", type=Path, help="a file of lines, which may only be appended to"
    )
    parser.add_argument(
        "--connection-string", default=os.environ.get("EVENTPUMP_CONNECTION_STRING")
    )
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument("--partition", default="0")
    parser.add_argument("--state", default="publishers.db", help="a SQLite file")
    parser.add_argument("--batch-lines", type=int, default=100)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds between batches"
    )
    args = parser.parse_args()
    try:
        asyncio.run(
            publish(
                args.connection_string,
                args.hub,
                args.partition,
                args.source,
                args.state,
                args.batch_lines,
                args.pause,
            )
        )
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
