"""What the emulator answers to bytes that no client of good will sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from eventpump.amqp.message import Data, Message, Properties
from eventpump.amqp.performatives import Accepted, Rejected, Source
from eventpump.amqp.types import Described
from eventpump.emulator.server import Emulator
from eventpump.eventhubs import cbs, management
from eventpump.eventhubs.envelope import encode_batch
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.hashing import partition_for_key
from eventpump.eventhubs.names import BATCH_MESSAGE_FORMAT, PARTITION_KEY, SAS_TOKEN_TYPE, SELECTOR_FILTER
from tests.support.peer import AUDIENCE, AmqpPeer, LinkRefusedError, fields_of, status_of

DIGITS = "9" * 5000


def keyed(key: str, body: bytes) -> bytes:
    return Message(body=Data((body,)), message_annotations={PARTITION_KEY: key}).encode()


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    """Serve a hub of four partitions."""
    async with Emulator({"telemetry": 4}) as started:
        yield started


@pytest.mark.parametrize(
    "raw", ["005372c100", "005375a10178", "00537541", "005374a10178005375a00178", "005372405375a00178"]
)
@pytest.mark.parametrize("in_batch", [False, True])
async def test_send_of_what_is_no_message_is_rejected(peer: AmqpPeer, raw: str, in_batch: bool) -> None:
    """What no reader could take apart is rejected as that, alone and in a batch, and its link goes on."""
    sender = await peer.attach(await peer.begin(), target="telemetry/Partitions/0")
    payload = bytes.fromhex(raw)
    if in_batch:
        outcome = await peer.send(sender, encode_batch([payload]), message_format=BATCH_MESSAGE_FORMAT)
    else:
        outcome = await peer.send(sender, payload)
    assert isinstance(outcome, Rejected)
    assert outcome.error is not None
    assert outcome.error.condition == "amqp:decode-error"
    assert isinstance(await peer.send(sender, Message(body=Data((b"x",))).encode()), Accepted)


@pytest.mark.parametrize("is_sender", [True, False])
async def test_attach_to_a_partition_of_many_digits_is_refused(peer: AmqpPeer, is_sender: bool) -> None:
    """A partition id with more digits than Python converts is refused at attach as any unknown one."""
    session = await peer.begin()
    options = (
        {"target": f"telemetry/Partitions/{DIGITS}"}
        if is_sender
        else {"source": f"telemetry/ConsumerGroups/$Default/Partitions/{DIGITS}"}
    )
    with pytest.raises(LinkRefusedError) as caught:
        await peer.attach(session, **options)
    assert caught.value.error.condition == "com.microsoft:argument-out-of-range"
    assert "between 0 and 3" in (caught.value.error.description or "")


async def test_management_read_of_a_partition_of_many_digits_is_refused(peer: AmqpPeer) -> None:
    """A question about such a partition is answered as one about any unknown partition."""
    answer = await peer.request("$management", management.partition_request("telemetry", DIGITS, message_id="m"))
    assert (status_of(answer), fields_of(answer)["error-condition"]) == (400, "com.microsoft:argument-out-of-range")


async def test_send_with_a_long_key_does_not_stop_the_loop(peer: AmqpPeer) -> None:
    """A key of 400 kB is hashed over many turns of the loop; what came after it on its link is stored after it."""
    key = "k" * 400_000
    home = str(partition_for_key(key, 4))
    short = next(text for text in map(str, range(100)) if str(partition_for_key(text, 4)) == home)
    sender = await peer.attach(await peer.begin(), target="telemetry")
    ids = [sender.send(keyed(key if number % 2 == 0 else short, b"%d" % number)) for number in range(4)]
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(peer.outcomes[sender]) < len(ids):
            asyncio.get_running_loop().call_soon(turn)

    turn()
    peer.flush()
    await peer.until(lambda: all(number in peer.outcomes[sender] for number in ids))
    assert turns >= 2 * len(key) // 8192
    assert [type(peer.outcomes[sender][number]) for number in ids] == [Accepted] * 4
    source = Source(address=f"telemetry/ConsumerGroups/$Default/Partitions/{home}")
    reader = await peer.attach(await peer.begin(), source=source)
    reader.set_credit(10)
    peer.flush()
    await peer.until(lambda: len(peer.received[reader]) >= 4)
    assert [ReceivedEvent(raw).body for raw in peer.received[reader]] == [b"0", b"1", b"2", b"3"]


async def test_detach_while_a_long_key_is_hashed_stores_the_event(emulator: Emulator, peer: AmqpPeer) -> None:
    """A link that goes before its long key is hashed breaks nothing; what was sent is stored."""
    key = "k" * 100_000
    home = str(partition_for_key(key, 4))
    async with await AmqpPeer.connect(emulator) as other:
        assert await other.put_token(AUDIENCE) == 202
        sender = await other.attach(await other.begin(), target="telemetry")
        sender.send(keyed(key, b"x"))
        sender.detach()
        other.flush()
        await other.until(lambda: sender in other.detached)
    source = Source(address=f"telemetry/ConsumerGroups/$Default/Partitions/{home}")
    reader = await peer.attach(await peer.begin(), source=source)
    reader.set_credit(1)
    peer.flush()
    await peer.until(lambda: peer.received[reader])


async def test_refuse_long_keys_refuses_129_characters() -> None:
    """With `refuse_long_keys` a key of 129 characters is refused and one of 128 taken; without it both are taken."""
    for refuses in (False, True):
        async with (
            Emulator({"telemetry": 4}, refuse_long_keys=refuses) as emulator,
            await AmqpPeer.connect(emulator) as peer,
        ):
            assert await peer.put_token(AUDIENCE) == 202
            sender = await peer.attach(await peer.begin(), target="telemetry")
            assert isinstance(await peer.send(sender, keyed("k" * 128, b"x")), Accepted)
            outcome = await peer.send(sender, keyed("k" * 129, b"x"))
            assert isinstance(outcome, Rejected if refuses else Accepted)


async def test_token_for_another_host_is_refused() -> None:
    """Signatures are for a host that the emulator answers to: its address, loopback names, and those it was given."""
    async with Emulator({"h": 1}, names=["Given.Example"]) as emulator, await AmqpPeer.connect(emulator) as peer:
        assert await peer.put_token("sb://localhost/h", resource="sb://127.0.0.1/h") == 202
        assert await peer.put_token("sb://given.example/h") == 202
        assert await peer.put_token("sb://evil.example/h") == 401
        assert await peer.put_token("sb://localhost/h", resource="sb://evil.example/h") == 401
        assert await peer.put_token("sb://localhost/h", resource="h") == 401
    async with Emulator({"h": 1}, host="0.0.0.0") as emulator, await AmqpPeer.connect(emulator) as peer:
        assert await peer.put_token("sb://container/h") == 202
        assert await peer.put_token("sb://container/h", resource="sb://evil.example/h") == 401
    everywhere = Emulator({"h": 1}, host="0.0.0.0", names=["container"])
    async with everywhere as emulator, await AmqpPeer.connect(emulator) as peer:
        assert await peer.put_token("sb://container/h", resource="sb://localhost/h") == 202
        assert await peer.put_token("sb://other/h") == 401


@pytest.mark.parametrize("text", ["/" + "\0" * 40_000, "sb://127.0.0.1/" + "a//" * 9000, "sb://h/$cbs\n" * 3000])
async def test_refused_audience_is_quoted_in_part(peer: AmqpPeer, text: str) -> None:
    """A refusal on the token node holds at most an excerpt of what it refuses."""
    request = cbs.put_token_request("t", SAS_TOKEN_TYPE, text, message_id="m")
    answer = await peer.request("$cbs", request)
    assert status_of(answer) in {400, 401}
    assert fields_of(answer)["status-description"].isprintable()
    assert len(answer.encode()) < 700


async def test_refused_read_is_quoted_in_part(peer: AmqpPeer) -> None:
    """A refusal on the management node holds at most an excerpt of what it refuses."""
    fields = {"operation": "\x1b" * 9000, "type": "\n" * 9000, "name": "telemetry"}
    request = Message(properties=Properties(message_id="m"), application_properties=fields)
    for wanted in (request, management.partition_request("telemetry", "\0" * 9000, message_id="m")):
        answer = await peer.request("$management", wanted)
        assert status_of(answer) == 400
        assert fields_of(answer)["status-description"].isprintable()
        assert len(answer.encode()) < 900


@pytest.mark.parametrize(
    "address",
    [
        "a\0" * 9000,
        "telemetry//\n" + "x" * 9000,
        "telemetry/Partitions/" + "\x1b" * 9000,
        "telemetry/ConsumerGroups/" + "g" * 9000 + "/Partitions/0",
    ],
)
async def test_refused_address_is_quoted_in_part(peer: AmqpPeer, address: str) -> None:
    """A refused link's error holds at most an excerpt of the address."""
    with pytest.raises(LinkRefusedError) as caught:
        await peer.attach(await peer.begin(), source=address)
    description = caught.value.error.description or ""
    assert description.isprintable()
    assert len(description) < 500


async def test_refused_selector_is_quoted_in_part(peer: AmqpPeer) -> None:
    """A refused position's error holds at most an excerpt of the selector."""
    for text in ("\n" * 9000, f"amqp.annotation.{'x' * 9000} > '1'", f"amqp.annotation.x-opt-offset > '{'y' * 9000}'"):
        source = Source(
            address="telemetry/ConsumerGroups/$Default/Partitions/0",
            filter={SELECTOR_FILTER: Described(SELECTOR_FILTER, text)},
        )
        with pytest.raises(LinkRefusedError) as caught:
            await peer.attach(await peer.begin(), source=source)
        description = caught.value.error.description or ""
        assert description.isprintable()
        quoting, _, ending = description.partition(" TrackingId:")
        assert len(quoting) < 500
        assert len(ending) < 420  # ids, names and times of the service's own
        assert not any(each * 3 in ending for each in ("\\n", "x", "y"))
