"""Records of the Spark sink in a blob container."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import SecretStr

from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.options.callables import call_by_import_name, check_import_name
from eventpump.storage.blob_access import Answer, Blob, BlobContainer, RefusedError
from eventpump.storage.ledgers.interface import split_name


class BlobLedger:
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
        self._blobs: BlobContainer | None = None
        self._is_closed = False
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
        if self._is_closed:
            raise ClosedError("ledger")
        if self._blobs is None:
            credential = None if self._credential is None else call_by_import_name("credential", self._credential)
            blobs = self._make_container(credential)
            try:
                await blobs.open(self._prefix, create=self._create)
            except BaseException:
                await blobs.aclose()
                raise
            self._blobs = blobs

    async def create(self, name: str, body: bytes) -> bool:
        """Create a record where there is none."""
        operation = f"create {name}"
        blobs, blob = self._find(operation, name)
        try:
            # One request without "overwrite" carries the condition.
            await blobs.swap(operation, None, blob, body, None, max_concurrency=1)
        except RefusedError as refused:
            if refused.answer not in (Answer.TAKEN, Answer.CHANGED):
                raise
            return await self.read(name) == body
        return True

    async def read(self, name: str) -> bytes | None:
        """Read a record."""
        operation = f"read {name}"
        blobs, blob = self._find(operation, name)
        found = await blobs.download(operation, None, blob, bytes)
        return None if found is None else found[0]

    async def list(self, directory: str) -> list[str]:
        """List the records of a directory."""
        operation = f"list {directory}"
        blobs, _ = self._find(operation, f"{directory}/any")
        start = f"{self._prefix}{directory}/"

        async def names() -> list[str]:
            pages = blobs.client.list_blobs(start, **blobs.options)
            return [blob.name.removeprefix(start) async for blob in pages]

        return sorted(await blobs.call(operation, None, names()))

    async def delete(self, name: str) -> None:
        """Delete a record."""
        operation = f"delete {name}"
        blobs, blob = self._find(operation, name)
        await blobs.delete(operation, None, blob)

    async def aclose(self) -> None:
        """Close the client."""
        self._is_closed = True
        if self._blobs is not None:
            await self._blobs.aclose()

    def _find(self, operation: str, name: str) -> tuple[BlobContainer, Blob]:
        if self._is_closed:
            raise ClosedError("ledger")
        if self._blobs is None:
            raise StoreError(operation, "the ledger is not open: call open() first")
        return self._blobs, self._blobs.blob(self._prefix + "/".join(split_name(name)))

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
