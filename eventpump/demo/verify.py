"""What the demo proves: every published event against what each host wrote down, as sets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eventpump.demo.record import ProcessedEvent

Event = tuple[str, int, str]
"""Partition id, sequence number, digest of the body."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a run. All counts except `shared` are of events.

    Args:
        published: Acknowledged by the service.
        stored: Found in the hub at the end.
        processed: Of those, processed by some host.
        lost: Published or stored, and not processed by any host.
        duplicates: Processed more than once, counted each further time.
        unknown: Written down by a host, and not in the hub.
        shared: Ownerships (a partition under one epoch) that more than one host delivered under.
        take_over: Seconds from the kill to the first event of the killed host's last partition under a new owner; None
            if no host was killed, or it owned nothing.
        archived: Of what is stored, what the second subscription processed.
        unarchived: Stored, and not archived by any host.
    """

    published: int
    stored: int
    processed: int
    lost: int
    duplicates: int
    unknown: int
    shared: int
    take_over: float | None
    archived: int = 0
    unarchived: int = 0

    @property
    def holds(self) -> bool:
        """Whether every promise was kept."""
        return self.lost == 0 and self.unknown == 0 and self.shared == 0 and self.unarchived == 0

    def figures(self) -> list[tuple[str, str]]:
        """What was counted: name and value."""
        return [
            ("published", f"{self.published:,}"),
            ("processed", f"{self.processed:,}"),
            ("lost", f"{self.lost:,}"),
            ("duplicates", f"{self.duplicates:,}"),
            ("shared epochs", f"{self.shared:,}"),
            ("archived", f"{self.archived:,}"),
            ("time to take over", "-" if self.take_over is None else f"{self.take_over:.1f} s"),
        ]

    def judgement(self) -> str:
        """Return the conclusion in one sentence."""
        if self.holds:
            return "every published event was processed, and archived"
        if self.unknown:
            return f"{self.unknown:,} events were processed that the hub does not hold"
        if self.lost:
            return f"{self.lost:,} events were lost"
        if self.unarchived:
            return f"{self.unarchived:,} events never reached the archive"
        return f"{self.shared:,} times two hosts delivered a partition under the same epoch"


def judge(
    published: Iterable[str],
    stored: Iterable[Event],
    records: Mapping[str, Sequence[ProcessedEvent]],
    *,
    killed: str | None = None,
    killed_at: float | None = None,
    orphans: Iterable[str] = (),
    archived: Iterable[Event] | None = None,
) -> Verdict:
    """Compare what is stored and processed with what the service acknowledged; events are their digests."""
    wanted, held = set(published), set(stored)
    counted = Counter(record.event for each in records.values() for record in each)
    processed = set(counted)
    kept = held if archived is None else held.intersection(archived)
    missing = len(wanted - {digest for _, _, digest in held})
    return Verdict(
        published=len(wanted),
        stored=len(held),
        processed=len(processed & held),
        lost=missing + len(held - processed),
        duplicates=sum(counted.values()) - len(processed),
        unknown=len(processed - held),
        shared=_shared(records),
        take_over=_take_over(records, killed, killed_at, orphans),
        archived=len(kept),
        unarchived=len(held) - len(kept),
    )


def _shared(records: Mapping[str, Sequence[ProcessedEvent]]) -> int:
    """Count the ownerships, each a partition under one epoch, that several hosts delivered under.

    Times prove nothing here: a lease is stolen from a live host, which hears of it when the service cuts its link, and
    may be in the middle of a batch then.
    """
    hosts: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for name, each in records.items():
        for record in each:
            hosts[record.partition_id, record.epoch].add(name)
    return sum(len(names) > 1 for names in hosts.values())


def _take_over(
    records: Mapping[str, Sequence[ProcessedEvent]], killed: str | None, killed_at: float | None, orphans: Iterable[str]
) -> float | None:
    if killed is None or killed_at is None:
        return None
    firsts = [
        min(
            (
                record.time
                for name, each in records.items()
                if name != killed
                for record in each
                if record.partition_id == partition_id and record.time > killed_at
            ),
            default=None,
        )
        for partition_id in orphans
    ]
    known = [first for first in firsts if first is not None]
    return max(known) - killed_at if known else None
