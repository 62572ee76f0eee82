"""Addresses of links, and audiences of tokens (protocol.md 1, 3.4)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from eventpump.eventhubs.names import CBS_NODE, MANAGEMENT_NODE
from eventpump.texts import excerpt

_GROUPS = "consumergroups"
_PARTITIONS = "partitions"
_PUBLISHERS = "publishers"


class AddressKind(enum.Enum):
    """What an address names."""

    GATEWAY = "gateway"
    """A hub: the service chooses the partition."""
    PARTITION = "partition"
    CONSUMER = "consumer"
    PUBLISHER = "publisher"
    CBS = "cbs"
    MANAGEMENT = "management"


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed link address. Which fields are set depends on the kind.

    Args:
        hub: The hub's name; empty for the `$cbs` and `$management` nodes. Default: "".
        consumer_group: The consumer group of a consumer; else None.
        partition_id: The partition of a partition or consumer; else None.
        publisher: The name of a publisher; else None.
    """

    kind: AddressKind
    hub: str = ""
    consumer_group: str | None = None
    partition_id: str | None = None
    publisher: str | None = None

    def __str__(self) -> str:
        match self.kind:
            case AddressKind.CBS:
                return CBS_NODE
            case AddressKind.MANAGEMENT:
                return MANAGEMENT_NODE
            case AddressKind.PUBLISHER:
                return f"{self.hub}/Publishers/{self.publisher}"
            case AddressKind.CONSUMER:
                return f"{self.hub}/ConsumerGroups/{self.consumer_group}/Partitions/{self.partition_id}"
            case AddressKind.PARTITION:
                return f"{self.hub}/Partitions/{self.partition_id}"
            case AddressKind.GATEWAY:
                return self.hub


def consumer_address(hub: str, consumer_group: str, partition_id: str) -> str:
    """Return the address a consumer reads from."""
    return f"{hub}/ConsumerGroups/{consumer_group}/Partitions/{partition_id}"


def producer_address(hub: str, partition_id: str | None = None) -> str:
    """Return the address a producer sends to: one partition, or (None) the gateway."""
    return hub if partition_id is None else f"{hub}/Partitions/{partition_id}"


def parse_address(text: str) -> Address:
    """Parse an address: `amqps://host/hub/...`, `/hub/...` or `hub/...`, fixed words in any case.
    Raises `ValueError`."""
    _scheme, separator, rest = text.partition("://")
    path = rest.partition("/")[2] if separator else text
    segments = path.strip("/").split("/")
    if not all(segments):
        raise ValueError(f"the address '{excerpt(text)}' has an empty part")
    words = [segment.lower() for segment in segments]
    if words == [CBS_NODE]:
        return Address(AddressKind.CBS)
    if words == [MANAGEMENT_NODE]:
        return Address(AddressKind.MANAGEMENT)
    # A hub's name may contain slashes, so the fixed words are looked for from the end.
    match words:
        case [_, *_, g, _, p, _] if g == _GROUPS and p == _PARTITIONS:
            hub = "/".join(segments[:-4])
            return Address(AddressKind.CONSUMER, hub, consumer_group=segments[-3], partition_id=segments[-1])
        case [_, *_, p, _] if p == _PARTITIONS:
            return Address(AddressKind.PARTITION, "/".join(segments[:-2]), partition_id=segments[-1])
        case [_, *_, p, _] if p == _PUBLISHERS:
            return Address(AddressKind.PUBLISHER, "/".join(segments[:-2]), publisher=segments[-1])
    if words[-1].startswith("$") or {words[-1], words[-2] if len(words) > 1 else ""} & {
        _GROUPS,
        _PARTITIONS,
        _PUBLISHERS,
    }:
        raise ValueError(f"the address '{excerpt(text)}' names neither a hub, nor a partition, nor a node")
    return Address(AddressKind.GATEWAY, "/".join(segments))


# --------------------------------------------------------------------------------------------------- audiences


@dataclass(frozen=True, slots=True)
class Audience:
    """What a token is for, taken apart. Without a hub it is for the whole namespace.

    Args:
        host: The namespace's host name, in lower case, without a port.
    """

    host: str
    hub: str | None = None
    consumer_group: str | None = None
    partition_id: str | None = None
    publisher: str | None = None
    is_management: bool = False

    def covers(self, address: Address) -> bool:
        """Return whether a token for this audience opens a link to the address.

        The `$management` node serves every hub, so any audience opens it; the hub is in each request.
        Names compare without case.
        """
        if address.kind in {AddressKind.CBS, AddressKind.MANAGEMENT}:
            return True
        if self.is_management:
            return False
        return (
            _matches(self.hub, address.hub)
            and _matches(self.consumer_group, address.consumer_group)
            and _matches(self.partition_id, address.partition_id)
            and _matches(self.publisher, address.publisher)
        )

    def includes(self, other: Audience) -> bool:
        """Return whether a signature for this resource signs a token put for the other audience."""
        if other.is_management:
            # .NET puts a token for `amqps://host/$management` that is signed for the hub.
            return other.hub is None or _matches(self.hub, other.hub)
        return not self.is_management and (
            _matches(self.hub, other.hub)
            and _matches(self.consumer_group, other.consumer_group)
            and _matches(self.partition_id, other.partition_id)
            and _matches(self.publisher, other.publisher)
        )


def audience(
    fully_qualified_namespace: str,
    hub: str,
    *,
    consumer_group: str | None = None,
    partition_id: str | None = None,
) -> str:
    """Return the audience of a token: for the hub, for what a consumer group reads, or for one partition."""
    host = f"[{fully_qualified_namespace}]" if ":" in fully_qualified_namespace else fully_qualified_namespace
    parts = [f"sb://{host}", hub]
    if consumer_group is not None:
        # The official Python client writes this word in lower case; the service takes any.
        parts += [_GROUPS, consumer_group]
    if partition_id is not None:
        parts += ["Partitions", partition_id]
    return "/".join(parts)


def parse_audience(text: str) -> Audience:
    """Parse an audience, or the resource of a signature, with any scheme or without one.

    Raises:
        ValueError: It does not name a host, or its path is not of a known form. A bare name, without scheme, dot, port
            or path, could also be a hub's, and is not taken for a host.
    """
    _scheme, separator, rest = text.partition("://")
    authority, slash, path = (rest if separator else text).partition("/")
    host = _host_of(authority)
    if not host or not (separator or slash or {".", ":"} & set(authority)):
        raise ValueError(f"the audience '{excerpt(text)}' names no host")
    segments = path.strip("/").split("/") if path.strip("/") else []
    if not all(segments):
        raise ValueError(f"the audience '{excerpt(text)}' has an empty part")
    is_management = bool(segments) and segments[-1].lower() == MANAGEMENT_NODE
    if is_management:
        segments = segments[:-1]
    if not segments:
        return Audience(host, is_management=is_management)
    if len(segments) >= 3 and segments[-2].lower() == _GROUPS:
        hub = "/".join(segments[:-2])
        return Audience(host, hub, consumer_group=segments[-1], is_management=is_management)
    address = parse_address("/".join(segments))
    if not address.hub:
        raise ValueError(f"the audience '{excerpt(text)}' names no hub")
    return Audience(host, address.hub, address.consumer_group, address.partition_id, address.publisher, is_management)


def _host_of(authority: str) -> str:
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()


def _matches(pattern: str | None, name: str | None) -> bool:
    return pattern is None or (name is not None and pattern.lower() == name.lower())
