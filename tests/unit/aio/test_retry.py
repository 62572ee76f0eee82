"""The one loop that repeats a failed operation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from eventpump.aio.retry import retrying
from eventpump.core.backoff import RECONNECT_JITTER, Unlimited
from eventpump.errors import (
    AuthenticationError,
    ClosedError,
    ConnectionLostError,
    ServiceBusyError,
    ServiceError,
    ServiceTimeoutError,
    StoreError,
)
from eventpump.eventhubs.conditions import SERVER_BUSY_WAIT
from eventpump.options.base import RetryOptions


class _Highest(random.Random):
    """Chance that gives the highest value allowed."""

    def uniform(self, a: float, b: float) -> float:
        return b


RNG = _Highest()
POLICY = RetryOptions(max_retries=3, base_delay=1.0, max_delay=3.0)


class _Script:
    """An operation that fails as given and then succeeds. Records when each attempt began."""

    def __init__(self, *failures: Exception, took: float = 0.0) -> None:
        self._failures = list(failures)
        self._took = took
        self._start = asyncio.get_running_loop().time()
        self.began: list[float] = []

    async def __call__(self) -> str:
        self.began.append(round(asyncio.get_running_loop().time() - self._start, 6))
        await asyncio.sleep(self._took)
        if self._failures:
            raise self._failures.pop(0)
        return "done"


async def test_retrying_waits_longer_after_each_failure() -> None:
    """The delays double up to the longest one, and the result of the attempt that succeeds is returned."""
    script = _Script(ServiceError("a"), StoreError("write", "b"), ServiceError("c"))
    assert await retrying(script, POLICY, RNG) == "done"
    assert script.began == [0.0, 1.0, 3.0, 6.0]


async def test_retrying_raises_the_last_error_when_the_retries_are_used_up() -> None:
    """As many attempts follow the first as the policy allows; one error more, and it is raised."""
    failures = [ServiceError(str(number)) for number in range(4)]
    script = _Script(*failures)
    with pytest.raises(ServiceError) as raised:
        await retrying(script, POLICY, RNG)
    assert raised.value is failures[3]
    assert len(script.began) == 4


async def test_retrying_without_a_limit_goes_on() -> None:
    """`Unlimited` counts no attempts."""
    script = _Script(*(ServiceError("x") for _ in range(50)))
    assert await retrying(script, Unlimited(0.2, 5.0), RNG) == "done"
    assert len(script.began) == 51


@pytest.mark.parametrize("error", [AuthenticationError("no right"), ClosedError("producer"), KeyError("bug")])
async def test_retrying_raises_at_once_what_no_attempt_can_help(error: Exception) -> None:
    """An error that gives up, and what is neither the service's nor a store's failure, is final."""
    script = _Script(error)
    with pytest.raises(type(error)):
        await retrying(script, POLICY, RNG)
    assert script.began == [0.0]


async def test_retrying_asks_the_caller_which_errors_are_final() -> None:
    """`is_final` replaces the rule, in both directions."""
    script = _Script(KeyError("passes"), ServiceError("does not"))
    with pytest.raises(ServiceError):
        await retrying(script, POLICY, RNG, is_final=lambda error: isinstance(error, ServiceError))
    assert script.began == [0.0, 1.0]


async def test_retrying_keeps_the_wait_of_a_busy_service() -> None:
    """A throttling service gets the wait it asks for, with the policy's delay on top."""
    script = _Script(ServiceBusyError("later"), ServiceError("x"))
    await retrying(script, POLICY, RNG)
    assert script.began == [0.0, SERVER_BUSY_WAIT + 1.0, SERVER_BUSY_WAIT + 3.0]


async def test_retrying_begins_no_attempt_after_its_time() -> None:
    """Where the delay would reach the end, the error is raised at once, without the wait."""
    loop = asyncio.get_running_loop()
    script = _Script(*(ServiceError(str(number)) for number in range(9)))
    with pytest.raises(ServiceError, match=r"^2$"):
        await retrying(script, Unlimited(1.0, 8.0), RNG, until=loop.time() + 7.0)
    assert script.began == [0.0, 1.0, 3.0]


async def test_retrying_cancels_an_attempt_at_its_time() -> None:
    """The first attempt that does not end in time ends with `TimeoutError`; a later one with the error before it."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        await retrying(_Script(took=60.0), POLICY, RNG, until=began + 5.0)
    assert loop.time() == began + 5.0

    cause = KeyError("cause")
    failure = ServiceError("before")
    failure.__cause__ = cause
    attempts = 0

    async def attempt() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise failure
        await asyncio.sleep(60)

    with pytest.raises(ServiceError) as raised:
        await retrying(attempt, POLICY, RNG, until=loop.time() + 5.0)
    assert raised.value is failure
    assert raised.value.__cause__ is cause
    assert loop.time() == began + 10.0


async def test_retrying_leaves_each_attempt_a_least_time() -> None:
    """An attempt that begins just before the end may still take its least time."""
    loop = asyncio.get_running_loop()
    script = _Script(ServiceError("x"), took=0.75)
    assert await retrying(script, POLICY, RNG, until=loop.time() + 2.0, least_time=1.0) == "done"
    assert script.began == [0.0, 1.75]


async def test_retrying_lets_a_timeout_of_the_attempt_itself_pass() -> None:
    """A `TimeoutError` that is not due to `until` is an error like any other."""
    script = _Script(TimeoutError("of the attempt"))
    with pytest.raises(TimeoutError, match="of the attempt"):
        await retrying(script, POLICY, RNG, until=asyncio.get_running_loop().time() + 99.0)
    script = _Script(TimeoutError("of the attempt"))
    assert await retrying(script, POLICY, RNG, is_final=lambda _: False) == "done"


async def test_retrying_ends_with_the_last_error_when_stopped() -> None:
    """The stop ends a delay at once, and no attempt follows; one that is set beforehand allows the first attempt."""
    loop = asyncio.get_running_loop()
    began, stop = loop.time(), asyncio.Event()
    loop.call_later(0.5, stop.set)
    script = _Script(ServiceError("the last"))
    with pytest.raises(ServiceError, match="the last"):
        await retrying(script, POLICY, RNG, stop=stop)
    assert loop.time() == began + 0.5
    script = _Script(ServiceError("the only one"))
    with pytest.raises(ServiceError, match="the only one"):
        await retrying(script, POLICY, RNG, stop=stop)
    assert len(script.began) == 1
    assert await retrying(_Script(), POLICY, RNG, stop=stop) == "done"


async def test_retrying_reports_each_delay_before_it() -> None:
    """`on_retry` is called with error and delay; not for an error that is raised."""
    seen: list[tuple[str, float]] = []
    script = _Script(ServiceError("a"), ServiceError("b"), AuthenticationError("c"))
    with pytest.raises(AuthenticationError):
        await retrying(script, POLICY, RNG, on_retry=lambda error, delay: seen.append((str(error), delay)))
    assert seen == [("a", 1.0), ("b", 2.0)]


async def test_retrying_ends_with_what_its_sleep_raises() -> None:
    """A caller's own wait decides that no attempt follows by raising."""
    delays: list[float] = []

    async def sleep(delay: float) -> None:
        delays.append(delay)
        if len(delays) == 2:
            raise ClosedError("pump")

    with pytest.raises(ClosedError):
        await retrying(_Script(*(ServiceError("x") for _ in range(5))), POLICY, RNG, sleep=sleep)
    assert delays == [1.0, 2.0]


@pytest.mark.parametrize(("attached", "early"), [(lambda: False, True), (None, False)])
async def test_retrying_comes_early_after_a_lost_connection(attached: Callable[[], bool] | None, early: bool) -> None:
    """An operation on a link is repeated early while there is no connection, and the early attempts do not count."""
    script = _Script(*(ConnectionLostError("gone") for _ in range(9)))
    with pytest.raises(ConnectionLostError):
        await retrying(script, RetryOptions(max_retries=1, base_delay=1.0, max_delay=1.0), RNG, was_attached=attached)
    assert script.began[-1] == 1.0
    assert len(script.began) == (2 + round(1.0 / RECONNECT_JITTER) - 1 if early else 2)


async def test_retrying_repeats_an_operation_that_had_a_link_early_once() -> None:
    """A link that is attached early and fails fails once; then the rest of the delay is waited for."""
    script = _Script(*(ConnectionLostError("gone") for _ in range(9)))
    with pytest.raises(ConnectionLostError):
        await retrying(
            script, RetryOptions(max_retries=1, base_delay=1.0, max_delay=1.0), RNG, was_attached=lambda: True
        )
    assert script.began == [0.0, RECONNECT_JITTER, 1.0]


async def test_retrying_cancelled_in_a_delay_or_an_attempt_ends() -> None:
    """A cancellation propagates, and no further attempt begins."""
    script = _Script(*(ServiceError("x") for _ in range(9)), took=1.0)
    for seconds in (0.5, 1.5):
        task = asyncio.create_task(retrying(script, POLICY, RNG))
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(script.began) == 2


async def test_fixed_delays_are_all_alike() -> None:
    """Neither drawn at random nor growing, and the service's busy wait comes on top."""
    script = _Script(ServiceError("a"), ServiceError("b"), ServiceBusyError("c"))
    policy = RetryOptions(max_retries=3, base_delay=100, mode="fixed")
    assert await retrying(script, policy, random.Random(1)) == "done"
    assert script.began == [0.0, 100.0, 200.0, 300.0 + SERVER_BUSY_WAIT]


class _Slow:
    """An operation whose attempts take these times, and then succeed or raise."""

    def __init__(self, *takes: float, raises: BaseException | None = None) -> None:
        self._takes = list(takes)
        self._raises = raises
        self.began: list[float] = []
        self.cancelled = 0

    async def __call__(self) -> str:
        self.began.append(round(asyncio.get_running_loop().time(), 6))
        try:
            await asyncio.sleep(self._takes.pop(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._raises is not None:
            raise self._raises
        return "done"


async def test_attempt_beyond_its_time_is_cancelled_and_another_one_follows() -> None:
    """It is a failure like any other, with the delay of the policy."""
    policy = RetryOptions(max_retries=3, base_delay=1, mode="fixed", try_timeout=10)
    slow, start = _Slow(60, 60, 5), asyncio.get_running_loop().time()
    assert await retrying(slow, policy, RNG) == "done"
    assert [round(began - start, 6) for began in slow.began] == [0, 11, 22]
    assert slow.cancelled == 2


async def test_last_attempt_beyond_its_time_is_an_error_that_names_the_option() -> None:
    """Retryable, as its cause may pass; a caller's own cancellation is never mistaken for it."""
    policy = RetryOptions(max_retries=1, base_delay=1, mode="fixed", try_timeout=10)
    with pytest.raises(ServiceTimeoutError, match="after 10 s, the try_timeout of the RetryOptions") as caught:
        await retrying(_Slow(60, 60), policy, RNG)
    assert caught.value.is_retryable
    with pytest.raises(TimeoutError, match="its own"):
        await retrying(_Slow(1, raises=TimeoutError("its own")), policy, RNG)
    slow = _Slow(60)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await retrying(slow, policy, RNG)
    assert (slow.cancelled, len(slow.began)) == (1, 1)


async def test_attempt_that_swallows_its_cancellation_succeeds() -> None:
    """What it returns is not thrown away."""

    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "late"
        return "never"

    assert await retrying(stubborn, RetryOptions(max_retries=0, try_timeout=10), RNG) == "late"
