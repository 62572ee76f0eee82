"""The trace context of an event: the application properties that carry it, in the form of W3C's Trace Context."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from eventpump.errors import EventError
from eventpump.eventhubs.events import ReceivedEvent

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
DIAGNOSTIC_ID: Final = "Diagnostic-Id"
"""What older .NET clients and Azure Functions write in place of `traceparent`, with the same text."""

MOST_LINKS: Final = 128
"""The most links of a span: what SDKs keep by default."""

_match: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})").fullmatch
_match_later: Final = re.compile(
    r"(?!00|ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.DOTALL
).fullmatch
"""Of a later version of the form, which may have more at its end."""


_FLAGS: Final = {f"{flags:02x}": flags for flags in range(256)}
_made: Final = tuple.__new__
"""Makes a named tuple without a call of its own constructor, which takes three times as long."""


class EventContext(NamedTuple):
    """The span in which an event was created or sent: numbers of 128 and 64 bits; bit 0 of the flags is "sampled"."""

    trace_id: int
    span_id: int
    flags: int
    state: str


class EventLink(NamedTuple):
    """A context and when the first event that came with it was enqueued, in seconds since the epoch, if known."""

    context: EventContext
    enqueued: float | None


def parsed(traceparent: str, state: str = "") -> EventContext | None:
    """Return the context that a `traceparent` has; None if it is not of that form."""
    match = _match(traceparent) or _match_later(traceparent)
    if match is None:
        return None
    trace, span, flags = match.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if not trace_id or not span_id:
        return None
    return _made(EventContext, (trace_id, span_id, _FLAGS[flags], state))


def formatted(context: EventContext) -> str:
    """Return the `traceparent` of a context."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.flags:02x}"


def texts_of(properties: Mapping[Any, Any] | None) -> tuple[str, str] | None:
    """Return the `traceparent` and the `tracestate` of application properties; None if there is no `traceparent`."""
    if not properties:
        return None
    parent = properties.get(TRACEPARENT) or properties.get(DIAGNOSTIC_ID)
    if parent is None:
        return None
    state = properties.get(TRACESTATE)
    return parent if type(parent) is str else _text(parent), "" if state is None else _text(state)


def _text(value: object) -> str:
    """Return a property as text. Some clients send it as AMQP binary."""
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(value)


def links_of(events: Iterable[ReceivedEvent]) -> list[EventLink]:
    """Return the contexts of received events: each one once, the first `MOST_LINKS`."""
    found: set[tuple[str, str]] = set()
    links: list[EventLink] = []
    name, old_name, state_name = TRACEPARENT, DIAGNOSTIC_ID, TRACESTATE  # faster to read in the loop
    for event in events:
        try:
            properties = event.properties
        except EventError:
            continue
        # Most events have none of these, and cost no call.
        if not properties or (name not in properties and old_name not in properties):
            continue
        parent = properties.get(name)
        texts = (
            (parent, "") if type(parent) is str and parent and state_name not in properties else texts_of(properties)
        )
        if texts is None or texts in found:
            continue
        found.add(texts)
        context = parsed(*texts)
        if context is not None:
            links.append(_made(EventLink, (context, enqueued(event))))
            if len(links) == MOST_LINKS:
                break
    return links


def enqueued(event: ReceivedEvent) -> float | None:
    """Return when an event was enqueued, in seconds since the epoch; None if that cannot be read."""
    try:
        return event.enqueued_time.timestamp()
    except EventError:
        return None
