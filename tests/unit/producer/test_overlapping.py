"""Random histories of processes with one publisher's name: they overlap, die anywhere, and their transfers come late.

Everything but the hub is what runs in production; the pure form, with far more histories, is `unit/core/test_claim.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from eventpump.core.claim import StoredPublisherState
from eventpump.errors import (
    ClosedError,
    EventPumpError,
    ProducerDisconnectedError,
    PublishOutcomeUnknownError,
    ServiceError,
    StoreError,
)
from eventpump.eventhubs.events import EventData
from eventpump.options.base import RetryOptions
from eventpump.producer.producer import HubProducer
from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore
from eventpump.testing.transport import FakeHub, FakeTransport, SendFault
from tests.support.inside import publishers_of
from tests.support.states import SharedStates

RETRY = RetryOptions(max_retries=3, base_delay=0.1, max_delay=1.0)
OTHERS = "somebody else's"


class Flaky(MemoryPublisherStateStore):
    """A store that takes its time, and whose answers are lost now and then."""

    def __init__(self, states: SharedStates, rng: random.Random) -> None:
        super().__init__(states)
        self._rng = rng

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        """Read a state."""
        await asyncio.sleep(self._rng.random() * 0.2)
        return await super().read_state(name, partition_id)

    async def write_state(self, name: str, partition_id: str, state: Any, replaces: Any) -> StoredPublisherState | None:
        """Store a state, and say so or not."""
        await asyncio.sleep(self._rng.random() * 0.2)
        written = await super().write_state(name, partition_id, state, replaces)
        await asyncio.sleep(self._rng.random() * 0.2)
        if self._rng.random() < 0.1:
            raise StoreError("write state", "the answer was lost", partition_id=partition_id)
        return written


class History:
    """One history, and what was acknowledged in it."""

    def __init__(self, seed: int, *, has_others: bool, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.hub = FakeHub(partitions=1, latency=0.02)
        self.states = SharedStates()
        self.has_others = has_others
        self.options = options
        self.acknowledged: set[str] = set()
        self.doubts = 0
        self.superseded = 0
        self.living: dict[asyncio.Task[None], HubProducer] = {}

    def producer(self, **options: Any) -> HubProducer:
        return HubProducer(
            FakeTransport(self.hub),
            self.hub.name,
            idempotent=True,
            retry=RETRY,
            rng=self.rng,
            name="feed",
            state_store=Flaky(self.states, self.rng),
            **{**self.options, **options},
        )

    async def live(self, producer: HubProducer) -> None:
        """Publish what the count says comes next, until it is shut out or in doubt."""
        place: int | None = None
        most = 1 if self.options.get("mode") == "replayable" else 3
        listed: list[EventData] = []
        while True:
            try:
                if place is None:
                    place = (await producer.get_partition_publishing_properties("0")).events_published
                    assert place is not None
                if not listed:
                    listed = [EventData(f"{place + index}") for index in range(self.rng.randint(1, most))]
                await producer.send(listed, partition_id="0")
            except PublishOutcomeUnknownError as error:
                if not error.is_settling:
                    self.doubts += 1
                    return
            except ProducerDisconnectedError:
                self.superseded += 1
                return
            except ClosedError:
                return
            except (ServiceError, StoreError):
                pass  # nothing of it is stored
            except EventPumpError:
                return  # a replayable one that fell behind what the service remembers
            else:
                self.acknowledged.update(f"{place + index}" for index in range(len(listed)))
                place, listed = place + len(listed), []
            await asyncio.sleep(self.rng.random() * 0.3)

    async def die(self, task: asyncio.Task[None]) -> None:
        """End a process where it stands, without its last marks."""
        producer = self.living.pop(task)
        task.cancel()
        await self._ended(task)
        await asyncio.gather(*(each.aclose() for each in publishers_of(producer)))
        with contextlib.suppress(PublishOutcomeUnknownError):
            await producer.aclose(0.0)

    @staticmethod
    async def _ended(task: asyncio.Task[None]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def close(self, task: asyncio.Task[None]) -> None:
        """Close a process in good order."""
        producer = self.living.pop(task)
        with contextlib.suppress(PublishOutcomeUnknownError):
            await producer.aclose(5.0)
        await self._ended(task)

    async def run(self, steps: int) -> None:
        rng, hub = self.rng, self.hub
        for _ in range(steps):
            await asyncio.sleep(rng.random() * 0.4)
            if len(self.living) < 3 and rng.random() < 0.3:
                producer = self.producer()
                self.living[asyncio.create_task(self.live(producer))] = producer
            if self.has_others and rng.random() < 0.2:
                hub.publish("0", OTHERS)
            if rng.random() < 0.25:
                hub.lose(rng.choice(list(SendFault)), connection=rng.random() < 0.3)
            if rng.random() < 0.2:
                hub.deliver_late()
            if rng.random() < 0.05:
                hub.lose_connections()
            for task in list(self.living):
                if task.done() or rng.random() < 0.08:
                    await (self.close(task) if rng.random() < 0.3 else self.die(task))
        for task in list(self.living):
            await self.die(task)
        hub.deliver_late()

    def check(self) -> None:
        """What was acknowledged is stored once, and every event is there once, in order, up to the newest."""
        bodies = [event.body_as_str() for event in self.hub.events("0")]
        ours = [body for body in bodies if body != OTHERS]
        assert ours == [f"{place}" for place in range(len(ours))], "lost, twice or out of order"
        assert self.acknowledged <= set(ours), "acknowledged, and not stored"


def seeds(request: pytest.FixtureRequest) -> range:
    return range(400 if request.config.getoption("--long") else 8)


async def histories(request: pytest.FixtureRequest, *, steps: int = 100, **options: Any) -> list[History]:
    every: list[History] = []
    for seed in seeds(request):
        history = History(seed, **options)
        try:
            await history.run(steps)
            history.check()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        every.append(history)
    return every


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_others", [False, True], ids=["alone", "other writers"])
async def test_replayable_processes_store_each_event_once(request: pytest.FixtureRequest, has_others: bool) -> None:
    """They send the same events under the same numbers, and the service keeps one of each."""
    every = await histories(request, has_others=has_others, mode="replayable")
    assert not sum(each.doubts for each in every)
    assert sum(len(each.acknowledged) for each in every) > 10 * len(every)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_others", [False, True], ids=["alone", "other writers"])
async def test_exclusive_processes_store_nothing_twice(request: pytest.FixtureRequest, has_others: bool) -> None:
    """The log is exact; a start that cannot be sure says so, and sends nothing."""
    every = await histories(request, has_others=has_others)
    assert sum(each.superseded for each in every)
    assert sum(each.doubts for each in every)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("has_others", [False, True], ids=["alone", "other writers"])
async def test_exclusive_processes_that_scan_are_exact(request: pytest.FixtureRequest, has_others: bool) -> None:
    """No start stays in doubt, and the log is exact."""
    every = await histories(request, has_others=has_others, on_doubt="scan", scan_consumer_group="$Default")
    assert not sum(each.doubts for each in every)
    assert sum(each.superseded for each in every)
    assert sum(len(each.acknowledged) for each in every) > 10 * len(every)
