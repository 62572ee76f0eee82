"""What a driver decides about a batch: each decision by itself, and worlds where anything happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

from eventpump.core.sequencer import AttachRequest, ProducerAnswer
from eventpump.errors import (
    ConfigurationError,
    EventPumpError,
    InvalidClientStateError,
    ProducerStateLostError,
    StoreError,
)
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, NUMBERS
from eventpump.spark.sink.protocol import (
    KEPT_BATCHES,
    KEPT_CLAIMS,
    PRUNED_EVERY,
    RENEW_AT,
    AttachProducers,
    CreateRecord,
    DeleteRecords,
    DeleteRows,
    DriverRun,
    FindRows,
    ListObsoleteRows,
    ListRecords,
    ListRows,
    MicroBatch,
    OnProducerStateLost,
    PartitionTail,
    Procedure,
    ReadPartitions,
    ReadRecord,
    ReadTails,
    Request,
    Together,
    Unplanned,
    WrittenRows,
    count_stored,
    make_plan,
    obsolete,
    overtaken,
    prepare,
)
from eventpump.spark.sink.protocol import finish as finish_plan
from eventpump.spark.sink.records import (
    Done,
    KeptRows,
    LossReason,
    PackingLimits,
    PartitionOutcome,
    PartitionPlan,
    PartitionReceipt,
    Plan,
    Record,
    Sink,
    StateLost,
    TakeOver,
    claim_name,
    claim_of,
    decode_record,
    done_name,
    encode_record,
    is_obsolete,
    plan_name,
    rows_stem,
)
from tests.unit.spark.plans import changed, entry, plan
from tests.unit.spark.sinking import SINK, walk

T = TypeVar("T")

FAIL, SCAN = OnProducerStateLost
KEPT = KeptRows(name="kept", size=7, digest="digest")
NOTHING = WrittenRows(None, {}, {})


def begin(of: MicroBatch, rows: WrittenRows = NOTHING) -> Procedure[Plan | Done]:
    """Begin a batch, and make its plan of these rows if it has none."""
    step = yield from prepare(of)
    return (yield from make_plan(step, rows)) if isinstance(step, Unplanned) else step


def finish(
    of: MicroBatch, planned: Plan, outcomes: Iterable[PartitionOutcome], policy: OnProducerStateLost
) -> Procedure[Plan | Done]:
    """Finish a plan that has as many rows as are reported first."""
    counts = {each.partition_id: each.count for each in reversed([*outcomes]) if isinstance(each, PartitionReceipt)}
    partitions = [
        each.model_copy(update={"count": counts.get(each.partition_id, each.count)}) for each in planned.partitions
    ]
    return finish_plan(of, planned.model_copy(update={"partitions": tuple(partitions)}), outcomes, policy)


# ------------------------------------------------------------------------------------------------- worlds


@pytest.mark.timeout(600)
def test_sink_stores_every_row_once_and_in_order_in_random_histories(request: pytest.FixtureRequest) -> None:
    """*No loss, no duplicate and no reorder*, whatever dies, gets lost, comes late or is forgotten; then all is stored.

    The rows are those that the plan names, which no other evaluation has. With `fail` the query may stop, and never for
    nothing.
    """
    seeds = range(10_000 if request.config.getoption("--long") else 300)
    kinds = ["runs", "attempts", "take-over", "forgotten", "wrap", "kept links", "superseded", "ledger lost"]
    kinds += ["skipped", "restored", "repeated", "encodings"]
    seen = dict.fromkeys([*kinds, "behind", "late rows", "gone", "wavered"], 0)
    for seed in seeds:
        try:
            world = walk(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen["runs"] += len(world.runs)
        seen["attempts"] += len(world.attempts)
        seen["take-over"] += any(".1.plan" in name for name in world.records)
        seen["forgotten"] += world.has_forgotten
        seen["wrap"] += world.may_seem_lost
        seen["kept links"] += world.kept_links
        seen["superseded"] += world.superseded
        seen["ledger lost"] += world.is_ledger_lost
        seen["skipped"] += world.skipped
        seen["wavered"] += world.has_wavered
        seen["restored"] += world.is_restored
        seen["repeated"] += world.repeated
        seen["encodings"] += len(world.encodings)
        seen["late rows"] += world.late_rows
        seen["gone"] += world.gone
        seen["behind"] += any("is behind the hub" in str(each.error) for each in world.runs)
    # It would hold in a world where nothing happens, too.
    assert seen["runs"] > 3 * len(seeds)
    assert seen["attempts"] > 8 * len(seeds)
    assert all(seen[kind] > len(seeds) / 20 for kind in kinds), seen
    assert all(seen[kind] for kind in ("behind", "late rows", "gone", "wavered")), seen


# ------------------------------------------------------------------------------------------------- the driver


class Outside:
    """Answers the requests of procedures.

    Args:
        partitions: Where each begins and ends.

    Attributes:
        made: What was created, attached and deleted, in order; rows apart from that.
        objects: Those with rows.
        deleted: Those that were deleted.
    """

    def __init__(self, *records: Record, partitions: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.records: dict[str, bytes] = {}
        self.partitions = {"0": (0, -1), "1": (0, 9)} if partitions is None else dict(partitions)
        self.ids = iter(range(100, 200))
        self.known: set[int] | None = None
        self.numbers: dict[int, int] = {}
        self.rows: list[int] = []
        self.made: list[object] = []
        self.objects: dict[str, int] = {}
        self.deleted: list[str] = []
        self.before_create: Callable[[], None] = lambda: None
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        assert isinstance(record, Plan | Done | TakeOver)
        if isinstance(record, Plan):
            name = plan_name(record.batch_id, record.revision)
        else:
            revisions = sum(f"{record.batch_id:012d}" in each and "done" in each for each in self.records)
            name = done_name(record.batch_id, revisions)
        self.records[name] = encode_record(record)

    def run(self, procedure: Procedure[T]) -> T:
        answer: object = None
        try:
            while True:
                request = procedure.send(answer)
                answer = self._answer(request)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _answer(self, request: Request) -> object:
        match request:
            case ReadRecord(name):
                return self.records.get(name)
            case CreateRecord(name, body):
                self.before_create()
                self.made.append(name)
                return self.records.setdefault(name, body) == body
            case ListRecords():
                return [*self.records, "000000000000.note.json"]
            case DeleteRecords(names):
                self.made.append(names)
                for name in names:
                    self.records.pop(name, None)
            case ListRows():
                return self.objects
            case ListObsoleteRows(before):
                return [name for name in self.objects if is_obsolete(name, before, 0)]
            case DeleteRows(names):
                for name in names:
                    self.deleted.append(name)
                    del self.objects[name]
            case Together(requests):
                return [self._answer(each) for each in requests]
            case ReadPartitions():
                return tuple(self.partitions)
            case ReadTails(ids):
                self.made.append("tails")
                return {each: PartitionTail(*self.partitions[each]) for each in ids}
            case AttachProducers(asked):
                self.made += [each for each in asked.values() if each != AttachRequest()]
                return {each: self._attach(attach) for each, attach in asked.items()}
            case FindRows(_, ranges):
                self.made.append(dict(ranges))
                return {each: list(self.rows) for each in ranges}
        return None

    def _attach(self, asked: AttachRequest) -> ProducerAnswer | None:
        if asked.producer_id is None:
            return ProducerAnswer(next(self.ids), 0, 0)
        if self.known is not None and asked.producer_id not in self.known:
            return None
        assert asked.owner_level is not None
        return ProducerAnswer(asked.producer_id, asked.owner_level, self.numbers.get(asked.producer_id, 0))


def running(run_id: str = "this", claim: int | None = 1) -> DriverRun:
    """Make a run, which by default has claimed the sink."""
    made = DriverRun(run_id)
    made.claim = claim
    return made


def batch(batch_id: int = 1, *, run_id: str = "this", **values: Any) -> MicroBatch:
    every: dict[str, Any] = {"sink": SINK, "query_id": "query", "run": running(run_id), "batch_id": batch_id}
    return MicroBatch(**{**every, **values})


def receipt(each: PartitionPlan, count: int) -> PartitionReceipt:
    every: dict[str, Any] = {
        "partition_id": each.partition_id,
        "producer_id": each.producer_id,
        "owner_level": each.owner_level,
        "count": count,
        "offset": each.offset,
        "first_number": each.next_number,
        "next_number": each.number_of(count),
        "found": 0,
    }
    return PartitionReceipt(**every)


def done(batch_id: int = 0, *partitions: PartitionPlan, **values: Any) -> Done:
    """Conclude a plan without rows."""
    of = batch(batch_id, run_id="earlier", **values)
    made = Outside().run(finish(of, plan(batch_id, *partitions, sink=of.sink), [], FAIL))
    assert isinstance(made, Done)
    return made


def changed_number(of: Done, number: int) -> Done:
    """Return the record with another next number of every partition."""
    return of.model_copy(
        update={"partitions": tuple(each.model_copy(update={"next_number": number}) for each in of.partitions)}
    )


def planned(step: Plan | Done) -> Plan:
    assert isinstance(step, Plan)
    return step


def test_plan_of_a_batch_that_is_done_asks_nothing() -> None:
    """Nothing is asked of the service for it."""
    outside = Outside(done(1))
    assert outside.run(begin(batch(1))) == done(1)
    assert outside.made == []


def test_plan_of_a_new_sink_is_made_of_the_services_answers() -> None:
    """The plan holds what the service assigned and where partitions ended, and goes on from the answer plus one."""
    outside = Outside()
    rows = WrittenRows(KEPT, {}, {"0": 1, "1": 1})
    made = planned(outside.run(begin(batch(0, is_stamped=True, limits=PackingLimits(max_events=3)), rows)))
    assert outside.made == ["tails", plan_name(0)]
    assert [(each.partition_id, each.producer_id, each.owner_level, each.next_number, each.is_fresh, each.tail)
            for each in made.partitions] == [("0", 100, 0, 1, True, -1), ("1", 101, 0, 1, True, 9)]  # fmt: skip
    assert (made.is_stamped, made.limits.max_events, made.query_id, made.run_id) == (True, 3, "query", "this")
    assert decode_record(outside.records[plan_name(0)], Plan) == made


def test_plan_that_exists_is_used_as_it_is() -> None:
    """A replay keeps partitions, limits and stamps of its plan, whatever the hub and the options are by now."""
    existing = plan(1, entry("0"), limits=PackingLimits(max_events=3), is_stamped=True)
    outside = Outside(existing)
    assert outside.run(begin(batch(1))) == existing
    assert outside.made == []


def test_plan_names_the_rows_that_were_written() -> None:
    """The plan has where the rows are, and how many each partition has; it is not created where they are not seen."""
    outside = Outside()
    rows = WrittenRows(KEPT, {"a": 5, "kept": 7}, {"1": 3})
    for objects in ({}, {"a": 5}, {"a": 4, "kept": 7}):
        outside.objects = dict(objects)
        with pytest.raises(ConfigurationError, match=r"rows: the driver does not see [12] of 2 objects .* of batch 0"):
            outside.run(begin(batch(0), rows))
    assert outside.made == []
    outside.objects = {"a": 5, "kept": 7, "another": 1}
    made = planned(outside.run(begin(batch(0), rows)))
    assert made.rows == KEPT
    assert [each.count for each in made.partitions] == [0, 3]


def test_plan_of_two_drivers_is_the_first_one() -> None:
    """A plan that another run made meanwhile is used in place of one's own."""
    outside = Outside()
    other = plan(0)
    outside.before_create = lambda: outside.add(other)
    assert outside.run(begin(batch(0))) == other


def test_plan_continues_from_the_batch_before() -> None:
    """The plan takes producers and numbers from the batch before, and gives partitions that came new producers."""
    before = Outside(partitions={"0": (0, 99)})
    rows = finish(batch(0), plan(0, entry("0", tail=89)), [receipt(entry("0"), 10)], FAIL)
    before.run(rows)
    before.partitions = {"1": (0, -1), "10": (0, -1), "0": (0, 120), "2": (0, 5)}
    every = WrittenRows(KEPT, {}, {"0": 4, "10": 1})
    made = planned(before.run(begin(batch(1, run_id="next"), every)))
    assert made.partition_ids == ("0", "1", "2", "10")
    assert made.partition("0") == entry("0", next_number=31, tail=120, count=4)
    assert made.partition("10").is_fresh


def test_plan_keeps_a_producer_without_rows_fresh() -> None:
    """As long as nothing was published under it, what the service says proves nothing."""
    fresh = [entry("0", is_fresh=True), entry("1", is_fresh=True)]
    outside = Outside()
    outside.run(finish(batch(0), plan(0, *fresh), [receipt(fresh[1], 2)], FAIL))
    made = planned(outside.run(begin(batch(1))))
    assert [each.is_fresh for each in made.partitions] == [True, False]


def test_plan_replaces_a_producer_before_its_numbers_end() -> None:
    """Near 2^31 the next batch takes a new producer; one that published nothing yet is left."""
    outside = Outside(
        done(0, entry("0", next_number=RENEW_AT), entry("1", next_number=RENEW_AT - 1)),
        partitions={"0": (0, 9), "1": (0, 9)},
    )
    made = planned(outside.run(begin(batch(1))))
    assert [each.producer_id for each in made.partitions] == [100, 7]
    assert (made.partition("0").next_number, made.partition("0").is_fresh) == (1, True)


def test_plan_records_a_tail_that_went_back() -> None:
    """Where a partition ends before where it must have ended, the plan says by how many events."""
    outside = Outside(partitions={"0": (0, 9), "1": (0, 9)})
    outside.run(finish(batch(0), plan(0), [receipt(entry("0"), 10)], FAIL))
    outside.partitions["0"] = (0, 15)
    rows = WrittenRows(KEPT, {}, {"0": 1, "1": 1})
    assert [each.missing for each in planned(outside.run(begin(batch(1, run_id="next"), rows))).partitions] == [4, 0]


def tails_asked(outside: Outside, before: Done, used: set[str], **values: Any) -> Plan:
    """Make the plan after a batch, and check that its partitions' ends are those asked for."""
    outside.records[done_name(before.batch_id)] = encode_record(before)
    unplanned = outside.run(prepare(batch(before.batch_id + 1, **values)))
    assert isinstance(unplanned, Unplanned)
    return outside.run(make_plan(unplanned, WrittenRows(KEPT, {}, dict.fromkeys(used, 1))))


def test_plan_takes_tails_from_the_record_of_the_batch_before() -> None:
    """The service is asked for ends only in doubt: for unused producers with rows, stamps, and after a restart."""
    entries = [entry("0"), entry("1", is_fresh=True), entry("2", is_fresh=True)]
    before = done(0, *entries).model_copy(update={"run_id": "this"})
    ends = dict.fromkeys(("0", "1", "2", "3"), (0, 50))
    cases: list[tuple[set[str], dict[str, Any], list[int]]] = [
        ({"0"}, {}, [9, 9, 9, -1]),
        ({"0", "1"}, {}, [9, 50, 9, -1]),
        ({"0", "3"}, {}, [9, 9, 9, 50]),
        ({"0", "1", "2", "3"}, {}, [9, 50, 50, 50]),
        ({"0"}, {"is_stamped": True}, [50, 9, 9, -1]),
        ({"0"}, {"run_id": "next"}, [50, 9, 9, -1]),
    ]
    for used, values, tails in cases:
        made = tails_asked(Outside(partitions=ends), before, used, **values)
        assert [each.tail for each in made.partitions] == tails, (used, values)


def test_ledger_without_records_is_refused_where_rows_may_be_stored() -> None:
    """A ledger that has nothing of the sink is an error, unless nothing of the batch can be stored."""
    for first_batch in (0, 4, 6):
        outside = Outside()
        with pytest.raises(ConfigurationError, match=r"ledger: .*batch 5.*set first_batch=5"):
            outside.run(begin(batch(5, first_batch=first_batch, run=running(claim=None))))
        assert outside.made == ["tails"]
    for batch_id in (0, 5):  # the first one, or the user says that it is
        assert planned(Outside().run(begin(batch(batch_id, first_batch=5)))).partition("0").is_fresh
    # Not the first of its run, which is the only one that is repeated; or the hub never had an event.
    assert planned(Outside().run(begin(batch(5, may_repeat=False)))).partition("0").is_fresh
    assert planned(Outside(partitions={"0": (0, -1)}).run(begin(batch(5)))).partition("0").is_fresh


def test_ledger_with_a_claim_is_in_use_although_nothing_was_planned() -> None:
    """A sink that failed at its first batch goes on with it, as nothing of it was sent; at a later one it is lost."""
    outside = Outside()
    outside.run(prepare(batch(5, run=running("first", None), may_repeat=False)))
    assert isinstance(outside.run(prepare(batch(5, run=running("next", None)))), Unplanned)
    with pytest.raises(ConfigurationError, match=r"ledger: has no record of batch 5 .* but the query is at 6"):
        outside.run(prepare(batch(6, run=running("third", None))))
    made = planned(outside.run(begin(batch(5, run=running("fourth", None)))))
    outside.run(finish(batch(5, run=running("fourth", 3)), made, [], FAIL))
    assert isinstance(outside.run(prepare(batch(9, run=running("fifth", None)))), Unplanned)
    other = Outside()
    other.run(prepare(batch(5, query_id="other", run=running("first", None), may_repeat=False)))
    with pytest.raises(ConfigurationError, match=r"set first_batch=7"):
        other.run(prepare(batch(7, run=running(claim=None))))


# ------------------------------------------------------------------------------------------------- two drivers


def test_claim_of_a_later_run_ends_the_earlier() -> None:
    """Once a later run has begun, the earlier one neither plans nor finishes a batch."""
    outside = Outside(done(0))
    first, second = running("first", None), running("second", None)
    step = planned(outside.run(begin(batch(1, run=first))))
    assert outside.run(begin(batch(1, run=second))) == step
    assert (first.claim, second.claim) == (1, 2)
    rows = [receipt(step.partition("0"), 4)]
    for procedure in (begin(batch(1, run=first)), finish(batch(1, run=first), step, rows, FAIL)):
        with pytest.raises(StoreError, match="a later run of this query has begun"):
            outside.run(procedure)
    assert isinstance(outside.run(finish(batch(1, run=second), step, rows, FAIL)), Done)
    planned(outside.run(begin(batch(2, run=second))))
    with pytest.raises(StoreError, match="a later run of this query has begun"):
        outside.run(begin(batch(2, run=first)))


def test_claim_is_not_made_by_another_query() -> None:
    """What finds that the sink is another query's leaves that query alone."""
    outside = Outside(done(0), plan(1))
    for query, batch_id in (("other", 1), ("query", 0), ("query", 3)):
        with pytest.raises(ConfigurationError):
            outside.run(begin(batch(batch_id, query_id=query, run=running(claim=None))))
    assert outside.made == []


def test_claim_is_made_once_for_each_run_and_old_ones_are_deleted() -> None:
    """A run claims at its first batch; of earlier claims the last ones are kept, for runs that wake up late."""
    outside = Outside(done(0))
    run = running(claim=None)
    for batch_id in (1, 2):
        step = planned(outside.run(begin(batch(batch_id, run=run))))
        outside.run(finish(batch(batch_id, run=run), step, [], FAIL))
    assert outside.made.count(claim_name(1)) == 1
    for number in range(2, KEPT_CLAIMS + 4):
        later = running(f"run {number}", None)
        outside.run(begin(batch(3, run=later)))
        assert later.claim == number
    claims = [found for found in map(claim_of, outside.records) if found is not None]
    assert claims == list(range(4, KEPT_CLAIMS + 4))


def test_batch_that_the_run_before_has_published_meanwhile_is_continued() -> None:
    """A batch that an overtaken run still finishes, and that had no rows when it was repeated, keeps its numbers."""
    outside = Outside(done(0))
    run = running("this", None)

    def finish_the_batch_between() -> None:
        outside.before_create = lambda: None
        outside.add(changed_number(done(1), 11))

    outside.before_create = finish_the_batch_between  # the claim
    step = planned(outside.run(begin(batch(2, run=run))))
    assert step.partition("0").next_number == 11


def test_plan_of_a_run_that_was_overtaken_while_it_encoded_is_not_published() -> None:
    """The later run may have planned another batch with these numbers, before this plan was there to be seen."""
    outside = Outside(done(0), done(1))
    run = running("this", None)
    step = outside.run(prepare(batch(2, run=run)))
    assert isinstance(step, Unplanned)
    outside.records[claim_name(2)] = b"of a run for which batch 2 has no rows"
    with pytest.raises(StoreError, match="a later run of this query has begun"):
        outside.run(make_plan(step, NOTHING))


def test_plan_that_was_made_before_another_batch_was_published_is_refused() -> None:
    """A run that was overtaken, and killed before it saw that, leaves a plan whose numbers are used since."""
    outside = Outside(changed_number(done(1), 11), plan(2))
    with pytest.raises(ConfigurationError, match=r"made before batch 1 was published.*first_batch=2"):
        outside.run(begin(batch(2, run=running(claim=None))))
    outside = Outside(changed_number(done(1), 11), plan(2, entry(next_number=11)))
    assert planned(outside.run(begin(batch(2, run=running(claim=None))))).partition("0").next_number == 11


def test_later_batch_that_the_run_before_has_published_meanwhile_is_found() -> None:
    """A batch that had no rows in the run before, which has published the next one under these numbers, is refused."""
    outside = Outside(done(0), done(1))

    def publish_the_next() -> None:
        outside.before_create = lambda: None
        outside.add(plan(3))
        outside.add(changed_number(done(3), 33))

    outside.before_create = publish_the_next  # before the claim is there
    with pytest.raises(ConfigurationError, match="is at batch 3, but the query at 2"):
        outside.run(begin(batch(2, run=running("this", None))))


@pytest.mark.parametrize("is_late", [False, True])
def test_plan_of_an_overtaken_run_for_the_next_batch_is_refused(is_late: bool) -> None:
    """It was made before this run has published the batch between, of other rows with these numbers."""
    outside = Outside(done(0), changed_number(done(1), 31))
    if is_late:
        outside.before_create = lambda: outside.add(plan(2))
    else:
        outside.add(plan(2))
    with pytest.raises(ConfigurationError, match=r"made before batch 1 was published"):
        outside.run(begin(batch(2)))


def test_claim_whose_answer_is_lost_is_found() -> None:
    """A claim that is created again after a lost answer is the same claim; two runs at once get different ones."""
    outside = Outside(done(0))
    rival = running("rival", None)
    procedure = begin(batch(1, run=rival))
    run = running("this", None)

    def overtake() -> None:
        outside.before_create = lambda: None
        outside.run(procedure)

    outside.before_create = overtake
    planned(outside.run(begin(batch(1, run=run))))
    assert (rival.claim, run.claim) == (1, 2)


def of_sink(**values: str) -> Sink:
    return Sink(**{**SINK.model_dump(), **values})


@pytest.mark.parametrize(
    ("existing", "error", "says"),
    [
        ([plan(1, query_id="other")], ConfigurationError, "belongs to the query other, but this is query"),
        ([done(1, query_id="other")], ConfigurationError, "belongs to the query other"),
        ([done(0, query_id="other")], ConfigurationError, "belongs to the query other"),
        ([plan(1, sink=of_sink(hub="else"))], ConfigurationError, "publishes to .*/else, not to .*/hub"),
        ([done(0, sink=of_sink(namespace="else"))], ConfigurationError, "publishes to else/hub"),
        ([plan(1, sink=of_sink(sink_id="else"))], StoreError, "of the sink 'else'"),
        ([plan(0)], ConfigurationError, "has started batch 0 and not finished it, but the query is at 1"),
        ([plan(2)], ConfigurationError, "is at batch 2, but the query at 1: it is another query, or its checkpoint"),
        ([done(1), plan(2)], ConfigurationError, "is at batch 2, but the query at 1"),
        ([done(2)], ConfigurationError, "is at batch 2, but the query at 1"),
        ([done(0, entry("0"), entry("2"))], ConfigurationError, "partition 2 no longer exists"),
    ],
)
def test_ledger_of_another_query_hub_or_sink_is_refused(
    existing: list[Record], error: type[EventPumpError], says: str
) -> None:
    """Another query's, hub's or sink's records are clear errors, and so is a query that is not where its ledger is."""
    outside = Outside(*existing)
    with pytest.raises(error, match=says):
        outside.run(begin(batch(1)))
    assert not any(isinstance(each, str) and "plan" in each for each in outside.made)


def test_ledger_compares_hubs_without_case() -> None:
    """The service knows names in any case."""
    sink = of_sink(hub="HUB", namespace="EXAMPLE.servicebus.windows.net")
    assert isinstance(Outside(done(1)).run(begin(batch(1, sink=sink))), Done)


def test_ledger_does_not_compare_an_unknown_query() -> None:
    """If Spark does not pass the query's id, only the sink's counts."""
    assert isinstance(Outside(done(1)).run(begin(batch(1, query_id=None))), Done)
    assert isinstance(Outside(done(1, query_id=None)).run(begin(batch(1))), Done)


@pytest.mark.parametrize(("raw", "says"), [(b"{", "not JSON"), (changed(version=3), "newer version")])
def test_ledger_with_an_unreadable_record_names_it(raw: bytes, says: str) -> None:
    """Damaged and newer records are errors that name them, and nothing is done."""
    for name in (plan_name(1), done_name(1), done_name(0)):
        outside = Outside()
        outside.records[name] = raw
        with pytest.raises(StoreError, match=f"{name}.*{says}"):
            outside.run(begin(batch(1)))
        assert outside.made == []


def test_ledger_with_a_renamed_record_is_refused() -> None:
    """Records that were copied or renamed are not what they seem."""
    outside = Outside()
    outside.records[done_name(1)] = encode_record(done(0))
    with pytest.raises(StoreError, match="it belongs to batch 0"):
        outside.run(begin(batch(1)))


def test_ledger_with_a_take_over_without_its_plan_is_refused() -> None:
    """A take-over whose plan is gone is not guessed at."""
    outside = Outside()
    outside.run(finish(batch(1), plan(1, is_stamped=True), [lost()], SCAN))
    with pytest.raises(StoreError, match="the plan record is missing"):
        outside.run(begin(batch(1)))


def test_plan_after_a_gap_continues_its_producers() -> None:
    """A sink that is not called for every batch goes on with its producers, and assigns no others."""
    outside = Outside(done(0))
    outside.numbers[7] = 20
    made = planned(outside.run(begin(batch(5))))
    assert [(each.producer_id, each.next_number) for each in made.partitions] == [(7, 21), (7, 21)]


@pytest.mark.parametrize("batch_id", [1, 5])
@pytest.mark.parametrize(("before", "number"), [(entry(), 21), (entry(is_fresh=True, next_number=1), 1)])
def test_ledger_that_is_behind_the_service_is_refused(before: PartitionPlan, number: int, batch_id: int) -> None:
    """*No duplicate*: an older copy of the ledger is noticed before the first new plan of a run; nothing is created."""
    outside = Outside(done(0, before))
    outside.numbers[7] = number
    with pytest.raises(ConfigurationError, match=rf"ledger: is behind .* batch .* is 0, .*first_batch={batch_id}"):
        outside.run(begin(batch(batch_id, run=running(claim=None))))
    assert outside.made == [AttachRequest(7, 3)]
    outside.numbers[7] = number - 1
    assert planned(outside.run(begin(batch(batch_id)))).partition("0").next_number == before.next_number


def test_ledger_is_compared_with_the_service_once_in_a_run() -> None:
    """What the run has concluded itself is the newest record, also where the sink was not called since."""
    outside, run = Outside(done(0)), running(claim=None)
    for batch_id in (1, 2, 7):
        made = planned(outside.run(begin(batch(batch_id, run=run))))
        outside.run(finish(batch(batch_id, run=run), made, [], FAIL))
    assert [each for each in outside.made if isinstance(each, AttachRequest)] == [AttachRequest(7, 3)] * 2
    outside.records.pop(done_name(7))
    outside.records.pop(plan_name(7))
    outside.numbers[7] = 30
    with pytest.raises(ConfigurationError, match="is behind the hub"):
        outside.run(begin(batch(8, run=run)))


def test_ledger_is_not_behind_where_another_run_publishes_the_batch() -> None:
    """Rows of a plan that was made meanwhile are no reason to refuse the ledger; the plan is followed."""
    outside, other = Outside(done(0)), plan(1)

    def answer(procedure: Procedure[Plan | Done]) -> Plan:
        sent: object = None
        try:
            while True:
                request = procedure.send(sent)
                if isinstance(request, AttachProducers):
                    outside.add(other)
                    outside.numbers[7] = 25
                sent = outside._answer(request)
        except StopIteration as stop:
            return planned(stop.value)

    assert answer(begin(batch(1, run=running(claim=None)))) == other


# ------------------------------------------------------------------------------------------------- the end of a batch


def test_finish_stores_the_receipts_of_every_partition() -> None:
    """Every partition of the plan is there, with the number after its last row; receipts stay as they came."""
    entries = [entry("0"), entry("1", next_number=NUMBERS - 2), entry("2")]
    receipts = [receipt(entries[1], 3), receipt(entries[0], 4)]
    outside = Outside()
    made = outside.run(finish(batch(1), plan(1, *entries), receipts, FAIL))
    assert isinstance(made, Done)
    assert [(each.count, each.next_number, each.tail) for each in made.partitions] == [
        (4, 25, 13),
        (3, 1, 12),
        (0, 21, 9),
    ]
    assert made.receipts == (receipts[1], receipts[0])
    assert [each.last_number for each in made.receipts] == [24, 0]
    assert outside.records[done_name(1)] == encode_record(made)


def test_finish_counts_a_repeated_report_once() -> None:
    """Equal reports are one; different ones of a partition are an error."""
    twice = [receipt(entry(), 4), receipt(entry(), 4)]
    assert isinstance(Outside().run(finish(batch(), plan(), twice, FAIL)), Done)
    with pytest.raises(InvalidClientStateError, match="the report does not match the plan"):
        Outside().run(finish(batch(), plan(), [receipt(entry(), 4), receipt(entry(), 5)], FAIL))


@pytest.mark.parametrize(
    "values",
    [{"producer_id": 8}, {"owner_level": 4}, {"next_number": 26}, {"offset": 1}, {"count": 5}, {"partition_id": "9"}],
)
def test_finish_refuses_a_report_that_does_not_fit(values: dict[str, Any]) -> None:
    """A report of another producer, partition or count ends the batch without a record."""
    outside = Outside()
    of = plan(1, entry(count=4), entry("1"))
    with pytest.raises(InvalidClientStateError):
        outside.run(finish_plan(batch(), of, [receipt(entry(), 4).model_copy(update=values)], FAIL))
    assert outside.made == []


def test_finish_by_two_drivers_fails_one() -> None:
    """The batch is done once; the second run gets that it is. The same run may report it again."""
    outside = Outside()
    rows = [receipt(entry(), 4)]
    first = outside.run(finish(batch(run_id="a"), plan(), rows, FAIL))
    assert outside.run(finish(batch(run_id="a"), plan(), rows, FAIL)) == first
    assert outside.run(finish(batch(run_id="b"), plan(), rows, FAIL)) == first, "the same rows: both have finished it"
    for outcomes, policy in (([receipt(entry(), 5)], FAIL), ([lost()], SCAN)):
        with pytest.raises(StoreError, match="another run of this query has finished the batch"):
            outside.run(finish(batch(run_id="b"), plan(is_stamped=True), outcomes, policy))
    assert not any(isinstance(each, AttachRequest) for each in outside.made)


def test_finish_deletes_old_records() -> None:
    """Now and then, once a batch is done, what is older than the last hundred batches goes, and nothing else."""
    last = PRUNED_EVERY * (KEPT_BATCHES // PRUNED_EVERY + 2)
    outside = Outside(*(done(each) for each in range(last)))
    outside.run(finish(batch(last), plan(last), [], FAIL))
    assert outside.made[1:] == [tuple(done_name(each) for each in range(last - KEPT_BATCHES + 1))]
    outside.made.clear()
    outside.run(finish(batch(last + 1), plan(last + 1), [], FAIL))
    assert outside.made == [done_name(last + 1)]
    assert obsolete(["000000000000.staged.json", "else"], 10**6) == ()


def test_rows_are_deleted_by_the_holder_of_the_claim() -> None:
    """A run deletes what earlier ones left before its first batch, and after each batch all up to it; no other does."""
    outside, run = Outside(done(3)), running(claim=None)
    older, rows = f"{rows_stem(3)}.{0:032x}", f"{rows_stem(4)}.{0:032x}"
    outside.objects = {older: 7, rows: 7}
    made = planned(outside.run(begin(batch(4, run=run))))
    assert outside.deleted == [older], "the plan of batch 4 may be created by another run at this moment"
    later = running("later", None)
    outside.run(begin(batch(4, run=later)))
    with pytest.raises(StoreError, match="a later run of this query has begun"):
        outside.run(finish(batch(4, run=run), made, [], FAIL))
    assert outside.deleted == [older]
    outside.run(finish(batch(4, run=later), made, [], FAIL))
    assert outside.deleted == [older, rows]


def test_plan_whose_rows_another_run_has_deleted_is_overtaken() -> None:
    """A run whose rows a later one has deleted has the error for that, not for a wrong directory."""
    outside, rows = Outside(done(0)), WrittenRows(KEPT, {"kept": 7}, {"1": 3})
    earlier, later = running("earlier", None), running("later", None)
    unplanned = outside.run(prepare(batch(1, run=earlier)))
    assert isinstance(unplanned, Unplanned)
    made = planned(outside.run(begin(batch(1, run=later))))
    outside.run(finish(batch(1, run=later), made, [], FAIL))
    with pytest.raises(StoreError, match="a later run of this query has begun"):
        outside.run(make_plan(unplanned, rows))


def test_rows_that_could_not_be_events_are_kept_until_the_next_batch_is_done() -> None:
    """They are counted in the plan and the record of the end, and can be read after it."""
    outside, run = Outside(done(0)), running()
    first, second = f"{rows_stem(1)}.{0:032x}", f"{rows_stem(2)}.{0:032x}"
    outside.objects = {first: 7}
    made = planned(outside.run(begin(batch(1, run=run), WrittenRows(KEPT, {}, {}, bad_rows=2))))
    ended = outside.run(finish(batch(1, run=run), made, [], FAIL))
    assert isinstance(ended, Done)
    assert (made.bad_rows, ended.bad_rows, outside.deleted) == (2, 2, [])
    outside.objects[second] = 7
    outside.run(finish(batch(2, run=run), planned(outside.run(begin(batch(2, run=run)))), [], FAIL))
    assert outside.deleted == [first, second]


def test_plan_that_is_looked_for_just_before_it_is_taken_over_is_found() -> None:
    """Of reads that are made together, one may miss a plan whose conclusion another one finds."""

    class Meanwhile(Outside):
        def _answer(self, request: Request) -> object:
            answer = super()._answer(request)
            if request == Together((ReadRecord(done_name(1)), ReadRecord(plan_name(1)), ReadRecord(done_name(0)))):
                self.add(plan(1))
                self.add(TakeOver(sink=SINK, query_id="query", run_id="earlier", batch_id=1, producers=()))
                return [self.records[done_name(1)], None, self.records[done_name(0)]]
            return answer

    step = Meanwhile(done(0)).run(prepare(batch(1, run=running(claim=None))))
    assert isinstance(step, Plan)
    assert step.revision == 1


def test_failure_where_another_run_goes_on_is_that() -> None:
    """A publisher whose rows are gone because another run has finished the batch ends as overtaken, not otherwise."""
    outside, run = Outside(done(0)), running(claim=None)
    made = planned(outside.run(begin(batch(1, run=run))))
    outside.run(overtaken(batch(1, run=run)))
    outside.run(begin(batch(1, run=running("later", None))))
    with pytest.raises(StoreError, match="a later run of this query has begun"):
        outside.run(overtaken(batch(1, run=run)))
    outside.records.pop(claim_name(2))
    outside.run(finish(batch(1), made, [], FAIL))
    with pytest.raises(StoreError, match=r"publish batch 1 .*a later run of this query has begun"):
        outside.run(overtaken(batch(1, run=run)))


# ------------------------------------------------------------------------------------------------- taking over


def lost(partition_id: str = "0") -> StateLost:
    return StateLost(partition_id=partition_id, reason=LossReason.UNKNOWN, stored=0)


def test_loss_fails_the_query_by_default() -> None:
    """By default nothing is done, and the error names partitions, reason and ways out."""
    outside = Outside()
    with pytest.raises(ProducerStateLostError, match=r"partitions 0, 1.*unknown.*to scan \(with stamps\)") as caught:
        outside.run(finish(batch(), plan(), [lost("1"), lost("0")], FAIL))
    assert caught.value.partition_ids == ("0", "1")
    assert outside.made == []


def test_take_over_by_scan_needs_stamps() -> None:
    """A batch that was planned without stamps is not taken over by a scan, and nothing is done."""
    outside = Outside()
    with pytest.raises(ConfigurationError, match="scan requires events with stamps"):
        outside.run(finish(batch(1), plan(1), [lost()], SCAN))
    assert outside.made == []


def test_take_over_raises_the_level_before_it_counts() -> None:
    """The intent stands before the level is raised, the level before the tail is read, and the plan after all."""
    outside = Outside()
    outside.rows = [0, 1, 2]
    outside.partitions["0"] = (5, 30)
    old = plan(1, entry("0"), entry("1", next_number=5), is_stamped=True)
    made = planned(outside.run(finish(batch(), old, [lost("0"), receipt(old.partition("1"), 2)], SCAN)))
    assert outside.made == [done_name(1), AttachRequest(7, 4), "tails", {"0": (9, 30)}, plan_name(1, 1)]
    assert made.partition("0") == entry("0", owner_level=4, next_number=1, is_fresh=True, tail=30, offset=3)
    assert made.partition("1") == old.partition("1").model_copy(update={"count": 2})
    assert (made.revision, made.run_id) == (1, "this")
    assert made.partition("0").number_of(3) == 1


def test_take_over_of_an_unknown_producer_replaces_it() -> None:
    """Where the service refuses the raised level as unknown, it assigns a new producer."""
    outside = Outside()
    outside.known = set()
    made = planned(outside.run(finish(batch(), plan(is_stamped=True), [lost("0")], SCAN)))
    assert (made.partition("0").producer_id, made.partition("0").owner_level, made.partition("0").offset) == (100, 0, 0)


def test_take_over_that_was_begun_is_finished() -> None:
    """A driver that comes after the intent raises the same level, and comes to the same plan."""
    old = plan(1, is_stamped=True)
    whole = Outside(old)
    whole.rows = [0]
    expected = planned(whole.run(finish(batch(), old, [lost("0")], SCAN)))
    begun = Outside(old)
    begun.rows = [0]
    begun.records[done_name(1)] = whole.records[done_name(1)]
    made = planned(begun.run(begin(batch())))
    assert made == expected
    assert planned(begun.run(begin(batch(run_id="third")))) == expected
    assert begun.made.count(AttachRequest(7, 4)) == 1


def test_take_over_of_a_take_over_counts_on() -> None:
    """Lost again, the next revision counts on from what the last one counted."""
    outside = Outside(plan(1, is_stamped=True))
    outside.rows = [0, 1]
    first = planned(outside.run(finish(batch(), plan(1, is_stamped=True), [lost("1")], SCAN)))
    outside.rows = [2]
    outside.partitions["1"] = (0, 12)
    second = planned(outside.run(finish(batch(), first, [lost("1")], SCAN)))
    assert (second.revision, second.partition("1").owner_level, second.partition("1").offset) == (2, 5, 3)
    assert {"1": (9, 12)} in outside.made
    assert planned(outside.run(begin(batch()))) == second
    end = outside.run(finish(batch(), second, [receipt(second.partition("1"), 7)], FAIL))
    assert outside.run(begin(batch())) == end
    following = planned(outside.run(begin(batch(2))))
    assert following.partition("1").next_number == 5


def test_take_over_past_retention_fails() -> None:
    """Where events since the plan are gone, the rows cannot be counted, and the query fails."""
    outside = Outside(partitions={"0": (11, 30), "1": (0, 9)})
    with pytest.raises(ProducerStateLostError, match="retention"):
        outside.run(finish(batch(), plan(1, is_stamped=True), [lost("0")], SCAN))


def test_finish_without_a_report_of_rows_is_refused() -> None:
    """*No loss*: a partition that has rows is not silently done."""
    with pytest.raises(InvalidClientStateError, match="nobody reports that its 3 rows are stored"):
        Outside().run(finish(batch(), plan(1, entry("0", count=3)), [], FAIL))


def test_take_over_counts_stored_rows_up_to_a_hole() -> None:
    """Rows count up to the first that is not there; one beyond it is an error, as a row was lost."""
    assert count_stored(entry(), []) == 0
    assert count_stored(entry(), [0, 1, 0, 2]) == 3
    assert count_stored(entry(offset=2), [2, 3]) == 4
    with pytest.raises(ProducerStateLostError, match="row 1 is missing before row 2"):
        count_stored(entry(), [0, 2])


def test_take_over_at_the_highest_level_is_refused() -> None:
    """A producer of the highest level cannot be taken over."""
    highest = plan(1, entry("0", owner_level=MAX_OWNER_LEVEL))
    with pytest.raises(ProducerStateLostError, match="the highest owner level"):
        Outside().run(finish(batch(), highest.model_copy(update={"is_stamped": True}), [lost("0")], SCAN))
