"""Faults the emulator commits on request: on which link, at which performative, after how many, how often.

A fault is added with an action and a target, fires on the performatives that match, and is spent after `count` of
them or when it is removed. Several matching faults fire in the order they were added, one per performative.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from eventpump.amqp.performatives import AmqpError


class LinkRole(enum.Enum):
    """What a link does, from the client's side."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    CBS = "cbs"
    MANAGEMENT = "management"


class Performative(enum.Enum):
    """When a fault fires."""

    ATTACH = "attach"
    """A link is being attached."""
    TRANSFER = "transfer"
    """A message arrives from a producer or a request link, or an event is about to go to a consumer."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the attach."""

    condition: str
    description: str = "refused by a fault"


@dataclass(frozen=True, slots=True)
class Reject:
    """Reject a producer's message, storing nothing; answer a request with the status of the condition."""

    condition: str = "com.microsoft:server-busy"
    description: str = "The request was terminated because the entity is being throttled. Please wait 4 seconds."


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait, then go on. What follows on the link waits too.

    Args:
        seconds: How long.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Do nothing more on the link until the fault is removed: an attach, a message or a delivery stays unanswered.

    A consumer's link held at a transfer is stalled: open, silent, and its heartbeats go on.

    Args:
        answers_echo: Whether a flow with echo is still answered on a link that is held at a transfer.
    """

    answers_echo: bool = True


@dataclass(frozen=True, slots=True)
class DropConnection:
    """Cut the connection without a word.

    Args:
        stored: For a producer's message, after storing it.
    """

    stored: bool = False


@dataclass(frozen=True, slots=True)
class StoreLate:
    """Cut the connection without a word, and take a producer's message when the fault is removed.

    It is then judged by what was stored in between, and answered to nobody. What came behind it is lost.
    """


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close the connection with an error."""

    condition: str = "amqp:connection:forced"
    description: str = "The connection was closed by a fault."


@dataclass(frozen=True, slots=True)
class DetachLink:
    """Detach the link with an error; a producer's message is not stored."""

    condition: str = "amqp:link:detach-forced"
    description: str = "The link was force detached by a fault."


Action = Refuse | Reject | Delay | Hold | DropConnection | StoreLate | CloseConnection | DetachLink


def error_of(action: Refuse | Reject | CloseConnection | DetachLink) -> AmqpError:
    """Return the error an action answers with."""
    return AmqpError(action.condition, action.description)


@dataclass(frozen=True, slots=True)
class FaultTarget:
    """A link, as faults see it. Hub and group are in lower case."""

    role: LinkRole
    hub: str | None = None
    partition: str | None = None
    group: str | None = None


@dataclass(eq=False, slots=True)
class Fault:
    """A fault that was added. `fired` tells how often it fired."""

    action: Action
    on: Performative
    target_role: LinkRole | None
    hub: str | None
    partition: str | None
    group: str | None
    after: int
    count: int | None
    fired: int = 0
    removed: bool = False
    _first: asyncio.Event = field(default_factory=asyncio.Event)
    _releases: list[Callable[[], None]] = field(default_factory=list)

    def matches(self, on: Performative, target: FaultTarget) -> bool:
        """Return whether it concerns a performative of a link, spent or not."""
        return (
            self.on is on
            and (self.target_role is None or self.target_role is target.role)
            and (self.hub is None or self.hub == target.hub)
            and (self.partition is None or self.partition == target.partition)
            and (self.group is None or self.group == target.group)
        )

    def fire(self) -> None:
        """Record that it fires."""
        self.fired += 1
        self._first.set()

    async def until_fired(self) -> None:
        """Wait until it has fired."""
        await self._first.wait()

    @property
    def is_spent(self) -> bool:
        """Whether it will not fire again."""
        return self.removed or (self.count is not None and self.fired >= self.count)

    @property
    def holds_something(self) -> bool:
        """Whether something waits for its removal."""
        return bool(self._releases)

    def when_removed(self, release: Callable[[], None]) -> None:
        """Have something called when the fault is removed; at once, where it is already."""
        if self.removed:
            release()
        else:
            self._releases.append(release)

    def remove(self) -> None:
        """End the fault, and let go of what it holds. Twice is fine."""
        self.removed = True
        releases, self._releases = self._releases, []
        for release in releases:
            release()


class Faults:
    """The faults of one emulator. Used from its event loop only."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(
        self,
        action: Action,
        *,
        on: Performative = Performative.TRANSFER,
        role: LinkRole | None = None,
        hub: str | None = None,
        partition: str | None = None,
        group: str | None = None,
        after: int = 0,
        count: int | None = 1,
    ) -> Fault:
        """Add a fault.

        Args:
            role: With the next three, the links it concerns; None is any.
            after: How many matching performatives pass before it fires.
            count: How often it fires; None is every time, until it is removed.

        Raises:
            ValueError: The action cannot be done at that performative.
        """
        if isinstance(action, Refuse) and on is not Performative.ATTACH:
            raise ValueError("an attach is what can be refused")
        if isinstance(action, Reject) and (on is not Performative.TRANSFER or role in (None, LinkRole.CONSUMER)):
            raise ValueError("a transfer of a producer or of a request is what can be rejected: name the role")
        if isinstance(action, StoreLate) and (on is not Performative.TRANSFER or role is not LinkRole.PRODUCER):
            raise ValueError("a producer's transfer is what can be stored late: name the role")
        fault = Fault(
            action,
            on,
            role,
            hub.lower() if hub is not None else None,
            partition,
            group.lower() if group is not None else None,
            after,
            count,
        )
        self._faults.append(fault)
        return fault

    @property
    def is_any_set(self) -> bool:
        """Whether a fault was added and not forgotten yet."""
        return bool(self._faults)

    def clear(self) -> None:
        """Remove every fault."""
        faults, self._faults = self._faults, []
        for fault in faults:
            fault.remove()

    def fire(self, on: Performative, target: FaultTarget) -> Fault | None:
        """Count one performative of a link; the fault that fires on it, if one does."""
        passed, fault = self.allowance(on, target, 1)
        assert passed == 1 or fault is not None
        return fault

    def allowance(self, on: Performative, target: FaultTarget, wanted: int) -> tuple[int, Fault | None]:
        """Count performatives of a link up to the first that a fault fires on.

        Args:
            wanted: How many are about to happen.

        Returns:
            How many happen undisturbed, and the fault that fires on the one after them.
        """
        if not self._faults:
            return wanted, None
        self._faults = [fault for fault in self._faults if not fault.is_spent or fault.holds_something]
        matching = [fault for fault in self._faults if not fault.is_spent and fault.matches(on, target)]
        passed = min([wanted, *(fault.after for fault in matching)])
        for fault in matching:
            fault.after -= passed
        if passed == wanted:
            return passed, None
        firing = next(fault for fault in matching if fault.after == 0)
        firing.fire()
        return passed, firing
