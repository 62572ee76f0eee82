"""Which query calls the sink, as far as Spark provides it.

A classic session has the query's id among the properties of the thread. Under Connect the function of a query runs in a
process of its own, for one run of the query, which is not given the id: the query is sought among those of the session.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("eventpump.spark")

_QUERY_ID: Final = "sql.streaming.queryId"
_SERVER: Final = "SPARK_CONNECT_LOCAL_URL"
"""The variable that Spark sets in the process in which a Connect server runs a query's function."""


class _Process:
    """What a process in which a Connect server runs a query's function knows of the query.

    Attributes:
        run_id: Stands for the run of the query.
        query_id: None as long as it is not found.
    """

    def __init__(self) -> None:
        self.run_id = uuid.uuid4().hex
        self.query_id: str | None = None


_PROCESS: Final = _Process()


class ActiveQuery(NamedTuple):
    """A query of a session.

    Args:
        is_running: Whether it is within a trigger, as a query is that calls a sink.
        newest_batch: The newest batch that this run of it has ended or was about to begin; None before the first.
    """

    query_id: str
    is_running: bool
    newest_batch: int | None


def find_query(active: Iterable[ActiveQuery], batch_id: int) -> str | None:
    """Return the id of the query that has called a sink for a batch; None unless only one may have.

    Not the only one that is active: the query that has called may be stopped since.
    """
    found = [
        each.query_id
        for each in active
        if each.is_running and (each.newest_batch is None or batch_id - 1 <= each.newest_batch <= batch_id)
    ]
    return found[0] if len(found) == 1 else None


def server_session() -> Any:
    """Return the session of a query whose function is being unpickled by a Connect server; None anywhere else."""
    if _SERVER not in os.environ:
        return None
    try:
        from pyspark.sql.connect.session import SparkSession

        return SparkSession.getActiveSession()
    except Exception:  # what another Spark does not have
        return None


@dataclass(frozen=True, slots=True)
class RunningQuery:
    """The query that a batch is of, as far as Spark provides it: not for a call by hand.

    Args:
        query_id: The same over restarts.
        run_id: Another one for each of them.
        newest_batch: The newest batch that this run has ended; None before the first, and where it is not known.
        is_sought: Whether Spark does not name the query, but it was sought among those of the session.
    """

    query_id: str | None = None
    run_id: str | None = None
    newest_batch: int | None = None
    is_sought: bool = False

    @classmethod
    def of(cls, frame: DataFrame, batch_id: int, session: Any = None) -> Self:
        """Find the query of a batch's DataFrame.

        Args:
            session: As of `server_session`.
        """
        try:
            context = frame.sparkSession.sparkContext
        except AttributeError:  # a Connect client has none
            return cls._sought(batch_id, session) if _SERVER in os.environ else cls()
        query_id = context.getLocalProperty(_QUERY_ID)
        if not query_id:
            return cls()
        classic: Any = frame.sparkSession
        jvm: Any = context._jvm  # noqa: SLF001 - PySpark has no public access to the JVM
        try:
            # The batch's own session, a clone, has no queries.
            queries = classic._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001 - likewise
            found = queries.get(jvm.java.util.UUID.fromString(query_id))
            progress = found.lastProgress()
            return cls(query_id, found.runId().toString(), None if progress is None else progress.batchId())
        except Exception:  # what is not public may be missing in another Spark
            return cls(query_id)

    @classmethod
    def _sought(cls, batch_id: int, session: Any) -> Self:
        if _PROCESS.query_id is None and session is not None:
            try:
                _PROCESS.query_id = find_query([_active(each) for each in session.streams.active], batch_id)
            except Exception as error:  # a query that has just ended, or another Spark
                _log.debug("queries of the session were not found: %s", error)
        return cls(_PROCESS.query_id, _PROCESS.run_id, is_sought=True)


def _active(query: Any) -> ActiveQuery:
    progress = query.lastProgress
    return ActiveQuery(query.id, query.status["isTriggerActive"], None if progress is None else progress.batchId)
