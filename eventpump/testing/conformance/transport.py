"""The contract of `Transport`, as a pytest class.

Subclass it under a name that starts with `Test`, in a module with a fixture `harness` that gives a `TransportHarness`,
and with pytest-asyncio in auto mode. For assertions that explain themselves call, before the import,
`pytest.register_assert_rewrite("eventpump.testing.conformance.transport")`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from eventpump.errors import (
    ClosedError,
    ConnectionLostError,
    ConsumerDisconnectedError,
    EntityNotFoundError,
    EventPumpError,
    EventTooLargeError,
    LinkDetachedError,
    QuotaExceededError,
    Recovery,
    RequestRefusedError,
    ServiceError,
)
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.events import EventData, EventPosition, ReceivedEvent
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT
from eventpump.interfaces import ReceiveLinkSpec, SendLinkSpec
from eventpump.testing.sink import PATIENCE, RecordingSink

if TYPE_CHECKING:
    from eventpump.interfaces import ReceiveLink, Transport

HUB = "telemetry"
PARTITIONS = ("0", "1", "2", "3")
EARLIEST = EventPosition.earliest()


class TransportHarness(Protocol):
    """Creates the suite's transports, all to one namespace with an empty hub `telemetry` of four partitions."""

    @property
    def can_probe(self) -> bool:
        """Whether the transports can probe a link."""

    def new_transport(self) -> Transport:
        """Return a new transport. The harness closes it."""

    def hold(self, operation: str) -> Callable[[], None]:
        """Leave requests of a kind unanswered until the returned function is called.

        Args:
            operation: "receive" or "send" for attaching such a link, "transfer" for a message of a send link,
                "delivery" for events and answers to probes, on receive links that an event is due on.
        """

    def lose_connections(self) -> None:
        """Cut every connection, without a close."""


class TransportContract:
    """The guarantees of `Transport`, `ReceiveLink`, `SendLink` and `HubDirectory`."""

    # ---- receive links

    async def test_link_starts_without_credit(self, harness: TransportHarness) -> None:
        """Nothing arrives before credit is given."""
        transport = harness.new_transport()
        await _publish(transport, "0", b"a", b"b")
        _, silent = await _open(transport, "0")
        await _barrier(transport, "0")
        assert silent.batches == []

    async def test_set_credit_bounds_what_comes(self, harness: TransportHarness) -> None:
        """Credit is what the service may send from now on: no more arrives, and new credit replaces the old."""
        transport = harness.new_transport()
        await _publish(transport, "0", *(b"%d" % number for number in range(9)))
        link, sink = await _open(transport, "0")
        link.set_credit(2)
        await sink.received(2)
        await _barrier(transport, "0")
        assert sink.bodies == [b"0", b"1"]
        link.set_credit(4)
        await sink.received(6)
        await _barrier(transport, "0")
        assert sink.bodies == [b"%d" % number for number in range(6)]

    async def test_set_credit_to_zero_stops_the_service(self, harness: TransportHarness) -> None:
        """Set back to 0, the service sends nothing that was not on its way; later credit goes on where it stopped."""
        transport = harness.new_transport()
        link, sink = await _open(transport, "0")
        link.set_credit(100)
        await _publish(transport, "0", b"first")
        await sink.received(1)
        link.set_credit(0)
        # An answer over the same connection shows that the service has received it.
        await transport.get_partition_properties(HUB, "0")
        await _publish(transport, "0", b"second")
        await _barrier(transport, "0")
        assert sink.bodies == [b"first"]
        link.set_credit(1)
        assert await sink.received(2) == [b"first", b"second"]

    async def test_receive_gives_events_once_in_order(self, harness: TransportHarness) -> None:
        """A partition's events arrive in the order of their sequence numbers, each once, whatever the credit steps."""
        transport = harness.new_transport()
        bodies = [b"%d" % number for number in range(300)]
        await _publish(transport, "0", *bodies)
        link, sink = await _open(transport, "0")
        while len(sink.bodies) < 300:
            link.set_credit(7)
            await sink.received(min(len(sink.bodies) + 7, 300))
        assert sink.bodies == bodies
        assert [event.sequence_number for event in sink.events] == list(range(300))

    async def test_receive_gives_the_sink_a_list_of_its_own(self, harness: TransportHarness) -> None:
        """The list passed to the sink is not shared: if the sink empties it, nothing is missing later."""
        transport = harness.new_transport()
        sink = RecordingSink()
        taken: list[bytes] = []

        class Taking:
            def messages(self, batch: list[bytes]) -> None:
                sink.messages(list(batch))
                taken.extend(batch)
                batch.clear()

            def detached(self, error: EventPumpError) -> None:
                sink.detached(error)

        link = await transport.open_receive_link(_reading("0"), Taking())
        link.set_credit(1000)
        for number in range(20):
            await _publish(transport, "0", b"%d" % number)
        await sink.received(20)
        _, other = await _open(transport, "0", credit=100)
        assert await other.received(20) == sink.bodies == [ReceivedEvent(raw).body for raw in taken]

    async def test_receive_begins_at_every_kind_of_position(self, harness: TransportHarness) -> None:
        """A link begins at its position: either end of the stream, an offset, a sequence number or a time."""
        transport = harness.new_transport()
        await _publish(transport, "0", b"0", b"1", b"2")
        _, sink = await _open(transport, "0", credit=10)
        await sink.received(3)
        middle = sink.events[1]
        long_ago = datetime.now(UTC) - timedelta(days=9000)
        expected = {
            EventPosition.earliest(): [b"0", b"1", b"2"],
            EventPosition.latest(): [],
            EventPosition.at_offset(middle.offset): [b"2"],
            EventPosition.at_offset(middle.offset, inclusive=True): [b"1", b"2"],
            EventPosition.at_sequence_number(1): [b"2"],
            EventPosition.at_sequence_number(1, inclusive=True): [b"1", b"2"],
            EventPosition.at_enqueued_time(long_ago): [b"0", b"1", b"2"],
        }
        found = {}
        for position in expected:
            link, sink = await _open(transport, "0", position=position, credit=10)
            await _barrier(transport, "0")
            await link.aclose()
            found[position] = sink.bodies
        assert found == expected
        _, sink = await _open(transport, "0", position=EventPosition.latest(), credit=10)
        await _publish(transport, "0", b"3")
        assert await sink.received(1) == [b"3"]

    async def test_receive_with_track_last_enqueued_has_the_newest_event(self, harness: TransportHarness) -> None:
        """With `track_last_enqueued` every event has the properties of its partition's newest; without, none has."""
        transport = harness.new_transport()
        await _publish(transport, "0", b"0", b"1", b"2")
        _, plain = await _open(transport, "0", credit=10)
        _, tracking = await _open(transport, "0", credit=10, track_last_enqueued=True)
        await plain.received(3)
        await tracking.received(3)
        assert [event.last_enqueued for event in plain.events] == [None] * 3
        for event in tracking.events:
            assert event.last_enqueued is not None
            assert event.last_enqueued.sequence_number == 2
            assert event.last_enqueued.offset == tracking.events[-1].offset

    async def test_close_of_a_receive_link_ends_its_sink(self, harness: TransportHarness) -> None:
        """After `aclose` began the sink gets nothing, not even its end; closing twice and setting credit are fine."""
        transport = harness.new_transport()
        link, sink = await _open(transport, "0", credit=1000)
        await _publish(transport, "0", b"before")
        await sink.received(1)
        closing = asyncio.ensure_future(link.aclose())
        await asyncio.sleep(0)
        sending = asyncio.ensure_future(_publish(transport, "0", b"after"))
        await closing
        await sending
        await link.aclose()
        link.set_credit(10)
        await _barrier(transport, "0")
        assert (sink.bodies, sink.errors) == ([b"before"], [])

    async def test_close_of_a_receive_link_by_its_sink_ends_it(self, harness: TransportHarness) -> None:
        """A sink that closes its link at the first batch gets no other, though more was on its way."""
        transport = harness.new_transport()
        await _publish(transport, "0", *(b"%d" % number for number in range(600)))
        started: asyncio.Future[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        seen: list[int] = []

        class Closing:
            def messages(self, batch: list[bytes]) -> None:
                seen.append(len(batch))
                if not started.done():
                    closing = asyncio.ensure_future(link.aclose())
                    started.set_result(closing)

            def detached(self, error: EventPumpError) -> None:
                raise AssertionError(f"called with an end that the sink itself caused: {error}")

        link = await transport.open_receive_link(_reading("0"), Closing())
        link.set_credit(1000)
        async with asyncio.timeout(PATIENCE):
            await (await started)
        after = len(seen)
        await _barrier(transport, "0")
        assert len(seen) == after

    async def test_close_of_a_receive_link_that_is_cancelled_closes(self, harness: TransportHarness) -> None:
        """`aclose` cancelled at once still ends the link: its place is free, and its sink is not called any more."""
        transport = harness.new_transport()
        links = [await _open(transport, "0", credit=10) for _ in range(5)]
        for link, _ in links:
            closing = asyncio.ensure_future(link.aclose())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
        for _ in range(4):
            await _open(transport, "0")
        await _barrier(transport, "0")
        assert all((sink.batches, sink.errors) == ([], []) for _, sink in links)

    async def test_open_of_a_receive_link_that_is_cancelled_leaves_none(self, harness: TransportHarness) -> None:
        """Opening that is cancelled while the service has not answered takes no reader's place."""
        transport = harness.new_transport()
        await transport.get_hub_properties(HUB)
        release = harness.hold("receive")
        sinks = [RecordingSink() for _ in range(5)]
        opening = [asyncio.ensure_future(transport.open_receive_link(_reading("0"), sink)) for sink in sinks]
        await transport.get_hub_properties(HUB)
        for task in opening:
            task.cancel()
        assert all(
            isinstance(outcome, asyncio.CancelledError)
            for outcome in await asyncio.gather(*opening, return_exceptions=True)
        )
        release()
        for _ in range(4):
            await _open(transport, "0")
        await _barrier(transport, "0")
        assert all((sink.batches, sink.errors) == ([], []) for sink in sinks)

    async def test_open_with_a_higher_owner_level_takes_over(self, harness: TransportHarness) -> None:
        """A reader with an owner level ends those of lower or equal level, on any connection; each gets one error."""
        one, other = harness.new_transport(), harness.new_transport()
        _, shared = await _open(one, "0", credit=10)
        _, first = await _open(one, "0", credit=10, owner_level=1)
        assert isinstance(await shared.ended(), ConsumerDisconnectedError)
        _, second = await _open(other, "0", credit=10, owner_level=1)
        error = await first.ended()
        assert isinstance(error, ConsumerDisconnectedError)
        assert (error.recovery, error.condition) == (Recovery.GIVE_UP, "amqp:link:stolen")
        await _publish(one, "0", b"x")
        assert await second.received(1) == [b"x"]
        assert (shared.late, first.late, first.batches) == (0, 0, [])

    async def test_open_with_a_lower_owner_level_is_refused(self, harness: TransportHarness) -> None:
        """A link with a lower owner level is not opened, its sink is not called, and the current reader goes on."""
        transport = harness.new_transport()
        _, sink = await _open(transport, "0", credit=10, owner_level=5)
        for level in (4, None):
            refused = RecordingSink()
            error = await _error_of(transport.open_receive_link(_reading("0", owner_level=level), refused))
            assert isinstance(error, ConsumerDisconnectedError)
            assert error.recovery is Recovery.GIVE_UP
            assert (refused.batches, refused.errors) == ([], [])
        await _publish(transport, "0", b"x")
        assert await sink.received(1) == [b"x"]

    async def test_open_of_a_sixth_shared_reader_names_the_others(self, harness: TransportHarness) -> None:
        """Five share a partition; the next is refused, with the names of those that are there."""
        transport = harness.new_transport()
        for number in range(5):
            await _open(transport, "0", receiver_name=f"reader-{number}")
        error = await _error_of(transport.open_receive_link(_reading("0"), RecordingSink()))
        assert isinstance(error, QuotaExceededError)
        assert all(f"reader-{number}" in error.description for number in range(5))

    async def test_open_of_a_receive_link_to_nowhere_is_refused(self, harness: TransportHarness) -> None:
        """Unknown hubs, consumer groups and partitions are permanent errors, which name what is missing."""
        transport = harness.new_transport()
        specs = {
            ReceiveLinkSpec("nothere", "$Default", "0", EARLIEST): EntityNotFoundError,
            ReceiveLinkSpec(HUB, "nothere", "0", EARLIEST): EntityNotFoundError,
            ReceiveLinkSpec(HUB, "$Default", "77", EARLIEST): RequestRefusedError,
        }
        for spec, kind in specs.items():
            error = await _error_of(transport.open_receive_link(spec, RecordingSink()))
            assert isinstance(error, kind)
            assert error.recovery is Recovery.GIVE_UP
            assert error.entity is not None

    async def test_open_takes_names_in_any_case(self, harness: TransportHarness) -> None:
        """Hubs and consumer groups are found however their names are written."""
        transport = harness.new_transport()
        await _publish(transport, "0", b"x")
        sink = RecordingSink()
        spec = ReceiveLinkSpec(HUB.upper(), "$default", "0", EARLIEST)
        (await transport.open_receive_link(spec, sink)).set_credit(1)
        assert await sink.received(1) == [b"x"]

    async def test_receive_links_are_separate(self, harness: TransportHarness) -> None:
        """Links of one transport receive their own events; the end of one does not affect the others."""
        transport = harness.new_transport()
        opened = [await _open(transport, partition, credit=100) for partition in PARTITIONS]
        await asyncio.gather(*(_publish(transport, partition, partition.encode()) for partition in PARTITIONS))
        for partition, (_, sink) in zip(PARTITIONS, opened, strict=True):
            assert await sink.received(1) == [partition.encode()]
        await opened[0][0].aclose()
        await _publish(transport, "1", b"more")
        assert await opened[1][1].received(2) == [b"1", b"more"]

    async def test_probe_is_answered_on_a_link_that_is_alive(self, harness: TransportHarness) -> None:
        """A link that is alive answers a probe, with credit or without; credit stays, and it ends with the link."""
        transport = harness.new_transport()
        expected = True if harness.can_probe else None
        link, sink = await _open(transport, "0")
        assert await link.probe(PATIENCE) is expected
        await _publish(transport, "0", *(b"%d" % number for number in range(9)))
        link.set_credit(2)
        await sink.received(2)
        assert await asyncio.gather(*(link.probe(PATIENCE) for _ in range(3))) == [expected] * 3
        await _barrier(transport, "0")
        assert sink.bodies == [b"0", b"1"]
        link.set_credit(7)
        assert await link.probe(PATIENCE) is expected
        await sink.received(9)
        await link.aclose()
        assert await link.probe(PATIENCE) is None

    async def test_probe_is_answered_after_what_was_sent_before(self, harness: TransportHarness) -> None:
        """When a probe is answered, every event that was stored before it was sent is there."""
        if not harness.can_probe:
            return
        transport = harness.new_transport()
        link, sink = await _open(transport, "0", credit=1000)
        for number in range(5):
            await _publish(transport, "0", *(b"x" for _ in range(20)))
            # By now the service has begun to send them: an answer over the same connection shows it.
            await _barrier(transport, "0")
            assert await link.probe(PATIENCE) is True
            assert len(sink.bodies) == (number + 1) * 20

    async def test_probe_without_an_answer_ends_in_time(self, harness: TransportHarness) -> None:
        """A probe of a silent link is not answered in time; if cancelled or timed out, the next one is answered."""
        transport = harness.new_transport()
        link, sink = await _open(transport, "0", credit=10)
        release = harness.hold("delivery")
        await _publish(transport, "0", b"x")
        await transport.get_partition_properties(HUB, "0")
        expected = False if harness.can_probe else None
        assert await link.probe(0.05) is expected
        probing = asyncio.ensure_future(link.probe(PATIENCE))
        await asyncio.sleep(0)
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        release()
        assert await sink.received(1) == [b"x"]
        assert await link.probe(PATIENCE) is (True if harness.can_probe else None)

    async def test_probe_ends_with_its_link(self, harness: TransportHarness) -> None:
        """A pending probe ends at once when its link ends, without a result."""
        transport = harness.new_transport()
        for end in ("closed", "lost"):
            link, _ = await _open(transport, "1", credit=10)
            release = harness.hold("delivery")
            await _publish(transport, "1", b"x")
            await transport.get_partition_properties(HUB, "1")
            probing = asyncio.ensure_future(link.probe(600.0))
            await asyncio.sleep(0)
            closing = asyncio.ensure_future(link.aclose()) if end == "closed" else None
            if closing is None:
                harness.lose_connections()
            async with asyncio.timeout(PATIENCE):
                assert await probing is None
            release()
            if closing is not None:
                await closing

    async def test_drop_connection_ends_all_links_of_it(self, harness: TransportHarness) -> None:
        """`drop_connection` ends all links of the connection, with `RECONNECT`, and none of the next connection."""
        transport = harness.new_transport()
        link, sink = await _open(transport, "0", credit=10)
        _, beside = await _open(transport, "1", credit=10)
        link.drop_connection("said by the test")
        for each in (sink, beside):
            error = await each.ended()
            assert isinstance(error, ConnectionLostError)
            assert (error.recovery, error.description) == (Recovery.RECONNECT, "said by the test")
        _, after = await _open(transport, "0", credit=10)
        link.drop_connection("said once more")
        await _publish(transport, "0", b"x")
        assert await after.received(1) == [b"x"]

    # ---- send links

    async def test_send_returns_when_the_event_is_stored(self, harness: TransportHarness) -> None:
        """When `send` returns, the event is stored: the partition's properties count it."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "2"))
        for number in range(3):
            await link.send(EventData(b"x").encode())
            properties = await transport.get_partition_properties(HUB, "2")
            assert properties.last_enqueued_sequence_number == number
        await link.aclose()

    async def test_sends_that_overlap_keep_their_order(self, harness: TransportHarness) -> None:
        """Sends begun together are stored in the order of the calls, more of them than there ever is credit."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        bodies = [b"%d" % number for number in range(1500)]
        await asyncio.gather(*(link.send(EventData(body).encode()) for body in bodies))
        _, sink = await _open(transport, "0", credit=2000)
        assert await sink.received(1500) == bodies

    async def test_send_of_an_envelope_stores_its_events(self, harness: TransportHarness) -> None:
        """A message of the batch format is stored as the events it holds."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        await link.send(
            encode_batch([EventData(b"a").encode(), EventData(b"b").encode()]), message_format=BATCH_MESSAGE_FORMAT
        )
        _, sink = await _open(transport, "0", credit=10)
        assert await sink.received(2) == [b"a", b"b"]

    async def test_send_of_the_largest_message_succeeds_and_a_byte_more_does_not(
        self, harness: TransportHarness
    ) -> None:
        """The limit is exact: a message of that size goes through, both ways; above it nothing is sent."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        limit = link.max_message_size
        overhead = len(EventData(bytes(limit // 2)).encode()) - limit // 2
        body = bytes(limit - overhead)
        error = await _error_of(link.send(EventData(body + b"x").encode()))
        assert isinstance(error, EventTooLargeError)
        assert (error.size, error.limit) == (limit + 1, limit)
        await link.send(EventData(body).encode())
        reader, sink = await _open(transport, "0", credit=10, max_message_size=2 * limit)
        assert await sink.received(1) == [body]
        assert reader.max_message_size > 0

    async def test_close_of_a_send_link_fails_waiting_sends(self, harness: TransportHarness) -> None:
        """`aclose` fails the sends that wait, and later ones, with `LinkDetachedError`; closing twice is fine."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        release = harness.hold("transfer")
        waiting = [asyncio.ensure_future(link.send(EventData(b"x").encode())) for _ in range(3)]
        await transport.get_hub_properties(HUB)
        await link.aclose()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(outcome, LinkDetachedError) for outcome in outcomes)
        await link.aclose()
        assert isinstance(await _error_of(link.send(EventData(b"x").encode())), LinkDetachedError)
        release()
        other = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        await other.send(EventData(b"y").encode())

    async def test_send_that_is_cancelled_affects_no_other(self, harness: TransportHarness) -> None:
        """Of sends that wait, one is cancelled; those before and behind it are stored, in their order."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        release = harness.hold("transfer")
        waiting = [asyncio.ensure_future(link.send(EventData(b"%d" % number).encode())) for number in range(5)]
        await transport.get_hub_properties(HUB)
        waiting[2].cancel()
        release()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes if outcome is not None] == [asyncio.CancelledError]
        _, sink = await _open(transport, "0", credit=10)
        bodies = await sink.received(4)
        assert [body for body in bodies if body != b"2"] == [b"0", b"1", b"3", b"4"]

    async def test_send_cancelled_before_it_began_is_not_stored(self, harness: TransportHarness) -> None:
        """Cancelled before its first byte was handed over, a message is never stored."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        never = asyncio.ensure_future(link.send(EventData(b"never").encode()))
        never.cancel()
        await asyncio.gather(never, return_exceptions=True)
        await link.send(EventData(b"then").encode())
        assert (await transport.get_partition_properties(HUB, "0")).last_enqueued_sequence_number == 0

    async def test_on_sent_is_called_once_at_the_first_byte(self, harness: TransportHarness) -> None:
        """`on_sent` is called once, when the message is written, answered or not; never if it is not written."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        sent: list[str] = []
        await link.send(EventData(b"a").encode(), on_sent=lambda: sent.append("a"))
        never = asyncio.ensure_future(link.send(EventData(b"b").encode(), on_sent=lambda: sent.append("b")))
        never.cancel()
        await asyncio.gather(never, return_exceptions=True)
        large = bytes(link.max_message_size + 1)
        assert isinstance(await _error_of(link.send(large, on_sent=lambda: sent.append("large"))), EventTooLargeError)
        release = harness.hold("transfer")
        waiting = asyncio.ensure_future(link.send(EventData(b"c").encode(), on_sent=lambda: sent.append("c")))
        await transport.get_hub_properties(HUB)
        assert not waiting.done()
        assert sent == ["a", "c"]
        release()
        await waiting
        await link.aclose()
        await _error_of(link.send(EventData(b"d").encode(), on_sent=lambda: sent.append("d")))
        assert sent == ["a", "c"]

    async def test_post_reports_each_outcome_once_unless_withdrawn(self, harness: TransportHarness) -> None:
        """In the order of the calls: None once stored, or the error; of a message that was withdrawn, nothing."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        outcomes: list[tuple[str, BaseException | None]] = []
        sent: list[str] = []
        release = harness.hold("transfer")
        posted = {
            body: link.post(
                EventData(body.encode()).encode(),
                lambda error, body=body: outcomes.append((body, error)),  # type: ignore[misc]  # its default is text
                on_sent=lambda body=body: sent.append(body),  # type: ignore[misc]  # as above
            )
            for body in ("a", "b", "c")
        }
        await transport.get_hub_properties(HUB)
        posted["b"].withdraw()
        release()
        await link.send(EventData(b"d").encode())
        await transport.get_hub_properties(HUB)
        assert (outcomes, sent) == ([("a", None), ("c", None)], ["a", "b", "c"])
        posted["a"].withdraw()
        release = harness.hold("transfer")
        lost: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        link.post(EventData(b"e").encode(), lost.set_result)
        await transport.get_hub_properties(HUB)
        harness.lose_connections()
        assert isinstance(await lost, ConnectionLostError)
        release()
        try:
            link.post(b"", lambda error: outcomes.append(("f", error)))
        except ConnectionLostError:
            return
        raise AssertionError("a message was taken by a link that has ended")

    async def test_is_attached_holds_until_the_send_link_ends(self, harness: TransportHarness) -> None:
        """`is_attached` holds from the attach to the end: closed here, or lost with the connection, at once."""
        transport = harness.new_transport()
        closed = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        lost = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        release = harness.hold("transfer")
        waiting = asyncio.ensure_future(lost.send(EventData(b"x").encode()))
        await transport.get_hub_properties(HUB)
        assert (closed.is_attached, lost.is_attached) == (True, True)
        await closed.aclose()
        assert (closed.is_attached, lost.is_attached) == (False, True)
        harness.lose_connections()
        await _error_of(waiting)
        assert not lost.is_attached
        release()

    async def test_send_by_gateway_spreads_and_keeps_keys_together(self, harness: TransportHarness) -> None:
        """Without a partition, messages go to all of them; those with a key go where the service's hash says."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB))
        for _ in range(8):
            await link.send(EventData(b"x").encode())
        counts = {partition: await _count(transport, partition) for partition in PARTITIONS}
        assert counts == dict.fromkeys(PARTITIONS, 2)
        for key in ("key0", "key1", "key2", "a", "é"):
            before = await _count(transport, target := str(partition_for_key(key, 4)))
            message = encode_batch([EventData(key).encode(key)], key)
            await link.send(message, message_format=BATCH_MESSAGE_FORMAT)
            assert await _count(transport, target) == before + 1

    async def test_open_of_a_send_link_to_nowhere_is_refused(self, harness: TransportHarness) -> None:
        """An unknown hub and an unknown partition are permanent errors."""
        transport = harness.new_transport()
        for spec, kind in (
            (SendLinkSpec("nothere"), EntityNotFoundError),
            (SendLinkSpec(HUB, "77"), RequestRefusedError),
        ):
            error = await _error_of(transport.open_send_link(spec))
            assert isinstance(error, kind)
            assert error.recovery is Recovery.GIVE_UP

    async def test_open_of_a_send_link_that_is_cancelled_leaves_none(self, harness: TransportHarness) -> None:
        """Opening that is cancelled while the service has not answered leaves a transport that works."""
        transport = harness.new_transport()
        await transport.get_hub_properties(HUB)
        release = harness.hold("send")
        opening = asyncio.ensure_future(transport.open_send_link(SendLinkSpec(HUB, "0")))
        await transport.get_hub_properties(HUB)
        opening.cancel()
        assert isinstance((await asyncio.gather(opening, return_exceptions=True))[0], asyncio.CancelledError)
        release()
        await _publish(transport, "0", b"x")

    async def test_properties_of_a_send_link_are_a_mapping(self, harness: TransportHarness) -> None:
        """A send link has the properties that the service answered, with text as keys."""
        transport = harness.new_transport()
        link = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        assert all(isinstance(name, str) for name in dict(link.properties))

    # ---- the directory

    async def test_hub_properties_describe_the_hub(self, harness: TransportHarness) -> None:
        """A hub's properties are its name, its time of creation, with a time zone, and its partitions."""
        transport = harness.new_transport()
        properties = await transport.get_hub_properties(HUB)
        assert (properties.name, properties.partition_ids) == (HUB, PARTITIONS)
        assert properties.created_at.tzinfo is not None

    async def test_partition_properties_follow_the_events(self, harness: TransportHarness) -> None:
        """A partition's properties follow its events; an empty one is reported as empty."""
        transport = harness.new_transport()
        empty = await transport.get_partition_properties(HUB, "3")
        assert (empty.hub, empty.partition_id, empty.is_empty) == (HUB, "3", True)
        assert empty.last_enqueued_sequence_number == -1
        await _publish(transport, "3", b"a", b"b")
        _, sink = await _open(transport, "3", credit=10)
        await sink.received(2)
        filled = await transport.get_partition_properties(HUB, "3")
        assert not filled.is_empty
        assert (filled.beginning_sequence_number, filled.last_enqueued_sequence_number) == (0, 1)
        assert filled.last_enqueued_offset == sink.events[1].offset
        assert filled.last_enqueued_time == sink.events[1].enqueued_time

    async def test_properties_of_what_does_not_exist_raise(self, harness: TransportHarness) -> None:
        """Unknown hubs and partitions are permanent errors."""
        transport = harness.new_transport()
        for reading, kind in (
            (transport.get_hub_properties("nothere"), EntityNotFoundError),
            (transport.get_partition_properties("nothere", "0"), EntityNotFoundError),
            (transport.get_partition_properties(HUB, "77"), RequestRefusedError),
        ):
            error = await _error_of(reading)
            assert isinstance(error, kind)
            assert error.recovery is Recovery.GIVE_UP

    async def test_properties_read_at_once_get_their_own_answers(self, harness: TransportHarness) -> None:
        """Many reads at once each get their own answer."""
        transport = harness.new_transport()
        await _publish(transport, "1", b"x")
        asked = [PARTITIONS[number % 4] for number in range(300)]
        answers = await asyncio.gather(*(transport.get_partition_properties(HUB, each) for each in asked))
        assert [answer.partition_id for answer in answers] == asked
        assert [answer.is_empty for answer in answers] == [each != "1" for each in asked]

    # ---- the transport

    async def test_namespace_is_known_before_connecting(self, harness: TransportHarness) -> None:
        """The namespace's host name is known before anything is connected, and the same for every transport to it."""
        one, other = harness.new_transport(), harness.new_transport()
        assert one.fully_qualified_namespace == other.fully_qualified_namespace != ""

    async def test_lost_connection_is_reported_once_and_replaced(self, harness: TransportHarness) -> None:
        """Every sink and pending send gets one error for a lost connection; links opened again lose nothing."""
        transport = harness.new_transport()
        link, sink = await _open(transport, "0", credit=10)
        _, other = await _open(transport, "1", credit=10)
        sender = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        await sender.send(EventData(b"before").encode())
        await sink.received(1)
        release = harness.hold("transfer")
        waiting = asyncio.ensure_future(sender.send(EventData(b"during").encode()))
        await transport.get_hub_properties(HUB)
        harness.lose_connections()
        release()
        for error in (await sink.ended(), await other.ended(), await _error_of(waiting)):
            assert isinstance(error, ServiceError)
            assert error.recovery is Recovery.RECONNECT
        assert isinstance(await _error_of(sender.send(EventData(b"dead").encode())), ServiceError)
        link.set_credit(10)
        await link.aclose()
        await _publish(transport, "0", b"after")
        position = EventPosition.at_offset(sink.events[0].offset)
        _, again = await _open(transport, "0", position=position, credit=10)
        await again.until(lambda: b"after" in again.bodies)
        assert [body for body in again.bodies if body != b"during"] == [b"after"]
        assert (sink.late, other.late, sink.bodies) == (0, 0, [b"before"])

    async def test_lost_connection_while_opening_raises(self, harness: TransportHarness) -> None:
        """Links that are being opened fail, and their sinks are not called; the next attempt connects again."""
        transport = harness.new_transport()
        await transport.get_hub_properties(HUB)
        release = harness.hold("receive")
        sinks = [RecordingSink() for _ in range(3)]
        opening = [asyncio.ensure_future(transport.open_receive_link(_reading("0"), sink)) for sink in sinks]
        await transport.get_hub_properties(HUB)
        harness.lose_connections()
        async with asyncio.timeout(PATIENCE):
            outcomes = await asyncio.gather(*opening, return_exceptions=True)
        release()
        for outcome in outcomes:
            assert isinstance(outcome, ServiceError)
            assert outcome.recovery is Recovery.RECONNECT
        assert all((sink.batches, sink.errors) == ([], []) for sink in sinks)
        await _open(transport, "0")

    async def test_close_ends_links_and_waits(self, harness: TransportHarness) -> None:
        """On close, links end and pending calls fail, each once and permanently; later use raises `ClosedError`."""
        transport = harness.new_transport()
        link, sink = await _open(transport, "0", credit=10)
        sender = await transport.open_send_link(SendLinkSpec(HUB, "0"))
        harness.hold("transfer")
        waiting = asyncio.ensure_future(sender.send(EventData(b"x").encode()))
        await transport.get_hub_properties(HUB)
        async with asyncio.timeout(PATIENCE):
            await transport.aclose()
        for error in (await sink.ended(), await _error_of(waiting)):
            assert isinstance(error, ServiceError)
            assert error.recovery is Recovery.GIVE_UP
        for use in (
            transport.get_hub_properties(HUB),
            transport.get_partition_properties(HUB, "0"),
            transport.open_receive_link(_reading("0"), RecordingSink()),
            transport.open_send_link(SendLinkSpec(HUB)),
        ):
            assert isinstance(await _error_of(use), ClosedError)
        await link.aclose()
        await sender.aclose()
        await transport.aclose()
        assert sink.late == 0

    async def test_close_before_use_is_fine(self, harness: TransportHarness) -> None:
        """A transport that never connected may be closed, twice."""
        transport = harness.new_transport()
        await transport.aclose()
        await transport.aclose()
        assert isinstance(await _error_of(transport.get_hub_properties(HUB)), ClosedError)

    async def test_close_while_opening_fails_all_callers(self, harness: TransportHarness) -> None:
        """Closing fails the calls that open links or connect; it cancels no caller."""
        for is_connected in (False, True):
            transport = harness.new_transport()
            release = harness.hold("receive")
            if is_connected:
                await transport.get_hub_properties(HUB)
            opening = [
                asyncio.ensure_future(transport.open_receive_link(_reading("0"), RecordingSink())) for _ in range(3)
            ]
            await asyncio.sleep(0)
            if is_connected:
                await transport.get_hub_properties(HUB)
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(transport.aclose(), transport.aclose())
                outcomes = await asyncio.gather(*opening, return_exceptions=True)
            assert all(isinstance(outcome, EventPumpError) for outcome in outcomes)
            release()


def _reading(partition_id: str, *, position: EventPosition = EARLIEST, **fields: Any) -> ReceiveLinkSpec:
    return ReceiveLinkSpec(HUB, "$Default", partition_id, position, **{"max_message_size": 20 * 1024 * 1024, **fields})


async def _open(
    transport: Transport, partition_id: str, *, credit: int = 0, **fields: Any
) -> tuple[ReceiveLink, RecordingSink]:
    """Open a link with an allowance; the fields are those of its specification."""
    sink = RecordingSink()
    link = await transport.open_receive_link(_reading(partition_id, **fields), sink)
    if credit:
        link.set_credit(credit)
    return link, sink


async def _publish(transport: Transport, partition_id: str, *bodies: bytes) -> None:
    link = await transport.open_send_link(SendLinkSpec(HUB, partition_id))
    await asyncio.gather(*(link.send(EventData(body).encode()) for body in bodies))
    await link.aclose()


async def _barrier(transport: Transport, partition_id: str) -> None:
    """Wait until everything that the service had to send on a partition has arrived: a later reader has all of it."""
    count = await _count(transport, partition_id)
    link, sink = await _open(transport, partition_id, credit=count + 1)
    await sink.received(count)
    await transport.get_partition_properties(HUB, partition_id)
    await link.aclose()


async def _count(transport: Transport, partition_id: str) -> int:
    return (await transport.get_partition_properties(HUB, partition_id)).last_enqueued_sequence_number + 1


async def _error_of(use: Awaitable[object]) -> EventPumpError:
    try:
        async with asyncio.timeout(PATIENCE):
            await use
    except EventPumpError as error:
        return error
    raise AssertionError("no error was raised")
