"""The hub and credentials of a Spark query: a picklable value that the driver sends to its executors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, SecretStr, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from eventpump.core.backoff import UNLIMITED, RetryPolicy
from eventpump.errors import ConfigurationError
from eventpump.options.base import HubName, RetryOptions, Seconds, SettingsModel, completed_by
from eventpump.options.callables import call_by_import_name, check_import_name
from eventpump.options.connection import ConnectionFields, ConnectionSettings, NetworkOptions, connection_settings
from eventpump.options.connection_string import ConnectionString
from eventpump.options.credentials import SharedKey
from eventpump.spark.kafka_names import refuse_kafka_names

CONNECTOR_PREFIX: Final = "eventhubs."
"""The prefix of the options of Microsoft's Scala connector; ours are accepted with it too."""

RETRY_TIMEOUT: Final = 120.0
"""Seconds for which an outage of the service is waited for by default, as long as Kafka's producer tries to deliver
(`delivery.timeout.ms`)."""

_ANY_KEY: Final = SharedKey("name", SecretStr("key"))
_TIMEDELTA: Final = TypeAdapter(timedelta)


def seconds(text: str) -> float:
    """Parse a duration: a number of seconds, or ISO 8601, as the connector writes it."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return _TIMEDELTA.validate_python(text).total_seconds()
    except ValidationError:
        raise ValueError('must be a number of seconds, or an ISO 8601 duration such as "PT60S"') from None


def _duration(value: object) -> object:
    return seconds(value) if isinstance(value, str) else value


def _path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_File = Annotated[str | None, BeforeValidator(_path)]

Duration = Annotated[Seconds, BeforeValidator(_duration)]
"""Seconds, in a Spark option also as ISO 8601."""

_PATIENT: Final = RetryOptions(max_retries=None, base_delay=UNLIMITED.base_delay, max_delay=UNLIMITED.max_delay)
_RETRY: Final = 'must be a JSON object, such as {"baseDelay": 0.5, "maxDelay": 10}'


def _retry(value: object) -> object:
    """Parse `RetryOptions` from JSON; its names are in camel case there, as those of all options of Spark."""
    if not isinstance(value, str):
        return value
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(_RETRY) from None
    if not isinstance(fields, dict):
        raise ValueError(_RETRY)
    return {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name): each for name, each in fields.items()}


def option_names(model: type[SettingsModel]) -> Mapping[str, str]:
    """Return the Spark options of a model's fields, in camel case, and the fields that they set."""
    return MappingProxyType({to_camel(field): field for field in model.model_fields if field != "connection"})


def split_fields(options: Mapping[str, str], known: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split Spark's options into those of a model and the others.

    Names are not case-sensitive, and may have the connector's prefix.

    Returns:
        The values of the model's fields, and the other options unchanged.

    Raises:
        ConfigurationError: An option is given twice, with different values.
    """
    by_lower = {option.lower(): option for option in known}
    values: dict[str, Any] = {}
    rest: dict[str, str] = {}
    for name, value in options.items():
        option = by_lower.get(name.lower().removeprefix(CONNECTOR_PREFIX))
        if option is None:
            rest[name] = value
        elif values.setdefault(known[option], value) != value:
            raise ConfigurationError(option, "is given twice, with different values")
    return values, rest


def in_camel_case(error: ConfigurationError, known: Mapping[str, str]) -> ConfigurationError:
    """Return the error about a model's field as one about the option that sets it."""
    field = error.field.split(".", 1)[0]
    option = next((option for option, each in known.items() if each == field), error.field)
    return ConfigurationError(option, error.problem)


class SparkConnectionOptions(NetworkOptions, total=False):
    """Keyword arguments for the connection; see :class:`SparkConnection`."""

    fully_qualified_namespace: str
    credential: str


class SparkConnection(ConnectionFields):
    """How to reach one hub, as plain values: hashable, picklable, and without secrets in its repr.

    It holds the user's values; `settings` creates the connection settings from them. The secrets are only in its
    pickle, which Spark sends to executors.

    Args:
        hub: The hub's name; by default the `EntityPath` of the connection string.
        connection_string: As shown in the Azure portal; None to give the namespace and `credential`.
        fully_qualified_namespace: The namespace's host name, instead of a connection string. Default: None.
        credential: Together with the namespace: "module:callable", called without arguments in every process that
            connects; it returns a `SharedKey`, a `SharedSignature`, or a credential of azure.identity.aio. Default:
            None.
        custom_endpoint_address: Where to connect; None for the namespace.
        transport_type: "tcp", or "websocket"; this and what is not listed here is as in
            :class:`eventpump.options.connection.ConnectionSettings`. Default: "tcp".
        proxy: The HTTP proxy to connect through, as `http[s]://[username:password@]host[:port]`. Default: None.
        trust_env: Whether to use the proxy that `HTTPS_PROXY` names where a process connects, if `proxy` is not given.
            Default: False.
        ca_file: A file of CA certificates (PEM); this and the client's files at the same path on every machine.
            Default: None.
        auth_timeout: Seconds to wait until the service has accepted a token. Default: 60.0.
        retry: The delays between attempts of requests and sends, and before a task opens a failed link again; and how
            many attempts there are within the `retry_timeout` of source or sink. What is not given of it is: no limit
            of attempts, delays from 0.2 to 5 s. In a Spark option a JSON object such as
            `{"baseDelay": 0.5, "maxDelay": 10}`. None for just that in the source's requests, delays up to 30 s for its
            links, the default of `RetryOptions` in the sink that publishes exactly once, and in the others as many
            sends as fit in `retry_timeout`, at most 5 s apart.
    """

    hub: HubName
    connection_string: SecretStr | None = None
    fully_qualified_namespace: str | None = None
    credential: str | None = None
    custom_endpoint_address: str | None = None
    proxy: SecretStr | None = None
    trust_env: bool = False
    ca_file: _File = None
    client_cert_file: _File = None
    client_key_file: _File = None
    client_key_password: SecretStr | None = None
    retry: Annotated[RetryOptions | None, completed_by(_PATIENT), BeforeValidator(_retry)] = None

    _in_iso_8601 = field_validator("auth_timeout", "operation_timeout", "sas_lifetime", "idle_timeout", mode="before")(
        _duration
    )

    @model_validator(mode="before")
    @classmethod
    def _hub_of_the_string(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("hub") is None and data.get("connection_string") is not None:
            text = data["connection_string"]
            text = text.get_secret_value() if isinstance(text, SecretStr) else text
            hub = ConnectionString.parse(text).hub
            if hub is None:
                raise ConfigurationError("hub", "is required, here or as EntityPath of the connection string")
            return {**data, "hub": hub}
        return data

    @field_validator("credential")
    @classmethod
    def _names_a_callable(cls, value: str | None) -> str | None:
        if value is not None:
            check_import_name(value)
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> SparkConnection:
        if self.connection_string is None and self.fully_qualified_namespace is None:
            raise ConfigurationError("connectionString", "is required, or fullyQualifiedNamespace and credential")
        # The credential's callable is called, and files and environment are read, in the process that connects.
        if self.client_cert_file is None and (self.client_key_file, self.client_key_password) != (None, None):
            raise ConfigurationError("client_cert_file", "is required along with client_key_file and its password")
        self._checked()
        return self

    def _checked(self) -> ConnectionSettings:
        return self._settings(None if self.credential is None else _ANY_KEY)

    @property
    def address(self) -> tuple[str, int]:
        """The namespace's host name, and the port to connect to. The credential's callable is not called for them."""
        settings = self._checked()
        return settings.fully_qualified_namespace, settings.port

    @classmethod
    def split_options(cls, options: Mapping[str, str]) -> tuple[SparkConnection, dict[str, str]]:
        """Split Spark's options into those of the connection and the others, as `split_fields` does.

        Returns:
            The connection, and the other options unchanged.

        Raises:
            ConfigurationError: A value is invalid, an option is given twice, or has a name of Kafka's; the error names
                the option and shows no secret.
        """
        refuse_kafka_names(options)
        values, rest = split_fields(options, CONNECTION_OPTIONS)
        try:
            return cls(**values), rest
        except ConfigurationError as error:
            raise in_camel_case(error, CONNECTION_OPTIONS) from None

    @property
    def patience(self) -> RetryPolicy:
        """How requests of the source are repeated, within its `retryTimeout`; and its links, if it is given."""
        return self.retry or UNLIMITED

    def settings(self) -> ConnectionSettings:
        """Return the connection settings. Imports and calls the credential's callable, if there is one.

        Raises:
            ConfigurationError: A value is invalid.
        """
        credential = None if self.credential is None else call_by_import_name("credential", self.credential)
        names = ("ca_file", "client_cert_file", "client_key_file")
        files = {name: Path(given) for name in names if (given := getattr(self, name)) is not None}
        return self._settings(
            credential, trust_env=self.trust_env, client_key_password=self.client_key_password, **files
        )

    def _settings(self, credential: Any, **local: Any) -> ConnectionSettings:
        text = self.connection_string
        return connection_settings(
            None if text is None else text.get_secret_value(),
            self.hub,
            fully_qualified_namespace=self.fully_qualified_namespace,
            credential=credential,
            custom_endpoint_address=self.custom_endpoint_address,
            proxy=self.proxy,
            retry=self.retry or RetryOptions(),
            **{name: getattr(self, name) for name in ConnectionFields.model_fields},
            **local,
        )

    def without_hub(self) -> SparkConnection:
        """Return what two hubs of one namespace have in common: connections that are equal in it share an authorized
        connection."""
        text = self.connection_string
        if text is not None:
            pairs = (pair for pair in text.get_secret_value().split(";") if not _is_entity_path(pair))
            text = SecretStr(";".join(pairs))
        return self.model_copy(update={"hub": "", "connection_string": text})


def _is_entity_path(pair: str) -> bool:
    return pair.partition("=")[0].strip().lower() == "entitypath"


CONNECTION_OPTIONS: Final = option_names(SparkConnection)
"""The Spark options of a connection, not case-sensitive, and the fields they set."""
