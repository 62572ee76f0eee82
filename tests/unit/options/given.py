"""Connection strings and credentials that the tests of options give, and what they expect of an error."""

from __future__ import annotations

from typing import NamedTuple

from eventpump.errors import ConfigurationError
from eventpump.eventhubs import sas

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


def assert_clean(error: ConfigurationError, field: str) -> None:
    """Check that an error names its field, and neither shows nor drags along what may be secret."""
    assert error.field == field
    assert not any(secret in str(error) for secret in ("SECRET", KEY, "sig="))
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
