"""A link to a source whose events are available at once: delivers by credit, and not in one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from eventpump.errors import EventPumpError, RequestRefusedError
from eventpump.interfaces import ReceiveSink

RUN = 256
"""The most events that are passed to a sink at once."""


class NumberedLink:
    """A `SourceLink` of an open partition whose events are read by sequence number.

    Args:
        read: Returns the next events, given a number and how many are wanted, and the number to continue with; no
            events if there are none yet. It may raise the error with which the link ends.
        on_closed: Called once, when the link has ended.
    """

    def __init__(
        self,
        first: int,
        read: Callable[[int, int], tuple[list[bytes], int]],
        sink: ReceiveSink,
        on_closed: Callable[[NumberedLink], None],
    ) -> None:
        self.next = first
        """The sequence number to continue with."""
        self._read = read
        self._sink = sink
        self._on_closed = on_closed
        self._credit = 0
        self._is_open = True
        self._turn: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def credit(self) -> int:
        """How many events may still be delivered."""
        return self._credit

    def set_credit(self, credit: int) -> None:
        self._credit = credit
        self.serve()

    def serve(self) -> None:
        """Look for events, in the next turn of the event loop. Called when there may be some."""
        if self._turn is None and self._credit > 0 and self._is_open:
            self._turn = self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._turn = None
        if not self._is_open or self._credit <= 0:
            return
        try:
            events, following = self._read(self.next, min(self._credit, RUN))
        except EventPumpError as error:
            self.end(error)
            return
        except Exception as error:
            failure = RequestRefusedError(f"the source failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.end(failure)
            return
        self.next = following
        if events:
            self._credit -= len(events)
            self._sink.messages(events)
            self.serve()

    def end(self, error: EventPumpError) -> None:
        """End it with an error. Does nothing if it has ended."""
        if self._close():
            self._sink.detached(error)

    async def aclose(self) -> None:
        self._close()

    def _close(self) -> bool:
        if not self._is_open:
            return False
        self._is_open = False
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._on_closed(self)
        return True
