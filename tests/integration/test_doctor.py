"""`eventpump doctor` names the cause of each planted fault, made by real parts, in its first line."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import signal
import socket
import ssl
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from azure.storage.blob.aio import ContainerClient
from yarl import URL

from eventpump import (
    BlobLeaseStore,
    BlobOwnershipStore,
    Emulator,
    EventData,
    EventProcessorHost,
    EventProducer,
    PartitionReader,
    SqliteLeaseStore,
)
from eventpump.doctor.examination import Examination, StorePlace
from eventpump.doctor.findings import Diagnosis, ProblemFoundError, StepOutcome
from eventpump.doctor.store import find_leases
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME, AccessRule, Right
from eventpump.emulator.faults import LinkRole, Performative, Reject
from eventpump.errors import ClosedError
from eventpump.eventhubs import sas
from eventpump.interfaces import ConsumerScope
from eventpump.options.connection import ConnectionSettings, connection_settings
from eventpump.storage.blob_rights import PROBE
from tests.authority import Authority
from tests.integration.test_cli_send_tail import run, started
from tests.support.azurite import Azurite
from tests.support.reading import read_bodies

HUB = "telemetry"


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    """A storage account."""
    with Azurite() as started:
        yield started


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    """A hub that holds three events, and two policies with one right each."""
    rules = [AccessRule("listens", "KEY_OF_LISTENS", Right.LISTEN), AccessRule("sends", "KEY_OF_SENDS", Right.SEND)]
    async with Emulator({HUB: 2}, rules=rules) as started:
        async with EventProducer(started.connection_string, HUB) as producer:
            await producer.send([EventData(b"x") for _ in range(3)], partition_id="0")
        yield started


@pytest.fixture
async def container(azurite: Azurite) -> AsyncIterator[str]:
    """The name of an empty container."""
    name = f"doctor-{uuid.uuid4().hex[:12]}"
    async with ContainerClient.from_connection_string(azurite.connection_string, name) as client:
        await client.create_container()
        yield name
        await client.delete_container()


async def examine(
    connection: str,
    hub: str | None = HUB,
    *,
    group: str = "$Default",
    sends: bool = False,
    place: StorePlace | None = None,
    timeout: float = 3.0,
    **options: Any,
) -> Diagnosis:
    """Examine with short limits."""

    def settings() -> ConnectionSettings:
        return connection_settings(connection, hub, operation_timeout=3.0, auth_timeout=3.0, **options)

    return await Examination(settings, group, place, timeout=timeout, seconds=0.0, sends=sends).run()


def policy(emulator: Emulator, name: str, key: str) -> str:
    """Return a connection string with another policy."""
    text = emulator.connection_string.replace(DEFAULT_KEY_NAME, name)
    return re.sub("SharedAccessKey=[^;]*", f"SharedAccessKey={key}", text)


def signed(emulator: Emulator, expires_at: float) -> str:
    """Return a connection string with a signature."""
    token = sas.generate(f"amqps://127.0.0.1/{HUB}", DEFAULT_KEY_NAME, DEFAULT_KEY, int(expires_at))
    return f"Endpoint=sb://127.0.0.1:{emulator.port};SharedAccessSignature={token};UseDevelopmentEmulator=true"


def cause(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the step and the text of the first failure, which has an advice and is the first line."""
    found = diagnosis.cause
    assert found is not None, diagnosis
    assert found.advice
    assert diagnosis.lines(100)[0] == f"{found.step}: {found.found}"
    return found.step, found.found


@pytest.mark.parametrize("form", ["v5", "eph"])
async def test_a_sound_set_up_has_no_failure(emulator: Emulator, azurite: Azurite, container: str, form: str) -> None:
    """Each step is ok, with a container; an event is sent only if asked to; nothing is left in the container."""
    place = StorePlace(container, azurite.connection_string, form=form)
    diagnosis = await examine(emulator.connection_string, place=place)
    assert {each.outcome for each in diagnosis.findings} == {StepOutcome.OK}, diagnosis.lines(120)
    assert diagnosis.title == f"everything works: {len(diagnosis.findings)} steps"
    assert "3 read from 2 partitions" in "\n".join(diagnosis.lines(120))
    async with ContainerClient.from_connection_string(azurite.connection_string, container) as client:
        assert [each.name async for each in client.list_blobs()] == []
    assert (await examine(emulator.connection_string, sends=True)).cause is None
    bodies = [body for number in "01" for body in await read_bodies(emulator.connection_string, HUB, number)]
    assert sorted(bodies) == [b"sent by eventpump doctor", b"x", b"x", b"x"]


# ------------------------------------------------------------------------------------ the connection string, the token


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Endpoint=sb://example.servicebus.windows.net/", "SharedAccessKey: the connection string holds neither"),
        ("example.servicebus.windows.net", "connection_string: its part 1 is not of the form key=value"),
        ("Endpoint=example;SharedAccessKeyName=n;SharedAccessKey=k", "Endpoint: must be of the form sb://"),
    ],
)
async def test_a_malformed_connection_string(text: str, found: str) -> None:
    """The part is named, and nothing that needs it is tried."""
    diagnosis = await examine(text)
    step, what = cause(diagnosis)
    assert (step, what.startswith(found)) == ("connection string", True)
    assert {each.outcome for each in diagnosis.findings[2:]} == {StepOutcome.NOT_TRIED}


async def test_no_hub_is_named() -> None:
    """Neither by the option nor by the connection string."""
    text = "Endpoint=sb://127.0.0.1;SharedAccessKeyName=n;SharedAccessKey=k"
    assert cause(await examine(text, None))[1].startswith("hub: is required")


async def test_a_signature_that_expires_soon_is_a_warning(emulator: Emulator) -> None:
    """Everything else is tried, and the exit code is that of a sound set-up."""
    diagnosis = await examine(signed(emulator, time.time() + 600))
    assert diagnosis.cause is None
    assert diagnosis.title.startswith("nothing fails, but: a signature that expires at")


async def test_a_signature_that_has_expired(emulator: Emulator) -> None:
    """It is found before the service is asked."""
    step, found = cause(await examine(signed(emulator, time.time() - 7200)))
    assert step == "connection string"
    assert re.fullmatch(r"the SharedAccessSignature expired at .* UTC, 2 h ago", found)


async def test_a_wrong_key(emulator: Emulator) -> None:
    """The token is refused."""
    diagnosis = await examine(policy(emulator, DEFAULT_KEY_NAME, "ANOTHER_KEY"))
    step, found = cause(diagnosis)
    assert (step, "signature" in found.lower()) == ("token", True)
    assert "ANOTHER_KEY" not in "\n".join(diagnosis.lines(200))


async def test_a_policy_that_does_not_exist(emulator: Emulator) -> None:
    """The token is refused."""
    assert cause(await examine(policy(emulator, "nobody", DEFAULT_KEY)))[0] == "token"


async def test_a_clock_that_is_behind() -> None:
    """The service takes a token that was signed just now for expired."""
    async with Emulator({HUB: 1}, now=lambda: time.time() + 7200) as emulator:
        diagnosis = await examine(emulator.connection_string)
    assert cause(diagnosis)[0] == "token"
    assert diagnosis.cause is not None
    assert "clock" in diagnosis.cause.advice


async def test_a_policy_without_the_right_to_read(emulator: Emulator) -> None:
    """The right is named."""
    diagnosis = await examine(policy(emulator, "sends", "KEY_OF_SENDS"))
    assert diagnosis.cause is not None
    assert "Listen" in diagnosis.cause.advice


async def test_a_policy_without_the_right_to_send(emulator: Emulator) -> None:
    """The right is named, and only where an event was to be sent."""
    text = policy(emulator, "listens", "KEY_OF_LISTENS")
    assert (await examine(text)).cause is None
    diagnosis = await examine(text, sends=True)
    assert cause(diagnosis)[0] == "send"
    assert diagnosis.cause is not None
    assert "Send" in diagnosis.cause.advice


# --------------------------------------------------------------------------------------------------------- the network


async def test_a_name_that_does_not_exist() -> None:
    """It is the namespace's."""
    text = "Endpoint=sb://nothing.invalid;SharedAccessKeyName=n;SharedAccessKey=k"
    step, found = cause(await examine(text))
    assert (step, found.startswith("the name nothing.invalid cannot be looked up")) == ("name", True)


async def test_a_name_service_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for longer than for other steps."""
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(30) and [])
    text = "Endpoint=sb://example.servicebus.windows.net;SharedAccessKeyName=n;SharedAccessKey=k"
    try:
        step, found = cause(await examine(text, timeout=0.1))
    finally:
        ended.set()
    assert (step, found.endswith("DNS does not answer within 0.1 s")) == ("name", True)


async def test_a_closed_port(emulator: Emulator, unused_tcp_port: int) -> None:
    """The port is named, and whether the one of WebSockets answers."""
    text = emulator.connection_string.replace(str(emulator.port), str(unused_tcp_port))
    diagnosis = await examine(text)
    assert cause(diagnosis) == ("TCP", f"cannot connect to 127.0.0.1 on port {unused_tcp_port}: Connection refused")
    assert diagnosis.cause is not None
    assert "--transport-type websocket" in diagnosis.cause.advice


@contextlib.asynccontextmanager
async def server(answer: bytes | None, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that answers what is sent with some bytes, and closes; or never answers. Its port."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            if answer is None:
                await ended.wait()
            else:
                await reader.read(100)
                writer.write(answer)
                await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        ended.set()
        listening.close()


def tls_string(port: int) -> str:
    """Return a connection string for TLS."""
    return f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=n;SharedAccessKey=k"


async def test_a_port_that_takes_connections_and_says_nothing() -> None:
    """TLS gets no answer."""
    async with server(None) as port:
        step, found = cause(await examine(tls_string(port)))
    assert (step, "does not answer in the TLS handshake" in found) == ("TLS", True)


async def test_a_port_of_another_service() -> None:
    """It does not speak TLS."""
    async with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        assert cause(await examine(tls_string(port)))[0] == "TLS"


async def test_an_authority_that_is_not_trusted(tmp_path: Path) -> None:
    """The option for its file is named."""
    async with Emulator({HUB: 1}, tls="auto") as emulator:
        diagnosis = await examine(emulator.connection_string)
        assert (await examine(emulator.connection_string, ca_file=emulator.authority_file)).cause is None
    assert cause(diagnosis)[0] == "TLS"
    assert diagnosis.cause is not None
    assert "--ca-file" in diagnosis.cause.advice


async def test_a_certificate_of_another_host(tmp_path: Path) -> None:
    """The host is named."""
    authority = Authority.new(tmp_path)
    async with server(None, authority.server("other.example")) as port:
        diagnosis = await examine(tls_string(port), ca_file=authority.file)
    step, found = cause(diagnosis)
    assert (step, "127.0.0.1" in found) == ("TLS", True)


async def test_a_service_that_is_not_amqp(tmp_path: Path) -> None:
    """TLS is fine, and what follows is something else."""
    authority = Authority.new(tmp_path)
    async with server(b"HTTP/1.1 400 Bad Request\r\n\r\n", authority.server("127.0.0.1")) as port:
        assert cause(await examine(tls_string(port), ca_file=authority.file))[0] == "token"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "asks for a username and password"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "answered 403 Forbidden"),
        (b"", "closed the connection"),
    ],
)
async def test_a_proxy_that_opens_no_tunnel(emulator: Emulator, answer: bytes, found: str) -> None:
    """Its answer is shown."""
    async with server(answer) as port:
        step, what = cause(await examine(emulator.connection_string, proxy=f"http://127.0.0.1:{port}"))
    assert (step, found in what) == ("proxy", True)


async def test_a_proxy_that_is_not_there(emulator: Emulator, unused_tcp_port: int) -> None:
    """It is what this machine connects to."""
    step, found = cause(await examine(emulator.connection_string, proxy=f"http://127.0.0.1:{unused_tcp_port}"))
    assert (step, str(unused_tcp_port) in found) == ("TCP", True)


async def test_websockets_where_there_are_none(tmp_path: Path) -> None:
    """The server answers in HTTP, and has no such path."""
    authority = Authority.new(tmp_path)
    async with server(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", authority.server("127.0.0.1")) as port:
        diagnosis = await examine(tls_string(port), ca_file=authority.file, transport_type="websocket")
    step, found = cause(diagnosis)
    assert (step, "404" in found) == ("WebSocket, token", True)


# ----------------------------------------------------------------------------------------- hub, group, other readers


async def test_of_many_partitions_a_thousand_events_are_read() -> None:
    """So that the throughput of the hub stays its consumers'."""
    async with Emulator({HUB: 40}) as emulator:
        async with EventProducer(emulator.connection_string, HUB) as producer:
            for partition_id in await producer.get_partition_ids():
                await producer.send([EventData(b"x") for _ in range(30)], partition_id=partition_id)
        diagnosis = await examine(emulator.connection_string)
    assert diagnosis.findings[-1].found == "1,000 read from 40 partitions"


async def test_a_hub_that_does_not_exist(emulator: Emulator) -> None:
    """The token is accepted all the same."""
    assert cause(await examine(emulator.connection_string, "telemetri")) == (
        "hub",
        "the namespace has no hub telemetri",
    )


async def test_a_consumer_group_that_does_not_exist(emulator: Emulator) -> None:
    """Hub and group are named."""
    found = cause(await examine(emulator.connection_string, group="dashboard"))
    assert found == ("consumer group", "hub telemetry has no consumer group dashboard")


async def test_a_partition_that_is_throttled(emulator: Emulator) -> None:
    """The partition whose properties cannot be read is named."""
    emulator.faults.add(Reject(), on=Performative.TRANSFER, role=LinkRole.MANAGEMENT, after=1, count=None)
    step, found = cause(await examine(emulator.connection_string))
    assert (step, "throttled" in found) == ("partitions", True)


async def test_an_exclusive_reader_that_is_no_host_of_the_store(emulator: Emulator, tmp_path: Path) -> None:
    """The partition is named; of a host whose lease the store has, it is as it should be."""
    async with PartitionReader(
        emulator.connection_string, HUB, partition_id="0", owner_level=7, position="-1"
    ) as reader:
        await anext(aiter(reader))
        step, found = cause(await examine(emulator.connection_string))
        assert (step, found.startswith("partition 0: an exclusive reader")) == ("other readers", True)
    file = tmp_path / "leases.db"
    delivered: asyncio.Queue[str] = asyncio.Queue()

    async def process(context: Any, events: Any) -> None:
        await delivered.put(context.partition_id)

    leases = SqliteLeaseStore(file)
    async with EventProcessorHost(emulator.connection_string, HUB, processor=process, lease_store=leases) as host:
        running = asyncio.create_task(host.run())
        await delivered.get()
        diagnosis = await examine(emulator.connection_string, place=StorePlace(file=str(file)))
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert diagnosis.cause is None, diagnosis.lines(120)
    assert "read by hosts of the store" in "\n".join(diagnosis.lines(200))


async def test_five_readers_are_there_already(emulator: Emulator) -> None:
    """The limit of the service is named."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(5):
            reader = PartitionReader(emulator.connection_string, HUB, partition_id="0", position="-1")
            await anext(aiter(await stack.enter_async_context(reader)))
        diagnosis = await examine(emulator.connection_string)
    assert cause(diagnosis)[0] == "other readers"
    assert diagnosis.cause is not None
    assert "five readers" in diagnosis.cause.advice


# ------------------------------------------------------------------------------------------------------------ the store


async def test_a_container_that_does_not_exist(emulator: Emulator, azurite: Azurite) -> None:
    """It is named, and nothing else of the store is tried; the service is."""
    place = StorePlace("nothing-here", azurite.connection_string)
    diagnosis = await examine(emulator.connection_string, place=place)
    assert cause(diagnosis) == ("storage account", "there is no container nothing-here")
    assert [each.step for each in diagnosis.findings if each.outcome is StepOutcome.NOT_TRIED] == ["rights", "leases"]


async def test_a_storage_account_that_does_not_answer(
    emulator: Emulator, azurite: Azurite, unused_tcp_port: int
) -> None:
    """It is the account, not the hub."""
    text = re.sub(r":\d+/", f":{unused_tcp_port}/", azurite.connection_string)
    step, found = cause(await examine(emulator.connection_string, place=StorePlace("leases", text)))
    assert (step, found.startswith("the storage account does not answer")) == ("storage account", True)


async def test_a_wrong_key_of_the_storage_account(emulator: Emulator, azurite: Azurite, container: str) -> None:
    """The account refuses it."""
    text = azurite.connection_string.replace(azurite.account_key, "QUJD")
    step, found = cause(await examine(emulator.connection_string, place=StorePlace(container, text)))
    assert (step, "refuses" in found) == ("storage account", True)


@pytest.mark.parametrize(("granted", "missing"), [("rl", "write"), ("rlw", "delete")])
async def test_a_right_that_the_store_needs(
    emulator: Emulator, azurite: Azurite, container: str, granted: str, missing: str
) -> None:
    """The one that the signature does not give is named."""
    signature = generate_container_sas(
        "devstoreaccount1",
        container,
        account_key=azurite.account_key,
        permission=ContainerSasPermissions.from_string(granted),
        expiry=datetime.now(UTC) + timedelta(hours=1),
    )
    place = StorePlace(container, account_url=f"{azurite.blob_endpoint}?{signature}")
    step, found = cause(await examine(emulator.connection_string, place=place))
    assert (step, found.startswith(f"no right to {missing} blobs")) == ("rights", True)


async def test_a_container_of_another_hub(emulator: Emulator, azurite: Azurite, container: str) -> None:
    """Both hubs are named."""
    store = BlobLeaseStore(container, connection_string=azurite.connection_string)
    await store.open(ConsumerScope("127.0.0.1", "orders", "$Default"))
    await store.ensure(["0"])
    await store.aclose()
    place = StorePlace(container, azurite.connection_string, form="eph")
    step, found = cause(await examine(emulator.connection_string, place=place))
    assert (step, "orders" in found, HUB in found) == ("leases", True, True)


async def test_a_blob_that_a_killed_run_left_is_deleted(emulator: Emulator, azurite: Azurite, container: str) -> None:
    """Though its lease is still held."""
    place = StorePlace(container, azurite.connection_string)
    async with ContainerClient.from_connection_string(azurite.connection_string, container) as client:
        blob = client.get_blob_client(PROBE)
        await blob.upload_blob(b"")
        await blob.acquire_lease(60)
        assert (await examine(emulator.connection_string, place=place)).cause is None
        assert [each.name async for each in client.list_blobs()] == []


@contextlib.asynccontextmanager
async def storage_server(
    azurite: Azurite, *, ahead: timedelta = timedelta(0), answered: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[str]:
    """The account behind a server; its connection string.

    Args:
        azurite: The account.
        ahead: By how much the date of its answers differs.
        answered: Awaited when the account has answered a request, before the answer is passed on.
    """
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            url = azurite.blob_endpoint.rpartition("/")[0] + request.raw_path
            headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
            async with session.request(
                request.method,
                URL(url, encoded=True),
                headers=headers,
                data=await request.read() or None,
                skip_auto_headers=("Content-Type",),
            ) as answer:
                body = await answer.read()
                if answered is not None:
                    await answered()
                kept = {name: value for name, value in answer.headers.items() if name.startswith("x-ms")}
                kept["Date"] = format_datetime(datetime.now(UTC) + ahead, usegmt=True)
                return web.Response(status=answer.status, body=body, headers=kept, content_type=answer.content_type)

        application = web.Application()
        application.router.add_route("*", "/{tail:.*}", forward)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield re.sub(r":\d+/", f":{runner.addresses[0][1]}/", azurite.connection_string)
        finally:
            await runner.cleanup()


@pytest.mark.parametrize(
    ("ahead", "found"), [(610, "10 min behind"), (-610, "10 min ahead of"), (0, None)], ids=["behind", "ahead", "right"]
)
async def test_a_clock_that_differs_from_the_storage_account(
    emulator: Emulator, azurite: Azurite, container: str, ahead: int, found: str | None
) -> None:
    """It is the first cause, whatever else it breaks."""
    async with storage_server(azurite, ahead=timedelta(seconds=ahead)) as text:
        if found is not None:  # as an account that refuses the request because of its date
            text = text.replace(azurite.account_key, "QUJD")
        diagnosis = await examine(emulator.connection_string, place=StorePlace(container, text))
    if found is None:
        assert diagnosis.cause is None
    else:
        assert cause(diagnosis) == ("clock", f"this machine's clock is {found} the storage account's")


async def ended_at(
    request: int, number: signal.Signals, emulator: Emulator, azurite: Azurite, container: str
) -> tuple[int | None, bytes, bytes]:
    """Run the command, and end it by a signal when the account has answered a request, before the answer is there.

    Args:
        request: Which one; 1 for the first.
        number: The signal.
        emulator: The service.
        azurite: The account.
        container: The container.

    Returns:
        The exit code, the output and the error output.
    """
    running: asyncio.Future[asyncio.subprocess.Process] = asyncio.get_running_loop().create_future()
    requests = itertools.count(1)

    async def answered() -> None:
        if next(requests) == request:
            process = await running
            process.send_signal(number)
            await process.wait()

    arguments = ("doctor", "--hub", HUB, "--container", container, "--storage-connection-string")
    async with (
        storage_server(azurite, answered=answered) as text,
        started(*arguments, text, emulator=emulator) as process,
    ):
        running.set_result(process)
        out, err = await process.communicate()
    return process.returncode, out, err


REQUESTS = range(1, 7)
"""The container is there; the blob is written, leased, released and deleted; the first request of the leases."""


async def test_a_run_that_is_killed_leaves_at_most_its_blob(
    emulator: Emulator, azurite: Azurite, container: str
) -> None:
    """After each of its requests. The next run deletes it."""
    left = []
    place = StorePlace(container, azurite.connection_string)
    async with ContainerClient.from_connection_string(azurite.connection_string, container) as client:
        for request in REQUESTS:
            ended = await ended_at(request, signal.SIGKILL, emulator, azurite, container)
            assert ended == (-signal.SIGKILL, b"", b"")
            left += [each.name async for each in client.list_blobs()]
            assert (await examine(emulator.connection_string, place=place)).cause is None
            assert [each.name async for each in client.list_blobs()] == []
    assert left == [PROBE] * 3  # from the write to the delete


async def test_after_ctrl_c_nothing_is_left(emulator: Emulator, azurite: Azurite, container: str) -> None:
    """After each of its requests; nothing is printed, and the exit code is that of an interrupt."""
    async with ContainerClient.from_connection_string(azurite.connection_string, container) as client:
        for request in REQUESTS:
            assert await ended_at(request, signal.SIGINT, emulator, azurite, container) == (130, b"", b"")
            assert [each.name async for each in client.list_blobs()] == []


async def test_a_group_in_another_spelling(emulator: Emulator, azurite: Azurite, container: str) -> None:
    """The option that settles it is named."""
    made = BlobOwnershipStore(container, connection_string=azurite.connection_string, preserve_case=True)
    await made.open(ConsumerScope("127.0.0.1", HUB, "$Default"))
    await made.ensure(["0"])
    await made.aclose()
    place = StorePlace(container, azurite.connection_string)
    diagnosis = await examine(emulator.connection_string, place=place)
    step, found = cause(diagnosis)
    assert (step, "has nothing under" in found) == ("leases", True)
    assert diagnosis.cause is not None
    assert "--preserve-case" in diagnosis.cause.advice
    assert (await examine(emulator.connection_string, place=replace(place, preserve_case=True))).cause is None


async def test_a_store_that_cannot_be_opened_is_closed(azurite: Azurite, unused_tcp_port: int) -> None:
    """Its client too."""
    text = re.sub(r":\d+/", f":{unused_tcp_port}/", azurite.connection_string)
    leases, scope = BlobOwnershipStore("leases", connection_string=text), ConsumerScope("127.0.0.1", HUB, "$Default")
    with pytest.raises(ProblemFoundError):
        await find_leases(leases, scope)
    with pytest.raises(ClosedError):
        await leases.open(scope)


async def test_a_file_of_leases_of_another_group(emulator: Emulator, tmp_path: Path) -> None:
    """The first host of the group adds its leases, as it does where there is no file."""
    file = tmp_path / "leases.db"
    made = SqliteLeaseStore(file)
    await made.open(ConsumerScope("127.0.0.1", HUB, "dashboard"))
    await made.ensure(["0"])
    await made.aclose()
    diagnosis = await examine(emulator.connection_string, place=StorePlace(file=str(file)))
    assert diagnosis.cause is None
    assert "the consumer group has none yet: its first host creates them" in "\n".join(diagnosis.lines(200))


async def test_a_file_of_leases_in_no_directory(emulator: Emulator, tmp_path: Path) -> None:
    """The path is named."""
    place = StorePlace(file=str(tmp_path / "no" / "leases.db"))
    step, found = cause(await examine(emulator.connection_string, place=place))
    assert (step, found.endswith("does not exist")) == ("leases", True)


async def test_a_file_that_is_not_one_of_leases(emulator: Emulator, tmp_path: Path) -> None:
    """It is refused, and stays as it is."""
    file = tmp_path / "leases.db"
    file.write_text("something else, long enough to be no database at all\n" * 100)
    assert cause(await examine(emulator.connection_string, place=StorePlace(file=str(file))))[0] == "leases"
    assert file.read_text().startswith("something else")


# ---------------------------------------------------------------------------------------------------------- the command


async def test_command_prints_the_cause_first_and_exits_with_1(emulator: Emulator) -> None:
    """In text, and in JSON; a sound set-up exits with 0."""
    arguments = ("doctor", "--seconds", "0", "--hub")
    code, out, err = await run(*arguments, "telemetri", emulator=emulator)
    assert (code, err, out.decode().splitlines()[0]) == (1, "", "hub: the namespace has no hub telemetri")
    code, out, err = await run(*arguments, "telemetri", "--json", emulator=emulator)
    document = json.loads(out)
    assert (code, document["healthy"], document["cause"]) == (1, False, "hub: the namespace has no hub telemetri")
    code, out, err = await run(*arguments, HUB, emulator=emulator)
    assert (code, err, out.decode().partition(":")[0]) == (0, "", "everything works")
