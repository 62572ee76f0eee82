"""The service's end of producer and consumer links. Driven by the connection's events, without their own tasks."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import NamedTuple, Protocol

from eventpump.amqp.codec import AmqpDecodeError
from eventpump.amqp.flow import SessionFlow
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import Accepted, AmqpError, Rejected
from eventpump.amqp.types import Int, Timestamp
from eventpump.emulator import bounds
from eventpump.emulator.auth import Right
from eventpump.emulator.faults import (
    CloseConnection,
    Delay,
    DetachLink,
    DropConnection,
    EndSession,
    Fault,
    FaultTarget,
    Hold,
    Performative,
    Reject,
    StoreLate,
    answers_first,
    error_of,
)
from eventpump.emulator.ledger import Run, run_of
from eventpump.emulator.log import Hub, PartitionLog
from eventpump.emulator.long_keys import LONG
from eventpump.emulator.readers import ReaderTable, Refusal
from eventpump.emulator.service import ServedConnection, Service
from eventpump.emulator.stamping import add_delivery_annotations
from eventpump.errors import EventTooLargeError
from eventpump.eventhubs.addresses import Address
from eventpump.eventhubs.conditions import ARGUMENT_ERROR, DECODE_ERROR, INTERNAL_ERROR, MESSAGE_SIZE_EXCEEDED
from eventpump.eventhubs.envelope import decode_batch, partition_key_of
from eventpump.eventhubs.hashing import MAX_KEY_LENGTH, partition_for_hash, partition_for_key
from eventpump.eventhubs.names import (
    BATCH_MESSAGE_FORMAT,
    LAST_ENQUEUED_OFFSET,
    LAST_ENQUEUED_SEQUENCE_NUMBER,
    LAST_ENQUEUED_SEQUENCE_NUMBER_EPOCH,
    LAST_ENQUEUED_TIME,
    RUNTIME_INFO_RETRIEVAL_TIME,
)

RUN_BYTES = 256 * 1024
"""How many bytes one consumer gets before the others have their turn."""
GATEWAY_CREDIT = 300
PARTITION_CREDIT = 1000
"""How many messages per link may wait for the store (protocol.md 7.1); each may have the largest size."""
_FAULTY_RUN = 64
"""The most events that are sent together while faults are set, so that each is counted."""

_ACCEPTED = Accepted()


class LinkConnection(ServedConnection, Protocol):
    """What a link calls of its connection; see `ServiceConnection`."""

    @property
    def service(self) -> Service:
        """The state shared by all connections."""

    def end_session(self, session: SessionFlow, error: AmqpError) -> None:
        """End a session with an error, and with it its links."""

    def detached(self, end: LinkEnd) -> None:
        """Called when the service has ended a link."""

    def wants_turn(self, end: ConsumerEnd) -> None:
        """Queue a consumer's link for sending."""


class LinkEnd:
    """Base class of all links: an address, the right that they need, and their end."""

    def __init__(
        self, connection: LinkConnection, link: Link, address: Address, right: Right | None, target: FaultTarget
    ) -> None:
        self.connection = connection
        self.link = link
        self.address = address
        self.right = right
        self.target = target
        self.is_open = True

    def detach(self, error: AmqpError) -> None:
        """End the link with an error. May be called twice."""
        if self.is_open:
            self.closed()
            self.link.detach(error)
            self.connection.detached(self)

    def closed(self) -> None:
        """Release everything, because the link or its connection has ended. May be called twice."""
        self.is_open = False

    def on_credit(self) -> None:
        """Called when more may be sent."""

    def strike(self, fault: Fault) -> bool:
        """Inject a fault that has the same effect on every link; return whether the link continues later."""
        match fault.action:
            case Delay(seconds):
                asyncio.get_running_loop().call_later(seconds, self.connection.guard, self.resume)
                return True
            case Hold(answers_echo):
                self.link.answers_echo = answers_echo
                fault.when_removed(partial(self.connection.guard, self._let_go))
                return True
            case CloseConnection() as action:
                self.connection.close(error_of(action))
            case EndSession() as action:
                self.connection.end_session(self.link.session, error_of(action))
            case DetachLink() as action:
                self.detach(error_of(action))
            case _:
                self.connection.abort()
        return False

    def _let_go(self) -> None:
        self.link.answers_echo = True
        self.resume()

    def resume(self) -> None:
        """Continue after a delay or hold."""


class Incoming(NamedTuple):
    """A received message; `delivery_id` is None if it was sent settled."""

    payload: bytes
    delivery_id: int | None
    message_format: int

    def __repr__(self) -> str:
        # Never the payload, which may hold a token.
        return f"Incoming({len(self.payload)} bytes, delivery {self.delivery_id}, format {self.message_format})"


class ReceivingEnd(LinkEnd):
    """A link that receives messages. They are processed in order, and faults fire on each."""

    def __init__(
        self, connection: LinkConnection, link: Link, address: Address, right: Right | None, target: FaultTarget
    ) -> None:
        super().__init__(connection, link, address, right, target)
        self._waiting: deque[Incoming] = deque()
        self._is_blocked = False
        self._may_pass = False

    def closed(self) -> None:
        """Drop the waiting messages."""
        super().closed()
        self._waiting.clear()

    def on_messages(self, payloads: list[bytes], delivery_ids: list[int], formats: list[int] | None) -> None:
        """Process received messages."""
        for index, payload in enumerate(payloads):
            self._waiting.append(
                Incoming(
                    payload,
                    delivery_ids[index] if delivery_ids else None,
                    formats[index] if formats is not None else 0,
                )
            )
        self._work()

    def resume(self) -> None:
        """Continue after a delay or hold, with the message on which it fired."""
        if self.is_open:
            self._is_blocked = False
            self._may_pass = True
            self._work()
            self.connection.flush()

    def _work(self) -> None:
        faults = self.connection.service.faults
        while self._waiting and self.is_open and not self._is_blocked:
            item = self._waiting.popleft()
            fault = None if self._may_pass else faults.fire(Performative.TRANSFER, self.target)
            self._may_pass = False
            if fault is None:
                self.take(item)
            elif isinstance(fault.action, Reject):
                self.reject(item, error_of(fault.action))
            elif answers_first(fault.action) or (isinstance(fault.action, DropConnection) and fault.action.stored):
                self.take(item, fault)
            elif isinstance(fault.action, StoreLate):
                late = item._replace(delivery_id=None)
                fault.when_removed(partial(self.connection.guard, self.take, late))
                self.connection.abort()
            elif self.strike(fault):
                self._is_blocked = True
                self._waiting.appendleft(item)
        if self.is_open:
            self.worked()

    def take(self, item: Incoming, ends: Fault | None = None) -> None:
        """Process the message. The fault `ends` follows in place of the answer, or after it."""
        raise NotImplementedError

    def reject(self, item: Incoming, error: AmqpError) -> None:
        """Reject the message."""
        raise NotImplementedError

    def worked(self) -> None:
        """Complete the work of the last messages."""


class MessageTicket:
    """Answers a producer's message."""

    __slots__ = ("delivery_id", "end", "ends")

    def __init__(self, end: ProducerEnd, delivery_id: int | None, ends: Fault | None) -> None:
        self.end = end
        self.delivery_id = delivery_id
        self.ends = ends

    def stored(self) -> None:
        """Accept the message."""
        self.end.stored(self)

    def failed(self, reason: str) -> None:
        """Reject the message."""
        self.end.failed(self, reason)


class ProducerEnd(ReceivingEnd):
    """A link that a producer sends on: to one partition, or (None) to the gateway. If idempotent, it is numbered."""

    def __init__(
        self,
        connection: LinkConnection,
        link: Link,
        address: Address,
        target: FaultTarget,
        hub: Hub,
        partition: PartitionLog | None,
        is_idempotent: bool = False,
    ) -> None:
        super().__init__(connection, link, address, Right.SEND, target)
        self.last_transfer = asyncio.get_running_loop().time()
        self.credit = GATEWAY_CREDIT if partition is None else PARTITION_CREDIT
        self._hub = hub
        self._partition = partition
        self._is_idempotent = is_idempotent
        self._accepted: list[int] = []
        self._unstored = 0

    def take(self, item: Incoming, ends: Fault | None = None) -> None:
        """Number the message's events and pass them to the store."""
        service = self.connection.service
        payload = item.payload
        if len(payload) > service.max_message_size:
            error = AmqpError(
                MESSAGE_SIZE_EXCEEDED,
                f"The received message (delivery-id:{item.delivery_id}, size:{len(payload)} bytes) exceeds the "
                f"limit ({service.max_message_size} bytes) currently allowed on the link.",
            )
            self._turn_down(item, error, ends)
            return
        try:
            key = partition_key_of(payload, bounds.ANNOTATION_ITEMS)
            if item.message_format == BATCH_MESSAGE_FORMAT:
                events, batch_key = decode_batch(payload), key
            else:
                events, batch_key = [payload], None
        except AmqpDecodeError as error:
            self._turn_down(item, AmqpError(DECODE_ERROR, error.description), ends)
            return
        if key is not None and len(key) > MAX_KEY_LENGTH and service.refuses_long_keys:
            text = f"The partition key has {len(key)} characters. It may have {MAX_KEY_LENGTH}."
            self._turn_down(item, AmqpError(ARGUMENT_ERROR, text), ends)
            return
        partition = self._partition
        if partition is None and key is None:
            partition = self._hub.next_partition()
        elif partition is None and key is not None:
            if len(key) > LONG:
                # Later messages wait, so that the order of the link's events is kept.
                self._is_blocked = True
                done = partial(self._hashed, item=item, events=events, batch_key=batch_key, ends=ends)
                service.long_keys.hash(key, partial(self.connection.guard, done))
                return
            partitions = self._hub.partitions
            partition = partitions[partition_for_key(key, len(partitions))]
        assert partition is not None
        self._take(item, events, batch_key, partition, ends)

    def _hashed(
        self, value: int, item: Incoming, events: list[bytes], batch_key: str | None, ends: Fault | None
    ) -> None:
        """Process a message after its long key was hashed, then those after it."""
        if self.connection.service.hub(self._hub.name) is not self._hub:
            return  # the hub was recreated meanwhile: the link is detached, and messages for the old hub are gone
        self._is_blocked = False
        if not self.is_open:
            item = item._replace(delivery_id=None)  # there is no link left to answer on
        partitions = self._hub.partitions
        self._take(item, events, batch_key, partitions[partition_for_hash(value, len(partitions))], ends)
        self._work()
        self.connection.flush()

    def _take(
        self, item: Incoming, events: list[bytes], batch_key: str | None, partition: PartitionLog, ends: Fault | None
    ) -> None:
        try:
            refusal = self._store(partition, events, batch_key, MessageTicket(self, item.delivery_id, ends))
        except AmqpDecodeError as error:
            self._turn_down(item, AmqpError(DECODE_ERROR, error.description), ends)
        else:
            if refusal is not None:
                self._turn_down(item, AmqpError(refusal.condition, refusal.description), ends)

    def _store(
        self, partition: PartitionLog, events: list[bytes], batch_key: str | None, ticket: MessageTicket
    ) -> Refusal | None:
        run: Run | None = None
        if self._is_idempotent:
            numbered = run_of(events)
            if isinstance(numbered, Refusal):
                return numbered
            run, events = numbered
        refusal = self.connection.service.store(partition, events, batch_key, ticket, run=run)
        if refusal is None:
            self._unstored += 1
        return refusal

    def _turn_down(self, item: Incoming, error: AmqpError, ends: Fault | None) -> None:
        if ends is None or answers_first(ends.action):
            self.reject(item, error)
        if ends is not None:
            self.strike(ends)

    def reject(self, item: Incoming, error: AmqpError) -> None:
        """Settle the message as rejected."""
        if item.delivery_id is not None:
            self.link.settle(item.delivery_id, item.delivery_id, Rejected(error))

    def stored(self, ticket: MessageTicket) -> None:
        """Record that a message is stored; `worked` notifies the producer."""
        self._unstored -= 1
        ends = ticket.ends
        if ticket.delivery_id is not None and (ends is None or answers_first(ends.action)):
            self._accepted.append(ticket.delivery_id)
        if ends is not None:
            self.worked()
            self.strike(ends)

    def failed(self, ticket: MessageTicket, reason: str) -> None:
        """Notify the producer that a message could not be stored."""
        self._unstored -= 1
        if self.is_open and ticket.delivery_id is not None:
            error = AmqpError(INTERNAL_ERROR, f"The event could not be stored: {reason}")
            self.link.settle(ticket.delivery_id, ticket.delivery_id, Rejected(error))

    def worked(self) -> None:
        """Settle stored messages, consecutive ones in one disposition, and replenish the credit."""
        if not self.is_open:
            return
        self.last_transfer = asyncio.get_running_loop().time()
        accepted = self._accepted
        if accepted:
            first = last = accepted[0]
            for delivery_id in accepted[1:]:
                if delivery_id != last + 1:
                    self.link.settle(first, last, _ACCEPTED)
                    first = delivery_id
                last = delivery_id
            self.link.settle(first, last, _ACCEPTED)
            accepted.clear()
        # Some clients send without credit, so the remaining credit may be far below zero.
        if self.link.credit <= self.credit // 2 and self._unstored < self.credit // 2:
            self.link.set_credit(self.credit)


class ConsumerEnd(LinkEnd):
    """A link on which a consumer reads a partition."""

    def __init__(
        self,
        connection: LinkConnection,
        link: Link,
        address: Address,
        target: FaultTarget,
        partition: PartitionLog,
        cursor: int,
        readers: ReaderTable,
        has_metrics: bool,
    ) -> None:
        super().__init__(connection, link, address, Right.LISTEN, target)
        self._partition = partition
        self._cursor = cursor
        self._readers = readers
        self._has_metrics = has_metrics
        self._is_blocked = False
        self._may_pass = False
        partition.listeners.add(self.on_credit)

    def closed(self) -> None:
        """Remove the reader from the partition."""
        super().closed()
        self._partition.listeners.discard(self.on_credit)
        self._readers.leave(self)

    def on_credit(self) -> None:
        """Request a turn: there is credit, or there are events."""
        if not self._is_blocked and self.link.credit > 0:
            self.connection.wants_turn(self)

    def resume(self) -> None:
        """Continue after a delay or hold, with the event on which it fired."""
        if self.is_open:
            self._is_blocked = False
            self._may_pass = True
            self.on_credit()

    def deliver(self) -> bool:
        """Send one run of events; return whether more can be sent at once."""
        if not self.is_open or self._is_blocked or not self.link.is_attached:
            return False
        log = self._partition
        if self._cursor < log.beginning:
            self._cursor = log.beginning
        start = self._cursor - log.beginning
        try:
            if self.connection.service.faults.is_any_set:
                sent, more = self._deliver_with_faults(log.payloads, start)
            elif self._has_metrics:
                sent = self._send_with_metrics(log.payloads, start, min(self.link.credit, 256))
                more = sent > 0
            else:
                sent = self.link.send_run(log.payloads, start, RUN_BYTES)
                more = sent > 0
        except EventTooLargeError as error:
            self.detach(AmqpError(MESSAGE_SIZE_EXCEEDED, str(error)))
            return False
        self._cursor += sent
        self._end_drain()
        return more and self.link.credit > 0 and self._cursor < log.end

    def _end_drain(self) -> None:
        if self.link.drain and self.is_open and self._cursor >= self._partition.end:
            self.link.drained()

    def _send_with_metrics(self, payloads: list[bytes], start: int, count: int) -> int:
        if count <= 0 or start >= len(payloads):
            return 0
        facts = self._partition.facts()
        metrics = {
            LAST_ENQUEUED_SEQUENCE_NUMBER_EPOCH: Int(-1),
            LAST_ENQUEUED_SEQUENCE_NUMBER: facts.last_enqueued_sequence_number,
            LAST_ENQUEUED_OFFSET: facts.last_enqueued_offset,
            LAST_ENQUEUED_TIME: Timestamp.from_datetime(facts.last_enqueued_time),
            RUNTIME_INFO_RETRIEVAL_TIME: Timestamp(self.connection.service.now_ms()),
        }
        run = add_delivery_annotations(payloads[start : start + count], metrics)
        return self.link.send_run(run, 0, RUN_BYTES)

    def _deliver_with_faults(self, payloads: list[bytes], start: int) -> tuple[int, bool]:
        available = min(self.link.credit, self.link.session.remote_incoming_window, len(payloads) - start, _FAULTY_RUN)
        if available <= 0:
            self.link.send_run(payloads, start, 0)
            return 0, False
        free = 1 if self._may_pass else 0
        self._may_pass = False
        passed, fault = self.connection.service.faults.allowance(Performative.TRANSFER, self.target, available - free)
        is_answered = fault is not None and answers_first(fault.action)
        passed += free + is_answered
        sent = 0
        while sent < passed:
            if self._has_metrics:
                step = self._send_with_metrics(payloads, start + sent, passed - sent)
            else:
                step = self.link.send_run(payloads[start + sent : start + passed], 0, 1 << 62)
            assert step > 0
            sent += step
        if fault is None:
            return sent, True
        if not is_answered:
            self.connection.flush()
        self._is_blocked = self.strike(fault)
        return sent, False
