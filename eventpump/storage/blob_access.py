"""Access to Azure Blob Storage: a container with bounded requests, whose errors are those of a store.

The blob stores use nothing else to send requests; only they and this module know azure.storage.blob.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import io
import logging
import re
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from azure.core import MatchConditions
from azure.core.exceptions import AzureError, HttpResponseError, ResourceNotFoundError
from azure.storage.blob import BlobBlock, BlobProperties, ContentSettings
from azure.storage.blob.aio import BlobClient, ContainerClient

from eventpump.aio.home import HomeLoop
from eventpump.aio.tasks import gather
from eventpump.errors import ClosedError, ConfigurationError, StoreError

if TYPE_CHECKING:
    from eventpump.interfaces import Clock

T = TypeVar("T")

_BLOBS: Final = 4096
_WHOLE: Final = 1 << 20
"""Bytes that are sent at once; of more the HTTP client warns."""
_CLOCK_OFF: Final = 30.0
"""Seconds by which the machine's clock may differ from the account's before that is reported."""

Blob: TypeAlias = BlobClient
"""A client of one blob."""

# The SDK logs every request and response at INFO; ours go to a logger that is silent below WARNING unless configured.
_HTTP_LOGGER: Final = logging.getLogger("eventpump.storage.http")
_HTTP_LOGGER.setLevel(logging.WARNING)


class AccountClock:
    """The clock of a storage account, by its last answer. It is the one that dates blobs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._behind = 0.0

    def set(self, date: float) -> None:
        """Take the time of an answer that has just come, in seconds since the Unix epoch."""
        self._behind = date - self._clock.time()

    def time(self) -> float:
        """Return the account's time in seconds since the Unix epoch; the machine's before the first answer."""
        return self._clock.time() + self._behind

    def describe_error(self) -> str | None:
        """Return by how much the machine's clock is wrong, None where that is too little to matter."""
        if abs(self._behind) <= _CLOCK_OFF:
            return None
        how = "behind" if self._behind > 0 else "ahead of"
        return f"this machine's clock is {abs(self._behind):.0f} s {how} that of the storage account"


class Answer(enum.Enum):
    """Why the storage account refused a request, where the caller may expect it."""

    LOST = "another host holds the blob's lease, or it has expired"
    CHANGED = "the blob was changed after it was read"
    TAKEN = "the blob exists already, or another client holds its lease"
    MISSING = "the blob does not exist"
    ENDED = "the blob ends before the range that was asked for"


_ANSWERS: Final = {
    # 409 and 412 with no code at all count as lost too, as they do for a .NET EventProcessorHost.
    "": Answer.LOST,
    "LeaseLost": Answer.LOST,
    "LeaseIdMismatchWithBlobOperation": Answer.LOST,
    "LeaseIdMismatchWithLeaseOperation": Answer.LOST,
    "LeaseNotPresentWithBlobOperation": Answer.LOST,
    "LeaseNotPresentWithLeaseOperation": Answer.LOST,
    "LeaseIsBrokenAndCannotBeRenewed": Answer.LOST,
    "LeaseIsBreakingAndCannotBeChanged": Answer.LOST,
    "ConditionNotMet": Answer.CHANGED,
    "TargetConditionNotMet": Answer.CHANGED,
    "BlobAlreadyExists": Answer.TAKEN,
    "ContainerAlreadyExists": Answer.TAKEN,
    "LeaseAlreadyPresent": Answer.TAKEN,
    "LeaseIdMissing": Answer.TAKEN,
    "LeaseIsBreakingAndCannotBeAcquired": Answer.TAKEN,
}


class RefusedError(StoreError):
    """The storage account refused a request for a reason that its caller may expect, and handle."""

    def __init__(self, operation: str, answer: Answer, *, partition_id: str | None = None) -> None:
        super().__init__(operation, answer.value, partition_id=partition_id)
        self.answer = answer


class ForbiddenError(StoreError):
    """The storage account refused the credential."""


class BlobContainer:
    """A container as the stores use it. Every request is tried once, within seconds, and is not logged.

    Args:
        container: The container's name, with `connection_string` or with `account_url` and `credential`; or a ready
            client, which stays the caller's to close.
        credential: Any that azure.storage.blob takes.
        call_timeout: How long one request may take, in seconds.
        owner: The class that it is a part of, for errors.
        on_date: Called with the time at which the account answered, in seconds since the Unix epoch; None for none.
            Default: None.

    Raises:
        ConfigurationError: The values cannot work.
    """

    def __init__(
        self,
        container: ContainerClient | str,
        connection_string: str | None,
        account_url: str | None,
        credential: Any,
        call_timeout: float,
        *,
        owner: str,
        on_date: Callable[[float], None] | None = None,
    ) -> None:
        if call_timeout <= 0:
            raise ConfigurationError("call_timeout", "must be above 0")
        self._owns_client = isinstance(container, str)
        self.client = (
            _make_client(container, connection_string, account_url, credential)
            if isinstance(container, str)
            else container
        )
        self._blob = functools.lru_cache(_BLOBS)(self.client.get_blob_client)
        self._timeout = float(call_timeout)
        self.home = HomeLoop(owner)
        """The event loop that it belongs to."""
        # The stores' callers decide what is tried again: the SDK's retries start at 15 s, half a lease.
        self.options: Final[dict[str, Any]] = {
            "retry_total": 0,
            "connection_timeout": self._timeout,
            "read_timeout": self._timeout,
            "logger": _HTTP_LOGGER,
        }
        """The keyword arguments of every request."""
        if on_date is not None:
            self.options["raw_response_hook"] = functools.partial(_read_date, on_date)

    @property
    def name(self) -> str:
        """The container's name."""
        return str(self.client.container_name)

    def blob(self, name: str) -> Blob:
        """Return a client of one blob, which is kept: creating one costs more than many a request."""
        return self._blob(name)

    async def open(self, directory: str, *, create: bool) -> None:
        """Check that the container is there.

        Raises:
            ConfigurationError: It is missing; or the account refuses the credential. At the start that is a mistake,
                and trying again does not mend it; later it may be a new key, or a role that is being changed.
            StoreError: The container can neither be created nor read.
        """
        try:
            if not await self.is_there(directory):
                if not create:
                    problem = f"there is no container {self.name}: check the name, or give create=True to create it"
                    raise ConfigurationError("container", problem)
                await self._create()
        except ForbiddenError as error:
            problem = f"the storage account refuses it for container {self.name} ({error.reason})"
            raise ConfigurationError("credential", problem) from None

    async def is_there(self, directory: str = "") -> bool:
        """Return whether the container is there.

        Raises:
            ForbiddenError: The account refuses the credential.
            StoreError: It cannot be read.
        """

        async def exists() -> bool:
            try:
                async for _ in self.client.list_blobs(directory, results_per_page=1, **self.options):
                    break
            except ResourceNotFoundError:
                return False
            return True

        return await self.call("open", None, exists())

    async def _create(self) -> None:
        # Only one that is missing: a signature for this container alone does not permit to create it.
        try:
            await self.call("open", None, self.client.create_container(**self.options))
        except RefusedError as refused:
            if refused.answer is not Answer.TAKEN:
                raise

    async def call(self, operation: str, partition_id: str | None, request: Awaitable[T]) -> T:
        """Make one request, and raise whatever the SDK raises as an error of the store.

        Raises:
            RefusedError: The storage account refused it for a reason that the caller may expect.
            StoreError: It failed.
        """
        try:
            self.home.enter()
        except ClosedError:
            if asyncio.iscoroutine(request):
                request.close()
            raise
        try:
            async with asyncio.timeout(self._timeout):
                return await request
        except TimeoutError:
            reason = f"no answer within {self._timeout:g} s"
            raise StoreError(operation, reason, partition_id=partition_id) from None
        except (AzureError, OSError) as error:
            answer = _answer_of(error) if isinstance(error, HttpResponseError) else None
            if answer is not None:
                raise RefusedError(operation, answer, partition_id=partition_id) from None
            kind = ForbiddenError if getattr(error, "status_code", None) in (401, 403) else StoreError
            failure = kind(operation, _describe(error), partition_id=partition_id)
            raise failure from (error if _is_clean(error) else None)

    async def list(self, operation: str, directory: str, *, pages: int | None = None) -> dict[str, BlobProperties]:
        """List the blobs of a directory with their metadata, by name. One request for up to 5,000 of them.

        Args:
            pages: How many pages are read at most; None for all.

        Raises:
            StoreError: A request failed.
        """

        async def listed() -> dict[str, BlobProperties]:
            blobs = self.client.list_blobs(directory, include=["metadata"], **self.options)
            found: dict[str, BlobProperties] = {}
            read = 0
            async for page in blobs.by_page():
                found.update({blob.name: blob async for blob in page})
                read += 1
                if read == pages:
                    break
            return found

        return await self.call(operation, None, listed())

    async def download(
        self,
        operation: str,
        partition_id: str | None,
        blob: Blob,
        parse: Callable[[bytes], T],
        *,
        offset: int = 0,
        limit: int | None = None,
    ) -> tuple[T, BlobProperties] | None:
        """Read a blob; None where there is none. One request.

        Args:
            parse: Parses its content, or raises `ValueError`.
            offset: The first byte that is read. Default: 0.
            limit: How many bytes are read at most; None for all.

        Raises:
            RefusedError: The blob has no such byte, with a limit.
            StoreError: The request failed, or the blob holds something else.
        """

        async def read() -> tuple[bytes, BlobProperties]:
            stream = await blob.download_blob(None if limit is None else offset, limit, **self.options)
            raw: bytes = await stream.readall()
            return raw, stream.properties

        try:
            raw, properties = await self.call(operation, partition_id, read())
            return parse(raw), properties
        except RefusedError as refused:
            if refused.answer is not Answer.MISSING:
                raise
            return None
        except ValueError as error:
            where = f"{blob.blob_name}: " if partition_id is None else ""
            raise StoreError(operation, f"{where}{error}", partition_id=partition_id) from None

    async def upload(self, operation: str, blob: Blob, content: bytes, piece: int, *, at_once: int) -> None:
        """Write a blob of any size, whose name no other writer has. It is there when this returns, and never in part.

        One request up to 1 MiB, otherwise one more than it has pieces. Blocks of a write that ended are no blob; the
        account removes them.

        Args:
            piece: Bytes of one request, which the time-out is for.
            at_once: Requests at a time.

        Raises:
            StoreError: It failed, and whether it was written is not known.
        """
        if len(content) <= _WHOLE:
            await self.call(operation, None, blob.upload_blob(content, **self.options))
            return

        async def stage(start: int) -> BlobBlock:
            block, part = f"{start:016d}", io.BytesIO(content[start : start + piece])
            await self.call(operation, None, blob.stage_block(block, part, **self.options))
            return BlobBlock(block)

        blocks = await gather(map(stage, range(0, len(content), piece)), at_once=at_once)
        await self.call(operation, None, blob.commit_block_list(blocks, **self.options))

    async def swap(
        self,
        operation: str,
        partition_id: str | None,
        blob: Blob,
        content: bytes,
        replaces: str | None,
        *,
        content_type: str | None = None,
        **options: Any,
    ) -> str:
        """Write a blob in place of the one with an ETag, or, with None, where there is none. One request.

        Args:
            content_type: What its content is; None for bytes.

        Returns:
            The new ETag.

        Raises:
            RefusedError: Another blob is there.
            StoreError: It failed, and whether it was written is not known.
        """
        if content_type is not None:
            options["content_settings"] = ContentSettings(content_type=content_type)
        if replaces is not None:
            options |= {"overwrite": True, **_unchanged(replaces)}
        request = blob.upload_blob(content, **options, **self.options)
        return str((await self.call(operation, partition_id, request))["etag"])

    async def properties(self, operation: str, partition_id: str | None, blob: Blob) -> BlobProperties | None:
        """Read the properties of a blob, metadata among them; None where there is none. One request.
        Raises `StoreError`."""
        try:
            return await self.call(operation, partition_id, blob.get_blob_properties(**self.options))
        except RefusedError as refused:
            if refused.answer is not Answer.MISSING:
                raise
            return None

    async def swap_metadata(
        self, operation: str, partition_id: str | None, blob: Blob, metadata: dict[str, str], replaces: str | None
    ) -> str:
        """Replace the metadata of the blob with an ETag, or, with None, create an empty blob. One request.

        Raises:
            RefusedError: Another blob is there, or none.
            StoreError: It failed, and whether it was written is not known.
        """
        if replaces is None:
            return await self.swap(operation, partition_id, blob, b"", None, metadata=metadata)
        request = blob.set_blob_metadata(metadata, **_unchanged(replaces), **self.options)
        return str((await self.call(operation, partition_id, request))["etag"])

    async def delete(self, operation: str, partition_id: str | None, blob: Blob, etag: str | None = None) -> None:
        """Delete a blob, with an ETag if it is given. Nothing happens where there is none."""
        condition = {} if etag is None else _unchanged(etag)
        try:
            await self.call(operation, partition_id, blob.delete_blob(**condition, **self.options))
        except RefusedError as refused:
            if refused.answer is not Answer.MISSING:
                raise

    async def aclose(self) -> None:
        """Close the client, unless it is the caller's."""
        self.home.enter()
        self.home.close()
        if self._owns_client:
            await self.client.close()


def _read_date(on_date: Callable[[float], None], response: Any) -> None:
    date = response.http_response.headers.get("Date")
    if date is None:
        return
    with contextlib.suppress(ValueError):
        on_date(parsedate_to_datetime(date).timestamp())


def _unchanged(etag: str) -> dict[str, Any]:
    return {"etag": etag, "match_condition": MatchConditions.IfNotModified}


def _make_client(
    container: str, connection_string: str | None, account_url: str | None, credential: Any
) -> ContainerClient:
    if (connection_string is None) == (account_url is None):
        raise ConfigurationError("connection_string", "with the name of a container, give either this or account_url")
    field = "connection_string" if account_url is None else "account_url"
    try:
        if account_url is None:
            assert connection_string is not None
            return ContainerClient.from_connection_string(connection_string, container, retry_total=0)
        return ContainerClient(account_url, container, credential=credential, retry_total=0)
    except (ValueError, TypeError, AttributeError, KeyError):
        # The SDK's message may quote what it was given.
        raise ConfigurationError(field, "is not that of a storage account") from None


def _answer_of(error: HttpResponseError) -> Answer | None:
    code = _code_of(error)
    if error.status_code == 404 and code in ("", "BlobNotFound"):
        return Answer.MISSING
    if error.status_code == 416:
        return Answer.ENDED
    return _ANSWERS.get(code) if error.status_code in (409, 412) else None


def _code_of(error: HttpResponseError) -> str:
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _describe(error: BaseException) -> str:
    if isinstance(error, HttpResponseError) and error.status_code is not None:
        return f"HTTP status {error.status_code} {_code_of(error)}".rstrip()
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {_redacted(lines[0])}"


_SECRET: Final = re.compile(r"\?\S*|(?i:sig|signature|accountkey|key)=\S*")


def _redacted(text: str) -> str:
    return _SECRET.sub("…", text)


def _is_clean(error: BaseException | None) -> bool:
    """Whether an error and all it was made from can be shown: a refused signature is quoted by the service, and a URL
    with a signature by the HTTP client.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        text = str(error)
        if "signature" in text.lower() or _redacted(text) != text:
            return False
        error = error.__cause__ or error.__context__
    return True
