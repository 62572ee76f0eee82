"""When a lease in a file has expired, also if the machine's clock was set meanwhile. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from eventpump.interfaces import Clock, MachineClock


@dataclass(frozen=True, slots=True)
class Expiry:
    """When a lease expires, as its owner wrote it.

    Args:
        wall: Seconds since the Unix epoch.
        boot_id: Identifies the clock that `boot` was read on; None if there is none.
        boot: Seconds on that clock.
        duration: How long the lease lives without renewal, in seconds; None where it is not known.
    """

    wall: float
    boot_id: str | None = None
    boot: float = 0.0
    duration: float | None = None


@dataclass(frozen=True, slots=True)
class _Sighting:
    token: str
    expiry: Expiry
    first_seen: float


class ExpiryJudge:
    """Decides which leases have expired.

    By the clock of the boot in which the lease was written, if that is the present one: it cannot be set. Otherwise by
    the wall clock, or once the lease was seen unchanged for as long as it lives without renewal. Another boot does not
    prove that its owner has ended: some containers have a boot id of their own, and run side by side.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._machine = clock if isinstance(clock, MachineClock) and clock.boot_id is not None else None
        self._boot_id = None if self._machine is None else self._machine.boot_id
        self._seen: dict[str, _Sighting] = {}

    def expiry_in(self, duration: float) -> Expiry:
        """Return the expiry of a lease that is acquired or renewed now, for so many seconds."""
        wall = self._clock.time() + duration
        if self._machine is None:
            return Expiry(wall, duration=duration)
        return Expiry(wall, self._boot_id, self._machine.boot_time() + duration, duration)

    def is_held(self, partition_id: str, token: str | None, expiry: Expiry, read_at: float) -> bool:
        """Decide whether a lease that was just read is held.

        Args:
            read_at: When the reading began, on the clock's `monotonic`.
        """
        if token is None:
            return False
        machine = self._machine
        if machine is not None and expiry.boot_id == self._boot_id:
            return machine.boot_time() < expiry.boot
        if self._clock.time() >= expiry.wall:
            return False
        seen = self._seen.get(partition_id)
        if seen is None or (seen.token, seen.expiry) != (token, expiry):
            # Counted from now, after the reading: a renewal may have come in between the two.
            self._seen[partition_id] = _Sighting(token, expiry, self._clock.monotonic())
            return True
        return expiry.duration is None or read_at < seen.first_seen + expiry.duration
