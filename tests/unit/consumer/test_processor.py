"""Where processors come from."""

from __future__ import annotations

from collections.abc import Sequence

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


@pytest.mark.parametrize("given", [None, 5, "x", dict, _Unfinished], ids=str)
def test_processor_of_another_type_is_refused(given: object) -> None:
    """What is no processor, and a class without process_events, is refused at once."""
    with pytest.raises(ConfigurationError, match="processor"):
        ProcessorSource.of(given)


async def test_processor_factory_of_another_type_ends_the_host() -> None:
    """A factory that gives no processor is an error of `run`, not one tried again for ever."""
    async with Fleet() as fleet:
        host = fleet.host("a", lambda: "no processor")
        with pytest.raises(ConfigurationError, match="factory"):
            await host.run()
