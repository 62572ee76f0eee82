"""See where each router sends the same events, and what a fifth partition changes.

    python examples/routers.py --count 2000

Publishes readings of 41 sensors to a local service, which ends with the program: once by each router, through a
`BufferedProducer`. It prints how many events each partition got, in how many messages, and how many sensors' keys are
in one place. Then it counts the keys that would move if the hub got one more partition.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence

from eventpump import (
    BufferedProducer,
    Emulator,
    EventData,
    EventPumpError,
    HashRouter,
    RingRouter,
    RoundRobinRouter,
    StickyRouter,
)
from eventpump.interfaces import PartitionRouter

PARTITIONS = 4
SENSORS = [f"sensor-{number}" for number in range(41)]
ROUTERS: dict[str, type[HashRouter | RoundRobinRouter | StickyRouter | RingRouter]] = {
    "hash": HashRouter,
    "round robin": RoundRobinRouter,
    "sticky": StickyRouter,
    "ring": RingRouter,
}


async def publish(
    connection_string: str, hub: str, router: PartitionRouter, count: int
) -> None:
    """Send every second reading with its sensor as key, and the others without one."""
    events: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    places: defaultdict[str, set[str]] = defaultdict(set)

    def stored(batch: Sequence[EventData], partition_id: str) -> None:
        events[partition_id] += len(batch)
        messages[partition_id] += 1
        for event in batch:
            reading = json.loads(event.data or b"")
            if reading["keyed"]:
                places[reading["sensor"]].add(partition_id)

    async with BufferedProducer(
        connection_string, hub, router=router, on_success=stored, max_batch_events=100
    ) as producer:
        for number in range(count):
            sensor, keyed = (
                SENSORS[number % len(SENSORS)],
                number // len(SENSORS) % 2 == 0,
            )
            event = EventData(
                json.dumps({"sensor": sensor, "number": number, "keyed": keyed})
            )
            await producer.send(event, partition_key=sensor if keyed else None)
    spread = ", ".join(
        f"{events[each]:,} in {messages[each]}" for each in sorted(events)
    )
    one_place = sum(len(found) == 1 for found in places.values())
    print(
        f"{type(router).__name__}: events in messages per partition: {spread}; {one_place} keys in one partition"
    )


def moved(router: PartitionRouter) -> int:
    """Return how many of 1,000 keys change their partition when a hub of four gets a fifth."""
    before, after = (
        [str(each) for each in range(PARTITIONS)],
        [str(each) for each in range(PARTITIONS + 1)],
    )
    event, keys = EventData(b""), [f"device-{number}" for number in range(1000)]
    places = {key: router.route(event, key, before) for key in keys}
    return sum(router.route(event, key, after) != places[key] for key in keys)


async def main(count: int) -> None:
    async with Emulator(
        dict.fromkeys((name.replace(" ", "-") for name in ROUTERS), PARTITIONS)
    ) as service:
        for name, router in ROUTERS.items():
            await publish(
                service.connection_string, name.replace(" ", "-"), router(), count
            )
    for name in ("hash", "ring"):
        print(
            f"a fifth partition: {moved(ROUTERS[name]())} of 1,000 keys move ({ROUTERS[name].__name__})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--count", type=int, default=2000, help="readings per router (default: 2000)"
    )
    try:
        asyncio.run(main(parser.parse_args().count))
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
