"""The transport: attempts to connect shared and spaced, what counts as a success, and closing at any moment."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.performatives import AmqpError
from eventpump.errors import (
    ClosedError,
    ConnectionLostError,
    EventPumpError,
    QuotaExceededError,
    Recovery,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.options.base import RetryOptions
from eventpump.testing.sink import RecordingSink
from eventpump.transport.namespace import STEADY_AFTER
from eventpump.transport.native import NativeTransport
from tests.unit.transport.service import Service, event, open_reader, open_sender, settle

RETRY = RetryOptions(base_delay=1.0, max_delay=8.0)


async def refused() -> None:
    raise ConnectionLostError("cannot connect: Connection refused")


async def never() -> None:
    await asyncio.Event().wait()


def now() -> float:
    return asyncio.get_running_loop().time()


async def errors(transport: NativeTransport, count: int) -> list[ConnectionLostError]:
    """Open links one after the other, each of which fails for want of a connection."""
    raised = []
    for _ in range(count):
        with pytest.raises(ConnectionLostError) as caught:
            await open_sender(transport)
        raised.append(caught.value)
    return raised


def drop_after(service: Service, turns: int) -> None:
    """Have the next connection cut after so many turns of the loop."""
    loop = asyncio.get_running_loop()

    def turn(left: int) -> None:
        if left:
            loop.call_soon(turn, left - 1)
        else:
            service.connection.drop()

    async def connect() -> None:
        loop.call_soon(turn, turns)

    service.script.connect = connect


async def test_connection_is_shared_by_all_links(service: Service) -> None:
    """Links and reads that begin together, of any kind, share one attempt and one connection."""
    transport = service.transport()
    await asyncio.gather(
        *(open_reader(transport, str(number)) for number in range(8)),
        *(open_sender(transport, str(number)) for number in range(8)),
        *(transport.get_hub_properties("telemetry") for _ in range(8)),
    )
    assert len(service.attempts) == 1
    assert service.seen.count("$cbs") == service.seen.count("$management") == 2
    await transport.aclose()


async def test_connect_that_fails_raises_to_all_who_wait(service: Service) -> None:
    """All callers that wait for one attempt get its failure, with its reason."""
    transport = service.transport()
    service.script.connect = refused
    outcomes = await asyncio.gather(*(open_sender(transport) for _ in range(5)), return_exceptions=True)
    assert len(service.attempts) == 1
    for outcome in outcomes:
        assert isinstance(outcome, ConnectionLostError)
        assert outcome.recovery is Recovery.RECONNECT
        assert "Connection refused" in str(outcome)
    await transport.aclose()


async def test_connect_attempts_are_spaced_by_the_back_off(service: Service) -> None:
    """However often it is asked, it tries to connect after delays that double up to their maximum."""
    transport = service.transport(retry=RETRY)
    service.script.connect = refused
    await errors(transport, 7)
    gaps = [after - before for before, after in zip(service.attempts, service.attempts[1:], strict=False)]
    assert gaps == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    await transport.aclose()


async def test_connect_back_off_ends_only_with_a_link(service: Service) -> None:
    """A connection that opens and dies before a link was attached is a failure; a link on one resets the delays."""
    transport = service.transport(retry=RETRY)
    script = service.script
    script.hold_attach.add("$cbs")
    for _ in range(3):
        drop_after(service, 30)
        with pytest.raises(ConnectionLostError):
            await open_sender(transport)
    script.connect = None
    assert [round(at - service.attempts[0]) for at in service.attempts] == [0, 1, 3]
    script.hold_attach.clear()
    await open_sender(transport)
    assert round(service.attempts[3] - service.attempts[2]) == 4
    await asyncio.sleep(STEADY_AFTER)
    lost = now()
    service.connection.drop()
    await settle()
    await open_sender(transport)
    assert service.attempts[4] - lost <= RETRY.base_delay
    service.connection.drop()
    await settle()
    script.connect = refused
    await errors(transport, 3)
    assert [service.attempts[each] - service.attempts[each - 1] for each in (6, 7)] == [1.0, 2.0]
    await transport.aclose()


async def test_connect_after_a_long_lived_connection_is_immediate(service: Service) -> None:
    """Lost after it served for long, a connection is replaced without delay."""
    transport = service.transport(retry=RETRY)
    _, sink = await open_reader(transport)
    await asyncio.sleep(100)
    service.connection.drop()
    await sink.ended()
    before = now()
    await open_reader(transport)
    assert now() == before
    await transport.aclose()


async def test_connect_whose_caller_is_cancelled_goes_on(service: Service) -> None:
    """Cancelled while it is connecting, a caller leaves the attempt to the others, and to those who come next."""
    transport = service.transport()
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    service.script.connect = wait
    first, second = asyncio.ensure_future(open_sender(transport)), asyncio.ensure_future(open_sender(transport))
    await settle()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.set()
    await second
    assert len(service.attempts) == 1
    await transport.aclose()


@pytest.mark.parametrize("moment", ["dialling", "opening", "waiting"])
async def test_close_while_connecting_raises_to_all_who_wait(service: Service, moment: str) -> None:
    """Closing ends an attempt at every stage; those who waited for it get an error, and are not cancelled."""
    transport = service.transport()
    if moment == "waiting":
        service.script.connect = refused
        await errors(transport, 3)
    service.script.connect = never if moment == "dialling" else None
    service.script.hold_attach.add("$cbs")
    opening = [asyncio.ensure_future(open_sender(transport)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if moment == "dialling":
        await settle()
    await asyncio.gather(transport.aclose(), transport.aclose())
    await transport.aclose()
    for outcome in await asyncio.gather(*opening, return_exceptions=True):
        assert isinstance(outcome, ClosedError)


@pytest.mark.parametrize("turns", [1, 2, 3, 50])
async def test_close_that_is_cancelled_drops_the_connection(service: Service, turns: int) -> None:
    """`aclose` that is cancelled while the service does not answer leaves neither stream nor task."""
    transport = service.transport()
    await open_reader(transport)
    service.connection.mute()
    closing = asyncio.ensure_future(transport.aclose())
    await settle(turns)
    assert not closing.done()
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await settle()
    assert service.connection.stream.peer.is_lost


async def test_connect_without_an_answer_ends_in_time(service: Service) -> None:
    """A service that does not take or open the connection in time is an error, and the stream is dropped."""
    transport = service.transport(operation_timeout=5.0)
    service.script.connect = never
    before = now()
    (error,) = await errors(transport, 1)
    assert "no answer from example.test:5672 within 5" in str(error)
    assert now() - before == 5.0

    async def mute() -> None:
        asyncio.get_running_loop().call_soon(lambda: service.connection.mute())

    service.script.connect = mute
    (error,) = await errors(transport, 1)
    assert "no answer" in str(error)
    await transport.aclose()


async def test_connection_half_open_ends_after_the_idle_time_out(service: Service) -> None:
    """When nothing comes any more, links end after the idle time-out, and the next one is on a new connection."""
    transport = service.transport(idle_timeout=30.0)
    service.config = replace(service.config, idle_timeout=30.0)
    _, sink = await open_reader(transport)
    await asyncio.sleep(300)
    assert sink.errors == []
    service.connection.mute()
    await asyncio.sleep(30.0)
    error = await sink.ended()
    assert isinstance(error, ConnectionLostError)
    assert error.recovery is Recovery.RECONNECT
    await open_reader(transport)
    assert len(service.connections) == 2
    await transport.aclose()


async def test_connection_with_heartbeats_only_is_replaced(service: Service) -> None:
    """A connection whose heart beats, and on which nothing is answered for the idle time-out, is replaced."""
    transport = service.transport(operation_timeout=20.0, idle_timeout=30.0)
    _, sink = await open_reader(transport, "0")
    service.connection.stream.peer.is_mute = True  # the service hears nothing
    heart = asyncio.ensure_future(_beat(service))
    with pytest.raises(ServiceTimeoutError) as caught:
        await open_reader(transport, "1")
    assert caught.value.recovery is Recovery.RELINK
    assert sink.errors == []
    with pytest.raises(ServiceTimeoutError) as caught:
        await open_reader(transport, "2")
    assert caught.value.recovery is Recovery.RECONNECT
    assert isinstance(await sink.ended(), ConnectionLostError)
    heart.cancel()
    await transport.aclose()


@pytest.mark.parametrize("what", ["attach", "send"])
async def test_dead_connection_is_found_by_callers_with_a_shorter_time(service: Service, what: str) -> None:
    """Attempts that are cancelled before `operation_timeout` find a dead connection after the idle time-out, too."""
    transport = service.transport(operation_timeout=20.0, idle_timeout=30.0)
    link = await open_sender(transport, "1")
    _, sink = await open_reader(transport, "0")
    service.connection.stream.peer.is_mute = True  # the service hears nothing
    heart = asyncio.ensure_future(_beat(service))
    began = asyncio.get_running_loop().time()
    while not sink.errors:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4):
                await (open_reader(transport, "2") if what == "attach" else link.send(event()))
    assert isinstance(await sink.ended(), ConnectionLostError)
    assert 30 <= asyncio.get_running_loop().time() - began <= 34
    heart.cancel()
    await open_reader(transport, "0")
    assert len(service.connections) == 2
    await transport.aclose()


async def test_cancelled_calls_cost_no_connection_that_answers(service: Service) -> None:
    """However often callers give up, a service that answers others, or was sent nothing, keeps its connection."""
    transport = service.transport(operation_timeout=20.0, idle_timeout=30.0)
    link, other = await open_sender(transport, "0"), await open_sender(transport, "1")
    service.script.hold_messages.add("Partitions/0")
    for _ in range(15):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4):
                await link.send(event())
        await other.send(event())
    there = service.connection.only("Partitions/0")
    there.set_credit(0)
    service.connection.flush()
    await settle()
    for _ in range(15):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4):
                await link.send(event())  # it waits for credit: nothing is asked of the service
    assert other.is_attached
    assert len(service.connections) == 1
    await transport.aclose()


async def _beat(service: Service) -> None:
    while True:
        await asyncio.sleep(5)
        service.connection.engine.heartbeat()
        service.connection.flush()


async def test_attach_without_an_answer_affects_no_other(service: Service) -> None:
    """While other links are answered, a partition whose attach is not ends no connection."""
    transport = service.transport(operation_timeout=20.0, idle_timeout=30.0)
    service.config = replace(service.config, idle_timeout=30.0)
    sender = await open_sender(transport)
    service.script.hold_attach.add("1")
    for _ in range(4):
        opening = asyncio.ensure_future(open_reader(transport, "1"))
        await asyncio.sleep(10)
        await sender.send(event())
        with pytest.raises(ServiceTimeoutError) as caught:
            await opening
        assert caught.value.recovery is Recovery.RELINK
    assert len(service.connections) == 1
    await settle()
    assert service.connection.detached == ["1"] * 4
    await transport.aclose()


@pytest.mark.parametrize("handle_max", [0, 1, 2, 7])
async def test_links_are_spread_over_sessions(service: Service, handle_max: int) -> None:
    """No session carries more links than the service allows, however few; all of them work."""
    service.config = replace(service.config, handle_max=handle_max)
    transport = service.transport()
    senders = await asyncio.gather(*(open_sender(transport, str(number)) for number in range(12)))
    await asyncio.gather(*(sender.send(event(b"%d" % number)) for number, sender in enumerate(senders)))
    assert sorted(service.stored) == sorted(event(b"%d" % number) for number in range(12))
    sessions = list(service.connection.engine.sessions.values())
    assert all(len(session.links) <= handle_max + 1 for session in sessions)
    assert sum(len(session.links) for session in sessions) == 14
    # What is closed makes room.
    await asyncio.gather(*(sender.aclose() for sender in senders))
    await asyncio.gather(*(open_sender(transport, str(number)) for number in range(12)))
    assert len(service.connection.engine.sessions) == len(sessions)
    await transport.aclose()


async def test_attach_on_a_full_connection_is_refused(service: Service) -> None:
    """With every channel and handle in use, another link is refused, and those there are go on."""
    service.config = ConnectionConfig(container_id="small", idle_timeout=None, channel_max=1, handle_max=1)
    transport = service.transport()
    senders = [await open_sender(transport, str(number)) for number in range(2)]
    with pytest.raises(QuotaExceededError, match="no more links"):
        await open_sender(transport, "2")
    for sender in senders:
        await sender.send(event())
    await transport.aclose()


async def test_session_that_ends_takes_its_links_along(service: Service) -> None:
    """Links get the end of their session; links opened then, and those of other sessions, work."""
    service.config = replace(service.config, handle_max=1)
    transport = service.transport()
    _, sink = await open_reader(transport, "0")
    _, other = await open_reader(transport, "7")
    session = service.connection.only("0").session
    is_shared = service.connection.only("7").session is session
    session.end()
    service.connection.flush()
    error = await sink.ended()
    assert error.recovery is Recovery.RELINK
    assert (len(other.errors) == 1) is is_shared
    await open_reader(transport, "0")
    assert len(service.connections) == 1
    await transport.aclose()


async def test_connection_closed_by_the_service_reports_its_condition(service: Service) -> None:
    """The condition and words of a close reach every link; the next one connects again."""
    transport = service.transport()
    sinks = [(await open_reader(transport, str(number)))[1] for number in range(3)]

    service.connection.engine.close(AmqpError("amqp:connection:forced", "upgrade. TrackingId:xyz_G1"))
    service.connection.flush()
    for sink in sinks:
        error = await sink.ended()
        assert isinstance(error, ConnectionLostError)
        assert (error.condition, error.tracking_id) == ("amqp:connection:forced", "xyz_G1")
        assert error.recovery is Recovery.RECONNECT
    await open_reader(transport)
    await transport.aclose()


async def test_connection_close_is_final_only_before_first_use(service: Service) -> None:
    """A condition to give up on is that where the service closes at once; on a connection of use it means another."""
    transport = service.transport()
    _, sink = await open_reader(transport)
    forbidden = AmqpError("amqp:resource-limit-exceeded", "silent for 240 seconds")
    service.connection.engine.close(forbidden)
    service.connection.flush()
    error = await sink.ended()
    assert isinstance(error, ConnectionLostError)
    assert (error.recovery, error.condition) == (Recovery.RECONNECT, "amqp:resource-limit-exceeded")

    async def close() -> None:
        loop = asyncio.get_running_loop()

        def refuse() -> None:
            if service.connection.engine.is_open:
                service.connection.engine.close(forbidden)
                service.connection.flush()
            else:
                loop.call_soon(refuse)

        loop.call_soon(refuse)

    service.script.connect = close
    with pytest.raises(QuotaExceededError) as caught:
        await open_reader(transport)
    assert caught.value.recovery is Recovery.GIVE_UP
    await transport.aclose()


async def test_connection_dropped_again_and_again_recovers_without_a_task(service: Service) -> None:
    """Cut again and again while many links open, every opening ends, attempts stay apart, and at last all work."""
    transport = service.transport(retry=RETRY)

    async def until_open(number: int) -> None:
        while True:
            try:
                await open_reader(transport, str(number), RecordingSink())
            except ServiceError:
                await asyncio.sleep(0.1)
            else:
                return

    turns = [1, 4, 9, 14, 20, 27]

    async def connect() -> None:
        if turns:
            drop_after(service, turns.pop())
            assert service.script.connect is not None
            await service.script.connect()
            service.script.connect = connect

    service.script.connect = connect
    await asyncio.gather(*(until_open(number) for number in range(20)))
    assert turns == []
    gaps = [after - before for before, after in zip(service.attempts, service.attempts[1:], strict=False)]
    assert len(service.attempts) >= 6
    assert min(gaps) >= RETRY.base_delay
    await transport.aclose()


async def test_ca_file_that_cannot_be_read_is_named() -> None:
    """A CA file without a certificate is a mistake in the settings, said as such before anything is dialled."""
    from pathlib import Path

    from eventpump.errors import ConfigurationError
    from eventpump.options.connection import connection_settings
    from eventpump.options.credentials import SharedKey

    settings = connection_settings(
        hub="telemetry",
        fully_qualified_namespace="example.test",
        credential=SharedKey("key", "x"),  # type: ignore[arg-type]  # plain text is taken too
        ca_file=Path(__file__),
    )
    service = Service()
    transport = NativeTransport(settings, dialer=service.dial)
    with pytest.raises(ConfigurationError, match="ca_file"):
        await transport.get_hub_properties("telemetry")
    assert service.attempts == []
    await transport.aclose()


async def test_attach_after_close_is_refused(service: Service) -> None:
    """Closed, a transport makes no connection any more."""
    transport = service.transport()
    await transport.aclose()
    with pytest.raises(EventPumpError, match="closed"):
        await open_sender(transport)
    assert service.attempts == []
