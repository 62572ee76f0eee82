"""Connection strings and settings, checked once and wholly before anything is connected.

Secrets are parsed by code of our own, kept as `SecretStr`, and appear in no repr and no error.
"""

from __future__ import annotations

import inspect
import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FilePath,
    PlainValidator,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.core.starts import OnDataLoss
from eventpump.errors import ConfigurationError
from eventpump.eventhubs import sas
from eventpump.eventhubs.events import LATEST_OFFSET, EventPosition

AMQPS_PORT: Final = 5671
AMQP_PORT: Final = 5672
WSS_PORT: Final = 443
WS_PORT: Final = 80

TransportType: TypeAlias = Literal["tcp", "websocket"]
"""What carries AMQP: TCP, or a WebSocket (wire reference 2.1). Over TLS, either way."""
TransportName: TypeAlias = Literal["native", "uamqp"]
"""The AMQP implementation."""

# ------------------------------------------------------------------------------------------------- credentials


@dataclass(frozen=True, slots=True)
class SharedKey:
    """A named key, to sign tokens with."""

    name: str
    key: SecretStr

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _secret(self.key))


@dataclass(frozen=True, slots=True)
class SharedSignature:
    """A ready-made shared access signature. It cannot be renewed: when it ends, so do the links."""

    token: SecretStr

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", _secret(self.token))

    @property
    def expires_at(self) -> int:
        """When it ends, in seconds since the Unix epoch."""
        return sas.parse(self.token.get_secret_value()).expires_at


class AccessToken(Protocol):
    """What a token credential gives, as `azure.core.credentials.AccessToken`."""

    @property
    def token(self) -> str:
        """The text."""

    @property
    def expires_on(self) -> int:
        """When it ends, in seconds since the Unix epoch."""


@runtime_checkable
class TokenCredential(Protocol):
    """Gives tokens of Entra ID, as `azure.core.credentials_async.AsyncTokenCredential`."""

    async def get_token(self, *scopes: str) -> AccessToken:
        """Get a token for the scopes."""


class NamedKey(Protocol):
    """A key and its name, as `azure.core.credentials.AzureNamedKey`."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def key(self) -> str:
        """The key's text."""


@runtime_checkable
class NamedKeyCredential(Protocol):
    """Holds a key that may be exchanged while it is in use, as `azure.core.credentials.AzureNamedKeyCredential`."""

    @property
    def named_key(self) -> NamedKey:
        """The key as it is now; every token is signed with what this says at that moment."""


@runtime_checkable
class SasCredential(Protocol):
    """Holds a signature that may be exchanged while it is in use, as `azure.core.credentials.AzureSasCredential`."""

    @property
    def signature(self) -> str:
        """The shared access signature as it is now."""


def _secret(value: object) -> SecretStr:
    """Take plain text too: a caller's slip must not end in a repr that shows it."""
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, str):
        raise ConfigurationError("credential", "a key or signature is text")
    return SecretStr(value)


def _is_unicode(text: str) -> bool:
    """Tell whether text can be encoded. Checked early: the error of `encode` would carry the text."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


Credential: TypeAlias = SharedKey | SharedSignature | NamedKeyCredential | SasCredential | TokenCredential


def current_secret(credential: Credential) -> SharedKey | SharedSignature | None:
    """Say what a credential holds at this moment; None for one that is asked for tokens.

    :raises ValueError: it is no key or signature; the text shows nothing of it.
    """
    if isinstance(credential, NamedKeyCredential):
        named = credential.named_key
        name, key = getattr(named, "name", None), getattr(named, "key", None)
        if not isinstance(name, str) or not isinstance(key, str):
            raise ValueError("its named_key must have a name and a key, which are text")
        credential = SharedKey(name, SecretStr(key))
    elif isinstance(credential, SasCredential):
        signature = credential.signature
        if not isinstance(signature, str):
            raise ValueError("its signature must be text")
        credential = SharedSignature(SecretStr(signature))
    if isinstance(credential, SharedKey):
        key = credential.key.get_secret_value()
        if not credential.name or not key or not _is_unicode(credential.name + key):
            raise ValueError("a shared key needs a name and a key, both of Unicode text")
        return credential
    if isinstance(credential, SharedSignature):
        sas.parse(credential.token.get_secret_value())
        return credential
    return None


def _check_credential(value: object) -> object:
    kinds = (SharedKey, SharedSignature, NamedKeyCredential, SasCredential)
    if not isinstance(value, type) and isinstance(value, kinds):
        current_secret(value)
        return value
    get_token = getattr(value, "get_token", None)
    if get_token is None or isinstance(value, type):
        raise ValueError(
            "must be a SharedKey, a SharedSignature, a credential of azure.core.credentials with a named key or a "
            "signature, or an object with an async get_token, as of azure.identity.aio"
        )
    if not inspect.iscoroutinefunction(get_token):
        raise ValueError("its get_token must be a coroutine function: use a credential of azure.identity.aio")
    return value


# ------------------------------------------------------------------------------------------- connection string

_ENDPOINT_KEYS: Final = {"endpoint", "hostname"}
_KEYS: Final = {
    "endpoint": "Endpoint",
    "hostname": "HostName",
    "sharedaccesskeyname": "SharedAccessKeyName",
    "sharedaccesskey": "SharedAccessKey",
    "sharedaccesssignature": "SharedAccessSignature",
    "entitypath": "EntityPath",
    "usedevelopmentemulator": "UseDevelopmentEmulator",
}
_WHOLE: Final = "connection_string"


@dataclass(frozen=True, slots=True)
class ConnectionString:
    """A connection string, taken apart.

    :param host: the namespace's host name, in lower case.
    :param port: the port the endpoint names, None where it names none.
    :param hub: what `EntityPath` names.
    :param credential: the key or the signature; None where the string has neither.
    :param use_development_emulator: connect without TLS, as the official emulator wants it.
    """

    host: str
    port: int | None
    hub: str | None
    credential: SharedKey | SharedSignature | None
    use_development_emulator: bool

    @classmethod
    def parse(cls, text: str) -> ConnectionString:
        """Take a connection string apart.

        Keys are known in any case, and unknown ones are ignored. A value may hold `=`.

        :raises ConfigurationError: it is none; the error names the key at fault and shows no value of the string.
        """
        values = _pairs(text)
        host, port = _endpoint(values)
        return cls(
            host=host,
            port=port,
            hub=_entity_path(values.get("entitypath")),
            credential=_credential(values),
            use_development_emulator=_flag(values.get("usedevelopmentemulator")),
        )


def _pairs(text: object) -> dict[str, str]:
    if not isinstance(text, str) or not _is_unicode(text):
        raise ConfigurationError(_WHOLE, "must be Unicode text")
    values: dict[str, str] = {}
    for number, pair in enumerate(text.strip().split(";"), 1):
        if not pair.strip():
            continue
        # A key in base64 ends with equals signs, so only the first one parts.
        name, separator, value = pair.partition("=")
        key, value = name.strip().lower(), value.strip()
        if not separator or not key:
            raise ConfigurationError(_WHOLE, f"its part {number} is not of the form key=value")
        if key not in _KEYS:
            continue
        if not value:
            raise ConfigurationError(_KEYS[key], "has no value in the connection string")
        if key in values:
            raise ConfigurationError(_KEYS[key], "stands in the connection string twice")
        values[key] = value
    return values


def _endpoint(values: dict[str, str]) -> tuple[str, int | None]:
    keys = [key for key in values if key in _ENDPOINT_KEYS]
    if len(keys) != 1:
        problem = (
            "stands in the connection string along with HostName" if keys else "is missing in the connection string"
        )
        raise ConfigurationError("Endpoint", problem)
    key = keys[0]
    value = values[key]
    if key == "endpoint" and "://" not in value:
        raise ConfigurationError("Endpoint", "must be of the form sb://host[:port]/")
    try:
        _scheme, host, port = _split_endpoint(value)
    except ValueError as error:
        raise ConfigurationError(_KEYS[key], str(error)) from None
    return host, port


def _credential(values: dict[str, str]) -> SharedKey | SharedSignature | None:
    name, key = values.get("sharedaccesskeyname"), values.get("sharedaccesskey")
    signature = values.get("sharedaccesssignature")
    if signature is not None:
        if name is not None or key is not None:
            raise ConfigurationError("SharedAccessSignature", "stands in the connection string along with a key")
        try:
            sas.parse(signature)
        except ValueError as error:
            raise ConfigurationError("SharedAccessSignature", str(error)) from None
        return SharedSignature(SecretStr(signature))
    if key is None and name is None:
        return None
    if key is None:
        raise ConfigurationError("SharedAccessKey", "is missing, though SharedAccessKeyName is given")
    if name is None:
        raise ConfigurationError("SharedAccessKeyName", "is missing, though SharedAccessKey is given")
    return SharedKey(name, SecretStr(key))


def _entity_path(value: str | None) -> str | None:
    try:
        return None if value is None else _check_hub(value)
    except ValueError as error:
        raise ConfigurationError("EntityPath", str(error)) from None


def _flag(value: str | None) -> bool:
    if value is not None and value.lower() not in {"true", "false"}:
        raise ConfigurationError("UseDevelopmentEmulator", "must be true or false")
    return value is not None and value.lower() == "true"


# ---------------------------------------------------------------------------------------------------- settings

# None of these checks may show the value: people paste connection strings into the wrong field.
_HUB: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./-]{0,254}[A-Za-z0-9])?")
_LABEL: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_PLAIN_SCHEMES: Final = frozenset({"amqp", "http", "ws"})


def _check_host(value: str) -> str:
    if len(value) > 253 or not all(_LABEL.fullmatch(label) for label in value.split(".")):
        try:
            ipaddress.IPv6Address(value)
        except ValueError:
            raise ValueError("must be a host name alone, such as example.servicebus.windows.net") from None
    return value.lower()


def _check_hub(value: str) -> str:
    if not _HUB.fullmatch(value):
        raise ValueError(
            "must be the name of an event hub: up to 256 letters, digits and . _ / -, a letter or digit at both ends"
        )
    return value


class _Endpoint(NamedTuple):
    scheme: str
    host: str
    port: int | None


def _split_endpoint(value: str) -> _Endpoint:
    """Split `host[:port]` or `scheme://host[:port][/]`. :raises ValueError: with a text that does not show it."""
    problem = "must be of the form host[:port] or scheme://host[:port]/"
    if not value.isprintable() or " " in value:
        # urlsplit would drop some of these without a word.
        raise ValueError(problem)
    try:
        parts = urlsplit(value if "://" in value else f"//{value}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(problem) from None
    if not host or port == 0 or parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(problem)
    try:
        return _Endpoint(parts.scheme, _check_host(host), port)
    except ValueError:
        raise ValueError(problem) from None


class SettingsModel(BaseModel):
    """The base of every settings model: frozen, closed to unknown names, and raising one `ConfigurationError`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            # `from None`: pydantic's error holds its input, which may be a secret.
            raise _configuration_error(error) from None


def _configuration_error(error: ValidationError) -> ConfigurationError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or error.title
    match first["type"]:
        case "missing":
            problem = "is required"
        case "extra_forbidden":
            problem = "there is no such option"
        case _:
            problem = first["msg"].removeprefix("Value error, ")
    return ConfigurationError(field, problem)


Seconds = Annotated[float, Field(gt=0, le=86_400)]
HostName = Annotated[str, AfterValidator(_check_host)]
HubName = Annotated[str, AfterValidator(_check_hub)]


class RetryOptions(SettingsModel):
    """How often, and after which delays, a failed operation is tried again: exponential, with full jitter.

    :param max_retries: tries after the first. While there is no connection, sends try more often, and only tries that
        are as far apart as the delays count.
    :param base_delay: seconds; the bound of the first delay, doubled with each further one.
    :param max_delay: seconds; no delay is longer. Those between attempts to connect are 5 s at most in any case.
    """

    max_retries: int = Field(default=3, ge=0, le=100)
    base_delay: Seconds = 0.8
    max_delay: Seconds = 60.0

    @field_validator("max_delay")
    @classmethod
    def _not_below_base(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("base_delay", 0.0):
            raise ValueError("must not be below base_delay")
        return value


class ProxySettings(SettingsModel):
    """An HTTP proxy that tunnels to the service (RFC 9110, 9.3.6).

    :param host: its host name or address.
    :param port: its port.
    :param use_tls: reach the proxy itself over TLS, its certificate verified as the service's is.
    :param username: for basic authentication; None for none.
    :param password: goes with it.
    """

    host: HostName
    port: int = Field(ge=1, le=65535)
    use_tls: bool = False
    username: str | None = Field(default=None, repr=False)
    password: SecretStr = SecretStr("")

    @classmethod
    def parse(cls, url: object, *, field: str = "proxy") -> ProxySettings:
        """Take `[http[s]://][username:password@]host[:port]` apart; the first two may be percent-encoded.

        :param field: what an error names.
        :raises ConfigurationError: it is none; no value of it is shown.
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
            _check_host(host)
            username, password = (
                None if part is None else unquote(part, errors="strict") for part in (parts.username, parts.password)
            )
            # Either would end the name, or the header (RFC 7617, 2).
            if ":" in (username or "") or not ((username or "") + (password or "")).isprintable():
                raise ValueError
        except ValueError:
            raise ConfigurationError(field, problem) from None
        if parts.scheme not in {"http", "https"}:
            raise ConfigurationError(field, "only proxies with http:// or https:// are known")
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
        """Give the proxy that `HTTPS_PROXY` names, unless `NO_PROXY` exempts the service; in small letters too.

        :raises ConfigurationError: it cannot be used.
        """
        url = getproxies_environment().get("https")
        # An IPv6 address may stand there with brackets or without.
        names = [f"[{host}]:{port}", host] if ":" in host else [f"{host}:{port}"]
        if not url or any(map(proxy_bypass, names)):
            return None
        return cls.parse(url, field="HTTPS_PROXY")


class ConnectionSettings(SettingsModel):
    """How to reach one hub of one namespace. Made by `connection_settings`.

    With `use_tls`, TLS is 1.2 at least, and the server's certificate is always verified, for the name `host` too;
    nothing switches that off.

    :param fully_qualified_namespace: the namespace's host name: the `hostname` of the AMQP open, and the host in
        audiences and stores.
    :param host: where to connect. Another than the namespace with a custom endpoint.
    :param port: where to connect.
    :param use_tls: False only where the connection string says `UseDevelopmentEmulator=true`.
    :param transport_type: what carries AMQP. The port is 443 for a WebSocket, where nothing else names one.
    :param proxy: the HTTP proxy to go through, in either case; None for none.
    :param ca_file: a file of CA certificates (PEM) to trust instead of the system's.
    :param client_cert_file: a certificate chain (PEM) to show to the service; its key too, unless that has a file.
    :param client_key_file: the key of that certificate (PEM).
    :param client_key_password: the key's, where it is encrypted.
    :param auth_timeout: seconds to wait for the service to take a token.
    :param sas_lifetime: seconds a token signed with a key lives; another is put after three quarters of them.
    :param operation_timeout: seconds to wait for a connection, an attach, or the answer to a request or send.
    :param idle_timeout: seconds of silence after which the peer is dead; half of it is advertised, or a second where
        that is more. A service may refuse less than a second, as the emulator does.
    :param transport: the AMQP implementation; `docs/transports.md` tells what "uamqp" costs and cannot do.
    """

    fully_qualified_namespace: HostName
    host: HostName
    port: int = Field(ge=1, le=65535)
    use_tls: bool = True
    transport_type: TransportType = "tcp"
    proxy: ProxySettings | None = None
    ca_file: FilePath | None = None
    client_cert_file: FilePath | None = None
    client_key_file: FilePath | None = None
    client_key_password: SecretStr | None = None
    hub: HubName
    credential: Annotated[Credential, PlainValidator(_check_credential)] = Field(repr=False)
    auth_timeout: Seconds = 60.0
    sas_lifetime: float = Field(default=3600.0, ge=2, le=86_400)
    operation_timeout: Seconds = 60.0
    idle_timeout: Seconds = 60.0
    retry: RetryOptions = RetryOptions()
    transport: TransportName = "native"

    @field_validator("transport")
    @classmethod
    def _within_reach(cls, value: str, info: ValidationInfo) -> str:
        given = info.data
        if value == "uamqp":
            for problem, is_asked in (
                ("speaks TLS only", given.get("use_tls") is False),
                ("is not carried by a WebSocket here", given.get("transport_type") == "websocket"),
                ("is not led through a proxy here", given.get("proxy") is not None),
                ("cannot show a client certificate", given.get("client_cert_file") is not None),
            ):
                if is_asked:
                    raise ValueError(f"uamqp {problem}; use the native transport")
        return value

    @field_validator("ca_file", "client_cert_file")
    @classmethod
    def _only_with_tls(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("use_tls") is False:
            raise ValueError("has no use on a connection without TLS")
        return value

    @field_validator("client_key_file", "client_key_password")
    @classmethod
    def _only_with_certificate(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("client_cert_file", value) is None:
            raise ValueError("has no use without client_cert_file")
        return value


def connection_settings(
    connection_string: str | None = None,
    hub: str | None = None,
    *,
    fully_qualified_namespace: str | None = None,
    credential: Credential | None = None,
    custom_endpoint_address: str | None = None,
    transport_type: TransportType = "tcp",
    proxy: str | SecretStr | None = None,
    trust_env: bool = False,
    ca_file: str | Path | None = None,
    client_cert_file: str | Path | None = None,
    client_key_file: str | Path | None = None,
    client_key_password: str | SecretStr | None = None,
    auth_timeout: float = 60.0,
    sas_lifetime: float = 3600.0,
    operation_timeout: float = 60.0,
    idle_timeout: float = 60.0,
    retry: RetryOptions | None = None,
    transport: str = "native",
) -> ConnectionSettings:
    """Make the settings out of what a user gives: a connection string, or a namespace and a credential.

    :param hub: the hub; may be left out where the connection string has an `EntityPath`, and must agree with it.
    :param credential: for a namespace, or for a connection string that holds neither key nor signature.
    :param custom_endpoint_address: `host[:port]` or a URL; where to connect in place of the namespace.
    :param proxy: `http[s]://[username:password@]host[:port]`, the first two percent-encoded where they need be.
    :param trust_env: without `proxy`, use the one that `HTTPS_PROXY` names, but for hosts in `NO_PROXY`.
    :raises ConfigurationError: a value cannot work; it names the field and holds no secret.
    """
    use_tls = True
    port: int | None = None
    namespace: object = fully_qualified_namespace
    if connection_string is None:
        if fully_qualified_namespace is None:
            raise ConfigurationError(_WHOLE, "give this, or fully_qualified_namespace and credential")
        if credential is None:
            raise ConfigurationError("credential", "is required along with fully_qualified_namespace")
    else:
        if fully_qualified_namespace is not None:
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
        raise ConfigurationError("hub", "is required, here or as EntityPath of the connection string")
    host: object = namespace
    if custom_endpoint_address is not None:
        endpoint = _custom_endpoint(custom_endpoint_address, use_tls=use_tls)
        host, port = endpoint.host, endpoint.port
    if port is None:
        plain, secure = (WS_PORT, WSS_PORT) if transport_type == "websocket" else (AMQP_PORT, AMQPS_PORT)
        port = secure if use_tls else plain
    way: ProxySettings | None = None
    if proxy is not None:
        way = ProxySettings.parse(proxy)
    elif trust_env and isinstance(host, str):
        way = ProxySettings.from_environment(host, port)
    return ConnectionSettings.model_validate(
        {
            "fully_qualified_namespace": namespace,
            "host": host,
            "port": port,
            "use_tls": use_tls,
            "transport_type": transport_type,
            "proxy": way,
            "ca_file": ca_file,
            "client_cert_file": client_cert_file,
            "client_key_file": client_key_file,
            "client_key_password": client_key_password,
            "hub": hub,
            "credential": credential,
            "auth_timeout": auth_timeout,
            "sas_lifetime": sas_lifetime,
            "operation_timeout": operation_timeout,
            "idle_timeout": idle_timeout,
            "retry": RetryOptions() if retry is None else retry,
            "transport": transport,
        }
    )


def _agreed_hub(given: str | None, entity_path: str | None) -> str | None:
    if given is None or entity_path is None:
        return entity_path if given is None else given
    try:
        if not isinstance(given, str):
            raise ValueError("must be text")
        _check_hub(given)
    except ValueError as error:
        raise ConfigurationError("hub", str(error)) from None
    if given.lower() != entity_path.lower():
        raise ConfigurationError("hub", "is not the hub that EntityPath of the connection string names")
    return given


def _custom_endpoint(value: object, *, use_tls: bool) -> _Endpoint:
    field = "custom_endpoint_address"
    if not isinstance(value, str):
        raise ConfigurationError(field, "must be text")
    try:
        endpoint = _split_endpoint(value)
    except ValueError as error:
        raise ConfigurationError(field, str(error)) from None
    if use_tls and endpoint.scheme in _PLAIN_SCHEMES:
        raise ConfigurationError(
            field, "asks for a connection without TLS, which only UseDevelopmentEmulator=true allows"
        )
    return endpoint


# ------------------------------------------------------------------------------------------------------- consuming

StartPosition: TypeAlias = str | int | datetime | EventPosition
"""A place to begin at: an offset ("-1" the start, "@latest" the end), a sequence number, a time, or a position."""


def start_position(value: object) -> EventPosition:
    """Make a position of what a user gives for one. :raises ValueError: it is none."""
    match value:
        case EventPosition():
            return value
        case str():
            return EventPosition.at_offset(value)
        case bool():
            pass
        case int():
            return EventPosition.at_sequence_number(value)
        case datetime():
            return EventPosition.at_enqueued_time(value)
    raise ValueError("must be an offset, a sequence number, a datetime with a time zone, or an EventPosition")


def _host_start(value: object) -> EventPosition:
    position = start_position(value)
    if position.offset == LATEST_OFFSET and position.inclusive:
        # No checkpoint can say so, and a host pins its start by one.
        raise ValueError('"@latest" cannot be inclusive here')
    return position


def _check_initial_position(value: object) -> Mapping[str, EventPosition] | EventPosition:
    if not isinstance(value, Mapping):
        return _host_start(value)
    positions: dict[str, EventPosition] = {}
    for partition_id, position in value.items():
        if not isinstance(partition_id, str):
            raise ValueError("its keys must be partition ids, which are text")
        positions[partition_id] = _host_start(position)
    return positions


def _check_end(value: object) -> EventPosition | None:
    if value is None:
        return None
    position = start_position(value)
    if position.offset not in {None, "@latest"}:
        raise ValueError('an offset has no order: only "@latest" can be an end')
    return position if isinstance(value, EventPosition) else replace(position, inclusive=True)


def _check_name(value: str) -> str:
    if not value or not value.isprintable() or not _is_unicode(value):
        raise ValueError("must be printable text, and not empty")
    return value


Name = Annotated[str, Field(max_length=256), AfterValidator(_check_name)]


class FeedSettings(SettingsModel):
    """How a partition's events are read ahead.

    :param cache_events: events received and not delivered yet, per partition.
    :param cache_bytes: the same in bytes. Credit is granted by estimated sizes, so what is on its way when larger
        messages than before arrive comes on top; the batch in the handler's hands does too.
    :param strict_bytes: grant credit by the link's maximum message size, so that `cache_bytes` holds exactly.
    :param track_last_enqueued: have every event tell of the partition's newest one; lag is known only with it, or
        where a silent partition was looked at.
    :param reopen_delay: seconds; the bound of the first delay before a failed link is opened again, doubled each time.
        After a lost connection it is not doubled: only attempts to connect are spaced then, by 5 s at most.
    :param reopen_delay_max: seconds; no delay is longer.
    :param startup_timeout: seconds to go on trying to reach the service, and a host's store, at the start; what was
        reached once is tried for ever.
    """

    hub: HubName
    consumer_group: Name = "$Default"
    cache_events: int = Field(default=3000, ge=1, le=1_000_000)
    cache_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    strict_bytes: bool = False
    track_last_enqueued: bool = False
    max_message_size: int = Field(default=20 * 1024 * 1024, ge=1024)
    reopen_delay: Seconds = 0.2
    reopen_delay_max: Seconds = Field(default=30.0, validate_default=True)
    startup_timeout: Seconds = 60.0

    @field_validator("reopen_delay_max")
    @classmethod
    def _reopen_not_below(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("reopen_delay", 0.0):
            raise ValueError("must not be below reopen_delay")
        return value


class ReaderSettings(FeedSettings):
    """What a reader reads.

    :param position: where it begins.
    :param end: where it ends, itself only included where it says so: a sequence number, an enqueued time, or
        "@latest" for the newest event at the start. None for never. Text and numbers given here include themselves.
    :param owner_level: the epoch of an exclusive reader; None shares the partition.
    :param receiver_name: shown by the service in the texts of other readers' errors.
    :param on_data_loss: what follows where events that were to be read are gone: "earliest" and "latest" log a warning
        and go on at the oldest event kept or at the partition's end; "fail" raises `DataLossError`. None is "earliest"
        where retention has dropped them, and "fail" where the hub was made again while the reader read it.
    """

    partition_id: Name
    position: Annotated[EventPosition, PlainValidator(start_position)] = EventPosition.earliest()
    end: Annotated[EventPosition | None, PlainValidator(_check_end)] = None
    owner_level: int | None = Field(default=None, ge=0, lt=2**63)
    receiver_name: Name | None = None
    on_data_loss: OnDataLoss | None = None


class HostSettings(FeedSettings):
    """How a host processes a hub.

    :param checkpoint_policy: when checkpoints are written unasked; by default never.
    :param initial_position: where a partition without a checkpoint begins; a mapping gives it per partition id, and
        what it lacks begins at the start of the stream. The first host of a consumer group records it with the leases,
        and what is recorded counts for every later one. "@latest" is the end of the partition when it is first opened.
        A partition that is added to the hub later begins at its beginning in any case.
    :param host_name: the owner's name in leases; None for one made of machine, process and chance.
    :param max_batch_size: the most events `process_events` gets at once.
    :param max_wait_time: seconds without an event after which the partition's link is checked, and again while there is
        none (1 at the least): is it alive, and is the hub ahead of it? Silent for so long, its lag is not known.
    :param call_when_idle: call `process_events` with no event at that moment.
    :param renew_interval: seconds between renewals; None for a third of the lease duration.
    :param close_timeout: seconds a partition's end may take before it is reported.
    :param loss_grace: seconds a handler may go on after ownership was lost, within three quarters of `close_timeout`.
    :param failure_policy: what follows when the processor raises: "retry" the same events, or "stop" the host.
    :param retry_delay: seconds; the bound of the first delay before a failed batch is tried again, doubled each time.
    :param retry_delay_max: seconds; no delay is longer.
    :param on_data_loss: what follows where events after a checkpoint are gone: go on at the oldest event kept
        ("earliest") or at the partition's end ("latest"), or "fail": the partition is left with a `DataLossError` and
        tried again, while the others go on. None is "earliest" where retention has dropped them, and "fail" where the
        hub was deleted and made again, or the checkpoint lies beyond the partition's end. Reported in any case.
    :param handler_timeout: seconds after which a method of the processor that has not returned is reported, and again
        each time that doubles.
    :param on_handler_timeout: what follows beside: "report" for nothing, or "cancel" it, which counts as raising
        `TimeoutError`, under the failure policy. A method that blocks the event loop can be neither reported nor
        cancelled before it returns.
    """

    checkpoint_policy: CheckpointPolicy = CheckpointPolicy.manual()
    initial_position: Annotated[Any, PlainValidator(_check_initial_position)] = EventPosition.earliest()
    host_name: Name | None = None
    max_batch_size: int = Field(default=300, ge=1, le=100_000)
    max_wait_time: Seconds = 30.0
    call_when_idle: bool = False
    renew_interval: Seconds | None = None
    close_timeout: Seconds = 20.0
    loss_grace: float = Field(default=5.0, ge=0, le=86_400)
    failure_policy: Literal["retry", "stop"] = "retry"
    retry_delay: Seconds = 0.5
    retry_delay_max: Seconds = Field(default=30.0, validate_default=True)
    on_data_loss: OnDataLoss | None = None
    handler_timeout: Seconds = 60.0
    on_handler_timeout: Literal["report", "cancel"] = "report"

    @field_validator("retry_delay_max")
    @classmethod
    def _retry_not_below(cls, value: float, info: ValidationInfo) -> float:
        if value < info.data.get("retry_delay", 0.0):
            raise ValueError("must not be below retry_delay")
        return value

    def positions_without_partition(self, partition_ids: Collection[str]) -> list[str]:
        """Give the partitions that `initial_position` names and the hub does not have."""
        configured = self.initial_position
        return [] if isinstance(configured, EventPosition) else sorted(set(configured) - set(partition_ids))


class BufferSettings(SettingsModel):
    """How a buffered producer fills its batches, and how much it holds.

    :param max_batch_events: a batch with so many is sent at once.
    :param max_batch_bytes: and so is one of so many bytes. A larger event goes alone; what the service takes in one
        message may be less, and a batch is then sent in parts.
    :param max_wait: seconds the first event of a batch waits for others.
    :param max_events: events taken in whose outcome is open, of all partitions together.
    :param max_bytes: the same in bytes.
    :param max_partition_events: the same per partition; None for no bound but the one of all.
    :param max_partition_bytes: the same per partition, in bytes.
    :param max_in_flight: batches on their way to one partition at a time. With more than 1 a retry may reorder events,
        those of one key too; an idempotent producer has 1.
    """

    max_batch_events: int = Field(default=5000, ge=1, le=1_000_000)
    max_batch_bytes: int = Field(default=256 * 1024, ge=1)
    max_wait: float = Field(default=0.005, ge=0, le=86_400)
    max_events: int = Field(default=100_000, ge=1)
    max_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    max_partition_events: int | None = Field(default=None, ge=1)
    max_partition_bytes: int | None = Field(default=None, ge=1)
    max_in_flight: int = Field(default=1, ge=1, le=1000)
