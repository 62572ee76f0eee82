"""What a pump reads: finds where its subscription begins, joins the partition's link there, and restarts there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from eventpump.aio.retry import retrying
from eventpump.aio.tasks import resolve
from eventpump.consumer.calls.handler import PumpEndedError
from eventpump.consumer.keyed import KeyedProcessor
from eventpump.consumer.lease.ownership import Ownership
from eventpump.consumer.link.member import MemberCalls, MemberFeed
from eventpump.consumer.link.sharing import SharedPartition
from eventpump.consumer.link.silence import SilenceWatch, SilentLink
from eventpump.consumer.processor import EventProcessor
from eventpump.consumer.pump.failing import FailureHandling
from eventpump.consumer.pump.partition import OpenPartition, delivered_before_seek, describe_position, not_delivered
from eventpump.consumer.pump.requests import Seek
from eventpump.consumer.pump.steps import StepwiseProcessor
from eventpump.consumer.record.checkpoints import CheckpointWriter, store_error
from eventpump.consumer.record.continuity import PumpContinuity
from eventpump.consumer.record.starts import (
    BEYOND_END_PAUSE,
    Beginning,
    HubRecreatedError,
    RecordChangedError,
    StartFinder,
    loss_error,
)
from eventpump.consumer.record.subscriptions import Subscription, SubscriptionEndedError, SubscriptionStart
from eventpump.core.backoff import UNLIMITED
from eventpump.core.checkpoint import DEFAULT_SUBSCRIPTION, CheckpointTracker
from eventpump.core.pump_state import CloseReason
from eventpump.core.rewind import PositionSearch, ReplayedRanges, UnknownPositionError
from eventpump.core.sharing import Held
from eventpump.core.starts import Loss, LossKind, first_number
from eventpump.errors import ConfigurationError, ConsumerDisconnectedError, EventPumpError, RequestRefusedError
from eventpump.eventhubs.conditions import ARGUMENT_ERROR
from eventpump.eventhubs.events import Checkpoint, EventPosition, ReceivedEvent
from eventpump.interfaces import CLOSE_TIMEOUT, PartitionProperties
from eventpump.reports import (
    CheckpointDropped,
    DataLost,
    LinkFailed,
    LinkRestored,
    LinkRewound,
    LinkStalled,
    PositionSought,
    PumpStarted,
    StoreFailed,
    SubscriptionSlow,
)


class PartitionReading:
    """Reads one partition for one subscription, from the position that its checkpoint or its start gives.

    Args:
        failing: Reports an error that ends the pump to the processor.
        on_stolen: Called when a reader with a higher owner level took the link; no batch follows.
        on_suspended: Called when it holds other subscriptions back for too long, and is to be suspended for it.
        on_link_changed: Called when what it reads over may have changed.

    Attributes:
        partition: What is being read; None before the start position is found, and while it is found again.
        was_attached: Whether a link was ever attached.
    """

    def __init__(
        self,
        ownership: Ownership,
        subscription: Subscription,
        shared: SharedPartition,
        *,
        silence: SilenceWatch,
        failing: FailureHandling,
        on_stolen: Callable[[ConsumerDisconnectedError], None],
        on_suspended: Callable[[], None],
        on_link_changed: Callable[[], None],
    ) -> None:
        services = ownership.services
        self._ownership = ownership
        self._partition_id = ownership.partition_id
        self._services = services
        self._subscription = subscription
        self._settings = subscription.settings
        self._group = subscription.start
        self._shared = shared
        self._silence = silence
        self._failing = failing
        self._on_stolen = on_stolen
        self._on_suspended = on_suspended
        self._on_link_changed = on_link_changed
        self._sought_back = (0, 0)
        self._sought: Checkpoint | None = None
        self._starts = StartFinder(ownership, subscription.start)
        self.partition: OpenPartition | None = None
        self.was_attached = False
        self._has_link_trouble = False

    @property
    def key(self) -> str:
        """The name under which the store keeps the checkpoints."""
        return self._starts.key

    async def start(self, processor: EventProcessor, *, shares_from: int | None = None) -> OpenPartition:
        """Find the start position and begin to read there.

        Raises:
            PumpEndedError: The pump ends, maybe because the position could not be found.
        """
        try:
            beginning = await self._find_beginning()
        except SubscriptionEndedError:
            self._ownership.end(CloseReason.SHUTDOWN)
            raise PumpEndedError from None
        except EventPumpError as error:
            await self._failing.end_with(error)
            raise PumpEndedError from error
        self._ownership.check_ending()
        partition_id, services = self._partition_id, self._services
        tracker = CheckpointTracker(
            partition_id,
            self._settings.checkpoint_policy,
            beginning.checkpoint,
            is_in_order=not isinstance(processor, KeyedProcessor | StepwiseProcessor),
        )
        writer = CheckpointWriter(self._ownership, tracker, self.key)
        feed = self._join(beginning, shares_from=shares_from)
        origin = (services.scope, partition_id, beginning.hub_created_at)
        replayed = ReplayedRanges(*self._sought_back)
        self._sought = None
        self.partition = OpenPartition(
            partition_id,
            processor,
            feed,
            tracker,
            writer,
            self._continuity_from(beginning),
            beginning,
            origin,
            self._ownership.life,
            replayed,
        )
        self._on_link_changed()
        return self.partition

    async def restart(self, seek: Seek | None = None) -> OpenPartition:
        """Find the start position again, and read from there: after a seek's checkpoint, or as what was read does not
        exist."""
        partition = self._present
        self._ownership.check_ending()
        if seek is None:
            partition.note_passed()
            partition.tracker.closing()
        await partition.feed.aclose()
        await self._ownership.unless_ending(partition.writer.flush(self._services.store_timeout))
        await partition.writer.aclose()
        partition.cancel_timer()
        # A checkpoint requested from now on, until reading begins, would be one of what does not exist any more, or of
        # what was delivered before a seek.
        self.partition = None
        shares_from: int | None = None
        if seek is not None:
            assert isinstance(seek.place, Checkpoint)
            self._sought = seek.place
            await self._starts.store(seek.place, is_reset=True)
            self._ownership.report(PositionSought, seek.place)
            if seek.done is not None:
                resolve(seek.done, True)
            before = partition.feed.number
            if before is None or seek.place.sequence_number + 1 < before:
                shares_from = max(self._sought_back[1], before or 0)
                self._sought_back = self._shared.feeds_made, shares_from
        return await self.start(partition.processor, shares_from=shares_from)

    async def may_restart(self, error: Exception) -> bool:
        """Return whether the start position is to be found again after a feed ended with this error;
        else end the pump."""
        partition = self._present
        if await self._can_restart(partition, error):
            return True
        await self._failing.end_with(error if self.was_attached else partition.explained(error))
        return False

    async def _can_restart(self, partition: OpenPartition, error: Exception) -> bool:
        if isinstance(error, HubRecreatedError):
            return True
        start = partition.recorded_start
        if not isinstance(error, RequestRefusedError) or self.was_attached or start is None:
            return False
        try:
            return await self._ownership.unless_ending(self._group.give_way(self._partition_id, start))
        except EventPumpError as another:
            self._ownership.report(StoreFailed, "write scope record", another)
            return False

    @asynccontextmanager
    async def left(self) -> AsyncIterator[None]:
        """Read nothing in the block, and go on after it, unless it fails or the pump ends."""
        partition = self._present
        place = await self._leave(partition)
        yield
        self._rejoin(partition, place)

    @asynccontextmanager
    async def detour(self, after: Checkpoint, through: int) -> AsyncIterator[PumpContinuity]:
        """Read a range in the block, for which no checkpoint is stored; go on as before after it, unless it fails.

        Returns:
            The check that no event of the range is missing.
        """
        partition = self._present
        place = await self._leave(partition)
        first, hub = after.sequence_number + 1, place.hub_created_at
        beginning = Beginning(EventPosition.at_offset(after.offset), None, first, hub)
        partition.replayed.begin(self._shared.feeds_made)
        partition.is_replaying = True
        try:
            self._rejoin(partition, beginning)
            yield self._continuity_from(beginning)
        finally:
            partition.replayed.end(through + 1 if place.expected is None else place.expected)
        if self._ownership.goes_on():
            await partition.feed.aclose()
            self._rejoin(partition, place)
            partition.is_replaying = False

    @property
    def _present(self) -> OpenPartition:
        assert self.partition is not None
        return self.partition

    async def _leave(self, partition: OpenPartition) -> Beginning:
        """Read no more for now. Return where to go on."""
        feed, beginning = partition.feed, partition.beginning
        partition.note_passed()
        if not partition.is_replaying:
            partition.left_at = feed.passed or partition.left_at
        await feed.aclose()
        return Beginning(feed.position, beginning.checkpoint, feed.number, beginning.hub_created_at)

    def _rejoin(self, partition: OpenPartition, place: Beginning) -> None:
        """Read on from a place, unless the pump ends."""
        shares_from: int | None = None
        if partition.replayed.is_running:
            shares_from = sys.maxsize
        elif not self._shared.is_open:
            # A link that is opened again begins with the check that the hub is still the same.
            shares_from = 0
        if self._ownership.goes_on():
            partition.feed = self._join(place, shares_from=shares_from)
            self._on_link_changed()

    def _continuity_from(self, beginning: Beginning) -> PumpContinuity:
        """Return a check that no event is missing after a beginning."""
        return PumpContinuity(self._ownership, beginning, self._starts, self._group)

    async def place_of(self, position: EventPosition) -> Checkpoint:
        """See `PartitionPump.place_of`."""
        directory, hub = self._services.directory, self._services.scope.hub

        async def facts() -> PartitionProperties:
            return await directory.get_partition_properties(hub, self._partition_id)

        created_at = (await self._group.hub()).created_at
        try:
            try:
                search = PositionSearch(self._partition_id, position, await facts())
            except UnknownPositionError:
                # The properties may lag a little behind the events received.
                await asyncio.sleep(BEYOND_END_PAUSE)
                search = PositionSearch(self._partition_id, position, await facts())
            if search.found is None:
                return await self._shared.find_position(search, created_at, facts)
            return search.found
        except UnknownPositionError as error:
            raise ConfigurationError("position", f"partition {self._partition_id}: {error}") from error
        except RequestRefusedError as error:
            if error.condition != ARGUMENT_ERROR:
                raise
            raise ConfigurationError("position", f"partition {self._partition_id}: {error.description}") from error

    async def facts(self) -> PartitionProperties:
        """Return the partition's properties. Retried until it succeeds, or the service refuses."""
        return await self._starts.facts()

    async def skip_to_end(self, loss: Loss) -> None:
        """Store the partition's end as its checkpoint, after a loss, and report the loss."""
        await self._starts.skip_to_end(loss)

    def waited(self) -> None:
        """Check the link, if it is time to, after a wait for events that ended without any."""
        feed = self._present.feed
        if feed.feed is not None:
            self._silence.waited(feed.feed, self._partition_id, self._link_silent)

    def wake(self) -> None:
        """End a wait for events."""
        if self.partition is not None:
            self.partition.feed.wake()

    def checkpoint(self, event: ReceivedEvent | None, *, is_in_batch: bool) -> asyncio.Future[None] | None:
        """Request a checkpoint; see `OpenPartition.checkpoint`. While nothing is being read there is none to store."""
        if self.partition is not None:
            return self.partition.checkpoint(event, is_in_batch=is_in_batch)
        if event is not None and self._sought is None:
            raise not_delivered(self._partition_id)
        if event is not None and self._sought is not None and event.sequence_number > self._sought.sequence_number:
            raise delivered_before_seek()
        return None

    def lag(self, last_enqueued: Callable[[], int | None]) -> int | None:
        """Return how many events were enqueued after the last one delivered; see `OpenPartition.lag`."""
        return None if self.partition is None else self.partition.lag(last_enqueued, self._silence.max_silence)

    # -------------------------------------------------------------------------------------------------- its end

    def stop(self) -> None:
        """Receive no more: the pump ends."""
        self._shared.left(self._subscription.name)
        if self.partition is not None:
            self.partition.stop()
            # The running batch is in hand until `aclose` or `abort` is called.
            detach = self.partition.feed.aclose(is_processing=True)
            self._ownership.tasks.spawn(detach, f"eventpump detach of partition {self._partition_id}")

    def disown(self) -> None:
        """Write no checkpoint from now on."""
        if self.partition is not None:
            self.partition.writer.stop()

    def closing(self) -> None:
        """Begin to write the last checkpoint, if the lease is still held."""
        if self.partition is not None and not self._ownership.life.is_lost:
            self.partition.note_passed()
            self.partition.tracker.closing()
            self.partition.writer.kick()

    async def write_last(self) -> None:
        """Write the last checkpoint, within the time that the end may take."""
        if (partition := self.partition) is not None:
            await partition.continuity.report_last_gap(min(self._services.store_timeout, self._time_to_write()))
            if not self._ownership.life.is_lost:
                await partition.writer.flush(self._time_to_write())

    async def aclose(self) -> None:
        """Detach, within the time that the end may take. Nothing is written any more."""
        if (partition := self.partition) is not None:
            await partition.writer.aclose()
            if (dropped := partition.tracker.unwritten) is not None:
                self._ownership.report(CheckpointDropped, dropped)
            # A service that does not answer must not use up the time for closing.
            await partition.feed.aclose(min(CLOSE_TIMEOUT, self._time_to_write()))

    async def abort(self) -> None:
        """End what still runs, without waiting for the service."""
        if (partition := self.partition) is not None:
            partition.cancel_timer()
            await partition.feed.aclose(0.0)
            await partition.writer.aclose()

    def _time_to_write(self) -> float:
        return max(0.0, self._ownership.life.write_until - self._services.clock.monotonic())

    # ------------------------------------------------------------------------------------------------ beginning

    async def _find_beginning(self) -> Beginning:
        while True:
            self._starts.key = self._group.key
            stored = await self._read_checkpoint()
            self._ownership.check_ending()
            try:
                return await self._starts.find(stored)
            except RecordChangedError:
                assert isinstance(self._group, SubscriptionStart)
                await self._renew_record(self._group, stored)

    async def _renew_record(self, start: SubscriptionStart, stored: Checkpoint | None) -> None:
        """Follow, or make, the record of the present hub in place of the one of an earlier hub.

        Raises:
            DataLossError: The options require to fail.
            SubscriptionEndedError: The subscription was ended.
        """
        until_done, step = self._starts.until_done, self._ownership.unless_ending
        hub = await until_done(lambda: step(start.refresh()))
        if hub is None:
            return
        first = 0 if stored is None else stored.sequence_number + 1
        if stored is None and (number := first_number(start.start_of(self._partition_id), None)) is not None:
            first = number
        loss = Loss(LossKind.RECREATED, first, None)
        action = loss.action(self._settings.on_data_loss)
        if action == "fail":
            self._ownership.report(DataLost, loss, action)
            raise loss_error(self._services.scope.hub, self._partition_id, loss)
        record = await until_done(lambda: step(start.anew(hub, action)))
        if await until_done(lambda: step(start.begin_anew(record))):
            self._ownership.report(DataLost, loss, action)

    async def _read_checkpoint(self) -> Checkpoint | None:
        """Read the partition's checkpoint; tried until it succeeds. Raises `PumpEndedError` if the pump ends first.

        Of another subscription than the default one it is claimed, so that no earlier owner can write it any more.
        """
        operation, timeout, group = "read checkpoint", self._services.store_timeout, self._services.group

        def report(error: Exception, _: float) -> None:
            self._ownership.report(StoreFailed, operation, store_error(error, operation, self._partition_id, timeout))

        async def read() -> Checkpoint | None:
            if self.key == DEFAULT_SUBSCRIPTION:
                return await group.read_checkpoint(self._partition_id)
            claim = await group.claim_checkpoint(self._ownership.lease, self.key)
            if claim is None:
                self._ownership.refused()
            return claim.checkpoint

        return await retrying(
            lambda: self._ownership.unless_ending(read()),
            UNLIMITED,
            self._services.rng,
            is_final=lambda _: False,
            on_retry=report,
            sleep=self._ownership.pause,
        )

    def _join(self, beginning: Beginning, *, shares_from: int | None) -> MemberFeed:
        since, below = self._sought_back
        is_below = beginning.expected is None or beginning.expected < below
        if shares_from is None and is_below and self._shared.link < since:
            # By that link these events would count as delivered before the seek.
            shares_from = below
        return self._shared.join(
            self._subscription.name,
            beginning,
            MemberCalls(
                self._starts.facts,
                lambda: self._attached(describe_position(beginning.position)),
                self._link_trouble,
                lambda number: self._ownership.report(LinkRewound, number),
                self._slow,
                self._on_link_changed,
            ),
            slow_after=self._subscription.slow_after,
            catch_up_group=self._subscription.catch_up_group,
            selection=self._subscription.selection,
            shares_from=shares_from,
        )

    # ------------------------------------------------------------------------------------------------- the link

    def _attached(self, position: str) -> None:
        if not self.was_attached:
            self.was_attached = True
            self._ownership.report(PumpStarted, self._ownership.lease.epoch, position)
        elif self._has_link_trouble:
            self._ownership.report(LinkRestored, self._ownership.lease.epoch, position)
        self._has_link_trouble = False

    def _link_trouble(self, error: Exception, delay: float | None, reports: bool) -> None:
        if self._ownership.life.is_ending:
            return
        if isinstance(error, ConsumerDisconnectedError):
            # Not reported here: only the manager can find out whether it is a move inside the fleet.
            self._ownership.life.stolen()
            self._on_stolen(error)
        elif delay is not None and reports:
            # Without a delay the feed has ended, and the manager reports or raises the error.
            self._has_link_trouble = True
            self._ownership.report(LinkFailed, error, delay)

    def _slow(self, held: Held) -> None:
        subscription = self._subscription
        suspends = subscription.suspends and subscription.catch_up_group is None and not self._ownership.life.is_ending
        self._ownership.report(SubscriptionSlow, held.share, held.seconds, suspends)
        if suspends:
            self._on_suspended()

    def _link_silent(self, link: SilentLink) -> None:
        self._ownership.report(LinkStalled, link.evidence, link.silent_for, link.drops_connection)
