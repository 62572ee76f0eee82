"""What our engine writes, read by the decoder of azure-eventhub, which indexes fields by position (protocol.md 13).

And the other way round: what its encoder writes, read by ours.
"""

from __future__ import annotations

import datetime
import uuid
from dataclasses import fields
from typing import Any

import pytest
from azure.eventhub._pyamqp import _encode, performatives
from azure.eventhub._pyamqp._decode import decode_frame, decode_payload
from azure.eventhub._pyamqp.message import Message as PyMessage
from azure.eventhub._pyamqp.message import Properties as PyProperties

from eventpump.amqp.connection import Connection, Role
from eventpump.amqp.message import AmqpValue, Data, Header, Message, Properties
from eventpump.amqp.performatives import (
    Accepted,
    AmqpError,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Modified,
    Open,
    Rejected,
    Released,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    Source,
    Target,
    Transfer,
    decode_performative,
)
from eventpump.amqp.types import Array, Symbol, Timestamp, UByte, UInt, ULong
from eventpump.eventhubs.events import EventData, ReceivedEvent
from tests.unit.amqp.pair import Pair, config

NOW = datetime.datetime(2024, 5, 6, 7, 8, 9, 123_000, tzinfo=datetime.UTC)
FRAMES: list[Any] = [
    Open("c", "h", 65_536, 4_999, 240_000, properties={Symbol("product"): "x"}),
    Open(""),
    Begin(0, 0, 5_000, 5_000, 255),
    Attach("n", 0, True, 1, 0, Source("a"), Target("b"), None, None, 0, 1 << 20, properties={Symbol("k"): 1}),
    Attach("refused", 3, False),
    Flow(0, 5_000, 0, 5_000, 0, 0, 300),
    Flow(None, 1, 2, 3),
    Transfer(0, 5, b"\0\0\0\5", 0x80013700, True),
    Disposition(True, 0, 9, True, Accepted()),
    Disposition(True, 0, 9, True, Rejected(AmqpError("amqp:not-found", "gone"))),
    Disposition(True, 0, 9, True, Released()),
    Disposition(True, 0, 9, True, Modified(True)),
    Detach(0, True, AmqpError("amqp:link:stolen", "higher", {Symbol("k"): "v"})),
    Detach(0, True),
    End(),
    End(AmqpError("amqp:internal-error")),
    Close(),
    Close(AmqpError("amqp:connection:forced", "bye")),
    SaslMechanisms([Symbol("MSSBCBS"), Symbol("PLAIN")]),
    SaslInit("ANONYMOUS", b"", "h"),
    SaslOutcome(0),
]


def seen(value: Any) -> Any:
    """Return what their decoder makes of a value of ours: bytes for symbols and text, plain lists for composites."""
    match value:
        case str():
            return value.encode()
        case int() | bytes() | None:
            return value
        case dict():
            return {seen(key): seen(item) for key, item in value.items()}
        case list():
            return [seen(item) for item in value]
        case Accepted() | Released():
            return []
        case _:
            return [seen(getattr(value, each.name)) for each in fields(value)]


@pytest.mark.parametrize("performative", FRAMES, ids=lambda each: type(each).__name__)
def test_pyamqp_decodes_our_frames(performative: Any) -> None:
    """Every field stands at the position where their decoder looks for it."""
    code, found = decode_frame(memoryview(performative.encode()))
    assert code == performative.CODE
    if isinstance(performative, Transfer):
        assert bytes(found.pop()) == b""
    expected = seen(performative)
    assert len(found) == len(fields(performative))
    if isinstance(performative, Disposition):
        state, wanted = found.pop(4), expected.pop(4)
        (theirs,) = state.values() if isinstance(state, dict) else (state,)
        assert [*theirs] == wanted or theirs == wanted
    assert found == expected


def test_pyamqp_decodes_our_transfers() -> None:
    """A transfer has exactly 11 fields before its payload, in runs and alone, whole and in several frames."""
    pair = Pair(config(max_frame_size=512), config(max_frame_size=512)).open()
    session, _ = pair.session()
    sender, receiver = pair.link(session, is_receiver=False)
    receiver.set_credit(9)
    pair.run()
    sender.send_run([b"run"] * 2)
    sender.send(b"x" * 1000, message_format=0x80013700)
    data = pair.client.data_to_send()
    found = []
    while data:
        size = int.from_bytes(data[:4], "big")
        code, values = decode_frame(memoryview(data[8:size]))
        assert (code, len(values)) == (20, 12)
        found.append((values[1], values[3], values[4], values[5], bytes(values[11])))
        data = data[size:]
    assert [each[:4] for each in found[:2]] == [(0, 0, True, False), (1, 0, True, False)]
    assert found[2][:3] == (2, 0x80013700, False)
    assert {each[:3] for each in found[3:]} == {(None, None, None)}  # not repeated, as the service does it
    assert [each[3] for each in found[2:]] == [True] * (len(found) - 3) + [False]
    assert b"".join(each[4] for each in found[2:]) == b"x" * 1000


def test_pyamqp_decodes_our_messages() -> None:
    """Their decoder finds every section and value of a message, and every annotation of an event."""
    number = uuid.uuid4()
    raw = Message(
        AmqpValue({"k": [1, None, True, Array([Symbol("a")])]}),
        Properties(message_id=number, correlation_id="c", group_sequence=5, creation_time=Timestamp(5)),
        {"a": 1, "b": b"x"},
        {Symbol("x"): ULong(300)},
        {Symbol("d"): UInt(0)},
        Header(True, UByte(4)),
        {Symbol("f"): 1.5},
    ).encode()
    found = decode_payload(memoryview(raw))
    assert found.value == {b"k": [1, None, True, [b"a"]]}
    assert (found.properties.message_id, found.properties.correlation_id) == (number, b"c")  # type: ignore[union-attr]  # of one with properties
    assert found.application_properties == {b"a": 1, b"b": b"x"}
    assert (found.message_annotations, found.delivery_annotations) == ({b"x": 300}, {b"d": 0})
    assert found.footer == {b"f": 1.5}
    event = ReceivedEvent.build(b"body", offset="5", sequence_number=2**40, enqueued_time=NOW, partition_key="k")
    annotations = decode_payload(memoryview(event.raw)).message_annotations
    assert annotations == {
        b"x-opt-sequence-number": 2**40,
        b"x-opt-offset": b"5",
        b"x-opt-enqueued-time": int(NOW.timestamp() * 1000),
        b"x-opt-partition-key": b"k",
    }


def theirs_of(kind: Any, **values: Any) -> Any:
    """Make one of their frames; what is not given is null."""
    return kind(**{name: values.get(name) for name in kind._fields})


THEIRS: list[Any] = [
    theirs_of(performatives.OpenFrame, container_id="c", hostname="h", max_frame_size=65_536, properties={"a": "b"}),
    theirs_of(performatives.BeginFrame, next_outgoing_id=0, incoming_window=5, outgoing_window=6, handle_max=7),
    theirs_of(
        performatives.FlowFrame, incoming_window=1, next_outgoing_id=2, outgoing_window=3, handle=0, link_credit=300
    ),
    theirs_of(performatives.DetachFrame, handle=4, closed=True),
    theirs_of(performatives.EndFrame),
    theirs_of(performatives.CloseFrame),
]


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda each: type(each).__name__)
def test_decode_of_frames_by_pyamqp(theirs: Any) -> None:
    """What their encoder writes, ours reads: the same values at the same fields."""
    _, data = _encode.encode_frame(theirs)
    assert data is not None
    raw = bytes(data)
    found, end = decode_performative(raw, 0, len(raw))
    assert end == len(raw)
    for mine, value in zip(fields(found), theirs, strict=False):
        if value is not None:
            assert getattr(found, mine.name) == value


def test_decode_of_messages_by_pyamqp() -> None:
    """What their encoder writes as a message, ours reads."""
    theirs = PyMessage(
        data=[b"body"],
        properties=PyProperties(message_id="m", content_type="text/plain"),
        application_properties={"k": "v", "n": 5},
        message_annotations={"x-opt-partition-key": "key"},
    )
    message = Message.decode(bytes(_encode.encode_payload(bytearray(), theirs)))
    assert message.body == Data((b"body",))
    assert message.properties is not None
    assert (message.properties.message_id, message.properties.content_type) == ("m", "text/plain")
    assert message.application_properties == {"k": "v", "n": 5}


def test_pyamqp_decodes_a_single_event() -> None:
    """Their decoder reads an event as we send it."""
    raw = EventData("text", properties={"k": "v"}, message_id="m").encode("key")
    found = decode_payload(memoryview(raw))
    assert found.data == [b"text"]
    assert found.application_properties == {b"k": b"v"}


def test_pyamqp_decodes_an_opening_of_the_server() -> None:
    """The frames of a whole opening by the server have the fields their client reads (2.3)."""
    pair = Pair().open()
    assert isinstance(pair.server, Connection)
    assert pair.server.role is Role.SERVER
    pair.session()
    codes = {}
    for flight in pair.to_client:
        while flight:
            if flight[:4] == b"AMQP":
                flight = flight[8:]
                continue
            size = int.from_bytes(flight[:4], "big")
            code, values = decode_frame(memoryview(flight[8:size]))
            codes[code] = values
            flight = flight[size:]
    assert (len(codes[0x10]), len(codes[0x11])) == (10, 8)
    assert codes[0x10][2] is not None
    assert codes[0x11][4] is not None
