"""Random histories of a buffered producer, on virtual time: whatever fails, every accepted event ends exactly once.

What goes wrong: refusals, links that end with an error to give up on, lost connections and answers, transfers that
arrive late, silence; callbacks, a state store and a router that raise what is no `Exception`; senders, waits, flushes
and the producer's own tasks cancelled; closing at any moment, with and without a deadline, cancelled too.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from eventpump.core.router import HashRouter
from eventpump.errors import (
    ClosedError,
    EventPumpError,
    PublishOutcomeUnknownError,
    ServiceError,
    StoreError,
)
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.interfaces import SendLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.intake import DeliveryReceipt, SendResult
from eventpump.producer.producer import HubProducer
from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore
from eventpump.testing.clock import VirtualTimeLoop
from eventpump.testing.transport import FakeHub, FakeSendLink, FakeTransport, SendFault

PARTITIONS = 3
OWN_TASKS = ("send to partition", "eventpump publisher")
CONDITIONS = (
    "com.microsoft:server-busy",
    "amqp:internal-error",
    "amqp:link:detach-forced",
    "com.microsoft:entity-disabled",
    "amqp:resource-limit-exceeded",
    "com.microsoft:timeout",
)


class Odd(BaseException):
    """An error that is no `Exception`."""


def _odd(rng: random.Random) -> BaseException:
    return rng.choice([Odd(), asyncio.CancelledError(), GeneratorExit(), ValueError("odd")])


class Transport(FakeTransport):
    """Knows its send links, so that a test can end them; and is cancelled by others now and then."""

    def __init__(self, hub: FakeHub, rng: random.Random) -> None:
        super().__init__(hub)
        self.links: list[FakeSendLink] = []
        self.is_calm = False
        self._rng = rng

    async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
        link = await super().open_send_link(spec)
        self.links.append(link)
        if not self.is_calm and self._rng.random() < 0.05:
            raise asyncio.CancelledError
        return link


class Store(MemoryPublisherStateStore):
    """Fails, hangs for a while, or is cancelled by others, before or after it did what it was asked to."""

    rng: random.Random
    is_calm = False

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or not inspect.iscoroutinefunction(value):
            return value
        return partial(super().__getattribute__("_disturbed"), value)

    async def _disturbed(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        dice = 1.0 if self.is_calm else self.rng.random()
        if dice < 0.1:
            raise self.rng.choice([asyncio.CancelledError(), StoreError("call", "failed")])
        if dice < 0.2:
            await asyncio.sleep(self.rng.choice([0.1, 5, 300]))
        result = await call(*args)
        if 0.2 <= dice < 0.25:
            raise self.rng.choice([asyncio.CancelledError(), StoreError("call", "failed, after it was done")])
        return result


class History:
    """One producer, those who use it, and what goes wrong."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.hub = FakeHub(partitions=PARTITIONS, latency=rng.choice([0.0, 0.02]))
        self.transport = Transport(self.hub, rng)
        self.is_idempotent = rng.random() < 0.6
        self.store: Store | None = None
        options: dict[str, Any] = {"retry": RetryOptions(max_retries=rng.choice([0, 3]), base_delay=0.1, max_delay=2.0)}
        if self.is_idempotent and rng.random() < 0.5:
            self.store = Store()
            self.store.rng = rng
            options |= {"name": "history", "state_store": self.store}
        self.producer = HubBufferedProducer(
            HubProducer(self.transport, self.hub.name, rng=rng, idempotent=self.is_idempotent, **options),
            BufferSettings(
                max_events=rng.choice([6, 40]),
                max_batch_events=rng.choice([1, 4, 10]),
                max_wait_time=rng.choice([0.0, 0.05, 1.0]),
                max_in_flight=1 if self.is_idempotent else rng.choice([1, 3]),
            ),
            router=self,
            on_success=self.succeeded,
            on_error=self.failed,
        )
        self._routes = HashRouter(partition_for_key)
        self.accepted: dict[str, DeliveryReceipt] = {}
        self.perhaps: set[str] = set()  # cancelled while it was not known whether it was accepted
        self.successes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.unknown: set[str] = set()
        self.is_calm = False

    # ------------------------------------------------------------------------------------ what the user gives

    def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
        if not self.is_calm and self.rng.random() < 0.02:
            raise _odd(self.rng)
        return self._routes.route(event, partition_key, partition_ids)

    def succeeded(self, events: Sequence[EventData], _: str) -> None:
        self.successes.update(map(name_of, events))
        self._callback()

    def failed(self, events: Sequence[EventData], _: str, error: Exception) -> None:
        self.failures.update(map(name_of, events))
        if isinstance(error, PublishOutcomeUnknownError):
            self.unknown.update(map(name_of, events))
        self._callback()

    def _callback(self) -> None:
        if self.rng.random() < 0.2:
            raise _odd(self.rng)

    # --------------------------------------------------------------------------------------------- who uses it

    async def use(self, user: int) -> None:
        rng = self.rng
        for number in range(rng.randint(5, 40)):
            await asyncio.sleep(rng.choice([0, 0, 0, 0.01, 0.5]))
            name = f"{user}-{number}"
            event = EventData(name + " " * rng.choice([0, 100]))
            to: dict[str, Any] = rng.choice([{}, {"partition_id": "1"}, {"partition_key": f"key{user}"}])
            try:
                match rng.choice(["send", "send", "nowait", "wait", "flush"]):
                    case "send":
                        self.accepted[name] = await self.cut(self.producer.send(event, **to))
                    case "nowait":
                        self.accepted[name] = self.producer.send_nowait(event, **to)
                        with suppress(asyncio.CancelledError, EventPumpError):
                            await self.cut(self.accepted[name])
                    case "wait":
                        self.perhaps.add(name)
                        await self.cut(self.producer.send_and_wait(event, **to))
                    case "flush":
                        before = list(self.accepted.values())
                        await self.cut(self.producer.flush())
                        assert all(receipt.done() for receipt in before), "flushed, and not ended"
            except ClosedError:
                if self.producer._is_closed:
                    return
            except (EventPumpError, asyncio.CancelledError, Odd, GeneratorExit, ValueError):
                continue

    async def cut(self, use: Awaitable[Any]) -> Any:
        """Wait for something in a task of its own, which is cancelled now and then."""
        task: asyncio.Task[Any] = asyncio.ensure_future(_await(use))
        if self.rng.random() < 0.3:
            asyncio.get_running_loop().call_later(self.rng.choice([0, 0.001, 0.3, 5]), task.cancel)
        await asyncio.wait({task})
        return task.result()

    async def disturb(self) -> None:
        rng, hub = self.rng, self.hub
        for _ in range(rng.randint(0, 25)):
            await asyncio.sleep(rng.choice([0, 0.01, 0.3, 3]))
            error = error_for(rng.choice(CONDITIONS), "by the test", lost=ServiceError("x").recovery)
            match rng.choice(["refuse", "attach", "end", "lose", "cut", "hang", "late", "cancel", "cancel"]):
                case "refuse":
                    hub.refuse(error, operation="transfer", times=rng.randint(1, 4))
                case "attach":
                    hub.refuse(error, operation="send", times=rng.randint(1, 4))
                case "end":
                    for link in self.transport.links:
                        link.end(error)
                case "lose":
                    hub.lose(rng.choice(list(SendFault)), connection=rng.random() < 0.5, after=rng.randint(0, 2))
                case "cut":
                    hub.lose_connections()
                case "hang":
                    what = rng.choice(["transfer", "send", "credit", "hub"])
                    hub.hang(what)
                    await asyncio.sleep(rng.choice([0.1, 20]))
                    hub.answer(what)
                case "late":
                    hub.deliver_late()
                case "cancel":
                    for task in asyncio.all_tasks():
                        if task.get_name().startswith(OWN_TASKS) and rng.random() < 0.7:
                            task.cancel()

    # --------------------------------------------------------------------------------------------------- the run

    async def run(self) -> None:
        rng = self.rng
        await self.producer.open()
        users = [asyncio.ensure_future(self.use(user)) for user in range(rng.randint(1, 5))]
        disturbing = asyncio.ensure_future(self.disturb())
        closes_early = rng.random() < 0.5
        if closes_early:
            await asyncio.sleep(rng.choice([0, 0.05, 1, 10]))
        else:
            await asyncio.wait(users)
        deadline = rng.choice([0.0, 0.5, 30.0]) if closes_early else rng.choice([None, 30.0])
        if deadline is None:
            await disturbing
            self.calm()
            await self.producer.flush()
            for partition_id in self.hub.partition_ids:
                await self.send_at_last(partition_id)
        loop = asyncio.get_running_loop()
        before = loop.time()
        closing = [
            asyncio.ensure_future(self.producer.aclose(flush=rng.random() < 0.7, deadline=deadline))
            for _ in range(rng.randint(1, 2))
        ]
        if rng.random() < 0.2:
            loop.call_later(rng.choice([0, 0.1]), closing[0].cancel)
        await asyncio.wait(closing)
        for each in closing:
            with suppress(asyncio.CancelledError, PublishOutcomeUnknownError, StoreError):
                each.result()
        assert loop.time() - before <= (deadline if deadline is not None else math.inf) + 5, "closed late"
        await self.producer.aclose()
        self.calm()
        await asyncio.wait([*users, disturbing])
        for each in [*users, disturbing]:
            each.result()
        self.hub.deliver_late()
        await self.check()
        await asyncio.sleep(400)  # what a store may still hang for
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left behind: {left}"

    async def send_at_last(self, partition_id: str) -> None:
        """Once nothing goes wrong any more, a partition takes an event, whatever went wrong before.

        The second at the latest: the first may be notified of a link that ended while its publisher's state was stored.
        """
        name = f"8-{partition_id}"
        self.accepted[name] = await self.producer.send(EventData(name), partition_id=partition_id)
        try:
            await self.accepted[name]
        except ServiceError:
            name = f"9-{partition_id}"
            self.accepted[name] = await self.producer.send(EventData(name), partition_id=partition_id)
            await self.accepted[name]

    def calm(self) -> None:
        self.is_calm = self.transport.is_calm = True
        self.hub.accept()
        self.hub._losses.clear()
        if self.store is not None:
            self.store.is_calm = True

    async def check(self) -> None:
        reported = self.successes + self.failures
        assert max(reported.values(), default=1) == 1, "reported twice"
        assert set(self.accepted) <= set(reported) <= set(self.accepted) | self.perhaps
        for name, receipt in self.accepted.items():
            assert receipt.done(), name
            try:
                outcome: SendResult | Exception = await receipt
            except EventPumpError as error:
                outcome = error
            assert isinstance(outcome, SendResult) == (name in self.successes), (name, outcome)
        assert self.producer.buffered_events == self.producer.buffered_bytes == 0
        stored = Counter(
            event.body_as_str().strip() for each in self.hub.partition_ids for event in self.hub.events(each)
        )
        assert set(self.successes) <= set(stored), "reported as stored, and is not"
        if not self.is_idempotent:
            return
        assert max(stored.values(), default=1) == 1, "stored twice"
        assert set(stored) <= set(self.successes) | self.unknown, "stored, and reported as not stored"
        for partition_id in self.hub.partition_ids:
            order = [event.body_as_str().strip() for event in self.hub.events(partition_id)]
            for user in range(5):
                mine = [int(name.split("-")[1]) for name in order if name.startswith(f"{user}-")]
                assert mine == sorted(mine), "out of order"


async def _await(use: Awaitable[Any]) -> Any:
    return await use


def name_of(event: EventData) -> str:
    return event.body.decode().strip()


@pytest.mark.timeout(3600)
def test_buffer_ends_every_accepted_event_once_in_random_histories(
    pytestconfig: pytest.Config, caplog: pytest.LogCaptureFixture
) -> None:
    """In 60 random histories, or 10,000 in the long form. An hour of virtual time is enough for each.

    Stored is what an idempotent producer acknowledged, once and in order, or what it said is not known. Where the
    trouble ends before the producer is closed, each partition takes an event again.
    """

    caplog.set_level(logging.CRITICAL, logger="eventpump.producer")  # thousands of callbacks that raise

    async def run(seed: int) -> None:
        async with asyncio.timeout(3600):
            await History(seed).run()

    for seed in range(10_000 if pytestconfig.getoption("--long") else 60):
        try:
            with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
                runner.run(run(seed))
        except BaseException as error:
            error.add_note(f"in the history of seed {seed}")
            raise
