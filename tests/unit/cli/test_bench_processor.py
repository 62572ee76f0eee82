"""`eventpump bench-processor`: what it prints, and how it refuses."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator, Sequence

import pytest

from eventpump.cli.main import main
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.processor import CloseReason, EventProcessor, PartitionContext
from eventpump.eventhubs.events import ReceivedEvent

_HERE = __name__


class Counting(EventProcessor):
    """Counts, over all of its objects."""

    seen: list[tuple[str, int, int, str | None]] = []  # noqa: RUF012 - reset by the tests
    calls: list[str] = []  # noqa: RUF012 - likewise

    async def open(self, context: PartitionContext) -> None:
        self.calls.append("open")

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        self.calls.append("process")
        assert len(events) <= 50
        self.seen += [
            (context.partition_id, event.sequence_number, len(event.body), event.partition_key) for event in events
        ]

    async def close(self, context: PartitionContext, reason: CloseReason) -> None:
        self.calls.append("close")


class Failing(EventProcessor):
    """Raises on the second batch."""

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        if events[0].sequence_number:
            raise ValueError("no good")


async def handle(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
    """Do nothing."""


def keyed() -> KeyedProcessor:
    """Return a processor that is called per key."""
    return KeyedProcessor(handle)


def body(partition_id: str, number: int, rng: random.Random) -> str:
    """Return a body that cannot be made of event 99."""
    if number == 99:
        raise ZeroDivisionError("not this one")
    return "x" * 7


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Keep the level of the logger, which the command sets, and begin with nothing seen."""
    level = logging.getLogger("eventpump").level
    Counting.seen.clear()
    Counting.calls.clear()
    yield
    logging.getLogger("eventpump").setLevel(level)


def _run(*arguments: str) -> int:
    return main(["bench-processor", *arguments])


def test_processor_gets_every_event_and_is_opened_and_closed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each partition's events, of the sizes and keys that were asked for, in batches of the size that was."""
    options = ["--events", "600", "--partitions", "3", "--size", "5-9", "--keys", "2", "--batch", "50", "--json"]
    assert _run(f"{_HERE}:Counting", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["events"], found["partitions"]) == (600, 3)
    assert found["cpu_us_per_event"] > 0
    assert found["events_per_second"] > 0
    assert sorted(seen[:2] for seen in Counting.seen) == [(str(p), n) for p in range(3) for n in range(200)]
    assert {size for _, _, size, _ in Counting.seen} == {5, 6, 7, 8, 9}
    assert len({key for _, _, _, key in Counting.seen}) == 6
    assert (Counting.calls.count("open"), Counting.calls.count("close")) == (3, 3)


def test_it_prints_what_the_processor_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Four lines for people."""
    assert _run(f"{_HERE}:Counting", "--events", "1000", "--batch", "50") == 0
    first, whole, without, own = capsys.readouterr().out.splitlines()
    assert first == "1,000 events of 256 bytes in 4 partitions, batches of up to 50"
    for name, line in (("whole", whole), ("without", without), ("processor", own)):
        assert re.match(rf"{name} +\d+\.\d µs of CPU per event", line)


def test_processor_that_raises_ends_it_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, with its error."""
    assert _run(f"{_HERE}:Failing", "--events", "4000", "--batch", "50") == 1
    captured = capsys.readouterr()
    text = "eventpump: bench-processor: the processor failed in process_events: ValueError: no good\n"
    assert (captured.out, captured.err) == ("", text)


def test_keyed_processor_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Its handler is never called with a batch, which has several keys."""
    assert _run(f"{_HERE}:keyed", "--events", "400") == 2
    assert "must not be a KeyedProcessor" in capsys.readouterr().err


def test_body_that_raises_ends_it_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It would fail again and again; fewer events than that are fine."""
    assert _run(f"{_HERE}:Counting", "--body", f"{_HERE}:body", "--events", "400", "--batch", "50") == 2
    assert capsys.readouterr().err == "eventpump: the source failed: ZeroDivisionError: not this one\n"
    assert _run(f"{_HERE}:Counting", "--body", f"{_HERE}:body", "--events", "396", "--batch", "50") == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing.at.all:Counting"], "cannot be imported: ModuleNotFoundError"),
        ([f"{_HERE}:Nothing"], "cannot be imported: AttributeError"),
        ([_HERE], 'must be "module:name"'),
        ([f"{_HERE}:_HERE"], "a subclass of it, or a function that returns one"),
        ([f"{_HERE}:Counting", "--events", "2"], "at least the number of partitions"),
        ([f"{_HERE}:Counting", "--events", "many"], "--events"),
        ([f"{_HERE}:Counting", "--size", "9-5"], "--size"),
        ([f"{_HERE}:Counting", "--skew", "much"], "--skew"),
        ([f"{_HERE}:Counting", "--skew", "nan"], "skew"),
        ([f"{_HERE}:Counting", "--partitions", "9999"], "--partitions"),
    ],
)
def test_values_that_cannot_work_are_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and one line."""
    assert _run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err
    assert captured.err.count("\n") == 1
