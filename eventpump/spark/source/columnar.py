"""Columnar decoding: finds the positions of values in many messages at once, with numpy (AMQP 1.0, 1.2).

The messages are concatenated in one buffer. The results are positions in it, so that Arrow can copy values in bulk and
no object is created per event. A message in a form that is not supported here is *odd*: the general decoder reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from eventpump.amqp.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
)

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

PADDING: Final = 264
"""Zero bytes after the last message, so that reading ahead never leaves the buffer: a short name and its header."""

_MAX_ROUNDS = 32
"""The most entries of a map that are read; a message with more is odd."""
_MAX_NAMES = 256
"""The most distinct entry names in one buffer; a message with a further one is odd."""

_STR8, _STR32, _SYM8, _SYM32 = 0xA1, 0xB1, 0xA3, 0xB3

_WIDTH: Final = np.zeros(256, np.int64)
"""The size of a value with a fixed width, by constructor (1.6)."""
_SIZE_BYTES: Final = np.full(256, -1, np.int64)
"""The width of a value's size field: 0, 1 or 4; -1 for unsupported constructors."""
for _code in (0x40, 0x41, 0x42, 0x43, 0x44, 0x45):
    _SIZE_BYTES[_code] = 0
for _codes, _width in (
    ((0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56), 1),
    ((0x60, 0x61), 2),
    ((0x70, 0x71, 0x72, 0x73, 0x74), 4),
    ((0x80, 0x81, 0x82, 0x83, 0x84), 8),
    ((0x94, 0x98), 16),
):
    for _code in _codes:
        _SIZE_BYTES[_code], _WIDTH[_code] = 0, _width
for _code in (0xA0, 0xA1, 0xA3, 0xC0, 0xC1, 0xE0):
    _SIZE_BYTES[_code] = 1
for _code in (0xB0, 0xB1, 0xB3, 0xD0, 0xD1, 0xF0):
    _SIZE_BYTES[_code] = 4

_SECTION_FORM: Final = np.full(256, 0, np.uint8)
"""The constructor a section's value has in its short form, by descriptor (3.2); 0 for any."""
for _code, _form in (
    (HEADER, 0xC0),
    (DELIVERY_ANNOTATIONS, 0xC1),
    (MESSAGE_ANNOTATIONS, 0xC1),
    (PROPERTIES, 0xC0),
    (APPLICATION_PROPERTIES, 0xC1),
    (DATA, 0xA0),
    (FOOTER, 0xC1),
):
    _SECTION_FORM[_code] = _form

TEXT_KINDS: Final = np.zeros(256, np.bool_)
"""Constructors of text, which is copied unchanged."""
TEXT_KINDS[[_STR8, _STR32, _SYM8, _SYM32]] = True


@dataclass(slots=True, eq=False)
class Values:
    """One value per message.

    Args:
        kind: The constructor; 0 if the message has no such value.
        at: The position of the constructor.
    """

    kind: Bytes
    at: Ints
    begin: Ints
    end: Ints


@dataclass(slots=True, eq=False)
class Entries:
    """The entries of one map per message: the first of each, the second of each, and so on.

    Args:
        names: For every round and message, the index of the entry's name; -1 if there is no entry.
    """

    names: list[Ints]
    values: list[Values]


class Walk:
    """A walk over concatenated messages.

    Args:
        data: The messages, and `PADDING` zero bytes.

    Attributes:
        odd: The messages that the general decoder must read.
        names: The names of entries found so far, in UTF-8.
    """

    def __init__(self, data: bytes, lengths: Ints) -> None:
        self._data = data
        self._bytes = np.frombuffer(data, np.uint8)
        self._eights = self._windows(8)
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths
        self.count = len(lengths)
        self.odd = np.zeros(self.count, np.bool_)
        self.names: list[bytes] = []
        self._sections: dict[int, Values] = {}
        self._walk_sections()

    def _windows(self, width: int) -> npt.NDArray[np.void]:
        """Return a view in which item `i` is the bytes from `i` on."""
        return np.ndarray((len(self._data) - width + 1,), f"V{width}", self._data, 0, (1,))

    def _heads(self, at: Ints) -> Bytes:
        """Return the eight bytes from each position on, one row each."""
        return self._eights[at].view(np.uint8).reshape(-1, 8)

    # ------------------------------------------------------------------------------------------------- sections

    def section(self, code: int) -> Values | None:
        """Return the sections with a descriptor's code; None if no message has one."""
        return self._sections.get(code)

    def _walk_sections(self) -> None:
        rows = np.arange(self.count)
        at, last = self.starts, np.full(self.count, HEADER - 1, np.uint8)
        while len(rows):
            head = self._heads(at)
            code, kind = head[:, 2], head[:, 3]
            begin, end = self._extent(at + 3, head[:, 3:])
            form = _SECTION_FORM[code]
            sound = (
                (head[:, 0] == 0) & (head[:, 1] == 0x53) & (code > last) & (code <= FOOTER) & (end <= self.ends[rows])
            )
            sound &= (form == 0) | (kind == form) | (kind == form | 0x10) | ((form == 0xC0) & (kind == 0x45))
            sound &= begin >= 0
            if not sound.all():
                self.odd[rows[~sound]] = True
                rows, at, code, kind, begin, end = (each[sound] for each in (rows, at, code, kind, begin, end))
                if not len(rows):
                    return
            for each in (code[0],) if (code == code[0]).all() else np.unique(code):
                here = code == each
                found = self._sections.setdefault(int(each), self.no_values())
                found.kind[rows[here]] = kind[here]
                found.at[rows[here]] = at[here] + 3
                found.begin[rows[here]] = begin[here]
                found.end[rows[here]] = end[here]
            more = end < self.ends[rows]
            last = code
            at = end
            if not more.all():
                rows, at, last = rows[more], at[more], last[more]

    def no_values(self) -> Values:
        return Values(np.zeros(self.count, np.uint8), *(np.zeros(self.count, np.int64) for _ in range(3)))

    def _extent(self, at: Ints, head: Bytes) -> tuple[Ints, Ints]:
        """Return where the contents of the values at some positions begin and end; -1 for an unknown begin.

        Args:
            head: At least the first five bytes of each value.
        """
        kind = head[:, 0]
        width = _SIZE_BYTES[kind]
        begin = at + 1 + width
        end = begin + _WIDTH[kind]
        short = width == 1
        if short.all():
            return begin, begin + head[:, 1]
        end[short] += head[short, 1]
        wide = width == 4
        if wide.any():
            end[wide] += head[wide, 1:5].copy().view(">u4")[:, 0]
        begin[width < 0] = -1
        return begin, end

    # ------------------------------------------------------------------------------------------------- contents

    def _frames(self, sections: Values, unit: int) -> tuple[Bools, Ints, Ints]:
        """Read how many items lists and maps have. Messages whose list or map cannot hold its items are odd."""
        wide = sections.kind >= 0xD0
        head = self._heads(sections.begin)
        count = head[:, 0].astype(np.int64)
        if wide.any():
            count[wide] = head[wide, :4].copy().view(">u4")[:, 0]
        present = (sections.kind > 0x45) & ~self.odd
        first = sections.begin + np.where(wide, 4, 1)
        unsound = present & ((count % unit != 0) | (count > sections.end - first) | (count > unit * _MAX_ROUNDS))
        self.odd |= unsound
        return present & ~unsound, count // unit, first

    def map_entries(self, sections: Values) -> Entries:
        """Return the entries of maps whose keys are text."""
        found = Entries([], [])
        present, counts, first = self._frames(sections, 2)
        rows = np.flatnonzero(present)
        at, limits, counts = first[rows], sections.end[rows], counts[rows]
        number = 0
        while len(rows):
            more = counts > number
            if not more.all():
                # A map that is larger than its items is odd.
                over = ~more & (at != limits)
                self.odd[rows[over]] = True
                rows, at, limits, counts = (each[more] for each in (rows, at, limits, counts))
                if not len(rows):
                    break
            key = self._value(at, limits, rows)
            names = self._name(key)
            value = self._value(np.minimum(key.end, limits), limits, rows)
            sound = (names >= 0) & ~self.odd[rows]
            self.odd[rows[~sound]] = True
            found.names.append(self._spread(rows, names, -1))
            found.values.append(
                Values(*(self._spread(rows, each, 0) for each in (value.kind, value.at, value.begin, value.end)))
            )
            at = np.minimum(value.end, limits)
            if not sound.all():
                rows, at, limits, counts = (each[sound] for each in (rows, at, limits, counts))
            number += 1
        self.refuse_repeated(found)
        return found

    def list_entries(self, sections: Values, names: tuple[bytes, ...]) -> Entries:
        """Return the items of lists whose items are named by position; nulls are not entries."""
        found = Entries([], [])
        present, counts, first = self._frames(sections, 1)
        self.odd |= present & (counts > len(names))
        rows = np.flatnonzero(present & ~self.odd)
        at, limits, counts = first[rows], sections.end[rows], counts[rows]
        for number, name in enumerate((*names, b"")):
            more = counts > number
            if not more.all():
                over = ~more & (at != limits)
                self.odd[rows[over]] = True
                rows, at, limits, counts = (each[more] for each in (rows, at, limits, counts))
            if not len(rows):
                break
            value = self._value(at, limits, rows)
            named = np.where(value.kind == 0x40, -1, self._index(name))
            found.names.append(self._spread(rows, named, -1))
            found.values.append(
                Values(*(self._spread(rows, each, 0) for each in (value.kind, value.at, value.begin, value.end)))
            )
            at = np.minimum(value.end, limits)
        return found

    def _spread(self, rows: Ints, values: npt.NDArray[Any], missing: int) -> npt.NDArray[Any]:
        """Return one item per message, taken from the values for the given rows."""
        if len(rows) == self.count:
            return values
        spread = np.full(self.count, missing, values.dtype)
        spread[rows] = values
        return spread

    def _value(self, at: Ints, limits: Ints, rows: Ints) -> Values:
        """Find the extents of values. Rows with an unsupported value are odd, and their kind is 0."""
        head = self._heads(at)
        begin, end = self._extent(at, head)
        kind = head[:, 0]
        unsound = (begin < 0) | (end > limits) | (at >= limits)
        if unsound.any():
            self.odd[rows[unsound]] = True
            kind = np.where(unsound, 0, kind).astype(np.uint8)
            begin, end = np.where(unsound, at, begin), np.where(unsound, at, end)
        return Values(kind, at, begin, end)

    def _name(self, key: Values) -> Ints:
        """Return the index of each name; -1 if it is not a name."""
        indices = np.full(len(key.kind), -1, np.int64)
        lengths = key.end - key.begin
        left = ((key.kind == _STR8) | (key.kind == _SYM8)) & (lengths > 0)
        while left.any():
            one = int(np.argmax(left))
            length = int(lengths[one])
            name = self._data[int(key.begin[one]) : int(key.end[one])]
            alike = left & (lengths == length)
            if alike.all():
                alike = self._windows(length)[key.begin] == np.frombuffer(name, f"V{length}")[0]
            else:
                same = self._windows(length)[key.begin[alike]] == np.frombuffer(name, f"V{length}")[0]
                alike[alike] = same
            indices[alike] = self._index(name)
            left &= ~alike
            if len(self.names) > _MAX_NAMES:
                break
        return indices

    def _index(self, name: bytes) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def refuse_repeated(self, entries: Entries) -> None:
        """Mark messages as odd that have a name twice: a dictionary would keep only one of the entries."""
        seen: list[tuple[Ints, set[int]]] = []
        for names in entries.names:
            distinct = {int(names[0])} if (names == names[0]).all() else set(np.unique(names).tolist())
            distinct.discard(-1)
            for others, theirs in seen:
                if theirs & distinct:
                    self.odd |= (names == others) & (names >= 0)
            seen.append((names, distinct))

    def entry(self, entries: Entries, name: bytes) -> Values:
        """Return the values under one name."""
        found = self.no_values()
        if name not in self.names:
            return found
        index = self.names.index(name)
        for names, values in zip(entries.names, entries.values, strict=True):
            here = names == index
            if here.all():
                return values
            for each, theirs in (
                (found.kind, values.kind),
                (found.at, values.at),
                (found.begin, values.begin),
                (found.end, values.end),
            ):
                each[here] = theirs[here]
        return found

    def longs(self, begin: Ints) -> Ints:
        """Read signed integers of eight bytes."""
        return self._eights[begin].view(">i8").astype(np.int64)

    def small_longs(self, begin: Ints) -> Ints:
        """Read signed integers of one byte."""
        return self._bytes[begin].view(np.int8).astype(np.int64)
