"""Strings that once broke a promise, by what they broke."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from eventpump.amqp.codec import encode
from eventpump.amqp.message import AmqpValue, Message, Properties
from eventpump.amqp.performatives import Attach, Source, Target
from eventpump.amqp.sections import PROPERTIES, encode_data, section
from eventpump.amqp.types import Described, Symbol, ULong
from eventpump.eventhubs.management import partition_request
from eventpump.eventhubs.names import SEQUENCE_NUMBER
from tests.fuzz import captures


class Regression(NamedTuple):
    """A string of an entry.

    Args:
        is_measured: Whether it is its memory that was wrong.
    """

    entry: str
    string: Any
    is_measured: bool = False


def _array(head: bytes, count: int) -> bytes:
    """Make an array of ubytes with something before its elements' constructor."""
    content = head + b"\x50" + bytes(count)
    return b"\xf0" + (len(content) + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + content


def _attach(address: str, *, is_receiver: bool) -> bytes:
    node = Source(address=address) if is_receiver else Source(address="here")
    return Attach(
        name="link",
        handle=0,
        role=is_receiver,
        source=node,
        target=Target(address="here" if is_receiver else address),
        initial_delivery_count=None if is_receiver else 0,
    ).encode()


def _request(*, properties: Properties) -> bytes:
    """Make a request whose message id is no message id, which `Message` would not encode."""
    plain = partition_request("telemetry", "0", message_id="1")
    plain.properties = None
    return section(PROPERTIES, [properties.message_id]) + plain.encode()


def _numbered(number: int) -> bytes:
    """Make an event as received, with this sequence number."""
    event = Message.decode(_SOUND)
    assert event.message_annotations is not None
    event.message_annotations[SEQUENCE_NUMBER] = number
    return event.encode()


_SOUND: Final = captures.stored()[0]
_DIGITS: Final = "7" * 5000
_DESCRIBED: Final = Described(Described(Symbol("a"), 1), 3)
_BROKEN_MAP: Final = bytes.fromhex("005372c100")
_TEXT_AS_DATA: Final = bytes.fromhex("005375a10178")
_NULL_AS_DATA: Final = section(0x74, {"a": 1}) + bytes.fromhex("00537540")
_DEEP: Final = b"\0\x53\x77" + b"\0\x40" * 31 + b"\x40"
_BOMB: Final = _array(b"\0\x40" * 30, 4000)
_HANDSHAKE: Final = (
    b"GET /$servicebus/websocket HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: AMQPWSB10\r\nSec-WebSocket-Key: "
)

REGRESSIONS: Final[dict[str, Regression]] = {
    "skip of a described descriptor": Regression("codec", encode(_DESCRIBED)),
    "a message whose body has a described descriptor": Regression("message", Message(AmqpValue(_DESCRIBED)).encode()),
    "an annotation with a described descriptor": Regression(
        "scan",
        (
            captures.stored()[0],
            Message(AmqpValue(1), message_annotations={Symbol("x"): _DESCRIBED}).encode(),
        ),
    ),
    "an array whose elements are described over and over": Regression("codec", _BOMB, is_measured=True),
    "a user id that is text": Regression("message", b"\0\x53\x73" + encode([None, "user"])),
    "a group sequence that is a list": Regression("message", b"\0\x53\x73" + encode([*[None] * 11, [1]])),
    "a creation time that is text": Regression("message", b"\0\x53\x73" + encode([*[None] * 9, "now"])),
    "a header whose time to live is negative": Regression("message", b"\0\x53\x70" + encode([True, None, -1])),
    "an event whose annotations are cut": Regression("stamp", (_BROKEN_MAP, encode_data(b"x"))),
    "an envelope with an event whose annotations are cut": Regression("publish", (b"\x01" + encode_data(_BROKEN_MAP),)),
    "an event whose data is text": Regression("stamp", (_TEXT_AS_DATA,)),
    "a sender of an event whose data is text": Regression("publish", (b"\x00" + _TEXT_AS_DATA,)),
    "an event whose data is null": Regression("stamp", (_NULL_AS_DATA,)),
    "an event that nests too deeply": Regression("stamp", (_DEEP,)),
    "a sender to a partition of 5,000 digits": Regression(
        "attach", (_attach(f"telemetry/Partitions/{_DIGITS}", is_receiver=False),)
    ),
    "a receiver of a partition of 5,000 digits": Regression(
        "attach", (_attach(f"telemetry/ConsumerGroups/$Default/Partitions/{_DIGITS}", is_receiver=True),)
    ),
    "a read of a partition of 5,000 digits": Regression(
        "management", (partition_request("telemetry", _DIGITS, message_id="1").encode(),)
    ),
    "a read whose message id is negative": Regression("management", (_request(properties=Properties(message_id=-1)),)),
    "a token whose message id is a list": Regression("cbs", (_request(properties=Properties(message_id=[1])),)),
    "a sequence number beyond a long": Regression("rows", (_SOUND, _numbered(ULong(2**63)), _SOUND)),
    "an answer to CONNECT with a head beyond its limit": Regression(
        "connect", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n"
    ),
    "a WebSocket key that is not ASCII": Regression("websocket-server", (_HANDSHAKE + b"\xff\xfe\r\n\r\n", b"")),
}
