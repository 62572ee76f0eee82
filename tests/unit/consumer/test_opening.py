"""What the opening of a partition repeats. Starts and losses are in `test_starts` and `test_data_loss`."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

from eventpump.consumer.opening import PartitionOpening
from eventpump.errors import AuthenticationError, EventPumpError
from eventpump.eventhubs.events import Checkpoint
from eventpump.options.consumer import HostSettings
from eventpump.reports import StoreFailed


class _FaultyStore:
    """Fails with each of some errors once, and stores then."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    async def write_checkpoint(self, lease: Any, checkpoint: Checkpoint, subscription: str) -> bool:
        if self.failures:
            raise self.failures.pop(0)
        return True


async def test_store_is_repeated_whatever_the_store_raises() -> None:
    """No error of a store is final while the lease lives; each is reported as the store's failure."""
    store = _FaultyStore(KeyError("a bug"), AuthenticationError("not now"), TimeoutError())
    reported: list[EventPumpError] = []

    async def step(work: Any) -> Any:
        return await work

    def report(kind: Any, operation: str, error: EventPumpError) -> None:
        assert (kind, operation) == (StoreFailed, "write checkpoint")
        reported.append(error)

    opening = PartitionOpening(
        cast("Any", None),
        cast("Any", store),
        cast("Any", None),
        HostSettings(hub="telemetry"),
        "0",
        store_timeout=5.0,
        rng=random.Random(1),
        lease=lambda: cast("Any", None),
        key=lambda: "default",
        step=step,
        pause=asyncio.sleep,
        report=report,
        on_refused=lambda: None,
    )
    checkpoint = Checkpoint("0", "100", 7)
    await opening.store(checkpoint, is_reset=False)
    assert [type(error).__name__ for error in reported] == ["StoreError", "AuthenticationError", "StoreError"]
