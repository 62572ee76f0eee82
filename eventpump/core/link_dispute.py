"""Whether a host attaches again after another reader has taken the link of a partition whose lease is still its own."""

from __future__ import annotations

from typing import Final

TIMES: Final = 2
"""How often within the period. A member of the group that wrongly believes it owns the partition notices that when it
lists the owners next; one that attaches again after that is no member, and the two would take turns.
"""


class LinkDispute:
    """Counts how often the link of one partition is taken in a `period`, in seconds, by readers that do not own it."""

    __slots__ = ("_attached", "_period")

    def __init__(self, period: float) -> None:
        self._period = period
        self._attached: list[float] = []

    def attaches_again(self, now: float, owner_level: int) -> bool:
        """Return whether to attach again now, or to leave the partition alone for a while. Called once per steal.

        Args:
            now: Seconds on any steady clock.
            owner_level: The owner level of this host's link. Only at level 0 was it taken by an equal one: each
                acquisition of another store has a level of its own, and one that is higher refuses the link.
        """
        self._attached = [at for at in self._attached if now - at < self._period]
        if owner_level or len(self._attached) >= TIMES:
            return False
        self._attached.append(now)
        return True
