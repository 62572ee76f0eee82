"""The states of idempotent publishers in blobs: a small JSON object each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventpump.storage.blob_access import BlobContainer
from eventpump.storage.publisher_states.form import KIND
from eventpump.storage.publisher_states.store import RecordPublisherStateStore
from eventpump.storage.records.blob import BlobRecordStore

if TYPE_CHECKING:
    from azure.storage.blob.aio import ContainerClient


class BlobPublisherStateStore(RecordPublisherStateStore):
    """A `PublisherStateStore` on a storage account: one blob per name and partition, `{prefix}{name}/{partition}.json`.

    Args:
        container: The container's name, with `connection_string` or with `account_url` and `credential`; or a ready
            `ContainerClient`, which stays the caller's to close.
        connection_string: Of the storage account, with the name of a container; None with `account_url` and
            `credential`, or a client.
        account_url: The storage account's URL, with `credential`; None with a connection string, or a client.
        credential: Any that azure.storage.blob takes; None for none, as where `account_url` has a SAS token.
        prefix: Goes before the name in blob names, with nothing between. Default: "publishers/".
        call_timeout: How long one request may take, in seconds. Default: 10.0.
        create: Whether `open` creates a container that is missing; it needs the right to. A missing one is an
            error otherwise. Default: False.

    Raises:
        ConfigurationError: The values cannot work.
    """

    def __init__(
        self,
        container: ContainerClient | str,
        *,
        connection_string: str | None = None,
        account_url: str | None = None,
        credential: Any = None,
        prefix: str = "publishers/",
        call_timeout: float = 10.0,
        create: bool = False,
    ) -> None:
        blobs = BlobContainer(
            container, connection_string, account_url, credential, call_timeout, owner=type(self).__name__
        )
        super().__init__(
            BlobRecordStore(blobs, prefix.strip(), create=create, content_type="application/json", kind=KIND)
        )
