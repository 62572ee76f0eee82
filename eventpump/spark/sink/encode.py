"""Encodes a DataFrame's rows as events, and chooses the hub partition of each.

Everything here is a function of the row alone: the same row gives the same bytes and the same partition, in every task,
attempt and run. Together with an order that depends only on the rows, this makes it possible to publish a batch again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from operator import itemgetter
from typing import Final, Literal, Self, TypeAlias

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, IntegralType, MapType, StringType, StructType
from pyspark.taskcontext import TaskContext

from eventpump.amqp.sections import APPLICATION_PROPERTIES, encode_data, section
from eventpump.core.router import RingRouter
from eventpump.errors import ConfigurationError, EventError
from eventpump.eventhubs.codecs import PayloadCodec, encoded, marked
from eventpump.eventhubs.envelope import envelope_head
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import MAX_KEY_LENGTH, partition_for_key
from eventpump.eventhubs.sealing import ROOM, pieces

SinkRouter: TypeAlias = Literal["hash", "ring", "round-robin", "sticky"]
"""How rows without a partition are routed. Keys: by the service's hash, or by the ring of `RingRouter`; round robin
takes no heed of them. Rows without key: sticky, all of a message go to one partition."""

StableRouter: TypeAlias = Literal["hash", "ring"]
"""Those that route the same row to the same partition in every attempt: for publishing exactly once."""

ANYWHERE: Final = -1
"""In place of a partition, for a row that names neither a partition nor a key."""

# The most bytes that numbering and an envelope add to an event: a key's map may need its larger form.
_MARGIN: Final = ROOM + 32


def _is_text(kind: DataType) -> bool:
    return isinstance(kind, StringType)


def _is_body(kind: DataType) -> bool:
    return isinstance(kind, StringType | BinaryType)


def _is_partition(kind: DataType) -> bool:
    return isinstance(kind, StringType | IntegralType)


def _is_properties(kind: DataType) -> bool:
    return isinstance(kind, MapType) and _is_text(kind.keyType) and _is_text(kind.valueType)


_MEANINGS: Final = {
    "body": ("body", _is_body, "must be string or binary"),
    "partition": ("partition", _is_partition, "must be string or an integer type"),
    "partitionid": ("partition", _is_partition, "must be string or an integer type"),
    "partitionkey": ("partition_key", _is_text, "must be string"),
    "properties": ("properties", _is_properties, "must be map<string,string>"),
}


@dataclass(frozen=True, slots=True)
class EventColumns:
    """The columns of a DataFrame that form an event, by their names there; None for missing ones.

    Args:
        body: String (as UTF-8) or binary.
        partition: `partition` or `partitionId`; a hub partition's id, as string or integer.
        partition_key: `partitionKey`; string, of at most 128 characters (the JavaScript client's limit; the service's
            behavior for longer keys is unknown).
        properties: `properties`; map<string,string>. Published sorted by name.
        order_by: The columns that order the events of a hub partition.
    """

    body: str
    partition: str | None = None
    partition_key: str | None = None
    properties: str | None = None
    order_by: tuple[str, ...] = ()

    @classmethod
    def of(cls, schema: StructType, order_by: Sequence[str] = ()) -> Self:
        """Find the columns; their names are not case-sensitive. Other columns are ignored.

        Raises:
            ConfigurationError: A column is missing, has another type, or conflicts with another; the error names it.
        """
        found: dict[str, str] = {}
        for field in schema.fields:
            meaning = _MEANINGS.get(field.name.lower())
            if meaning is None:
                continue
            kind, is_right, problem = meaning
            if kind in found:
                raise ConfigurationError(field.name, f"the DataFrame also has the column {found[kind]}: drop one")
            if not is_right(field.dataType):
                raise ConfigurationError(field.name, f"the column {problem}, not {field.dataType.simpleString()}")
            found[kind] = field.name
        if "body" not in found:
            raise ConfigurationError("body", "the DataFrame must have this column")
        if "partition" in found and "partition_key" in found:
            raise ConfigurationError(
                found["partition_key"],
                f"the DataFrame also has the column {found['partition']}, but an event is sent by partition or by "
                "key: drop or rename one of them",
            )
        return cls(**found, order_by=tuple(_ordering(schema, name) for name in order_by))

    @property
    def names(self) -> list[str]:
        """The columns to select, in the order an encoder expects."""
        optional = (self.partition, self.partition_key, self.properties)
        return [self.body, *(name for name in optional if name is not None), *self.order_by]


def _ordering(schema: StructType, name: str) -> str:
    named = [field for field in schema.fields if field.name.lower() == name.lower()]
    if len(named) != 1:
        raise ConfigurationError("order_by", f"the DataFrame has {len(named) or 'no'} column {name}")
    if isinstance(named[0].dataType, MapType):
        raise ConfigurationError("order_by", f"the column {name} is a map, which has no order")
    return named[0].name


class EventEncoder:
    """Encodes the rows of one task, one record batch after another.

    Args:
        columns: The columns of the batches, in the order of `EventColumns.names`.
        partition_count: How many partitions of the hub this batch uses.
        max_message_size: The service's limit for one message, in bytes.
        reserved: Bytes that will be added to each event besides its numbers.
        router: How rows without a partition are routed, see `SinkRouter`.
        first: The partition that the first row goes to round robin.
        codecs: Applied to every body, in this order. Default: none.
    """

    __slots__ = (
        "_codecs",
        "_columns",
        "_count",
        "_first",
        "_ids",
        "_is_round_robin",
        "_limit",
        "_mark",
        "_reserved",
        "_route",
        "_row",
    )

    def __init__(
        self,
        columns: EventColumns,
        *,
        partition_count: int,
        max_message_size: int,
        reserved: int = 0,
        router: SinkRouter = "hash",
        first: int = 0,
        codecs: Sequence[PayloadCodec] = (),
    ) -> None:
        self._codecs = codecs
        self._mark = _mark_of(codecs)
        self._columns = columns
        self._count = partition_count
        self._ids = {str(number): number for number in range(partition_count)}
        self._limit = max_message_size
        self._reserved = reserved
        self._route = _by_a_ring(partition_count) if router == "ring" else partial(_by_the_service, partition_count)
        self._is_round_robin = router == "round-robin"
        self._first = first
        self._row = 0

    def encode(self, batch: pa.RecordBatch) -> tuple[list[int], list[bytes]]:
        """Encode a batch.

        Returns:
            For each row, the hub partition, or `ANYWHERE`, and the event.

        Raises:
            EventError: A row cannot be an event; the error names the row.
        """
        columns = self._columns
        arrays = iter(batch.columns)
        bodies = next(arrays).cast(pa.binary())
        if bodies.null_count:
            raise self._error(bodies.is_null().index(True).as_py(), f"{columns.body} is null")
        payloads = bodies.to_pylist()
        if self._codecs:
            payloads = list(map(self._encoded, count(), payloads))
        events = list(map(encode_data, payloads))
        partitions: list[int] | None = None
        keys: list[str | None] | None = None
        if columns.partition is not None:
            partitions = self._explicit(next(arrays), columns.partition)
        if columns.partition_key is not None:
            keys = next(arrays).to_pylist()
        if columns.properties is not None:
            sections = _properties(next(arrays))
            events = [before + event for before, event in zip(sections, events, strict=True)]
        if self._codecs:
            events = [self._mark + event for event in events]
        if keys is not None:
            self._check_keys(keys)
            route = self._route
            partitions = [ANYWHERE if key is None else route(key) for key in keys]
            events = [envelope_head(key) + event for key, event in zip(keys, events, strict=True)]
        self._check_sizes(events)
        if partitions is None:
            partitions = [ANYWHERE] * len(events)
        if self._is_round_robin:
            turn = count(self._first + self._row)
            explicit = columns.partition is not None
            partitions = [
                each if explicit and each != ANYWHERE else number % self._count
                for each, number in zip(partitions, turn, strict=False)
            ]
        self._row += len(events)
        return partitions, events

    def _encoded(self, row: int, body: bytes) -> bytes:
        try:
            return encoded(self._codecs, body)
        except EventError as error:
            raise self._error(row, str(error)) from error

    def _check_keys(self, keys: list[str | None]) -> None:
        for row, key in enumerate(keys):
            if key is not None and len(key) > MAX_KEY_LENGTH:
                name, size = self._columns.partition_key, len(key)
                raise self._error(row, f"{name} has {size} characters; the limit is {MAX_KEY_LENGTH}")

    def _explicit(self, array: pa.Array, name: str) -> list[int]:
        ids = self._ids
        given = array.to_pylist()
        found = [ANYWHERE if each is None else ids.get(str(each), self._count) for each in given]
        if self._count in found:
            row = found.index(self._count)
            raise self._error(row, f"{name} is {given[row]!r:.40}; it must be 0 to {self._count - 1}")
        return found

    def _check_sizes(self, events: Sequence[bytes]) -> None:
        limit = self._limit - self._reserved
        if not events or max(map(len, events)) + _MARGIN <= limit:
            return
        for row, event in enumerate(events):
            size = sum(map(len, pieces(event, idempotent=True)))
            if size > limit:
                raise self._error(
                    row, f"the event takes {size + self._reserved} bytes; the limit of a message is {self._limit}"
                )

    def _error(self, row: int, problem: str) -> EventError:
        return EventError(f"row {self._row + row} of the DataFrame's partition {task_number()}: {problem}")


def _mark_of(codecs: Sequence[PayloadCodec]) -> bytes:
    """Return the section that names what bodies are encoded with; empty without codecs."""
    if not codecs:
        return b""
    return EventData(b"", content_encoding=marked(codecs)).encode().removesuffix(encode_data(b""))


def _by_the_service(count: int, key: str) -> int:
    return partition_for_key(key, count)


def _by_a_ring(count: int) -> Callable[[str], int]:
    """Return what assigns keys as `RingRouter` does."""
    ids = [str(number) for number in range(count)]
    router, event = RingRouter(), EventData(b"")
    return lambda key: int(router.route(event, key, ids))


def task_number() -> int:
    """Return the number of the DataFrame's partition that this task works on; 0 outside a task."""
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def hashed(partitions: Iterable[int], events: Iterable[bytes], count: int) -> list[int]:
    """Choose the partition of each event that has neither partition nor key, by a hash of its bytes.

    Args:
        count: How many partitions there are.
    """
    return [
        zlib.crc32(event) % count if partition == ANYWHERE else partition
        for partition, event in zip(partitions, events, strict=True)
    ]


def _properties(array: pa.MapArray) -> Iterator[bytes]:
    """Encode the application properties of each row; empty if there are none."""
    ends = array.offsets.to_pylist()
    names, values = array.keys.to_pylist(), array.items.to_pylist()
    for is_there, start, end in zip(array.is_valid().to_pylist(), ends, ends[1:], strict=False):
        if is_there and start < end:
            yield _section(tuple(sorted(zip(names[start:end], values[start:end], strict=True), key=itemgetter(0))))
        else:
            yield b""


@lru_cache(maxsize=4096)
def _section(pairs: tuple[tuple[str, str | None], ...]) -> bytes:
    """Encode application properties. Cached, because events of one kind have the same."""
    return section(APPLICATION_PROPERTIES, dict(pairs))
