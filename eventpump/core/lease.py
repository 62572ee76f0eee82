"""What a lease is, as the manager and the stores see it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """A partition's lease as a listing showed it.

    Args:
        owner: The host named by the lease; None where it was released or never taken.
        is_held: Whether the lease was alive at the listing. A dead one keeps its last owner's name.
        token: What the store needs, beside the owner, to steal this lease and no later owner's; opaque.
    """

    partition_id: str
    owner: str | None
    is_held: bool
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class PartitionLease:
    """A lease this host holds.

    Args:
        epoch: Grows by one with every acquisition; the owner level of the receive link.
        token: Proves the holding to the store; opaque.
        expires_at: On the monotonic clock; from then on nothing may be delivered or written under it.
    """

    partition_id: str
    owner: str
    epoch: int
    token: str = field(repr=False)
    expires_at: float
