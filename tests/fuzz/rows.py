"""Spark's rows: the walk over many messages against the general decoder."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, Final

from eventpump.errors import EventError
from eventpump.eventhubs.events import ReceivedEvent
from eventpump.eventhubs.names import ENQUEUED_TIME, OFFSET, PARTITION_KEY, SEQUENCE_NUMBER
from eventpump.spark.source.rows import COLUMNS, PackedEvents, RowEncoder, body_of, text_of, type_of
from eventpump.spark.source.schema import COLUMN_TYPES
from tests.fuzz import captures
from tests.fuzz.entry import Entry, attempt, require, same
from tests.fuzz.mutations import mutate

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OWN: Final = frozenset({SEQUENCE_NUMBER, OFFSET, ENQUEUED_TIME})
_PUBLISHER: Final = "x-opt-publisher"


def _texts(values: dict[Any, Any]) -> dict[str, str | None]:
    return {"null" if name is None else str(text_of(name)): text_of(value) for name, value in values.items()}


def _types(values: dict[Any, Any]) -> dict[str, str]:
    found = {"null" if name is None else str(text_of(name)): type_of(value) for name, value in values.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def _expected(raw: bytes) -> dict[str, Any]:
    """Make a row by the general decoder alone.

    Raises:
        EventError: There is none.
    """
    event = ReceivedEvent(raw)
    annotations = event.raw_message.message_annotations or {}
    system = {name: value for name, value in event.system_properties.items() if name not in _OWN}
    return {
        "body": body_of(event),
        "partition": "7",
        "hub": "telemetry",
        "offset": event.offset,
        "sequenceNumber": event.sequence_number,
        "enqueuedTime": (event.enqueued_time - _EPOCH) // timedelta(microseconds=1),
        "publisher": text_of(annotations.get(_PUBLISHER)),
        "partitionKey": text_of(annotations.get(PARTITION_KEY)),
        "properties": _texts(event.properties),
        "systemProperties": _texts(system),
        "propertyTypes": _types(event.properties),
        "systemPropertyTypes": _types(system),
    }


class RowsEntry(Entry):
    """`spark/source/columnar.py` and `spark/source/rows.py`, several messages at once."""

    name, gate, long = "rows", 250, 20_000
    overhead = 1024 * 1024

    def __init__(self) -> None:
        # In the compiled build, those with types are made by other code than those without.
        groups = (list(COLUMNS), list(COLUMN_TYPES), *([name] for name in COLUMNS))
        self._encoders = [RowEncoder("7", group, hub="telemetry") for group in groups]
        self._corpus = captures.stored()
        self._rows = {raw: _expected(raw) for raw in self._corpus}
        for encoder in self._encoders:
            self._read(encoder, list(self._corpus))  # what is loaded once is no string's memory

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make events: sound ones around one that is changed."""
        around = rng.choices(self._corpus, k=2)
        changed = mutate(rng, rng.choice(self._corpus), captures.messages())
        return around[0], changed, around[1]

    def run(self, string: tuple[bytes, ...], rng: Random) -> None:
        """The general decoder's rows, in one column and in all; or an error, where that has one too."""
        expected = attempt("RowEncoder.encode", _expected, string[1])
        for encoder in (*self._encoders[:2], rng.choice(self._encoders[2:])):
            self._check(encoder, string, expected)

    def _check(self, encoder: RowEncoder, string: tuple[bytes, ...], expected: Any) -> None:
        found = attempt("RowEncoder.encode", self._read, encoder, list(string))
        if isinstance(found, Exception):
            require(holds=isinstance(expected, EventError), what="an event is refused that the general decoder reads")
            return
        columns = encoder.schema.names
        for row, raw in ((0, string[0]), (2, string[2])):
            whole = self._rows.get(raw) or _expected(raw)
            same(found[row], {name: whole[name] for name in columns}, "a sound event's row beside a changed one")
        if isinstance(expected, dict):
            same(found[1], {name: expected[name] for name in columns}, "the row of the walk and of the general decoder")

    @staticmethod
    def _read(encoder: RowEncoder, messages: list[bytes]) -> list[dict[str, Any]]:
        batch = encoder.encode(PackedEvents.pack(messages))
        batch.validate(full=True)
        columns: dict[str, Any] = {}
        for name in batch.schema.names:
            column = batch.column(name)
            values = (column.cast("int64") if name == "enqueuedTime" else column).to_pylist()
            if name in ("properties", "systemProperties", "propertyTypes", "systemPropertyTypes"):
                require(
                    holds=all(len(dict(entries)) == len(entries) for entries in values), what="a map has a key twice"
                )
                values = [dict(entries) for entries in values]
            columns[name] = values
        return [{name: columns[name][row] for name in columns} for row in range(len(messages))]
