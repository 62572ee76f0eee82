"""Spark's rows: the walk over many messages against the general decoder."""

from __future__ import annotations

from random import Random
from typing import Any

from eventpump.errors import EventError
from eventpump.spark.source.rows import COLUMNS, RowEncoder
from tests.fuzz import captures
from tests.fuzz.entry import Entry, attempt, require, same
from tests.fuzz.mutations import mutate
from tests.support.spark_rows import expected_row, row_encoder, rows_of


class RowsEntry(Entry):
    """`spark/source/columnar.py` and `spark/source/rows.py`, several messages at once."""

    name, gate, long = "rows", 250, 20_000
    overhead = 1024 * 1024

    def __init__(self) -> None:
        groups = (list(COLUMNS), *([name] for name in COLUMNS))
        self._encoders = [row_encoder(group) for group in groups]
        self._corpus = captures.stored()
        self._rows = {raw: expected_row(raw) for raw in self._corpus}
        for encoder in self._encoders:
            rows_of(encoder, self._corpus)  # what is loaded once is no string's memory

    def make(self, rng: Random) -> tuple[bytes, ...]:
        """Make events: sound ones around one that is changed."""
        around = rng.choices(self._corpus, k=2)
        changed = mutate(rng, rng.choice(self._corpus), captures.messages())
        return around[0], changed, around[1]

    def run(self, string: tuple[bytes, ...], rng: Random) -> None:
        """The general decoder's rows, in one column and in all; or an error, where that has one too."""
        expected = attempt("RowEncoder.encode", expected_row, string[1])
        for encoder in (self._encoders[0], rng.choice(self._encoders[1:])):
            self._check(encoder, string, expected)

    def _check(self, encoder: RowEncoder, string: tuple[bytes, ...], expected: Any) -> None:
        found = attempt("RowEncoder.encode", rows_of, encoder, string)
        if isinstance(found, Exception):
            require(holds=isinstance(expected, EventError), what="an event is refused that the general decoder reads")
            return
        columns = encoder.schema.names
        for row, raw in ((0, string[0]), (2, string[2])):
            whole = self._rows.get(raw) or expected_row(raw)
            same(found[row], {name: whole[name] for name in columns}, "a sound event's row beside a changed one")
        if isinstance(expected, dict):
            same(found[1], {name: expected[name] for name in columns}, "the row of the walk and of the general decoder")
