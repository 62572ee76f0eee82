"""The lag of a real query, reported to a function and to the log, by a classic session and by Spark Connect."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from eventpump.spark import LagListener, QueryLag, register
from tests.spark.reading import listening
from tests.spark.service import SparkService

BACKLOG = 10


class Gauge:
    """Keeps the lags it is called with; raises at the first."""

    def __init__(self) -> None:
        self.lags: list[QueryLag] = []
        self._changed = threading.Condition()

    def __call__(self, lag: QueryLag) -> None:
        with self._changed:
            self.lags.append(lag)
            self._changed.notify_all()
        if len(self.lags) == 1:
            raise RuntimeError("a gauge that fails")

    def until_caught_up(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self.lags) and self.lags[-1].total == 0)


@pytest.mark.parametrize("session", ["spark", "connect"])
def test_progress_of_a_query_that_catches_up_has_its_lag(
    session: str,
    request: pytest.FixtureRequest,
    service: SparkService,
    checkpoint: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Batch by batch the lag falls to nothing, per partition; a hook that fails stops neither query nor listener."""
    spark: Any = request.getfixturevalue(session)
    hub = service.new_hub(2)
    service.publish_all(hub, {"0": [b"x"] * BACKLOG, "1": [b"y"] * (2 * BACKLOG)})
    register(spark)
    gauge = Gauge()
    rows = (
        spark.readStream.format("eventpump")
        .options(connectionString=service.connection_string, hub=hub, startingPosition="earliest")
        .option("maxEventsPerTrigger", BACKLOG)
        .schema("body binary")
        .load()
    )
    with caplog.at_level(logging.INFO, "eventpump.spark"), listening(spark, LagListener(gauge)):
        query = rows.writeStream.format("noop").queryName(session).option("checkpointLocation", checkpoint).start()
        try:
            gauge.until_caught_up()
        finally:
            query.stop()
    assert [lag.total for lag in gauge.lags] == [2 * BACKLOG, BACKLOG, 0]
    assert {lag.name for lag in gauge.lags} == {session}
    assert {lag.query_id for lag in gauge.lags} == {str(query.id)}
    first, *_, last = gauge.lags
    assert [(each.hub, each.partition_id) for each in last.partitions] == [(hub, "0"), (hub, "1")]
    assert [each.position for each in last.partitions] == [BACKLOG, 2 * BACKLOG]
    assert first.partitions[1].events > first.partitions[0].events > 0
    assert all(each.is_lower_bound for each in first.partitions)
    assert (last.seconds.max, last.events.max) == (0, 0)
    assert (first.arrival_rate, first.read_rate, last.arrival_rate) == (None, None, 0.0)
    assert (last.read_rate or 0.0) > 0.0
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        lag.describe() for lag in gauge.lags
    ]
    assert [record.exc_info is not None for record in caplog.records if record.levelno == logging.ERROR] == [True]
