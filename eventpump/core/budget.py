"""The bytes that all links of a host may hold together: who may receive how much, and what is not kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from eventpump.compiled import based_on_core

_GRANTED = 0.75
"""The part of the budget that is held or expected, by estimated sizes. The rest is for messages that are larger."""

_BRAKE_AT = 0.875
"""The part held at which the brake goes on: credit is taken back from every link. It goes off at `_GRANTED`."""

_LENT = 0.875
"""The part of what the others leave free that one link may use beyond its share. The rest is for links that wake up."""

_MOST = 2**48
"""No budget is larger, so that the compiled core can count those of all links with 64 bits."""

_LOOKED_AT = 4
"""How many links are looked at, whether they are idle, each time that one has less room than it could use."""


@based_on_core("PlainBudget")
class BufferBudget:
    """Divides a budget of bytes among the links of a host.

    Held are the bytes that were received and are not processed yet: in the caches, and in the batches in hand.
    Credit counts messages, whose sizes are not known before they arrive, so credit alone bounds no bytes. Three
    measures do it together:

    * What is held, and expected by the credit granted and estimated sizes, is at most 3/4 of the budget. Each link may
      have its share of that, or 7/8 of what the others leave free if that is more. A link that got nothing yet, or
      nothing while the host received as much as the budget, is idle: it lends its share, and has a minimum only, until
      it gets something. The minimum is an eighth of the budget, divided by the number of links; whatever the others
      have, a link has it.
    * When 7/8 of the budget are held, the brake goes on: until less than 3/4 are held, every link has its minimum only,
      and credit beyond it is taken back.
    * What arrives beyond the budget is not kept: the link is to be closed, and opened again after the last message
      kept.

    A link that holds nothing is always granted one message, and it is kept, however large. If the budget has no room
    for it, it does not count for the budget: it would leave none to the others.

    Guarantee, if `Account.fitting` is asked before anything is added: the bytes held are at most `max_bytes`, and
    beyond that one message for each account that holds something.

    Args:
        max_bytes: The budget.
        link_bytes: What each link is granted at most, whatever is free.
    """

    __slots__ = (
        "_accounts",
        "_expected",
        "_granted",
        "_is_scarce_anew",
        "_is_short",
        "_link_bytes",
        "_turns",
        "_waiting",
        "beyond",
        "brake_at",
        "held",
        "is_ample",
        "is_braked",
        "max_bytes",
        "received",
    )

    def __init__(self, max_bytes: int, link_bytes: int) -> None:
        if max_bytes < 1 or link_bytes < 1:
            raise ValueError("a budget needs room for one byte")
        max_bytes, link_bytes = min(max_bytes, _MOST), min(link_bytes, _MOST)
        self.max_bytes = max_bytes
        """The budget."""
        self.held = 0
        """Bytes held by all links."""
        self.beyond = 0
        """Those of them that do not count for the budget."""
        self.received = 0
        """Bytes that arrived over all links, ever."""
        self.is_braked = False
        """Whether every link has its minimum only."""
        self.is_ample = True
        """Whether no link needs to ask for its room: all of them have as much as they may use."""
        self._link_bytes = link_bytes
        self._granted = int(max_bytes * _GRANTED)
        self.brake_at = int(max_bytes * _BRAKE_AT)
        """The bytes held at which credit is taken back."""
        self._expected = 0
        self._is_short = False
        self._is_scarce_anew = False
        self._accounts: dict[Account, None] = {}
        self._turns: deque[Account] = deque()
        self._waiting: dict[Account, None] = {}

    @property
    def links(self) -> int:
        """How many links there are."""
        return len(self._accounts)

    @property
    def share(self) -> int:
        """What each link may hold and expect if all links are busy, in bytes."""
        return self._granted // max(1, len(self._accounts))

    @property
    def minimum(self) -> int:
        """What each link may hold and expect in any case, in bytes."""
        return (self.max_bytes - self.brake_at) // max(1, len(self._accounts))

    def open(self, adjust: Callable[[], None]) -> Account:
        """Add a link. `adjust` grants it credit by its present room, and is called when that may have changed."""
        account = Account(self, adjust)
        self._accounts[account] = None
        self._turns.append(account)
        self._count_changed()
        return account

    def _close(self, account: Account) -> None:
        if self._accounts.pop(account, account) is None:
            self._waiting.pop(account, None)
            self._turns.remove(account)
            self._count_changed()

    def _count_changed(self) -> None:
        was_ample = self.is_ample
        self.is_ample = not self.is_braked and len(self._accounts) * self._link_bytes <= self._granted
        # What links expect is not recorded while they have as much as they may use.
        self._is_scarce_anew = was_ample and not self.is_ample

    def _room(self, account: Account) -> int:
        if self.is_braked or account.is_idle:
            return self.minimum
        mine = account.held - account.beyond + account.expected
        # What this link has is free for itself.
        free = self._granted - (self.held - self.beyond) - self._expected + mine
        allowed = max(self.share, int(free * _LENT))
        self._is_short = self._is_short or allowed < self._link_bytes
        return max(self.minimum, min(free, allowed))

    def settle(self) -> Sequence[Account]:
        """Return the accounts whose credit is to be adjusted now. Called when the bytes held have changed."""
        if self.is_braked:
            if self.held - self.beyond >= self._granted:
                return ()
            self.is_braked = False
            self._count_changed()
        elif self.held - self.beyond >= self.brake_at:
            self.is_braked, self.is_ample, self._is_scarce_anew = True, False, False
            return list(self._accounts)
        if self._is_scarce_anew:
            self._is_scarce_anew = False
            return list(self._accounts)
        due: list[Account] = []
        if self._waiting:
            # One at a time: each uses what is free, and the next one is adjusted when more is.
            account = next(iter(self._waiting))
            del self._waiting[account]
            due.append(account)
        if self._is_short:
            self._is_short = False
            due += self._newly_idle()
        return due

    def _newly_idle(self) -> list[Account]:
        found: list[Account] = []
        for _ in range(min(_LOOKED_AT, len(self._turns))):
            account = self._turns[0]
            self._turns.rotate(-1)
            if account.expected > self.minimum and self.received - account.received_at > self.max_bytes:
                account.is_idle = True
                found.append(account)
        return found


@based_on_core("PlainAccount")
class Account:
    """What one link of a host holds. Made by `BufferBudget.open`."""

    __slots__ = ("_budget", "_room", "adjust", "beyond", "expected", "held", "is_closed", "is_idle", "received_at")

    def __init__(self, budget: BufferBudget, adjust: Callable[[], None]) -> None:
        self._budget = budget
        self._room = budget.max_bytes
        self.adjust = adjust
        """Grants the link credit by its present room."""
        self.held = 0
        """Bytes that the link has received and that are not processed yet."""
        self.beyond = 0
        """Those of them that do not count for the budget: a message that there was no room for."""
        self.expected = 0
        """Bytes that it may still receive by its credit, if they are as large as estimated."""
        self.received_at = budget.received
        """How many bytes the host had received when this link received something last."""
        self.is_idle = True
        """Whether it lends its share, as it has received nothing yet, or nothing for long."""
        self.is_closed = False
        """Whether the link is gone."""

    @property
    def room(self) -> int:
        """What the link may hold and expect now, in bytes; at least 1, for a message of any size, if it holds none."""
        room = self._room = self._budget._room(self)  # noqa: SLF001 - the two are one object
        return room if self.held else max(1, room)

    @property
    def recalls(self) -> bool:
        """Whether credit for which there is no room is to be taken back."""
        return self.is_idle or self._budget.is_braked

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many messages of a batch that does not fit are to be added to the cache, from the first on."""
        budget = self._budget
        room = budget.max_bytes - (budget.held - budget.beyond)
        if sizes[0] > room and not self.held:
            self.beyond = sizes[0]
            budget.beyond += sizes[0]
            return 1
        for count, size in enumerate(sizes):
            room -= size
            if room < 0:
                return count
        return len(sizes)

    def received(self, size: int) -> bool:
        """Record that bytes arrived; return whether all may be added to the cache: if not, `fitting` returns how
        many."""
        budget = self._budget
        self.received_at = budget.received = budget.received + size
        self.is_idle = False
        return budget.held - budget.beyond + size <= budget.max_bytes

    def holds(self, size: int) -> bool:
        """Record how many bytes the link holds; return whether `BufferBudget.settle` is to be called."""
        budget = self._budget
        held = budget.held = budget.held + size - self.held
        self.held = size
        if self.beyond > size:
            budget.beyond += size - self.beyond
            self.beyond = size
        return not budget.is_ample or held >= budget.brake_at

    def expects(self, size: int) -> None:
        """Record what the link may still receive by its credit.

        Args:
            size: In bytes, by the estimated size of its messages. If that is more than its room, as one message of a
                link that holds nothing may be, it counts as the room.
        """
        size = min(size, self._room)
        self._budget._expected += size - self.expected  # noqa: SLF001 - as above
        self.expected = size

    def waits(self) -> None:
        """Record that the link has no credit although its cache is empty: it is adjusted when bytes become free."""
        if not self.is_closed:
            self._budget._waiting[self] = None  # noqa: SLF001 - as above

    def close(self) -> None:
        """Remove the link. What it holds counts until `holds` says otherwise. Closing twice is fine."""
        self.is_closed = True
        self.expects(0)
        self._budget._close(self)  # noqa: SLF001 - as above
