"""The public classes that receive, built of options, a transport and the parts that they name."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable
from typing import Any, Self, Unpack

from eventpump.clients.connection import HubConnection, split_options, takes_options
from eventpump.consumer.host.host import HubHost
from eventpump.consumer.processor import Processor
from eventpump.consumer.reader import reader
from eventpump.errors import ConfigurationError
from eventpump.interfaces import EventSender, EventSource, LeaseStore, Transport
from eventpump.options.base import RetryOptions, unknown_option
from eventpump.options.connection import ClientOptions, checked_hub
from eventpump.options.consumer import HostOptions, HostSettings, ReaderOptions, ReaderSettings
from eventpump.options.described import defaults_of
from eventpump.options.environment import (
    CONSUMER_GROUP,
    CONTAINER,
    HOST_NAME,
    PREFIX,
    STORAGE_CONNECTION_STRING,
    STORAGE_URL,
    Environment,
)
from eventpump.reports import Hook
from eventpump.sources.checks import is_source
from eventpump.sources.hub import HubSource
from eventpump.sources.transport import SourceTransport
from eventpump.texts import not_the_class


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
    Raises `ConfigurationError` for another, or options of a connection."""
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
class EventProcessorHost(HubHost):
    """Processes a hub's partitions, shared with the other hosts that use the same lease store.

    ::

        async def process(context, events):
            print(context.partition_id, [event.body_as_str() for event in events])

        leases = SqliteLeaseStore("leases.db")
        host = EventProcessorHost(
            connection_string, "telemetry", processor=process, lease_store=leases
        )
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
        options: See `HostOptions`.

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

            telemetry = rest.get("telemetry")
            return HubProducer(
                transport, hub, retry=connection.retry, rng=rng, owns_transport=False, telemetry=telemetry
            )

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

    @classmethod
    def from_env(
        cls,
        *,
        processor: Processor | None = None,
        lease_store: LeaseStore | None = None,
        hooks: Iterable[Hook] = (),
        prefix: str = PREFIX,
        **options: Unpack[HostOptions],
    ) -> Self:
        """Return a host by the variables of the environment, which nothing else reads.

        EVENTPUMP_CONNECTION_STRING, or EVENTPUMP_NAMESPACE with the option `credential`; EVENTPUMP_HUB;
        EVENTPUMP_CONSUMER_GROUP; EVENTPUMP_HOST_NAME, the `owner_id`; and of its `BlobLeaseStore`
        EVENTPUMP_CONTAINER with EVENTPUMP_STORAGE_CONNECTION_STRING, or with EVENTPUMP_STORAGE_URL and the same
        `credential`. An option that is given counts, and its variable is not read; so does a `lease_store`.

        Args:
            processor: As of the class. Default: None.
            lease_store: As of the class. None for that of the environment.
            hooks: As of the class. Default: `()`.
            prefix: What the variables begin with. Default: "EVENTPUMP".
            options: See `HostOptions`.

        Raises:
            ConfigurationError: A variable is missing, or its value cannot work: the error names it.
        """
        environment, given = Environment(prefix), dict[str, Any](options)
        found = environment.connection(given)
        for name, variable in (("consumer_group", CONSUMER_GROUP), ("owner_id", HOST_NAME)):
            if name not in given and (value := environment.get(variable)) is not None:
                found[name] = value
        store = _lease_store_of(environment, given.get("credential")) if lease_store is None else lease_store
        with environment.naming(found, given):
            return cls(processor=processor, lease_store=store, hooks=hooks, **found, **given)

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace's host name."""
        return self._fully_qualified_namespace


def _lease_store_of(environment: Environment, credential: object) -> LeaseStore:
    """Return the lease store that the environment names."""
    # The storage SDK is loaded by programs that use it only.
    from eventpump.storage.leases.blob import BlobLeaseStore

    container, account = environment.store()
    if "account_url" in account and "sig=" not in account["account_url"] and credential is None:
        problem = "names a storage account, for which `credential` has to be given, such as a DefaultAzureCredential"
        raise ConfigurationError(environment.name(STORAGE_URL), problem)
    variables = {
        "container": CONTAINER,
        "account_url": STORAGE_URL,
        "connection_string": STORAGE_CONNECTION_STRING,
    }
    try:
        if "account_url" in account and credential is not None:
            return BlobLeaseStore(container, account_url=account["account_url"], credential=credential)
        return BlobLeaseStore(container, **account)
    except ConfigurationError as error:
        variable = variables.get(error.field)
        if variable is None:
            raise
        raise ConfigurationError(environment.name(variable), error.problem) from None


@takes_options(ReaderOptions, defaults_of(ReaderSettings))
class PartitionReader(reader.HubReader):
    """Reads one partition without leases: from a position, to an end or forever.

    ::

        reader = PartitionReader(
            connection_string, "telemetry", partition_id="0", end="@latest"
        )
        async with reader:
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
        options: See `ReaderOptions`.

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
