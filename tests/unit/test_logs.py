"""What several packages log in the same way."""

from __future__ import annotations

import logging

import pytest

from eventpump.errors import LinkDetachedError, ServiceBusyError
from eventpump.logs import log_retry, retry_logger

LOG = logging.getLogger("eventpump.tests")


def test_log_retry(caplog: pytest.LogCaptureFixture) -> None:
    """A retry is a line at DEBUG with attempt, delay and cause; fields that are None are absent."""
    caplog.set_level(logging.DEBUG, LOG.name)
    error = LinkDetachedError("gone", condition="amqp:link:detach-forced")
    log_retry(LOG, "sending", error, delay=0.25, attempt=2, hub="hub", partition_id=None)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == f"sending: attempt 2 failed, retried in 0.250 s: {error}"
    assert (record.__dict__["attempt"], record.__dict__["hub"]) == (2, "hub")
    assert "partition_id" not in record.__dict__


def test_log_retry_throttled(caplog: pytest.LogCaptureFixture) -> None:
    """A retry because the service throttles is a line at INFO."""
    caplog.set_level(logging.INFO, LOG.name)
    log_retry(LOG, "sending", ServiceBusyError("wait"), delay=4.1, attempt=1)
    log_retry(LOG, "sending", LinkDetachedError("gone"), delay=0.1, attempt=2)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "sending: attempt 1 throttled, retried in 4.100 s: wait")
    ]


def test_retry_logger(caplog: pytest.LogCaptureFixture) -> None:
    """Each retry of one operation is a line with the number of its attempt."""
    caplog.set_level(logging.DEBUG, LOG.name)
    on_retry = retry_logger(LOG, "sending", hub="hub")
    for delay in (0.1, 0.2):
        on_retry(LinkDetachedError("gone"), delay)
    assert [(record.__dict__["attempt"], record.__dict__["hub"]) for record in caplog.records] == [
        (1, "hub"),
        (2, "hub"),
    ]
