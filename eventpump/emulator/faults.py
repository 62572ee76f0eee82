"""Faults that the emulator injects on request: on which link, at which performative, after how many, how often.

A fault is added with an action and a target, fires on matching performatives, and is spent after `count` of them or
when it is removed. Several matching faults fire in the order they were added, one per performative.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from eventpump.amqp.performatives import AmqpError
from eventpump.eventhubs.conditions import CONNECTION_FORCED, DETACH_FORCED, SERVER_BUSY


class LinkRole(enum.Enum):
    """The role of a link, from the client's point of view."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    CBS = "cbs"
    MANAGEMENT = "management"


class Performative(enum.Enum):
    """When a fault fires."""

    OPEN = "open"
    """A connection was opened: with an action that follows the answer."""
    BEGIN = "begin"
    """A session was begun: with an action that follows the answer."""
    ATTACH = "attach"
    """A link is being attached."""
    TRANSFER = "transfer"
    """A message arrives from a producer or a request link, or an event is about to go to a consumer."""
    DETACH = "detach"
    """A client has detached a link: with an action that follows the answer."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse the attach."""

    condition: str
    description: str = "refused by a fault"


@dataclass(frozen=True, slots=True)
class Reject:
    """Reject a producer's message, storing nothing; answer a request with the status of the condition."""

    condition: str = SERVER_BUSY
    description: str = "The request was terminated because the entity is being throttled. Please wait 4 seconds."


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait so many seconds, then continue. Everything after it on the link waits too."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Do nothing more on the link until the fault is removed: an attach, a message or a delivery stays unanswered.

    A consumer's link held at a transfer is stalled: open and silent, while its connection still sends heartbeats.

    Args:
        answers_echo: Whether a flow with echo is still answered on a link that is held at a transfer.
    """

    answers_echo: bool = True


@dataclass(frozen=True, slots=True)
class DropConnection:
    """Drop the connection without a close.

    Args:
        stored: For a producer's message: store it first.
    """

    stored: bool = False


@dataclass(frozen=True, slots=True)
class StoreLate:
    """Drop the connection without a close, and process a producer's message when the fault is removed.

    The message is then checked against what was stored in between, and is not answered. Messages after it are lost.
    """


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close the connection with an error.

    Args:
        answered: Answer first, in the same write: a message is processed, an event is sent.
    """

    condition: str = CONNECTION_FORCED
    description: str = "The connection was closed by a fault."
    answered: bool = False


@dataclass(frozen=True, slots=True)
class EndSession:
    """End the link's session, or the one that was begun, with an error. Its links are gone."""

    condition: str = DETACH_FORCED
    description: str = "The session was ended by a fault."
    answered: bool = False


@dataclass(frozen=True, slots=True)
class DetachLink:
    """Detach the link with an error; a producer's message is not stored. An attach is answered first, in one write."""

    condition: str = DETACH_FORCED
    description: str = "The link was force detached by a fault."
    answered: bool = False


Action = Refuse | Reject | Delay | Hold | DropConnection | StoreLate | CloseConnection | EndSession | DetachLink


def answers_first(action: Action) -> bool:
    """Return whether an action follows the answer to the performative on which it fires."""
    return isinstance(action, CloseConnection | EndSession | DetachLink) and action.answered


def error_of(action: Refuse | Reject | CloseConnection | EndSession | DetachLink) -> AmqpError:
    """Return the error with which an action answers."""
    return AmqpError(action.condition, action.description)


@dataclass(frozen=True, slots=True)
class FaultTarget:
    """The properties of a link that faults match; an open and a begin have none. Hub and group are in lower case."""

    role: LinkRole | None
    hub: str | None = None
    partition: str | None = None
    group: str | None = None


@dataclass(eq=False, slots=True)
class Fault:
    """A fault that was added. `fired` is how often it has fired."""

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
        """Return whether it matches a performative of a link, spent or not."""
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
        """Whether a link or message is held until its removal."""
        return bool(self._releases)

    def when_removed(self, release: Callable[[], None]) -> None:
        """Call a function when the fault is removed; at once if it already is."""
        if self.removed:
            release()
        else:
            self._releases.append(release)

    def remove(self) -> None:
        """End the fault, and release what it holds. May be called twice."""
        self.removed = True
        releases, self._releases = self._releases, []
        for release in releases:
            release()


_ANSWERED: Mapping[Performative, tuple[type[Action], ...]] = {
    Performative.OPEN: (CloseConnection,),
    Performative.BEGIN: (CloseConnection, EndSession),
    Performative.DETACH: (CloseConnection, EndSession),
}
"""The actions at the performatives that are always answered."""


def _name(action: type[Action]) -> str:
    return action.__name__


class Faults:
    """The faults of one emulator. Used only from its event loop."""

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
            role: With the next three parameters, the links that it matches; None for any.
            after: How many matching performatives pass before it fires.
            count: How often it fires; None for every time, until it is removed.

        Raises:
            ValueError: The action is not possible at that performative.
        """
        if isinstance(action, Refuse) and on is not Performative.ATTACH:
            raise ValueError("Refuse is only possible at an attach")
        if isinstance(action, Reject) and (on is not Performative.TRANSFER or role in (None, LinkRole.CONSUMER)):
            raise ValueError("Reject is only possible at a transfer of a producer or a request: set the role")
        if isinstance(action, StoreLate) and (on is not Performative.TRANSFER or role is not LinkRole.PRODUCER):
            raise ValueError("StoreLate is only possible at a producer's transfer: set the role")
        if on in _ANSWERED and not (answers_first(action) and isinstance(action, _ANSWERED[on])):
            raise ValueError(f"at {on.value}, possible is with answered=True: {' or '.join(map(_name, _ANSWERED[on]))}")
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
        """Whether there is a fault that was added and not cleared."""
        return bool(self._faults)

    def clear(self) -> None:
        """Remove every fault."""
        faults, self._faults = self._faults, []
        for fault in faults:
            fault.remove()

    def fire(self, on: Performative, target: FaultTarget) -> Fault | None:
        """Count one performative of a link, and return the fault that fires on it, or None."""
        passed, fault = self.allowance(on, target, 1)
        assert passed == 1 or fault is not None
        return fault

    def allowance(self, on: Performative, target: FaultTarget, wanted: int) -> tuple[int, Fault | None]:
        """Count performatives of a link up to the first on which a fault fires.

        Args:
            wanted: How many are about to happen.

        Returns:
            How many happen without a fault, and the fault that fires on the next one.
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
