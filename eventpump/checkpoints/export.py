"""The checkpoints of a consumer group as a document, from which they can be restored. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from eventpump.errors import ConfigurationError
from eventpump.interfaces import ConsumerScope
from eventpump.storage.checkpoints.stored import StoredCheckpoint
from eventpump.texts import excerpt

_VERSION: Final = 1
_KIND: Final = "eventpump checkpoints"
_NUMBER_LIMIT: Final = 2**63


@dataclass(frozen=True, slots=True)
class ExportedCheckpoint:
    """A checkpoint in a document, as it was stored.

    Args:
        sequence_number: The number of the last event that is processed; None if only the offset was stored.
        offset: Its offset; None if only the number was stored.
    """

    sequence_number: int | None
    offset: str | None


@dataclass(frozen=True, slots=True)
class CheckpointExport:
    """The checkpoints of a consumer group, or of some of its partitions, as they were stored at a time.

    Args:
        scope: The consumer group.
        hub_created_at: When its hub was created: numbers of a later one mean other events.
        exported_at: When they were read.
        format: The form of the store; "" if it is not known.
        partitions: By partition id; None where there was no checkpoint.
    """

    scope: ConsumerScope
    hub_created_at: datetime
    exported_at: datetime
    format: str
    partitions: Mapping[str, ExportedCheckpoint | None]

    @classmethod
    def of(
        cls,
        scope: ConsumerScope,
        hub_created_at: datetime,
        exported_at: datetime,
        format: str,  # noqa: A002 - the word of the field
        stored: Iterable[tuple[str, StoredCheckpoint | None]],
    ) -> CheckpointExport:
        """Return the document of what is stored.

        Args:
            scope: The consumer group.
            hub_created_at: When its hub was created.
            exported_at: The time.
            format: The form of the store.
            stored: What the store has of each partition; None if that is nothing.
        """
        partitions = {
            partition_id: None
            if each is None or not each.is_usable
            else ExportedCheckpoint(each.sequence_number, each.offset)
            for partition_id, each in stored
        }
        return cls(scope, hub_created_at, exported_at, format, partitions)

    def encode(self) -> str:
        """Return it as text: JSON, which `decode` reads."""
        document = {
            "kind": _KIND,
            "version": _VERSION,
            "namespace": self.scope.fully_qualified_namespace,
            "hub": self.scope.hub,
            "hub_created_at": self.hub_created_at.isoformat(),
            "consumer_group": self.scope.consumer_group,
            "exported_at": self.exported_at.isoformat(),
            "format": self.format,
            "partitions": {
                partition_id: None if each is None else {"sequence_number": each.sequence_number, "offset": each.offset}
                for partition_id, each in self.partitions.items()
            },
        }
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def decode(cls, raw: bytes | str, name: str) -> CheckpointExport:
        """Read what `encode` returned.

        Args:
            raw: The document.
            name: Its name, for errors.

        Raises:
            ConfigurationError: It is none, or not all of one.
        """

        def refused(problem: str) -> ConfigurationError:
            return ConfigurationError("FILE", f"{name}: {problem}; nothing was written")

        text = raw if isinstance(raw, str) else raw.decode(errors="replace")
        try:
            document = json.loads(text)
        except RecursionError:
            raise refused("is not an export of checkpoints") from None
        except json.JSONDecodeError as error:
            what = "is cut off" if error.pos >= len(text.rstrip()) - 1 else "is not JSON"
            raise refused(f"{what} (line {error.lineno}, column {error.colno})") from None
        if not isinstance(document, dict) or document.get("kind") != _KIND:
            raise refused("is not an export of checkpoints, as eventpump checkpoints export writes it")
        if document.get("version") != _VERSION:
            raise refused("is an export of a version that this one does not know; use the version that wrote it")
        try:
            return cls(
                ConsumerScope(*(_text(document, key) for key in ("namespace", "hub", "consumer_group"))),
                _time(document, "hub_created_at"),
                _time(document, "exported_at"),
                _text(document, "format"),
                _partitions(document.get("partitions")),
            )
        except ValueError as error:
            raise refused(str(error)) from None

    def check(self, scope: ConsumerScope, hub_created_at: datetime, format: str, name: str) -> None:  # noqa: A002 - as above
        """Check that it can be restored to a store.

        Args:
            scope: The consumer group of that store.
            hub_created_at: When its hub was created.
            format: The form of that store.
            name: The name of this document, for errors.

        Raises:
            ConfigurationError: It is of another consumer group, of an earlier hub, or of another form.
        """
        if _folded(self.scope) != _folded(scope):
            problem = f"is of {_place(self.scope)}, and this is {_place(scope)}: name that hub and group"
        elif self.hub_created_at != hub_created_at:
            problem = (
                f"is of hub {excerpt(scope.hub)} as it was created {_shown(self.hub_created_at)}; it was recreated "
                f"{_shown(hub_created_at)}, and its numbers mean other events: use reset"
            )
        elif self.format and self.format != format:
            problem = (
                f"is of checkpoints in the form {excerpt(self.format)}, and the store has the form {format}: name the "
                "store that was exported; copy carries checkpoints from form to form"
            )
        else:
            return
        raise ConfigurationError("FILE", f"{name}: {problem}; nothing was written")


def _folded(scope: ConsumerScope) -> tuple[str, str, str]:
    return scope.fully_qualified_namespace.lower(), scope.hub.lower(), scope.consumer_group.lower()


def _place(scope: ConsumerScope) -> str:
    return excerpt(f"{scope.fully_qualified_namespace}, hub {scope.hub}, consumer group {scope.consumer_group}")


def _shown(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00") + " UTC"


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise ValueError(f"its {key} is not a text")
    return value


def _time(document: Mapping[str, Any], key: str) -> datetime:
    try:
        moment = datetime.fromisoformat(_text(document, key))
    except ValueError:
        raise ValueError(f"its {key} is not a time") from None
    if moment.tzinfo is None:
        raise ValueError(f"its {key} has no time zone")
    return moment


def _partitions(value: object) -> dict[str, ExportedCheckpoint | None]:
    if not isinstance(value, dict):
        raise ValueError("it has no partitions")
    return {
        partition_id: None if each is None else _exported(partition_id, each) for partition_id, each in value.items()
    }


def _exported(partition_id: str, value: object) -> ExportedCheckpoint:
    where = f"of partition {excerpt(partition_id)}"
    if not isinstance(value, dict):
        raise ValueError(f"what it has {where} is not a checkpoint")
    number, offset = value.get("sequence_number"), value.get("offset")
    is_number = isinstance(number, int) and not isinstance(number, bool) and -1 <= number < _NUMBER_LIMIT
    if number is not None and not is_number:
        raise ValueError(f"the sequence number {where} is not a number from -1 on")
    if offset is not None and (not isinstance(offset, str) or not offset or "'" in offset or not offset.isprintable()):
        raise ValueError(f"the offset {where} is not the text of an offset")
    if number is None and offset is None:
        raise ValueError(f"the checkpoint {where} has neither a sequence number nor an offset")
    return ExportedCheckpoint(number, offset)
