"""The outbox by itself: what its users other than the buffered producer rely on. See also test_buffered.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from eventpump.errors import ClosedError, PublishOutcomeUnknownError, RequestRefusedError, ServiceError
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.sealing import SealedBatch, pieces_of
from eventpump.producer.accumulator import BufferRoom, Lane
from eventpump.producer.outbox import Ended, Outbox, RoomQueue
from eventpump.producer.producer import HubProducer
from eventpump.testing.transport import FakeHub, FakeTransport

HEAD, REST = pieces_of(EventData(b"x" * 100))
SIZE = len(HEAD) + len(REST)


class Producer(HubProducer):
    """Stores what it is given once `gate` is set; each of `errors` fails a send."""

    def __init__(self) -> None:
        super().__init__(FakeTransport(FakeHub()), "telemetry")
        self.gate = asyncio.Event()
        self.errors: list[Exception] = []
        self.sending: Counter[str | None] = Counter()
        self.sent: list[tuple[str | None, int]] = []

    async def send_sealed(self, sealed: SealedBatch, *, partition_id: str | None) -> int | None:
        self.sending[partition_id] += 1
        try:
            await self.gate.wait()
        finally:
            self.sending[partition_id] -= 1
        if self.errors:
            raise self.errors.pop(0)
        self.sent.append((partition_id, sealed.count))
        return None


class Scene:
    """An outbox with a gateway and partition 0, whose messages hold two events."""

    def __init__(self, **options: float) -> None:
        self.producer = Producer()
        self.ended: list[Ended[int]] = []
        self.outbox = Outbox[int](self.producer, "test", self.ended.append, max_bytes=2 * SIZE, **options)  # type: ignore[arg-type]  # numbers of either kind
        self.outbox.add_lanes([None, "0"])
        self.gateway, self.partition = self.outbox.lanes.values()

    def add(self, lane: Lane[int], *events: int) -> None:
        for event in events:
            self.outbox.add(lane, event, HEAD, REST, asyncio.get_running_loop().time())

    @property
    def outcomes(self) -> list[tuple[list[int], type[Exception] | None]]:
        return [(list(each.events), None if each.error is None else type(each.error)) for each in self.ended]


async def test_send_begins_with_a_full_message_and_not_before() -> None:
    """Without a wait time, what is not full waits for a flush; the gateway is a lane as any other."""
    scene = Scene()
    scene.producer.gate.set()
    scene.add(scene.gateway, 1, 2, 3)
    scene.add(scene.partition, 4)
    await asyncio.sleep(1000)
    assert scene.producer.sent == [(None, 2)]
    await scene.outbox.flush()
    assert sorted(scene.producer.sent, key=str) == [("0", 1), (None, 1), (None, 2)]
    assert sorted(event for each in scene.ended for event in each.events) == [1, 2, 3, 4]
    assert sum(each.size for each in scene.ended) == 4 * SIZE


async def test_send_now_of_a_lane_leaves_the_others() -> None:
    """Only that lane's batch is sent, and only once."""
    scene = Scene()
    scene.producer.gate.set()
    scene.add(scene.gateway, 1)
    scene.add(scene.partition, 2)
    for _ in range(2):
        scene.outbox.send_now(scene.partition)
    await scene.outbox.until(lambda: bool(scene.ended))
    assert scene.outcomes == [([2], None)]
    await scene.outbox.aclose()


@pytest.mark.parametrize("most", [1, 3])
async def test_batches_of_a_lane_in_flight_are_bounded(most: int) -> None:
    """Not more than `max_in_flight` of a lane are sent at a time; `outgoing_bytes` counts those that wait too."""
    scene = Scene(max_in_flight=most)
    scene.add(scene.gateway, *range(10), 10)
    scene.add(scene.partition, 11, 12)
    await asyncio.sleep(0)
    assert scene.producer.sending == {None: most, "0": 1}
    assert scene.outbox.outgoing_bytes == 12 * SIZE
    scene.producer.gate.set()
    await scene.outbox.until(lambda: scene.outbox.outgoing_bytes == 0)
    assert len(scene.ended) == 6
    await scene.outbox.aclose()
    assert scene.outcomes[-1] == ([10], ClosedError)


async def test_until_ends_as_soon_as_a_waiting_batch_is_taken() -> None:
    """A caller that waits for a shorter queue goes on when a batch is taken, not when it has ended."""
    scene = Scene(max_in_flight=2)
    scene.add(scene.gateway, 1, 2, 3, 4)
    async with asyncio.timeout(1):
        await scene.outbox.until(lambda: not scene.gateway.full)
    assert not scene.ended
    await scene.outbox.aclose()


@pytest.mark.parametrize(("tries", "is_stored"), [(0, False), (1, False), (2, True)])
async def test_unknown_outcome_is_waited_for_a_number_of_times(tries: int, is_stored: bool) -> None:
    """The same message is given to the producer again `settle_tries` times, and fails as unknown then."""
    scene = Scene(settle_tries=tries)
    scene.producer.gate.set()
    scene.producer.errors = [PublishOutcomeUnknownError("0", None, 1) for _ in range(2)]
    scene.add(scene.partition, 1)
    await scene.outbox.flush()
    assert scene.outcomes == [([1], None if is_stored else PublishOutcomeUnknownError)]


async def test_drop_fails_what_is_not_being_sent() -> None:
    """What is being sent goes on; also where `on_end` drops the rest because of a failure."""
    scene = Scene()
    scene.producer.errors = [RequestRefusedError("refused by the test")]
    scene.add(scene.gateway, *range(5))
    await asyncio.sleep(0)
    scene.outbox.drop()
    assert scene.outcomes == [([2, 3], ClosedError), ([4], ClosedError)]
    scene.producer.gate.set()
    await scene.outbox.flush()
    assert scene.outcomes[2:] == [([0, 1], RequestRefusedError)]


async def test_drop_ends_where_each_failure_adds_an_event() -> None:
    """It fails what was there, and leaves what `on_end` adds to be sent."""
    scene = Scene(max_events=1)
    ended: list[int] = []

    def on_end(each: Ended[int]) -> None:
        assert len(ended) < 100, "without an end"
        ended.extend(each.events)
        if each.error is not None:
            scene.add(each.lane, *(event + 10 for event in each.events))

    scene.outbox._on_end = on_end
    scene.add(scene.gateway, 1, 2, 3)
    scene.outbox.drop()
    assert ended == [1, 2, 3]
    scene.producer.gate.set()
    await scene.outbox.flush()
    assert ended == [1, 2, 3, 11, 12, 13]


async def test_aclose_cancels_what_is_being_sent_after_a_time() -> None:
    """Its outcome is unknown then, and no task is left. Closing twice is fine."""
    scene = Scene()
    scene.add(scene.gateway, 1, 2)
    await asyncio.sleep(0)
    began = asyncio.get_running_loop().time()
    for _ in range(2):
        await scene.outbox.aclose(3)
    assert asyncio.get_running_loop().time() - began == pytest.approx(3)
    assert scene.outcomes == [([1, 2], PublishOutcomeUnknownError)]


async def test_cancelled_flush_leaves_everything_going_on() -> None:
    """And the next one ends with it; a flush does not wait for what was added after it began."""
    scene = Scene()
    scene.add(scene.gateway, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await scene.outbox.flush()
    flushing = asyncio.ensure_future(scene.outbox.flush())
    await asyncio.sleep(0)
    scene.add(scene.partition, 2)
    scene.producer.gate.set()
    await flushing
    assert scene.outcomes == [([1], None)]
    await scene.outbox.aclose()


# ------------------------------------------------------------------------------------------------- room


def queue(events: int = 2) -> tuple[RoomQueue, BufferRoom, Lane[int]]:
    room, lane = BufferRoom("0", max_events=events, max_bytes=1000), Lane[int]("0")
    return RoomQueue("test", room, {"0": lane}, lambda: None), room, lane


def failing(error: BaseException) -> Callable[[], Lane[int]]:
    def choose() -> Lane[int]:
        raise error

    return choose


@pytest.mark.parametrize("error", [ServiceError("no"), StopIteration(), asyncio.CancelledError(), KeyError("0")])
async def test_choice_that_fails_ends_its_call_and_no_other(error: BaseException) -> None:
    """What `choose` raises as room is released is raised by the call that waits, and the next one gets the room."""
    rooms, room, lane = queue(1)
    choices: list[Callable[[], Lane[int]]] = [lambda: lane, failing(error)]
    assert rooms.reserve(lane, 1)
    bad = asyncio.ensure_future(rooms.acquire_any(lambda: choices.pop(0)(), 1))
    good = asyncio.ensure_future(rooms.acquire_any(lambda: lane, 1))
    await asyncio.sleep(0)
    rooms.release(lane, 1, 1)
    with pytest.raises((type(error), RuntimeError)):
        await bad
    assert await good is lane
    assert (room.events, rooms.wanting, lane.admitted) == (1, 0, 0)


@pytest.mark.parametrize("anywhere", [False, True])
async def test_cancelled_call_reserves_nothing(anywhere: bool) -> None:
    """Before its turn or just after it; the next call gets the room, and calls keep their order."""
    rooms, room, lane = queue(1)

    def acquire() -> asyncio.Future[Lane[int]]:
        return asyncio.ensure_future(rooms.acquire_any(lambda: lane, 1) if anywhere else rooms.acquire(lane, 1))

    assert rooms.reserve(lane, 1)
    calls = [acquire() for _ in range(4)]
    await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.sleep(0)
    rooms.release(lane, 1, 1)
    assert not rooms.reserve(lane, 1)
    calls[1].cancel()  # room is reserved for it, and it has not run since
    assert await calls[2] is lane
    assert not calls[3].done()
    rooms.close()
    with pytest.raises(ClosedError, match="test"):
        await calls[3]
    assert (room.events, rooms.wanting, lane.admitted) == (1, 0, 0)


async def test_call_whose_turn_comes_as_the_queue_closes_gives_the_room_back() -> None:
    """It was not accepted: it raises, and holds nothing."""
    rooms, room, lane = queue(1)
    rooms.reserve(lane, 1)
    call = asyncio.ensure_future(rooms.acquire(lane, 1))
    await asyncio.sleep(0)
    rooms.release(lane, 1, 1)
    rooms.close()
    with pytest.raises(ClosedError):
        await call
    assert (room.events, lane.admitted) == (0, 0)


async def test_release_stops_asking_calls_once_every_lane_has_refused() -> None:
    """However many wait with a choice that goes round, a release that lets one in asks for few of them."""
    lanes = {each: Lane[int](each) for each in "0123"}
    rooms = RoomQueue("test", BufferRoom("0123", max_events=4, max_bytes=1000), lanes, lambda: None)
    asked: list[Lane[int]] = []

    def choose() -> Lane[int]:
        asked.append(lanes[str(len(asked) % 4)])
        return asked[-1]

    assert all(rooms.reserve(lane, 1) for lane in lanes.values())
    calls = [asyncio.ensure_future(rooms.acquire_any(choose, 1)) for _ in range(1000)]
    await asyncio.sleep(0)
    asked.clear()
    rooms.release(lanes["2"], 1, 1)
    await asyncio.sleep(0)
    assert [each.done() for each in calls] == [True] + [False] * 999
    assert len(asked) <= 8
    rooms.close()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_release_keeps_a_small_call_behind_a_large_one_of_its_lane() -> None:
    """A lane that had no room for a call takes none behind it, although it is smaller; another lane does."""
    lanes = {each: Lane[int](each) for each in "01"}
    room = BufferRoom("01", max_events=100, max_bytes=400)
    rooms = RoomQueue("test", room, lanes, lambda: None)
    for _ in range(4):
        for lane in lanes.values():
            assert rooms.reserve(lane, 50)
    large, small, other = (
        asyncio.ensure_future(rooms.acquire_any(partial(lanes.__getitem__, name), size))
        for name, size in (("0", 150), ("0", 10), ("1", 50))
    )
    await asyncio.sleep(0)
    rooms.release(lanes["0"], 1, 50)
    rooms.release(lanes["1"], 1, 50)
    await asyncio.sleep(0)
    assert [each.done() for each in (large, small, other)] == [False, False, True]
    rooms.release(lanes["0"], 3, 150)
    await asyncio.sleep(0)
    assert [each.done() for each in (large, small)] == [True, True]
