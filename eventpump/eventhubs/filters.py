"""The start position of a receive link, as a source filter (protocol.md 5.2)."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

from eventpump.amqp.types import Described, Symbol
from eventpump.eventhubs.events import EventPosition
from eventpump.eventhubs.names import (
    ENQUEUED_TIME,
    ENQUEUED_TIME_BEFORE,
    OFFSET,
    SELECTOR_CODE,
    SELECTOR_FILTER,
    SEQUENCE_NUMBER,
)
from eventpump.texts import excerpt

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)

# .NET writes the value without quotes, the others with.
_SELECTOR = re.compile(r"\s*amqp\.annotation\.([\w-]+)\s*(>=?)\s*(?:'([^']+)'|([^\s'<>=]+))\s*")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_LONGS = range(-(2**63), 2**63)


def selector(position: EventPosition) -> str:
    """Write a position as the text of a selector.

    From a sequence number on is after the one before: the service refuses a number that no event has yet, though that
    of the next event is a place to wait at (protocol.md 5.2).
    """
    if position.sequence_number is not None and position.inclusive:
        before = int(position.sequence_number) - 1
        position = EventPosition.earliest() if before < 0 else EventPosition.at_sequence_number(before)
    if position.offset is not None:
        field, value = OFFSET, position.offset
    elif position.sequence_number is not None:
        field, value = SEQUENCE_NUMBER, str(int(position.sequence_number))
    else:
        assert position.enqueued_time is not None
        since = position.enqueued_time - _EPOCH
        # Events carry whole milliseconds: after a moment is after its millisecond's start, from it is from the next.
        field, value = ENQUEUED_TIME, str(-(-since // _MILLISECOND) if position.inclusive else since // _MILLISECOND)
    return f"amqp.annotation.{field} {'>=' if position.inclusive else '>'} '{value}'"


def source_filter(position: EventPosition) -> dict[Symbol, Described]:
    """Make the filter map of a receive link's source."""
    return {SELECTOR_FILTER: Described(SELECTOR_FILTER, selector(position))}


def answered_filter(filters: Mapping[Any, Any] | None) -> dict[Any, Any] | None:
    """Return a source's filter map as the service answers it: with its own descriptor (protocol.md 5.1)."""
    if filters is None or SELECTOR_FILTER not in filters:
        return None if filters is None else dict(filters)
    value = filters[SELECTOR_FILTER]
    text = value.value if isinstance(value, Described) else value
    return {**filters, SELECTOR_FILTER: Described(SELECTOR_CODE, text)}


def parse_source_filter(filters: Mapping[Any, Any] | None) -> EventPosition | None:
    """Return the position in a source's filter map.

    The filter is identified by its key in the map and not by its descriptor, of which three are in use.

    Raises:
        ValueError: The selector does not name a position; the text says why.
    """
    value = None if filters is None else filters.get(SELECTOR_FILTER)
    if isinstance(value, Described):
        value = value.value
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError("the selector filter must be text")
    return parse_selector(value)


def parse_selector(text: str) -> EventPosition:
    """Read a selector. Raises `ValueError` if it is none of a position; the error says why."""
    found = _SELECTOR.fullmatch(text)
    if found is None:
        raise ValueError(f"the selector '{excerpt(text)}' is not of the form amqp.annotation.<field> > '<value>'")
    field, operator, quoted, bare = found.groups()
    value: str = quoted or bare
    field = ENQUEUED_TIME if field == ENQUEUED_TIME_BEFORE else field
    inclusive = operator == ">="
    if field == OFFSET:
        return EventPosition.at_offset(value, inclusive=inclusive)
    if field not in {SEQUENCE_NUMBER, ENQUEUED_TIME}:
        raise ValueError(
            f"the selector's field '{excerpt(field)}' must be one of {OFFSET}, {SEQUENCE_NUMBER}, {ENQUEUED_TIME}"
        )
    if not _INTEGER.fullmatch(value) or int(value) not in _LONGS:
        raise ValueError(f"the selector's value '{excerpt(value)}' for {field} must be a 64-bit integer")
    if field == SEQUENCE_NUMBER:
        return EventPosition.at_sequence_number(int(value), inclusive=inclusive)
    try:
        moment = _EPOCH + int(value) * _MILLISECOND
    except OverflowError:
        raise ValueError(
            f"the selector's value '{excerpt(value)}' for {field} must be a time before the year 10000"
        ) from None
    return EventPosition.at_enqueued_time(moment, inclusive=inclusive)
