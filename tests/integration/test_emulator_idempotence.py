"""The emulator's side of idempotent publishing, on the wire, seen by a bare AMQP client (protocol.md 8)."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from eventpump.amqp.link import Link
from eventpump.amqp.message import AmqpValue, Data, Message
from eventpump.amqp.performatives import Accepted, Rejected, Source, Target
from eventpump.amqp.types import Int, Short
from eventpump.emulator.faults import Delay, DetachLink, DropConnection, Hold, LinkRole, Performative, Reject, StoreLate
from eventpump.emulator.ledger import LOOK_BACK
from eventpump.emulator.server import Emulator
from eventpump.eventhubs import management
from eventpump.eventhubs.conditions import OUT_OF_ORDER_SEQUENCE, PRODUCER_EPOCH_STOLEN
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.names import (
    BATCH_MESSAGE_FORMAT,
    IDEMPOTENT_PRODUCER,
    PRODUCER_EPOCH,
    PRODUCER_ID,
    PRODUCER_SEQUENCE_NUMBER,
)
from tests.support.peer import AmqpPeer, LinkRefusedError, Listening, connect
from tests.support.processes import EmulatorProcess
from tests.support.served import break_disk

PARTITION = "telemetry/Partitions/0"
LAST = 2**31 - 1
NULLS: dict[Any, Any] = {PRODUCER_ID: None, PRODUCER_EPOCH: None, PRODUCER_SEQUENCE_NUMBER: None}


def state(producer_id: int | None = None, epoch: int | None = None, number: int | None = None) -> dict[Any, Any]:
    """Link properties, with their types."""
    return {
        PRODUCER_ID: producer_id,
        PRODUCER_EPOCH: None if epoch is None else Short(epoch),
        PRODUCER_SEQUENCE_NUMBER: None if number is None else Int(number),
    }


class Publisher:
    """A link that publishes with numbers, on a connection of its own."""

    def __init__(self, peer: AmqpPeer, link: Link) -> None:
        self.peer = peer
        self.link = link
        assert link.remote is not None
        answer = dict(link.remote.properties or {})
        assert set(answer) >= set(NULLS)
        assert type(answer[PRODUCER_ID]) is int
        assert type(answer[PRODUCER_EPOCH]) is Short
        assert type(answer[PRODUCER_SEQUENCE_NUMBER]) is Int
        self.producer_id: int = answer[PRODUCER_ID]
        self.epoch = int(answer[PRODUCER_EPOCH])
        self.number = int(answer[PRODUCER_SEQUENCE_NUMBER])

    @property
    def answer(self) -> tuple[int, int, int]:
        """What the attach was answered."""
        return self.producer_id, self.epoch, self.number

    def message(self, first: int, bodies: Sequence[str], **stamped: Any) -> bytes:
        """Encode a batch whose events are numbered from `first` on."""
        events = [
            Message(
                message_annotations={
                    PRODUCER_ID: stamped.get("producer_id", self.producer_id),
                    PRODUCER_EPOCH: Short(stamped.get("epoch", self.epoch)),
                    PRODUCER_SEQUENCE_NUMBER: Int((first + step) % (LAST + 1)),
                },
                body=Data((body.encode(),)),
            ).encode()
            for step, body in enumerate(bodies)
        ]
        return encode_batch(events)

    def post(self, first: int, *bodies: str, **stamped: Any) -> int:
        """Send a batch without waiting.

        Returns:
            Its delivery id.
        """
        delivery_id = self.link.send(self.message(first, bodies, **stamped), message_format=BATCH_MESSAGE_FORMAT)
        self.peer.flush()
        return delivery_id

    async def send(self, first: int, *bodies: str, **stamped: Any) -> str:
        """Send a batch.

        Returns:
            "accepted", or the condition and text of its rejection.
        """
        delivery_id = self.post(first, *bodies, **stamped)
        outcome = await self.peer.until(
            lambda: (
                self.peer.outcomes[self.link].get(delivery_id) or self.peer.is_gone or self.link in self.peer.detached
            )
        )
        if isinstance(outcome, Accepted):
            return "accepted"
        assert isinstance(outcome, Rejected), outcome
        assert outcome.error is not None
        return f"{outcome.error.condition}: {outcome.error.description}"


async def attach(peer: AmqpPeer, properties: dict[Any, Any] | None = None, target: str = PARTITION) -> Publisher:
    link = await peer.attach(
        await peer.begin(), target=target, desired_capabilities=[IDEMPOTENT_PRODUCER], properties=properties
    )
    await peer.until(lambda: link.credit > 0)
    return Publisher(peer, link)


@asynccontextmanager
async def publisher(
    service: Listening, producer_id: int | None = None, epoch: int | None = None, number: int | None = None
) -> AsyncIterator[Publisher]:
    """Publish over a connection of its own."""
    async with await connect(service) as peer:
        yield await attach(peer, state(producer_id, epoch, number))


async def refused(service: Listening, properties: dict[Any, Any] | None, target: str = PARTITION) -> str:
    async with await connect(service) as peer:
        with pytest.raises(LinkRefusedError) as caught:
            await attach(peer, properties, target)
        text, _, _ = (caught.value.error.description or "").partition(" TrackingId:")
        return f"{caught.value.error.condition}: {text}"


async def stored(service: Listening, partition: str = "0") -> list[ReceivedEvent]:
    """Read what a partition holds now."""
    async with await connect(service) as peer:
        answer = await peer.request("$management", management.partition_request("telemetry", partition, message_id="m"))
        assert isinstance(answer.body, AmqpValue)
        count = answer.body.value["last_enqueued_sequence_number"] + 1
        link = await peer.attach(
            await peer.begin(), source=Source(address=f"telemetry/ConsumerGroups/$Default/Partitions/{partition}")
        )
        link.set_credit(count + 10)
        peer.flush()
        await peer.until(lambda: len(peer.received[link]) >= count)
        return [ReceivedEvent(raw) for raw in peer.received[link]]


async def bodies(service: Listening, partition: str = "0") -> list[str]:
    return [event.body_as_str() for event in await stored(service, partition)]


async def answered(made: Publisher, count: int) -> None:
    await made.peer.until(lambda: len(made.peer.outcomes[made.link]) >= count)


async def gone(made: Publisher) -> None:
    await made.peer.until(lambda: made.peer.is_gone)


@pytest.fixture(params=["memory", "disk"])
async def emulator(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Emulator]:
    """Serve a hub of two partitions, in memory and on disk."""
    data = tmp_path / "data" if request.param == "disk" else None
    async with Emulator({"telemetry": 2}, data=data) as started:
        yield started


# ---------------------------------------------------------------------------------------------------- attach


async def test_attach_answers_every_row_of_the_handshake(emulator: Emulator) -> None:
    """Every row of the handshake (8.2), one after the other, on one producer."""
    async with publisher(emulator) as first:
        assert first.answer == (first.producer_id, 0, 0)
        assert first.link.remote is not None
        assert IDEMPOTENT_PRODUCER in (first.link.remote.offered_capabilities or ())
        known = first.producer_id
        assert await first.send(1, "a", "b", "c") == "accepted"
    async with publisher(emulator, epoch=4) as other:
        assert other.answer == (other.producer_id, 4, 0)
        assert other.producer_id != known
    async with publisher(emulator, known, 0) as again:
        assert again.answer == (known, 0, 3)
        assert await again.send(4, "d") == "accepted"
    async with publisher(emulator, known, 0, 4) as again:
        assert again.answer == (known, 0, 4)
        assert await again.send(5, "e") == "accepted"
    async with publisher(emulator, known, None, 2) as stale:
        assert stale.answer == (known, 0, 2)
        assert (await stale.send(3, "x")).startswith(OUT_OF_ORDER_SEQUENCE)
    async with publisher(emulator, known, 1, 5) as raised:
        assert raised.answer == (known, 1, 5)
        assert await raised.send(6, "f") == "accepted"
    async with publisher(emulator, known, 2) as fresh:
        assert fresh.answer == (known, 2, 0)
        assert await fresh.send(1, "g") == "accepted"
    assert await refused(emulator, state(known, 1)) == (
        f"{PRODUCER_EPOCH_STOLEN}: At least one producer exists with the same id and a higher epoch. "
        f"Producer:{known} Received:1 Current:2"
    )
    assert (await refused(emulator, state(100, 100, 100))).startswith("amqp:not-allowed")
    assert "zero or positive" in await refused(emulator, state(known, -1, None))
    assert await bodies(emulator) == ["a", "b", "c", "d", "e", "f", "g"]


@pytest.mark.parametrize("properties", [None, NULLS], ids=["none", "nulls"])
async def test_attach_without_properties_or_with_nulls_begins_a_producer(
    emulator: Emulator, properties: dict[Any, Any] | None
) -> None:
    """The capability alone, or with three nulls, begins a new producer."""
    async with await connect(emulator) as peer:
        made = await attach(peer, properties)
        assert (made.epoch, made.number) == (0, 0)
        assert await made.send(1, "a") == "accepted"


async def test_attach_with_the_other_first_answer_gets_minus_1() -> None:
    """On request a producer without a number gets -1, and 0 is its first number."""
    async with Emulator({"telemetry": 1}, nothing_published=-1) as emulator, publisher(emulator) as made:
        assert made.number == -1
        assert await made.send(0, "a") == "accepted"
        assert await made.send(1, "b") == "accepted"


async def test_attach_that_cannot_be_idempotent_is_refused(emulator: Emulator) -> None:
    """The gateway, some of the three properties only, and an id of another partition are refused."""
    assert (await refused(emulator, NULLS, "telemetry")).startswith("amqp:not-allowed")
    assert (await refused(emulator, {PRODUCER_ID: None})).startswith("com.microsoft:argument-error")
    async with publisher(emulator) as made:
        assert (await refused(emulator, state(made.producer_id), "telemetry/Partitions/1")).startswith(
            "amqp:not-allowed"
        )


# -------------------------------------------------------------------------------------------------- messages


async def test_send_of_a_repeat_is_accepted_and_not_stored(emulator: Emulator) -> None:
    """The same batch on the same link, on another, and on one whose own id is another: accepted, stored once."""
    async with publisher(emulator) as made, publisher(emulator) as other:
        assert await made.send(1, "a", "b") == "accepted"
        assert await made.send(1, "a", "b") == "accepted"
        stamped = {"producer_id": made.producer_id, "epoch": made.epoch}
        assert other.producer_id != made.producer_id
        assert await other.send(1, "a", "b", **stamped) == "accepted"
        assert await other.send(3, "c", **stamped) == "accepted"
        assert await made.send(4, "d") == "accepted"
    assert await bodies(emulator) == ["a", "b", "c", "d"]


async def test_send_of_bad_numbers_is_rejected_and_the_link_stays(emulator: Emulator) -> None:
    """Old numbers, gaps, and a batch with other members are rejected; the next number is taken on the same link."""
    async with publisher(emulator) as made:
        assert await made.send(1, "a", "b", "c", "d", "e") == "accepted"
        for first, names in ((1, ["a"]), (3, ["c"]), (1, ["a"] * 6), (5, ["e", "f"])):
            answer = await made.send(first, *names)
            assert answer.startswith(OUT_OF_ORDER_SEQUENCE)
            assert "old sequence" in answer
        answer = await made.send(7, "g")
        assert answer.startswith(OUT_OF_ORDER_SEQUENCE)
        assert "old sequence" not in answer
        assert await made.send(6, "f") == "accepted"
        assert made.link.is_attached
    assert await bodies(emulator) == ["a", "b", "c", "d", "e", "f"]


async def test_send_of_pipelined_batches_is_judged_in_order(emulator: Emulator) -> None:
    """Batches on their way together are judged by each other, repeats among them; each gets its own outcome."""
    async with publisher(emulator) as made:
        ids = [made.post(first, *names) for first, names in ((1, "ab"), (1, "ab"), (4, "d"), (3, "c"), (3, "c"))]
        outcomes = made.peer.outcomes[made.link]
        await made.peer.until(lambda: len(outcomes) == len(ids))
        assert [type(outcomes[each]) for each in ids] == [Accepted, Accepted, Rejected, Accepted, Accepted]
    assert await bodies(emulator) == ["a", "b", "c"]


async def test_send_wraps_numbers_to_zero(emulator: Emulator) -> None:
    """After 2147483647 comes 0, in the middle of a batch; the attach answer follows."""
    async with publisher(emulator, number=LAST - 2) as made:
        assert made.number == LAST - 2
        assert await made.send(LAST - 1, "a", "b", "c") == "accepted"
        assert await made.send(LAST - 1, "a", "b", "c") == "accepted"
        assert "old sequence" in await made.send(LAST, "b")
        assert await made.send(1, "d") == "accepted"
        async with publisher(emulator, made.producer_id, 0) as again:
            assert again.number == 1
    assert await bodies(emulator) == ["a", "b", "c", "d"]


async def test_send_after_a_raised_epoch_is_rejected(emulator: Emulator) -> None:
    """The former link stays attached, and whatever it sends is stolen, a repeat too; the text names both epochs."""
    async with publisher(emulator) as old:
        assert await old.send(1, "a") == "accepted"
        async with publisher(emulator, old.producer_id, 1, 1) as new:
            for first in (1, 2):
                answer = await old.send(first, "a")
                assert answer.startswith(PRODUCER_EPOCH_STOLEN)
                assert "Received:0 Current:1" in answer
            assert old.link.is_attached
            assert await new.send(2, "b") == "accepted"
    assert await bodies(emulator) == ["a", "b"]


async def test_send_of_an_event_without_numbers_is_rejected(emulator: Emulator) -> None:
    """On an idempotent link an event without annotations is rejected, one alone and one in a batch."""
    plain = Message(body=Data((b"x",))).encode()
    async with publisher(emulator) as made:
        for payload, message_format in ((plain, 0), (encode_batch([plain]), BATCH_MESSAGE_FORMAT)):
            outcome = await made.peer.send(made.link, payload, message_format=message_format)
            assert isinstance(outcome, Rejected)
            assert outcome.error is not None
            assert outcome.error.condition == "amqp:not-allowed"
        assert await made.send(1, "a") == "accepted"
    assert await bodies(emulator) == ["a"]


async def test_send_of_a_broken_batch_leaves_its_numbers_free(emulator: Emulator) -> None:
    """A batch that is refused as broken leaves its numbers free."""
    async with publisher(emulator) as made:
        lone = made.message(1, ["a"])[5:]  # past the envelope's data section
        misplaced = Message(message_annotations=NULLS).encode()
        for broken in (lone[:-2], lone + misplaced):
            outcome = await made.peer.send(made.link, encode_batch([broken]), message_format=BATCH_MESSAGE_FORMAT)
            assert isinstance(outcome, Rejected)
            assert outcome.error is not None
            assert outcome.error.condition == "amqp:decode-error"
        assert await made.send(1, "b") == "accepted"
    assert await bodies(emulator) == ["b"]


async def test_send_of_a_single_event_is_judged_by_its_annotations(emulator: Emulator) -> None:
    """An event outside an envelope carries its annotations itself (.NET sends a single event so)."""
    async with publisher(emulator) as made:
        lone = made.message(1, ["a"])[5:]
        for _ in range(2):
            assert isinstance(await made.peer.send(made.link, lone), Accepted)
        assert await made.send(2, "b") == "accepted"
    assert await bodies(emulator) == ["a", "b"]


async def test_send_of_a_plain_producer_is_not_judged(emulator: Emulator) -> None:
    """Without the capability nothing is judged, whatever the events carry, and no producer's numbers move."""
    async with publisher(emulator) as made:
        plain = await made.peer.attach(await made.peer.begin(), target=PARTITION)
        for _ in range(2):
            payload = made.message(1, ["plain"])
            outcome = await made.peer.send(plain, payload, message_format=BATCH_MESSAGE_FORMAT)
            assert isinstance(outcome, Accepted)
        assert plain.remote is not None
        assert plain.remote.properties is None
        assert await made.send(1, "a") == "accepted"
    assert await bodies(emulator) == ["plain", "plain", "a"]


async def test_receive_gets_no_producer_annotations(emulator: Emulator) -> None:
    """The three annotations are for the service; those a user set stay."""
    async with publisher(emulator) as made:
        assert await made.send(1, "a", "b") == "accepted"
    found = await stored(emulator)
    assert [event.body_as_str() for event in found] == ["a", "b"]
    for event in found:
        annotations = Message.decode(event.raw).message_annotations
        assert annotations is not None
        assert not [key for key in annotations if "producer" in key]
        assert len(annotations) == 4


async def test_send_numbers_of_partitions_are_separate(emulator: Emulator) -> None:
    """Each partition has ids and numbers of its own."""
    async with await connect(emulator) as peer:
        first = await attach(peer, NULLS)
        second = await attach(peer, NULLS, "telemetry/Partitions/1")
        assert first.producer_id != second.producer_id
        assert await first.send(1, "a", "b") == "accepted"
        assert second.number == 0
        assert await second.send(1, "c") == "accepted"
    assert (await bodies(emulator), await bodies(emulator, "1")) == (["a", "b"], ["c"])


# ---------------------------------------------------------------------------------------------------- faults


async def test_send_whose_answer_is_lost_is_answered_by_the_attach(emulator: Emulator) -> None:
    """Stored, then cut before the disposition: the attach says so, and the same batch again is no second one."""
    async with publisher(emulator) as made:
        await made.send(1, "a")
        emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER)
        made.post(2, "b", "c")
        await gone(made)
        assert not made.peer.outcomes[made.link].keys() - {0}
    async with publisher(emulator, made.producer_id, made.epoch) as again:
        assert again.number == 3
        assert await again.send(2, "b", "c") == "accepted"
    assert await bodies(emulator) == ["a", "b", "c"]


async def test_send_that_is_lost_is_answered_by_the_attach(emulator: Emulator) -> None:
    """Cut before it is stored: the attach returns the former number, and the batch is taken when it comes again."""
    async with publisher(emulator) as made:
        await made.send(1, "a")
        emulator.faults.add(DropConnection(), role=LinkRole.PRODUCER)
        made.post(2, "b", "c")
        await gone(made)
    async with publisher(emulator, made.producer_id, made.epoch) as again:
        assert again.number == 1
        assert await again.send(2, "b", "c") == "accepted"
    assert await bodies(emulator) == ["a", "b", "c"]


async def test_send_whose_rejection_is_lost_moves_nothing(emulator: Emulator) -> None:
    """Cut after judging: a batch that is refused is not answered either, and nothing moves."""
    async with publisher(emulator) as made:
        assert await made.send(1, "a") == "accepted"
        emulator.faults.add(DropConnection(stored=True), role=LinkRole.PRODUCER)
        delivery_id = made.post(7, "x")
        await gone(made)
        assert delivery_id not in made.peer.outcomes[made.link]
    async with publisher(emulator, made.producer_id, 0) as again:
        assert again.number == 1
    assert await bodies(emulator) == ["a"]


@pytest.mark.parametrize("resent", [True, False])
async def test_send_that_arrives_late_is_stored_once(emulator: Emulator, resent: bool) -> None:
    """Held over the cut and stored after a newer link attached: once, whether it was sent again before or after."""
    async with publisher(emulator) as made:
        held = emulator.faults.add(StoreLate(), role=LinkRole.PRODUCER)
        made.post(1, "a", "b")
        await gone(made)
    async with publisher(emulator, made.producer_id, made.epoch) as again:
        assert again.number == 0
        if resent:
            assert await again.send(1, "a", "b") == "accepted"
        held.remove()
        assert await again.send(1, "a", "b") == "accepted"
        assert await again.send(3, "c") == "accepted"
    assert await bodies(emulator) == ["a", "b", "c"]


async def test_send_that_arrives_late_of_a_fenced_epoch_is_not_stored(emulator: Emulator) -> None:
    """Stored late, but after the epoch was raised: it is not stored."""
    async with publisher(emulator) as made:
        held = emulator.faults.add(StoreLate(), role=LinkRole.PRODUCER)
        made.post(1, "a")
        await gone(made)
    async with publisher(emulator, made.producer_id, 1) as again:
        held.remove()
        assert await again.send(1, "b") == "accepted"
    assert await bodies(emulator) == ["b"]


async def test_send_that_arrives_late_and_was_overtaken_is_not_stored(emulator: Emulator) -> None:
    """The numbers were given to other events meanwhile, as they should never be: the late one is not stored."""
    async with publisher(emulator) as made:
        held = emulator.faults.add(StoreLate(), role=LinkRole.PRODUCER)
        made.post(1, "a", "b")
        await gone(made)
    async with publisher(emulator, made.producer_id, 0) as again:
        for number in range(1, LOOK_BACK + 2):
            assert await again.send(number, f"{number}") == "accepted"
        held.remove()
    assert await bodies(emulator) == [f"{number}" for number in range(1, LOOK_BACK + 2)]


async def test_send_that_arrives_late_without_numbers_is_stored(emulator: Emulator) -> None:
    """Without numbers a late message is simply stored."""
    async with await connect(emulator) as peer:
        link = await peer.attach(await peer.begin(), target=PARTITION)
        held = emulator.faults.add(StoreLate(), role=LinkRole.PRODUCER)
        link.send(Message(body=Data((b"late",))).encode())
        peer.flush()
        await peer.until(lambda: peer.is_gone)
    assert await bodies(emulator) == []
    held.remove()
    async with publisher(emulator) as made:
        assert await made.send(1, "a") == "accepted"
    assert await bodies(emulator) == ["late", "a"]


async def test_send_rejected_as_server_busy_leaves_its_numbers_free(emulator: Emulator) -> None:
    """A throttled batch is not stored; the same numbers are taken afterwards, for any events."""
    async with publisher(emulator) as made:
        emulator.faults.add(Reject(), role=LinkRole.PRODUCER)
        assert (await made.send(1, "a")).startswith("com.microsoft:server-busy")
        assert await made.send(1, "b") == "accepted"
    assert await bodies(emulator) == ["b"]


async def test_send_answered_by_a_detach_leaves_its_numbers_free(emulator: Emulator) -> None:
    """Detached at the transfer: not stored, and a link on the same connection goes on."""
    async with publisher(emulator) as made:
        emulator.faults.add(DetachLink(), role=LinkRole.PRODUCER)
        made.post(1, "a")
        await made.peer.until(lambda: made.link in made.peer.detached)
        again = await attach(made.peer, state(made.producer_id, 0))
        assert again.number == 0
        assert await again.send(1, "a") == "accepted"
    assert await bodies(emulator) == ["a"]


async def test_attach_answered_by_a_detach_can_be_repeated(emulator: Emulator) -> None:
    """A link may be detached as soon as it is attached, on disk too, and the next one is taken."""
    emulator.faults.add(DetachLink(), on=Performative.ATTACH, role=LinkRole.PRODUCER)
    assert (await refused(emulator, NULLS)).startswith("amqp:link:detach-forced")
    async with publisher(emulator) as made:
        assert await made.send(1, "a") == "accepted"


@pytest.mark.parametrize("action", [Delay(0.01), Hold()], ids=["delay", "hold"])
async def test_attach_and_send_that_are_delayed_succeed(emulator: Emulator, action: Delay | Hold) -> None:
    """A delay or hold changes when, not what."""
    attaching = emulator.faults.add(action, on=Performative.ATTACH, role=LinkRole.PRODUCER)
    async with await connect(emulator) as peer:
        session = await peer.begin()
        link = session.attach(
            "publishing",
            is_receiver=False,
            source=Source(address="here"),
            target=Target(address=PARTITION),
            desired_capabilities=[IDEMPOTENT_PRODUCER],
        )
        await peer.begin()  # what came before it has arrived
        attaching.remove()
        await peer.until(lambda: link.credit > 0)
        made = Publisher(peer, link)
        sending = emulator.faults.add(action, role=LinkRole.PRODUCER)
        ids = [made.post(1, "a"), made.post(2, "b")]
        await peer.begin()
        assert not peer.outcomes[link]
        sending.remove()
        await peer.until(lambda: len(peer.outcomes[link]) == len(ids))
        assert all(isinstance(each, Accepted) for each in peer.outcomes[link].values())
    assert await bodies(emulator) == ["a", "b"]


# --------------------------------------------------------------------------------------------------- restart


async def test_restart_with_data_keeps_the_port_and_the_ledger(tmp_path: Path) -> None:
    """Restarted with data: the port is the same, and ids, epochs, numbers and repeats are known."""
    async with Emulator({"telemetry": 1}, data=tmp_path) as emulator:
        port = emulator.port
        async with publisher(emulator, epoch=3) as made, publisher(emulator) as silent:
            assert await made.send(1, "a", "b") == "accepted"
            await emulator.restart()
            await made.peer.until(lambda: made.peer.is_gone or made.peer.closed)
        assert emulator.port == port
        async with publisher(emulator, made.producer_id, 3) as again:
            assert again.number == 2
            assert await again.send(1, "a", "b") == "accepted"
            assert await again.send(3, "c") == "accepted"
        assert (await refused(emulator, state(made.producer_id, 2))).startswith(PRODUCER_EPOCH_STOLEN)
        async with publisher(emulator, silent.producer_id, 0) as begun:
            assert begun.number == 0
        assert await bodies(emulator) == ["a", "b", "c"]


async def test_restart_in_memory_keeps_the_port_only() -> None:
    """Restarted in memory: same port, empty hub, unknown producer."""
    async with Emulator({"telemetry": 1}) as emulator:
        async with publisher(emulator) as made:
            assert await made.send(1, "a") == "accepted"
        await emulator.restart()
        assert await bodies(emulator) == []
        assert (await refused(emulator, state(made.producer_id, 0))).startswith("amqp:not-allowed")


async def test_write_that_fails_takes_the_ledger_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch and an attach that could not be written are refused, and leave numbers and epochs as they were."""
    async with Emulator({"telemetry": 1}, data=tmp_path) as emulator, publisher(emulator) as made:
        assert await made.send(1, "a") == "accepted"
        break_disk(emulator, monkeypatch)
        assert (await made.send(2, "lost")).startswith("amqp:internal-error")
        assert await made.send(2, "b") == "accepted"
        break_disk(emulator, monkeypatch)
        assert (await refused(emulator, state(made.producer_id, 1))).startswith("amqp:internal-error")
        assert await made.send(1, "a") == "accepted"
        assert await made.send(3, "c") == "accepted"
        async with publisher(emulator, made.producer_id, 1) as raised:
            break_disk(emulator, monkeypatch)
            assert (await raised.send(1, "lost")).startswith("amqp:internal-error")
            assert (await made.send(4, "x")).startswith(PRODUCER_EPOCH_STOLEN)
        assert await bodies(emulator) == ["a", "b", "c"]


async def test_repeat_of_a_batch_not_yet_written_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeat of a batch on its way to disk waits for it, and is rejected with it when that fails."""
    async with (
        Emulator({"telemetry": 1}, data=tmp_path) as emulator,
        publisher(emulator) as made,
        publisher(emulator, made.producer_id, 0) as again,
    ):
        goes_on = threading.Event()
        break_disk(emulator, monkeypatch, lambda: goes_on.wait(30))
        first = made.post(1, "a")
        await made.peer.begin()  # it has arrived
        second = again.post(1, "a")
        await again.peer.begin()
        assert not made.peer.outcomes[made.link]
        assert not again.peer.outcomes[again.link]
        goes_on.set()
        for publishing, delivery_id in ((made, first), (again, second)):
            outcomes = publishing.peer.outcomes[publishing.link]
            await answered(publishing, 1)
            assert isinstance(outcomes[delivery_id], Rejected)
        assert await again.send(1, "b") == "accepted"
        assert await bodies(emulator) == ["b"]


class KilledEmulator(EmulatorProcess):
    """An emulator that can be killed, as the peer connects to it."""

    host = "127.0.0.1"


async def test_killed_emulator_knows_the_numbers_it_acknowledged(tmp_path: Path) -> None:
    """Killed in the middle of sends, it knows all it acknowledged; the number it returns is that of its last event.

    Batches whose answer was lost are sent again with their numbers, over several lives; each event is there once.
    """
    batches = [(1 + 3 * step, [f"{step}-{each}" for each in range(3)]) for step in range(1200)]
    producer_id: int | None = None
    acknowledged = 0
    service = KilledEmulator("telemetry:1", data=tmp_path)
    try:
        for life in range(4):
            await service.start()
            async with publisher(service, producer_id, None if life == 0 else 0) as made:
                producer_id = made.producer_id
                assert made.number % 3 == 0
                known = made.number // 3
                assert known >= acknowledged
                # The last ones it knows come again, too: none of them may be stored twice.
                wanted = batches[max(0, known - LOOK_BACK) : (life + 1) * 300]
                ids = [made.post(first, *names) for first, names in wanted]
                outcomes = made.peer.outcomes[made.link]
                await answered(made, len(ids) if life == 3 else 40)
                if life < 3:
                    await service.kill()
                    await gone(made)
                assert all(isinstance(each, Accepted) for each in outcomes.values())
                first, names = wanted[max(ids.index(each) for each in outcomes)]
                acknowledged = (first + len(names) - 1) // 3
        assert await bodies(service) == [name for _, names in batches for name in names]
    finally:
        await service.kill()
