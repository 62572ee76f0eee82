"""`eventpump tail`: follow the partitions of a hub."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from eventpump.amqp.types import Decimal32, Decimal64, Decimal128, Described, Timestamp
from eventpump.cli.main import FAILURE, Subparsers
from eventpump.cli.outages import PatientTransport
from eventpump.cli.streams import (
    Interrupts,
    Output,
    add_connection_options,
    add_group_option,
    add_patience,
    complain,
    connection_options,
    connection_text,
    hub_name,
    keep_quiet,
    patience,
    whole_number,
)
from eventpump.clients.connection import make_transport
from eventpump.consumer.reader.reader import HubReader
from eventpump.errors import (
    ConfigurationError,
    ConsumerDisconnectedError,
    EventError,
)
from eventpump.eventhubs.events import EventPosition, ReceivedEvent
from eventpump.interfaces import (
    CLOSE_TIMEOUT,
    Transport,
)
from eventpump.options.connection import connection_settings
from eventpump.options.consumer import ReaderSettings

_AT_ONCE: Final = 1000
"""The most events in one write."""
_CACHE: Final = 64 * 1024 * 1024
"""Bytes read ahead over all partitions."""
_NO_LIMIT: Final = 86_400.0
"""Seconds; the transport has the time limit."""
_SHOWN: Final = frozenset(("x-opt-sequence-number", "x-opt-offset", "x-opt-enqueued-time", "x-opt-partition-key"))


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "tail",
        help=summary,
        description="Print the events of a hub, and then new ones, until stopped. One line per event: the body, or a "
        "JSON object; on a terminal, partition, number and time before the body.",
    )
    add = parser.add_argument
    add_connection_options(parser)
    add("--partition", metavar="ID", help="follow only this partition (default: all)")
    add(
        "--from",
        dest="start",
        default="start",
        metavar="POSITION",
        help="start, end, a sequence number, a time (ISO 8601; local without a zone), or offset:TEXT for the events "
        "after an offset (default: %(default)s)",
    )
    add_group_option(parser, "the consumer group")
    add("--json", action="store_true", help="print one JSON object per line, with all properties of the event")
    add("--count", metavar="N", help="stop after this many events")
    add_patience(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Follow the partitions; return the exit code. Raises `EventPumpError` if reading could not start, or was
    refused."""
    start = position(args.start)
    count = None if args.count is None else whole_number("--count", args.count, 1, 2**62)
    settings = connection_settings(connection_text(args), hub_name(args), **connection_options(args))
    limit = patience(args)

    keep_quiet()

    async def tail() -> int:
        work = _Tail(settings.hub, Output(), start, count, group=args.consumer_group, is_json=args.json)
        return await work.run(PatientTransport(make_transport(settings), limit, complain), args.partition)

    try:
        return asyncio.run(tail())
    except ConsumerDisconnectedError as error:
        # A host reads with an owner level, for which the service disconnects a reader without one.
        problem = (
            f"{args.consumer_group} is read by an exclusive reader, such as a processor host, which has disconnected "
            f"this one; give another consumer group: --consumer-group NAME ({error.description})"
        )
        raise ConfigurationError("--consumer-group", problem) from None


def position(text: str) -> EventPosition:
    """Parse the start position, which is inclusive. Raises `ConfigurationError` if the text is none."""
    match text:
        case "start":
            return EventPosition.earliest()
        case "end":
            return EventPosition.latest()
    try:
        if text.startswith("offset:"):
            return EventPosition.at_offset(text.removeprefix("offset:"))
        if text.isascii() and text.isdigit():
            return EventPosition.at_sequence_number(whole_number("--from", text, 0, 2**63 - 1), inclusive=True)
        return EventPosition.at_enqueued_time(datetime.fromisoformat(text).astimezone(UTC), inclusive=True)
    except (ValueError, OverflowError):
        raise ConfigurationError(
            "--from", f"must be start, end, a sequence number, a time or offset:TEXT, not {text[:40]!r}"
        ) from None


class _Tail:
    """Follows a hub with one task per partition; all share one connection and the output."""

    def __init__(
        self, hub: str, output: Output, start: EventPosition, count: int | None, *, group: str, is_json: bool
    ) -> None:
        self._hub = hub
        self._output = output
        self._start = start
        self._remaining = count
        self._group = group
        self._is_json = is_json
        self._enough = asyncio.Event()
        self._unwritable: OSError | None = None

    async def run(self, transport: Transport, partition_id: str | None) -> int:
        tasks: list[asyncio.Task[None]] = []
        with Interrupts(CLOSE_TIMEOUT) as interrupts, self._output.watched(self._enough.set):
            ends = [
                asyncio.create_task(interrupts.finish.wait(), name="finish"),
                asyncio.create_task(self._enough.wait(), name="enough"),
            ]
            finding = asyncio.create_task(self._readers(transport, partition_id), name="find partitions")
            try:
                await asyncio.wait({finding, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if finding.done():
                    tasks = [asyncio.create_task(self._follow(each, reader)) for each, reader in finding.result()]
                    await asyncio.wait({*tasks, *ends}, return_when=asyncio.FIRST_COMPLETED)
                return self._outcome(tasks) or interrupts.exit_code
            finally:
                for task in (finding, *tasks, *ends):
                    task.cancel()
                # Detaching may take as long as the service likes; the connection's end is an end too.
                await asyncio.wait({finding, *tasks, *ends}, timeout=CLOSE_TIMEOUT)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_TIMEOUT):
                        await transport.aclose()
                for task in (finding, *tasks):
                    if task.done() and not task.cancelled():
                        task.exception()  # the first error is reported; the loop need not report the others

    def _outcome(self, tasks: Sequence[asyncio.Task[None]]) -> int:
        """Return the exit code for what ended the reading. Raises `EventPumpError` if a partition cannot be read."""
        if self._unwritable is not None:
            if isinstance(self._unwritable, BrokenPipeError):
                return 0
            complain(f"the output cannot be written: {self._unwritable.strerror}")
            return FAILURE
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
        return 0

    async def _readers(self, transport: Transport, partition_id: str | None) -> list[tuple[str, HubReader]]:
        if partition_id is None:
            partition_ids = (await transport.get_hub_properties(self._hub)).partition_ids
        else:
            # Read, so that an unknown partition fails at once, with the same error as an unknown hub.
            partition_ids = ((await transport.get_partition_properties(self._hub, partition_id)).partition_id,)
        readers = []
        for each in partition_ids:
            settings = ReaderSettings(
                hub=self._hub,
                partition_id=each,
                position=self._start,
                consumer_group=self._group,
                prefetch_bytes=max(1 << 20, _CACHE // len(partition_ids)),
                startup_timeout=_NO_LIMIT,
            )
            reader = HubReader(
                lambda: transport, settings, on_loss=lambda error: complain(str(error)), owns_transport=False
            )
            readers.append((each, reader))
        return readers

    async def _follow(self, partition_id: str, reader: HubReader) -> None:
        form = json_line if self._is_json else shown_line if self._output.is_terminal else plain_line
        async with reader:
            while events := await reader.read(_AT_ONCE):
                if self._remaining is not None:
                    # Taken and passed to the writer without an await: the task that takes the last one writes it last.
                    events = events[: self._remaining]
                    self._remaining -= len(events)
                lines = []
                for event in events:
                    try:
                        lines.append(form(partition_id, event))
                    except EventError as error:
                        complain(f"partition {partition_id}: {error}")
                try:
                    await self._output.write(b"".join(lines))
                except OSError as error:
                    # Recorded at once: another partition's task may reach the count before this one has closed.
                    self._unwritable = error
                    self._enough.set()
                    return
                if self._remaining == 0:
                    self._enough.set()
                    return


# ------------------------------------------------------------------------------------------------------ lines


def plain_line(partition_id: str, event: ReceivedEvent) -> bytes:
    """Return the unchanged body and the end of a line."""
    return _body(event) + b"\n"


def shown_line(partition_id: str, event: ReceivedEvent) -> bytes:
    """Return an event as a line for a terminal; control characters are escaped."""
    moment = event.enqueued_time.astimezone().strftime("%H:%M:%S.%f")[:-3]
    body = _body(event).decode(errors="backslashreplace")
    if not body.isprintable():
        body = "".join(each if each.isprintable() or each == "\t" else ascii(each)[1:-1] for each in body)
    return f"{partition_id}:{event.sequence_number} {moment}  {body}\n".encode()


def json_line(partition_id: str, event: ReceivedEvent) -> bytes:
    """Return all properties of an event as one line of JSON. Bytes that are not UTF-8 become base64."""
    record: dict[str, Any] = {
        "partition": partition_id,
        "sequence_number": event.sequence_number,
        "offset": event.offset,
        "enqueued_time": event.enqueued_time.isoformat().replace("+00:00", "Z"),
    }
    if event.partition_key is not None:
        record["partition_key"] = event.partition_key
    if event.properties:
        record["properties"] = plain(event.properties)
    system = {name: plain(value) for name, value in event.system_properties.items() if name not in _SHOWN}
    if system:
        record["system_properties"] = system
    kind = event.body_type
    if kind in ("data", "none"):
        body = event.body if kind == "data" else b""
        try:
            record["body"] = body.decode()
        except UnicodeDecodeError:
            record["body_base64"] = base64.b64encode(body).decode()
    else:
        record["value"] = plain(event.value)
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace") + b"\n"


def plain(value: Any) -> Any:
    """Convert an AMQP value to a JSON value."""
    match value:
        case None | bool() | str():
            return value
        case Timestamp():
            return value.to_datetime().isoformat().replace("+00:00", "Z")
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else str(float(value))
        case Decimal32() | Decimal64() | Decimal128():
            return value.hex()
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
        case datetime():
            return value.isoformat()
        case uuid.UUID():
            return str(value)
        case Mapping():
            return {each if isinstance(each, str) else str(plain(each)): plain(value[each]) for each in value}
        case Described():
            return plain(value.value)
        case list() | tuple():
            return [plain(each) for each in value]
        case _:
            return str(value)


def _body(event: ReceivedEvent) -> bytes:
    try:
        return event.body
    except EventError:
        value = event.value  # another kind of body; or one that cannot be decoded, which raises again
        return b"" if value is None else json.dumps(plain(value), ensure_ascii=False).encode(errors="backslashreplace")
