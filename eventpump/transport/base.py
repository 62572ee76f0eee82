"""The base class of connections, whichever AMQP implementation they use."""

from __future__ import annotations

import asyncio
import itertools
import logging
import platform
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import Any, Protocol, TypeAlias

from eventpump.amqp.performatives import AmqpError, Source, Target
from eventpump.errors import ConnectionLostError, Recovery, ServiceError
from eventpump.eventhubs.conditions import error_for
from eventpump.options.connection import ConnectionSettings

_log = logging.getLogger("eventpump.transport")


Asked: TypeAlias = tuple[float, int]
"""When a request was sent to the service, by the loop's clock, and how much it had answered until then."""


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What a link is attached with; `max_message_size` is in bytes, None for any."""

    name: str
    source: Source
    target: Target
    max_message_size: int | None = None
    properties: Mapping[str, object] = field(default_factory=dict)
    desired_capabilities: Sequence[str] = ()


def snd_settle_mode(*, is_receiver: bool) -> int:
    """Return how messages are settled: received ones by the service as it sends them, sent ones by their outcome.

    The service settles events as it sends them, whatever mode is requested (protocol.md 5.1).
    """
    return 1 if is_receiver else 0


class LinkHandle(Protocol):
    """A link as its AMQP implementation has it; :class:`eventpump.amqp.link.Link` is one."""

    @property
    def is_attached(self) -> bool:
        """Whether both ends are attached."""

    @property
    def credit(self) -> int:
        """How many messages may be sent now."""

    @property
    def drain(self) -> bool:
        """Whether the peer asked to use up the credit it gave."""

    @property
    def remote_max_message_size(self) -> int | None:
        """The largest message the peer takes, in bytes; None where it sets no limit."""

    @property
    def remote_properties(self) -> Mapping[Any, Any]:
        """The link properties the peer attached with."""

    def set_credit(self, credit: int) -> None:
        """Allow the peer to send `credit` more messages."""

    def send(self, payload: bytes, *, message_format: int = 0) -> int:
        """Send a message; return the delivery id its outcome will name."""

    def probe(self) -> bool:
        """Ask the peer for a flow, whose arrival the owner is called for. False where that cannot be asked."""

    def settle(self, first: int, last: int, outcome: Any) -> None:
        """Settle deliveries of the peer."""

    def drained(self) -> None:
        """Use up the credit without sending, as the peer asked with `drain`."""

    def detach(self) -> None:
        """Detach, for good."""


class LinkOwner(Protocol):
    """What a connection calls of the link that was attached; see `ClientLink`."""

    @property
    def entity(self) -> str:
        """The address, for errors."""

    @property
    def is_awaiting(self) -> bool:
        """Whether something is awaited of the peer for this link, beside messages."""

    @property
    def delivery_interval(self) -> float | None:
        """Seconds for which what arrives may be left unread; None if that does not matter to this link."""

    def on_attached(self) -> None:
        """Called when the service has attached the link."""

    def on_messages(self, payloads: list[bytes], unsettled: Sequence[int] = ()) -> None:
        """Called with messages that have arrived."""

    def on_settled(self, payloads: list[bytes]) -> None:
        """Called instead with messages that are settled."""

    def on_credit(self) -> None:
        """Called when more may be sent."""

    def on_answered(self) -> None:
        """Called when a probe was answered."""

    def on_outcomes(self, outcomes: list[tuple[int, Any]]) -> None:
        """Called with the outcomes of messages."""

    def on_detached(self, error: ServiceError) -> None:
        """Called when the link has ended."""


class WaitingSender(Protocol):
    """What a connection calls of a link that waits for the peer to read again; see `ClientSendLink`."""

    def on_writable(self) -> None:
        """Called when the peer reads again."""


@cache
def connection_properties() -> dict[str, str]:
    """Return the properties of the AMQP open, which identify this client."""
    try:
        version = metadata.version("eventpump")
    except metadata.PackageNotFoundError:  # run from a checkout or an archive
        version = "0"
    # `platform.platform()` would start a process, `uname -p`, and the event loop would wait for it.
    system = "-".join(filter(None, (platform.system(), platform.release(), platform.machine())))
    return {
        "product": "eventpump",
        "version": version,
        "framework": f"Python {platform.python_version()}",
        "platform": platform.system(),
        "user-agent": f"eventpump/{version} Python/{platform.python_version()} ({system})"[:512],
    }


class BaseConnection(ABC):
    """A connection of this client; once closed or lost it stays so.

    Every method belongs to the event loop it was opened on.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self.container_id = f"eventpump-{uuid.uuid4().hex}"
        self.error: ServiceError | None = None
        """Why the connection is over; None while it is not."""
        self.ever_attached = False
        """Whether a link was ever attached."""
        self._loop = asyncio.get_running_loop()
        self.requests = 0
        """How many requests wait for an answer."""
        self._names = itertools.count()
        self._heard = 0
        self._unanswered: Asked | None = None

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether links can be attached."""

    @property
    def peer(self) -> tuple[str, int] | None:
        """The address and the port of the socket's peer; None if they are not known."""
        return None

    def require_live(self) -> None:
        """Check that the connection is not over, after each wait for it: its end may have come with the answer."""
        if self.error is not None:
            raise self.error

    @property
    @abstractmethod
    def is_paused(self) -> bool:
        """Whether the peer is slow to read."""

    @abstractmethod
    async def attach(self, owner: LinkOwner, spec: LinkSpec, *, is_receiver: bool) -> LinkHandle:
        """Attach a link; the owner is called with the result.
        Raises `ServiceError` if the connection is over, or full."""

    @abstractmethod
    def flush_soon(self) -> None:
        """Send what is queued, soon."""

    @abstractmethod
    def deliver_together(self) -> None:
        """Read together what arrives, as the links' `delivery_interval` allows. Does nothing where that cannot be."""

    @abstractmethod
    def queued(self, size: int) -> None:
        """Send what is queued, including a message of so many bytes, soon.

        At once if the message is large, or the only one in flight.
        """

    @abstractmethod
    def hold_back(self, link: WaitingSender) -> None:
        """Resume a link, in the order of the calls, when the peer reads again."""

    @abstractmethod
    def abort(self) -> None:
        """Drop the connection at once."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close in order; a peer that does not answer in time is dropped. Cancelled, the connection is dropped.

        Links still open, and what waits on them, fail with a `ConnectionLostError` to give up on.
        """

    @abstractmethod
    def _lose(self, error: ServiceError) -> None:
        """Report the end of the connection to its sessions, links and waiters. Once."""

    def _log_end(self, error: ServiceError) -> None:
        """Log the end of the connection: at INFO if it was in use and ends unexpectedly."""
        is_lost = self.ever_attached and error.recovery is not Recovery.GIVE_UP
        where = self.settings.fully_qualified_namespace
        level, what = (logging.INFO, "was lost") if is_lost else (logging.DEBUG, "has ended")
        _log.log(level, "the connection to %s %s: %s (%s)", where, what, error, self.container_id)

    def new_name(self, node: str) -> str:
        """Return a link name that is unique on this connection, and in the service's logs."""
        return f"{self.container_id}-{next(self._names)}-{node.strip('$').replace('/', '-')}"

    def asked(self) -> Asked:
        """Record that an answer is due from now on; see :meth:`unanswered`."""
        return self._loop.time(), self._heard

    def unanswered(self, asked: Asked) -> bool:
        """Called when no answer came in time, or the caller stopped waiting for it.

        A service that sends no answer for as long as the idle time-out, though a request is pending, is dead, even if
        an intermediary still sends heartbeats: the connection is dropped.
        """
        _, heard = asked
        if self.error is not None or heard != self._heard:
            return self.error is not None
        if self._unanswered is None or self._unanswered[1] != heard:
            self._unanswered = asked
        since, _ = self._unanswered
        # In this form a timer that was set for that moment finds it come: a difference of the two may be rounded down.
        if since + self.settings.idle_timeout > self._loop.time():
            return False
        self.drop("the service answers nothing any more")
        return True

    def drop(self, reason: str) -> None:
        """Drop the connection at once; everything on it fails, to reconnect. Does nothing on one that is over."""
        if self.error is None:
            self._lose(ConnectionLostError(reason))
            self.abort()

    def passing(self, error: ServiceError) -> ServiceError:
        """Return the error for a lost connection: transient if a link was ever attached on it.

        An idle time-out on this side, an expired token, a quota of connections: a connection that had worked may work
        again. A permanent cause is reported again when the next attempt is refused.
        """
        if not self.ever_attached or error.recovery is not Recovery.GIVE_UP:
            return error
        return ConnectionLostError(error.description, condition=error.condition, tracking_id=error.tracking_id)


def end_error(error: AmqpError | None, entity: str | None, lost: Recovery, otherwise: str) -> ServiceError:
    """Return the error for something that the peer ended."""
    if error is None:
        return error_for(None, otherwise, entity=entity, lost=lost)
    return error_for(str(error.condition), error.description, entity=entity, lost=lost)
