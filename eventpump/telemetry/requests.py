"""Requests of a client that have a duration of their own: reads of properties, and writes of checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from eventpump.interfaces import HubDirectory, HubProperties, PartitionProperties
from eventpump.telemetry import names
from eventpump.telemetry.attributes import ClientPlace, with_error
from eventpump.telemetry.names import Operation
from eventpump.telemetry.otel import Recorder, SpanKind

_T = TypeVar("_T")


class MeasuredDirectory:
    """A `HubDirectory` that records its reads, which may have spans."""

    def __init__(
        self,
        directory: HubDirectory,
        recorder: Recorder,
        place: ClientPlace,
        peer: Callable[[], tuple[str, int] | None],
        *,
        has_spans: bool,
    ) -> None:
        self._directory = directory
        self._recorder = recorder
        self._place = place
        self._peer = peer
        self._has_spans = has_spans

    async def get_hub_properties(self, hub: str) -> HubProperties:
        return await self._recorded(names.GET_HUB, None, self._directory.get_hub_properties(hub))

    async def get_partition_properties(self, hub: str, partition_id: str) -> PartitionProperties:
        read = self._directory.get_partition_properties(hub, partition_id)
        return await self._recorded(names.GET_PARTITION, partition_id, read)

    def _recorded(self, operation: Operation, partition_id: str | None, read: Awaitable[_T]) -> Coroutine[Any, Any, _T]:
        return recorded(
            self._recorder, self._place, operation, partition_id, read, peer=self._peer, has_span=self._has_spans
        )


async def recorded(
    recorder: Recorder,
    place: ClientPlace,
    operation: Operation,
    partition_id: str | None,
    work: Awaitable[_T],
    *,
    peer: Callable[[], tuple[str, int] | None] = lambda: None,
    has_span: bool = True,
) -> _T:
    """Await a request of a client, in a span of its own, and record how long it took. Raises what it raises."""
    now = asyncio.get_running_loop().time
    began, span = now(), None
    if has_span and recorder.tracer is not None:
        span = recorder.start(place, operation, SpanKind.CLIENT, place.of_span(operation, partition_id))

    def ended(error: BaseException | None) -> None:
        recorder.end(span, error, peer())
        if (meters := recorder.meters) is not None:
            measured = with_error(place.of_metric(operation, partition_id), error)
            recorder.measure(meters.operation_duration, now() - began, measured)

    return await recorder.awaiting(work, recorder.enter(span), ended)
