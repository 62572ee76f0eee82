"""The clock that hosts and stores use: a suspended machine, and virtual time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventpump import clock as clock_module
from eventpump.clock import LoopClock, SuspendedTime, clock_of, reading_of
from eventpump.interfaces import MachineClock
from eventpump.testing.clock import VirtualClock, VirtualTimeLoop


class Machine:
    """A machine's two clocks, of which one stands still while it is suspended."""

    def __init__(self, slept: float = 0.0) -> None:
        self.now = 5_000.0
        self.slept = slept

    def running(self) -> float:
        return self.now

    def counting(self) -> float:
        return self.now + self.slept


class Derived(LoopClock):
    """A clock of a user's."""

    def monotonic(self) -> float:
        return 5.0


def test_suspended_counts_only_suspension() -> None:
    """What passed while the machine ran is no suspension, what passed while it was suspended is, earlier too."""
    machine = Machine(slept=100.0)
    suspended = SuspendedTime(machine.running, machine.counting)
    assert (suspended.since_start, suspended.in_all) == (0.0, 100.0)
    machine.now += 50
    assert (suspended.since_start, suspended.in_all) == (0.0, 100.0)
    machine.slept += 3600
    assert (suspended.since_start, suspended.in_all) == (3600.0, 3700.0)
    machine.now += 50
    assert suspended.since_start == 3600.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.sampled_from([0.0, 0.0, 0.0, 30.0]))))
def test_suspended_is_not_overstated_by_a_slow_reading(steps: list[tuple[float, float, float]]) -> None:
    """However long each reading takes, suspension is never overstated, never shrinks, and is 0 where there was none."""
    machine = Machine()
    delays = iter([0.0] * 100_000)

    def late(read: float) -> float:
        machine.now += next(delays)
        return read

    suspended = SuspendedTime(lambda: late(machine.running()), lambda: late(machine.counting()))
    before = 0.0
    for first, second, slept in steps:
        delays = iter([first, second])
        machine.slept += slept
        found = suspended.since_start
        assert before <= found <= machine.slept + 1e-6
        if machine.slept == 0:
            assert found == 0.0
        before = found


async def test_monotonic_includes_a_suspension(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour of suspension moves the clock by an hour, though the loop's own clock stood still."""
    machine = Machine(slept=7.0)
    monkeypatch.setattr(clock_module, "_SUSPENDED", SuspendedTime(machine.running, machine.counting))
    ours = LoopClock()
    before, boot_before = ours.monotonic(), ours.boot_time()
    machine.slept += 3600
    assert ours.monotonic() - before == 3600
    assert ours.boot_time() - boot_before == 3600
    await asyncio.sleep(10)
    assert ours.monotonic() - before == 3610


async def test_monotonic_without_a_suspension_is_the_loops(clock: VirtualClock) -> None:
    """On a machine that is not suspended meanwhile the clock is the loop's, to the last bit."""
    ours = LoopClock()
    for _ in range(1000):
        assert ours.monotonic() == clock.monotonic()
    before = ours.boot_time()
    await asyncio.sleep(3600)
    assert ours.monotonic() == clock.monotonic()
    assert ours.boot_time() - before == pytest.approx(3600)


async def test_monotonic_without_a_suspension_clock_is_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no clock counts suspension, the loop's is used as it is, and there is no boot to name."""
    monkeypatch.setattr(clock_module, "_SUSPENDED", None)
    ours = LoopClock()
    assert ours.monotonic() == ours.boot_time() == asyncio.get_running_loop().time()
    assert ours.boot_id is None
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert clock_module._suspended_time() is None


_SHOW = """
import asyncio
from eventpump.clock import LoopClock
async def show():
    print(LoopClock().boot_id, "|", LoopClock().boot_time(), flush=True)
asyncio.run(show())
"""


@pytest.mark.real_time
@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="a system without a boot-time clock")
async def test_boot_and_time_are_the_same_for_processes_of_a_machine() -> None:
    """Two processes name the same boot, and read the same time on its clock."""
    ours = LoopClock()
    assert isinstance(ours, MachineClock)
    before = ours.boot_time()
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _SHOW, stdout=subprocess.PIPE, env=os.environ)
    shown, _ = await child.communicate()
    assert child.returncode == 0
    boot_id, _, reported = shown.decode().partition("|")
    assert boot_id.strip() == str(ours.boot_id)
    assert before - 0.01 <= float(reported) <= ours.boot_time() + 0.01
    assert ours.boot_time() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=0.5)


@pytest.mark.real_time
async def test_one_reading_is_as_good_as_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loop of asyncio's, with a suspension and without, one function of the system's reads what the clock says."""
    slept = 7.0
    monkeypatch.setattr(clock_module, "_SUSPENDED", SuspendedTime(time.monotonic, lambda: time.monotonic() + slept))
    ours = LoopClock()
    read, ahead = reading_of(ours)
    derived = Derived()
    assert reading_of(derived) == (derived.monotonic, 0.0)
    for _ in range(2):
        earliest = ours.monotonic()
        found = read() - ahead
        assert earliest - 1 < found < ours.monotonic() + 1
        slept += 3600
    monkeypatch.setattr(clock_module, "_SUSPENDED", None)
    assert reading_of(ours) == (time.monotonic, 0.0)


async def test_other_clocks_and_other_loops_are_read_by_the_clock_itself(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one function cannot read is left to the clock: virtual time, and a clock that is another's or derived."""

    machine = Machine(slept=7.0)
    monkeypatch.setattr(clock_module, "_SUSPENDED", SuspendedTime(machine.running, machine.counting))
    for each in (LoopClock(), Derived(), clock):
        read, ahead = reading_of(each)
        assert (read, ahead) == (each.monotonic, 0.0)
    machine.slept += 3600
    read, _ = reading_of(ours := LoopClock())
    assert read() == ours.monotonic() == clock.monotonic() + 3600


def test_clock_of_a_loop_is_its_own_whoever_defines_it() -> None:
    """A loop of asyncio's is read without the call around its clock; one with a time of its own, by that."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        loop = runner.get_loop()
        assert clock_of(loop) is time.monotonic
        loop.time = lambda: 5.0  # type: ignore[method-assign]  # as programs do for tests
        assert clock_of(loop)() == 5.0
        del loop.time
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert clock_of(runner.get_loop())() == runner.get_loop().time() == 1000.0
