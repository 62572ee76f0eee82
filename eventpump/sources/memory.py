"""A source in memory, for unit tests of processors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from eventpump.aio.closing import AsyncResource
from eventpump.aio.home import HomeLoop
from eventpump.amqp.message import Message
from eventpump.amqp.types import Timestamp
from eventpump.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    EntityNotFoundError,
    EventPumpError,
    SourceEndedError,
)
from eventpump.eventhubs.events import START_OFFSET, EventData, EventPosition
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, SEQUENCE_NUMBER
from eventpump.interfaces import HubProperties, PartitionProperties, ReceiveSink
from eventpump.sources.checks import check_time, check_whole
from eventpump.sources.links import NumberedLink
from eventpump.sources.positions import first_to_read, offset_of

_CREATED_AT = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class _Partition:
    """The events of a partition; the one at index i has the sequence number `begin + i`."""

    begin: int
    events: list[bytes] = field(default_factory=list)
    times: list[datetime] = field(default_factory=list)
    links: list[NumberedLink] = field(default_factory=list)
    refusals: list[EventPumpError] = field(default_factory=list)
    newest_time: datetime = _CREATED_AT
    is_ended: bool = False

    @property
    def end(self) -> int:
        return self.begin + len(self.events)


class MemorySource(AsyncResource):
    """Events that a test appends, and the host or reader under test delivers.

    ::

        source = MemorySource(partitions=2)
        source.append("0", b"one", EventData("two", properties={"kind": "b"}))
        source.end()
        reader = PartitionReader(source=source, partition_id="0")

    Everything is called in the thread of the event loop; `append`, `end` and `drop` also before there is one.

    Args:
        partitions: How many partitions there are; 1 or more. Default: 1.
        hub: The name under which stores keep leases and checkpoints. Default: "memory".
        first: The sequence number of the first event of each partition. Default: 0.
        created_at: When the source was created: another time means that checkpoints of before are of another hub.
            Default: 2024-01-01 UTC.

    Raises:
        ConfigurationError: A value cannot work.
    """

    def __init__(
        self, partitions: int = 1, *, hub: str = "memory", first: int = 0, created_at: datetime = _CREATED_AT
    ) -> None:
        check_whole("partitions", partitions, 1)
        check_whole("first", first, 0)
        check_time("created_at", created_at)
        self._hub = hub
        self._created_at = created_at
        self._partitions = {
            str(number): _Partition(first, newest_time=created_at - timedelta(milliseconds=1))
            for number in range(partitions)
        }
        self._is_closed = False
        self._home = HomeLoop(type(self).__name__, warns=False)  # while it has links

    # ------------------------------------------------------------------------------------------- what a test does

    def append(
        self,
        partition_id: str,
        *events: EventData | bytes | str,
        partition_key: str | None = None,
        enqueued_time: datetime | None = None,
    ) -> list[int]:
        """Add events to a partition.

        Args:
            partition_id: The partition.
            events: The events, or bodies of events.
            partition_key: The partition key of all of them. Default: None.
            enqueued_time: When all of them were enqueued, with a time zone, and not before the events before them. None
                for a millisecond after the one before, each. Default: None.

        Returns:
            Their sequence numbers.

        Raises:
            EventError: An event cannot be encoded; nothing was added.
            ConfigurationError: There is no such partition, it has ended, or the time is earlier than that of the event
                before; nothing was added.
        """
        partition = self._chosen(partition_id)[0]
        if partition.is_ended:
            raise ConfigurationError("partition_id", f"partition {partition_id} has ended: nothing follows its end")
        if enqueued_time is not None:
            check_time("enqueued_time", enqueued_time)
        if enqueued_time is not None and enqueued_time < partition.newest_time:
            raise ConfigurationError(
                "enqueued_time", f"must not be before that of the last event, {partition.newest_time}"
            )
        newest, added, times = partition.newest_time, list[bytes](), list[datetime]()
        for number, event in enumerate(events, partition.end):
            newest = newest + timedelta(milliseconds=1) if enqueued_time is None else enqueued_time
            data = event if isinstance(event, EventData) else EventData(event)
            added.append(_stored(data, number, newest, partition_key))
            times.append(newest)
        numbers = list(range(partition.end, partition.end + len(added)))
        partition.events += added
        partition.times += times
        partition.newest_time = newest
        _serve(partition)
        return numbers

    def end(self, partition_id: str | None = None) -> None:
        """End a partition, or all: what was appended is still delivered, and nothing follows.

        Args:
            partition_id: The partition; None for all.
        """
        for partition in self._chosen(partition_id):
            partition.is_ended = True
            _serve(partition)

    def fail(self, error: EventPumpError, partition_id: str | None = None) -> int:
        """End the open links of a partition, or all, with an error.

        Args:
            error: The error; by its `recovery`, if it is a `ServiceError`, links are opened again.
            partition_id: The partition; None for all. Default: None.

        Returns:
            How many links there were.
        """
        links = [link for partition in self._chosen(partition_id) for link in partition.links]
        for link in links:
            link.end(error)
        return len(links)

    def lose_links(self, partition_id: str | None = None) -> int:
        """End the open links of a partition, or all, as a lost connection does. Return how many there were.

        Args:
            partition_id: The partition; None for all.
        """
        return self.fail(ConnectionLostError("the connection was cut by the test"), partition_id)

    def refuse(self, error: EventPumpError, partition_id: str | None = None, *, times: int = 1) -> None:
        """Refuse to open a partition, or any, with an error.

        Args:
            error: The error.
            partition_id: The partition; None for each of them. Default: None.
            times: How often, per partition. Default: 1.
        """
        for partition in self._chosen(partition_id):
            partition.refusals += [error] * times

    def drop(self, partition_id: str, before: int) -> None:
        """Drop the events below a sequence number, as retention does."""
        partition = self._chosen(partition_id)[0]
        count = max(0, min(before, partition.end) - partition.begin)
        del partition.events[:count]
        del partition.times[:count]
        partition.begin += count

    def credit(self, partition_id: str) -> list[int]:
        """Return how many events each open link of a partition may still get."""
        return [link.credit for link in self._chosen(partition_id)[0].links]

    # ------------------------------------------------------------------------------------------- what is delivered

    @property
    def fully_qualified_namespace(self) -> str:
        """The first part of the name under which stores keep leases and checkpoints."""
        return "memory.eventpump"

    @property
    def hub(self) -> str:
        """The second part of that name."""
        return self._hub

    async def partitions(self) -> HubProperties:
        """See `EventSource`."""
        self._check_open()
        return HubProperties(self._hub, self._created_at, tuple(self._partitions))

    async def partition_properties(self, partition_id: str) -> PartitionProperties:
        """See `EventSource`."""
        partition = self._found(partition_id)
        newest = partition.end - 1
        return PartitionProperties(
            hub=self._hub,
            partition_id=partition_id,
            beginning_sequence_number=partition.begin,
            last_enqueued_sequence_number=newest,
            last_enqueued_offset=offset_of(newest) if newest >= 0 else START_OFFSET,
            last_enqueued_time=partition.newest_time,
            is_empty=not partition.events,
        )

    async def open(
        self,
        partition_id: str,
        position: EventPosition,
        sink: ReceiveSink,
        *,
        consumer_group: str = "$Default",
        owner_level: int | None = None,
    ) -> NumberedLink:
        """See `EventSource`."""
        partition = self._found(partition_id)
        if partition.refusals:
            raise partition.refusals.pop(0)
        self._enter(is_new=True)

        def first_after(moment: datetime, inclusive: bool) -> int:
            find = bisect_left if inclusive else bisect_right
            return partition.begin + find(partition.times, moment)

        def read(number: int, count: int) -> tuple[list[bytes], int]:
            number = max(number, partition.begin)
            found = partition.events[number - partition.begin :][:count] if number < partition.end else []
            if not found and partition.is_ended:
                raise SourceEndedError(partition_id)
            return found, number + len(found)

        first = first_to_read(position, partition.begin, partition.end, first_after=first_after)
        link = NumberedLink(first, read, sink, partition.links.remove)
        partition.links.append(link)
        return link

    async def aclose(self) -> None:
        """See `EventSource`."""
        self._enter()
        self._is_closed = True
        for partition in self._partitions.values():
            for link in tuple(partition.links):
                await link.aclose()

    def _enter(self, *, is_new: bool = False) -> None:
        if not any(partition.links for partition in self._partitions.values()):
            self._home.release()
            if not is_new:
                return
        self._home.enter()

    def _chosen(self, partition_id: str | None) -> list[_Partition]:
        self._enter()
        if partition_id is None:
            return list(self._partitions.values())
        if partition_id not in self._partitions:
            raise ConfigurationError("partition_id", f"there is no partition {partition_id!r}")
        return [self._partitions[partition_id]]

    def _found(self, partition_id: str) -> _Partition:
        self._check_open()
        if partition_id not in self._partitions:
            raise EntityNotFoundError(f"the source has no partition {partition_id!r}", entity=partition_id)
        return self._partitions[partition_id]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("memory source")


def _stored(event: EventData, number: int, enqueued_time: datetime, partition_key: str | None) -> bytes:
    message = Message.decode(event.encode(partition_key))
    message.message_annotations = {
        SEQUENCE_NUMBER: number,
        OFFSET: offset_of(number),
        ENQUEUED_TIME: Timestamp.from_datetime(enqueued_time),
        **(message.message_annotations or {}),
    }
    return message.encode()


def _serve(partition: _Partition) -> None:
    for link in tuple(partition.links):
        link.serve()
