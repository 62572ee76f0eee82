from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.message import AmqpValue, Data, Message, Properties
from eventpump.amqp.types import Array, Int, Timestamp
from eventpump.errors import EntityNotFoundError, ProtocolError, RequestRefusedError
from eventpump.eventhubs import management
from eventpump.eventhubs.conditions import ARGUMENT_OUT_OF_RANGE, NOT_FOUND
from eventpump.eventhubs.management import NEVER, ManagementRequest
from eventpump.eventhubs.properties import HubProperties, PartitionProperties
from eventpump.eventhubs.requests import BadRequestError, correlation_id

HUB = HubProperties("telemetry", datetime(2024, 5, 6, tzinfo=UTC), ("0", "1", "2"))
PARTITION = PartitionProperties(
    "telemetry", "1", 5, 2**40, "123456", datetime(2024, 5, 6, 7, tzinfo=UTC), is_empty=False
)
EMPTY = PartitionProperties("telemetry", "1", 0, -1, "-1", NEVER, is_empty=True)
ID = uuid.UUID(int=9)


def through(message: Message) -> Message:
    return Message.decode(message.encode())


def test_hub_request_is_what_the_service_reads() -> None:
    """A hub read is what the service reads, without a body section."""
    made = through(management.hub_request("telemetry", message_id=ID, reply_to="r", security_token="SECRET"))
    assert made.body == Data((b"[]",))  # a message has a body, and a fake service reads it
    assert made.properties == Properties(message_id=ID, to="$management", reply_to="r")
    assert made.application_properties == {
        "operation": "READ",
        "type": "com.microsoft:eventhub",
        "name": "telemetry",
        "security_token": "SECRET",
    }
    assert management.parse_request(made) == ManagementRequest("telemetry", None, "SECRET")


def test_partition_request_names_its_partition() -> None:
    """A partition read names its partition."""
    made = through(management.partition_request("telemetry", "1", message_id=ID))
    assert made.application_properties == {
        "operation": "READ",
        "type": "com.microsoft:partition",
        "name": "telemetry",
        "partition": "1",
    }
    assert management.parse_request(made) == ManagementRequest("telemetry", "1", None)


def test_repr_of_a_request_shows_no_token() -> None:
    """Neither a request nor what is read of it shows the token in its repr."""
    made = management.partition_request("telemetry", "1", message_id=ID, security_token="SECRET")
    assert "SECRET" not in repr(made)
    assert "SECRET" not in repr(management.parse_request(through(made)))


def test_request_with_a_body_is_read() -> None:
    """A body means nothing."""
    made = management.hub_request("telemetry", message_id="m")
    made.body = Data((b"[]",))
    assert management.parse_request(through(made)).hub == "telemetry"


@pytest.mark.parametrize(
    ("fields", "condition"),
    [
        (None, "com.microsoft:argument-error"),
        ({}, "com.microsoft:argument-error"),
        ({"operation": "READ", "name": "h"}, "com.microsoft:argument-error"),
        ({"operation": "READ", "type": "com.microsoft:eventhub"}, "com.microsoft:argument-error"),
        ({"operation": "READ", "type": "com.microsoft:eventhub", "name": ""}, "com.microsoft:argument-error"),
        ({"operation": "READ", "type": "com.microsoft:partition", "name": "h"}, "com.microsoft:argument-error"),
        ({"operation": "READ", "type": "com.microsoft:queue", "name": "h"}, "amqp:not-allowed"),
        ({"operation": "DELETE", "type": "com.microsoft:eventhub", "name": "h"}, "amqp:not-allowed"),
        ({"operation": "READ", "type": 5, "name": "h"}, "com.microsoft:argument-error"),
    ],
)
def test_request_of_another_form_is_refused_with_a_status(fields: dict[str, Any] | None, condition: str) -> None:
    """What is no read is refused with a status and a condition."""
    with pytest.raises(BadRequestError) as caught:
        management.parse_request(Message(application_properties=fields))
    assert (caught.value.code, caught.value.condition) == (400, condition)


def hub_answer() -> Message:
    return management.hub_response(management.hub_request("telemetry", message_id=ID, reply_to="r"), HUB)


def partition_answer(facts: PartitionProperties) -> Message:
    return management.partition_response(management.partition_request("telemetry", "1", message_id=ID), facts)


def body_of(message: Message) -> dict[Any, Any]:
    assert isinstance(message.body, AmqpValue)
    assert isinstance(message.body.value, dict)
    return message.body.value


def test_hub_response_is_read_as_it_was_written() -> None:
    """The client reads the properties of a hub as the service writes them."""
    made = through(hub_answer())
    assert management.parse_hub_response(made, hub="telemetry") == HUB
    assert correlation_id(made) == ID
    assert made.properties is not None
    assert made.properties.to == "r"
    assert made.application_properties == {"operation": "READ", "status-code": 200}


def test_hub_response_has_the_types_of_dotnet() -> None:
    """The values have the types that .NET casts to."""
    body = body_of(through(hub_answer()))
    assert {key: type(value) for key, value in body.items()} == {
        "name": str,
        "type": str,
        "created_at": Timestamp,
        "partition_count": Int,
        "partition_ids": Array,
        "georeplication_factor": Int,
    }
    assert body["type"] == "com.microsoft:eventhub"
    assert body["partition_count"] == 3
    assert [type(each) for each in body["partition_ids"]] == [str, str, str]


@pytest.mark.parametrize("facts", [PARTITION, EMPTY])
def test_partition_response_is_read_as_it_was_written(facts: PartitionProperties) -> None:
    """The client reads the properties of a partition as the service writes them, year 1 included."""
    made = through(partition_answer(facts))
    assert management.parse_partition_response(made, hub="telemetry", partition_id="1") == facts


def test_partition_response_has_the_types_of_dotnet() -> None:
    """The values have the types that .NET unboxes, and an empty partition's time is the service's."""
    body = body_of(through(partition_answer(EMPTY)))
    assert {key: type(value) for key, value in body.items()} == {
        "name": str,
        "type": str,
        "partition": str,
        "begin_sequence_number_epoch": Int,
        "begin_sequence_number": int,
        "last_enqueued_sequence_number_epoch": Int,
        "last_enqueued_sequence_number": int,
        "last_enqueued_offset": str,
        "last_enqueued_time_utc": Timestamp,
        "is_partition_empty": bool,
    }
    assert body["last_enqueued_time_utc"] == -62_135_596_800_000


@given(st.integers(-1, 2**63 - 1), st.integers(-1, 2**63 - 1), st.text(st.characters(exclude_categories=["Cs"])))
def test_partition_response_takes_any_number_and_offset(first: int, last: int, offset: str) -> None:
    """Any number and any offset text goes through."""
    facts = PartitionProperties("h", "0", first, last, offset, NEVER, is_empty=False)
    made = through(partition_answer(facts))
    assert management.parse_partition_response(made, hub="h", partition_id="0") == facts


def test_hub_response_of_older_services_is_read() -> None:
    """Partition ids may come as a list, and the geo-replication factor not at all."""
    made = hub_answer()
    body = body_of(made)
    body["partition_ids"] = ["0", "1", "2"]
    del body["georeplication_factor"]
    assert management.parse_hub_response(through(made), hub="telemetry") == HUB


def test_response_of_an_error_raises_its_conditions_error() -> None:
    """A failed read becomes the error its condition stands for, and names what was asked for."""
    request = management.partition_request("telemetry", "9", message_id=ID)
    made = through(management.error_response(request, 400, ARGUMENT_OUT_OF_RANGE, "no partition 9"))
    with pytest.raises(RequestRefusedError, match="no partition 9") as caught:
        management.parse_partition_response(made, hub="telemetry", partition_id="9")
    assert caught.value.entity == "telemetry/Partitions/9"
    made = through(management.error_response(request, 404, NOT_FOUND, "gone"))
    with pytest.raises(EntityNotFoundError):
        management.parse_hub_response(made, hub="telemetry")
    assert correlation_id(made) == ID


@pytest.mark.parametrize("key", ["name", "created_at", "partition_ids"])
@pytest.mark.parametrize("value", [None, 5, b"x", [5]])
def test_hub_response_that_is_malformed_raises(key: str, value: Any) -> None:
    """An answer that lacks a fact, or has it in another type, breaks the protocol."""
    made = hub_answer()
    body_of(made)[key] = value
    with pytest.raises(ProtocolError, match="management answer"):
        management.parse_hub_response(made, hub="telemetry")


@pytest.mark.parametrize(
    "key",
    [
        "name",
        "partition",
        "begin_sequence_number",
        "last_enqueued_sequence_number",
        "last_enqueued_offset",
        "last_enqueued_time_utc",
        "is_partition_empty",
    ],
)
@pytest.mark.parametrize("value", [None, b"x", []])
def test_partition_response_that_is_malformed_raises(key: str, value: Any) -> None:
    """The same of a partition."""
    made = partition_answer(PARTITION)
    body_of(made)[key] = value
    with pytest.raises(ProtocolError, match="management answer"):
        management.parse_partition_response(made, hub="telemetry", partition_id="1")


def test_partition_response_with_a_boolean_number_raises() -> None:
    """A boolean is no sequence number."""
    made = partition_answer(PARTITION)
    body_of(made)["begin_sequence_number"] = True
    with pytest.raises(ProtocolError):
        management.parse_partition_response(made, hub="telemetry", partition_id="1")


def test_response_without_a_map_raises() -> None:
    """An answer without a map breaks the protocol."""
    made = hub_answer()
    made.body = AmqpValue("x")
    with pytest.raises(ProtocolError, match="no map"):
        management.parse_hub_response(made, hub="telemetry")
