"""A consumer group whose members are of several SDKs, each in a process of its own, and what it has to hold.

Every member prints JSON objects, a line each, whose member `is` says what they are about:

* `cycle`: it listed the ownerships, as it does at the beginning of each of its cycles; `view` has owner and time of
  the last change by partition, the time by the store's clock, or None where the member does not see it;
* `claimed`: the store gave it partitions under the name `owner`;
* `opened`, `closed`: it has begun to read a partition, and ended;
* `processed`: it was handed events, and has processed them; `numbers` are their sequence numbers;
* `stored`: the checkpoint that follows is stored;
* `error`: a callback for errors was called;
* `stopped`: it was asked to end, and has.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from azure.storage.blob.aio import ContainerClient

from eventpump import Emulator, EventData, EventProducer
from tests.interop.peers.javascript import PACKAGES
from tests.interop.peers.lines import ROOT
from tests.support.node import install_npm_package, node_binary
from tests.support.processes import ChildProcess
from tests.support.waiting import Changes

Kind = Literal["azure", "javascript", "ours"]

HUB = "telemetry"
CYCLES = 10
"""Of the slowest member: within so many the partitions have to be shared out, and none may move for so many more."""

_MODULES = {"azure": "tests.interop.members.azure_member", "ours": "tests.interop.members.our_member"}
_SCRIPT = Path(__file__).with_name("javascript_member.mjs")


@dataclass(frozen=True)
class Pace:
    """The intervals of a fleet, in seconds; None for the default of each SDK.

    Args:
        interval: Between two cycles of a member.
        expiry: After which an ownership that was not renewed is free.
        patience: Of the test, for anything that it waits for.
        is_bounded: Whether the partitions have to be shared out within ten cycles, and not only at some time. On a busy
            machine a link may take longer than a short cycle: a processor attaches to a partition that another has
            claimed meanwhile, and has it released.
    """

    interval: float | None
    expiry: float | None
    patience: float
    is_bounded: bool

    def options(self, kind: Kind, name: str) -> dict[str, Any]:
        """Return the options of a member, as its SDK spells them."""
        match kind:
            case "azure":
                given = {
                    "load_balancing_interval": self.interval,
                    "partition_ownership_expiration_interval": self.expiry,
                }
                return {key: value for key, value in given.items() if value is not None}
            case "javascript":
                balancing: dict[str, Any] = {"strategy": "greedy"}
                if self.interval is not None and self.expiry is not None:
                    balancing["updateIntervalInMs"] = self.interval * 1000
                    balancing["partitionOwnershipExpirationIntervalInMs"] = self.expiry * 1000
                return {"identifier": name, "loadBalancingOptions": balancing}
            case "ours":
                return {} if self.interval is None else {"renew_interval": self.interval}

    @property
    def store(self) -> dict[str, Any]:
        """Return the options of our store."""
        return {} if self.expiry is None else {"lease_duration": self.expiry, "owner_timeout": self.expiry}


FAST = Pace(0.5, 4.0, 60.0, is_bounded=False)
STEADY = Pace(0.5, 60.0, 60.0, is_bounded=False)
"""For members that are stopped in order alone: no pause of a busy machine makes an ownership expire."""
DEFAULTS = Pace(None, None, 900.0, is_bounded=True)


@dataclass
class Member:
    """A process of the fleet, and what it has printed."""

    name: str
    kind: Kind
    child: ChildProcess
    owner: str | None = None
    """Its name in ownerships, once it has claimed one."""
    cycles: int = 0
    view: Mapping[str, str] = field(default_factory=dict)
    """Owners by partition, as it listed them last; those that are released are not among them."""
    reading: set[str] = field(default_factory=set)
    processed: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    is_frozen: bool = False

    def take(self, line: Mapping[str, Any]) -> None:
        """Record a line."""
        match line["is"]:
            case "cycle":
                self.cycles += 1
                self.view = {partition: owner for partition, (owner, _) in line["view"].items() if owner}
            case "claimed":
                self.owner = line["owner"]
            case "opened":
                self.reading.add(line["partition"])
            case "closed":
                self.reading.discard(line["partition"])
            case "processed":
                self.processed += len(line["numbers"])
            case "stored":
                self.stored[line["partition"]] = line["number"]
            case "error":
                self.errors.append(f"{line['partition']}: {line['text']}")


class MixedFleet:
    """Members of several SDKs that share the partitions of one hub, through blobs on Azurite. A context manager.

    With `is_loaded`, each cycle of a member has one event sent to each partition, unless the last ones are on their
    way: the load follows the intervals.

    Args:
        emulator: Serves the hub.
        store: Connection string, and the name of a container that there is not yet.
        partitions: How many the hub has.
        pace: The intervals of its members.
        hub: The hub.
        is_loaded: Whether events are sent.
    """

    def __init__(
        self,
        emulator: Emulator,
        store: tuple[str, str],
        partitions: int,
        pace: Pace,
        *,
        hub: str = HUB,
        is_loaded: bool = True,
    ) -> None:
        self.pace = pace
        self.partitions = [str(number) for number in range(partitions)]
        self.members: dict[str, Member] = {}
        """Those that run, by name."""
        self.left: list[Member] = []
        """Those that have ended."""
        self.sent: dict[str, int] = dict.fromkeys(self.partitions, 0)
        """Events that the service has taken, by partition."""
        self.history: list[str] = []
        """A line for each time that they have settled."""
        self.gaps: list[float] = []
        """Seconds between the last renewal of an owner that did not release a partition, and the next claim."""
        self.repeats: Counter[str] = Counter()
        """How many events were processed again, by the kind of the member that did."""
        self._processed: dict[str, set[int]] = {each: set() for each in self.partitions}
        self._emulator = emulator
        self._store = store
        self._changes = Changes()
        self._is_due = asyncio.Event()
        self._last: dict[str, tuple[str, float]] = {}
        self._hub = hub
        self._is_loaded = is_loaded
        self._producer = EventProducer(emulator.connection_string, hub)
        self._sender: asyncio.Task[None] | None = None
        self._numbers: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        async with ContainerClient.from_connection_string(*self._store) as container:
            await container.create_container()
        if self._is_loaded:
            self.start_load()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_load()
        await self._producer.aclose()
        for member in self.members.values():
            await member.child.kill()

    # ---------------------------------------------------------------------------------------------- members

    async def start(self, kind: Kind) -> Member:
        """Start a member, and wait until it has claimed a partition."""
        self._numbers[kind] += 1
        name = f"{kind}-{self._numbers[kind]}"
        settings = json.dumps(
            {
                "name": name,
                # With the port in it, azure-eventhub would have it in the names of blobs, and the others would not.
                "connection_string": self._emulator.connection_string.replace(
                    f":{self._emulator.port}", "" if kind == "azure" else f":{self._emulator.port}"
                ),
                "address": f"sb://{self._emulator.host}:{self._emulator.port}",
                "hub": self._hub,
                "storage": self._store[0],
                "container": self._store[1],
                "options": self.pace.options(kind, name),
                "store": self.pace.store,
            }
        )
        if kind == "javascript":
            packages = [str(await asyncio.to_thread(install_npm_package, *each)) for each in PACKAGES[:2]]
            command = (str(node_binary()), str(_SCRIPT), settings, *packages)
        else:
            command = (sys.executable, "-m", _MODULES[kind], settings)
        child = ChildProcess(*command, on_line=lambda text: self._line(member, text), directory=ROOT)
        member = self.members[name] = Member(name, kind, child)
        await child.start()
        await self.until(lambda: bool(member.owner and member.reading))
        return member

    async def send(self, partition: str, count: int) -> None:
        """Send events to a partition. A call that is cancelled is finished first."""
        events = [EventData(b"x" * 100) for _ in range(count)]
        sending = asyncio.create_task(self._producer.send(events, partition_id=partition))
        try:
            await asyncio.shield(sending)
        finally:
            await sending
            self.sent[partition] += count

    async def kill(self, member: Member) -> None:
        """Kill it (SIGKILL)."""
        await member.child.kill()
        self.left.append(self.members.pop(member.name))

    async def stop(self, member: Member) -> None:
        """Stop it in order (SIGTERM), and wait for its end."""
        assert await member.child.stop() == 0, member.child.stderr
        assert json.loads(member.child.lines[-1]) == {"is": "stopped"}
        self.left.append(self.members.pop(member.name))

    def freeze(self, member: Member) -> None:
        """Have it stand still (SIGSTOP)."""
        member.child.freeze()
        member.is_frozen = True

    def wake(self, member: Member) -> None:
        """Have it go on."""
        member.is_frozen = False
        member.child.wake()

    @property
    def running(self) -> list[Member]:
        """The members that do not stand still."""
        return [member for member in self.members.values() if not member.is_frozen]

    # ------------------------------------------------------------------------------------------------ waiting

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something holds of what the members have printed.

        Raises:
            AssertionError: It does not in time.
        """
        try:
            await self._changes.until(lambda: is_so() or self._has_ended(), self.pace.patience)
        except TimeoutError:
            raise AssertionError(f"not within {self.pace.patience:.0f} s:\n{self.describe()}") from None
        assert is_so(), self.describe()

    def _has_ended(self) -> bool:
        return any(member.child.returncode is not None for member in self.members.values())

    async def until_settled(self) -> None:
        """Wait until the running members own all partitions, at most one apart, and then for ten cycles of the slowest.

        Cycles are counted from when no other owner is left.

        Raises:
            AssertionError: They do not in time, and where that is bounded, not within ten cycles, or a partition moved
                later than that.
        """
        alive = {member.owner for member in self.running}
        await self.until(lambda: any(self._owns_all(member.view, alive) for member in self.running))
        begun = {member.name: member.cycles for member in self.running}

        def is_late() -> bool:
            return self.pace.is_bounded and self._fewest_since(begun) > CYCLES

        try:
            async with asyncio.timeout(self.pace.patience):
                while True:
                    await self.until(lambda: self.is_shared or is_late())
                    taken = self._fewest_since(begun)
                    assert self.is_shared, f"not shared out after {taken} cycles of the slowest\n{self.describe()}"
                    if not await self._has_moved():
                        break
                    assert not is_late(), f"a partition moved late\n{self.describe()}"
        except TimeoutError:
            raise AssertionError(f"partitions go on moving\n{self.describe()}") from None
        self.history.append(f"{len(begun)} members share after {taken} cycles of the slowest")

    async def _has_moved(self) -> bool:
        """Return whether any partition changes its owner within ten cycles of the slowest member."""
        settled = dict(self.running[0].view)
        begun = {member.name: member.cycles for member in self.running}

        def has_moved() -> bool:
            return any(member.view != settled for member in self.running)

        await self.until(lambda: has_moved() or self._fewest_since(begun) >= CYCLES)
        return has_moved()

    async def until_read(self) -> None:
        """Wait until every partition is read again: an event that is sent from now on was processed."""
        before = dict(self.sent)
        await self.until(lambda: all(self.reached(each) > count for each, count in before.items()))

    def _owns_all(self, view: Mapping[str, str], alive: set[str | None]) -> bool:
        return view.keys() == set(self.partitions) and set(view.values()) <= alive

    @property
    def is_shared(self) -> bool:
        """Whether the running members own all partitions and agree on who owns which, and are at most one apart.

        What ours read has to be that. azure-eventhub reads a partition that it has lost until it notices.
        """
        running = self.running
        views = [member.view for member in running]
        if any(view != views[0] for view in views) or not self._owns_all(views[0], {each.owner for each in running}):
            return False
        owned: defaultdict[str | None, set[str]] = defaultdict(set)
        for partition, owner in views[0].items():
            owned[owner].add(partition)
        shares = [len(owned[member.owner]) for member in running]
        ours = [member for member in running if member.kind == "ours"]
        return max(shares) - min(shares) <= 1 and all(owned[each.owner] == each.reading for each in ours)

    def _fewest_since(self, begun: Mapping[str, int]) -> int:
        return min(member.cycles - begun[member.name] for member in self.running)

    # ----------------------------------------------------------------------------------------------- judgement

    def start_load(self) -> None:
        """Begin to send."""
        self._is_due.clear()
        self._sender = asyncio.create_task(self._send(), name="load")

    async def stop_load(self) -> None:
        """End the load. What is on its way is waited for."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def finish(self) -> None:
        """End the load, wait until everything was processed, and check that nothing is lost.

        Raises:
            AssertionError: An event was not processed.
        """
        await self.stop_load()
        await self.until(lambda: all(self.reached(each) >= count for each, count in self.sent.items()))
        for partition, count in self.sent.items():
            missing = set(range(count)) - self._processed[partition]
            assert not missing, f"partition {partition} of {count}: {sorted(missing)[:10]} lost\n{self.describe()}"

    def reached(self, partition: str) -> int:
        """Return how many events of a partition were processed, by any member that has been or is."""
        return len(self._processed[partition])

    @property
    def everyone(self) -> Sequence[Member]:
        """The members that have been or are."""
        return [*self.left, *self.members.values()]

    def describe(self) -> str:
        """Return what the fleet did, a line for each member and one for the sums."""
        lines = [*self.history]
        for member in self.everyone:
            state = "left" if member in self.left else "stands still" if member.is_frozen else "runs"
            lines.append(
                f"{member.name} ({state}, {member.owner}): {member.cycles} cycles, {member.processed} events,"
                f" reads {sorted(member.reading, key=int)}, sees {Counter(member.view.values())}"
                f" errors {Counter(member.errors).most_common(3)} {member.child.stderr[-300:]}"
            )
        repeats = ", ".join(f"{count} by {kind}" for kind, count in self.repeats.items() if count)
        lines.append(f"{sum(self.sent.values())} events; processed again: {repeats or 'none'}")
        longest = max(self.gaps, default=0.0)
        lines.append(f"{len(self.gaps)} changes of owner without a release, {longest:.0f} s after a renewal at most")
        return "\n".join(lines)

    # -------------------------------------------------------------------------------------------------- inside

    def _line(self, member: Member, text: str) -> None:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            return  # it was killed while it spoke
        member.take(line)
        if line["is"] == "processed":
            seen, numbers = self._processed[line["partition"]], line["numbers"]
            self.repeats[member.kind] += sum(number in seen for number in numbers)
            seen.update(numbers)
        elif line["is"] == "cycle":
            self._note_owners(line["view"])
            self._is_due.set()
        self._changes.happened()

    def _note_owners(self, view: Mapping[str, Sequence[Any]]) -> None:
        for partition, (owner, changed) in view.items():
            if changed is None:
                continue
            before, at = self._last.get(partition, ("", changed))
            if changed < at:
                continue  # an older listing, whose line came later
            if before and owner and owner != before:
                self.gaps.append(changed - at)
            self._last[partition] = (owner, changed)

    async def _send(self) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            for partition in self.partitions:
                await self.send(partition, 1)
