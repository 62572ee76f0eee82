"""The driver's protocol of the exactly-once sink: begin, plan, finish and take over a batch, as generators of requests.

The rows of a batch are written before its plan, which names them, and deleted after the record that it is done. So a
batch is published from what its plan names, whatever the query returns when Spark repeats it.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

from eventpump.core.sequencer import AttachRequest, ProducerAnswer
from eventpump.errors import (
    ConfigurationError,
    InvalidClientStateError,
    ProducerStateLostError,
    StoreError,
)
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, NUMBERS, advance, distance
from eventpump.eventhubs.partitions import partition_order
from eventpump.spark.sink.records import (
    LIMITS,
    BatchRecord,
    Done,
    KeptRows,
    PackingLimits,
    PartitionDone,
    PartitionOutcome,
    PartitionPlan,
    PartitionReceipt,
    Plan,
    R,
    RunClaim,
    Sink,
    StateLost,
    TakenProducer,
    TakeOver,
    batch_of,
    claim_name,
    claim_of,
    decode_record,
    done_name,
    encode_record,
    plan_name,
)

KEPT_BATCHES: Final = 100
"""How many finished batches the ledger keeps; Spark's own checkpoint keeps as many by default."""
PRUNED_EVERY: Final = 16
"""After how many batches older records are deleted."""
KEPT_CLAIMS: Final = 100
"""How many claims of runs the ledger keeps: a run that is suspended while more than these begin does not see theirs."""
RENEW_AT: Final = NUMBERS - 2**28
"""The next number from which a partition gets a new producer for its next batch, so that no batch meets the wrap."""

T = TypeVar("T")

_OVERTAKEN: Final = "a later run of this query has begun, so this one ends; run one driver at a time with a checkpoint"


class OnProducerStateLost(enum.StrEnum):
    """What happens if the service has forgotten which rows of a batch it has stored."""

    FAIL = "fail"
    """The query fails, and nothing is sent."""
    SCAN = "scan"
    """The producer is taken over, and the hub's tail is read for the stamps of what is stored. Exact; requires
    stamps."""


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read a record. Answer: its bytes, or None."""

    name: str


@dataclass(frozen=True, slots=True)
class CreateRecord:
    """Create a record, durably. Answer: whether the stored record has this body; False if there is another."""

    name: str
    body: bytes


@dataclass(frozen=True, slots=True)
class ListRecords:
    """List the names of all records. Answer: a sequence of names."""


@dataclass(frozen=True, slots=True)
class DeleteRecords:
    """Delete records that are no longer needed. Answer: None, also if that fails."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListRows:
    """List the objects with rows. Answer: a mapping from name to size in bytes."""


@dataclass(frozen=True, slots=True)
class ListObsoleteRows:
    """List the objects with rows of all batches before one, and what earlier runs have left. Answer: a sequence of
    their names, empty if that fails."""

    before: int


@dataclass(frozen=True, slots=True)
class DeleteRows:
    """Delete objects with rows. Answer: None, also if that fails."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadPartitions:
    """Read which partitions the hub has. Answer: a sequence of partition ids."""


@dataclass(frozen=True, slots=True)
class ReadTails:
    """Read where partitions currently begin and end. Answer: a mapping from partition id to `PartitionTail`."""

    partition_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AttachProducers:
    """Attach once as each of these producers, with a null number.

    Answer: a mapping to the service's answer (`ProducerAnswer`), or to None if it does not know the producer.
    """

    producers: Mapping[str, AttachRequest]


@dataclass(frozen=True, slots=True)
class FindRows:
    """Read the events of partitions from after a sequence number up to another, for the stamps of a batch's rows.

    Answer: a mapping from partition id to the row indices found, in the order of the events.

    Args:
        ranges: The two numbers per partition: the first exclusive, the second inclusive.
    """

    plan: Plan
    ranges: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Together:
    """Make requests at the same time, which take effect in any order. Answer: theirs, in the order of the requests."""

    requests: tuple[Request, ...]


Request: TypeAlias = (
    ReadRecord
    | CreateRecord
    | ListRecords
    | DeleteRecords
    | ListRows
    | ListObsoleteRows
    | DeleteRows
    | ReadPartitions
    | ReadTails
    | AttachProducers
    | FindRows
    | Together
)
Answer: TypeAlias = "object"
Procedure: TypeAlias = Generator[Request, Answer, T]
"""Yields requests, is sent their answers, and returns a result; errors of requests are not passed to it."""


@dataclass(frozen=True, slots=True)
class PartitionTail:
    """The first and last sequence number of a partition; for an empty one, the last there ever was, or -1."""

    beginning: int
    last: int


class DriverRun:
    """One run of a driver, over all its batches. Not to be pickled: a process that continues elsewhere is another run.

    Attributes:
        claim: The number of its claim in the ledger; None before its first batch.
        concluded: The newest batch that it has concluded; None before the first.
    """

    __slots__ = ("claim", "concluded", "run_id")

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.claim: int | None = None
        self.concluded: int | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch and its query.

    Args:
        query_id: Spark's id of the query, which stays the same across restarts; None if Spark does not provide it.
        limits: For a new plan; an existing one keeps its own.
        renew_at: See `RENEW_AT`.
        first_batch: A batch that may be the first in an empty ledger, as batch 0 may.
        may_repeat: Whether an earlier run may have begun the batch. Spark repeats only the first batch of a run.
    """

    sink: Sink
    query_id: str | None
    run: DriverRun
    batch_id: int
    limits: PackingLimits = LIMITS
    is_stamped: bool = False
    renew_at: int = RENEW_AT
    first_batch: int = 0
    may_repeat: bool = True

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.run.run_id


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The rows of a batch, as they were written before its plan.

    Args:
        kept: What the plan names; None for a batch without rows.
        objects: The sizes of all objects with rows of the batch, by name: those of tasks too.
        counts: How many events each partition has; those without may be left out.
        bad_rows: How many rows could not be events.
    """

    kept: KeptRows | None
    objects: Mapping[str, int]
    counts: Mapping[str, int]
    bad_rows: int = 0


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A batch that has no plan yet. Nothing of it was created.

    Args:
        prior: The newest record that a batch is done; None for a new sink.
        opened: The service's answers for partitions that need a new producer.
    """

    batch: MicroBatch
    partition_ids: tuple[str, ...]
    prior: Done | None
    opened: Mapping[str, ProducerAnswer]


def prepare(batch: MicroBatch) -> Procedure[Plan | Done | Unplanned]:
    """Begin a batch: return the record that it is done, or else its plan, if it has one.

    A take-over that was started and not completed is completed first.

    Raises:
        ConfigurationError: The sink belongs to another query or hub, or its ledger does not match the query.
        StoreError: A record cannot be read; or a later run of the query has begun.
        InvalidClientStateError: The hub does not offer idempotent publishing.
        ProducerStateLostError: The stored rows cannot be counted.
    """
    ahead: list[ReadRecord | ReadPartitions] = [
        ReadRecord(done_name(batch.batch_id)),
        ReadRecord(plan_name(batch.batch_id)),
    ]
    if batch.batch_id > 0:
        ahead.append(ReadRecord(done_name(batch.batch_id - 1)))
    if batch.run.claim is not None:
        ahead += [_look_for_later(batch.run), ReadPartitions()]
    return (yield from _read_ahead(_prepare(batch), ahead))


def _read_ahead(procedure: Procedure[T], ahead: Sequence[ReadRecord | ReadPartitions]) -> Procedure[T]:
    """Carry out a procedure that is given the answers to its first requests of these, made all at the same time."""
    answers = yield Together(tuple(ahead))
    assert isinstance(answers, Sequence)
    known = dict(zip(ahead, answers, strict=True))
    answer: Answer = None
    while True:
        try:
            request = procedure.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if isinstance(request, ReadRecord | ReadPartitions) and request in known:
            answer = known.pop(request)
        else:
            answer = yield request


def _prepare(batch: MicroBatch) -> Procedure[Plan | Done | Unplanned]:
    name = plan_name(batch.batch_id)
    concluded = yield from _read_conclusion(batch, batch.batch_id)
    if isinstance(concluded, Done):
        # Spark repeats only its newest batch: a query at an earlier one does not match the ledger.
        if (yield ReadRecord(plan_name(batch.batch_id + 1))) is not None:
            raise _behind(batch, batch.batch_id + 1)
        return concluded  # without a claim: where Spark does not provide the query's id, it may be another query's
    plan = yield from _read(batch, name, Plan)
    if plan is None and concluded is not None:
        plan = yield from _read(batch, name, Plan)  # it may have been read before both were created
        if plan is None:
            raise StoreError(f"read {name}", "the plan record is missing although its completion record exists")
    if plan is None:
        return (yield from _prepare_plan(batch))
    yield from _claim(batch)
    if plan.run_id != batch.run_id:
        _require_following(batch, plan, (yield from _newest_done(batch)))
    return (yield from _follow(batch, plan, concluded))


def _require_following(batch: MicroBatch, plan: Plan, prior: Done | None) -> None:
    """Check that a plan continues where the newest batch before it has ended.

    It does not if its run was overtaken by one that has published another batch meanwhile, because its batches had no
    rows in the one run and had some in the other; and then was killed before it saw that.

    Raises:
        ConfigurationError: It does not: its numbers are those of other rows.
    """
    ends = {} if prior is None else {(each.producer_id, each.owner_level): each for each in prior.partitions}
    for each in plan.partitions:
        end = ends.get((each.producer_id, each.owner_level))
        if end is not None and end.next_number != each.next_number:
            assert prior is not None
            raise ConfigurationError(
                "sink_id",
                f"{batch.sink.name!r} has a plan for batch {batch.batch_id} that another driver made before batch "
                f"{prior.batch_id} was published, which had no rows there: its numbers are in use. "
                f"It is not published. A new sink_id with first_batch={batch.batch_id} publishes this batch",
            )


def _claim(batch: MicroBatch) -> Procedure[None]:
    """Claim the sink for this run, once, which ends earlier ones; later, check that no other run has.

    Rows that an earlier run has left are deleted: not those of this batch, whose plan it may be about to create.

    Called when the records have shown that the sink is this query's: another query must not end the one it belongs to.
    Where Spark does not name the query, they cannot show that of a batch that was begun.

    Raises:
        StoreError: A later run has begun.
    """
    run = batch.run
    if run.claim is not None:
        yield from _require_latest(batch)
        return
    claims = yield from _claims()
    number = claims[-1] + 1 if claims else 1
    claim = encode_record(
        RunClaim(sink=batch.sink, query_id=batch.query_id, run_id=run.run_id, batch_id=batch.batch_id)
    )
    while not (yield CreateRecord(claim_name(number), claim)):
        number += 1
    run.claim = number
    yield from _delete_rows((yield ListObsoleteRows(batch.batch_id)))
    obsolete_claims = tuple(claim_name(each) for each in claims if each <= number - KEPT_CLAIMS)
    if obsolete_claims:
        yield DeleteRecords(obsolete_claims)


def _require_latest(batch: MicroBatch) -> Procedure[None]:
    """Check that no other run has claimed the sink since this one: else a `StoreError`."""
    if batch.run.claim is not None and (yield _look_for_later(batch.run)) is not None:
        raise _overtaken(batch)


def _look_for_later(run: DriverRun) -> ReadRecord:
    """Return the request for the claim of a later run."""
    assert run.claim is not None
    return ReadRecord(claim_name(run.claim + 1))


def _overtaken(batch: MicroBatch) -> StoreError:
    return StoreError(f"continue batch {batch.batch_id} of the sink {batch.sink.name!r}", _OVERTAKEN)


def find_plan(batch: MicroBatch) -> Procedure[Plan | None]:
    """Return the first plan of a batch; None if the ledger has none. Raises as `prepare`."""
    return (yield from _read(batch, plan_name(batch.batch_id), Plan))


def overtaken(batch: MicroBatch) -> Procedure[None]:
    """Check, where publishing has failed, whether another run goes on, which deletes rows of what is done: a
    `StoreError`."""
    yield from _require_latest(batch)
    if isinstance((yield from _find_done(batch, batch.batch_id)), Done):
        raise StoreError(f"publish batch {batch.batch_id} of the sink {batch.sink.name!r}", _OVERTAKEN)


def finish(
    batch: MicroBatch, plan: Plan, outcomes: Iterable[PartitionOutcome], policy: OnProducerStateLost
) -> Procedure[Plan | Done]:
    """Step 5 of a batch: return the record that it is done, or, if producers were lost, the plan to continue with.

    Args:
        outcomes: The tasks' reports; there is none for partitions without rows.

    Raises:
        ProducerStateLostError: A producer was lost, and the policy is to fail.
        ConfigurationError: The policy requires stamps, and the batch has none.
        InvalidClientStateError: The reports do not match the plan.
        StoreError: Another run has finished the batch.
    """
    step = yield from _finish(batch, plan, outcomes, policy)
    if isinstance(step, Done):
        batch.run.concluded = step.batch_id
    return step


def _finish(
    batch: MicroBatch, plan: Plan, outcomes: Iterable[PartitionOutcome], policy: OnProducerStateLost
) -> Procedure[Plan | Done]:
    receipts, lost = _sorted_outcomes(plan, outcomes)
    mine = _take_over(batch, plan, lost, policy) if lost else _done(batch, plan, receipts)
    name = done_name(plan.batch_id, plan.revision)
    # Rows that could not be events are handed out until the next batch is done.
    listing = ListObsoleteRows(plan.batch_id + (not plan.bad_rows))
    # What a run that was overtaken records is true, and the later run goes on from it. It deletes nothing.
    requests = (CreateRecord(name, encode_record(mine)), _look_for_later(batch.run), listing)
    answers = yield Together(requests)
    assert isinstance(answers, Sequence)
    is_created, later, rows = answers
    if later is not None:
        raise _overtaken(batch)
    concluded = mine if is_created else (yield from _read_conclusion(batch, plan.batch_id, plan.revision))
    if isinstance(concluded, TakeOver):
        return (yield from _follow(batch, plan, concluded))
    if concluded is None or isinstance(mine, TakeOver) or concluded.partitions != mine.partitions:
        raise StoreError(f"write {name}", "another run of this query has finished the batch, with other rows")
    if plan.batch_id % PRUNED_EVERY == 0:
        names = yield ListRecords()
        assert isinstance(names, Sequence)
        yield DeleteRecords(obsolete(names, plan.batch_id))
    yield from _delete_rows(rows)
    return concluded


def _delete_rows(names: Answer) -> Procedure[None]:
    assert isinstance(names, Sequence)
    if names:
        yield DeleteRows(tuple(names))


def obsolete(names: Iterable[str], batch_id: int) -> tuple[str, ...]:
    """Return the records that are no longer needed once a batch is done."""
    return tuple(name for name in names if (found := batch_of(name)) is not None and found <= batch_id - KEPT_BATCHES)


def _read(batch: MicroBatch, name: str, *kinds: type[R]) -> Procedure[R | None]:
    raw = yield ReadRecord(name)
    if raw is None:
        return None
    assert isinstance(raw, bytes)
    try:
        record = decode_record(raw, *kinds)
    except ValueError as error:
        raise StoreError(f"read {name}", str(error)) from None
    assert isinstance(record, BatchRecord)
    _check(batch, record, name)
    return record


def _read_conclusion(batch: MicroBatch, batch_id: int, revision: int = 0) -> Procedure[Done | TakeOver | None]:
    found = yield from _read(batch, done_name(batch_id, revision), Done, TakeOver)
    assert found is None or isinstance(found, Done | TakeOver)
    return found


def _check(batch: MicroBatch, record: BatchRecord, name: str) -> None:
    """Check that a record belongs to this sink, hub and query, and has the right name."""
    if record.sink.name != batch.sink.name or batch_of(name) != record.batch_id:
        raise StoreError(f"read {name}", f"it belongs to batch {record.batch_id} of the sink {record.sink.name!r}")
    theirs, ours = (f"{sink.namespace}/{sink.hub}".lower() for sink in (record.sink, batch.sink))
    if theirs != ours:
        raise ConfigurationError("sink_id", f"{batch.sink.name!r} publishes to {theirs}, not to {ours}")
    if None not in (record.query_id, batch.query_id) and record.query_id != batch.query_id:
        raise ConfigurationError(
            "sink_id",
            f"{batch.sink.name!r} belongs to the query {record.query_id}, but this is query {batch.query_id}; use "
            "another sink_id for a query with a new checkpoint, which publishes its batches again",
        )


def _behind(batch: MicroBatch, newest: int) -> ConfigurationError:
    return ConfigurationError(
        "sink_id",
        f"{batch.sink.name!r} is at batch {newest}, but the query at {batch.batch_id}: it is another query, or its "
        "checkpoint is older than the ledger; use another sink_id to publish these batches",
    )


def _prepare_plan(batch: MicroBatch) -> Procedure[Unplanned]:
    prior = yield from _newest_done(batch)
    began = yield from _require_begun(batch, prior)
    ids = yield ReadPartitions()
    assert isinstance(ids, Sequence)
    known = {} if prior is None else {each.partition_id: each for each in prior.partitions}
    gone = [each for each in known if each not in ids]
    if gone:
        raise ConfigurationError("hub", f"partition {gone[0]} no longer exists; the hub was deleted and recreated")
    partition_ids = tuple(sorted(ids, key=partition_order))
    if prior is None:
        if began != batch.batch_id:  # called by an earlier run, it has not come to a plan
            yield from _require_new(batch, partition_ids)
    elif prior.batch_id != batch.run.concluded:
        yield from _require_newest(batch, prior)
    new = {each: AttachRequest() for each in partition_ids if not _may_continue(batch, known.get(each))}
    opened = (yield AttachProducers(new)) if new else {}
    assert isinstance(opened, Mapping)
    for each in new:
        if not isinstance(opened[each], ProducerAnswer):
            raise InvalidClientStateError(each, "the service does not accept an idempotent producer for this hub")
    is_claimed = batch.run.claim is not None
    yield from _claim(batch)
    if not is_claimed:
        # The run before may have planned a batch that had no rows in this one, before it was overtaken.
        names = yield ListRecords()
        assert isinstance(names, Sequence)
        later = [found for found in map(batch_of, names) if found is not None and found > batch.batch_id]
        if later and plan_name(batch.batch_id) not in names:
            raise _behind(batch, max(later))
        if (yield from _newest_done(batch)) != prior:
            return (yield from _prepare_plan(batch))
    return Unplanned(batch, partition_ids, prior, opened)


def _require_begun(batch: MicroBatch, prior: Done | None) -> Procedure[int | None]:
    """Check that the first batch of the run before is done, if that was an earlier one; called at the first of a run.

    Returns:
        The first batch of the run before; None if there is no claim of one.

    Raises:
        ConfigurationError: It is not: its records are lost.
    """
    if batch.run.claim is not None:
        return None
    claims = yield from _claims()
    name = claim_name(claims[-1]) if claims else ""
    raw = (yield ReadRecord(name)) if claims else None
    if raw is None:
        return None
    assert isinstance(raw, bytes)
    try:
        claim = decode_record(raw, RunClaim)
    except ValueError as error:
        raise StoreError(f"read {name}", str(error)) from None
    if None not in (claim.query_id, batch.query_id) and claim.query_id != batch.query_id:
        return None  # of a query that has published nothing, as there is no record of it
    if claim.batch_id < batch.batch_id and (prior is None or prior.batch_id < claim.batch_id):
        raise ConfigurationError(
            "ledger",
            f"has no record of batch {claim.batch_id} of the sink {batch.sink.name!r}, which an earlier run was called "
            f"for, but the query is at {batch.batch_id}: the ledger is an older copy, or has lost records, or the call "
            "has failed and its error was not raised. Restore the newest ledger; a new sink_id with "
            f"first_batch={batch.batch_id} continues without it",
        )
    return claim.batch_id


def _claims() -> Procedure[list[int]]:
    """Return the numbers of the claims, sorted."""
    names = yield ListRecords()
    assert isinstance(names, Sequence)
    return sorted(found for found in map(claim_of, names) if found is not None)


def _require_new(batch: MicroBatch, partition_ids: tuple[str, ...]) -> Procedure[None]:
    """Check that nothing of a batch can be stored, where the ledger has no record of the sink.

    A sink may be called for a later batch than 0 first: it was added to a running query, or the batches before had no
    rows for it.

    Raises:
        ConfigurationError: Something may be stored.
    """
    if batch.batch_id in (0, batch.first_batch) or not batch.may_repeat:
        return
    tails = yield ReadTails(partition_ids)
    assert isinstance(tails, Mapping)
    if all(each.last < 0 for each in tails.values()) or (yield ReadRecord(plan_name(batch.batch_id))) is not None:
        return  # nothing is stored, or what is stored is of a plan that another run has made meanwhile
    raise ConfigurationError(
        "ledger",
        f"holds nothing of the sink {batch.sink.name!r}, and the query may be repeating batch {batch.batch_id}: if "
        "the sink was called before, the ledger was deleted, or this driver does not see the one that was used, and "
        "rows that are stored would be published again. If this is the first batch that the sink is called for, set "
        f"first_batch={batch.batch_id}",
    )


def _require_newest(batch: MicroBatch, prior: Done) -> Procedure[None]:
    """Check that the ledger ends where the service does: nothing was published since its newest record.

    Otherwise its numbers are used already: by batches whose records are lost, or by this one.

    Raises:
        ConfigurationError: The service is ahead.
    """
    answers = yield AttachProducers(
        {each.partition_id: AttachRequest(each.producer_id, each.owner_level) for each in prior.partitions}
    )
    assert isinstance(answers, Mapping)
    for each in prior.partitions:
        answer = answers[each.partition_id]
        last = (each.next_number - 1) % NUMBERS
        # A producer that is forgotten, or seems to be, is found by the attempts.
        if answer is None or (answer.last_number == each.nothing and not each.is_fresh):
            continue
        if not 0 < distance(last, answer.last_number) < NUMBERS // 2:
            continue
        if (yield ReadRecord(plan_name(batch.batch_id))) is not None:
            return  # another run has begun the batch meanwhile: its plan is the one that counts
        raise ConfigurationError(
            "ledger",
            f"is behind the hub: the newest batch of the sink {batch.sink.name!r} in it is {prior.batch_id}, up to "
            f"number {last} in partition {each.partition_id}, but the service has stored up to number "
            f"{answer.last_number}. The ledger is an older copy, or has lost records, and rows that are stored would "
            "be published again: restore the newest ledger. Without it, a new sink_id with "
            f"first_batch={batch.batch_id} publishes this batch, whatever is stored of it",
        )


def _may_continue(batch: MicroBatch, prior: PartitionDone | None) -> bool:
    """Return whether a partition's producer is used for another batch."""
    return prior is not None and (prior.is_fresh or prior.next_number < batch.renew_at)


def make_plan(unplanned: Unplanned, rows: WrittenRows) -> Procedure[Plan]:
    """Create the plan of a batch that has none, and return it, or the one that another run has created meanwhile.

    A partition's end is read from the service only if the partition has rows, and in doubt: for a producer that has
    published nothing, whose first row may be searched for after it; for stamps, likewise; and at the first batch of a
    run, to detect that events are missing. Otherwise the plan has a lower bound.

    Raises:
        ConfigurationError: The driver does not see rows that tasks have written.
        Exception: As `prepare`.
    """
    batch, prior, opened = unplanned.batch, unplanned.prior, unplanned.opened
    if rows.objects:
        listed = yield ListRows()
        assert isinstance(listed, Mapping)
        unseen = sorted(name for name, size in rows.objects.items() if listed.get(name) != size)
        if unseen:
            yield from overtaken(batch)  # by a run that has finished the batch meanwhile, and deleted them
            raise ConfigurationError(
                "rows",
                f"the driver does not see {len(unseen)} of {len(rows.objects)} objects with rows of batch "
                f"{batch.batch_id} that were written, such as {unseen[0]}: rows must name storage that the driver and "
                "all executors share, not a directory of one machine",
            )
    known = () if prior is None else prior.partitions
    kept = {each.partition_id: each for each in known if each.partition_id not in opened}
    is_in_doubt = batch.is_stamped or prior is None or prior.run_id != batch.run_id
    asked = tuple(
        each
        for each in unplanned.partition_ids
        if rows.counts.get(each) and (is_in_doubt or each in opened or kept[each].is_fresh)
    )
    tails = (yield ReadTails(asked)) if asked else {}
    assert isinstance(tails, Mapping)
    plan = Plan(
        sink=batch.sink,
        query_id=batch.query_id,
        run_id=batch.run_id,
        batch_id=batch.batch_id,
        partitions=tuple(
            _continued(kept[each], tails.get(each), rows.counts.get(each, 0))
            if each in kept
            else _opened(each, opened[each], tails[each].last if each in tails else -1, rows.counts.get(each, 0))
            for each in unplanned.partition_ids
        ),
        limits=batch.limits,
        is_stamped=batch.is_stamped,
        rows=rows.kept,
        bad_rows=rows.bad_rows,
    )
    created = yield from _create_plan(batch, plan)
    # A later run, for which this batch had no rows, may have looked before the plan was there, and planned another one.
    yield from _require_latest(batch)
    if created.run_id != batch.run_id:
        _require_following(batch, created, prior)
    return created


def _create_plan(batch: MicroBatch, mine: Plan) -> Procedure[Plan]:
    """Create a plan; return the stored one: if two runs create one, that of the first."""
    name = plan_name(mine.batch_id, mine.revision)
    if (yield CreateRecord(name, encode_record(mine))):
        return mine
    existing = yield from _read(batch, name, Plan)
    assert existing is not None, "a record that was there is gone"
    return existing


def _newest_done(batch: MicroBatch) -> Procedure[Done | None]:
    """Return the record of the newest batch before this one: not the one before, if the sink is not called for every
    batch. None if the ledger has no record of the sink."""
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
    if not earlier:
        return None
    done = yield from _find_done(batch, earlier[-1])
    if done is None:
        raise ConfigurationError(
            "sink_id",
            f"{batch.sink.name!r} has started batch {earlier[-1]} and not finished it, but the query is at "
            f"{batch.batch_id}: rows may be missing; use another sink_id to continue without them",
        )
    return done


def _find_done(batch: MicroBatch, batch_id: int) -> Procedure[Done | None]:
    """Return the final record of a batch, after its take-overs; None if it has none."""
    revision = 0
    while True:
        concluded = yield from _read_conclusion(batch, batch_id, revision)
        if not isinstance(concluded, TakeOver):
            return concluded
        revision += 1


def _opened(partition_id: str, answer: object, tail: int, count: int, offset: int = 0) -> PartitionPlan:
    if not isinstance(answer, ProducerAnswer):
        raise InvalidClientStateError(partition_id, "the service does not accept an idempotent producer for this hub")
    return PartitionPlan(
        partition_id=partition_id,
        producer_id=answer.producer_id,
        owner_level=answer.owner_level,
        next_number=advance(answer.last_number),
        nothing=answer.last_number,
        is_fresh=True,
        tail=tail,
        count=count,
        offset=offset,
    )


def _continued(prior: PartitionDone, tail: PartitionTail | None, count: int) -> PartitionPlan:
    """Continue a producer; the partition's end is None if it was not asked for."""
    return PartitionPlan(
        partition_id=prior.partition_id,
        producer_id=prior.producer_id,
        owner_level=prior.owner_level,
        next_number=prior.next_number,
        nothing=prior.nothing,
        is_fresh=prior.is_fresh,
        tail=prior.tail if tail is None else tail.last,
        count=count,
        missing=0 if tail is None else max(0, prior.tail - tail.last),
    )


def _sorted_outcomes(
    plan: Plan, outcomes: Iterable[PartitionOutcome]
) -> tuple[dict[str, PartitionReceipt], dict[str, StateLost]]:
    receipts: dict[str, PartitionReceipt] = {}
    lost: dict[str, StateLost] = {}
    for outcome in outcomes:
        partition_id = outcome.partition_id
        if partition_id not in plan.partition_ids:
            raise InvalidClientStateError(partition_id, "the partition is not in the batch's plan")
        if isinstance(outcome, StateLost):
            lost[partition_id] = outcome
            continue
        entry = plan.partition(partition_id)
        fits = (
            (outcome.producer_id, outcome.owner_level) == (entry.producer_id, entry.owner_level)
            and (outcome.offset, outcome.count) == (entry.offset, entry.count)
            and outcome.next_number == entry.number_of(outcome.count)
        )
        if not fits or receipts.setdefault(partition_id, outcome) != outcome:
            raise InvalidClientStateError(partition_id, f"the report does not match the plan: {outcome!r}")
    return receipts, lost


def _done(batch: MicroBatch, plan: Plan, receipts: Mapping[str, PartitionReceipt]) -> Done:
    partitions = []
    for entry in plan.partitions:
        receipt = receipts.get(entry.partition_id)
        if receipt is None and entry.count:
            raise InvalidClientStateError(entry.partition_id, f"nobody reports that its {entry.count} rows are stored")
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
                count=entry.count,
                first_number=None if receipt is None else receipt.first_number,
            )
        )
    return Done(
        sink=plan.sink,
        query_id=batch.query_id,
        run_id=batch.run_id,
        batch_id=plan.batch_id,
        partitions=tuple(partitions),
        receipts=tuple(receipts[each] for each in plan.partition_ids if each in receipts),
        bad_rows=plan.bad_rows,
    )


def _take_over(batch: MicroBatch, plan: Plan, lost: Mapping[str, StateLost], policy: OnProducerStateLost) -> TakeOver:
    """Return the intent to take over the lost producers, if the policy allows it."""
    ids = sorted(lost, key=partition_order)
    if policy is OnProducerStateLost.FAIL:
        raise ProducerStateLostError(
            tuple(ids),
            f"it is unknown how many rows of batch {plan.batch_id} are stored ({lost[ids[0]].reason.value}); nothing "
            "more was sent. Set on_producer_state_lost to scan (with stamps) to continue",
        )
    if not plan.is_stamped:
        raise ConfigurationError(
            "on_producer_state_lost",
            f"scan requires events with stamps, but batch {plan.batch_id} was planned without",
        )
    entries = [plan.partition(each) for each in ids]
    if any(entry.owner_level == MAX_OWNER_LEVEL for entry in entries):
        raise ProducerStateLostError(tuple(ids), "a producer already has the highest owner level")
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
    )


def _follow(batch: MicroBatch, plan: Plan, concluded: Done | TakeOver | None) -> Procedure[Plan | Done]:
    """Follow the take-overs of a batch to its newest plan or its end, and carry out one that was only intended."""
    while isinstance(concluded, TakeOver):
        revised = yield from _read(batch, plan_name(plan.batch_id, plan.revision + 1), Plan)
        if revised is None:
            revised = yield from _create_plan(batch, (yield from _carry_out(plan, concluded, batch.run_id)))
        plan = revised
        concluded = yield from _read_conclusion(batch, plan.batch_id, plan.revision)
    return plan if concluded is None else concluded


def _carry_out(plan: Plan, intent: TakeOver, run_id: str) -> Procedure[Plan]:
    """Raise the levels, and only then read what is stored: from then on no other run can add to it."""
    ids = tuple(each.partition_id for each in intent.producers)
    raised = yield AttachProducers(
        {each.partition_id: AttachRequest(each.producer_id, each.owner_level) for each in intent.producers}
    )
    assert isinstance(raised, Mapping)
    # A producer that the service does not know cannot be raised, but no run can publish as it either.
    unknown = {each: AttachRequest() for each in ids if raised[each] is None}
    answers = dict(raised)
    if unknown:
        opened = yield AttachProducers(unknown)
        assert isinstance(opened, Mapping)
        answers |= opened
    tails = yield ReadTails(ids)
    assert isinstance(tails, Mapping)
    ranges = {each: (plan.partition(each).tail, tails[each].last) for each in ids}
    for each, (after, _) in ranges.items():
        if tails[each].beginning > after + 1:
            raise ProducerStateLostError((each,), "retention has removed events since the batch was planned")
    found = yield FindRows(plan, ranges)
    assert isinstance(found, Mapping)
    entries = {each: plan.partition(each) for each in ids}
    offsets = {each: count_stored(entries[each], found[each]) for each in ids}
    revised = {each: _opened(each, answers[each], tails[each].last, entries[each].count, offsets[each]) for each in ids}
    return plan.model_copy(
        update={
            "run_id": run_id,
            "revision": plan.revision + 1,
            "partitions": tuple(revised.get(each.partition_id, each) for each in plan.partitions),
        }
    )


def count_stored(entry: PartitionPlan, rows: Iterable[int]) -> int:
    """Count the stored rows, by stamps found after the planned tail.
    Raises `ProducerStateLostError` if one is missing."""
    found = set(rows)
    count = entry.offset
    while count in found:
        count += 1
    if max(found, default=-1) > count:
        raise ProducerStateLostError((entry.partition_id,), f"row {count} is missing before row {max(found)}")
    return count
