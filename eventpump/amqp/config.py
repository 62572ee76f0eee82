"""What one end of a connection offers and allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eventpump.amqp.limits import ConnectionLimits

MIN_IDLE_TIME_OUT = 20
"""Milliseconds; a peer that asks for more heartbeats than this gives is refused: more than a hundred a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """What this end offers and allows.

    Args:
        idle_timeout: Seconds of silence after which the peer counts as dead; half of it is advertised (2.4.5).
        max_message_size: Bytes; bounds arriving messages on links that advertise no limit of their own.
        min_idle_time_out: Milliseconds; a peer whose open asks for a shorter idle time-out is refused (2.4.5). It
            bounds how often a peer can make this end send heartbeats: every half of it.
        max_sent_frame_size: Bytes of the largest frame that is sent, however large the peer's may be: frames of several
            MiB would only cost memory at both ends.
        outgoing_window: What begins and flows state as the outgoing window; None for as many transfers as the peer's
            incoming window leaves, which needs the peer's begin.
        first_transfer_id: The id of the first transfer of a session, its begin's next-outgoing-id (2.5.6).
        limits: How much of what the peer sends is held for it, over all links.
        weigh: Returns what it costs to handle a whole message, as a number of plain transfers of at least 1; None where
            each costs the same. See `Connection.receive`.
        enforce_credit: Detach a link whose sender exceeds its credit, as 2.6.7 has it; some peers need leniency.
        mechanism: Client: the SASL mechanism to use.
        initial_response: Client: its initial response; never shown.
        mechanisms: Server: the SASL mechanisms to offer, in order.
        greeting: Server: the additional data of a SASL outcome that accepts.
        requires_sasl: Server: refuse a client that begins with the AMQP header, without SASL (2.2). It has no identity.
    """

    container_id: str
    hostname: str | None = None
    max_frame_size: int = 1024 * 1024
    max_sent_frame_size: int = 4 * 1024 * 1024
    channel_max: int = 255
    handle_max: int = 1023
    incoming_window: int = 65_535
    outgoing_window: int | None = 65_535
    first_transfer_id: int = 0
    idle_timeout: float | None = 60.0
    min_idle_time_out: int = MIN_IDLE_TIME_OUT
    max_message_size: int = 64 * 1024 * 1024
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    weigh: Callable[[bytes], int] | None = None
    enforce_credit: bool = True
    properties: Mapping[str, Any] = field(default_factory=dict)
    mechanism: str = "ANONYMOUS"
    initial_response: bytes = field(default=b"", repr=False)
    mechanisms: tuple[str, ...] = ("MSSBCBS", "PLAIN", "ANONYMOUS", "EXTERNAL")
    greeting: bytes | None = None
    requires_sasl: bool = True
