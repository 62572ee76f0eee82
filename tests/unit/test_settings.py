from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from eventpump.errors import ConfigurationError
from eventpump.eventhubs import sas
from eventpump.options.base import RetryOptions
from eventpump.options.connection import ConnectionSettings, connection_settings
from eventpump.options.connection_string import ConnectionString
from eventpump.options.consumer import HostSettings
from eventpump.options.credentials import SharedKey, SharedSignature

KEY = "c2VjcmV0LWtleQ=="
NS = "example.servicebus.windows.net"
FULL = f"Endpoint=sb://{NS}/;SharedAccessKeyName=Root;SharedAccessKey={KEY};EntityPath=telemetry"
EMULATOR = (
    "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=SAS_KEY_VALUE;"
    "UseDevelopmentEmulator=true;"
)
SIGNATURE = sas.generate(f"sb://{NS}/telemetry", "Root", KEY, 1_900_000_000)


class Token(NamedTuple):
    token: str
    expires_on: int


class AsyncCredential:
    async def get_token(self, *scopes: str) -> Token:
        return Token(" ".join(scopes), 0)


class BlockingCredential:
    def get_token(self, *scopes: str) -> Token:
        return Token(" ".join(scopes), 0)


# ------------------------------------------------------------------------------------------- connection string


def test_connection_string_with_every_key_is_read() -> None:
    """Every key is read, and a value keeps its equals signs."""
    assert ConnectionString.parse(FULL) == ConnectionString(
        host=NS,
        port=None,
        hub="telemetry",
        credential=SharedKey("Root", SecretStr(KEY)),
        use_development_emulator=False,
    )


def test_connection_string_of_the_emulator_is_read() -> None:
    """The official emulator's string is read."""
    parsed = ConnectionString.parse(EMULATOR)
    assert (parsed.host, parsed.port, parsed.use_development_emulator) == ("localhost", None, True)
    assert parsed.credential == SharedKey("RootManageSharedAccessKey", SecretStr("SAS_KEY_VALUE"))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + ";",
        lambda text: text + ";;",
        lambda text: f"  {text}\n",
        lambda text: text.replace(";", " ; "),
        lambda text: text.replace("Endpoint", "ENDPOINT").replace("EntityPath", "entitypath"),
        lambda text: text.replace("SharedAccessKey", "sharedaccesskey"),
        lambda text: text + ";TransportType=Amqp;Unknown=;unknown=",
        lambda text: ";".join(reversed(text.split(";"))),
        lambda text: text.replace("sb://", "amqps://"),
        lambda text: text.replace(NS, NS.upper()),
        lambda text: text.replace("/;", ";"),
        lambda text: text.replace("Endpoint=sb://", "HostName=").replace("/;", ";"),
        lambda text: text + ";UseDevelopmentEmulator=false",
    ],
)
def test_connection_string_in_any_order_and_case_is_the_same(change: Any) -> None:
    """Order, case of keys, a trailing semicolon, white space and unknown keys change nothing."""
    assert ConnectionString.parse(change(FULL)) == ConnectionString.parse(FULL)


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("sb://localhost:5673", "localhost", 5673),
        ("sb://localhost:5673/", "localhost", 5673),
        ("sb://127.0.0.1:1", "127.0.0.1", 1),
        ("sb://[::1]:5672", "::1", 5672),
        ("sb://host.docker.internal", "host.docker.internal", None),
        ("sb://eventhubs_emulator:5672", "eventhubs_emulator", 5672),
    ],
)
def test_connection_string_endpoint_may_be_name_or_address(endpoint: str, host: str, port: int | None) -> None:
    """An endpoint may be a name or an address, with or without a port."""
    parsed = ConnectionString.parse(f"Endpoint={endpoint};UseDevelopmentEmulator=TRUE")
    assert (parsed.host, parsed.port) == (host, port)
    assert parsed.use_development_emulator


def test_connection_string_with_a_signature_has_its_expiry() -> None:
    """A ready-made signature stands in place of a key, and tells when it ends."""
    parsed = ConnectionString.parse(f"Endpoint=sb://{NS}/;SharedAccessSignature={SIGNATURE};EntityPath=telemetry")
    assert parsed.credential == SharedSignature(SecretStr(SIGNATURE))
    assert isinstance(parsed.credential, SharedSignature)
    assert parsed.credential.expires_at == 1_900_000_000


def test_connection_string_without_a_credential_is_read() -> None:
    """A string with neither key nor signature is one; the credential may come from elsewhere."""
    assert ConnectionString.parse(f"Endpoint=sb://{NS}/").credential is None


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "Endpoint"),
        (None, "connection_string"),
        (b"Endpoint=sb://x", "connection_string"),
        (f"{FULL}\ud800", "connection_string"),
        (KEY, "Endpoint"),
        ("SECRET", "connection_string"),
        (f"Endpoint=sb://{NS};SECRET", "connection_string"),
        (f"Endpoint=sb://{NS};=SECRET", "connection_string"),
        (f"SharedAccessKeyName=Root;SharedAccessKey={KEY}", "Endpoint"),
        ("Endpoint=", "Endpoint"),
        (f"Endpoint={NS}", "Endpoint"),
        ("Endpoint=sb://", "Endpoint"),
        (f"Endpoint=sb://{NS}:0", "Endpoint"),
        (f"Endpoint=sb://{NS}:99999", "Endpoint"),
        (f"Endpoint=sb://{NS}:SECRET", "Endpoint"),
        (f"Endpoint=sb://{NS}/telemetry", "Endpoint"),
        (f"Endpoint=sb://user:SECRET@{NS}", "Endpoint"),
        (f"Endpoint=sb://{NS}?SECRET", "Endpoint"),
        ("Endpoint=sb://na me", "Endpoint"),
        ("Endpoint=sb://na\tme", "Endpoint"),
        ("Endpoint=sb://[::1", "Endpoint"),
        ("Endpoint=sb://-a", "Endpoint"),
        ("Endpoint=sb://a..b", "Endpoint"),
        ("Endpoint=sb://" + "a." * 200 + "b", "Endpoint"),
        (f"Endpoint=sb://{NS};HostName={NS}", "Endpoint"),
        (f"Endpoint=sb://{NS};Endpoint=sb://{NS}", "Endpoint"),
        (f"Endpoint=sb://{NS};SharedAccessKeyName=Root", "SharedAccessKey"),
        (f"Endpoint=sb://{NS};SharedAccessKey=SECRET", "SharedAccessKeyName"),
        (f"Endpoint=sb://{NS};SharedAccessKeyName=;SharedAccessKey=SECRET", "SharedAccessKeyName"),
        (f"Endpoint=sb://{NS};SharedAccessKeyName=Root;SharedAccessKey=", "SharedAccessKey"),
        (
            f"Endpoint=sb://{NS};SharedAccessKeyName=Root;SharedAccessKey=SECRET;SharedAccessKey=SECRET",
            "SharedAccessKey",
        ),
        (f"{FULL};SharedAccessSignature={SIGNATURE}", "SharedAccessSignature"),
        (f"Endpoint=sb://{NS};SharedAccessSignature=SECRET", "SharedAccessSignature"),
        (f"Endpoint=sb://{NS};SharedAccessSignature=SharedAccessSignature sr=a&sig=SECRET", "SharedAccessSignature"),
        (f"Endpoint=sb://{NS};EntityPath=", "EntityPath"),
        (f"Endpoint=sb://{NS};EntityPath=a b", "EntityPath"),
        (f"Endpoint=sb://{NS};EntityPath=" + "a" * 257, "EntityPath"),
        (f"Endpoint=sb://{NS};UseDevelopmentEmulator=yes", "UseDevelopmentEmulator"),
        (f"Endpoint=sb://{NS};UseDevelopmentEmulator=", "UseDevelopmentEmulator"),
    ],
)
def test_connection_string_of_another_form_names_the_key_at_fault(text: Any, field: str) -> None:
    """A bad string is one error that names the key at fault and shows no value."""
    with pytest.raises(ConfigurationError) as caught:
        ConnectionString.parse(text)
    assert_clean(caught.value, field)


def assert_clean(error: ConfigurationError, field: str) -> None:
    """Check that an error names its field, and neither shows nor drags along what may be secret."""
    assert error.field == field
    assert not any(secret in str(error) for secret in ("SECRET", KEY, "sig="))
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


@given(st.text())
def test_connection_string_of_any_text_raises_only_configuration_error(text: str) -> None:
    """Any text is a connection string or a `ConfigurationError`, and nothing else."""
    for each in (text, f"Endpoint={text}", f"Endpoint=sb://{text}", f"{FULL};{text}", f"{EMULATOR}EntityPath={text}"):
        try:
            ConnectionString.parse(each)
        except ConfigurationError:
            continue


@given(st.sampled_from([FULL, ";".join(reversed(FULL.split(";")))]), st.integers(0, len(FULL)), st.integers(0, 40))
def test_connection_string_error_shows_no_piece_of_the_key(text: str, start: int, length: int) -> None:
    """However a string is cut, no error shows a piece of the key."""
    shown = ""
    try:
        connection_settings(text[:start] + text[start + length :], "telemetry")
    except ConfigurationError as error:
        shown = str(error)
    assert KEY[:6] not in shown
    assert KEY[-8:] not in shown


# ---------------------------------------------------------------------------------------------------- settings


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


def test_retry_options_default_to_those_of_their_option() -> None:
    """Without a word on the limit, links and handlers are retried without one; sends have the default of the class."""
    settings = HostSettings(hub="h", link_retry=RetryOptions(base_delay=1.0), handler_retry=RetryOptions(max_retries=5))
    assert settings.link_retry == RetryOptions(max_retries=None, base_delay=1.0, max_delay=30.0)
    assert settings.handler_retry == RetryOptions(max_retries=5, base_delay=0.5, max_delay=30.0)
    assert HostSettings(hub="h", link_retry=RetryOptions(max_retries=3)).link_retry.max_retries == 3
    assert RetryOptions().max_retries == 3
    slow = HostSettings(hub="h", link_retry=RetryOptions(base_delay=40.0)).link_retry
    assert slow == RetryOptions(max_retries=None, base_delay=40.0, max_delay=40.0)
    with pytest.raises(ConfigurationError, match=r"link_retry: max_delay must not be below base_delay"):
        HostSettings.model_validate({"hub": "h", "link_retry": {"base_delay": 40.0, "max_delay": 30.0}})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_retries": 101}, "max_retries"),
        ({"base_delay": 0}, "base_delay"),
        ({"max_delay": 0.5}, "max_delay"),
        ({"max_delya": 5}, "max_delya"),
    ],
)
def test_retry_options_with_a_bad_value_are_refused(options: dict[str, Any], field: str) -> None:
    """Retry options are checked as the settings are, unknown names included."""
    with pytest.raises(ConfigurationError) as caught:
        RetryOptions(**options)
    assert_clean(caught.value, field)


def test_settings_with_a_missing_field_name_it() -> None:
    """Settings made by hand say what is missing."""
    with pytest.raises(ConfigurationError, match="fully_qualified_namespace: is required"):
        ConnectionSettings.model_validate({})


def test_settings_are_frozen() -> None:
    """Settings do not change."""
    with pytest.raises(ValidationError):
        connection_settings(FULL).port = 1  # what is tested is that this fails


@pytest.mark.parametrize("text", [FULL, f"Endpoint=sb://{NS}/;SharedAccessSignature={SIGNATURE};EntityPath=telemetry"])
def test_repr_shows_no_key_or_signature(text: str) -> None:
    """No repr shows a key or signature."""
    made = connection_settings(text)
    shown = f"{made!r} {made} {made.credential!r} {ConnectionString.parse(text)!r} {made.model_dump()!r}"
    assert KEY not in shown
    assert "sig=" not in shown


def test_repr_does_not_call_the_users_credentials_repr() -> None:
    """A repr does not ask a user's credential for its own, which may show what it holds."""

    class Telling(AsyncCredential):
        def __repr__(self) -> str:
            return "SECRET"

    made = connection_settings(hub="telemetry", fully_qualified_namespace=NS, credential=Telling())
    assert "SECRET" not in f"{made!r} {made}"


def test_key_given_as_plain_text_is_kept_as_a_secret() -> None:
    """A key given as plain text is kept as a secret all the same."""
    plain: Any = KEY
    assert SharedKey("Root", plain) == SharedKey("Root", SecretStr(KEY))
    assert KEY not in repr(SharedKey("Root", plain))
    assert KEY not in repr(SharedSignature(plain))
    with pytest.raises(ConfigurationError):
        SharedKey("Root", KEY.encode())  # type: ignore[arg-type]  # the point of the test


def test_credentials_of_azure_core_are_taken_and_not_shown() -> None:
    """Its named key and its signature are taken as they are, to follow their `update`, and shown by no repr."""
    for credential in (AzureNamedKeyCredential("Root", KEY), AzureSasCredential(SIGNATURE)):
        made = connection_settings(hub="telemetry", fully_qualified_namespace=NS, credential=credential)
        assert made.credential is credential
        assert KEY not in f"{made!r} {made}"
        assert SIGNATURE not in f"{made!r} {made}"


def test_settings_are_pickled_whole() -> None:
    """Settings reach another process whole."""
    made = connection_settings(FULL)
    assert pickle.loads(pickle.dumps(made)) == made
