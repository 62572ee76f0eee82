"""Credentials: the kinds that are accepted, and the secret that one holds now."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from pydantic import SecretStr

from eventpump.errors import ConfigurationError
from eventpump.eventhubs import sas
from eventpump.texts import not_the_class


@dataclass(frozen=True, slots=True)
class SharedKey:
    """A shared access key: its name and the key, with which tokens are signed.

    Args:
        name: The name of the shared access policy.
        key: The key; plain text is accepted, and is never shown.
    """

    name: str
    key: SecretStr

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _secret(self.key))


@dataclass(frozen=True, slots=True)
class SharedSignature:
    """A shared access signature that was made elsewhere. It cannot be renewed: when it expires, the links end.

    Args:
        token: The signature, "SharedAccessSignature sr=..."; plain text is accepted, and is never shown.
    """

    token: SecretStr

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", _secret(self.token))

    @property
    def expires_at(self) -> int:
        """When the signature expires, in seconds since the Unix epoch."""
        return sas.parse(self.token.get_secret_value()).expires_at


class AccessToken(Protocol):
    """What a token credential returns, as `azure.core.credentials.AccessToken`."""

    @property
    def token(self) -> str:
        """The token's text."""

    @property
    def expires_on(self) -> int:
        """When the token expires, in seconds since the Unix epoch."""


@runtime_checkable
class TokenCredential(Protocol):
    """Returns tokens of Entra ID, as `azure.core.credentials_async.AsyncTokenCredential`."""

    async def get_token(self, *scopes: str) -> AccessToken:
        """Return a token for the scopes."""


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
    """Holds a key that may be replaced while it is in use, as `azure.core.credentials.AzureNamedKeyCredential`."""

    @property
    def named_key(self) -> NamedKey:
        """The current key. It is read whenever a token is signed."""


@runtime_checkable
class SasCredential(Protocol):
    """Holds a signature that may be replaced while it is in use, as `azure.core.credentials.AzureSasCredential`."""

    @property
    def signature(self) -> str:
        """The current shared access signature."""


def _secret(value: object) -> SecretStr:
    """Return a secret, of plain text too: if it were refused or kept as it is, a repr could show it."""
    if isinstance(value, SecretStr):
        return value
    if not isinstance(value, str):
        raise ConfigurationError("credential", "a key or signature is text")
    return SecretStr(value)


def is_unicode(text: str) -> bool:
    """Return whether text can be encoded. Checked early: the error of `encode` would carry the text."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


Credential: TypeAlias = SharedKey | SharedSignature | NamedKeyCredential | SasCredential | TokenCredential
"""Every kind of credential that is accepted."""


def current_secret(credential: Credential) -> SharedKey | SharedSignature | None:
    """Return the key or signature that a credential holds now; None if it is a token credential."""
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
        if not credential.name or not key or not is_unicode(credential.name + key):
            raise ValueError("a shared key needs a name and a key, both of Unicode text")
        return credential
    if isinstance(credential, SharedSignature):
        sas.parse(credential.token.get_secret_value())
        return credential
    return None


def check_credential(value: object) -> object:
    kinds = (SharedKey, SharedSignature, NamedKeyCredential, SasCredential)
    if not isinstance(value, type) and isinstance(value, kinds):
        current_secret(value)
        return value
    get_token = getattr(value, "get_token", None)
    if get_token is None or isinstance(value, type):
        raise ValueError(
            "must be a SharedKey, a SharedSignature, a credential of azure.core.credentials with a named key or a "
            "signature, or an object with an async get_token, as of azure.identity.aio" + not_the_class(value)
        )
    if not inspect.iscoroutinefunction(get_token):
        raise ValueError("its get_token must be a coroutine function: use a credential of azure.identity.aio")
    return value
