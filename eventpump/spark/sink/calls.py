"""Which batches the sinks of a process are called for: a query calls a sink once for each of its batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from eventpump.errors import ConfigurationError
from eventpump.spark.sink.records import Sink


@dataclass(slots=True)
class _Call:
    """A call for a batch in a run of the query.

    Attributes:
        may_repeat: Whether it has failed, so that the function may call again.
        is_missing: Whether rows of the batch are not published: the call has failed, or another one was refused.
    """

    run_id: str
    batch_id: int
    may_repeat: bool = False
    is_missing: bool = False


class BatchCalls:
    """The newest call of every sink. Thread-safe.

    A second call for a batch would find it done, or share its numbers, and so lose its rows. The next run of a query
    may repeat the batch, and so may the same run after a call that has failed; in a run whose function goes on without
    the error of a call, each later call is refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[Sink, _Call] = {}

    @contextmanager
    def call(self, sink: Sink, run_id: str, batch_id: int) -> Iterator[None]:
        """Record a call in a run while it lasts, and after it. Raises `ConfigurationError` for a second one of the
        batch, and where one has failed for another batch."""
        with self._lock:
            mine = self._newest[sink] = self._begin(sink, run_id, batch_id)
        try:
            yield
        except BaseException:
            mine.may_repeat = mine.is_missing = True
            raise

    def _begin(self, sink: Sink, run_id: str, batch_id: int) -> _Call:
        before = self._newest.get(sink)
        if before is None or before.run_id != run_id:
            return _Call(run_id, batch_id)
        if before.batch_id == batch_id and not before.may_repeat:
            before.is_missing = True
            raise ConfigurationError(
                "sink_id",
                f"{sink.name!r} is called for batch {batch_id} a second time in this run of the query, and the "
                "rows of this call are not published: publish all rows of a batch by one call, such as "
                "publish(first.unionByName(second), batch_id), or name each call, as by "
                'publish(first, batch_id, part="first")',
            )
        if before.batch_id != batch_id and before.is_missing:
            raise ConfigurationError(
                "sink_id",
                f"{sink.name!r} is called for batch {batch_id}, but a call for batch {before.batch_id} has failed in "
                "this run of the query, and its error was not raised: rows of that batch are not published. Let the "
                "function raise the error of a call, so that Spark repeats the batch",
            )
        return _Call(run_id, batch_id)
