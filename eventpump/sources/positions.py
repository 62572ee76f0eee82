"""Where reading begins in a source whose offsets are the sequence numbers, as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime

from eventpump.errors import RequestRefusedError
from eventpump.eventhubs.events import LATEST_OFFSET, START_OFFSET, EventPosition

_NUMBER = re.compile(r"[0-9]{1,19}")


def offset_of(number: int) -> str:
    """Return the offset of the event with a sequence number."""
    return str(number)


def first_to_read(
    position: EventPosition, begin: int, end: int, *, first_after: Callable[[datetime, bool], int]
) -> int:
    """Return the sequence number with which reading from a position begins; never below `begin`.

    Args:
        begin: The sequence number of the oldest event there is.
        end: The sequence number after that of the newest event there is.
        first_after: Returns the number of the first event that was enqueued after a time, or at it if the second
            argument is True.

    Raises:
        RequestRefusedError: The position is an offset that is not one of this source, or is beyond the end.
    """
    if position.sequence_number is not None:
        return max(begin, position.sequence_number + (not position.inclusive))
    if position.enqueued_time is not None:
        return max(begin, first_after(position.enqueued_time, position.inclusive))
    offset = position.offset
    assert offset is not None
    if offset == START_OFFSET:
        return begin
    if offset == LATEST_OFFSET:
        return max(begin, end - position.inclusive)
    if _NUMBER.fullmatch(offset) is None:
        problem = f"the offset {offset[:40]!r} is none of this source, whose offsets are numbers"
        raise RequestRefusedError(problem)
    if int(offset) >= end:
        raise RequestRefusedError(f"the offset {offset} is beyond the end: the last event is number {end - 1}")
    return max(begin, int(offset) + (not position.inclusive))
