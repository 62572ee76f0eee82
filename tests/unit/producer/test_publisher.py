"""One partition's publisher, on virtual time, against a hub in memory that keeps the service's ledger."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from eventpump.amqp.types import Int, Short
from eventpump.core.sequencer import Outcome, PartitionSequencer
from eventpump.errors import (
    ClosedError,
    EventPumpError,
    EventTooLargeError,
    InvalidClientStateError,
    LinkDetachedError,
    ProducerDisconnectedError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    ServiceBusyError,
    ServiceError,
)
from eventpump.eventhubs.conditions import error_for
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import IDEMPOTENT_PRODUCER, PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.sealing import SealedBatch
from eventpump.interfaces import SendLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.producer.publisher import PartitionPublisher
from eventpump.testing.transport import FakeHub, FakePosted, FakeSendLink, FakeTransport, SendFault
from tests.support.seeds import seeds
from tests.unit.producer.awaiting import error_of, idle

RETRY = RetryOptions(max_retries=2, base_delay=1.0, max_delay=8.0)
BEFORE, AFTER, LATE = SendFault.LOST_BEFORE_STORE, SendFault.LOST_AFTER_STORE, SendFault.STORED_LATE
DETACH_FORCED = "amqp:link:detach-forced"
STOLEN = "com.microsoft:producer-epoch-stolen"


def sealed(*bodies: str) -> SealedBatch:
    return SealedBatch.seal([EventData(body).encode() for body in bodies], idempotent=True)


class Scene:
    """A hub of one partition, and publishers to it."""

    def __init__(self) -> None:
        self.hub = FakeHub(partitions=1)
        self.publishers: list[PartitionPublisher] = []
        self.concluded: dict[SealedBatch, int | None] = {}

    def publisher(
        self,
        *,
        transport: FakeTransport | None = None,
        retry: RetryOptions = RETRY,
        **state: Any,
    ) -> PartitionPublisher:
        publisher = PartitionPublisher(
            transport or FakeTransport(self.hub),
            self.hub.name,
            PartitionSequencer("0", **state),
            retry=retry,
            rng=random.Random(1),
            on_concluded=self.conclude,
        )
        self.publishers.append(publisher)
        return publisher

    def conclude(self, batch: SealedBatch, first: int | None) -> None:
        assert batch not in self.concluded, "concluded twice"
        self.concluded[batch] = first

    @property
    def bodies(self) -> list[str]:
        return [event.body_as_str() for event in self.hub.events("0")]

    @property
    def asked(self) -> list[tuple[object, ...]]:
        """What was attached with: nothing, or id, level and number."""
        return [tuple(spec.properties.values()) for spec in self.hub.send_links]

    async def rival(self, of: PartitionPublisher, level: int, number: int | None = None) -> FakeSendLink:
        """Attach with a publisher's id, and another level."""
        properties: dict[str, object] = {
            PRODUCER_ID: of.sequencer.producer_id,
            PRODUCER_EPOCH: Short(level),
            PRODUCER_SEQUENCE_NUMBER: None if number is None else Int(number),
        }
        spec = SendLinkSpec(self.hub.name, "0", properties, (IDEMPOTENT_PRODUCER,))
        return await FakeTransport(self.hub).open_send_link(spec)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """A test's scene. Afterwards, nothing of it runs."""
    scene = Scene()
    yield scene
    for publisher in scene.publishers:
        await publisher.aclose()
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, "a publisher left a task behind"


# ------------------------------------------------------------------------------------------------- publishing


async def test_send_numbers_batches_one_after_the_other(scene: Scene) -> None:
    """The first number follows the service's; each event has one; sends made together keep the order of the calls."""
    publisher = scene.publisher()
    firsts = await asyncio.gather(*(publisher.send(sealed(*bodies)) for bodies in ("ab", "c", "def")))
    assert firsts == [1, 3, 4]
    assert scene.bodies == list("abcdef")
    assert publisher.sequencer.last_number == 6
    assert scene.asked == [()]


async def test_send_sends_one_transfer_at_a_time(scene: Scene) -> None:
    """A second batch leaves only when the outcome of the first is known."""
    publisher = scene.publisher()
    scene.hub.hang("transfer")
    first = asyncio.ensure_future(publisher.send(sealed("a")))
    second = asyncio.ensure_future(publisher.send(sealed("b")))
    await idle()
    assert [run.first for _, run, _ in scene.hub.runs] == [1]
    scene.hub.answer("transfer")
    assert [await first, await second] == [1, 2]


async def test_send_after_the_link_was_lost_while_idle_attaches_again(scene: Scene) -> None:
    """It is attached again for the next batch, with id, level and a null number, and no delay."""
    transport = FakeTransport(scene.hub)
    publisher = scene.publisher(transport=transport)
    await publisher.send(sealed("a"))
    scene.hub.lose_connections()
    before = asyncio.get_running_loop().time()
    assert await publisher.send(sealed("b")) == 2
    assert asyncio.get_running_loop().time() == before
    assert scene.asked == [(), (publisher.sequencer.producer_id, 0, None)]


async def test_send_sends_given_values_with_the_first_attach_only(scene: Scene) -> None:
    """Id, level and starting number are sent first; afterwards the number is null."""
    first = scene.publisher()
    await first.send(sealed("a", "b"))
    known = first.sequencer.producer_id
    other = scene.publisher(producer_id=known, owner_level=1, starting_number=2)
    await other.send(sealed("c"))
    scene.hub.lose(AFTER)
    await other.send(sealed("d"))
    assert scene.asked[1:] == [(known, 1, 2), (known, 1, None)]
    assert (scene.bodies, other.sequencer.last_number) == (list("abcd"), 4)


async def test_send_wraps_numbers_to_zero(scene: Scene) -> None:
    """After 2147483647 comes 0, inside a batch that is settled too."""
    publisher = scene.publisher(starting_number=2**31 - 3)
    scene.hub.lose(BEFORE, after=1)
    scene.hub.lose(AFTER, after=2)
    assert await publisher.send(sealed("a")) == 2**31 - 2
    assert await publisher.send(sealed("b", "c", "d")) == 2**31 - 1
    assert await publisher.send(sealed("e")) == 2
    assert (scene.bodies, publisher.sequencer.last_number) == (list("abcde"), 2)


# ------------------------------------------------------------------------------------------------- settlement


@pytest.mark.parametrize("connection", [False, True], ids=["link", "connection"])
@pytest.mark.parametrize("fault", [BEFORE, AFTER, LATE])
async def test_send_settles_a_lost_transfer(scene: Scene, fault: SendFault, connection: bool) -> None:
    """Lost before or after it was stored, or stored late: published once, under the same numbers, before the next."""
    publisher = scene.publisher()
    await publisher.send(sealed("a"))
    scene.hub.lose(fault, connection=connection)
    firsts = await asyncio.gather(*(publisher.send(batch) for batch in (sealed("b", "c"), sealed("d"))))
    assert firsts == [2, 4]
    scene.hub.deliver_late()
    assert await publisher.send(sealed("e")) == 5
    assert scene.bodies == list("abcde")


async def test_send_whose_attach_answers_its_last_number_is_stored(scene: Scene) -> None:
    """Where the attach answers the batch's last number, it is stored, and not sent again."""
    publisher = scene.publisher()
    scene.hub.lose(AFTER, after=1)
    await publisher.send(sealed("a"))
    await publisher.send(sealed("b"))
    assert len(scene.hub.runs) == 2


async def test_send_whose_attach_answers_an_earlier_number_is_repeated(scene: Scene) -> None:
    """Where the attach answers the number before its first, the same bytes go out with the same numbers."""
    publisher = scene.publisher()
    scene.hub.lose(BEFORE)
    await publisher.send(sealed("a", "b"))
    assert [run.first for _, run, _ in scene.hub.runs] == [1, 1]
    assert scene.hub.runs[0] == scene.hub.runs[1]


async def test_send_with_a_late_transfer_before_the_repeat_is_settled(scene: Scene) -> None:
    """Refused as out of order though it seemed unstored: attached once more, the answer shows that it is stored."""
    publisher = scene.publisher()
    scene.hub.lose(LATE)
    sending = asyncio.ensure_future(publisher.send(sealed("a")))
    await idle()
    scene.hub.hang("credit")
    await asyncio.sleep(10)
    assert len(scene.hub.send_links) == 2
    scene.hub.deliver_late()
    # A service that remembers fewer batches than ours would not know the repeat.
    scene.hub.refuse(error_for("com.microsoft:out-of-order-sequence", "an old number"), operation="transfer")
    scene.hub.answer("credit")
    assert await sending == 1
    assert (len(scene.hub.send_links), scene.bodies) == (3, ["a"])


async def test_send_waits_while_another_batch_is_in_doubt(scene: Scene) -> None:
    """A batch in doubt stays at the head; another waits though its predecessor's caller has gone."""
    publisher = scene.publisher()
    scene.hub.lose(BEFORE)
    doubtful = sealed("a")
    sending = asyncio.ensure_future(publisher.send(doubtful))
    await idle()
    assert publisher.doubtful is doubtful
    scene.hub.refuse(LinkDetachedError("away"), operation="send", times=8)
    assert isinstance(await error_of(sending), PublishOutcomeUnknownError)
    other = asyncio.ensure_future(publisher.send(sealed("b")))
    await idle()
    assert {run.first for _, run, _ in scene.hub.runs} == {1}
    assert await other == 2
    assert scene.bodies == ["a", "b"]
    assert scene.concluded[doubtful] == 1


async def test_send_out_of_retries_in_doubt_raises_unknown_outcome(scene: Scene) -> None:
    """It says so, with the cause; the same batch joins, and has its success; the numbers are the same."""
    publisher = scene.publisher()
    batch = sealed("a", "b")
    scene.hub.lose(AFTER)
    sending = asyncio.ensure_future(publisher.send(batch))
    await idle()
    scene.hub.refuse(LinkDetachedError("away"), operation="send", times=3)
    error = await error_of(sending)
    assert isinstance(error, PublishOutcomeUnknownError)
    assert (error.first, error.count) == (1, 2)
    assert isinstance(error.__cause__, LinkDetachedError)
    assert "not known" in str(error)
    assert batch not in scene.concluded
    assert await publisher.send(batch) == 1
    assert (scene.bodies, scene.concluded) == (["a", "b"], {batch: 1})


async def test_send_out_of_retries_not_stored_raises_the_services_error(scene: Scene) -> None:
    """The error is the service's and says that nothing is stored; the batch is free, and its numbers are."""
    publisher = scene.publisher()
    scene.hub.refuse(LinkDetachedError("away"), operation="send", times=3)
    batch = sealed("a")
    error = await error_of(publisher.send(batch))
    assert isinstance(error, LinkDetachedError)
    assert "not stored" in str(error)
    assert scene.concluded == {batch: None}
    assert await publisher.send(sealed("b")) == 1
    assert scene.bodies == ["b"]


async def test_send_to_a_busy_service_waits_then_raises(scene: Scene) -> None:
    """A throttled batch is tried again after four seconds at least, on the same link; then it is known not stored."""
    publisher = scene.publisher()
    busy = error_for("com.microsoft:server-busy", "wait 4 seconds")
    scene.hub.refuse(busy, operation="transfer", times=2)
    started = asyncio.get_running_loop().time()
    assert await publisher.send(sealed("a")) == 1
    assert asyncio.get_running_loop().time() - started >= 8
    scene.hub.refuse(busy, operation="transfer", times=3)
    error = await error_of(publisher.send(sealed("b")))
    assert isinstance(error, ServiceBusyError)
    assert "not stored" in str(error)
    assert await publisher.send(sealed("c")) == 2
    assert (scene.bodies, len(scene.hub.send_links)) == (["a", "c"], 1)


async def test_send_refused_gives_its_numbers_to_the_next(scene: Scene) -> None:
    """Refused for good: raised at once, not stored, and the next batch has its numbers."""
    publisher = scene.publisher()
    scene.hub.refuse(error_for("amqp:not-allowed", "no"), operation="transfer")
    batch = sealed("a", "b")
    error = await error_of(publisher.send(batch))
    assert isinstance(error, RequestRefusedError)
    assert "not stored" in str(error)
    assert await publisher.send(sealed("c")) == 1
    assert (scene.bodies, scene.concluded[batch]) == (["c"], None)


async def test_send_refused_after_a_doubt_keeps_its_numbers(scene: Scene) -> None:
    """A refusal of the repeat says nothing of the first transfer: the batch stays, with its numbers."""
    publisher = scene.publisher()
    scene.hub.lose(LATE)
    sending = asyncio.ensure_future(publisher.send(batch := sealed("a")))
    await idle()
    scene.hub.refuse(error_for("amqp:not-allowed", "no"), operation="transfer")
    assert isinstance(await error_of(sending), PublishOutcomeUnknownError)
    assert publisher.doubtful is batch
    assert scene.hub.deliver_late() == 1
    await publisher.settled()
    assert (scene.bodies, scene.concluded) == (["a"], {batch: 1})


async def test_send_released_is_in_doubt_and_rejected_is_refused(scene: Scene) -> None:
    """A message that is given back is in doubt and settled; one rejected without a reason is refused."""
    publisher = scene.publisher()
    scene.hub.refuse(ServiceError("the service gave the message back"), operation="transfer")
    assert await publisher.send(sealed("a")) == 1
    scene.hub.refuse(RequestRefusedError("rejected without a reason"), operation="transfer")
    assert isinstance(await error_of(publisher.send(sealed("b"))), RequestRefusedError)
    assert publisher.doubtful is None
    assert await publisher.send(sealed("c")) == 2


# ----------------------------------------------------------------------------------------------- cancellation


async def test_send_cancelled_in_the_queue_is_not_sent(scene: Scene) -> None:
    """It is not published, those before and behind are, and the same batch may be sent as new."""
    publisher = scene.publisher()
    scene.hub.hang("transfer")
    batches = [sealed(body) for body in "abc"]
    sends = [asyncio.ensure_future(publisher.send(batch)) for batch in batches]
    await idle()
    sends[1].cancel()
    await idle()
    assert scene.concluded == {batches[1]: None}
    scene.hub.answer("transfer")
    assert [await sends[0], await sends[2]] == [1, 2]
    del scene.concluded[batches[1]]
    assert await publisher.send(batches[1]) == 3
    assert scene.bodies == ["a", "c", "b"]


@pytest.mark.parametrize("operation", ["send", "credit"], ids=["attaching", "waiting for credit"])
async def test_send_cancelled_before_the_first_byte_is_not_sent(scene: Scene, operation: str) -> None:
    """It is not published, has no numbers, and the next batch has them."""
    publisher = scene.publisher()
    scene.hub.hang(operation)
    batch = sealed("never")
    sending = asyncio.ensure_future(publisher.send(batch))
    await idle()
    sending.cancel()
    assert isinstance(await error_of(sending), asyncio.CancelledError)
    assert scene.concluded == {batch: None}
    other = asyncio.ensure_future(publisher.send(sealed("a")))
    scene.hub.answer(operation)
    assert await other == 1
    assert scene.bodies == ["a"]


async def test_send_cancelled_while_it_waits_for_credit_lets_those_behind_it_be_sent(scene: Scene) -> None:
    """They are sent when credit comes; and a close in the same turn leaves nothing to be sent."""
    publisher = scene.publisher()
    await publisher.attached()
    scene.hub.hang("credit")
    sending, behind = (asyncio.ensure_future(publisher.send(sealed(body))) for body in "ab")
    await idle()
    sending.cancel()
    await idle()
    assert not behind.done()
    scene.hub.answer("credit")
    assert await behind == 1
    scene.hub.hang("credit")
    last = asyncio.ensure_future(publisher.send(sealed("c")))
    await idle()
    last.cancel()
    await asyncio.sleep(0)
    await publisher.aclose()
    scene.hub.answer("credit")
    await idle()
    assert isinstance(await error_of(last), asyncio.CancelledError)
    assert scene.bodies == ["b"]


async def test_send_whose_link_is_cancelled_by_itself_is_tried_again(scene: Scene) -> None:
    """A link that raises CancelledError, where nothing has cancelled the publisher, has failed: one attempt."""
    publisher = scene.publisher()
    await publisher.attached()
    sent, calls = FakeSendLink.send, 0

    async def send(self: FakeSendLink, message: bytes, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 4 != 3:
            raise asyncio.CancelledError
        await sent(self, message, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeSendLink, "send", send)
        assert await publisher.send(sealed("a")) == 1
        calls = 3
        with pytest.raises(ServiceError, match="cancelled by what it waited for"):
            await asyncio.wait_for(publisher.send(sealed("b")), 3600)
    assert calls == 6
    assert scene.bodies == ["a"]


async def test_send_cancelled_as_credit_comes_is_not_sent_or_settled(scene: Scene) -> None:
    """Cancelled in the same turn of the loop in which it could leave: either it never leaves, or it is settled."""
    publisher = scene.publisher()
    for turns in range(-4, 10):
        scene.hub.hang("credit")
        batch = sealed(f"{turns}")
        sending = asyncio.ensure_future(publisher.send(batch))
        await idle()
        steps: list[Callable[[], object]] = [lambda: scene.hub.answer("credit"), sending.cancel]
        for step in steps if turns >= 0 else reversed(steps):
            step()
            for _ in range(abs(turns)):
                await asyncio.sleep(0)
        await asyncio.gather(sending, return_exceptions=True)
        await publisher.settled()
        first = scene.concluded[batch]
        assert (f"{turns}" in scene.bodies) is (first is not None)
    assert {type(first) for first in scene.concluded.values()} == {int, type(None)}
    assert await publisher.send(sealed("last")) == len(scene.bodies)


@pytest.mark.parametrize("fault", [None, BEFORE, AFTER, LATE])
async def test_send_cancelled_while_sent_is_in_doubt_and_settled(scene: Scene, fault: SendFault | None) -> None:
    """It is in doubt, keeps its numbers, and is settled by itself; the next batch waits for that."""
    publisher = scene.publisher()
    scene.hub.hang("transfer")
    if fault is not None:
        scene.hub.lose(fault)
    batch = sealed("a", "b")
    sending = asyncio.ensure_future(publisher.send(batch))
    await idle()
    sending.cancel()
    assert isinstance(await error_of(sending), asyncio.CancelledError)
    assert publisher.doubtful is batch
    other = asyncio.ensure_future(publisher.send(sealed("c")))
    await idle()
    scene.hub.answer("transfer")
    assert await other == 3
    scene.hub.deliver_late()
    assert (scene.bodies, scene.concluded[batch]) == (list("abc"), 1)


@pytest.mark.parametrize("condition", ["amqp:not-allowed", "com.microsoft:server-busy"])
async def test_send_cancelled_while_sent_and_refused_is_not_stored(scene: Scene, condition: str) -> None:
    """It is concluded at once, as not stored; `settled` returns, and the publisher goes on."""
    publisher = scene.publisher()
    scene.hub.hang("transfer")
    scene.hub.refuse(error_for(condition, "no"), operation="transfer")
    batch = sealed("a")
    sending = asyncio.ensure_future(publisher.send(batch))
    await idle()
    sending.cancel()
    await idle()
    settling = asyncio.ensure_future(publisher.settled())
    await idle()
    scene.hub.answer("transfer")
    await idle()
    assert scene.concluded == {batch: None}
    assert settling.done()
    assert await publisher.send(sealed("b")) == 1
    assert scene.bodies == ["b"]


async def test_send_joined_and_refused_is_not_stored(scene: Scene) -> None:
    """Cancelled, sent again, and then refused: the second caller gets that it is not stored, and `settled` returns."""
    publisher = scene.publisher()
    scene.hub.hang("transfer")
    scene.hub.refuse(error_for("com.microsoft:server-busy", "no"), operation="transfer")
    batch = sealed("a")
    sending = asyncio.ensure_future(publisher.send(batch))
    await idle()
    sending.cancel()
    await idle()
    joined = asyncio.ensure_future(publisher.send(batch))
    settling = asyncio.ensure_future(publisher.settled())
    await idle()
    scene.hub.answer("transfer")
    assert "not stored" in str(await error_of(joined))
    await settling
    assert scene.concluded == {batch: None}


async def test_send_joined_and_cancelled_stays_in_doubt(scene: Scene) -> None:
    """A caller that joined and is cancelled changes nothing: it stays in doubt until it is settled."""
    publisher = scene.publisher()
    scene.hub.lose(BEFORE)
    batch = sealed("a")
    sending = asyncio.ensure_future(publisher.send(batch))
    await idle()
    sending.cancel()
    await idle()
    joined = asyncio.ensure_future(publisher.send(batch))
    await idle()
    joined.cancel()
    await idle()
    assert publisher.doubtful is batch
    await publisher.settled()
    assert (scene.bodies, scene.concluded) == (["a"], {batch: 1})


@pytest.mark.parametrize("is_late", [False, True])
async def test_send_cancelled_before_the_repeat_stays_in_doubt(scene: Scene, is_late: bool) -> None:
    """Cancelled after the look, before the repeat leaves: the old transfer may still come, so it stays in doubt."""
    publisher = scene.publisher()
    scene.hub.lose(LATE)
    sending = asyncio.ensure_future(publisher.send(batch := sealed("a")))
    await idle()
    scene.hub.hang("credit")
    await asyncio.sleep(10)
    assert len(scene.hub.send_links) == 2
    sending.cancel()
    await idle()
    assert publisher.doubtful is batch
    other = asyncio.ensure_future(publisher.send(sealed("b")))
    await idle()
    if is_late:
        scene.hub.deliver_late()
    scene.hub.answer("credit")
    assert await other == 2
    scene.hub.deliver_late()
    assert (scene.bodies, scene.concluded[batch]) == (["a", "b"], 1)


async def test_send_of_one_batch_by_two_callers_is_shared(scene: Scene) -> None:
    """They have one success; one cancelled leaves the other its own, queued and on its way."""
    publisher = scene.publisher()
    scene.hub.hang("transfer")
    batches = [sealed("a"), sealed("b")]
    sends = [asyncio.ensure_future(publisher.send(batch)) for batch in batches for _ in range(3)]
    await idle()
    sends[0].cancel()
    sends[3].cancel()
    await idle()
    assert not scene.concluded
    scene.hub.answer("transfer")
    assert [await each for each in (*sends[1:3], *sends[4:])] == [1, 1, 2, 2]
    assert scene.bodies == ["a", "b"]


# -------------------------------------------------------------------------------------------------- failures


async def test_send_with_an_invented_id_is_refused(scene: Scene) -> None:
    """The attach is refused; the error says so, each time, and nothing is in doubt."""
    publisher = scene.publisher(producer_id=100, owner_level=100, starting_number=100)
    for _ in range(2):
        assert isinstance(await error_of(publisher.send(sealed("a"))), RequestRefusedError)
        assert isinstance(await error_of(publisher.attached()), RequestRefusedError)
    assert publisher.doubtful is None


async def test_send_fenced_at_the_attach_is_final(scene: Scene) -> None:
    """A higher level took over while there was no link: final, for this batch, those behind it, and later ones."""
    publisher = scene.publisher()
    await publisher.send(sealed("a"))
    await scene.rival(publisher, 1)
    scene.hub.lose_connections()
    errors = await asyncio.gather(*(error_of(publisher.send(sealed(body))) for body in "bc"))
    errors.append(await error_of(publisher.send(sealed("d"))))
    errors.append(await error_of(publisher.attached()))
    assert all(isinstance(error, ProducerDisconnectedError) for error in errors)
    assert set(scene.concluded.values()) == {1, None}
    assert publisher.doubtful is None


async def test_send_fenced_by_the_outcome_is_final_and_not_stored(scene: Scene) -> None:
    """Rejected as stolen: final, and known not to be stored."""
    publisher = scene.publisher()
    await publisher.send(sealed("a"))
    await scene.rival(publisher, 1)
    error = await error_of(publisher.send(batch := sealed("b")))
    assert isinstance(error, ProducerDisconnectedError)
    assert "not stored" in str(error)
    assert scene.concluded[batch] is None
    assert isinstance(await error_of(publisher.send(sealed("c"))), ProducerDisconnectedError)
    assert scene.bodies == ["a"]


async def test_send_fenced_by_the_detach_is_final_and_in_doubt(scene: Scene) -> None:
    """The link ends as stolen with a transfer out: final at once, and that batch stays in doubt."""
    transport = FakeTransport(scene.hub)
    publisher = scene.publisher(transport=transport)
    scene.hub.hang("transfer")
    sending = asyncio.ensure_future(publisher.send(batch := sealed("a")))
    await idle()
    transport.lose(error_for(STOLEN, "a higher epoch"))
    error = await error_of(sending)
    assert isinstance(error, ProducerDisconnectedError)
    assert "not known" in str(error)
    assert publisher.doubtful is batch
    assert isinstance(await error_of(publisher.settled()), ProducerDisconnectedError)
    assert len(scene.hub.send_links) == 1


async def test_send_whose_link_ends_for_good_is_settled(scene: Scene) -> None:
    """A link that ends for good with a transfer out says nothing of it: in doubt, and settled."""
    transport = FakeTransport(scene.hub)
    publisher = scene.publisher(transport=transport)
    scene.hub.hang("transfer")
    sending = asyncio.ensure_future(publisher.send(batch := sealed("a")))
    await idle()
    scene.hub.answer("transfer")
    transport.lose(error_for("com.microsoft:entity-disabled", "disabled"))
    assert isinstance(await error_of(sending), PublishOutcomeUnknownError)
    assert publisher.doubtful is batch
    await publisher.settled()
    assert (scene.bodies, scene.concluded) == (["a"], {batch: 1})


async def test_send_out_of_order_without_a_doubt_is_final(scene: Scene) -> None:
    """Out of order with nothing in doubt: the state is invalid, now and always, and the batch is not stored."""
    publisher = scene.publisher()
    await publisher.send(sealed("a", "b", "c"))
    stale = scene.publisher(producer_id=publisher.sequencer.producer_id, owner_level=0, starting_number=1)
    batch = sealed("x")
    for each in (batch, sealed("y")):
        assert isinstance(await error_of(stale.send(each)), InvalidClientStateError)
    assert isinstance(await error_of(stale.attached()), InvalidClientStateError)
    assert scene.concluded[batch] is None
    assert scene.bodies == ["a", "b", "c"]


async def test_send_whose_attach_answers_neither_number_is_final(scene: Scene) -> None:
    """Another publisher used our numbers: the attach shows it, and no batch is sent."""
    publisher = scene.publisher()
    await publisher.send(sealed("a"))
    twin = scene.publisher(producer_id=publisher.sequencer.producer_id, owner_level=0)
    await twin.send(sealed("x", "y"))
    scene.hub.lose_connections()
    assert isinstance(await error_of(publisher.send(sealed("b"))), InvalidClientStateError)
    assert len(scene.hub.runs) == 2


async def test_send_of_too_large_a_message_is_refused(scene: Scene) -> None:
    """It is refused with its size before anything leaves; the publisher goes on."""
    scene.hub.max_message_size = 500
    publisher = scene.publisher()
    batch = sealed("x" * 600)
    error = await error_of(publisher.send(batch))
    assert isinstance(error, EventTooLargeError)
    assert (error.size, error.limit) == (batch.size, 500)
    assert scene.concluded == {batch: None}
    sending = asyncio.ensure_future(publisher.send(sealed("y" * 600)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    sending.cancel()
    await idle()
    assert await publisher.send(sealed("a")) == 1


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("detached", [False, True])
async def test_send_that_the_service_refuses_as_too_large_leaves_no_doubt(
    scene: Scene, *, detached: bool, lost: bool
) -> None:
    """Its numbers are free, also where the refusal ends the link, or an earlier transfer was lost."""

    links: list[FakeSendLink] = []

    class Strict(FakeHub):
        def store(self, payload: bytes, *args: Any, **options: Any) -> None:
            if len(payload) > 500:
                if detached:
                    links[-1].end(EventTooLargeError(len(payload)))
                raise EventTooLargeError(len(payload))
            super().store(payload, *args, **options)

    class Noting(FakeTransport):
        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            links.append(await super().open_send_link(spec))
            return links[-1]

    scene.hub = Strict()
    publisher = scene.publisher(transport=Noting(scene.hub))
    batch = sealed("x" * 600)
    if lost:
        scene.hub.lose(BEFORE)
    error = await error_of(publisher.send(batch))
    assert isinstance(error, EventTooLargeError)
    assert error.limit is None
    assert (scene.concluded, publisher.doubtful) == ({batch: None}, None)
    assert [await publisher.send(sealed("a")), await publisher.send(sealed("b"))] == [1, 2]


async def test_send_whose_link_ends_at_every_attach_uses_up_its_tries(scene: Scene) -> None:
    """Attaching again and again counts as tries, with delays between them."""

    class Fleeting(FakeTransport):
        is_bad = True

        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            link = await super().open_send_link(spec)
            if self.is_bad:
                link.end(LinkDetachedError("gone", condition=DETACH_FORCED))
            return link

    transport = Fleeting(scene.hub)
    publisher = scene.publisher(transport=transport)
    async with asyncio.timeout(60):
        error = await error_of(publisher.send(sealed("a")))
    assert isinstance(error, LinkDetachedError)
    assert len(scene.hub.send_links) == 3
    transport.is_bad = False
    assert await publisher.send(sealed("b")) == 1


async def test_attached_has_tries_of_its_own(scene: Scene) -> None:
    """`attached` fails after its own retries, also behind a batch that used up its own."""
    publisher = scene.publisher()
    scene.hub.refuse(LinkDetachedError("away"), operation="send", times=100)
    sending = asyncio.ensure_future(publisher.send(sealed("a")))
    await idle()
    waiting = asyncio.ensure_future(publisher.attached())
    assert isinstance(await error_of(sending), LinkDetachedError)
    assert isinstance(await error_of(waiting), LinkDetachedError)
    assert len(scene.hub.send_links) == 0
    scene.hub.accept()
    await publisher.attached()


async def test_send_shared_is_given_up_after_the_newest_callers_tries(scene: Scene) -> None:
    """A caller that joins late has all its tries, and the first one waits as long."""
    scene.hub.refuse(LinkDetachedError("away"), operation="send", times=10_000)
    loop = asyncio.get_running_loop()
    lasted: list[float] = []
    for joins in (False, True):
        publisher, batch, began = scene.publisher(), sealed("a"), loop.time()
        sends = [asyncio.ensure_future(publisher.send(batch))]
        if joins:
            await asyncio.sleep(0.9 * lasted[0])
            sends.append(asyncio.ensure_future(publisher.send(batch)))
        await asyncio.wait(sends, return_when=asyncio.FIRST_COMPLETED)
        await idle()
        assert all(isinstance(send.exception(), LinkDetachedError) for send in sends)
        lasted.append(loop.time() - began)
    assert lasted[1] > 1.5 * lasted[0]


async def test_unexpected_exception_fails_every_caller(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A mistake in the driver is raised to all who wait, is logged, and is the cause of what later callers get."""

    class Mistaken(FakeTransport):
        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            raise KeyError("a mistake")

    publisher = scene.publisher(transport=Mistaken(scene.hub))
    with caplog.at_level(logging.CRITICAL, "eventpump.producer"):
        uses: list[Awaitable[object]] = [publisher.send(sealed("a")), publisher.send(sealed("b")), publisher.attached()]
        errors = await asyncio.gather(*map(error_of, uses))
    assert [type(error) for error in errors] == [KeyError] * 3
    later = await error_of(publisher.send(sealed("c")))
    assert isinstance(later, ClosedError)
    assert isinstance(later.__cause__, KeyError)
    assert list(scene.concluded.values()) == [None, None]


async def test_unexpected_exception_while_sending_leaves_the_batch_in_doubt(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """What was on its way is in doubt, not refused; `settled` raises, as it cannot be settled."""

    class Mistaken(FakeTransport):
        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            if self.hub.send_links:
                raise KeyError("a mistake")
            return await super().open_send_link(spec)

    publisher = scene.publisher(transport=Mistaken(scene.hub))
    scene.hub.lose(BEFORE)
    with caplog.at_level(logging.CRITICAL, "eventpump.producer"):
        error = await error_of(publisher.send(batch := sealed("a")))
    assert isinstance(error, PublishOutcomeUnknownError)
    assert publisher.doubtful is batch
    assert isinstance(await error_of(publisher.settled()), ClosedError)


@pytest.mark.parametrize("error", [KeyError("a mistake"), asyncio.CancelledError("a mistake")], ids=repr)
@pytest.mark.parametrize("outcome", ["stored", "withdrawn"])
async def test_unexpected_exception_in_a_report_fails_what_is_queued_and_later(
    scene: Scene, caplog: pytest.LogCaptureFixture, outcome: str, error: BaseException
) -> None:
    """Whoever has called it: what was stored is a success, what waits gets the error, and later callers its cause."""
    publisher = scene.publisher()
    await publisher.attached()
    scene.hub.hang("transfer" if outcome == "stored" else "credit")
    sends = [asyncio.ensure_future(publisher.send(sealed(body))) for body in "abc"]
    await idle()
    errors = [error]

    def conclude(batch: SealedBatch, first: int | None) -> None:
        if errors:
            raise errors.pop()

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.CRITICAL, "eventpump.producer"):
        patch.setattr(publisher, "_on_concluded", conclude)
        if outcome == "stored":
            scene.hub.answer("transfer")
            assert await asyncio.wait_for(sends[0], 60) == 1
        else:
            sends[0].cancel()
            assert isinstance(await error_of(sends[0]), asyncio.CancelledError)
        for send in sends[1:]:
            assert str(error) in str(await error_of(asyncio.wait_for(send, 60)))
        later = await error_of(publisher.send(sealed("d")))
        assert isinstance(later, ClosedError)
        assert later.__cause__ is error


async def test_link_that_fails_with_an_unexpected_exception_fails_every_caller(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake in a transport is raised to who waits, and nothing of the batch is sent later."""
    publisher = scene.publisher()
    await publisher.attached()

    async def mistaken(self: FakeSendLink, message: bytes, **options: Any) -> None:
        raise KeyError("a mistake")

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.CRITICAL, "eventpump.producer"):
        patch.setattr(FakeSendLink, "send", mistaken)
        errors = await asyncio.gather(*(error_of(asyncio.wait_for(publisher.send(sealed(each)), 60)) for each in "ab"))
    assert [type(error) for error in errors] == [KeyError] * 2
    assert isinstance(await error_of(publisher.send(sealed("c"))), ClosedError)
    assert scene.bodies == []


# --------------------------------------------------------------------------------------------- settle and close


async def test_settled_looks_at_once(scene: Scene) -> None:
    """A task that settles does not wait for the end of a long delay between two looks."""
    publisher = scene.publisher()
    scene.hub.lose(BEFORE)
    sending = asyncio.ensure_future(publisher.send(sealed("a")))
    await idle()
    scene.hub.refuse(LinkDetachedError("away"), operation="send", times=6)
    assert isinstance(await error_of(sending), PublishOutcomeUnknownError)
    scene.hub.accept()
    started = asyncio.get_running_loop().time()
    await publisher.settled()
    assert asyncio.get_running_loop().time() == started


async def test_settled_that_is_cancelled_affects_no_other(scene: Scene) -> None:
    """Another task that settles is notified; with nothing in doubt it returns at once."""
    publisher = scene.publisher()
    await publisher.settled()
    scene.hub.hang("transfer")
    sending = asyncio.ensure_future(publisher.send(sealed("a")))
    await idle()
    sending.cancel()
    await idle()
    doubtful = publisher.doubtful
    assert doubtful is not None
    settling = [asyncio.ensure_future(publisher.settled()) for _ in range(2)]
    await idle()
    assert not any(each.done() for each in settling)
    settling[0].cancel()
    scene.hub.answer("transfer")
    await settling[1]
    assert settling[0].cancelled()
    assert publisher.doubtful is None
    assert scene.bodies == ["a"]


async def test_close_fails_unsent_and_reports_sent_as_unknown(scene: Scene) -> None:
    """What was not sent fails as closed, what is out as unknown; later use is refused; closing twice is fine."""
    publisher = scene.publisher()
    scene.hub.hang("transfer")
    batches = [sealed(body) for body in "ab"]
    sends = [asyncio.ensure_future(publisher.send(batch)) for batch in batches]
    await idle()
    await publisher.aclose()
    await idle()
    running = asyncio.all_tasks() - {asyncio.current_task(), *sends}
    assert not [task for task in running if "FakeSendLink.send" in repr(task) or "publisher" in task.get_name()]
    await publisher.aclose()
    errors = [await error_of(each) for each in sends]
    assert [type(error) for error in errors] == [PublishOutcomeUnknownError, ClosedError]
    assert publisher.doubtful is batches[0]
    assert scene.concluded == {batches[1]: None}
    for use in (publisher.send(sealed("c")), publisher.attached(), publisher.settled()):
        assert isinstance(await error_of(use), ClosedError)


async def test_close_as_the_answer_comes_counts_it(scene: Scene) -> None:
    """An answer that arrived counts, whenever the publisher is closed."""
    seen = set()
    for turns in range(20):
        publisher = scene.publisher()
        await publisher.attached()
        batch = sealed(f"{turns}")
        sending = asyncio.ensure_future(publisher.send(batch))
        for _ in range(turns):
            await asyncio.sleep(0)
        await publisher.aclose()
        outcome = (await asyncio.gather(sending, return_exceptions=True))[0]
        seen.add(type(outcome))
        if isinstance(outcome, int):
            assert f"{turns}" in scene.bodies
        elif isinstance(outcome, PublishOutcomeUnknownError):
            assert publisher.doubtful is batch
        else:
            assert isinstance(outcome, ClosedError)
            assert f"{turns}" not in scene.bodies
    assert seen == {int, PublishOutcomeUnknownError, ClosedError}


async def test_close_in_the_same_turn_as_the_answer_counts_it(scene: Scene) -> None:
    """An answer that was heard counts, though the publisher is closed before the caller runs."""
    closing: list[asyncio.Task[None]] = []

    class Closing(FakeSendLink):
        def post(
            self, message: bytes, on_outcome: Callable[[BaseException | None], None], **options: Any
        ) -> FakePosted:
            def ended(error: BaseException | None) -> None:
                closing.append(asyncio.ensure_future(publisher.aclose()))
                on_outcome(error)

            return super().post(message, ended, **options)

    class ClosingTransport(FakeTransport):
        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            return Closing(self, spec)

    publisher = scene.publisher(transport=ClosingTransport(scene.hub))
    assert await publisher.send(batch := sealed("a")) == 1
    await closing[0]
    assert (publisher.doubtful, scene.concluded) == (None, {batch: 1})


async def test_drained_waits_for_what_was_sent(scene: Scene) -> None:
    """What is out has its answer, what waits fails as closed, and nothing more is taken."""
    publisher = scene.publisher()
    scene.hub.hang("transfer")
    sends = [asyncio.ensure_future(publisher.send(sealed(body))) for body in "ab"]
    await idle()
    draining = asyncio.ensure_future(publisher.drained())
    await idle()
    assert isinstance(await error_of(sends[1]), ClosedError)
    assert isinstance(await error_of(publisher.send(sealed("c"))), ClosedError)
    assert not draining.done()
    scene.hub.answer("transfer")
    await draining
    assert (await sends[0], scene.bodies) == (1, ["a"])


@pytest.mark.parametrize("operation", ["send", "credit"])
async def test_drained_fails_what_was_not_sent(scene: Scene, operation: str) -> None:
    """Attaching, or waiting for credit: it fails as closed, at once."""
    publisher = scene.publisher()
    scene.hub.hang(operation)
    sending = asyncio.ensure_future(publisher.send(batch := sealed("a")))
    await idle()
    await publisher.drained()
    assert isinstance(await error_of(sending), ClosedError)
    assert scene.concluded == {batch: None}


# ------------------------------------------------------------------------------------------------- everything


@seeds(10, of=400)
async def test_send_stores_every_event_once_and_in_order_in_any_history(scene: Scene, seed: int) -> None:
    """Batches under every fault, cancelled and sent again: exactly once, in order, and no number for two events."""
    rng = random.Random(seed)
    start = rng.choice([None, None, 2**31 - 20])
    transport = FakeTransport(scene.hub)
    retry = RetryOptions(max_retries=2, base_delay=0.02, max_delay=0.2)
    publisher = scene.publisher(transport=transport, starting_number=start, retry=retry)
    hub = scene.hub
    hub.latency = 0.01

    async def disturb() -> None:
        for _ in range(40):
            await asyncio.sleep(rng.expovariate(10.0))
            what = rng.randrange(7)
            if what < 3:
                hub.lose(rng.choice([BEFORE, AFTER, LATE]), connection=rng.random() < 0.5)
            elif what == 3:
                hub.deliver_late()
            elif what == 4:
                hub.refuse(LinkDetachedError("away"), operation="send", times=rng.randrange(1, 5))
            elif what == 5:
                hub.refuse(error_for("com.microsoft:server-busy", "wait"), operation="transfer")
            else:
                hub.lose_connections()

    async def publish(batch: SealedBatch) -> None:
        while True:
            sending = asyncio.ensure_future(publisher.send(batch))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0, 0.1))
                sending.cancel()
            try:
                await sending
                return
            except (PublishOutcomeUnknownError, asyncio.CancelledError, ServiceError):
                # As an application does that cares: again, until it is known.
                if scene.concluded.get(batch) is not None:
                    return
                if batch in scene.concluded:
                    del scene.concluded[batch]

    disturbing = asyncio.ensure_future(disturb())
    expected: list[str] = []
    for number in range(30):
        bodies = [f"{number}.{index}" for index in range(rng.randrange(1, 6))]
        expected += bodies
        await publish(sealed(*bodies))
    disturbing.cancel()
    hub.accept()
    hub.deliver_late()
    await publisher.settled()
    assert scene.bodies == expected
    stamped: dict[int, bytes] = {}
    for _, run, events in hub.runs:
        for index, event in enumerate(events):
            number = (run.first + index) % 2**31
            assert stamped.setdefault(number, event) == event, "a number was given to two different events"
    assert publisher.sequencer.head is None or publisher.sequencer.head.outcome is not Outcome.UNKNOWN


def test_errors_of_publishing_have_one_base() -> None:
    """What publishing raises has one base."""
    for kind in (PublishOutcomeUnknownError, InvalidClientStateError, ProducerDisconnectedError):
        assert issubclass(kind, EventPumpError)
