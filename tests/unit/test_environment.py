"""`from_env`, and that nothing else reads the variables of the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from eventpump import (
    BufferedProducer,
    ConfigurationError,
    EventHubsApp,
    EventProcessorHost,
    EventProducer,
    MemoryLeaseStore,
    PartitionReader,
)

KEY = "c2VjcmV0LWtleS1vZi10aGUtdGVzdC1zdWl0ZQ=="
CONNECTION = f"Endpoint=sb://example.servicebus.windows.net/;SharedAccessKeyName=listen;SharedAccessKey={KEY}"
STORAGE = f"DefaultEndpointsProtocol=https;AccountName=example;AccountKey={KEY};EndpointSuffix=core.windows.net"
HUB = {"EVENTPUMP_CONNECTION_STRING": CONNECTION, "EVENTPUMP_HUB": "telemetry"}
LEASES = {"EVENTPUMP_CONTAINER": "leases", "EVENTPUMP_STORAGE_CONNECTION_STRING": STORAGE}
SOURCE = Path(__file__).parents[2] / "eventpump"


class Credential:
    """As those of azure-identity."""

    async def get_token(self, *scopes: str, **options: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("EVENTPUMP_", "orders_")) and name != "EVENTPUMP_PURE":
            monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, *groups: Mapping[str, str]) -> None:
    for group in groups:
        for name, value in group.items():
            monkeypatch.setenv(name, value)


async def process(context: object, events: object) -> None:
    pass


async def test_host_of_the_environment_has_what_its_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub, group, name, connection and lease store; what is not set has its default."""
    set_all(monkeypatch, HUB, LEASES)
    host = EventProcessorHost.from_env(processor=process)
    assert (host.hub, host.fully_qualified_namespace) == ("telemetry", "example.servicebus.windows.net")
    assert host.describe().consumer_group == "$Default"
    assert host.describe().lease_store == "BlobLeaseStore('leases', prefix='')"
    set_all(monkeypatch, {"EVENTPUMP_CONSUMER_GROUP": "second", "EVENTPUMP_HOST_NAME": "web-0"})
    host = EventProcessorHost.from_env(processor=process)
    assert (host.owner_id, host.describe().consumer_group) == ("web-0", "second")


async def test_what_is_given_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are not read, not even if they are missing."""
    set_all(monkeypatch, HUB, {"EVENTPUMP_CONSUMER_GROUP": "second", "EVENTPUMP_HOST_NAME": "web-0"})
    store = MemoryLeaseStore()
    host = EventProcessorHost.from_env(processor=process, lease_store=store, consumer_group="third", owner_id="own")
    assert host.describe().lease_store == repr(store)
    assert (host.owner_id, host.describe().consumer_group) == ("own", "third")


async def test_another_prefix_and_the_name_of_aspire_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable counts as not set."""
    set_all(monkeypatch, {"orders_CONNECTIONSTRING": f"{CONNECTION};EntityPath=orders", "orders_HUB": ""})
    async with EventProducer.from_env(prefix="orders") as producer:
        assert producer.hub == "orders"
    for wrong in ("", 3):
        with pytest.raises(ConfigurationError, match=r"^prefix: "):
            EventProducer.from_env(prefix=wrong)  # type: ignore[arg-type]


async def test_namespace_is_used_with_a_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the hub, and for a storage account that is given by its URL."""
    set_all(
        monkeypatch,
        {
            "EVENTPUMP_NAMESPACE": "example.servicebus.windows.net",
            "EVENTPUMP_HUB": "telemetry",
            "EVENTPUMP_CONTAINER": "leases",
            "EVENTPUMP_STORAGE_URL": "https://example.blob.core.windows.net",
        },
    )
    host = EventProcessorHost.from_env(processor=process, credential=Credential())
    assert host.fully_qualified_namespace == "example.servicebus.windows.net"
    async with EventProducer.from_env(credential=Credential()) as producer:
        assert producer.fully_qualified_namespace == "example.servicebus.windows.net"
    with pytest.raises(ConfigurationError, match=r"^EVENTPUMP_NAMESPACE: .*credential"):
        EventProducer.from_env()


WRONG: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "EVENTPUMP_CONNECTION_STRING: is not set, and neither is EVENTPUMP_NAMESPACE"),
    "no key": ({**HUB, "EVENTPUMP_CONNECTION_STRING": "Endpoint=sb://a.example/"}, "EVENTPUMP_CONNECTION_STRING: "),
    "no string": ({**HUB, "EVENTPUMP_CONNECTION_STRING": KEY}, "EVENTPUMP_CONNECTION_STRING: "),
    "endpoint": (
        {**HUB, "EVENTPUMP_CONNECTION_STRING": CONNECTION.replace("sb://", "")},
        "EVENTPUMP_CONNECTION_STRING: Endpoint: ",
    ),
    "no hub": ({"EVENTPUMP_CONNECTION_STRING": CONNECTION}, "EVENTPUMP_HUB: "),
    "hub": ({**HUB, "EVENTPUMP_HUB": "a b"}, "EVENTPUMP_HUB: "),
    "other hub": ({**HUB, "EVENTPUMP_CONNECTION_STRING": f"{CONNECTION};EntityPath=other"}, "EVENTPUMP_HUB: "),
    "both": (
        {**HUB, "EVENTPUMP_NAMESPACE": "a.example"},
        "EVENTPUMP_NAMESPACE: is set along with ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("client", [EventProducer, BufferedProducer, EventProcessorHost])
async def test_errors_name_the_variable_and_hold_no_secret(
    client: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the connection, whatever is wrong with it."""
    variables, begin = WRONG[name]
    set_all(monkeypatch, LEASES, variables)
    with pytest.raises(ConfigurationError) as raised:
        client.from_env()
    assert str(raised.value).startswith(begin)
    assert KEY not in str(raised.value) + repr(raised.value)
    assert raised.value.__cause__ is None


OF_HOSTS: dict[str, tuple[dict[str, str], str]] = {
    "no container": ({}, "EVENTPUMP_CONTAINER: is not set"),
    "no account": ({"EVENTPUMP_CONTAINER": "leases"}, "EVENTPUMP_STORAGE_CONNECTION_STRING: is not set, and neither"),
    "two": ({**LEASES, "EVENTPUMP_STORAGE_URL": "https://a.example"}, "EVENTPUMP_STORAGE_URL: is set along with "),
    "account": ({**LEASES, "EVENTPUMP_STORAGE_CONNECTION_STRING": KEY}, "EVENTPUMP_STORAGE_CONNECTION_STRING: "),
    "no credential": (
        {"EVENTPUMP_CONTAINER": "leases", "EVENTPUMP_STORAGE_URL": "https://a.example"},
        "EVENTPUMP_STORAGE_URL: names a storage account, for which `credential`",
    ),
    "group": ({**LEASES, "EVENTPUMP_CONSUMER_GROUP": "x" * 3000}, "EVENTPUMP_CONSUMER_GROUP: "),
    "name": ({**LEASES, "EVENTPUMP_HOST_NAME": "x" * 2000}, "EVENTPUMP_HOST_NAME: "),
}


@pytest.mark.parametrize("name", OF_HOSTS)
async def test_errors_of_a_host_name_the_variable_and_hold_no_secret(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its lease store, its group and its name."""
    variables, begin = OF_HOSTS[name]
    set_all(monkeypatch, HUB, variables)
    with pytest.raises(ConfigurationError) as raised:
        EventProcessorHost.from_env(processor=process)
    assert str(raised.value).startswith(begin)
    assert KEY not in str(raised.value) + repr(raised.value)


async def test_error_about_what_was_given_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a variable that was not read."""
    set_all(monkeypatch, HUB, LEASES, {"EVENTPUMP_CONSUMER_GROUP": "second"})
    with pytest.raises(ConfigurationError, match=r"^consumer_group: "):
        EventProcessorHost.from_env(processor=process, consumer_group="x" * 3000)
    with pytest.raises(ConfigurationError, match=r"^max_batch_size: "):
        EventProcessorHost.from_env(processor=process, max_batch_size=0)


class _Unread(dict[str, str]):
    """An environment that must not be read."""

    def __getitem__(self, name: str) -> str:
        raise AssertionError(f"{name} was read")

    def get(self, name: str, default: Any = None) -> Any:
        raise AssertionError(f"{name} was read")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the environment was read")


async def test_constructors_do_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """They behave as they are called, whatever is set."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", _Unread())
        with_hub = f"{CONNECTION};EntityPath=telemetry"
        EventProcessorHost(with_hub, processor=process, lease_store=MemoryLeaseStore())
        PartitionReader(with_hub, partition_id="0")
        EventHubsApp(CONNECTION, lease_store=MemoryLeaseStore())
        EventProducer(with_hub)
        BufferedProducer(with_hub)
        arguments: dict[Any, dict[str, Any]] = {
            EventProducer: {},
            BufferedProducer: {},
            PartitionReader: {"partition_id": "0"},
        }
        for client, given in arguments.items():
            with pytest.raises(ConfigurationError, match="connection_string"):
                client(**given)


def test_variables_are_read_in_one_module() -> None:
    """But for those of the build, of Spark's Java and of the command's own processes."""
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"environ\b|getenv", path.read_text(encoding="utf-8"))
    }
    packages = {name.partition("/")[0] for name in found}
    assert packages <= {"cli", "demo", "spark", "options", "compiled.py"}
    assert {name for name in found if name.startswith("options/")} == {"options/environment.py"}
