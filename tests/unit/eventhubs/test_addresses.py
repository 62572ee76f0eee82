from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.eventhubs.addresses import (
    Address,
    AddressKind,
    Audience,
    audience,
    consumer_address,
    parse_address,
    parse_audience,
    producer_address,
)

PREFIXES = ["amqps://ns.servicebus.windows.net/", "amqp://localhost:5672/", "/", ""]
names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,10}", fullmatch=True)

KNOWN = [
    ("telemetry", Address(AddressKind.GATEWAY, "telemetry")),
    ("telemetry/Partitions/3", Address(AddressKind.PARTITION, "telemetry", partition_id="3")),
    ("telemetry/Publishers/phone", Address(AddressKind.PUBLISHER, "telemetry", publisher="phone")),
    (
        "telemetry/ConsumerGroups/$Default/Partitions/0",
        Address(AddressKind.CONSUMER, "telemetry", consumer_group="$Default", partition_id="0"),
    ),
    ("a/b/Partitions/3", Address(AddressKind.PARTITION, "a/b", partition_id="3")),
    ("$cbs", Address(AddressKind.CBS)),
    ("$management", Address(AddressKind.MANAGEMENT)),
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("text", "expected"), KNOWN)
def test_address_is_parsed_in_three_forms(prefix: str, text: str, expected: Address) -> None:
    """A URL, a path and a bare address mean the same."""
    assert parse_address(prefix + text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    ["hub/consumergroups/g/partitions/1", "HUB/CONSUMERGROUPS/g/PARTITIONS/1".replace("HUB", "hub")],
)
def test_address_is_parsed_in_any_case(text: str) -> None:
    """The fixed words of an address are known in any case."""
    assert parse_address(text) == Address(AddressKind.CONSUMER, "hub", consumer_group="g", partition_id="1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "amqps://host",
        "amqps://host/",
        "hub//Partitions/1",
        "Partitions/1",
        "ConsumerGroups/g/Partitions",
        "hub/ConsumerGroups/g",
        "hub/Partitions",
        "hub/$management",
        "$other",
    ],
)
def test_address_of_another_form_raises_value_error(text: str) -> None:
    """What is no address is a `ValueError`."""
    with pytest.raises(ValueError, match="address"):
        parse_address(text)


@given(names, names, names)
def test_address_that_is_made_is_parsed(hub: str, group: str, partition: str) -> None:
    """What we make we read back."""
    consumer = parse_address(consumer_address(hub, group, partition))
    assert (consumer.kind, consumer.hub, consumer.consumer_group, consumer.partition_id) == (
        AddressKind.CONSUMER,
        hub,
        group,
        partition,
    )
    assert parse_address(producer_address(hub)).kind is AddressKind.GATEWAY
    assert parse_address(producer_address(hub, partition)).partition_id == partition


@given(st.text(max_size=60))
def test_address_and_audience_of_any_text_raise_only_value_error(text: str) -> None:
    """Any text is an address, an audience, or a `ValueError`, and nothing else."""
    for parse in (parse_address, parse_audience):
        try:
            parse(text)
        except ValueError:
            continue


NS = "ns.servicebus.windows.net"


def test_audience_is_written_as_the_official_client_does() -> None:
    """Audiences are written as the official Python client writes them."""
    assert audience(NS, "hub") == f"sb://{NS}/hub"
    assert audience(NS, "hub", consumer_group="$Default") == f"sb://{NS}/hub/consumergroups/$Default"
    assert audience(NS, "hub", partition_id="1") == f"sb://{NS}/hub/Partitions/1"
    assert audience("::1", "hub") == "sb://[::1]/hub"
    assert parse_audience(audience("::1", "hub")) == Audience("::1", "hub")


@pytest.mark.parametrize("scheme", ["sb://", "amqps://", "amqp://", "https://", ""])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", Audience(NS)),
        ("/", Audience(NS)),
        ("/hub", Audience(NS, "hub")),
        ("/hub/", Audience(NS, "hub")),
        ("/hub/consumergroups/g", Audience(NS, "hub", consumer_group="g")),
        ("/hub/ConsumerGroups/g/Partitions/2", Audience(NS, "hub", consumer_group="g", partition_id="2")),
        ("/hub/Partitions/2", Audience(NS, "hub", partition_id="2")),
        ("/hub/$management", Audience(NS, "hub", is_management=True)),
        ("/$management", Audience(NS, is_management=True)),
    ],
)
def test_audience_is_parsed_in_every_clients_form(scheme: str, path: str, expected: Audience) -> None:
    """Every form a client puts a token for is read, whatever its scheme, port and case of host."""
    assert parse_audience(f"{scheme}{NS.upper()}{path}") == expected
    assert parse_audience(f"{scheme}{NS}:5671{path}") == expected


@pytest.mark.parametrize("text", ["", "sb://", "sb:///hub", f"sb://{NS}/a//b", f"sb://{NS}/$cbs", "hub", "localhost"])
def test_audience_of_another_form_raises_value_error(text: str) -> None:
    """What is no audience is a `ValueError`."""
    with pytest.raises(ValueError, match=r"audience|address"):
        parse_audience(text)


CONSUMER = parse_address("hub/ConsumerGroups/g/Partitions/0")
PRODUCER = parse_address("hub/Partitions/0")
GATEWAY = parse_address("hub")
MANAGEMENT = parse_address("$management")


@pytest.mark.parametrize(
    ("text", "covered"),
    [
        ("", {CONSUMER, PRODUCER, GATEWAY, MANAGEMENT}),
        ("/HUB", {CONSUMER, PRODUCER, GATEWAY, MANAGEMENT}),
        ("/other", {MANAGEMENT}),
        ("/hub/consumergroups/G", {CONSUMER, MANAGEMENT}),
        ("/hub/ConsumerGroups/g/Partitions/1", {MANAGEMENT}),
        ("/hub/Partitions/0", {CONSUMER, PRODUCER, MANAGEMENT}),
        ("/hub/$management", {MANAGEMENT}),
        ("/$management", {MANAGEMENT}),
    ],
)
def test_covers_links_within_the_audience(text: str, covered: set[Address]) -> None:
    """A token opens the links within its audience, and the management node."""
    made = parse_audience(f"sb://{NS}{text}")
    assert {each for each in (CONSUMER, PRODUCER, GATEWAY, MANAGEMENT) if made.covers(each)} == covered


@pytest.mark.parametrize(
    ("resource", "put_for", "expected"),
    [
        ("/hub", "/hub/ConsumerGroups/g/Partitions/0", True),
        ("/hub", "/$management", True),
        ("/hub", "/hub/$management", True),
        ("/hub", "/other", False),
        ("/hub", "", False),
        ("/hub/$management", "/hub/$management", True),
        ("/hub/$management", "/hub", False),
        ("/hub/Partitions/1", "/hub", False),
        ("", "/hub", True),
        ("/other", "/hub/$management", False),
    ],
)
def test_includes_audiences_within_the_resource(resource: str, put_for: str, *, expected: bool) -> None:
    """A signature counts for audiences within its resource only."""
    assert parse_audience(f"sb://{NS}{resource}").includes(parse_audience(f"amqps://{NS}{put_for}")) is expected
