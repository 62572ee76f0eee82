"""The thread that runs a connection of uamqp.

uamqp is made for one thread, calls back while it works, and offers nothing to wait on. So each connection has a thread
of its own, the only one that uses uamqp's objects: it carries out the requests of the event loop, lets uamqp work,
reports the results to the event loop, and polls again, soon after something happened and at most twenty times a second
while nothing does. If uamqp's socket can be found, incoming data ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from eventpump.amqp.performatives import Accepted, AmqpError, Modified, Rejected, Released
from eventpump.amqp.types import Array, Symbol
from eventpump.errors import EventError, ProtocolError
from eventpump.transport.base import LinkSpec, snd_settle_mode
from eventpump.transport.uamqp.codec import from_message, from_value, to_message, to_value
from eventpump.transport.uamqp.door import SASLAnonymous, c_uamqp
from eventpump.transport.uamqp.pace import Pace
from eventpump.transport.uamqp.watch import Watch, open_sockets

_SHORTEST: Final = 0.0002
_LONGEST: Final = 0.05
"""Seconds between looks: right after something happened, and while nothing does."""
SESSIONS: Final = 4
"""uamqp begins a session only as the connection opens, so all there will be are made before."""
HANDLES: Final = 255
"""Links per session: the service takes no more (protocol.md 2.3)."""
_WINDOW: Final = 65_536
_MAX_FRAME_SIZE: Final = 65_536
_BATCH: Final = 256
"""Messages after which the event loop gets them, though uamqp has more."""

# States of uamqp's connections, senders and receivers, and results of its sends. A connection that uamqp gave up is
# discarding: it waits for an answer to its close.
_OPENED: Final = 9
_DISCARDING: Final = 12
_ENDED: Final = (13, 14)
_OPENING: Final = 2
_OPEN: Final = 3
_ERROR: Final = 5
_OK: Final = 1

Ask = tuple[Callable[..., None], tuple[Any, ...]]


class LinkOwner(Protocol):
    """Callbacks of a link, called in the event loop."""

    def on_attached(self, max_message_size: int | None, properties: Mapping[Any, Any]) -> None:
        """Both ends are attached."""

    def on_messages(self, payloads: list[bytes]) -> None:
        """Messages arrived."""

    def on_outcome(self, delivery_id: int, outcome: Any) -> None:
        """A message was settled; or not sent, where the outcome is an error."""

    def on_detached(self, error: AmqpError | None, is_free: bool) -> None:
        """The link is over; whether another can take its place in the session."""


class ConnectionOwner(Protocol):
    """Callbacks of a connection, called in the event loop."""

    def on_calls(self, calls: list[Ask]) -> None:
        """Make the calls that the worker scheduled, in order."""

    def on_opened(self) -> None:
        """The service opened."""

    def on_closed(self, error: AmqpError | None) -> None:
        """The service closed."""

    def on_lost(self, reason: str | None) -> None:
        """The stream ended, or uamqp gave up."""

    def on_ended(self) -> None:
        """The thread is at its end. Nothing comes after it."""


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """Where to connect, and as whom; `hostname` is that of the AMQP open."""

    host: str
    port: int
    hostname: str
    container_id: str
    idle_timeout: float
    ca_file: str
    properties: Mapping[str, str]


class Worker:
    """A connection of uamqp in a thread of its own.
    Made, started and asked in the event loop, with which it is closed."""

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        owner: ConnectionOwner,
        loop: asyncio.AbstractEventLoop,
        *,
        pace: Pace | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._owner = owner
        self._loop = loop
        self._asked: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self._calls: list[Ask] = []
        self._rechecks: list[Callable[[], None]] = []
        self._pace = pace or Pace(_SHORTEST, _LONGEST)
        self._watch = Watch()
        self._is_over = False
        self._sessions: list[_Session] = []
        self._links: dict[int, _Link] = {}
        self._gone: list[_Link] = []
        self._kept: list[_Link] = []
        self._auth: Any = None
        self._connection: Any = None
        # A daemon, because uamqp may be stuck in a connect when the interpreter ends.
        self._thread = threading.Thread(target=self._run, name=f"uamqp {endpoint.host}:{endpoint.port}", daemon=True)

    # ------------------------------------------------------------------------- called in the event loop

    def start(self) -> None:
        """Connect."""
        self._thread.start()

    def attach(self, handle: int, session: int, owner: LinkOwner, spec: LinkSpec, *, is_receiver: bool) -> None:
        """Attach a link, which is called by this handle from now on."""
        self._ask(self._attach, (handle, session, owner, spec, is_receiver))

    def set_credit(self, handle: int, credit: int) -> None:
        """Allow the service to send `credit` more messages."""
        self._ask(self._set_credit, (handle, credit))

    def send(self, handle: int, delivery_id: int, payload: bytes, message_format: int) -> None:
        """Send a message."""
        self._ask(self._send, (handle, delivery_id, payload, message_format))

    def detach(self, handle: int) -> None:
        """Detach a link."""
        self._ask(self._detach, (handle,))

    def _ask(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._asked.put((action, arguments))
        if self._asked.qsize() == 1:
            self._watch.wake()  # or it was woken for an earlier request

    def stop(self) -> None:
        """End the connection, and the thread."""
        self._ask(self._stop, ())

    def join(self) -> None:
        """Wait for the thread, which has called the owner's `on_ended`."""
        self._thread.join()

    # -------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            self._open()
            while not (self._is_over or self._loop.is_closed()):
                is_asked = self._take(self._pace.wait)
                if not self._is_over:
                    self._connection.do_work()
                    self._run_rechecks()
                    self._clear()
                has_reported = self.flush()
                self._watch.looked(found=has_reported)
                self._pace.looked(found=has_reported or is_asked)
        except Exception as error:
            # uamqp may raise anything, with little detail: the connection cannot be used any more.
            self.call_soon(self._owner.on_lost, f"uamqp failed: {error}")
        finally:
            self._is_over = True
            try:
                self._destroy()
            finally:
                self.call_soon(self._owner.on_ended)
                self.flush()

    def _open(self) -> None:
        endpoint = self._endpoint
        self._auth = SASLAnonymous(endpoint.host, port=endpoint.port, verify=endpoint.ca_file)
        connection = self._connection = c_uamqp.create_connection(
            self._auth.sasl_client.get_client(), endpoint.hostname.encode(), endpoint.container_id.encode(), self
        )
        connection.subscribe_to_close_event(self)
        connection.idle_timeout = int(endpoint.idle_timeout * 1000)
        connection.max_frame_size = _MAX_FRAME_SIZE
        connection.properties = to_value({Symbol(key): value for key, value in endpoint.properties.items()})
        before = open_sockets()
        self._sessions = [_Session(connection) for _ in range(SESSIONS)]  # the first begins to connect
        self._watch.found(open_sockets() - before, endpoint.port)

    def _take(self, wait: float) -> bool:
        """Do what was asked, waiting for it at most so many seconds; return whether there was anything."""
        if self._asked.empty():
            self._watch.wait(wait)
        count = self._asked.qsize()
        for _ in range(count):
            action, arguments = self._asked.get_nowait()
            action(*arguments)
        return count > 0

    def call_soon(self, what: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call in the event loop."""
        self._calls.append((what, arguments))

    def recheck(self, check: Callable[[], None]) -> None:
        """Schedule a check for when uamqp has done its work, which may report the cause."""
        self._rechecks.append(check)

    def flush(self) -> bool:
        """Report to the event loop what happened; return whether anything did."""
        calls, self._calls = self._calls, []
        if not calls:
            return False
        for link in self._links.values():
            link.batch = None
        try:
            self._loop.call_soon_threadsafe(self._owner.on_calls, calls)
        except RuntimeError:
            self._is_over = True  # the event loop was closed meanwhile
        return True

    # ---- what was asked

    def _attach(self, handle: int, session: int, owner: LinkOwner, spec: LinkSpec, is_receiver: bool) -> None:
        self._links[handle] = _Link(self, handle, self._sessions[session], owner, spec, is_receiver=is_receiver)

    def _set_credit(self, handle: int, credit: int) -> None:
        if (link := self._links.get(handle)) is not None:
            link.set_credit(credit)

    def _send(self, handle: int, delivery_id: int, payload: bytes, message_format: int) -> None:
        if (link := self._links.get(handle)) is not None:
            link.send(delivery_id, payload, message_format)

    def _detach(self, handle: int) -> None:
        if (link := self._links.get(handle)) is not None:
            link.detach()

    def _stop(self) -> None:
        self._is_over = True

    def lose(self, reason: str | None = None) -> None:
        """End the connection, which the service did not close."""
        if not self._is_over:
            self.call_soon(self._owner.on_lost, reason)
            self._is_over = True

    # ---- the end of things

    def link_gone(self, link: _Link, *, is_free: bool) -> None:
        """Called when a link is over; it is freed when uamqp is not at work on it, or else with the connection."""
        if self._links.pop(link.handle, None) is not None:
            (self._gone if is_free else self._kept).append(link)

    def _run_rechecks(self) -> None:
        rechecks, self._rechecks = self._rechecks, []
        for check in rechecks:
            check()

    def _clear(self) -> None:
        for link in self._gone:
            link.destroy()
        self._gone.clear()

    def _destroy(self) -> None:
        """Free everything, each before what it stands on."""
        self._gone += [*self._links.values(), *self._kept]
        self._links.clear()
        self._kept.clear()
        self._clear()
        for session in self._sessions:
            session.destroy()
        if self._connection is not None:
            self._connection.destroy()
        if self._auth is not None:
            self._auth.close()
        self._watch.close()

    # ---- called by uamqp

    def _state_changed(self, previous: int, new: int) -> None:
        if self._is_over or new == previous:
            return
        if new == _OPENED:
            self.call_soon(self._owner.on_opened)
        elif new == _DISCARDING:
            self.recheck(lambda: self.lose("uamqp gave it up: silence, or what it cannot read"))
        elif new in _ENDED:
            self.recheck(self.lose)  # if the service closed it, that is reported next

    def _io_error(self) -> None:
        self.lose()

    def _close_received(self, error: Any) -> None:
        if not self._is_over:
            self.call_soon(self._owner.on_closed, _amqp_error(error))
            self._is_over = True


class _Session:
    """A session of uamqp. It reports the properties of an attach, but not which link was attached."""

    def __init__(self, connection: Any) -> None:
        self.properties: Mapping[Any, Any] = {}
        """What the service attached the last link with. A link that changes state takes it, in the same moment."""
        self.session = c_uamqp.create_session(connection, self)
        self.session.incoming_window = _WINDOW
        self.session.outgoing_window = _WINDOW
        self.session.handle_max = HANDLES - 1
        self.session.begin()

    def destroy(self) -> None:
        self.session.destroy()

    def _attach_received(self, source: Any, target: Any, properties: Any, error: str | None = None) -> None:
        # An error raised to uamqp is lost, and these would be another link's then.
        self.properties = {}
        if properties is not None:
            with contextlib.suppress(ProtocolError):
                self.properties = from_value(properties)


class _Link:
    """A link of uamqp, with its sender or receiver."""

    def __init__(
        self, worker: Worker, handle: int, session: _Session, owner: LinkOwner, spec: LinkSpec, *, is_receiver: bool
    ) -> None:
        self.handle = handle
        self.batch: list[bytes] | None = None
        self._worker = worker
        self._session = session
        self._owner = owner
        self._sends: set[_Send] = set()
        self._is_receiver = is_receiver
        self._is_failed = False
        self._was_open = False
        self._is_detaching = False
        self._is_over = False
        link = self._link = c_uamqp.create_link(
            session.session,
            spec.name.encode(),
            is_receiver,
            to_value(spec.source.described()),
            to_value(spec.target.described()),
        )
        link.subscribe_to_detach_event(self)
        link.send_settle_mode = snd_settle_mode(is_receiver=is_receiver)
        link.receive_settle_mode = 0
        if spec.max_message_size is not None:
            link.max_message_size = spec.max_message_size
        if spec.properties:
            link.set_attach_properties(to_value({Symbol(key): value for key, value in spec.properties.items()}))
        if spec.desired_capabilities:
            symbols = [Symbol(name) for name in spec.desired_capabilities]
            link.set_desired_capabilities(to_value(Array(symbols, of=Symbol)))
        if is_receiver:
            link.set_prefetch_count(0)
            self._end = c_uamqp.create_message_receiver(link, self)
            self._end.open(self)
        else:
            self._end = c_uamqp.create_message_sender(link, self)
            self._end.open()

    def set_credit(self, credit: int) -> None:
        self._link.reset_link_credit(credit, False)

    def send(self, delivery_id: int, payload: bytes, message_format: int) -> None:
        try:
            message = to_message(payload, message_format)
        except (EventError, ProtocolError) as error:
            self._worker.call_soon(self._owner.on_outcome, delivery_id, error)
            return
        send = _Send(self, delivery_id)
        self._sends.add(send)
        if not self._end.send(message, 0, send):
            self.settled(send, None)

    def settled(self, send: _Send, outcome: Any) -> None:
        if outcome is None:
            # The end of its link, which uamqp may report later, or a failure of uamqp's own. It may call back once
            # more, so the object that it calls is kept until the link is destroyed.
            self._worker.recheck(lambda: self._lost("it did not send a message"))
            return
        self._sends.discard(send)
        if not self._is_over:
            self._worker.call_soon(self._owner.on_outcome, send.delivery_id, outcome)

    def detach(self) -> None:
        self._is_detaching = True
        self._end.close()

    def destroy(self) -> None:
        self._is_over = True
        self._end.destroy()
        self._link.destroy()

    # ---- called by uamqp

    def _state_changed(self, previous: int, new: int) -> None:
        if self._is_over:
            return
        if previous == _OPENING and new == _OPEN:
            self._was_open = True
            size = self._link.peer_max_message_size
            self._worker.call_soon(self._owner.on_attached, size or None, self._session.properties)
        elif previous == _OPEN and new == _ERROR:
            # A detach, or the end of the connection, is reported otherwise. What remains is the end of the session, or
            # a message that uamqp cannot decode, which is not skipped.
            self._is_failed = True
            self._worker.recheck(lambda: self._lost("uamqp cannot decode a message, or the service ended a session"))

    def _lost(self, reason: str) -> None:
        if not (self._is_over or self._is_detaching):
            self._worker.lose(reason)

    def _detach_received(self, error: Any) -> None:
        self._over(_amqp_error(error))

    def _message_received(self, message: Any) -> None:
        if self._is_failed:
            return  # it comes after one that was not handed over
        try:
            raw = from_message(message)
        except (ValueError, ProtocolError):
            # Raised to uamqp it would be lost, and the event with it.
            self._is_failed = True
            self._worker.recheck(lambda: self._lost("uamqp cannot encode a message that it received"))
            return
        if self.batch is None:
            self.batch = [raw]
            self._worker.call_soon(self._owner.on_messages, self.batch)
        else:
            self.batch.append(raw)
            if len(self.batch) >= _BATCH:
                self._worker.flush()

    def _over(self, error: AmqpError | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        # uamqp does not answer the detach of a receiver that was refused. Freed, its handle would be used again, while
        # the service still takes it for attached.
        is_free = self._was_open or self._is_detaching or not self._is_receiver
        self._worker.call_soon(self._owner.on_detached, error, is_free)
        self._worker.link_gone(self, is_free=is_free)


class _Send:
    """A message on its way."""

    def __init__(self, link: _Link, delivery_id: int) -> None:
        self.delivery_id = delivery_id
        self._link = link

    def _on_message_sent(self, _context: Any, result: int, delivery_state: Any = None) -> None:
        self._link.settled(self, _outcome(result, delivery_state))


def _outcome(result: int, state: Any) -> Any:
    """Return the outcome of uamqp's result and its untyped fields; None where the message, or its link, failed here."""
    if result == _OK:
        return Accepted()
    match state:
        case None:
            return None
        case []:
            return Released()
        case [[condition, *more], *_]:
            return Rejected(_error(condition, more[0] if more else None))
        case [bool() | None, bool() | None, *_]:
            return Modified()
        case _:
            return Rejected()


def _amqp_error(error: Any) -> AmqpError | None:
    return None if error is None else _error(error.condition, error.description)


def _error(condition: bytes, description: bytes | None) -> AmqpError:
    return AmqpError(
        condition.decode("ascii", "replace"), None if description is None else description.decode("utf-8", "replace")
    )
