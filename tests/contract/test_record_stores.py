"""The contract of record stores, over every implementation, and what is particular to each."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import ServiceResponseError
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob.aio import BlobLeaseClient, ContainerClient

pytest.register_assert_rewrite("eventpump.testing.conformance.records")

from eventpump.errors import ConfigurationError, StoreError  # noqa: E402
from eventpump.interfaces import ListedRecord, RecordStore, StoredRecord  # noqa: E402
from eventpump.storage.blob_access import BlobContainer  # noqa: E402
from eventpump.storage.records.blob import BlobRecordStore  # noqa: E402
from eventpump.storage.records.directory import DirectoryRecordStore  # noqa: E402
from eventpump.storage.records.memory import MemoryRecordStore  # noqa: E402
from eventpump.storage.records.names import MAX_BODY  # noqa: E402
from eventpump.storage.records.sqlite import SqliteRecordStore, create_record_table  # noqa: E402
from eventpump.storage.records.texts import encode_texts  # noqa: E402
from eventpump.storage.sqlite_file import SqliteFile  # noqa: E402
from eventpump.testing.conformance.records import (  # noqa: E402
    FIRST,
    NAME,
    SECOND,
    THIRD,
    NewStore,
    RecordStoreContract,
)
from tests.contract.own_store import OwnRecordStore, Table  # noqa: E402
from tests.support.azurite import Azurite  # noqa: E402

DIRECTORY = "checkpoints/"


@asynccontextmanager
async def factory(make: Callable[[], RecordStore]) -> AsyncIterator[NewStore]:
    """A function that makes stores, all closed at the end."""
    async with AsyncExitStack() as stack:

        def new_store() -> RecordStore:
            store = make()
            stack.push_async_callback(store.aclose)
            return store

        yield new_store


def sqlite_store(path: Path, prefix: str = "") -> SqliteRecordStore:
    file = SqliteFile(path, 5.0, create_record_table, synchronous="FULL", owner="the test", kind="record store")
    return SqliteRecordStore(file, prefix)


def blob_store(azurite: Azurite, container: str | ContainerClient, prefix: str = "app/") -> BlobRecordStore:
    text = azurite.connection_string if isinstance(container, str) else None
    blobs = BlobContainer(container, text, None, None, 5.0, owner="the test")
    return BlobRecordStore(blobs, prefix, create=True, in_metadata=DIRECTORY)


@asynccontextmanager
async def opened(store: RecordStore) -> AsyncIterator[RecordStore]:
    """A store, open, and closed at the end."""
    try:
        await store.open()
        yield store
    finally:
        await store.aclose()


class TestMemoryRecordStore(RecordStoreContract):
    """In memory."""

    @pytest.fixture
    async def new_store(self) -> AsyncIterator[NewStore]:
        truth: dict[str, StoredRecord] = {}
        async with factory(lambda: MemoryRecordStore(truth, "app/")) as new:
            yield new


class TestSqliteRecordStore(RecordStoreContract):
    """In one file, which holds others' records as well."""

    @pytest.fixture
    async def new_store(self, tmp_path: Path) -> AsyncIterator[NewStore]:
        path = tmp_path / "records.db"
        async with factory(lambda: sqlite_store(path, "app/")) as new:
            for prefix in ("", "app", "b/"):
                other = sqlite_store(path, prefix)
                await other.open()
                await other.swap("0", FIRST, None)
                await other.aclose()
            yield new


class TestDirectoryRecordStore(RecordStoreContract):
    """In a directory that does not exist at first."""

    @pytest.fixture
    async def new_store(self, tmp_path: Path) -> AsyncIterator[NewStore]:
        async with factory(lambda: DirectoryRecordStore(tmp_path / "deep" / "records")) as new:
            yield new


class TestBlobRecordStore(RecordStoreContract):
    """In blobs, on real Azurite."""

    @pytest.fixture
    async def new_store(self, azurite: Azurite, container_name: str) -> AsyncIterator[NewStore]:
        async with factory(lambda: blob_store(azurite, container_name)) as new:
            yield new


class TestBlobMetadataRecordStore(RecordStoreContract):
    """In the metadata of blobs, on real Azurite."""

    directory = DIRECTORY

    @pytest.fixture
    async def new_store(self, azurite: Azurite, container_name: str) -> AsyncIterator[NewStore]:
        async with factory(lambda: blob_store(azurite, container_name)) as new:
            yield new


class TestOwnRecordStore(RecordStoreContract):
    """A store of one's own, written from the documentation."""

    @pytest.fixture
    async def new_store(self) -> AsyncIterator[NewStore]:
        table = Table()
        async with factory(lambda: OwnRecordStore(table)) as new:
            yield new


# ------------------------------------------------------------------------------------------------- directories


def files(path: Path) -> list[str]:
    return sorted(each.name for each in path.glob("sink/*"))


async def test_record_that_is_not_replaced_is_one_file(tmp_path: Path) -> None:
    """The first state of a record has its name, and the record's body is all that the file has."""
    store = DirectoryRecordStore(tmp_path)
    await store.open()
    await store.swap(NAME, FIRST, None)
    assert files(tmp_path) == ["0.json"]
    assert (tmp_path / NAME).read_bytes() == FIRST
    await store.delete(NAME)
    assert files(tmp_path) == []


async def test_record_that_is_replaced_keeps_its_latest_states(tmp_path: Path) -> None:
    """Of all the states of a record the last are kept, and no temporary file stays."""
    store = DirectoryRecordStore(tmp_path)
    await store.open()
    version = None
    for number in range(20):
        version = await store.swap(NAME, b"%d" % number, version)
    assert files(tmp_path) == sorted(f"0.json#{number}" for number in range(13, 21))


async def test_listing_between_two_states_misses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that others replace while its directory is listed is neither missing nor stored as a first one."""
    store = DirectoryRecordStore(tmp_path)
    await store.open()
    version = await store.swap(NAME, FIRST, None)
    real, is_replacing = os.listdir, False

    def replaced_meanwhile(path: Any) -> list[str]:
        nonlocal is_replacing
        if is_replacing:
            return real(path)
        is_replacing = True
        before = real(path)
        thread = threading.Thread(target=lambda: asyncio.run(replace_again(tmp_path)))
        thread.start()
        thread.join()
        is_replacing = False
        # What comes or goes while a directory is read may be missing in what was read.
        return [name for name in before if os.path.exists(os.path.join(path, name))]

    monkeypatch.setattr(os, "listdir", replaced_meanwhile)
    assert await store.read(NAME) is not None
    assert await store.swap(NAME, SECOND, version) is None
    assert await store.swap(NAME, THIRD, None) is None


async def replace_again(path: Path) -> None:
    other = DirectoryRecordStore(path)
    await other.open()
    found = await other.read(NAME)
    assert found is not None
    assert await other.swap(NAME, found.body + b"1", found.version)


# ------------------------------------------------------------------------------------------------- SQLite


async def test_open_of_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A file that is no database is named, and does not change."""
    path = tmp_path / "records.db"
    path.write_bytes(b"this is no database, and long enough to be taken for one" * 20)
    store = sqlite_store(path)
    with pytest.raises(ConfigurationError, match=r"records\.db: .*not a database"):
        await store.open()
    await store.aclose()


async def test_call_that_the_file_fails_raises_store_error(tmp_path: Path) -> None:
    """A table that is gone is a failure of the store, which names the record."""
    path = tmp_path / "records.db"
    store = sqlite_store(path)
    await store.open()
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE record")
    connection.close()
    for call in (store.read(NAME), store.swap(NAME, FIRST, None), store.delete(NAME)):
        with pytest.raises(StoreError, match=f"{NAME}: .*: no such table"):
            await call
    await store.aclose()


# --------------------------------------------------------------------------------------------------- blobs


class Interrupted(AioHttpTransport):  # type: ignore[misc]  # azure.core has no types for it
    """The SDK's own transport, which counts requests; where `lose` is set, the answer to the next write is lost."""

    lose = False
    requests = 0

    async def send(self, request: Any, **config: Any) -> Any:
        self.requests += 1
        answer = await super().send(request, **config)
        if request.method in ("PUT", "DELETE") and self.lose:
            self.lose = False
            raise ServiceResponseError("the answer was lost")
        return answer


@pytest.mark.parametrize("directory", ["", DIRECTORY])
async def test_call_whose_answer_was_lost_can_be_repeated(
    azurite: Azurite, container_name: str, directory: str
) -> None:
    """A store is not in its own way: what was done and not answered succeeds when it is repeated."""
    transport, name = Interrupted(), directory + NAME
    async with (
        ContainerClient.from_connection_string(
            azurite.connection_string, container_name, transport=transport
        ) as client,
        opened(blob_store(azurite, client)) as store,
    ):
        version = None
        for body in (FIRST, SECOND, FIRST):
            transport.lose = True
            with pytest.raises(StoreError, match="the answer was lost"):
                await store.swap(name, body, version)
            version = await store.swap(name, body, version)
            found = await store.read(name)
            assert found == StoredRecord(body, version or "")
        transport.lose = True
        with pytest.raises(StoreError, match="the answer was lost"):
            await store.delete(name, version)
        assert await store.delete(name, version)


@pytest.mark.parametrize("directory", ["", DIRECTORY])
async def test_record_under_a_foreign_blob_lease_is_no_lost_race(
    azurite: Azurite, container_name: str, directory: str
) -> None:
    """A record that another client has leased can be read; replacing it fails, and says what to do."""
    name = directory + NAME
    async with (
        ContainerClient.from_connection_string(azurite.connection_string, container_name) as client,
        opened(blob_store(azurite, client)) as store,
    ):
        version = await store.swap(name, FIRST, None)
        await BlobLeaseClient(client.get_blob_client(f"app/{name}")).acquire()
        for call in (store.swap(name, SECOND, version), store.delete(name, version), store.delete(name)):
            with pytest.raises(StoreError, match=f"app/{name} has a blob lease held elsewhere: break that blob lease"):
                await call
        assert await store.swap(name, SECOND, None) is None
        assert await store.read(name) == StoredRecord(FIRST, version or "")


async def test_records_in_metadata_are_listed_with_their_bodies(azurite: Azurite, container_name: str) -> None:
    """A listing of them is one request, a record is an empty blob, and its members are the blob's metadata."""
    transport = Interrupted()
    async with (
        ContainerClient.from_connection_string(
            azurite.connection_string, container_name, transport=transport
        ) as client,
        opened(blob_store(azurite, client)) as store,
    ):
        bodies = {f"{DIRECTORY}a/{number}": encode_texts({"offset": str(number), "epoch": "7"}) for number in range(5)}
        versions = {name: await store.swap(name, body, None) for name, body in bodies.items()}
        before = transport.requests
        listed = await store.list(DIRECTORY)
        assert transport.requests == before + 1
        assert listed == {name: ListedRecord(versions[name] or "", body) for name, body in bodies.items()}
        stream = await client.download_blob(f"app/{DIRECTORY}a/3")
        assert await stream.readall() == b""
        assert stream.properties.metadata == {"offset": "3", "epoch": "7"}


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_body_of_the_largest_size_is_kept(azurite: Azurite, container_name: str) -> None:
    """The largest body is stored and read in one request each, and one byte more is refused."""
    async with opened(blob_store(azurite, container_name)) as store:
        largest = os.urandom(MAX_BODY)
        version = await store.swap(NAME, largest, None)
        assert await store.read(NAME) == StoredRecord(largest, version or "")
        with pytest.raises(ValueError, match="1 to"):
            await store.swap(NAME, largest + b"1", version)
