"""The form in which azure-eventhub 5 and the other current SDKs keep checkpoints and owners: metadata of empty blobs.

Names: `{namespace}/{hub}/{group}/checkpoint/{partition}` and `.../ownership/{partition}`. Python, .NET and JavaScript
write namespace, hub and group in lower case; Java, Go, and with it Dapr and the OpenTelemetry collector, as their user
wrote them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from eventpump.core.starts import NO_NUMBER
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import ConsumerScope
from eventpump.storage.checkpoint_form import look_up

CHECKPOINT: Final = "checkpoint/"
OWNERSHIP: Final = "ownership/"

_PARTS: Final = 5
_OWNER: Final = "ownerid"
_OFFSET: Final = "offset"
_NUMBER: Final = "sequencenumber"
_NUMBER_TEXT: Final = re.compile(r"-?[0-9]{1,19}")
_CLIENT: Final = "clientidentifier"
# Ours: the other SDKs ignore them, and drop them with their next write.
_EPOCH: Final = "epoch"
_CLAIM: Final = "claim"
_DURATION: Final = "duration"

_NO_OFFSET: Final = "no offset"
"""What .NET wrote for some time where an offset was not known."""


def group_directory(scope: ConsumerScope, *, preserve_case: bool = False) -> str:
    """Name the directory of a consumer group: in lower case, or as the user wrote the names with `preserve_case`."""
    directory = f"{scope.fully_qualified_namespace}/{scope.hub}/{scope.consumer_group}/"
    return directory if preserve_case else directory.lower()


def record_prefix(directory: str) -> str:
    """Return what goes before the names of our own records of a group. No listing of another SDK, of KEDA or of Azure
    Functions has them: a consumer group's name has no "~"."""
    return f"{directory.removesuffix('/')}~"


def is_partition(name: str) -> bool:
    """Return whether the last part of a blob's name is a partition id."""
    return name.isascii() and name.isdecimal()


def is_of_group(name: str) -> bool:
    """Return whether a blob is an ownership or a checkpoint, of any group."""
    parts = name.split("/")
    return len(parts) == _PARTS and f"{parts[-2]}/" in (CHECKPOINT, OWNERSHIP) and is_partition(parts[-1])


def is_checkpoint(name: str) -> bool:
    """Return whether a blob is named as a checkpoint of any group."""
    parts = name.split("/")
    return len(parts) == _PARTS and f"{parts[-2]}/" == CHECKPOINT


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """A checkpoint as metadata has it.

    Args:
        offset: None if there is none, or the text that stands for none.
        sequence_number: None if there is none, or the number that stands for none.
    """

    offset: str | None
    sequence_number: int | None
    problem: str | None

    def checkpoint(self, partition_id: str) -> Checkpoint | None:
        """Return the checkpoint; None if it is no position.

        Without an offset reading goes on after its number, and without a number, which is `NO_NUMBER` then, after its
        offset.
        """
        if self.problem is not None:
            return None
        number = NO_NUMBER if self.sequence_number is None else self.sequence_number
        return Checkpoint(partition_id, self.offset or "", number)


def encode_checkpoint(checkpoint: Checkpoint, client: str) -> dict[str, str]:
    """Return the metadata of a checkpoint, for the name of the processor that writes it."""
    return {_OFFSET: checkpoint.offset, _NUMBER: str(checkpoint.sequence_number), _CLIENT: client}


def parse_checkpoint(metadata: Mapping[str, str] | None) -> CheckpointMetadata:
    """Read a checkpoint as any SDK may have written it. Keys may be in any case, and others may be among them."""
    text = (look_up(metadata, _OFFSET) or "").strip()
    offset = None if text.lower() in ("", _NO_OFFSET) else text
    number_text = (look_up(metadata, _NUMBER) or "").strip()
    number: int | None = None
    problem = None
    if number_text:
        number = int(number_text) if _NUMBER_TEXT.fullmatch(number_text) else None
        if number is None or not NO_NUMBER <= number < 2**63:
            number, problem = None, f"its sequence number is {number_text[:40]!r}"
        elif number == NO_NUMBER:
            number = None
    if offset is not None and "'" in offset:
        problem = f"its offset is {offset[:40]!r}"
        return CheckpointMetadata(None, None, problem)
    if offset is not None:
        # With an offset every SDK begins there, whatever the number is.
        return CheckpointMetadata(offset, number, None)
    if number is None and problem is None:
        problem = "it has neither an offset nor a sequence number"
    return CheckpointMetadata(None, number, problem)


@dataclass(frozen=True, slots=True)
class StoredOwnership:
    """An ownership as metadata has it.

    Args:
        owner: The owner; None if it was released, or names none.
        epoch: How often hosts of ours have claimed the partition, as far as no other SDK has written since. Default: 0.
        claim: Random text of the claim; "" if another SDK wrote it, or it was released. Default: "".
        duration: Seconds after which it expires if its owner does not renew it; None where another SDK wrote it, as
            each has its own. Default: None.
    """

    owner: str | None
    epoch: int = 0
    claim: str = ""
    duration: float | None = None

    def is_held(self, age: float, owner_timeout: float) -> bool:
        """Return whether it has an owner, and has not expired.

        Args:
            owner_timeout: Seconds after which one of another SDK expires.
        """
        return self.owner is not None and age < (self.duration or owner_timeout)

    def encode(self) -> dict[str, str]:
        """Return the metadata. One that was released has an empty owner, as every SDK writes it."""
        texts = {_OWNER: self.owner or "", _EPOCH: str(self.epoch)}
        if self.claim:
            texts[_CLAIM] = self.claim
        if self.duration is not None:
            texts[_DURATION] = f"{self.duration:g}"
        return texts


def parse_ownership(metadata: Mapping[str, str] | None) -> StoredOwnership:
    """Read an ownership as any SDK may have written it. What cannot be read of our own part counts as absent."""
    owner = look_up(metadata, _OWNER) or None
    epoch = look_up(metadata, _EPOCH) or ""
    claim = look_up(metadata, _CLAIM) or ""
    return StoredOwnership(
        owner,
        int(epoch) if epoch.isascii() and epoch.isdecimal() else 0,
        "" if owner is None else claim,
        _duration(look_up(metadata, _DURATION)) if owner is not None and claim else None,
    )


def _duration(text: str | None) -> float | None:
    try:
        duration = float(text or "")
    except ValueError:
        return None
    return duration if math.isfinite(duration) and duration > 0 else None
