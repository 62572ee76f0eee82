"""Records of the Spark sink in a blob container."""

from __future__ import annotations

from pydantic import SecretStr

from eventpump.storage.blob_address import BlobAddress, split_container_url
from eventpump.storage.ledgers.store import KIND, RecordLedger
from eventpump.storage.records.blob import BlobRecordStore


class BlobLedger(RecordLedger):
    """A `LedgerStore` in a blob container: one blob per record, written by one Put Blob with `If-None-Match: *`.

    Args:
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
        self.address = BlobAddress.of(
            container,
            connection_string=connection_string,
            account_url=account_url,
            credential=credential,
            call_timeout=call_timeout,
        )
        """The container."""
        self.prefix = prefix.strip()
        """What goes before the names of records."""
        self._create = create

    @classmethod
    def of_url(cls, url: str) -> BlobLedger:
        """Create one from a container's URL: its path is the container and the prefix, its query a signature."""
        account, container, prefix = split_container_url("ledger", url)
        return cls(container, account_url=account, prefix=prefix)

    async def open(self) -> None:
        """Check that the container is there, or create it with `create`."""
        if self._records is None and not self._is_closed:
            blobs = self.address.connect(type(self).__name__)
            records = BlobRecordStore(blobs, self.prefix, create=self._create, kind=KIND)
            try:
                await records.open()
            except BaseException:
                await records.aclose()
                raise
            self._records = records
        await super().open()

    def __repr__(self) -> str:
        # Never the URL, which may hold a signature.
        return f"BlobLedger({self.address.container!r}, prefix={self.prefix!r})"
