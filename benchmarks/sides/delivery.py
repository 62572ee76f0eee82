"""What one delivery of one event takes, counted and not timed."""

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
from eventpump import EventProcessor, EventProcessorHost, MemoryLeaseStore, PartitionContext, ReceivedEvent

_HERE = __file__
_PACKAGE = str(eventpump.__path__[0])

_COUNTED: dict[CodeType, str] = {
    events.Handle._run.__code__: "callbacks",  # noqa: SLF001 - it is what runs each
    events.TimerHandle.__init__.__code__: "timers made",
    events.TimerHandle.cancel.__code__: "timers cancelled",
}


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
    functions: Counter[CodeType] = Counter()
    of_c = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal of_c
        if event == "call":
            functions[frame.f_code] += 1
        elif event == "c_call":
            of_c += 1

    async with host:
        running = asyncio.create_task(host.run())
        await processor.ends[0].wait()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        await processor.ends[1].wait()
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        allocations.begin()
        await processor.ends[2].wait()
        allocated = allocations.end()
        sys.setprofile(profile)
        await processor.ends[3].wait()
        sys.setprofile(None)
        host.stop()
        await running
    found: Counter[str] = Counter()
    for code, number in functions.items():
        if code.co_filename == _HERE:
            continue
        found["calls"] += number
        found[f"in {_place(code)}"] += number
        if code in _COUNTED:
            found[_COUNTED[code]] += number
    found |= Counter({"calls of C functions": of_c, "switches": switches, "allocations": allocated})
    return {name: number / deliveries for name, number in found.items()}
