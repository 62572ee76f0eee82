"""The ledger of the idempotent sink: its records, and every decision of the batch protocol. Pure.

A sink (a stable `sink_id` for one hub) keeps two records per batch: *plan* stands before anything is sent, and says
which numbers the rows get; *done* stands when all of them are stored. Row i of a partition owns one number, whoever
sends it and however often, so that attempts of the same batch cannot harm each other: the service takes a number once.

The driver runs `begin` and `finish`, which are written as generators: each yields what it needs from outside (a
`Request`) and is sent the answer, so that a simulation runs the very code that production runs. An attempt to publish
one partition's rows is led by a `PartitionWork`.

Records are JSON objects, created once and never changed. Their names, in the sink's own directory::

    000000000041.0.plan.json  the plan of batch 41
    000000000041.0.done.json  the plan is done with: the batch is stored, or its producers are to be taken over
    000000000041.1.plan.json  in the latter case, the plan from then on; and so forth

That a batch is stored and that its producers are taken over is said in one place, so that of two runs one can say it.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eventpump.core.sequencer import AttachRequest
from eventpump.errors import (
    ConfigurationError,
    EventPumpError,
    InvalidClientStateError,
    ProducerDisconnectedError,
    ProducerStateLostError,
    StoreError,
)
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS, advance, distance

VERSION: Final = 1
"""Of the records. A reader takes its own version only."""
KEPT_BATCHES: Final = 100
"""How many finished batches the ledger remembers; Spark's own checkpoint keeps as many by default."""
PRUNED_EVERY: Final = 16
"""After how many batches older records are deleted."""
RENEW_AT: Final = NUMBERS - 2**28
"""From which next number on a partition gets a new producer for its next batch, so that none meets the wrap in one."""
STAMP: Final = "eventpump:stamp"
"""The application property that names an event's sink, batch, partition and place."""

_MAX_ESCAPED: Final = 200
_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_-]")

T = TypeVar("T")

Text = Annotated[str, Field(min_length=1)]
Number = Annotated[int, Field(ge=0, lt=NUMBERS)]
ProducerId = Annotated[int, Field(ge=0, le=MAX_PRODUCER_ID)]
OwnerLevel = Annotated[int, Field(ge=0, le=MAX_OWNER_LEVEL)]
Count = Annotated[int, Field(ge=0)]
Nothing = Annotated[int, Field(ge=-1, lt=NUMBERS)]
Tail = Annotated[int, Field(ge=-1)]


class OnProducerStateLost(enum.StrEnum):
    """What follows when the service does not know any more what it had of a batch."""

    FAIL = "fail"
    """The query fails, and nothing is sent."""
    TAIL_SCAN = "tailScan"
    """The producer is taken over, and the hub's tail is read for the stamps of what is stored. Exact; takes stamps."""
    AT_LEAST_ONCE = "atLeastOnce"
    """The producer is taken over, and the partition's rows are sent from the first: some may be stored twice."""


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


# ---------------------------------------------------------------------------------------------------- records


class Record(BaseModel):
    """The base of what is written as JSON: frozen, of exact types, closed to unknown members."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Sink(Record):
    """Whose records they are.

    :param namespace: the fully qualified namespace.
    """

    sink_id: Text
    namespace: Text
    hub: Text


class PackingLimits(Record):
    """How rows are packed into messages, the same in every attempt, so that a repeated message is known as one.

    :param max_bytes: of a message on the wire.
    """

    max_events: int = Field(default=5000, ge=1)
    max_bytes: int = Field(default=256 * 1024, ge=1024)


_LIMITS: Final = PackingLimits()


class PartitionPlan(Record):
    """What one partition's rows are numbered by: row `offset` has `next_number`, and the others follow.

    :param next_number: modulo 2^31, as all numbers are.
    :param nothing: what the service answered when nothing was published, -1 or 0 (wire reference 8.2): what it would
        answer again, had it forgotten everything.
    :param is_fresh: whether nothing was published under this id and level before this batch.
    :param tail: the sequence number of the partition's last event when it was planned, -1 for none.
    :param offset: rows before it were stored before a take-over.
    :param missing: how many events lie between that tail and where it must at least have been: the service has lost
        what it had accepted.
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
        """Give the number of a row, by its index from 0; at least `offset`."""
        return advance(self.next_number, row - self.offset)


class _BatchRecord(Record):
    version: Literal[1] = 1
    sink: Sink
    query_id: str | None
    run_id: Text
    batch_id: Count


class Plan(_BatchRecord):
    """How a batch is published. Picklable: tasks get it.

    :param query_id: Spark's id of the query; None where it is not told.
    :param run_id: which run of the driver wrote it.
    :param partitions: in the order of their numbers.
    :param is_stamped: whether every event carries the property `STAMP`.
    :param revision: how often producers were taken over.
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
        """Find a partition's part. :raises KeyError: it has none."""
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

    :param owner_level: the level to raise it to.
    """

    partition_id: Text
    producer_id: ProducerId
    owner_level: OwnerLevel


class TakeOver(_BatchRecord):
    """A plan is concluded by the intent to take producers over. It stands before the first level is raised.

    :param is_counted: whether the tail is read for what is stored; otherwise every row is sent again.
    """

    kind: Literal["take-over"] = "take-over"
    producers: tuple[TakenProducer, ...]
    is_counted: bool


class PartitionReceipt(Record):
    """All rows of a partition's share are stored.

    :param count: how many rows that is.
    :param offset: rows before it have numbers of a producer that was taken over.
    :param first_number: of row `offset`; None where no row has a number of this producer.
    :param next_number: the number after the last row's.
    :param digest: SHA-256 of all rows as they were encoded, in order and without stamps, in hexadecimal digits.
    :param found: how many rows were stored when this attempt came; the service got the others from it, or from a rival.
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

    :param stored: how many rows it had accepted, as far as this attempt knows.
    """

    kind: Literal["state-lost"] = "state-lost"
    partition_id: Text
    reason: LossReason
    stored: Count


PartitionOutcome: TypeAlias = PartitionReceipt | StateLost


class PartitionDone(Record):
    """Where a partition's producer stands after a batch.

    :param count: rows of the batch.
    :param first_number: of the batch's first row under this producer; None where there is none.
    :param digest: of the batch's rows; None where there is none.
    :param tail: the lowest sequence number the partition's last event can have from now on.
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


class Done(_BatchRecord):
    """A plan is concluded: its batch is stored.

    :param partitions: all those of its plan.
    :param receipts: of those that had rows.
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

    :param kinds: what it may be.
    :raises ValueError: it is unreadable, of another kind, or of another version.
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
    """Decode what a task reported. :raises ValueError: it is something else."""
    outcome = decode_record(text, PartitionReceipt, StateLost)
    assert isinstance(outcome, PartitionReceipt | StateLost)
    return outcome


def directory_name(sink_id: str) -> str:
    """Spell a sink id as a name that file systems and blob containers take, one to one.

    :raises ConfigurationError: it cannot be one.
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


# ---------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read a record. Answer: its bytes, or None."""

    name: str


@dataclass(frozen=True, slots=True)
class CreateRecord:
    """Create a record, durably. Answer: whether it is there with this body; False where there is another."""

    name: str
    body: bytes


@dataclass(frozen=True, slots=True)
class ListRecords:
    """List the names of all records. Answer: a sequence of them."""


@dataclass(frozen=True, slots=True)
class DeleteRecords:
    """Delete records that nobody needs any more. Answer: None, and failing is no failure."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadTails:
    """Read where partitions begin and end now. Answer: a mapping from partition id to `PartitionTail`.

    :param partition_ids: which; None for all the hub has.
    """

    partition_ids: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class AttachProducers:
    """Attach once as each of these producers, with a null number.

    Answer: a mapping to what the service said (`ProducerAnswer`); to None where it does not know the producer.
    """

    producers: Mapping[str, AttachRequest]


@dataclass(frozen=True, slots=True)
class ReadStamps:
    """Read the events of partitions from after a sequence number up to another, for the stamps of a batch.

    Answer: a mapping from partition id to the row indices found, in the order of the events.

    :param ranges: the two numbers per partition: the first exclusive, the second inclusive.
    """

    plan: Plan
    ranges: Mapping[str, tuple[int, int]]


Request: TypeAlias = ReadRecord | CreateRecord | ListRecords | DeleteRecords | ReadTails | AttachProducers | ReadStamps
Answer: TypeAlias = "object"
Procedure: TypeAlias = Generator[Request, Answer, T]
"""Yields requests, is sent their answers, and returns a result; an error of the outside is not for it."""


@dataclass(frozen=True, slots=True)
class PartitionTail:
    """The sequence numbers a partition holds, first and last; of an empty one the last there ever was, or -1."""

    beginning: int
    last: int


@dataclass(frozen=True, slots=True)
class ProducerAnswer:
    """What the service answers to an attach."""

    producer_id: int
    owner_level: int
    last_number: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch as its query announces it.

    :param query_id: Spark's id of the query, which stays the same over restarts; None where it is not told.
    :param run_id: names this run of the driver, and no other.
    :param limits: for a new plan; one that exists keeps its own.
    :param is_stamped: likewise.
    :param renew_at: see `RENEW_AT`.
    """

    sink: Sink
    query_id: str | None
    run_id: str
    batch_id: int
    limits: PackingLimits = _LIMITS
    is_stamped: bool = False
    renew_at: int = RENEW_AT


# ---------------------------------------------------------------------------------------------------- the driver


def begin(batch: Batch) -> Procedure[Plan | Done]:
    """Steps 1 and 2 of a batch: the record that it is done, or else its plan, made where there is none.

    A take-over that was begun and not finished is finished first.

    :raises ConfigurationError: the sink belongs to another query or hub, or its ledger does not fit the query.
    :raises StoreError: a record cannot be read.
    :raises InvalidClientStateError: the hub does not offer idempotent publishing.
    :raises ProducerStateLostError: what is stored cannot be counted.
    """
    name = plan_name(batch.batch_id)
    concluded = yield from _read_conclusion(batch, batch.batch_id)
    if isinstance(concluded, Done):
        # Spark repeats its newest batch only: a query that is at an earlier one is not where the ledger is.
        if (yield ReadRecord(plan_name(batch.batch_id + 1))) is not None:
            raise _behind(batch, batch.batch_id + 1)
        return concluded
    plan = yield from _read(batch, name, Plan)
    if plan is None and concluded is not None:
        raise StoreError(f"read {name}", "it is gone, and what came of it is there")
    if plan is None:
        plan = yield from _make_plan(batch)
    return (yield from _follow(batch, plan, concluded))


def finish(
    batch: Batch, plan: Plan, outcomes: Iterable[PartitionOutcome], policy: OnProducerStateLost
) -> Procedure[Plan | Done]:
    """Step 5 of a batch: the record that it is done; or, where producers were lost, the plan to go on with.

    :param outcomes: what the tasks reported; partitions without rows report nothing.
    :raises ProducerStateLostError: a producer was lost, and the policy is to fail.
    :raises ConfigurationError: the policy takes stamps, and the batch has none.
    :raises InvalidClientStateError: reports do not fit the plan.
    :raises StoreError: another run has finished the batch.
    """
    receipts, lost = _sorted_outcomes(plan, outcomes)
    mine = _take_over(batch, plan, lost, policy) if lost else _done(batch, plan, receipts)
    name = done_name(plan.batch_id, plan.revision)
    if not (yield CreateRecord(name, encode_record(mine))):
        concluded = yield from _read_conclusion(batch, plan.batch_id, plan.revision)
        if not isinstance(concluded, TakeOver):
            raise StoreError(f"write {name}", "another run of this query has finished the batch")
        return (yield from _follow(batch, plan, concluded))
    if isinstance(mine, TakeOver):
        return (yield from _follow(batch, plan, mine))
    if plan.batch_id % PRUNED_EVERY == 0:
        names = yield ListRecords()
        assert isinstance(names, Sequence)
        yield DeleteRecords(obsolete(names, plan.batch_id))
    return mine


def obsolete(names: Iterable[str], batch_id: int) -> tuple[str, ...]:
    """Give those of the records that are not needed once a batch is done."""
    return tuple(name for name in names if (found := batch_of(name)) is not None and found <= batch_id - KEPT_BATCHES)


def _read(batch: Batch, name: str, *kinds: type[R]) -> Procedure[R | None]:
    raw = yield ReadRecord(name)
    if raw is None:
        return None
    assert isinstance(raw, bytes)
    try:
        record = decode_record(raw, *kinds)
    except ValueError as error:
        raise StoreError(f"read {name}", str(error)) from None
    assert isinstance(record, _BatchRecord)
    _check(batch, record, name)
    return record


def _read_conclusion(batch: Batch, batch_id: int, revision: int = 0) -> Procedure[Done | TakeOver | None]:
    found = yield from _read(batch, done_name(batch_id, revision), Done, TakeOver)
    assert found is None or isinstance(found, Done | TakeOver)
    return found


def _check(batch: Batch, record: _BatchRecord, name: str) -> None:
    """See that a record is of this sink, hub and query, and under its own name."""
    if record.sink.sink_id != batch.sink.sink_id or batch_of(name) != record.batch_id:
        raise StoreError(f"read {name}", f"it is of batch {record.batch_id} of the sink {record.sink.sink_id!r}")
    theirs, ours = (f"{sink.namespace}/{sink.hub}".lower() for sink in (record.sink, batch.sink))
    if theirs != ours:
        raise ConfigurationError("sink_id", f"{batch.sink.sink_id!r} publishes to {theirs}, not to {ours}")
    if None not in (record.query_id, batch.query_id) and record.query_id != batch.query_id:
        raise ConfigurationError(
            "sink_id",
            f"{batch.sink.sink_id!r} belongs to the query {record.query_id}, and this is {batch.query_id}; a query "
            "that starts anew takes another sink_id, and publishes its batches anew",
        )


def _behind(batch: Batch, newest: int) -> ConfigurationError:
    return ConfigurationError(
        "sink_id",
        f"{batch.sink.sink_id!r} is at batch {newest}, and the query at {batch.batch_id}: it is another query, or its "
        "checkpoint is older than the ledger; take another sink_id to publish these batches",
    )


def _make_plan(batch: Batch) -> Procedure[Plan]:
    prior = yield from _prior(batch)
    tails = yield ReadTails()
    assert isinstance(tails, Mapping)
    known = {} if prior is None else {each.partition_id: each for each in prior.partitions}
    gone = [each for each in known if each not in tails]
    if gone:
        raise ConfigurationError("hub", f"had the partition {gone[0]}, and has it no more: it was made anew")
    kept = {key: each for key, each in known.items() if each.is_fresh or each.next_number < batch.renew_at}
    partition_ids = sorted(tails, key=_by_number)
    opened = yield AttachProducers({each: AttachRequest() for each in partition_ids if each not in kept})
    assert isinstance(opened, Mapping)
    plan = Plan(
        sink=batch.sink,
        query_id=batch.query_id,
        run_id=batch.run_id,
        batch_id=batch.batch_id,
        partitions=tuple(
            _continued(kept[each], tails[each]) if each in kept else _opened(each, opened[each], tails[each].last)
            for each in partition_ids
        ),
        limits=batch.limits,
        is_stamped=batch.is_stamped,
    )
    return (yield from _create_plan(batch, plan))


def _create_plan(batch: Batch, mine: Plan) -> Procedure[Plan]:
    """Create a plan. :returns: the one that is there then: of two runs, that of the first."""
    name = plan_name(mine.batch_id, mine.revision)
    if (yield CreateRecord(name, encode_record(mine))):
        return mine
    existing = yield from _read(batch, name, Plan)
    assert existing is not None, "a record that was there is gone"
    return existing


def _prior(batch: Batch) -> Procedure[Done | None]:
    """Find what the batch before left; None where its producers are not to be used again."""
    if batch.batch_id > 0:
        done = yield from _find_done(batch, batch.batch_id - 1)
        if done is not None:
            return done
    names = yield ListRecords()
    assert isinstance(names, Sequence)
    begun = sorted({found for found in map(batch_of, names) if found is not None})
    if begun and begun[-1] > batch.batch_id:
        raise _behind(batch, begun[-1])
    earlier = [each for each in begun if each < batch.batch_id]
    if earlier and (yield from _find_done(batch, earlier[-1])) is None:
        raise ConfigurationError(
            "sink_id",
            f"{batch.sink.sink_id!r} has begun batch {earlier[-1]} and not finished it, and the query is at "
            f"{batch.batch_id}: rows may be missing; take another sink_id to go on without them",
        )
    # Where records are missing in between, numbers may have been used that nobody knows of: new producers are safe.
    return None


def _find_done(batch: Batch, batch_id: int) -> Procedure[Done | None]:
    """Find the end of a batch, behind its take-overs; None where it has none."""
    revision = 0
    while True:
        concluded = yield from _read_conclusion(batch, batch_id, revision)
        if not isinstance(concluded, TakeOver):
            return concluded
        revision += 1


def _opened(partition_id: str, answer: object, tail: int, offset: int = 0) -> PartitionPlan:
    if not isinstance(answer, ProducerAnswer):
        raise InvalidClientStateError(partition_id, "the service refuses an idempotent producer")
    return PartitionPlan(
        partition_id=partition_id,
        producer_id=answer.producer_id,
        owner_level=answer.owner_level,
        next_number=advance(answer.last_number),
        nothing=answer.last_number,
        is_fresh=True,
        tail=tail,
        offset=offset,
    )


def _continued(prior: PartitionDone, tail: PartitionTail) -> PartitionPlan:
    return PartitionPlan(
        partition_id=prior.partition_id,
        producer_id=prior.producer_id,
        owner_level=prior.owner_level,
        next_number=prior.next_number,
        nothing=prior.nothing,
        is_fresh=prior.is_fresh,
        tail=tail.last,
        missing=max(0, prior.tail - tail.last),
    )


def _sorted_outcomes(
    plan: Plan, outcomes: Iterable[PartitionOutcome]
) -> tuple[dict[str, PartitionReceipt], dict[str, StateLost]]:
    receipts: dict[str, PartitionReceipt] = {}
    lost: dict[str, StateLost] = {}
    for outcome in outcomes:
        partition_id = outcome.partition_id
        if partition_id not in plan.partition_ids:
            raise InvalidClientStateError(partition_id, "the batch has no such partition")
        if isinstance(outcome, StateLost):
            lost[partition_id] = outcome
            continue
        entry = plan.partition(partition_id)
        fits = (
            (outcome.producer_id, outcome.owner_level) == (entry.producer_id, entry.owner_level)
            and outcome.offset == entry.offset <= outcome.count
            and outcome.next_number == entry.number_of(outcome.count)
        )
        if not fits or receipts.setdefault(partition_id, outcome) != outcome:
            raise InvalidClientStateError(partition_id, f"the plan does not allow {outcome!r}")
    return receipts, lost


def _done(batch: Batch, plan: Plan, receipts: Mapping[str, PartitionReceipt]) -> Done:
    partitions = []
    for entry in plan.partitions:
        receipt = receipts.get(entry.partition_id)
        if receipt is None and entry.offset:
            raise InvalidClientStateError(
                entry.partition_id, f"{entry.offset} of its rows are stored, and none is left"
            )
        published = 0 if receipt is None else receipt.count - receipt.offset
        partitions.append(
            PartitionDone(
                partition_id=entry.partition_id,
                producer_id=entry.producer_id,
                owner_level=entry.owner_level,
                next_number=advance(entry.next_number, published),
                nothing=entry.nothing,
                is_fresh=entry.is_fresh and not published,
                tail=entry.tail + published,
                count=0 if receipt is None else receipt.count,
                first_number=None if receipt is None else receipt.first_number,
                digest=None if receipt is None else receipt.digest,
            )
        )
    return Done(
        sink=plan.sink,
        query_id=batch.query_id,
        run_id=batch.run_id,
        batch_id=plan.batch_id,
        partitions=tuple(partitions),
        receipts=tuple(receipts[each] for each in plan.partition_ids if each in receipts),
    )


# ---------------------------------------------------------------------------------------------------- take-over


def _take_over(batch: Batch, plan: Plan, lost: Mapping[str, StateLost], policy: OnProducerStateLost) -> TakeOver:
    """Intend to take the lost producers over, if the policy says so."""
    ids = sorted(lost, key=_by_number)
    if policy is OnProducerStateLost.FAIL:
        raise ProducerStateLostError(
            tuple(ids),
            f"of batch {plan.batch_id} it is not known how many rows are stored ({lost[ids[0]].reason.value}); "
            "nothing more was sent. Set on_producer_state_lost to tailScan (with stamps) or atLeastOnce to go on",
        )
    is_counted = policy is OnProducerStateLost.TAIL_SCAN
    if is_counted and not plan.is_stamped:
        raise ConfigurationError(
            "on_producer_state_lost",
            f"tailScan takes events with stamps, and batch {plan.batch_id} was planned without; atLeastOnce, for "
            "this batch, takes none",
        )
    entries = [plan.partition(each) for each in ids]
    if any(entry.owner_level == MAX_OWNER_LEVEL for entry in entries):
        raise ProducerStateLostError(tuple(ids), "and there is no owner level above the one they have")
    return TakeOver(
        sink=plan.sink,
        query_id=batch.query_id,
        run_id=batch.run_id,
        batch_id=plan.batch_id,
        producers=tuple(
            TakenProducer(
                partition_id=each.partition_id, producer_id=each.producer_id, owner_level=each.owner_level + 1
            )
            for each in entries
        ),
        is_counted=is_counted,
    )


def _follow(batch: Batch, plan: Plan, concluded: Done | TakeOver | None) -> Procedure[Plan | Done]:
    """Follow the take-overs of a batch to its newest plan or its end, carrying out one that was only intended.

    :param concluded: what came of the plan.
    """
    while isinstance(concluded, TakeOver):
        revised = yield from _read(batch, plan_name(plan.batch_id, plan.revision + 1), Plan)
        if revised is None:
            revised = yield from _create_plan(batch, (yield from _carry_out(plan, concluded, batch.run_id)))
        plan = revised
        concluded = yield from _read_conclusion(batch, plan.batch_id, plan.revision)
    return plan if concluded is None else concluded


def _carry_out(plan: Plan, intent: TakeOver, run_id: str) -> Procedure[Plan]:
    """Raise the levels, and only then read what is stored: nobody can add to it any more."""
    ids = tuple(each.partition_id for each in intent.producers)
    raised = yield AttachProducers(
        {each.partition_id: AttachRequest(each.producer_id, each.owner_level) for each in intent.producers}
    )
    assert isinstance(raised, Mapping)
    # A producer the service does not know cannot be raised, nor can anybody publish as it.
    unknown = {each: AttachRequest() for each in ids if raised[each] is None}
    answers = dict(raised)
    if unknown:
        opened = yield AttachProducers(unknown)
        assert isinstance(opened, Mapping)
        answers |= opened
    tails = yield ReadTails(ids)
    assert isinstance(tails, Mapping)
    offsets = dict.fromkeys(ids, 0)
    if intent.is_counted:
        ranges = {each: (plan.partition(each).tail, tails[each].last) for each in ids}
        for each, (after, _) in ranges.items():
            if tails[each].beginning > after + 1:
                raise ProducerStateLostError((each,), "and events since the batch was planned have passed retention")
        found = yield ReadStamps(plan, ranges)
        assert isinstance(found, Mapping)
        offsets = {each: count_stored(plan.partition(each), found[each]) for each in ids}
    revised = {each: _opened(each, answers[each], tails[each].last, offsets[each]) for each in ids}
    return plan.model_copy(
        update={
            "run_id": run_id,
            "revision": plan.revision + 1,
            "partitions": tuple(revised.get(each.partition_id, each) for each in plan.partitions),
        }
    )


def count_stored(entry: PartitionPlan, rows: Iterable[int]) -> int:
    """Count the rows that are stored, from those whose stamps were found after the planned tail.

    :raises ProducerStateLostError: there is a hole in them.
    """
    found = set(rows)
    count = entry.offset
    while count in found:
        count += 1
    if max(found, default=-1) > count:
        raise ProducerStateLostError((entry.partition_id,), f"and row {count} is missing before row {max(found)}")
    return count


def _by_number(partition_id: str) -> tuple[int, str]:
    return int(partition_id) if partition_id.isascii() and partition_id.isdigit() else -1, partition_id


# ---------------------------------------------------------------------------------------------------- one attempt


class WorkStep(enum.Enum):
    """What an attempt does next."""

    LOOK = "look"
    """Attach as the plan's producer with a null number; then `looked`, `unknown_producer` or `fenced`."""
    SCAN = "scan"
    """Look for the stamp, or else the content, of row `offset` after the planned tail; then `scanned`."""
    SEND = "send"
    """Publish from row `position` on; then `published`, `troubled` or `fenced`."""
    REST = "rest"
    """Wait for rows, or for their end."""
    END = "end"
    """All are stored: `receipt`."""
    LOST = "lost"
    """The producer's state is lost: `loss`."""
    FAIL = "fail"
    """Raise `error()`."""


class PartitionWork:
    """Leads one attempt to publish one partition's rows. Many may run at once: they share the numbers.

    An attempt never trusts what it sent: it asks the service how far the batch is, goes on from there, and asks again
    whenever an answer is missing or does not fit. A number it is ahead of belongs to a rival with the same rows.

    :param max_tries: how many troubles in a row, without any row getting stored, are borne.

    :ivar rows: how many rows came so far.
    :ivar position: rows before it are stored; None before the first look.
    :ivar found: how many rows the first look found stored.
    """

    __slots__ = (
        "_entry",
        "_failure",
        "_is_ended",
        "_is_suspicious",
        "_must_look",
        "_must_scan",
        "_tries",
        "found",
        "loss",
        "max_tries",
        "position",
        "rows",
    )

    def __init__(self, entry: PartitionPlan, *, max_tries: int = 3) -> None:
        self._entry = entry
        self.max_tries = max_tries
        self.rows = 0
        self.position: int | None = None
        self.found = entry.offset
        self.loss: StateLost | None = None
        self._failure: EventPumpError | None = None
        self._is_ended = False
        self._must_look = True
        self._must_scan = False
        self._is_suspicious = False
        self._tries = 0

    @property
    def step(self) -> WorkStep:
        """What to do next."""
        if self._failure is not None:
            return WorkStep.FAIL
        if self.loss is not None:
            return WorkStep.LOST
        if self._must_look:
            return WorkStep.LOOK
        position = self._entry.offset if self._must_scan else self.position
        assert position is not None
        if position < self.rows:
            return WorkStep.SCAN if self._must_scan else WorkStep.SEND
        return WorkStep.END if self._is_ended else WorkStep.REST

    def error(self) -> EventPumpError:
        """Give the error the attempt failed with."""
        assert self._failure is not None
        return self._failure

    def receipt(self, digest: str) -> PartitionReceipt:
        """Make the receipt, where the step is to end."""
        assert self.step is WorkStep.END
        entry = self._entry
        return PartitionReceipt(
            partition_id=entry.partition_id,
            producer_id=entry.producer_id,
            owner_level=entry.owner_level,
            count=self.rows,
            offset=entry.offset,
            first_number=entry.next_number if self.rows > entry.offset else None,
            next_number=entry.number_of(self.rows),
            digest=digest,
            found=self.found,
        )

    # ------------------------------------------------------------------------------------------ rows

    def received(self, count: int) -> None:
        """Note that rows came."""
        assert not self._is_ended
        self.rows += count

    def ended(self) -> None:
        """Note that there are no more rows."""
        self._is_ended = True
        self._check_end()

    # ------------------------------------------------------------------------------------------ the service

    def looked(self, last_number: int) -> None:
        """Note what the service answered as the last number published."""
        entry = self._entry
        ahead = distance(entry.last_number, last_number)
        self._must_look = self._must_scan = False
        if last_number == entry.nothing and not (entry.is_fresh and not ahead):
            # Also where rows go across the wrap, and it might be the number of one: nothing else tells the two apart.
            self._lose(LossReason.BELOW)
        elif ahead >= NUMBERS // 2:
            self._lose(LossReason.BELOW)
        elif self.position is not None and entry.offset + ahead < self.position:
            self._lose(LossReason.REGRESSED)
        elif ahead or not entry.is_fresh:
            self._arrived_at(entry.offset + ahead)
        elif self._is_suspicious:
            self._lose(LossReason.UNCOUNTED)
        else:
            # A service that forgot what it had stored would say the same.
            self._must_scan = True

    def scanned(self, *, is_stored: bool) -> None:
        """Note whether row `offset` is in the hub. If so, a rival may have stored it since the look: look again."""
        assert self.step is WorkStep.SCAN
        self._must_scan = False
        if is_stored:
            self._is_suspicious = self._must_look = True
        else:
            self._arrived_at(self._entry.offset)

    def published(self, first_number: int, count: int) -> None:
        """Note that rows from `position` on were accepted. :param first_number: of the first of them."""
        assert self.position is not None
        assert first_number == self._entry.number_of(self.position), "rows were sent under numbers of others"
        self._arrived_at(self.position + count)

    def unknown_producer(self) -> None:
        """Note that the service does not know the producer."""
        self._lose(LossReason.UNKNOWN)

    def fenced(self, error: ProducerDisconnectedError) -> None:
        """Note that the producer was taken over: final."""
        self._failure = error

    def troubled(self, error: EventPumpError) -> bool:
        """Note that a step failed, and what was sent is in doubt or was refused: look again, or give up.

        :returns: whether the attempt goes on.
        """
        self._must_look, self._must_scan = True, False
        self._tries += 1
        if self._tries > self.max_tries:
            self._failure = error
        return self._failure is None

    # ------------------------------------------------------------------------------------------ inside

    def _arrived_at(self, position: int) -> None:
        if self.position is None:
            self.found = position
        if self.position is None or position > self.position:
            self._tries = 0
        self.position = position
        self._check_end()

    def _check_end(self) -> None:
        stored = self._entry.offset if self.position is None else self.position
        if self._is_ended and stored > self.rows and self._failure is None and self.loss is None:
            self._failure = InvalidClientStateError(
                self._entry.partition_id,
                f"{stored} rows of the batch are stored, and now it has {self.rows}: the query is not "
                "deterministic, and the batch's rows cannot be told from an earlier attempt's",
            )

    def _lose(self, reason: LossReason) -> None:
        stored = self._entry.offset if self.position is None else self.position
        self.loss = StateLost(partition_id=self._entry.partition_id, reason=reason, stored=stored)
