"""The steps over AMQP: the token, the hub, its partitions, and reading and sending as a program does."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from eventpump.clients.producers import EventProducer
from eventpump.doctor.findings import Finding, ProblemFoundError, StepOutcome, clean, span
from eventpump.errors import (
    AuthenticationError,
    ConsumerDisconnectedError,
    EntityNotFoundError,
    EventPumpError,
    QuotaExceededError,
    ServiceBusyError,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent
from eventpump.eventhubs.partitions import named_partitions
from eventpump.interfaces import (
    HubProperties,
    PartitionProperties,
    ReceiveLink,
    ReceiveLinkSpec,
    Transport,
)
from eventpump.options.base import RetryOptions
from eventpump.options.credentials import SharedKey, SharedSignature

READ: Final = 100
"""Events that are read of those that a partition holds, at most."""
READ_IN_ALL: Final = 1000
"""Events that are read of those that the hub holds: so many partitions do not take the throughput of consumers."""
_SOON: Final = 3600
_CREDIT: Final = 100
_AT_ONCE: Final = 8
_READER: Final = "eventpump-doctor"
_AGAIN: Final = "try again; if it stays so, look at the namespace's health in the portal"
_WAIT: Final = "wait until the service throttles less, or raise the throughput units of the namespace"


def credential_found(credential: object, now: float) -> str:
    """Describe the credential.

    Args:
        credential: As the settings have it.
        now: Seconds since the Unix epoch.

    Raises:
        ProblemFoundError: It is a signature that has expired.
    """
    if isinstance(credential, SharedKey):
        return f"key {clean(credential.name)}"
    if isinstance(credential, SharedSignature):
        end = credential.expires_at
        when = datetime.fromtimestamp(end, UTC).isoformat(sep=" ", timespec="minutes").removesuffix("+00:00")
        if end <= now:
            raise ProblemFoundError(
                f"the SharedAccessSignature expired at {when} UTC, {span(now - end)} ago",
                "make a new signature, or use the connection string of a key; and check this machine's clock",
            )
        text = f"a signature that expires at {when} UTC, in {span(end - now)}"
        if end - now < _SOON:
            raise ProblemFoundError(text, "links end then: make a new signature", outcome=StepOutcome.WARNING)
        return text
    return f"a credential of {type(credential).__name__}"


class ServiceSteps:
    """Steps over one transport, which is the caller's. Requests have `timeout` seconds."""

    def __init__(self, transport: Transport, hub: str, consumer_group: str, timeout: float) -> None:
        self._transport = transport
        self._hub = hub
        self._group = consumer_group
        self._timeout = timeout
        self.properties: HubProperties | None = None
        self.partitions: dict[str, PartitionProperties] = {}

    async def connect(self, credential: object) -> str:
        """Connect by AMQP, and have the token accepted; the hub's properties are read."""
        try:
            async with asyncio.timeout(self._timeout):
                self.properties = await self._transport.get_hub_properties(self._hub)
        except EntityNotFoundError:
            return "the token is accepted"
        except TimeoutError:
            raise ProblemFoundError(
                f"the service does not answer in AMQP within {self._timeout:g} s", _NOT_AMQP
            ) from None
        except AuthenticationError as error:
            raise ProblemFoundError(clean(str(error)), _token_advice(str(error), credential)) from error
        except ServiceBusyError as error:
            raise ProblemFoundError(f"the service is throttling: {clean(str(error))}", _WAIT) from error
        except ServiceError as error:
            raise ProblemFoundError(clean(str(error)), _NOT_AMQP) from error
        return "the token is accepted"

    async def find_hub(self) -> str:
        """Describe the hub. Raises `ProblemFoundError` if there is no such hub."""
        if self.properties is None:
            try:
                async with asyncio.timeout(self._timeout):
                    self.properties = await self._transport.get_hub_properties(self._hub)
            except EntityNotFoundError as error:
                raise ProblemFoundError(
                    f"the namespace has no hub {clean(self._hub)}",
                    "check the spelling; the portal, or `az eventhubs eventhub list`, shows which hubs there are",
                ) from error
            except (ServiceError, TimeoutError) as error:
                text = clean(str(error)) or f"no answer within {self._timeout:g} s"
                raise ProblemFoundError(f"hub {clean(self._hub)}: {text}", _AGAIN) from error
        created = self.properties.created_at.astimezone(UTC).isoformat(sep=" ", timespec="seconds")
        count = len(self.properties.partition_ids)
        return f"{clean(self.properties.name)}: {count} partitions, created {created.removesuffix('+00:00')} UTC"

    async def find_partitions(self) -> str:
        """Read the properties of the partitions. Raises `ProblemFoundError` if those of some cannot be read."""
        assert self.properties is not None
        room = asyncio.Semaphore(_AT_ONCE)
        failed: dict[str, Exception] = {}

        async def read(partition_id: str) -> None:
            try:
                async with room, asyncio.timeout(self._timeout):
                    read = await self._transport.get_partition_properties(self._hub, partition_id)
                self.partitions[partition_id] = read
            except (ServiceError, TimeoutError) as error:
                failed[partition_id] = error

        await asyncio.gather(*map(read, self.properties.partition_ids))
        if failed:
            which = named_partitions(list(failed))
            error = next(iter(failed.values()))
            text = clean(str(error)) or f"no answer within {self._timeout:g} s"
            busy = isinstance(error, ServiceBusyError)
            raise ProblemFoundError(
                f"{which}: {'throttled: ' if busy else ''}{text}",
                _WAIT if busy else _AGAIN,
            ) from error
        held = sum(map(_count, self.partitions.values()))
        empty = sum(each.is_empty for each in self.partitions.values())
        text = f"{held:,} event{'' if held == 1 else 's'}"
        return f"{text}, {empty} of {len(self.partitions)} partitions are empty" if empty else text

    async def read(self, seconds: float, owners: Mapping[str, str]) -> list[Finding]:
        """Read from each partition without an owner level, which disturbs nobody: its last events, and what comes.

        Args:
            owners: The hosts that hold leases in the store, by partition.
        """
        most = max(1, min(READ, READ_IN_ALL // max(1, len(self.partitions))))
        readings = [_Reading(each, most) for each in self.partitions.values()]
        room = asyncio.Semaphore(_AT_ONCE)

        async def attach(reading: _Reading) -> None:
            async with room:
                await reading.attach(self._transport, self._hub, self._group, self._timeout)

        try:
            await asyncio.gather(*map(attach, readings))
            await self._until_heard(readings)
            if any(each.error is None for each in readings):
                await asyncio.sleep(seconds)
        finally:
            await asyncio.gather(*(each.aclose() for each in readings))
        return [
            self._group_found(readings),
            self._readers_found(readings, owners),
            self._events_found(readings, seconds),
        ]

    async def _until_heard(self, readings: Sequence[_Reading]) -> None:
        """Wait for the first event of each partition that holds some, for the time of a request."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout):
                for each in readings:
                    if each.is_due:
                        await each.heard.wait()

    def _group_found(self, readings: Sequence[_Reading]) -> Finding:
        step = "consumer group"
        for each in readings:
            if isinstance(each.error, EntityNotFoundError):
                return Finding(
                    step,
                    StepOutcome.FAILED,
                    f"hub {self._hub} has no consumer group {self._group}",
                    "check the spelling (--consumer-group), or create it: the portal, or `az eventhubs eventhub "
                    "consumer-group create`",
                )
            if isinstance(each.error, AuthenticationError):
                return Finding(
                    step,
                    StepOutcome.FAILED,
                    f"the credential gives no right to read: {clean(str(each.error))}",
                    "reading needs the right Listen of the policy, or the role Azure Event Hubs Data Receiver",
                )
        return Finding(step, StepOutcome.OK, self._group)

    @staticmethod
    def _readers_found(readings: Sequence[_Reading], owners: Mapping[str, str]) -> Finding:
        step = "other readers"
        exclusive = {each.partition_id: each for each in readings if isinstance(each.error, ConsumerDisconnectedError)}
        full = {each.partition_id: each for each in readings if isinstance(each.error, QuotaExceededError)}
        if full:
            error = next(iter(full.values())).error
            return Finding(
                step,
                StepOutcome.FAILED,
                f"{named_partitions(list(full))}: {clean(str(error))}",
                "a consumer group takes five readers of a partition at a time: end those that are not needed, or "
                "use another consumer group",
            )
        foreign = {key: each for key, each in exclusive.items() if key not in owners}
        if foreign:
            error = next(iter(foreign.values())).error
            return Finding(
                step,
                StepOutcome.FAILED,
                f"{named_partitions(list(foreign))}: an exclusive reader has a higher owner level: {clean(str(error))}",
                "if these are hosts of yours, name their store (--container or --leases), which shows it; if not, "
                "stop that reader, or use another consumer group",
            )
        if exclusive:
            hosts = Counter(owners[key] for key in exclusive)
            names = ", ".join(f"{clean(owner)} ({count})" for owner, count in hosts.items())
            return Finding(step, StepOutcome.OK, f"{len(exclusive)} partitions are read by hosts of the store: {names}")
        return Finding(step, StepOutcome.OK, "none is exclusive")

    def _events_found(self, readings: Sequence[_Reading], seconds: float) -> Finding:
        step = "events"
        failed = {
            each.partition_id: each
            for each in readings
            if each.error is not None and not isinstance(each.error, _OF_OTHER_STEPS)
        }
        if failed:
            error = next(iter(failed.values())).error
            busy = isinstance(error, ServiceBusyError)
            text = clean(str(error))
            return Finding(
                step,
                StepOutcome.FAILED,
                f"{named_partitions(list(failed))}: {'throttled: ' if busy else ''}{text}",
                _WAIT if busy else "try again; the debug log (docs/logging.md) shows the frames",
            )
        whole = [each for each in readings if each.error is None]
        if not whole:
            return Finding(step, StepOutcome.NOT_TRIED, "no partition could be read beside its reader")
        waiting = [each.partition_id for each in whole if each.is_due and not each.count]
        if waiting:
            return Finding(
                step,
                StepOutcome.FAILED,
                f"{named_partitions(waiting)}: no event came in {self._timeout:g} s, though they hold some",
                "look at the namespace's health in the portal; a proxy or firewall may hold data back",
            )
        arrived = sum(each.arrived for each in whole)
        read = sum(each.count for each in whole)
        rate = f"; {arrived / seconds:,.1f} a second arrive" if seconds else ""
        return Finding(step, StepOutcome.OK, f"{read:,} read from {len(whole)} partitions{rate}")

    async def send(self) -> str:
        """Send one event. Raises `ProblemFoundError` if it is refused."""
        event = EventData(b"sent by eventpump doctor", properties={"sender": _READER})
        try:
            async with asyncio.timeout(self._timeout):
                async with EventProducer(
                    hub=self._hub,
                    transport=self._transport,
                    owns_transport=False,
                    retry=RetryOptions(max_retries=0),
                ) as producer:
                    await producer.send([event])
        except AuthenticationError as error:
            raise ProblemFoundError(
                f"the credential gives no right to send: {clean(str(error))}",
                "sending needs the right Send of the policy, or the role Azure Event Hubs Data Sender",
            ) from error
        except (EventPumpError, TimeoutError) as error:
            text = clean(str(error)) or f"no answer within {self._timeout:g} s"
            raise ProblemFoundError(text, _WAIT if isinstance(error, ServiceBusyError) else "try again") from error
        return "one event is stored"


_OF_OTHER_STEPS: Final = (
    EntityNotFoundError,
    AuthenticationError,
    ConsumerDisconnectedError,
    QuotaExceededError,
)
_NOT_AMQP: Final = "check that the host and the port are those of an Event Hubs namespace, and of the transport type"


@dataclass(slots=True)
class _Reading:
    """A link to one partition, of whose events at most so many are read; implements `ReceiveSink`."""

    partition: PartitionProperties
    most: int
    error: EventPumpError | None = None
    count: int = 0
    arrived: int = 0
    link: ReceiveLink | None = None
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def partition_id(self) -> str:
        return self.partition.partition_id

    @property
    def is_due(self) -> bool:
        """Whether an event must come: the partition holds one."""
        return not self.partition.is_empty

    async def attach(self, transport: Transport, hub: str, group: str, timeout: float) -> None:
        held = self.partition
        position = EventPosition.latest()
        if not held.is_empty:
            first = max(held.beginning_sequence_number, held.last_enqueued_sequence_number - self.most + 1)
            position = EventPosition.at_sequence_number(first, inclusive=True)
        spec = ReceiveLinkSpec(hub, group, self.partition_id, position, receiver_name=_READER)
        try:
            async with asyncio.timeout(timeout):
                self.link = await transport.open_receive_link(spec, self)
            self.link.set_credit(_CREDIT)
        except TimeoutError:
            self.detached(ServiceTimeoutError(f"no answer to the attach within {timeout:g} s"))
        except EventPumpError as error:
            self.detached(error)

    def messages(self, batch: list[bytes]) -> None:
        self.heard.set()
        for each in batch:
            self.count += 1
            try:
                self.arrived += ReceivedEvent(each).sequence_number > self.partition.last_enqueued_sequence_number
            except EventPumpError:
                self.arrived += 1  # no event that the hub numbered
        if self.link is not None:
            self.link.set_credit(_CREDIT)

    def detached(self, error: EventPumpError) -> None:
        self.error = error
        self.heard.set()

    async def aclose(self) -> None:
        if self.link is not None:
            await self.link.aclose()


def _count(partition: PartitionProperties) -> int:
    if partition.is_empty:
        return 0
    return partition.last_enqueued_sequence_number - partition.beginning_sequence_number + 1


def _token_advice(text: str, credential: object) -> str:
    if "expired" in text.lower() and isinstance(credential, SharedKey):
        return "the token was signed just now: check this machine's clock"
    if isinstance(credential, SharedKey):
        return (
            "check the name and the key of the policy: copy the connection string anew from Shared access policies of "
            "the namespace or the hub; a policy of another hub gives no right to this one"
        )
    if isinstance(credential, SharedSignature):
        return "make a new signature for this hub, with a policy that has the right Listen"
    return "give the identity the role Azure Event Hubs Data Receiver (or Owner) at the namespace or the hub"
