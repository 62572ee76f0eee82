"""azure-eventhub's sides: its sync clients, over its default (pure Python) transport."""

from __future__ import annotations

import threading
import time
from itertools import cycle, islice
from typing import Any

from azure.eventhub import EventData, EventHubConsumerClient, EventHubProducerClient, PartitionContext

from benchmarks.events import samples
from benchmarks.meter import Meter, page_faults
from benchmarks.sides.azure import client_options, event_of, reading, taken
from benchmarks.sides.common import BODY_SIZE, FanTally, PacedTally, Tally, latency_of, rest


def receive(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    available: int,
    kind: str | None = None,
    work: str = "fields",
    prefetch: int = 300,
    max_batch_size: int = 300,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Receive so many events, and read them.

    The client's threads go on until the process is ended.

    Args:
        work: What is done with each event: one of `benchmarks.events.WORKS`.
        options: Of the connection.
    """
    read = reading(work)
    tally = Tally(partitions, events, available, kind)
    done = threading.Event()
    failures: list[BaseException] = []
    # Each partition has a thread.
    lock = threading.Lock()

    def on_event_batch(context: PartitionContext, batch: list[EventData]) -> None:
        if not batch or done.is_set():
            return
        try:
            found = read(batch)
            with lock:
                if not done.is_set() and tally.add(context.partition_id, *found):
                    done.set()
        except AssertionError as error:
            # The client would log it and go on.
            failures.append(error)
            done.set()

    client = EventHubConsumerClient.from_connection_string(
        connection_string, "$Default", eventhub_name=hub, **client_options(connection_string, options)
    )

    def run() -> None:
        try:
            client.receive_batch(
                on_event_batch, max_batch_size=max_batch_size, prefetch=prefetch, starting_position="-1"
            )
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True).start()
    done.wait()
    if failures:
        raise failures[0]
    return tally.meter.result()


def paced(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    kind: str,
    work: str,
    times: str,
    prefetch: int = 300,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Receive events that come at a pace. The client's threads go on until the process is ended.

    Args:
        work: What is done with each event: one of `benchmarks.events.WORKS`.
        options: Of the connection; the others as of `PacedTally`.
    """
    read = reading(work)
    tally = PacedTally(partitions, events, kind, times)
    done = threading.Event()
    failures: list[BaseException] = []
    # Each partition has a thread.
    lock = threading.Lock()

    def on_event_batch(context: PartitionContext, batch: list[EventData]) -> None:
        if not batch or done.is_set():
            return
        arrived = time.perf_counter_ns()
        try:
            found = read(batch)
            with lock:
                tally.arrived = arrived
                if not done.is_set() and tally.add(context.partition_id, *found):
                    done.set()
        except AssertionError as error:
            # The client would log it and go on.
            failures.append(error)
            done.set()

    client = EventHubConsumerClient.from_connection_string(
        connection_string, "$Default", eventhub_name=hub, **client_options(connection_string, options)
    )

    def run() -> None:
        try:
            client.receive_batch(on_event_batch, prefetch=prefetch, starting_position="-1")
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True).start()
    done.wait()
    if failures:
        raise failures[0]
    rest()
    return tally.result()


def fanout(
    connection_string: str,
    hub: str,
    partitions: int,
    events: int,
    available: int,
    consumers: int,
    reads: bool,
    kind: str,
    prefetch: int = 300,
    max_batch_size: int = 300,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Receive so many events by several clients, each in a consumer group of its own.

    The clients' threads go on until the process is ended.

    Args:
        consumers: How many clients there are.
        reads: Whether each reads four fields of every event.
        options: Of the connection; the others as of `FanTally`.
    """
    tally = FanTally(consumers, partitions, events, available, kind)
    done = threading.Event()
    failures: list[BaseException] = []
    # Each partition of each client has a thread.
    lock = threading.Lock()

    def receive_all(consumer: int) -> None:
        def on_event_batch(context: PartitionContext, batch: list[EventData]) -> None:
            if not batch or done.is_set():
                return
            try:
                if taken(tally, consumer, context.partition_id, batch, reads, lock):
                    done.set()
            except AssertionError as error:
                # The client would log it and go on.
                failures.append(error)
                done.set()

        client = EventHubConsumerClient.from_connection_string(
            connection_string, f"group-{consumer}", eventhub_name=hub, **client_options(connection_string, options)
        )
        try:
            client.receive_batch(
                on_event_batch, max_batch_size=max_batch_size, prefetch=prefetch, starting_position="-1"
            )
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    for consumer in range(consumers):
        threading.Thread(target=receive_all, args=(consumer,), daemon=True).start()
    done.wait()
    if failures:
        raise failures[0]
    return tally.result()


def send(
    connection_string: str,
    hub: str,
    partitions: int,
    batches: int,
    warm_up: int,
    kind: str = "uniform",
    body_size: int = BODY_SIZE,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Fill batches to the brim and send them, one after the other.

    Args:
        options: Of the connection.
    """
    endless = cycle(samples(kind, body_size))
    sent = 0
    meter: Meter | None = None
    client = EventHubProducerClient.from_connection_string(
        connection_string, eventhub_name=hub, **client_options(connection_string, options)
    )
    with client:
        for number in range(batches):
            batch = client.create_batch(partition_id=str(number % partitions))
            for sample in endless:
                try:
                    batch.add(event_of(sample))
                except ValueError:
                    break
            client.send_batch(batch)
            sent += len(batch)
            if meter is None:
                meter = Meter(len(batch) * warm_up, len(batch) * batches * 19 // 20)
            meter.add(len(batch))
    assert meter is not None
    return {**meter.result(), "sent": sent}


def buffered(
    connection_string: str,
    hub: str,
    events: int,
    warm_up: int,
    kind: str = "uniform",
    body_size: int = BODY_SIZE,
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Send single events through its buffer: to the partition of their key, or to whatever partition it likes."""
    endless = cycle(samples(kind, body_size))
    meter = Meter(warm_up, warm_up + events)
    stored = 0
    # Each partition has a thread.
    lock = threading.Lock()

    def on_success(events: list[Any], partition_id: str | None) -> None:
        nonlocal stored
        with lock:
            stored += len(events)

    def on_error(events: list[Any], partition_id: str | None, error: Exception) -> None:
        raise AssertionError(f"{len(events)} events were not stored") from error

    client = EventHubProducerClient.from_connection_string(
        connection_string,
        eventhub_name=hub,
        buffered_mode=True,
        on_success=on_success,
        on_error=on_error,
        **client_options(connection_string, options),
    )
    with client:
        for count in (warm_up, events):
            for sample in islice(endless, count):
                client.send_event(event_of(sample), partition_key=sample.partition_key)
            client.flush()
            meter.add(count)
    if stored != meter.count:
        raise AssertionError(f"{stored} events are stored of {meter.count}")
    return {**meter.result(), "sent": meter.count}


def latency(
    connection_string: str,
    hub: str,
    sends: int,
    warm_up: int,
    kind: str = "uniform",
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Send single events, each after the one before is stored.

    Args:
        options: Of the connection.
    """
    endless = cycle(samples(kind))
    client = EventHubProducerClient.from_connection_string(
        connection_string, eventhub_name=hub, **client_options(connection_string, options)
    )
    times = []
    with client:
        for _ in range(warm_up):
            client.send_event(event_of(next(endless)), partition_id="0")
        began, cpu, faults = time.perf_counter(), time.process_time(), page_faults()
        for _ in range(sends):
            before = time.perf_counter()
            client.send_event(event_of(next(endless)), partition_id="0")
            times.append(time.perf_counter() - before)
        used, wall = time.process_time() - cpu, time.perf_counter() - began
        result = latency_of(times, used, wall, page_faults() - faults)
    return {**result, "sent": warm_up + sends}
