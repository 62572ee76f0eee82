"""Bounds, in bytes, of what is held for a peer of what it sends.

Unfinished messages are counted as they are encoded; the buffers that they are put together in grow in steps, and take
up to an eighth more. What is kept as objects is counted by the costs below, each at least what CPython 3.11 takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from eventpump.amqp.codec import count_items
from eventpump.amqp.performatives import MAX_ITEMS

SESSION_COST = 2048
"""What a session takes before anything is said in its begin."""
LINK_COST = 2048
"""What a link takes before anything is said in its attach."""
ITEM_COST = 80
"""What one value of a performative takes as an object, beside its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What a peer may have held for it on one connection, over all its sessions and links.

    Args:
        unfinished: Of messages that have begun and are not whole. A link whose message would exceed it is detached with
            `amqp:resource-limit-exceeded`. None sets no limit beside that of each link, its max-message-size: a client
            attaches every link itself, so that the peer can have no more under way than it was granted.
        kept: Of the open, begins and attaches, until the session or link has ended at both ends. More closes the
            connection with `amqp:resource-limit-exceeded`. The default has room for some 5,000 sessions with a link
            each.
    """

    unfinished: int | None = None
    kept: int = 64 * 1024 * 1024


def cost_of(data: bytes, pos: int, end: int) -> int:
    """Return what a decoded performative takes while it is kept. Raises `AmqpDecodeError` as `count_items`."""
    return end - pos + ITEM_COST * count_items(data, pos, end, MAX_ITEMS)
