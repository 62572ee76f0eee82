"""The public classes that receive, built of options, a transport and the parts that they name."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Unpack

from eventpump.clients.connection import (
    ClientOptions,
    HubConnection,
    defaults_of,
    split_options,
    takes_options,
)
from eventpump.consumer.host.host import PartitionHost
from eventpump.consumer.processor import Processor
from eventpump.consumer.reader import reader
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.fleet import PartitionBalancer
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.codecs import EventDecoding
from eventpump.interfaces import EventSender, EventSource, LeaseStore, Transport
from eventpump.options.base import RetryOptions, unknown_option
from eventpump.options.connection import (
    checked_hub,
)
from eventpump.options.consumer import HostSettings, Park, ReaderSettings, StartPosition
from eventpump.reports import Hook
from eventpump.sources.checks import is_source
from eventpump.sources.hub import HubSource
from eventpump.sources.transport import SourceTransport
from eventpump.texts import not_the_class


class FeedOptions(ClientOptions, total=False):
    """Keyword arguments of the clients that receive: how events are read ahead."""

    consumer_group: str
    """The consumer group to read with. Default: "$Default"."""
    prefetch_events: int
    """The most events that are received ahead of their delivery, per partition. Default: 3,000."""
    prefetch_bytes: int
    """The most bytes that are received ahead, per partition. Credit is granted by estimated sizes: larger messages than
    before that are already under way come on top, and so does the batch that is being processed. Default: 8,388,608."""
    strict_prefetch_bytes: bool
    """Whether credit is granted by `max_message_size`, so that `prefetch_bytes` is never exceeded. Fewer events are
    then received at a time. Default: False."""
    track_last_enqueued: bool
    """Whether the service adds to every event the number, offset and time of the partition's newest event. Without it,
    lag is known only for silent partitions. Default: False."""
    decode: EventDecoding | None
    """Decompresses or decrypts events: a `PayloadCodec`, or several. An event is decoded by those that its
    `content_encoding` names, from the last name on; every other event is delivered as it is. It is decoded when its
    body is first accessed, once for all subscriptions. If that fails, accessing the body raises `DecodeError`, which a
    host does not retry: `on_retries_exhausted` decides what follows. None to deliver events as they are. Default:
    None."""
    max_message_size: int
    """The largest message that a receive link accepts, in bytes. Default: 20,971,520."""
    link_retry: RetryOptions
    """The delays, in seconds, before a failed link is opened again. After a lost connection the delay does not grow and
    no retry is counted: only attempts to connect are delayed then, by 5 s at most. With a `max_retries`, reading ends
    with the error of the last link; a host then leaves the partition and takes it again later. Default:
    `RetryOptions(max_retries=None, base_delay=0.2, max_delay=30.0)`."""
    startup_timeout: float
    """Seconds to keep trying to reach the service, and a host's store, at the start. After the first success there is
    no limit. Default: 60.0."""


class ReaderOptions(FeedOptions, total=False):
    """Keyword arguments of :class:`PartitionReader`."""

    position: StartPosition
    """Where to begin: "earliest", "latest", a sequence number, a datetime with a time zone, a timedelta back from now,
    an offset ("-1" and "@latest" are the start and the end too), or an `EventPosition`. Reading begins after the event
    at the position, or, if it is inclusive, with it. Default: `EventPosition.earliest()`."""
    end: StartPosition | None
    """Where to end: a sequence number, a datetime with a time zone, or "@latest" for the newest event at the start,
    each of them included; or an `EventPosition`, included if it is inclusive. None to read forever. Default: None."""
    owner_level: int | None
    """The owner level (epoch) of an exclusive reader, 0 or more: the service disconnects readers with a lower one or
    none. None to share the partition. Default: None."""
    receiver_name: str | None
    """A name that the service shows in the error texts of other readers; None for no name. Default: None."""
    on_data_loss: Literal["earliest", "latest", "fail"] | None
    """What to do if events that were to be read are gone: "earliest" and "latest" log a warning and continue at the
    oldest retained event or at the partition's end; "fail" raises `DataLossError`. None means "earliest" if retention
    has removed them, and "fail" if the hub was deleted and recreated while it was read. Default: None."""


class HostOptions(FeedOptions, total=False):
    """Keyword arguments of :class:`EventProcessorHost`."""

    checkpoint_policy: CheckpointPolicy
    """When checkpoints are written without a call of `context.checkpoint()`, of events whose `process_events` returned.
    `CheckpointPolicy.manual()` for a processor that keeps events beyond that. Default:
    `CheckpointPolicy.automatic()`."""
    initial_position: StartPosition | Mapping[str, StartPosition]
    """Where a partition without a checkpoint begins: "earliest", "latest", a sequence number, a datetime with a time
    zone, a timedelta back from now, an offset ("-1" and "@latest" are the start and the end too), or an
    `EventPosition`; or a mapping of partition ids to these, and partitions that it does not name begin at the start.
    The first host of a consumer group records it in the lease store, and the record is valid for all later hosts.
    "latest" is the end of the partition when it is first opened. A partition that is added to the hub later always
    begins at its start. Default: `EventPosition.earliest()`."""
    owner_id: str | None
    """The host's name in the leases, unique among the hosts. None for a name made of the machine's name, the process id
    and random digits. Default: None."""
    max_buffered_bytes: int
    """The most bytes of events that were received and are not processed yet, over all partitions, and one event more
    for each receive link. Each partition has its share, and may use what others leave free. Default: 536,870,912."""
    balancer: PartitionBalancer
    """Decides which partitions the host takes, steals and releases: `FairBalancer`, `GreedyBalancer`, `RingBalancer`,
    `StaticAssignment`, or an object of your own with their method `plan` (`PartitionBalancer`). Use one kind for all
    hosts; see `docs/balancing.md`. Default: `FairBalancer()`."""
    weight: float
    """The host's share of the partitions, in proportion to the other hosts, whose weight is 1 by default; from 0.001 to
    1,000, to three decimal places. Other than 1 it is part of the host's name in the leases, as in
    "worker-1;weight=2.5": that is how other hosts know it. `FairBalancer` and `RingBalancer` use it. Default: 1.0."""
    max_batch_size: int
    """The most events that `process_events` receives in one call. Default: 300."""
    max_wait_time: float
    """Seconds without an event after which the host checks that the partition's link is alive and that the hub is not
    ahead of it, and after which it checks again (at least 1). The lag of a partition that was silent for so long is
    unknown until then. Default: 30.0."""
    call_when_idle: bool
    """Whether `process_events` is called with an empty sequence after `max_wait_time` without an event. Default:
    False."""
    renew_interval: float | None
    """Seconds between renewals of a lease; less than the store's lease duration. None for a third of that. Default:
    None."""
    close_timeout: float
    """Seconds that closing a partition, or the host, may take: then running handlers are cancelled, and a handler that
    still does not return is reported. Default: 20.0."""
    ownership_lost_grace: float
    """Seconds that a handler may continue after ownership of its partition was lost, at most three quarters of
    `close_timeout`. Then it is cancelled. Default: 5.0."""
    failure_policy: Literal["retry", "skip", "stop", "stop_partition"] | Park
    """What to do if the processor raises: "retry" the same events as `handler_retry` says; "skip" the event that
    failed, which is reported; `Park(to)`, store it elsewhere before going on; "stop" the host; or "stop_partition":
    leave the partition and try again later, while others continue. Of a batch, the events are delivered once more one
    by one, and only those that fail by themselves are skipped or parked. If `open` raises, "skip" and `Park` are as
    "retry". Default: "retry"."""
    on_retries_exhausted: Literal["skip", "stop", "stop_partition"] | Park
    """What to do after the last retry, if `handler_retry` has a `max_retries`: "skip", `Park(to)`, "stop" or
    "stop_partition", as of `failure_policy`. Events that are delivered one by one are retried as often each. If `open`
    raises, "skip" and `Park` are as "stop_partition". Default: "stop"."""
    handler_retry: RetryOptions
    """The delays, in seconds, before a failed batch is given to the processor again. Default:
    `RetryOptions(max_retries=None, base_delay=0.5, max_delay=30.0)`."""
    on_data_loss: Literal["earliest", "latest", "fail"] | None
    """What to do if events after a checkpoint are gone: continue at the oldest retained event ("earliest") or at the
    partition's end ("latest"); or "fail": leave the partition with a `DataLossError` and try again later, while other
    partitions continue. None means "earliest" if retention has removed them, and "fail" if the hub was deleted and
    recreated, or the checkpoint lies beyond the partition's end. It is reported in each case. Default: None."""
    handler_timeout: float
    """Seconds after which a method of the processor that has not returned is reported, and again whenever that time has
    doubled. Default: 60.0."""
    on_handler_timeout: Literal["report", "cancel"]
    """What to do beyond that: nothing ("report"), or "cancel" the method, which counts as if it had raised
    `TimeoutError`. A method that blocks the event loop can be neither reported nor cancelled before it returns.
    Default: "report"."""


def _of_source(
    client: type,
    known: type,
    source: EventSource,
    connection_string: str | None,
    hub: str | None,
    options: dict[str, Any],
    *,
    keeps_ended: bool,
) -> HubConnection:
    """Return how a client reaches an event source.

    Args:
        client: The class that was called.
        known: The typed dictionary of its options.
        source: The source, as it was given.
        connection_string: As it was given.
        hub: As it was given.
        options: As they were given.
        keeps_ended: Whether a link stays open when its partition has ended.

    Raises:
        ConfigurationError: It is not a source, or an option of a connection was given with it.
    """
    if not is_source(source):
        raise ConfigurationError("source", "must be an event source, such as a GeneratorSource" + not_the_class(source))
    for name in options:
        if name not in known.__annotations__:
            raise unknown_option(name, inspect.signature(client).parameters)
    given = [("connection_string", connection_string), ("hub", hub)]
    for name in (*(name for name, value in given if value is not None), *options):
        if name in ("connection_string", "hub") or name in ClientOptions.__annotations__:
            raise ConfigurationError(name, "cannot be given along with a source, which has its events elsewhere")
    # A hub's links need nothing in between.
    transport: Transport = (
        source.transport if isinstance(source, HubSource) else SourceTransport(source, keeps_ended=keeps_ended)
    )
    namespace = source.fully_qualified_namespace
    is_owned = not isinstance(source, HubSource)
    return HubConnection(checked_hub(source.hub), namespace, RetryOptions(), lambda: transport, is_owned)


class EventHubSource(HubSource):
    """A hub as an event source: for `CaptureSource(live=...)`, and for code that takes any source.

    Args:
        connection_string: The namespace's or the hub's connection string, as the portal shows it; None to give
            `fully_qualified_namespace` and `credential`, or a transport object.
        hub: The event hub's name; None if the connection string has an `EntityPath`.
        options: See `ClientOptions`.

    Raises:
        ConfigurationError: There is no such option, or a value cannot work.
    """

    def __init__(
        self, connection_string: str | None = None, hub: str | None = None, **options: Unpack[ClientOptions]
    ) -> None:
        connection, _ = split_options(EventHubSource, ClientOptions, connection_string, hub, options)
        super().__init__(connection.make(), connection.hub, owns_transport=connection.is_owned)


@takes_options(HostOptions, defaults_of(HostSettings))
class EventProcessorHost(PartitionHost):
    """Processes a hub's partitions, shared with the other hosts that use the same lease store.

    ::

        async def process(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
            print(context.partition_id, [event.body_as_str() for event in events])

        leases = SqliteLeaseStore("leases.db")
        host = EventProcessorHost(connection_string, "telemetry", processor=process, lease_store=leases)
        async with host:
            await host.run()

    Every event from a partition's start on is processed at least once, or reported as lost. Under each epoch of a
    partition one host delivers; a running host that loses the partition may finish its batch under the older epoch. The
    first start of a partition reads from the start of the stream, unless `initial_position` is given. See
    `docs/guarantees.md` for the conditions. All times are in seconds.

    Args:
        connection_string: The namespace's or the hub's connection string, as the portal shows it; None to give
            `fully_qualified_namespace` and `credential`, or a transport object.
        hub: The event hub's name; None if the connection string has an `EntityPath`.
        processor: A coroutine function that is called with the `PartitionContext` and the events, or an
            `EventProcessor` (both shared by all partitions); a subclass of it, or a function that returns one (one
            object per ownership of a partition). None if all are given to `subscribe`.
        lease_store: The store of leases and checkpoints, such as `SqliteLeaseStore` or `BlobLeaseStore`; one object per
            host, which opens and closes it.
        hooks: Functions that are called on the event loop with every report of the host, a `HostReport`. They must not
            block. Default: `()`.
        source: Where events come from instead of from a hub, such as a `GeneratorSource`; then no connection string,
            hub or option of a connection is given. The host does not close it. None for a hub.
        rng: Draws delays and the order of partitions; None for an unseeded generator. For tests.
        consumer_group (str): The consumer group to read with. Default: "$Default".
        prefetch_events (int): The most events that are received ahead of their delivery, per partition. Default: 3,000.
        prefetch_bytes (int): The most bytes that are received ahead, per partition. Credit is granted by estimated
            sizes: larger messages than before that are already under way come on top, and so does the batch that is
            being processed. Default: 8,388,608.
        strict_prefetch_bytes (bool): Whether credit is granted by `max_message_size`, so that `prefetch_bytes` is never
            exceeded. Fewer events are then received at a time. Default: False.
        track_last_enqueued (bool): Whether the service adds to every event the number, offset and time of the
            partition's newest event. Without it, lag is known only for silent partitions. Default: False.
        decode (EventDecoding | None): Decompresses or decrypts events: a `PayloadCodec`, or several. An event is
            decoded by those that its `content_encoding` names, from the last name on; every other event is delivered as
            it is. It is decoded when its body is first accessed, once for all subscriptions. If that fails, accessing
            the body raises `DecodeError`, which a host does not retry: `on_retries_exhausted` decides what follows.
            None to deliver events as they are. Default: None.
        max_message_size (int): The largest message that a receive link accepts, in bytes. Default: 20,971,520.
        link_retry (RetryOptions): The delays, in seconds, before a failed link is opened again. After a lost connection
            the delay does not grow and no retry is counted: only attempts to connect are delayed then, by 5 s at most.
            With a `max_retries`, reading ends with the error of the last link; a host then leaves the partition and
            takes it again later. Default: `RetryOptions(max_retries=None, base_delay=0.2, max_delay=30.0)`.
        startup_timeout (float): Seconds to keep trying to reach the service, and a host's store, at the start. After
            the first success there is no limit. Default: 60.0.
        checkpoint_policy (CheckpointPolicy): When checkpoints are written without a call of `context.checkpoint()`, of
            events whose `process_events` returned. `CheckpointPolicy.manual()` for a processor that keeps events beyond
            that. Default: `CheckpointPolicy.automatic()`.
        initial_position (StartPosition | Mapping[str, StartPosition]): Where a partition without a checkpoint begins:
            "earliest", "latest", a sequence number, a datetime with a time zone, a timedelta back from now, an offset
            ("-1" and "@latest" are the start and the end too), or an `EventPosition`; or a mapping of partition ids to
            these, and partitions that it does not name begin at the start. The first host of a consumer group records
            it in the lease store, and the record is valid for all later hosts. "latest" is the end of the partition
            when it is first opened. A partition that is added to the hub later always begins at its start. Default:
            `EventPosition.earliest()`.
        owner_id (str | None): The host's name in the leases, unique among the hosts. None for a name made of the
            machine's name, the process id and random digits. Default: None.
        max_buffered_bytes (int): The most bytes of events that were received and are not processed yet, over all
            partitions, and one event more for each receive link. Each partition has its share, and may use what others
            leave free. Default: 536,870,912.
        balancer (PartitionBalancer): Decides which partitions the host takes, steals and releases: `FairBalancer`,
            `GreedyBalancer`, `RingBalancer`, `StaticAssignment`, or an object of your own with their method `plan`
            (`PartitionBalancer`). Use one kind for all hosts; see `docs/balancing.md`. Default: `FairBalancer()`.
        weight (float): The host's share of the partitions, in proportion to the other hosts, whose weight is 1 by
            default; from 0.001 to 1,000, to three decimal places. Other than 1 it is part of the host's name in the
            leases, as in "worker-1;weight=2.5": that is how other hosts know it. `FairBalancer` and `RingBalancer` use
            it. Default: 1.0.
        max_batch_size (int): The most events that `process_events` receives in one call. Default: 300.
        max_wait_time (float): Seconds without an event after which the host checks that the partition's link is alive
            and that the hub is not ahead of it, and after which it checks again (at least 1). The lag of a partition
            that was silent for so long is unknown until then. Default: 30.0.
        call_when_idle (bool): Whether `process_events` is called with an empty sequence after `max_wait_time` without
            an event. Default: False.
        renew_interval (float | None): Seconds between renewals of a lease; less than the store's lease duration. None
            for a third of that. Default: None.
        close_timeout (float): Seconds that closing a partition, or the host, may take: then running handlers are
            cancelled, and a handler that still does not return is reported. Default: 20.0.
        ownership_lost_grace (float): Seconds that a handler may continue after ownership of its partition was lost, at
            most three quarters of `close_timeout`. Then it is cancelled. Default: 5.0.
        failure_policy (Literal["retry", "skip", "stop", "stop_partition"] | Park): What to do if the processor raises:
            "retry" the same events as `handler_retry` says; "skip" the event that failed, which is reported;
            `Park(to)`, store it elsewhere before going on; "stop" the host; or "stop_partition": leave the partition
            and try again later, while others continue. Of a batch, the events are delivered once more one by one, and
            only those that fail by themselves are skipped or parked. If `open` raises, "skip" and `Park` are as
            "retry". Default: "retry".
        on_retries_exhausted (Literal["skip", "stop", "stop_partition"] | Park): What to do after the last retry, if
            `handler_retry` has a `max_retries`: "skip", `Park(to)`, "stop" or "stop_partition", as of `failure_policy`.
            Events that are delivered one by one are retried as often each. If `open` raises, "skip" and `Park` are as
            "stop_partition". Default: "stop".
        handler_retry (RetryOptions): The delays, in seconds, before a failed batch is given to the processor again.
            Default: `RetryOptions(max_retries=None, base_delay=0.5, max_delay=30.0)`.
        on_data_loss (Literal["earliest", "latest", "fail"] | None): What to do if events after a checkpoint are gone:
            continue at the oldest retained event ("earliest") or at the partition's end ("latest"); or "fail": leave
            the partition with a `DataLossError` and try again later, while other partitions continue. None means
            "earliest" if retention has removed them, and "fail" if the hub was deleted and recreated, or the checkpoint
            lies beyond the partition's end. It is reported in each case. Default: None.
        handler_timeout (float): Seconds after which a method of the processor that has not returned is reported, and
            again whenever that time has doubled. Default: 60.0.
        on_handler_timeout (Literal["report", "cancel"]): What to do beyond that: nothing ("report"), or "cancel" the
            method, which counts as if it had raised `TimeoutError`. A method that blocks the event loop can be neither
            reported nor cancelled before it returns. Default: "report".
        fully_qualified_namespace (str | None): The namespace's host name, such as "example.servicebus.windows.net";
            None with a connection string. Default: None.
        credential (Credential | None): A token credential of `azure.identity.aio`, an `AzureNamedKeyCredential`, an
            `AzureSasCredential`, a `SharedKey` or a `SharedSignature`; None if the connection string holds a key or a
            signature. Default: None.
        custom_endpoint_address (str | None): The host to connect to instead of the namespace, as `host[:port]` or a
            URL; None for the namespace. Default: None.
        transport_type (TransportType): What carries AMQP: "tcp" (port 5671), or "websocket" (port 443, unless the
            endpoint has one). Default: "tcp".
        proxy (str | SecretStr | None): The HTTP proxy to connect through, as
            `http[s]://[username:password@]host[:port]` with user name and password percent-encoded; None to connect
            directly. Default: None.
        trust_env (bool): Whether to use the proxy that the environment variable `HTTPS_PROXY` names, if `proxy` is not
            given and `NO_PROXY` does not exempt the host. Default: False.
        ca_file (str | Path | None): A file of CA certificates (PEM) to trust instead of the system's; None for the
            system's. Default: None.
        client_cert_file (str | Path | None): A file with the certificate chain (PEM) to present to the service, and its
            key unless `client_key_file` is given; None for no client certificate. Default: None.
        client_key_file (str | Path | None): A file with the key (PEM) of the client certificate; None if
            `client_cert_file` holds it. Default: None.
        client_key_password (str | SecretStr | None): The password of the client certificate's key; None if it is not
            encrypted. Default: None.
        auth_timeout (float): Seconds to wait until the service has accepted a token. Default: 60.0.
        sas_lifetime (float): Seconds for which a token signed with a key is valid, 2 to 86,400; it is renewed after
            three quarters of that. Default: 3,600.0.
        operation_timeout (float): Seconds to wait for a connection, an attach, or the answer to a request or a send.
            Default: 60.0.
        idle_timeout (float): Seconds without data after which the connection is considered dead. Half of it, but at
            least 1, is advertised to the service, which may refuse values below 1. Default: 60.0.
        retry (RetryOptions): The number of retries and the delays, in seconds, of sends and requests. Default:
            `RetryOptions(max_retries=3, base_delay=0.8, max_delay=60.0)`.
        transport (TransportName | Transport): The AMQP implementation: "native" or "uamqp". For the costs and
            limitations of the latter see `docs/transports.md`. Or a transport object: the client then uses its
            connection, and no other option of the connection but `retry` may be given. Default: "native".
        owns_transport (bool): Whether a transport object is closed with the client. False to share it between clients.
            Default: True.

    Raises:
        ConfigurationError: There is no such option, or a value cannot work.
    """

    def __init__(
        self,
        connection_string: str | None = None,
        hub: str | None = None,
        *,
        processor: Processor | None = None,
        lease_store: LeaseStore,
        hooks: Iterable[Hook] = (),
        source: EventSource | None = None,
        rng: random.Random | None = None,
        **options: Unpack[HostOptions],
    ) -> None:
        rest: dict[str, Any] = {**options}
        if source is None:
            connection, rest = split_options(EventProcessorHost, HostOptions, connection_string, hub, options)
        else:
            given = (source, connection_string, hub, rest)
            connection = _of_source(EventProcessorHost, HostOptions, *given, keeps_ended=True)
        self._fully_qualified_namespace = connection.fully_qualified_namespace

        def open_sender(transport: Transport, hub: str) -> EventSender:
            # Only hosts that park events load what sends them.
            from eventpump.producer.producer import HubProducer

            return HubProducer(transport, hub, retry=connection.retry, rng=rng, owns_transport=False)

        super().__init__(
            connection.make,
            lease_store,
            HostSettings(hub=connection.hub, **rest),
            processor,
            hooks=hooks,
            rng=rng,
            owns_transport=connection.is_owned,
            open_sender=open_sender if source is None or isinstance(source, HubSource) else None,
        )

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name."""
        return self._fully_qualified_namespace


@takes_options(ReaderOptions, defaults_of(ReaderSettings))
class PartitionReader(reader.PartitionReader):
    """Reads one partition without leases: from a position, to an end or forever.

    ::

        async with PartitionReader(connection_string, "telemetry", partition_id="0", end="@latest") as reader:
            async for event in reader:
                print(event.body_as_str())

    A link that fails is opened again after the last event received. No event is lost and none is repeated, unless the
    hub drops events before they are read, or is recreated; see `on_data_loss`. All times are in seconds.

    Args:
        connection_string: The namespace's or the hub's connection string, as the portal shows it; None to give
            `fully_qualified_namespace` and `credential`, or a transport object.
        hub: The event hub's name; None if the connection string has an `EntityPath`.
        partition_id: The partition to read, such as "0".
        source: Where events come from instead of from a hub, such as a `CaptureSource`; then no connection string, hub
            or option of a connection is given. The reader does not close it. None for a hub.
        consumer_group (str): The consumer group to read with. Default: "$Default".
        prefetch_events (int): The most events that are received ahead of their delivery, per partition. Default: 3,000.
        prefetch_bytes (int): The most bytes that are received ahead, per partition. Credit is granted by estimated
            sizes: larger messages than before that are already under way come on top, and so does the batch that is
            being processed. Default: 8,388,608.
        strict_prefetch_bytes (bool): Whether credit is granted by `max_message_size`, so that `prefetch_bytes` is never
            exceeded. Fewer events are then received at a time. Default: False.
        track_last_enqueued (bool): Whether the service adds to every event the number, offset and time of the
            partition's newest event. Without it, lag is known only for silent partitions. Default: False.
        decode (EventDecoding | None): Decompresses or decrypts events: a `PayloadCodec`, or several. An event is
            decoded by those that its `content_encoding` names, from the last name on; every other event is delivered as
            it is. It is decoded when its body is first accessed, once for all subscriptions. If that fails, accessing
            the body raises `DecodeError`, which a host does not retry: `on_retries_exhausted` decides what follows.
            None to deliver events as they are. Default: None.
        max_message_size (int): The largest message that a receive link accepts, in bytes. Default: 20,971,520.
        link_retry (RetryOptions): The delays, in seconds, before a failed link is opened again. After a lost connection
            the delay does not grow and no retry is counted: only attempts to connect are delayed then, by 5 s at most.
            With a `max_retries`, reading ends with the error of the last link; a host then leaves the partition and
            takes it again later. Default: `RetryOptions(max_retries=None, base_delay=0.2, max_delay=30.0)`.
        startup_timeout (float): Seconds to keep trying to reach the service, and a host's store, at the start. After
            the first success there is no limit. Default: 60.0.
        position (StartPosition): Where to begin: "earliest", "latest", a sequence number, a datetime with a time zone,
            a timedelta back from now, an offset ("-1" and "@latest" are the start and the end too), or an
            `EventPosition`. Reading begins after the event at the position, or, if it is inclusive, with it. Default:
            `EventPosition.earliest()`.
        end (StartPosition | None): Where to end: a sequence number, a datetime with a time zone, or "@latest" for the
            newest event at the start, each of them included; or an `EventPosition`, included if it is inclusive. None
            to read forever. Default: None.
        owner_level (int | None): The owner level (epoch) of an exclusive reader, 0 or more: the service disconnects
            readers with a lower one or none. None to share the partition. Default: None.
        receiver_name (str | None): A name that the service shows in the error texts of other readers; None for no name.
            Default: None.
        on_data_loss (Literal["earliest", "latest", "fail"] | None): What to do if events that were to be read are gone:
            "earliest" and "latest" log a warning and continue at the oldest retained event or at the partition's end;
            "fail" raises `DataLossError`. None means "earliest" if retention has removed them, and "fail" if the hub
            was deleted and recreated while it was read. Default: None.
        fully_qualified_namespace (str | None): The namespace's host name, such as "example.servicebus.windows.net";
            None with a connection string. Default: None.
        credential (Credential | None): A token credential of `azure.identity.aio`, an `AzureNamedKeyCredential`, an
            `AzureSasCredential`, a `SharedKey` or a `SharedSignature`; None if the connection string holds a key or a
            signature. Default: None.
        custom_endpoint_address (str | None): The host to connect to instead of the namespace, as `host[:port]` or a
            URL; None for the namespace. Default: None.
        transport_type (TransportType): What carries AMQP: "tcp" (port 5671), or "websocket" (port 443, unless the
            endpoint has one). Default: "tcp".
        proxy (str | SecretStr | None): The HTTP proxy to connect through, as
            `http[s]://[username:password@]host[:port]` with user name and password percent-encoded; None to connect
            directly. Default: None.
        trust_env (bool): Whether to use the proxy that the environment variable `HTTPS_PROXY` names, if `proxy` is not
            given and `NO_PROXY` does not exempt the host. Default: False.
        ca_file (str | Path | None): A file of CA certificates (PEM) to trust instead of the system's; None for the
            system's. Default: None.
        client_cert_file (str | Path | None): A file with the certificate chain (PEM) to present to the service, and its
            key unless `client_key_file` is given; None for no client certificate. Default: None.
        client_key_file (str | Path | None): A file with the key (PEM) of the client certificate; None if
            `client_cert_file` holds it. Default: None.
        client_key_password (str | SecretStr | None): The password of the client certificate's key; None if it is not
            encrypted. Default: None.
        auth_timeout (float): Seconds to wait until the service has accepted a token. Default: 60.0.
        sas_lifetime (float): Seconds for which a token signed with a key is valid, 2 to 86,400; it is renewed after
            three quarters of that. Default: 3,600.0.
        operation_timeout (float): Seconds to wait for a connection, an attach, or the answer to a request or a send.
            Default: 60.0.
        idle_timeout (float): Seconds without data after which the connection is considered dead. Half of it, but at
            least 1, is advertised to the service, which may refuse values below 1. Default: 60.0.
        retry (RetryOptions): The number of retries and the delays, in seconds, of sends and requests. Default:
            `RetryOptions(max_retries=3, base_delay=0.8, max_delay=60.0)`.
        transport (TransportName | Transport): The AMQP implementation: "native" or "uamqp". For the costs and
            limitations of the latter see `docs/transports.md`. Or a transport object: the client then uses its
            connection, and no other option of the connection but `retry` may be given. Default: "native".
        owns_transport (bool): Whether a transport object is closed with the client. False to share it between clients.
            Default: True.

    Raises:
        ConfigurationError: There is no such option, or a value cannot work.
    """

    def __init__(
        self,
        connection_string: str | None = None,
        hub: str | None = None,
        *,
        partition_id: str,
        source: EventSource | None = None,
        **options: Unpack[ReaderOptions],
    ) -> None:
        rest: dict[str, Any] = {**options}
        if source is None:
            connection, rest = split_options(PartitionReader, ReaderOptions, connection_string, hub, options)
        else:
            given = (source, connection_string, hub, rest)
            connection = _of_source(PartitionReader, ReaderOptions, *given, keeps_ended=False)
        self._fully_qualified_namespace = connection.fully_qualified_namespace
        settings = ReaderSettings(hub=connection.hub, partition_id=partition_id, **rest)
        super().__init__(connection.make, settings, owns_transport=connection.is_owned)

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name."""
        return self._fully_qualified_namespace
