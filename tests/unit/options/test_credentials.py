"""Credentials: what is taken, and that no repr shows one."""

from __future__ import annotations

from typing import Any

import pytest
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from pydantic import SecretStr

from eventpump.errors import ConfigurationError
from eventpump.options.connection import connection_settings
from eventpump.options.connection_string import ConnectionString
from eventpump.options.credentials import SharedKey, SharedSignature
from tests.unit.options.given import FULL, KEY, NS, SIGNATURE, AsyncCredential


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
