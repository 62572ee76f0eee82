"""What the parts of a pump share while it owns its partition: the lease, the state, the tasks, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

from eventpump.aio.tasks import StoppedError, TaskSet, wait_for_event
from eventpump.cancellation import is_failure
from eventpump.clock import reading_of
from eventpump.consumer.calls.handler import PumpEndedError, as_exception
from eventpump.consumer.lease.services import HostServices
from eventpump.core.lease import PartitionLease
from eventpump.core.pump_state import CloseReason, PumpLife, PumpState
from eventpump.options.consumer import HostSettings
from eventpump.reports import UnexpectedFailure

_T = TypeVar("_T")

_SUSPENDED: Final = PumpState.SUSPENDED
"""Read for each batch: reading a member of an enumeration from its class is slow."""


class Ownership:
    """What all parts of one pump share: its lease, its state, its tasks, and how to end it.

    Args:
        settings: Its options.
        end: Ends the pump in order, for a reason.
        on_lost: Called with how it was found that the lease is lost.

    Attributes:
        ending: Set when the pump begins to end.
        failure: Why the pump failed, if it did not end because of the lease or the host.
    """

    def __init__(
        self,
        services: HostServices,
        lease: PartitionLease,
        subscription: str,
        settings: HostSettings,
        *,
        end: Callable[[CloseReason], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.services = services
        self.subscription = subscription
        self.settings = settings
        self.partition_id = lease.partition_id
        self.end = end
        self.lost = on_lost
        self.lease = lease
        self.life = PumpLife(ownership_lost_grace=settings.ownership_lost_grace, close_timeout=settings.close_timeout)
        self.ending = asyncio.Event()
        self.tasks = TaskSet(self.unexpected)
        self.failure: Exception | None = None
        # The clock of the services, with as few calls as it can be read with: it is for each batch.
        self._now, self._ahead = reading_of(services.clock)

    def is_lease_valid(self) -> bool:
        """Return whether the lease has not expired by the host's own clock. If it has, it is lost."""
        return self._now() < self.lease.expires_at + self._ahead or self._ran_out()

    def may_deliver(self) -> bool:
        """Return whether a batch may be delivered now."""
        life = self.life
        if life.reason is not None or life.state is _SUSPENDED:
            return False
        # As `is_lease_valid`, without a call for each batch.
        return self._now() < self.lease.expires_at + self._ahead or self._ran_out()

    def _ran_out(self) -> bool:
        self.lost("it ran out")
        return False

    def goes_on(self) -> bool:
        """Return whether the pump neither ends nor has lost its link to another reader."""
        return not self.life.is_ending and not self.life.is_suspended

    def check_ending(self) -> None:
        """Raise `PumpEndedError` if the pump ends."""
        if self.life.is_ending:
            raise PumpEndedError

    def fail(self, error: Exception) -> None:
        """End the pump because of an error. The first one is kept."""
        if self.failure is None:
            self.failure = error
        self.end(CloseReason.FAILED)

    def refused(self) -> NoReturn:
        """End the pump because the store refused a write. Raises `PumpEndedError`."""
        self.lost("a checkpoint was refused")
        raise PumpEndedError

    async def pause(self, delay: float) -> None:
        """Wait for a time in seconds. Raises `PumpEndedError` if the pump ends."""
        await wait_for_event(self.ending, delay)
        self.check_ending()

    async def unless_ending(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a step of the pump. Raises `PumpEndedError` if the pump ends first."""
        try:
            return await self.tasks.unless(self.ending, work, f"eventpump step of partition {self.partition_id}")
        except StoppedError:
            raise PumpEndedError from None
        except Exception:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            raise as_exception("a step of the pump", error) from error

    def report(self, kind: Callable[..., Any], *facts: object) -> None:
        """Report something of this partition and subscription: a class with its fields."""
        services = self.services
        services.reporter.report(kind(services.owner_id, self.partition_id, *facts, subscription=self.subscription))

    def unexpected(self, operation: str, error: BaseException) -> None:
        """Report an error that should not be possible."""
        self.report(UnexpectedFailure, operation, error)
