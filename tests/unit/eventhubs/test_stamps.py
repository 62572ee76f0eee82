"""Stamps: room for them changes nothing else of an event, and numbering fills them in."""

from __future__ import annotations

import pytest

from eventpump.amqp.message import Message
from eventpump.eventhubs.envelope import decode_batch
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.names import PRODUCER_SEQUENCE_NUMBER
from eventpump.eventhubs.numbering import MAX_OWNER_LEVEL, MAX_PRODUCER_ID, NUMBERS
from eventpump.eventhubs.sealing import SealedBatch, pieces, pieces_of
from eventpump.eventhubs.stamps import STAMP, Stamp, read_stamp, spell_stamp, with_room

EVENTS = [
    EventData(b"bytes and no more"),
    EventData("text", properties={"unit": "C", "n": 7}, message_id=STAMP),
    EventData(value={"a": [1, 2]}, properties={STAMP: "of another publisher", "x": 1}),
    EventData(b"x" * 1000, properties={f"key {number}": number for number in range(60)}),
    EventData(b"", message_id="eventpump:stamp" + "0" * 16 + ":0000:00000000"),
]


@pytest.mark.parametrize("event", EVENTS, ids=["bytes", "properties", "stamped before", "many", "looks like one"])
@pytest.mark.parametrize("key", [None, "sensor-7"])
def test_stamp_adds_one_property_of_known_size(event: EventData, key: str | None) -> None:
    """Everything else stays, its size is known before its number is, and every numbering fills the stamp in."""
    encoded = event.encode(key)
    before = Message.decode(encoded)
    found = (
        pieces_of(event, idempotent=True, stamped=True) if key is None else pieces(with_room(encoded), idempotent=True)
    )
    batch = SealedBatch([*found, *found], idempotent=True, stamped=True)
    for producer_id, level, first in ((5, 2, 41), (MAX_PRODUCER_ID, MAX_OWNER_LEVEL, NUMBERS - 1), (0, 0, 0)):
        message = batch.numbered(producer_id, level, first)
        assert len(message) == batch.size == 2 * sum(map(len, found))
        for index, raw in enumerate(decode_batch(message)):
            after = Message.decode(raw)
            number = (first + index) % NUMBERS
            properties = dict(after.application_properties or {})
            assert read_stamp(properties.pop(STAMP)) == (producer_id, level, number)
            assert properties == {
                name: each for name, each in (before.application_properties or {}).items() if name != STAMP
            }
            assert (after.body, after.properties) == (before.body, before.properties)
            annotations = after.message_annotations or {}
            assert annotations[PRODUCER_SEQUENCE_NUMBER] == number
            assert (before.message_annotations or {}).items() <= annotations.items()


@pytest.mark.parametrize(
    "value", [None, 7, "", "1:2:3", "g" * 16 + ":0000:00000000", "0" * 16 + ":0000", "é" * 16 + ":0000:00000000"]
)
def test_stamp_of_another_form_is_not_read(value: object) -> None:
    """Properties of that name may come from any program."""
    assert read_stamp(value) is None


def test_stamp_has_one_width() -> None:
    """Whatever the numbers."""
    for stamp in (Stamp(0, 0, 0), Stamp(MAX_PRODUCER_ID, MAX_OWNER_LEVEL, NUMBERS - 1)):
        assert len(spell_stamp(*stamp)) == 30
        assert read_stamp(spell_stamp(*stamp)) == stamp
