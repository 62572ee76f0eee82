"""Decides whether a link that is open and silent has nothing to receive, or is dead. Makes no requests itself.

A check of one link, from the moment it has been silent for too long:

| step | result | next |
|---|---|---|
| PROBE | an answer | ASK; REST where the link was opened for this check |
| | none, from a peer that has answered one before | REOPEN; DROP [1] where the link was opened for this check |
| | none, from another peer; or it cannot be probed | ASK; REST where the link was opened for this check |
| ASK | the hub is not ahead, or there is no answer | REST |
| | it is ahead, for the first time | PROBE, then ASK again |
| | it is ahead, for the second time | REOPEN; DROP [2] where an earlier check did so, and nothing was received since |
| REOPEN | attached, after an unanswered probe | PROBE |
| | attached, where the hub was ahead | REST |
| | no answer to the attach, after an unanswered probe | DROP [1] |
| | refused, or the connection was lost | REST |
| any | a message, another link, no credit | REST |

While a connection may not be dropped again (`Peer.may_drop`), [1] is REST and [2] is REOPEN.

AMQP requires a peer to answer a flow with echo (2.7.4). Whether the service does is not documented, so silence alone
proves nothing about a peer that never answered one. If the hub is ahead once, that proves nothing either: the event may
be in flight. If it is ahead twice, with nothing received in between on a link that had credit all the time, the event
is not in flight: between the two checks there is a probe, and events sent before its answer arrive before it; or
without an answer at least `LOOK_INTERVAL` seconds.

A connection can be as dead as a link: it attaches links, and receives nothing on any. A second link that is silent like
the first shows this. A compacted hub whose newest events are gone looks the same over a healthy connection, forever.
Therefore drops become less and less frequent, counted over all links of a transport, until one has helped.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from eventpump.eventhubs.events import EventPosition

LOOK_INTERVAL = 1.0
"""Seconds between two requests to management, for all partitions of a host together."""

PROBE_TIMEOUT = 10.0
"""Seconds that a peer has to answer a probe."""

DROP_INTERVAL = 30.0
"""Seconds between two drops of a transport's connections if the first helped; twice as many if it did not."""

_LONGEST = 64
"""The largest factor by which the time between two checks of a link, or two drops of a connection, grows."""


class SilenceStep(enum.Enum):
    """The next step of a check."""

    PROBE = "probe the link"
    ASK = "ask management"
    REOPEN = "open the link again"
    DROP = "drop the connection"
    REST = "wait for the next silence"


class Patience:
    """A delay that doubles with every unsuccessful attempt, so that these become rare.

    Used for the silence of a link before it is checked, because a hub can be ahead although there is nothing to
    receive, such as a compacted one whose newest events are gone; and for the time between two drops of a connection.

    Args:
        first: Seconds.
    """

    __slots__ = ("_factor", "_first")

    def __init__(self, first: float) -> None:
        self._first = first
        self._factor = 1

    @property
    def seconds(self) -> float:
        """The current delay."""
        return self._first * self._factor

    @property
    def longest(self) -> float:
        """The longest delay, in seconds."""
        return self._first * _LONGEST

    @property
    def was_in_vain(self) -> bool:
        """Whether there was an attempt that has not helped yet."""
        return self._factor > 1

    def tried(self) -> None:
        """Double the delay after an attempt."""
        self._factor = min(self._factor * 2, _LONGEST)

    def helped(self) -> None:
        """Reset the delay."""
        self._factor = 1


class Peer:
    """The observed behavior of the service at the other end of a transport."""

    __slots__ = ("_dropped_at", "_drops", "_was_mute", "answers_echo")

    def __init__(self) -> None:
        self.answers_echo = False
        self._was_mute = False
        self._drops = Patience(DROP_INTERVAL)
        self._dropped_at = -math.inf

    def may_drop(self, now: float) -> bool:
        """Return whether a connection to it may be dropped at this time, in seconds."""
        return now - self._dropped_at >= self._drops.seconds

    def dropped(self, now: float, *, was_mute: bool) -> None:
        """Record that a connection was dropped: the next may be dropped after twice the time."""
        self._was_mute = was_mute
        if now - self._dropped_at > 2 * self._drops.longest:
            # The problem that earlier drops did not solve is over: otherwise its links would have requested another.
            self._drops.helped()
        self._drops.tried()
        self._dropped_at = now

    def drop_helped(self) -> None:
        """Reset the delay: a link received the events that the hub had held back before the last drop."""
        self._drops.helped()

    def answered(self) -> None:
        """Record an answer to a probe. If the last connection was dropped because there was none, the drop has
        helped."""
        self.answers_echo = True
        if self._was_mute:
            self._was_mute = False
            self._drops.helped()


class SilenceCheck:
    """One check of one silent link; see the table above. Its methods record the result of `step`, and set the next.

    Args:
        was_reopened: Whether an earlier check reopened the link, or dropped its connection, and nothing was received
            since.

    Attributes:
        is_ahead: Whether the hub was ahead twice, which is then the reason to reopen the link.
    """

    __slots__ = ("_is_second_link", "_may_drop", "_peer", "_was_ahead", "_was_reopened", "is_ahead", "step")

    def __init__(self, peer: Peer, *, was_reopened: bool, may_drop: bool) -> None:
        self._peer = peer
        self._is_second_link = was_reopened
        self._may_drop = may_drop
        self._was_ahead = False
        self._was_reopened = False
        self.is_ahead = False
        self.step = SilenceStep.PROBE

    def probed(self, answer: bool | None) -> None:
        """Record the result of a probe, as `ReceiveLink.probe` returned it."""
        assert self.step is SilenceStep.PROBE
        if answer:
            self._peer.answered()
        if answer is False and self._peer.answers_echo:
            self.step = self._dropped() if self._was_reopened else SilenceStep.REOPEN
        else:
            self.step = SilenceStep.REST if self._was_reopened else SilenceStep.ASK

    def looked(self, is_ahead: bool | None) -> None:
        """Record whether management said that the hub is ahead; None if unknown."""
        assert self.step is SilenceStep.ASK
        if not is_ahead:
            self.step = SilenceStep.REST
        elif not self._was_ahead:
            self._was_ahead = True
            self.step = SilenceStep.PROBE
        else:
            self.is_ahead = True
            self.step = SilenceStep.DROP if self._is_second_link and self._may_drop else SilenceStep.REOPEN

    def reopened(self, is_attached: bool | None) -> None:
        """Record that the link was replaced.

        Args:
            is_attached: True if another is attached, False if the attach was not answered; None if it failed otherwise.
        """
        assert self.step is SilenceStep.REOPEN
        self._was_reopened = True
        if self.is_ahead or is_attached is None:
            self.step = SilenceStep.REST
        else:
            self.step = SilenceStep.PROBE if is_attached else self._dropped()

    def _dropped(self) -> SilenceStep:
        return SilenceStep.DROP if self._may_drop else SilenceStep.REST


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """Management's answer about a partition.

    Args:
        at: When it was requested, on the loop's clock.
        last: The sequence number of the newest event; -1 if there never was one.
    """

    at: float
    last: int
    is_ahead: bool


def is_ahead(
    *,
    received: int | None,
    position: EventPosition,
    last: int,
    last_offset: str,
    last_time: float,
    is_empty: bool,
) -> bool:
    """Return whether a partition holds events after the last received one.

    Args:
        position: Where the link began, used if nothing was received; never "@latest".
        last: The sequence number of the partition's newest event; the next two are its offset and when it was enqueued,
            in seconds since the Unix epoch.
    """
    if is_empty:
        return False
    if received is not None:
        return last > received
    if position.sequence_number is not None:
        return last >= position.sequence_number if position.inclusive else last > position.sequence_number
    if position.enqueued_time is not None:
        begin = position.enqueued_time.timestamp()
        return last_time >= begin if position.inclusive else last_time > begin
    return position.inclusive or position.offset != last_offset


def lag(
    *,
    delivered: int | None,
    stated: int | None,
    answer: HubAnswer | None,
    is_attached: bool,
    silent_for: float | None,
    now: float,
    patience: float,
) -> int | None:
    """Return how many events a partition's newest one is ahead of the last delivered; None if unknown.

    The lag is unknown while the link is not attached; if the newest event is known neither from the last received event
    nor from a later answer of management; and if the link has been silent for longer than `patience` seconds and no
    answer of the last `2 * patience` seconds confirms it. A silent link is attached, has credit, and has nothing
    received left to deliver; its silence begins with the last message, on this link or an earlier one. If nothing was
    delivered yet, the lag is 0 if an answer confirms that there is nothing to deliver.

    Args:
        stated: That of the newest event, as stated by the last received one.
        answer: The last answer of management, if nothing was received since.
    """
    if not is_attached:
        return None
    if silent_for is not None and silent_for > patience and (answer is None or now - answer.at > 2 * patience):
        return None
    if delivered is None:
        return 0 if answer is not None and answer.is_ahead is False else None
    newest = stated if answer is None else answer.last
    return None if newest is None else max(0, newest - delivered)
