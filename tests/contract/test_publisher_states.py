"""The contract of publishers' state stores, over every implementation, and what is particular to each."""

from __future__ import annotations

import asyncio
import base64
import json
import sqlite3
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from azure.core.exceptions import ServiceResponseError
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob.aio import ContainerClient

pytest.register_assert_rewrite("eventpump.testing.conformance.publisher_state")

from eventpump.core.claim import PublisherIntent, PublisherState  # noqa: E402
from eventpump.errors import ConfigurationError, StoreError  # noqa: E402
from eventpump.interfaces import ConsumerScope, StoredRecord  # noqa: E402
from eventpump.storage.leases.sqlite import SqliteLeaseStore  # noqa: E402
from eventpump.storage.publisher_states.blob import BlobPublisherStateStore  # noqa: E402
from eventpump.storage.publisher_states.form import decode_state  # noqa: E402
from eventpump.storage.publisher_states.memory import MemoryPublisherStateStore  # noqa: E402
from eventpump.storage.publisher_states.sqlite import SqlitePublisherStateStore  # noqa: E402
from eventpump.testing.conformance.publisher_state import (  # noqa: E402
    FIRST,
    LARGEST,
    NAME,
    SECOND,
    NewStore,
    PublisherStateStoreContract,
)
from tests.support.azurite import Azurite  # noqa: E402
from tests.support.leases import unheld  # noqa: E402

if TYPE_CHECKING:
    from eventpump.interfaces import PublisherStateStore

SCOPE = ConsumerScope("example.servicebus.windows.net", "telemetry", "$Default")


@asynccontextmanager
async def factory(make: Callable[[], PublisherStateStore]) -> AsyncIterator[NewStore]:
    """A function that makes stores, all closed at the end."""
    async with AsyncExitStack() as stack:

        def new_store() -> PublisherStateStore:
            store = make()
            stack.push_async_callback(store.aclose)
            return store

        yield new_store


class TestMemoryPublisherStateStore(PublisherStateStoreContract):
    """In memory."""

    @pytest.fixture
    async def new_store(self) -> AsyncIterator[NewStore]:
        truth: dict[str, StoredRecord] = {}
        async with factory(lambda: MemoryPublisherStateStore(truth)) as new:
            yield new


class TestSqlitePublisherStateStore(PublisherStateStoreContract):
    """In one file."""

    @pytest.fixture
    async def new_store(self, tmp_path: Path) -> AsyncIterator[NewStore]:
        async with factory(lambda: SqlitePublisherStateStore(tmp_path / "states.db")) as new:
            yield new


class TestBlobPublisherStateStore(PublisherStateStoreContract):
    """On real Azurite."""

    @pytest.fixture
    async def new_store(self, azurite: Azurite, container_name: str) -> AsyncIterator[NewStore]:
        def make() -> PublisherStateStore:
            return BlobPublisherStateStore(container_name, connection_string=azurite.connection_string, create=True)

        async with factory(make) as new:
            yield new


# ------------------------------------------------------------------------------------------------- SQLite


@asynccontextmanager
async def sqlite(path: Path, *, busy_timeout: float = 5.0) -> AsyncIterator[SqlitePublisherStateStore]:
    store = SqlitePublisherStateStore(path, busy_timeout=busy_timeout)
    try:
        await store.open()
        yield store
    finally:
        await store.aclose()


async def test_write_survives_power_loss(tmp_path: Path) -> None:
    """The file is in WAL mode and every write reaches the disk: a lost state would publish everything again."""
    async with sqlite(tmp_path / "states.db") as store:
        await store.write_state(NAME, "0", FIRST, None)

        def modes(connection: sqlite3.Connection) -> list[object]:
            return [connection.execute(f"PRAGMA {each}").fetchone()[0] for each in ("journal_mode", "synchronous")]

        assert await store._records._file.thread.run(modes) == ["wal", 2]  # type: ignore[attr-defined]  # of SQLite


async def test_file_keeps_leases_and_states_together(tmp_path: Path) -> None:
    """A file may serve both kinds of store, whichever makes it."""
    for number, first in enumerate(("leases", "states")):
        path = tmp_path / f"{number}.db"
        leases = SqliteLeaseStore(path)
        try:
            if first == "leases":
                await leases.open(SCOPE)
            async with sqlite(path) as states:
                await states.write_state(NAME, "0", FIRST, None)
                if first == "states":
                    await leases.open(SCOPE)
                await leases.ensure(["0"])
                assert await leases.acquire(unheld("0"), "a") is not None
                found = await states.read_state(NAME, "0")
                assert found is not None
                assert found.state == FIRST
        finally:
            await leases.aclose()


async def test_write_to_a_locked_file_raises_store_error(tmp_path: Path) -> None:
    """While another process holds the file a write fails with StoreError; afterwards it succeeds."""
    path = tmp_path / "states.db"
    async with sqlite(path, busy_timeout=0.05) as store:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match=r"write state of partition 0: .*states\.db: database is locked"):
                await store.write_state(NAME, "0", FIRST, None)
            other.execute("ROLLBACK")
        assert (await store.write_state(NAME, "0", FIRST, None)) == await store.read_state(NAME, "0")


@pytest.mark.parametrize("content", [b"this is no database, and long enough to be taken for one" * 20, None])
async def test_open_of_a_file_that_cannot_be_used_raises(tmp_path: Path, content: bytes | None) -> None:
    """A file of another kind is refused by name, and in a missing directory the store fails; no thread stays."""
    path = tmp_path / "missing" / "states.db" if content is None else tmp_path / "states.db"
    if content is not None:
        path.write_bytes(content)
    store = SqlitePublisherStateStore(path)
    with pytest.raises(StoreError if content is None else ConfigurationError, match=r"states\.db: "):
        await store.open()
    await store.aclose()
    assert not [each for each in threading.enumerate() if each.name.startswith("eventpump publisher state")]


async def test_read_of_a_row_that_is_no_state_raises(tmp_path: Path) -> None:
    """What another program wrote into the table is not taken for a state."""
    path = tmp_path / "states.db"
    async with sqlite(path) as store:
        await store.write_state(NAME, "0", FIRST, None)
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("""UPDATE record SET body = replace(body, '"owner_level": 0', '"owner_level": "high"')""")
        with pytest.raises(StoreError, match="owner_level"):
            await store.read_state(NAME, "0")


@pytest.mark.parametrize("table", ["publisher", "publisher_state"])
async def test_file_of_an_earlier_version_is_refused(tmp_path: Path, table: str) -> None:
    """A file with the tables of an earlier version is named, with what to do, and stays as it is."""
    path = tmp_path / "states.db"
    with closing(sqlite3.connect(path)) as former, former:
        former.execute(f"CREATE TABLE {table} (name TEXT, partition_id TEXT)")
    store = SqlitePublisherStateStore(path)
    with pytest.raises(ConfigurationError, match=f"states.db: has the table {table} of an earlier version .*file"):
        await store.open()
    await store.aclose()
    with closing(sqlite3.connect(path)) as former:
        assert former.execute("SELECT name FROM sqlite_master").fetchall() == [(table,)]


def test_state_of_the_first_version_is_read() -> None:
    """A body of the version before levels were claimed says nothing of what was published or closed."""
    raw = json.dumps({"version": 1, "producer_id": 7, "owner_level": 2, "start": 41}).encode()
    assert decode_state(raw) == PublisherState(7, 2, 41)


# --------------------------------------------------------------------------------------------------- blobs


async def test_state_is_a_small_json_object(azurite: Azurite, container_name: str) -> None:
    """The blob's name has name and partition, and its body is JSON that a person can read."""
    async with ContainerClient.from_connection_string(azurite.connection_string, container_name) as raw:
        store = BlobPublisherStateStore(raw, prefix="app/", create=True)
        await store.open()
        await store.write_state("a/b.", "3", replace(SECOND, intent=PublisherIntent(2, tail=9)), None)
        (name,) = [blob.name async for blob in raw.list_blobs()]
        assert name == "app/a%2Fb%2E/3.json"
        stream = await raw.get_blob_client(name).download_blob()
        assert json.loads(await stream.readall()) == {
            "version": 2,
            "producer_id": 7,
            "owner_level": 1,
            "start": 41,
            "published": 42,
            "has_published": True,
            "is_clean": False,
            "is_stamped": False,
            "claim": "a1",
            "intent": {"owner_level": 2, "tail": 9, "number": None},
        }
        assert stream.properties.content_settings.content_type == "application/json"


class Interrupted(AioHttpTransport):  # type: ignore[misc]  # azure.core has no types for it
    """The SDK's own transport; where `lose` is set, the answer to the next write is lost."""

    lose = False
    later: Callable[[], Any] | None = None

    async def send(self, request: Any, **config: Any) -> Any:
        if request.method == "PUT" and self.later is not None:
            later, self.later = self.later, None
            await later()
        answer = await super().send(request, **config)
        if request.method == "PUT" and self.lose:
            self.lose = False
            raise ServiceResponseError("the answer was lost")
        return answer


async def test_write_whose_answer_was_lost_can_be_repeated(azurite: Azurite, container_name: str) -> None:
    """A store is not in its own way: after a write that was stored and not answered, the same succeeds."""
    transport = Interrupted()
    client = ContainerClient.from_connection_string(azurite.connection_string, container_name, transport=transport)
    async with client:
        store = BlobPublisherStateStore(client, create=True)
        await store.open()
        former = None
        for state in (FIRST, SECOND, FIRST):
            transport.lose = True
            with pytest.raises(StoreError, match="the answer was lost"):
                await store.write_state(NAME, "0", state, former)
            written = await store.write_state(NAME, "0", state, former)
            assert written is not None
            assert await store.read_state(NAME, "0") == written
            former = written


async def test_write_after_a_change_in_between_is_refused(azurite: Azurite, container_name: str) -> None:
    """The ETag decides, at the service: a change made while the write was on its way is not overwritten."""
    transport = Interrupted()
    client = ContainerClient.from_connection_string(azurite.connection_string, container_name, transport=transport)
    other = BlobPublisherStateStore(container_name, connection_string=azurite.connection_string, create=True)
    async with client:
        store = BlobPublisherStateStore(client, create=True)
        await store.open()
        await other.open()
        first = await store.write_state(NAME, "0", FIRST, None)
        transport.later = lambda: other.write_state(NAME, "0", LARGEST, first)
        assert await store.write_state(NAME, "0", SECOND, first) is None
        found = await other.read_state(NAME, "0")
        assert found is not None
        assert found.state == LARGEST
    await other.aclose()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"version": 3}', "version"),
        (b'{"version": 2, "producer_id": 7, "owner_level": 1, "start": 0}', "has_published"),
        (b'{"version": 1, "producer_id": 7, "owner_level": 1}', "start"),
        (b'{"version": 1, "producer_id": true, "owner_level": 1, "start": 0}', "producer_id"),
        (b'{"version": 1, "producer_id": 7, "owner_level": 1.5, "start": 0}', "owner_level"),
    ],
)
async def test_blob_that_is_no_state_raises(azurite: Azurite, container_name: str, body: bytes, says: str) -> None:
    """A blob of another kind is neither read as a state nor overwritten."""
    with pytest.raises(ValueError, match=says):
        decode_state(body)
    async with ContainerClient.from_connection_string(azurite.connection_string, container_name) as raw:
        store = BlobPublisherStateStore(raw, create=True)
        await store.open()
        await raw.upload_blob(f"publishers/{NAME}/0.json", body)
        with pytest.raises(StoreError, match=says):
            await store.read_state(NAME, "0")
        with pytest.raises(StoreError, match=says):
            await store.write_state(NAME, "0", FIRST, None)
        assert await (await raw.download_blob(f"publishers/{NAME}/0.json")).readall() == body


SECRET = "c2VjcmV0LXNpZ25hdHVyZS1vZi1vdXJz"
KEY = base64.b64encode(b"a key that must not be seen").decode()


async def test_error_shows_no_secret() -> None:
    """What the service or the HTTP client quotes of our credential is not in the error, its causes, or a traceback."""

    async def refuse(request: web.Request) -> web.Response:
        text = f"<Error><Code>AuthenticationFailed</Code><Message>The signature {SECRET} is wrong</Message></Error>"
        headers = {"x-ms-error-code": "AuthenticationFailed"}
        return web.Response(status=403, text=text, content_type="application/xml", headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", refuse)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/account"
        for account_url, credential in ((url, KEY), (f"{url}?sv=2021-08-06&sig={SECRET}", None)):
            store = BlobPublisherStateStore("states", account_url=account_url, credential=credential)
            with pytest.raises(ConfigurationError, match="HTTP status 403 AuthenticationFailed") as caught:
                await store.open()
            shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(store)
            assert SECRET not in shown
            assert KEY not in shown
            await store.aclose()
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "connection_string"),
        ({"connection_string": f"AccountName=x;AccountKey={SECRET}=;Blob"}, "connection_string"),
        ({"account_url": "https://account", "call_timeout": 0}, "call_timeout"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], field: str) -> None:
    """Each wrong value gives one ConfigurationError that names it, and shows nothing secret."""
    with pytest.raises(ConfigurationError) as caught:
        BlobPublisherStateStore("states", **options)
    assert caught.value.field == field
    assert SECRET not in "".join(traceback.format_exception(caught.value))


async def test_write_of_one_partition_does_not_wait_for_others(azurite: Azurite, container_name: str) -> None:
    """A write that the service holds up holds up no other partition's."""
    transport = Interrupted()
    client = ContainerClient.from_connection_string(azurite.connection_string, container_name, transport=transport)
    async with client:
        store = BlobPublisherStateStore(client, create=True)
        await store.open()
        held, go_on = asyncio.Event(), asyncio.Event()

        async def hold() -> None:
            held.set()
            await go_on.wait()

        transport.later = hold
        slow = asyncio.create_task(store.write_state(NAME, "0", FIRST, None))
        await held.wait()
        await store.write_state(NAME, "1", SECOND, None)
        assert not slow.done()
        go_on.set()
        await slow
        assert await store.read_state(NAME, "0") == slow.result()
