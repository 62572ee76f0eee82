"""A partition's feed: everything once, in order, within bounds, whatever happens to its link."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.consumer.link.feed import PartitionFeed, as_received
from eventpump.errors import (
    ConnectionLostError,
    ConsumerDisconnectedError,
    EntityNotFoundError,
    EventPumpError,
    LinkDetachedError,
    Recovery,
    ServiceBusyError,
    ServiceError,
)
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import FeedSettings
from eventpump.testing.clock import VirtualClock, VirtualTimeLoop
from eventpump.testing.transport import FakeHub, FakeTransport

Trouble = list[tuple[Exception, float | None]]


class _ReadFeed(PartitionFeed[bytes]):
    """A feed with one cursor."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        read = self.cursor()
        self.take, self.wait, self.wake = read.take, read.wait, read.wake


@asynccontextmanager
async def _feed(
    hub: FakeHub,
    *,
    owner_level: int | None = None,
    trouble: Trouble | None = None,
    seed: int = 1,
    limit: int | None = None,
    **options: Any,
) -> AsyncIterator[_ReadFeed]:
    spec = ReceiveLinkSpec(hub.name, "$Default", "0", EventPosition.earliest(), owner_level=owner_level)
    reported: Trouble = [] if trouble is None else trouble
    feed = _ReadFeed(
        FakeTransport(hub),
        spec,
        FeedSettings(hub=hub.name, **options),
        wrap=as_received,
        rng=random.Random(seed),
        limit=limit,
        on_trouble=lambda error, delay: reported.append((error, delay)),
    )
    feed.start()
    try:
        yield feed
    finally:
        await feed.aclose()


def _numbers(messages: Sequence[bytes]) -> list[int]:
    return [ReceivedEvent(message).sequence_number for message in messages]


async def _read(feed: _ReadFeed, count: int, limit: int = 300) -> list[int]:
    got: list[int] = []
    while len(got) < count:
        messages = feed.take(limit)
        if not messages:
            if feed.error is not None:
                raise feed.error
            await feed.wait(None)
        got += _numbers(messages)
    return got


async def test_wait_returns_at_once_where_events_are_there(clock: Any) -> None:
    """Waiting for events delays nothing that is there: no fuller batch is waited for."""
    hub = FakeHub()
    async with _feed(hub) as feed:
        await asyncio.sleep(1)
        began = clock.monotonic()
        hub.publish("0", "a")
        assert await feed.wait(30)
        assert clock.monotonic() == began
        assert _numbers(feed.take(300)) == [0]


async def test_wait_wakes_once_per_batch() -> None:
    """A batch of messages wakes the reader once, and one take gets them all."""
    hub = FakeHub(latency=0.01)
    async with _feed(hub) as feed:
        await asyncio.sleep(1)
        hub.publish("0", count=20)
        wakes = 0
        got: list[int] = []
        while len(got) < 20:
            await feed.wait(None)
            wakes += 1
            got += _numbers(feed.take(300))
        assert wakes == 1


@pytest.mark.parametrize(
    "error",
    [
        ServiceError("an internal error", recovery=Recovery.RETRY),
        LinkDetachedError("detached"),
        ConnectionLostError("the connection is gone"),
    ],
    ids=["retry", "relink", "reconnect"],
)
async def test_feed_opens_its_link_again_after_it_ended(error: EventPumpError) -> None:
    """After every error that can be cured, reading goes on after the last event received: each comes once."""
    hub = FakeHub(latency=0.05)
    trouble: Trouble = []
    async with _feed(hub, trouble=trouble) as feed:
        hub.publish("0", count=500)
        got = await _read(feed, 40, limit=40)
        hub.detach("0", error)
        got += await _read(feed, 500 - len(got))
        assert got == list(range(500))
        assert [each for each, _ in trouble] == [error]
    assert len(hub.attached) == 2


@given(
    cuts=st.lists(st.floats(0.001, 3.0), max_size=6),
    batch=st.integers(1, 100),
    cache=st.integers(1, 200),
    latency=st.sampled_from([0.0, 0.02, 0.3]),
    seed=st.integers(0, 999),
)
def test_feed_gives_everything_once_and_in_order_over_cut_links(
    cuts: list[float], batch: int, cache: int, latency: float, seed: int
) -> None:
    """Links cut at any moment, with any cache and any delay: every event comes exactly once, in order."""

    async def scenario() -> list[int]:
        hub = FakeHub(latency=latency)
        hub.publish("0", count=300)
        async with _feed(hub, prefetch_events=cache, seed=seed) as feed:

            async def cut() -> None:
                for pause in cuts:
                    await asyncio.sleep(pause)
                    hub.detach("0")

            cutting = asyncio.create_task(cut())
            got: list[int] = []
            while len(got) < 300:
                got += await _read(feed, 1, limit=batch)
                await asyncio.sleep(0.01)
            await asyncio.sleep(1)
            got += _numbers(feed.take(300))
            await cutting
            return got

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(scenario()) == list(range(300))


async def test_feed_ends_with_an_error_that_gives_up() -> None:
    """An error to give up on ends the feed with it; what was received before can still be taken."""
    hub = FakeHub()
    trouble: Trouble = []
    async with _feed(hub, trouble=trouble) as feed:
        hub.publish("0", "a", "b")
        await feed.wait(None)
        hub.detach("0", EntityNotFoundError("the hub was deleted"))
        await asyncio.sleep(60)
        assert isinstance(feed.error, EntityNotFoundError)
        assert _numbers(feed.take(300)) == [0, 1]
        assert [delay for _, delay in trouble] == [None]
    assert len(hub.attached) == 1


async def test_feed_does_not_reopen_a_stolen_link() -> None:
    """Once a reader with a higher owner level has the partition, the link is never opened again."""
    hub = FakeHub()
    async with _feed(hub, owner_level=1) as feed:
        await asyncio.sleep(1)
        async with _feed(hub, owner_level=2):
            await asyncio.sleep(3600)
            assert isinstance(feed.error, ConsumerDisconnectedError)
            assert hub.owner_levels("0") == [2]
    assert [spec.owner_level for spec in hub.attached] == [1, 2]


async def test_feed_waits_as_a_busy_service_asks() -> None:
    """Throttled, the feed waits the four seconds the service asks for, and some."""
    hub = FakeHub()
    hub.refuse(ServiceBusyError("try later"), times=3)
    trouble: Trouble = []
    hub.publish("0", "a")
    async with _feed(hub, trouble=trouble) as feed:
        assert await _read(feed, 1) == [0]
    delays = [delay for _, delay in trouble if delay is not None]
    assert len(delays) == 3
    assert all(delay >= 4 for delay in delays)


async def test_feed_doubles_its_delay_while_the_link_cannot_be_opened() -> None:
    """While the link cannot be opened the delays' bound doubles to its maximum; a link that received starts over."""
    hub = FakeHub()
    hub.refuse(LinkDetachedError("not now"), times=60)
    trouble: Trouble = []
    hub.publish("0", "a")
    async with _feed(hub, trouble=trouble, link_retry=RetryOptions(base_delay=0.5, max_delay=8.0)) as feed:
        await _read(feed, 1)
        delays = [delay for _, delay in trouble if delay is not None]
        assert len(delays) == 60
        assert all(delay <= min(8.0, 0.5 * 2**number) for number, delay in enumerate(delays))
        assert max(delays) > 4
        trouble.clear()
        hub.detach("0")
        hub.publish("0", "b")
        await _read(feed, 1)
        assert trouble[0][1] is not None
        assert trouble[0][1] <= 0.5


async def test_feed_with_a_link_retry_limit_ends() -> None:
    """As many links follow a failed one as the limit allows; what fails with the connection does not count."""
    hub = FakeHub()
    hub.refuse(ConnectionLostError("no way"), times=20)
    trouble: Trouble = []
    async with _feed(hub, trouble=trouble, link_retry=RetryOptions(max_retries=2)) as feed:
        await asyncio.sleep(60)
        hub.refuse(LinkDetachedError("not now"))
        hub.refuse(ConnectionLostError("no way"), times=20)
        hub.detach("0")
        await asyncio.sleep(60)
        assert feed.is_attached
        trouble.clear()
        hub.refuse(LinkDetachedError("not now"), times=60)
        hub.detach("0")
        await asyncio.sleep(600)
        assert isinstance(feed.error, LinkDetachedError)
        assert [delay is None for _, delay in trouble] == [False, False, True]


async def test_feed_does_not_add_its_delay_to_a_lost_connections(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While there is no connection the transport's waits count alone, and only ever fewer failures are reported."""
    monkeypatch.setattr(random.Random, "uniform", lambda _, low, high: high)  # every delay is as long as it may be
    hub = FakeHub()
    hub.refuse(ConnectionLostError("no way"), times=300)
    reported_at: list[float] = []

    class Timed(Trouble):
        def append(self, reported: tuple[Exception, float | None], /) -> None:
            reported_at.append(clock.monotonic())
            super().append(reported)

    trouble = Timed()
    hub.publish("0", "a", "b")
    began = clock.monotonic()
    async with _feed(hub, trouble=trouble, link_retry=RetryOptions(base_delay=0.5, max_delay=8.0)) as feed:
        await _read(feed, 1)
        assert clock.monotonic() - began <= 300 * 0.5
        assert all(delay == 0.5 for _, delay in trouble)
        silences = [later - sooner for sooner, later in pairwise(reported_at)]
        assert silences[:4] == [0.5, 1.0, 2.0, 4.0]
        assert set(silences[4:]) == {8.0}
        assert len(silences) > 10


async def test_feed_bounds_the_events_held_for_a_slow_reader() -> None:
    """A reader that takes nothing has no more events held for it than the cache has room for, and all come later."""
    hub = FakeHub(latency=0.05)
    hub.publish("0", count=2000)
    async with _feed(hub, prefetch_events=100) as feed:
        await asyncio.sleep(60)
        assert 50 < feed.events_held <= 100
        assert hub.credit("0") == [0]
        assert await _read(feed, 2000) == list(range(2000))


async def test_feed_bounds_the_bytes_held() -> None:
    """With large messages it is the bytes that hold the service back: the budget, and what 32 first messages weigh."""
    hub = FakeHub(latency=0.05)
    hub.publish("0", *(["x" * 10_000] * 400))
    async with _feed(hub, prefetch_bytes=100_000) as feed:
        await asyncio.sleep(60)
        assert 100_000 - 10_100 < feed.bytes_held <= 100_000 + 32 * 10_100
        assert hub.credit("0") == [0]
        got = 0
        while got < 400:
            await feed.wait(None)
            got += len(feed.take(10))
            await asyncio.sleep(1)
            # From here on sizes are known.
            assert feed.bytes_held <= 100_000 + 32 * 10_100
            assert got == 400 or feed.bytes_held > 0


async def test_feed_with_strict_bytes_never_exceeds_them() -> None:
    """Strictly, the bytes held never exceed the budget."""
    hub = FakeHub(latency=0.05, max_message_size=20_000)
    hub.publish("0", *(["x" * 10_000] * 100))
    async with _feed(hub, prefetch_bytes=100_000, strict_prefetch_bytes=True) as feed:
        got = most = 0
        while got < 100:
            await feed.wait(None)
            await asyncio.sleep(1)
            assert feed.bytes_held <= 100_000
            most = max(most, feed.bytes_held)
            got += len(feed.take(3))
        assert most > 50_000


async def test_wait_without_events_ends_in_time(clock: Any) -> None:
    """A wait without events ends when its time is up, also after a longer one that ended early."""
    hub = FakeHub()
    async with _feed(hub) as feed:
        waiting = asyncio.ensure_future(feed.wait(100))
        await asyncio.sleep(1)
        feed.wake()
        assert await waiting
        for timeout in (2.0, 50.0, 3.0):
            began = clock.monotonic()
            assert not await feed.wait(timeout)
            assert clock.monotonic() - began == pytest.approx(timeout)


async def test_wait_that_is_cancelled_loses_nothing() -> None:
    """A reader that gives up waiting finds everything later."""
    hub = FakeHub()
    async with _feed(hub) as feed:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await feed.wait(None)
        hub.publish("0", "a", "b")
        assert await _read(feed, 2) == [0, 1]


async def test_close_detaches_and_leaves_no_task() -> None:
    """A closed feed has no link and no task, and gets nothing more; closing twice is fine."""
    before = asyncio.all_tasks()
    hub = FakeHub(latency=0.05)
    async with _feed(hub) as feed:
        hub.publish("0", "a")
        await asyncio.sleep(0.07)
        await feed.aclose()
        await feed.aclose()
        hub.publish("0", "b")
        await asyncio.sleep(1)
        assert not feed.take(300)
        assert hub.owner_levels("0") == []
    assert asyncio.all_tasks() == before


async def test_feed_with_a_limit_receives_so_many_messages() -> None:
    """A feed with a limit gets so many messages and no more; resumed, so many more on the same link."""
    hub = FakeHub(latency=0.05)
    hub.publish("0", count=2000)
    async with _feed(hub, owner_level=0, limit=500) as feed:
        assert await _read(feed, 500) == list(range(500))
        await asyncio.sleep(1)
        assert (feed.events_held, hub.credit("0")) == (0, [0])
        attaches = len(hub.attached)
        assert feed.park()
        feed.resume(300)
        assert await _read(feed, 300) == list(range(500, 800))
        await asyncio.sleep(1)
        assert (feed.events_held, hub.credit("0"), len(hub.attached)) == (0, [0], attaches)


async def test_parked_feed_whose_link_ends_opens_no_link() -> None:
    """A feed whose link ends while it is parked ends too, whatever the reason: it opens no unrequested link."""
    hub = FakeHub()
    hub.publish("0", count=5)
    async with _feed(hub, owner_level=0, limit=5) as feed:
        await _read(feed, 5)
        assert feed.park()
        attaches = len(hub.attached)
        hub.detach("0", LinkDetachedError("idle for too long"))
        await asyncio.sleep(100)
        assert isinstance(feed.error, LinkDetachedError)
        assert len(hub.attached) == attaches


async def test_park_is_refused_unless_the_feed_is_at_rest() -> None:
    """A feed is not parked while messages are to come or to be taken, nor without a link."""
    hub = FakeHub()
    hub.publish("0", count=5)
    async with _feed(hub, limit=6) as feed:
        await _read(feed, 5)
        assert not feed.park()
        hub.publish("0", "a")
        await feed.wait(None)
        assert not feed.park()
        await _read(feed, 1)
        hub.detach("0", LinkDetachedError("once more"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not feed.park()


async def test_stop_withdraws_credit_and_keeps_what_is_there() -> None:
    """A stopped feed lets nothing more come, and keeps what it has."""
    hub = FakeHub()
    async with _feed(hub) as feed:
        hub.publish("0", "a")
        await asyncio.sleep(1)
        feed.stop()
        hub.publish("0", "b")
        await asyncio.sleep(1)
        assert hub.credit("0") == [0]
        assert _numbers(feed.take(300)) == [0]
        await asyncio.sleep(1)
        assert not feed.take(300)


async def test_messages_in_a_callback_are_taken_within_the_call(clock: Any) -> None:
    """As the socket's callback brings them: no turn of the loop lies between. In a task they are taken after it."""
    hub = FakeHub()
    async with _feed(hub) as feed:
        taken: list[bytes] = []

        async def read() -> None:
            while len(taken) < 2:
                if not (messages := feed.take(10)):
                    await feed.wait(None)
                taken.extend(messages)

        reading = asyncio.create_task(read())
        await asyncio.sleep(1)
        seen: list[int] = []

        def called() -> None:
            feed.messages([b"1"])
            seen.append(len(taken))

        asyncio.get_running_loop().call_soon(called)
        await asyncio.sleep(1)
        assert seen == [1]
        feed.messages([b"2"])
        assert taken == [b"1"]
        await reading
        assert taken == [b"1", b"2"]
        assert feed.events_held == 0
