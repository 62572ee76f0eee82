"""The public classes that send, built of options, a transport and the parts that they name."""

from __future__ import annotations

from typing import Final, Literal, Unpack

from eventpump.clients.connection import (
    ClientOptions,
    defaults_of,
    split_options,
    takes_options,
)
from eventpump.core.router import PartitionRouter
from eventpump.eventhubs.codecs import EventEncoding
from eventpump.interfaces import PublisherStateStore
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer, OnError, OnSuccess
from eventpump.producer.producer import HubProducer
from eventpump.producer.targets import PartitionOptions


class ProducerOptions(ClientOptions, total=False):
    """Keyword arguments of :class:`EventProducer`."""

    idempotent: bool
    """Whether each event is published exactly once. Without a `state_store` this holds for the life of the producer, if
    no other producer uses its `producer_group_id` and `owner_level`: the service cannot distinguish two producers with
    the same id and level, and of two batches with the same numbers it accepts the second without storing it. Without
    `partition_options` the service gives each producer an id of its own. Default: False."""
    partition_options: PartitionOptions | None
    """How to publish to single partitions: a mapping of partition ids, text or numbers, to
    `PartitionPublishingOptions`; the service decides the rest. One that the hub lacks is an error at the first send.
    For a partition that `state_store` knows, the stored state is used instead. Default: None."""
    name: str | None
    """The publisher's name, unique per hub: the key under which `state_store` keeps its state. Required with
    `state_store`. Default: None."""
    state_store: PublisherStateStore | None
    """Keeps the publisher's state, so that publishing is exactly once also across restarts. The producer opens and
    closes it. None to keep no state. Default: None."""
    mode: Literal["exclusive", "replayable"] | None
    """What the processes with one `name` may do; the same in all of them, and only with a `state_store`, where None
    means "exclusive". "exclusive": one process at a time. Each start takes a higher level, and from then on the service
    refuses the process before it, which gets `ProducerDisconnectedError`. Nothing that process was sending is stored
    after the start; `on_doubt` is about what was stored during the start. "replayable": processes share a level and may
    overlap, on the condition that the numbers determine the events: each process continues with the event that
    `events_published` names, and all send the same events in batches divided alike, as a loop over
    `orders[known.events_published :]` does. Otherwise events are lost, because the service takes a second event with
    the same number for a repetition. A process that another one has overtaken by more than the service remembers, or
    while one of its batches is in doubt, gets `InvalidClientStateError`; it may be restarted and then counts from the
    stored state. Default: None."""
    on_doubt: Literal["fail", "scan", "accept"]
    """What to do at a start if the process before did not close with every outcome known and the partition grew while
    its level was taken over: events of that process may be stored that `events_published` does not count. On a
    partition with other writers this is so after nearly every crash, since their events make it grow too. "fail": raise
    `PublishOutcomeUnknownError` with the number of the first such event and how many there may be, at this start and
    each later one until one has another `on_doubt` or the state is reset. "scan": count the stored ones by their
    stamps, which are read from the end of the partition; this needs `scan_consumer_group` and the right to listen.
    Every event is then sent with a stamp, the application property `eventpump:stamp`; if the process before did not
    stamp, the start fails as with "fail". "accept": do not count them; they may be published again. Default: "fail"."""
    scan_consumer_group: str | None
    """The consumer group to read the end of a partition with. Required with `on_doubt="scan"`. Default: None."""
    on_state_lost: Literal["fail", "new"]
    """What to do at a start if the service has forgotten the publisher: it refuses the id, or states a last number
    lower than one it had accepted. "fail": raise `ProducerStateLostError`, at this start and each later one until one
    has "new" or the state is reset. "new": take a new id, and continue `events_published` from the newest mark in the
    store. A mark is stored after the first batch of a start, every 30 seconds while publishing, and when the producer
    closes; what was published since may be published again. A running producer raises `ProducerStateLostError` in
    either case. Default: "fail"."""
    encode: EventEncoding | None
    """Compresses or encrypts every event: a `PayloadCodec`, several that are applied in this order, or a function that
    is called with the event and returns the event to send in its place, which must not be the same one changed. The
    size of the encoded event is what counts. An event that cannot be encoded is refused with an `EventError`. Routers
    see the event as it was given. None to send events as they are. Default: None."""
    max_in_flight: int | None
    """The most plain sends to one target at a time; None for no limit. Default: None."""


class BufferedOptions(ProducerOptions, total=False):
    """Keyword arguments of :class:`BufferedProducer`. Its `max_in_flight` counts batches."""

    max_batch_events: int
    """The number of events at which a batch is sent without waiting for more. Default: 5,000."""
    max_batch_bytes: int
    """The size in bytes at which a batch is sent without waiting for more. A larger event is sent alone. If the
    service's limit for a message is lower, a batch is sent in several messages. Default: 262,144."""
    max_wait_time: float
    """Seconds that the first event of a batch waits for others to join it. Default: 0.005."""
    max_events: int
    """The most events in the buffer, over all partitions: accepted, and their outcome not known yet. When it is full,
    `send` waits. Default: 100,000."""
    max_bytes: int
    """The most bytes in the buffer, over all partitions. A partition of which the buffer holds no event may have one of
    any size: what that event exceeds the partition's share by (`max_bytes` divided by twice the number of partitions,
    or `max_partition_bytes` if that is less) may come on top. Default: 8,388,608."""
    max_partition_events: int | None
    """The most events in the buffer per partition; None for no limit but `max_events`. Default: None."""
    max_partition_bytes: int | None
    """The most bytes in the buffer per partition, or one larger event; None for no limit but `max_bytes`. Default:
    None."""


_PUBLISHING: Final = HubProducer.__init__.__kwdefaults__ or {}


@takes_options(ProducerOptions, _PUBLISHING)
class EventProducer(HubProducer):
    """Sends events to a hub: to a partition, by a partition key, or to any partition.

    ::

        async with EventProducer(connection_string, "telemetry") as producer:
            await producer.send([EventData(b"one"), EventData(b"two")], partition_key="sensor-7")

    All times are in seconds.

    Args:
        connection_string: The namespace's or the hub's connection string, as the portal shows it; None to give
            `fully_qualified_namespace` and `credential`, or a transport object.
        hub: The event hub's name; None if the connection string has an `EntityPath`.
        router: Chooses the partition of every message that is sent without one, by its first event and its key; the
            partitions are read once. None to leave the choice to the service, which an idempotent producer cannot.
        idempotent (bool): Whether each event is published exactly once. Without a `state_store` this holds for the life
            of the producer, if no other producer uses its `producer_group_id` and `owner_level`: the service cannot
            distinguish two producers with the same id and level, and of two batches with the same numbers it accepts
            the second without storing it. Without `partition_options` the service gives each producer an id of its own.
            Default: False.
        partition_options (PartitionOptions | None): How to publish to single partitions: a mapping of partition ids,
            text or numbers, to `PartitionPublishingOptions`; the service decides the rest. One that the hub lacks is an
            error at the first send. For a partition that `state_store` knows, the stored state is used instead.
            Default: None.
        name (str | None): The publisher's name, unique per hub: the key under which `state_store` keeps its state.
            Required with `state_store`. Default: None.
        state_store (PublisherStateStore | None): Keeps the publisher's state, so that publishing is exactly once also
            across restarts. The producer opens and closes it. None to keep no state. Default: None.
        mode (Literal["exclusive", "replayable"] | None): What the processes with one `name` may do; the same in all of
            them, and only with a `state_store`, where None means "exclusive". "exclusive": one process at a time. Each
            start takes a higher level, and from then on the service refuses the process before it, which gets
            `ProducerDisconnectedError`. Nothing that process was sending is stored after the start; `on_doubt` is about
            what was stored during the start. "replayable": processes share a level and may overlap, on the condition
            that the numbers determine the events: each process continues with the event that `events_published` names,
            and all send the same events in batches divided alike, as a loop over `orders[known.events_published :]`
            does. Otherwise events are lost, because the service takes a second event with the same number for a
            repetition. A process that another one has overtaken by more than the service remembers, or while one of its
            batches is in doubt, gets `InvalidClientStateError`; it may be restarted and then counts from the stored
            state. Default: None.
        on_doubt (Literal["fail", "scan", "accept"]): What to do at a start if the process before did not close with
            every outcome known and the partition grew while its level was taken over: events of that process may be
            stored that `events_published` does not count. On a partition with other writers this is so after nearly
            every crash, since their events make it grow too. "fail": raise `PublishOutcomeUnknownError` with the number
            of the first such event and how many there may be, at this start and each later one until one has another
            `on_doubt` or the state is reset. "scan": count the stored ones by their stamps, which are read from the end
            of the partition; this needs `scan_consumer_group` and the right to listen. Every event is then sent with a
            stamp, the application property `eventpump:stamp`; if the process before did not stamp, the start fails as
            with "fail". "accept": do not count them; they may be published again. Default: "fail".
        scan_consumer_group (str | None): The consumer group to read the end of a partition with. Required with
            `on_doubt="scan"`. Default: None.
        on_state_lost (Literal["fail", "new"]): What to do at a start if the service has forgotten the publisher: it
            refuses the id, or states a last number lower than one it had accepted. "fail": raise
            `ProducerStateLostError`, at this start and each later one until one has "new" or the state is reset. "new":
            take a new id, and continue `events_published` from the newest mark in the store. A mark is stored after the
            first batch of a start, every 30 seconds while publishing, and when the producer closes; what was published
            since may be published again. A running producer raises `ProducerStateLostError` in either case. Default:
            "fail".
        encode (EventEncoding | None): Compresses or encrypts every event: a `PayloadCodec`, several that are applied in
            this order, or a function that is called with the event and returns the event to send in its place, which
            must not be the same one changed. The size of the encoded event is what counts. An event that cannot be
            encoded is refused with an `EventError`. Routers see the event as it was given. None to send events as they
            are. Default: None.
        max_in_flight (int | None): The most plain sends to one target at a time; None for no limit. Default: None.
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
        router: PartitionRouter | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        connection, rest = split_options(EventProducer, ProducerOptions, connection_string, hub, options)
        super().__init__(
            connection.make(),
            connection.hub,
            retry=connection.retry,
            owns_transport=connection.is_owned,
            router=router,
            **rest,
        )


@takes_options(BufferedOptions, {**_PUBLISHING, **defaults_of(BufferSettings)})
class BufferedProducer(HubBufferedProducer):
    """Sends single events to a hub in batches, in order per partition and key.

    ::

        async with BufferedProducer(connection_string, "telemetry", on_error=report) as producer:
            receipt = await producer.send(EventData(b"21.5"), partition_key="sensor-7")
            ...
            await receipt  # if its outcome matters

    Events that are given for one partition, or with one key, keep the order of the calls of `send`. If the producer is
    idempotent, each event is published exactly once; a batch in doubt delays its own partition only. All times are in
    seconds.

    Args:
        connection_string: The namespace's or the hub's connection string, as the portal shows it; None to give
            `fully_qualified_namespace` and `credential`, or a transport object.
        hub: The event hub's name; None if the connection string has an `EntityPath`.
        router: Chooses the partition of an event that names none. Called again for an event without a key if the chosen
            partition's buffer is full. None for `HashRouter`: keys as the service assigns them, and events without a
            key to each partition in turn.
        on_success: Called with the events of each stored message, in order, and the partition id. Must not block.
            Default: None.
        on_error: Called with the events that failed, the partition id and the error. Must not block. If it is None,
            failures that no receipt waits for are logged.
        idempotent (bool): Whether each event is published exactly once. Without a `state_store` this holds for the life
            of the producer, if no other producer uses its `producer_group_id` and `owner_level`: the service cannot
            distinguish two producers with the same id and level, and of two batches with the same numbers it accepts
            the second without storing it. Without `partition_options` the service gives each producer an id of its own.
            Default: False.
        partition_options (PartitionOptions | None): How to publish to single partitions: a mapping of partition ids,
            text or numbers, to `PartitionPublishingOptions`; the service decides the rest. One that the hub lacks is an
            error at the first send. For a partition that `state_store` knows, the stored state is used instead.
            Default: None.
        name (str | None): The publisher's name, unique per hub: the key under which `state_store` keeps its state.
            Required with `state_store`. Default: None.
        state_store (PublisherStateStore | None): Keeps the publisher's state, so that publishing is exactly once also
            across restarts. The producer opens and closes it. None to keep no state. Default: None.
        mode (Literal["exclusive", "replayable"] | None): What the processes with one `name` may do; the same in all of
            them, and only with a `state_store`, where None means "exclusive". "exclusive": one process at a time. Each
            start takes a higher level, and from then on the service refuses the process before it, which gets
            `ProducerDisconnectedError`. Nothing that process was sending is stored after the start; `on_doubt` is about
            what was stored during the start. "replayable": processes share a level and may overlap, on the condition
            that the numbers determine the events: each process continues with the event that `events_published` names,
            and all send the same events in batches divided alike, as a loop over `orders[known.events_published :]`
            does. Otherwise events are lost, because the service takes a second event with the same number for a
            repetition. A process that another one has overtaken by more than the service remembers, or while one of its
            batches is in doubt, gets `InvalidClientStateError`; it may be restarted and then counts from the stored
            state. Default: None.
        on_doubt (Literal["fail", "scan", "accept"]): What to do at a start if the process before did not close with
            every outcome known and the partition grew while its level was taken over: events of that process may be
            stored that `events_published` does not count. On a partition with other writers this is so after nearly
            every crash, since their events make it grow too. "fail": raise `PublishOutcomeUnknownError` with the number
            of the first such event and how many there may be, at this start and each later one until one has another
            `on_doubt` or the state is reset. "scan": count the stored ones by their stamps, which are read from the end
            of the partition; this needs `scan_consumer_group` and the right to listen. Every event is then sent with a
            stamp, the application property `eventpump:stamp`; if the process before did not stamp, the start fails as
            with "fail". "accept": do not count them; they may be published again. Default: "fail".
        scan_consumer_group (str | None): The consumer group to read the end of a partition with. Required with
            `on_doubt="scan"`. Default: None.
        on_state_lost (Literal["fail", "new"]): What to do at a start if the service has forgotten the publisher: it
            refuses the id, or states a last number lower than one it had accepted. "fail": raise
            `ProducerStateLostError`, at this start and each later one until one has "new" or the state is reset. "new":
            take a new id, and continue `events_published` from the newest mark in the store. A mark is stored after the
            first batch of a start, every 30 seconds while publishing, and when the producer closes; what was published
            since may be published again. A running producer raises `ProducerStateLostError` in either case. Default:
            "fail".
        encode (EventEncoding | None): Compresses or encrypts every event: a `PayloadCodec`, several that are applied in
            this order, or a function that is called with the event and returns the event to send in its place, which
            must not be the same one changed. The size of the encoded event is what counts. An event that cannot be
            encoded is refused with an `EventError`. Routers see the event as it was given. None to send events as they
            are. Default: None.
        max_in_flight (int | None): The most batches that are being sent to one partition at a time. With more than 1, a
            retry may reorder events, also those with the same key; an idempotent producer allows only 1. Default: 1.
        max_batch_events (int): The number of events at which a batch is sent without waiting for more. Default: 5,000.
        max_batch_bytes (int): The size in bytes at which a batch is sent without waiting for more. A larger event is
            sent alone. If the service's limit for a message is lower, a batch is sent in several messages. Default:
            262,144.
        max_wait_time (float): Seconds that the first event of a batch waits for others to join it. Default: 0.005.
        max_events (int): The most events in the buffer, over all partitions: accepted, and their outcome not known yet.
            When it is full, `send` waits. Default: 100,000.
        max_bytes (int): The most bytes in the buffer, over all partitions. A partition of which the buffer holds no
            event may have one of any size: what that event exceeds the partition's share by (`max_bytes` divided by
            twice the number of partitions, or `max_partition_bytes` if that is less) may come on top. Default:
            8,388,608.
        max_partition_events (int | None): The most events in the buffer per partition; None for no limit but
            `max_events`. Default: None.
        max_partition_bytes (int | None): The most bytes in the buffer per partition, or one larger event; None for no
            limit but `max_bytes`. Default: None.
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
        router: PartitionRouter | None = None,
        on_success: OnSuccess | None = None,
        on_error: OnError | None = None,
        **options: Unpack[BufferedOptions],
    ) -> None:
        connection, rest = split_options(BufferedProducer, BufferedOptions, connection_string, hub, options)
        buffer = {name: rest.pop(name) for name in BufferSettings.model_fields if name in rest}
        super().__init__(
            HubProducer(
                connection.make(), connection.hub, retry=connection.retry, owns_transport=connection.is_owned, **rest
            ),
            BufferSettings(**buffer),
            router=router,
            on_success=on_success,
            on_error=on_error,
        )
