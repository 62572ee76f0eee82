"""The observations: each one a question of docs/protocol.md, and how it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from eventpump.amqp.message import Data, Message, Properties
from eventpump.amqp.types import Symbol
from eventpump.errors import EventPumpError
from eventpump.eventhubs.events import EventPosition
from eventpump.eventhubs.names import PARTITION_KEY
from eventpump.probe.bench import Bench, batch, names, numbers, outcome_of, refusal

_EPOCH: Final = "x-opt-sequence-number-epoch"
_OWN: Final = Symbol("x-opt-probe")
_MANY: Final = 2**31 - 1
_REMEMBERED: Final = 8
_IDLE: Final = 270.0


@dataclass(frozen=True, slots=True)
class Observation:
    """One question.

    Args:
        section: The section of docs/protocol.md.
        observe: Makes the observation, and returns what was seen. What the service refuses raises, and is an answer.
        is_long: Whether it takes minutes.
    """

    name: str
    section: str
    question: str
    observe: Callable[[Bench], Awaitable[str]]
    is_long: bool = False


async def _number_epoch(bench: Bench) -> str:
    event = await bench.read_back(Message(Data((b"probe",))).encode())
    if event is None:
        return "no event came"
    epoch = event.system_properties.get(_EPOCH)
    return "none" if epoch is None else f"{int(epoch)}"


def _begins_after_last(beyond: int) -> Callable[[Bench], Awaitable[str]]:
    async def observe(bench: Bench) -> str:
        last = (await bench.properties()).last_enqueued_sequence_number
        async with bench.receiving(EventPosition.at_sequence_number(last + beyond), credit=10) as (arrivals, _):
            if await bench.next_event(arrivals) is not None:
                return "attached, and an event came"
            return "attached" if arrivals.error is None else refusal(arrivals.error)

    return observe


async def _inclusive_latest(bench: Bench) -> str:
    async with bench.receiving(EventPosition.at_offset("@latest", inclusive=True), credit=10) as (arrivals, _):
        event = await bench.next_event(arrivals)
        if arrivals.error is not None:
            return refusal(arrivals.error)
        return "attached, nothing came" if event is None else "attached, and the last event came"


async def _much_credit(bench: Bench) -> str:
    async with bench.receiving(EventPosition.latest(), credit=_MANY) as (arrivals, _):
        async with bench.sending() as link:
            await link.send(Message(Data((b"probe",))).encode())
        event = await bench.next_event(arrivals)
        if arrivals.error is not None:
            return refusal(arrivals.error)
        return "no event came" if event is None else "an event came"


async def _annotations_of_a_producer(bench: Bench) -> str:
    annotations = {**numbers(7, 0, 0), _OWN: "x"}
    event = await bench.read_back(Message(Data((b"probe",)), message_annotations=annotations).encode())
    if event is None:
        return "no event came"
    return names(set(map(str, annotations)) & set(map(str, event.system_properties)))


async def _two_delivery_annotations(bench: Bench) -> str:
    message = Message(Data((b"probe",)), delivery_annotations={_OWN: "x"}).encode()
    event = await bench.read_back(message, tracks=True)
    return "no event came" if event is None else names(event.delivery_annotations)


def _long_text(name: str, length: int) -> Callable[[Bench], Awaitable[str]]:
    async def observe(bench: Bench) -> str:
        message = Message(Data((b"probe",)), Properties(message_id="m" * length))
        if name == "partition key":
            message = Message(Data((b"probe",)), message_annotations={PARTITION_KEY: "k" * length})
        event = await bench.read_back(message.encode())
        if event is None:
            return "accepted, and no event came"
        kept = event.partition_key if name == "partition key" else event.message_id
        return "kept" if kept is not None and len(str(kept)) == length else "dropped or shortened"

    return observe


async def _lower_level_attached(bench: Bench) -> str:
    async with bench.producing() as (link, producer_id, level):
        await outcome_of(link, batch(producer_id, level, 0), bench.timeout)
    async with bench.sending(numbers(producer_id, level + 1, None)):
        pass
    async with bench.sending(numbers(producer_id, level, None)):
        return "attached"


async def _higher_level_sent(bench: Bench) -> str:
    async with bench.producing() as (link, producer_id, level):
        await outcome_of(link, batch(producer_id, level, 0), bench.timeout)
        return await outcome_of(link, batch(producer_id, level + 1, 1), bench.timeout)


async def _remembered_batches(bench: Bench) -> str:
    async with bench.producing() as (link, producer_id, level):
        for at in range(_REMEMBERED):
            await outcome_of(link, batch(producer_id, level, at * 2, 2), bench.timeout)
        before = (await bench.properties()).last_enqueued_sequence_number
        for back in range(_REMEMBERED):
            first = (_REMEMBERED - 1 - back) * 2
            outcome = await outcome_of(link, batch(producer_id, level, first, 2), bench.timeout)
            if outcome != "accepted":
                return f"the last {back}; the one before them is {outcome}"
        stored = (await bench.properties()).last_enqueued_sequence_number - before
        return f"the last {_REMEMBERED} at least" if not stored else f"{stored} events were stored again"


async def _gap(bench: Bench) -> str:
    async with bench.producing() as (link, producer_id, level):
        await outcome_of(link, batch(producer_id, level, 0), bench.timeout)
        return await outcome_of(link, batch(producer_id, level, 5), bench.timeout)


async def _no_numbers(bench: Bench) -> str:
    async with bench.producing() as (link, producer_id, level):
        await outcome_of(link, batch(producer_id, level, 0), bench.timeout)
        try:
            async with asyncio.timeout(bench.timeout):
                await link.send(Message(Data((b"probe",))).encode())
        except TimeoutError:
            return "no outcome"
        return "accepted"


async def _only_heartbeats(bench: Bench) -> str:
    async with bench.receiving(EventPosition.latest(), credit=1) as (arrivals, _):
        try:
            async with asyncio.timeout(_IDLE):
                await arrivals.ended.wait()
        except TimeoutError:
            return "the link is still attached"
        assert arrivals.error is not None
        return refusal(arrivals.error)


OBSERVATIONS: Final = (
    Observation("number-epoch", "4", "the epoch of a sequence number without geo-replication", _number_epoch),
    Observation("begin-after-last", "5.2", "a start after the last event's number", _begins_after_last(0)),
    Observation("begin-after-next", "5.2", "a start after the next event's number", _begins_after_last(1)),
    Observation("begin-far-beyond", "5.2", "a start a thousand numbers beyond the end", _begins_after_last(1000)),
    Observation("latest-inclusive", "5.2", "an inclusive @latest", _inclusive_latest),
    Observation("credit-limit", "5.3", "a credit of 2,147,483,647", _much_credit),
    Observation(
        "producer-annotations", "6.1", "which of a sender's annotations reach readers", _annotations_of_a_producer
    ),
    Observation(
        "delivery-annotations", "6.1", "the sender's and the service's delivery annotations", _two_delivery_annotations
    ),
    Observation("message-id-129", "6.2", "a message id of 129 characters", _long_text("message id", 129)),
    Observation("message-id-1000", "6.2", "a message id of 1,000 characters", _long_text("message id", 1000)),
    Observation("partition-key-129", "6.2", "a partition key of 129 characters", _long_text("partition key", 129)),
    Observation("lower-level-attached", "8.2", "a producer attaches with a lower level", _lower_level_attached),
    Observation("higher-level-sent", "8.5", "an event with a higher level than the link's", _higher_level_sent),
    Observation("batches-remembered", "8.5", "how many batches back a repeat is known", _remembered_batches),
    Observation("gap", "8.5", "a number above the next one", _gap),
    Observation("no-numbers", "8.5", "an event without numbers on a link with them", _no_numbers),
    Observation(
        "only-heartbeats", "2.4", "a link on which only heartbeats go for 270 s", _only_heartbeats, is_long=True
    ),
)
"""In the order in which they are made: the first one stores an event, which others need."""

NOT_OBSERVED: Final = {
    "3.5": "the lifetimes of tokens that are taken, which needs credentials of other kinds",
    "3.3": "the right that management needs, which needs a policy that has Send only",
    "1": "the address of a publisher policy",
    "5.2": "offsets of a geo-replicated namespace",
    "8.5": "for how long a producer is remembered",
}
"""What stays unknown, by section."""


async def observe(bench: Bench, observation: Observation) -> str:
    """Make one observation. What is refused or fails is an answer too."""
    try:
        async with asyncio.timeout(bench.timeout * 20 + (_IDLE if observation.is_long else 0)):
            return await observation.observe(bench)
    except TimeoutError:
        return "no answer"
    except EventPumpError as error:
        return refusal(error)
