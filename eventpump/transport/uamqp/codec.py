"""Messages and values between their encoded form and uamqp's objects.

uamqp keeps no encoded message: it decodes what it receives and encodes what it sends, and its decoder and encoder do
not agree on which sections include their descriptors. Its errors are corrected here, in the encoded bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from eventpump.amqp.codec import decode, encode, skip
from eventpump.amqp.message import Data, Message
from eventpump.amqp.sections import (
    APPLICATION_PROPERTIES,
    BODIES,
    DATA,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    MARKER,
    MESSAGE_ANNOTATIONS,
    encode_data,
    section_spans,
)
from eventpump.errors import EventError, ProtocolError
from eventpump.transport.uamqp.door import c_uamqp

if TYPE_CHECKING:
    from collections.abc import Sequence

_DESCRIPTOR: Final = len(MARKER) + 1
"""Bytes of a section's descriptor, in its one-byte form."""
_MAPS: Final = (MESSAGE_ANNOTATIONS, APPLICATION_PROPERTIES, DELIVERY_ANNOTATIONS, FOOTER)
_NO_BODY: Final = encode_data(b"")


def to_value(value: Any) -> Any:
    """Make uamqp's object of a value, its type kept exactly. Raises `EncodeError` if the value has no AMQP form."""
    return _value(encode(value))


def _value(encoded: bytes) -> Any:
    raw = b"\x00\x53\x77" + encoded
    return c_uamqp.decode_message(len(raw), raw).get_body_value()


def from_value(value: Any) -> Any:
    """Make our value of one of uamqp's objects."""
    pieces: list[bytes] = []
    c_uamqp.enocde_batch_value(value, pieces)  # the name is theirs
    return decode(b"".join(pieces), 0)[0]


def to_message(raw: bytes, message_format: int) -> Any:
    """Make uamqp's object of an encoded message, which it will encode to the same sections."""
    spans = section_spans(raw)
    message = _message([(code, raw[start:end]) for code, start, end in spans])
    message.message_format = message_format
    # Data passes through uamqp unchanged, and is nearly all of a message.
    others = [(code, raw[start:end]) for code, start, end in spans if code != DATA]
    if others and not _is_kept(others):
        raise EventError(
            "uamqp cannot carry one of the message's values: see docs/transports.md; its data can hold any"
        )
    return message


def _message(sections: Sequence[tuple[int, bytes]]) -> Any:
    maps: dict[int, bytes] = {}
    rest: list[bytes] = []
    has_body = False
    for code, section in sections:
        if code in _MAPS:
            maps[code] = section[_DESCRIPTOR:]
        else:
            rest.append(section)
            has_body = has_body or code in BODIES
    if not has_body:
        rest.append(_NO_BODY)  # uamqp sends no message without a body
    plain = b"".join(rest)
    try:
        message = c_uamqp.decode_message(len(plain), plain)
        if MESSAGE_ANNOTATIONS in maps:
            message.message_annotations = c_uamqp.create_message_annotations(_value(maps[MESSAGE_ANNOTATIONS]))
        if APPLICATION_PROPERTIES in maps:
            message.application_properties = _value(maps[APPLICATION_PROPERTIES])
        if DELIVERY_ANNOTATIONS in maps:
            message.delivery_annotations = c_uamqp.create_delivery_annotations(_value(maps[DELIVERY_ANNOTATIONS]))
        if FOOTER in maps:
            message.footer = c_uamqp.create_footer(_value(maps[FOOTER]))
    except ValueError as error:
        raise EventError(f"uamqp cannot carry one of the message's values: {error}") from error
    return message


def _is_kept(sections: Sequence[tuple[int, bytes]]) -> bool:
    """Return whether uamqp encodes sections to what they were, whatever their order."""
    pieces: list[bytes] = []
    given = b"".join(section for _, section in sections)
    try:
        c_uamqp.get_encoded_message_size(_message(sections), pieces)
        found = b"".join(pieces)
        if found in (given, given + _NO_BODY):
            return True
        ours, theirs = Message.decode(given), Message.decode(found)
    except (ValueError, ProtocolError):
        return False
    if ours.body is None:
        ours.body = Data((b"",))
    return repr(ours) == repr(theirs)


def from_message(message: Any) -> bytes:
    """Encode one of uamqp's received messages."""
    pieces: list[bytes] = []
    c_uamqp.get_encoded_message_size(message, pieces)
    maps = []
    if message.message_annotations is not None:
        maps.append(MESSAGE_ANNOTATIONS)
    if message.footer is not None:
        maps.append(FOOTER)
    if message.delivery_annotations is not None:
        maps.append(DELIVERY_ANNOTATIONS)
    return mended(b"".join(pieces), maps)


def mended(encoded: bytes, maps: Sequence[int]) -> bytes:
    """Return the sections of a message that uamqp received and encoded their descriptors: one each.

    Args:
        encoded: Annotations and footer without a descriptor, application properties with two.
        maps: Which sections lack theirs, in their order in the message.
    """
    out: list[bytes] = []
    missing = iter(maps)
    pos, end = 0, len(encoded)
    while pos < end:
        start = pos
        if encoded[pos] != 0:
            out.append(MARKER + bytes((next(missing),)))
            pos = skip(encoded, pos, end)
        elif encoded[pos + 2] == APPLICATION_PROPERTIES:
            start += _DESCRIPTOR
            pos = skip(encoded, start, end)
        elif encoded[pos + 2] in BODIES:
            pos = end  # the body comes last
        else:
            pos = skip(encoded, pos, end)
        out.append(encoded[start:pos])
    return b"".join(out)
