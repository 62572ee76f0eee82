"""The idempotent sink over sockets, without Spark: lost and late messages, rivals, zombies, kills, lost states."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from eventpump import (
    ConfigurationError,
    Emulator,
    EventData,
    EventError,
    EventProducer,
    EventPumpError,
    EventTooLargeError,
    PartitionReader,
    ProducerDisconnectedError,
    RetryOptions,
    ServiceError,
    StoreError,
)
from eventpump.amqp.message import Data, Message
from eventpump.core.sequencer import PartitionSequencer
from eventpump.emulator.faults import Action, DetachLink, DropConnection, Fault, Hold, LinkRole, Reject, StoreLate
from eventpump.errors import InvalidClientStateError, ProducerStateLostError
from eventpump.eventhubs.names import PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import NUMBERS
from eventpump.eventhubs.sealing import SealedBatch
from eventpump.eventhubs.stamps import STAMP
from eventpump.producer.publisher import PartitionPublisher
from eventpump.spark.sink.exactly_once import PartitionPublishing, prepare_batch, sink_of
from eventpump.spark.sink.protocol import OnProducerStateLost
from eventpump.spark.sink.records import (
    Done,
    LossReason,
    PackingLimits,
    PartitionDone,
    PartitionOutcome,
    PartitionReceipt,
    Plan,
    StateLost,
    done_name,
    encode_record,
)
from eventpump.storage.ledgers.directory import DirectoryLedger
from tests.faults.programs import CONNECTION, HUB, RETRY, stored
from tests.faults.sinking import (
    OPTIONS,
    PARTITIONS,
    PATHS,
    CountingTransport,
    KilledError,
    PlainTransport,
    Query,
    encoded,
    query_of,
    require_exactly,
    share,
)
from tests.support.processes import ChildProcess

FAIL, SCAN = OnProducerStateLost
PROGRAM = "tests.faults.sink_program"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(25 if metafunc.config.getoption("--long") else 2))
    if "path" in metafunc.fixturenames:
        names = list(PATHS)
        metafunc.parametrize("path", names if metafunc.config.getoption("--long") else names[:1])


@pytest.fixture
async def query(emulator: Emulator, tmp_path: Path) -> AsyncIterator[Query]:
    """A run of the driver."""
    async with query_of(emulator.connection_string, tmp_path / "ledger") as made:
        yield made


def twelve(batch_id: int, partition_id: str) -> list[str]:
    """Give twelve rows to partition 0."""
    return [f"{batch_id}.{row}" for row in range(12)] if partition_id == "0" else []


def lose(emulator: Emulator, action: Action, *, after: int = 0, count: int | None = 1) -> Fault:
    return emulator.faults.add(action, role=LinkRole.PRODUCER, after=after, count=count)


def receipt_of(outcome: PartitionOutcome) -> PartitionReceipt:
    assert isinstance(outcome, PartitionReceipt)
    return outcome


def lost_of(outcome: PartitionOutcome) -> StateLost:
    assert isinstance(outcome, StateLost)
    return outcome


# ------------------------------------------------------------------------------------------------- everything at once


async def tasks(
    query: Query, emulator: Emulator, plan: Plan, rng: random.Random, zombies: set[Any]
) -> list[PartitionOutcome]:
    """Run the tasks of a plan as an unlucky cluster does: killed, doubled, and with zombies that go on."""

    async def task(partition_id: str) -> PartitionOutcome:
        while True:
            attempts = {
                asyncio.create_task(
                    query.attempt(
                        plan,
                        partition_id,
                        portion=rng.choice([1, 5, 9, 100]),
                        killed_at=rng.choice([None, None, 0, 1, 2, 3]),
                    )
                )
                for _ in range(rng.choice([1, 1, 2, 3]))
            }
            while attempts:
                over, attempts = await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
                zombies.update(attempts)
                for each in over:
                    if each.exception() is None:
                        return each.result()
                    assert isinstance(each.exception(), KilledError)
                    if rng.random() < 0.3:
                        emulator.drop_connections()

    return list(await asyncio.gather(*(task(each) for each in plan.partition_ids if share(plan.batch_id, each))))


async def until_fault(
    query: Query, plan: Plan, faults: list[Fault], rng: random.Random
) -> list[PartitionOutcome] | None:
    """Publish a plan as a small batch, by a driver that may die when a fault of the service occurs.

    Returns:
        None if it has died.
    """
    publishing = asyncio.create_task(query.tasks(plan))
    waiting = [each for each in faults if not each.fired]
    deadly = asyncio.create_task(rng.choice(waiting).until_fired()) if waiting and rng.random() < 0.3 else None
    both = {publishing} if deadly is None else {publishing, deadly}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    for each in both:
        each.cancel()
    await asyncio.wait(both)
    return None if publishing.cancelled() else publishing.result()


@pytest.mark.timeout(120)
async def test_sink_under_random_faults_stores_every_row_once_in_order(
    emulator: Emulator, tmp_path: Path, seed: int, path: str
) -> None:
    """*No duplicate and no reorder*: messages are lost, answers too, or late; attempts and drivers die and double.

    Whether the driver publishes the batches, or tasks, or now these and now those.
    """
    rng = random.Random(seed)
    paths = PATHS[path](rng)
    batches = 6
    actions: list[Action] = [DropConnection(), DropConnection(stored=True), DetachLink(), StoreLate(), StoreLate()]
    faults = [lose(emulator, rng.choice(actions), after=start + rng.randrange(4)) for start in range(0, 60, 4)]
    zombies: set[Any] = set()
    committed = 0
    try:
        for _ in range(1000):
            async with query_of(emulator.connection_string, tmp_path) as query:
                dies = None
                while dies is None and committed < batches:
                    dies = rng.choice([None, None, "planned", "published", "done"])
                    is_small = paths()
                    step = await query.begin(committed, is_small=is_small)
                    if isinstance(step, Plan) and dies != "planned":
                        if is_small:
                            outcomes = await until_fault(query, step, faults, rng)
                        elif rng.random() < 0.5:
                            await query.kept.aclose()
                            outcomes = await tasks(query, emulator, step, rng, zombies)
                        else:
                            outcomes = await query.tasks(step)
                        if outcomes is None:
                            break
                        if dies != "published":
                            step = await query.finish(step, outcomes)
                    if isinstance(step, Done) and dies != "done":
                        committed += 1
                for fault in faults:
                    if fault.holds_something and rng.random() < 0.2:
                        fault.remove()
                # What still runs of it goes on in the next run, over a connection that will not be there.
            if committed == batches:
                break
    finally:
        for each in zombies:
            each.cancel()
        await asyncio.gather(*zombies, return_exceptions=True)
    assert sum(fault.fired for fault in faults) > len(faults) // 3
    emulator.faults.clear()
    await require_exactly(emulator, range(batches))


@pytest.mark.timeout(300)
async def test_killed_driver_is_continued_by_the_next(
    emulator: Emulator, tmp_path: Path, seed: int, path: str, request: pytest.FixtureRequest
) -> None:
    """*No loss and no duplicate*: a driver killed -9 before or after any record or message, and started again."""
    rng = random.Random(seed)
    batches = 3
    command = [sys.executable, "-m", PROGRAM, emulator.connection_string, str(tmp_path), str(batches)]
    kills = 0
    while True:
        deadly = rng.randrange(40) if kills < (6 if request.config.getoption("--long") else 3) else -1
        async with ChildProcess(*command, str(deadly), path) as program:
            code = await program.wait()
            assert code in (0, -9), program.stderr
        kills += code == -9
        if code == 0 and (deadly < 0 or (tmp_path / "committed").read_text() == str(batches)):
            break
    assert kills
    await require_exactly(emulator, range(batches))


# ------------------------------------------------------------------------------------------------- one thing at a time


@pytest.mark.parametrize("directly", [False, True])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    "action",
    [
        DropConnection(),
        DropConnection(stored=True),
        DetachLink(),
        Reject("com.microsoft:timeout"),
        Reject("amqp:not-allowed"),
    ],
    ids=["lost", "stored", "detached", "timeout", "refused"],
)
async def test_message_without_an_answer_stores_its_rows_once(
    emulator: Emulator, query: Query, action: Action, at: int, directly: bool
) -> None:
    """*No duplicate*: whatever happens to a message, its rows are stored once, within the same attempt."""
    query.shares = twelve
    plan = await query.plan(0, is_small=directly)
    fault = lose(emulator, action, after=at)
    (outcome,) = await query.tasks(plan)
    receipt = receipt_of(outcome)
    assert fault.fired == 1
    assert (receipt.count, receipt.found, receipt.first_number, receipt.last_number) == (12, 0, 1, 12)
    assert await stored(emulator.connection_string, "0") == twelve(0, "0")


@pytest.mark.parametrize(("is_first", "portion"), [(False, 1), (True, 1), (False, 100), (True, 100)])
async def test_message_of_a_dead_attempt_that_comes_late_stores_nothing_twice(
    emulator: Emulator, query: Query, is_first: bool, portion: int
) -> None:
    """*No duplicate*: it is refused, or gets the next attempt's refused, which then finds what it stored."""
    query.shares = twelve
    plan = await query.plan(0)
    late = lose(emulator, StoreLate())
    dying = asyncio.create_task(query.attempt(plan, "0", portion=12))
    await late.until_fired()
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    if is_first:
        late.remove()
    await query.attempt(plan, "0", portion=portion)
    late.remove()
    await query.finish(plan, [await query.attempt(plan, "0")])
    await query.run(1)
    assert await stored(emulator.connection_string, "0") == twelve(0, "0") + twelve(1, "0")


async def test_attempts_at_once_store_every_row_once(emulator: Emulator, query: Query) -> None:
    """*No duplicate*: attempts that run at once store every row once, and all succeed, with the same receipt."""
    rows = [str(row) for row in range(60)]
    query.shares = lambda *_: rows
    plan = await query.plan(0)
    outcomes = await asyncio.gather(*(query.attempt(plan, "1", portion=each) for each in (1, 4, 100, 100, 7)))
    receipts = [receipt_of(each) for each in outcomes]
    assert {each.count for each in receipts} == {len(rows)}
    assert len({each.model_copy(update={"found": 0}) for each in receipts}) == 1
    assert await stored(emulator.connection_string, "1") == rows


async def a_part(query: Query, plan: Plan) -> None:
    """Store the first seven rows of partition 0, which are one message."""
    without_room = OPTIONS.model_copy(update={"buffer_bytes": 1})
    async with PartitionPublishing(query.transport, plan, "0", options=without_room) as publishing:
        await publishing.put(0, encoded(query.shares(plan.batch_id, "0")[:7]))


async def test_attempt_that_is_overtaken_packs_again(emulator: Emulator, query: Query) -> None:
    """*No loss and no duplicate*: overtaken in the middle of its messages, an attempt goes on from there."""
    rows = [str(row) for row in range(40)]
    query.shares = lambda *_: rows
    plan = await query.plan(0)
    hold = lose(emulator, Hold())
    slow = asyncio.create_task(query.attempt(plan, "0", portion=40))
    await hold.until_fired()
    await a_part(query, plan)
    hold.remove()
    receipt = receipt_of(await slow)
    assert (receipt.count, receipt.found) == (40, 0)
    assert await stored(emulator.connection_string, "0") == rows


async def test_attempt_after_everything_is_stored_sends_nothing(emulator: Emulator, query: Query) -> None:
    """A second attempt finds every row stored, and sends nothing."""
    query.shares = twelve
    plan = await query.plan(0)
    await query.attempt(plan, "0")
    fault = lose(emulator, Reject("amqp:not-allowed"), count=None)
    again = receipt_of(await query.attempt(plan, "0"))
    assert (again.found, fault.fired) == (12, 0)


async def test_attempt_of_a_plan_that_was_taken_over_fails(emulator: Emulator, query: Query) -> None:
    """*Fencing*: once the level is raised, an attempt of the old plan stores nothing more, and says why."""
    query.shares = twelve
    plan = await query.plan(0)
    async with PartitionPublishing(query.transport, plan, "0", options=OPTIONS) as publishing:
        await publishing.put(0, encoded(twelve(0, "0"))[:7])
        await query.attempt(plan, "0", portion=100)
        entry = plan.partition("0")
        sequencer = PartitionSequencer[SealedBatch](
            "0", producer_id=entry.producer_id, owner_level=entry.owner_level + 1
        )
        other = PartitionPublisher(query.transport, HUB, sequencer, retry=RETRY, rng=random.Random(1))
        await other.attached()
        await other.aclose()
    with pytest.raises(ProducerDisconnectedError):
        await query.attempt(plan, "0")
    assert await stored(emulator.connection_string, "0") == twelve(0, "0")


async def test_attempt_after_a_later_batch_began_fails(emulator: Emulator, query: Query) -> None:
    """An attempt whose numbers are used by a later batch, as a zombie's or an older ledger's, sends nothing."""
    query.shares = twelve
    plan = await query.plan(0)
    await query.run(0)
    await query.run(1)
    with pytest.raises(
        InvalidClientStateError, match="24 rows are stored under the numbers of this batch, which has 12"
    ):
        await query.attempt(plan, "0")


@pytest.mark.parametrize("directly", [True, False])
async def test_rows_that_differ_when_repeated_are_those_kept_first(
    emulator: Emulator, tmp_path: Path, seed: int, directly: bool
) -> None:
    """*No loss and no duplicate*: a batch that an earlier run began is published from the rows it kept."""
    rng = random.Random(seed)
    expected: dict[str, list[str]] = {each: [] for each in PARTITIONS}
    for batch_id in range(6):
        shares = [
            {
                each: [f"{batch_id}.{run}.{each}.{row}" for row in range(rng.choice([0, 1, 9, 40]))]
                for each in PARTITIONS
            }
            for run in range(2)
        ]
        first_of, then_of = (lambda _, each, share=share: share[each] for share in shares)
        async with query_of(emulator.connection_string, tmp_path, shares=first_of) as first:
            plan = await first.plan(batch_id, is_small=directly)
            used = [each.partition_id for each in plan.partitions if each.count]
            await first.tasks(plan, only=rng.sample(used, rng.randint(0, len(used))))
            for each in PARTITIONS:
                expected[each] += shares[0][each]
        async with query_of(emulator.connection_string, tmp_path, shares=then_of, paths=lambda: not directly) as second:
            await second.run(batch_id)
    for each in PARTITIONS:
        assert await stored(emulator.connection_string, each) == expected[each]
    assert not list((tmp_path / "rows~").glob("sink.*/0*"))


async def test_put_of_too_large_an_event_names_its_row(emulator: Emulator, query: Query) -> None:
    """The error names the row; the rows before it are stored."""
    query.shares = lambda *_: ["a", "b", "c" * 2**20, "d"]
    plan = await query.plan(0)
    with pytest.raises(EventTooLargeError) as caught:
        await query.attempt(plan, "0")
    assert caught.value.__notes__ == ["row 2 of the share of partition 0"]
    assert await stored(emulator.connection_string, "0") == ["a", "b"]


async def test_put_of_an_event_with_numbers_names_its_row(emulator: Emulator, query: Query) -> None:
    """A row that was numbered before cannot be published; the error names it, and nothing after it is sent."""
    message = Message(message_annotations={PRODUCER_ID: 1}, body=Data((b"c",)))
    query.shares = lambda *_: ["a", "b", "c", "d"]
    plan = await query.plan(0)

    async def publish() -> None:
        async with PartitionPublishing(query.transport, plan, "0", options=OPTIONS) as publishing:
            await publishing.put(0, [*encoded(["a", "b"]), message.encode(), *encoded(["d"])])
            await publishing.finish()

    with pytest.raises(EventError, match="carries numbers") as caught:
        await publish()
    assert caught.value.__notes__ == ["row 2 of the share of partition 0"]
    assert await stored(emulator.connection_string, "0") == []


async def test_put_of_an_event_above_the_packing_limit_publishes_it(emulator: Emulator, query: Query) -> None:
    """An event beyond the packing limit, and within the service's, is published in order like any other."""
    rows = ["a", "b" * 400_000, "c", "d" * 1_000_000, "e"]
    query.limits = PackingLimits(max_bytes=256 * 1024)
    query.shares = lambda *_: rows
    await query.attempt(await query.plan(0), "0")
    assert await stored(emulator.connection_string, "0") == rows


async def test_put_of_rows_that_fill_no_message_does_not_wait(emulator: Emulator, query: Query) -> None:
    """More rows than the buffer takes that fit one message are taken, and are sent at the end."""
    rows = [f"{row}" * 300 for row in range(30)]
    query.limits, query.shares = PackingLimits(), lambda *_: rows
    assert sum(map(len, rows)) > OPTIONS.buffer_bytes
    await query.attempt(await query.plan(0), "0", portion=2)
    assert await stored(emulator.connection_string, "0") == rows


async def test_put_waits_for_room(emulator: Emulator, query: Query) -> None:
    """Rows are taken as fast as they are stored: with a service that stores nothing, `put` waits."""
    rows = encoded([f"{row}" * 50 for row in range(30)])
    query.shares = lambda *_: [f"{row}" * 50 for row in range(30)]
    plan = await query.plan(0)
    hold = lose(emulator, Hold())
    async with PartitionPublishing(query.transport, plan, "0", options=OPTIONS) as publishing:
        giving = asyncio.create_task(publishing.put(0, rows))
        await hold.until_fired()
        assert not giving.done()
        hold.remove()
        await giving
        assert receipt_of(await publishing.finish()).count == 30


async def test_attempt_that_is_cancelled_ends_at_once(emulator: Emulator, query: Query) -> None:
    """*Tidy close*: cancelled while it waits, an attempt ends at once, and the next one goes on."""
    query.shares = twelve
    plan = await query.plan(0)
    hold = lose(emulator, Hold(), after=1)
    attempt = asyncio.create_task(query.attempt(plan, "0"))
    await hold.until_fired()
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    emulator.drop_connections()
    hold.remove()
    assert receipt_of(await query.attempt(plan, "0")).count == 12
    assert await stored(emulator.connection_string, "0") == twelve(0, "0")


# ------------------------------------------------------------------------------------------------- small batches


async def test_small_batches_keep_their_links(emulator: Emulator, tmp_path: Path) -> None:
    """From batch to batch nothing is attached again; after a batch that tasks published, everything is."""
    async with query_of(emulator.connection_string, tmp_path, shares=twelve, paths=lambda: True) as query:
        await query.run(0)
        transport = query.transport = CountingTransport(query.transport)
        await query.run(1)
        await query.run(2)
        assert transport.attached == []
        query.paths = lambda: False
        await query.run(3)
        transport.attached.clear()
        query.paths = lambda: True
        await query.run(4)
        assert [each.properties[PRODUCER_SEQUENCE_NUMBER] for each in transport.attached] == [None]
    assert await stored(emulator.connection_string, "0") == [row for each in range(5) for row in twelve(each, "0")]


async def test_small_batch_that_is_repeated_looks_first(emulator: Emulator, tmp_path: Path) -> None:
    """*No duplicate*: where anything of the batch may be stored, a kept link is not relied upon."""
    options: dict[str, Any] = {"shares": twelve, "paths": lambda: True}
    async with (
        query_of(emulator.connection_string, tmp_path, **options) as query,
        query_of(emulator.connection_string, tmp_path, **options) as rival,
    ):
        await query.run(0)
        plan = await query.plan(1)
        rival.batch_of = query.batch_of
        await rival.tasks(plan)
        query.is_first = False
        outcomes = await query.tasks(plan)
        assert [receipt_of(each).found for each in outcomes] == [12]
        again = await query.plan(1)
        assert not query.is_first
        assert isinstance(await query.finish(again, outcomes), Done)
    assert await stored(emulator.connection_string, "0") == [row for each in range(2) for row in twelve(each, "0")]


async def test_small_batch_over_a_link_that_was_lost_is_stored_once(emulator: Emulator, tmp_path: Path) -> None:
    """*No duplicate*: a kept link that was lost between two batches, or amid the second, costs nothing but time."""
    async with query_of(emulator.connection_string, tmp_path, shares=twelve, paths=lambda: True) as query:
        await query.run(0)
        emulator.drop_connections()
        await query.run(1)
        lose(emulator, DropConnection(stored=True))
        await query.run(2)
        lose(emulator, DropConnection())
        await query.run(3)
    assert await stored(emulator.connection_string, "0") == [row for each in range(4) for row in twelve(each, "0")]


async def test_outage_is_waited_for_and_its_last_error_raised(emulator: Emulator, query: Query) -> None:
    """*Recovery*: an attempt outlives more failures than `retry` allows, and gives up after `retry_timeout`."""
    query.shares = twelve
    plan = await query.plan(0)
    few = OPTIONS.model_copy(update={"retry": RetryOptions(max_retries=0, base_delay=0.002, max_delay=0.02)})
    fault = lose(emulator, DropConnection(), count=4)
    async with PartitionPublishing(query.transport, plan, "0", options=few) as publishing:
        await publishing.put(0, encoded(twelve(0, "0")))
        assert receipt_of(await publishing.finish()).count == 12
    assert fault.fired == 4
    await query.finish(plan, await query.tasks(plan))
    following = await query.plan(1)
    lose(emulator, DropConnection(), count=None)
    impatient = few.model_copy(update={"retry_timeout": 0.05})
    async with PartitionPublishing(query.transport, following, "0", options=impatient) as publishing:
        await publishing.put(0, encoded(twelve(1, "0")))
        with pytest.raises(EventPumpError) as caught:
            await publishing.finish()
    assert isinstance(caught.value.__cause__ or caught.value, ServiceError)


async def test_two_drivers_of_one_query_end_the_earlier(emulator: Emulator, tmp_path: Path) -> None:
    """*No duplicate*: the later run goes on, and the earlier fails at its next step, with a sentence that says why."""
    async with (
        query_of(emulator.connection_string, tmp_path, shares=twelve) as first,
        query_of(emulator.connection_string, tmp_path, shares=twelve) as second,
    ):
        plan = await first.plan(0)
        outcomes = await first.tasks(plan)
        await second.run(0)
        with pytest.raises(StoreError, match="a later run of this query has begun"):
            await first.finish(plan, outcomes)
        with pytest.raises(StoreError, match="a later run of this query has begun"):
            await first.begin(1)
        await second.run(1)
    assert await stored(emulator.connection_string, "0") == twelve(0, "0") + twelve(1, "0")


# ------------------------------------------------------------------------------------------------- numbers


@asynccontextmanager
async def near_the_wrap(emulator: Emulator, tmp_path: Path, before: int, **options: Any) -> AsyncIterator[Query]:
    """Make a query whose next batch, 1, begins so many numbers before 2^31."""
    async with query_of(emulator.connection_string, tmp_path / "ledger", **options) as query:
        query.shares = twelve
        sequencer = PartitionSequencer[SealedBatch]("0", starting_number=NUMBERS - before - 2)
        publisher = PartitionPublisher(query.transport, HUB, sequencer, retry=RETRY, rng=random.Random(1))
        await publisher.send(SealedBatch.seal(encoded(["before"]), idempotent=True))
        await publisher.aclose()
        assert sequencer.producer_id is not None
        assert sequencer.owner_level is not None
        done = Done(
            sink=sink_of(query.transport.fully_qualified_namespace, HUB, "sink"),
            query_id="query",
            run_id="run",
            batch_id=0,
            partitions=(
                PartitionDone(
                    partition_id="0",
                    producer_id=sequencer.producer_id,
                    owner_level=sequencer.owner_level,
                    next_number=NUMBERS - before,
                    nothing=0,
                    is_fresh=False,
                    tail=0,
                    count=1,
                    first_number=NUMBERS - before - 1,
                ),
            ),
            receipts=(),
        )
        await query.store.create(f"sink/{done_name(0)}", encode_record(done))
        yield query


@pytest.mark.parametrize("action", [DropConnection(), DropConnection(stored=True)], ids=["lost", "stored"])
@pytest.mark.parametrize("before", [3, 7, 9])
async def test_attempt_wraps_numbers_to_zero(emulator: Emulator, tmp_path: Path, before: int, action: Action) -> None:
    """*No duplicate*: after 2147483647 comes 0, in a message, between two, and for an attempt that comes later."""
    async with near_the_wrap(emulator, tmp_path, before, renew_at=NUMBERS) as query:
        plan = await query.plan(1)
        with pytest.raises(KilledError):
            await query.attempt(plan, "0", killed_at=1)
        lose(emulator, action)
        receipt = receipt_of(await query.attempt(plan, "0"))
        assert (receipt.first_number, receipt.last_number) == (NUMBERS - before, 11 - before)
        assert isinstance(await query.finish(plan, [receipt]), Done)
        await query.run(2)
    assert await stored(emulator.connection_string, "0") == ["before", *twelve(1, "0"), *twelve(2, "0")]


async def test_plan_near_the_wrap_takes_a_new_producer(emulator: Emulator, tmp_path: Path) -> None:
    """Near 2^31 the service assigns a new producer, and numbers start over."""
    async with near_the_wrap(emulator, tmp_path, 9) as query:
        done = await query.run(1)
        assert [(each.first_number, each.last_number) for each in done.receipts] == [(1, 12)]
    assert await stored(emulator.connection_string, "0") == ["before", *twelve(1, "0")]


async def test_plan_of_the_next_batch_takes_added_partitions(emulator: Emulator, query: Query) -> None:
    """A batch keeps the partitions of its plan; the next one has those that came."""
    plan = await query.plan(0)
    await emulator.add_partitions(HUB, 2)
    assert await query.plan(0) == plan
    await query.run(0)
    following = await query.plan(1)
    assert following.partition_ids == ("0", "1", "2", "3", "4", "5")
    assert [each.is_fresh for each in following.partitions][4:] == [True, True]
    await query.run(1)
    assert await stored(emulator.connection_string, "4") == share(1, "4")


# ------------------------------------------------------------------------------------------------- lost states


async def publish_others(emulator: Emulator, *rows: str) -> None:
    """Let another producer publish to partition 0."""
    async with EventProducer(emulator.connection_string, HUB, retry=RETRY, **CONNECTION) as producer:
        await producer.send([EventData(row) for row in rows], partition_id="0")


async def stamps(emulator: Emulator) -> list[tuple[str, object]]:
    """Read the bodies and stamps that partition 0 holds."""
    reader = PartitionReader(emulator.connection_string, HUB, partition_id="0", end="@latest", **CONNECTION)
    async with reader:
        return [(event.body_as_str(), event.properties.get(STAMP)) async for event in reader]


@pytest.mark.parametrize("directly", [False, True])
@pytest.mark.parametrize("accept_unknown_producers", [False, True], ids=["refused", "as new"])
@pytest.mark.parametrize("is_first_batch", [False, True])
@pytest.mark.parametrize("portions", [0, 1])
async def test_tail_scan_of_a_forgotten_producer_publishes_rows_once(
    emulator: Emulator,
    tmp_path: Path,
    portions: int,
    is_first_batch: bool,
    accept_unknown_producers: bool,
    directly: bool,
) -> None:
    """*No loss and no duplicate* by `scan`: stamps show what is stored, whatever the service forgets, and when."""
    options: dict[str, Any] = {"policy": SCAN, "is_stamped": True, "shares": twelve, "paths": lambda: directly}
    async with query_of(emulator.connection_string, tmp_path, **options) as query:
        batch_id = 0
        if not is_first_batch:
            await query.run(0)
            batch_id = 1
        plan = await query.plan(batch_id, is_small=directly)
        await publish_others(emulator, "other")
        if portions:
            await a_part(query, plan)
        await publish_others(emulator, "another")
        emulator.forget_producers(HUB, accept_unknown_producers=accept_unknown_producers)
        done = await query.run(batch_id)
        await query.run(batch_id + 1)
    is_seen = not accept_unknown_producers or not is_first_batch or bool(portions)
    assert done.receipts[0].offset == 7 * portions
    assert done.partitions[0].owner_level == (1 if accept_unknown_producers and is_seen else 0)
    found = [each for each in await stamps(emulator) if each[1] is not None]
    assert found == [(f"{b}.{row}", f"sink:{b}:0:{row}") for b in range(batch_id + 2) for row in range(12)]


@pytest.mark.parametrize("is_stamped", [False, True])
async def test_tail_of_a_forgotten_fresh_producer_is_checked(
    emulator: Emulator, tmp_path: Path, is_stamped: bool
) -> None:
    """A first batch whose rows are stored and forgotten looks new to the service; the hub's tail shows it."""
    async with query_of(emulator.connection_string, tmp_path, is_stamped=is_stamped, shares=twelve) as query:
        plan = await query.plan(0)
        await publish_others(emulator, "other")
        await query.attempt(plan, "0")
        emulator.forget_producers(HUB, accept_unknown_producers=True)
        outcome = await query.attempt(plan, "0")
        assert lost_of(outcome).reason is LossReason.UNCOUNTED
        with pytest.raises(ProducerStateLostError, match="partition 0"):
            await query.finish(plan, [outcome])
        assert isinstance(await query.begin(0), Plan)
    assert await stored(emulator.connection_string, "0") == ["other", *twelve(0, "0")]


async def test_tail_of_rows_with_nan_is_checked(emulator: Emulator, query: Query) -> None:
    """A row whose property is no number is found in the hub, although it does not equal itself as a value."""
    query.shares = lambda *_: ["a"]
    plan = await query.plan(0)
    row = EventData("a", properties={"q": 1.5, "p": float("nan")}).encode(None)

    async def publish() -> PartitionOutcome:
        async with PartitionPublishing(query.transport, plan, "0", options=OPTIONS) as publishing:
            await publishing.put(0, [row])
            return await publishing.finish()

    await publish()
    emulator.forget_producers(HUB, accept_unknown_producers=True)
    assert lost_of(await publish()).reason is LossReason.UNCOUNTED
    assert await stored(emulator.connection_string, "0") == ["a"]


async def test_tail_with_events_of_others_is_no_loss(emulator: Emulator, query: Query) -> None:
    """Events of others since the plan, alike or not, are no reason to fail where they are not the row itself."""
    query.shares = twelve
    plan = await query.plan(0)
    await publish_others(emulator, "0.00", "0.1", "0.2")
    assert isinstance(await query.finish(plan, [await query.attempt(plan, "0")]), Done)


async def test_attempts_of_a_plan_that_was_taken_over_store_nothing(emulator: Emulator, tmp_path: Path) -> None:
    """*Fencing*: attempts and late messages of the plan before are refused, and the rest is published once."""
    async with query_of(emulator.connection_string, tmp_path, policy=SCAN, is_stamped=True, shares=twelve) as query:
        plan = await query.plan(0)
        late = lose(emulator, StoreLate(), after=1)
        zombie = asyncio.create_task(query.attempt(plan, "0"))
        await late.until_fired()
        revised = await query.finish(plan, [StateLost(partition_id="0", reason=LossReason.UNKNOWN, stored=0)])
        assert isinstance(revised, Plan)
        late.remove()
        (outcome,) = await asyncio.gather(zombie, return_exceptions=True)
        assert isinstance(outcome, ProducerDisconnectedError | PartitionReceipt)
        assert isinstance(await query.finish(revised, [await query.attempt(revised, "0")]), Done)
    assert await stored(emulator.connection_string, "0") == twelve(0, "0")


async def test_stamps_name_every_row(emulator: Emulator, tmp_path: Path) -> None:
    """Stamped events carry sink, batch, partition and place, in place of a stamp they had."""
    async with query_of(
        emulator.connection_string, tmp_path, is_stamped=True, shares=lambda *_: ["a", "b"], first_batch=3
    ) as query:
        plan = await query.plan(3)
        events = [EventData("a").encode(None), EventData("b", properties={"x": 1, STAMP: "old"}).encode(None)]
        async with PartitionPublishing(query.transport, plan, "0", options=OPTIONS) as publishing:
            await publishing.put(0, events)
            await publishing.finish()
    assert await stamps(emulator) == [("a", "sink:3:0:0"), ("b", "sink:3:0:1")]


# ------------------------------------------------------------------------------------------------- driver


async def test_plan_at_a_service_without_the_capability_is_refused(query: Query) -> None:
    """A service that answers without producers is found out at planning, before any record or row."""
    batch = query.batch(0)
    with pytest.raises(ConfigurationError, match="offers no idempotent publishing"):
        await prepare_batch(query.stores, PlainTransport(query.transport), batch, OPTIONS)
    assert await query.store.list("sink") == []


class StumblingLedger(DirectoryLedger):
    """A ledger whose calls fail a few times; creates, after they are done."""

    failures = 2

    async def create(self, name: str, body: bytes) -> bool:
        created = await super().create(name, body)
        self.stumble()
        return created

    async def read(self, name: str) -> bytes | None:
        self.stumble()
        return await super().read(name)

    def stumble(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("stumble", "the answer was lost")


async def test_ledger_store_that_fails_is_retried(query: Query, tmp_path: Path) -> None:
    """*Recovery*: a store's failures are borne, and a create whose answer was lost is found to be done."""
    query.shares = twelve
    query.store = store = StumblingLedger(tmp_path / "ledger")
    await store.open()
    plan = await query.plan(0)
    outcomes = await query.tasks(plan)
    store.failures = 3
    assert isinstance(await query.finish(plan, outcomes), Done)
    store.failures = 10**6
    impatient = OPTIONS.model_copy(update={"retry_timeout": 0.05})
    with pytest.raises(StoreError, match="the answer was lost"):
        await prepare_batch(query.stores, query.transport, query.batch(0), impatient)
