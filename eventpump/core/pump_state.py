"""The states of a partition pump, why it ends, and its deadlines."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from types import MappingProxyType


class CloseReason(enum.Enum):
    """Why a partition is no longer processed here."""

    SHUTDOWN = "shutdown"
    """The host stops, releases the partition, or attaches again to one whose link another reader took. The lease is
    still held: checkpoints may be written until `close` returns."""
    OWNERSHIP_LOST = "ownership lost"
    """Another host, or a reader without leases, has the partition, or the lease expired."""
    FAILED = "failed"
    """The partition cannot be read or processed any more; `process_error` was called with the error."""


class PumpState(enum.Enum):
    """The state of a pump."""

    OPENING = "opening"
    """The processor's `open` has not returned yet."""
    STARTING = "starting"
    """The processor is open; the checkpoint is being read, the start position found, the link opened."""
    RUNNING = "running"
    """Batches are delivered."""
    SUSPENDED = "suspended"
    """Another reader took over the link. No batch is delivered while the manager checks whether the lease is lost
    too."""
    ABORTING = "aborting"
    """The pump ends before `open` has returned. `close` is called only if `open` still returns."""
    DRAINING = "draining"
    """No further batch is delivered; the handler finishes the one it has."""
    CLOSING = "closing"
    """The last checkpoint is written and the processor closed."""
    CLOSED = "closed"
    """The pump has ended."""


class PumpInput(enum.Enum):
    """What can happen to a pump."""

    OPENED = "opened"
    """The processor's `open` returned."""
    STARTED = "started"
    """The start position is found and the link is being opened."""
    STOLEN = "stolen"
    """Another reader took the link."""
    ENDING = "ending"
    """The pump has to end."""
    DRAINED = "drained"
    """No call of the processor runs any more."""
    CLOSED = "closed"
    """The processor is closed, and the last checkpoint was written or dropped."""
    TERMINATED = "terminated"
    """The task of the pump ended, regularly or not."""


TRANSITIONS: Mapping[tuple[PumpState, PumpInput], PumpState] = MappingProxyType(
    {
        (PumpState.OPENING, PumpInput.OPENED): PumpState.STARTING,
        (PumpState.OPENING, PumpInput.ENDING): PumpState.ABORTING,
        (PumpState.STARTING, PumpInput.STARTED): PumpState.RUNNING,
        (PumpState.STARTING, PumpInput.ENDING): PumpState.DRAINING,
        (PumpState.RUNNING, PumpInput.STOLEN): PumpState.SUSPENDED,
        (PumpState.RUNNING, PumpInput.ENDING): PumpState.DRAINING,
        # The link that replaces a stolen one can be stolen as well.
        (PumpState.SUSPENDED, PumpInput.STOLEN): PumpState.SUSPENDED,
        (PumpState.SUSPENDED, PumpInput.ENDING): PumpState.DRAINING,
        (PumpState.ABORTING, PumpInput.OPENED): PumpState.DRAINING,
        (PumpState.ABORTING, PumpInput.ENDING): PumpState.ABORTING,
        (PumpState.ABORTING, PumpInput.DRAINED): PumpState.CLOSING,
        (PumpState.DRAINING, PumpInput.ENDING): PumpState.DRAINING,
        (PumpState.DRAINING, PumpInput.DRAINED): PumpState.CLOSING,
        (PumpState.CLOSING, PumpInput.ENDING): PumpState.CLOSING,
        (PumpState.CLOSING, PumpInput.CLOSED): PumpState.CLOSED,
        # The task can be cancelled in every state.
        **{(state, PumpInput.TERMINATED): PumpState.CLOSED for state in PumpState},
    }
)
"""Every legal transition. Any other pair is a bug of the caller, and raises `KeyError`."""


class PumpLife:
    """The state of one pump, the reason why it ends (the first one given), and its deadlines.

    Of the time an end may take, the handler has three quarters, `close` up to seven eighths, and the rest is for the
    last checkpoint and the lease. Deadlines can only become earlier.

    Args:
        ownership_lost_grace: Seconds that a handler may still run after ownership is lost.
    """

    __slots__ = (
        "_close_timeout",
        "_loss_grace",
        "close_until",
        "ending_since",
        "handler_until",
        "is_lost",
        "overdue_at",
        "reason",
        "state",
        "write_until",
    )

    def __init__(self, *, ownership_lost_grace: float, close_timeout: float) -> None:
        self._loss_grace = ownership_lost_grace
        self._close_timeout = close_timeout
        self.state = PumpState.OPENING
        self.reason: CloseReason | None = None
        self.is_lost = False
        """Whether ownership is lost: nothing may be delivered or written any more."""
        self.ending_since = math.inf
        """When the end began."""
        self.handler_until = math.inf
        """When a handler still running is cancelled."""
        self.close_until = math.inf
        """When `close` still running is cancelled."""
        self.write_until = math.inf
        """Until when writing the last checkpoint is tried."""
        self.overdue_at = math.inf
        """When an end that is not complete is reported."""

    @property
    def is_ending(self) -> bool:
        """Whether no further batch may be delivered."""
        return self.reason is not None

    @property
    def is_suspended(self) -> bool:
        """Whether another reader took the link and the pump does not end yet."""
        return self.state is PumpState.SUSPENDED

    @property
    def is_over(self) -> bool:
        """Whether the pump has ended."""
        return self.state is PumpState.CLOSED

    def opened(self) -> None:
        """Record that the processor's `open` returned."""
        self._move(PumpInput.OPENED)

    def started(self) -> None:
        """Record that batches can be delivered from now on."""
        self._move(PumpInput.STARTED)

    def stolen(self) -> None:
        """Record that another reader took the link."""
        self._move(PumpInput.STOLEN)

    def ending(self, reason: CloseReason, now: float, within: float | None = None) -> None:
        """Begin to end. The first reason is kept; a later call can only shorten the time.

        Args:
            reason: Why the pump ends.
            now: Seconds on any steady clock.
            within: Seconds that the end may take; None for the close time-out.
        """
        self._move(PumpInput.ENDING)
        if self.reason is None:
            self.reason, self.ending_since = reason, now
        within = self._close_timeout if within is None else within
        self.overdue_at = min(self.overdue_at, now + within)
        self.write_until = min(self.write_until, now + within * 15 / 16)
        self.close_until = min(self.close_until, now + within * 7 / 8)
        self.handler_until = min(self.handler_until, now + within * 3 / 4)

    def ownership_lost(self, now: float) -> None:
        """Begin to end because the partition belongs to another owner."""
        if self.is_lost:
            return
        self.is_lost = True
        self.ending(CloseReason.OWNERSHIP_LOST, now)
        self.handler_until = min(self.handler_until, now + self._loss_grace)

    def drained(self) -> bool:
        """Record that no handler runs any more; return whether the processor is open, so that it has to be closed."""
        was_opened = self.state is not PumpState.ABORTING
        self._move(PumpInput.DRAINED)
        return was_opened

    def closed(self) -> None:
        """Record that the processor is closed and no checkpoint will be written."""
        self._move(PumpInput.CLOSED)

    def terminated(self) -> None:
        """Record that the task of the pump ended, whatever its state."""
        self._move(PumpInput.TERMINATED)

    def _move(self, happened: PumpInput) -> None:
        self.state = TRANSITIONS[self.state, happened]
