"""The server of a host over sockets, beside a service and a lease store of its own: what it takes of the host."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from eventpump import (
    BufferedProducer,
    Emulator,
    EventData,
    EventHubsApp,
    EventProcessorHost,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
    SqliteLeaseStore,
)
from eventpump.health import HealthServer
from eventpump.reports import HostReport, LeaseLost, LeaseTaken, LoopBlocked

HUB = "telemetry"
PARTITIONS = 32


async def _get(url: str, path: str) -> int | None:
    """Return the status of one request on a connection of its own; None if the server has closed that."""
    connector = aiohttp.TCPConnector(force_close=True)
    try:
        async with aiohttp.ClientSession(connector=connector) as client, client.get(f"{url}{path}") as response:
            await response.read()
            return response.status
    except aiohttp.ClientError:
        return None


async def test_requests_of_any_kind_cost_the_host_no_lease(tmp_path: Path) -> None:
    """A thousand at once, without a pause, slow ones, ones without an end and ones whose answer is not read: the host
    renews all its leases meanwhile, processes what comes, and answers its probe."""
    reports: list[HostReport] = []
    taken, events, seen = asyncio.Event(), asyncio.Event(), set[str]()

    def report(each: HostReport) -> None:
        reports.append(each)
        if sum(isinstance(each, LeaseTaken) for each in reports) == PARTITIONS:
            taken.set()

    async def process(context: PartitionContext, batch: Sequence[ReceivedEvent]) -> None:
        seen.update(event.body_as_str() for event in batch)
        if len(seen) == PARTITIONS:
            events.set()

    leases = SqliteLeaseStore(tmp_path / "leases.db", lease_duration=6)
    async with AsyncExitStack() as stack:
        emulator = await stack.enter_async_context(Emulator({HUB: PARTITIONS}))
        host = EventProcessorHost(
            emulator.connection_string, HUB, processor=process, lease_store=leases, hooks=[report], max_wait_time=1
        )
        await stack.enter_async_context(host)
        server = await stack.enter_async_context(HealthServer(host, port=0))
        running = asyncio.create_task(host.run())
        await taken.wait()

        slow = []
        for begin in (
            b"",
            b"GET /metr",
            b"GET /metrics HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
        ) * 40:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(begin)
            slow.append(writer)
        for _ in range(20):  # asks again and again, and reads nothing
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.transport.pause_reading()  # type: ignore[attr-defined] # it reads, too
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 50)
            slow.append(writer)

        statuses: list[int | None] = []
        ends_at = asyncio.get_running_loop().time() + 2 * leases.lease_duration

        async def endless() -> None:
            async with aiohttp.ClientSession() as client:
                while asyncio.get_running_loop().time() < ends_at:
                    try:
                        async with client.get(f"{server.url}/metrics") as response:
                            statuses.append(response.status)
                    except aiohttp.ClientError:  # its connection was the oldest one
                        continue

        asking = [asyncio.create_task(endless()) for _ in range(10)]
        at_once = await asyncio.gather(*(_get(server.url, "/readyz") for _ in range(1000)))
        async with BufferedProducer(emulator.connection_string, HUB) as producer:
            for number in range(PARTITIONS):
                await producer.send(EventData(str(number)), partition_id=str(number))
        await asyncio.gather(*asking)
        await events.wait()
        assert at_once.count(200) > 500  # beyond its bound, a new connection closes the oldest
        assert set(at_once) <= {200, None}
        assert set(statuses) == {200}
        assert [each for each in reports if isinstance(each, LeaseLost)] == []
        assert {each.epoch for each in host.partitions} == {1}
        assert len(host.partitions) == PARTITIONS
        assert [each for each in reports if isinstance(each, LoopBlocked) and each.duration > 2] == []
        assert await _get(server.url, "/readyz") == 200
        for writer in slow:
            writer.close()
        await host.aclose()
        await running


async def test_application_is_watched_with_all_its_hosts_and_producers() -> None:
    """Ready once each host is; the metrics of both hubs, and of what is published; the lag is the sum."""
    async with Emulator({"telemetry": 2, "alerts": 2}) as emulator:
        app = EventHubsApp(emulator.connection_string, lease_store=MemoryLeaseStore, track_last_enqueued=True)
        handled = asyncio.Event()

        @app.subscriber("telemetry")
        @app.publisher("alerts")
        async def forward(event: ReceivedEvent) -> bytes:
            return event.body

        @app.subscriber("alerts")
        async def take(event: ReceivedEvent) -> None:
            handled.set()

        async with HealthServer(app, port=0) as server:
            assert await _get(server.url, "/readyz") == 503
            assert await _get(server.url, "/lag.json") == 503
            async with app:
                async with BufferedProducer(emulator.connection_string, "telemetry") as producer:
                    await producer.send(EventData("one"))
                await handled.wait()
                while await _get(server.url, "/readyz") != 200:
                    pass
                async with aiohttp.ClientSession() as client:
                    async with client.get(f"{server.url}/metrics") as response:
                        text = await response.text()
                    async with client.get(f"{server.url}/lag.json") as response:
                        assert (await response.json())["lag"] == 0
    ready = re.findall(r'^eventpump_ready\{.*destination_name="(\w+)".*\} 1$', text, re.M)
    assert sorted(ready) == ["alerts", "telemetry"]
    assert re.search(r'^messaging_client_sent_messages_total\{.*destination_name="alerts"\} 1$', text, re.M)
    assert len(re.findall(r"^# TYPE eventpump_ready gauge$", text, re.M)) == 1
