"""Receive and send links: credit, order, outcomes, cancellation and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from eventpump.amqp.connection import Event, Outcomes
from eventpump.amqp.performatives import Accepted, AmqpError, Modified, Rejected, Released
from eventpump.errors import (
    AuthenticationError,
    ConnectionLostError,
    EntityNotFoundError,
    EventPumpError,
    EventTooLargeError,
    LinkDetachedError,
    Recovery,
    RequestRefusedError,
    ServiceBusyError,
    ServiceError,
    ServiceTimeoutError,
)
from eventpump.interfaces import CLOSE_TIMEOUT
from eventpump.testing.sink import RecordingSink
from eventpump.transport.links import ClientSendLink
from eventpump.transport.native import NativeTransport
from tests.unit.transport.service import Service, event, open_reader, open_sender, settle, stored_event

TOO_LARGE = AmqpError("amqp:link:message-size-exceeded", "The received message exceeds the limit.")
FORCED = AmqpError(
    "amqp:link:detach-forced",
    "The link was closed. TrackingId:abc_G1_B2, SystemTracker:ns:eventhub:telemetry~0, Timestamp:2024-01-01T00:00:00",
)


@pytest.fixture
async def transport(service: Service) -> AsyncIterator[NativeTransport]:
    """A transport to the service, closed with the test."""
    made = service.transport()
    yield made
    await made.aclose()


# ------------------------------------------------------------------------------------------------ receiving


async def test_sink_is_called_once_per_read(service: Service, transport: NativeTransport) -> None:
    """However many messages one read holds, a sink is called once for them, with the list as it is."""
    link, sink = await open_reader(transport)
    link.set_credit(500)
    await settle()
    sent = service.connection.only("0").send_run([stored_event(b"%d" % number) for number in range(300)])
    service.connection.flush()
    await settle()
    assert [len(batch) for batch in sink.batches] == [sent] == [300]


async def test_message_in_many_frames_arrives_whole(service: Service, transport: NativeTransport) -> None:
    """A message larger than a frame arrives whole, in both directions."""
    link, sink = await open_reader(transport)
    link.set_credit(1)
    await settle()
    body = bytes(range(256)) * 20_000
    service.connection.only("0").send(stored_event(body), settled=True)
    service.connection.flush()
    assert await sink.received(1) == [body]
    sender = await open_sender(transport)
    largest = event(body[:1_000_000])
    await sender.send(largest)
    assert service.stored == [largest]


async def test_unsettled_messages_are_accepted_once_per_read(
    service: Service, transport: NativeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that wants its messages settled gets them accepted, in one disposition a read."""
    service.script.snd_settle_mode = 2
    link, sink = await open_reader(transport)
    link.set_credit(10)
    await settle()
    there = service.connection.only("0")
    dispositions: list[list[Any]] = []
    take = service.connection.on_events

    def on_events(events: list[Event]) -> None:
        dispositions.extend([outcome for _, outcome in each.outcomes] for each in events if isinstance(each, Outcomes))
        take(events)

    monkeypatch.setattr(service.connection, "on_events", on_events)
    for count in (3, 2):
        for number in range(count):
            there.send(stored_event(b"%d" % number))
        assert len(there.session.unsettled) == count
        service.connection.flush()
        await settle()
        assert there.session.unsettled == {}
    assert [len(batch) for batch in sink.batches] == [3, 2]
    assert dispositions == [[Accepted()] * 3, [Accepted()] * 2]


async def test_link_closed_within_a_read_gets_no_more_of_it(service: Service, transport: NativeTransport) -> None:
    """A sink that closes another link in its own call keeps from that one what the same read brought for it."""

    class Closing(RecordingSink):
        def messages(self, batch: list[bytes]) -> None:
            super().messages(batch)
            second.detach_now()  # how `aclose` begins

    first, one = await open_reader(transport, "0", Closing())
    second, other = await open_reader(transport, "1")
    for link in (first, second):
        link.set_credit(10)
    await settle()
    service.connection.only("0").send(stored_event(), settled=True)
    service.connection.only("1").send(stored_event(), settled=True)
    service.connection.flush()
    await one.received(1)
    await settle()
    assert (other.batches, other.errors) == ([], [])
    assert service.connection.detached == ["1"]


async def test_detach_by_the_service_reports_its_condition_once(service: Service, transport: NativeTransport) -> None:
    """A link that the service ends calls the sink once, with condition, address and tracking id; the others go on."""
    _, sink = await open_reader(transport, "0")
    other, unharmed = await open_reader(transport, "1")
    service.connection.detach("0", FORCED)
    error = await sink.ended()
    assert isinstance(error, LinkDetachedError)
    assert error.recovery is Recovery.RELINK
    assert (error.condition, error.entity) == (
        "amqp:link:detach-forced",
        "telemetry/ConsumerGroups/$Default/Partitions/0",
    )
    assert error.tracking_id == "abc_G1_B2"
    other.set_credit(1)
    await settle()
    service.connection.only("1").send(stored_event(), settled=True)
    service.connection.flush()
    await unharmed.received(1)
    service.connection.drop()
    await unharmed.ended()
    assert sink.late == 0


async def test_attach_that_is_refused_raises_its_condition(service: Service, transport: NativeTransport) -> None:
    """A refusal raises the error of its condition, and the sink is not called."""
    service.script.refuse_attach["0"] = AmqpError("amqp:not-found", "The messaging entity 'x' could not be found.")
    sink = RecordingSink()
    with pytest.raises(EntityNotFoundError, match="could not be found"):
        await open_reader(transport, "0", sink)
    assert sink.errors == []


async def test_attach_detached_in_the_same_read_raises(service: Service, transport: NativeTransport) -> None:
    """Attached and detached in one read, a link is an error of the opening, and nothing the sink hears of."""
    for script in (service.script.detach_at_once,):
        script["0"] = script["Partitions/0"] = FORCED
    sink = RecordingSink()
    with pytest.raises(LinkDetachedError):
        await open_reader(transport, "0", sink)
    with pytest.raises(LinkDetachedError):
        await open_sender(transport)
    assert sink.errors == []


async def test_detach_for_an_expired_token_can_be_reopened(service: Service, transport: NativeTransport) -> None:
    """A link the service ends for its token may be opened again, and then another token is put first."""
    _, sink = await open_reader(transport)
    tokens = len(service.tokens)
    service.connection.detach("0", AmqpError("amqp:unauthorized-access", "ExpiredToken: The token is expired."))
    error = await sink.ended()
    assert isinstance(error, AuthenticationError)
    assert error.recovery is Recovery.RELINK
    await open_reader(transport)
    assert len(service.tokens) == tokens + 1


async def test_close_of_a_link_waits_a_bounded_time_for_the_detach(
    service: Service, transport: NativeTransport
) -> None:
    """Closing a link detaches it, and waits for the answer of a silent service for a few seconds only."""
    link, _ = await open_reader(transport)
    # What the client writes arrives; what the service answers does not.
    service.connection.stream.is_stalled = True
    began = asyncio.get_running_loop().time()
    await link.aclose()
    assert asyncio.get_running_loop().time() - began == pytest.approx(CLOSE_TIMEOUT)
    assert service.connection.detached == ["0"]
    service.connection.stream.resume()


# -------------------------------------------------------------------------------------------------- sending


async def test_send_without_credit_waits_in_order(service: Service, transport: NativeTransport) -> None:
    """As many messages go out as the service gave credit for, in the order of the calls; the rest wait."""
    service.script.credit = 0
    # The token node needs its own.
    await _with_credit(service, transport)
    link = await open_sender(transport)
    there = service.connection.only("Partitions/0")
    sends = [asyncio.ensure_future(link.send(event(b"%d" % number))) for number in range(5)]
    await settle()
    assert service.stored == []
    for credit, expected in ((2, 2), (0, 2), (1, 3), (10, 5)):
        there.set_credit(credit)
        service.connection.flush()
        await settle()
        assert service.stored == [event(b"%d" % number) for number in range(expected)]
    await asyncio.gather(*sends)


async def _with_credit(service: Service, transport: NativeTransport) -> None:
    service.script.credit = 100
    await open_sender(transport, "9")
    service.script.credit = 0


async def test_send_cancelled_without_credit_passes_its_turn_on(service: Service, transport: NativeTransport) -> None:
    """Cancelled while it waits for credit, a message is never sent, and its credit serves the one behind it."""
    await _with_credit(service, transport)
    link = await open_sender(transport)
    sends = [asyncio.ensure_future(link.send(event(b"%d" % number))) for number in range(3)]
    await settle()
    service.connection.only("Partitions/0").set_credit(2)
    service.connection.flush()
    # In the very turn in which credit comes.
    sends[0].cancel()
    outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1:] == [None, None]
    assert service.stored == [event(b"1"), event(b"2")]


async def test_send_cancelled_in_flight_affects_no_other(service: Service, transport: NativeTransport) -> None:
    """The outcome of a message whose sender gave up is dropped; the next send has its own."""
    link = await open_sender(transport)
    service.script.hold_messages.add("Partitions/0")
    send = asyncio.ensure_future(link.send(event(b"a")))
    await settle()
    send.cancel()
    await asyncio.gather(send, return_exceptions=True)
    service.script.hold_messages.clear()
    ((there, delivery_id),) = service.held
    there.settle(delivery_id, delivery_id, Rejected(AmqpError("com.microsoft:server-busy", "busy")))
    service.connection.flush()
    await link.send(event(b"b"))


@pytest.mark.parametrize(
    ("outcome", "kind", "recovery"),
    [
        (Rejected(AmqpError("com.microsoft:server-busy", "wait")), ServiceBusyError, Recovery.RETRY),
        (Rejected(AmqpError("amqp:not-allowed", "no")), RequestRefusedError, Recovery.GIVE_UP),
        (Rejected(None), RequestRefusedError, Recovery.GIVE_UP),
        (Released(), ServiceError, Recovery.RETRY),
        (Modified(), ServiceError, Recovery.RETRY),
    ],
    ids=["busy", "not allowed", "without a reason", "released", "modified"],
)
async def test_send_ends_with_every_outcome(
    service: Service, transport: NativeTransport, outcome: object, kind: type[ServiceError], recovery: Recovery
) -> None:
    """Whatever the service answers, a send ends, with the error that stands for it; the link serves the next."""
    link = await open_sender(transport)
    service.script.hold_messages.add("Partitions/0")
    send = asyncio.ensure_future(link.send(event()))
    await settle()
    ((there, delivery_id),) = service.held
    there.settle(delivery_id, delivery_id, outcome)
    service.connection.flush()
    with pytest.raises(kind) as caught:
        await send
    assert (caught.value.recovery, caught.value.entity) == (recovery, "telemetry/Partitions/0")
    service.script.hold_messages.clear()
    await link.send(event())


async def test_send_rejected_for_its_size_is_too_large(service: Service, transport: NativeTransport) -> None:
    """A message that fits the link's limit and is rejected as too large is an error with its size; the link remains."""
    link = await open_sender(transport)
    service.script.hold_messages.add("Partitions/0")
    sends = [asyncio.ensure_future(link.send(event(b"x" * size))) for size in (1, 100, 2)]
    await settle()
    there = service.held[1][0]
    for (_, delivery_id), outcome in zip(service.held, (Accepted(), Rejected(TOO_LARGE), Accepted()), strict=True):
        there.settle(delivery_id, delivery_id, outcome)
    service.connection.flush()
    first, large, last = await asyncio.gather(*sends, return_exceptions=True)
    assert (first, last, link.is_attached) == (None, None, True)
    assert isinstance(large, EventTooLargeError)
    assert (large.size, large.limit) == (len(event(b"x" * 100)), None)
    assert str(large) == f"the message takes {large.size} bytes, the service refused it as too large"
    assert isinstance(large.__cause__, RequestRefusedError)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_detach_for_a_size_is_final_for_the_largest_message_only(
    service: Service, transport: NativeTransport, *, cancelled: bool
) -> None:
    """Sends on a link that ends for a message's size need another link, except the largest; it may be cancelled."""
    link = await open_sender(transport)
    service.script.hold_messages.add("Partitions/0")
    sends = [asyncio.ensure_future(link.send(event(b"x" * size))) for size in (1, 100, 2)]
    await settle()
    if cancelled:
        sends[1].cancel()
        await settle()
    service.connection.only("Partitions/0").detach(TOO_LARGE)
    service.connection.flush()
    first, large, last = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(large, asyncio.CancelledError if cancelled else EventTooLargeError)
    for each in (first, last, await _failure(link.send(event()))):
        assert isinstance(each, LinkDetachedError)
        assert each.recovery is Recovery.RELINK


async def _failure(send: Coroutine[Any, Any, None]) -> BaseException | None:
    return (await asyncio.gather(send, return_exceptions=True))[0]


async def test_disposition_over_a_range_ends_every_send_in_it(service: Service, transport: NativeTransport) -> None:
    """A disposition over a range ends every send in it, and no other."""
    link = await open_sender(transport)
    service.script.hold_messages.add("Partitions/0")
    sends = [asyncio.ensure_future(link.send(event())) for _ in range(5)]
    await settle()
    ids = [delivery_id for _, delivery_id in service.held]
    service.held[0][0].settle(ids[0], ids[3], Accepted())
    service.connection.flush()
    await asyncio.gather(*sends[:4])
    assert not sends[4].done()
    service.connection.drop()
    with pytest.raises(ConnectionLostError):
        await sends[4]


async def test_sender_that_closes_the_link_at_its_outcome_takes_none_from_the_others(
    service: Service, transport: NativeTransport
) -> None:
    """Callers go on within the report of their outcomes: what was accepted with them is not sent again."""
    link = await open_sender(transport)
    service.script.hold_messages.add("Partitions/0")

    async def send_and_close() -> None:
        await link.send(event())
        await link.aclose()

    sends = [asyncio.ensure_future(each) for each in (send_and_close(), link.send(event()), link.send(event()))]
    await settle()
    ids = [delivery_id for _, delivery_id in service.held]
    service.held[0][0].settle(ids[0], ids[2], Accepted())
    service.connection.flush()
    assert await asyncio.gather(*sends, return_exceptions=True) == [None, None, None]


async def test_send_to_a_slow_service_waits_in_the_link_in_order(service: Service, transport: NativeTransport) -> None:
    """While the service does not read, messages wait in the link, not in the stream; then they go in their order."""
    link = await open_sender(transport)
    stream = service.connection.stream.peer
    assert isinstance(stream, type(service.connection.stream))
    stream.is_stalled = True
    body = bytes(100_000)
    sends = [asyncio.ensure_future(link.send(event(body + b"%d" % number))) for number in range(50)]
    await settle()
    assert stream.get_write_buffer_size() < 1_500_000
    stream.resume()
    sends.append(asyncio.ensure_future(link.send(event(body + b"50"))))
    await asyncio.gather(*sends)
    assert service.stored == [event(body + b"%d" % number) for number in range(51)]


async def test_single_send_is_written_at_once_and_others_share_a_write(
    service: Service, transport: NativeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is not held back for others while none is in flight; those that come meanwhile go out together."""
    link, other = await open_sender(transport), await open_sender(transport, "1")
    stream = service.connection.stream.peer
    writes: list[int] = []
    write = stream.write

    def count(data: Any) -> None:
        writes.append(len(data))
        write(data)

    monkeypatch.setattr(stream, "write", count)
    sending = link.send(event())
    sending.send(None)  # up to where it waits for the outcome
    assert len(writes) == 1
    sending.close()
    await settle()
    writes.clear()
    await asyncio.gather(*(each.send(event()) for each in (link, other) * 5))
    assert len(writes) == 2
    assert writes[1] > 8 * writes[0]
    assert len(service.stored) == 11


async def test_drain_is_answered(service: Service, transport: NativeTransport) -> None:
    """Asked to drain, a link uses or gives up its credit, and says so; new credit serves it again."""
    link = await open_sender(transport)
    there = service.connection.only("Partitions/0")
    there.set_credit(10, drain=True)
    service.connection.flush()
    await settle()
    assert (there.credit, there.drain) == (0, False)
    send = asyncio.ensure_future(link.send(event()))
    await settle()
    assert service.stored == []
    there.set_credit(1)
    service.connection.flush()
    await send


async def test_message_that_is_withdrawn_as_another_times_out_is_not_reported(
    service: Service, transport: NativeTransport
) -> None:
    """Two have the same time; the report of the first withdraws the second, whose time is over too."""
    link = await open_sender(transport)
    service.script.hold_messages.add("Partitions/0")
    reported: list[str] = []

    def first(error: BaseException | None) -> None:
        assert isinstance(error, ServiceTimeoutError)
        reported.append("first")
        second.withdraw()

    link.post(event(b"a"), first)
    second = link.post(event(b"b"), lambda error: reported.append("second"))
    await asyncio.sleep(61)
    assert reported == ["first"]


async def test_send_without_an_answer_ends_in_time(service: Service, transport: NativeTransport) -> None:
    """With no outcome, or no credit, within the time-out, a send says which, and asks for another link."""
    await _with_credit(service, transport)
    without, link = await open_sender(transport, "1"), await open_sender(transport)
    service.connection.only("Partitions/0").set_credit(10)
    service.connection.flush()
    service.script.hold_messages.add("Partitions/0")
    outcomes = await asyncio.gather(link.send(event()), without.send(event()), return_exceptions=True)
    for outcome, text in zip(outcomes, ("no outcome", "no credit"), strict=True):
        assert isinstance(outcome, ServiceTimeoutError)
        assert text in str(outcome)
        assert outcome.recovery is Recovery.RELINK


async def test_each_send_has_its_own_time(service: Service) -> None:
    """Sends share a timer; each has its whole time, whichever end before it, and what is answered does not expire."""
    transport = service.transport(operation_timeout=20.0)
    link = await open_sender(transport)
    clock = asyncio.get_running_loop()
    began = clock.time()
    await link.send(event())  # its timer finds others
    service.script.hold_messages.add("Partitions/0")
    ended: dict[int, float] = {}

    async def send(number: int) -> None:
        await asyncio.sleep(number * 3.0)
        with pytest.raises(ServiceTimeoutError if number != 2 else asyncio.CancelledError):
            await link.send(event(b"%d" % number))
        ended[number] = clock.time() - began

    sends = [asyncio.ensure_future(send(number)) for number in range(5)]
    await asyncio.sleep(10.0)
    sends[2].cancel()
    await asyncio.wait(sends)
    assert ended == pytest.approx({2: 10.0, 0: 20.0, 1: 23.0, 3: 29.0, 4: 32.0})
    service.script.hold_messages.clear()
    await link.send(event())
    await transport.aclose()
    # Nothing of an ended link waits for its time.
    assert link._timer is None


async def test_service_that_answers_nothing_is_left_when_the_idle_timeout_is_over(service: Service) -> None:
    """With heartbeats all the while: at the first time-out of a send that comes as late as that, at any time of day."""
    service.script.hold_messages.add("Partitions/0")

    async def send(moment: float) -> Recovery:
        transport = service.transport(operation_timeout=60.0, idle_timeout=60.0)
        link = await open_sender(transport)
        await asyncio.sleep(moment)
        with pytest.raises(ServiceTimeoutError) as raised:
            await link.send(event())
        await transport.aclose()
        return raised.value.recovery

    recoveries = await asyncio.gather(*(send(0.1 * number) for number in range(20)))
    assert set(recoveries) == {Recovery.RECONNECT}


async def test_send_waits_as_a_task_of_its_caller_and_no_timer_is_set_per_send(
    service: Service, transport: NativeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send makes neither a task nor a timer: what is set once serves those that follow."""
    link = await open_sender(transport)
    await link.send(event())
    loop = asyncio.get_running_loop()
    made: list[str] = []
    for name in ("call_at", "call_later", "create_task"):
        call = getattr(loop, name)

        def count(*args: Any, _call: Any = call, _name: str = name, **options: Any) -> Any:
            made.append(_name)
            return _call(*args, **options)

        monkeypatch.setattr(loop, name, count)
    for _ in range(10):
        await link.send(event())
    assert made == []


async def test_close_fails_waiting_sends_at_once(service: Service, transport: NativeTransport) -> None:
    """`aclose` fails the sends that wait before the service has answered anything."""
    link = await open_sender(transport)
    service.script.hold_messages.add("Partitions/0")
    send = asyncio.ensure_future(link.send(event()))
    await settle()
    service.connection.mute()
    closing = asyncio.ensure_future(link.aclose())
    before = asyncio.get_running_loop().time()
    with pytest.raises(LinkDetachedError, match="closed here"):
        await send
    assert asyncio.get_running_loop().time() == before
    await closing


async def test_detach_fails_waiting_sends(service: Service, transport: NativeTransport) -> None:
    """Detached, with messages in flight and others waiting for credit, all of them fail, and later ones at once."""
    await _with_credit(service, transport)
    link = await open_sender(transport)
    service.connection.only("Partitions/0").set_credit(2)
    service.connection.flush()
    service.script.hold_messages.add("Partitions/0")
    sends = [asyncio.ensure_future(link.send(event())) for _ in range(4)]
    await settle()
    assert len(service.held) == 2
    service.connection.detach("Partitions/0", FORCED)
    outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert all(isinstance(outcome, LinkDetachedError) for outcome in outcomes)
    with pytest.raises(LinkDetachedError, match="TrackingId"):
        await link.send(event())


async def _open_at_last(transport: NativeTransport) -> ClientSendLink:
    """Open a link. A token being put is shared: who asks next waits for the same answer, and may hear of its end."""
    for _ in range(2):
        with suppress(ServiceError):
            return await open_sender(transport)
    return await open_sender(transport)


@pytest.mark.parametrize("how", ["cancelled", "lost", "muted", "closed"])
@pytest.mark.parametrize("moment", ["begin", "attach", "token", "credit", "in flight", "read"])
async def test_wait_that_is_cancelled_cut_or_closed_leaves_nothing(service: Service, moment: str, how: str) -> None:
    """At each await on the way: cancelled, cut, silenced or closed, it ends, leaves nothing, and the next try works."""
    transport = service.transport(idle_timeout=15.0)
    script = service.script
    if moment == "begin":
        # The links of both nodes take what a session has: the next needs another.
        service.config = replace(service.config, handle_max=3)
        await transport.get_hub_properties("telemetry")
        service.connection.stream.is_stalled = True
    elif moment == "attach":
        script.hold_attach.add("Partitions/0")
    elif moment == "token":
        script.answer = lambda _request: None
    work: Coroutine[Any, Any, Any]
    if moment == "credit":
        await _with_credit(service, transport)
        work = (await open_sender(transport)).send(event(b"never"))
    elif moment == "in flight":
        link = await open_sender(transport)
        script.hold_messages.add("Partitions/0")
        work = link.send(event())
    elif moment == "read":
        script.hold_messages.add("$management")
        work = transport.get_hub_properties("telemetry")
    else:
        work = open_sender(transport)
    task = asyncio.ensure_future(work)
    await settle()
    assert not task.done()
    before = asyncio.get_running_loop().time()
    match how:
        case "cancelled":
            task.cancel()
        case "lost":
            service.connection.drop()
        case "muted":
            service.connection.mute()
        case "closed":
            await transport.aclose()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError if how == "cancelled" else EventPumpError)
    if how != "muted" and (moment, how) != ("begin", "closed"):  # the close has to pass a stalled stream there
        assert asyncio.get_running_loop().time() == before
    service.script.credit, service.script.answer = 1000, type(script)().answer
    script.hold_attach.clear()
    script.hold_messages.clear()
    if how == "closed":
        return
    if moment == "begin" and how == "cancelled":
        service.connection.stream.resume()
        await settle()
    link = await _open_at_last(transport)
    await link.send(event(b"then"))
    assert service.stored[-1] == event(b"then")
    assert event(b"never") not in service.stored
    if how in {"lost", "muted"}:
        assert len(service.connections) == 2
    elif moment in {"begin", "attach"}:
        # What was being attached is detached again: the service has the links that were asked for, and no other.
        await settle()
        assert len(service.connection.links["Partitions/0"]) == 1
        assert service.connection.detached == (["Partitions/0"] if moment == "attach" else [])
    await transport.aclose()
