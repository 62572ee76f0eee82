"""The stamp of an event: an application property that identifies its publisher and its number.

Readers do not get the annotations of idempotent publishing. A stamp is in the event itself, at a fixed width, so
that it is filled in along with the number and moves no byte.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from eventpump.amqp import codec
from eventpump.amqp.sections import APPLICATION_PROPERTIES, section, section_spans

STAMP: Final = "eventpump:stamp"
"""The application property."""

_WIDTHS: Final = (16, 4, 8)
_ROOM: Final = ":".join("0" * width for width in _WIDTHS)
_KEY: Final = codec.encode(STAMP)
_BEFORE: Final = _KEY + codec.encode(_ROOM)[: -len(_ROOM)]


class Stamp(NamedTuple):
    """What a stamp says."""

    producer_id: int
    owner_level: int
    number: int


def spell_stamp(producer_id: int, owner_level: int, number: int) -> str:
    """Spell a stamp: three hexadecimal numbers of fixed widths."""
    return ":".join(
        f"{value:0{width}x}" for value, width in zip((producer_id, owner_level, number), _WIDTHS, strict=True)
    )


def read_stamp(value: object) -> Stamp | None:
    """Read a stamp from the value of the property `STAMP`; None if the value is not a stamp."""
    parts = value.split(":") if isinstance(value, str) and value.isascii() else []
    if tuple(map(len, parts)) != _WIDTHS:
        return None
    try:
        return Stamp(*(int(part, 16) for part in parts))
    except ValueError:
        return None


def with_room(event: bytes) -> bytes:
    """Add the property `STAMP` to an encoded event, before its other properties, in place of one it has.

    Raises:
        AmqpDecodeError: The bytes are not an encoded event.
    """
    end = len(event)
    for code, start, stop in section_spans(event):
        if code == APPLICATION_PROPERTIES:
            properties = codec.decode(event, start, stop)[0].value
            properties.pop(STAMP, None)
            return event[:start] + section(APPLICATION_PROPERTIES, {STAMP: _ROOM, **properties}) + event[stop:]
        if code > APPLICATION_PROPERTIES:
            end = start
            break
    return event[:end] + section(APPLICATION_PROPERTIES, {STAMP: _ROOM}) + event[end:]


def filled(event: bytes, stamp: bytes) -> bytes:
    """Fill a stamp in.

    Args:
        event: The sections of an event from its properties on, with room for a stamp.
    """
    for code, start, _ in section_spans(event):
        if code == APPLICATION_PROPERTIES:
            at = event.index(_BEFORE, start) + len(_BEFORE)
            return event[:at] + stamp + event[at + len(stamp) :]
    raise ValueError("the event has no room for a stamp")
