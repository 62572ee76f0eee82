"""What all clients have in common: the options of a connection, and how they are taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar, get_type_hints

from pydantic import BaseModel, SecretStr

from eventpump.errors import ConfigurationError
from eventpump.interfaces import Transport
from eventpump.options.base import RetryOptions, unknown_option
from eventpump.options.connection import (
    ConnectionSettings,
    TransportName,
    TransportType,
    checked_hub,
    connection_settings,
)
from eventpump.options.credentials import Credential
from eventpump.texts import not_the_class
from eventpump.transport.native import NativeTransport


class ConnectionOptions(TypedDict, total=False):
    """Keyword arguments of all clients: how to connect."""

    fully_qualified_namespace: str | None
    """The namespace's host name, such as "example.servicebus.windows.net"; None with a connection string. Default:
    None."""
    credential: Credential | None
    """A token credential of `azure.identity.aio`, an `AzureNamedKeyCredential`, an `AzureSasCredential`, a `SharedKey`
    or a `SharedSignature`; None if the connection string holds a key or a signature. Default: None."""
    custom_endpoint_address: str | None
    """The host to connect to instead of the namespace, as `host[:port]` or a URL; None for the namespace. Default:
    None."""
    transport_type: TransportType
    """What carries AMQP: "tcp" (port 5671), or "websocket" (port 443, unless the endpoint has one). Default: "tcp"."""
    proxy: str | SecretStr | None
    """The HTTP proxy to connect through, as `http[s]://[username:password@]host[:port]` with user name and password
    percent-encoded; None to connect directly. Default: None."""
    trust_env: bool
    """Whether to use the proxy that the environment variable `HTTPS_PROXY` names, if `proxy` is not given and
    `NO_PROXY` does not exempt the host. Default: False."""
    ca_file: str | Path | None
    """A file of CA certificates (PEM) to trust instead of the system's; None for the system's. Default: None."""
    client_cert_file: str | Path | None
    """A file with the certificate chain (PEM) to present to the service, and its key unless `client_key_file` is given;
    None for no client certificate. Default: None."""
    client_key_file: str | Path | None
    """A file with the key (PEM) of the client certificate; None if `client_cert_file` holds it. Default: None."""
    client_key_password: str | SecretStr | None
    """The password of the client certificate's key; None if it is not encrypted. Default: None."""
    auth_timeout: float
    """Seconds to wait until the service has accepted a token. Default: 60.0."""
    sas_lifetime: float
    """Seconds for which a token signed with a key is valid, 2 to 86,400; it is renewed after three quarters of that.
    Default: 3,600.0."""
    operation_timeout: float
    """Seconds to wait for a connection, an attach, or the answer to a request or a send. Default: 60.0."""
    idle_timeout: float
    """Seconds without data after which the connection is considered dead. Half of it, but at least 1, is advertised to
    the service, which may refuse values below 1. Default: 60.0."""
    retry: RetryOptions
    """The number of retries and the delays, in seconds, of sends and requests. Default: `RetryOptions(max_retries=3,
    base_delay=0.8, max_delay=60.0)`."""


class ClientOptions(ConnectionOptions, total=False):
    """Keyword arguments of all clients: how to connect, and through what."""

    transport: TransportName | Transport
    """The AMQP implementation: "native" or "uamqp". For the costs and limitations of the latter see
    `docs/transports.md`. Or a transport object: the client then uses its connection, and no other option of the
    connection but `retry` may be given. Default: "native"."""
    owns_transport: bool
    """Whether a transport object is closed with the client. False to share it between clients. Default: True."""


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
    return NativeTransport(settings)


class HubConnection(NamedTuple):
    """How a client reaches its hub.

    Attributes:
        make: Returns the transport.
        is_owned: Whether the client closes the transport.
    """

    hub: str
    fully_qualified_namespace: str
    retry: RetryOptions
    make: Callable[[], Transport]
    is_owned: bool


def split_options(
    client: type, known: type, connection_string: str | None, hub: str | None, options: Mapping[str, Any]
) -> tuple[HubConnection, dict[str, Any]]:
    """Extract the connection's options.

    Args:
        client: The class that was called.
        known: The typed dictionary of its options.
        connection_string: As it was given.
        hub: As it was given.
        options: As they were given.

    Returns:
        The connection, and the other options.

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


def takes_options(options: type, defaults: Mapping[str, Any]) -> Callable[[_Class], _Class]:
    """Return a decorator that shows every option, with type and default, in the signature of a class.

    Args:
        options: The typed dictionary of the keyword arguments.
        defaults: The defaults of all that are not of the connection, by name.
    """
    defaults = {**defaults, **(connection_settings.__kwdefaults__ or {}), "owns_transport": True}
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        for name, kind in sorted(
            get_type_hints(options).items(), key=lambda each: each[0] in ClientOptions.__annotations__
        )
    ]

    def decorate(made: _Class) -> _Class:
        # On the function and not the class: a subclass with a constructor of its own has its own signature.
        init: Any = vars(made)["__init__"]
        given = inspect.signature(init, eval_str=True)
        named = [each for each in given.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        init.__signature__ = given.replace(parameters=[*named, *keywords])
        return made

    return decorate


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    return {name: field.default for name, field in model.model_fields.items()}
