"""A service with prepared bytes, cheaper than any client, so that a client is busy: `python -m benchmarks.canned JSON`.

Logins, sessions, links, tokens and management are answered through our engine. The events of every partition are
encoded once; a transfer of many is one join of prepared pieces, of which only the delivery id is new. Events that come
are counted and settled, and not kept. What is read begins at the first event, whatever position the reader asks for.

For the floors it writes the same bytes to every connection on a second port.

Events are there from the start, or come at a pace, so many at once, one partition after the other; the moment when each
is written is kept in a file that the side reads afterwards.

Prints what `CannedService` reads: a line with the ports once it listens, then one with counts for each line on stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import struct
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import count as count_from
from itertools import cycle, islice
from typing import Any

from benchmarks.events import (
    FIRST_MOMENT,
    FIRST_OFFSET,
    FIRST_SEQUENCE_NUMBER,
    mean_body_size,
    milliseconds_after_first,
    samples,
)
from eventpump.amqp.codec import encode
from eventpump.amqp.connection import (
    Closed,
    Connection,
    CreditChanged,
    Event,
    LinkAttached,
    LinkDetached,
    Messages,
    Role,
    SaslRequested,
    SessionEnded,
)
from eventpump.amqp.flow import UINT
from eventpump.amqp.link import Link
from eventpump.amqp.message import Message
from eventpump.amqp.performatives import AmqpError
from eventpump.amqp.types import Int, Short, UInt
from eventpump.emulator.bounds import with_token
from eventpump.emulator.connection import service_config
from eventpump.emulator.stamping import stamp
from eventpump.eventhubs import cbs, management
from eventpump.eventhubs.addresses import Address, AddressKind, parse_address
from eventpump.eventhubs.envelope import decode_batch
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import (
    BATCH_MESSAGE_FORMAT,
    IDEMPOTENT_PRODUCER,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    PRODUCER_SEQUENCE_NUMBER,
)
from eventpump.eventhubs.properties import HubProperties, PartitionProperties
from eventpump.eventhubs.requests import reply_to
from eventpump.net.stream import BufferedReads, ConnectionProtocol

HUB = "bench"
RUN_BYTES = 256 * 1024
"""How much one reader gets before others have their turn, about."""
MAX_MESSAGE_SIZE = 1024 * 1024
REQUEST_CREDIT = 100
PRODUCER_CREDIT = 300

_LAST_OFFSET = 10 ** len(str(FIRST_OFFSET))
_LONG = struct.Struct(">q")
_IDENTITY = struct.Struct(">I2s")
_ACCEPTED = struct.Struct(">IHH8sIcI6s")
_RECEIVER = b"\x00\x53\x15\xc0\x12\x06\x41\x70"
_WITH_ACCEPTED = b"\x41\x00\x53\x24\x45\x42"
_TAIL = b"\x43\x41\x42\x40\x40\x42\x42\x41"
"""The rest of a transfer's fields: format 0, settled, no more frames, four defaults, batchable (AMQP 1.0, 2.7.5)."""

_identities: list[bytes] = []


def _identities_from(first: int, number: int) -> list[bytes]:
    """Return so many delivery ids, each with an empty tag, encoded."""
    missing = range(len(_identities), first + number)
    _identities.extend(_IDENTITY.pack(each, b"\xa0\x00") for each in missing)
    return _identities[first : first + number]


class CannedPartition:
    """The events of a partition, as a service writes them.

    Args:
        partition_id: Its id.
        kind: `varied` or `uniform`.
        count: How many.
    """

    def __init__(self, partition_id: str, kind: str, count: int) -> None:
        self.partition_id = partition_id
        self.count = count
        self.enqueued = count
        """How many of them may be read."""
        self.offset = b"-1"
        """Of the last event."""
        self.tails: list[bytes] = []
        """What follows the delivery tag: the rest of the transfer, and the event."""
        first_ms = round(FIRST_MOMENT.timestamp() * 1000)
        offset, pack = FIRST_OFFSET, _LONG.pack
        for position, mould in enumerate(islice(cycle(_moulds(kind)), count)):
            self.offset = b"%d" % offset
            number = pack(FIRST_SEQUENCE_NUMBER + position)
            moment = pack(first_ms + milliseconds_after_first(kind, position))
            tail = b"".join((mould[0], number, mould[1], self.offset, mould[2], moment, mould[3]))
            offset += len(tail) - len(_TAIL)
            self.tails.append(tail)
        assert offset < _LAST_OFFSET, "the offsets grow by a digit"
        self._lengths = array("I", map(len, self.tails))
        self._sizes: dict[int, list[bytes]] = {}

    @property
    def events(self) -> list[bytes]:
        """The events, encoded."""
        return [tail[len(_TAIL) :] for tail in self.tails]

    def _sizes_with(self, overhead: int) -> list[bytes]:
        """Return each frame's size, encoded, where so much stands before the tail."""
        sizes = self._sizes.get(overhead)
        if sizes is None:
            sizes = self._sizes[overhead] = [(size + overhead).to_bytes(4, "big") for size in self._lengths]
        return sizes

    def size_with(self, head: bytes) -> int:
        """Return the size of all events' frames, with such a head."""
        return sum(self._lengths) + self.count * (4 + len(head) + _IDENTITY.size)

    def frames(self, start: int, number: int, head: bytes, delivery_id: int) -> bytes:
        """Return the transfers of events from `start` on, as the frames of one link.

        Args:
            head: See `transfer_head`.
        """
        parts = [head] * (4 * number)
        parts[0::4] = self._sizes_with(4 + len(head) + _IDENTITY.size)[start : start + number]
        parts[2::4] = _identities_from(delivery_id, number)
        parts[3::4] = self.tails[start : start + number]
        return b"".join(parts)


@cache
def transfer_head(channel: int, handle: int) -> bytes:
    """Return a transfer's bytes between the frame's size and the delivery id, on one link (2.3.1, 2.7.5)."""
    encoded = encode(UInt(handle))
    size = len(encoded) + 1 + _IDENTITY.size + len(_TAIL)
    return b"\x02\x00" + channel.to_bytes(2, "big") + b"\x00\x53\x14\xc0" + bytes((size + 1, 11)) + encoded + b"\x70"


def accepted(channel: int, first: int, last: int) -> bytes:
    """Return the frame of a disposition that accepts deliveries `first` to `last` (2.7.6)."""
    return _ACCEPTED.pack(_ACCEPTED.size, 0x0200, channel, _RECEIVER, first, b"\x70", last, _WITH_ACCEPTED)


@cache
def _moulds(kind: str) -> list[tuple[bytes, bytes, bytes, bytes]]:
    """Return the samples of a kind as a service writes them: what lies around number, offset and time of each."""
    number, offset, moment = 0x0102_0304_0506_0708, FIRST_OFFSET + 1234, 0x0A0B_0C0D_0E0F_1011
    marks = (_LONG.pack(number), b"%d" % offset, _LONG.pack(moment))
    moulds = []
    for sample in samples(kind):
        standard = {} if sample.content_type is None else {"content_type": sample.content_type}
        event = EventData(sample.body, properties=sample.properties, **standard)
        raw = event.encode(sample.partition_key)
        rest = _TAIL + stamp([raw], number, offset, moment, None).payloads[0]
        parts = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            assert found, "an event is not stamped as expected"
            parts.append(before)
        moulds.append((parts[0], parts[1], parts[2], rest))
    return moulds


@dataclass(frozen=True, slots=True)
class Pace:
    """How events come.

    Args:
        rate: Events per second, over all partitions.
        together: How many come at once, in one partition.
        times: The file for the moments when events were written, in nanoseconds of `time.perf_counter_ns` (on Linux the
            same clock in all processes), as 64-bit numbers: all of the first partition, then all of the next.
    """

    rate: float
    together: int
    times: str


def _call_at_pace(function: Callable[[int], None], number: int, interval: float) -> None:
    """Call a function in this event loop at a pace, from a thread: a loop's own timers have whole milliseconds.

    Args:
        function: Is called with 0, 1, 2, ...
        number: How often.
        interval: Seconds between two calls.
    """
    loop = asyncio.get_running_loop()

    def run() -> None:
        began = time.perf_counter()
        for turn in range(number):
            left = began + turn * interval - time.perf_counter()
            if left > 0:
                time.sleep(left)
            loop.call_soon_threadsafe(function, turn)

    threading.Thread(target=run, daemon=True).start()


class Canned:
    """What all connections share.

    Attributes:
        events: How many were taken from producers.
        bytes: Of their messages.
        delivered: How many were written to readers.
    """

    def __init__(self, kind: str, partitions: int, events: int, pace: Pace | None = None) -> None:
        each = events // partitions
        self.pace = pace
        self.partitions = {str(number): CannedPartition(str(number), kind, each) for number in range(partitions)}
        self.per_run = max(1, int(RUN_BYTES // (mean_body_size(kind) + 100)))
        self.events = self.bytes = self.delivered = 0
        self.producer_ids = count_from(1)
        self.written: dict[str, array[int]] = {}
        """The moments when the events of each partition were written, where they come at a pace."""
        self._deliver_to: dict[str, Callable[[], None]] = {}
        self._is_paced = False
        if pace is not None:
            for partition in self.partitions.values():
                partition.enqueued = 0
                self.written[partition.partition_id] = array("q", bytes(8 * each))

    def attached(self, partition_id: str, deliver: Callable[[], None]) -> None:
        """Count a reader in. Events come from the moment on when each partition has one.

        Args:
            partition_id: Of the partition that it reads.
            deliver: Is called when there are new events.
        """
        if self.pace is None:
            return
        self._deliver_to[partition_id] = deliver
        if not self._is_paced and len(self._deliver_to) == len(self.partitions):
            self._is_paced = True
            _call_at_pace(self._enqueue, self._turns(), self.pace.together / self.pace.rate)

    def _turns(self) -> int:
        assert self.pace is not None
        return sum(partition.count // self.pace.together for partition in self.partitions.values())

    def _enqueue(self, turn: int) -> None:
        assert self.pace is not None
        partition = list(self.partitions.values())[turn % len(self.partitions)]
        partition.enqueued += self.pace.together
        self._deliver_to[partition.partition_id]()

    def store_times(self) -> None:
        """Write the file of `Pace.times`."""
        assert self.pace is not None
        with open(self.pace.times, "wb") as file:
            for times in self.written.values():
                times.tofile(file)

    def poured(self, partition_id: str) -> int:
        """Return how many bytes `pour` writes of a partition."""
        partition = self.partitions[partition_id]
        return partition.size_with(transfer_head(0, list(self.partitions).index(partition_id)))

    async def pour(self, writer: asyncio.StreamWriter) -> None:
        """Write all events of all partitions, in turn. For the floors: nothing is asked and answered."""
        if self.pace is not None:
            await self._pour_paced(writer, self.pace)
            return
        delivery_id = 0
        longest = max(partition.count for partition in self.partitions.values())
        for start in range(0, longest, self.per_run):
            for handle, partition in enumerate(self.partitions.values()):
                number = min(self.per_run, partition.count - start)
                writer.write(partition.frames(start, number, transfer_head(0, handle), delivery_id))
                delivery_id += number
                await writer.drain()

    async def _pour_paced(self, writer: asyncio.StreamWriter, pace: Pace) -> None:
        partitions = list(self.partitions.values())
        turns = self._turns()
        done = asyncio.get_running_loop().create_future()

        def pour(turn: int) -> None:
            handle, start = turn % len(partitions), turn // len(partitions) * pace.together
            head = transfer_head(0, handle)
            writer.write(partitions[handle].frames(start, pace.together, head, turn * pace.together))
            if turn == turns - 1:
                done.set_result(None)

        _call_at_pace(pour, turns, pace.together / pace.rate)
        await done


class _Reader:
    """A link that a partition is read on."""

    def __init__(self, link: Link, partition: CannedPartition) -> None:
        self.link = link
        self.partition = partition
        self.cursor = 0


class CannedConnection:
    """The service's end of one connection."""

    def __init__(self, canned: Canned) -> None:
        self.engine = Connection(service_config(MAX_MESSAGE_SIZE), Role.SERVER)
        self.engine.limits = with_token(MAX_MESSAGE_SIZE)  # it does not require a token
        self._canned = canned
        self._protocol: ConnectionProtocol | None = None
        self._loop = asyncio.get_running_loop()
        self._addresses: dict[Link, Address] = {}
        self._answers: dict[Link, deque[bytes]] = {}
        self._readers: dict[Link, _Reader] = {}
        self._turns: dict[_Reader, None] = {}
        self._is_turn_due = False

    # ------------------------------------------------------------------------------------ the shell's calls

    def on_connected(self, protocol: ConnectionProtocol) -> None:
        """Store the shell that transfers the bytes."""
        self._protocol = protocol

    def on_events(self, events: list[Event]) -> None:
        """See :class:`eventpump.net.stream.ConnectionHandler`."""
        for event in events:
            match event:
                case Messages(link, payloads, delivery_ids, formats):
                    self._on_messages(link, payloads, delivery_ids, formats)
                case CreditChanged(link):
                    self._on_credit(link)
                case LinkAttached(link):
                    self._on_attach(link)
                case LinkDetached(link):
                    self._forget(link)
                case SessionEnded(_, links):
                    for link in links:
                        self._forget(link)
                case SaslRequested():
                    self.engine.sasl_outcome(ok=True)
                case Closed():
                    self._turns.clear()
        self._give_turns()

    def on_writable(self) -> None:
        """See :class:`eventpump.net.stream.ConnectionHandler`."""
        self._give_turns()

    def on_closed(self, error: Exception | None) -> None:
        """See :class:`eventpump.net.stream.ConnectionHandler`."""
        self._turns.clear()
        self._protocol = None

    # -------------------------------------------------------------------------------------------- the links

    def _on_attach(self, link: Link) -> None:
        remote = link.remote
        assert remote is not None
        node = remote.target if link.is_receiver else remote.source
        address = parse_address(str(None if node is None else node.address))
        partition = self._canned.partitions.get(address.partition_id or "0")
        if partition is None or (address.hub and address.hub.lower() != HUB):
            link.refuse(AmqpError("amqp:not-found", "no such hub or partition"))
            return
        self._addresses[link] = address
        if not link.is_receiver:
            # The service settles what it sends, whatever was asked for.
            link.accept(max_message_size=MAX_MESSAGE_SIZE, snd_settle_mode=1)
            if address.kind is AddressKind.CONSUMER:
                reader = self._readers[link] = _Reader(link, partition)
                self._canned.attached(partition.partition_id, partial(self._wake, reader))
            else:
                self._answers[link] = deque()
        elif IDEMPOTENT_PRODUCER in (remote.desired_capabilities or ()):
            link.accept(
                max_message_size=MAX_MESSAGE_SIZE,
                properties={
                    PRODUCER_ID: next(self._canned.producer_ids),
                    PRODUCER_EPOCH: Short(0),
                    PRODUCER_SEQUENCE_NUMBER: Int(0),
                },
                offered_capabilities=[IDEMPOTENT_PRODUCER],
            )
            link.set_credit(PRODUCER_CREDIT)
        else:
            link.accept(max_message_size=MAX_MESSAGE_SIZE)
            is_node = address.kind in (AddressKind.CBS, AddressKind.MANAGEMENT)
            link.set_credit(REQUEST_CREDIT if is_node else PRODUCER_CREDIT)

    def _forget(self, link: Link) -> None:
        self._addresses.pop(link, None)
        self._answers.pop(link, None)
        reader = self._readers.pop(link, None)
        if reader is not None:
            self._turns.pop(reader, None)

    def _wake(self, reader: _Reader) -> None:
        self._turns[reader] = None
        self._give_turns()

    def _on_credit(self, link: Link) -> None:
        reader = self._readers.get(link)
        if reader is not None:
            self._turns[reader] = None
        elif link in self._answers:
            self._send_answers(link)

    # ------------------------------------------------------------------------------------ what clients send

    def _on_messages(
        self, link: Link, payloads: list[bytes], delivery_ids: list[int], formats: list[int] | None
    ) -> None:
        address = self._addresses[link]
        if address.kind in (AddressKind.CBS, AddressKind.MANAGEMENT):
            for payload in payloads:
                self._answer(link, address, Message.decode(payload))
            lowest = REQUEST_CREDIT // 2
        else:
            canned = self._canned
            for index, payload in enumerate(payloads):
                is_batch = formats is not None and formats[index] == BATCH_MESSAGE_FORMAT
                canned.events += len(decode_batch(payload)) if is_batch else 1
                canned.bytes += len(payload)
            lowest = PRODUCER_CREDIT // 2
        for first, last in _runs(delivery_ids):
            self.engine.output.append(accepted(link.session.channel, first, last))
        if link.credit <= lowest:
            link.set_credit(2 * lowest)

    def _answer(self, link: Link, address: Address, request: Message) -> None:
        response = cbs.response(request, 202, "Accepted") if address.kind is AddressKind.CBS else self._read(request)
        named = reply_to(request)
        found = [each for each in self._answers if self._addresses[each].kind is address.kind]
        # Python's official client names no link: it is the one of the same session.
        found.sort(key=lambda each: (named not in _names(each), each.session is not link.session))
        self._answers[found[0]].append(response.encode())
        self._send_answers(found[0])

    def _send_answers(self, link: Link) -> None:
        waiting = self._answers[link]
        while waiting and link.credit > 0:
            link.send(waiting.popleft(), settled=True)

    def _read(self, request: Message) -> Message:
        read = management.parse_request(request)
        partitions = self._canned.partitions
        if read.partition_id is None:
            return management.hub_response(request, HubProperties(HUB, FIRST_MOMENT, tuple(partitions)))
        partition = partitions[read.partition_id]
        facts = PartitionProperties(
            hub=HUB,
            partition_id=read.partition_id,
            beginning_sequence_number=FIRST_SEQUENCE_NUMBER,
            last_enqueued_sequence_number=FIRST_SEQUENCE_NUMBER + partition.count - 1,
            last_enqueued_offset=partition.offset.decode(),
            last_enqueued_time=FIRST_MOMENT + timedelta(milliseconds=partition.count),
            is_empty=partition.count == 0,
        )
        return management.partition_response(request, facts)

    # ---------------------------------------------------------------------------------- what clients receive

    def _give_turns(self) -> None:
        """Let each waiting reader have one run, while the client takes it."""
        self._is_turn_due = False
        turns = self._turns
        for reader in list(turns):
            if self._protocol is None or self._protocol.is_paused:
                return
            del turns[reader]
            if self._deliver(reader):
                turns[reader] = None
            self._protocol.flush()
        if turns:
            self._is_turn_due = True
            self._loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        if self._is_turn_due:
            self._give_turns()

    def _deliver(self, reader: _Reader) -> bool:
        """Write one run of transfers.

        Returns:
            Whether there is more to write at once.
        """
        link, partition, canned = reader.link, reader.partition, self._canned
        session = link.session
        left = partition.enqueued - reader.cursor
        number = min(link.credit, session.remote_incoming_window, left, canned.per_run)
        if number <= 0 or not link.is_attached:
            session.is_starved = session.is_starved or session.remote_incoming_window <= 0
            if link.drain and (left == 0 or link.credit <= 0):
                link.drained()
            return False
        # The books of `Link.send_run`, for transfers that are made already.
        self.engine.output.append(
            partition.frames(
                reader.cursor, number, transfer_head(session.channel, link.handle), session.outgoing_delivery_id
            )
        )
        if canned.pace is not None:
            moments = array("q", (time.perf_counter_ns(),)) * number
            canned.written[partition.partition_id][reader.cursor : reader.cursor + number] = moments
        reader.cursor += number
        canned.delivered += number
        session.outgoing_delivery_id = (session.outgoing_delivery_id + number) & UINT
        session.next_outgoing_id = (session.next_outgoing_id + number) & UINT
        session.remote_incoming_window -= number
        link.credit -= number
        link.delivery_count = (link.delivery_count + number) & UINT
        return (link.credit > 0 and left > number) or link.drain


def _names(link: Link) -> set[object]:
    """Return what a request may call the link that its answer goes out on: its name, or its target."""
    target = None if link.remote is None or link.remote.target is None else link.remote.target.address
    return {link.name, target}


def _runs(delivery_ids: list[int]) -> Iterator[tuple[int, int]]:
    """Return neighbouring ids as pairs of first and last."""
    start = 0
    for index in range(1, len(delivery_ids) + 1):
        if index == len(delivery_ids) or delivery_ids[index] != delivery_ids[index - 1] + 1:
            yield delivery_ids[start], delivery_ids[index - 1]
            start = index


class _Served(ConnectionProtocol):
    def __init__(self, served: CannedConnection) -> None:
        super().__init__(served.engine, served)
        self._served = served

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._served.on_connected(self)


async def serve(
    kind: str,
    partitions: int,
    events: int,
    cert: str | None = None,
    key: str | None = None,
    pace: dict[str, Any] | None = None,
) -> None:
    """Serve until the process is ended.

    Args:
        events: Of all partitions; the same number each.
        cert: A certificate to serve TLS with, and `key` its private key; None is plain TCP.
        pace: How they come, as keyword arguments of `Pace`; None if all are there from the start.
    """
    canned = Canned(kind, partitions, events, None if pace is None else Pace(**pace))
    tls: ssl.SSLContext | None = None
    if cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(cert, key)
    size = sum(map(canned.poured, canned.partitions))
    loop = asyncio.get_running_loop()

    def make() -> asyncio.BaseProtocol:
        served = _Served(CannedConnection(canned))
        return served if tls is None else BufferedReads(served)

    server = await loop.create_server(make, "127.0.0.1", 0, ssl=tls, backlog=1024)

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Who reads may stop early.
        with suppress(ConnectionError):
            await canned.pour(writer)
            writer.close()
            await writer.wait_closed()

    raw = await asyncio.start_server(pour, "127.0.0.1", 0, ssl=tls)
    ports = [each.sockets[0].getsockname()[1] for each in (server, raw)]
    print(json.dumps(ports), flush=True)

    def show_counts() -> None:
        if not os.read(0, 1024):
            loop.remove_reader(0)
            return
        if canned.pace is not None:
            canned.store_times()
        counts = {
            "events": canned.events,
            "bytes": canned.bytes,
            "delivered": canned.delivered,
            "size": size,
            "cpu": time.process_time(),
        }
        print(json.dumps(counts), flush=True)

    loop.add_reader(0, show_counts)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(**json.loads(sys.argv[1])))
