"""What hosts, readers and producers call of a telemetry object, if they have one. Nothing here raises."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from eventpump.eventhubs.events import EventData, ReceivedEvent
from eventpump.interfaces import ConsumerScope, HubDirectory, Transport
from eventpump.reports import HostReport, PartitionStatus

_T = TypeVar("_T")

Encode: TypeAlias = Callable[[EventData], EventData]
"""Makes the event to send of the one given."""


class Running(Protocol):
    """A batch that is being processed, or events that are being sent, with the span for them."""

    def end(self, error: BaseException | None = None) -> None:
        """Record that it has ended, or failed with an error. Only the first call counts."""

    def enter(self) -> None:
        """Make its span the current one of the code that follows, until `end` or `leave`."""

    def leave(self) -> None:
        """Make the span current again that was so before `enter`."""


class PartitionTelemetry(Protocol):
    """What is recorded of the events of one partition."""

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call in place of a processor's method, with a context and a batch, to record its calls."""

    def began(self, events: Sequence[ReceivedEvent]) -> Running | None:
        """Record that a batch is passed to the program. None if nothing is recorded."""

    def reading_began(self) -> float:
        """Return when a read begins, to be given to `received`."""

    def received(self, began: float, events: Sequence[ReceivedEvent], error: BaseException | None = None) -> None:
        """Record the result of a read: events that are returned to the caller, or an error."""


class ConsumerTelemetry(Protocol):
    """What is recorded of a host or a reader."""

    def partition(self, partition_id: str) -> PartitionTelemetry:
        """Return what records the events of a partition."""

    def directory(self, directory: HubDirectory) -> HubDirectory:
        """Return a directory that records its reads, beside reading from another one."""

    def report(self, report: HostReport) -> None:
        """Count what a host reports: one of its hooks."""

    def checkpointing(self, partition_id: str, write: Awaitable[_T]) -> Coroutine[Any, Any, _T]:
        """Return what awaits a write of a checkpoint, and records it. It raises what that raises."""


class Writer(Protocol):
    """Makes the event to send of the one given, with a trace context if there is one to carry."""

    def __call__(self, event: EventData) -> EventData:
        """Return the event to send. Raises `EventError` if it cannot be encoded."""


class Send(Protocol):
    """One call of `send`; the producer sets the partition once it is known."""

    partition_id: str | None

    @property
    def writer(self) -> Writer:
        """Makes the events to send."""


class ProducerTelemetry(Protocol):
    """What is recorded of a producer."""

    def writer(self, encode: Encode | None) -> Writer:
        """Return what makes the events of a batch to send; `encode` does so without telemetry."""

    def record(self, encode: Encode | None, partition_id: str | None) -> Send | None:
        """Return what belongs to one call of `send`, to a partition if it is given; None if it is not recorded."""

    def sending(
        self, work: Awaitable[_T], record: Any, events: Sequence[EventData] | None, count: int, written: object
    ) -> Coroutine[Any, Any, _T]:
        """Return what awaits a call of `send`, and records it as `record` returned it. It raises what that raises."""

    def buffering(self, encode: Encode | None, buffered: Callable[[], int]) -> Writer:
        """Return what makes the events to send of those given one by one to a buffer, which holds so many bytes."""

    def publishing(
        self, work: Awaitable[_T], events: Sequence[object], count: int, partition_id: str | None
    ) -> Coroutine[Any, Any, _T]:
        """Return what awaits the sending of a message of a buffer, and records it. It raises what that raises."""

    def directory(self, directory: HubDirectory) -> HubDirectory:
        """Return a directory that records its reads, beside reading from another one."""

    def opened(self) -> None:
        """Called when the buffer is open, on its event loop."""

    def close(self) -> None:
        """Observe the producer no longer: it is closed."""


class SinkTelemetry(Protocol):
    """What is recorded of Spark's sink, on the driver."""

    def publishing(self, publish: Callable[[], _T], counts: Callable[[_T], Mapping[str | None, int]]) -> _T:
        """Call what publishes a micro-batch, and record it, and the rows by partition. Raises what that raises."""


class ClientTelemetry(Protocol):
    """What clients take as `telemetry`: `eventpump.telemetry.Telemetry`."""

    def of_host(
        self, scope: ConsumerScope, owner_id: str, transport: object, statuses: Callable[[], list[PartitionStatus]]
    ) -> ConsumerTelemetry:
        """Return what records a host. Called on its event loop."""

    def of_reader(self, scope: ConsumerScope, name: str | None, transport: object) -> ConsumerTelemetry:
        """Return what records a reader. Called on its event loop."""

    def of_producer(
        self, hub: str, name: str | None, transport: Transport, in_doubt: Callable[[], Mapping[str, int]]
    ) -> ProducerTelemetry:
        """Return what records a producer; `in_doubt` returns how many events are in doubt, by partition."""

    def of_sink(self, hub: str, name: str | None, namespace: str, port: int) -> SinkTelemetry:
        """Return what records Spark's sink: also a call that gets no connection."""


def checked(value: object) -> object:
    """Return the option `telemetry`. Raises `ValueError` if it is not a telemetry object."""
    if value is not None and (isinstance(value, type) or not callable(getattr(value, "of_host", None))):
        raise ValueError("must be an eventpump.telemetry.Telemetry(), or None")
    return value
