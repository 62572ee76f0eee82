"""Synthetic events: repeatable at any position, by rate, with keys and sizes as asked for."""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventpump.clients.consumers import PartitionReader
from eventpump.errors import ClosedError, ConfigurationError, RequestRefusedError
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.sources.generator import ORIGIN, GeneratorSource
from eventpump.testing.clock import VirtualClock


def _events(source: GeneratorSource, partition_id: str = "0", first: int = 0, count: int = 100) -> list[ReceivedEvent]:
    return list(map(ReceivedEvent, source.generate(partition_id, first, count)))


@given(
    seed=st.integers(0, 2**70),
    first=st.integers(0, 10**11),
    skip=st.integers(0, 50),
    keys=st.sampled_from([0, 1, 7]),
    size=st.sampled_from([0, 17, (0, 900)]),
)
@settings(max_examples=60, deadline=None)
def test_event_follows_from_seed_partition_and_number(seed: int, first: int, skip: int, keys: int, size: Any) -> None:
    """Another source with the same seed makes the same bytes, wherever it begins; it is a message all can decode."""
    source = GeneratorSource(seed=seed, events=10**12, rate=None, keys=keys, skew=1.0, size=size)
    again = GeneratorSource(seed=seed, events=10**12, rate=None, keys=keys, skew=1.0, size=size)
    made = source.generate("1", first, 60)
    assert made[skip:] == again.generate("1", first + skip, 60 - skip)
    for number, event in enumerate(map(ReceivedEvent, made), first):
        assert (event.sequence_number, event.offset) == (number, str(number))
        assert event.enqueued_time == ORIGIN + timedelta(milliseconds=number)
        assert event.body == event.value
        assert (event.partition_key is None) is (keys == 0)


def test_seeds_partitions_and_numbers_differ() -> None:
    """Neither partitions nor seeds nor neighbors have the same bodies."""
    source, other = GeneratorSource(seed=1, partitions=2), GeneratorSource(seed=2)
    bodies = [event.body for event in _events(source) + _events(source, "1") + _events(other)]
    assert len(set(bodies)) > 290


def test_sizes_are_those_asked_for() -> None:
    """One size, or sizes from the smallest to the largest."""
    assert {len(event.body) for event in _events(GeneratorSource(size=33))} == {33}
    assert {len(event.body) for event in _events(GeneratorSource(size=0))} == {0}
    sizes = Counter(len(event.body) for event in _events(GeneratorSource(size=(5, 9)), count=2000))
    assert sorted(sizes) == [5, 6, 7, 8, 9]
    assert min(sizes.values()) > 300


def test_keys_are_skewed_and_of_one_partition() -> None:
    """The first key is used as often as Zipf's law says, and no key is used in two partitions."""
    source = GeneratorSource(partitions=2, keys=4, skew=1.0)
    counts = Counter(event.partition_key for event in _events(source, count=5000))
    shares = [counts[f"key-0-{rank}"] / 5000 for rank in range(4)]
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    assert shares == pytest.approx([1 / total, 1 / 2 / total, 1 / 3 / total, 1 / 4 / total], abs=0.03)
    even = Counter(event.partition_key for event in _events(GeneratorSource(keys=4), count=4000))
    assert min(even.values()) > 900
    assert not counts.keys() & {event.partition_key for event in _events(source, "1")}


def test_bodies_of_ones_own() -> None:
    """They repeat with the random numbers they are given; one that returns nonsense ends the link with an error."""

    def body(partition_id: str, number: int, rng: random.Random) -> str:
        return f'{{"partition": "{partition_id}", "number": {number}, "value": {rng.random()}}}'

    one, two = (GeneratorSource(seed=4, body=body) for _ in range(2))
    assert one.generate("3", 50, 10) == two.generate("3", 40, 20)[10:]
    assert _events(one)[7].body_as_json()["number"] == 7


@pytest.mark.parametrize("nonsense", [lambda *_: 5, lambda *_: None, lambda *_: 1 / 0])
async def test_body_that_fails_is_an_error_of_the_reader(nonsense: Any) -> None:
    """It is not repeated forever: another attempt would fail in the same way."""
    source = GeneratorSource(body=nonsense)
    async with PartitionReader(source=source, partition_id="0") as reader:
        with pytest.raises(RequestRefusedError, match="the source failed"):
            await reader.read()


async def test_rate_is_kept(clock: VirtualClock) -> None:
    """Events are there when they are due, neither before nor later, and idle time costs no turns."""
    source = GeneratorSource(rate=10.0)
    async with PartitionReader(source=source, partition_id="0") as reader:
        began, numbers = clock.monotonic(), list[int]()
        while len(numbers) < 50:
            for event in await reader.read():
                numbers.append(event.sequence_number)
                assert clock.monotonic() - began == pytest.approx(event.sequence_number / 10, abs=0.02)
        assert numbers == list(range(50))
        facts = await source.partition_properties("0")
        assert facts.last_enqueued_sequence_number == 49
        assert facts.last_enqueued_time == ORIGIN + timedelta(seconds=4.9)


async def test_reader_ends_with_the_source() -> None:
    """Iteration ends after the last event, also of a source without any."""
    for count in (0, 1, 700):
        source = GeneratorSource(events=count, rate=None)
        async with source, PartitionReader(source=source, partition_id="2") as reader:
            assert [event.sequence_number async for event in reader] == list(range(count))
            assert reader.is_at_end
            assert await reader.read() == []


async def test_reader_continues_anywhere() -> None:
    """By number, offset, time, and to an end."""
    source = GeneratorSource(events=900, rate=None)
    for position, first in (
        (EventPosition.at_sequence_number(500), 501),
        (EventPosition.at_offset("500", inclusive=True), 500),
        (EventPosition.at_enqueued_time(ORIGIN + timedelta(seconds=0.5)), 501),
    ):
        async with PartitionReader(source=source, partition_id="0", position=position, end=600) as reader:
            assert [event.sequence_number async for event in reader] == list(range(first, 601))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"partitions": 0}, "partitions"),
        ({"partitions": True}, "partitions"),
        ({"seed": -1}, "seed"),
        ({"seed": "7"}, "seed"),
        ({"rate": 0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": None}, "rate"),
        ({"events": -1}, "events"),
        ({"size": -1}, "size"),
        ({"size": (9, 5)}, "size"),
        ({"size": (1, 2, 3)}, "size"),
        ({"size": 2 << 20}, "size"),
        ({"keys": 1.5}, "keys"),
        ({"skew": -1}, "skew"),
        ({"body": b"text"}, "body"),
    ],
)
def test_values_that_cannot_work_are_refused(options: dict[str, Any], field: str) -> None:
    """The error names the parameter."""
    with pytest.raises(ConfigurationError) as caught:
        GeneratorSource(**options)
    assert caught.value.field == field


async def test_closed_source_is_refused() -> None:
    """After `aclose` nothing is answered."""
    source = GeneratorSource()
    await source.aclose()
    with pytest.raises(ClosedError):
        await source.partitions()


def test_options_of_a_connection_are_refused_with_a_source() -> None:
    """Neither a connection string nor an option of the connection goes with a source, and a typo is found."""
    source = GeneratorSource()
    wrong: list[dict[str, Any]] = [
        {"connection_string": "x"},
        {"hub": "telemetry"},
        {"operation_timeout": 3.0},
        {"prefetch": 5},
    ]
    for options in wrong:
        with pytest.raises(ConfigurationError) as caught:
            PartitionReader(source=source, partition_id="0", **options)
        assert caught.value.field in options
    for nonsense in (object(), GeneratorSource, "generator"):
        with pytest.raises(ConfigurationError, match="source"):
            PartitionReader(source=nonsense, partition_id="0")  # type: ignore[arg-type]  # that is the test
