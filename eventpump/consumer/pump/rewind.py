"""Carries out what is asked of a pump while it runs: to seek, to replay a range, and to pause."""

from __future__ import annotations

import asyncio

from eventpump.aio.tasks import resolve
from eventpump.consumer.calls.handler import has_place
from eventpump.consumer.link.member import MemberFeed
from eventpump.consumer.pump.dispatch import Dispatch
from eventpump.consumer.pump.partition import OpenPartition
from eventpump.consumer.pump.parts import PumpParts
from eventpump.consumer.pump.reading import PartitionReading
from eventpump.consumer.pump.requests import Replay, Seek
from eventpump.consumer.record.continuity import PumpContinuity
from eventpump.consumer.record.starts import HubRecreatedError
from eventpump.core.starts import retained_from
from eventpump.errors import EventPumpError, OwnershipLostError
from eventpump.eventhubs.events import EventPosition
from eventpump.reports import DataLost, RangeReplayed, ServiceFailed


class Rewinding:
    """Carries out the requests to one pump: leaves the link, and joins it again."""

    def __init__(self, parts: PumpParts, reading: PartitionReading) -> None:
        self._ownership = parts.ownership
        self._settings = parts.ownership.settings
        self._requests = parts.requests
        self._failing = parts.failing
        self._reading = reading

    async def carry_out(self, dispatch: Dispatch) -> OpenPartition:
        """Carry out requests, and wait while the pump is paused;
        return what is read then: another object after a seek."""
        requests = self._requests
        while self._ownership.goes_on():
            match requests.take():
                case Seek() as seek:
                    await self._seek(seek, dispatch)
                case Replay() as replay:
                    await self._replay(replay, dispatch)
                case None if requests.is_paused:
                    await self._stay_paused()
                case None:
                    break
        partition = self._partition
        if requests.drains:
            requests.processed(partition.next_number(requests.drains[-1].facts))
        return partition

    @property
    def _partition(self) -> OpenPartition:
        """What is being read."""
        assert self._reading.partition is not None
        return self._reading.partition

    async def _seek(self, seek: Seek, dispatch: Dispatch) -> None:
        """Store where to go on, and go on there."""
        dispatch.hold(is_held=True)
        try:
            await self._seek_while_held(seek, dispatch)
        finally:
            dispatch.hold(is_held=False)

    async def _seek_while_held(self, seek: Seek, dispatch: Dispatch) -> None:
        place = seek.place
        try:
            if isinstance(place, EventPosition):
                place = await self._ownership.unless_ending(self._reading.place_of(place))
        except OwnershipLostError:
            return
        except EventPumpError as error:
            self._ownership.report(ServiceFailed, f"seeking {seek.place}", error)
            await self._failing.call_process_error(error)
            return
        # The failures of a batch that is left are not those of another one.
        self._failing.failures.settled()
        await dispatch.drop()
        try:
            await self._reading.restart(Seek(place, seek.done))
        finally:
            # It is stored by now, or never will be.
            if seek.done is not None:
                resolve(seek.done, False)

    async def _stay_paused(self) -> None:
        """Wait until the pump is to deliver again, or to seek. The link, and the cache, are left to the others."""
        requests = self._requests
        async with self._reading.left():
            while requests.is_paused and not requests.has_seek() and self._ownership.goes_on():
                requests.news.clear()
                await requests.news.wait()

    async def _replay(self, replay: Replay, dispatch: Dispatch) -> None:
        """Deliver a range, and go on as before."""
        is_done = False
        try:
            if not await self._settled(dispatch):
                return
            async with self._reading.detour(replay.after, replay.through) as continuity:
                is_done = await self._deliver_range(continuity, replay.through, dispatch)
                await dispatch.drop()
                resolve(replay.done, is_done)
                if is_done:
                    self._ownership.report(RangeReplayed, replay.after.sequence_number + 1, replay.through)
        finally:
            resolve(replay.done, is_done)

    async def _deliver_range(self, continuity: PumpContinuity, through: int, dispatch: Dispatch) -> bool:
        """Deliver the events of a replay. Return whether all of them were processed."""
        limit, partition = self._settings.max_batch_size, self._partition
        while await self._replays_on():
            feed = partition.feed
            if feed.selection is None:
                events = tuple(feed.take(limit))
                is_complete = not events or continuity.follows(events)
            else:
                is_complete = not continuity.misses(feed.take_missing())
                events = tuple(feed.take(limit))
                partition.took(events)
            if not is_complete:
                try:
                    loss = await continuity.find_loss(() if feed.selection is not None else events)
                except HubRecreatedError:
                    return False
                if loss is not None:
                    # Regardless of the options: delivery goes on after the checkpoint in any case.
                    self._ownership.report(DataLost, loss, "earliest")
            if events:
                placed = [event for event in events if has_place(event)]
                is_last = bool(placed) and placed[-1].sequence_number >= through
                if is_last:
                    if placed[-1].sequence_number > through:
                        partition.doubts.pop(placed[-1], None)
                    events = tuple(event for event in placed if event.sequence_number <= through)
                while events and (events := await dispatch.deliver(partition, events)):
                    if not await self._replays_on():
                        return False
                if is_last:
                    return await self._settled(dispatch)
                if feed.available:
                    await asyncio.sleep(0)
            elif (passed := feed.passed) is not None and passed.sequence_number >= through:
                return await self._settled(dispatch)
            elif feed.error is not None:
                return False
            elif not await self._news_of(feed):
                self._reading.waited()
                if retained_from(await self._reading.facts()) > through and not feed.available:
                    return await self._settled(dispatch)
        return False

    async def _news_of(self, feed: MemberFeed) -> bool:
        """Wait for events of a replay. Return False where none came for long."""
        # The end of the range may be an event that does not belong to the stream.
        feed.wake_after(1)
        return await feed.wait(self._settings.max_wait_time)

    async def _settled(self, dispatch: Dispatch) -> bool:
        """Wait until everything in hand is processed. Return False if the pump ends, or is to seek, first."""
        while not await dispatch.settle(heeds_requests=True):
            if not await self._replays_on():
                return False
        return True

    async def _replays_on(self) -> bool:
        """Wait while the pump is paused. Return whether a replay is to continue."""
        if self._requests.is_paused and not self._requests.has_seek():
            await self._stay_paused()
        # What waits for the end of the replay must not shorten the delays between attempts.
        self._requests.news.clear()
        return self._ownership.goes_on() and not self._requests.has_seek()
