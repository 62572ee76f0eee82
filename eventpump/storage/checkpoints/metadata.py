"""The form in which azure-eventhub 5 and the other current SDKs keep checkpoints and owners: metadata of empty blobs.

Names: `{namespace}/{hub}/{group}/checkpoint/{partition}` and `.../ownership/{partition}`. Python, .NET and JavaScript
write namespace, hub and group in lower case; Java, Go, and with it Dapr and the OpenTelemetry collector, as their user
wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from eventpump.interfaces import ConsumerScope
from eventpump.storage.checkpoint_form import look_up

CHECKPOINT: Final = "checkpoint/"
OWNERSHIP: Final = "ownership/"

_PARTS: Final = 5
_OWNER: Final = "ownerid"
_OFFSET: Final = "offset"
_NUMBER: Final = "sequencenumber"

_NO_OFFSET: Final = "no offset"
"""What .NET wrote for some time where an offset was not known."""
_NO_NUMBER: Final = -(2**63)
"""What .NET takes for an absent number."""


def group_directory(scope: ConsumerScope, *, preserve_case: bool = False) -> str:
    """Name the directory of a consumer group.

    Args:
        scope: The consumer group.
        preserve_case: Whether names are as the user wrote them, and not in lower case. Default: False.
    """
    directory = f"{scope.fully_qualified_namespace}/{scope.hub}/{scope.consumer_group}/"
    return directory if preserve_case else directory.lower()


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
        problem: Why it is no position; None if it is one.
    """

    offset: str | None
    sequence_number: int | None
    problem: str | None


def parse_checkpoint(metadata: Mapping[str, str] | None) -> CheckpointMetadata:
    """Read a checkpoint as any SDK may have written it. Keys may be in any case, and others may be among them."""
    text = (look_up(metadata, _OFFSET) or "").strip()
    offset = None if text.lower() in ("", _NO_OFFSET) else text
    number_text = (look_up(metadata, _NUMBER) or "").strip()
    number: int | None = None
    problem = None
    if number_text:
        try:
            number = int(number_text)
        except ValueError:
            problem = f"its sequence number is {number_text[:40]!r}"
        else:
            if not _NO_NUMBER <= number < 2**63:
                number, problem = None, f"its sequence number is {number_text[:40]!r}"
            elif number == _NO_NUMBER:
                number = None
    if offset is not None:
        # With an offset every SDK begins there, whatever the number is.
        return CheckpointMetadata(offset, number, None)
    if number is None and problem is None:
        problem = "it has neither an offset nor a sequence number"
    return CheckpointMetadata(None, number, problem)


def parse_owner(metadata: Mapping[str, str] | None) -> str | None:
    """Return the owner that an ownership blob names; None if it was released, or names none."""
    return look_up(metadata, _OWNER) or None
