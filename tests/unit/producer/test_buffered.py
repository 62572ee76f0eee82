"""Single events in batches: room, order, receipts, and that every accepted event ends once."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import pickle
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.amqp.message import Data, Message
from eventpump.core.router import StickyRouter
from eventpump.errors import (
    BufferFullError,
    ClosedError,
    ConfigurationError,
    EventError,
    EventTooLargeError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    ServiceError,
)
from eventpump.eventhubs.codecs import EventEncoding
from eventpump.eventhubs.envelope import decode_batch
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.eventhubs.numbering import NUMBERS
from eventpump.eventhubs.sealing import SealedBatch, pieces
from eventpump.options.base import RetryOptions
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.intake import DeliveryReceipt, SendResult
from eventpump.producer.producer import HubProducer
from eventpump.testing.clock import VirtualTimeLoop
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.inside import published
from tests.support.seeds import seeds

MIB = 1024 * 1024
REFUSED = RequestRefusedError("refused by the test")
Step = Callable[[], Any]


class ScriptedProducer(HubProducer):
    """Takes sealed batches as a test says: at once, later, or not at all.

    Attributes:
        sent: What was stored, per partition and batch.
        script: The outcomes of the next batches, per partition: an error to raise, or seconds to take first.
        held: Partitions that answer nothing until they are released.
    """

    def __init__(
        self,
        partitions: int = 4,
        *,
        idempotent: bool = False,
        limit: int = MIB,
        first: int = 0,
        encode: EventEncoding | None = None,
    ) -> None:
        self.transport = FakeTransport(FakeHub(partitions=partitions))
        super().__init__(self.transport, "telemetry", idempotent=idempotent, encode=encode)
        self.limit = limit
        self.sent: defaultdict[str, list[list[bytes]]] = defaultdict(list)
        self.script: defaultdict[str, list[Exception | float]] = defaultdict(list)
        self.held: dict[str, asyncio.Event] = {}
        self.in_flight: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.calls: list[tuple[str, SealedBatch]] = []
        self.next: defaultdict[str, int] = defaultdict(lambda: first)
        self.is_shut = asyncio.Event()
        self.close_deadlines: list[float | None] = []
        self.on_stored: Step = lambda: None  # runs in the step in which the batch ends, just before it does

    def hold(self, *partition_ids: str) -> None:
        for partition_id in partition_ids:
            self.held[partition_id] = asyncio.Event()

    def release(self, partition_id: str) -> None:
        self.held.pop(partition_id).set()

    def bodies(self, partition_id: str) -> list[str]:
        return [text(raw) for batch in self.sent[partition_id] for raw in batch]

    def everything(self) -> list[str]:
        return [body for partition_id in list(self.sent) for body in self.bodies(partition_id)]

    async def send_sealed(self, sealed: SealedBatch, *, partition_id: str | None) -> int | None:
        assert partition_id is not None
        self.calls.append((partition_id, sealed))
        self.in_flight[partition_id] += 1
        self.peak[partition_id] = max(self.peak[partition_id], self.in_flight[partition_id])
        try:
            return await self._take(sealed, partition_id)
        finally:
            self.in_flight[partition_id] -= 1

    async def _take(self, sealed: SealedBatch, partition_id: str) -> int | None:
        if self.is_shut.is_set():
            raise ClosedError("producer")
        if sealed.size > self.limit:
            raise EventTooLargeError(sealed.size, self.limit)
        while self.script[partition_id]:
            step = self.script[partition_id].pop(0)
            if isinstance(step, Exception):
                raise step
            await asyncio.sleep(step)
        if (held := self.held.get(partition_id)) is not None:
            waits = [asyncio.ensure_future(held.wait()), asyncio.ensure_future(self.is_shut.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if not held.is_set():
                raise PublishOutcomeUnknownError(partition_id, None, sealed.count)
        first = self.next[partition_id]
        message = sealed.numbered(1, 0, first) if sealed.is_idempotent else sealed.message
        self.sent[partition_id].append(decode_batch(message))
        self.next[partition_id] = (first + sealed.count) % NUMBERS
        self.on_stored()
        return first if sealed.is_idempotent else None

    async def aclose(self, deadline: float | None = None) -> None:
        self.is_shut.set()
        self.close_deadlines.append(deadline)
        await super().aclose(deadline)


@dataclass
class Reported:
    """What the callbacks were called with."""

    successes: list[tuple[list[EventData], str]] = field(default_factory=list)
    errors: list[tuple[list[EventData], str, Exception]] = field(default_factory=list)

    def success(self, events: Sequence[EventData], partition_id: str) -> None:
        self.successes.append((list(events), partition_id))

    def error(self, events: Sequence[EventData], partition_id: str, error: Exception) -> None:
        self.errors.append((list(events), partition_id, error))


def text(raw: bytes) -> str:
    body = Message.decode(raw).body
    assert isinstance(body, Data)
    return body.parts[0].decode()


def size_of(encoded: bytes, *, idempotent: bool = False) -> int:
    """Return what an encoded event adds to a batch, in bytes."""
    return sum(map(len, pieces(encoded, idempotent=idempotent)))


def event(body: object = "x") -> EventData:
    return EventData(str(body))


def buffered(
    service: HubProducer | None = None, reported: Reported | None = None, **options: Any
) -> HubBufferedProducer:
    settings = {name: options.pop(name) for name in BufferSettings.model_fields if name in options}
    if reported is not None:
        options |= {"on_success": reported.success, "on_error": reported.error}
    return HubBufferedProducer(service or ScriptedProducer(), BufferSettings(**settings), **options)


def now() -> float:
    return asyncio.get_running_loop().time()


# ---------------------------------------------------------------------------------------------------- batching


async def test_batch_full_by_count_is_sent_at_once() -> None:
    """The event that makes a batch full has it sent without waiting for the time to pass."""
    service = ScriptedProducer()
    async with buffered(service, max_batch_events=3, max_wait_time=60) as producer:
        start = now()
        receipts = [await producer.send(event(each), partition_id="0") for each in "abc"]
        assert await receipts[0] == SendResult("0", None)
        assert now() == start
        assert [[text(raw) for raw in batch] for batch in service.sent["0"]] == [["a", "b", "c"]]


async def test_batch_full_by_bytes_is_sent_at_once() -> None:
    """A batch never gets larger than the bound, and is sent when the next event would make it so."""
    service = ScriptedProducer()
    size = size_of(EventData(b"x" * 100).encode())
    async with buffered(service, max_batch_bytes=3 * size, max_wait_time=60) as producer:
        start = now()
        receipts = [await producer.send(EventData(b"x" * 100), partition_id="0") for _ in range(4)]
        await receipts[2]
        assert now() == start
        assert [len(batch) for batch in service.sent["0"]] == [3]
    assert [len(batch) for batch in service.sent["0"]] == [3, 1]


async def test_batch_is_sent_when_its_first_event_has_waited() -> None:
    """Age counts from the first event of the batch; five milliseconds unless configured otherwise."""
    service = ScriptedProducer()
    async with buffered(service) as producer:
        start = now()
        first = await producer.send(event(), partition_id="0")
        await asyncio.sleep(0.004)
        second = await producer.send(event(), partition_id="0")
        await first
        assert second.done()
        assert now() - start == pytest.approx(0.005)


async def test_batches_of_all_partitions_share_one_timer() -> None:
    """However many partitions wait, the loop has one timer of ours, and each batch goes when it is due."""
    service = ScriptedProducer(partitions=16)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with buffered(service, max_wait_time=1) as producer:
        receipts, sent_at = [], []
        for number in range(16):
            receipts.append(await producer.send(event(), partition_id=str(number)))
            sent_at.append(now())
            timers = [each for each in loop._scheduled if not each.cancelled()]  # type: ignore[attr-defined] # private
            assert len(timers) == 1
            await asyncio.sleep(0.01)
        for receipt, at in zip(receipts, sent_at, strict=True):
            await receipt
            assert now() == pytest.approx(at + 1)


async def test_send_of_many_events_makes_no_task_per_event() -> None:
    """A thousand events make no more tasks than there are partitions."""
    async with buffered(max_batch_events=10) as producer:
        before = len(asyncio.all_tasks())
        most = 0
        for number in range(1000):
            await producer.send(event(number))
            most = max(most, len(asyncio.all_tasks()) - before)
        assert 0 < most <= 4


async def test_send_without_a_pause_does_not_delay_batches() -> None:
    """A task that does nothing but send does not keep what is ready from being sent: neither the full nor the old."""
    service = ScriptedProducer()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with buffered(service, max_batch_events=10) as producer:
        for number in range(40):
            await producer.send(event(number), partition_id="0")
        assert len(service.calls) >= 2
    service = ScriptedProducer()
    async with buffered(service) as producer:
        for number in range(40):
            await producer.send(event(number), partition_id=str(number % 4))
            loop.advance(0.001)
        assert len(service.calls) > 4


async def test_sends_keep_their_order_while_others_run() -> None:
    """A send that begins while others let the loop run stays behind them, though nothing is due any more."""
    service = ScriptedProducer()
    async with buffered(service, max_batch_events=2, max_wait_time=60) as producer:

        async def second() -> None:
            await asyncio.sleep(0)
            await producer.send(event("third"), partition_id="0")

        for _ in range(2):
            await producer.send(event("full"), partition_id="0")
        await asyncio.gather(
            producer.send(event("first"), partition_id="0"), second(), producer.send(event("second"), partition_id="0")
        )
    assert service.bodies("0") == ["full", "full", "first", "second", "third"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="there is no eager task factory")
async def test_send_with_an_eager_task_factory_returns_a_receipt_that_ends() -> None:
    """What sends begins after the event was accepted, also where the loop begins each task at once."""
    reported = Reported()
    asyncio.get_running_loop().set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009  # as of 3.12
    async with asyncio.timeout(60), buffered(reported=reported, max_batch_events=1) as producer:
        receipt = producer.send_nowait(event(), partition_id="0")
        assert not reported.successes
        assert await receipt == SendResult("0", None)
        assert await producer.send_and_wait(event(), partition_id="0") == SendResult("0", None)


async def test_flush_returns_when_everything_accepted_has_its_outcome() -> None:
    """After a flush every receipt made before it is done, whether its batch was waiting or on its way."""
    service = ScriptedProducer()
    service.script["1"] = [3.0]
    service.script["2"] = [REFUSED]
    async with buffered(service, on_error=Reported().error, max_wait_time=60) as producer:
        receipts = [await producer.send(event(), partition_id=each) for each in "0123"]
        start = now()
        await producer.flush()
        assert all(receipt.done() for receipt in receipts)
        assert now() - start == pytest.approx(3)
        await producer.flush()
        assert producer.buffered_events == producer.buffered_bytes == 0


# ------------------------------------------------------------------------------------------------------ receipts


async def test_receipt_that_is_cancelled_affects_no_other() -> None:
    """A wait that is cancelled or timed out ends alone; its event and the others of the batch go on."""
    service = ScriptedProducer()
    service.hold("0")
    async with buffered(service) as producer:
        receipts = [await producer.send(event(each), partition_id="0") for each in "abc"]
        waits = [asyncio.ensure_future(receipt) for receipt in receipts]
        await asyncio.sleep(1)
        waits[0].cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receipts[1], 1)
        assert waits[0].cancelled()
        assert not any(wait.done() for wait in waits[1:])
        assert len(receipts[0]._batch.waiters) == 2
        last = asyncio.ensure_future(receipts[2])
        service.on_stored = last.cancel  # just as its batch ends
        await asyncio.sleep(1)
        service.release("0")
        assert await asyncio.gather(*receipts, *waits[1:]) == [SendResult("0", None)] * 5
        assert last.cancelled()


@pytest.mark.parametrize("is_known", [False, True])
async def test_copy_of_a_receipt_is_the_receipt(*, is_known: bool) -> None:
    """In both builds: it has the outcome of its one event, also in a copy of what holds it."""
    async with buffered(ScriptedProducer()) as producer:
        receipt = await producer.send(event(), partition_id="0")
        if is_known:
            await receipt
        assert copy.copy(receipt) is receipt
        assert copy.deepcopy([receipt, {"a": receipt}]) == [receipt, {"a": receipt}]
        assert await copy.deepcopy(receipt) == SendResult("0", None)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
async def test_receipt_cannot_be_pickled_and_its_result_can(protocol: int) -> None:
    """In both builds, with an error that says what to do."""
    async with buffered(ScriptedProducer()) as producer:
        receipt = await producer.send(event(), partition_id="0")
        with pytest.raises(TypeError, match="await the receipt, and pickle the SendResult"):
            pickle.dumps(receipt, protocol)
        result = await receipt
        with pytest.raises(TypeError, match="await the receipt, and pickle the SendResult"):
            pickle.dumps(receipt, protocol)
        assert pickle.loads(pickle.dumps(result, protocol)) == result == SendResult("0", None)


async def test_receipt_can_be_awaited_many_times() -> None:
    """Many tasks wait for one receipt, before and after its outcome, and all get it; its state can be read."""
    service = ScriptedProducer()
    service.script["0"] = [1.0, REFUSED]
    async with buffered(service, on_error=Reported().error) as producer:
        receipt = await producer.send(event(), partition_id="0")
        assert not receipt.done()
        assert repr(receipt) == "DeliveryReceipt(partition 0, pending)"
        results = await asyncio.gather(*(_outcome(receipt) for _ in range(3)))
        assert results == [REFUSED] * 3
        assert receipt.done()
        assert await _outcome(receipt) is REFUSED
        assert repr(receipt) == "DeliveryReceipt(partition 0, failed)"
        assert receipt.partition_id == "0"


async def test_failure_of_a_dropped_receipt_reaches_on_error_only() -> None:
    """Receipts that are dropped leave the loop's exception handler alone."""
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    service, reported = ScriptedProducer(), Reported()
    service.script["0"] = [REFUSED]
    async with buffered(service, reported) as producer:
        sent = event()
        await producer.send(sent, partition_id="0")
        await producer.flush()
    gc.collect()
    await asyncio.sleep(0)
    assert reported.errors == [([sent], "0", REFUSED)]
    assert not reported.successes
    assert not seen


async def test_failure_of_a_dropped_receipt_is_logged_without_on_error(caplog: pytest.LogCaptureFixture) -> None:
    """Without on_error, a failure that no receipt is awaited for is logged, and an awaited one is not."""
    service = ScriptedProducer()
    service.script["0"] = [REFUSED, REFUSED]
    with caplog.at_level(logging.ERROR, "eventpump.producer"):
        async with buffered(service) as producer:
            assert await _outcome(await producer.send(event(), partition_id="0")) is REFUSED
            assert not caplog.records
            await producer.send(event(), partition_id="0")
            await producer.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "partition 0: 1 events were not sent: refused by the test"
    ]


async def test_callbacks_get_the_events_of_each_message_in_order() -> None:
    """on_success is called with the very objects that were sent, and with their partition."""
    reported = Reported()
    events = [event(number) for number in range(5)]
    async with buffered(reported=reported, max_batch_events=3) as producer:
        for each in events:
            await producer.send(each, partition_id="2")
    assert reported.successes == [(events[:3], "2"), (events[3:], "2")]


async def test_callback_that_raises_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    """An error in a callback is logged; the receipt and the batches that follow are not concerned."""

    def fail(*_: object) -> None:
        raise RuntimeError("callback")

    async with buffered(on_success=fail, max_batch_events=1) as producer:
        assert await producer.send_and_wait(event(), partition_id="0") == SendResult("0", None)
        assert await producer.send_and_wait(event(), partition_id="0") == SendResult("0", None)
    assert caplog.text.count("RuntimeError: callback") == 2


@pytest.mark.parametrize("name", ["on_success", "on_error"])
def test_callback_that_is_a_coroutine_function_is_refused(name: str) -> None:
    """What would never be awaited is refused when given."""

    async def callback(*_: object) -> None: ...

    options: dict[str, Any] = {name: callback}
    with pytest.raises(ConfigurationError, match=name):
        HubBufferedProducer(ScriptedProducer(), None, **options)


# ------------------------------------------------------------------------------------------------------- routing


async def test_send_with_a_key_goes_where_the_service_routes_it() -> None:
    """Buffered events and gateway sends of one key are in one partition, and readers see the key of both."""
    hub = FakeHub(partitions=7)
    keys = [f"key{number}" for number in range(40)] + ["", "é"]
    plain = HubProducer(FakeTransport(hub), "telemetry")
    async with HubBufferedProducer(HubProducer(FakeTransport(hub), "telemetry")) as producer:
        for key in keys:
            await producer.send(EventData("buffered"), partition_key=key)
            await plain.send(EventData("gateway"), partition_key=key)
    await plain.aclose()
    places: defaultdict[str | None, list[tuple[str, str]]] = defaultdict(list)
    for partition_id in hub.partition_ids:
        for each in hub.events(partition_id):
            places[each.partition_key].append((partition_id, each.body_as_str()))
    assert set(places) == set(keys)
    for key in keys:
        found = places[key]
        assert sorted(body for _, body in found) == ["buffered", "gateway"]
        assert {partition for partition, _ in found} == {str(partition_for_key(key, 7))}


@pytest.mark.parametrize("properties", [None, {"a": 1}])
async def test_send_with_a_key_encodes_as_any_other_sender(properties: dict[str, Any] | None) -> None:
    """The key's annotation stands where `EventData.encode` puts it, byte for byte."""
    service = ScriptedProducer()
    sent = EventData("body", properties=properties, content_type="text/plain")
    async with buffered(service) as producer:
        receipt = await producer.send(sent, partition_key="k")
    assert service.sent[receipt.partition_id] == [[sent.encode("k")]]


async def test_send_without_a_key_is_round_robin() -> None:
    """Partitions get equally many."""
    service = ScriptedProducer()
    async with buffered(service) as producer:
        for number in range(12):
            await producer.send(event(number))
    assert {partition_id: len(service.bodies(partition_id)) for partition_id in "0123"} == dict.fromkeys("0123", 3)


async def test_send_with_a_router_goes_where_it_decides() -> None:
    """A router sees the event, the key and the partitions, and an explicit partition goes past it."""
    asked: list[tuple[str | None, tuple[str, ...]]] = []

    class Last:
        def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
            asked.append((partition_key, tuple(partition_ids)))
            return partition_ids[-1]

    async with buffered(router=Last()) as producer:
        assert (await producer.send(event(), partition_key="k")).partition_id == "3"
        assert (await producer.send(event())).partition_id == "3"
        assert (await producer.send(event(), partition_id="1")).partition_id == "1"
    assert asked == [("k", ("0", "1", "2", "3")), (None, ("0", "1", "2", "3"))]


async def test_sticky_router_fills_a_batch_before_it_moves_on() -> None:
    """By full batches, by age, and by a flush; each partition gets its turn."""
    service = ScriptedProducer()
    async with buffered(service, router=StickyRouter(), max_batch_events=10, max_wait_time=60.0) as producer:
        for number in range(45):
            await producer.send(event(number))
        await producer.flush()
        await producer.send(event(45))
        await producer.flush()
    sizes = {partition_id: [len(batch) for batch in service.sent[partition_id]] for partition_id in "0123"}
    assert sizes == {"0": [10, 5], "1": [10, 1], "2": [10], "3": [10]}


async def test_sticky_router_does_not_wait_for_a_full_partition() -> None:
    """Where one partition answers nothing, events without key go to the others."""
    service = ScriptedProducer()
    service.hold("0")
    async with buffered(
        service, router=StickyRouter(), max_batch_events=5, max_partition_events=10, max_wait_time=0.01
    ) as producer:
        for number in range(60):
            await asyncio.wait_for(producer.send(event(number)), 5)
        await asyncio.sleep(1)
        assert sum(len(service.bodies(partition_id)) for partition_id in "123") >= 50
        service.held.pop("0").set()


async def test_router_whose_batch_ended_raises_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged; a timer's call of it ends no sender."""

    class Raises(StickyRouter):
        def batch_ended(self, partition_id: str) -> None:
            raise asyncio.CancelledError(partition_id)

    service = ScriptedProducer()
    async with buffered(service, router=Raises(), max_batch_events=3) as producer:
        receipts = [await producer.send(event(number)) for number in range(10)]
        await asyncio.sleep(1)
        for receipt in receipts:
            await receipt
    assert len(service.bodies("0")) == 10
    assert "batch_ended failed" in caplog.text


async def test_send_to_an_invalid_target_is_refused() -> None:
    """A partition that the hub lacks, two targets at once, a key that is no text: nothing is accepted."""

    class Lost:
        def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
            return "9"

    async with buffered() as producer, buffered(router=Lost()) as lost:
        with pytest.raises(ConfigurationError, match="no partition '9'"):
            await producer.send(event(), partition_id="9")
        with pytest.raises(ConfigurationError, match="along with"):
            await producer.send(event(), partition_id="0", partition_key="k")
        with pytest.raises(EventError, match="is text"):
            await producer.send(event(), partition_key=7)  # type: ignore[call-overload] # the point of the test
        with pytest.raises(EventError, match="surrogate"):
            await producer.send(event(), partition_key="\ud800")
        with pytest.raises(ConfigurationError, match="129 characters"):
            await producer.send(event(), partition_key="k" * 129)
        with pytest.raises(ConfigurationError, match="129 characters"):
            producer.send_nowait(event(), partition_key="k" * 129)
        with pytest.raises(ConfigurationError, match="router"):
            await lost.send(event())
        assert producer.buffered_events == lost.buffered_events == 0


# ---------------------------------------------------------------------------------------------------------- room


async def test_send_waits_for_room_and_send_nowait_raises() -> None:
    """A full buffer holds `send` up until something has ended, and `send_nowait` raises, having taken nothing."""
    service = ScriptedProducer(partitions=1)
    service.hold("0")
    async with buffered(service, max_events=3) as producer:
        for _ in range(3):
            producer.send_nowait(event(), partition_id="0")
        with pytest.raises(BufferFullError) as full:
            producer.send_nowait(event(), partition_id="0")
        assert (full.value.partition_id, full.value.events) == ("0", 3)
        assert full.value.held == producer.buffered_bytes == 3 * full.value.size
        waiting = asyncio.ensure_future(producer.send(event("late"), partition_id="0"))
        await asyncio.sleep(10)
        assert not waiting.done()
        assert producer.buffered_events == 3
        service.release("0")
        assert await (await waiting) == SendResult("0", None)
    assert service.bodies("0") == ["x", "x", "x", "late"]


async def test_sends_that_wait_get_room_in_their_order() -> None:
    """First come, first served, and no call overtakes a waiting one: neither a smaller event nor a later call."""
    service = ScriptedProducer(partitions=1)
    service.hold("0")
    async with buffered(service, max_events=2) as producer:
        for _ in range(2):
            await producer.send(event(), partition_id="0")
        waiting = [asyncio.ensure_future(producer.send(event(each), partition_id="0")) for each in range(6)]
        await asyncio.sleep(1)
        waiting[2].cancel()
        service.release("0")
        await asyncio.wait(waiting)
        await producer.flush()
    assert service.bodies("0") == ["x", "x", "0", "1", "3", "4", "5"]


async def test_send_with_room_granted_is_not_overtaken() -> None:
    """One given room that has not run yet is overtaken by no send that begins in that moment."""
    service = ScriptedProducer(partitions=1)
    service.hold("0")
    late: list[asyncio.Task[DeliveryReceipt]] = []

    def begin() -> None:
        if not late:
            late.append(asyncio.create_task(producer.send(event("late"), partition_id="0")))

    def intrude(*_: object) -> None:
        if len(service.sent["0"]) == 1:
            with pytest.raises(BufferFullError):
                producer.send_nowait(event("intruder"), partition_id="0")

    service.on_stored = begin
    async with buffered(service, max_events=2, on_success=intrude) as producer:
        for each in ("a", "b"):
            await producer.send(event(each), partition_id="0")
        waiting = asyncio.ensure_future(producer.send(event("waits"), partition_id="0"))
        await asyncio.sleep(1)
        service.release("0")
        await waiting
        await late[0]
    assert service.bodies("0") == ["a", "b", "waits", "late"]


async def test_send_of_a_small_event_does_not_overtake_a_large_one() -> None:
    """Where a large event waits for room, a smaller one that would fit waits too; where that one goes, it is let in."""
    service = ScriptedProducer(partitions=1)
    service.hold("0")
    async with buffered(service, max_bytes=1000) as producer:
        await producer.send(EventData(b"f" * 500), partition_id="0")
        large = asyncio.ensure_future(producer.send(EventData(b"l" * 800), partition_id="0"))
        small = asyncio.ensure_future(producer.send(event("small"), partition_id="0"))
        await asyncio.sleep(1)
        with pytest.raises(BufferFullError):
            producer.send_nowait(event(), partition_id="0")
        assert not small.done()
        large.cancel()
        await asyncio.wait([small], timeout=1)
        assert small.done()
        service.release("0")
    assert service.bodies("0") == ["f" * 500, "small"]


async def test_sends_that_fit_together_are_admitted_at_once() -> None:
    """The room of a batch of two goes to two who wait, though nothing else ends."""
    service = ScriptedProducer(partitions=1)
    service.hold("0")
    service.script["0"] = [1.0]
    async with buffered(service, max_events=2) as producer:
        for _ in range(2):
            await producer.send(event(), partition_id="0")
        waiting = [asyncio.ensure_future(producer.send(event(), partition_id="0")) for _ in range(3)]
        await asyncio.sleep(2)
        service.on_stored = lambda: service.hold("0")
        service.release("0")
        await asyncio.sleep(1)
        assert [each.done() for each in waiting] == [True, True, False]
        service.on_stored = lambda: None
        service.release("0")
        await asyncio.wait(waiting)


async def test_sends_to_other_partitions_get_common_room_that_is_released() -> None:
    """What waits for a share of the common room gets it when another partition has ended."""
    service = ScriptedProducer(partitions=2)
    service.hold("0", "1")
    async with buffered(service, max_events=8) as producer:
        for partition_id, count in (("0", 6), ("1", 2)):
            for _ in range(count):
                producer.send_nowait(event(), partition_id=partition_id)
        waiting = asyncio.ensure_future(producer.send(event(), partition_id="1"))
        await asyncio.sleep(1)
        assert not waiting.done()
        service.release("0")
        await asyncio.wait([waiting], timeout=1)
        assert waiting.done()
        service.release("1")


async def test_send_cancelled_with_room_granted_passes_it_on() -> None:
    """A send without key that is cancelled as its room is ready leaves the room to the next."""
    service = ScriptedProducer(partitions=1)
    service.hold("0")

    def cancel(*_: object) -> None:
        roaming[0].cancel()

    async with buffered(service, max_events=1, on_success=cancel) as producer:
        await producer.send(event())
        roaming = [asyncio.ensure_future(producer.send(event(each))) for each in range(2)]
        await asyncio.sleep(1)
        service.release("0")
        await asyncio.wait(roaming)
        assert roaming[0].cancelled()
    assert service.bodies("0") == ["x", "1"]


async def test_close_while_room_is_granted_takes_it_back() -> None:
    """A send that has its room and finds the producer closed raises, and leaves nothing."""
    service = ScriptedProducer(partitions=1)
    service.hold("0")
    closing: list[asyncio.Task[None]] = []
    service.on_stored = lambda: closing.append(asyncio.create_task(producer.aclose()))
    producer = buffered(service, max_events=1)
    await producer.send(event(), partition_id="0")
    waiting = asyncio.ensure_future(producer.send(event(), partition_id="0"))
    await asyncio.sleep(1)
    service.release("0")
    with pytest.raises(ClosedError):
        await waiting
    await closing[0]
    assert producer.buffered_events == 0
    assert service.bodies("0") == ["x"]


async def test_send_that_is_cancelled_was_not_accepted() -> None:
    """Cancelled while it waits, or just as its room is ready, it leaves nothing, and its room goes to the next."""
    service = ScriptedProducer(partitions=1)
    reported = Reported()
    service.hold("0")
    async with buffered(service, reported, max_events=1) as producer:
        await producer.send(event("first"), partition_id="0")
        first = asyncio.ensure_future(producer.send(event("cancelled early"), partition_id="0"))
        second = asyncio.ensure_future(producer.send(event("cancelled late"), partition_id="0"))
        third = asyncio.ensure_future(producer.send(event("third"), partition_id="0"))
        await asyncio.sleep(1)
        first.cancel()

        def cancel(*_: object) -> None:
            second.cancel()  # the room has been given to it, and it has not run since

        producer._on_success = cancel
        service.release("0")
        await asyncio.wait([first, second, third])
        assert first.cancelled()
        assert second.cancelled()
        await producer.flush()
        assert producer.buffered_events == 0
        producer.send_nowait(event("fourth"), partition_id="0")
    assert service.bodies("0") == ["first", "third", "fourth"]


async def test_buffer_that_is_full_sends_before_max_wait_time() -> None:
    """With nothing to be gained by waiting, what is buffered is sent, however long `max_wait_time` is."""
    service = ScriptedProducer()
    async with buffered(service, max_events=4, max_wait_time=3600) as producer:
        start = now()
        sends = [asyncio.ensure_future(producer.send(event(number))) for number in range(20)]
        keyed = [asyncio.ensure_future(producer.send(event(number), partition_key="k")) for number in range(20)]
        await asyncio.wait([*sends, *keyed])
        assert now() == start
        for number in range(20):
            await producer.send(event(number))
        for number in range(20):
            await producer.send(event(number), partition_key="k")
        assert now() == start
    assert len(service.everything()) == 80


async def test_partition_that_is_slow_delays_no_other() -> None:
    """With one partition stuck and its room used up, the others send on, however many events they get."""
    service = ScriptedProducer()
    service.hold("0")
    async with buffered(service, max_events=80) as producer:
        stuck = [asyncio.ensure_future(producer.send(event(), partition_id="0")) for _ in range(200)]
        await asyncio.sleep(1)
        for number in range(500):
            await producer.send(event(number), partition_id=str(1 + number % 3))
        assert not service.sent["0"]
        assert sum(each.done() for each in stuck) >= 10
        for partition_id in "123":
            await (await producer.send(event("last"), partition_id=partition_id))
        service.release("0")
        await asyncio.wait(stuck)
    assert len(service.everything()) == 703


async def test_send_without_a_key_passes_a_partition_without_room() -> None:
    """They go to whichever partition has room, and one that waits for any is let in by whichever ends first."""
    service = ScriptedProducer()
    service.hold("0")
    async with buffered(service, max_events=16) as producer:
        for number in range(100):
            receipt = await producer.send(event(number))
            if number >= 50:
                assert receipt.partition_id != "0"
        await asyncio.gather(*(producer.flush(), _later(1, lambda: service.release("0"))))
        service.hold(*"0123")
        for _ in range(16):
            producer.send_nowait(event())
        with pytest.raises(BufferFullError):
            producer.send_nowait(event())
        roaming = [asyncio.ensure_future(producer.send(event())) for _ in range(3)]
        await asyncio.sleep(1)
        roaming[0].cancel()
        service.release("2")
        done, pending = await asyncio.wait(roaming, timeout=1)
        assert not pending
        assert sum(isinstance(each.result(), DeliveryReceipt) for each in done if not each.cancelled()) == 2
        for partition_id in "013":
            service.release(partition_id)


class ByContent:
    """Sends an event to the partition that the first character of its body names."""

    def route(self, event: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
        return _name(event)[0]


async def test_sends_by_a_router_keep_their_order_behind_a_partition_in_doubt() -> None:
    """One that waits for a partition in doubt holds up only its own: the others are let in, and are not overtaken."""
    service = ScriptedProducer(partitions=2)
    service.hold("0", "1")
    async with buffered(service, router=ByContent(), max_partition_events=2) as producer:
        for each in ("0a", "0b", "1a", "1b"):
            await producer.send(event(each))
        waiting = [asyncio.ensure_future(producer.send(event(each))) for each in ("0c", "1c", "1d", "0d", "1e")]
        await asyncio.sleep(1)
        before = [each.done() for each in waiting]
        service.release("1")
        await asyncio.sleep(1)
        after = [each.done() for each in waiting]
        waiting.append(asyncio.ensure_future(producer.send(event("1f"))))
        await asyncio.sleep(1)
        service.release("0")
        await asyncio.wait(waiting)
    assert (before, after) == ([False] * 5, [False, True, True, False, True])
    assert service.bodies("1") == ["1a", "1b", "1c", "1d", "1e", "1f"]
    assert service.bodies("0") == ["0a", "0b", "0c", "0d"]


async def test_partition_bounds_hold_in_events_and_bytes() -> None:
    """A partition takes no more than its own bound, in events and in bytes, while others have room."""
    service = ScriptedProducer()
    service.hold("0", "1")
    size = size_of(event().encode())
    async with (
        buffered(service, max_partition_events=3) as by_events,
        buffered(service, max_partition_bytes=2 * size) as by_bytes,
    ):
        for producer, room in ((by_events, 3), (by_bytes, 2)):
            for _ in range(room):
                producer.send_nowait(event(), partition_id="0")
            with pytest.raises(BufferFullError):
                producer.send_nowait(event(), partition_id="0")
            producer.send_nowait(event(), partition_id="1")
        service.release("0")
        service.release("1")


async def test_buffer_without_room_for_each_partition_is_refused() -> None:
    """A buffer that cannot hold one event of every partition is refused when the partitions are known."""
    producer = buffered(ScriptedProducer(partitions=8), max_events=7)
    with pytest.raises(ConfigurationError, match="max_events"):
        await producer.open()
    await producer.aclose()


# ------------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("others", [1, 3])
async def test_event_too_large_fails_alone_with_its_size(place: int, others: int) -> None:
    """Events around it in the batch are stored, in order, and its receipt and on_error name its size and the limit."""
    service, reported = ScriptedProducer(limit=2000), Reported()
    large = EventData(b"y" * 3000)
    events = [event(each) for each in range(others)]
    events.insert(place, large)
    async with buffered(service, reported, max_wait_time=1) as producer:
        outcomes = await asyncio.gather(*[_outcome(await producer.send(each, partition_id="0")) for each in events])
    error = outcomes.pop(events.index(large))
    assert isinstance(error, EventTooLargeError)
    assert (error.size, error.limit) == (size_of(large.encode()), 2000)
    assert outcomes == [SendResult("0", None)] * others
    assert service.bodies("0") == [str(each) for each in range(others)]
    assert [(events, partition) for events, partition, _ in reported.errors] == [([large], "0")]


async def test_batch_above_the_services_limit_is_sent_in_parts() -> None:
    """Where the service takes less than a batch holds, it is sent in as few messages as hold it, each event once."""
    service, reported = ScriptedProducer(limit=1000), Reported()
    async with buffered(service, reported) as producer:
        receipts = [await producer.send(EventData(f"{number:090}"), partition_id="0") for number in range(30)]
        assert await asyncio.gather(*receipts) == [SendResult("0", None)] * 30
        assert producer.buffered_bytes == producer.buffered_events == 0
    assert [len(batch) for batch in service.sent["0"]] == [10, 10, 10]
    assert service.bodies("0") == [f"{number:090}" for number in range(30)]
    assert [len(events) for events, _ in reported.successes] == [10, 10, 10]


async def test_batch_refused_against_the_stated_limit_is_halved() -> None:
    """A refusal of what fits by its own words is halved, until it is taken or is one event."""

    class Odd(ScriptedProducer):
        async def _take(self, sealed: SealedBatch, partition_id: str) -> int | None:
            if sealed.count > 3:
                raise EventTooLargeError(sealed.size, MIB)
            return await super()._take(sealed, partition_id)

    service = Odd()
    async with buffered(service) as producer:
        for number in range(10):
            await producer.send(event(number), partition_id="0")
    assert service.bodies("0") == [str(number) for number in range(10)]


async def test_batch_that_fails_does_not_hold_up_the_next() -> None:
    """The error is that batch's own; what comes after it is sent."""
    service, reported = ScriptedProducer(), Reported()
    service.script["0"] = [REFUSED]
    async with buffered(service, reported, max_batch_events=2) as producer:
        receipts = [await producer.send(event(each), partition_id="0") for each in "abcd"]
        outcomes = [await _outcome(receipt) for receipt in receipts]
    assert outcomes == [REFUSED, REFUSED, SendResult("0", None), SendResult("0", None)]
    assert service.bodies("0") == ["c", "d"]


async def test_exception_of_any_kind_is_the_batchs_outcome() -> None:
    """An error of another kind than ours, or a cancellation from within, ends the batch and not the producer."""
    service, reported = ScriptedProducer(), Reported()
    odd = OSError("odd")

    class Cancelling(ScriptedProducer):
        async def _take(self, sealed: SealedBatch, partition_id: str) -> int | None:
            if not self.sent[partition_id] and len(self.calls) == 1:
                raise asyncio.CancelledError
            return await super()._take(sealed, partition_id)

    service.script["0"] = [odd]
    for each, expected in ((service, OSError), (Cancelling(), PublishOutcomeUnknownError)):
        async with buffered(each, reported, max_batch_events=1) as producer:
            receipts = [await producer.send(event(number), partition_id="0") for number in range(3)]
            outcomes = [await _outcome(receipt) for receipt in receipts]
        assert isinstance(outcomes[0], expected)
        assert outcomes[1:] == [SendResult("0", None)] * 2


async def test_event_that_cannot_be_encoded_is_not_accepted() -> None:
    """The call raises, and neither callback hears of it."""
    reported = Reported()
    async with buffered(reported=reported) as producer:
        with pytest.raises(EventError):
            await producer.send(EventData("x", properties={"a": object()}))
        assert producer.buffered_events == 0
    assert reported == Reported()


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("wrong", ["text", b"bytes", None, 5])
async def test_send_of_what_is_no_event_is_refused(wrong: Any, *, idempotent: bool) -> None:
    """Given to the call or returned by the `encode` hook, it is not accepted, and fails no other event."""
    service, reported = ScriptedProducer(idempotent=idempotent), Reported()
    another = ScriptedProducer(idempotent=idempotent, encode=lambda _: wrong)
    async with buffered(service, reported) as producer, buffered(another, reported) as hooked:
        good = await producer.send(event("good"), partition_id="0")
        for key in (None, "k"):
            with pytest.raises(EventError, match="EventData, not"):
                await producer.send(wrong, partition_key=key)
            with pytest.raises(EventError, match="`encode` returns an EventData, not"):
                hooked.send_nowait(event(), partition_key=key)
        with pytest.raises(EventError, match="EventData, not"):
            producer.send_nowait(wrong, partition_id="0")
        assert await good == SendResult("0", 0 if idempotent else None)
        assert hooked.buffered_events == 0
    assert service.everything() == ["good"]
    assert not reported.errors


@pytest.mark.parametrize("given", [list, tuple, iter])
async def test_list_is_accepted_in_its_order(given: Any) -> None:
    """With room for a part of it at a time: each event has its receipt, and the buffer is never over its bound."""
    service = ScriptedProducer(idempotent=True)
    peak = 0

    def look() -> None:
        nonlocal peak
        peak = max(peak, producer.buffered_events)

    service.on_stored = look
    async with buffered(service, max_events=8, max_batch_events=3) as producer:
        events = [event(number) for number in range(50)]
        receipts = await producer.send(given(events), partition_id="0")
        assert len(receipts) == 50
        assert [await receipt for receipt in receipts] == [SendResult("0", number) for number in range(50)]
        assert await producer.send([]) == []
        assert await producer.send_and_wait([event("a"), event("b")], partition_id="0") == [
            SendResult("0", 50),
            SendResult("0", 51),
        ]
    assert service.bodies("0") == [*map(str, range(50)), "a", "b"]
    assert 0 < peak <= 8


async def test_list_with_something_wrong_in_it_is_refused_as_a_whole() -> None:
    """Whatever is wrong, and wherever it is; the producer goes on."""
    service, reported = ScriptedProducer(), Reported()
    async with buffered(service, reported) as producer:
        good = event("good")
        lists: list[Any] = [
            [good, "text"],
            [good, EventData("x", properties={"a": object()})],
            {"a": good},
            "text",
            5,
        ]
        for wrong in lists:
            with pytest.raises(EventError):
                await producer.send(wrong, partition_id="0")
        with pytest.raises(ConfigurationError, match="no partition"):
            await producer.send([good], partition_id="9")
        with pytest.raises(EventError, match="EventData, not list"):
            producer.send_nowait([good], partition_id="0")  # type: ignore[arg-type]  # the error is the point
        assert producer.buffered_events == 0
        await producer.send_and_wait([good, good], partition_id="0")
    assert service.everything() == ["good", "good"]
    assert not reported.errors


async def test_list_that_is_cancelled_is_sent_as_far_as_it_was_accepted() -> None:
    """Nothing of it is half accepted, and the room is free again."""
    service = ScriptedProducer()
    service.hold("0")
    async with buffered(service, max_events=8, max_batch_events=3) as producer:
        task = asyncio.create_task(producer.send([event(number) for number in range(50)], partition_id="0"))
        await asyncio.sleep(1)
        count = producer.buffered_events
        assert 0 < count <= 8
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        service.release("0")
        await producer.flush()
        assert producer.buffered_events == 0
    assert service.bodies("0") == list(map(str, range(count)))


async def test_one_failure_of_a_list_is_raised_when_all_outcomes_are_known() -> None:
    """And by `send_and_wait` only: each receipt has its own."""
    service = ScriptedProducer()
    service.script["0"] = [RequestRefusedError("no"), 5.0]
    async with buffered(service, max_batch_events=2) as producer:
        with pytest.raises(RequestRefusedError):
            await producer.send_and_wait([event(number) for number in range(4)], partition_id="0")
        assert producer.buffered_events == 0
    assert service.bodies("0") == ["2", "3"]


async def test_encode_hook_runs_before_the_size_is_measured() -> None:
    """What the hook gives is what is sent and counted; callbacks speak of what was given."""

    def squeeze(given: EventData) -> EventData:
        return EventData(b"z" * 10, properties={"was": len(given.body)})

    service, reported = ScriptedProducer(encode=squeeze), Reported()
    async with buffered(service, reported, max_batch_bytes=200, max_wait_time=60) as producer:
        sent = EventData(b"a" * 5000)
        receipt = await producer.send(sent, partition_id="0")
        assert producer.buffered_bytes == size_of(squeeze(sent).encode())
        await producer.flush()
        await receipt
    found = Message.decode(service.sent["0"][0][0])
    assert (found.body, found.application_properties) == (Data((b"z" * 10,)), {"was": 5000})
    assert reported.successes == [([sent], "0")]


# -------------------------------------------------------------------------------------------- order and idempotence


async def test_one_batch_per_partition_is_sent_at_a_time() -> None:
    """However many batches are ready, a partition's next one goes when the last has ended; partitions overlap."""
    service = ScriptedProducer()
    for partition_id in "01":
        service.script[partition_id] = [0.1] * 100
    async with buffered(service, max_batch_events=2) as producer:
        for number in range(20):
            await producer.send(event(number), partition_id="01"[number % 2])
        await asyncio.sleep(0.05)
        assert service.in_flight == {"0": 1, "1": 1}
    assert service.peak == {"0": 1, "1": 1}
    assert service.bodies("0") == [str(number) for number in range(0, 20, 2)]


async def test_max_in_flight_batches_of_a_partition_overlap() -> None:
    """With `max_in_flight=3` three batches are on their way, and not more."""
    service = ScriptedProducer()
    service.hold("0")
    async with buffered(service, max_batch_events=2, max_in_flight=3) as producer:
        for number in range(20):
            await producer.send(event(number), partition_id="0")
        await asyncio.sleep(1)
        assert service.in_flight["0"] == 3
        service.release("0")
    assert service.peak["0"] == 3
    assert sorted(service.everything()) == sorted(map(str, range(20)))


async def test_batch_waiting_for_a_slow_partition_grows() -> None:
    """What is due by age goes on filling while the batch before it is on its way."""
    service = ScriptedProducer()
    service.script["0"] = [1.0]
    async with buffered(service) as producer:
        for number in range(10):
            await producer.send(event(number), partition_id="0")
            await asyncio.sleep(0.05)
    assert [len(batch) for batch in service.sent["0"]] == [1, 9]


async def test_receipt_has_the_published_sequence_number() -> None:
    """Numbers follow the order in the batch, across messages, parts and the wrap."""
    service = ScriptedProducer(idempotent=True, limit=1000, first=NUMBERS - 3)
    async with buffered(service) as producer:
        receipts = [await producer.send(EventData(f"{number:090}"), partition_id="1") for number in range(9)]
        outcomes = await asyncio.gather(*receipts)
    assert outcomes == [SendResult("1", (NUMBERS - 3 + number) % NUMBERS) for number in range(9)]
    assert len(service.sent["1"]) == 3
    assert service.bodies("1") == [f"{number:090}" for number in range(9)]


async def test_room_counts_what_numbering_adds() -> None:
    """The size of an event at an idempotent producer is the one it has with its numbers, key or not."""
    async with buffered(ScriptedProducer(idempotent=True), max_wait_time=60) as producer:
        for key in (None, "k"):
            before = producer.buffered_bytes
            await producer.send(event(), partition_key=key)
            assert producer.buffered_bytes - before == size_of(event().encode(key), idempotent=True)
    assert producer.buffered_bytes == 0


async def test_batch_in_doubt_is_repeated_until_its_outcome_is_known() -> None:
    """The very same sealed batch is asked for until its outcome is known; nothing is reported before, or sent twice."""
    service, reported = ScriptedProducer(idempotent=True), Reported()
    service.script["0"] = [PublishOutcomeUnknownError("0", 0, 2), 1.0, PublishOutcomeUnknownError("0", 0, 2), 1.0]
    async with buffered(service, reported, max_batch_events=2) as producer:
        receipts = [await producer.send(event(each), partition_id="0") for each in "abcd"]
        await asyncio.sleep(1.5)
        assert reported == Reported()
        assert await asyncio.gather(*receipts) == [SendResult("0", number) for number in range(4)]
    assert service.calls[0][1] is service.calls[1][1] is service.calls[2][1] is not service.calls[3][1]
    assert service.bodies("0") == ["a", "b", "c", "d"]


async def test_batch_in_doubt_at_close_fails_as_unknown() -> None:
    """Closing ends the wait for a settlement, and the error says that the outcome is not known."""
    service, reported = ScriptedProducer(idempotent=True), Reported()
    producer = buffered(service, reported, max_batch_events=1)
    await producer.open()
    service.hold("0")
    service.script["0"] = [PublishOutcomeUnknownError("0", 0, 1)]
    receipts = [await producer.send(event(each), partition_id="0") for each in "ab"]
    await asyncio.sleep(1)
    await producer.aclose(deadline=5)
    outcomes = [await _outcome(receipt) for receipt in receipts]
    assert isinstance(outcomes[0], PublishOutcomeUnknownError)
    assert isinstance(outcomes[1], ClosedError)


async def test_close_without_a_deadline_settles_a_bounded_time() -> None:
    """What is in doubt while the producer closes is reported when the retries have been used up."""
    service, reported = ScriptedProducer(idempotent=True), Reported()
    service.script["0"] = [5.0, PublishOutcomeUnknownError("0", 0, 1), 1000.0]
    producer = buffered(service, reported)
    receipt = await producer.send(event(), partition_id="0")
    start = now()
    await producer.aclose()
    assert now() - start < 6
    assert isinstance(await _outcome(receipt), PublishOutcomeUnknownError)


async def test_batch_in_doubt_stays_so_when_the_sender_is_closed() -> None:
    """That the sender was closed meanwhile does not make a batch in doubt one that was never sent."""
    service, reported = ScriptedProducer(idempotent=True), Reported()
    service.script["0"] = [PublishOutcomeUnknownError("0", 0, 1), ClosedError("producer")]
    async with buffered(service, reported) as producer:
        receipt = await producer.send(event(), partition_id="0")
        assert isinstance(await _outcome(receipt), PublishOutcomeUnknownError)


async def test_idempotence_refuses_numbered_events_and_pipelining() -> None:
    """An event that carries a number is not sent again as new, and batches of a partition do not overlap."""
    with pytest.raises(ConfigurationError, match="max_in_flight"):
        buffered(ScriptedProducer(idempotent=True), max_in_flight=2)
    async with buffered(ScriptedProducer(idempotent=True)) as producer:
        sent = event()
        published(sent, 7)
        with pytest.raises(EventError, match="published already"):
            await producer.send(sent)


# ---------------------------------------------------------------------------------------------------------- life


async def test_first_send_opens_and_a_failed_opening_is_repeated() -> None:
    """Calls made while it opens keep their order; a failure reaches the calls, and the next call tries again."""
    hub = FakeHub()
    hub.refuse(ServiceError("not now"), operation="hub")
    hub.latency = 0.1
    producer = HubBufferedProducer(HubProducer(FakeTransport(hub), "telemetry", retry=RetryOptions(max_retries=0)))
    with pytest.raises(ConfigurationError, match="open"):
        producer.send_nowait(event())
    with pytest.raises(ServiceError, match="not now"):
        await producer.send(event())
    sends = [asyncio.ensure_future(producer.send(event(number), partition_id="0")) for number in range(5)]
    await asyncio.sleep(0.05)
    sends.append(asyncio.ensure_future(producer.send(event(5), partition_id="0")))
    await asyncio.wait(sends)
    await producer.aclose()
    assert [each.body_as_str() for each in hub.events("0")] == [str(number) for number in range(6)]


async def test_send_during_the_opening_does_not_overtake() -> None:
    """One that begins in the moment of the opening stays behind the calls made before."""

    class Announcing(ScriptedProducer):
        async def get_partition_ids(self) -> tuple[str, ...]:
            await asyncio.sleep(1)
            late.append(asyncio.create_task(producer.send(event("late"), partition_id="0")))
            return await super().get_partition_ids()

    late: list[asyncio.Task[DeliveryReceipt]] = []
    service = Announcing()
    producer = buffered(service)
    await asyncio.gather(*(producer.send(event(number), partition_id="0") for number in range(3)))
    await late[0]
    await producer.aclose()
    assert service.bodies("0") == ["0", "1", "2", "late"]


async def test_close_during_the_opening_ends_both() -> None:
    """Calls that wait for the opening raise that it was closed."""
    service = ScriptedProducer()
    service.transport.hub.latency = 1
    producer = buffered(service)
    sends = [asyncio.ensure_future(producer.send(event())) for _ in range(2)]
    await asyncio.sleep(0.5)
    await producer.aclose()
    for each in sends:
        with pytest.raises(ClosedError):
            await each
    assert producer.buffered_events == 0


async def test_close_sends_what_was_accepted() -> None:
    """The end of the block waits for every outcome, accepts nothing more, and closes the transport; twice is fine."""
    service = ScriptedProducer()
    service.script["0"] = [5.0]
    async with buffered(service, max_wait_time=60) as producer:
        receipt = await producer.send(event(), partition_id="0")
        closing = asyncio.ensure_future(producer.aclose())
        await asyncio.sleep(1)
        for refused in (producer.send(event()), producer.open()):
            with pytest.raises(ClosedError):
                await refused
        with pytest.raises(ClosedError):
            producer.send_nowait(event())
        await producer.aclose()
        assert closing.done() or receipt.done()
        await closing
    assert service.bodies("0") == ["x"]
    assert service.close_deadlines == [None]
    assert service.transport.is_closed
    assert repr(producer) == "<HubBufferedProducer closed, 0 events, 0 bytes>"


async def test_close_without_flush_fails_what_is_not_sent() -> None:
    """What is on its way is waited for; the rest fails with ClosedError, as do sends that wait for room."""
    service, reported = ScriptedProducer(partitions=1), Reported()
    service.script["0"] = [5.0]
    producer = buffered(service, reported, max_batch_events=2, max_events=5)
    sends = [asyncio.ensure_future(producer.send(event(number), partition_id="0")) for number in range(7)]
    roaming = asyncio.ensure_future(producer.send(event("roaming")))
    await asyncio.sleep(1)
    await producer.aclose(flush=False)
    outcomes = [await _outcome(await each) for each in sends[:5]]
    assert outcomes[:2] == [SendResult("0", None)] * 2
    assert all(isinstance(outcome, ClosedError) for outcome in outcomes[2:])
    for each in (*sends[5:], roaming):
        with pytest.raises(ClosedError):
            await each
    assert service.bodies("0") == ["0", "1"]
    assert sum(len(events) for events, _, _ in reported.errors) == 3
    assert producer.buffered_events == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_close_ends_at_its_deadline(*, cancelled: bool) -> None:
    """At the deadline, or cancelled, what has not ended fails; no task and no open receipt is left."""
    service, reported = ScriptedProducer(), Reported()
    service.hold("0")
    before = asyncio.all_tasks()
    producer = buffered(service, reported, max_batch_events=2)
    receipts = [await producer.send(event(number), partition_id="0") for number in range(6)]
    start = now()
    if cancelled:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await producer.aclose()
    else:
        await producer.aclose(deadline=3)
    assert now() - start == pytest.approx(3)
    assert service.close_deadlines == [0.0]
    outcomes = [await _outcome(receipt) for receipt in receipts]
    assert all(isinstance(outcome, PublishOutcomeUnknownError) for outcome in outcomes[:2])
    assert all(isinstance(outcome, ClosedError) for outcome in outcomes[2:])
    assert sum(len(events) for events, _, _ in reported.errors) == 6
    assert asyncio.all_tasks() == before


async def test_close_that_is_cancelled_stays_so_where_closing_fails(caplog: pytest.LogCaptureFixture) -> None:
    """What the inner closing raises is logged, and does not take the place of the cancellation."""

    class Doubtful(ScriptedProducer):
        async def aclose(self, deadline: float | None = None) -> None:
            await super().aclose(deadline)
            raise PublishOutcomeUnknownError("0", None, 1)

    service = Doubtful()
    service.hold("0")
    producer = buffered(service, Reported())
    await producer.send(event(), partition_id="0")
    closing = asyncio.ensure_future(producer.aclose())
    await asyncio.sleep(1)
    closing.cancel()
    with caplog.at_level(logging.ERROR, "eventpump.producer"):
        await asyncio.wait([closing])
    assert closing.cancelled()
    assert any("cancelled" in each.message for each in caplog.records)
    await producer.aclose()
    uncancelled = buffered(Doubtful())
    with pytest.raises(PublishOutcomeUnknownError):
        await uncancelled.aclose()


async def test_close_ends_waits_for_room_at_once() -> None:
    """Sends that wait for room fail when closing begins, not when it ends."""
    service = ScriptedProducer(partitions=1)
    service.hold("0")
    producer = buffered(service, max_events=1)
    await producer.send(event(), partition_id="0")
    waiting = [
        asyncio.ensure_future(producer.send(event())),
        asyncio.ensure_future(producer.send(event(), partition_id="0")),
    ]
    await asyncio.sleep(1)
    closing = asyncio.ensure_future(producer.aclose(deadline=60))
    await asyncio.sleep(1)
    for each in waiting:
        assert isinstance(each.exception(), ClosedError)
    assert not closing.done()
    service.release("0")
    await closing


async def test_close_cuts_off_a_send_that_ignores_it() -> None:
    """Even a sender that ignores its closing does not keep the producer from ending: its events are in doubt."""

    class Deaf(ScriptedProducer):
        async def _take(self, sealed: SealedBatch, partition_id: str) -> int | None:
            await asyncio.Event().wait()
            return None

    class Small(Deaf):
        async def _take(self, sealed: SealedBatch, partition_id: str) -> int | None:
            if sealed.count > 1:
                raise EventTooLargeError(sealed.size, self.limit)
            return await super()._take(sealed, partition_id)

    for service, count in ((Deaf(), 1), (Small(limit=1), 3)):
        reported = Reported()
        producer = buffered(service, reported)
        receipts = [await producer.send(event(), partition_id="0") for _ in range(count)]
        await producer.aclose(deadline=1)
        outcomes = [await _outcome(receipt) for receipt in receipts]
        assert isinstance(outcomes[0], PublishOutcomeUnknownError)
        assert all(isinstance(outcome, ClosedError) for outcome in outcomes[1:])
        assert len(reported.errors) == count


# --------------------------------------------------------------------------------------------------- any history


class Weather(ScriptedProducer):
    """Takes its time, fails and loses its memory as chance has it; stores each batch once at most."""

    def __init__(self, rng: random.Random, *, idempotent: bool, limit: int) -> None:
        super().__init__(3, idempotent=idempotent, limit=limit)
        self.rng = rng
        self.doubted: dict[int, int | None] = {}
        self.kept: list[SealedBatch] = []

    async def _take(self, sealed: SealedBatch, partition_id: str) -> int | None:
        await asyncio.sleep(self.rng.choice((0, 0, 0.001, 0.02, 5)))
        if partition_id == "2":
            await asyncio.sleep(10)
        if id(sealed) in self.doubted:
            first = self.doubted.pop(id(sealed))
            if first is None:
                raise RequestRefusedError("settled: not stored")
            return first
        chance = self.rng.random()
        if chance < 0.15:
            raise ServiceError("not stored")
        if self.is_idempotent and chance < 0.3:
            self.kept.append(sealed)
            self.doubted[id(sealed)] = await super()._take(sealed, partition_id) if chance < 0.22 else None
            raise PublishOutcomeUnknownError(partition_id, 0, sealed.count)
        return await super()._take(sealed, partition_id)


KEYS = st.sampled_from(["a", "b", "c", "d"])
SIZES = st.sampled_from([1, 1, 40, 200, 400])
SPAWN = st.tuples(st.just("spawn"), KEYS, SIZES)
OPERATION = st.one_of(
    SPAWN,
    SPAWN,
    SPAWN,
    st.tuples(st.just("send"), KEYS, SIZES),
    st.tuples(st.just("partition"), st.sampled_from(["0", "1", "2"]), SIZES),
    st.tuples(st.just("any"), st.just(""), SIZES),
    st.tuples(st.just("nowait"), KEYS, SIZES),
    st.tuples(st.just("cancel"), st.just(""), st.integers(0, 5)),
    st.tuples(st.just("flush"), st.just(""), st.just(0)),
    st.tuples(st.just("pause"), st.just(""), st.sampled_from([0, 0, 0, 1, 5, 100, 20_000])),
)


@given(
    operations=st.lists(OPERATION, min_size=12, max_size=100),
    seed=st.integers(0, 2**32),
    idempotent=st.booleans(),
    max_batch_events=st.sampled_from([1, 3, 10]),
    max_batch_bytes=st.sampled_from([300, 2000]),
    max_events=st.sampled_from([3, 8, 30]),
    max_bytes=st.sampled_from([600, 5000]),
    limit=st.sampled_from([250, 450, 1000]),
    closing=st.sampled_from([(True, None), (True, 3.0), (False, 3.0)]),
)
def test_buffer_ends_every_event_once_in_order_in_random_histories(
    operations: list[tuple[str, str, int]],
    seed: int,
    closing: tuple[bool, float | None],
    *,
    idempotent: bool,
    limit: int,
    **bounds: int,
) -> None:
    """Whatever is sent by whom, cancelled, refused, slow, too large, in doubt or closed upon:

    every accepted event ends in exactly one of success or error, reported alike by callback and receipt; a reported
    success is stored once; what has one key is stored in the order of the calls; no bound is exceeded; one batch per
    partition is on its way; nothing is left.
    """

    async def run() -> None:
        service = Weather(random.Random(seed), idempotent=idempotent, limit=limit)
        reported = Reported()
        producer = buffered(service, reported, max_wait_time=0.005, **bounds)
        await producer.open()
        accepted: dict[str, DeliveryReceipt] = {}
        keys: dict[str, str] = {}
        calls: list[str] = []
        tasks: list[asyncio.Task[None]] = []
        largest = 600

        async def send(name: str, **target: str) -> None:
            with suppress(ClosedError):
                accepted[name] = await producer.send(event(name.ljust(sizes[name], "-")), **target)

        def check() -> None:
            assert producer.buffered_events <= bounds["max_events"]
            assert producer.buffered_bytes <= bounds["max_bytes"] + 3 * largest
            assert max(service.in_flight.values(), default=0) <= 1

        sizes: dict[str, int] = {}
        for index, (kind, target, amount) in enumerate(operations):
            name = f"{index}:{target}:"
            sizes[name] = amount
            match kind:
                case "send" | "spawn":
                    calls.append(name)
                    keys[name] = target
                    task = asyncio.ensure_future(send(name, partition_key=target))
                    tasks.append(task)
                    if kind == "send":
                        await asyncio.wait([task])
                case "partition":
                    calls.append(name)
                    await send(name, partition_id=target)
                case "any":
                    calls.append(name)
                    await send(name)
                case "nowait":
                    # It takes part in the order of calls only where no call of that key is still waiting.
                    await asyncio.sleep(0)
                    if not any(not task.done() for task in tasks):
                        try:
                            accepted[name] = producer.send_nowait(event(name.ljust(amount, "-")), partition_key=target)
                            calls.append(name)
                            keys[name] = target
                        except BufferFullError:
                            pass
                case "cancel":
                    for task in tasks[-amount:]:
                        task.cancel()
                case "flush":
                    before = list(accepted)
                    await producer.flush()
                    assert all(accepted[each].done() for each in before)
                case _:
                    await asyncio.sleep(amount / 1000)
            check()
        flush, deadline = closing
        await producer.aclose(flush=flush, deadline=deadline)
        if tasks:
            await asyncio.wait(tasks)
        check()
        outcomes = {name: await _outcome(receipt) for name, receipt in accepted.items()}
        successes = Counter(_name(each) for events, _ in reported.successes for each in events)
        failures = Counter(_name(each) for events, _, _ in reported.errors for each in events)
        assert successes + failures == Counter(list(accepted))
        assert {name for name, outcome in outcomes.items() if isinstance(outcome, SendResult)} == set(successes)
        stored = Counter(_strip(body) for body in service.everything())
        assert max(stored.values(), default=1) == 1
        unknown = {name for name, outcome in outcomes.items() if isinstance(outcome, PublishOutcomeUnknownError)}
        assert set(successes) <= set(stored) <= set(successes) | unknown
        for partition_id in "012":
            order = [_strip(body) for body in service.bodies(partition_id)]
            for key in "abcd":
                mine = [name for name in order if keys.get(name) == key]
                assert mine == [name for name in calls if name in mine]
        assert producer.buffered_events == producer.buffered_bytes == 0
        if idempotent:
            for name, outcome in outcomes.items():
                if isinstance(outcome, SendResult):
                    bodies = [_strip(body) for body in service.bodies(outcome.partition_id)]
                    assert outcome.published_sequence_number is not None
                    assert bodies[outcome.published_sequence_number] == name
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


def _name(given: EventData) -> str:
    return _strip(given.body.decode())


def _strip(body: str) -> str:
    return body.rstrip("-")


async def _outcome(receipt: DeliveryReceipt) -> SendResult | Exception:
    try:
        return await receipt
    except Exception as error:
        return error


async def _later(seconds: float, step: Step) -> None:
    await asyncio.sleep(seconds)
    step()


@seeds(20, of=1000)
async def test_idempotent_buffer_has_each_event_once_at_a_time_in_random_histories(seed: int) -> None:
    """However often one object is given while its outcome is open, one call is accepted, and the others raise."""
    rng = random.Random(seed)
    service = ScriptedProducer(idempotent=True)
    events = [event(number) for number in range(4)]
    accepted: Counter[str] = Counter()

    async def give() -> None:
        for _ in range(10):
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.01]))
            chosen = rng.choice(events)
            where = {"partition_id": rng.choice("0123")}
            try:
                match rng.randrange(4):
                    case 0:
                        receipts = [producer.send_nowait(chosen, **where)]
                    case 1:
                        receipts = await producer.send([chosen, event("new")], **where)
                    case 2:
                        async with asyncio.timeout(rng.choice([0.0, 0.01, None])):
                            receipts = [await producer.send(chosen, **where)]
                    case _:
                        with pytest.raises(EventError, match="outcome is open"):
                            await producer.send([chosen, chosen], **where)
                        continue
            except (EventError, BufferFullError, TimeoutError):
                continue
            accepted[chosen.body_as_str()] += 1
            if len(receipts) == 1:  # of several, the first may have ended while the others waited for room
                assert chosen.body_as_str() not in open_now
                open_now.add(chosen.body_as_str())
            if rng.random() < 0.7:
                await receipts[0]

    open_now: set[str] = set()

    def ended(batch: Sequence[EventData], partition_id: str) -> None:
        open_now.difference_update(each.body_as_str() for each in batch)

    async with buffered(service, max_batch_events=2, max_events=6, on_success=ended) as producer:
        for _ in range(3):
            service.script[rng.choice("0123")].append(rng.uniform(0, 1))
        await asyncio.gather(*(give() for _ in range(4)))
    stored = Counter(text(raw) for batches in service.sent.values() for batch in batches for raw in batch)
    assert {name: count for name, count in stored.items() if name != "new"} == accepted


@pytest.mark.parametrize("is_open", [True, False])
async def test_send_of_one_event_three_times_stores_it_once(*, is_open: bool) -> None:
    """Idempotent: the second and third call raise until the outcome of the first is known, also while it opens."""
    service = ScriptedProducer(idempotent=True)
    producer = buffered(service)
    if is_open:
        await producer.open()
    chosen = event("x")
    calls = await asyncio.gather(*(producer.send(chosen, partition_id="0") for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in calls] == [DeliveryReceipt, EventError, EventError]
    await producer.aclose()
    assert service.bodies("0") == ["x"]
