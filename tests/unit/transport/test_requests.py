"""Requests over a pair of links: answers find who asked, and a pair that ends or is stuck is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from eventpump.amqp.link import Link
from eventpump.amqp.performatives import AmqpError
from eventpump.errors import EventPumpError, LinkDetachedError, Recovery, ServiceError, ServiceTimeoutError
from eventpump.transport.native import NativeTransport
from tests.unit.transport.service import Service, event, open_sender, settle

FORCED = AmqpError("amqp:link:detach-forced", "moved")


@pytest.fixture
async def transport(service: Service) -> AsyncIterator[NativeTransport]:
    """A transport to the service, whose management links are attached."""
    made = service.transport()
    await made.get_hub_properties("telemetry")
    yield made
    await made.aclose()


def pair(service: Service) -> tuple[Link, Link]:
    """Return the service's ends: what it sends answers on, and what it hears requests on."""
    links = service.connection.links["$management"]
    assert len(links) == 2
    return next(each for each in links if not each.is_receiver), next(each for each in links if each.is_receiver)


@pytest.mark.parametrize("which", [0, 1, None], ids=["answers", "requests", "both"])
async def test_detach_of_a_pair_fails_all_who_wait(
    service: Service, transport: NativeTransport, which: int | None
) -> None:
    """Whichever link of the pair the service ends, all waiters fail at once, and the next has a new pair."""
    service.script.hold_messages.add("$management")
    reads = [asyncio.ensure_future(transport.get_hub_properties("telemetry")) for _ in range(3)]
    await settle()
    before = asyncio.get_running_loop().time()
    if which is None:
        service.connection.detach("$management", FORCED)
    else:
        link = pair(service)[which]
        service.connection.links["$management"].remove(link)
        link.detach(FORCED)
        service.connection.flush()
    for outcome in await asyncio.gather(*reads, return_exceptions=True):
        assert isinstance(outcome, LinkDetachedError)
        assert outcome.condition == "amqp:link:detach-forced"
    assert asyncio.get_running_loop().time() == before
    service.script.hold_messages.clear()
    assert (await transport.get_hub_properties("telemetry")).partition_ids == ("0", "1")
    await settle()
    pair(service)


async def test_pair_that_ended_while_idle_is_replaced(service: Service, transport: NativeTransport) -> None:
    """Ended while unused, a pair is attached again by the next request, without an error."""
    for which in (0, 1):
        link = pair(service)[which]
        service.connection.links["$management"].remove(link)
        link.detach(FORCED)
        service.connection.flush()
        await settle()
        await transport.get_hub_properties("telemetry")
        await settle()
        pair(service)


async def test_pair_that_ends_while_attaching_raises(service: Service, transport: NativeTransport) -> None:
    """A link that is refused, or ends as soon as it is there, fails the request at once, and no half is left."""
    service.connection.detach("$management", FORCED)
    await settle()
    service.script.detach_at_once["$management"] = FORCED
    with pytest.raises(LinkDetachedError):
        await transport.get_hub_properties("telemetry")
    service.script.refuse_attach["$management"] = FORCED
    with pytest.raises(LinkDetachedError):
        await transport.get_hub_properties("telemetry")
    service.script.refuse_attach.clear()
    await transport.get_hub_properties("telemetry")
    await settle()
    pair(service)


async def test_pair_without_answers_is_replaced(service: Service, transport: NativeTransport) -> None:
    """A node that answers nothing within the time-out is asked over new links next time; the connection stays."""
    sender = await open_sender(transport)
    service.script.hold_messages.add("$management")
    read = asyncio.ensure_future(transport.get_hub_properties("telemetry"))
    await asyncio.sleep(10)
    await sender.send(event())
    with pytest.raises(ServiceTimeoutError) as caught:
        await read
    assert caught.value.recovery is Recovery.RETRY
    service.script.hold_messages.clear()
    await transport.get_hub_properties("telemetry")
    assert service.seen.count("$management") == 4
    assert len(service.connections) == 1


async def test_request_without_an_answer_ends_alone(service: Service, transport: NativeTransport) -> None:
    """While others are answered, one that is not ends alone."""
    service.script.hold_messages.add("$management")
    slow = asyncio.ensure_future(transport.get_hub_properties("telemetry"))
    await asyncio.sleep(10)
    service.script.hold_messages.clear()
    await transport.get_hub_properties("telemetry")
    with pytest.raises(ServiceTimeoutError):
        await slow
    await transport.get_hub_properties("telemetry")
    assert service.seen.count("$management") == 2


async def test_answer_that_cannot_be_read_fails_all_who_wait(service: Service, transport: NativeTransport) -> None:
    """Bytes that are no message end the wait with an error, not the connection, and not in a hang."""
    service.script.hold_messages.add("$management")
    read = asyncio.ensure_future(transport.get_hub_properties("telemetry"))
    await settle()
    pair(service)[0].send(b"\xff\xff\xff", settled=True)
    service.connection.flush()
    with pytest.raises(ServiceError, match="decoded"):
        await read
    service.script.hold_messages.clear()
    await transport.get_hub_properties("telemetry")
    assert len(service.connections) == 1


async def test_request_cancelled_while_attaching_passes_its_turn_on(
    service: Service, transport: NativeTransport
) -> None:
    """Cancelled while it attaches the pair, a request leaves that to the next in line."""
    service.connection.detach("$management", FORCED)
    await settle()
    service.script.hold_attach.add("$management")
    first, second = (asyncio.ensure_future(transport.get_hub_properties("telemetry")) for _ in range(2))
    await settle()
    service.script.hold_attach.clear()
    first.cancel()
    assert (await second).name == "telemetry"
    with pytest.raises(asyncio.CancelledError):
        await first
    await settle()
    pair(service)


async def test_requests_in_thousands_keep_their_credit(service: Service, transport: NativeTransport) -> None:
    """Credit for answers is renewed as they come, so that no number of requests dries it up."""
    for _ in range(4):
        await asyncio.gather(*(transport.get_hub_properties("telemetry") for _ in range(80)))
    assert service.seen.count("$management") == 2
    assert pair(service)[0].credit > 0


async def test_close_fails_waiting_requests(service: Service, transport: NativeTransport) -> None:
    """Closing ends requests at once, with an error to give up on."""
    service.script.hold_messages.add("$management")
    read = asyncio.ensure_future(transport.get_hub_properties("telemetry"))
    await settle()
    await transport.aclose()
    with pytest.raises(EventPumpError) as caught:
        await read
    assert isinstance(caught.value, ServiceError)
    assert caught.value.recovery is Recovery.GIVE_UP
