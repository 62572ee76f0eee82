"""Tries what a blob store needs from a container: to list, write, lease and delete."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from azure.storage.blob.aio import BlobLeaseClient

from eventpump.errors import StoreError
from eventpump.storage.blob_access import Answer, BlobContainer, ForbiddenError, RefusedError

PROBE: Final = "eventpump-doctor"
"""The name of the blob that is written. No store lists blobs of that name."""
_OPERATION: Final = "try the rights"
_LEASE: Final = 15
"""Seconds: the shortest lease. A probe that was killed leaves it for that long."""
_LAST_REQUESTS: Final = 2.0
"""Seconds for deleting the blob when the probe is cancelled."""


class BlobRight(enum.Enum):
    """What a store does with blobs."""

    LIST = "list"
    WRITE = "write"
    LEASE = "lease"
    DELETE = "delete"


class MissingRightError(Exception):
    """The storage account refused the credential for one right, with a reason."""

    def __init__(self, right: BlobRight, reason: str) -> None:
        super().__init__(f"no right to {right.value} blobs: {reason}")
        self.right = right
        self.reason = reason


class BlobRights:
    """Tries them on one container. Nothing is left there; after a kill one blob is, which the next run deletes."""

    def __init__(self, container: BlobContainer) -> None:
        self._container = container

    async def exists(self) -> bool:
        """Return whether the container exists.

        Raises:
            ForbiddenError: The credential gives no right to list it.
            StoreError: The request failed.
        """
        return await self._container.is_there(PROBE)

    async def try_all(self) -> None:
        """Write a blob, lease it, release it and delete it. It is deleted if this is cancelled, too.

        Raises:
            MissingRightError: The credential gives no right to one of these.
            StoreError: A request failed.
        """
        try:
            await self._try_all()
        except asyncio.CancelledError:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_LAST_REQUESTS):
                    await self._remove()
            raise

    async def _try_all(self) -> None:
        blob, options = self._container.blob(PROBE), self._container.options
        with _needing(BlobRight.WRITE):
            try:
                await self._call(blob.upload_blob(b"", overwrite=True, **options))
            except RefusedError as refused:
                if refused.answer not in (Answer.TAKEN, Answer.LOST):
                    raise
                # A run that was killed, or one that goes on now: it ends without its lease.
                with _needing(BlobRight.LEASE):
                    await self._break_lease()
                await self._call(blob.upload_blob(b"", overwrite=True, **options))
        with _needing(BlobRight.LEASE), _unless_changed():
            lease = await self._call(blob.acquire_lease(_LEASE, **options))
            await self._call(lease.release(**options))
        with _needing(BlobRight.DELETE), _unless_changed():
            await self._container.delete(_OPERATION, None, blob)

    async def _remove(self) -> None:
        with suppress(RefusedError):  # there is no lease, or no blob
            await self._break_lease()
        await self._container.delete(_OPERATION, None, self._container.blob(PROBE))

    async def _break_lease(self) -> None:
        blob = self._container.blob(PROBE)
        await self._call(BlobLeaseClient(blob).break_lease(0, **self._container.options))

    async def _call(self, request: Awaitable[Any]) -> Any:
        return await self._container.call(_OPERATION, None, request)


@contextmanager
def _needing(right: BlobRight) -> Iterator[None]:
    try:
        yield
    except ForbiddenError as error:
        raise MissingRightError(right, error.reason) from error


@contextmanager
def _unless_changed() -> Iterator[None]:
    """Ignore what another run does with the blob meanwhile: the account has allowed the request."""
    with suppress(RefusedError):
        yield
