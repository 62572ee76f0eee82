"""Decorated functions as processors: their parameters by annotation, and what they return published."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, get_type_hints

from eventpump.consumer.calls.handler import next_event
from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.pump.steps import StepwiseProcessor
from eventpump.errors import ConfigurationError
from eventpump.eventhubs.decoding import Decode, Decoder, encoded, guarded
from eventpump.eventhubs.events import EventData, ReceivedEvent

Function: TypeAlias = Callable[..., Awaitable[Any]]
"""A coroutine function that takes a payload, an event or a context, and returns what is to be published."""

Middleware: TypeAlias = Callable[[PartitionContext, ReceivedEvent, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""A coroutine function that is called in place of a subscriber's function, with the call to make; returns what that
returns."""

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Receipt(Protocol):
    """The outcome of an accepted event; a `DeliveryReceipt`. A wait for it that was cancelled may be repeated."""

    def __await__(self) -> Generator[Any, Any, object]:
        """Wait until the event is stored. Raises what it failed with."""

    def done(self) -> bool:
        """Return whether the outcome is known."""


class EventPublisher(Protocol):
    """Sends single events; a `BufferedProducer`."""

    async def send(self, event: EventData, *, partition_key: str | None = None) -> Receipt:
        """Accept an event."""


@dataclass(slots=True)
class ResultDestination:
    """Where a function's return values go.

    Attributes:
        partition_key: Returns the partition key of a return value; None for that of the event that was handled.
        mode: The mode of a `CloudEvent`.
        producer: What sends them, while the application runs.
    """

    hub: str
    partition_key: Callable[[Any], str | None] | None = None
    mode: str = "binary"
    producer: EventPublisher | None = None

    async def send(self, event: ReceivedEvent, value: Any) -> Receipt:
        """Accept a return value."""
        assert self.producer is not None
        key = event.partition_key if self.partition_key is None else self.partition_key(value)
        return await self.producer.send(encoded(value, mode=self.mode), partition_key=key)


class Handler:
    """How a decorated function is called with an event.

    Args:
        function: A coroutine function. A parameter annotated `ReceivedEvent` gets the event, one annotated
            `PartitionContext` the context, and one with any other annotation the payload, decoded as that type.

    Raises:
        ConfigurationError: Its signature cannot be called with an event.
    """

    def __init__(self, function: Function, decoder: Decoder) -> None:
        self.function = function
        self.name: str = getattr(function, "__name__", repr(function))
        # By parameter; None for the context.
        self._by_position: list[Decode | None] = []
        self._by_name: dict[str, Decode | None] = {}
        if not inspect.iscoroutinefunction(function):
            raise self._refused("must be a coroutine function: async def")
        payload: str | None = None
        hints = self._hints()
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                raise self._refused(f"has the parameter {parameter}, for which there is no value; name each parameter")
            if parameter.name not in hints:
                if parameter.default is not inspect.Parameter.empty:
                    continue
                raise self._refused(
                    f"has the parameter {parameter.name} without an annotation; annotate it with the type of the "
                    "payload, ReceivedEvent or PartitionContext"
                )
            kind = hints[parameter.name]
            how: Decode | None = None
            if kind is ReceivedEvent:
                how = _itself
            elif kind is not PartitionContext:
                if payload is not None:
                    raise self._refused(f"has two parameters for the payload, {payload} and {parameter.name}")
                payload = parameter.name
                how = guarded(decoder.decoder_for(kind), kind)
            if parameter.kind in _POSITIONAL:
                self._by_position.append(how)
            else:
                self._by_name[parameter.name] = how
        if payload is None and _itself not in (*self._by_position, *self._by_name.values()):
            raise self._refused("takes no event; give it a parameter for the payload, as in handle(reading: Reading)")

    def __call__(self, context: PartitionContext, event: ReceivedEvent) -> Awaitable[Any]:
        """Call the function with an event. Raises `DecodeError` if the payload is not what the function takes."""
        arguments = [context if how is None else how(event) for how in self._by_position]
        if not self._by_name:
            return self.function(*arguments)
        named = {name: context if how is None else how(event) for name, how in self._by_name.items()}
        return self.function(*arguments, **named)

    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(self.function, include_extras=True)
        except NameError as error:
            problem = f"has an annotation that cannot be resolved ({error}); define the type at the top of its module"
            raise self._refused(problem) from error

    def _refused(self, problem: str) -> ConfigurationError:
        return ConfigurationError("subscriber", f"the function {self.name} {problem}")


def _itself(event: ReceivedEvent) -> ReceivedEvent:
    return event


@dataclass(slots=True)
class RoutedFunction:
    """A function with where its return values go.

    Attributes:
        publications: Where its return values go. None is not published.
        middleware: What is called in place of the function, if anything.
    """

    handler: Handler
    publications: list[ResultDestination] = field(default_factory=list)
    middleware: Middleware | None = None

    async def handle(self, context: PartitionContext, event: ReceivedEvent) -> list[Receipt]:
        """Handle an event. Return what is to be awaited until all that it has published is stored."""
        if self.middleware is None:
            value = await self.handler(context, event)
        else:
            value = await self.middleware(context, event, partial(self._call, context, event))
        if value is None:
            return []
        return [await each.send(event, value) for each in self.publications]

    async def _call(self, context: PartitionContext, event: ReceivedEvent) -> Any:
        # A coroutine function, so that an event that cannot be decoded is an error of what is awaited.
        return await self.handler(context, event)

    async def handle_keyed(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Handle the next event of a key, until all that it has published is stored: for a `KeyedProcessor`."""
        for event in events:
            for receipt in await self.handle(context, event):
                await receipt


class RouteProcessor(StepwiseProcessor):
    """Handles the events of a batch one after the other; of one ownership.

    Of a batch that is delivered again because an event of it failed, or because the call was cancelled after its time,
    those before that event are not handled again. `handler_timeout` is that of each event: its time begins with it, and
    once more when all are handled, and what they have published is to be stored.

    Args:
        route: Handles each event.
    """

    def __init__(self, route: RoutedFunction) -> None:
        self._route = route
        self._handled: dict[ReceivedEvent, list[Receipt]] = {}
        """The events that are handled and not finished, with the receipts of what they have published."""

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        """Process a batch: it is processed when all that was published for it is stored."""
        handled = self._handled
        try:
            for event in events:
                if event not in handled:
                    next_event()
                    handled[event] = await self._route.handle(context, event)
        except Exception:
            # What failed to be stored is handled again with the rest; the error of the function comes first.
            await self._stored(events)
            raise
        if (failure := await self._stored(events)) is not None:
            raise failure
        if len(events) == 1:
            del handled[events[0]]
        else:
            handled.clear()

    def take_finished(self, events: Sequence[ReceivedEvent]) -> int:
        """Return how many events, from the first one on, are handled, with all that they have published stored."""
        for count, event in enumerate(events):
            receipts = self._handled.get(event)
            if receipts is None or not all(map(_is_stored, receipts)):
                return count
            del self._handled[event]
        return len(events)

    async def _stored(self, events: Sequence[ReceivedEvent]) -> Exception | None:
        """Wait until what was published for events is stored. Return the first failure."""
        first: Exception | None = None
        next_event()
        for event in events:
            receipts = self._handled.get(event)
            if not receipts:
                continue
            try:
                for receipt in receipts:
                    await receipt
            except Exception as error:
                first = first or error
                del self._handled[event]
            else:
                if event in self._handled:  # a checkpoint may have passed it meanwhile
                    self._handled[event] = []
        return first


def _is_stored(receipt: Receipt) -> bool:
    """Return whether an event is known to be stored."""
    if not receipt.done():
        return False
    try:
        # Its outcome is known, and so this ends at once.
        next(receipt.__await__())
    except StopIteration:
        return True
    except Exception:  # noqa: S110 - raised to what awaits it
        pass
    return False
