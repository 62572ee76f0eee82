"""Random histories of a partition's cache, its credit and its account, in the build of the process that runs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from random import Random
from typing import Any

from eventpump.core.budget import BufferBudget
from eventpump.core.cache import EventCache
from eventpump.core.credit import CreditWindow
from eventpump.core.streams import Selection

_CACHE = ("start", "end", "count", "size", "in_hand", "oldest")
_CREDIT = ("credit", "allowance", "left", "expected")
_ACCOUNT = ("held", "beyond", "expected", "is_idle", "received_at", "room", "recalls")
_BUDGET = ("held", "beyond", "received", "is_braked", "is_ample")


def _number(item: bytes) -> int:
    return int(item.rstrip(b"x"))


def _last_digit(item: bytes) -> int:
    return _number(item) % 10


def _shown(owner: object, names: tuple[str, ...]) -> list[object]:
    return [getattr(owner, name) for name in names]


def history(seed: int) -> Iterator[object]:
    """Yield what a feed's parts return and hold after each of some random calls."""
    random = Random(seed)
    cache: EventCache[bytes] = EventCache(lambda messages: list(messages), _number)
    credit = CreditWindow(
        random.choice((1, 8, 300, 2**80)),
        random.choice((1, 500, 20_000, 2**80)),
        strict=random.random() < 0.3,
        left=random.choice((None, None, 5, 400)),
    )
    budget = BufferBudget(random.choice((50, 5_000, 2**80)), random.choice((1, 2_000, 2**80)))
    accounts = [budget.open(lambda: None) for _ in range(random.randint(1, 3))]
    readers: list[Any] = [cache.cursor()]
    number = 0
    for _ in range(random.randint(5, 60)):
        did: object = None
        kind, reader = random.random(), random.choice(readers) if readers else None
        if kind < 0.35:
            few = min(random.choice((1, 1, 1, 2, 70, 300)), credit.allowance)
            batch = [b"%d" % (number + each) + b"x" * random.choice((0, 3, 40)) for each in range(few)]
            number += few
            size = credit.received(batch)
            account = random.choice(accounts)
            is_fitting = account.received(size)
            kept = len(batch) if is_fitting or not batch else account.fitting(list(map(len, batch)))
            woken = cache.append(batch[:kept], sum(map(len, batch[:kept])))
            did = size, kept, len(list(woken))
        elif kind < 0.6 and reader is not None:
            found = reader.read(random.choice((1, 2, 64, 1_000)))
            did = [bytes(each) for each in found], reader.available, reader.held, reader.has_in_hand
        elif kind < 0.75 and reader is not None:
            did = reader.settle() if hasattr(reader, "settle") else reader.processed()
        elif kind < 0.8 and reader is not None:
            did = reader.processed()
        elif kind < 0.84:
            readers.append(cache.cursor(at_end=random.random() < 0.5))
        elif kind < 0.87:
            readers.append(cache.stream(Selection(_last_digit, random.sample(range(10), 3))))
        elif kind < 0.9 and reader is not None:
            reader.close()
            readers.remove(reader)
        elif kind < 0.91:
            cache.clear()
        elif kind < 0.93:
            credit.link_opened(random.choice((0, 10, 2**63)))
        account = random.choice(accounts)
        is_due = account.holds(random.choice((cache.size + cache.in_hand, random.randrange(6_000))))
        if is_due:
            did = did, [accounts.index(each) for each in budget.settle()]
        if random.random() < 0.3:
            granted = credit.grant(cache.count, cache.size)
        else:
            room = random.choice((account.room, random.randrange(-50, 3_000)))
            granted = credit.grant(
                cache.count, cache.size, room, is_alone=random.random() < 0.5, recalls=account.recalls
            )
            account.expects(credit.expected)
        yield did, granted, _shown(cache, _CACHE), _shown(credit, _CREDIT), _shown(account, _ACCOUNT)
        yield _shown(budget, _BUDGET), [each.position for each in readers if hasattr(each, "position")]


def main(first: int, count: int) -> None:
    """Write the histories of some seeds, a line for each."""
    for seed in range(first, first + count):
        sys.stdout.write(f"{seed} {list(history(seed))}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
