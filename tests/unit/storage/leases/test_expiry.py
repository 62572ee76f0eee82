"""When a lease in a file counts as expired, whatever was done to clocks: set, suspended, rebooted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eventpump.interfaces import Clock, MachineClock
from eventpump.storage.leases.expiry import Expiry, ExpiryJudge


class WallClock:
    """A clock without a boot: a plain `Clock`."""

    def __init__(self, wall: float = 1_700_000_000.0, now: float = 100.0) -> None:
        self.wall = wall
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall

    def run(self, seconds: float) -> None:
        self.wall += seconds
        self.now += seconds


class BootClock(WallClock):
    """A clock with a boot; its time is one with `monotonic` here."""

    def __init__(self, boot_id: str | None = "boot-1", wall: float = 1_700_000_000.0, now: float = 100.0) -> None:
        super().__init__(wall, now)
        self._boot_id = boot_id

    @property
    def boot_id(self) -> str | None:
        return self._boot_id

    def boot_time(self) -> float:
        return self.now


def look(judge: ExpiryJudge, clock: Clock, expiry: Expiry, token: str = "t") -> bool:
    return judge.is_held("0", token, expiry, clock.monotonic())


def test_lease_without_a_token_is_free() -> None:
    """A lease without an owner is not held, whatever its expiry says."""
    clock = BootClock()
    judge = ExpiryJudge(clock)
    assert not judge.is_held("0", None, judge.expiry_in(30), clock.monotonic())


@pytest.mark.parametrize("step", [-3600.0, 0.0, 3600.0])
def test_lease_expiry_ignores_changes_of_the_wall_clock(step: float) -> None:
    """Within one boot a lease lives for its duration, to the second, though the clock is set meanwhile."""
    owner, other = BootClock(), BootClock()
    expiry, judge = ExpiryJudge(owner).expiry_in(30), ExpiryJudge(other)
    other.wall += step
    other.run(29.9)
    assert look(judge, other, expiry)
    other.run(0.1)
    assert not look(judge, other, expiry)


def test_lease_of_a_former_boot_is_free_after_one_duration() -> None:
    """A lease of a former boot that the wall clock would keep for hours is free once unchanged for its duration."""
    expiry = ExpiryJudge(BootClock("boot-1", now=50_000.0)).expiry_in(60)
    after = BootClock("boot-2", wall=1_700_000_000.0 - 3600, now=5.0)
    judge = ExpiryJudge(after)
    assert look(judge, after, expiry)
    after.run(59.9)
    assert look(judge, after, expiry)
    after.run(0.2)
    assert not look(judge, after, expiry)


def test_lease_of_a_former_boot_expired_by_the_wall_clock_is_free() -> None:
    """A lease of a former boot that has expired by the wall clock is free at once."""
    expiry = ExpiryJudge(BootClock("boot-1")).expiry_in(30)
    after = BootClock("boot-2", wall=1_700_000_030.0, now=5.0)
    assert not look(ExpiryJudge(after), after, expiry)


def test_lease_renewed_under_another_boot_is_kept() -> None:
    """A container may have a boot id of its own: what its owner renews is never taken for a dead boot's."""
    owner, other = BootClock("boot-1"), BootClock("boot-2", wall=1_700_000_000.0 - 3600)
    renewing, judge = ExpiryJudge(owner), ExpiryJudge(other)
    expiry = renewing.expiry_in(30)
    for turn in range(100):
        if turn % 3 == 0:
            expiry = renewing.expiry_in(30)
        assert look(judge, other, expiry)
        owner.run(5)
        other.run(5)


def test_watch_spans_from_after_the_first_reading_to_before_the_last() -> None:
    """A renewal that fell between a reading and its judgement does not shorten the watch."""
    expiry = ExpiryJudge(BootClock("boot-1")).expiry_in(30)
    other = BootClock("boot-2", wall=1_700_000_000.0 - 3600)
    judge = ExpiryJudge(other)
    began = other.monotonic()
    other.run(10)
    assert judge.is_held("0", "t", expiry, began)
    began = other.monotonic()
    other.run(25)
    assert judge.is_held("0", "t", expiry, began + 5)
    other.run(5)
    assert judge.is_held("0", "t", expiry, other.monotonic() - 0.1)
    assert not judge.is_held("0", "t", expiry, other.monotonic())


def test_watch_is_kept_per_owner_and_partition() -> None:
    """A change of owner, and another partition, begin a watch of their own."""
    expiry = ExpiryJudge(BootClock("boot-1")).expiry_in(30)
    other = BootClock("boot-2", wall=1_700_000_000.0 - 3600)
    judge = ExpiryJudge(other)
    assert judge.is_held("0", "t", expiry, other.monotonic())
    other.run(30)
    assert judge.is_held("0", "another", expiry, other.monotonic())
    assert judge.is_held("1", "t", expiry, other.monotonic())
    assert judge.is_held("0", "t", expiry, other.monotonic())


def test_lease_of_an_earlier_version_goes_by_the_wall_clock() -> None:
    """Where the duration is not known there is nothing to watch for: the wall clock decides, as it did."""
    clock = BootClock()
    judge, expiry = ExpiryJudge(clock), Expiry(clock.wall + 30)
    for _ in range(10):
        assert look(judge, clock, expiry)
        clock.run(60)
        clock.wall -= 60
    clock.wall += 30
    assert not look(judge, clock, expiry)


@pytest.mark.parametrize("clock", [WallClock(), BootClock(None)])
def test_lease_without_a_boot_goes_by_wall_clock_and_watch(clock: WallClock) -> None:
    """A clock of one's own, or a system that names no boot: set back, the clock costs one duration and no more."""
    judge = ExpiryJudge(clock)
    expiry = judge.expiry_in(30)
    assert (expiry.boot_id, expiry.duration) == (None, 30)
    assert look(judge, clock, expiry)
    clock.run(29.9)
    assert look(judge, clock, expiry)
    assert not look(judge, clock, replace(expiry, wall=clock.wall))
    clock.wall -= 3600
    assert look(judge, clock, expiry)
    clock.run(30)
    assert not look(judge, clock, expiry)


def test_machine_clock_is_only_one_with_a_boot() -> None:
    """What a store asks a clock for is there, or the clock is a plain one."""
    assert isinstance(BootClock(), MachineClock)
    assert not isinstance(WallClock(), MachineClock)
