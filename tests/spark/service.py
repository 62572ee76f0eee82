"""The service that Spark's tests run against, with what a synchronous test does to a hub and sees in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eventpump import EventData, EventProducer, PartitionReader, ReceivedEvent
from eventpump.emulator.config import HubSpec
from eventpump.testing.threaded import EmulatorThread

_HUBS = dict.fromkeys((1, 2, 3, 4, 8), 400)


class SparkService(EmulatorThread):
    """An emulator on a thread of its own, with many hubs: each test takes those it needs. All have the consumer groups
    `$Default` and `watch`, save the hub `bare`.

    Args:
        hubs: How many hubs there are, by their number of partitions.
    """

    def __init__(self, hubs: Mapping[int, int] = _HUBS, **options: Any) -> None:
        super().__init__(
            [
                "bare",
                *(
                    HubSpec(f"hub-{size}-{number}", size, ("watch",))
                    for size, count in hubs.items()
                    for number in range(count)
                ),
            ],
            **options,
        )
        self._unused = {size: iter(range(count)) for size, count in hubs.items()}

    def new_hub(self, partitions: int = 2) -> str:
        """Return a hub of so many partitions that no other test knows.

        Returns:
            Its name.
        """
        return f"hub-{partitions}-{next(self._unused[partitions])}"

    def publish(
        self, hub: str, events: Iterable[EventData | bytes | str], partition_id: str | None = None, **send: Any
    ) -> None:
        """Publish events in one call; the producer splits them into as many batches as they need."""

        async def go() -> None:
            async with EventProducer(self.connection_string, hub) as producer:
                made = [each if isinstance(each, EventData) else EventData(each) for each in events]
                await producer.send(made, partition_id=partition_id, split=True, **send)

        self.run(go())

    def publish_all(self, hub: str, events: Mapping[str, Iterable[EventData | bytes | str]]) -> None:
        """Publish events by partition."""
        for partition_id, each in events.items():
            self.publish(hub, each, partition_id)

    def ends(self, hub: str) -> dict[str, int]:
        """Return the number after the last event of every partition."""

        async def go() -> dict[str, int]:
            async with EventProducer(self.connection_string, hub) as producer:
                ids = await producer.get_partition_ids()
                each = [await producer.get_partition_properties(partition_id) for partition_id in ids]
                return {found.partition_id: found.last_enqueued_sequence_number + 1 for found in each}

        return self.run(go())

    def read(self, hub: str) -> dict[str, list[ReceivedEvent]]:
        """Read everything a hub holds now, by partition."""

        async def go() -> dict[str, list[ReceivedEvent]]:
            found: dict[str, list[ReceivedEvent]] = {}
            async with EventProducer(self.connection_string, hub) as producer:
                ids = await producer.get_partition_ids()
            for partition_id in ids:
                reader = PartitionReader(self.connection_string, hub, partition_id=partition_id, end="@latest")
                async with reader:
                    found[partition_id] = [event async for event in reader]
            return found

        return self.run(go())

    def bodies(self, hub: str) -> dict[str, list[bytes]]:
        """Read the bodies of everything a hub holds now, by partition."""
        return {partition_id: [event.body for event in events] for partition_id, events in self.read(hub).items()}
