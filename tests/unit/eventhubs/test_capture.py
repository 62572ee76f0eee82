"""The files of Capture: names, records, and what a reader of the service's form sees in them."""

from __future__ import annotations

import io
import sys
import uuid
from datetime import UTC, datetime
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventpump.amqp.codec import EncodeError
from eventpump.amqp.message import Data, Message
from eventpump.amqp.sections import NULL_DATA, encode_data
from eventpump.amqp.types import Symbol, Timestamp, ULong
from eventpump.emulator.stamping import stamp
from eventpump.errors import CaptureFileError, ConfigurationError
from eventpump.eventhubs.capture import SCHEMA, NamePattern, message_of, parse_time, read_blocks, record_of, write_file
from eventpump.eventhubs.events import ReceivedEvent

_TIME = datetime(2024, 3, 5, 14, 7, 9, 123000, tzinfo=UTC)


def _event(number: int = 5, **contents: Any) -> bytes:
    return ReceivedEvent.build(
        **{"body": b"body", **contents}, offset=f"{number * 100}", sequence_number=number, enqueued_time=_TIME
    ).raw


def test_fields_and_types_are_those_of_the_service() -> None:
    """A reader that knows nothing of us finds the record `EventData` with the service's fields and types."""
    file = io.BytesIO()
    write_file(file, [_event(properties={"n": 5, "text": "t", "f": 1.5, "b": b"x"}, partition_key="key")])
    file.seek(0)
    reader = fastavro.reader(file)
    schema: Any = reader.writer_schema
    assert schema["name"] == "Microsoft.ServiceBus.Messaging.EventData"
    kinds = {field["name"]: field["type"] for field in schema["fields"]}
    assert list(kinds) == ["SequenceNumber", "Offset", "EnqueuedTimeUtc", "SystemProperties", "Properties", "Body"]
    assert (kinds["SequenceNumber"], kinds["Offset"], kinds["EnqueuedTimeUtc"]) == ("long", "string", "string")
    assert kinds["SystemProperties"]["values"] == ["long", "double", "string", "bytes"]
    assert kinds["Properties"]["values"] == ["long", "double", "string", "bytes", "null"]
    assert kinds["Body"] == ["null", "bytes"]
    (record,) = reader
    assert record == {
        "SequenceNumber": 5,
        "Offset": "500",
        "EnqueuedTimeUtc": "3/5/2024 2:07:09 PM",
        "SystemProperties": {
            "x-opt-enqueued-time": int(Timestamp.from_datetime(_TIME)),
            "x-opt-partition-key": "key",
        },
        "Properties": {"n": 5, "text": "t", "f": 1.5, "b": b"x"},
        "Body": b"body",
    }


_VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.none(),
)


@settings(max_examples=40, deadline=None)
@given(
    body=st.binary(max_size=50),
    properties=st.dictionaries(st.text(max_size=10), _VALUES, max_size=5),
    key=st.none() | st.text(max_size=20),
    message_id=st.none() | st.text(max_size=10) | st.binary(max_size=10),
    number=st.integers(0, 2**63 - 1),
)
def test_event_survives_its_file(
    body: bytes, properties: dict[str, Any], key: str | None, message_id: Any, number: int
) -> None:
    """Everything that the form has is the same after it was written and read, to the millisecond."""
    raw = _event(
        number,
        body=body,
        properties=properties,
        partition_key=key,
        message_id=message_id,
        content_type="text/plain",
        creation_time=_TIME,
    )
    file = io.BytesIO()
    write_file(file, [raw])
    file.seek(0)
    [[(read_number, read)]] = list(read_blocks(file, "x"))
    before, after = ReceivedEvent(raw), ReceivedEvent(read)
    assert read_number == number == after.sequence_number
    assert (after.offset, after.enqueued_time, after.body) == (before.offset, _TIME, body)
    assert (after.properties, after.partition_key) == (properties, key)
    assert after.system_properties == before.system_properties


def test_body_that_is_null_is_captured_as_an_empty_one() -> None:
    """Null in place of data is an empty body in a file, and in the event that is made of it."""
    raw = _event(body=b"data").removesuffix(encode_data(b"data")) + NULL_DATA
    assert record_of(raw)["Body"] == b""
    assert ReceivedEvent(message_of(record_of(raw))).body == b""


def test_what_the_form_lacks_becomes_text() -> None:
    """UUIDs and large numbers as text, times as milliseconds; a body that is not data as JSON or text."""
    name = uuid.UUID(int=5)
    properties = {"id": name, "time": Timestamp.from_datetime(_TIME), "yes": True, "symbol": Symbol("s")}
    record = record_of(_event(body=None, value={"a": [1, 2]}, properties=properties))
    assert record["Body"] == b'{"a": [1, 2]}'
    expected = {"id": str(name), "time": int(Timestamp.from_datetime(_TIME)), "yes": "True", "symbol": "s"}
    assert record["Properties"] == expected
    assert record_of(_event(body=None, sequence=[1, "two"]))["Body"] == b'[1, "two"]'
    assert record_of(_event(body=None, value="text"))["Body"] == b"text"
    message = Message.decode(_event())
    message.body = None
    empty = record_of(message.encode())
    assert empty["Body"] is None
    assert ReceivedEvent(message_of(empty)).body_type == "none"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("10/31/2018 12:12:13 AM", datetime(2018, 10, 31, 0, 12, 13, tzinfo=UTC)),
        ("1/2/2020 12:04:05 PM", datetime(2020, 1, 2, 12, 4, 5, tzinfo=UTC)),
        ("1/2/2020 3:04:05 pm", datetime(2020, 1, 2, 15, 4, 5, tzinfo=UTC)),
        ("01/02/2020 15:04:05", datetime(2020, 1, 2, 15, 4, 5, tzinfo=UTC)),
        ("1/2/2020 3:04:05.25 PM", datetime(2020, 1, 2, 15, 4, 5, 250000, tzinfo=UTC)),
        ("2020-01-02T15:04:05.1234567Z", datetime(2020, 1, 2, 15, 4, 5, 123456, tzinfo=UTC)),
        ("2020-01-02T15:04:05", datetime(2020, 1, 2, 15, 4, 5, tzinfo=UTC)),
        ("2020-01-02 17:04:05+02:00", datetime(2020, 1, 2, 15, 4, 5, tzinfo=UTC)),
    ],
)
def test_times_of_all_kinds_of_files_are_read(text: str, moment: datetime) -> None:
    """Old files have the local format of the United States, new ones ISO 8601."""
    assert parse_time(text) == moment
    record = {**record_of(_event()), "EnqueuedTimeUtc": text, "SystemProperties": {}}
    milliseconds = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    assert ReceivedEvent(message_of(record)).enqueued_time == milliseconds


def test_names_follow_the_pattern() -> None:
    """The parts may be in any order; other names, and times that there are not, do not match."""
    name = NamePattern().name("ns", "telemetry", "12", _TIME)
    assert name == "ns/telemetry/12/2024/03/05/14/07/09.avro"
    found = NamePattern().match(name)
    assert found is not None
    assert (found.namespace, found.hub, found.partition_id) == ("ns", "telemetry", "12")
    assert found.began == _TIME.replace(microsecond=0)
    other = NamePattern("{EventHub}-{PartitionId}/{Year}_{Month}_{Day}/{Hour}{Minute}{Second} {Namespace}")
    again = other.match(other.name("ns", "a-b", "3", _TIME))
    assert again is not None
    assert (again.hub, again.partition_id, again.namespace) == ("a-b", "3", "ns")
    for foreign in ("ns/telemetry/12/2024/13/05/14/07/09.avro", name + ".part", "x/" + name[:-5], "notes.txt"):
        assert NamePattern().match(foreign) is None
    assert sorted(map(NamePattern().match, [name.replace("07", "10"), name]))[0] == found  # type: ignore[type-var]  # both match


@pytest.mark.parametrize("pattern", ["", "{Namespace}/{EventHub}", "{Year}" * 2, "{Namespace}/{Nonsense}"])
def test_patterns_that_lack_a_part_are_refused(pattern: str) -> None:
    """All nine are required, as by the service."""
    with pytest.raises(ConfigurationError, match="must have each of"):
        NamePattern(pattern)


def test_files_that_are_not_of_capture() -> None:
    """Avro of another form, a record without what it needs, and damage anywhere: an error with the file's name."""
    other = io.BytesIO()
    schema = {"type": "record", "name": "Other", "fields": [{"name": "Body", "type": "bytes"}]}
    fastavro.writer(other, schema, [{"Body": b""}])
    other.seek(0)
    with pytest.raises(CaptureFileError, match=r"other\.avro: its records have no EnqueuedTimeUtc, Offset"):
        list(read_blocks(other, "other.avro"))
    whole = io.BytesIO()
    write_file(whole, [_event(number, body=b"x" * 900) for number in range(100)])
    content = whole.getvalue()
    for cut in (0, 3, 700, len(content) // 2, len(content) - 1):
        with pytest.raises(CaptureFileError, match=r"c\.avro: it is truncated or not an Avro file"):
            list(read_blocks(io.BytesIO(content[:cut]), "c.avro"))
    marker = content[-16:]
    for place in (content.index(marker) + 16, content.index(marker, 2000), len(content) - 9):
        damaged = content[:place] + b"\xff" * 9 + content[place + 9 :]
        with pytest.raises(CaptureFileError):
            list(read_blocks(io.BytesIO(damaged), "c.avro"))


def test_records_of_other_writers() -> None:
    """Large numbers become text, a user id of text is bytes; values that no event can have are refused."""
    record = record_of(_event(properties={"large": ULong(2**63)}, user_id=b"me"))
    assert record["Properties"] == {"large": str(2**63)}
    assert record["SystemProperties"]["user-id"] == b"me"
    named = {**record, "SystemProperties": {"user-id": "me", "iothub-connection-device-id": "d7"}}
    event = ReceivedEvent(message_of(named))
    assert event.system_properties["user-id"] == b"me"
    assert event.system_properties["iothub-connection-device-id"] == "d7"
    assert record_of(_event(body=None, value=b"data"))["Body"] == b"data"
    assert record_of(_event(body=None, value=[uuid.UUID(int=1)]))["Body"] is not None
    with pytest.raises(EncodeError):
        message_of({**record, "Properties": {"x": object()}})


def test_record_of_an_event_with_more_sections() -> None:
    """The epoch of the number, delivery annotations and footer are no part of a file's record (protocol.md 6.2)."""
    own = Message(body=Data((b"x",)), delivery_annotations={Symbol("d"): 1}, footer={Symbol("f"): 1}).encode()
    (stored,) = stamp([own], 5, 500, 1, None).payloads
    assert b"x-opt-sequence-number-epoch" in stored
    record = record_of(stored)
    assert record["SystemProperties"].keys() == {"x-opt-enqueued-time"}
    assert record == {**record, "SequenceNumber": 5, "Offset": "500", "Properties": {}, "Body": b"x"}


def test_without_fastavro_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'eventpump\[capture\]'"):
        list(read_blocks(io.BytesIO(), "x"))


def test_file_without_events_has_none() -> None:
    """The service writes such files for windows without events."""
    file = io.BytesIO()
    write_file(file, [])
    file.seek(0)
    assert list(read_blocks(file, "x")) == []


@pytest.mark.parametrize(
    ("numbers", "damaged", "kept", "words"),
    [
        ([0, 1, 2, 3], 2, [0, 1], "after event 1"),
        ([0, 1, 1, 2], None, [0, 1], "event 1 follows event 1"),
        ([0, 1], 0, [], "not an Avro file"),
    ],
)
def test_events_before_a_fault_in_a_block_are_returned(
    numbers: list[int], damaged: int | None, kept: list[int], words: str
) -> None:
    """They are returned before the error, which names the last of them."""
    records = [record_of(_event(number)) for number in numbers]
    if damaged is not None:
        records[damaged] |= {"EnqueuedTimeUtc": "no time", "SystemProperties": {}}
    file, found = io.BytesIO(), list[int]()
    fastavro.writer(file, dict(SCHEMA), records)
    file.seek(0)
    blocks = read_blocks(file, "name")

    def read() -> None:
        for block in blocks:
            found.extend(number for number, _ in block)

    with pytest.raises(CaptureFileError, match=words):
        read()
    assert found == kept
