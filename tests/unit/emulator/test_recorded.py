"""What the emulator sends, held against the recordings of the service (tests/recorded)."""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any

import pytest

from eventpump.amqp.connection import AMQP_HEADER, EMPTY_FRAME, SASL_HEADER
from eventpump.amqp.frames import FrameWriter
from eventpump.amqp.message import Data, Message
from eventpump.amqp.performatives import (
    Accepted,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    SaslInit,
    SaslOutcome,
    Source,
    Target,
    Transfer,
    decode_performative,
)
from eventpump.amqp.types import Described, Symbol, Timestamp, UInt
from eventpump.emulator.auth import DEFAULT_KEY, DEFAULT_KEY_NAME
from eventpump.emulator.service import Deadlines, Service
from eventpump.eventhubs import cbs, management, sas
from eventpump.eventhubs.names import SELECTOR_FILTER
from tests.unit.amqp.pair import frame
from tests.unit.emulator.serving import by_hand, serve

HUB = "telemetry"
READING = "telemetry/ConsumerGroups/$Default/Partitions/0"
TIMEOUT = Symbol("com.microsoft:timeout")
NEVER = 10_000_000_000


class Hand:
    """A client written by hand: it sends frames, and reads those of the service one by one."""

    def __init__(self, service: Service) -> None:
        self.served, self.sink = by_hand(service)
        self._read = 0

    def send(self, *performatives: Any, channel: int = 1, payload: bytes = b"") -> list[tuple[Any, bytes, int]]:
        """Send frames. Returns the service's frames since the last call: performative, payload and size."""
        for each in performatives:
            self.served.data_received(frame(0 if isinstance(each, Open | Close) else channel, each, payload))
        return self.news()

    def news(self) -> list[tuple[Any, bytes, int]]:
        """Return the service's frames since the last call."""
        data, found = self.sink.written, []
        while self._read < len(data):
            if data.startswith(b"AMQP", self._read):
                self._read += 8
                continue
            size = int.from_bytes(data[self._read : self._read + 4], "big")
            body = data[self._read + 8 : self._read + size]
            if body:
                performative, end = decode_performative(body, 0, len(body))
                found.append((performative, body[end:], size))
            self._read += size
        return found

    def open(self, *, idle_time_out: int | None = None) -> None:
        """Open as Python does, with SASL PLAIN in place of a token, and begin."""
        response = f"\0{DEFAULT_KEY_NAME}\0{DEFAULT_KEY}".encode()
        hello = SASL_HEADER + frame(0, SaslInit("PLAIN", response), kind=1) + AMQP_HEADER
        self.served.data_received(hello + frame(0, Open("me", "memory", idle_time_out=idle_time_out)))
        self.send(Begin(next_outgoing_id=0, incoming_window=65_536, outgoing_window=65_536))

    def pair(self, node: str, *, snd_settle_mode: int = 0) -> None:
        """Attach both links of a node."""
        modes: dict[str, Any] = {"snd_settle_mode": snd_settle_mode}
        self.send(Attach("back", 2, True, source=Source(node), target=Target(node), **modes))
        self.send(Attach("out", 1, False, source=Source(node), target=Target(node), initial_delivery_count=0, **modes))
        self.send(Flow(1, 65_536, 0, 65_536, 2, 0, 10_000))

    def ask(self, request: Message, number: int = 0) -> list[tuple[Any, bytes, int]]:
        """Send a request on the link of a node."""
        return self.send(Transfer(1, number, b"x", 0, False), payload=request.encode())


def put_token(audience: str = f"sb://memory/{HUB}", *, key: str = DEFAULT_KEY, kind: str | None = None) -> Message:
    token = sas.generate(audience, DEFAULT_KEY_NAME, key, NEVER)
    return cbs.put_token_request(
        token, kind or "servicebus.windows.net:sastoken", audience, message_id=uuid.UUID(int=0), expires_at=1.0
    )


def only(found: list[tuple[Any, bytes, int]], kind: type) -> tuple[Any, bytes, int]:
    (one,) = [each for each in found if isinstance(each[0], kind)]
    return one


async def opened(**options: Any) -> Hand:
    hand = Hand(await serve())
    hand.open(**options)
    hand.news()
    return hand


# ------------------------------------------------------------------------------------------------ open, begin, flows


async def test_open_and_begin() -> None:
    """Exchanges sasl-anonymous, open-producer and begin: a greeting, the limits, the first id, the client's window."""
    hand = Hand(await serve())
    hand.served.data_received(SASL_HEADER + frame(0, SaslInit("ANONYMOUS", b"", "localhost"), kind=1) + AMQP_HEADER)
    outcome, _, size = only(hand.news(), SaslOutcome)
    assert (outcome.code, outcome.additional_data, size) == (0, b"Welcome!", 26)
    answer, _, size = only(hand.send(Open("me", "memory")), Open)
    assert (answer.max_frame_size, answer.channel_max, answer.idle_time_out) == (65_536, 4_999, 120_000)
    begun = Begin(next_outgoing_id=0, incoming_window=65_536, outgoing_window=65_536)
    answer, _, size = only(hand.send(begun), Begin)
    assert answer == Begin(1, 1, 5_000, 65_536, 255)
    assert size == 34


async def test_flows_state_the_windows() -> None:
    """Exchanges flow-cbs-service and flow-sender-partition: 65,536 transfers may go out, and after one 65,535."""
    hand = await opened()
    attach = Attach("out", 1, False, source=Source("$cbs"), target=Target("$cbs"), initial_delivery_count=0)
    flow, _, size = only(hand.send(attach), Flow)
    assert flow == Flow(0, 5_000, 1, 65_536, 0, 0, 100, 0)
    assert size == 36 - 1  # the recorded handle is 1, which takes a byte more than 0
    hand.send(Attach("back", 2, True, source=Source("$cbs"), target=Target("$cbs")))
    hand.send(Flow(1, 65_536, 0, 65_536, 2, 0, 10_000))
    hand.ask(put_token())
    flow, _, size = only(hand.send(_sender("telemetry/Partitions/0")), Flow)
    assert flow == Flow(1, 5_000, 2, 65_535, 2, 0, 1_000, 0)
    assert size == 40
    flow, _, _ = only(hand.send(_sender("telemetry", "second", 4)), Flow)
    assert flow.link_credit == 300


def _sender(address: str, name: str = "s", handle: int = 3, **options: Any) -> Attach:
    return Attach(
        name, handle, False, 0, 1, Source("here"), Target(address), initial_delivery_count=0, max_message_size=1 << 20,
        properties={TIMEOUT: 60}, **options,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the nodes


@pytest.mark.parametrize("node", ["$cbs", "$management"])
async def test_attach_of_a_node(node: str) -> None:
    """Exchanges attach-cbs-both and attach-management-both: no limit of size, and the settlement modes as asked."""
    hand = await opened()
    for is_receiver in (True, False):
        attach = Attach("x", int(is_receiver), is_receiver, 0, 0, Source(node), Target(node))
        attach.initial_delivery_count = None if is_receiver else 0
        answer, _, _ = only(hand.send(attach), Attach)
        assert (answer.max_message_size, answer.snd_settle_mode, answer.rcv_settle_mode) == (2**64 - 1, 0, 0)
        assert answer.properties is None


async def test_put_token_is_answered_as_recorded() -> None:
    """Exchange put-token-sas: the request settled first, the answer unsettled with tag 1, and its 119 bytes."""
    hand = await opened()
    hand.pair("$cbs")
    payload = b""
    for number in range(2):
        (settled, _, size), (transfer, payload, whole) = hand.ask(put_token(), number)
        assert settled == Disposition(True, number, None, True, Accepted())
        assert size == 23 + bool(number)
        assert (transfer.delivery_id, transfer.settled, transfer.batchable) == (number, False, False)
        assert transfer.delivery_tag == (number + 1).to_bytes(4, "little")
        assert whole == 119 + bool(number)
    accepted = (
        bytes.fromhex("005374c13104a10b") + b"status-codeq\x00\x00\x00\xca\xa1\x12status-description\xa1\x08Accepted"
    )
    assert payload == bytes.fromhex("005373c01e0d404040404098") + bytes(16) + b"\x40" * 7 + accepted


async def test_put_token_that_is_refused() -> None:
    """Exchange put-token-wrong-signature: 401 with Microsoft's condition."""
    hand = await opened()
    hand.pair("$cbs")
    _, (_, payload, size) = hand.ask(put_token(key="wrong"))
    assert size == 208
    assert payload.endswith(b"\xa1\x0ferror-condition\xa3\x19com.microsoft:auth-failed")


async def test_put_token_for_a_hub_that_does_not_exist() -> None:
    """Exchange put-token-unknown-hub: 404, the service's words, and ours after them. Other hubs are not asked for."""
    hand = await opened()
    hand.pair("$cbs")
    _, (_, payload, _) = hand.ask(put_token("sb://memory/invalid"))
    fields = Message.decode(payload).application_properties or {}
    assert (fields["status-code"], fields["error-condition"]) == (404, "amqp:not-found")
    assert re.fullmatch(
        r"The messaging entity 'sb://memory/invalid' could not be found. To know more visit "
        r"https://aka.ms/sbResourceMgrExceptions.  ?TrackingId:[0-9a-f-]{36}_G\d+, SystemTracker:memory:invalid, "
        r"Timestamp:[0-9T:-]{19}. The hubs here are: telemetry.",
        fields["status-description"],
    )


async def test_put_token_of_type_jwt_that_holds_a_signature() -> None:
    """A signature is taken under either type, as uamqp puts it; a wrong one is refused under both."""
    hand = await opened()
    hand.pair("$cbs")
    for number, (key, code) in enumerate(((DEFAULT_KEY, 202), ("wrong", 401))):
        _, (_, payload, _) = hand.ask(put_token(key=key, kind="jwt"), number)
        assert (Message.decode(payload).application_properties or {})["status-code"] == code


async def test_answers_are_settled_where_the_client_asks_for_it() -> None:
    """A client that receives settled, as .NET does, gets its answers settled."""
    hand = await opened()
    hand.pair("$cbs", snd_settle_mode=1)
    _, (transfer, _, _) = hand.ask(put_token())
    assert transfer.settled


async def test_answer_left_unsettled_is_settled_after_a_minute() -> None:
    """Exchange cbs-answer-left-unsettled: 60 s later the service settles it; one that was settled it does not."""
    hand = await opened()
    hand.pair("$cbs")
    hand.ask(put_token())
    hand.ask(put_token(), 1)
    hand.send(Disposition(True, 1, None, True, Accepted()))
    await asyncio.sleep(59.9)
    assert hand.news() == []
    await asyncio.sleep(0.2)
    ((said, _, size),) = hand.news()
    assert said == Disposition(False, 0, None, True, Accepted())
    assert size == 23


async def test_reads_are_answered_as_recorded() -> None:
    """Exchanges read-hub and read-partition-never-used: no description, the keys in their order, both epochs."""
    hand = await opened()
    hand.pair("$management")
    request = management.hub_request(HUB, message_id=uuid.UUID(int=0))
    _, (_, payload, _) = hand.ask(request)
    head = bytes.fromhex("005373c01e0d404040404098") + bytes(16) + b"\x40" * 7
    status = bytes.fromhex("005374c12404a109") + b"operation\xa1\x04READ\xa1\x0bstatus-codeq\x00\x00\x00\xc8"
    assert payload.startswith(head + status + b"\x00\x53\x77")
    ids = bytes.fromhex("e00c02b100000001300000000131")
    assert payload.endswith(b"partition_countT\x02\xa1\x0dpartition_ids" + ids + b"\xa1\x15georeplication_factorT\x01")
    request = management.partition_request(HUB, "0", message_id=uuid.UUID(int=0))
    _, (_, payload, _) = hand.ask(request, 1)
    entries = bytes.fromhex("a109") + b"partition\xa1\x010\xa1\x04type\xa1\x17com.microsoft:partition"
    entries += b"\xa1\x1bbegin_sequence_number_epochT\xff\xa1\x15begin_sequence_numberU\xff"
    entries += b"\xa1\x23last_enqueued_sequence_number_epochT\xff\xa1\x1dlast_enqueued_sequence_numberU\xff"
    entries += (
        b"\xa1\x14last_enqueued_offset\xa1\x02-1\xa1\x16last_enqueued_time_utc\x83\xff\xff\xc7\x7c\xed\xd3\x28\x00"
    )
    assert payload.startswith(head + status)
    assert payload.endswith(entries + b"\xa1\x12is_partition_emptyA")


@pytest.mark.parametrize(
    ("audience", "key", "code"),
    [
        (f"sb://memory/{HUB}", DEFAULT_KEY, 200),
        (f"sb://memory/{HUB}/$management", DEFAULT_KEY, 200),
        ("sb://memory/", DEFAULT_KEY, 200),
        (f"sb://memory/{HUB}", "rotated", 401),
        ("sb://memory/other", DEFAULT_KEY, 401),
    ],
)
async def test_security_token_of_a_read_is_checked(audience: str, key: str, code: int) -> None:
    """A read with a wrong token is refused, though its connection has a right one: so keys are rotated."""
    hand = await opened()
    hand.pair("$management")
    token = sas.generate(audience, DEFAULT_KEY_NAME, key, NEVER)
    _, (_, payload, _) = hand.ask(management.hub_request(HUB, message_id="m", security_token=token))
    assert (Message.decode(payload).application_properties or {})["status-code"] == code


# ------------------------------------------------------------------------------------------------ links of events


async def test_attach_of_senders() -> None:
    """Exchanges attach-sender-hub and attach-sender-partition-sas: what comes back, and who it is."""
    hand = await opened()
    answer, _, _ = only(hand.send(_sender("telemetry")), Attach)
    assert (answer.rcv_settle_mode, answer.max_message_size, answer.offered_capabilities) == (0, 1 << 20, None)
    assert set(answer.properties) == {"com.microsoft:timeout", "com.microsoft:tracking-id"}
    assert answer.properties["com.microsoft:timeout"] == 60
    assert re.fullmatch(r"[0-9A-F]{32}_G\d+", answer.properties["com.microsoft:tracking-id"])
    answer, _, _ = only(hand.send(_sender("telemetry/Partitions/0", "p", 4)), Attach)
    assert answer.properties == {
        "app-id": "RootManageSharedAccessKey",
        "auth-type": "NamespaceSAS",
        "client-id": "me",
        "com.microsoft:timeout": 65_000,
    }
    bare = _sender("telemetry/Partitions/0", "q", 5)
    bare.properties = None
    answer, _, _ = only(hand.send(bare), Attach)
    assert answer.properties is None


def test_sizes_of_the_recorded_attaches() -> None:
    """The types of a sender's properties are those of the recorded sizes (attach-sender-hub, -partition-sas).

    The service leaves out 24 bytes of nulls at the ends of lists, which some clients read by position.
    """
    hub = {TIMEOUT: UInt(60), Symbol("com.microsoft:tracking-id"): "T" * 36}
    partition = {
        "app-id": "RootManageSharedAccessKey",
        "auth-type": "NamespaceSAS",
        "client-id": "EHProducer-00000000-0000-0000-0000-000000000000-partition0",
        TIMEOUT: UInt(65_000),
    }
    assert _size_of_an_attach("", hub) == 332 + 24
    assert _size_of_an_attach("/Partitions/0", partition) == 414 + 24


def _size_of_an_attach(place: str, properties: dict[Any, Any]) -> int:
    """Return the size of the service's attach with the lengths of the recordings."""
    name = "s" * 36
    terminus: dict[str, Any] = {"durable": 0, "expiry_policy": "session-end", "timeout": 0, "dynamic": False}
    source = Source(f"sender-link-{name}", **terminus)
    target = Target(f"amqps://{'h' * 33}/{'e' * 38}{place}", **terminus)
    writer = FrameWriter()
    writer.max_frame_size = 65_536
    writer.send(0, Attach(name, 2, True, 0, 0, source, target, max_message_size=1 << 20, properties=properties))
    return sum(map(len, writer.output))


def _receiver(selector: str | None, name: str = "r", handle: int = 3, **properties: Any) -> Attach:
    found = None if selector is None else {SELECTOR_FILTER: Described(SELECTOR_FILTER, selector)}
    return Attach(
        name, handle, True, 0, 1, Source(READING, filter=found), Target("there"), max_message_size=1 << 20,
        properties={TIMEOUT: 0, **{Symbol(f"com.microsoft:{key}"): value for key, value in properties.items()}},
    )  # fmt: skip


async def test_attach_of_receivers() -> None:
    """Exchanges attach-receiver-epoch and -without-filter: settled, the filter's own descriptor, and who it is."""
    hand = await opened()
    text = "amqp.annotation.x-opt-offset > '-1'"
    answer, _, _ = only(hand.send(_receiver(text, epoch=0)), Attach)
    assert (answer.snd_settle_mode, answer.rcv_settle_mode) == (1, 1)
    assert answer.source.filter == {SELECTOR_FILTER: Described(0x0000_0013_7000_000A, text)}
    assert answer.offered_capabilities is None
    assert answer.properties == {
        "app-id": "RootManageSharedAccessKey",
        "auth-type": "NamespaceSAS",
        "client-auth-id": "RootManageSharedAccessKey",
        "client-auth-type": 4,
        "client-id": "me",
        "client-ip": "",
        "client-network-type": 1,
        "com.microsoft:epoch": 0,
        "com.microsoft:timeout": 65_000,
    }
    bare = _receiver(None, "bare", 4)
    bare.properties = None
    bare.source = Source(READING.replace("/0", "/1"))
    answer, _, _ = only(hand.send(bare), Attach)
    assert answer.properties is None


@pytest.mark.parametrize(("field", "what"), [("x-opt-offset", "offset"), ("x-opt-sequence-number", "sequence number")])
async def test_attach_beyond_the_end(field: str, what: str) -> None:
    """Exchanges attach-receiver-offset-beyond-end and -sequence-beyond-end: refused, with three trackings."""
    hand = await opened()
    refused, (detach, _, _) = hand.send(_receiver(f"amqp.annotation.{field} > '0'"))
    assert refused[0].target is None
    assert detach.error.condition == "com.microsoft:argument-error"
    place = r"SystemTracker:memory:eventhub:telemetry~32766"
    time = r"Timestamp:[0-9T:-]{19}"
    assert re.fullmatch(
        rf"The supplied {what} '0' is invalid. The last {what} in the system is '-1' TrackingId:[0-9a-f-]{{36}}_B\d+, "
        rf"{place}, {time} Reference:[0-9a-f-]{{36}}, TrackingId:[0-9a-f-]{{36}}_B\d+, {place}\|\$default, {time} "
        rf"TrackingId:[0-9a-f-]{{36}}_G\d+, SystemTracker:gateway5, {time}",
        detach.error.description,
    )


async def test_attach_with_the_selector_of_old_clients() -> None:
    """The enqueued time is known by its older name, too (uamqp's live tests)."""
    hand = await opened()
    found = hand.send(_receiver("amqp.annotation.x-opt-enqueuedtimeutc > '0'"))
    assert [type(each) for each, _, _ in found] == [Attach]
    assert found[0][0].source is not None


@pytest.mark.parametrize("partition", ["XYZ", "-1", "1000", "-"])
async def test_attach_to_an_invalid_partition(partition: str) -> None:
    """The service's words come first, which programs look for (JavaScript's live tests), and ours after them."""
    hand = await opened()
    refused, (detach, _, _) = hand.send(_sender(f"telemetry/Partitions/{partition}"))
    assert refused[0].source is None
    assert detach.error.condition == "com.microsoft:argument-out-of-range"
    assert detach.error.description.startswith(
        "The specified partition is invalid for an EventHub partition sender or receiver. It should be between 0 and "
    )


@pytest.mark.parametrize("wait", [None, 5.0])
async def test_stolen_link_is_detached_after_the_new_one_is_attached(wait: float | None) -> None:
    """Exchange stolen: the new reader is attached at once, and the other one detached; after 5 s if that is wanted."""
    service = await serve()
    service.deadlines = Deadlines() if wait is None else Deadlines(stolen=wait)
    hand = Hand(service)
    hand.open()
    hand.send(_receiver(None, "old", 3))
    found = hand.send(_receiver(None, "new", 4, epoch=1))
    if wait:
        assert [type(each) for each, _, _ in found] == [Attach]
        await asyncio.sleep(wait - 0.1)
        assert hand.news() == []
        await asyncio.sleep(0.2)
        found += hand.news()
    (attach, _, _), (detach, _, _) = found
    assert (attach.name, detach.handle) == ("new", 0)
    assert detach.error.condition == "amqp:link:stolen"
    assert re.fullmatch(
        r"New receiver 'nil' with higher epoch of '1' is created hence current receiver 'nil' with epoch '' is getting "
        r"disconnected. If you are recreating the receiver, make sure a higher epoch is used. "
        r"TrackingId:[0-9a-f]{32}_G5_B31, SystemTracker:memory:eventhub:telemetry~16383\|\$default, "
        r"Timestamp:[0-9T:-]{19}",
        detach.error.description,
    )


# ------------------------------------------------------------------------------------------------------- deliveries


async def test_delivery_is_as_recorded() -> None:
    """Exchange delivery-plain: settled, batchable, an empty tag, and the bytes of the service but for its clock."""
    hand = await opened()
    partition = hand.served._served.service.hub(HUB).partition("0")  # type: ignore[attr-defined]
    event = Message(body=Data((b"Event Number 0",))).encode()
    partition.publish(partition.number([event], 0))
    hand.send(_receiver(None))
    transfer, payload, size = only(hand.send(Flow(1, 65_535, 0, 65_535, 3, 0, 300)), Transfer)
    assert transfer == Transfer(0, 0, b"", 0, True, batchable=True)
    annotations = (
        bytes.fromhex("005372c16808a31b") + b"x-opt-sequence-number-epochT\xff\xa3\x15x-opt-sequence-numberU\x00"
    )
    annotations += b"\xa3\x0cx-opt-offset\xa1\x010\xa3\x13x-opt-enqueued-time\x83" + bytes(8)
    assert payload == annotations + event
    assert size == 156 + 2  # the delivery id takes three bytes more than the recorded one, and the handle one less


async def test_delivery_of_a_large_event() -> None:
    """Exchanges delivery-large-first-frame and -last-frame: 65,502 bytes, and nothing repeated in the last one."""
    hand = await opened()
    partition = hand.served._served.service.hub(HUB).partition("0")  # type: ignore[attr-defined]
    partition.publish(partition.number([Message(body=Data((bytes(256_000),))).encode()], 0))
    hand.send(_receiver(None))
    found = hand.send(Flow(1, 65_535, 0, 65_535, 3, 0, 300))
    # The last one was of 59,711: transfers of 9 fields, which Python does not read, and of a handle and id above 0.
    assert [size for _, _, size in found] == [65_502, 65_502, 65_502, 59_711 + 1]
    first, *_, last = [transfer for transfer, _, _ in found]
    assert (first.delivery_tag, first.settled, first.more, first.batchable) == (b"", True, True, True)
    assert last == Transfer(0)


async def test_metrics_are_as_recorded() -> None:
    """Exchange delivery-metrics-of-one-moment: five of them, the epoch first, before the message annotations."""
    hand = await opened()
    partition = hand.served._served.service.hub(HUB).partition("0")  # type: ignore[attr-defined]
    partition.publish(partition.number([Message(body=Data((b"Inclusive",))).encode()] * 2, 0))
    attach = _receiver(None)
    attach.desired_capabilities = [Symbol("com.microsoft:enable-receiver-runtime-metric")]
    hand.send(attach)
    (_, payload, _), _ = hand.send(Flow(1, 65_535, 0, 65_535, 3, 0, 300))
    metrics = b"last_enqueued_sequence_number_epochT\xff\xa3\x1dlast_enqueued_sequence_numberU\x01"
    assert payload.startswith(bytes.fromhex("005371c1af0aa323") + metrics)  # a digit more: offsets count other bytes
    found = Message.decode(payload).delivery_annotations or {}
    assert list(found) == [
        "last_enqueued_sequence_number_epoch",
        "last_enqueued_sequence_number",
        "last_enqueued_offset",
        "last_enqueued_time_utc",
        "runtime_info_retrieval_time_utc",
    ]
    assert isinstance(found["last_enqueued_time_utc"], Timestamp)


# ------------------------------------------------------------------------------------------------ silence and ends


async def test_silent_client_is_asked_and_then_closed() -> None:
    """Exchanges idle-echo-asked and idle-closed: after 180 s a flow, after 240 s every end, with an error."""
    hand = await opened()
    hand.pair("$cbs")
    await asyncio.sleep(179.9)
    assert hand.news() == []
    await asyncio.sleep(0.2)
    ((flow, _, size),) = hand.news()
    assert flow == Flow(0, 5_000, 1, 65_536, echo=True)
    assert size == 35 - 1  # the recorded next-incoming-id is 1
    await asyncio.sleep(59.7)
    assert hand.news() == []
    await asyncio.sleep(0.4)
    found = [each for each, _, _ in hand.news()]
    assert [type(each) for each in found] == [Detach, Detach, End, Close]
    assert [each.handle for each in found[:2]] == [0, 1]
    for each in found:
        assert each.error.condition == "amqp:connection:forced"
        assert re.fullmatch(
            r"The connection was inactive for more than the allowed 240000 milliseconds and is closed by container "
            r"'[0-9a-f]{32}_G\d+'.",
            each.error.description,
        )


async def test_heartbeats_do_not_put_off_the_question() -> None:
    """Exchange idle-heartbeats-of-client: empty frames are no frames here, but the connection stays; others are."""
    hand = await opened()
    hand.pair("$cbs")
    for _ in range(3):
        await asyncio.sleep(59)
        hand.served.data_received(EMPTY_FRAME)
    assert hand.news() == []
    await asyncio.sleep(4)
    assert [type(each) for each, _, _ in hand.news()] == [Flow]
    hand.send(Flow(1, 65_536, 0, 65_536))
    for _ in range(3):
        await asyncio.sleep(59)
        hand.served.data_received(EMPTY_FRAME)
    assert hand.news() == []
    await asyncio.sleep(4)
    assert [type(each) for each, _, _ in hand.news()] == [Flow]


async def test_close_with_an_error_of_the_client() -> None:
    """Exchange close-by-client-with-error: a close without an error, and no end."""
    hand = await opened()
    ((answer, _, size),) = hand.send(Close())
    assert answer == Close()
    assert size == 15


async def test_amqp_header_first_is_anonymous() -> None:
    """A client without SASL, as JavaScript's with a ready signature, opens and has no rights until it puts a token."""
    hand = Hand(await serve())
    hand.served.data_received(AMQP_HEADER)
    assert hand.sink.written == AMQP_HEADER
    hand.send(Open("me", "memory"), Begin(next_outgoing_id=0, incoming_window=9, outgoing_window=9))
    refused, (detach, _, _) = hand.send(_sender("telemetry"))
    assert refused[0].source is None
    assert detach.error.condition == "amqp:unauthorized-access"
    hand.pair("$cbs")
    hand.ask(put_token())
    answer, _, _ = only(hand.send(_sender("telemetry", "again", 9)), Attach)
    assert answer.target is not None
