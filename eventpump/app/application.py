"""`EventHubsApp`: subscribers and publishers of any number of hubs as decorated functions."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal, Protocol, Self, TypeVar, Unpack, cast, runtime_checkable

from eventpump.aio.home import HomeLoop
from eventpump.aio.retry import retrying
from eventpump.aio.signals import handling_first_signal
from eventpump.aio.tasks import gather, reject, resolve
from eventpump.app.handlers import Function, Handler, Middleware, ResultDestination, RoutedFunction, RouteProcessor
from eventpump.app.hubs import AppHubs, Changes
from eventpump.app.results import ResultPublisher
from eventpump.clients.consumers import EventProcessorHost
from eventpump.clients.producers import BufferedProducer
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import Processor
from eventpump.core.backoff import UNLIMITED
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.monitoring import Health, Metric, all_healthy, merged
from eventpump.errors import ConfigurationError, ServiceError, ServiceTimeoutError, StoreError
from eventpump.eventhubs.codecs import PayloadCodec, codecs_of
from eventpump.eventhubs.decoding import PAYLOADS, Decoder
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.interfaces import EventSource, LeaseStore
from eventpump.options.base import unknown_option
from eventpump.options.connection import ClientOptions, checked_hub
from eventpump.options.consumer import (
    HostOptions,
    HostSettings,
    Park,
    SubscriberOptions,
    SubscriptionOptions,
    SubscriptionSettings,
)
from eventpump.options.producer import BufferedOptions, OnError
from eventpump.reports import Hook
from eventpump.sources.checks import is_source
from eventpump.storage.leases.memory import MemoryLeaseStore
from eventpump.texts import not_the_class

_log = logging.getLogger("eventpump.app")

_DEFAULT_GROUP: Final = "$Default"

TEST_GROUP: Final = "eventpump-test"
"""The consumer group with which `AppHub.published` reads."""

LeaseStores = LeaseStore | Callable[[], LeaseStore]
"""A lease store, or a function that returns one for each host."""

_F = TypeVar("_F", bound=Function)


_KEYED: Final = ("concurrency", "max_events_in_flight", "max_bytes_in_flight", "max_ahead")
_OF_SUBSCRIPTION: Final = frozenset(SubscriptionOptions.__annotations__)
_OF_HOST: Final = frozenset(HostOptions.__annotations__)


@runtime_checkable
class _PlacedStore(Protocol):
    """A lease store whose place does not name the hub, such as a `BlobLeaseStore`."""

    def location(self, consumer_group: str) -> str:
        """Return where the leases of a consumer group are."""


@dataclass(slots=True, repr=False)
class _Subscriber:
    """A decorated function and what it is called for.

    Attributes:
        options: Of the host, or of a named subscription.
    """

    hub: str
    group: str
    name: str
    route: RoutedFunction
    processor: Processor
    options: dict[str, Any]
    lease_store: LeaseStores | None


@dataclass(slots=True, repr=False)  # the connection string has a key
class _Overrides:
    """What `test` has in place of the service and the stores."""

    connection_string: str
    hook: Hook


class EventHubsApp:
    """Calls functions with the events of hubs, and publishes what they return.

    ::

        leases = functools.partial(SqliteLeaseStore, "leases.db")
        app = EventHubsApp(connection_string, lease_store=leases)
        park = Park("telemetry-parked")

        @app.subscriber("telemetry", key=by_device, on_retries_exhausted=park)
        @app.publisher("alerts")
        async def watch(reading: Reading, context: PartitionContext) -> Alert | None:
            return Alert(device=reading.device) if reading.celsius > 90 else None

        app.run()

    Everything is done by `EventProcessorHost`, `KeyedProcessor` and `BufferedProducer`, and holds as it does there:
    each event is handled at least once, and what is returned for it is published at least once, before its checkpoint.
    There is one host for each hub and consumer group. A decorated function stays as it was, and can be called.

    Args:
        connection_string: The connection string of the namespace; None to give `fully_qualified_namespace` and
            `credential`.
        lease_store: The store of leases and checkpoints, or a function that returns one, called for each host. A store
            itself is enough if there is one host. Two hubs need two containers or prefixes of a `BlobLeaseStore`, and
            so a `lease_store` each, given to `subscriber`; one file of a `SqliteLeaseStore` is enough for all. None if
            it is given to `subscriber` instead.
        source: Where the events of a hub come from instead of from the service, such as a `GeneratorSource` whose `hub`
            is the subscribers'; or several, one for each such hub. Every other hub is the service's, which is not
            needed if there is none. `test` uses hubs of the local service in their place. Default: None.
        hooks: Functions that are called with every report of every host. Default: `()`.
        middleware: A coroutine function `middleware(context, event, call)` that is called in place of every
            subscriber's function, and returns what `await call()` returns: for a span of a tracer, a measurement, or
            fields of the log. `call` decodes the payload, too; what it raises is to be raised. If it is not called, the
            event counts as handled. Default: None.
        decoder: Decodes payloads. Default: a `PayloadDecoder`.
        options: See `HostOptions`: for all hosts. Those of the connection (`ClientOptions`), and `telemetry`, are for
            producers too.

    Raises:
        ConfigurationError: There is no such option.
    """

    def __init__(
        self,
        connection_string: str | None = None,
        *,
        lease_store: LeaseStores | None = None,
        source: EventSource | Iterable[EventSource] | None = None,
        hooks: Iterable[Hook] = (),
        middleware: Middleware | None = None,
        decoder: Decoder | None = None,
        **options: Unpack[HostOptions],
    ) -> None:
        _check_known(options, _OF_HOST)
        self._connection_string = connection_string
        _check_store(lease_store)
        self._lease_store = lease_store
        self._sources = _sources_of(source)
        self._hooks = tuple(hooks)
        self._middleware = _checked_middleware(middleware)
        self._decoder = PAYLOADS if decoder is None else _checked_decoder(decoder)
        self._options: dict[str, Any] = {**options}
        self._subscribers: list[_Subscriber] = []
        self._publications: dict[Function, list[ResultDestination]] = {}
        self._producer_options: dict[str, dict[str, Any]] = {}
        self._stopping: asyncio.Event | None = None
        self._home = HomeLoop(type(self).__name__)  # during a run
        self._group: asyncio.TaskGroup | None = None
        self._hosts: dict[tuple[str, str], EventProcessorHost] = {}
        self._producers: dict[str, BufferedProducer] = {}

    @property
    def hosts(self) -> Mapping[tuple[str, str], EventProcessorHost]:
        """The hosts of the present run, or of the last one, by hub and consumer group: for their `partitions`."""
        return MappingProxyType(self._hosts)

    @property
    def producers(self) -> Mapping[str, BufferedProducer]:
        """The producers of the present run, or of the last one, by hub: for their `stats` and `buffered_bytes`."""
        return MappingProxyType(self._producers)

    def health(self) -> Health:
        """Return how the application is: as `EventProcessorHost.health`, ready once every host is."""
        if not self._hosts:
            return Health(live=True, ready=False, reasons=("the application waits for the call of run",))
        return all_healthy(each.health() for each in self._hosts.values())

    def metrics(self) -> Iterable[Metric]:
        """Return the metrics of all hosts and producers; `docs/reference/metrics.md` has all of them."""
        return merged(
            [*(each.metrics() for each in self._hosts.values()), *(each.metrics() for each in self._producers.values())]
        )

    def behind(self) -> Mapping[str, Any] | None:
        """Return how far the partitions of all hosts are behind, as JSON values; None before it runs."""
        found = [lag for each in self._hosts.values() if (lag := each.behind()) is not None]
        return {"lag": sum(each["lag"] for each in found), "parts": found} if found else None

    def describe(self) -> str:
        """Return what the hosts are doing now, as text; see `EventProcessorHost.describe`."""
        return "\n\n".join(str(each.describe()) for each in self._hosts.values()) or "it has no host that runs"

    # ------------------------------------------------------------------------------------------------------ decorators

    def subscriber(
        self,
        hub: str,
        *,
        name: str | None = None,
        key: Callable[[ReceivedEvent], Hashable] | None = None,
        lease_store: LeaseStores | None = None,
        decoder: Decoder | None = None,
        **options: Unpack[SubscriberOptions],
    ) -> Callable[[_F], _F]:
        """Return a decorator: the function is called with each event of a hub.

        It is a coroutine function. A parameter annotated `PartitionContext` gets the context, one annotated
        `ReceivedEvent` the event, and one with any other annotation the payload, decoded as that type: see
        `PayloadDecoder`. An event that cannot be decoded fails with a `DecodeError`, which is not retried.

        Without `key` the events of a partition are handled one after the other. What the function raises is handled as
        `failure_policy`, `handler_retry` and `on_retries_exhausted` say; events that were handled before it in the same
        batch are not handled again for that reason. `handler_timeout` is that of each event, with or without `key`;
        without, the wait until all that a batch has published is stored has as much time again.

        Args:
            hub: The hub.
            name: The subscription, to handle the events beside the other subscribers of the hub, with checkpoints and a
                pace of its own (`EventProcessorHost.subscribe`); None for the one subscriber of the hub and consumer
                group that is the host's own. Default: None.
            key: Returns the key of an event: events of different keys are handled at the same time, those of one key in
                order (`KeyedProcessor`); `partition_key` of the event is a key, too. This needs a `handler_retry` with
                a limit, or another `failure_policy` than "retry". With `keys`, as of `subscribe`. None for one event
                at a time, unless `concurrency` is given. Default: None.
            lease_store: As of the class, for this hub and consumer group. Default: None, that of the class.
            decoder: As of the class, for this function. Default: None, that of the class.
            options: See `SubscriberOptions`.

        Raises:
            ConfigurationError: The options cannot work. The decorator raises it for a function that cannot.
        """
        _check_known(options, SubscriberOptions.__annotations__)
        given: dict[str, Any] = {**options}
        group = given.pop("consumer_group", self._options.get("consumer_group", _DEFAULT_GROUP))
        keyed = {option: given.pop(option) for option in _KEYED if option in given}
        if "keys" in given and key is not None:
            given["key"], key = key, None
        is_keyed = key is not None or bool(keyed)
        self._check_options(checked_hub(hub), group, name, given, is_keyed=is_keyed)
        self._check_name(hub, group, name)
        own_decoder = self._decoder if decoder is None else _checked_decoder(decoder)
        _check_store(lease_store)

        def decorate(function: _F) -> _F:
            self._check_name(hub, group, name)
            handler = Handler(function, own_decoder)
            route = RoutedFunction(handler, self._publications.setdefault(function, []), self._middleware)
            processor: Processor = (
                KeyedProcessor(route.handle_keyed, key=key, **keyed)
                if is_keyed
                else functools.partial(RouteProcessor, route)
            )
            found = _Subscriber(hub, group, name or DEFAULT_SUBSCRIPTION, route, processor, given, lease_store)
            self._subscribers.append(found)
            return function

        return decorate

    def publisher(
        self,
        hub: str,
        *,
        partition_key: Callable[[Any], str | None] | None = None,
        content_mode: Literal["binary", "structured"] = "binary",
        **options: Unpack[BufferedOptions],
    ) -> Callable[[_F], _F]:
        """Return a decorator: what a subscriber's function returns is published to a hub.

        None is not published. An event is processed, and its checkpoint written, after what it led to is stored: at
        least once, because an event that is handled again is published again. Bytes, text, an `EventData` and a
        `CloudEvent` are published as they are, other objects as JSON. It may stand above or below `subscriber`.

        Args:
            hub: The hub.
            partition_key: Returns the partition key of a return value. Default: None, the key of the event handled.
            content_mode: How a `CloudEvent` is published. Default: "binary".
            options: See `BufferedOptions`; the same for all publishers to one hub.

        Raises:
            ConfigurationError: The options cannot work.
        """
        _check_known(options, BufferedOptions.__annotations__)
        if content_mode not in ("binary", "structured"):
            raise ConfigurationError("content_mode", 'must be "binary" or "structured"')
        if partition_key is not None and not callable(partition_key):
            raise ConfigurationError("partition_key", "must be a function that is called with the return value")
        if self._producer_options.setdefault(checked_hub(hub), {**options}) != options:
            raise ConfigurationError("publisher", f"the hub {hub} has a publisher with other options; give them once")

        def decorate(function: _F) -> _F:
            given: object = function
            if not inspect.iscoroutinefunction(given):
                raise ConfigurationError("publisher", "must decorate a coroutine function: async def")
            self._publications.setdefault(function, []).append(ResultDestination(hub, partition_key, content_mode))
            return function

        return decorate

    def _check_options(
        self, hub: str, group: str, name: str | None, given: Mapping[str, Any], *, is_keyed: bool
    ) -> None:
        """Raise `ConfigurationError` for options that cannot work, before anything runs."""
        host = self._host_options()
        if name is None:
            if wrong := sorted(set(given) - _OF_HOST):
                raise ConfigurationError(wrong[0], "is an option of a named subscription: give name=, too")
            own = {each: value for each, value in given.items() if each not in ClientOptions.__annotations__}
            settings = HostSettings(hub=hub, **{**host, **own, "consumer_group": group})
        else:
            if wrong := sorted(set(given) - _OF_SUBSCRIPTION):
                problem = "is an option of a host: give it to EventHubsApp, or to the subscriber without a name"
                raise ConfigurationError(wrong[0], problem)
            base = HostSettings(hub=hub, **{**host, "consumer_group": group})
            settings = SubscriptionSettings(name=name, **given).applied_to(base)
        if is_keyed:
            KeyedProcessor.check_settings(settings)

    def _host_options(self) -> dict[str, Any]:
        return {each: value for each, value in self._options.items() if each not in ClientOptions.__annotations__}

    def _check_name(self, hub: str, group: str, name: str | None) -> None:
        taken = {(each.hub, each.group, each.name) for each in self._subscribers}
        if (hub, group, name or DEFAULT_SUBSCRIPTION) not in taken:
            return
        if name is not None:
            raise ConfigurationError("name", f"the hub {hub} has a subscriber {name} in the group {group} already")
        problem = f"is needed for a second subscriber of the hub {hub} in the group {group}; or give consumer_group="
        raise ConfigurationError("name", problem)

    # --------------------------------------------------------------------------------------------------------- running

    def run(self) -> None:
        """Run until SIGTERM, SIGINT or `stop`, on an event loop of its own. Closes in order.

        A signal that is ignored when it begins stays ignored.

        Raises:
            ConfigurationError: There is no subscriber, or an option cannot work.
            EventPumpError: As of `EventProcessorHost.run`, of the first host that failed.
        """
        asyncio.run(self.run_async(handle_signals=True))

    async def run_async(self, *, handle_signals: bool = False) -> None:
        """Run until `stop` is called. When cancelled, it closes in order first.

        If a host fails, the others are closed in order.

        Args:
            handle_signals: Whether to stop on SIGTERM and SIGINT. A second signal has the effect that it has without
                it, and one that is ignored stays so. Default: False.

        Raises:
            ConfigurationError: There is no subscriber, it runs already, or an option cannot work.
            EventPumpError: As of `EventProcessorHost.run`, of the first host that failed.
        """
        await self._run(handle_signals=handle_signals)

    def stop(self) -> None:
        """Begin to close, without waiting. A function may call this."""
        if self._stopping is not None:
            self._home.enter()
            self._stopping.set()

    async def __aenter__(self) -> Self:
        """Run in the background. If a host fails, the body is cancelled, and the error is raised at its end."""
        self._home.enter()
        if self._group is not None:
            raise ConfigurationError("app", "runs already")
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._group.create_task(self._run(), name="eventpump app")
        # So that `stop` has something to stop.
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close in order."""
        self._home.enter()
        group, self._group = self._group, None
        assert group is not None
        self.stop()
        try:
            await group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            if len(errors.exceptions) > 1:
                raise
            raise errors.exceptions[0] from None
        finally:
            self._home.release()

    async def _run(self, *, handle_signals: bool = False, overrides: _Overrides | None = None) -> None:
        if not self._subscribers:
            raise ConfigurationError("app", "has no subscriber: decorate a function with @app.subscriber(hub)")
        self._check_publications()
        if unused := sorted(self._sources.keys() - {each.hub for each in self._subscribers}):
            raise ConfigurationError("source", f"the hub {unused[0]} has no subscriber")
        if self._stopping is not None:
            self._home.enter()
            raise ConfigurationError("app", "runs already")
        by_host: dict[tuple[str, str], list[_Subscriber]] = {}
        for each in self._subscribers:
            by_host.setdefault((each.hub, each.group), []).append(each)
        stores: Mapping[tuple[str, str], LeaseStore] = (
            self._stores_of(by_host) if overrides is None else {host: MemoryLeaseStore() for host in by_host}
        )
        self._home.enter()
        stopping = self._stopping = asyncio.Event()
        self._hosts.clear()
        self._producers.clear()
        try:
            async with AsyncExitStack() as stack:
                if handle_signals:
                    stack.enter_context(handling_first_signal(self._signalled))
                # Entered first, and so closed last: hosts finish what they have in hand.
                patience = _Patience(HostSettings(hub="any", **self._host_options()).startup_timeout, stopping)
                ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                stack.callback(ended.cancel)
                try:
                    await self._open_producers(stack, overrides, patience, ended)
                    hosts = await self._open_hosts(stack, overrides, by_host, stores, patience)
                except (ServiceError, StoreError):
                    if stopping.is_set():
                        return
                    raise
                await self._until_ended(hosts, stopping, ended)
        finally:
            self._stopping = None
            self._home.release()

    @staticmethod
    async def _until_ended(
        hosts: Sequence[EventProcessorHost], stopping: asyncio.Event, ended: asyncio.Future[None]
    ) -> None:
        """Run the hosts until they are stopped, one of them fails, or `ended` does: nothing is published any more
        then."""
        left = len(hosts)

        async def run(host: EventProcessorHost) -> None:
            nonlocal left
            try:
                await host.run(until=stopping.wait())
            finally:
                left -= 1
                if not left:
                    resolve(ended, None)

        async def publish() -> None:
            await ended

        await gather([*map(run, hosts), publish()])

    def _check_publications(self) -> None:
        subscribed = {each.route.handler.function for each in self._subscribers}
        for function, publications in self._publications.items():
            if publications and function not in subscribed:
                name = getattr(function, "__name__", function)
                raise ConfigurationError("publisher", f"the function {name} is not a subscriber, so nothing calls it")

    async def _open_producers(
        self, stack: AsyncExitStack, overrides: _Overrides | None, patience: _Patience, ended: asyncio.Future[None]
    ) -> None:
        """Open the producers, and try for as long as a host does if the service cannot be reached."""
        shared = {*ClientOptions.__annotations__, "telemetry"}
        connection = {each: value for each, value in self._options.items() if each in shared}
        publishers: dict[str, ResultPublisher] = {}
        for hub, options in self._producer_options.items():
            text, rest = self._connection(overrides, {**connection, **options})
            publisher = publishers[hub] = ResultPublisher(
                hub,
                functools.partial(_make_producer, text, hub, rest),
                keeps_state=options.get("state_store") is not None,
                on_opened=functools.partial(self._producers.__setitem__, hub),
                on_final=functools.partial(reject, ended),
            )
            stack.push_async_callback(publisher.aclose)
            await patience.retry(publisher.open, f"hub {hub}: its producer cannot be opened yet")
        for publications in self._publications.values():
            for each in publications:
                each.producer = publishers[each.hub]

    async def _open_hosts(
        self,
        stack: AsyncExitStack,
        overrides: _Overrides | None,
        by_host: Mapping[tuple[str, str], Sequence[_Subscriber]],
        stores: Mapping[tuple[str, str], LeaseStore],
        patience: _Patience,
    ) -> list[EventProcessorHost]:
        hosts = []
        for (hub, group), subscribers in by_host.items():
            own = next((each for each in subscribers if each.name == DEFAULT_SUBSCRIPTION), None)
            options = {**self._options, **({} if own is None else own.options), "consumer_group": group}
            source = None if overrides is not None else self._sources.get(hub)
            text, options = self._connection(overrides, options, has_source=source is not None)
            host = EventProcessorHost(
                text,
                None if source is not None else hub,
                source=source,
                processor=None if own is None else own.processor,
                lease_store=stores[hub, group],
                hooks=self._hooks if overrides is None else (*self._hooks, overrides.hook),
                **options,
            )
            hosts.append(await stack.enter_async_context(host))
            self._hosts[hub, group] = host
            for each in subscribers:
                if each is not own:
                    subscribe = functools.partial(host.subscribe, each.name, each.processor, **each.options)
                    await patience.retry(subscribe, f"hub {hub}: its subscriber {each.name} cannot begin yet")
        return hosts

    def _connection(
        self, overrides: _Overrides | None, options: dict[str, Any], *, has_source: bool = False
    ) -> tuple[str | None, dict[str, Any]]:
        """Return the connection string and the options with which to connect; none of these beside a source."""
        if overrides is None and not has_source:
            return self._connection_string, options
        kept = {name: value for name, value in options.items() if name not in ClientOptions.__annotations__}
        return None if overrides is None else overrides.connection_string, kept

    def _stores_of(
        self, by_host: Mapping[tuple[str, str], Sequence[_Subscriber]]
    ) -> Mapping[tuple[str, str], LeaseStore]:
        """Return the store of each host."""
        stores: dict[tuple[str, str], LeaseStore] = {}
        places: dict[str, str] = {}
        for (hub, group), subscribers in by_host.items():
            store = stores[hub, group] = self._store_of(hub, subscribers, [*stores.values()])
            if isinstance(store, _PlacedStore):
                place = store.location(group)
                other = places.setdefault(place, hub)
                if other != hub:
                    problem = (
                        f"keeps the leases of the hubs {other} and {hub} in one place, {place}: give their subscribers "
                        f'a lease_store= each, with a container of its own, or a prefix, as prefix="{hub}/", whose '
                        f'checkpoints KEDA reads with consumerGroup: "{hub}/{group}"'
                    )
                    raise ConfigurationError("lease_store", problem)
        return stores

    def _store_of(self, hub: str, subscribers: Iterable[_Subscriber], used: Collection[LeaseStore]) -> LeaseStore:
        given = next((each.lease_store for each in subscribers if each.lease_store is not None), self._lease_store)
        if given is None:
            problem = (
                "is required: a lease store, or a function that returns one, such as lambda: SqliteLeaseStore(path)"
            )
            raise ConfigurationError("lease_store", problem)
        is_store = callable(getattr(given, "write_checkpoint", None)) and not isinstance(given, type)
        store = cast(LeaseStore, given) if is_store else cast(Callable[[], LeaseStore], given)()
        if any(store is each for each in used):
            problem = f"is needed once for each host: for hub {hub}, too; give a function that returns one"
            raise ConfigurationError("lease_store", problem)
        return store

    def _signalled(self) -> None:
        _log.info("closing on a signal")
        self.stop()

    # --------------------------------------------------------------------------------------------------------- testing

    @asynccontextmanager
    async def test(
        self, *, partitions: int = 2, hubs: Iterable[str] = (), timeout: float = 30.0
    ) -> AsyncIterator[AppHubs]:
        """Run against the local service, in this process: `async with app.test() as hubs`.

        All hubs of the application exist there, also those in which events are parked. The body begins when every
        subscriber reads every partition. Lease stores, sources and the options of the connection are not used.

        Args:
            partitions: Of each hub. Default: 2.
            hubs: Further hubs. Default: none.
            timeout: Seconds that any wait of the hubs may take. Default: 30.0.

        Raises:
            EventPumpError: As of `run_async`: from what the body waits for, or at its end.
        """
        # Both are only loaded for a test.
        from eventpump.emulator.config import HubSpec
        from eventpump.emulator.server import Emulator

        names = {*hubs, *self._producer_options}
        groups: dict[str, set[str]] = {}
        for each in self._subscribers:
            options = {**self._options, **each.options}
            groups.setdefault(each.hub, set()).update({each.group, options.get("catch_up_group") or _DEFAULT_GROUP})
            for policy in (options.get("failure_policy"), options.get("on_retries_exhausted")):
                match policy:
                    case Park(str() as to):
                        names.add(to)
        specs = [
            HubSpec(name, partitions, tuple(sorted({TEST_GROUP, *groups.get(name, ())} - {_DEFAULT_GROUP})))
            for name in sorted(names | set(groups))
        ]
        async with Emulator(specs) as service:
            changes = Changes()
            overrides = _Overrides(service.connection_string, changes.reported)
            expected = {(each.hub, each.group, each.name) for each in self._subscribers}
            running = asyncio.create_task(self._run(overrides=overrides), name="eventpump app")
            try:
                async with AppHubs(
                    service.connection_string,
                    {spec.name: spec.partitions for spec in specs},
                    self.hosts,
                    expected,
                    running=running,
                    changes=changes,
                    decoder=self._decoder,
                    codecs={spec.name: self._codecs(spec.name) for spec in specs},
                    group=TEST_GROUP,
                    timeout=timeout,
                ) as made:
                    yield made
            finally:
                self.stop()
                if not running.done() and self._stopping is None:
                    running.cancel()  # it has not begun
                await asyncio.wait({running})
                _ = running.cancelled() or running.exception()  # raised below, unless the body has failed first
            if not running.cancelled():
                running.result()

    def _codecs(self, hub: str) -> list[PayloadCodec]:
        """Return what the events of a hub may be encoded with, as far as these are codecs."""
        given = [self._producer_options.get(hub, {}).get("encode"), self._options.get("decode")]
        given += [each.options.get("decode") for each in self._subscribers if each.hub == hub]
        several = [codecs_of("decode", each) for each in given if isinstance(each, PayloadCodec | Sequence)]
        return list(
            {codec.content_encoding.lower(): codec for codecs in reversed(several) for codec in codecs}.values()
        )


class _Patience:
    """How long an application tries to reach the service and its stores at the start, unless `stopping` ends it."""

    def __init__(self, seconds: float, stopping: asyncio.Event) -> None:
        self._seconds = seconds
        self._until = asyncio.get_running_loop().time() + seconds
        self._stopping = stopping
        self._rng = random.Random()

    async def retry(self, attempt: Callable[[], Awaitable[None]], problem: str) -> None:
        """Try something until it succeeds, and report each failure.
        Raises an error that is final, or the last one in time."""

        def report(error: Exception, delay: float) -> None:
            _log.warning("%s: %s; again in %.1f s", problem, error, delay)

        try:
            await retrying(attempt, UNLIMITED, self._rng, until=self._until, stop=self._stopping, on_retry=report)
        except TimeoutError as error:
            raise ServiceTimeoutError(f"{problem}: no answer within {self._seconds:g} s") from error


def _make_producer(
    connection_string: str | None, hub: str, options: dict[str, Any], on_error: OnError
) -> BufferedProducer:
    return BufferedProducer(connection_string, hub, on_error=on_error, **options)


def _sources_of(given: EventSource | Iterable[EventSource] | None) -> dict[str, EventSource]:
    """Return the sources by their hubs."""
    several: Any = () if given is None else (given,) if is_source(given) else given
    sources: dict[str, EventSource] = {}
    for each in several if isinstance(several, Iterable) else (several,):
        if not is_source(each):
            raise ConfigurationError("source", "must be an event source, such as a GeneratorSource, or several")
        if sources.setdefault(checked_hub(each.hub), each) is not each:
            raise ConfigurationError("source", f"there are two for the hub {each.hub}")
    return sources


def _check_known(options: Mapping[str, object], known: Collection[str]) -> None:
    for name in options:
        if name not in known:
            raise unknown_option(name, known)


def _checked_decoder(decoder: object) -> Decoder:
    if isinstance(decoder, type) or not isinstance(decoder, Decoder):
        raise ConfigurationError(
            "decoder",
            "must be an object with the method decoder_for, such as PayloadDecoder()" + not_the_class(decoder),
        )
    return decoder


def _checked_middleware(given: Any) -> Middleware | None:
    if given is None or inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(type(given).__call__):
        return cast("Middleware | None", given)
    raise ConfigurationError("middleware", "must be a coroutine function: async def middleware(context, event, call)")


def _check_store(given: object) -> None:
    if given is not None and not callable(given) and not callable(getattr(given, "write_checkpoint", None)):
        raise ConfigurationError("lease_store", "must be a lease store, or a function that returns one")
