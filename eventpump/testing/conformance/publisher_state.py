"""What every `PublisherStateStore` must hold, as a pytest class.

Subclass it under a name that starts with `Test`, in a module with a fixture `new_store` that gives a function making
stores on the same truth (the fixture closes them), and with pytest-asyncio in auto mode. For assertions that explain
themselves call, before the import,
`pytest.register_assert_rewrite("eventpump.testing.conformance.publisher_state")`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from eventpump.errors import ClosedError, ConfigurationError, EventPumpError, StoreError
from eventpump.ports import PublisherState

if TYPE_CHECKING:
    from eventpump.ports import PublisherStateStore

NewStore: TypeAlias = "Callable[[], PublisherStateStore]"

NAME = "orders"
FIRST = PublisherState(producer_id=7, owner_level=0, start=-1)
SECOND = PublisherState(producer_id=7, owner_level=1, start=41)
LARGEST = PublisherState(producer_id=2**63 - 1, owner_level=2**15 - 1, start=2**31 - 1)
SMALLEST = PublisherState(producer_id=0, owner_level=0, start=-1)


class PublisherStateStoreContract:
    """The promises of `PublisherStateStore`."""

    # ---- opening and closing

    async def test_used_before_open_it_says_so(self, new_store: NewStore) -> None:
        """A store that is not open fails with a StoreError."""
        store = new_store()
        assert isinstance(await _error_of(store.read_state(NAME, "0")), StoreError)
        assert isinstance(await _error_of(store.write_state(NAME, "0", FIRST)), StoreError)

    async def test_opening_and_closing_twice_is_fine(self, new_store: NewStore) -> None:
        """A store may be opened twice and closed twice, and closed before it was opened; then it raises ClosedError."""
        store = await _open(new_store)
        await store.open()
        await store.aclose()
        await store.aclose()
        assert isinstance(await _error_of(store.read_state(NAME, "0")), ClosedError)
        assert isinstance(await _error_of(store.write_state(NAME, "0", FIRST)), ClosedError)
        never_opened = new_store()
        await never_opened.aclose()
        assert isinstance(await _error_of(never_opened.open()), ClosedError)

    async def test_stores_may_open_at_once(self, new_store: NewStore) -> None:
        """Several publishers that make the same container or file at the same time all succeed."""
        stores = [new_store() for _ in range(6)]
        await asyncio.gather(*(store.open() for store in stores))
        await stores[0].write_state(NAME, "0", FIRST)
        assert [await store.read_state(NAME, "0") for store in stores] == [FIRST] * 6

    # ---- reading and writing

    async def test_what_was_never_written_is_none(self, new_store: NewStore) -> None:
        """A name or a partition without a state has None."""
        store = await _open(new_store)
        await store.write_state(NAME, "0", FIRST)
        assert await store.read_state(NAME, "1") is None
        assert await store.read_state("others", "0") is None

    async def test_a_state_outlives_its_store(self, new_store: NewStore) -> None:
        """What was written is read again, whole, by this store and by the next."""
        store = await _open(new_store)
        for number, state in enumerate((FIRST, SECOND, LARGEST, SMALLEST)):
            await store.write_state(NAME, str(number), state)
        assert await store.read_state(NAME, "2") == LARGEST
        await store.aclose()
        after = await _open(new_store)
        assert [await after.read_state(NAME, str(number)) for number in range(4)] == [FIRST, SECOND, LARGEST, SMALLEST]

    async def test_a_state_takes_the_place_of_the_last(self, new_store: NewStore) -> None:
        """A store may write again what it wrote or read last, whatever the values, and the same twice."""
        store = await _open(new_store)
        for state in (FIRST, SECOND, SECOND, FIRST):
            await store.write_state(NAME, "0", state)
            assert await store.read_state(NAME, "0") == state
        after = await _open(new_store)
        assert await after.read_state(NAME, "0") == FIRST
        await after.write_state(NAME, "0", SECOND)
        assert await store.read_state(NAME, "0") == SECOND

    async def test_names_and_partitions_are_apart(self, new_store: NewStore) -> None:
        """No two names or partitions share a state, however alike they look."""
        store = await _open(new_store)
        names = ["a", "A", "a.", ".", "..", "a/0", "a%2F0", "a\\0", "é", "e\u0301", "a b", "a?b#c", "n" * 256]
        keys = [(name, partition_id) for name in names for partition_id in ("0", "1")]
        states = {key: replace(FIRST, producer_id=number) for number, key in enumerate(keys)}
        await asyncio.gather(*(store.write_state(*key, state) for key, state in states.items()))
        after = await _open(new_store)
        assert {key: await after.read_state(*key) for key in keys} == states

    async def test_what_cannot_be_kept_is_refused(self, new_store: NewStore) -> None:
        """A name that cannot be one, and a state outside the service's ranges, are the caller's mistakes."""
        store = await _open(new_store)
        for name in ("", "n" * 257, "a\0b", "a\n", "\ud800"):
            assert isinstance(await _error_of(store.read_state(name, "0")), ConfigurationError)
            assert isinstance(await _error_of(store.write_state(name, "0", FIRST)), ConfigurationError)
        for state in (
            replace(FIRST, producer_id=2**63),
            replace(FIRST, producer_id=-1),
            replace(FIRST, owner_level=2**15),
            replace(FIRST, start=2**31),
            replace(FIRST, start=-2),
        ):
            assert isinstance(await _error_of(store.write_state(NAME, "0", state)), ConfigurationError)
        assert await store.read_state(NAME, "0") is None

    # ---- two publishers of one name

    async def test_what_another_changed_is_not_overwritten(self, new_store: NewStore) -> None:
        """A publisher that does not know of a change cannot undo it, at the second try either; reading, it learns."""
        store, other = await _open(new_store), await _open(new_store)
        await store.write_state(NAME, "0", FIRST)
        assert await other.read_state(NAME, "0") == FIRST
        await other.write_state(NAME, "0", SECOND)
        for _ in range(2):
            error = await _error_of(store.write_state(NAME, "0", LARGEST))
            assert isinstance(error, StoreError)
            assert error.partition_id == "0"
            assert await other.read_state(NAME, "0") == SECOND
        assert await store.read_state(NAME, "0") == SECOND
        await store.write_state(NAME, "0", LARGEST)
        assert await other.read_state(NAME, "0") == LARGEST

    async def test_what_was_not_read_is_not_overwritten(self, new_store: NewStore) -> None:
        """A publisher that did not look writes only where nothing is, or what is there already."""
        store, other = await _open(new_store), await _open(new_store)
        await store.write_state(NAME, "0", FIRST)
        assert isinstance(await _error_of(other.write_state(NAME, "0", SECOND)), StoreError)
        assert await store.read_state(NAME, "0") == FIRST
        await other.write_state(NAME, "0", FIRST)

    async def test_one_of_many_writes(self, new_store: NewStore) -> None:
        """Of publishers of one name that start at once, one keeps its state, and the others are told."""
        stores = [await _open(new_store) for _ in range(5)]
        assert [await store.read_state(NAME, "0") for store in stores] == [None] * 5
        mine = [replace(FIRST, producer_id=number) for number in range(5)]
        errors = await asyncio.gather(
            *(_error_of(store.write_state(NAME, "0", state)) for store, state in zip(stores, mine, strict=True))
        )
        (kept,) = [state for state, error in zip(mine, errors, strict=True) if error is None]
        assert all(error is None or isinstance(error, StoreError) for error in errors)
        assert [await store.read_state(NAME, "0") for store in stores] == [kept] * 5

    # ---- cancellation

    async def test_a_cancelled_write_does_not_stand_in_the_way(self, new_store: NewStore) -> None:
        """Wherever a write is cancelled, it is stored or not; the next one is stored, and is not undone later."""
        for turns in range(12):
            store = await _open(new_store)
            partition_id = str(turns)
            await store.write_state(NAME, partition_id, FIRST)
            attempt = asyncio.ensure_future(store.write_state(NAME, partition_id, SECOND))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attempt
            await store.write_state(NAME, partition_id, LARGEST)
            await store.aclose()
            after = await _open(new_store)
            assert await after.read_state(NAME, partition_id) == LARGEST, f"cancelled after {turns} turns"


async def _open(new_store: NewStore) -> PublisherStateStore:
    store = new_store()
    await store.open()
    return store


async def _error_of(call: Awaitable[object]) -> EventPumpError | None:
    try:
        await call
    except EventPumpError as error:
        return error
    return None
