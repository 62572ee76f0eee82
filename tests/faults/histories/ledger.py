"""What a fleet's history is judged by: begun, ok and failed of every batch, and what the lease store really holds.

* An event is *ok* when a call of `process_events` that held it has returned.
* A *claim* is an explicit `context.checkpoint()` from within the running call for the batch that is current, or from a
  task which that call began and which asks while it still runs. It is the user's own statement that the events up to
  there are processed, and it stands though the handler fails afterwards: events claimed count as processed.
  A checkpoint from anywhere else (`close`, `process_error`, a timer, a task left over) claims nothing.
* *stored <= ok*: at the moment the store takes a checkpoint, everything it covers is ok or claimed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eventpump import ReceivedEvent
from eventpump.eventhubs.events import Checkpoint
from eventpump.testing.transport import FakeHub
from tests.faults.histories.world import World

Place = tuple[int, str]
"""A partition of one making of the hub."""


class Start(NamedTuple):
    """Where the history's hosts begin without a checkpoint: "earliest", "latest", or a time."""

    kind: Literal["earliest", "latest", "time"]


@dataclass(eq=False)
class Call:
    """One call of `process_events`."""

    host: str
    place: Place
    epoch: int
    numbers: tuple[int, ...]
    is_running: bool = True


@dataclass
class _Shore:
    """What is known of one place."""

    required: int | None = None
    """The first number that must be processed; None while there is none."""
    processed: set[int] = field(default_factory=set)
    """Numbers that are ok or claimed."""
    reported: set[int] = field(default_factory=set)
    """Numbers that a report said are lost."""
    truncated: int = 0
    """Numbers below it are gone by retention."""
    exempt: set[int] = field(default_factory=set)
    """Numbers that went before anything pinned the place: nothing was promised of them."""
    is_pinned: bool = False
    """Whether a checkpoint of it was ever stored: from then on, what retention takes must be reported."""
    floor: int = 0
    """What lies below it was found processed, reported or not required."""


def body_of(making: int, partition_id: str, number: int) -> bytes:
    """Return the body of an event: it names its place."""
    return f"{making}/{partition_id}/{number}".encode()


class Ledger:
    """Takes down what happens to every batch and checkpoint, and checks it then and there."""

    def __init__(self, world: World, hub: FakeHub, start: Start) -> None:
        self._world = world
        self._hub = hub
        self._start = start
        self.making = 0
        """How often the hub was recreated."""
        self._shores: defaultdict[Place, _Shore] = defaultdict(_Shore)
        self._readers: dict[tuple[Place, int], str] = {}
        self._reached: dict[tuple[Place, int], int] = {}
        self._places: dict[tuple[str, int], Place] = {}
        """By partition and epoch: the place last read under it."""
        self._running: dict[tuple[str, str], Call] = {}
        self.stored: dict[str, int] = {}
        """By partition: the number the store holds."""
        self.resets: defaultdict[str, int] = defaultdict(int)
        """By partition: how often the checkpoint was reset."""
        self.pinned: set[str] = set()
        """Partitions that a host has begun to read, in any making."""
        self.unreported: set[str] = set()
        """Partitions whose checkpoint speaks of a hub that is no more, and of which there was no report."""
        self.batches = 0

    # ---------------------------------------------------------------------------------------------- the hub

    def end(self, partition_id: str) -> int:
        """Return the number after the partition's last event."""
        return self._hub.partition(partition_id).next

    def published(self, partition_id: str, count: int) -> None:
        """Store events in the hub."""
        first = self.end(partition_id)
        bodies = [body_of(self.making, partition_id, first + index) for index in range(count)]
        self._hub.publish(partition_id, *bodies)

    def added(self, partition_id: str) -> None:
        """Record a partition that is new in a hub which the fleet knows: it is read from its beginning."""
        if self.pinned and self._start.kind != "time":
            self._shores[self.making, partition_id].required = 0

    def truncated(self, partition_id: str, before: int) -> None:
        """Record what retention took."""
        shore = self._shores[self.making, partition_id]
        if not shore.is_pinned:
            shore.exempt.update(range(shore.truncated, before))
        shore.truncated = max(shore.truncated, before)

    def recreated(self) -> None:
        """Record that the hub was recreated, empty."""
        self.making += 1
        for partition_id in self.pinned:
            # The fleet has begun to read it: what the new hub holds is read from its beginning.
            self._shores[self.making, partition_id].required = 0
        self.unreported |= set(self.stored)

    def is_for(self, number: int) -> bool:
        """Return whether the event with a number is to be delivered: any is, unless a part of them is asked for."""
        return True

    def passed_over(self, place: Place) -> set[int]:
        """Return the events of a place that were skipped or parked, perhaps without having been delivered."""
        return set()

    # --------------------------------------------------------------------------------------------- the fleet

    def started(self, partition_id: str) -> None:
        """Record that a host reads a partition: what comes from now on must be processed."""
        shore = self._shores[self.making, partition_id]
        if shore.required is None:
            is_earliest = self._start.kind == "earliest"
            shore.required = self._hub.partition(partition_id).first if is_earliest else self.end(partition_id)
        self.pinned.add(partition_id)

    def lost(self, partition_id: str, first: int, last: int) -> None:
        """Record a report that retention took events, by their first and last number."""
        shore = self._shores[self.making, partition_id]
        numbers = set(range(first, last + 1))
        if kept := {number for number in numbers if number >= shore.truncated}:
            self._world.violate(f"partition {partition_id}: {_short(kept)} reported lost, and the hub holds them")
        shore.reported |= numbers

    def hub_loss_reported(self, partition_id: str) -> None:
        """Record a report that the hub is another one than that of the checkpoint.

        Nothing is promised of what the present hub dropped before: its reading begins now, also where it had begun and
        a host died before that was recorded.
        """
        shore = self._shores[self.making, partition_id]
        shore.exempt.update(range(shore.truncated))
        self.unreported.discard(partition_id)

    def begin(self, host: str, partition_id: str, epoch: int, events: tuple[ReceivedEvent, ...]) -> Call:
        """Record a call of `process_events`, and check that it may be."""
        making, _, _ = _place_of(events[0])
        place = (making, partition_id)
        call = Call(host, place, epoch, tuple(event.sequence_number for event in events))
        self.batches += 1
        self._world.note("begin", host, named_call(call))
        for event in events:
            if event.body != body_of(making, partition_id, event.sequence_number):
                self._world.violate(f"partition {partition_id}: {event.sequence_number} is not what the hub stored")
        key = (place, epoch)
        reader = self._readers.setdefault(key, host)
        if reader != host:
            self._world.violate(f"partition {partition_id}: {reader} and {host} deliver under epoch {epoch}")
        before = self._running.get((host, partition_id))
        if before is not None and before.is_running:
            self._world.violate(f"partition {partition_id}: {host} delivers while {named_call(before)} runs")
        self._running[host, partition_id] = call
        self._check_order(call)
        self._places[partition_id, epoch] = place
        return call

    def _check_order(self, call: Call) -> None:
        """Check *no reorder*: under one epoch numbers come in order, and a gap is what retention took."""
        key, first = (call.place, call.epoch), call.numbers[0]
        if any(after != before + 1 for before, after in zip(call.numbers, call.numbers[1:], strict=False)):
            self._check_gap(call, call.numbers[0], call.numbers[-1])
        reached = self._reached.get(key)
        if reached is not None and first > reached + 1:
            self._check_gap(call, reached + 1, first)
        self._reached[key] = max(call.numbers[-1], -1 if reached is None else reached)

    def _check_gap(self, call: Call, first: int, until: int) -> None:
        shore = self._shores[call.place]
        missing = {number for number in range(first, until) if number not in call.numbers and number >= shore.truncated}
        missing -= shore.reported
        missing -= self.passed_over(call.place)
        if any(map(self.is_for, missing)):
            self._world.violate(
                f"partition {call.place[1]}: {named_call(call)} came without {_short(missing)} before it"
            )

    def ok(self, call: Call) -> None:
        """Record that a call returned."""
        call.is_running = False
        self._world.note("ok", call.host, named_call(call))
        self._shores[call.place].processed.update(call.numbers)

    def failed(self, call: Call, error: BaseException) -> None:
        """Record that a call raised."""
        call.is_running = False
        self._world.note("failed", call.host, named_call(call), type(error).__name__)

    def claim(self, call: Call, last: int) -> None:
        """Record that user code says, within the running call, that a batch is processed up to an event."""
        if call.is_running:
            self._world.note("claim", call.host, named_call(call), "up to", last)
            self._shores[call.place].processed.update(number for number in call.numbers if number <= last)

    # --------------------------------------------------------------------------------------------- the store

    def took(
        self, partition_id: str, epoch: int, asked: Checkpoint, held: Checkpoint | None, *, is_reset: bool
    ) -> None:
        """Check what the store holds after it took a checkpoint.

        Args:
            asked: What it was asked to store.
            held: What it holds now.
        """
        before = self.stored.get(partition_id)
        number = -1 if held is None else held.sequence_number
        self.stored[partition_id] = number
        what = "reset" if is_reset else "stored"
        self._world.note(what, f"{partition_id}@{epoch}", f"{number} (asked for {asked.sequence_number})")
        if is_reset:
            self.resets[partition_id] += 1
            self._shores[self.making, partition_id].is_pinned = True
            return
        self._shores[self._places.get((partition_id, epoch), (self.making, partition_id))].is_pinned = True
        if before is not None and number < before:
            self._world.violate(f"partition {partition_id}: the stored checkpoint went back from {before} to {number}")
        self._check_processed(partition_id, epoch, number)

    def _check_processed(self, partition_id: str, epoch: int, number: int) -> None:
        place = self._places.get((partition_id, epoch))
        if place is None:
            return  # nothing was read under this epoch: it is where reading is pinned, or what was there before
        missing = self.missing(place, number + 1)
        if missing:
            text = f"partition {partition_id}: checkpoint {number} is stored, and {_short(missing)} not processed"
            self._world.violate(text)

    def missing(self, place: Place, end: int) -> set[int]:
        """Return the numbers below an end that must be processed and are not."""
        shore = self._shores[place]
        if shore.required is None:
            return set()
        start = max(shore.required, shore.floor)
        missing = set(range(start, end)) - shore.processed - shore.exempt - shore.reported
        # What is covered once stays so.
        shore.floor = max(start, min(missing, default=end))
        return missing

    # ---------------------------------------------------------------------------------------------- the end

    def unprocessed(self, *, but_gone: bool = False) -> dict[str, set[int]]:
        """Return what must still be processed, by partition.

        Args:
            but_gone: Leave out what retention took: no host can process it any more.
        """
        found: dict[str, set[int]] = {}
        for partition_id in self._hub.partition_ids:
            place = (self.making, partition_id)
            missing = self.missing(place, self.end(partition_id))
            if but_gone:
                missing = {number for number in missing if number >= self._shores[place].truncated}
            if missing:
                found[partition_id] = missing
        return found

    def check_end(self) -> None:
        """Check *no loss*, once every fault has ended and time enough has passed."""
        for partition_id, missing in self.unprocessed().items():
            gone = {number for number in missing if number < self._shores[self.making, partition_id].truncated}
            kept = missing - gone
            if kept:
                self._world.violate(f"partition {partition_id}: {_short(kept)} never processed")
            if gone:
                text = f"partition {partition_id}: {_short(gone)} gone by retention, never processed, and not reported"
                self._world.violate(text)
        for partition_id in sorted(self.unreported):
            self._world.violate(f"partition {partition_id}: no report says that the hub was recreated")


def _place_of(event: ReceivedEvent) -> tuple[int, str, int]:
    making, partition_id, number = event.body.decode().split("/")
    return int(making), partition_id, int(number)


def named_call(call: Call) -> str:
    """Return the place, the epoch and the numbers of a call."""
    making = "" if not call.place[0] else f"#{call.place[0]}"
    return f"{call.place[1]}{making}@{call.epoch}[{call.numbers[0]}..{call.numbers[-1]}]"


def _short(numbers: set[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{len(numbers)} of {low}..{high}"
