"""What all pumps of a host share: its connections, its store, its options and its limits."""

from __future__ import annotations

import random
from dataclasses import dataclass

from eventpump.consumer.bounds.limits import BoundedLeaseStore
from eventpump.consumer.bounds.loop_gate import LoopGate
from eventpump.consumer.lease.parking import Parking
from eventpump.core.budget import BufferBudget
from eventpump.interfaces import Clock, ConsumerScope, HubDirectory, Transport
from eventpump.options.consumer import HostSettings
from eventpump.reports import Reporter
from eventpump.storage.groups import GroupRecords
from eventpump.telemetry.interface import ConsumerTelemetry


@dataclass(frozen=True, slots=True)
class HostServices:
    """What all pumps of a host share.

    Attributes:
        store_timeout: Seconds for one call of the store, once it is sent.
        blocked_after: Seconds; a longer standstill of the event loop is reported.
        loop_gate: Holds deliveries back while handlers compute and the store needs the loop.
        renew_interval: Seconds between renewals.
        parking: Stores events elsewhere that cannot be processed.
        budget: The bytes that all links of the host may hold.
        telemetry: Records what the host does; None if nothing is recorded.
    """

    transport: Transport
    directory: HubDirectory
    store: BoundedLeaseStore
    group: GroupRecords
    settings: HostSettings
    scope: ConsumerScope
    owner_id: str
    clock: Clock
    rng: random.Random
    reporter: Reporter
    store_timeout: float
    blocked_after: float
    loop_gate: LoopGate
    renew_interval: float
    parking: Parking
    budget: BufferBudget
    telemetry: ConsumerTelemetry | None = None
