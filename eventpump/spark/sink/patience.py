"""How long the sinks wait for an outage of the service or the ledger to end."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from eventpump.aio.retry import retrying
from eventpump.core.backoff import Unlimited, gives_up
from eventpump.errors import ServiceError
from eventpump.options.base import RetryOptions
from eventpump.spark.connection import RETRY_TIMEOUT

T = TypeVar("T")

LONGEST_DELAY: Final = 5.0
"""Seconds between two tries at most."""


async def patiently(
    ask: Callable[[], Awaitable[T]],
    timeout: float = RETRY_TIMEOUT,
    *,
    base_delay: float = RetryOptions().base_delay,
    rng: random.Random | None = None,
    is_final: Callable[[Exception], bool] = gives_up,
    on_retry: Callable[[Exception, float], None] | None = None,
) -> T:
    """Ask the service or the ledger's store, again where that may help, until a time is over."""
    until = asyncio.get_running_loop().time() + timeout
    policy = Unlimited(base_delay, max(base_delay, LONGEST_DELAY))
    rng = random.Random() if rng is None else rng
    return await retrying(ask, policy, rng, is_final=is_final, until=until, least_time=math.inf, on_retry=on_retry)


async def retried(attempt: Callable[[], Awaitable[T]], timeout: float = RETRY_TIMEOUT) -> T:
    """Ask the service, again where that may help. What fails in the ledger's store is not repeated: it was already."""
    return await patiently(
        attempt, timeout, is_final=lambda error: not isinstance(error, ServiceError) or gives_up(error)
    )


def patient_retry(timeout: float, given: RetryOptions | None = None) -> RetryOptions:
    """Return retries of sends that together wait for about so many seconds, by the user's delays, and as often as they
    say."""
    if given is None:
        # Each delay is random, between nothing and its bound.
        tries = max(3, min(100, math.ceil(timeout / (LONGEST_DELAY / 2))))
        return RetryOptions(max_retries=tries, max_delay=LONGEST_DELAY)
    if given.max_retries is not None:
        return given
    delay = given.base_delay if given.mode == "fixed" else given.max_delay / 2
    # Not validated: delays may be so short that more retries than an option may name fit in.
    return given.model_copy(update={"max_retries": max(3, math.ceil(timeout / delay))})
