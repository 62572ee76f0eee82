"""Recorded frames as bytes, and the comparison of a frame with a recorded one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from eventpump.amqp.performatives import (
    Accepted,
    AmqpError,
    Composite,
    Source,
    Target,
    decode_performative,
)
from eventpump.amqp.types import Described, Symbol, ULong
from tests.recorded import PERFORMATIVES, Frame
from tests.recorded.payloads import mismatches

NAMESPACE: Final = "namespace1"
HOST: Final = f"{NAMESPACE}.servicebus.windows.net"
HUB: Final = "hub-of-thirty-eight-characters-in-full"
"""As long as the recorded names, so that the sizes of frames can be compared."""

_TEXTS: Final = {
    "app-id": r"[0-9a-f-]{36}",
    "broker": r"B\d+",
    "client-ip": r"[0-9.:a-f]+",
    "container": r"[0-9a-f]{32}_G\d+",
    "gateway": r"G\d+",
    "link-tracking-id": r"[0-9A-F]{32}_G\d+",
    "time-text": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?",
    "tracking-id": r"[0-9a-f-]{32,36}",
}
"""What may stand for a placeholder that the other side chooses."""

_NESTED: Final[Mapping[str, type[Composite]]] = {"source": Source, "target": Target, "error": AmqpError}


@dataclass(frozen=True, slots=True)
class Difference:
    """A frame of the emulator that is not as recorded, in one field.

    Args:
        exchange: The exchange's name, and the place of the frame in it.
        frame: The performative.
        field: Such as `properties.app-id`; the name of what is missing or too much where it is a whole frame.
        recorded: What the service sent.
        came: What the emulator sent.
        sizes: The bytes of the frame, as recorded and as it came: a hint.
    """

    exchange: str
    at: int
    frame: str
    field: str
    recorded: object
    came: object
    sizes: tuple[int | None, int | None] = (None, None)

    def __str__(self) -> str:
        return (
            f"{self.exchange}, frame {self.at}: {self.frame}, {self.field}: recorded {self.recorded!r}, "
            f"came {self.came!r}; bytes of the frame: {self.sizes[0]} and {self.sizes[1]}"
        )


@dataclass(frozen=True, slots=True)
class Came:
    """A frame that came.

    Args:
        performative: None for a heartbeat.
    """

    channel: int
    performative: Composite | None
    payload: bytes
    size: int

    @property
    def name(self) -> str:
        """The performative's name in the data."""
        return next(
            name for name, cls in PERFORMATIVES.items() if cls is (self.performative and type(self.performative))
        )


def decoded(frame: bytes) -> Came:
    """Decode a whole frame."""
    start = frame[4] * 4
    channel = int.from_bytes(frame[6:8], "big")
    if len(frame) == start:
        return Came(channel, None, b"", len(frame))
    performative, end = decode_performative(frame, start, len(frame))
    return Came(channel, performative, frame[end:], len(frame))


# ------------------------------------------------------------------------------------------------- to bytes


def filled(value: Any, texts: Mapping[str, str]) -> Any:
    """Return a recorded value with our names for its placeholders."""
    if isinstance(value, str):
        return re.sub(r"<([a-z-]+)>", lambda found: texts.get(found[1], found[0]), value)
    if isinstance(value, Mapping):
        return {key: filled(each, texts) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, texts) for each in value]
    return value


def performative_of(frame: Frame, texts: Mapping[str, str]) -> Composite:
    """Make the performative of a recorded frame."""
    cls = PERFORMATIVES[frame.name]
    assert cls is not None
    assert frame.fields is not None
    made: dict[str, Any] = {}
    for name, recorded in filled(frame.fields, texts).items():
        value = recorded
        if name in _NESTED:
            value = dict(value)
            if "filter" in value:
                value["filter"] = {key: _described(each) for key, each in value["filter"].items()}
            value = _NESTED[name](**value)
        elif name == "state":
            value = Accepted()
        elif name == "delivery_tag":
            value = bytes.fromhex(value)
        elif name in ("initial_response", "additional_data"):
            value = value.encode()
        made[name] = value
    return cls(**made)


def _described(value: Mapping[str, Any]) -> Described:
    code = value["descriptor"]
    return Described(Symbol(code) if isinstance(code, str) else ULong(code), value["value"])


def frame_bytes(performative: Composite | None, *, channel: int, payload: bytes = b"", is_sasl: bool = False) -> bytes:
    """Make a frame; without a performative a heartbeat."""
    body = b"" if performative is None else performative.encode() + payload
    return (len(body) + 8).to_bytes(4, "big") + bytes((2, is_sasl)) + channel.to_bytes(2, "big") + body


# ------------------------------------------------------------------------------------------------- compared


def differences(
    recorded: Frame, came: Came, texts: Mapping[str, str], values: Mapping[str, bytes]
) -> Iterator[tuple[str, object, object]]:
    """Compare a frame of the same name with a recorded one.

    Args:
        texts: Our names for placeholders of fields; those of the other side are looked at by kind.
        values: The same for payloads.

    Yields:
        Field, what was recorded, and what came, of each difference. That a field is null and that it has its default
        value is the same here, as a recording does not distinguish them.
    """
    if came.channel != 0:
        yield "channel", 0, came.channel
    if recorded.fields is None:
        return
    assert came.performative is not None
    yield from _compare(recorded.fields, came.performative, texts, "")
    if recorded.payload is not None:
        for path, mine, theirs in mismatches(recorded.payload, values, came.payload):
            yield f"payload.{path}", mine, theirs


def _compare(
    recorded: Mapping[str, Any], came: Composite, texts: Mapping[str, str], prefix: str
) -> Iterator[tuple[str, object, object]]:
    for each in dataclasses.fields(came):  # type: ignore[arg-type]  # each of them is a dataclass
        name, default = each.name, each.default
        value, other = recorded.get(name), getattr(came, name)
        if name in _NESTED:
            yield from _nested(value, other, texts, f"{prefix}{name}", _NESTED[name])
        elif name == "state":
            if (value is None) != (other is None) or (other is not None and not isinstance(other, Accepted)):
                yield f"{prefix}{name}", value, other
        elif name in ("properties", "filter"):
            yield from _maps(value or {}, other or {}, texts, f"{prefix}{name}")
        elif not _is_alike(value, other, texts) and not (value is None and other == default):
            yield f"{prefix}{name}", value, other


def _nested(
    value: Mapping[str, Any] | None, came: Composite | None, texts: Mapping[str, str], name: str, cls: type[Composite]
) -> Iterator[tuple[str, object, object]]:
    if value is None or came is None:
        if value is not None or came is not None:
            yield name, value, came
        return
    yield from _compare(value, came, texts, f"{name}.")


def _maps(
    value: Mapping[str, Any], came: Mapping[Any, Any], texts: Mapping[str, str], name: str
) -> Iterator[tuple[str, object, object]]:
    for key in [*value, *(key for key in came if key not in value)]:
        mine, theirs = value.get(key), came.get(key)
        if isinstance(theirs, Described):
            theirs = {"descriptor": theirs.descriptor, "value": theirs.value}
            for part in ("descriptor", "value"):
                if not _is_alike((mine or {}).get(part), theirs[part], texts):
                    yield f"{name}.{part}", (mine or {}).get(part), theirs[part]
        elif key not in came or not _is_alike(mine, theirs, texts):
            yield f"{name}.{key}", mine, theirs


def _is_alike(value: Any, came: Any, texts: Mapping[str, str]) -> bool:
    if isinstance(came, bytes):
        came = came.hex() if isinstance(value, str) and re.fullmatch(r"([0-9a-f]{2})*", value) else came.decode()
    if not value and not came:
        return True
    if isinstance(value, str) and isinstance(came, str):
        pattern = re.escape(filled(value, texts))
        for name, kind in _TEXTS.items():
            pattern = pattern.replace(f"<{re.escape(name)}>", f"(?:{kind})")
        return re.fullmatch(pattern, came) is not None
    return bool(value == came)
