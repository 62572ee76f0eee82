"""Where the emulator may differ from what was recorded: licences.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from tests.recorded import FOLDER, exchanges
from tests.recorded.frames import Difference

WHOLE = ("the frame", "silence", "the rest")
"""What a difference is named that is not one of a field: no licence covers it."""


@dataclass(frozen=True, slots=True)
class Licence:
    """A field of a frame in which the emulator may differ.

    Args:
        recordings: Those whose exchanges differ. Of an exchange the first recording counts, whose numbers it has.
        reason: Why it stays so.
    """

    frame: str
    field: str
    recordings: tuple[str, ...]
    reason: str


@cache
def licences() -> tuple[Licence, ...]:
    """Return all licences."""
    document = tomllib.loads((FOLDER / "licences.toml").read_text(encoding="utf-8"))
    return tuple(
        Licence(row["frame"], row["field"], tuple(row["recordings"]), row["reason"]) for row in document["licence"]
    )


@cache
def _recordings() -> Mapping[str, str]:
    return {each.name: each.recordings[0] for each in exchanges()}


def unlicensed(
    found: Iterable[Difference], allowed: Iterable[Licence]
) -> tuple[list[Difference], set[tuple[str, str, str]]]:
    """Return the differences that no licence allows, and what was used: frame, field and recording."""
    known = {(each.frame, each.field, name) for each in allowed for name in each.recordings}
    left: list[Difference] = []
    used: set[tuple[str, str, str]] = set()
    for each in found:
        key = each.frame, each.field, _recordings()[each.exchange]
        if key in known:
            used.add(key)
        else:
            left.append(each)
    return left, used
