"""The trace of a connection: what is called with each frame, and a frame's performative as text without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from eventpump.amqp import performatives as p
from eventpump.amqp.types import Described
from eventpump.texts import excerpt


class Trace(Protocol):
    """Called by a connection for each frame, in the order of the stream. Must neither block nor raise."""

    def frame(self, channel: int, performative: p.Composite | None, payload_size: int = 0, *, is_sent: bool) -> None:
        """Called with one frame.

        Args:
            performative: What the frame holds; None for a heartbeat. A received one is not checked yet.
            payload_size: The bytes that follow a transfer.
        """

    def transfers(self, channel: int, handle: int, count: int, size: int, *, is_sent: bool) -> None:
        """Called with transfer frames of one link that were handled together."""


_SHOWN: Final[dict[type[p.Composite], tuple[str, ...]]] = {
    p.Open: ("container_id", "hostname", "max_frame_size", "channel_max", "idle_time_out"),
    p.Begin: ("remote_channel", "next_outgoing_id", "incoming_window", "outgoing_window", "handle_max"),
    p.Attach: (
        *("name", "handle", "role", "snd_settle_mode", "rcv_settle_mode", "source", "target"),
        *("initial_delivery_count", "max_message_size", "properties"),
    ),
    p.Flow: (
        *("next_incoming_id", "incoming_window", "next_outgoing_id", "outgoing_window", "handle"),
        *("delivery_count", "link_credit", "drain", "echo"),
    ),
    p.Transfer: ("handle", "delivery_id", "message_format", "settled", "more", "aborted"),
    p.Disposition: ("role", "first", "last", "settled", "state"),
    p.Detach: ("handle", "closed", "error"),
    p.End: ("error",),
    p.Close: ("error",),
    p.SaslMechanisms: ("sasl_server_mechanisms",),
    p.SaslInit: ("mechanism", "hostname"),
    p.SaslOutcome: ("code",),
}
"""The fields that are shown. A list of what may be shown, so that a field that holds a credential never is."""


def describe(performative: p.Composite) -> str:
    """Return a performative as text on one line, without anything that can hold a credential or a user's data.

    Fields that are null or false are omitted. Of link properties, only numbers are shown with their values.
    """
    parts = [type(performative).__name__.lower()]
    for name in _SHOWN.get(type(performative), ()):
        value = getattr(performative, name)
        if name == "role":
            parts.append("role=receiver" if value else "role=sender")
        elif value is not None and value is not False:
            parts.append(f"{name}={_text(value)}")
    return " ".join(parts)


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value)
        case int():
            return str(int(value))
        case str():
            return f"'{excerpt(str(value))}'"
        case p.Source() | p.Target():
            criteria = (getattr(value, "filter", None) or {}).values()
            texts = [each.value for each in criteria if isinstance(each, Described) and isinstance(each.value, str)]
            return " where ".join([_text(value.address), *map(_text, texts)])
        case p.AmqpError():
            return f"{excerpt(str(value.condition))} {_text(value.description or '')}"
        case p.Rejected(error) if error is not None:
            return f"rejected({_text(error)})"
        case p.Composite():
            return type(value).__name__.lower()
        case Mapping():
            numbers = {key: f"={int(each)}" for key, each in value.items() if isinstance(each, int)}
            return excerpt(",".join(f"{key}{numbers.get(key, '')}" for key in value if isinstance(key, str)))
        case list():
            return excerpt(",".join(str(each) for each in value if isinstance(each, str)))
        case _:
            return type(value).__name__  # a peer may send anything as an address
