"""Where a blob container is, with the secrets for it: what can be pickled and shown before a client is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from pydantic import SecretStr

from eventpump.errors import ConfigurationError
from eventpump.options.callables import call_by_import_name, check_import_name
from eventpump.storage.blob_access import BlobContainer


@dataclass(frozen=True, slots=True)
class BlobAddress:
    """A blob container, with the secrets that it takes, which nothing shows.

    Args:
        account_url: The account's URL without a signature, or None.
        signature: What was behind the URL's question mark, or None.
        credential: "module:callable", or None, see `of`.
    """

    container: str
    connection_string: SecretStr | None
    account_url: str | None
    signature: SecretStr | None
    credential: str | None
    call_timeout: float

    @classmethod
    def of(
        cls,
        container: str,
        *,
        connection_string: str | SecretStr | None,
        account_url: str | SecretStr | None,
        credential: str | None,
        call_timeout: float,
    ) -> Self:
        """Create one from what a user gives.

        Args:
            connection_string: Of the storage account; or
            account_url: Its URL, with a signature or with the next.
            credential: "module:callable", called without arguments by `connect`; what it returns is a credential of
                azure.identity.aio, or whatever else azure.storage.blob takes.

        Raises:
            ConfigurationError: The values cannot work.
        """
        url, signature = None, ""
        if account_url is not None:
            text = account_url.get_secret_value() if isinstance(account_url, SecretStr) else account_url
            # The signature alone is the secret: errors and logs may show the rest.
            url, _, signature = text.partition("?")
        address = cls(
            container,
            SecretStr(connection_string) if isinstance(connection_string, str) else connection_string,
            url,
            SecretStr(signature) if signature else None,
            credential,
            call_timeout,
        )
        # A client that is never used holds nothing open; creating one shows what cannot work.
        address._connect(None, cls.__name__)
        if credential is not None:
            try:
                check_import_name(credential)
            except ValueError as error:
                raise ConfigurationError("credential", str(error)) from None
        return address

    def connect(self, owner: str) -> BlobContainer:
        """Return a client of the container. No request is made.

        Raises:
            ConfigurationError: The credential cannot be imported, or its call failed.
        """
        return self._connect(
            None if self.credential is None else call_by_import_name("credential", self.credential), owner
        )

    def _connect(self, credential: object, owner: str) -> BlobContainer:
        text, url = self.connection_string, self.account_url
        if self.signature is not None:
            url = f"{url}?{self.signature.get_secret_value()}"
        return BlobContainer(
            self.container,
            None if text is None else text.get_secret_value(),
            url,
            credential,
            self.call_timeout,
            owner=owner,
        )


def split_container_url(field: str, url: str) -> tuple[str, str, str]:
    """Return of a container's URL that of the account, with the signature, the container, and the prefix in it.

    Args:
        field: The option that it is the value of, for the error.

    Raises:
        ConfigurationError: It names no container.
    """
    parts = urlsplit(url)
    path = [each for each in parts.path.split("/") if each]
    # The account is a part of the path where the host is an address, as with Azurite.
    accounts = path[:1] if parts.port is not None else []
    container, *prefix = path[len(accounts) :] or [""]
    if not container:
        raise ConfigurationError(
            field, "the URL must name a container: https://account.blob.core.windows.net/container"
        )
    account = parts._replace(path="".join(f"/{each}" for each in accounts)).geturl()
    return account, container, "".join(f"{each}/" for each in prefix)
