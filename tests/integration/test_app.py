"""An application of decorated functions, against the local service as its users test it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from eventpump import (
    CloudEvent,
    ConfigurationError,
    DecodeError,
    Emulator,
    EventData,
    EventHubsApp,
    EventProducer,
    MemoryLeaseStore,
    Park,
    PartitionContext,
    ReceivedEvent,
    RetryOptions,
    SqliteLeaseStore,
)
from eventpump.errors import ProcessorFailedError
from eventpump.reports import EventSkipped, HostReport, PumpClosed, PumpStarted
from tests.support.codecs import DEFLATE, GZIP
from tests.support.forks import run_python

ROOT = Path(__file__).parents[2]
TWICE = RetryOptions(max_retries=1, base_delay=0.01, max_delay=0.01)


class Reading(BaseModel):
    device: str
    celsius: float


class Alert(BaseModel):
    device: str


async def test_functions_are_called_and_what_they_return_is_published() -> None:
    """Payload, event and context by annotation; None is not published; the key of the event is kept."""
    app = EventHubsApp()
    seen: list[tuple[str, str, str | None]] = []

    @app.subscriber("telemetry")
    @app.publisher("alerts")
    async def watch(reading: Reading, context: PartitionContext, event: ReceivedEvent) -> Alert | None:
        seen.append((reading.device, context.hub, event.partition_key))
        return Alert(device=reading.device) if reading.celsius > 90 else None

    async with app.test() as hubs:
        for device, celsius in (("a", 95.0), ("b", 20.0), ("a", 99.0)):
            await hubs["telemetry"].publish(Reading(device=device, celsius=celsius), partition_key=device)
        await hubs["telemetry"].handled()
        assert sorted(seen) == [("a", "telemetry", "a"), ("a", "telemetry", "a"), ("b", "telemetry", "b")]
        assert await hubs["alerts"].published(Alert) == [Alert(device="a"), Alert(device="a")]
        assert {event.partition_key for event in await hubs["alerts"].published()} == {"a"}


async def test_encoded_payloads_are_decoded_between_steps_and_in_the_test() -> None:
    """`encode` of a publisher, `decode` of the application, and `published`, which has the codecs of both."""
    app = EventHubsApp(decode=GZIP)
    got: list[str] = []

    @app.subscriber("words")
    @app.publisher("packed", encode=GZIP)
    @app.publisher("crushed", encode=[DEFLATE, GZIP])
    async def pack(word: str) -> str:
        return word * 2

    @app.subscriber("packed")
    async def unpack(word: str) -> None:
        got.append(word)

    async with app.test() as hubs:
        await hubs["words"].publish("a")
        await hubs["words"].handled()
        await hubs["packed"].handled()
        assert got == await hubs["packed"].published(str) == await hubs["crushed"].published(str) == ["aa"]
        (event,) = await hubs["crushed"].published()
        assert event.raw_message.properties.content_encoding == "deflate, gzip"


async def test_several_steps_hubs_groups_and_subscriptions() -> None:
    """A chain of two hubs, a second group, and a named subscription beside the host's own."""
    app = EventHubsApp()
    got: defaultdict[str, list[Any]] = defaultdict(list)

    @app.publisher("doubled", partition_key=str)
    @app.subscriber("numbers")
    async def double(number: int) -> int:
        got["numbers"].append(number)
        return number * 2

    @app.subscriber("doubled", key=lambda event: event.partition_key, handler_retry=TWICE)
    async def collect(number: int) -> None:
        got["doubled"].append(number)

    @app.subscriber("numbers", consumer_group="second")
    async def raw(body: bytes) -> None:
        got["second"].append(body)

    @app.subscriber("numbers", name="large", filter=lambda event: len(event.body) > 1)
    async def large(number: int) -> None:
        got["large"].append(number)

    async with app.test(partitions=3) as hubs:
        await hubs["numbers"].publish(*range(8, 13))
        await hubs["numbers"].handled()
        await hubs["doubled"].handled()
        assert sorted(await hubs["doubled"].published(int)) == [16, 18, 20, 22, 24]
    assert {name: sorted(values) for name, values in got.items()} == {
        "numbers": [8, 9, 10, 11, 12],
        "doubled": [16, 18, 20, 22, 24],
        "second": sorted(str(number).encode() for number in range(8, 13)),
        "large": [10, 11, 12],
    }


async def test_what_cannot_be_decoded_is_parked_without_retries() -> None:
    """The others go on, and the error that is parked names the event."""
    reports: list[object] = []
    app = EventHubsApp(hooks=[reports.append])
    devices: list[str] = []

    @app.subscriber("telemetry", on_retries_exhausted=Park("parked"), handler_retry=RetryOptions(max_retries=100))
    async def watch(reading: Reading) -> None:
        devices.append(reading.device)

    async with app.test(partitions=1) as hubs:
        await hubs["telemetry"].publish(Reading(device="a", celsius=1), "nonsense", Reading(device="b", celsius=1))
        await hubs["telemetry"].handled()
        (parked,) = await hubs["parked"].published()
        assert parked.body == b"nonsense"
        assert "DecodeError" in parked.properties["eventpump.parked.error"]
        assert "event 1" in parked.properties["eventpump.parked.message"]
    assert devices == ["a", "b"]


async def test_what_cannot_be_decoded_stops_the_application_by_default() -> None:
    """A wait for it raises, and so does the end."""
    app = EventHubsApp()

    @app.subscriber("telemetry")
    async def watch(reading: Reading) -> None:
        raise AssertionError("not reached")

    async def body() -> None:
        async with app.test() as hubs:
            await hubs["telemetry"].publish("nonsense")
            await hubs["telemetry"].handled()

    with pytest.raises(ProcessorFailedError) as raised:
        await body()
    assert isinstance(raised.value.__cause__, DecodeError)


async def test_events_before_one_that_fails_are_handled_once() -> None:
    """Of a batch that is tried again; and what was published for them is there once."""
    app = EventHubsApp(handler_retry=TWICE, on_retries_exhausted="skip")
    calls: list[int] = []

    @app.subscriber("numbers")
    @app.publisher("out")
    async def handle(number: int) -> int:
        calls.append(number)
        if number == 3:
            raise ValueError("three")
        return number

    async with app.test(partitions=1) as hubs:
        await hubs["numbers"].publish(1, 2, 3, 4)
        await hubs["numbers"].handled()
        assert await hubs["out"].published(int) == [1, 2, 4]
    assert [calls.count(number) for number in (1, 2, 4)] == [1, 1, 1]
    assert calls.count(3) >= 2  # alone, and in batches before that; a drain in between restarts the count


async def test_failure_to_publish_is_a_failure_of_the_event() -> None:
    """It is not processed before what it led to is stored."""
    app = EventHubsApp(failure_policy=Park("parked"))

    @app.subscriber("numbers")
    @app.publisher("out")
    async def handle(number: int) -> str:
        return "x" * (2_000_000 if number == 2 else 1)

    async with app.test(partitions=1) as hubs:
        await hubs["numbers"].publish(1, 2, 3)
        await hubs["numbers"].handled()
        assert [event.body for event in await hubs["parked"].published()] == [b"2"]
        assert await hubs["out"].published(str) == ["x", "x"]


async def test_cloud_events_are_read_and_published() -> None:
    """In either mode."""
    app = EventHubsApp()

    @app.subscriber("in")
    @app.publisher("out", content_mode="structured")
    async def handle(event: CloudEvent) -> CloudEvent:
        return CloudEvent(id=event.id, source="/app", type="answer", data=event.data)

    async with app.test(partitions=1) as hubs:
        asked = CloudEvent(id="1", source="/s", type="question", data={"a": 1})
        await hubs["in"].publish(asked, asked.to_event_data("structured"))
        await hubs["in"].handled()
        answers = await hubs["out"].published(CloudEvent)
        assert [(each.id, each.source, each.data) for each in answers] == [("1", "/app", {"a": 1})] * 2
        (first, _) = await hubs["out"].published()
        assert (first.content_type or "").startswith("application/cloudevents+json")


async def test_wait_that_takes_too_long_says_for_what() -> None:
    """A function that fails forever, and one that stops the application."""
    app = EventHubsApp()

    @app.subscriber("telemetry")
    async def watch(text: str) -> None:
        if text == "stop":
            app.stop()
        raise ValueError("never")

    async with app.test(timeout=1.0) as hubs:
        await hubs["telemetry"].publish("a")
        with pytest.raises(TimeoutError, match="the events of hub telemetry are handled"):
            await hubs["telemetry"].handled()
        with pytest.raises(ConfigurationError, match="there is no hub other"):
            hubs["other"]


async def test_run_async_against_a_service_until_stop(eventpump_emulator: Emulator, tmp_path: Path) -> None:
    """Checkpoints are stored; a second run continues after them."""
    async with EventProducer(eventpump_emulator.connection_string, "telemetry") as producer:
        await producer.send([EventData(str(number)) for number in range(5)], partition_id="0")
    for expected in ([0, 1, 2, 3, 4], [5]):
        seen: list[int] = []
        last = expected[-1]
        app = EventHubsApp(
            eventpump_emulator.connection_string, lease_store=lambda: SqliteLeaseStore(tmp_path / "leases.db")
        )

        async def collect(number: int) -> None:
            seen.append(number)  # noqa: B023 - run within this round
            if number == last:  # noqa: B023 - likewise
                app.stop()  # noqa: B023 - likewise

        app.subscriber("telemetry")(collect)
        await asyncio.wait_for(app.run_async(), 30)
        assert seen == expected
        async with EventProducer(eventpump_emulator.connection_string, "telemetry") as producer:
            await producer.send(EventData("5"), partition_id="0")


async def test_signals_close_in_order(eventpump_emulator: Emulator) -> None:
    """SIGTERM lets the running call finish, while the other partitions are closed."""
    started: set[str | None] = set()
    has_several, is_closing = asyncio.Event(), asyncio.Event()

    def reported(report: HostReport) -> None:
        if isinstance(report, PumpStarted):
            started.add(report.partition_id)
            if len(started) > 1:
                has_several.set()
        elif isinstance(report, PumpClosed):
            is_closing.set()

    app = EventHubsApp(eventpump_emulator.connection_string, lease_store=MemoryLeaseStore(), hooks=[reported])
    done: list[str] = []

    @app.subscriber("telemetry")
    async def watch(text: str) -> None:
        await has_several.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await is_closing.wait()
        done.append(text)

    async with EventProducer(eventpump_emulator.connection_string, "telemetry") as producer:
        await producer.send(EventData("a"))
    await asyncio.wait_for(app.run_async(handle_signals=True), 30)
    assert done == ["a"]


async def test_application_can_be_observed() -> None:
    """Spans around every function, reports of every host, and the hosts and producers themselves."""
    spans: list[tuple[str, str, object]] = []
    reports: list[HostReport] = []

    async def trace(context: PartitionContext, event: ReceivedEvent, call: Callable[[], Awaitable[Any]]) -> Any:
        name = f"{context.hub} {event.body_as_str()}"
        try:
            result = await call()
        except Exception as error:
            spans.append((name, "failed", type(error)))
            raise
        spans.append((name, "ok", result))
        return result

    app = EventHubsApp(
        middleware=trace, hooks=[reports.append], handler_retry=TWICE, failure_policy="skip", max_batch_size=1
    )

    @app.subscriber("numbers")
    @app.publisher("doubles")
    async def double(number: int) -> int:
        return number * 2

    @app.subscriber("doubles", concurrency=4)
    async def take(number: int) -> None:
        pass

    assert not app.hosts
    async with app.test(partitions=1) as hubs:
        await hubs["numbers"].publish(1, "nonsense")
        await hubs["numbers"].handled()
        await hubs["doubles"].handled()
        assert {each: [part.is_attached for part in host.partitions] for each, host in app.hosts.items()} == {
            ("numbers", "$Default"): [True],
            ("doubles", "$Default"): [True],
        }
        assert app.producers["doubles"].stats.sent.events == 1
    assert sorted(spans, key=str) == [
        ("doubles 2", "ok", None),
        ("numbers 1", "ok", 2),
        ("numbers nonsense", "failed", DecodeError),
    ]
    assert [report.sequence_number for report in reports if isinstance(report, EventSkipped)] == [1]
    with pytest.raises(TypeError):
        app.hosts["numbers", "$Default"] = None  # type: ignore[index]  # on purpose


async def test_in_the_background_of_other_code(eventpump_emulator: Emulator) -> None:
    """`async with app`: for a web server's lifespan. A failure of a host ends the body, and is raised."""
    app = EventHubsApp(eventpump_emulator.connection_string, lease_store=MemoryLeaseStore, failure_policy="stop")
    has = asyncio.Event()

    @app.subscriber("telemetry")
    async def watch(text: str) -> None:
        has.set()
        if text == "bad":
            raise ValueError(text)

    async with app, EventProducer(eventpump_emulator.connection_string, "telemetry") as producer:
        await producer.send(EventData("good"))
        await asyncio.wait_for(has.wait(), 30)

    async def body() -> None:
        async with app, EventProducer(eventpump_emulator.connection_string, "telemetry") as producer:
            await producer.send(EventData("bad"))
            await asyncio.wait_for(asyncio.Event().wait(), 30)

    with pytest.raises(ProcessorFailedError):
        await body()


def _example(program: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "EVENTPUMP_CONNECTION_STRING"}
    result = run_python(f"examples/{program}", *arguments, env=environment, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_example_of_an_application_receives_its_alerts() -> None:
    """It runs by itself, parks what is garbled, and ends."""
    printed = _example("app.py", "--count", "200")
    assert "handled 200 readings" in printed
    (received, expected) = re.findall(r"received (\d+) of (\d+) alerts", printed)[0]
    assert received == expected


def test_example_of_loops_inserts_every_event() -> None:
    """Also those of the batch with which a loop failed."""
    printed = _example("batches.py", "--count", "1000")
    assert "the batch is delivered again" in printed
    assert "inserted 1000 of 1000 events" in printed


async def test_application_waits_at_its_start_until_the_service_is_there() -> None:
    """With a publisher as without: its producer is opened before the hosts. Stopped meanwhile, it ends in order."""
    async with Emulator(["numbers", "doubled"]) as emulator:
        connection_string, port = emulator.connection_string, emulator.port
    is_waiting = asyncio.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "cannot be opened yet" in record.getMessage():
                is_waiting.set()

    app = EventHubsApp(connection_string, lease_store=MemoryLeaseStore)
    got: asyncio.Queue[int] = asyncio.Queue()

    @app.publisher("doubled")
    @app.subscriber("numbers")
    async def double(number: int) -> int:
        got.put_nowait(number)
        return number * 2

    log, watch = logging.getLogger("eventpump.app"), Watch()
    log.addHandler(watch)
    try:
        running = asyncio.create_task(app.run_async())
        await is_waiting.wait()
        app.stop()
        await running
        is_waiting.clear()
        running = asyncio.create_task(app.run_async())
        await is_waiting.wait()
    finally:
        log.removeHandler(watch)
    async with (
        Emulator(["numbers", "doubled"], port=port) as emulator,
        EventProducer(emulator.connection_string, "numbers") as producer,
    ):
        await producer.send([EventData("21")])
        assert await got.get() == 21
        app.stop()
        await running
