"""The connection that travels."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from eventpump.errors import ConfigurationError
from eventpump.options.base import RetryOptions
from eventpump.options.connection import ProxySettings, connection_settings
from eventpump.options.credentials import SharedKey
from eventpump.spark.connection import CONNECTION_OPTIONS, SparkConnection, SparkConnectionOptions, seconds
from tests.support.connecting import connection_string_to

_STRING = connection_string_to("ns.example.net", key="TOPSECRET=")
_OPTIONS = {"connectionString": _STRING, "hub": "telemetry"}


def make_credential() -> SharedKey:
    """Make the credential that options name."""
    return SharedKey("made", SecretStr("ALSOSECRET"))


@given(
    upper=st.lists(st.booleans(), min_size=40, max_size=40), prefix=st.sampled_from(["", "eventhubs.", "EventHubs."])
)
def test_connection_options_are_known_in_any_case_and_with_the_prefix(upper: list[bool], prefix: str) -> None:
    """However an option is spelled it sets its field, and what is no option of a connection is given back as it is."""
    given_options = {"connectionString": _STRING, "hub": "telemetry", "operationTimeout": "PT5M", "idleTimeout": "30"}
    spelled = {
        prefix + "".join(char.upper() if up else char.lower() for char, up in zip(name, upper, strict=False)): value
        for name, value in given_options.items()
    }
    connection, rest = SparkConnection.split_options({**spelled, "consumerGroup": "x"})
    assert (connection.hub, connection.operation_timeout, connection.idle_timeout) == ("telemetry", 300.0, 30.0)
    assert connection.settings().fully_qualified_namespace == "ns.example.net"
    assert rest == {"consumerGroup": "x"}


def test_connection_takes_the_hub_from_the_connection_string() -> None:
    """`EntityPath` names the hub where no option does."""
    connection, _ = SparkConnection.split_options({"connectionString": f"{_STRING};EntityPath=telemetry"})
    assert connection.hub == connection.settings().hub == "telemetry"


def test_connection_has_the_options_of_every_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WebSocket, proxy and client certificate reach the settings; files and environment where it connects."""
    file = tmp_path / "client.pem"
    given = {"transportType": "websocket", "proxy": "http://me:HIDDEN@proxy:3128", "clientCertFile": str(file)}
    options = {**_OPTIONS, **given, "clientKeyPassword": "CLOAKED"}
    connection, rest = SparkConnection.split_options(options)
    assert rest == {}
    assert "HIDDEN" not in repr(connection)
    assert "CLOAKED" not in repr(connection)
    with pytest.raises(ConfigurationError, match="client_cert_file"):
        connection.settings()
    file.touch()
    settings = pickle.loads(pickle.dumps(connection)).settings()
    assert (settings.transport_type, settings.port, settings.client_cert_file) == ("websocket", 443, file)
    assert settings.proxy is not None
    assert (settings.proxy.host, settings.proxy.password.get_secret_value()) == ("proxy", "HIDDEN")
    from_environment, _ = SparkConnection.split_options({**_OPTIONS, "trustEnv": "true"})
    assert from_environment.settings().proxy is None
    monkeypatch.setenv("HTTPS_PROXY", "http://elsewhere:3128")
    found = from_environment.settings().proxy
    assert found is not None
    assert found.host == "elsewhere"


def test_connection_is_pickled_and_hashable() -> None:
    """A copy that went through a pickle is equal, and finds what the original stored."""
    connection, _ = SparkConnection.split_options(_OPTIONS)
    copy = pickle.loads(pickle.dumps(connection))
    assert {connection: 1}[copy] == 1
    assert copy.settings() == connection.settings()


def test_repr_of_a_connection_shows_no_secret() -> None:
    """Neither its repr nor its text holds the key."""
    connection, _ = SparkConnection.split_options(_OPTIONS)
    assert "TOPSECRET" not in repr(connection) + str(connection) + repr(connection.settings())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "hub"), ({"hub": "telemetry"}, "connectionString"), ({"connectionString": _STRING}, "hub"),
        ({"connectionString": "Endpoint=TOPSECRET", "hub": "telemetry"}, "Endpoint"),
        ({"connectionString": "TOPSECRET", "hub": "telemetry"}, "connectionString"),
        ({**_OPTIONS, "transportType": "carrier pigeon"}, "transportType"),
        ({**_OPTIONS, "proxy": "gopher://proxy"}, "proxy"),
        ({**_OPTIONS, "clientKeyFile": "key.pem"}, "clientCertFile"),
        ({**_OPTIONS, "hub": "TOPSECRET!"}, "hub"),
        ({"connectionString": f"{_STRING};EntityPath=another", "hub": "telemetry"}, "hub"),
        ({**_OPTIONS, "operationTimeout": "TOPSECRET"}, "operationTimeout"),
        ({**_OPTIONS, "operationTimeout": "-1"}, "operationTimeout"),
        ({**_OPTIONS, "credential": "TOPSECRET"}, "credential"),
        ({**_OPTIONS, "EVENTHUBS.HUB": "another"}, "hub"),
        ({"fullyQualifiedNamespace": "ns.example.net", "hub": "telemetry"}, "credential"),
        ({**_OPTIONS, "customEndpointAddress": "http://localhost"}, "customEndpointAddress"),
    ],
)  # fmt: skip
def test_connection_with_a_bad_value_is_refused_by_its_option(options: dict[str, str], field: str) -> None:
    """A bad value fails before anything is sent, by the option's name, and the error does not show the value."""
    with pytest.raises(ConfigurationError) as caught:
        SparkConnection.split_options(options)
    assert caught.value.field == field
    assert "TOPSECRET" not in str(caught.value)


def test_credential_by_name_is_made_where_it_is_needed() -> None:
    """A credential given by its import name is called by what connects, and only then."""
    connection = SparkConnection(
        hub="telemetry",
        fully_qualified_namespace="ns.example.net",
        credential=f"{__name__}:make_credential",
    )
    assert connection.settings().credential == make_credential()


@pytest.mark.parametrize("name", ["no.such_module:make", f"{__name__}:missing", f"{__name__}:_STRING"])
def test_credential_by_name_that_cannot_be_made_is_named(name: str) -> None:
    """A name that cannot be imported or called is a configuration error that names it."""
    connection = SparkConnection(hub="telemetry", fully_qualified_namespace="ns.example.net", credential=name)
    with pytest.raises(ConfigurationError, match="credential: "):
        connection.settings()


def test_connection_is_shared_by_hubs_of_a_namespace() -> None:
    """Two hubs with one key share a connection, wherever their names stand; another key does not."""
    both: list[Any] = [
        SparkConnection.split_options({"connectionString": f"{_STRING};EntityPath=one"})[0],
        SparkConnection.split_options({**_OPTIONS, "hub": "two"})[0],
    ]
    other, _ = SparkConnection.split_options({"connectionString": _STRING.replace("TOP", "OTHER"), "hub": "two"})
    assert both[0].without_hub() == both[1].without_hub() != other.without_hub()


@pytest.mark.parametrize(("text", "expected"), [("60", 60.0), ("0.5", 0.5), ("PT60S", 60.0), ("PT5M", 300.0)])
def test_duration_is_seconds_or_the_connectors_form(text: str, expected: float) -> None:
    """A number is seconds; the connector's form is understood too."""
    assert seconds(text) == expected


def test_connection_options_table_agrees_with_the_model() -> None:
    """The table of options and the model agree."""
    assert set(CONNECTION_OPTIONS.values()) == set(SparkConnection.model_fields)


_RETRY = '{"maxRetries": 9, "baseDelay": 0.25, "maxDelay": 8, "mode": "fixed", "tryTimeout": 4}'


def test_connection_has_every_option_of_the_clients(tmp_path: Path) -> None:
    """Whatever a client's connection can be given, Spark's can, and it reaches the settings of the process that
    connects. The AMQP implementation is not among it: only the native one is tried with Spark."""
    of_clients = set(inspect.signature(connection_settings).parameters) - {"transport"}
    assert (
        set(SparkConnection.model_fields)
        == of_clients
        == set(SparkConnectionOptions.__annotations__)
        | {
            "connection_string",
            "hub",
        }
    )
    files = {name: tmp_path / name for name in ("ca", "cert", "key")}
    for file in files.values():
        file.touch()
    given = {
        "fullyQualifiedNamespace": "ns.example.net", "credential": f"{__name__}:make_credential", "hub": "telemetry",
        "customEndpointAddress": "edge.example.net:7443", "transportType": "websocket", "proxy": "proxy:3128",
        "trustEnv": "true", "caFile": str(files["ca"]), "clientCertFile": str(files["cert"]),
        "clientKeyFile": str(files["key"]), "clientKeyPassword": "CLOAKED", "authTimeout": "11", "sasLifetime": "PT2M",
        "operationTimeout": "12", "idleTimeout": "13", "retry": _RETRY,
    }  # fmt: skip
    assert set(given) == set(CONNECTION_OPTIONS) - {"connectionString"}
    connection, rest = SparkConnection.split_options(given)
    settings = pickle.loads(pickle.dumps(connection)).settings()
    assert rest == {}
    expected: dict[str, Any] = {
        "fully_qualified_namespace": "ns.example.net", "host": "edge.example.net", "port": 7443, "hub": "telemetry",
        "credential": make_credential(), "transport_type": "websocket", "proxy": ProxySettings.parse("proxy:3128"),
        "ca_file": files["ca"], "client_cert_file": files["cert"], "client_key_file": files["key"],
        "client_key_password": SecretStr("CLOAKED"), "auth_timeout": 11.0, "sas_lifetime": 120.0,
        "operation_timeout": 12.0, "idle_timeout": 13.0,
        "retry": RetryOptions(max_retries=9, base_delay=0.25, max_delay=8.0, mode="fixed", try_timeout=4.0),
        "use_tls": True, "transport": "native",
    }  # fmt: skip
    assert {name: getattr(settings, name) for name in type(settings).model_fields} == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ('{"maxTries": 3}', "max_tries there is no such option"),
        ('{"baseDelay": -1}', "base_delay "),
    ],
)
def test_retry_of_another_form_is_refused(text: str, says: str) -> None:
    """The error names the option, and the part of it that is wrong."""
    with pytest.raises(ConfigurationError, match=f"^retry: {says}"):
        SparkConnection.split_options({**_OPTIONS, "retry": text})
