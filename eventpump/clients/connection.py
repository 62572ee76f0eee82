"""What all clients have in common: how the options of a connection are taken, and shown."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from eventpump.errors import ConfigurationError
from eventpump.interfaces import Transport
from eventpump.options.base import RetryOptions, unknown_option
from eventpump.options.connection import (
    CONNECTION_DEFAULTS,
    ClientOptions,
    ConnectionSettings,
    checked_hub,
    connection_settings,
)
from eventpump.options.described import show_options, with_options
from eventpump.texts import not_the_class


def make_transport(settings: ConnectionSettings) -> Transport:
    """Return a transport of the kind that the settings name. It connects on first use.

    Args:
        settings: How to connect, and through which AMQP implementation, as `connection_settings` returns it.

    Raises:
        ConfigurationError: The kind is not installed, or not available for this version of Python.
    """
    if settings.transport == "uamqp":
        # An extra, and only imported if it is selected.
        from eventpump.transport.uamqp.transport import UamqpTransport

        return UamqpTransport(settings)
    # A client of a source, or of a transport object, does without the engine.
    from eventpump.transport.native import NativeTransport

    return NativeTransport(settings)


class HubConnection(NamedTuple):
    """How a client reaches its hub, and whether it closes the transport."""

    hub: str
    fully_qualified_namespace: str
    retry: RetryOptions
    make: Callable[[], Transport]
    is_owned: bool


def split_options(
    client: type, known: type, connection_string: str | None, hub: str | None, options: Mapping[str, Any]
) -> tuple[HubConnection, dict[str, Any]]:
    """Extract the connection's options.

    Raises:
        ConfigurationError: There is no such option, or a value of the connection cannot work.
    """
    for name in options:
        if name not in known.__annotations__:
            raise unknown_option(name, inspect.signature(client).parameters)
    connection = {name: value for name, value in options.items() if name in ClientOptions.__annotations__}
    rest = {name: value for name, value in options.items() if name not in connection}
    is_owned = connection.pop("owns_transport", True)
    if not isinstance(is_owned, bool):
        raise ConfigurationError("owns_transport", "must be True or False")
    transport = connection.get("transport", "native")
    if isinstance(transport, str):
        if not is_owned:
            raise ConfigurationError("owns_transport", "must be True unless `transport` is a transport object")
        settings = connection_settings(connection_string, hub, **connection)
        interval, longest = rest.get("delivery_interval", 0), settings.idle_timeout / 4
        if isinstance(interval, int | float) and interval > longest:
            raise ConfigurationError("delivery_interval", f"must be at most a quarter of idle_timeout, {longest:g} s")
        namespace = settings.fully_qualified_namespace
        return HubConnection(settings.hub, namespace, settings.retry, lambda: make_transport(settings), True), rest
    if not callable(getattr(transport, "open_send_link", None)) or isinstance(transport, type):
        problem = 'must be "native", "uamqp", or a transport object'
        raise ConfigurationError("transport", problem + not_the_class(transport))
    retry = connection.pop("retry", None)
    if retry is None:
        retry = RetryOptions()
    elif not isinstance(retry, RetryOptions):
        raise ConfigurationError("retry", "must be a RetryOptions, or None, along with a transport object")
    del connection["transport"]
    for name in ("connection_string", *connection) if connection_string is not None else connection:
        raise ConfigurationError(name, "cannot be given along with a transport object, which has its own connection")
    if hub is None:
        raise ConfigurationError("hub", "is required along with a transport object")
    return HubConnection(
        checked_hub(hub), transport.fully_qualified_namespace, retry, lambda: transport, is_owned
    ), rest


_Class = TypeVar("_Class", bound=type)


def takes_options(known: type, *defaults: Mapping[str, Any]) -> Callable[[_Class], _Class]:
    """Return a decorator that shows every option in the signature and in the docstring of a class."""

    def decorate(made: _Class) -> _Class:
        # Those of the connection last.
        names = sorted(known.__annotations__, key=lambda name: name in ClientOptions.__annotations__)
        values = {name: value for each in (CONNECTION_DEFAULTS, *defaults) for name, value in each.items()}
        # On the function and not the class: a subclass with a constructor of its own has its own signature.
        with_options(vars(made)["__init__"], known, names, values)
        show_options(made, known, names)
        return made

    return decorate
