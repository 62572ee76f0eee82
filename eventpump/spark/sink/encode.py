"""Encodes a DataFrame's rows as events, and chooses the hub partition of each.

Everything here is a function of the row alone: the same row gives the same bytes and the same partition, in every task,
attempt and run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
from pyspark.taskcontext import TaskContext

from eventpump.amqp.sections import PROPERTIES, encode_data, section
from eventpump.amqp.types import (
    Symbol,
)
from eventpump.core.router import RingRouter
from eventpump.errors import EventError
from eventpump.eventhubs.codecs import PayloadCodec, encoded, marked
from eventpump.eventhubs.envelope import EVENT_HEADS, envelope_head
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import MAX_KEY_LENGTH, partition_for_key
from eventpump.eventhubs.sealing import ROOM, pieces
from eventpump.spark.sink.columns import STANDARD_ROLES, EventColumns
from eventpump.spark.sink.properties import (
    SECTIONS,
    TYPED_SECTIONS,
    Pairs,
    id_of,
    listed_fields,
    pairs_of,
    sections_of_maps,
    sections_of_structs,
    sections_of_texts,
    standard_values,
)

SinkRouter: TypeAlias = Literal["hash", "ring", "round-robin", "sticky"]
"""How rows without a partition are routed. Keys: by the service's hash, or by the ring of `RingRouter`; round robin
ignores them. Rows without key: sticky, all of a message go to one partition."""

StableRouter: TypeAlias = Literal["hash", "ring"]
"""Those that route the same row to the same partition in every attempt: for publishing exactly once."""

ANYWHERE: Final = -1
"""In place of a partition, for a row that names neither a partition nor a key."""

NOWHERE: Final = -2
"""In place of a partition, for a row that cannot be an event."""

OnBadRow: TypeAlias = Literal["fail", "skip", "keep"]
"""What happens with a row that cannot be an event: the batch fails, it is left out, or it is kept beside the others."""

_NOT_TEXT: Final = object()
_ERROR: Final = "eventpump:error"

# The most bytes that numbering and an envelope add to an event: a key's map may need its larger form.
_MARGIN: Final = ROOM + 32


class EventEncoder:
    """Encodes the rows of one task, one record batch after another.

    Args:
        reserved: Bytes that will be added to each event besides its numbers.
        router: How rows without a partition are routed, see `SinkRouter`.
        first: The partition that the first row goes to round robin.
        codecs: Applied to every body, in this order. Default: none.
    """

    __slots__ = (
        "_arrays",
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
        self._arrays: dict[str, pa.Array] = {}
        self._count = partition_count
        self._ids = {str(number): number for number in range(partition_count)}
        self._limit = max_message_size
        self._reserved = reserved
        self._route = _by_a_ring(partition_count) if router == "ring" else partial(_by_the_service, partition_count)
        self._is_round_robin = router == "round-robin"
        self._first = first
        self._row = 0

    def encode(self, batch: pa.RecordBatch) -> tuple[list[int], list[bytes]]:
        """Encode a batch: for each row, the hub partition, or `ANYWHERE`, and the event.
        Raises `EventError`, which names the row."""
        self._arrays = dict(zip(self._columns.roles, batch.columns, strict=False))
        try:
            return self._encode()
        except UnicodeDecodeError:
            raise self._not_text() from None
        finally:
            self._arrays = {}  # it is not kept while the next batch is read

    def encode_good(self, batch: pa.RecordBatch, *, keeps: bool) -> tuple[list[int], list[bytes]]:
        """Encode a batch with rows that cannot be events.

        Returns:
            As `encode`; for a row that cannot be an event `NOWHERE`, and what `bad_row` decodes, or nothing.
        """
        try:
            return self.encode(batch)
        except EventError as error:
            if batch.num_rows == 1:
                self._row += 1
                return [NOWHERE], [_encode_bad_row(batch, self._columns, str(error)) if keeps else b""]
        # By halves, so that a few are found with few attempts.
        half = batch.num_rows // 2
        first, rest = (self.encode_good(each, keeps=keeps) for each in (batch.slice(0, half), batch.slice(half)))
        return first[0] + rest[0], first[1] + rest[1]

    def _encode(self) -> tuple[list[int], list[bytes]]:
        columns, arrays = self._columns, self._arrays
        bodies = arrays["body"].cast(pa.binary())
        if bodies.null_count:
            raise self._error(bodies.is_null().index(True).as_py(), f"{columns.body} is null")
        payloads = bodies.to_pylist()
        if self._codecs:
            payloads = list(map(self._encoded, count(), payloads))
        # The bytes before the payloads grow section by section; the payloads are copied once, at the end.
        heads = list(map(EVENT_HEADS.__getitem__, map(len, payloads)))
        partitions: list[int] | None = None
        keys: list[str | None] | None = None
        if columns.partition is not None:
            partitions = self._explicit(arrays["partition"], columns.partition)
        if columns.partition_key is not None:
            keys = arrays["partition_key"].to_pylist()
        if columns.properties is not None:
            heads = [before + head for before, head in zip(self._properties(), heads, strict=True)]
        if not arrays.keys().isdisjoint(STANDARD_ROLES):
            heads = [before + head for before, head in zip(self._standard(len(heads)), heads, strict=True)]
        elif self._codecs:
            heads = [self._mark + head for head in heads]
        if keys is not None:
            self._check_keys(keys)
            route = self._route
            partitions = [ANYWHERE if key is None else route(key) for key in keys]
            heads = [envelope_head(key) + head for key, head in zip(keys, heads, strict=True)]
        events = [head + payload for head, payload in zip(heads, payloads, strict=True)]
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

    def _properties(self) -> Iterable[bytes]:
        """Encode the application properties of each row; empty if there are none."""
        properties, types = self._arrays["properties"], self._arrays.get("property_types")
        if isinstance(properties.type, pa.StructType):
            return sections_of_structs(properties)
        if not pa.types.is_string(properties.type.item_type) and not pa.types.is_large_string(
            properties.type.item_type
        ):
            return sections_of_maps(properties)
        return sections_of_texts(properties) if types is None else self._of_typed(properties, types)

    def _of_typed(self, properties: pa.MapArray, types: pa.MapArray) -> Iterator[bytes]:
        for row, (texts, kinds) in enumerate(zip(pairs_of(properties), pairs_of(types), strict=True)):
            try:
                yield (TYPED_SECTIONS[texts, kinds] if kinds else SECTIONS[texts]) if texts else b""
            except EventError as error:
                raise self._error(row, f"{self._columns.properties}: {error}") from None

    def _standard(self, size: int) -> Iterator[bytes]:
        """Encode the standard properties of each row; empty if there are none."""

        def values(role: str) -> list[Any]:
            return self._arrays[role].to_pylist() if role in self._arrays else [None] * size

        def pairs(role: str) -> Iterable[Pairs]:
            return pairs_of(self._arrays[role]) if role in self._arrays else [()] * size

        given = zip(values("message_id"), values("correlation_id"), values("content_type"), strict=True)
        system = zip(pairs("system_properties"), pairs("system_property_types"), strict=True)
        for row, (own, (texts, types)) in enumerate(zip(given, system, strict=True)):
            message_id, correlation_id, content_type = own
            try:
                found = standard_values(texts, dict(types)) if texts else {}
                if message_id is not None:
                    found["message_id"] = id_of(message_id)
                if correlation_id is not None:
                    found["correlation_id"] = id_of(correlation_id)
                if content_type is not None:
                    if not content_type.isascii():
                        raise EventError(f"{self._columns.content_type} is not ASCII")
                    found["content_type"] = Symbol(content_type)
                if self._codecs:
                    found["content_encoding"] = Symbol(marked(self._codecs, found.get("content_encoding")))
                yield section(PROPERTIES, listed_fields(found)) if found else b""
            except EventError as error:
                raise self._error(row, str(error)) from None

    def _not_text(self) -> EventError:
        """Return the error for a text that is not UTF-8: Spark makes one of any bytes, as by a cast from binary."""
        for role, name in self._columns.roles.items():
            # A body may be any bytes.
            for row, value in enumerate(self._arrays[role] if role != "body" else ()):
                if _value(value) is _NOT_TEXT:
                    return self._error(
                        row, f'{name} has text that is not UTF-8; decode it: decode(<binary column>, "<charset>")'
                    )
        raise AssertionError("every text can be decoded")

    def _error(self, row: int, problem: str) -> EventError:
        return EventError(
            f"row {self._row + row} of the DataFrame's partition {task_number()}{self._named(row)}: {problem}"
        )

    def _named(self, row: int) -> str:
        """Return how a row can be found: by its key, and its position in the source; otherwise by its body, which is
        not shown, as it may contain a secret."""

        def value(role: str) -> Any:
            found = _value(self._arrays[role][row]) if role in self._arrays else None
            return None if found is _NOT_TEXT else found

        names: list[str] = []
        key, number = value("partition_key"), value("sequence_number")
        if key is not None:
            names.append(f"key {key!r:.40}")
        if number is not None:
            partition = value("partition")
            names += [*([] if partition is None else [f"partition {partition!s:.40}"]), f"sequence number {number}"]
        raw = self._arrays["body"][row].cast(pa.binary()).as_py()
        if not names and raw is not None:
            names.append(f"body of {len(raw)} bytes, crc32(body) = {zlib.crc32(raw)}")
        return f" ({', '.join(names)})" if names else ""


def _encode_bad_row(row: pa.RecordBatch, columns: EventColumns, error: str) -> bytes:
    names = [*columns.names, _ERROR]
    stream = pa.BufferOutputStream()
    table = pa.RecordBatch.from_arrays([*row.columns, pa.array([error])], names)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_batch(table)
    return bytes(stream.getvalue())


def bad_row(raw: bytes) -> tuple[str, dict[str, Any]]:
    """Return the error of a row that was kept, and its values by column. A text that is not UTF-8 is bytes."""
    with pa.ipc.open_stream(raw) as reader:
        (row,) = reader
    values = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        found = _value(column[0])
        values[name] = column.cast(pa.binary())[0].as_py() if found is _NOT_TEXT else found
    return values.pop(_ERROR), values


def _value(scalar: pa.Scalar) -> Any:
    """Return the value of a column in a row; `_NOT_TEXT` if a text in it is not UTF-8."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _NOT_TEXT


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
    """Choose the partition of each event that has neither partition nor key, by a hash of its bytes."""
    return [
        zlib.crc32(event) % count if partition == ANYWHERE else partition
        for partition, event in zip(partitions, events, strict=True)
    ]
