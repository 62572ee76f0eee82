"""Subscriptions that are sought, replayed, paused and drained, on hosts in processes that are killed with SIGKILL.

The same promises as of `tests/faults/histories/rewinds.py`, by the journals that the processes write, the answers that
they give, and what the store itself has witnessed.
"""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.faults.evidence import BEGUN, CLAIMED, OK, PASSED, RESOLUTION, Entry, Witnessed
from tests.faults.programs import TAKE_OVER, Publisher, Stage
from tests.support.processes import ChildEndedError
from tests.ways import over_both

pytestmark = over_both(is_long=True)

START = 15.0
"""Seconds that starting several interpreters may take on a busy machine."""
PARTITIONS = 4
SUBSCRIPTIONS: dict[str, Any] = {
    "alerts": {
        "checkpoint_every": 2,
        "pause": 0.01,
        "fails": 7,
        "options": {"start": "earliest", "catch_up": "shared", "failure_policy": "skip"},
    },
    "archive": {
        "checkpoint_every": 1,
        "pause": 0.02,
        "fails": 13,
        "options": {"start": "earliest", "catch_up": "shared", "failure_policy": "park"},
    },
}
SETTINGS: dict[str, Any] = {"has_default": False, "subscriptions": SUBSCRIPTIONS, "commands": True}


@dataclass
class Asked:
    """What a host was asked for.

    Attributes:
        done: The partitions that it returned; None if it did not return.
        began: When it began, in seconds since the Unix epoch.
        ended: When it ended.
        held: How many events each partition had before the call.
    """

    host: str
    call: str
    name: str
    given: tuple[int, ...]
    held: int
    done: tuple[str, ...] | None = None
    began: float = 0.0
    ended: float = float("inf")


@dataclass
class Judge:
    """Judges one subscription by its journals, and by the checkpoints that the store took."""

    name: str
    entries: Sequence[Entry]
    witnessed: Sequence[Witnessed]
    asked: Sequence[Asked]
    calls: defaultdict[str, list[tuple[float, float, int, str]]] = field(default_factory=lambda: defaultdict(list))
    """By partition: when processing an event began and ended, its number, and the host."""

    def __post_init__(self) -> None:
        begun: dict[tuple[str, str, int], float] = {}
        for entry in self.entries:
            key = (entry.host, entry.partition_id, entry.sequence_number)
            if entry.kind == BEGUN:
                begun[key] = entry.wall
            elif entry.kind in (OK, CLAIMED, PASSED):
                # A call that is killed once its checkpoint is stored had claimed its events.
                self.calls[entry.partition_id].append((begun[key], entry.wall, entry.sequence_number, entry.host))

    def check(self, end: int) -> None:
        """Check each promise.

        Args:
            end: How many events each partition has.
        """
        for partition_id in map(str, range(PARTITIONS)):
            self._check_processed(partition_id, end, float("inf"), self.asked)
        for index, asked in enumerate(self.asked):
            match asked.call, asked.done:
                case _, None:
                    pass
                case "seek", [partition_id]:
                    self._stored_at(asked, partition_id)
                case "replay", [partition_id]:
                    processed = self._processed(partition_id, asked.began, asked.ended, by=asked.host)
                    missing = set(range(asked.given[1], asked.given[2] + 1)) - processed
                    assert not missing, f"{self.name}: {asked} returned, without {sorted(missing)}"
                case "drain", done:
                    for partition_id in done or ():
                        # Not where a seek may have been stored meanwhile.
                        seeks = self._seeks(partition_id)
                        if not any(each.began < asked.ended and each.ended > asked.began for each in seeks):
                            self._check_processed(partition_id, asked.held, asked.ended, self.asked[:index])
                case "pause", done:
                    self._check_paused(asked, done or (), self.asked[index + 1 :])

    def _seeks(self, partition_id: str) -> list[Asked]:
        return [each for each in self.asked if each.call == "seek" and each.given[0] == int(partition_id)]

    def _stored_at(self, seek: Asked, partition_id: str) -> float:
        """Return when a seek that has returned was stored."""
        number = seek.given[1]
        at = [
            each.wall
            for each in self.witnessed
            if (each.partition_id, each.sequence_number) == (partition_id, number - 1)
            and seek.began - RESOLUTION <= each.wall <= seek.ended + RESOLUTION
        ]
        assert at, f"{self.name}: {seek} returned, and nothing is stored"
        return max(at)

    def _processed(self, partition_id: str, since: float, until: float, by: str | None = None) -> set[int]:
        return {
            number
            for began, ended, number, host in self.calls[partition_id]
            if began >= since - RESOLUTION and ended <= until + RESOLUTION and by in (None, host)
        }

    def _check_processed(self, partition_id: str, end: int, until: float, asked: Sequence[Asked]) -> None:
        """Check that every event was processed since the last seek, except those that a seek has passed."""
        since, first = 0.0, 0
        for seek in self._seeks(partition_id):
            if seek not in asked:
                continue
            if seek.done == (partition_id,):
                since, first = self._stored_at(seek, partition_id), seek.given[1]
            elif seek.done is None:
                # Stored or not: the events from the later one of both positions on are processed since then.
                first = max(first, seek.given[1])
        missing = set(range(first, end)) - self._processed(partition_id, since, until)
        problem = f"{len(missing)} not processed from {since} until {until}, such as {sorted(missing)[:5]}"
        assert not missing, f"{self.name}: partition {partition_id}: {problem}"

    def _check_paused(self, pause: Asked, done: Iterable[str], later: Iterable[Asked]) -> None:
        resumes = [each for each in later if (each.call, each.host) == ("resume", pause.host)]
        resumed = min((each.began for each in resumes), default=float("inf"))
        for partition_id in done:
            begun = [each for each in self.entries if each.kind == BEGUN and each.partition_id == partition_id]
            before = bisect_left(begun, pause.ended, key=lambda each: each.wall)
            ours = [each for each in begun[:before] if each.host == pause.host]
            for entry in begun[before:]:
                is_same = bool(ours) and (entry.host, entry.epoch) == (pause.host, ours[-1].epoch)
                assert not is_same or entry.wall >= resumed - RESOLUTION, f"{self.name}: {entry} although {pause}"


class Fleet:
    """Hosts in processes of their own, and what they were asked for.

    Args:
        stage: Of the test.
        rng: Decides what happens.
    """

    def __init__(self, stage: Stage, rng: random.Random) -> None:
        self._stage = stage
        self._rng = rng
        self._hosts: list[str] = []
        self._made = 0
        self._answers: set[asyncio.Task[None]] = set()
        self.asked: list[Asked] = []
        self.end = 0
        """How many events each partition has."""

    async def start(self) -> None:
        """Start another host."""
        name = f"host-{self._made}"
        self._made += 1
        child = await self._stage.start_child(name, **SETTINGS)
        await child.line("subscribed archive")
        self._hosts.append(name)

    async def kill(self) -> None:
        """Kill one, whatever it is doing."""
        victim = self._hosts.pop(self._rng.randrange(len(self._hosts)))
        await self._stage.children[victim].kill()

    async def ask_something(self) -> asyncio.Task[None]:
        """Ask one of the hosts for something."""
        rng = self._rng
        call = rng.choice(("seek", "seek", "seek", "replay", "replay", "pause", "resume", "drain"))
        first = rng.randrange(self.end)
        given = {
            "seek": (rng.randrange(PARTITIONS), first),
            "replay": (rng.randrange(PARTITIONS), first, min(self.end - 1, first + rng.randrange(30))),
        }
        return await self.ask(rng.choice(self._hosts), call, rng.choice(list(SUBSCRIPTIONS)), *given.get(call, ()))

    async def ask(self, host: str, call: str, name: str, *given: int) -> asyncio.Task[None]:
        """Ask a host for something. Return what waits for its answer, or its end."""
        asked = Asked(host, call, name, given, self.end, began=time.time())
        number = len(self.asked)
        self.asked.append(asked)
        child = self._stage.children[host]
        await child.tell(" ".join(map(str, (number, call, name, *given))))

        async def answer() -> None:
            try:
                found = await child.line(f"(done|refused) {number} (.*)")
            except ChildEndedError:
                asked.ended = time.time()
                return
            if found[1] == "done":
                began, ended, *done = found[2].split()
                asked.began, asked.ended, asked.done = float(began), float(ended), tuple(done)
            else:
                # A seek may have been stored before the partition was given up.
                asked.ended = time.time()

        task = asyncio.create_task(answer())
        self._answers.add(task)
        return task

    async def drain(self) -> None:
        """Resume everything, and wait until each subscription has processed all of every partition."""
        for name in SUBSCRIPTIONS:
            reached: set[str] = set()
            while len(reached) < PARTITIONS:
                before = len(self.asked)
                for host in self._hosts:
                    await (await self.ask(host, "resume", name))
                    await (await self.ask(host, "drain", name))
                reached = {each for asked in self.asked[before:] for each in asked.done or ()}
        await asyncio.gather(*self._answers)

    async def stop(self) -> None:
        """Close the hosts in order."""
        for name in self._hosts:
            await self._stage.stop_child(name)


async def test_rewinds_hold_while_hosts_are_killed(stage: Stage, request: pytest.FixtureRequest) -> None:
    """A seek that returned holds for every later owner; replays, drains and pauses are what they say they are."""
    is_long = request.config.getoption("--long")
    rng = random.Random(1)
    fleet = Fleet(stage, rng)
    async with Publisher(stage, PARTITIONS) as publisher, asyncio.timeout(900 if is_long else 120):
        fleet.end = 200
        await publisher.publish_everywhere(fleet.end)
        await asyncio.gather(fleet.start(), fleet.start())
        for _ in range(20 if is_long else 1):
            progress = stage.progress_of[rng.choice(list(SUBSCRIPTIONS))]
            await progress.until_flowing(publisher.partitions if not fleet.asked else (), START + TAKE_OVER)
            for _ in range(rng.randrange(12, 20)):
                answer = await fleet.ask_something()
                if rng.random() < 0.6:
                    await asyncio.wait([answer], timeout=2.0)
            # Often in the middle of what was asked for last.
            await fleet.kill()
            await publisher.publish_everywhere(20)
            fleet.end += 20
            await fleet.start()
        await fleet.drain()
        await fleet.stop()
    for name in SUBSCRIPTIONS:
        asked = [each for each in fleet.asked if each.name == name]
        Judge(name, stage.evidence(name).entries, stage.witnessed(name), asked).check(fleet.end)
