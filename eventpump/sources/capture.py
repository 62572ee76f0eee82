"""Capture's files as a source, continued by the live hub from the very next sequence number."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

from eventpump.aio.closing import AsyncResource
from eventpump.aio.home import HomeLoop
from eventpump.aio.tasks import TaskSet
from eventpump.cancellation import is_failure
from eventpump.core.starts import retained_from
from eventpump.errors import (
    CaptureFileError,
    CaptureGapError,
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    DataLossError,
    EntityNotFoundError,
    EventError,
    EventPumpError,
    Recovery,
    RequestRefusedError,
    ServiceError,
    SourceEndedError,
    StoreError,
)
from eventpump.eventhubs.capture import DEFAULT_PATTERN, CaptureName, NamePattern, read_blocks
from eventpump.eventhubs.events import LATEST_OFFSET, START_OFFSET, EventPosition, ReceivedEvent
from eventpump.eventhubs.partitions import partition_order
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    EventSource,
    HubProperties,
    PartitionProperties,
    ProbedSourceLink,
    ReceiveSink,
    SourceLink,
)
from eventpump.sources.checks import is_number, is_source, kind_of, offers
from eventpump.sources.files import CaptureDirectory, CaptureFiles
from eventpump.sources.links import RUN

_log = logging.getLogger("eventpump.sources")

_HEAD = 4 * 1024 * 1024
"""Bytes of a file in which its first events are looked for."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DIGITS = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where an event is."""

    number: int
    offset: str
    enqueued_time: datetime

    @classmethod
    def of(cls, raw: bytes) -> _Mark:
        event = ReceivedEvent(raw)
        return cls(event.sequence_number, event.offset, event.enqueued_time)


@dataclass(slots=True)
class _Start:
    """Where a link begins.

    Args:
        position: Where to begin, in the files and, if these do not hold it, in the live hub.
        following: The sequence number of the next event; None if it is not known.
    """

    names: list[CaptureName]
    position: EventPosition
    following: int | None = None
    is_live: bool = False


class CaptureSource(AsyncResource):
    """The files of Event Hubs Capture, and then the live hub, without a gap and without a repetition.

    ::

        live = EventHubSource(connection_string, "telemetry")
        source = CaptureSource("captured", live=live)
        leases = SqliteLeaseStore("leases.db")
        host = EventProcessorHost(
            source=source, processor=MyProcessor, lease_store=leases
        )

    Files are read in the order of their times. Behind the last one, reading continues in the hub with the next sequence
    number: what both hold is delivered once. Checkpoints are those of the hub, so that a host that has caught up may be
    replaced by one without the source. If neither holds an event, reading fails with `CaptureGapError`, or continues
    after the gap. A file that is damaged is an error (`CaptureFileError`), after the events before the damage; a file
    without events, and files whose names do not match the pattern, are skipped.

    Args:
        files: The directory with the files, or a `CaptureContainer`.
        live: What continues the files, such as an `EventHubSource`; it is closed with this source. None for the files
            alone: a partition ends with them.
        hub: The name of the hub whose files are read; None for that of `live`. Required without `live`.
        namespace: The namespace, without its domain, whose files are read, as in their names. Required without `live`:
            with the hub it names what checkpoints belong to. With `live`, None for files of any one namespace; files of
            two are an error. Default: None.
        pattern: How the files are named, as configured at the hub. Default: the service's own pattern.
        on_gap: What happens if events are in neither: "fail" with `CaptureGapError`, or "skip" to the next event, with
            a warning. Default: "fail".
        poll_interval: Without `live`: seconds until new files are looked for behind the last one. None to end there.
            Default: None.

    Raises:
        ConfigurationError: A value cannot work, or fastavro is not installed.
    """

    def __init__(
        self,
        files: str | Path | CaptureFiles,
        *,
        live: EventSource | None = None,
        hub: str | None = None,
        namespace: str | None = None,
        pattern: str = DEFAULT_PATTERN,
        on_gap: Literal["fail", "skip"] = "fail",
        poll_interval: float | None = None,
    ) -> None:
        if live is not None and not (is_source(live) and offers(live, "aclose")):
            # Not shown: what is given by mistake may be a connection string.
            raise ConfigurationError("live", f"must be an event source, such as an EventHubSource, not {kind_of(live)}")
        if not isinstance(files, str | Path) and not offers(files, "names", "fetch", "aclose"):
            raise ConfigurationError("files", f"must be a directory or a CaptureContainer, not {kind_of(files)}")
        if live is None and hub is None:
            raise ConfigurationError("hub", "is required without `live`: files of several hubs may lie in one place")
        if live is None and namespace is None:
            problem = "is required without `live`: the checkpoints of two namespaces' files must not be taken for one's"
            raise ConfigurationError("namespace", problem)
        if on_gap not in ("fail", "skip"):
            raise ConfigurationError("on_gap", f'must be "fail" or "skip", not {on_gap!r}')
        if poll_interval is not None and (not is_number(poll_interval) or poll_interval <= 0):
            raise ConfigurationError("poll_interval", f"must be above 0 seconds, not {poll_interval!r}")
        if poll_interval is not None and live is not None:
            raise ConfigurationError("poll_interval", "cannot be given along with `live`, which continues the files")
        self._files: CaptureFiles = CaptureDirectory(files) if isinstance(files, str | Path) else files
        self._pattern = NamePattern(pattern)
        self.live = live
        """What continues the files."""
        self.on_gap = on_gap
        self.poll_interval = poll_interval
        self._hub = hub if hub is not None or live is None else live.hub
        self._namespace = namespace
        self._links: set[_CaptureLink] = set()
        self._firsts: dict[str, _Mark | None] = {}
        self._lasts: dict[str, _Mark] = {}
        self.delivered: dict[str, _Mark] = {}
        """Per partition, the last event delivered over a link that has ended: a link that follows begins after it."""
        self.tasks = TaskSet(_task_failed)
        """The tasks of all links."""
        self._is_closed = False
        self._home = HomeLoop(type(self).__name__, warns=False)  # its parts have a warning of their own

    @property
    def fully_qualified_namespace(self) -> str:
        """The namespace of the live hub; without one, a name of the files' namespace."""
        if self.live is not None:
            return self.live.fully_qualified_namespace
        return f"{self._namespace}.capture.eventpump"

    @property
    def hub(self) -> str:
        """The hub's name."""
        assert self._hub is not None
        return self._hub

    async def partitions(self) -> HubProperties:
        """See `EventSource`. Without a live hub, the partitions of which there are files."""
        self._home.enter()
        self._check_open()
        if self.live is not None:
            return await self.live.partitions()
        found = {name.partition_id for name in await self._names(None)}
        return HubProperties(self.hub, _EPOCH, tuple(sorted(found, key=partition_order)))

    async def partition_properties(self, partition_id: str) -> PartitionProperties:
        """See `EventSource`. It begins with the first event of the files."""
        self._home.enter()
        names = await self._names(partition_id)
        first = await self._next_mark(names)
        if self.live is not None:
            facts = await self.live.partition_properties(partition_id)
            if first is None or first.number >= retained_from(facts):
                return facts
            return PartitionProperties(
                hub=facts.hub,
                partition_id=partition_id,
                beginning_sequence_number=first.number,
                last_enqueued_sequence_number=facts.last_enqueued_sequence_number,
                last_enqueued_offset=facts.last_enqueued_offset,
                last_enqueued_time=facts.last_enqueued_time,
                is_empty=False,
            )
        if not names:
            raise EntityNotFoundError(f"there are no Capture files of partition {partition_id!r}", entity=partition_id)
        last = await self._last_mark(names)
        return PartitionProperties(
            hub=self.hub,
            partition_id=partition_id,
            beginning_sequence_number=0 if first is None else first.number,
            last_enqueued_sequence_number=-1 if last is None else last.number,
            last_enqueued_offset=START_OFFSET if last is None else last.offset,
            last_enqueued_time=_EPOCH if last is None else last.enqueued_time,
            is_empty=last is None,
        )

    async def open(
        self,
        partition_id: str,
        position: EventPosition,
        sink: ReceiveSink,
        *,
        consumer_group: str = "$Default",
        owner_level: int | None = None,
    ) -> _CaptureLink:
        """See `EventSource`."""
        self._home.enter()
        start = await self._find(partition_id, position)

        async def open_live(where: EventPosition, into: ReceiveSink) -> SourceLink:
            assert self.live is not None
            return await self.live.open(
                partition_id, where, into, consumer_group=consumer_group, owner_level=owner_level
            )

        link = _CaptureLink(self, partition_id, start, sink, open_live, self._links.discard)
        self._links.add(link)
        link.start()
        return link

    async def aclose(self) -> None:
        """See `EventSource`. Closes `live` too."""
        self._home.enter()
        self._home.close()
        self._is_closed = True
        try:
            for link in tuple(self._links):
                await link.aclose()
            await self.tasks.wait(CLOSE_TIMEOUT)
        finally:
            try:
                await self._files.aclose()
            finally:
                if self.live is not None:
                    await self.live.aclose()

    # ----------------------------------------------------------------------------------------------------- the files

    async def files_after(self, partition_id: str, last: CaptureName | None) -> list[CaptureName]:
        """Return the files of a partition that follow one, as they are now."""
        return [name for name in await self._names(partition_id) if last is None or name > last]

    async def reader(self, name: str) -> _FileReader:
        """Open a file."""
        return _FileReader(await self._stored(self._files.fetch(name)), name)

    async def live_facts(self, partition_id: str) -> PartitionProperties:
        """Return the properties of the live hub's partition."""
        assert self.live is not None
        return await self.live.partition_properties(partition_id)

    async def _names(self, partition_id: str | None) -> list[CaptureName]:
        """Return the names of a partition's files, or of all, in order."""
        self._check_open()
        common = before = self._pattern.text.partition("{")[0]
        if self._namespace is not None and self._pattern.text.startswith("{Namespace}/{EventHub}/{PartitionId}/"):
            before = f"{self._namespace}/{self.hub}/" + ("" if partition_id is None else f"{partition_id}/")
        listed = await self._stored(self._files.names(before))
        if not listed and before != common:  # the files' names may have it in another case
            listed = await self._stored(self._files.names(common))
        found = [self._pattern.match(name) for name in listed]
        names = sorted(
            name
            for name in found
            if name is not None
            and name.hub.lower() == self.hub.lower()
            and (partition_id is None or name.partition_id == partition_id)
            and (self._namespace is None or name.namespace.lower() == self._namespace.lower())
        )
        spelled = {name.namespace.lower(): name.namespace for name in names}
        if len(spelled) > 1:
            several = ", ".join(sorted(spelled.values()))
            raise ConfigurationError("namespace", f"is required: there are files of several: {several}")
        return names

    async def _stored(self, call: Awaitable[Any]) -> Any:
        """Raise a failure of the storage as one after which a link is opened again."""
        try:
            return await call
        except StoreError as error:
            raise ServiceError(f"the Capture files cannot be read: {error}") from error

    async def first_mark(self, name: str) -> _Mark | None:
        """Return the first event of a file; None if it has none."""
        if name not in self._firsts:
            try:
                found = await self._read_first(name, _HEAD)
            except CaptureFileError:  # its first block may be larger
                found = await self._read_first(name, None)
            self._firsts[name] = found
        return self._firsts[name]

    async def _read_first(self, name: str, limit: int | None) -> _Mark | None:
        reader = _FileReader(await self._stored(self._files.fetch(name, limit)), name)
        try:
            block = await reader.next()
        finally:
            reader.close()
        return None if block is None else _Mark.of(block[0][1])

    async def _next_mark(self, names: list[CaptureName]) -> _Mark | None:
        """Return the first event of several files."""
        for name in names:
            if (mark := await self.first_mark(name.name)) is not None:
                return mark
        return None

    async def _last_mark(self, names: list[CaptureName]) -> _Mark | None:
        """Return the last event of several files."""
        for name in reversed(names):
            if name.name not in self._lasts:
                reader = await self.reader(name.name)
                try:
                    while (block := await reader.next()) is not None:
                        self._lasts[name.name] = _Mark.of(block[-1][1])
                finally:
                    reader.close()
            if name.name in self._lasts:
                return self._lasts[name.name]
        return None

    # -------------------------------------------------------------------------------------------------- where to begin

    async def _find(self, partition_id: str, position: EventPosition) -> _Start:
        delivered = self.delivered.get(partition_id)
        if delivered is not None and position == EventPosition.at_offset(delivered.offset):
            # The usual case after a failure: the number says whether the live hub has what follows.
            position = EventPosition.at_sequence_number(delivered.number)
            if self.live is not None:
                facts = await self.live_facts(partition_id)
                if retained_from(facts) <= delivered.number + 1 <= facts.last_enqueued_sequence_number + 1:
                    return _Start([], position, delivered.number + 1, is_live=True)
        names = await self._names(partition_id)
        known: PartitionProperties | None = None
        if self.live is not None:
            known = await self.live_facts(partition_id)  # raises if there is no such partition
        elif not names:
            raise EntityNotFoundError(f"there are no Capture files of partition {partition_id!r}", entity=partition_id)
        if position.offset == LATEST_OFFSET:
            if self.live is not None:
                return _Start([], position, is_live=True)
            last = await self._last_mark(names)
            number = -1 if last is None else last.number
            position = EventPosition.at_sequence_number(number, inclusive=position.inclusive)
        following: int | None = None
        if position.offset == START_OFFSET:
            index = -1
        elif position.sequence_number is not None:
            following = number = position.sequence_number + (not position.inclusive)
            index = await self._last_file(names, lambda mark: mark.number <= number)
        elif position.enqueued_time is not None:
            moment = position.enqueued_time
            index = await self._last_file(names, lambda mark: mark.enqueued_time < moment)
        elif _DIGITS.fullmatch(position.offset or ""):
            offset = int(position.offset or "")
            index = await self._last_file(
                names, lambda mark: bool(_DIGITS.fullmatch(mark.offset)) and int(mark.offset) <= offset
            )
        else:
            index = 0  # offsets without an order: they are looked for in all files
        if index < 0 and known is not None and not known.is_empty:
            first = await self._next_mark(names)
            if first is not None and retained_from(known) < first.number:
                # Capture began later than what the hub still has.
                return _Start([], position, is_live=True)
        # What precedes the first event of all files is not missing: reading begins with that event.
        return _Start(names[max(index, 0) :], position, following if index >= 0 or not names else None)

    async def _last_file(self, names: list[CaptureName], precedes: Callable[[_Mark], bool]) -> int:
        """Return the index of the last file whose first event precedes a position; -1 if there is none."""
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            at = middle
            mark = await self.first_mark(names[at].name)
            while mark is None and at + 1 < high:
                at += 1
                mark = await self.first_mark(names[at].name)
            if mark is not None and precedes(mark):
                low = at + 1
            else:
                high = middle
        return low - 1

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("Capture source")


def _task_failed(name: str, error: BaseException) -> None:
    _log.error("%s failed unexpectedly", name, exc_info=error)


class _FileReader:
    """Reads a file's blocks, each in a thread."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._blocks: Iterator[list[tuple[int, bytes]]] = read_blocks(file, name)
        self._running: asyncio.Future[list[tuple[int, bytes]] | None] | None = None

    async def next(self) -> list[tuple[int, bytes]] | None:
        """Return the next block; None at the end."""
        self._running = asyncio.get_running_loop().run_in_executor(None, next, self._blocks, None)
        return await asyncio.shield(self._running)

    def close(self) -> None:
        """Close the file, once the thread is done with it."""
        if self._running is None or self._running.done():
            self._file.close()
        else:
            self._running.add_done_callback(self._done)

    def _done(self, running: asyncio.Future[list[tuple[int, bytes]] | None]) -> None:
        if not running.cancelled():
            running.exception()  # retrieved: its caller was cancelled
        self._file.close()


class _CaptureLink:
    """A `SourceLink` that reads files, and then is the sink of a link of the live hub."""

    def __init__(
        self,
        source: CaptureSource,
        partition_id: str,
        start: _Start,
        sink: ReceiveSink,
        open_live: Callable[[EventPosition, ReceiveSink], Awaitable[SourceLink]],
        on_closed: Callable[[_CaptureLink], None],
    ) -> None:
        self._source = source
        self._partition_id = partition_id
        self._start = start
        self._sink = sink
        self._open_live = open_live
        self._on_closed = on_closed
        self._following = start.following
        self._credit = 0
        self._changed = asyncio.Event()
        self._last: bytes | None = None
        self._live: SourceLink | None = None
        self._held: list[list[bytes]] = []
        self._has_looked_again = False
        self._is_open = True
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read."""
        name = f"eventpump capture of partition {self._partition_id}"
        self._task = self._source.tasks.spawn(self._run(), name)

    # What the host or reader calls.

    def set_credit(self, credit: int) -> None:
        self._credit = credit
        if self._live is not None:
            self._live.set_credit(max(0, credit - sum(map(len, self._held))))
        self._changed.set()

    async def probe(self, timeout: float) -> bool | None:
        """See `ProbedSourceLink`. Files cannot be probed."""
        live = self._live
        return await live.probe(timeout) if isinstance(live, ProbedSourceLink) else None

    def drop_connection(self, reason: str) -> None:
        """See `ProbedSourceLink`. While files are read, the link ends alone."""
        if isinstance(self._live, ProbedSourceLink):
            self._live.drop_connection(reason)
        else:
            self.detached(ConnectionLostError(reason))

    async def aclose(self) -> None:
        self._leave()
        task = self._task
        if task is not None and task is not asyncio.current_task():
            self._source.tasks.drop(task)
            await asyncio.wait({task})

    # What the live hub's link calls.

    def messages(self, batch: list[bytes]) -> None:
        """Pass on events of the live hub, unless numbers are missing before or among them."""
        if not self._is_open:
            return
        unread = self._unread(batch)
        if len(unread) < len(batch) and self._live is not None:
            self._live.set_credit(max(0, self._credit - len(unread)))  # what is skipped took credit
        batch = unread
        if not batch:
            return
        if self._held or not self._follows(batch):
            self._held.append(batch)
            self._changed.set()
        else:
            self._pass(batch)

    def detached(self, error: EventPumpError) -> None:
        """End with an error."""
        if self._leave():
            if self._task is not None:
                self._source.tasks.drop(self._task)
            self._sink.detached(error)

    # ------------------------------------------------------------------------------------------------------ the task

    async def _run(self) -> None:
        try:
            try:
                await self._read()
            finally:
                if self._live is not None:
                    await self._live.aclose()
        except EventPumpError as error:
            self._fail(error)
        except BaseException as error:
            if not is_failure(error):
                raise
            failure = ServiceError(f"reading Capture files failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, error: EventPumpError) -> None:
        if self._leave():
            self._sink.detached(error)

    async def _read(self) -> None:
        start, source = self._start, self._source
        is_live = start.is_live
        names, last = start.names, start.names[-1] if start.names else None
        keep: _Keep | None = None if start.position.offset == START_OFFSET else _Keep(start.position)
        before: tuple[str, int] | None = None
        while not is_live:
            for name in names:
                first = await source.first_mark(name.name)
                if first is None:
                    continue
                if before is not None and first.number <= before[1]:
                    problem = f"it begins with event {first.number}, and {before[0]} before it with {before[1]}"
                    raise CaptureFileError(name.name, f"the files are out of order: {problem}")
                before = name.name, first.number
                if is_live := await self._read_file(name.name, keep):
                    break
            else:
                names = await source.files_after(self._partition_id, last)
                last = names[-1] if names else last
                if names:
                    self._has_looked_again = False
                else:
                    if keep is not None and keep.following is not None and self._following is None:
                        self._following = keep.following
                    is_live = await self._exhausted(keep)
        await self._follow_live()

    async def _read_file(self, name: str, keep: _Keep | None) -> bool:
        """Deliver a file. Return whether to continue in the live hub, because events are missing that it has."""
        reader = await self._source.reader(name)
        try:
            while (block := await reader.next()) is not None:
                run: list[bytes] = []
                for number, raw in block:
                    if keep is not None and not keep.has_begun and not keep.takes(raw):
                        continue
                    if self._following is None and keep is not None:
                        self._following = keep.following
                    following = self._following
                    if following is not None and number < following:
                        continue
                    if following is not None and number > following:
                        await self._deliver(run)
                        run = []
                        if await self._missing(following, number - 1):
                            return True
                    self._following = number + 1
                    run.append(raw)
                await self._deliver(run)
        finally:
            reader.close()
        return False

    async def _missing(self, first: int, last: int) -> bool:
        """Return whether the live hub has what the files lack.
        Raises `CaptureGapError` if not, unless the gap may be."""
        source = self._source
        if source.live is not None:
            facts = await source.live_facts(self._partition_id)
            if retained_from(facts) <= first <= facts.last_enqueued_sequence_number:
                self._following = first
                return True
            where = "neither the Capture files nor the hub have"
        else:
            where = "the Capture files lack"
        which = f"sequence number {first}" if first == last else f"sequence numbers {first} to {last}"
        if source.on_gap == "fail":
            raise CaptureGapError(
                source.hub, self._partition_id, f"{where} {which}", first_missing=first, last_missing=last
            )
        _log.warning("hub %s, partition %s: %s %s, which are skipped", source.hub, self._partition_id, where, which)
        return False

    async def _exhausted(self, keep: _Keep | None) -> bool:
        """Decide what follows the last file. Return whether the live hub does."""
        source, following = self._source, self._following
        if source.live is None:
            if keep is not None and not keep.has_begun and keep.is_lost:
                raise RequestRefusedError(f"no event of the Capture files has the offset {self._start.position.offset}")
            if source.poll_interval is None:
                await self._granted()
                raise SourceEndedError(self._partition_id)
            await asyncio.sleep(source.poll_interval)
            return False
        if following is None:
            return True
        facts = await source.live_facts(self._partition_id)
        if following > facts.last_enqueued_sequence_number + 1 and self._last is not None:
            raise DataLossError(
                source.hub,
                self._partition_id,
                f"the Capture files hold events up to number {following - 1}, and the hub's newest is number "
                f"{facts.last_enqueued_sequence_number}: it is another hub, or was recreated",
            )
        if retained_from(facts) > following:
            if not self._has_looked_again:
                # A file may have been written between the listing and the answer of the hub.
                self._has_looked_again = True
                return False
            await self._missing(following, retained_from(facts) - 1)
            self._following = retained_from(facts)
        return True

    async def _granted(self) -> None:
        """Wait for credit."""
        while self._credit <= 0:
            self._changed.clear()
            await self._changed.wait()

    async def _deliver(self, run: list[bytes]) -> None:
        done = 0
        while done < len(run):
            await self._granted()
            part = run[done : done + min(self._credit, RUN)]
            done += len(part)
            self._credit -= len(part)
            self._last = part[-1]
            self._sink.messages(part)
            await asyncio.sleep(0)  # others have their turn, and a close is noticed

    async def _follow_live(self) -> None:
        """Be the sink of the live hub, and find out about missing numbers."""
        following, position = self._following, self._start.position
        if following is not None:
            position = EventPosition.at_sequence_number(following, inclusive=True)
        self._live = await self._open_live(position, self)
        self._live.set_credit(self._credit)
        while True:
            self._changed.clear()
            await self._changed.wait()
            if not self._held:
                continue
            assert self._following is not None
            facts = await self._source.live_facts(self._partition_id)
            if retained_from(facts) > self._following:
                # Retention was faster. A link that is opened again looks for them in the files.
                first, last = self._following, retained_from(facts) - 1
                problem = f"the hub has dropped sequence numbers {first} to {last} before they were read"
                raise ServiceError(problem, recovery=Recovery.RELINK)
            # Compaction: the hub has no event with these numbers.
            held, self._held = self._held, []
            for batch in held:
                self._pass(batch)

    def _unread(self, batch: list[bytes]) -> list[bytes]:
        """Return the events of a run that were not delivered from files."""
        following = self._following
        with suppress(EventError):
            if following is not None and ReceivedEvent(batch[0]).sequence_number < following:
                return [raw for raw in batch if ReceivedEvent(raw).sequence_number >= following]
        return batch

    def _follows(self, batch: list[bytes]) -> bool:
        following = self._following
        try:
            first, last = ReceivedEvent(batch[0]).sequence_number, ReceivedEvent(batch[-1]).sequence_number
        except EventError:
            self._following = None  # the processor finds that out as well
            return True
        return following is None or (first == following and last - first + 1 == len(batch))

    def _pass(self, batch: list[bytes]) -> None:
        self._last = batch[-1]
        with suppress(EventError):
            self._following = ReceivedEvent(batch[-1]).sequence_number + 1
        self._credit -= len(batch)
        self._sink.messages(batch)

    def _leave(self) -> bool:
        if not self._is_open:
            return False
        self._is_open = False
        if self._last is not None:
            with suppress(EventError):
                self._source.delivered[self._partition_id] = _Mark.of(self._last)
        self._on_closed(self)
        return True


class _Keep:
    """Finds the first event at or after a position, among events in order.

    Attributes:
        following: The sequence number of the event after the position; None if it is not known.
    """

    def __init__(self, position: EventPosition) -> None:
        self._position = position
        self._digits = _DIGITS.fullmatch(position.offset or "") is not None
        self.has_begun = False
        self.following: int | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the position is an offset of which no event was found."""
        return self._position.offset not in (None, START_OFFSET, LATEST_OFFSET) and self.following is None

    def takes(self, raw: bytes) -> bool:
        """Return whether an event is at or after the position. Not called after it has returned True."""
        mark, position = _Mark.of(raw), self._position
        if position.sequence_number is not None:
            self.has_begun = mark.number >= position.sequence_number + (not position.inclusive)
        elif position.enqueued_time is not None:
            moment = position.enqueued_time
            self.has_begun = mark.enqueued_time > moment or (position.inclusive and mark.enqueued_time == moment)
        elif mark.offset == position.offset:
            self.following = mark.number + (not position.inclusive)
            self.has_begun = position.inclusive
        elif self.following is not None:
            self.has_begun = True
        elif self._digits and _DIGITS.fullmatch(mark.offset):
            self.has_begun = int(mark.offset) > int(position.offset or "")
        return self.has_begun
