"""The contract of the sink's ledger stores, in a directory and on real Azurite, and what is particular to each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from azure.storage.blob.aio import ContainerClient

from eventpump.errors import ClosedError, ConfigurationError, EventPumpError, StoreError
from eventpump.spark.sink.records import directory_name
from eventpump.storage.ledgers.blob import BlobLedger
from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.ledgers.interface import LedgerStore
from eventpump.storage.ledgers.opening import open_ledger
from eventpump.storage.rows.blob import BlobRowStore
from eventpump.testing.proxy import Direction, FaultProxy
from tests.support.azurite import Azurite

NewStore: TypeAlias = Callable[[], LedgerStore]

NAME = "sink/000000000000.0.plan.json"
FIRST = b'{"first": 1}'
SECOND = b'{"second": 2}'
SECRET = "c2VjcmV0LW9mLW91cnM"
PROGRAM = Path(__file__).with_name("dying_writer.py")


async def error_of(call: Awaitable[object]) -> EventPumpError | None:
    try:
        await call
    except EventPumpError as error:
        return error
    return None


async def opened(new_store: NewStore) -> LedgerStore:
    store = new_store()
    await store.open()
    return store


class LedgerStoreContract:
    """The promises of `LedgerStore`."""

    async def test_call_before_open_raises_store_error(self, new_store: NewStore) -> None:
        """A store that is not open fails with a StoreError."""
        store = new_store()
        for call in (store.create(NAME, FIRST), store.read(NAME), store.list("sink"), store.delete(NAME)):
            assert isinstance(await error_of(call), StoreError)

    async def test_open_and_close_twice_are_fine(self, new_store: NewStore) -> None:
        """A store may be opened twice and closed twice, and closed before it was opened; then it raises ClosedError."""
        store = await opened(new_store)
        await store.open()
        await store.aclose()
        await store.aclose()
        for call in (store.create(NAME, FIRST), store.read(NAME), store.list("sink"), store.delete(NAME), store.open()):
            assert isinstance(await error_of(call), ClosedError)
        never_opened = new_store()
        await never_opened.aclose()
        assert isinstance(await error_of(never_opened.open()), ClosedError)

    async def test_open_by_several_stores_at_once_succeeds(self, new_store: NewStore) -> None:
        """Several drivers that make the same directory or container at the same time all succeed."""
        stores = [new_store() for _ in range(6)]
        await asyncio.gather(*(store.open() for store in stores))
        assert await stores[0].create(NAME, FIRST)
        assert [await store.read(NAME) for store in stores] == [FIRST] * 6

    async def test_store_that_is_not_open_can_be_pickled(self, new_store: NewStore) -> None:
        """A store that is not open may be pickled, and is then on the same truth."""
        travelled: LedgerStore = pickle.loads(pickle.dumps(new_store()))
        try:
            await travelled.open()
            assert await travelled.create(NAME, FIRST)
        finally:
            await travelled.aclose()
        assert await (await opened(new_store)).read(NAME) == FIRST

    async def test_read_returns_what_any_store_created(self, new_store: NewStore) -> None:
        """What was created is read whole, by this store and the next, whatever its size; what was not is None."""
        store = await opened(new_store)
        bodies = {f"sink/{size}": bytes(range(256)) * (size // 256) for size in (256, 100 * 1024, 1024 * 1024)}
        for name, body in bodies.items():
            assert await store.create(name, body)
        await store.aclose()
        after = await opened(new_store)
        assert {name: await after.read(name) for name in bodies} == bodies
        assert await after.read("sink/other") is None
        assert await after.read("other/256") is None

    async def test_create_of_an_existing_record_changes_nothing(self, new_store: NewStore) -> None:
        """A second record of a name is not created, and changes nothing; the same one again counts as created."""
        store, other = await opened(new_store), await opened(new_store)
        assert await store.create(NAME, FIRST)
        assert not await other.create(NAME, SECOND)
        assert not await store.create(NAME, b" ")
        assert await store.read(NAME) == await other.read(NAME) == FIRST
        assert await store.create(NAME, FIRST)
        assert await other.create(NAME, FIRST)

    async def test_create_by_many_at_once_succeeds_once(self, new_store: NewStore) -> None:
        """Of drivers that create the same record at once, one does, and all read its record."""
        stores = [await opened(new_store) for _ in range(8)]
        for turn in range(5):
            bodies = [b"%d" % number for number in range(len(stores))]
            name = f"sink/{turn}"
            created = await asyncio.gather(*(s.create(name, body) for s, body in zip(stores, bodies, strict=True)))
            assert created.count(True) == 1
            kept = bodies[created.index(True)]
            assert [await store.read(name) for store in stores] == [kept] * len(stores)

    async def test_list_returns_the_records_of_a_directory_sorted(self, new_store: NewStore) -> None:
        """Records are listed by their directory, sorted, and nothing else is; none where there is no directory."""
        store = await opened(new_store)
        assert await store.list("sink") == []
        for name in ("sink/b", "sink/a", "sink/a.c", "sink2/d", "sin/e"):
            await store.create(name, FIRST)
        assert await store.list("sink") == ["a", "a.c", "b"]
        assert await store.list("sin") == ["e"]

    async def test_delete_removes_a_record(self, new_store: NewStore) -> None:
        """A deleted record is neither read nor listed, and may be created again; deleting what is not there is fine."""
        store = await opened(new_store)
        await store.delete(NAME)
        await store.create(NAME, FIRST)
        await store.delete(NAME)
        assert await store.read(NAME) is None
        assert await store.list("sink") == []
        assert await store.create(NAME, SECOND)

    async def test_records_of_different_sinks_are_separate(self, new_store: NewStore) -> None:
        """No two sinks share a record, however alike their ids look."""
        store = await opened(new_store)
        ids = ["a", "A", "a.", ".", "..", "a/0", "a%2F0", "a\\0", "é", "e\u0301", "a b", "a?b#c", "n" * 200]
        names = {each: f"{directory_name(each)}/0" for each in ids}
        for each, name in names.items():
            assert await store.create(name, each.encode())
        after = await opened(new_store)
        assert {each: await after.read(name) for each, name in names.items()} == {each: each.encode() for each in ids}

    @pytest.mark.parametrize(
        "name", ["", "record", "/record", "sink/", "../record", "sink/..", "sink/a/b", "sink\\a/b"]
    )
    async def test_record_name_outside_the_ledger_is_refused(self, new_store: NewStore, name: str) -> None:
        """A name leads to a file in a directory of the ledger, or nowhere."""
        store = await opened(new_store)
        with pytest.raises(ValueError, match="is not a record name"):
            await store.create(name, FIRST)

    async def test_create_that_is_cancelled_can_be_repeated(self, new_store: NewStore) -> None:
        """Wherever a create is cancelled, the record is there whole or not at all; the same create then succeeds."""
        for turns in range(12):
            store = await opened(new_store)
            name = f"sink/{turns}"
            attempt = asyncio.ensure_future(store.create(name, FIRST))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attempt
            assert await store.read(name) in (None, FIRST)
            assert await store.create(name, FIRST), f"cancelled after {turns} turns"


@asynccontextmanager
async def factory(make: NewStore) -> AsyncIterator[NewStore]:
    """A function that makes stores, all closed at the end."""
    async with AsyncExitStack() as stack:

        def new_store() -> LedgerStore:
            store = make()
            stack.push_async_callback(store.aclose)
            return store

        yield new_store


class TestDirectoryLedger(LedgerStoreContract):
    """In a directory that does not exist at first."""

    @pytest.fixture
    async def new_store(self, tmp_path: Path) -> AsyncIterator[NewStore]:
        async with factory(lambda: DirectoryLedger(tmp_path / "deep" / "ledgers")) as new:
            yield new


class TestBlobLedger(LedgerStoreContract):
    """On real Azurite."""

    @pytest.fixture
    async def new_store(self, azurite: Azurite, container_name: str) -> AsyncIterator[NewStore]:
        def make() -> LedgerStore:
            return BlobLedger(container_name, connection_string=azurite.connection_string, create=True)

        async with factory(make) as new:
            yield new


# ------------------------------------------------------------------------------------------------- directories


def temporaries(path: Path) -> Iterator[Path]:
    return path.glob("sink/#tmp-*")


async def test_create_killed_at_any_call_leaves_a_whole_record_or_none(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed before and after every call it makes, a writer leaves the record whole or not at all, and no obstacle.

    The record is synchronised with the disk before it has its name, and its directory after. What the dead left is
    never listed, and deleted once it is old.
    """
    step = 1 if request.config.getoption("--long") else 4
    command = [sys.executable, str(PROGRAM), "ledger", str(tmp_path), str(step)]
    result = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True, cwd=PROGRAM.parents[2]
    )
    *killed, calls = result.stdout.splitlines()
    body = b"0123456789abcdef" * 4096
    assert set(killed) == {"killed"}
    order = [each for each in calls.split() if each in ("write", "flush", "fsync", "link", "unlink")]
    assert order == ["write", "flush", "fsync", "link", "fsync", "unlink"]

    store = DirectoryLedger(tmp_path)
    await store.open()
    names = [f"{number:06d}" for number in range(0, step * len(killed) + 1, step)]
    records = [await store.read(f"sink/{name}") for name in names]
    assert set(records) == {None, body}
    assert records.index(body) > len(killed) // 3
    assert all(records[records.index(body) :]), "a braver child had less success"
    assert await store.list("sink") == names[records.index(body) :]
    left = list(temporaries(tmp_path))
    assert len(left) > 1
    assert {each.stat().st_size for each in left} <= {0, len(body)}
    for name in names:
        assert await store.create(f"sink/{name}", body)
    old = left[::2]
    for each in old:
        os.utime(each, (time.time() - 7200, time.time() - 7200))
    await DirectoryLedger(tmp_path).open()
    assert set(temporaries(tmp_path)) == set(left) - set(old)


async def test_open_logs_a_directory_that_it_creates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A misspelled path shows: the ledger there is new. One that exists is opened in silence."""
    for _ in range(2):
        await DirectoryLedger(tmp_path / "deep" / "ledger").open()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"ledger {tmp_path / 'deep' / 'ledger'}: there was no such directory, and it was created" in record.message


async def test_create_without_hard_links_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system has no hard links, the error names the record and what a ledger takes; nothing is left."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = DirectoryLedger(tmp_path)
    await store.open()
    with pytest.raises(StoreError, match=rf"create {NAME} in .*takes a file system with hard links, or"):
        await store.create(NAME, FIRST)
    assert list(temporaries(tmp_path)) == []


async def test_ledger_where_no_directory_can_be_opened_keeps_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, which opens files only and names no flag for directories."""
    real = os.open

    def refuse(path: Any, *flags: Any) -> int:
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        return real(path, *flags)

    with monkeypatch.context() as windows:
        windows.setattr(os, "open", refuse)
        windows.delattr(os, "O_DIRECTORY")
        store = DirectoryLedger(tmp_path / "ledger")
        await store.open()
        assert await store.create(NAME, FIRST)
        assert await store.read(NAME) == FIRST
        await DirectoryLedger(tmp_path / "ledger").open()


async def test_open_of_a_path_that_is_a_file_raises_store_error(tmp_path: Path) -> None:
    """What cannot be a directory is a StoreError that names the ledger."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        await DirectoryLedger(tmp_path / "file" / "ledger").open()


# ------------------------------------------------------------------------------------------------- blobs


@asynccontextmanager
async def blob_ledger(proxy: FaultProxy, azurite: Azurite, container: str) -> AsyncIterator[BlobLedger]:
    there = azurite.connection_string.replace(
        f":{azurite.blob_endpoint.split(':')[-1]}", f":{proxy.port}/devstoreaccount1"
    )
    store = BlobLedger(container, connection_string=there, call_timeout=2.0, create=True)
    try:
        await store.open()
        yield store
    finally:
        await store.aclose()


async def test_create_with_a_torn_request_stores_nothing(azurite: Azurite, container_name: str) -> None:
    """A writer that dies in the middle of its request leaves no record; the next one creates it."""
    port = int(azurite.blob_endpoint.split(":")[-1].split("/")[0])
    body = b"0123456789abcdef" * 2**16
    async with FaultProxy(port) as proxy, blob_ledger(proxy, azurite, container_name) as store:
        before = proxy.bytes_forwarded(Direction.TO_SERVICE)

        async def cut_within() -> None:
            while proxy.bytes_forwarded(Direction.TO_SERVICE) < before + len(body) // 8:
                await proxy._network.change()
            proxy.refuse()  # the HTTP client would try once more
            proxy.cut()

        cutting = asyncio.create_task(cut_within())
        with pytest.raises(StoreError, match="create"):
            await store.create(NAME, body)
        await cutting
        assert proxy.bytes_forwarded(Direction.TO_SERVICE) < before + len(body)
        proxy.restore()
        assert await store.read(NAME) is None
        assert await store.create(NAME, body)
        assert await store.read(NAME) == body


async def test_create_whose_answer_was_lost_can_be_repeated(azurite: Azurite, container_name: str) -> None:
    """A create that was done and not answered fails; the same create then says that the record is there."""
    port = int(azurite.blob_endpoint.split(":")[-1].split("/")[0])
    async with FaultProxy(port) as proxy, blob_ledger(proxy, azurite, container_name) as store:
        other = BlobLedger(container_name, connection_string=azurite.connection_string, create=True)
        await other.open()
        proxy.stall(Direction.TO_CLIENT)
        with pytest.raises(StoreError, match="create"):
            await store.create(NAME, FIRST)
        proxy.cut()
        proxy.restore()
        assert await other.read(NAME) == FIRST
        assert await store.create(NAME, FIRST)
        assert not await store.create(NAME, SECOND)
        await other.aclose()


async def test_record_is_one_blob_named_by_prefix_sink_and_record(azurite: Azurite, container_name: str) -> None:
    """A record's blob has the prefix, the sink and the record in its name, and nothing but the record in it."""
    store = BlobLedger(container_name, connection_string=azurite.connection_string, prefix="app/", create=True)
    async with ContainerClient.from_connection_string(azurite.connection_string, container_name) as raw:
        await store.open()
        await store.create(f"{directory_name('a b')}/0", FIRST)
        names = [blob.name async for blob in raw.list_blobs()]
        assert names == ["app/a%20b/0"]
        assert await (await raw.download_blob(names[0])).readall() == FIRST
    await store.aclose()


async def test_container_url_with_a_signature_is_a_ledger(azurite: Azurite, container_name: str) -> None:
    """A URL with a signature names container and prefix; and neither repr nor errors show the signature."""
    made = BlobLedger.of_url(f"https://account.blob.core.windows.net/container/some/where?sv=2024&sig={SECRET}")
    assert repr(made) == "BlobLedger('container', prefix='some/where/')"
    with pytest.raises(ConfigurationError) as caught:
        BlobLedger.of_url(f"https://account.blob.core.windows.net/?sig={SECRET}")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    url = f"{azurite.blob_endpoint}/{container_name}/deep?sv=2021-08-06&sig={SECRET}"
    store = open_ledger(url)
    with pytest.raises(ConfigurationError, match="HTTP status 403") as refused:
        await store.open()
    assert SECRET not in "".join(traceback.format_exception(refused.value)) + repr(store)
    await store.aclose()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "connection_string"),
        ({"connection_string": f"AccountName=x;AccountKey={SECRET};Blob"}, "connection_string"),
        ({"account_url": "https://account", "call_timeout": 0}, "call_timeout"),
        ({"account_url": "https://account", "credential": SECRET}, "credential"),
    ],
)
@pytest.mark.parametrize("made", [BlobLedger, BlobRowStore])
def test_options_that_cannot_work_are_refused(
    made: type[BlobLedger | BlobRowStore], options: dict[str, Any], field: str
) -> None:
    """Each wrong value gives one ConfigurationError that names it, and shows nothing secret."""
    with pytest.raises(ConfigurationError) as caught:
        made("somewhere", **options)
    assert caught.value.field == field
    assert SECRET not in "".join(traceback.format_exception(caught.value))


async def test_credential_by_import_name_is_made_at_open(azurite: Azurite, container_name: str) -> None:
    """The credential's callable is called where the store is opened; one that is not there is named."""
    account = azurite.blob_endpoint
    key = "tests.contract.test_ledger_stores:account_key"
    store = BlobLedger(container_name, account_url=account, credential=key, create=True)
    await store.open()
    assert await store.create(NAME, FIRST)
    await store.aclose()
    missing = BlobLedger(container_name, account_url=account, credential="tests.contract.test_ledger_stores:nobody")
    with pytest.raises(ConfigurationError, match="nobody cannot be imported"):
        await missing.open()


def account_key() -> str:
    """Make the credential."""
    return Azurite().account_key


@pytest.mark.parametrize("text", ["", "abfss://container@account.dfs.core.windows.net/x", "dbfs:/x", "s3://bucket/x"])
def test_ledger_elsewhere_is_refused(text: str) -> None:
    """A ledger elsewhere is a configuration error, before anything is done."""
    with pytest.raises(ConfigurationError, match="ledger"):
        open_ledger(text)


@pytest.mark.parametrize("below", ["", "deeper/still"])
async def test_ledger_at_a_file_is_refused_by_name(tmp_path: Path, below: str) -> None:
    """A path that is a file, or leads through one, is named as what it is; the file stays."""
    file = tmp_path / "ledger"
    file.write_text("mine")
    with pytest.raises(StoreError, match=r"open ledger .*ledger is not a directory; a ledger is one"):
        await DirectoryLedger(file / below).open()
    assert file.read_text() == "mine"


def test_ledger_of_a_path_is_a_directory(tmp_path: Path) -> None:
    """Paths and their texts are directories; a store is taken as it is."""
    assert repr(open_ledger(tmp_path)) == repr(open_ledger(str(tmp_path))) == f"DirectoryLedger({str(tmp_path)!r})"
    store = DirectoryLedger(tmp_path)
    assert open_ledger(store) is store
