"""The stamp of an event: an application property by which its publisher finds it in a partition.

Readers do not get the annotations of idempotent publishing; a stamp is in the event itself. There are two kinds:

* A producer's: the producer id, owner level and number, in hexadecimal digits of fixed widths. So it is filled in along
  with the number, and moves no byte.
* A row's, of Spark's sink: sink id, batch, partition and index of the row. It is known before the event is numbered.
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
    """What a producer's stamp says."""

    producer_id: int
    owner_level: int
    number: int


def spell_stamp(producer_id: int, owner_level: int, number: int) -> str:
    """Spell a producer's stamp: three hexadecimal numbers of fixed widths."""
    return ":".join(
        f"{value:0{width}x}" for value, width in zip((producer_id, owner_level, number), _WIDTHS, strict=True)
    )


def read_stamp(value: object) -> Stamp | None:
    """Read a producer's stamp from the value of the property `STAMP`; None if the value is not one."""
    parts = value.split(":") if isinstance(value, str) and value.isascii() else []
    if tuple(map(len, parts)) != _WIDTHS:
        return None
    try:
        return Stamp(*(int(part, 16) for part in parts))
    except ValueError:
        return None


def row_stamp_prefix(sink_id: str, batch_id: int, partition_id: str) -> str:
    """Return what the stamps of the rows of one batch in one partition begin with; the row's index follows."""
    return f"{sink_id}:{batch_id}:{partition_id}:"


def read_row_stamp(value: object, prefix: str) -> int | None:
    """Read the index of a row from the value of the property `STAMP`; None if the stamp is not one with the prefix."""
    if not isinstance(value, str) or not value.startswith(prefix) or not value.isascii():
        return None
    index = value[len(prefix) :]
    return int(index) if index.isdigit() else None


def stamped(event: bytes, stamp: str, *, is_first: bool = False) -> bytes:
    """Add the property `STAMP` to an encoded event, in place of one it has.

    Args:
        is_first: Whether the property comes before the others. Default: False, after them, or where it was.
    """
    end = len(event)
    for code, start, stop in section_spans(event):
        if code == APPLICATION_PROPERTIES:
            properties = codec.decode(event, start, stop)[0].value
            if is_first:
                properties.pop(STAMP, None)
                properties = {STAMP: stamp, **properties}
            properties[STAMP] = stamp
            return event[:start] + section(APPLICATION_PROPERTIES, properties) + event[stop:]
        if code > APPLICATION_PROPERTIES:
            end = start
            break
    return event[:end] + section(APPLICATION_PROPERTIES, {STAMP: stamp}) + event[end:]


def with_room(event: bytes) -> bytes:
    """Add room for a producer's stamp to an encoded event, before its other properties, in place of a stamp it has."""
    return stamped(event, _ROOM, is_first=True)


def filled(event: bytes, stamp: bytes) -> bytes:
    """Fill a producer's stamp in the sections of an event from its properties on, with room for it."""
    for code, start, _ in section_spans(event):
        if code == APPLICATION_PROPERTIES:
            at = event.index(_BEFORE, start) + len(_BEFORE)
            return event[:at] + stamp + event[at + len(stamp) :]
    raise ValueError("the event has no room for a stamp")
