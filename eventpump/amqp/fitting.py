"""What a performative can do without, where it is too large for a frame of the peer's (2.4.1, 2.7.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from eventpump.amqp.performatives import (
    AmqpError,
    Close,
    Composite,
    Detach,
    Disposition,
    End,
    Modified,
    Open,
    Rejected,
)

FRAME_SIZE_TOO_SMALL: Final = "amqp:frame-size-too-small"
"""The condition of what ends because a performative cannot be made small enough (2.8.15)."""
_INTERNAL_ERROR: Final = "amqp:internal-error"
_MARK: Final = "..."


def shorten(performative: Composite, excess: int) -> Composite:
    """Return the performative with less in it, for it to take `excess` bytes less.

    Only what the peer does not depend on is left out: the text and the info of an error, the properties of an open, and
    the annotations of a state that the peer has sent itself. So what is returned may still be too large.
    """
    match performative:
        case Detach(error=AmqpError() as error) | End(error=AmqpError() as error) | Close(error=AmqpError() as error):
            return replace(performative, error=_shorten_error(error, excess))
        case Disposition(state=Rejected(error=AmqpError() as error)):
            return replace(performative, state=Rejected(_shorten_error(error, excess)))
        case Disposition(state=Modified() as state):
            return replace(performative, state=replace(state, message_annotations=None))
        case Open():
            return replace(performative, properties=None)
        case _:
            return performative


def _shorten_error(error: AmqpError, excess: int) -> AmqpError:
    without_info = AmqpError(error.condition, error.description)
    excess -= len(error.encode()) - len(without_info.encode())
    if excess <= 0:
        return without_info
    text = (error.description or "").encode()
    if len(text) >= excess + len(_MARK):
        kept = text[: len(text) - excess - len(_MARK)].decode(errors="ignore")
        return AmqpError(error.condition, kept + _MARK)
    # It is the condition that is too long.
    return AmqpError(_INTERNAL_ERROR, None)
