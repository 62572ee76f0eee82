"""The door to Azure Blob Storage: how a client is made, a request is bounded, and what the SDK raises becomes ours.

The stores in `blob*.py` are the only ones to use it, and to know azure.storage.blob.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import re
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

from azure.core.exceptions import AzureError, HttpResponseError, ResourceNotFoundError
from azure.storage.blob.aio import ContainerClient

from eventpump.errors import ConfigurationError, StoreError

T = TypeVar("T")

# The SDK logs every request and answer at INFO; ours go to a logger that is quiet unless somebody sets it lower.
_HTTP_LOGGER: Final = logging.getLogger("eventpump.storage.http")
_HTTP_LOGGER.setLevel(logging.WARNING)


class Answer(enum.Enum):
    """A refusal that is an answer, not a failure."""

    LOST = "the lease is not ours"
    CHANGED = "the blob is not the one that was read"
    TAKEN = "the blob exists, or its lease is taken"
    MISSING = "there is no such lease"


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


class RefusedError(Exception):
    """Carries an answer from the call to the operation that asked; leaves a store only inside a `StoreError`."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.value)
        self.answer = answer


def request_options(timeout: float) -> dict[str, Any]:
    """Make the keyword arguments of every request: tried once, within seconds, not logged."""
    return {"retry_total": 0, "connection_timeout": timeout, "read_timeout": timeout, "logger": _HTTP_LOGGER}


def make_client(
    container: str, connection_string: str | None, account_url: str | None, credential: object
) -> ContainerClient:
    """Make a container's client, for its maker to close.

    Raises:
        ConfigurationError: Of the values given.
    """
    if (connection_string is None) == (account_url is None):
        raise ConfigurationError("connection_string", "a container's name needs this, or account_url: one of them")
    field = "connection_string" if account_url is None else "account_url"
    try:
        if account_url is None:
            assert connection_string is not None
            return ContainerClient.from_connection_string(connection_string, container, retry_total=0)
        return ContainerClient(account_url, container, credential=credential, retry_total=0)  # type: ignore[arg-type]  # any credential the SDK takes; it checks
    except (ValueError, TypeError, AttributeError, KeyError):
        # The SDK's message may quote what it was given.
        raise ConfigurationError(field, "not what a storage account is reached with") from None


async def ensure_container(container: ContainerClient, directory: str, timeout: float) -> None:
    """Make the container if there is none.

    Args:
        directory: What the blobs' names begin with.
        timeout: Of one request, in seconds.

    Raises:
        StoreError: The container can neither be made nor read.
    """
    options = request_options(timeout)

    async def exists() -> bool:
        try:
            async for _ in container.list_blobs(directory, results_per_page=1, **options):
                break
        except ResourceNotFoundError:
            return False
        return True

    # Looked for before it is made: a signature for this container alone may not make it.
    if not await call("open", None, exists(), timeout):
        try:
            await call("open", None, container.create_container(**options), timeout)
        except RefusedError as refused:
            if refused.answer is not Answer.TAKEN:
                raise StoreError("open", refused.answer.value) from None


async def call(operation: str, partition_id: str | None, request: Awaitable[T], timeout: float) -> T:
    """Make one request, and turn whatever the SDK raises into ours.

    Args:
        timeout: Seconds.

    Raises:
        RefusedError: The store answered by a refusal that means something.
    """
    try:
        async with asyncio.timeout(timeout):
            return await request
    except TimeoutError:
        reason = f"no answer within {timeout:g} s"
        raise StoreError(operation, reason, partition_id=partition_id) from None
    except HttpResponseError as error:
        answer = _answer_of(error)
        if answer is not None:
            raise RefusedError(answer) from None
        failure = StoreError(operation, _describe(error), partition_id=partition_id)
        raise failure from (error if _is_clean(error) else None)
    except (AzureError, OSError) as error:
        failure = StoreError(operation, _describe(error), partition_id=partition_id)
        raise failure from (error if _is_clean(error) else None)


def _answer_of(error: HttpResponseError) -> Answer | None:
    code = _code_of(error)
    if error.status_code == 404 and code in ("", "BlobNotFound"):
        return Answer.MISSING
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
