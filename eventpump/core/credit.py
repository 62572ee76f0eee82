"""Link credit: how many messages the service may send."""

from __future__ import annotations

from eventpump.compiled import based_on_core, core

START = 32
"""The credit of a link before any message size is known."""

UNKNOWN_SIZE = 1024
"""What a message counts for before any was received, where the room of a link is limited; in bytes."""

_MOST = 2**48
"""No bound is higher, so that the compiled core can count with 64 bits."""

_SIZES_KEPT = 1024
"""The recent maximum covers at least this many messages, and at most twice as many."""


@based_on_core("PlainCredit")
class CreditWindow:
    """Grants link credit for the free space of a cache that is bounded in events and in bytes.

    The size of messages is estimated: the larger of the mean and the recent maximum. The window starts at 32 and grows
    with the received messages, so that an estimate exists before it is large. If messages that are larger than
    estimated fill the budget, credit is set to 0; messages that the peer sends before it knows cannot be recalled.
    `strict` uses the link's maximum message size instead. In both cases an empty cache is granted one message, however
    large.

    Guarantees, for a peer that respects its credit, and if `grant` is called after each batch and read:

    * The events held are never more than `max_events`.
    * The bytes held are below `max_bytes + allowance * largest`, with the `allowance` there was just before the batch
      that brought them from below `max_bytes` to it or beyond, and the largest message of those that came since. That
      allowance is at most what `max_bytes` holds of messages of the size estimated when it was granted, and at most
      `max_events`.
    * Strictly, they are at most the larger of `max_bytes` and one message.

    A `room` below `max_bytes` only lowers what is granted: the bounds hold with it, too.

    Credit is replenished when at least half the window can be added, so never message by message.

    Args:
        left: How many more messages are wanted; None for no limit.
    """

    __slots__ = (
        "_counted",
        "_estimate",
        "_largest",
        "_largest_before",
        "_max_bytes",
        "_max_events",
        "_max_message_size",
        "_mean",
        "_most_ramp",
        "_ramp",
        "_strict",
        "_total",
        "allowance",
        "credit",
        "left",
    )

    def __init__(self, max_events: int, max_bytes: int, *, strict: bool = False, left: int | None = None) -> None:
        if max_events < 1 or max_bytes < 1:
            raise ValueError("a window needs room for one event and one byte")
        self._max_events = max_events = min(max_events, _MOST)
        self._max_bytes = max_bytes = min(max_bytes, _MOST)
        self._strict = strict
        self._max_message_size = max_bytes
        self._ramp = START
        self._most_ramp = max(max_events, START)
        self._mean = 0.0
        self._estimate = 0.0
        self._largest = 0
        self._largest_before = 0
        self._counted = 0
        self._total = 0
        self.left = left
        """Messages that are wanted and were not received yet; None for no limit. Lowered only while none may arrive."""
        self.credit = 0
        """The link's credit: as last granted, minus the messages received since."""
        self.allowance = 0
        """Messages that may still arrive: as in `amqp.link.Link`, more than the credit after that was lowered."""

    def link_opened(self, max_message_size: int) -> None:
        """Start over with a new link, which has no credit. The estimate of sizes is kept.

        Args:
            max_message_size: In bytes; 0 if the link has no limit.
        """
        self._max_message_size = min(max_message_size, _MOST) or self._max_bytes
        self.credit = self.allowance = 0

    def link_ended(self) -> None:
        """Forget the granted credit: nothing more arrives on that link."""
        self.credit = self.allowance = 0

    def received(self, batch: list[bytes]) -> int:
        """Count a received batch, and return its size in bytes."""
        count = len(batch)
        if not count:
            return 0
        if count == 1:
            size = largest = len(batch[0])
        else:
            sizes = list(map(len, batch))
            size, largest = sum(sizes), max(sizes)
        # No `min` and `max` here and in `grant`: with little to do, the calls are a third of it.
        self.credit = self.credit - count if self.credit > count else 0
        self.allowance = self.allowance - count if self.allowance > count else 0
        if self.left is not None:
            self.left = self.left - count if self.left > count else 0
        # The ramp doubles with each used window, whatever the round trip is.
        ramp, total = self._ramp + count, self._total + count
        self._ramp = ramp if ramp < self._most_ramp else self._most_ramp
        self._total = total if total < _SIZES_KEPT else _SIZES_KEPT
        self._mean += (size / count - self._mean) * (count / self._total if count < self._total else 1.0)
        if largest > self._largest:
            self._largest = largest
        self._counted += count
        if self._counted >= _SIZES_KEPT:
            self._largest_before, self._largest, self._counted = self._largest, 0, 0
        largest = self._largest if self._largest > self._largest_before else self._largest_before
        self._estimate = self._mean if self._mean > largest else largest
        return size

    @property
    def expected(self) -> int:
        """The size of the messages that the credit lets come, in bytes, if they are as large as estimated."""
        return int(self.credit * (self._max_message_size if self._strict else self._estimate or UNKNOWN_SIZE))

    def refused(self, count: int) -> None:
        """Want as many messages again: they were received, but not kept."""
        if self.left is not None:
            self.left += count

    def grant(
        self,
        events_held: int,
        bytes_held: int,
        room: int | None = None,
        *,
        is_alone: bool = True,
        recalls: bool = False,
    ) -> int | None:
        """Return the credit to set on the link, or None to leave it unchanged.

        Args:
            room: Bytes that the cache may hold now, if that may be less than `max_bytes`; None if it is not limited.
            is_alone: Whether an empty cache is granted one message even if `room` has none for it.
            recalls: Whether credit for which there is no room is taken back.
        """
        max_bytes = self._max_bytes if room is None or room > self._max_bytes else room
        if bytes_held >= max_bytes:
            if not self.credit:
                return None
            if not self._strict and bytes_held >= self._max_bytes:
                self._ramp = START
            self.credit = 0
            return 0
        each = self._max_message_size if self._strict else self._estimate
        if room is not None and not each:
            each = UNKNOWN_SIZE
        window = self._max_events
        wanted = window - events_held
        if each:
            fitting, fitting_in_all = int((max_bytes - bytes_held) / each), int(max_bytes / each)
            wanted = fitting if fitting < wanted else wanted
            window = fitting_in_all if fitting_in_all < window else window
        if not self._strict:
            ramp = self._ramp
            wanted = ramp if ramp < wanted else wanted
            window = ramp if ramp < window else window
        if wanted < 1 and not events_held and is_alone:
            wanted = 1
        left = self.left
        if left is not None:
            wanted = left if left < wanted else wanted
            window = left if left < window else window
        if wanted - self.credit < (window // 2 or 1) and not (recalls and wanted < self.credit):
            return None
        self.credit = wanted
        if wanted > self.allowance:
            self.allowance = wanted
        return wanted

    def withdraw(self) -> int | None:
        """Return the credit to set when no more messages are wanted, or None to leave it unchanged."""
        if not self.credit:
            return None
        self.credit = 0
        return 0


if core is not None:
    core.grant_credit(START, UNKNOWN_SIZE, _SIZES_KEPT)
