"""What one delivery of one event takes, and one send of one event, counted and not timed."""

from __future__ import annotations

import asyncio
import resource
import sys
from asyncio import events
from collections import Counter
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import eventpump
from benchmarks.sides.allocations import Allocations
from eventpump import (
    EventData,
    EventProcessor,
    EventProcessorHost,
    EventProducer,
    MemoryLeaseStore,
    PartitionContext,
    ReceivedEvent,
)

_HERE = __file__
_PACKAGE = str(eventpump.__path__[0])

_COUNTED: dict[CodeType, str] = {
    events.Handle._run.__code__: "callbacks",  # noqa: SLF001 - it is what runs each
    events.TimerHandle.__init__.__code__: "timers made",
    events.TimerHandle.cancel.__code__: "timers cancelled",
}


class _Calls:
    """Counts calls of functions between `begin` and `end`."""

    def __init__(self) -> None:
        self._functions: Counter[CodeType] = Counter()
        self._of_c = 0

    def begin(self) -> None:
        """Count from here on."""
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._functions[frame.f_code] += 1
        elif event == "c_call":
            self._of_c += 1

    def end(self) -> Counter[str]:
        """Return how many there were: of Python, of C, in each place, and of some of the event loop's functions."""
        sys.setprofile(None)
        found = Counter({"calls of C functions": self._of_c})
        for code, number in self._functions.items():
            if code.co_filename == _HERE:
                continue
            found["calls"] += number
            found[f"in {_place(code)}"] += number
            if code in _COUNTED:
                found[_COUNTED[code]] += number
        return found


class _Counting(EventProcessor):
    """Reads nothing; counts deliveries, and ends a phase after so many.

    Args:
        phases: How many deliveries each phase has: warming up, context switches, calls.
    """

    def __init__(self, phases: Sequence[int]) -> None:
        self._left = list(phases)
        self._phase = 0
        self.ends = [asyncio.Event() for _ in phases]

    async def process_events(self, context: PartitionContext, events: Sequence[ReceivedEvent]) -> None:
        if self._phase == len(self._left):
            return
        self._left[self._phase] -= 1
        if not self._left[self._phase]:
            self.ends[self._phase].set()
            self._phase += 1


def _place(code: CodeType) -> str:
    """Return where a function belongs: a module of the package, or a package of Python's."""
    path = code.co_filename
    if path.startswith(_PACKAGE):
        return path.removeprefix(_PACKAGE).strip("/").removesuffix(".py")
    return "asyncio" if "/asyncio/" in path else "ssl" if path.endswith("/ssl.py") else "others"


async def delivery(connection_string: str, hub: str, deliveries: int, options: dict[str, Any]) -> dict[str, float]:
    """Count what so many deliveries take, of events that come one by one.

    Args:
        deliveries: Of each of the four phases.
        options: Of the connection.

    Returns:
        Per delivery: `switches` (voluntary context switches), `allocations`, `calls` of Python functions, `calls of C
        functions`, `callbacks` of the event loop, `timers made`, `timers cancelled`; and `in PLACE`, the calls of
        Python functions by module of the package, asyncio or ssl.
    """
    processor = _Counting([deliveries] * 4)
    allocations = Allocations()
    host = EventProcessorHost(
        connection_string, hub, processor=processor, lease_store=MemoryLeaseStore(), failure_policy="stop", **options
    )
    calls = _Calls()

    async with host:
        running = asyncio.create_task(host.run())
        await processor.ends[0].wait()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        await processor.ends[1].wait()
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        allocations.begin()
        await processor.ends[2].wait()
        allocated = allocations.end()
        calls.begin()
        await processor.ends[3].wait()
        found = calls.end()
        host.stop()
        await running
    found |= Counter({"switches": switches, "allocations": allocated})
    return {name: number / deliveries for name, number in found.items()}


async def send(
    connection_string: str, hub: str, deliveries: int, idempotent: bool, options: dict[str, Any]
) -> dict[str, float]:
    """Count what so many sends of one event take, each after the one before is stored.

    Args:
        deliveries: How many sends, of each of the four phases.
        idempotent: Whether they are idempotent.
        options: Of the connection.

    Returns:
        The figures of `delivery`, per send.
    """
    event = EventData(b"x" * 1024)
    allocations, calls = Allocations(), _Calls()
    async with EventProducer(connection_string, hub, idempotent=idempotent, **options) as producer:

        async def send_all() -> None:
            for _ in range(deliveries):
                await producer.send(event if not idempotent else EventData(event.body), partition_id="0")

        await send_all()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        await send_all()
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        allocations.begin()
        await send_all()
        allocated = allocations.end()
        calls.begin()
        await send_all()
        found = calls.end()
    found |= Counter({"switches": switches, "allocations": allocated})
    return {name: number / deliveries for name, number in found.items()}
