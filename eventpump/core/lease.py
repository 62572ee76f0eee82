"""The values that describe leases, shared by manager and stores."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LeaseSnapshot:
    """A partition's lease in a listing.

    Args:
        owner: The host named by the lease; None if it was released or never taken.
        is_held: Whether the lease was valid at the listing. An expired one keeps its last owner's name.
        token: Identifies this lease to the store, in addition to the owner, so that only it is stolen; opaque. None for
            a store that needs none.
        epoch: The epoch of the last acquisition, 0 before the first; None if the store's listing does not contain it.
        is_foreign: Whether its owner is a processor of another SDK, which balances by rules of its own. Default: False.
    """

    partition_id: str
    owner: str | None
    is_held: bool
    token: str | None = field(default=None, repr=False)
    epoch: int | None = None
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class PartitionLease:
    """A lease that this host holds.

    Args:
        epoch: Increases by one with every acquisition.
        owner_level: The owner level of the receive link. Of two readers, the one with the higher level is served.
        token: Proves the ownership to the store, and identifies the acquisition: the same after renewals; opaque.
        expires_at: On the monotonic clock; from then on nothing may be delivered or written under it.
    """

    partition_id: str
    owner: str
    epoch: int
    owner_level: int
    token: str = field(repr=False)
    expires_at: float
