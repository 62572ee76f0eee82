"""Parked events: events that could not be processed, in another hub, with where they came from and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from eventpump.amqp.types import Timestamp
from eventpump.errors import EventError
from eventpump.eventhubs.events import EventData, ReceivedEvent, copy_of

_PREFIX: Final = "eventpump.parked."

_MESSAGE_LENGTH: Final = 1024
"""Characters of an error's text that are kept: the properties must leave room for the event."""


@dataclass(frozen=True, slots=True)
class Parked:
    """Why an event is parked, and where it came from: its application properties, each with the prefix of these names.

    Hub, partition and sequence number identify it: an event that is parked again after a crash has the same ones.

    Args:
        error: The class of the error that it failed with.
        message: The text of that error, its first 1,024 characters.
        attempts: How many times it was delivered in vain.
        first_failed: When it failed first, alone or in its batch; to the millisecond.
        offset: Its offset; None if the message has none that can be read.
        sequence_number: Its sequence number; None likewise.
    """

    error: str
    message: str
    hub: str
    partition: str
    consumer_group: str
    attempts: int
    first_failed: datetime
    host: str
    offset: str | None = None
    sequence_number: int | None = None

    @classmethod
    def of(cls, event: ReceivedEvent, error: Exception, **facts: Any) -> Parked:
        """Return the facts of an event, of what it failed with, and all that these do not say."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        # Without lone surrogates, which AMQP cannot encode.
        message = str(error)[:_MESSAGE_LENGTH].encode(errors="backslashreplace").decode()
        try:
            return cls(name, message, offset=event.offset, sequence_number=event.sequence_number, **facts)
        except EventError:
            return cls(name, message, **facts)

    def added_to(self, event: ReceivedEvent) -> EventData:
        """Return an event to send: body, properties, key and message id are those of the received one.

        A message that cannot be decoded becomes the body, as it was received.
        """
        try:
            copy = copy_of(event)
        except EventError:
            copy = EventData(event.raw)
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                copy.properties[_PREFIX + field.name] = value
        return copy


def parked_facts(event: ReceivedEvent) -> Parked | None:
    """Return why an event was parked; None if it was not, or its properties are not those of a parked event."""
    given: Mapping[str, Any] = event.properties
    values: dict[str, Any] = {field.name: given.get(_PREFIX + field.name) for field in fields(Parked)}
    if isinstance(values["first_failed"], Timestamp):
        values["first_failed"] = values["first_failed"].to_datetime()
    kinds = {"attempts": int, "sequence_number": int | None, "offset": str | None, "first_failed": datetime}
    if not all(isinstance(value, kinds.get(name, str)) for name, value in values.items()):
        return None
    return Parked(**values)
