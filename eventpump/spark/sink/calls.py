"""Which batches the sinks of a process are called for: a query calls a sink once for each of its batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from eventpump.errors import ConfigurationError
from eventpump.spark.sink.records import Sink


@dataclass(frozen=True, slots=True)
class _Call:
    run_id: str
    batch_id: int
    is_over: bool = False


class BatchCalls:
    """The newest call of every sink. Thread-safe.

    A second call for a batch would find it done, or share its numbers, and so lose its rows. The next run of a query
    may repeat the batch, and so may the same run after a call that has failed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[Sink, _Call] = {}

    @contextmanager
    def call(self, sink: Sink, run_id: str, batch_id: int) -> Iterator[None]:
        """Record a call in a run while it lasts, and after it if it has not failed.
        Raises `ConfigurationError` for a second one."""
        mine = _Call(run_id, batch_id)
        over = _Call(run_id, batch_id, is_over=True)
        with self._lock:
            before = self._newest.get(sink)
            if before in (mine, over):
                raise ConfigurationError(
                    "sink_id",
                    f"{sink.name!r} is called for batch {batch_id} a second time in this run of the query, and the "
                    "rows of this call are not published: publish all rows of a batch by one call, such as "
                    "publish(first.unionByName(second), batch_id), or name each call, as by "
                    'publish(first, batch_id, part="first")',
                )
            self._newest[sink] = mine
        is_over = False
        try:
            yield
            is_over = True
        finally:
            with self._lock:
                if self._newest.get(sink) is mine:  # not if a next run has begun
                    if is_over:
                        self._newest[sink] = over
                    else:
                        del self._newest[sink]
