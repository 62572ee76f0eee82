"""The public classes that send, built of options, a transport and the parts that they name."""

from __future__ import annotations

from typing import Any, Self, Unpack

from eventpump.clients.connection import split_options, takes_options
from eventpump.core.router import PartitionRouter
from eventpump.options.described import defaults_of
from eventpump.options.environment import PREFIX, Environment
from eventpump.options.producer import (
    BufferedOptions,
    BufferSettings,
    OnError,
    OnSuccess,
    ProducerOptions,
    ProducerSettings,
)
from eventpump.producer.buffered import HubBufferedProducer
from eventpump.producer.producer import HubProducer


@takes_options(ProducerOptions, defaults_of(ProducerSettings))
class EventProducer(HubProducer):
    """Sends events to a hub: to a partition, by a partition key, or to any partition.

    ::

        async with EventProducer(connection_string, "telemetry") as producer:
            events = [EventData(b"one"), EventData(b"two")]
            await producer.send(events, partition_key="sensor-7")

    All times are in seconds.

    Args:
        connection_string: The namespace's or the hub's connection string, as the portal shows it; None to give
            `fully_qualified_namespace` and `credential`, or a transport object.
        hub: The event hub's name; None if the connection string has an `EntityPath`.
        router: Chooses the partition of every message that is sent without one, by its first event and its key; the
            partitions are read once. None to leave the choice to the service, which an idempotent producer cannot.
        options: See `ProducerOptions`.

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

    @classmethod
    def from_env(
        cls, *, router: PartitionRouter | None = None, prefix: str = PREFIX, **options: Unpack[ProducerOptions]
    ) -> Self:
        """Return a producer by the variables of the environment, which nothing else reads.

        EVENTPUMP_CONNECTION_STRING, or EVENTPUMP_NAMESPACE with the option `credential`; and EVENTPUMP_HUB. An option
        that is given counts, and its variable is not read.

        Args:
            router: As of the class. Default: None.
            prefix: What the variables begin with. Default: "EVENTPUMP".
            options: See `ProducerOptions`.

        Raises:
            ConfigurationError: A variable is missing, or its value cannot work: the error names it.
        """
        environment, given = Environment(prefix), dict[str, Any](options)
        found = environment.connection(given)
        with environment.naming(found, given):
            return cls(router=router, **found, **given)


@takes_options(BufferedOptions, defaults_of(ProducerSettings), defaults_of(BufferSettings))
class BufferedProducer(HubBufferedProducer):
    """Sends single events to a hub in batches, in order per partition and key.

    ::

        producer = BufferedProducer(connection_string, "telemetry", on_error=report)
        async with producer:
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
        options: See `BufferedOptions`.

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

    @classmethod
    def from_env(
        cls,
        *,
        router: PartitionRouter | None = None,
        on_success: OnSuccess | None = None,
        on_error: OnError | None = None,
        prefix: str = PREFIX,
        **options: Unpack[BufferedOptions],
    ) -> Self:
        """Return a producer by the variables of the environment, which nothing else reads.

        EVENTPUMP_CONNECTION_STRING, or EVENTPUMP_NAMESPACE with the option `credential`; and EVENTPUMP_HUB. An option
        that is given counts, and its variable is not read.

        Args:
            router: As of the class. Default: None.
            on_success: As of the class. Default: None.
            on_error: As of the class. Default: None.
            prefix: What the variables begin with. Default: "EVENTPUMP".
            options: See `BufferedOptions`.

        Raises:
            ConfigurationError: A variable is missing, or its value cannot work: the error names it.
        """
        environment, given = Environment(prefix), dict[str, Any](options)
        found = environment.connection(given)
        with environment.naming(found, given):
            return cls(router=router, on_success=on_success, on_error=on_error, **found, **given)
