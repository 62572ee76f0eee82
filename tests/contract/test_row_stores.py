"""The contract of the stores of rows, in memory, in a directory and on real Azurite, and what is particular to each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import pytest
from azure.core.exceptions import ServiceResponseError
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from azure.storage.blob.aio import ContainerClient
from pyarrow import fs

from eventpump.errors import ClosedError, ConfigurationError, EventPumpError, StoreError
from eventpump.storage.ledgers.blob import BlobLedger
from eventpump.storage.ledgers.directory import DirectoryLedger
from eventpump.storage.ledgers.interface import LedgerStore
from eventpump.storage.ledgers.opening import open_ledger
from eventpump.storage.rows.blob import BlobRowStore
from eventpump.storage.rows.directory import DirectoryRowStore
from eventpump.storage.rows.filesystem import FileSystemRowStore
from eventpump.storage.rows.interface import RowStore
from eventpump.storage.rows.opening import open_rows
from tests.support.azurite import Azurite
from tests.support.memory_rows import MemoryRowStore
from tests.support.seeds import seeds

_T = TypeVar("_T")
NewStore: TypeAlias = Callable[[], RowStore]

TOKEN = "sink/run.1"
STEM = "sink/000000000007"
MIB = 2**20
SECRET = "c2VjcmV0LW9mLW91cnM"
PROGRAM = Path(__file__).with_name("dying_writer.py")


async def error_of(call: Awaitable[object]) -> EventPumpError | None:
    try:
        await call
    except EventPumpError as error:
        return error
    return None


def every_call(store: RowStore) -> list[Awaitable[object]]:
    name = f"{STEM}.0"
    return [
        store.begin(TOKEN),
        store.check(TOKEN),
        store.write(STEM, [b"1"]),
        store.read(name, 0, 1),
        store.list("sink"),
        store.delete([name]),
    ]


async def opened(new_store: NewStore) -> RowStore:
    store = new_store()
    await store.open()
    return store


async def begun(new_store: NewStore) -> RowStore:
    """The store of a driver."""
    store = await opened(new_store)
    await store.begin(TOKEN)
    return store


class RowStoreContract:
    """The promises of `RowStore`."""

    largest = 9 * MIB + 1

    async def test_call_before_open_raises_store_error(self, new_store: NewStore) -> None:
        """A store that is not open fails with a StoreError."""
        for call in every_call(new_store()):
            assert isinstance(await error_of(call), StoreError)

    async def test_open_and_close_twice_are_fine(self, new_store: NewStore) -> None:
        """A store may be opened twice and closed twice, and closed before it was opened; then it raises ClosedError."""
        store = await begun(new_store)
        await store.open()
        await store.aclose()
        await store.aclose()
        for call in (*every_call(store), store.open()):
            assert isinstance(await error_of(call), ClosedError)
        never_opened = new_store()
        await never_opened.aclose()
        assert isinstance(await error_of(never_opened.open()), ClosedError)

    async def test_executor_that_does_not_see_what_the_driver_wrote_is_refused(self, new_store: NewStore) -> None:
        """A store sees the token of a run once the run's driver has written it, and that of no other run."""
        driver, executor = await opened(new_store), await opened(new_store)
        for each in (driver, executor):
            with pytest.raises(ConfigurationError, match=r"rows: this executor does not see in .*that the driver and"):
                await each.check(TOKEN)
        await driver.begin(TOKEN)
        await executor.check(TOKEN)
        for other in ("sink/run.2", "sink2/run.1"):
            assert isinstance(await error_of(executor.check(other)), ConfigurationError)
        assert await executor.list("sink") == {"run.1": 0}

    async def test_begin_of_several_drivers_and_of_one_again_succeeds(self, new_store: NewStore) -> None:
        """Drivers that begin at once, or a second time, all succeed, and no object is touched."""
        stores = [await opened(new_store) for _ in range(5)]
        await asyncio.gather(*(store.begin(f"sink/run.{number}") for number, store in enumerate(stores)))
        name = await stores[0].write(STEM, [b"rows"])
        await stores[1].begin("sink/run.1")
        assert await stores[2].list("sink") == {name.removeprefix("sink/"): 4, **{f"run.{n}": 0 for n in range(5)}}
        assert await stores[3].read(name, 0, 9) == b"rows"

    @pytest.mark.parametrize("size", [0, 1, 1000, MIB, MIB + 1, 4 * MIB, 9 * MIB + 1])
    async def test_object_is_what_its_parts_were(self, new_store: NewStore, size: int) -> None:
        """An object of any size is read whole, by this store and the next; a range beyond its end has what is there."""
        content = Random(size).randbytes(size)
        store = await begun(new_store)
        name = await store.write(STEM, [content[:5], memoryview(content)[5:700], b"", content[700:]])
        assert await store.list("sink") == {"run.1": 0, name.removeprefix("sink/"): size}
        await store.aclose()
        after = await opened(new_store)
        assert await after.read(name, 0, max(size, 1)) == content
        for offset in (0, size // 2, max(size - 1, 0), size, size + 1, size + 5 * MIB):
            for length in (1, 700, 5 * MIB):
                assert await after.read(name, offset, length) == content[offset : offset + length]

    async def test_attempts_of_one_task_write_objects_of_their_own(self, new_store: NewStore) -> None:
        """Attempts at one time, of one store or of several, never have one name, and each object is its attempt's."""
        stores = [await begun(new_store), await opened(new_store)]
        contents = [b"%d" % number * 100 for number in range(40)]
        names = await asyncio.gather(*(stores[n % 2].write(STEM, [each]) for n, each in enumerate(contents)))
        assert len({*names}) == len(names)
        assert all(name.startswith(f"{STEM}.") for name in names)
        assert [await stores[0].read(name, 0, 1000) for name in names] == contents

    async def test_object_that_is_not_there_is_none(self, new_store: NewStore) -> None:
        """What was never written, is in another directory, or was deleted is None, at any offset and size."""
        store = await begun(new_store)
        name = await store.write(STEM, [b"1" * 100])
        await store.delete([name])
        for each in (name, f"{STEM}.0", "other/1.0"):
            for offset, size in ((0, 1), (50, 9 * MIB)):
                assert await store.read(each, offset, size) is None

    async def test_write_where_the_driver_created_nothing_fails(self, new_store: NewStore) -> None:
        """Executors never create what the objects are kept in, and leave nothing where it is not there."""
        store = await opened(new_store)
        assert isinstance(await error_of(store.write(STEM, [b"rows"])), StoreError)
        await store.begin(TOKEN)
        assert await store.list("sink") == {"run.1": 0}

    async def test_listing_and_deletion_are_of_one_directory(self, new_store: NewStore) -> None:
        """A listing has the files of a directory, and what is deleted is gone; what is not there is deleted too."""
        store, other = await begun(new_store), await opened(new_store)
        for directory in ("sink2", "sin"):
            await store.begin(f"{directory}/run.1")
        stems = [STEM, STEM, "sink/000000000008", "sink2/000000000007", "sin/000000000007"]
        names = [await store.write(stem, [stem.encode()]) for stem in stems]
        listed = await other.list("sink")
        assert listed == {"run.1": 0} | {name.removeprefix("sink/"): len(STEM) for name in names[:3]}
        await other.delete([f"sink/{file}" for file in listed if file.startswith("000000000007.")])
        assert await store.list("sink") == {"run.1": 0, names[2].removeprefix("sink/"): len(STEM)}
        await store.delete([*names[:3], "sink/never.0", "never/1.0"])
        await store.delete([])
        assert await other.list("sink") == {"run.1": 0}
        assert await other.read(names[3], 0, 99) == stems[3].encode()

    async def test_object_outlives_deletions_of_others_that_come_late(self, new_store: NewStore) -> None:
        """A deletion made from an old listing, as by a driver that was replaced, deletes nothing written since."""
        driver, former = await begun(new_store), await opened(new_store)
        old = await driver.write(STEM, [b"old"])
        listed = [f"sink/{file}" for file in await former.list("sink")]
        new = await driver.write(STEM, [b"new"])
        await former.delete(listed)
        assert await driver.read(old, 0, 9) is None
        assert await driver.read(new, 0, 9) == b"new"

    @pytest.mark.parametrize("name", ["", "object", "/object", "sink/", "../object", "sink/..", "a/b/c", "sink\\a/b"])
    async def test_name_outside_the_store_is_refused(self, new_store: NewStore, name: str) -> None:
        """A name leads to a file in a directory of the store, or nowhere."""
        store = await begun(new_store)
        for call in (store.begin(name), store.check(name), store.read(name, 0, 1), store.delete([TOKEN, name])):
            with pytest.raises(ValueError, match="is not a record name"):
                await call
        await store.check(TOKEN)
        if not name.endswith(("/", "..")):  # these are names, with what the store adds
            with pytest.raises(ValueError, match="is not a record name"):
                await store.write(name, [b"1"])

    async def test_write_that_is_cancelled_can_be_repeated(self, new_store: NewStore) -> None:
        """Wherever a write is cancelled, the next one writes an object of its own, and what is left can be deleted."""
        store = await begun(new_store)
        for turns in range(12):
            attempt = asyncio.ensure_future(store.write(STEM, [b"1" * self.largest]))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attempt
            name = await store.write(STEM, [b"2" * 1000])
            assert await store.read(name, 0, 2000) == b"2" * 1000, f"cancelled after {turns} turns"
        await store.delete([f"sink/{file}" for file in await store.list("sink")])
        await store.aclose()

    @seeds(3, of=40)
    async def test_calls_at_random_agree_with_a_model(self, new_store: NewStore, seed: int) -> None:
        """Whatever is called in any order, by any of three stores, does what it does to a dictionary."""
        rng = Random(seed)
        stores = [await begun(new_store), await opened(new_store), await opened(new_store)]
        await stores[0].begin("a/run")
        model = {TOKEN: b"", "a/run": b""}
        for _ in range(60):
            store, directory = rng.choice(stores), rng.choice(("sink", "a"))
            match rng.choice(("write", "write", "read", "read", "read", "list", "delete")):
                case "write":
                    parts = [rng.randbytes(rng.choice((0, 1, 10, 5000))) for _ in range(rng.randrange(4))]
                    name = await store.write(f"{directory}/{rng.randrange(3)}", parts)
                    assert name not in model
                    model[name] = b"".join(parts)
                case "read":
                    name = rng.choice([*model, "a/none"])
                    offset, size = rng.randrange(12_000), rng.randrange(1, 6000)
                    kept = model.get(name)
                    expected = None if kept is None else kept[offset : offset + size]
                    assert await store.read(name, offset, size) == expected
                case "list":
                    found = {f"{directory}/{file}": size for file, size in (await store.list(directory)).items()}
                    assert found == {name: len(b) for name, b in model.items() if name.startswith(f"{directory}/")}
                case "delete":
                    names = rng.sample([*model, "a/none"], min(2, len(model)))
                    await store.delete(names)
                    for name in names:
                        model.pop(name, None)


class SharedRowStoreContract(RowStoreContract):
    """The promises of stores that processes share."""

    async def test_store_that_is_not_open_can_be_pickled(self, new_store: NewStore) -> None:
        """A store that is not open may be pickled, and is then on the same truth; its text has no secret."""
        driver = await begun(new_store)
        travelled: RowStore = pickle.loads(pickle.dumps(new_store()))
        assert repr(travelled) == repr(driver)
        try:
            await travelled.open()
            await travelled.check(TOKEN)
            name = await travelled.write(STEM, [b"rows"])
        finally:
            await travelled.aclose()
        assert await driver.read(name, 0, 9) == b"rows"


@asynccontextmanager
async def factory(make: NewStore) -> AsyncIterator[NewStore]:
    """A function that makes stores, all closed at the end."""
    async with AsyncExitStack() as stack:

        def new_store() -> RowStore:
            store = make()
            stack.push_async_callback(store.aclose)
            return store

        yield new_store


class TestMemoryRowStore(RowStoreContract):
    """In memory."""

    @pytest.fixture
    async def new_store(self) -> AsyncIterator[NewStore]:
        objects: dict[str, dict[str, bytes]] = {}
        async with factory(lambda: MemoryRowStore(objects)) as new:
            yield new


class TestDirectoryRowStore(SharedRowStoreContract):
    """In a directory that does not exist at first."""

    @pytest.fixture
    async def new_store(self, tmp_path: Path) -> AsyncIterator[NewStore]:
        async with factory(lambda: DirectoryRowStore(tmp_path / "deep" / "rows")) as new:
            yield new


class TestFileSystemRowStore(SharedRowStoreContract):
    """In a file system of pyarrow: local files."""

    @pytest.fixture
    async def new_store(self, tmp_path: Path) -> AsyncIterator[NewStore]:
        async with factory(lambda: FileSystemRowStore.of_uri((tmp_path / "deep" / "rows").as_uri())) as new:
            yield new


class Unreliable(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """The local files, which fail as often as is set, at the first steps of an operation.

    Args:
        error: What they fail with.
    """

    _local = fs.LocalFileSystem()

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.failures = 0

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise self._error
        return getattr(self._local, name)(*args, **options)

    def get_type_name(self) -> str:
        return "unreliable"

    def get_file_info(self, paths: list[str]) -> Any:
        return self._call("get_file_info", paths)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        return self._call("get_file_info", selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._call("create_dir", path, recursive=recursive)

    def delete_file(self, path: str) -> None:
        self._call("delete_file", path)

    def open_input_file(self, path: str) -> Any:
        return self._call("open_input_file", path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._call("open_output_stream", path, compression=None)

    def normalize_path(self, path: str) -> str:
        return path

    delete_dir = delete_dir_contents = delete_root_dir_contents = get_type_name
    move = copy_file = open_input_stream = open_append_stream = get_type_name


class TestUnreliableFileSystem:
    """In a file system of pyarrow that fails now and then, as an object store's client does after its own retries."""

    async def test_operations_are_tried_again(self, tmp_path: Path) -> None:
        """Every operation that fails once succeeds when it is tried again, and nothing is done twice."""
        files = Unreliable(OSError("connection closed"))
        store = FileSystemRowStore(fs.PyFileSystem(files), str(tmp_path))
        await store.open()

        async def failing_once(call: Awaitable[_T]) -> _T:
            files.failures = 1
            result = await call
            assert files.failures == 0
            return result

        await failing_once(store.begin(TOKEN))
        await failing_once(store.check(TOKEN))
        name = await failing_once(store.write(STEM, [b"ro", b"ws"]))
        assert await failing_once(store.read(name, 1, 2)) == b"ow"
        assert await failing_once(store.list("sink")) == {"run.1": 0, name.removeprefix("sink/"): 4}
        await failing_once(store.delete([name, f"{STEM}.none"]))
        assert await store.list("sink") == {"run.1": 0}
        await store.aclose()

    @pytest.mark.parametrize(("error", "tries"), [(OSError("broken"), 4), (PermissionError("refused"), 1)])
    async def test_operation_that_goes_on_failing_raises(self, tmp_path: Path, error: Exception, tries: int) -> None:
        """After three more tries, or at once where another one does not help, the last error is raised."""
        files = Unreliable(error)
        store = FileSystemRowStore(fs.PyFileSystem(files), str(tmp_path))
        await store.open()
        files.failures = 99
        with pytest.raises(StoreError, match=str(error)):
            await store.read(f"{STEM}.0", 0, 1)
        assert 99 - files.failures == tries
        await store.aclose()


class TestAzureFileSystemRowStore(SharedRowStoreContract):
    """In a file system of pyarrow: on real Azurite."""

    @pytest.fixture
    async def new_store(self, azurite: Azurite, container_name: str) -> AsyncIterator[NewStore]:
        host = urlsplit(azurite.blob_endpoint).netloc
        places = {f"{kind}_storage_authority": host for kind in ("blob", "dfs")}
        schemes = {f"{kind}_storage_scheme": "http" for kind in ("blob", "dfs")}
        files = fs.AzureFileSystem("devstoreaccount1", account_key=azurite.account_key, **places, **schemes)
        async with factory(lambda: FileSystemRowStore(files, f"{container_name}/rows")) as new:
            yield new


class TestBlobRowStore(SharedRowStoreContract):
    """On real Azurite."""

    @pytest.fixture
    async def new_store(self, azurite: Azurite, container_name: str) -> AsyncIterator[NewStore]:
        def make() -> RowStore:
            return BlobRowStore(container_name, connection_string=azurite.connection_string, create=True)

        async with factory(make) as new:
            yield new


# ------------------------------------------------------------------------------------------------- directories


async def test_write_killed_at_any_call_leaves_a_part_that_nobody_reads(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Killed before and after every call it makes, a writer has returned no name; what it leaves can be deleted.

    An object is on the disk before its directory is, and both are before its name is returned.
    """
    step = 1 if request.config.getoption("--long") else 4
    command = [sys.executable, str(PROGRAM), "rows", str(tmp_path), str(step)]
    result = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=True, cwd=PROGRAM.parents[2]
    )
    *killed, calls = result.stdout.splitlines()
    assert set(killed) == {"killed"}
    order = [each for each in calls.split() if each in ("writelines", "flush", "fsync", "unlink")]
    assert order == ["writelines", "flush", "fsync", "fsync"]

    store = DirectoryRowStore(tmp_path)
    await store.open()
    listed = await store.list("sink")
    assert listed.pop("run") == 0
    size = 16 * 4096
    assert len(listed) > 1
    assert {*listed.values()} <= {0, size}
    for file, found in listed.items():
        raw = await store.read(f"sink/{file}", 0, size)
        assert raw is not None
        assert len(raw) == found
    await store.delete([f"sink/{file}" for file in listed])
    assert await store.list("sink") == {"run": 0}


@pytest.mark.parametrize("broken", ["fsync", "open"])
async def test_write_that_the_disk_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """An object that may not be on the disk is none: the error names it, and the next write succeeds."""
    store = DirectoryRowStore(tmp_path)
    await store.open()
    await store.begin(TOKEN)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, broken, refuse)  # os.open: the directory, to synchronize it
        with pytest.raises(StoreError, match=rf"write {STEM}\.[0-9a-f]{{32}} in row store .*: No space left"):
            await store.write(STEM, [b"rows"])
    assert await store.list("sink") == {"run.1": 0}
    assert await store.read(await store.write(STEM, [b"rows"]), 0, 9) == b"rows"


async def test_object_that_was_damaged_is_read_as_it_is(tmp_path: Path) -> None:
    """A file that was cut is as long as it is, in the listing and in what is read: who reads it checks."""
    store = DirectoryRowStore(tmp_path)
    await store.open()
    await store.begin(TOKEN)
    name = await store.write(STEM, [b"0123456789"])
    os.truncate(tmp_path / name, 6)
    assert (await store.list("sink"))[name.removeprefix("sink/")] == 6
    assert await store.read(name, 4, 6) == b"45"
    assert await store.read(name, 6, 4) == b""


async def test_rows_where_no_directory_can_be_opened_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, which opens files only and names no flag for directories."""
    monkeypatch.delattr(os, "O_DIRECTORY")
    store = DirectoryRowStore(tmp_path / "rows")
    await store.open()
    await store.begin(TOKEN)
    assert await store.read(await store.write(STEM, [b"rows"]), 0, 9) == b"rows"


async def test_begin_at_a_file_is_refused_by_name(tmp_path: Path) -> None:
    """A path that is a file is named as what it is."""
    (tmp_path / "rows").write_text("mine")
    store = DirectoryRowStore(tmp_path / "rows")
    await store.open()
    with pytest.raises(StoreError, match=r"begin sink/run\.1 in row store .*rows is not a directory; a row store is"):
        await store.begin(TOKEN)


# ------------------------------------------------------------------------------------------------- blobs


class Account:
    """Counts the requests to a storage account, and loses the answer to the next write of a kind.

    Args:
        monkeypatch: Puts it before the SDK's transport.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests = 0
        self.lost: str | None = None
        real = AioHttpTransport.send

        async def send(transport: Any, request: Any, **config: Any) -> Any:
            self.requests += 1
            answer = await real(transport, request, **config)
            kind = request.method + (" block list" if "comp=blocklist" in request.url else "")
            if kind == self.lost:
                self.lost = None
                raise ServiceResponseError("the answer was lost")
            return answer

        monkeypatch.setattr(AioHttpTransport, "send", send)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    return Account(monkeypatch)


@asynccontextmanager
async def blob_rows(azurite: Azurite, container: str, **options: Any) -> AsyncIterator[BlobRowStore]:
    store = BlobRowStore(container, connection_string=azurite.connection_string, create=True, **options)
    try:
        await store.open()
        await store.begin(TOKEN)
        yield store
    finally:
        await store.aclose()


@pytest.mark.parametrize(("lost", "size"), [("PUT", 1000), ("PUT", 9 * MIB), ("PUT block list", 9 * MIB)])
async def test_write_whose_answer_was_lost_writes_another_object(
    azurite: Azurite, container_name: str, account: Account, lost: str, size: int
) -> None:
    """What was written and not answered is an object that nobody names: it is whole, or not there, and is listed."""
    async with blob_rows(azurite, container_name) as store:
        account.lost = lost
        with pytest.raises(StoreError, match="the answer was lost"):
            await store.write(STEM, [b"1" * size])
        left = await store.list("sink")
        name = await store.write(STEM, [b"1" * size])
        assert name.removeprefix("sink/") not in left
        assert left.pop("run.1") == 0
        is_block = lost == "PUT" and size > MIB
        assert [*left.values()] == ([] if is_block else [size])
        account.lost = "DELETE"
        names = [f"sink/{file}" for file in await store.list("sink")]
        with pytest.raises(StoreError, match="the answer was lost"):
            await store.delete(names)
        await store.delete(names)
        assert await store.list("sink") == {}


async def test_requests_are_few(azurite: Azurite, container_name: str, account: Account) -> None:
    """A small object is one request; a large one has one for each 4 MiB, and one; a range has one for each 4 MiB."""
    async with blob_rows(azurite, container_name) as store:

        async def counted(call: Awaitable[Any]) -> tuple[int, Any]:
            before = account.requests
            found = await call
            return account.requests - before, found

        assert (await counted(store.check(TOKEN)))[0] == 1
        assert (await counted(store.write(STEM, [b"1" * MIB])))[0] == 1
        requests, name = await counted(store.write(STEM, [b"1" * (32 * MIB)]))
        assert requests == 9
        assert (await counted(store.read(name, 7, 4 * MIB)))[0] == 1
        assert (await counted(store.read(name, 7, 9 * MIB)))[0] == 3
        assert (await counted(store.list("sink")))[0] == 1


async def test_object_is_one_blob_named_by_prefix_and_name(azurite: Azurite, container_name: str) -> None:
    """An object's blob has the prefix and its name, and nothing but the object in it."""
    async with (
        ContainerClient.from_connection_string(azurite.connection_string, container_name) as raw,
        blob_rows(azurite, container_name, prefix="app/") as store,
    ):
        await raw.upload_blob("sink/0.0", b"another's")
        name = await store.write(STEM, [b"rows"])
        assert await (await raw.download_blob(f"app/{name}")).readall() == b"rows"
        assert await store.list("sink") == {"run.1": 0, name.removeprefix("sink/"): 4}


async def test_begin_without_the_container_says_so(azurite: Azurite, container_name: str) -> None:
    """A container that is missing is an error that names it; executors report it too."""
    store = BlobRowStore(container_name, connection_string=azurite.connection_string)
    await store.open()
    with pytest.raises(ConfigurationError, match=f"there is no container {container_name}"):
        await store.begin(TOKEN)
    assert isinstance(await error_of(store.check(TOKEN)), EventPumpError)
    await store.aclose()


# ------------------------------------------------------------------------------------------------- from what is given


async def test_container_url_with_a_signature_is_a_row_store(azurite: Azurite, container_name: str) -> None:
    """A URL with a signature names container and prefix; and neither repr nor errors show the signature."""
    ledger = DirectoryLedger("ledger")
    made = open_rows(f"https://account.blob.core.windows.net/container/some/where?sv=2024&sig={SECRET}", ledger)
    assert repr(made) == repr(pickle.loads(pickle.dumps(made))) == "BlobRowStore('container', prefix='some/where/')"
    with pytest.raises(ConfigurationError, match="rows: the URL must name a container") as caught:
        open_rows(f"https://account.blob.core.windows.net/?sig={SECRET}", ledger)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    store = open_rows(f"{azurite.blob_endpoint}/{container_name}/deep?sv=2021-08-06&sig={SECRET}", ledger)
    await store.open()
    for call in every_call(store):
        error = await error_of(call)
        assert error is not None
        assert "403" in str(error)
        assert SECRET not in "".join(traceback.format_exception(error))
    await store.aclose()


async def test_signature_in_the_url_is_sent(azurite: Azurite, container_name: str) -> None:
    """A URL with a signature that permits it is enough, for rows and for a ledger with rows beside it."""
    async with blob_rows(azurite, container_name):
        signature = generate_container_sas(
            "devstoreaccount1",
            container_name,
            account_key=azurite.account_key,
            permission=ContainerSasPermissions(read=True, write=True, delete=True, list=True, create=True),
            expiry=datetime.now(UTC) + timedelta(hours=1),
        )
        url = f"{azurite.blob_endpoint}/{container_name}/deep?{signature}"
        await kept_beside(open_ledger(url))
        store = open_rows(url, DirectoryLedger("ledger"))
        await store.open()
        await store.begin(TOKEN)
        assert await store.read(await store.write(STEM, [b"rows"]), 0, 9) == b"rows"
        await store.aclose()


@pytest.mark.parametrize("text", ["", "dbfs:/x", f"wasbs://container@account/x?sig={SECRET}"])
def test_rows_elsewhere_are_refused(text: str) -> None:
    """A place of another kind is a configuration error, before anything is done, that shows no secret."""
    with pytest.raises(ConfigurationError, match=r"rows: (must be a directory|pyarrow does not reach)") as caught:
        open_rows(text, DirectoryLedger("ledger"))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_rows_of_a_uri_are_in_a_file_system_of_pyarrow() -> None:
    """What pyarrow reaches is a place for rows; nothing is asked for before the store is used."""
    store = open_rows("abfss://container@account.dfs.core.windows.net/deep/er/", DirectoryLedger("ledger"))
    assert repr(store) == repr(pickle.loads(pickle.dumps(store))) == "FileSystemRowStore('abfs', 'container/deep/er')"


def test_rows_of_a_path_are_in_a_directory(tmp_path: Path) -> None:
    """Paths and their texts are directories; a store is taken as it is."""
    ledger = DirectoryLedger(tmp_path)
    for given in (tmp_path / "rows", str(tmp_path / "rows"), (tmp_path / "rows").as_uri()):
        assert repr(open_rows(given, ledger)) == f"DirectoryRowStore({str(tmp_path / 'rows')!r})"
    store = MemoryRowStore()
    assert open_rows(store, ledger) is store


async def kept_beside(ledger: LedgerStore) -> None:
    """A ledger does not see the rows beside it, nor does opening it harm them."""
    await ledger.open()
    rows = open_rows(None, ledger)
    await rows.open()
    await rows.begin(TOKEN)
    name = await rows.write(STEM, [b"rows"])
    assert await ledger.create("sink/0", b"{}")
    assert await ledger.list("sink") == ["0"]
    await ledger.open()
    assert await rows.read(name, 0, 9) == b"rows"
    assert set(await rows.list("sink")) == {"run.1", name.removeprefix("sink/")}
    await rows.aclose()
    await ledger.aclose()


async def test_rows_are_kept_beside_a_ledger_in_a_directory(tmp_path: Path) -> None:
    """By default rows are in a directory of the ledger's."""
    await kept_beside(DirectoryLedger(tmp_path))
    await DirectoryLedger(tmp_path).open()
    assert sorted(os.listdir(tmp_path)) == ["rows~", "sink"]


async def test_rows_are_kept_beside_a_ledger_in_a_container(azurite: Azurite, container_name: str) -> None:
    """By default rows are in the ledger's container, under its prefix, with its secrets."""
    await kept_beside(BlobLedger(container_name, connection_string=azurite.connection_string, create=True))
    async with ContainerClient.from_connection_string(azurite.connection_string, container_name) as raw:
        names = sorted([blob.name async for blob in raw.list_blobs()])
    assert names[0].startswith(f"ledgers/rows~/{STEM}.")
    assert names[1:] == ["ledgers/rows~/sink/run.1", "ledgers/sink/0"]


def test_rows_beside_a_ledger_of_ones_own_are_refused() -> None:
    """A ledger store of a user has no place for rows: it must be named."""

    class Own:
        pass

    with pytest.raises(ConfigurationError, match="rows: is required with a ledger store of one's own"):
        open_rows(None, Own())  # type: ignore[arg-type]  # none of its methods is called
