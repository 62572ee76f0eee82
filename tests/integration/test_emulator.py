"""What the emulator says on the wire, seen by a bare AMQP client (protocol.md 2 to 7, 13)."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import trustme

from eventpump.amqp.config import ConnectionConfig
from eventpump.amqp.link import Link
from eventpump.amqp.message import AmqpValue, Data, Message, Properties
from eventpump.amqp.performatives import Accepted, AmqpError, Rejected, Source
from eventpump.amqp.types import Array, Described, Int, Symbol, Timestamp, ULong
from eventpump.emulator.auth import AccessRule, Right, VerifiedToken
from eventpump.emulator.config import HubSpec
from eventpump.emulator.faults import (
    CloseConnection,
    Delay,
    DetachLink,
    DropConnection,
    Hold,
    LinkRole,
    Performative,
    Refuse,
    Reject,
)
from eventpump.emulator.log import Retention
from eventpump.emulator.server import Emulator
from eventpump.emulator.service import Deadlines
from eventpump.errors import ConfigurationError
from eventpump.eventhubs import cbs, management
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.eventhubs.filters import source_filter
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT, EPOCH, JWT_TOKEN_TYPE, RECEIVER_NAME, RUNTIME_METRIC
from tests.support.peer import AUDIENCE, AmqpPeer, LinkRefusedError, fields_of, status_of
from tests.support.served import service_of


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    """Serve a hub of four partitions, with a group besides the default one."""
    async with Emulator([HubSpec("telemetry", 4, ("Readers",)), HubSpec("other", 1)]) as started:
        yield started


def event(body: bytes = b"x", **annotations: Any) -> bytes:
    made = Message(body=Data((body,)))
    if annotations:
        made.message_annotations = {Symbol(key.replace("_", "-")): value for key, value in annotations.items()}
    return made.encode()


def reading(partition: str, position: EventPosition | None = None, group: str = "$Default") -> Source:
    return Source(
        address=f"telemetry/ConsumerGroups/{group}/Partitions/{partition}",
        filter=None if position is None else dict(source_filter(position)),
    )


async def read(peer: AmqpPeer, source: Source, count: int, **options: Any) -> list[ReceivedEvent]:
    link = await peer.attach(await peer.begin(), source=source, **options)
    link.set_credit(count)
    peer.flush()
    await peer.until(lambda: len(peer.received[link]) >= count)
    link.detach()
    peer.flush()
    return [ReceivedEvent(raw) for raw in peer.received[link]]


async def refusal(peer: AmqpPeer, **options: Any) -> AmqpError:
    with pytest.raises(LinkRefusedError) as caught:
        await peer.attach(await peer.begin(), **options)
    return caught.value.error


# ------------------------------------------------------------------------------------------ connection, SASL


async def test_open_and_begin_have_the_services_fields(emulator: Emulator, peer: AmqpPeer) -> None:
    """The service opens and begins as recorded (2.3: open-producer, begin)."""
    opened = peer.engine.remote
    assert opened is not None
    assert re.fullmatch(r"[0-9a-f]{32}_G\d+", opened.container_id)
    assert opened.hostname is None
    assert (opened.max_frame_size, opened.channel_max, opened.idle_time_out) == (65_536, 4_999, 120_000)
    assert opened.properties is None
    begun = (await peer.begin()).remote
    assert begun is not None
    assert (begun.incoming_window, begun.handle_max, begun.next_outgoing_id) == (5_000, 255, 1)
    assert begun.outgoing_window == peer.engine.config.incoming_window


async def test_sasl_mechanisms_are_offered_in_the_services_order(emulator: Emulator) -> None:
    """MSSBCBS, PLAIN, ANONYMOUS, EXTERNAL: .NET needs the first, Python and JavaScript the third."""
    reader, writer = await asyncio.open_connection(emulator.host, emulator.port)
    writer.write(b"AMQP\x03\x01\x00\x00")
    data = await reader.readuntil(b"EXTERNAL")
    assert re.search(rb"MSSBCBS.{4}PLAIN.{4}ANONYMOUS.{4}EXTERNAL", data, re.DOTALL)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("mechanism", ["MSSBCBS", "ANONYMOUS", "EXTERNAL"])
async def test_sasl_without_a_token_gives_no_rights(emulator: Emulator, mechanism: str) -> None:
    """A client that does not put a token is refused every link but those of the token node."""
    config = ConnectionConfig(container_id="c", mechanism=mechanism)
    async with await AmqpPeer.connect(emulator, config) as peer:
        for options in ({"target": "telemetry"}, {"source": reading("0")}, {"source": "$management"}):
            assert (await refusal(peer, **options)).condition == "amqp:unauthorized-access"


async def test_sasl_plain_gives_the_rights_of_its_rule() -> None:
    """Key name and key over SASL PLAIN replace the token; a wrong key is refused by SASL."""
    async with Emulator({"telemetry": 1}, rules=[AccessRule("sender", "secret", Right.SEND)]) as emulator:
        config = ConnectionConfig(container_id="c", mechanism="PLAIN", initial_response=b"\0sender\0secret")
        async with await AmqpPeer.connect(emulator, config) as peer:
            await peer.attach(await peer.begin(), target="telemetry")
            assert "Listen" in ((await refusal(peer, source=reading("0"))).description or "")
        wrong = ConnectionConfig(container_id="c", mechanism="PLAIN", initial_response=b"\0sender\0wrong")
        async with await AmqpPeer.connect(emulator, wrong) as peer:
            assert peer.closed is not None
            assert peer.closed.error is not None
            assert peer.closed.error.condition == "amqp:unauthorized-access"


async def test_tls_serves_tokens_and_links() -> None:
    """Over TLS the connection string says so, and tokens and links work."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    async with Emulator({"telemetry": 1}, tls=server) as emulator:
        assert "UseDevelopmentEmulator" not in emulator.connection_string
        async with await AmqpPeer.connect(emulator, tls=client) as peer:
            assert await peer.put_token(AUDIENCE) == 202
            await peer.attach(await peer.begin(), target="telemetry")


# --------------------------------------------------------------------------------------------------- tokens


async def test_token_with_a_wrong_key_is_refused(emulator: Emulator) -> None:
    """A signature by another key, or an unknown key name, gets 401 and no rights."""
    async with await AmqpPeer.connect(emulator) as peer:
        assert await peer.put_token(AUDIENCE, key="wrong") == 401
        assert await peer.put_token(AUDIENCE, key_name="nobody") == 401
        assert await peer.put_token(AUDIENCE, lifetime=-5) == 401
        assert await peer.put_token(AUDIENCE, resource="sb://127.0.0.1/other") == 401
        assert await peer.put_token("sb:///telemetry") == 400
        assert (await refusal(peer, target="telemetry")).condition == "amqp:unauthorized-access"


async def test_token_opens_its_entity_only(emulator: Emulator) -> None:
    """A token for one consumer group reads there, and neither sends nor reads elsewhere."""
    async with await AmqpPeer.connect(emulator) as peer:
        assert await peer.put_token(f"{AUDIENCE}/consumergroups/readers", resource=AUDIENCE) == 202
        await peer.attach(await peer.begin(), source=reading("0", group="READERS"))
        for options in ({"target": "telemetry"}, {"source": reading("0")}):
            assert (await refusal(peer, **options)).condition == "amqp:unauthorized-access"


async def test_token_of_a_rule_limits_rights() -> None:
    """A rule with Listen only reads, and does not send."""
    async with (
        Emulator({"telemetry": 1}, rules=[AccessRule("reader", "secret", Right.LISTEN)]) as emulator,
        await AmqpPeer.connect(emulator) as peer,
    ):
        assert await peer.put_token(AUDIENCE, key_name="reader", key="secret") == 202
        await peer.attach(await peer.begin(), source=reading("0"))
        assert "Send" in ((await refusal(peer, target="telemetry")).description or "")


async def test_token_that_expires_ends_its_links() -> None:
    """At the token's expiry its links are detached, and those of another token stay."""
    start = time.monotonic()
    base = 1_000_000.0
    async with (
        Emulator({"telemetry": 1, "other": 1}, now=lambda: base + time.monotonic() - start) as emulator,
        await AmqpPeer.connect(emulator) as peer,
    ):
        lasting = base + 3600 - time.time()
        assert await peer.put_token("sb://localhost/other", lifetime=lasting) == 202
        # Seconds are whole in a signature, so this one ends within the next.
        assert await peer.put_token(AUDIENCE, lifetime=base + 1 - time.time() + 0.5) == 202
        session = await peer.begin()
        ending = await peer.attach(session, target="telemetry")
        staying = await peer.attach(session, target="other")
        await peer.until(lambda: ending in peer.detached)
        error = peer.detached[ending]
        assert error is not None
        assert error.condition == "amqp:unauthorized-access"
        assert isinstance(await peer.send(staying, event()), Accepted)


async def test_token_put_again_keeps_the_links() -> None:
    """A refresh before expiry moves the deadline."""
    start = time.monotonic()
    base = 1_000_000.0
    async with (
        Emulator({"telemetry": 1}, now=lambda: base + time.monotonic() - start) as emulator,
        await AmqpPeer.connect(emulator) as peer,
    ):
        assert await peer.put_token(AUDIENCE, lifetime=base + 1 - time.time() + 0.5) == 202
        link = await peer.attach(await peer.begin(), target="telemetry")
        assert await peer.put_token(AUDIENCE, lifetime=base + 3600 - time.time()) == 202
        loop = asyncio.get_running_loop()
        passed = loop.create_future()
        loop.call_later(1.2, passed.set_result, None)
        await passed
        assert isinstance(await peer.send(link, event()), Accepted)


async def test_jwt_needs_a_verifier() -> None:
    """Without a verifier a JWT is refused; with one, it decides."""

    def request() -> Message:
        return cbs.put_token_request("the.jwt.text", JWT_TOKEN_TYPE, AUDIENCE, message_id="m")

    def verify(token: str) -> VerifiedToken | None:
        return VerifiedToken(time.time() + 60) if token == "the.jwt.text" else None

    async with Emulator({"telemetry": 1}) as emulator, await AmqpPeer.connect(emulator) as peer:
        assert status_of(await peer.request("$cbs", request())) == 401
    async with (
        Emulator({"telemetry": 1}, token_verifier=verify) as emulator,
        await AmqpPeer.connect(emulator) as peer,
    ):
        assert status_of(await peer.request("$cbs", request())) == 202
        await peer.attach(await peer.begin(), target="telemetry")


# ------------------------------------------------------------------------------------------------ addresses


@pytest.mark.parametrize("form", ["amqps://some.host:5671/{}", "/{}", "{}", "sb://h/{}"])
async def test_attach_takes_every_form_of_an_address(peer: AmqpPeer, form: str) -> None:
    """Full URL, absolute path and bare path lead to the same entity, in any case of the fixed words."""
    sender = await peer.attach(await peer.begin(), target=form.format("TELEMETRY/partitions/2"))
    assert isinstance(await peer.send(sender, event(b"hello")), Accepted)
    address = form.format("telemetry/consumergroups/$default/PARTITIONS/2")
    (got,) = await read(peer, Source(address=address), 1)
    assert got.body == b"hello"


@pytest.mark.parametrize(
    ("options", "condition", "says"),
    [
        ({"target": "nowhere"}, "amqp:not-found", "The messaging entity 'sb://.*/nowhere' could not be found"),
        ({"source": Source(address="nowhere/ConsumerGroups/g/Partitions/0")}, "amqp:not-found", "messaging entity"),
        ({"source": reading("0", group="nobody")}, "amqp:not-found", "The messaging entity .* could not be found"),
        ({"target": "telemetry/Partitions/4"}, "com.microsoft:argument-out-of-range", "between 0 and 3"),
        ({"source": reading("x")}, "com.microsoft:argument-out-of-range", "between 0 and 3"),
        ({"source": Source(address="telemetry")}, "amqp:not-allowed", "consumer group"),
        ({"target": "telemetry/ConsumerGroups/g/Partitions/0"}, "amqp:not-allowed", "sent to"),
        ({"target": "telemetry//x"}, "amqp:not-found", "messaging entity"),
        ({"target": None, "is_receiver": False}, "amqp:invalid-field", "no address"),
    ],
)
async def test_attach_to_what_does_not_exist_is_refused(
    emulator: Emulator, options: dict[str, Any], condition: str, says: str
) -> None:
    """Each wrong address is a refused link with the service's condition and words."""
    async with await AmqpPeer.connect(emulator) as peer:
        assert await peer.put_token("sb://127.0.0.1/") == 202
        error = await refusal(peer, **options)
        assert error.condition == condition
        assert re.search(says, error.description or "")


# -------------------------------------------------------------------------------------------------- sending


async def test_send_of_a_batch_stores_single_events(peer: AmqpPeer) -> None:
    """An envelope is opened; its events get consecutive numbers, growing offsets and one enqueued time."""
    sender = await peer.attach(await peer.begin(), target="telemetry/Partitions/1")
    batch = encode_batch([event(b"a"), event(b"b"), event(b"c")])
    assert isinstance(await peer.send(sender, batch, message_format=BATCH_MESSAGE_FORMAT), Accepted)
    got = await read(peer, reading("1"), 3)
    assert [each.body for each in got] == [b"a", b"b", b"c"]
    assert [each.sequence_number for each in got] == [0, 1, 2]
    assert sorted({int(each.offset) for each in got}) == [int(each.offset) for each in got]
    assert len({each.enqueued_time for each in got}) == 1


async def test_send_with_a_key_goes_by_the_services_hash(peer: AmqpPeer) -> None:
    """The gateway routes a key by its hash, and the key is on every event of the batch."""
    sender = await peer.attach(await peer.begin(), target="telemetry")
    for key in ("key1", "alphabet", "é", "trade"):
        batch = encode_batch([event(key.encode())], key)
        assert isinstance(await peer.send(sender, batch, message_format=BATCH_MESSAGE_FORMAT), Accepted)
        partition = str(partition_for_key(key, 4))
        got = await read(peer, reading(partition, EventPosition.at_offset("@latest", inclusive=True)), 1)
        assert (got[0].body, got[0].partition_key) == (key.encode(), key)


async def test_send_without_a_key_is_round_robin(peer: AmqpPeer) -> None:
    """The gateway takes the partitions in turn."""
    sender = await peer.attach(await peer.begin(), target="telemetry")
    for _ in range(8):
        await peer.send(sender, event())
    for partition in range(4):
        got = await read(peer, reading(str(partition)), 2)
        assert [each.sequence_number for each in got] == [0, 1]


async def test_send_of_too_large_a_message_is_rejected() -> None:
    """The rejection names the size; the link stays and takes the next one."""
    async with (
        Emulator({"telemetry": 1}, max_message_size=4096) as emulator,
        await AmqpPeer.connect(emulator) as peer,
    ):
        await peer.put_token(AUDIENCE)
        sender = await peer.attach(await peer.begin(), target="telemetry")
        assert sender.remote_max_message_size == 4096
        assert sender.remote is not None
        sender.remote.max_message_size = None  # this client does not care
        outcome = await peer.send(sender, event(bytes(200_000)))
        assert isinstance(outcome, Rejected)
        assert outcome.error is not None
        assert outcome.error.condition == "amqp:link:message-size-exceeded"
        assert "4096 bytes" in (outcome.error.description or "")
        assert isinstance(await peer.send(sender, event()), Accepted)
        (got,) = await read(peer, reading("0"), 1)
        assert got.sequence_number == 0


async def test_attach_answers_the_smaller_max_message_size(peer: AmqpPeer) -> None:
    """The answered max-message-size is the smaller one; 0 is no limit (7.1)."""
    session = await peer.begin()
    for asked, answered in ((1000, 1000), (0, 1 << 20), (None, 1 << 20), (1 << 30, 1 << 20)):
        link = await peer.attach(session, target="telemetry", max_message_size=asked)
        assert link.remote_max_message_size == answered


async def test_send_of_a_batch_with_a_broken_event_stores_nothing(peer: AmqpPeer) -> None:
    """One broken event refuses the batch, stores nothing and uses up no number."""
    sender = await peer.attach(await peer.begin(), target="telemetry/Partitions/0")
    outcome = await peer.send(sender, encode_batch([event(), b"broken"]), message_format=BATCH_MESSAGE_FORMAT)
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert outcome.error.condition == "amqp:decode-error"
    assert isinstance(await peer.send(sender, event(b"good")), Accepted)
    (got,) = await read(peer, reading("0"), 1)
    assert (got.sequence_number, got.body) == (0, b"good")


async def test_send_without_credit_is_taken(peer: AmqpPeer) -> None:
    """A client that grants itself credit, and sends flows as a sender, is put up with (7.5)."""
    session = await peer.begin()
    sender = await peer.attach(session, target="telemetry/Partitions/0")
    session.send_flow(sender.handle, delivery_count=0, credit=10_000)
    ids = [sender.send(event()) for _ in range(3000)]
    peer.flush()
    await peer.until(lambda: len(peer.outcomes[sender]) == len(ids))
    assert all(isinstance(each, Accepted) for each in peer.outcomes[sender].values())


async def test_send_of_presettled_messages_stores_them(peer: AmqpPeer) -> None:
    """A message that comes settled is stored, and no disposition answers it."""
    session = await peer.begin()
    sender = await peer.attach(session, target="telemetry/Partitions/0", snd_settle_mode=1)
    sender.send(event(b"quiet"), settled=True)
    peer.flush()
    (got,) = await read(peer, reading("0"), 1)
    assert got.body == b"quiet"
    assert peer.outcomes[sender] == {}


async def test_attach_of_one_link_name_on_two_connections(emulator: Emulator, peer: AmqpPeer) -> None:
    """JavaScript names its links by address, so names count per connection only (7.1)."""
    async with await AmqpPeer.connect(emulator) as second:
        await second.put_token(AUDIENCE)
        for each in (peer, second):
            link = await each.attach(await each.begin(), target="telemetry", name="telemetry")
            assert isinstance(await each.send(link, event()), Accepted)


# ------------------------------------------------------------------------------------------------ receiving


async def fill(peer: AmqpPeer, partition: str, count: int) -> Link:
    sender = await peer.attach(await peer.begin(), target=f"telemetry/Partitions/{partition}")
    for number in range(count):
        await peer.send(sender, event(b"%d" % number))
    return sender


@pytest.mark.parametrize("descriptor", [Symbol("apache.org:selector-filter:string"), ULong(0x468C00000004), ULong(7)])
@pytest.mark.parametrize("quote", ["'", ""])
async def test_attach_takes_the_filters_of_every_client(peer: AmqpPeer, descriptor: object, quote: str) -> None:
    """A filter counts by its key, whatever its descriptor, with the value quoted or bare (5.2)."""
    await fill(peer, "0", 4)
    text = f"amqp.annotation.x-opt-sequence-number >= {quote}2{quote}"
    source = reading("0")
    source.filter = {Symbol("apache.org:selector-filter:string"): Described(descriptor, text)}
    got = await read(peer, source, 2)
    assert [each.sequence_number for each in got] == [2, 3]


async def test_receive_gets_settled_events(peer: AmqpPeer) -> None:
    """The service settles what it sends, also where unsettled and second were asked for (5.1)."""
    await fill(peer, "0", 1)
    link = await peer.attach(await peer.begin(), source=reading("0"), snd_settle_mode=0, rcv_settle_mode=1)
    assert link.remote is not None
    assert link.remote.snd_settle_mode == 1
    link.set_credit(1)
    peer.flush()
    await peer.until(lambda: peer.received[link])
    # A client in that mode settles all the same, and goes on.
    link.settle(0, 0, Accepted())
    link.set_credit(1)
    await fill(peer, "0", 1)
    await peer.until(lambda: len(peer.received[link]) == 2)


async def test_receive_is_bounded_by_credit(peer: AmqpPeer) -> None:
    """Not one event more than the credit comes, and drain uses the rest up."""
    await fill(peer, "0", 5)
    link = await peer.attach(await peer.begin(), source=reading("0"))
    link.set_credit(3)
    peer.flush()
    await peer.until(lambda: len(peer.received[link]) == 3)
    await fill(peer, "1", 1)
    assert len(peer.received[link]) == 3
    link.drain = True
    link.session.send_flow(link.handle, delivery_count=link.delivery_count, credit=10, drain=True)
    link.credit = link.allowance = 10
    peer.flush()
    await peer.until(lambda: len(peer.received[link]) == 5)
    await peer.until(lambda: True if not link.drain else None)
    assert link.credit == 0


async def test_receive_at_the_end_gets_new_events_only(peer: AmqpPeer) -> None:
    """A reader at the end gets what is stored next, and nothing older."""
    await fill(peer, "0", 2)
    link = await peer.attach(await peer.begin(), source=reading("0", EventPosition.latest()))
    link.set_credit(10)
    peer.flush()
    await fill(peer, "0", 1)
    await peer.until(lambda: peer.received[link])
    assert [ReceivedEvent(raw).sequence_number for raw in peer.received[link]] == [2]


async def test_large_event_in_many_frames_goes_both_ways(peer: AmqpPeer) -> None:
    """An event of the full size goes both ways, though frames are 64 KiB and annotations make it larger."""
    sender = await peer.attach(await peer.begin(), target="telemetry/Partitions/0")
    body = bytes(1024 * 1024 - 16)
    assert isinstance(await peer.send(sender, event(body)), Accepted)
    link = await peer.attach(await peer.begin(), source=reading("0"), max_message_size=1024 * 1024)
    link.limit_messages(None)  # what the service adds is not held against the event, as with Python's client
    link.set_credit(1)
    peer.flush()
    await peer.until(lambda: peer.received[link])
    assert ReceivedEvent(peer.received[link][0]).body == body


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("amqp.annotation.x-opt-offset > '99999'", "The last offset in the system is"),
        ("amqp.annotation.x-opt-offset > 'x'", "supplied offset 'x'"),
        ("amqp.annotation.x-opt-color > '1'", "x-opt-color"),
        ("nonsense", "nonsense"),
    ],
)
async def test_attach_at_a_wrong_position_is_refused(peer: AmqpPeer, text: str, says: str) -> None:
    """A wrong filter or an offset beyond the end is an argument error."""
    source = reading("0")
    key = Symbol("apache.org:selector-filter:string")
    source.filter = {key: Described(key, text)}
    error = await refusal(peer, source=source)
    assert error.condition == "com.microsoft:argument-error"
    assert says in (error.description or "")


async def test_receive_with_runtime_metrics_gets_the_newest_events_place(peer: AmqpPeer) -> None:
    """With the capability, every event has the properties of its partition's newest one (6.3)."""
    await fill(peer, "0", 3)
    got = await read(peer, reading("0"), 3, desired_capabilities=[RUNTIME_METRIC])
    last = got[-1]
    for each in got:
        assert each.last_enqueued is not None
        assert each.last_enqueued.sequence_number == 2
        assert each.last_enqueued.offset == last.offset
        assert each.last_enqueued.enqueued_time == last.enqueued_time
    (plain,) = await read(peer, reading("0"), 1)
    assert plain.last_enqueued is None


async def test_attach_with_an_epoch_takes_the_partition(emulator: Emulator, peer: AmqpPeer) -> None:
    """An equal or higher epoch detaches the others as stolen, across connections; a lower one is refused."""
    async with await AmqpPeer.connect(emulator) as second:
        await second.put_token(AUDIENCE)
        shared = await peer.attach(await peer.begin(), source=reading("0"))
        first = await second.attach(
            await second.begin(), source=reading("0"), properties={EPOCH: 1, RECEIVER_NAME: "first"}
        )
        await peer.until(lambda: shared in peer.detached)
        error = peer.detached[shared]
        assert error is not None
        assert error.condition == "amqp:link:stolen"
        lower = await refusal(peer, source=reading("0"), properties={EPOCH: 0})
        assert (lower.condition, "'first' with a higher epoch '1'" in (lower.description or "")) == (
            "amqp:link:stolen",
            True,
        )
        assert (await refusal(peer, source=reading("0"))).condition == "amqp:link:stolen"
        # Another group, and another partition, are another matter.
        await peer.attach(await peer.begin(), source=reading("0", group="readers"))
        await peer.attach(await peer.begin(), source=reading("1"))
        await peer.attach(await peer.begin(), source=reading("0"), properties={EPOCH: 1})
        await second.until(lambda: first in second.detached)


async def test_attach_of_a_sixth_shared_reader_is_refused(emulator: Emulator, peer: AmqpPeer) -> None:
    """Five readers share a partition; one that goes, by detach or by its connection's death, makes room."""
    async with await AmqpPeer.connect(emulator) as second:
        await second.put_token(AUDIENCE)
        session = await second.begin()
        for _ in range(5):
            await second.attach(session, source=reading("0"))
        error = await refusal(peer, source=reading("0"))
        assert error.condition == "amqp:resource-limit-exceeded"
        assert "nil, nil, nil, nil, nil" in (error.description or "")
    last = await peer.attach(await peer.begin(), source=reading("0"))
    last.detach()
    peer.flush()
    await peer.until(lambda: last in peer.detached)
    hub = service_of(emulator).hub("telemetry")
    assert hub is not None
    assert hub.partitions[0].listeners == set()


# -------------------------------------------------------------------------------------------- $management


async def test_management_answers_in_exact_types(peer: AmqpPeer) -> None:
    """The types of the answers' fields are those that .NET casts to (4.2)."""
    name = uuid.uuid4()
    answer = await peer.request("$management", management.hub_request("telemetry", message_id=name))
    assert answer.properties is not None
    assert answer.properties.correlation_id == name
    assert type(fields_of(answer)["status-code"]) is Int
    assert isinstance(answer.body, AmqpValue)
    facts = answer.body.value
    assert facts["name"] == "telemetry"
    assert type(facts["created_at"]) is Timestamp
    assert type(facts["partition_count"]) is Int
    assert type(facts["partition_ids"]) is Array
    assert facts["partition_ids"] == ["0", "1", "2", "3"]
    await fill(peer, "0", 2)
    # JavaScript sends a body that means nothing.
    request = management.partition_request("telemetry", "0", message_id="text")
    request.body = Data((b"[]",))
    answer = await peer.request("$management", request)
    assert answer.properties is not None
    assert answer.properties.correlation_id == "text"
    assert isinstance(answer.body, AmqpValue)
    facts = answer.body.value
    assert (facts["begin_sequence_number"], facts["last_enqueued_sequence_number"]) == (0, 1)
    assert type(facts["begin_sequence_number"]) is int
    assert int(facts["last_enqueued_offset"]) > 0
    assert type(facts["last_enqueued_time_utc"]) is Timestamp
    assert facts["is_partition_empty"] is False


@pytest.mark.parametrize(
    ("request_", "code", "condition"),
    [
        (management.hub_request("nowhere", message_id="m"), 404, "amqp:not-found"),
        (management.partition_request("telemetry", "9", message_id="m"), 400, "com.microsoft:argument-out-of-range"),
        (Message(properties=Properties(message_id="m")), 400, "com.microsoft:argument-error"),
    ],
)
async def test_management_refuses_a_wrong_read_with_status_and_condition(
    emulator: Emulator, request_: Message, code: int, condition: str
) -> None:
    """Each wrong read has its status and condition."""
    async with await AmqpPeer.connect(emulator) as peer:
        await peer.put_token("sb://127.0.0.1/")
        answer = await peer.request("$management", request_)
        assert (status_of(answer), fields_of(answer)["error-condition"]) == (code, condition)


async def test_management_needs_a_token_for_the_hub(peer: AmqpPeer) -> None:
    """A token for one hub does not read another's properties."""
    answer = await peer.request("$management", management.hub_request("other", message_id="m"))
    assert status_of(answer) == 401


@pytest.mark.parametrize("by", ["name", "target"])
async def test_management_answers_on_the_link_that_is_named(peer: AmqpPeer, by: str) -> None:
    """A reply-to names an answer link by its name (JavaScript) or its target (.NET), in whatever session."""
    session = await peer.begin()
    decoy = await peer.attach(session, source="$management", target="elsewhere", is_receiver=True)
    sender = await peer.attach(session, source="here", target="$management", is_receiver=False, snd_settle_mode=1)
    wanted = await peer.attach(
        await peer.begin(), source="$management", target="my-target", name="my-name", is_receiver=True
    )
    for link in (decoy, wanted):
        link.set_credit(5)
    request = management.hub_request("telemetry", message_id="m", reply_to=f"my-{by}")
    sender.send(request.encode(), settled=True)
    peer.flush()
    await peer.until(lambda: peer.received[wanted])
    answer = Message.decode(peer.received[wanted][0])
    assert answer.properties is not None
    assert answer.properties.to == f"my-{by}"
    assert peer.received[decoy] == []


async def test_management_answers_wait_for_credit(peer: AmqpPeer) -> None:
    """An answer link without credit gets its answer when it has some."""
    session = await peer.begin()
    receiver = await peer.attach(session, source="$management", target="t", is_receiver=True)
    sender = await peer.attach(session, target="$management")
    await peer.send(sender, management.hub_request("telemetry", message_id="m").encode())
    assert peer.received[receiver] == []
    receiver.set_credit(1)
    peer.flush()
    await peer.until(lambda: peer.received[receiver])


async def test_add_partitions_serves_them_at_once(emulator: Emulator, peer: AmqpPeer) -> None:
    """Added partitions are there for reads, senders and readers at once."""
    await emulator.add_partitions("telemetry", 2)
    answer = await peer.request("$management", management.hub_request("telemetry", message_id="m"))
    assert isinstance(answer.body, AmqpValue)
    assert answer.body.value["partition_ids"] == ["0", "1", "2", "3", "4", "5"]
    await fill(peer, "5", 1)
    assert len(await read(peer, reading("5"), 1)) == 1


async def partition_facts(peer: AmqpPeer, partition_id: str) -> dict[str, Any]:
    """Ask for a partition's properties."""
    answer = await peer.request(
        "$management", management.partition_request("telemetry", partition_id, message_id=uuid.uuid4().hex)
    )
    assert isinstance(answer.body, AmqpValue)
    facts: dict[str, Any] = answer.body.value
    return facts


async def test_drop_oldest_removes_events_from_readers_and_properties(emulator: Emulator, peer: AmqpPeer) -> None:
    """What is dropped is gone for readers and properties, the rest keeps its numbers, and more than all is all."""
    await fill(peer, "0", 5)
    for before in (2, 3, 1):
        emulator.drop_events("telemetry", "0", before)
    assert (await partition_facts(peer, "0"))["begin_sequence_number"] == 3
    assert [event.sequence_number for event in await read(peer, reading("0"), 2)] == [3, 4]
    emulator.drop_events("telemetry", "0", 99)
    facts = await partition_facts(peer, "0")
    assert (facts["is_partition_empty"], facts["last_enqueued_sequence_number"]) == (True, 4)
    with pytest.raises(ConfigurationError, match="no partition '9'"):
        emulator.drop_events("telemetry", "9", 1)


async def test_recreate_hub_ends_links_and_starts_numbers_again(emulator: Emulator, peer: AmqpPeer) -> None:
    """A recreated hub is a new one: links to the old end, its events are gone, numbers begin again, later created."""

    async def created_at() -> Any:
        answer = await peer.request("$management", management.hub_request("telemetry", message_id=uuid.uuid4().hex))
        assert isinstance(answer.body, AmqpValue)
        return answer.body.value["created_at"]

    await fill(peer, "0", 5)
    link = await peer.attach(await peer.begin(), source=reading("0"))
    before = await created_at()
    emulator.recreate_hub("telemetry", 2)
    await peer.until(lambda: link in peer.detached)
    error = peer.detached[link]
    assert error is not None
    assert error.condition == "amqp:not-found"
    assert await created_at() > before
    facts = await partition_facts(peer, "0")
    assert (facts["is_partition_empty"], facts["last_enqueued_sequence_number"]) == (True, -1)
    await fill(peer, "0", 1)
    assert [event.sequence_number for event in await read(peer, reading("0"), 1)] == [0]
    with pytest.raises(ConfigurationError, match="no hub"):
        emulator.recreate_hub("nowhere")


# -------------------------------------------------------------------------------- deadlines and retention


@pytest.mark.parametrize(
    ("deadlines", "says"),
    [
        (Deadlines(no_token=0.05), None),
        (Deadlines(no_link=0.05), "inactive for more than the allowed 50 milliseconds"),
    ],
)
async def test_idle_connections_are_closed(deadlines: Deadlines, says: str | None) -> None:
    """A connection without a token is cut; one without a link is closed with the service's words (2.4)."""
    async with (
        Emulator({"telemetry": 1}, deadlines=deadlines) as emulator,
        await AmqpPeer.connect(emulator) as peer,
    ):
        await peer.until(lambda: peer.closed)
        assert peer.closed is not None
        assert peer.closed.error is not None
        assert peer.closed.error.condition == "amqp:connection:forced"
        assert peer.closed.is_local is (says is None)  # cut, the client's own engine says why
        assert says is None or says in (peer.closed.error.description or "")


async def test_client_that_does_not_finish_its_tls_handshake_is_dropped() -> None:
    """It has the time of one without a token, not the minute that asyncio gives it; as on the port for WebSockets."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(server)
    async with Emulator({"telemetry": 1}, tls=server, deadlines=Deadlines(no_token=0.05)) as emulator:
        reader, writer = await asyncio.open_connection(emulator.host, emulator.port)
        async with asyncio.timeout(30):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_idle_producers_are_detached() -> None:
    """A producer's link without a transfer is detached; its connection stays."""
    async with (
        Emulator({"telemetry": 1}, deadlines=Deadlines(idle_producer=0.05)) as emulator,
        await AmqpPeer.connect(emulator) as peer,
    ):
        await peer.put_token(AUDIENCE)
        link = await peer.attach(await peer.begin(), target="telemetry")
        await peer.until(lambda: link in peer.detached)
        error = peer.detached[link]
        assert error is not None
        assert error.condition == "amqp:link:detach-forced"
        await peer.attach(await peer.begin(), target="telemetry")


async def test_retention_by_size_drops_events_and_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    """Over its size a partition loses its oldest events, its beginning moves, and the log says it once."""
    caplog.set_level(logging.WARNING, "eventpump.emulator")
    async with (
        Emulator({"telemetry": 1}, retention=Retention(size=20_000)) as emulator,
        await AmqpPeer.connect(emulator) as peer,
    ):
        await peer.put_token(AUDIENCE)
        link = await peer.attach(await peer.begin(), target="telemetry")
        for _ in range(40):
            await peer.send(link, event(bytes(1000)))
        answer = await peer.request("$management", management.partition_request("telemetry", "0", message_id="m"))
        assert isinstance(answer.body, AmqpValue)
        beginning = answer.body.value["begin_sequence_number"]
        assert 20 < beginning < 40
        first = (await read(peer, reading("0", EventPosition.earliest()), 1))[0]
        assert first.sequence_number == beginning
    assert [record.message.count("partition 0") for record in caplog.records] == [1]


# --------------------------------------------------------------------------------------------------- faults


async def test_fault_refuses_an_attach(emulator: Emulator, peer: AmqpPeer) -> None:
    """The matching attach is refused as configured, others and later ones are not."""
    fault = emulator.faults.add(
        Refuse("com.microsoft:server-busy"),
        on=Performative.ATTACH,
        role=LinkRole.CONSUMER,
        hub="Telemetry",
        partition="1",
    )
    session = await peer.begin()
    await peer.attach(session, source=reading("0"))
    await peer.attach(session, target="telemetry/Partitions/1")
    assert (await refusal(peer, source=reading("1"))).condition == "com.microsoft:server-busy"
    await peer.attach(session, source=reading("1"))
    assert fault.fired == 1


async def test_fault_rejects_a_message(emulator: Emulator, peer: AmqpPeer) -> None:
    """Server-busy rejects one message after the given number, and stores nothing of it."""
    sender = await peer.attach(await peer.begin(), target="telemetry/Partitions/0")
    emulator.faults.add(Reject(), role=LinkRole.PRODUCER, after=1)
    outcomes = [await peer.send(sender, event(b"%d" % number)) for number in range(3)]
    assert [type(each) for each in outcomes] == [Accepted, Rejected, Accepted]
    assert outcomes[1].error.condition == "com.microsoft:server-busy"
    assert [each.body for each in await read(peer, reading("0"), 2)] == [b"0", b"2"]


@pytest.mark.parametrize(("stored", "count"), [(False, 1), (True, 2)])
async def test_fault_drops_around_storing(emulator: Emulator, peer: AmqpPeer, stored: bool, count: int) -> None:
    """The connection dies before or after storing, in either case without an answer."""
    sender = await fill(peer, "0", 1)
    emulator.faults.add(DropConnection(stored=stored), role=LinkRole.PRODUCER)
    sender.send(event())
    peer.flush()
    await peer.until(lambda: peer.is_gone)
    assert len(peer.outcomes[sender]) == 1
    async with await AmqpPeer.connect(emulator) as second:
        await second.put_token(AUDIENCE)
        answer = await second.request("$management", management.partition_request("telemetry", "0", message_id="m"))
        assert isinstance(answer.body, AmqpValue)
        assert answer.body.value["last_enqueued_sequence_number"] == count - 1


async def test_fault_stalls_a_reader(emulator: Emulator, peer: AmqpPeer) -> None:
    """A held reader stays attached and gets nothing after the given events, until the fault is removed."""
    await fill(peer, "0", 5)
    fault = emulator.faults.add(Hold(), role=LinkRole.CONSUMER, partition="0", after=2)
    link = await peer.attach(await peer.begin(), source=reading("0"))
    link.set_credit(10)
    peer.flush()
    await peer.until(lambda: fault.fired == 1 and len(peer.received[link]) == 2)
    await fill(peer, "1", 1)
    assert len(peer.received[link]) == 2
    assert link.is_attached
    fault.remove()
    await peer.until(lambda: len(peer.received[link]) == 5)


async def test_fault_holds_an_answer(emulator: Emulator, peer: AmqpPeer) -> None:
    """A held message is neither stored nor answered, and what follows on its link keeps its order."""
    sender = await peer.attach(await peer.begin(), target="telemetry/Partitions/0")
    fault = emulator.faults.add(Hold(), role=LinkRole.PRODUCER)
    ids = [sender.send(event(b"%d" % number)) for number in range(3)]
    peer.flush()
    await fill(peer, "1", 1)
    assert peer.outcomes[sender] == {}
    fault.remove()
    await peer.until(lambda: len(peer.outcomes[sender]) == len(ids))
    assert [each.body for each in await read(peer, reading("0"), 3)] == [b"0", b"1", b"2"]


async def test_fault_delays(emulator: Emulator, peer: AmqpPeer) -> None:
    """Delays put off an attach, a message and a delivery, and lose none."""
    emulator.faults.add(Delay(0.02), on=Performative.ATTACH, count=2)
    emulator.faults.add(Delay(0.02), role=LinkRole.PRODUCER, count=None)
    emulator.faults.add(Delay(0.02), role=LinkRole.CONSUMER, count=None)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await fill(peer, "0", 3)
    assert loop.time() - began >= 0.08
    assert [each.body for each in await read(peer, reading("0"), 3)] == [b"0", b"1", b"2"]
    assert loop.time() - began >= 0.16


async def test_fault_detaches(emulator: Emulator, peer: AmqpPeer) -> None:
    """A detach fault ends the link with its condition, and the connection stays."""
    emulator.faults.add(DetachLink(), role=LinkRole.CONSUMER, after=1)
    await fill(peer, "0", 2)
    link = await peer.attach(await peer.begin(), source=reading("0"))
    link.set_credit(10)
    peer.flush()
    await peer.until(lambda: link in peer.detached)
    error = peer.detached[link]
    assert error is not None
    assert error.condition == "amqp:link:detach-forced"
    assert len(peer.received[link]) == 1
    assert len(await read(peer, reading("0"), 2)) == 2


async def test_fault_closes_the_connection(emulator: Emulator, peer: AmqpPeer) -> None:
    """A close fault closes the connection with its condition."""
    emulator.faults.add(CloseConnection(), role=LinkRole.MANAGEMENT, on=Performative.ATTACH)
    with pytest.raises(AssertionError):
        await peer.attach(await peer.begin(), source="$management")
    assert peer.closed is not None
    assert peer.closed.error is not None
    assert peer.closed.error.condition == "amqp:connection:forced"


async def test_fault_answers_requests_with_a_status(emulator: Emulator, peer: AmqpPeer) -> None:
    """A rejected request is answered with the status of the condition."""
    emulator.faults.add(Reject(), role=LinkRole.MANAGEMENT)
    answer = await peer.request("$management", management.hub_request("telemetry", message_id="m"))
    assert status_of(answer) == 503


async def test_drop_connections_ends_all_and_takes_new_ones(emulator: Emulator, peer: AmqpPeer) -> None:
    """All connections end without a word, and new ones are welcome."""
    async with await AmqpPeer.connect(emulator) as another:
        emulator.drop_connections()
        await peer.until(lambda: peer.is_gone)
        await another.until(lambda: another.is_gone)
        for dropped in (peer, another):
            assert dropped.closed is not None
            assert dropped.closed.is_local  # the end of the stream, and no close
    async with await AmqpPeer.connect(emulator) as second:
        assert await second.put_token(AUDIENCE) == 202


# ----------------------------------------------------------------------------------------------------- stop


async def test_stop_closes_connections_and_leaves_no_task() -> None:
    """Clients get a close with a condition, the port is free, and no task is left."""
    tasks = asyncio.all_tasks()
    emulator = Emulator({"telemetry": 1})
    await emulator.start()
    port = emulator.port
    peer = await AmqpPeer.connect(emulator)
    await peer.put_token(AUDIENCE)
    await peer.attach(await peer.begin(), source=reading("0"))
    await emulator.aclose()
    await emulator.aclose()
    await peer.until(lambda: peer.is_gone)
    assert peer.closed is not None
    assert not peer.closed.is_local
    assert peer.closed.error == AmqpError("amqp:connection:forced", "The service is stopping.")
    await peer.aclose()
    assert asyncio.all_tasks() == tasks
    async with Emulator({"telemetry": 1}, port=port) as again:
        assert again.port == port


async def test_hostile_bytes_end_their_connection_only(emulator: Emulator, peer: AmqpPeer) -> None:
    """Garbage is answered by closing that connection; others do not notice."""
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"AMQP\x03\x01\x00\x00\xff\xff\xff\xff" + bytes(64), bytes(200)):
        reader, writer = await asyncio.open_connection(emulator.host, emulator.port)
        writer.write(garbage)
        await reader.read()
        writer.close()
        await writer.wait_closed()
    await fill(peer, "0", 1)
