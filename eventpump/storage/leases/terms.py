"""The times of members of one consumer group that keep their ownership in blobs, and which of them do not go together.

No SDK stores when an ownership expires: each member goes by its own time. One that renews late, by the time of another,
loses its partitions to it again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MemberTerms:
    """How the members of one SDK keep partitions, with its defaults.

    Args:
        renewed_within: The longest time between two renewals of an ownership, in seconds.
        expires_after: After how many seconds without a renewal it takes a partition of another member.
    """

    name: str
    renewed_within: float
    expires_after: float


MEMBERS: Final = (
    MemberTerms("JavaScript", 10.0, 60.0),
    MemberTerms("Go", 13.0, 60.0),
    MemberTerms(".NET", 30.0, 120.0),
    MemberTerms("Java", 30.0, 120.0),
    MemberTerms("Python", 36.0, 180.0),
)

TRIES: Final = 3
"""Renewals that must fit into the time after which an ownership expires: one may fail, and one be late."""


def find_conflicts(lease_duration: float, owner_timeout: float, renew_interval: float) -> list[str]:
    """Return what members of other SDKs would do to a host with these times, or it to them; one text for each.

    Args:
        lease_duration: How long the host's ownership is valid without a renewal, in seconds.
        owner_timeout: After how many seconds without a renewal the host takes partitions of other SDKs' members.
        renew_interval: How often it renews, in seconds.
    """
    found = []
    first = min(each.expires_after for each in MEMBERS)
    if eager := [each.name for each in MEMBERS if each.expires_after < TRIES * renew_interval]:
        found.append(
            f"a renew_interval of {renew_interval:g} s is too long for members of {_listed(eager)}, which take "
            f"partitions that were not renewed for {first:g} s: they take them from this host after a late renewal; "
            f"at most {first / TRIES:g} s goes with all"
        )
    if eager := [each.name for each in MEMBERS if each.expires_after < lease_duration]:
        found.append(
            f"a lease_duration of {lease_duration:g} s is longer than the {first:g} s after which members of "
            f"{_listed(eager)} take a partition: a host that cannot renew goes on beside the next owner until then; at "
            f"most {first:g} s goes with all"
        )
    slowest = max(each.renewed_within for each in MEMBERS)
    if slow := [each.name for each in MEMBERS if TRIES * each.renewed_within > owner_timeout]:
        found.append(
            f"an owner_timeout of {owner_timeout:g} s is too short for members of {_listed(slow)}, which renew within "
            f"{slowest:g} s: this host takes their partitions after a late renewal; at least {TRIES * slowest:g} s "
            "goes with all"
        )
    return found


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
