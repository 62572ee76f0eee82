"""The stored form of a subscription's checkpoint, with its fence: texts that a blob's metadata can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from eventpump.eventhubs.events import Checkpoint
from eventpump.storage.records.texts import encode_texts

# The key names of the v5 stores.
_OFFSET: Final = "offset"
_SEQUENCE_NUMBER: Final = "sequencenumber"
_OWNER: Final = "clientidentifier"
_EPOCH: Final = "epoch"
_GENERATION: Final = "generation"
_CLAIM: Final = "claim"


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A subscription's checkpoint in a record, with its fencing token.

    Args:
        epoch: Raised by one with each claim.
        owner: The name of the host that claimed it last.
        generation: Raised by one with each reset; within a generation the sequence number never decreases. Default: 0.
        claim: The fencing token: random text, new with each claim, so that records of two hosts with one name differ.
            "" in a record of an earlier version. Default: "".
    """

    checkpoint: Checkpoint | None
    epoch: int
    owner: str
    generation: int = 0
    claim: str = ""

    def encode(self) -> bytes:
        """Encode as a record that blob metadata can hold."""
        return encode_texts(self._texts())

    def _texts(self) -> dict[str, str]:
        fence = {_EPOCH: str(self.epoch), _OWNER: self.owner, _GENERATION: str(self.generation)}
        if self.claim:
            fence[_CLAIM] = self.claim
        if self.checkpoint is None:
            return fence
        place = {_OFFSET: self.checkpoint.offset, _SEQUENCE_NUMBER: str(self.checkpoint.sequence_number)}
        return place | fence

    @classmethod
    def decode(cls, raw: bytes, partition_id: str) -> CheckpointRecord:
        """Decode what `encode` returns, except unknown members.
        Raises `ValueError` for neither checkpoint nor claim."""
        try:
            metadata = json.loads(raw)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            raise ValueError("the checkpoint is not JSON") from None
        if not isinstance(metadata, dict):
            raise ValueError("the checkpoint is not a JSON object")
        offset = look_up(metadata, _OFFSET)
        if not offset and look_up(metadata, _GENERATION) is None:
            raise ValueError("the checkpoint has no offset")
        number = read_integer(look_up(metadata, _SEQUENCE_NUMBER), "sequence number")
        return cls(
            Checkpoint(partition_id, offset, number) if offset else None,
            read_integer(look_up(metadata, _EPOCH), "epoch"),
            look_up(metadata, _OWNER) or "",
            read_integer(look_up(metadata, _GENERATION), "generation"),
            look_up(metadata, _CLAIM) or "",
        )


def look_up(metadata: Mapping[str, str] | None, key: str) -> str | None:
    """Return the value of a key, in any case; None where there is none."""
    for name, value in (metadata or {}).items():
        if name.lower() == key.lower():
            return value
    return None


def read_integer(value: object, name: str) -> int:
    """Read a 64-bit integer; absent is 0. Text is taken too: metadata has no other, and some writers quote numbers."""
    if value is None:
        return 0
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise ValueError(f"{name} is not an integer") from None
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} is not a 64-bit integer")
    return value
