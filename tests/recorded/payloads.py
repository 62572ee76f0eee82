"""Payloads of transfers, taken apart into values with names, whose encoding is kept."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from eventpump.eventhubs.names import LAST_ENQUEUED_OFFSET, OFFSET
from tests.recorded import payload_bytes

SECTIONS: Final = {
    0x70: "header",
    0x71: "delivery-annotations",
    0x72: "message-annotations",
    0x73: "properties",
    0x74: "application-properties",
    0x75: "data",
    0x76: "amqp-sequence",
    0x77: "amqp-value",
    0x78: "footer",
}

_FIXED: Final = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
_WIDE: Final = {0xA1: 0xB1, 0xA3: 0xB3, 0xA0: 0xB0, 0xC1: 0xD1}
_NULL: Final = 0x40


@dataclass(frozen=True, slots=True)
class Piece:
    """A value of a message.

    Args:
        path: The section and the keys or places that lead to the value, such as `message-annotations[x-opt-offset]`.
        code: The constructor of its encoding; that of a list has the number of its items in `raw`.
        raw: Its bytes.
    """

    path: str
    code: int
    raw: bytes

    def __str__(self) -> str:
        return f"{self.code:02x} {self.raw!r}" if self.raw else f"{self.code:02x}"


def pieces(payload: bytes) -> list[Piece]:
    """Take a message apart. What is cut off at the end, in the first frames of a large message, is left out."""
    found: list[Piece] = []
    seen: Counter[str] = Counter()
    at = 0
    while at < len(payload):
        name = SECTIONS[payload[at + 2]]
        seen[name] += 1
        at = _read(payload, at + 3, name if seen[name] == 1 else f"{name}#{seen[name]}", found)
    return found


def _read(data: bytes, at: int, path: str, found: list[Piece]) -> int:
    code = data[at]
    at += 1
    if code == 0:
        at = _read(data, at, f"{path}.descriptor", found)
        return _read(data, at, path, found)
    kind = code >> 4
    if kind in _FIXED:
        found.append(Piece(path, code, data[at : at + _FIXED[kind]]))
        return at + _FIXED[kind]
    wide = kind in (0xB, 0xD, 0xF)
    size = struct.unpack_from(">I", data, at)[0] if wide else data[at]
    at += 4 if wide else 1
    end: int = at + size
    if kind in (0xA, 0xB):
        found.append(Piece(path, code, data[at:end] if end <= len(data) else f"<{size} bytes>".encode()))
        return end
    count = struct.unpack_from(">I", data, at)[0] if wide else data[at]
    at += 4 if wide else 1
    if kind in (0xE, 0xF):
        found.append(Piece(path, code, data[at:end]))
        return end
    if code in (0xC1, 0xD1):
        found.append(Piece(path, code, b""))
        for _ in range(count // 2):
            key: list[Piece] = []
            at = _read(data, at, "", key)
            at = _read(data, at, f"{path}[{key[0].raw.decode()}]", found)
        return at
    found.append(Piece(path, code, b"%d items" % count))
    for place in range(count):
        at = _read(data, at, f"{path}[{place}]", found)
    return at


_LENGTHS: Final = re.compile(r"<([a-z-]+):(\d+)>")
_PATTERNS: Final = {
    "time": rb".{8}",
    "time-text": rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z?",
    "tracking-id": rb"[0-9a-f-]{32,36}",
    "host": rb"[a-z0-9.:-]+",
}
"""What may stand for a placeholder that has no value of its own."""


def mismatches(template: str, values: Mapping[str, bytes], payload: bytes) -> Iterator[tuple[str, object, object]]:
    """Compare a payload with a recorded one.

    Args:
        values: The bytes of placeholders; those of any other, and of one with another length, are looked at by kind.

    Yields:
        Path, what was recorded, and what came, of each difference. Times and offsets may be any; of the offsets of a
        partition without events not: they are -1.
    """
    stand_ins = {
        name: values[name]
        if len(values.get(name, b"")) == int(size)
        else f"<{name}>".encode().ljust(int(size), b"\x01")[: int(size)]
        for name, size in _LENGTHS.findall(template)
    }
    wanted = payload_bytes(template, stand_ins)
    rest = re.search(r"<rest:(\d+)>", template)
    if rest is not None and len(wanted) != len(payload):
        yield "size", len(wanted), len(payload)
    if rest is not None and template.startswith("<rest"):
        return
    recorded, came = ({piece.path: piece for piece in pieces(raw)} for raw in (wanted, payload))
    for path, piece in recorded.items():
        other = came.get(path)
        if other is None:
            if piece.code != _NULL:
                yield path, str(piece), None
        elif not _is_alike(piece, other):
            yield path, str(piece), str(other)
    for path, piece in came.items():
        if path not in recorded and piece.code != _NULL:
            yield path, None, str(piece)
    common = [path for path in recorded if path in came]
    order = [path for path in came if path in recorded]
    for mine, theirs in zip(common, order, strict=True):
        if mine != theirs:
            yield f"{mine.partition('[')[0]} in order", common, order
            return


def _is_alike(recorded: Piece, came: Piece) -> bool:
    if recorded.path.endswith((f"[{OFFSET}]", f"[{LAST_ENQUEUED_OFFSET}]")) and recorded.raw != b"-1":
        return recorded.code == came.code and came.raw.isdigit()
    parts = re.split(rb"<([a-z-]+)>\x01*", recorded.raw)
    is_open = len(parts) > 1
    pattern = b"".join(_PATTERNS[part.decode()] if at % 2 else re.escape(part) for at, part in enumerate(parts))
    # The texts are as long as the names in them: ours may be short where the recorded one was not, and its map with it.
    wide = _WIDE if is_open or recorded.path == "application-properties" else {}
    return wide.get(recorded.code, recorded.code) == wide.get(came.code, came.code) and (
        re.fullmatch(pattern, came.raw, re.DOTALL) is not None
    )


def as_sent(template: str, values: Mapping[str, bytes]) -> bytes:
    """Return the message that a sender must have sent for the service to deliver this one.

    A header, which the service drops, is not in it.
    """
    stand_ins = {
        name: values.get(name, b"").ljust(int(size), b"0")[: int(size)] for name, size in _LENGTHS.findall(template)
    }
    payload = payload_bytes(template, stand_ins)
    made = bytearray()
    at = 0
    while at < len(payload):
        start, code = at, payload[at + 2]
        scratch: list[Piece] = []
        end = _read(payload, at + 3, "", scratch)
        at = min(end, len(payload))
        missing = bytes(end - at)
        if code == 0x72:
            made += _without_stamps(payload[start:at])
        elif code != 0x71 or b"last_enqueued" not in payload[start:at]:
            made += payload[start:at] + missing
    return bytes(made)


def _without_stamps(section: bytes) -> bytes:
    """Return message annotations without those of the service, which come last; nothing where no others are there."""
    head = 6 if section[3] == 0xC1 else 12
    stamps = section.index(b"x-opt-sequence-number-epoch") - 2
    own = section[head:stamps]
    if not own:
        return b""
    pairs, at = 0, 0
    while at < len(own):
        scratch: list[Piece] = []
        at = _read(own, _read(own, at, "", scratch), "", scratch)
        pairs += 1
    return b"\x00\x53\x72\xc1" + bytes((len(own) + 1, pairs * 2)) + own
