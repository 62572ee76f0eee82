"""An event hub in memory, and transports to it: for testing code that uses `interfaces.Transport` without a network.

`FakeHub` is the service: partitions, offsets, credit, owner levels, and scripted faults. Any number of `FakeTransport`s
can connect to one hub, like any number of hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Literal

from eventpump.amqp.message import Message
from eventpump.amqp.types import Int, Short, Symbol, Timestamp
from eventpump.emulator.ledger import PublishingLedger, Repeat, Run, claim_of, run_of
from eventpump.emulator.readers import Reader, ReaderTable, Refusal
from eventpump.errors import (
    ClosedError,
    ConnectionLostError,
    EventPumpError,
    EventTooLargeError,
    LinkDetachedError,
    Recovery,
)
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.envelope import decode_batch
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.eventhubs.names import (
    BATCH_MESSAGE_FORMAT,
    ENQUEUED_TIME,
    IDEMPOTENT_PRODUCER,
    LAST_ENQUEUED_OFFSET,
    LAST_ENQUEUED_SEQUENCE_NUMBER,
    LAST_ENQUEUED_TIME,
    OFFSET,
    PARTITION_KEY,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    PRODUCER_SEQUENCE_NUMBER,
    RUNTIME_INFO_RETRIEVAL_TIME,
    SEQUENCE_NUMBER,
)
from eventpump.interfaces import HubProperties, PartitionProperties, ReceiveLinkSpec, ReceiveSink, SendLinkSpec

_RUN = 256
"""The most messages passed to a sink at once."""


@dataclass(frozen=True, slots=True)
class _Stall:
    """Links that are open and silent."""

    answers_echo: bool


@dataclass(slots=True)
class _Partition:
    """A partition's log. An event's place in the list is its sequence number minus `first`."""

    partition_id: str
    first: int = 0
    raw: list[bytes] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)
    links: list[FakeReceiveLink] = field(default_factory=list)
    readers: dict[str, ReaderTable] = field(default_factory=dict)
    publishing: PublishingLedger = field(default_factory=PublishingLedger)
    stall: _Stall | None = None
    compacted: set[int] = field(default_factory=set)

    @property
    def next(self) -> int:
        return self.first + len(self.raw)


class SendFault(enum.Enum):
    """The fate of a message whose answer is lost."""

    LOST_BEFORE_STORE = "lost before store"
    LOST_AFTER_STORE = "lost after store"
    STORED_LATE = "stored late"
    """It reaches the service when `deliver_late` is called, after everything that was sent in between."""


@dataclass(slots=True)
class _Loss:
    fault: SendFault
    partition_id: str | None
    is_connection: bool
    after: int


@dataclass(slots=True)
class _Refusal:
    operation: str
    error: EventPumpError
    partition_id: str | None
    left: float


class FakeHub:
    """A hub in memory.

    Args:
        name: The hub's name. Default: "telemetry".
        partitions: The initial number of partitions. Default: 4.
        consumer_groups: The consumer groups that it has. Default: `("$Default",)`.
        fully_qualified_namespace: The host name of its namespace. Default: "fake.servicebus.windows.net".
        latency: Seconds of delay in each direction. Default: 0.0.
        max_message_size: The largest message of a link, in bytes. Default: 1,048,576.
    """

    def __init__(
        self,
        name: str = "telemetry",
        partitions: int = 4,
        *,
        consumer_groups: Sequence[str] = ("$Default",),
        fully_qualified_namespace: str = "fake.servicebus.windows.net",
        latency: float = 0.0,
        max_message_size: int = 1024 * 1024,
    ) -> None:
        self.name = name
        self.consumer_groups = set(consumer_groups)
        self.fully_qualified_namespace = fully_qualified_namespace
        self.latency = latency
        self.max_message_size = max_message_size
        self.created_at = datetime(2024, 1, 1, tzinfo=UTC)
        self.attached: list[ReceiveLinkSpec] = []
        """Every receive link that was ever attached, in order."""
        self.peak_outstanding = 0
        self.answers_echo = True
        """Whether the service answers a probe of a link that is not stalled, as AMQP requires."""
        self.probes: list[str] = []
        """The partitions whose links were probed, in order."""
        self.looks: list[tuple[str, float]] = []
        """The partitions whose properties were read, in order, and when, on the loop's clock."""
        self.send_links: list[SendLinkSpec] = []
        """Every send link that was ever attached, in order."""
        self.runs: list[tuple[str, Run, tuple[bytes, ...]]] = []
        """Every numbered message that left a client, stored or not: partition, numbers, events without them."""
        self._partitions: dict[str, _Partition] = {}
        self._refusals: list[_Refusal] = []
        self._losses: list[_Loss] = []
        self._late: list[Callable[[], None]] = []
        self._rng = random.Random(7)
        self._stalled: dict[str, asyncio.Event] = {}
        self._turn = 0
        self._transports: list[FakeTransport] = []
        self._began = self.created_at
        self.add_partitions(partitions)

    # ----------------------------------------------------------------------------------------- what a test does

    @property
    def partition_ids(self) -> tuple[str, ...]:
        """The current partitions."""
        return tuple(self._partitions)

    def add_partitions(self, count: int) -> None:
        """Add partitions to the hub."""
        for number in range(len(self._partitions), len(self._partitions) + count):
            self._partitions[str(number)] = _Partition(str(number))

    def publish(self, partition_id: str, *bodies: bytes | str, count: int | None = None) -> list[int]:
        """Store events, and return their sequence numbers.

        Args:
            count: Store this many events instead, with their sequence numbers as bodies; None for `bodies`.
        """
        partition = self._partitions[partition_id]
        if count is not None:
            bodies = tuple(str(partition.next + index) for index in range(count))
        numbers = [self._store(partition, EventData(body).encode()) for body in bodies]
        self._serve(partition)
        return numbers

    def truncate(self, partition_id: str, before: int) -> None:
        """Drop the events below a sequence number, as retention does."""
        partition = self._partitions[partition_id]
        dropped = max(0, min(before, partition.next) - partition.first)
        del partition.raw[:dropped]
        del partition.times[:dropped]
        partition.first += dropped

    def compact(self, partition_id: str, numbers: Iterable[int]) -> None:
        """Drop single events, as a compacted hub does: their numbers stay unused."""
        self._partitions[partition_id].compacted.update(numbers)

    def detach(self, partition_id: str | None = None, error: EventPumpError | None = None) -> int:
        """End the receive links of a partition, or all, with an error. Return how many there were.

        Args:
            partition_id: The partition; None for all.
            error: What they end with; None for a forced detach.
        """
        ended = 0
        for partition in self._chosen(partition_id):
            for link in list(partition.links):
                link.end(error or error_for("amqp:link:detach-forced", "detached by the test"))
                ended += 1
        return ended

    def lose_connections(self) -> None:
        """Disconnect every transport: their links end, and pending requests fail. They may reconnect at once."""
        for transport in self._transports:
            transport.lose(ConnectionLostError("the connection was cut by the test"))

    def stall(
        self,
        partition_id: str | None = None,
        *,
        answers_echo: bool = False,
        until: Literal["resumed", "reopened", "reconnected"] = "resumed",
    ) -> None:
        """Stall the links of a partition, or all: they stay open and silent.

        Args:
            partition_id: The partition; None for all.
            answers_echo: Whether they still answer a probe. Default: False.
            until: The extent: all links until `resume` is called ("resumed"); only the current links, so that a
                reopened one is not stalled ("reopened"); or the current connections ("reconnected"). `resume` ends
                each. Default: "resumed".
        """
        stall = _Stall(answers_echo)
        for partition in self._chosen(partition_id):
            if until == "resumed":
                partition.stall = stall
            for link in partition.links:
                if until == "reopened":
                    link.stall = stall
            for transport in self._transports:
                if until == "reconnected":
                    transport.stalls[partition.partition_id] = stall

    def resume(self, partition_id: str | None = None) -> None:
        """End a stall.

        Args:
            partition_id: The partition; None for all.
        """
        for partition in self._chosen(partition_id):
            partition.stall = None
            for link in partition.links:
                link.stall = None
            for transport in self._transports:
                transport.stalls.pop(partition.partition_id, None)
            self._serve(partition)

    def refuse(
        self, error: EventPumpError, *, operation: str = "receive", partition_id: str | None = None, times: float = 1
    ) -> None:
        """Refuse requests with an error.

        Args:
            operation: "receive" or "send" for attaching, "transfer", "hub" or "partition" for reading properties.
                Default: "receive".
            partition_id: None for any.
            times: How often; infinity for as long as `accept` is not called. Default: 1.
        """
        self._refusals.append(_Refusal(operation, error, partition_id, times))

    def accept(self) -> None:
        """End all refusals."""
        self._refusals.clear()

    def lose(
        self, fault: SendFault, *, partition_id: str | None = None, connection: bool = False, after: int = 0
    ) -> None:
        """End the link at the next message to a partition, or to any, without an answer. Once.

        Args:
            partition_id: The partition; None for any.
            connection: Whether to disconnect the whole client. Default: False.
            after: How many messages pass before. Default: 0.
        """
        self._losses.append(_Loss(fault, partition_id, connection, after))

    def deliver_late(self) -> int:
        """Let late messages reach the service now. Return how many there were; they are not answered."""
        late, self._late = self._late, []
        for deliver in late:
            deliver()
        return len(late)

    def hang(self, operation: str) -> None:
        """Answer no request of a kind (see `refuse`) until `answer` is called; "credit" prevents messages from being
        sent."""
        self._stalled[operation] = asyncio.Event()

    def answer(self, operation: str) -> None:
        """End a `hang`."""
        self._stalled.pop(operation).set()

    def owner_levels(self, partition_id: str) -> list[int | None]:
        """The owner levels of the links that are attached to a partition."""
        return [link.spec.owner_level for link in self._partitions[partition_id].links]

    def credit(self, partition_id: str) -> list[int]:
        """The remaining credit of each link attached to a partition."""
        return [link.credit for link in self._partitions[partition_id].links]

    def events(self, partition_id: str) -> list[ReceivedEvent]:
        """The events of a partition."""
        return list(map(ReceivedEvent, self._partitions[partition_id].raw))

    def recreate(self, partitions: int | None = None) -> None:
        """Delete and recreate the hub: a later creation time, no events, numbers from 0. Links to the old one end.

        Args:
            partitions: The new number of partitions; None for the same as before.
        """
        old, count = list(self._partitions.values()), len(self._partitions) if partitions is None else partitions
        # At least a millisecond later, so that the two can be distinguished.
        self.created_at = max(self.now(), self.created_at + timedelta(milliseconds=1))
        self._partitions = {}
        self.add_partitions(count)
        for partition in old:
            for link in list(partition.links):
                text = f"The messaging entity '{self.name}' could not be found."
                link.end(error_for("amqp:not-found", text, entity=self.name))

    # ------------------------------------------------------------------------------------ what a transport does

    def join(self, transport: FakeTransport) -> None:
        """Register a transport."""
        self._transports.append(transport)

    async def request(self, operation: str, partition_id: str | None = None) -> None:
        """Delay a request by the latency, and refuse it if a test requested that.

        Args:
            partition_id: The partition that it is about; None if it is about none.
        """
        if self.latency:
            await asyncio.sleep(self.latency)
        await self.until_answered(operation)
        for refusal in self._refusals:
            if refusal.operation == operation and refusal.partition_id in {None, partition_id}:
                refusal.left -= 1
                if refusal.left <= 0:
                    self._refusals.remove(refusal)
                raise refusal.error

    async def until_answered(self, operation: str) -> None:
        """Wait as long as a test requests it."""
        while (stalled := self._stalled.get(operation)) is not None:
            await stalled.wait()

    def loss(self, partition_id: str | None) -> _Loss | None:
        """Count a message. Return how it is lost, or None."""
        for loss in self._losses:
            if loss.partition_id in {None, partition_id}:
                loss.after -= 1
                if loss.after < 0:
                    self._losses.remove(loss)
                    return loss
                return None
        return None

    def delay(self, deliver: Callable[[], None]) -> None:
        """Keep a message for `deliver_late`."""
        self._late.append(deliver)

    def check_hub(self, hub: str) -> None:
        """Refuse a hub that is not this one."""
        if hub.lower() != self.name.lower():
            text = f"The messaging entity '{hub}' could not be found."
            raise error_for("amqp:not-found", text, entity=hub)

    def partition(self, partition_id: str) -> _Partition:
        """Return a partition.

        Raises:
            RequestRefusedError: It does not exist.
        """
        found = self._partitions.get(partition_id)
        if found is None:
            text = f"The specified partition is invalid for an EventHub partition sender or receiver: {partition_id}"
            raise error_for("com.microsoft:argument-out-of-range", text, entity=partition_id)
        return found

    def admit(self, link: FakeReceiveLink) -> None:
        """Attach a receive link by the epoch rules.

        Raises:
            ServiceError: Refused.
        """
        spec = link.spec
        if spec.consumer_group.lower() not in {group.lower() for group in self.consumer_groups}:
            text = f"The messaging entity '{spec.hub}|{spec.consumer_group}' could not be found."
            raise error_for("amqp:not-found", text, entity=spec.consumer_group)
        partition = link.partition = self.partition(spec.partition_id)
        link.next = self._index(partition, spec.position)
        table = partition.readers.setdefault(spec.consumer_group.lower(), ReaderTable())
        answer = table.admit(Reader(link, spec.receiver_name, spec.owner_level))
        if isinstance(answer, Refusal):
            raise error_for(answer.condition, answer.description, entity=spec.partition_id)
        for eviction in answer:
            assert isinstance(eviction.reader.key, FakeReceiveLink)
            eviction.reader.key.end(error_for(eviction.refusal.condition, eviction.refusal.description))
        partition.links.append(link)
        self.attached.append(spec)

    def leave(self, link: FakeReceiveLink) -> None:
        """Remove a link."""
        partition = link.partition
        if link in partition.links:
            partition.links.remove(link)
        partition.readers[link.spec.consumer_group.lower()].leave(link)

    def run(self, link: FakeReceiveLink) -> list[bytes]:
        """Return the messages that may be sent on a link now."""
        partition = link.partition
        if self.stall_of(link) is not None:
            return []
        start = max(link.next, partition.first)
        kept = (number for number in range(start, partition.next) if number not in partition.compacted)
        numbers = list(islice(kept, min(link.credit, _RUN)))
        if not numbers:
            return []
        link.next = numbers[-1] + 1
        batch = [partition.raw[number - partition.first] for number in numbers]
        return [self._annotate(partition, raw) for raw in batch] if link.spec.track_last_enqueued else batch

    def stall_of(self, link: FakeReceiveLink) -> _Stall | None:
        """Return the stall of a link, or None."""
        partition_id = link.spec.partition_id
        return link.stall or self._partitions[partition_id].stall or link.transport.stalls.get(partition_id)

    def publish_as(self, spec: SendLinkSpec) -> dict[str, object]:
        """Attach a send link. Return the answered properties.

        Raises:
            ServiceError: Refused.
        """
        if spec.partition_id is not None:
            self.partition(spec.partition_id)
        self.send_links.append(spec)
        if IDEMPOTENT_PRODUCER not in spec.desired_capabilities:
            return dict(spec.properties)
        if spec.partition_id is None:
            raise error_for("amqp:not-allowed", "an idempotent producer sends to a partition", lost=Recovery.RELINK)
        ledger = self.partition(spec.partition_id).publishing
        claim = claim_of(spec.properties)
        answer = claim if isinstance(claim, Refusal) else ledger.attach(claim, self._rng)
        if isinstance(answer, Refusal):
            raise error_for(answer.condition, answer.description, entity=spec.partition_id, lost=Recovery.RELINK)
        ledger.committed(answer.state)
        return {
            PRODUCER_ID: answer.state.producer_id,
            PRODUCER_EPOCH: Short(answer.state.epoch),
            PRODUCER_SEQUENCE_NUMBER: Int(answer.number),
        }

    def left(self, payload: bytes, partition_id: str) -> None:
        """Record the numbers of a message that left a client."""
        numbered = run_of(decode_batch(payload))
        if not isinstance(numbered, Refusal):
            self.runs.append((partition_id, numbered[0], tuple(numbered[1])))

    def store(
        self, payload: bytes, message_format: int, partition_id: str | None, *, is_idempotent: bool = False
    ) -> None:
        """Store a producer's message.

        Args:
            is_idempotent: Whether its events carry numbers that are to be checked. Default: False.

        Raises:
            ServiceError: Refused.
        """
        messages = decode_batch(payload) if message_format == BATCH_MESSAGE_FORMAT else [payload]
        if is_idempotent:
            assert partition_id is not None
            ledger = self.partition(partition_id).publishing
            numbered = run_of(messages)
            judged = numbered if isinstance(numbered, Refusal) else ledger.judge(numbered[0])
            if isinstance(judged, Refusal):
                raise error_for(judged.condition, judged.description, entity=partition_id)
            if isinstance(judged, Repeat):
                return
            assert not isinstance(numbered, Refusal)
            ledger.advance(judged)
            ledger.committed(judged)
            messages = numbered[1]
        for raw in messages:
            target = partition_id
            if target is None:
                key = (Message.decode(raw).message_annotations or {}).get(PARTITION_KEY)
                self._turn += 1
                number = self._turn if key is None else partition_for_key(str(key), len(self._partitions))
                target = list(self._partitions)[number % len(self._partitions)]
            partition = self.partition(target)
            self._store(partition, raw)
            self._serve(partition)

    def properties(self) -> HubProperties:
        """Return the properties of the hub."""
        return HubProperties(self.name, self.created_at, self.partition_ids)

    def partition_properties(self, partition_id: str) -> PartitionProperties:
        """Return the properties of a partition."""
        partition = self.partition(partition_id)
        is_empty = not partition.raw
        return PartitionProperties(
            hub=self.name,
            partition_id=partition_id,
            beginning_sequence_number=partition.first,
            last_enqueued_sequence_number=partition.next - 1,
            last_enqueued_offset=_offset(partition.next - 1) if partition.next else "-1",
            last_enqueued_time=self.created_at if is_empty else partition.times[-1],
            is_empty=is_empty,
        )

    def now(self) -> datetime:
        """The time, counted from the first hub's creation on the loop's clock, in whole milliseconds."""
        return self._began + timedelta(milliseconds=int(_time() * 1000))

    # -------------------------------------------------------------------------------------------------- inside

    def _chosen(self, partition_id: str | None) -> list[_Partition]:
        return list(self._partitions.values()) if partition_id is None else [self._partitions[partition_id]]

    def _store(self, partition: _Partition, raw: bytes) -> int:
        number, now = partition.next, self.now()
        message = Message.decode(raw)
        annotations = dict(message.message_annotations or {})
        annotations |= {
            SEQUENCE_NUMBER: number,
            OFFSET: _offset(number),
            ENQUEUED_TIME: Timestamp.from_datetime(now),
        }
        message.message_annotations = annotations
        partition.raw.append(message.encode())
        partition.times.append(now)
        return number

    def _annotate(self, partition: _Partition, raw: bytes) -> bytes:
        message = Message.decode(raw)
        newest: dict[Symbol, object] = {
            LAST_ENQUEUED_SEQUENCE_NUMBER: partition.next - 1,
            LAST_ENQUEUED_OFFSET: _offset(partition.next - 1),
            LAST_ENQUEUED_TIME: Timestamp.from_datetime(partition.times[-1]),
            RUNTIME_INFO_RETRIEVAL_TIME: Timestamp.from_datetime(self.now()),
        }
        message.delivery_annotations = newest
        return message.encode()

    @staticmethod
    def _index(partition: _Partition, position: EventPosition) -> int:
        """Return the sequence number at which a position begins."""
        if position.sequence_number is not None:
            number = position.sequence_number + (not position.inclusive)
            if number > max(partition.next, 0):
                text = f"The supplied sequence number '{position.sequence_number}' is invalid."
                text += f" The last sequence number in the system is '{partition.next - 1}'"
                raise error_for("com.microsoft:argument-error", text, entity=partition.partition_id)
            return number
        if position.enqueued_time is not None:
            moment = position.enqueued_time
            for index, enqueued in enumerate(partition.times):
                if enqueued > moment or (position.inclusive and enqueued == moment):
                    return partition.first + index
            return partition.next
        if position.offset == "-1":
            return partition.first
        if position.offset == "@latest":
            return partition.next
        assert position.offset is not None
        prefix, _, digits = position.offset.partition(":")
        if prefix != "fake" or not digits.isdecimal():
            text = f"The supplied offset '{position.offset}' is invalid."
            raise error_for("com.microsoft:argument-error", text, entity=partition.partition_id)
        if int(digits) >= partition.next:
            last = _offset(partition.next - 1) if partition.next else "-1"
            text = f"The supplied offset '{position.offset}' is invalid. The last offset in the system is '{last}'"
            raise error_for("com.microsoft:argument-error", text, entity=partition.partition_id)
        return int(digits) + (not position.inclusive)

    @staticmethod
    def _serve(partition: _Partition) -> None:
        for link in list(partition.links):
            link.serve()


class FakeReceiveLink:
    """A receive link to a hub in memory. Created by `FakeTransport`."""

    def __init__(self, transport: FakeTransport, spec: ReceiveLinkSpec, sink: ReceiveSink) -> None:
        self.spec = spec
        self.partition: _Partition
        """The partition it is attached to."""
        self.transport = transport
        self.stall: _Stall | None = None
        """The stall of this link."""
        self.connection = transport.connection
        self.next = 0
        """The sequence number of the next message."""
        self._hub = transport.hub
        self._sink = sink
        self._is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sent = 0
        self._received = 0
        self._limit = 0
        self._is_serving = False
        self._is_open = True
        # A loop does not keep the order of timers that are due at the same time: messages in flight are queued here.
        self._flows: deque[int] = deque()
        self._in_flight: deque[list[bytes]] = deque()
        self._unread: list[bytes] = []
        self._held: asyncio.TimerHandle | None = None
        self._probes = 0

    @property
    def max_message_size(self) -> int:
        """The largest message of the link, in bytes."""
        return min(self._hub.max_message_size, self.spec.max_message_size)

    @property
    def credit(self) -> int:
        """The remaining credit, as known to the service."""
        return max(0, self._limit - self._sent)

    def set_credit(self, credit: int) -> None:
        """Grant credit for this many messages, counted from those that have arrived (AMQP 2.6.7)."""
        self._flows.append(self._received + credit)
        if self._hub.latency:
            asyncio.get_running_loop().call_later(self._hub.latency, self._flow)
        else:
            self._flow()

    def _flow(self) -> None:
        self._limit = self._flows.popleft()
        self._hub.peak_outstanding = max(self._hub.peak_outstanding, self._limit - self._received)
        self.serve()

    def serve(self) -> None:
        """Send available messages soon, as far as credit allows."""
        if self._is_open and not self._is_serving and self.credit:
            self._is_serving = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._is_serving = False
        if not self._is_open:
            return
        batch = self._hub.run(self)
        if not batch:
            return
        self._sent += len(batch)
        self._in_flight.append(batch)
        loop = asyncio.get_running_loop()
        if self._hub.latency:
            loop.call_later(self._hub.latency, self._arrive)
        else:
            loop.call_soon(self._arrive)
        self.serve()

    def _arrive(self) -> None:
        self._unread += self._in_flight.popleft()
        if self._held is None:
            self._read()

    def _read(self) -> None:
        """Pass on what has arrived, and leave what follows unread for the link's `delivery_interval`."""
        if self._held is not None:
            self._held.cancel()
            self._held = None
        batch, self._unread = self._unread, []
        if self._is_open and batch:
            self._received += len(batch)
            if self.spec.delivery_interval and not self._probes:
                self._held = asyncio.get_running_loop().call_later(self.spec.delivery_interval, self._read)
            self._sink.messages(batch)

    def end(self, error: EventPumpError) -> None:
        """Detach with an error, which is passed to the sink."""
        if self._leave():
            self._sink.detached(error)

    async def aclose(self) -> None:
        """Detach."""
        self._leave()

    def _leave(self) -> bool:
        if not self._is_open:
            return False
        self._is_open = False
        self._is_over.set_result(None)
        self._hub.leave(self)
        if self._held is not None:
            self._held.cancel()
        return True

    async def probe(self, timeout: float) -> bool | None:
        """Probe the link. Messages sent before the answer have arrived by then."""
        if not self._is_open:
            return None
        self._hub.probes.append(self.spec.partition_id)
        stall = self._hub.stall_of(self)
        is_answered = self._hub.answers_echo if stall is None else stall.answers_echo
        round_trip = 2 * self._hub.latency
        is_in_time = is_answered and round_trip <= timeout
        # The answer comes last of everything that is due at the same time: messages sent before it have arrived.
        self._probes += 1
        self._read()
        try:
            over, _ = await asyncio.wait({self._is_over}, timeout=round_trip + 1e-9 if is_in_time else timeout)
        finally:
            self._probes -= 1
        return None if over else is_in_time

    def drop_connection(self, reason: str) -> None:
        """Disconnect the transport, unless that has already happened."""
        if self.connection is self.transport.connection:
            self.transport.lose(ConnectionLostError(reason))


class FakePosted:
    """A message on its way to a hub in memory: `interfaces.PostedMessage`."""

    def __init__(self, sending: Coroutine[Any, Any, None], on_outcome: Callable[[BaseException | None], None]) -> None:
        self._on_outcome: Callable[[BaseException | None], None] | None = on_outcome
        self._task = asyncio.create_task(sending, name="send a posted message")
        self._task.add_done_callback(self._ended)

    def withdraw(self) -> None:
        """See `PostedMessage`."""
        self._on_outcome = None
        self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        on_outcome, self._on_outcome = self._on_outcome, None
        if on_outcome is not None:
            on_outcome(error)


class FakeSendLink:
    """A send link to a hub in memory. Created by `FakeTransport`."""

    def __init__(self, transport: FakeTransport, spec: SendLinkSpec) -> None:
        self._transport = transport
        self._hub = transport.hub
        self._spec = spec
        self._answer = self._hub.publish_as(spec)
        self._is_idempotent = IDEMPOTENT_PRODUCER in spec.desired_capabilities
        self._error: EventPumpError | None = None
        self._turn = asyncio.Lock()
        self._wire = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()
        self._on_the_wire: set[asyncio.Task[None]] = set()

    @property
    def max_message_size(self) -> int:
        """The largest message that the link accepts, in bytes."""
        return self._hub.max_message_size

    @property
    def properties(self) -> Mapping[str, object]:
        """What the service answered: the producer's state, or what was asked for."""
        return dict(self._answer)

    @property
    def is_attached(self) -> bool:
        """Whether messages can flow."""
        return self._error is None

    async def send(self, message: bytes, *, message_format: int = 0, on_sent: Callable[[], None] | None = None) -> None:
        """See `SendLink`. Cancelled once it has left, it is stored all the same, unless the link ends."""
        self._require(message)
        caller = asyncio.current_task()
        assert caller is not None
        before = caller.cancelling()

        async def hand_over() -> None:
            async with self._turn:
                await self._hub.until_answered("credit")
                if caller.cancelling() > before:
                    return  # nothing leaves after a cancellation, even if it is not carried out yet
                if on_sent is not None:
                    on_sent()
                if self._is_idempotent and self._spec.partition_id is not None:
                    self._hub.left(message, self._spec.partition_id)
                arriving = asyncio.ensure_future(self._arrive(message, message_format))
                self._on_the_wire.add(arriving)
                arriving.add_done_callback(self._arrived)
            await asyncio.wait({arriving})
            arriving.result()

        await _unless_ended(hand_over(), self._waiting, lambda: self._error)

    def _require(self, message: bytes) -> None:
        """Check that the link takes a message."""
        if len(message) > self.max_message_size:
            raise EventTooLargeError(len(message), self.max_message_size)
        if self._error is not None:
            raise self._error

    def post(
        self,
        message: bytes,
        on_outcome: Callable[[BaseException | None], None],
        *,
        message_format: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> FakePosted:
        """See `SendLink`."""
        self._require(message)
        return FakePosted(self.send(message, message_format=message_format, on_sent=on_sent), on_outcome)

    async def _arrive(self, message: bytes, message_format: int) -> None:
        hub, partition_id = self._hub, self._spec.partition_id

        def store() -> None:
            hub.store(message, message_format, partition_id, is_idempotent=self._is_idempotent)

        def store_unheard() -> None:
            with contextlib.suppress(EventPumpError):
                store()

        async with self._wire:
            await hub.request("transfer", partition_id)
            loss = hub.loss(partition_id)
            if loss is None:
                store()
                return
            if loss.fault is SendFault.LOST_AFTER_STORE:
                store_unheard()
            elif loss.fault is SendFault.STORED_LATE:
                hub.delay(store_unheard)
            if loss.is_connection:
                self._transport.lose(ConnectionLostError("the connection was cut by the test"))
            else:
                self.end(LinkDetachedError("detached by the test", condition="amqp:link:detach-forced"))

    def _arrived(self, arriving: asyncio.Task[None]) -> None:
        self._on_the_wire.discard(arriving)
        if not arriving.cancelled():
            arriving.exception()  # retrieved here, in case no caller is waiting for it

    def end(self, error: EventPumpError) -> None:
        """Detach with an error, with which the sends that wait fail."""
        if self._error is None:
            self._error = error
            for waiting in (*self._waiting, *self._on_the_wire):
                waiting.cancel()

    async def aclose(self) -> None:
        """Detach."""
        self.end(LinkDetachedError("the link was closed here"))


class FakeTransport:
    """`interfaces.Transport` to a hub in memory.

    Args:
        hub: The hub; None for one of its own.
    """

    def __init__(self, hub: FakeHub | None = None) -> None:
        self.hub = FakeHub() if hub is None else hub
        self.hub.join(self)
        self._links: list[FakeReceiveLink | FakeSendLink] = []
        self._waiting: set[asyncio.Task[None]] = set()
        self._lost: EventPumpError | None = None
        self.connection = object()
        """Stands for the connection: another after each loss."""
        self.stalls: dict[str, _Stall] = {}
        """What keeps the partitions' links of this connection silent."""
        self.is_closed = False

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name."""
        return self.hub.fully_qualified_namespace

    async def get_hub_properties(self, hub: str) -> HubProperties:
        """Read the hub's properties."""
        await self._ask("hub")
        self.hub.check_hub(hub)
        return self.hub.properties()

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        """Read a partition's properties."""
        self.hub.looks.append((partition_id, asyncio.get_running_loop().time()))
        await self._ask("partition", partition_id)
        self.hub.check_hub(hub)
        return self.hub.partition_properties(partition_id)

    async def open_receive_link(self, spec: ReceiveLinkSpec, sink: ReceiveSink) -> FakeReceiveLink:
        """Attach a receive link."""
        await self._ask("receive", spec.partition_id)
        self.hub.check_hub(spec.hub)
        link = FakeReceiveLink(self, spec, sink)
        self.hub.admit(link)
        self._links.append(link)
        return link

    async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
        """Attach a send link."""
        await self._ask("send", spec.partition_id)
        self.hub.check_hub(spec.hub)
        link = FakeSendLink(self, spec)
        self._links.append(link)
        return link

    async def aclose(self) -> None:
        """Close every link."""
        if not self.is_closed:
            self.is_closed = True
            self.lose(ConnectionLostError("the connection was closed here", recovery=Recovery.GIVE_UP))

    def lose(self, error: EventPumpError) -> None:
        """End the connection: every link, and what waits for an answer."""
        self._lost = error
        self.connection = object()
        self.stalls.clear()
        for waiting in self._waiting:
            waiting.cancel()
        links, self._links = self._links, []
        for link in links:
            link.end(error)

    async def _ask(self, operation: str, partition_id: str | None = None) -> None:
        if self.is_closed:
            raise ClosedError("transport")
        await _unless_ended(self.hub.request(operation, partition_id), self._waiting, lambda: self._lost)
        if self.is_closed:
            raise ClosedError("transport")


async def _unless_ended(
    work: Coroutine[None, None, None],
    waiting: set[asyncio.Task[None]],
    error: Callable[[], EventPumpError | None],
) -> None:
    """Do something that may be cut off meanwhile, by a cancellation of its task: then it raises the error."""
    task = asyncio.ensure_future(work)
    waiting.add(task)
    try:
        await asyncio.wait({task})
    finally:
        waiting.discard(task)
        task.cancel()
    if task.cancelled():
        raise error() or ClosedError("transport")
    task.result()


def _offset(number: int) -> str:
    """Offsets are opaque text, and must not be treated as numbers."""
    return f"fake:{number}"


def _time() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0
