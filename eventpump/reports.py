"""Host events: one typed report per change of state, for the log and for hooks. Never one per received event."""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypeAlias

from eventpump import homes
from eventpump.compiled import BuildInfo as BuildInfo
from eventpump.compiled import build_info as build_info
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION
from eventpump.core.pump_state import CloseReason
from eventpump.core.pump_state import PumpState as PumpState
from eventpump.core.sharing import LinkState as LinkState
from eventpump.core.sharing import PressureState as PressureState
from eventpump.core.starts import Loss as Loss
from eventpump.core.starts import LossKind as LossKind
from eventpump.core.starts import OnDataLoss
from eventpump.core.status import BatchState as BatchState
from eventpump.core.status import ProducerStats as ProducerStats
from eventpump.core.status import SendCount as SendCount
from eventpump.eventhubs.events import Checkpoint, ReceivedEvent, number_of
from eventpump.logs import present


@dataclass(frozen=True, slots=True)
class EventRange:
    """The events of one call of a processor, or of one batch.

    Args:
        first_sequence_number: The number of the first event; None if none of them can be read.
        last_sequence_number: The number of the last one; likewise.
        count: How many events there are. Of a subscription with `keys` or a `filter`, or of one key, fewer than the
            numbers from the first to the last one.
    """

    first_sequence_number: int | None
    last_sequence_number: int | None
    count: int

    @classmethod
    def of(cls, events: Sequence[ReceivedEvent]) -> Self:
        """Return the range of some events, which are in order."""
        numbers = [number for event in events if (number := number_of(event)) is not None]
        return cls(numbers[0] if numbers else None, numbers[-1] if numbers else None, len(events))

    def __str__(self) -> str:
        if not self.count:
            return "a batch without events"
        if self.first_sequence_number is None:
            return f"{self.count} events without a readable number"
        if self.count == 1:
            return f"event {self.first_sequence_number}"
        return f"events {self.first_sequence_number} to {self.last_sequence_number} ({self.count})"


def _numbers_of(events: EventRange | None) -> dict[str, object]:
    """Return the fields of a log record that say which events it is about."""
    if events is None:
        return {}
    return present(
        first_sequence_number=events.first_sequence_number,
        last_sequence_number=events.last_sequence_number,
        event_count=events.count,
    )


@dataclass(frozen=True, slots=True)
class HostReport:
    """The base of all reports.

    Args:
        host: The name (`owner_id`) of the host.
        partition_id: The partition; None if the report is about the host.
        subscription: The subscription; None if the report is about the partition or the host as a whole.

    Attributes:
        level: The log level of reports of this class.
    """

    level: ClassVar[int] = logging.INFO
    host: str
    partition_id: str | None
    subscription: str | None = field(default=None, kw_only=True)

    def describe(self) -> str:
        """Return the report as one line of text."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LeaseTaken(HostReport):
    """A lease was acquired, or taken from another host.

    Args:
        epoch: The lease's epoch.
        stolen_from: The former owner, if its lease was valid; else None.
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
        epoch: The lease's epoch.
        why: How the host noticed, in words.
    """

    epoch: int
    why: str

    def describe(self) -> str:
        return f"lost the lease of epoch {self.epoch}: {self.why}"


@dataclass(frozen=True, slots=True)
class LeaseReleased(HostReport):
    """A lease was released, so that another host can acquire it at once.

    Args:
        epoch: The lease's epoch.
    """

    epoch: int

    def describe(self) -> str:
        return f"released the lease of epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class PumpStarted(HostReport):
    """A partition's link is attached.

    Args:
        epoch: The lease's epoch.
        position: Where reading began, in words.
    """

    epoch: int
    position: str

    def describe(self) -> str:
        return f"reads from {self.position}"


@dataclass(frozen=True, slots=True)
class PumpClosed(HostReport):
    """A partition's pump has ended completely.

    Args:
        reason: Why it ended.
    """

    reason: CloseReason

    def describe(self) -> str:
        return f"closed: {self.reason.value}"


@dataclass(frozen=True, slots=True)
class PumpOverdue(HostReport):
    """A pump should have ended, but its processor still runs. Until it ends, the partition is not started here again.

    Args:
        reason: Why the pump should have ended.
        operation: The processor's method that runs; None if none does.
        waited: Seconds that the host has waited.
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
    """A receive link ended or could not be attached, and will be opened again.

    Args:
        error: Why.
        delay: Seconds until it is opened again.
    """

    level: ClassVar[int] = logging.WARNING
    error: Exception
    delay: float

    def describe(self) -> str:
        return f"the receive link failed, opening it again in {self.delay:.1f} s: {self.error}"


@dataclass(frozen=True, slots=True)
class LinkRestored(HostReport):
    """A partition's link is attached again, after its failure was reported.

    Args:
        epoch: The lease's epoch.
        position: Where reading continues, in words.
    """

    level: ClassVar[int] = logging.WARNING  # as the failure: who sees the one sees the other
    epoch: int
    position: str

    def describe(self) -> str:
        return f"the link is restored, reads from {self.position}"


@dataclass(frozen=True, slots=True)
class OutsideReader(HostReport):
    """A reader that uses no lease took the partition although this host holds its lease.

    Args:
        avoided_for: Seconds for which this host does not start the partition.
        error: The service's error.
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
    """A partition cannot be read, for a reason that a retry does not cure at once.

    Args:
        avoided_for: Seconds for which this host does not start the partition.
        error: The reason.
    """

    level: ClassVar[int] = logging.ERROR
    avoided_for: float
    error: BaseException

    def describe(self) -> str:
        return f"failed; left alone for {self.avoided_for:.0f} s: {self.error}"


FailureOutcome: TypeAlias = Literal["retried", "stopped"]
"""What follows a failure of a processor."""


@dataclass(frozen=True, slots=True)
class ProcessorFailed(HostReport):
    """The user's processor raised.

    Args:
        operation: The method that raised; "park" if an event could not be parked.
        error: What it raised.
        failures: How many times in a row.
        delay: Seconds until the retry; None if there is no retry.
        events: The events that it was called for; None if it is called without any.
        outcome: What follows by the failure policy: the events are "retried", or the pump is "stopped"; None if another
            report says that they are skipped or parked, or if the policy does not apply.
    """

    level: ClassVar[int] = logging.ERROR
    operation: str
    error: BaseException
    failures: int
    delay: float | None
    events: EventRange | None = None
    outcome: FailureOutcome | None = None

    def describe(self) -> str:
        of = "" if self.events is None else f" for {self.events}"
        then = "" if self.delay is None else f", trying again in {self.delay:.1f} s"
        what = f"{self.operation} raised{of} ({self.failures} in a row){then}"
        return f"{what}: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True)
class EventSkipped(HostReport):
    """An event that could not be processed was passed over (`"skip"`). It counts as processed.

    Args:
        sequence_number: Its number; None if it cannot be read.
        error: What the processor raised last.
        attempts: How many times the event was delivered, alone and in its batch.
    """

    level: ClassVar[int] = logging.ERROR
    sequence_number: int | None
    error: Exception
    attempts: int

    def describe(self) -> str:
        which = "" if self.sequence_number is None else f" {self.sequence_number}"
        return f"skipped event{which} after {self.attempts} attempts: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True)
class EventParked(HostReport):
    """An event that could not be processed is stored elsewhere (`Park`). It counts as processed.

    Args:
        sequence_number: Its number; None if it cannot be read.
        error: What the processor raised last.
        attempts: How many times the event was delivered, alone and in its batch.
        hub: The hub that it is stored in; None if the program's own code stored it.
    """

    level: ClassVar[int] = logging.WARNING
    sequence_number: int | None
    error: Exception
    attempts: int
    hub: str | None

    def describe(self) -> str:
        which = "" if self.sequence_number is None else f" {self.sequence_number}"
        where = "" if self.hub is None else f" in hub {self.hub}"
        return f"parked event{which}{where} after {self.attempts} attempts: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True)
class CheckpointWritten(HostReport):
    """A checkpoint is stored.

    Args:
        checkpoint: The checkpoint.
    """

    level: ClassVar[int] = logging.DEBUG
    checkpoint: Checkpoint

    def describe(self) -> str:
        return f"checkpoint at sequence number {self.checkpoint.sequence_number}"


@dataclass(frozen=True, slots=True)
class CheckpointDropped(HostReport):
    """A checkpoint could not be stored before the partition was released: its events will be delivered again.

    Args:
        checkpoint: The checkpoint.
    """

    level: ClassVar[int] = logging.WARNING
    checkpoint: Checkpoint

    def describe(self) -> str:
        return f"the checkpoint at sequence number {self.checkpoint.sequence_number} could not be stored any more"


def _trying(left: float | None) -> str:
    return "" if left is None else f", trying again for {left:.0f} s"


@dataclass(frozen=True, slots=True)
class StoreFailed(HostReport):
    """The lease store failed or did not answer in time.

    Args:
        operation: The operation that failed.
        error: Its error.
        left: Seconds for which a starting host tries again before it ends; None for no end.
    """

    level: ClassVar[int] = logging.WARNING
    operation: str
    error: Exception
    left: float | None = None

    def describe(self) -> str:
        return f"the lease store failed at {self.operation}{_trying(self.left)}: {self.error}"


@dataclass(frozen=True, slots=True)
class StoreRestored(HostReport):
    """The lease store answers again, after its failure was reported.

    Args:
        operation: The operation that had failed and succeeds now.
        failed_for: Seconds since the first failure.
    """

    level: ClassVar[int] = logging.WARNING  # as the failure: who sees the one sees the other
    operation: str
    failed_for: float

    def describe(self) -> str:
        return f"the lease store answers again: {self.operation} succeeded, {self.failed_for:.1f} s after it failed"


@dataclass(frozen=True, slots=True)
class ServiceFailed(HostReport):
    """A request for the hub's or a partition's properties failed.

    Args:
        operation: What was requested.
        error: Its error.
        left: Seconds for which a starting host tries again before it ends; None for no end.
    """

    level: ClassVar[int] = logging.WARNING
    operation: str
    error: Exception
    left: float | None = None

    def describe(self) -> str:
        return f"{self.operation} failed{_trying(self.left)}: {self.error}"


@dataclass(frozen=True, slots=True)
class PartitionsFound(HostReport):
    """The hub has partitions that this host did not know.

    Args:
        partition_ids: The new partitions.
    """

    partition_ids: tuple[str, ...]

    def describe(self) -> str:
        return f"the hub has partitions {', '.join(self.partition_ids)}"


@dataclass(frozen=True, slots=True)
class LoopBlocked(HostReport):
    """The event loop was blocked for a tenth of the lease duration or longer. From a third on, leases are at risk.

    The partition is the one whose processor blocked it; None if it was not one single processor. Reported at most once
    per partition and renew interval.

    Args:
        duration: Seconds for which it was blocked.
        operation: The processor's method that blocked it; None if unknown.
    """

    level: ClassVar[int] = logging.WARNING
    duration: float
    operation: str | None

    def describe(self) -> str:
        who = "" if self.operation is None else f" by {self.operation}"
        return f"the event loop was blocked for {self.duration:.1f} s{who}"


@dataclass(frozen=True, slots=True)
class HandlerSlow(HostReport):
    """A method of the processor has not returned for `handler_timeout`; reported again whenever that has doubled.

    Args:
        operation: The method that runs.
        running_for: Seconds since it was called.
        is_cancelled: Whether it is being cancelled now.
        events: The events that it was called for; None if it is called without any.
        waits_at: The line of the user's code at which it waits, as "file:line function", with what it awaits there if
            that is a function of a library; None if that is not known.
    """

    level: ClassVar[int] = logging.WARNING
    operation: str
    running_for: float
    is_cancelled: bool
    events: EventRange | None = None
    waits_at: str | None = None

    def describe(self) -> str:
        of = "" if self.events is None else f" for {self.events}"
        where = "" if self.waits_at is None else f"; it waits at {self.waits_at}"
        then = ", and is cancelled" if self.is_cancelled else ""
        return f"{self.operation}{of} has not returned for {self.running_for:.1f} s{then}{where}"


@dataclass(frozen=True, slots=True)
class BatchNotTaken(HostReport):
    """No loop over `batches()` has taken a batch for `handler_timeout`; reported again whenever that has doubled.

    All loops are busy with other batches, or there is none. The partition waits, and no event is lost.

    Args:
        waited: Seconds since it was offered.
        events: The events of the batch.
    """

    level: ClassVar[int] = logging.WARNING
    waited: float
    events: EventRange

    def describe(self) -> str:
        return f"no loop over batches() has taken {self.events} for {self.waited:.1f} s"


@dataclass(frozen=True, slots=True)
class UnexpectedFailure(HostReport):
    """Something raised that must not: a bug in eventpump, a transport or a store.

    Args:
        operation: What raised.
        error: What it raised.
    """

    level: ClassVar[int] = logging.ERROR
    operation: str
    error: BaseException

    def describe(self) -> str:
        return f"{self.operation} failed unexpectedly: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, slots=True)
class BalancerFailed(HostReport):
    """The host's balancer raised, or made a plan that cannot be carried out; the rest of it is. Once per problem.

    Args:
        problem: What is wrong.
    """

    level: ClassVar[int] = logging.ERROR
    problem: str

    def describe(self) -> str:
        return f"the balancer failed, and what is wrong of its plan is left out: {self.problem}"


@dataclass(frozen=True, slots=True)
class DataLost(HostReport):
    """Events that were to be read are gone.

    Args:
        loss: Which events, and why.
        action: What the host does: continue at the oldest retained event ("earliest") or at the end of the partition
            ("latest"), or leave the partition with a `DataLossError` ("fail").
    """

    level: ClassVar[int] = logging.WARNING
    loss: Loss
    action: OnDataLoss

    def describe(self) -> str:
        then = {
            "earliest": "goes on at the oldest event kept",
            "latest": "goes on at the end of the partition",
            "fail": "the partition is left; if they are not missed, as after a test service was restarted beside old "
            'leases, set on_data_loss="earliest" once, or delete the leases',
        }
        return f"{self.loss.describe()}; {then[self.action]}"


@dataclass(frozen=True, slots=True)
class LeaseStoreEmpty(HostReport):
    """The lease store has no checkpoint of the consumer group, and the hub has events: all of them are read.

    Reported once per group, by the first host in the store, unless it has an `initial_position`. If the group has
    processed events before, this is another store than it had: another container, prefix or file.

    Args:
        hub: The hub.
        consumer_group: The consumer group.
    """

    level: ClassVar[int] = logging.WARNING
    hub: str
    consumer_group: str

    def describe(self) -> str:
        return (
            f"no checkpoint anywhere: reading from the beginning (hub {self.hub}, consumer group "
            f"{self.consumer_group}); if it has been read before, this is not its lease store"
        )


@dataclass(frozen=True, slots=True)
class StartIgnored(HostReport):
    """The host's `initial_position`, or the `start` of a subscription, differs from the one that was recorded first.

    Partitions without a checkpoint begin at the recorded position.

    Args:
        recorded: The recorded positions as text, by partition id, and "" for all others (see `eventpump.core.starts`).
        configured: The positions of this host, in the same form.
    """

    level: ClassVar[int] = logging.WARNING
    recorded: Mapping[str, str]
    configured: Mapping[str, str]

    def describe(self) -> str:
        recorded, configured = (
            ", ".join(f"{text} for partition {each}" if each else text for each, text in sorted(starts.items()))
            for starts in (self.recorded, self.configured)
        )
        whose, asked = "consumer group", "at this host's initial_position"
        if self.subscription is not None:
            whose, asked = "subscription", "where this host has asked for"
        return (
            f"partitions without a checkpoint begin where the {whose}'s record says ({recorded}), "
            f"not {asked} ({configured})"
        )


@dataclass(frozen=True, slots=True)
class SharedStoreNotice(HostReport):
    """Something is wrong among the members of a group that share a lease store with other libraries' processors.

    Args:
        problem: What it is, where, and what to do about it.
    """

    level: ClassVar[int] = logging.WARNING
    problem: str

    def describe(self) -> str:
        return self.problem


@dataclass(frozen=True, slots=True)
class SubscriptionWithoutProcessor(HostReport):
    """A subscription of the consumer group has no processor on this host, and waits on the partitions that it owns.

    Reported when the subscription is found, and again when the host owns a partition more.

    Args:
        lags: By partition that the host owns, how many events wait for it, by its stored checkpoint, or its start, and
            the partition's end; None where that is not known.
    """

    level: ClassVar[int] = logging.WARNING
    lags: Mapping[str, int | None]

    def describe(self) -> str:
        known = [lag for lag in self.lags.values() if lag is not None]
        unknown = "" if len(known) == len(self.lags) else f" (unknown on {len(self.lags) - len(known)})"
        what = "this host has no processor for the subscription, and does not deliver to it"
        return f"{what}; on its {len(self.lags)} partitions, {sum(known)} events wait{unknown}" if self.lags else what


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
class LinkStateChanged(HostReport):
    """What a subscription reads a partition over has changed.

    Not reported: that it reads over the shared link from the first on (`PumpStarted`), and that its pump has ended
    (`PumpClosed`) without the subscription having ended.

    Args:
        before: What it read over before.
        state: What it reads over now.
    """

    before: LinkState
    state: LinkState

    def describe(self) -> str:
        return _LINK_STATES[self.state]


_LINK_STATES = {
    LinkState.OPENING: "its link is being opened",
    LinkState.SHARED: "reads over the link that the subscriptions share",
    LinkState.OWN: "reads over a link of its own",
    LinkState.WAITING: "waits: the shared link was opened again further back, and has not come to its position yet",
    LinkState.PAUSED: "is paused after its running batch",
    LinkState.SUSPENDED: "is suspended at its checkpoint",
    LinkState.ENDED: "was ended",
}


@dataclass(frozen=True, slots=True)
class PositionSought(HostReport):
    """A subscription goes on elsewhere, because a seek asked for it. It is stored.

    Args:
        checkpoint: The checkpoint after which it goes on.
    """

    checkpoint: Checkpoint

    def describe(self) -> str:
        return f"continues at sequence number {self.checkpoint.sequence_number + 1}, as a seek asked for"


@dataclass(frozen=True, slots=True)
class RangeReplayed(HostReport):
    """A range was delivered again, and processed. The checkpoint did not change.

    Args:
        first: The sequence number that the range begins with.
        last: The sequence number that it ends with.
    """

    first: int
    last: int

    def describe(self) -> str:
        return f"sequence numbers {self.first} to {self.last} were replayed"


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
    """A receive link was attached but silent, and is considered dead. It is opened again; no event is lost.

    Args:
        evidence: Why it is considered dead, in words.
        silent_for: Seconds without a message.
        drops_connection: Whether its connection is dropped too, because another link was silent as well.
    """

    level: ClassVar[int] = logging.WARNING
    evidence: str
    silent_for: float
    drops_connection: bool

    def describe(self) -> str:
        what = "its connection is dropped" if self.drops_connection else "it is opened again"
        return f"the receive link was silent for {self.silent_for:.1f} s, {what}: {self.evidence}"


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The status of a partition on a host.

    Args:
        partition_id: The partition.
        subscription: The subscription whose processor runs, or that is suspended.
        epoch: The epoch of the lease; None if the lease is gone and the pump has not ended yet.
        state: The state of the pump.
        last_sequence_number: The sequence number of the last event delivered; of a subscription with `keys` or a
            `filter`, of the last one that was delivered or did not match.
        lag: See `PartitionContext.lag`; None if it is not known.
        is_attached: Whether its link is attached now.
        held_events: Events received that only this subscription has not read yet: what it holds back from the others
            that share its link.
        pressure: How it holds them back.
        link_state: What it reads over.
        checkpoint: The checkpoint that the store is known to hold, after which a new owner continues; None if there is
            none yet, or it has not been read.
        buffered_bytes: Bytes of the partition that were received and are not processed yet, over all its subscriptions
            and links; the same in each row of a partition.
        busy_since: When the processor was called with what it has in hand, of several calls the oldest, or when a loop
            took its batch; None if it is not called now. Of a decorated function: with the event that it has in hand.
        events_in_hand: The events of that call; None for none.
    """

    partition_id: str
    subscription: str
    epoch: int | None
    state: PumpState
    last_sequence_number: int | None
    lag: int | None
    is_attached: bool
    held_events: int
    pressure: PressureState
    link_state: LinkState
    checkpoint: Checkpoint | None
    buffered_bytes: int
    busy_since: datetime | None
    events_in_hand: EventRange | None

    @property
    def state_name(self) -> str:
        """The state as metrics show it: `detached` where the pump runs, and its link is not attached."""
        if self.state is PumpState.RUNNING and not self.is_attached:
            return "detached"
        return self.state.value

    @property
    def checkpointed_lag(self) -> int | None:
        """How many events the newest one is ahead of the checkpoint; None if that is not known."""
        if self.lag is None:
            return None
        if self.last_sequence_number is None:
            return self.lag  # before the first delivery it is known only where there is nothing to deliver
        if self.checkpoint is None:
            return None
        return max(0, self.last_sequence_number + self.lag - self.checkpoint.sequence_number)


class WaitsFor(enum.Enum):
    """What a subscription waits for on a partition."""

    HANDLER = "handler"
    """A call of the processor to return, or a loop to take its batch."""
    RETRY = "retry"
    """The time of the next attempt, after the processor has failed."""
    LEASE = "lease"
    """A renewal for which handlers leave no time, or whether the lease is lost."""
    START = "start"
    """The lease store or the hub, to know where to begin."""
    LINK = "link"
    """The link to be attached."""
    CREDIT = "credit"
    """Room for more events."""
    EVENTS = "events"
    """Events: there are none."""
    RESUME = "resume"
    """A call of `resume`: it is paused or suspended."""
    END = "end"
    """Its own end."""


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """What a host is doing on a partition for one subscription.

    Args:
        status: The status.
        waits_for: What it waits for now.
        text: The same in words, such as the line at which a handler waits.
        expires_in: Seconds until the lease expires; None if it is gone.
        renewal_in: Seconds until it is renewed; None if no time is set.
        is_renewing: Whether it is being renewed now.
    """

    status: PartitionStatus
    waits_for: WaitsFor
    text: str
    expires_in: float | None
    renewal_in: float | None
    is_renewing: bool

    def __str__(self) -> str:
        status = self.status
        where = f"partition {status.partition_id}"
        if status.subscription != DEFAULT_SUBSCRIPTION:
            where += f" of {status.subscription}"
        lease = "no lease" if self.expires_in is None else f"epoch {status.epoch}, expires in {self.expires_in:.1f} s"
        if self.is_renewing:
            lease += ", is being renewed"
        elif self.renewal_in is not None:
            lease += f", renewed in {self.renewal_in:.1f} s"
        checkpoint = "no checkpoint" if status.checkpoint is None else f"checkpoint {status.checkpoint.sequence_number}"
        delivered = "" if status.last_sequence_number is None else f", delivered {status.last_sequence_number}"
        lag = "lag not known" if status.lag is None else f"lag {status.lag}"
        return (
            f"{where} waits for {self.text}\n  {status.state.value}, {lease}; {checkpoint}{delivered}, {lag}; "
            f"{status.buffered_bytes} bytes received and not processed"
        )


@dataclass(frozen=True, slots=True)
class StoreCall:
    """A call of the lease store that has not returned.

    Args:
        operation: What it does.
        partition_id: The partition; None if it is not about one.
        seconds: How long ago it was asked for.
        is_sent: Whether it was sent; others wait for their turn.
    """

    operation: str
    partition_id: str | None
    seconds: float
    is_sent: bool

    def __str__(self) -> str:
        of = "" if self.partition_id is None else f" of partition {self.partition_id}"
        return f"{self.operation}{of}, for {self.seconds:.1f} s{'' if self.is_sent else ', waits for its turn'}"


@dataclass(frozen=True, slots=True)
class HostDescription:
    """What a host is doing now; see `EventProcessorHost.describe`.

    Args:
        owner_id: The host's name in the leases.
        hub: The hub.
        consumer_group: The consumer group.
        health: "ready", or what the host waits for.
        lease_store: Its lease store, as text.
        buffered_bytes: Bytes of events that were received and are not processed yet.
        partitions: What it does on each partition.
        store_calls: The calls of its lease store that have not returned, the longest first.
    """

    owner_id: str
    hub: str
    consumer_group: str
    health: str
    lease_store: str
    buffered_bytes: int
    partitions: tuple[PartitionDescription, ...]
    store_calls: tuple[StoreCall, ...]

    def __str__(self) -> str:
        head = f"host {self.owner_id}, hub {self.hub}, consumer group {self.consumer_group}: {self.health}; "
        head += f"{self.buffered_bytes} bytes received and not processed"
        calls = [f"store: {each}" for each in self.store_calls] or [f"store: no call is under way ({self.lease_store})"]
        return "\n".join([head, *map(str, self.partitions or ["no partition is run here"]), *calls])


Hook = Callable[[HostReport], None]
"""Called with every report, on the event loop. It must not block. What it raises is logged and otherwise ignored."""


def _frames_of_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame on that is not of this library, or of the event loop that it runs in."""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _NOT_USERS:
            return trace
        trace = trace.tb_next
    return None


_NOT_USERS: Final = frozenset({"eventpump", "asyncio", "concurrent"})


class Reporter:
    """Writes every report to the log, one line each, and passes it to the hooks.

    Args:
        logger: Where the lines go.
        hooks: Called with every report.
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
        """Return how many reports of a class there were."""
        return self._counts[kind]

    def report(self, report: HostReport) -> None:
        """Log a report, and pass it to the hooks."""
        self._counts[type(report)] += 1
        if self._logger.isEnabledFor(report.level):
            where = "" if report.partition_id is None else f" partition {report.partition_id}:"
            if report.subscription not in {None, DEFAULT_SUBSCRIPTION}:
                where += f" {report.subscription}:"
            error = getattr(report, "error", None)
            # The user's own failures need their traceback; everything else says all in its line.
            trace: Any = None
            if isinstance(report, UnexpectedFailure) or (
                isinstance(report, ProcessorFailed) and self._logger.isEnabledFor(logging.DEBUG)
            ):
                trace = error
            elif isinstance(report, ProcessorFailed):
                trace = (type(error), error, _frames_of_user(report.error.__traceback__))
            extra = {
                **self._fields,
                **present(owner_id=report.host, partition_id=report.partition_id, subscription=report.subscription),
                **_numbers_of(getattr(report, "events", None)),
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


if not TYPE_CHECKING:  # to checkers it would mean that every name exists
    _KINDS = [name for name, made in globals().items() if isinstance(made, type) and issubclass(made, HostReport)]
    __all__, __getattr__, __dir__ = homes.public(
        __name__,
        {
            "compiled": "BuildInfo build_info",
            "core.pump_state": "PumpState",
            "core.sharing": "LinkState PressureState",
            "core.starts": "Loss LossKind",
            "core.status": "BatchState ProducerStats SendCount",
        },
        own=[
            "EventRange",
            "Hook",
            "HostDescription",
            "PartitionDescription",
            "PartitionStatus",
            "StoreCall",
            "WaitsFor",
            *_KINDS,
        ],
    )
