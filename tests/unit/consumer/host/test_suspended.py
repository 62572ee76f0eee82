"""A host on a machine that was suspended."""

from __future__ import annotations

import asyncio

from eventpump.consumer.host.host import HubHost
from eventpump.core.checkpoint import CheckpointPolicy
from eventpump.options.consumer import HostSettings
from eventpump.reports import HostReport, LeaseLost, LoopBlocked, StoreFailed
from eventpump.storage.leases.memory import MemoryLeases, MemoryLeaseStore
from eventpump.testing.transport import FakeHub, FakeTransport
from tests.support.fleet import Record, RecordingProcessor


class Machine:
    """A clock that goes on while the machine is suspended, and the loop with its timers does not."""

    def __init__(self) -> None:
        self.suspended = 0.0

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time() + self.suspended

    def time(self) -> float:
        return 1.7e9 + self.monotonic()


async def test_host_suspended_beyond_its_leases_gives_them_up() -> None:
    """Once awake it notes at the next renewal that its leases ran out, whatever its timers say."""
    hub, clock, record = FakeHub(partitions=4), Machine(), Record()
    reports: list[HostReport] = []
    host = HubHost(
        lambda: FakeTransport(hub),
        MemoryLeaseStore(MemoryLeases(), lease_duration=30.0, clock=clock),
        HostSettings(hub=hub.name, owner_id="a", renew_interval=10.0),
        RecordingProcessor(record),
        hooks=[reports.append],
        clock=clock,
    )
    run = asyncio.create_task(host.run())
    await asyncio.sleep(100)
    clock.suspended += 3600
    await asyncio.sleep(11)
    assert len([each for each in reports if isinstance(each, LeaseLost)]) == 4
    assert not [each for each in reports if isinstance(each, StoreFailed)]
    await asyncio.sleep(30)
    assert {each.partition_id for each in host.partitions if each.is_attached} == set("0123")
    await host.aclose()
    await run


async def test_suspension_during_a_step_is_not_reported_as_a_blocked_loop() -> None:
    """What stands still with the whole machine is not reported as a handler that blocks the event loop."""
    hub, clock, record = FakeHub(partitions=1), Machine(), Record()
    reports: list[HostReport] = []

    async def suspend(context: object, events: object) -> None:
        clock.suspended += 3600

    hub.publish("0", "event")
    host = HubHost(
        lambda: FakeTransport(hub),
        MemoryLeaseStore(MemoryLeases(), lease_duration=30.0, clock=clock),
        HostSettings(hub=hub.name, owner_id="a", checkpoint_policy=CheckpointPolicy(every_events=1), max_batch_size=1),
        RecordingProcessor(record, on_events=suspend),
        hooks=[reports.append],
        clock=clock,
    )
    run = asyncio.create_task(host.run())
    await asyncio.sleep(15)
    assert set(record.numbers("0")) == {0}
    assert not [each for each in reports if isinstance(each, LoopBlocked)]
    await host.aclose()
    await run
