"""The settings of a connection, from what a user gives."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from pydantic import SecretStr

from eventpump.errors import ConfigurationError
from eventpump.options.base import RetryOptions
from eventpump.options.connection import ConnectionSettings, connection_settings
from eventpump.options.credentials import SharedKey, SharedSignature
from tests.unit.options.given import EMULATOR, FULL, KEY, NS, AsyncCredential, BlockingCredential, assert_clean


def test_settings_from_a_connection_string_have_the_defaults() -> None:
    """A connection string gives TLS on the standard port, and the documented defaults."""
    made = connection_settings(FULL)
    assert made == ConnectionSettings(
        fully_qualified_namespace=NS,
        host=NS,
        port=5671,
        use_tls=True,
        ca_file=None,
        hub="telemetry",
        credential=SharedKey("Root", SecretStr(KEY)),
        auth_timeout=60.0,
        operation_timeout=60.0,
        idle_timeout=60.0,
        retry=RetryOptions(max_retries=3, base_delay=0.8, max_delay=60.0),
        transport="native",
    )


@pytest.mark.parametrize(
    ("text", "port", "use_tls"),
    [
        (EMULATOR, 5672, False),
        (EMULATOR.replace("localhost", "localhost:5673"), 5673, False),
        (EMULATOR.replace("Emulator=true", "Emulator=false"), 5671, True),
        (FULL.replace(f"{NS}/", f"{NS}:5673/"), 5673, True),
    ],
)
def test_settings_without_tls_are_those_of_the_emulator_only(text: str, port: int, *, use_tls: bool) -> None:
    """Only the emulator's flag leaves TLS off, and a port in the endpoint holds either way."""
    made = connection_settings(text, "telemetry")
    assert (made.port, made.use_tls) == (port, use_tls)


@pytest.mark.parametrize(
    ("text", "address", "port"),
    [
        (FULL, None, 443),
        (FULL, "gateway.example.com", 443),
        (FULL, "gateway.example.com:8443", 8443),
        (FULL.replace(f"{NS}/", f"{NS}:8443/"), None, 8443),
        (EMULATOR, None, 80),
        (EMULATOR.replace("localhost", "localhost:8080"), None, 8080),
    ],
)
def test_settings_of_a_websocket_have_its_ports(text: str, address: str | None, port: int) -> None:
    """A WebSocket goes to 443, or 80 without TLS, unless something names a port."""
    made = connection_settings(text, "telemetry", transport_type="websocket", custom_endpoint_address=address)
    assert (made.transport_type, made.port) == ("websocket", port)


@pytest.mark.parametrize(
    ("url", "made"),
    [
        ("http://proxy.test:3128", ("proxy.test", 3128, False, None, "")),
        ("http://proxy.test:3128/", ("proxy.test", 3128, False, None, "")),
        ("proxy.test:3128", ("proxy.test", 3128, False, None, "")),
        ("PROXY.test", ("proxy.test", 80, False, None, "")),
        ("https://proxy.test", ("proxy.test", 443, True, None, "")),
        ("http://[::1]:3128", ("::1", 3128, False, None, "")),
        ("http://me@proxy.test", ("proxy.test", 80, False, "me", "")),
        ("me:word@proxy.test:1", ("proxy.test", 1, False, "me", "word")),
        ("http://j%C3%BCrgen:p%40ss%3Aw@proxy.test", ("proxy.test", 80, False, "jürgen", "p@ss:w")),
        ("http://me:a:b@proxy.test", ("proxy.test", 80, False, "me", "a:b")),
    ],
)
def test_proxy_url_needs_only_a_host(url: str, made: tuple[str, int, bool, str | None, str]) -> None:
    """A proxy is a URL, of which all but the host may be left out; its username and password may be encoded."""
    for given_url in (url, SecretStr(url)):
        proxy = connection_settings(FULL, proxy=given_url).proxy
        assert proxy is not None
        assert (proxy.host, proxy.port, proxy.use_tls, proxy.username, proxy.password.get_secret_value()) == made


def test_repr_shows_no_password() -> None:
    """Neither the password of a proxy nor of a key is in a repr."""
    made = connection_settings(
        FULL, proxy="http://US3R:S3CRET@proxy.test", client_cert_file=__file__, client_key_password="S3CRET"
    )
    for text in (repr(made), str(made), repr(made.proxy), f"{made.model_dump()}"):
        assert "S3CRET" not in text
    assert "US3R" not in repr(made)


@pytest.mark.parametrize(
    ("https_proxy", "no_proxy", "host"),
    [
        ("http://proxy.test:3128", None, "proxy.test"),
        ("proxy.test:3128", "other.test", "proxy.test"),
        (None, None, None),
        ("", None, None),
        ("http://proxy.test:3128", "*", None),
        ("http://proxy.test:3128", NS, None),
        ("http://proxy.test:3128", "other.test, .servicebus.windows.net", None),
        ("http://proxy.test:3128", "servicebus.windows.net", None),
        ("http://proxy.test:3128", "hub.windows.net", "proxy.test"),
        ("http://proxy.test:3128", f"{NS}:5671", None),
        ("http://proxy.test:3128", f"{NS}:443", "proxy.test"),
    ],
)
@pytest.mark.parametrize("is_upper", [True, False])
def test_proxy_is_read_from_the_environment_with_trust_env(
    monkeypatch: pytest.MonkeyPatch, https_proxy: str | None, no_proxy: str | None, host: str | None, is_upper: bool
) -> None:
    """With `trust_env`, `HTTPS_PROXY` names the proxy but for what `NO_PROXY` exempts, in capitals or small letters."""
    for name, value in (("HTTPS_PROXY", https_proxy), ("NO_PROXY", no_proxy)):
        monkeypatch.delenv(name.lower(), raising=False)
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name if is_upper else name.lower(), value)
    found = connection_settings(FULL, trust_env=True).proxy
    assert (found and found.host) == host
    assert connection_settings(FULL).proxy is None
    given_proxy = connection_settings(FULL, trust_env=True, proxy="given.test").proxy
    assert given_proxy is not None
    assert given_proxy.host == "given.test"


@pytest.mark.parametrize("exempt", ["::1", "[::1]:5671"])
def test_proxy_exemption_of_an_ipv6_address(monkeypatch: pytest.MonkeyPatch, exempt: str) -> None:
    """`NO_PROXY` may hold addresses of IPv6."""
    monkeypatch.setenv("HTTPS_PROXY", "proxy.test")
    monkeypatch.setenv("NO_PROXY", exempt)
    monkeypatch.delenv("no_proxy", raising=False)
    assert connection_settings(FULL, custom_endpoint_address="[::1]", trust_env=True).proxy is None
    assert connection_settings(FULL, custom_endpoint_address="[::2]", trust_env=True).proxy is not None


def test_proxy_in_the_environment_that_is_invalid_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment that cannot be used is an error that names the variable and shows nothing of it."""
    monkeypatch.setenv("HTTPS_PROXY", "socks5://me:SECRET@proxy.test:1080")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        connection_settings(FULL, trust_env=True)
    assert_clean(caught.value, "HTTPS_PROXY")
    assert connection_settings(FULL).proxy is None


def test_settings_from_a_namespace_and_a_credential() -> None:
    """A namespace and a credential do as well as a connection string."""
    credential = AsyncCredential()
    made = connection_settings(hub="telemetry", fully_qualified_namespace=NS.upper(), credential=credential)
    assert (made.fully_qualified_namespace, made.host, made.port, made.use_tls) == (NS, NS, 5671, True)
    assert made.credential is credential


def test_settings_from_a_connection_string_and_a_credential() -> None:
    """A connection string without a key goes with a credential."""
    credential = AsyncCredential()
    made = connection_settings(f"Endpoint=sb://{NS}/;EntityPath=telemetry", credential=credential)
    assert made.credential is credential


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("gateway.example.com", "gateway.example.com", 5671),
        ("gateway.example.com:443", "gateway.example.com", 443),
        ("sb://gateway.example.com:443/", "gateway.example.com", 443),
        ("https://10.0.0.1", "10.0.0.1", 5671),
    ],
)
def test_custom_endpoint_changes_only_where_to_connect(address: str, host: str, port: int) -> None:
    """A custom endpoint changes where to connect and nothing else."""
    made = connection_settings(FULL.replace(f"{NS}/", f"{NS}:9999/"), custom_endpoint_address=address)
    assert (made.host, made.port, made.fully_qualified_namespace, made.use_tls) == (host, port, NS, True)


@pytest.mark.parametrize("hub", [None, "telemetry", "Telemetry"])
def test_hub_given_twice_may_differ_in_case(hub: str | None) -> None:
    """A hub given twice may differ in case; the argument's spelling wins."""
    assert connection_settings(FULL, hub).hub == (hub or "telemetry")


def test_ca_file_may_be_text_or_path(tmp_path: Path) -> None:
    """A file of CA certificates may be given as text or path."""
    path = tmp_path / "ca.pem"
    path.write_text("")
    assert connection_settings(FULL, ca_file=path).ca_file == path
    assert connection_settings(FULL, ca_file=str(path)).ca_file == path


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "connection_string"),
    ({"connection_string": FULL, "hub": "other"}, "hub"),
    ({"connection_string": FULL, "hub": FULL}, "hub"),
    ({"connection_string": FULL, "hub": 5}, "hub"),
    ({"connection_string": EMULATOR}, "hub"),
    ({"connection_string": EMULATOR, "hub": ""}, "hub"),
    ({"connection_string": EMULATOR, "hub": FULL}, "hub"),
    ({"connection_string": EMULATOR, "hub": 5}, "hub"),
    ({"connection_string": f"Endpoint=sb://{NS}", "hub": "telemetry"}, "SharedAccessKey"),
    ({"connection_string": FULL, "credential": AsyncCredential()}, "credential"),
    ({"connection_string": FULL, "fully_qualified_namespace": NS}, "fully_qualified_namespace"),
    ({"fully_qualified_namespace": NS, "hub": "telemetry"}, "credential"),
    ({"fully_qualified_namespace": NS, "credential": AsyncCredential()}, "hub"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": BlockingCredential()}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": AsyncCredential}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": "SECRET"}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": SharedKey("", SecretStr("SECRET"))}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": SharedKey("n", SecretStr(""))}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": SharedKey("n", SecretStr("\ud800"))}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": SharedSignature(SecretStr("SECRET"))}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": AzureNamedKeyCredential("", "SECRET")}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": AzureNamedKeyCredential("n", "")}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": AzureNamedKeyCredential}, "credential"),
    ({"fully_qualified_namespace": NS, "hub": "h", "credential": AzureSasCredential("SECRET")}, "credential"),
    ({"connection_string": FULL, "sas_lifetime": 1}, "sas_lifetime"),
    (
        {"fully_qualified_namespace": FULL, "hub": "h", "credential": AsyncCredential()},
        "fully_qualified_namespace",
    ),
    (
        {"fully_qualified_namespace": f"sb://{NS}/", "hub": "h", "credential": AsyncCredential()},
        "fully_qualified_namespace",
    ),
    ({"fully_qualified_namespace": 5, "hub": "h", "credential": AsyncCredential()}, "fully_qualified_namespace"),
    ({"connection_string": FULL, "custom_endpoint_address": FULL}, "custom_endpoint_address"),
    ({"connection_string": FULL, "custom_endpoint_address": ""}, "custom_endpoint_address"),
    ({"connection_string": FULL, "custom_endpoint_address": 5}, "custom_endpoint_address"),
    ({"connection_string": FULL, "custom_endpoint_address": "host:port"}, "custom_endpoint_address"),
    ({"connection_string": FULL, "custom_endpoint_address": "amqp://host"}, "custom_endpoint_address"),
    ({"connection_string": FULL, "custom_endpoint_address": "http://host"}, "custom_endpoint_address"),
    ({"connection_string": FULL, "ca_file": "/no/such/file"}, "ca_file"),
    ({"connection_string": EMULATOR, "hub": "h", "ca_file": __file__}, "ca_file"),
    ({"connection_string": FULL, "transport_type": "udp"}, "transport_type"),
    *(
        ({"connection_string": FULL, "proxy": url}, "proxy")
        for url in (
            "",
            5,
            "http://",
            "ftp://SECRET@proxy.test",
            "socks5://proxy.test",
            "http://proxy.test/SECRET",
            "http://proxy.test?SECRET",
            "http://pro xy.test",
            "http://me:SECRET@proxy.test:port",
            "http://me:SECRET@proxy.test:0",
            "http://me:SECRET@proxy.test:99999",
            "http://me:SECRET@-",
            "http://me:SEC%0aRET@proxy.test",
            "http://m%3Ae:SECRET@proxy.test",
            "http://me:SECRET%ff@proxy.test",
            "http://[::1",
        )
    ),
    ({"connection_string": FULL, "client_cert_file": "/no/such/file"}, "client_cert_file"),
    ({"connection_string": FULL, "client_key_file": __file__}, "client_key_file"),
    ({"connection_string": FULL, "client_key_password": "SECRET"}, "client_key_password"),
    ({"connection_string": EMULATOR, "hub": "h", "client_cert_file": __file__}, "client_cert_file"),
    ({"connection_string": FULL, "auth_timeout": 0}, "auth_timeout"),
    ({"connection_string": FULL, "operation_timeout": -1}, "operation_timeout"),
    ({"connection_string": FULL, "operation_timeout": "soon"}, "operation_timeout"),
    ({"connection_string": FULL, "idle_timeout": float("inf")}, "idle_timeout"),
    ({"connection_string": FULL, "idle_timeout": float("nan")}, "idle_timeout"),
    ({"connection_string": FULL, "idle_timeout": None}, "idle_timeout"),
    ({"connection_string": FULL, "retry": {"max_retries": -1}}, "max_retries"),
    ({"connection_string": FULL, "retry": 3}, "retry"),
    ({"connection_string": FULL, "transport": "pyamqp"}, "transport"),
    ({"connection_string": EMULATOR, "hub": "h", "transport": "uamqp"}, "transport"),
    ({"connection_string": FULL, "transport": "uamqp", "transport_type": "websocket"}, "transport"),
    ({"connection_string": FULL, "transport": "uamqp", "proxy": "http://proxy.test:3128"}, "transport"),
    ({"connection_string": FULL, "transport": "uamqp", "client_cert_file": __file__}, "transport"),
]


@pytest.mark.parametrize(("arguments", "field"), BAD)
def test_settings_with_a_bad_value_name_the_field(arguments: dict[str, Any], field: str) -> None:
    """Every bad value is one error that names the field and holds no secret."""
    with pytest.raises(ConfigurationError) as caught:
        connection_settings(**arguments)
    assert_clean(caught.value, field)


def test_custom_endpoint_at_the_emulator_may_be_without_tls() -> None:
    """With the emulator's flag, a custom endpoint may say that it is without TLS."""
    made = connection_settings(EMULATOR, "h", custom_endpoint_address="amqp://10.0.0.1")
    assert (made.host, made.port, made.use_tls) == ("10.0.0.1", 5672, False)


def test_settings_are_pickled_whole() -> None:
    """Settings reach another process whole."""
    made = connection_settings(FULL)
    assert pickle.loads(pickle.dumps(made)) == made
