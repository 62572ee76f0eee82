"""Connection strings: what they hold, and that no error shows a piece of one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from eventpump.errors import ConfigurationError
from eventpump.options.connection import connection_settings
from eventpump.options.connection_string import ConnectionString
from eventpump.options.credentials import SharedKey, SharedSignature
from tests.unit.options.given import EMULATOR, FULL, KEY, NS, SIGNATURE, assert_clean


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
    """A ready-made signature stands in place of a key, and says when it ends."""
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
