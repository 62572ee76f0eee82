"""Where processors come from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from eventpump.consumer.processor import EventProcessor, PartitionContext, ProcessorSource
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.events import ReceivedEvent
from tests.support.fleet import Fleet


class _Plain(EventProcessor):
    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        await context.checkpoint()


class _Unfinished(EventProcessor):
    pass


def test_processor_instance_serves_every_ownership() -> None:
    """An instance serves every ownership."""
    processor = _Plain()
    source = ProcessorSource.of(processor)
    assert source.make() is processor is source.make()


@pytest.mark.parametrize("given", [_Plain, lambda: _Plain()], ids=["class", "factory"])
def test_processor_class_or_factory_makes_one_per_ownership(given: object) -> None:
    """A class or factory gives every ownership an object of its own."""
    source = ProcessorSource.of(given)
    first, second = source.make(), source.make()
    assert isinstance(first, _Plain)
    assert first is not second


class _WithArgument(_Plain):
    def __init__(self, path: str) -> None:
        self.path = path


class _Calls:
    async def __call__(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Called like a function."""

    async def handle(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """A method."""


async def _function(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
    """A function."""


async def _function_of_more(table: str, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
    """A function with an argument of its own."""


async def _of_one(context: PartitionContext) -> None:
    """Takes too little."""


@pytest.mark.parametrize(
    "given", [_function, _Calls(), _Calls().handle, partial(_function_of_more, "table")], ids=["a", "b", "c", "d"]
)
def test_coroutine_function_is_a_processor(given: object) -> None:
    """A function, a method, a partial and an object that is called: one processor serves every ownership."""
    source = ProcessorSource.of(given)
    assert isinstance(source.make(), EventProcessor)
    assert source.make() is source.make()


@pytest.mark.parametrize(
    "given",
    [
        *(None, 5, "x", dict, _Unfinished, _WithArgument, _of_one, _function_of_more),
        *(lambda context, events: None, lambda one: one, lambda a, b, c: a),
    ],
    ids=[*"abcdefghijk"],
)
def test_processor_of_another_type_is_refused(given: object) -> None:
    """What is no processor, and a class without process_events, is refused at once."""
    with pytest.raises(ConfigurationError, match="processor"):
        ProcessorSource.of(given)


async def test_function_processes_events_and_stops_its_host() -> None:
    """A coroutine function gets context and events, checkpoints like any processor, and `until` ends the run."""
    async with Fleet() as fleet:
        fleet.hub.publish("0", count=10)
        seen: list[int] = []
        done = asyncio.Event()

        async def process(context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
            seen.extend(event.sequence_number for event in events)
            await context.checkpoint()
            if len(seen) >= 10:
                done.set()

        host = fleet.host("a", process)
        await host.run(until=done.wait())
        assert seen == list(range(10))
        assert host.is_closed
        assert fleet.checkpoint("0") == 9


async def test_run_until_what_cannot_be_awaited_is_refused_and_starts_nothing() -> None:
    """Forgotten parentheses are a clear error, and the host can still be run."""
    async with Fleet() as fleet:
        host = fleet.host("a", _Plain)
        with pytest.raises(ConfigurationError, match=r"until: must be awaitable, such as done.wait\(\)"):
            await host.run(until=asyncio.Event().wait)  # type: ignore[arg-type]  # what a user writes
        await host.run(until=asyncio.sleep(1))
        assert host.is_closed


async def test_error_of_what_is_waited_for_is_raised_after_the_host_has_closed() -> None:
    """`run` closes in order, and then raises it; if the host is closed first, the waiting is cancelled."""
    async with Fleet() as fleet:

        async def fail() -> None:
            raise ValueError("enough")

        host = fleet.host("a", _Plain)
        with pytest.raises(ValueError, match="enough"):
            await host.run(until=fail())
        assert host.is_closed
        never = asyncio.get_running_loop().create_future()
        host = fleet.host("b", _Plain)
        running = asyncio.create_task(host.run(until=never))
        await asyncio.sleep(1)
        await host.aclose()
        await running
        assert never.cancelled()


async def test_processor_factory_of_another_type_ends_the_host() -> None:
    """A factory that gives no processor is an error of `run`, not one tried again forever."""
    async with Fleet() as fleet:
        host = fleet.host("a", lambda: "no processor")
        with pytest.raises(ConfigurationError, match="factory"):
            await host.run()
