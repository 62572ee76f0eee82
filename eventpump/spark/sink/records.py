"""The records of the exactly-once sink: plans, receipts and conclusions, their JSON form and their names."""

from __future__ import annotations

import enum
import json
import re
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eventpump.errors import (
    ConfigurationError,
)
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS, advance

VERSION: Final = 1
"""Of the records. A reader takes its own version only."""

_MAX_ESCAPED: Final = 200
_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_-]")

Text = Annotated[str, Field(min_length=1)]
Number = Annotated[int, Field(ge=0, lt=NUMBERS)]
ProducerId = Annotated[int, Field(ge=0, le=MAX_PRODUCER_ID)]
OwnerLevel = Annotated[int, Field(ge=0, le=MAX_OWNER_LEVEL)]
Count = Annotated[int, Field(ge=0)]
Nothing = Annotated[int, Field(ge=-1, lt=NUMBERS)]
Tail = Annotated[int, Field(ge=-1)]


class LossReason(enum.StrEnum):
    """How it showed that the service lost a producer's state."""

    UNKNOWN = "unknown"
    """The service does not know the producer."""
    BELOW = "below"
    """Its last number lies before the batch."""
    REGRESSED = "regressed"
    """Its last number lies before what it accepted."""
    UNCOUNTED = "uncounted"
    """It says that nothing is published, and the batch's first row is in the hub."""


class Record(BaseModel):
    """The base of what is written as JSON: frozen, of exact types, closed to unknown members."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Sink(Record):
    """Whose records they are.

    Args:
        namespace: The fully qualified namespace.
    """

    sink_id: Text
    namespace: Text
    hub: Text


class PackingLimits(Record):
    """How rows are packed into messages, the same in every attempt, so that a repeated message is known as one.

    Args:
        max_bytes: Of a message on the wire.
    """

    max_events: int = Field(default=5000, ge=1)
    max_bytes: int = Field(default=256 * 1024, ge=1024)


LIMITS: Final = PackingLimits()


class PartitionPlan(Record):
    """What one partition's rows are numbered by: row `offset` has `next_number`, and the others follow.

    Args:
        next_number: Modulo 2^31, as all numbers are.
        nothing: What the service answered when nothing was published, -1 or 0 (protocol.md 8.2): what it would answer
            again, had it forgotten everything.
        is_fresh: Whether nothing was published under this id and level before this batch.
        tail: The sequence number of the partition's last event when it was planned, -1 for none.
        offset: Rows before it were stored before a take-over.
        missing: How many events lie between that tail and where it must at least have been: the service has lost what
            it had accepted.
    """

    partition_id: Text
    producer_id: ProducerId
    owner_level: OwnerLevel
    next_number: Number
    nothing: Nothing
    is_fresh: bool
    tail: Tail
    offset: Count = 0
    missing: Count = 0

    @property
    def last_number(self) -> int:
        """The number before the first."""
        return (self.next_number - 1) % NUMBERS

    def number_of(self, row: int) -> int:
        """Return the number of a row, by its index from 0; at least `offset`."""
        return advance(self.next_number, row - self.offset)


class BatchRecord(Record):
    version: Literal[1] = 1
    sink: Sink
    query_id: str | None
    run_id: Text
    batch_id: Count


class Plan(BatchRecord):
    """How a batch is published. Picklable: tasks get it.

    Args:
        query_id: Spark's id of the query; None where it is not told.
        run_id: Which run of the driver wrote it.
        partitions: In the order of their numbers.
        is_stamped: Whether every event carries the property `STAMP`.
        revision: How often producers were taken over.
    """

    kind: Literal["plan"] = "plan"
    partitions: tuple[PartitionPlan, ...]
    limits: PackingLimits
    is_stamped: bool
    revision: Count = 0

    @property
    def partition_ids(self) -> tuple[str, ...]:
        """The partitions rows are routed to: those there were when the batch was planned first."""
        return tuple(each.partition_id for each in self.partitions)

    def partition(self, partition_id: str) -> PartitionPlan:
        """Find a partition's part.

        Raises:
            KeyError: It has none.
        """
        for each in self.partitions:
            if each.partition_id == partition_id:
                return each
        raise KeyError(partition_id)

    def stamp(self, partition_id: str, row: int) -> str:
        """Spell the stamp of a row: unique within the hub, as long as sink ids are."""
        return f"{self.stamp_prefix(partition_id)}{row}"

    def stamp_prefix(self, partition_id: str) -> str:
        """Spell what the stamps of a partition's rows begin with; the row's index follows."""
        return f"{self.sink.sink_id}:{self.batch_id}:{partition_id}:"


class TakenProducer(Record):
    """A producer to be taken over.

    Args:
        owner_level: The level to raise it to.
    """

    partition_id: Text
    producer_id: ProducerId
    owner_level: OwnerLevel


class TakeOver(BatchRecord):
    """A plan is concluded by the intent to take producers over. It stands before the first level is raised.

    Args:
        is_counted: Whether the tail is read for what is stored; otherwise every row is sent again.
    """

    kind: Literal["take-over"] = "take-over"
    producers: tuple[TakenProducer, ...]
    is_counted: bool


class PartitionReceipt(Record):
    """All rows of a partition's share are stored.

    Args:
        count: How many rows that is.
        offset: Rows before it have numbers of a producer that was taken over.
        first_number: Of row `offset`; None where no row has a number of this producer.
        next_number: The number after the last row's.
        digest: SHA-256 of all rows as they were encoded, in order and without stamps, in hexadecimal digits.
        found: How many rows were stored when this attempt came; the service got the others from it, or from a rival.
    """

    kind: Literal["receipt"] = "receipt"
    partition_id: Text
    producer_id: ProducerId
    owner_level: OwnerLevel
    count: Count
    offset: Count
    first_number: Number | None
    next_number: Number
    digest: Text
    found: Count

    @property
    def last_number(self) -> int | None:
        """The last row's number; None as for `first_number`."""
        return None if self.first_number is None else (self.next_number - 1) % NUMBERS


class StateLost(Record):
    """A partition's rows cannot be published as planned: the service lost its producer's state.

    Args:
        stored: How many rows it had accepted, as far as this attempt knows.
    """

    kind: Literal["state-lost"] = "state-lost"
    partition_id: Text
    reason: LossReason
    stored: Count


PartitionOutcome: TypeAlias = PartitionReceipt | StateLost


class PartitionDone(Record):
    """Where a partition's producer stands after a batch.

    Args:
        count: Rows of the batch.
        first_number: Of the batch's first row under this producer; None where there is none.
        digest: Of the batch's rows; None where there is none.
        tail: The lowest sequence number the partition's last event can have from now on.
    """

    partition_id: Text
    producer_id: ProducerId
    owner_level: OwnerLevel
    next_number: Number
    nothing: Nothing
    is_fresh: bool
    tail: Tail
    count: Count
    first_number: Number | None
    digest: str | None


class Done(BatchRecord):
    """A plan is concluded: its batch is stored.

    Args:
        partitions: All those of its plan.
        receipts: Of those that had rows.
    """

    kind: Literal["done"] = "done"
    partitions: tuple[PartitionDone, ...]
    receipts: tuple[PartitionReceipt, ...]


R = TypeVar("R", bound=Record)

_NEWER = "written by a newer version of eventpump"


def encode_record(record: Record) -> bytes:
    """Encode a record as JSON: one spelling for equal records."""
    return record.model_dump_json().encode()


def decode_record(raw: bytes | str, *kinds: type[R]) -> R:
    """Decode a record.

    Args:
        kinds: What it may be.

    Raises:
        ValueError: It is unreadable, of another kind, or of another version.
    """
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    if "version" in kinds[0].model_fields and found.get("version") != VERSION:
        version = found.get("version")
        is_newer = type(version) is int and version > VERSION
        raise ValueError(_NEWER if is_newer else "it has no version this eventpump knows")
    for kind in kinds:
        if found.get("kind") == kind.model_fields["kind"].default:
            break
    else:
        raise ValueError(f"it is no {' or '.join(each.model_fields['kind'].default for each in kinds)}")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "record"
        raise ValueError(f"{where}: {first['msg']}") from None


def encode_outcome(outcome: PartitionOutcome) -> str:
    """Encode what a task reports, as JSON text."""
    return outcome.model_dump_json()


def decode_outcome(text: str) -> PartitionOutcome:
    """Decode what a task reported.

    Raises:
        ValueError: It is something else.
    """
    outcome = decode_record(text, PartitionReceipt, StateLost)
    assert isinstance(outcome, PartitionReceipt | StateLost)
    return outcome


def directory_name(sink_id: str) -> str:
    """Spell a sink id as a name that file systems and blob containers take, one to one.

    Raises:
        ConfigurationError: It cannot be one.
    """
    if not sink_id or not sink_id.isprintable():
        raise ConfigurationError("sink_id", "must be printable text")
    escaped = _UNSAFE.sub(lambda found: b"%%%02X" % found.group()[0], sink_id.encode("utf-8", "surrogatepass")).decode()
    if len(escaped) > _MAX_ESCAPED:
        raise ConfigurationError("sink_id", f"takes {len(escaped)} characters in file names, {_MAX_ESCAPED} at most")
    return escaped


def plan_name(batch_id: int, revision: int = 0) -> str:
    """Spell the name of a plan. Names sort by batch."""
    return f"{batch_id:012d}.{revision}.plan.json"


def done_name(batch_id: int, revision: int = 0) -> str:
    """Spell the name of the record that a plan is done with."""
    return f"{batch_id:012d}.{revision}.done.json"


_NAME: Final = re.compile(r"(\d{12,})\.\d+\.(?:plan|done)\.json")


def batch_of(name: str) -> int | None:
    """Read the batch in a record's name; None for another file."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found.group(1))
