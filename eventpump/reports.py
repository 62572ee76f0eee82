"""What a host tells of itself: one typed report per change of state, to the log and to hooks. Never one per event."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from eventpump.core.pump_state import CloseReason
from eventpump.core.starts import Loss, OnDataLoss
from eventpump.eventhubs.events import Checkpoint
from eventpump.interfaces import DEFAULT_SUBSCRIPTION
from eventpump.logs import present


@dataclass(frozen=True, slots=True)
class HostReport:
    """The base of every report.

    Args:
        host: The name of the reporting host.
        partition_id: The partition concerned; None where the whole host is.
        subscription: The subscription concerned; None where it is the partition or the host as a whole.
    """

    level: ClassVar[int] = logging.INFO
    host: str
    partition_id: str | None
    subscription: str | None = field(default=None, kw_only=True)

    def describe(self) -> str:
        """Say it in one line."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LeaseTaken(HostReport):
    """A lease was acquired, or taken over from another host.

    Args:
        epoch: The lease's epoch.
        stolen_from: Its owner before, where that one was alive.
    """

    epoch: int
    stolen_from: str | None = None

    def describe(self) -> str:
        source = "" if self.stolen_from is None else f", taken over from {self.stolen_from}"
        return f"owns the partition with epoch {self.epoch}{source}"


@dataclass(frozen=True, slots=True)
class LeaseLost(HostReport):
    """A lease was lost.

    Args:
        why: How that was learned.
    """

    epoch: int
    why: str

    def describe(self) -> str:
        return f"lost the lease of epoch {self.epoch}: {self.why}"


@dataclass(frozen=True, slots=True)
class LeaseReleased(HostReport):
    """A lease was given up, so that another host may acquire it at once."""

    epoch: int

    def describe(self) -> str:
        return f"released the lease of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class PumpStarted(HostReport):
    """A partition's link is attached.

    Args:
        position: Where reading began, in words.
    """

    epoch: int
    position: str

    def describe(self) -> str:
        return f"reads from {self.position}"


@dataclass(frozen=True, slots=True)
class PumpClosed(HostReport):
    """A partition's pump has ended; nothing of it is left."""

    reason: CloseReason

    def describe(self) -> str:
        return f"closed: {self.reason.value}"


@dataclass(frozen=True, slots=True)
class PumpOverdue(HostReport):
    """A pump should have ended, and its processor still runs. The partition is not started here again until it ends.

    Args:
        operation: The processor's method that runs.
        waited: How long it was waited for, in seconds.
    """

    level: ClassVar[int] = logging.ERROR
    reason: CloseReason
    operation: str | None
    waited: float

    def describe(self) -> str:
        where = "" if self.operation is None else f", {self.operation} has not returned"
        return f"not closed after {self.waited:.1f} s ({self.reason.value}){where}"


@dataclass(frozen=True, slots=True)
class LinkFailed(HostReport):
    """A receive link ended or could not be attached, and is opened again.

    Args:
        delay: Seconds until then.
    """

    level: ClassVar[int] = logging.WARNING
    error: Exception
    delay: float

    def describe(self) -> str:
        return f"the receive link failed, opening it again in {self.delay:.1f} s: {self.error}"


@dataclass(frozen=True, slots=True)
class OutsideReader(HostReport):
    """A reader outside the fleet took the partition although the lease is ours.

    Args:
        avoided_for: How long this host leaves the partition alone, in seconds.
    """

    level: ClassVar[int] = logging.WARNING
    avoided_for: float
    error: Exception

    def describe(self) -> str:
        return (
            "a reader outside the fleet holds the partition although its lease is ours; "
            f"the lease is released and the partition left alone for {self.avoided_for:.0f} s: {self.error}"
        )


@dataclass(frozen=True, slots=True)
class PartitionFailed(HostReport):
    """A partition cannot be read for a reason that trying again does not cure at once.

    Args:
        avoided_for: How long this host leaves the partition alone, in seconds.
    """

    level: ClassVar[int] = logging.ERROR
    avoided_for: float
    error: BaseException

    def describe(self) -> str:
        return f"failed; left alone for {self.avoided_for:.0f} s: {self.error}"


@dataclass(frozen=True, slots=True)
class ProcessorFailed(HostReport):
    """The user's processor raised.

    Args:
        operation: The method that did.
        failures: How often in a row.
        delay: Seconds until the same is tried again; None where it is not.
    """

    level: ClassVar[int] = logging.ERROR
    operation: str
    error: BaseException
    failures: int
    delay: float | None

    def describe(self) -> str:
        then = "" if self.delay is None else f", trying again in {self.delay:.1f} s"
        return f"{self.operation} raised ({self.failures} in a row){then}: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True)
class CheckpointWritten(HostReport):
    """A checkpoint is stored."""

    level: ClassVar[int] = logging.DEBUG
    checkpoint: Checkpoint

    def describe(self) -> str:
        return f"checkpoint at sequence number {self.checkpoint.sequence_number}"


@dataclass(frozen=True, slots=True)
class CheckpointDropped(HostReport):
    """A checkpoint could not be stored before the partition was given up: its events will come again."""

    level: ClassVar[int] = logging.WARNING
    checkpoint: Checkpoint

    def describe(self) -> str:
        return f"the checkpoint at sequence number {self.checkpoint.sequence_number} could not be stored any more"


@dataclass(frozen=True, slots=True)
class StoreFailed(HostReport):
    """The lease store failed or did not answer in time.

    Args:
        operation: What was being done.
    """

    level: ClassVar[int] = logging.WARNING
    operation: str
    error: Exception

    def describe(self) -> str:
        return f"the lease store failed at {self.operation}: {self.error}"


@dataclass(frozen=True, slots=True)
class ServiceFailed(HostReport):
    """A read about the hub failed.

    Args:
        operation: What was being read.
    """

    level: ClassVar[int] = logging.WARNING
    operation: str
    error: Exception

    def describe(self) -> str:
        return f"{self.operation} failed: {self.error}"


@dataclass(frozen=True, slots=True)
class PartitionsFound(HostReport):
    """The hub has partitions this host did not know."""

    partition_ids: tuple[str, ...]

    def describe(self) -> str:
        return f"the hub has partitions {', '.join(self.partition_ids)}"


@dataclass(frozen=True, slots=True)
class LoopBlocked(HostReport):
    """The event loop stood still for a tenth of the lease duration or longer. Leases are at risk from a third on.

    The partition is the one whose processor ran, in one step; None where it was several, or none. Reported at most once
    per partition and renew interval.

    Args:
        duration: How long, in seconds.
    """

    level: ClassVar[int] = logging.WARNING
    duration: float
    operation: str | None

    def describe(self) -> str:
        who = "" if self.operation is None else f" by {self.operation}"
        return f"the event loop was blocked for {self.duration:.1f} s{who}"


@dataclass(frozen=True, slots=True)
class HandlerSlow(HostReport):
    """A method of the processor has not returned for `handler_timeout`; reported again each time that doubles.

    Args:
        operation: The method that runs.
        running_for: How long it runs, in seconds.
        is_cancelled: Whether it is cancelled now.
    """

    level: ClassVar[int] = logging.WARNING
    operation: str
    running_for: float
    is_cancelled: bool

    def describe(self) -> str:
        then = ", and is cancelled" if self.is_cancelled else ""
        return f"{self.operation} has not returned for {self.running_for:.1f} s{then}"


@dataclass(frozen=True, slots=True)
class UnexpectedFailure(HostReport):
    """Something raised that never should: a fault in eventpump, a transport or a store."""

    level: ClassVar[int] = logging.ERROR
    operation: str
    error: BaseException

    def describe(self) -> str:
        return f"{self.operation} failed unexpectedly: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True)
class DataLost(HostReport):
    """Events that were to be read are gone.

    Args:
        loss: Why, and which: `kind`, `first_missing`, `last_missing`.
        action: What follows: reading goes on at the oldest event kept ("earliest"), or at the end of the partition
            ("latest"), or the partition is left ("fail", with a `DataLossError`).
    """

    level: ClassVar[int] = logging.WARNING
    loss: Loss
    action: OnDataLoss

    def describe(self) -> str:
        then = {
            "earliest": "goes on at the oldest event kept",
            "latest": "goes on at the end of the partition",
            "fail": "the partition is left",
        }
        return f"{self.loss.describe()}; {then[self.action]}"


@dataclass(frozen=True, slots=True)
class StartIgnored(HostReport):
    """The host's `initial_position` is not the one that the first host of its consumer group has recorded.

    Partitions without a checkpoint begin as recorded.

    Args:
        recorded: The starts in the record, by partition id, and "" for the others (see `eventpump.core.starts`).
        configured: Those of this host.
    """

    level: ClassVar[int] = logging.WARNING
    recorded: Mapping[str, str]
    configured: Mapping[str, str]

    def describe(self) -> str:
        recorded, configured = (
            ", ".join(f"{text} for partition {each}" if each else text for each, text in sorted(starts.items()))
            for starts in (self.recorded, self.configured)
        )
        return (
            f"partitions without a checkpoint begin where the consumer group's record says ({recorded}), "
            f"not at this host's initial_position ({configured})"
        )


@dataclass(frozen=True, slots=True)
class SubscriptionWithoutProcessor(HostReport):
    """A subscription of the consumer group has no processor on this host: others deliver to it, or none does."""

    level: ClassVar[int] = logging.WARNING

    def describe(self) -> str:
        return "this host has no processor for the subscription, and does not deliver to it"


@dataclass(frozen=True, slots=True)
class LinkRewound(HostReport):
    """The link that subscriptions share is opened again, further back, for one that needs earlier events.

    The other subscriptions of the partition receive nothing until the link has reached their positions again.

    Args:
        sequence_number: The number of the first event that it needs; None if it is still to be found out.
    """

    sequence_number: int | None

    def describe(self) -> str:
        where = "its start" if self.sequence_number is None else f"sequence number {self.sequence_number}"
        return f"the shared receive link is opened again at {where}; the other subscriptions wait meanwhile"


@dataclass(frozen=True, slots=True)
class SubscriptionSlow(HostReport):
    """A subscription has held back the others of its partition for `slow_after`; reported again each time that doubles.

    Args:
        share: The part of the cache that only this subscription has not read, from 0 to 1.
        slow_for: How long it has held the others back, in seconds.
        is_suspended: Whether it is suspended now.
    """

    level: ClassVar[int] = logging.WARNING
    share: float
    slow_for: float
    is_suspended: bool

    def describe(self) -> str:
        then = "; it is suspended at its checkpoint" if self.is_suspended else ""
        return f"holds the other subscriptions back for {self.slow_for:.0f} s ({self.share:.0%} of the cache){then}"


@dataclass(frozen=True, slots=True)
class LinkStalled(HostReport):
    """A receive link was open and silent, and is judged dead. It is opened again; nothing is lost.

    Args:
        evidence: What showed it, in words.
        silent_for: How long it had brought nothing, in seconds.
        drops_connection: Whether its connection is dropped, because another link was silent as well.
    """

    level: ClassVar[int] = logging.WARNING
    evidence: str
    silent_for: float
    drops_connection: bool

    def describe(self) -> str:
        what = "its connection is dropped" if self.drops_connection else "it is opened again"
        return f"the receive link was silent for {self.silent_for:.1f} s, {what}: {self.evidence}"


Hook = Callable[[HostReport], None]
"""Is called with every report, on the event loop: it must not block. What it raises is logged and goes no further."""


class Reporter:
    """Gives every report to the log, one line each, and to the hooks.

    Args:
        logger: Where the lines go.
        fields: Fields of every log record, beside `owner_id` and `partition_id`.
    """

    __slots__ = ("_counts", "_fields", "_hooks", "_logger")

    def __init__(
        self, logger: logging.Logger, hooks: Iterable[Hook] = (), fields: Mapping[str, object] | None = None
    ) -> None:
        self._logger = logger
        self._fields = fields or {}
        self._hooks = tuple(hooks)
        self._counts: Counter[type[HostReport]] = Counter()

    def count(self, kind: type[HostReport]) -> int:
        """How many reports of a kind there were."""
        return self._counts[kind]

    def report(self, report: HostReport) -> None:
        """Hand a report on."""
        self._counts[type(report)] += 1
        if self._logger.isEnabledFor(report.level):
            where = "" if report.partition_id is None else f" partition {report.partition_id}:"
            if report.subscription not in {None, DEFAULT_SUBSCRIPTION}:
                where += f" {report.subscription}:"
            error = getattr(report, "error", None)
            # The user's own failures need their traceback; everything else says all in its line.
            trace = error if isinstance(report, ProcessorFailed | UnexpectedFailure) else None
            extra = {
                **self._fields,
                **present(owner_id=report.host, partition_id=report.partition_id, subscription=report.subscription),
            }
            text = report.describe()
            self._logger.log(report.level, "host %s:%s %s", report.host, where, text, exc_info=trace, extra=extra)
        for hook in self._hooks:
            try:
                hook(report)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:
                # Nothing was awaited: a CancelledError, too, is the hook's own.
                self._logger.exception("a hook failed on %s", type(report).__name__)
