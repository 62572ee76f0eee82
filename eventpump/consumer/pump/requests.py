"""The requests to a running pump: to seek, to replay a range, to pause, and to report that it has drained."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from eventpump.aio.tasks import resolve
from eventpump.eventhubs.events import Checkpoint, EventPosition
from eventpump.interfaces import PartitionProperties


@dataclass(frozen=True, slots=True, eq=False)
class Seek:
    """A request to go on reading at another position.

    Attributes:
        place: The checkpoint to go on after; or a position, whose checkpoint is to be found first.
    """

    place: Checkpoint | EventPosition
    done: asyncio.Future[bool] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A request to deliver a range again, after a checkpoint up to a number, and then to go on as before."""

    after: Checkpoint
    through: int
    done: asyncio.Future[bool]


@dataclass(slots=True, eq=False)
class Drain:
    """A wait for a partition to be processed, up to the newest event in its facts."""

    facts: PartitionProperties
    done: asyncio.Future[bool]


@dataclass(slots=True, eq=False)
class Requests:
    """The requests to one pump that are not carried out yet, in order.

    Attributes:
        is_due: Whether the pump has something to do before its next delivery.
        news: Set when a request comes, or the pump ends.
    """

    is_paused: bool = False
    is_due: bool = False
    drains: list[Drain] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _seeks: deque[Seek] = field(default_factory=deque)
    _replays: deque[Replay] = field(default_factory=deque)
    _is_closed: bool = False

    def has_seek(self) -> bool:
        """Return whether a seek waits."""
        return bool(self._seeks)

    def interrupts_batch(self) -> bool:
        """Return whether the rest of a batch in hand, of events that are delivered one by one, is to wait."""
        return self.is_paused or bool(self._seeks)

    def seek(self, seek: Seek) -> None:
        """Add a seek. It ends the replays that were asked for before."""
        if self._is_closed:
            _settle(seek.done, False)
            return
        if seek.done is None:
            # Of several by the processor the last one counts.
            self._seeks = deque(each for each in self._seeks if each.done is not None)
        while self._replays:
            _settle(self._replays.popleft().done, False)
        self._seeks.append(seek)
        self._changed()

    def replay(self, replay: Replay) -> None:
        """Add a replay."""
        if self._is_closed:
            _settle(replay.done, False)
            return
        self._replays.append(replay)
        self._changed()

    def drain(self, drain: Drain) -> None:
        """Add a wait for the partition to be processed."""
        if self._is_closed:
            _settle(drain.done, False)
            return
        self.drains.append(drain)
        self._changed()

    def pause(self, *, is_paused: bool) -> None:
        """Deliver nothing, or deliver again."""
        self.is_paused = is_paused
        self._changed()

    def take(self) -> Seek | Replay | None:
        """Take what is to be carried out now; None if there is nothing. Replays wait while the pump is paused."""
        self.news.clear()
        if self._seeks:
            return self._seeks.popleft()
        if self._replays and not self.is_paused:
            return self._replays.popleft()
        self.is_due = self.is_paused
        return None

    def processed(self, next_number: int) -> None:
        """Complete the waits for events below a sequence number."""
        waiting = []
        for drain in self.drains:
            if drain.facts.last_enqueued_sequence_number < next_number:
                _settle(drain.done, True)
            else:
                waiting.append(drain)
        self.drains = waiting

    def close(self) -> None:
        """Carry out nothing any more: what waits was not done."""
        self._is_closed = True
        waiting = [each.done for each in self._seeks]
        waiting += [each.done for each in self._replays]
        waiting += [each.done for each in self.drains]
        for done in waiting:
            _settle(done, False)
        self._seeks.clear()
        self._replays.clear()
        self.drains = []
        self.news.set()

    def _changed(self) -> None:
        self.is_due = True
        self.news.set()


def _settle(done: asyncio.Future[bool] | None, outcome: bool) -> None:
    if done is not None:
        resolve(done, outcome)
