"""The packer: as many events in a message as its limit allows, and its size to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.errors import EventTooLargeError
from eventpump.eventhubs.envelope import decode_batch, envelope_head
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.sealing import ROOM, SealedBatch, pieces_of
from eventpump.producer.packing import BatchPacker

LIMIT = 3000


@given(st.lists(st.integers(0, 2800), min_size=1, max_size=40), st.booleans(), st.sampled_from([None, "key"]))
def test_take_packs_events_in_order(sizes: list[int], idempotent: bool, key: str | None) -> None:
    """Messages hold all events in order, have the size that was counted, and no event would fit the one before it."""
    key = None if idempotent else key
    packer = BatchPacker(LIMIT, partition_key=key, idempotent=idempotent)
    events = [EventData(bytes(size)) for size in sizes]
    taken: list[tuple[SealedBatch, int]] = []
    for event in events:
        head, rest = pieces_of(event, idempotent=idempotent)
        if not packer.add(head, rest):
            before = packer.size
            assert before + len(head) + len(rest) > LIMIT
            taken.append((packer.take(), before))
            assert (packer.count, packer.size) == (0, len(envelope_head(key)))
            assert packer.add(head, rest)
    size = packer.size
    taken.append((packer.take(), size))
    assert sum(sealed.count for sealed, _ in taken) == len(events)
    found: list[bytes] = []
    for sealed, counted in taken:
        message = sealed.numbered(1, 0, 0) if idempotent else sealed.message
        assert len(message) == counted == sealed.size <= LIMIT
        found += decode_batch(message)
    assert [len(each) for each in found] == [len(event.encode()) + (ROOM if idempotent else 0) for event in events]


def test_add_raises_if_an_empty_message_is_too_small() -> None:
    """The error has both sizes, and the packer goes on with the next event."""
    packer = BatchPacker(100)
    head, rest = pieces_of(EventData(bytes(200)))
    with pytest.raises(EventTooLargeError) as caught:
        packer.add(head, rest)
    assert (caught.value.size, caught.value.limit) == (len(head) + len(rest), 100)
    assert packer.add(*pieces_of(EventData(b"small")))
    assert not packer.add(head, rest)


def test_seal_is_not_changed_by_later_events() -> None:
    """What was sealed stays as it is, and the packer still holds its events."""
    packer = BatchPacker(LIMIT)
    packer.add(*pieces_of(EventData(b"a")))
    sealed = packer.seal()
    packer.add(*pieces_of(EventData(b"b")))
    assert (sealed.count, len(decode_batch(sealed.message))) == (1, 1)
    assert decode_batch(packer.take().message) == [EventData(each).encode() for each in (b"a", b"b")]


@pytest.mark.parametrize("idempotent", [False, True])
def test_seal_of_an_empty_message_is_refused(idempotent: bool) -> None:
    """There is no message without events."""
    with pytest.raises(ValueError, match="at least one event"):
        BatchPacker(LIMIT, idempotent=idempotent).take()


def test_pack_returns_the_message_that_an_event_did_not_fit() -> None:
    """The event begins the next one."""
    packer = BatchPacker(250)
    head, rest = pieces_of(EventData(bytes(100)))
    assert [packer.pack(head, rest) for _ in range(2)] == [None, None]
    full = packer.pack(head, rest)
    assert full is not None
    assert (full.count, packer.count) == (2, 1)


@pytest.mark.parametrize("idempotent", [False, True])
def test_oversized_event_makes_a_message_of_its_own(*, idempotent: bool) -> None:
    """Where it is allowed, it is added to an empty message, and nothing follows it there."""
    packer = BatchPacker(100, idempotent=idempotent, oversized=True)
    large, small = (pieces_of(EventData(bytes(size)), idempotent=idempotent) for size in (200, 1))
    assert packer.pack(*small) is None
    packed = [packer.pack(*large), packer.pack(*small), packer.take()]
    assert [None if each is None else each.count for each in packed] == [1, 1, 1]


@given(st.lists(st.integers(0, 200), min_size=2, max_size=20), st.integers(1, 400), st.data())
def test_divide_keeps_events_in_order_under_a_limit(sizes: list[int], limit: int, data: st.DataObject) -> None:
    """Each message is under the limit or holds one event; there are at least two, and none is empty."""
    packer = BatchPacker(10_000)
    encoded = [pieces_of(EventData(bytes(size))) for size in sizes]
    for head, rest in encoded:
        packer.add(head, rest)
    start = data.draw(st.integers(0, len(sizes) - 2))
    end = data.draw(st.integers(start + 2, len(sizes)))
    parts = packer.divide(start, end, limit)
    assert len(parts) > 1
    assert all(part.size <= limit or part.count == 1 for part in parts)
    assert b"".join(part.message for part in parts) == b"".join(head + rest for head, rest in encoded[start:end])
    assert sum(part.size for part in parts) == packer.size_of(start, end)
