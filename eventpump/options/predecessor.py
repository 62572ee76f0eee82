"""azure-eventhub's names, of which programs that are moved still have some: what to write in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

GUIDE: Final = "docs/from-azure-eventhub.md"

OPTIONS: Final[Mapping[str, str]] = {
    "buffered_mode": "a `BufferedProducer`",
    "checkpoint_store": "`lease_store` of an `EventProcessorHost`",
    "conn_str": "`connection_string`",
    "connection_verify": "`ca_file`",
    "enable_idempotent_partitions": "`idempotent`",
    "eventhub_name": "`hub`",
    "http_proxy": "`proxy`",
    "keep_alive": "`idle_timeout`",
    "load_balancing_interval": "`renew_interval` of an `EventProcessorHost`",
    "load_balancing_strategy": "`balancer` of an `EventProcessorHost`",
    "max_buffer_length": "`max_events` of a `BufferedProducer`",
    "on_error": "`process_error` of an `EventProcessor`, and `on_error` of a `BufferedProducer`",
    "on_event": "`processor` of an `EventProcessorHost`, which gets batches",
    "on_event_batch": "`processor` of an `EventProcessorHost`",
    "on_partition_close": "`close` of an `EventProcessor`",
    "on_partition_initialize": "`open` of an `EventProcessor`",
    "on_success": "`on_success` of a `BufferedProducer`",
    "partition_config": "`partition_options`",
    "partition_ownership_expiration_interval": "`lease_duration` of the lease store",
    "prefetch": "`prefetch_events`",
    "retry_backoff_factor": "`retry=RetryOptions(base_delay=...)`",
    "retry_backoff_max": "`retry=RetryOptions(max_delay=...)`",
    "retry_mode": "`retry=RetryOptions(mode=...)`",
    "retry_total": "`retry=RetryOptions(max_retries=...)`",
    "ssl_context": "`ca_file`, `client_cert_file` and `client_key_file`",
    "starting_position": "`initial_position` of an `EventProcessorHost`, and `position` of a `PartitionReader`",
    "starting_position_inclusive": "`EventPosition.at_sequence_number(number, inclusive=True)` as the position",
    "track_last_enqueued_event_properties": "`track_last_enqueued`",
    "uamqp_transport": '`transport="uamqp"`',
}
"""Options, and what they are here."""

PRODUCER: Final[Mapping[str, str]] = {
    "close": "`await aclose()`",
    "from_connection_string": "the class itself, called with the connection string and the hub",
    "get_eventhub_properties": "`get_properties`",
    "send_batch": "`send`, of a batch or a list of events",
    "send_event": "`send`",
}
CONSUMER: Final[Mapping[str, str]] = {
    "close": "`await aclose()`",
    "from_connection_string": "the class itself, called with the connection string and the hub",
    "receive": "`processor=...` and `await run()`, or `async for batch in host.batches()`",
    "receive_batch": "`processor=...` and `await run()`, or `async for batch in host.batches()`",
}
READER: Final[Mapping[str, str]] = {
    "close": "`await aclose()`",
    "from_connection_string": "the class itself, called with the connection string and the hub",
    "receive": "`async for event in reader`, or `await reader.read()`",
    "receive_batch": "`await reader.read()`",
}
CONTEXT: Final[Mapping[str, str]] = {
    "eventhub_name": "`scope.hub`",
    "last_enqueued_event_properties": "`last_enqueued`, or `lag`, with `track_last_enqueued=True`",
    "update_checkpoint": "`await checkpoint(event)`",
}
BATCH: Final[Mapping[str, str]] = {
    "add": "`try_add`, which returns False when the batch is full",
    "size_in_bytes": "`size`",
}

_Class = TypeVar("_Class", bound=type)


def option_hint(name: str) -> str | None:
    """Return what an option of azure-eventhub is here; None if it is not one."""
    here = OPTIONS.get(name)
    return None if here is None else _hint(name, here)


def _hint(name: str, here: str) -> str:
    return f"azure-eventhub's {name}: here {here} ({GUIDE})"


class _Absent:
    """An attribute that a class does not have, with an `AttributeError` that says what it has instead.

    It is asked for only where it is used, so that nothing else costs more. `hasattr`, `getattr` with a default, and the
    attributes of a subclass and of its other bases work as without it.
    """

    def __init__(self, name: str, here: str) -> None:
        self._name = name
        self._here = here
        self.__doc__ = None  # not an attribute to be documented

    def __get__(self, instance: object, owner: type) -> Any:
        holder = next(each for each in owner.__mro__ if vars(each).get(self._name) is self)
        if hasattr(rest := super(holder, owner if instance is None else instance), self._name):
            return getattr(rest, self._name)
        what = f"type object {owner.__name__!r}" if instance is None else f"{owner.__name__!r} object"
        problem = f"{what} has no attribute {self._name!r}; {_hint(self._name, self._here)}"
        raise AttributeError(problem, name=self._name, obj=instance)

    def __repr__(self) -> str:
        return f"<{_hint(self._name, self._here)}>"  # what `help` shows


def answers(names: Mapping[str, str]) -> Callable[[_Class], _Class]:
    """Return a decorator for a class: azure-eventhub's names of its attributes are answered with its own."""

    def decorate(made: _Class) -> _Class:
        for name, here in names.items():
            assert not hasattr(made, name), f"{made.__name__} has {name}"
            setattr(made, name, _Absent(name, here))
        return made

    return decorate
