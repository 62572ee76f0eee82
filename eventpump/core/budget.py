"""The bytes that all links of a host may hold together: who may receive how much, and what is not kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_SHARED_OUT = 0.75
"""The part of the budget that credit is granted for. The rest is for messages that are larger than expected."""

_BRAKE_AT = 0.875
"""The part at which the brake goes on: credit is taken back from every link. It goes off at `_SHARED_OUT`."""

_LENT = 0.875
"""The part of what the others leave free that one link may use beyond its share. The rest is for links that wake up."""


class BufferBudget:
    """Divides a budget of bytes among the links of a host.

    Held are the bytes that were received and are not processed yet: in the caches, and in the batches in hand.
    Credit counts messages, whose sizes are not known before they arrive, so credit alone bounds no bytes. Three
    measures do it together:

    * Each link is granted credit, by estimated sizes, up to its share, or up to 7/8 of what the others leave free if
      that is more: idle links lend. One that holds more than its limit gets nothing until it has been read.
    * When 7/8 of the budget are held, the brake goes on: every link's credit is taken back, and until less than 3/4 are
      held each link may hold an eighth of the budget divided by the number of links.
    * What arrives beyond the budget is not kept: the link is to be closed, and opened again after the last message
      kept.

    A link that holds nothing is always granted one message, and it is kept, however large.

    Guarantee, if `Account.fitting` is asked before anything is added: the bytes held are at most `max_bytes`, and
    beyond that one message for each account that holds something.

    Args:
        max_bytes: The budget.
        link_bytes: What each link is granted at most, whatever is free.
    """

    __slots__ = (
        "_accounts",
        "_brake_at",
        "_link_bytes",
        "_shared_out",
        "_waiting",
        "held",
        "is_ample",
        "is_braked",
        "max_bytes",
    )

    def __init__(self, max_bytes: int, link_bytes: int) -> None:
        if max_bytes < 1 or link_bytes < 1:
            raise ValueError("a budget needs room for one byte")
        self.max_bytes = max_bytes
        """The budget."""
        self.held = 0
        """Bytes held by all links."""
        self.is_braked = False
        """Whether credit was taken back from all links."""
        self.is_ample = True
        """Whether no link needs to ask for its room: all of them have as much as they may use."""
        self._link_bytes = link_bytes
        self._shared_out = int(max_bytes * _SHARED_OUT)
        self._brake_at = int(max_bytes * _BRAKE_AT)
        self._accounts: dict[Account, None] = {}
        self._waiting: dict[Account, None] = {}

    @property
    def links(self) -> int:
        """How many links there are."""
        return len(self._accounts)

    @property
    def share(self) -> int:
        """What each link may hold if all links are busy, in bytes."""
        return self._shared_out // max(1, len(self._accounts))

    def open(self, adjust: Callable[[], None]) -> Account:
        """Add a link.

        Args:
            adjust: Grants the link credit by its present room; called when that may have changed.
        """
        account = Account(self, adjust)
        self._accounts[account] = None
        self._count_changed()
        return account

    def _close(self, account: Account) -> None:
        if self._accounts.pop(account, account) is None:
            self._waiting.pop(account, None)
            self._count_changed()

    def _count_changed(self) -> None:
        self.is_ample = not self.is_braked and len(self._accounts) * self._link_bytes <= self._shared_out

    def _room(self, held: int) -> int:
        if self.is_braked:
            return (self.max_bytes - self._brake_at) // max(1, len(self._accounts))
        return max(self.share, int((self._shared_out - self.held + held) * _LENT))

    def settle(self) -> Sequence[Account]:
        """Return the accounts whose credit is to be adjusted now. Called when the bytes held have changed."""
        held = self.held
        if self.is_braked:
            if held >= self._shared_out:
                return ()
            self.is_braked = False
            self._count_changed()
        elif held >= self._brake_at:
            self.is_braked, self.is_ample = True, False
            return list(self._accounts)
        if not self._waiting:
            return ()
        # One at a time: each uses what is free, and the next one is adjusted when more is.
        account = next(iter(self._waiting))
        del self._waiting[account]
        return (account,)


class Account:
    """What one link of a host holds. Made by `BufferBudget.open`.

    Args:
        budget: The budget.
        adjust: See `BufferBudget.open`.
    """

    __slots__ = ("_budget", "_is_closed", "adjust", "held")

    def __init__(self, budget: BufferBudget, adjust: Callable[[], None]) -> None:
        self._budget = budget
        self._is_closed = False
        self.adjust = adjust
        """Grants the link credit by its present room."""
        self.held = 0
        """Bytes that the link has received and that are not processed yet."""

    @property
    def room(self) -> int:
        """What the link may hold now, in bytes: at least 1, for a message of any size, if it holds nothing."""
        room = self._budget._room(self.held)  # noqa: SLF001 - the two are one object
        return room if self.held else max(1, room)

    def fitting(self, sizes: Sequence[int]) -> int:
        """Return how many messages of a batch may be added to the cache, from the first on.

        Args:
            sizes: Their sizes, in bytes.
        """
        room = self._budget.max_bytes - self._budget.held
        for count, size in enumerate(sizes):
            room -= size
            if room < 0 and (count or self.held):
                return count
        return len(sizes)

    def holds(self, size: int) -> None:
        """Record what the link holds.

        Args:
            size: In bytes.
        """
        self._budget.held += size - self.held
        self.held = size

    def waits(self) -> None:
        """Record that the link has no credit although its cache is empty: it is adjusted when bytes become free."""
        if not self._is_closed:
            self._budget._waiting[self] = None  # noqa: SLF001 - as above

    def close(self) -> None:
        """Remove the link. What it holds counts until `holds` says otherwise. Closing twice is fine."""
        self._is_closed = True
        self._budget._close(self)  # noqa: SLF001 - as above
