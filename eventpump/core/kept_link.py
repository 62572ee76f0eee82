"""A link that is kept open: its states, and whether and when it is opened again after a failure."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from types import MappingProxyType

from eventpump.core.backoff import Backoff, RetryPolicy, is_used_up, least_delay
from eventpump.errors import EntityNotFoundError, Recovery, ServiceError


class KeptLinkState(enum.Enum):
    """The state of a link that is kept open."""

    CLOSED = "closed"
    """It is not to be opened yet."""
    OPENING = "opening"
    """Its position is being found, or it is being attached."""
    ATTACHED = "attached"
    """Messages can be received."""
    WAITING = "waiting"
    """It failed, or was given up, and is opened again after a delay."""
    PARKED = "parked"
    """It is attached, and nothing is to be received for now. If it fails, it is not opened again."""
    ENDED = "ended"
    """It failed for good, or is not wanted any more. It is never opened again."""


class KeptLinkInput(enum.Enum):
    """What can happen to such a link."""

    START = "start"
    """It is to be opened."""
    ATTACHED = "attached"
    """The service has attached it."""
    FAILED = "failed"
    """It ended, or an attempt to open it failed, in a way in which another attempt can help."""
    REOPEN = "reopen"
    """It is to be closed, and opened again."""
    RETRY = "retry"
    """The delay after a failure is over."""
    PARK = "park"
    """Nothing is to be received for now."""
    RESUME = "resume"
    """Messages are to be received again."""
    END = "end"
    """It failed for good, or is to be closed."""


_S, _I = KeptLinkState, KeptLinkInput

KEPT_LINK_STEPS: Mapping[tuple[KeptLinkState, KeptLinkInput], KeptLinkState] = MappingProxyType(
    {
        (_S.CLOSED, _I.START): _S.OPENING,
        (_S.OPENING, _I.ATTACHED): _S.ATTACHED,
        (_S.OPENING, _I.FAILED): _S.WAITING,
        (_S.ATTACHED, _I.FAILED): _S.WAITING,
        (_S.ATTACHED, _I.REOPEN): _S.WAITING,
        (_S.ATTACHED, _I.PARK): _S.PARKED,
        # The end of a link that was given up is noticed later, and may be final.
        (_S.WAITING, _I.FAILED): _S.WAITING,
        (_S.WAITING, _I.RETRY): _S.OPENING,
        # It ends, which is final, because nothing is to be received.
        (_S.PARKED, _I.REOPEN): _S.PARKED,
        (_S.PARKED, _I.PARK): _S.PARKED,
        (_S.PARKED, _I.RESUME): _S.ATTACHED,
        **{(state, _I.END): _S.ENDED for state in _S},
        **{(_S.ENDED, each): _S.ENDED for each in _I},
    }
)
"""Every legal step. Any other pair is a bug of the caller, and raises `KeyError`."""


class LinkFailures:
    """Decides what follows each failure of one link, from the failures before it.

    The transport spaces attempts to connect. So after a lost connection the link only waits long enough to keep many
    links from being opened in the same instant: two delays in a row would make an outage longer.

    Args:
        startup_timeout: Seconds after which a link that was never attached is given up; None for no limit.
    """

    __slots__ = ("_backoff", "_policy", "_quiet_until", "_report_backoff", "_rng", "_startup_timeout", "_was_attached")

    def __init__(self, policy: RetryPolicy, rng: random.Random, startup_timeout: float | None) -> None:
        self._policy = policy
        self._rng = rng
        self._startup_timeout = startup_timeout
        self._backoff = Backoff.of(policy)
        self._report_backoff = Backoff(policy.base_delay, max(policy.base_delay, policy.max_delay))
        self._quiet_until = float("-inf")
        self._was_attached = False

    @property
    def in_a_row(self) -> int:
        """How many failures there were without a success between them; those of connections do not count."""
        return self._backoff.failures

    def attached(self) -> None:
        """Record that the link was attached."""
        self._was_attached = True
        self._report_backoff.reset()
        self._quiet_until = float("-inf")

    def worked(self) -> None:
        """Record that the link that failed now had worked: messages came, or it lived long."""
        self._backoff.reset()

    def has_lived(self, seconds: float) -> bool:
        """Return whether a link that lived for some seconds has worked, even if no message came."""
        return seconds > self._policy.max_delay

    def is_final(self, error: ServiceError, *, was_opened: bool, is_located: bool) -> bool:
        """Return whether the link is given up. A hub that was deleted while it was open may have been recreated.

        Args:
            is_located: Whether its position is found anew for each link.
        """
        if error.recovery is not Recovery.RECONNECT and is_used_up(self._policy, self._backoff.failures):
            return True
        was_deleted = was_opened and isinstance(error, EntityNotFoundError)
        return error.recovery is Recovery.GIVE_UP and not (was_deleted and is_located)

    def delay_after(self, error: ServiceError, *, is_own: bool) -> float:
        """Count a failure, and return the seconds until the link is opened again; closed here, it has not failed."""
        if error.recovery is Recovery.RECONNECT or is_own:
            return self._rng.uniform(0, self._policy.base_delay)
        return self._backoff.next(self._rng, at_least=least_delay(error))

    def is_too_late(self, elapsed: float) -> bool:
        """Return whether no attempt follows after so many seconds, because the link was never attached."""
        return not self._was_attached and self._startup_timeout is not None and elapsed >= self._startup_timeout

    def is_reported(self, error: ServiceError, now: float) -> bool:
        """Return whether to report a failure: during an outage, ever fewer of them; otherwise each."""
        if error.recovery is not Recovery.RECONNECT:
            return True
        if now < self._quiet_until:
            return False
        self._quiet_until = now + self._report_backoff.next(self._rng)
        return True
