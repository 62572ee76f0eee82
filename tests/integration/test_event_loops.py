"""A client belongs to the event loop of its first use: on any other it raises at once, and nothing is lost silently."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import random
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from eventpump import (
    BufferedProducer,
    CaptureSource,
    DeliveryReceipt,
    Emulator,
    EventData,
    EventHubsApp,
    EventHubSource,
    EventPosition,
    EventProcessorHost,
    EventProducer,
    EventPumpError,
    GeneratorSource,
    MemoryLeases,
    MemoryLeaseStore,
    MemorySource,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
    SqliteLeaseStore,
    SqlitePublisherStateStore,
    make_transport,
)
from eventpump.errors import ClosedError
from eventpump.interfaces import ConsumerScope
from eventpump.options import connection_settings
from eventpump.testing.threaded import EmulatorThread
from tests.support.seeds import seeds

T = TypeVar("T")


@pytest.fixture(scope="module")
def service() -> Iterator[EmulatorThread]:
    with EmulatorThread({"telemetry": 2}) as running:
        yield running


async def _bounded(work: Awaitable[T]) -> T:
    async with asyncio.timeout(20):
        return await work


def _run(work: Callable[[], Awaitable[T]]) -> T:
    """Run on a loop of its own."""

    async def main() -> T:
        return await _bounded(work())

    return asyncio.run(main())


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings of clients that were not closed; of asyncio's about their sockets there is one more."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
        gc.collect()
    found += [str(each.message) for each in caught if "was not closed" in str(each.message)]


async def _process(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
    raise AssertionError("there are no events")


@dataclass
class Case:
    """A client, a use of it that leaves it open, and the name in its errors.

    Args:
        warns: Whether the end of the loop is warned of: there is something to close.
    """

    make: Callable[[str, Path], Any]
    use: Callable[[Any], Awaitable[Any]]
    name: str
    close: Callable[[Any], Awaitable[Any]] = lambda client: client.aclose()
    warns: bool = True


async def _read(reader: PartitionReader) -> None:
    if reader._feed is None:
        await reader.__aenter__()
    await reader.read(max_wait_time=0)


async def _open_source(source: Any) -> None:
    await source.partitions()
    await source.partition_properties("0")


_NAMES = itertools.count()
SCOPE = ConsumerScope("a.example", "telemetry", "$Default")
CASES = {
    "producer": Case(
        lambda text, _: EventProducer(text, "telemetry"), lambda client: client.send(EventData(b"x")), "EventProducer"
    ),
    "batch": Case(
        lambda text, _: EventProducer(text, "telemetry"), lambda client: client.create_batch(), "EventProducer"
    ),
    "properties": Case(
        lambda text, _: EventProducer(text, "telemetry"), lambda client: client.get_properties(), "EventProducer"
    ),
    "buffered": Case(
        lambda text, _: BufferedProducer(text, "telemetry"),
        lambda client: client.send_and_wait(EventData(b"x")),
        "BufferedProducer",
    ),
    "buffered properties": Case(
        lambda text, _: BufferedProducer(text, "telemetry"), lambda client: client.get_properties(), "BufferedProducer"
    ),
    "reader": Case(lambda text, _: PartitionReader(text, "telemetry", partition_id="0"), _read, "PartitionReader"),
    "host": Case(
        lambda text, _: EventProcessorHost(text, "telemetry", lease_store=MemoryLeaseStore()),
        lambda client: client.subscribe(f"s{next(_NAMES)}", _process),
        "EventProcessorHost",
    ),
    "sqlite leases": Case(
        lambda _, path: SqliteLeaseStore(path / "leases.db"),
        lambda store: store.open(SCOPE) if store._worker is None else store.list(),
        "SqliteLeaseStore",
    ),
    "sqlite states": Case(
        lambda _, path: SqlitePublisherStateStore(path / "states.db"),
        lambda store: store.open(),
        "SqlitePublisherStateStore",
    ),
    "hub source": Case(lambda text, _: EventHubSource(text, "telemetry"), _open_source, "EventHubSource"),
    "capture source": Case(
        lambda _, path: CaptureSource(path, hub="telemetry", namespace="a"),
        lambda source: source.partitions(),
        "CaptureSource",
        warns=False,
    ),
    "generator source": Case(lambda _, __: GeneratorSource(), _open_source, "GeneratorSource", warns=False),
    "transport": Case(
        lambda text, _: make_transport(connection_settings(text, "telemetry")),
        lambda transport: transport.get_hub_properties("telemetry"),
        "NativeTransport",
        warns=False,
    ),
    "emulator": Case(
        lambda _, __: Emulator({"telemetry": 1}),
        lambda emulator: emulator.add_partitions("telemetry", 1) if emulator.port else emulator.start(),
        "Emulator",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_use_on_a_second_loop_is_refused(
    case: Case, service: EmulatorThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Made outside of loops it belongs to the first one that uses it; that one's end is a warning, and no log line."""
    client = case.make(service.connection_string, tmp_path)
    with _warnings() as found, caplog.at_level(logging.WARNING, "eventpump"):
        _run(lambda: case.use(client))
        for call in (case.use, case.close):
            with pytest.raises(ClosedError, match=f"the {case.name} belongs to another event loop, which has ended"):
                _run(lambda call=call: call(client))  # type: ignore[misc]  # a default keeps the function of this turn
        client = None
    assert [each.split(" was not")[0] for each in found] == [case.name] * case.warns
    assert not caplog.records


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_use_on_a_second_loop_in_a_thread_leaves_the_first_as_it_is(
    case: Case, service: EmulatorThread, tmp_path: Path
) -> None:
    """While the first loop runs it can be used there, and closed; then it is closed for the second one as well."""
    client = case.make(service.connection_string, tmp_path)

    async def main() -> None:
        await case.use(client)
        for call in (case.use, case.close):
            with pytest.raises(ClosedError, match=f"the {case.name} belongs to another event loop; create one"):
                await asyncio.to_thread(_run, lambda call=call: call(client))
        await case.use(client)
        await case.close(client)

    with _warnings() as found:
        _run(main)
        _run(lambda: case.close(client))
    assert not found


@pytest.mark.parametrize("is_ended", [False, True])
def test_host_with_a_loop_over_batches_may_be_closed_again_on_any_loop(service: EmulatorThread, is_ended: bool) -> None:
    """Once it is closed there is nothing to wait for, whether its loop has ended or is at rest."""
    host = EventProcessorHost(service.connection_string, "telemetry", lease_store=MemoryLeaseStore())

    async def use() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                async for _ in host.batches():
                    break
        await host.aclose()

    place = Place(is_thread=False)
    place.run(use)
    if is_ended:
        place.end()
    _run(host.aclose)
    place.end()


def test_app_runs_on_one_loop_at_a_time(service: EmulatorThread) -> None:
    """`stop` of another loop is refused while it runs; after a run it may run on another loop."""
    app = EventHubsApp(service.connection_string, lease_store=MemoryLeaseStore)

    @app.subscriber("telemetry")
    async def handle(event: ReceivedEvent) -> None:
        pass

    async def use() -> None:
        async with app:
            for call in (lambda: _run(app.run_async), lambda: app.stop()):
                with pytest.raises(ClosedError, match="the EventHubsApp belongs to another event loop; create one"):
                    await asyncio.to_thread(call)

    with _warnings() as found:
        _run(use)
        _run(use)
    assert not found


def test_memory_source_belongs_to_the_loop_of_its_links() -> None:
    """What a test appends from elsewhere is refused while a reader has a link, and taken when it has none."""
    source = MemorySource()

    async def read() -> None:
        async with PartitionReader(source=source, partition_id="0") as reader:
            assert len(await reader.read()) == 1
            with pytest.raises(ClosedError, match="the MemorySource belongs to another event loop"):
                await asyncio.to_thread(source.append, "0", b"y")

    for number in range(2):
        source.append("0", b"x")
        source.drop("0", number)
        _run(read)


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    if request.param == "asyncio":
        return asyncio.new_event_loop
    return pytest.importorskip("uvloop").new_event_loop  # type: ignore[no-any-return]  # not typed


def test_events_in_the_buffer_of_an_ended_loop_are_named_and_reported(
    service: EmulatorThread, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The warning and each later error have their number; `on_error` is called with them, and the receipts raise."""
    failed: list[EventData] = []
    producer = BufferedProducer(
        service.connection_string,
        "telemetry",
        max_wait_time=60,
        on_error=lambda events, partition_id, error: failed.extend(events),
    )

    async def fill() -> list[DeliveryReceipt]:
        return await producer.send([EventData(str(number)) for number in range(3)], partition_id="0")

    with _warnings() as found:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            receipts = runner.run(fill())
        for call in (fill, producer.flush, producer.aclose, lambda: producer.send(EventData(b"4"))):
            with pytest.raises(ClosedError, match="has ended and lost 3 events in its buffer; create"):
                _run(call)
        with pytest.raises(ClosedError):
            producer.send_nowait(EventData(b"5"))

        async def outcome() -> None:
            await receipts[0]

        with pytest.raises(ClosedError, match="is closed"):
            _run(outcome)
    assert [each for each in found if "BufferedProducer" in each and "lost 3 events in its buffer" in each]
    assert [event.body_as_str() for event in failed] == ["0", "1", "2"]


def test_receipt_awaited_on_another_loop_is_refused_until_the_outcome_is_known(service: EmulatorThread) -> None:
    """It is known on the producer's loop alone; once it is, it may be read anywhere."""

    async def main() -> None:
        async with BufferedProducer(service.connection_string, "telemetry", max_wait_time=60) as producer:
            receipt = await producer.send(EventData(b"x"))

            async def outcome() -> object:
                return await receipt

            with pytest.raises(ClosedError, match="BufferedProducer belongs to another event loop"):
                await asyncio.to_thread(_run, outcome)
            await producer.flush()
            assert await asyncio.to_thread(_run, outcome) == await receipt

    _run(main)


def test_client_of_a_module_in_tests_with_a_loop_each_is_refused_in_the_second(
    service: EmulatorThread, tmp_path: Path
) -> None:
    """As pytest-asyncio does it by default: the second test fails at once, and the message says why."""
    (tmp_path / "test_two.py").write_text(
        textwrap.dedent(f"""
        from eventpump import BufferedProducer, EventData, EventProducer

        producers = [kind({service.connection_string!r}, "telemetry") for kind in (EventProducer, BufferedProducer)]

        async def test_first():
            for producer in producers:
                await producer.send(EventData(b"x"))

        async def test_second():
            for producer in producers:
                await producer.send(EventData(b"x"))
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "asyncio", "--asyncio-mode=auto", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in result.stdout
    assert "ClosedError: the EventProducer belongs to another event loop, which has ended; create" in result.stdout


# --------------------------------------------------------------------------------------------------- random histories


class Place:
    """An event loop, at rest in the test's thread or running in one of its own."""

    def __init__(self, *, is_thread: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True) if is_thread else None
        self.is_ended = False
        if self.thread is not None:
            self.thread.start()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        async def main() -> T:
            return await _bounded(work())

        if self.thread is None:
            return self.loop.run_until_complete(main())
        future: Future[T] = asyncio.run_coroutine_threadsafe(main(), self.loop)
        return future.result()

    def end(self) -> None:
        """End the loop as `asyncio.run` does."""
        if self.is_ended:
            return
        self.is_ended = True

        async def cancel_rest() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            await self.loop.shutdown_asyncgens()

        self.run(cancel_rest)
        if self.thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
        self.loop.close()


def _history(service: EmulatorThread, seed: int) -> int:
    """Several loops and threads use one producer. Return how often it was refused."""
    rng = random.Random(seed)
    hub = "telemetry"
    outcomes: dict[str, str] = {}
    accepted: list[str] = []
    refused = 0

    def success(events: Sequence[EventData], partition_id: str) -> None:
        outcomes.update((event.body_as_str(), "stored") for event in events)

    def error(events: Sequence[EventData], partition_id: str, failure: Exception) -> None:
        outcomes.update((event.body_as_str(), "failed") for event in events)

    options: dict[str, Any] = {"idempotent": rng.random() < 0.3}
    kind = rng.choice((BufferedProducer, BufferedProducer, EventProducer))
    if kind is BufferedProducer:
        options |= {"on_success": success, "on_error": error, "max_wait_time": rng.choice((0.0, 0.005, 60.0))}
    client: Any = kind(service.connection_string, hub, **options)
    receipts: list[DeliveryReceipt] = []
    places = [Place(is_thread=rng.random() < 0.5) for _ in range(3)]
    home: Place | None = None
    is_closed = False

    async def send(body: str) -> None:
        if isinstance(client, EventProducer):
            await client.send(EventData(body), partition_id="0")
            outcomes[body] = "stored"
        else:
            receipts.append(await client.send(EventData(body), partition_id="0"))
        accepted.append(body)

    async def burst(body: str) -> None:
        for number in range(rng.randrange(1, 20)):
            await send(f"{body}.{number}")

    async def nowait(body: str) -> None:
        if isinstance(client, BufferedProducer):
            await client.open()
            receipts.append(client.send_nowait(EventData(body), partition_id="0"))
            accepted.append(body)
        else:
            await client.get_properties()

    async def flush(_: str) -> None:
        await (client.flush() if isinstance(client, BufferedProducer) else client.settle("0"))

    async def receipt(_: str) -> None:
        if receipts and ((one := rng.choice(receipts)).done() or options["max_wait_time"] < 1):
            await one
        else:
            await client.get_partition_properties("0")

    async def close(_: str) -> None:
        await client.aclose()

    calls = (send, send, send, burst, burst, nowait, flush, receipt)
    for step in range(rng.randrange(5, 25)):
        live = [place for place in places if not place.is_ended]
        if len(live) > 1 and rng.random() < 0.08:
            rng.choice(live).end()
            continue
        place = rng.choice(live)
        call = close if rng.random() < 0.03 else rng.choice(calls)
        if home is None and call is not close:
            home = place
        is_foreign = home is not None and place is not home and not is_closed
        is_known = call is receipt and any(each.done() for each in receipts)
        before = len(accepted)
        try:
            place.run(lambda call=call, step=step: call(f"{seed}.{step}"))  # type: ignore[misc]  # as above
        except EventPumpError as failure:
            is_known = is_known or any(each.done() for each in receipts)
            is_named = isinstance(failure, ClosedError) and "another event loop" in str(failure)
            if not (is_named is is_foreign or is_known or home is None or home.is_ended):
                raise
            refused += is_named
        else:
            is_known = is_known or (call is receipt and any(each.done() for each in receipts))
            assert not is_foreign or is_known or call is burst or is_closed, f"{call.__name__} was not refused"
            is_closed = is_closed or call is close
        assert not (len(accepted) > before and is_foreign), f"{call.__name__} was accepted"
    if home is not None and not home.is_ended and not is_closed:
        home.run(client.aclose)
    for place in places:
        place.end()
    # Nothing is lost without an error, and nothing is refused and stored.
    assert set(accepted) == set(outcomes)
    return refused


@seeds(15, of=200)
def test_history_of_loops_and_threads_with_one_producer(seed: int, service: EmulatorThread) -> None:
    """Each call returns or raises, on other loops than the first one's a `ClosedError`; each event has an outcome."""
    with _warnings():
        _history(service, seed)


class _Received:
    """What a client of a history with readers or hosts has received, by several clients in turn."""

    def __init__(self, prefix: str, count: int) -> None:
        self._prefix = prefix
        self._count = count
        self.numbers: list[int] = []

    @property
    def is_complete(self) -> bool:
        """Whether every event of the history was received."""
        return len(set(self.numbers)) == self._count

    def add(self, event: ReceivedEvent) -> None:
        """Record an event, if it is the history's."""
        prefix, _, number = event.body_as_str().rpartition(".")
        if prefix == self._prefix:
            self.numbers.append(int(number))


class _ReadingUse:
    """What a history does with a `PartitionReader`."""

    name = "PartitionReader"

    def __init__(self, service: EmulatorThread, first: int, received: _Received, rng: random.Random) -> None:
        self._received = received
        self.is_entered = False
        self.client = PartitionReader(
            service.connection_string,
            "telemetry",
            partition_id="0",
            # After the last one: the service refuses a number that no event has yet.
            position=EventPosition.at_sequence_number(first + len(set(received.numbers)) - 1),
        )

    async def receive(self) -> None:
        """Receive some events."""
        if not self.is_entered:
            await self.client.__aenter__()
            self.is_entered = True
        for event in await self.client.read(3, max_wait_time=0.2):
            self._received.add(event)

    async def other(self) -> None:
        """Read without decoding."""
        if self.is_entered:
            for raw in await self.client.read_raw(1, max_wait_time=0.2):
                self._received.add(ReceivedEvent(raw))


class _HostingUse:
    """What a history does with an `EventProcessorHost` and a loop over its batches."""

    name = "EventProcessorHost"
    leases: MemoryLeases

    def __init__(self, service: EmulatorThread, first: int, received: _Received, rng: random.Random) -> None:
        self._received = received
        self.client = EventProcessorHost(
            service.connection_string,
            "telemetry",
            lease_store=MemoryLeaseStore(self.leases, lease_duration=1.5),
            initial_position={"0": EventPosition.at_sequence_number(first, inclusive=True), "1": "@latest"},
            max_batch_size=rng.choice((1, 5)),
            renew_interval=0.3,
        )

    async def receive(self) -> None:
        """Process some batches; what has a checkpoint is processed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.6):
                async for batch in self.client.batches():
                    for event in batch.events:
                        self._received.add(event)
                    await batch.checkpoint()
                    break

    async def other(self) -> None:
        """Call it for its subscription."""
        if self.client._manager is not None:
            self.client.pause("default")
            self.client.resume("default")


def _history_of_reading(service: EmulatorThread, kind: type[_ReadingUse | _HostingUse], seed: int) -> int:
    """Several loops and threads use one reader or host, and then its successor. Return how often it was refused."""
    rng = random.Random(seed)
    prefix, count, refused = f"{kind.name} {seed}", rng.randrange(1, 40), 0
    received = _Received(prefix, count)

    async def publish() -> int:
        async with EventProducer(service.connection_string, "telemetry") as producer:
            before = await producer.get_partition_properties("0")
            await producer.send([EventData(f"{prefix}.{number}") for number in range(count)], partition_id="0")
            return before.last_enqueued_sequence_number + 1

    first = _run(publish)
    if kind is _HostingUse:
        _HostingUse.leases = MemoryLeases()
    places = [Place(is_thread=rng.random() < 0.5) for _ in range(3)]
    use = kind(service, first, received, rng)
    home: Place | None = None
    is_closed = False
    for _ in range(rng.randrange(4, 20)):
        live = [place for place in places if not place.is_ended]
        if len(live) > 1 and rng.random() < 0.1:
            rng.choice(live).end()
            continue
        if (is_closed or (home is not None and home.is_ended)) and rng.random() < 0.5:
            use, home, is_closed = kind(service, first, received, rng), None, False
        if isinstance(use, _HostingUse) and home is not None and home.is_ended:
            # The end of its loop has cancelled what runs it, which closes it.
            is_closed = is_closed or use.client.is_closed
        place = rng.choice(live)
        call = rng.choice((use.receive, use.receive, use.receive, use.other, use.client.aclose))
        is_close, before = call == use.client.aclose, len(received.numbers)
        # Before there is a first use that begins something, there is nothing that belongs to a loop.
        is_first = home is None and call == use.receive
        is_foreign = home is not None and place is not home and not is_closed
        if is_first and not is_closed:
            home = place
        failure = None
        try:
            place.run(call)
        except ClosedError as error:
            failure = str(error)
        if failure is None:
            assert not is_foreign, f"{call.__name__} was not refused"
            is_closed = is_closed or is_close
            continue
        is_named = f"the {kind.name} belongs to another event loop" in failure
        is_over = home is not None and home.is_ended
        assert is_named == is_foreign, f"{call.__name__}: {failure}"
        assert is_foreign or is_closed, f"{call.__name__} was refused in its own loop: {failure}"
        assert ("which has ended" in failure) == (is_named and is_over)
        assert len(received.numbers) == before
        refused += is_named
    if home is not None and not home.is_ended and not is_closed:
        home.run(use.client.aclose)
    for place in places:
        place.end()

    async def rest() -> None:
        last = kind(service, first, received, rng)
        try:
            while not received.is_complete:
                await last.receive()
        finally:
            await last.client.aclose()

    _run(rest)
    # Of a reader each once and in order; of hosts also again, and none before those that precede it.
    assert list(dict.fromkeys(received.numbers)) == list(range(count))
    assert kind is _HostingUse or len(received.numbers) == count
    return refused


@pytest.mark.parametrize("kind", [_ReadingUse, _HostingUse], ids=["reader", "host"])
@seeds(6, of=200)
def test_history_of_loops_and_threads_with_one_reader_or_host(
    seed: int, kind: type[_ReadingUse | _HostingUse], service: EmulatorThread
) -> None:
    """Other loops than the first one's get a `ClosedError`, no call hangs, and no event is lost, whichever ends."""
    with _warnings():
        _history_of_reading(service, kind, seed)
