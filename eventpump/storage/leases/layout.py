"""The stored form of leases and checkpoints: the legacy EventProcessorHost format, byte for byte.

A partition's lease and its `default` checkpoint are one blob, `{prefix}{consumer group}/{partition}`: a JSON body with
PascalCase names, and the metadata `OWNINGHOST` while it is owned. Hosts of the .NET family list that directory.
Checkpoints of other subscriptions lie beside it, in `{prefix}{consumer group}~checkpoints/{subscription}/{partition}`:
no consumer group's name holds a `~`, so no host ever lists them as leases. The group's scope record is the blob
`{prefix}{consumer group}~scope.json`, and the record of a subscription `{prefix}{consumer group}~subscriptions/{name}`,
for the same reason: hosts of the .NET family rewrite whatever lies in a lease. None of these names has the hub: the
scope record names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import Checkpoint
from eventpump.storage.checkpoint_form import look_up, read_integer

NO_NUMBER: Final = -1
"""The sequence number of a lease that has no checkpoint, when it is made: where there is no
offset, KEDA and Azure Functions begin after it. Hosts of the EventProcessorHost family ignore it then, and write 0.
"""
OWNING_HOST: Final = "OWNINGHOST"
"""The metadata key that names the owner, so that one listing shows every owner without a body read."""

# Writers: .NET uses PascalCase, Java camelCase, Python 1.x snake_case. All are read, PascalCase is written.
_NAMES: Final = {
    "offset": "Offset",
    "sequencenumber": "SequenceNumber",
    "partitionid": "PartitionId",
    "owner": "Owner",
    "token": "Token",
    "epoch": "Epoch",
}


def lease_directory(prefix: str, consumer_group: str) -> str:
    """Name the directory of a consumer group's leases. The prefix goes before the group with nothing between."""
    return f"{prefix}{consumer_group}/"


def lease_blob(prefix: str, consumer_group: str, partition_id: str) -> str:
    """Name a partition's lease blob."""
    return lease_directory(prefix, consumer_group) + partition_id


def record_prefix(prefix: str, consumer_group: str) -> str:
    """Return what goes before the names of a consumer group's records."""
    return f"{prefix}{consumer_group}~"


def partition_of(blob_name: str, directory: str) -> str | None:
    """Return the partition id in a blob's name, or None if the blob is not a lease of that directory."""
    if not blob_name.startswith(directory):
        return None
    partition_id = blob_name[len(directory) :]
    # The v5 stores may keep `{group}/checkpoint/{partition}` under the very same directory.
    return partition_id if partition_id and "/" not in partition_id else None


@dataclass(frozen=True, slots=True)
class LeaseBody:
    """The body of a lease blob.

    Args:
        owner: "" after release.
        token: The id of the blob lease; "" after release. A client that reads it can steal the lease with it.
        offset: None where there is no checkpoint yet.
        sequence_number: -1 or 0 where there is no checkpoint yet.
        extras: Properties this version does not know, kept as they are.
    """

    partition_id: str
    owner: str = ""
    token: str = field(default="", repr=False)
    epoch: int = 0
    offset: str | None = None
    sequence_number: int = 0
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The stored checkpoint, None where there is none yet."""
        if not self.offset:
            return None
        return Checkpoint(self.partition_id, self.offset, self.sequence_number)

    def encode(self) -> bytes:
        """Encode as a .NET EventProcessorHost does."""
        body = {
            "Offset": self.offset,
            "SequenceNumber": self.sequence_number,
            "PartitionId": self.partition_id,
            "Owner": self.owner,
            "Token": self.token,
            "Epoch": self.epoch,
        }
        return json.dumps({**body, **self.extras}, separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def parse(cls, raw: bytes, partition_id: str) -> LeaseBody:
        """Parse a body as any of the EventProcessorHosts writes it.

        Args:
            partition_id: The partition its blob is named after; that name wins over the one in the body.
        """
        try:
            decoded = json.loads(raw.decode("utf-8-sig"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            raise ValueError("the lease is not JSON") from None
        if not isinstance(decoded, dict):
            raise ValueError("the lease is not a JSON object")
        values: dict[str, Any] = {}
        extras: dict[str, Any] = {}
        for key, value in decoded.items():
            name = _NAMES.get(key.replace("_", "").lower())
            if name is None:
                extras[key] = value
            elif key == name or name not in values:
                values[name] = value
        return cls(
            partition_id=partition_id,
            owner=_text(values, "Owner") or "",
            token=_text(values, "Token") or "",
            epoch=read_integer(values.get("Epoch"), "Epoch"),
            offset=_text(values, "Offset") or None,
            sequence_number=read_integer(values.get("SequenceNumber"), "SequenceNumber"),
            extras=extras,
        )


def lease_metadata(owner: str) -> dict[str, str]:
    """Return the metadata of a lease blob. Every Put Blob replaces the whole metadata, so every one carries these."""
    return {OWNING_HOST: owner} if owner else {}


def owner_of(metadata: Mapping[str, str] | None) -> str | None:
    """Return the owner in a lease blob's metadata, or None. Its key may be in any case."""
    return look_up(metadata, OWNING_HOST) or None


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} is not a text")
    return value


def check_owner(owner: str) -> None:
    """Refuse what cannot be blob metadata, where hosts of all kinds look for the owner: a `ConfigurationError`."""
    if not owner or not owner.isascii() or not owner.isprintable() or owner != owner.strip():
        raise ConfigurationError("owner", "with blob leases, must be printable ASCII text without spaces around it")
