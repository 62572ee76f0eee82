"""The subscriptions of one host: names, processors and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from eventpump.consumer.opening import GroupStart
from eventpump.consumer.processor import ProcessorSource
from eventpump.options.consumer import HostSettings

DEFAULT_SUBSCRIPTION: Final = "default"
"""The name of the subscription whose processor is given to the host itself."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A name, and what processes its events on this host.

    Attributes:
        name: The name.
        settings: The options of the host, with those of the subscription in their place.
        source: Creates its processors.
        start: Where its partitions begin.
    """

    name: str
    settings: HostSettings
    source: ProcessorSource
    start: GroupStart
