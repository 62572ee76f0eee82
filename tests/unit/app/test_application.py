"""Decorating: what is refused, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from eventpump.app.application import EventHubsApp
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.decoding import PayloadDecoder
from eventpump.options.base import RetryOptions
from eventpump.options.consumer import Park
from eventpump.storage.leases.blob import BlobLeaseStore
from eventpump.storage.leases.memory import MemoryLeaseStore
from eventpump.storage.leases.sqlite import SqliteLeaseStore

CONNECTION = "Endpoint=sb://ns.servicebus.windows.net/;SharedAccessKeyName=n;SharedAccessKey=a2V5"
TWICE = RetryOptions(max_retries=1)


async def _take(body: bytes) -> None:
    pass


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_batch_sise": 1}, "did you mean max_batch_size"),
        ({"concurency": 1}, "did you mean concurrency"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"failure_policy": "ignore"}, "failure_policy"),
        ({"failure_policy": Park("telemetry")}, "cannot be parked there"),
        ({"start": "latest"}, "named subscription: give name="),
        ({"key": lambda event: None}, "must have a limit for a KeyedProcessor"),
        ({"concurrency": 8}, "must have a limit for a KeyedProcessor"),
        ({"name": "a", "prefetch_events": 5}, "is an option of a host"),
        ({"name": "default"}, "default is the subscription"),
        ({"name": "a", "start": "earliest"}, "without catch_up"),
    ],
)
def test_options_that_cannot_work_are_refused_at_the_decorator(options: dict[str, Any], problem: str) -> None:
    """By the rules of the host, the subscription and the keyed processor."""
    with pytest.raises(ConfigurationError, match=problem):
        EventHubsApp().subscriber("telemetry", **options)


@pytest.mark.parametrize("option", [{"decoder": "json"}, {"decoder": PayloadDecoder}, {"lease_store": "leases.db"}])
def test_parts_that_are_none_are_refused(option: Any) -> None:
    """Of the application and of a subscriber."""
    with pytest.raises(ConfigurationError, match="must be a"):
        EventHubsApp(**option)
    with pytest.raises(ConfigurationError, match="must be a"):
        EventHubsApp().subscriber("telemetry", **option)


def test_middleware_that_is_no_coroutine_function_is_refused() -> None:
    """An object whose call is one is as good."""

    class Traces:
        async def __call__(self, context: object, event: object, call: Any) -> Any:
            return await call()

    EventHubsApp(middleware=Traces())
    for given in (lambda context, event, call: call(), "trace", Traces):
        with pytest.raises(ConfigurationError, match="middleware: must be a coroutine function"):
            EventHubsApp(middleware=given)  # type: ignore[arg-type]  # that is the point


def test_options_of_the_application_apply_to_its_subscribers() -> None:
    """A retry limit that all of them have."""
    EventHubsApp(handler_retry=TWICE).subscriber("telemetry", concurrency=4)(_take)
    with pytest.raises(ConfigurationError, match="did you mean handler_retry"):
        EventHubsApp(handler_retri=TWICE)  # type: ignore[call-arg]  # that is the point
    with pytest.raises(ConfigurationError, match="max_events_in_flight"):
        EventHubsApp(handler_retry=TWICE).subscriber("telemetry", concurrency=4, max_events_in_flight=1)(_take)


def test_second_subscriber_of_a_hub_needs_a_name_or_a_group() -> None:
    """Otherwise each would get a part of the events."""
    app = EventHubsApp()
    app.subscriber("telemetry")(_take)
    with pytest.raises(ConfigurationError, match="is needed for a second subscriber"):
        app.subscriber("telemetry")
    app.subscriber("telemetry", consumer_group="other")(_take)
    app.subscriber("telemetry", name="copy")(_take)
    with pytest.raises(ConfigurationError, match="has a subscriber copy"):
        app.subscriber("telemetry", name="copy")


def test_decorated_function_stays_as_it_was() -> None:
    """It can be called, and decorated again."""
    app = EventHubsApp()
    assert app.subscriber("telemetry")(app.publisher("out")(_take)) is _take


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_in_flihgt": 1}, "did you mean max_in_flight"),
        ({"content_mode": "batched"}, "binary"),
        ({"partition_key": "device"}, "must be a function"),
    ],
)
def test_publishers_are_checked_at_the_decorator(options: dict[str, Any], problem: str) -> None:
    """As subscribers are."""
    with pytest.raises(ConfigurationError, match=problem):
        EventHubsApp().publisher("out", **options)


def test_publishers_to_one_hub_share_a_producer() -> None:
    """So they have the same options, and decorate coroutine functions."""
    app = EventHubsApp()
    app.publisher("out", idempotent=True)
    app.publisher("out", idempotent=True)
    with pytest.raises(ConfigurationError, match="other options"):
        app.publisher("out")
    with pytest.raises(ConfigurationError, match="coroutine function"):
        app.publisher("out", idempotent=True)(lambda: None)  # type: ignore[type-var]  # that is the point


async def test_what_cannot_run_is_refused_at_the_start() -> None:
    """No subscriber, a publisher that nothing calls, no lease store, one for two hosts."""
    app = EventHubsApp(CONNECTION)
    with pytest.raises(ConfigurationError, match="has no subscriber"):
        await app.run_async()
    app.subscriber("telemetry")(_take)
    with pytest.raises(ConfigurationError, match="lease_store: is required"):
        await app.run_async()

    async def lonely(body: bytes) -> None:
        pass

    app.publisher("out")(lonely)
    with pytest.raises(ConfigurationError, match="lonely is not a subscriber"):
        await app.run_async()
    shared = EventHubsApp(CONNECTION, lease_store=MemoryLeaseStore(), checkpoint_policy=CheckpointPolicy.manual())
    shared.subscriber("one")(_take)
    shared.subscriber("two")(_take)
    with pytest.raises(ConfigurationError, match="a function that returns one"):
        await shared.run_async()


async def test_two_hubs_with_leases_in_one_place_are_refused_before_anything_runs() -> None:
    """One function for both hubs names one directory; with prefixes, containers or a SQLite file they are apart."""
    made: list[BlobLeaseStore] = []

    def blobs(prefix: str = "") -> BlobLeaseStore:
        made.append(BlobLeaseStore("leases", account_url="http://127.0.0.1:9/account", prefix=prefix))
        return made[-1]

    def reached() -> BlobLeaseStore:
        raise LookupError("the stores before are not refused")

    def app_of(store: Any, **other: Any) -> EventHubsApp:
        app = EventHubsApp(CONNECTION, lease_store=store)
        app.publisher("out")(app.subscriber("one")(_take))
        app.subscriber("two", **other)(_take)
        app.subscriber("three", lease_store=reached)(_take)
        return app

    with pytest.raises(ConfigurationError) as caught:
        await app_of(blobs).run_async()
    assert str(caught.value) == (
        "lease_store: keeps the leases of the hubs one and two in one place, "
        "http://127.0.0.1:9/account/leases/$default/: give their subscribers a lease_store= each, with a container of "
        'its own, or a prefix, as prefix="two/", whose checkpoints KEDA reads with consumerGroup: "two/$Default"'
    )
    assert len(made) == 2
    for other in (blobs(prefix="two/"), MemoryLeaseStore(), SqliteLeaseStore("never opened.db")):
        with pytest.raises(LookupError, match="not refused"):
            await app_of(lambda: blobs(), lease_store=other).run_async()
    with pytest.raises(LookupError, match="not refused"):
        await app_of(lambda: SqliteLeaseStore("never opened.db")).run_async()
