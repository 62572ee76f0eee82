"""The bounds on what the emulator holds for one connection, with their reasons.

Any client can connect, so a connection that has not put a token gets only what putting one requires. The bounds for
clients with a token are for tests and development: a program that works with Azure must not reach them. Anything beyond
a bound is refused with the condition that is named there, and other connections are not affected. Bytes, unless stated
otherwise.
"""

from __future__ import annotations

from typing import Final

from eventpump.amqp.limits import ConnectionLimits

_KIB: Final = 1024
_MIB: Final = 1024 * 1024

MAX_FRAME_SIZE: Final = 64 * _KIB
"""The service's max-frame-size in its open (protocol.md 2.3)."""

# -------------------------------------------------------------------------------------------- request links

REQUEST_WITHOUT_TOKEN: Final = 64 * _KIB
"""The max-message-size of a `$cbs` link attached before the connection has a token; it does not change later. The
largest tokens are JWTs of a few KiB. A larger request detaches the link with `amqp:link:message-size-exceeded`."""
REQUEST: Final = _MIB
"""The max-message-size of a `$cbs` or `$management` link attached later: the same as for other links."""
REQUEST_ITEMS: Final = 1024
"""Values in a request. A usual one has about 30. More are rejected with `amqp:decode-error`: each costs about a
microsecond."""
LINKS_WITHOUT_TOKEN: Final = 16
"""`$cbs` links at a time before there is a token. Clients use two. More are refused with
`amqp:resource-limit-exceeded`; all other links are refused anyway."""
ANSWERS_WITHOUT_TOKEN: Final = 256 * _KIB
"""Answers that wait for credit, on all links together: an answer repeats the request's message id, so it may be as
large as that. Beyond it the link is detached with `amqp:resource-limit-exceeded`."""
ANSWERS: Final = 4 * _MIB
"""The same with a token: four of the largest, or about a hundred for a hub with 1024 partitions."""

# ------------------------------------------------------------------------------------------------- messages

ANNOTATION_ITEMS: Final = 128 * _KIB
"""Values in the annotations of one message, summed over a batch's events: keys and values, including those inside lists
and maps. They are decoded, or walked, on the event loop, in one or two microseconds each. A MiB of events with
realistic annotations has about 80,000; it could hold a million. More are rejected with `amqp:decode-error`. Azure
documents no such limit, and none is known."""
UNFINISHED: Final = 256 * _MIB
"""Partly received messages: a client that sends to 256 partitions may send an event of 1 MiB to each
at once, frame by frame in turn. Beyond it the link is detached with `amqp:resource-limit-exceeded`."""
_UNFINISHED_LARGEST: Final = 64
"""For emulators with a larger limit than 1 MiB: how many messages of the largest size may arrive at once."""


def without_token() -> ConnectionLimits:
    """Return the engine's limits for a connection without a token.

    Unfinished: four of the largest requests. Kept: some 400 links, of a client that attaches them without waiting for
    the answer to its token. The engine reads them before the token is looked at.
    """
    return ConnectionLimits(unfinished=4 * REQUEST_WITHOUT_TOKEN, kept=4 * _MIB)


def with_token(max_message_size: int) -> ConnectionLimits:
    """Return the engine's limits for a connection with a token.

    Kept: 5,000 sessions, as many as the channel-max allows, with a link each.
    """
    return ConnectionLimits(unfinished=max(UNFINISHED, _UNFINISHED_LARGEST * max_message_size), kept=64 * _MIB)


# ----------------------------------------------------------------------------------------------- WebSockets

WEBSOCKET_MESSAGE: Final = _MIB + MAX_FRAME_SIZE
"""One WebSocket message. Its boundaries mean nothing to AMQP: most clients put a frame into each, eventpump 256 KiB at
most; a client that puts all frames of a 1 MiB event into one is served too. Beyond it the socket is closed with code
1009 (RFC 6455, 7.4.1)."""
