"""Exchanges of frames between an official client and the service, as they were recorded. README.md says what a
recording tells, and what it does not.

    for exchange in exchanges():
        for frame in exchange.frames:
            ...
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from eventpump.amqp import performatives as p
from eventpump.amqp.codec import decode
from eventpump.amqp.performatives import Composite

FOLDER: Final = Path(__file__).parent

PERFORMATIVES: Final[Mapping[str, type[Composite] | None]] = {
    "sasl-mechanisms": p.SaslMechanisms,
    "sasl-init": p.SaslInit,
    "sasl-outcome": p.SaslOutcome,
    "open": p.Open,
    "begin": p.Begin,
    "attach": p.Attach,
    "flow": p.Flow,
    "transfer": p.Transfer,
    "disposition": p.Disposition,
    "detach": p.Detach,
    "end": p.End,
    "close": p.Close,
    "empty": None,
}
"""The frames of the exchanges, by name; a frame without a performative (a heartbeat) is `empty`."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A file of the SDK's repository: the frames of one connection."""

    id: str
    path: str
    commit: str
    shows: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of one side.

    Attributes:
        by: `client` or `service`.
        name: A key of `PERFORMATIVES`.
        fields: The fields that the recording has, by the names of `eventpump.amqp.performatives`, defaults included.
            None for a request of the client, of which a recording has the `message` only.
        size: The frame's size in bytes, with the names that were recorded; None where there are no fields.
        after: Milliseconds since the frame before; None for the first, and where it was not read.
        payload: The template of a transfer's payload: hexadecimal digits, `'text'`, and `<name:bytes>` for what was
            replaced.
        message: Sections of a request that has no frame.
    """

    by: str
    name: str
    fields: Mapping[str, Any] | None
    size: int | None
    after: int | None
    payload: str | None
    message: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """Frames that belong together: what one side sends, and what the other answers.

    Attributes:
        name: Unique.
        kind: What it is about: `attach`, `delivery` and so on.
        recordings: The ids of the recordings that show it; all numbers are those of the first.
        shows: What it shows.
        frames: In the order in which the recording has them.
    """

    name: str
    kind: str
    recordings: tuple[str, ...]
    shows: str
    frames: tuple[Frame, ...]


@cache
def recordings() -> Mapping[str, Recording]:
    """Return the recordings that were read, by id."""
    rows = tomllib.loads((FOLDER / "recordings.toml").read_text(encoding="utf-8"))["recording"]
    found = {row["id"]: Recording(**row) for row in rows}
    assert len(found) == len(rows), "two recordings have one id"
    return found


@cache
def _document() -> Mapping[str, Any]:
    return tomllib.loads((FOLDER / "exchanges.toml").read_text(encoding="utf-8"))


def placeholders() -> Mapping[str, str]:
    """Return what the placeholders of fields and payloads stand for, by their name between `<` and `>`."""
    found: Mapping[str, str] = _document()["placeholders"]
    return found


@cache
def exchanges() -> tuple[Exchange, ...]:
    """Return all exchanges, in the order of the file."""
    return tuple(
        Exchange(
            row["name"],
            row["kind"],
            tuple(row["recordings"]),
            row["shows"],
            tuple(_frame(each) for each in row["frames"]),
        )
        for row in _document()["exchange"]
    )


def _frame(row: Mapping[str, Any]) -> Frame:
    fields = row.get("fields")
    return Frame(
        row["by"],
        row["frame"],
        None if fields is None else _complete(row["frame"], fields),
        row.get("size"),
        row.get("after"),
        row.get("payload"),
        row.get("message"),
    )


def _complete(name: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the fields that every recorded frame of this name has with one value."""
    defaults = _document()["defaults"]
    made = {**defaults.get(name, {}), **fields}
    for end in ("source", "target"):
        if end in made:
            made[end] = {**defaults["terminus"], **made[end]}
    return made


_PIECE: Final = re.compile(r"'(?P<text>[^']*)'|<(?P<name>[a-z-]+):(?P<size>\d+)>|(?P<digits>(?:[0-9a-f]{2})+)")


def payload_bytes(template: str, values: Mapping[str, bytes] | None = None) -> bytes:
    """Return a payload, with `values` for its placeholders; one without a value becomes that many zeros.

    Raises:
        ValueError: The template is malformed, or a value has not the length that was recorded.
    """
    made = bytearray()
    for piece in template.split(" ") if "'" not in template else _split(template):
        match = _PIECE.fullmatch(piece)
        if match is None:
            raise ValueError(f"{piece!r} is no piece of a payload")
        if match["text"] is not None:
            made += match["text"].encode("ascii")
        elif match["digits"] is not None:
            made += bytes.fromhex(match["digits"])
        else:
            size = int(match["size"])
            value = (values or {}).get(match["name"], bytes(size))
            if len(value) != size:
                raise ValueError(f"<{match['name']}> takes {size} bytes, not {len(value)}")
            made += value
    return bytes(made)


def _split(template: str) -> list[str]:
    """Split at spaces outside of quotes."""
    return re.findall(r"'[^']*'|\S+", template)


def sections(payload: bytes) -> list[tuple[int, Any]]:
    """Return a message's sections in their order, which may be any: descriptor and value of each."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(payload):
        value, at = decode(payload, at, len(payload))
        found.append((int(value.descriptor), value.value))
    return found
