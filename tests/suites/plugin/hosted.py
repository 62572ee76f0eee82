"""A pytest plugin for azure-eventhub's own tests: what they expect of Azure beside Event Hubs, on loopback.

It is loaded in the suite's process, which does not have eventpump. The suite's own conftest asks Azure Resource Manager
for a hub per test and Entra for tokens, and trusts the authorities of certifi. Here the hubs exist beforehand, one file
for each in a directory, and a test takes one by removing its file; any text is a token; and the authority of the
emulator's certificate is trusted too. Neither the suite's files nor the SDK are changed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import certifi
from azure.core.credentials import AccessToken

_HUBS = Path(os.environ["SUITE_HUBS"])
_AUTHORITIES = os.environ["SUITE_AUTHORITIES"]
_KEY_NAME, _KEY = os.environ["SUITE_KEY"].split(":")
_HOST = os.environ["EVENT_HUB_NAMESPACE"]


class _Credential:
    """An identity, for the synchronous and (below) the asynchronous clients."""

    def get_token(self, *_scopes: str, **_options: Any) -> AccessToken:
        return AccessToken("a token of nobody", int(time.time()) + 3600)

    def close(self) -> None: ...


class _AsyncCredential:
    async def get_token(self, *_scopes: str, **_options: Any) -> AccessToken:
        return _Credential().get_token()

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


def get_credential(**options: Any) -> _Credential | _AsyncCredential:
    """Return an identity."""
    return _AsyncCredential() if options.get("is_async") else _Credential()


class _Namespaces:
    def list_keys(self, *_: str) -> SimpleNamespace:
        endpoint = f"Endpoint=sb://{_HOST}/;SharedAccessKeyName={_KEY_NAME};SharedAccessKey={_KEY}"
        return SimpleNamespace(primary_connection_string=endpoint, key_name=_KEY_NAME, primary_key=_KEY)


class _Hubs:
    def create_or_update(self, *_: Any) -> SimpleNamespace:
        for file in sorted(_HUBS.iterdir()):
            try:
                file.unlink()
            except FileNotFoundError:  # another process of pytest-xdist took it
                continue
            return SimpleNamespace(name=file.name)
        raise RuntimeError("no hub is left")

    def delete(self, *_: str) -> None: ...


class _ManagementClient:
    def __init__(self, *_: Any, **_options: Any) -> None:
        self.namespaces = _Namespaces()
        self.event_hubs = _Hubs()


def _add_module(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


_add_module("devtools_testutils", get_region_override=lambda default: default, get_credential=get_credential)
_add_module("azure.mgmt.eventhub", EventHubManagementClient=_ManagementClient)
certifi.where = lambda: _AUTHORITIES
