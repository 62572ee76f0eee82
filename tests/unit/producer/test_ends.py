"""What the user gave to a producer ends badly: raises what is no `Exception`, is cancelled by others, or hangs.

Every send and every accepted event ends, later ones go on where they can, and closing keeps its deadline.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from eventpump.core.claim import PublisherState, StoredPublisherState
from eventpump.errors import (
    ClosedError,
    ConnectionLostError,
    EventPumpError,
    PublishOutcomeUnknownError,
    RequestRefusedError,
    ServiceError,
    StoreError,
)
from eventpump.eventhubs.events import EventData
from eventpump.interfaces import SendLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.intake import DeliveryReceipt
from eventpump.producer.producer import HubProducer
from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore
from eventpump.testing.clock import VirtualTimeLoop
from eventpump.testing.transport import FakeHub, FakeSendLink, FakeTransport
from tests.unit.producer.awaiting import idle

RETRY = RetryOptions(max_retries=2, base_delay=1.0, max_delay=8.0)
PUBLISHER, SENDER = "eventpump publisher of partition 0", "send to partition 0"


class Odd(BaseException):
    """An error that is no `Exception`."""


class Store(MemoryPublisherStateStore):
    """Does in its calls what a test says, and counts them.

    Attributes:
        script: By call: what it raises, one after the other; or seconds it takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.script: dict[str, list[BaseException | float]] = {}
        self.calls: Counter[str] = Counter()
        self.is_deaf = False

    async def _play(self, call: str) -> None:
        self.calls[call] += 1
        if script := self.script.get(call):
            step = script.pop(0)
            if isinstance(step, BaseException):
                raise step
            until = asyncio.get_running_loop().time() + step
            while (left := until - asyncio.get_running_loop().time()) > 0:
                try:
                    await asyncio.sleep(left)
                except asyncio.CancelledError:
                    if not self.is_deaf:
                        raise

    async def open(self) -> None:
        await self._play("open")
        await super().open()

    async def read_state(self, name: str, partition_id: str) -> StoredPublisherState | None:
        await self._play("read")
        return await super().read_state(name, partition_id)

    async def write_state(
        self, name: str, partition_id: str, state: PublisherState, replaces: StoredPublisherState | None
    ) -> StoredPublisherState | None:
        await self._play("write")
        return await super().write_state(name, partition_id, state, replaces)

    async def aclose(self) -> None:
        await self._play("close")
        await super().aclose()


class Scene:
    """A hub, and producers to it."""

    def __init__(self) -> None:
        self.hub = FakeHub(partitions=2)
        self.store = Store()
        self.producers: list[HubProducer | HubBufferedProducer] = []

    def producer(self, **options: Any) -> HubProducer:
        options = {"retry": RETRY, "rng": random.Random(1), "transport": FakeTransport(self.hub), **options}
        producer = HubProducer(hub=self.hub.name, **options)
        self.producers.append(producer)
        return producer

    def idempotent(self, **options: Any) -> HubProducer:
        return self.producer(idempotent=True, **options)

    def known(self, **options: Any) -> HubProducer:
        return self.idempotent(name="orders", state_store=self.store, **options)

    def buffered(
        self, producer: HubProducer | None = None, on_success: Any = None, on_error: Any = None, **settings: Any
    ) -> HubBufferedProducer:
        buffered = HubBufferedProducer(
            producer or self.producer(),
            BufferSettings(**{"max_wait_time": 0.1, **settings}),
            on_success=on_success,
            on_error=on_error,
        )
        self.producers.append(buffered)
        return buffered

    def bodies(self, partition_id: str = "0") -> list[str]:
        return [event.body_as_str() for event in self.hub.events(partition_id)]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """A test's scene. Afterwards, nothing of it runs."""
    scene = Scene()
    yield scene
    for producer in scene.producers:
        try:
            await producer.aclose(deadline=1.0)
        except PublishOutcomeUnknownError:
            continue
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, "a producer left a task behind"


def now() -> float:
    return asyncio.get_running_loop().time()


async def outcome(use: Any) -> Any:
    """Return what a use came to: its value or its error. It must end within a minute."""
    async with asyncio.timeout(60):
        return (await asyncio.gather(use, return_exceptions=True))[0]


def event(body: object) -> EventData:
    return EventData(str(body))


def text(given: EventData) -> str:
    return given.body.decode()


def tasks_named(name: str) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == name]


# -------------------------------------------------------------------------------------------- publishers


@pytest.mark.parametrize("busy_with", ["nothing yet", "attaching", "waiting to retry"])
async def test_publisher_cancelled_from_outside_fails_only_current_sends(scene: Scene, busy_with: str) -> None:
    """Whenever a publisher's task is cancelled from outside: who waits gets an error, and later sends go through."""
    producer = scene.idempotent()
    if busy_with == "attaching":
        scene.hub.hang("send")
    elif busy_with == "waiting to retry":
        scene.hub.refuse(ServiceError("later"), operation="send")
    first = event("a")
    sending = asyncio.ensure_future(producer.send([first], partition_id="0"))
    await asyncio.sleep(0)
    while not tasks_named(PUBLISHER):  # noqa: ASYNC110 - there is nothing to wait for before its first step
        await asyncio.sleep(0)
    if busy_with != "nothing yet":
        await idle()
    (task,) = tasks_named(PUBLISHER)
    task.cancel()
    assert type(await outcome(sending)) is ServiceError
    await idle()
    assert not tasks_named(PUBLISHER)
    if busy_with == "attaching":
        scene.hub.answer("send")
    assert await outcome(producer.send([first], partition_id="0")) is None
    assert await outcome(producer.send(event("b"), partition_id="0")) is None
    assert scene.bodies() == ["a", "b"]


@pytest.mark.parametrize("operation", ["credit", "transfer"])
async def test_publisher_that_awaits_an_answer_or_nothing_has_no_task(scene: Scene, operation: str) -> None:
    """So that there is none that anything could cancel; sends that queue behind it go on within its report."""
    producer = scene.idempotent()
    await producer.send(event("a"), partition_id="0")
    scene.hub.hang(operation)
    sends = [asyncio.ensure_future(producer.send(event(body), partition_id="0")) for body in "bc"]
    await idle()
    assert not tasks_named(PUBLISHER)
    scene.hub.answer(operation)
    await asyncio.gather(*sends)
    assert not tasks_named(PUBLISHER)
    assert scene.bodies() == ["a", "b", "c"]


async def test_publisher_cancelled_in_doubt_is_settled_at_close(scene: Scene) -> None:
    """`aclose` starts the publisher again, if something is in doubt and no task drives it."""
    producer = scene.idempotent()
    scene.hub.hang("transfer")
    batch = await producer.create_batch(partition_id="0")
    batch.try_add(event("a"))
    sending = asyncio.ensure_future(producer.send(batch))
    await idle()
    scene.hub.hang("send")
    scene.hub.lose_connections()
    await idle()
    tasks_named(PUBLISHER)[0].cancel()
    assert isinstance(await outcome(sending), PublishOutcomeUnknownError)
    scene.hub.answer("transfer")
    scene.hub.answer("send")
    await producer.aclose()
    assert scene.bodies() == ["a"]
    assert batch.starting_published_sequence_number == 1


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("call", ["open", "read", "write"])
async def test_store_that_raises_cancelled_error_is_a_failed_try(scene: Scene, call: str, times: int) -> None:
    """A `CancelledError` of the state store cancels no caller: the send fails or is retried; later ones go on."""
    scene.store.script[call] = [asyncio.CancelledError() for _ in range(times)]
    producer = scene.known()
    for _ in range(times):
        if isinstance(await outcome(producer.send(event("a"), partition_id="0")), EventPumpError):
            continue
        break
    if not scene.bodies():
        assert await outcome(producer.send(event("a"), partition_id="0")) is None
    assert scene.bodies() == ["a"]
    # The second write that succeeds says that something is published.
    assert scene.store.calls[call] == times + (2 if call == "write" else 1)


@pytest.mark.parametrize("error", [Odd(), GeneratorExit(), ValueError()], ids=repr)
@pytest.mark.parametrize("call", ["read", "write"])
async def test_store_that_raises_anything_fails_the_send(scene: Scene, call: str, error: BaseException) -> None:
    """Whatever a state store raises, the send gets it, and the next one goes on with the start."""
    scene.store.script[call] = [error]
    producer = scene.known()
    sends = [asyncio.ensure_future(outcome(producer.send(event(body), partition_id="0"))) for body in "ab"]
    found = []
    for send in sends:
        try:
            found.append(await send)
        except BaseException as raised:
            found.append(raised)
    later = await outcome(producer.send(event("c"), partition_id="0"))
    assert found[0] is error
    assert (found[1], later) == (None, None)


async def test_link_that_raises_cancelled_error_is_a_failed_try(scene: Scene) -> None:
    """A `CancelledError` out of the transport, as of a credential, cancels no send: it is tried again."""

    class Cancelled(FakeTransport):
        left = 2

        async def open_send_link(self, spec: SendLinkSpec) -> FakeSendLink:
            self.left -= 1
            if self.left >= 0:
                raise asyncio.CancelledError
            return await super().open_send_link(spec)

    for producer in (scene.producer(transport=Cancelled(scene.hub)), scene.idempotent(transport=Cancelled(scene.hub))):
        assert await outcome(producer.send(event("a"), partition_id="0")) is None
    assert scene.bodies() == ["a", "a"]


@pytest.mark.parametrize("is_known", [True, False])
async def test_send_that_is_cancelled_raises_cancelled_error(scene: Scene, is_known: bool) -> None:
    """A cancellation of the caller's own propagates, from wherever it waits, and delays no other."""
    producer = scene.known() if is_known else scene.producer()
    scene.store.script["read"] = [1000.0]
    scene.hub.hang("send")
    sending = asyncio.ensure_future(producer.send(event("a"), partition_id="0"))
    await idle()
    sending.cancel()
    await idle()
    assert sending.cancelled()
    scene.hub.answer("send")
    assert await outcome(producer.send(event("b"), partition_id="0")) is None
    assert scene.bodies() == ["b"]


# ---------------------------------------------------------------------------------- partitions that are not


@pytest.mark.parametrize("kind", ["plain", "in turn", "idempotent", "known"])
async def test_send_to_an_unknown_partition_leaves_nothing_behind(scene: Scene, kind: str) -> None:
    """Ids that the service refuses leave no publisher, task, lock or entry in the producer."""
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "in turn": {"max_in_flight": 1},
        "idempotent": {"idempotent": True},
        "known": {"idempotent": True, "name": "orders", "state_store": scene.store},
    }
    producer = scene.producer(**options[kind])
    if not producer.is_idempotent:
        for number in range(50):  # the fake refuses a plain link nowhere
            scene.hub.refuse(RequestRefusedError("no such"), operation="send", partition_id=f"no{number}", times=9)

    async def use(number: int) -> list[Any]:
        to = f"no{number}"
        cancelled = asyncio.ensure_future(producer.send(event("x"), partition_id=to))
        await asyncio.sleep(0)
        cancelled.cancel()
        uses: list[Awaitable[object]] = [
            producer.send(event("x"), partition_id=to),
            producer.send([event("x")], partition_id=to, split=True),
            producer.create_batch(partition_id=to),
        ]
        return await asyncio.gather(*uses, return_exceptions=True)

    found = await asyncio.gather(*(use(number) for number in range(50)))
    assert {type(each) for errors in found for each in errors} == {RequestRefusedError}
    await producer.send(event("a"), partition_id="0")
    await idle()
    del found
    scene.hub.accept()  # the fake keeps the errors it raises, whose tracebacks refer to the targets
    gc.collect()
    assert {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}} <= {PUBLISHER}
    context = producer._context
    for name, value in {**vars(producer), **vars(context), **vars(context.holds)}.items():
        if name not in {"_options"} and hasattr(value, "__len__") and not isinstance(value, str):
            assert len(value) <= 1, name
    assert scene.bodies() == ["a"]


async def test_send_to_a_partition_added_later_succeeds(scene: Scene) -> None:
    """A refused id is asked for again by the next send."""
    producer = scene.known()
    assert isinstance(await outcome(producer.send(event("a"), partition_id="2")), RequestRefusedError)
    scene.hub.add_partitions(1)
    assert await outcome(producer.send(event("a"), partition_id="2")) is None
    assert scene.bodies("2") == ["a"]


# ------------------------------------------------------------------------------------------------ closing


@pytest.mark.parametrize("deadline", [1.0, 5.0, None])
@pytest.mark.parametrize("is_deaf", [False, True], ids=["", "deaf to cancellation"])
@pytest.mark.parametrize("call", ["open", "read", "write", "close"])
async def test_close_keeps_its_deadline_with_a_hanging_store(
    scene: Scene, call: str, is_deaf: bool, deadline: float | None
) -> None:
    """`aclose` comes back at its deadline; where a store does not even let itself be cancelled, soon after.

    The send that waits for the store has ended by then.
    """
    producer = scene.known()
    scene.store.script[call] = [500.0]
    scene.store.is_deaf = is_deaf
    sending = asyncio.ensure_future(outcome(producer.send(event("a"), partition_id="0")))
    await idle()
    before = now()
    await producer.aclose(deadline)
    took = now() - before
    within = 20.0 if deadline is None else deadline
    assert took <= (within + 4 if is_deaf else within)
    result = await sending
    assert result is None if call == "close" else isinstance(result, ClosedError)
    assert now() == before + took
    for use in (producer.send(event("b"), partition_id="0"), producer.create_batch(partition_id="0")):
        assert isinstance(await outcome(use), ClosedError)
    await asyncio.sleep(600)


async def test_close_goes_on_where_a_part_of_it_raises(scene: Scene) -> None:
    """What the store raises as it is closed is raised, after everything was closed."""
    transport = FakeTransport(scene.hub)
    producer = scene.known(transport=transport)
    scene.producers.clear()
    await producer.send(event("a"), partition_id="0")
    scene.store.script["close"] = [Odd()]
    with pytest.raises(Odd):
        await producer.aclose()
    assert transport.is_closed
    assert not tasks_named(PUBLISHER)


@pytest.mark.parametrize("call", ["open", "write"])
@pytest.mark.parametrize("is_deaf", [False, True], ids=["", "deaf to cancellation"])
async def test_close_of_a_buffer_keeps_its_deadline_whatever_hangs(scene: Scene, call: str, is_deaf: bool) -> None:
    """With a hanging store, every event of a buffer ends by the deadline of `aclose`, or shortly after."""
    ended: Counter[str] = Counter()
    scene.store.script[call] = [500.0]
    scene.store.is_deaf = is_deaf
    producer = scene.buffered(
        scene.known(),
        on_error=lambda events, *_: ended.update(map(text, events)),
        max_batch_events=5,
    )
    receipts = [await producer.send(event(number), partition_id="0") for number in range(12)]
    await asyncio.sleep(1)
    before = now()
    await producer.aclose(deadline=2.0)
    assert now() - before <= (8.0 if is_deaf else 3.0)
    assert ended == Counter(map(str, range(12)))
    assert all(receipt.done() for receipt in receipts)
    assert producer.buffered_events == 0
    await asyncio.sleep(600)


@pytest.mark.parametrize("call", ["open", "read", "write", "close"])
@pytest.mark.parametrize("is_deaf", [False, True], ids=["", "deaf to cancellation"])
async def test_close_of_a_buffer_without_a_deadline_is_bounded(scene: Scene, call: str, is_deaf: bool) -> None:
    """With a store that hangs forever, `aclose` without a deadline ends after 20 s, and with it every event."""
    ended: Counter[str] = Counter()
    scene.store.script[call] = [1e6]
    scene.store.is_deaf = is_deaf
    producer = scene.buffered(
        scene.known(),
        on_error=lambda events, *_: ended.update(map(text, events)),
        on_success=lambda events, *_: ended.update(map(text, events)),
        max_batch_events=5,
    )
    receipts = [await producer.send(event(number), partition_id="0") for number in range(12)]
    before = now()
    await producer.aclose()
    assert now() - before <= (28.0 if is_deaf else 21.0)
    assert ended == Counter(map(str, range(12)))
    assert all(receipt.done() for receipt in receipts)
    await asyncio.sleep(2e6)


async def test_close_of_a_buffer_without_a_deadline_waits_for_progress(scene: Scene) -> None:
    """A slow store, and an outage longer than 20 s, cost no event where `aclose` has no deadline."""
    scene.store.script["read"] = [15.0]
    scene.store.script["write"] = [15.0, 15.0, 15.0]
    lost = ConnectionLostError("an outage")
    transport = FakeTransport(scene.hub)
    patient = RetryOptions(max_retries=100, base_delay=5.0, max_delay=5.0)
    producer = scene.buffered(scene.known(transport=transport, retry=patient))
    receipts = [await producer.send(event(number), partition_id="0") for number in range(3)]
    closing = asyncio.create_task(producer.aclose())
    await asyncio.sleep(10)
    scene.hub.refuse(lost, operation="send", times=float("inf"))
    await asyncio.sleep(60)
    assert not closing.done()
    scene.hub.accept()
    await closing
    assert [await receipt for receipt in receipts]
    assert scene.bodies() == ["0", "1", "2"]


# ------------------------------------------------------------------------------------------------ buffers


def cancelled_result() -> None:
    """What a callback does that reads the result of a cancelled future."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    future.result()


def odd() -> None:
    raise Odd


def leave() -> None:
    raise GeneratorExit


@pytest.mark.parametrize("bad", [cancelled_result, odd, leave])
@pytest.mark.parametrize("which", ["on_success", "on_error"])
async def test_callback_that_raises_anything_ends_no_sender_task(
    scene: Scene, which: str, bad: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a callback raises is logged: `flush` and `aclose` end, and every event ends once, in order."""
    reported: list[str] = []

    def callback(events: Sequence[EventData], *_: object) -> None:
        reported.extend(map(text, events))
        bad()

    if which == "on_error":
        scene.hub.refuse(RequestRefusedError("no"), operation="transfer", times=1000)
    callbacks: dict[str, Any] = {which: callback}
    producer = scene.buffered(max_batch_events=10, **callbacks)
    receipts = [await producer.send(event(number), partition_id="0") for number in range(100)]
    async with asyncio.timeout(60):
        await producer.flush()
    assert reported == list(map(str, range(100)))
    assert all(receipt.done() for receipt in receipts)
    assert producer.buffered_events == 0
    assert "callback" in caplog.text
    await producer.send(event("last"), partition_id="0")
    async with asyncio.timeout(60):
        await producer.aclose()
    assert reported[-1] == "last"


@pytest.mark.parametrize("turns", [0, 1, 3, 50])
@pytest.mark.parametrize("stall", ["send", "transfer", None])
async def test_sender_task_cancelled_from_outside_ends_its_events(scene: Scene, turns: int, stall: str | None) -> None:
    """Cancelled from outside at any moment, even before it began: each event ends once, and later ones are sent."""
    ended: Counter[str] = Counter()

    def note(events: Sequence[EventData], *_: object) -> None:
        ended.update(map(text, events))

    producer = scene.buffered(on_success=note, on_error=note, max_batch_events=5)
    await producer.open()
    if stall is not None:
        scene.hub.hang(stall)
    receipts = [producer.send_nowait(event(number), partition_id="0") for number in range(12)]
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in tasks_named(SENDER):
        task.cancel()
    await idle()
    if stall is not None:
        scene.hub.answer(stall)
    receipts.append(await producer.send(event("late"), partition_id="0"))
    async with asyncio.timeout(60):
        await producer.flush()
    assert ended == Counter([*map(str, range(12)), "late"])
    assert "late" in scene.bodies()
    assert all(receipt.done() for receipt in receipts)
    assert producer.buffered_events == 0


async def test_send_that_raises_cancelled_error_fails_its_batch_only(scene: Scene) -> None:
    """A `CancelledError` that does not cancel the buffer's task fails that batch, and the next ones go on."""
    scene.store.script["read"] = [asyncio.CancelledError() for _ in range(3)]
    producer = scene.buffered(scene.known(), max_batch_events=5)
    receipts = [await producer.send(event(number), partition_id="0") for number in range(10)]
    found = [await outcome(receipt) for receipt in receipts]
    assert all(isinstance(each, StoreError) for each in found[:5])
    assert scene.bodies() == list("56789")


async def test_router_that_raises_keeps_no_room_from_others(scene: Scene) -> None:
    """Of sends that wait for room in any partition, one whose router raises leaves its turn to the next."""

    class Router:
        calls = 0

        def route(self, given: EventData, partition_key: str | None, partition_ids: Sequence[str]) -> str:
            self.calls += 1
            if text(given) == "bad" and self.calls > 5:
                raise Odd
            return "0"

    producer = HubBufferedProducer(
        scene.producer(), BufferSettings(max_events=2, max_batch_events=1, max_wait_time=0.1), router=Router()
    )
    scene.producers.append(producer)
    await producer.open()
    scene.hub.hang("transfer")
    await producer.send(event("first"))
    waiting = [asyncio.ensure_future(producer.send(event(body))) for body in ("bad", "good")]
    await idle()
    scene.hub.answer("transfer")
    with pytest.raises(Odd):
        await waiting[0]
    assert isinstance(await outcome(waiting[1]), DeliveryReceipt)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["callback", "store"])
def test_system_exit_leaves_the_loop_and_close_ends_every_event(error: type[BaseException], where: str) -> None:
    """`KeyboardInterrupt` and `SystemExit` leave the loop as asyncio lets them, and closing then ends every event."""
    ended: Counter[str] = Counter()
    closed = []

    async def run() -> None:
        scene = Scene()

        def callback(events: Sequence[EventData], *_: object) -> None:
            ended.update(map(text, events))
            if where == "callback" and len(ended) == 5:
                raise error

        if where == "store":
            scene.store.script["write"] = [error()]
        producer = scene.buffered(scene.known(), on_success=callback, on_error=callback, max_batch_events=5)
        try:
            for number in range(12):
                await producer.send(event(number), partition_id="0")
            await producer.flush()
        finally:
            await producer.aclose(deadline=5.0)
            closed.append(producer.buffered_events)

    with pytest.raises(error), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
    assert closed == [0]
    assert max(ended.values()) == 1
    assert len(ended) >= 5
