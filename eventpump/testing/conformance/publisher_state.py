"""The contract of `PublisherStateStore`, as a pytest class.

Subclass it under a name that starts with `Test`, in a module with a fixture `new_store` that gives a function making
stores on the same data (the fixture closes them), and with pytest-asyncio in auto mode. For assertions that explain
themselves call, before the import,
`pytest.register_assert_rewrite("eventpump.testing.conformance.publisher_state")`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from eventpump.core.claim import PublisherIntent, PublisherState, StoredPublisherState
from eventpump.errors import ClosedError, ConfigurationError, StoreError
from eventpump.testing.conformance import error_of

if TYPE_CHECKING:
    from eventpump.interfaces import PublisherStateStore

NewStore: TypeAlias = "Callable[[], PublisherStateStore]"

NAME = "orders"
FIRST = PublisherState(producer_id=7, owner_level=0, start=-1)
SECOND = PublisherState(producer_id=7, owner_level=1, start=41, published=42, has_published=True, claim="a1")
LARGEST = PublisherState(
    producer_id=2**63 - 1,
    owner_level=2**15 - 1,
    start=2**31 - 1,
    published=2**63 - 1,
    has_published=True,
    is_clean=True,
    is_stamped=True,
    claim="f" * 64,
    intent=PublisherIntent(2**15 - 1, tail=2**63 - 1, number=2**31 - 1),
)
SMALLEST = PublisherState(producer_id=0, owner_level=0, start=-1, intent=PublisherIntent(0, tail=-1, number=-1))
BEGUN = replace(SECOND, intent=PublisherIntent(2), claim="b2")


class PublisherStateStoreContract:
    """The guarantees of `PublisherStateStore`."""

    # ---- opening and closing

    async def test_call_before_open_raises_store_error(self, new_store: NewStore) -> None:
        """A store that is not open fails with a StoreError."""
        store = new_store()
        assert isinstance(await error_of(store.read_state(NAME, "0")), StoreError)
        assert isinstance(await error_of(store.write_state(NAME, "0", FIRST, None)), StoreError)
        assert isinstance(await error_of(store.reset_state(NAME, "0")), StoreError)

    async def test_open_and_close_twice_are_fine(self, new_store: NewStore) -> None:
        """A store may be opened twice and closed twice, and closed before it was opened; then it raises ClosedError."""
        store = await _open(new_store)
        await store.open()
        await store.aclose()
        await store.aclose()
        assert isinstance(await error_of(store.read_state(NAME, "0")), ClosedError)
        assert isinstance(await error_of(store.write_state(NAME, "0", FIRST, None)), ClosedError)
        assert isinstance(await error_of(store.reset_state(NAME, "0")), ClosedError)
        never_opened = new_store()
        await never_opened.aclose()
        assert isinstance(await error_of(never_opened.open()), ClosedError)

    async def test_open_by_several_stores_at_once_succeeds(self, new_store: NewStore) -> None:
        """Several publishers that make the same container or file at the same time all succeed."""
        stores = [new_store() for _ in range(6)]
        await asyncio.gather(*(store.open() for store in stores))
        await _stored(stores[0], "0", FIRST)
        assert [await _state_of(store) for store in stores] == [FIRST] * 6

    # ---- reading and writing

    async def test_read_state_that_was_never_written_is_none(self, new_store: NewStore) -> None:
        """A name or a partition without a state has None."""
        store = await _open(new_store)
        await _stored(store, "0", FIRST)
        assert await store.read_state(NAME, "1") is None
        assert await store.read_state("others", "0") is None

    async def test_read_state_returns_what_any_store_wrote(self, new_store: NewStore) -> None:
        """What was written is read again, whole, by this store and by the next."""
        store = await _open(new_store)
        every = (FIRST, SECOND, LARGEST, SMALLEST, BEGUN)
        written = [await _stored(store, str(number), state) for number, state in enumerate(every)]
        assert [each.state for each in written] == [*every]
        assert await store.read_state(NAME, "2") == written[2]
        await store.aclose()
        after = await _open(new_store)
        assert [await after.read_state(NAME, str(number)) for number in range(5)] == written

    async def test_write_state_replaces_the_state_that_is_given(self, new_store: NewStore) -> None:
        """A state is swapped for another, by this store and by the next, whatever the values; and for itself."""
        store = await _open(new_store)
        stored: StoredPublisherState | None = None
        for state in (FIRST, SECOND, SECOND, BEGUN, FIRST):
            stored = await _stored(store, "0", state, stored)
            assert await store.read_state(NAME, "0") == stored
        after = await _open(new_store)
        stored = await _stored(after, "0", SECOND, await after.read_state(NAME, "0"))
        assert await store.read_state(NAME, "0") == stored

    async def test_states_of_names_and_partitions_are_separate(self, new_store: NewStore) -> None:
        """No two names or partitions share a state, however alike they look."""
        store = await _open(new_store)
        names = ["a", "A", "a.", ".", "..", "a/0", "a%2F0", "a\\0", "é", "e\u0301", "a b", "a?b#c", "n" * 256]
        keys = [(name, partition_id) for name in names for partition_id in ("0", "1")]
        states = {key: replace(FIRST, producer_id=number) for number, key in enumerate(keys)}
        await asyncio.gather(*(store.write_state(*key, state, None) for key, state in states.items()))
        after = await _open(new_store)
        found = {key: await after.read_state(*key) for key in keys}
        assert {key: each and each.state for key, each in found.items()} == states

    async def test_write_state_that_cannot_be_kept_is_refused(self, new_store: NewStore) -> None:
        """A name that cannot be one, and a state outside the service's ranges, are the caller's errors."""
        store = await _open(new_store)
        for name in ("", "n" * 257, "a\0b", "a\n", "\ud800"):
            assert isinstance(await error_of(store.read_state(name, "0")), ConfigurationError)
            assert isinstance(await error_of(store.write_state(name, "0", FIRST, None)), ConfigurationError)
            assert isinstance(await error_of(store.reset_state(name, "0")), ConfigurationError)
        for state in (
            replace(FIRST, producer_id=2**63),
            replace(FIRST, producer_id=-1),
            replace(FIRST, owner_level=2**15),
            replace(FIRST, start=2**31),
            replace(FIRST, start=-2),
            replace(FIRST, published=-1),
            replace(FIRST, claim="c" * 65),
            replace(FIRST, claim="\n"),
            replace(FIRST, intent=PublisherIntent(2**15)),
            replace(FIRST, intent=PublisherIntent(1, number=-2)),
        ):
            assert isinstance(await error_of(store.write_state(NAME, "0", state, None)), ConfigurationError)
        assert await store.read_state(NAME, "0") is None

    # ---- two publishers of one name

    async def test_write_state_after_a_change_by_another_is_refused(self, new_store: NewStore) -> None:
        """A publisher that has not read a change cannot undo it, nor at a second attempt; after a read it can write."""
        store, other = await _open(new_store), await _open(new_store)
        mine = await _stored(store, "0", FIRST)
        assert await other.read_state(NAME, "0") == mine
        theirs = await _stored(other, "0", SECOND, mine)
        for _ in range(2):
            assert await store.write_state(NAME, "0", LARGEST, mine) is None
            assert await other.read_state(NAME, "0") == theirs
        assert await store.read_state(NAME, "0") == theirs
        await _stored(store, "0", LARGEST, theirs)
        assert await _state_of(other) == LARGEST

    async def test_write_state_of_a_first_state_overwrites_nothing(self, new_store: NewStore) -> None:
        """A first state is stored only where nothing is; where it is itself there already, it counts as stored."""
        store, other = await _open(new_store), await _open(new_store)
        mine = await _stored(store, "0", FIRST)
        assert await other.write_state(NAME, "0", SECOND, None) is None
        assert await store.read_state(NAME, "0") == mine
        assert await other.write_state(NAME, "0", FIRST, None) == mine

    async def test_write_state_repeated_after_it_was_stored_succeeds(self, new_store: NewStore) -> None:
        """The same swap again, after it was stored, succeeds: its first answer may have been lost."""
        store = await _open(new_store)
        first = await _stored(store, "0", FIRST)
        second = await _stored(store, "0", SECOND, first)
        assert await store.write_state(NAME, "0", SECOND, first) == second

    async def test_write_state_by_many_at_once_succeeds_once(self, new_store: NewStore) -> None:
        """Of publishers of one name that swap one state at once, one succeeds, and the others' swaps fail."""
        stores = [await _open(new_store) for _ in range(5)]
        former: StoredPublisherState | None = None
        for turn in range(3):
            states = [replace(FIRST, owner_level=turn, claim=f"{turn}-{number}") for number in range(5)]
            written = await asyncio.gather(
                *(store.write_state(NAME, "0", state, former) for store, state in zip(stores, states, strict=True))
            )
            (former,) = [each for each in written if each is not None]
            assert [await store.read_state(NAME, "0") for store in stores] == [former] * 5

    # ---- resetting

    async def test_reset_state_removes_the_state(self, new_store: NewStore) -> None:
        """After a reset there is no state, for any store; the next is stored as a first one. Other states stay."""
        store, other = await _open(new_store), await _open(new_store)
        for partition_id in ("0", "1"):
            await _stored(store, partition_id, FIRST)
        await other.reset_state(NAME, "0")
        assert await store.read_state(NAME, "0") is None
        await _stored(store, "0", SECOND)
        found = await other.read_state(NAME, "1")
        assert found is not None
        assert found.state == FIRST
        await store.reset_state(NAME, "2")

    async def test_write_state_after_a_reset_is_refused(self, new_store: NewStore) -> None:
        """A reset makes every swap of the former state fail, also where an equal one was stored since."""
        store, other = await _open(new_store), await _open(new_store)
        former = await _stored(store, "0", FIRST)
        await other.reset_state(NAME, "0")
        assert await store.write_state(NAME, "0", SECOND, former) is None
        again = await _stored(other, "0", FIRST)
        assert await store.write_state(NAME, "0", SECOND, former) is None
        assert await store.read_state(NAME, "0") == again

    # ---- cancellation

    async def test_write_state_that_is_cancelled_can_be_repeated(self, new_store: NewStore) -> None:
        """Wherever a write is cancelled, it is stored or not; the next one is stored, and is not undone later."""
        for turns in range(12):
            store = await _open(new_store)
            partition_id = str(turns)
            first = await _stored(store, partition_id, FIRST)
            attempt = asyncio.ensure_future(store.write_state(NAME, partition_id, SECOND, first))
            for _ in range(turns):
                await asyncio.sleep(0)
            attempt.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attempt
            second = await _stored(store, partition_id, SECOND, first)
            await _stored(store, partition_id, LARGEST, second)
            await store.aclose()
            after = await _open(new_store)
            found = await after.read_state(NAME, partition_id)
            assert found is not None
            assert found.state == LARGEST, f"cancelled after {turns} turns"


async def _open(new_store: NewStore) -> PublisherStateStore:
    store = new_store()
    await store.open()
    return store


async def _stored(
    store: PublisherStateStore,
    partition_id: str,
    state: PublisherState,
    replaces: StoredPublisherState | None = None,
) -> StoredPublisherState:
    """Store a state, which must succeed."""
    written = await store.write_state(NAME, partition_id, state, replaces)
    assert written is not None
    assert written.state == state
    return written


async def _state_of(store: PublisherStateStore) -> PublisherState | None:
    found = await store.read_state(NAME, "0")
    return None if found is None else found.state
