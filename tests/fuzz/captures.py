"""Real conversations: what clients and services wrote to each other, read by read, and what is in it."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from eventpump.amqp.performatives import Transfer, decode_performative

FOLDER: Final = Path(__file__).parent / "captured"
KEY: Final = "a key made up for captures"
"""The key of every capture's service; it opens nothing."""
KEY_NAME: Final = "RootManageSharedAccessKey"
HUBS: Final = {"telemetry": 4, "other": 2}
"""The hubs of every capture's service, and their partitions."""

_HEADER_SIZE = 8


@dataclass(frozen=True)
class Flight:
    """Bytes that went one way before any went the other."""

    is_to_service: bool
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Dialogue:
    """One connection.

    Args:
        name: Who spoke with whom, and a number.
        recorded_at: Seconds since the Unix epoch; tokens in it were valid then.
    """

    name: str
    recorded_at: float
    flights: tuple[Flight, ...]

    def side(self, *, is_to_service: bool) -> bytes:
        """Return all that went one way."""
        return b"".join(flight.data for flight in self.flights if flight.is_to_service is is_to_service)

    @property
    def is_web_socket(self) -> bool:
        """Whether AMQP goes in a WebSocket."""
        return self.flights[0].data.startswith(b"GET ")

    @cached_property
    def to_service(self) -> tuple[bytes, ...]:
        """The frames and protocol headers that the client sent."""
        return tuple(split_frames(self.side(is_to_service=True)))

    @cached_property
    def to_client(self) -> tuple[bytes, ...]:
        """The frames and protocol headers that the service sent."""
        return tuple(split_frames(self.side(is_to_service=False)))


def split_frames(data: bytes) -> list[bytes]:
    """Split bytes into protocol headers and frames; the last may be cut."""
    frames: list[bytes] = []
    pos = 0
    while pos < len(data):
        size = _HEADER_SIZE
        if not data.startswith(b"AMQP", pos):
            size = max(int.from_bytes(data[pos : pos + 4], "big"), _HEADER_SIZE)
        frames.append(data[pos : pos + size])
        pos += size
    return frames


def performative_of(frame: bytes) -> tuple[Any, bytes] | None:
    """Return a frame's performative and payload; None for a protocol header or an empty frame."""
    if frame.startswith(b"AMQP") or len(frame) <= _HEADER_SIZE:
        return None
    performative, end = decode_performative(frame, _HEADER_SIZE, len(frame))
    return performative, frame[end:]


def save(name: str, recorded_at: float, connections: list[list[Flight]]) -> Path:
    """Write a conversation. The same bytes make the same file."""
    described = [[[flight.is_to_service, flight.data.hex()] for flight in flights] for flights in connections]
    text = json.dumps({"recorded_at": recorded_at, "connections": described}, separators=(",", ":"))
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json.z"
    path.write_bytes(zlib.compress(text.encode(), 9))
    return path


@cache
def dialogues() -> tuple[Dialogue, ...]:
    """Load every capture, in the order of their names."""
    found: list[Dialogue] = []
    for path in sorted(FOLDER.glob("*.json.z")):
        described = json.loads(zlib.decompress(path.read_bytes()))
        for number, flights in enumerate(described["connections"]):
            made = tuple(Flight(is_to_service, bytes.fromhex(data)) for is_to_service, data in flights)
            found.append(Dialogue(f"{path.name.partition('.')[0]}-{number}", described["recorded_at"], made))
    return tuple(found)


@cache
def plain_dialogues() -> tuple[Dialogue, ...]:
    """Return those whose bytes are AMQP from the first on."""
    return tuple(each for each in dialogues() if not each.is_web_socket)


@dataclass(frozen=True)
class Carried:
    """A message, and what carried it.

    Args:
        node: The address at the service's end of its link.
    """

    payload: bytes = field(repr=False)
    is_to_service: bool
    message_format: int
    node: str


def _carried(frames: tuple[bytes, ...], nodes: dict[tuple[int, int], str], *, is_to_service: bool) -> list[Carried]:
    found: list[Carried] = []
    begun: dict[tuple[int, int], tuple[int, bytes]] = {}
    for frame in frames:
        read = performative_of(frame)
        if read is None or not isinstance(read[0], Transfer):
            continue
        transfer, payload = read
        link = int.from_bytes(frame[6:8], "big"), transfer.handle
        message_format, before = begun.pop(link, (transfer.message_format or 0, b""))
        if transfer.more:
            begun[link] = message_format, before + payload
        else:
            found.append(Carried(before + payload, is_to_service, message_format, nodes.get(link, "")))
    return found


def _nodes(frames: tuple[bytes, ...], *, is_client: bool) -> dict[tuple[int, int], str]:
    """Return the service's node of each link by the sender's channel and handle."""
    found: dict[tuple[int, int], str] = {}
    for frame in frames:
        read = performative_of(frame)
        if read is None or type(read[0]).__name__ != "Attach":
            continue
        attach = read[0]
        terminus = attach.source if (attach.role is is_client) else attach.target
        address = None if terminus is None else terminus.address
        found[int.from_bytes(frame[6:8], "big"), attach.handle] = address if isinstance(address, str) else ""
    return found


@cache
def carried() -> tuple[Carried, ...]:
    """Return every message of the captures, each content once, in order."""
    found: dict[bytes, Carried] = {}
    for dialogue in plain_dialogues():
        for frames, is_to_service in ((dialogue.to_service, True), (dialogue.to_client, False)):
            nodes = _nodes(frames, is_client=is_to_service)
            for each in _carried(frames, nodes, is_to_service=is_to_service):
                found.setdefault(each.payload, each)
    return tuple(found.values())


@cache
def messages() -> tuple[bytes, ...]:
    """Return the encoded messages of the captures."""
    return tuple(each.payload for each in carried())


@cache
def sent_to(node: str) -> tuple[bytes, ...]:
    """Return the requests to a node, `$cbs` or `$management`."""
    return tuple(each.payload for each in carried() if each.is_to_service and each.node == node)


@cache
def answers_of(node: str) -> tuple[bytes, ...]:
    """Return the answers of a node."""
    return tuple(each.payload for each in carried() if not each.is_to_service and each.node == node)


@cache
def published() -> tuple[Carried, ...]:
    """Return what producers sent: events and envelopes."""
    return tuple(each for each in carried() if each.is_to_service and not each.node.startswith("$"))


@cache
def stored() -> tuple[bytes, ...]:
    """Return the events that the service sent to consumers."""
    return tuple(each.payload for each in carried() if not each.is_to_service and not each.node.startswith("$"))
