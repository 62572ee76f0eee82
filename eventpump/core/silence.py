"""Whether a link that is open and silent has nothing to bring, or is dead. Decides; asks nobody itself.

A check of one link, from the moment it has been silent for too long:

| step | what came of it | then |
|---|---|---|
| PROBE | an answer | ASK; REST where the link was opened for this check |
| | none, from a peer that has answered one before | REOPEN; DROP [1] where the link was opened for this check |
| | none, from another peer; or it cannot be asked | ASK; REST where the link was opened for this check |
| ASK | the hub is not ahead, or does not say | REST |
| | it is ahead, for the first time | PROBE, then ASK again |
| | it is ahead, for the second time | REOPEN; DROP [2] where an earlier check did so, and nothing was received since |
| REOPEN | attached, after an unanswered probe | PROBE |
| | attached, where the hub was ahead | REST |
| | no answer to the attach, after an unanswered probe | DROP [1] |
| | refused, or the connection was lost | REST |
| any | a message, another link, no credit | REST |

While a connection may not be dropped again (`Peer.may_drop`), [1] is REST and [2] is REOPEN.

AMQP asks a peer to answer a flow with echo (2.7.4). Whether the service does is not documented, so silence alone says
nothing of a peer that never answered one. The hub being ahead once says nothing either: the event may be on its way.
Twice, with nothing received in between on a link that had credit all along, it is not: between the two lies a probe,
and what was sent before its answer comes before it; without an answer there are at least `LOOK_INTERVAL` seconds.

A connection can be as dead as a link: it attaches links, and brings nothing on any. A second link that is silent like
the first shows it. A compacted hub whose newest events are gone looks the same over a healthy connection, for ever.
Therefore drops get ever rarer, counted over all links of a transport, until one has helped.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from eventpump.eventhubs.events import EventPosition

LOOK_INTERVAL = 1.0
"""Seconds between two questions to management, of all partitions of a host together."""

PROBE_TIMEOUT = 10.0
"""Seconds a peer has to answer a probe."""

DROP_INTERVAL = 30.0
"""Seconds between two drops of a transport's connections, where the first helped; twice as many where it did not."""

_LONGEST = 64
"""How many times as long as at first it takes until a link is checked, or a connection dropped, again; at most."""


class Step(enum.Enum):
    """What a check does next."""

    PROBE = "probe the link"
    ASK = "ask management"
    REOPEN = "open the link again"
    DROP = "drop the connection"
    REST = "wait for the next silence"


class Patience:
    """How long to wait before something is tried again that was in vain, so that trying it for nothing gets rare.

    A link must be silent for so long before it is checked: a hub can be ahead of one with nothing to bring, such as a
    compacted one whose newest events are gone. So long lies between two drops of a connection.

    Args:
        first: Seconds.
    """

    __slots__ = ("_factor", "_first")

    def __init__(self, first: float) -> None:
        self._first = first
        self._factor = 1

    @property
    def seconds(self) -> float:
        """How long now."""
        return self._first * self._factor

    @property
    def longest(self) -> float:
        """How long at most, in seconds."""
        return self._first * _LONGEST

    @property
    def was_in_vain(self) -> bool:
        """Whether it was tried, and did not help yet."""
        return self._factor > 1

    def tried(self) -> None:
        """Double it."""
        self._factor = min(self._factor * 2, _LONGEST)

    def helped(self) -> None:
        """Begin anew."""
        self._factor = 1


class Peer:
    """What is known of the service at the other end of a transport.

    Attributes:
        answers_echo: Whether it has ever answered a probe.
    """

    __slots__ = ("_dropped_at", "_drops", "_was_mute", "answers_echo")

    def __init__(self) -> None:
        self.answers_echo = False
        self._was_mute = False
        self._drops = Patience(DROP_INTERVAL)
        self._dropped_at = -math.inf

    def may_drop(self, now: float) -> bool:
        """Return whether a connection to it may be dropped.

        Args:
            now: Seconds, as in the other calls.
        """
        return now - self._dropped_at >= self._drops.seconds

    def dropped(self, now: float, *, was_mute: bool) -> None:
        """Go on after a connection was dropped: the next may be dropped after twice the time.

        Args:
            was_mute: Whether because probes had no answer.
        """
        self._was_mute = was_mute
        if now - self._dropped_at > 2 * self._drops.longest:
            # What the drops before did not help against is over: each link in question would have asked for another.
            self._drops.helped()
        self._drops.tried()
        self._dropped_at = now

    def drop_helped(self) -> None:
        """Begin anew: a link brought what the hub had held back from the links before the last drop."""
        self._drops.helped()

    def answered(self) -> None:
        """Go on after an answer to a probe. Where the last connection was dropped for want of one, that helped."""
        self.answers_echo = True
        if self._was_mute:
            self._was_mute = False
            self._drops.helped()


class SilenceCheck:
    """One check of one silent link; see the table above. Its calls take what came of `step`, and set the next.

    Args:
        was_reopened: Whether an earlier check opened the link again, or dropped its connection, and nothing was
            received since.
        may_drop: Whether the connection may be dropped.

    Attributes:
        step: What to do now.
        is_ahead: Whether the hub was seen ahead twice; then that is why the link is opened again.
    """

    __slots__ = ("_is_second_link", "_may_drop", "_peer", "_was_ahead", "_was_reopened", "is_ahead", "step")

    def __init__(self, peer: Peer, *, was_reopened: bool, may_drop: bool) -> None:
        self._peer = peer
        self._is_second_link = was_reopened
        self._may_drop = may_drop
        self._was_ahead = False
        self._was_reopened = False
        self.is_ahead = False
        self.step = Step.PROBE

    def probed(self, answer: bool | None) -> None:
        """Go on after a probe.

        Args:
            answer: As `ReceiveLink.probe` returned it.
        """
        assert self.step is Step.PROBE
        if answer:
            self._peer.answered()
        if answer is False and self._peer.answers_echo:
            self.step = self._dropped() if self._was_reopened else Step.REOPEN
        else:
            self.step = Step.REST if self._was_reopened else Step.ASK

    def looked(self, is_ahead: bool | None) -> None:
        """Go on after management was asked.

        Args:
            is_ahead: None where that is not known.
        """
        assert self.step is Step.ASK
        if not is_ahead:
            self.step = Step.REST
        elif not self._was_ahead:
            self._was_ahead = True
            self.step = Step.PROBE
        else:
            self.is_ahead = True
            self.step = Step.DROP if self._is_second_link and self._may_drop else Step.REOPEN

    def reopened(self, is_attached: bool | None) -> None:
        """Go on after the link was ended.

        Args:
            is_attached: True where another is attached, False where the attach had no answer; None where it failed
                otherwise.
        """
        assert self.step is Step.REOPEN
        self._was_reopened = True
        if self.is_ahead or is_attached is None:
            self.step = Step.REST
        else:
            self.step = Step.PROBE if is_attached else self._dropped()

    def _dropped(self) -> Step:
        return Step.DROP if self._may_drop else Step.REST


@dataclass(frozen=True, slots=True)
class Look:
    """What management said of a partition.

    Args:
        at: When it was asked, on the loop's clock.
        last: The sequence number of the newest event; -1 where there never was one.
        is_ahead: Whether the hub holds events beyond what was received.
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
    """Return whether a partition holds events beyond what was received of it.

    Args:
        received: The sequence number of the last event received; None where none was.
        position: Where the link began, which counts where nothing was received; never "@latest".
        last: The sequence number of the partition's newest event; the next two are its offset and when it was enqueued,
            in seconds since the Unix epoch.
        is_empty: Whether the partition holds no event now.
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
    told: int | None,
    look: Look | None,
    is_attached: bool,
    silent_for: float | None,
    now: float,
    patience: float,
) -> int | None:
    """Count how many events a partition's newest one is ahead of the last delivered; None where that is not known.

    It is not known while the link is not attached; where the newest event is known neither from the last one received
    nor from a later look; and when the link has been silent for longer than `patience` seconds and no look of the last
    `2 * patience` seconds confirms it. A silent link is one that is attached, has credit, and nothing received is left
    to deliver; its silence begins with the last message, on whichever link that came. Where nothing was delivered yet,
    it is 0 if a look confirms that there is nothing to deliver.

    Args:
        delivered: The sequence number of the last event delivered.
        told: That of the newest event, as the last one received told it.
        look: The last look, where nothing was received since.
        silent_for: How many seconds the link has been silent; None where it is not.
    """
    if not is_attached:
        return None
    if silent_for is not None and silent_for > patience and (look is None or now - look.at > 2 * patience):
        return None
    if delivered is None:
        return 0 if look is not None and look.is_ahead is False else None
    newest = told if look is None else look.last
    return None if newest is None else max(0, newest - delivered)
