"""The contract of `RecordStore`, as a pytest class.

Subclass it under a name that starts with `Test`, in a module with a fixture `new_store` that gives a function making
stores on the same data (the fixture closes them), and with pytest-asyncio in auto mode. For assertions that explain
themselves call, before the import, `pytest.register_assert_rewrite("eventpump.testing.conformance.records")`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import pytest

from eventpump.errors import ClosedError, EventPumpError, StoreError
from eventpump.testing.conformance import error_of

if TYPE_CHECKING:
    from eventpump.interfaces import RecordStore

NewStore: TypeAlias = "Callable[[], RecordStore]"

NAME = "sink/0.json"
_STEPS = 60


def body(text: str) -> bytes:
    """Return a body. It is one that a store in blobs' metadata can have too."""
    return json.dumps({"text": ascii(text)}, separators=(",", ":")).encode()


FIRST, SECOND, THIRD = body("1"), body("2"), body("3")


class RecordStoreContract:
    """The guarantees of `RecordStore`."""

    directory = ""
    """What the names of all records begin with."""

    def named(self, name: str) -> str:
        """Return the name of a record."""
        return self.directory + name

    # ---- opening and closing

    async def test_call_before_open_raises_store_error(self, new_store: NewStore) -> None:
        """A store that is not open fails with a StoreError."""
        for error in await self._errors(new_store()):
            assert isinstance(error, StoreError)

    async def test_open_and_close_twice_are_fine(self, new_store: NewStore) -> None:
        """A store may be opened twice and closed twice, and closed before it was opened; then it raises ClosedError."""
        store = await _open(new_store)
        await store.open()
        await store.aclose()
        await store.aclose()
        for error in await self._errors(store):
            assert isinstance(error, ClosedError)
        never_opened = new_store()
        await never_opened.aclose()
        assert isinstance(await error_of(never_opened.open()), ClosedError)

    async def _errors(self, store: RecordStore) -> list[EventPumpError | None]:
        name = self.named(NAME)
        calls = (store.read(name), store.swap(name, FIRST, None), store.list(self.directory), store.delete(name))
        return [await error_of(call) for call in calls]

    async def test_open_by_several_stores_at_once_succeeds(self, new_store: NewStore) -> None:
        """Several stores that create the same container, file or directory at the same time all succeed."""
        stores = [new_store() for _ in range(6)]
        await asyncio.gather(*(store.open() for store in stores))
        version = await _stored(stores[0], self.named(NAME), FIRST, None)
        for store in stores:
            found = await store.read(self.named(NAME))
            assert found is not None
            assert (found.body, found.version) == (FIRST, version)

    # ---- names and bodies

    async def test_records_of_different_names_are_separate(self, new_store: NewStore) -> None:
        """No two names share a record, however alike they look."""
        store = await _open(new_store)
        parts = ["a", "A", "a%2F0", "%", "é", "e\u0301", "a b", "-", "_", ".a", "a.b", "~", "n" * 200, "+", "&"]
        bodies = {self.named(f"{part}/{file}"): body(f"{part}/{file}") for part in parts for file in ("0", "00", "~0")}
        await asyncio.gather(*(store.swap(name, each, None) for name, each in bodies.items()))
        after = await _open(new_store)
        found = {name: await after.read(name) for name in bodies}
        assert {name: each and each.body for name, each in found.items()} == bodies
        assert sorted(await after.list(self.directory)) == sorted(bodies)

    @pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/.", "a.", "a\\b", "a?", "a#b"])
    async def test_name_that_is_none_is_refused(self, new_store: NewStore, name: str) -> None:
        """A name leads to a record, in every store, or is refused as it is."""
        store = await _open(new_store)
        for call in (store.read(name), store.swap(name, FIRST, None), store.delete(name)):
            with pytest.raises(ValueError, match=r"."):
                await call

    async def test_prefix_or_body_that_is_none_is_refused(self, new_store: NewStore) -> None:
        """A listing is one of a directory, and no body is empty."""
        store = await _open(new_store)
        with pytest.raises(ValueError, match=r"."):
            await store.list("sink")
        with pytest.raises(ValueError, match=r"."):
            await store.swap(self.named(NAME), b"", None)

    # ---- reading and replacing

    async def test_swap_replaces_the_version_that_is_given(self, new_store: NewStore) -> None:
        """Each state of a record replaces the one before it, by this store and by the next, and has a new version."""
        store, name = await _open(new_store), self.named(NAME)
        assert await store.read(name) is None
        version, versions = None, set()
        for each in (FIRST, SECOND, THIRD, FIRST, *(body(str(number)) for number in range(12))):
            version = await _stored(store, name, each, version)
            versions.add(version)
            store, former = await _open(new_store), store
            await former.aclose()
            found = await store.read(name)
            assert found is not None
            assert (found.body, found.version) == (each, version)
        assert len(versions) == 16

    async def test_swap_of_another_version_stores_nothing(self, new_store: NewStore) -> None:
        """A store that has not read a change cannot undo it, nor where an equal body is there again."""
        store, other, name = await _open(new_store), await _open(new_store), self.named(NAME)
        first = await _stored(store, name, FIRST, None)
        second = await _stored(other, name, SECOND, first)
        third = await _stored(store, name, FIRST, second)
        for stale in (None, first, second, "another"):
            for each in (SECOND, THIRD):
                assert await other.swap(name, each, stale) is None
        found = await other.read(name)
        assert found is not None
        assert (found.body, found.version) == (FIRST, third)

    async def test_swap_of_a_record_that_is_not_there_stores_nothing(self, new_store: NewStore) -> None:
        """A version of a record that was deleted, or of another one, replaces nothing."""
        store, name = await _open(new_store), self.named(NAME)
        elsewhere = await _stored(store, self.named("sink/1"), FIRST, None)
        assert await store.swap(name, SECOND, elsewhere) is None
        former = await _stored(store, name, FIRST, None)
        assert await store.delete(name, former)
        assert await store.swap(name, SECOND, former) is None
        assert await store.read(name) is None
        again = await _stored(store, name, FIRST, None)
        assert again != former
        assert await store.swap(name, SECOND, former) is None

    async def test_swap_of_the_body_that_is_there_succeeds(self, new_store: NewStore) -> None:
        """The same swap again, after it was stored, succeeds: its first answer may have been lost."""
        store, other, name = await _open(new_store), await _open(new_store), self.named(NAME)
        first = await _stored(store, name, FIRST, None)
        assert await store.swap(name, FIRST, None) == first
        second = await _stored(store, name, SECOND, first)
        for each in (store, other):
            assert await each.swap(name, SECOND, first) == second
        assert await _stored(other, name, THIRD, second) is not None

    async def test_swap_by_many_at_once_succeeds_once(self, new_store: NewStore) -> None:
        """Of stores that replace one state at once, one succeeds, and each of them then reads that one's."""
        stores = [await _open(new_store) for _ in range(5)]
        former = None
        for turn in range(4):
            bodies = [body(f"{turn}-{number}") for number in range(5)]
            swapped = await asyncio.gather(
                *(store.swap(self.named(NAME), each, former) for store, each in zip(stores, bodies, strict=True))
            )
            ((won, former),) = [(bodies[at], version) for at, version in enumerate(swapped) if version is not None]
            for store in stores:
                found = await store.read(self.named(NAME))
                assert found is not None
                assert (found.body, found.version) == (won, former)

    async def test_swaps_that_count_lose_nothing(self, new_store: NewStore) -> None:
        """Stores that each add to a number as often as they succeed leave their sum."""
        name, least = self.named(NAME), 4

        async def add(number: int) -> int:
            store, added = await _open(new_store), 0
            while added < least:
                found = await store.read(name)
                count, version = (json.loads(found.body), found.version) if found else ({"count": "0"}, None)
                mine = {"by": f"{number}.{added}", "count": str(int(count["count"]) + 1)}
                encoded = json.dumps(mine, separators=(",", ":")).encode()
                added += await store.swap(name, encoded, version) is not None
            return added

        added = await asyncio.gather(*(add(number) for number in range(4)))
        found = await (await _open(new_store)).read(name)
        assert found is not None
        assert int(json.loads(found.body)["count"]) == sum(added)

    # ---- listing and deleting

    async def test_list_returns_the_records_of_a_directory(self, new_store: NewStore) -> None:
        """A listing has the records whose names begin with the prefix, their versions, and their bodies or none."""
        store = await _open(new_store)
        assert await store.list(self.named("sink/")) == {}
        names = [self.named(name) for name in ("sink/b", "sink/a", "sink/a.c", "sink/deep/er", "sink2/d", "sin/e")]
        versions = {name: await _stored(store, name, body(name), None) for name in names}
        versions[names[0]] = await _stored(store, names[0], FIRST, versions[names[0]])
        listed = await store.list(self.named("sink/"))
        assert {name: each.version for name, each in listed.items()} == {name: versions[name] for name in names[:4]}
        assert {each.body for each in listed.values()} in ({None}, {FIRST, *map(body, names[1:4])})
        assert sorted(await store.list(self.named("sin/"))) == names[5:]
        assert sorted(await store.list(self.directory)) == sorted(names)
        assert await store.swap(names[1], SECOND, listed[names[1]].version) is not None

    async def test_delete_removes_a_record(self, new_store: NewStore) -> None:
        """A deleted record is neither read nor listed, and may be stored again. What is not there is deleted."""
        store, other, name = await _open(new_store), await _open(new_store), self.named(NAME)
        assert await store.delete(name)
        assert await store.delete(name, "another")
        for _ in range(2):
            version: str | None = await _stored(store, name, FIRST, None)
            version = await _stored(store, name, SECOND, version)
            for given in (version, None):
                assert await other.delete(name, given)
                assert await store.read(name) is None
                assert await store.list(self.directory) == {}
                assert await store.delete(name, given)
                version = await _stored(store, name, THIRD, None)
            assert await other.delete(name)

    async def test_delete_of_another_version_deletes_nothing(self, new_store: NewStore) -> None:
        """A record is deleted only as it was read."""
        store, other, name = await _open(new_store), await _open(new_store), self.named(NAME)
        first = await _stored(store, name, FIRST, None)
        second = await _stored(other, name, SECOND, first)
        assert not await store.delete(name, first)
        found = await store.read(name)
        assert found is not None
        assert found.version == second
        assert await store.delete(name, second)

    # ---- cancellation, and any order

    async def test_swap_that_is_cancelled_can_be_repeated(self, new_store: NewStore) -> None:
        """Wherever a swap is cancelled, it is stored or not; the same one then succeeds, and is not undone later."""
        for turns in range(12):
            store, name = await _open(new_store), self.named(f"sink/{turns}")
            first = await _stored(store, name, FIRST, None)
            attempt = asyncio.ensure_future(store.swap(name, SECOND, first))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attempt
            second = await _stored(store, name, SECOND, first)
            third = await _stored(store, name, THIRD, second)
            await store.aclose()
            found = await (await _open(new_store)).read(name)
            assert found is not None
            assert (found.body, found.version) == (THIRD, third), f"cancelled after {turns} turns"

    @pytest.mark.parametrize("seed", range(8))
    async def test_calls_at_random_agree_with_a_model(self, new_store: NewStore, seed: int) -> None:
        """Whatever is called in any order, by any of three stores, does to the records what it does to a dictionary."""
        rng = random.Random(seed)
        stores = [await _open(new_store) for _ in range(3)]
        names = [self.named(name) for name in ("a/0", "a/1", "b/0")]
        records: dict[str, tuple[bytes, str]] = {}
        versions: list[str | None] = [None]
        for _ in range(_STEPS):
            store, name = rng.choice(stores), rng.choice(names)
            there = records.get(name)
            version = there[1] if there is not None and rng.random() < 0.6 else rng.choice(versions)
            match rng.choice(("read", "swap", "swap", "swap", "list", "delete")):
                case "read":
                    found = await store.read(name)
                    assert (None if found is None else (found.body, found.version)) == there
                case "swap":
                    new = body(str(rng.randrange(4)))
                    swapped = await store.swap(name, new, version)
                    if version == (None if there is None else there[1]):
                        assert swapped is not None
                        assert swapped not in versions
                        records[name] = new, swapped
                        versions.append(swapped)
                    else:
                        assert swapped == (there[1] if there is not None and there[0] == new else None)
                case "list":
                    prefix = self.named(rng.choice(("a/", "b/")))
                    listed = {each: record.version for each, record in (await store.list(prefix)).items()}
                    expected = {each: kept[1] for each, kept in records.items() if each.startswith(prefix)}
                    assert listed == expected
                case "delete":
                    given = None if rng.random() < 0.2 else version
                    if given is None or there is None or there[1] == given:
                        assert await store.delete(name, given)
                        records.pop(name, None)
                    else:
                        assert not await store.delete(name, given)


async def _open(new_store: NewStore) -> RecordStore:
    store = new_store()
    await store.open()
    return store


async def _stored(store: RecordStore, name: str, new: bytes, replaces: str | None) -> str:
    """Store a record, which must succeed."""
    version = await store.swap(name, new, replaces)
    assert version is not None
    return version
