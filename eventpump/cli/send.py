"""`eventpump send`: each line of a file or of the standard input becomes an event."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from importlib import util
from typing import Final

from eventpump.amqp.sections import encode_data
from eventpump.cli.main import FAILURE, Subparsers
from eventpump.cli.outages import PatientTransport
from eventpump.cli.streams import (
    Interrupts,
    LineSource,
    add_connection_options,
    add_patience,
    complain,
    connection_options,
    connection_text,
    hub_name,
    keep_quiet,
    patience,
    say,
    whole_number,
)
from eventpump.clients.connection import make_transport
from eventpump.clients.producers import EventProducer
from eventpump.core.router import ROUTERS
from eventpump.errors import (
    ConfigurationError,
    EventError,
    PublishOutcomeUnknownError,
    ServiceError,
)
from eventpump.eventhubs.events import EventData
from eventpump.eventhubs.hashing import MAX_KEY_LENGTH, partition_for_key
from eventpump.eventhubs.sealing import pieces_of
from eventpump.options.connection import connection_settings
from eventpump.producer.accumulator import Lane
from eventpump.producer.outbox import Ended, Outbox

_LINGER: Final = 0.1
"""Seconds a line waits for others to share its message."""
_GATEWAY_SENDS: Final = 8
"""Messages on their way at a time where the service picks the partitions."""
_SETTLE_TRIES: Final = 5
"""How often a doubtful message is waited for, each time for all the retries of a send."""
_FINISH_TIMEOUT: Final = 15.0
"""Seconds to send what was read before a signal."""

# A number keeps the form it has in the line, whatever its size. Made once: making one costs more than a line does.
_as_written: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "send",
        help=summary,
        description="Send every line as an event. Exit code 1, and the number of lines that were not sent, if any "
        "was not; 2 for input that cannot work. On SIGINT or SIGTERM, what was read is sent first.",
    )
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="the lines; - or nothing for the standard input")
    add_connection_options(parser)
    add("--partition", metavar="ID", help="send to this partition, in order (default: the service picks)")
    add(
        "--key-field",
        metavar="NAME",
        help="lines are JSON objects; this field's value is the partition key, and lines of one key stay in order",
    )
    add(
        "--router",
        choices=sorted(ROUTERS),
        help="choose the partition of each line here: by the service's hash of its key, in turn, a batch for one "
        "partition after the other, or by a consistent ring (default: keys by the hash; the service picks the rest)",
    )
    add("--idempotent", action="store_true", help="with --partition or --router: no line is stored twice by a retry")
    add("--batch-bytes", metavar="N", help="bytes of a message at most (default: what the service takes)")
    add_patience(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send; return the exit code. Raises `EventPumpError` if it could not be begun."""
    if args.partition is not None and args.key_field is not None:
        raise ConfigurationError("--key-field", "cannot be given along with --partition")
    if args.partition == "":
        raise ConfigurationError("--partition", "must not be empty")
    if args.partition is not None and args.router is not None:
        raise ConfigurationError("--router", "cannot be given along with --partition")
    if args.idempotent and args.partition is None and args.router is None:
        raise ConfigurationError("--idempotent", "it needs --partition or --router")
    batch_bytes = None if args.batch_bytes is None else whole_number("--batch-bytes", args.batch_bytes, 1, 1 << 40)
    settings = connection_settings(connection_text(args), hub_name(args), **connection_options(args))
    limit = patience(args)
    source = LineSource(args.file)

    keep_quiet()

    async def send() -> int:
        work = _Send(args, source, batch_bytes)
        transport = PatientTransport(make_transport(settings), limit, lambda text: work.say(text))
        producer = EventProducer(
            hub=settings.hub, transport=transport, idempotent=args.idempotent, retry=settings.retry
        )
        return await work.run(producer)

    return asyncio.run(send())


class KeyedEvent(EventData):
    """A line that carries a partition key of its own, whatever batch it is in."""

    __slots__ = ("key",)

    def __init__(self, body: bytes, key: str) -> None:
        super().__init__(body)
        self.key = key

    def encode(self, partition_key: str | None = None) -> bytes:
        """Encode it with its key."""
        return _head(self.key) + encode_data(self.body)


@lru_cache(maxsize=4096)
def _head(key: str) -> bytes:
    """Encode what goes before the data of an event with a key: it is the same for every line of that key."""
    return EventData(b"").encode(key).removesuffix(encode_data(b""))


def key_of(line: bytes, field: str) -> str:
    """Find the partition key in a line: text as it is, a number as it is written. Raises `EventError` for none."""
    try:
        decoded = _as_written.decode(line.decode())
    except (ValueError, RecursionError):
        raise EventError("it is no JSON") from None
    if not isinstance(decoded, dict):
        raise EventError("it is no JSON object")
    if field not in decoded:
        raise EventError(f"it has no field {field!r}")
    value = decoded[field]
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        raise EventError(f"its field {field!r} is neither text nor a number")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise EventError(f"its field {field!r} holds a lone surrogate, which no key can") from None
    if len(value) > MAX_KEY_LENGTH:
        raise EventError(f"its field {field!r} is longer than a key may be, {MAX_KEY_LENGTH} characters")
    return value


class _Send:
    """Reads lines, fills batches and sends them: those of one partition one after another, partitions side by side."""

    def __init__(self, args: argparse.Namespace, source: LineSource, batch_bytes: int | None) -> None:
        self._source = source
        self._limit = 0
        self._partition: str | None = args.partition
        self._key_field: str | None = args.key_field
        self._router = None if args.router is None else ROUTERS[args.router]()
        self._batch_bytes = batch_bytes
        self._outbox: Outbox[int] | None = None
        self._halted = asyncio.Event()
        self._failure: Exception | None = None
        self._refused: tuple[int, str] | None = None
        self._doubtful = 0
        self._is_at_end = False
        self._is_over = False
        self.lines = 0
        """Lines read."""
        self.sent = 0
        """Lines the service has stored."""
        self.sent_bytes = 0
        self.say: Callable[[str], None] = complain
        """Prints a line on the standard error, above the progress bar while there is one."""

    async def run(self, producer: EventProducer) -> int:
        self._producer = producer
        began = time.monotonic()
        with Interrupts(_FINISH_TIMEOUT) as interrupts:
            work = asyncio.create_task(self._run(interrupts), name="send")
            give_up = asyncio.create_task(interrupts.give_up.wait(), name="give up")
            await asyncio.wait({work, give_up}, return_when=asyncio.FIRST_COMPLETED)
            for task in (work, give_up):
                task.cancel()
            await asyncio.wait({work, give_up})
            if not work.cancelled():
                work.result()
            return self._conclude(interrupts, time.monotonic() - began)

    async def _run(self, interrupts: Interrupts) -> None:
        finish = asyncio.create_task(interrupts.finish.wait(), name="finish")
        try:
            self._outbox = outbox = await self._begin()
            if outbox is not None:
                with _progress(self, self._source):
                    await self._feed(outbox, finish)
                    await outbox.flush()
        finally:
            self._is_over = True
            finish.cancel()
            await asyncio.wait({finish})
            if self._outbox is not None:
                await self._outbox.aclose()
            # What stayed in doubt is reported already.
            with contextlib.suppress(PublishOutcomeUnknownError):
                await self._producer.aclose(deadline=1.0)

    async def _begin(self) -> Outbox[int] | None:
        """Connect before any line is read. None if that failed; an `EventPumpError` if sending can never succeed."""
        try:
            lanes: Sequence[str | None] = [self._partition]
            if self._key_field is not None or self._router is not None:
                lanes = await self._producer.get_partition_ids()
            batch = await self._producer.create_batch(partition_id=lanes[0], max_size_in_bytes=self._batch_bytes)
        except ConfigurationError as error:
            if error.field == "max_size_in_bytes":
                raise ConfigurationError("--batch-bytes", error.problem) from None
            raise
        except ServiceError as error:
            if not error.is_retryable:
                raise
            self._fail(error)
            return None
        self._limit = self._source.longest = batch.max_size_in_bytes
        outbox = Outbox[int](
            self._producer,
            "command",
            self._ended,
            max_bytes=self._limit,
            max_wait_time=_LINGER,
            max_in_flight=_GATEWAY_SENDS if lanes[0] is None else 1,
            settle_tries=_SETTLE_TRIES,
        )
        outbox.add_lanes(lanes)
        outbox.on_due = getattr(self._router, "batch_ended", None)
        return outbox

    # ---- from lines to batches

    async def _feed(self, outbox: Outbox[int], finish: asyncio.Task[bool]) -> None:
        """Add lines until the input ends, a send fails, or a signal comes."""
        halted = asyncio.create_task(self._halted.wait(), name="halted")
        read: asyncio.Task[list[bytes]] | None = None
        try:
            while not finish.done() and self._failure is None:
                read = asyncio.create_task(self._source.read(), name="read lines")
                await asyncio.wait({read, finish, halted}, return_when=asyncio.FIRST_COMPLETED)
                if read.done():
                    if not (lines := read.result()):
                        self._is_at_end = True
                        return
                    await self._add(outbox, lines)
        except OSError as error:
            self._fail(ConfigurationError("FILE", f"cannot be read any further: {error.strerror}"))
        finally:
            for task in (halted, *(() if read is None else (read,))):
                task.cancel()

    async def _add(self, outbox: Outbox[int], lines: list[bytes]) -> None:
        before = self.lines
        self.lines += len(lines)
        lanes, field, is_idempotent = list(outbox.lanes.values()), self._key_field, self._producer.is_idempotent
        router, ids = self._router, [lane.partition_id or "" for lane in lanes]
        lane, now = lanes[0], asyncio.get_running_loop().time()
        for number, line in enumerate(lines, before + 1):
            try:
                key = None if field is None else key_of(line, field)
                event = EventData(line) if key is None else KeyedEvent(line, key)
                if router is not None:
                    lane = outbox.lanes[router.route(event, key, ids)]
                elif key is not None:
                    lane = lanes[partition_for_key(key, len(lanes))]
                head, rest = pieces_of(event, idempotent=is_idempotent)
            except EventError as error:
                self._refuse(number, str(error))
                continue
            if len(head) + len(rest) > self._limit:
                self._refuse(number, f"it is larger than a message may be, {self._limit:,} bytes")
                continue
            outbox.add(lane, len(line) + 1, head, rest, now)
            if now >= outbox.yield_at:
                await outbox.let_run()
                await outbox.until(partial(_has_room, lane))
                if self._failure is not None:
                    return
                now = asyncio.get_running_loop().time()

    def _ended(self, ended: Ended[int]) -> None:
        """Count the lines of a message whose outcome is known."""
        error = ended.error
        if error is None:
            self.sent += ended.event_count
            self.sent_bytes += sum(ended.events)
        elif not self._is_over:  # a send cancelled by the end is not a failure
            if isinstance(error, PublishOutcomeUnknownError) or (
                isinstance(error, ServiceError) and error.is_retryable and not self._producer.is_idempotent
            ):
                self._doubtful += ended.event_count
            self._fail(error)

    # ---- the end

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
            if self._outbox is not None:
                self._outbox.drop()  # after a failure nothing more is begun
        self._halted.set()

    def _refuse(self, number: int, reason: str) -> None:
        if self._refused is None:
            self._refused = (number, reason)

    def _counted(self) -> str:
        """Return what the producer has counted besides lines."""
        stats = self._producer.stats
        text = f"; {stats.sent.batches:,} {'message' if stats.sent.batches == 1 else 'messages'}"
        if stats.retried.batches:
            text += f", {stats.retried.batches:,} {'retry' if stats.retried.batches == 1 else 'retries'}"
        return text + (f", {stats.failed.batches:,} failed" if stats.failed.batches else "")

    def _conclude(self, interrupts: Interrupts, seconds: float) -> int:
        if self._failure is not None and self._source.is_file:
            self.lines += self._source.count_rest()
            self._is_at_end = True
        size = f"{self.sent_bytes / 1e6:,.1f} MB" if self.sent_bytes >= 100_000 else f"{self.sent_bytes:,} bytes"
        rate = self.sent / seconds if seconds > 0 else 0.0
        say(f"sent {_lines(self.sent)}, {size}, in {seconds:.1f} s ({rate:,.0f} lines/s){self._counted()}")
        unsent = self.lines - self.sent
        if interrupts.number is not None:
            left = f"; {_lines(unsent)} read before that {_were(unsent)} not sent" if unsent else ""
            complain(f"stopped by {interrupts.number.name} after line {self.lines:,} of the input{left}")
            return interrupts.exit_code
        if not unsent and self._failure is None:
            return 0
        total = f"of {_lines(self.lines)}" if self._is_at_end else f"of the {_lines(self.lines)} read so far"
        reason = f"{unsent:,} {total} {_were(unsent)} not sent"
        if self._failure is not None:
            reason += f": {self._failure}"
        elif self._refused is not None:
            reason += f"; the first, line {self._refused[0]:,}: {self._refused[1]}"
        if self._doubtful:
            reason += f" (up to {self._doubtful:,} of them may be stored)"
        complain(reason)
        return FAILURE


def _has_room(lane: Lane[int]) -> bool:
    """Return whether a lane has no more than one message that waits for those being sent."""
    return len(lane.full) <= 1


def _lines(count: int) -> str:
    return f"{count:,} line" if count == 1 else f"{count:,} lines"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


@contextlib.contextmanager
def _progress(work: _Send, source: LineSource) -> Iterator[None]:
    """Show a bar on the terminal while the lines are sent, where there is one and it is not where they come from."""
    if not sys.stderr or not sys.stderr.isatty() or source.is_terminal or util.find_spec("rich") is None:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn, TimeRemainingColumn
    from rich.text import Text

    class Lines(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{work.sent:,} lines", style="bold")

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = (work.sent - before[0]) / max(0.001, time.monotonic() - before[1])
            return Text(f"{rate:,.0f} lines/s, {rate_bytes(task)}", style="cyan")

    def rate_bytes(task: Task) -> str:
        return f"{(task.speed or 0.0) / 1e6:,.1f} MB/s"

    before = (work.sent, time.monotonic())
    total = source.remaining
    columns: list[ProgressColumn] = [BarColumn(), Lines(), Rate(), TimeElapsedColumn()]
    if total is not None:
        columns.append(TimeRemainingColumn())
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True)
    task = progress.add_task("", total=total)

    async def refresh() -> None:
        while True:
            progress.update(task, completed=work.sent_bytes, refresh=True)
            await asyncio.sleep(0.1)

    def say_above(text: str) -> None:
        console.print(f"eventpump: {text}", markup=False, highlight=False, soft_wrap=True)

    with progress:
        work.say = say_above
        refreshing = asyncio.create_task(refresh(), name="progress")
        try:
            yield
        finally:
            refreshing.cancel()
            work.say = complain
