"""Reads the lag of a consumer group, once or again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Unpack

from eventpump.aio.tasks import gather
from eventpump.clients.connection import split_options, takes_options
from eventpump.clients.group import AT_ONCE, GroupClient
from eventpump.errors import ConfigurationError, EventPumpError, ServiceError
from eventpump.eventhubs.events import EventPosition
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import Clock, PartitionProperties
from eventpump.lag.group import GroupLag, PartitionRead, first_unprocessed, progress_of
from eventpump.options.connection import ClientOptions
from eventpump.storage.checkpoints.stored import CheckpointReader, StoredCheckpoint


@takes_options(ClientOptions)
class LagReader(GroupClient):
    """Reads how far a consumer group is behind, in any partition of its hub.

    ::

        checkpoints = BlobCheckpointReader("checkpoints", connection_string=storage)
        reader = LagReader(connection_string, "telemetry", checkpoints=checkpoints)
        async with reader:
            lag = await reader.read()
        for each in lag.partitions:
            print(each.partition_id, each.state, each.lag)

    The checkpoints are read first, and then what the partitions hold, so a lag is never too small. Nothing is written,
    no lease is taken, and consumers do not notice it. All times are in seconds.

    Args:
        connection_string: The namespace's or the hub's connection string, as the portal shows it; None to give
            `fully_qualified_namespace` and `credential`, or a transport object.
        hub: The event hub's name; None if the connection string has an `EntityPath`.
        checkpoints: Reads the checkpoints of the group; closed with this.
        consumer_group: The consumer group that is watched. Default: "$Default".
        rate: The most requests per second to the hub. A namespace answers 50 in all. Default: 25.0.
        stalled_after: Without a new checkpoint for this long, a group that has unprocessed events has stalled. Default:
            300.0.
        reader_group: A consumer group of the hub's that nothing else needs. With it, one event is read in each
            partition that is behind, to report for how long it has been there. None to read none. Default: None.
        clock: None for the machine's time.
        options: See `ClientOptions`.

    Raises:
        ConfigurationError: There is no such option, or a value cannot work.
    """

    def __init__(
        self,
        connection_string: str | None = None,
        hub: str | None = None,
        *,
        checkpoints: CheckpointReader,
        consumer_group: str = "$Default",
        rate: float = 25.0,
        stalled_after: float = 300.0,
        reader_group: str | None = None,
        clock: Clock | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        if stalled_after <= 0:
            raise ConfigurationError("stalled_after", "must be above 0")
        if reader_group is not None and reader_group.lower() == consumer_group.lower():
            problem = "must be another consumer group than the one that is watched, whose partitions have readers"
            raise ConfigurationError("reader_group", problem)
        connection, _ = split_options(LagReader, ClientOptions, connection_string, hub, options)
        super().__init__(connection, consumer_group, checkpoints, rate, clock)
        self._reader_group = reader_group
        self._stalled_after = stalled_after
        self._partition_ids: Sequence[str] = ()
        self._reads: dict[str, PartitionRead] = {}
        self._stored_at: datetime | None = None
        self._notes: list[str] = []
        self._reading = asyncio.Lock()

    async def read(self) -> GroupLag:
        """Read the lag of each partition. For hubs of more partitions than `rate` it takes seconds.

        A partition that cannot be read is reported as it was read last, with the error. Calls follow each other.
        Canceled, what was read so far is kept for `watch`.

        Raises:
            StoreError: The checkpoints cannot be read.
            ServiceError: The hub cannot be read.
            ConfigurationError: There is no such store.
        """
        async with self._reading:
            hub = await self._hub()
            stored = await self._stored(self._checkpoints, hub)
            self._partition_ids, self._stored_at = sorted(hub.partition_ids, key=partition_order), self._now()
            problems = [
                f"partition {each.partition_id}: {each.place}: {each.problem}"
                for each in stored.partitions.values()
                if each.problem is not None
            ]
            self._notes = [*stored.notes, *problems]
            work = (self._read_partition(each, stored.partitions.get(each)) for each in self._partition_ids)
            await gather(work, at_once=AT_ONCE)
            return self._result()

    async def watch(self, interval: float = 10.0) -> AsyncGenerator[GroupLag, None]:
        """Read the lag again and again, and return what is known every so often.

        While a reading takes longer than the interval, the partitions that it has not reached are returned as they were
        read last. What fails once something was read is a note, and is tried again.

        Args:
            interval: Seconds between two results, above 0. Default: 10.0.

        Raises:
            StoreError: The checkpoints cannot be read, and never were.
            ServiceError: The hub cannot be read, and never was.
            ConfigurationError: There is no such store.
        """
        if interval <= 0:
            raise ConfigurationError("interval", "must be above 0")
        while True:
            begun = self._clock.monotonic()
            reading = asyncio.create_task(self.read())
            try:
                while True:
                    done, _ = await asyncio.wait({reading}, timeout=interval)
                    if done:
                        break
                    if self._stored_at is not None:
                        yield self._result()
            finally:
                reading.cancel()
                await asyncio.wait({reading})
            try:
                result = reading.result()
            except EventPumpError as error:
                if self._stored_at is None or self._is_closed:
                    raise
                self._notes = [str(error)]
                result = self._result()
            yield result
            await asyncio.sleep(max(0.0, begun + interval - self._clock.monotonic()))

    async def _read_partition(self, partition_id: str, checkpoint: StoredCheckpoint | None) -> None:
        before = self._reads.get(partition_id, PartitionRead(checkpoint=checkpoint))
        try:
            properties = await self._facts(partition_id)
            unread_since = await self._find_unread_since(before, properties, checkpoint)
        except ServiceError as error:
            self._reads[partition_id] = replace(before, error=str(error))
            return
        now = self._now()
        is_same = before.unchanged_since is not None and _position(before.checkpoint) == _position(checkpoint)
        unchanged_since = before.unchanged_since if is_same else now
        self._reads[partition_id] = PartitionRead(properties, now, checkpoint, unchanged_since, unread_since)

    async def _find_unread_since(
        self, before: PartitionRead, properties: PartitionProperties, checkpoint: StoredCheckpoint | None
    ) -> datetime | None:
        """Return when the oldest unprocessed event was enqueued; None if there is none, or it is not to be read."""
        following = first_unprocessed(properties, checkpoint)
        if self._reader_group is None or following is None or following > properties.last_enqueued_sequence_number:
            return None
        if before.properties is not None and before.unread_since is not None:
            known = first_unprocessed(before.properties, before.checkpoint)
            if known == following:
                return before.unread_since
        position = EventPosition.at_sequence_number(following, inclusive=True)
        try:
            event = await self._first_event(properties.partition_id, position, self._reader_group)
        except EventPumpError as error:
            where = f"partition {properties.partition_id}"
            self._notes.append(f"{where}: its oldest unprocessed event could not be read: {error}")
            return None
        return None if event is None else event.enqueued_time

    def _result(self) -> GroupLag:
        now = self._now()
        assert self._stored_at is not None
        partitions = [
            progress_of(each, self._reads.get(each, PartitionRead()), now, self._stalled_after)
            for each in self._partition_ids
        ]
        return GroupLag(self._scope, self._stored_at, partitions, tuple(self._notes))


def _position(checkpoint: StoredCheckpoint | None) -> tuple[int | None, str | None]:
    return (None, None) if checkpoint is None else (checkpoint.sequence_number, checkpoint.offset)
