"""What the opening of a partition repeats. Starts and losses are in `test_starts` and `test_data_loss`."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from types import SimpleNamespace
from typing import Any, cast

from eventpump.clock import LoopClock
from eventpump.consumer.lease.ownership import Ownership
from eventpump.consumer.record.starts import StartFinder
from eventpump.core.lease import PartitionLease
from eventpump.errors import AuthenticationError, ConnectionLostError, StoreError
from eventpump.eventhubs.events import Checkpoint
from eventpump.options.consumer import HostSettings
from eventpump.reports import HostReport, LinkFailed, LinkRestored, PumpStarted, Reporter, StoreFailed
from tests.support.fleet import Fleet


class _FaultyStore:
    """Fails with each of some errors once, and stores then."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    async def write_checkpoint(self, lease: Any, checkpoint: Checkpoint, subscription: str, *, backwards: bool) -> bool:
        if self.failures:
            raise self.failures.pop(0)
        return True


async def test_store_is_repeated_whatever_the_store_raises() -> None:
    """No error of a store is final while the lease lives; each is reported as the store's failure."""
    store = _FaultyStore(KeyError("a bug"), AuthenticationError("not now"), TimeoutError())
    reported: list[HostReport] = []
    services = SimpleNamespace(
        clock=LoopClock(),
        group=store,
        directory=None,
        owner_id="a",
        rng=random.Random(1),
        reporter=Reporter(logging.getLogger("eventpump.consumer"), [reported.append]),
        store_timeout=5.0,
    )
    lease = PartitionLease("0", "a", 1, 1, "token", math.inf)
    lost: list[str] = []
    ownership = Ownership(
        cast("Any", services),
        lease,
        "default",
        HostSettings(hub="telemetry"),
        end=cast("Any", lost.append),
        on_lost=lost.append,
    )
    starts = StartFinder(ownership, cast("Any", None))
    checkpoint = Checkpoint("0", "100", 7)
    await starts.store(checkpoint, is_reset=False)
    failures = [(report.operation, type(report.error)) for report in reported if isinstance(report, StoreFailed)]
    assert failures == [("write checkpoint", kind) for kind in (StoreError, AuthenticationError, StoreError)]
    assert not lost


async def test_restored_link_is_reported_once_at_the_level_of_its_failure() -> None:
    """Who sees in the log that a link failed sees there too that it is back; the first attach is not such a case."""
    async with Fleet() as fleet:
        await fleet.start("a")
        await fleet.until(lambda: bool(fleet.reported("a", PumpStarted, "0")), 60)
        assert fleet.reported("a", LinkRestored) == []
        fleet.hub.refuse(ConnectionLostError("cannot connect"), times=math.inf)
        fleet.hub.lose_connections()
        await fleet.until(lambda: len(fleet.reported("a", LinkFailed, "0")) > 1, 60)
        assert fleet.reported("a", LinkRestored) == []
        fleet.hub.accept()
        await fleet.until(lambda: bool(fleet.reported("a", LinkRestored, "0")), 60)
        fleet.hub.publish("0", count=5)
        await asyncio.sleep(60)
        assert len(fleet.reported("a", LinkRestored, "0")) == 1
        assert LinkRestored.level == LinkFailed.level
