"""Synthetic events that can be repeated: a load for processors without any service."""

from __future__ import annotations

import asyncio
import math
import random
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import accumulate

from eventpump.aio.closing import AsyncResource
from eventpump.aio.home import HomeLoop
from eventpump.amqp import codec
from eventpump.amqp.sections import MARKER, MESSAGE_ANNOTATIONS, encode_data
from eventpump.errors import ClosedError, ConfigurationError, EntityNotFoundError, SourceEndedError
from eventpump.eventhubs.events import START_OFFSET, EventPosition
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, SEQUENCE_NUMBER
from eventpump.interfaces import HubProperties, PartitionProperties, ReceiveSink
from eventpump.sources.checks import check_whole, is_number
from eventpump.sources.links import NumberedLink
from eventpump.sources.positions import first_to_read, offset_of

MAX_PARTITIONS = 2_048
MAX_KEYS = 1_000_000
MAX_EVENTS = 10**12
MAX_SIZE = 1024 * 1024

ORIGIN = datetime(2024, 1, 1, tzinfo=UTC)
"""When the first event is enqueued."""

_TICK = 0.01
"""Seconds that a link waits at least for events that are due soon: those of that time are delivered together."""

_POOL_EXTRA = 4096
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_STEP = 0x9E37_79B9_7F4A_7C15
_KEY_SCALE = 2.0**-32

_LONG = struct.Struct(">q")
_NUMBER_ENTRY = codec.encode(SEQUENCE_NUMBER) + b"\x81"
_OFFSET_ENTRY = codec.encode(OFFSET) + b"\xa1"
_TIME_ENTRY = codec.encode(ENQUEUED_TIME) + b"\x83"
_KEY_ENTRY = codec.encode(PARTITION_KEY)
_ANNOTATIONS = MARKER + bytes((MESSAGE_ANNOTATIONS, 0xD1))

Body = Callable[[str, int, random.Random], bytes | str]
"""Returns the body of an event, given its partition, its sequence number, and random numbers that repeat with it."""


class GeneratorSource(AsyncResource):
    """Synthetic events: the same seed, partition and sequence number give the same event, at any position.

    ::

        source = GeneratorSource(
            seed=7, partitions=4, rate=500, size=(100, 2_000), keys=1_000, skew=1.1
        )
        host = EventProcessorHost(
            source=source, processor=MyProcessor, lease_store=MemoryLeaseStore()
        )

    The event with number n is enqueued n / rate seconds after 2024-01-01 UTC (with `rate=None`, n milliseconds after
    it), and is there n / rate seconds after the source was first used.

    Args:
        seed: Determines the events; 0 or more. Default: 0.
        partitions: How many partitions there are, 1 to 2,048. Default: 4.
        events: How many events each partition has before it ends, at most 10 ** 12; None for no end, which requires a
            `rate`. Default: None.
        rate: Events per second and partition; None for as fast as they are taken, which requires `events`. Default:
            1,000.0.
        size: The size of a body in bytes, or the smallest and the largest one; at most 1 MiB. Default: 256.
        keys: How many partition keys the events of each partition have; 0 for events without a key. A key occurs in one
            partition only, but not in the one that the service's hash would choose. Default: 0.
        skew: How unevenly the keys are used: the n-th most frequent one is used in proportion to 1 / n ** skew. 0 uses
            all alike. Default: 0.0.
        body: Returns an event's body, given partition id, sequence number and a `random.Random` that repeats with the
            event; None for printable text of `size` bytes. Default: None.
        hub: The name under which stores keep leases and checkpoints. Default: "generator".

    Raises:
        ConfigurationError: A value cannot work.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        partitions: int = 4,
        events: int | None = None,
        rate: float | None = 1_000.0,
        size: int | tuple[int, int] = 256,
        keys: int = 0,
        skew: float = 0.0,
        body: Body | None = None,
        hub: str = "generator",
    ) -> None:
        check_whole("seed", seed, 0)
        check_whole("partitions", partitions, 1, MAX_PARTITIONS)
        check_whole("keys", keys, 0, MAX_KEYS)
        if events is not None:
            check_whole("events", events, 0, MAX_EVENTS)
        elif rate is None:
            raise ConfigurationError("rate", "is required without `events`: the source would have no newest event")
        if rate is not None and (not is_number(rate) or not 0 < rate <= 10**9):
            raise ConfigurationError(
                "rate", f"must be above 0 and at most 1,000,000,000 events per second, not {rate!r}"
            )
        if not is_number(skew) or not 0 <= skew <= 100:
            raise ConfigurationError("skew", f"must be from 0 to 100, not {skew!r}")
        sizes = size if isinstance(size, tuple) else (size, size)
        if len(sizes) != 2:
            raise ConfigurationError("size", f"must be a number of bytes or two of them, not {size!r}")
        for each in sizes:
            check_whole("size", each, 0, MAX_SIZE)
        if sizes[0] > sizes[1]:
            raise ConfigurationError("size", f"the smallest must not be above the largest: {size!r}")
        if body is not None and not callable(body):
            raise ConfigurationError("body", "must be a function of partition id, sequence number and random numbers")
        self._seed = seed
        self._events = events
        self._rate = None if rate is None else float(rate)
        self._smallest = sizes[0]
        self._spread = sizes[1] - sizes[0] + 1
        self._pool = random.Random(seed).randbytes((sizes[1] + _POOL_EXTRA) // 2 + 1).hex().encode()
        self._body = body
        self._hub = hub
        self._keys = keys
        self._key_shares = _shares(keys, skew)
        self._partition_ids = tuple(str(number) for number in range(partitions))
        self._bases = {each: self._base(each) for each in self._partition_ids}
        self._heads: dict[tuple[int, bytes], tuple[bytes, bytes]] = {}
        self._links: dict[NumberedLink, asyncio.TimerHandle | None] = {}
        self._began: float | None = None
        self._is_closed = False
        self._home = HomeLoop(type(self).__name__, warns=False)  # it holds timers alone

    @property
    def fully_qualified_namespace(self) -> str:
        """The first part of the name under which stores keep leases and checkpoints; with the seed."""
        return f"seed-{self._seed}.generator.eventpump"

    @property
    def hub(self) -> str:
        """The second part of that name."""
        return self._hub

    async def partitions(self) -> HubProperties:
        """See `EventSource`."""
        self._home.enter()
        self._begin()
        return HubProperties(self._hub, ORIGIN, self._partition_ids)

    async def partition_properties(self, partition_id: str) -> PartitionProperties:
        """See `EventSource`."""
        self._home.enter()
        self._check(partition_id)
        end = self._end()
        newest = end - 1
        return PartitionProperties(
            hub=self._hub,
            partition_id=partition_id,
            beginning_sequence_number=0,
            last_enqueued_sequence_number=newest,
            last_enqueued_offset=offset_of(newest) if end else START_OFFSET,
            last_enqueued_time=self._time(max(newest, 0)),
            is_empty=not end,
        )

    async def open(
        self,
        partition_id: str,
        position: EventPosition,
        sink: ReceiveSink,
        *,
        consumer_group: str = "$Default",
        owner_level: int | None = None,
    ) -> NumberedLink:
        """See `EventSource`."""
        self._home.enter()
        self._check(partition_id)
        first = first_to_read(position, 0, self._end(), first_after=self._first_after)

        def read(number: int, count: int) -> tuple[list[bytes], int]:
            return self._read(link, partition_id, number, count)

        link = NumberedLink(first, read, sink, self._closed)
        self._links[link] = None
        return link

    def generate(self, partition_id: str, first: int, count: int) -> list[bytes]:
        """Return events as encoded messages, whether they are due yet or not.

        Args:
            partition_id: The partition.
            first: The sequence number of the first event.
            count: How many.

        Raises:
            EntityNotFoundError: There is no such partition.
        """
        self._check(partition_id)
        end = first + count if self._events is None else min(first + count, self._events)
        return self._make(partition_id, max(first, 0), end)

    async def aclose(self) -> None:
        """See `EventSource`."""
        self._home.enter()
        self._home.close()
        self._is_closed = True
        for link in tuple(self._links):
            await link.aclose()

    # ------------------------------------------------------------------------------------------------- what is due

    def _begin(self) -> float:
        if self._is_closed:
            raise ClosedError("generator source")
        if self._began is None:
            self._began = asyncio.get_running_loop().time()
        return self._began

    def _check(self, partition_id: str) -> None:
        if partition_id not in self._bases:
            raise EntityNotFoundError(f"the source has no partition {partition_id!r}", entity=partition_id)

    def _end(self) -> int:
        """Return the sequence number after that of the newest event that is there."""
        began = self._begin()
        if self._rate is None:
            assert self._events is not None
            return self._events
        # With event 0 at the beginning. The addition is for a timer that is due at the very time of an event.
        due = math.floor((asyncio.get_running_loop().time() - began) * self._rate + 1e-6) + 1
        return due if self._events is None else min(due, self._events)

    def _read(self, link: NumberedLink, partition_id: str, number: int, count: int) -> tuple[list[bytes], int]:
        if self._events is not None and number >= self._events:
            raise SourceEndedError(partition_id)
        end = min(number + count, self._end())
        if end <= number:
            self._wait(link, number)
            return [], number
        return self._make(partition_id, number, end), end

    def _wait(self, link: NumberedLink, number: int) -> None:
        """Have a link look again when an event is due."""
        assert self._rate is not None
        assert self._began is not None
        loop = asyncio.get_running_loop()
        timer = self._links[link]
        if timer is None or timer.when() <= loop.time():
            at = max(self._began + number / self._rate, loop.time() + _TICK)
            self._links[link] = loop.call_at(at, link.serve)

    def _closed(self, link: NumberedLink) -> None:
        timer = self._links.pop(link)
        if timer is not None:
            timer.cancel()

    # ---------------------------------------------------------------------------------------------- what events are

    def _base(self, partition_id: str) -> int:
        digest = blake2b(f"{self._seed}/{partition_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big")

    def _milliseconds(self, number: int) -> int:
        return number if self._rate is None else math.floor(number * 1000 / self._rate)

    def _time(self, number: int) -> datetime:
        return ORIGIN + timedelta(milliseconds=self._milliseconds(number))

    def _first_after(self, moment: datetime, inclusive: bool) -> int:
        wanted = (moment - ORIGIN) / timedelta(milliseconds=1)
        find = bisect_left if inclusive else bisect_right
        return find(range(self._end()), wanted, key=self._milliseconds)

    def _make(self, partition_id: str, first: int, end: int) -> list[bytes]:
        """Encode events. What is random of an event follows from a number mixed of seed, partition and number."""
        base, pool, shares, body_of = self._bases[partition_id], self._pool, self._key_shares, self._body
        smallest, spread, heads, pack = self._smallest, self._spread, self._heads, _LONG.pack
        origin = round(ORIGIN.timestamp() * 1000)
        made: list[bytes] = []
        key = b""
        for number in range(first, end):
            # SplitMix64: neighbors have nothing in common.
            mixed = (base + number * _STEP) & _MASK
            mixed = ((mixed ^ mixed >> 30) * 0xBF58_476D_1CE4_E5B9) & _MASK
            mixed = ((mixed ^ mixed >> 27) * 0x94D0_49BB_1331_11EB) & _MASK
            mixed ^= mixed >> 31
            if shares:
                rank = bisect_right(shares, (mixed >> 32) * _KEY_SCALE)
                key = b"key-%s-%d" % (partition_id.encode(), rank)
            if body_of is None:
                start = mixed & 0xFFF
                body = pool[start : start + smallest + (mixed >> 12 & 0xF_FFFF) % spread]
            else:
                body = _checked(body_of(partition_id, number, random.Random(mixed)))
            offset = b"%d" % number
            head = heads.get((len(offset), key))
            if head is None:
                head = heads[len(offset), key] = _head(len(offset), key)
            before, between = head
            made.append(
                b"".join(
                    (before, pack(number), between, offset, _TIME_ENTRY, pack(origin + self._milliseconds(number)))
                )
                + (_key_entry(key) if key else b"")
                + encode_data(body)
            )
        return made


def _head(offset_length: int, key: bytes) -> tuple[bytes, bytes]:
    """Return what precedes the number and the offset of an event in its annotations."""
    entry = _key_entry(key) if key else b""
    size = len(_NUMBER_ENTRY) + 8 + len(_OFFSET_ENTRY) + 1 + offset_length + len(_TIME_ENTRY) + 8 + len(entry)
    before = _ANNOTATIONS + struct.pack(">II", size + 4, 8 if key else 6) + _NUMBER_ENTRY
    return before, _OFFSET_ENTRY + bytes((offset_length,))


def _key_entry(key: bytes) -> bytes:
    return _KEY_ENTRY + b"\xa1" + bytes((len(key),)) + key


def _shares(keys: int, skew: float) -> list[float]:
    """Return the upper bounds of the keys' shares, of which all but the last are below 1."""
    if not keys:
        return []
    weights = list(accumulate((rank + 1) ** -skew for rank in range(keys)))
    return [each / weights[-1] for each in weights[:-1]] + [1.0]


def _checked(body: bytes | str) -> bytes:
    if isinstance(body, str):
        return body.encode()
    if not isinstance(body, bytes):
        raise TypeError(f"body must return bytes or text, and returned {type(body).__name__}")
    return body
