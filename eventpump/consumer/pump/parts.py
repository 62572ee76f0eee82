"""The parts of one pump that deliver together: they are made at once, and live as long as it does."""

from __future__ import annotations

from dataclasses import dataclass

from eventpump.consumer.calls.handler import HandlerRunner
from eventpump.consumer.lease.ownership import Ownership
from eventpump.consumer.processor import PartitionContext
from eventpump.consumer.pump.failing import FailureHandling
from eventpump.consumer.pump.requests import Requests
from eventpump.telemetry.interface import PartitionTelemetry


@dataclass(frozen=True, slots=True, eq=False)
class PumpParts:
    """What everything that delivers the events of one pump needs; nothing is recorded without telemetry."""

    ownership: Ownership
    runner: HandlerRunner
    context: PartitionContext
    requests: Requests
    failing: FailureHandling
    telemetry: PartitionTelemetry | None
