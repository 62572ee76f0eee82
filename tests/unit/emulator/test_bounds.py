"""What the emulator takes of a message's annotations, and that its bounds leave room for what clients do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eventpump.amqp.codec import AmqpDecodeError, encode
from eventpump.amqp.message import AmqpValue, Data, Message, Properties
from eventpump.amqp.types import Int, Short, Symbol
from eventpump.emulator import bounds
from eventpump.emulator.ledger import Run, run_of
from eventpump.emulator.stamping import stamp
from eventpump.eventhubs.envelope import decode_batch, encode_batch, partition_key_of
from eventpump.eventhubs.names import PARTITION_KEY, PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER

MIB = 1024 * 1024


def event(annotations: dict[Any, Any] | None = None) -> bytes:
    return Message(body=Data((b"x",)), message_annotations=annotations).encode()


def many(count: int, **more: Any) -> dict[Any, Any]:
    """Give so many annotations of the smallest size."""
    return {Symbol(f"{number:x}"): None for number in range(count)} | more


def annotated(*parts: bytes) -> bytes:
    """Write an event whose annotations are said to be one entry."""
    entry = b"".join(parts)
    return b"\x00\x53\x72\xd1" + (len(entry) + 4).to_bytes(4, "big") + b"\0\0\0\2" + entry + event()


def numbered(number: int, more: dict[Any, Any]) -> bytes:
    return event({PRODUCER_ID: 7, PRODUCER_EPOCH: Short(1), PRODUCER_SEQUENCE_NUMBER: Int(number), **more})


ENTRIES = bounds.ANNOTATION_ITEMS // 2
LISTS: dict[Any, Any] = {Symbol("x"): [[]] * (MIB - 100)}


def route(payload: bytes) -> Any:
    return partition_key_of(payload, bounds.ANNOTATION_ITEMS)


@pytest.mark.parametrize(
    "take",
    [
        lambda: route(event(LISTS)),
        lambda: route(event(many(ENTRIES))),
        lambda: stamp([event(many(ENTRIES + 1))], 0, 0, 0, None),
        lambda: stamp([event(many(ENTRIES // 8, y=each)) for each in range(9)], 0, 0, 0, None),
        lambda: stamp([b"\x00\x53\x70\x45" * 1000 + event()], 0, 0, 0, None),
        lambda: run_of([numbered(0, LISTS)]),
        lambda: run_of([numbered(each, many(ENTRIES // 8, y=str(each))) for each in range(9)]),
    ],
    ids=["lists", "entries", "stored", "stored in a batch", "sections", "idempotent", "an idempotent batch"],
)
def test_message_with_too_many_annotations_is_refused(take: Callable[[], object]) -> None:
    """A message whose annotations would take long to read is refused, in one event or over all of a batch."""
    with pytest.raises(AmqpDecodeError):
        take()


def test_message_with_large_annotations_in_use_is_taken() -> None:
    """A MiB of events, each with a key and two annotations of its own, is taken on every way."""
    texts = [{PARTITION_KEY: f"device-{each:05}", "x-opt-a": each, "x-opt-b": "text"} for each in range(MIB // 130)]
    plain = [event(each) for each in texts]
    assert sum(map(len, plain)) > MIB * 0.6
    assert route(encode_batch(plain, "key")) == "key"
    assert len(stamp(plain, 0, 0, 0, None).payloads) == len(plain)
    idempotent = [numbered(number, each) for number, each in enumerate(texts[: MIB // 200])]
    assert isinstance(run_of(idempotent), tuple)
    run, _ = run_of(idempotent)  # type: ignore[misc]  # no refusal
    assert run == Run(7, 1, 0, len(idempotent))


def test_envelope_sections_not_read_are_not_decoded() -> None:
    """The unused sections of an envelope are skipped, not decoded."""
    envelope = Message(
        properties=Properties(subject="s"), application_properties={"x": [[]] * MIB}, body=Data((event(),))
    ).encode()
    assert decode_batch(envelope) == [event()]


def test_values_inside_annotations_are_counted() -> None:
    """Annotations are stored where readers can decode them, and refused where they hold more values than are taken."""
    for refused in (LISTS, LISTS | {Symbol("y"): Symbol("z")}):
        with pytest.raises(AmqpDecodeError, match="more values"):
            stamp([event(refused)], 0, 0, 0, None)
    stored = Message.decode(stamp([event({Symbol("x"): [[]] * 1000})], 0, 0, 0, None).payloads[0]).message_annotations
    assert stored is not None
    assert stored["x"] == [[]] * 1000


@pytest.mark.parametrize("parts", [(b"\x45", b"\x40"), (encode([1]), b"\x40"), (encode("x"),), ()])
def test_annotations_of_no_valid_form_are_refused(parts: tuple[bytes, ...]) -> None:
    """A list as a key, which no reader takes, or entries that are counted and not there, are refused."""
    with pytest.raises(AmqpDecodeError):
        stamp([annotated(*parts)], 0, 0, 0, None)


@pytest.mark.parametrize("body", [Data((b"a", b"bc")), AmqpValue(5)])
def test_envelope_in_long_forms_is_read(body: Any) -> None:
    """Sections with a descriptor in a longer form are read as before: data is data, another body is refused."""
    raw = Message(body=body).encode().replace(b"\x00\x53\x75", b"\x00\x80" + bytes(7) + b"\x75")
    if isinstance(body, Data):
        assert decode_batch(raw) == [b"a", b"bc"]
    else:
        with pytest.raises(AmqpDecodeError):
            decode_batch(raw)


def test_unfinished_messages_have_room_for_every_partition() -> None:
    """A client with a token may have an event of 1 MiB on its way to each of 256 partitions; one without, a request."""
    assert bounds.with_token(MIB).unfinished >= 256 * MIB  # type: ignore[operator]  # it is set
    assert bounds.with_token(20 * MIB).unfinished >= 64 * 20 * MIB  # type: ignore[operator]
    assert bounds.without_token().unfinished >= bounds.REQUEST_WITHOUT_TOKEN  # type: ignore[operator]
    for limits in (bounds.without_token(), bounds.with_token(1024)):
        assert limits.unfinished is not None
        assert limits.kept <= 64 * MIB
    assert bounds.without_token().kept + bounds.without_token().unfinished < 5 * MIB  # type: ignore[operator]
    assert bounds.WEBSOCKET_MESSAGE < 2 * MIB
