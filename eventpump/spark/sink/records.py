"""The records of the exactly-once sink: plans, receipts and conclusions, their JSON form and their names."""

from __future__ import annotations

import enum
import hashlib
import json
import re
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eventpump.errors import (
    ConfigurationError,
)
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS, advance
from eventpump.eventhubs.stamps import row_stamp_prefix

VERSION: Final = 2
"""The version of the records. A reader accepts only its own."""

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
    """How the loss of a producer's state was detected."""

    UNKNOWN = "unknown"
    """The service does not know the producer."""
    BELOW = "below"
    """The service's last number is before the batch."""
    REGRESSED = "regressed"
    """The service's last number is before rows that it accepted."""
    UNCOUNTED = "uncounted"
    """The service reports that nothing is published, but the batch's first row is in the hub."""


class Record(BaseModel):
    """Base class of JSON records: frozen, strictly typed, without unknown members."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Sink(Record):
    """The sink that records belong to.

    Args:
        namespace: The fully qualified namespace.
        part: Which of several calls for a batch it is: each has plans, producers and numbers of its own.
    """

    sink_id: Text
    namespace: Text
    hub: Text
    part: Text | None = None

    @property
    def name(self) -> str:
        """The name of the sink, or of its part, in errors."""
        return self.sink_id if self.part is None else f"{self.sink_id}~{self.part}"

    @property
    def directory(self) -> str:
        """The name of its directory: no sink and no other part has the same.
        Raises `ConfigurationError` if it cannot be a name."""
        own = directory_name(self.sink_id)
        return own if self.part is None else f"{own}~{directory_name(self.part, 'part')}"

    @property
    def rows_directory(self) -> str:
        """The name of its directory in a row store, which ledgers may share: no sink of another hub has the same."""
        hub = f"{self.namespace}/{self.hub}".lower()
        return f"{self.directory}.{hashlib.sha256(hub.encode()).hexdigest()[:16]}"

    @property
    def stamp_name(self) -> str:
        """The name of the sink in stamps: no other sink has that of a part."""
        return self.sink_id if self.part is None else self.directory


class PackingLimits(Record):
    """How rows are packed into messages, the same in every attempt, so that the service recognizes a repeated message.

    Args:
        max_events: The most events in a message.
        max_bytes: The largest size of a message on the wire; the service's limit, where that is smaller.
    """

    max_events: int = Field(default=5000, ge=1)
    max_bytes: int = Field(default=1024 * 1024, ge=1024)


LIMITS: Final = PackingLimits()


class KeptRows(Record):
    """The object of the row store that has the rows of a batch, or names the objects that have them;
    its digest is SHA-256."""

    name: Text
    size: Annotated[int, Field(ge=1)]
    digest: Text


class PartitionPlan(Record):
    """The numbering of one partition's rows: row `offset` has `next_number`, and the others follow.

    Args:
        next_number: Modulo 2^31, like all numbers.
        nothing: The service's answer when nothing was published, -1 or 0 (protocol.md 8.2); it would be the same if the
            service had forgotten everything.
        is_fresh: Whether nothing was published under this id and level before this batch.
        tail: The sequence number of the partition's last event when it was planned, -1 for none.
        count: How many rows the batch has for it.
        offset: Rows before it were stored before a take-over.
        missing: How many events are missing between that tail and its lowest possible value: the service has lost
            accepted events.
    """

    partition_id: Text
    producer_id: ProducerId
    owner_level: OwnerLevel
    next_number: Number
    nothing: Nothing
    is_fresh: bool
    tail: Tail
    count: Count = 0
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
    version: Literal[2] = 2
    sink: Sink
    query_id: str | None
    run_id: Text
    batch_id: Count


class Plan(BatchRecord):
    """How a batch is published. Picklable, because it is sent to tasks.

    Args:
        partitions: In the order of their numbers.
        rows: Where its rows are kept; None if it has none.
        bad_rows: How many rows could not be events.
        revision: How often producers were taken over.
    """

    kind: Literal["plan"] = "plan"
    partitions: tuple[PartitionPlan, ...]
    limits: PackingLimits
    is_stamped: bool
    rows: KeptRows | None = None
    bad_rows: Count = 0
    revision: Count = 0

    @property
    def partition_ids(self) -> tuple[str, ...]:
        """The partitions that rows are routed to: those of the hub when the batch was first planned."""
        return tuple(each.partition_id for each in self.partitions)

    def partition(self, partition_id: str) -> PartitionPlan:
        """Return a partition's part. Raises `KeyError` if the plan has none."""
        for each in self.partitions:
            if each.partition_id == partition_id:
                return each
        raise KeyError(partition_id)

    def stamp(self, partition_id: str, row: int) -> str:
        """Return the stamp of a row: unique within the hub, as long as sink ids are."""
        return f"{self.stamp_prefix(partition_id)}{row}"

    def stamp_prefix(self, partition_id: str) -> str:
        """Return the prefix of the stamps of a partition's rows; the row's index follows."""
        return row_stamp_prefix(self.sink.stamp_name, self.batch_id, partition_id)


class TakenProducer(Record):
    """A producer to be taken over, and the level to raise it to."""

    partition_id: Text
    producer_id: ProducerId
    owner_level: OwnerLevel


class TakeOver(BatchRecord):
    """The intent to take producers over, which concludes a plan. It is stored before the first level is raised."""

    kind: Literal["take-over"] = "take-over"
    producers: tuple[TakenProducer, ...]


class RunClaim(Record):
    """The claim of a run of the driver on its sink: the run of the latest claim publishes, and earlier ones end."""

    version: Literal[2] = 2
    kind: Literal["claim"] = "claim"
    sink: Sink
    query_id: str | None
    run_id: Text
    batch_id: Count


class PartitionReceipt(Record):
    """The report that all rows of a partition are stored.

    Args:
        offset: Rows before it have numbers of a producer that was taken over.
        first_number: The number of row `offset`; None if no row has a number of this producer.
        next_number: The number after the last row's.
        found: How many rows were stored when this attempt started; it or a concurrent attempt sent the others.
    """

    kind: Literal["receipt"] = "receipt"
    partition_id: Text
    producer_id: ProducerId
    owner_level: OwnerLevel
    count: Count
    offset: Count
    first_number: Number | None
    next_number: Number
    found: Count

    @property
    def last_number(self) -> int | None:
        """The last row's number; None as for `first_number`."""
        return None if self.first_number is None else (self.next_number - 1) % NUMBERS


class StateLost(Record):
    """The report that a partition's rows cannot be published as planned: the service lost the producer's state.

    Args:
        stored: How many rows the service had accepted, as far as this attempt knows.
    """

    kind: Literal["state-lost"] = "state-lost"
    partition_id: Text
    reason: LossReason
    stored: Count


PartitionOutcome: TypeAlias = PartitionReceipt | StateLost


class PartitionDone(Record):
    """The state of a partition's producer after a batch.

    Args:
        first_number: The number of the batch's first row under this producer; None if there is none.
        tail: The lowest sequence number that the partition's last event can have from now on.
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


class Done(BatchRecord):
    """The record that a batch is stored, which concludes a plan.

    Args:
        partitions: All partitions of the plan.
        receipts: The receipts of those with rows.
        bad_rows: How many rows could not be events.
    """

    kind: Literal["done"] = "done"
    partitions: tuple[PartitionDone, ...]
    receipts: tuple[PartitionReceipt, ...]
    bad_rows: Count = 0


R = TypeVar("R", bound=Record)

_NEWER = "written by a newer version of eventpump"
_EARLIER = (
    "written by an earlier version of eventpump, which kept no rows: let that version finish the batch, and continue "
    "with a new sink_id and first_batch of the next one"
)


def encode_record(record: Record) -> bytes:
    """Encode a record as JSON: one spelling for equal records."""
    return record.model_dump_json().encode()


def decode_record(raw: bytes | str, *kinds: type[R]) -> R:
    """Decode a record of one of these kinds. Raises `ValueError` if it is unreadable, or another kind or version."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    if "version" in kinds[0].model_fields and found.get("version") != VERSION:
        version = found.get("version")
        if type(version) is not int or version < 1:
            raise ValueError("it has no version that this eventpump supports")
        raise ValueError(_NEWER if version > VERSION else _EARLIER)
    for kind in kinds:
        if found.get("kind") == kind.model_fields["kind"].default:
            break
    else:
        raise ValueError(f"it is not a {' or '.join(each.model_fields['kind'].default for each in kinds)}")
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "record"
        raise ValueError(f"{where}: {first['msg']}") from None


def encode_outcome(outcome: PartitionOutcome) -> str:
    """Encode a task's report as JSON text."""
    return outcome.model_dump_json()


def decode_outcome(text: str) -> PartitionOutcome:
    """Decode a task's report. Raises `ValueError` if the text is none."""
    outcome = decode_record(text, PartitionReceipt, StateLost)
    assert isinstance(outcome, PartitionReceipt | StateLost)
    return outcome


def directory_name(sink_id: str, field: str = "sink_id") -> str:
    """Convert a sink id to a name for file systems and containers, one to one, with no tilde.
    Raises `ConfigurationError`."""
    if not sink_id or not sink_id.isprintable():
        raise ConfigurationError(field, "must be printable text")
    escaped = _UNSAFE.sub(lambda found: b"%%%02X" % found.group()[0], sink_id.encode("utf-8", "surrogatepass")).decode()
    if len(escaped) > _MAX_ESCAPED:
        raise ConfigurationError(field, f"takes {len(escaped)} characters as a file name; limit: {_MAX_ESCAPED}")
    return escaped


def plan_name(batch_id: int, revision: int = 0) -> str:
    """Return the name of a plan. Names sort by batch."""
    return f"{batch_id:012d}.{revision}.plan.json"


def done_name(batch_id: int, revision: int = 0) -> str:
    """Return the name of the record that concludes a plan."""
    return f"{batch_id:012d}.{revision}.done.json"


def claim_name(number: int) -> str:
    """Return the name of a run's claim, by its number from 1."""
    return f"claim.{number:012d}.json"


_CLAIM: Final = re.compile(r"claim\.(\d{12,})\.json")


def claim_of(name: str) -> int | None:
    """Return the number in a claim's name; None for another file."""
    found = _CLAIM.fullmatch(name)
    return None if found is None else int(found.group(1))


def rows_stem(batch_id: int) -> str:
    """Return what the names of the objects with rows of a batch begin with; see `RowStore.write`."""
    return f"{batch_id:012d}"


_ROWS: Final = re.compile(r"(\d{12,})\.[0-9a-f]{32}")


def batch_of_rows(name: str) -> int | None:
    """Return the batch in the name of an object with rows; None for another file."""
    found = _ROWS.fullmatch(name)
    return None if found is None else int(found.group(1))


def token_name(claim: int, run_id: str) -> str:
    """Return the name of what a run writes into the row store, for its tasks to see whether they share it."""
    return f"run.{claim:012d}.{run_id}"


_TOKEN: Final = re.compile(r"run\.(\d{12,})\.\w+")


def is_obsolete(name: str, before: int, claim: int) -> bool:
    """Return whether a file of the row store is not needed any more: rows of an earlier batch, the token of a run.

    Args:
        before: The first batch whose rows are needed.
        claim: The number of the newest run.
    """
    batch_id, token = batch_of_rows(name), _TOKEN.fullmatch(name)
    return batch_id < before if batch_id is not None else token is not None and int(token.group(1)) < claim


_NAME: Final = re.compile(r"(\d{12,})\.\d+\.(?:plan|done)\.json")


def batch_of(name: str) -> int | None:
    """Return the batch in a record's name; None for another file."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found.group(1))
