"""Log lines that several packages write in the same way."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from eventpump.errors import ServiceBusyError


def log_retry(
    log: logging.Logger, what: str, error: BaseException, *, delay: float, attempt: int, **fields: object
) -> None:
    """Log that an operation failed and is retried: at DEBUG, or at INFO if the service throttles.

    Args:
        log: The logger of the caller's package.
        what: The operation.
        error: Why it failed.
        delay: Seconds until the next attempt.
        attempt: How many attempts have failed.
        **fields: Further fields of the record, such as `hub` and `partition_id`; None for those that do not apply.
    """
    is_throttled = isinstance(error, ServiceBusyError)
    level = logging.INFO if is_throttled else logging.DEBUG
    if log.isEnabledFor(level):
        outcome = "throttled" if is_throttled else "failed"
        text = "%s: attempt %d %s, retried in %.3f s: %s"
        log.log(level, text, what, attempt, outcome, delay, error, extra=present(attempt=attempt, **fields))


def retry_logger(log: logging.Logger, what: str, **fields: object) -> Callable[[Exception, float], None]:
    """Return an `on_retry` for one call of `aio.retry.retrying`, which logs each retry as `log_retry` does.

    Args:
        log: The logger of the caller's package.
        what: The operation.
        **fields: As of `log_retry`.
    """
    attempts = itertools.count(1)

    def on_retry(error: Exception, delay: float) -> None:
        log_retry(log, what, error, delay=delay, attempt=next(attempts), **fields)

    return on_retry


def present(**fields: object) -> dict[str, object]:
    """Return the fields of a log record that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
