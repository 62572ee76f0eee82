"""Records of the Spark sink in a blob container."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import SecretStr

from eventpump.errors import ConfigurationError
from eventpump.options.callables import call_by_import_name, check_import_name
from eventpump.storage.blob_access import BlobContainer
from eventpump.storage.ledgers.store import KIND, RecordLedger
from eventpump.storage.records.blob import BlobRecordStore


class BlobLedger(RecordLedger):
    """A `LedgerStore` in a blob container: one blob per record, written by one Put Blob with `If-None-Match: *`.

    Args:
        container: Its name.
        connection_string: Of the storage account; or
        account_url: Its URL, with a signature or with the next.
        credential: "module:callable", called without arguments where the store is opened; what it returns is a
            credential of azure.identity.aio, or whatever else azure.storage.blob takes.
        prefix: Goes before the names of records, with nothing between.
        call_timeout: How long one request may take, in seconds.
        create: Whether `open` creates a container that is missing. Default: False; a missing one is an error.

    Raises:
        ConfigurationError: The values cannot work.
    """

    def __init__(
        self,
        container: str,
        *,
        connection_string: str | SecretStr | None = None,
        account_url: str | SecretStr | None = None,
        credential: str | None = None,
        prefix: str = "ledgers/",
        call_timeout: float = 10.0,
        create: bool = False,
    ) -> None:
        super().__init__(None)
        self._create = create
        self._container = container
        self._connection_string = _secret(connection_string)
        self._account_url: str | None = None
        self._signature: SecretStr | None = None
        if account_url is not None:
            text = account_url.get_secret_value() if isinstance(account_url, SecretStr) else account_url
            # The signature alone is the secret: errors and logs may show the rest.
            self._account_url, _, signature = text.partition("?")
            self._signature = SecretStr(signature) if signature else None
        self._credential = credential
        self._prefix = prefix.strip()
        self._call_timeout = call_timeout
        # A client that is never used holds nothing open; creating one shows what cannot work.
        self._make_container(None)
        if credential is not None:
            try:
                check_import_name(credential)
            except ValueError as error:
                raise ConfigurationError("credential", str(error)) from None

    @classmethod
    def of_url(cls, url: str) -> BlobLedger:
        """Create one from a container's URL: its path is the container and the prefix, its query a signature."""
        parts = urlsplit(url)
        path = [each for each in parts.path.split("/") if each]
        # The account is a part of the path where the host is an address, as with Azurite.
        accounts = path[:1] if parts.port is not None else []
        container, *prefix = path[len(accounts) :] or [""]
        if not container:
            raise ConfigurationError(
                "ledger", "the URL must name a container: https://account.blob.core.windows.net/container"
            )
        account = parts._replace(path="".join(f"/{each}" for each in accounts)).geturl()
        return cls(container, account_url=account, prefix="".join(f"{each}/" for each in prefix))

    async def open(self) -> None:
        """Check that the container is there, or create it with `create`."""
        if self._records is None and not self._is_closed:
            credential = None if self._credential is None else call_by_import_name("credential", self._credential)
            blobs = self._make_container(credential)
            records = BlobRecordStore(blobs, self._prefix, create=self._create, kind=KIND)
            try:
                await records.open()
            except BaseException:
                await records.aclose()
                raise
            self._records = records
        await super().open()

    def _make_container(self, credential: object) -> BlobContainer:
        text, url = self._connection_string, self._account_url
        if self._signature is not None:
            url = f"{url}?{self._signature.get_secret_value()}"
        return BlobContainer(
            self._container,
            None if text is None else text.get_secret_value(),
            url,
            credential,
            self._call_timeout,
            owner=type(self).__name__,
        )

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobLedger({self._container!r}, prefix={self._prefix!r})"


def _secret(text: str | SecretStr | None) -> SecretStr | None:
    return SecretStr(text) if isinstance(text, str) else text
