"""Records of the Spark sink in a blob container."""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import SecretStr

from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.options.callables import call_by_import_name, check_import_name
from eventpump.storage.blob_access import Answer, RefusedError, call, ensure_container, make_client, request_options
from eventpump.storage.ledgers.interface import split_name

T = TypeVar("T")


class BlobLedger:
    """A `LedgerStore` in a blob container: one blob per record, written by one Put Blob with `If-None-Match: *`.

    Args:
        container: Its name; it is made where it does not exist.
        connection_string: Of the storage account; or
        account_url: Its URL, with a signature or with the next.
        credential: "module:callable", called without arguments where the store is opened; what it returns is a
            credential of azure.identity.aio, or whatever else azure.storage.blob takes.
        prefix: Goes before the names of records, with nothing between.
        call_timeout: How long one request may take, in seconds.

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
    ) -> None:
        if call_timeout <= 0:
            raise ConfigurationError("call_timeout", "must be above 0")
        self._container_name = container
        self._connection_string = _secret(connection_string)
        self._account_url: str | None = None
        self._signature: SecretStr | None = None
        if account_url is not None:
            text = account_url.get_secret_value() if isinstance(account_url, SecretStr) else account_url
            self._account_url, _, signature = text.partition("?")
            self._signature = SecretStr(signature) if signature else None
        self._credential = credential
        self._prefix = prefix.strip()
        self._call_timeout = float(call_timeout)
        self._options = request_options(self._call_timeout)
        self._container: Any = None
        self._is_closed = False
        if credential is None:
            # A client that is never used holds nothing open; making one shows what cannot work.
            self._make_client()
        else:
            try:
                check_import_name(credential)
            except ValueError as error:
                raise ConfigurationError("credential", str(error)) from None

    @classmethod
    def of_url(cls, url: str) -> BlobLedger:
        """Make one of a container's URL: its path is the container and the prefix, its query a signature."""
        parts = urlsplit(url)
        path = [each for each in parts.path.split("/") if each]
        # The account is a part of the path where the host is an address, as with Azurite.
        accounts = path[:1] if parts.port is not None else []
        container, *prefix = path[len(accounts) :] or [""]
        if not container:
            raise ConfigurationError("ledger", "the URL names no container")
        account = parts._replace(path="".join(f"/{each}" for each in accounts)).geturl()
        return cls(container, account_url=account, prefix="".join(f"{each}/" for each in prefix))

    async def open(self) -> None:
        """Make the container if there is none."""
        if self._is_closed:
            raise ClosedError("ledger")
        if self._container is None:
            container = self._make_client()
            try:
                await ensure_container(container, self._prefix, self._call_timeout)
            except BaseException:
                await container.close()
                raise
            self._container = container

    async def create(self, name: str, body: bytes) -> bool:
        """Create a record where there is none."""
        blob = self._find("create", name)
        try:
            # One request without "overwrite" carries the condition.
            await self._call("create", name, blob.upload_blob(body, max_concurrency=1, **self._options))
        except RefusedError as refused:
            if refused.answer not in (Answer.TAKEN, Answer.CHANGED):
                raise StoreError(f"create {name}", refused.answer.value) from None
            return await self.read(name) == body
        return True

    async def read(self, name: str) -> bytes | None:
        """Read a record."""
        blob = self._find("read", name)

        async def download() -> bytes:
            stream = await blob.download_blob(**self._options)
            raw: bytes = await stream.readall()
            return raw

        try:
            raw: bytes = await self._call("read", name, download())
        except RefusedError as refused:
            if refused.answer is not Answer.MISSING:
                raise StoreError(f"read {name}", refused.answer.value) from None
            return None
        return raw

    async def list(self, directory: str) -> list[str]:
        """List the records of a directory."""
        self._find("list", f"{directory}/any")
        start = f"{self._prefix}{directory}/"

        async def names() -> list[str]:
            pages = self._container.list_blobs(start, **self._options)
            return [blob.name.removeprefix(start) async for blob in pages]

        try:
            return sorted(await self._call("list", directory, names()))
        except RefusedError as refused:
            raise StoreError(f"list {directory}", refused.answer.value) from None

    async def delete(self, name: str) -> None:
        """Delete a record."""
        blob = self._find("delete", name)
        try:
            await self._call("delete", name, blob.delete_blob(**self._options))
        except RefusedError as refused:
            if refused.answer is not Answer.MISSING:
                raise StoreError(f"delete {name}", refused.answer.value) from None

    async def aclose(self) -> None:
        """Close the client."""
        self._is_closed = True
        if self._container is not None:
            await self._container.close()

    async def _call(self, operation: str, name: str, request: Any) -> Any:
        return await call(f"{operation} {name}", None, request, self._call_timeout)

    def _find(self, operation: str, name: str) -> Any:
        if self._is_closed:
            raise ClosedError("ledger")
        if self._container is None:
            raise StoreError(f"{operation} {name}", "the ledger is not open")
        return self._container.get_blob_client(self._prefix + "/".join(split_name(name)))

    def _make_client(self) -> Any:
        credential = None if self._credential is None else call_by_import_name("credential", self._credential)
        url = self._account_url
        if url is not None and self._signature is not None:
            url = f"{url}?{self._signature.get_secret_value()}"
        return make_client(
            self._container_name,
            None if self._connection_string is None else self._connection_string.get_secret_value(),
            url,
            credential,
        )

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobLedger({self._container_name!r}, prefix={self._prefix!r})"


def _secret(text: str | SecretStr | None) -> SecretStr | None:
    return SecretStr(text) if isinstance(text, str) else text
