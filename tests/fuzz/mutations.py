"""Strings made of captures: every choice comes from the `Random` that is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

_WIDTHS: Final = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
_MAX_DEPTH: Final = 24
_EDGES: Final = (0, 1, 2, 3, 0x7F, 0x80, 0xFE, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)
_VERBATIM: Final = 0x100
_CODES: Final = bytes.fromhex("40414243444550515253545556606170717273748081828384949800a0a1a3b0b1b3c0c1d0d1e0f0")


class NotReadableError(ValueError):
    """The bytes are no AMQP value, so that they can be changed as bytes only."""


@dataclass(slots=True)
class Node:
    """An AMQP value, taken apart as far as it has parts, whatever they mean.

    Args:
        code: Its constructor; 0 where it is described; `_VERBATIM` for bytes that stand for a value as they are.
        items: Of a list or map its items; of a described value the descriptor and the value.
        raw: Of everything else what stands after the constructor and the size.
    """

    code: int
    items: list[Node] = field(default_factory=list)
    raw: bytes = b""


def read(data: bytes, pos: int = 0, depth: int = _MAX_DEPTH) -> tuple[Node, int]:
    """Take a value apart.

    Returns:
        It, and the position after it.

    Raises:
        NotReadableError: It is none.
    """
    if pos >= len(data) or depth == 0:
        raise NotReadableError
    code = data[pos]
    pos += 1
    if code == 0:
        descriptor, pos = read(data, pos, depth - 1)
        value, pos = read(data, pos, depth - 1)
        return Node(0, [descriptor, value]), pos
    kind = code >> 4
    if kind in _WIDTHS:
        return Node(code, raw=data[pos : pos + _WIDTHS[kind]]), pos + _WIDTHS[kind]
    width = 4 if kind & 1 else 1
    start = pos + width
    end = start + int.from_bytes(data[pos:start], "big")
    if kind < 0xA or end > len(data):
        raise NotReadableError
    if kind not in (0xC, 0xD):
        return Node(code, raw=data[start:end]), end
    count, pos = int.from_bytes(data[start : start + width], "big"), start + width
    node = Node(code)
    for _ in range(count):
        item, pos = read(data, pos, depth - 1)
        node.items.append(item)
    if pos != end:
        raise NotReadableError
    return node, end


def write(node: Node) -> bytes:
    """Encode a value, with the sizes that are right for it."""
    code = node.code
    if code == _VERBATIM:
        return node.raw
    if code == 0:
        return b"\0" + b"".join(map(write, node.items))
    kind = code >> 4
    if kind in (0xC, 0xD):
        parts = [write(item) for item in node.items]
        content = b"".join(parts)
        if kind == 0xC and len(content) < 255 and len(parts) < 256:
            return bytes((code, len(content) + 1, len(parts))) + content
        return bytes((code | 0x10,)) + (len(content) + 4).to_bytes(4, "big") + len(parts).to_bytes(4, "big") + content
    if kind >= 0xA:
        if kind & 1 == 0 and len(node.raw) < 256:
            return bytes((code, len(node.raw))) + node.raw
        return bytes((code | 0x10,)) + len(node.raw).to_bytes(4, "big") + node.raw
    return bytes((code,)) + node.raw


def read_all(data: bytes) -> list[Node]:
    """Take a run of values apart, the sections of a message say.

    Raises:
        NotReadableError: It is none.
    """
    nodes: list[Node] = []
    pos = 0
    while pos < len(data):
        node, pos = read(data, pos)
        nodes.append(node)
    return nodes


# ------------------------------------------------------------------------------------------------ values


def _text(rng: Random) -> bytes:
    size = rng.choice((0, 1, 3, 20, 64, 254, 255, 256, 257, 300, 5000))
    return rng.choice(
        (
            b"5" * size,
            b"x" * size,
            bytes(size),
            "é".encode() * (size // 2),
            "٣".encode() * min(size, 9),
            b"\xff\xfe" * (size // 2),
            b"\n\r\x1b[31m" * (size // 9),
            b"amqp.annotation.x-opt-offset > '" + b"1_0" * min(size, 30) + b"'",
            b"telemetry/Partitions/" + b"7" * size,
            b"telemetry/ConsumerGroups/$Default/Partitions/" + b"7" * size,
        )
    )


def _bomb(rng: Random) -> bytes:
    """Make content that is larger in memory than in bytes, a few KiB at most."""
    size = rng.choice((1, 16, 17, 200, 255, 1000, 4000))
    match rng.randrange(5):
        case 0:
            content, count = b"\x45" * size, size
            return b"\xd0" + (len(content) + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + content
        case 1:
            content, count = b"\xc0\x01\x00" * size, size
            return b"\xd0" + (len(content) + 4).to_bytes(4, "big") + count.to_bytes(4, "big") + content
        case 2:  # elements of an array, each described over and over
            content = b"\x00\x40" * rng.choice((1, 5, 20, 30)) + b"\x50" + bytes(size)
            return b"\xf0" + (len(content) + 4).to_bytes(4, "big") + size.to_bytes(4, "big") + content
        case 3:
            keys = b"".join(b"\x71" + number.to_bytes(4, "big") + b"\x45" for number in range(size))
            return b"\xd1" + (len(keys) + 4).to_bytes(4, "big") + (2 * size).to_bytes(4, "big") + keys
        case _:
            content = b"\xc1" + b"\x01\x00" * size  # an array of empty maps
            return b"\xf0" + (len(content) + 4).to_bytes(4, "big") + size.to_bytes(4, "big") + content


def _value(rng: Random) -> Node:
    """Make a value of any type, at an edge of it more often than not."""
    code = rng.choice(_CODES)
    kind = code >> 4
    if code == 0:
        return Node(0, [_value(rng), _value(rng)])
    if kind in _WIDTHS:
        width = _WIDTHS[kind]
        number = rng.choice(_EDGES) if rng.random() < 0.7 else rng.getrandbits(128)
        raw = (number & ((1 << 8 * width) - 1)).to_bytes(width, "big")
        return Node(code, raw=raw if rng.random() < 0.5 else raw[::-1])
    if kind in (0xC, 0xD):
        return Node(code, [_value(rng) for _ in range(rng.choice((0, 1, 2, 2, 4)))])
    if kind in (0xE, 0xF):
        width = 4 if kind == 0xF else 1
        count = rng.choice((0, 1, 2, 16, 17, 255))
        element = rng.choice((b"\x40", b"\x41", b"\x45", b"\x50", b"\xa1", b"\xc0", b"\x00\x40\x53"))
        return Node(code, raw=count.to_bytes(width, "big") + element + rng.randbytes(count if width == 4 else 3))
    return Node(code, raw=_text(rng))


def _nodes(node: Node, found: list[tuple[Node, int]]) -> list[tuple[Node, int]]:
    """Collect every place of an item: what holds it, and its index there."""
    for index, item in enumerate(node.items):
        found.append((node, index))
        _nodes(item, found)
    return found


def mutate_values(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change what a run of AMQP values says, with sizes that stay right.

    Args:
        others: What else there is, to take values from.

    Raises:
        NotReadableError: The bytes are no run of values.
    """
    root = Node(0xC0, read_all(data))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _nodes(root, [])
        if not places:
            break
        way = rng.randrange(14)
        texts = [place for place in places if place[0].items[place[1]].code >> 4 in (0xA, 0xB)]
        if texts and rng.random() < 0.3:
            # Names, addresses and positions decide more than most values do.
            places, way = texts, 10
        holder, index = rng.choice(places)
        item = holder.items[index]
        match way:
            case 0 | 1:
                holder.items[index] = _value(rng)
            case 2:
                item.code = rng.choice(_CODES) if rng.random() < 0.3 else item.code & 0xF0 | rng.choice((0, 1, 2, 3))
                if item.code == 0 and len(item.items) != 2:
                    holder.items[index] = Node(0, [_value(rng), item if item.items else _value(rng)])
            case 3:
                for _ in range(rng.choice((1, 2, 8, 30, 31, 32, 33, 40))):
                    holder.items[index] = Node(0xC0, [holder.items[index]])
            case 4:
                for _ in range(rng.choice((1, 2, 30, 31, 32, 33))):
                    holder.items[index] = Node(0, [Node(0x40), holder.items[index]])
            case 5:  # a descriptor that is described itself
                holder.items[index] = Node(0, [Node(0, [_value(rng), _value(rng)]), item])
            case 6:
                holder.items.insert(index, item)
            case 7:
                del holder.items[index]
            case 8:
                other = rng.randrange(len(holder.items))
                holder.items[index], holder.items[other] = holder.items[other], item
            case 9:
                try:
                    theirs = _nodes(Node(0xC0, read_all(rng.choice(others))), [])
                except NotReadableError:
                    continue
                if theirs:
                    their_holder, their_index = rng.choice(theirs)
                    holder.items[index] = their_holder.items[their_index]
            case 10 | 11:
                if item.code >> 4 in (0xA, 0xB):
                    # Of a text that ends in a number the number is changed, the rest stays.
                    stem = item.raw.rstrip(b"0123456789")
                    match rng.randrange(4):
                        case 0:
                            item.raw = stem + b"7" * rng.choice((1, 2, 20, 5000))
                        case 1:
                            item.raw = stem + rng.choice((b"-1", b"1_0", b" 5", b"+5", "٣".encode(), b"5\n", b"05"))
                        case 2:
                            item.raw = stem + _text(rng)
                        case _:
                            item.raw = _text(rng)
                elif item.code >> 4 in _WIDTHS and item.raw:
                    item.raw = (rng.choice(_EDGES) & ((1 << 8 * len(item.raw)) - 1)).to_bytes(len(item.raw), "big")
            case 12:
                holder.items[index] = Node(_VERBATIM, raw=_bomb(rng))
            case _:  # a size or count that is wrong
                holder.items[index] = Node(_VERBATIM, raw=mutate_bytes(rng, write(item), others))
    return b"".join(map(write, root.items))


# ------------------------------------------------------------------------------------------------- bytes


def mutate_bytes(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change bytes, whatever they mean.

    Args:
        others: What else there is, to splice with.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        size = len(data)
        if not size:
            return rng.randbytes(rng.randrange(20))
        # What decides stands at the front more often than not.
        at = rng.randrange(min(size, 64)) if rng.random() < 0.5 else rng.randrange(size)
        match rng.randrange(11):
            case 0:
                data = data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]
            case 1:
                data = data[:at] + rng.randbytes(1) + data[at + 1 :]
            case 2:
                data = data[:at] + bytes((rng.choice(_CODES),)) + data[at + 1 :]
            case 3:
                data = data[:at]
            case 4:
                data = data[:at] + data[at + rng.choice((1, 1, 2, 4, 16)) :]
            case 5:
                data = data[:at] + rng.randbytes(rng.choice((1, 1, 2, 4, 16))) + data[at:]
            case 6:
                end = min(size, at + rng.choice((1, 2, 8, 64, 300)))
                data = data[:end] + data[at:end] * rng.choice((1, 1, 2, 40)) + data[end:]
            case 7:
                other = rng.choice(others) if others else data
                start = rng.randrange(len(other) + 1)
                data = data[:at] + other[start:]
            case 8:
                data = data + rng.choice(others) if others else data + data
            case 9:
                width = rng.choice((1, 2, 4, 8))
                number = rng.choice(_EDGES) & ((1 << 8 * width) - 1)
                data = data[:at] + number.to_bytes(width, "big") + data[at + width :]
            case _:
                # One more or less, as a size or count would be wrong.
                data = data[:at] + bytes(((data[at] + rng.choice((-2, -1, 1, 2))) & 0xFF,)) + data[at + 1 :]
        if len(data) > 1 << 20:
            data = data[: 1 << 20]
    return data


def mutate(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a run of AMQP values, by what they say or by their bytes, or both. One in fifty stays as it is."""
    way = rng.random()
    if way < 0.02:
        return data
    if way < 0.55:
        try:
            data = mutate_values(rng, data, others)
        except NotReadableError:
            way = 1.0
    return mutate_bytes(rng, data, others) if way > 0.5 else data


# ------------------------------------------------------------------------------------------------ frames

_FRAME_HEAD: Final = 8


def reframe(frame: bytes, body: bytes) -> bytes:
    """Put another body into a frame, its size being right."""
    return (len(body) + _FRAME_HEAD).to_bytes(4, "big") + frame[4:_FRAME_HEAD] + body


def _mutate_body(rng: Random, frame: bytes, others: Sequence[bytes]) -> bytes:
    """Change the performative of a frame, or its payload, or both."""
    body = frame[_FRAME_HEAD:]
    bodies = [other[_FRAME_HEAD:] for other in rng.sample(others, min(len(others), 3))]
    try:
        _, end = read(body)
    except NotReadableError:
        return reframe(frame, mutate_bytes(rng, body, bodies))
    performative, payload = body[:end], body[end:]
    if payload and rng.random() < 0.3:
        return reframe(frame, performative + mutate(rng, payload, bodies))
    return reframe(frame, mutate(rng, performative, bodies) + payload)


def _mutate_head(rng: Random, frame: bytes) -> bytes:
    """Change a frame's size, data offset, type or channel."""
    size, offset, kind, channel = (
        int.from_bytes(frame[:4], "big"),
        frame[4],
        frame[5],
        int.from_bytes(frame[6:8], "big"),
    )
    match rng.randrange(5):
        case 0:
            size = rng.choice((0, 7, 8, 9, size - 1, size + 1, 511, 512, 65_536, 65_537, 1 << 20, 0xFFFF_FFFF))
        case 1:
            offset = rng.choice((0, 1, 3, 4, 255))
        case 2:
            kind = rng.choice((0, 1, 2, 255))
        case 3:
            channel = rng.choice((0, 1, 2, 255, 256, 4999, 5000, 65_535))
        case _:
            pad = rng.choice((1, 2, 3))
            size, offset = size + 4 * pad, offset + pad
            frame = frame[:8] + bytes(4 * pad) + frame[8:]
    size, offset = min(max(size, 0), 0xFFFF_FFFF), min(offset, 255)
    return size.to_bytes(4, "big") + bytes((offset, kind)) + channel.to_bytes(2, "big") + frame[8:]


def mutate_frames(rng: Random, frames: Sequence[bytes], others: Sequence[bytes]) -> list[bytes]:
    """Change a run of frames and protocol headers: one of them or their order.

    Args:
        others: Frames of other conversations, to splice.
    """
    made = list(frames)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not made:
            break
        at = rng.randrange(len(made))
        is_frame = not made[at].startswith(b"AMQP") and len(made[at]) > _FRAME_HEAD
        match rng.randrange(12):
            case 0:
                made[at] = mutate_bytes(rng, made[at], others)
            case 1:
                made.insert(at, made[at])
            case 2:
                del made[at]
            case 3:
                to = rng.randrange(len(made))
                made[at], made[to] = made[to], made[at]
            case 4:
                made.insert(at, rng.choice(others))
            case 5:
                made[at:] = made[at:][:1] * rng.choice((2, 10, 50))
            case 6 | 7 if is_frame:
                made[at] = _mutate_head(rng, made[at])
            case 8 | 9 | 10 | 11 if is_frame:
                made[at] = _mutate_body(rng, made[at], others)
            case _:
                made[at] = mutate_bytes(rng, made[at], others)
    return made


def pieces(rng: Random, data: bytes) -> list[bytes]:
    """Cut bytes at random places, as TCP may."""
    way = rng.random()
    if way < 0.1 and len(data) < 2000:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((1, 2, 5, 20))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
