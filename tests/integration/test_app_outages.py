"""An application goes on after what is final for a producer, and waits for a service that is away at its start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from eventpump import (
    BufferedProducer,
    ConfigurationError,
    Emulator,
    EventData,
    EventHubsApp,
    GeneratorSource,
    MemoryLeaseStore,
    MemoryPublisherStateStore,
    PartitionReader,
    ProducerDisconnectedError,
    ReceivedEvent,
    RetryOptions,
)
from eventpump.app.results import Finality, finality_of
from eventpump.errors import (
    EntityNotFoundError,
    EventTooLargeError,
    InvalidClientStateError,
    ProducerStateLostError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    ServiceBusyError,
)

QUICK: dict[str, Any] = {"handler_retry": RetryOptions(max_retries=None, base_delay=0.05, max_delay=0.2)}


async def _send(service: Emulator, hub: str, *numbers: int) -> None:
    async with BufferedProducer(service.connection_string, hub) as producer:
        for number in numbers:
            await producer.send(EventData(str(number)), partition_key=str(number))


async def _results(service: Emulator, hub: str) -> set[int]:
    """Return the numbers that a hub holds now."""
    found: set[int] = set()
    for partition_id in map(str, range(service.hubs[hub])):
        async with PartitionReader(service.connection_string, hub, partition_id=partition_id, end="@latest") as reader:
            found |= {int(event.body) async for event in reader}
    return found


async def _until_published(service: Emulator, hub: str, numbers: set[int], running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(30):
        while not numbers <= await _results(service, hub):
            assert not running.done()
            await asyncio.sleep(0.1)  # a hub has no other sign of it


async def test_forgotten_publisher_is_replaced() -> None:
    """What the service does not take from it any more is published by a new one, while the application runs on."""
    async with Emulator({"in": 2, "out": 2}) as service:
        app = EventHubsApp(service.connection_string, lease_store=MemoryLeaseStore(), **QUICK)

        @app.subscriber("in")
        @app.publisher("out", idempotent=True)
        async def take(body: bytes) -> bytes:
            return body

        running = asyncio.create_task(app.run_async())
        await _send(service, "in", *range(4))
        await _until_published(service, "out", {0, 1, 2, 3}, running)
        before = app.producers["out"]
        service.forget_producers("out")
        await _send(service, "in", *range(4, 12))
        await _until_published(service, "out", set(range(12)), running)
        assert app.producers["out"] is not before
        app.stop()
        await running


async def test_result_hub_that_comes_back_smaller_gets_all_results() -> None:
    """The producer that knew four partitions is replaced by one that knows two."""
    async with Emulator({"in": 1, "out": 4}) as service:
        app = EventHubsApp(service.connection_string, lease_store=MemoryLeaseStore(), **QUICK)

        @app.subscriber(
            "in", concurrency=4, handler_retry=RetryOptions(max_retries=100, base_delay=0.05, max_delay=0.2)
        )
        @app.publisher("out", retry=RetryOptions(max_retries=0))
        async def take(body: bytes) -> bytes:
            return body

        running = asyncio.create_task(app.run_async())
        await _send(service, "in", 0)
        await _until_published(service, "out", {0}, running)
        service.recreate_hub("out", 2)
        await _send(service, "in", *range(1, 20))
        await _until_published(service, "out", set(range(1, 20)), running)
        app.stop()
        await running


async def test_publisher_that_another_process_replaced_ends_the_application() -> None:
    """It is not to fence that process out in turn: the error is raised, and the event is left to the next run."""
    store = MemoryPublisherStateStore()
    named: dict[str, Any] = {"idempotent": True, "name": "app", "state_store": store, "on_doubt": "accept"}
    async with Emulator({"in": 1, "out": 1}) as service:
        app = EventHubsApp(service.connection_string, lease_store=MemoryLeaseStore(), **QUICK)

        @app.subscriber("in")
        @app.publisher("out", **named)
        async def take(body: bytes) -> bytes:
            return body

        running = asyncio.create_task(app.run_async())
        await _send(service, "in", 0)
        await _until_published(service, "out", {0}, running)
        async with BufferedProducer(service.connection_string, "out", **named) as producer:
            await producer.send_and_wait(EventData("100"), partition_id="0")
            await _send(service, "in", 1)
            async with asyncio.timeout(30):
                with pytest.raises(ProducerDisconnectedError):
                    await running


@pytest.mark.parametrize(
    ("error", "keeps_state", "expected"),
    [
        (ProducerDisconnectedError("replaced"), False, Finality.END),
        (ProducerStateLostError(("0",), "gone"), False, Finality.REPLACE),
        (ProducerStateLostError(("0",), "gone"), True, Finality.END),
        (InvalidClientStateError("0", "behind"), False, Finality.REPLACE),
        (PublishOutcomeUnknownError("0", 1, 1), True, Finality.PASSING),
        (PublishOutcomeUnknownError("0", 1, 1, problem="in doubt"), True, Finality.END),
        (EntityNotFoundError("no such hub"), False, Finality.MAYBE_GONE),
        (RequestRefusedError("no such partition"), False, Finality.MAYBE_GONE),
        (EventTooLargeError(2, 1), False, Finality.PASSING),
        (ServiceBusyError("later"), False, Finality.PASSING),
    ],
)
def test_what_follows_an_error_of_a_producer(error: Exception, *, keeps_state: bool, expected: Finality) -> None:
    """A new producer only where it can publish, and where the options do not say otherwise."""
    assert finality_of(error, keeps_state=keeps_state) is expected


@contextmanager
def _reported(text: str) -> Iterator[asyncio.Event]:
    """Return an event that is set when the application logs a text."""
    reported = asyncio.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                reported.set()

    log, watch = logging.getLogger("eventpump.app"), Watch()
    log.addHandler(watch)
    try:
        yield reported
    finally:
        log.removeHandler(watch)


async def test_named_subscriber_waits_for_a_service_that_is_away_at_the_start() -> None:
    """For as long as a host does; stopped meanwhile, the application ends in order."""
    async with Emulator(["in"]) as service:
        connection_string, port = service.connection_string, service.port
    app = EventHubsApp(connection_string, lease_store=MemoryLeaseStore)
    got: asyncio.Queue[int] = asyncio.Queue()

    @app.subscriber("in", name="copy", start="earliest", catch_up="shared")
    async def take(number: int) -> None:
        got.put_nowait(number)

    with _reported("its subscriber copy cannot begin yet") as reported:
        running = asyncio.create_task(app.run_async())
        await reported.wait()
        app.stop()
        await running
        reported.clear()
        running = asyncio.create_task(app.run_async())
        await reported.wait()
    async with Emulator(["in"], port=port) as service:
        await _send(service, "in", 7)
        async with asyncio.timeout(60):
            assert await got.get() == 7
        app.stop()
        await running


async def test_functions_run_on_a_source() -> None:
    """In place of a hub, also for several groups and subscriptions, and without any service."""
    source = GeneratorSource(seed=3, partitions=1, events=40, rate=None, hub="readings")
    app = EventHubsApp(source=source, lease_store=MemoryLeaseStore)
    got: dict[str, set[int]] = {"all": set(), "copy": set(), "group": set()}

    def collect(name: str) -> Callable[[ReceivedEvent], Any]:
        async def function(event: ReceivedEvent) -> None:
            got[name].add(event.sequence_number)
            if all(len(each) == 40 for each in got.values()):
                app.stop()

        return function

    app.subscriber("readings")(collect("all"))
    app.subscriber("readings", name="copy", start="earliest", catch_up="shared")(collect("copy"))
    app.subscriber("readings", consumer_group="other")(collect("group"))
    async with source, asyncio.timeout(60):
        await app.run_async()
    assert len(got["all"]) == 40
    assert got["all"] == got["copy"] == got["group"]


async def test_source_is_beside_the_hubs_of_the_service() -> None:
    """What a function returns for its events is published to a hub; the connection is not the source's."""
    source = GeneratorSource(
        partitions=1, events=20, rate=None, body=lambda _, number, rng: str(number), hub="readings"
    )
    async with Emulator({"out": 1}) as service:
        app = EventHubsApp(service.connection_string, source=[source], lease_store=MemoryLeaseStore, trust_env=False)

        @app.subscriber("readings")
        @app.publisher("out")
        async def take(body: bytes) -> bytes:
            return body

        running = asyncio.create_task(app.run_async())
        await _until_published(service, "out", set(range(20)), running)
        app.stop()
        await running


async def test_sources_that_cannot_be_used_are_refused() -> None:
    """What is none, two of one hub, and one that no subscriber reads."""
    one, two = GeneratorSource(hub="a"), GeneratorSource(hub="a")
    for given, problem in (("a", "must be an event source"), (7, "must be an event source"), ([one, two], "two for")):
        with pytest.raises(ConfigurationError, match=problem):
            EventHubsApp(source=given)  # type: ignore[arg-type]  # that is the point
    app = EventHubsApp(source=one, lease_store=MemoryLeaseStore)

    @app.subscriber("b")
    async def take(body: bytes) -> None:
        pass

    with pytest.raises(ConfigurationError, match="the hub a has no subscriber"):
        await app.run_async()
