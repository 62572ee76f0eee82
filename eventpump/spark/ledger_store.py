"""Where ledgers are kept: a directory, or a blob container. A record is created once, whole, and never changed."""

from __future__ import annotations

import asyncio
import errno
import os
import pkgutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import urlsplit

from pydantic import SecretStr

from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.storage.blob_access import Answer, RefusedError, call, ensure_container, make_client, request_options

T = TypeVar("T")

_ABANDONED: Final = 3600.0
"""Seconds after which a temporary file belongs to nobody who lives."""
_TEMPORARY: Final = ".tmp-"


class LedgerStore(Protocol):
    """Keeps records under names of the form "directory/file". Used by one event loop; several stores may share a truth.

    It may be pickled as long as it is not open.
    """

    async def open(self) -> None:
        """Make what keeps the records, where there is none. Opening twice is fine.

        :raises StoreError: the store failed.
        :raises ConfigurationError: a value it was made with cannot work.
        """

    async def create(self, name: str, body: bytes) -> bool:
        """Create a record, durably and whole, where there is none.

        Cancelled or failed, it is created or not; it may be called again.

        :returns: True where the record is there with this body, whoever wrote it; False where there is another.
        :raises StoreError: the store failed, and whether it is created is not known.
        """

    async def read(self, name: str) -> bytes | None:
        """Read a record; None where there is none. :raises StoreError: the store failed."""

    async def list(self, directory: str) -> list[str]:
        """List the files of a directory, sorted; none where there is no such directory.

        :raises StoreError: the store failed.
        """

    async def delete(self, name: str) -> None:
        """Delete a record; one that is not there is no failure. :raises StoreError: the store failed."""

    async def aclose(self) -> None:
        """Free what the store holds. Records stay. Closing twice is fine."""


def open_ledger(ledger: str | os.PathLike[str] | LedgerStore) -> LedgerStore:
    """Make a store, not open yet, of what the user gave.

    :param ledger: a directory that every driver of the query sees; the URL of a blob container, with a signature, and
        with a prefix as its path, if any; or a store.
    :raises ConfigurationError: it is none of these.
    """
    if not isinstance(ledger, str | os.PathLike):
        return ledger
    text = os.fspath(ledger)
    scheme = urlsplit(text).scheme
    if scheme in ("https", "http"):
        return BlobLedger.of_url(text)
    if len(scheme) > 1:  # one letter is a drive
        raise ConfigurationError("ledger", f"is a directory or the URL of a blob container, not something of {scheme}:")
    if not text:
        raise ConfigurationError("ledger", "is required")
    return DirectoryLedger(text)


def split_name(name: str) -> tuple[str, str]:
    """Take a record's name apart: its directory and its file. :raises ValueError: it has another form."""
    directory, slash, file = name.partition("/")
    parts = (directory, file)
    if not slash or "/" in file or any(not part or part.startswith(".") or "\\" in part for part in parts):
        raise ValueError(f"{name!r} is no record's name")
    return directory, file


class DirectoryLedger:
    """A `LedgerStore` in a directory: one file per record, on a file system with hard links.

    A record is written to a temporary file, which is synchronised with the disk and then linked to its name, so that
    no process ever sees a part of one, whenever the writer dies; what it leaves is deleted by a later `open`.

    :param path: made where it does not exist. For a driver that may restart elsewhere, a path all its machines share.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._is_open = False
        self._is_closed = False

    async def open(self) -> None:
        """Make the directory, and see to it that what it holds outlives a loss of power."""
        if self._is_closed:
            raise ClosedError("ledger")
        await self._in_thread("open", self._prepare)
        self._is_open = True

    async def create(self, name: str, body: bytes) -> bool:
        """Create a record where there is none."""
        path = self._find("create", name)
        return await self._in_thread("create", lambda: _create(path, body))

    async def read(self, name: str) -> bytes | None:
        """Read a record."""
        path = self._find("read", name)
        return await self._in_thread("read", lambda: _read(path))

    async def list(self, directory: str) -> list[str]:
        """List the records of a directory."""
        path = self._find("list", f"{directory}/any").parent
        return await self._in_thread("list", lambda: _list(path))

    async def delete(self, name: str) -> None:
        """Delete a record."""
        path = self._find("delete", name)
        await self._in_thread("delete", lambda: path.unlink(missing_ok=True))

    async def aclose(self) -> None:
        """Close it."""
        self._is_closed = True

    def _find(self, operation: str, name: str) -> Path:
        if self._is_closed:
            raise ClosedError("ledger")
        if not self._is_open:
            raise StoreError(f"{operation} {name}", "the ledger is not open")
        return self._path.joinpath(*split_name(name))

    async def _in_thread(self, operation: str, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            if operation == "create" and error.errno in (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.ENOSYS):
                reason = f"{reason}: a ledger takes a file system with hard links, or a blob container"
            raise StoreError(f"{operation} ledger {self._path}", reason) from error

    def _prepare(self) -> None:
        _make(self._path)
        abandoned = time.time() - _ABANDONED
        for directory in [each for each in self._path.iterdir() if each.is_dir()]:
            for file in directory.glob(f"{_TEMPORARY}*"):
                try:
                    if file.stat().st_mtime < abandoned:
                        file.unlink()
                except FileNotFoundError:  # deleted by another store
                    continue
            # Linked by a process that died before it could do this.
            _synchronise(directory)

    def __repr__(self) -> str:
        return f"DirectoryLedger({str(self._path)!r})"


def _make(path: Path) -> None:
    if path.is_dir():
        return
    _make(path.parent)
    path.mkdir(exist_ok=True)
    _synchronise(path.parent)


def _create(path: Path, body: bytes) -> bool:
    if path.exists():
        return _read(path) == body
    _make(path.parent)
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return _read(path) == body
        _synchronise(path.parent)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _list(path: Path) -> list[str]:
    try:
        return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))
    except FileNotFoundError:
        return []


def _synchronise(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BlobLedger:
    """A `LedgerStore` in a blob container: one blob per record, written by one Put Blob with `If-None-Match: *`.

    :param container: its name; it is made where it does not exist.
    :param connection_string: of the storage account; or
    :param account_url: its URL, with a signature or with the next.
    :param credential: "module:callable", called without arguments where the store is opened; what it returns is a
        credential of azure.identity.aio, or whatever else azure.storage.blob takes.
    :param prefix: goes before the names of records, with nothing between.
    :param call_timeout: how long one request may take, in seconds.
    :raises ConfigurationError: the values cannot work.
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
        elif ":" not in credential:
            raise ConfigurationError("credential", 'must be "module:callable", the import name of what makes it')

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
        credential = None if self._credential is None else _credential(self._credential)
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


def _credential(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError("credential", f"{name} cannot be imported: {type(error).__name__}") from error
