"""What is recorded of hosts and readers: the processing of batches, reads, checkpoints, reports, and what they hold."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Token
from functools import partial
from types import CoroutineType
from typing import Any, TypeVar

from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.interfaces import HubDirectory
from eventpump.reports import (
    EventParked,
    EventSkipped,
    HostReport,
    LeaseLost,
    LeaseReleased,
    LeaseTaken,
    LinkFailed,
    LoopBlocked,
    PartitionStatus,
    ProcessorFailed,
    StoreFailed,
)
from eventpump.telemetry import names, otel
from eventpump.telemetry.asking import LoopQuestion
from eventpump.telemetry.attributes import Attributes, ClientPlace, error_type, of_received, with_error
from eventpump.telemetry.contexts import enqueued, links_of
from eventpump.telemetry.names import Instrument
from eventpump.telemetry.otel import Observable, Observed, Recorder, Span, SpanKind
from eventpump.telemetry.requests import MeasuredDirectory, recorded

_T = TypeVar("_T")


class RecordedBatch:
    """A batch that is being processed; see `Running`.

    Args:
        recorder: Ends the span.
        owner: Records how long it took.
    """

    __slots__ = ("_began", "_current", "_has_ended", "_owner", "_recorder", "_span", "_token")

    def __init__(self, recorder: Recorder, owner: PartitionRecorder, span: Span | None, began: float) -> None:
        self._recorder = recorder
        self._owner = owner
        self._span = span
        self._began = began
        self._current: otel.LeavingSpan | None = None
        self._token: Token[otel.Context] | None = None
        self._has_ended = False

    @property
    def span(self) -> Span | None:
        """Its span; None where none is recorded."""
        return self._span

    def enter(self) -> None:
        """See `Running`. Code that keeps the context beyond `end` has its former span as the current one then."""
        if self._span is not None and not self._has_ended:
            current = self._current = otel.LeavingSpan(self._span)
            self._token = self._recorder.enter(current)

    def leave(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._recorder.enter_again(token)

    def end(self, error: BaseException | None = None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if self._current is not None:
            self._current.leave()
        self._recorder.end(self._span, error)
        self._owner.processed(self._began, error)


class PartitionRecorder:
    """Records the events of one partition; see `PartitionTelemetry`.

    Args:
        peer: Returns the address and the port of the connection's peer; None if they are not known.
        has_parent: Whether the context of a single event is the parent of its span.
    """

    def __init__(
        self,
        recorder: Recorder,
        place: ClientPlace,
        partition_id: str,
        peer: Callable[[], tuple[str, int] | None],
        *,
        has_parent: bool,
    ) -> None:
        self._recorder = recorder
        self._place = place
        self._partition_id = partition_id
        self._peer = peer
        self._has_parent = has_parent
        self._now = asyncio.get_running_loop().time
        self._of_span = place.of_span(names.PROCESS, partition_id)
        self._of_process = place.of_metric(names.PROCESS, partition_id)
        self._of_receive = place.of_metric(names.RECEIVE, partition_id)
        self._of_lag = place.of_metric(None, partition_id)

    # ------------------------------------------------------------------------------------------------- processing

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        def call(context: object, events: Sequence[ReceivedEvent]) -> Any:
            # Called first: what is not to be awaited is refused by the caller, as without telemetry.
            work = method(context, events)
            if not recorder.is_on or not events:
                return work
            is_coroutine = type(work) is CoroutineType or isinstance(work, Awaitable)
            return self._processing(work, events) if is_coroutine else work

        return call

    async def _processing(self, work: Awaitable[_T], events: Sequence[ReceivedEvent]) -> _T:
        running = self.began(events)
        if running is None:
            return await work
        return await self._recorder.awaiting(work, self._recorder.enter(running.span), running.end)

    def began(self, events: Sequence[ReceivedEvent]) -> RecordedBatch | None:
        recorder = self._recorder
        if not events or not recorder.is_on:
            return None
        try:
            span = None
            if recorder.tracer is not None:
                links = links_of(events)
                context = None
                if self._has_parent and links and len(events) == 1:
                    context = otel.with_parent(links[0].context)
                attributes = of_received(self._of_span, events)
                span = recorder.start(self._place, names.PROCESS, SpanKind.CONSUMER, attributes, links, context=context)
            self._consumed(self._of_process, events)
        except BaseException as error:
            recorder.guard.failed(error)
            return None
        return RecordedBatch(recorder, self, span, self._now())

    def processed(self, began: float, error: BaseException | None) -> None:
        """Record how long a batch was processed."""
        meters = self._recorder.meters
        if meters is not None:
            attributes = with_error(self._of_process, error)
            self._recorder.measure(meters.process_duration, self._now() - began, attributes)

    def _consumed(self, attributes: Attributes, events: Sequence[ReceivedEvent]) -> None:
        meters = self._recorder.meters
        if meters is None:
            return
        self._recorder.measure(meters.consumed_messages, len(events), attributes)
        first = enqueued(events[0])
        if first is not None:
            self._recorder.measure(meters.consumer_lag, max(0.0, time.time() - first), self._of_lag)

    # ------------------------------------------------------------------------------------------------------ reads

    def reading_began(self) -> float:
        return self._now()

    def received(self, began: float, events: Sequence[ReceivedEvent], error: BaseException | None = None) -> None:
        recorder = self._recorder
        if (not events and error is None) or not recorder.is_on:
            return
        took = self._now() - began
        try:
            if recorder.tracer is not None:
                attributes = self._place.of_span(names.RECEIVE, self._partition_id, self._peer())
                start_time = time.time_ns() - int(took * 1e9)
                if error is None:
                    attributes = of_received(attributes, events)
                span = recorder.start(
                    self._place, names.RECEIVE, SpanKind.CLIENT, attributes, links_of(events), start_time=start_time
                )
                recorder.end(span, error)
            if (meters := recorder.meters) is not None:
                recorder.measure(meters.operation_duration, took, with_error(self._of_receive, error))
                if events:
                    self._consumed(self._of_receive, events)
        except BaseException as failure:
            recorder.guard.failed(failure)


class ConsumerRecorder(Observable):
    """Records a host or a reader; see `ConsumerTelemetry`.

    Args:
        transport: The connection, whose peer is an attribute if it is known.
        statuses: Returns the partitions that a host runs; None for a reader.
        has_parent: Whether the context of a single event is the parent of its span.
        has_management_spans: Whether reads of properties have spans.
    """

    def __init__(
        self,
        recorder: Recorder,
        place: ClientPlace,
        transport: object,
        statuses: Callable[[], list[PartitionStatus]] | None,
        *,
        has_parent: bool,
        has_management_spans: bool,
    ) -> None:
        self._recorder = recorder
        self._place = place
        self._peer = partial(otel.peer_of, transport)
        self._has_parent = has_parent
        self._has_management_spans = has_management_spans
        self._held: LoopQuestion[Observed] | None = None
        if statuses is not None and recorder.instruments is not None:
            self._held = LoopQuestion(lambda: gauges_of(place, statuses()))
            recorder.instruments.observables.add(self)

    def partition(self, partition_id: str) -> PartitionRecorder:
        return PartitionRecorder(self._recorder, self._place, partition_id, self._peer, has_parent=self._has_parent)

    def directory(self, directory: HubDirectory) -> HubDirectory:
        return MeasuredDirectory(
            directory, self._recorder, self._place, self._peer, has_spans=self._has_management_spans
        )

    def checkpointing(self, partition_id: str, write: Awaitable[_T]) -> Coroutine[Any, Any, _T]:
        return recorded(self._recorder, self._place, names.CHECKPOINT, partition_id, write)

    # ---------------------------------------------------------------------------------------------------- reports

    def report(self, report: HostReport) -> None:
        meters = self._recorder.meters
        if meters is None:
            return
        counted = counts_of(report)
        if counted is None:
            return
        instrument, value, own = counted
        record = {
            names.PARTITION_MOVES: meters.partition_moves,
            names.HANDLER_FAILURES: meters.handler_failures,
            names.LINK_REOPENS: meters.link_reopens,
            names.STORE_FAILURES: meters.store_failures,
            names.LOOP_BLOCKED: meters.loop_blocked,
        }[instrument]
        self._recorder.measure(record, value, {**self._place.of_metric(None, report.partition_id), **own})

    # ----------------------------------------------------------------------------------------------------- gauges

    def observed(self) -> Observed:
        return [] if self._held is None else self._held.answer() or []


def counts_of(report: HostReport) -> tuple[Instrument, float, Attributes] | None:
    """Return what a report counts: the instrument, the value, and attributes beside those of the place; or None."""
    match report:
        case LeaseTaken(stolen_from=None):
            return names.PARTITION_MOVES, 1, {names.REASON: "acquired"}
        case LeaseTaken():
            return names.PARTITION_MOVES, 1, {names.REASON: "stolen"}
        case LeaseLost():
            return names.PARTITION_MOVES, 1, {names.REASON: "lost"}
        case LeaseReleased():
            return names.PARTITION_MOVES, 1, {names.REASON: "released"}
        case ProcessorFailed(error=error, outcome=outcome) if outcome is not None:
            return names.HANDLER_FAILURES, 1, {names.ERROR_TYPE: error_type(error), names.OUTCOME: outcome}
        case EventSkipped(error=error):
            return names.HANDLER_FAILURES, 1, {names.ERROR_TYPE: error_type(error), names.OUTCOME: "skipped"}
        case EventParked(error=error):
            return names.HANDLER_FAILURES, 1, {names.ERROR_TYPE: error_type(error), names.OUTCOME: "parked"}
        case LinkFailed(error=error):
            return names.LINK_REOPENS, 1, {names.ERROR_TYPE: error_type(error)}
        case StoreFailed(operation=operation):
            return names.STORE_FAILURES, 1, {names.OPERATION: operation}
        case LoopBlocked(duration=duration, operation=operation):
            return names.LOOP_BLOCKED, duration, {} if operation is None else {names.OPERATION: operation}
    return None


def gauges_of(place: ClientPlace, statuses: Sequence[PartitionStatus]) -> Observed:
    """Return what is measured of the partitions that a host runs, in sums where the place has no partitions."""
    sums: Counter[tuple[Instrument, tuple[tuple[str, Any], ...]]] = Counter()
    seen: set[str] = set()

    def add(instrument: Instrument, partition_id: str, value: float, **own: str) -> None:
        attributes = {**place.of_metric(None, partition_id), **own}
        sums[instrument, tuple(attributes.items())] += value  # type: ignore[assignment]  # numbers of any kind

    for status in statuses:
        which = {} if status.subscription == DEFAULT_SUBSCRIPTION else {names.SUBSCRIPTION: status.subscription}
        if status.partition_id not in seen:  # what all subscriptions of a partition have together
            seen.add(status.partition_id)
            add(names.PARTITION_OWNED, status.partition_id, 1, **{names.STATE: status.state_name})
            add(names.CACHE_SIZE, status.partition_id, status.buffered_bytes)
        for position, lag in (("delivered", status.lag), ("checkpointed", status.checkpointed_lag)):
            if lag is not None:
                add(names.PARTITION_LAG, status.partition_id, lag, **{names.POSITION: position, **which})
    return [(instrument, value, dict(attributes)) for (instrument, attributes), value in sums.items()]
