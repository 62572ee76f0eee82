"""The one loop that retries a failed operation. `core/backoff.py` decides what follows a failure."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from eventpump.aio.tasks import wait_for_event
from eventpump.core.backoff import Retries, RetryPolicy, gives_up
from eventpump.errors import ServiceTimeoutError

_T = TypeVar("_T")


async def within_try(
    attempt: Callable[[], Awaitable[_T]], try_timeout: float | None, on_expired: Callable[[], None] | None = None
) -> _T:
    """Run one attempt of an operation, and cancel it after its time, if it has one: then it raises
    `ServiceTimeoutError`."""
    if try_timeout is None:
        return await attempt()
    limit = asyncio.timeout(try_timeout)
    try:
        async with limit:
            return await attempt()
    except TimeoutError as error:
        if not limit.expired():
            raise
        if on_expired is not None:
            on_expired()
        raise try_expired(try_timeout) from error


def try_expired(try_timeout: float) -> ServiceTimeoutError:
    """Return the error of an attempt that was cancelled after its time, in seconds."""
    return ServiceTimeoutError(
        f"the attempt was cancelled after {try_timeout:g} s, the try_timeout of the RetryOptions"
    )


async def retrying(
    attempt: Callable[[], Awaitable[_T]],
    policy: RetryPolicy,
    rng: random.Random,
    *,
    is_final: Callable[[Exception], bool] = gives_up,
    was_attached: Callable[[], bool] | None = None,
    until: float = math.inf,
    least_time: float = 0.0,
    stop: asyncio.Event | None = None,
    on_expired: Callable[[], None] | None = None,
    on_retry: Callable[[Exception, float], None] | None = None,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> _T:
    """Attempt an operation until it succeeds, and return its result.

    After a failure the service's busy wait is added to the policy's delay. If it is cancelled, the attempt in progress
    is cancelled, and none follows.

    Args:
        policy: The number of attempts, the delays between them, and how long one may take.
        is_final: Returns whether no further attempt can help after an error. By default: unless it is a `ServiceError`
            whose `Recovery` is not to give up, or a `StoreError`.
        was_attached: Returns whether the attempt that has just failed had a link. If given, an attempt that failed
            because there is no connection is repeated early, and only attempts that are as far apart as their delays
            count (`TryPace`).
        until: The time, by the loop's clock, at which the attempt in progress is cancelled and no other one begins.
        least_time: Seconds that an attempt may take even if it then ends after `until`; infinite if it is never
            cancelled.
        stop: If this event is set, no further attempt follows. The attempt in progress is not affected.
        on_expired: Called when an attempt was cancelled after the `try_timeout` of the policy.
        on_retry: Called before each delay, with the error and the delay in seconds.
        sleep: Waits for a delay; its exceptions end the attempts. Not called if `stop` is given.

    Raises:
        Exception: The error of the last attempt, if it is final, or if policy, time or `stop` allow no other one.
        TimeoutError: The first attempt was still in progress at `until`. For a later one, the error of the attempt
            before it is raised instead, which is more specific.
    """
    loop = asyncio.get_running_loop()
    try_timeout = policy.try_timeout
    # Made after the first failure, as most operations have none. The same for limits of time: most have none.
    retries: Retries | None = None
    limit: asyncio.Timeout | None = None
    failure: Exception | None = None
    while True:
        began = loop.time()
        end = max(until, began + least_time)
        try:
            if end != math.inf:
                limit = asyncio.timeout_at(end)
                async with limit:
                    return await within_try(attempt, try_timeout, on_expired)
            if try_timeout is not None:
                return await within_try(attempt, try_timeout, on_expired)
            return await attempt()
        except Exception as error:
            if limit is not None and limit.expired() and isinstance(error, TimeoutError):
                if failure is None:
                    raise
                raise failure from failure.__cause__
            attached = was_attached is not None and was_attached()
            delay = None
            if not is_final(error):
                if retries is None:
                    retries = Retries(policy, until=until, allows_early=was_attached is not None)
                delay = retries.delay_after(error, rng, began=began, now=loop.time(), was_attached=attached)
            if delay is None:
                raise
            failure = error
        if on_retry is not None:
            on_retry(failure, delay)
        if stop is None:
            await sleep(delay)
        elif await wait_for_event(stop, delay):
            raise failure
