"""What is compared: everything published with everything processed, and who processed it under which lease.

A host's process writes a line per event to a file of its own, unbuffered; a killed process has written what it has
processed. Totals prove nothing: it is sets that are compared.

* *begun*: an event was handed over. *ok*: a call of `process_events` that held it is about to return. *failed*: one
  raised.
* *claimed*: the call itself, while it runs, asks for a checkpoint that covers the event. That is the user's own
  statement that it is processed, and it stands though the call fails afterwards.
* *processed* is ok or claimed. No loss is judged by it, and the store may hold no checkpoint beyond it at the moment it
  takes one. What a policy stores, or a checkpoint from outside the call, claims nothing.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eventpump import PartitionReader, ReceivedEvent


def digest_of(body: bytes) -> str:
    """Return the digest of an event's body."""
    return hashlib.blake2b(body, digest_size=12).hexdigest()


class Fact(NamedTuple):
    """An event, at its place."""

    partition_id: str
    sequence_number: int
    digest: str


class Entry(NamedTuple):
    """A line of a journal: an event handed over, its outcome, or a checkpoint stored.

    Args:
        at: Seconds on the machine's monotonic clock, the same for all its processes.
        wall: The same moment in seconds since the Unix epoch, which is what a database can report.
    """

    kind: str
    host: str
    partition_id: str
    epoch: int
    sequence_number: int
    digest: str
    at: float
    wall: float


class Witnessed(NamedTuple):
    """A checkpoint as the store took it.

    Args:
        wall: Seconds since the Unix epoch.
    """

    partition_id: str
    sequence_number: int
    wall: float


BEGUN, OK, FAILED, CLAIMED, STORED = "begun", "ok", "failed", "claimed", "stored"
PASSED = "passed"
RESOLUTION = 0.002
"""Seconds by which the times of a journal and of a database may differ: the latter counts milliseconds."""


class Journal:
    """A host's own file. Every call is one unbuffered append."""

    def __init__(self, path: Path, host: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._host = host

    def begun(self, partition_id: str, epoch: int, events: Iterable[ReceivedEvent]) -> None:
        """Record a batch, first thing in `process_events`."""
        self._note(BEGUN, partition_id, epoch, events)

    def ok(self, partition_id: str, epoch: int, events: Iterable[ReceivedEvent]) -> None:
        """Record that a call returns, last thing in it."""
        self._note(OK, partition_id, epoch, events)

    def failed(self, partition_id: str, epoch: int, events: Iterable[ReceivedEvent]) -> None:
        """Record that a call raises."""
        self._note(FAILED, partition_id, epoch, events)

    def claimed(self, partition_id: str, epoch: int, events: Iterable[ReceivedEvent]) -> None:
        """Record what a call that runs asks to be stored as processed, before it asks."""
        self._note(CLAIMED, partition_id, epoch, events)

    def _note(self, kind: str, partition_id: str, epoch: int, events: Iterable[ReceivedEvent]) -> None:
        self._write((kind, partition_id, epoch, event.sequence_number, digest_of(event.body)) for event in events)

    def stored(self, partition_id: str, epoch: int, sequence_number: int) -> None:
        """Record a checkpoint that the store has taken."""
        self._write([(STORED, partition_id, epoch, sequence_number, "-")])

    def passed(self, partition_id: str, sequence_number: int) -> None:
        """Record an event that was skipped, or is parked."""
        self._write([(PASSED, partition_id, 0, sequence_number, "-")])

    def _write(self, rows: Iterable[tuple[str, str, int, int, str]]) -> None:
        at, wall = time.monotonic(), time.time()
        text = "".join(
            f"{kind} {self._host} {partition_id} {epoch} {sequence_number} {digest} {at!r} {wall!r}\n"
            for kind, partition_id, epoch, sequence_number, digest in rows
        )
        data = text.encode()
        assert os.write(self._descriptor, data) == len(data)

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True)
class Evidence:
    """The journals of a fleet, read together, in the order of time."""

    entries: Sequence[Entry]

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Evidence:
        entries = []
        for path in paths:
            text = path.read_text()
            # A killed process may leave half a line: of an event that it had not begun to process.
            for line in text[: text.rfind("\n") + 1].splitlines():
                kind, host, partition_id, epoch, sequence_number, digest, at, wall = line.split()
                entries.append(
                    Entry(kind, host, partition_id, int(epoch), int(sequence_number), digest, float(at), float(wall))
                )
        return cls(sorted(entries, key=lambda entry: entry.at))

    def of_kind(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]

    def _facts(self, *kinds: str) -> set[Fact]:
        return {
            Fact(entry.partition_id, entry.sequence_number, entry.digest)
            for entry in self.entries
            if entry.kind in kinds
        }

    @property
    def begun(self) -> set[Fact]:
        """What was handed over."""
        return self._facts(BEGUN)

    @property
    def processed(self) -> set[Fact]:
        """What is ok or claimed."""
        return self._facts(OK, CLAIMED)

    @property
    def duplicates(self) -> int:
        """How many deliveries were not the first of their event."""
        return len(self.of_kind(BEGUN)) - len(self.begun)

    # --------------------------------------------------------------------------------------------- promises

    def check(self, log: set[Fact], witnessed: Sequence[Witnessed] = ()) -> None:
        """Check all that holds whatever happened: what is in the log came, and nothing else did; one reader; order.

        Args:
            witnessed: The checkpoints the store took, in its order.
        """
        self.check_no_loss(log)
        self.check_stored(log, witnessed)
        self.check_one_reader()
        self.check_no_reorder()
        self.check_monotonic_checkpoints()

    def check_no_loss(self, log: set[Fact]) -> None:
        """*No loss*: every event of the log was processed, and nothing came that is not, or not there, in it."""
        missing, invented = log - self.processed, self.begun - log
        assert not missing, f"{len(missing)} of {len(log)} lost, such as {sorted(missing)[:3]}"
        assert not invented, f"{len(invented)} handed over that the log does not hold, such as {sorted(invented)[:3]}"

    def check_stored(self, log: set[Fact], witnessed: Sequence[Witnessed]) -> None:
        """*No loss*: no checkpoint was beyond what was processed at that moment, none replaced by an earlier one."""
        since: dict[tuple[str, int], float] = {}
        for entry in self.entries:
            if entry.kind in (OK, CLAIMED):
                key = (entry.partition_id, entry.sequence_number)
                since[key] = min(entry.wall, since.get(key, entry.wall))
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for fact in sorted(log):
            numbers[fact.partition_id].append(fact.sequence_number)
        reached: defaultdict[str, int] = defaultdict(lambda: -1)
        for partition_id, stored, wall in witnessed:
            before = reached[partition_id]
            assert stored >= before, f"the checkpoint of partition {partition_id} went back from {before} to {stored}"
            for number in numbers[partition_id]:
                if before < number <= stored:
                    at = since.get((partition_id, number), float("inf"))
                    text = f"partition {partition_id}: checkpoint {stored} was stored before {number} was processed"
                    assert at <= wall + RESOLUTION, text
            reached[partition_id] = stored

    def check_one_reader(self) -> None:
        """*One reader*: under one epoch of a partition a single host delivers."""
        hosts: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        for entry in self.of_kind(BEGUN):
            hosts[entry.partition_id, entry.epoch].add(entry.host)
        shared = {key: names for key, names in hosts.items() if len(names) > 1}
        assert not shared, f"several deliverers for a partition and epoch: {shared}"

    def check_no_reorder(self) -> None:
        """*No reorder*: under one epoch the numbers come without a gap and in order.

        A batch that is tried again comes whole and directly after itself.
        """
        runs: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for entry in self.of_kind(BEGUN):
            runs[entry.partition_id, entry.epoch].append(entry.sequence_number)
        for key, numbers in runs.items():
            reached = numbers[0] - 1
            for number in numbers:
                assert number <= reached + 1, f"partition and epoch {key}: {number} came after {reached}"
                reached = max(reached, number)

    def check_no_duplicate(self) -> None:
        """*No duplicate*: nothing was delivered twice."""
        assert self.duplicates == 0, f"{self.duplicates} deliveries were duplicates"

    def check_monotonic_checkpoints(self) -> None:
        """*Monotonic checkpoints*: they grow, and an ownership begins behind all that earlier ones have stored.

        The store is fenced, so that whatever an earlier epoch was answered is stored was so before the next one began.
        """
        stored: defaultdict[tuple[str, int], int] = defaultdict(lambda: -1)
        first: dict[tuple[str, int], int] = {}
        for entry in self.entries:
            key = (entry.partition_id, entry.epoch)
            if entry.kind == STORED:
                assert entry.sequence_number > stored[key], f"{entry} went backwards"
                stored[key] = entry.sequence_number
            elif entry.kind == BEGUN:
                first.setdefault(key, entry.sequence_number)
        for (partition_id, epoch), number in first.items():
            earlier = [at for (partition, before), at in stored.items() if partition == partition_id and before < epoch]
            behind = max(earlier, default=-1)
            assert number > behind, f"partition {partition_id}: epoch {epoch} began at {number}, before {behind}"

    def check_silent(self, host: str, partition_id: str, epoch: int, since: float) -> None:
        """Check that an owner handed nothing over any more after a moment."""
        late = [
            entry
            for entry in self.of_kind(BEGUN)
            if (entry.host, entry.partition_id, entry.epoch) == (host, partition_id, epoch) and entry.at > since
        ]
        assert not late, f"{len(late)} events handed over by {host} without a lease, the first {late[0]}"


async def read_log(
    connection_string: str, hub: str, consumer_group: str, ends: dict[str, int], **options: Any
) -> set[Fact]:
    """Read a hub's partitions, each to an end given as the number that follows its last event.

    Args:
        options: Of the readers.
    """
    facts = set()
    for partition_id, end in ends.items():
        if end == 0:
            continue
        numbers = []
        async with PartitionReader(
            connection_string, hub, partition_id=partition_id, consumer_group=consumer_group, **options
        ) as reader:
            async for event in reader:
                numbers.append(event.sequence_number)
                facts.add(Fact(partition_id, event.sequence_number, digest_of(event.body)))
                if event.sequence_number >= end - 1:
                    break
        assert numbers == list(range(end)), f"partition {partition_id} has numbers missing or twice"
    return facts
