"""The `$cbs` and `$management` nodes: links for requests and links for answers."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime
from typing import Protocol

from eventpump.amqp.codec import AmqpDecodeError, count_items
from eventpump.amqp.link import Link
from eventpump.amqp.message import Message
from eventpump.amqp.performatives import Accepted, AmqpError, Rejected
from eventpump.emulator import bounds
from eventpump.emulator.auth import Denial, Grant, Grants
from eventpump.emulator.faults import Fault, FaultTarget, answers_first
from eventpump.emulator.links import Incoming, LinkConnection, LinkEnd, ReceivingEnd
from eventpump.emulator.log import invalid_partition
from eventpump.errors import EventTooLargeError
from eventpump.eventhubs import cbs, management
from eventpump.eventhubs.addresses import Address, AddressKind
from eventpump.eventhubs.conditions import (
    ARGUMENT_OUT_OF_RANGE,
    AUTH_FAILED,
    DECODE_ERROR,
    INTERNAL_ERROR,
    MESSAGE_SIZE_EXCEEDED,
    NOT_FOUND,
    RESOURCE_LIMIT_EXCEEDED,
    SERVER_BUSY,
    TIMEOUT,
    UNAUTHORIZED_ACCESS,
)
from eventpump.eventhubs.properties import HubProperties
from eventpump.eventhubs.requests import BadRequestError, answer, message_id, reply_to

REQUEST_CREDIT = 100
_SETTLED = 1
MAX_WAITING_ANSWERS = 1000

_STATUS: dict[str, int] = {
    SERVER_BUSY: 503,
    TIMEOUT: 408,
    UNAUTHORIZED_ACCESS: 401,
    NOT_FOUND: 404,
    INTERNAL_ERROR: 500,
    RESOURCE_LIMIT_EXCEEDED: 403,
}


def _request_of(payload: bytes) -> Message:
    """Decode a request. Raises `AmqpDecodeError` if it is none, or its id cannot be repeated in an answer (3.2.4)."""
    count_items(payload, 0, len(payload), bounds.REQUEST_ITEMS)
    request = Message.decode(payload)
    name = message_id(request)
    if isinstance(name, int) and name < 0:
        raise AmqpDecodeError("a message id must be a ulong, a UUID, binary or a string")
    return request


class NodeConnection(LinkConnection, Protocol):
    """What a node's link calls of its connection; see `ServiceConnection`."""

    waiting_answers: int

    @property
    def grants(self) -> Grants:
        """The rights granted by its tokens."""

    @property
    def max_waiting_answers(self) -> int:
        """The most bytes of answers that may wait for credit."""

    def granted(self, grant: Grant) -> None:
        """Add the rights of a token."""

    def answered(self) -> None:
        """Called when an answer was sent that the client has to settle."""

    def answer_link(self, request: RequestEnd, reply_to: str | None) -> AnswerEnd | None:
        """Return the link for a node's answer."""


class AnswerEnd(LinkEnd):
    """A link for a node's answers. They wait for credit, within bounds."""

    connection: NodeConnection

    def __init__(self, connection: NodeConnection, link: Link, address: Address, target: FaultTarget) -> None:
        super().__init__(connection, link, address, None, target)
        self._waiting: deque[bytes] = deque()
        self._unsettled: deque[tuple[float, int]] = deque()
        self._tags = 0

    @property
    def names(self) -> set[object]:
        """The names by which a request's reply-to can refer to this link: its name (JavaScript), its target (.NET)."""
        remote = self.link.remote
        target = None if remote is None or remote.target is None else remote.target.address
        return {self.link.name, target}

    def answer(self, message: Message) -> None:
        """Send an answer as soon as there is credit for it."""
        self._waiting.append(message.encode(is_padded=True))
        self.connection.waiting_answers += len(self._waiting[-1])
        self.on_credit()
        if (
            len(self._waiting) > MAX_WAITING_ANSWERS
            or self.connection.waiting_answers > self.connection.max_waiting_answers
        ):
            self.detach(AmqpError(RESOURCE_LIMIT_EXCEEDED, "Too many answers wait for credit."))

    def closed(self) -> None:
        """Drop the waiting answers."""
        super().closed()
        self.connection.waiting_answers -= sum(map(len, self._waiting))
        self._waiting.clear()

    def on_credit(self) -> None:
        """Send waiting answers, as far as credit and the session window allow: otherwise the engine would hold them."""
        try:
            # The engine may already have read a detach whose event has not been handled yet.
            while self._waiting and self.link.is_attached and self._send(self._waiting[0]):
                self.connection.waiting_answers -= len(self._waiting.popleft())
        except EventTooLargeError as error:
            self.detach(AmqpError(MESSAGE_SIZE_EXCEEDED, str(error)))
        if self.link.is_attached and self.link.drain:
            self.link.drained()

    def _send(self, payload: bytes) -> bool:
        """Send an answer, settled if the client asked for that. Return False where it has to wait."""
        link = self.link
        if link.snd_settle_mode == _SETTLED:
            return link.send_run((payload,)) > 0
        if link.credit <= 0 or link.session.remote_incoming_window <= 0:
            link.session.mark_starved()
            return False
        self._tags += 1
        delivery_id = link.send(payload, tag=self._tags.to_bytes(4, "little"))
        self._unsettled.append((asyncio.get_running_loop().time(), delivery_id))
        if len(self._unsettled) > MAX_WAITING_ANSWERS:
            self._settle_oldest()
        self.connection.answered()
        return True

    @property
    def unsettled_since(self) -> float | None:
        """When the oldest answer was sent that the client has not settled, on the loop's clock; None without any."""
        unsettled = self.link.session.unsettled
        while self._unsettled and self._unsettled[0][1] not in unsettled:
            self._unsettled.popleft()
        return self._unsettled[0][0] if self._unsettled else None

    def settle_before(self, when: float) -> None:
        """Settle answers that were sent by then, and that the client left unsettled."""
        while (since := self.unsettled_since) is not None and since <= when:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        _, delivery_id = self._unsettled.popleft()
        if delivery_id in self.link.session.unsettled:
            self.link.settle(delivery_id, delivery_id, Accepted())


class RequestEnd(ReceivingEnd):
    """A link for requests to a node."""

    connection: NodeConnection

    def __init__(self, connection: NodeConnection, link: Link, address: Address, target: FaultTarget) -> None:
        super().__init__(connection, link, address, None, target)

    def take(self, item: Incoming, ends: Fault | None = None) -> None:
        """Settle the request, execute it, and answer."""
        try:
            request = _request_of(item.payload)
        except AmqpDecodeError as error:
            self._settle(item, AmqpError(DECODE_ERROR, error.description))
            return
        self._settle(item, None)
        response = self._put_token(request) if self.address.kind is AddressKind.CBS else self._read(request)
        if ends is None or answers_first(ends.action):
            self._answer(request, response)
        if ends is not None:
            self.strike(ends)

    def reject(self, item: Incoming, error: AmqpError) -> None:
        """Answer with the status of an error."""
        try:
            request = _request_of(item.payload)
        except AmqpDecodeError:
            self._settle(item, error)
            return
        self._settle(item, None)
        code = _STATUS.get(error.condition, 400)
        condition = None if self.address.kind is AddressKind.CBS else error.condition
        self._answer(request, answer(request, code, error.description or "", condition))

    def worked(self) -> None:
        """Replenish the credit."""
        if self.link.credit <= REQUEST_CREDIT // 2:
            self.link.set_credit(REQUEST_CREDIT)

    def _settle(self, item: Incoming, error: AmqpError | None) -> None:
        if item.delivery_id is not None:
            self.link.settle(item.delivery_id, item.delivery_id, Accepted() if error is None else Rejected(error))

    def _answer(self, request: Message, response: Message) -> None:
        link = self.connection.answer_link(self, reply_to(request))
        # Without a link to answer on, there is no answer.
        if link is not None:
            link.answer(response)

    def _put_token(self, request: Message) -> Message:
        service = self.connection.service
        try:
            put = cbs.parse_put_token(request)
        except BadRequestError as error:
            return cbs.response(request, error.code, str(error))
        grant = service.keys.check_token(put.token, put.token_type, put.audience, service.now())
        if isinstance(grant, Denial):
            return cbs.response(request, grant.code, grant.description, AUTH_FAILED if grant.code == 401 else None)
        if grant.audience.hub is not None and service.hub(grant.audience.hub) is None:
            return cbs.response(request, 404, service.no_such_hub(grant.audience.hub), NOT_FOUND)
        self.connection.granted(grant)
        return cbs.response(request, 202, "Accepted")

    def _read(self, request: Message) -> Message:
        service = self.connection.service
        try:
            read = management.parse_request(request)
        except BadRequestError as error:
            return management.error_response(request, error.code, error.condition, str(error))
        if read.security_token is not None:
            denial = service.keys.check_request(read.security_token, read.hub, service.now())
            if denial is not None:
                return management.error_response(request, denial.code, UNAUTHORIZED_ACCESS, denial.description)
        if not self.connection.grants.allow_read(read.hub):
            return management.error_response(
                request, 401, UNAUTHORIZED_ACCESS, "No valid token was put for the entity."
            )
        hub = service.hub(read.hub)
        if hub is None:
            return management.error_response(request, 404, NOT_FOUND, service.no_such_hub(read.hub))
        if read.partition_id is None:
            return management.hub_response(
                request,
                HubProperties(
                    name=hub.name,
                    created_at=datetime.fromtimestamp(hub.created_ms / 1000, UTC),
                    partition_ids=tuple(partition.partition_id for partition in hub.partitions),
                ),
            )
        partition = hub.partition(read.partition_id)
        if partition is None:
            return management.error_response(
                request,
                400,
                ARGUMENT_OUT_OF_RANGE,
                invalid_partition(hub, read.partition_id),
            )
        return management.partition_response(request, partition.facts())
