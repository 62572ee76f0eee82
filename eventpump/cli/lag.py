"""`eventpump lag`: how far a consumer group is behind, by the checkpoints of any fleet."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from eventpump.cli.main import FAILURE
from eventpump.cli.stores import add_store_options, checkpoint_reader, in_options
from eventpump.cli.streams import (
    Interrupts,
    add_connection_options,
    add_group_option,
    complain,
    connection_options,
    connection_text,
    hub_name,
    keep_quiet,
    say,
    whole_number,
)
from eventpump.cli.tables import duration, table
from eventpump.core.monitoring import Health, Metric
from eventpump.errors import ConfigurationError
from eventpump.lag import (
    GroupLag,
    LagReader,
    LagState,
    PartitionProgress,
)
from eventpump.lag.exposition import document, metrics
from eventpump.net.health import HealthServer
from eventpump.texts import excerpt, without_secrets

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - the only name of this type

_CLEAR: Final = "\x1b[H\x1b[J"
_GRACE: Final = 2.0
_TOO_OLD: Final = 120.0


def add_parser(subparsers: Subparsers, summary: str) -> None:
    """Add the subcommand and its options; the summary is its line in the list of subcommands."""
    parser = subparsers.add_parser(
        "lag",
        help=summary,
        description="Print, for each partition of a hub, what it holds, a consumer group's checkpoint, and how many "
        "events that is behind. The checkpoints may be those of eventpump, of azure-eventhub or any current SDK, of "
        "Azure Functions, of an EventProcessorHost, or of a Spark query. Nothing is written, and consumers do not "
        "notice it.",
    )
    add_connection_options(parser)
    add_group_option(parser, "the consumer group")
    add_store_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --watch, one for each reading")
    parser.add_argument("--watch", action="store_true", help="read again and again, until it is interrupted")
    parser.add_argument(
        "--serve",
        metavar="[ADDRESS]:PORT",
        help="read again and again, and serve /metrics for Prometheus, /lag.json, /livez and /readyz; without an "
        "address on 127.0.0.1",
    )
    parser.add_argument("--interval", default="10", metavar="S", help="seconds between readings (default: %(default)s)")
    parser.add_argument(
        "--max-lag", metavar="N", help="exit with 1 if the lag is above N events, or not known in a partition"
    )
    parser.add_argument(
        "--seconds", action="store_true", help="show for how long events have waited; needs --reader-group"
    )
    parser.add_argument(
        "--reader-group",
        metavar="NAME",
        help="with --seconds: another consumer group, in which one event is read per partition that is behind",
    )
    parser.add_argument(
        "--rate", default="25", metavar="N", help="the most requests to the hub per second (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read it and print it; return the exit code. Raises `EventPumpError` if that fails."""
    limit = None if args.max_lag is None else whole_number("--max-lag", args.max_lag, 0, 2**63 - 1)
    rate = whole_number("--rate", args.rate, 1, 1000)
    interval = whole_number("--interval", args.interval, 1, 86_400)
    serve = None if args.serve is None else _endpoint(args.serve)
    if args.seconds != (args.reader_group is not None):
        raise ConfigurationError("--seconds", "and --reader-group are given together")
    if limit is not None and (args.watch or serve is not None):
        raise ConfigurationError("--max-lag", "is for one reading, without --watch and --serve")
    text, hub, options = connection_text(args), hub_name(args), connection_options(args)
    keep_quiet()

    async def work() -> int:
        reader = LagReader(
            text,
            hub,
            checkpoints=checkpoint_reader(args),
            consumer_group=args.consumer_group,
            rate=rate,
            reader_group=args.reader_group,
            **options,
        )
        async with reader:
            if serve is not None:
                return await _serve(reader, serve, interval)
            if args.watch:
                return await _watch(reader, interval, as_json=args.json)
            lag = await reader.read()
            show(lag, as_json=args.json)
            return FAILURE if limit is not None and _is_above(lag, limit) else 0

    try:
        return asyncio.run(work())
    except ConfigurationError as error:
        raise in_options(error, {"reader_group": "--reader-group"}) from None


def _endpoint(text: str) -> tuple[str, int]:
    address, colon, port = text.rpartition(":")
    if not colon:
        raise ConfigurationError("--serve", f"must be [ADDRESS]:PORT, such as :9108, not {excerpt(text)}")
    return address.strip("[]") or "127.0.0.1", whole_number("--serve", port, 0, 65535)


def _is_above(lag: GroupLag, limit: int) -> bool:
    if lag.unknown:
        complain(f"the lag of partitions {', '.join(lag.unknown)} is not known")
    elif lag.total > limit:
        complain(f"the lag is {lag.total:,}, above {limit:,}")
    return bool(lag.unknown) or lag.total > limit


# ---------------------------------------------------------------------------------------------------- what is shown


def show(lag: GroupLag, *, as_json: bool) -> None:
    """Print one reading."""
    if as_json:
        say(json.dumps(document(lag), ensure_ascii=False))
        return
    for line in lines(lag):
        say(line)


def lines(lag: GroupLag) -> list[str]:
    """Return a reading as a table, the sum and the notes."""
    has_seconds = any(each.seconds for each in lag.partitions)
    heads = ["partition", "first", "last", "checkpoint", "lag", "waits", "state", "age", "owner"]
    rows = [_row(each) for each in lag.partitions]
    if not has_seconds:
        at = heads.index("waits")
        heads.pop(at)
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    shown = table(heads, rows, ("state", "owner"))
    return [_title(lag), "", *shown, *(["", *(without_secrets(note) for note in lag.notes)] if lag.notes else [])]


def _title(lag: GroupLag) -> str:
    unknown = f", and unknown in partitions {', '.join(lag.unknown)}" if lag.unknown else ""
    place = f"hub {excerpt(lag.scope.hub)}, consumer group {excerpt(lag.scope.consumer_group)}"
    return f"{place}: {lag.total:,} events behind{unknown}"


def _row(each: PartitionProgress) -> list[str]:
    stored = each.checkpoint
    state = each.state.value if each.error is None else f"{each.state.value} (not read: {excerpt(each.error)})"
    if each.lost:
        state += f" ({each.lost:,} lost)"
    owner = ""
    if stored is not None and stored.is_owned:
        owner = excerpt(stored.owner or "?")
    number = each.sequence_number
    checkpoint = "" if number is None else f"{number:,}"
    if number is None and stored is not None and stored.offset is not None:
        checkpoint = f"offset {excerpt(stored.offset)}"
    return [
        each.partition_id,
        "" if each.first is None else f"{each.first:,}",
        "" if each.last is None or each.last < 0 else f"{each.last:,}",
        checkpoint,
        "?" if each.lag is None else f"{each.lag:,}",
        "" if each.seconds is None else duration(each.seconds),
        state,
        "" if each.checkpoint_age is None else duration(each.checkpoint_age),
        owner,
    ]


# ------------------------------------------------------------------------------------------- watching and serving


async def _results(reader: LagReader, interval: float, stop: asyncio.Event) -> AsyncGenerator[GroupLag, None]:
    """Return readings until the event is set."""
    readings = reader.watch(interval)
    ended = asyncio.create_task(stop.wait())
    try:
        while True:
            following = asyncio.ensure_future(anext(readings))
            try:
                await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
            if ended.done() or following.cancelled():
                return
            yield following.result()
    finally:
        ended.cancel()
        await readings.aclose()


async def _watch(reader: LagReader, interval: float, *, as_json: bool) -> int:
    is_live = not as_json and sys.stdout is not None and sys.stdout.isatty()
    with Interrupts(_GRACE) as interrupts:
        async with contextlib.aclosing(_results(reader, interval, interrupts.finish)) as results:
            async for lag in results:
                if as_json:
                    show(lag, as_json=True)
                    continue
                text = "\n".join(lines(lag))
                say(f"{_CLEAR}{text}" if is_live else f"{text}\n")
    return interrupts.exit_code


class Monitor:
    """The last reading, as a `HealthServer` reports it: it is too old to decide by after `limit` seconds."""

    def __init__(self, limit: float) -> None:
        self.newest: GroupLag | None = None
        self._limit = limit

    def health(self) -> Health:
        if self.newest is None:
            return Health(live=True, ready=False, reasons=("the lag was not read yet",))
        age = (datetime.now(UTC) - self.newest.read_at).total_seconds()
        reasons = () if age <= self._limit else (f"the lag was last read {age:.0f} s ago", *self.newest.notes)
        return Health(live=True, ready=not reasons, reasons=reasons)

    def metrics(self) -> Iterable[Metric]:
        return () if self.newest is None else metrics(self.newest, datetime.now(UTC))

    def behind(self) -> Mapping[str, Any] | None:
        return None if self.newest is None else document(self.newest)


async def _serve(reader: LagReader, endpoint: tuple[str, int], interval: float) -> int:
    monitor = Monitor(max(_TOO_OLD, 5 * interval))
    states: dict[str, LagState] = {}
    with Interrupts(_GRACE) as interrupts:
        async with HealthServer(monitor, address=endpoint[0], port=endpoint[1]) as server:
            say(f"serving {server.url}/metrics and {server.url}/lag.json")
            async with contextlib.aclosing(_results(reader, interval, interrupts.finish)) as results:
                async for lag in results:
                    if monitor.newest is None:
                        say(_title(lag))
                    monitor.newest = lag
                    _report_changes(states, lag.partitions)
    return interrupts.exit_code


def _report_changes(states: dict[str, LagState], partitions: Sequence[PartitionProgress]) -> None:
    """Print a line for each partition that is in a new state which needs attention."""
    watched = {LagState.BEYOND_END, LagState.EXPIRED, LagState.STALLED}
    for each in partitions:
        if each.state in watched and states.get(each.partition_id) is not each.state:
            complain(f"partition {each.partition_id}: {each.state.value}, lag {'?' if each.lag is None else each.lag}")
        states[each.partition_id] = each.state
