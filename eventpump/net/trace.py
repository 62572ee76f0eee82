"""The debug log of frames: one line per performative that a connection sends or receives."""

from __future__ import annotations

import itertools
import logging
from typing import Final

from eventpump.amqp.connection import Connection, Role
from eventpump.amqp.performatives import Attach, Composite, Detach, End
from eventpump.amqp.trace import describe
from eventpump.texts import excerpt

_log = logging.getLogger("eventpump.amqp")
"""Named after the engine, which has no logger of its own: its frames can be enabled apart from the rest."""
_NUMBERS: Final = itertools.count(1)


class FrameLog:
    """Logs the frames of one end of a connection whose log is on: an `eventpump.amqp.trace.Trace`."""

    __slots__ = ("_names", "_number", "_role")

    def __init__(self, role: Role) -> None:
        self._role = role.value
        self._number = next(_NUMBERS)
        # By direction, channel and handle: what each end calls the links that it has attached.
        self._names: dict[tuple[bool, int, int], str] = {}

    def frame(self, channel: int, performative: Composite | None, payload_size: int = 0, *, is_sent: bool) -> None:
        name: str | None = None
        text = "heartbeat" if performative is None else describe(performative)
        if isinstance(performative, Attach):
            name = self._names[is_sent, channel, performative.handle] = excerpt(performative.name)
        elif isinstance(handle := getattr(performative, "handle", None), int):
            take = self._names.pop if isinstance(performative, Detach) else self._names.get
            name = take((is_sent, channel, handle), None)
            text += "" if name is None else f" link='{name}'"
        elif isinstance(performative, End):
            self._names = {key: name for key, name in self._names.items() if key[:2] != (is_sent, channel)}
        size = f" payload={payload_size}" if payload_size else ""
        self._line(f"channel={channel} {text}{size}", name, is_sent)

    def transfers(self, channel: int, handle: int, count: int, size: int, *, is_sent: bool) -> None:
        name = self._names.get((is_sent, channel, handle))
        text = f"channel={channel} transfer handle={handle} count={count} payload={size}"
        self._line(text if name is None else f"{text} link='{name}'", name, is_sent)

    def _line(self, text: str, link: str | None, is_sent: bool) -> None:
        fields: dict[str, object] = {"connection": self._number}
        if link is not None:
            fields["link"] = link
        _log.debug("%s connection %d %s %s", self._role, self._number, ">" if is_sent else "<", text, extra=fields)


def trace_frames(connection: Connection) -> None:
    """Have a connection's frames logged, if the log of frames is on now. Later changes of the level do not count."""
    if _log.isEnabledFor(logging.DEBUG):
        connection.trace = FrameLog(connection.role)
