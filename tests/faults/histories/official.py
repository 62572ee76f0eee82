"""Members of a fleet that run an official SDK, as a model: azure-eventhub (Python), and @azure/event-hubs (JavaScript).

A model has what other members see of it: which requests it makes of the container that they share, and in which
order; what it does when one fails; which partitions it claims; when it attaches a link, and when it gives one up. All
of them read with owner level 0, write their checkpoints without a condition, and judge the age of an ownership by their
own clock.

| | Python | JavaScript |
|---|---|---|
| first claim | with `If-None-Match: *` | without a condition |
| a claim that fails | counts as still owned | is left until the next cycle |
| renews | all that it owns | what it owns and receives from |
| its link was stolen | releases the partition, if that is still its own | leaves it until it expires |
| finds another owner | stops reading | reads on until its link is stolen |
| one cycle takes | what it lacks of free ones, or steals one | one, free or stolen |
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from typing import TypeVar

from azure.core.exceptions import ServiceResponseError

from eventpump import ReceivedEvent
from eventpump.errors import ConsumerDisconnectedError, EventPumpError
from eventpump.eventhubs.events import EventPosition
from eventpump.interfaces import ReceiveLinkSpec
from eventpump.testing.transport import FakeHub, FakeReceiveLink
from tests.faults.histories.stores import Trouble
from tests.faults.histories.world import Life, LifeTransport, World
from tests.support.blobs import Blob, BlobRefusedError, Container

_T = TypeVar("_T")

EPOCH = 1_704_067_200.0
"""The value of every clock when the loop's time is 0, but for its own error: as the hub's."""


class NoAnswerError(ServiceResponseError):
    """A request to the container failed, or its answer was lost."""


class ContainerDoor:
    """The connection of one process to the container, with its faults.

    A request that was sent belongs to the network: it arrives also when its process is killed meanwhile.
    """

    def __init__(self, world: World, name: str, trouble: Callable[[], Trouble]) -> None:
        self._world = world
        self._trouble = trouble
        self._rng = world.stream(f"container of {name}")
        self._late: set[asyncio.Task[None]] = set()

    async def request(self, operation: str, work: Callable[[], _T]) -> _T:
        """Make a request, or not.

        Raises:
            NoAnswerError: There was no answer, whether it was carried out, will be, or not.
        """
        trouble, rng = self._trouble(), self._rng
        while trouble.hangs:
            await asyncio.sleep(1.0)
            trouble = self._trouble()
        if trouble.slow:
            await asyncio.sleep(rng.uniform(0.0, trouble.slow))
        chance = rng.random()
        if chance < trouble.fails:
            raise NoAnswerError(f"{operation}: 503 server busy")
        chance -= trouble.fails
        if chance < trouble.lates:
            self.later(work, rng.uniform(0.1, 8.0))
            raise NoAnswerError(f"{operation}: no answer yet")
        chance -= trouble.lates
        answer = work()
        if chance < trouble.loses:
            raise NoAnswerError(f"{operation}: the answer was lost")
        return answer

    def later(self, work: Callable[[], object], delay: float) -> None:
        """Have a request arrive late, whatever has happened to its sender by then."""

        async def arrive() -> None:
            await asyncio.sleep(delay)
            with contextlib.suppress(BlobRefusedError):
                work()

        task = self._world.loop.create_task(arrive(), name="late request", context=Context())
        self._late.add(task)
        task.add_done_callback(self._late.discard)


@dataclass(frozen=True, slots=True)
class Ownership:
    """The ownership of a partition, as listed or claimed.

    Args:
        owner: Empty where it was released.
        etag: None where there is no blob.
    """

    partition_id: str
    owner: str
    changed_at: float
    etag: str | None


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a member balances, and after how long it takes another for dead.

    Args:
        interval: Seconds from one cycle to the next.
        expiry: Seconds after which an ownership that was not renewed is free.
        is_greedy: Whether one cycle takes all that it lacks of free partitions.
    """

    interval: float
    expiry: float
    is_greedy: bool


class Journal(ABC):
    """What a history takes down of the events that members process."""

    @abstractmethod
    def begin(self, member: str, partition_id: str, events: Sequence[ReceivedEvent]) -> object:
        """Record a batch that is passed to user code."""

    @abstractmethod
    def ok(self, call: object) -> None:
        """Record that user code returned."""


class OfficialMember(ABC):
    """A member. `run` runs until `stop` was called.

    Args:
        prefix: What the names of the blobs begin with, up to the consumer group.
        clock_error: Seconds by which its clock is ahead.
    """

    kind: str

    def __init__(
        self,
        world: World,
        life: Life,
        hub: FakeHub,
        container: Container,
        prefix: str,
        door: ContainerDoor,
        journal: Journal,
        pace: Pace,
        *,
        clock_error: float = 0.0,
    ) -> None:
        self.world = world
        self.life = life
        self.hub = hub
        self.transport = LifeTransport(hub, life)
        self.pace = pace
        self.journal = journal
        self.rng = world.stream(f"member {life.name}")
        self.owner = life.name
        self.pumps: dict[str, OfficialPump] = {}
        self._container = container
        self._prefix = prefix
        self._door = door
        self._clock_error = clock_error
        self._is_stopping = asyncio.Event()

    def now(self) -> float:
        """Return the time by the member's clock."""
        return EPOCH + self.world.loop.time() + self._clock_error

    @property
    def is_stopping(self) -> bool:
        """Whether it is to end."""
        return self._is_stopping.is_set()

    async def run(self) -> None:
        """Balance until it is stopped, then stop reading and release what it owns."""
        while not self.is_stopping:
            begun = self.world.loop.time()
            try:
                await self._cycle()
            except (NoAnswerError, BlobRefusedError, EventPumpError) as error:
                self.world.note("cycle failed", self.owner, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause(self.world.loop.time() - begun)):
                    await self._is_stopping.wait()
        with contextlib.suppress(NoAnswerError, BlobRefusedError):
            await self._close()

    def stop(self) -> None:
        """End it in order."""
        self._is_stopping.set()

    @abstractmethod
    def _pause(self, took: float) -> float:
        """Return the seconds until the next cycle. `took` is how long the last one took."""

    @abstractmethod
    async def _cycle(self) -> None:
        """Balance once."""

    @abstractmethod
    async def _close(self) -> None:
        """Stop reading, and release what it owns."""

    @abstractmethod
    async def pump_ended(self, pump: OfficialPump) -> None:
        """Called when a pump has ended by itself."""

    # ------------------------------------------------------------------------------------------------- requests

    def _blob(self, kind: str, partition_id: str) -> str:
        return f"{self._prefix}/{kind}/{partition_id}"

    async def _list_ownership(self) -> list[Ownership]:
        blobs = await self._list("ownership")
        return [Ownership(each.name.rpartition("/")[2], _owner(each), each.changed_at, each.etag) for each in blobs]

    async def _list_checkpoints(self) -> dict[str, str]:
        """Return the offset of each checkpoint."""
        return {each.name.rpartition("/")[2]: each.metadata["offset"] for each in await self._list("checkpoint")}

    async def _list(self, kind: str) -> list[Blob]:
        return await self._door.request(f"list {kind}", lambda: self._container.list(self._blob(kind, "")))

    async def _set(self, kind: str, partition_id: str, metadata: Mapping[str, str], **condition: str) -> Blob:
        """Replace the metadata of a blob, or create it with the same condition."""
        name, operation = self._blob(kind, partition_id), f"set {kind} {partition_id}"
        try:
            return await self._door.request(
                operation, lambda: self._container.set_metadata(name, metadata, **condition)
            )
        except BlobRefusedError as refused:
            if refused.status != 404:
                raise
        return await self._door.request(operation, lambda: self._container.put(name, b"", metadata, **condition))

    async def checkpoint(self, partition_id: str, event: ReceivedEvent) -> None:
        """Write a checkpoint without a condition, as the SDK does: also if another member owns the partition now."""
        metadata = {"offset": str(event.offset), "sequencenumber": str(event.sequence_number)}
        with contextlib.suppress(NoAnswerError, BlobRefusedError):
            await self._set("checkpoint", partition_id, metadata)

    def write_late(self, partition_id: str, event: ReceivedEvent, delay: float) -> None:
        """Have a checkpoint arrive late."""
        name = self._blob("checkpoint", partition_id)
        metadata = {"offset": str(event.offset), "sequencenumber": str(event.sequence_number)}

        def write() -> None:
            try:
                self._container.set_metadata(name, metadata)
            except BlobRefusedError:
                self._container.put(name, b"", metadata)
            self.world.note("late checkpoint", self.owner, partition_id, event.sequence_number)

        self._door.later(write, delay)

    # ------------------------------------------------------------------------------------------------- reading

    def _start_pump(self, partition_id: str, offset: str | None) -> None:
        pump = self.pumps[partition_id] = OfficialPump(self, partition_id, offset)
        pump.task = self.world.spawn(self.life, self._run_pump(pump), f"pump {self.owner} {partition_id}")

    async def _run_pump(self, pump: OfficialPump) -> None:
        await pump.run()
        await self.pump_ended(pump)

    async def _stop_pump(self, partition_id: str) -> None:
        pump = self.pumps.pop(partition_id, None)
        if pump is not None and pump.task is not None:
            pump.task.cancel()
            await asyncio.wait({pump.task})


def _owner(blob: Blob) -> str:
    """Return the owner in a blob's metadata, which has to be there: the key in lower case."""
    return blob.metadata["ownerid"]


class OfficialPump:
    """Reads a partition and processes its events, until its link is stolen or refused."""

    def __init__(self, member: OfficialMember, partition_id: str, offset: str | None) -> None:
        self.partition_id = partition_id
        self.task: asyncio.Task[None] | None = None
        self.is_stolen = False
        self._member = member
        self._position = EventPosition.earliest() if offset is None else EventPosition.at_offset(offset)
        self._raw: list[bytes] = []
        self._error: EventPumpError | None = None
        self._changed = asyncio.Event()

    def messages(self, batch: list[bytes]) -> None:
        """Keep what came; of `ReceiveSink`."""
        self._raw += batch
        self._changed.set()

    def detached(self, error: EventPumpError) -> None:
        """Record the end of the link; of `ReceiveSink`."""
        self._error = error
        self._changed.set()

    async def run(self) -> None:
        """Read, over one link after another."""
        member = self._member
        refused = 0
        while refused < 4:
            self._raw, self._error = [], None
            spec = ReceiveLinkSpec(
                member.hub.name, "$Default", self.partition_id, self._position, 0, receiver_name=member.owner
            )
            try:
                link = await member.transport.open_receive_link(spec, self)
            except EventPumpError as error:
                if not error.is_retryable:
                    member.world.note("refused", member.owner, self.partition_id, error)
                    return
                refused += 1
                await asyncio.sleep(0.8 * 2**refused)
                continue
            refused = 0
            member.world.note("attached", member.owner, self.partition_id, self._position)
            try:
                ended = await self._read(link)
            finally:
                await link.aclose()
            if isinstance(ended, ConsumerDisconnectedError):
                member.world.note("stolen", member.owner, self.partition_id)
                self.is_stolen = True
                return
            if not ended.is_retryable:
                return

    async def _read(self, link: FakeReceiveLink) -> EventPumpError:
        """Process what comes until the link ends; return why."""
        member, rng = self._member, self._member.rng
        link.set_credit(50)
        while self._error is None:
            if not self._raw:
                self._changed.clear()
                await self._changed.wait()
                continue
            count = rng.randint(1, 10)
            batch, self._raw = self._raw[:count], self._raw[count:]
            link.set_credit(50 - len(self._raw))
            events = [ReceivedEvent(raw) for raw in batch]
            call = member.journal.begin(member.owner, self.partition_id, events)
            await asyncio.sleep(rng.choice((0.0, 0.05, 0.5, 3.0)))
            member.journal.ok(call)
            self._position = EventPosition.at_offset(str(events[-1].offset))
            if rng.random() < 0.6:
                await member.checkpoint(self.partition_id, events[-1])
        return self._error


class PythonMember(OfficialMember):
    """azure-eventhub of Python, with its `BlobCheckpointStore`."""

    kind = "py"

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]  # as of the class above
        self._owned: dict[str, Ownership] = {}
        self._ids: tuple[str, ...] = ()

    def _pause(self, took: float) -> float:
        return self.pace.interval * (1 + 0.2 * self.rng.random())

    async def _cycle(self) -> None:
        if not self._ids:
            self._ids = (await self.transport.get_hub_properties(self.hub.name)).partition_ids
        listed = await self._list_ownership()
        wanted = python_claims(listed, self._ids, self.owner, self.now(), self.pace, self.rng)
        claimed = await asyncio.gather(*(self._claim(each) for each in wanted))
        self._owned = {each.partition_id: each for each in claimed if each is not None}
        lost, new = self.pumps.keys() - self._owned.keys(), self._owned.keys() - self.pumps.keys()
        if new:
            checkpoints = await self._list_checkpoints()
            for partition_id in sorted(new):
                self._start_pump(partition_id, checkpoints.get(partition_id) or None)
        for partition_id in sorted(lost):
            self.world.note("lost", self.owner, partition_id)
            await self._stop_pump(partition_id)

    async def _claim(self, ownership: Ownership) -> Ownership | None:
        condition = {"if_none_match": "*"} if ownership.etag is None else {"if_match": ownership.etag}
        owner = {"ownerid": ownership.owner}
        try:
            blob = await self._set("ownership", ownership.partition_id, owner, **condition)
        except BlobRefusedError:
            return None
        except NoAnswerError:
            return ownership  # an error counts as still owned
        return replace(ownership, etag=blob.etag, changed_at=blob.changed_at)

    async def pump_ended(self, pump: OfficialPump) -> None:
        self.pumps.pop(pump.partition_id, None)
        await self._release(pump.partition_id)

    async def _release(self, partition_id: str) -> None:
        ownership = self._owned.get(partition_id)
        if ownership is not None and ownership.owner and ownership.changed_at + self.pace.expiry > self.now():
            released = self._owned[partition_id] = replace(ownership, owner="")
            await self._claim(released)

    async def _close(self) -> None:
        for partition_id in sorted(self.pumps):
            await self._stop_pump(partition_id)
            await self._release(partition_id)


def python_claims(
    listed: Sequence[Ownership], ids: Sequence[str], owner: str, now: float, pace: Pace, rng: random.Random
) -> list[Ownership]:
    """Return what a Python member claims in a cycle: all that it owns, and what it takes."""
    by_id = {each.partition_id: each for each in listed}
    released = [each for each in listed if each.changed_at + pace.expiry < now or not each.owner]
    free = [each for each in ids if each not in by_id] + [each.partition_id for each in released]
    owned: defaultdict[str, list[Ownership]] = defaultdict(list)
    for each in listed:
        if each not in released:
            owned[each.owner].append(each)
    claims = list(owned[owner])
    least, most = len(ids) // len(owned), -(-len(ids) // len(owned))
    if len(claims) >= most:
        return claims
    count = min(most - len(claims) if pace.is_greedy else 1, len(free))
    taken = [by_id.get(each, Ownership(each, "", now, None)) for each in rng.sample(free, count)]
    if not taken and len(claims) < least:
        largest = Counter({name: len(each) for name, each in owned.items()}).most_common(1)[0][0]
        taken = [rng.choice(owned[largest])]
    return claims + [replace(each, owner=owner) for each in taken]


class JavaScriptMember(OfficialMember):
    """@azure/event-hubs of JavaScript, with its `BlobCheckpointStore`."""

    kind = "js"

    def _pause(self, took: float) -> float:
        return max(0.0, self.pace.interval - took)

    async def _cycle(self) -> None:
        ids = (await self.transport.get_hub_properties(self.hub.name)).partition_ids
        listed = {each.partition_id: each for each in await self._list_ownership()}
        claims = javascript_claims(
            [each for each in listed.values() if each.owner], ids, self.owner, self.now(), self.pace, self.rng
        )
        renewed = [each for each in listed if listed[each].owner == self.owner and each in self.pumps]
        for partition_id in dict.fromkeys((*claims, *renewed)):
            if self.is_stopping:
                return
            try:
                await self._claim(partition_id, listed.get(partition_id))
            except (NoAnswerError, BlobRefusedError) as error:
                self.world.note("claim failed", self.owner, partition_id, error)

    async def _claim(self, partition_id: str, listed: Ownership | None) -> None:
        # A blob that was not listed is written without a condition.
        condition = {} if listed is None or listed.etag is None else {"if_match": listed.etag}
        try:
            if condition:
                name = self._blob("ownership", partition_id)
                await self._door.request(
                    "claim", lambda: self._container.set_metadata(name, {"ownerid": self.owner}, **condition)
                )
            else:
                await self._set("ownership", partition_id, {"ownerid": self.owner})
        except BlobRefusedError as refused:
            if refused.status == 412:
                return
            raise
        if partition_id not in self.pumps:
            checkpoints = await self._list_checkpoints()
            self._start_pump(partition_id, checkpoints.get(partition_id))

    async def pump_ended(self, pump: OfficialPump) -> None:
        # It is no longer renewed, as it receives nothing.
        if self.pumps.get(pump.partition_id) is pump:
            del self.pumps[pump.partition_id]

    async def _close(self) -> None:
        for partition_id in sorted(self.pumps):
            await self._stop_pump(partition_id)
        for each in await self._list_ownership():
            if each.owner == self.owner:
                name, condition = self._blob("ownership", each.partition_id), each.etag
                await self._release(name, condition)

    async def _release(self, name: str, etag: str | None) -> None:
        with contextlib.suppress(BlobRefusedError):
            await self._door.request(
                "release", lambda: self._container.set_metadata(name, {"ownerid": ""}, if_match=etag)
            )


def javascript_claims(
    listed: Sequence[Ownership], ids: Sequence[str], owner: str, now: float, pace: Pace, rng: random.Random
) -> list[str]:
    """Return the partitions that a JavaScript member claims in a cycle, beside those that it renews."""
    active = [each for each in listed if now - each.changed_at < pace.expiry and each.owner]
    claims = _available(active, ids, owner, rng) if active else list(ids)
    return claims if pace.is_greedy or not claims else [rng.choice(claims)]


def _available(active: Sequence[Ownership], ids: Sequence[str], owner: str, rng: random.Random) -> list[str]:
    owned: dict[str, list[str]] = {}
    for each in active:
        owned.setdefault(each.owner, []).append(each.partition_id)
    own = owned.setdefault(owner, [])
    least, extra = divmod(len(ids), len(owned))
    counts = [len(each) for each in owned.values()]
    with_extra, above = counts.count(least + 1), sum(count > least + 1 for count in counts)
    if with_extra == extra and with_extra + counts.count(least) == len(owned):
        return []
    lacks = least + (extra > 0 and with_extra + above < extra) - len(own)
    if lacks <= 0:
        return []
    taken_ids = {each.partition_id for each in active}
    free = [each for each in ids if each not in taken_ids]
    claims = rng.sample(free, min(lacks, len(free)))
    victims = [each for name, each in owned.items() if name != owner and len(each) > least]
    for rank, victim in enumerate(sorted(victims, key=len, reverse=True)):
        spare = len(victim) - least - (rank < extra)
        claims += rng.sample(victim, min(spare, lacks - len(claims)))
    return claims


MEMBERS: dict[str, type[OfficialMember]] = {each.kind: each for each in (PythonMember, JavaScriptMember)}
