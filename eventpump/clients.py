"""The composition root: the public classes, put together from settings, the transport and the parts they name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from pydantic import SecretStr

from eventpump.consumer import reader
from eventpump.consumer.host import PartitionHost
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.router import PartitionRouter
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import EventData
from eventpump.interfaces import LeaseStore, PublisherStateStore, Transport
from eventpump.options.base import RetryOptions
from eventpump.options.connection import ConnectionSettings, TransportName, TransportType, connection_settings
from eventpump.options.consumer import HostSettings, ReaderSettings, StartPosition
from eventpump.options.credentials import Credential
from eventpump.options.producer import BufferSettings
from eventpump.producer.buffered import HubBufferedProducer, OnError, OnSuccess
from eventpump.producer.producer import HubProducer
from eventpump.producer.targets import PartitionPublishingOptions
from eventpump.reports import Hook
from eventpump.transport.native import NativeTransport


class ConnectionOptions(TypedDict, total=False):
    """Keyword arguments of everything that connects; see :func:`eventpump.options.connection.connection_settings`."""

    fully_qualified_namespace: str
    credential: Credential
    custom_endpoint_address: str
    transport_type: TransportType
    proxy: str | SecretStr
    trust_env: bool
    ca_file: str | Path
    client_cert_file: str | Path
    client_key_file: str | Path
    client_key_password: str | SecretStr
    auth_timeout: float
    sas_lifetime: float
    operation_timeout: float
    idle_timeout: float
    retry: RetryOptions
    transport: TransportName


class FeedOptions(ConnectionOptions, total=False):
    """Keyword arguments of everything that receives; see :class:`eventpump.options.consumer.FeedSettings`."""

    consumer_group: str
    prefetch_events: int
    prefetch_bytes: int
    strict_prefetch_bytes: bool
    track_last_enqueued: bool
    max_message_size: int
    link_retry: RetryOptions
    startup_timeout: float


class ReaderOptions(FeedOptions, total=False):
    """Keyword arguments of :class:`PartitionReader`; see :class:`eventpump.options.consumer.ReaderSettings`."""

    position: StartPosition
    end: StartPosition
    owner_level: int
    receiver_name: str
    on_data_loss: Literal["earliest", "latest", "fail"]


class HostOptions(FeedOptions, total=False):
    """Keyword arguments of :class:`EventProcessorHost`; see :class:`eventpump.options.consumer.HostSettings`."""

    checkpoint_policy: CheckpointPolicy
    initial_position: StartPosition | Mapping[str, StartPosition]
    owner_id: str
    max_batch_size: int
    max_wait_time: float
    call_when_idle: bool
    renew_interval: float
    close_timeout: float
    ownership_lost_grace: float
    failure_policy: Literal["retry", "stop"]
    handler_retry: RetryOptions
    on_data_loss: Literal["earliest", "latest", "fail"]
    handler_timeout: float
    on_handler_timeout: Literal["report", "cancel"]


_CONNECTION = frozenset(ConnectionOptions.__annotations__)


def _split(
    connection_string: str | None, hub: str | None, options: Mapping[str, Any]
) -> tuple[ConnectionSettings, dict[str, Any]]:
    """Take the connection's options out.

    Returns:
        Its settings, and the other options with the hub.
    """
    connection = {key: value for key, value in options.items() if key in _CONNECTION}
    settings = connection_settings(connection_string, hub, **connection)
    rest = {key: value for key, value in options.items() if key not in _CONNECTION}
    return settings, {"hub": settings.hub, **rest}


def make_transport(settings: ConnectionSettings) -> Transport:
    """Make the transport the settings name. It connects when first used.

    Raises:
        ConfigurationError: It is not installed, or not to be had for this version of Python.
    """
    if settings.transport == "uamqp":
        # An extra, and only imported where it is asked for.
        from eventpump.transport.uamqp.transport import UamqpTransport

        return UamqpTransport(settings)
    return NativeTransport(settings)


class EventProcessorHost(PartitionHost):
    """Shares the partitions of a hub and consumer group with the other hosts that use the same leases.

    ::

        leases = SqliteLeaseStore("leases.db")
        host = EventProcessorHost(connection_string, "telemetry", processor=MyProcessor, lease_store=leases)
        async with host:
            await host.run()

    Every event from a partition's start on is processed at least once, or reported as lost. Under each epoch of a
    partition one host delivers; a live one that loses the partition may finish its batch under the older epoch. The
    first start of a partition reads from the start of the stream, unless `initial_position` says otherwise. Conditions:
    `docs/guarantees.md`.

    Args:
        connection_string: As the portal gives it; or give `fully_qualified_namespace` and `credential`.
        hub: The hub; may be left out where the connection string has an `EntityPath`.
        processor: An `EventProcessor` (shared by all partitions), a class of such (one object per ownership of a
            partition), or a factory.
        lease_store: The store of leases and checkpoints; one object per host. The host opens and closes it.
        hooks: Are called with every report of the host (see :mod:`eventpump.reports`).
        options: See :class:`HostOptions`; units and defaults stand in :class:`eventpump.options.consumer.HostSettings`.

    Raises:
        ConfigurationError: A value that cannot work.
    """

    def __init__(
        self,
        connection_string: str | None = None,
        hub: str | None = None,
        *,
        processor: object,
        lease_store: LeaseStore,
        hooks: Iterable[Hook] = (),
        rng: random.Random | None = None,
        **options: Unpack[HostOptions],
    ) -> None:
        connection, rest = _split(connection_string, hub, options)
        super().__init__(
            lambda: make_transport(connection), lease_store, HostSettings(**rest), processor, hooks=hooks, rng=rng
        )


class PartitionReader(reader.PartitionReader):
    """Reads one partition without leases, from a position, to an end or for ever.

    ::

        async with PartitionReader(connection_string, "telemetry", partition_id="0", end="@latest") as reader:
            async for event in reader:
                print(event.body_as_str())

    Args:
        connection_string: As the portal gives it; or give `fully_qualified_namespace` and `credential`.
        hub: The hub; may be left out where the connection string has an `EntityPath`.
        options: See :class:`ReaderOptions`; units and defaults stand in
            :class:`eventpump.options.consumer.ReaderSettings`.

    Raises:
        ConfigurationError: A value that cannot work.
    """

    def __init__(
        self,
        connection_string: str | None = None,
        hub: str | None = None,
        *,
        partition_id: str,
        **options: Unpack[ReaderOptions],
    ) -> None:
        connection, rest = _split(connection_string, hub, options)
        super().__init__(lambda: make_transport(connection), ReaderSettings(partition_id=partition_id, **rest))


class ProducerOptions(ConnectionOptions, total=False):
    """Keyword arguments of :class:`EventProducer`; see :class:`eventpump.producer.producer.HubProducer`."""

    idempotent: bool
    partition_options: Mapping[str, PartitionPublishingOptions]
    name: str
    state_store: PublisherStateStore
    mode: Literal["exclusive", "replayable"]
    on_doubt: Literal["fail", "scan", "accept"]
    scan_consumer_group: str
    on_state_lost: Literal["fail", "new"]
    max_in_flight: int


def _require_known(rest: Mapping[str, Any], options: type) -> None:
    unknown = sorted(rest.keys() - options.__annotations__.keys() - {"hub"})
    if unknown:
        raise ConfigurationError(unknown[0], "there is no such option")


class EventProducer(HubProducer):
    """Sends events to a hub: to a partition, by a partition key, or wherever the service likes.

    ::

        async with EventProducer(connection_string, "telemetry") as producer:
            await producer.send([EventData(b"one"), EventData(b"two")], partition_key="sensor-7")

    Args:
        connection_string: As the portal gives it; or give `fully_qualified_namespace` and `credential`.
        hub: The hub; may be left out where the connection string has an `EntityPath`.
        options: See :class:`ProducerOptions` and :class:`eventpump.producer.producer.HubProducer`; those of the
            connection stand in :class:`eventpump.options.connection.ConnectionSettings`.

    Raises:
        ConfigurationError: A value that cannot work.
    """

    def __init__(
        self, connection_string: str | None = None, hub: str | None = None, **options: Unpack[ProducerOptions]
    ) -> None:
        settings, rest = _split(connection_string, hub, options)
        _require_known(rest, ProducerOptions)
        super().__init__(make_transport(settings), retry=settings.retry, **rest)


class BufferedOptions(ProducerOptions, total=False):
    """Keyword arguments of :class:`BufferedProducer`; see :class:`eventpump.options.producer.BufferSettings`.

    `max_in_flight` counts batches here, and is 1 unless given.
    """

    max_batch_events: int
    max_batch_bytes: int
    max_wait_time: float
    max_events: int
    max_bytes: int
    max_partition_events: int
    max_partition_bytes: int


class BufferedProducer(HubBufferedProducer):
    """Sends single events to a hub in batches, in order per partition and key.

    ::

        async with BufferedProducer(connection_string, "telemetry", on_error=report) as producer:
            receipt = await producer.send(EventData(b"21.5"), partition_key="sensor-7")
            ...
            await receipt  # where its outcome matters

    See :class:`eventpump.producer.buffered.HubBufferedProducer` for what the callbacks, the router and the hook do.

    Args:
        connection_string: As the portal gives it; or give `fully_qualified_namespace` and `credential`.
        hub: The hub; may be left out where the connection string has an `EntityPath`.
        options: See :class:`BufferedOptions`; those of idempotent publishing as for :class:`EventProducer`.

    Raises:
        ConfigurationError: A value that cannot work.
    """

    def __init__(
        self,
        connection_string: str | None = None,
        hub: str | None = None,
        *,
        router: PartitionRouter | None = None,
        on_success: OnSuccess | None = None,
        on_error: OnError | None = None,
        encode: Callable[[EventData], EventData] | None = None,
        **options: Unpack[BufferedOptions],
    ) -> None:
        settings, rest = _split(connection_string, hub, options)
        _require_known(rest, BufferedOptions)
        buffer = {name: rest.pop(name) for name in BufferSettings.model_fields if name in rest}
        super().__init__(
            HubProducer(make_transport(settings), retry=settings.retry, **rest),
            BufferSettings(**buffer),
            router=router,
            on_success=on_success,
            on_error=on_error,
            encode=encode,
        )
