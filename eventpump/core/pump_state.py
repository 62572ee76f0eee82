"""The life of a partition pump: its states, why it ends, and by when."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from types import MappingProxyType


class CloseReason(enum.Enum):
    """Why a partition is no longer processed here."""

    SHUTDOWN = "shutdown"
    """The host stops. The lease is still held: checkpoints may be written until `close` returns."""
    OWNERSHIP_LOST = "ownership lost"
    """Another host, or a reader outside the fleet, has the partition, or the lease ran out."""
    FAILED = "failed"
    """The partition cannot be read or processed any more; `process_error` had the error."""


class PumpState(enum.Enum):
    """Where a pump stands."""

    OPENING = "opening"
    """The processor is being opened, the checkpoint read, the link attached."""
    RUNNING = "running"
    """Batches are delivered."""
    DRAINING = "draining"
    """No further batch; the handler finishes the one it has."""
    CLOSING = "closing"
    """The last checkpoint is written and the processor closed."""
    CLOSED = "closed"
    """Nothing of it is left."""


class PumpInput(enum.Enum):
    """What can happen to a pump."""

    OPENED = "opened"
    ENDING = "ending"
    DRAINED = "drained"
    CLOSED = "closed"


TRANSITIONS: Mapping[tuple[PumpState, PumpInput], PumpState] = MappingProxyType(
    {
        (PumpState.OPENING, PumpInput.OPENED): PumpState.RUNNING,
        (PumpState.OPENING, PumpInput.ENDING): PumpState.DRAINING,
        (PumpState.RUNNING, PumpInput.ENDING): PumpState.DRAINING,
        (PumpState.DRAINING, PumpInput.ENDING): PumpState.DRAINING,
        (PumpState.DRAINING, PumpInput.DRAINED): PumpState.CLOSING,
        (PumpState.CLOSING, PumpInput.ENDING): PumpState.CLOSING,
        (PumpState.CLOSING, PumpInput.CLOSED): PumpState.CLOSED,
        (PumpState.CLOSED, PumpInput.ENDING): PumpState.CLOSED,
    }
)
"""Every legal step. What is missing cannot happen: the shell would be wrong."""


class PumpLife:
    """One pump's state, the reason of its end (decided once), and its deadlines.

    Of the time an end may take, the handler has three quarters, `close` up to seven eighths, and the rest is for the
    last checkpoint and the lease. Deadlines only ever come nearer.

    :param ownership_lost_grace: how long a handler may go on once ownership is lost, in seconds.
    :param close_timeout: how long an end may take where nobody says otherwise, in seconds.
    """

    __slots__ = (
        "_close_timeout",
        "_loss_grace",
        "close_until",
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
        """Whether ownership is gone: nothing may be delivered or written any more."""
        self.handler_until = math.inf
        """When a handler still running is cancelled."""
        self.close_until = math.inf
        """When `close` still running is cancelled."""
        self.write_until = math.inf
        """Until when the last checkpoint is tried."""
        self.overdue_at = math.inf
        """When an end that has not come is reported."""

    @property
    def is_ending(self) -> bool:
        """Whether no further batch may be delivered."""
        return self.reason is not None

    def opened(self) -> None:
        """Note that batches can come now."""
        self._move(PumpInput.OPENED)

    def ending(self, reason: CloseReason, now: float, within: float | None = None) -> None:
        """Begin to end. The first reason stands; a later call can only shorten the time.

        :param within: how long it may take, in seconds; None for the close time-out.
        """
        self._move(PumpInput.ENDING)
        if self.reason is None:
            self.reason = reason
        within = self._close_timeout if within is None else within
        self.overdue_at = min(self.overdue_at, now + within)
        self.write_until = min(self.write_until, now + within * 15 / 16)
        self.close_until = min(self.close_until, now + within * 7 / 8)
        self.handler_until = min(self.handler_until, now + within * 3 / 4)

    def ownership_lost(self, now: float) -> None:
        """Begin to end because the partition is not ours any more."""
        if self.is_lost:
            return
        self.is_lost = True
        self.ending(CloseReason.OWNERSHIP_LOST, now)
        self.handler_until = min(self.handler_until, now + self._loss_grace)

    def drained(self) -> None:
        """Note that no handler runs any more."""
        self._move(PumpInput.DRAINED)

    def closed(self) -> None:
        """Note that nothing is left."""
        self._move(PumpInput.CLOSED)

    def _move(self, happened: PumpInput) -> None:
        self.state = TRANSITIONS[self.state, happened]
