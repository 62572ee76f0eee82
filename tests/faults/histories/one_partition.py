"""Faults of a hub with one partition, for the histories of readers: detached links, and retention."""

from __future__ import annotations

from eventpump.eventhubs.conditions import DETACH_FORCED, INTERNAL_ERROR, SERVER_BUSY, TIMEOUT, error_for
from eventpump.testing.transport import FakeHub
from tests.faults.histories.world import World

PASSING = [DETACH_FORCED, INTERNAL_ERROR, TIMEOUT, SERVER_BUSY]
"""Conditions that end links and refuse them, and pass."""


class OnePartition:
    """A history's hub of one partition.

    Args:
        latencies: The seconds that what the hub does may take, one of which is chosen.
    """

    def __init__(self, world: World, latencies: tuple[float, ...]) -> None:
        self.world = world
        self.hub = FakeHub(partitions=1, latency=world.rng.choice(latencies))
        self.partition = self.hub.partition("0")

    def detach(self) -> None:
        """Detach every link."""
        condition = self.world.rng.choice(PASSING)
        self.world.note("detach", condition)
        self.hub.detach(None, error_for(condition, "by the history"))

    def retention(self) -> None:
        """Drop the oldest events."""
        if self.partition.next > self.partition.first:
            before = self.world.rng.randint(self.partition.first + 1, self.partition.next)
            self.world.note("retention", f"takes what is before {before}")
            self.hub.truncate("0", before)
