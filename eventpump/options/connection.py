"""Options of connections: the address, the credential, TLS, proxy and time limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypedDict, Unpack
from urllib.parse import unquote, urlsplit

from pydantic import Field, FilePath, PlainValidator, SecretStr, ValidationInfo, field_validator

from eventpump.errors import ConfigurationError
from eventpump.interfaces import Transport
from eventpump.options.base import (
    PLAIN_SCHEMES,
    Endpoint,
    HostName,
    HubName,
    RetryOptions,
    Seconds,
    SettingsModel,
    check_host,
    check_hub,
    split_endpoint,
    unknown_option,
)
from eventpump.options.connection_string import WHOLE, ConnectionString
from eventpump.options.credentials import Credential, check_credential
from eventpump.options.described import defaults_of, show_options, with_options
from eventpump.options.environment import has_variable

AMQPS_PORT: Final = 5671
AMQP_PORT: Final = 5672
WSS_PORT: Final = 443
WS_PORT: Final = 80

TransportType: TypeAlias = Literal["tcp", "websocket"]
"""What carries AMQP: TCP, or a WebSocket (protocol.md 2.1). Over TLS, either way."""
TransportName: TypeAlias = Literal["native", "uamqp"]
"""The AMQP implementation."""

_RETRY: Final = RetryOptions()


class _NamespaceOptions(TypedDict, total=False):
    """Keyword arguments of all clients: what to connect to, if not by a connection string."""

    fully_qualified_namespace: str | None
    """The namespace's host name, such as "example.servicebus.windows.net"; None with a connection string. Default:
    None."""
    credential: Credential | None
    """A token credential of `azure.identity.aio`, an `AzureNamedKeyCredential`, an `AzureSasCredential`, a `SharedKey`
    or a `SharedSignature`; None if the connection string holds a key or a signature. Default: None."""


class NetworkOptions(TypedDict, total=False):
    """Keyword arguments of all clients, and of Spark's sink: how to reach the service."""

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


class ConnectionOptions(_NamespaceOptions, NetworkOptions, total=False):
    """Keyword arguments of all clients: how to connect."""


class ClientOptions(ConnectionOptions, total=False):
    """Keyword arguments of all clients: how to connect, and through what."""

    transport: TransportName | Transport
    """The AMQP implementation: "native" or "uamqp". For the costs and limitations of the latter see
    `docs/transports.md`. Or a transport object: the client then uses its connection, and no other option of the
    connection but `retry` may be given. Default: "native"."""
    owns_transport: bool
    """Whether a transport object is closed with the client. False to share it between clients. Default: True."""


class ProxySettings(SettingsModel):
    """An HTTP proxy that tunnels to the service (RFC 9110, 9.3.6).

    Args:
        host: The proxy's host name or address.
        port: The proxy's port.
        use_tls: Whether to connect to the proxy itself over TLS; its certificate is verified like the service's.
        username: The user name for basic authentication; None to connect without.
        password: The password for basic authentication.
    """

    host: HostName
    port: int = Field(ge=1, le=65535)
    use_tls: bool = False
    username: str | None = Field(default=None, repr=False)
    password: SecretStr = SecretStr("")

    @classmethod
    def parse(cls, url: object, *, field: str = "proxy") -> ProxySettings:
        """Parse `[http[s]://][username:password@]host[:port]`; user name and password may be percent-encoded.

        Args:
            field: The option or variable that an error names.

        Raises:
            ConfigurationError: The text is not of this form; the error does not show it.
        """
        text = url.get_secret_value() if isinstance(url, SecretStr) else url
        problem = "must be of the form http[s]://[username:password@]host[:port]"
        if not isinstance(text, str) or not text.isprintable() or " " in text:
            raise ConfigurationError(field, problem)
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
            if not host or port == 0 or parts.path.strip("/") or parts.query or parts.fragment:
                raise ValueError
            check_host(host)
            username, password = (
                None if part is None else unquote(part, errors="strict") for part in (parts.username, parts.password)
            )
            # Either would end the name, or the header (RFC 7617, 2).
            if ":" in (username or "") or not ((username or "") + (password or "")).isprintable():
                raise ValueError
        except ValueError:
            raise ConfigurationError(field, problem) from None
        if parts.scheme not in {"http", "https"}:
            raise ConfigurationError(field, "only proxies with http:// or https:// are supported")
        use_tls = parts.scheme == "https"
        return cls(
            host=host,
            port=port or (443 if use_tls else 80),
            use_tls=use_tls,
            username=username,
            password=SecretStr(password or ""),
        )

    @classmethod
    def from_environment(cls, host: str, port: int) -> ProxySettings | None:
        """Return the proxy that `HTTPS_PROXY` names, unless `NO_PROXY` exempts the service; also in lower case.

        Raises:
            ConfigurationError: The variable is not the URL of a proxy that can be used.
        """
        if not has_variable("https_proxy"):
            return None
        # An HTTP client, which most programs have no use for.
        from urllib.request import getproxies_environment, proxy_bypass

        url = getproxies_environment().get("https")
        # An IPv6 address may stand there with brackets or without.
        names = [f"[{host}]:{port}", host] if ":" in host else [f"{host}:{port}"]
        if not url or any(map(proxy_bypass, names)):
            return None
        return cls.parse(url, field="HTTPS_PROXY")


class ConnectionFields(SettingsModel):
    """Options of a connection that are the same for every user of it; see `ConnectionOptions`."""

    transport_type: TransportType = "tcp"
    auth_timeout: Seconds = 60.0
    sas_lifetime: float = Field(default=3600.0, ge=2, le=86_400)
    operation_timeout: Seconds = 60.0
    idle_timeout: Seconds = 60.0


class ConnectionSettings(ConnectionFields):
    """How to connect to one hub of one namespace. Created by `connection_settings`.

    With `use_tls`, TLS is at least 1.2, and the server's certificate is always verified, including the name `host`;
    this cannot be turned off.

    Args:
        fully_qualified_namespace: The namespace's host name, such as "example.servicebus.windows.net": the `hostname`
            of the AMQP open, and the host in audiences and stores.
        host: The host name or address to connect to: the namespace, or a custom endpoint.
        port: The port to connect to.
        use_tls: Whether to connect over TLS. False only if the connection string has `UseDevelopmentEmulator=true`.
            Default: True.
        hub: The event hub's name.
        credential: A token credential of `azure.identity.aio`, an `AzureNamedKeyCredential`, an `AzureSasCredential`, a
            `SharedKey` or a `SharedSignature`.
        proxy: The HTTP proxy to connect through; None to connect directly. Default: None.
        transport: The AMQP implementation: "native" or "uamqp". For the costs and limitations of the latter see
            `docs/transports.md`. Default: "native".
        options: See `ConnectionOptions`.
    """

    fully_qualified_namespace: HostName
    host: HostName
    port: int = Field(ge=1, le=65535)
    use_tls: bool = True
    proxy: ProxySettings | None = None
    ca_file: FilePath | None = None
    client_cert_file: FilePath | None = None
    client_key_file: FilePath | None = None
    client_key_password: SecretStr | None = None
    hub: HubName
    credential: Annotated[Credential, PlainValidator(check_credential)] = Field(repr=False)
    retry: RetryOptions = _RETRY
    transport: TransportName = "native"

    @field_validator("transport")
    @classmethod
    def _within_reach(cls, value: str, info: ValidationInfo) -> str:
        given = info.data
        if value == "uamqp":
            for problem, is_asked in (
                ("supports TLS connections only", given.get("use_tls") is False),
                ("does not support WebSockets here", given.get("transport_type") == "websocket"),
                ("does not support proxies here", given.get("proxy") is not None),
                ("does not support client certificates here", given.get("client_cert_file") is not None),
            ):
                if is_asked:
                    raise ValueError(f"uamqp {problem}; use the native transport")
        return value

    @field_validator("ca_file", "client_cert_file")
    @classmethod
    def _only_with_tls(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("use_tls") is False:
            raise ValueError("has no effect on a connection without TLS; leave it out")
        return value

    @field_validator("client_key_file", "client_key_password")
    @classmethod
    def _only_with_certificate(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("client_cert_file", value) is None:
            raise ValueError("has no effect without client_cert_file; give that too")
        return value


def connection_settings(
    connection_string: str | None = None,
    hub: str | None = None,
    *,
    transport: str = "native",
    **options: Unpack[ConnectionOptions],
) -> ConnectionSettings:
    """Return the settings for what a user gives: a connection string, or a namespace and a credential.

    Args:
        connection_string: The namespace's or the hub's connection string, as the portal shows it; None to give
            `fully_qualified_namespace` and `credential` instead. Default: None.
        hub: The event hub's name; None if the connection string has an `EntityPath`. If both are given, they must be
            equal. Default: None.
        transport: The AMQP implementation: "native" or "uamqp". For the costs and limitations of the latter see
            `docs/transports.md`. Default: "native".
        options: See `ConnectionOptions`.

    Raises:
        ConfigurationError: A value cannot work. It names the field and holds no secret.
    """
    for name in options:
        if name not in ConnectionOptions.__annotations__:
            raise unknown_option(name, ConnectionOptions.__annotations__)
    given: dict[str, Any] = {**options}
    namespace = given.pop("fully_qualified_namespace", None)
    credential = given.pop("credential", None)
    address = given.pop("custom_endpoint_address", None)
    proxy, trust_env = given.pop("proxy", None), given.pop("trust_env", False)
    use_tls = True
    port: int | None = None
    if connection_string is None:
        if namespace is None:
            raise ConfigurationError(WHOLE, "give a connection string, or fully_qualified_namespace and credential")
        if credential is None:
            raise ConfigurationError("credential", "is required along with fully_qualified_namespace")
    else:
        if namespace is not None:
            raise ConfigurationError("fully_qualified_namespace", "cannot be given along with a connection string")
        parsed = ConnectionString.parse(connection_string)
        use_tls = not parsed.use_development_emulator
        namespace, port = parsed.host, parsed.port
        if credential is None:
            credential = parsed.credential
            if credential is None:
                raise ConfigurationError("SharedAccessKey", "the connection string holds neither key nor signature")
        elif parsed.credential is not None:
            raise ConfigurationError("credential", "cannot be given along with a connection string that holds one")
        hub = _agreed_hub(hub, parsed.hub)
    if hub is None:
        raise ConfigurationError("hub", "is required, either as an argument or as EntityPath of the connection string")
    host: object = namespace
    if address is not None:
        endpoint = _custom_endpoint(address, use_tls=use_tls)
        host, port = endpoint.host, endpoint.port
    if port is None:
        plain, secure = (WS_PORT, WSS_PORT) if given.get("transport_type") == "websocket" else (AMQP_PORT, AMQPS_PORT)
        port = secure if use_tls else plain
    tunnel: ProxySettings | None = None
    if proxy is not None:
        tunnel = ProxySettings.parse(proxy)
    elif trust_env and isinstance(host, str):
        tunnel = ProxySettings.from_environment(host, port)
    return ConnectionSettings.model_validate(
        {
            **given,
            "fully_qualified_namespace": namespace,
            "host": host,
            "port": port,
            "use_tls": use_tls,
            "proxy": tunnel,
            "hub": hub,
            "credential": credential,
            "transport": transport,
        }
    )


CONNECTION_DEFAULTS: Final[Mapping[str, Any]] = {
    **defaults_of(ConnectionSettings),
    "trust_env": False,
    "owns_transport": True,
}
"""The defaults of `ClientOptions`; None for those that are not here."""

show_options(
    ConnectionSettings,
    ConnectionOptions,
    [name for name in ConnectionOptions.__annotations__ if name in CONNECTION_DEFAULTS.keys() - {"proxy", "trust_env"}],
)
with_options(connection_settings, ConnectionOptions, ConnectionOptions.__annotations__, CONNECTION_DEFAULTS)


def checked_hub(value: object) -> str:
    """Return the name of a hub. Raises `ConfigurationError` if it cannot be one."""
    try:
        if not isinstance(value, str):
            raise ValueError("must be text")
        return check_hub(value)
    except ValueError as error:
        raise ConfigurationError("hub", str(error)) from None


def _agreed_hub(given: str | None, entity_path: str | None) -> str | None:
    if given is None or entity_path is None:
        return entity_path if given is None else given
    if checked_hub(given).lower() != entity_path.lower():
        raise ConfigurationError("hub", "is not the hub that EntityPath of the connection string names")
    return given


def _custom_endpoint(value: object, *, use_tls: bool) -> Endpoint:
    field = "custom_endpoint_address"
    if not isinstance(value, str):
        raise ConfigurationError(field, "must be text")
    try:
        endpoint = split_endpoint(value)
    except ValueError as error:
        raise ConfigurationError(field, str(error)) from None
    if use_tls and endpoint.scheme in PLAIN_SCHEMES:
        raise ConfigurationError(
            field, "asks for a connection without TLS, which only UseDevelopmentEmulator=true allows"
        )
    return endpoint
