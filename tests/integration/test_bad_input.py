"""What a user gets wrong is said in one clear `EventPumpError`, or one line of the command, with no secret in it."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from eventpump import (
    AuthenticationError,
    BlobLeaseStore,
    CheckpointPolicy,
    ConfigurationError,
    Emulator,
    EntityNotFoundError,
    EventData,
    EventPosition,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    EventPumpError,
    MemoryLeaseStore,
    PartitionContext,
    PartitionReader,
    ReceivedEvent,
    RetryOptions,
    SqliteLeaseStore,
)
from eventpump.cli.main import main
from eventpump.errors import ConnectionLostError, RequestRefusedError
from eventpump.reports import HostReport, PartitionFailed
from tests.support.connecting import connection_string_to

KEY = "VerySecretKeyOfTheUser+/0123456789abcdefghij="
WRONG_KEY = "AnotherSecretKeyOfTheUser+/0123456789abcdef="
STRING = connection_string_to("example.servicebus.windows.net", key=KEY)
LIMIT = 10.0
"""Seconds after which something that was got wrong counts as a hang."""


@pytest.fixture
async def service() -> Any:
    """A service with a key of its own, one hub and one group."""
    async with Emulator({"telemetry": 2}, key=KEY) as emulator:
        yield emulator


class Nothing(EventProcessor):
    """Processes events by doing nothing."""

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        pass


async def run_host(connection_string: str, hub: str | None, **options: Any) -> None:
    options.setdefault("lease_store", MemoryLeaseStore())
    options.setdefault("processor", Nothing())
    options.setdefault("startup_timeout", 1.0)
    async with EventProcessorHost(connection_string, hub, **options) as host:
        await host.run()


async def read(connection_string: str, hub: str | None, **options: Any) -> None:
    options.setdefault("partition_id", "0")
    options.setdefault("startup_timeout", 1.0)
    async with PartitionReader(connection_string, hub, **options) as reader:
        await reader.read()


async def send(connection_string: str, hub: str | None, *, partition_id: str | None = None, **options: Any) -> None:
    options.setdefault("retry", RetryOptions(max_retries=0))
    async with EventProducer(connection_string, hub, **options) as producer:
        await producer.send(EventData(b"x"), partition_id=partition_id)


CLIENTS = [run_host, read, send]
Client = Callable[..., Awaitable[None]]


async def refused(
    caplog: pytest.LogCaptureFixture, kind: type[EventPumpError], says: str, work: Callable[[], Awaitable[None]]
) -> None:
    """Check that something is refused in time, clearly, and without a secret anywhere."""
    with pytest.raises(kind) as raised:
        async with asyncio.timeout(LIMIT):
            await work()
    error = raised.value
    assert says in str(error)
    assert "\n" not in str(error)
    everything = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error)) + caplog.text
    for secret in (KEY, WRONG_KEY):
        for text in (secret, secret[:20], secret[-20:]):
            assert text not in everything


# ----------------------------------------------------------------------------------------------- connection strings


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Endpoint"),
        ("nonsense", "key=value"),
        (KEY, "Endpoint"),
        (f"Endpoint=sb://example.servicebus.windows.net/;{KEY.rstrip('=')}", "key=value"),
        (f"SharedAccessKeyName=name;SharedAccessKey={KEY}", "Endpoint"),
        (f"Endpoint=;SharedAccessKeyName=name;SharedAccessKey={KEY}", "Endpoint"),
        (f"Endpoint=sb://{KEY}/;SharedAccessKeyName=name;SharedAccessKey={KEY}", "Endpoint"),
        (
            f"Endpoint=sb://example.windows.net:70000/;SharedAccessKeyName=n;SharedAccessKey={KEY}",
            "Endpoint",
        ),
        (f"Endpoint=sb://example.servicebus.windows.net/;SharedAccessKey={KEY}", "SharedAccessKeyName"),
        ("Endpoint=sb://example.servicebus.windows.net/;SharedAccessKeyName=name", "SharedAccessKey"),
        ("Endpoint=sb://example.servicebus.windows.net/", "SharedAccessKey"),
        (f"{STRING};SharedAccessKey={WRONG_KEY}", "SharedAccessKey"),
        (f"{STRING};SharedAccessSignature=SharedAccessSignature sr={KEY}", "SharedAccess"),
        ("Endpoint=sb://example.servicebus.windows.net/;SharedAccessSignature=" + KEY, "SharedAccessSignature"),
        (f"{STRING};UseDevelopmentEmulator=perhaps", "UseDevelopmentEmulator"),
        (f"{STRING};EntityPath=other", "hub"),
        (f"{STRING}\ud800", "connection_string"),
    ],
)
async def test_connection_string_that_is_wrong_is_refused_before_connecting(
    client: Client, text: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with it is said before anything is connected, and no value of it is shown."""
    await refused(caplog, ConfigurationError, says, lambda: client(text, "telemetry"))


@pytest.mark.parametrize("client", CLIENTS)
async def test_connection_string_without_a_hub_is_refused(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """A connection string without `EntityPath` needs a hub beside it."""
    await refused(caplog, ConfigurationError, "hub", lambda: client(STRING, None))


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("hub", ["", "a b", "a;b", "$x", "/", KEY + "?", "x" * 300])
async def test_hub_name_that_is_invalid_is_refused_and_not_shown(
    client: Client, hub: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hub's name is checked, and not shown: people paste secrets into the wrong field."""
    await refused(caplog, ConfigurationError, "hub", lambda: client(STRING, hub))


# ---------------------------------------------------------------------------------------------------------- service


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("is_named", [True, False])
async def test_key_that_is_wrong_raises_authentication_error(
    service: Emulator, client: Client, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that the service refuses, or a rule it does not know, ends the work instead of being tried forever."""
    string = service.connection_string_for("RootManageSharedAccessKey" if is_named else "nobody", WRONG_KEY)
    await refused(caplog, AuthenticationError, "", lambda: client(string, "telemetry"))


@pytest.mark.parametrize("client", CLIENTS)
async def test_signature_that_has_expired_is_refused_and_not_shown(
    service: Emulator, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A ready-made signature whose time is over is refused, and not shown."""
    signature = f"SharedAccessSignature sr=x&sig={KEY.replace('=', '%3d').replace('+', '%2b')}&se=1&skn=name"
    endpoint = service.connection_string.split(";")[0]
    string = f"{endpoint};SharedAccessSignature={signature};UseDevelopmentEmulator=true"
    await refused(caplog, EventPumpError, "expired", lambda: client(string, "telemetry"))


@pytest.mark.parametrize("client", CLIENTS)
async def test_hub_that_does_not_exist_is_named(
    service: Emulator, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the hub."""
    await refused(caplog, EntityNotFoundError, "nowhere", lambda: client(service.connection_string, "nowhere"))


@pytest.mark.parametrize("client", [run_host, read])
async def test_consumer_group_that_does_not_exist_is_named(
    service: Emulator, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the consumer group."""
    await refused(
        caplog,
        EntityNotFoundError,
        "strangers",
        lambda: client(service.connection_string, "telemetry", consumer_group="strangers"),
    )


@pytest.mark.parametrize("client", [read, send])
@pytest.mark.parametrize("partition_id", ["2", "-1", "first"])
async def test_partition_that_does_not_exist_is_named(
    service: Emulator, client: Client, partition_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the partition."""
    await refused(
        caplog,
        EventPumpError,
        partition_id,
        lambda: client(service.connection_string, "telemetry", partition_id=partition_id),
    )


@pytest.mark.parametrize("position", ["4711", "no offset"])
async def test_position_that_does_not_exist_ends_a_reader(
    service: Emulator, position: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An offset the partition does not have is refused by the service, and that ends a reader."""
    where = EventPosition.at_offset(position)
    await refused(caplog, RequestRefusedError, "", lambda: read(service.connection_string, "telemetry", position=where))


@pytest.mark.parametrize("position", ["4711", "no offset"])
async def test_initial_position_that_does_not_exist_is_reported_by_a_host(service: Emulator, position: str) -> None:
    """A host reports each partition that does not have it, with the option's name, and goes on."""
    failed: asyncio.Queue[PartitionFailed] = asyncio.Queue()

    def hook(report: HostReport) -> None:
        if isinstance(report, PartitionFailed):
            failed.put_nowait(report)

    options: dict[str, Any] = {"initial_position": EventPosition.at_offset(position), "hooks": [hook]}
    running = asyncio.create_task(run_host(service.connection_string, "telemetry", **options))
    try:
        async with asyncio.timeout(LIMIT):
            reports = [await failed.get() for _ in range(2)]
        assert {report.partition_id for report in reports} == {"0", "1"}
        assert all("initial_position" in str(report.error) and position in str(report.error) for report in reports)
        assert not running.done()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("client", CLIENTS)
async def test_service_that_does_not_listen_is_named_within_the_retries(
    unused_tcp_port: int, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """No listener: an error with the address, within the retries or the start-up time."""
    string = connection_string_to("127.0.0.1", unused_tcp_port, key=KEY, is_plain=True)
    await refused(caplog, ConnectionLostError, f"127.0.0.1:{unused_tcp_port}", lambda: client(string, "telemetry"))


@pytest.mark.parametrize("client", CLIENTS)
async def test_service_that_speaks_another_protocol_is_refused(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """A web server at the other end is refused as clearly as a missing listener."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        string = connection_string_to("127.0.0.1", port, key=KEY, is_plain=True)
        await refused(caplog, ConnectionLostError, "", lambda: client(string, "telemetry"))


# ---------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"idle_timeout": 0}, "idle_timeout"),
        ({"idle_timeout": float("nan")}, "idle_timeout"),
        ({"operation_timeout": "soon"}, "operation_timeout"),
        ({"auth_timeout": -1}, "auth_timeout"),
        ({"transport": "pigeon"}, "transport"),
        ({"retry": 3}, "retry"),
        ({"custom_endpoint_address": "http://x y"}, "custom_endpoint_address"),
        ({"custom_endpoint_address": f"amqps://name:{KEY}@host"}, "custom_endpoint_address"),
        ({"custom_endpoint_address": "amqp://host"}, "custom_endpoint_address"),
        ({"ca_file": "/no/such/file"}, "ca_file"),
        ({"credential": KEY}, "credential"),
        ({"fully_qualified_namespace": "example.servicebus.windows.net"}, "fully_qualified_namespace"),
        ({"no_such_option": KEY}, "no_such_option"),
    ],
)
async def test_connection_option_that_is_wrong_is_named(
    client: Client, options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the option, also one that does not exist."""
    await refused(caplog, ConfigurationError, says, lambda: client(STRING, "telemetry", **options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"consumer_group": ""}, "consumer_group"),
        ({"prefetch_events": 0}, "prefetch_events"),
        ({"prefetch_bytes": "many"}, "prefetch_bytes"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_wait_time": 0}, "max_wait_time"),
        ({"delivery_interval": -1}, "delivery_interval"),
        ({"delivery_interval": 15.1}, "delivery_interval"),  # a quarter of `idle_timeout` is 15 s
        ({"delivery_interval": "soon"}, "delivery_interval"),
        ({"initial_position": None}, "initial_position"),
        ({"initial_position": True}, "initial_position"),
        ({"initial_position": ""}, "initial_position"),
        ({"initial_position": "x' or '1"}, "initial_position"),
        ({"initial_position": datetime(2024, 1, 1)}, "initial_position"),
        ({"initial_position": {0: "-1"}}, "initial_position"),
        ({"checkpoint_policy": "always"}, "checkpoint_policy"),
        ({"failure_policy": "hope"}, "failure_policy"),
        ({"failure_policy": "park"}, "failure_policy"),
        ({"on_retries_exhausted": "retry"}, "on_retries_exhausted"),
        ({"owner_id": ""}, "owner_id"),
        ({"handler_retry": {"base_delay": 5, "max_delay": 1}}, "handler_retry"),
        ({"renew_interval": 31.0}, "renew_interval"),
        ({"processor": dict}, "processor"),
        ({"processor": EventProcessor}, "processor"),
        ({"processor": lambda: "no processor", "initial_position": "-1"}, "processor"),
        ({"lease_store": None}, "lease_store"),
        ({"lease_store": MemoryLeaseStore}, "lease_store"),
    ],
)
async def test_host_option_that_is_wrong_is_named(
    service: Emulator, options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the option."""
    await refused(caplog, ConfigurationError, says, lambda: run_host(service.connection_string, "telemetry", **options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition_id": ""}, "partition_id"),
        ({"partition_id": 0}, "partition_id"),
        ({"position": None}, "position"),
        ({"position": ""}, "position"),
        ({"end": "4711"}, "end"),
        ({"end": datetime(2024, 1, 1)}, "end"),
        ({"owner_level": -1}, "owner_level"),
        ({"owner_level": "high"}, "owner_level"),
    ],
)
async def test_reader_option_that_is_wrong_is_named(
    options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the option."""
    await refused(caplog, ConfigurationError, says, lambda: read(STRING, "telemetry", **options))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CheckpointPolicy(every_events=0), "every_events"),
        (lambda: CheckpointPolicy(every_seconds=-1), "every_seconds"),
        (lambda: RetryOptions(max_retries=-1), "max_retries"),
        (lambda: SqliteLeaseStore("x.db", lease_duration=0), "lease_duration"),
        (lambda: BlobLeaseStore("container", connection_string="nonsense"), "connection_string"),
        (lambda: BlobLeaseStore("container"), ""),
        (lambda: BlobLeaseStore("container", connection_string="x", lease_duration=5), "lease_duration"),
        (lambda: Emulator({"telemetry": 0}), "hub"),
        (lambda: Emulator({"tele metry": 1}), "hub"),
        (lambda: Emulator({}), "hub"),
        (lambda: Emulator({"telemetry": 1}, port=70_000), "port"),
        (lambda: Emulator({"telemetry": 1}, key=f"{KEY};"), "key"),
    ],
)
async def test_parts_with_a_wrong_option_are_refused(
    make: Callable[[], object], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What a host or a service is made of says no by itself."""

    async def work() -> None:
        make()

    await refused(caplog, ConfigurationError, says, work)


async def test_lease_file_that_cannot_be_used_raises_at_once(
    service: Emulator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that there cannot be, or that is no database, is said at once: no waiting mends it."""
    (tmp_path / "text.db").write_text("this is no database, however long it is" * 100)
    for path in (tmp_path / "missing" / "leases.db", tmp_path / "text.db"):
        leases = SqliteLeaseStore(path)
        await refused(
            caplog,
            ConfigurationError,
            "path",
            lambda leases=leases: run_host(service.connection_string, "telemetry", lease_store=leases),  # type: ignore[misc]  # the default is the type
        )


# ------------------------------------------------------------------------------------------------------ the command

_CONFIGS = {
    "no object": "[]",
    "no user config": "{}",
    "two namespaces": {"UserConfig": {"NamespaceConfig": [{}, {}]}},
    "no hub": {"UserConfig": {"NamespaceConfig": [{"Type": "EventHub", "Name": "n", "Entities": []}]}},
    "another kind": {"UserConfig": {"NamespaceConfig": [{"Type": "ServiceBus", "Name": "n", "Entities": []}]}},
    "no partitions": {
        "UserConfig": {
            "NamespaceConfig": [
                {"Type": "EventHub", "Name": "n", "Entities": [{"Name": "telemetry", "PartitionCount": 0}]}
            ]
        }
    },
    "a bad name": {
        "UserConfig": {
            "NamespaceConfig": [
                {"Type": "EventHub", "Name": "n", "Entities": [{"Name": "tele metry", "PartitionCount": 1}]}
            ]
        }
    },
}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fly"], "fly"),
        (["--fly"], "COMMAND"),
        (["emulator", "--fly"], "--fly"),
        (["emulator", "--hub"], "--hub"),
        (["emulator", "--hub", "telemetry"], "--hub"),
        (["emulator", "--hub", "telemetry:0"], "hub"),
        (["emulator", "--hub", "telemetry:1", "--port", "many"], "--port"),
        (["emulator", "--hub", "telemetry:1", "--key", f"{KEY};"], "key"),
        (["emulator", "--config", "/no/such/file", "--key", KEY], "/no/such/file"),
        *((["emulator", "--key", KEY, "--config", name], "config") for name in _CONFIGS),
        (["demo", "--events", "many"], "--events"),
        (["demo", "--events", "-5"], "--events"),
        (["demo", "--partitions", "0"], "--partitions"),
        (["demo", "--fly"], "--fly"),
        (["demo", "--plain", "--transport", "uamqp", "--transport-type", "websocket"], "--transport"),
    ],
    ids=lambda value: " ".join(value).replace(KEY, "KEY") if isinstance(value, list) else "",
)
def test_command_with_wrong_arguments_exits_with_2(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line on stderr that names what is wrong, nothing on stdout, and exit code 2; no service is waited for."""
    for name, config in _CONFIGS.items():
        (tmp_path / name).write_text(config if isinstance(config, str) else json.dumps(config))
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(arguments)
    except SystemExit as ended:  # argparse's
        code = ended.code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith("eventpump")
    assert says in lines[0]
    assert KEY not in lines[0]
