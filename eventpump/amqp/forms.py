"""Transfers that need no decoding: those that a peer writes like an earlier one (AMQP 1.0, 2.7.5)."""

from __future__ import annotations

from typing import NamedTuple

from eventpump.amqp.codec import skip
from eventpump.amqp.link import Link
from eventpump.amqp.performatives import Transfer
from eventpump.compiled import core

_TRANSFER_MARK = b"\x00\x53\x14\xc0"
_ID_WIDTHS = {0x43: 0, 0x52: 1, 0x70: 4}
_from_bytes = int.from_bytes


class Form(NamedTuple):
    """How a peer writes a plain transfer on one link. Plain is whole, settled and of message format 0.

    Attributes:
        prefix: All from the frame's data offset to the delivery id's constructor.
        id_at: Where the delivery id begins, counted from the frame's start, as are all places here.
        tag_mark: The delivery tag's constructor and length.
        tag_at: Where they are.
        rest: The fields after the tag.
        rest_at: Where they begin.
        payload_at: Where the payload begins.
        link: The link, as long as the peer has it attached: while it is attached and its session mapped, no other has
            its handle and channel.
    """

    prefix: bytes
    id_at: int
    tag_mark: bytes
    tag_at: int
    rest: bytes
    rest_at: int
    payload_at: int
    link: Link


def take_run(form: Form, data: bytes, pos: int, largest: int, room: int, inbox: list[bytes]) -> int:
    """Take a run: the transfers from `pos` on that have one form, whole frames only.

    They differ in delivery id, tag and payload only, and need no decoding.

    Args:
        largest: The largest frame to take, in bytes.
        room: How many transfers to take at most.
        inbox: Where the payloads are appended to.

    Returns:
        Where the run ends; `pos` if the frame there has another form, is larger, or is not whole.
    """
    prefix, id_at, tag_mark, tag_at, rest, rest_at, payload_at, _ = form
    end = len(data)
    while room > 0 and end - pos >= payload_at:
        size = _from_bytes(data[pos : pos + 4], "big")
        after = pos + size
        if (
            not payload_at <= size <= largest
            or after > end
            or data[pos + 4 : pos + id_at] != prefix
            or data[pos + rest_at : pos + payload_at] != rest
            or data[pos + tag_at : pos + tag_at + 2] != tag_mark
        ):
            break
        inbox.append(data[pos + payload_at : after])
        pos = after
        room -= 1
    return pos


take_run_in_python = take_run
"""The reference, in both builds."""
if core is not None:
    take_run = core.take_run


def form_of(transfer: Transfer, data: bytes, pos: int, payload: int, link: Link) -> Form | None:
    """Return how a link's transfer is written, whose frame begins at `pos`; None where it is not plain, or unusual."""
    if not transfer.settled or transfer.message_format or transfer.more or transfer.aborted:
        return None
    if data[pos + 4] != 2 or data[pos + 8 : pos + 12] != _TRANSFER_MARK:
        return None
    id_at = skip(data, pos + 14, payload)
    width = _ID_WIDTHS.get(data[id_at])
    if width is None:
        return None
    tag_at = id_at + 1 + width
    if data[tag_at] != 0xA0:
        return None
    rest_at = tag_at + 2 + data[tag_at + 1]
    return Form(
        prefix=data[pos + 4 : id_at + 1],
        id_at=id_at + 1 - pos,
        tag_mark=data[tag_at : tag_at + 2],
        tag_at=tag_at - pos,
        rest=data[rest_at:payload],
        rest_at=rest_at - pos,
        payload_at=payload - pos,
        link=link,
    )
