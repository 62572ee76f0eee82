"""OpenTelemetry: spans, links and metrics of hosts, readers and producers. Needs the extra `eventpump[otel]`."""

from typing import TYPE_CHECKING

from eventpump import homes

if TYPE_CHECKING:
    from eventpump.telemetry.telemetry import Telemetry as Telemetry
else:  # to checkers it would mean that every name exists
    __all__, __getattr__, __dir__ = homes.public(__name__, {"telemetry.telemetry": "Telemetry"})
