"""Requests and responses over a pair of links to one node: `$cbs` and `$management` (protocol.md 3.1, 4.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eventpump.aio.tasks import reject, resolve
from eventpump.amqp.message import Message
from eventpump.amqp.performatives import Source, Target
from eventpump.errors import EventPumpError, LinkDetachedError, ProtocolError, Recovery, ServiceTimeoutError
from eventpump.eventhubs.requests import correlation_id
from eventpump.transport.base import BaseConnection, LinkSpec
from eventpump.transport.links import ClientReceiveLink, ClientSendLink

_CREDIT = 100


class RequestLinks:
    """A sender and a receiver of one node on one connection, attached on first use, and again after a detach."""

    def __init__(self, connection: BaseConnection, node: str) -> None:
        self._connection = connection
        self._node = node
        self._waiting: dict[object, asyncio.Future[Message]] = {}
        self._opening = asyncio.Lock()
        self._sender: ClientSendLink | None = None
        self._receiver: ClientReceiveLink | None = None
        self._reply_to = ""
        self._received = 0
        self._answers = 0

    @property
    def is_alive(self) -> bool:
        """Whether the connection is alive."""
        return self._connection.is_alive

    async def request(self, make: Callable[[str], Message], message_id: str, *, timeout: float) -> Message:
        """Send a request, made for the address to reply to, and wait for its answer.
        Raises `ServiceTimeoutError` at its time."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        asked, answers = self._connection.asked(), self._answers
        self._connection.requests += 1
        try:
            async with asyncio.timeout(timeout):
                sender = await self._attached()
                self._waiting[message_id] = answer
                await sender.send(make(self._reply_to).encode())
                return await answer
        except (TimeoutError, ServiceTimeoutError):
            is_dropped = self._connection.unanswered(asked)
            if self._answers == answers:
                # No request was answered meanwhile: these links are stuck, and the next request uses new ones.
                self._fail(ServiceTimeoutError("the node answers no request", entity=self._node))
            raise ServiceTimeoutError(
                f"no answer within {timeout} s",
                entity=self._node,
                recovery=Recovery.RECONNECT if is_dropped else Recovery.RETRY,
            ) from None
        finally:
            self._connection.requests -= 1
            self._waiting.pop(message_id, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # retrieved, even if the send failed first and its error is raised

    async def _attached(self) -> ClientSendLink:
        async with self._opening:
            if self._sender is not None and self._sender.is_attached:
                return self._sender
            self._reply_to = self._connection.new_name(self._node)
            receiver = ClientReceiveLink(self._connection, self, entity=self._node)
            await receiver.attach(
                LinkSpec(
                    self._reply_to,
                    Source(address=self._node),
                    Target(address=self._reply_to),
                    max_message_size=1024 * 1024,
                )
            )
            sender = ClientSendLink(self._connection, entity=self._node, on_lost=self.detached)
            try:
                name = self._connection.new_name(self._node)
                await sender.attach(LinkSpec(name, Source(address=self._reply_to), Target(address=self._node)))
                if receiver.error is not None:
                    sender.detach_now()
                    raise receiver.error
            except BaseException:
                receiver.detach_now()
                raise
            self._received = 0
            receiver.set_credit(_CREDIT)
            self._receiver, self._sender = receiver, sender
            return sender

    # ----------------------------------------------------------------------------------- ReceiveSink

    def messages(self, batch: list[bytes]) -> None:
        """Complete the requests that are answered. An answer without a waiting request came too late."""
        self._answers += 1
        for raw in batch:
            try:
                message = Message.decode(raw)
            except ProtocolError as error:
                self._fail(LinkDetachedError(f"an answer cannot be decoded: {error}", entity=self._node))
                return
            name = correlation_id(message)
            waiting = self._waiting.get(name) if isinstance(name, str) else None
            if waiting is not None:
                resolve(waiting, message)
        self._received += len(batch)
        if self._received >= _CREDIT // 2 and self._receiver is not None:
            self._received = 0
            self._receiver.set_credit(_CREDIT)

    def detached(self, error: EventPumpError) -> None:
        """Fail the waiting requests; the next one attaches again."""
        self._fail(error)

    def _fail(self, error: EventPumpError) -> None:
        sender, receiver = self._sender, self._receiver
        self._sender = self._receiver = None
        if sender is not None:
            sender.abandon(error)
        if receiver is not None:
            receiver.detach_now()
        for waiting in self._waiting.values():
            reject(waiting, error)
