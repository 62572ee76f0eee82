"""The trace contexts of events: which texts are one, and which of them a span is linked to."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from eventpump.eventhubs.events import ReceivedEvent
from eventpump.telemetry.contexts import MOST_LINKS, EventContext, formatted, links_of, parsed
from tests.support.telemetry import PARENT, TRACE

_NOON = datetime(2026, 11, 24, 12, tzinfo=UTC)


def _event(**properties: Any) -> ReceivedEvent:
    named = {name.replace("_", "-"): value for name, value in properties.items()}
    return ReceivedEvent.build(b"", offset="1", sequence_number=1, enqueued_time=_NOON, properties=named)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "|a.b.",
    ],
)
def test_text_of_another_form_is_no_context(text: str) -> None:
    """The form is that of W3C's Trace Context; an id of zeros is none."""
    assert parsed(text) is None


@pytest.mark.parametrize("version", ["00", "01"])
def test_context_is_read_and_written_alike(version: str) -> None:
    """A later version may have more after the flags, and is read by what is known."""
    text = f"{version}-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01{'-x' if version != '00' else ''}"
    context = parsed(text, "vendor=1")
    assert context == EventContext(TRACE, 0xB7AD6B7169203331, 1, "vendor=1")
    assert formatted(context) == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("value", [PARENT.format(5), PARENT.format(5).encode()])
@pytest.mark.parametrize("name", ["traceparent", "Diagnostic_Id"])
def test_context_of_an_event_is_text_or_binary_and_may_have_the_old_name(name: str, value: object) -> None:
    """azure-eventhub for Python writes text, and programs that set bytes write binary; older .NET has its own name."""
    (link,) = links_of([_event(**{name: value})])
    assert link.context == EventContext(TRACE, 5, 1, "")
    assert link.enqueued == _NOON.timestamp()


def test_traceparent_comes_before_the_old_name() -> None:
    """An event with both is linked by `traceparent`, with its `tracestate`."""
    event = _event(traceparent=PARENT.format(5), Diagnostic_Id=PARENT.format(6), tracestate="a=b")
    assert [link.context for link in links_of([event])] == [EventContext(TRACE, 5, 1, "a=b")]


def test_shared_context_is_linked_once_and_the_first_128() -> None:
    """Events without a context, with one that cannot be read, or that cannot be decoded at all, have no link."""
    events = [_event(traceparent=PARENT.format(1 + number // 2)) for number in range(400)]
    events[1:1] = [_event(), _event(traceparent="wrong"), _event(traceparent=7), ReceivedEvent(b"\x00")]
    found = [link.context.span_id for link in links_of(events)]
    assert found == list(range(1, MOST_LINKS + 1))
