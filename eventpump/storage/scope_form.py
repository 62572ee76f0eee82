"""The stored forms of a consumer group's scope record and of its subscriptions: a JSON object each, in every store.

A scope record names its hub: version 2. It may have nothing but the names. Every body has an `id`, random text of its
writer: of hosts that write equal records at the same time one succeeds. Bodies of earlier versions have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from eventpump.interfaces import ConsumerScope

_VERSION: Final = 1
"""Raised with every member added, dropped or changed: a version that does not know a member would drop it."""

_NAMED_VERSION: Final = 2
"""That of a record with the names of its hub. An earlier version would take the group of any hub for its own."""

_VERSION_MEMBER: Final = "version"
_CREATED: Final = "hubCreatedAt"
_COUNT: Final = "partitionCount"
_STARTS: Final = "starts"
_RESET_FOR: Final = "resetFor"
_RESET: Final = "resetPartitions"
_MEMBERS: Final = frozenset({_VERSION_MEMBER, _CREATED, _COUNT, _STARTS, _RESET_FOR, _RESET})
_NAMESPACE: Final = "namespace"
_HUB: Final = "hub"
_NAMES: Final = frozenset({_VERSION_MEMBER, _NAMESPACE, _HUB})
_ID: Final = "id"
_NAME: Final = "name"
_INCARNATION: Final = "incarnation"
_ACTIVE: Final = "isActive"
_SUBSCRIPTION_MEMBERS: Final = frozenset({_VERSION_MEMBER, _NAME, _INCARNATION, _CREATED, _COUNT, _STARTS, _ACTIVE})


@dataclass(frozen=True, slots=True)
class ScopeRecord:
    """What all hosts of one consumer group use. Written by the first host of the group.

    Args:
        hub_created_at: When the hub that the checkpoints belong to was created.
        partition_count: How many partitions the hub had when the record was written. Partitions with this number or a
            higher one were added later, and begin at their start.
        starts: Where partitions without a checkpoint begin, as text (see `eventpump.core.starts`): by partition id, and
            under "" for all others. Default: `{}`.
        reset_for: When a newer hub of the same name was created, if the checkpoints are being reset for it; else None.
        reset_partitions: The partitions whose reset for that newer hub is stored. Default: `frozenset()`.
    """

    hub_created_at: datetime
    partition_count: int
    starts: Mapping[str, str] = field(default_factory=dict)
    reset_for: datetime | None = None
    reset_partitions: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SubscriptionRecord:
    """What the hosts of one consumer group have agreed on about one subscription.

    Args:
        name: The name of the subscription.
        incarnation: Random text, new for each subscription made. Its checkpoints lie under `key`, so that those of an
            earlier subscription of that name are not taken for its own.
        hub_created_at: When the hub that its starts and checkpoints belong to was created.
        partition_count: How many partitions the hub had then. A partition whose number is not below it was added later,
            and begins at its beginning.
        starts: Where partitions without a checkpoint begin, as text (see `eventpump.core.starts`): by partition id, and
            under "" for those not named. Default: `{}`.
        is_active: False where it was ended with its checkpoints kept: no host delivers to it until it is made active
            again. Default: True.
    """

    name: str
    incarnation: str
    hub_created_at: datetime
    partition_count: int
    starts: Mapping[str, str] = field(default_factory=dict)
    is_active: bool = True

    @property
    def key(self) -> str:
        """The name of its checkpoints."""
        return f"{self.name}.{self.incarnation}"


@dataclass(frozen=True, slots=True)
class HubNames:
    """The hub that a consumer group is of. Event Hubs does not distinguish upper and lower case."""

    namespace: str
    hub: str

    @classmethod
    def of(cls, scope: ConsumerScope) -> HubNames:
        """Return those of a scope."""
        return cls(scope.fully_qualified_namespace, scope.hub)

    def is_same(self, other: HubNames) -> bool:
        """Return whether both name one hub."""
        return (self.namespace.lower(), self.hub.lower()) == (other.namespace.lower(), other.hub.lower())

    def __str__(self) -> str:
        return f"hub {self.hub} of namespace {self.namespace}"


@dataclass(frozen=True, slots=True)
class NamedRecord:
    """A consumer group's scope record, as it is stored.

    Args:
        names: The hub; None in a record from before there were names.
        record: The record; None as long as there is none, and only the names are known.
        id: Random text of its writer; None in a record from before there was one. Default: None.
    """

    names: HubNames | None
    record: ScopeRecord | None
    id: str | None = None


def encode_named_record(names: HubNames, record: ScopeRecord | None, body_id: str) -> bytes:
    """Encode a record with the names of its hub, or the names alone, as ASCII text. Its times carry a time zone."""
    head = {_VERSION_MEMBER: _NAMED_VERSION, _NAMESPACE: names.namespace, _HUB: names.hub}
    return _encoded(head if record is None else {**head, **_members(record)}, body_id)


def parse_named_record(raw: str | bytes) -> NamedRecord:
    """Parse what `encode_named_record` returns, or a record of version 1, which has no names."""
    what = "scope record"
    decoded = _object(raw, what)
    if decoded.get(_VERSION_MEMBER) != _NAMED_VERSION:
        return NamedRecord(None, _scope_record(_decoded(raw, what, _MEMBERS)))
    if not isinstance(decoded.get(_NAMESPACE), str) or not isinstance(decoded.get(_HUB), str):
        raise ValueError(f"the {what} does not name its hub")
    names = HubNames(decoded[_NAMESPACE], decoded[_HUB])
    if decoded.keys() - {_ID} == _NAMES:
        return NamedRecord(names, None, decoded.get(_ID))
    _check_members(decoded, what, _MEMBERS | _NAMES)
    return NamedRecord(names, _scope_record(decoded), decoded.get(_ID))


def _members(record: ScopeRecord) -> dict[str, Any]:
    return {
        _CREATED: _time_text(record.hub_created_at),
        _COUNT: record.partition_count,
        _STARTS: dict(record.starts),
        _RESET_FOR: None if record.reset_for is None else _time_text(record.reset_for),
        _RESET: sorted(record.reset_partitions),
    }


def _scope_record(decoded: dict[str, Any]) -> ScopeRecord:
    reset_for = decoded[_RESET_FOR]
    return ScopeRecord(
        hub_created_at=_time(decoded[_CREATED], _CREATED),
        partition_count=_count(decoded[_COUNT]),
        starts=_starts(decoded[_STARTS]),
        reset_for=None if reset_for is None else _time(reset_for, _RESET_FOR),
        reset_partitions=_partitions(decoded[_RESET]),
    )


def encode_subscription(record: SubscriptionRecord, body_id: str) -> bytes:
    """Encode a subscription's record as ASCII text. Its time carries a time zone."""
    return _encoded(
        {
            _VERSION_MEMBER: _VERSION,
            _NAME: record.name,
            _INCARNATION: record.incarnation,
            _CREATED: _time_text(record.hub_created_at),
            _COUNT: record.partition_count,
            _STARTS: dict(record.starts),
            _ACTIVE: record.is_active,
        },
        body_id,
    )


def parse_subscription(raw: str | bytes) -> SubscriptionRecord:
    """Parse what `encode_subscription` makes. Raises `ValueError` for anything else, or for that of another version."""
    decoded = _decoded(raw, "subscription", _SUBSCRIPTION_MEMBERS)
    for member, kind in ((_NAME, str), (_INCARNATION, str), (_ACTIVE, bool)):
        if not isinstance(decoded[member], kind):
            raise ValueError(f"{member} in the subscription has the wrong type")
    return SubscriptionRecord(
        name=decoded[_NAME],
        incarnation=decoded[_INCARNATION],
        hub_created_at=_time(decoded[_CREATED], _CREATED),
        partition_count=_count(decoded[_COUNT]),
        starts=_starts(decoded[_STARTS]),
        is_active=decoded[_ACTIVE],
    )


def _decoded(raw: str | bytes, what: str, members: frozenset[str]) -> dict[str, Any]:
    """Decode a JSON object of this version, with the members it must have."""
    decoded = _object(raw, what)
    version = decoded.get(_VERSION_MEMBER)
    if version != _VERSION or isinstance(version, bool):
        raise ValueError(f"the {what} has version {version!r}, and this version of eventpump knows {_VERSION}")
    _check_members(decoded, what, members)
    return decoded


def _object(raw: str | bytes, what: str) -> dict[str, Any]:
    try:
        decoded = json.loads(raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"the {what} is not JSON") from None
    if not isinstance(decoded, dict):
        raise ValueError(f"the {what} is not a JSON object")
    return decoded


def _check_members(decoded: dict[str, Any], what: str, members: frozenset[str]) -> None:
    if odd := (decoded.keys() - {_ID}) ^ members:
        raise ValueError(f"the {what} lacks members, or has unknown ones: {', '.join(sorted(odd))}")


def _encoded(members: dict[str, Any], body_id: str) -> bytes:
    return json.dumps({**members, _ID: body_id}, separators=(",", ":")).encode()


def _time_text(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise ValueError("a stored time needs a time zone")
    return moment.astimezone(UTC).isoformat()


def _time(value: Any, member: str) -> datetime:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{member} is not a time") from None
    if moment.tzinfo is None:
        raise ValueError(f"{member} has no time zone")
    return moment


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{_COUNT} is not a number of partitions")
    return value


def _starts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(start, str) for start in value.values()):
        raise ValueError(f"{_STARTS} is not an object of texts")
    return value


def _partitions(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(partition_id, str) for partition_id in value):
        raise ValueError(f"{_RESET} is not a list of partition ids")
    return frozenset(value)
