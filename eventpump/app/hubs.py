"""The hubs of an application under test: publish into them, and wait for what its functions do."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from eventpump.aio.tasks import gather, resolve
from eventpump.clients.consumers import EventProcessorHost, PartitionReader
from eventpump.clients.producers import EventProducer
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.codecs import PayloadCodec
from eventpump.eventhubs.decoding import Decoder, encoded
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.reports import HostReport

_T = TypeVar("_T")


class Changes:
    """Lets a test wait until a host reports something."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def reported(self, report: HostReport) -> None:
        """Let what waits look again. A hook."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            resolve(waiter, None)

    def next(self) -> asyncio.Future[None]:
        """Return a future that completes with the next report."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter


class AppHubs:
    """The hubs of an application under test, by name; see `EventHubsApp.test`, which makes it.

    Args:
        connection_string: Of the local service.
        partitions: The number of partitions of each hub.
        hosts: The hosts that run, by hub and consumer group.
        subscribers: The hub, the consumer group and the subscription of each subscriber.
        changes: Shows every report of a host.
        codecs: By hub, what its events may be encoded with.
        timeout: Seconds that any wait may take.
    """

    def __init__(
        self,
        connection_string: str,
        partitions: Mapping[str, int],
        hosts: Mapping[tuple[str, str], EventProcessorHost],
        subscribers: Collection[tuple[str, str, str]],
        *,
        running: asyncio.Task[None],
        changes: Changes,
        decoder: Decoder,
        codecs: Mapping[str, Sequence[PayloadCodec]],
        group: str,
        timeout: float,
    ) -> None:
        self._hubs = {name: AppHub(self, name) for name in partitions}
        self.connection_string = connection_string
        """The connection string of the local service, for other clients."""
        self.partitions = partitions
        """The number of partitions of each hub."""
        self._hosts = hosts
        self._subscribers = subscribers
        self._running = running
        self._changes = changes
        self.decoder = decoder
        """Decodes payloads."""
        self.codecs = codecs
        """By hub, what its events may be encoded with."""
        self.group = group
        """The consumer group to read with."""
        self._timeout = timeout

    def __getitem__(self, hub: str) -> AppHub:
        """Return a hub. Raises `ConfigurationError` if the application has no such hub."""
        if hub not in self._hubs:
            known = ", ".join(sorted(self._hubs))
            raise ConfigurationError("hub", f"there is no hub {hub}; there are {known}; add others by test(hubs=)")
        return self._hubs[hub]

    async def __aenter__(self) -> Self:
        """Wait until every subscriber reads every partition."""
        await self.within(self._all_read(), "every subscriber reads every partition")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: the application is closed by what started it."""

    async def within(self, work: Coroutine[Any, Any, _T], until: str) -> _T:
        """Run something while the application runs.

        Raises:
            Exception: What the application ended with.
            TimeoutError: It took too long.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._running}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._running.done():
                self._running.result()
                raise ConfigurationError("app", f"was stopped before {until}")
            raise TimeoutError(f"after {self._timeout:g} s it is not so that {until}")
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def handled(self, hub: str) -> None:
        """As `AppHub.handled`."""
        found = [each for each in self._subscribers if each[0] == hub]
        if not found:
            raise ConfigurationError("hub", f"no subscriber handles the events of hub {hub}")
        await self.within(gather(self._drained(*each) for each in found), f"the events of hub {hub} are handled")

    async def _drained(self, hub: str, group: str, name: str) -> None:
        """Wait until a subscriber has processed all partitions up to their present ends."""
        host, left = self._hosts[hub, group], {str(number) for number in range(self.partitions[hub])}
        while left:
            change = self._changes.next()
            left -= set(await host.drain(name))
            if left:  # they are between two owners
                await change

    async def _all_read(self) -> None:
        while not all(self._is_read(*each) for each in self._subscribers):
            await self._changes.next()

    def _is_read(self, hub: str, group: str, name: str) -> bool:
        host = self._hosts.get((hub, group))
        statuses = [] if host is None else [each for each in host.partitions if each.subscription == name]
        return len([each for each in statuses if each.is_attached]) == self.partitions[hub]


class AppHub:
    """One hub of an application under test."""

    def __init__(self, hubs: AppHubs, name: str) -> None:
        self._hubs = hubs
        self.name = name
        """The hub's name."""

    async def publish(self, *values: Any, partition_key: str | None = None, partition_id: str | None = None) -> None:
        """Publish values, and wait until they are stored.

        Args:
            values: Bytes, text, an `EventData`, a `CloudEvent`, or what is JSON.
            partition_key: As of `EventProducer.send`. Default: None.
            partition_id: As of `EventProducer.send`. Default: None.

        Raises:
            EventError: A value has no form as an event.
        """
        events = [encoded(value) for value in values]
        async with EventProducer(self._hubs.connection_string, self.name) as producer:
            await producer.send(events, partition_key=partition_key, partition_id=partition_id)

    async def handled(self) -> None:
        """Wait until every subscriber of the hub has processed what the hub holds at the call.

        What it published for these events is stored then. Of several steps, wait for each in turn.

        Raises:
            EventPumpError: What the application ended with, such as `ProcessorFailedError`.
            TimeoutError: It took too long, as when a function fails and is retried.
        """
        await self._hubs.handled(self.name)

    async def published(self, kind: Any = ReceivedEvent) -> list[Any]:
        """Return all that the hub holds, in the order in which it was stored, as far as that is known.

        Args:
            kind: The type to decode the payloads as. Default: `ReceivedEvent`, the events themselves.

        Raises:
            DecodeError: An event is not of that type.
        """
        decode = self._hubs.decoder.decoder_for(kind)
        numbers = range(self._hubs.partitions[self.name])
        read = await self._hubs.within(gather(self._read(str(each)) for each in numbers), f"hub {self.name} is read")
        events = [event for part in read for event in part]
        events.sort(key=lambda event: event.enqueued_time)
        return [decode(event) for event in events]

    async def _read(self, partition_id: str) -> list[ReceivedEvent]:
        reader = PartitionReader(
            self._hubs.connection_string,
            self.name,
            partition_id=partition_id,
            consumer_group=self._hubs.group,
            end="latest",
            decode=self._hubs.codecs.get(self.name),
        )
        async with reader:
            return await reader.read_all()
