"""The stored form of a consumer group's scope record: one JSON object, the same in every store."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final

from eventpump.interfaces import ScopeRecord

_VERSION: Final = 1
"""Raised with every member added, dropped or changed: a version that does not know a member would drop it."""

_VERSION_MEMBER: Final = "version"
_CREATED: Final = "hubCreatedAt"
_COUNT: Final = "partitionCount"
_STARTS: Final = "starts"
_RESET_FOR: Final = "resetFor"
_RESET: Final = "resetPartitions"
_MEMBERS: Final = frozenset({_VERSION_MEMBER, _CREATED, _COUNT, _STARTS, _RESET_FOR, _RESET})


def encode_scope_record(record: ScopeRecord) -> str:
    """Encode a record as ASCII text. Its times carry a time zone."""
    return json.dumps(
        {
            _VERSION_MEMBER: _VERSION,
            _CREATED: _time_text(record.hub_created_at),
            _COUNT: record.partition_count,
            _STARTS: dict(record.starts),
            _RESET_FOR: None if record.reset_for is None else _time_text(record.reset_for),
            _RESET: sorted(record.reset_partitions),
        },
        separators=(",", ":"),
    )


def parse_scope_record(raw: str | bytes) -> ScopeRecord:
    """Parse what `encode_scope_record` returns.

    Raises:
        ValueError: It is not such a record, or one of another version of eventpump.
    """
    try:
        decoded = json.loads(raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError("the scope record is not JSON") from None
    if not isinstance(decoded, dict):
        raise ValueError("the scope record is not a JSON object")
    version = decoded.get(_VERSION_MEMBER)
    if version != _VERSION or isinstance(version, bool):
        raise ValueError(f"the scope record has version {version!r}, and this version of eventpump knows {_VERSION}")
    if decoded.keys() != _MEMBERS:
        odd = ", ".join(sorted(decoded.keys() ^ _MEMBERS))
        raise ValueError(f"the scope record lacks members, or has unknown ones: {odd}")
    reset_for = decoded[_RESET_FOR]
    return ScopeRecord(
        hub_created_at=_time(decoded[_CREATED], _CREATED),
        partition_count=_count(decoded[_COUNT]),
        starts=_starts(decoded[_STARTS]),
        reset_for=None if reset_for is None else _time(reset_for, _RESET_FOR),
        reset_partitions=_partitions(decoded[_RESET]),
    )


def _time_text(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise ValueError("a time in a scope record needs a time zone")
    return moment.astimezone(UTC).isoformat()


def _time(value: Any, member: str) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{member} in the scope record is not a time") from None
    if moment.tzinfo is None:
        raise ValueError(f"{member} in the scope record has no time zone")
    return moment


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{_COUNT} in the scope record is not a number of partitions")
    return value


def _starts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(start, str) for start in value.values()):
        raise ValueError(f"{_STARTS} in the scope record is not an object of texts")
    return value


def _partitions(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(partition_id, str) for partition_id in value):
        raise ValueError(f"{_RESET} in the scope record is not a list of partition ids")
    return frozenset(value)
