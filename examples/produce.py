"""Publish readings of a few sensors, batched by sensor.

python examples/produce.py --connection-string "Endpoint=..." --hub telemetry --events 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys

from eventpump import EventData, EventProducer, EventPumpError

SENSORS = [f"sensor-{number}" for number in range(10)]


async def publish(connection_string: str, hub: str, events: int) -> None:
    rng = random.Random(1)
    readings: dict[str, list[EventData]] = {sensor: [] for sensor in SENSORS}
    for number in range(events):
        sensor = rng.choice(SENSORS)
        reading = {
            "sensor": sensor,
            "number": number,
            "celsius": round(rng.gauss(21, 3), 2),
        }
        readings[sensor].append(
            EventData(json.dumps(reading), content_type="application/json")
        )
    async with EventProducer(connection_string, hub) as producer:
        for sensor, events_of_sensor in readings.items():
            # Events of one key go to one partition, and stay in order.
            batch = await producer.create_batch(partition_key=sensor)
            for event in events_of_sensor:
                if not batch.try_add(event):
                    await producer.send(batch)
                    batch = await producer.create_batch(partition_key=sensor)
                    batch.try_add(event)
            await producer.send(batch)
    print(f"published {events} events")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given = os.environ.get("EVENTPUMP_CONNECTION_STRING")
    parser.add_argument("--connection-string", default=given, required=given is None)
    parser.add_argument("--hub", default="telemetry")
    parser.add_argument("--events", type=int, default=1000)
    args = parser.parse_args()
    try:
        asyncio.run(publish(args.connection_string, args.hub, args.events))
    except (EventPumpError, KeyboardInterrupt) as error:
        sys.exit(f"{type(error).__name__}: {error}")
