"""Batches: their size is what goes on the wire, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump.core.status import BatchState
from eventpump.errors import EventTooLargeError
from eventpump.eventhubs.envelope import decode_batch
from eventpump.eventhubs.events import EventData
from eventpump.producer.batch import EventBatch, seal_alone

SIZES = st.lists(st.one_of(st.integers(0, 20), st.integers(230, 260), st.integers(0, 3000)), max_size=40)


@given(SIZES, st.one_of(st.none(), st.text(max_size=20)), st.integers(20, 8000))
def test_add_keeps_the_size_exact(sizes: list[int], key: str | None, limit: int) -> None:
    """Whatever is added, the size is that of the encoded batch and within the limit; what fits is taken."""
    batch = EventBatch(limit, partition_key=key)
    taken: list[EventData] = []
    for size in sizes:
        event = EventData(bytes(size))
        trial = EventBatch(2**62, partition_key=key)
        for each in [*taken, event]:
            assert trial.try_add(each)
        fits = trial.size <= limit
        if fits or taken:
            assert batch.try_add(event) is fits
        else:
            with pytest.raises(EventTooLargeError) as caught:
                batch.try_add(event)
            assert (caught.value.size, caught.value.limit) == (trial.size, limit)
        if fits:
            taken.append(event)
    assert (batch.count, len(batch)) == (len(taken), len(taken))
    if taken:
        encoded = batch.seal().message
        assert len(encoded) == batch.size <= limit
        assert decode_batch(encoded) == [event.encode(key) for event in taken]


@pytest.mark.parametrize("size", [247, 248, 249])
def test_add_keeps_the_size_exact_around_the_short_form(size: int) -> None:
    """Where the length of an event no longer takes one byte but four, the count changes with it."""
    batch = EventBatch(10_000)
    assert batch.try_add(EventData(bytes(size)))
    assert batch.size == len(batch.seal().message)


def test_repr_of_a_batch_shows_count_and_sizes() -> None:
    """A batch's repr has count and sizes, and nothing of its events."""
    batch = EventBatch(1000)
    batch.try_add(EventData(b"secret"))
    assert repr(batch) == f"EventBatch(1 events, {batch.size} of 1000 bytes, open)"


@given(st.booleans(), st.sampled_from(["state", "starting_published_sequence_number", "events"]), st.integers())
def test_outcome_of_a_batch_cannot_be_assigned(is_sealed: bool, name: str, value: int) -> None:
    """What its producer decides is read-only, and so is what it holds: a published batch is not sent again."""
    batch, event = EventBatch(10_000, is_idempotent=True), EventData(b"x")
    batch.try_add(event)
    if is_sealed:
        batch.seal()
    for given_value in (value, None, BatchState.OPEN):
        with pytest.raises(AttributeError):
            setattr(batch, name, given_value)
    with pytest.raises(AttributeError):
        batch.events.append(EventData(b"y"))  # type: ignore[attr-defined]  # that there is none is what is tested
    assert (batch.state, batch.starting_published_sequence_number, batch.events) == (BatchState.OPEN, None, (event,))


def test_number_of_an_event_cannot_be_assigned() -> None:
    """Only a producer numbers events."""
    event = EventData(b"x")
    for number in (None, 5):
        with pytest.raises(AttributeError):
            event.published_sequence_number = number  # type: ignore[misc]  # that it cannot be is what is tested
    assert event.published_sequence_number is None


class _Own(EventData):
    """An event of a class that encodes itself."""

    def encode(self, partition_key: str | None = None) -> bytes:
        return EventData(b"encoded", properties={"by": "itself"}).encode(partition_key)


def _renamed(event: EventData) -> EventData:
    return EventData(b"other", properties={"of": event.body_type})


@pytest.mark.parametrize("key", [None, "sensor-7"])
@pytest.mark.parametrize("encode", [None, _renamed], ids=["as it is", "encoded"])
@pytest.mark.parametrize(
    "event",
    [EventData(b"plain"), EventData(b""), EventData("text", properties={"unit": "W"}, message_id="m"), _Own(b"own")],
    ids=["bytes", "empty", "properties", "another class"],
)
def test_seal_alone_makes_the_message_of_a_batch_of_one(
    event: EventData, encode: Callable[[EventData], EventData] | None, key: str | None
) -> None:
    """A single event is sent as the same bytes as in a batch that holds nothing else, and counts the same."""
    batch = EventBatch(1000, partition_key=key, encode=encode)
    assert batch.try_add(event)
    alone, sealed = seal_alone(event, partition_key=key, encode=encode), batch.seal()
    assert (alone.message, alone.count, alone.size) == (sealed.message, 1, sealed.size)
