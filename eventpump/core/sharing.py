"""How several subscriptions share one receive link: who skips what, when it is opened again, who holds others back.

Sequence numbers of a partition grow by one per event (Event Hubs never reorders a partition), so a place in the stream
is one number: that of the event that a member gets next.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SLOWED_AT = 0.5
"""The share of the cache that one member alone keeps at which it counts as slowing the others down."""

STOPPED_AT = 0.95
"""The share at which it counts as stopping them: credit is given by halves, so less than this may never be free."""

FREE_AT = 0.25
"""The share below which it does not hold the others back any more."""


class Placement(enum.Enum):
    """What a member that joins needs."""

    OPEN = "open"
    """There is no link yet: it is to be opened at the lowest number of all members."""
    IN_CACHE = "in cache"
    """The cache, and what comes after it, has all that the member still needs."""
    REOPEN = "reopen"
    """What the member needs has been dropped from the cache: the link must be opened again, at the member's number."""


class ShareLedger:
    """The members of one shared link: the number that each gets next.

    A member that the link's events are behind of *skips* them: the link was opened, or opened again, for another one.
    """

    __slots__ = ("_next", "_oldest")

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._oldest: int | None = None

    @property
    def members(self) -> tuple[str, ...]:
        """The members, in the order in which they joined."""
        return tuple(self._next)

    @property
    def lowest(self) -> int | None:
        """The lowest number that a member gets next; None where there is no member."""
        return min(self._next.values(), default=None)

    @property
    def is_open(self) -> bool:
        """Whether the link was opened."""
        return self._oldest is not None

    def opened(self, number: int) -> None:
        """Record that the link was opened, or opened again, so that the first event in the cache has that number."""
        self._oldest = number

    def freed(self, oldest: int) -> None:
        """Record the number of the oldest event in the cache; of an empty one, the number of the next to come."""
        assert self._oldest is not None
        self._oldest = max(self._oldest, oldest)

    def closed(self) -> None:
        """Record that there is no link any more. The members stay."""
        self._oldest = None

    def join(self, name: str, number: int) -> Placement:
        """Add a member that gets the event of a sequence number next, and return what it needs."""
        if name in self._next:
            raise ValueError(f"{name} is a member already")
        self._next[name] = number
        if self._oldest is None:
            return Placement.OPEN
        return Placement.IN_CACHE if number >= self._oldest else Placement.REOPEN

    def leave(self, name: str) -> None:
        """Remove a member. Leaving twice is fine."""
        self._next.pop(name, None)

    def passed(self, name: str, number: int) -> None:
        """Record that a member has got, or skipped, the event of a number. Raises `ValueError` if it had a later
        one."""
        if number < self._next[name]:
            raise ValueError(f"{name} had number {number} already")
        self._next[name] = number + 1

    def is_new(self, name: str, number: int) -> bool:
        """Return whether a member has not had the event of a number yet."""
        return number >= self._next[name]


class LinkState(enum.Enum):
    """What one member reads over."""

    OPENING = "opening"
    """Nothing yet: its position is being found, or its link is being opened."""
    SHARED = "shared"
    """The link that all members share."""
    OWN = "own"
    """A link of its own in its catch-up group, while it is behind."""
    WAITING = "waiting"
    """The shared link, which was opened again further back for another member and has not come to its position yet."""
    PAUSED = "paused"
    """No link: it is paused."""
    SUSPENDED = "suspended"
    """No link: it has held the others back, and does not run until it is resumed."""
    ENDED = "ended"
    """No link: it was ended, by this host or another one."""


class PressureState(enum.Enum):
    """How a member holds the others back."""

    FREE = "free"
    """It does not."""
    SLOWED = "slowed"
    """It keeps so much of the cache that the link's credit shrinks."""
    STOPPED = "stopped"
    """The cache is full because of it: the link gets no credit."""


@dataclass(frozen=True, slots=True)
class Held:
    """A member that has held the others back for its patience.

    Attributes:
        share: The share of the cache that it alone keeps, from 0 to 1.
        seconds: For how long it has held them back.
    """

    share: float
    seconds: float


class Pressure:
    """How far one member holds the others of a shared link back, and since when. With hysteresis.

    Args:
        slow_after: Seconds after which a member that holds others back is slow; it is reported again each time that the
            time has doubled.
    """

    __slots__ = ("_report_after", "_slow_after", "share", "since", "state")

    def __init__(self, slow_after: float) -> None:
        self._slow_after = slow_after
        self._report_after = slow_after
        self.state = PressureState.FREE
        """The state, as last observed."""
        self.share = 0.0
        """The share of the cache that it alone keeps, as last observed."""
        self.since: float | None = None
        """Since when it has held the others back; None while it does not."""

    def observe(self, held: tuple[int, int], room: tuple[int, int], now: float) -> Held | None:
        """Record how much of the cache the member alone keeps.

        Args:
            held: Events and bytes that would be freed without it; see `core.cache.Cursor.held`.

        Returns:
            What to report; None where nothing.
        """
        share = self.share = min(1.0, max(held[0] / room[0], held[1] / room[1]))
        if share >= STOPPED_AT:
            self.state = PressureState.STOPPED
        elif share >= SLOWED_AT or (self.state is not PressureState.FREE and share > FREE_AT):
            self.state = PressureState.SLOWED
        else:
            self.state = PressureState.FREE
        if self.state is PressureState.FREE:
            self.since, self._report_after = None, self._slow_after
            return None
        if self.since is None:
            self.since = now
        # By the very sum that `next_report` returns: its difference from `since` may be rounded to less.
        if now < self.since + self._report_after:
            return None
        seconds = now - self.since
        self._report_after = max(seconds, self._report_after) * 2
        return Held(share, seconds)

    @property
    def next_report(self) -> float | None:
        """When a report is due next if nothing changes; None while the member does not hold the others back."""
        return None if self.since is None else self.since + self._report_after
