"""The driver's requests to the service: what a hub holds, and the sequence numbers of positions."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from eventpump.aio.retry import retrying
from eventpump.aio.tasks import gather, reject, resolve
from eventpump.core.backoff import UNLIMITED, RetryPolicy, gives_up
from eventpump.errors import (
    ConfigurationError,
    ConsumerDisconnectedError,
    EntityNotFoundError,
    EventPumpError,
    QuotaExceededError,
    ServiceBusyError,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import PartitionProperties, ReceiveLinkSpec, Transport
from eventpump.spark.source.known_hubs import HubFacts, RequestBudget
from eventpump.spark.source.offsets import REFUSED_PATIENCE, is_behind, lookup_of, number_of
from eventpump.spark.source.options import SourceOptions

_T = TypeVar("_T")

_log = logging.getLogger("eventpump.spark")


async def read_facts(transport: Transport, options: SourceOptions, budget: RequestBudget | None = None) -> HubFacts:
    """Read a hub's properties and those of the partitions to read.

    Transient failures are retried with increasing delays, for `retry_timeout` seconds.

    Args:
        budget: Bounds the requests per second, together with others that have the same.

    Raises:
        ConfigurationError: The hub does not have a partition that was chosen.
        ServiceError: The failure lasted longer, or is permanent.
    """
    hub = options.connection.hub
    budget = budget or RequestBudget()
    properties = await request(partial(transport.get_hub_properties, hub), options, budget)
    ids = options.chosen(properties.partition_ids)
    partitions = await gather(
        request(partial(transport.get_partition_properties, hub, each), options, budget) for each in ids
    )
    return HubFacts(properties, tuple(partitions))


async def request(ask: Callable[[], Awaitable[_T]], options: SourceOptions, budget: RequestBudget) -> _T:
    """Make a request as soon as the budget allows it, and again after transient failures, for `retry_timeout`
    seconds."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(budget.turn(loop.time()))

    def failed(error: Exception) -> None:
        if isinstance(error, ServiceBusyError):
            budget.refused(loop.time())
        budget.turn(loop.time())

    return await persist(ask, options.retry_timeout, retry=options.connection.patience, on_retry=failed)


async def find_numbers(
    transport: Transport, options: SourceOptions, facts: HubFacts, *, is_end: bool = False
) -> dict[str, int]:
    """Resolve positions to sequence numbers, for every partition: the next to read, or the first not to be read.

    Offsets and times are looked up by receiving the first event there. In the consumer group of an exclusive reader
    this disconnects that reader.

    Raises:
        ConfigurationError: A position names an unknown partition, or is beyond the end and that is an error: always for
            a sequence number of one partition, and with `no_matching_position="error"` for all positions.
        ServiceError: The service refused, or did not answer in time.
    """
    options.require_partitions(facts.hub.partition_ids)
    option = "endingPosition" if is_end else "startingPosition"
    exact = options.ending_positions if is_end else options.starting_positions
    is_strict = options.no_matching_position == "error"

    async def find(properties: PartitionProperties) -> int:
        partition_id = properties.partition_id
        position = options.end_of(partition_id) if is_end else options.start_of(partition_id)
        is_own = partition_id in exact
        number = number_of(
            position,
            properties,
            option=f"{option}s" if is_own else option,
            is_end=is_end,
            must_exist=is_strict or is_own,
        )
        if number is None:
            return await _find_first(transport, options, partition_id, lookup_of(position, is_end=is_end))
        if is_strict and is_behind(position, properties, is_end=is_end):
            raise ConfigurationError(option, f"partition {partition_id} has no event at or after this position")
        return number

    numbers = await gather(find(each) for each in facts.partitions)
    return {each.partition_id: number for each, number in zip(facts.partitions, numbers, strict=True)}


async def require_consumer_group(transport: Transport, options: SourceOptions, option: str = "consumerGroup") -> None:
    """Check that a consumer group exists. A link without an owner level is opened for that: it disconnects no other
    reader.

    Raises:
        ConfigurationError: It does not exist.
        ServiceError: The hub does not exist, or the service did not answer.
    """
    connection = options.connection
    group = options.consumer_group if option == "consumerGroup" else options.watch_consumer_group
    assert group is not None
    properties = await transport.get_hub_properties(connection.hub)
    spec = ReceiveLinkSpec(
        hub=connection.hub,
        consumer_group=group,
        partition_id=min(properties.partition_ids, key=partition_order),
        position=EventPosition.latest(),
    )
    try:
        link = await transport.open_receive_link(spec, _FirstMessage())
    except EntityNotFoundError:
        instead = "use $Default" if option == "consumerGroup" else "leave the option out"
        problem = f"hub {connection.hub} has no consumer group {group}; create it, or {instead}"
        raise ConfigurationError(option, problem) from None
    except (ConsumerDisconnectedError, QuotaExceededError):
        return  # it has readers
    await link.aclose()


class _FirstMessage:
    """Receives the first message of a link. A :class:`eventpump.interfaces.ReceiveSink`."""

    def __init__(self) -> None:
        self.arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def messages(self, batch: list[bytes]) -> None:
        resolve(self.arrived, batch[0])

    def detached(self, error: EventPumpError) -> None:
        reject(self.arrived, error)


async def _find_first(transport: Transport, options: SourceOptions, partition_id: str, position: EventPosition) -> int:
    """Return the number of the first event at a position. A partition that is read exclusively is tried again until a
    kept link of a query is closed."""
    receive = options.receive
    refused_until = asyncio.get_running_loop().time() + REFUSED_PATIENCE

    def is_final(error: Exception) -> bool:
        if isinstance(error, ConsumerDisconnectedError) and receive.owner_level is None:
            return asyncio.get_running_loop().time() >= refused_until
        return gives_up(error)

    try:
        return await persist(
            lambda: _first_number(transport, options, partition_id, position),
            options.retry_timeout,
            retry=options.connection.patience,
            is_final=is_final,
        )
    except ConsumerDisconnectedError as error:
        raise receive.disconnected(error, options.connection.hub, partition_id) from error


async def _first_number(
    transport: Transport, options: SourceOptions, partition_id: str, position: EventPosition
) -> int:
    sink = _FirstMessage()
    spec = ReceiveLinkSpec(
        hub=options.connection.hub,
        consumer_group=options.consumer_group,
        partition_id=partition_id,
        position=position,
        owner_level=options.receive.owner_level,
    )
    link = await transport.open_receive_link(spec, sink)
    try:
        link.set_credit(1)
        return ReceivedEvent(await sink.arrived).sequence_number
    finally:
        sink.arrived.cancel()
        await link.aclose()


async def persist(
    ask: Callable[[], Awaitable[_T]],
    timeout: float,
    *,
    retry: RetryPolicy = UNLIMITED,
    is_final: Callable[[Exception], bool] = gives_up,
    on_retry: Callable[[Exception], None] | None = None,
) -> _T:
    """Repeat a request until it is answered.

    Args:
        timeout: Seconds, the option `retryTimeout`.
        retry: The delays, and how many attempts there are within that time.
        is_final: Returns whether no further attempt can help after an error.
        on_retry: Called with the error of an attempt that is followed by another.

    Raises:
        ServiceTimeoutError: There was no answer in time; its text has the last failure, which is its cause.
        ServiceError: The failure is permanent.
    """

    def log(error: Exception, delay: float) -> None:
        _log.warning("%s; asking again in %.1f s", error, delay)
        if on_retry is not None:
            on_retry(error)

    until = asyncio.get_running_loop().time() + timeout
    problem = f"the service did not answer within {timeout:g} s (retryTimeout)"
    if retry.max_retries is not None:
        problem += f" and {retry.max_retries} retries (retry)"
    try:
        return await retrying(ask, retry, random.Random(), until=until, is_final=is_final, on_retry=log)
    except TimeoutError:
        raise ServiceTimeoutError(f"{problem}; the first attempt was still under way") from None
    except ServiceError as error:
        if is_final(error):
            raise
        raise ServiceTimeoutError(f"{problem}; the last failure: {error}") from error
