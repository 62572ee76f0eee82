"""The service's side of one client's connection: rights of its links and fair sending. Called by the engine's shell."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.connection import (
    Closed,
    Connection,
    ConnectionState,
    CreditChanged,
    Event,
    LinkAttached,
    LinkDetached,
    Messages,
    Opened,
    Role,
    SaslRequested,
    SessionBegun,
    SessionEnded,
)
from eventpump.amqp.flow import SessionFlow
from eventpump.amqp.link import AttachState, Link
from eventpump.amqp.performatives import AmqpError, Source, Target
from eventpump.amqp.types import Int, Short, UInt
from eventpump.emulator import bounds
from eventpump.emulator.auth import Grant, Grants, Right
from eventpump.emulator.faults import (
    CloseConnection,
    Delay,
    DetachLink,
    EndSession,
    Fault,
    FaultTarget,
    Hold,
    LinkRole,
    Performative,
    Refuse,
    answers_first,
    error_of,
)
from eventpump.emulator.ledger import ProducerState, claim_of
from eventpump.emulator.links import ConsumerEnd, LinkEnd, ProducerEnd, ReceivingEnd
from eventpump.emulator.log import (
    BeyondEndError,
    Hub,
    InvalidPositionError,
    PartitionLog,
    entity_not_found,
    invalid_partition,
)
from eventpump.emulator.nodes import REQUEST_CREDIT, AnswerEnd, RequestEnd
from eventpump.emulator.readers import Reader, Refusal
from eventpump.emulator.service import Service
from eventpump.emulator.stamping import work_of
from eventpump.emulator.tracking import link_tracking_id
from eventpump.eventhubs.addresses import Address, AddressKind, parse_address
from eventpump.eventhubs.conditions import (
    ARGUMENT_ERROR,
    ARGUMENT_OUT_OF_RANGE,
    CONNECTION_FORCED,
    DETACH_FORCED,
    INTERNAL_ERROR,
    INVALID_FIELD,
    NOT_ALLOWED,
    NOT_FOUND,
    RESOURCE_LIMIT_EXCEEDED,
    TRANSFER_LIMIT_EXCEEDED,
    UNAUTHORIZED_ACCESS,
)
from eventpump.eventhubs.filters import answered_filter, parse_source_filter
from eventpump.eventhubs.names import (
    EPOCH,
    IDEMPOTENT_PRODUCER,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    PRODUCER_SEQUENCE_NUMBER,
    RECEIVER_NAME,
    RUNTIME_METRIC,
    TIMEOUT,
    TRACKING_ID,
)
from eventpump.texts import excerpt

if TYPE_CHECKING:
    from eventpump.net.stream import ConnectionProtocol

_P = ParamSpec("_P")

_logger = logging.getLogger("eventpump.emulator")

_numbers = itertools.count(1)

_MAX_CONTAINER = 256
"""Characters of a container id that a link's properties repeat."""
CLOSE_GRACE = 1.0
"""Seconds that a client has to answer the service's close."""
IDLE_TIMEOUT = 240.0
"""Seconds without a byte after which the service closes; half of it is in its open (protocol.md 2.3, 2.4)."""
_UNLIMITED = (1 << 64) - 1
"""The max-message-size that the service states for its nodes. The bounds below it are ours, and not stated."""
_LINK_TIMEOUT = UInt(65_000)
_MIN_IDLE_TIME_OUT = 1000
"""Milliseconds. The service's AMQP library has a higher limit, and answers with the same condition."""


class _RefusedError(Exception):
    """The attach is refused.

    Args:
        is_tracked: Whether it has the ending for the support.
    """

    def __init__(self, condition: str, description: str, *, is_tracked: bool = False) -> None:
        super().__init__(description)
        self.error = AmqpError(condition, description)
        self.is_tracked = is_tracked


def service_config(max_message_size: int) -> ConnectionConfig:
    """Return the open and begin fields of the service (protocol.md 2.3)."""
    return ConnectionConfig(
        container_id=f"{uuid.uuid4().hex}_G{next(_numbers)}",
        max_frame_size=bounds.MAX_FRAME_SIZE,
        max_sent_frame_size=bounds.MAX_FRAME_SIZE,
        channel_max=4_999,
        handle_max=255,
        incoming_window=5_000,
        outgoing_window=None,
        first_transfer_id=1,
        idle_timeout=IDLE_TIMEOUT,
        min_idle_time_out=_MIN_IDLE_TIME_OUT,
        # Larger messages up to this size are rejected one by one; beyond it the engine ends the link.
        max_message_size=max(4 * max_message_size, 32 << 20),
        limits=bounds.without_token(),
        weigh=work_of,
        enforce_credit=False,
        greeting=b"Welcome!",
        requires_sasl=False,
    )


class ServiceConnection:
    """The service's end of one connection.

    Attributes:
        grants: The rights granted by its tokens.
        waiting_answers: Bytes of the nodes' answers that wait for credit, on all links.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.engine = Connection(service_config(service.max_message_size), Role.SERVER)
        self.grants = Grants()
        self.waiting_answers = 0
        self._protocol: ConnectionProtocol | None = None
        self._loop = asyncio.get_running_loop()
        self._ends: dict[Link, LinkEnd] = {}
        self._turns: dict[ConsumerEnd, None] = {}
        self._is_turn_due = False
        self._deadline: asyncio.TimerHandle | None = None
        self._is_open = True
        self._had_link = False
        self._had_token = False
        self._has_failed = False
        self._began = self._last_change = self._heard = self._loop.time()
        self._has_asked = False
        self.peer_address = ""
        self.closed = self._loop.create_future()

    # ------------------------------------------------------------------------------------ the shell's calls

    def on_connected(self, protocol: ConnectionProtocol) -> None:
        """Store the shell that transfers the bytes."""
        self._protocol = protocol
        self.service.connections.add(self)
        self._look_at_next_deadline()

    def heard(self) -> None:
        """Called when the client has sent something, other than an empty frame."""
        self._heard = self._loop.time()
        if self._has_asked:
            self._has_asked = False
            if (asked := self.service.deadlines.asked) is not None:
                self._look_by(self._heard + asked)

    def on_silence(self) -> None:
        """Close as the service does after `IDLE_TIMEOUT`: links, sessions and the connection, each with the error."""
        error = AmqpError(
            CONNECTION_FORCED,
            f"The connection was inactive for more than the allowed {int(IDLE_TIMEOUT * 1000)} milliseconds and is "
            f"closed by container '{self.engine.config.container_id}'.",
        )
        for session in list(self.engine.sessions.values()):
            for link in list(session.links.values()):
                link.detach(error)
            session.end(error)
        self.close(error)

    def on_events(self, events: list[Event]) -> None:
        """Handle the engine's events."""
        self.guard(self._take_events, events)

    def _take_events(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Messages(link, payloads, delivery_ids, formats):
                    end = self._ends.get(link)
                    if isinstance(end, ReceivingEnd):
                        end.on_messages(payloads, delivery_ids, formats)
                    elif link.state is AttachState.ATTACH_RECEIVED:
                        # A transfer before credit is tolerated (protocol.md 7.5), but not one before the link is
                        # accepted.
                        link.detach(AmqpError(TRANSFER_LIMIT_EXCEEDED, "The link is not attached yet."))
                case CreditChanged(link):
                    end = self._ends.get(link)
                    if end is not None:
                        end.on_credit()
                        if link.drain and isinstance(end, ConsumerEnd):
                            self.wants_turn(end)
                case LinkAttached(link):
                    self._on_attach(link)
                case LinkDetached(link):
                    end = self._on_link_gone(link)
                    if end is not None:
                        self._strike_answered(Performative.DETACH, link.session, end.target)
                case SessionBegun(session):
                    self._strike_answered(Performative.BEGIN, session)
                case SessionEnded(_, links):
                    for link in links:
                        self._on_link_gone(link)
                case SaslRequested(mechanism, response):
                    self._on_sasl(mechanism, response)
                case Opened():
                    self._look_at_next_deadline()
                    self._strike_answered(Performative.OPEN)
                case Closed():
                    self._let_go()
        self._give_turns()

    def on_writable(self) -> None:
        """Resume sending."""
        self.guard(self._give_turns)

    def on_closed(self, _error: BaseException | None) -> None:
        """Release everything when the connection is lost."""
        self.guard(self._let_go)
        if self._deadline is not None:
            self._deadline.cancel()
        self.service.connections.discard(self)
        self._protocol = None
        if not self.closed.done():
            self.closed.set_result(None)

    # ------------------------------------------------------------------------------------- the last resort

    def guard(self, call: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Make a call on behalf of this connection only.

        An unexpected exception closes this connection, with `amqp:internal-error`, and is logged. Everything that the
        event loop, the store or a fault calls goes through here; a `BaseException` that is not an `Exception` passes.
        """
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._has_failed:  # the failure was logged and answered
            self.abort()
            return
        self._has_failed = True
        _logger.error(
            "unexpected error in the emulator: it closes one connection and serves the others", exc_info=error
        )
        self.guard(self.close, AmqpError(INTERNAL_ERROR, "The service failed, and closes the connection."))

    # --------------------------------------------------------------------------------------- the links' calls

    def flush(self) -> None:
        """Write the engine's output."""
        if self._protocol is not None:
            self._protocol.flush()

    def abort(self) -> None:
        """Drop the connection without a close."""
        self._let_go()
        if self._protocol is not None:
            self._protocol.abort()

    def close(self, error: AmqpError) -> None:
        """Close the connection with an error. One that is closed already waits no longer for the client."""
        if self._is_open:
            self._let_go()
            self.engine.close(error)
            self.flush()
            if self.engine.state is ConnectionState.CLOSE_SENT:
                # Do not wait forever for a client that does not answer the close.
                self._deadline = self._loop.call_later(CLOSE_GRACE, self._finish)
            else:
                self._finish()
        elif self.engine.state is not ConnectionState.CLOSE_SENT:
            self._finish()

    def _finish(self) -> None:
        if self._protocol is not None:
            self._protocol.finish()

    def end_session(self, session: SessionFlow, error: AmqpError) -> None:
        """End a session with an error, and with it its links."""
        for end in [each for each in self._ends.values() if each.link.session is session]:
            end.closed()
            del self._ends[end.link]
        session.end(error)
        self._changed()
        self.flush()

    def detach_hub(self, hub: str) -> None:
        """End every link to a hub that was deleted."""
        for end in list(self._ends.values()):
            if end.target.hub == hub.lower():
                end.detach(AmqpError(NOT_FOUND, entity_not_found(self.service.address_of(str(end.address)))))

    def detached(self, end: LinkEnd) -> None:
        """Called when the service has ended a link."""
        self._ends.pop(end.link, None)
        self._changed()
        self.flush()

    def wants_turn(self, end: ConsumerEnd) -> None:
        """Queue a consumer's link for sending."""
        self._turns[end] = None
        self._ask_for_turns()

    def granted(self, grant: Grant) -> None:
        """Add the rights of a token."""
        self.grants.put(grant)
        self._had_token = True
        self.engine.limits = bounds.with_token(self.service.max_message_size)
        if grant.expires_at is not None:
            self._look_by(self._expiry(grant.expires_at))

    def answered(self) -> None:
        """Called when an answer was sent that the client has to settle."""
        if (limit := self.service.deadlines.unsettled_answer) is not None:
            self._look_by(self._loop.time() + limit)

    @property
    def max_waiting_answers(self) -> int:
        """The most bytes of answers that may wait for credit."""
        return bounds.ANSWERS if self._had_token else bounds.ANSWERS_WITHOUT_TOKEN

    def answer_link(self, request: RequestEnd, reply_to: str | None) -> AnswerEnd | None:
        """Return the link for a node's answer; if none is named, that of this node in this session (protocol.md 13)."""
        answers = [
            end
            for end in self._ends.values()
            if isinstance(end, AnswerEnd) and end.address.kind is request.address.kind
        ]
        if reply_to is not None:
            named = [end for end in answers if reply_to in end.names]
            if named:
                return named[0]
        nearest = [end for end in answers if end.link.session is request.link.session]
        found = nearest or answers
        return found[0] if found else None

    # ------------------------------------------------------------------------------------------------- turns

    def _ask_for_turns(self) -> None:
        if not self._is_turn_due and self._is_open:
            self._is_turn_due = True
            self._loop.call_soon(self.guard, self._take_turns)

    def _take_turns(self) -> None:
        self._is_turn_due = False
        self._give_turns()

    def _give_turns(self) -> None:
        """Let each waiting consumer send one run, as long as the client reads."""
        turns, protocol = self._turns, self._protocol
        if not turns or protocol is None:
            return
        for _ in range(len(turns)):
            if not turns or protocol.is_paused:
                return
            end = next(iter(turns))
            del turns[end]
            if end.deliver():
                turns[end] = None
            protocol.flush()
        if turns:
            self._ask_for_turns()

    # ------------------------------------------------------------------------------------------- SASL, attach

    def _on_sasl(self, mechanism: str, response: bytes) -> None:
        is_ok = True
        if mechanism == "PLAIN":
            grant = self.service.keys.check_plain(response)
            is_ok = grant is not None
            if grant is not None:
                self.granted(grant)
        self.engine.sasl_outcome(ok=is_ok)
        if not is_ok:
            self._let_go()
            self._finish()

    def _strike_answered(
        self, on: Performative, session: SessionFlow | None = None, target: FaultTarget | None = None
    ) -> None:
        """Inject the fault that fires on what the engine has answered, if one does."""
        if not self._is_open:
            return
        fault = self.service.faults.fire(on, target or FaultTarget(None))
        match None if fault is None else fault.action:
            case CloseConnection() as action:
                self.close(error_of(action))
            case EndSession() as action:
                assert session is not None
                self.end_session(session, error_of(action))

    def _on_attach(self, link: Link) -> None:
        if not self._is_open:
            return
        self._had_link = True
        try:
            address = self._address_of(link)
        except _RefusedError as refused:
            self._refuse(link, refused)
            return
        target = _target_of(link, address)
        fault = self.service.faults.fire(Performative.ATTACH, target)
        if fault is None:
            self._attach(link, address, target)
            return
        match fault.action:
            case Refuse() as action:
                link.refuse(error_of(action))
            case Delay(seconds):
                self._loop.call_later(seconds, self.guard, self._attach_later, link, address, target)
            case Hold():
                fault.when_removed(lambda: self.guard(self._attach_later, link, address, target))
            case DetachLink():
                self._attach(link, address, target, fault)
            case action if answers_first(action):
                self._attach(link, address, target, fault)
            case CloseConnection() as action:
                self.close(error_of(action))
            case EndSession() as action:
                self.end_session(link.session, error_of(action))
            case _:
                self.abort()

    def _attach_later(self, link: Link, address: Address, target: FaultTarget) -> None:
        if self._is_open and link.state is AttachState.ATTACH_RECEIVED:
            self._attach(link, address, target)
            self.flush()

    def _address_of(self, link: Link) -> Address:
        assert link.remote is not None
        node = link.remote.target if link.is_receiver else link.remote.source
        text = None if node is None else node.address
        if not isinstance(text, str):
            raise _RefusedError(INVALID_FIELD, "The link names no address.")
        try:
            return parse_address(text)
        except ValueError:
            raise _RefusedError(NOT_FOUND, entity_not_found(excerpt(text))) from None

    def _attach(self, link: Link, address: Address, target: FaultTarget, ends: Fault | None = None) -> None:
        """Attach a link, or refuse it; the fault `ends` follows the answer."""
        try:
            if address.kind in (AddressKind.CBS, AddressKind.MANAGEMENT):
                end = self._attach_node(link, address, target)
            elif not link.is_receiver:
                end = self._attach_consumer(link, address, target)
            elif _is_idempotent(link):
                self._attach_publisher(link, address, target, ends)
                return
            else:
                end = self._attach_producer(link, address, target)
        except _RefusedError as refused:
            self._refuse(link, refused)
        else:
            self._attached(end, ends)

    def _refuse(self, link: Link, refused: _RefusedError) -> None:
        error = refused.error
        if not refused.is_tracked:
            error = AmqpError(error.condition, f"{error.description}{self.service.tracking().of_gateway()}")
        link.refuse(error)
        self._changed()

    def _attached(self, end: LinkEnd, ends: Fault | None) -> None:
        """Register a link that was just accepted."""
        self._ends[end.link] = end
        if end.link.is_receiver:
            end.link.set_credit(end.credit if isinstance(end, ProducerEnd) else REQUEST_CREDIT)
        self._changed()
        if isinstance(end, ProducerEnd) and (idle := self.service.deadlines.idle_producer) is not None:
            self._look_by(end.last_transfer + idle)
        if ends is not None:
            end.strike(ends)

    def _attach_node(self, link: Link, address: Address, target: FaultTarget) -> LinkEnd:
        if address.kind is AddressKind.MANAGEMENT and not self.grants:
            raise self._unauthorized(address, "Manage,EventHub-Read")
        if not self._had_token and len(self._ends) >= bounds.LINKS_WITHOUT_TOKEN:
            raise _RefusedError(
                RESOURCE_LIMIT_EXCEEDED,
                f"A connection has {bounds.LINKS_WITHOUT_TOKEN} links at most before it has put a token.",
            )
        # As asked, but for the size, which is bounded here: the service states no bound (protocol.md 3.1).
        link.accept(max_message_size=_UNLIMITED)
        if link.is_receiver:
            link.limit_messages(bounds.REQUEST if self._had_token else bounds.REQUEST_WITHOUT_TOKEN)
            return RequestEnd(self, link, address, target)
        return AnswerEnd(self, link, address, target)

    def _attach_producer(self, link: Link, address: Address, target: FaultTarget) -> LinkEnd:
        hub, partition = self._destination(address)
        self._accept(link, address, Right.SEND)
        return ProducerEnd(self, link, address, target, hub, partition)

    def _attach_publisher(self, link: Link, address: Address, target: FaultTarget, ends: Fault | None) -> None:
        """Attach an idempotent producer: once its partition's ledger has admitted it (protocol.md 8.2)."""
        hub, partition = self._destination(address)
        if partition is None:
            raise _RefusedError(NOT_ALLOWED, "An idempotent producer sends to one partition.")
        assert link.remote is not None
        claim = claim_of(link.remote.properties)
        if isinstance(claim, Refusal):
            raise _RefusedError(claim.condition, claim.description)
        end = ProducerEnd(self, link, address, target, hub, partition, is_idempotent=True)
        refusal = self.service.attach_publisher(
            partition, claim, lambda state, number: _AttachTicket(self, end, state, number, ends)
        )
        if refusal is not None:
            raise _RefusedError(refusal.condition, refusal.description)

    def publisher_taken(self, end: ProducerEnd, properties: dict[str, object], ends: Fault | None) -> None:
        """Accept an idempotent producer's link, if it still waits."""
        if self._is_open and end.link.state is AttachState.ATTACH_RECEIVED:
            self._accept(
                end.link, end.address, Right.SEND, properties=properties, offered_capabilities=[IDEMPOTENT_PRODUCER]
            )
            self._attached(end, ends)
        else:
            end.closed()

    def publisher_failed(self, end: ProducerEnd, reason: str) -> None:
        """Refuse an idempotent producer's link, because the ledger could not be written."""
        end.closed()
        if self._is_open and end.link.state is AttachState.ATTACH_RECEIVED:
            end.link.refuse(AmqpError(INTERNAL_ERROR, f"The producer's state could not be stored: {reason}"))
            self._changed()

    def _destination(self, address: Address) -> tuple[Hub, PartitionLog | None]:
        if not self.grants.allow(address, Right.SEND):
            raise self._unauthorized(address, "Send")
        hub = self._hub_of(address)
        if address.kind is AddressKind.CONSUMER:
            raise _RefusedError(NOT_ALLOWED, "A consumer group cannot be sent to.")
        return hub, None if address.kind is not AddressKind.PARTITION else self._partition_of(hub, address)

    def _attach_consumer(self, link: Link, address: Address, target: FaultTarget) -> LinkEnd:
        if not self.grants.allow(address, Right.LISTEN):
            raise self._unauthorized(address, "Listen")
        hub = self._hub_of(address)
        if address.kind is not AddressKind.CONSUMER or address.consumer_group is None:
            raise _RefusedError(NOT_ALLOWED, "Events are read from a partition of a consumer group.")
        if not hub.has_group(address.consumer_group):
            raise _RefusedError(NOT_FOUND, entity_not_found(self.service.address_of(str(address))))
        partition = self._partition_of(hub, address)
        assert link.remote is not None
        assert link.remote.source is not None
        try:
            cursor = partition.locate(parse_source_filter(link.remote.source.filter))
        except (ValueError, InvalidPositionError, BeyondEndError) as error:
            ending = self.service.tracking().of_position(hub.name, address.consumer_group)
            raise _RefusedError(ARGUMENT_ERROR, f"{error}{ending}", is_tracked=True) from None
        properties = link.remote.properties or {}
        epoch, name = properties.get(EPOCH), properties.get(RECEIVER_NAME)
        if epoch is not None and (not isinstance(epoch, int) or isinstance(epoch, bool)):
            raise _RefusedError(ARGUMENT_ERROR, "The receiver's epoch is not an integer.")
        readers = self.service.readers_of(hub, address.consumer_group, partition)
        end = ConsumerEnd(
            self,
            link,
            address,
            target,
            partition,
            cursor,
            readers,
            RUNTIME_METRIC in (link.remote.desired_capabilities or ()),
        )
        admission = readers.admit(Reader(end, name if isinstance(name, str) else None, epoch))
        if isinstance(admission, Refusal):
            end.closed()
            raise _RefusedError(admission.condition, admission.description)
        self._accept(link, address, Right.LISTEN)
        # After the answer: the new reader is served at once, the others end later (protocol.md 5.4).
        ending = self.service.tracking().of_reader(hub.name, address.consumer_group)
        for eviction in admission:
            loser = eviction.reader.key
            assert isinstance(loser, LinkEnd)
            stolen = AmqpError(eviction.refusal.condition, f"{eviction.refusal.description}{ending}")
            if wait := self.service.deadlines.stolen:
                self._loop.call_later(wait, loser.connection.guard, loser.detach, stolen)
            else:
                loser.connection.guard(loser.detach, stolen)
        return end

    def _properties_of(self, link: Link, address: Address, right: Right) -> dict[str, object]:
        """Return the properties of the answer to an attach: none where the client gave none (protocol.md 5.1, 7.1)."""
        remote, grant = link.remote, self.grants.granting(address, right)
        assert remote is not None
        if not remote.properties:
            return {}
        if address.kind is AddressKind.GATEWAY:
            # What the client gave comes back, if it is not so large that the answer would not fit.
            given = {key: value for key, value in remote.properties.items() if isinstance(value, int)}
            return {**given, TRACKING_ID: link_tracking_id()}
        name, is_jwt = ("", False) if grant is None else (grant.name, grant.is_jwt)
        kind = "AAD" if is_jwt else "NamespaceSAS"
        container = "" if self.engine.remote is None else self.engine.remote.container_id
        found: dict[str, object] = {"app-id": name, "auth-type": kind}
        if not link.is_receiver:
            found |= {"client-auth-id": name, "client-auth-type": Int(4)}
        found["client-id"] = container[:_MAX_CONTAINER]
        if not link.is_receiver:
            found |= {"client-ip": self.peer_address, "client-network-type": Int(1)}
            if EPOCH in remote.properties:
                found[EPOCH] = remote.properties[EPOCH]
        return {**found, TIMEOUT: _LINK_TIMEOUT}

    def _accept(
        self,
        link: Link,
        address: Address,
        right: Right,
        *,
        properties: dict[str, object] | None = None,
        offered_capabilities: list[str] | None = None,
    ) -> None:
        """Accept a link of events, and answer with these further properties."""
        remote = link.remote
        assert remote is not None
        source, target = remote.source or Source(), remote.target or Target()
        limit = self.service.max_message_size
        answered = self._properties_of(link, address, right) | (properties or {})
        if link.is_receiver:
            target.expiry_policy = target.expiry_policy or "session-end"
            offered = min(remote.max_message_size or limit, limit)
            link.accept(
                source=source,
                target=target,
                max_message_size=offered,
                rcv_settle_mode=0,  # whatever was asked
                properties=answered,
                offered_capabilities=offered_capabilities,
            )
            # The engine's own limit is higher, so that a message that is too large is rejected and the link remains.
            link.limit_messages(None)
        else:
            # The service sends settled messages, whatever was requested (protocol.md 5.1).
            source.filter = answered_filter(source.filter)
            link.accept(source=source, target=target, max_message_size=limit, snd_settle_mode=1, properties=answered)
            if remote.max_message_size is not None and remote.max_message_size >= limit:
                # The size of the service's annotations does not count towards the largest event.
                remote.max_message_size = None

    def _hub_of(self, address: Address) -> Hub:
        hub = self.service.hub(address.hub)
        if hub is None:
            raise _RefusedError(NOT_FOUND, self.service.no_such_hub(str(address)), is_tracked=True)
        return hub

    def _partition_of(self, hub: Hub, address: Address) -> PartitionLog:
        partition = hub.partition(address.partition_id or "")
        if partition is None:
            raise _RefusedError(ARGUMENT_OUT_OF_RANGE, invalid_partition(hub, address.partition_id or ""))
        return partition

    def _unauthorized(self, address: Address, claim: str) -> _RefusedError:
        return _RefusedError(
            UNAUTHORIZED_ACCESS,
            f"Unauthorized access. '{claim}' claim(s) are required to perform this operation. Resource: "
            f"'{self.service.address_of(str(address))}'.",
        )

    # ------------------------------------------------------------------------------------- ends and deadlines

    def _on_link_gone(self, link: Link) -> LinkEnd | None:
        end = self._ends.pop(link, None)
        if end is not None:
            end.closed()
        self._changed()
        return end

    def _let_go(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        ends, self._ends = list(self._ends.values()), {}
        self._turns.clear()
        for end in ends:
            self.guard(end.closed)

    def _changed(self) -> None:
        """Called when a link came or went. It costs the same however many links there are: so no deadline is moved."""
        self._last_change = self._loop.time()
        if (idle := self._idle_after) is not None:
            self._look_by(self._last_change + idle)

    def _look_by(self, when: float) -> None:
        """Have all deadlines looked at by a time, if they are not before."""
        if not self._is_open or (self._deadline is not None and self._deadline.when() <= when):
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_at(when, self.guard, self._on_deadline)

    def _look_at_next_deadline(self) -> None:
        due = min((when for when, _ in self._deadlines()), default=None)
        if due is not None:
            self._look_by(due)

    @property
    def _idle_after(self) -> float | None:
        """Seconds after which the connection is closed because it has no links; None while it has some."""
        rules = self.service.deadlines
        if self._ends:
            return None
        return rules.idle_connection if self._had_link else rules.no_link

    def _expiry(self, expires_at: float) -> float:
        return self._loop.time() + expires_at - self.service.now()

    def _deadlines(self) -> list[tuple[float, Callable[[], None]]]:
        """Return the deadlines and their times, on the loop's clock (protocol.md 2.4)."""
        rules = self.service.deadlines
        due: list[tuple[float, Callable[[], None]]] = []
        if not self._had_token and rules.no_token is not None:
            due.append((self._began + rules.no_token, self.abort))
        if (idle := self._idle_after) is not None:
            due.append((self._last_change + idle, lambda: self._close_idle(idle)))
        if rules.asked is not None and not self._has_asked and self.engine.is_open:
            due.append((self._heard + rules.asked, self._ask))
        if (limit := rules.unsettled_answer) is not None:
            answers = [end for end in self._ends.values() if isinstance(end, AnswerEnd)]
            since = min((when for end in answers if (when := end.unsettled_since) is not None), default=None)
            if since is not None:
                due.append((since + limit, lambda: self._settle_answers(answers, limit)))
        producers = [end.last_transfer for end in self._ends.values() if isinstance(end, ProducerEnd)]
        if rules.idle_producer is not None and producers:
            due.append((min(producers) + rules.idle_producer, self._detach_idle_producers))
        expiry = self.grants.next_expiry()
        if expiry is not None:
            due.append((self._expiry(expiry), self._expire_tokens))
        return due

    def _on_deadline(self) -> None:
        self._deadline = None
        now = self._loop.time()
        for when, act in self._deadlines():
            if when <= now and self._is_open:
                act()
        self._look_at_next_deadline()
        self.flush()

    def _settle_answers(self, ends: list[AnswerEnd], limit: float) -> None:
        for end in ends:
            end.settle_before(self._loop.time() - limit)

    def _ask(self) -> None:
        """Ask a silent client for the state of its sessions, once (2.7.4); it need not answer."""
        self._has_asked = True
        for session in self.engine.sessions.values():
            session.send_flow(echo=True)

    def _close_idle(self, seconds: float) -> None:
        self.close(
            AmqpError(
                CONNECTION_FORCED,
                f"The connection was inactive for more than the allowed {int(seconds * 1000)} milliseconds and is "
                "closed by container 'LinkTracker'.",
            )
        )

    def _detach_idle_producers(self) -> None:
        idle = self.service.deadlines.idle_producer
        assert idle is not None
        for end in list(self._ends.values()):
            if isinstance(end, ProducerEnd) and end.last_transfer + idle <= self._loop.time():
                minutes, seconds = divmod(int(idle), 60)
                end.detach(
                    AmqpError(
                        DETACH_FORCED,
                        f"The link '{excerpt(end.link.name)}' is force detached. Details: "
                        f"AmqpMessagePublisher.IdleTimerExpired: Idle timeout: 00:{minutes:02}:{seconds:02}.",
                    )
                )

    def _expire_tokens(self) -> None:
        if not self.grants.expire(self.service.now()):
            return
        for end in list(self._ends.values()):
            is_management = end.address.kind is AddressKind.MANAGEMENT
            is_allowed = bool(self.grants) if is_management else self.grants.allow(end.address, end.right)
            if not is_allowed:
                end.detach(
                    AmqpError(
                        UNAUTHORIZED_ACCESS,
                        f"ExpiredToken: The token is expired. Resource: '{self.service.address_of(str(end.address))}'.",
                    )
                )


class _AttachTicket:
    """Answers an idempotent producer's attach with a sequence number; then the fault `ends` follows."""

    __slots__ = ("_connection", "_ends", "_number", "_state", "end")

    def __init__(
        self, connection: ServiceConnection, end: ProducerEnd, state: ProducerState, number: int, ends: Fault | None
    ) -> None:
        self._connection = connection
        self.end = end
        self._state = state
        self._number = number
        self._ends = ends

    def stored(self) -> None:
        """Accept the link, with the producer's id, epoch and number."""
        properties: dict[str, object] = {
            PRODUCER_ID: self._state.producer_id,
            PRODUCER_EPOCH: Short(self._state.epoch),
            PRODUCER_SEQUENCE_NUMBER: Int(self._number),
        }
        self._connection.publisher_taken(self.end, properties, self._ends)

    def failed(self, reason: str) -> None:
        """Refuse the link."""
        self._connection.publisher_failed(self.end, reason)


def _is_idempotent(link: Link) -> bool:
    return link.remote is not None and IDEMPOTENT_PRODUCER in (link.remote.desired_capabilities or ())


def _target_of(link: Link, address: Address) -> FaultTarget:
    if address.kind is AddressKind.CBS:
        return FaultTarget(LinkRole.CBS)
    if address.kind is AddressKind.MANAGEMENT:
        return FaultTarget(LinkRole.MANAGEMENT)
    return FaultTarget(
        LinkRole.PRODUCER if link.is_receiver else LinkRole.CONSUMER,
        address.hub.lower(),
        address.partition_id,
        address.consumer_group.lower() if address.consumer_group is not None else None,
    )
